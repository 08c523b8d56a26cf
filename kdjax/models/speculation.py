"""Speculative decoding: a small model drafts some ids, the big model reads them in one pass.

The output is the big model's: greedily the ids that it would write alone, at a temperature ids of
its distribution (Leviathan, Kalman, Matias 2023, arXiv:2211.17192; Chen et al. 2023,
arXiv:2302.01318). Rows accept different numbers of drafts, so each continues at its position. Slots
of the engine (`models.decoding`) advance by a `DraftWriter`, or by a `BlockWriter` if the big
model's next-token block drafts, or a `TappedWriter` if a head (DSpark, DFlash, EAGLE-3) does.

Letters: B rows, K drafts a round, N = K + 1, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kdjax.device.sharding import ROW_AXES
from kdjax.errors import UserError
from kdjax.models.decode_weights import prepare_block
from kdjax.models.decoder import Cache, Params, lay_out, step_back
from kdjax.models.decoding import (
    STEPS,
    Drawn,
    Sampling,
    Slots,
    StepWriter,
    draw_by_weight,
    find_least,
    find_stops,
)
from kdjax.models.delta import DeltaInputs
from kdjax.models.draft_functions import DraftFunctions, shift_states
from kdjax.models.dspark import DSparkFunctions
from kdjax.models.shards import Spread
from kdjax.models.tapped import TappedFunctions
from kdjax.models.weights import SomeRows, mask_padding, unembed

MOST_DRAFTS = 64
# See `DraftWriter._draft`.
Drafted = tuple[Array, Array | None, Callable[[Array, Array, Array], Any], Array | None]
_DRAFT, _ACCEPT, _REPLACE = range(3)  # purposes that a position's key is split for


@dataclasses.dataclass(frozen=True)
class DraftWriter:
    """A big model for which a small one drafts: a `Writer` of a pair of parameters.

    A round reads the drafts, and adds the accepted ones and one id that the big model draws.
    """

    big: StepWriter
    small: StepWriter
    drafts: int  # in a round
    spread: Spread | None = None  # of both models' parameters

    @classmethod
    def of(
        cls, big: StepWriter, small: StepWriter, params: tuple[Params, Params], drafts: int
    ) -> "DraftWriter":
        """Raises `UserError` for fewer drafts than 1 or more than 64, or for different devices."""
        if not 1 <= drafts <= MOST_DRAFTS:
            raise UserError(f"found {drafts} drafts a pass; expected 1 to {MOST_DRAFTS}.")
        places = [side.spread and side.spread.placement for side in (big, small)]
        if places[0] is None or places[1] is None:
            return cls(big, small, drafts)
        if places[0].mesh != places[1].mesh:
            raise UserError(
                f"the model is on {places[0].mesh.size} devices and its draft on "
                f"{places[1].mesh.size}, or on other ones; expected one set of devices. Load both "
                "with equal settings."
            )
        return cls(big, small, drafts, Spread.of(params, places[0]))

    def offer_from(self, least: float) -> "DraftWriter":
        """Ends a round's drafts before the first whose confidence is below `least`, 0: all stay.

        Raises `UserError` for a draft without confidence, and for no probability.
        """
        if least:
            raise UserError(
                f"found draft_p_min={least} for a draft without confidence; expected 0, or a head "
                "with confidence, as kdjax.make_head makes one of rank above 0. Leave it out."
            )
        return self

    @property
    def spare(self) -> int:
        """Positions after a row's last, for drafts that are rejected."""
        return self.drafts

    def check_prompt(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See `Writer`; both models read the prompt."""
        for side in (self.big, self.small):
            side.check_prompt(number, prompt, max_tokens)

    def for_length(self, positions: int) -> "DraftWriter":
        """See `Writer`."""
        big, small = (side.for_length(positions) for side in (self.big, self.small))
        return dataclasses.replace(self, big=big, small=small)

    def prepare(self, params: tuple[Params, Params]) -> Any:
        """See `StepWriter.prepare`."""
        sides = zip((self.big, self.small), params, strict=True)
        return tuple(side.prepare(own) for side, own in sides)

    def open_cache(self, slots: int, capacity: int) -> tuple[Cache, Cache]:
        """See `Writer`."""
        big, small = (side.open_cache(slots, capacity) for side in (self.big, self.small))
        return big, small

    def read(
        self, params: tuple[Params, Params], weights: Any, tokens: Array, lengths: Array
    ) -> tuple[Cache, Cache]:
        """See `Writer`."""
        (large, little), (ready, others) = params, weights
        big = self.big.read(large, ready, tokens, lengths)
        # A round begins with the id before the last, see `_draft`.
        return big, self.small.read(little, others, tokens, lengths, unread=2)

    def advance(
        self,
        params: tuple[Params, Params],
        weights: Any,
        slots: Slots,
        keys: Any,
        sampling: Sampling,
    ) -> tuple[Slots, Drawn]:
        """Rounds until all rows have ended, at most `STEPS`."""
        count, wide = len(slots.last), self.drafts + 1
        ids = jnp.zeros((STEPS, count, wide), jnp.int32)
        none = ids[..., 0]
        blank = Drawn(ids, ids.astype(jnp.float32), none, none - 1)

        def is_alive(carry: tuple[Array, Array, Slots, Drawn]) -> Array:
            return (carry[0] < STEPS) & carry[1]

        def advance(carry: tuple[Array, Array, Slots, Drawn]) -> tuple[Array, Array, Slots, Drawn]:
            number, _, slots, drawn = carry
            slots, added = self._round(params, weights, slots, keys, sampling)
            keep = functools.partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
            return number + 1, self._any_alive(slots), slots, jax.tree.map(keep, drawn, added)

        begin = jnp.int32(0), self._any_alive(slots), slots, blank
        return jax.lax.while_loop(is_alive, advance, begin)[2:]

    def _any_alive(self, slots: Slots) -> Array:
        """Whether a row of any device has not ended: all devices run equally many rounds."""
        alive = jnp.any(~slots.done)
        if self.spread is None or self.spread.placement.alone:
            return alive
        return jax.lax.psum(alive.astype(jnp.int32), ROW_AXES) > 0

    def _round(
        self, params: tuple[Params, Params], weights: Any, slots: Slots, keys: Any, sampling: Any
    ) -> tuple[Slots, Drawn]:
        layers, head = weights[0]
        # A key for each position of a completion. Its id thus depends only on the ids before it: a
        # draft that was dropped unread may be drawn again by its key.
        places = jnp.arange(self.drafts + 1, dtype=jnp.int32)[None]
        at = slots.drawn[:, None] + places
        keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, at)
        drafted = self._draft(params[1], weights[1], slots, keys, sampling)
        drafts, draft_logits, keep_first, offered = drafted
        read = jnp.concatenate([slots.last[:, None], drafts], axis=1)
        hidden, cache, states = self._extend(params[0], read, slots, layers)
        logits = self._logits(hidden, head, self.big.real)
        accepted, following = judge(logits, draft_logits, drafts, keys, sampling, offered)
        spec = self.big.functions.spec
        cache = step_back(spec, slots.cache[0], cache, cache.read, accepted + 1)
        ids = jnp.where(
            places == accepted[:, None], following[:, None], jnp.pad(drafts, ((0, 0), (0, 1)))
        )
        stops = find_stops(ids, sampling) & (places <= accepted[:, None])
        stopped = jnp.any(stops, axis=1)
        told = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32), accepted + 1)
        told = jnp.where(slots.done, 0, jnp.minimum(told, slots.limits - slots.drawn))
        drawn = slots.drawn + told
        # The id before `last`: a draft, or the id that was read first.
        before = jnp.take_along_axis(read, accepted[:, None], axis=1)[:, 0]
        added = Drawn(ids, _log_probs_of(logits, ids), told, jnp.where(slots.done, -1, accepted))
        slots = slots._replace(
            cache=(cache, keep_first(accepted + 1, read, states)),
            before=before,
            last=following,
            positions=slots.positions + accepted + 1,
            drawn=drawn,
            done=slots.done | stopped | (drawn >= slots.limits),
        )
        return slots, added

    def _extend(
        self, params: Params, read: Array, slots: Slots, layers: Any
    ) -> tuple[Array, Cache, Array]:
        """Lets the big model read ids: hidden states, its cache, and states for the small model."""
        extend = self.big.functions.extend
        hidden, cache = extend(params, read, slots.places, slots.cache[0], layers)
        return hidden, cache, hidden

    def _logits(self, hidden: Array, head: Array | SomeRows, real: int) -> Float[Array, "B N V"]:
        """Over the ids of the big model, -inf where there is none."""
        logits = mask_padding(unembed(hidden, head)[..., : self.big.real], real, -jnp.inf)
        room = self.big.real - logits.shape[-1]
        return jnp.pad(logits, ((0, 0), (0, 0), (0, room)), constant_values=-jnp.inf)

    def _draft(
        self, params: Params, weights: Any, slots: Slots, keys: Any, sampling: Sampling
    ) -> Drafted:
        """Drafts `[B, K]`, and the logits `[B, K, V]` that they were drawn from.

        Returns also a function of (lengths, ids that the big model read, its states there): the
        small model's cache for the next round, after the first `lengths` of the ids that the small
        model read. These are the id before the last, the last, and all drafts but one. The last
        value is how many of a row's drafts are offered `[B]`, None for all.
        """
        layers, head = weights
        start, extend = slots.places, self.small.functions.extend
        choose = functools.partial(self._choose, head=head, sampling=sampling)

        def step(carry: tuple[Array, Cache], number: Array) -> tuple[Any, Any]:
            last, cache = carry
            hidden, cache = extend(params, last[:, None], start + number, cache, layers)
            drawn = choose(hidden, keys[:, number])
            read, cache = cache.read, cache._replace(read=None)
            return (drawn[0], cache), (drawn, read and read._replace(kernel=None))

        # After a round whose drafts were all accepted, the small model has not read the last of
        # them. So it reads two ids: they cost what one does, and to read an id again changes
        # nothing. At the first position there is no id before: the first id is read twice. To
        # attention two equal values are one, and the next write overwrites it; to delta nets the
        # first copy is another document.
        is_first = start == 0
        first = jnp.stack([jnp.where(is_first, slots.last, slots.before), slots.last], axis=1)
        at = jnp.maximum(start - 1, 0)
        ids = jnp.stack([~is_first, jnp.ones_like(is_first)], axis=1).astype(jnp.int32)
        hidden, cache = extend(params, first, at, slots.cache[1], layers, ids)
        drawn = choose(hidden[:, 1:], keys[:, 0])
        numbers = jnp.arange(1, self.drafts, dtype=jnp.int32)
        begin = drawn[0], cache._replace(read=None)
        (_, last), (others, more) = jax.lax.scan(step, begin, numbers)
        drafts, logits = jax.tree.map(
            lambda one, more: jnp.concatenate([one[None], more]).swapaxes(0, 1), drawn, others
        )

        def keep_first(lengths: Array, _: Array, __: Array) -> Cache:
            read = cache.read and _join_inputs(cache.read, more)
            document = jnp.concatenate([ids, jnp.ones_like(drafts[:, 1:])], axis=1)
            spec = self.small.functions.spec
            return step_back(spec, slots.cache[1], last, read, lengths, document)

        return drafts, logits, keep_first, None

    def _choose(
        self, hidden: Array, keys: Any, *, head: Array | SomeRows, sampling: Sampling
    ) -> tuple[Array, Array | None]:
        """A draft for each row from its hidden state `[B, 1, D]`, and the logits of the draw."""
        logits = self._logits(hidden, head, self.small.real)
        if sampling.temperature == 0:
            return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), None
        weights = jnp.exp(_log_probs(logits, sampling)[:, 0])
        return _draw(weights, keys, _DRAFT), logits[:, 0]


class BlockWriter(DraftWriter):
    """A model whose next-token block drafts for it: `small` has the block among its parameters.

    The block reads each id with the hidden state before it: the model's state, or, after the last
    id that the model has read, the block's. At the end of a round the block reads the round's ids
    again, with the model's states, and stores keys and values of this reading. (llama.cpp's
    `draft-mtp`, common/speculative.cpp.)
    """

    @property
    def block(self) -> DraftFunctions:
        """Functions of the block."""
        assert isinstance(self.small.functions, DraftFunctions)
        return self.small.functions

    def prepare(self, params: tuple[Params, Params]) -> Any:
        """See `StepWriter.prepare`; the block has the model's head."""
        ready = self.big.prepare(params[0])
        functions, spread = self.small.functions, self.small.spread
        return ready, (prepare_block(params[1], functions=functions, spread=spread), ready[1])

    def open_cache(self, slots: int, capacity: int) -> tuple[Cache, Any]:
        """See `Writer`; the block's cache has also the last hidden state read, `[1, B, 1, D]`."""
        spec, dtype = self.small.functions.spec, self.small.functions.compute.dtype
        half = jnp.zeros((1, slots, spec.num_kv_heads, capacity, spec.head_dim), dtype)
        before = jnp.zeros((1, slots, 1, spec.hidden_size), dtype)
        return self.big.open_cache(slots, capacity), (Cache(half, half), before)

    def read(
        self, params: tuple[Params, Params], weights: Any, tokens: Array, lengths: Array
    ) -> tuple[Cache, Any]:
        """See `Writer`."""
        known = jnp.maximum(lengths - 1, 0)  # the last id is read in the first round
        whole, room = self.big.functions.prefill_whole, tokens.shape[1]
        hidden, cache = whole(params[0], tokens, known, room, weights[0][0])
        before = shift_states(hidden, jnp.ones_like(tokens))
        of_block = self.block.draft_prefill(params[1], tokens, before, known, room, weights[1][0])
        last = jnp.take_along_axis(before, known[:, None, None], axis=1)
        return cache, (of_block, last[None])

    def _draft(
        self, params: Params, weights: Any, slots: Slots, keys: Any, sampling: Sampling
    ) -> Drafted:
        """Drafts as `DraftWriter._draft` returns them."""
        (block, head), start = weights, slots.places
        extend = functools.partial(self.block.draft_extend, params, block=block)
        cache, before = slots.cache[1]
        choose = functools.partial(self._choose, head=head, sampling=sampling)

        def step(carry: tuple[Array, Array, Cache], number: Array) -> tuple[Any, Any]:
            last, before, cache = carry
            hidden, cache = extend(last[:, None], before, start + number, cache)
            drawn = choose(hidden, keys[:, number])
            return (drawn[0], hidden, cache), drawn

        numbers = jnp.arange(self.drafts, dtype=jnp.int32)
        _, drawn = jax.lax.scan(step, (slots.last, before[0], cache), numbers)
        drafts, logits = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn)

        def keep_first(lengths: Array, read: Array, hidden: Array) -> Any:
            states = jnp.concatenate([before[0], hidden.astype(before.dtype)], axis=1)
            _, kept = extend(read, states[:, :-1], start, cache)
            return kept, jnp.take_along_axis(states, lengths[:, None, None], axis=1)[None]

        return drafts, logits, keep_first, None


