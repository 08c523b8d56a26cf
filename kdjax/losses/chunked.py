"""The distillation loss of two models' hidden states, a chunk of logits at a time.

Full `[tokens, vocabulary]` logits of student or teacher never exist in training. Without a teacher
(None for its hidden states and head) the loss is the cross-entropy alone, and figures that compare
are None.

Letters: B rows, T positions, D hidden width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kdjax.losses.divergences import acceptance, forward_kl, kl_divergence, log_softmax
from kdjax.losses.kd import KDLoss, cross_entropy, kd_parts_and_gradient
from kdjax.models.weights import Scaled, mask_padding, unembed

Head = Array | Scaled  # a matrix [V D] of numbers, or of float8 with a scale a row


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """What the chunked loss must know; hashable, so that it can be static under jit."""

    loss: KDLoss
    width: int  # rows of both heads that are used: the smaller of the two
    real_vocab: int  # ids that some token has; padding rows beyond it are excluded on both sides
    chunk_tokens: int  # positions whose logits exist at the same time, on one device
    kernels: bool = False  # as `Placement.kernels` says


class LossSums(NamedTuple):
    """Sums over weighted positions, float32: divide by the count of the whole optimizer step."""

    loss: Float[Array, ""]
    ce: Float[Array, ""]
    divergence: Float[Array, ""] | None  # the one trained on, at temperature T, without T^2


class EvalSums(NamedTuple):
    """Sums over weighted positions, float32: divide by `count`."""

    student_ce: Float[Array, ""]
    teacher_ce: Float[Array, ""] | None
    divergence: Float[Array, ""] | None  # the one trained on, at temperature T, without T^2
    kl: Float[Array, ""] | None  # forward, at T = 1: runs of different losses compare
    agreement: Float[Array, ""] | None  # positions where both rank the same id first
    acceptance: Float[Array, ""] | None  # drafted tokens that the teacher would keep, at T = 1
    count: Float[Array, ""]


Sums = TypeVar("Sums", bound=tuple[Array | None, ...])


def cut_head(head: Head, hidden: Float[Array, "B T D"], spec: HeadSpec) -> Head:
    """The rows that are used; numbers, not `Scaled`, in the dtype of the hidden states."""
    rows = head[: spec.width]
    return rows if isinstance(rows, Scaled) else rows.astype(hidden.dtype)


def _cut_teacher(head: Head | None, hidden: Array | None, spec: HeadSpec) -> Head | None:
    return None if head is None or hidden is None else cut_head(head, hidden, spec)


def _logits(hidden: Array, head: Head, spec: HeadSpec) -> Array:
    return mask_padding(unembed(hidden, head), spec.real_vocab)


def split_chunks(x: Array, spec: HeadSpec) -> Array:
    """`[B, T, ...]` to `[chunks, B, size, ...]`, T padded with zeros; `join_chunks` undoes it.

    Chunks run along T, so that rows stay where the mesh put them.
    """
    batch, length = x.shape[:2]
    size = min(length, max(1, spec.chunk_tokens // batch))
    chunks = -(-length // size)
    x = jnp.pad(x, ((0, 0), (0, chunks * size - length)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(batch, chunks, size, *x.shape[2:]).swapaxes(0, 1)


def join_chunks(x: Array, length: int) -> Array:
    """`[chunks, B, size, ...]` to `[B, length, ...]`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]


def split_inputs(
    hidden: tuple[Array | None, ...], weights: Array, *columns: Any, spec: HeadSpec
) -> Any:
    """Hidden states, weights and other columns, trees of `[B, T, ...]`, in chunks."""
    # A position without weight may hold anything, NaN too; zeros keep it out of 0 * NaN.
    keep = (weights != 0)[..., None]
    hidden = jax.tree.map(lambda x: jnp.where(keep, x, 0), hidden)
    return jax.tree.map(functools.partial(split_chunks, spec=spec), (hidden, weights, *columns))


def add_sums(sums: Sums, values: tuple[Array | None, ...], weight: Array) -> Sums:
    """Adds a chunk's values, weighted, to the sums; a sum that is None stays None.

    Where nothing is weighed a divergence of one's own may be NaN: its two sides are equal there.
    """

    def add(total: Array | None, value: Array | None) -> Array | None:
        if total is None or value is None:
            return None
        return total + jnp.sum(weight * jnp.where(weight != 0, value, 0))

    make: Any = type(sums)
    return make(*map(add, sums, values))


_ROWS = (((0,), (0,)), ((), ()))  # what a product sums over: the rows of both sides

# Of a chunk: the cross-entropy [B C], the divergence [B C], and the logits' gradient [B C V].
ChunkParts = tuple[Array, Array, Array]


