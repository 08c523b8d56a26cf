"""Encoders: numbers to the scales and integers of blocks, in jnp, for files and inside a step.

`fit` finds the scales of a block, `quantize` the integers that belong to given scales, `pack` lays
both out as `blocks.split` does. Scales hold the inverse that `quantize` multiplies by, so that the
integers of given scales are the same on every backend: one product, rounded once.

A block of 256 has groups (eight of 32, or sixteen of 16). Each group has an integer scale, and the
block a float16 scale; a block of Q4_0, Q5_0 and IQ4_NL is one group of 32. A step taken from a
group's largest value alone would waste a tenth of the precision. Therefore each group tries several
steps, fits scale and minimum by least squares to the integers of each step, and keeps the best. The
candidates are llama.cpp's (`make_qkx2_quants`, `make_qx_quants`, `quantize_row_iq4_nl_impl` in
ggml-quants.c), fewer for Q4_0 and Q5_0, for which llama.cpp searches with an importance matrix
only. Q4_0 and Q5_0 weight errors by the size of the element, as llama.cpp does; the other types
minimise the plain mean squared error. An importance (llama.cpp's imatrix) multiplies each squared
error, and scales of groups are then improved in alternation, as for Q2_K and Q3_K in any case.

IQ3_S, IQ3_XXS and IQ2_S round four or eight numbers at once to an entry of a grid (`grids`). Their
groups try several scales with entries near to the nearest; with the scale that is kept, entries are
the nearest ones, by importance if it is given. llama.cpp looks at fewer of them
(`quantize_row_iq3_s_impl`), and weights squares by size without an importance.

Q8_0 and MXFP4, and without an importance Q5_1, take their scale from the largest value, as
`quantize_row_*_ref` does.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8

from kdjax.formats.codebooks import IQ4, MXFP4, look_up
from kdjax.formats.grids import GRIDS, find_nearest, guess

_HALF_MAX, _HALF_NORMAL = 65504.0, 2.0**-14
# Smaller scales have no inverse in float32; they would be 0 in float16 anyway.
_LEAST = 1e-37

# Of blocks: words uint16 [...], integers and inverses [..., groups]; the inverses come last.
Scales = tuple[Array, ...]
Importance = Float[Array, "... elements"] | None


class Joint(NamedTuple):
    """Numbers that a type rounds together, to an entry of a grid."""

    size: int
    # From such numbers `[..., size]` and the inverse of their scale `[..., 1]` to rounded ones.
    round: Callable[[Array, Array], Array]


class Encoder(NamedTuple):
    """How numbers `[..., elements]` become blocks of one type."""

    fit: Callable[[Array, Importance], Scales]
    # To integers uint8 [..., elements], as stored; types with a grid return indices of entries and
    # bytes of signs, and take an importance, too.
    quantize: Callable[..., Any]
    pack: Callable[[Scales, Any], tuple[Array, ...]]  # the fields of `blocks.split`
    most: float  # the largest size of a value that the type can hold
    # The largest distance of a number to its nearest level, in steps.
    reach: float = 0.5
    # Whether an importance changes its scales; others come from the largest value alone.
    weighed: bool = True
    joint: Joint | None = None  # of a type with a grid; `reach` then counts from 0


def _divide(a: Array, b: Array) -> Array:
    """Divides a by b; 0 where b is not above 0."""
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def _inverse(scale: Array) -> Array:
    """Inverts a scale; 0 where the scale is too small for an inverse."""
    fine = jnp.abs(scale) > _LEAST
    return jnp.where(fine, 1 / jnp.where(fine, scale, 1), 0)


def _word(value: Array) -> Array:
    """float16 bits, uint16: the nearest number; for subnormals the next one of no smaller size.

    The nearest subnormal may be 0, or leave a group outside the range of its scale. Other numbers
    must round to nearest, so that numbers decoded from blocks get their old scale again.
    """
    value = jnp.clip(value, -_HALF_MAX, _HALF_MAX)
    word = lax.bitcast_convert_type(value.astype(jnp.float16), jnp.uint16)
    size = jnp.abs(_half(word))
    # Drops the last bits, in which two ways to compute a number may differ.
    low = (size < jnp.abs(value) * (1 - 2.0**-20)) & (size < _HALF_NORMAL)
    return jnp.where(low, word + jnp.uint16(1), word)


def _half(word: Array) -> Array:
    return lax.bitcast_convert_type(word, jnp.float16).astype(jnp.float32)


def _round(x: Array, inverse: Array, low: int, high: int) -> Array:
    """clip(round(x * inverse), low, high), in float32."""
    inverse = jnp.where(jnp.abs(inverse) < 1 / _LEAST, inverse, 0)
    return jnp.clip(jnp.rint(x * inverse), low, high)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _groups(x: Array, k: int) -> Array:
    """`[..., n]` to `[..., n / k, k]`."""
    return x.reshape(*x.shape[:-1], -1, k)


def _flat(x: Array) -> Array:
    """Joins the last two axes."""
    return x.reshape(*x.shape[:-2], -1)


def _first_extreme(x: Array) -> Array:
    """The element of largest size along the last axis, `[..., 1]`; the first of equal ones."""
    return jnp.take_along_axis(x, jnp.argmax(jnp.abs(x), axis=-1, keepdims=True), axis=-1)


def _keep_best(
    steps: Sequence[float] | Sequence[tuple[float, float]] | np.ndarray,
    first: tuple[Array, ...],
    attempt: Callable[[Array], tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Tries each step with `attempt`; keeps the result of least error, its first array."""
    table = jnp.asarray(steps, jnp.float32)

    def body(i: Array, best: tuple[Array, ...]) -> tuple[Array, ...]:
        new = attempt(table[i])
        better = new[0] < best[0]
        return tuple(jnp.where(better, a, b) for a, b in zip(new, best, strict=True))

    return lax.fori_loop(0, len(steps), body, first)


