"""Beyond the teacher: its target beside the formula in NumPy, the start's arrays, exact resume."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_tiny_config
from resuming import assert_resumes
from scipy.special import logsumexp
from test_hints import make_config
from test_teacher_in_batch import PROGRAMS, assert_same_step, by_hand, said, take, text, trio

import kdjax
from kdjax.device.runtime import device_summary
from kdjax.errors import UserError
from kdjax.losses.chunked import Extrapolated, Given, HeadSpec, head_loss
from kdjax.losses.kd import kd_loss
from kdjax.training import plan
from kdjax.training.job import assemble
from kdjax.training.teachers import CachedTopK, Dense, Packed

pytestmark = pytest.mark.usefixtures("one_device")


def extrapolate(teacher, start, strength):
    """Log-probabilities p_t (p_t / p_start)^(strength - 1), normalised, float64."""
    p_t, p_start = np.exp(teacher), np.maximum(np.exp(start), 1e-6)
    target = np.log(p_t * (p_t / p_start) ** (strength - 1))
    return target - logsumexp(target, axis=-1, keepdims=True)


@by_hand
def test_the_step_is_that_of_the_target_computed_by_hand(
    models, divergence, temperature, devices, microbatches, weights
):
    """Loss, parts and gradients (of plain SGD), whatever the split; the start's least ids count."""
    teacher, start, student = trio(models, "student", 3.0, devices, weights)
    assert said(start).min() < np.log(1e-6) - 1
    shared = {
        "loss": kdjax.KDLoss(divergence, temperature, 0.3),
        "microbatches": microbatches,
        "chunk_tokens": 16,
    }
    make = functools.partial(kdjax.make_step, loss=shared["loss"], optimizer=optax.sgd(0.1))
    target = extrapolate(said(teacher), said(start), 1.25)
    plain = extrapolate(said(teacher), said(start), 1.0)
    np.testing.assert_allclose(plain, said(teacher), atol=1e-6)
    hand = text() | {"teacher_log_probs": target}
    want = take(student, None, hand, kind=kdjax.TeacherInBatch(), **shared)
    kind = kdjax.Beyond(kinds=(Packed() if weights == "packed" else Dense(), Dense()))
    got = take(student, [teacher, start], text(), kind=kind, **shared)
    assert_same_step(got, want, student)
    judged, held_out = (
        step.evaluate(step.init(student.params), arrays, [batch])
        for step, arrays, batch in (
            (make(student, [teacher, start], kind=kind), [teacher.params, start.params], text()),
            (make(student, None, kind=kdjax.TeacherInBatch()), None, hand),
        )
    )
    assert judged == pytest.approx(held_out, rel=1e-4)


def test_the_gradient_is_autodiffs_of_the_formula(rng):
    """Through the softmax of student logits written out; target and start get none."""
    real, width = 30, 32
    z, t, s = (jnp.asarray(4 * rng.standard_normal((2, 5, width)), jnp.float32) for _ in range(3))
    labels = jnp.asarray(rng.integers(0, real, (2, 5)), jnp.int32)
    loss = kdjax.KDLoss("reverse_kl", 2.0, 0.2)
    spec = HeadSpec(loss, width, real, 4)
    eye, ones = jnp.eye(width), jnp.ones((2, 5))

    def chunked(z):
        head = Extrapolated((Given(), Given()), 1.5)
        sums: Any = head_loss(z, eye, (t, s), head, labels, ones, spec)
        return sums.loss

    def plain(z):
        p_t, p_s = (jax.nn.softmax(x[..., :real], axis=-1) for x in (t, s))
        target = jnp.log(p_t * (p_t / jnp.maximum(p_s, 1e-6)) ** 0.5)
        return kd_loss(z[..., :real], target, labels, loss).sum()

    (value, got), (wanted, want) = (jax.value_and_grad(f)(z) for f in (chunked, plain))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.fixture(scope="module")
