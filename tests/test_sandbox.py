"""The sandbox: what programs try, and how their ends are told apart."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick import cases

from kdjax.errors import UserError
from kdjax.evaluation import sandbox
from kdjax.evaluation.jail import walls
from kdjax.evaluation.sandbox import BUBBLEWRAP, NOTHING, Limits, allow
from scripts.checks import sandbox_attacks

# The default 10 s of processor time: on a busy machine 256 MiB in small pieces have taken one.
SMALL = Limits(wall_seconds=20.0, memory_bytes=256 << 20)


def run(program, limits=sandbox.DEFAULT, **more):
    """Also on machines without walls, such as most containers: these programs are harmless."""
    return sandbox.run(program, limits, allow_unsandboxed=True, **more)


def needs(name):
    """Skips where this machine does not permit the confinement; `held` says so to users too."""
    return pytest.mark.skipif(not sandbox.held().get(name), reason=f"no {name} confinement here")


def runs(marker):
    """Whether some process has it in its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended since
            if marker.encode() in (process / "cmdline").read_bytes():
                return True
    return False


@pytest.mark.parametrize(
    ("program", "reason", "error"),
    [
        ("import json, decimal\nassert decimal.Decimal(1) == 1", "passed", ""),
        ("assert 1 == 2, 'no'", "wrong answer", "AssertionError: no"),
        ("undefined", "exception", "NameError"),
        ("def f(:", "syntax error", "SyntaxError"),
        ("x = '\ud800'", "syntax error", "UnicodeEncodeError"),
        ("import sys; sys.exit(0)", "exited", "SystemExit: 0"),
        ("import os; os._exit(0)", "exited", "status 0"),
        ("import os; os.kill(os.getpid(), 9)", "killed", "SIGKILL"),
        ("raise KeyboardInterrupt", "exception", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "exception", "RecursionError"),
        ("print('x' * 10**7)", "passed", ""),
        ("if __name__ == '__main__': raise ValueError", "passed", ""),
    ],
)
def test_ends_are_told_apart(program, reason, error):
    outcome = run(program, SMALL)
    assert outcome.reason == reason and error in outcome.error, outcome
    assert outcome.passed == (reason == "passed")


def test_an_infinite_loop_ends_by_its_processor_time():
    assert run("while True: pass", Limits(cpu_seconds=1)).reason == "cpu time"
    assert (allow(40.5).wall_seconds, allow(40.5).cpu_seconds) == (40.5, 41)
    assert allow(5.0).cpu_seconds == allow(15.0).cpu_seconds == Limits().cpu_seconds


def test_sleep_ends_by_the_clock_with_all_it_started():
    marker = str(time.time_ns())
    program = (
        "import subprocess, sys\n"
        f"subprocess.Popen(['sleep', '60.{marker}'], start_new_session=True)\n"
        "import time; time.sleep(60)"
    )
    assert run(program, Limits(wall_seconds=1.0)).reason == "timeout"
    if sandbox.held().get("pid"):  # leaving the process group does not help it
        deadline = time.monotonic() + 5
        while runs(marker):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    "program", ["x = bytearray(2**30)", "x = []\nwhile True: x.append('a'*9999)"]
)
def test_a_memory_hog_is_stopped(program):
    assert run(program, SMALL).reason == "memory"


@needs("processes")
def test_a_fork_bomb_is_bounded():
    bomb = (
        "import os, time\nchildren = 0\n"
        "try:\n    while True:\n        if os.fork() == 0: time.sleep(30)\n        children += 1\n"
        "except BlockingIOError: raise RuntimeError(f'stopped after {children}')"
    )
    outcome = run(bomb, SMALL)
    assert outcome.reason == "exception" and "stopped after " in outcome.error
    assert int(outcome.error.split()[-1]) < SMALL.processes


@needs("user")
def test_programs_do_not_share_a_user():
    users = {run("import os; raise RuntimeError(os.getuid())", SMALL).error for _ in range(2)}
    assert len(users) == 2 and all(int(user.split()[-1]) > 2**30 for user in users)


