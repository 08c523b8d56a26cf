"""Runs that train adapters: resumed, shared with their teacher, verified, opened again, refused."""

import contextlib
import dataclasses
import shutil

import jax
import numpy as np
import pytest
from conftest import make_tiny_config, start_over
from flax.traverse_util import flatten_dict
from resuming import assert_goes_on, finish
from test_run import Recorder, go, saved

import kdjax
from kdjax.commands import export
from kdjax.errors import UserError
from kdjax.evaluation.target import open_target
from kdjax.formats.saved import SavedTable
from kdjax.models.adapters import Lora, split_adapters
from kdjax.models.checkpoint import open_step
from kdjax.training.caching import cache_teacher
from kdjax.training.job import assemble, survey
from kdjax.training.saving import Checkpoints
from kdjax.training.teachers import CachedHidden
from kdjax.watch.verify import verify

pytestmark = pytest.mark.usefixtures("one_device")


def adapt(config):
    """The config for adapters, teacher and student packed, all in float32."""
    config.student.lora.rank, config.student.lora.learning_rate = 4, 1e-2
    config.teacher.weights, config.teacher.param_dtype = "packed", "float32"
    config.train.steps, config.eval.every, config.checkpoint.every = 4, 0, 0
    return config


@pytest.fixture
def lora_config(tiny_config):
    return adapt(tiny_config)


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A finished run: its config, workdir, job and recorder."""
    folder = tmp_path_factory.mktemp("lora")
    return finish(adapt(make_tiny_config(models, folder)), folder)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_saves_adapters_alone(run, tmp_path):
    _, workdir, job, _ = run
    figures = assert_goes_on(run, tmp_path / "parts", stop_at=1)
    assert figures[1]["loss"] < figures[0]["loss"]
    table = SavedTable(workdir, 4)
    assert {name[-2:] for name in table} == {"/a", "/b"} and len(table) == 14
    stored = sum(table.info(name).nbytes for name in table)
    assert stored == sum(x.nbytes for x in jax.tree.leaves(saved(job, workdir)[1].params))


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_a_run_opens_as_its_student(run, weights):
    config, workdir, job, _ = run
    model = kdjax.load(workdir, base=config.student.path, weights=weights, dtype="float32")
    assert Lora.of_params(model.params).rank == 4
    with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
        state = checkpoints.restore(4, job.step.abstract, job.step.shardings)
    ours, theirs = (split_adapters(x)[1] for x in (model.params, job.step.see(state)))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    base = kdjax.load(config.student.path, dtype="float32")
    ids = [[5, 6, 7, 8]]
    merged = kdjax.merge_lora(model)
    np.testing.assert_allclose(model.logits(ids), merged.logits(ids), atol=1e-4)
    assert np.abs(model.logits(ids) - base.logits(ids)).max() > 1e-3
    # As a teacher, or the start of another run, it is read merged, tensor by tensor.
    target = open_target(f"{workdir}@{weights}:float32", student=config.student.path)
    same = target.load(job.step.placement.mesh)
    jax.tree.map(np.testing.assert_array_equal, split_adapters(same.params)[1], ours)
    opened = open_step(workdir, student=config.student.path)
    assert opened.table.info("blk.0.attn_q.weight").dtype == "F32"
    assert opened.table.info("token_embd.weight").dtype != "F32"
    down = flatten_dict(merged.params)["blocks", "mlp", "down", "weight"]
    found = opened.table.raw("blk.1.ffn_down.weight").view(np.float32)
    np.testing.assert_allclose(found, down[1], atol=1e-6)


def test_a_missing_or_another_base_is_refused(run, tmp_path, models):
    config, workdir, _, _ = run
    with pytest.raises(UserError, match="which student it began with"):
        kdjax.load(workdir)
    other = tmp_path / "student.gguf"
    data = bytearray((models / "student.gguf").read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    with pytest.raises(UserError, match=r"has SHA-256 .* they are nothing without it"):
        kdjax.load(workdir, base=str(other))
    shutil.copytree(workdir, tmp_path / "run")
    changed = dataclasses.replace(config.student, path=str(other))
    with pytest.raises(UserError, match=r"student.sha256: the checkpoint has"):
        go(dataclasses.replace(config, student=changed), tmp_path / "run")
    lora = dataclasses.replace(config.student.lora, rank=2)
    changed = dataclasses.replace(config.student, lora=lora)
    with pytest.raises(UserError, match=r"student.lora.rank: the checkpoint has 4, now 2"):
        go(dataclasses.replace(config, student=changed), tmp_path / "run")


@pytest.mark.slow
def test_a_student_that_is_its_own_base_is_refused_or_shares_its_arrays(lora_config, tmp_path):
    lora_config.teacher.path = "self"
    with pytest.raises(UserError, match="hold the same weights"):
        assemble(lora_config, tmp_path)
    lora_config.teacher.allow_degenerate = True
    job = assemble(lora_config, tmp_path)
    ours = {id(x) for x in jax.tree.leaves(job.step.base)}
    assert ours == {id(x) for x in jax.tree.leaves(job.teacher_params)}
    lines = list(job.plan.resident)
    assert "teacher, packed blocks" in lines and not any("student, " in line for line in lines)
    assert "adapters, float32" in lines
    recorder = Recorder()
    assert go(lora_config, tmp_path / "run", recorder, job=job) == "finished"
    first = next(call[2] for call in recorder.calls if call[0] == "eval")
    assert first["kl"] < 1e-6


def test_the_plan_counts_base_adapters_and_moments(run):
    _, _, job, _ = run
    adapters = 4 * sum(x.size for x in jax.tree.leaves(job.step.abstract.params))
    resident = job.plan.resident
    assert resident["adapters, float32"] == adapters
    assert resident["optimizer moments, float32"] == pytest.approx(2 * adapters, rel=1e-3)
    base = sum(x.nbytes for x in jax.tree.leaves(job.step.base))
    assert resident["student, packed blocks"] == pytest.approx(base, rel=0.02)
    assert job.plan.gradients == adapters


@pytest.mark.slow
def test_a_mesh_trains_alike(lora_config, run, tmp_path):
    """One device's figures and adapters on a mesh that splits rows, blocks and heads."""
    lora_config.data, lora_config.train.steps = run[0].data, 4
    lora_config.mesh = dataclasses.replace(lora_config.mesh, data=1, fsdp=2, tensor=2)
    recorder = Recorder()
    job = assemble(lora_config, tmp_path / "run")
    assert go(lora_config, tmp_path / "run", recorder, job=job) == "finished"
    kinds = ("step", "eval")
    for ours, theirs in zip(recorder.calls, run[3].calls, strict=True):
        if ours[0] in kinds:
            assert ours[2]["loss"] == pytest.approx(theirs[2]["loss"], rel=1e-4)
    (_, ours), (_, theirs) = saved(job, tmp_path / "run"), saved(run[2], run[1])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3), ours.params, theirs.params
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rank": 4, "targets": "nonsense"}, "found the target 'nonsense'"),
        ({"rank": 400}, "found rank 400 for adapters"),
        ({"rank": -1}, "student.lora.rank=-1: must be 0 or more"),
        ({"weights": "q4"}, "student.lora.weights='q4': must be one of"),
    ],
)
def test_settings_that_cannot_be_are_refused(lora_config, changes, message):
    from kdjax.config import validate

    for name, value in changes.items():
        setattr(lora_config.student.lora, name, value)
    with pytest.raises(UserError, match=message):
        validate(lora_config)
        survey(lora_config)


