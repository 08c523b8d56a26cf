"""Receipts: what they record, whatever the end, and what `verify` finds in a changed one."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import make_tiny_config, start_over, without_page

import kdjax
from kdjax import __version__
from kdjax.device import runtime
from kdjax.errors import UserError
from kdjax.formats.imatrix import write_importance
from kdjax.formats.saved import saved_params, saved_run
from kdjax.formats.start import write_start
from kdjax.training.forms import Rounded
from kdjax.training.hooks import Hook, exit_status
from kdjax.training.job import assemble
from kdjax.training.loop import train
from kdjax.training.saving import Checkpoints
from kdjax.watch import provenance, receipt
from kdjax.watch.guards import NonFiniteError
from kdjax.watch.run import distill, make_hooks
from kdjax.watch.verify import _CHECKS, _Recheck, verify

pytestmark = pytest.mark.usefixtures("one_device")


class Probe(Hook):
    """Stops after `stop_at`, raises `error` at its step, keeps the receipt seen at each call."""

    def __init__(self, workdir, stop_at=None, error=None):
        self._workdir, self._stop_at, self._error, self.seen = workdir, stop_at, error, {}

    def _look(self, when):
        self.seen[when] = json.loads((self._workdir / "receipt.json").read_text())

    def train_begin(self, run):
        self._look("begin")

    def step_end(self, record):
        if record.step != self._stop_at:
            return False
        if self._error:
            raise self._error
        return True

    def save_begin(self, step):
        self._look(step)


def go(job, workdir, stop_at=None, error=None):
    """A run with the command's hooks; returns a probe and the receipt it left.

    `job` may have run before, elsewhere: its steps are compiled then.
    """
    workdir.mkdir(exist_ok=True)
    job, config = start_over(job, workdir), job.config
    probe = Probe(workdir, stop_at, error)
    # As on a GPU: the last save is in flight when the run ends.
    store = Checkpoints(workdir, config.checkpoint.keep, asynchronous=True)
    with contextlib.closing(store) as checkpoints:
        hooks = make_hooks(job, checkpoints, runtime.device_summary())
        hooks = [*without_page(hooks), probe]
        with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
            train(job, checkpoints, hooks, None)
    return probe, provenance.read(workdir)


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """A finished run of 10 steps: its job, workdir, probe and receipt."""
    folder = tmp_path_factory.mktemp("finished")
    job = assemble(make_tiny_config(models, folder), folder)
    return job, folder / "run", *go(job, folder / "run")


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of that workdir, to spoil, with the config's files where they were."""
    return Path(shutil.copytree(finished[1], tmp_path / "copy"))


