"""Untrusted programs in a subprocess: no network, limits on time, memory, processes and files.

bubblewrap confines them. Where `bwrap` is not installed or not permitted nothing runs unless the
caller allows it. A judge in another process (`jail/judge.py`) decides the verdict. The kernel is
shared: its bugs are not confined.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdjax.errors import UserError

BUBBLEWRAP, NOTHING = "bubblewrap", ""
_JAIL = Path(__file__).with_name("jail")
# Parts of the machine that a program sees within bubblewrap, besides the interpreter and packages.
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
# A program's output never reaches this pipe; messages are a few hundred bytes.
_REPORT_BYTES = 1 << 16
PASSED, INFRASTRUCTURE = "passed", "infrastructure"  # reasons that other modules compare with
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
_WALLS = ("net", "pid", "mount")  # without one of these a program is not confined


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one program: seconds, bytes, processes."""

    wall_seconds: float = 15.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30  # address space of each process
    processes: int = 8  # and threads, together
    file_bytes: int = 1 << 24  # of each file
    scratch_bytes: int = 1 << 26  # of all files, behind a wall
    open_files: int = 64

    def by_resource(self) -> dict[str, int]:
        """The limits of `setrlimit`, by names without RLIMIT_."""
        return {
            "CPU": self.cpu_seconds,
            "AS": self.memory_bytes,
            "FSIZE": self.file_bytes,
            "NPROC": self.processes,
            "NOFILE": self.open_files,
            "CORE": 0,
        }


DEFAULT = Limits()


def allow(seconds: float) -> Limits:
    """The default limits with `seconds`; more than the default raise processor time too."""
    more = {"cpu_seconds": math.ceil(seconds)} if seconds > DEFAULT.wall_seconds else {}
    return dataclasses.replace(DEFAULT, wall_seconds=seconds, **more)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended.

    `reason`: passed | wrong answer | exception | syntax error | exited | timeout | cpu time |
    memory | killed | infrastructure. Only `infrastructure` is not the program's fault.
    """

    reason: str
    error: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the program ran to its last line."""
        return self.reason == PASSED


def run(
    program: str,
    limits: Limits = DEFAULT,
    *,
    tests: str = "",
    names: Sequence[str] = (),
    allow_unsandboxed: bool = False,
) -> Outcome:
    """Runs a program and then, in another process, its tests; says how it ended.

    The program passes if it reaches its last line and the tests reach theirs. `names` in the tests
    are what the program defined: calls go to it as literals. Never raises for anything a program
    does; raises `UserError` where this machine cannot confine it, unless `allow_unsandboxed`.
    """
    walls = check(allow_unsandboxed)
    return _run(program, limits, walls["by"], tests, names)[0]


def _run(
    program: str, limits: Limits, wall: str, tests: str = "", names: Sequence[str] = ()
) -> tuple[Outcome, dict[str, Any]]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kdjax-", ignore_cleanup_errors=True) as scratch:
        os.chmod(scratch, 0o711 if wall else 0o700)
        paths = [path for path in sys.path if "site-packages" in path]
        job = {"program": program, "limits": limits.by_resource(), "wall": wall}
        job |= {"scratch": scratch, "paths": paths}
        # As root, the program and its judge are two new users, whose processes count separately.
        job |= {"user": 1 << 30 | secrets.randbits(28) << 1}
        reader, writer = os.pipe()
        command = [os.path.realpath(sys.executable), "-I", "-S", str(_JAIL), str(writer)]
        try:
            if wall == BUBBLEWRAP:
                command = [*_bubblewrap(scratch, limits.scratch_bytes, paths), *command]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(writer,),
                cwd="/",
                start_new_session=True,
                env={**_ENVIRONMENT, "HOME": scratch, "TMPDIR": scratch},
            )
        except OSError as error:
            os.close(reader)
            return Outcome(INFRASTRUCTURE, str(error)), {}
        finally:
            os.close(writer)
        messages = b"".join(_framed(part) for part in (job, {"code": tests, "names": [*names]}))
        complaint, timed_out = _wait(process, messages, limits.wall_seconds)
        os.set_blocking(reader, False)
        with open(reader, "rb") as file:
            report = file.read(_REPORT_BYTES) or b""
    outcome, facts = _read(report, timed_out, complaint)
    return dataclasses.replace(outcome, seconds=time.monotonic() - start), facts


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("<Q", len(data)) + data


