"""Guards: hooks that stop a run whose result would be useless."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.config import RolloutConfig
from kdjax.data.rollouts import ROUND, read_round, round_path, rounds_folder
from kdjax.errors import COLLAPSED, NOT_FINITE, KdjaxError, UserError
from kdjax.formats.files import replacing
from kdjax.formats.saved import saved_steps, step_folder
from kdjax.training.hooks import Hook, StepRecord, kl_names
from kdjax.training.pair import HOW_TO_ALLOW
from kdjax.training.vocabulary import HOW_TO_GO_ON, LEAST_MASS


class NonFiniteError(KdjaxError, FloatingPointError):
    """Loss or gradient became NaN or infinite."""

    status = NOT_FINITE


class NonFiniteGuard(Hook):
    """Stops the run at the first NaN or Inf and saves its batch."""

    def __init__(self, workdir: Path, process: int = 0):
        self._workdir = workdir
        self._part = f"_process_{process}" if process else ""  # each process has its own rows

    def step_end(self, record: StepRecord) -> None:
        """Raises `NonFiniteError` before the step can be saved."""
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
            "before it. Lower optim.learning_rate (--learning-rate), or look at those rows."
        )

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """Raises `NonFiniteError` for a held-out figure that is not finite, before a save."""
        bad = [name for name, value in figures.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(
                f"held-out evaluation at step {step}: {', '.join(bad)} not finite. The last "
                "checkpoint is from before it. Lower optim.learning_rate, or look at the models."
            )


class NoSignalGuard(Hook):
    """Refuses a fresh run whose student predicts what its teacher does: nothing is left to learn.

    `training.pair` finds equal weights before it loads them; this finds equal weights in another
    precision. It reads the evaluation before step 1, so a resumed run goes on.
    """

    # Copies of the demo's teacher: Q8_0 up to 4.4e-4 nats with 98.7 to 99.1% agreement, F16 1.7e-4
    # with 99.2% and more, Q6_K from 1.3e-3, Q4_0 4.7e-2 (2026-11-24-copies-of-a-teacher.md).
    MOST_KL, LEAST_AGREEMENT = 1e-3, 0.98

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """Raises `UserError` if both figures at step 0 show one model in two precisions."""
        name, _ = kl_names(figures)
        if step or name not in figures:  # no teacher
            return
        kl, agreement = figures[name], figures["agreement"]
        if kl >= self.MOST_KL or agreement <= self.LEAST_AGREEMENT:
            return
        raise UserError(
            f"before step 1 the student predicts held-out text as its teacher does: {name} "
            f"{kl:.2g} nats, agreement {agreement:.2%}; expected {self.MOST_KL:g} nats or more, or "
            f"at most {self.LEAST_AGREEMENT:.0%}. It is the same model in another precision and "
            f"teaches nothing. Give two different models, or, if this is meant, {HOW_TO_ALLOW}"
        )


class SharedGuard(Hook):
    """Refuses a fresh run whose teacher says most of what it knows by ids that no student has."""

    def __init__(self, allowed: bool):
        self._allowed = allowed

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """Raises `UserError` if the teacher's mass on the shared ids is below `LEAST_MASS`."""
        mass = figures.get("teacher_mass", 1.0)
        if step or self._allowed or mass >= LEAST_MASS:
            return
        raise UserError(
            f"found two tokenizers, and {mass:.1%} of the teacher's probability on the ids that "
            f"both have; expected {LEAST_MASS:.0%} or more. The student would learn the rest "
            f"wrongly. Choose another teacher, or {HOW_TO_GO_ON}"
        )


class CollapseError(KdjaxError):
    """The student's self-generated answers became too long, or repeat themselves."""

    status = COLLAPSED


class CollapseGuard(Hook):
    """Stops a run before a round of answers that are `growth` times as long, or repeat themselves
    as much, as those of round 0, or are as far from what the teacher would say.

    Answers end at the longest allowed: where round 0 leaves no room to double, a share of cut-off
    answers that does, to half or more, counts as length. The divergence is that of the prompts that
    every round answers, where a student that is taught well comes nearer to its teacher.
    """

    # Lower bounds for round 0's figures, since noise doubles small ones: a share of ids, and nats.
    _LEAST_REPEATED, _LEAST_DIVERGENCE = 0.05, 0.02

    def __init__(self, workdir: Path, settings: RolloutConfig):
        self._workdir, self._settings = workdir, settings
        self._first: Mapping[str, float] = {}

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Raises `CollapseError`, with both rounds' figures and the last good checkpoint."""
        if kind != ROUND:
            return
        settings, number = self._settings, int(figures["round"])
        folder = rounds_folder(self._workdir)
        if number == 0:
            self._first = figures
        if number == 0 or not settings.stop_growth:
            return
        if not self._first:  # a resumed run
            self._first = read_round(round_path(folder, 0)).record["figures"]
        first, growth = self._first, settings.stop_growth
        limits = {
            "length": growth * max(first["length"], 1.0),
            "repeated": growth * max(first["repeated"], self._LEAST_REPEATED),
        }
        if first["cut_off"] < 0.5:
            limits["cut_off"] = max(growth * first["cut_off"], 0.5)
        if "divergence" in first:  # with a teacher that runs
            least = max(first["divergence"], self._LEAST_DIVERGENCE)
            limits["divergence"] = growth * least
        # A round lacks a divergence only if all compared prompts got empty answers.
        now = {"divergence": math.inf} | dict(figures)
        over = [name for name, limit in limits.items() if now[name] >= limit]
        if not over:
            return
        evidence = "\n  ".join(
            f"{name}: {first[name]:.4g} in round 0, now "
            f"{f'{now[name]:.4g}' if name in figures else 'none, of empty answers'}; the limit is "
            f"{limits[name]:.4g}"
            for name in over
        )
        good = max(step - 1 - settings.every, 0)  # the student of that step wrote the round before
        steps = [saved for saved in saved_steps(self._workdir) if saved <= good]
        kept = "No checkpoint of it is kept: raise checkpoint.keep, or set checkpoint.every."
        if not good:
            kept = "That is the start: begin anew, in another workdir."
        elif steps:
            kept = f"The last good checkpoint is {step_folder(self._workdir, steps[-1])}."
        raise CollapseError(
            f"round {number}, before step {step}: the student's answers collapse\n"
            f"  {evidence}\nThe answers are in {round_path(folder, number)}, round 0 next to "
            f"it; the student of step {good} still wrote good ones. {kept} Lower "
            "optim.learning_rate or rollout.share, give the forward KL more weight "
            "(loss.divergence), or raise rollout.stop_growth."
        )
