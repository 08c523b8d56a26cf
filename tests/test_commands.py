"""The command line: one form of help and of errors, configs by name, what is missing, the wheel."""

import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kdjax import config as config_module
from kdjax.commands import cli, parsing
from kdjax.config import Config, flatten, validate
from kdjax.data.text import find_files
from kdjax.errors import (
    BAD_INPUT,
    CHECK_FAILED,
    FINISHED,
    NOT_WRITTEN,
    QUIT,
    STATUSES,
    CheckError,
    MissingFileError,
    UserError,
    reporting,
    status_of,
)
from kdjax.training.job import ask_kinds

REPOSITORY = Path(__file__).parent.parent


def error_of(capsys, *arguments):
    """What `kdjax ARGUMENTS` says about bad input."""
    assert cli.main([str(a) for a in arguments]) == BAD_INPUT
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and "Traceback" not in printed
    return printed


# --- help and statuses --------------------------------------------------------------------------


def test_help_lists_every_command_and_status(capsys):
    assert cli.main(["--help"]) == cli.main([]) == FINISHED
    shown = capsys.readouterr().out
    for name, line in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", shown, re.M)
    for status, line in STATUSES.items():
        assert re.search(rf"^ +{status}  {re.escape(line)}$", shown, re.M)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_teaches(name, capsys):
    """A purpose, an example that names the command, every flag with a help, exit statuses."""
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == FINISHED
    shown = capsys.readouterr().out
    assert f"\n    kdjax {name} " in shown
    assert f"  {QUIT:>3}  {STATUSES[QUIT]}" in shown
    flags = re.findall(r"^  (--[a-z-]+)(?: \S+)?(.*)\n(.*)", shown, re.M)
    for flag, beside, below in flags:
        assert beside.strip() or below.startswith(" " * 20), f"{flag} has no help"
    if name in ("train", "plan", "cache"):
        for field in flatten(Config()):
            assert f"\n  {field}=" in shown


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("main", "train"),
        pytest.param("cache_teacher", "cache", marks=pytest.mark.slow),
        pytest.param("export", "export", marks=pytest.mark.slow),
    ],
)
def test_the_old_names_are_the_same_commands(old, name):
    command = [sys.executable, "-m", f"kdjax.{old}", "--no"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == BAD_INPUT and done.stderr.startswith("error: ")
    assert f"kdjax {name} --help" in done.stderr


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("no"), BAD_INPUT, "error: no"),
        (CheckError("differs"), CHECK_FAILED, "error: differs"),
        (MissingFileError("gone"), BAD_INPUT, "error: gone"),
        (PermissionError(13, "Permission denied", "a/b"), BAD_INPUT, "error: a/b: Permission"),
        (OSError(28, "No space left on device"), NOT_WRITTEN, "error: No space left"),
        (KeyboardInterrupt(), QUIT, "stopped"),
    ],
)
def test_what_ends_a_command_is_one_line_and_a_status(error, status, line, capsys):
    @reporting
    def body():
        raise error

    assert body() == status_of(error) == status
    assert capsys.readouterr().err.startswith(line)


def test_a_bug_keeps_its_traceback():
    @reporting
    def body():
        raise KeyError("x")

    with pytest.raises(KeyError):
        body()


# --- mistyped names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "trian: no such command. Did you mean train?"),
        (["evaluate", "x", "--jsn=y"], "--jsn=y. Did you mean --json?"),
        (["train", "--config=demo", "--workdri=x"], "Did you mean --workdir?"),
        (["train", "--config=dmo"], "demo, demo_student, demo_teacher.* Did you mean demo?"),
        (
            ["train", "--config=demo:x"],
            "configs/demo.py:x: no such kind; expected one of 'bas",
        ),
        (["train", "--config=demo_teacher:x"], "takes 0 positional arguments"),
        (["train"], "--config is missing: a file, or one of demo, "),
        (
            ["train", "--config=demo", "--config.optim.learnin_rate=1"],
            "no such field. Did you mean --config.optim.learning_rate?",
        ),
        (["train", "--config=demo", "--config.optm.eps=1"], "Did you mean --config.optim.eps?"),
        (["train", "--config=demo", "--config.optim.lr=1"], "fields of optim are optim.learning_"),
        (["train", "--config=demo", "--config.optim=1"], "is a section; set a field of it: optim"),
        (["train", "--config=demo", "--config.train.steps=x"], "--config.train.steps=x: invalid"),
        (["cache", "--config=demo", "--out=x", "extra"], "unrecognized arguments: extra"),
        (["verify", "nowhere"], "nowhere/receipt.json: no such file"),
    ],
)
def test_mistyped_names_are_corrected(arguments, message, capsys):
    assert re.search(message.replace("?", r"\?"), error_of(capsys, *arguments))


# --- configs ------------------------------------------------------------------------------------


def run_of(*arguments):
    return parsing.parse_run(parsing.run_parser("train", "help"), [*arguments])


