"""Logs the progress of long work: a command may take a laptop an hour."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

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


def counted(items: Sequence[_T], what: str) -> Iterator[_T]:
    """Yields the items; logs the number done, as `what`."""
    heartbeat = Heartbeat()
    for number, item in enumerate(items):
        if number:
            heartbeat.say("%s: %d of %d", what, number, len(items))
        yield item
