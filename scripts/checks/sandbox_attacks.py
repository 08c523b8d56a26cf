"""Tries attacks on the sandbox, wall by wall: a table of what held and what did not.

    python -m scripts.checks.sandbox_attacks [--wall=bubblewrap]

Forgers want to pass tests that they do not solve; the others want out: to the network, to files, to
other processes. They aim at a temporary folder, at listeners and at a process that this script
started, and at nothing else; every loop and fork is bounded. Without walls they are tried by an
ordinary user only, never by root. Exit status: 1 if a forger passes anywhere or anything gets
through a wall.
"""

import argparse
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kdjax.evaluation import sandbox
from kdjax.evaluation.sandbox import BUBBLEWRAP, NOTHING, Limits

LIMITS = Limits(wall_seconds=3.0, cpu_seconds=4, memory_bytes=512 << 20)
# What no forger computes: f(x) = x * x + 1.
TESTS = "assert f(2) == 5\nassert f(3) == 10\nassert abs(f(4) - 17) < 1e-6\n"
_FRAME = """
import json, os, struct
def write(message, descriptors=range(3, 64)):
    data = json.dumps(message).encode()
    for fd in descriptors:
        for data in (data + b"\\n", struct.pack("<Q", len(data)) + data):
            try: os.write(fd, data)
            except OSError: pass
"""
# Looks for the tests in the memory of process {pid}, and takes the expected values from there.
_SEARCH = """
import re
found = {{}}
pattern = re.compile(b"asse" + rb"rt f\\((\\d)\\) == (\\d+)")
try:
    with open("/proc/{pid}/maps") as maps, open("/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            start, end = (int(x, 16) for x in span.split("-"))
            if "r" not in mode or end - start > 1 << 28: continue
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except (OSError, ValueError, OverflowError): continue
            found |= {{int(m[1]): int(m[2]) for m in pattern.finditer(data)}}
except OSError: pass
def f(x): return found.get(x, 17)
"""

FORGERS = {
    "a forked child answers rightly for it": """
import os, time
me = os.getpid()
if os.fork() == 0:
    os.getpid = lambda: me
    def f(x): return x * x + 1
else:
    time.sleep(30)
""",
    "leaves with status 0": "import os\nos._exit(0)",
    "leaves with status 0 when called": "def f(x): raise SystemExit(0)",
    "says that it ended well": _FRAME + "write({'ended': ['passed', '']})\ndef f(x): return 0",
    "a forked child answers, its parent gone": """
import os
me = os.getpid()
if os.fork(): os._exit(0)
os.getpid = lambda: me
def f(x): return x * x + 1
""",
    "returns what equals everything": """
class Any:
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __lt__(self, other): return True
def f(x): return Any()
""",
    "returns a number that equals everything": """
class Any(float):
    def __eq__(self, other): return True
def f(x): return Any(17)
""",
    "replaces a function that the tests use": """
import builtins
def abs(x): return 0
builtins.abs = abs
def f(x): return {2: 5, 3: 10}.get(x, 0)
""",
    "replaces the code that answers": """
import sys
sys.modules["judge"].encode = lambda *_: 5
def f(x): return 0
""",
    "replaces what tests compare with": """
import builtins
builtins.AssertionError = None
class AssertionError(BaseException): pass
def f(x): return 0
""",
    "looks for the tests in its memory": _SEARCH.format(pid="self"),
    "looks for the tests in its judge's memory": "import os\n"
    + _SEARCH.replace('"/proc/{pid}/', 'f"/proc/{{os.getppid()}}/').format(),
    "looks for the tests in what the collector holds": """
import gc, sys
texts = [o for o in gc.get_objects() if isinstance(o, (dict, list))] + list(vars(
    sys.modules["__main__"]).values())
found = [t for o in texts if isinstance(o, dict) for t in list(o.values())
         if isinstance(t, str) and "asse" + "rt f(" in t]
def f(x):
    for text in found:
        for line in text.splitlines():
            if line.startswith("asse" + f"rt f({x})"): return int(line.split()[-1])
    return 17
""",
    "kills its judge": "import os\nos.kill(os.getppid(), 9)\ndef f(x): return 0",
    "writes a verdict to every descriptor": _FRAME
    + "write({'reason': 'passed', 'error': ''})\ndef f(x): return 0",
    "is no literal": "def f(x):\n    y = []\n    y.append(y)\n    return y",
}


