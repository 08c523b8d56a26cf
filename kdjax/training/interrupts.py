"""Signals that stop a run: the first requests a save, a second Ctrl-C ends it at once."""

import contextlib
import os
import select
import signal
import socket
import threading
from types import FrameType
from typing import Any

from kdjax.errors import QUIT

_PATIENCE = 2.0  # seconds that the main thread has to unwind after the second Ctrl-C
_STOPPING = b"\nstopping after this step; Ctrl-C again quits at once\n"
_QUITTING = b"\nquitting at once\n"
_SHOW_CURSOR = b"\x1b[?25h"  # the progress bar hides it


class StopSignals:
    """SIGTERM and the first SIGINT set `requested`; the second SIGINT is a `KeyboardInterrupt`.

    While XLA compiles or computes, Python calls no handler, and two signals become one. Therefore a
    thread receives each signal, reports it, and ends the process with `QUIT` if the main thread
    does not within two seconds. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._quit = False
        self._unwound = threading.Event()
        self._counting = threading.RLock()  # a handler may interrupt another
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._heard, self._told = socket.socketpair()
            self._heard.setblocking(False)
            self._told.setblocking(False)
            self._previous_fd = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count()
        if self._quit:
            raise KeyboardInterrupt

    def _count(self) -> None:
        """Reads pending signals, one byte each; the first thread to read counts them."""
        with self._counting, contextlib.suppress(BlockingIOError):
            for number in self._heard.recv(64):
                if number not in (signal.SIGTERM, signal.SIGINT) or self._quit:
                    continue
                # os.write: print is not safe inside a signal handler.
                if not self.requested:
                    self.requested = True
                    os.write(2, _STOPPING)
                elif number == signal.SIGINT:
                    self._quit = True
                    os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + _QUITTING)

    def _listen(self) -> None:
        while not self._unwound.is_set():
            select.select([self._heard], [], [])
            self._count()
            if self._quit and not self._unwound.wait(_PATIENCE):
                os._exit(QUIT)

    def __exit__(self, *_: object) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._unwound.set()
        self._told.send(b"\0")  # wakes the listener
        self._listener.join()
        self._heard.close()
        self._told.close()
