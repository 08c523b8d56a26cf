"""EAGLE-3: a head of one layer that drafts token by token, from inner states of a target.

At each token it reads the embedded token and a state of the place before: the target's at three of
its layers (taps), joined by `fc`, or, after the last token that the target has read, what its own
layer made of the token before. So each draft of a pass has the head's own state to begin from, and
a head that is trained on one draft alone sees states in use that it never saw in training.
Training runs several drafts of a pass that begins at every token ("training-time test"): draft n
reads the true token and the head's state of draft n - 1. Its keys and values are of the target's
states up to the start of its pass, then of the head's: a mask of diagonals.

The file of llama.cpp's `draft-eagle3`, `general.architecture` `eagle3`:

- `eagle3.target_layers`: three layers of the target whose inputs are read;
  `eagle3.target_hidden_size`: their width.
- `fc` [D, 3 D] joins the taps. The layer's `attn_norm` is of the embedded token, `attn_norm_2` of
  the state; queries, keys and values are of both, side by side, 2 D inputs. The stream is the state
  as it came (`norm_before_residual` false), then the layer's. `output_norm` precedes the
  unembedding, and what the next draft reads has not passed it.
- Rows of queries and keys are stored as pairs (i, i + E / 2), as of Llama.
- `token_embd` is the target's. `output` [N, D] may be the head's: of all ids of the target, or of
  those in `d2t`, I64 [N], which alone the head drafts. Without `output` it is the target's.

Sources: llama.cpp's src/models/eagle3.cpp and common/speculative.cpp
(`common_speculative_impl_draft_eagle3`: place P holds the token of P + 1 with the state of P, so
that a text's first token has no key). Training: vllm-project/speculators, models/eagle3/core.py
(`ttt_steps`: true tokens, own states) and attention.py (the mask).

A smaller vocabulary makes a draft cheaper: on a small target most of it is the unembedding. Its
ids are the most frequent ones, its rows begin as the target's and train. As in speculators the head
learns the target's distribution normalised over these ids; a text's other ids teach no
cross-entropy.

Letters: B rows, T positions, N drafts and 1, D width, P taps, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kdjax.models.arch import ArchSpec
from kdjax.models.attention import attend_and_keep
from kdjax.models.decoder import (
    Attention,
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
from kdjax.models.draft_functions import have_before, run_drafts
from kdjax.models.shards import gather_shards
from kdjax.models.tapped import HeadShape, TappedFunctions, compute_angles, size_layers
from kdjax.models.weights import SomeRows

PART = "eagle3"  # the head's name among the parameters of its target
TAPS = 3
MOST_DRAFTS = 8  # a pass, that judge a head; it may draft more


@dataclasses.dataclass(frozen=True)
class EagleShape(HeadShape):
    """Everything that fixes a head's shapes and arithmetic."""

    ids: tuple[int, ...] = ()  # of the target's vocabulary, which alone it drafts; (): all
    own: bool = False  # whether the unembedding is its own; of some ids it is

    part: ClassVar[str] = PART
    kind: ClassVar[str] = "eagle3"  # type: ignore[misc]
    at_once: ClassVar[int] = 1  # type: ignore[misc]
    most: ClassVar[int] = MOST_DRAFTS  # type: ignore[misc]

    @property
    def sizes(self) -> "EagleSizes":
        """The sizes that were chosen."""
        return EagleSizes(self.taps, self.ids, self.own)

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """See `HeadShape`: the target's id of each row of the unembedding."""
        return {"d2t": np.asarray(self.ids, np.int64)} if self.ids else {}

    def build(self, compute: Compute, rngs: nnx.Rngs) -> "Eagle":
        """See `HeadShape`."""
        return Eagle(self, compute, rngs)

    def begin(self, drawn: Params, read_rows: Callable[[np.ndarray], Any]) -> Params:
        """See `HeadShape`: the unembedding begins with the target's rows."""
        if not self.own:
            return drawn
        ids = np.asarray(self.ids or range(self.spec.vocab_size))
        return {**drawn, "output": jnp.asarray(read_rows(ids), jnp.float32)}


