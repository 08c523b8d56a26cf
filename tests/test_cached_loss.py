"""The loss against a teacher cached as its k likeliest ids, beside float64 and the full loss."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import cases
from scipy.special import log_softmax, logsumexp

from kdjax.config import DIVERGENCES
from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec, head_loss
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import head_evaluation
from kdjax.losses.top_ids import keep_top_k, top_k
from kdjax.losses.topk import (
    TopTeacher,
    cached_head_evaluation,
    cached_head_loss,
    join_ids,
    split_ids,
    top_of_teacher,
)

WIDTH, REAL = 50, 47


@functools.cache
def hidden_states():
    """Student's and teacher's hidden states and heads, labels, weights: 2 rows of 7."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 1, shape), jnp.float32)  # noqa: E731
    labels = jnp.asarray(rng.integers(0, REAL, (2, 7)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, (2, 7)), jnp.float32)
    return draw(2, 7, 8), draw(WIDTH, 8), draw(2, 7, 12), draw(WIDTH, 12), labels, weights


def spec_of(temperature=2.0, alpha=0.3, divergence="forward_kl"):
    return HeadSpec(KDLoss(divergence, temperature, alpha), WIDTH, REAL, chunk_tokens=6)


@functools.cache
def top(spec, k):
    _, _, hidden, head, labels, weights = hidden_states()
    return jax.jit(lambda: top_of_teacher(hidden, head, labels, weights, spec, k))()


def gradients(loss):
    """Sums, and the gradients of `loss(hidden, head).loss`."""
    h, w = hidden_states()[:2]
    both = jax.jit(
        jax.value_and_grad(lambda h, w: (lambda s: (s.loss, s))(loss(h, w)), (0, 1), has_aux=True)
    )
    (_, sums), grads = both(h, w)
    return sums, grads


def from_cache(spec, k):
    *_, labels, weights = hidden_states()
    cached = top(spec, k)
    return gradients(lambda h, w: cached_head_loss(h, w, cached, labels, weights, spec))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "alpha", "divergence"),
    [
        (3.0, 0.3, "forward_kl"),
        (1.0, 0.0, "forward_kl"),
        (4.0, 1.0, "forward_kl"),
        (3.0, 0.3, "jsd"),
        *((3.0, 0.3, name) for name in DIVERGENCES if name not in ("forward_kl", "jsd")),
    ],
)
def test_all_ids_cached_is_the_full_loss(temperature, alpha, divergence):
    """Up to float16 logits; with T = 3 the tail of no ids was once log(0), and the loss NaN."""
    spec = spec_of(temperature, alpha, divergence)
    *_, h_t, w_t, labels, weights = hidden_states()
    want = gradients(lambda h, w: head_loss(h, w, h_t, w_t, labels, weights, spec))
    got = from_cache(spec, REAL)
    np.testing.assert_allclose(got[0][:3], want[0][:3], rtol=2e-4)
    for a, b in zip(got[1], want[1], strict=True):
        assert np.linalg.norm(a - b) < 5e-4 * np.linalg.norm(b)
    full = head_evaluation(*hidden_states()[:2], h_t, w_t, labels, weights, spec)
    held = cached_head_evaluation(*hidden_states()[:2], top(spec, REAL), labels, weights, spec)
    np.testing.assert_allclose(held, full, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [3.0, 1.0, 5.0])
def test_the_tail_of_no_ids_is_finite(temperature):
    """With and without padding rows, and of a teacher that is all but certain."""
    h, w, h_t, w_t, labels, weights = hidden_states()
    for real, scale in ((REAL, 1.0), (WIDTH, 1.0), (WIDTH, 60.0)):
        spec = HeadSpec(KDLoss(temperature=temperature, alpha=0.3), WIDTH, real, chunk_tokens=6)
        cached = top_of_teacher(h_t * scale, w_t, labels, weights, spec, real)
        chex.assert_tree_all_finite(cached)
        assert float(jnp.max(jax.nn.sigmoid(cached.odds))) == 0  # nothing is left for other ids
        sums, gradient = jax.value_and_grad(
            lambda h, s=spec, c=cached: cached_head_loss(h, w, c, labels, weights, s).loss
        )(h)
        chex.assert_tree_all_finite((sums, gradient))


