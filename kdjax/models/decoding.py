"""Text from a model: batched sampling with a key-value cache, prompts of any lengths.

Prompts are padded behind and read at once; then one id a row is added at a time, each row at its
own position. A few steps run on the device between looks at the text.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kdjax.device.sharding import ROW_AXES, ROWS, row_shards
from kdjax.errors import UserError
from kdjax.models.decoder import Cache, DecoderFunctions, Params
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import Spread, gather_rows, map_rows, mask_padding

_STEPS = 16  # on the device between two looks at the text
_BUCKET = 64  # prompts are padded to a multiple, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How ids are drawn and when a row ends."""

    max_tokens: int = 512
    temperature: float = 0.0  # 0: the most likely id
    top_p: float = 1.0  # least set of ids that reaches this probability
    top_k: int = 0  # most likely ids kept; 0: all
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()  # cut off, with what follows
    seed: int = 0

    def check(self) -> None:
        """Raises `UserError` naming every field that cannot work."""
        rules = {
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "stop_strings": (all(self.stop_strings), "no empty text"),
        }
        bad = [f"{k}={getattr(self, k)!r}: must be {w}" for k, (ok, w) in rules.items() if not ok]
        if bad:
            raise UserError("cannot sample: " + "; ".join(bad))


class Drafted(NamedTuple):
    """What the drafts of a row came to."""

    passes: int  # of the big model over drafts
    accepted: int  # drafts, of all passes together


class Completion(NamedTuple):
    """What a prompt was continued with; stop ids and stop strings are left out."""

    ids: list[int]
    text: str
    reason: str  # "stop" or "length"
    log_probs: list[float]  # of each id, nats, under the model at temperature 1
    drafted: Drafted | None = None  # with a draft model


class _State(NamedTuple):
    """A batch on the device, between two steps."""

    cache: Cache
    last: Int[Array, " B"]  # the id to be read next
    positions: Int[Array, " B"]  # where it goes
    done: Array  # bool [B]


