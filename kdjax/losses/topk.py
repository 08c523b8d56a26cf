"""The loss against a teacher cached as its top-k ids, a chunk of student logits at a time.

The teacher is then k + 1 outcomes: each of those ids, and "any other id". The loss is the exact
divergence over these outcomes; the student's normaliser still spans the full vocabulary. Merging
outcomes never raises a divergence whose `merges_tail` is true, so it is a lower bound of the
divergence over all ids, and equal to it if k is the full vocabulary. Each id of the tail gets its
share p_j / p_tail of the tail's gradient; under the forward KL p_j (1 - q_tail / p_tail).

Letters: B rows, T positions, D hidden width, V vocabulary, K cached ids.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from kdjax.errors import UserError
from kdjax.losses.chunked import (
    ChunkParts,
    HeadSpec,
    LossSums,
    Weighing,
    add_sums,
    define_gradient,
    read_weights,
    scan_loss,
    split_inputs,
    zero_unweighted,
)
from kdjax.losses.divergences import Divergence, acceptance, forward_kl, kl_divergence
from kdjax.losses.kd import cross_entropy, softmax_sums
from kdjax.losses.positions import read_positions, scan_positions
from kdjax.losses.top_ids import top_k
from kdjax.models.kernels.common import EXCLUDED
from kdjax.models.weights import mask_padding, unembed

# The least share of a student's tail, 8 times float32's epsilon. In training the tail is the full
# sum minus the sum over the k ids, which is off by up to 3e-7 of the full sum. Summing the tail
# itself writes all logits once more: 6.4 of 38.0 ms at 16,384 positions of an H200.
_LEAST = 1e-6


class TopTeacher(NamedTuple):
    """The teacher's cached outputs at each position, its most probable id first."""

    ids: UInt8[Array, "B T K 3"]  # 24 bits, the lowest byte first
    logits: Float[Array, "B T K"]  # minus the largest: 0 for the first; float16 in a cache
    odds: Float[Array, "B T 2"]  # log(tail / (1 - tail)) of all other ids, at T and at 1; float32
    label: Float[Array, "B T"]  # log-probability of the label at T = 1; float32

    @classmethod
    def of(cls, batch: Mapping[str, Array]) -> "TopTeacher":
        """Reads the batch's columns `teacher_ids`, `teacher_logits`, ..."""
        return cls(*(batch[f"teacher_{name}"] for name in cls._fields))

    @classmethod
    def from_log_probs(
        cls,
        ids: Int[Array, "B T K"],
        log_probs: Float[Array, "B T K"],
        labels: Int[Array, "B T"],
        *,
        tail: bool,
    ) -> "TopTeacher":
        """Makes cached outputs from log-probabilities at T = 1, in any order.

        The rest up to 1 is the tail; without `tail` the k ids share it. The log-probability of a
        label outside the k ids is set to that of the tail, its upper bound.
        """
        log_probs = jnp.maximum(log_probs.astype(jnp.float32), EXCLUDED)
        log_probs, order = jax.lax.top_k(log_probs, log_probs.shape[-1])
        ids = jnp.take_along_axis(ids, order, axis=-1)
        rest = jnp.clip(1 - jnp.sum(jnp.exp(log_probs), axis=-1), 0, 1)
        odds = jnp.maximum(jnp.log(rest) - jnp.log1p(-rest), EXCLUDED)
        odds = odds if tail else jnp.full_like(odds, EXCLUDED)
        hit = ids == labels[..., None]
        of_label = jnp.sum(jnp.where(hit, log_probs, 0), axis=-1)
        of_label = jnp.where(jnp.any(hit, axis=-1), of_label, jnp.log(jnp.maximum(rest, _LEAST)))
        logits = log_probs - log_probs[..., :1]
        return cls(split_ids(ids), logits, jnp.stack([odds, odds], axis=-1), of_label)


class TopEvalSums(NamedTuple):
    """Sums over weighted positions, float32: divide by `count`. `_topk`: over k + 1 outcomes."""

    student_ce: Float[Array, ""]
    teacher_ce: Float[Array, ""]
    divergence_topk: Float[Array, ""]  # the trained one, at T, without T^2
    kl_topk: Float[Array, ""]  # forward, at T = 1
    agreement: Float[Array, ""]
    acceptance_topk: Float[Array, ""]  # at T = 1: an upper bound
    count: Float[Array, ""]


def join_ids(ids: UInt8[Array, "*B K 3"]) -> Int[Array, "*B K"]:
    """int32 ids of three bytes each."""
    low, middle, high = (ids[..., i].astype(jnp.int32) for i in range(3))
    return low | (middle << 8) | (high << 16)


def split_ids(ids: Int[Array, "*B K"]) -> UInt8[Array, "*B K 3"]:
    """Undoes `join_ids`."""
    return jnp.stack([(ids >> shift) & 255 for shift in (0, 8, 16)], axis=-1).astype(jnp.uint8)


