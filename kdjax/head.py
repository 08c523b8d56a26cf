"""The distillation loss of two models' hidden states, a chunk of logits at a time.

Full `[tokens, vocabulary]` logits of student or teacher never exist in training. Without a teacher
(None for its hidden states and head) the loss is the cross-entropy alone, and figures that compare
are None.

Letters: B rows, T positions, D hidden width, V vocabulary.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kdjax.losses import (
    EXCLUDED,
    cross_entropy,
    kd_parts_and_gradient,
    kl_divergence,
    log_softmax,
)
from kdjax.models.weights import Scaled, unembedded


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
    kl: Float[Array, ""] | None  # the divergence trained on, at temperature T, without T^2


class EvalSums(NamedTuple):
    """Sums over weighted positions, float32: divide by `count`."""

    student_ce: Float[Array, ""]
    teacher_ce: Float[Array, ""] | None
    kl_temperature: Float[Array, ""] | None
    kl: Float[Array, ""] | None  # at T = 1, so that runs with different temperatures compare
    agreement: Float[Array, ""] | None  # positions where both rank the same id first
    count: Float[Array, ""]


def _cut(head: Any, hidden: Array, spec: HeadSpec) -> Any:
    """The rows that are used, as what they are multiplied with; a `Scaled` head stays one."""
    rows = head[: spec.width]
    return rows if isinstance(rows, Scaled) else rows.astype(hidden.dtype)


def _logits(hidden: Array, head: Any, spec: HeadSpec) -> Array:
    logits = unembedded(hidden, head)
    if spec.real_vocab >= spec.width:
        return logits
    # Masked and not sliced: 151,936 columns keep the matrix product aligned, 151,665 do not.
    exists = jnp.arange(spec.width, dtype=jnp.int32)[None, None] < spec.real_vocab
    return jnp.where(exists, logits, EXCLUDED)


def chunked(x: Array, chunks: int, size: int) -> Array:
    """`[B, T, ...]` to `[chunks, B, size, ...]`, T padded with zeros.

    Chunks run along T, so that rows stay where the mesh put them.
    """
    pad = chunks * size - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], chunks, size, *x.shape[2:]).swapaxes(0, 1)


def _scan_inputs(
    student: Array, teacher: Array | None, labels: Array, weights: Array, spec: HeadSpec
):
    batch, length = labels.shape
    size = min(length, max(1, spec.chunk_tokens // batch))
    chunks = -(-length // size)
    # A position without weight may hold anything, NaN too; zeros keep it out of 0 * NaN.
    keep = (weights != 0)[..., None]
    hidden = [x if x is None else jnp.where(keep, x, 0) for x in (student, teacher)]
    columns = (*hidden, labels, weights)
    return tuple(x if x is None else chunked(x, chunks, size) for x in columns)


def _added(sums: Any, values: Any, weight: Array) -> Any:
    """Each sum with its values of a chunk; those that are None have nothing to sum."""
    return type(sums)(
        *(a if a is None else a + jnp.sum(weight * b) for a, b in zip(sums, values, strict=True))
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def head_loss(
    student_hidden: Float[Array, "B T D1"],
    student_head: Float[Array, "V1 D1"],
    teacher_hidden: Float[Array, "B T D2"] | None,
    teacher_head: Float[Array, "V2 D2"] | Scaled | None,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    spec: HeadSpec,
) -> LossSums:
    """Summed distillation loss from hidden states, `chunk_tokens` positions of logits at a time.

    Only `loss` carries a gradient, to the student's hidden states and head. It is computed in the
    forward scan from the analytic logit gradient, so logits are made once and never stored, and
    the head's gradient accumulates in float32: in bf16 its error grows from 0.2% at one chunk to
    1.6% at 256. `weights` is 0 where a position does not train. Without a teacher alpha must be 1.
    """
    return _head_loss(student_hidden, student_head, teacher_hidden, teacher_head, labels,
                      weights, spec, with_gradient=False)[0]  # fmt: skip


def _head_loss(student_hidden, student_head, teacher_hidden, teacher_head, labels, weights, spec,
               *, with_gradient: bool):  # fmt: skip
    head = student_head[: spec.width].astype(student_hidden.dtype)
    if teacher_hidden is not None:
        teacher_head = _cut(teacher_head, teacher_hidden, spec)
    options: dict[str, Any] = dict(
        temperature=spec.temperature, alpha=spec.alpha, divergence=spec.divergence
    )

    def chunk(carry, xs):
        sums, d_head = carry
        h_s, h_t, label, weight = xs
        s = _logits(h_s, head, spec)
        t = s if h_t is None else _logits(h_t, teacher_head, spec)  # no teacher: nothing to learn
        ce, kl, g = kd_parts_and_gradient(s, t, label, **options)
        loss = spec.alpha * ce + (1 - spec.alpha) * spec.temperature**2 * kl
        sums = _added(sums, (loss, ce, kl), weight)
        if not with_gradient:
            return (sums, d_head), None
        g = (g * weight[..., None]).astype(h_s.dtype)
        d_hidden = jnp.einsum("BTV,VD->BTD", g, head)
        d_head += jnp.einsum("BTV,BTD->VD", g, h_s, preferred_element_type=jnp.float32)
        return (sums, d_head), d_hidden

    zero = jnp.zeros((), jnp.float32)
    start = LossSums(zero, zero, None if teacher_hidden is None else zero)
    d_head = jnp.zeros(head.shape if with_gradient else (), jnp.float32)
    xs = _scan_inputs(student_hidden, teacher_hidden, labels, weights, spec)
    (sums, d_head), d_hidden = jax.lax.scan(chunk, (start, d_head), xs)
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
    teacher_hidden: Float[Array, "B T D2"] | None,
    teacher_head: Float[Array, "V2 D2"] | Scaled | None,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    spec: HeadSpec,
) -> EvalSums:
    """Held-out sums of student against teacher, `chunk_tokens` positions of logits at a time."""
    head = student_head[: spec.width].astype(student_hidden.dtype)
    theirs: Any = teacher_head
    if teacher_hidden is not None:
        theirs = _cut(theirs, teacher_hidden, spec)

    def chunk(sums, xs):
        h_s, h_t, label, weight = xs
        s = _logits(h_s, head, spec)
        t = s if h_t is None else _logits(h_t, theirs, spec)
        soft = [log_softmax(x, spec.temperature) for x in (t, s)]
        hard = [log_softmax(x, 1.0) for x in (t, s)]
        same = jnp.argmax(s, axis=-1) == jnp.argmax(t, axis=-1)
        values = (cross_entropy(s, label), cross_entropy(t, label), kl_divergence(*soft),
                  kl_divergence(*hard), same, jnp.ones_like(weight))  # fmt: skip
        return _added(sums, values, weight), None

    xs = _scan_inputs(student_hidden, teacher_hidden, labels, weights, spec)
    zero = jnp.zeros((), jnp.float32)
    compared = None if teacher_hidden is None else zero
    start = EvalSums(zero, compared, compared, compared, compared, zero)
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
        log_a, log_b = log_softmax(a, 1.0), log_softmax(b, 1.0)
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
