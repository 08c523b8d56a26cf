"""The loss against float64 values derived here with SciPy, never with the code under test."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import cases
from scipy.special import entr, logsumexp, rel_entr, softmax

from kdjax.config import DIVERGENCES, Config, validate
from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec, head_loss
from kdjax.losses.divergences import (
    Divergence,
    JensenShannon,
    Mixture,
    acceptance,
    as_divergence,
    forward_kl,
    parse_divergence,
    total_variation,
)
from kdjax.losses.kd import KDLoss, cross_entropy, kd_logit_gradient, kd_loss
from kdjax.losses.positions import head_evaluation

VOCAB = 151_936


def oracle_parts(student, teacher, labels, temperature):
    """(CE, KL) in float64: CE from logsumexp, KL as SciPy's relative entropy of softmaxes."""
    s, t = np.asarray(student, np.float64), np.asarray(teacher, np.float64)
    ce = logsumexp(s, axis=-1) - np.take_along_axis(s, labels[..., None], -1)[..., 0]
    kl = rel_entr(softmax(t / temperature, -1), softmax(s / temperature, -1)).sum(-1)
    return ce, kl


def oracle_loss(student, teacher, labels, temperature, alpha):
    ce, kl = oracle_parts(student, teacher, labels, temperature)
    return alpha * ce + (1 - alpha) * temperature**2 * kl


