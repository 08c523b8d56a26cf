"""Disks that are full or take no writing: one message, a status of its own, nothing lost.

A limit on the size of files stands for the full disk: the same calls fail, without the rights that
a mount needs. `scripts/checks/faults.py` fills a real one.
"""

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from conftest import start_over
from test_run import (
    REPOSITORY,
    Recorder,
    _read,
    _saving,
    _steps,
    command,
    curve,
    go,
    start,
    wait_for,
)

from kdjax.commands import evaluate, train
from kdjax.data import teacher_cache
from kdjax.errors import NOT_WRITTEN, UserError, WriteError, print_error, status_of
from kdjax.export import export_gguf, export_hf
from kdjax.formats.files import check_place, replacing, writing
from kdjax.formats.locks import holding, holding_file
from kdjax.training.hooks import Run, StepRecord
from kdjax.training.inputs import prepare
from kdjax.training.job import assemble
from kdjax.training.saving import Checkpoints
from kdjax.training.step import TrainState
from kdjax.watch import writers
from kdjax.watch.guards import NonFiniteError, NonFiniteGuard
from kdjax.watch.report import page
from kdjax.watch.run import distill

pytestmark = pytest.mark.usefixtures("one_device")


@contextlib.contextmanager
def no_file_beyond(size):
    """This process's files cannot grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- one file -----------------------------------------------------------------------------------


def test_a_file_that_does_not_fit_leaves_the_old_one_and_says_what_to_do(tmp_path, capsys):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with no_file_beyond(1000), pytest.raises(WriteError) as error, replacing(path) as file:
        file.write(bytes(5000))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    print_error(error.value)
    assert capsys.readouterr().err == (
        f"error: {path} cannot be written: File too large. Raise the limit of a file's size "
        "(`ulimit -f`), and run the same command again.\n"
    )
    assert status_of(error.value) == NOT_WRITTEN


@pytest.mark.parametrize(
    "code, remedy",
    [
        (errno.ENOSPC, "Free some space on its disk"),
        (errno.EDQUOT, "your quota"),
        (errno.EROFS, "Make that disk writable"),
        (errno.EACCES, "Make it writable, or name a folder of yours"),
        (errno.EIO, "dmesg"),
    ],
)
def test_every_refusal_of_a_disk_has_its_remedy(tmp_path, code, remedy):
    with pytest.raises(WriteError, match=remedy), writing(tmp_path / "out" / "file"):
        raise OSError(code, os.strerror(code), str(tmp_path / "out"))


def test_an_error_of_reading_elsewhere_is_none_of_writing(tmp_path):
    with pytest.raises(PermissionError), writing(tmp_path / "out" / "file"):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/read")


def test_output_that_nobody_can_keep_is_one_line():
    command = [sys.executable, "-m", "kdjax", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (NOT_WRITTEN, "error: No space left on device\n")


def test_only_a_regular_file_is_replaced(tmp_path):
    """A rename by root would put a file in the place of /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    for name, said in (
        ("pipe", "pipe is no regular file; expected a file"),
        ("folder", "folder is a folder; expected a file"),
        ("file/a.bin", "file is no folder"),
        ("file/b/a.bin", "file is no folder"),
    ):
        with pytest.raises(UserError, match=said):
            check_place(tmp_path / name)
        with pytest.raises(UserError, match=said), replacing(tmp_path / name) as file:
            file.write(b"new")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "file").read_bytes() == b"old"


def test_a_folder_that_cannot_be_made_has_its_remedy(tmp_path, monkeypatch):
    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(WriteError, match=r"/a cannot be written: Permission denied\. Make it"):
        check_place(tmp_path / "a" / "b.bin")


def test_a_user_without_a_home_is_told_the_field(tiny_config, monkeypatch):
    from kdjax.models.checkpoint import open_checkpoint

    tokenizer = open_checkpoint(tiny_config.student.path).tokenizer
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # where there is none
    tiny_config.data.cache_dir = "~/.cache/kdjax/rows"
    with pytest.raises(
        UserError, match=r"without a home.* folder: --config\.data\.cache_dir=DIR\.$"
    ):
        prepare(tiny_config.data, tokenizer)


