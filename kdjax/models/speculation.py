"""Speculative generation: a small model drafts some ids, the big one reads them in one pass.

What comes out is the big model's own: greedily the same ids, at a temperature the same distribution
(Leviathan, Kalman, Matias 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318). Rows accept
different numbers of drafts, so each goes on at its own position. Rounds run on the device, until
all rows have ended or the host is to look at the text.

Letters: B rows, K drafts a round, N = K + 1, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kdjax.errors import UserError
from kdjax.models.decoder import Cache, DecoderFunctions, Params
from kdjax.models.decoding import (
    Completion,
    Drafted,
    Row,
    Sampling,
    find_least,
    find_stops,
    prepare_weights,
)
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import Spread, mask_padding, unembed

_BUCKET, _ROOM = 64, 128  # prompts and caches are padded to a multiple: few programs are compiled
_ROUNDS = 64  # on the device between two looks at the text, at most;
_WATCHED = 8  # if somebody reads along, or strings end a row: the host alone knows them
MOST_DRAFTS = 64
_DRAFT, _ACCEPT, _REPLACE = range(3)  # what a position's key is split for


class Side(NamedTuple):
    """One of the two models."""

    functions: DecoderFunctions
    params: Params
    real: int  # ids that some token has
    spread: Spread | None = None

    def prepare(self) -> Any:
        """Its layers, if there is room for them, and its head, as a pass multiplies them."""
        return prepare_weights(self.params, functions=self.functions, spread=self.spread)


class _State(NamedTuple):
    """A batch on the device, between two rounds."""

    big: Cache
    small: Cache
    before: Int[Array, " B"]  # the id before `last`, which the small model may not have read
    last: Int[Array, " B"]  # the id to be read next
    positions: Int[Array, " B"]  # where it goes
    done: Array  # bool [B]


class _Round(NamedTuple):
    """What a round added to each row."""

    ids: Int[Array, "B N"]  # the drafts that were accepted, and one id of the big model's
    log_probs: Float[Array, "B N"]  # under the big model at temperature 1
    accepted: Int[Array, " B"]  # -1: the row had ended


@dataclasses.dataclass(frozen=True)
class _Programs:
    """What both programs are compiled for."""

    big: DecoderFunctions
    small: DecoderFunctions
    real: int  # ids that the big model may say
    small_real: int
    drafts: int
    sampling: Sampling

    def keys(self, rows: Array, positions: Array) -> Any:
        """A key for each row `[B]` and position `[B, N]`.

        What a position holds thereby depends on what is before it alone: a draft that was thrown
        away unseen may be drawn again by the same key.
        """
        base = jax.random.key(self.sampling.seed)
        of_row = jax.vmap(lambda row: jax.random.fold_in(base, row))(rows)
        return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(of_row, positions)

    def logits(self, hidden: Array, head: Array, real: int) -> Float[Array, "B N V"]:
        """Over the ids of the big model, -inf where there is none."""
        logits = mask_padding(unembed(hidden, head)[..., : self.real], real, -jnp.inf)
        room = self.real - logits.shape[-1]
        return jnp.pad(logits, ((0, 0), (0, 0), (0, room)), constant_values=-jnp.inf)


def _log_probs(logits: Array, sampling: Sampling) -> Array:
    """Of what is drawn from, `[B, N, V]`: at the temperature, outside top-k and top-p -inf."""
    least = find_least(logits, sampling)
    kept = logits if least is None else jnp.where(logits >= least, logits, -jnp.inf)
    return jax.nn.log_softmax(kept / sampling.temperature, axis=-1)


def _draw(log_probs: Array, keys: Any, purpose: int) -> Array:
    def draw(key: Any, log_probs: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(key, purpose), log_probs)

    return jax.vmap(draw)(keys, log_probs).astype(jnp.int32)


def judge(
    logits: Float[Array, "B N V"],
    draft_logits: Float[Array, "B K V"] | None,
    drafts: Int[Array, "B K"],
    keys: Any,
    sampling: Sampling,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many drafts of each row the big model accepts, and the id that follows them.

    `logits` are the big model's before each draft and after the last, `draft_logits` what the
    drafts were drawn from (None at temperature 0), `keys` `[B, N]` those of the positions.
    """
    count = drafts.shape[1]
    if sampling.temperature == 0:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        accepted = _count_first(best[:, :count] == drafts)
        return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
    assert draft_logits is not None
    p, q = (jnp.exp(_log_probs(x, sampling)) for x in (logits, draft_logits))
    of_drafts = [jnp.take_along_axis(x[:, :count], drafts[..., None], axis=-1) for x in (p, q)]
    chances = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, _ACCEPT))))
    likelier, drawn = (x[..., 0] for x in of_drafts)
    accepted = _count_first(chances(keys[:, :count]) * drawn < likelier)
    # Behind the last draft there is none to hold back: the rest is the whole.
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    at = accepted[:, None, None]
    p, q = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (p, q))
    rest = jnp.maximum(p - q, 0.0)
    # Equal distributions reject nothing; where rounding does, all of p is as good.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p)
    of_next = jnp.take_along_axis(keys, accepted[:, None], axis=1)[:, 0]
    return accepted, _draw(jnp.log(rest), of_next, _REPLACE)


