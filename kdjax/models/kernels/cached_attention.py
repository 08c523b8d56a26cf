"""Attention of new positions over a cache of keys and values, which it writes in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kdjax.models.kernels.common import EXCLUDED, plgpu

# For `attend_and_keep`: slots of the cache at a time, warps, stages.
_SLOTS, _DECODING_WARPS, _DECODING_STAGES = 64, 4, 3


def attend_and_keep(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B K T D"],
    v: Float[Array, "B K T D"],
    keys: Float[Array, "L B K S D"],
    values: Float[Array, "L B K S D"],
    layer: Int[Array, ""],
    positions: Int[Array, " B"],
    seen: Int[Array, ""],
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Computes `attention.attend_and_keep` for T new positions a row; in one reading, and in place.

    The R = T G queries of a key head are ordered by position. A row reads the cache up to its
    position and at most `seen` positions, including itself. XLA would copy a layer to multiply it,
    and read all of it.
    """
    batch, heads, rows = q.shape[:3]
    new, slots = k.shape[2], keys.shape[3]
    at = jnp.stack([layer, seen]).astype(jnp.int32), positions.astype(jnp.int32)
    # A block that reaches beyond the cache is masked; none does if blocks divide the cache.
    size = min(_SLOTS, pl.next_power_of_2(slots))
    return pl.pallas_call(
        functools.partial(_attend_and_keep, rows, new, slots, size, scale),
        grid=(batch, heads),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, keys, values)),
        input_output_aliases={5: 1, 6: 2},
        compiler_params=plgpu.CompilerParams(
            num_warps=_DECODING_WARPS, num_stages=_DECODING_STAGES
        ),
        interpret=interpret,
    )(*at, q, k, v, keys, values)


def _attend_and_keep(
    rows: int, new: int, slots: int, size: int, scale: float, layer, positions, q, k, v, *refs
):
    keys, values, out, kept_keys, kept_values = refs
    row, head = pl.program_id(0), pl.program_id(1)
    at, seen = (plgpu.load(layer.at[jnp.int32(i)]) for i in range(2))
    position = plgpu.load(positions.at[row])
    # Triton multiplies at least 16 by 16.
    of_query = jnp.arange(max(16, pl.next_power_of_2(rows)), dtype=jnp.int32)
    of_new = jnp.arange(max(16, pl.next_power_of_2(new)), dtype=jnp.int32)
    width = jnp.arange(q.shape[3], dtype=jnp.int32)[None]
    queries = plgpu.load(
        q.at[row, head, of_query[:, None], width], mask=of_query[:, None] < rows, other=0.0
    )
    inside = of_new[:, None] < new
    fresh = [
        plgpu.load(x.at[row, head, of_new[:, None], width], mask=inside, other=0.0) for x in (k, v)
    ]
    asks = position + of_query // (rows // new)  # each query's position

    def weigh(key: Array, slot: Array, known: Array) -> Array:
        scores = plgpu.dot(queries, key, trans_b=True) * scale
        behind = asks[:, None] - slot[None]
        return jnp.where(known[None] & (behind >= 0) & (behind < seen), scores, EXCLUDED)

    def block(index, carry):
        peak, total, mixed = carry
        slot = index * size + jnp.arange(size, dtype=jnp.int32)
        masked: dict[str, Any] = {}
        if slots % size:
            masked = dict(mask=slot[:, None] < slots, other=0.0)
        key, value = (
            plgpu.load(x.at[at, row, head, slot[:, None], width], **masked) for x in (keys, values)
        )
        scores = weigh(key, slot, slot < position)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        fall, weights = jnp.exp(peak - higher), jnp.exp(scores - higher[:, None])
        total = total * fall + jnp.sum(weights, axis=1)
        mixed = mixed * fall[:, None] + plgpu.dot(weights.astype(value.dtype), value)
        return higher, total, mixed

    # The new positions first: a query sees at least itself, so that no peak is EXCLUDED.
    scores = weigh(fresh[0], position + of_new, of_new < new)
    peak = jnp.max(scores, axis=1)
    weights = jnp.exp(scores - peak[:, None])
    carry = peak, jnp.sum(weights, axis=1), plgpu.dot(weights.astype(fresh[1].dtype), fresh[1])
    first = jnp.maximum(position - seen + 1, 0) // size
    _, total, mixed = jax.lax.fori_loop(first, pl.cdiv(position, size), block, carry)
    result = (mixed / total[:, None]).astype(out.dtype)
    plgpu.store(out.at[row, head, of_query[:, None], width], result, mask=of_query[:, None] < rows)
    kept = inside & (position + of_new[:, None] < slots)
    for ref, x in zip((kept_keys, kept_values), fresh, strict=True):
        plgpu.store(ref.at[at, row, head, position + of_new[:, None], width], x, mask=kept)
