"""Schedules of temperature and alpha, and weights of a position for each part of the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import start_over
from quick import cases
from scipy.special import log_softmax
from test_run import Recorder, go, saved
from test_teacher_in_batch import (
    LENGTH,
    PROGRAMS,
    ROWS,
    assert_same_step,
    likeliest,
    loaded,
    said,
    take,
    text,
)

import kdjax
from kdjax import config as config_module
from kdjax.errors import UserError
from kdjax.training.batches import complete_batch
from kdjax.training.job import assemble

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize(
    ("divergence", "devices", "microbatches"),
    cases(("forward_kl", 1, 1), slow=[("jsd", 1, 2), ("forward_kl", 4, 1)]),
)
def test_each_step_has_the_amounts_of_its_number(models, divergence, devices, microbatches):
    """The second of a schedule is that of constant amounts from the same state."""
    teacher, student = loaded(models, devices)
    temperature, alpha = optax.linear_schedule(4.0, 1.0, 2), optax.linear_schedule(0.0, 0.6, 2)
    losses = kdjax.KDLoss(divergence, temperature, alpha), kdjax.KDLoss(divergence, 2.5, 0.3)
    shared = {"optimizer": optax.sgd(0.1), "microbatches": microbatches, "chunk_tokens": 24}
    moving, constant = (kdjax.make_step(student, teacher, loss=x, **shared) for x in losses)
    state, first = moving(moving.init(student.params), teacher.params, text())
    begun = jax.tree.map(jnp.copy, state.params)
    state, metrics = moving(state, teacher.params, text())
    other, expected = constant(constant.init(begun), teacher.params, text())
    assert first.means()["loss"] == pytest.approx(16 * first.means()["divergence"], rel=1e-5)
    got, want = metrics.means(), expected.means()
    assert_same_step((got, state.params), (want, other.params), student.replace(params=begun))


def test_held_out_figures_have_the_last_amounts(models):
    teacher, student = loaded(models, 1)
    figures = []
    for temperature, alpha in ((optax.linear_schedule(4.0, 2.0, 9), lambda step: 0.5), (2.0, 0.5)):
        loss = kdjax.KDLoss(temperature=temperature, alpha=alpha)
        step = kdjax.make_step(student, teacher, loss, optax.sgd(0.1))
        figures.append(step.evaluate(step.init(student.params), teacher.params, [text()]))
    assert figures[0] == figures[1] and figures[0]["temperature"] == 2.0


def weights_apart():
    rng = np.random.default_rng(3)
    return {
        name: rng.choice([0.0, 0.5, 2.0], (ROWS, LENGTH)).astype(np.float32)
        for name in ("ce_weights", "divergence_weights")
    }


@pytest.mark.parametrize("kind", cases("running", slow=["topk"]))
def test_weights_apart_are_the_formula_in_float64(models, kind):
    """The count is of all positions that train; gradients are JAX's of the plain formula."""
    teacher, student = loaded(models, 1)
    apart, temperature, alpha = weights_apart(), 1.0 if kind == "topk" else 2.0, 0.3
    loss = kdjax.KDLoss(temperature=temperature, alpha=alpha)
    said_by, more, settings = teacher, {}, {}
    if kind == "topk":
        said_by, more = None, likeliest(said(teacher), said(teacher).shape[-1])
        settings = {"kind": kdjax.TeacherInBatch(rest="tail")}
    means, params = take(student, said_by, text() | apart | more, loss, **settings)
    p, q = (np.asarray(m.logits(text()["tokens"]), np.float64) for m in (student, teacher))
    labels = text()["labels"][..., None].astype(int)
    ce = -np.take_along_axis(log_softmax(p, -1), labels, -1)[..., 0]
    p, q = (log_softmax(x / temperature, -1) for x in (p, q))
    kl = (np.exp(q) * (q - p)).sum(-1)
    weights = text()["weights"]
    parts = alpha * apart["ce_weights"] * ce
    parts += (1 - alpha) * apart["divergence_weights"] * temperature**2 * kl
    assert means["loss"] == pytest.approx((weights * parts).sum() / weights.sum(), rel=1e-4)
    assert means["ce"] == pytest.approx((weights * ce).sum() / weights.sum(), rel=1e-4)

    def plain(params):
        logits = student.replace(params=params).functions
        columns = jax.tree.map(jnp.asarray, complete_batch(text()))
        hidden = logits.hidden(
            params, *(columns[n] for n in ("tokens", "segment_ids", "positions"))
        )
        s = (hidden @ logits.head(params).T)[..., : q.shape[-1]]
        own = jax.nn.log_softmax(s)
        hard = -jnp.take_along_axis(own, labels, -1)[..., 0]
        soft = (np.exp(q) * (q - jax.nn.log_softmax(s / temperature))).sum(-1)
        both = alpha * apart["ce_weights"] * hard
        both += (1 - alpha) * apart["divergence_weights"] * temperature**2 * soft
        return (weights * both).sum() / weights.sum()

    gradient = jax.jit(jax.grad(plain))(student.params)
    want = jax.tree.map(lambda x, g: x - 0.1 * g, student.params, gradient)
    assert_same_step(({}, params), ({}, want), student)


