"""The command line: one form of help and of errors, configs by name, what is missing, the wheel."""

import dataclasses
import gc
import inspect
import logging
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from kdjax import config as config_module
from kdjax.commands import cli, generate, parsing, train
from kdjax.config import CONFLICTS, Config, flatten, settle_dtype, validate
from kdjax.data.sources import find_files
from kdjax.errors import (
    BAD_INPUT,
    CHECK_FAILED,
    COLLAPSED,
    FINISHED,
    INTERRUPTED,
    NOT_FINITE,
    NOT_WRITTEN,
    PEER_LOST,
    QUIT,
    SMOKE_FAILED,
    STATUSES,
    CheckError,
    MissingFileError,
    UserError,
    reporting,
    status_of,
)

REPOSITORY = Path(__file__).parent.parent


def error_of(capsys, *arguments):
    """Message of `kdjax ARGUMENTS` about bad input, behind lines of its log."""
    assert cli.main([str(a) for a in arguments]) == BAD_INPUT
    printed = re.sub(r"(?m)^\d\d:\d\d:\d\d .*\n", "", capsys.readouterr().err)
    assert printed.startswith("error: ") and "Traceback" not in printed
    return printed


@pytest.mark.parametrize(
    "command, flag",
    [
        (["shrink", "m.gguf", "--out=a.gguf", "--size=1GB", "--size=2GB"], "--size"),
        (["train", "--config=demo", "--workdir=a", "--workdir", "b"], "--workdir"),
        (["train", "--config=demo", "--config=demo:lora"], "--config"),
        (["evaluate", "m.gguf", "--draft", "--draft=own"], "--draft"),
        (["cache", "--clear=rows", "--clear"], "--clear"),
    ],
)
def test_a_flag_of_one_value_is_refused_twice(capsys, command, flag):
    assert f"error: found {flag} twice; expected one value." in error_of(capsys, *command)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["data", "demo", "--config=demo_teacher"], "--config: not allowed with argument CONFIG"),
        (["data", "--config=demo_teacher", "demo"], "CONFIG: not allowed with argument --config"),
        (["train", "demo"], "found demo without a flag; expected --config=demo."),
        (["plan", "demo:lora"], "found demo:lora without a flag; expected --config=demo:lora."),
        (["train", "mine.py", "--workdir=a"], "expected --config=mine.py."),
        (["train", "mine"], "unrecognized arguments: mine."),
    ],
)
def test_a_config_has_one_place(capsys, argv, message):
    assert message in error_of(capsys, *argv)


def test_flags_of_several_values_and_settings_may_repeat():
    parser = parsing.Parser("generate", None)
    parser.add_argument("model")
    parser.add_argument("--stop", action="append")
    parser.add_argument("--seed", type=int)
    assert parser.parse_args(["m", "--stop=b", "--stop=c"]).stop == ["b", "c"]
    assert parser.parse_args(["--seed=1", "--", "--seed=2"]).model == "--seed=2"
    argv = ["--config=demo", "--config.train.steps=40", "--config.train.steps=50"]
    run = parsing.parse_run(parsing.run_parser("train", "Trains."), argv)
    assert run.config.train.steps == 50


# --- help and statuses --------------------------------------------------------------------------


def test_help_lists_every_command_and_status(capsys):
    assert cli.main(["--help"]) == cli.main([]) == FINISHED
    shown = capsys.readouterr().out
    for name, line in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", shown, re.M)
    for status, line in STATUSES.items():
        assert re.search(rf"^ +{status}  {re.escape(line)}$", shown, re.M)


