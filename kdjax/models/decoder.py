"""The decoder-only transformer of `families.FAMILIES`, as a Flax NNX module.

Layers are stacked on a leading axis and scanned: 24 layers compile as one, and are 15 leaves.
Weights are stored (out, in), as in the files, so that loading and export move no element.

Letters: B rows, T positions, D hidden width, L layers, V vocabulary rows.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.models.arch import ACTIVATIONS, STACKS, ArchSpec
from kdjax.models.attention import attend, attend_and_keep, attend_runs
from kdjax.models.delta import (
    DeltaInputs,
    Stacked,
    hold_news,
    read_and_keep,
    read_late,
    read_states,
)
from kdjax.models.experts import choose_experts, mix_experts, mix_experts_by_tiles, route_rows
from kdjax.models.kernels import norms
from kdjax.models.kernels.delta_rule import states_fit
from kdjax.models.ropes import rope_frequencies
from kdjax.models.shards import gather_shards
from kdjax.models.weights import (
    Rounded,
    Scaled,
    Weight,
    decode_weight,
    from_bits,
    gate_rows,
    project,
    project_all,
    round_for,
    slice_layers,
    unembed,
)

Params = dict[str, Any]  # nested dict of stored weights, as `nnx.to_pure_dict` returns it

_SHORT = 192  # positions of a prompt that XLA's attention reads sooner than cuDNN's

# The rotation of queries and keys by their positions.
Turn = Callable[[Array, Array], tuple[Array, Array]]

# Attention of rotated queries and keys, and what the layer is to keep of them.
Mix = Callable[[Array, Array, Array], tuple[Array, Any]]

# What a delta net's states say, and what the layer is to keep of them.
Recall = Callable[[DeltaInputs], tuple[Array, Any]]

REMAT_POLICIES: dict[str, Callable | None] = {
    "none": None,  # keep every activation
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,  # keep each layer's input only
}


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a decoder computes, apart from what it computes."""

    dtype: DTypeLike = jnp.float32  # of activations and of weights when multiplied
    param_dtype: DTypeLike = jnp.float32  # of weights as stored
    remat: str = "none"  # a key of REMAT_POLICIES
    # Layers in a loop are compiled once. Written out, the activations kept of them are not copied.
    scan: bool = True
    max_segments: int = 1
    # What is generated goes beyond longrope's original positions; texts that are read say so.
    long: bool = False
    placement: Placement | None = None  # None: plain JAX, on whatever device


class Linear(nnx.Module):
    """y = x W^T (+ b), W `[out, in]`."""

    def __init__(self, inner: int, outer: int, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), (outer, inner), dtype) * jnp.asarray(0.02, dtype)
        )
        self.bias = nnx.Param(jnp.zeros((outer,), dtype)) if bias else None

    def __call__(self, x: Array | Rounded) -> Array:
        """Multiplies rows `[N, inner]`."""
        return self.add_bias(project(x, self.weight.get_value()))

    def add_bias(self, y: Array) -> Array:
        """A product with the weight, `[N, outer]`, with the bias if there is one."""
        return y if self.bias is None else y + from_bits(self.bias[...]).astype(y.dtype)[None]


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis; the statistics are float32 whatever x is.

    With an `offset` the factor is 1 + weight, and x is rounded after it only, as Gemma's are.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        dtype: DTypeLike,
        placement: Placement | None = None,
        offset: bool = False,
    ):
        self.weight = nnx.Param((jnp.zeros if offset else jnp.ones)((width,), dtype))
        self.eps, self.offset = eps, offset
        self.kernels = placement is not None and placement.kernels

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        factor = self._factor(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return ((x32 * scale).astype(factor.dtype) * factor).astype(x.dtype)

    def _factor(self, dtype: DTypeLike) -> Array:
        weight = from_bits(self.weight[...])
        return 1 + weight.astype(jnp.float32) if self.offset else weight.astype(dtype)

    def normalize_for(
        self, x: Float[Array, "N D"], weight: Weight
    ) -> tuple[Array, Array | Rounded]:
        """x, and its norm as products with `weight` may take it; by one kernel if placed so."""
        if not self.kernels:
            return x, self(x)
        ours = self._factor(x.dtype)
        if isinstance(weight, Scaled):
            return x, Rounded(*norms.round_rows(x, (ours, self.eps)), x.dtype)
        return norms.normalize_rows(x, ours, self.eps)


def rotate(x: Float[Array, "B T H D"], cos: Array, sin: Array) -> Float[Array, "B T H D"]:
    """Rotary embedding of the halves (i, i + R/2) of the first R columns; others stay.

    cos and sin are float32 `[B, T, 1, R/2]`. Angles stay float32: in bf16 position 257 is 256.
    """
    columns = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :columns].astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.concatenate(turned, axis=-1).astype(x.dtype)
    whole = columns == x.shape[-1]
    return rotated if whole else jnp.concatenate([rotated, x[..., columns:]], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and, if asked, normalised queries and keys.

    Where `ArchSpec.gated`, rows of q are for each head those of its query, then those of its gate.
    """

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        d, hd, dtype = spec.hidden_size, spec.head_dim, compute.param_dtype
        self.q = Linear(d, (1 + spec.gated) * spec.num_heads * hd, spec.qkv_bias, dtype, rngs)
        self.k = Linear(d, spec.num_kv_heads * hd, spec.qkv_bias, dtype, rngs)
        self.v = Linear(d, spec.num_kv_heads * hd, spec.qkv_bias, dtype, rngs)
        self.o = Linear(spec.num_heads * hd, d, spec.o_bias, dtype, rngs)

        def norm(heads: int) -> RMSNorm | None:
            width = heads * hd if spec.qk_norm_whole else hd
            scaled = RMSNorm(width, spec.rms_eps, dtype, offset=spec.norm_offset)
            return scaled if spec.qk_norm else None

        self.q_norm, self.k_norm = norm(spec.num_heads), norm(spec.num_kv_heads)
        self.head_dim, self.gated, self.placement = hd, spec.gated, compute.placement

    @property
    def entry(self) -> Weight:
        """Weight that rows are multiplied with first."""
        return self.q.weight.get_value()

    def __call__(
        self, rows: Array | Rounded, lead: tuple[int, ...], turn: Turn, mix: Mix
    ) -> tuple[Array, Any]:
        """Attends for rows `[B T, width]`, `lead` being (B, T); returns also what `mix` keeps."""
        linears = self.q, self.k, self.v
        weights = [linear.weight.get_value() for linear in linears]
        projected = project_all(round_for(rows, weights[0]), weights, self.placement)
        widths = (1 + self.gated) * self.head_dim, self.head_dim, self.head_dim
        q, k, v = (
            linear.add_bias(y).reshape(*lead, -1, width)
            for linear, y, width in zip(linears, projected, widths, strict=True)
        )
        gate = None
        if self.gated:
            q, gate = jnp.split(q, 2, axis=-1)
        q, k = _normalize(q, self.q_norm), _normalize(k, self.k_norm)
        out, kept = mix(*turn(q, k), v)
        if gate is not None:
            out *= jax.nn.sigmoid(gate)
        return self.o(out.reshape(-1, out.shape[2] * out.shape[3])), kept


def _scale(x: Array, factor: float) -> Array:
    """Multiplies in float32 and rounds once: 0.22 in bf16 is 0.2197."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def _normalize(x: Float[Array, "B T H D"], norm: RMSNorm | None) -> Float[Array, "B T H D"]:
    """Each head, or all heads of a position together where the norm is as wide."""
    if norm is None:
        return x
    return norm(x.reshape(*x.shape[:2], -1, norm.weight.shape[0])).reshape(x.shape)


class DeltaNet(nnx.Module):
    """A gated delta net (`models.delta`): a convolution, a state a head, a gated norm.

    Value heads lie in the order of GGUF files: head h reads key head h mod the number of those.
    What fixes how fast a state fades is float32 in every form.
    """

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        d, dtype, exact = spec.hidden_size, compute.param_dtype, jnp.float32
        heads, width = spec.delta_value_heads, spec.delta_value_dim
        self.qkv = Linear(d, spec.delta_columns, False, dtype, rngs)
        self.gate = Linear(d, heads * width, False, dtype, rngs)
        self.alpha = Linear(d, heads, False, dtype, rngs)
        self.beta = Linear(d, heads, False, dtype, rngs)
        kernel = (spec.delta_columns, spec.delta_kernel)
        self.conv = nnx.Param(jax.random.normal(rngs.params(), kernel, exact) * 0.5)
        # A state fades by exp(-exp(log_rate) softplus(alpha + shift)) at each position.
        self.log_rate = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (heads,), exact, 0.01, 16.0))
        )
        self.shift = nnx.Param(jnp.ones((heads,), exact))
        self.norm = RMSNorm(width, spec.rms_eps, dtype)
        self.out = Linear(heads * width, d, False, dtype, rngs)
        self.spec, self.placement = spec, compute.placement

    @property
    def entry(self) -> Weight:
        """Weight that rows are multiplied with first."""
        return self.qkv.weight.get_value()

    def __call__(self, rows: Array | Rounded, lead: tuple[int, ...], recall: Recall) -> Any:
        """Mixes rows `[B T, width]`, `lead` being (B, T); returns also what `recall` keeps."""
        linears = self.qkv, self.gate, self.alpha, self.beta
        weights = [linear.weight.get_value() for linear in linears]
        products = project_all(round_for(rows, weights[0]), weights, self.placement, whole=True)
        mixed, gate, alpha, beta = (y.reshape(*lead, -1) for y in products)
        rate, shift = (jnp.exp(self.log_rate[...]), self.shift[...])
        fade = jax.nn.softplus(alpha.astype(jnp.float32) + shift[None, None])
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        inputs = DeltaInputs(mixed, self.conv[...], -rate[None, None] * fade, beta)
        out, kept = recall(inputs)
        gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(out.shape)
        out = (self.norm(out).astype(jnp.float32) * gate).astype(out.dtype)
        return self.out(out.reshape(-1, out.shape[2] * out.shape[3])), kept