def _count_first(accept: Array) -> Array:
    """How many are true before the first that is not, `[B]`."""
    return jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=-1), axis=-1)


def _of_ids(logits: Array, ids: Array) -> Array:
    """Log-probabilities at temperature 1 of ids `[B, N]`."""
    of_ids = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return of_ids - jax.nn.logsumexp(logits, axis=-1)


@functools.partial(jax.jit, static_argnames=("programs", "capacity"))
def _begin(
    big: Params,
    small: Params,
    head: Array,
    tokens: Array,
    lengths: Array,
    rows: Array,
    *,
    programs: _Programs,
    capacity: int,
) -> tuple[_State, Array, Array]:
    """Both read the prompts; the big model draws the first id of each row."""
    sampling = programs.sampling
    hidden, cache = programs.big.prefill(big, tokens, lengths, capacity)
    _, small_cache = programs.small.prefill(small, tokens, lengths, capacity)
    logits = programs.logits(hidden[:, None], head, programs.real)
    if sampling.temperature == 0:
        ids = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
    else:
        keys = programs.keys(rows, lengths[:, None])[:, 0]
        ids = _draw(_log_probs(logits, sampling)[:, 0], keys, _REPLACE)
    before = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    state = _State(cache, small_cache, before, ids, lengths, find_stops(ids, sampling))
    return state, ids, _of_ids(logits, ids[:, None])[:, 0]


def _draft(
    small: Params, weights: Any, state: _State, rows: Array, programs: _Programs
) -> tuple[Array, Array | None, Cache]:
    """Drafts `[B, K]`, what they were drawn from `[B, K, V]`, and the small model's cache."""
    sampling, greedy = programs.sampling, programs.sampling.temperature == 0
    layers, head = weights

    def choose(hidden: Array, places: Array) -> tuple[Array, Array | None]:
        logits = programs.logits(hidden[:, -1:], head, programs.small_real)
        if greedy:
            return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), None
        keys = programs.keys(rows, places[:, None])[:, 0]
        return _draw(_log_probs(logits, sampling)[:, 0], keys, _DRAFT), logits[:, 0]

    def step(carry: tuple[Array, Cache], number: Array) -> tuple[Any, Any]:
        last, cache = carry
        places = state.positions + number
        hidden, cache = programs.small.extend(small, last[:, None], places, cache, layers)
        drawn = choose(hidden, places + 1)
        return (drawn[0], cache), drawn

    # Of a round whose drafts were all accepted, it has not read the last: two ids cost what one
    # does, and reading an id again changes nothing.
    first = jnp.stack([state.before, state.last], axis=1)
    at = state.positions - 1
    hidden, cache = programs.small.extend(small, first, at, state.small, layers)
    drawn = choose(hidden, state.positions + 1)
    numbers = jnp.arange(1, programs.drafts, dtype=jnp.int32)
    (_, cache), others = jax.lax.scan(step, (drawn[0], cache), numbers)
    ids, logits = jax.tree.map(
        lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), drawn, others
    )
    return ids, logits, cache