def fit_affine(
    x: Float32[Array, "... k"],
    top: int,
    steps: Sequence[float],
    weights: Float32[Array, "... k"] | None = None,
    cuts: Sequence[float] = (),
) -> tuple[Array, Array]:
    """Fits scale and offset, float32 `[..., 1]`, neither below 0, for x ~ scale * q - offset.

    q runs from 0 to `top`. `steps` lists numbers of steps to divide the range of x into; each is
    tried again with the shares `cuts` of the range's lower end cut off. `weights` multiply the
    squared errors.
    """
    w = jnp.ones_like(x) if weights is None else weights
    low = jnp.minimum(jnp.min(x, axis=-1, keepdims=True), 0)
    y = x - low  # from 0 upwards: sums of y lose no digits to a common offset
    span = jnp.max(y, axis=-1, keepdims=True)
    total, sum_y = _sum(w), _sum(w * y)

    def attempt(choice: Array) -> tuple[Array, ...]:
        start = choice[1] * -low if cuts else 0
        q = _round(y - start, _divide(choice[0], span - start), 0, top)
        sum_q, sum_qq, sum_yq = _sum(w * q), _sum(w * q * q), _sum(w * y * q)
        fit = _divide(total * sum_yq - sum_y * sum_q, total * sum_qq - sum_q * sum_q)
        shift = _divide(sum_y - fit * sum_q, total)
        # The format has no offset below 0: where the fit needs one, it goes through 0.
        lifts = shift + low > 0
        fit = jnp.where(lifts, _divide(sum_yq + low * sum_q, sum_qq), fit)
        shift = jnp.where(lifts, -low, shift)
        error = _sum(w * jnp.square(y - fit * q - shift))
        return jnp.where(fit >= 0, error, jnp.inf), fit, -low - shift

    first = jnp.full(span.shape, jnp.inf), jnp.zeros_like(span), -low
    choices = [(step, cut) for cut in (0.0, *cuts) for step in steps]
    _, scale, offset = _keep_best(choices, first, attempt)
    return scale, offset


def _fit_levels(
    x: Array,
    steps: Sequence[float],
    levels: Callable[[Array, Array], Array],
    weights: Array | None = None,
) -> Array:
    """Fits a scale `[..., 1]` of either sign, for x ~ scale * level.

    `levels` returns the levels nearest to x times the inverse of a scale. Each of `steps` is tried
    as the level of the largest element. `weights` multiply the squared errors.
    """
    w = jnp.ones_like(x) if weights is None else weights
    inverse = _inverse(_first_extreme(x))

    def attempt(step: Array) -> tuple[Array, ...]:
        q = levels(x, step * inverse)
        sum_xq = _sum(w * x * q)
        fit = _divide(sum_xq, _sum(w * q * q))
        return -fit * sum_xq, fit  # the squared error minus the sum of x * x

    first = jnp.full(inverse.shape, jnp.inf), jnp.zeros_like(inverse)
    return _keep_best(steps, first, attempt)[1]


def _fit_whole(x: Array, half: int, steps: Sequence[float], weights: Array | None = None) -> Array:
    """Fits a scale as `_fit_levels` does, for the integers from -half to half - 1."""
    return _fit_levels(x, steps, lambda x, inverse: _round(x, inverse, -half, half - 1), weights)


def _stored_scales(scale: Array, top: int) -> tuple[Array, Array, Array]:
    """Stores scales: a float16 word `[...]`, integers uint8 `[..., groups]`, and their products."""
    d = _word(jnp.max(scale, axis=-1) / top)
    exact = _half(d)[..., None]
    q = jnp.clip(jnp.rint(_divide(scale, exact)), 0, top)
    return d, q.astype(jnp.uint8), exact * q


def _signed_scales(scale: Array, half: int) -> tuple[Array, Array, Array]:
    """Stores scales: a float16 word `[...]`, integers int8 `[..., groups]`, and their products.

    Integers run from -half to half - 1; the largest scale becomes -half, since half is missing.
    """
    d = _word(_first_extreme(scale)[..., 0] / -half)
    exact = _half(d)[..., None]
    q = jnp.where(exact != 0, scale / jnp.where(exact != 0, exact, 1), 0)
    q = jnp.clip(jnp.rint(q), -half, half - 1)
    return d, q.astype(jnp.int8), exact * q