def test_a_divergence_must_be_defined_over_merged_outcomes():
    def squared(t, s):
        return jnp.sum((t - s) ** 2, axis=-1)

    with pytest.raises(UserError, match="merges all other ids"):
        from_cache(spec_of(divergence=squared), 5)


def merged(log_p, ids):
    """float64 log-probabilities of the ids and of all others together."""
    inside = np.take_along_axis(log_p, ids, -1)
    rest = log_p.copy()
    np.put_along_axis(rest, ids, -np.inf, -1)
    return np.concatenate([inside, logsumexp(rest, axis=-1, keepdims=True)], -1)


def oracle(spec, k, student):
    """Loss, CE, KL in float64 of student logits, the teacher's outcomes merged here."""
    _, _, h_t, w_t, labels, weights = (np.asarray(x, np.float64) for x in hidden_states())
    t = (h_t @ w_t.T)[..., :REAL]
    ids = np.argsort(-t, -1, kind="stable")[..., :k]
    q, p = (merged(log_softmax(x / spec.loss.temperature, -1), ids) for x in (t, student))
    kl = (np.exp(q) * (q - p)).sum(-1)
    ce = -np.take_along_axis(log_softmax(student, -1), labels[..., None].astype(int), -1)[..., 0]
    loss = spec.loss.alpha * ce + (1 - spec.loss.alpha) * spec.loss.temperature**2 * kl
    return [(weights * x).sum() for x in (loss, ce, kl)]


