"""Causal attention within documents, on two paths: pure XLA everywhere, cuDNN on NVIDIA GPUs.

Letters: B rows, T query positions, S key positions, H query heads, K key heads, G = H / K,
D head width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kdjax.models.kernels import cached_attention
from kdjax.models.kernels.common import EXCLUDED

# How many positions a query sees, its own included: a number, or one of a traced layer.
Reach = int | Int[Array, ""]

QUERY_BLOCK = 512  # queries a block on the XLA path: scores take B*H*512*S*4 bytes, never T*S


def attend(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    segment_ids: Int[Array, "B T"],
    local: Bool[Array, ""] | None = None,
    *,
    implementation: str = "xla",
    max_segments: int = 1,
    scale: float | None = None,
    window: int = 0,
) -> Float[Array, "B T H D"]:
    """Softmax attention over earlier positions of the same segment, scaled by D^-1/2 or `scale`.

    A `window` limits it to the last positions, the query's own included; a given `local` says
    whether it does. `implementation` is "xla", or "cudnn" for half precision on an NVIDIA GPU.
    `max_segments` bounds the segment ids of one row; cuDNN's packed kernel needs it to be static.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    if implementation == "cudnn":
        run = functools.partial(_cudnn, max_segments=max_segments, scale=scale)
        if window and local is not None:  # a kernel knows its window when it is compiled
            near, far = functools.partial(run, window=window), functools.partial(run, window=0)
            return jax.lax.cond(local, near, far, q, k, v, segment_ids)
        return run(q, k, v, segment_ids, window=window)
    return _blockwise(q, k, v, segment_ids, scale, reach(k.shape[1], window, local))


def reach(length: int, window: int, local: Array | None) -> Reach:
    """How many of `length` positions a query sees, its own included."""
    if not window:
        return length
    return window if local is None else jnp.where(local, window, length)


