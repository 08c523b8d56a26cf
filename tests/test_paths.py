"""Paths with every character that a file system takes: each command works, or refuses at once."""

import os
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_tiny_config
from test_run import REPOSITORY, command

import kdjax
from kdjax.commands import cli, parsing
from kdjax.data.sources import find_files
from kdjax.demo import STUDENT
from kdjax.errors import BAD_INPUT, FINISHED, UserError
from kdjax.formats.saved import find_damage, saved_params
from kdjax.models.checkpoint import ModelArgument
from kdjax.training.saving import Checkpoints
from kdjax.training.step import TrainState
from kdjax.watch.run import distill
from scripts.bench.synthetic import write_tiny_pair

pytestmark = pytest.mark.usefixtures("one_device")

# Each means more in a URL, a pattern, a shell, HTML or a list.
NAMES = (
    "a#b",
    "a?b",
    "%41",
    "run[1]",
    "[!x]*",
    " two  spaces ",
    "übung-漢字",
    "new\nline",
    "~",
    "$HOME;`'\"&|<b>",
    "a:b,{c}",
    "@q4k",
    "a.orbax-checkpoint-tmp",
)
ALL = "#?%41[1]*{x} ü漢\n~$`'\"&<b>:,@q4k"
NEVER = ("back\\slash", "latin-\udce9")  # TensorStore takes neither


