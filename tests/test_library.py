"""The library as docs/library.md shows it, and what `import kdjax` offers."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from quick import cases

import kdjax

REPOSITORY = Path(__file__).parent.parent
PAGE = (REPOSITORY / "docs" / "library.md").read_text()
PROGRAMS = dict(
    zip(
        ("logits", "loop", "divergence", "module", "source"),
        re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL),
        strict=True,
    )
)


def make_batches(count, rows=8, length=32):
    """Random text that repeats itself, so that a loss can fall."""
    ids = np.random.default_rng(0).integers(0, 256, (rows, length + 1), dtype=np.int32)
    return [{"tokens": ids[:, :-1], "labels": ids[:, 1:]}] * count


def run(name, models, folder, monkeypatch, **names):
    """The program's names after it ran in a folder with both models."""
    for path in models.glob("*.gguf"):
        (folder / path.name).symlink_to(path)
    monkeypatch.chdir(folder)
    exec(compile(PROGRAMS[name], f"docs/library.md:{name}", "exec"), names)
    return names


@pytest.mark.parametrize(("name", "lines"), [("logits", 6), ("loop", 12)])
def test_programs_are_as_short_as_promised(name, lines):
    assert len([line for line in PROGRAMS[name].splitlines() if line.strip()]) <= lines


def test_logits_and_text(models, tmp_path, monkeypatch):
    names = run("logits", models, tmp_path, monkeypatch)
    model, logits = names["model"], names["logits"]
    assert logits.dtype == np.float32 and logits.shape[-1] == model.tokenizer.vocab_size
    ids = model.tokenizer.encode("def add(a, b):")
    assert logits.shape[1] == len(ids)
    assert names["completion"].ids[0] == int(np.argmax(np.asarray(logits)[0, -1]))


def test_a_loop_of_ones_own(models, tmp_path, monkeypatch, capsys):
    names = run("loop", models, tmp_path, monkeypatch, batches=make_batches(3))
    lines = capsys.readouterr().out.splitlines()
    means = [eval(line) for line in lines if line.startswith("{")]
    assert means[-1]["loss"] < means[0]["loss"] and means[0]["tokens"] == 8 * 32
    # The model that the state was begun from is whole, and the exported one is the trained one.
    before, after = names["student"].params["embed"], names["state"].params["embed"]
    assert np.any(np.asarray(before) != np.asarray(after))
    exported = kdjax.load("student-hf", dtype="float32")
    np.testing.assert_array_equal(exported.params["embed"], after)


def test_a_student_module_of_ones_own(models, tmp_path, monkeypatch):
    names = run("module", models, tmp_path, monkeypatch, batches=make_batches(8))
    step, student, teacher = (names[name] for name in ("step", "student", "teacher"))
    _, first = step(step.init(student.params), teacher.params, make_batches(1)[0])
    assert names["metrics"].means()["loss"] < 0.95 * first.means()["loss"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_batches_of_ones_own_are_resumed(models, tmp_path, monkeypatch, tiny_config):
    """Stopped at a save and gone on with, the run draws each batch once and ends the same."""
    tiny_config.train.steps, tiny_config.eval.samples = 4, 0
    tiny_config.eval.every = tiny_config.checkpoint.every = 2
    names = run("source", models, tmp_path, monkeypatch, config=tiny_config)
    source = names["Random"]()
    draw, drawn = source.next, []

    def stop_after_three(params):
        drawn.append(source.drawn + 1)
        if len(drawn) == 4:
            raise KeyboardInterrupt
        return draw(params)

    source.next = stop_after_three
    with pytest.raises(KeyboardInterrupt):
        kdjax.distill(tiny_config, tmp_path / "stopped", batches=source)
    assert kdjax.distill(tiny_config, tmp_path / "stopped", batches=names["Random"]()) == "finished"
    hashes = [
        (tmp_path / run / "receipt.json").read_text().split('"params_sha256": "')[1][:64]
        for run in ("runs/random", "stopped")
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(  # each pair of two settings once
    ("chunk_tokens", "devices", "microbatches"),
    cases((64, 4, 2), slow=[(64, 1, 1), (1024, 1, 2), (1024, 4, 1)]),
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