@dataclasses.dataclass(frozen=True)
class TappedWriter(DraftWriter):
    """A model whose head drafts for it from its inner states: `small` has it as a parameter."""

    @property
    def own(self) -> Any:
        """Functions of the head, `TappedFunctions`."""
        assert isinstance(self.small.functions, TappedFunctions)
        return self.small.functions

    def prepare(self, params: tuple[Params, Params]) -> Any:
        """See `StepWriter.prepare`; the head's unembedding is the model's."""
        return self.big.prepare(params[0]), self.own.head(params[1])

    def open_cache(self, slots: int, capacity: int) -> tuple[Cache, Any]:
        """See `Writer`."""
        return self.big.open_cache(slots, capacity), self.open_own(slots, capacity)

    def open_own(self, slots: int, capacity: int) -> Any:
        """The head's part of the cache: here keys and values."""
        spec, dtype = self.own.shape.spec, self.own.compute.dtype
        shape = spec.num_layers, slots, spec.num_kv_heads, capacity, spec.head_dim
        half = jnp.zeros(shape, dtype)
        return Cache(half, half)

    def read_taps(self, params: Params, tokens: Array, lengths: Array) -> tuple[Array, Array]:
        """The model's taps of prompts, joined, and their positions: it reads them once more."""
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        real = (at < lengths[:, None]).astype(jnp.int32)
        return self.own.read_taps(params, tokens, real, at)[1], at

    def _extend(
        self, params: Params, read: Array, slots: Slots, layers: Any
    ) -> tuple[Array, Cache, Array]:
        tap = self.big.functions.extend_and_tap
        hidden, cache, states = tap(params, read, slots.places, slots.cache[0], layers)
        taps = [states[i] for i in self.own.shape.taps]
        return hidden, cache, jnp.concatenate(taps, axis=-1)


