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
- `token_embd` and `output` are the target's, and so is the vocabulary (no `d2t`).

Sources: llama.cpp's src/models/eagle3.cpp and common/speculative.cpp
(`common_speculative_impl_draft_eagle3`: place P holds the token of P + 1 with the state of P, so
that a text's first token has no key). Training: vllm-project/speculators, models/eagle3/core.py
(`ttt_steps`: true tokens, own states) and attention.py (the mask).

Letters: B rows, T positions, N drafts and 1, D width, P taps.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kdjax.models.arch import ArchSpec
from kdjax.models.attention import attend_and_keep, attend_runs
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
from kdjax.models.draft_functions import have_before, shift_states
from kdjax.models.tapped import HeadShape, TappedFunctions, compute_angles, size_layers

PART = "eagle3"  # the head's name among the parameters of its target
TAPS = 3
MOST_DRAFTS = 8  # a pass, that judge a head; it may draft more


@dataclasses.dataclass(frozen=True)
class EagleShape(HeadShape):
    """Everything that fixes a head's shapes and arithmetic."""

    part: ClassVar[str] = PART
    kind: ClassVar[str] = "eagle3"  # type: ignore[misc]
    at_once: ClassVar[int] = 1  # type: ignore[misc]
    most: ClassVar[int] = MOST_DRAFTS  # type: ignore[misc]

    @property
    def sizes(self) -> "EagleSizes":
        """The sizes that were chosen."""
        return EagleSizes(self.taps)

    def build(self, compute: Compute, rngs: nnx.Rngs) -> "Eagle":
        """See `HeadShape`."""
        return Eagle(self, compute, rngs)


def choose_taps(layers: int) -> tuple[int, ...]:
    """Layers to tap of a target of `layers`: low, middle and high, as published heads have them."""
    middle = layers // 2
    return (2, middle, layers - 3) if layers > 6 else (int(layers > 3), middle, layers - 1)


class EagleSizes(NamedTuple):
    """Sizes that are chosen of a new head; its heads and widths are its target's."""

    taps: tuple[int, ...]  # (): low, middle and high

    def shape(self, target: ArchSpec) -> EagleShape:
        """The shape of a head of these sizes."""
        spec = size_layers(target, layers=1, family="llama", qk_norm=False)
        return EagleShape(spec, tuple(self.taps) or choose_taps(target.num_layers))


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
    """The head's own parameters: `fc`, the layer, a norm."""

    def __init__(self, shape: EagleShape, compute: Compute, rngs: nnx.Rngs):
        spec, dtype = shape.spec, compute.param_dtype
        width = spec.hidden_size

        def layer(rngs: nnx.Rngs) -> EagleLayer:
            return EagleLayer(spec, compute, rngs)

        self.fc = Linear(len(shape.taps) * width, width, False, dtype, rngs)
        self.blocks = nnx.split_rngs(splits=1)(nnx.vmap(layer))(rngs)  # a stack of one
        self.norm = RMSNorm(width, spec.rms_eps, dtype)
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
        ids = leave_first(segment_ids)
        keys, values, states, last = [], [], [hidden], head.join(taps)

        def mix(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            keys.append(k)
            values.append(v)
            scale = self.shape.spec.score_scale
            return attend_runs(q, keys, values, ids, scale=scale), None

        for _ in range(drafts):
            last, _ = head.run(x, shift_states(last, segment_ids), positions, mix)
            states.append(head.norm(last).astype(hidden.dtype))
        return jnp.stack(states, axis=1)

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


def leave_first(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Segments without the first place of each, which has no state before it: 0 there."""
    return jnp.where(have_before(segment_ids), segment_ids, 0)
