"""Encoders that search: of Q4_K, Q5_K, Q6_K, Q4_0, Q5_0, IQ4_XS and IQ4_NL, in NumPy.

A block of 256 holds groups (eight of 32, or sixteen of 16), each with an integer scale of its own
beside a float16 scale of the whole block; one of Q4_0, Q5_0 and IQ4_NL is a group of 32. Taking the
step from a group's largest value alone would waste a tenth of the precision; so each group tries
several steps, fits scale and minimum by least squares to the integers that each gives, and keeps
the best. The candidates are those of llama.cpp (`make_qkx2_quants`, `make_qx_quants`,
`quantize_row_iq4_nl_impl` in ggml-quants.c), fewer for Q4_0 and Q5_0, for which it searches with an
importance matrix only. It weighs errors by the size of the element, and so do these two here. In
the others they count alike, so that what is minimised is the mean squared error.

Work arrays are float32 `[k, n]`, k elements of each of n groups: sums over a group are then sums of
whole vectors.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, UInt8

from kdjax.formats.codebooks import IQ4

_BLOCK = 256
# Blocks that a search takes at a time: fewer cost more calls, more leave the cache.
_PART = 512
# With fewer blocks a thread, threads cost more than they bring.
_THREAD = 1024
_HALF_MAX, _HALF_NORMAL = 65504.0, 2.0**-14


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b in float64 `[n]`, 0 where b is not above 0."""
    return np.divide(a, b, out=np.zeros(b.shape), where=b > 0, dtype=np.float64)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale in float64 `[n]`, 0 where that is 0."""
    return np.divide(1, scale, out=np.zeros(scale.shape), where=scale != 0)


def _half(value: np.ndarray) -> np.ndarray:
    """`[n]` as float16: the nearest, or, where precision ends, the least of no smaller size.

    The nearest subnormal may be 0, or leave a group beyond the range of its scale. Elsewhere the
    nearest it must be: numbers that were decoded from blocks find their old scale again.
    """
    half = value.astype("<f2")
    size = np.abs(half.astype(np.float64))
    low = (size < np.abs(value)) & (size < _HALF_NORMAL)
    half[low] = np.nextafter(half[low], np.copysign(np.float16(np.inf), half[low]))
    return half


def _round(y: np.ndarray, inverse: np.ndarray, low: int, high: int, out: np.ndarray) -> np.ndarray:
    """`out = clip(round(y * inverse), low, high)`, `inverse` float64 `[n]`, one a group."""
    # Groups too small for an inverse in float32 get integers of 0; their scale would be 0 anyway.
    factors = np.where(np.abs(inverse) < 1e37, inverse, 0).astype(np.float32)
    np.multiply(y, factors, out=out)
    np.rint(out, out=out)
    return np.clip(out, np.float32(low), np.float32(high), out=out)


def _sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums over k of a * b, float64 `[n]`."""
    return np.einsum("kn,kn->n", a, b).astype(np.float64)


