"""The sandbox: what programs try, and how their ends are told apart."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdjax.evaluation import sandbox
from kdjax.evaluation.sandbox import Limits, run

# The default 10 s of processor time: on a busy machine 256 MiB in small pieces have taken one.
SMALL = Limits(wall_seconds=20.0, memory_bytes=256 << 20)


def needs(name):
    """Skips where this machine does not permit the confinement; `held` says so to users too."""
    return pytest.mark.skipif(not sandbox.held().get(name), reason=f"no {name} confinement here")


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


def test_sleep_ends_by_the_clock_with_all_it_started():
    marker = str(time.time_ns())
    program = (
        "import subprocess, sys\n"
        f"subprocess.Popen(['sleep', '60.{marker}'], start_new_session=True)\n"
        "import time; time.sleep(60)"
    )
    assert run(program, Limits(wall_seconds=1.0)).reason == "timeout"
    if sandbox.held().get("pid"):  # leaving the process group does not help it
        time.sleep(0.2)
        commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
        assert not any(marker.encode() in command for command in commands)


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
    assert "Read-only" in outcome.error or "Permission denied" in outcome.error


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


def test_without_namespaces_the_limits_still_hold():
    assert run("assert True", SMALL, isolate=False).passed
    assert run("while True: pass", Limits(cpu_seconds=1), isolate=False).reason == "cpu time"
    assert run("x = bytearray(2**30)", SMALL, isolate=False).reason == "memory"
    assert "no network" in run("import socket; socket.socket()", SMALL, isolate=False).error
    assert (
        "Too many open files"
        in run("x = [open('f', 'w') for _ in range(99)]", SMALL, isolate=False).error
    )


def test_a_launcher_that_cannot_start_is_infrastructure(monkeypatch):
    sandbox.held()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    outcome = run("assert True", SMALL)
    assert outcome.reason == "infrastructure" and "nonexistent" in outcome.error
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run("assert True", SMALL).reason == "infrastructure"


def test_what_is_held_is_said():
    said = sandbox.describe(sandbox.held())
    assert {"network", "processes", "files", "memory", "environment", "user"} == set(said)
    nothing = sandbox.describe(dict.fromkeys(("net", "processes", "pid", "mount", "user"), False))
    assert "NOT limited" in nothing["processes"] and "Python only" in nothing["network"]


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
