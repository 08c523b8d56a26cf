"""Decoder architectures as plain numbers.

One frozen `ArchSpec` describes all of `families.FAMILIES`; `schema` reads it from a checkpoint's
header and writes it; `decoder.Decoder` builds it.
Sources: the families' modeling files in Transformers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array

from kdjax.models.delta import CHUNK
from kdjax.models.ropes import Rope, RopeScaling

_gelu = functools.partial(jax.nn.gelu, approximate=False)
_gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
# Activations of an MLP's gate, by Transformers' names (activations.py).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}


# Stacks of layers in a tree of parameters: true for delta nets, false for attention, None for the
# next-token block, which is no layer.
STACKS: dict[str, bool | None] = {"blocks": False, "deltas": True, "mtp": None}


class Layer(NamedTuple):
    """Facts in which a layer may differ from its neighbours."""

    rope: Rope | None  # None: no rotation
    window: int = 0  # positions that it sees, its own included; 0: all earlier ones
    delta: bool = False  # a gated delta net in place of attention


@dataclasses.dataclass(frozen=True)
class ArchSpec:
    """Everything that fixes a decoder's shapes and arithmetic."""

    family: str
    vocab_size: int  # rows of the embedding, padding rows included
    hidden_size: int
    layers: tuple[Layer, ...]  # their windows, if any, have one size
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    rms_eps: float
    tied: bool  # the head is the embedding
    qkv_bias: bool
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of queries and keys, before rope (Qwen3)
    qk_norm_whole: bool = False  # this norm is over all heads together (OLMo 2)
    activation: str = "silu"  # a key of `ACTIVATIONS`
    norm_offset: bool = False  # norms multiply by 1 + weight
    pre_norms: bool = True  # of the inputs of attention and MLP
    post_norms: bool = False  # of their outputs, before these are added
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP, before these are added
    logit_scale: float = 1.0  # logits are divided by it
    attention_scale: float = 0.0  # of products of queries and keys; 0: head_dim ** -0.5
    # Queries are multiplied by 1 + this * log(1 + floor(position / growth_length)) (Ministral 3).
    query_growth: float = 0.0
    growth_length: int = 0
    experts: int = 0  # MLPs in a layer, of which a router picks some for a token; 0: one MLP
    experts_used: int = 0  # for a token
    expert_size: int = 0  # width of an expert; no layer then has `mlp_size`
    norm_experts: bool = False  # the router's weights of the used experts are divided by their sum
    shared_size: int = 0  # width of a gated MLP that every token passes in addition to experts
    gated: bool = False  # each head's output is multiplied by the sigmoid of a gate
    # For families with delta layers (`models.delta`): numbers of key and value heads, widths of
    # both, and positions of the convolution.
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_kernel: int = 0
    rope_sections: tuple[int, ...] = ()  # pairs for each axis of an image's positions
    # 1: a next-token block follows the layers; it reads a token and the hidden state before it.
    drafts: int = 0

    @property
    def head(self) -> str:
        """The name of the parameter that the head is."""
        return "embed" if self.tied else "head"

    @property
    def num_layers(self) -> int:
        """Number of layers, without the next-token block."""
        return len(self.layers)

    @property
    def score_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.attention_scale or self.head_dim**-0.5

    def places(self, *, delta: bool | None) -> tuple[int, ...]:
        """Indices of the layers of a kind in `STACKS`; the next-token block follows all layers."""
        if delta is None:
            return tuple(range(self.num_layers, self.num_layers + self.drafts))
        return tuple(i for i, layer in enumerate(self.layers) if layer.delta == delta)

    def period(self) -> tuple[bool, ...]:
        """The shortest sequence of kinds, true for a delta net, that repeats through all layers."""
        kinds = tuple(layer.delta for layer in self.layers)
        lengths = (n for n in range(1, len(kinds) + 1) if len(kinds) % n == 0)
        return next(kinds[:n] for n in lengths if kinds[:n] * (len(kinds) // n) == kinds)

    @property
    def delta_columns(self) -> int:
        """Columns that a delta layer's convolution mixes: queries, keys, values."""
        keys = 2 * self.delta_key_heads * self.delta_key_dim
        return keys + self.delta_value_heads * self.delta_value_dim

    def windows(self) -> tuple[int, ...]:
        """Window of each layer, 0 for full attention."""
        return tuple(layer.window for layer in self.layers)

    @property
    def window(self) -> int:
        """Positions that layers with a window see; 0 without such layers."""
        return max(self.windows())

    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotations of all layers, each once."""
        attention = (layer for layer in self.layers if not layer.delta)
        return tuple(dict.fromkeys(layer.rope for layer in attention))

    @property
    def rope(self) -> Rope | None:
        """The rotation of the layers that see furthest; None if nothing rotates."""
        reach = sorted(self.layers, key=lambda layer: (layer.rope is None, layer.window > 0))
        return reach[0].rope

    @property
    def rope_theta(self) -> float:
        """Theta of `rope`; 1e4 if nothing rotates."""
        return 1e4 if self.rope is None else self.rope.theta

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """Scaling of `rope`."""
        return None if self.rope is None else self.rope.scaling

    @property
    def local_rope_theta(self) -> float:
        """Theta of the layers with a window; 0 without such layers."""
        near = next((x.rope for x in self.layers if x.window), None)
        return near.theta if near is not None else 0.0

    def replace_theta(self, theta: float) -> "ArchSpec":
        """This architecture with another theta in the layers whose rotation is `rope`."""
        rope = self.rope
        if rope is None:
            return self
        other = dataclasses.replace(rope, theta=theta)
        layers = (x._replace(rope=other) if x.rope == rope else x for x in self.layers)
        return dataclasses.replace(self, layers=tuple(layers))

    @property
    def mlp_width(self) -> int:
        """Units of the MLPs that a token passes in a layer, the shared expert included."""
        used = self.experts_used * self.expert_size + self.shared_size
        return used if self.experts else self.mlp_size

    def forward_flops(self, seq_len: int) -> float:
        """FLOP for each token of a forward pass, causal attention and head included.

        Only the used experts count.
        """
        d, hd = self.hidden_size, self.head_dim
        qo, kv = self.num_heads * hd, self.num_kv_heads * hd
        attention = (2 + self.gated) * d * qo + 2 * d * kv
        values, keys = (
            self.delta_value_heads * self.delta_value_dim,
            self.delta_key_heads * self.delta_key_dim,
        )
        delta = d * (2 * keys + 3 * values + 2 * self.delta_value_heads)
        # Products with the state, and within a chunk; its inverse is not counted.
        delta += values * (3 * self.delta_key_dim + 2 * CHUNK) + 2 * keys * CHUNK
        count = len(self.places(delta=True))
        gates = self.experts + (self.shared_size > 0)
        products = self.num_layers * d * (3 * self.mlp_width + gates)
        products += (self.num_layers - count) * attention + count * delta
        products += self.vocab_size * d
        windows = (layer.window for layer in self.layers if not layer.delta)
        seen = sum(_mean_keys(window or seq_len, seq_len) for window in windows)
        return 2.0 * products + 4.0 * qo * seen


def _mean_keys(window: int, length: int) -> float:
    """Keys that a query sees on average; half the length without a window."""
    window = min(window, length)
    return window - window * window / (2 * length)
