"""Weights as they are stored and as they are multiplied.

A weight is stored as an array of numbers, as bf16 bits (`to_bits`), or in the blocks of its file
(`Packed`; `Mixed` for a stack whose layers have different block types). Stored forms become numbers
where they are used, one layer at a time, inside the layer scan.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kdjax.formats.blocks import decode_fields


def to_bits(x: Array) -> Array:
    """bf16 numbers as uint16; anything else as it is.

    XLA's CPU backend slices no bf16: it would widen a whole stack of layers to float32 before the
    scan, 2.6 GB of weights becoming 5.2 beside it. Slices of uint16 stay slices.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Array) -> Array:
    """Undoes `to_bits`."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


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


def _is_weight(x: Any) -> bool:
    return isinstance(x, Packed | Mixed)


def dense(weight: Any) -> Array:
    """The numbers of a stored weight that is not `Mixed`."""
    return weight.dense() if isinstance(weight, Packed) else from_bits(weight)


def layers(stacked: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What a scan over layers slices, and the function from a slice to the layer's numbers.

    The stacks of a `Mixed` weight stay outside the scan's inputs: layers pick from them by index.
    """
    xs = jax.tree.map(
        lambda w: (w.which, w.slot) if isinstance(w, Mixed) else w, stacked, is_leaf=_is_weight
    )

    def read(slices: Any) -> Any:
        def one(weight: Any, piece: Any) -> Array:
            if isinstance(weight, Mixed):
                return weight.dense(*piece)
            return piece.dense() if isinstance(weight, Packed) else piece

        return jax.tree.map(one, stacked, slices, is_leaf=_is_weight)

    return xs, read