def scan_loss(
    compute_parts: Callable[[Any], ChunkParts],
    inputs: Any,
    head: Array,
    start: LossSums,
    spec: HeadSpec,
    *,
    with_gradient: bool,
) -> tuple[LossSums, Array | None, Array]:
    """Sums of the loss, and its gradients to hidden states (in chunks) and head, chunk by chunk.

    `compute_parts` makes of a chunk of `inputs` the cross-entropy, the divergence, and the gradient
    of the logits, weighted, in the dtype of the hidden states, which come first of all inputs.
    """

    def add_chunk(carry: tuple[LossSums, Array], xs: Any) -> tuple[tuple[LossSums, Array], Any]:
        sums, d_head = carry
        (hidden, *_), weight, *_ = xs
        ce, divergence, g = compute_parts(xs)
        loss = spec.loss.combine(ce, divergence)
        sums = add_sums(sums, (loss, ce, divergence), weight)
        if not with_gradient:
            return (sums, d_head), None
        d_hidden = jnp.einsum("BTV,VD->BTD", g, head)
        # einsum would take g first, and XLA's CPU backend write all of it out transposed.
        x, y = (rows.reshape(-1, rows.shape[-1]) for rows in (hidden, g))
        d_head += jax.lax.dot_general(x, y, _ROWS, preferred_element_type=jnp.float32).T
        return (sums, d_head), d_hidden

    d_head = jnp.zeros(head.shape if with_gradient else (), jnp.float32)
    (sums, d_head), d_hidden = jax.lax.scan(add_chunk, (start, d_head), inputs)
    return sums, d_hidden, d_head


def define_gradient(loss: Any, scan: Callable[..., tuple[LossSums, Any, Array]]) -> None:
    """Gives `loss`, a custom_vjp whose last argument is static, the gradients that `scan` computes.

    `scan` takes the arguments of `loss`, the student's hidden states and head first, and returns
    what `scan_loss` does. Only the cotangent of the sum `loss` counts.
    """
    (others,) = loss.nondiff_argnums

    def forward(*arguments: Any) -> tuple[LossSums, tuple[Array, Array]]:
        hidden, head, *_ = arguments
        sums, d_hidden, d_head = scan(*arguments, with_gradient=True)
        d_head = jnp.pad(d_head, ((0, head.shape[0] - d_head.shape[0]), (0, 0)))
        return sums, (join_chunks(d_hidden, hidden.shape[1]), d_head.astype(head.dtype))

    def backward(_: HeadSpec, gradients: tuple[Array, Array], cotangents: LossSums) -> tuple:
        student = [x * cotangents.loss.astype(x.dtype) for x in gradients]
        return (*student, *[None] * (others - len(student)))

    loss.defvjp(forward, backward)


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
    inputs = student_hidden, student_head, teacher_hidden, teacher_head, labels, weights
    return _scan_head_loss(*inputs, spec, with_gradient=False)[0]


def _scan_head_loss(*arguments: Any, with_gradient: bool) -> tuple[LossSums, Array | None, Array]:
    """`scan_loss` of the arguments of `head_loss`."""
    student_hidden, student_head, teacher_hidden, teacher_head, labels, weights, spec = arguments
    head = student_head[: spec.width].astype(student_hidden.dtype)
    theirs = _cut_teacher(teacher_head, teacher_hidden, spec)
    # Without a teacher the student stands beside itself, whatever the divergence.
    loss = spec.loss if theirs is not None else KDLoss(alpha=spec.loss.alpha)

    def compute_parts(xs: Any) -> ChunkParts:
        (h_s, h_t), weight, label = xs
        s = unembed(h_s, head)
        t = s if theirs is None else unembed(h_t, theirs)
        ce, divergence, g = kd_parts_and_gradient(
            s, t, label, loss, real=spec.real_vocab, fused=spec.kernels
        )
        g = g * weight[..., None]
        if loss.divergence != forward_kl:  # whose gradient is finite wherever its sides are
            g = jnp.where(weight[..., None] != 0, g, 0)
        return ce, divergence, g.astype(h_s.dtype)

    zero = jnp.zeros((), jnp.float32)
    start = LossSums(zero, zero, None if teacher_hidden is None else zero)
    xs = split_inputs((student_hidden, teacher_hidden), weights, labels, spec=spec)
    return scan_loss(compute_parts, xs, head, start, spec, with_gradient=with_gradient)


define_gradient(head_loss, _scan_head_loss)


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
    head = cut_head(student_head, student_hidden, spec)
    theirs = _cut_teacher(teacher_head, teacher_hidden, spec)
    temperature, divergence = spec.loss.temperature, spec.loss.divergence
    # The forward KL may see ids that do not exist, as -1e30: its terms of them are exactly 0.
    seen = None if divergence == forward_kl else spec.real_vocab

    def add_chunk(sums: EvalSums, xs: Any) -> tuple[EvalSums, None]:
        (h_s, h_t), weight, label = xs
        s = _logits(h_s, head, spec)
        t = s if theirs is None else _logits(h_t, theirs, spec)
        soft = [log_softmax(x[..., :seen], temperature) for x in (t, s)]
        hard = [log_softmax(x, 1.0) for x in (t, s)]
        same = jnp.argmax(s, axis=-1) == jnp.argmax(t, axis=-1)
        ces = cross_entropy(s, label), cross_entropy(t, label)
        kept = acceptance(*hard)
        values = (*ces, divergence(*soft), kl_divergence(*hard), same, kept, jnp.ones_like(weight))
        return add_sums(sums, values, weight), None

    xs = split_inputs((student_hidden, teacher_hidden), weights, labels, spec=spec)
    zero = jnp.zeros((), jnp.float32)
    compared = None if teacher_hidden is None else zero
    start = EvalSums(zero, compared, compared, compared, compared, compared, zero)
    return jax.lax.scan(add_chunk, start, xs)[0]
