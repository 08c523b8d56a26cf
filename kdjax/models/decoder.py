"""The decoder-only transformer of `families.FAMILIES`, as a Flax NNX module.

Layers are stacked on a leading axis and scanned: 24 layers compile as one, and are 15 leaves.
`Decoder.run_layers` chooses how. Weights are stored (out, in), as in the files, so that loading and
export move no element.

Letters: B rows, T positions, D hidden width, L layers, V vocabulary rows.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kdjax.device.placement import Placement
from kdjax.models.arch import ACTIVATIONS, STACKS, ArchSpec
from kdjax.models.attention import attend, attend_and_keep
from kdjax.models.delta import (
    DeltaInputs,
    Stacked,
    hold_news,
    read_and_keep,
    read_late,
    read_states,
)
from kdjax.models.experts import choose_experts, mix_experts, mix_experts_by_tiles, route_rows
from kdjax.models.kernels.delta_rule import states_fit
from kdjax.models.ropes import rope_frequencies
from kdjax.models.shards import gather_shards
from kdjax.models.weights import (
    Float8Rows,
    Scaled,
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

_SHORT = 192  # up to this many positions XLA's attention reads a prompt faster than cuDNN's

# The rotation of queries and keys by their positions.
Turn = Callable[[Array, Array], tuple[Array, Array]]

# Attention of rotated queries, keys and values; returns also what the layer passes on.
# For instance keys and values for a cache.
Mix = Callable[[Array, Array, Array], tuple[Array, Any]]

# A delta net's outputs from its inputs; returns also what the layer passes on.
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
    # Layers in a loop are compiled once. In an unrolled loop, stored activations are not copied.
    scan: bool = True
    max_segments: int = 1
    # Whether generation goes beyond longrope's original positions; other passes read it off their
    # positions.
    long: bool = False
    placement: Placement | None = None  # None: plain JAX, on whatever device


class Linear(nnx.Module):
    """y = x W^T (+ b), W `[out, in]`."""

    def __init__(self, inner: int, outer: int, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), (outer, inner), dtype) * jnp.asarray(0.02, dtype)
        )
        self.bias = nnx.Param(jnp.zeros((outer,), dtype)) if bias else None

    def __call__(self, x: Array | Float8Rows) -> Array:
        """Multiplies rows `[N, inner]`."""
        return self.add_bias(project(x, self.weight.get_value()))

    def add_bias(self, y: Array) -> Array:
        """A product with the weight, `[N, outer]`, with the bias if there is one."""
        return y if self.bias is None else y + from_bits(self.bias[...]).astype(y.dtype)[None]


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis; the statistics are float32 whatever x is.

    With an `offset` the factor is 1 + weight, and x is rounded only after it, as in Gemma.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        dtype: DTypeLike,
        offset: bool = False,
    ):
        self.weight = nnx.Param((jnp.zeros if offset else jnp.ones)((width,), dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        factor = self._factor(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        return ((x32 * scale).astype(factor.dtype) * factor).astype(x.dtype)

    def _factor(self, dtype: DTypeLike) -> Array:
        weight = from_bits(self.weight[...])
        return 1 + weight.astype(jnp.float32) if self.offset else weight.astype(dtype)


def rotate(x: Float[Array, "B T H D"], cos: Array, sin: Array) -> Float[Array, "B T H D"]:
    """Rotary embedding of the pairs (i, i + R/2) of the first R columns; other columns stay.

    cos and sin are float32 `[B, T, 1, R/2]`. Angles stay float32: in bf16 position 257 is 256.
    """
    columns = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :columns].astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.concatenate(turned, axis=-1).astype(x.dtype)
    whole = columns == x.shape[-1]
    return rotated if whole else jnp.concatenate([rotated, x[..., columns:]], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, on normalised queries and keys if `qk_norm`.

    If `ArchSpec.gated`, q has for each head the rows of its query, then the rows of its gate.
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

    def __call__(
        self, rows: Array, lead: tuple[int, ...], turn: Turn, mix: Mix
    ) -> tuple[Array, Any]:
        """Attends for rows `[B T, width]`, `lead` being (B, T); returns also what `mix` passes."""
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
    """Normalizes each head, or all heads of a position together if the norm is that wide."""
    if norm is None:
        return x
    return norm(x.reshape(*x.shape[:2], -1, norm.weight.shape[0])).reshape(x.shape)


class DeltaNet(nnx.Module):
    """A gated delta net (`models.delta`): a convolution, a state a head, a gated norm.

    Value heads lie in the order of GGUF files: head h reads key head h mod the number of key heads.
    The parameters of decay (`log_rate`, `shift`) and the convolution are float32 in every form.
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

    def __call__(self, rows: Array, lead: tuple[int, ...], recall: Recall) -> Any:
        """Mixes rows `[B T, width]`, `lead` being (B, T); returns also what `recall` passes on."""
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
    """Gated MLP: down(activation(gate(x)) * up(x)); silu in all published models."""

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        # In a layer of experts it is the shared expert.
        size, dtype = spec.shared_size or spec.mlp_size, compute.param_dtype
        self.gate = Linear(spec.hidden_size, size, False, dtype, rngs)
        self.up = Linear(spec.hidden_size, size, False, dtype, rngs)
        self.down = Linear(size, spec.hidden_size, False, dtype, rngs)
        self.activation, self.placement = spec.activation, compute.placement

    def __call__(self, rows: Array) -> Array:
        """Applies the layer to rows `[N, width]`."""
        activation = ACTIVATIONS[self.activation]
        gate, up = (linear.weight.get_value() for linear in (self.gate, self.up))
        return self.down(gate_rows(round_for(rows, gate), gate, up, activation, self.placement))


