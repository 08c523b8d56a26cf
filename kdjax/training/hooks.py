"""What may watch a run and stop it: the loop calls these in order and knows none by name."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.data.rollouts import FOLDER, read_round, round_path
from kdjax.errors import (
    COLLAPSED,
    FINISHED,
    INTERRUPTED,
    NOT_FINITE,
    SMOKE_FAILED,
    KdjaxError,
    status_of,
)
from kdjax.formats.files import replacing
from kdjax.formats.saved import saved_steps, step_folder
from kdjax.models.decoder import Params


@dataclasses.dataclass(frozen=True)
class Run:
    """What a hook may know before the first step."""

    workdir: Path
    start_step: int  # optimizer steps already done
    total_steps: int  # the last step that this process will do
    tokens_per_step: int  # positions, padding included
    flops_per_token: float  # of teacher forward, student forward and backward
    peak_flops: float | None  # of all devices together, dense bf16, where known
    log_every: int
    config: Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step; delivered after the next one was dispatched."""

    step: int  # 1 is the first
    figures: Mapping[str, float]
    seconds: float  # wall time since the previous record
    batch: Mapping[str, np.ndarray]


def kl_names(figures: Mapping[str, float]) -> tuple[str, str]:
    """What held-out figures call the forward KL at T = 1, and the trained divergence at T.

    Over all ids, or over those of a cache.
    """
    return ("kl", "divergence") if "kl" in figures else ("kl_topk", "divergence_topk")


class Hook:
    """Does nothing; subclasses override what they need."""

    def train_begin(self, run: Run) -> None:
        """Before the first step of this process."""

    def round_begin(self, step: int, figures: Mapping[str, float]) -> None:
        """Before `step`, the first that trains on a new round of the student's own answers."""

    def step_end(self, record: StepRecord) -> bool | None:
        """After each step, in order. True stops: saved, no more evaluated, "interrupted"."""

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """After each held-out evaluation; step 0 is before training."""

    def student(self, step: int, params: Params) -> None:
        """After `eval_end`: the parameters that were evaluated; the next step donates them."""

    def save_begin(self, step: int) -> None:
        """After a save of `step` was started."""

    def train_end(self, reason: str, error: BaseException | None) -> None:
        """Once, however the run ends: "finished", "interrupted" or "failed".

        `error` is the exception that ends the run, None unless it failed. Every hook is called,
        even after one that raised here.
        """


def exit_status(reason: str, error: BaseException | None, verdict: str | None = None) -> int:
    """The exit status of a run that ended so; `verdict` is a smoke run's PASS, FAIL or UNDECIDED.

    One place for `main`, which exits with it, and for the receipt, which records it.
    """
    if verdict in ("PASS", "FAIL"):
        return FINISHED if verdict == "PASS" else SMOKE_FAILED
    if error is not None:
        return status_of(error)
    undecided = reason == "interrupted" or verdict is not None
    return INTERRUPTED if undecided else FINISHED


class CollapseError(KdjaxError):
    """A student's own answers became too long, or repeat themselves."""

    status = COLLAPSED


class CollapseGuard(Hook):
    """Stops a run before a round of answers that are `growth` times as long, or repeat themselves
    as much, as those of round 0, or are as far from what the teacher would say.

    Answers end at the longest allowed: where round 0 leaves no room to double, a share of cut-off
    answers that does, to half or more, counts as length. The divergence is that of the prompts that
    every round answers, where a student that is taught well comes nearer to its teacher.
    """

    # What round 0 counts as at least, since noise doubles less: a share of ids, and nats.
    _LEAST_REPEATED, _LEAST_DIVERGENCE = 0.05, 0.02

    def __init__(self, workdir: Path, every: int, growth: float):
        self._workdir, self._every, self._growth = workdir, every, growth
        self._first: Mapping[str, float] = {}

    def round_begin(self, step: int, figures: Mapping[str, float]) -> None:
        """Raises `CollapseError`, with both rounds' figures and the last good checkpoint."""
        number, folder = int(figures["round"]), self._workdir / FOLDER
        if number == 0:
            self._first = figures
        if number == 0 or not self._growth:
            return
        if not self._first:  # a resumed run
            self._first = read_round(round_path(folder, 0)).record["figures"]
        first = self._first
        limits = {
            "length": self._growth * max(first["length"], 1.0),
            "repeated": self._growth * max(first["repeated"], self._LEAST_REPEATED),
        }
        if first["cut_off"] < 0.5:
            limits["cut_off"] = max(self._growth * first["cut_off"], 0.5)
        if "divergence" in first:  # with a teacher that can read
            least = max(first["divergence"], self._LEAST_DIVERGENCE)
            limits["divergence"] = self._growth * least
        over = [name for name, limit in limits.items() if figures[name] >= limit]
        if not over:
            return
        evidence = "\n  ".join(
            f"{name}: {first[name]:.4g} in round 0, now {figures[name]:.4g}; the limit is "
            f"{limits[name]:.4g}"
            for name in over
        )
        good = max(step - 1 - self._every, 0)  # the student there wrote the round before
        steps = [saved for saved in saved_steps(self._workdir) if saved <= good]
        kept = "No checkpoint from before it is kept: raise checkpoint.keep."
        if steps:
            kept = f"The last good checkpoint is {step_folder(self._workdir, steps[-1])}."
        raise CollapseError(
            f"round {number}, before step {step}: the student's own answers collapse\n"
            f"  {evidence}\nThe answers are in {round_path(folder, number)}, round 0 beside "
            f"it; the student of step {good} still wrote good ones. {kept} Lower "
            "optim.learning_rate or rollout.share, give the forward KL more weight "
            "(loss.divergence), or raise rollout.stop_growth."
        )


class NonFiniteError(KdjaxError, FloatingPointError):
    """Loss or gradient became NaN or infinite."""

    status = NOT_FINITE


class NonFiniteGuard(Hook):
    """Stops the run at the first NaN or Inf and keeps the batch that made it."""

    def __init__(self, workdir: Path, process: int = 0):
        self._workdir = workdir
        self._part = f"_process_{process}" if process else ""  # each process has rows of its own

    def step_end(self, record: StepRecord) -> None:
        """Raises `NonFiniteError` before anything of the step can be saved."""
        bad = [name for name, value in record.figures.items() if not math.isfinite(value)]
        if not bad:
            return
        path = self._workdir / f"nonfinite_step_{record.step}{self._part}.npz"
        columns: dict[str, Any] = dict(record.batch)
        kept = f"The step's batch is in {path}"
        try:
            with replacing(path) as file:
                np.savez_compressed(file, **columns)
        except OSError as error:
            kept = f"The step's batch could not be kept ({error})"
        raise NonFiniteError(
            f"step {record.step}: {', '.join(bad)} not finite. {kept}; the last checkpoint is from "
            "before it. Lower optim.learning_rate, or look at those rows."
        )

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """Raises `NonFiniteError` for a held-out figure that is none, before that step is saved."""
        bad = [name for name, value in figures.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(
                f"held-out evaluation at step {step}: {', '.join(bad)} not finite. The last "
                "checkpoint is from before it. Lower optim.learning_rate, or look at the models."
            )