@dataclasses.dataclass(frozen=True)
class HeadWriter(TappedWriter):
    """A model whose DSpark or DFlash head drafts for it.

    One pass of the head computes all slots of a block; then each slot's id is drawn, with the bias
    by the one before. Ids that the model has read, rejected ones too, go into the head's keys and
    values; a block sees those before its anchor alone. (llama.cpp's `draft-dspark` and
    `draft-dflash`.)
    """

    least: float = 0.0  # a round's drafts end before one of less confidence

    @classmethod
    def of(
        cls, big: StepWriter, small: StepWriter, params: tuple[Params, Params], drafts: int
    ) -> "DraftWriter":
        """Raises `UserError` also for more drafts than the head makes."""
        assert isinstance(small.functions, DSparkFunctions)
        most = small.functions.shape.drafts
        if drafts > most:
            raise UserError(
                f"found {drafts} drafts a pass; expected 1 to {most}, which the head's block has. "
                "Give fewer: draft_tokens (--draft-tokens)."
            )
        return super().of(big, small, params, drafts)

    def offer_from(self, least: float) -> "DraftWriter":
        """See `DraftWriter.offer_from`."""
        if not self.own.shape.confident:
            return super().offer_from(least)
        if not 0 <= least <= 1:
            raise UserError(f"found draft_p_min={least}; expected a probability, 0 to 1.")
        return dataclasses.replace(self, least=least)

    def read(
        self, params: tuple[Params, Params], weights: Any, tokens: Array, lengths: Array
    ) -> tuple[Cache, Cache]:
        """See `Writer`; the prompt is read twice, the second time for the states."""
        big = self.big.read(params[0], weights[0], tokens, lengths)
        kept = self.own.merge_head(params[1]).read_taps(*self.read_taps(params[0], tokens, lengths))
        return big, Cache(*(lay_out(x, tokens.shape[1]) for x in kept))

    def _draft(
        self, params: Params, weights: Any, slots: Slots, keys: Any, sampling: Sampling
    ) -> Drafted:
        """Drafts as `DraftWriter._draft` returns them."""
        own, start, cache = self.own, slots.places, slots.cache[1]
        count, lead = self.drafts + own.shape.lead, own.shape.lead
        head, places = own.merge_head(params), jnp.arange(count, dtype=jnp.int32)[None]
        masks = jnp.full((len(slots.last), count - 1), own.shape.mask, jnp.int32)
        x = own.embed_tokens(params, jnp.concatenate([slots.last[:, None], masks], axis=1))
        mix = functools.partial(own.mix_slots, cache, start)
        states = head.run(x, start[:, None] + places, mix)[:, lead:]
        choose = functools.partial(self._choose, head=weights, sampling=sampling)

        def step(last: Array, slot: tuple[Array, Array]) -> tuple[Array, Any]:
            state, key = slot
            joined = head.add_before(state, last)
            drawn = choose(joined[:, None], key)
            return drawn[0], (drawn, own.judge_slots(params, joined))

        slots_first = states.swapaxes(0, 1), keys[:, : self.drafts].swapaxes(0, 1)
        _, drawn = jax.lax.scan(step, slots.last, slots_first)
        (drafts, logits), judged = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn)
        offered = None
        if self.least > 0:
            offered = _count_first(jax.nn.sigmoid(judged) >= self.least)

        def keep_first(_: Array, read: Array, taps: Array) -> Cache:
            at = start[:, None] + jnp.arange(read.shape[1], dtype=jnp.int32)[None]
            return store_text(cache, start, *head.read_taps(taps, at))

        return drafts, logits, keep_first, offered