def edit(workdir, change):
    path = workdir / "receipt.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_finished_run_records_everything(finished):
    job, workdir, _, found = finished
    config = job.config
    assert found["status"] == "finished"
    assert found["exit"] == dict(reason="finished", error=None, message=None, status=0)
    assert found["kdjax"]["version"] == __version__
    assert shlex.split(found["command"])[1:] == sys.orig_argv[1:]
    assert found["config"] == json.loads(json.dumps(dataclasses.asdict(config)))
    text = json.dumps(found["config"], sort_keys=True, separators=(",", ":"))
    assert found["config_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert found["teacher"]["sha256"] == sha256(config.teacher.path)
    assert found["student"]["sha256"] == sha256(config.student.path)
    assert found["teacher"]["files"] == [config.teacher.path]
    assert found["teacher"]["weights"].startswith("dense")
    assert found["teacher"]["resident_bytes"] > 1e5
    identity = saved_run(workdir, 10)["identity"]
    assert found["data"]["rows"] == identity["data.rows"]
    assert Path(found["data"]["folder"]).name == identity["data.rows"]
    counts, rows = found["data"]["counts"], job.rows.train
    assert (counts["train"]["rows"], counts["epochs"]) == (len(rows), round(80 / len(rows), 4))
    assert (found["seed"], found["steps"], found["positions"]) == (0, 10, 10 * 8 * 32)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert found["tokens"] == sum(e["tokens"] for e in lines if e["kind"] == "train")
    first, *_, final = (e for e in lines if e["kind"] == "eval")
    assert {"kind": "eval", **found["held_out"]["first"]} == first
    assert {"kind": "eval", **found["held_out"]["final"]} == final
    assert (first["step"], final["step"]) == (0, 10)
    assert found["held_out"]["batches"].keys() == {"first", "final"}
    for end, figures in (("first", first), ("final", final)):
        batches = found["held_out"]["batches"][end]
        for name in ("student_ce", "kl", "agreement"):
            mean = np.average(batches[name], weights=batches["tokens"])
            assert mean == pytest.approx(figures[name]), name
    assert found["started"] <= found["ended"] and found["started"].endswith("+00:00")
    assert found["resumed_from"] == [] and len(found["sessions"]) == 1
    platform = found["platform"]
    assert platform["packages"]["jax"] == jax.__version__
    assert platform["devices"]["count"] == len(jax.devices()) and "driver" in platform["devices"]


def test_the_output_hash_is_of_the_saved_tensors(finished):
    """By hand: each tensor's name, shape, dtype and bytes, in order of names."""
    _, workdir, _, found = finished
    digest = hashlib.sha256()
    names = []
    for name, tensor in saved_params(workdir, 10):
        names.append(name)
        digest.update(f"{name}\0{list(tensor.shape)}\0float32\0".encode() + tensor.tobytes())
    assert found["output"] == dict(step=10, path="checkpoints/10", params_sha256=digest.hexdigest())
    assert names == sorted(names) and {"embed", "norm/weight", "blocks/attn/q/weight"} <= {*names}


def test_a_running_receipt_grows_with_the_saves(finished):
    seen = finished[2].seen
    assert [seen[w]["status"] for w in ("begin", 5, 10)] == ["running"] * 3
    assert [seen[w]["steps"] for w in ("begin", 5, 10)] == [0, 5, 10]
    assert seen["begin"]["ended"] is None and seen["begin"]["teacher"]["sha256"]
    assert 0 == seen["begin"]["tokens"] < seen[5]["tokens"] < seen[10]["tokens"]


def test_a_write_that_fails_leaves_the_receipt_before(tmp_path, monkeypatch):
    before = b'{"format": 1}\n'
    (tmp_path / "receipt.json").write_bytes(before)

    def full(_):
        raise OSError(28, "No space left on device")

    hook = receipt.Receipt.__new__(receipt.Receipt)
    hook._path, hook._record = tmp_path / "receipt.json", {"x": 1}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        hook._write("running")
    assert (tmp_path / "receipt.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.glob("*receipt*")) == ["receipt.json"]


def test_verify_accepts_a_finished_run(finished):
    lines = verify(finished[1])
    assert all(line.startswith("ok    ") for line in lines)
    layers, per_layer, others = 2, 12, 2
    total = layers * per_layer + others
    assert f"parameters: {total} of {total} tensors changed" in lines[-1]
    sections = [line.split(":")[0].removeprefix("ok    ") for line in lines]
    assert sections == [
        "end",
        "config",
        "teacher",
        "student",
        "rows",
        "text",
        "checkpoint",
        "held-out",
        "parameters",
    ]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_first_start(finished, tmp_path):
    job, _, _, straight = finished
    _, first = go(job, tmp_path / "run", stop_at=4)
    assert first["status"] == "interrupted" and first["exit"]["status"] == 75
    assert first["output"]["step"] == first["steps"] == 5
    edit(tmp_path / "run", lambda r: r.update(started="2020-01-01T00:00:00+00:00"))
    _, second = go(job, tmp_path / "run")
    assert second["started"] == "2020-01-01T00:00:00+00:00"
    assert second["resumed_from"] == [5]
    sessions = [(s["start_step"], s["end_step"], s["reason"]) for s in second["sessions"]]
    assert sessions == [(0, 5, "interrupted"), (5, 10, "finished")]
    for name in ("steps", "tokens", "output"):
        assert second[name] == straight[name]
    assert second["held_out"] == straight["held_out"]
    assert verify(tmp_path / "run")


def test_batches_of_a_later_step_are_not_taken_for_the_first():
    """The receipt of an earlier version has first figures, and not those of their batches."""
    hook, found = receipt.Receipt.__new__(receipt.Receipt), [{"kl": 1.0, "tokens": 2.0}]
    for earlier, first in (({"first": {"step": 0}}, None), ({}, {"kl": [1.0], "tokens": [2.0]})):
        hook._record = {"held_out": receipt._begin_held_out(earlier)}
        hook.eval_batches(5, found)
        batches = hook._record["held_out"]["batches"]
        assert batches == {"first": first, "final": {"kl": [1.0], "tokens": [2.0]}}


def test_a_killed_session_is_told_apart(finished, copied):
    job, _, probe, straight = finished
    shutil.rmtree(copied / "checkpoints" / "10")
    edit(copied, lambda r: (r.clear(), r.update(probe.seen[5])))  # as a kill after step 5 leaves it
    with pytest.raises(UserError, match="end: status is running"):
        verify(copied)
    _, found = go(job, copied)
    assert [s["reason"] for s in found["sessions"]] == ["killed", "finished"]
    assert found["held_out"] == straight["held_out"] and found["tokens"] == straight["tokens"]


@pytest.mark.slow
def test_a_run_killed_behind_its_last_save_is_closed_by_the_same_command(finished, copied):
    """Its receipt and its page: nothing else is left to do."""
    job, _, probe, straight = finished
    edit(copied, lambda r: (r.clear(), r.update(probe.seen[10])))
    (copied / "report.html").unlink(missing_ok=True)
    assert distill(job.config, copied) == "finished"
    assert verify(copied) and "student after 10 steps" in (copied / "report.html").read_text()
    found = provenance.read(copied)
    sessions = [(s["start_step"], s["end_step"], s["reason"]) for s in found["sessions"][1:]]
    assert found["sessions"][0]["reason"] == "killed" and sessions == [(10, 10, "finished")]
    assert found["resumed_from"] == [10]
    for name in ("status", "exit", "steps", "tokens", "positions", "held_out", "output", "data"):
        assert found[name] == straight[name]
    page, receipt = copied / "report.html", (copied / "receipt.json").read_bytes()
    page.unlink()  # killed while it was drawn
    assert distill(job.config, copied) == "finished" and page.exists()
    assert (copied / "receipt.json").read_bytes() == receipt


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failed_run_names_the_exception(finished, tmp_path, error):
    _, found = go(finished[0], tmp_path / "run", stop_at=7, error=error)
    end = found["exit"]
    assert (found["status"], end["reason"]) == ("failed", "failed")
    assert (end["error"], end["message"]) == (type(error).__name__, str(error))
    assert end["status"] == exit_status("failed", error)
    assert found["ended"] and found["sessions"][-1]["status"] == end["status"]
    assert found["steps"] == 7
    if isinstance(error, KeyboardInterrupt):
        assert found["output"] is None  # whoever interrupts twice does not wait for a hash
    else:
        assert found["output"]["step"] == 5


@pytest.mark.parametrize(
    ("reason", "error", "verdict", "status"),
    [
        ("finished", None, None, 0),
        ("interrupted", None, None, 75),
        ("failed", NonFiniteError("step 7"), None, 4),
        ("failed", UserError("no"), None, 2),
        ("failed", RuntimeError("bug"), None, 1),
        ("failed", KeyboardInterrupt(), None, 130),
        ("finished", None, "PASS", 0),
        ("finished", None, "FAIL", 3),
        ("failed", NonFiniteError("step 7"), "FAIL", 3),
        ("interrupted", None, "UNDECIDED", 75),
        ("finished", None, "UNDECIDED", 75),
        ("failed", UserError("no"), "UNDECIDED", 2),
    ],
)
def test_the_exit_status_of_every_end(reason, error, verdict, status):
    assert exit_status(reason, error, verdict) == status


@pytest.mark.slow
def test_odd_paths_random_weights_and_a_hook_that_fails_to_close(
    tiny_config, tmp_path, monkeypatch
):
    """Relative paths are of the run's directory; weights drawn at random are drawn again."""

    class Broken(Hook):
        def train_end(self, reason, error):
            raise ConnectionError("gone")

    tiny_config.student.init = "random"
    tiny_config.train.steps, tiny_config.optim.warmup_steps = 1, 0
    tiny_config.data.train, tiny_config.data.cache_dir = "text", "rows"
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    job = assemble(tiny_config, run)
    with contextlib.closing(Checkpoints(run, 2)) as checkpoints:
        hooks = without_page(make_hooks(job, checkpoints, runtime.device_summary()))
        with pytest.raises(ConnectionError):
            train(job, checkpoints, [Broken(), *hooks, Broken()], None)
    assert provenance.read(run)["status"] == "finished"
    monkeypatch.chdir("/")
    assert "26 of 26 tensors changed" in verify(run)[-1]


# --- what verify finds --------------------------------------------------------------------------


def _rehash(record):
    record["config_sha256"] = provenance.config_hash(record["config"])


def _other_loss(record):
    record["config"]["loss"]["alpha"] = 0.9
    _rehash(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(status="running"), r"end: status is running"),
        (lambda r: r["config"]["loss"].update(alpha=0.9), r"config: found a config of hash"),
        (lambda r: r.update(seed=7), r"config: found in the config seed 0, the receipt says 7"),
        (_other_loss, r"checkpoint: found in the checkpoint loss.alpha 0.3, .* says 0.9"),
        (lambda r: r["teacher"].update(sha256="0" * 64), r"teacher: .* says 0000"),
        (lambda r: r["student"].update(sha256="0" * 64), r"student: .* says 0000"),
        (lambda r: r["data"].update(packed_sha256="0" * 64), r"rows: .* says 0000"),
        (lambda r: r["data"].update(rows="0" * 64), r"text: found text of key .* says 0000"),
        (lambda r: r["output"].update(params_sha256="0" * 64), r"parameters: .* says 0000"),
        (lambda r: r.update(steps=20), r"checkpoint: found in the checkpoint step 10, .* says 20"),
        (lambda r: r["held_out"]["final"].update(kl=0.0), r"held-out: .*final figures"),
        (lambda r: r["held_out"].update(first=None), r"held-out: the receipt has no first"),
        (lambda r: r.pop("teacher"), r"teacher: cannot be checked: KeyError"),
        (lambda r: r.update(teacher=1.5), r"checkpoint: cannot be checked: AttributeError"),
    ],
)
def test_a_changed_receipt_is_found(copied, change, message, monkeypatch):
    if "parameters" not in message:  # the slow one
        monkeypatch.delitem(_CHECKS, "parameters")
    edit(copied, change)
    with pytest.raises(UserError, match=message):
        verify(copied)


