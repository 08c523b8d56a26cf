"""Several teachers: their mixture beside the same mixture computed by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import logsumexp
from test_teacher_in_batch import (
    LENGTH,
    PROGRAMS,
    ROWS,
    assert_same_step,
    by_hand,
    likeliest,
    said,
    take,
    text,
    trio,
)

import kdjax
from kdjax.errors import UserError
from kdjax.training.teachers import Dense, Packed


def row_weights():
    """A row has the first teacher, the second, or both."""
    return np.array([[1, 0], [0, 1], [0.25, 0.75], [0.5, 0.5]], np.float32)


def mixed(teachers, shares):
    """Log-probabilities of the mixture, float64; shares `[B, N]`."""
    with np.errstate(divide="ignore"):
        parts = [
            said(t) + np.log(np.float64(shares[:, n, None, None])) for n, t in enumerate(teachers)
        ]
    return logsumexp(parts, axis=0)


@by_hand
def test_the_step_is_that_of_the_mixture_computed_by_hand(
    models, divergence, temperature, devices, microbatches, weights
):
    """Loss, parts and gradients (of plain SGD), whatever the split."""
    *teachers, student = trio(models, "teacher", 1.3, devices, weights)
    shared = {
        "loss": kdjax.KDLoss(divergence, temperature, 0.3),
        "microbatches": microbatches,
        "chunk_tokens": 16,
    }
    hand = text() | {"teacher_log_probs": mixed(teachers, row_weights())}
    want = take(student, None, hand, kind=kdjax.TeacherInBatch(), **shared)
    kinds = (Packed() if weights == "packed" else Dense(), Dense())
    batch = text() | {"teacher_weights": row_weights()}
    got = take(student, teachers, batch, kind=kdjax.Teachers(kinds), **shared)
    assert_same_step(got, want, student)


def test_held_out_figures_are_the_mixtures_and_weights_may_be_the_kinds(models):
    *teachers, student = trio(models, "teacher", 1.3)
    shares = np.broadcast_to(np.float32([0.7, 0.3]), (ROWS, 2))
    hand = text() | {"teacher_log_probs": mixed(teachers, shares)}
    loss, tx = kdjax.KDLoss(temperature=2.0), optax.sgd(0.1)
    alone = kdjax.make_step(student, None, loss, tx, kind=kdjax.TeacherInBatch())
    want = alone.evaluate(alone.init(student.params), None, [hand])
    kind = kdjax.Teachers((Dense(), kdjax.TeacherInBatch()), (0.7, 0.3))
    step = kdjax.make_step(student, [teachers[0], None], loss, tx, kind=kind)
    batch = text() | {"teacher_1_log_probs": said(teachers[1])}
    got = step.evaluate(step.init(student.params), [teachers[0].params, None], [batch])
    assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.slow
def test_likeliest_ids_of_two_are_the_weighted_sum_and_one_of_them_is_itself(models):
    """Its gradient over all ids, under the forward KL, is the mixture's, computed by hand."""
    *teachers, student = trio(models, "teacher", 1.3)
    kind = kdjax.Teachers((kdjax.TeacherInBatch("tail"),) * 2)

    def columns(k, shares):
        named = {
            name.replace("teacher_", f"teacher_{n}_", 1): column
            for n, teacher in enumerate(teachers)
            for name, column in likeliest(said(teacher), k).items()
        }
        return text() | named | {"teacher_weights": shares}

    size = said(teachers[0]).shape[-1]
    _, got = take(student, None, columns(size, row_weights()), kind=kind)
    hand = text() | {"teacher_log_probs": mixed(teachers, row_weights())}
    _, want = take(student, None, hand, kind=kdjax.TeacherInBatch())
    assert_same_step(({}, got), ({}, want), student)
    only = np.broadcast_to(np.float32([0, 1]), (ROWS, 2))
    loss = kdjax.KDLoss("jsd")
    alone = text() | likeliest(said(teachers[1]))
    want = take(student, None, alone, loss, kind=kdjax.TeacherInBatch("tail"))
    assert_same_step(take(student, None, columns(5, only), loss, kind=kind), want, student)