DEFAULTS = {
    "cache": {"--kind": "topk"},
    "evaluate": {"--rows": "64", "--seq-len": "1024", "--limit": "0", "--batch-size": "8"},
    "generate": {"--top-p": "1", "--max-tokens": "256", "--draft-p-min": "0"},
    "shrink": {"--steps": "600", "--seconds": "0"},
    "answers": {"--max-tokens": "512", "--batch-size": "64"},
    "plan": {"--devices": "1"},
}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_teaches(name, capsys):
    """A purpose, an example that names the command, every flag with a help, exit statuses."""
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == FINISHED
    shown = capsys.readouterr().out
    assert f"\n    kdjax {name} " in shown
    assert f"  {QUIT:>3}  {STATUSES[QUIT]}" in shown
    assert f"  {FINISHED:>3}  {parsing.FINISHES[name]}\n" in shown
    flags = re.findall(r"^  (--[a-z-]+)(?: \S+)?(.*)\n(.*)", shown, re.M)
    for flag, beside, below in flags:
        assert beside.strip() or below.startswith(" " * 20), f"{flag} has no help"
    for flag, default in DEFAULTS.get(name, {}).items():
        about = re.search(rf"^  {flag}\b(.*(?:\n {{20}}.*)*)", shown, re.M)
        assert about and default in about[1].split("default")[-1], flag
    if name in ("train", "plan", "cache"):
        for field in flatten(Config()):
            assert f"\n  {field}=" in shown


def test_the_first_commands_begin_stories_as_the_demo_reads_them():
    """The demo's models have read stories alone: code would show nothing of them."""
    suggested = train.list_next(Config(), Path("runs/demo"))
    assert f"  kdjax generate runs/demo {parsing.PROMPT}" in suggested
    assert "runs/demo --prompt='One day, Lily'" in generate.__doc__
    for shown in (*suggested, generate.__doc__):
        assert "import" not in shown


@pytest.mark.parametrize("name", ["train", "draft"])
def test_a_run_lists_how_it_may_end(name, capsys):
    """By damage of its checkpoint, or as training makes the student worse."""
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    for status in (SMOKE_FAILED, NOT_FINITE, CHECK_FAILED, COLLAPSED, PEER_LOST, INTERRUPTED):
        assert f"  {status:>3}  {STATUSES[status]}" in shown


def test_auto_computes_in_float32_on_a_cpu():
    for platform, dtype in (("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")):
        assert settle_dtype(Config(), platform).train.compute_dtype == dtype
    config = Config()
    config.train.compute_dtype = "bfloat16"
    assert settle_dtype(config, "cpu") is config


@pytest.mark.slow
def test_the_old_name_of_train_is_the_same_command():
    command = [sys.executable, "-m", "kdjax.main", "--no"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == BAD_INPUT and done.stderr.startswith("error: ")
    assert "kdjax train --help" in done.stderr


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("no"), BAD_INPUT, "error: no"),
        (CheckError("differs"), CHECK_FAILED, "error: differs"),
        (MissingFileError("gone"), BAD_INPUT, "error: gone"),
        (PermissionError(13, "Permission denied", "a/b"), BAD_INPUT, "error: a/b: Permission"),
        (OSError(28, "No space left on device"), NOT_WRITTEN, "error: No space left"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nAt:"),
            BAD_INPUT,
            "error: the device's memory: Out of memory allocating 9 bytes",
        ),
        (KeyboardInterrupt(), QUIT, "stopped"),
    ],
)
def test_what_ends_a_command_is_one_line_and_a_status(error, status, line, capsys):
    @reporting
    def body():
        raise error

    assert body() == status_of(error) == status
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("INTERNAL: x")])
def test_a_bug_keeps_its_traceback(error):
    @reporting
    def body():
        raise error

    with pytest.raises(type(error)):
        body()


def test_a_device_without_room_is_told_so(capsys):
    @reporting
    def body():
        jax.numpy.zeros(1 << 50, jax.numpy.float32).block_until_ready()
        return 0

    assert body() == BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith("error: the device's memory: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "no room"),
        (
            MemoryError("Unable to allocate 745. GiB for an array"),
            "Unable to allocate 745. GiB for",
        ),
    ],
)
def test_a_machine_without_memory_ends_a_command_with_one_line(error, told, capsys):
    @reporting
    def body():
        raise error

    assert body() == BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith(f"error: this machine's memory: {told}") and said.count("\n") == 1
    assert "(--batch-size, --microbatches, train.microbatches)" in said


