"""What teacher and student say of a text that the student wrote, id by id."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kdjax.device.sharding import ROWS, row_shards
from kdjax.losses.divergences import log_softmax
from kdjax.losses.kd import KDLoss
from kdjax.models.decoder import ModelFunctions, Params
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import Spread, gather_rows, map_rows, mask_padding, unembed

_BUCKET = 64  # a model reads a multiple of so many positions
TOP = 10  # likeliest ids whose overlap is counted


class Judged(NamedTuple):
    """The teacher's opinion of each new id."""

    top: Int[Array, "B N"]  # its most likely id
    top_probability: Float[Array, "B N"]
    probability: Float[Array, "B N"]  # of the student's id


def judge(
    teacher: Model,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    real: int,
) -> Judged:
    """The teacher on `continuations` of `prompts`, read in one pass; float32, temperature 1.

    `real` is the number of ids that exist. Rows are `[B, N]`, N that of the longest continuation;
    a shorter one has figures of no meaning behind its end.
    """
    columns = _lay_out(prompts, continuations, teacher)
    judged = _judge(teacher.functions, teacher.spread, real, teacher.params, *columns)
    return Judged(*(x[: len(prompts)] for x in jax.device_get(judged)))


def _lay_out(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], model: Model
) -> list[np.ndarray]:
    """tokens and segments `[B, T]`, the place before each continuation `[B]`, its ids `[B, N]`."""
    width = max(map(len, continuations))
    length = max(len(p) for p in prompts) + width
    tokens = np.zeros((len(prompts), -(-length // _BUCKET) * _BUCKET), np.int32)
    segments, new = np.zeros_like(tokens), np.zeros((len(prompts), width), np.int32)
    for row, (prompt, ids) in enumerate(zip(prompts, continuations, strict=True)):
        tokens[row, : len(prompt) + len(ids)] = [*prompt, *ids]
        segments[row, : len(prompt) + len(ids)] = 1
        new[row, : len(ids)] = ids
    starts = np.asarray([len(prompt) - 1 for prompt in prompts], np.int32)
    # The last row again, until each device has as many.
    more = -len(tokens) % row_shards(model.placement.mesh) if model.placement is not None else 0
    columns = tokens, segments, starts, new
    return [np.concatenate([x, *[x[-1:]] * more]) for x in columns]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _judge(
    apply: ModelFunctions, spread: Spread | None, real: int, params: Params, *columns: Array
) -> Judged:
    judge_rows = map_rows(functools.partial(_judge_rows, apply=apply, real=real), spread)
    return gather_rows(judge_rows(params, *columns), spread)


def _judge_rows(
    params: Params,
    tokens: Array,
    segments: Array,
    starts: Array,
    new: Array,
    *,
    apply: ModelFunctions,
    real: int,
) -> Judged:
    hidden, head = _read_rows(params, tokens, segments, starts, new, apply=apply)
    log_probs = log_softmax(mask_padding(unembed(hidden, head), real), 1.0)
    top = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)

    def probability(ids: Array) -> Array:
        return jnp.exp(jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0])

    return Judged(top, probability(top), probability(new))


def _read_rows(
    params: Params,
    tokens: Array,
    segments: Array,
    starts: Array,
    new: Array,
    *,
    apply: ModelFunctions,
) -> tuple[Float[Array, "B N D"], Float[Array, "V D"]]:
    """The states that predict the new ids, and the head that makes logits of them."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = apply.hidden(params, tokens, segments, positions)
    # The state at a position predicts the next id; only these few become logits.
    before = starts[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    hidden = jnp.take_along_axis(hidden, before[..., None], axis=1)
    return hidden, apply.head(params).astype(hidden.dtype)


class Compared(NamedTuple):
    """Teacher and student on each new id; ids `[B, N]`, figures float32 `[B, N]`."""

    top: Int[Array, "B N"]  # the teacher's most likely id
    top_probability: Float[Array, "B N"]  # at temperature 1, as the others
    probability: Float[Array, "B N"]  # that the teacher gives the student's id
    students: Float[Array, "B N"]  # that the student gives it
    divergence: Float[Array, "B N"]  # that trains, at its temperature
    overlap: Float[Array, "B N"]  # share of the teacher's `TOP` likeliest ids among the student's


def compare(
    teacher: Model,
    student: Model,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    real: int,
    loss: KDLoss,
) -> Compared:
    """Both models on `continuations` of `prompts`; see `judge` for the shapes."""
    columns = _lay_out(prompts, continuations, teacher)
    states = [
        _read_states(model.functions, model.spread, model.params, *columns)
        for model in (teacher, student)
    ]
    compared = _compare_states(real, loss, *states, columns[-1])
    return Compared(*(x[: len(prompts)] for x in jax.device_get(compared)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read_states(
    apply: ModelFunctions, spread: Spread | None, params: Params, *columns: Array
) -> tuple[Array, Array]:
    read = map_rows(functools.partial(_read_rows, apply=apply), spread, outs=(ROWS, P()))
    hidden, head = read(params, *columns)
    return gather_rows(hidden, spread), head


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compare_states(real: int, loss: KDLoss, teacher: Any, student: Any, new: Array) -> Compared:
    def compare_row(row: tuple[Array, Array, Array]) -> Compared:
        theirs, ours, ids = row

        def log_probs(hidden: Array, head: Array, temperature: float) -> Array:
            # Ids that only one of the models has are neither's, as in training.
            logits = unembed(hidden[None], head[:real])[0]
            return log_softmax(logits, temperature)

        their_log_probs = log_probs(theirs, teacher[1], 1.0)
        our_log_probs = log_probs(ours, student[1], 1.0)
        at_temperature = (
            log_probs(theirs, teacher[1], loss.temperature),
            log_probs(ours, student[1], loss.temperature),
        )
        values, likeliest = jax.lax.top_k(their_log_probs, min(TOP, real))
        mine = jax.lax.top_k(our_log_probs, min(TOP, real))[1]
        shared = jnp.any(likeliest[:, :, None] == mine[:, None, :], axis=-1)

        def probability(log_probs: Array) -> Array:
            return jnp.exp(jnp.take_along_axis(log_probs, ids[:, None], axis=-1)[:, 0])

        return Compared(
            likeliest[:, 0],
            jnp.exp(values[:, 0]),
            probability(their_log_probs),
            probability(our_log_probs),
            loss.divergence(*at_temperature),
            jnp.mean(shared, axis=-1, dtype=jnp.float32),
        )

    # Row after row: two models' logits of 512 positions of 152k ids are 0.6 GB.
    return jax.lax.map(compare_row, (teacher[0], student[0], new))


def split_text(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of `ids`, id by id; a character of several ids comes whole with the last of them."""
    shown, parts = "", []
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        whole = text if end == len(ids) else text.rstrip("\N{REPLACEMENT CHARACTER}")
        parts.append(whole[len(shown) :])
        shown = whole if len(whole) > len(shown) else shown
    return parts
