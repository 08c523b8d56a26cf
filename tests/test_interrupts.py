"""Signals, as a run in a process of its own meets them: saved, resumed, or ended at once."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from test_run import REPOSITORY, _read, curve, start, wait_for

from kdjax.commands import train as main
from kdjax.errors import QUIT
from kdjax.training.interrupts import StopSignals


def finish(process, timeout=60):
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


@pytest.mark.slow
def test_ctrl_c_saves_names_the_command_and_that_command_resumes(tiny_config, tmp_path, capsys):
    """The printed line, run as it stands, goes on; once more, there is nothing to do."""
    tiny_config.train.steps, tiny_config.checkpoint.every, tiny_config.eval.every = 24, 0, 0
    tiny_config.eval.samples = 0
    workdir = tmp_path / "a run"  # which a shell must be told to keep together
    process = start(tiny_config, workdir)
    wait_for(lambda: '"step": 7,' in _read(workdir / "metrics.jsonl"), process)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == main.INTERRUPTED, output
    assert "stopping after this step; Ctrl-C again quits at once" in output
    (line,) = [x for x in output.splitlines() if x.startswith("saved; resume with: ")]
    command = line.removeprefix("saved; resume with: ")
    assert shlex.split(command) == [str(arg) for arg in process.args]
    stopped = curve(workdir)[-1]["step"]
    assert 7 <= stopped < 24 and (workdir / "checkpoints" / str(stopped)).is_dir()
    assert not (workdir / "report.html").exists()

    where = dict(cwd=REPOSITORY, text=True)
    resumed = subprocess.run(command, shell=True, capture_output=True, timeout=120, **where)
    assert resumed.returncode == 0, resumed.stderr
    assert f"step {stopped + 1:>6}/24" in resumed.stderr
    for part in ("tok/s", "ETA", "held-out at step 24"):
        assert part in resumed.stderr
    assert re.search(rf"^report +{re.escape(str(workdir))}/report.html$", resumed.stdout, re.M)
    assert "student after 24 steps" in (workdir / "report.html").read_text()
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    capsys.readouterr()
    assert main.main(shlex.split(command)[3:]) == 0  # in a third process imports take longest
    assert "nothing to do" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before


@pytest.mark.slow
def test_before_training_a_signal_leaves_nothing_half_written(tiny_config, tmp_path):
    """SIGTERM as soon as the process listens: rows being packed are removed."""
    process = start(tiny_config, tmp_path / "run")
    wait_for(lambda: (tmp_path / "run").is_dir(), process)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == QUIT and "Traceback" not in output, output
    assert "stopped at once; what was saved before is kept" in output
    assert not list((tmp_path / "rows").glob(".making-*"))


# --- without a run ------------------------------------------------------------------------------

# Like XLA's, this wait is one call in C, without the interpreter's lock: no Python handler runs.
COMPUTING = """
import ctypes, threading
from kdjax.training.interrupts import StopSignals
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
libc.pthread_mutex_lock(mutex)
with StopSignals():
    threading.Timer(1, print, ["ready"], {"flush": True}).start()  # once this one waits
    libc.pthread_mutex_lock(mutex)
"""


@pytest.fixture
def computing():
    process = subprocess.Popen(
        [sys.executable, "-c", COMPUTING],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_a_signal_is_answered_while_xla_computes(computing):
    began = time.monotonic()
    computing.send_signal(signal.SIGTERM)
    assert computing.stderr.readline() == "\n"
    assert computing.stderr.readline().startswith("stopping after this step")
    assert time.monotonic() - began < 5 and computing.poll() is None


@pytest.mark.slow
def test_a_second_interrupt_ends_a_process_that_computes(computing):
    computing.send_signal(signal.SIGINT)
    computing.stderr.readline(), computing.stderr.readline()  # the first is heard on its own
    computing.send_signal(signal.SIGINT)
    assert computing.wait(timeout=8) == QUIT
    assert "quitting at once" in computing.stderr.read()


STUB = """
import gc, os, signal, sys, time

def interrupt(*_):
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)

def main(argv):
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(30)

if sys.argv[-1] == "importing":
    interrupt()
    print("imported", flush=True)
"""
COMMAND = """
import signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # behind a shell it is ignored
import kdjax.commands
from kdjax.commands import cli
kdjax.commands.__path__.append(sys.argv.pop(1))
cli.COMMANDS["stub"] = "of this test"
cli.run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["collecting", "importing"])
def test_an_interrupt_is_heard_in_a_callback_and_after_an_import(where, tmp_path):
    """Python only prints what a callback of `gc` raises, NumPy what its import does."""
    (tmp_path / "stub.py").write_text(STUB)
    command = [sys.executable, "-c", COMMAND, str(tmp_path), "stub", where]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    assert done.returncode == QUIT
    assert done.stderr == "stopped at once; what was saved before is kept\n"
    assert done.stdout == ("imported\n" if where == "importing" else "")


def test_the_second_interrupt_raises_where_python_runs():
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started this behind itself
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        assert not signals.requested
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        assert signals.requested
        os.kill(os.getpid(), signal.SIGTERM)  # only Ctrl-C asks for more
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1
