"""The gate of an MLP, rounded to float8."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kdjax.models.kernels.common import FP8, fp8_scales, plgpu

# Columns at a time, and warps of 32 threads that share them: the fastest on an H200.
_WIDTH_BLOCK, _WIDTH_WARPS = 2048, 8


def gate_and_round(
    gate: Float[Array, "N F"],
    up: Float[Array, "N F"],
    rows: Float[Array, " N"],
    gate_scale: Float[Array, " F"],
    up_scale: Float[Array, " F"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N F"], Float[Array, " N"]]:
    """silu(gate) * up of unscaled products, as float8 with a float32 scale a row.

    A number of `gate` means gate * rows * gate_scale, and so for `up`. Reads each once: XLA writes
    the result in bf16, reads it for each row's largest number, and again to round it.
    """
    count, width = gate.shape
    return pl.pallas_call(
        functools.partial(_gate_and_round, width),
        grid=(count,),
        out_shape=(
            jax.ShapeDtypeStruct((count, width), FP8),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=_WIDTH_WARPS, num_stages=1),
        interpret=interpret,
    )(gate, up, rows, gate_scale, up_scale)


def _gate_and_round(width: int, gate, up, rows, gate_scale, up_scale, values, scale):
    row = pl.program_id(0)
    of_row, kept = plgpu.load(rows.at[row]), []
    for start, size in _cut_width(width):
        column = start + jnp.arange(size, dtype=jnp.int32)
        inside = column < width
        refs = gate.at[row, column], up.at[row, column], gate_scale.at[column], up_scale.at[column]
        g, u, of_gate, of_up = (
            plgpu.load(ref, mask=inside, other=0.0).astype(jnp.float32) for ref in refs
        )
        g *= of_row * of_gate
        kept.append((column, inside, g * jax.nn.sigmoid(g) * (u * (of_row * of_up))))
    # Maxima after all loads: warps meet for each maximum, and later loads would wait for that.
    largest: dict[int, Any] = {}
    for _, _, x in kept:
        largest[x.size] = jnp.maximum(largest.get(x.size, 0.0), jnp.abs(x))
    most = functools.reduce(jnp.maximum, map(jnp.max, largest.values()))
    to, inverse = fp8_scales(most)
    for column, inside, x in kept:
        plgpu.store(values.at[row, column], (x * to).astype(FP8), mask=inside)
    plgpu.store(scale.at[row], inverse)


def _cut_width(width: int) -> list[tuple[int, int]]:
    """(start, size) of pieces whose sizes are powers of two, as Triton needs them."""
    blocks, start = [], 0
    while start < width:
        size = min(_WIDTH_BLOCK, 1 << (width - start).bit_length() - 1)
        blocks.append((start, max(size, 128)))
        start += blocks[-1][1]
    return blocks