def test_code_that_a_model_wrote_brings_no_remarks_of_python(capfd):
    program = "import ast; from kdjax.errors import reporting\n@reporting\ndef body():\n    "
    program += "ast.parse('1and 2'); return 0\nbody()"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert capfd.readouterr().err == ""
    if sys.version_info >= (3, 12):  # Python 3.11 keeps such remarks to itself
        subprocess.run([sys.executable, "-c", program.replace("@reporting", "")], check=True)
        assert "SyntaxWarning" in capfd.readouterr().err


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
        (["train", "--config=demo", "--config.optim.lr=1"], "fields of optim are optim.name, opt"),
        (["train", "--config=demo", "--config.optim=1"], "is a section; set a field of it: optim"),
        (["generate", "x", "--bogus"], "unrecognized arguments: --bogus. `kdjax"),
        (["generate", "x", "--promt=y"], "--promt=y. Did you mean --prompt?"),
        (["generate", "--promt=y z", "x"], "--promt=y z. Did you mean --prompt?"),
        (["generate", "x"], "the following arguments are required: --prompt"),
        # A part of a flag's name is no flag, alone, beside a config and where another is missing.
        (["generate", "x", "--prompt=y", "--temp=1"], ": --temp=1. Did you mean --temperature?"),
        (["train", "--config=demo", "--work=x"], ": --work. Did you mean --workdir?"),
        (["plan", "--conf=demo"], "--conf=demo. Did you mean --config?"),
        (["cache", "--cle"], "unrecognized arguments: --cle. Did you mean --clear?"),
        (["draft", "x", "--ou=y", "--config.optim.eps=1"], ": --ou=y. Did you mean --out?"),
        (
            ["train", "--config=demo", "--config.train.steps=abc"],
            "^error: --config.train.steps=abc: found no whole number; expected one, as in --conf",
        ),
        (["train", "--config=demo", "--config.optim.eps=x"], "eps=x: found no number; expected"),
        (
            ["train", "--config=demo", "--config.teacher.allow_degenerate=x"],
            "allow_degenerate=x: found no true or false; expected one, as in --config.teacher.al",
        ),
        (["generate", "kdjax/demo/teachr.gguf", "--prompt=x"], "an kdjax/demo/teacher.gguf?"),
        (["cache", "--config=demo", "--out=x", "extra"], "unrecognized arguments: extra"),
        (["verify", "nowhere"], "nowhere/receipt.json: no such file"),
        (["verify", "cnofigs"], "Did you mean configs?$"),
        (["report", "kdjax/dmo"], "a run. Did you mean kdjax/demo?$"),
        (["export", "cnofigs", "--format=hf", "--out=x"], "Did you mean configs?"),
        (["evaluate", "x", "--data=kdja/**/*.py"], r"file. Did you mean kdjax/\*\*/\*.py?$"),
        (["evaluate", "x", "--data=kdja/**/*.rs"], "or .parquet file.$"),
        (["train", "--config=confgs/demo.py"], "Did you mean configs/demo.py?$"),
        (["data", "kdjax/demo"], "--config=kdjax/demo: a folder; expected a Python file"),
        (["plan", "--config=kdjax/errors.py"], "errors.py: found no get_config..; expected one"),
        (
            ["export", "x", "--format=hf", "--out=x", "--step=best"],
            "--step: found 'best'; expected a saved step, or newest",
        ),
        (["evaluate", "x", "--humaneval=kdjax"], "kdjax: a folder; expected a file"),
        (["evaluate", "x", "--limit=-1"], "--limit=-1 must be 0 or more"),
        (
            ["answers", "x", "--exercises=x", "--out=x", "--timeout=0"],
            "--timeout=0 must be above 0",
        ),
    ],
)
def test_mistyped_names_are_corrected(arguments, message, capsys):
    assert re.search(message.replace("?", r"\?"), error_of(capsys, *arguments))


