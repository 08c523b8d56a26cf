"""Sums of softmaxes over a vocabulary, each logit read once."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kdjax.models.kernels.common import EXCLUDED, mask_columns, plgpu


class SoftmaxSums(NamedTuple):
    """Sums of each row of two models' logits, `[*B 1]` float32; a missing teacher's are None.

    Exponents start from the peaks: x = student - peak, y = (teacher - teacher_peak) / T.
    """

    peak: Array  # the student's largest logit
    hard: Array  # sum of e^x
    soft: Array  # sum of e^(x / T)
    teacher_peak: Array | None = None
    teacher_soft: Array | None = None  # sum of e^y
    distance: Array | None = None  # sum of e^y (y - x / T)


def _logits_block(rows: int) -> tuple[int, int]:
    return (512, 1) if rows >= 4096 else (2048, 2)  # many rows fill the chip with small programs


def softmax_sums(
    student: Float[Array, "*B V"],
    teacher: Float[Array, "*B W"] | None,
    temperature: float,
    real: int,
    *,
    interpret: bool = False,
) -> SoftmaxSums:
    """Computes `losses.kd.softmax_sums` in one reading of each logit; float32 logits."""
    rows = [x.reshape(-1, x.shape[-1]) for x in (student, teacher) if x is not None]
    count = rows[0].shape[0]
    width, warps = _logits_block(count)
    kernel = functools.partial(_softmax_sums, len(rows), temperature, real, width)
    sums = pl.pallas_call(
        kernel,
        grid=(count,),
        out_shape=[jax.ShapeDtypeStruct((count,), jnp.float32)] * (3 * len(rows)),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
    )(*rows)
    return SoftmaxSums(*(x.reshape(*student.shape[:-1], 1) for x in sums))


def _softmax_sums(inputs: int, temperature: float, real: int, width: int, *refs):
    row = pl.program_id(0)
    cooled = 1 / temperature

    def block(index, carry, whole=True):
        column = index * width + jnp.arange(width, dtype=jnp.int32)
        # Without a mask four logits are loaded at once.
        inside: dict[str, Any] = {} if whole else dict(mask=column < real, other=EXCLUDED)
        x, *teacher = (plgpu.load(ref.at[row, column], **inside) for ref in refs[:inputs])
        (peak, hard, soft), theirs = carry[:3], carry[3:]
        new = jnp.maximum(peak, jnp.max(x))
        below, fall = x - new, peak - new
        hard = hard * jnp.exp(fall) + jnp.sum(jnp.exp(below))
        if temperature != 1:
            below, fall = below * cooled, fall * cooled
            soft = soft * jnp.exp(fall) + jnp.sum(jnp.exp(below))
        else:
            soft = hard
        if not teacher:
            return new, hard, soft
        (y,), (their_peak, z, distance) = teacher, theirs
        their_new = jnp.maximum(their_peak, jnp.max(y))
        their_below = (y - their_new) * cooled
        their_fall = (their_peak - their_new) * cooled
        weight, kept = jnp.exp(their_below), jnp.exp(their_fall)
        # The sums so far hold exponents below the old peaks. The new peaks are higher: scale
        # each sum by e^fall, and shift the differences that `distance` weights.
        distance = kept * (distance + z * (their_fall - fall))
        distance += jnp.sum(weight * (their_below - below))
        return new, hard, soft, their_new, z * kept + jnp.sum(weight), distance

    lowest, zero = jnp.float32(EXCLUDED), jnp.float32(0)
    blocks, left = divmod(real, width)
    sums = jax.lax.fori_loop(0, blocks, block, (lowest, zero, zero) * inputs)
    if left:
        sums = block(blocks, sums, whole=False)
    for ref, value in zip(refs[inputs:], sums, strict=True):
        plgpu.store(ref.at[row], value)


class BlockSums(NamedTuple):
    """Sums of each block of a row's logits, `[B, N]` float32; exponents start from its peak."""

    peaks: Array
    hard: Array  # sum of e^x
    soft: Array  # sum of e^(x / T) over kept ids


def sum_blocks(
    logits: Float[Array, "B V"],
    least: Float[Array, "B 1"] | None,
    blocks: int,
    temperature: float,
    real: int,
    *,
    interpret: bool = False,
) -> BlockSums:
    """Computes `decoding.sum_blocks` in one reading of each logit; float32 logits."""
    count, width = logits.shape[0], -(-logits.shape[1] // blocks)
    return BlockSums(
        *pl.pallas_call(
            functools.partial(_sum_blocks, width, temperature, real),
            grid=(count, blocks),
            out_shape=[jax.ShapeDtypeStruct((count, blocks), jnp.float32)] * 3,
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
        )(logits, *([] if least is None else [least[:, 0]]))
    )


def _sum_blocks(width: int, temperature: float, real: int, logits, *refs):
    least, (peaks, hard, soft) = refs[:-3], refs[-3:]
    row, block = pl.program_id(0), pl.program_id(1)
    column, inside = mask_columns(width)
    column += block * width
    inside &= column < real
    x = plgpu.load(logits.at[row, column], mask=inside, other=EXCLUDED)
    peak = jnp.max(x)
    below = x - peak
    weights = jnp.where(inside, jnp.exp(below), 0.0)
    plgpu.store(peaks.at[row, block], peak)
    plgpu.store(hard.at[row, block], jnp.sum(weights))
    if temperature != 1:
        weights = jnp.where(inside, jnp.exp(below / temperature), 0.0)
    if least:
        weights = jnp.where(x >= plgpu.load(least[0].at[row]), weights, 0.0)
    plgpu.store(soft.at[row, block], jnp.sum(weights))