def attend_cached(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    positions: Int[Array, "B T"],
    local: Bool[Array, ""] | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
) -> Float[Array, "B T H D"]:
    """Attention of new positions over a cache whose slot s holds position s, the new ones too.

    `scale`, `window` and `local` as of `attend`.
    """
    batch, new, heads, width = q.shape
    scale = float(width**-0.5) if scale is None else scale
    # Rows of one product are the queries of a key head: no head of keys is repeated.
    q = q.reshape(batch, new, k.shape[1], heads // k.shape[1], width).transpose(0, 2, 1, 3, 4)
    scores = jnp.einsum("BKTGD,BKSD->BKTGS", q, k, preferred_element_type=jnp.float32)
    behind = positions[:, :, None] - jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    known = behind >= 0
    if window:
        known &= behind < reach(k.shape[2], window, local)
    scores = jnp.where(known[:, None, :, None], scores * scale, EXCLUDED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("BKTGS,BKSD->BKTGD", weights, v).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, new, heads, width)


def attend_runs(
    q: Float[Array, "B T H D"],
    keys: Sequence[Float[Array, "B T K D"]],
    values: Sequence[Float[Array, "B T K D"]],
    segment_ids: Int[Array, "B T"],
    *,
    scale: float,
) -> Float[Array, "B T H D"]:
    """Attention of the last id of runs of N, which end at every position, within documents.

    `keys[i]` and `values[i]` belong to the i-th id of each position's run. A run sees the first ids
    of runs up to its start, and its later ids.
    """
    batch, length, _, width = q.shape
    # The i-th id of a run lies this number of positions before its last.
    own_keys, own_values = (
        [jnp.roll(x, len(keys) - 1 - i, axis=1) for i, x in enumerate(xs)][1:]
        for xs in (keys, values)
    )
    q_groups = q.reshape(batch, length, keys[0].shape[2], -1, width)
    rows = q_groups, own_keys, own_values, segment_ids
    run = functools.partial(_run_block, k=keys[0], v=values[0], key_ids=segment_ids, scale=scale)
    return _map_blocks(run, rows).reshape(q.shape)


def _map_blocks(run: Callable[[Any, Array], Array], rows: Any) -> Array:
    """`run(rows, start)` of blocks of queries, joined; each of `rows` has the shape `[B, T, ...]`.

    The scores of a block are recomputed in the backward pass, never stored.
    """
    batch, length = jax.tree.leaves(rows)[0].shape[:2]
    block = min(QUERY_BLOCK, length)
    blocks = -(-length // block)
    starts = jnp.arange(blocks, dtype=jnp.int32) * block
    if blocks == 1:
        return run(rows, starts[0])
    pad = blocks * block - length

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(batch, blocks, block, *x.shape[2:]).swapaxes(0, 1)

    step = jax.checkpoint(run)
    out = jax.lax.map(lambda xs: step(*xs), (jax.tree.map(cut, rows), starts))
    return out.swapaxes(0, 1).reshape(batch, -1, *out.shape[3:])[:, :length]


def _run_block(
    rows: tuple[Array, Sequence[Array], Sequence[Array], Array],
    start: Array,
    k: Array,
    v: Array,
    key_ids: Array,
    scale: float,
) -> Array:
    """`attend_runs` of a block of queries from `start` on; k and v belong to all first ids.

    `rows` are the block's queries, keys and values of the later ids of their runs, and segments.
    """
    q, near_keys, near_values, query_ids = rows
    length = k.shape[1]
    at = start + jnp.arange(q.shape[1], dtype=jnp.int32)
    seen = at[:, None] - jnp.arange(length, dtype=jnp.int32)[None] >= len(near_keys)
    seen = seen[None] & (query_ids[:, :, None] == key_ids[:, None])
    scores = jnp.einsum("BTKGD,BSKD->BKGTS", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores * scale, EXCLUDED)
    near = [
        jnp.einsum("BTKGD,BTKD->BKGT", q, x, preferred_element_type=jnp.float32) for x in near_keys
    ]
    scores = jnp.concatenate([scores, *(x[..., None] * scale for x in near)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("BKGTS,BSKD->BTKGD", weights[..., :length], v)
    for i, x in enumerate(near_values):
        out += jnp.einsum("BKGT,BTKD->BTKGD", weights[..., length + i], x)
    return out


def attend_blocks(
    q: Float[Array, "B T H D"],
    keys: tuple[Float[Array, "B S K D"], Float[Array, "B T K D"]],
    values: tuple[Float[Array, "B S K D"], Float[Array, "B T K D"]],
    anchors: Int[Array, "B T"],
    documents: Int[Array, "B T"],
    segment_ids: Int[Array, "B S"],
    *,
    scale: float,
) -> Float[Array, "B T H D"]:
    """Attention of blocks of slots, which see the text before their anchor and all of themselves.

    The first of `keys` and of `values` are the text's, the second the slots'. `anchors` are the
    places in the text where each slot's block begins; `documents` are the text's segments that the
    blocks belong to.
    """
    batch, length, _, width = q.shape
    q_groups = q.reshape(batch, length, keys[0].shape[2], -1, width)
    both = [jnp.concatenate(pair, axis=1) for pair in (keys, values)]
    run = functools.partial(
        _run_slots, k=both[0], v=both[1], key_ids=segment_ids, blocks=anchors, scale=scale
    )
    return _map_blocks(run, (q_groups, anchors, documents)).reshape(q.shape)


def _run_slots(
    rows: tuple[Array, Array, Array],
    start: Array,
    k: Array,
    v: Array,
    key_ids: Array,
    blocks: Array,
    scale: float,
) -> Array:
    """`attend_blocks` of a block of queries; k and v are the text's, then all slots'."""
    q, anchors, documents = rows
    at = jnp.arange(key_ids.shape[1], dtype=jnp.int32)[None, None]
    text = (at < anchors[..., None]) & (key_ids[:, None] == documents[..., None])
    seen = jnp.concatenate([text, blocks[:, None] == anchors[..., None]], axis=-1)
    scores = jnp.einsum("BTKGD,BSKD->BKGTS", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores * scale, EXCLUDED)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("BKGTS,BSKD->BTKGD", weights, v)


def attend_and_keep(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    cache: tuple[Array, Array],
    layer: Int[Array, ""],
    positions: Int[Array, " B"],
    local: Bool[Array, ""] | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    kernel: bool = False,
) -> tuple[Float[Array, "B T H D"], tuple[Array, Array]]:
    """Attention of T new positions a row, the first at `positions`, over a layer of a cache.

    Returns also the cache, keys and values `[L, B, K, S, D]`, with them; positions from S on are
    not stored.
    `scale`, `window` and `local` as of `attend`.
    """
    batch, new = q.shape[:2]
    if kernel:
        # Rows of one product are the queries of a key head: no head of keys is repeated.
        grouped = q.reshape(batch, new, k.shape[2], -1, q.shape[3]).swapaxes(1, 2)
        rows = grouped.reshape(batch, k.shape[2], -1, q.shape[3])
        out, keys, values = cached_attention.attend_and_keep(
            rows,
            k.swapaxes(1, 2),
            v.swapaxes(1, 2),
            *cache,
            layer,
            positions,
            jnp.asarray(reach(cache[0].shape[3], window, local), jnp.int32),
            scale=float(q.shape[3] ** -0.5) if scale is None else scale,
        )
        return out.reshape(grouped.shape).swapaxes(1, 2).reshape(q.shape), (keys, values)
    at = positions[:, None] + jnp.arange(new, dtype=jnp.int32)[None]
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    keys, values = (
        kept.at[layer, rows, :, at].set(x) for kept, x in zip(cache, (k, v), strict=True)
    )
    out = attend_cached(q, keys[layer], values[layer], at, local, scale=scale, window=window)
    return out, (keys, values)


def _blockwise(
    q: Array, k: Array, v: Array, segment_ids: Array, scale: float, seen: Reach
) -> Array:
    whole = dict(k=k, v=v, key_ids=segment_ids, scale=scale, seen=seen)
    return _map_blocks(functools.partial(_query_block, **whole), (q, segment_ids))


def _query_block(
    rows: tuple[Array, Array],
    start: Array,
    k: Array,
    v: Array,
    key_ids: Array,
    scale: float,
    seen: Reach,
) -> Array:
    q, query_ids = rows
    batch, block, heads, width = q.shape
    kv_heads = k.shape[2]
    # Queries take the order of the scores, or XLA would copy scores and weights into another one.
    q = q.reshape(batch, block, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)
    scores = jnp.einsum("BKGTD,BSKD->BKGTS", q, k, preferred_element_type=jnp.float32)
    at = start + jnp.arange(block, dtype=jnp.int32)
    behind = at[:, None] - jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
    mask = ((behind >= 0) & (behind < seen))[None] & (query_ids[:, :, None] == key_ids[:, None, :])
    # Not -inf: a padded query sees no key, and softmax of all -inf is NaN.
    scores = jnp.where(mask[:, None, None], scores * scale, EXCLUDED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("BKGTS,BSKD->BKGTD", weights, v).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, block, heads, width)


def _cudnn(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    *,
    max_segments: int,
    scale: float,
    window: int,
) -> Array:
    # The public jax.nn.dot_product_attention has no segment ids, and a boolean mask there becomes a
    # [T, S] bias; cuDNN's packed layout is reached through the private module only.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if max_segments == 1:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=True,
            local_window_size=(window - 1, 0) if window else None,
            implementation="cudnn",
        )
    lengths, starts = packed_layout(segment_ids, max_segments)
    out: Any = cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=window or None,
    )
    return out


def packed_layout(
    segment_ids: Int[Array, "B T"], max_segments: int
) -> tuple[Int[Array, "B M"], Int[Array, "B M1"]]:
    """Lengths `[B, max_segments + 1]` and starts `[B, max_segments + 2]` of each row's segments.

    Absent segments are -1. Padding counts as one more segment: cuDNN leaves positions outside every
    segment unwritten, and a NaN there would reach the weights' gradient.
    """
    slots = max_segments + 1
    slot = jnp.where(segment_ids == 0, max_segments, segment_ids - 1)
    member = slot[:, :, None] == jnp.arange(slots, dtype=segment_ids.dtype)[None, None, :]
    lengths = jnp.sum(member, axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=1) - lengths
    absent = lengths == 0
    tail = jnp.full((segment_ids.shape[0], 1), -1, jnp.int32)
    starts = jnp.concatenate([jnp.where(absent, -1, starts), tail], axis=1)
    return jnp.where(absent, -1, lengths), starts
