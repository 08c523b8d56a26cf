"""Text from a model: a fixed number of slots, each with a row that grows, from a queue of prompts.

A call of the device adds a few ids to every row. The host then looks at what came, gives the slots
of rows that ended to the next prompts, which are read several at once, and meanwhile the device has
its next call. A row's draws depend on the seed, its number and its length, on nothing else.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kdjax.device.runtime import mem_available
from kdjax.device.sharding import ROW_AXES, ROWS, row_shards
from kdjax.errors import UserError
from kdjax.models import kernels
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Cache, DecoderFunctions, Layers, Params
from kdjax.models.kernels import EXCLUDED, BlockSums
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import (
    Spread,
    gather_rows,
    map_rows,
    mask_padding,
    unembed,
)

_STEPS = 8  # on the device between two looks of the host
_BUCKET = 64  # prompts are padded to a multiple, so that few programs are compiled
_ROOM = 128  # the cache's positions are a multiple, for the same reason
_LEAST = 256  # slots of a device that are left when the last rows move together
_BLOCKS = 128  # of ids, of which a draw takes one and then an id in it


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


class _Slots(NamedTuple):
    """What is on the device between two calls; B slots."""

    cache: Cache
    last: Int[Array, " B"]  # the id to be read next
    positions: Int[Array, " B"]  # where it goes
    drawn: Int[Array, " B"]  # ids of the answer so far
    limits: Int[Array, " B"]  # at which it ends
    numbers: Array  # uint32 [B], by which it draws
    done: Array  # bool [B]


_LATER = P(None, ROW_AXES)  # rows on the second axis
_SPECS: Any = _Slots(Cache(_LATER, _LATER), *[ROWS] * 6)  # type: ignore[arg-type]


def pick(
    logits: Float[Array, "B V"],
    keys: Any,
    sampling: Sampling,
    real: int | None = None,
    *,
    kernel: bool = False,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One id below `real` a row, and its log-probability at temperature 1, from float32 logits.

    `keys` holds a random key a row, so that a row's draws do not depend on its batch. A block of
    ids is taken first, and then an id in it, each by the inverse of the cumulative sums at a number
    of 24 bits: unlikely ids keep their own probabilities. Noise on every id would take a random
    number for each of 152 thousand.
    """
    real = logits.shape[1] if real is None else real
    width, temperature = -(-logits.shape[1] // _BLOCKS), sampling.temperature or 1.0
    least = find_least(mask_padding(logits, real), sampling)
    run = kernels.sum_blocks if kernel else sum_blocks
    sums = run(logits, least, _BLOCKS, temperature, real)
    peak = jnp.max(sums.peaks, axis=-1, keepdims=True)
    below = sums.peaks - peak
    total = jnp.sum(sums.hard * jnp.exp(below), axis=-1)
    bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
    uniform = (bits >> 8).astype(jnp.float32) * 2.0**-24  # below 1
    if sampling.temperature == 0:
        block = jnp.argmax(sums.peaks, axis=-1).astype(jnp.int32)
    else:
        block = _invert(sums.soft * jnp.exp(below / temperature), uniform[:, 0])
    ids = block[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None]
    inside = jnp.take_along_axis(logits, jnp.minimum(ids, logits.shape[1] - 1), axis=-1)
    inside = jnp.where(ids < real, inside, EXCLUDED)
    if sampling.temperature == 0:
        place = jnp.argmax(inside, axis=-1).astype(jnp.int32)
    else:
        weights = jnp.exp((inside - peak) / temperature)
        weights = weights if least is None else jnp.where(inside >= least, weights, 0.0)
        place = _invert(weights, uniform[:, 1])
    at = jnp.take_along_axis(inside, place[:, None], axis=-1) - peak
    return block * width + place, at[:, 0] - jnp.log(total)


def sum_blocks(
    logits: Float[Array, "B V"],
    least: Float[Array, "B 1"] | None,
    blocks: int,
    temperature: float,
    real: int,
) -> BlockSums:
    """Sums of blocks of equal width; those that are kept are not below `least`."""
    width = -(-logits.shape[1] // blocks)
    room = ((0, 0), (0, blocks * width - logits.shape[1]))
    x = jnp.pad(mask_padding(logits, real), room, constant_values=EXCLUDED)
    x = x.reshape(-1, blocks, width)
    peaks = jnp.max(x, axis=-1)
    below = x - peaks[..., None]
    weights = jnp.exp(below / temperature)
    kept = weights if least is None else jnp.where(x >= least[..., None], weights, 0.0)
    return BlockSums(peaks, jnp.sum(jnp.exp(below), axis=-1), jnp.sum(kept, axis=-1))


def _invert(weights: Float[Array, "B N"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first place whose cumulative sum is above that share of the whole; its weight is not 0.

    Sums rounded in another order need not grow: a place of no weight could lie between two.
    """
    sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
    whole = jnp.max(sums, axis=-1, keepdims=True)
    return jnp.argmax(sums > uniform[:, None] * whole, axis=-1).astype(jnp.int32)


def find_least(logits: Float[Array, "*B V"], sampling: Sampling) -> Float[Array, "*B 1"] | None:
    """The least logit that top-k and top-p keep, None for all; those equal to it stay as well.

    Found without sorting.
    """
    least = None
    if sampling.temperature == 0:
        return None
    if 0 < sampling.top_k < logits.shape[-1]:
        least = _cut(logits, lambda kept: jnp.sum(kept, axis=-1) >= sampling.top_k)
    if sampling.top_p < 1:
        peak = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp((logits - peak) / sampling.temperature)
        if least is not None:
            weights = jnp.where(logits >= least, weights, 0.0)
        enough = sampling.top_p * jnp.sum(weights, axis=-1)
        least = _cut(logits, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= enough)
    return least


def _cut(logits: Float[Array, "*B V"], enough: Callable[[Array], Array]) -> Float[Array, "*B 1"]:
    """The largest number at which the logits from it on are enough.

    Found by cutting the range of all float32 numbers in eight, again and again.
    """
    low, high = (jnp.full(logits.shape[:-1], _rank(x)) for x in (-jnp.inf, jnp.inf))

    def cut(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        part = (high - low + 7) // 8
        for times in range(1, 8):  # reductions of one array, which XLA does in one reading
            at = jnp.minimum(ends[0] + times * part, ends[1])
            good = enough(logits >= _number(at)[..., None]) & (at < ends[1])
            low, high = jnp.where(good, at, low), jnp.where(good, high, jnp.minimum(high, at))
        return low, high

    low, _ = jax.lax.fori_loop(0, 12, cut, (low, high))
    return _number(low)[..., None]


def _rank(x: Any) -> Array:
    """Float32 numbers as uint32 of the same order."""
    bits = jax.lax.bitcast_convert_type(jnp.float32(x), jnp.uint32)
    return jnp.where(bits >> 31 == 0, bits | jnp.uint32(1 << 31), ~bits)


def _number(rank: Array) -> Array:
    """Undoes `_rank`."""
    bits = jnp.where(rank >> 31 == 0, ~rank, rank ^ jnp.uint32(1 << 31))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def find_stops(ids: Array, sampling: Sampling) -> Array:
    """Which ids end a row."""
    stops = jnp.asarray(sampling.stop_ids, jnp.int32)
    return jnp.any(ids[..., None] == stops.reshape((1,) * ids.ndim + (-1,)), axis=-1)


def _has_room(functions: DecoderFunctions, spread: Spread | None, itemsize: int | float) -> bool:
    """Whether the layers may lie in memory a second time, with so many bytes a number."""
    shards = spread.placement.mesh.shape["fsdp"] if spread else 1
    device = spread.placement.mesh.local_devices[0] if spread else jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        free = mem_available()
    room = count_layers(functions.spec, itemsize, shards, free) > 0
    if spread and spread.placement.mesh.is_multi_process:  # all run the same program
        room = bool(np.all(multihost_utils.process_allgather(np.asarray(room))))
    return room


def count_layers(
    spec: ArchSpec, itemsize: int | float, shards: int, free: int | float | None
) -> int:
    """Bytes of the layers apart where so many bytes are free (None: unknown); 0: they stay stacked.

    Experts stay as they are stored: of few rows each multiplies few. Shards stay shards.
    """
    if spec.experts or shards > 1:
        return 0
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    numbers = spec.num_layers * spec.hidden_size * (attention + 3 * spec.mlp_size)
    needed = int(numbers * itemsize)
    return needed if free is None or 1.5 * needed < free else 0


def count_slots(
    spec: ArchSpec, itemsize: int, slots: int, prompt: int, answer: int, *, kernel: bool
) -> dict[str, int]:
    """Bytes of so many slots for such lengths on one device, by part, beside the weights.

    A call holds its logits, or what the reading of prompts keeps, or, without the kernel of
    attention, a layer's keys and values once more.
    """
    pair = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize
    cache = slots * _room_for(prompt + answer) * pair
    positions = _prompts_at_once(slots) * -(-prompt // _BUCKET) * _BUCKET
    # Keys and values as layers give them, stacked and turned; a layer's activations.
    read = 3 * pair + itemsize * (2 * spec.mlp_width + 4 * spec.hidden_size)
    return {
        "keys and values": cache,
        "a call's own": max(
            4 * slots * spec.vocab_size, positions * read, (not kernel) * cache // spec.num_layers
        ),
    }


def _room_for(ids: int) -> int:
    """Positions of a cache for so many ids."""
    return -(-ids // _ROOM) * _ROOM


def _prompts_at_once(slots: int) -> int:
    """How many prompts a device of so many slots reads in a call."""
    return min(max(slots // 8, 1), 32)


def prepare_weights(
    params: Params, *, functions: DecoderFunctions, spread: Spread | None, rows: int | None = None
) -> tuple[Layers | None, Any]:
    """What each id multiplies, ready for products: the layers, if there is room, and the head.

    On a CPU one row is multiplied with weights as narrow as they are stored: it takes as long as
    their bytes.
    """
    narrow = rows == 1 and functions.compute.on_cpu
    prepare: Any = functools.partial(_prepare, functions=functions, spread=spread, narrow=narrow)
    itemsize = functions.compute.product_dtype.itemsize
    if narrow and (numbers := count_layers(functions.spec, 1, 1, None)):
        layers, _ = jax.eval_shape(functools.partial(prepare, unstack=True), params)
        itemsize = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers)) / numbers
    return prepare(params, unstack=_has_room(functions, spread, itemsize))


@functools.partial(jax.jit, static_argnames=("functions", "spread", "unstack", "narrow"))
def _prepare(
    params: Params,
    *,
    functions: DecoderFunctions,
    spread: Spread | None,
    unstack: bool,
    narrow: bool = False,
) -> tuple[Layers | None, Any]:
    def prepare(params: Params) -> tuple[Layers | None, Any]:
        layers = functions.unstack(params, narrow=narrow) if unstack else None
        return layers, functions.ready_head(params, narrow=narrow)

    return map_rows(prepare, spread, outs=P())(params)


@functools.partial(jax.jit, static_argnames=("functions", "spread", "slots", "capacity"))
def _open(
    params: Params, *, functions: DecoderFunctions, spread: Spread | None, slots: int, capacity: int
) -> _Slots:
    """Empty slots."""
    local = slots // (row_shards(spread.placement.mesh) if spread else 1)

    def make(params: Params) -> _Slots:
        spec = functions.spec
        shape = spec.num_layers, local, spec.num_kv_heads, capacity, spec.head_dim
        half = jnp.zeros(shape, functions.compute.dtype)
        zeros = jnp.zeros((local,), jnp.int32)
        numbers = zeros.astype(jnp.uint32)
        return _Slots(Cache(half, half), zeros, zeros, zeros, zeros, numbers, zeros == 0)

    return map_rows(make, spread, outs=_SPECS)(params)


def _lay_beside(params: Params, slots: _Slots) -> _Slots:
    """The slots where every later call leaves them: each program is compiled once.

    Of one device they come out of `_open` as nobody's in particular, and `_fill` would be compiled
    for these and then for those that a call made.
    """
    place = jax.tree.leaves(params)[0].sharding
    if isinstance(place, NamedSharding) and place.mesh.size == 1:
        return jax.device_put(slots, NamedSharding(place.mesh, P()))
    return slots


@functools.partial(jax.jit, static_argnames="spread")
def _pack(params: Params, slots: _Slots, keep: Array, *, spread: Spread | None) -> _Slots:
    """The slots `keep`, counted on each device, and no others."""

    def pack(_: Params, slots: _Slots, keep: Array) -> _Slots:
        cache = jax.tree.map(lambda x: x[:, keep], slots.cache)
        return _Slots(cache, *(x[keep] for x in slots[1:]))

    return map_rows(pack, spread, ins=(_SPECS, ROWS), outs=_SPECS)(params, slots, keep)


class _Prompts(NamedTuple):
    """Prompts for slots; on each device, those of its own slots."""

    tokens: Any  # int32 [N, T], padded behind
    lengths: Any  # int32 [N]
    slots: Any  # int32 [N], counted on each device; its count of slots for a row of no prompt
    limits: Any  # int32 [N]
    numbers: Any  # uint32 [N]


@functools.partial(jax.jit, static_argnames=("functions", "spread"), donate_argnames="slots")
def _fill(
    params: Params,
    layers: Layers | None,
    slots: _Slots,
    prompts: _Prompts,
    *,
    functions: DecoderFunctions,
    spread: Spread | None,
) -> _Slots:
    """Reads prompts into slots, all but their last ids, which the next step reads."""

    def fill(params: Params, layers: Layers | None, slots: _Slots, prompts: _Prompts) -> _Slots:
        tokens, lengths, at = prompts.tokens, prompts.lengths, prompts.slots
        _, read = functions.prefill(params, tokens, lengths, tokens.shape[1], layers)
        cache = jax.tree.map(
            lambda kept, x: kept.at[:, at, :, : x.shape[3]].set(x, mode="drop"), slots.cache, read
        )
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
        none = jnp.zeros_like(lengths)
        fresh = last, lengths - 1, none, prompts.limits, prompts.numbers, none > 0
        return _Slots(
            cache,
            *(x.at[at].set(y, mode="drop") for x, y in zip(slots[1:], fresh, strict=True)),
        )

    specs = dict(ins=(P(), _SPECS, _Prompts(*[ROWS] * 5)), outs=_SPECS)
    return map_rows(fill, spread, **specs)(params, layers, slots, prompts)


def _advance_slots(
    params: Params,
    layers: Layers | None,
    head: Any,
    slots: _Slots,
    seed: Array,
    ended: Array,
    *,
    functions: DecoderFunctions,
    spread: Spread | None,
    real: int,
    sampling: Sampling,
    steps: int,
) -> tuple[Any, ...]:
    """`steps` more ids `[steps, B]` with their log-probabilities, and which rows are done.

    `ended` are rows that the host has ended. Rows that are done idle.
    """

    def advance(
        params: Params, layers: Layers | None, head: Any, slots: _Slots, seed: Array, ended: Array
    ) -> Any:
        base = jax.random.key(seed)
        keys = jax.vmap(lambda row: jax.random.fold_in(base, row))(slots.numbers)

        def step(slots: _Slots, _: None) -> tuple[_Slots, tuple[Array, Array]]:
            # A row that is done reads and writes the first place of a slot that nobody needs.
            positions = jnp.where(slots.done, 0, slots.positions)
            hidden, cache = functions.extend(
                params, slots.last[:, None], positions, slots.cache, layers
            )
            logits = unembed(hidden, head)[:, 0]
            draw = functools.partial(pick, kernel=spread is not None and spread.placement.kernels)
            at = jax.vmap(jax.random.fold_in)(keys, slots.drawn)
            ids, log_probs = draw(logits, at, sampling, real)
            stops = find_stops(ids, sampling)
            told = (~(slots.done | stops)).astype(jnp.int32)
            drawn = slots.drawn + told
            slots = slots._replace(
                cache=cache,
                last=jnp.where(told > 0, ids, slots.last),
                positions=slots.positions + told,
                drawn=drawn,
                done=slots.done | stops | (drawn >= slots.limits),
            )
            return slots, (ids, log_probs)

        slots = slots._replace(done=slots.done | ended)
        slots, drawn = jax.lax.scan(step, slots, None, length=steps)
        return slots, drawn, (slots.drawn, slots.done)

    specs = dict(ins=(P(), P(), _SPECS, P(), ROWS), outs=(_SPECS, (_LATER, _LATER), (ROWS, ROWS)))
    mapped = map_rows(advance, spread, **specs)
    slots, *found = mapped(params, layers, head, slots, seed, ended)
    return slots, *gather_rows(found, spread)


_advance, _advance_on_cpu = (
    jax.jit(
        _advance_slots,
        static_argnames=("functions", "spread", "real", "sampling", "steps"),
        donate_argnames="slots",
        compiler_options=options,
    )
    # Vectors of 256 bits, XLA's choice, take a quarter longer for one row times the bits of bf16.
    for options in (None, {"xla_cpu_prefer_vector_width": 512})
)


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
    limits: Sequence[int] | None = None,
    batch_size: int = 32,
    room: int = 0,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continues every prompt (token ids below `real`), in order, with ids below `real`.

    `batch_size` rows grow at once; one that ends makes room for the next prompt. A row draws by the
    seed, its number (default: its place in `prompts`) and its step, whatever the batches. `limits`
    are most ids a prompt, `sampling.max_tokens` by default. `room` are positions that a slot has at
    least: calls whose prompts' lengths differ then share their programs. `on_text` is called with a
    prompt's place and all its text so far, a few steps at a time. Without a tokenizer there is no
    text.

    Raises `UserError` for an empty prompt, an id that no token has, more positions than the model
    has, numbers or limits that are not one a prompt, and impossible sampling.
    """
    sampling.check()
    draw_by = _check_each("numbers", numbers, np.arange(len(prompts)), 0, 2**32 - 1)
    most = np.full(len(prompts), sampling.max_tokens)
    most = _check_each("limits", limits, most, 1, sampling.max_tokens)
    for i, prompt in enumerate(prompts):
        _check_prompt(i, prompt, sampling, functions.spec.max_positions, real)
    if not len(prompts):
        return []
    shards = row_shards(spread.placement.mesh) if spread else 1
    slots = -(-batch_size // shards) * shards
    programs = dict(functions=functions, spread=spread)
    rows = [
        Row(np.asarray(prompt, np.int32), int(limit), int(number), sampling, tokenizer)
        for prompt, limit, number in zip(prompts, most, draw_by, strict=True)
    ]
    engine = _Engine(programs, params, rows, sampling, real, slots, shards, room)
    for row in engine.run():
        if on_text is not None:
            on_text(row, rows[row].read())
    return [row.complete() for row in rows]


def _check_each(
    name: str, given: Sequence[int] | None, default: np.ndarray, least: int, most: int
) -> np.ndarray:
    found = default if given is None else np.asarray(given)
    whole = found.shape == default.shape and (
        not found.size or np.issubdtype(found.dtype, np.integer)
    )
    if not whole or (found.size and not least <= found.min() <= found.max() <= most):
        raise UserError(
            f"found {name} of shape {found.shape} and type {found.dtype} for {default.size} "
            f"prompts; expected one whole number from {least} to {most} a prompt."
        )
    return found


def _check_prompt(
    number: int, prompt: Sequence[int], sampling: Sampling, positions: int, real: int
) -> None:
    if not len(prompt):
        raise UserError(f"prompt {number} is empty: give at least one token.")
    ids = np.asarray(prompt)
    if ids.min() < 0 or ids.max() >= real:
        bad = ids[(ids < 0) | (ids >= real)][0]
        raise UserError(
            f"prompt {number} holds the id {bad}; expected ids of the vocabulary, 0 to {real - 1}. "
            "Encode the text with the model's own tokenizer."
        )
    if len(prompt) + sampling.max_tokens > positions:
        raise UserError(
            f"prompt {number} has {len(prompt)} tokens: with max_tokens={sampling.max_tokens} that "
            f"is more than the model's {positions} positions. Shorten one."
        )


class Row:
    """A prompt, and its completion as it grows on the host."""

    def __init__(
        self,
        prompt: np.ndarray,
        limit: int,
        number: int,
        sampling: Sampling,
        tokenizer: Tokenizer | None,
    ):
        self.prompt, self.limit, self.number = prompt, limit, number
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.reason = ""
        self._sampling, self._tokenizer = sampling, tokenizer
        self._end: int | None = None  # of the text, if a stop string ends it

    def extend(self, ids: list[int], log_probs: list[float], done: bool) -> None:
        """Takes ids, the last ones if done; looks for stop strings in the text that they end."""
        self.ids += ids
        self.log_probs += log_probs
        if done:
            self.reason = "length" if len(self.ids) == self.limit else "stop"
        strings = self._sampling.stop_strings
        if not strings or self._tokenizer is None:
            return
        # A character takes at most 4 ids: one for each of its bytes.
        new = len(ids) + 4 * max(map(len, strings))
        if any(s in self._tokenizer.decode(self.ids[-new:]) for s in strings):
            text = self._decode(len(self.ids))
            places = [text.find(s) for s in strings if s in text]
            if places:
                self._cut(min(places))

    def read(self) -> str:
        """The text so far, without what a stop string cuts off."""
        return self._decode(len(self.ids))[: self._end]

    def _decode(self, count: int) -> str:
        return self._tokenizer.decode(self.ids[:count]) if self._tokenizer else ""

    def _cut(self, end: int) -> None:
        """Ends the row before character `end`: no id that only adds to what is cut off stays."""
        self._end, self.reason = end, "stop"
        count = len(self.ids)
        while count and len(self._decode(count - 1)) >= end:
            count -= 1
        self.ids, self.log_probs = self.ids[:count], self.log_probs[:count]

    def complete(self) -> Completion:
        """The completion, once there is a reason to end it."""
        return Completion(self.ids, self.read(), self.reason, self.log_probs)


class _Call(NamedTuple):
    """A call of the device that the host has not looked at."""

    drawn: Any  # ids and log-probabilities, [steps, B]
    counts: Any  # ids of each row so far, and whether it is done, [B]
    rows: np.ndarray  # int [B], the row of each slot then; -1: none


class _Engine:
    """Slots, and the rows that wait for one."""

    def __init__(
        self,
        programs: dict[str, Any],
        params: Params,
        rows: list[Row],
        sampling: Sampling,
        real: int,
        slots: int,
        shards: int,
        room: int,
    ):
        self._programs, self._params, self._rows = programs, params, rows
        # Prompts of like lengths are read together, so that few are padded far.
        order = sorted(range(len(rows)), key=lambda i: -(len(rows[i].prompt) // -_BUCKET))
        self._waiting = collections.deque(order)
        self._row_of = np.full(slots, -1)
        self._ended = np.zeros(slots, bool)  # by the host, since the last call
        self._asked = np.zeros(slots, int)  # ids that the calls so far can have drawn
        self._shards, self._local = shards, slots // shards
        self._at_once = _prompts_at_once(self._local)
        longest = max(len(row.prompt) for row in rows) + sampling.max_tokens
        capacity = _room_for(max(longest, room))
        opened = _open(params, **programs, slots=slots, capacity=capacity)
        self._slots = _lay_beside(params, opened)
        self._layers, self._head = prepare_weights(params, **programs, rows=slots)
        # What only the host looks at is no part of a program: other values compile nothing anew.
        on_device = dataclasses.replace(sampling, max_tokens=1, stop_strings=(), seed=0)
        self._seed = np.uint32(sampling.seed % 2**32)
        # While the host looks at a call, a GPU has the next. Elsewhere that one would only be late.
        spread = programs["spread"]
        self._ahead = int(spread is not None and spread.placement.platform == "gpu")
        self._static = programs | dict(real=real, sampling=on_device, steps=_STEPS)

    def run(self) -> Iterator[int]:
        """Yields the numbers of rows that grew, until all have ended."""
        calls: collections.deque[_Call] = collections.deque()
        while True:
            self._refill()
            if self._is_busy():
                calls.append(self._advance())
            if not calls:
                return
            if len(calls) > self._ahead or not self._is_busy():
                yield from self._take(calls.popleft())
            if self._is_sparse():
                while calls:
                    yield from self._take(calls.popleft())
                self._pack()

    def _is_busy(self) -> bool:
        """Whether a row may grow by another call."""
        taken = self._row_of >= 0
        limits = np.asarray([self._rows[i].limit for i in self._row_of[taken]])
        return bool(np.any(self._asked[taken] < limits))

    def _is_sparse(self) -> bool:
        """Whether nobody waits and a quarter of the slots would do."""
        taken = (self._row_of >= 0).reshape(self._shards, -1)
        few = np.all(taken.sum(axis=1) <= self._local // 4)
        return bool(not self._waiting and few and self._local // 4 >= _LEAST)

    def _pack(self) -> None:
        """Moves the rows that are left together: a step of empty slots takes as long."""
        self._local //= 4
        taken = (self._row_of >= 0).reshape(self._shards, -1)
        keep = np.argsort(~taken, axis=1, kind="stable")[:, : self._local]
        places = (keep + np.arange(self._shards)[:, None] * taken.shape[1]).ravel()
        local = keep.ravel().astype(np.int32)
        self._slots = _pack(self._params, self._slots, local, spread=self._programs["spread"])
        columns = self._row_of, self._ended, self._asked
        self._row_of, self._ended, self._asked = (x[places] for x in columns)

    def _advance(self) -> _Call:
        ended, self._ended = self._ended, np.zeros_like(self._ended)
        state = self._layers, self._head, self._slots, self._seed, ended
        on_cpu = self._programs["functions"].compute.on_cpu
        advance = _advance_on_cpu if on_cpu else _advance
        self._slots, drawn, counts = advance(self._params, *state, **self._static)
        self._asked += _STEPS
        return _Call(drawn, counts, self._row_of.copy())

    def _take(self, call: _Call) -> Iterator[int]:
        (ids, log_probs), (counts, done) = jax.device_get((call.drawn, call.counts))
        ids, log_probs = ids.T, log_probs.T
        for slot in np.flatnonzero((call.rows >= 0) & (call.rows == self._row_of)):
            number = int(call.rows[slot])
            row = self._rows[number]
            new = int(counts[slot]) - len(row.ids)
            row.extend(ids[slot, :new].tolist(), log_probs[slot, :new].tolist(), bool(done[slot]))
            if row.reason:
                self._row_of[slot] = -1
                self._ended[slot] = True
            yield number

    def _refill(self) -> None:
        """Reads the next prompts into free slots, once there are enough of both for one call."""
        while self._waiting:
            free = [
                np.flatnonzero(part < 0)[: self._at_once]
                for part in self._row_of.reshape(self._shards, -1)
            ]
            room = sum(map(len, free))
            enough = min(self._at_once * self._shards, len(self._waiting))
            if room < enough and (room == 0 or np.any(self._row_of >= 0)):
                return
            self._fill(free)

    def _fill(self, free: list[np.ndarray]) -> None:
        count = self._shards * self._at_once
        taken = [
            (shard * self._at_once + i, shard, int(slot))
            for i in range(self._at_once)
            for shard, slots in enumerate(free)
            for slot in slots[i : i + 1]
        ][: len(self._waiting)]
        numbers = [self._waiting.popleft() for _ in taken]
        longest = max(len(self._rows[i].prompt) for i in numbers)
        tokens = np.zeros((count, -(-longest // _BUCKET) * _BUCKET), np.int32)
        lengths, slots = np.ones(count, np.int32), np.full(count, self._local, np.int32)
        limits, draw_by = np.ones(count, np.int32), np.zeros(count, np.uint32)
        for (place, shard, slot), number in zip(taken, numbers, strict=True):
            row = self._rows[number]
            tokens[place, : len(row.prompt)] = row.prompt
            lengths[place], slots[place] = len(row.prompt), slot
            limits[place], draw_by[place] = row.limit, row.number
            whole = shard * self._local + slot
            self._row_of[whole], self._ended[whole], self._asked[whole] = number, False, 0
        prompts = _Prompts(tokens, lengths, slots, limits, draw_by)
        state = self._layers, self._slots
        self._slots = _fill(self._params, *state, prompts, **self._programs)