class MLP(nnx.Module):
    """Gated: down(activation(gate(x)) * up(x)), silu in all published models."""

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        # Of a layer of experts it is the shared one.
        size, dtype = spec.shared_size or spec.mlp_size, compute.param_dtype
        self.gate = Linear(spec.hidden_size, size, False, dtype, rngs)
        self.up = Linear(spec.hidden_size, size, False, dtype, rngs)
        self.down = Linear(size, spec.hidden_size, False, dtype, rngs)
        self.activation, self.placement = spec.activation, compute.placement

    @property
    def entry(self) -> Weight:
        """Weight that rows are multiplied with first."""
        return self.gate.weight.get_value()

    def __call__(self, rows: Array | Rounded) -> Array:
        """Applies the layer to rows `[N, width]`."""
        activation = ACTIVATIONS[self.activation]
        gate, up = (linear.weight.get_value() for linear in (self.gate, self.up))
        return self.down(gate_rows(round_for(rows, gate), gate, up, activation, self.placement))


class Experts(nnx.Module):
    """MLPs of which a router picks some for each token, and adds what they give by its weights.

    A shared one, where there is any, sees all tokens and counts by the sigmoid of its own gate.
    """

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        count, width, size = spec.experts, spec.hidden_size, spec.expert_size

        def stack(outer: int, inner: int) -> nnx.Param:
            dtype = compute.param_dtype
            draw = jax.random.normal(rngs.params(), (count, outer, inner), dtype)
            return nnx.Param(draw * jnp.asarray(0.02, dtype))

        # In float32 whatever the others are: in bf16 every hundredth token goes elsewhere.
        self.router = Linear(width, count, False, jnp.float32, rngs)
        self.gate, self.up, self.down = stack(size, width), stack(size, width), stack(width, size)

        def gate() -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), (width,), jnp.float32) * 0.02)

        self.shared = MLP(spec, compute, rngs) if spec.shared_size else None
        self.shared_gate = gate() if spec.shared_size else None  # in float32 as the router
        self.spec, self.placement = spec, compute.placement

    @property
    def entry(self) -> Weight:
        """Weight that rows are multiplied with first."""
        return self.router.weight.get_value()

    def __call__(self, rows: Array | Rounded) -> Array:
        """Applies the layer to rows `[N, width]`."""
        assert not isinstance(rows, Rounded)
        spec, router = self.spec, self.router.weight.get_value()
        choice = choose_experts(rows, router, spec.experts_used, spec.norm_experts)
        gate, up, down = (weight.get_value() for weight in (self.gate, self.up, self.down))
        in_kernels = self.placement is not None and self.placement.kernels
        mix = mix_experts_by_tiles if in_kernels else mix_experts
        mixed = mix(rows, choice, gate, up, down, ACTIVATIONS[spec.activation])
        if self.shared is None or self.shared_gate is None:
            return mixed
        weight = jax.nn.sigmoid(route_rows(rows, self.shared_gate[...][None]))
        shared = weight * self.shared(rows).astype(jnp.float32)
        return (mixed.astype(jnp.float32) + shared).astype(mixed.dtype)