@functools.partial(jax.jit, static_argnames=("programs",), donate_argnames=("state",))
def _advance(
    big: Params,
    small: Params,
    weights: tuple[Any, Any],
    state: _State,
    rows: Array,
    limits: Array,
    ended: Array,
    most: Array,
    *,
    programs: _Programs,
) -> tuple[_State, _Round]:
    """Rounds until all rows have ended, at most `most`; of `_ROUNDS`, those that ran are filled.

    A row ends at a stop id, when its next position reaches its limit, or where the host `ended` it.
    """
    layers, head = weights[0]

    def is_alive(carry: tuple[Array, _State, _Round]) -> Array:
        number, state, _ = carry
        return (number < most) & ~jnp.all(state.done)

    def advance(carry: tuple[Array, _State, _Round]) -> tuple[Array, _State, _Round]:
        number, state, rounds = carry
        drafts, draft_logits, small_cache = _draft(small, weights[1], state, rows, programs)
        read = jnp.concatenate([state.last[:, None], drafts], axis=1)
        hidden, cache = programs.big.extend(big, read, state.positions, state.big, layers)
        logits = programs.logits(hidden, head, programs.real)
        places = jnp.arange(1, read.shape[1] + 1, dtype=jnp.int32)[None]
        keys = programs.keys(rows, state.positions[:, None] + places)
        accepted, following = judge(logits, draft_logits, drafts, keys, programs.sampling)
        here = places - 1 == accepted[:, None]
        ids = jnp.where(here, following[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))
        ended = jnp.any(
            find_stops(ids, programs.sampling) & (places - 1 <= accepted[:, None]), axis=1
        )
        positions = state.positions + accepted + 1
        # The id before the next: a draft, or the one that was read first.
        before = jnp.take_along_axis(read, accepted[:, None], axis=1)[:, 0]
        new = _State(
            cache, small_cache, before, following, positions, ended | (positions >= limits)
        )
        # A row that ended stays where it is.
        kept = [
            jnp.where(state.done, old, now) for old, now in zip(state[2:], new[2:], strict=True)
        ]
        done = _Round(ids, _of_ids(logits, ids), jnp.where(state.done, -1, accepted))
        keep = functools.partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
        rounds = jax.tree.map(keep, rounds, done)
        return number + 1, _State(cache, small_cache, *kept), rounds

    blank = jnp.zeros((_ROUNDS, len(rows), programs.drafts + 1), jnp.int32)
    rounds = _Round(blank, blank.astype(jnp.float32), blank[..., 0] - 1)
    state = state._replace(done=state.done | ended | (state.positions >= limits))
    return jax.lax.while_loop(is_alive, advance, (jnp.int32(0), state, rounds))[1:]


class _Row(Row):
    """A completion as it grows, and what its drafts came to."""

    passes = accepted = 0

    def take(self, ids: list[int], log_probs: list[float]) -> None:
        """Takes ids until one ends the row."""
        stop = next((i for i, id_ in enumerate(ids) if id_ in self._sampling.stop_ids), len(ids))
        kept = min(stop, self.limit - len(self.ids))
        done = kept < len(ids) or len(self.ids) + kept == self.limit
        self.extend(ids[:kept], log_probs[:kept], done)

    def complete(self) -> Completion:
        """The completion, once there is a reason to end it."""
        return super().complete()._replace(drafted=Drafted(self.passes, self.accepted))


