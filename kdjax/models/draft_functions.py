"""The next-token block of a model (MTP, `nextn`) as pure functions: a model for losses, a draft.

The block is a layer with attention after the model's layers (`decoder.NextToken`). At each token it
reads the embedded token and the hidden state of the position before; its hidden states go into the
model's own head.

Letters: B rows, T positions, D hidden width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kdjax.models.arch import ArchSpec
from kdjax.models.attention import attend_runs
from kdjax.models.decoder import (
    Cache,
    Compute,
    Decoder,
    DecoderFunctions,
    Kind,
    Mix,
    NextToken,
    Params,
    functional,
    lay_out,
    take_layer,
)
from kdjax.models.delta import DeltaInputs
from kdjax.models.weights import slice_layers


@dataclasses.dataclass(frozen=True)
class DraftFunctions(DecoderFunctions):
    """The next-token block, with the layers before it, as a model for losses and for drafting.

    Its hidden states predict the same tokens as the layers' hidden states do, by the same head.
    """

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states of the block at each token, after a forward pass of the layers.

        The layers get no gradient. A document's first token has zeros before it, as in llama.cpp.
        """
        decoder = self.merge(params)
        hidden = decoder.hidden(tokens, segment_ids, positions)
        before = shift_states(jax.lax.stop_gradient(hidden), segment_ids)
        mix = functools.partial(decoder.mix_segments, segment_ids, None)
        return _run_block(decoder, tokens, before, positions, mix)[0]

    def hidden_in_parts(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array, parts: int
    ) -> Float[Array, "B T D"]:
        """See `hidden`; all rows at once, whatever the number of `parts`."""
        return self.hidden(params, tokens, segment_ids, positions)

    def draft_runs(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        drafts: int,
    ) -> Float[Array, "B N T D"]:
        """Hidden states of the layers, then of the block at each step of a run of drafts; N steps.

        N is 1 + `drafts`. Step 1 of the block reads the layers' state before each token, as the
        first draft of a pass does; step n reads the block's state of step n - 1. Its keys and
        values are of the layers' states up to the start of its run, then of the block's. The layers
        get no gradient.
        """
        decoder = self.merge(params)
        hidden = jax.lax.stop_gradient(decoder.hidden(tokens, segment_ids, positions))

        def draft(before: Array, mix: Mix) -> tuple[Array, Array]:
            state, _ = _run_block(decoder, tokens, before, positions, mix)
            return state, state

        scale = self.spec.score_scale
        states = run_drafts(draft, hidden, segment_ids, segment_ids, drafts, scale=scale)
        return jnp.stack([hidden, *states], axis=1)

    def list_heads(self) -> tuple[Callable[[Params], Any], ...]:
        """Functions that make unembeddings of `draft_runs`: one for layers and block."""
        return (self.head,)

    def draft_prefill(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        before: Float[Array, "B T D"],
        lengths: Int[Array, " B"],
        capacity: int,
        block: Params | None = None,
    ) -> Cache:
        """The block's cache after prompts; `before` are the hidden states before each token.

        `block` are its weights as `models.decode_weights` lays them out.
        """
        decoder = self.merge(params)
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        real = (at < lengths[:, None]).astype(jnp.int32)
        mix = functools.partial(decoder.mix_segments, real, None, prompt=True)
        positions = jnp.broadcast_to(at, tokens.shape)
        _, kept = _run_block(decoder, tokens, before, positions, mix, block)
        return Cache(*(lay_out(x[None], capacity) for x in kept))

    def draft_extend(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        before: Float[Array, "B T D"],
        positions: Int[Array, " B"],
        cache: Cache,
        block: Params | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Reads T more ids a row by the block, as `Decoder.extend` does by the layers."""
        decoder = self.merge(params)
        at = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        mix = functools.partial(decoder.mix_cached, cache, jnp.int32(0), positions, None, 0)
        hidden, (cache, _) = _run_block(decoder, tokens, before, at, mix, block)
        return hidden, cache


def _run_block(
    decoder: Decoder,
    tokens: Array,
    before: Array,
    positions: Array,
    mix: Mix,
    block: Params | None = None,
) -> tuple[Array, Any]:
    """Hidden states of the next-token block, and what `mix` stores."""
    graph, stacked = nnx.split(decoder.mtp)
    if block is None:
        slices, read = slice_layers(stacked)
        block = read(take_layer(slices, 0))
    run = nnx.merge(graph, block)
    angles = decoder.compute_angles(positions, decoder.compute.long)
    turn = decoder.make_turn(positions, angles, Kind(None, None))

    def recall(_: DeltaInputs) -> tuple[Array, Any]:
        raise TypeError("the next-token block attends")

    x, kept = run(run.join(decoder.embed_tokens(tokens), before), turn, mix, recall)
    return decoder.finish(x, run.norm), kept


def run_drafts(
    draft: Callable[[Array, Mix], tuple[Array, Array]],
    first: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
    seen: Int[Array, "B T"],
    drafts: int,
    *,
    scale: float,
) -> list[Float[Array, "B T D"]]:
    """Hidden states of the drafts of passes that begin at every token.

    `draft(before, mix)` makes, of the states before each token, the states that the next draft
    reads and the hidden states; the first draft reads `first`. Keys are those of `seen` segments.
    """
    keys, values, found = [], [], []

    def mix(q: Array, k: Array, v: Array) -> tuple[Array, None]:
        keys.append(k)
        values.append(v)
        return attend_runs(q, keys, values, seen, scale=scale), None

    for _ in range(drafts):
        first, hidden = draft(shift_states(first, segment_ids), mix)
        found.append(hidden)
    return found


def have_before(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a place of the same document is before each."""
    return jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (1, 0)))


def shift_states(
    hidden: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """The state of the position before each, zeros before a document's first."""
    same = have_before(segment_ids)
    return jnp.where(same[..., None], jnp.roll(hidden, 1, axis=1), 0)


def shape_block(spec: ArchSpec) -> Params:
    """Shapes and dtypes of the parameters that `draw_block` returns."""
    return functional(spec, Compute())[1]["mtp"]


def draw_block(spec: ArchSpec, seed: int) -> Params:
    """Random float32 parameters of a next-token block, a stack of one, drawn as in `initialise`."""

    def draw(rngs: nnx.Rngs) -> NextToken:
        return NextToken(spec, Compute(), rngs)

    block = nnx.split_rngs(splits=1)(nnx.vmap(draw))(nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(block))
