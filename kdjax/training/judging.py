"""Judges a text of the student id by id, with teacher and student."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, ArrayLike, Float, Int

from kdjax.device.sharding import ROWS, row_shards
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.divergences import log_softmax
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import State, read_positions, share_in_common
from kdjax.losses.top_ids import top_k
from kdjax.models.decoder import ModelFunctions, Params
from kdjax.models.decoding import pad_length
from kdjax.models.model import Model
from kdjax.models.shards import Spread, gather_rows, map_rows
from kdjax.models.tokenizer import Tokenizer

TOP = 10  # top ids whose overlap is counted
_CHUNK = 512  # positions whose logits exist at once: 0.6 GB for two models and 152k ids


class Judged(NamedTuple):
    """The teacher's judgement of each new id."""

    top: Int[Array, "B N"]  # its most likely id
    top_probability: Float[Array, "B N"]
    probability: Float[Array, "B N"]  # of the student's id


def judge(
    teacher: Model,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    real: int,
) -> Judged:
    """Judges `continuations` of `prompts` by the teacher in one pass; float32, temperature 1.

    `real` is the number of ids that exist. Rows are `[B, N]`, with N of the longest continuation;
    figures after the end of a shorter one have no meaning.
    """
    columns = _lay_out(prompts, continuations, teacher)
    states = _read_states(teacher.functions, teacher.spread, teacher.params, *columns)
    judged = jax.device_get(_judge_states(_spec(real, KDLoss()), states, columns[-1]))
    return Judged(*(x[: len(prompts)] for x in judged))


def _lay_out(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], model: Model
) -> list[np.ndarray]:
    """Makes tokens and segments `[B, T]`, starts `[B]` and ids `[B, N]` of continuations."""
    width = max(map(len, continuations))
    length = max(len(p) for p in prompts) + width
    tokens = np.zeros((len(prompts), pad_length(length)), np.int32)
    segments, new = np.zeros_like(tokens), np.zeros((len(prompts), width), np.int32)
    for row, (prompt, ids) in enumerate(zip(prompts, continuations, strict=True)):
        tokens[row, : len(prompt) + len(ids)] = [*prompt, *ids]
        segments[row, : len(prompt) + len(ids)] = 1
        new[row, : len(ids)] = ids
    starts = np.asarray([len(prompt) - 1 for prompt in prompts], np.int32)
    # Repeats the last row until all devices have equally many.
    more = -len(tokens) % row_shards(model.placement.mesh) if model.placement is not None else 0
    columns = tokens, segments, starts, new
    return [np.concatenate([x, *[x[-1:]] * more]) for x in columns]


def _read_rows(
    params: Params,
    tokens: Array,
    segments: Array,
    starts: Array,
    new: Array,
    *,
    apply: ModelFunctions,
) -> tuple[Float[Array, "B N D"], Float[Array, "V D"]]:
    """Hidden states that predict the new ids, and the head for their logits."""
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
    probability: Float[Array, "B N"]  # the teacher's, of the student's id
    students: Float[Array, "B N"]  # the student's, of its id
    divergence: Float[Array, "B N"]  # the trained one, at its temperature
    overlap: Float[Array, "B N"]  # share of the teacher's top `TOP` ids among the student's


def compare(
    teacher: Model,
    student: Model,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    real: int,
    loss: KDLoss,
) -> Compared:
    """Compares both models on `continuations` of `prompts`; see `judge` for the shapes."""
    states, new = [], None
    for model in (teacher, student):
        *columns, new = _lay_out(prompts, continuations, model)
        states.append(_read_states(model.functions, model.spread, model.params, *columns, new))
    assert new is not None
    compared = _compare_states(_spec(real, loss), states, new)
    return Compared(*(x[: len(continuations)] for x in jax.device_get(compared)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read_states(
    apply: ModelFunctions, spread: Spread | None, params: Params, *columns: Array
) -> tuple[Array, Array]:
    read = map_rows(functools.partial(_read_rows, apply=apply), spread, outs=(ROWS, P()))
    hidden, head = read(params, *columns)
    return gather_rows(hidden, spread), head


def _spec(real: int, loss: KDLoss) -> HeadSpec:
    """Masks ids beyond the first `real`, which only one of the models may have."""
    return HeadSpec(loss, width=real, real_vocab=real, chunk_tokens=_CHUNK)


@functools.partial(jax.jit, static_argnums=0)
def _judge_states(spec: HeadSpec, state: State, new: Array) -> Judged:
    def judge_chunk(logits: Sequence[Array], ids: Array) -> Judged:
        log_probs = log_softmax(logits[0], 1.0)
        top = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        return Judged(top, _look_up(log_probs, top), _look_up(log_probs, ids))

    return read_positions(judge_chunk, [state], new, spec=spec)


@functools.partial(jax.jit, static_argnums=0)
def _compare_states(spec: HeadSpec, states: Sequence[State], new: Array) -> Compared:
    def compare_chunk(logits: Sequence[Array], ids: Array) -> Compared:
        theirs, ours = (log_softmax(z, 1.0) for z in logits)
        softened = [log_softmax(z, spec.loss.temperature) for z in logits]
        values, likeliest = top_k(theirs, min(TOP, spec.width))
        mine = top_k(ours, min(TOP, spec.width))[1]
        return Compared(
            likeliest[..., 0],
            jnp.exp(values[..., 0]),
            _look_up(theirs, ids),
            _look_up(ours, ids),
            spec.loss.divergence(*softened),
            share_in_common(likeliest, mine),
        )

    return read_positions(compare_chunk, states, new, spec=spec)


def _look_up(log_probs: Float[Array, "B N V"], ids: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """The probability of each id."""
    return jnp.exp(jnp.take_along_axis(log_probs, ids[..., None], axis=-1)[..., 0])


def describe_tokens(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    probabilities: Float[ArrayLike, " N"],
    opinion: Judged | Compared | None,
    row: int,
) -> list[dict[str, Any]]:
    """Describes each id: its text, the student's probability, the teacher's judgement."""
    tokens, shares = [], np.asarray(probabilities).tolist()
    for at, (id_, text) in enumerate(zip(ids, split_text(tokenizer, ids), strict=True)):
        token: dict[str, Any] = {"id": id_, "text": text, "probability": shares[at]}
        if opinion is not None:
            top = int(opinion.top[row, at])
            token["teacher"] = {
                "id": top,
                "text": tokenizer.decode([top]),
                "probability": float(opinion.top_probability[row, at]),
                "of_students_id": float(opinion.probability[row, at]),
            }
        tokens.append(token)
    return tokens


def split_text(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each id; a character of several ids belongs to the last of them."""
    shown, parts = "", []
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        whole = text if end == len(ids) else text.rstrip("\N{REPLACEMENT CHARACTER}")
        parts.append(whole[len(shown) :])
        shown = whole if len(whole) > len(shown) else shown
    return parts
