"""Generation: a fixed number of slots, each with a row that grows, filled from a queue of prompts.

A call of the device adds a few ids to every row. The host then reads the ids and fills the slots of
finished rows with the next prompts, several in one call; meanwhile the device runs the next call.
A `Writer` says how rows grow: by one id a step (`StepWriter`), or by the ids of a draft that the
model accepts (`speculation.DraftWriter`). A row's draws depend only on the seed, the row's number
and its length.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kdjax.device.runtime import TRITON_PRODUCTS, says_products
from kdjax.device.sharding import ROW_AXES, ROWS, row_shards
from kdjax.errors import UserError
from kdjax.models.arch import ArchSpec
from kdjax.models.decode_weights import prepare_weights
from kdjax.models.decoder import Cache, DecoderFunctions, Params, write_late
from kdjax.models.kernels import softmax
from kdjax.models.kernels.common import EXCLUDED
from kdjax.models.kernels.softmax import BlockSums
from kdjax.models.shards import Spread, gather_rows, map_rows
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import PackedMatrix, mask_padding, unembed

STEPS = 8  # in a call of the device
_BUCKET = 64  # positions that rows are padded to, at least
_ROOM = 128  # a cache's positions are a multiple of it, so that few programs are compiled
AT_ONCE = 32  # rows that grow together by default
_LEAST = 256  # slots of a device, at least, that the last rows are packed into
_BLOCKS = 128  # of ids: a draw takes a block, then an id in it
_FEW = 16  # one row in this many may be set apart, being far longer than the others


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How ids are drawn and when a row ends."""

    max_tokens: int = 512
    temperature: float = 0.0  # 0: the most likely id
    top_p: float = 1.0  # draws from the smallest set of ids that reaches this probability
    top_k: int = 0  # draws from this many most likely ids; 0: from all
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()  # cut off, with the text after them
    seed: int = 0

    def check(self) -> None:
        """Raises `UserError` naming every field that cannot work."""
        rules = {
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < np.inf, "0 or more, and finite"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "stop_strings": (all(self.stop_strings), "no empty text"),
        }
        bad = [f"{k}={getattr(self, k)!r}: must be {w}" for k, (ok, w) in rules.items() if not ok]
        if bad:
            raise UserError("cannot sample: " + "; ".join(bad))


class Drafted(NamedTuple):
    """Counts of a row's drafts."""

    passes: int  # of the big model over drafts
    accepted: int  # drafts, in all passes together


class Completion(NamedTuple):
    """Continuation of a prompt; stop ids and stop strings are left out."""

    ids: list[int]  # without the prompt's
    text: str  # the ids, decoded
    reason: str  # "stop" or "length"
    log_probs: list[float]  # of each id, nats, under the model at temperature 1
    drafted: Drafted | None = None  # with a draft model


class Slots(NamedTuple):
    """State on the device between two calls; B slots."""

    cache: Any  # a `Cache` of each model that reads the rows
    before: Int[Array, " B"]  # the id before `last`
    last: Int[Array, " B"]  # the id to be read next
    positions: Int[Array, " B"]  # of `last`
    drawn: Int[Array, " B"]  # ids of the answer so far
    limits: Int[Array, " B"]  # of `drawn`, at which the row ends
    numbers: Array  # uint32 [B], for the rows' random keys
    done: Array  # bool [B]

    @property
    def places(self) -> Int[Array, " B"]:
        """Positions of the next ids; 0 for a row that is done, whose id is ignored."""
        return jnp.where(self.done, 0, self.positions)


class Drawn(NamedTuple):
    """Ids that the S steps of a call added to B rows, N at most a step."""

    ids: Int[Array, "S B N"]
    log_probs: Float[Array, "S B N"]  # under the model at temperature 1
    counts: Int[Array, "S B"]  # the row's are the first N of a step's ids
    accepted: Any = None  # int32 [S, B]: accepted drafts of the step; -1: the row had ended