def speculate(
    big: Side,
    small: Side,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    drafts: int,
    tokenizer: Tokenizer | None = None,
    numbers: Sequence[int] | None = None,
    batch_size: int = 32,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """As `decoding.complete` by the big model, `drafts` ids of the small one at a time.

    Each completion says what its drafts came to. Raises `UserError` for what cannot be continued,
    for impossible sampling, and for a number of drafts below 1 or above 64.
    """
    sampling.check()
    if not 1 <= drafts <= MOST_DRAFTS:
        raise UserError(f"found {drafts} drafts a pass; expected 1 to {MOST_DRAFTS}.")
    draw_by = np.asarray(range(len(prompts)) if numbers is None else numbers, np.uint32)
    most = min(side.functions.spec.max_positions for side in (big, small))
    for i, prompt in enumerate(prompts):
        if not prompt or not 0 <= min(prompt) <= max(prompt) < small.real:
            raise UserError(
                f"prompt {i} has {len(prompt)} ids; expected one or more, from 0 to "
                f"{small.real - 1}, that both models know. Encode the text with their tokenizer."
            )
        if len(prompt) + sampling.max_tokens > most:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens: with max_tokens={sampling.max_tokens} that "
                f"is more than the {most} positions that both models have. Shorten one."
            )
    # What only the host looks at is no part of a program: other values compile nothing anew.
    on_device = dataclasses.replace(sampling, max_tokens=1, stop_strings=())
    programs = _Programs(big.functions, small.functions, big.real, small.real, drafts, on_device)
    rows = [
        _Row(np.asarray(prompt, np.int32), sampling.max_tokens, int(number), sampling, tokenizer)
        for prompt, number in zip(prompts, draw_by, strict=True)
    ]
    weights = big.prepare(), small.prepare()
    watched = on_text is not None or sampling.stop_strings
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        batch = _run(
            programs,
            (big.params, small.params),
            weights,
            _fill(prompts[part], batch_size),
            np.pad(draw_by[part], (0, batch_size - len(rows[part])), mode="edge"),
            rows[part],
            sampling.max_tokens,
            _WATCHED if watched else _ROUNDS,
        )
        for _ in batch:
            if on_text is not None:
                for i, row in enumerate(rows[part], start):
                    on_text(i, row.read())
    return [row.complete() for row in rows]


def _fill(
    prompts: Sequence[Sequence[int]], batch_size: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Ids, padded behind, and lengths. A short batch is filled up with copies of the last prompt:
    the same programs serve.
    """
    filled = [*prompts, *[prompts[-1]] * (batch_size - len(prompts))]
    lengths = np.asarray([len(prompt) for prompt in filled], np.int32)
    tokens = np.zeros((batch_size, -(-int(lengths.max()) // _BUCKET) * _BUCKET), np.int32)
    for row, prompt in zip(tokens, filled, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _run(
    programs: _Programs,
    params: tuple[Params, Params],
    weights: tuple[Any, Any],
    prompts: tuple[np.ndarray, np.ndarray],
    numbers: np.ndarray,
    rows: Sequence[_Row],
    most: int,
    rounds: int,
) -> Iterator[None]:
    """Completes the rows of a batch; yields after each look, of so many rounds."""
    tokens, lengths = prompts
    capacity = -(-(tokens.shape[1] + most + 2 * programs.drafts) // _ROOM) * _ROOM
    limits = lengths + np.int32(most - 1)

    def advance(state: _State) -> tuple[_State, _Round]:
        ended = np.ones(len(tokens), bool)
        ended[: len(rows)] = [bool(row.reason) for row in rows]
        how = numbers, limits, ended, np.int32(rounds)
        return _advance(*params, weights, state, *how, programs=programs)

    begin = weights[0][1], *prompts, numbers
    state, *first = _begin(*params, *begin, programs=programs, capacity=capacity)
    # While the host looks at the first ids: rows that end there end on the device as well.
    state, found = advance(state)
    for row, id_, log_prob in zip(
        rows, *map(np.ndarray.tolist, jax.device_get(first)), strict=False
    ):
        row.take([id_], [log_prob])
    yield
    while any(not row.reason for row in rows):
        for ids, log_probs, accepted in zip(*jax.device_get(found), strict=True):
            for i, row in enumerate(rows):
                if not row.reason:
                    count = int(accepted[i]) + 1
                    row.take(ids[i, :count].tolist(), log_probs[i, :count].tolist())
                    row.passes, row.accepted = row.passes + 1, row.accepted + count - 1
        yield
        if any(not row.reason for row in rows):
            state, found = advance(state)