class EagleWriter(TappedWriter):
    """A model whose EAGLE-3 head drafts for it, an id a pass of the head.

    The head reads each id with the state before it: the model's, or, after the last id that the
    model has read, its own. At the end of a round the round's ids are read again, with the model's
    states. (llama.cpp's `draft-eagle3`.)
    """

    def open_own(self, slots: int, capacity: int) -> tuple[Cache, Array]:
        """See `TappedWriter`; also the state of the last id that the model has read."""
        width, dtype = self.own.shape.spec.hidden_size, self.own.compute.dtype
        return super().open_own(slots, capacity), jnp.zeros((1, slots, 1, width), dtype)

    def read(
        self, params: tuple[Params, Params], weights: Any, tokens: Array, lengths: Array
    ) -> tuple[Cache, Any]:
        """See `Writer`; the prompt is read twice, the second time for the states."""
        big, own = self.big.read(params[0], weights[0], tokens, lengths), self.own
        taps, at = self.read_taps(params[0], tokens, lengths)
        states = own.merge_head(params[1]).join(taps)
        kept = own.read_text(params[1], jnp.roll(tokens, -1, axis=1), states, at[:, 0])
        known = lengths[:, None, None] - 1  # the last id is read in the first round
        before = jnp.take_along_axis(states, jnp.maximum(known - 1, 0), axis=1)
        before = jnp.where(known > 0, before, 0)
        return big, (Cache(*(lay_out(x, tokens.shape[1]) for x in kept)), before[None])

    def _draft(
        self, params: Params, weights: Any, slots: Slots, keys: Any, sampling: Sampling
    ) -> Drafted:
        """Drafts as `DraftWriter._draft` returns them."""
        own, start, (cache, before) = self.own, slots.places, slots.cache[1]
        head = own.merge_head(params)
        choose = functools.partial(self._choose, head=weights, sampling=sampling)

        def step(carry: tuple[Array, Array, Cache], number: Array) -> tuple[Any, Any]:
            last, before, cache = carry
            # The place of the state before. The only id of a prompt has none: what it stores at 0
            # is overwritten.
            at = jnp.maximum(start - 1 + number, 0)
            state, cache = own.draft_extend(params, last[:, None], before, at, cache)
            drawn = choose(head.norm(state), keys[:, number])
            return (drawn[0], state, cache), drawn

        numbers = jnp.arange(self.drafts, dtype=jnp.int32)
        (_, _, last), drawn = jax.lax.scan(step, (slots.last, before[0], cache), numbers)
        drafts, logits = jax.tree.map(lambda x: x.swapaxes(0, 1), drawn)

        def keep_first(lengths: Array, read: Array, taps: Array) -> Any:
            states = head.join(taps).astype(before.dtype)
            kept = own.read_text(params, read[:, 1:], states[:, :-1], start)
            at = lengths[:, None, None] - 1
            return store_text(last, start, *kept), jnp.take_along_axis(states, at, axis=1)[None]

        return drafts, logits, keep_first, None