@needs("ipc")
@pytest.mark.parametrize("wall", [BUBBLEWRAP, NOTHING])
def test_no_memory_is_had_beside_the_limit(wall):
    """Segments of System V count for no limit of a process."""
    if wall and sandbox.held()["by"] != wall:
        pytest.skip("no bubblewrap here")
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfound = [\n"
        "    (call(*about, 0o1600), ctypes.get_errno())\n"
        "    for call, about in\\\n"
        "    [(libc.shmget, [0, 4096]), (libc.semget, [0, 9]), (libc.msgget, [0])]\n"
        "]\nassert found == [(-1, 1)] * 3, found"
    )
    outcome = sandbox._run(program, SMALL, wall)[0]
    assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("machine", "calls", "elf"),
    [("aarch64", "asm-generic/unistd.h", "AARCH64"), ("x86_64", "asm/unistd_64.h", "X86_64")],
)
def test_refused_calls_have_the_numbers_of_the_headers_of_linux(machine, calls, elf):
    """Those of aarch64 are asm-generic's, which lie on any machine."""
    include = Path("/usr/include")
    found = next((p for p in (*include.glob(calls), *include.glob(f"*-linux-gnu/{calls}"))), None)
    if found is None or not (include / "linux/audit.h").exists():
        pytest.skip(f"no {calls}: apt install linux-libc-dev")

    def find(pattern, path):
        match = re.search(pattern, path.read_text())
        assert match is not None
        return match[1]

    asked = ("shmget", "semget", "msgget")
    numbers = tuple(int(find(rf"#define __NR_{name} (\d+)", found)) for name in asked)
    number = int(find(rf"#define EM_{elf}\s+(\d+)", include / "linux/elf-em.h"))
    flags = find(rf"#define AUDIT_ARCH_{elf}\s+\((.*)\)", include / "linux/audit.h")
    assert flags == f"EM_{elf}|__AUDIT_ARCH_64BIT|__AUDIT_ARCH_LE"
    assert walls._IPC[machine] == (number | 0xC0000000, numbers)


def test_a_huge_file_is_refused():
    outcome = run("with open('x', 'wb') as f:\n    while True: f.write(bytes(2**20))", SMALL)
    assert outcome.reason == "exception" and "File too large" in outcome.error


@needs("mount")
def test_many_files_and_files_elsewhere_are_refused(tmp_path):
    many = "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(2**20)); i += 1"
    assert "No space left" in run(many, SMALL).error
    tmp_path.chmod(0o777)
    outcome = run(f"open({str(tmp_path / 'x')!r}, 'w')", SMALL)
    assert outcome.reason == "exception" and not list(tmp_path.iterdir())
    words = ("Read-only", "Permission denied", "No such file")  # the last within bubblewrap
    assert any(word in outcome.error for word in words)


def test_the_environment_is_not_inherited(monkeypatch):
    monkeypatch.setenv("KDJAX_SECRET", "hunter2")
    look = "import os\nfound = dict(os.environ)\n"
    if sandbox.held().get("proc"):
        look += (
            "for p in os.listdir('/proc'):\n"
            "    try: found[p] = open(f'/proc/{p}/environ').read()\n"
            "    except OSError: pass\n"
        )
    outcome = run(look + "assert 'hunter2' not in repr(found), found", SMALL)
    assert outcome.passed, outcome


def test_no_socket_opens_even_past_the_preamble():
    for name in ("socket", "_socket"):
        assert "no network here" in run(f"import {name}; {name}.socket()", SMALL).error
    if not sandbox.held().get("net"):
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # Through libc, which no preamble guards: socket, then connect to a port that listens here.
        program = (
            "import ctypes, struct, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            f"where = struct.pack('=H', 2) + struct.pack('>H4s8x', {port}, bytes([127, 0, 0, 1]))\n"
            "fd = libc.socket(2, 1, 0)\n"
            "assert fd >= 0 and libc.connect(fd, where, len(where)) != 0\n"
        )
        assert run(program, SMALL).passed


def test_without_walls_the_limits_still_hold():
    def end(program, limits=SMALL):
        return sandbox._run(program, limits, NOTHING)[0]

    assert end("assert True").passed
    assert end("while True: pass", Limits(cpu_seconds=1)).reason == "cpu time"
    assert end("x = bytearray(2**30)").reason == "memory"
    assert "no network" in end("import socket; socket.socket()").error
    assert "Too many open files" in end("x = [open('f', 'w') for _ in range(99)]").error


@pytest.mark.usefixtures("without_walls")
def test_nothing_runs_where_there_is_no_wall_unless_asked_for():
    with pytest.raises(UserError, match=r"bwrap: not on the PATH.*--allow-unsandboxed"):
        sandbox.run("assert True", SMALL)
    assert run("assert True", SMALL).passed
    assert "NOTHING" in sandbox.describe(sandbox.held())["by"]


# The judge.


