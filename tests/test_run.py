"""Whole runs on small files: resume, signals, kills, NaN, meshes, and what bad input says."""

import contextlib
import copy
import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_tiny_config, start_over
from quick import cases

import kdjax
from kdjax import config as config_module
from kdjax.commands import train as main
from kdjax.commands.parsing import apply_environment, load_config
from kdjax.config import Config
from kdjax.data.pipeline import News, Source
from kdjax.data.rows import RowSet
from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.errors import BAD_INPUT, MissingFileError, UserError
from kdjax.formats import open_table
from kdjax.formats.saved import find_best, find_damage
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.decoder import functional
from kdjax.training import loop, step
from kdjax.training.hooks import Hook
from kdjax.training.identity import check_same_run
from kdjax.training.inputs import count_epochs, warn_of_readings
from kdjax.training.job import assemble
from kdjax.training.loop import _Delivery, train
from kdjax.training.optim import schedule
from kdjax.training.pair import _refuse_degenerate
from kdjax.training.saving import Checkpoints
from kdjax.training.step import StepMetrics
from kdjax.training.user_code import UserCode
from kdjax.watch.guards import NonFiniteError, NonFiniteGuard
from kdjax.watch.writers import JsonLines, Terminal

pytestmark = pytest.mark.usefixtures("one_device")

REPOSITORY = Path(__file__).parent.parent


@pytest.mark.parametrize(("share", "told"), [(0.0, "6.0"), (0.5, ""), (1.0, "")])
def test_text_that_is_read_again_and_again_is_told(share, told, caplog):
    """Rows that the student writes anew each round are none of it."""
    config = Config()
    config.train.steps, config.train.batch_size = 15, 4
    if share:
        config.rollout.prompts = "prompts.jsonl"
    config.rollout.share = share
    rows = RowSet(train=range(10), heldout=(), info={}, key="")
    warn_of_readings(config, count_epochs(config, rows))
    said = f"15 steps are {told} epochs of the text"
    assert caplog.text.count(said) == 1 if told else not caplog.records


class Recorder(Hook):
    """Notes every call; asks for a stop after `stop_at`."""

    def __init__(self, stop_at=None):
        self.calls, self.stop_at = [], stop_at

    def train_begin(self, run):
        self.calls.append(("begin", run.start_step))

    def step_end(self, record):
        self.calls.append(("step", record.step, dict(record.figures)))
        return record.step == self.stop_at

    def eval_end(self, step, figures):
        self.calls.append(("eval", step, dict(figures)))

    def save_begin(self, step):
        self.calls.append(("checkpoint", step))

    def train_end(self, reason, error):
        self.calls.append(("end", reason))

    def curve(self):
        return [call for call in self.calls if call[0] in ("step", "eval")]


def go(config, workdir, *hooks, job=None):
    """One process's run, of the job if it is given; returns how it ended."""
    workdir.mkdir(exist_ok=True)
    config_module.validate(config)
    job = job or assemble(config, workdir)
    store = Checkpoints(workdir, config.checkpoint.keep, asynchronous=True)
    with contextlib.closing(store) as checkpoints:
        return train(job, checkpoints, hooks, None)


def saved(job, workdir):
    """The newest step of a workdir and its state as NumPy arrays, in the shape of the job's."""
    with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
        latest = checkpoints.latest()
        state = checkpoints.restore(latest, job.step.abstract, job.step.shardings)
    return latest, jax.tree.map(np.asarray, state)


@pytest.fixture(scope="module")
def one_step(models, tmp_path_factory):
    """The config and workdir of a run that was stopped after its first step; to be copied."""
    folder = tmp_path_factory.mktemp("one-step")
    config = make_tiny_config(models, folder)
    assert go(config, folder / "run", Recorder(stop_at=1)) == "interrupted"
    return config, folder / "run"


@pytest.fixture
def stopped(one_step, tmp_path):
    """A copy of that config, to be changed, and of that workdir."""
    config, workdir = one_step
    return copy.deepcopy(config), Path(shutil.copytree(workdir, tmp_path / "run"))