def outcomes(
    logits: Float[Array, "*B K"], odds: Float[Array, "*B"], temperature: float | Array
) -> Float[Array, "*B K+1"]:
    """Log-probabilities of the k ids and of all others together, float32, at the odds' temperature.

    The tail keeps its measured mass and the k ids are normalised: rounding moves no mass to it.
    """
    inside = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
    inside += jax.nn.log_sigmoid(-odds)[..., None]
    return jnp.concatenate([inside, jax.nn.log_sigmoid(odds)[..., None]], axis=-1)


def _replace(x: Array, ids: Array, values: Array) -> Array:
    """`values[..., k]` in place of `x[..., ids[..., k]]`; ids of a position are distinct."""

    def row(x: Array, ids: Array, values: Array) -> Array:
        return x.at[ids].set(values, unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(jax.vmap(row))(x, ids, values)


class _Chunk(NamedTuple):
    """A chunk of student logits, taken apart; float32."""

    ids: Array  # [B, C, K] int32
    inside: Array  # [B, C, K] logits of the cached ids
    every: Array  # [B, C, V] all of them; EXCLUDED where no id exists
    label: Array  # [B, C] logit of the label
    totals: tuple[Array, Array]  # log-sums [B, C, 1] over all ids, at T and at 1
    tails: tuple[Array, Array]  # log-sums over all but the cached ids


def _take_apart(
    raw: Array, ids: Array, label: Array, spec: HeadSpec, *, exact: bool = False
) -> _Chunk:
    """Takes a chunk apart; with `exact` tails are summed directly, instead of by difference."""
    ids = join_ids(ids)
    temperature = spec.loss.temperature
    sums = softmax_sums(raw, None, temperature, spec.real_vocab, fused=spec.kernels)
    logits = mask_padding(raw, spec.real_vocab)
    inside = jnp.take_along_axis(logits, ids, axis=-1)
    of_label = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    totals, tails, most = [], [], sums.peak
    for t, whole in ((temperature, sums.soft), (1.0, sums.hard)):
        totals.append(jnp.log(whole) + most / t)
        if exact:
            rest = _replace(logits, ids, jnp.full_like(inside, EXCLUDED))
            tail = jax.nn.logsumexp(rest / t, axis=-1, keepdims=True)
            tails.append(jnp.maximum(tail, EXCLUDED))  # without any other id it can be -inf
        else:
            chosen = jnp.sum(jnp.exp((inside - most) / t), -1, keepdims=True)
            tails.append(jnp.log(jnp.maximum(whole - chosen, _LEAST * whole)) + most / t)
    return _Chunk(ids, inside, logits, of_label, tuple(totals), tuple(tails))


def _student_outcomes(x: _Chunk, which: int, temperature: float | Array) -> Array:
    """Log-probabilities `[B, C, K + 1]` of the k ids and of all others together."""
    both = jnp.concatenate([x.inside / temperature, x.tails[which]], axis=-1)
    return both - x.totals[which]


def _teacher_outcomes(teacher: TopTeacher, spec: HeadSpec) -> Array:
    """Log-probabilities `[B, C, K + 1]` at T that are trained on.

    The forward KL weights the tails' log-ratio with the teacher's tail, however small. Others
    weight it with the student's tail, which is at least `_LEAST`, so the teacher's is limited too.
    """
    log_q = outcomes(teacher.logits, teacher.odds[..., 0], spec.loss.temperature)
    if spec.loss.divergence == forward_kl:
        return log_q
    return log_q.at[..., -1].max(math.log(_LEAST))


def _gradient(
    x: _Chunk, log_q: Array, log_p: Array, label: Array, spec: HeadSpec
) -> tuple[Array, Array]:
    """d loss / d logits: `[B, C, V]`, valid outside the cached ids, and `[B, C, K]` at these."""
    alpha, scale = spec.loss.alpha, spec.loss.gradient_scale
    inside, tail = spec.loss.divergence.merged_gradient(log_q, log_p)
    rest = scale * tail * jnp.exp(x.every / spec.loss.temperature - x.totals[0])
    inside = scale * inside
    if spec.loss.has_ce:
        is_label = jnp.arange(spec.width, dtype=jnp.int32)[None, None] == label[..., None]
        rest += alpha * (jnp.exp(x.every - x.totals[1]) - is_label)
        hit = x.ids == label[..., None]
        inside += alpha * (jnp.exp(x.inside - x.totals[1]) - hit)
    return rest, inside


def _require_merging(divergence: Divergence) -> None:
    if not divergence.merges_tail:
        raise UserError(
            "a teacher cached as its top-k ids (topk) merges all other ids into one outcome, "
            f"over which this divergence is not said to be defined: {divergence}. Cache hidden "
            "states instead (kdjax cache --kind=hidden), or set the function's attribute "
            "merges_tail = True if merging outcomes never raises it."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def cached_head_loss(
    student_hidden: Float[Array, "B T D"],
    student_head: Float[Array, "V D"],
    teacher: TopTeacher,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"] | Weighing,
    spec: HeadSpec,
) -> LossSums:
    """Computes `chunked.head_loss` with the divergence over the k cached ids and "any other".

    Only `loss` carries a gradient, to the student's hidden states and head; it is made in the
    forward scan. The loss's temperature must be the one that the cache was written for. Raises
    `UserError` for a divergence whose `merges_tail` is false.

    The student's tail p is off by up to 3e-7, and below 1e-6 taken as 1e-6; q is the teacher's. KL
    and gradient of a position are off by at most 1e-6 + 3e-7 q / p where p is above 1e-6. Below it,
    the KL misses q log(1e-6 / p), and the pull q on all other ids shrinks to q p / 1e-6; that on
    the k ids stays exact, and lowers them against the others.
    """
    inputs = student_hidden, student_head, teacher, labels, weights
    return _scan_head_loss(*inputs, spec, with_gradient=False)[0]


def _scan_head_loss(*arguments: Any, with_gradient: bool) -> tuple[LossSums, Array | None, Array]:
    """`scan_loss` of the arguments of `cached_head_loss`."""
    student_hidden, student_head, teacher, labels, weights, spec = arguments
    _require_merging(spec.loss.divergence)
    head = student_head[: spec.width].astype(student_hidden.dtype)

    def compute_parts(xs: Any) -> ChunkParts:
        (hidden,), weights, top, label = xs
        weight, own = read_weights(weights, spec)
        x = _take_apart(unembed(hidden, head), top.ids, label, own)
        log_q = _teacher_outcomes(top, own)
        log_p = _student_outcomes(x, 0, own.loss.temperature)
        g, inside = (y * weight[..., None] for y in _gradient(x, log_q, log_p, label, own))
        g = _replace(g.astype(hidden.dtype), x.ids, inside.astype(hidden.dtype))
        ce = x.totals[1][..., 0] - x.label
        return ChunkParts(ce, spec.loss.divergence(log_q, log_p), g)

    zero = jnp.zeros((), jnp.float32)
    xs = split_inputs((student_hidden,), weights, teacher, labels, spec=spec)
    start = LossSums(zero, zero, zero)
    return scan_loss(compute_parts, xs, head, start, spec, with_gradient=with_gradient)


define_gradient(cached_head_loss, _scan_head_loss)


def top_of_teacher(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    spec: HeadSpec,
    k: int,
) -> TopTeacher:
    """Makes a teacher's cached outputs, finite at every position; k is at most `spec.real_vocab`.

    Logits go as float16 differences to the largest: 8 times finer than bf16 at the same size.
    """

    def find_top(models: Sequence[Array], label: Array) -> TopTeacher:
        (logits,) = models
        values, ids = top_k(logits, k)
        rest = _replace(logits, ids, jnp.full_like(values, EXCLUDED))
        odds = [
            jax.nn.logsumexp(rest / t, axis=-1) - jax.nn.logsumexp(values / t, axis=-1)
            for t in (spec.loss.temperature, 1.0)
        ]
        # Of a teacher whose ids are all among the k, rounding can make log(0) of the tail.
        odds = jnp.maximum(jnp.stack(odds, axis=-1), EXCLUDED)
        lowered = jnp.maximum(values - values[..., :1], float(jnp.finfo(jnp.float16).min))
        of_label = -cross_entropy(logits, label)
        return TopTeacher(split_ids(ids), lowered.astype(jnp.float16), odds, of_label)

    hidden = zero_unweighted(hidden, weights)
    return read_positions(find_top, [(hidden, head)], labels, spec=spec)


def cached_head_evaluation(
    student_hidden: Float[Array, "B T D"],
    student_head: Float[Array, "V D"],
    teacher: TopTeacher,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    spec: HeadSpec,
) -> TopEvalSums:
    """Held-out sums against cached ids: cross-entropies and agreement are exact, the rest bounds.

    Divergences get lower bounds, the acceptance an upper one.

    Raises as `cached_head_loss`.
    """
    _require_merging(spec.loss.divergence)

    def add_chunk(
        sums: TopEvalSums, logits: Sequence[Array], top: TopTeacher, label: Array, weight: Array
    ) -> tuple[TopEvalSums, None]:
        x = _take_apart(logits[0], top.ids, label, spec, exact=True)
        soft, hard = (
            (outcomes(top.logits, top.odds[..., i], t), _student_outcomes(x, i, t))
            for i, t in enumerate((spec.loss.temperature, 1.0))
        )
        same = jnp.argmax(x.every, axis=-1) == x.ids[..., 0]
        ces = x.totals[1][..., 0] - x.label, -top.label
        apart = spec.loss.divergence(*soft), kl_divergence(*hard), same, acceptance(*hard)
        return add_sums(sums, (*ces, *apart, jnp.ones_like(weight)), weight), None

    hidden = zero_unweighted(student_hidden, weights)
    start = TopEvalSums(*(jnp.zeros((), jnp.float32),) * len(TopEvalSums._fields))
    columns = teacher, labels, weights
    raw = dataclasses.replace(spec, real_vocab=spec.width)  # `_take_apart` masks padding
    return scan_positions(add_chunk, start, [(hidden, student_head)], *columns, spec=raw)[0]