def judged(program, tests, *names):
    return run(program, SMALL, tests=tests, names=names)


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "[True, 1, -0.5, 'a\\udc80', b'\\xff', 2 - 1j]",
        "(float('inf'), -2**64, 7**9000)",
        "{(1, 2): [set(), {3}, frozenset({4})]}",
    ],
)
def test_literals_come_back_as_they_went(value):
    there = "def f(x):\n    global seen\n    seen = x\n    return x\ndef same(): return repr(seen)"
    tests = f"import sys; sys.set_int_max_str_digits(0)\nx = {value}\ny = f(x)\n"
    tests += "assert repr(y) == repr(x) and type(y) is type(x)"
    assert judged(there, tests, "f").passed


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ("Decimal('1.5')", "f() == 1.5 and abs(float(f()) - 1.5) < 1e-9"),
        ("Fraction(1, 2)", "f() == 0.5 and f() - 0.5 == 0"),
        ("range(1, 7, 2)", "f() == range(1, 7, 2) != [1, 3, 5]"),
        ("{1: 2}.keys()", "f() == {1}"),
        ("{1: 2}.items()", "f() == {(1, 2)}"),
        ("deque([1, 2], 3)", "f() == collections.deque([1, 2]) != [1, 2] and f().maxlen == 3"),
        ("OrderedDict(a=1, b=2)", "f() == {'b': 2, 'a': 1} and f() != type(f())(b=2, a=1)"),
        ("Counter('aab')", "f() == {'a': 2, 'b': 1} == collections.Counter('aba')"),
        ("bytearray(b'x')", "f() == b'x'"),
        ("date(2020, 1, 2)", "f() == datetime.date(2020, 1, 2)"),
        ("timedelta(1, 2)", "f() == datetime.timedelta(1, 2)"),
        ("True", "f() == 1 == 1.0"),
        ("[1.0, {True: 2}]", "f() == [1, {1: 2.0}]"),
        ("same", "f() == f() and f() is f()"),  # one object equals itself
        ("[same, {}]", "f()[0] == f()[0]"),
    ],
)
def test_values_are_equal_as_python_compares_them(value, test):
    """A right answer in `Decimal` failed: an object of the program equals itself alone."""
    names = "from collections import *\nfrom datetime import *\nfrom decimal import Decimal\n"
    program = f"{names}from fractions import Fraction\nsame = object()\ndef f(): return {value}"
    outcome = judged(program, f"import collections, datetime\nassert {test}", "f")
    assert outcome.passed, outcome


@pytest.mark.parametrize(
    "value",
    [
        "type('date', (datetime.date,), dict(__eq__=lambda a, b: True))(1, 1, 1)",
        "type('D', (decimal.Decimal,), dict(__eq__=lambda a, b: True))(1)",
        "type('object', (), dict(__eq__=lambda a, b: True, __module__='decimal'))()",
        "type('Decimal', (), dict(__str__=lambda x: '2', __module__='decimal'))()",
        "type('range', (), dict(start=2, __eq__=lambda a, b: True, __module__='builtins'))()",
    ],
)
def test_no_value_of_the_program_decides_a_comparison(value):
    there = f"import datetime, decimal\ndef f(): return {value}"
    assert judged(there, "assert f() == 2", "f").reason == "wrong answer"


@pytest.mark.parametrize(
    "test",
    [
        "assert all(map(f, [1, 2]))",
        "assert [b for b, _ in zip(map(f, [1]), [1])] == []",
        "for x in map(f, [1]): assert False",
    ],
)
def test_a_program_cannot_end_a_loop_of_the_tests(test):
    """`StopIteration` within `map` or `zip` ended it before anything was compared: it passed."""
    outcome = judged("def f(x): raise StopIteration(x)", test, "f")
    assert outcome.reason == "exception" and "the program raised StopIteration: 1" in outcome.error