@pytest.mark.parametrize("moments", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_train_10_is_train_5_stop_resume_train_5_bit_for_bit(tiny_config, tmp_path, moments):
    tiny_config.optim.moment_dtype, tiny_config.mesh.data = moments, 2
    straight, first, second = Recorder(), Recorder(stop_at=4), Recorder()
    job = assemble(tiny_config, tmp_path / "straight")
    tiny_config.checkpoint.every = 0
    before = start_over(job, tmp_path / "resumed")
    assert go(tiny_config, tmp_path / "resumed", first, job=before) == "interrupted"
    assert first.calls[-2:] == [("checkpoint", 5), ("end", "interrupted")]
    assert go(tiny_config, tmp_path / "resumed", second) == "finished"
    assert second.calls[0] == ("begin", 5)
    tiny_config.checkpoint.every = 5
    assert go(tiny_config, tmp_path / "straight", straight, job=job) == "finished"
    assert second.calls[1][:2] == ("eval", 5)  # which the stop left out
    assert [*first.curve(), *second.curve()] == straight.curve()
    (a, one), (b, two) = (saved(job, tmp_path / name) for name in ("straight", "resumed"))
    assert a == b == 10
    chex.assert_trees_all_equal(one, two)
    assert {str(x.dtype) for x in jax.tree.leaves(optax.tree.get(one.opt_state, "nu"))} == {moments}


@pytest.mark.slow
def test_hooks_are_called_in_order(tiny_config, tmp_path):
    """A finished run that is started once more calls none."""
    tiny_config.train.steps = 4
    tiny_config.eval.every = tiny_config.checkpoint.every = 2
    recorder, again = Recorder(), Recorder()
    job = assemble(tiny_config, tmp_path / "run")
    assert go(tiny_config, tmp_path / "run", recorder, job=job) == "finished"
    assert [call[:2] for call in recorder.calls] == [
        ("begin", 0),
        ("eval", 0),
        ("step", 1),
        ("step", 2),
        ("eval", 2),
        ("checkpoint", 2),
        ("step", 3),
        ("step", 4),
        ("eval", 4),
        ("checkpoint", 4),
        ("end", "finished"),
    ]
    kl = [call[2]["divergence"] for call in recorder.calls if call[0] == "eval"]
    assert kl[0] > kl[1] > kl[2] > 0
    job = start_over(job, tmp_path / "run")
    assert go(tiny_config, tmp_path / "run", again, job=job) == "finished"
    assert again.calls == []


@pytest.mark.parametrize(
    ("field", "value"),
    cases(
        ("optim.learning_rate", 5e-4),
        ("data.seq_len", 16),
        slow=[("train.steps", 12), ("train.seed", 1), ("loss.alpha", 0.5)],
    ),
)
def test_a_changed_config_is_not_resumed(stopped, field, value):
    config, workdir = stopped
    section, name = field.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(UserError, match=rf"{field}: the checkpoint has .* now {value}"):
        go(config, workdir)


def test_changed_text_is_not_resumed(stopped, tmp_path):
    config, workdir = stopped
    config.data.train = str(shutil.copytree(config.data.train, tmp_path / "text"))
    text = Path(config.data.train) / "00.py"
    text.write_text(text.read_text() + "\nmore = 1\n")
    with pytest.raises(UserError, match=r"data.rows: the checkpoint has"):
        go(config, workdir)


@pytest.mark.slow
def test_cadence_may_change(stopped):
    config, workdir = stopped
    config.eval.every, config.log.every, config.loss.chunk_tokens = 3, 2, 64
    assert go(config, workdir) == "finished"


def test_nan_stops_keeps_the_batch_and_the_last_good_checkpoint(tiny_config, tmp_path):
    tiny_config.optim.learning_rate = 1e30
    tiny_config.optim.warmup_steps, tiny_config.checkpoint.every = 0, 1
    tiny_config.checkpoint.keep = 10
    tiny_config.eval.every = 0
    run, recorder = tmp_path / "run", Recorder()
    run.mkdir()
    job = assemble(tiny_config, run)
    with pytest.raises(NonFiniteError, match=r"step (\d+): .*nonfinite_step_\1.npz"):
        go(tiny_config, run, NonFiniteGuard(run), recorder, job=job)
    last = recorder.calls[-2:]
    assert last[-1] == ("end", "failed")
    (kept,) = run.glob("nonfinite_step_*.npz")
    bad = int(kept.stem.rsplit("_", 1)[1])
    with np.load(kept) as batch:
        assert batch["tokens"].shape == (8, 32) and "row_ids" in batch
    step_saved, state = saved(job, run)
    assert step_saved == bad - 1
    chex.assert_tree_all_finite(jax.tree.map(np.asarray, state.params))


@pytest.mark.slow
def test_a_checkpoint_of_8_devices_resumes_on_4_and_on_1(tiny_config, tmp_path):
    tiny_config.mesh = config_module.MeshConfig(data=2, fsdp=2, tensor=2)
    job = assemble(tiny_config, tmp_path / "run")
    go(tiny_config, tmp_path / "run", Recorder(stop_at=4), job=job)
    _, whole = saved(job, tmp_path / "run")
    batch = job.source.next({})
    losses = []
    for shape in ((1, 2, 2), (1, 1, 1)):
        mesh = sharding.make_mesh(*shape, jax.devices()[: int(np.prod(shape))])
        teacher = jax.device_put(
            jax.tree.map(np.asarray, job.teacher.params),
            sharding.parameter_shardings(job.teacher.params, mesh),
        )
        placement, spec = Placement(mesh), job.step.spec
        moved = {
            side: functional(f.spec, dataclasses.replace(f.compute, placement=placement))[0]
            for side, f in (("student", spec.student), ("teacher", spec.teacher))
        }
        spec = dataclasses.replace(spec, **moved)
        other = step.Step(spec, job.step.abstract.params, placement, teacher)
        shardings = other.shardings
        with contextlib.closing(Checkpoints(tmp_path / "run", 2)) as checkpoints:
            state = checkpoints.restore(checkpoints.latest(), job.step.abstract, shardings)
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, state), whole)
        for place, leaf in zip(jax.tree.leaves(shardings), jax.tree.leaves(state), strict=True):
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
        _, metrics = other(state, teacher, batch)
        losses.append(metrics.means()["loss"])
    np.testing.assert_allclose(losses, losses[0], rtol=2e-6)