def _weigh(k: int, importance: Importance) -> Array | None:
    return None if importance is None else _groups(importance, k)


def _integers(x: Array, inverse: Array, low: int, high: int) -> Array:
    """Computes q - low, uint8 `[..., n]`, with the inverse scale of each group."""
    k = x.shape[-1] // inverse.shape[-1]
    q = _round(_groups(x, k), inverse[..., None], low, high)
    return _flat((q - low).astype(jnp.uint8))


def _shift(scales: Scales, k: int) -> Array:
    """Offset of affine types before the product: float16 times an integer, exact."""
    _, dmin, _, offsets, _ = scales
    offset = _half(dmin)[..., None] * offsets.astype(jnp.float32)
    return jnp.repeat(offset, k, axis=-1)


# ---- layout of bits


def _pack_nibbles(q: Array, group: int) -> Array:
    """Packs uint8 below 16 to `[..., n / 2]`: of 2 * group elements the first half is low."""
    halves = q.reshape(*q.shape[:-1], -1, 2, group)
    return _flat(halves[..., 0, :] | (halves[..., 1, :] << 4))


def _gather_bits(q: Array, width: int) -> Array:
    """Integers `[..., n, m]` to uint8 `[..., m]`: n of `width` bits each, the first lowest."""
    shifts = np.arange(0, q.shape[-2] * width, width, dtype=np.uint8)
    column = shifts.reshape((1,) * (q.ndim - 2) + (-1, 1))
    return jnp.bitwise_or.reduce(q.astype(jnp.uint8) << column, axis=-2)


def _top_bits(q: Array, bit: int) -> Array:
    """Bytes `[..., 4]`, a little-endian word: bit i belongs to element i of 32."""
    return _gather_bits(_groups((q >> bit) & 1, 8).swapaxes(-1, -2), 1)


def _pack_six_bits(scales: Array, offsets: Array) -> Array:
    """uint8 `[..., 8]` twice to `[..., 12]`, as `get_scale_min_k4` in ggml-quants.c reads them."""
    low = scales[..., :4] | (scales[..., 4:] >> 4 << 6)
    high = offsets[..., :4] | (offsets[..., 4:] >> 4 << 6)
    rest = (scales[..., 4:] & 15) | (offsets[..., 4:] << 4)
    return jnp.concatenate([low, high, rest], axis=-1)


# ---- the types


# Neighbours that a group's scale and minimum are compared with, and the number of rounds.
_AROUND = np.array([(i, j) for i in (0, -1, 1) for j in (0, -1, 1)], np.float32)
_ROUNDS = 3
# Shares of a group's negative range that its levels may leave out, if little weight lies there.
_CUTS_16, _CUTS_32 = (0.2, 0.4, 0.6), (0.1, 0.2)


