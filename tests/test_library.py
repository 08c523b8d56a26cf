"""The library as docs/library.md and docs/extending.md show it, and what `import kdjax` offers."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from quick import cases

import kdjax
from kdjax.commands import train
from kdjax.errors import UserError
from kdjax.formats.saved import saved_steps

REPOSITORY = Path(__file__).parent.parent


def read_programs(page, *names):
    """The programs of a page of docs, by these names in its order."""
    text = (REPOSITORY / "docs" / page).read_text()
    programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(zip(names, programs, strict=True))


PROGRAMS = read_programs("library.md", "logits", "loop", "whole", "tree", "some")
PROGRAMS |= read_programs("extending.md", "divergence", "layers", "form", "module", "run")


def make_batches(count, rows=8, length=32):
    """Random text that repeats itself, so that a loss can fall."""
    ids = np.random.default_rng(0).integers(0, 256, (rows, length + 1), dtype=np.int32)
    return [{"tokens": ids[:, :-1], "labels": ids[:, 1:]}] * count


FOUR = pytest.mark.parametrize("run", [pytest.param(4, marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(params=cases(1, slow=[4]))
def run(request, models, tmp_path, monkeypatch):
    """A function that runs a program of the pages beside both models, and returns its names.

    On one device of the eight and on four: so many that JAX says it has, and that models load on.
    """
    devices = jax.devices()[: request.param]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "device_count", lambda: len(devices))
    monkeypatch.setattr(kdjax, "load", functools.partial(kdjax.load, devices=devices))
    for path in models.glob("*.gguf"):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)

    def execute(name, **names):
        exec(compile(PROGRAMS[name], f"the program {name!r} of docs", "exec"), names)
        if "student" in names and "state" in names:
            places = {leaf.sharding.num_devices for leaf in jax.tree.leaves(names["state"])}
            assert places == {request.param}
        return names

    return execute


@pytest.mark.parametrize(("name", "lines"), [("logits", 6), ("loop", 12), ("whole", 25)])
def test_programs_are_as_short_as_promised(name, lines):
    assert len([line for line in PROGRAMS[name].splitlines() if line.strip()]) <= lines


@FOUR
def test_logits_and_text(run):
    names = run("logits")
    model, logits = names["model"], names["logits"]
    assert logits.dtype == np.float32 and logits.shape[-1] == model.tokenizer.vocab_size
    ids = model.tokenizer.encode("def add(a, b):")
    assert logits.shape[1] == len(ids)
    assert names["completion"].ids[0] == int(np.argmax(np.asarray(logits)[0, -1]))


def test_a_loop_of_ones_own(run, capsys):
    names = run("loop", batches=make_batches(3))
    lines = capsys.readouterr().out.splitlines()
    means = [eval(line) for line in lines if line.startswith("{")]
    assert means[-1]["loss"] < means[0]["loss"] and means[0]["tokens"] == 8 * 32
    # The model that the state was begun from is whole, and the exported one is the trained one.
    before, after = names["student"].params["embed"], names["state"].params["embed"]
    assert np.any(np.asarray(before) != np.asarray(after))
    exported = kdjax.load("student-hf", dtype="float32")
    np.testing.assert_array_equal(exported.params["embed"], after)


@FOUR
def test_a_whole_loop_is_resumed_to_the_same_bits(run, tmp_path, capsys):
    """Killed behind its last save, the loop ends as one that was not."""
    (batch,), heldout = make_batches(1), make_batches(1, rows=4)
    batches = [{name: np.roll(x, i, axis=1) for name, x in batch.items()} for i in range(6)]
    straight = run("whole", batches=batches, heldout=heldout)
    lines = capsys.readouterr().out.splitlines()
    figures = [eval(line) for line in lines if line.startswith("{")]
    assert [sorted(f) for f in figures[1:]] == [sorted(figures[0])] * 2
    assert figures[-1]["kl"] < figures[0]["kl"]
    rates = [float(line.split()[1]) for line in lines if line[0].isdigit()]
    assert rates[:3] == pytest.approx([0.0, 0.5e-5, 1e-5]) and rates[2] > rates[3] > rates[5] > 0

    for name in ("runs/own", "student-hf"):
        (tmp_path / name).rename(tmp_path / f"{name}-straight")
    with pytest.raises(IndexError):
        run("whole", batches=Killed(batches, 3), heldout=heldout)
    assert saved_steps(tmp_path / "runs" / "own") == [2]
    resumed = run("whole", batches=batches, heldout=heldout)
    for a, b in zip(*(jax.tree.leaves(x["state"]) for x in (straight, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)


class Killed(list):
    """Batches of which one is never reached."""

    def __init__(self, batches, at):
        super().__init__(batches)
        self._at = at

    def __getitem__(self, index):
        for number, batch in enumerate(list(self)[index]):
            if number == self._at:
                raise IndexError
            yield batch


def test_the_tree_of_parameters_is_as_the_page_says(run, capsys):
    run("tree")
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert names >= {"embed", "norm/weight", "blocks/attn_norm/weight", "blocks/mlp_norm/weight"}
    matrices = {"attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
    listed = {f"blocks/{a}/{b}/weight" for a, parts in matrices.items() for b in parts}
    assert names - {"head"} - {f"blocks/attn/{x}/bias" for x in "qkv"} == listed | {
        name for name in names if "norm" in name or name == "embed"
    }


@FOUR
def test_some_of_the_parameters(run, capsys):
    names = run("some", batches=make_batches(1))
    assert capsys.readouterr().out.splitlines()[-1] == "blk.1.ffn_gate.weight"
    before, after = names["student"].params, names["state"].params
    np.testing.assert_array_equal(before["embed"], after["embed"])
    q, gate = (
        np.asarray(after["blocks"][a][b]["weight"]) for a, b in (("attn", "q"), ("mlp", "gate"))
    )
    np.testing.assert_array_equal(q[0], before["blocks"]["attn"]["q"]["weight"][0])
    assert np.any(q[1] != before["blocks"]["attn"]["q"]["weight"][1])
    assert all(np.any(gate != before["blocks"]["mlp"]["gate"]["weight"], axis=(1, 2)))


@FOUR
def test_losses_of_layers(run):
    names = run("layers", batches=make_batches(1))
    means = names["metrics"].means()
    beside = 0.5 * means["hidden_cosine"] + means["relations"] + means["extra"]
    assert means["loss"] == pytest.approx(means["divergence"] + beside, rel=1e-5)
    assert set(names["state"].extra) == {"hidden_cosine", "extra"}


def test_a_student_module_of_ones_own(run):
    names = run("module", batches=make_batches(8))
    step, student, teacher = (names[name] for name in ("step", "student", "teacher"))
    _, first = step(step.init(student.params), teacher.params, make_batches(1)[0])
    assert names["metrics"].means()["loss"] < 0.95 * first.means()["loss"]


@FOUR
def test_a_run_of_ones_own_python_is_resumed(run, tmp_path, tiny_config, monkeypatch):
    """Stopped at a save and gone on with, the run draws each batch once and ends the same."""
    tiny_config.train.steps, tiny_config.eval.samples = 4, 0
    tiny_config.eval.every = tiny_config.checkpoint.every = 2
    monkeypatch.setattr("kdjax.configs.demo.get_config", lambda: tiny_config)
    names = run("run")
    source = names["Random"]()
    draw, drawn = source.next, []

    def stop_after_three(params):
        drawn.append(source.drawn + 1)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return draw(params)

    source.next = stop_after_three
    with pytest.raises(KeyboardInterrupt):
        kdjax.distill(tiny_config, tmp_path / "stopped", batches=source, **names["own"])
    again = kdjax.distill(
        tiny_config, tmp_path / "stopped", batches=names["Random"](), **names["own"]
    )
    assert again == "finished"
    hashes = [
        (tmp_path / run / "receipt.json").read_text().split('"params_sha256": "')[1][:64]
        for run in ("runs/random", "stopped")
    ]
    assert hashes[0] == hashes[1]


@FOUR
def test_a_form_of_ones_own(run):
    """The forward pass sees what it says, and the masters move."""
    names = run("form", batches=make_batches(1))
    seen = names["step"].see(names["state"])
    for x, y in zip(*map(jax.tree.leaves, (seen, names["state"].params)), strict=True):
        np.testing.assert_array_equal(x, y.astype("bfloat16").astype(x.dtype))
    assert np.isfinite(names["metrics"].means()["loss"])


@pytest.mark.parametrize(  # each pair of two settings once
    ("chunk_tokens", "devices", "microbatches"),
    cases((64, 1, 1), slow=[(64, 4, 2), (1024, 1, 2), (1024, 4, 1)]),
)
def test_a_divergence_of_ones_own(models, chunk_tokens, devices, microbatches):
    """Whatever the split, the value is NumPy's in float64."""
    source = PROGRAMS["divergence"].split("teacher, student =")[0]
    names = {}
    exec(source, names)
    teacher, student = (
        kdjax.load(models / f"{n}.gguf", dtype="float32", devices=jax.devices()[:devices])
        for n in ("teacher", "student")
    )
    batch = make_batches(1)[0]
    step = kdjax.make_step(
        student,
        teacher,
        kdjax.KDLoss(names["squared_hellinger"], temperature=2.0),
        names["optax"].sgd(0.1),
        microbatches=microbatches,
        chunk_tokens=chunk_tokens,
    )
    _, metrics = step(step.init(student.params), teacher.params, batch)
    p, q = (
        np.exp(z - np.logaddexp.reduce(z, -1, keepdims=True))
        for z in (
            np.asarray(m.logits(batch["tokens"]), np.float64) / 2.0 for m in (teacher, student)
        )
    )
    expected = 4.0 * np.mean(1 - np.sum(np.sqrt(p * q), -1))
    assert metrics.means()["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("more", cases(["--plan"], slow=[["--config.log.tensorboard=False"]]))
def test_the_config_of_the_page_on_settings_trains(models, tmp_path, monkeypatch, more):
    (program,) = read_programs("settings.md", "config").values()
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    for path in models.glob("*.gguf"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "corpus").mkdir()
    for i in range(40):
        (tmp_path / "corpus" / f"{i}.py").write_text(f"def f{i}():\n    return {i} * self.x\n" * 9)
    (tmp_path / "own.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    small = {"train.steps": 2, "train.batch_size": 8, "data.seq_len": 32, "data.cache_dir": "rows"}
    small |= {"optim.warmup_steps": 1, "data.heldout_fraction": 0.2, "eval.samples": 0}
    flags = [f"--config.{name}={value}" for name, value in small.items()]
    assert train.main(["--config=own.py", "--workdir=run", *flags, *more]) == 0
    assert saved_steps(tmp_path / "run") == ([] if more == ["--plan"] else [2])


def test_models_that_cannot_teach_each_other_are_refused(models, tmp_path):
    student = kdjax.load(models / "student.gguf", dtype="float32")
    again = kdjax.load(models / "student.gguf", weights="packed")
    for teacher in (student, again):
        with pytest.raises(UserError, match="hold the same weights"):
            kdjax.make_step(student, teacher, kdjax.KDLoss(), optax.sgd(1.0))
        kdjax.make_step(student, teacher, kdjax.KDLoss(), optax.sgd(1.0), allow_degenerate=True)
    rounded = kdjax.load(models / "student.gguf")
    with pytest.raises(UserError, match="holds bfloat16 weights"):
        kdjax.make_step(rounded, None, kdjax.KDLoss(alpha=1), optax.sgd(1.0))
    with pytest.raises(UserError, match="dtype='float61'; expected one of bfloat16, float32"):
        kdjax.load(models / "student.gguf", dtype="float61")


def test_importing_starts_no_device_and_little_else():
    code = """
import time, jax
start = time.process_time()
import kdjax
assert time.process_time() - start < 0.5
from jax._src import xla_bridge
names = dir(kdjax)
assert "load" in names and "make_step" in names and kdjax.__version__
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_every_public_name_is_there_documented_and_no_module():
    for name in kdjax.__all__:
        value = getattr(kdjax, name)
        assert value.__doc__ and value.__doc__.strip(), name
        assert not (REPOSITORY / "kdjax" / name).exists()
        assert not (REPOSITORY / "kdjax" / f"{name}.py").exists()
    with pytest.raises(AttributeError, match="attribute nonsense"):
        kdjax.nonsense  # noqa: B018


_FLAG = re.compile(r"(?<![\w-])--(?!config\.)[a-z]")
_NAMED = re.compile(
    r"\([^()]*\)|`[^`]*`|kdjax \w+( [^ ]+)* --\S+|gguf-new-metadata --\S+|--\S+, or \w+="
)


@pytest.mark.parametrize("room", ["formats", "models", "losses", "training", "export"])
def test_errors_name_what_the_library_takes_before_the_commands_flag(room):
    """A flag stands in parentheses, in a command, or next to an argument."""
    commands = {"caching.py", "card.py"}  # of kdjax cache and kdjax shrink alone
    found = []
    for file in (Path(kdjax.__file__).parent / room).rglob("*.py"):
        raised = [x for x in ast.walk(ast.parse(file.read_text())) if isinstance(x, ast.Raise)]
        for node in raised if file.name not in commands else ():
            parts = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
            text = _NAMED.sub("", "".join(x for x in parts if isinstance(x, str)))
            found += [f"{file.name}: {text}"] if _FLAG.search(text) else []
    assert not found