class Experts(nnx.Module):
    """Mixture of experts: a router picks some MLPs for each token and weighs their sum.

    A shared expert, where the model has one, sees all tokens, times the sigmoid of its gate.
    """

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs):
        count, width, size = spec.experts, spec.hidden_size, spec.expert_size

        def stack(outer: int, inner: int) -> nnx.Param:
            dtype = compute.param_dtype
            draw = jax.random.normal(rngs.params(), (count, outer, inner), dtype)
            return nnx.Param(draw * jnp.asarray(0.02, dtype))

        # float32 in every form: in bf16 every hundredth token goes to other experts.
        self.router = Linear(width, count, False, jnp.float32, rngs)
        self.gate, self.up, self.down = stack(size, width), stack(size, width), stack(width, size)

        def gate() -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), (width,), jnp.float32) * 0.02)

        self.shared = MLP(spec, compute, rngs) if spec.shared_size else None
        self.shared_gate = gate() if spec.shared_size else None  # float32, as the router is
        self.spec, self.placement = spec, compute.placement

    def __call__(self, rows: Array) -> Array:
        """Applies the layer to rows `[N, width]`."""
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
    """One layer: attention or a delta net, then an MLP; each reads the stream and is added to it.

    With `pre_norms` their input is normalised, with `post_norms` their output, before it is added.
    The output is scaled by `residual_scale`.
    """

    def __init__(self, spec: ArchSpec, compute: Compute, rngs: nnx.Rngs, *, delta: bool = False):
        norm = functools.partial(
            RMSNorm,
            spec.hidden_size,
            spec.rms_eps,
            compute.param_dtype,
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
            normal = self.attn_norm(rows)
        if isinstance(mixer, DeltaNet):
            mixed, kept = mixer(normal, x.shape[:-1], recall)
        else:
            mixed, kept = mixer(normal, x.shape[:-1], turn, mix)
        if self.attn_post_norm is not None:
            mixed = self.attn_post_norm(mixed)
        rows = normal = rows + _scale(mixed, self.residual_scale)
        if self.mlp_norm is not None:
            normal = self.mlp_norm(rows)
        widened = self.mlp(normal)
        if self.mlp_post_norm is not None:
            widened = self.mlp_post_norm(widened)
        return (rows + _scale(widened, self.residual_scale)).reshape(x.shape), kept


class NextToken(Block):
    """The next-token block (MTP), which drafts: a layer with attention after the model's layers.

    It reads an embedded token and the hidden state of the position before, both normalised,
    concatenated and projected to the width. Its hidden states go into the model's own head.
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
        """The block's input, from embedded tokens and the hidden states of the positions before."""
        both = jnp.concatenate([self.enorm(x), self.hnorm(before.astype(x.dtype))], axis=-1)
        return self.proj(both.reshape(-1, both.shape[-1])).reshape(x.shape)


class Kind(NamedTuple):
    """Facts in which layers of a scan differ; None for a fact that all layers share."""

    local: Bool[Array, "*L"] | None  # whether it sees only its window
    rope: Int[Array, "*L"] | None  # its rotation's index in `ArchSpec.ropes`


class Decoder(nnx.Module):
    """Tokens to hidden states. The head is separate, for losses that never hold all logits."""

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
        """Hidden states after the final norm, divided by `logit_scale`, in the compute dtype."""
        return self.hidden_and_layers(tokens, segment_ids, positions)[0]

    def hidden_in_parts(
        self, tokens: Array, segment_ids: Array, positions: Array, parts: int
    ) -> Float[Array, "B T D"]:
        """Hidden states; each layer computes the rows in `parts`, one part after the other.

        A layer's weights are decoded, or gathered, once; its activations are of one part's size.
        """
        x, *columns = (
            y.reshape(parts, -1, *y.shape[1:])
            for y in (self.embed_tokens(tokens), segment_ids, positions)
        )

        def layer(x: Array, block: Block, kind: Kind) -> tuple[Array, None]:
            def part(rows: tuple[Array, Array, Array]) -> Array:
                x, segment_ids, positions = rows
                mix = functools.partial(self.mix_segments, segment_ids, kind.local)
                recall = functools.partial(self.recall_segments, segment_ids)
                turn = self.make_turn(positions, self.choose_angles(segment_ids, positions), kind)
                return block(x, turn, mix, recall)[0]

            return jax.lax.map(part, (x, *columns)), None

        x, _ = self.run_layers(layer, x)
        return self.finish(x.reshape(*tokens.shape, -1))

    def hidden_and_layers(
        self, tokens: Array, segment_ids: Array, positions: Array, *, keep_layers: bool = False
    ) -> tuple[Array, Array | None]:
        """Hidden states; with `keep_layers` also each layer's output `[L, B, T, D]`, for parity."""
        x = self.embed_tokens(tokens)
        x, outputs = self.read_segments(x, segment_ids, positions, keep_layers=keep_layers)
        return self.finish(x), _stack_layers(outputs)

    def read_segments(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Array,
        positions: Array,
        *,
        keep_layers: bool = False,
    ) -> tuple[Array, list[Any]]:
        """The last layer's output, before the final norm, and the outputs of `run_layers`."""
        angles = self.choose_angles(segment_ids, positions)

        def layer(x: Array, block: Block, kind: Kind) -> tuple[Array, Array | None]:
            mix = functools.partial(self.mix_segments, segment_ids, kind.local)
            recall = functools.partial(self.recall_segments, segment_ids)
            x, _ = block(x, self.make_turn(positions, angles, kind), mix, recall)
            return x, (x if keep_layers else None)

        return self.run_layers(layer, x, trained=True)

    def run_layers(
        self,
        layer: Callable,
        carry: Any,
        *more: Any,
        layers: "Layers | None" = None,
        trained: bool = False,
        around: Callable[[Callable], Callable] | None = None,
    ) -> tuple[Any, list[Any]]:
        """Applies `layer(carry, block, kind, *more)` to each layer in turn.

        Returns the last carry, and the outputs `[periods, ...]` of each place of `spec.period()`.
        `more` are arrays `[L, ...]`, of which each layer gets its slice.

        How layers run is chosen here alone. Given `layers` of `models.decode_weights`, one runs
        after the other. Otherwise a scan goes over the stacks: a step is a layer, or a period where
        layers are of two kinds. Where layers may be `trained`, `compute.scan` says whether the scan
        is unrolled, and `compute.remat` what is stored for the backward pass. `around` wraps
        a layer's run(carry, (weights, kind, *more)) outside of what that pass computes again.
        """
        period, inputs = self.spec.period(), (self._kinds(), *more)
        if layers is not None:
            return self._run_apart(layer, carry, inputs, layers)
        # Experts of a period are decoded one layer at a time: 1.6 GB each of a 35B-A3B.
        in_turn = len(period) > 1 and self.spec.experts > 0
        unroll = trained and not self.compute.scan
        policy = REMAT_POLICIES[self.compute.remat] if trained else None
        stacks = self._cut_stacks(by_index=in_turn)
        runs = []
        for place, delta in enumerate(period):
            index = period[:place].count(delta) if len(period) > 1 else None
            run = functools.partial(_run_layer, layer, stacks[delta], index=index, wait=in_turn)
            if policy is not None:
                # A loop by itself keeps XLA from merging the recomputation away.
                run = jax.checkpoint(run, policy=policy, prevent_cse=unroll)
            runs.append(run if around is None else around(run))
        slices = {delta: stack.slices for delta, stack in stacks.items()}
        if len(period) == 1:
            xs = slices[period[0]], *inputs
            carry, output = jax.lax.scan(runs[0], carry, xs, unroll=unroll)
            return carry, [output]
        times, xs = self.spec.num_layers // len(period), (slices, inputs)
        return _scan_periods(runs, period, carry, xs, times=times, unroll=unroll)

    def _run_apart(
        self, layer: Callable, carry: Any, inputs: tuple[Any, ...], layers: "Layers"
    ) -> tuple[Any, list[Any]]:
        """Runs layers whose weights are not stacked, one after the other."""
        stacks = {False: self.blocks, True: self.deltas}
        graphs = {delta: nnx.split(x)[0] for delta, x in stacks.items() if x is not None}
        outputs = []
        for index, (weights, kind) in enumerate(zip(layers, self.spec.layers, strict=True)):
            block = nnx.merge(graphs[kind.delta], weights)
            carry, output = layer(carry, block, *take_layer(inputs, index))
            outputs.append(output)
        period = len(self.spec.period())
        places = (outputs[place::period] for place in range(period))
        return carry, [jax.tree.map(lambda *x: jnp.stack(x), *place) for place in places]

    def _cut_stacks(self, *, by_index: bool) -> "dict[bool, _Stack]":
        """The stacks of layers by kind, true for delta nets; `by_index` as of `slice_layers`."""
        stacks = {}
        for delta, layers in ((False, self.blocks), (True, self.deltas)):
            if layers is not None:
                graph, stacked = nnx.split(layers)
                stacks[delta] = _Stack(graph, *slice_layers(stacked, by_index=by_index))
        return stacks

    def embed_tokens(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The first layer's input, in the compute dtype."""
        x = decode_weight(self.embed.get_value()[tokens]).astype(self.compute.dtype)
        if self.spec.embedding_scale == 1:
            return x
        # The scale is rounded as x is: in bf16 the root of 3072 is 55.5, as in Gemma's training.
        return x * jnp.asarray(self.spec.embedding_scale, x.dtype)

    def finish(self, x: Array, norm: RMSNorm | None = None) -> Array:
        """Normalizes the last layer's output and divides it by `logit_scale`.

        Thus no head, loss or cache knows of that scale. MiniCPM's code divides here as well;
        Granite's divides logits, in published models by 8 or 16, which yields equal bits. The
        next-token block passes its `norm`.
        """
        norm = self.norm if norm is None else norm
        return _scale(norm(x), 1 / self.spec.logit_scale)

    def _kinds(self) -> Kind:
        """The kinds of all layers, `[L]`."""
        windows, ropes = self.spec.windows(), self.spec.ropes()
        which = [0 if layer.delta else ropes.index(layer.rope) for layer in self.spec.layers]
        return Kind(
            jnp.asarray(windows, bool) if len(set(windows)) > 1 else None,
            jnp.asarray(which, jnp.int32) if len(ropes) > 1 else None,
        )

    def choose_angles(
        self, segment_ids: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> tuple[Array, Array]:
        """Angles as `compute_angles` does, with longrope's factors for each document's length.

        A document's last position decides, as in Transformers for the document by itself.
        """
        ropes = [rope for rope in self.spec.ropes() if rope is not None]
        original = max((rope.original_positions for rope in ropes), default=0)
        if not 0 < original < positions.shape[1]:
            return self.compute_angles(positions, False)
        # One pass over T x T flags, which XLA does not store; attention's scores cost more.
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        last = jnp.max(jnp.where(same, positions[:, None, :], 0), axis=2)
        return self.compute_angles(positions, last[..., None, None] >= original)

    def compute_angles(
        self, positions: Int[Array, "B T"], long: bool | Bool[Array, "B T 1 1"]
    ) -> tuple[Array, Array]:
        """cos and sin `[B, T, 1, columns / 2]`; with several ropes stacked on a leading axis.

        `long` chooses between longrope's factors for short and for long texts.
        """
        ropes, pairs = self.spec.ropes() or (None,), []
        for rope in ropes:
            inverse, factor = rope_frequencies(rope, self.spec.head_dim)
            inverse = inverse[None, None, None]
            if long is not False and rope is not None and rope.original_positions:
                others, _ = rope_frequencies(rope, self.spec.head_dim, long=True)
                inverse = jnp.where(long, others[None, None, None], inverse)
            angle = positions.astype(jnp.float32)[..., None, None] * inverse
            pairs.append((jnp.cos(angle) * factor, jnp.sin(angle) * factor))
        return jax.tree.map(lambda *x: jnp.stack(x), *pairs) if len(ropes) > 1 else pairs[0]

    def make_turn(self, positions: Array, angles: tuple[Array, Array], kind: Kind) -> Turn:
        """Makes the function that rotates a layer's queries and keys, and scales its queries."""
        rope, growth = kind.rope, self._growth(positions)

        def turn(x: Array, angles: tuple[Array, Array], rope: Array | None) -> Array:
            return rotate(x, *(part if rope is None else part[rope] for part in angles))

        if rope is not None:
            # The backward pass picks the angles again: stored, they are 8 bytes for each position,
            # head column and layer.
            turn = jax.checkpoint(turn, prevent_cse=not self.compute.scan)

        def turn_both(q: Array, k: Array) -> tuple[Array, Array]:
            q, k = (turn(x, angles, rope) for x in (q, k))
            return (q if growth is None else q * growth.astype(q.dtype)), k

        return turn_both

    def _growth(self, positions: Int[Array, "B T"]) -> Float[Array, "B T 1 1"] | None:
        """Factor of the queries at positions (Ministral 3); None for models without one."""
        spec = self.spec
        if not spec.query_growth:
            return None
        times = jnp.floor(positions.astype(jnp.float32) / spec.growth_length)
        return (1 + spec.query_growth * jnp.log1p(times))[..., None, None]

    def mix_segments(
        self,
        segment_ids: Array,
        local: Array | None,
        q: Array,
        k: Array,
        v: Array,
        *,
        prompt: bool = False,
    ) -> tuple[Array, Any]:
        """Attention within segments; returns also keys and values.

        In a `prompt` each row is one segment, which does not see its padding.
        """
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

    def recall_segments(self, segment_ids: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
        """Outputs of a delta net within segments; returns also its last states."""
        groups, width = self.spec.delta_key_heads, self.spec.delta_key_dim
        return read_states(inputs, groups, width, segment_ids, in_kernels=self._in_kernels)

    def _recall_and_keep(
        self, segment_ids: Array, lengths: Array, inputs: DeltaInputs, *stored: Any
    ) -> tuple[Array, Any]:
        """Outputs of a delta net that continues from `stored`, a cache's inputs and state."""
        groups, width = self.spec.delta_key_heads, self.spec.delta_key_dim
        before, state = stored or (None, None)
        columns = inputs, groups, width, segment_ids, lengths
        return read_and_keep(*columns, before, state, in_kernels=self._in_kernels)

    @property
    def _in_kernels(self) -> bool:
        placement = self.compute.placement
        return placement is not None and placement.kernels

    def _splits_heads(self, placement: Placement) -> bool:
        """Whether heads divide evenly over the devices of the `tensor` axis."""
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
        """Reads prompts, padded at the end; returns hidden states of their last ids, and a cache.

        `capacity` counts the cache's positions, prompt and what follows, and is at least T.
        `layers` as in `extend`.
        """
        x, cache = self._read_prompts(tokens, lengths, capacity, layers)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return self.finish(last)[:, 0], cache

    def prefill_whole(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        capacity: int,
        layers: "Layers | None" = None,
    ) -> tuple[Float[Array, "B T D"], "Cache"]:
        """Reads prompts as `prefill` does; returns hidden states of all ids."""
        x, cache = self._read_prompts(tokens, lengths, capacity, layers)
        return self.finish(x), cache

    def _read_prompts(
        self, tokens: Array, lengths: Array, capacity: int, layers: "Layers | None"
    ) -> tuple[Array, "Cache"]:
        at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(at, tokens.shape)
        angles = self.compute_angles(positions, self.compute.long)
        real = (at < lengths[:, None]).astype(jnp.int32)

        recall = functools.partial(self._recall_and_keep, jnp.ones_like(tokens), lengths)

        def layer(x: Array, block: Block, kind: Kind) -> tuple[Array, Any]:
            mix = functools.partial(self.mix_segments, real, kind.local, prompt=True)
            return block(x, self.make_turn(positions, angles, kind), mix, recall)

        x, outputs = self.run_layers(layer, self.embed_tokens(tokens), layers=layers)
        period, kept = self.spec.period(), []
        for delta in (False, True):
            places = [output for output, kind in zip(outputs, period, strict=True) if kind == delta]
            kept += _stack_layers(places) if places else (None, None)
        kept[:2] = (x if x is None else lay_out(x, capacity) for x in kept[:2])
        return x, Cache(*kept)

    def extend(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " B"],
        cache: "Cache",
        layers: "Layers | None" = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], "Cache"]:
        """Reads T more ids a row, from its position on; returns hidden states, and the new cache.

        The cache is overwritten from that position on. Ids beyond its capacity are not stored.
        `layers` are the weights as `models.decode_weights` lays them out. `segment_ids` matter to
        delta nets alone; by default each row continues one document.
        """
        x, cache, _ = self._extend(tokens, positions, cache, layers, segment_ids)
        return self.finish(x), cache

    def extend_and_tap(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, " B"],
        cache: "Cache",
        layers: "Layers | None" = None,
    ) -> tuple[Float[Array, "B T D"], "Cache", Float[Array, "N B T D"]]:
        """See `extend`; returns also each layer's input, then the last layer's output."""
        x, cache, inputs = self._extend(tokens, positions, cache, layers, None, tap=True)
        assert inputs is not None
        return self.finish(x), cache, jnp.concatenate([inputs, x[None]])

    def _extend(
        self,
        tokens: Array,
        positions: Array,
        cache: "Cache",
        layers: "Layers | None",
        segment_ids: Array | None,
        *,
        tap: bool = False,
    ) -> tuple[Array, "Cache", Array | None]:
        """The last layer's output, the new cache, and with `tap` each layer's input."""
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        at = positions[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        angles = self.compute_angles(at, self.compute.long)

        def layer(
            carry: tuple[Array, Cache], block: Block, kind: Kind, index: Array
        ) -> tuple[tuple[Array, Cache], tuple[DeltaInputs | None, Array | None]]:
            # The cache is in the carry, so that a step writes its positions and copies nothing.
            before, cache = carry
            window, local = self.spec.window, kind.local
            mix = functools.partial(self.mix_cached, cache, index, positions, local, window)
            recall = functools.partial(self._recall_cached, cache, index, segment_ids, lengths)
            x, (cache, read) = block(before, self.make_turn(at, angles, kind), mix, recall)
            return (x, cache), (read, before if tap else None)

        # The index of each layer among the layers of its kind.
        kinds = [layer.delta for layer in self.spec.layers]
        numbers = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
        places = jnp.asarray(numbers, jnp.int32)
        start = self.embed_tokens(tokens), cache
        (x, cache), outputs = self.run_layers(layer, start, places, layers=layers)
        read = [inputs for inputs, _ in outputs if inputs is not None]
        inputs = _stack_layers([before for _, before in outputs]) if tap else None
        return x, cache._replace(read=_stack_layers(read) if read else None), inputs

    def mix_cached(
        self,
        cache: "Cache",
        index: Int[Array, ""],
        positions: Int[Array, " B"],
        local: Array | None,
        window: int,
        q: Array,
        k: Array,
        v: Array,
    ) -> tuple[Array, tuple["Cache", None]]:
        """Attends to a layer's part of the cache, and writes keys and values from `positions` on.

        `index` is the layer's place in the cache. `local` and `window` as in `attend`.
        """
        out, (keys, values) = attend_and_keep(
            q,
            k,
            v,
            (cache.k, cache.v),
            index,
            positions,
            local,
            scale=self.spec.score_scale,
            window=window,
            kernel=self._has_kernel(q.dtype),
        )
        return out, (cache._replace(k=keys, v=values), None)

    def _recall_cached(
        self,
        cache: "Cache",
        index: Int[Array, ""],
        segment_ids: Array,
        lengths: Array,
        inputs: DeltaInputs,
    ) -> tuple[Array, tuple["Cache", DeltaInputs]]:
        """Outputs of a delta net from its states at `index` of the cache, which it updates.

        Returns also its inputs, for `step_back`.
        """
        read = inputs._replace(mixed=inputs.mixed[..., : self.spec.delta_columns])
        stack = Stacked(cache.states, index)
        if cache.late is not None:
            out, states, latest, late = read_late(inputs, cache.inputs, stack, cache.late)
            return out, (cache._replace(states=states, inputs=latest, late=late), read)
        before = cache.inputs[index], stack
        out, (states, latest) = self._recall_and_keep(segment_ids, lengths, inputs, *before)
        latest = cache.inputs.at[index].set(latest.astype(cache.inputs.dtype))
        return out, (cache._replace(states=states, inputs=latest), read)

    def _has_kernel(self, dtype: DTypeLike) -> bool:
        """Whether a kernel attends over the cache: half precision, heads of 16, 32, 64, ..."""
        placement, width = self.compute.placement, self.spec.head_dim
        half = dtype in (jnp.bfloat16, jnp.float16) and width >= 16 and width & (width - 1) == 0
        return half and placement is not None and placement.kernels

    def head_weight(self) -> Float[Array, "V D"]:
        """The unembedding as numbers; the embedding itself if tied."""
        return decode_weight(self.stored_head())

    def stored_head(self) -> Array | Scaled:
        """The unembedding as numbers, or `Scaled` as it is stored, for float8 products."""
        weight = (self.embed if self.head is None else self.head).get_value()
        return weight if isinstance(weight, Scaled) else decode_weight(weight)

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits of every position, for evaluation and tests; training uses `losses`."""
        return unembed(hidden, self.head_weight().astype(hidden.dtype))


def lay_out(x: Float[Array, "L B T K E"], capacity: int) -> Float[Array, "L B K S E"]:
    """Keys or values of prompts in a cache's layout, with room for `capacity` positions."""
    room = ((0, 0), (0, 0), (0, 0), (0, capacity - x.shape[2]), (0, 0))
    return jnp.pad(x.swapaxes(2, 3), room)


class _Stack(NamedTuple):
    """Stacked layers of one kind, as a scan takes them."""

    graph: Any  # of a layer
    slices: Any  # the scan's inputs, a slice a layer
    read: Callable[[Any], Any]  # a layer's weights, of its slice


def _run_layer(
    layer: Callable, stack: _Stack, carry: Any, xs: Any, *, index: int | None, wait: bool
) -> tuple[Any, Any]:
    """Runs one layer in a step of a scan; `index` is its place among the slices of a period.

    With `wait` its weights are not decoded before the layer's input is known.
    """
    weights, *inputs = xs
    if index is not None:
        # Taken here, or the backward pass would keep each layer's slices, as copies.
        weights = take_layer(weights, index)
        weights = _wait_for(carry, weights) if wait else weights
    return layer(carry, nnx.merge(stack.graph, stack.read(weights)), *inputs)


def _scan_periods(
    runs: Sequence[Callable],
    period: Sequence[bool],
    carry: Any,
    xs: Any,
    *,
    times: int,
    unroll: bool,
) -> tuple[Any, list[Any]]:
    """Scans layers of two kinds, a period of them in each of `times` steps.

    `xs` are the slices by kind, each of all layers of that kind, and the inputs `[L, ...]`.
    """

    def step(carry: Any, xs: Any) -> tuple[Any, list[Any]]:
        slices, inputs = xs
        outputs = []
        for place, (delta, run) in enumerate(zip(period, runs, strict=True)):
            carry, output = run(carry, (slices[delta], *take_layer(inputs, place)))
            outputs.append(output)
        return carry, outputs

    xs = jax.tree.map(lambda x: x.reshape(times, -1, *x.shape[1:]), xs)
    return jax.lax.scan(step, carry, xs, unroll=unroll)


def take_layer(tree: Any, index: int) -> Any:
    return jax.tree.map(operator.itemgetter(index), tree)


def _wait_for(carry: Any, slices: Any) -> Any:
    """The slices, with indices of layers that depend on the carry.

    Otherwise XLA may decode blocks before the layer that they belong to.
    """
    first = next(x for x in jax.tree.leaves(carry) if jnp.issubdtype(x.dtype, jnp.floating))
    never = (first[(0,) * first.ndim] > jnp.inf).astype(jnp.int32)
    return jax.tree.map(lambda x: x if x.ndim else x + never, slices)


def _stack_layers(places: list[Any]) -> Any:
    """Outputs `[L, ...]` from outputs of each place of a period, `[periods, ...]`."""
    if len(places) == 1:
        return places[0]
    stacked = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *places)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)