@pytest.mark.parametrize("k", [1, 5, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("temperature", "alpha"), cases((2.0, 0.3), slow=[(1.0, 0.0)]))
def test_fewer_ids_are_the_merged_outcomes_in_float64(k, temperature, alpha):
    spec = spec_of(temperature, alpha)
    h, w = (np.asarray(x, np.float64) for x in hidden_states()[:2])
    got, _ = from_cache(spec, k)
    np.testing.assert_allclose(got[:3], oracle(spec, k, (h @ w.T)[..., :REAL]), rtol=5e-4)
    assert (
        float(got.divergence) <= float(from_cache(spec, REAL)[0].divergence) + 1e-4
    )  # merging never adds


def merged_divergence(name, q, p):
    """By their definitions over probabilities, of which JAX takes the gradient."""
    kl = lambda a, b: (a * jnp.log(a / b)).sum(-1)  # noqa: E731
    return {
        "forward_kl": lambda: kl(q, p),
        "reverse_kl": lambda: kl(p, q),
        "jsd": lambda: (kl(q, (p + q) / 2) + kl(p, (p + q) / 2)) / 2,
        "total_variation": lambda: jnp.abs(p - q).sum(-1) / 2,
    }[name]()


@pytest.mark.parametrize(
    ("temperature", "alpha", "name"),
    cases(
        (2.0, 0.3, "forward_kl"),
        (2.0, 0.3, "jsd"),
        slow=[
            (1.0, 0.0, "forward_kl"),
            *((2.0, 0.3, n) for n in ("reverse_kl", "total_variation")),
        ],
    ),
)
def test_gradients_are_those_of_the_plain_formula(temperature, alpha, name):
    spec, k = spec_of(temperature, alpha, name), 5
    *_, labels, weights = hidden_states()
    cached = top(spec, k)
    ids = join_ids(cached.ids)

    def plain(h, w):
        s = (h @ w.T)[..., :REAL]
        inside = jax.nn.log_softmax(cached.logits.astype(jnp.float32) / temperature)
        tail = jax.nn.sigmoid(cached.odds[..., :1])
        q = jnp.concatenate([jnp.exp(inside) * (1 - tail), tail], -1)
        p = jax.nn.softmax(s / temperature)
        chosen = jnp.take_along_axis(p, ids, -1)
        p = jnp.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1)
        ce = -jnp.take_along_axis(jax.nn.log_softmax(s), labels[..., None], -1)[..., 0]
        soft = merged_divergence(name, q, p)
        return (weights * (alpha * ce + (1 - alpha) * temperature**2 * soft)).sum()

    value, want = jax.jit(jax.value_and_grad(plain, (0, 1)))(*hidden_states()[:2])
    sums, got = from_cache(spec, k)
    np.testing.assert_allclose(sums.loss, value, rtol=1e-4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def one_position(gap, odds=-7.0):
    """Two of 6 ids cached, the student's other logits `gap` below; arguments of both losses."""
    cached = TopTeacher(split_ids(jnp.asarray([[[2, 4]]], jnp.int32)), jnp.zeros((1, 1, 2), "f2"),
                        jnp.full((1, 1, 2), odds), jnp.zeros((1, 1)))  # fmt: skip
    w = jnp.where(jnp.isin(jnp.arange(6), jnp.asarray([2, 4])), gap, 0.0)[:, None]
    one = jnp.ones((1, 1))
    return (jnp.ones((1, 1, 1)), w, cached, one.astype(int), one, HeadSpec(KDLoss(), 6, 6, 4))


def kl_of_tails(q, p):
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


@pytest.mark.parametrize("gap", cases(200.0, slow=[3.0, 10.0]))
def test_the_students_tail_is_its_own_down_to_a_millionth(gap):
    """0.09 of the whole, 9e-5 (off by 2e-7), and e^-200, which is trained on as 1e-6."""
    h, w, *rest = one_position(gap)
    q, p = 1 / (1 + np.exp(7.0)), 1 / (1 + np.exp(gap) / 2)
    loss = lambda w: cached_head_loss(h, w, *rest).loss  # noqa: E731
    value, grad = jax.value_and_grad(loss)(w)
    np.testing.assert_allclose(value, kl_of_tails(q, max(p, 1e-6)), rtol=2e-4, atol=2e-6)
    inside, outside = grad[jnp.asarray([2, 4]), 0], grad[jnp.asarray([0, 1, 3, 5]), 0]
    np.testing.assert_allclose(inside, (q - p) / 2, rtol=1e-3, atol=1e-6)
    slope = p - q * min(1, p / 1e-6)
    np.testing.assert_allclose(outside, slope / 4, rtol=2e-3, atol=1e-12)
    held = cached_head_evaluation(h, w, *rest)
    np.testing.assert_allclose(held.kl_topk, kl_of_tails(q, p), rtol=2e-4)  # exact, whatever p


def test_two_models_without_a_tail_differ_by_a_millionth():
    h, w, *rest = one_position(200.0, odds=-200.0)
    value, grad = jax.value_and_grad(lambda w: cached_head_loss(h, w, *rest).loss)(w)
    assert 0 <= value < 1.2e-6 and np.all(np.abs(grad) < 1e-6)


def test_held_out_figures_of_cached_ids():
    """Cross-entropies and agreement are exact, KLs at most the full ones, acceptance at least."""
    spec = spec_of()
    h, w, h_t, w_t, labels, weights = hidden_states()
    full = head_evaluation(h, w, h_t, w_t, labels, weights, spec)
    got = cached_head_evaluation(h, w, top(spec, 5), labels, weights, spec)
    same = [x[0] for x in (full, got)], [x[1] for x in (full, got)], [x[4] for x in (full, got)]
    for a, b in same:
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert got.kl_topk < full.kl and got.divergence_topk < full.divergence
    assert full.acceptance < got.acceptance_topk <= got.count
    itself = top_of_teacher(h, w, labels, weights, spec, 5)
    got = cached_head_evaluation(h, w, itself, labels, weights, spec)
    assert got.agreement == got.count == weights.sum() and got.kl_topk < 1e-5


@pytest.mark.parametrize("k", [1, 4, 30])
def test_top_k_by_groups_is_top_k(rng, k):
    """With many equal values: of these the lower ids come first."""
    x = jnp.asarray(rng.integers(0, 40, (3, 5, 1003)), jnp.float32)
    got, want = top_k(x, k), jax.lax.top_k(x, k)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def test_the_likeliest_ids_alone_share_out_all_probability():
    """Worked by hand; an id as likely as the last stays, and of fewer ids than asked for all do."""
    p = np.asarray((0.1, 0.4, 0.2, 0.2, 0.1), np.float32)
    for count, want in ((1, (0, 1, 0, 0, 0)), (2, (0, 0.5, 0.25, 0.25, 0)), (10, p)):
        kept = keep_top_k(jnp.log(p), count)
        np.testing.assert_allclose(np.exp(kept), want, rtol=1e-6)


def test_every_id_of_18_bits_comes_back():
    for start in range(0, 262144, 65536):
        ids = start + jnp.arange(65536, dtype=jnp.int32)
        np.testing.assert_array_equal(join_ids(split_ids(ids)), ids)