def a_state():
    return TrainState(jnp.int32(3), {"embed": jnp.arange(8.0)}, {"mu": jnp.ones(2)})


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_back_from_any_folder(name, tmp_path):
    state, place = a_state(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for folder, asynchronous in ((tmp_path / name, False), (tmp_path / "x" / name, True)):
        with Checkpoints(folder, 2, asynchronous=asynchronous) as checkpoints:
            checkpoints.save(state, {"a": 1})
        assert find_damage(folder, 3) is None
        ((found, array),) = saved_params(folder, 3)
        assert found == "embed" and array.tolist() == list(range(8))
        with Checkpoints(folder, 2) as checkpoints:
            assert checkpoints.latest() == 3
            restored = checkpoints.restore(3, state, jax.tree.map(lambda _: place, state))
        np.testing.assert_array_equal(restored.params["embed"], np.arange(8.0))
    assert {path.name for path in tmp_path.iterdir()} == {name, "x"}  # and nothing elsewhere


@pytest.mark.parametrize("name", NEVER)
def test_a_folder_that_cannot_hold_steps_is_refused_at_once(name, tiny_config, tmp_path, capsys):
    said = "cannot hold checkpoints; expected a path of UTF-8 without \\. Rename"
    tiny_config.teacher.path = str(tmp_path / "none.gguf")
    with pytest.raises(UserError, match=re.escape(said)):
        distill(tiny_config, tmp_path / name / "run")
    with pytest.raises(UserError, match=re.escape(said)):
        kdjax.save_state(tmp_path / name, a_state())
    assert not (tmp_path / name).exists()
    assert cli.main(["train", *command(tiny_config, tmp_path / name)[3:]]) == BAD_INPUT
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert said in printed or "expected UTF-8: rename the file" in printed
    Checkpoints(tmp_path / "run", 2, asynchronous=False).save(a_state(), {})
    (tmp_path / "run").rename(tmp_path / name)
    with pytest.raises(UserError, match=re.escape(said)):
        list(saved_params(tmp_path / name, 3))


def test_a_name_that_the_locale_cannot_spell_is_told_of_the_locale():
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name, said in (
        (b"\xc3\xa9.gguf", "in a locale of ascii; expected one of UTF-8: set LC_ALL=C.UTF-8, or"),
        (b"\xe9.gguf", "; expected UTF-8: rename the file or folder."),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kdjax", "evaluate", name],
            cwd=REPOSITORY,
            env=os.environ | plain,
            capture_output=True,
            text=True,
        )
        assert done.returncode == BAD_INPUT and done.stderr.count("\n") == 1
        assert said in done.stderr


@pytest.mark.parametrize("name", [*NAMES, ALL])
def test_text_is_found_by_its_name_before_it_is_a_pattern(name, tmp_path, monkeypatch):
    for folder in (name, "run1", "A", "x"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    patterns = [f"./{name}", str(tmp_path / name)]
    patterns += [f"./{name}/*.txt"] if "," not in name else []  # parts are joined by commas
    for pattern in patterns:
        (file,) = find_files(pattern)
        assert file.parent.name == name
    assert [file.parent.name for file in find_files("run[0-9]/*.txt,x/*")] == ["run1", "x"]


def test_a_model_and_a_config_are_found_by_their_names(tmp_path, monkeypatch):
    (tmp_path / "m@q4k.gguf").touch()
    assert ModelArgument.parse(str(tmp_path / "m@q4k.gguf")).path == str(tmp_path / "m@q4k.gguf")
    (tmp_path / "a:b.py").write_text("from kdjax import Config\nget_config = Config\n")
    assert parsing.load_config(str(tmp_path / "a:b.py"))[1] == "a:b"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A config whose models, text and rows lie in folders of that name, and their folder."""
    folder = tmp_path_factory.mktemp("paths") / ALL
    models, text = folder / f"m{ALL}", folder / f"t{ALL}"
    models.mkdir(parents=True)
    write_tiny_pair(models)
    config = make_tiny_config(models, folder)
    (folder / "text").rename(text)
    config.data.train, config.data.cache_dir = str(text), str(folder / f"r{ALL}")
    config.log.tensorboard, config.eval.samples = True, 1
    config.train.compute_dtype = "auto"
    return config, folder


def run_kdjax(*arguments):
    assert cli.main([str(argument) for argument in arguments]) == FINISHED


@pytest.mark.slow
def test_every_command_takes_any_path(hostile, drawing, capsys, caplog, monkeypatch):
    config, folder = hostile
    workdir = folder / f"w{ALL}"
    assert distill(config, workdir, on_step=lambda record: record.step == 5) == "interrupted"
    run = command(config, workdir)[3:]
    run_kdjax("train", *run)
    printed = capsys.readouterr()
    resumed = re.escape(f"resuming {workdir} from step ")  # a hook is told of a step in the next
    assert re.search(rf"{resumed}6 of 10, saved 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\n", printed.err)
    for name in ("report.html", "samples.json", "metrics.jsonl", "tensorboard"):
        assert (workdir / name).exists(), name
    named = printed.out.partition("\nnext:\n")[2]
    commands = [shlex.split(line) for line in re.split(r"\n(?=  kdjax )", f"\n{named}")[1:]]
    assert [words[1] for words in commands] == ["generate", "export", "verify"]
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        for words in commands:
            run_kdjax(*words[1:])
    shown = capsys.readouterr().out
    assert shown.count("ok    ") == 9 and (folder / f"w{ALL}.gguf").exists()
    run_kdjax("report", workdir, f"--out={folder / f'p{ALL}.html'}")
    models = folder / f"{ALL}.gguf", folder / f"hf{ALL}", folder / f"{ALL}.apr"
    for kind, out in zip(("gguf", "hf", "apr"), models, strict=True):
        run_kdjax("export", workdir, f"--format={kind}", f"--out={out}")
    for model in (*models[:2], workdir / "checkpoints" / "10"):
        run_kdjax("generate", model, "--prompt=a", "--max-tokens=2")
    run_kdjax("cache", run[0], *run[2:], f"--out={folder / f'c{ALL}'}", "--k=4")
    config.teacher.cache = str(folder / f"c{ALL}")
    run_kdjax("train", *command(config, folder / "cached [1]#")[3:])


def test_a_link_to_itself_has_one_line(tmp_path, capsys):
    (link := tmp_path / "link").symlink_to(link)
    for argv, message in (
        (["train", "--config=demo", f"--workdir={link}"], "link is no folder. Give a folder you"),
        (["report", str(link)], "link: no such folder; expected the --workdir of a run."),
        (["verify", str(link)], "link/receipt.json: Too many levels of symbolic links"),
    ):
        assert cli.main(argv) == BAD_INPUT
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == 1
    (prompts := tmp_path / "q").mkdir()
    (prompts / "a.txt").write_text("One day, Lily went out.")
    argv = ["answers", str(STUDENT), f"--prompts={prompts}", f"--out={link}", "--max-tokens=1"]
    assert cli.main(argv) == FINISHED and link.is_file() and not link.is_symlink()