def pick(
    logits: Float[Array, "B V"], keys: Any, sampling: Sampling
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One id a row, and its log-probability at temperature 1, from float32 logits.

    `keys` holds a random key a row, so that a row's draws do not depend on its batch.
    """
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    if sampling.temperature == 0:
        ids = jnp.argmax(logits, axis=-1)
    else:
        scaled = _filter(logits / sampling.temperature, sampling)
        ids = jax.vmap(jax.random.categorical)(keys, scaled)
    ids = ids.astype(jnp.int32)
    return ids, jnp.take_along_axis(log_probs, ids[:, None], axis=-1)[:, 0]


def _filter(logits: Array, sampling: Sampling) -> Array:
    """Logits outside top-k and top-p at -inf; the most likely id always stays."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        return logits
    ordered = jnp.sort(logits, axis=-1, descending=True)
    least = ordered[:, -1:]
    if sampling.top_k:
        least = ordered[:, min(sampling.top_k, logits.shape[-1]) - 1][:, None]
        ordered = jnp.where(ordered >= least, ordered, -jnp.inf)
    if sampling.top_p < 1:
        p = jax.nn.softmax(ordered, axis=-1)
        inside = jnp.cumsum(p, axis=-1) - p < sampling.top_p  # what comes before is not enough
        least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def _draw(
    hidden: Array, head: Array, steps: Array, rows: Array, sampling: Sampling, real: int
) -> tuple[Array, Array]:
    logits = jnp.einsum("BD,VD->BV", hidden, head, preferred_element_type=jnp.float32)
    base = jax.random.key(sampling.seed)
    keys = jax.vmap(lambda r, s: jax.random.fold_in(jax.random.fold_in(base, r), s))(rows, steps)
    return pick(mask_padding(logits, real, -jnp.inf), keys, sampling)


_LATER = P(None, ROW_AXES)  # rows on the second axis
_STATE: Any = jax.tree.unflatten(  # specs of a `_State`
    jax.tree.structure(_State(Cache(0, 0), 0, 0, 0)),  # type: ignore[arg-type]
    (_LATER, _LATER, ROWS, ROWS, ROWS),
)


@functools.partial(jax.jit, static_argnames=("functions", "spread", "capacity", "real", "sampling"))
def _begin(
    params: Params,
    tokens: Array,
    lengths: Array,
    rows: Array,
    *,
    functions: DecoderFunctions,
    spread: Spread | None,
    capacity: int,
    real: int,
    sampling: Sampling,
) -> tuple[Any, ...]:
    """Reads the prompts and draws the first id of each row."""

    def begin(params: Params, tokens: Array, lengths: Array, rows: Array) -> tuple[Any, ...]:
        head = functions.head(params)
        hidden, cache = functions.prefill(params, tokens, lengths, capacity)
        head = head.astype(hidden.dtype)
        ids, log_probs = _draw(hidden, head, jnp.zeros_like(rows), rows, sampling, real)
        return _State(cache, ids, lengths, _stops(ids, sampling)), head, ids, log_probs

    outs = _STATE, P(), ROWS, ROWS
    state, head, *drawn = map_rows(begin, spread, outs=outs)(params, tokens, lengths, rows)
    return state, head, *gather_rows(drawn, spread)


def _stops(ids: Array, sampling: Sampling) -> Array:
    if not sampling.stop_ids:
        return jnp.zeros(ids.shape, bool)
    stops = jnp.asarray(sampling.stop_ids, jnp.int32)
    return jnp.any(ids[:, None] == stops[None], axis=-1)


@functools.partial(
    jax.jit, static_argnames=("functions", "spread", "real", "sampling"), donate_argnames="state"
)
def _advance(
    params: Params,
    head: Array,
    state: _State,
    begun: Array,
    rows: Array,
    *,
    functions: DecoderFunctions,
    spread: Spread | None,
    real: int,
    sampling: Sampling,
) -> tuple[Any, ...]:
    """`_STEPS` more ids; `begun` is the number that each row has had. Rows that ended idle."""

    def advance(params: Params, head: Array, state: _State, begun: Array, rows: Array) -> Any:
        def step(state: _State, done_steps: Array) -> tuple[_State, tuple[Array, Array]]:
            last = state.last[:, None]
            hidden, cache = functions.extend(params, last, state.positions, state.cache)
            number = jnp.broadcast_to(begun + done_steps, rows.shape)
            ids, log_probs = _draw(hidden[:, 0], head, number, rows, sampling, real)
            # A row that ended stays where it is: its slots beyond are never written.
            ids = jnp.where(state.done, state.last, ids)
            positions = jnp.where(state.done, state.positions, state.positions + 1)
            done = state.done | _stops(ids, sampling)
            return _State(cache, ids, positions, done), (ids, log_probs)

        return jax.lax.scan(step, state, jnp.arange(_STEPS, dtype=jnp.int32))

    specs = dict(ins=(P(), _STATE, P(), ROWS), outs=(_STATE, (_LATER, _LATER)))
    state, drawn = map_rows(advance, spread, **specs)(params, head, state, begun, rows)
    return state, gather_rows(drawn, spread)


class _Row:
    """A completion as it grows on the host."""

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer | None):
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.text, self.reason = "", ""
        self._sampling, self._tokenizer = sampling, tokenizer

    def extend(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Takes ids until one ends the row; looks for stop strings in the text so far."""
        for token, log_prob in zip(ids, log_probs, strict=True):
            if token in self._sampling.stop_ids:
                self.reason = "stop"
                break
            self.ids.append(int(token))
            self.log_probs.append(float(log_prob))
            if len(self.ids) == self._sampling.max_tokens:
                self.reason = "length"
                break
        self.text = self._decode(len(self.ids))
        places = [self.text.find(s) for s in self._sampling.stop_strings if s in self.text]
        if places:
            self._cut(min(places))

    def _decode(self, count: int) -> str:
        return self._tokenizer.decode(self.ids[:count]) if self._tokenizer else ""

    def _cut(self, end: int) -> None:
        """Ends the row before character `end`: no id that only adds to what is cut off stays."""
        self.text, self.reason = self.text[:end], "stop"
        count = len(self.ids)
        while count and len(self._decode(count - 1)) >= end:
            count -= 1
        self.ids, self.log_probs = self.ids[:count], self.log_probs[:count]

    def complete(self) -> Completion:
        """The completion, once there is a reason to end it."""
        return Completion(self.ids, self.text, self.reason, self.log_probs)


def complete(
    functions: DecoderFunctions,
    params: Params,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    real: int,
    spread: Spread | None = None,
    tokenizer: Tokenizer | None = None,
    numbers: Sequence[int] | None = None,
    batch_size: int = 32,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continues every prompt (token ids below `real`), in order, with ids below `real`.

    A row draws by the seed, its number (default: its place in `prompts`) and its step, whatever the
    batches. `on_text` is called with a prompt's place and all its text so far, a few steps at a
    time. Without a tokenizer there is no text. Raises `UserError` for an empty prompt, an id that
    no token has, more positions than the model has, numbers that are not one a prompt, and
    impossible sampling.
    """
    sampling.check()
    draw_by = _check_numbers(numbers, len(prompts))
    for i, prompt in enumerate(prompts):
        _check_prompt(i, prompt, sampling, functions.spec.max_positions, real)
    completions: list[Completion] = []
    shards = row_shards(spread.placement.mesh) if spread else 1
    batch_size = -(-batch_size // shards) * shards
    programs = dict(functions=functions, spread=spread, real=real)
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        drawn = draw_by[start : start + batch_size]
        rows = _Batch(programs, params, tokenizer, sampling, part, start, drawn, batch_size)
        for texts in rows.run():
            if on_text is not None:
                for number, text in texts:
                    on_text(number, text)
        completions += rows.completions()
    return completions


def _check_numbers(numbers: Sequence[int] | None, count: int) -> np.ndarray:
    found = np.arange(count) if numbers is None else np.asarray(numbers)
    whole = found.shape == (count,) and (not count or np.issubdtype(found.dtype, np.integer))
    if not whole or (count and not 0 <= found.min() <= found.max() < 2**32):
        raise UserError(
            f"found numbers of shape {found.shape} and type {found.dtype} for {count} prompts; "
            "expected one whole number from 0 to 4294967295 a prompt."
        )
    return found.astype(np.uint32)


def _check_prompt(
    number: int, prompt: Sequence[int], sampling: Sampling, positions: int, real: int
) -> None:
    if not len(prompt):
        raise UserError(f"prompt {number} is empty: give at least one token.")
    if (bad := next((i for i in prompt if not 0 <= i < real), None)) is not None:
        raise UserError(
            f"prompt {number} holds the id {bad}; expected ids of the vocabulary, 0 to {real - 1}. "
            "Encode the text with the model's own tokenizer."
        )
    if len(prompt) + sampling.max_tokens > positions:
        raise UserError(
            f"prompt {number} has {len(prompt)} tokens: with max_tokens={sampling.max_tokens} that "
            f"is more than the model's {positions} positions. Shorten one."
        )


class _Batch:
    """One batch of prompts, from reading to the last stop."""

    def __init__(
        self,
        programs: dict[str, Any],
        params: Params,
        tokenizer: Tokenizer | None,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        first: int,
        numbers: np.ndarray,
        batch_size: int,
    ):
        self._params, self._first = params, first
        self._rows = [_Row(sampling, tokenizer) for _ in prompts]
        longest = -(-max(map(len, prompts)) // _BUCKET) * _BUCKET
        # Short batches are filled up with copies of the last prompt: the same programs serve.
        filled = [*prompts, *[prompts[-1]] * (batch_size - len(prompts))]
        self._tokens = np.zeros((batch_size, longest), np.int32)
        for i, prompt in enumerate(filled):
            self._tokens[i, : len(prompt)] = prompt
        self._lengths = np.asarray([len(prompt) for prompt in filled], np.int32)
        self._numbers = np.pad(numbers, (0, batch_size - len(prompts)), mode="edge")
        self._capacity = longest + -(-sampling.max_tokens // _STEPS) * _STEPS
        # What only the host looks at is no part of a program: other values compile nothing anew.
        on_device = dataclasses.replace(sampling, max_tokens=1, stop_strings=())
        self._static = programs | dict(sampling=on_device)

    def run(self) -> Iterator[list[tuple[int, str]]]:
        """Yields the texts that grew, until all rows have ended."""
        prompts = self._tokens, self._lengths, self._numbers
        state, head, ids, log_probs = _begin(
            self._params, *prompts, capacity=self._capacity, **self._static
        )
        yield self._take(ids[None], log_probs[None])
        begun = 1
        while any(not row.reason for row in self._rows):
            ended = np.ones(len(self._tokens), bool)
            ended[: len(self._rows)] = [bool(row.reason) for row in self._rows]
            state = state._replace(done=state.done | ended)
            begun_by = np.int32(begun), self._numbers
            state, (ids, log_probs) = _advance(self._params, head, state, *begun_by, **self._static)
            yield self._take(ids, log_probs)
            begun += _STEPS

    def _take(self, ids: Array, log_probs: Array) -> list[tuple[int, str]]:
        ids_of, log_probs_of = np.asarray(ids).T, np.asarray(log_probs).T
        grown = []
        for i, row in enumerate(self._rows):
            if not row.reason:
                row.extend(ids_of[i].tolist(), log_probs_of[i].tolist())
                grown.append((self._first + i, row.text))
        return grown

    def completions(self) -> list[Completion]:
        """After `run`."""
        return [row.complete() for row in self._rows]
