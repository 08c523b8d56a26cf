"""Untrusted programs in a subprocess: no network, limits on time, memory, processes and files.

Not a defence against code that sets out to break it: a kernel bug or a forged verdict would get
through. It keeps what a language model writes by accident from harming the machine or the figures.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kdjax.errors import UserError

_JAIL = Path(__file__).with_name("jail.py")
# Chatter of a program never reaches this pipe; what does is a few hundred bytes.
_REPORT_BYTES = 1 << 16
PASSED = "passed"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_seconds: float = 15.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30  # address space of each process
    processes: int = 8  # and threads, together
    file_bytes: int = 1 << 24  # of each file
    scratch_bytes: int = 1 << 26  # of all files, where the scratch folder is a tmpfs
    open_files: int = 64


DEFAULT = Limits()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended.

    `reason`: passed | wrong answer | exception | syntax error | exited | timeout | cpu time |
    memory | killed | infrastructure. Only `infrastructure` is no fault of the program.
    """

    reason: str
    error: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the program ran to its last line."""
        return self.reason == PASSED


def run(program: str, limits: Limits = DEFAULT, *, isolate: bool | None = None) -> Outcome:
    """Runs a Python program to its end and says how it ended; never raises for what it does.

    Passing means that its last line was reached: leaving early, also with status 0, does not pass.
    `isolate=False` uses no namespaces; by default they are used if `held` found that they work.
    """
    if isolate is None:
        isolate = bool(held()["isolate"])
    return _run(program, limits, isolate)[0]


def _run(program: str, limits: Limits, isolate: bool) -> tuple[Outcome, dict[str, Any]]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kdjax-", ignore_cleanup_errors=True) as scratch:
        os.chmod(scratch, 0o711 if isolate else 0o700)
        job = {
            "program": program,
            "limits": dataclasses.asdict(limits),
            "scratch": scratch,
            "paths": [path for path in sys.path if "site-packages" in path],
            "isolate": isolate,
        }
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_JAIL), str(writer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(writer,),
                cwd="/",
                start_new_session=True,
                env={
                    "PATH": "/usr/bin:/bin",
                    "LANG": "C.UTF-8",
                    "HOME": scratch,
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONHASHSEED": "0",
                },
            )
        except OSError as error:
            os.close(reader)
            return Outcome("infrastructure", str(error)), {}
        finally:
            os.close(writer)
        complaint, timed_out = _wait(process, json.dumps(job), limits.wall_seconds)
        os.set_blocking(reader, False)
        with open(reader, "rb") as file:
            report = file.read(_REPORT_BYTES) or b""
    outcome, facts = _read(report, timed_out, complaint)
    return dataclasses.replace(outcome, seconds=time.monotonic() - start), facts


def _wait(process: Any, job: str, seconds: float) -> tuple[str, bool]:
    """What the launcher complained of, and whether its time ran out; nothing of it is left."""
    complaint, timed_out = b"", False
    try:
        _, complaint = process.communicate(job.encode("utf-8", "surrogatepass"), timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # The group outlives its leader where there is no process namespace.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr:
            process.stderr.close()
    return complaint.decode("utf-8", "replace").strip(), timed_out


def _read(report: bytes, timed_out: bool, complaint: str) -> tuple[Outcome, dict[str, Any]]:
    facts: dict[str, Any] = {}
    for line in report.splitlines():
        with contextlib.suppress(ValueError):  # one that a kill cut short
            facts |= json.loads(line)
    if "held" not in facts:
        outcome = Outcome("infrastructure", complaint[-500:] or "the launcher said nothing")
    elif timed_out:
        outcome = Outcome("timeout")
    elif "reason" in facts:
        outcome = Outcome(facts["reason"], facts["error"])
    elif "status" not in facts:
        outcome = Outcome("killed", "by the namespace's end")
    elif (code := os.waitstatus_to_exitcode(facts["status"])) >= 0:
        outcome = Outcome("exited", f"status {code}")
    elif -code == signal.SIGXCPU:
        outcome = Outcome("cpu time")
    else:
        outcome = Outcome("killed", signal.Signals(-code).name)
    return outcome, facts


_PROBE = """
import collections, decimal, fractions, heapq, itertools, json, math, random, re, statistics, typing
assert "x".encode("idna") == b"x"
open("probe", "w").write("x")
"""


@functools.cache
def held() -> dict[str, Any]:
    """Which confinements this machine permits, tried out once; see `describe`.

    Raises `UserError` where not even a plain subprocess runs.
    """
    for isolate in (True, False):
        outcome, facts = _run(_PROBE, DEFAULT, isolate)
        if outcome.passed:
            return facts["held"] | {"isolate": isolate}
    raise UserError(
        f"the sandbox does not run: {outcome.reason} {outcome.error}. Programs that a model wrote "
        "are not run outside of it; use a Linux machine with Python 3.11 or newer."
    )


def describe(facts: dict[str, Any]) -> dict[str, str]:
    """What `held` found, in words."""

    def choose(name: str, held: str, otherwise: str) -> str:
        return held if facts.get(name) else otherwise

    limited = choose("processes", "limited", "NOT limited (root)")
    killed = choose(
        "pid", "with their namespace", "by group: one that leaves the group can survive"
    )
    files = "scratch folder, file sizes limited; the user's own files can be written"
    return {
        "network": choose(
            "net", "no interface (network namespace)", "sockets refused in Python only"
        ),
        "processes": f"{limited}, killed {killed}",
        "files": choose("mount", "read-only but a scratch tmpfs", files),
        "user": choose("user", "one of its own", "the caller's"),
        "memory": "address space limited per process",
        "environment": choose("proc", "empty", "empty; /proc shows other processes"),
    }