@dataclasses.dataclass(frozen=True)
class Outside:
    """Targets that this script started, for programs to aim at."""

    folder: Path
    tcp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    victim: subprocess.Popen
    secret: str

    def connected(self) -> bool:
        """Whether somebody reached a listener since the last look."""
        reached = False
        for listener in (self.tcp, self.unix, self.abstract):
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                reached = True
        return reached

    def survivors(self) -> list[int]:
        """Processes that a program left behind; they are ended here."""
        marker, left = self.secret.encode(), []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if marker in path.read_bytes() and int(path.parent.name) != self.victim.pid:
                    left.append(int(path.parent.name))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        return left


@contextlib.contextmanager
def start_outside() -> Iterator[Outside]:
    """A folder, three listeners and a sleeping process, all gone afterwards."""
    secret = f"7.{time.time_ns()}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kdjax-attacks-")))
        folder.chmod(0o777)
        for name, mode in (("private", 0o600), ("readable", 0o644)):
            (folder / name).write_text(secret)
            (folder / name).chmod(mode)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        unix.bind(str(folder / "listener"))
        (folder / "listener").chmod(0o777)
        abstract.bind(f"\0{secret}")
        for listener in (tcp, unix, abstract):
            listener.listen()
            listener.setblocking(False)
        victim = subprocess.Popen(["sleep", "300"], env={"SECRET": secret, "PATH": os.defpath})
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        yield Outside(folder, tcp, unix, abstract, victim, secret)


@dataclasses.dataclass(frozen=True)
class Attack:
    """A program made for what it aims at, and whether it got there, seen from outside."""

    write: Callable[[Outside], str]
    worked: Callable[[Outside, sandbox.Outcome], bool]
    open_behind: tuple[str, ...] = (NOTHING,)  # walls that do not stop it, as the manual says


def _connecting(code: str) -> Attack:
    def write(outside: Outside) -> str:
        names = dict(
            port=outside.tcp.getsockname()[1],
            path=str(outside.folder / "listener"),
            secret=outside.secret,
        )
        return f"{textwrap.dedent(code)}".replace("NAMES", repr(names))

    return Attack(write, lambda outside, _: outside.connected())


def _reading(path: str) -> Attack:
    return Attack(
        lambda o: f"raise RuntimeError(open({path.format(o=o)!r}).read())",
        lambda o, outcome: o.secret in outcome.error,
    )


def _write_nothing(outside: Outside, _: sandbox.Outcome) -> bool:
    made = {"private", "readable", "listener"}
    return {path.name for path in outside.folder.iterdir()} != made


