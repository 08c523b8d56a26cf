"""The distillation loss of two models' hidden states, a chunk of logits at a time.

Full `[tokens, vocabulary]` logits of student or teacher never exist in training. Without a teacher
(None for its hidden states and head) the loss is the cross-entropy alone, and figures that compare
the two models are None.

Letters: B rows, T positions, D hidden width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kdjax.losses.divergences import acceptance, forward_kl
from kdjax.losses.kd import WeighedLoss, shared_parts_and_gradient
from kdjax.models.kernels.common import EXCLUDED
from kdjax.models.weights import Scaled, SomeRows, mask_padding, unembed


class Given(NamedTuple):
    """Stands in for a head: the hidden states already are logits `[B, T, V]`."""


class HeadMixture(NamedTuple):
    """Heads of several models, whose hidden states are a tuple, their shares `[B, T, N]` last.

    Together they predict the mixture of their probabilities at T = 1.
    """

    heads: tuple[Any, ...]


# A matrix [V D] of numbers, or of float8 with a scale for each row, or of some rows; or none; or
# several.
Head = Array | Scaled | SomeRows | Given | HeadMixture


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Facts of a head for the chunked loss; hashable, so that it can be static under jit."""

    loss: Any  # a `KDLoss`; within a chunk it may be a `WeighedLoss`
    width: int  # rows of both heads that are used: the smaller of the two
    real_vocab: int  # ids that some token has; padding rows beyond it are excluded on both sides
    chunk_tokens: int  # positions whose logits exist at the same time, on one device
    kernels: bool = False  # as `Placement.kernels` says
    frozen: int = 0  # columns, the first, of the student's head that get no gradient
    shared: int = 0  # ids, the first, that the teacher's head has too; 0: it has all of them
    accepts: bool = False  # whether the share of accepted drafts is computed by position


class Weighing(NamedTuple):
    """Weights that differ by position, float32 `[B, T]`: see `WeighedLoss`."""

    position: Array  # of the whole loss: a batch's `weights`
    ce: Array
    divergence: Array
    temperature: Array | None = None  # None: the loss's, and no schedule changes its alpha
    compared: Array | None = None  # 1 where the divergence counts, 0 where the text alone does
    known: Array | None = None  # 1 where the student has the label, 0 elsewhere; None: everywhere


Weights = Array | Weighing


def read_weights(weights: Weights, spec: HeadSpec) -> tuple[Array, HeadSpec]:
    """Returns the weight of each position of a chunk, and the spec with this chunk's loss."""
    if not isinstance(weights, Weighing):
        return weights, spec
    if weights.temperature is None:
        loss = spec.loss
        parts = loss.divergence, weights.ce, weights.divergence, loss.temperature
        has_ce = loss.has_ce or weights.compared is not None
        weighed = WeighedLoss(*parts, has_ce, loss.has_divergence)
        return weights.position, dataclasses.replace(spec, loss=weighed)
    # Padding of the last chunk has zeros.
    temperatures = jnp.where(weights.temperature > 0, weights.temperature, 1)
    loss = WeighedLoss(spec.loss.divergence, weights.ce, weights.divergence, temperatures)
    # The kernels compile the temperature in as a constant.
    return weights.position, dataclasses.replace(spec, loss=loss, kernels=False)


class LossSums(NamedTuple):
    """Sums over weighted positions, float32: divide by the count of the whole optimizer step."""

    loss: Float[Array, ""]
    ce: Float[Array, ""]
    divergence: Float[Array, ""] | None  # the trained one, at temperature T, without T^2
    extra: dict[str, Array] | None = None  # of `layers.LayerLoss`, by name, without their weights
    accepted: Float[Array, "B T"] | None = None  # no sum: by position, see `HeadSpec.accepts`


Sums = TypeVar("Sums", bound=tuple[Any, ...])


def cut_head(head: Head, hidden: Any, spec: HeadSpec) -> Head:
    """Cuts a head to its used rows; numbers (not `Scaled`) in the dtype of the hidden states."""
    if isinstance(head, Given):
        return head
    if isinstance(head, HeadMixture):
        pairs = zip(head.heads, hidden, strict=False)
        return head._replace(heads=tuple(cut_head(one, states, spec) for one, states in pairs))
    rows = head[: spec.width]
    return rows if isinstance(rows, Scaled) else rows.astype(hidden.dtype)


