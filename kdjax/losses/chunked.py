"""The distillation loss of two models' hidden states, a chunk of logits at a time.

Full `[tokens, vocabulary]` logits of student or teacher never exist in training. Without a teacher
(None for its hidden states and head) the loss is the cross-entropy alone, and figures that compare
are None.

Letters: B rows, T positions, D hidden width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kdjax.losses.divergences import (
    cross_entropy,
    kd_parts_and_gradient,
    kl_divergence,
    log_softmax,
)
from kdjax.models.weights import Scaled, mask_padding, unembed


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """What the chunked loss must know; hashable, so that it can be static under jit."""

    temperature: float
    alpha: float
    width: int  # rows of both heads that are used: the smaller of the two
    real_vocab: int  # ids that some token has; padding rows beyond it are excluded on both sides
    chunk_tokens: int  # positions whose logits exist at the same time, over all rows
    divergence: str = "forward_kl"  # a member of DIVERGENCES
    kernels: bool = False  # as `Placement.kernels` says


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


def cut(head: Any, hidden: Array, spec: HeadSpec) -> Any:
    """The rows that are used, as what they are multiplied with; a `Scaled` head stays one."""
    rows = head[: spec.width]
    return rows if isinstance(rows, Scaled) else rows.astype(hidden.dtype)


def _logits(hidden: Array, head: Any, spec: HeadSpec) -> Array:
    return mask_padding(unembed(hidden, head), spec.real_vocab)


def chunked(x: Array, spec: HeadSpec) -> Array:
    """`[B, T, ...]` to `[chunks, B, size, ...]`, T padded with zeros; `joined` undoes it.

    Chunks run along T, so that rows stay where the mesh put them.
    """
    batch, length = x.shape[:2]
    size = min(length, max(1, spec.chunk_tokens // batch))
    chunks = -(-length // size)
    x = jnp.pad(x, ((0, 0), (0, chunks * size - length)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(batch, chunks, size, *x.shape[2:]).swapaxes(0, 1)


def joined(x: Array, length: int) -> Array:
    """`[chunks, B, size, ...]` to `[B, length, ...]`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]


def scan_inputs(
    hidden: tuple[Array | None, ...], weights: Array, *more: Any, spec: HeadSpec
) -> Any:
    """Hidden states, weights and other columns of the positions, in chunks."""
    # A position without weight may hold anything, NaN too; zeros keep it out of 0 * NaN.
    keep = (weights != 0)[..., None]
    hidden = jax.tree.map(lambda x: jnp.where(keep, x, 0), hidden)
    return jax.tree.map(functools.partial(chunked, spec=spec), (hidden, weights, *more))


def added(sums: Any, values: Any, weight: Array) -> Any:
    """Each sum with its values of a chunk; those that are None have nothing to sum."""
    return type(sums)(
        *(a if a is None else a + jnp.sum(weight * b) for a, b in zip(sums, values, strict=True))
    )


_ROWS = (((0,), (0,)), ((), ()))  # what a product sums over: the rows of both sides


def scan_loss(part: Callable[[Any], tuple[Array, Array, Array]], inputs: Any, head: Array,
              start: LossSums, spec: HeadSpec, *, with_gradient: bool) -> Any:  # fmt: skip
    """Sums of the loss, and its gradients to hidden states (in chunks) and head, chunk by chunk.

    `part` makes of a chunk of `inputs` the cross-entropy, the divergence, and the gradient of the
    logits, weighted, in the dtype of the hidden states, which come first of all inputs.
    """

    def chunk(carry, xs):
        sums, d_head = carry
        (hidden, *_), weight, *_ = xs
        ce, kl, g = part(xs)
        loss = spec.alpha * ce + (1 - spec.alpha) * spec.temperature**2 * kl
        sums = added(sums, (loss, ce, kl), weight)
        if not with_gradient:
            return (sums, d_head), None
        d_hidden = jnp.einsum("BTV,VD->BTD", g, head)
        # einsum would take g first, and XLA's CPU backend write all of it out transposed.
        x, y = (rows.reshape(-1, rows.shape[-1]) for rows in (hidden, g))
        d_head += jax.lax.dot_general(x, y, _ROWS, preferred_element_type=jnp.float32).T
        return (sums, d_head), d_hidden

    d_head = jnp.zeros(head.shape if with_gradient else (), jnp.float32)
    (sums, d_head), d_hidden = jax.lax.scan(chunk, (start, d_head), inputs)
    return sums, d_hidden, d_head