@runtime_checkable  # tests check annotations with isinstance
class Writer(Protocol):
    """How rows grow, and the models that read them; hashable, static under jit.

    `params` are the models' parameters, `weights` the result of `prepare`.
    """

    @property
    def spread(self) -> Spread | None:
        """How `params` are spread over devices."""
        ...

    @property
    def spare(self) -> int:
        """Positions that a slot needs in addition to its row's."""
        ...

    def check_prompt(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Raises `UserError` for a prompt that cannot be continued."""
        ...

    def for_length(self, positions: int) -> "Writer":
        """This writer for rows of at most `positions`."""
        ...

    def prepare(self, params: Any) -> Any:
        """The weights in the layout that steps multiply."""
        ...

    def open_cache(self, slots: int, capacity: int) -> Any:
        """Caches of empty slots of a device."""
        ...

    def read(self, params: Any, weights: Any, tokens: Array, lengths: Array) -> Any:
        """Caches of prompts `[N, T]`, padded at the end."""
        ...

    def advance(
        self, params: Any, weights: Any, slots: Slots, keys: Any, sampling: Sampling
    ) -> tuple[Slots, Drawn]:
        """A few steps of a device's slots; `keys` `[B]` are made of the rows' numbers."""
        ...


_LATER = P(None, ROW_AXES)  # rows on the second axis
_SPECS: Any = Slots(_LATER, *[ROWS] * 7)  # type: ignore[arg-type]


def pick(
    logits: Float[Array, "B V"],
    keys: Any,
    sampling: Sampling,
    real: int | None = None,
    *,
    kernel: bool = False,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One id below `real` a row, and its log-probability at temperature 1, from float32 logits.

    `keys` has a random key for each row, so that a row's draws do not depend on its batch. A draw
    takes a block of ids, then an id in it, each by the inverse of the cumulative sums at a number
    of 24 bits: unlikely ids keep their probabilities. Noise on every id would need 152 thousand
    random numbers.
    """
    real = logits.shape[1] if real is None else real
    width, temperature = -(-logits.shape[1] // _BLOCKS), sampling.temperature or 1.0
    least = find_least(mask_padding(logits, real), sampling)
    run = softmax.sum_blocks if kernel else sum_blocks
    sums = run(logits, least, _BLOCKS, temperature, real)
    peak = jnp.max(sums.peaks, axis=-1, keepdims=True)
    below = sums.peaks - peak
    total = jnp.sum(sums.hard * jnp.exp(below), axis=-1)
    uniform = _draw_uniform(keys)
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


def draw_by_weight(weights: Float[Array, "B V"], keys: Any) -> Int[Array, " B"]:
    """One id a row, drawn by weight: a block, then an id in it, as in `pick`."""
    width = -(-weights.shape[1] // _BLOCKS)
    room = ((0, 0), (0, _BLOCKS * width - weights.shape[1]))
    blocks = jnp.pad(weights, room).reshape(-1, _BLOCKS, width)
    uniform = _draw_uniform(keys)
    block = _invert(jnp.sum(blocks, axis=-1), uniform[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * width + _invert(inside, uniform[:, 1])


def _draw_uniform(keys: Any) -> Float[Array, "B 2"]:
    """Two numbers of 24 bits in [0, 1) for each key."""
    bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def sum_blocks(
    logits: Float[Array, "B V"],
    least: Float[Array, "B 1"] | None,
    blocks: int,
    temperature: float,
    real: int,
) -> BlockSums:
    """Sums of blocks of equal width; `soft` leaves out logits below `least`."""
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
    """The first place whose cumulative sum is above `uniform` times the total, of a weight above 0.

    Sums that are rounded in another order may fall: a place of weight 0 could be taken.
    """
    sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
    total = jnp.max(sums, axis=-1, keepdims=True)
    return jnp.argmax(sums > uniform[:, None] * total, axis=-1).astype(jnp.int32)


def find_least(logits: Float[Array, "*B V"], sampling: Sampling) -> Float[Array, "*B 1"] | None:
    """The least logit that top-k and top-p leave, None for all; equal logits stay as well.

    It is found without sorting.
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
    """The largest number for which the logits at or above it are enough.

    A search over all float32 numbers, whose range is cut in eight at each step.
    """
    low, high = (jnp.full(logits.shape[:-1], _rank(x)) for x in (-jnp.inf, jnp.inf))

    def cut(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        part = (high - low + 7) // 8
        for times in range(1, 8):  # reductions of one array, which XLA reads once
            at = jnp.minimum(ends[0] + times * part, ends[1])
            good = enough(logits >= _number(at)[..., None]) & (at < ends[1])
            low, high = jnp.where(good, at, low), jnp.where(good, high, jnp.minimum(high, at))
        return low, high

    low, _ = jax.lax.fori_loop(0, 12, cut, (low, high))
    return _number(low)[..., None]


def _rank(x: Any) -> Array:
    """Float32 numbers as uint32, in the order of the numbers."""
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


def count_slots(
    spec: ArchSpec,
    itemsize: int,
    slots: int,
    prompt: int,
    answer: int,
    *,
    kernel: bool,
) -> dict[str, int]:
    """Counts the bytes of slots for these lengths on one device, by part, without the weights.

    A call needs, in addition to the cache, its logits, or the activations of prompts, or, without
    the attention kernel, a layer's keys and values once more. The kernel of delta nets also stores
    the updates of a call's steps.
    """
    layers, deltas = (len(spec.places(delta=delta)) for delta in (False, True))
    pair = 2 * layers * spec.num_kv_heads * spec.head_dim * itemsize
    state = 4 * spec.delta_value_heads * spec.delta_key_dim * spec.delta_value_dim
    state += itemsize * (spec.delta_kernel - 1) * spec.delta_columns
    ids = prompt + answer
    cache = slots * pair * _room_for(ids)
    positions = prompts_at_once(slots) * pad_length(prompt, ids)
    # Keys and values of layers, stacked and transposed; a layer's activations.
    read = 3 * pair + itemsize * (2 * spec.mlp_width + 4 * spec.hidden_size)
    floats = spec.delta_key_heads * spec.delta_key_dim
    floats += spec.delta_value_heads * (spec.delta_value_dim + 1)
    news = deltas * STEPS * (4 * floats + itemsize * spec.delta_columns)
    return {
        "keys and values": cache,
        **({"states": slots * deltas * state} if deltas else {}),
        **({"news of states": slots * news} if kernel and deltas else {}),
        "a call's own": max(
            4 * slots * spec.vocab_size,
            positions * read,
            (not kernel) * cache // max(layers, 1),
        ),
    }


def set_apart(
    lengths: Sequence[int], max_tokens: int, room: int = 0
) -> tuple[list[int], list[int]]:
    """Splits prompts: indices answered together, and indices answered after them.

    Every slot has room for the longest prompt of its group. So prompts that need more than twice
    the others' room, up to a sixteenth of all, are answered after the others. With a `room`,
    prompts that need more are.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    if room:
        fit = sum(n + max_tokens <= room for n in lengths)
        return sorted(order[:fit]), sorted(order[fit:])
    rooms = [_room_for(lengths[i] + max_tokens) for i in order]
    for few in range(len(order) // _FEW, 0, -1):
        if rooms[-few] > 2 * rooms[-few - 1]:
            return sorted(order[:-few]), sorted(order[-few:])
    return sorted(order), []


def find_room(lengths: Sequence[int], max_tokens: int) -> int:
    """Positions that every prompt but those set apart needs; calls with one room share programs."""
    together, _ = set_apart(lengths, max_tokens)
    return max((lengths[i] for i in together), default=0) + max_tokens


def group_prompts(
    lengths: Sequence[int], max_tokens: int, batch_size: int, room: int = 0
) -> list[tuple[list[int], int]]:
    """The groups of `set_apart` that are not empty, in order, each with its number of slots.

    Prompts set apart get no more slots than they need, rounded up to few sizes.
    """
    together, apart = set_apart(lengths, max_tokens, room)
    few = min(batch_size, -(-len(apart) // AT_ONCE) * AT_ONCE)
    return [(group, slots) for group, slots in ((together, batch_size), (apart, few)) if group]


def pad_length(longest: int, room: int | None = None) -> int:
    """Positions of rows whose longest text has `longest`; at most a cache's for `room` ids.

    They are 64, 128, 192, 256, 384, 512, 768, 1,024 and so on, two sizes for each doubling: few
    programs are compiled, and rows are at most half longer than the text.
    """
    step = max(_BUCKET, 1 << max((longest - 1).bit_length() - 2, 0))
    padded = -(-longest // step) * step
    return padded if room is None else min(padded, _room_for(room))


def _room_for(ids: int) -> int:
    """Positions of a cache for this number of ids."""
    return -(-ids // _ROOM) * _ROOM


def prompts_at_once(slots: int) -> int:
    """Number of prompts that a device with these slots reads in a call."""
    return min(max(slots // 8, 1), 32)


@functools.partial(jax.jit, static_argnames=("writer", "slots", "capacity"))
def _open(params: Any, *, writer: Writer, slots: int, capacity: int) -> Slots:
    """Empty slots."""
    spread = writer.spread
    local = slots // (row_shards(spread.placement.mesh) if spread else 1)

    def make(_: Any) -> Slots:
        zeros = jnp.zeros((local,), jnp.int32)
        numbers, cache = zeros.astype(jnp.uint32), writer.open_cache(local, capacity)
        return Slots(cache, zeros, zeros, zeros, zeros, zeros, numbers, zeros == 0)

    return map_rows(make, spread, outs=_SPECS)(params)


def _lay_beside(params: Any, slots: Slots) -> Slots:
    """The slots with the sharding that later calls return, so that programs are compiled once.

    On one device `_open` returns arrays without a sharding. `_fill` would be compiled for them, and
    again for the arrays that a call returned.
    """
    place = jax.tree.leaves(params)[0].sharding
    if isinstance(place, NamedSharding) and place.mesh.size == 1:
        return jax.device_put(slots, NamedSharding(place.mesh, P()))
    return slots


@functools.partial(jax.jit, static_argnames="spread")
def _pack(params: Any, slots: Slots, keep: Array, *, spread: Spread | None) -> Slots:
    """Only the slots `keep`, whose numbers count on each device."""

    def pack(_: Any, slots: Slots, keep: Array) -> Slots:
        cache = jax.tree.map(lambda x: x[:, keep], slots.cache)
        return Slots(cache, *(x[keep] for x in slots[1:]))

    return map_rows(pack, spread, ins=(_SPECS, ROWS), outs=_SPECS)(params, slots, keep)


class _Prompts(NamedTuple):
    """Prompts for slots; each device has the prompts of its slots."""

    tokens: Any  # int32 [N, T], padded at the end
    lengths: Any  # int32 [N]
    slots: Any  # int32 [N], counting on each device; the number of its slots for an empty row
    limits: Any  # int32 [N]
    numbers: Any  # uint32 [N]


@functools.partial(jax.jit, static_argnames="writer", donate_argnames="slots")
def _fill(params: Any, weights: Any, slots: Slots, prompts: _Prompts, *, writer: Writer) -> Slots:
    """Reads prompts into slots, without their last ids, which the next step reads."""

    def fill(params: Any, weights: Any, slots: Slots, prompts: _Prompts) -> Slots:
        tokens, lengths, at = prompts.tokens, prompts.lengths, prompts.slots
        read = writer.read(params, weights, tokens, lengths)
        cache = jax.tree.map(functools.partial(_place_rows, at), slots.cache, read)
        ends = jnp.stack([jnp.maximum(lengths - 2, 0), lengths - 1], axis=1)
        before, last = jnp.take_along_axis(tokens, ends, axis=1).T
        none = jnp.zeros_like(lengths)
        fresh = before, last, lengths - 1, none, prompts.limits, prompts.numbers, none > 0
        return Slots(
            cache,
            *(x.at[at].set(y, mode="drop") for x, y in zip(slots[1:], fresh, strict=True)),
        )

    specs = dict(ins=(P(), _SPECS, _Prompts(*[ROWS] * 5)), outs=_SPECS)
    return map_rows(fill, writer.spread, **specs)(params, weights, slots, prompts)


def _place_rows(at: Array, kept: Array, x: Array) -> Array:
    """Writes rows x `[L, N, ...]`, padded at the end, into `kept` `[L, B, ...]` at `at`.

    A place of B or more drops the row. Layers and rows become one axis, and later axes are written
    in full: a scatter of parts along a later axis takes twice as long.
    """
    (layers, rows), count = kept.shape[:2], x.shape[1]
    x = jnp.pad(
        x, [(0, n - m) for n, m in zip((layers, count, *kept.shape[2:]), x.shape, strict=True)]
    )
    places = jnp.arange(layers, dtype=jnp.int32)[:, None] * rows + at[None]
    others = layers * rows + jnp.arange(layers * count, dtype=jnp.int32)
    places = jnp.where((at < rows)[None], places, others.reshape(layers, count)).reshape(-1)
    flat = kept.reshape(-1, *kept.shape[2:])
    flat = flat.at[places].set(x.reshape(-1, *x.shape[2:]), mode="drop", unique_indices=True)
    return flat.reshape(kept.shape)


def _advance_slots(
    params: Any,
    weights: Any,
    slots: Slots,
    seed: Array,
    ended: Array,
    *,
    writer: Writer,
    sampling: Sampling,
) -> tuple[Slots, Drawn, Array]:
    """A few steps: returns the slots, the ids they added, and which rows are done.

    `ended` are rows that the host has ended. Rows that are done idle.
    """

    def advance(params: Any, weights: Any, slots: Slots, seed: Array, ended: Array) -> Any:
        base = jax.random.key(seed)
        keys = jax.vmap(lambda row: jax.random.fold_in(base, row))(slots.numbers)
        slots = slots._replace(done=slots.done | ended)
        slots, drawn = writer.advance(params, weights, slots, keys, sampling)
        return slots, drawn, slots.done

    specs = dict(ins=(P(), _SPECS, P(), ROWS), outs=(_SPECS, _LATER, ROWS))
    mapped = map_rows(advance, writer.spread, **specs)
    slots, *found = mapped(params, weights, slots, seed, ended)
    return slots, *gather_rows(found, writer.spread)


_advance, _advance_on_cpu, _advance_on_gpu = (
    jax.jit(
        _advance_slots,
        static_argnames=("writer", "sampling"),
        donate_argnames="slots",
        compiler_options=options,
    )
    # XLA chooses vectors of 256 bits, which take a quarter longer for one row times bf16 as bits.
    # Triton's products on a GPU, which `runtime` turns off elsewhere, are quicker for few rows.
    for options in (None, {"xla_cpu_prefer_vector_width": 512}, {TRITON_PRODUCTS: True})
)


def _choose_call(platform: str) -> Callable[..., Any]:
    """The compiled few steps of a platform; a user's word on products in XLA_FLAGS stands."""
    if platform == "gpu" and not says_products():
        return _advance_on_gpu
    return _advance_on_cpu if platform == "cpu" else _advance


def check_length(number: int, length: int, max_tokens: int, positions: int) -> None:
    """Raises `UserError` for a prompt that is empty, or too long for its completion."""
    if not length:
        raise UserError(f"prompt {number} is empty; expected at least one token.")
    if length + max_tokens > positions:
        raise UserError(
            f"prompt {number} has {length} tokens: with max_tokens={max_tokens} that is more than "
            f"the model's {positions} positions. Shorten the prompt, or lower max_tokens."
        )


@dataclasses.dataclass(frozen=True)
class StepWriter:
    """A `Writer` of one model, which adds an id a step."""

    functions: DecoderFunctions
    real: int  # ids below this have a token: draws and prompts have no others
    spread: Spread | None = None
    spare = 0

    def check_prompt(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See `Writer`."""
        check_length(number, len(prompt), max_tokens, self.functions.spec.max_positions)
        ids = np.asarray(prompt)
        if ids.min() < 0 or ids.max() >= self.real:
            bad = ids[(ids < 0) | (ids >= self.real)][0]
            raise UserError(
                f"prompt {number} holds the id {bad}; expected ids of the vocabulary, 0 to "
                f"{self.real - 1}. Encode the text with the model's own tokenizer."
            )

    def for_length(self, positions: int) -> "StepWriter":
        """See `DecoderFunctions.for_length`."""
        return dataclasses.replace(self, functions=self.functions.for_length(positions))

    def prepare(self, params: Any) -> Any:
        """See `prepare_weights`."""
        return prepare_weights(params, functions=self.functions, spread=self.spread)

    def open_cache(self, slots: int, capacity: int) -> Cache:
        """See `Writer`."""
        spec = self.functions.spec
        dtype = self.functions.compute.dtype
        layers, deltas = (len(spec.places(delta=delta)) for delta in (False, True))
        states = inputs = half = None
        if layers:
            shape = layers, slots, spec.num_kv_heads, capacity, spec.head_dim
            half = jnp.zeros(shape, dtype)
        if deltas:
            state = spec.delta_value_heads, spec.delta_key_dim, spec.delta_value_dim
            states = jnp.zeros((deltas, slots, *state), jnp.float32)
            behind = spec.delta_kernel - 1
            inputs = jnp.zeros((deltas, slots, behind, spec.delta_columns), dtype)
        return Cache(half, half, states, inputs)

    def read(
        self, params: Any, weights: Any, tokens: Array, lengths: Array, unread: int = 1
    ) -> Cache:
        """See `Writer`; the next step reads the last `unread` ids."""
        layers = weights[0]
        if self.functions.spec.delta_value_heads:
            # Keys can be overwritten later, a state cannot.
            lengths = jnp.maximum(lengths - unread, 0)
            # A scan over periods: unrolled chunks of 18 layers compile for minutes.
            layers = None
        return self.functions.prefill(params, tokens, lengths, tokens.shape[1], layers)[1]

    def advance(
        self, params: Any, weights: Any, slots: Slots, keys: Any, sampling: Sampling
    ) -> tuple[Slots, Drawn]:
        """See `Writer`."""
        layers, head = weights
        kernel = self.spread is not None and self.spread.placement.kernels

        def step(slots: Slots, place: Array) -> tuple[Slots, Drawn]:
            new, cache = slots.last[:, None], slots.cache
            if cache.late is not None:
                cache = cache._replace(late=cache.late._replace(place=place, alive=~slots.done))
            hidden, cache = self.functions.extend(params, new, slots.places, cache, layers)
            logits = unembed(hidden, head)[:, 0]
            at = jax.vmap(jax.random.fold_in)(keys, slots.drawn)
            ids, log_probs = pick(logits, at, sampling, self.real, kernel=kernel)
            stops = find_stops(ids, sampling)
            told = (~(slots.done | stops)).astype(jnp.int32)
            drawn = slots.drawn + told
            slots = slots._replace(
                cache=cache._replace(read=None),
                before=jnp.where(told > 0, slots.last, slots.before),
                last=jnp.where(told > 0, ids, slots.last),
                positions=slots.positions + told,
                drawn=drawn,
                done=slots.done | stops | (drawn >= slots.limits),
            )
            return slots, Drawn(ids[:, None], log_probs[:, None], told)

        if kernel:
            cache = write_late(self.functions.spec, slots.cache, STEPS)
            slots = slots._replace(cache=cache)
        slots, drawn = jax.lax.scan(step, slots, jnp.arange(STEPS, dtype=jnp.int32))
        return slots._replace(cache=slots.cache._replace(late=None)), drawn


@dataclasses.dataclass(frozen=True)
class LoopWriter(StepWriter):
    """A `StepWriter` for few ids: its steps go over layers in a loop, which compiles as one."""

    def prepare(self, params: Any) -> Any:
        """The head alone; next to it the layers of blocks, which each step would decode."""
        leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, PackedMatrix))
        few = not any(isinstance(x, PackedMatrix) for x in leaves)
        return prepare_weights(params, functions=self.functions, spread=self.spread, few=few)


def complete(
    functions: DecoderFunctions,
    params: Params,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    real: int,
    spread: Spread | None = None,
    **settings: Any,
) -> list[Completion]:
    """Continues prompts with a model alone; see `StepWriter` and `write_answers`."""
    writer = StepWriter(functions, real, spread)
    return write_answers(writer, params, prompts, sampling, **settings)


def write_answers(
    writer: Writer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    tokenizer: Tokenizer | None = None,
    numbers: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    batch_size: int = AT_ONCE,
    room: int = 0,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continues every prompt (token ids), in order.

    `batch_size` rows grow at once; the slot of a finished row takes the next prompt. Prompts far
    longer than the others are answered after them (`set_apart`). A row's draws depend on the seed,
    its number (default: its index in `prompts`) and its step, not on the batch. `limits` are the
    most ids of each prompt, `sampling.max_tokens` by default. `room` is the number of positions of
    a slot: calls with prompts of different lengths then share their programs, and prompts that need
    more are answered last. `on_text` is called every few steps with a prompt's index and its text
    so far. Without a tokenizer there is no text.

    Raises `UserError` for an empty prompt, an id that no token has, more positions than the model
    has, `numbers` or `limits` of another length than the prompts, and impossible sampling.
    """
    sampling.check()
    draw_by = _check_each("numbers", numbers, np.arange(len(prompts)), 0, 2**32 - 1)
    most = np.full(len(prompts), sampling.max_tokens)
    most = _check_each("limits", limits, most, 1, sampling.max_tokens)
    for i, prompt in enumerate(prompts):
        writer.check_prompt(i, prompt, sampling.max_tokens)
    if not len(prompts):
        return []
    rows = [
        Row(np.asarray(prompt, np.int32), int(limit), int(number), sampling, tokenizer)
        for prompt, limit, number in zip(prompts, most, draw_by, strict=True)
    ]
    lengths = [len(prompt) for prompt in prompts]
    for group, slots in group_prompts(lengths, sampling.max_tokens, batch_size, room):
        some = [rows[i] for i in group]
        for place in _Engine(writer, params, some, sampling, slots, room).run():
            if on_text is not None:
                on_text(group[place], some[place].read())
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
        self.drafted: Drafted | None = None
        self.reason = ""
        self._sampling, self._tokenizer = sampling, tokenizer
        self._end: int | None = None  # of the text, if a stop string ends it

    def extend(self, ids: list[int], log_probs: list[float], done: bool) -> None:
        """Adds ids, the last ones if done; cuts the row if its text now has a stop string."""
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

    def count_drafts(self, accepted: np.ndarray) -> None:
        """Adds the numbers of accepted drafts, one a step; -1 after the row's end."""
        passes, sum_before = self.drafted or Drafted(0, 0)
        ran = accepted[accepted >= 0]
        self.drafted = Drafted(passes + len(ran), sum_before + int(ran.sum()))

    def read(self) -> str:
        """The text so far, up to a stop string."""
        return self._decode(len(self.ids))[: self._end]

    def _decode(self, count: int) -> str:
        return self._tokenizer.decode(self.ids[:count]) if self._tokenizer else ""

    def _cut(self, end: int) -> None:
        """Ends the row before character `end`, and drops the ids after it."""
        self._end, self.reason = end, "stop"
        count = len(self.ids)
        while count and len(self._decode(count - 1)) >= end:
            count -= 1
        self.ids, self.log_probs = self.ids[:count], self.log_probs[:count]

    def complete(self) -> Completion:
        """The completion; the row has ended."""
        return Completion(self.ids, self.read(), self.reason, self.log_probs, self.drafted)


class _Call(NamedTuple):
    """A call of the device whose results the host has not read."""

    drawn: Drawn
    done: Any  # bool [B]
    rows: np.ndarray  # int [B], the row of each slot at that time; -1: none


class _Engine:
    """Slots, and the rows that wait for a slot."""

    def __init__(
        self,
        writer: Writer,
        params: Any,
        rows: list[Row],
        sampling: Sampling,
        batch_size: int,
        room: int = 0,
    ):
        longest = max(len(row.prompt) for row in rows) + sampling.max_tokens
        writer = writer.for_length(longest)
        self._writer, self._params, self._rows = writer, params, rows
        placement = writer.spread.placement if writer.spread else None
        self._shards = row_shards(placement.mesh) if placement else 1
        self._local = -(-batch_size // self._shards)  # slots of a device
        slots = self._local * self._shards
        # Prompts of similar lengths are read together, so that padding is short; the longest first,
        # since the last call may have few prompts.
        order = sorted(range(len(rows)), key=lambda i: -pad_length(len(rows[i].prompt)))
        self._waiting = collections.deque(order)
        self._row_of = np.full(slots, -1)
        self._ended = np.zeros(slots, bool)  # by the host, since the last call
        self._asked = np.zeros(slots, int)  # steps of the calls so far, each of an id or more
        self._at_once = prompts_at_once(self._local)
        self._capacity = capacity = _room_for(max(longest, room) + writer.spare)
        opened = _open(params, writer=writer, slots=slots, capacity=capacity)
        self._slots = _lay_beside(params, opened)
        self._weights = writer.prepare(params)
        # Fields that only the host uses are left out: other values must not compile anew.
        self._sampling = dataclasses.replace(sampling, max_tokens=1, stop_strings=(), seed=0)
        self._seed = np.uint32(sampling.seed % 2**32)
        # A GPU runs the next call while the host reads one; a CPU would only compute it later.
        platform = placement.platform if placement else ""
        self._ahead = int(platform == "gpu")
        self._call = _choose_call(platform)

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
        """Whether no prompt waits and a quarter of the slots is enough."""
        taken = (self._row_of >= 0).reshape(self._shards, -1)
        few = np.all(taken.sum(axis=1) <= self._local // 4)
        return bool(not self._waiting and few and self._local // 4 >= _LEAST)

    def _pack(self) -> None:
        """Packs the rows that are left into fewer slots: a step of empty slots takes as long."""
        self._local //= 4
        taken = (self._row_of >= 0).reshape(self._shards, -1)
        keep = np.argsort(~taken, axis=1, kind="stable")[:, : self._local]
        places = (keep + np.arange(self._shards)[:, None] * taken.shape[1]).ravel()
        local = keep.ravel().astype(np.int32)
        self._slots = _pack(self._params, self._slots, local, spread=self._writer.spread)
        columns = self._row_of, self._ended, self._asked
        self._row_of, self._ended, self._asked = (x[places] for x in columns)

    def _advance(self) -> _Call:
        ended, self._ended = self._ended, np.zeros_like(self._ended)
        state = self._weights, self._slots, self._seed, ended
        static = dict(writer=self._writer, sampling=self._sampling)
        self._slots, drawn, done = self._call(self._params, *state, **static)
        self._asked += STEPS
        return _Call(drawn, done, self._row_of.copy())

    def _take(self, call: _Call) -> Iterator[int]:
        drawn, done = jax.device_get((call.drawn, call.done))
        # By slot: the ids of all steps, and which of them belong to the row.
        ids, log_probs = (x.swapaxes(0, 1) for x in (drawn.ids, drawn.log_probs))
        own = np.arange(ids.shape[2]) < drawn.counts.T[..., None]
        for slot in np.flatnonzero((call.rows >= 0) & (call.rows == self._row_of)):
            number = int(call.rows[slot])
            row = self._rows[number]
            new = own[slot]
            row.extend(ids[slot][new].tolist(), log_probs[slot][new].tolist(), bool(done[slot]))
            if drawn.accepted is not None:
                row.count_drafts(drawn.accepted[:, slot])
            if row.reason:
                self._row_of[slot] = -1
                self._ended[slot] = True
            yield number

    def _refill(self) -> None:
        """Reads the next prompts into free slots, once a call has enough of both."""
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
        tokens = np.zeros((count, pad_length(longest, self._capacity)), np.int32)
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
        state = self._weights, self._slots
        self._slots = _fill(self._params, *state, prompts, writer=self._writer)
