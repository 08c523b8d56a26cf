"""Hooks that write: metrics.jsonl, TensorBoard, trackers of runs, and the terminal."""

import contextlib
import dataclasses
import importlib
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from kdjax.data.rollouts import ROUND
from kdjax.errors import UserError
from kdjax.formats.files import replacing, writing
from kdjax.progress import PHASES, Phase, count_seconds, describe_phases, format_seconds
from kdjax.training.hooks import SHARED, Hook, Run, StepRecord, drop_uncompared, kl_names

METRICS = "metrics.jsonl"
_NO_ID = re.compile(r"[/\\#?%:]")  # what no id of a run of Weights & Biases may hold


class JsonLines(Hook):
    """One JSON object a line in `workdir/metrics.jsonl`: kind, step and figures.

    On resumption, lines of steps after the checkpoint are dropped: they will be written again.
    """

    def __init__(self, workdir: Path):
        self._path = workdir / METRICS
        self._file: TextIO
        self._tokens_per_step = 0

    def train_begin(self, run: Run) -> None:
        """Drops lines beyond the step that the run resumes from."""
        kept = []
        if run.start_step > 0 and self._path.exists():
            for line in self._path.read_bytes().splitlines(keepends=True):
                try:
                    if json.loads(line)["step"] <= run.start_step:
                        kept.append(line)
                # A kill has cut this line short, or a disk has damaged it.
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
        with replacing(self._path) as file:
            file.write(b"".join(kept))
        self._tokens_per_step = run.tokens_per_step
        self._file = self._path.open("a", buffering=1)

    def _write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        # JSON has no NaN: such figures become null.
        known = {k: v if math.isfinite(v) else None for k, v in figures.items()}
        with writing(self._path):
            self._file.write(json.dumps({"kind": kind, "step": step, **known}) + "\n")

    def step_end(self, record: StepRecord) -> None:
        speed = self._tokens_per_step / record.seconds
        self._write("train", record.step, {**record.figures, "tokens_per_second": speed})

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        self._write("eval", step, figures)

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        self._write(kind, step, figures)

    def train_end(self, reason: str, error: BaseException | None) -> None:
        with writing(self._path):
            self._file.close()


