"""A teacher that comes with the batch, beside the same teacher running and beside float64."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick import cases
from scipy.special import log_softmax, logsumexp

import kdjax
from kdjax.errors import UserError

ROWS, LENGTH, K = 4, 8, 5
PAGE = (Path(__file__).parent.parent / "docs" / "teachers.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def pair(models):
    return loaded(models, 1)


@functools.cache
def loaded(folder, devices):
    return tuple(
        kdjax.load(folder / f"{name}.gguf", dtype="float32", devices=jax.devices()[:devices])
        for name in ("teacher", "student")
    )


@functools.cache
def trio(folder, name, times, devices=1, weights="dense"):
    """A teacher, a model whose numbers are so many times those of the file, and a student."""
    teacher, student = loaded(folder, devices)
    if weights != "dense":
        path, among = folder / "teacher.gguf", jax.devices()[:devices]
        teacher = kdjax.load(path, weights=weights, devices=among)
    other = dict(zip(("teacher", "student"), loaded(folder, devices), strict=True))[name]
    other = other.replace(params=jax.tree.map(lambda x: x * times, other.params))
    return teacher, other, student


# How a step of two models is compared with one whose teacher was computed by hand.
by_hand = pytest.mark.parametrize(
    ("divergence", "temperature", "devices", "microbatches", "weights"),
    cases(
        ("jsd", 2.0, 1, 1, "dense"),
        slow=[("forward_kl", 1.0, 4, 1, "dense"), ("reverse_kl", 2.0, 1, 2, "packed")],
    ),
)


@functools.cache
def text():
    ids = np.random.default_rng(0).integers(0, 256, (ROWS, LENGTH + 1), dtype=np.int32)
    weights = np.ones((ROWS, LENGTH), np.float32)
    weights[1, 3:] = 0
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "weights": weights}


def said(teacher):
    """Log-probabilities of the teacher at every position, float64."""
    return log_softmax(np.asarray(teacher.logits(text()["tokens"]), np.float64), axis=-1)


def likeliest(log_probs, k=K):
    """Ids and log-probabilities of the k likeliest, the likeliest last: any order will do."""
    ids = np.argsort(log_probs, axis=-1)[..., -k:].astype(np.int32)
    return {
        "teacher_ids": ids,
        "teacher_top_log_probs": np.take_along_axis(log_probs, ids, -1).astype(np.float32),
    }


def take(student, teacher, batch, loss=None, **settings):
    """Means of a step, and the parameters after it; of a teacher, of several, or of none."""
    step = kdjax.make_step(
        student, teacher, loss or kdjax.KDLoss(alpha=0.3), optax.sgd(0.1), **settings
    )
    several = isinstance(teacher, list)
    arrays = [one.params for one in teacher] if several else teacher and teacher.params
    state, metrics = step(step.init(student.params), arrays, batch)
    return metrics.means(), state.params


def assert_same_step(got, want, student):
    """Up to what a log-probability in float32 is off by."""
    for name, value in want[0].items():
        assert got[0][name] == pytest.approx(value, rel=2e-5), name
    ours, theirs = (
        np.concatenate([np.ravel(a - b) for a, b in zip(*map(jax.tree.leaves, sides), strict=True)])
        for sides in ((got[1], student.params), (want[1], student.params))
    )
    assert np.linalg.norm(ours - theirs) < 1e-4 * np.linalg.norm(theirs) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divergence", "temperature", "devices", "microbatches"),
    [("jsd", 2.0, 1, 2), ("forward_kl", 1.0, 4, 1), ("forward_kl", 2.0, 1, 1)],
)
def test_all_ids_in_the_batch_are_the_teacher_itself(
    models, divergence, temperature, devices, microbatches
):
    teacher, student = loaded(models, devices)
    loss = kdjax.KDLoss(divergence, temperature, 0.3)
    shared = {"loss": loss, "microbatches": microbatches, "chunk_tokens": 16}
    want = take(student, teacher, text(), **shared)
    batch = text() | {"teacher_log_probs": said(teacher).astype(np.float32)}
    got = take(student, None, batch, kind=kdjax.TeacherInBatch(), **shared)
    assert_same_step(got, want, student)


@pytest.mark.parametrize("rest", ["tail", "absent"])
def test_the_likeliest_ids_are_the_formula_in_float64(pair, rest):
    """KL over k + 1 outcomes; where the rest is absent the k share all, and the tail has none."""
    teacher, student = pair
    batch = text() | likeliest(said(teacher))
    step = kdjax.make_step(
        student, None, kdjax.KDLoss(), optax.sgd(0.1), kind=kdjax.TeacherInBatch(rest=rest)
    )
    _, metrics = step(step.init(student.params), None, batch)
    q = np.exp(np.float64(batch["teacher_top_log_probs"]))
    log_p = log_softmax(np.asarray(student.logits(batch["tokens"]), np.float64), axis=-1)
    ids = batch["teacher_ids"]
    inside = np.take_along_axis(log_p, ids, -1)
    tail, others = 1 - q.sum(-1), log_p.copy()
    np.put_along_axis(others, ids, -np.inf, -1)
    if rest == "absent":
        q, tail = q / q.sum(-1, keepdims=True), 0.0
    kl = (q * (np.log(q) - inside)).sum(-1)
    if rest == "tail":
        kl += tail * (np.log(tail) - logsumexp(others, axis=-1))
    want = (kl * batch["weights"]).sum() / batch["weights"].sum()
    assert metrics.means()["loss"] == pytest.approx(want, rel=1e-4)


def test_all_ids_as_the_likeliest_are_the_same_step(pair):
    """Nothing is left for a tail, so that both meanings of the rest are one."""
    teacher, student = pair
    log_probs = said(teacher)
    want = take(
        student, None, text() | {"teacher_log_probs": log_probs}, kind=kdjax.TeacherInBatch()
    )
    batch = text() | likeliest(log_probs, log_probs.shape[-1])
    for rest in ("tail", "absent"):
        got = take(student, None, batch, kind=kdjax.TeacherInBatch(rest=rest))
        assert_same_step(got, want, student)


def test_held_out_figures_are_those_of_the_running_teacher(pair):
    teacher, student = pair
    figures = []
    columns = {"teacher_log_probs": said(teacher).astype(np.float32)}
    for model, kind, more in ((teacher, None, {}), (None, kdjax.TeacherInBatch(), columns)):
        step = kdjax.make_step(student, model, kdjax.KDLoss("jsd", 2.0), optax.sgd(0.1), kind=kind)
        state = step.init(student.params)
        figures.append(step.evaluate(state, model and model.params, [text() | more]))
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)


def spoiled(pair, name, place, value):
    batch = text() | likeliest(said(pair[0]))
    batch[name] = batch[name].copy()
    batch[name][place] = value
    return batch


BAD = {
    "beyond": ("teacher_ids", (0, 2, 1), 10**6),
    "negative": ("teacher_ids", (0, 2, 1), -1),
    "twice": ("teacher_ids", (0, 2), 7),
    "above 1": ("teacher_top_log_probs", (0, 2), np.log(0.3)),
    "nan": ("teacher_top_log_probs", (0, 2, 1), np.nan),
    "nothing": ("teacher_top_log_probs", (0, 2), -np.inf),
}


@pytest.mark.parametrize("on_device", cases(False, slow=[True]))
def test_impossible_teachers_are_refused(pair, on_device):
    """Where the batch is on the host at once, with the place; on the devices by `means`."""
    student = pair[1]
    kind = kdjax.TeacherInBatch(rest="tail")
    step = kdjax.make_step(student, None, kdjax.KDLoss(), optax.sgd(0.1), kind=kind)
    state = step.init(student.params)
    for name, place, value in BAD.values():
        batch = spoiled(pair, name, place, value)
        if on_device:
            state, metrics = step(state, None, jax.tree.map(jnp.asarray, batch))
            with pytest.raises(UserError, match="found 1 positions whose teacher is impossible"):
                metrics.means()
            step._outside.clear()
        else:
            with pytest.raises(UserError, match=r"found 1 positions .* At \[0, 2\]: ids"):
                step(state, None, batch)
        step.put(spoiled(pair, name, (1, 5, *place[2:]), value))  # of no weight: may be anything
        step._outside.clear()


@pytest.mark.parametrize("rest", cases("tail", slow=["absent", ""]))
def test_positions_of_no_weight_may_hold_anything(pair, rest):
    """Padding of -1, and NaN: figures and gradients are those without."""
    teacher, student = pair
    batch = text() | (likeliest(said(teacher)) if rest else {"teacher_log_probs": said(teacher)})
    kind = kdjax.TeacherInBatch(rest=rest)
    step = kdjax.make_step(student, None, kdjax.KDLoss(), optax.sgd(0.1), kind=kind)
    found = []
    for ids, log_probs in ((None, None), (-1, np.nan), (10**6, np.inf)):
        odd = {name: x.copy() for name, x in batch.items() if name.startswith("teacher_")}
        for name, x in odd.items() if ids else ():
            x[batch["weights"] == 0] = ids if name == "teacher_ids" else log_probs
        state, metrics = step(step.init(student.params), None, batch | odd)
        found.append(metrics.means() | step.evaluate(state, None, [batch | odd]))
    assert np.isfinite(list(found[0].values())).all() and found[1] == found[2] == found[0]


@pytest.mark.parametrize("value", [0.1, -np.inf])
def test_all_ids_that_add_up_to_more_than_1_or_to_nothing_are_refused(pair, value):
    teacher, student = pair
    step = kdjax.make_step(
        student, None, kdjax.KDLoss(), optax.sgd(0.1), kind=kdjax.TeacherInBatch()
    )
    batch = text() | {"teacher_log_probs": said(teacher).astype(np.float32) + np.float32(value)}
    _, metrics = step(step.init(student.params), None, batch)
    with pytest.raises(UserError, match=f"found {int(text()['weights'].sum())} positions"):
        metrics.means()


def test_other_columns_and_settings_are_refused_in_one_line(pair):
    teacher, student = pair
    make = functools.partial(kdjax.make_step, student, None, optimizer=optax.sgd(0.1))
    with pytest.raises(UserError, match="rest='all': must be 'tail' or 'absent'"):
        kdjax.TeacherInBatch(rest="all")
    with pytest.raises(UserError, match="temperature=2 and rest='tail'; expected 1"):
        make(loss=kdjax.KDLoss(temperature=2), kind=kdjax.TeacherInBatch(rest="tail"))
    with pytest.raises(UserError, match="found no teacher and alpha=0"):
        make(loss=kdjax.KDLoss())
    step = make(loss=kdjax.KDLoss(), kind=kdjax.TeacherInBatch(rest="tail"))
    good = likeliest(said(teacher))
    for change, found in (
        ({"teacher_ids": None}, r"teacher_ids \(\)"),
        ({"teacher_ids": good["teacher_ids"][..., :3]}, r"teacher_ids \(4, 8, 3\)"),
        ({"teacher_ids": good["teacher_ids"][..., 0]}, r"teacher_ids \(4, 8\)"),
    ):
        batch = {k: v for k, v in (text() | good | change).items() if v is not None}
        with pytest.raises(UserError, match=f"found of a teacher in the batch: {found}"):
            step.put(batch)
    with pytest.raises(UserError, match="teacher_ids are float64; expected whole numbers"):
        step.put(text() | good | {"teacher_ids": good["teacher_ids"].astype(float)})
    whole = make(loss=kdjax.KDLoss(), kind=kdjax.TeacherInBatch())
    with pytest.raises(UserError, match=r"teacher_log_probs \(4, 8, 9\); expected"):
        whole.put(text() | {"teacher_log_probs": np.zeros((ROWS, LENGTH, 9))})


def test_the_page_s_program(models, monkeypatch):
    """The loss falls: the student learns what is said of the same text again and again."""
    monkeypatch.chdir(models)
    columns = likeliest(said(loaded(models, 1)[0]))

    def ask_teacher(tokens):
        return columns["teacher_ids"], columns["teacher_top_log_probs"]

    names = {"batches": [text() for _ in range(3)], "ask_teacher": ask_teacher}
    exec(compile(PROGRAMS[0], "docs/teachers.md", "exec"), names)
    step, student = names["step"], names["student"]
    _, first = step(step.init(student.params), None, names["batches"][0])
    assert names["metrics"].means()["loss"] < first.means()["loss"]
