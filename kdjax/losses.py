"""The distillation loss: unreduced public forms, and the chunked form that training uses.

    loss = alpha * CE(student, labels) + (1 - alpha) * T^2 * KL(teacher_T || student_T)

alpha weighs the cross-entropy with the labels; T softens both distributions; T^2 keeps the
gradient's size independent of T (Hinton, Vinyals, Dean 2015, arXiv:1503.02531, section 2). In place
of KL(teacher || student), "forward_kl", `divergence` may be "reverse_kl", KL(student || teacher)
(Gu et al. 2023, arXiv:2306.08543), or "jsd", the mean KL of both to their mixture.

Letters: B rows, T positions, D hidden width, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

AnyArray = Array | np.ndarray  # the public, unreduced functions take NumPy arrays as well

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")

# In place of -inf for ids that do not exist: exp of it is 0, and 0 * (a - a) is not NaN.
EXCLUDED = -1e30


def _log_softmax(logits: AnyArray, temperature: float) -> Array:
    return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32) / temperature, axis=-1)


def kl_divergence(
    teacher_log_probs: Float[AnyArray, "*B V"], student_log_probs: Float[AnyArray, "*B V"]
) -> Float[Array, "*B"]:
    """KL(teacher || student) in nats from float32 log-probabilities.

    Adding p_s - p_t (which sums to zero) makes every term non-negative: rounding in the normalisers
    then cannot turn a KL of 1e-4 over 151,936 ids negative.
    """
    p_t, p_s = jnp.exp(teacher_log_probs), jnp.exp(student_log_probs)
    return jnp.sum(p_t * (teacher_log_probs - student_log_probs) + (p_s - p_t), axis=-1)


def soft_divergence(
    teacher_log_probs: Float[AnyArray, "*B V"],
    student_log_probs: Float[AnyArray, "*B V"],
    divergence: str = "forward_kl",
) -> Float[Array, "*B"]:
    """The divergence of that name, a member of `DIVERGENCES`, in nats."""
    if divergence == "forward_kl":
        return kl_divergence(teacher_log_probs, student_log_probs)
    if divergence == "reverse_kl":
        return kl_divergence(student_log_probs, teacher_log_probs)
    mixture = jnp.logaddexp(teacher_log_probs, student_log_probs) - math.log(2)
    ours, theirs = (kl_divergence(x, mixture) for x in (student_log_probs, teacher_log_probs))
    return 0.5 * (ours + theirs)


def _soft_gradient(teacher_log_probs: Array, student_log_probs: Array, divergence: str) -> Array:
    """d divergence / d (student logits / T) of the two that are no forward KL."""
    slope = student_log_probs - teacher_log_probs
    if divergence == "jsd":
        mixture = jnp.logaddexp(teacher_log_probs, student_log_probs) - math.log(2)
        slope = 0.5 * (student_log_probs - mixture)
    p = jnp.exp(student_log_probs)
    return p * (slope - jnp.sum(p * slope, axis=-1, keepdims=True))


def cross_entropy(
    logits: Float[AnyArray, "*B V"], labels: Int[AnyArray, "*B"]
) -> Float[Array, "*B"]:
    """Negative log-likelihood of the labels in nats, in float32, at temperature 1."""
    logits = jnp.asarray(logits, jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def kd_loss(
    student_logits: Float[AnyArray, "*B V"],
    teacher_logits: Float[AnyArray, "*B V"],
    labels: Int[AnyArray, "*B"],
    *,
    temperature: float,
    alpha: float,
    divergence: str = "forward_kl",
) -> Float[Array, "*B"]:
    """The distillation loss of each position, float32, unreduced; the teacher gets no gradient.

    Both logits span the same V ids: slice a wider teacher before calling.
    """
    teacher = jax.lax.stop_gradient(_log_softmax(teacher_logits, temperature))
    kl = soft_divergence(teacher, _log_softmax(student_logits, temperature), divergence)
    ce = cross_entropy(student_logits, labels)
    return alpha * ce + (1 - alpha) * temperature**2 * kl


def kd_logit_gradient(
    student_logits: Float[AnyArray, "*B V"],
    teacher_logits: Float[AnyArray, "*B V"],
    labels: Int[AnyArray, "*B"],
    *,
    temperature: float,
    alpha: float,
    divergence: str = "forward_kl",
) -> Float[Array, "*B V"]:
    """d kd_loss / d student_logits: alpha (p - onehot) + (1 - alpha) T (p_T - q_T), float32.

    p_T and q_T are the softened student and teacher (Hinton et al. 2015, equation 2, times T^2);
    p_T - q_T belongs to the forward KL.
    """
    student = jnp.asarray(student_logits, jnp.float32)
    hard = jax.nn.softmax(student, axis=-1) - jax.nn.one_hot(
        labels, student.shape[-1], dtype=jnp.float32
    )
    if divergence != "forward_kl":
        soft = [_log_softmax(x, temperature) for x in (teacher_logits, student)]
        return alpha * hard + (1 - alpha) * temperature * _soft_gradient(
            soft[0], soft[1], divergence
        )
    p = jnp.exp(_log_softmax(student, temperature))
    q = jnp.exp(_log_softmax(teacher_logits, temperature))
    return alpha * hard + (1 - alpha) * temperature * (p - q)


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """What the chunked loss must know; hashable, so that it can be static under jit."""

    temperature: float
    alpha: float
    width: int  # rows of both heads that are used: the smaller of the two
    real_vocab: int  # ids that some token has; padding rows beyond it are excluded on both sides
    chunk_tokens: int  # positions whose logits exist at the same time, over all rows
    divergence: str = "forward_kl"  # a member of DIVERGENCES


class LossSums(NamedTuple):
    """Sums over weighted positions, float32: divide by the count of the whole optimizer step."""

    loss: Float[Array, ""]
    ce: Float[Array, ""]
    kl: Float[Array, ""]  # the divergence trained on, at the training temperature, without T^2


class EvalSums(NamedTuple):
    """Sums over weighted positions, float32: divide by `count`."""

    student_ce: Float[Array, ""]
    teacher_ce: Float[Array, ""]
    kl_temperature: Float[Array, ""]
    kl: Float[Array, ""]  # at T = 1, so that runs with different temperatures compare
    agreement: Float[Array, ""]  # positions where both rank the same id first
    count: Float[Array, ""]


def _logits(hidden: Array, head: Array, spec: HeadSpec) -> Array:
    # float32 out of the product: bf16 logits put an error of 4% on a KL of 3e-3.
    logits = jnp.einsum("BTD,VD->BTV", hidden, head, preferred_element_type=jnp.float32)
    if spec.real_vocab >= spec.width:
        return logits
    # Masked and not sliced: 151,936 columns keep the matrix product aligned, 151,665 do not.
    exists = jnp.arange(spec.width, dtype=jnp.int32)[None, None] < spec.real_vocab
    return jnp.where(exists, logits, EXCLUDED)


def _chunked(x: Array, chunks: int, size: int) -> Array:
    """`[B, T, ...]` to `[chunks, B, size, ...]`, T padded with zeros.

    Chunks run along T, so that rows stay where the mesh put them.
    """
    pad = chunks * size - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], chunks, size, *x.shape[2:]).swapaxes(0, 1)


def _scan_inputs(student: Array, teacher: Array, labels: Array, weights: Array, spec: HeadSpec):
    batch, length = labels.shape
    size = min(length, max(1, spec.chunk_tokens // batch))
    chunks = -(-length // size)
    # A position without weight may hold anything, NaN too; zeros keep it out of 0 * NaN.
    keep = (weights != 0)[..., None]
    student, teacher = jnp.where(keep, student, 0), jnp.where(keep, teacher, 0)
    return tuple(_chunked(x, chunks, size) for x in (student, teacher, labels, weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def head_loss(
    student_hidden: Float[Array, "B T D1"],
    student_head: Float[Array, "V1 D1"],
    teacher_hidden: Float[Array, "B T D2"],
    teacher_head: Float[Array, "V2 D2"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    spec: HeadSpec,
) -> LossSums:
    """Summed distillation loss from hidden states, `chunk_tokens` positions of logits at a time.

    Only `loss` carries a gradient, to the student's hidden states and head. It is computed in the
    forward scan from the analytic logit gradient, so logits are made once and never stored, and
    the head's gradient accumulates in float32: in bf16 its error grows from 0.2% at one chunk to
    1.6% at 256. `weights` is 0 where a position does not train.
    """
    return _head_loss(student_hidden, student_head, teacher_hidden, teacher_head, labels,
                      weights, spec, with_gradient=False)[0]  # fmt: skip


def _head_loss(student_hidden, student_head, teacher_hidden, teacher_head, labels, weights, spec,
               *, with_gradient: bool):  # fmt: skip
    head = student_head[: spec.width].astype(student_hidden.dtype)
    teacher_head = teacher_head[: spec.width].astype(teacher_hidden.dtype)
    options: dict[str, Any] = dict(
        temperature=spec.temperature, alpha=spec.alpha, divergence=spec.divergence
    )

    def chunk(carry, xs):
        sums, d_head = carry
        h_s, h_t, label, weight = xs
        s, t = _logits(h_s, head, spec), _logits(h_t, teacher_head, spec)
        ce = cross_entropy(s, label)
        soft = [_log_softmax(x, spec.temperature) for x in (t, s)]
        kl = soft_divergence(soft[0], soft[1], spec.divergence)
        loss = spec.alpha * ce + (1 - spec.alpha) * spec.temperature**2 * kl
        sums = LossSums(
            *(a + jnp.sum(weight * b) for a, b in zip(sums, (loss, ce, kl), strict=True))
        )
        if not with_gradient:
            return (sums, d_head), None
        g = kd_logit_gradient(s, t, label, **options) * weight[..., None]
        g = g.astype(h_s.dtype)
        d_hidden = jnp.einsum("BTV,VD->BTD", g, head)
        d_head += jnp.einsum("BTV,BTD->VD", g, h_s, preferred_element_type=jnp.float32)
        return (sums, d_head), d_hidden

    zero = jnp.zeros((), jnp.float32)
    d_head = jnp.zeros(head.shape if with_gradient else (), jnp.float32)
    xs = _scan_inputs(student_hidden, teacher_hidden, labels, weights, spec)
    (sums, d_head), d_hidden = jax.lax.scan(chunk, (LossSums(zero, zero, zero), d_head), xs)
    return sums, d_hidden, d_head


def _head_loss_forward(student_hidden, student_head, teacher_hidden, teacher_head, labels,
                       weights, spec):  # fmt: skip
    sums, d_hidden, d_head = _head_loss(student_hidden, student_head, teacher_hidden, teacher_head,
                                        labels, weights, spec, with_gradient=True)  # fmt: skip
    batch, length, width = student_hidden.shape
    assert d_hidden is not None
    d_hidden = d_hidden.swapaxes(0, 1).reshape(batch, -1, width)[:, :length]
    extra = student_head.shape[0] - d_head.shape[0]
    d_head = jnp.pad(d_head, ((0, extra), (0, 0))).astype(student_head.dtype)
    return sums, (d_hidden, d_head)


def _head_loss_backward(spec, residuals, cotangents):
    d_hidden, d_head = residuals
    scale = cotangents.loss
    return (d_hidden * scale.astype(d_hidden.dtype), d_head * scale.astype(d_head.dtype),
            None, None, None, None)  # fmt: skip


head_loss.defvjp(_head_loss_forward, _head_loss_backward)


def head_evaluation(
    student_hidden: Float[Array, "B T D1"],
    student_head: Float[Array, "V1 D1"],
    teacher_hidden: Float[Array, "B T D2"],
    teacher_head: Float[Array, "V2 D2"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    spec: HeadSpec,
) -> EvalSums:
    """Held-out sums of student against teacher, `chunk_tokens` positions of logits at a time."""
    head = student_head[: spec.width].astype(student_hidden.dtype)
    teacher_head = teacher_head[: spec.width].astype(teacher_hidden.dtype)

    def chunk(sums, xs):
        h_s, h_t, label, weight = xs
        s, t = _logits(h_s, head, spec), _logits(h_t, teacher_head, spec)
        soft = [_log_softmax(x, spec.temperature) for x in (t, s)]
        hard = [_log_softmax(x, 1.0) for x in (t, s)]
        same = jnp.argmax(s, axis=-1) == jnp.argmax(t, axis=-1)
        values = (cross_entropy(s, label), cross_entropy(t, label), kl_divergence(*soft),
                  kl_divergence(*hard), same, jnp.ones_like(weight))  # fmt: skip
        added = (a + jnp.sum(weight * b) for a, b in zip(sums, values, strict=True))
        return EvalSums(*added), None

    xs = _scan_inputs(student_hidden, teacher_hidden, labels, weights, spec)
    start = EvalSums(*(jnp.zeros((), jnp.float32),) * len(EvalSums._fields))
    return jax.lax.scan(chunk, start, xs)[0]


class ComparisonSums(NamedTuple):
    """Two models on the same positions, float32: sums to divide by `count`, then two extremes."""

    kl_ab: Float[Array, ""]  # KL(a || b)
    kl_ba: Float[Array, ""]
    agreement: Float[Array, ""]
    entropy_a: Float[Array, ""]
    entropy_b: Float[Array, ""]
    ce_a: Float[Array, ""]
    ce_b: Float[Array, ""]
    cosine: Float[Array, ""]  # of the two vectors of logits
    count: Float[Array, ""]
    max_difference: Float[Array, ""]  # of any logit at any position
    min_cosine: Float[Array, ""]  # of any position


def head_comparison(
    hidden_a: Float[Array, "B T D1"],
    head_a: Float[Array, "V1 D1"],
    hidden_b: Float[Array, "B T D2"],
    head_b: Float[Array, "V2 D2"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    spec: HeadSpec,
) -> ComparisonSums:
    """Compares two models' distributions at T = 1, `chunk_tokens` positions at a time."""
    heads = [h[: spec.width].astype(x.dtype) for h, x in ((head_a, hidden_a), (head_b, hidden_b))]

    def chunk(sums, xs):
        h_a, h_b, label, weight = xs
        a, b = _logits(h_a, heads[0], spec), _logits(h_b, heads[1], spec)
        log_a, log_b = _log_softmax(a, 1.0), _log_softmax(b, 1.0)
        same = jnp.argmax(a, axis=-1) == jnp.argmax(b, axis=-1)
        entropies = [-jnp.sum(jnp.exp(x) * x, axis=-1) for x in (log_a, log_b)]
        ce = cross_entropy(a, label), cross_entropy(b, label)
        # Ids that do not exist hold -1e30 on both sides.
        a, b = (jnp.where(x == EXCLUDED, 0.0, x) for x in (a, b))
        norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
        cosine = jnp.sum(a * b, axis=-1) / jnp.maximum(norms, 1e-30)
        values = (kl_divergence(log_a, log_b), kl_divergence(log_b, log_a), same, *entropies,
                  *ce, cosine, jnp.ones_like(weight))  # fmt: skip
        added = [x + jnp.sum(weight * y) for x, y in zip(sums[:-2], values, strict=True)]
        counted = weight != 0
        most = jnp.max(jnp.where(counted, jnp.max(jnp.abs(a - b), axis=-1), 0.0))
        least = jnp.min(jnp.where(counted, cosine, 1.0))
        extremes = jnp.maximum(sums.max_difference, most), jnp.minimum(sums.min_cosine, least)
        sums = dict(zip(ComparisonSums._fields, (*added, *extremes), strict=True))
        return ComparisonSums(**sums), None

    xs = _scan_inputs(hidden_a, hidden_b, labels, weights, spec)
    zero, one = jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)
    start = dict.fromkeys(ComparisonSums._fields, zero) | {"min_cosine": one}
    return jax.lax.scan(chunk, ComparisonSums(**start), xs)[0]