def draw(seed, *shape, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def case(seed=0, shape=(3, 5), vocab=37):
    labels = np.random.default_rng(seed + 9).integers(0, vocab, shape).astype(np.int32)
    return draw(seed, *shape, vocab), draw(seed + 1, *shape, vocab), labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_loss_equals_float64_definition(temperature, alpha):
    s, t, labels = case()
    got = kd_loss(s, t, labels, KDLoss(temperature=temperature, alpha=alpha))
    np.testing.assert_allclose(got, oracle_loss(s, t, labels, temperature, alpha), rtol=2e-5)


def test_hand_worked_value():
    # Two ids. Student (0, 0) is uniform; teacher (0, 4) at T = 4 is (1, e) / (1 + e).
    # KL = ln 2 - H(1 / (1 + e)) = 0.693147 - 0.582203; CE = ln 2.
    s, t = np.zeros(2, np.float32), np.array([0, 4], np.float32)
    e = np.e
    entropy = entr(1 / (1 + e)) + entr(e / (1 + e))
    want = 0.3 * np.log(2) + 0.7 * 16 * (np.log(2) - entropy)
    got = kd_loss(s, t, np.array(0), KDLoss(temperature=4.0, alpha=0.3))
    assert abs(float(got) - want) < 1e-6
    assert abs(want - 1.450519) < 1e-5  # the same, by pocket calculator


def test_direction_is_teacher_to_student():
    s, t, labels = case(4)
    got = kd_loss(s, t, labels, temperature=1.0, alpha=0.0)
    reverse = rel_entr(softmax(s.astype(float), -1), softmax(t.astype(float), -1)).sum(-1)
    assert np.all(np.abs(np.asarray(got) / reverse - 1) > 1e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gradient_is_analytic_and_agrees_with_autodiff(temperature, alpha):
    """Both against central differences of SciPy's loss in float64, one logit at a time."""
    s, t, labels = case(5)
    loss = KDLoss(temperature=temperature, alpha=alpha)
    analytic = kd_logit_gradient(s, t, labels, loss)
    auto = jax.grad(lambda x: kd_loss(x, t, labels, loss).sum())(s)
    want = np.empty(s.shape)
    for i, step in enumerate(1e-5 * np.eye(37)):
        up, down = (oracle_loss(s + sign * step, t, labels, temperature, alpha) for sign in (1, -1))
        want[..., i] = (up - down) / 2e-5
    np.testing.assert_allclose(analytic, want, atol=2e-6)
    np.testing.assert_allclose(auto, want, atol=2e-6)


def test_gradient_of_squared_temperature_kl_has_a_finite_limit():
    """T^2 KL tends to sum((d - mean d)^2) / 2V, d = t - s, as T grows; without T^2 to 0."""
    s, t, labels = case(6)
    d = (t - s).astype(np.float64)
    limit = ((d - d.mean(-1, keepdims=True)) ** 2).sum(-1) / (2 * 37)
    # T = 300 and not larger: in float32 the KL itself falls below the rounding of probabilities.
    got = kd_loss(s, t, labels, KDLoss(temperature=300.0, alpha=0.0))
    np.testing.assert_allclose(got, limit, rtol=0.05)


def test_teacher_gets_exactly_no_gradient():
    s, t, labels = case(7)
    g = jax.grad(lambda x: kd_loss(s, x, labels, KDLoss(temperature=2.0, alpha=0.3)).sum())(t)
    assert not np.any(np.asarray(g))


def test_alpha_one_is_cross_entropy():
    s, t, labels = case(8)
    got = kd_loss(s, t, labels, KDLoss(temperature=4.0, alpha=1.0))
    np.testing.assert_allclose(got, oracle_parts(s, t, labels, 1.0)[0], rtol=1e-5)
    np.testing.assert_array_equal(got, cross_entropy(s, labels))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
def test_student_equal_to_teacher_has_no_loss_and_no_gradient(temperature):
    s, _, labels = case(9, vocab=1000)
    loss = KDLoss(temperature=temperature, alpha=0.0)
    np.testing.assert_array_equal(kd_loss(s, s, labels, loss), np.zeros((3, 5)))
    np.testing.assert_array_equal(kd_logit_gradient(s, s, labels, loss), np.zeros(s.shape))


def distance(t, s):
    """A divergence of one's own, whose gradient where both are equal is NaN."""
    return jnp.sqrt(jnp.sum((jnp.exp(t) - jnp.exp(s)) ** 2, axis=-1))


# Each divergence beside its definition over float64 probabilities q, the teacher's, and p.
kl = lambda a, b: rel_entr(a, b).sum(-1)  # noqa: E731
ORACLES = {
    "forward_kl": kl,
    "reverse_kl": lambda q, p: kl(p, q),
    "jsd": lambda q, p: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    "jsd:beta=0.3": lambda q, p: 0.3 * kl(q, 0.3 * q + 0.7 * p) + 0.7 * kl(p, 0.3 * q + 0.7 * p),
    "skewed_forward_kl": lambda q, p: kl(q, 0.1 * q + 0.9 * p),
    "skewed_reverse_kl:skew=0.2": lambda q, p: kl(p, 0.8 * q + 0.2 * p),
    "total_variation": lambda q, p: np.abs(p - q).sum(-1) / 2,
    "0.7*forward_kl+0.3*total_variation": lambda q, p: (
        0.7 * kl(q, p) + 0.15 * np.abs(p - q).sum(-1)
    ),
    distance: lambda q, p: np.linalg.norm(p - q, axis=-1),
}


def oracle_divergence(s, t, temperature, kind):
    return ORACLES[kind](*(softmax(np.asarray(x, np.float64) / temperature, -1) for x in (t, s)))


# q = (1/2, 1/2) and p = (1/4, 3/4), worked by hand; and what each tends to where q and p exclude
# each other: the entropy of (beta, 1 - beta), log(1 / skew), 1.
@pytest.mark.parametrize(
    ("text", "known", "limit"),
    [
        ("forward_kl", 0.143841, None),  # ln(2) / 2 + ln(2/3) / 2
        ("reverse_kl", 0.130812, None),  # ln(1/2) / 4 + 3 ln(3/2) / 4
        ("jsd", 0.033822, 0.693147),
        ("jsd:beta=0.3", 0.029003, 0.610864),
        ("skewed_forward_kl", 0.113137, 2.302585),
        ("skewed_reverse_kl", 0.107043, 2.302585),
        ("skewed_reverse_kl:skew=0.5", 0.035375, 0.693147),  # ln(2/3) / 4 + 3 ln(6/5) / 4
        ("total_variation", 0.25, 1.0),
        ("0.5*forward_kl + 0.5*reverse_kl", 0.137327, None),  # the mean of the two above
        ("0.4*jsd:beta=0.3+0.6*total_variation", 0.161601, 0.844346),
    ],
)
def test_divergences_have_the_values_known_of_them(text, known, limit):
    divergence = parse_divergence(text)
    q, p = (np.log(np.asarray(x, np.float32)) for x in ((0.5, 0.5), (0.25, 0.75)))
    np.testing.assert_allclose(divergence(q, p), known, atol=2e-6)
    np.testing.assert_allclose(divergence(q, q), 0, atol=1e-7)
    far = np.asarray((0, -60), np.float32)
    if limit:
        np.testing.assert_allclose(divergence(far, far[::-1]), limit, rtol=1e-5)
    # Finite and flat where a float32 probability is 0, and a value: equal, and hashable.
    for a, b in ((far, far[::-1]), (far, far)):
        assert np.all(np.isfinite(divergence.logit_gradient(a * 3, b * 3)))
    assert divergence == parse_divergence(text) and hash(divergence) == hash(parse_divergence(text))
    names = {name.partition(":")[0] for name in ORACLES if isinstance(name, str)}
    assert set(DIVERGENCES) == {name for name in names if "*" not in name}


def test_a_mixture_is_over_merged_outcomes_where_all_its_parts_are():
    both = Mixture(((0.5, forward_kl), (0.5, total_variation)))
    own = Mixture(((0.5, forward_kl), (0.5, distance)))
    assert both.merges_tail and not own.merges_tail
    assert own == Mixture(((0.5, forward_kl), (0.5, as_divergence(distance))))
    assert parse_divergence("0.5*forward_kl+0.5*total_variation") == both
    q, p = (np.log(np.asarray(x, np.float32)) for x in ((0.5, 0.3, 0.2), (0.25, 0.5, 0.25)))
    g = both.logit_gradient(q, p)
    inside, tail = both.merged_gradient(q, p)
    np.testing.assert_allclose(inside, g[:2], rtol=1e-6)
    np.testing.assert_allclose(tail * np.exp(p[2:]), g[2:], rtol=1e-6)


def test_a_class_is_no_divergence():
    with pytest.raises(UserError, match=r"such as JensenShannon\(0.5\)"):
        KDLoss(JensenShannon)


def test_the_acceptance_is_what_total_variation_leaves():
    q, p = np.asarray((0.5, 0.3, 0.2), np.float32), np.asarray((0.25, 0.5, 0.25), np.float32)
    np.testing.assert_allclose(acceptance(np.log(q), np.log(p)), 0.25 + 0.3 + 0.2, rtol=1e-6)


@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_each_divergence_and_its_gradient(kind, temperature):
    s, t, labels = case(21)
    loss = KDLoss(temperature=temperature, alpha=0.2, divergence=kind)
    ce = oracle_parts(s, t, labels, temperature)[0]
    want = 0.2 * ce + 0.8 * temperature**2 * oracle_divergence(s, t, temperature, kind)
    np.testing.assert_allclose(kd_loss(s, t, labels, loss), want, rtol=1e-5)
    got = kd_logit_gradient(s, t, labels, loss)
    auto = jax.grad(lambda x: kd_loss(x, t, labels, loss).sum())(jnp.asarray(s))
    np.testing.assert_allclose(got, auto, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        *("forward_kl", "jsd", distance),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ORACLES
            if kind not in ("forward_kl", "jsd", distance)
        ),
    ],
)
def test_chunked_loss_minimises_the_divergence_asked_for(kind):
    """Value, and gradient beside float64 differences; 4 ids do not exist on either side.

    At positions without weight both sides are equal: what is NaN there reaches nothing.
    """
    arrays, labels, weights = head_case(11)
    head_spec = spec(KDLoss(kind, 2.0, 0.3), real_vocab=V - 4, chunk_tokens=16)
    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}

    def oracle(hidden, head):
        s = (hidden @ head.T)[..., : V - 4]
        t = (exact["teacher_hidden"] @ exact["teacher_head"].T)[..., : V - 4]
        ce = oracle_parts(s, t, np.asarray(labels), 2.0)[0]
        return ((0.3 * ce + 2.8 * oracle_divergence(s, t, 2.0, kind)) * np.asarray(weights)).sum()

    value, grads = value_and_gradients(arrays, labels, weights, head_spec)
    ours = exact["student_hidden"], exact["student_head"]
    np.testing.assert_allclose(value, oracle(*ours), rtol=1e-5)
    rng = np.random.default_rng(0)
    for _ in range(3):
        along = [rng.normal(size=x.shape) for x in ours]
        ends = [oracle(*(x + sign * d for x, d in zip(ours, along, strict=True)))
                for sign in (1e-6, -1e-6)]  # fmt: skip
        slope = sum((np.asarray(grads[n]) * d).sum() for n, d in zip(NAMES[:2], along, strict=True))
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=2e-4, atol=1e-3)
    assert not np.any(np.asarray(grads["student_head"])[V - 4 :])
    held = head_evaluation(*arrays.values(), labels, weights, head_spec)
    want = 0.3 * held.student_ce + 2.8 * held.divergence
    np.testing.assert_allclose(value, want, rtol=1e-5)  # the minimised loss is the evaluated one


