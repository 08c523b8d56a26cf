"""What may watch a run and stop it: the loop calls these in order and knows none by name."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import (
    FINISHED,
    INTERRUPTED,
    NOT_FINITE,
    SMOKE_FAILED,
    KdjaxError,
    status_of,
)
from kdjax.formats.files import replacing


class Action(enum.Enum):
    """What a hook wants of the loop after a step."""

    CONTINUE = "continue"
    STOP = "stop"  # save, evaluate nothing more, end as interrupted


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

    def step_end(self, record: StepRecord) -> Action:
        """After each step, in order."""
        return Action.CONTINUE

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """After each held-out evaluation; step 0 is before training."""

    def student(self, step: int, params: Mapping[str, Any]) -> None:
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


class NonFiniteError(KdjaxError, FloatingPointError):
    """Loss or gradient became NaN or infinite."""

    status = NOT_FINITE


class NonFiniteGuard(Hook):
    """Stops the run at the first NaN or Inf and keeps the batch that made it."""

    def __init__(self, workdir: Path, process: int = 0):
        self._workdir = workdir
        self._part = f"_process_{process}" if process else ""  # each process has rows of its own

    def step_end(self, record: StepRecord) -> Action:
        """Raises `NonFiniteError` before anything of the step can be saved."""
        bad = [name for name, value in record.figures.items() if not math.isfinite(value)]
        if not bad:
            return Action.CONTINUE
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