def forward_rule(found: Any, student_hidden: Array, student_head: Array) -> Any:
    """What a custom_vjp's forward function returns of `scan_loss`'s results."""
    sums, d_hidden, d_head = found
    d_hidden = joined(d_hidden, student_hidden.shape[1])
    extra = student_head.shape[0] - d_head.shape[0]
    d_head = jnp.pad(d_head, ((0, extra), (0, 0))).astype(student_head.dtype)
    return sums, (d_hidden, d_head)


def backward_rule(residuals: tuple[Array, Array], cotangents: LossSums) -> tuple[Array, ...]:
    """The gradients of `forward_rule`, times the cotangent of the loss."""
    return tuple(x * cotangents.loss.astype(x.dtype) for x in residuals)


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
    head = cut(student_head, student_hidden, spec)
    if teacher_hidden is not None:
        teacher_head = cut(teacher_head, teacher_hidden, spec)
    options: dict[str, Any] = dict(
        temperature=spec.temperature, alpha=spec.alpha, divergence=spec.divergence,
        real=spec.real_vocab, fused=spec.kernels,
    )  # fmt: skip

    def part(xs):
        (h_s, h_t), weight, label = xs
        s = unembed(h_s, head)
        t = s if h_t is None else unembed(h_t, teacher_head)  # no teacher: nothing to learn
        ce, kl, g = kd_parts_and_gradient(s, t, label, **options)
        return ce, kl, (g * weight[..., None]).astype(h_s.dtype)

    zero = jnp.zeros((), jnp.float32)
    start = LossSums(zero, zero, None if teacher_hidden is None else zero)
    xs = scan_inputs((student_hidden, teacher_hidden), weights, labels, spec=spec)
    return scan_loss(part, xs, head, start, spec, with_gradient=with_gradient)


def _head_loss_forward(student_hidden, student_head, *rest):
    found = _head_loss(student_hidden, student_head, *rest, with_gradient=True)
    return forward_rule(found, student_hidden, student_head)


def _head_loss_backward(spec, residuals, cotangents):
    return (*backward_rule(residuals, cotangents), None, None, None, None)


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
    head = cut(student_head, student_hidden, spec)
    theirs: Any = teacher_head
    if teacher_hidden is not None:
        theirs = cut(theirs, teacher_hidden, spec)

    def chunk(sums, xs):
        (h_s, h_t), weight, label = xs
        s = _logits(h_s, head, spec)
        t = s if h_t is None else _logits(h_t, theirs, spec)
        soft = [log_softmax(x, spec.temperature) for x in (t, s)]
        hard = [log_softmax(x, 1.0) for x in (t, s)]
        same = jnp.argmax(s, axis=-1) == jnp.argmax(t, axis=-1)
        values = (cross_entropy(s, label), cross_entropy(t, label), kl_divergence(*soft),
                  kl_divergence(*hard), same, jnp.ones_like(weight))  # fmt: skip
        return added(sums, values, weight), None

    xs = scan_inputs((student_hidden, teacher_hidden), weights, labels, spec=spec)
    zero = jnp.zeros((), jnp.float32)
    compared = None if teacher_hidden is None else zero
    start = EvalSums(zero, compared, compared, compared, compared, zero)
    return jax.lax.scan(chunk, start, xs)[0]
