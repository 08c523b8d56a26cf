"""The causal convolution before the gated delta rule, and the operations between the two.

`make_heads` convolves, applies silu, splits queries, keys and values, and normalizes the first two:
flash-linear-attention's `causal_conv1d` and `l2norm`. Letters are those of `models.delta`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kdjax.models.kernels.common import iota, plgpu

_WARPS = 4  # of a program

# Positions of a forward program; positions that a backward one adds up, in all and at a time.
_HEAD_ROWS = 32
_BACK_SPAN, _BACK_ROWS = 256, 8


class _Columns(NamedTuple):
    """Columns of `[B, T, E]` for a program's head: of queries, then keys, then values."""

    row: Array
    tile: Array
    head: Array
    column: Array  # in E
    place: Array  # in the head
    real: Any  # [1, columns], whether it exists; True if all do
    groups: int

    def choose(self, queries: Any, keys: Any, values: Any) -> Array:
        """Selects queries, keys or values, whichever this head belongs to."""
        return jnp.where(
            self.head < self.groups, queries, jnp.where(self.head < 2 * self.groups, keys, values)
        )

    def parts(self, refs: Any, position: Array) -> Any:
        """Places of these positions in queries, keys and values, and which of them are valid."""
        for i, ref in enumerate(refs):
            begin, heads = i * self.groups, ref.shape[2]
            mine = (self.head >= begin) & (self.head < begin + heads)
            head = jnp.clip(self.head - begin, 0, heads - 1)
            yield ref.at[self.row, position[:, None], head, self.place[None]], mine & self.real

    def load(self, refs: Any, position: Array, inside: Array) -> Array:
        """Loads these positions of queries, keys or values, whichever this head belongs to."""
        begins = 0, self.groups, 2 * self.groups

        def read(ref: Any, begin: int) -> Array:
            at = ref.at[self.row, position[:, None], self.head - begin, self.place[None]]
            return plgpu.load(at, mask=inside & self.real, other=0.0)

        q, k, v = (functools.partial(read, *x) for x in zip(refs, begins, strict=True))
        return jax.lax.cond(
            self.head < self.groups, q, lambda: jax.lax.cond(self.head < 2 * self.groups, k, v)
        )


def _locate_columns(groups: int, keys: int, width: int) -> _Columns:
    row, tile, head = (pl.program_id(i) for i in range(3))
    place, is_key = iota(max(keys, width)), head < 2 * groups
    left_out = 2 * groups * (keys - width)  # columns that heads of this width leave out
    start = jnp.where(is_key, head * keys, head * width + left_out)
    real = True if keys == width else jnp.where(is_key, place < keys, place < width)[None]
    return _Columns(row, tile, head, start + place, place, real, groups)


def _load_taps(
    at: _Columns, position: Array, mixed: Any, kernel: Any, ids: Any, before: Any = None
) -> tuple[list[Array], list[Array]]:
    """The convolution's inputs `[positions, columns]` at each of its places, and the weights."""
    (_, length, _), reach = mixed.shape, kernel.shape[1] - 1
    inside, document = position < length, _load_ids(ids, at.row, position)
    inputs, weights = [], []
    for back in range(reach, -1, -1):
        since = position - back
        known = inside & (since >= 0) & (_load_ids(ids, at.row, since) == document)
        x = plgpu.load(
            mixed.at[at.row, jnp.maximum(since, 0)[:, None], at.column[None]],
            mask=known[:, None] & at.real,
            other=0.0,
        )
        if before is not None and back:
            known = inside & (since < 0) & (_load_ids(ids, at.row, 0 * position) == document)
            x += plgpu.load(
                before.at[at.row, jnp.minimum(since, -1)[:, None] + reach, at.column[None]],
                mask=known[:, None] & at.real,
                other=0.0,
            ).astype(x.dtype)
        inputs.append(x)
        weights.append(_load_weight(at, kernel, reach - back))
    return inputs, weights


def _load_ids(ids: Any, row: Array, position: Array) -> Array:
    return plgpu.load(ids.at[row, jnp.clip(position, 0, ids.shape[1] - 1)])


