"""DSpark and DFlash: heads that draft a block of tokens in a pass, from inner states of a target.

The target's states at a few layers (taps) become keys and values of the head's own layers; no token
of the text is embedded again. A block begins at its anchor, the last token that is known, which the
target has not read yet. The block holds embeddings of the anchor and of mask tokens; it sees
the text before the anchor and all of itself. Slot k of DSpark predicts the token k + 1 places after
the anchor. The states go into the target's own head, and a low-rank bias by the token before
(Markov head) is added to the logits: it is what lets a later slot know which token an earlier one
drew. DFlash is the same head of rank 0, without the bias: its slot k predicts the token in its own
place, k places after the anchor, so that a block drafts one token fewer than it has slots.

The files of llama.cpp's `draft-dspark` and `draft-dflash`:

- `general.architecture` is `dflash`. A head with `markov_w1` is DSpark's, a head without DFlash's.
- `dflash.target_layers`: layers of the target whose inputs are read. An id that is the number of
  layers is the state after the last one, before the final norm.
- `dflash.block_size` slots, the anchor's included. A server that drafts fewer runs fewer slots.
- `dflash.sample_from_anchor` true: slot 0 of DSpark predicts. False: it does not, and each other
  slot predicts the token in its own place, as DFlash's, with the bias by the token before.
  `tokenizer.ggml.mask_token_id`: the token of other slots.
- `conf_proj` [1, D + r] and its bias: the logit that a slot's draft is accepted. A server drafts up
  to the first slot below `--spec-draft-p-min`. `dflash.has_confidence_head` false: it must be 0. No
  tensor of DFlash: there a server compares the draft's own probability, among its ten best ids.
- `dflash.rope.dimension_sections` [E / 2, 0, 0, 0], E the width of a head, for a target of M-RoPE
  (qwen35): the head rotates by time alone.
- `fc` joins the taps, `enc.output_norm` follows it; the layers are Qwen3's (normed queries and
  keys, rotation of halves); norms are plain factors. `markov_w1` [V, r] has the embeddings of the
  token before, `markov_w2` [V, r] the rows of the bias. `token_embd` and `output` are the target's.

Sources: llama.cpp's src/models/dflash.cpp (`graph<true>`: fc and its norm; `graph<false>`: keys and
values of the context are wk and wv of it, block attention without a causal mask;
`build_dspark_markov_head`) and common/speculative.cpp (`common_speculative_impl_draft_dflash`:
positions, slots, what a round reads). Training: vllm-project/speculators, models/dspark/core.py and
models/dflash/attention.py (`create_anchor_block_mask_mod`).

Letters: B rows, T positions, S context positions, D width, L layers, P taps, R rank, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kdjax.models.arch import ArchSpec
from kdjax.models.attention import attend_blocks
from kdjax.models.decoder import (
    Block,
    Cache,
    Compute,
    Linear,
    Mix,
    Params,
    RMSNorm,
    rotate,
    take_layer,
)
from kdjax.models.shards import gather_shards
from kdjax.models.tapped import (
    HeadShape,
    TappedFunctions,
    compute_angles,
    recall_nothing,
    size_layers,
)

HEAD = "dspark"  # the head's name among the parameters of its target
MOST_TAPS = 5


@dataclasses.dataclass(frozen=True)
class DSparkShape(HeadShape):
    """Everything that fixes a head's shapes and arithmetic."""

    drafts: int  # tokens that a pass drafts
    rank: int  # of the bias by the token before; 0: none (DFlash)
    mask: int  # id of the token of all slots but the first
    confident: bool = True  # whether it says how probable it is that a slot's draft is accepted
    anchored: bool = True  # whether the anchor's slot predicts; of rank 0 it never does

    part: ClassVar[str] = HEAD

    @property
    def kind(self) -> str:
        """Its name in llama.cpp, which runs it as `draft-NAME`."""
        return "dspark" if self.rank else "dflash"

    @property
    def lead(self) -> int:
        """Slots of a block before the first that predicts: the anchor's, or none."""
        return 0 if self.rank and self.anchored else 1

    @property
    def block(self) -> int:
        """Slots of a block, the anchor's included."""
        return self.lead + self.drafts

    @property
    def sizes(self) -> "HeadSizes":
        """The sizes that were chosen."""
        sizes = self.spec.num_layers, self.drafts, self.rank, self.mask, self.taps
        return HeadSizes(*sizes, self.confident, self.anchored)

    @property
    def at_once(self) -> int:
        """See `HeadShape`."""
        return self.drafts

    @property
    def most(self) -> int:
        """See `HeadShape`."""
        return self.drafts

    def build(self, compute: Compute, rngs: nnx.Rngs) -> "DSpark":
        """See `HeadShape`."""
        return DSpark(self, compute, rngs)