@pytest.mark.slow
def test_weights_of_teachers_are_not_read_where_nothing_trains(models):
    """Shares of NaN, as 0 / 0 makes them of padding."""
    teacher, _, student = trio(models, "teacher", 1.3)
    batch = text() | {
        name.replace("teacher_", f"teacher_{n}_", 1): column
        for n in range(2)
        for name, column in likeliest(said(teacher)).items()
    }
    kind = kdjax.Teachers((kdjax.TeacherInBatch("tail"),) * 2)
    shares = np.full((ROWS, LENGTH, 2), 0.5, np.float32)
    want = take(student, None, batch | {"teacher_weights": shares.copy()}, kind=kind)
    shares[batch["weights"] == 0] = np.nan
    got = take(student, None, batch | {"teacher_weights": shares}, kind=kind)
    assert np.isfinite(list(want[0].values())).all()
    assert_same_step(got, want, student)


def test_weights_and_teachers_that_cannot_be_are_refused(models):
    *teachers, student = trio(models, "teacher", 1.3)
    make = functools.partial(
        kdjax.make_step, student, optimizer=optax.sgd(0.1), loss=kdjax.KDLoss()
    )
    for arguments, says in (
        (((Dense(),),), "found 1 teachers and 0 weights; expected two"),
        (((Dense(), Dense()), (0.5, 0.6)), "their sum 1"),
        (((Dense(), kdjax.TeacherInBatch("tail")),), "all of one sort"),
    ):
        with pytest.raises(UserError, match=says):
            kdjax.Teachers(*arguments)
    with pytest.raises(UserError, match="found one teacher and kind=Teachers"):
        make(teachers[0], kind=kdjax.Teachers((Dense(), Dense())))
    with pytest.raises(UserError, match="found a list of 3 and kind=Teachers"):
        make([*teachers, None], kind=kdjax.Teachers((Dense(), Dense())))
    step = make(teachers)
    with pytest.raises(
        UserError, match=r"teacher_weights are \(\); expected a number for each of 2"
    ):
        step.put(text())
    odd = row_weights()
    odd[2] = 0.5, 0.6
    with pytest.raises(UserError, match=r"teacher_weights\[2, 0\] are .*; expected shares"):
        step.put(text() | {"teacher_weights": odd})
    _, metrics = step(
        step.init(student.params),
        [t.params for t in teachers],
        jax.tree.map(jnp.asarray, text() | {"teacher_weights": odd}),
    )
    with pytest.raises(UserError, match=f"found {LENGTH} positions whose teacher is impossible"):
        metrics.means()


def test_each_teacher_is_proven_to_fit(models):
    first, _, student = trio(models, "teacher", 1.3)
    with pytest.raises(UserError, match="hold the same weights"):
        kdjax.make_step(student, [first, student], kdjax.KDLoss(), optax.sgd(0.1))
    narrow = first.replace(vocab_size=student.vocab_size - 200, own_tokenizer=None)
    with pytest.raises(UserError, match="smaller than the student's"):
        kdjax.make_step(student, [first, narrow], kdjax.KDLoss(), optax.sgd(0.1))


@pytest.mark.slow
def test_the_pages_program(models, tmp_path, monkeypatch):
    """The loss falls on the same text again and again."""
    for name in ("coder", "writer", "student"):
        path = models / f"{'student' if name == 'student' else 'teacher'}.gguf"
        (tmp_path / f"{name}.gguf").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    is_code = np.array([1, 0, 1, 0], np.float32)
    names = {"batches": [(text(), is_code) for _ in range(3)]}
    exec(compile(PROGRAMS[1], "docs/teachers.md", "exec"), names)
    step, arrays = names["step"], [teacher.params for teacher in names["teachers"]]
    first = names["metrics"].means()["loss"]
    _, metrics = step(names["state"], arrays, names["batch"])
    assert metrics.means()["loss"] < first
