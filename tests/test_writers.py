"""Writers of a run's lines and files, driven without a run."""

import concurrent.futures
import functools
import importlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from kdjax import progress
from kdjax.commands import parsing
from kdjax.errors import UserError
from kdjax.training.hooks import Run, StepRecord
from kdjax.watch import writers
from kdjax.watch.guards import NonFiniteError, NonFiniteGuard

FIGURES = dict(loss=1.5, ce=2.0, divergence=0.5, grad_norm=3.0, learning_rate=1e-5, tokens=60.0)
HELD_OUT = dict(
    student_ce=1.5,
    student_perplexity=4.48,
    teacher_ce=1.2,
    teacher_perplexity=3.3,
    kl=0.3,
    divergence=0.1,
    temperature=4.0,
    agreement=0.8,
    tokens=1000.0,
)


def a_run(workdir, start=0):
    flops = dict(flops_per_token=1e9, peak_flops=1e12)
    return Run(workdir, start, 4, 64, **flops, log_every=2, config={})


def record(step, **changes):
    return StepRecord(step, FIGURES | changes, seconds=0.5, batch={})


def play(hook, workdir):
    hook.train_begin(a_run(workdir))
    hook.eval_end(0, HELD_OUT)
    for step in range(1, 5):
        assert not hook.step_end(record(step))
    hook.save_begin(4)
    hook.train_end("finished", None)


def test_scalars_are_written_without_importing_torch(tmp_path):
    """tensorboardX imports PyTorch where it is installed, 1.5 s of a start."""
    (tmp_path / "torch.py").write_text("print('imported')")
    code = f"""if True:
        import sys, test_writers
        from kdjax.watch.writers import TensorBoard
        test_writers.play(TensorBoard(test_writers.Path({str(tmp_path)!r})), {str(tmp_path)!r})
        assert "torch" not in sys.modules
        import torch
    """
    paths = [str(tmp_path), str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["imported"], done.stderr  # by the last line alone


def test_a_module_is_hidden_from_one_thread_alone(tmp_path, monkeypatch):
    """A program may import PyTorch in another thread while a run begins."""
    (tmp_path / "seldom_imported.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "seldom_imported", raising=False)
    load = functools.partial(importlib.import_module, "seldom_imported")
    with writers._hiding("seldom_imported"):
        with pytest.raises(ImportError):
            load()
        with concurrent.futures.ThreadPoolExecutor() as other:
            found = other.submit(load).result()
        assert load() is found
    assert load() is found


def test_the_first_step_says_where_the_seconds_of_the_start_went(tmp_path):
    """The longest phase first, the first step among them; a run without phases says nothing."""
    for phases in ([progress.Phase("text", 1.0, 0.2)], []):
        progress.PHASES[:] = phases
        stream = io.StringIO()
        play(writers.Terminal(stream), tmp_path)
        progress.PHASES.clear()
        lines = [x for x in stream.getvalue().splitlines() if x.startswith("first step after")]
        parts = ["first step 0.5, text 0.2 (parts may overlap)"] * len(phases)
        assert [line.split(": ")[1] for line in lines] == parts


def test_phases_count_from_the_begin_of_the_process():
    begun = progress.count_seconds()
    with progress.timing("imports", 0.0):
        pass
    phase = progress.PHASES.pop()
    assert phase.begun == 0 and begun <= phase.seconds <= progress.count_seconds()
    assert 0 < begun < time.clock_gettime(time.CLOCK_BOOTTIME)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_say_everything(tmp_path):
    stream = io.StringIO()
    play(writers.Terminal(stream), tmp_path)
    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "4/4"]
    # 64 positions in 0.5 s; 128 tokens/s x 1 GFLOP of 1 TFLOP/s; two steps left, and 1,000
    # positions of the last evaluation.
    assert "128 tok/s  MFU 12.8%  ETA 0:09" in steps[1]
    assert "loss 1.5000  ce 2.0000  divergence 0.5000  lr 1.00e-05  grad 3.000" in steps[1]
    assert "tok/s" not in steps[0]  # it holds compilation
    assert "kl 0.3000  divergence(T=4) 0.1000  agreement 0.8000" in lines[0]


@pytest.mark.parametrize(("bar", "said"), [(False, 1), (True, 0)])
def test_the_expected_end_is_said_once_after_a_few_steps(tmp_path, bar, said):
    """At 0.5 s a step, 3 s are measured after step 7: 93 steps and 2 evaluations of 16 steps."""
    stream = Terminal() if bar else io.StringIO()
    hook = writers.Terminal(stream)
    hook.train_begin(Run(tmp_path, 0, 100, 64, 1e9, None, 50, {}, eval_every=50))
    hook.eval_end(0, HELD_OUT | {"tokens": 1024.0})
    for step in range(1, 20):
        hook.step_end(record(step))
        told = "about 1:02 more for steps and evaluations, at 0.5 s a step" in stream.getvalue()
        assert told == (step >= 7 and not bar)
    hook.train_end("finished", None)
    assert stream.getvalue().count("about ") == said


def test_a_terminal_gets_a_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    play(writers.Terminal(stream), tmp_path)
    assert "4/4" in stream.getvalue() and "━" in stream.getvalue()
    assert "finished after" in stream.getvalue()


def test_a_line_of_the_log_does_not_begin_within_the_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log, stream = logging.getLogger("kdjax"), Terminal()
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", log.propagate)
    parsing.log_to_terminal()
    hook = writers.Terminal(stream)
    hook.train_begin(a_run(tmp_path))
    hook.step_end(record(1))
    log.info("[step] 1 is the best")
    hook.train_end("finished", None)
    assert sys.stderr.getvalue() == ""
    line = r"\x1b\[2K\d\d:\d\d:\d\d \[step\] 1 is the best\n"  # after the bar was erased
    assert re.search(line, stream.getvalue())


def test_metrics_jsonl_drops_what_will_be_written_again(tmp_path):
    play(writers.JsonLines(tmp_path), tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["kind"], entry["step"]) for entry in lines] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("train", 3),
        ("train", 4),
    ]
    assert lines[1]["tokens_per_second"] == 128
    path.write_text(path.read_text() + '{"kind": "tr')  # cut short by a kill
    resumed = writers.JsonLines(tmp_path)
    resumed.train_begin(a_run(tmp_path, start=2))
    resumed.train_end("interrupted", None)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_tensorboard_holds_the_scalars(tmp_path):
    play(writers.TensorBoard(tmp_path), tmp_path)
    (events,) = (tmp_path / "tensorboard").iterdir()
    data = events.read_bytes()
    assert b"train/loss" in data and b"eval/agreement" in data