@pytest.mark.parametrize("masters", [{"masters_loss": 3.0}, {}])
def test_the_student_before_training_is_accepted_only_of_earlier_versions(
    copied, masters, monkeypatch
):
    """Their rounded runs saved it at the last step where it was the better."""
    # In place of the table: what is taken out of it and put back comes last for the next test.
    alone = {"parameters": _CHECKS["parameters"]}
    monkeypatch.setattr("kdjax.watch.verify._CHECKS", alone)
    unchanged = lambda saved, *_, **_s: {name: False for name, _ in saved}  # noqa: E731
    monkeypatch.setattr("kdjax.watch.verify.changed_tensors", unchanged)

    def end_as_it_began(record):
        ends = record["held_out"]
        ends["first"] |= masters
        ends["final"] = {**ends["first"], "step": 10, "tokens": 1.0}

    edit(copied, end_as_it_began)
    if masters:
        assert "an earlier version saved the student before training" in verify(copied)[-1]
        return
    with pytest.raises(UserError, match="tensors changed; as in the student's file"):
        verify(copied)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["teacher", "student", "rows", "text"])
def test_a_changed_input_is_found(finished, copied, tmp_path, what, monkeypatch):
    monkeypatch.delitem(_CHECKS, "parameters")
    job, _, _, found = finished
    config = job.config
    path = {
        "teacher": Path(config.teacher.path),
        "student": Path(config.student.path),
        "rows": Path(found["data"]["folder"], "train", "tokens.bin"),
        "text": Path(config.data.train, "03.py"),
    }[what]
    kept = path.read_bytes()
    try:
        _flip(path)
        with pytest.raises(UserError, match=rf"\n  {what}: found"):
            verify(copied)
        path.unlink()
        gone = {"text": "found text of key"}.get(what, rf"cannot be checked: .*{path.name}")
        with pytest.raises(UserError, match=rf"\n  {what}: {gone}"):
            verify(copied)
    finally:
        path.write_bytes(kept)
    assert verify(copied)


