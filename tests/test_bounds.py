"""Bounds on what a file that came from elsewhere may take, and code that never runs."""

import gzip
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import kdjax
from kdjax.commands import generate
from kdjax.errors import MissingFileError, UserError
from kdjax.evaluation import problems
from kdjax.export import headers
from kdjax.formats import open_table
from kdjax.formats.table import TensorTable
from kdjax.hub import MODEL, fetch_path
from kdjax.models import templates
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.templates import render_template
from kdjax.models.tokenizer import load_tokenizer

FOLDER = Path(kdjax.__file__).parent / "demo" / "student"  # a config and a tokenizer
ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_templates_render_as_before():
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
    assert render_template(text, ASKED, {"eos_token": "!"}).text == "<user>hello!"
    worker = templates._workers[os.getpid()]
    assert render_template(text, [], {"eos_token": "?"}).text == "?"
    assert templates._workers[os.getpid()] is worker  # one process for all


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system turn') }}", "refuses the messages: TemplateError: no sys"),
        ("{{ 1 / 0 }}", "refuses the messages: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "refuses the messages: TypeError"),
        ("{{ messages[0].content.index('x') }}", "refuses the messages: ValueError"),
        ("{% for", "refuses the messages: TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages: SecurityError"),
        ("{{ 'a' * 9**9 * 99 }}", "takes more than 1,024 MiB of memory"),
        ("{{ 'a' * 2**22 }}", "takes 4,194,304 characters"),
    ],
)
def test_whatever_a_template_raises_is_one_message(template, message):
    """Python's own errors ended in a traceback, also of `train`."""
    with pytest.raises(UserError) as raised:
        render_template(template, ASKED, {})
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_template_that_does_not_end_is_ended(tmp_path, monkeypatch):
    """By a worker that allows a second in place of ten."""
    worker = Path(templates.__file__).with_name("template_worker.py").read_text()
    assert worker.count("\nSECONDS = 10 ") == 1
    quick = worker.replace("\nSECONDS = 10 ", "\nSECONDS = 1 ")
    (tmp_path / "template_worker.py").write_text(quick)
    monkeypatch.setattr(templates, "__file__", str(tmp_path / "templates.py"))
    monkeypatch.setattr(templates, "_workers", {})
    many = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match="takes more than 10 s"):
        render_template(many, ASKED, {})
    assert render_template("{{ messages|length }}", ASKED, {}).text == "1"  # by another process


def test_a_tokenizer_asks_nobody_whether_to_run_its_code(folder, monkeypatch):
    """Transformers asks on standard input, and ran the folder's Python after a `y`."""
    mark = folder / "ran"
    code = f"open({str(mark)!r}, 'w').close()\nclass Mine: pass\n"
    (folder / "code.py").write_text(code)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Mine", "code.Mine"]})
    change(folder / "tokenizer_config.json", tokenizer_class="Mine")
    change(folder / "config.json", model_type="mine", auto_map={"AutoConfig": "code.Mine"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    try:
        load_tokenizer(folder)
    except UserError as error:
        assert "\n" not in str(error)
    assert not mark.exists() and sys.stdin.read() == "y\n" * 9


@pytest.mark.parametrize("module", ["{}/elsewhere", "../elsewhere", "sub/elsewhere", "..", ""])
def test_code_from_elsewhere_is_never_copied(tmp_path, module):
    """An absolute path copied any `.py` of the machine into an export."""
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for place in (tmp_path, model / "sub", model):
        (place / "elsewhere.py").write_text("")
    named = {"AutoModel": f"{module.format(tmp_path)}.Model"}
    source = TensorTable((model / "config.json",), {"auto_map": named}, {})
    assert not all(headers._is_beside(path, source) for path in headers.list_code(source))
    own = TensorTable((model / "config.json",), {"auto_map": {"AutoModel": "elsewhere.M"}}, {})
    assert all(headers._is_beside(path, own) for path in headers.list_code(own))


def test_an_id_far_beyond_the_others_takes_no_memory(folder):
    """A list of all ids below it was made: 4 GB for 1e8."""
    described = json.loads((folder / "tokenizer.json").read_text())
    described["model"]["vocab"]["far"] = 10**8
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"no token with id \d+, and one with id 100000000"):
        load_tokenizer(folder)


def test_a_small_file_does_not_unpack_into_all_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "MOST_UNPACKED", 1 << 20)
    (tmp_path / "h.jsonl.gz").write_bytes(gzip.compress(bytes(1 << 21)))
    with pytest.raises(UserError, match="found more than 1 MiB of problems"):
        problems.load_humaneval(tmp_path / "h.jsonl.gz")


def test_a_pipe_is_no_model(tmp_path):
    """Opening one waited for ever."""
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(UserError, match="found a pipe, socket or device"):
        open_table(tmp_path / "model.gguf")


def test_adapters_that_name_each_other_are_refused(tmp_path):
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        config = {"base_model_name_or_path": str(tmp_path / base), "peft_type": "LORA"}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="found adapters that name each other"):
        open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("path", ["hf:../..", "hf:a/..", "hf:a/b/../../c", "hf:-a/b", "hf:a/b--c"])
def test_paths_that_the_hub_cannot_have_are_refused(path):
    with pytest.raises(UserError, match="expected hf:ORG/REPO") as raised:
        fetch_path(path, MODEL)
    assert not isinstance(raised.value, MissingFileError)


def test_a_prompt_that_is_no_utf8_is_refused(monkeypatch):
    """It was a traceback and status 1, by flag and by standard input."""
    assert generate._read_prompt("café") == "café"
    with pytest.raises(UserError, match="found bytes that are not UTF-8"):
        generate._read_prompt(os.fsdecode(b"caf\xe9"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("café".encode())))
    assert generate._read_prompt("-") == "café"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    with pytest.raises(UserError, match="found bytes that are not UTF-8"):
        generate._read_prompt("-")