def test_a_place_is_tried_by_its_own_name(tmp_path, monkeypatch):
    """`tempfile` says an absolute path of a file that nobody asked for."""
    monkeypatch.chdir(tmp_path)
    with no_file_beyond(0), pytest.raises(WriteError, match=r"^out/a.json cannot be written: File"):
        check_place(Path("out/a.json"))
    assert not Path("out").exists()


def test_a_disk_that_is_full_keeps_no_folder_that_was_made_for_a_file(tmp_path):
    (tmp_path / "kept").mkdir()
    check_place(tmp_path / "made" / "by" / "it" / "a.bin")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]

    def place(path):
        with no_file_beyond(0):
            check_place(path)

    def replace(path):
        with no_file_beyond(1000), replacing(path) as file:
            file.write(bytes(5000))

    def hold_file(path):  # a command that fills the disk after it began
        with holding_file(path, ""), no_file_beyond(1000), replacing(path) as file:
            file.write(bytes(5000))

    def hold(path):
        with holding(path.parent, ""):
            replace(path)

    for write in (place, replace, hold_file, hold):
        for folder in ("made/by/it", "kept", "kept/made"):
            with pytest.raises(WriteError):
                write(tmp_path / folder / "a.bin")
            assert [path.name for path in tmp_path.rglob("*")] == ["kept"], write


# --- a run --------------------------------------------------------------------------------------


class FillingUp(Recorder):
    """No file can grow once `step` is done and `wait` has returned."""

    def __init__(self, step, stack, wait, size=20_000):
        super().__init__()
        self.step, self.stack, self.wait, self.size = step, stack, wait, size

    def step_end(self, record):
        if record.step == self.step:
            self.wait()
            self.stack.enter_context(no_file_beyond(self.size))
        return super().step_end(record)


@pytest.mark.slow
def test_a_save_that_does_not_fit_loses_nothing(tiny_config, tmp_path, capfd):
    """Orbax's and its threads' words stay with them; the run goes on as if nothing had been."""
    job = assemble(tiny_config, tmp_path / "straight")
    straight, resumed = Recorder(), Recorder()
    go(tiny_config, tmp_path / "straight", straight, job=job)
    workdir = tmp_path / "full"
    capfd.readouterr()

    def wait_for_step_5():  # the save in the background
        deadline = time.monotonic() + 60
        while _steps(workdir) != ["5"] and time.monotonic() < deadline:
            time.sleep(0.01)

    with contextlib.ExitStack() as stack:
        full = FillingUp(7, stack, wait_for_step_5)
        again = start_over(job, workdir)
        with pytest.raises(WriteError, match=r"full/checkpoints cannot be written: File too large"):
            go(tiny_config, workdir, full, job=again)
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err and "orbax" not in said.err
    assert _steps(workdir) == ["5"] and full.calls[-1] == ("end", "finished")
    (workdir / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir(exist_ok=True)  # as a kill leaves
    go(tiny_config, workdir, resumed, job=start_over(job, workdir))
    assert resumed.calls[0] == ("begin", 5) and not _saving(workdir)
    assert resumed.curve() == [call for call in straight.curve() if call[1] > 5]


def test_a_failed_save_is_heard_of_before_the_next_one(tmp_path, rng):
    """Saved in the background: hours may lie between two saves."""
    noise = jnp.asarray(rng.normal(size=50_000))  # which does not compress
    state = jax.block_until_ready(TrainState(jnp.int32(5), {"weight": noise}, {"mu": noise}))
    with pytest.raises(WriteError), Checkpoints(tmp_path, 3, asynchronous=True) as store:
        with no_file_beyond(20_000):
            store.save(state, {})
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                store.raise_failed()  # as the loop asks after every step
                time.sleep(0.01)
        pytest.fail("10 s without an error")
    # A thread of TensorStore may end after the store: that its event loop is gone is no news.
    sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError("Event loop is closed")))