def make_wandb(seen):
    run = types.SimpleNamespace(
        log=lambda values, step: seen.append((step, values)),
        finish=lambda exit_code: seen.append(("end", exit_code)),
    )
    return types.SimpleNamespace(init=lambda **kwargs: seen.append(kwargs["id"]) or run)


def make_trackio(seen):
    run = types.SimpleNamespace(
        log=lambda values, step: seen.append((step, values)), finish=lambda: seen.append(("end", 0))
    )
    return types.SimpleNamespace(init=lambda project, name, **_: seen.append(name) or run)


def make_mlflow(seen, known=()):
    return types.SimpleNamespace(
        set_experiment=lambda project: None,
        search_runs=lambda **kwargs: [run for run in known if run in kwargs["filter_string"]],
        start_run=lambda run_id, run_name: seen.append(run_name),
        log_params=lambda values: None,
        log_metrics=lambda values, step: seen.append((step, values)),
        end_run=lambda status: seen.append(("end", {"FINISHED": 0, "FAILED": 1}[status])),
    )


@pytest.mark.parametrize("make", [make_wandb, make_trackio, make_mlflow])
def test_a_tracker_is_missed_and_used(tmp_path, monkeypatch, make):
    name = make.__name__.removeprefix("make_")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"{name}:p: {name} is not installed. pip install {name}"):
        writers.Tracker(f"{name}:p", tmp_path)
    seen = []
    monkeypatch.setitem(sys.modules, name, make(seen))
    play(writers.Tracker(f"{name}:p", Path("a#1: 50%?")), tmp_path)
    assert seen.pop(0) == "a-1- 50--"  # an id takes no other characters
    assert [step for step, _ in seen] == [0, 2, 4, "end"] and seen[-1][1] == 0
    assert seen[1][1]["train/loss"] == 1.5


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_tracker_that_is_installed_has_the_scalars(tmp_path, monkeypatch, name):
    """The two that write to the disk; a second run of the name goes on."""
    module = pytest.importorskip(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if name == "mlflow":
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        module.set_tracking_uri(f"file:{tmp_path}/mlflow")
    for _ in range(2):
        play(writers.Tracker(f"{name}:p", tmp_path / "a"), tmp_path)
    if name == "mlflow":
        (run,) = module.search_runs(experiment_names=["p"], output_format="list")
        assert run.info.status == "FINISHED" and run.data.metrics["train/loss"] == 1.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_guard_names_what_is_not_finite(tmp_path, bad):
    guard = NonFiniteGuard(tmp_path)
    assert not guard.step_end(record(1))
    with pytest.raises(NonFiniteError, match=r"step 2: grad_norm not finite"):
        guard.step_end(record(2, grad_norm=bad))
    assert (tmp_path / "nonfinite_step_2.npz").exists()


def test_long_work_says_how_long_it_takes(monkeypatch, caplog):
    """Costs of a 135M on two cores were hours of "6 of 1205"."""
    clock = iter([0.0, 0.0, 25.0, 25.0, 25.0, 50.0, 50.0, 50.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, "kdjax"):
        passes = iter(progress.counted(range(1205), "passes"))
        assert [next(passes) for _ in range(3)] == [0, 1, 2]
    monkeypatch.undo()
    said = [one.getMessage() for one in caplog.records]
    assert said == [f"passes: {n} of 1205, about 8:21:{s} more" for n, s in ((1, 40), (2, 15))]
