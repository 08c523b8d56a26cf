"""Where a run is in its phases, and when the one under way ends: by steps, by seconds, by a rule.

A saved step holds the `Progress`. What the clock has decided, the step after which a phase ended,
is in it too, so that a run that is resumed behind it is the same run.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kdjax.config import Config, last_step
from kdjax.data.rollouts import ROUND
from kdjax.device.cluster import SharedFlag
from kdjax.training.hooks import Hook, StepRecord

PHASE = "phase"  # in a step's record: its `Progress`; and the kind of news that a phase begins
OVERLAP = "overlap"  # the figure of a round that `train.until` names
LEAST_RISE, READINGS = 0.005, 3  # `until`: a smaller rise over so many rounds ends the phase


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come; JSON by `dataclasses.asdict`."""

    number: int = 0  # of the phase under way; as many as there are phases: the run has finished
    begun: int = 0  # the optimizer steps that were done before it
    seconds: float = 0.0  # that its steps and rounds have taken
    readings: tuple[float, ...] = ()  # of `until`, one a round
    last: int | None = None  # the step after which `until` ends it, once that is known
    ended: tuple[int, ...] = ()  # the steps after which the phases before it ended

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Progress":
        """The progress of a saved step's record; that of a run's begin if it has none."""
        saved: dict[str, Any] = dict(record.get(PHASE) or {})
        for name in {"readings", "ended"} & saved.keys():
            saved[name] = tuple(saved[name])
        return cls(**saved)

    def end(self, step: int) -> "Progress":
        """The progress where the phase has ended after `step`, and the next begins."""
        return Progress(self.number + 1, begun=step, ended=(*self.ended, step))


class Pace(Hook):
    """Counts a phase's seconds and reads its rounds; `is_over` says after which step it ends.

    The first step and the first round of a process compile: their seconds do not count. Held-out
    evaluations and saves are no part of any.
    """

    def __init__(self, config: Config, progress: Progress, flag: SharedFlag):
        self.progress, self._flag = progress, flag
        self._limit, self._until = config.train.seconds, config.train.until
        self._steps, self._every = last_step(config), config.rollout.every
        self._compiled: set[str] = set()

    def _spend(self, kind: str, seconds: float) -> None:
        if kind in self._compiled:
            spent = self.progress.seconds + seconds
            self.progress = dataclasses.replace(self.progress, seconds=spent)
        self._compiled.add(kind)

    def step_end(self, record: StepRecord) -> None:
        self._spend("step", record.seconds)

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Reads a round; one that shows that the overlap rises no more is the phase's last."""
        if kind != ROUND:
            return
        self._spend(ROUND, figures["seconds"])
        if not self._until or OVERLAP not in figures:
            return
        readings = (*self.progress.readings, figures[OVERLAP])
        risen = len(readings) <= READINGS or readings[-1] - readings[-1 - READINGS] >= LEAST_RISE
        last = self.progress.last if risen else step - 1 + self._every
        self.progress = dataclasses.replace(self.progress, readings=readings, last=last)

    def is_over(self, step: int) -> bool:
        """Whether the phase ends after this step; every process asks at every step."""
        late = bool(self._limit) and self._flag.any(self.progress.seconds >= self._limit)
        last = self._steps if self.progress.last is None else min(self._steps, self.progress.last)
        return late or step >= last
