"""Chooses the best saved step by a held-out figure, and stops a run that makes it worse."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kdjax.config import Config
from kdjax.errors import COLLAPSED, KdjaxError, UserError
from kdjax.formats.saved import Best
from kdjax.losses.shared import OF_COMPARED

RISING = ("agreement", "acceptance")  # figures that should rise
START = "start"  # in a step's record: the figure before training
BEGIN = "begin"  # in a step's record: that figure by batch, if it may stop the run


class Part(NamedTuple):
    """A held-out figure on one batch: its mean, and its number of positions."""

    mean: float
    count: float


class WorseError(KdjaxError):
    """A run made the student worse on the held-out text."""

    status = COLLAPSED


def read_figure(figures: Mapping[str, float], name: str) -> tuple[str, float]:
    """Finds the figure of that name, or its counterpart for a top-k cache; returns its name too.

    Raises `UserError` for an unknown name.
    """
    found = next((n for n in (name, f"{name}_topk") if n in figures), None)
    if found is None:
        raise UserError(
            f"found no held-out figure {name!r} to choose the best checkpoint by; expected one of "
            f"{', '.join(figures)}. Set eval.best."
        )
    return found, figures[found]


def list_parts(batches: Sequence[Mapping[str, Any]], name: str) -> list[Part]:
    """A figure of each batch, with the number of positions that it is a mean over."""
    compared = name in OF_COMPARED
    shares = [batch.get("compared", 1.0) if compared else 1.0 for batch in batches]
    return [Part(b[name], b["tokens"] * share) for b, share in zip(batches, shares, strict=True)]


def compare_parts(before: Sequence[Part], now: Sequence[Part]) -> tuple[float, float]:
    """Growth of a mean over the same batches, and its standard error.

    Batches are paired, so that their difficulty cancels. With one batch the error is unknown:
    infinite.
    """
    pairs = [(b.mean, a.mean, a.count) for b, a in zip(before, now, strict=True)]
    total, n = math.fsum(count for *_, count in pairs), len(pairs)
    grown = math.fsum((a - b) * count for b, a, count in pairs) / total
    if n < 2:
        return grown, math.inf
    squares = math.fsum(((a - b - grown) * count) ** 2 for b, a, count in pairs)
    return grown, math.sqrt(squares * n / (n - 1)) / total


def find_bound(now: Sequence[Part], before: Sequence[Part] | None = None) -> float:
    """Half of the 95% interval of a mean, or of its growth over the same batches.

    Student's t with a degree of freedom less than batches: 2.36 standard errors for eight. With one
    batch infinite.
    """
    from scipy.special import stdtrit  # 0.9 s, which no training run should wait for

    nothing = [Part(0.0, part.count) for part in now]
    _, error = compare_parts(before or nothing, now)
    return error if len(now) < 2 else error * float(stdtrit(len(now) - 1, 0.975))


class Judge:
    """Compares each held-out evaluation with the best saved step's and with the first."""

    def __init__(self, name: str, errors: float, record: Mapping[str, Any]):
        """`record` is that of the step that the run goes on from, empty for none; `errors` are the
        standard errors that the run may be worse by, 0: it is not compared."""
        self._name, self._errors = name, errors
        self.best, self._start = Best.read(record), Best.read(record, START)
        begin = record.get(BEGIN)
        self._begin = begin and [Part(*part) for part in begin]
        self._now: Best | None = None  # the last evaluation, and its batches
        self._parts: list[Part] = []

    @classmethod
    def of(cls, config: Config, record: Mapping[str, Any]) -> "Judge":
        """The judge of a run; it stops no smoke trial."""
        errors = 0.0 if config.smoke.steps else config.eval.stop_worse
        return cls(config.eval.best or "loss", errors, record)

    def see(self, step: int, figures: Mapping[str, float], parts: Sequence[Any]) -> None:
        """Records an evaluation, and the figures of each of its batches.

        Raises `WorseError` if training has made the figure worse by more than its error.
        """
        name, value = read_figure(figures, self._name)
        now = list_parts(parts, name)
        self._now, self._parts = Best(step, name, value), now
        if not self._errors or not self._begin or len(self._begin) != len(now):
            return
        grown, error = compare_parts(self._begin, now)
        worse = -grown if self._name in RISING else grown
        if worse > self._errors * error:
            kept = f"step {self.best.step} is the best saved" if self.best else "no step was saved"
            raise WorseError(
                f"step {step}: training has made the held-out {name} worse by {worse:.4g}, to "
                f"{value:.4g}; its standard error is {error:.2g}, and {self._errors:g} of them are "
                f"allowed. {kept}. Lower optim.learning_rate (--learning-rate), choose another "
                "figure (eval.best), or let it go on with eval.stop_worse=0."
            )

    def begin(self) -> None:
        """Takes the last evaluation as the figure before training."""
        if self._now:
            self._start, self._begin = self._now, self._parts if self._errors else None

    def describe(self) -> str:
        """Says which saved step is the best, and compares its figure with the initial one."""
        best, start, now = self.best, self._start, self._now
        if best is None:
            return "no step is saved"
        said = f"step {best.step} is the best that is saved: held-out {best.name} {best.value:.4g}"
        if start is None or start.name != best.name:
            return said
        if self._improves(best.value, start.value):
            return f"{said}; {start.value:.4g} before training"
        advice = "Lower optim.learning_rate: too high a rate destroys where there is little to mend"
        if best.step > 0:
            return f"{said}, no better than {start.value:.4g} before training. {advice}."
        after = f", and {now.value:.4g} after step {now.step}" if now and now.step else ""
        return (
            f"no step is better than the student before training: held-out {best.name} "
            f"{best.value:.4g} there{after}. Export and kdjax.load take step 0. {advice}."
        )

    def _improves(self, value: float, than: float) -> bool:
        return value > than if self._name in RISING else value < than

    def note_saved(self, step: int) -> Best | None:
        """The best saved step once this one is saved."""
        now, best = self._now, self.best
        if now is None or now.step != step:
            return best
        if best is None or best.name != now.name or self._improves(now.value, best.value):
            self.best = now
        return self.best

    @property
    def record(self) -> dict[str, Any]:
        """The record that a saved step holds."""
        record: dict[str, Any] = self.best.record if self.best else {}
        if self._start:
            record |= {START: self._start._asdict()}
        if self._begin:
            record |= {BEGIN: [list(part) for part in self._begin]}
        return record