def test_adapters_are_not_rounded_in_float8_nor_begun_at_random(lora_config):
    from kdjax.config import validate

    lora_config.student.quantize, lora_config.student.init = "q4_0", "random"
    lora_config.student.lora.weights = "float8"
    wanted = (
        r"(?s)a base to adapt.*lora.weights='float8': must be one of packed, dense with .*quantize"
    )
    with pytest.raises(UserError, match=wanted):
        validate(lora_config)


@pytest.mark.slow
def test_a_cached_teacher_teaches_adapters_what_the_teacher_does(run, tmp_path):
    """The hidden states are kept in float32, as the teacher computed them."""
    config, _, _, recorder = run
    cached = dataclasses.replace(config, teacher=dataclasses.replace(config.teacher))
    cache_teacher(cached, tmp_path / "cache", CachedHidden())
    cached.teacher.cache, cached.teacher.weights = str(tmp_path / "cache"), "auto"
    second = Recorder()
    assert go(cached, tmp_path / "run", second) == "finished"
    losses = [
        [call[2]["loss"] for call in r.calls if call[0] == "eval"] for r in (recorder, second)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_a_student_with_adapters_drafts_for_its_teacher_and_is_drafted_for(run):
    """Greedy texts are those without a draft, whoever drafts."""
    config, workdir, _, _ = run
    adapted = kdjax.load(workdir, base=config.student.path, weights="packed", dtype="float32")
    teacher = kdjax.load(config.teacher.path, weights="packed", dtype="float32")
    how = dict(max_tokens=12, stop_ids=(), batch_size=2)
    for big, small in ((teacher, adapted), (adapted, teacher)):
        plain = big.generate([[5, 6, 7], [9, 8]], **how)
        got = big.generate([[5, 6, 7], [9, 8]], draft=small, draft_tokens=2, **how)
        assert [c.ids for c in got] == [c.ids for c in plain]
        assert all(c.drafted.passes >= 11 // 3 for c in got)


@pytest.mark.slow
def test_own_answers_are_written_by_base_and_adapters(lora_config, tmp_path):
    """Rounds of the student of that moment, resumed to the same adapters."""
    lora_config.rollout.prompts, lora_config.rollout.share = lora_config.data.train, 0.5
    lora_config.rollout.every, lora_config.rollout.max_tokens = 2, 8
    lora_config.rollout.batch_size, lora_config.rollout.stop_growth = 16, 0.0
    job = assemble(lora_config, tmp_path / "whole")
    assert go(lora_config, tmp_path / "whole", job=job) == "finished"
    for hooks, ends in (([Recorder(stop_at=2)], "interrupted"), ([], "finished")):
        again = start_over(job, tmp_path / "parts")
        assert go(lora_config, tmp_path / "parts", *hooks, job=again) == ends
    (_, whole), (_, parts) = saved(job, tmp_path / "whole"), saved(job, tmp_path / "parts")
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


@pytest.mark.slow
def test_the_commands_export_verify_and_go_on_from_adapters(lora_config, tmp_path):
    """A run of `distill`, its PEFT folder, and a run that begins there beside its own base."""
    folder, student = tmp_path / "run", lora_config.student.path
    lora_config.train.steps, lora_config.optim.warmup_steps = 2, 0
    assert kdjax.distill(lora_config, folder) == "finished"
    lines = verify(folder)
    assert any("14 of 14" in line or "28 of 28" in line for line in lines)
    for kind, out in (("peft", "adapter"), ("gguf-adapter", "a.gguf"), ("gguf", "merged.gguf")):
        assert export.main([str(folder), f"--format={kind}", f"--out={tmp_path / out}"]) == 0
    ids = [[5, 6, 7, 8]]
    trained = kdjax.load(folder, dtype="float32").logits(ids)
    for out in ("adapter", "merged.gguf"):
        again = kdjax.load(tmp_path / out, dtype="float32").logits(ids)
        np.testing.assert_allclose(again, trained, atol=1e-4)
    lora_config.student.path, lora_config.teacher.path = str(tmp_path / "adapter"), "self"
    lora_config.student.lora.rank = 3
    with pytest.raises(UserError, match=r"adapters of rank 4 and student.lora.rank=3"):
        assemble(lora_config, tmp_path / "next")
    lora_config.student.lora.rank = 4
    job = assemble(lora_config, tmp_path / "next")  # not refused: the teacher has no adapters
    assert job.pair.teacher.path.name == student.rpartition("/")[2]
    begun = job.step.see(job.make_state())
    ours = kdjax.load(tmp_path / "adapter", dtype="float32")
    jax.tree.map(
        np.testing.assert_array_equal, *(split_adapters(p)[1] for p in (begun, ours.params))
    )
    kept = {id(x) for x in jax.tree.leaves(job.step.base)}
    assert kept == {id(x) for x in jax.tree.leaves(job.teacher_params)}
    assert kdjax.distill(lora_config, tmp_path / "next") == "finished"
    assert len(verify(tmp_path / "next")) == 9
    # Rounded by itself the student trains whole: its teacher is what the run left, not its base.
    lora_config.student.path, lora_config.student.lora.rank = str(folder), 0
    lora_config.student.quantize, lora_config.teacher.weights = "q4_0", "dense"
    job = assemble(lora_config, tmp_path / "file")
    np.testing.assert_allclose(job.teacher.logits(ids), trained, atol=1e-4)
    assert kdjax.distill(lora_config, tmp_path / "file") == "finished"
    assert any(line.startswith("ok    text: ") for line in verify(tmp_path / "file"))