def _load_weight(at: _Columns, kernel: Any, place: int) -> Array:
    real = None if at.real is True else at.real[0]
    other = None if real is None else 0.0
    weight = plgpu.load(kernel.at[at.column, jnp.int32(place)], mask=real, other=other)
    return weight.astype(jnp.float32)[None]


def _convolve(inputs: list[Array], weights: list[Array], dtype: Any) -> tuple[Array, Array]:
    """The sum, and silu of it, rounded."""
    total = jnp.zeros(inputs[0].shape, jnp.float32)
    for x, weight in zip(inputs, weights, strict=True):
        total += x.astype(jnp.float32) * weight
    return total, (total * jax.nn.sigmoid(total)).astype(dtype).astype(jnp.float32)


def _l2norm_factors(at: _Columns, keys: int, made: Array) -> tuple[Array, Array]:
    """Inverse lengths of rows, 1 for values; and the factor of queries."""
    lengths = jax.lax.rsqrt(jnp.sum(made * made, axis=1) + 1e-6)[:, None]
    one = jnp.ones_like(lengths)
    return at.choose(lengths, lengths, one), at.choose(keys**-0.5 * one, one, one)


def _l2norm_bwd(at: _Columns, keys: int, made: Array, dout: Array) -> Array:
    """The gradient of vectors before their scaling to unit length."""
    factor, scale = _l2norm_factors(at, keys, made)
    along = factor * factor * jnp.sum(dout * made, axis=1)[:, None]
    return (factor * scale) * dout - (factor * scale * along) * made


