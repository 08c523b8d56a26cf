"""Figures of one or two models at every position, a chunk of logits at a time.

The caller passes hidden states (of packed rows, of a cache, or of one text) and a function that
computes figures from a chunk's logits. Full `[tokens, vocabulary]` logits never exist.

Letters: B rows, T positions, C positions of a chunk, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kdjax.losses.chunked import (
    Given,
    Head,
    HeadMixture,
    HeadSpec,
    add_sums,
    compute_logits,
    join_chunks,
    split_chunks,
    zero_unweighted,
)
from kdjax.losses.divergences import acceptance, forward_kl, kl_divergence, log_softmax
from kdjax.losses.kd import cross_entropy
from kdjax.models.weights import Scaled, SomeRows, mask_padding

# Hidden states [B T D] and head [V D], as `chunked.compute_logits` takes them; None: no model.
State = tuple[Any, Head | None]
Carry = TypeVar("Carry")
COMPARED_CHUNK = 256  # positions of a chunk where a command compares models; plans count on it


def scan_positions(
    read_chunk: Callable[..., tuple[Carry, Any]],
    start: Carry,
    states: Sequence[State],
    *columns: Any,
    spec: HeadSpec,
) -> tuple[Carry, Any]:
    """Scans all chunks from the carry `start`; returns the last carry and all values, stacked.

    `read_chunk(carry, logits, *columns)` returns the next carry and a chunk's values, any tree.
    `logits` holds each model's float32 `[B, C, V]`, None for a missing model; ids that do not
    exist have -1e30, or are absent if `spec.width` leaves them out. `columns` are trees of
    `[B, T, ...]`. The last chunk is filled up with zeros.
    """
    heads = [_cast(*state) for state in states]

    def read_logits(hidden: Any, head: Any) -> Array:
        return compute_logits(hidden, _cut(head, spec.width), spec)

    def step(carry: Carry, xs: Any) -> tuple[Carry, Any]:
        hidden, *columns = xs
        logits = [
            None if h is None else mask_padding(read_logits(h, head), spec.real_vocab)
            for h, head in zip(hidden, heads, strict=True)
        ]
        return read_chunk(carry, logits, *columns)

    inputs = [hidden for hidden, _ in states], *columns
    return jax.lax.scan(step, start, jax.tree.map(lambda x: split_chunks(x, spec), inputs))


def _cut(head: Any, width: int) -> Any:
    if isinstance(head, HeadMixture):
        return head._replace(heads=tuple(_cut(one, width) for one in head.heads))
    return head if isinstance(head, Given) else head[:width]


def _cast(hidden: Any, head: Head | None) -> Any:
    """Casts a head to the dtype of the hidden states. Cutting before the loop would copy it.

    On a CPU the copy took a third of the memory of two heads of 5,000 float32 rows.
    """
    if isinstance(head, HeadMixture):
        return head._replace(heads=tuple(map(_cast, hidden, head.heads)))
    if hidden is None or head is None or isinstance(head, Scaled | Given):
        return head
    return head.astype(hidden.dtype)


def read_positions(
    compute_figures: Callable[..., Any], states: Sequence[State], *columns: Any, spec: HeadSpec
) -> Any:
    """Joins the trees `[B, C, ...]` of `compute_figures(logits, *columns)` to `[B, T, ...]`.

    All other arguments are as for `scan_positions`.
    """

    def read_chunk(_: None, *chunk: Any) -> tuple[None, Any]:
        return None, compute_figures(*chunk)

    _, values = scan_positions(read_chunk, None, states, *columns, spec=spec)
    length = jax.tree.leaves(columns)[0].shape[1]
    return jax.tree.map(lambda x: join_chunks(x, length), values)


class EvalSums(NamedTuple):
    """Sums over weighted positions, float32: divide by `count`."""

    student_ce: Float[Array, ""]
    teacher_ce: Float[Array, ""] | None
    divergence: Float[Array, ""] | None  # the trained one, at temperature T, without T^2
    kl: Float[Array, ""] | None  # forward, at T = 1: runs of different losses compare
    agreement: Float[Array, ""] | None  # positions where both rank the same id first
    acceptance: Float[Array, ""] | None  # drafted tokens that the teacher would accept, at T = 1
    count: Float[Array, ""]


def head_evaluation(
    student_hidden: Float[Array, "B T D1"],
    student_head: Float[Array, "V1 D1"],
    teacher_hidden: Float[Array, "B T D2"] | tuple[Array, ...] | None,
    teacher_head: Float[Array, "V2 D2"] | Scaled | Given | HeadMixture | None,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    spec: HeadSpec,
) -> EvalSums:
    """Held-out sums of student against teacher, `chunk_tokens` positions of logits at a time."""
    temperature, divergence = spec.loss.temperature, spec.loss.divergence
    # The forward KL may see ids that do not exist, as -1e30: its terms of them are exactly 0.
    seen = None if divergence == forward_kl else spec.real_vocab

    def add_chunk(
        sums: EvalSums, logits: Sequence[Any], label: Array, weight: Array
    ) -> tuple[EvalSums, None]:
        s, t = logits if teacher_hidden is not None else (logits[0], logits[0])
        soft = [log_softmax(x[..., :seen], temperature) for x in (t, s)]
        hard = [log_softmax(x, 1.0) for x in (t, s)]
        same = jnp.argmax(s, axis=-1) == jnp.argmax(t, axis=-1)
        ces = cross_entropy(s, label), cross_entropy(t, label)
        kept = acceptance(*hard)
        values = (*ces, divergence(*soft), kl_divergence(*hard), same, kept, jnp.ones_like(weight))
        return add_sums(sums, values, weight), None

    hidden = zero_unweighted((student_hidden, teacher_hidden), weights)
    zero = jnp.zeros((), jnp.float32)
    compared = None if teacher_hidden is None else zero
    start = EvalSums(zero, compared, compared, compared, compared, compared, zero)
    states = (hidden[0], student_head), (hidden[1], teacher_head)
    return scan_positions(add_chunk, start, states, labels, weights, spec=spec)[0]


def evaluate_some(
    student: tuple[Float[Array, "B T D1"], SomeRows],
    teacher: tuple[Any, ...],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    ids: Int[Array, " N"],
    spec: HeadSpec,
) -> EvalSums:
    """Computes `head_evaluation` of a student whose head has `ids` alone.

    Each model is its hidden states and its head.
    Its cross-entropy, 0 for a label that it lacks, and the divergences are over these ids, on which
    the teacher is normalised again, as in training. All other figures are over all ids.
    """

    def add_chunk(sums: EvalSums, logits: Sequence[Any], *columns: Array) -> tuple[EvalSums, None]:
        (s, t), (label, place, weight) = logits, columns
        ours, theirs = s[..., ids], t[..., ids]
        soft = [log_softmax(x, spec.loss.temperature) for x in (theirs, ours)]
        few, hard = ([log_softmax(x, 1.0) for x in pair] for pair in ((theirs, ours), (t, s)))
        at = jnp.minimum(place, len(ids) - 1)
        ces = jnp.where(place < len(ids), cross_entropy(ours, at), 0), cross_entropy(t, label)
        same = jnp.argmax(s, axis=-1) == jnp.argmax(t, axis=-1)
        compared = spec.loss.divergence(*soft), kl_divergence(*few), same, acceptance(*hard)
        return add_sums(sums, (*ces, *compared, jnp.ones_like(weight)), weight), None

    pairs = [(zero_unweighted(hidden, weights), head) for hidden, head in (student, teacher)]
    columns = labels, student[1].places[labels], weights
    start = EvalSums(*[jnp.zeros((), jnp.float32)] * 7)
    return scan_positions(add_chunk, start, pairs, *columns, spec=spec)[0]


def share_in_common(ids: Int[Array, "*B K"], others: Int[Array, "*B K"]) -> Float[Array, "*B"]:
    """The part of `ids` that is among `others`; ids of a position are distinct."""
    found = jnp.any(ids[..., :, None] == others[..., None, :], axis=-1)
    return jnp.mean(found, axis=-1, dtype=jnp.float32)