def test_schedules_that_cannot_be_are_refused(models):
    teacher, student = loaded(models, 1)
    make = functools.partial(kdjax.make_step, student, optimizer=optax.sgd(0.1))
    falls = optax.linear_schedule(2.0, 0.0, 5)
    with pytest.raises(UserError, match=r"temperature at its end=0.0: must be greater than 0"):
        make(teacher, loss=kdjax.KDLoss(temperature=falls))
    with pytest.raises(UserError, match=r"alpha at step 0=2.0: must be between 0 and 1"):
        make(teacher, loss=kdjax.KDLoss(alpha=falls))
    kind = kdjax.TeacherInBatch(rest="tail")
    with pytest.raises(UserError, match=r"rest='tail'; expected 1"):
        make(None, kind=kind, loss=kdjax.KDLoss(temperature=falls))
    step = make(teacher, loss=kdjax.KDLoss())
    with pytest.raises(UserError, match=r"ce_weights.*\(4, 3\)"):
        step.put(text() | {"ce_weights": np.ones((ROWS, 3))})


@pytest.mark.slow
def test_a_run_on_a_line_resumes_exactly(tiny_config, tmp_path):
    """Four steps, and four of which the run was stopped after two, end in the same bits."""
    config = tiny_config
    config.train.steps, config.train.microbatches, config.optim.warmup_steps = 4, 1, 0
    config.loss.temperature, config.loss.final_temperature = 4.0, 1.0
    config.loss.alpha, config.loss.final_alpha = 0.0, 0.6
    config.eval.every = config.checkpoint.every = 0
    config_module.validate(config)
    job = assemble(config, tmp_path / "whole")
    loss = job.step.spec.schedules
    assert [float(loss.temperature(n)) for n in range(4)] == [4.0, 3.0, 2.0, 1.0]
    assert float(loss.alpha(3)) == pytest.approx(0.6)
    assert go(config, tmp_path / "whole", job=job) == "finished"
    parts = start_over(job, tmp_path / "parts")
    assert go(config, tmp_path / "parts", Recorder(stop_at=2), job=parts) == "interrupted"
    assert go(config, tmp_path / "parts", job=start_over(job, tmp_path / "parts")) == "finished"
    (_, a), (_, b) = (saved(job, tmp_path / name) for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_the_pages_program(models, monkeypatch):
    monkeypatch.chdir(models)
    names = {"batches": [text()] * 2, "is_sure": weights_apart()["ce_weights"] / 2}
    exec(compile(PROGRAMS[2], "docs/teachers.md", "exec"), names)
    assert np.isfinite(names["metrics"].means()["loss"])