Layers = tuple[Params, ...]  # each layer's weights, unstacked, from `models.decode_weights`
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Cache(NamedTuple):
    """Keys and values of attention, and states of delta nets, after what rows have read.

    Keys and values are `[L, B, K, S, head_dim]`, L the layers that attend; slot s holds position s.
    A state has no positions: it is the state after the last id. None: no layer has any.
    """

    k: Any
    v: Any
    states: Any = None  # float32 [L, B, heads, key width, value width]
    inputs: Any = None  # [L, B, W - 1, columns]: the convolution's last inputs
    read: Any = None  # `DeltaInputs` [L, B, T, ...] of the last call, which `step_back` takes
    late: Any = None  # `Late`: updates that are not in the states yet, see `write_late`


def write_late(spec: ArchSpec, cache: Cache, count: int) -> Cache:
    """Lets the cache collect updates of its states over `count` steps, if a kernel can.

    The states are written once, after the last step; `late` may then be dropped. Each step reads
    one id a row.
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
    """The cache after only the first `lengths` of the T ids that followed `before`.

    `after` is the cache after all T ids, `read` the inputs of its delta nets, None without any.
    Keys and values beyond `lengths` are overwritten later. States start from `before` again, and
    the inputs, a thousandth of their size, are read into them once more, without the weights.
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
    """Functions of a model that a step calls, student or teacher; hashable, so static under jit."""

    def hidden(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array
    ) -> Float[Array, "B T D"]:
        """Final hidden states of a batch."""
        ...

    def head(self, params: Params) -> Float[Array, "V D"]:
        """The unembedding, as numbers."""
        ...

    def stored_head(self, params: Params) -> Array | Scaled:
        """The unembedding as the loss multiplies with it: numbers, or a `Scaled` weight."""
        ...


