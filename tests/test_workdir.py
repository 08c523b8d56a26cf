"""A workdir under two processes at once, another run's settings, damaged files."""

import contextlib
import copy
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_tiny_config
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_run import REPOSITORY

from kdjax.errors import CHECK_FAILED, CheckError, MissingFileError, UserError
from kdjax.formats.checksums import add_up, checksum
from kdjax.formats.locks import LOCK, LockedError, locking
from kdjax.formats.saved import DamagedError, find_damage, reading, saved_params, saved_run
from kdjax.training.job import Job
from kdjax.training.saving import Checkpoints
from kdjax.training.step import TrainState
from kdjax.watch.run import distill
from kdjax.watch.verify import verify
from scripts.bench.synthetic import QWEN25_SHAPES, write_random_gguf

pytestmark = pytest.mark.usefixtures("one_device")

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
    assert process.stdout and process.stdout.readline() == "held\n"
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
    """Before it looks at anything else: its teacher is not there either."""
    tiny_config.teacher.path = str(tmp_path / "none.gguf")
    with locking(tmp_path / LOCK, ""), pytest.raises(LockedError, match="another workdir"):
        distill(tiny_config, tmp_path)
    assert list(tmp_path.glob("*")) == [tmp_path / "text"]


# --- a finished run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_steps(models, tmp_path_factory):
    """The config and workdir of a finished run of two steps, both saved; to be copied."""
    folder = tmp_path_factory.mktemp("two-steps")
    config = make_tiny_config(models, folder)
    config.optim.warmup_steps, config.eval.samples = 0, 0
    config.train.steps, config.checkpoint.every, config.eval.every = 2, 1, 2
    assert distill(config, folder / "run") == "finished"
    return config, folder / "run"


@pytest.fixture
def done(two_steps, tmp_path):
    config, workdir = two_steps
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


# --- damage -------------------------------------------------------------------------------------


def test_a_checksum_is_the_same_on_the_host_and_on_any_mesh(rng):
    """Scalars and matrices of 1, 2 and 4 bytes an element, longer than a block of the host."""
    devices = np.asarray(jax.devices()[:8]).reshape(2, 4)
    split = NamedSharding(Mesh(devices, ("a", "b")), PartitionSpec("a", "b"))
    for dtype in ("float32", "bfloat16", "int32", "uint8"):
        for shape in ((), (1,), (5, 7, 3), (400, 512)):
            array = np.asarray(rng.integers(0, 200, shape)).astype(jnp.dtype(dtype))
            number = checksum(array)
            assert number == int(jax.jit(add_up)(array))
        placed = jax.device_put(array, split)
        assert int(jax.jit(add_up)(placed)) == number


def test_a_checksum_sees_one_bit_two_signs_and_two_places(rng):
    array = rng.standard_normal(70_000, np.float32)
    before = checksum(array)
    bits = array.view(np.uint32)
    for place, bit in itertools.product((0, 1, 65_535, 65_536, 69_999), range(32)):
        bits[place] ^= np.uint32(1 << bit)
        assert checksum(array) != before, (place, bit)
        bits[place] ^= np.uint32(1 << bit)
    array[3:5] *= -1
    assert checksum(array) != before
    array[3:5] *= -1
    array[[3, 4]] = array[[4, 3]]
    assert checksum(array) != before


def flip_bits(path, count):
    """One bit in each of so many equal parts of a file, in its middle."""
    data = bytearray(path.read_bytes())
    for part in range(count):
        data[len(data) * (2 * part + 1) // (2 * count)] ^= 8
    path.write_bytes(data)


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.slow
def test_one_flipped_bit_is_named_kept_and_trained_again(done, caplog):
    """The run goes on from the step before, and ends with the parameters that it had."""
    config, workdir = done
    before = {name: array.copy() for name, array in saved_params(workdir, 2)}
    flip_bits(largest(workdir / "checkpoints" / "2"), 1)
    caplog.set_level(logging.WARNING, "kdjax")
    assert distill(config, workdir) == "finished"
    said = rf"step 2 is damaged: (found other numbers|state: \w).* kept as {workdir}/damaged-2"
    assert re.search(said, caplog.text) and "newest intact checkpoint is of step 1" in caplog.text
    assert (workdir / "damaged-2" / "state").is_dir()
    after = dict(saved_params(workdir, 2))
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], before[name]) for name in before)


def test_no_reader_takes_a_damaged_step(done):
    """Export, evaluate and generate read it so."""
    _, workdir = done
    for path in (workdir / "checkpoints" / "2").rglob("*"):
        if path.stat().st_size > 100_000:
            flip_bits(path, 100)
    with pytest.raises(DamagedError, match=r"2 is damaged: .* Name an older step") as error:
        list(saved_params(workdir, 2))
    assert error.value.status == CHECK_FAILED


def test_without_an_intact_step_nothing_is_moved_and_nothing_begun(done):
    """Cut short, and its record changed: both steps are named."""
    config, workdir = done
    data, record = largest(workdir / "checkpoints" / "1"), workdir / "checkpoints/2/run/metadata"
    data.write_bytes(data.read_bytes()[:1000])
    record.write_text(record.read_text().replace('"next_index": 2', '"next_index": 3'))
    before = sorted(workdir.rglob("*"))
    with pytest.raises(CheckError, match="holds no intact checkpoint") as error:
        distill(config, workdir)
    assert "step 1: state: " in str(error.value) and "another workdir" in str(error.value)
    assert "step 2: run/metadata holds other values than were saved" in str(error.value)
    assert sorted(workdir.rglob("*")) == before