def test_overrides_are_read_as_the_field_s_type():
    run = run_of(
        "--config=demo",
        "--config.train.steps=50",
        "--config.optim.eps",
        "1e-9",
        "--config.log.tensorboard=True",
        "--config.mesh.data",
        "-1",
        "--noconfig.teacher.allow_degenerate",
    )
    changed = {
        k: v
        for k, v in flatten(run.config).items()
        if v != flatten(run_of("--config=demo").config)[k]
    }
    assert changed == {"train.steps": 50, "optim.eps": 1e-9, "log.tensorboard": True}


def test_a_name_is_a_file_that_comes_with_kdjax(monkeypatch, tmp_path):
    assert set(parsing.shipped()) == {p.stem for p in (REPOSITORY / "configs").glob("[!_]*.py")}
    assert run_of("--config=demo:baseline").name == "demo-baseline"
    assert run_of("--config=demo:baseline").config == run_of("--config=configs/demo.py:baseline")[1]
    monkeypatch.chdir(tmp_path)
    assert run_of("--config=demo").config.train.steps == 350
    (tmp_path / "mine.py").write_text("import os\n\n\ndef get_config():\n    1 / 0\n")
    with pytest.raises(UserError, match=r"mine.py:5: ZeroDivisionError: division by zero"):
        run_of("--config=mine.py")
    (tmp_path / "mine.py").write_text("def get_config():\n    return {}\n")
    with pytest.raises(UserError, match=r"returned {}; expected a kdjax Config"):
        run_of("--config=mine.py")


def test_the_environment_is_in_the_config(monkeypatch):
    monkeypatch.setenv("KDJAX_TEACHER_BACKEND", "q4k")
    assert run_of("--config=demo").config.teacher.backend == "q4k"
    monkeypatch.setenv("KDJAX_TEACHER_BACKEND", "cuda")
    with pytest.raises(UserError, match=r"BACKEND='cuda': must be one of auto, dequant"):
        run_of("--config=demo")


def test_a_backend_that_would_be_ignored_is_refused(tmp_path):
    """Beside a cache, and under the name that it had in the earlier system."""
    config = Config()
    config.teacher.path, config.teacher.cache = "teacher.gguf", str(tmp_path)
    parsing.apply_environment(config, {"KDJAX_TEACHER_BACKEND": "q4k"})
    with pytest.raises(UserError, match=r"with the teacher backend 'q4k' .*KDJAX_TEACHER_BACKEND"):
        ask_kinds(config)
    names = {"cublas": "dequant", "realizar": "q4k", "auto": "auto", "else": "auto"}
    for old, new in names.items():
        with pytest.raises(UserError) as error:
            parsing.apply_environment(config, {"APR_DISTILL_TEACHER_BACKEND": old})
        assert f"Set KDJAX_TEACHER_BACKEND={new} in its place" in str(error.value)
        assert "one of auto, dequant, q4k" in str(error.value)
    both = {"APR_DISTILL_TEACHER_BACKEND": "cublas", "KDJAX_TEACHER_BACKEND": "dequant"}
    parsing.apply_environment(config, both)
    assert config.teacher.backend == "dequant"


def test_what_the_shipped_configs_train_with():
    def settings(name):
        config = parsing.load_config(name)[0]
        validate(config)
        return (
            config.loss.temperature,
            config.loss.alpha,
            config.optim.learning_rate,
            config.optim.final_learning_rate,
            config.optim.warmup_steps,
        )

    assert settings("qwen7b_0p5b") == settings("qwen1p5b_0p5b") == (1.0, 0.0, 1e-5, 1e-6, 50)
    assert settings("qwen7b_0p5b:reference") == (4.0, 0.3, 1.5e-5, 5e-7, 20)
    assert settings("qwen7b_0p5b:tiny") == (4.0, 0.3, 1e-3, 5e-7, 2)
    for name in ("qwen7b_0p5b", "qwen1p5b_0p5b", "onpolicy_1p5b_0p5b", "draft_1p5b_0p5b"):
        settings(f"{name}:tiny")
        with pytest.raises(UserError, match=f"configs/{name}.py:huge: no such kind; .*'tiny'"):
            parsing.load_config(f"{name}:huge")


