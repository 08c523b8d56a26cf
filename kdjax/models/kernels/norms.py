"""Activations rounded to float8, with the RMS norm before it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kdjax.models.kernels.common import FP8, fp8_scales, mask_columns, plgpu


def round_rows(
    x: Float[Array, "N D"],
    norm: tuple[Float[Array, " D"], float] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], Float[Array, " N"]]:
    """x as float8 with a float32 scale a row; with a norm's (weight, eps), the normalized x."""
    count, width = x.shape
    *weight, eps = norm or (None,)
    # 4 warps for widths of 896 and 3584; more for wider rows, so that a thread's share is equal.
    warps = min(max(4, pl.next_power_of_2(width) // 1024), 16)
    return pl.pallas_call(
        functools.partial(_round_row, width, eps),
        grid=(count,),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, FP8),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )(x, *weight)


def _round_row(width: int, eps: float | None, x, *refs):
    """One row; refs: the norm's weight unless eps is None, the numbers, their scale."""
    row, (column, inside) = pl.program_id(0), mask_columns(width)
    y = plgpu.load(x.at[row, column], mask=inside, other=0.0)
    *weight, values, scale = refs
    if eps is not None:
        w = plgpu.load(weight[0].at[column], mask=inside, other=0.0)
        v = y.astype(jnp.float32)
        y = ((v * jax.lax.rsqrt(jnp.sum(v * v) / width + eps)).astype(w.dtype) * w).astype(y.dtype)
    v = y.astype(jnp.float32)
    to, inverse = fp8_scales(jnp.max(jnp.abs(v)))
    plgpu.store(scale.at[row], inverse)
    plgpu.store(values.at[row, column], (v * to).astype(FP8), mask=inside)