def test_what_a_library_says_of_damage_is_one_line_and_the_rest_in_a_file(done, caplog):
    _, workdir = done
    manifest = workdir / "checkpoints/2/state/manifest.ocdbt"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    caplog.set_level(logging.WARNING, "kdjax")
    with contextlib.closing(Checkpoints(workdir, 2)):
        pass
    line = next(r.getMessage() for r in caplog.records if "is damaged" in r.getMessage())
    said = line.partition(". It is kept as ")[0]
    assert "state: step cannot be read" in said and "does not match actual length" in said
    assert len(said) < 270 and "\n" not in said
    whole = (workdir / "damaged-2" / "error.txt").read_text()
    assert "Error decoding local file" in whole and len(whole) > len(said)
    page = "\n".join(f"line {i} of a page" * 40 for i in range(40))
    with pytest.raises(DamagedError) as error, reading(workdir, "state"):
        raise ValueError(page)
    assert len(str(error.value)) < 400 and "line 39" not in str(error.value)
    assert error.value.details == page


def test_a_second_damaged_step_of_the_same_number_is_kept_too(done):
    _, workdir = done
    (workdir / "damaged-2").mkdir()
    (workdir / "checkpoints/2/state/manifest.ocdbt").unlink()
    with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
        assert checkpoints.latest() == 1
    assert (workdir / "damaged-2-2" / "state").is_dir()


def test_steps_of_versions_without_checksums_are_resumed(done):
    _, workdir = done
    record = workdir / "checkpoints/2/run/metadata"
    saved = json.loads(record.read_text())
    del saved["checksums"], saved["sha256"]
    record.write_text(json.dumps(saved))
    with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
        assert checkpoints.latest() == 2
    (workdir / "checkpoints/2/state/manifest.ocdbt").unlink()
    assert "state: step cannot be read" in find_damage(workdir, 2).problem


@pytest.mark.parametrize("number", [1, 8])
def test_a_step_in_a_folder_of_another_number_is_refused(done, number):
    """Renamed to the last step, it would count as the finished run."""
    config, workdir = done
    folders = workdir / "checkpoints"
    shutil.rmtree(folders / "1")
    (folders / "2").rename(folders / str(number))
    config.train.steps = 8
    before = sorted(workdir.rglob("*"))
    said = rf"{folders}/{number} holds step 2; expected step {number}, .* Rename it to 2"
    with pytest.raises(CheckError, match=said) as error:
        distill(config, workdir)
    assert error.value.status == CHECK_FAILED
    assert sorted(workdir.rglob("*")) == before
    for read in (lambda: saved_params(workdir, number), lambda: find_damage(workdir, number)):
        with pytest.raises(CheckError, match=said):
            read()
    receipt = workdir / "receipt.json"
    receipt.write_text(receipt.read_text().replace("checkpoints/2", f"checkpoints/{number}"))
    entries = json.loads(receipt.read_text())
    entries["steps"] = entries["output"]["step"] = number
    receipt.write_text(json.dumps(entries))
    with pytest.raises(CheckError, match=rf"checkpoint: cannot be checked: CheckError: {said}"):
        verify(workdir)


def test_a_save_that_orbax_skips_is_an_error(tmp_path):
    state = TrainState(jnp.int32(5), {"weight": jnp.ones(3)}, {"mu": jnp.ones(3)})
    with Checkpoints(tmp_path, 3) as checkpoints:
        checkpoints.save(state, {})
        for step in (5, 4):
            with pytest.raises(CheckError, match=rf"step {step} was not saved: .* holds step 5"):
                checkpoints.save(state.replace(step=jnp.int32(step)), {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["5"]


def test_a_run_that_decayed_rates_of_delta_layers_is_refused(done):
    """Their checkpoints have no `undecayed`; those of other students go on."""
    _, workdir = done
    identity = saved_run(workdir, 2)["identity"]
    job = SimpleNamespace(workdir=workdir, identity=identity, undecayed=[])
    assert Job.read_record(job, 2)["identity"] == identity
    job.undecayed = ["log_rate", "shift"]
    with pytest.raises(UserError, match=r"moved A_log and dt_bias.*student.path=.*/run and a new"):
        Job.read_record(job, 2)


def test_a_tracker_is_missed_before_anything_is_opened(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tiny_config.log.tracker, tiny_config.teacher.path = "wandb:p", str(tmp_path / "none.gguf")
    with pytest.raises(UserError, match=r"tracker=wandb:p: wandb is not installed. pip install"):
        distill(tiny_config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_few_of_every_fault_lose_nothing():
    """The short form of what docs/robustness.md reports."""
    command = [sys.executable, "-m", "programs", "scripts.checks.faults", "--short"]
    how = dict(text=True, capture_output=True, timeout=270)
    how["env"] = os.environ | dict(PYTHONPATH=f"{Path(__file__).parent}:{REPOSITORY}")
    done = subprocess.run(command, cwd=REPOSITORY, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\| `kill -9` at a random moment of a run \| 2 \|", done.stdout)
    assert re.search(r"^0 of \d\d processes printed a traceback", done.stdout, re.M)
