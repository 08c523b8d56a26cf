"""RMS norms: with the residual stream's gradient, or rounded to float8."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kdjax.models.kernels.common import FP8, fp8_scales, mask_columns, plgpu

_NORM_ROWS = 16  # rows whose gradients of a norm's weight one program adds up


def round_rows(
    x: Float[Array, "N D"],
    norm: tuple[Float[Array, " D"], float] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "N D"], Float[Array, " N"]]:
    """x as float8 with a float32 scale a row; with a norm's (weight, eps), the normalized x."""
    scales = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    return _run_norm(x, norm, (jax.ShapeDtypeStruct(x.shape, FP8), scales), interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def normalize_rows(
    x: Float[Array, "N D"], weight: Float[Array, " D"], eps: float, interpret: bool = False
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """x, and x / rms(x) * weight, as `decoder.RMSNorm` defines it.

    The two are returned together for the backward pass: one kernel adds the gradient that reaches x
    along the residual stream to the one that it computes through the norm. XLA takes three kernels
    forwards and four backwards.
    """
    return x, _run_norm(x, (weight, eps), jax.ShapeDtypeStruct(x.shape, x.dtype), interpret)


def _run_norm(x: Array, norm: tuple[Array, float] | None, out: Any, interpret: bool) -> Any:
    *weight, eps = norm or (None,)
    return pl.pallas_call(
        functools.partial(_norm_fwd, x.shape[1], eps),
        grid=(x.shape[0],),
        out_shape=out,
        compiler_params=_norm_parameters(x.shape[1]),
        interpret=interpret,
    )(x, *weight)


def _norm_fwd(width: int, eps: float | None, x, *refs):
    """One row's norm; refs: the weight unless eps is None, the result, a scale if float8."""
    row, (column, inside) = pl.program_id(0), mask_columns(width)
    y = plgpu.load(x.at[row, column], mask=inside, other=0.0)
    if eps is not None:
        weight, *refs = refs
        w = plgpu.load(weight.at[column], mask=inside, other=0.0)
        v = y.astype(jnp.float32)
        y = ((v * jax.lax.rsqrt(jnp.sum(v * v) / width + eps)).astype(w.dtype) * w).astype(y.dtype)
    if len(refs) == 2:
        v = y.astype(jnp.float32)
        to, inverse = fp8_scales(jnp.max(jnp.abs(v)))
        plgpu.store(refs[1].at[row], inverse)
        y = (v * to).astype(FP8)
    plgpu.store(refs[0].at[row, column], y, mask=inside)


def _norm_parameters(width: int) -> Any:
    # 4 warps for widths of 896 and 3584; more for wider rows, so that a thread's share is equal.
    warps = min(max(4, pl.next_power_of_2(width) // 1024), 16)
    return plgpu.CompilerParams(num_warps=warps, num_stages=1)


def _forward(x: Array, weight: Array, eps: float, interpret: bool) -> Any:
    return normalize_rows(x, weight, eps, interpret), (x, weight)


def _backward(eps: float, interpret: bool, residuals: Any, gradients: Any) -> Any:
    (x, weight), (along, through) = residuals, gradients
    count, width = x.shape
    programs = pl.cdiv(count, _NORM_ROWS)
    dx, dw = pl.pallas_call(
        functools.partial(_norm_bwd, count, width, eps),
        grid=(programs,),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, width), jnp.float32),
        ),
        compiler_params=_norm_parameters(x.shape[1]),
        interpret=interpret,
    )(x, weight, along, through)
    return dx, jnp.sum(dw, axis=0).astype(weight.dtype)


def _norm_bwd(count: int, width: int, eps: float, x, weight, along, through, dx, dw):
    program, (column, inside) = pl.program_id(0), mask_columns(width)
    w = plgpu.load(weight.at[column], mask=inside, other=0.0).astype(jnp.float32)

    def one(step, total):
        row = program * _NORM_ROWS + step
        here = inside & (row < count)
        v, add, dy = (
            plgpu.load(ref.at[row, column], mask=here, other=0.0).astype(jnp.float32)
            for ref in (x, along, through)
        )
        g = dy * w
        squares, shared = jnp.sum(v * v) / width, jnp.sum(g * v) / width
        scale = jax.lax.rsqrt(squares + eps)
        hat = v * scale
        grad = add + scale * (g - hat * (scale * shared))
        plgpu.store(dx.at[row, column], grad.astype(dx.dtype), mask=here)
        return total + dy * hat

    total = jax.lax.fori_loop(0, _NORM_ROWS, one, jnp.zeros(column.shape, jnp.float32))
    plgpu.store(dw.at[program, column], total, mask=inside)


normalize_rows.defvjp(_forward, _backward)
