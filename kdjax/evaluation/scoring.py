"""Log-likelihoods of continuations: what lm-evaluation-harness asks of a model.

Rows of equal ids are read once: the answers of a multiple-choice question that differ in their last
id share a row. Only positions of continuations meet the head. The softmax is over all rows of the
head, as in the harness's `hf`; elsewhere in kdjax rows beyond the vocabulary are left out.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kdjax.device.sharding import row_shards, split_rows
from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.divergences import log_softmax
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import COMPARED_CHUNK, read_positions
from kdjax.models.decoding import pad_length
from kdjax.models.model import Model
from kdjax.progress import counted

_ENDS = 8  # last ids that a row is compared with are a multiple of it, or one


class Score(NamedTuple):
    """Figures of a continuation."""

    log_prob: float  # the sum over its ids, nats, at temperature 1
    greedy: bool  # whether each of its ids is the most probable one


class _Row(NamedTuple):
    """Ids that the model reads, and the requests that they answer."""

    ids: tuple[int, ...]  # context and continuation, but for the last id
    targets: int  # positions from the end whose next ids count, of the longest request
    requests: list[int]


def score(
    model: Model,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
) -> list[Score]:
    """Scores each continuation after its context, both as ids; returns results in their order.

    `batch_size` rows are read at once. Of a pair of more than `max_length` + 1 ids (by default the
    model's positions) the end counts. Raises `UserError` for a pair of which a side is empty, and
    for a continuation longer than that.

        score(model, [(tokenizer.encode("The sky is"), tokenizer.encode(" blue"))])
    """
    known = model.spec.max_positions if model.spec is not None else None
    most = min(filter(None, (max_length, known)), default=1 << 30)
    pairs = [_cut(number, *pair, most) for number, pair in enumerate(pairs)]
    rows = _join(pairs)
    size = batch_size
    if model.placement is not None:  # rows are split over its devices
        mesh = model.placement.mesh
        size = split_rows(batch_size, mesh) * row_shards(mesh)
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    head = jax.block_until_ready(jax.jit(model.functions.head)(model.params))
    width = model.vocab_size
    spec = HeadSpec(KDLoss(), width, width, chunk_tokens=COMPARED_CHUNK)
    compute = jax.jit(functools.partial(_score_rows, spec=spec))
    scores = [Score(0.0, True)] * len(pairs)
    batches = (_lay_out(group, size) for group in counted(groups, "batches scored"))
    for group, states in zip(groups, model.hidden_states(batches), strict=True):
        at, labels, last, weights = _lay_targets(group, [pair[1] for pair in pairs], size)
        with model.precision():
            found = jax.device_get(compute(states, head, at, labels, last, weights))
        for row, *values in zip(group, *found, strict=False):  # rows beyond are padding
            _read(row, pairs, scores, *values)
    return scores


def _cut(
    number: int, context: Sequence[int], continuation: Sequence[int], most: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not context or not 0 < len(continuation) <= most:
        raise UserError(
            f"pair {number}: found a context of {len(context)} ids and a continuation of "
            f"{len(continuation)}; expected 1 or more, and 1 to {most}. Begin with the tokenizer's "
            "BOS or end-of-text id where there is no context."
        )
    cut = max(len(context) + len(continuation) - most - 1, 0)
    return tuple(context[cut:]), tuple(continuation)


def _join(pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[_Row]:
    """Rows of equal ids joined, the longest first."""
    rows: dict[tuple[int, ...], _Row] = {}
    for number, (context, continuation) in enumerate(pairs):
        ids = (*context, *continuation[:-1])
        row = rows.get(ids, _Row(ids, 0, []))
        longest = max(row.targets, len(continuation))
        rows[ids] = row._replace(targets=longest, requests=[*row.requests, number])
    return sorted(rows.values(), key=lambda row: -len(row.ids))


def _lay_out(rows: Sequence[_Row], size: int) -> dict[str, np.ndarray]:
    """The rows as a batch `[size, T]`, padding after their ids."""
    length = pad_length(len(rows[0].ids))
    tokens = np.zeros((size, length), np.int32)
    segments = np.zeros_like(tokens)
    for row, ids, segment in zip(rows, tokens, segments, strict=False):
        ids[: len(row.ids)], segment[: len(row.ids)] = row.ids, 1
    places = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "segment_ids": segments, "positions": places}


def _lay_targets(
    rows: Sequence[_Row], continuations: Sequence[tuple[int, ...]], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions `[B, C]` of the rows' ends, their next ids, other last ids `[B, K]`, and weights.

    A row's last position stands at C - 1; before a shorter row's are positions without weight.
    """
    width = pad_length(max(row.targets for row in rows))
    width = min(width, pad_length(len(rows[0].ids)))
    others = max(len(row.requests) for row in rows)
    others = 1 if others == 1 else -(-others // _ENDS) * _ENDS
    at, labels = np.zeros((2, size, width), np.int32)
    last, weights = np.zeros((size, others), np.int32), np.zeros((size, width), np.float32)
    for number, row in enumerate(rows):
        count, length = row.targets, len(row.ids)
        at[number, width - count :] = range(length - count, length)
        labels[number, width - count :] = (*row.ids[length - count + 1 :], 0)
        last[number, : len(row.requests)] = [continuations[n][-1] for n in row.requests]
        weights[number, width - count :] = 1.0
    return at, labels, last, weights


def _score_rows(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    at: Int[Array, "B C"],
    labels: Int[Array, "B C"],
    last: Int[Array, "B K"],
    weights: Float[Array, "B C"],
    *,
    spec: HeadSpec,
) -> tuple[Float[Array, "B C"], Int[Array, "B C"], Float[Array, "B K"]]:
    """Log-probabilities of labels, the most probable ids, log-probabilities of other last ids."""
    ends = jnp.take_along_axis(hidden, at[..., None], axis=1)
    ends = jnp.where(weights[..., None] > 0, ends, 0)  # of padding nothing is written

    def compute(logits: Sequence[Array], labels: Array) -> tuple[Array, Array]:
        log_p = log_softmax(logits[0], 1.0)
        ours = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        return ours, jnp.argmax(log_p, axis=-1).astype(jnp.int32)

    def compute_last(logits: Sequence[Array], last: Array) -> Array:
        return jnp.take_along_axis(log_softmax(logits[0], 1.0), last, axis=-1)

    ours, best = read_positions(compute, [(ends, head)], labels, spec=spec)
    others = read_positions(compute_last, [(ends[:, -1:], head)], last[:, None], spec=spec)
    return ours, best, others[:, 0]


def _read(
    row: _Row,
    pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    scores: list[Score],
    ours: Float[np.ndarray, " C"],
    best: Int[np.ndarray, " C"],
    others: Float[np.ndarray, " K"],
) -> None:
    """Sets the scores of a row's requests."""
    for place, number in enumerate(row.requests):
        continuation = pairs[number][1]
        count = len(continuation)
        before: Bool[np.ndarray, " N"] = best[-count:] == np.array(continuation)
        total = float(ours[-count:-1].astype(np.float64).sum()) + float(others[place])
        scores[number] = Score(total, bool(before.all()))
