"""What a workdir goes through: two processes at once, another run's settings, damaged files."""

import os
import re
import signal
import subprocess
import sys

import pytest
from test_run import REPOSITORY, _read, _steps, run_command, start, wait_for

from kdjax.errors import BAD_INPUT
from kdjax.formats.locks import LOCK, LockedError, locking
from kdjax.watch.run import distill

HOLD = """
import sys, time
from pathlib import Path
from kdjax.formats.locks import locking
with locking(Path(sys.argv[1]), "go elsewhere"):
    print("held", flush=True)
    time.sleep(60)
"""


# --- two processes ------------------------------------------------------------------------------


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / LOCK)]
    process = subprocess.Popen(command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=20)


def test_a_lock_names_its_holder_and_ends_with_it(holder, tmp_path):
    """`kill -9` releases it, and an orderly end leaves no file."""
    path = tmp_path / LOCK
    for _ in range(2):  # a refusal takes nothing from the holder
        with pytest.raises(LockedError) as error, locking(path, "give another folder"):
            pass
        expected = rf"{tmp_path} is in use by process {holder.pid} on .*, since 20.*another folder"
        assert re.match(expected, str(error.value))
    holder.kill()
    holder.wait(timeout=20)
    assert path.exists()
    with locking(path, "") as held:
        assert held and f"process {os.getpid()} on" in path.read_text()
        with pytest.raises(LockedError), locking(path, ""):  # not twice in one process either
            pass
    assert not path.exists()


def test_a_lock_outlives_the_removal_of_its_file(tmp_path):
    """Who opened the file just before its holder removed it does not hold a name that is gone."""
    path = tmp_path / LOCK
    with locking(path, ""):
        path.unlink()
        with locking(path, "") as held:
            assert held and path.exists()


def test_a_run_holds_its_workdir(tiny_config, tmp_path):
    with locking(tmp_path / LOCK, ""), pytest.raises(LockedError, match="another --workdir"):
        distill(tiny_config, tmp_path)
    assert list(tmp_path.glob("*")) == [tmp_path / "text"]


@pytest.mark.slow
def test_a_second_process_is_told_and_takes_nothing_from_the_first(tiny_config, tmp_path):
    """It comes while the first one's save lies there unfinished."""
    tiny_config.train.steps, tiny_config.checkpoint.every, tiny_config.eval.every = 60, 1, 0
    tiny_config.eval.samples = 0
    workdir = tmp_path / "run"
    first = start(tiny_config, workdir)
    wait_for(lambda: len(_steps(workdir)) > 1, first)
    first.send_signal(signal.SIGSTOP)
    unfinished = workdir / "checkpoints" / "99.orbax-checkpoint-tmp-1"
    unfinished.mkdir()
    code, output = run_command(tiny_config, workdir)
    assert code == BAD_INPUT and "Traceback" not in output, output
    assert f"{workdir} is in use by process {first.pid} on " in output
    assert "give another --workdir" in output and unfinished.is_dir()
    first.send_signal(signal.SIGCONT)
    output, _ = first.communicate(timeout=120)
    assert first.returncode == 0, output
    assert not (workdir / LOCK).exists()
    assert '"step": 60,' in _read(workdir / "metrics.jsonl")