def make_heads(
    mixed: Float[Array, "B T X"],
    kernel: Float[Array, "E W"],
    segment_ids: Int[Array, "B T"],
    groups: int,
    key_dim: int,
    heads: int,
    before: Float[Array, "B W1 E"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T G K"], Float[Array, "B T G K"], Float[Array, "B T H V"]]:
    """Computes `delta.make_heads`: queries, keys and values in mixed's dtype; reads mixed once.

    With `before` it has no gradient.
    """
    sizes = groups, key_dim, heads, (kernel.shape[0] - 2 * groups * key_dim) // heads
    if before is None:
        found: Any = _convolve_heads(mixed, kernel, segment_ids, sizes, interpret)
        return found
    return _run_forward(mixed, kernel, segment_ids, sizes, interpret, before)


def _run_forward(mixed, kernel, segment_ids, sizes, interpret, *before) -> Any:
    (groups, keys, heads, width), (rows, length, _) = sizes, mixed.shape
    shapes = (groups, keys), (groups, keys), (heads, width)
    return pl.pallas_call(
        functools.partial(_causal_conv1d_fwd, sizes, bool(before)),
        grid=(rows, pl.cdiv(length, _HEAD_ROWS), 2 * groups + heads),
        out_shape=tuple(
            jax.ShapeDtypeStruct((rows, length, *shape), mixed.dtype) for shape in shapes
        ),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(mixed, kernel, segment_ids, *before)


_convolve_heads = jax.custom_vjp(_run_forward, nondiff_argnums=(3, 4))


def _causal_conv1d_fwd(sizes, continues, mixed, kernel, ids, *refs):
    before, outs = (refs[0] if continues else None), refs[continues:]
    groups, keys, _, width = sizes
    at = _locate_columns(groups, keys, width)
    position = at.tile * _HEAD_ROWS + iota(_HEAD_ROWS)
    parts = _load_taps(at, position, mixed, kernel, ids, before)
    _, made = _convolve(*parts, mixed.dtype)
    factor, scale = _l2norm_factors(at, keys, made)
    out = (made * factor * scale).astype(mixed.dtype)
    for to, mine in at.parts(outs, position):
        plgpu.store(to, out, mask=(position < mixed.shape[1])[:, None] & mine)


def _forward(mixed, kernel, segment_ids, sizes, interpret) -> Any:
    return _run_forward(mixed, kernel, segment_ids, sizes, interpret), (mixed, kernel, segment_ids)


def _backward(sizes: Any, interpret: bool, residuals: Any, gradients: Any) -> Any:
    """Computes gradients of each position's sum first; its W inputs share them."""
    mixed, kernel, ids = residuals
    (groups, _, heads, _), (rows, length, _), columns = sizes, mixed.shape, kernel.shape[0]
    spans = pl.cdiv(length, _BACK_SPAN)
    like = jax.ShapeDtypeStruct((rows, length, columns), mixed.dtype)

    def run(body: Any, tiles: int, outs: Any, *inputs: Any) -> Any:
        return pl.pallas_call(
            functools.partial(body, sizes),
            grid=(rows, tiles, 2 * groups + heads),
            out_shape=outs,
            compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
            interpret=interpret,
        )(*inputs)

    dkernel = (rows, spans, kernel.shape[1], columns), jnp.float32
    outs = like, jax.ShapeDtypeStruct(*dkernel)
    dsums, dkernel = run(_causal_conv1d_bwd_sums, spans, outs, mixed, kernel, ids, *gradients)
    tiles = pl.cdiv(length, _HEAD_ROWS)
    (dmixed,) = run(_causal_conv1d_bwd_inputs, tiles, (like,), dsums, kernel, ids)
    dmixed = jnp.pad(dmixed, ((0, 0), (0, 0), (0, mixed.shape[2] - columns)))
    return dmixed, jnp.sum(dkernel, axis=(0, 1)).T.astype(kernel.dtype), None


def _causal_conv1d_bwd_sums(sizes, mixed, kernel, ids, dq, dk, dv, dsums, dkernel):
    """Gradients of the sums at a span of positions, and of the weights from them."""
    groups, keys, _, width = sizes
    at, length = _locate_columns(groups, keys, width), mixed.shape[1]

    def add(step, totals):
        position = at.tile * _BACK_SPAN + step * _BACK_ROWS + iota(_BACK_ROWS)
        inside = (position < length)[:, None]
        inputs, weights = _load_taps(at, position, mixed, kernel, ids)
        total, made = _convolve(inputs, weights, mixed.dtype)
        dsum = at.load((dq, dk, dv), position, inside).astype(jnp.float32)
        dsum = jax.lax.cond(
            at.head < 2 * groups, lambda: _l2norm_bwd(at, keys, made, dsum), lambda: dsum
        )
        gate = jax.nn.sigmoid(total)
        dsum *= gate * (1 + total * (1 - gate))
        to = dsums.at[at.row, position[:, None], at.column[None]]
        plgpu.store(to, dsum.astype(dsums.dtype), mask=inside & at.real)
        pairs = zip(totals, inputs, strict=True)
        return tuple(sums + dsum * x.astype(jnp.float32) for sums, x in pairs)

    zero = jnp.zeros((_BACK_ROWS, at.place.shape[0]), jnp.float32)
    count = kernel.shape[1]
    totals = jax.lax.fori_loop(0, _BACK_SPAN // _BACK_ROWS, add, (zero,) * count)
    real = None if at.real is True else at.real[0]
    for place, sums in enumerate(totals):
        to = dkernel.at[at.row, at.tile, jnp.int32(place), at.column]
        plgpu.store(to, jnp.sum(sums, axis=0), mask=real)


def _causal_conv1d_bwd_inputs(sizes, dsums, kernel, ids, dmixed):
    """Gradients of inputs, from the sums at their position and the next ones of the document."""
    groups, keys, _, width = sizes
    at, reach, length = _locate_columns(groups, keys, width), kernel.shape[1] - 1, ids.shape[1]
    position = at.tile * _HEAD_ROWS + iota(_HEAD_ROWS)
    document = _load_ids(ids, at.row, position)
    total = jnp.zeros((_HEAD_ROWS, at.place.shape[0]), jnp.float32)
    for back in range(reach + 1):
        later = position + back
        known = (later < length) & (_load_ids(ids, at.row, later) == document)
        x = plgpu.load(
            dsums.at[at.row, later[:, None], at.column[None]],
            mask=known[:, None] & at.real,
            other=0.0,
        )
        total += x.astype(jnp.float32) * _load_weight(at, kernel, reach - back)
    to = dmixed.at[at.row, position[:, None], at.column[None]]
    inside = (position < length)[:, None] & at.real
    plgpu.store(to, total.astype(dmixed.dtype), mask=inside)


_convolve_heads.defvjp(_forward, _backward)