def test_every_command_that_plans_takes_another_machine(tmp_path, capsys):
    """`kdjax train --plan` is `kdjax plan`, of a machine that is not here as well."""
    there = ["--device=RTX4090", "--devices=2", "--hosts=2"]
    found = []
    for flags in (["plan"], ["train", "--plan"]):
        assert cli.main([*flags, "--config=demo", *there]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] and "device offers 22.86\n" in found[0]
    for flags, message in (
        (["train", *there], "another machine: expected --plan with it"),
        (["train", "--plan", "--memory=8GB"], "--hosts need --device, one of"),
        (["plan", "--hosts=2"], "--hosts need --device, one of"),
    ):
        assert re.search(message, error_of(capsys, *flags, "--config=demo"))


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
    shipped = flatten(run_of("--config=demo").config)
    changed = {k: v for k, v in flatten(run.config).items() if v != shipped[k]}
    assert changed == {"train.steps": 50, "optim.eps": 1e-9, "log.tensorboard": True}


def test_a_name_is_a_file_that_comes_with_kdjax(monkeypatch, tmp_path):
    assert set(parsing.shipped()) == {p.stem for p in (REPOSITORY / "configs").glob("[!_]*.py")}
    assert run_of("--config=demo:baseline").name == "demo-baseline"
    assert run_of("--config=demo:baseline").config == run_of("--config=configs/demo.py:baseline")[1]
    monkeypatch.chdir(tmp_path)
    assert run_of("--config=demo").config.train.steps == 470
    (tmp_path / "mine.py").write_text("import os\n\n\ndef get_config():\n    1 / 0\n")
    with pytest.raises(UserError, match=r"mine.py:5: ZeroDivisionError: division by zero"):
        run_of("--config=mine.py")
    (tmp_path / "mine.py").write_text("def get_config():\n    return {}\n")
    with pytest.raises(UserError, match=r"returned {}; expected a kdjax Config"):
        run_of("--config=mine.py")


def test_the_environment_is_in_the_config(monkeypatch, caplog):
    monkeypatch.setenv("KDJAX_TEACHER_WEIGHTS", "packed")
    with caplog.at_level(logging.INFO, "kdjax"):
        assert run_of("--config=demo").config.teacher.weights == "packed"
    assert "teacher.weights=packed, as KDJAX_TEACHER_WEIGHTS=packed says" in caplog.text
    monkeypatch.setenv("KDJAX_TEACHER_WEIGHTS", "cuda")
    with pytest.raises(UserError, match=r"WEIGHTS='cuda': must be one of auto, dense"):
        run_of("--config=demo")


def test_weights_that_would_be_ignored_are_refused(tmp_path):
    """Dense or packed beside a cache, whatever asks for them."""
    config = Config()
    config.teacher.path, config.teacher.cache = "teacher.gguf", str(tmp_path)
    for variable in parsing.WEIGHTS_VARIABLES:
        with pytest.raises(
            UserError, match=rf"^{variable}=packed and teacher.cache=.*Unset {variable}"
        ):
            parsing.apply_environment(config, {variable: "packed"})
    config.teacher.weights = "packed"
    with pytest.raises(UserError, match=r"teacher.weights='packed': must be auto, or float8"):
        validate(config)


def test_variables_of_earlier_systems_choose_the_weights(caplog):
    names = {"cublas": "dense", "realizar": "packed", "q4k": "packed", "auto": "auto"}
    for variable in ("KDJAX_TEACHER_BACKEND", "APR_DISTILL_TEACHER_BACKEND"):
        for old, new in names.items():
            config = Config()
            parsing.apply_environment(config, {variable: old})
            assert config.teacher.weights == new
        with pytest.raises(UserError, match=f"{variable}='cuda': must be one of auto, dense, pack"):
            parsing.apply_environment(Config(), {variable: "cuda"})
    config = Config()
    both = {"APR_DISTILL_TEACHER_BACKEND": "realizar", "KDJAX_TEACHER_WEIGHTS": "dense"}
    caplog.clear()
    parsing.apply_environment(config, both)
    assert config.teacher.weights == "dense"
    dropped = "APR_DISTILL_TEACHER_BACKEND=realizar has no effect: KDJAX_TEACHER_WEIGHTS=dense"
    assert dropped in caplog.text