def choose_taps(layers: int) -> tuple[int, ...]:
    """Layers to tap of a target of `layers`: low, middle and high, as published heads have them."""
    middle = layers // 2
    return (2, middle, layers - 3) if layers > 6 else (int(layers > 3), middle, layers - 1)


class EagleSizes(NamedTuple):
    """Sizes that are chosen of a new head; its heads and widths are its target's."""

    taps: tuple[int, ...]  # (): low, middle and high
    ids: tuple[int, ...] = ()  # that it drafts; (): all
    own: bool = False  # whether it has an unembedding, though it drafts all ids

    def shape(self, target: ArchSpec) -> EagleShape:
        """The shape of a head of these sizes."""
        spec = size_layers(target, layers=1, family="llama", qk_norm=False)
        taps, ids = tuple(self.taps) or choose_taps(target.num_layers), tuple(self.ids)
        return EagleShape(spec, taps, ids, self.own or bool(ids))


class EagleLayer(Block):
    """The layer, which reads embedded tokens and states: its `attn_norm` is of the former."""

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        super().__init__(spec, compute, rngs)
        width, dtype = spec.hidden_size, compute.param_dtype
        self.attn = Attention(dataclasses.replace(spec, hidden_size=2 * width), compute, rngs)
        self.attn.o = Linear(spec.num_heads * spec.head_dim, width, False, dtype, rngs)
        self.state_norm = RMSNorm(width, spec.rms_eps, dtype)

    def run(
        self,
        x: Float[Array, "B T D"],
        before: Float[Array, "B T D"],
        angles: tuple[Array, Array],
        mix: Mix,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """The states that follow `before` at embedded tokens, and what `mix` stores."""

        def turn(q: Array, k: Array) -> tuple[Array, Array]:
            return rotate(q, *angles), rotate(k, *angles)

        assert self.attn is not None and self.attn_norm is not None and self.mlp_norm is not None
        rows, tokens = (y.reshape(-1, y.shape[-1]) for y in (before.astype(x.dtype), x))
        both = jnp.concatenate([self.attn_norm(tokens), self.state_norm(rows)], axis=-1)
        mixed, kept = self.attn(both, x.shape[:-1], turn, mix)
        rows = rows + mixed
        return (rows + self.mlp(self.mlp_norm(rows))).reshape(x.shape), kept


class Eagle(nnx.Module):
    """The head's own parameters: `fc`, the layer, a norm, and the unembedding if it has one."""

    def __init__(self, shape: EagleShape, compute: Compute, rngs: nnx.Rngs):
        spec, dtype = shape.spec, compute.param_dtype
        width = spec.hidden_size

        def layer(rngs: nnx.Rngs) -> EagleLayer:
            return EagleLayer(spec, compute, rngs)

        self.fc = Linear(len(shape.taps) * width, width, False, dtype, rngs)
        self.blocks = nnx.split_rngs(splits=1)(nnx.vmap(layer))(rngs)  # a stack of one
        self.norm = RMSNorm(width, spec.rms_eps, dtype)
        if shape.own:  # `EagleShape.begin` has its numbers
            self.output = nnx.Param(jnp.zeros((len(shape.ids) or spec.vocab_size, width), dtype))
        self.spec = spec

    def join(self, taps: Float[Array, "B T PD"]) -> Float[Array, "B T D"]:
        """The state that the head reads of a place, from the target's there."""
        rows = self.fc(taps.reshape(-1, taps.shape[-1]))
        return rows.reshape(*taps.shape[:-1], -1)

    def run(self, x: Array, before: Array, positions: Array, mix: Mix) -> tuple[Array, Any]:
        """See `EagleLayer.run`."""
        graph, stacked = nnx.split(self.blocks)
        layer = nnx.merge(graph, take_layer(stacked, 0))
        return layer.run(x, before, compute_angles(self.spec, positions), mix)


@dataclasses.dataclass(frozen=True)
class EagleFunctions(TappedFunctions):
    """A target with its head, as a model for losses and for drafting."""

    shape: EagleShape

    def hidden(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array
    ) -> Float[Array, "B T D"]:
        """States of the first draft of a pass at each token."""
        return self.draft_runs(params, tokens, segment_ids, positions, 1)[:, 1]

    def draft_runs(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        drafts: int,
    ) -> Float[Array, "B N T D"]:
        """Hidden states of the target, then of each draft of a pass; N is 1 + `drafts`.

        Draft n at a token belongs to the pass that began n - 1 tokens before. A pass that begins at
        a document's first token has no state to begin from: its numbers mean nothing. The target
        gets no gradient. See `DraftFunctions.draft_runs`.
        """
        read = self.read_taps(params, tokens, segment_ids, positions)
        hidden, taps = jax.lax.stop_gradient(read)
        head = self.merge_head(params)
        x = jax.lax.stop_gradient(self.embed_tokens(params, tokens))

        def draft(before: Array, mix: Mix) -> tuple[Array, Array]:
            state, _ = head.run(x, before, positions, mix)
            return state, head.norm(state).astype(hidden.dtype)

        ids, scale = leave_first(segment_ids), self.shape.spec.score_scale
        states = run_drafts(draft, head.join(taps), segment_ids, ids, drafts, scale=scale)
        return jnp.stack([hidden, *states], axis=1)

    def head(self, params: Params) -> Any:
        """The unembedding of the drafts, `[V, D]` or `SomeRows`."""
        if not self.shape.own:
            return super().head(params)
        rows = gather_shards(params[PART]["output"])
        return SomeRows(rows, place_ids(self.shape)) if self.shape.ids else rows

    def stored_head(self, params: Params) -> Any:
        """See `head`."""
        return self.head(params) if self.shape.own else super().stored_head(params)

    def head_parts(self, params: Params) -> list[tuple[Params, int]]:
        """See `DecoderFunctions.head_parts`."""
        if not self.shape.own:
            return super().head_parts(params)
        own = {PART: {"output": params[PART]["output"]}}
        return [(own, self.shape.spec.hidden_size)]

    def list_heads(self) -> tuple[Callable[[Params], Any], ...]:
        """See `TappedFunctions`."""
        return (super().head, self.head) if self.shape.own else (self.head,)

    def read_text(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        before: Float[Array, "B T D"],
        places: Int[Array, " B"],
    ) -> tuple[Float[Array, "L B T K E"], Float[Array, "L B T K E"]]:
        """Keys and values of tokens with the states before them, L = 1.

        `places` are the places of the first states. As in llama.cpp the place P of the cache has
        the state at P and the token at P + 1.
        """

        def mix(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            return q, (k[None], v[None])  # one layer: nothing reads what it would attend to

        return self._run(params, tokens, before, places, mix)[1]

    def draft_extend(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        before: Float[Array, "B T D"],
        places: Int[Array, " B"],
        cache: Cache,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Reads T tokens a row as `read_text` does: the states that follow, and the cache."""
        keep = functools.partial(attend_and_keep, scale=self.shape.spec.score_scale)

        def mix(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            return keep(q, k, v, (cache.k, cache.v), jnp.int32(0), places)

        states, kept = self._run(params, tokens, before, places, mix)
        return states, Cache(*kept)

    def _run(
        self, params: Params, tokens: Array, before: Array, places: Array, mix: Mix
    ) -> tuple[Array, Any]:
        at = places[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x = self.embed_tokens(params, tokens)
        return self.merge_head(params).run(x, before, at, mix)


def place_ids(shape: EagleShape) -> Int[Array, " V"]:
    """The row of each id of the target in the unembedding of some ids; N without one."""
    places = np.full(shape.spec.vocab_size, len(shape.ids), np.int32)
    places[np.asarray(shape.ids)] = np.arange(len(shape.ids), dtype=np.int32)
    return jnp.asarray(places)


def leave_first(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Segments without the first place of each, which has no state before it: 0 there."""
    return jnp.where(have_before(segment_ids), segment_ids, 0)