def test_packages_keep_their_names_and_versions(copied, models, tmp_path):
    config = make_tiny_config(models, tmp_path)
    config.data.train, config.data.heldout = "corpus,python:stdlib,jax", "python:optax"
    edit(copied, lambda r: r.update(config=dataclasses.asdict(config), cwd="/from/here"))
    read = _Recheck(copied).config.data
    assert read.train == "/from/here/corpus,python:stdlib,jax"
    assert read.heldout == "python:optax"
    assert receipt._describe_sources(config) == {
        "data.train": [
            f"python:stdlib=={platform.python_version()}",
            f"python:jax=={jax.__version__}",
        ],
        "data.heldout": [f"python:optax=={importlib.metadata.version('optax')}"],
    }


def test_a_missing_checkpoint_is_found(copied):
    shutil.rmtree(copied / "checkpoints" / "10")
    with pytest.raises(UserError, match=r"2 of 9 .*\n  checkpoint: checkpoints/10 is missing"):
        verify(copied)


def test_a_missing_or_foreign_receipt_is_named(tmp_path):
    with pytest.raises(UserError, match=r"receipt.json: no such file; expected the receipt"):
        verify(tmp_path)
    (tmp_path / "receipt.json").write_text("[]")
    with pytest.raises(UserError, match="found no receipt of format 1"):
        verify(tmp_path)