@pytest.mark.parametrize("large", [0, 1])  # bytes more than the checkpoint has
def test_a_large_checkpoint_is_told_before_it_is_written(tmp_path, monkeypatch, caplog, large):
    weight, told = jnp.arange(250_000, dtype=jnp.float32), []
    state = TrainState(jnp.int32(5), {"weight": weight}, {"mu": weight})
    monkeypatch.setattr("kdjax.training.saving._LARGE", 2_000_004 + large)
    with caplog.at_level("INFO", "kdjax"), Checkpoints(tmp_path, 3) as store:
        save = lambda *_, **__: told.extend(caplog.messages) or True  # noqa: E731
        monkeypatch.setattr(store._manager, "save", save)
        store.save(state, {})
    assert told == ([] if large else ["saving a checkpoint of 0.00 GB"])


def test_a_checkpoint_takes_the_room_that_is_asked_for(tmp_path):
    """Arrays as they are, which is quicker; zeros would show compression."""
    state = TrainState(jnp.int32(5), {"weight": jnp.zeros(250_000, jnp.float32)}, {})
    with Checkpoints(tmp_path, 1) as store:
        need = store.check_room(state)
        store.save(state, {})
    taken = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert need <= taken < 1.05 * need


def test_a_disk_without_room_for_a_checkpoint_is_named_before_the_first_step(
    tiny_config, tmp_path, monkeypatch
):
    usage = type("Usage", (), {"free": 10_000, "total": 10**9})
    monkeypatch.setattr("kdjax.training.saving.shutil.disk_usage", lambda _: usage)
    with pytest.raises(WriteError) as error:
        distill(tiny_config, tmp_path / "run")
    assert "found 0.000 GB free on its disk; expected 0.00" in str(error.value)
    assert "No checkpoint was saved" in str(error.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("checkpoints", "warns"), [(1.9, True), (2.1, False)])
def test_a_checkpoint_that_takes_the_room_of_the_next_says_so(
    checkpoints, warns, tmp_path, monkeypatch, caplog
):
    """The first of several; later ones take the room of those that they replace."""
    state = TrainState(jnp.int32(5), {"weight": jnp.arange(250_000, dtype=jnp.float32)}, {})
    usage = type("Usage", (), {"free": 1_000_004 * checkpoints, "total": 10**9})
    monkeypatch.setattr("kdjax.training.saving.shutil.disk_usage", lambda _: usage)
    with Checkpoints(tmp_path, 1) as store:
        store.save(state, {})
        assert ("the next needs 0.00" in caplog.text) == warns
        caplog.clear()
        store.save(state.replace(step=jnp.int32(6)), {})
        assert not caplog.text


@pytest.mark.slow
def test_the_command_on_a_full_disk_names_the_last_checkpoint_and_resumes(tiny_config, tmp_path):
    """A status of its own and no traceback; `scripts.checks.faults` compares the curves."""
    tiny_config.train.steps, tiny_config.checkpoint.every, tiny_config.eval.every = 15, 3, 0
    workdir = tmp_path / "full"
    process = start(tiny_config, workdir)
    wait_for(lambda: "6" in _steps(workdir), process)
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (30_000, hard))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == NOT_WRITTEN and "Traceback" not in output, output
    newest = max(map(int, _steps(workdir)))
    assert f"The last good checkpoint is {workdir}/checkpoints/{newest}: the run goes on" in output
    receipt = json.loads(_read(workdir / "receipt.json"))
    assert receipt["exit"]["status"] == NOT_WRITTEN and receipt["status"] == "failed"
    assert train.main(command(tiny_config, workdir)[3:]) == 0
    assert curve(workdir)[-1]["step"] == 15 and not _saving(workdir)


# --- what a run writes beside its checkpoints ---------------------------------------------------


def a_run(workdir):
    return Run(workdir, 0, 100, 8, 1.0, None, 1, {})