def test_a_divergence_of_ones_own_sees_finite_numbers_of_ids_that_exist():
    seen = []

    def own(t, s):
        seen.append((t.shape[-1], t.dtype))
        jax.debug.callback(lambda *x: seen.append(bool(np.isfinite(x).all())), t, s)
        return jnp.sum(jnp.abs(t - s), axis=-1)

    arrays, labels, weights = head_case(12)
    for name in ("student_head", "teacher_head"):
        arrays[name] = arrays[name].at[V - 4 :].set(1e3)
    arrays["student_hidden"] = jnp.where(weights[..., None] != 0, 20 * arrays["student_hidden"],
                                         jnp.nan)  # fmt: skip
    head_spec = spec(KDLoss(own), real_vocab=V - 4, chunk_tokens=6)
    value, grads = value_and_gradients(arrays, labels, weights, head_spec)
    jax.effects_barrier()
    assert set(seen) == {(V - 4, jnp.dtype(jnp.float32)), True}
    assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in grads.values())
    whole = dataclasses.replace(head_spec, chunk_tokens=10_000)
    again, again_grads = value_and_gradients(arrays, labels, weights, whole)
    np.testing.assert_allclose(value, again, rtol=1e-5)
    for key in grads:
        np.testing.assert_allclose(grads[key], again_grads[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [("js", "'js' is unknown; known are forward_kl, reverse_kl, jsd"), ("", "known are"),
     ("jsd:skew=0.1", "jsd has beta"), ("forward_kl:beta=0.1", "no parameters"),
     ("jsd:beta=half", "must be a number"), ("jsd:beta=1", "above 0 and below 1"),
     ("skewed_reverse_kl:skew=nan", "above 0 and below 1"),
     ("0.5*forward_kl+jsd", "found 'jsd'; expected of each part"),
     ("0.5*forward_kl+0.5*js", "'js' is unknown"),
     ("0.5*forward_kl+0.6*jsd", "are 0.5, 0.6: each must be above 0, and their sum 1"),
     ("2*forward_kl+-1*jsd", "each must be above 0")],
)  # fmt: skip
def test_unknown_divergences_are_refused_wherever_they_are_met(text, message):
    for refuse in (parse_divergence, KDLoss):
        with pytest.raises(UserError, match=message):
            refuse(text)
    config = Config()
    config.loss.divergence = text
    with pytest.raises(UserError, match=r"loss.divergence=.*one of forward_kl"):
        validate(config)


def test_what_cannot_be_a_loss_is_refused():
    s, t, labels = case()
    for f in (kd_loss, kd_logit_gradient):
        loss = KDLoss(alpha=0.5)
        with pytest.raises(UserError, match=r"\[3, 5, 37\] and the teacher's \[3, 5, 1\]"):
            f(s, t[..., :1], labels, loss)
        for label, shown in ((-100, "-100 to"), (37, "to 37")):
            odd = np.array(labels)
            odd[1, 2] = label
            with pytest.raises(UserError, match=f"labels are from .*{shown}.*0 to 36"):
                f(s, t, odd, loss)
        with pytest.raises(UserError, match=r"labels are \[5\]: must be \[3, 5\]"):
            f(s, t, labels[0], loss)
        with pytest.raises(UserError, match="one number a position"):
            f(s, t, labels, KDLoss(lambda t, s: jnp.sum(t - s), alpha=0.5))
    for wrong in (dict(temperature=0.0), dict(alpha=1.1)):
        with pytest.raises(UserError, match=next(iter(wrong))):
            KDLoss(**wrong)
    assert isinstance(KDLoss(distance).divergence, Divergence)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), near=st.floats(0.05, 0.5), ratio=st.floats(1.3, 4))
