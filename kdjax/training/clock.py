"""Ends a run by `train.seconds`. The record of a saved step has the clock's decision."""

from collections.abc import Mapping
from typing import Any

from kdjax.data.rollouts import ROUND
from kdjax.device.cluster import SharedFlag
from kdjax.training.hooks import Hook, StepRecord

CLOCK = "clock"  # in a step's record: the seconds so far, and whether they ended the run there
_EARLIER = "phase"  # the name that earlier versions gave it


class Clock(Hook):
    """Counts the seconds of steps and rounds; `is_over` says whether they have reached the limit.

    The first step and the first round of a process compile: their seconds do not count. Held-out
    evaluations and saves do not count either.
    """

    def __init__(self, limit: float, flag: SharedFlag, record: Mapping[str, Any]):
        """`limit` in seconds, 0 for none; `record` is that of the step that the run goes on from,
        empty for none; `flag` is shared by all processes."""
        self._limit, self._flag = limit, flag
        saved = self._read(record)
        self._seconds, self.ended = float(saved.get("seconds", 0.0)), bool(saved.get("ended"))
        self._compiled: set[str] = set()

    @staticmethod
    def _read(record: Mapping[str, Any]) -> Mapping[str, Any]:
        return record.get(CLOCK) or record.get(_EARLIER) or {}

    @classmethod
    def has_ended(cls, record: Mapping[str, Any]) -> bool:
        """Whether the clock ended the run at the step of this record."""
        return bool(cls._read(record).get("ended"))

    @property
    def record(self) -> dict[str, Any]:
        """Record of it in a saved step; empty without a limit."""
        return {CLOCK: {"seconds": self._seconds, "ended": self.ended}} if self._limit else {}

    def _spend(self, kind: str, seconds: float) -> None:
        if kind in self._compiled:
            self._seconds += seconds
        self._compiled.add(kind)

    def step_end(self, record: StepRecord) -> None:
        self._spend("step", record.seconds)

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        if kind == ROUND:
            self._spend(ROUND, figures["seconds"])

    def is_over(self) -> bool:
        """Whether the run ends now; every process asks after every step."""
        if self._limit and not self.ended:
            self.ended = self._flag.any(self._seconds >= self._limit)
        return self.ended
