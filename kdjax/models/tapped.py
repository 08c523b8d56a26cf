"""Heads that draft from inner states of a target: what DSpark, DFlash and EAGLE-3 share.

The inputs of a few layers of the target (taps), joined, are what a head knows of the text. It has
the target's embedding and unembedding, and drafts for this target alone.

Letters: B rows, T positions, D width, P taps.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kdjax.models.arch import ArchSpec, Layer
from kdjax.models.decoder import Compute, DecoderFunctions, Params
from kdjax.models.ropes import Rope, rope_frequencies
from kdjax.models.shards import gather_shards
from kdjax.models.states import hidden_and_states


@dataclasses.dataclass(frozen=True)
class HeadShape(abc.ABC):
    """Everything that fixes a head's shapes and arithmetic."""

    spec: ArchSpec  # of the head's own layers; the target's vocabulary and width
    taps: tuple[int, ...]  # layers of the target whose inputs it reads

    part: ClassVar[str]  # its name among the parameters of its target, and in records of runs

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """Its name in llama.cpp, which runs it as `draft-NAME`."""

    @property
    @abc.abstractmethod
    def at_once(self) -> int:
        """Tokens that one of its passes drafts."""

    @property
    @abc.abstractmethod
    def most(self) -> int:
        """Tokens drafted between two passes of the target, at most."""

    @property
    @abc.abstractmethod
    def sizes(self) -> Any:
        """The sizes that were chosen, a named tuple; its `shape(target)` is this shape."""

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """Tables of int64 in its file, by their names: here none."""
        return {}

    @abc.abstractmethod
    def build(self, compute: Compute, rngs: nnx.Rngs) -> nnx.Module:
        """A new head."""

    def begin(self, drawn: Params, read_rows: Callable[[np.ndarray], Any]) -> Params:
        """Parameters of a new head, given the drawn ones and rows of the target's unembedding."""
        return drawn

    def list_states(self) -> list[str]:
        """Names of the taps, for `states.hidden_and_states`."""
        return [f"blocks/{tap - 1}" if tap else "embed" for tap in self.taps]


@dataclasses.dataclass(frozen=True)
class TappedFunctions(DecoderFunctions):
    """A target with its head, as a model for losses, which predicts as the head does."""

    shape: HeadShape
    own: nnx.GraphDef  # of the head

    def merge(self, params: Params) -> Any:
        """The target."""
        return super().merge(self._leave_out(params))

    def merge_head(self, params: Params) -> Any:
        """The head."""
        return nnx.merge(self.own, gather_shards(params[self.shape.part]))

    def read_taps(
        self, params: Params, *columns: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T PD"]]:
        """The target's hidden states, and its taps, joined; `columns` as of `hidden`."""
        target = DecoderFunctions(self.graph, self.spec, self.compute)
        names = self.shape.list_states()
        hidden, taps = hidden_and_states(target, self._leave_out(params), *columns, names=names)
        return hidden, jnp.concatenate([taps[name] for name in names], axis=-1)

    def list_heads(self) -> tuple[Callable[[Params], Any], ...]:
        """Functions that make the unembedding of `draft_runs`, or the target's and the drafts'."""
        return (self.head,)

    def _leave_out(self, params: Params) -> Params:
        return {name: x for name, x in params.items() if name != self.shape.part}


def size_layers(target: ArchSpec, *, layers: int, family: str, qk_norm: bool) -> ArchSpec:
    """The architecture of a new head's layers: of its target's heads and widths.

    The MLP is dense, as wide as a token's experts.
    """
    return ArchSpec(
        family=family,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        layers=(Layer(Rope(target.rope_theta)),) * layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        mlp_size=target.mlp_width,
        max_positions=target.max_positions,
        rms_eps=target.rms_eps,
        tied=True,
        qkv_bias=False,
        qk_norm=qk_norm,
    )


def compute_angles(spec: ArchSpec, positions: Int[Array, "B T"]) -> tuple[Array, Array]:
    """Cosines and sines, float32 `[B, T, 1, E / 2]`, that a head rotates queries and keys by."""
    inverse, factor = rope_frequencies(spec.rope, spec.head_dim)
    angle = positions.astype(jnp.float32)[..., None, None] * inverse[None, None, None]
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def recall_nothing(_: Any) -> Any:
    """In place of a delta net: raises `TypeError`."""
    raise TypeError("the layers of a head attend")


@functools.lru_cache(maxsize=16)
def trace_head(shape: HeadShape, compute: Compute) -> tuple[Any, Params]:
    """A head's graph and its parameters' shapes; allocates nothing."""
    graph, state = nnx.split(nnx.eval_shape(lambda: shape.build(compute, nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)


def draw_head(shape: HeadShape, seed: int, read_rows: Callable[[np.ndarray], Any]) -> Params:
    """Random float32 parameters of a head; `read_rows` reads the target's unembedding by ids."""
    drawn = nnx.to_pure_dict(nnx.state(shape.build(Compute(), nnx.Rngs(seed))))
    return shape.begin(drawn, read_rows)