class Block(nnx.Module):
    """One layer: attention or a delta net, then MLP, each of the stream and added to it.

    With `pre_norms` they read it normalised; with `post_norms` what they give is normalised before
    it is added. It is scaled by `residual_scale`.
    """

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs, *, delta: bool = False):
        norm = functools.partial(
            RMSNorm,
            spec.hidden_size,
            spec.rms_eps,
            compute.param_dtype,
            compute.placement,
            spec.norm_offset,
        )
        self.attn_norm = norm() if spec.pre_norms else None
        self.attn = None if delta else Attention(spec, compute, rngs)
        self.delta = DeltaNet(spec, compute, rngs) if delta else None
        self.mlp_norm = norm() if spec.pre_norms else None
        self.mlp = (Experts if spec.experts else MLP)(spec, compute, rngs)
        self.attn_post_norm = norm() if spec.post_norms else None
        self.mlp_post_norm = norm() if spec.post_norms else None
        self.residual_scale = spec.residual_scale

    def __call__(self, x: Array, turn: Turn, mix: Mix, recall: Recall) -> tuple[Array, Any]:
        # Flatten to [B T, D] first: adding to a reshaped stream makes XLA copy it.
        rows = normal = x.reshape(-1, x.shape[-1])
        mixer = self.attn if self.delta is None else self.delta
        assert mixer is not None
        if self.attn_norm is not None:
            rows, normal = self.attn_norm.normalize_for(rows, mixer.entry)
        if isinstance(mixer, DeltaNet):
            mixed, kept = mixer(normal, x.shape[:-1], recall)
        else:
            mixed, kept = mixer(normal, x.shape[:-1], turn, mix)
        if self.attn_post_norm is not None:
            mixed = self.attn_post_norm(mixed)
        rows = normal = rows + _scale(mixed, self.residual_scale)
        if self.mlp_norm is not None:
            rows, normal = self.mlp_norm.normalize_for(rows, self.mlp.entry)
        widened = self.mlp(normal)
        if self.mlp_post_norm is not None:
            widened = self.mlp_post_norm(widened)
        return (rows + _scale(widened, self.residual_scale)).reshape(x.shape), kept


class NextToken(Block):
    """The block behind the layers that drafts: one of them, with attention, of two inputs.

    Of a token and the hidden state of the position before it, both normalised, beside each other
    and projected to the width. Hidden states come out as the decoder's do, for the same head.
    (llama.cpp's qwen35.cpp `graph_mtp`, vLLM's qwen3_5_mtp.py.)
    """

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        super().__init__(spec, compute, rngs)
        width, dtype = spec.hidden_size, compute.param_dtype

        def norm() -> RMSNorm:
            return RMSNorm(width, spec.rms_eps, dtype, offset=spec.norm_offset)

        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.proj = Linear(2 * width, width, False, dtype, rngs)

    def join(self, x: Float[Array, "B T D"], before: Float[Array, "B T D"]) -> Array:
        """The block's input, of embedded tokens and the hidden states before them."""
        both = jnp.concatenate([self.enorm(x), self.hnorm(before.astype(x.dtype))], axis=-1)
        return self.proj(both.reshape(-1, both.shape[-1])).reshape(x.shape)


class Kind(NamedTuple):
    """Facts in which a layer of a scan differs from others; None where all are alike."""

    local: Bool[Array, "*L"] | None  # whether it sees its window only
    rope: Int[Array, "*L"] | None  # its place in `ArchSpec.ropes`