def compute_logits(hidden: Any, head: Head, spec: HeadSpec) -> Float[Array, "B T V"]:
    """Float32 logits of a cut head; EXCLUDED for ids that given logits lack.

    For several heads, the log-probabilities of their mixture.
    """
    if isinstance(head, HeadMixture):
        said = [
            jax.nn.log_softmax(mask_padding(compute_logits(x, one, spec), spec.real_vocab), axis=-1)
            for x, one in zip(hidden, head.heads, strict=False)
        ]
        shares = hidden[-1]
        said = [
            one + jnp.maximum(jnp.log(shares[..., n, None]), EXCLUDED) for n, one in enumerate(said)
        ]
        return jnp.maximum(functools.reduce(jnp.logaddexp, said), EXCLUDED)
    if not isinstance(head, Given):
        return unembed(hidden, head)
    logits = jnp.maximum(hidden[..., : spec.width].astype(jnp.float32), EXCLUDED)
    padding = (0, 0), (0, 0), (0, spec.width - logits.shape[-1])
    return jnp.pad(logits, padding, constant_values=EXCLUDED)


def _cut_teacher(head: Head | None, hidden: Any, spec: HeadSpec) -> Head | None:
    return None if head is None or hidden is None else cut_head(head, hidden, spec)


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


def zero_unweighted(hidden: Any, weights: Float[Array, "B T"]) -> Any:
    """Sets hidden states `[B, T, D]` to zero where a position has no weight.

    They may be anything there, even NaN; zeros avoid 0 * NaN.
    """
    keep = (weights != 0)[..., None]
    return jax.tree.map(lambda x: jnp.where(keep, x, 0), hidden)


def split_inputs(hidden: tuple[Any, ...], weights: Weights, *columns: Any, spec: HeadSpec) -> Any:
    """Splits hidden states, weights and other columns, trees of `[B, T, ...]`, into chunks."""
    position = weights.position if isinstance(weights, Weighing) else weights
    hidden = zero_unweighted(hidden, position)
    return jax.tree.map(functools.partial(split_chunks, spec=spec), (hidden, weights, *columns))


def add_sums(sums: Sums, values: tuple[Array | None, ...], weight: Array) -> Sums:
    """Adds a chunk's values, weighted, to the sums; a sum that is None stays None.

    At weight 0 a user's divergence may be NaN: its two sides are equal there.
    """

    def add(total: Array | None, value: Array | None) -> Array | None:
        if total is None or value is None:
            return None
        return total + jnp.sum(weight * jnp.where(weight != 0, value, 0))

    make: Any = type(sums)
    return make(*map(add, sums, values))


_ROWS = (((0,), (0,)), ((), ()))  # a product that sums over the rows of both sides


class ChunkParts(NamedTuple):
    """Losses, and the gradient of the logits, of a chunk of C positions."""

    ce: Float[Array, "B C"]
    divergence: Float[Array, "B C"]
    gradient: Float[Array, "B C V"]  # of the logits
    accepted: Float[Array, "B C"] | None = None  # see `HeadSpec.accepts`


def scan_loss(
    compute_parts: Callable[[Any], ChunkParts],
    inputs: Any,
    head: Array,
    start: LossSums,
    spec: HeadSpec,
    *,
    with_gradient: bool,
) -> tuple[LossSums, Array | None, Array]:
    """Sums the loss, and computes its gradients to hidden states (in chunks) and head, by chunks.

    `compute_parts` returns, for a chunk of `inputs`, the cross-entropy, the divergence, and the
    weighted gradient of the logits in the dtype of the hidden states, the first of the inputs.
    """

    def add_chunk(carry: tuple[LossSums, Array], xs: Any) -> tuple[tuple[LossSums, Array], Any]:
        sums, d_head = carry
        (hidden, *_), weights, *_ = xs
        weight, own = read_weights(weights, spec)
        ce, divergence, g, accepted = compute_parts(xs)
        loss = own.loss.combine(ce, divergence)
        if isinstance(weights, Weighing) and weights.compared is not None:
            divergence = jnp.where(weights.compared != 0, divergence, 0)
        if isinstance(weights, Weighing) and weights.known is not None:
            ce = jnp.where(weights.known != 0, ce, 0)
        sums = add_sums(sums, (loss, ce, divergence), weight)
        if not with_gradient:
            return (sums, d_head), (None, accepted)
        d_hidden = jnp.einsum("BTV,VD->BTD", g, head)
        # einsum would take g first, and XLA's CPU backend would write out its transpose.
        x, y = (rows.reshape(-1, rows.shape[-1]) for rows in (hidden, g))
        trained = x[:, spec.frozen :]
        d_head += jax.lax.dot_general(trained, y, _ROWS, preferred_element_type=jnp.float32).T
        return (sums, d_head), (d_hidden, accepted)

    d_head = jnp.zeros(head[:, spec.frozen :].shape if with_gradient else (), jnp.float32)
    (sums, d_head), (d_hidden, accepted) = jax.lax.scan(add_chunk, (start, d_head), inputs)
    return sums._replace(accepted=accepted), d_hidden, d_head