def test_loss_grows_with_divergence(seed, near, ratio):
    """Along a straight line away from the teacher's logits, KL only grows (it is convex)."""
    t, direction, labels = draw(seed, 4, 21), draw(seed + 1, 4, 21), np.zeros(4, np.int32)
    loss = functools.partial(kd_loss, loss=KDLoss(temperature=2.0))
    assert np.all(np.asarray(loss(t + near * ratio * direction, t, labels))
                  > np.asarray(loss(t + near * direction, t, labels)))  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(shift_s=st.floats(-50, 50), shift_t=st.floats(-50, 50))
def test_shifting_logits_changes_nothing(shift_s, shift_t):
    s, t, labels = case(10)
    loss = KDLoss(temperature=2.0, alpha=0.3)
    moved = kd_loss(s + np.float32(shift_s), t + np.float32(shift_t), labels, loss)
    np.testing.assert_allclose(moved, kd_loss(s, t, labels, loss), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_extreme_logits_stay_finite(size):
    s, t, labels = case(11)
    loss = KDLoss(temperature=4.0, alpha=0.3)
    for a, b in ((s * size, t), (s, t * size), (s * size, t * size)):
        a, b = a.astype(np.float32), b.astype(np.float32)
        assert np.all(np.isfinite(kd_loss(a, b, labels, loss)))
        assert np.all(np.isfinite(kd_logit_gradient(a, b, labels, loss)))
        assert np.all(np.isfinite(jax.grad(lambda x, y=b: kd_loss(x, y, labels, loss).sum())(a)))


@pytest.mark.parametrize("target", [1e-1, 1e-2, 1e-3, 1e-4])
def test_kl_over_the_whole_vocabulary_is_precise_and_never_negative(target):
    """bf16 softmaxes put +57% on a KL of 3e-4 here and turn it negative; float32 must hold 1%."""
    t = draw(12, 4, VOCAB, scale=2.5)
    noise = draw(13, 4, VOCAB, scale=1.0)
    s = t + noise * np.float32(np.sqrt(2 * target))
    labels = np.zeros(4, np.int32)
    want = oracle_parts(s, t, labels, 1.0)[1]
    got = np.asarray(kd_loss(s, t, labels, KDLoss(temperature=1.0, alpha=0.0)))
    assert np.all(got > 0) and np.all(want < 10 * target)
    np.testing.assert_allclose(got, want, rtol=1e-2)


def test_bf16_logits_are_widened_before_anything_else():
    s, t, labels = case(14, vocab=500)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (s, t)]
    got = kd_loss(*half, labels, KDLoss(temperature=2.0, alpha=0.3))
    assert got.dtype == jnp.float32
    want = oracle_loss(*(np.asarray(x, np.float64) for x in half), labels, 2.0, 0.3)
    np.testing.assert_allclose(got, want, rtol=2e-5)


