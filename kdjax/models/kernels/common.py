"""Shared by all kernels: Triton's part of Pallas, float8's range, numbers in place of -inf."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

try:
    from jax.experimental.pallas import triton as plgpu
except Exception:  # missing or refused: `device.placement` warns once
    plgpu: Any = None

# Replaces -inf for ids that do not exist and keys that a query does not see: its exp is 0, and
# 0 * (a - a) is not NaN.
EXCLUDED = -1e30
FP8 = jnp.float8_e4m3fn  # 4 bits of exponent, 3 of fraction; largest 448, no infinity
FP8_MAX = 448.0


def fp8_scales(most: Array) -> tuple[Array, Array]:
    """Factor that fits numbers of at most `most` into float8, and its inverse."""
    most = jnp.maximum(most, 1e-30)  # of zeros as well: 448 / 1e-30 is still finite
    return FP8_MAX / most, most / FP8_MAX


def iota(size: int) -> Array:
    return jnp.arange(size, dtype=jnp.int32)


def mask_columns(width: int) -> tuple[Array, Array]:
    """Column numbers up to a power of two, which Triton needs, and which of them exist."""
    column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    return column, column < width