def _fit_block(x: Array, w: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """A block's scale d and minimum e by weighted least squares of x ~ d a + e b."""
    aa, ab, bb, ax, bx = (
        jnp.sum(w * u * v, axis=(-2, -1)) for u, v in ((a, a), (a, b), (b, b), (a, x), (b, x))
    )
    solvable = _divide(aa * bb - ab * ab, aa * bb) > 1e-4
    det = jnp.where(solvable, aa * bb - ab * ab, 1)
    d = jnp.where(solvable, (bb * ax - ab * bx) / det, _divide(ax, aa))
    return d, jnp.where(solvable, (aa * bx - ab * ax) / det, 0)


def _search_affine(
    x: Array,
    importance: Importance,
    k: int,
    top: int,
    most: int,
    steps: Sequence[float],
    cuts: Sequence[float],
) -> Scales:
    """Searches scales and minimums of groups of `k`, integers up to `most`, in alternation.

    Scales of few bits lose as much as the integers do. After each group is searched by itself,
    its scale and minimum are compared with their neighbours, and the block's float16 scale and
    minimum are fitted again to the chosen integers.
    """
    groups, w = _groups(x, k), _weigh(k, importance)
    scale, offset = fit_affine(groups, top, steps, w, cuts)
    w = jnp.ones_like(groups) if w is None else w
    d, q_scale, _ = _stored_scales(scale[..., 0], most)
    dmin, q_offset, _ = _stored_scales(offset[..., 0], most)
    s, m = (q.astype(jnp.float32)[..., None] for q in (q_scale, q_offset))

    def errors(d: Array, dmin: Array, s: Array, m: Array) -> tuple[Array, Array]:
        factor, shift = _half(d)[..., None, None] * s, _half(dmin)[..., None, None] * m
        q = _round(groups + shift, _inverse(factor), 0, top)
        return _sum(w * jnp.square(factor * q - shift - groups)), q

    def turn(_: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        d, dmin, s, m = found

        def attempt(move: Array) -> tuple[Array, ...]:
            near = jnp.clip(s + move[0], 0, most), jnp.clip(m + move[1], 0, most)
            return errors(d, dmin, *near)[0], *near

        first = jnp.full(s.shape, jnp.inf), s, m
        error, s, m = _keep_best(_AROUND, first, attempt)
        q = errors(d, dmin, s, m)[1]
        new, low = _fit_block(groups, w, s * q, -jnp.broadcast_to(m, q.shape))
        fits = (new > 0) & (low >= 0)
        new_d, new_dmin = jnp.where(fits, _word(new), d), jnp.where(fits, _word(low), dmin)
        better = jnp.sum(errors(new_d, new_dmin, s, m)[0], axis=(-2, -1)) < jnp.sum(
            error, axis=(-2, -1)
        )
        return jnp.where(better, new_d, d), jnp.where(better, new_dmin, dmin), s, m

    d, dmin, s, m = lax.fori_loop(0, _ROUNDS, turn, (d, dmin, s, m))
    q_scale, q_offset = (q[..., 0].astype(jnp.uint8) for q in (s, m))
    return d, dmin, q_scale, q_offset, _inverse(_half(d)[..., None] * s[..., 0])


_Q5_STEPS = (31.0, *(31 + 0.1 * np.arange(-5, 11)))


def _affine(top: int, steps: Sequence[float]) -> Encoder:
    """Q4_K and Q5_K: eight groups of 32 with scale and minimum of six bits."""

    def fit(x: Array, importance: Importance) -> Scales:
        if importance is not None:
            return _search_affine(x, importance, 32, top, 63, steps, _CUTS_32)
        scale, offset = fit_affine(_groups(x, 32), top, steps)
        d, q_scale, exact = _stored_scales(scale[..., 0], 63)
        dmin, q_offset, _ = _stored_scales(offset[..., 0], 63)
        return d, dmin, q_scale, q_offset, _inverse(exact)

    def quantize(x: Array, scales: Scales) -> Array:
        return _integers(x + _shift(scales, 32), scales[-1], 0, top)

    def pack(scales: Scales, q: Array) -> tuple[Array, ...]:
        d, dmin, q_scale, q_offset, _ = scales
        # Byte i of the fifth bits holds element i of each of the eight groups.
        fifth = (_gather_bits(_groups(q >> 4, 32), 1),) if top > 15 else ()
        return d, dmin, _pack_six_bits(q_scale, q_offset), *fifth, _pack_nibbles(q & 15, 32)

    return Encoder(fit, quantize, pack, _HALF_MAX * 63)


_Q2_STEPS = (3.0, *(2.5 + 0.1 * np.arange(16)))


def _fit_q2_k(x: Array, importance: Importance) -> Scales:
    """Sixteen groups of 16 with scale and minimum of four bits."""
    return _search_affine(x, importance, 16, 3, 15, _Q2_STEPS, _CUTS_16)


def _pack_q2_k(scales: Scales, q: Array) -> tuple[Array, ...]:
    d, dmin, q_scale, q_offset, _ = scales
    low = _gather_bits(q.reshape(*q.shape[:-1], 2, 4, 32), 2)
    return q_scale | q_offset << 4, _flat(low), d, dmin


def _search_signed(
    x: Array, importance: Importance, half: int, most: int, steps: Sequence[float]
) -> Scales:
    """Sixteen groups of 16, each with a scale from -most to most - 1, improved in alternation."""
    groups, w = _groups(x, 16), _weigh(16, importance)
    scale = _fit_whole(groups, half, steps, w)
    w = jnp.ones_like(groups) if w is None else w
    d, q_scale, _ = _signed_scales(scale[..., 0], most)

    def errors(d: Array, s: Array) -> tuple[Array, Array]:
        factor = _half(d)[..., None, None] * s
        q = _round(groups, _inverse(factor), -half, half - 1)
        return _sum(w * jnp.square(factor * q - groups)), q

    def turn(_: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        d, s = found

        def attempt(move: Array) -> tuple[Array, ...]:
            near = jnp.clip(s + move, -most, most - 1)
            return errors(d, near)[0], near

        error, s = _keep_best((0.0, -1.0, 1.0), (jnp.full(s.shape, jnp.inf), s), attempt)
        a = s * errors(d, s)[1]
        new = jnp.sum(w * a * groups, axis=(-2, -1)), jnp.sum(w * a * a, axis=(-2, -1))
        new_d = jnp.where(new[1] > 0, _word(_divide(*new)), d)
        after = jnp.sum(errors(new_d, s)[0], axis=(-2, -1))
        return jnp.where(after < jnp.sum(error, axis=(-2, -1)), new_d, d), s

    start = d, q_scale.astype(jnp.float32)[..., None]
    d, s = lax.fori_loop(0, _ROUNDS, turn, start)
    return d, s[..., 0].astype(jnp.int8), _inverse(_half(d)[..., None] * s[..., 0])


_Q3_STEPS = tuple(-4 - 0.1 * np.arange(-9, 10))


def _fit_q3_k(x: Array, importance: Importance) -> Scales:
    return _search_signed(x, importance, 4, 32, _Q3_STEPS)


def _pack_q3_k(scales: Scales, q: Array) -> tuple[Array, ...]:
    d, q_scale, _ = scales
    high = _gather_bits(_groups(q >> 2, 32), 1)
    low = _gather_bits((q & 3).reshape(*q.shape[:-1], 2, 4, 32), 2)
    six = (q_scale + 32).astype(jnp.uint8)
    upper = _gather_bits(_groups(six >> 4, 4), 2)
    return high, _flat(low), jnp.concatenate([_pack_nibbles(six & 15, 8), upper], axis=-1), d


_Q6_STEPS = tuple(-32 - 0.1 * np.arange(-9, 10))


def _fit_q6_k(x: Array, importance: Importance) -> Scales:
    if importance is not None:
        return _search_signed(x, importance, 32, 128, _Q6_STEPS)
    scale = _fit_whole(_groups(x, 16), 32, _Q6_STEPS)
    d, q, exact = _signed_scales(scale[..., 0], 128)
    return d, q, _inverse(exact)


def _pack_q6_k(scales: Scales, q: Array) -> tuple[Array, ...]:
    d, q_scale, _ = scales
    high = _gather_bits((q >> 4).reshape(*q.shape[:-1], 2, 4, 32), 2)
    bits = lax.bitcast_convert_type(q_scale, jnp.uint8)
    return _pack_nibbles(q & 15, 64), _flat(high), bits, d


# Nineteen steps, 0.1 apart, would reduce the error by 0.05% in twice the time.
_SIGNED_STEPS = tuple(-0.3 * np.arange(-3, 4))


def _signed(half: int) -> Encoder:
    """Q4_0 and Q5_0: a scale of either sign, and integers from -half to half - 1."""

    def lose(x: Array, d: Array, weights: Array) -> Array:
        """Squared errors `[..., 1]` of blocks stored with the scale d, a float16 word."""
        scale = _half(d)
        return _sum(weights * jnp.square(_round(x, _inverse(scale), -half, half - 1) * scale - x))

    def fit(x: Array, importance: Importance) -> Scales:
        # llama.cpp's weights without an importance: they lower the KL of a 0.5B's Q4_0 file by 6%.
        squares = x * x
        weights = jnp.sqrt(squares + jnp.mean(squares, axis=-1, keepdims=True))
        plain = jnp.ones_like(x) if importance is None else importance
        steps = [-half + step for step in _SIGNED_STEPS]
        searched = _word(_fit_whole(x, half, steps, weights * plain))
        # The scale of `quantize_row_*_ref`, if the search lost more: the largest becomes -half.
        nearest = (_first_extreme(x) / -half).astype(jnp.float16)
        nearest = lax.bitcast_convert_type(nearest, jnp.uint16)
        better = lose(x, searched, plain) < lose(x, nearest, plain)
        d = jnp.where(better, searched, nearest)
        return d[..., 0], _inverse(_half(d))

    def quantize(x: Array, scales: Scales) -> Array:
        return _integers(x, scales[-1], -half, half - 1)

    def pack(scales: Scales, q: Array) -> tuple[Array, ...]:
        fifth = (_top_bits(q, 4),) if half > 8 else ()
        return scales[0], *fifth, _pack_nibbles(q & 15, 16)

    return Encoder(fit, quantize, pack, _HALF_MAX * half)


# For each level the first integer, from -127 to 127, that is nearer to it than to the one before.
_BOUNDS = tuple(
    int(np.argmax(np.abs(np.arange(-128, 128)[:, None] - IQ4).argmin(axis=1) == place)) - 128
    for place in range(1, 16)
)
# Levels tried for the largest element, of either sign: the levels end at -127 and 113.
_IQ4_STEPS = (*map(float, range(-134, -119)), 113.0, 120.0, 127.0)
_IQ4_REACH = 12.5  # levels are at most 25 apart


def _places(x: Array, inverse: Array) -> Array:
    """Index, uint8, of the level nearest to x times the inverse of its group's scale."""
    q = _round(x, inverse, -128, 127)
    return sum(((q >= bound).astype(jnp.uint8) for bound in _BOUNDS), jnp.zeros(q.shape, jnp.uint8))


def _levels(x: Array, inverse: Array) -> Array:
    q = _round(x, inverse, -128, 127)
    level = jnp.full(q.shape, IQ4[0])
    for bound, rise in zip(_BOUNDS, np.diff(IQ4), strict=True):
        level += jnp.where(q >= bound, rise, 0)
    return level


def _quantize_iq4(x: Array, scales: Scales) -> Array:
    return _flat(_places(_groups(x, 32), scales[-1][..., None]))


def _fit_iq4_nl(x: Array, importance: Importance) -> Scales:
    d = _word(_fit_levels(x, _IQ4_STEPS, _levels, importance))
    return d[..., 0], _inverse(_half(d))


def _fit_iq4_xs(x: Array, importance: Importance) -> Scales:
    scale = _fit_levels(_groups(x, 32), _IQ4_STEPS, _levels, _weigh(32, importance))
    d, q, exact = _signed_scales(scale[..., 0], 32)
    return d, q, _inverse(exact)


def _pack_iq4_xs(scales: Scales, q: Array) -> tuple[Array, ...]:
    d, q_scale, _ = scales
    unsigned = (q_scale + 32).astype(jnp.uint8)
    shifts = np.arange(0, 16, 2, dtype=np.uint16).reshape((1,) * (q.ndim - 1) + (-1,))
    upper = jnp.bitwise_or.reduce((unsigned >> 4).astype(jnp.uint16) << shifts, axis=-1)
    return d, upper, _pack_nibbles(unsigned & 15, 1), _pack_nibbles(q, 16)


# A half, and the error of 127 steps once their scale is rounded to float16.
_INEXACT_REACH = 0.57


def _exactly(number: float) -> Array:
    """A divisor that XLA does not replace by its inverse, which is another number."""
    return lax.optimization_barrier(jnp.float32(number))


def _fit_q8_0(x: Array, importance: Importance) -> Scales:
    d = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _exactly(127.0)
    word = lax.bitcast_convert_type(d.astype(jnp.float16), jnp.uint16)
    return word[..., 0], _inverse(d)


def _quantize_q8_0(x: Array, scales: Scales) -> Array:
    # C's roundf takes halves away from zero.
    q = lax.round(x * scales[-1], lax.RoundingMethod.AWAY_FROM_ZERO)
    return lax.bitcast_convert_type(jnp.clip(q, -128, 127).astype(jnp.int8), jnp.uint8)


def _fit_q5_1(x: Array, importance: Importance) -> Scales:
    """The range of the numbers; with an importance a searched one, where that loses less."""
    low = jnp.min(x, axis=-1, keepdims=True)
    d = (jnp.max(x, axis=-1, keepdims=True) - low) / _exactly(31.0)
    words = [lax.bitcast_convert_type(v.astype(jnp.float16), jnp.uint16) for v in (d, low)]
    if importance is not None:
        # The search's minimum is never above 0, where the range may lie.
        scale, offset = fit_affine(x, 31, _Q5_STEPS, importance, _CUTS_32)
        found = [_word(scale), _word(-offset)]

        def lose(words: Sequence[Array], d: Array, low: Array) -> Array:
            q = _quantize_q5_1(x, (low, _inverse(d)))
            step, least = map(_half, words)
            return _sum(importance * jnp.square(step * q + least - x))

        whole, searched = (words, d, low), (found, *map(_half, found))
        better = lose(*searched) < lose(*whole)
        words, d, low = jax.tree.map(lambda a, b: jnp.where(better, a, b), searched, whole)
    return *(word[..., 0] for word in words), low, _inverse(d)


def _quantize_q5_1(x: Array, scales: Scales) -> Array:
    *_, low, inverse = scales
    q = lax.round((x - low) * inverse, lax.RoundingMethod.AWAY_FROM_ZERO)
    return jnp.clip(q, 0, 31).astype(jnp.uint8)


# Midpoints of neighbours in FP4, doubled as in `codebooks.MXFP4`; midpoints round down in size.
_MXFP4_BOUNDS = tuple(float(x) for x in (MXFP4[:7] + MXFP4[1:8]) / 2)


def _fit_mxfp4(x: Array, importance: Importance) -> Scales:
    most = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), jnp.float32(2.0**-125))
    exponent = (lax.bitcast_convert_type(most, jnp.uint32) >> 23).astype(jnp.int32) - 2
    exponent = exponent.astype(jnp.uint8)
    return exponent, _power(128 - jnp.maximum(exponent.astype(jnp.int32), 2))


def _power(exponent: Array) -> Array:
    """2^exponent, float32, from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _quantize_mxfp4(x: Array, scales: Scales) -> Array:
    # 2^(128 - exponent) as two factors that float32 can both represent.
    power = 128 - scales[0].astype(jnp.int32)
    half = power >> 1
    sizes = jnp.abs(x)
    for part in (half, power - half):
        sizes *= _power(part)
    q = sum(
        ((sizes > bound).astype(jnp.uint8) for bound in _MXFP4_BOUNDS),
        jnp.zeros(x.shape, jnp.uint8),
    )
    return q | ((x < 0) & (q > 0)).astype(jnp.uint8) << 3


# Shares of a grid's largest level that are tried as the level of a group's largest number.
_GRID_STEPS = np.linspace(0.7, 1.35, 14)


def _signs(x: Array, even: bool, weights: Importance = None) -> Array:
    """The sign of each number, 1 or -1; with `even`, -1 is even in number among each eight.

    Where it is odd, the number that loses least has the wrong sign.
    """
    signs = jnp.where(x < 0, -1.0, 1.0)
    if not even:
        return signs
    lost = _groups(jnp.abs(x) if weights is None else weights * x * x, 8)
    odd = jnp.sum(_groups(x, 8) < 0, axis=-1, keepdims=True) % 2 == 1
    places = np.arange(8).reshape((1,) * (lost.ndim - 1) + (8,))
    least = places == jnp.argmin(lost, axis=-1, keepdims=True)
    return jnp.where(_flat(odd & least), -signs, signs)


def _gridded(
    name: str, k: int, unit: float, half: float, pack: Callable[..., Any], even: bool = False
) -> Encoder:
    """Types with a grid: groups of `k`, whose factor is d * unit * (2 * q + 1), q of four bits.

    `half` is half a step between levels.
    """
    grid = GRIDS[name]

    def fit(x: Array, importance: Importance) -> Scales:
        weights = jnp.ones_like(x) if importance is None else importance
        w = _groups(weights, k)
        sizes = _groups(x * _signs(x, even, weights), k)
        inverse = _inverse(jnp.max(jnp.abs(sizes), axis=-1, keepdims=True))

        def attempt(step: Array) -> tuple[Array, ...]:
            level = guess(sizes * (step * inverse), name)
            product = _sum(w * sizes * level)
            found = _divide(product, _sum(w * level * level))
            return -found * product, found  # the squared error minus the sum of squares

        first = jnp.full(inverse.shape, jnp.inf), jnp.zeros_like(inverse)
        scale = jnp.maximum(_keep_best(_GRID_STEPS * grid.top, first, attempt)[1][..., 0], 0)
        d = _word(jnp.max(scale, axis=-1) / (31 * unit))
        least = _half(d)[..., None] * unit
        q = jnp.clip(jnp.rint((_divide(scale, least) - 1) / 2), 0, 15)
        return d, q.astype(jnp.uint8), _inverse(least * (2 * q + 1))

    def find(x: Array, inverse: Array, importance: Importance) -> tuple[Array, Array]:
        inverse = jnp.where(inverse < 1 / _LEAST, inverse, 0)
        signs = _signs(x, even, importance)
        sizes = _flat(_groups(x * signs, x.shape[-1] // inverse.shape[-1]) * inverse[..., None])
        return find_nearest(sizes, name, importance), signs

    def quantize(x: Array, scales: Scales, importance: Importance = None) -> tuple[Array, Array]:
        index, signs = find(x, scales[-1], importance)
        return index, _top_bits((signs < 0).astype(jnp.uint8), 0)

    def round_joint(x: Array, inverse: Array) -> Array:
        index, signs = find(x, inverse, None)
        return look_up(grid.entries, index).reshape(x.shape) * signs * _inverse(inverse)

    joint = Joint(8 if even else grid.size, round_joint)
    return Encoder(
        fit, quantize, pack, _HALF_MAX * 31 * unit * grid.top, grid.top + half, joint=joint
    )


def _pack_iq3_s(scales: Scales, found: tuple[Array, Array]) -> tuple[Array, ...]:
    (d, q, _), (index, signs) = scales, found
    return d, index.astype(jnp.uint8), _top_bits(index, 8), signs, _pack_nibbles(q, 1)


def _pack_iq3_xxs(scales: Scales, found: tuple[Array, Array]) -> tuple[Array, ...]:
    (d, q, _), (index, signs) = scales, found
    # The eighth sign follows from the seven others.
    seven = _groups(signs & 127, 4).astype(jnp.uint32)
    shifts = np.arange(0, 28, 7, dtype=np.uint32).reshape((1,) * (seven.ndim - 1) + (-1,))
    words = jnp.bitwise_or.reduce(seven << shifts, axis=-1) | q.astype(jnp.uint32) << 28
    return d, index.astype(jnp.uint8), _flat(lax.bitcast_convert_type(words, jnp.uint8))


def _pack_iq2_s(scales: Scales, found: tuple[Array, Array]) -> tuple[Array, ...]:
    (d, q, _), (index, signs) = scales, found
    high = _gather_bits(_groups(index >> 8, 4).swapaxes(-1, -2), 2)
    return d, index.astype(jnp.uint8), signs, high, _pack_nibbles(q, 1)


ENCODERS: dict[str, Encoder] = {
    "Q2_K": Encoder(
        _fit_q2_k,
        lambda x, scales: _integers(x + _shift(scales, 16), scales[-1], 0, 3),
        _pack_q2_k,
        _HALF_MAX * 15,
    ),
    "Q3_K": Encoder(
        _fit_q3_k,
        lambda x, scales: _integers(x, scales[-1], -4, 3),
        _pack_q3_k,
        _HALF_MAX * 3 * 31,
    ),
    # The full range first: of candidates with equal error the first is taken.
    "Q4_K": _affine(15, (15.0, *(15 + 0.1 * np.arange(-10, 11)))),
    "Q5_K": _affine(31, _Q5_STEPS),
    "Q6_K": Encoder(
        _fit_q6_k,
        lambda x, scales: _integers(x, scales[-1], -32, 31),
        _pack_q6_k,
        _HALF_MAX * 31 * 127,
    ),
    "Q4_0": _signed(8),
    "Q5_0": _signed(16),
    "IQ4_NL": Encoder(
        _fit_iq4_nl,
        _quantize_iq4,
        lambda scales, q: (scales[0], _pack_nibbles(q, 16)),
        _HALF_MAX * 100,
        _IQ4_REACH,
    ),
    "IQ4_XS": Encoder(_fit_iq4_xs, _quantize_iq4, _pack_iq4_xs, _HALF_MAX * 100 * 31, _IQ4_REACH),
    "IQ3_S": _gridded("IQ3_S", 32, 1.0, 1.0, _pack_iq3_s),
    "IQ3_XXS": _gridded("IQ3_XXS", 32, 0.25, 5.0, _pack_iq3_xxs, even=True),
    "IQ2_S": _gridded("IQ2_S", 16, 0.125, 9.0, _pack_iq2_s),
    "Q8_0": Encoder(
        _fit_q8_0,
        _quantize_q8_0,
        lambda scales, q: (scales[0], q),
        _HALF_MAX * 127,
        _INEXACT_REACH,
        weighed=False,
    ),
    "Q5_1": Encoder(
        _fit_q5_1,
        _quantize_q5_1,
        lambda scales, q: (*scales[:2], _top_bits(q, 4), _pack_nibbles(q & 15, 16)),
        _HALF_MAX,
        _INEXACT_REACH,
    ),
    "MXFP4": Encoder(
        _fit_mxfp4,
        _quantize_mxfp4,
        lambda scales, q: (scales[0], _pack_nibbles(q, 16)),
        float(np.finfo(np.float32).max),
        2.0,
        weighed=False,
    ),
}
WEIGHED = {dtype for dtype, encoder in ENCODERS.items() if encoder.weighed}


def _cast(dtype_name: str) -> jax.typing.DTypeLike | None:
    return {"F16": jnp.float16, "BF16": jnp.bfloat16}.get(dtype_name)


def fit_scales(
    x: Float32[Array, "*lead elements"], dtype_name: str, importance: Importance = None
) -> Scales:
    """Fits the scales of blocks; none for a type that rounds each number by itself."""
    if _cast(dtype_name):
        return ()
    return ENCODERS[dtype_name].fit(x, None if importance is None else _lift(importance))


def _lift(importance: Array) -> Array:
    """Raises importances to a millionth of their block's mean; a block of zeros to 1.

    A group of zeros has no best scale: fitted to nothing, its numbers were twice as far off as
    zeros. Its scale now fits its own numbers, and does not move the scales of other groups.
    """
    mean = jnp.mean(importance, axis=-1, keepdims=True)
    return jnp.where(mean > 1e-20, jnp.maximum(importance, 1e-6 * mean), 1)


def quantize_blocks(
    x: Float32[Array, "*lead elements"],
    dtype_name: str,
    scales: Scales,
    importance: Importance = None,
) -> tuple[Array, ...]:
    """Makes the fields of blocks with these scales, as `blocks.split` returns them.

    `importance` weights the errors of numbers that are rounded together.
    """
    if cast := _cast(dtype_name):
        return (lax.bitcast_convert_type(x[..., 0].astype(cast), jnp.uint16),)
    encoder = ENCODERS[dtype_name]
    if encoder.joint is None or importance is None:
        return encoder.pack(scales, encoder.quantize(x, scales))
    return encoder.pack(scales, encoder.quantize(x, scales, _lift(importance)))


def lies_beyond(
    x: Float32[Array, "*lead elements"],
    rounded: Float32[Array, "*lead elements"],
    dtype_name: str,
    scales: Scales,
) -> Array:
    """Whether numbers of blocks lie outside the range of their scales, so that they were cut."""
    if _cast(dtype_name):
        return jnp.zeros(x.shape, bool)
    inverse, encoder = scales[-1], ENCODERS[dtype_name]
    far = jnp.abs(x - rounded if encoder.joint is None else x)
    steps = _groups(far, x.shape[-1] // inverse.shape[-1])
    beyond = steps * jnp.abs(inverse)[..., None] > 1.001 * encoder.reach
    return beyond.reshape(x.shape)


@functools.partial(jax.jit, static_argnames="dtype_name")
def encode_blocks(
    x: Float32[Array, "blocks elements"], dtype_name: str, importance: Importance = None
) -> UInt8[Array, "blocks nbytes"]:
    """Makes the bytes of blocks, with the scales that fit best."""
    scales = fit_scales(x, dtype_name, importance)
    fields = quantize_blocks(x, dtype_name, scales, importance)
    return join_fields(fields)


def join_fields(fields: Sequence[Array]) -> UInt8[Array, "*lead nbytes"]:
    """Joins fields to the bytes of blocks: the inverse of `blocks.split`."""
    parts = [
        lax.bitcast_convert_type(field, jnp.uint8) if field.dtype == jnp.uint16 else field
        for field in fields
    ]
    return jnp.concatenate(parts, axis=-1)