@pytest.mark.slow
def test_any_leading_axes():
    s, t, labels = case(15, shape=(2, 3, 4))
    loss = KDLoss(temperature=2.0, alpha=0.3)
    whole = kd_loss(s, t, labels, loss)
    flat = kd_loss(s.reshape(24, -1), t.reshape(24, -1), labels.reshape(24), loss)
    assert whole.shape == (2, 3, 4)
    np.testing.assert_allclose(whole.reshape(24), flat, rtol=1e-6)
    one = kd_loss(s[0, 0, 0], t[0, 0, 0], np.array(labels[0, 0, 0]), loss)
    np.testing.assert_allclose(one, whole[0, 0, 0], rtol=1e-6)


# --- the chunked loss ---------------------------------------------------------------------------

B, T, D_S, D_T, V = 3, 11, 8, 12, 50
NAMES = ("student_hidden", "student_head", "teacher_hidden", "teacher_head")  # jit sorts dicts


def head_case(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    arrays = dict(
        student_hidden=rng.normal(0, 1, (B, T, D_S)),
        student_head=rng.normal(0, 1, (V, D_S)),
        teacher_hidden=rng.normal(0, 1, (B, T, D_T)),
        teacher_head=rng.normal(0, 1, (V + 6, D_T)),
    )
    arrays = {k: jnp.asarray(v, dtype) for k, v in arrays.items()}
    labels = jnp.asarray(rng.integers(0, V - 4, (B, T)), jnp.int32)
    weights = jnp.asarray(rng.random((B, T)) < 0.7, jnp.float32)
    return arrays, labels, weights


def spec(loss=KDLoss(temperature=2.0, alpha=0.3), **changes):  # noqa: B008
    return HeadSpec(loss, **dict(width=V, real_vocab=V, chunk_tokens=10_000) | changes)


@functools.partial(jax.jit, static_argnums=3)
def value_and_gradients(arrays, labels, weights, head_spec):
    def f(student):
        args = {**arrays, **student}
        return head_loss(*(args[k] for k in NAMES), labels, weights, head_spec).loss

    return jax.value_and_grad(f)({k: arrays[k] for k in ("student_hidden", "student_head")})


@functools.partial(jax.jit, static_argnums=3)
def naive(arrays, labels, weights, head_spec):
    """All logits at once, plain autodiff over the public unreduced loss."""

    def f(student):
        args = {**arrays, **student}
        s = args["student_hidden"] @ args["student_head"].T
        t = (args["teacher_hidden"] @ args["teacher_head"].T)[..., :V]
        s, t = s[..., : head_spec.real_vocab], t[..., : head_spec.real_vocab]
        per = kd_loss(s, t, labels, head_spec.loss)
        return jnp.sum(per * weights)

    return jax.value_and_grad(f)({k: arrays[k] for k in ("student_hidden", "student_head")})


@pytest.mark.parametrize("chunk_tokens", cases(1, 7, 34, slow=[3, 4, 6, 12, 33, 10_000]))
@pytest.mark.parametrize("real_vocab", [V, V - 4])
def test_chunked_equals_unchunked(chunk_tokens, real_vocab):
    """Ragged chunk counts included: 11 positions in chunks of 1, 2, 4 and 11."""
    case_ = head_case()
    head_spec = spec(chunk_tokens=chunk_tokens, real_vocab=real_vocab)
    value, grads = value_and_gradients(*case_, head_spec)
    want, want_grads = naive(*case_, head_spec)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for key in grads:
        np.testing.assert_allclose(grads[key], want_grads[key], rtol=1e-4, atol=1e-5)


def test_loss_is_made_of_its_parts():
    """The parts are SciPy's; the loss lies between its two ends where alpha says."""
    arrays, labels, weights = head_case(1)
    mixed, soft, hard = (
        head_loss(*arrays.values(), labels, weights, spec(KDLoss(temperature=2.0, alpha=alpha)))
        for alpha in (0.3, 0.0, 1.0)
    )
    numbers = [np.asarray(array, np.float64) for array in arrays.values()]
    s, t = numbers[0] @ numbers[1].T, (numbers[2] @ numbers[3].T)[..., :V]
    ce, kl = ((part * weights).sum() for part in oracle_parts(s, t, np.asarray(labels), 2.0))
    for sums in (mixed, soft, hard):
        np.testing.assert_allclose((sums.ce, sums.divergence), (ce, kl), rtol=1e-5)
    np.testing.assert_allclose((hard.loss, soft.loss), (ce, 4 * kl), rtol=1e-5)
    np.testing.assert_allclose((mixed.loss - soft.loss) / (hard.loss - soft.loss), 0.3, rtol=1e-4)


def test_masked_positions_have_no_effect_whatever_they_hold():
    arrays, labels, weights = head_case(2)
    value, grads = value_and_gradients(arrays, labels, weights, spec())
    off = np.asarray(weights) == 0
    for poison in (np.nan, 1e30, np.inf):
        bad = dict(arrays)
        for key in ("student_hidden", "teacher_hidden"):
            filled = np.array(arrays[key])
            filled[off] = poison
            bad[key] = jnp.asarray(filled)
        bad_labels = jnp.where(weights == 0, 0, labels)
        got, got_grads = value_and_gradients(bad, bad_labels, weights, spec())
        np.testing.assert_array_equal(got, value)
        for key in grads:
            np.testing.assert_array_equal(got_grads[key], grads[key])
    assert not np.any(np.asarray(grads["student_hidden"])[off])


def test_all_masked_gives_zero_and_finite_gradients():
    arrays, labels, weights = head_case(3)
    value, grads = value_and_gradients(arrays, labels, jnp.zeros_like(weights), spec())
    assert value == 0
    assert all(not np.any(np.asarray(g)) for g in grads.values())


def test_every_unmasked_position_of_every_row_counts():
    arrays, labels, _ = head_case(4)
    whole = head_loss(*arrays.values(), labels, jnp.ones((B, T)), spec()).loss
    single = 0.0
    for b in range(B):
        for t in range(T):
            one = jnp.zeros((B, T)).at[b, t].set(1.0)
            value, grads = value_and_gradients(arrays, labels, one, spec())
            assert value > 0 and np.any(np.asarray(grads["student_hidden"])[b, t])
            single += float(value)
    np.testing.assert_allclose(whole, single, rtol=1e-5)


def test_padding_rows_cannot_move_the_loss():
    """Neither the teacher's extra rows nor the ids beyond the tokenizer, on either side."""
    arrays, labels, weights = head_case(5)
    head_spec = spec(real_vocab=V - 4)
    value, grads = value_and_gradients(arrays, labels, weights, head_spec)
    moved = dict(arrays)
    moved["teacher_head"] = arrays["teacher_head"].at[V - 4 :].set(1e3)
    moved["student_head"] = arrays["student_head"].at[V - 4 :].set(-1e3)
    got, got_grads = value_and_gradients(moved, labels, weights, head_spec)
    np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(got_grads["student_head"], grads["student_head"])
    assert not np.any(np.asarray(grads["student_head"])[V - 4 :])


def test_teacher_is_sliced_before_the_softmax():
    arrays, labels, weights = head_case(6)
    value, _ = value_and_gradients(arrays, labels, weights, spec())
    s = np.asarray(arrays["student_hidden"], np.float64) @ np.asarray(arrays["student_head"]).T
    t = np.asarray(arrays["teacher_hidden"], np.float64) @ np.asarray(arrays["teacher_head"]).T
    per = oracle_loss(s, t[..., :V], np.asarray(labels), 2.0, 0.3)
    np.testing.assert_allclose(value, (per * np.asarray(weights)).sum(), rtol=1e-5)


@pytest.mark.parametrize("chunks", [1, 4, 11])
def test_head_gradient_does_not_lose_precision_with_chunks(chunks):
    """In bf16 the head's gradient must not accumulate in bf16."""
    arrays, labels, weights = head_case(7, jnp.bfloat16)
    exact = {k: jnp.asarray(v, jnp.float32) for k, v in arrays.items()}
    arrays["student_head"] = exact["student_head"]  # float32 master, as in training
    _, grads = value_and_gradients(
        arrays, labels, weights, spec(chunk_tokens=B * (-(-T // chunks)))
    )
    _, want = naive(exact, labels, weights, spec())
    got, want = np.asarray(grads["student_head"]), np.asarray(want["student_head"])
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 6e-3


def test_training_never_holds_all_logits():
    """Compiled temporary memory stays far under one [tokens, vocab] float32 array."""
    tokens, vocab = 512, 4096
    shapes = [(1, tokens, 16), (vocab, 16), (1, tokens, 16), (vocab, 16)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    labels = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, tokens), jnp.float32)
    head_spec = HeadSpec(KDLoss(temperature=2.0, alpha=0.3), vocab, vocab, chunk_tokens=16)

    def f(h, w, ht, wt, labels, weights):
        return head_loss(h, w, ht, wt, labels, weights, head_spec).loss

    compiled = jax.jit(jax.grad(f, (0, 1))).lower(*args, labels, weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocab * 4 / 4


def test_evaluation_sums_match_the_oracle():
    arrays, labels, weights = head_case(8)
    got = head_evaluation(*arrays.values(), labels, weights, spec(chunk_tokens=6))
    s = np.asarray(arrays["student_hidden"], np.float64) @ np.asarray(arrays["student_head"]).T
    t = (np.asarray(arrays["teacher_hidden"], np.float64) @ np.asarray(arrays["teacher_head"]).T)[
        ..., :V
    ]
    w, labels = np.asarray(weights), np.asarray(labels)
    ce, kl_1 = oracle_parts(s, t, labels, 1.0)
    teacher_ce, kl_t = oracle_parts(t, t, labels, 1.0)[0], oracle_parts(s, t, labels, 2.0)[1]
    same = s.argmax(-1) == t.argmax(-1)
    kept = np.minimum(softmax(s, -1), softmax(t, -1)).sum(-1)
    want = [(x * w).sum() for x in (ce, teacher_ce, kl_t, kl_1, same, kept, np.ones_like(w))]
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_no_gradient_reaches_the_teacher_in_either_precision():
    """In 2 precisions, neither its hidden states nor its head get a gradient other than 0."""
    rng, spec = np.random.default_rng(1), HeadSpec(KDLoss(temperature=2.0, alpha=0.3), 8, 8, 6)
    labels, weights = jnp.zeros((1, 6), jnp.int32), jnp.ones((1, 6), jnp.float32)
    shapes, kinds = ((1, 6, 4), (8, 4)), (jnp.float32, jnp.bfloat16)
    assert len(kinds) == 2
    for dtype in kinds:
        h, w, *teacher = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes * 2)

        def loss(student, teacher):
            return head_loss(*student, *teacher, labels, weights, spec).loss

        ours, theirs = jax.grad(loss, (0, 1))((h, w), teacher)
        assert all(np.any(np.asarray(g, np.float32)) for g in ours)
        assert not any(np.any(np.asarray(g, np.float32)) for g in theirs)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(vocab=st.integers(2, 8), seed=st.integers(0, 10_000), t=st.sampled_from((0.5, 1.0, 4.0)),
       alpha=st.sampled_from((0.0, 0.3, 1.0)))  # fmt: skip
def test_loss_is_no_less_than_zero_and_its_gradient_sums_to_zero(vocab, seed, t, alpha):
    rng = np.random.default_rng(seed)
    student, teacher = rng.normal(0, 3, (2, vocab)).astype(np.float32)
    label = np.asarray(seed % vocab)
    loss = KDLoss(temperature=t, alpha=alpha)
    assert float(kd_loss(student, teacher, label, loss)) >= 0
    gradient = np.asarray(kd_logit_gradient(student, teacher, label, loss), np.float64)
    assert abs(gradient.sum()) < 1e-5
    # Down the gradient the loss falls.
    lower = kd_loss(student - 1e-2 * np.float32(gradient), teacher, label, loss)
    assert float(lower) <= float(kd_loss(student, teacher, label, loss)) + 1e-6