class _Scalars(Hook):
    """Scalars named `train/loss` every `log.every` steps, and `eval/kl` at each evaluation."""

    _every = 1

    def train_begin(self, run: Run) -> None:
        self._every = run.log_every

    def step_end(self, record: StepRecord) -> None:
        if record.step % self._every == 0:
            self._log({f"train/{k}": v for k, v in record.figures.items()}, record.step)

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        self._log({f"eval/{k}": v for k, v in figures.items()}, step)

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        self._log({f"{kind}/{k}": v for k, v in figures.items()}, step)

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Hidden:
    """Hides a module from imports of one thread; one that is imported already stays."""

    module: str
    thread: int

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raises for the hidden module; other finders look for all else."""
        if name == self.module and threading.get_ident() == self.thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def _hiding(module: str) -> Iterator[None]:
    """Lets imports of this thread find no such module; others may import it meanwhile."""
    hidden = _Hidden(module, threading.get_ident())
    sys.meta_path.insert(0, hidden)
    try:
        yield
    finally:
        sys.meta_path.remove(hidden)


class TensorBoard(_Scalars):
    """Scalars for TensorBoard under `workdir/tensorboard`."""

    def __init__(self, workdir: Path):
        self._folder = workdir / "tensorboard"
        self._writer: Any = None

    def train_begin(self, run: Run) -> None:
        """Opens the event file; steps after the resumed one are purged."""
        with _hiding("torch"):  # which tensorboardX imports if it can: seconds
            from tensorboardX.event_file_writer import EventsWriter

        super().train_begin(run)
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"))
        if run.start_step:
            self._write(step=run.start_step + 1, session_log={"status": "START"})

    def _write(self, **event: Any) -> None:
        """Writes at once: the thread of a `SummaryWriter` dies on a full disk, and its queue then
        blocks the run for good.
        """
        from tensorboardX.proto import event_pb2

        make: Any = event_pb2  # its names are made when it is imported
        with writing(self._folder):
            self._writer.write_event(make.Event(wall_time=time.time(), **event))
            self._writer.flush()

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._write(step=step, summary={"value": values})

    def train_end(self, reason: str, error: BaseException | None) -> None:
        with writing(self._folder):
            self._writer.close()


class Tracking(NamedTuple):
    """An open run of a tracker."""

    log: Callable[[dict[str, float], int], Any]  # scalars of a step
    finish: Callable[[bool], Any]  # whether the run failed


def _begin_wandb(wandb: Any, project: str, name: str, workdir: Path, run: Run) -> Tracking:
    opened = wandb.init(
        project=project, id=name, resume="allow", dir=str(workdir), config=dict(run.config)
    )
    log = lambda scalars, step: opened.log(scalars, step=step)  # noqa: E731
    return Tracking(log, lambda failed: opened.finish(exit_code=int(failed)))


def _begin_trackio(trackio: Any, project: str, name: str, workdir: Path, run: Run) -> Tracking:
    opened = trackio.init(project, name=name, resume="allow", config=dict(run.config), embed=False)
    return Tracking(lambda scalars, step: opened.log(scalars, step), lambda _: opened.finish())


def _begin_mlflow(mlflow: Any, project: str, name: str, workdir: Path, run: Run) -> Tracking:
    mlflow.set_experiment(project)
    named = f"attributes.run_name = '{name.replace(chr(39), ' ')}'"
    found = mlflow.search_runs(filter_string=named, output_format="list", max_results=1)
    mlflow.start_run(run_id=found[0].info.run_id if found else None, run_name=name)
    if not found:  # a value that is logged never changes
        mlflow.log_params({key: str(value)[:500] for key, value in run.config.items()})
    log = lambda scalars, step: mlflow.log_metrics(scalars, step=step)  # noqa: E731
    return Tracking(log, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"))


_BEGIN = {"wandb": _begin_wandb, "trackio": _begin_trackio, "mlflow": _begin_mlflow}


def import_tracker(tracker: str) -> Any:
    """The module of `log.tracker`, such as wandb of "wandb:PROJECT".

    Raises `UserError` if it is not installed.
    """
    name = tracker.partition(":")[0]
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"log.tracker={tracker}: {name} is not installed. pip install {name}, or leave the "
            "field empty."
        ) from None


class Tracker(_Scalars):
    """Sends the scalars to Weights & Biases, Trackio or MLflow: `log.tracker`, NAME:PROJECT.

    The run there has the name of the workdir, and goes on where it was resumed.
    """

    def __init__(self, tracker: str, workdir: Path):
        self._module, self._workdir = import_tracker(tracker), workdir
        self._kind, _, self._project = tracker.partition(":")
        self._opened: Tracking

    def train_begin(self, run: Run) -> None:
        """Starts or resumes the run."""
        super().train_begin(run)
        name = _NO_ID.sub("-", self._workdir.name)
        begin = _BEGIN[self._kind]
        self._opened = begin(self._module, self._project, name, self._workdir, run)

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        self._opened.log(dict(scalars), step)

    def train_end(self, reason: str, error: BaseException | None) -> None:
        """Closes the run, as failed where it did."""
        self._opened.finish(reason == "failed")


class Terminal(Hook):
    """A progress bar on a terminal, plain lines elsewhere, with the same fields.

    One of the first plain lines says how long the run will take, since the next may be far off.
    """

    _FIRST_PACE = 3  # steps, and seconds, to measure before it

    def __init__(self, stream: Any = None):
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._seconds = self._steps = 0.0  # of the steps that were timed
        self._held_out = 0.0  # positions of an evaluation
        self._foretold = False

    def train_begin(self, run: Run) -> None:
        """Shows the bar if the stream is a terminal."""
        self._run, self._began = run, time.monotonic()
        if not self._stream.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(file=self._stream))
        self._task = self._bar.add_task(
            "first step compiles ...", total=run.total_steps, completed=run.start_step
        )
        self._bar.start()

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self._stream, flush=True)

    def step_end(self, record: StepRecord) -> None:
        """Prints every `log.every` steps, the first and the last."""
        run = self._run
        first = record.step == run.start_step + 1
        if not first:  # the first step of a process holds compilation
            self._seconds, self._steps = self._seconds + record.seconds, self._steps + 1
        line = self._line(record)
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, description=line)
        if record.step % run.log_every == 0 or first or record.step == run.total_steps:
            self._print(f"step {record.step:>6}/{run.total_steps}  {line}")
        if first and PHASES:
            begun = count_seconds() - record.seconds
            PHASES.append(Phase("first step", begun, record.seconds))
            self._print(describe_phases())
        enough = self._steps >= self._FIRST_PACE <= self._seconds
        if self._bar is None and enough and not self._foretold and record.step < run.total_steps:
            self._foretold = True
            left = format_seconds(self._seconds_left(record.step))
            pace = f"{self._seconds / self._steps:.2g} s a step"
            self._print(f"about {left} more for steps and evaluations, at {pace}")

    def _seconds_left(self, step: int) -> float:
        """Seconds to the last step and evaluation; a held-out position counts as a trained one."""
        run = self._run
        behind = {
            run.total_steps,
            *range(0, run.total_steps + 1, run.eval_every or run.total_steps),
        }
        evaluations = sum(at > step for at in behind)
        steps = run.total_steps - step + evaluations * self._held_out / run.tokens_per_step
        return steps * self._seconds / self._steps

    def _line(self, record: StepRecord) -> str:
        run, f = self._run, record.figures
        fields = [f"{name} {f[name]:.4f}" for name in ("loss", "ce", "divergence") if name in f]
        fields += [f"lr {f['learning_rate']:.2e}"] if "learning_rate" in f else []
        fields.append(f"grad {f['grad_norm']:.3f}")
        if self._steps:
            speed = run.tokens_per_step * self._steps / self._seconds
            fields.append(f"{speed:,.0f} tok/s")
            if run.peak_flops:
                fields.append(f"MFU {speed * run.flops_per_token / run.peak_flops:.1%}")
            fields.append(f"ETA {format_seconds(self._seconds_left(record.step))}")
        return "  ".join(fields)

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        f = drop_uncompared(figures)
        self._held_out = f["tokens"]
        fields = [
            f"{side} ce {f[f'{side}_ce']:.4f} (ppl {f[f'{side}_perplexity']:.3f})"
            for side in ("student", "teacher")
            if f"{side}_ce" in f
        ]
        kl, trained = kl_names(f)
        if kl in f:
            fields.append(f"{kl} {f[kl]:.4f}")
            if f[trained] != f[kl]:  # not the forward KL at T = 1
                fields.append(f"{trained}(T={f['temperature']:g}) {f[trained]:.4f}")
        if kl in f or SHARED[0] in f:
            compared = "agreement", "acceptance", "acceptance_topk", *SHARED
            fields += [f"{name} {f[name]:.4f}" for name in compared if name in f]
        fields.append(f"over {f['tokens']:,.0f} tokens")
        self._print(f"held-out at step {step}: {'  '.join(fields)}")

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        title, names = f"{kind} before step {step}", tuple(figures)
        if kind == ROUND:
            title = f"round {figures['round']:.0f} of answers"
            names = "length", "cut_off", "entropy", "repeated", "distinct", "divergence", "overlap"
        fields = [f"{name} {figures[name]:.4g}" for name in names if name in figures]
        self._print(f"{title}: {'  '.join(fields)}")

    def save_begin(self, step: int) -> None:
        self._print(f"checkpoint at step {step}")

    def train_end(self, reason: str, error: BaseException | None) -> None:
        """Removes the bar and says how the run ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._print(f"{reason} after {format_seconds(time.monotonic() - self._began)}")