@pytest.mark.parametrize("name", ["teacher.backend", "teacher.compute"])
def test_fields_of_earlier_versions_are_refused(tmp_path, name):
    """In a config file and in a flag, by what took their place."""
    file = tmp_path / "old.py"
    head = "from kdjax.config import Config\n\n\ndef get_config():\n    config = Config()\n"
    file.write_text(f"{head}    config.{name} = 'fp8'\n    return config\n")
    want = rf"{name} was removed \(docs/records/.*: set teacher.weights, to one of auto, dense, "
    with pytest.raises(UserError, match=want + r".*the tag before-the-cut still has it"):
        run_of(f"--config={file}")
    for flag in ([f"--config.{name}=q4k"], [f"--config.{name}", "q4k"]):
        with pytest.raises(UserError, match="--config." + want):
            run_of("--config=demo", *flag)


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
    assert settings("qwen1p5b_0p5b:lora") == (1.0, 0.0, 1e-5, 1e-6, 10)
    adapters = parsing.load_config("qwen1p5b_0p5b:lora")[0].student.lora
    assert (adapters.rank, adapters.learning_rate) == (64, 1e-4)
    assert settings("qwen7b_0p5b:reference") == (4.0, 0.3, 1.5e-5, 5e-7, 20)
    assert settings("qwen7b_0p5b:tiny") == (4.0, 0.3, 1e-3, 5e-7, 2)
    for name in ("qwen7b_0p5b", "qwen1p5b_0p5b", "onpolicy_1p5b_0p5b", "draft_1p5b_0p5b"):
        settings(f"{name}:tiny")
        with pytest.raises(UserError, match=f"configs/{name}.py:huge: no such kind; .*'tiny'"):
            parsing.load_config(f"{name}:huge")


@pytest.mark.slow
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
    rounded = "--config=demo:q4_0", "--config.student.imatrix=a.gguf"
    printed = error_of(capsys, "plan", *rounded)
    assert f"{rounded[1]}\n    a.gguf: no such file; expected an importance matrix" in printed
    (tmp_path / "a.gguf").write_bytes(b"")
    printed = error_of(capsys, "plan", *rounded)
    assert "a.gguf: found no importance matrix" in printed and "of `kdjax imatrix`" in printed
    (tmp_path / "a.gguf").unlink()
    printed = error_of(capsys, "train", "--config=onpolicy_1p5b_0p5b")
    assert "--config.rollout.prompts=runs/prompts/prompts.jsonl\n    in a clone" in printed
    printed = error_of(capsys, "train", "--config=qwen7b_0p5b:tiny")
    assert printed.count("python3 -m scripts.bench.random_gguf") == 2