def test_a_tensor_that_did_not_change_is_named(finished, tmp_path):
    """A checkpoint of which one layer and the last norm never trained, with a receipt to match."""
    job, workdir, _, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(workdir, copy, ignore=shutil.ignore_patterns("10"))
    with contextlib.closing(Checkpoints(copy, 2)) as checkpoints:
        with contextlib.closing(Checkpoints(workdir, 2)) as source:
            state = source.restore(10, job.step.abstract, job.step.shardings)
            run = saved_run(workdir, 10)
        before = job.make_state().params
        params = jax.tree.map(lambda x: x, state.params)
        params["norm"]["weight"] = before["norm"]["weight"]
        up = params["blocks"]["mlp"]["up"]
        up["weight"] = up["weight"].at[1].set(before["blocks"]["mlp"]["up"]["weight"][1])
        checkpoints.save(state.replace(params=params), run)
    sha = provenance.params_hash(saved_params(copy, 10))
    edit(copy, lambda r: r["output"].update(params_sha256=sha))
    with pytest.raises(UserError, match=r"1 of 9") as error:
        verify(copy)
    assert "24 of 26 tensors changed" in str(error.value)
    assert "blocks/mlp/up/weight[1], norm/weight" in str(error.value)


def test_a_saved_number_that_is_not_finite_is_named(copied, monkeypatch):
    """One of a row that no text reads, so that no loss has become NaN."""
    monkeypatch.setattr("kdjax.watch.verify._CHECKS", {"parameters": _CHECKS["parameters"]})

    def damaged(workdir, step):
        for name, tensor in saved_params(workdir, step):
            if name == "embed":
                tensor = tensor.copy()
                tensor[-1, 3] = np.inf
            yield name, tensor

    monkeypatch.setattr("kdjax.watch.verify.saved_params", damaged)
    with pytest.raises(UserError, match="parameters: found numbers in embed that are not finite"):
        verify(copied)


