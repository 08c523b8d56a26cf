"""How far long work is, in the log: a laptop may be at one command for an hour."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

_log = logging.getLogger("kdjax")

_SECONDS = 10.0
_T = TypeVar("_T")


class Heartbeat:
    """Logs a line where the one before is 10 s old, or the work began then."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, text: str, *values: Any) -> None:
        if time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            _log.info(text, *values)


def counted(items: Sequence[_T], what: str) -> Iterator[_T]:
    """The items; how many of them are done is said under the words `what`."""
    heartbeat = Heartbeat()
    for number, item in enumerate(items):
        if number:
            heartbeat.say("%s: %d of %d", what, number, len(items))
        yield item