@pytest.mark.parametrize("kind", [writers.JsonLines, writers.TensorBoard])
def test_curves_that_do_not_fit_end_the_run_and_never_block_it(kind, tmp_path):
    """A queue before a thread that died would hold the run for good."""
    hook = kind(tmp_path)
    hook.train_begin(a_run(tmp_path))
    try:
        with no_file_beyond(600), pytest.raises(WriteError, match=str(tmp_path)):
            for step in range(1, 25):  # 2 kB, less than a buffer
                hook.step_end(StepRecord(step, {"loss": 1.0}, 0.1, {}))
    finally:
        with contextlib.suppress(WriteError):
            hook.train_end("failed", None)


def test_a_batch_that_cannot_be_kept_does_not_hide_the_nan(tmp_path, rng):
    batch = {"tokens": rng.integers(0, 1 << 30, (64, 64))}
    record = StepRecord(3, {"loss": float("nan")}, 0.1, batch)
    with no_file_beyond(100), pytest.raises(NonFiniteError, match=r"could not be kept .*too large"):
        NonFiniteGuard(tmp_path).step_end(record)
    assert not list(tmp_path.iterdir())


# --- other commands -------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_in_which_nothing_was_written_goes(tmp_path, made):
    """Unless it was there before: a folder of the user's."""
    (folder := tmp_path / "r2").mkdir()
    if made:
        folder.rmdir()
    with pytest.raises(WriteError), holding(folder, ""):
        (folder / "checkpoints").mkdir()
        raise WriteError("full")
    assert folder.exists() != made
    with holding(folder, ""):
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "a").write_text("")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "checkpoints"]


def test_rows_that_do_not_fit_leave_nothing(tiny_config, tmp_path):
    from kdjax.models.checkpoint import open_checkpoint

    tokenizer = open_checkpoint(tiny_config.student.path).tokenizer
    said = r"rows/\w{64} cannot be written: .* Another folder: --config\.data\.cache_dir=DIR\.$"
    with no_file_beyond(1000), pytest.raises(WriteError, match=said):
        prepare(tiny_config.data, tokenizer)
    assert not list((tmp_path / "rows").iterdir())


@pytest.mark.parametrize("export, name", [(export_hf, "hf"), (export_gguf, "a.gguf")])
def test_an_export_that_does_not_fit_leaves_nothing(models, tmp_path, export, name):
    from exporting import a_student

    student = a_student(models / "student.gguf")
    out = tmp_path / name
    with no_file_beyond(5000), pytest.raises(WriteError, match=f"{out} cannot be written"):
        export(student, out)
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_a_folder_is_named(tiny_config, models, tmp_path):
    from exporting import a_student

    from kdjax.models.checkpoint import open_checkpoint

    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(UserError, match="file is no folder"):
        export_hf(a_student(models / "student.gguf"), tmp_path / "file" / "hf")
    tiny_config.data.cache_dir = str(tmp_path / "file")
    with pytest.raises(UserError, match="file is no folder"):
        prepare(tiny_config.data, open_checkpoint(tiny_config.student.path).tokenizer)
    with pytest.raises(UserError, match="file is no folder"):
        teacher_cache.write(tmp_path / "file", mock.Mock(teacher_cache.CacheSpec), iter)


@pytest.mark.slow
def test_a_page_that_does_not_fit_is_one_message(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 1, "loss": 1.0, "ce": 1.0, "learning_rate": 1e-3}\n'
    )
    with no_file_beyond(1000), pytest.raises(WriteError, match="cannot be written"):
        page.write_page([tmp_path])
    assert not (tmp_path / "report.html").exists()


def test_what_was_measured_is_kept_where_there_is_room(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(path, document):
        if path.parent.name == "full":
            raise WriteError(f"{path} cannot be written.")
        path.write_text(json.dumps(document))

    monkeypatch.setattr(evaluate.table, "write", write)
    with pytest.raises(WriteError, match=rf"The figures are in {tmp_path}/kdjax-\d+-a.json"):
        evaluate._write(tmp_path / "full" / "a.json", {"pass": 1})
    (kept,) = tmp_path.glob("kdjax-*-a.json")
    assert json.loads(kept.read_text()) == {"pass": 1}