def _bubblewrap(scratch: str, size: int, paths: Sequence[str]) -> list[str]:
    """Command of bwrap(1) with a new root: system libraries, the interpreter, an empty scratch."""
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap: not on the PATH")
    binds = []
    for place in (*_SYSTEM, sys.base_prefix, os.path.realpath(sys.executable), *paths, str(_JAIL)):
        # Folders on the way to it are new ones, which bwrap would keep to root.
        for parent in reversed(Path(place).parents[:-1]):
            binds += ["--perms", "0755", "--dir", str(parent)]
        binds += ["--ro-bind-try", place, place]
    flags = (
        "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try --as-pid-1 "
        "--die-with-parent --proc /proc --dev /dev"
    )
    if os.getuid() == 0:  # the launcher becomes two separate users, then drops these again
        flags += " --cap-add CAP_SETUID --cap-add CAP_SETGID"
    tmpfs = ["--perms", "1777", "--size", str(size), "--tmpfs", scratch]
    closed = ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [program, *flags.split(), *binds, *tmpfs, *closed]


def _wait(process: subprocess.Popen[bytes], job: bytes, seconds: float) -> tuple[str, bool]:
    """Waits for the launcher and kills it; returns its complaint and whether its time ran out."""
    complaint, timed_out = b"", False
    try:
        _, complaint = process.communicate(job, timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # Without a process namespace the group outlives its leader.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr:
            process.stderr.close()
    return complaint.decode("utf-8", "replace").strip(), timed_out


def _read(report: bytes, timed_out: bool, complaint: str) -> tuple[Outcome, dict[str, Any]]:
    facts: dict[str, Any] = {}
    for line in report.splitlines():
        with contextlib.suppress(ValueError):  # a line that a kill cut short
            facts |= json.loads(line)
    if "held" not in facts:
        outcome = Outcome(INFRASTRUCTURE, complaint[-500:] or "the launcher said nothing")
    elif timed_out:
        outcome = Outcome("timeout")
    elif "reason" in facts:
        outcome = Outcome(facts["reason"], facts["error"])
    else:
        outcome = Outcome("killed", "with its judge")
    return outcome, facts


_PROBE = """
import collections, decimal, fractions, heapq, itertools, json, math, random, re, statistics, typing
assert "x".encode("idna") == b"x"
open("probe", "w").write("x")
"""


@functools.cache
def held() -> dict[str, Any]:
    """Tries once which confinements this machine permits; `by` names the wall, "" for none.

    Raises `UserError` where not even a plain subprocess runs.
    """
    tried = []
    for wall in (BUBBLEWRAP, NOTHING):
        outcome, facts = _run(_PROBE, DEFAULT, wall)
        open_walls = [name for name in _WALLS if wall and not facts.get("held", {}).get(name)]
        if outcome.passed and not open_walls:
            return facts["held"] | {"by": wall, "tried": tried}
        why = f"no {', '.join(open_walls)}" if outcome.passed else outcome.reason
        tried.append(f"{wall or 'a plain process'}: {why} {outcome.error}".strip())
    raise UserError(
        f"the sandbox does not run ({'; '.join(tried)}). Programs that a model wrote "
        "are not run outside of it; use a Linux machine with Python 3.11 or newer."
    )


def check(allow_unsandboxed: bool) -> dict[str, Any]:
    """Returns what `held` found; raises `UserError` without a wall, unless the caller allows it."""
    walls = held()
    if walls["by"] == NOTHING and not allow_unsandboxed:
        raise UserError(
            f"found no bubblewrap that works here ({'; '.join(walls['tried'])}); expected it: "
            "programs that a model wrote could else reach the network and write this user's files. "
            "Install bubblewrap (apt-get install bubblewrap) and permit user "
            "namespaces (sysctl kernel.unprivileged_userns_clone=1 "
            "kernel.apparmor_restrict_unprivileged_userns=0; a container: --security-opt "
            "seccomp=unconfined or --privileged), or pass --allow-unsandboxed on a machine that "
            "may be damaged."
        )
    return walls


def describe(facts: dict[str, Any]) -> dict[str, str]:
    """Describes what `held` found."""

    def choose(name: str, held: str, otherwise: str) -> str:
        return held if facts.get(name) else otherwise

    limited = choose("processes", "limited", "NOT limited (root)")
    killed = choose(
        "pid", "with their namespace", "by group: one that leaves the group can survive"
    )
    files = "scratch folder, file sizes limited; the user's own files can be written"
    return {
        "by": facts.get("by") or "NOTHING (--allow-unsandboxed)",
        "network": choose(
            "net", "no interface (network namespace)", "sockets refused in Python only"
        ),
        "processes": f"{limited}, killed {killed}",
        "files": choose("mount", "read-only but a scratch tmpfs", files),
        "user": choose("user", "a separate one", "the caller's"),
        "memory": "address space limited per process, System V IPC "
        + choose("ipc", "refused", "NOT limited"),
        "environment": choose("proc", "empty", "empty; /proc shows other processes"),
    }
