"""Renders chat templates within bounds of time, memory and length.

A template is a program that came with a model, and Jinja's sandbox bounds none of them. It runs
in a separate process, one for all templates (`template_worker`), by Transformers' function and on
one date.
"""

import atexit
import contextlib
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.errors import UserError
from kdjax.models.template_worker import SECONDS

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LENGTH = struct.Struct("<Q")
_MOST, _TIMES = 1 << 20, 16  # characters, and times the messages' characters, that one may write
_lock = threading.Lock()
_workers: dict[int, "_Worker"] = {}  # by process: one that was forked has none


class Rendering(NamedTuple):
    """A conversation as text, and the characters `[start, end)` between its `generation` marks."""

    text: str
    generated: tuple[tuple[int, int], ...]


def has_marks(template: str) -> bool:
    """Whether a template says with `{% generation %}` what the assistant writes."""
    return _MARKED.search(template) is not None


def render_template(
    template: str, messages: Sequence[dict[str, Any]], given: Mapping[str, Any]
) -> Rendering:
    """Renders a conversation; `given` is what Transformers' `apply_chat_template` takes by name.

    Raises `UserError` if the template raises anything, takes more than 10 s of processor time or
    1 GiB, or writes more than 16 times the characters of messages and `given`, and a million.
    """
    most = _MOST + _TIMES * len(repr((messages, given)))
    given = {**given, "return_assistant_tokens_mask": has_marks(template)}
    with _lock:
        worker = _workers.get(os.getpid())
        if worker is None:
            _workers.clear()
            worker = _workers[os.getpid()] = _Worker()
            atexit.register(worker.end)
        try:
            answer = worker.ask((most, template, [*messages], given))
        except BaseException:
            del _workers[os.getpid()]
            worker.end()
            raise
    if "refused" in answer:
        raise UserError(f"the chat template refuses the messages: {answer['refused']}")
    if "exceeded" in answer:
        raise _exceeded(answer["exceeded"])
    return Rendering(answer["text"], tuple((start, end) for start, end in answer["generated"]))


def _exceeded(what: str) -> UserError:
    return UserError(
        f"the chat template takes {what}. Use the template of the model's publisher, or a "
        "tokenizer with another (data.tokenizer, --tokenizer)."
    )


class _Worker:
    """The process that renders."""

    def __init__(self) -> None:
        script, self._owner = Path(__file__).with_name("template_worker.py"), os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the command
            env={**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        )
        with contextlib.suppress(BrokenPipeError):
            self._send([path for path in sys.path if path] or sys.path)

    def _send(self, value: Any) -> None:
        data, pipe = pickle.dumps(value), self._process.stdin
        assert pipe is not None
        pipe.write(_LENGTH.pack(len(data)) + data)
        pipe.flush()

    def ask(self, request: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the worker's answer; raises `UserError` if it died of its limits."""
        pipe = self._process.stdout
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            self._send(request)
        head = pipe.read(_LENGTH.size)
        data = pipe.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else b""
        if data:
            return json.loads(data)
        status = self._process.wait()
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            raise _exceeded(f"more than {SECONDS} s")
        raise _exceeded(f"the process that renders it to an end (status {status})")

    def end(self) -> None:
        """Ends the process, if this one began it and no fork's parent did."""
        if os.getpid() != self._owner:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process.kill()
        self._process.wait()
