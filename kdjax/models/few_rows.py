"""Products of a few rows as XLA's CPU backend computes them fast: one row takes a matrix's bytes.

By itself XLA converts numbers one after another where it reduces them, which takes four to twenty
times as long as the product. Here bits are shifted and whole numbers are converted in vectors.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

GROUP = 16  # numbers of a `Grouped` row that share a factor: what all block types' groups hold
_WIDENED = 2**20  # numbers of a matrix that are float32 at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
    """A matrix `[out, in]` as whole numbers, laid for the product with one row on a CPU.

    A row's groups of `GROUP` numbers share a factor and a minimum: factor * q - minimum. First
    come the first numbers of all groups, then the second ones, and so on.
    """

    values: Any  # int8 [out, in]
    factors: Any  # float32 [out, groups]
    minimums: Any  # float32 [out, groups], or None

    def project(self, x: Float[Array, "N D"]) -> Float32[Array, "N F"]:
        """x W^T. One row reads a byte a number; of several, numbers are widened first."""
        groups = x.astype(jnp.float32).reshape(x.shape[0], -1, GROUP)
        turned = groups.swapaxes(1, 2).reshape(x.shape)
        if x.shape[0] == 1:
            sums = _add_pieces(turned, self.values, self.factors.shape[1], _to_float32)
            y = _add_columns(sums * self.factors)[None]
        else:
            wide = _to_float32(self.values).reshape(self.values.shape[0], GROUP, -1)
            wide = (wide * (self.factors + _never(x))[:, None]).reshape(self.values.shape)
            y = jnp.einsum("ND,FD->NF", turned, wide)
        if self.minimums is None:
            return y
        return y - jnp.einsum("NG,FG->NF", jnp.sum(groups, axis=-1), self.minimums)


def project_row(x: Float32[Array, "N D"], bits: Array) -> Float32[Array, "N F"]:
    """x W^T for a matrix in the bits of bf16; one row reads two bytes a number."""
    pieces = _count_pieces(bits.shape[1])
    if pieces and x.shape[0] == 1:
        return _add_columns(_add_pieces(x, bits, bits.shape[1] // pieces, _widen))[None]
    return jnp.einsum("ND,FD->NF", x, _widen(bits + _never(x).astype(bits.dtype)))


def project_bits(x: Float[Array, "N D"], bits: Array) -> Float32[Array, "N F"]:
    """x W^T for few rows and a matrix in the bits of bf16, some of its rows at a time.

    XLA's CPU backend widens bf16 one number after another, which takes twenty times as long as one
    row's product; a shift of bits runs in vectors, and what it makes stays in the caches.
    """
    rows, width = bits.shape
    most = min(max(_WIDENED // width, 1), rows)
    wide, starts = x.astype(jnp.float32), range(0, rows, most)

    def part(_: None, start: Array) -> tuple[None, Array]:
        numbers = _widen(jax.lax.dynamic_slice_in_dim(bits, start, most))
        return None, jnp.einsum("ND,FD->NF", wide, numbers)

    # The last part begins where it has as many rows as the others.
    at = jnp.asarray([min(start, rows - most) for start in starts], jnp.int32)
    parts = jax.lax.scan(part, None, at)[1].swapaxes(0, 1)
    rest = rows - starts[-1]
    return jnp.concatenate(
        [parts[:, :-1].reshape(x.shape[0], -1), parts[:, -1, most - rest :]], axis=1
    )


def _to_float32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _widen(bits: Array) -> Array:
    """The bits of bf16 as float32, by a shift, which runs in vectors."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def _count_pieces(width: int) -> int:
    """The least number of pieces, 16 or more, of equal widths that are multiples of 16; 0 for none.

    More are slower. Of fewer XLA computes what makes x again for each row of the matrix: it repeats
    code up to 15 times, whatever barrier there is.
    """
    return next((n for n in range(16, width // 16 + 1) if width % (16 * n) == 0), 0)


def _add_pieces(
    x: Float32[Array, "1 D"], weight: Array, width: int, read: Callable[[Array], Array]
) -> Float32[Array, "F width"]:
    """The sum over pieces of `width` columns of x times the weight as `read` makes float32 of it.

    XLA's CPU backend converts and multiplies in vectors here; it does not where it converts and
    reduces at once, which takes four to ten times as long.
    """
    # x is written before each row of the matrix reads it. And tied to it the weight is nothing that
    # a loop over ids could convert once for all of them, four bytes a number.
    x, weight = jax.lax.optimization_barrier((x, weight))
    places = range(0, x.shape[1], width)
    parts = (x[:, i : i + width] * read(weight[:, i : i + width]) for i in places)
    return functools.reduce(jnp.add, parts)


def _add_columns(x: Float32[Array, "F W"]) -> Float32[Array, " F"]:
    """The sum over the last axis, as a product, which is faster; what is added is written first."""
    ones = jnp.ones(x.shape[1], jnp.float32)
    return jnp.einsum("FW,W->F", jax.lax.optimization_barrier(x), ones)


def _never(x: Array) -> Array:
    """0, known only once x is: XLA's CPU backend would widen the weights of all layers at first."""
    return (x[(0,) * x.ndim] > jnp.inf).astype(jnp.float32)
