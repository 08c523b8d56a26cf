"""Weights as they are stored and as they are multiplied.

A weight is stored as an array of numbers, as their bits (`to_bits`), in the blocks of its file
(`Packed`; `Mixed` for a stack whose layers have different block types), or as float8 with a scale a
row (`Scaled`). Blocks become numbers where they are used, one layer at a time, inside the layer
scan; float8 is multiplied as it is.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from kdjax.formats.blocks import decode_fields
from kdjax.models import kernels
from kdjax.models.kernels import EXCLUDED, FP8, fp8_scales

_BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16, jnp.dtype(FP8): jnp.uint8}
_NUMBERS = {jnp.dtype(bits): numbers for numbers, bits in _BITS.items()}


def to_bits(x: Array) -> Array:
    """bf16 numbers as uint16, float8 as uint8; anything else as it is.

    XLA's CPU backend slices no bf16: it would widen a whole stack of layers to float32 before the
    scan, 2.6 GB of weights becoming 5.2 beside it. Slices of uint16 stay slices.
    """
    return jax.lax.bitcast_convert_type(x, _BITS[x.dtype]) if x.dtype in _BITS else x


def from_bits(x: Array) -> Array:
    """Undoes `to_bits`."""
    return jax.lax.bitcast_convert_type(x, _NUMBERS[x.dtype]) if x.dtype in _NUMBERS else x


def quantize_rows(x: Float[Array, "*rows n"]) -> tuple[Float[Array, "*rows n"], Array]:
    """Rows as float8_e4m3fn and one float32 scale each, `[*rows]`: x ~ values * scale.

    The largest number of a row becomes 448. Down to 2^-14.8 of it the others keep 4 significant
    bits (an error of at most 1/16), down to 2^-17.8 fewer, and below that they become 0. Not finite
    numbers make their row NaN.
    """
    x = x.astype(jnp.float32)
    scale, inverse = fp8_scales(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    return (x * scale).astype(FP8), inverse[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix `[..., out, in]` in its file's blocks, as `blocks.split` lays them out."""

    fields: tuple[Any, ...]  # arrays [..., out, blocks] or [..., out, blocks, size]
    block: str = dataclasses.field(metadata=dict(static=True))  # a key of `blocks.BLOCKS`
    dtype: Any = dataclasses.field(metadata=dict(static=True))  # of the numbers it stands for

    def __getitem__(self, index: Any) -> "Packed":
        """Layers or rows: `index` applies to the leading axes, never within a row."""
        return dataclasses.replace(self, fields=tuple(field[index] for field in self.fields))

    def dense(self) -> Array:
        """The numbers, `[..., out, in]`."""
        return decode_fields(self.fields, self.block, self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixed:
    """A stack of L layers of several block types: one stack a type, and where each layer lies.

    Q4_K_M files keep half of their value and down projections in Q6_K.
    """

    # Typed loosely, as `Packed.fields`: JAX builds its own trees of shapes and shardings with them.
    stacks: tuple[Any, ...]  # of Packed
    which: Any  # int32 [L], index into `stacks`
    slot: Any  # int32 [L], index into that stack

    def dense(self, which: Int[Array, ""], slot: Int[Array, ""]) -> Array:
        """The numbers of one layer, `[out, in]`; only its own type is decoded."""

        def branch(stack: Packed) -> Callable[[Array], Array]:
            return lambda slot: stack[slot].dense()

        return jax.lax.switch(which, [branch(stack) for stack in self.stacks], slot)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    """A matrix `[..., out, in]` as float8_e4m3fn, each row with a scale of its own."""

    values: Any  # float8_e4m3fn [..., out, in], or its bits
    scale: Any  # float32 [..., out]
    # Whether products are summed in float32 throughout. Hopper's fp8 tensor cores otherwise keep
    # about 14 bits of a running sum.
    precise: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def dense(self) -> Float32[Array, "*lead out in"]:
        """The numbers it stands for."""
        return from_bits(self.values).astype(jnp.float32) * self.scale[..., None]

    def __getitem__(self, index: Any) -> "Scaled":
        return dataclasses.replace(self, values=self.values[index], scale=self.scale[index])

    def project(self, x: "Array | Rounded", out: Any = None) -> Float[Array, "N F"]:
        """x W^T, x `[N, D]` rounded to float8 with a scale a row if it is not yet.

        In x's dtype, or in `out`. Both scales go on the output: cuBLASLt takes scales of whole
        operands only, but XLA gives it a product of two unscaled float8 arrays as it is, and fuses
        the rest with what comes next.
        """
        rows = Rounded.of(x)
        y = self.unscaled(rows, out)
        return (y.astype(jnp.float32) * rows.scale[:, None] * self.scale[None]).astype(y.dtype)

    def unscaled(self, x: "Rounded", out: Any = None) -> Float[Array, "N F"]:
        """The product of the float8 numbers alone."""
        return jax.lax.dot_general(
            x.values,
            from_bits(self.values),
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if self.precise else jax.lax.Precision.DEFAULT,
            preferred_element_type=out or x.dtype,  # bf16 has float32's range: no sum overflows
        )


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Activations as the products of `Scaled` weights take them, for several to share."""

    values: Float[Array, "N D"]  # float8_e4m3fn
    scale: Float32[Array, " N"]
    dtype: Any  # of the numbers that were rounded, and of what is made of them

    @classmethod
    def of(cls, x: "Array | Rounded") -> "Rounded":
        if isinstance(x, Rounded):
            return x
        how = kernels.rounded if kernels.usable() else quantize_rows
        return cls(*how(x), x.dtype)


def for_weight(x: Array | Rounded, weight: Any) -> Array | Rounded:
    """x as products with weights of this kind take it."""
    return Rounded.of(x) if isinstance(weight, Scaled) else x


def project(x: Array | Rounded, weight: Any) -> Float[Array, "N F"]:
    """x W^T in x's dtype, for a layer's weight that is numbers, their bits, or `Scaled`."""
    if isinstance(weight, Scaled):
        return weight.project(x)
    return jnp.einsum("ND,FD->NF", x, from_bits(weight).astype(x.dtype))


def products(x: Array | Rounded, weights: Sequence[Any]) -> list[Float[Array, "N F"]]:
    """x W^T for several weights of one kind and dtype.

    As one product where weights are cast anyway, a student's float32 masters: joined as they are
    cast, they cost no pass of their own, and backwards x's gradients need not be added up. Not on
    several devices, where rows that are joined would have to move.
    """
    first = weights[0]
    cast = not isinstance(first, Scaled) and from_bits(first).dtype != x.dtype
    if not cast or jax.device_count() > 1:
        return [project(x, w) for w in weights]
    y = project(x, jnp.concatenate([from_bits(w).astype(x.dtype) for w in weights]))
    return jnp.split(y, np.cumsum([w.shape[0] for w in weights])[:-1], axis=-1)


def gated(x: Array | Rounded, gate: Any, up: Any) -> Array | Rounded:
    """silu(x gate^T) * (x up^T), `[N, F]`, for two weights of one kind; rounded with `kernels`."""
    if isinstance(x, Rounded) and kernels.usable():
        unscaled = gate.unscaled(x), up.unscaled(x)
        found = kernels.gate_and_round(*unscaled, x.scale, gate.scale, up.scale)
        return Rounded(*found, x.dtype)
    to_gate, to_up = products(x, (gate, up))
    product = jax.nn.silu(to_gate) * to_up
    # 18,944 wide in a 7B. Rounded while it is computed, it takes longer than written first.
    return jax.lax.optimization_barrier(product) if isinstance(x, Rounded) else product


def unembedded(hidden: Float[Array, "B T D"], head: Any) -> Float32[Array, "B T V"]:
    """Logits of hidden states, for a head that is numbers or `Scaled`.

    float32 out of the product: bf16 logits put an error of 4% on a KL of 3e-3.
    """
    if isinstance(head, Scaled):
        flat = hidden.reshape(-1, hidden.shape[-1])
        # By XLA: with a kernel before it, it makes the logits sooner, and keeps 5 GB longer.
        rows = Rounded(*quantize_rows(flat), flat.dtype)
        return head.project(rows, jnp.float32).reshape(*hidden.shape[:-1], -1)
    return jnp.einsum("BTD,VD->BTV", hidden, head, preferred_element_type=jnp.float32)


def existing(logits: Float[Array, "*B V"], real: int, fill: float = EXCLUDED) -> Array:
    """The logits, with `fill` for ids from `real` on: padding rows of a head are no tokens.

    Masked and not sliced: 151,936 columns keep the matrix product aligned, 151,665 do not.
    """
    if real >= logits.shape[-1]:
        return logits
    exists = jnp.arange(logits.shape[-1], dtype=jnp.int32) < real
    return jnp.where(jnp.expand_dims(exists, tuple(range(logits.ndim - 1))), logits, fill)


def _is_weight(x: Any) -> bool:
    return isinstance(x, Packed | Mixed | Scaled)


def dense(weight: Any) -> Array:
    """The numbers of a stored weight that is not `Mixed`."""
    return weight.dense() if isinstance(weight, Packed | Scaled) else from_bits(weight)


def layers(stacked: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What a scan over layers slices, and the function from a slice to the layer's weights.

    `Packed` and `Mixed` weights come out as numbers, others as they are. The stacks of a `Mixed`
    weight stay outside the scan's inputs: layers pick from them by index.
    """
    xs = jax.tree.map(
        lambda w: (w.which, w.slot) if isinstance(w, Mixed) else w, stacked, is_leaf=_is_weight
    )

    def read(slices: Any) -> Any:
        def one(weight: Any, piece: Any) -> Any:
            if isinstance(weight, Mixed):
                return weight.dense(*piece)
            return piece.dense() if isinstance(weight, Packed) else piece

        return jax.tree.map(one, stacked, slices, is_leaf=_is_weight)

    return xs, read
