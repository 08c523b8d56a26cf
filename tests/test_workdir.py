"""What a workdir goes through: two processes at once, another run's settings, damaged files."""

import copy
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_tiny_config
from test_run import REPOSITORY, _read, _steps, run_command, start, wait_for

from kdjax.errors import BAD_INPUT, MissingFileError, UserError
from kdjax.formats.locks import LOCK, LockedError, locking
from kdjax.watch.run import distill
from scripts.bench.synthetic import QWEN25_SHAPES, write_random_gguf

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


# --- a finished run -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def one_step_done(models, tmp_path_factory):
    """The config and workdir of a finished run of one step; to be copied."""
    folder = tmp_path_factory.mktemp("done")
    config = make_tiny_config(models, folder)
    config.optim.warmup_steps, config.eval.samples = 0, 0
    config.train.steps = config.checkpoint.every = config.eval.every = 1
    assert distill(config, folder / "run") == "finished"
    return config, folder / "run"


@pytest.fixture
def done(one_step_done, tmp_path):
    config, workdir = one_step_done
    return copy.deepcopy(config), Path(shutil.copytree(workdir, tmp_path / "run"))


def test_a_finished_run_is_done_for_its_own_config_only(done, tmp_path, caplog):
    """The same models and text at other paths are the same run; any other change is named."""
    config, workdir = done
    caplog.set_level(logging.INFO, "kdjax")
    config.teacher.path = str(shutil.copy(config.teacher.path, tmp_path / "moved.gguf"))
    config.data.train = str(shutil.copytree(config.data.train, tmp_path / "moved"))
    config.log.every = 7
    write_random_gguf(tmp_path / "other.gguf", QWEN25_SHAPES["tiny-teacher"], seed=9)
    assert distill(config, workdir) == "finished" and "nothing to do" in caplog.text
    for field, value, named in (
        ("optim.learning_rate", 5e-4, "optim.learning_rate: the checkpoint has 0.001, now 0.0005"),
        ("teacher.path", str(tmp_path / "other.gguf"), "teacher.sha256: the checkpoint has '"),
        ("teacher.path", "no.gguf", "teacher.path: the checkpoint has '.*teacher.gguf', now 'no.g"),
        ("data.train", str(tmp_path / "moved" / "0[1-9].py"), "data.rows: the checkpoint has '"),
    ):
        other = copy.deepcopy(config)
        section, name = field.split(".")
        setattr(getattr(other, section), name, value)
        with pytest.raises(UserError, match=named):
            distill(other, workdir)


def test_a_finished_run_may_have_lost_its_files(done, tmp_path):
    """Gone from the paths that its receipt names: settings are still compared."""
    config, workdir = done
    receipt = workdir / "receipt.json"
    gone = str(tmp_path / "gone.gguf")
    receipt.write_text(receipt.read_text().replace(config.teacher.path, gone))
    config.teacher.path = gone
    assert distill(config, workdir) == "finished"
    config.train.seed = 3
    with pytest.raises(UserError, match=r"train.seed: the checkpoint has 0, now 3"):
        distill(config, workdir)
    receipt.unlink()
    with pytest.raises(MissingFileError, match=r"gone.gguf"):
        distill(config, workdir)
