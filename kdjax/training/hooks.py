"""Hooks watch a run and may stop it: the loop calls them in order and knows none by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kdjax.errors import FINISHED, INTERRUPTED, SMOKE_FAILED, status_of
from kdjax.losses.shared import OF_COMPARED
from kdjax.models.decoder import Params


@dataclasses.dataclass(frozen=True)
class Run:
    """Facts that a hook may know before the first step."""

    workdir: Path
    start_step: int  # optimizer steps already done
    total_steps: int  # the last step of the run; train.seconds may end it earlier
    tokens_per_step: int  # positions, padding included
    flops_per_token: float  # teacher forward, student forward and backward
    peak_flops: float | None  # sum over all devices, dense bf16, if known
    log_every: int
    config: Mapping[str, object]
    eval_every: int = 0  # steps between held-out evaluations; 0: only before and after training


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step; delivered after the next one was dispatched."""

    step: int  # 1 is the first
    figures: Mapping[str, float]
    seconds: float  # wall time since the previous record
    batch: Mapping[str, np.ndarray]


# Figures of a teacher of another tokenizer: shares of positions, and of each side's probability.
SHARED = "compared", "teacher_mass", "student_mass"


def kl_names(figures: Mapping[str, float]) -> tuple[str, str]:
    """Names of the forward KL at T = 1 and of the trained divergence at T in held-out figures.

    They differ for figures over all ids and over a cache's ids.
    """
    return ("kl", "divergence") if "kl" in figures else ("kl_topk", "divergence_topk")


def drop_uncompared(figures: Mapping[str, float]) -> Mapping[str, float]:
    """Leaves out what is 0 since two tokenizers cut no position alike; else all figures stay."""
    names = (*OF_COMPARED, "divergence") if figures.get("compared") == 0 else ()
    return {name: value for name, value in figures.items() if name not in names}


class Hook:
    """Does nothing; subclasses override what they need."""

    def train_begin(self, run: Run) -> None:
        """Before the first step of this process."""

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Before `step`: the batch source's figures, with the kind of news."""

    def step_end(self, record: StepRecord) -> bool | None:
        """After each step, in order. True stops the run: saved, not evaluated, "interrupted"."""

    def eval_batches(self, step: int, batches: Sequence[Mapping[str, float]]) -> None:
        """Before `eval_end`: the figures of each held-out batch that has a weighted position."""

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """After each held-out evaluation; step 0 is before training."""

    def student(self, step: int, params: Params) -> None:
        """After `eval_end`, with the evaluated parameters; the next step donates them."""

    def save_begin(self, step: int) -> None:
        """After a save of `step` was started."""

    def train_end(self, reason: str, error: BaseException | None) -> None:
        """Once, at any end of the run: "finished", "interrupted" or "failed".

        `error` is the exception that ends the run, None unless it failed. Every hook is called,
        even if another one raises here.
        """


def exit_status(reason: str, error: BaseException | None, verdict: str | None = None) -> int:
    """The exit status of a run's end; `verdict` is a smoke run's PASS, FAIL or UNDECIDED.

    The command exits with it, and the receipt records it.
    """
    if verdict in ("PASS", "FAIL"):
        return FINISHED if verdict == "PASS" else SMOKE_FAILED
    if error is not None:
        return status_of(error)
    undecided = reason == "interrupted" or verdict is not None
    return INTERRUPTED if undecided else FINISHED