def fit_affine(x: np.ndarray, top: int, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset, float64 `[n]`, neither below 0, for x ~ scale * q - offset.

    q runs from 0 to `top`; `steps` lists how many of them the range of x is divided into.
    """
    low = np.minimum(x.min(axis=0), 0)
    y = x - low  # from 0 upwards: sums of y lose no digits to a common offset
    low, span = low.astype(np.float64), y.max(axis=0).astype(np.float64)
    ones = np.ones_like(y)
    k, sum_y = float(len(y)), _sums(y, ones)
    best = np.full(span.shape, np.inf)
    scale, offset = np.zeros_like(span), -low
    q = np.empty_like(y)
    for step in steps:
        _round(y, _divide(np.full_like(span, step), span), 0, top, q)
        sum_q, sum_qq, sum_yq = _sums(q, ones), _sums(q, q), _sums(y, q)
        fit = _divide(k * sum_yq - sum_y * sum_q, k * sum_qq - sum_q * sum_q)
        shift = (sum_y - fit * sum_q) / k
        # The format has no offset that lifts: where the fit wants one, it goes through 0.
        lifts = shift + low > 0
        fit = np.where(lifts, _divide(sum_yq + low * sum_q, sum_qq), fit)
        shift = np.where(lifts, -low, shift)
        # The squared error, less the sum of y * y.
        error = fit * (fit * sum_qq + 2 * (shift * sum_q - sum_yq)) + shift * (
            k * shift - 2 * sum_y
        )
        better = (error < best) & (fit >= 0)
        for kept, new in ((best, error), (scale, fit), (offset, -low - shift)):
            np.copyto(kept, new, where=better)
    return scale, offset


def _extremes(x: np.ndarray) -> np.ndarray:
    """The element of the largest size of each group, the first of several, float64 `[n]`."""
    # A tenth of the time that argmax takes.
    low, high = x.min(axis=0), x.max(axis=0)
    extreme = np.where(high > -low, high, low)
    both = np.flatnonzero(high == -low)
    extreme[both] = x[np.abs(x[:, both]).argmax(axis=0), both]
    return extreme.astype(np.float64)


def _fit_levels(
    x: np.ndarray,
    steps: np.ndarray,
    levels: Callable[[np.ndarray], np.ndarray],
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Scale, float64 `[n]` of either sign, for x ~ scale * level.

    `levels` gives those nearest to x times the inverse of a scale; of each of `steps` it is asked
    what follows if the largest element becomes that. `weights` `[k, n]` are those of the errors.
    """
    weighted = x if weights is None else x * weights
    inverse = _inverse(_extremes(x))
    best, scale = np.full(inverse.shape, -1.0), np.zeros(inverse.shape)
    for step in steps:
        q = levels(step * inverse)
        sum_xq = _sums(weighted, q)
        fit = _divide(sum_xq, _sums(q if weights is None else q * weights, q))
        gain = fit * sum_xq  # the sum of x * x less the squared error
        better = gain > best
        np.copyto(best, gain, where=better)
        np.copyto(scale, fit, where=better)
    return scale


def _fit_whole(
    x: np.ndarray, half: int, steps: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """The same for levels from -half to half - 1."""
    q = np.empty_like(x)
    return _fit_levels(x, steps, lambda inverse: _round(x, inverse, -half, half - 1, q), weights)


def _groups(blocks: np.ndarray, k: int) -> np.ndarray:
    """`[b, elements]` to `[k, b * elements / k]`."""
    return np.ascontiguousarray(blocks.reshape(-1, k).T)


def _integers(x: np.ndarray, scale: np.ndarray, low: int, high: int, b: int) -> np.ndarray:
    """The final q, uint8 `[b, elements]`, from `low` on, for scales as they will be decoded."""
    q = _round(x, _inverse(scale), low, high, np.empty_like(x))
    return (q - low).astype(np.uint8).T.reshape(b, -1)


def _six_bits(scale: np.ndarray, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float16 bytes `[b, 2]`, integers uint8 `[b, 8]` below 64, and their products `[8 b]`."""
    scale = scale.reshape(b, 8)
    d = _half(scale.max(axis=1) / 63)
    exact = d.astype(np.float64)[:, None]
    q = np.rint(np.divide(scale, exact, out=np.zeros_like(scale), where=exact > 0)).clip(0, 63)
    return d.view(np.uint8).reshape(b, 2), q.astype(np.uint8), (exact * q).ravel()


def _signed_scales(scale: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float16 `[b]`, integers from -half to half - 1 `[b, groups]`, and their products.

    The largest scale becomes -half, the one end of the range that its other end lacks.
    """
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    d = _half(largest[:, 0] / -half)
    exact = d.astype(np.float64)[:, None]
    scales = np.divide(scale, exact, out=np.zeros_like(scale), where=exact != 0)
    scales = np.rint(scales).clip(-half, half - 1)
    return d, scales, exact * scales


def _pack_pairs(q: np.ndarray) -> np.ndarray:
    """uint8 below 16, `[b, n]`, to `[b, n / 2]`: neighbours share a byte, the first is low."""
    return q[:, ::2] | (q[:, 1::2] << 4)


def _pack_six_bits(scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """uint8 `[b, 8]` twice to `[b, 12]`, as `get_scale_min_k4` in ggml-quants.c reads them."""
    low = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    high = offsets[:, :4] | (offsets[:, 4:] >> 4 << 6)
    return np.concatenate([low, high, (scales[:, 4:] & 15) | (offsets[:, 4:] << 4)], axis=1)


def _pack_nibbles(q: np.ndarray, group: int) -> np.ndarray:
    """uint8 below 16, `[b, 256]`, to `[b, 128]`: of 2 * group elements the first half is low."""
    halves = q.reshape(len(q), -1, 2, group)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(q), -1)


def _encode_affine(blocks: np.ndarray, top: int, steps: np.ndarray) -> np.ndarray:
    b, x = len(blocks), _groups(blocks, 32)
    scale, offset = fit_affine(x, top, steps)
    d, scales, scale = _six_bits(scale, b)
    dmin, offsets, offset = _six_bits(offset, b)
    q = _integers(x + offset.astype(np.float32), scale, 0, top, b)
    parts = [d, dmin, _pack_six_bits(scales, offsets)]
    if top > 15:
        # Byte i of the fifth bits holds element i of each of the eight groups.
        fifth = (q >> 4).reshape(b, 8, 32)
        parts.append(np.packbits(fifth, axis=1, bitorder="little").reshape(b, 32))
    return np.concatenate([*parts, _pack_nibbles(q & 15, 32)], axis=1)


def _encode_q6_k(blocks: np.ndarray) -> np.ndarray:
    b, x = len(blocks), _groups(blocks, 16)
    scale = _fit_whole(x, 32, _Q6_STEPS).reshape(b, 16)
    d, scales, exact = _signed_scales(scale, 128)
    q = _integers(x, exact.ravel(), -32, 31, b)
    high = (q >> 4).reshape(b, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(high, axis=2).reshape(b, 64)
    scales = scales.astype(np.int8).view(np.uint8)
    parts = [_pack_nibbles(q & 15, 64), high, scales, d.view(np.uint8).reshape(b, 2)]
    return np.concatenate(parts, axis=1)


def _encode_signed(blocks: np.ndarray, half: int) -> np.ndarray:
    x = _groups(blocks, 32)
    # As llama.cpp weighs where all inputs matter alike: of Q4_0 files of a 0.5B, KL 6% less.
    squares = x * x
    weights = np.sqrt(squares + squares.mean(axis=0))
    # Nineteen steps, 0.1 apart, would take 0.05% off the error in twice the time.
    searched = _fit_whole(x, half, -half - 0.3 * np.arange(-3, 4), weights)
    searched = _half(searched.clip(-_HALF_MAX, _HALF_MAX))
    # What `quantize_row_*_ref` takes, where the search loses more: the largest becomes -half.
    d = (_extremes(x) / -half).astype("<f2")
    np.copyto(d, searched, where=_lost(x, searched, half) < _lost(x, d, half))
    q = _integers(x, d.astype(np.float64), -half, half - 1, len(blocks))
    parts = [d.view(np.uint8).reshape(-1, 2)]
    if half > 8:
        parts.append(np.packbits(q >> 4, axis=1, bitorder="little"))
    return np.concatenate([*parts, _pack_nibbles(q & 15, 16)], axis=1)


def _lost(x: np.ndarray, d: np.ndarray, half: int) -> np.ndarray:
    """Squared errors of the groups, float64 `[n]`, once stored with a scale of d, float16."""
    q = _round(x, _inverse(d.astype(np.float64)), -half, half - 1, np.empty_like(x))
    q *= d.astype(np.float32)
    q -= x
    return _sums(q, q)


# The level nearest to each whole number from -128 on.
_PLACES = np.abs(np.arange(-128, 128)[:, None] - IQ4).argmin(axis=1).astype(np.uint8)
_LEVELS = IQ4[_PLACES]
# What the largest element becomes, of its own sign or the other: the levels end at -127 and 113.
_IQ4_STEPS = np.array((*range(-134, -119), 113, 120, 127), np.float64)


def _places(x: np.ndarray, inverse: np.ndarray, buffer: np.ndarray) -> np.ndarray:
    """Where x `[k, n]` times the inverse of its group's scale falls in the table of levels."""
    return (_round(x, inverse, -128, 127, buffer) + 128).astype(np.uint8)


def _fit_iq4(x: np.ndarray) -> np.ndarray:
    """The same for the levels of IQ4."""
    buffer = np.empty_like(x)
    return _fit_levels(x, _IQ4_STEPS, lambda inverse: _LEVELS[_places(x, inverse, buffer)])


def _final_places(x: np.ndarray, scale: np.ndarray, width: int) -> np.ndarray:
    """Places among the levels, uint8 `[b, width]`, for scales as they will be decoded."""
    q = _PLACES[_places(x, _inverse(scale), np.empty_like(x))]
    return q.T.reshape(-1, width)


def _encode_iq4_nl(blocks: np.ndarray) -> np.ndarray:
    x = _groups(blocks, 32)
    d = _half(_fit_iq4(x))
    q = _final_places(x, d.astype(np.float64), 32)
    return np.concatenate([d.view(np.uint8).reshape(-1, 2), _pack_nibbles(q, 16)], axis=1)


def _encode_iq4_xs(blocks: np.ndarray) -> np.ndarray:
    x = _groups(blocks, 32)
    d, scales, exact = _signed_scales(_fit_iq4(x).reshape(-1, 8), 32)
    q = _final_places(x, exact.ravel(), _BLOCK)
    scales = (scales + 32).astype(np.uint16)
    upper = (scales >> 4 << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1, dtype="<u2")
    lower = _pack_pairs((scales & 15).astype(np.uint8))
    parts = [d.view(np.uint8).reshape(-1, 2), upper.view(np.uint8).reshape(-1, 2), lower]
    return np.concatenate([*parts, _pack_nibbles(q, 16)], axis=1)


_Q6_STEPS = -32 - 0.1 * np.arange(-9, 10)
_encode_q4_k = functools.partial(_encode_affine, top=15, steps=15 + 0.1 * np.arange(-10, 11))
_encode_q5_k = functools.partial(_encode_affine, top=31, steps=31 + 0.1 * np.arange(-5, 11))
# Encoder of a type, and the largest value whose scale float16 holds.
_TYPES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "Q4_K": (_encode_q4_k, _HALF_MAX * 63),
    "Q5_K": (_encode_q5_k, _HALF_MAX * 63),
    "Q6_K": (_encode_q6_k, _HALF_MAX * 31 * 127),
    "Q4_0": (functools.partial(_encode_signed, half=8), _HALF_MAX * 8),
    "Q5_0": (functools.partial(_encode_signed, half=16), _HALF_MAX * 16),
    "IQ4_NL": (_encode_iq4_nl, _HALF_MAX * 100),
    "IQ4_XS": (_encode_iq4_xs, _HALF_MAX * 100 * 31),
}
SEARCHED = tuple(_TYPES)


def encode_k(
    blocks: Float32[np.ndarray, "blocks elements"], dtype_name: str
) -> UInt8[np.ndarray, "blocks nbytes"]:
    """Blocks of a type of this file, on all cores; the same bytes whatever their number.

    Raises `FloatingPointError` for values that are not finite or whose scale float16 cannot hold.
    """
    encoder, most = _TYPES[dtype_name]
    if not np.abs(blocks).max(initial=0) <= most:  # a NaN is not, either
        raise FloatingPointError(f"values beyond {most:.4g}")
    size = _BLOCK // blocks.shape[1] * _PART
    parts = [blocks[i : i + size] for i in range(0, len(blocks), size)]
    threads = min(os.cpu_count() or 1, len(blocks) * blocks.shape[1] // (_THREAD * _BLOCK))
    if threads < 2:
        return np.concatenate([encoder(part) for part in parts])
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return np.concatenate(list(pool.map(encoder, parts)))