@pytest.mark.parametrize(
    ("program", "tests", "reason", "error"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", "passed", ""),
        ("def f(x): return x + 1", "assert f(1) == 3, 'no'", "wrong answer", "AssertionError: no"),
        ("", "assert f(1) == 3", "exception", "NameError: name 'f' is not defined"),
        ("def f(x): return [][x]", "f(1)", "exception", "IndexError: list index"),
        ("class E(Exception): pass\ndef f(x): raise E(x)", "f(1)", "exception", "E: 1"),
        ("def f(x): assert x > 1, x", "f(1)", "wrong answer", "AssertionError: 1"),
        ("def f(x): return {}[x]", "try: f(1)\nexcept KeyError: pass", "passed", ""),
        ("def f(x): raise SystemExit(0)", "try: f(1)\nexcept: pass", "exited", "SystemExit: 0"),
        ("import os\ndef f(x): os._exit(0)", "f(1)", "exited", "status 0"),
        pytest.param(
            "def f(x):\n    while True: pass", "f(1)", "cpu time", "", marks=pytest.mark.slow
        ),
        ("def f(x): return 'a' * 10**9", "f(1)", "memory", ""),
        ("def f(x): return 'a' * 7 * 10**7", "f(1)", "memory", "an answer of"),
        ("def f(x): return (i * i for i in x)", "assert list(f([1, 3])) == [1, 9]", "passed", ""),
        ("def f(x): return (i * i for i in x)", "assert f([1, 3]) == [1, 9]", "wrong answer", ""),
        ("def f(x): return x", "f(len)", "exception", "cannot be given a builtin_function"),
    ],
)
def test_what_the_judge_says(program, tests, reason, error):
    limits = Limits(wall_seconds=20.0, memory_bytes=256 << 20, cpu_seconds=1)
    outcome = run(program, limits, tests=tests, names=["f"])
    assert outcome.reason == reason and error in outcome.error, outcome


def test_objects_stay_with_the_program_and_can_be_used():
    """MBPP 367 does so: a tree of the solution's own class, made by the tests."""
    program = (
        "class Node:\n    def __init__(self, data): self.data, self.left = data, None\n"
        "def depth(node): return 1 + depth(node.left) if node else 0"
    )
    tests = (
        "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(data=3)\n"
        "assert depth(root) == 3 and root.left.data == 2 and root != Node(1)"
    )
    assert judged(program, tests, "Node", "depth").passed


# These two end by the clock, after three seconds.
WAITING = ("a forked child answers rightly for it", "writes a verdict to every descriptor")


@pytest.mark.parametrize(
    "forger", cases(*(f for f in sandbox_attacks.FORGERS if f not in WAITING), slow=WAITING)
)
def test_a_forger_does_not_pass(forger):
    if why := sandbox_attacks.permitted(wall := sandbox.held()["by"]):
        pytest.skip(why)
    outcome = sandbox_attacks.try_forger(sandbox_attacks.FORGERS[forger], wall)
    assert not outcome.passed and outcome.reason != "infrastructure", outcome


def test_what_forgers_are_asked_can_be_solved():
    assert judged("def f(x): return x * x + 1", sandbox_attacks.TESTS, "f").passed


@pytest.mark.slow
def test_what_attacks_reach():
    if why := sandbox_attacks.permitted(BUBBLEWRAP):
        pytest.skip(why)
    for name in sandbox_attacks.ATTACKS:
        worked, outcome = sandbox_attacks.attack(name, BUBBLEWRAP)
        assert not worked, (name, outcome)


def test_a_launcher_that_cannot_start_is_infrastructure(monkeypatch):
    sandbox.held()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    outcome = run("assert True", SMALL)
    assert outcome.reason == "infrastructure" and "nonexistent" in outcome.error
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run("assert True", SMALL).reason == "infrastructure"


def test_what_is_held_is_said():
    said = sandbox.describe(sandbox.held())
    assert {"by", "network", "processes", "files", "memory", "environment", "user"} == set(said)
    nothing = sandbox.describe(dict.fromkeys(("net", "processes", "pid", "mount", "user"), False))
    assert "NOT limited" in nothing["processes"] and "Python only" in nothing["network"]
    assert "System V IPC NOT limited" in nothing["memory"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_is_confined_as_well():
    """With the system's interpreter: the one of the tests may lie where only root can read."""
    system = next((p for p in ("/usr/bin/python3",) if Path(p).exists()), None)
    if system is None:
        pytest.skip("no system interpreter")
    code = (
        "import sys; sys.path.insert(0, '.')\nfrom kdjax.evaluation import sandbox\n"
        "o = sandbox.run('import socket; socket.socket()')\n"
        "assert 'no network' in o.error, o\nassert sandbox.held()['processes']"
    )
    user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    done = subprocess.run(
        [*user, system, "-B", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        timeout=60,
        check=False,
    )
    if "ModuleNotFoundError" in done.stderr or "Permission" in done.stderr:
        pytest.skip("the system's interpreter cannot read this checkout")
    assert done.returncode == 0, done.stderr
    assert done.returncode != -signal.SIGKILL