def time_drafts(
    writer: TappedWriter, params: Params, place: int, passes: int
) -> Callable[[], Array]:
    """A function that drafts `passes` times after `place` positions of one row, for its time."""
    cache, zero = writer.open_own(1, 2 * place), jnp.zeros((1,), jnp.int32)
    fixed = dict(before=zero, positions=zero + place, drawn=zero, limits=zero + 1)
    keys = jax.random.split(jax.random.key(0), (1, writer.drafts))
    greedy = Sampling()

    @jax.jit
    def run(params: Params, head: Array | SomeRows) -> Array:
        def draft(last: Array, _: None) -> tuple[Array, None]:
            slots = Slots((None, cache), last=last, numbers=zero, done=zero > 0, **fixed)
            return writer._draft(params, head, slots, keys, greedy)[0][:, -1], None

        return jax.lax.scan(draft, zero, length=passes)[0]

    return functools.partial(run, params, writer.own.head(params))


def store_text(cache: Cache, start: Int[Array, " B"], keys: Array, values: Array) -> Cache:
    """The cache with keys and values `[L, B, T, K, E]` from each row's place on."""

    def place(kept: Array, new: Array) -> Array:
        row = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=2), (1, 1, 0), 1)
        return row(kept, new.swapaxes(2, 3).astype(kept.dtype), start)

    return Cache(place(cache.k, keys), place(cache.v, values))