class Decoder(nnx.Module):
    """Tokens to hidden states; the head stays apart, for losses that never hold all logits."""

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        def stack(*, delta: bool | None) -> Any:
            def block(rngs: nnx.Rngs) -> Block:
                if delta is None:
                    return NextToken(spec, compute, rngs)
                return Block(spec, compute, rngs, delta=delta)

            count = len(spec.places(delta=delta))
            return nnx.split_rngs(splits=count)(nnx.vmap(block))(rngs) if count else None

        def table() -> nnx.Param:
            shape, dtype = (spec.vocab_size, spec.hidden_size), compute.param_dtype
            draw = jax.random.normal(rngs.params(), shape, dtype)
            return nnx.Param(draw * jnp.asarray(0.02, dtype))

        self.embed = table()
        self.blocks, self.deltas = stack(delta=False), stack(delta=True)
        self.norm = RMSNorm(
            spec.hidden_size, spec.rms_eps, compute.param_dtype, offset=spec.norm_offset
        )
        self.head = None if spec.tied else table()
        self.mtp = stack(delta=None)  # a stack of one
        self.spec = spec
        self.compute = compute

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm, over `logit_scale`, in the compute dtype."""
        return self.hidden_and_layers(tokens, segment_ids, positions)[0]

    def hidden_in_parts(
        self, tokens: Array, segment_ids: Array, positions: Array, parts: int
    ) -> Float[Array, "B T D"]:
        """Hidden states; each layer takes the rows in `parts`, one after the other.

        Its weights are decoded, or gathered, once, and its activations are those of a part.
        """
        x, *about = (
            y.reshape(parts, -1, *y.shape[1:])
            for y in (self._embed_tokens(tokens), segment_ids, positions)
        )

        def layer(x: Array, block: Block, kind: Kind) -> tuple[Array, None]:
            def part(rows: tuple[Array, Array, Array]) -> Array:
                x, segment_ids, positions = rows
                mix = functools.partial(self._mix, segment_ids, kind.local)
                recall = functools.partial(self._recall, segment_ids)
                turn = self._turn(positions, self._angles(positions), kind)
                return block(x, turn, mix, recall)[0]

            return jax.lax.map(part, (x, *about)), None

        x, _ = self._run_layers(layer, x)
        return self._finish(x.reshape(*tokens.shape, -1))

    def hidden_and_layers(
        self, tokens: Array, segment_ids: Array, positions: Array, *, keep_layers: bool = False
    ) -> tuple[Array, Array | None]:
        """Hidden states; with `keep_layers` also each layer's output `[L, B, T, D]`, for parity."""
        angles = self._angles(positions)

        def layer(x: Array, block: Block, kind: Kind) -> tuple[Array, Array | None]:
            mix = functools.partial(self._mix, segment_ids, kind.local)
            recall = functools.partial(self._recall, segment_ids)
            x, _ = block(x, self._turn(positions, angles, kind), mix, recall)
            return x, (x if keep_layers else None)

        x, outputs = self._run_layers(layer, self._embed_tokens(tokens), trained=True)
        return self._finish(x), _stack_layers(outputs)

    def hidden_and_states(
        self, tokens: Array, segment_ids: Array, positions: Array, names: Sequence[str]
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """Hidden states, and by name some within, as `check_states` takes names: no others stay.

        Queries, keys and values are `[B, T, heads, width]`, normalised and rotated.
        """
        angles, x = self._angles(positions), self._embed_tokens(tokens)
        places = {name: check_states(self.spec, name) for name in names}
        parts = sorted({part for part, _ in places.values()} - {_EMBEDDED})
        kept = {part: sorted({i for p, i in places.values() if p == part}) for part in parts}

        def layer(x: Array, block: Block, kind: Kind) -> tuple[Array, dict[str, Array]]:
            def mix(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
                out, _ = self._mix(segment_ids, kind.local, q, k, v)
                return out, {"q": q, "k": k, "v": v}

            recall = functools.partial(self._recall, segment_ids)
            x, inside = block(x, self._turn(positions, angles, kind), mix, recall)
            return x, {part: x if part == _STREAM else inside[part] for part in parts}

        # A place for each that is asked for, and one that all other layers write over.
        slots = {
            part: jnp.asarray(
                [at.index(i) if i in at else len(at) for i in range(self.spec.num_layers)]
            )
            for part, at in kept.items()
        }
        heads = {"q": self.spec.num_heads, "k": self.spec.num_kv_heads, "v": self.spec.num_kv_heads}
        rooms = {
            part: jnp.zeros(
                (len(at) + 1, *tokens.shape)
                + ((x.shape[-1],) if part == _STREAM else (heads[part], self.spec.head_dim)),
                x.dtype,
            )
            for part, at in kept.items()
        }
        (last, rooms), _ = self._run_layers(layer, (x, rooms), trained=True, slots=slots)
        states = {
            name: x if part == _EMBEDDED else rooms[part][kept[part].index(i)]
            for name, (part, i) in places.items()
        }
        return self._finish(last), states

    def _run_layers(
        self,
        layer: Callable,
        carry: Any,
        *more: Array,
        layers: "Layers | None" = None,
        trained: bool = False,
        slots: dict[str, Array] | None = None,
    ) -> tuple[Any, Any]:
        """`layer(carry, block, kind, *more)` for each layer; returns the last carry and outputs.

        A scan over the stacked layers, or, given `layers` from `models.decode_weights`, one after
        the other. Where it may be `trained`, `compute` says what is kept for the backward pass, and
        whether there is a loop. Of layers of two kinds a step of the scan runs a period of them,
        and the outputs are those of each place in it.
        With `slots` the carry has rooms `[places, ...]` beside it, where each layer's outputs are
        written at its slot, `[L]`, outside of what is computed again for the backward pass.
        """
        stacks = {False: self.blocks, True: self.deltas}
        parts = {delta: nnx.split(x) for delta, x in stacks.items() if x is not None}
        period, inputs = self.spec.period(), (self._kinds(), *more)
        if slots is not None:
            inputs = *inputs, slots
        if layers is None:
            # Of a period's experts one layer at a time is to be decoded: 1.6 GB each of a 35B-A3B.
            in_turn = len(period) > 1 and self.spec.experts > 0
            sliced = {
                delta: slice_layers(stacked, by_index=in_turn)
                for delta, (_, stacked) in parts.items()
            }
            loop = self.compute.scan or not trained

            alone = len(period) == 1

            def runner(delta: bool, index: int) -> Callable:
                def run(carry: Any, xs: Any) -> tuple[Any, Any]:
                    weights, *rest = xs
                    if not alone:
                        # Here, or each layer's would be kept for the backward pass, as copies.
                        weights = _take_layer(weights, index)
                        weights = _wait_for(carry, weights) if in_turn else weights
                    weights = sliced[delta][1](weights)
                    return layer(carry, nnx.merge(parts[delta][0], weights), *rest)

                if trained and (policy := REMAT_POLICIES[self.compute.remat]) is not None:
                    # A loop by itself keeps XLA from merging the recomputation away.
                    run = jax.checkpoint(run, policy=policy, prevent_cse=not loop)
                return run if slots is None else _writing_rooms(run)

            slices = {delta: slices for delta, (slices, _) in sliced.items()}
            if alone:
                xs = slices[period[0]], *inputs
                run = runner(period[0], 0)
                carry, output = jax.lax.scan(run, carry, xs, unroll=not loop)
                return carry, [output]
            runs = [
                runner(delta, period[:place].count(delta)) for place, delta in enumerate(period)
            ]

            def step(carry: Any, xs: Any) -> tuple[Any, Any]:
                slices, inputs = xs
                outputs = []
                for place, delta in enumerate(period):
                    xs = slices[delta], *_take_layer(inputs, place)
                    carry, output = runs[place](carry, xs)
                    outputs.append(output)
                return carry, outputs

            times = self.spec.num_layers // len(period)
            xs = jax.tree.map(lambda x: x.reshape(times, -1, *x.shape[1:]), (slices, inputs))
            return jax.lax.scan(step, carry, xs, unroll=not loop)
        outputs = []
        for index, (weights, kind) in enumerate(zip(layers, self.spec.layers, strict=True)):
            block = nnx.merge(parts[kind.delta][0], weights)
            carry, output = layer(carry, block, *_take_layer(inputs, index))
            outputs.append(output)
        places = (outputs[place :: len(period)] for place in range(len(period)))
        return carry, [jax.tree.map(lambda *x: jnp.stack(x), *place) for place in places]

    def _embed_tokens(self, tokens: Array) -> Array:
        x = decode_weight(self.embed.get_value()[tokens]).astype(self.compute.dtype)
        if self.spec.embedding_scale == 1:
            return x
        # Rounded to bf16 where x is: the root of 3072 is 55.5, as Gemma's was in training.
        return x * jnp.asarray(self.spec.embedding_scale, x.dtype)

    def _finish(self, x: Array, norm: RMSNorm | None = None) -> Array:
        """Normalizes what the last layer gives, and divides by what logits are divided by.

        So no head, loss or cache knows of it. MiniCPM's own code divides here as well; Granite's
        divides logits, in published models by 8 or 16, which gives equal bits. The block that
        drafts has a `norm` of its own.
        """
        norm = self.norm if norm is None else norm
        return _scale(norm(x), 1 / self.spec.logit_scale)

    def _kinds(self) -> Kind:
        """The kinds of all layers, `[L]`: layers of several kinds are one stack, and a scan."""
        windows, ropes = self.spec.windows(), self.spec.ropes()
        which = [0 if layer.delta else ropes.index(layer.rope) for layer in self.spec.layers]
        return Kind(
            jnp.asarray(windows, bool) if len(set(windows)) > 1 else None,
            jnp.asarray(which, jnp.int32) if len(ropes) > 1 else None,
        )

    def _angles(
        self, positions: Int[Array, "B T"], long: bool | None = None
    ) -> tuple[Array, Array]:
        """cos and sin `[B, T, 1, columns / 2]`; with several ropes stacked, one behind another.

        Where longrope tells texts apart, `long` says which they are; None: by a row's last
        position, as in Transformers by that of all rows.
        """
        ropes, pairs = self.spec.ropes() or (None,), []
        for rope in ropes:
            inverse, factor = rope_frequencies(rope, self.spec.head_dim, long=bool(long))
            inverse = inverse[None, None, None]
            original = rope.original_positions if rope is not None else 0
            if long is None and original and positions.shape[1] > original:
                others, _ = rope_frequencies(rope, self.spec.head_dim, long=True)
                beyond = jnp.max(positions, axis=1)[:, None, None, None] >= original
                inverse = jnp.where(beyond, others, inverse)
            angle = positions.astype(jnp.float32)[..., None, None] * inverse
            pairs.append((jnp.cos(angle) * factor, jnp.sin(angle) * factor))
        return jax.tree.map(lambda *x: jnp.stack(x), *pairs) if len(ropes) > 1 else pairs[0]

    def _turn(self, positions: Array, angles: tuple[Array, Array], kind: Kind) -> Turn:
        """Says how a layer rotates its queries and keys, and how far it scales its queries."""
        rope, growth = kind.rope, self._growth(positions)

        def turn(x: Array, angles: tuple[Array, Array], rope: Array | None) -> Array:
            return rotate(x, *(part if rope is None else part[rope] for part in angles))

        if rope is not None:
            # The backward pass picks the angles again: 8 bytes a position and head column, each
            # layer.
            turn = jax.checkpoint(turn, prevent_cse=not self.compute.scan)

        def turn_both(q: Array, k: Array) -> tuple[Array, Array]:
            q, k = (turn(x, angles, rope) for x in (q, k))
            return (q if growth is None else q * growth.astype(q.dtype)), k

        return turn_both

    def _growth(self, positions: Int[Array, "B T"]) -> Float[Array, "B T 1 1"] | None:
        """Factor of the queries at positions; None where there is none (Ministral 3)."""
        spec = self.spec
        if not spec.query_growth:
            return None
        times = jnp.floor(positions.astype(jnp.float32) / spec.growth_length)
        return (1 + spec.query_growth * jnp.log1p(times))[..., None, None]

    def _mix(
        self,
        segment_ids: Array,
        local: Array | None,
        q: Array,
        k: Array,
        v: Array,
        *,
        prompt: bool = False,
    ) -> tuple[Array, Any]:
        """Attention within segments; of a `prompt` a row, which sees nothing of what pads it."""
        short = prompt and q.shape[1] <= _SHORT
        run = functools.partial(
            attend,
            implementation="xla" if short else self._attention(q.dtype),
            max_segments=1 if prompt else self.compute.max_segments,
            scale=self.spec.score_scale,
            window=self.spec.window,
        )
        placement = self.compute.placement
        if placement is not None and self._splits_heads(placement):
            run = placement.map_heads(run, split=3)
        flag = () if local is None else (local,)
        return run(q, k, v, segment_ids, *flag), (k, v)

    def _recall(self, segment_ids: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
        """Reads the states of a delta net within segments; returns also the last ones."""
        groups, width = self.spec.delta_key_heads, self.spec.delta_key_dim
        return read_states(inputs, groups, width, segment_ids, in_kernels=self._in_kernels)

    def _recall_and_keep(
        self, segment_ids: Array, lengths: Array, inputs: DeltaInputs, *behind: Any
    ) -> tuple[Array, Any]:
        """Reads the states of a delta net for a row that goes on; `behind` as of `Cache`."""
        groups, width = self.spec.delta_key_heads, self.spec.delta_key_dim
        before, state = behind or (None, None)
        columns = inputs, groups, width, segment_ids, lengths
        return read_and_keep(*columns, before, state, in_kernels=self._in_kernels)

    @property
    def _in_kernels(self) -> bool:
        placement = self.compute.placement
        return placement is not None and placement.kernels

    def _splits_heads(self, placement: Placement) -> bool:
        """Whether each device of `tensor` has whole heads of queries, keys and values."""
        return self.spec.num_kv_heads % placement.mesh.shape["tensor"] == 0

    def _attention(self, dtype: DTypeLike) -> str:
        """ "cudnn" for half precision placed on a GPU, else "xla"."""
        placement = self.compute.placement
        half = dtype in (jnp.bfloat16, jnp.float16) and self.spec.head_dim % 8 == 0
        able = placement and placement.platform == "gpu" and self._splits_heads(placement)
        return "cudnn" if half and able else "xla"

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        capacity: int,
        layers: "Layers | None" = None,
    ) -> tuple[Float[Array, "B D"], "Cache"]:
        """Reads prompts, padded behind; hidden states of their last ids, and a cache of `capacity`.

        `capacity` counts positions, prompt and what is to come, and is at least T. `layers` as of
        `extend`.
        """
        x, cache = self._read_prompts(tokens, lengths, capacity, layers)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return self._finish(last)[:, 0], cache

    def prefill_whole(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        capacity: int,
        layers: "Layers | None" = None,
    ) -> tuple[Float[Array, "B T D"], "Cache"]:
        """Reads prompts as `prefill` does; hidden states of all ids."""
        x, cache = self._read_prompts(tokens, lengths, capacity, layers)
        return self._finish(x), cache

    def _read_prompts(
        self, tokens: Array, lengths: Array, capacity: int, layers: "Layers | None"
    ) -> tuple[Array, "Cache"]:
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(at, tokens.shape)
        angles = self._angles(positions, self.compute.long)
        real = (at < lengths[:, None]).astype(jnp.int32)

        recall = functools.partial(self._recall_and_keep, jnp.ones_like(tokens), lengths)

        def layer(x: Array, block: Block, kind: Kind) -> tuple[Array, Any]:
            mix = functools.partial(self._mix, real, kind.local, prompt=True)
            return block(x, self._turn(positions, angles, kind), mix, recall)

        x, outputs = self._run_layers(layer, self._embed_tokens(tokens), layers=layers)
        period, kept = self.spec.period(), []
        for delta in (False, True):
            places = [output for output, kind in zip(outputs, period, strict=True) if kind == delta]
            kept += _stack_layers(places) if places else (None, None)
        kept[:2] = (x if x is None else _lay_out(x, capacity) for x in kept[:2])
        return x, Cache(*kept)

    def draft_hidden(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states of the block that drafts, at each token of texts that the layers read.

        The layers get no gradient. A document's first token has zeros before it, as in llama.cpp.
        """
        before = shift_states(
            jax.lax.stop_gradient(self.hidden(tokens, segment_ids, positions)), segment_ids
        )
        mix = functools.partial(self._mix, segment_ids, None)
        return self._run_block(tokens, before, positions, mix)[0]

    def draft_runs(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        drafts: int,
    ) -> Float[Array, "B N T D"]:
        """Hidden states of the layers, then of the block as it drafts at each token.

        First at that token as the first that it reads behind the layers' states, then as the second
        in a run, behind its own state, and so on to that number of `drafts`.
        """
        found, keys, values = [self.hidden(tokens, segment_ids, positions)], [], []

        def mix(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            keys.append(k)
            values.append(v)
            return attend_runs(q, keys, values, segment_ids, scale=self.spec.score_scale), None

        for _ in range(drafts):
            before = shift_states(found[-1], segment_ids)
            found.append(self._run_block(tokens, before, positions, mix)[0])
        return jnp.stack(found, axis=1)

    def draft_prefill(
        self,
        tokens: Int[Array, "B T"],
        before: Float[Array, "B T D"],
        lengths: Int[Array, " B"],
        capacity: int,
        block: Params | None = None,
    ) -> "Cache":
        """Keys and values of prompts in the block that drafts; `before` are the states before each.

        `block` are its weights as `models.decode_weights` lays them out.
        """
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        real = (at < lengths[:, None]).astype(jnp.int32)
        mix = functools.partial(self._mix, real, None, prompt=True)
        positions = jnp.broadcast_to(at, tokens.shape)
        _, kept = self._run_block(tokens, before, positions, mix, block)
        return Cache(*(_lay_out(x[None], capacity) for x in kept))

    def draft_extend(
        self,
        tokens: Int[Array, "B T"],
        before: Float[Array, "B T D"],
        positions: Int[Array, " B"],
        cache: "Cache",
        block: Params | None = None,
    ) -> tuple[Float[Array, "B T D"], "Cache"]:
        """T more ids a row for the block that drafts, as `extend` for the layers."""
        at = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

        def mix(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            return attend_and_keep(
                q,
                k,
                v,
                (cache.k, cache.v),
                jnp.int32(0),
                positions,
                None,
                scale=self.spec.score_scale,
                window=0,
                kernel=self._has_kernel(q.dtype),
            )

        hidden, kept = self._run_block(tokens, before, at, mix, block)
        return hidden, Cache(*kept)

    def _run_block(
        self, tokens: Array, before: Array, positions: Array, mix: Mix, block: Params | None = None
    ) -> tuple[Array, Any]:
        """Hidden states of the block that drafts, and what `mix` keeps."""
        graph, stacked = nnx.split(self.mtp)
        if block is None:
            slices, read = slice_layers(stacked)
            run = nnx.merge(graph, read(_take_layer(slices, 0)))
        else:
            run = nnx.merge(graph, block)
        turn = self._turn(positions, self._angles(positions, self.compute.long), Kind(None, None))

        def recall(_: DeltaInputs) -> tuple[Array, Any]:
            raise TypeError("the block that drafts attends")

        x, kept = run(run.join(self._embed_tokens(tokens), before), turn, mix, recall)
        return self._finish(x, run.norm), kept

    def extend(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " B"],
        cache: "Cache",
        layers: "Layers | None" = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], "Cache"]:
        """T more ids a row, the first at its position; hidden states, and the cache with them.

        What lies in the cache from that position on is written over. Ids beyond its capacity leave
        nothing there. `layers` are the weights as `models.decode_weights` lays them out.
        `segment_ids` are those of delta nets, by default of one document that goes on.
        """
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        at = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        angles = self._angles(at, self.compute.long)

        def layer(
            carry: tuple[Array, Cache], block: Block, kind: Kind, index: Array
        ) -> tuple[tuple[Array, Cache], DeltaInputs | None]:
            x, cache = carry
            read: DeltaInputs | None = None

            def mix(q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
                # In the carry, so that a step writes its positions and copies nothing.
                out, kept = attend_and_keep(
                    q,
                    k,
                    v,
                    (cache.k, cache.v),
                    index,
                    positions,
                    kind.local,
                    scale=self.spec.score_scale,
                    window=self.spec.window,
                    kernel=self._has_kernel(q.dtype),
                )
                return out, cache._replace(k=kept[0], v=kept[1])

            def recall(inputs: DeltaInputs) -> tuple[Array, Cache]:
                nonlocal read
                read = inputs._replace(mixed=inputs.mixed[..., : self.spec.delta_columns])
                if cache.late is not None:
                    stack = Stacked(cache.states, index)
                    out, states, latest, late = read_late(inputs, cache.inputs, stack, cache.late)
                    return out, cache._replace(states=states, inputs=latest, late=late)
                behind = cache.inputs[index], Stacked(cache.states, index)
                out, kept = self._recall_and_keep(segment_ids, lengths, inputs, *behind)
                states, latest = kept
                return out, cache._replace(
                    states=states,
                    inputs=cache.inputs.at[index].set(latest.astype(cache.inputs.dtype)),
                )

            return block(x, self._turn(at, angles, kind), mix, recall), read

        # Of each layer its place among those of its kind.
        kinds = [layer.delta for layer in self.spec.layers]
        numbers = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
        places = jnp.asarray(numbers, jnp.int32)
        start = self._embed_tokens(tokens), cache
        (x, cache), outputs = self._run_layers(layer, start, places, layers=layers)
        read = [inputs for inputs in outputs if inputs is not None]
        return self._finish(x), cache._replace(read=_stack_layers(read) if read else None)

    def _has_kernel(self, dtype: DTypeLike) -> bool:
        """Whether a kernel attends over the cache: half precision, heads of 16, 32, 64, ..."""
        placement, width = self.compute.placement, self.spec.head_dim
        half = dtype in (jnp.bfloat16, jnp.float16) and width >= 16 and width & (width - 1) == 0
        return half and placement is not None and placement.kernels

    def head_weight(self) -> Float[Array, "V D"]:
        """The unembedding, `[V, D]`, as numbers; the embedding itself if tied."""
        return decode_weight(self.stored_head())

    def stored_head(self) -> Array | Scaled:
        """Head as it is stored: a `Scaled` one stays so, for products of its own kind."""
        weight = (self.embed if self.head is None else self.head).get_value()
        return weight if isinstance(weight, Scaled) else decode_weight(weight)

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits of every position: for evaluation and tests; training uses `losses`."""
        return unembed(hidden, self.head_weight().astype(hidden.dtype))


def _writing_rooms(run: Callable) -> Callable:
    """`run`, a layer, which writes what it gives into the rooms of the carry: see `_run_layers`."""

    def write(carry: Any, xs: Any) -> tuple[Any, None]:
        (carry, rooms), (*xs, slots) = carry, xs
        carry, outputs = run(carry, tuple(xs))
        place = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
        return (carry, jax.tree.map(place, rooms, outputs, slots)), None

    return write


_EMBEDDED, _STREAM = "embed", "x"
# What `hidden_and_states` gives by name.
STATES = "embed, blocks/N, blocks/N/attn/q, blocks/N/attn/k, blocks/N/attn/v"


def check_states(spec: ArchSpec, name: str) -> tuple[str, int]:
    """Reads the name of a state: the part of a layer, and the layer's number.

    Raises `UserError` for one that the architecture does not have.
    """
    if name == _EMBEDDED:
        return _EMBEDDED, 0
    found = re.fullmatch(r"blocks/(\d+)(?:/attn/([qkv]))?", name)
    if not found or int(found[1]) >= spec.num_layers:
        raise UserError(
            f"found a layer {name!r}; expected one of {STATES}, N from 0 to {spec.num_layers - 1}."
        )
    if found[2] and any(layer.delta for layer in spec.layers):
        raise UserError(
            f"found {name!r} of a {spec.family} model; expected blocks/N: some of its layers have "
            "no attention."
        )
    return found[2] or _STREAM, int(found[1])


def shift_states(
    hidden: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """The state of the position before each, zeros before a document's first."""
    same = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(same[..., None], jnp.roll(hidden, 1, axis=1), 0)


def _lay_out(x: Float[Array, "L B T K E"], capacity: int) -> Float[Array, "L B K S E"]:
    """Keys or values of prompts as a cache has them, with room for so many positions."""
    room = ((0, 0), (0, 0), (0, 0), (0, capacity - x.shape[2]), (0, 0))
    return jnp.pad(x.swapaxes(2, 3), room)


def _take_layer(tree: Any, index: int) -> Any:
    return jax.tree.map(operator.itemgetter(index), tree)


def _wait_for(carry: Any, slices: Any) -> Any:
    """The slices, whose numbers of layers are known only once the carry is.

    XLA decodes blocks before the layer that they belong to if it may.
    """
    first = next(x for x in jax.tree.leaves(carry) if jnp.issubdtype(x.dtype, jnp.floating))
    never = (first[(0,) * first.ndim] > jnp.inf).astype(jnp.int32)
    return jax.tree.map(lambda x: x if x.ndim else x + never, slices)


def _stack_layers(places: list[Any]) -> Any:
    """Outputs `[L, ...]` from those of each place of a period, `[periods, ...]`."""
    if len(places) == 1:
        return places[0]
    stacked = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *places)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)


Layers = tuple[Params, ...]  # weights of each layer apart, from `models.decode_weights`
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Cache(NamedTuple):
    """Keys and values of attention, states of delta nets, of what rows have read; None without.

    Keys and values are `[L, B, K, S, head_dim]`, of as many layers as have them; slot s holds
    position s. A state has no positions: it is that behind the last id that was read.
    """

    k: Any
    v: Any
    states: Any = None  # float32 [L, B, heads, key width, value width]
    inputs: Any = None  # [L, B, W - 1, columns]: the last of the convolution
    read: Any = None  # `DeltaInputs` [L, B, T, ...] of the last call, which `step_back` takes
    late: Any = None  # `Late`, what states do not hold yet, within a call of the device


def write_late(spec: ArchSpec, cache: Cache, count: int) -> Cache:
    """The cache, whose states shall be written once in so many steps, where a kernel can.

    Each step is of one id a row; behind the last of them `late` may be left out.
    """
    sizes = spec.delta_key_dim, spec.delta_value_dim
    if cache.states is None or not states_fit(*sizes, cache.inputs.dtype):
        return cache
    assert count >= spec.delta_kernel  # the last inputs are of these steps
    held = hold_news(cache.states, cache.inputs, spec.delta_key_heads, count)
    return cache._replace(late=held)


def step_back(
    spec: ArchSpec,
    before: Cache,
    after: Cache,
    read: DeltaInputs | None,
    lengths: Int[Array, " B"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Cache:
    """The cache as if no more than the first `lengths` of the ids behind `before` had been read.

    `after` is that behind all T of them, `read` what its delta nets took of them, None without.
    What attention has beyond is written over later; states are those of `before` once more, and
    what was read of a thousandth of their size is read into them again, without the weights.
    """
    if read is None:
        return after._replace(read=None)
    ids = jnp.ones(read.mixed.shape[1:3], jnp.int32) if segment_ids is None else segment_ids

    def again(inputs: DeltaInputs, latest: Array, state: Array) -> tuple[Array, Array]:
        widths = spec.delta_key_heads, spec.delta_key_dim
        return read_and_keep(inputs, *widths, ids, lengths, latest, state)[1]

    states, inputs = jax.vmap(again)(read, before.inputs, before.states)
    inputs = inputs.astype(before.inputs.dtype)
    return after._replace(states=states, inputs=inputs, read=None)


@runtime_checkable  # tests check annotations with isinstance
class ModelFunctions(Protocol):
    """Functions that a step calls of a model, student or teacher; hashable, so static under jit."""

    def hidden(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array
    ) -> Float[Array, "B T D"]:
        """Final hidden states of a batch."""
        ...

    def head(self, params: Params) -> Float[Array, "V D"]:
        """The unembedding, as numbers."""
        ...

    def stored_head(self, params: Params) -> Array | Scaled:
        """The unembedding as the loss multiplies it: numbers, or a `Scaled` weight."""
        ...


@dataclasses.dataclass(frozen=True)
class ModuleFunctions:
    """A module with `hidden(tokens, segment_ids, positions)` and `head_weight()`, as functions."""

    graph: nnx.GraphDef

    def _merge(self, params: Params) -> Any:
        return nnx.merge(self.graph, gather_shards(params))

    def hidden(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array
    ) -> Float[Array, "B T D"]:
        """See `Decoder.hidden`."""
        return self._merge(params).hidden(tokens, segment_ids, positions)

    def hidden_and_states(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array, names: Any
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """See `Decoder.hidden_and_states`; a module has it where its layers are asked for."""
        return self._merge(params).hidden_and_states(tokens, segment_ids, positions, names)

    def head(self, params: Params) -> Float[Array, "V D"]:
        """See `Decoder.head_weight`."""
        return self._merge(params).head_weight()

    def stored_head(self, params: Params) -> Array | Scaled:
        """Head as it is stored, `[V, D]`."""
        return self.head(params)


def _of_params(
    method: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[Concatenate[Any, Params, _Arguments], _Result]:
    """A method of `Decoder` as one of `DecoderFunctions`, which takes the parameters first."""

    def call(functions, params, *args, **kwargs):
        return method(functions._merge(params), *args, **kwargs)

    call.__doc__ = method.__doc__
    return call


@dataclasses.dataclass(frozen=True)
class DecoderFunctions(ModuleFunctions):
    """A `Decoder` as pure functions of its parameters; made once by `functional`."""

    spec: ArchSpec
    compute: Compute

    def _merge(self, params: Params) -> Decoder:
        """Layers gather their own shards, in turn."""
        others = {name: gather_shards(x) for name, x in params.items() if name not in STACKS}
        return nnx.merge(self.graph, params | others)

    def for_length(self, positions: int) -> "DecoderFunctions":
        """The same for generation up to so many positions: longrope turns long texts otherwise."""
        ropes = [rope for rope in self.spec.ropes() if rope is not None]
        original = max((rope.original_positions for rope in ropes), default=0)
        long = 0 < original < positions
        if long == self.compute.long:
            return self
        functions = functional(self.spec, dataclasses.replace(self.compute, long=long))[0]
        return dataclasses.replace(self, graph=functions.graph, compute=functions.compute)

    def stored_head(self, params: Params) -> Array | Scaled:
        """See `Decoder.stored_head`."""
        return self._merge(params).stored_head()

    hidden_in_parts = _of_params(Decoder.hidden_in_parts)
    prefill = _of_params(Decoder.prefill)
    prefill_whole = _of_params(Decoder.prefill_whole)
    extend = _of_params(Decoder.extend)
    draft_runs = _of_params(Decoder.draft_runs)
    draft_prefill = _of_params(Decoder.draft_prefill)
    draft_extend = _of_params(Decoder.draft_extend)


@dataclasses.dataclass(frozen=True)
class DraftFunctions(DecoderFunctions):
    """The block that drafts, with the layers before it, as a model of its own for losses.

    Its hidden states give, by the same head, the same tokens' probabilities as the layers' do.
    """

    def hidden(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array
    ) -> Float[Array, "B T D"]:
        """See `Decoder.draft_hidden`."""
        return self._merge(params).draft_hidden(tokens, segment_ids, positions)

    def hidden_in_parts(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array, parts: int
    ) -> Float[Array, "B T D"]:
        """See `Decoder.draft_hidden`; all rows at once."""
        return self.hidden(params, tokens, segment_ids, positions)


def functional(spec: ArchSpec, compute: Compute) -> tuple[DecoderFunctions, Params]:
    """Pure functions and the parameters' shapes (`ShapeDtypeStruct` leaves); allocates nothing."""
    graph, state = _trace(spec, compute)
    return DecoderFunctions(graph, spec, compute), nnx.to_pure_dict(state)


@functools.lru_cache(maxsize=64)
def _trace(spec: ArchSpec, compute: Compute) -> tuple[Any, Any]:
    """A decoder's graph and shapes; a command asks several times for the same."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(spec, compute, nnx.Rngs(0))))


def shape_block(spec: ArchSpec) -> Params:
    """Shapes of what `draw_block` draws."""
    return functional(spec, Compute())[1]["mtp"]


def draw_block(spec: ArchSpec, seed: int) -> Params:
    """Random float32 parameters of the block that drafts, a stack of one, as `initialise` draws."""

    def draw(rngs: nnx.Rngs) -> NextToken:
        return NextToken(spec, Compute(), rngs)

    block = nnx.split_rngs(splits=1)(nnx.vmap(draw))(nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(block))


def initialise(spec: ArchSpec, compute: Compute, seed: int) -> Params:
    """Random parameters: normal(0, 0.02) matrices, unit norms, zero biases."""
    model = Decoder(spec, compute, nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(model))