def test_missing_files_are_named_together_each_with_what_gets_it(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    printed = error_of(capsys, "train", "--config=qwen7b_0p5b")  # without a network
    for size in ("7b", "0.5b"):
        file = f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
        assert f"hf:Qwen/Qwen2.5-Coder-{size.upper()}-Instruct-GGUF/{file}: https://" in printed
        assert f"Without one, put it at models/{file}, or set" in printed
    assert "data" not in printed  # the packages of the text come with kdjax
    assert not list(tmp_path.iterdir())
    text = "--config.data.train=text", "--config.data.heldout=text"
    printed = error_of(capsys, "train", "--config=qwen7b_0p5b", *text)
    assert f"{', '.join(text)}\n    text: no file found" in printed
    mine = "--config.student.path=qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    printed = error_of(capsys, "plan", "--config=qwen7b_0p5b", *text, mine)
    assert f"{mine}\n    qwen2.5-coder-0.5b" in printed and "`hf download Qwen/" in printed
    assert "data" not in printed
    printed = error_of(capsys, "train", "--config=onpolicy_1p5b_0p5b")
    assert "--config.rollout.prompts=runs/prompts/prompts.jsonl\n    in a clone" in printed
    printed = error_of(capsys, "train", "--config=qwen7b_0p5b:tiny")
    assert printed.count("python3 -m scripts.bench.random_gguf") == 2


def test_the_text_of_the_shipped_configs_is_there(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("qwen7b_0p5b", "qwen1p5b_0p5b", "draft_1p5b_0p5b"):
        data = parsing.load_config(name)[0].data
        train, heldout = find_files(data.train), find_files(data.heldout)
        assert len(train) > 1000 and len(heldout) > 100 and not set(train) & set(heldout)


# --- documents and the wheel --------------------------------------------------------------------


def test_every_field_is_described_where_it_is_defined():
    described = parsing.describe_fields()
    names = [f"{section}.{name}" for section, fields in described.items() for name in fields]
    assert names == list(flatten(Config()))
    for section, fields in described.items():
        for name, (default, text) in fields.items():
            assert eval(default) == flatten(Config())[f"{section}.{name}"]
            assert text, f"{section}.{name} has no comment in kdjax/config.py"


def test_the_page_of_settings_is_config_py():
    """A failure shows the table that the page lacks."""
    page = (REPOSITORY / "docs" / "settings.md").read_text()
    for section, fields in parsing.describe_fields().items():
        kind = next(f for f in dataclasses.fields(Config) if f.name == section).default_factory
        purpose = inspect.getdoc(kind)
        rows = [
            f"| `{name}` | `{default}` | {text.replace('|', chr(92) + '|')} |"
            for name, (default, text) in fields.items()
        ]
        table = "\n".join(
            [
                f"## `{section}`",
                "",
                purpose,
                "",
                "| field | default | meaning |",
                "| --- | --- | --- |",
                *rows,
                "",
            ]
        )
        assert table in page, table


def test_the_page_of_commands_has_every_command_and_status():
    page = (REPOSITORY / "docs" / "commands.md").read_text()
    for name, line in cli.COMMANDS.items():
        assert f"| `kdjax {name}` | {line} |" in page
    for status, line in STATUSES.items():
        assert f"| {status} | {line} |" in page
    for name in ("KDJAX_TEACHER_BACKEND", "KDJAX_ALLOW_DEGENERATE_KD", "MANAGED_MEMORY"):
        assert f"`{name}" in page


def test_the_wheel_has_every_package_and_the_configs():
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    folders = {p.parent.relative_to(REPOSITORY) for p in REPOSITORY.glob("kdjax/**/*.py")}
    packages = {".".join(folder.parts) for folder in folders}
    assert set(setuptools["packages"]) == packages | {"kdjax.configs"}
    assert setuptools["package-dir"] == {"kdjax.configs": "configs"}
    for package, patterns in setuptools["package-data"].items():
        for pattern in patterns:
            assert list((REPOSITORY / package.replace(".", "/")).glob(pattern)), pattern


# --- the config's own errors --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.temperature": 0.0}, r"loss.temperature=0.0: must be greater than 0"),
        ({"loss.temperature": -1.0}, r"loss.temperature=-1.0"),
        ({"loss.alpha": 1.5}, r"loss.alpha=1.5: must be between 0 and 1"),
        ({"loss.alpha": -0.1, "train.steps": 0}, r"(?s)loss.alpha=-0.1.*train.steps=0"),
        ({"train.microbatches": 3}, r"train.batch_size=8: must be divisible by .*=3"),
        ({"optim.warmup_steps": 10}, r"optim.warmup_steps=10: must be less than train.steps=10"),
        ({"optim.final_learning_rate": 1.0}, r"must not exceed optim.learning_rate"),
        ({"teacher.backend": "gpu"}, r"teacher.backend='gpu': must be one of auto, dequant"),
        ({"data.train": ""}, r"data.train='': must be set"),
        ({"smoke.steps": -1}, r"smoke.steps=-1: must be 0 or more"),
        ({"smoke.steps": 11}, r"smoke.steps=11: must not exceed train.steps=10"),
    ],
)
def test_config_errors_name_field_value_and_remedy(tiny_config, changes, message):
    for field, value in changes.items():
        section, name = field.split(".")
        setattr(getattr(tiny_config, section), name, value)
    with pytest.raises(UserError, match=message):
        validate(tiny_config)


def test_every_field_has_a_rule_or_is_free():
    free = {
        "teacher.path",
        "teacher.cache",
        "teacher.allow_degenerate",
        "data.heldout",
        "data.end_of_document",
        "data.parse_special",
        "data.tokenizer",
        "data.cache_dir",
        "rollout.prompts",
        "rollout.train_cut",
        "rollout.allow_other_template",
        "train.seed",
        "log.tensorboard",
        "log.wandb_project",
    }
    assert set(flatten(Config())) == free | set(config_module._RULES)