@pytest.mark.slow
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
    for name in ("KDJAX_TEACHER_WEIGHTS", "KDJAX_ALLOW_DEGENERATE_KD", "MANAGED_MEMORY"):
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
        ({"loss.temperature": 1e300}, r"loss.temperature=1e\+300: must be .* at most 1e9"),
        ({"train.steps": 1 << 31}, r"train.steps=2147483648: must be between 1 and 2147483647"),
        ({"loss.alpha": 1.5}, r"loss.alpha=1.5: must be between 0 and 1"),
        ({"train.seed": -1}, r"train.seed=-1: must be between 0 and 4294967295"),
        ({"train.seed": 1 << 32}, r"train.seed=4294967296: must be between 0 and 4294967295"),
        ({"loss.alpha": -0.1, "train.steps": 0}, r"(?s)loss.alpha=-0.1.*train.steps=0"),
        ({"train.microbatches": 3}, r"train.batch_size=8: must be divisible by .*=3"),
        (
            {"optim.warmup_steps": 10},
            r"optim.warmup_steps=10: must be less than train.steps=10 - train.after=0; lower it "
            r"\(0: no warmup\), or raise train.steps",
        ),
        ({"optim.final_learning_rate": 1.0}, r"must be at most optim.learning_rate"),
        ({"teacher.weights": "gpu"}, r"teacher.weights='gpu': must be one of auto, dense"),
        ({"data.train": ""}, r"data.train='': must be set"),
        ({"student.imatrix": "x"}, r"student.quantize='': must be set with student.imatrix='x'"),
        (
            {"teacher.cache": "c", "rollout.prompts": "p"},
            r"teacher.cache='c': must be empty with rollout.prompts",
        ),
        ({"smoke.steps": -1}, r"smoke.steps=-1: must be 0 or more"),
        ({"smoke.steps": 11}, r"smoke.steps=11: must be at most train.steps=10"),
        ({"train.step": 5}, r"train.step=5: no such field. Did you mean train.steps\?"),
        ({"train.steps": "100"}, r"train.steps='100': must be of type int$"),
        (
            {"train.steps": 1e1, "data.train": ["a"]},
            r"(?s)train=\['a'\]: must be of type str.*steps=10.0: must be of type int",
        ),
        ({"optim.learning_rate": None}, r"learning_rate=None: must be of type float"),
        ({"train.steps": True}, r"train.steps=True: must be of type int"),
        ({"loss.temperature": float("inf")}, r"loss.temperature=inf: must be finite"),
    ],
)
def test_config_errors_name_field_value_and_remedy(tiny_config, changes, message):
    for field, value in changes.items():
        section, name = field.split(".")
        setattr(getattr(tiny_config, section), name, value)
    with pytest.raises(UserError, match=message):
        validate(tiny_config)


def test_fields_of_a_config_may_be_whole_numbers(tiny_config):
    tiny_config.optim.weight_decay = 0
    validate(tiny_config)


# Of each field of a conflict a value that is set, and that no conflict wants.
ODD = {
    "teacher.path": "t.gguf",
    "teacher.cache": "c",
    "teacher.weights": "packed",
    "student.init": "random",
    "student.layers": "0,2",
    "student.quantize": "q4_0",
    "student.imatrix": "x",
    "student.start": "x",
    "student.block": "own",
    "student.later_drafts": "0.5",
    "student.draft_ids": 64,
    "student.dspark.confidence": 1.0,
    "student.lora.rank": 4,
    "student.lora.weights": "float8",
    "loss.alpha": 0.5,
    "loss.final_alpha": 0.5,
    "optim.trainable": "blocks",
    "rollout.prompts": "p",
    "rollout.writer": "teacher",
    "eval.best": "kl",
    "mesh.tensor": 2,
    config_module.USER_STUDENT: "Bigram",
}


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda c: f"{c.field}, {', '.join(c.given)}")
def test_every_conflict_is_refused_in_one_line(conflict):
    def choose(name, what):
        return ODD[name] if isinstance(what, tuple) else what

    flat = flatten(Config()) | {"teacher.path": "t.gguf", config_module.USER_STUDENT: ""}
    config_module.refuse_conflicts(flat)
    flat |= {name: choose(name, what) for name, what in conflict.given.items()}
    flat[conflict.field] = "" if conflict.must == config_module._SET else ODD[conflict.field]
    with pytest.raises(UserError) as caught:
        config_module.refuse_conflicts(flat)
    shown = conflict.describe(flat)
    assert f"  {shown}" in str(caught.value).splitlines()
    assert shown.startswith(f"{conflict.field}={flat[conflict.field]!r}: must be ")
    assert " with " in shown and shown.endswith(f": {conflict.why}")


def test_the_page_of_settings_lists_the_conflicts():
    """A failure shows the table that the page lacks."""
    heads = ["| field | must be | with | why |", "| --- | --- | --- | --- |"]
    table = "\n".join(["", *heads, *parsing.describe_conflicts(), ""])
    assert table in (REPOSITORY / "docs" / "settings.md").read_text(), table