def _join_inputs(first: DeltaInputs, more: DeltaInputs) -> DeltaInputs:
    """Joins inputs of delta nets `[L, B, 2, ...]` and of K - 1 drafts `[K - 1, L, B, 1, ...]`."""
    joined = jax.tree.map(
        lambda one, more: jnp.concatenate([one, jnp.moveaxis(more[..., 0, :], 0, 2)], 2),
        first._replace(kernel=None),
        more,
    )
    return joined._replace(kernel=first.kernel)


def _log_probs(logits: Array, sampling: Sampling) -> Array:
    """Log-probabilities `[B, N, V]` of the draws: -inf outside top-k and top-p."""
    least = find_least(logits, sampling)
    kept = logits if least is None else jnp.where(logits >= least, logits, -jnp.inf)
    return jax.nn.log_softmax(kept / sampling.temperature, axis=-1)


def _draw(weights: Float[Array, "B V"], keys: Any, purpose: int) -> Int[Array, " B"]:
    """One id a row, drawn by weight."""
    of_purpose = jax.vmap(lambda key: jax.random.fold_in(key, purpose))(keys)
    return draw_by_weight(weights, of_purpose)


def judge(
    logits: Float[Array, "B N V"],
    draft_logits: Float[Array, "B K V"] | None,
    drafts: Int[Array, "B K"],
    keys: Any,
    sampling: Sampling,
    offered: Int[Array, " B"] | None = None,
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The number of drafts of each row that the big model accepts, and the id that follows them.

    `logits` are the big model's before each draft and after the last. The drafts were drawn from
    `draft_logits` (None at temperature 0). `keys` `[B, N]` belong to the positions. Only the first
    `offered` drafts of a row count, all of them if it is None.
    """
    count = drafts.shape[1]
    given = jnp.ones(drafts.shape, bool)
    if offered is not None:
        given = jnp.arange(count)[None] < offered[:, None]
    if sampling.temperature == 0:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        accepted = _count_first(given & (best[:, :count] == drafts))
        return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]
    assert draft_logits is not None
    p, q = (jnp.exp(_log_probs(x, sampling)) for x in (logits, draft_logits))
    of_drafts = [jnp.take_along_axis(x[:, :count], drafts[..., None], axis=-1) for x in (p, q)]
    chances = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, _ACCEPT))))
    likelier, drawn = (x[..., 0] for x in of_drafts)
    accepted = _count_first(given & (chances(keys[:, :count]) * drawn < likelier))
    # After the last draft nothing was drawn: the rest is all of p.
    q = jnp.pad(jnp.where(given[..., None], q, 0), ((0, 0), (0, 1), (0, 0)))
    at = accepted[:, None, None]
    p, q = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (p, q))
    rest = jnp.maximum(p - q, 0.0)
    # Equal distributions reject no draft; if rounding does, draw from all of p.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p)
    of_next = jnp.take_along_axis(keys, accepted[:, None], axis=1)[:, 0]
    return accepted, _draw(rest, of_next, _REPLACE)


def _count_first(accept: Array) -> Array:
    """The number of true values before the first false one, `[B]`."""
    return jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=-1), axis=-1)


def _log_probs_of(logits: Array, ids: Array) -> Array:
    """Log-probabilities at temperature 1 of ids `[B, N]`."""
    of_ids = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return of_ids - jax.nn.logsumexp(logits, axis=-1)
