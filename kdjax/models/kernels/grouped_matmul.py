"""Products of rows sorted by expert, each tile of rows with its expert's weights."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kdjax.models.kernels.common import plgpu

TILE_ROWS = 128
# Columns of a tile, depth of a step, warps, stages: the fastest of 12 and 9 at the shape of
# Qwen3-30B-A3B on an H200, 520 and 505 TFLOP/s; the first makes gate and up at once.
_WIDEN, _NARROW = (128, 64, 8, 3), (256, 64, 8, 3)


class Tiles(NamedTuple):
    """Rows sorted by expert, in tiles of `TILE_ROWS` rows of one expert each."""

    experts: Array  # int32 [tiles]; the number of experts for a tile of none
    rows: Array  # int32 [tiles * TILE_ROWS]: the row at each place


def tiles_fit(gate: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Whether the kernels of experts take weights `[E, F, D]` of this shape."""
    _, size, width = gate
    half = dtype in (jnp.bfloat16, jnp.float16)
    return half and size % _WIDEN[0] == 0 and width % _NARROW[0] == 0


def widen_tiles(
    tiles: Tiles,
    rows: Float[Array, "N D"],
    gate: Float[Array, "E F D"],
    up: Float[Array, "E F D"],
    *,
    interpret: bool = False,
) -> Float[Array, "P F"]:
    """silu(x gate^T) * (x up^T) for the row x at each place, by its tile's expert.

    Rows are gathered as they are read: to write them in order first takes .4 ms of 1.6. Places of
    tiles without an expert stay unwritten.
    """
    return _multiply_tiles(tiles, (tiles.rows, rows), (gate, up), _WIDEN, interpret)


def narrow_tiles(
    tiles: Tiles,
    hidden: Float[Array, "P F"],
    down: Float[Array, "E D F"],
    *,
    interpret: bool = False,
) -> Float[Array, "P D"]:
    """x down^T for the row x at each place, by its tile's expert; as `widen_tiles` otherwise."""
    return _multiply_tiles(tiles, (hidden,), (down,), _NARROW, interpret)


def _multiply_tiles(
    tiles: Tiles,
    rows: tuple[Array, ...],
    weights: tuple[Array, ...],
    settings: tuple[int, int, int, int],
    interpret: bool,
) -> Array:
    """`rows` are ordered by place, or are the row's number at each place, then all rows."""
    count, size, width = weights[0].shape
    columns, depth, warps, stages = settings
    across = size // columns
    return pl.pallas_call(
        functools.partial(_multiply_tile, len(rows) > 1, count, width, columns, depth, across),
        grid=(tiles.experts.shape[0] * across,),
        out_shape=jax.ShapeDtypeStruct((tiles.rows.shape[0], size), rows[-1].dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(tiles.experts, *rows, *weights)


def _multiply_tile(gathered, count, width, columns, depth, across, experts, *refs):
    """One tile's columns; refs: numbers of rows if `gathered`, rows, one weight or two, result."""
    chosen, (x, *weights, out) = refs[:gathered], refs[gathered:]
    tile, part = pl.program_id(0) // across, pl.program_id(0) % across
    expert = plgpu.load(experts.at[tile])

    @pl.when(expert < count)
    def _():
        place = tile * TILE_ROWS + jnp.arange(TILE_ROWS, dtype=jnp.int32)
        row = (plgpu.load(chosen[0].at[place]) if gathered else place)[:, None]
        column = (part * columns + jnp.arange(columns, dtype=jnp.int32))[:, None]

        def add(step, sums):
            inner = (step * depth + jnp.arange(depth, dtype=jnp.int32))[None, :]
            a = plgpu.load(x.at[row, inner])
            pieces = [plgpu.load(weight.at[expert, column, inner]) for weight in weights]
            products = (plgpu.dot(a, piece, trans_b=True) for piece in pieces)
            return tuple(total + y for total, y in zip(sums, products, strict=True))

        zero = jnp.zeros((TILE_ROWS, columns), jnp.float32)
        y, *up = jax.lax.fori_loop(0, width // depth, add, (zero,) * len(weights))
        if up:
            y = y * jax.nn.sigmoid(y) * up[0]
        plgpu.store(out.at[place[:, None], column.reshape(1, -1)], y.astype(out.dtype))