def job(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("beyond")
    config = make_tiny_config(models, folder)
    config.loss.beyond, config.train.steps = 1.25, 4
    config.eval.every, config.checkpoint.every = 0, 2
    return assemble(config, folder / "never")


@pytest.mark.slow
def test_a_run_beyond_its_teacher_resumes_bit_for_bit(job, straight, tmp_path):
    assert job.step.spec.kind == kdjax.Beyond(strength=1.25)
    assert set(job.teacher_params) == {"0", "1"}
    assert_resumes(job, tmp_path / "run", straight, "step", 3)


def test_at_strength_1_the_step_is_the_plain_ones(job):
    """Not a target that is nearly the teacher's: the same kind, the same arguments."""
    loss = dataclasses.replace(job.config.loss, beyond=1.0)
    plain = assemble(dataclasses.replace(job.config, loss=loss), job.workdir)
    assert plain.step.spec.kind == Dense() and plain.start is None
    assert plain.teacher is not None and plain.teacher_params is plain.teacher.params
    assert plain.identity["loss.beyond"] == 1.0 != job.identity["loss.beyond"]


def test_a_job_like_another_has_its_models_and_its_step_where_they_are_the_same(job, tmp_path):
    def change(**sections):
        changed = {
            name: dataclasses.replace(getattr(job.config, name), **fields)
            for name, fields in sections.items()
        }
        return assemble(dataclasses.replace(job.config, **changed), tmp_path, like=job)

    seed = change(train={"seed": 1, "seconds": 9.0}, rollout={"answers": 2})
    assert seed.step is job.step and seed.teacher is job.teacher and seed.start is job.start
    assert seed.identity["train.seed"] == 1 and seed.source is not job.source
    rate = change(optim={"learning_rate": 1e-4})
    assert rate.step is not job.step and rate.schedule(2) != job.schedule(2)
    assert rate.teacher is job.teacher and rate.start is job.start
    plain = change(loss={"beyond": 1.0})
    assert plain.start is None and plain.teacher is job.teacher and plain.step is not job.step
    itself = change(teacher={"path": "self", "allow_degenerate": True})
    assert itself.teacher is not job.teacher and itself.start is itself.teacher
    assert itself.teacher_params is not job.teacher_params


def test_the_plan_counts_the_starts_bytes(job):
    loss = dataclasses.replace(job.config.loss, beyond=1.0)
    alone = dataclasses.replace(job.config, loss=loss)
    asked = job.step.placement.mesh, device_summary(), Dense()
    without, made = (plan.make_plan(c, job.pair, *asked) for c in (alone, job.config))
    name = "student's start, bfloat16"
    assert made.resident.keys() - without.resident.keys() == {name}
    indices = sum(x.nbytes for x in jax.tree.leaves(job.start.params) if x.dtype == np.int32)
    assert made.resident[name] == job.start.resident_bytes - indices
    flops = [plan.count_step_flops(c, job.pair, Dense()) for c in (alone, job.config)]
    forward = job.pair.student.spec.forward_flops(job.config.data.seq_len)
    assert flops[1] - flops[0] == pytest.approx(forward)
    chunk = [one.phases["the loss is computed"]["logits of a chunk"] for one in (without, made)]
    assert chunk[1] > chunk[0]
    itself = dataclasses.replace(job.config.teacher, path="self")
    shared = dataclasses.replace(job.config, teacher=itself)
    assert name not in plan.make_plan(shared, job.pair, *asked).resident


def test_what_cannot_go_beyond_is_refused(job, types_unchecked):
    for strength in (0.0, "1"):
        with pytest.raises(UserError, match=rf"strength={strength!r}: must be greater than 0"):
            kdjax.Beyond(strength=strength)
    with pytest.raises(UserError, match=r"expected one that knows all ids"):
        kdjax.Beyond(kinds=(CachedTopK(3), CachedTopK(3)))
    for section, changes in (("loss", {"alpha": 1.0}), ("student", {"init": "random"})):
        changed = dataclasses.replace(getattr(job.config, section), **changes)
        config = dataclasses.replace(job.config, **{section: changed})
        with pytest.raises(UserError, match=r"loss.beyond=1.25: needs a teacher"):
            kdjax.config.validate(config)


@pytest.mark.slow
def test_hints_are_the_teachers_alone_where_its_own_start_is_gone_beyond(models, tmp_path):
    """One model three times: with hints, without, and as it trains; one copy of it is frozen."""
    config = make_config(models, tmp_path)
    config.loss.beyond, config.loss.divergence, config.train.steps = 1.5, "forward_kl", 3
    job = assemble(config, tmp_path / "never")
    assert job.start is job.teacher
    state = job.make_state()
    batch = job.source.next(state.params)
    _, metrics = job.step(state, job.teacher_params, batch)
    without = {k: v for k, v in batch.items() if not k.startswith("teacher_")}
    _, same = job.step(job.make_state(), job.teacher_params, without)
    assert metrics.means()["divergence"] > 1e-3
    assert abs(same.means()["divergence"]) < 1e-5


def test_the_pages_program(models, tmp_path, monkeypatch):
    for name in ("teacher", "student"):
        (tmp_path / f"{name}.gguf").symlink_to(models / f"{name}.gguf")
    monkeypatch.chdir(tmp_path)
    (program,) = (code for code in PROGRAMS if "Beyond" in code)
    names = {"batches": [text()] * 2}
    exec(compile(program, "docs/teachers.md", "exec"), names)
    assert names["metrics"].means()["divergence"] > 0