@pytest.mark.slow
def test_an_importance_is_hashed_again(tiny_config, tmp_path, monkeypatch):
    """From the folder that the run was started in, wherever `verify` is called."""
    width, path = 128, tmp_path / "im.gguf"

    def write(scale):
        sums = {f"blk.{i}.ffn_up.weight": np.full(width, scale) for i in range(2)}
        write_importance(path, sums, 1, datasets=["a"], chunk_size=8)

    write(1)
    tiny_config.student.quantize, tiny_config.student.imatrix = "blocks=Q4_0", path.name
    tiny_config.train.steps = tiny_config.checkpoint.every = 2
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        go(assemble(tiny_config, tmp_path), tmp_path / "run")
    monkeypatch.delitem(_CHECKS, "parameters")
    assert verify(tmp_path / "run")
    write(2)
    with pytest.raises(UserError, match=r"\n  checkpoint: found .* student.imatrix.sha256"):
        verify(tmp_path / "run")
    path.unlink()
    with pytest.raises(UserError, match=r"\n  checkpoint: cannot be checked: .*im.gguf: no such"):
        verify(tmp_path / "run")


@pytest.mark.slow
def test_a_run_begins_with_a_start_which_is_hashed_again(tiny_config, tmp_path, monkeypatch):
    """With a student of twice the numbers, in its own scales; the file is found as importances."""
    path, form = tmp_path / "start.npz", Rounded("blocks=Q4_0")

    def write(factor):
        student = kdjax.load(tiny_config.student.path, dtype="float32")
        masters = jax.tree.map(lambda x: factor * x, student.params)
        scales = form.choose_types(student.spec).begin({}, masters)
        write_start(path, masters, scales)
        return masters, scales

    masters, scales = write(2.0)
    tiny_config.student.quantize, tiny_config.student.start = form.text, path.name
    tiny_config.train.steps = tiny_config.checkpoint.every = 2
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        job = assemble(tiny_config, tmp_path)
        state = job.make_state()
        jax.tree.map(np.testing.assert_array_equal, state.params, masters)
        jax.tree.map(np.testing.assert_array_equal, state.kept, scales)
        go(job, tmp_path / "run")
    assert verify(tmp_path / "run")
    write(3.0)
    with pytest.raises(UserError, match=r"\n  checkpoint: found .* student.start.sha256"):
        verify(tmp_path / "run")
    tiny_config.student.quantize, tiny_config.student.start = "blocks=Q8_0", str(path)
    with pytest.raises(UserError, match="found scales of another model or of other block types"):
        assemble(tiny_config, tmp_path).make_state()


# --- revision and hashes ------------------------------------------------------------------------


def test_the_revision_of_the_source(tmp_path):
    root = tmp_path / "source"
    (root / "kdjax").mkdir(parents=True)
    (root / "kdjax" / "a.py").write_text("a = 1\n")
    assert provenance.source_revision(root) == (None, None)
    (root / ".revision").write_text("f00d\n")
    assert provenance.source_revision(root) == ("f00d", None)

    def git(*arguments, cwd=root):
        identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q", cwd=tmp_path)  # somebody else's repository around it
    git("commit", "-qm", "theirs", "--allow-empty", cwd=tmp_path)
    assert provenance.source_revision(root) == ("f00d", None)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert provenance.source_revision(root) == (git("rev-parse", "HEAD"), False)
    (root / "notes").write_text("")
    assert provenance.source_revision(root)[1] is False
    (root / "kdjax" / "b.py").write_text("")
    assert provenance.source_revision(root)[1] is True


def test_hashes_do_not_depend_on_order_and_do_on_everything_else():
    assert provenance.config_hash({"b": 1, "a": {"d": 2, "c": 3}}) == provenance.config_hash(
        {"a": {"c": 3, "d": 2}, "b": 1}
    )
    canonical = hashlib.sha256(b'{"a":0.5,"b":1}').hexdigest()
    assert provenance.config_hash({"b": 1, "a": 0.5}) == canonical
    base = np.arange(6, dtype=np.float32)
    others = [
        ("a", base),
        ("b", base),
        ("a", base.reshape(2, 3)),
        ("a", base.view(np.int32)),
        ("a", base + 1),
    ]
    assert len({provenance.params_hash([pair]) for pair in others}) == len(others)


def test_any_changed_bit_changes_the_hash_of_parameters():
    """Each of the 512 bits of a tensor, and none of its neighbours' places."""
    tensor = np.arange(16, dtype=np.float32)
    seen = {provenance.params_hash([("a", tensor)])}
    for bit in range(512):
        changed = tensor.copy()
        changed.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        seen.add(provenance.params_hash([("a", changed)]))
    assert len(seen) == 512 + 1
