"""Logs the progress of long work, and where the seconds before a run's first step went."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_log = logging.getLogger("kdjax")

_SECONDS = 10.0
_T = TypeVar("_T")


class Heartbeat:
    """Logs a line if the last one, or the beginning of the work, was 10 s ago."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, text: str, *values: Any) -> None:
        if time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            _log.info(text, *values)


def format_seconds(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(items: Sequence[_T], what: str) -> Iterator[_T]:
    """Yields the items; logs the number done, as `what`, and the time that the others take."""
    heartbeat, begun = Heartbeat(), time.monotonic()
    for number, item in enumerate(items):
        if number:
            left = (time.monotonic() - begun) / number * (len(items) - number)
            values = what, number, len(items), format_seconds(left)
            heartbeat.say("%s: %d of %d, about %s more", *values)
        yield item


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Logs nothing of the block, which runs once more later and logs then."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    _log.addFilter(drop)
    try:
        yield
    finally:
        _log.removeFilter(drop)


class Phase(NamedTuple):
    """A part of a start; phases of several threads overlap."""

    name: str
    begun: float  # seconds after the process began
    seconds: float


PHASES: list[Phase] = []  # of the latest start, in the order of their ends


def count_seconds() -> float:
    """Seconds since this process began, its interpreter included."""
    return time.monotonic() - _BEGUN


def _find_begin() -> float:
    """The time at which the process began, on the clock of `time.monotonic`."""
    try:  # after the name, which may hold spaces, the 20th field: ticks since the machine's start
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, IndexError, OSError, ValueError):  # not Linux
        age = 0.0
    return time.monotonic() - age


_BEGUN = _find_begin()


@contextlib.contextmanager
def timing(name: str, begun: float | None = None) -> Iterator[None]:
    """Adds the block to `PHASES`; `begun`, as of `count_seconds`, is where it began if earlier."""
    begun = count_seconds() if begun is None else begun
    try:
        yield
    finally:
        PHASES.append(Phase(name, begun, count_seconds() - begun))


def describe_phases() -> str:
    """One line on the phases of a start, the longest first."""
    total = max(phase.begun + phase.seconds for phase in PHASES)
    since = min(phase.begun for phase in PHASES)
    longest = sorted(PHASES, key=lambda phase: -phase.seconds)
    parts = ", ".join(f"{phase.name} {phase.seconds:.1f}" for phase in longest)
    return f"first step after {total - since:.1f} s: {parts} (parts may overlap)"