def test_every_field_has_a_rule_or_is_free():
    free = {
        "teacher.path",
        "teacher.cache",
        "teacher.allow_degenerate",
        "student.imatrix",
        "student.start",
        "student.quantize",
        "student.lora.targets",
        "loss.allow_few_shared",
        "data.heldout",
        "data.end_of_document",
        "data.fields",
        "data.parse_special",
        "data.tokenizer",
        "data.cache_dir",
        "rollout.prompts",
        "rollout.train_cut",
        "rollout.allow_other_template",
        "optim.trainable",
        "train.seed",
        "log.tensorboard",
    }
    assert set(flatten(Config())) == free | set(config_module._RULES)


def test_the_modules_that_run_a_command_are_the_package_and_main():
    """Every command is `kdjax COMMAND`; `python -m kdjax.main` alone keeps its own name."""
    package = Path(config_module.__file__).parent
    runs = {path.name for path in package.rglob("*.py") if "cli import run" in path.read_text()}
    assert runs == {"__main__.py", "main.py"}


@pytest.mark.parametrize(
    ("end", "told"),
    [("| true", ""), (">&-", ""), (">&- 2>&- <&-", ""), ("| cat", "a \\xb1\n" * 3)],
    ids=["left", "closed", "all closed", "ascii"],
)
def test_no_print_ends_a_command(end, told, tmp_path):
    """A reader that leaves, as `head` does, a closed output, a locale that cannot write it."""
    program = """if True:
        import gc, os, sys, time
        from kdjax.commands import cli

        def main(argv):
            assert not gc.isenabled()
            time.sleep(0.2)
            for _ in range(3):
                print("a \\xb1", flush=True)
            print("said", file=sys.stderr)
            file = open("made", "w")
            file.write(str(file.fileno() > 2 and sys.stdin.readable()))
            return 5

        cli.main = main
        cli.run()"""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    plain["PYTHONPATH"] = str(REPOSITORY)
    command = f'"$@" {end}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | plain,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5 and done.stdout == told
    assert done.stderr == ("" if "2>" in end else "said\n")
    assert (tmp_path / "made").read_text() == "True"


def test_garbage_is_looked_for_once_a_command_is_imported(monkeypatch):
    frozen, collects = [], []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.setattr(train, "main", lambda argv: collects.append(gc.isenabled()) or FINISHED)
    try:
        for disable in (True, False):  # by `run`; a program that calls `main`
            if disable:
                gc.disable()
            assert cli.main(["train"]) == FINISHED
    finally:
        gc.enable()
    assert collects == [True, True] and frozen == [False]


@pytest.mark.parametrize(("flags", "told"), [(["-u"], "now"), ([], "")])
def test_outputs_wait_as_python_was_told(flags, told):
    """With -u, or PYTHONUNBUFFERED=1, a log file has each line at once."""
    program = """if True:
        import os
        from kdjax.commands import cli

        def main(argv):
            print("now", end="")
            os._exit(5)

        cli.main = main
        cli.run()"""
    plain = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, *flags, "-c", program],
        cwd=REPOSITORY,
        env=plain,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout) == (5, told)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "status"), [("strange_plugin", 0), ("kdjax.x", 1)])
def test_warnings_of_plugins_that_happen_to_be_installed_are_no_errors(tmp_path, module, status):
    """Pytest-benchmark 5.0 gives one beside xdist; ours are errors."""
    table = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    filters = table["tool"]["pytest"]["ini_options"]["filterwarnings"]
    lines = "".join(f"    {line}\n" for line in filters)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nfilterwarnings =\n{lines}")
    warn = f"warnings.warn_explicit('w', UserWarning, 'x.py', 1, module='{module}')"
    code = f"import warnings\ndef pytest_configure():\n    {warn}\n"
    (tmp_path / "conftest.py").write_text(code)
    (tmp_path / "test_x.py").write_text("def test_x():\n    pass\n")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True)
    assert bool(done.returncode) == status