_FRESH = "import sys\nsys.modules.pop('socket'); sys.modules.pop('_socket')\nimport socket\n"
ATTACKS = {
    "loopback, `socket` imported anew": _connecting(
        _FRESH + "socket.create_connection(('127.0.0.1', NAMES['port']), 2)"
    ),
    "loopback, from a child process": _connecting(
        "import subprocess\nsubprocess.run(['/usr/bin/env', 'bash', '-c',"
        " 'exec 3<>/dev/tcp/127.0.0.1/%d' % NAMES['port']], timeout=3)"
    ),
    "loopback, through libc": _connecting("""
        import ctypes, struct
        libc = ctypes.CDLL(None)
        where = struct.pack("=H", 2) + struct.pack(">H4s8x", NAMES["port"], bytes([127, 0, 0, 1]))
        libc.connect(libc.socket(2, 1, 0), where, len(where))
        """),
    "a Unix socket in the file system": _connecting(
        _FRESH + "socket.socket(1).connect(NAMES['path'])"
    ),
    "an abstract Unix socket": _connecting(
        _FRESH + "socket.socket(1).connect('\\0' + NAMES['secret'])"
    ),
    "writing a file outside": Attack(
        lambda o: f"open({str(o.folder / 'written')!r}, 'w').write('x')", _write_nothing
    ),
    "reading a private file outside": _reading("{o.folder}/private"),
    "reading a readable file outside": _reading("{o.folder}/readable"),
    "reading another process's environment": _reading("/proc/{o.victim.pid}/environ"),
    "ending another process": Attack(
        lambda o: f"import os\nos.kill({o.victim.pid}, 15)",
        lambda o, _: time.sleep(0.1) or o.victim.poll() is not None,
    ),
    "a daemon that outlives its run": Attack(
        lambda o: (
            "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
            f"        os.execv('/bin/sleep', ['sleep', '{o.secret}'])\n    os._exit(0)\n"
            "import time; time.sleep(0.3)"
        ),
        lambda o, _: time.sleep(0.2) or bool(o.survivors()),
    ),
    "more processes than the limit": Attack(
        lambda _: (
            "import os, time\nmade = 0\ntry:\n    for made in range(40):\n"
            "        if os.fork() == 0: time.sleep(2); os._exit(0)\n"
            "except OSError: pass\nraise RuntimeError(f'made {made}')"
        ),
        # Without a user of its own, the limit counts all processes of the caller.
        lambda _, outcome: int((outcome.error.split() or ["99"])[-1]) >= LIMITS.processes,
        (),
    ),
    "more bytes than the scratch folder has": Attack(
        lambda _: "for i in range(12):\n    open(str(i), 'wb').write(bytes(8 << 20))",
        lambda _, outcome: outcome.passed,
    ),
}


def try_forger(program: str, wall: str) -> sandbox.Outcome:
    """How a program ends that is judged by tests that it does not solve."""
    return sandbox._run(program, LIMITS, wall, TESTS, ["f"])[0]


def attack(name: str, wall: str) -> tuple[bool, sandbox.Outcome]:
    """Whether one attack reached what it aims at, and how its program ended."""
    with start_outside() as outside:
        outcome = sandbox._run(ATTACKS[name].write(outside), LIMITS, wall)[0]
        return ATTACKS[name].worked(outside, outcome), outcome


def permitted(wall: str) -> str:
    """Why a wall is not tried here; "" if it is."""
    if wall == NOTHING and os.getuid() == 0:
        return "never tried as root"
    outcome, facts = sandbox._run("", LIMITS, wall)
    held = facts.get("held", {})
    if not outcome.passed or (wall != NOTHING and not all(map(held.get, sandbox._WALLS))):
        return f"not permitted here: {outcome.reason} {outcome.error}"
    return ""


def main() -> int:
    """Prints the table; the exit status."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--wall", choices=(BUBBLEWRAP, "nothing"), action="append")
    asked = [NOTHING if w == "nothing" else w for w in flags.parse_args().wall or ()]
    walls = asked or [BUBBLEWRAP, NOTHING]
    tried = [wall for wall in walls if not (why := permitted(wall)) or print(f"{wall}: {why}")]
    print("| | " + " | ".join(wall or "nothing" for wall in tried) + " |")
    print("| --- |" + " --- |" * len(tried))
    bad = 0
    for name, program in FORGERS.items():
        ends = [try_forger(program, wall) for wall in tried]
        bad += sum(outcome.passed for outcome in ends)
        words = [f"PASSED: {e.error}" if e.passed else f"fails: {e.reason}" for e in ends]
        print(f"| verdict: {name} | " + " | ".join(words) + " |", flush=True)
    for name, one in ATTACKS.items():
        words = []
        for wall in tried:
            worked, outcome = attack(name, wall)
            known = wall in one.open_behind
            bad += worked and not known
            words.append(("OPEN" if known else "BROKEN") if worked else f"held: {outcome.reason}")
        print(f"| {name} | " + " | ".join(words) + " |", flush=True)
    print("every wall holds what it should" if not bad else f"{bad} GOT THROUGH")
    return 1 if bad or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
