"""The smoke verdict: does the configured run start to learn? Gate F-DISTILL-SMOKE-001.

`--config.smoke.steps=N` takes the first N optimizer steps of the configured run, schedule and all,
and compares the held-out loss, the one that training minimises, before and after. It passes if the
loss fell and every figure is finite.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from kdjax.config import Config, LossConfig
from kdjax.progress import format_seconds
from kdjax.training.hooks import Hook, Run, StepRecord, kl_names
from kdjax.watch.guards import NonFiniteError

GATE = "F-DISTILL-SMOKE-001"


class Verdict(Hook):
    """Judges a smoke run and prints the verdict on standard output."""

    def __init__(self, config: Config):
        self._config = config
        self._held_out: dict[int, dict[str, float]] = {}
        self._seconds: list[float] = []
        self.result = "UNDECIDED"  # PASS or FAIL after the last step

    def train_begin(self, run: Run) -> None:
        self._positions = run.tokens_per_step

    def step_end(self, record: StepRecord) -> None:
        self._seconds.append(record.seconds)

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        self._held_out[step] = dict(figures)

    def outcome(self, error: BaseException | None) -> dict[str, Any]:
        """The verdict and its evidence; `error` is the exception that ended the run, if any.

        Losses are in nats a token, times in seconds; the projection counts steps alone.
        """
        steps = self._config.smoke.steps
        total = self._config.train.steps
        before, after = (self._held_out.get(step) for step in (0, steps))
        # The first step of a process holds compilation.
        measured = self._seconds[1:] or self._seconds
        median = statistics.median(measured) if measured else None
        verdict, why = _judge(before, after, error, len(self._seconds), steps)
        return {
            "gate": GATE,
            "verdict": verdict,
            "why": why,
            "steps": len(self._seconds),
            "before": before and _select(before),
            "after": after and _select(after),
            "warning": _warn(before, after, self._config.loss),
            "median_step_seconds": median,
            "full_run_steps": total,
            "projected_seconds": median and median * total,
        }

    def train_end(self, reason: str, error: BaseException | None) -> None:
        outcome = self.outcome(error)
        self.result = outcome["verdict"]
        print("\n".join(self._lines(outcome)), flush=True)

    def _lines(self, outcome: Mapping[str, Any]) -> list[str]:
        before, after = outcome["before"], outcome["after"]
        lines = [f"{GATE} {outcome['verdict']}: {outcome['why']}"]
        if before and after:
            kl, trained = kl_names(before)
            names = {"loss": "loss", "student_ce": "ce", kl: kl}
            loss = self._config.loss
            if (loss.divergence, loss.temperature) != ("forward_kl", 1):
                names[trained] = f"{trained}(T={loss.temperature:g})"
            moves = (
                f"{title} {before[name]:.6f} -> {after[name]:.6f}"
                for name, title in names.items()
                if name in before
            )
            lines.append("  held-out: " + "  ".join(moves))
        if outcome["warning"]:
            lines.append(f"  warning: {outcome['warning']}")
        if median := outcome["median_step_seconds"]:
            lines.append(
                f"  {outcome['steps']} steps, median {median:.4f} s a step "
                f"({self._positions / median:,.0f} tok/s); the full run's "
                f"{outcome['full_run_steps']} steps would take "
                f"{format_seconds(outcome['projected_seconds'])} (h:mm:ss or m:ss), evaluations, "
                "saves and compilation not counted"
            )
        return lines


def _select(figures: Mapping[str, float]) -> dict[str, float]:
    names = ("loss", "student_ce", *kl_names(figures))  # KLs exist only with a teacher
    return {name: figures[name] for name in names if name in figures}


def _warn(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None, loss: LossConfig
) -> str | None:
    """Warns that the student leaves its teacher although the trained loss falls."""
    if before is None or after is None:
        return None
    kl = kl_names(before)[0]
    if not after.get(kl, 0.0) > before.get(kl, 0.0) or not after["loss"] < before["loss"]:
        return None
    return (
        f"the trained loss fell and the held-out KL at T = 1 rose from {before[kl]:.4f} to "
        f"{after[kl]:.4f}: the student's own predictions move away from the teacher's. "
        f"loss.temperature={loss.temperature:g} and loss.alpha={loss.alpha:g} train something "
        "else; --config.loss.temperature=1 trains that KL, a lower --config.loss.alpha weights the "
        "teacher more than the text."
    )


def _judge(
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
    error: BaseException | None,
    done: int,
    steps: int,
) -> tuple[str, str]:
    if isinstance(error, NonFiniteError):
        return "FAIL", str(error)
    if error is not None:
        return "UNDECIDED", f"ended after {done} of {steps} steps by {type(error).__name__}"
    if before is None or after is None or done != steps:
        return "UNDECIDED", f"stopped after {done} of {steps} steps; the same command starts over"
    bad = [
        f"{name} {when}"
        for when, figures in (("before", before), ("after", after))
        for name, value in figures.items()
        if not math.isfinite(value)
    ]
    if bad:
        return "FAIL", f"held-out figures not finite: {', '.join(bad)}"
    fell = after["loss"] < before["loss"]
    verb = "fell from" if fell else "did not fall:"
    why = f"held-out loss {verb} {before['loss']:.6f} to {after['loss']:.6f} in {done} steps"
    return ("PASS" if fell else "FAIL"), why
