"""The decoder-only transformer of `families.FAMILIES`, as a Flax NNX module.

Layers are stacked on a leading axis and scanned: 24 layers compile as one, and are 15 leaves.
Weights are stored (out, in), as in the files, so that loading and export move no element.

Letters: B rows, T positions, D hidden width, L layers, V vocabulary rows.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kdjax.device.placement import Placement
from kdjax.models import kernels
from kdjax.models.arch import ACTIVATIONS, ArchSpec, local_rope, rope_frequencies
from kdjax.models.attention import attend, attend_and_keep
from kdjax.models.experts import choose_experts, mix_experts, mix_experts_by_tiles
from kdjax.models.weights import (
    Joined,
    Rounded,
    Scaled,
    Weight,
    decode_weight,
    from_bits,
    gate_rows,
    gather_shards,
    join,
    make_ready,
    project,
    project_all,
    round_for,
    slice_layers,
    unembed,
)

Params = dict[str, Any]  # nested dict of stored weights, as `nnx.to_pure_dict` gives it

_SHORT = 192  # positions of a prompt that XLA's attention reads sooner than cuDNN's

# The rotation of queries, or of keys, by their positions.
Turn = Callable[[Array], Array]

# Attention of rotated queries and keys, and what the layer is to keep of them.
Mix = Callable[[Array, Array, Array], tuple[Array, Any]]

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
    placement: Placement | None = None  # None: plain JAX, on whatever device

    @property
    def product_dtype(self) -> Any:
        """Of weights that lie ready for products of few rows.

        XLA's CPU backend widens bf16 one number after another at each product, which takes twenty
        times as long as one row's: there they lie wide.
        """
        return jnp.dtype(jnp.float32 if self.on_cpu else self.dtype)

    @property
    def on_cpu(self) -> bool:
        """Whether it is placed on a CPU."""
        return self.placement is not None and self.placement.platform == "cpu"


class Linear(nnx.Module):
    """y = x W^T (+ b), W `[out, in]`."""

    def __init__(self, inner: int, outer: int, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), (outer, inner), dtype) * jnp.asarray(0.02, dtype)
        )
        self.bias = nnx.Param(jnp.zeros((outer,), dtype)) if bias else None

    def __call__(self, x: Array | Rounded) -> Array:
        """Of rows `[N, inner]`."""
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
            return x, Rounded(*kernels.round_rows(x, (ours, self.eps)), x.dtype)
        return kernels.normalize_rows(x, ours, self.eps)


def rotate(x: Float[Array, "B T H D"], cos: Array, sin: Array) -> Float[Array, "B T H D"]:
    """Rotary embedding of the halves (i, i + D/2); cos and sin are float32 `[B, T, 1, D/2]`.

    Angles stay float32: in bf16 position 257 is 256.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and, if asked, normalised queries and keys."""

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        d, hd, dtype = spec.hidden_size, spec.head_dim, compute.param_dtype
        self.q = Linear(d, spec.num_heads * hd, spec.qkv_bias, dtype, rngs)
        self.k = Linear(d, spec.num_kv_heads * hd, spec.qkv_bias, dtype, rngs)
        self.v = Linear(d, spec.num_kv_heads * hd, spec.qkv_bias, dtype, rngs)
        self.o = Linear(spec.num_heads * hd, d, spec.o_bias, dtype, rngs)
        norm = functools.partial(RMSNorm, hd, spec.rms_eps, dtype, offset=spec.norm_offset)
        self.q_norm = norm() if spec.qk_norm else None
        self.k_norm = norm() if spec.qk_norm else None
        self.head_dim, self.placement = hd, compute.placement

    def __call__(
        self, rows: Array | Rounded, lead: tuple[int, ...], turn: Turn, mix: Mix
    ) -> tuple[Array, Any]:
        """Of rows `[B T, width]`, `lead` being (B, T); and what `mix` keeps."""
        linears = self.q, self.k, self.v
        weights = [linear.weight.get_value() for linear in linears]
        projected = project_all(round_for(rows, weights[0]), weights, self.placement)
        q, k, v = (
            linear.add_bias(y).reshape(*lead, -1, self.head_dim)
            for linear, y in zip(linears, projected, strict=True)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, kept = mix(turn(q), turn(k), v)
        return self.o(out.reshape(-1, out.shape[2] * out.shape[3])), kept


class MLP(nnx.Module):
    """Gated: down(activation(gate(x)) * up(x)), silu in all published models."""

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        dtype = compute.param_dtype
        self.gate = Linear(spec.hidden_size, spec.mlp_size, False, dtype, rngs)
        self.up = Linear(spec.hidden_size, spec.mlp_size, False, dtype, rngs)
        self.down = Linear(spec.mlp_size, spec.hidden_size, False, dtype, rngs)
        self.activation, self.placement = spec.activation, compute.placement

    @property
    def entry(self) -> Weight:
        """What rows are multiplied with first."""
        return self.gate.weight.get_value()

    def __call__(self, rows: Array | Rounded) -> Array:
        """Of rows `[N, width]`."""
        activation = ACTIVATIONS[self.activation]
        gate, up = (linear.weight.get_value() for linear in (self.gate, self.up))
        return self.down(gate_rows(round_for(rows, gate), gate, up, activation, self.placement))


class Experts(nnx.Module):
    """MLPs of which a router picks some for each token, and adds what they give by its weights."""

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        count, width, size = spec.experts, spec.hidden_size, spec.expert_size

        def stack(outer: int, inner: int) -> nnx.Param:
            dtype = compute.param_dtype
            draw = jax.random.normal(rngs.params(), (count, outer, inner), dtype)
            return nnx.Param(draw * jnp.asarray(0.02, dtype))

        # In float32 whatever the others are: in bf16 every hundredth token goes elsewhere.
        self.router = Linear(width, count, False, jnp.float32, rngs)
        self.gate, self.up, self.down = stack(size, width), stack(size, width), stack(width, size)
        self.spec, self.placement = spec, compute.placement

    @property
    def entry(self) -> Weight:
        """What rows are multiplied with first."""
        return self.router.weight.get_value()

    def __call__(self, rows: Array | Rounded) -> Array:
        """Of rows `[N, width]`."""
        assert not isinstance(rows, Rounded)
        spec, router = self.spec, self.router.weight.get_value()
        choice = choose_experts(rows, router, spec.experts_used, spec.norm_experts)
        gate, up, down = (weight.get_value() for weight in (self.gate, self.up, self.down))
        in_kernels = self.placement is not None and self.placement.kernels
        mix = mix_experts_by_tiles if in_kernels else mix_experts
        return mix(rows, choice, gate, up, down, ACTIVATIONS[spec.activation])


class Block(nnx.Module):
    """One layer: attention, then MLP, each of the normalised stream and added to it.

    With `post_norms` what they give is normalised as well before it is added.
    """

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        norm = functools.partial(
            RMSNorm,
            spec.hidden_size,
            spec.rms_eps,
            compute.param_dtype,
            compute.placement,
            spec.norm_offset,
        )
        self.attn_norm = norm()
        self.attn = Attention(spec, compute, rngs)
        self.mlp_norm = norm()
        self.mlp = (Experts if spec.experts else MLP)(spec, compute, rngs)
        self.attn_post_norm = norm() if spec.post_norms else None
        self.mlp_post_norm = norm() if spec.post_norms else None

    def __call__(self, x: Array, turn: Turn, mix: Mix) -> tuple[Array, Any]:
        # Flatten to [B T, D] first: adding to a reshaped stream makes XLA copy it.
        rows = x.reshape(-1, x.shape[-1])
        rows, normal = self.attn_norm.normalize_for(rows, self.attn.q.weight.get_value())
        mixed, kept = self.attn(normal, x.shape[:-1], turn, mix)
        if self.attn_post_norm is not None:
            mixed = self.attn_post_norm(mixed)
        rows, normal = self.mlp_norm.normalize_for(rows + mixed, self.mlp.entry)
        widened = self.mlp(normal)
        if self.mlp_post_norm is not None:
            widened = self.mlp_post_norm(widened)
        return (rows + widened).reshape(x.shape), kept


class Decoder(nnx.Module):
    """Tokens to hidden states; the head stays apart, for losses that never hold all logits."""

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        def block(rngs: nnx.Rngs) -> Block:
            return Block(spec, compute, rngs)

        def table() -> nnx.Param:
            shape, dtype = (spec.vocab_size, spec.hidden_size), compute.param_dtype
            draw = jax.random.normal(rngs.params(), shape, dtype)
            return nnx.Param(draw * jnp.asarray(0.02, dtype))

        self.embed = table()
        self.blocks = nnx.split_rngs(splits=spec.num_layers)(nnx.vmap(block))(rngs)
        self.norm = RMSNorm(
            spec.hidden_size, spec.rms_eps, compute.param_dtype, offset=spec.norm_offset
        )
        self.head = None if spec.tied else table()
        self.spec = spec
        self.compute = compute

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm, in the compute dtype."""
        return self.hidden_and_layers(tokens, segment_ids, positions)[0]

    def hidden_in_parts(
        self, tokens: Array, segment_ids: Array, positions: Array, parts: int
    ) -> Float[Array, "B T D"]:
        """As `hidden`, each layer taking the rows in `parts`, one after the other.

        Its weights are decoded, or gathered, once, and its activations are those of a part.
        """
        x, *about = (
            y.reshape(parts, -1, *y.shape[1:])
            for y in (self._embed_tokens(tokens), segment_ids, positions)
        )

        def layer(x: Array, block: Block, local: Array | None) -> tuple[Array, None]:
            def part(rows: tuple[Array, Array, Array]) -> Array:
                x, segment_ids, positions = rows
                mix = functools.partial(self._mix, segment_ids, local)
                return block(x, self._turn(self._angles(positions), local), mix)[0]

            return jax.lax.map(part, (x, *about)), None

        x, _ = self._run_layers(layer, x)
        return self.norm(x.reshape(*tokens.shape, -1))

    def hidden_and_layers(
        self, tokens: Array, segment_ids: Array, positions: Array, *, keep_layers: bool = False
    ) -> tuple[Array, Array | None]:
        """As `hidden`; with `keep_layers` also each layer's output `[L, B, T, D]`, for parity."""
        angles = self._angles(positions)

        def layer(x: Array, block: Block, local: Array | None) -> tuple[Array, Array | None]:
            mix = functools.partial(self._mix, segment_ids, local)
            x, _ = block(x, self._turn(angles, local), mix)
            return x, (x if keep_layers else None)

        x, outputs = self._run_layers(layer, self._embed_tokens(tokens), trained=True)
        return self.norm(x), outputs

    def _run_layers(
        self,
        layer: Callable,
        carry: Any,
        *more: Array,
        layers: "Layers | None" = None,
        trained: bool = False,
    ) -> tuple[Any, Any]:
        """`layer(carry, block, local, *more)` for each layer; what it gives is as of a scan.

        In a loop; or, of `layers` as `unstack` gives them, one after the other. Where it may be
        `trained`, `compute` says what is kept for the backward pass, and whether there is a loop.
        """
        graph, stacked = nnx.split(self.blocks)
        inputs = self._local(), *more
        if layers is None:
            slices, read = slice_layers(stacked)

            def step(carry: Any, xs: Any) -> tuple[Any, Any]:
                weights, *rest = xs
                return layer(carry, nnx.merge(graph, read(weights)), *rest)

            loop = self.compute.scan or not trained
            if trained and (policy := REMAT_POLICIES[self.compute.remat]) is not None:
                # A loop by itself keeps XLA from merging the recomputation away.
                step = jax.checkpoint(step, policy=policy, prevent_cse=not loop)
            return jax.lax.scan(step, carry, (slices, *inputs), unroll=not loop)
        outputs = []
        for index, weights in enumerate(layers):
            rest = [None if x is None else x[index] for x in inputs]
            carry, output = layer(carry, nnx.merge(graph, weights), *rest)
            outputs.append(output)
        return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)

    def _embed_tokens(self, tokens: Array) -> Array:
        x = decode_weight(self.embed.get_value()[tokens]).astype(self.compute.dtype)
        if not self.spec.scaled_embedding:
            return x
        # Rounded to bf16 where x is: the root of 3072 is 55.5, as Gemma's was in training.
        return x * jnp.asarray(self.spec.hidden_size**0.5, x.dtype)

    def _local(self) -> Bool[Array, " L"] | None:
        """Of each layer whether it is local: layers of two kinds are one stack, and a scan."""
        return jnp.asarray(self.spec.local) if self.spec.local else None

    def _angles(self, positions: Int[Array, "B T"]) -> tuple[Array, Array]:
        """cos and sin `[B, T, 1, head_dim / 2]`; stacked behind each other those of layers that
        see all positions and of local ones, if some are local."""
        kinds = (self.spec, local_rope(self.spec)) if self.spec.local else (self.spec,)
        pairs = []
        for inverse, factor in map(rope_frequencies, kinds):
            inverse = jnp.asarray(inverse)[None, None, None]
            angle = positions.astype(jnp.float32)[..., None, None] * inverse
            pairs.append((jnp.cos(angle) * factor, jnp.sin(angle) * factor))
        return jax.tree.map(lambda *x: jnp.stack(x), *pairs) if self.spec.local else pairs[0]

    def _turn(self, angles: tuple[Array, Array], local: Array | None) -> Turn:
        """How a layer rotates its queries and keys."""
        if local is None:
            return lambda x: rotate(x, *angles)

        def turn(x: Array, angles: tuple[Array, Array], local: Array) -> Array:
            return rotate(x, *(both[local.astype(jnp.int32)] for both in angles))

        # The backward pass picks the angles again: 8 bytes a position and head column, each layer.
        turn = jax.checkpoint(turn, prevent_cse=not self.compute.scan)
        return lambda x: turn(x, angles, local)

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
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        angles = self._angles(jnp.broadcast_to(at, tokens.shape))
        real = (at < lengths[:, None]).astype(jnp.int32)

        def layer(x: Array, block: Block, local: Array | None) -> tuple[Array, Any]:
            mix = functools.partial(self._mix, real, local, prompt=True)
            return block(x, self._turn(angles, local), mix)

        x, kept = self._run_layers(layer, self._embed_tokens(tokens), layers=layers)
        k, v = (x.swapaxes(2, 3) for x in kept)
        room = ((0, 0), (0, 0), (0, 0), (0, capacity - tokens.shape[1]), (0, 0))
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return self.norm(last)[:, 0], Cache(jnp.pad(k, room), jnp.pad(v, room))

    def extend(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " B"],
        cache: "Cache",
        layers: "Layers | None" = None,
    ) -> tuple[Float[Array, "B T D"], "Cache"]:
        """T more ids a row, the first at its position; hidden states, and the cache with them.

        What lies in the cache from that position on is written over. Ids beyond its capacity leave
        nothing there. `layers` are the weights as `unstack` gives them.
        """
        at = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        angles = self._angles(at)

        def layer(
            carry: tuple[Array, Cache], block: Block, local: Array | None, index: Array
        ) -> tuple[tuple[Array, Cache], None]:
            x, cache = carry

            def mix(q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
                # In the carry, so that a step writes its positions and copies nothing.
                out, kept = attend_and_keep(
                    q,
                    k,
                    v,
                    cache,
                    index,
                    positions,
                    local,
                    scale=self.spec.score_scale,
                    window=self.spec.window,
                    kernel=self._has_kernel(q.dtype),
                )
                return out, Cache(*kept)

            return block(x, self._turn(angles, local), mix), None

        places = jnp.arange(self.spec.num_layers, dtype=jnp.int32)
        start = self._embed_tokens(tokens), cache
        (x, cache), _ = self._run_layers(layer, start, places, layers=layers)
        return self.norm(x), cache

    def _has_kernel(self, dtype: DTypeLike) -> bool:
        """Whether `kernels.attend_and_keep` attends: half precision, heads of 16, 32, 64, ..."""
        placement, width = self.compute.placement, self.spec.head_dim
        half = dtype in (jnp.bfloat16, jnp.float16) and width >= 16 and width & (width - 1) == 0
        return half and placement is not None and placement.kernels

    def unstack(self, *, narrow: bool = False) -> "Layers":
        """The weights of each layer as one id a row multiplies them best.

        Numbers of `product_dtype`, or, for one row on a CPU, `narrow` ones; an array a layer, those
        that multiply the same rows joined; float8 stays so.
        """
        slices, read = slice_layers(nnx.state(self.blocks), narrow=narrow)
        groups = [("attn", "qkv"), ("attn", "o"), ("mlp", ("gate", "up")), ("mlp", ("down",))]

        def one(index: int) -> Params:
            weights = nnx.to_pure_dict(read(jax.tree.map(lambda x: x[index], slices)))
            for part, names in groups:
                linears = [weights[part][name] for name in names]
                found = [linear["weight"] for linear in linears]
                if not isinstance(found[0], Scaled):
                    found = join([self._make_ready(x, narrow=narrow) for x in found])
                for linear, weight in zip(linears, found, strict=True):
                    linear["weight"] = weight
            return weights

        return tuple(map(one, range(self.spec.num_layers)))

    def _make_ready(self, weight: Any, *, narrow: bool) -> Any:
        return make_ready(weight, self.compute.product_dtype, narrow=narrow)

    def ready_head(self, *, narrow: bool) -> Array | Joined:
        """The unembedding as `unstack` makes the layers; numbers unless `narrow`."""
        weight = (self.embed if self.head is None else self.head).get_value()
        ready = self._make_ready(weight, narrow=narrow)
        return join([ready])[0] if narrow else ready

    def head_weight(self) -> Float[Array, "V D"]:
        """The unembedding, `[V, D]`, as numbers; the embedding itself if tied."""
        return decode_weight(self.stored_head())

    def stored_head(self) -> Array | Scaled:
        """As `head_weight`, but a `Scaled` one stays so, for products of its own kind."""
        weight = (self.embed if self.head is None else self.head).get_value()
        return weight if isinstance(weight, Scaled) else decode_weight(weight)

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits of every position: for evaluation and tests; training uses `losses`."""
        return unembed(hidden, self.head_weight().astype(hidden.dtype))


Layers = tuple[Params, ...]  # one a layer
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Cache(NamedTuple):
    """Keys and values of every layer, `[L, B, K, S, head_dim]`; slot s holds position s."""

    k: Array
    v: Array


@runtime_checkable  # tests check annotations with isinstance
class ModelFunctions(Protocol):
    """What the step asks of a model, student or teacher; hashable, so that it can be static."""

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

    def head(self, params: Params) -> Float[Array, "V D"]:
        """See `Decoder.head_weight`."""
        return self._merge(params).head_weight()

    def stored_head(self, params: Params) -> Array | Scaled:
        """As `head`."""
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
        others = {name: gather_shards(x) for name, x in params.items() if name != "blocks"}
        return nnx.merge(self.graph, params | others)

    def stored_head(self, params: Params) -> Array | Scaled:
        """See `Decoder.stored_head`."""
        return self._merge(params).stored_head()

    hidden_in_parts = _of_params(Decoder.hidden_in_parts)
    prefill = _of_params(Decoder.prefill)
    extend = _of_params(Decoder.extend)
    unstack = _of_params(Decoder.unstack)
    ready_head = _of_params(Decoder.ready_head)


def functional(spec: ArchSpec, compute: Compute) -> tuple[DecoderFunctions, Params]:
    """Pure functions and the parameters' shapes (`ShapeDtypeStruct` leaves); allocates nothing."""
    abstract = nnx.eval_shape(lambda: Decoder(spec, compute, nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    return DecoderFunctions(graph, spec, compute), nnx.to_pure_dict(state)


def initialise(spec: ArchSpec, compute: Compute, seed: int) -> Params:
    """Random parameters: normal(0, 0.02) matrices, unit norms, zero biases."""
    model = Decoder(spec, compute, nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(model))