def define_gradient(loss: Any, scan: Callable[..., tuple[LossSums, Any, Array]]) -> None:
    """Defines the gradients of `loss`, a custom_vjp whose last argument is static, by `scan`.

    `scan` takes the arguments of `loss`, the student's hidden states and head first, and returns
    what `scan_loss` does. Only the cotangent of the sum `loss` counts.
    """
    (others,) = loss.nondiff_argnums

    def forward(*arguments: Any) -> tuple[LossSums, tuple[Array, Array | None]]:
        hidden, head, *_, spec = arguments
        sums, d_hidden, d_head = scan(*arguments, with_gradient=True)
        if not d_head.size:
            return sums, (join_chunks(d_hidden, hidden.shape[1]), None)
        d_head = jnp.pad(d_head, ((0, head.shape[0] - d_head.shape[0]), (spec.frozen, 0)))
        return sums, (join_chunks(d_hidden, hidden.shape[1]), d_head.astype(head.dtype))

    def backward(_: HeadSpec, gradients: tuple[Array, Any], cotangents: LossSums) -> tuple:
        student = [x if x is None else x * cotangents.loss.astype(x.dtype) for x in gradients]
        return (*student, *[None] * (others - len(student)))

    loss.defvjp(forward, backward)


def add_confidence(
    sums: LossSums, confidence: Float[Array, "B T"] | None, weights: Array, amount: float
) -> LossSums:
    """Adds the loss of a student's `confidence`, the logit of a draft's chance to be accepted.

    It is the binary cross-entropy from the share that the teacher accepts, which gets no gradient.
    Sums without this share, or a student without confidence, stay as they are.
    """
    accepted, sums = sums.accepted, sums._replace(accepted=None)
    if confidence is None or accepted is None:
        return sums
    counts = weights != 0
    logits = jnp.where(counts, confidence, 0)
    missed = jax.nn.softplus(logits) - jax.lax.stop_gradient(accepted) * logits
    total = jnp.sum(jnp.where(counts, weights * missed, 0))
    extra = {**(sums.extra or {}), "confidence": total}
    return sums._replace(loss=sums.loss + amount * total, extra=extra)


def _accept(s: Array, t: Array, *, real: int) -> Float[Array, "B C"]:
    """The share of drafts from logits `s` that a teacher with logits `t` accepts, at T = 1."""
    return acceptance(*(jax.nn.log_softmax(x[..., :real], axis=-1) for x in (t, s)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def head_loss(
    student_hidden: Float[Array, "B T D1"],
    student_head: Float[Array, "V1 D1"],
    teacher_hidden: Float[Array, "B T D2"] | tuple[Array, ...] | None,
    teacher_head: Float[Array, "V2 D2"] | Scaled | Given | HeadMixture | None,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"] | Weighing,
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

    def compute_parts(xs: Any) -> ChunkParts:
        (h_s, h_t), weights, label = xs
        weight, own = read_weights(weights, spec)
        # Without a teacher the student is compared with itself, for any divergence.
        loss = own.loss if theirs is not None else own.loss.without_teacher()
        s = unembed(h_s, head)
        t = s if theirs is None else compute_logits(h_t, theirs, spec)
        shared = spec.real_vocab if theirs is None else spec.shared or spec.real_vocab
        ce, divergence, g = shared_parts_and_gradient(
            s, t, label, loss, real=spec.real_vocab, shared=shared, fused=own.kernels
        )
        g = g * weight[..., None]
        if loss.divergence != forward_kl:  # its gradient is finite if both sides are
            g = jnp.where(weight[..., None] != 0, g, 0)
        return ChunkParts(ce, divergence, g.astype(h_s.dtype), accept(s, t) if accepts else None)

    accepts = spec.accepts and theirs is not None
    accept = functools.partial(_accept, real=spec.real_vocab)
    zero = jnp.zeros((), jnp.float32)
    start = LossSums(zero, zero, None if teacher_hidden is None else zero)
    xs = split_inputs((student_hidden, teacher_hidden), weights, labels, spec=spec)
    scanned = scan_loss(compute_parts, xs, head, start, spec, with_gradient=with_gradient)
    sums, d_hidden, d_head = scanned
    if sums.accepted is not None:
        sums = sums._replace(accepted=join_chunks(sums.accepted, student_hidden.shape[1]))
    return sums, d_hidden, d_head


define_gradient(head_loss, _scan_head_loss)