@dataclasses.dataclass(frozen=True)
class ModuleFunctions:
    """A module with `hidden(tokens, segment_ids, positions)` and `head_weight()`, as functions."""

    graph: nnx.GraphDef

    def merge(self, params: Params) -> Any:
        return nnx.merge(self.graph, gather_shards(params))

    def hidden(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array
    ) -> Float[Array, "B T D"]:
        """See `Decoder.hidden`."""
        return self.merge(params).hidden(tokens, segment_ids, positions)

    def hidden_and_states(
        self, params: Params, tokens: Array, segment_ids: Array, positions: Array, names: Any
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """See `states.hidden_and_states`; a module has this method if a loss reads its layers."""
        return self.merge(params).hidden_and_states(tokens, segment_ids, positions, names)

    def head(self, params: Params) -> Float[Array, "V D"]:
        """See `Decoder.head_weight`."""
        return self.merge(params).head_weight()

    def stored_head(self, params: Params) -> Array | Scaled:
        """The unembedding, as numbers."""
        return self.head(params)


def _of_params(
    method: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[Concatenate[Any, Params, _Arguments], _Result]:
    """Makes a method of `Decoder` a method of `DecoderFunctions`, with `params` in front."""

    def call(functions, params, *args, **kwargs):
        return method(functions.merge(params), *args, **kwargs)

    call.__doc__ = method.__doc__
    return call


@dataclasses.dataclass(frozen=True)
class DecoderFunctions(ModuleFunctions):
    """A `Decoder` as pure functions of its parameters; made once by `functional`."""

    spec: ArchSpec
    compute: Compute

    def merge(self, params: Params) -> Decoder:
        """A decoder whose layers gather their shards themselves, in turn."""
        others = {name: gather_shards(x) for name, x in params.items() if name not in STACKS}
        return nnx.merge(self.graph, params | others)

    def for_length(self, positions: int) -> "DecoderFunctions":
        """These functions for generation up to `positions`, which fix the angles of longrope."""
        ropes = [rope for rope in self.spec.ropes() if rope is not None]
        original = max((rope.original_positions for rope in ropes), default=0)
        long = 0 < original < positions
        if long == self.compute.long:
            return self
        return self._compute_as(long=long)

    def without_gradients(self) -> "DecoderFunctions":
        """These functions with layers in a loop, which compiles as one of them.

        Written out, 24 small layers took 5.9 s of a core to compile, in a loop 1.2. What a loop
        stores of each layer costs time in a backward pass alone.
        """
        return self._compute_as(remat="none", scan=True)

    def _compute_as(self, **changes: Any) -> "DecoderFunctions":
        functions = functional(self.spec, dataclasses.replace(self.compute, **changes))[0]
        return dataclasses.replace(self, graph=functions.graph, compute=functions.compute)

    def stored_head(self, params: Params) -> Array | Scaled:
        """See `Decoder.stored_head`."""
        return self.merge(params).stored_head()

    def head_parts(self, params: Params) -> list[tuple[Params, int]]:
        """Parameters that the unembedding is made of, and how many of its columns each makes."""
        names = [name for name in ("head", "embed") if name in params][:1]
        return [({name: params[name]}, self.spec.hidden_size) for name in names]

    embed_tokens = _of_params(Decoder.embed_tokens)
    read_segments = _of_params(Decoder.read_segments)
    finish = _of_params(Decoder.finish)
    hidden_in_parts = _of_params(Decoder.hidden_in_parts)
    prefill = _of_params(Decoder.prefill)
    prefill_whole = _of_params(Decoder.prefill_whole)
    extend = _of_params(Decoder.extend)
    extend_and_tap = _of_params(Decoder.extend_and_tap)


def functional(spec: ArchSpec, compute: Compute) -> tuple[DecoderFunctions, Params]:
    """Pure functions and the parameters' shapes (`ShapeDtypeStruct` leaves); allocates nothing."""
    graph, state = _trace(spec, compute)
    return DecoderFunctions(graph, spec, compute), nnx.to_pure_dict(state)


@functools.lru_cache(maxsize=64)
def _trace(spec: ArchSpec, compute: Compute) -> tuple[Any, Any]:
    """A decoder's graph and shapes; a command asks several times for one architecture."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(spec, compute, nnx.Rngs(0))))


def initialise(spec: ArchSpec, compute: Compute, seed: int) -> Params:
    """Random parameters: normal(0, 0.02) matrices, unit norms, zero biases."""
    model = Decoder(spec, compute, nnx.Rngs(seed))
    return nnx.to_pure_dict(nnx.state(model))