# --- the command --------------------------------------------------------------------------------


def command(config, workdir):
    """The command line that sets every field of `config`."""
    given = config_module.flatten(load_config("qwen7b_0p5b:tiny")[0])
    fields = config_module.flatten(config).items()
    flags = [f"--config.{name}={value}" for name, value in fields if value != given[name]]
    return [
        sys.executable,
        "-m",
        "kdjax.main",
        "--config=configs/qwen7b_0p5b.py:tiny",
        f"--workdir={workdir}",
        *flags,
    ]


def start(config, workdir):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command(config, workdir), cwd=REPOSITORY, **pipes)


def run_command(config, workdir):
    process = start(config, workdir)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def wait_for(condition, process):
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def curve(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def _read(path):
    return path.read_text() if path.exists() else ""


def _steps(workdir):
    return [p.name for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()]


def _saving(workdir):
    return list((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


@pytest.mark.slow
def test_the_command_prints_errors_without_a_traceback(tiny_config, tmp_path, capsys):
    tiny_config.teacher.path = "models/qwen2.5-coder-7b-instruct-q4_k_m.gguf"
    code, output = run_command(tiny_config, tmp_path / "run")
    assert code == BAD_INPUT and "Traceback" not in output
    assert "hf download Qwen/Qwen2.5-Coder-7B-Instruct-GGUF" in output
    named, *flags = command(tiny_config, tmp_path / "run")[3:]
    for other, message in ((f"{named}-x", "'tiny'"), ("--config=no.py", "no.py")):
        assert main.main([other, *flags]) == BAD_INPUT
        said = capsys.readouterr().err
        assert message in said and "Traceback" not in said


# --- bad input ----------------------------------------------------------------------------------


def test_held_out_figures_that_are_none_stop_the_run_unsaved(tiny_config, tmp_path, monkeypatch):
    broken = {"kl": float("nan"), "tokens": 8.0}
    monkeypatch.setattr("kdjax.training.loop.merge_sums", lambda *_: broken)
    tiny_config.train.steps, tiny_config.optim.warmup_steps = 1, 0
    with pytest.raises(NonFiniteError, match="evaluation at step 0: kl not finite"):
        go(tiny_config, tmp_path / "run", NonFiniteGuard(tmp_path))
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_unwritable_workdir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--workdir=.*file/run cannot be written"):
        main.check_workdir(tmp_path / "file" / "run")


def test_missing_teacher_names_the_download(tiny_config, tmp_path):
    tiny_config.teacher.path = str(tmp_path / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
    with pytest.raises(
        MissingFileError, match=r"hf download Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"
    ):
        assemble(tiny_config, tmp_path)


def test_batch_that_the_mesh_cannot_split(tiny_config, tmp_path):
    tiny_config.train.batch_size, tiny_config.mesh.data = 12, 8
    with pytest.raises(
        UserError, match=r"= 12 rows cannot be split .* = 8 devices.* multiple of 8"
    ):
        assemble(tiny_config, tmp_path)


def test_rows_longer_than_the_context(tiny_config, tmp_path):
    tiny_config.data.seq_len = 1_000_000
    with pytest.raises(UserError, match=r"data.seq_len=1000000 exceeds the teacher's context of"):
        assemble(tiny_config, tmp_path)


def test_teacher_smaller_than_student(tiny_config, tmp_path):
    config = dataclasses.replace(tiny_config)
    config.teacher.path, config.student.path = config.student.path, config.teacher.path
    config.loss.vocabulary = "same"
    with pytest.raises(UserError, match=r"teacher's vocabulary \(.* 320 rows\) is smaller .* 384"):
        assemble(config, tmp_path)


def test_tokenizer_mismatch_names_the_first_id(tiny_config, tmp_path):
    from kdjax.formats.gguf import write_gguf

    table = open_table(tiny_config.teacher.path)
    tokens = list(table.metadata["tokenizer.ggml.tokens"])
    tokens[7], tokens[9] = tokens[9], tokens[7]
    tensors = [(name, *table.info(name)[2:0:-1], table.raw(name)) for name in table]
    metadata = dict(table.metadata) | {"tokenizer.ggml.tokens": tokens}
    write_gguf(tmp_path / "other.gguf", metadata, tensors)
    tiny_config.teacher.path = str(tmp_path / "other.gguf")
    tiny_config.loss.vocabulary = "same"
    with pytest.raises(
        UserError, match=rf"differ at id 7: .* {re.escape(repr(tokens[9]))}, the teacher"
    ):
        assemble(tiny_config, tmp_path)


def test_missing_misshapen_and_unknown_tensors_are_listed_together(tiny_config, tmp_path):
    from kdjax.formats.gguf import write_gguf

    table = open_table(tiny_config.student.path)
    tensors = []
    for name in table:
        info, raw = table.info(name), table.raw(name)
        if name == "blk.0.attn_k.weight":
            tensors.append((name, info.dtype, (info.shape[0] // 2, info.shape[1]), raw[::2]))
        elif name != "blk.1.ffn_up.weight":
            tensors.append((name, info.dtype, info.shape, raw))
    tensors.append(("blk.0.surprise", "F32", (1,), np.zeros(4, np.uint8)))
    write_gguf(tmp_path / "broken.gguf", dict(table.metadata), tensors)
    tiny_config.student.path = str(tmp_path / "broken.gguf")
    with pytest.raises(UserError, match="3 tensors") as error:
        go(tiny_config, tmp_path / "run")
    for line in (
        "blk.1.ffn_up.weight: missing, expected shape [256, 128]",
        "blk.0.attn_k.weight: shape [32, 128], expected [64, 128]",
        "blk.0.surprise: not a tensor of this architecture",
    ):
        assert line in str(error.value)


def test_empty_corpus_writes_nothing(tiny_config, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.py").write_text(" \n")
    tiny_config.data.train = str(empty)
    with pytest.raises(UserError, match="the text is empty"):
        assemble(tiny_config, tmp_path)
    assert not list((tmp_path / "rows").glob("*"))


def test_the_override_is_a_total_function_of_its_two_settings(models):
    """8 pairs: the config on or off, the variable unset, empty, 0 or 1."""
    pair = [open_checkpoint(models / "teacher.gguf")] * 2
    pairs = list(itertools.product((False, True), (None, "", "0", "1")))
    assert len(pairs) == 8
    for allowed, variable in pairs:
        config = Config()
        config.teacher.allow_degenerate = allowed
        named = {} if variable is None else {"KDJAX_ALLOW_DEGENERATE_KD": variable}
        apply_environment(config, named)
        if allowed or variable == "1":
            assert _refuse_degenerate(*pair, allowed=config.teacher.allow_degenerate) is None
            continue
        with pytest.raises(UserError, match="hold the same weights"):
            _refuse_degenerate(*pair, allowed=config.teacher.allow_degenerate)


class Listener(Hook):
    def __init__(self, stop_at=None):
        self.steps, self.stop_at = [], stop_at

    def step_end(self, record):
        self.steps.append(record.step)
        return record.step == self.stop_at


ONE = np.float32(1), np.float32(1)


def constant_rate(step):
    return jnp.float32(1e-3)


RAW = StepMetrics(loss=ONE, ce=ONE, divergence=ONE, grad_norm=ONE)


def test_each_step_is_delivered_once_in_order_one_late():
    """Runs of 1 to 10 steps, delivered at once after any of them."""
    for total, flushed in itertools.product(range(1, 10 + 1), repeat=2):
        first, second = Listener(), Listener()
        delivery = _Delivery([first, second], constant_rate)
        for i in range(1, total + 1):
            delivery.push(i, RAW, {})
            assert first.steps == list(range(1, i))
            if i == flushed:
                delivery.flush()
        delivery.flush()
        assert first.steps == second.steps == list(range(1, total + 1))


@pytest.mark.parametrize("ended", [True, False])
def test_a_step_has_its_own_seconds(ended, monkeypatch):
    """Steps take 2 s; a CPU has ended one when it returns from it, a GPU has only begun.

    A record of a GPU's step waits for that step, which the next dispatch precedes.
    """
    at, taken = [0.0], []

    def wait(self):
        at[0] += 0.0 if ended else 2.0
        return {}

    class Seconds(Hook):
        def step_end(self, record):
            taken.append(record.seconds)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: at[0]))
    one = jnp.float32(1)
    monkeypatch.setattr(type(one), "is_ready", lambda _: ended)
    monkeypatch.setattr(StepMetrics, "means", wait)
    delivery = _Delivery([Seconds()], None)
    for number in (1, 2, 3):
        at[0] += 2.0 if ended else 0.0
        delivery.push(number, StepMetrics((one, one), ONE, ONE, ONE), {})
    delivery.flush()
    assert taken == [2.0, 2.0, 2.0]


def test_a_delivery_starts_nothing_on_the_device():
    """Work that it started would run behind the step in flight, and the host wait for both."""
    listener, asked = Listener(), []
    delivery = _Delivery([listener], constant_rate)
    delivery._schedule = lambda step: asked.append(int(step)) or constant_rate(step)
    delivery.push(1, RAW, {})
    assert asked == [0] and listener.steps == []
    delivery.flush()
    assert asked == [0] and listener.steps == [1]


def test_a_stop_is_known_before_the_next_step_ends():
    """Asked for at any of 10 steps, by one of two hooks; the other still sees every step."""
    for stop_at, at in itertools.product(range(1, 10 + 1), (0, 1)):
        hooks = [Listener(), Listener()]
        hooks[at].stop_at = stop_at
        delivery = _Delivery(hooks, constant_rate)
        for i in range(1, 10 + 1):
            delivery.push(i, RAW, {})
            assert delivery.stop == (i > stop_at)
        delivery.flush()
        assert delivery.stop and hooks[0].steps == hooks[1].steps == list(range(1, 11))


def test_watching_a_step_costs_less_than_a_millisecond():
    delivery, times = _Delivery([Listener() for _ in range(5)], constant_rate), []
    for i in range(200):
        start = time.perf_counter()
        delivery.push(i, RAW, {})
        times.append(time.perf_counter() - start)
    assert np.quantile(times, 0.1) < 1e-3  # a busy machine had a median of 1.2 ms


def test_another_run_is_named_field_by_field(tmp_path):
    saved = {"optim.learning_rate": 1e-3, "data.rows": "ab", "gone": 1}
    check_same_run(saved, dict(saved), tmp_path)
    with pytest.raises(UserError) as error:
        check_same_run(saved, {"optim.learning_rate": 2e-3, "data.rows": "ab", "new": 2}, tmp_path)
    for line in (
        "optim.learning_rate: the checkpoint has 0.001, now 0.002",
        "gone: the checkpoint has 1, now '(absent)'",
        "new: the checkpoint has '(absent)', now 2",
    ):
        assert line in str(error.value)
    assert "data.rows" not in str(error.value)


class Lessons(Source):
    """The config's text, told in lessons of two batches; a part of the run's identity."""

    def __init__(self, source, plan="easy first"):
        self._source, self._plan, self._batches = source, plan, 0
        self.set_state = source.set_state

    @property
    def identity(self):
        return {"lessons": self._plan}

    @property
    def pauses(self):
        return self._batches % 2 == 0

    def next(self, params):
        self._batches += 1
        return self._source.next(params)

    def get_state(self):
        return self._source.get_state()

    def take_news(self):
        return News("lesson", {"number": 1.0 + self._batches // 2}) if self._batches % 2 else None


@pytest.mark.slow
def test_any_source_may_have_news_and_a_part_of_the_identity(one_step, tmp_path, capsys):
    config, workdir = copy.deepcopy(one_step[0]), tmp_path / "run"
    config.train.steps = config.checkpoint.every = 3
    job = assemble(config, workdir)
    plain = job.source
    job = assemble(config, workdir, UserCode(Lessons(plain)))
    hooks = [JsonLines(workdir), Terminal()]
    assert go(config, workdir, *hooks, job=job) == "finished"
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["kind"] == "lesson"] == [
        {"kind": "lesson", "step": 1, "number": 1.0},
        {"kind": "lesson", "step": 3, "number": 2.0},
    ]
    kinds = [line["kind"] for line in lines]  # a pause: the steps before it are told first
    assert kinds == ["eval", "lesson", "train", "train", "lesson", "train", "eval"]
    assert "lesson before step 3: number 2" in capsys.readouterr().err
    other = assemble(config, workdir, UserCode(Lessons(plain, "hard first")))
    with pytest.raises(UserError, match=r"lessons: the checkpoint has 'easy first', now 'hard"):
        go(config, workdir, job=other)


@pytest.mark.slow
def test_a_finished_run_goes_on_under_a_schedule_of_its_own(one_step, tmp_path):
    """From the checkpoint that is named, with its optimizer and the text that follows."""
    config, workdir = copy.deepcopy(one_step[0]), tmp_path / "run"
    config.train.steps, config.optim.warmup_steps = 4, 1
    config.checkpoint.every, config.eval.every = 2, 0
    first = Recorder()
    assert go(config, workdir, first) == "finished"
    config.train.steps = 8
    with pytest.raises(UserError, match=r"steps: the checkpoint has 4, now 8\n.*train.after=4: "):
        go(config, workdir)
    longer = copy.deepcopy(config)
    longer.optim.beta1 = 0.8  # no part of a schedule
    longer.train.after = 4
    with pytest.raises(UserError, match=r"(?s)run, .*:\n  optim.beta1: .*\nRestore these values"):
        go(longer, workdir)
    config.train.after, config.optim.learning_rate = 4, 5e-4
    straight = Recorder()
    shutil.copytree(workdir, tmp_path / "straight")
    job = assemble(config, tmp_path / "straight")
    assert go(config, tmp_path / "straight", straight, job=job) == "finished"
    assert straight.calls[0] == ("begin", 4)
    rates = [call[2]["learning_rate"] for call in straight.calls if call[0] == "step"]
    fresh = schedule(config.optim, 4)
    np.testing.assert_allclose(rates, [fresh(step) for step in range(4)], rtol=1e-6)
    for hook, ends in ((Recorder(stop_at=5), "interrupted"), (Recorder(), "finished")):
        assert go(config, workdir, hook, job=start_over(job, workdir)) == ends
    (a, one), (b, two) = (saved(job, path) for path in (workdir, tmp_path / "straight"))
    assert a == b == 8
    chex.assert_trees_all_equal(one, two)
    with pytest.raises(UserError, match=r"train.after=4 and no checkpoint"):
        go(config, tmp_path / "other", job=start_over(job, tmp_path / "other"))


@pytest.mark.slow
def test_a_run_that_was_stopped_in_its_last_step_is_judged_when_it_goes_on(tiny_config, tmp_path):
    """With a length in seconds, too; the step that was saved is the best, once it is judged."""
    config = tiny_config
    config.train.steps, config.optim.warmup_steps = 2, 0
    config.eval.every, config.checkpoint.every = 0, 0
    job = assemble(config, tmp_path / "steps")
    for name, seconds in (("steps", 0.0), ("seconds", 1e6)):
        config.train.seconds, workdir = seconds, tmp_path / name
        first, second, third = Recorder(stop_at=1), Recorder(), Recorder()

        def go_on(hook, workdir=workdir):
            return go(config, workdir, hook, job=start_over(job, workdir))

        assert go_on(first) == "interrupted"
        assert first.calls[-2:] == [("checkpoint", 2), ("end", "interrupted")]
        assert find_best(workdir) is None
        assert go_on(second) == "finished"
        begun, (kind, step, figures), *others = second.calls
        assert (begun, kind, step) == (("begin", 2), "eval", 2)
        assert others == [("checkpoint", 2), ("end", "finished")]
        assert find_best(workdir) == (2, "loss", figures["loss"])
        assert find_damage(workdir, 2) is None
        assert go_on(third) == "finished"
        assert not third.calls


@pytest.mark.slow
@pytest.mark.parametrize("name", cases("muon", slow=["adamw"]))
def test_a_run_that_trains_some_parameters_resumes_exactly(tiny_config, tmp_path, name):
    """One killed, one not; the others keep their numbers, and another choice is another run."""
    config = tiny_config
    config.optim.name, config.optim.trainable = name, "blocks/*/mlp, blk.1"
    config.train.steps, config.optim.warmup_steps, config.eval.every = 4, 0, 0
    config.checkpoint.every = 2
    before = kdjax.load(config.student.path, dtype="float32").params
    job = assemble(config, tmp_path / "straight")
    assert go(config, tmp_path / "straight", job=job) == "finished"
    cut = start_over(job, tmp_path / "cut")
    assert go(config, tmp_path / "cut", Recorder(stop_at=2), job=cut) == "interrupted"
    other = copy.deepcopy(config)
    other.optim.trainable = "blocks/*/mlp"
    with pytest.raises(UserError, match=r"optim\.trainable: the checkpoint has 'blocks/"):
        go(other, tmp_path / "cut")
    assert go(config, tmp_path / "cut", job=start_over(job, tmp_path / "cut")) == "finished"
    (a, one), (b, two) = (saved(job, tmp_path / name) for name in ("straight", "cut"))
    assert a == b == 4
    chex.assert_trees_all_equal(one, two)
    chex.assert_trees_all_equal(one.params["embed"], before["embed"])
    new, old = one.params["blocks"], before["blocks"]
    for part, layers in (("mlp", [0, 1]), ("attn", [1])):
        leaf = {"mlp": "gate", "attn": "q"}[part]
        a, b = (np.asarray(x[part][leaf]["weight"]) for x in (new, old))
        assert np.flatnonzero(np.any(a != b, axis=(1, 2))).tolist() == layers


def test_a_save_that_was_cut_short_is_cleared_and_never_resumed(tmp_path):
    left = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp-1"
    (left / "state").mkdir(parents=True)
    (left / "state" / "half").write_bytes(b"x")
    checkpoints = Checkpoints(tmp_path, 2)
    try:
        assert checkpoints.latest() is None and not left.exists()
    finally:
        checkpoints.close()