def spread_taps(layers: int, count: int = MOST_TAPS) -> tuple[int, ...]:
    """Layers to tap of a target of `layers`: `count`, evenly spread from 1 to `layers` - 1.

    A tap reads a layer's input, which for layer 0 is the embedding: only a target of one layer is
    tapped there. The state after the last layer is no tap (llama.cpp ends at it).
    """
    first, last = min(1, layers - 1), layers - 1
    return tuple(sorted({first + round(i * (last - first) / (count - 1)) for i in range(count)}))


def follow_sections(spec: ArchSpec, target: ArchSpec) -> ArchSpec:
    """A head's architecture for its target: if that has axes of images, the head rotates by time.

    For a text this changes no angle. llama.cpp rotates such a head by positions of several axes.
    """
    sections = (spec.head_dim // 2, 0, 0, 0) if target.rope_sections else ()
    return dataclasses.replace(spec, rope_sections=sections)


class HeadSizes(NamedTuple):
    """Sizes that are chosen of a new head; its heads and widths are its target's."""

    layers: int
    slots: int  # that predict
    rank: int  # 0: DFlash
    mask: int  # an id
    taps: tuple[int, ...]  # (): evenly spread
    confident: bool = True
    anchored: bool = True  # whether the anchor's slot predicts

    def shape(self, target: ArchSpec) -> DSparkShape:
        """The shape of a head of these sizes."""
        spec = size_layers(target, layers=self.layers, family="qwen3", qk_norm=True)
        spec = follow_sections(spec, target)
        taps = tuple(self.taps) or spread_taps(target.num_layers)
        sizes = self.slots, self.rank, self.mask, self.confident, self.anchored
        return DSparkShape(spec, taps, *sizes)


class DSpark(nnx.Module):
    """The head's own parameters: `fc`, its norm, layers, a norm, Markov head, confidence."""

    def __init__(self, shape: DSparkShape, compute: Compute, rngs: nnx.Rngs):
        spec, dtype = shape.spec, compute.param_dtype
        width, table = spec.hidden_size, (spec.vocab_size, shape.rank)

        def layer(rngs: nnx.Rngs) -> Block:
            return Block(spec, compute, rngs)

        def norm() -> RMSNorm:
            return RMSNorm(width, spec.rms_eps, dtype)

        self.fc = Linear(len(shape.taps) * width, width, False, dtype, rngs)
        self.fc_norm, self.norm = norm(), norm()
        self.blocks = nnx.split_rngs(splits=spec.num_layers)(nnx.vmap(layer))(rngs)
        if shape.rank:  # as speculators draws them, but the bias begins at zero
            self.markov = nnx.Param(jax.random.normal(rngs.params(), table, dtype))
            self.bias = nnx.Param(jnp.zeros(table, dtype))
        if shape.confident:
            self.confidence = Linear(width + shape.rank, 1, True, dtype, rngs)
        self.spec, self.rank = spec, shape.rank

    def _layers(self) -> list[Block]:
        graph, stacked = nnx.split(self.blocks)
        return [nnx.merge(graph, take_layer(stacked, i)) for i in range(self.spec.num_layers)]

    def read_taps(
        self, taps: Float[Array, "B S PD"], positions: Int[Array, "B S"]
    ) -> tuple[Float[Array, "L B S K E"], Float[Array, "L B S K E"]]:
        """Keys and values of a text in each layer, from the target's states there."""
        rows = self.fc_norm(self.fc(taps.reshape(-1, taps.shape[-1])))
        angles, found = compute_angles(self.spec, positions), []
        for block in self._layers():
            attn = block.attn
            assert attn is not None and attn.k_norm is not None
            k, v = (
                x(rows).reshape(*positions.shape, -1, self.spec.head_dim) for x in (attn.k, attn.v)
            )
            found.append((rotate(attn.k_norm(k), *angles), v))
        keys, values = zip(*found, strict=True)
        return jnp.stack(keys), jnp.stack(values)

    def run(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mix: Callable[[int], Mix],
    ) -> Float[Array, "B T D"]:
        """Hidden states of slots from their embedded tokens; `mix(i)` attends in layer i."""
        angles = compute_angles(self.spec, positions)

        def turn(q: Array, k: Array) -> tuple[Array, Array]:
            return rotate(q, *angles), rotate(k, *angles)

        for number, block in enumerate(self._layers()):
            x, _ = block(x, turn, mix(number), recall_nothing)
        return self.norm(x)

    def add_before(
        self, states: Float[Array, "*B D"], before: Int[Array, "*B"]
    ) -> Float[Array, "*B DR"]:
        """States with the columns of the bias, which the token before each chooses."""
        if not self.rank:
            return states
        columns = self.markov[...][before].astype(states.dtype)
        return jnp.concatenate([states, columns], axis=-1)


@dataclasses.dataclass(frozen=True)
class DSparkFunctions(TappedFunctions):
    """A target with its head, as a model for losses, which predicts as the head does.

    Hidden states and unembedding have the columns of the target and of the Markov head, D + R: the
    product is the sum of logits and bias.
    """

    shape: DSparkShape

    def hidden(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array
    ) -> Float[Array, "B T DR"]:
        """States of blocks that lie side by side from the row's first token on."""
        first = jnp.zeros(tokens.shape[:1], jnp.int32)
        anchors = place_anchors(first, tokens.shape[1], self.shape.block)
        return self.hidden_and_blocks(params, tokens, segment_ids, positions, anchors)[1]

    def hidden_and_blocks(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        anchors: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T DR"]]:
        """Hidden states of the target, and states of blocks that lie side by side.

        `anchors` are the places where each place's block begins. The state at place t predicts the
        token after t, as every model's does, from the target's states before the anchor of its
        block, the anchor's token, and, in the bias, token t. A slot that predicts the token in its
        own place (DFlash) makes the state of the place before, so that one place a block has no
        state. Slots whose anchor is below 0 belong to no block: they mean nothing. The target gets
        no gradient.
        """
        columns = tokens, segment_ids, positions
        hidden, text = self._read_text(params, *columns)
        return hidden, self._run_slots(params, text, *columns, anchors)

    def _read_text(self, params: Params, *columns: Array) -> tuple[Array, tuple[Array, Array]]:
        """The target's hidden states, and the head's keys and values of the text."""
        hidden, taps = jax.lax.stop_gradient(self.read_taps(params, *columns))
        return hidden, self.merge_head(params).read_taps(taps, columns[2])

    def _run_slots(
        self,
        params: Params,
        text: tuple[Array, Array],
        tokens: Array,
        segment_ids: Array,
        positions: Array,
        anchors: Array,
    ) -> Array:
        """States of slots, from keys and values of the text."""
        head, at = self.merge_head(params), jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        keys, values = text
        anchor = jnp.maximum(anchors, 0)
        slots = jnp.take_along_axis(positions, anchor, axis=1) + at - anchor
        ids = jnp.where(at == anchors, tokens, self.shape.mask)
        x = jax.lax.stop_gradient(self.embed_tokens(params, ids))
        documents = jnp.take_along_axis(segment_ids, anchor, axis=1)

        def mix(layer: int) -> Mix:
            def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
                pairs = (keys[layer], k), (values[layer], v)
                scale = self.shape.spec.score_scale
                return attend_blocks(q, *pairs, anchors, documents, segment_ids, scale=scale), None

            return attend

        states = jnp.roll(head.run(x, slots, mix), -self.shape.lead, axis=1)
        return head.add_before(states, tokens)

    def judge_slots(
        self, params: Params, states: Float[Array, "*B DR"]
    ) -> Float[Array, "*B"] | None:
        """Logits that the draft of a slot is accepted, float32, from `states`; None without."""
        if not self.shape.confident:
            return None
        rows = states.reshape(-1, states.shape[-1])
        return self.merge_head(params).confidence(rows).reshape(states.shape[:-1]).astype("float32")

    def draft_runs(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array, drafts: int
    ) -> Float[Array, "B N T DR"]:
        """States of the target, then of each slot of a block; N is 1 + `drafts`.

        Draft n at a token belongs to the block whose anchor lies n tokens before; the target's
        states have zeros in place of the bias. See `DraftFunctions.draft_runs`. Without a bias a
        row's last place has no drafts: its numbers mean nothing.
        """
        columns, (rows, length) = (tokens, segment_ids, positions), tokens.shape
        layers, text = self._read_text(params, *columns)

        def tile(first: Array) -> Array:
            anchors = place_anchors(jnp.full((rows,), first), length, self.shape.block)
            return self._run_slots(params, text, *columns, anchors)

        starts = jnp.arange(self.shape.block, dtype=jnp.int32)
        tiled, at = jax.lax.map(tile, starts), jnp.arange(length)
        slots = [tiled[(at - n) % self.shape.block, :, at].swapaxes(0, 1) for n in range(drafts)]
        pad = slots[0].shape[-1] - layers.shape[-1]
        layers = jnp.pad(layers, ((0, 0), (0, 0), (0, pad))).astype(slots[0].dtype)
        return jnp.stack([layers, *slots], axis=1)

    def mix_slots(self, cache: Cache, start: Int[Array, " B"], layer: int) -> Mix:
        """Attention of slots to all of themselves and to what `cache` has before `start`."""
        kept = (jnp.moveaxis(x[layer], 1, 2) for x in (cache.k, cache.v))

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            anchors = jnp.broadcast_to(start[:, None], q.shape[:2])
            text = jnp.ones(keys.shape[:2], jnp.int32)
            pairs, documents = ((keys, k), (values, v)), jnp.ones_like(anchors)
            scale = self.shape.spec.score_scale
            return attend_blocks(q, *pairs, anchors, documents, text, scale=scale), None

        keys, values = kept
        return attend

    def head(self, params: Params) -> Float[Array, "V DR"]:
        """The target's unembedding, and in more columns the rows of the bias."""
        unembedding = super().head(params)
        if not self.shape.rank:
            return unembedding
        bias = gather_shards(params[HEAD]["bias"]).astype(unembedding.dtype)
        return jnp.concatenate([unembedding, bias[: len(unembedding)]], axis=1)

    def stored_head(self, params: Params) -> Array:
        """See `head`."""
        return self.head(params)

    def head_parts(self, params: Params) -> list[tuple[Params, int]]:
        """See `DecoderFunctions.head_parts`: the bias is part of it."""
        parts = super().head_parts(params)
        if self.shape.rank:
            parts.append(({HEAD: {"bias": params[HEAD]["bias"]}}, self.shape.rank))
        return parts


def place_anchors(first: Int[Array, " B"], length: int, block: int) -> Int[Array, "B T"]:
    """Places of the anchors of blocks that lie side by side; a row's first one is at `first`."""
    at = jnp.arange(length, dtype=jnp.int32)[None]
    return at - (at - first[:, None]) % block
