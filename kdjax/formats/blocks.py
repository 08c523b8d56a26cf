"""Block codecs: packed bytes to numbers in jnp, inside jit, and numbers to bytes.

A row of a quantized tensor is a run of blocks, each a few scales and low-bit integers; a block
never crosses from one row to the next. Layouts: `ggml-common.h`, arithmetic: `ggml-quants.c`
(https://github.com/ggml-org/llama.cpp/tree/master/ggml/src).
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from kdjax.errors import UserError
from kdjax.formats import codebooks
from kdjax.formats.kquants import (
    ENCODERS,
    Scales,
    encode_blocks,
    fit_scales,
    join_fields,
    lies_beyond,
    quantize_blocks,
)

# Elements that `encode` handles at a time: bounds its temporaries to a few tens of MB.
_ENCODE_ELEMENTS = 1 << 20
_STORED_ELEMENTS = 1 << 24  # likewise for `encode_stored`, which searches for no scales


class Whole(NamedTuple):
    """Numbers as integers, in groups that share a factor and a minimum: factor * q - minimum."""

    q: Array  # int8 or uint8 [..., n]
    factors: Array  # float32 [..., groups]
    minimums: Array | None = None  # likewise; None: 0

    def numbers(self) -> Array:
        """float32 `[..., n]`."""
        q = _shape(self.q, self.factors.shape[-1], -1).astype(jnp.float32)
        x = self.factors[..., None] * q
        x = x if self.minimums is None else x - self.minimums[..., None]
        return x.reshape(self.q.shape)


def _odd_words(*fields: Array) -> Array:
    """Whether a field's word, as float16, is NaN or infinite; False without words."""
    words = [field & 0x7C00 == 0x7C00 for field in fields if field.dtype == jnp.uint16]
    return functools.reduce(jnp.logical_or, words, jnp.zeros((), bool))


class BlockType(NamedTuple):
    """One storage type: what a block holds, in order, and what that means.

    A field of 2 bytes is one word, uint16 `[...]`; any other is uint8 `[..., size]`. `decode` maps
    the fields of a block to its numbers, `Whole` or float32 `[..., elements]`.
    """

    elements: int
    fields: tuple[int, ...]  # sizes in bytes
    ggml: int  # its number in GGUF files, `enum ggml_type` in ggml.h
    decode: Callable[..., Array | Whole]
    group: int = 32  # neighbours that share a factor
    # Maps the fields to whether a number may be NaN or infinite: False only where none is. Of
    # float16 factors within 65504 none is; bf16 words of 2^121 and more are called odd as well.
    may_be_odd: Callable[..., Array] = _odd_words

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return sum(self.fields)

    @property
    def bits(self) -> int:
        """Bits of a number in a block, rounded down; words, which hold factors, do not count."""
        return 8 * sum(size for size in self.fields if size != 2) // self.elements


def _fields(data: Array, shifts: tuple[int, ...], mask: int) -> Array:
    """uint8 `[..., n]` to `[..., len(shifts), n]`: one bit field of each byte per shift."""
    # A broadcast shift fuses into its consumer; stacking the fields would materialise them.
    column = np.array(shifts, np.uint8).reshape((1,) * (data.ndim - 1) + (-1, 1))
    return (data[..., None, :] >> column) & mask


def _shape(data: Array, *sizes: int) -> Array:
    """Splits the last axis into `sizes`."""
    return data.reshape(*data.shape[:-1], *sizes)


def _nibbles(data: Array, group: int) -> Array:
    """uint8 `[..., n]` to `[..., 2n]`: in each `group` bytes all low nibbles, then all high."""
    fields = _fields(_shape(data, data.shape[-1] // group, group), (0, 4), 0x0F)
    return fields.reshape(*data.shape[:-1], 2 * data.shape[-1])


def _quarters(data: Array, group: int = 32) -> Array:
    """uint8 `[..., n]` to `[..., 4n]`: each `group` bytes hold four times as many of two bits."""
    fields = _fields(_shape(data, data.shape[-1] // group, group), (0, 2, 4, 6), 3)
    return fields.reshape(*data.shape[:-1], 4 * data.shape[-1])


def _flatten(data: Array) -> Array:
    """Joins the last two axes."""
    return data.reshape(*data.shape[:-2], -1)


def _along(data: Array, numbers: Sequence[int]) -> Array:
    """The numbers in data's dtype, along a new last axis."""
    return jnp.asarray(np.array(numbers, data.dtype).reshape((1,) * data.ndim + (-1,)))


def _bits(data: Array, shifts: Sequence[int], mask: int) -> Array:
    """Integers `[..., n]` to `[..., n, len(shifts)]`: the bit fields of each integer."""
    return (data[..., None] >> _along(data, shifts)) & mask


def _fifth_bits(data: Array) -> Array:
    """uint8 `[..., 4]`, a little-endian word, to `[..., 32]`: bit i is the fifth of element i."""
    return _bits(data, range(8), 1).reshape(*data.shape[:-1], 32) << 4


def _six_bit_scales(data: Array) -> tuple[Array, Array]:
    """uint8 `[..., 12]` to eight scales and eight minimums of six bits, float32 `[..., 8]`."""
    low, middle, high = data[..., 0:4], data[..., 4:8], data[..., 8:12]
    scales = jnp.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=-1)
    minimums = jnp.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=-1)
    return scales.astype(jnp.float32), minimums.astype(jnp.float32)


def _f32(block: Array) -> Array:
    return lax.bitcast_convert_type(block, jnp.float32)[..., None]


def _f16(word: Array) -> Array:
    """uint16 `[...]` to float32 `[..., 1]`."""
    return lax.bitcast_convert_type(word, jnp.float16).astype(jnp.float32)[..., None]


def _bf16(word: Array) -> Array:
    # By integers: a shift keeps NaN payloads and subnormals, a conversion may not.
    word = word.astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(word, jnp.float32)[..., None]


def _q4_0(d: Array, low: Array) -> Whole:
    return Whole(_nibbles(low, 16).astype(jnp.int8) - 8, _f16(d))


def _q4_1(d: Array, minimum: Array, low: Array) -> Whole:
    return Whole(_nibbles(low, 16), _f16(d), -_f16(minimum))


def _q5_0(d: Array, high: Array, low: Array) -> Whole:
    return Whole((_nibbles(low, 16) | _fifth_bits(high)).astype(jnp.int8) - 16, _f16(d))


def _q5_1(d: Array, minimum: Array, high: Array, low: Array) -> Whole:
    return Whole(_nibbles(low, 16) | _fifth_bits(high), _f16(d), -_f16(minimum))


def _q8_0(d: Array, q: Array) -> Whole:
    return Whole(lax.bitcast_convert_type(q, jnp.int8), _f16(d))


def _scale_and_minimum(d: Array, dmin: Array, scales: Array, q: Array) -> Whole:
    """`d * scale * q - dmin * minimum` for eight groups of 32, as Q4_K and Q5_K share it."""
    # Exact on every backend, fused multiply-add or not: d has 11 significant bits, a scale 6 and
    # q at most 5, so both products fit the 24 of float32 and only the subtraction rounds.
    factors, minimums = _six_bit_scales(scales)
    return Whole(q, _f16(d) * factors, _f16(dmin) * minimums)


def _q4_k(d: Array, dmin: Array, scales: Array, low: Array) -> Whole:
    return _scale_and_minimum(d, dmin, scales, _nibbles(low, 32))


def _q5_k(d: Array, dmin: Array, scales: Array, high: Array, low: Array) -> Whole:
    fifth = _fields(high, tuple(range(8)), 1)
    q = _nibbles(low, 32)
    return _scale_and_minimum(d, dmin, scales, q | (fifth.reshape(q.shape) << 4))


def _q6_k(low: Array, high: Array, scales: Array, d: Array) -> Whole:
    low = _nibbles(low, 64)
    high = _fields(_shape(high, 2, 32), (0, 2, 4, 6), 3)
    q = (low | (high.reshape(low.shape) << 4)).astype(jnp.int8) - 32
    factors = lax.bitcast_convert_type(scales, jnp.int8).astype(jnp.float32)
    return Whole(q, _f16(d) * factors)


def _q2_k(scales: Array, low: Array, d: Array, dmin: Array) -> Whole:
    factors, minimums = _f16(d) * (scales & 15).astype(jnp.float32), _f16(dmin) * (scales >> 4)
    return Whole(_quarters(low), factors, minimums)


def _q3_k(high: Array, low: Array, scales: Array, d: Array) -> Whole:
    q = _quarters(low).astype(jnp.int8)
    third = _fields(high, tuple(range(8)), 1).reshape(q.shape)  # 0 subtracts four
    q = q + (third << 2).astype(jnp.int8) - 4
    factors = _nibbles(scales[..., :8], 8) | (_quarters(scales[..., 8:], 4) << 4)
    return Whole(q, _f16(d) * (factors.astype(jnp.int8) - 32).astype(jnp.float32))


def _trits(data: Array, count: int) -> Array:
    """uint8 `[..., n]` to `[..., count * n]`: first digits in base 3, then second ones.

    A byte holds a fraction of 256. Three times the byte is, in 16 bits, a digit (high byte) and the
    remaining fraction (low byte).
    """
    powers = np.array([3**i for i in range(count)], np.uint8).reshape(
        (1,) * (data.ndim - 1) + (-1, 1)
    )
    digits = ((data[..., None, :] * powers).astype(jnp.uint16) * 3) >> 8
    return digits.reshape(*data.shape[:-1], count * data.shape[-1])


def _tq1_0(low: Array, rest: Array, d: Array) -> Array:
    q = jnp.concatenate([_trits(low[..., :32], 5), _trits(low[..., 32:], 5), _trits(rest, 4)], -1)
    return _f16(d) * (q.astype(jnp.int8) - 1).astype(jnp.float32)


def _tq2_0(low: Array, d: Array) -> Array:
    return _f16(d) * (_quarters(low).astype(jnp.int8) - 1).astype(jnp.float32)


def _q1_0(d: Array, low: Array) -> Whole:
    """A sign a bit: no number is 0."""
    return Whole(_flatten(_bits(low, range(8), 1)).astype(jnp.int8) * 2 - 1, _f16(d))


def _q2_0(d: Array, low: Array) -> Whole:
    return Whole(_flatten(_bits(low, range(0, 8, 2), 3)).astype(jnp.int8) - 1, _f16(d))


def _iq4_nl(d: Array, low: Array) -> Array:
    return _f16(d) * codebooks.look_up(codebooks.IQ4, _nibbles(low, 16))


def _iq4_xs(d: Array, high: Array, scales: Array, low: Array) -> Array:
    scales = _nibbles(scales, 1) | _bits(high, range(0, 16, 2), 3).astype(jnp.uint8) << 4
    factors = _f16(d) * (scales.astype(jnp.int8) - 32).astype(jnp.float32)
    x = codebooks.look_up(codebooks.IQ4, _shape(_nibbles(low, 16), 8, 32))
    return (factors[..., None] * x).reshape(*low.shape[:-1], 256)


def _signed(factors: Array, entries: Array, signs: Array) -> Array:
    """Factors `[..., n]` of equal shares of 256 numbers, below 0 where a sign's bit is set.

    Byte j of the signs, uint8 `[..., 32]`, holds in bit i the sign of number 8 j + i.
    """
    minus = _shape(_flatten(_bits(signs, range(8), 1)), factors.shape[-1], -1)
    x = entries.reshape(minus.shape) * (1 - 2 * minus.astype(jnp.float32))
    return _flatten(factors[..., None] * x)


def _eighth_signs(seven: Array) -> Array:
    """Integers of seven signs to uint8 of eight: minus signs are even in number."""
    seven = seven.astype(jnp.uint8)
    return seven | (lax.population_count(seven) & 1) << 7


def _words(data: Array) -> Array:
    """uint8 `[..., 4n]` to little-endian words, uint32 `[..., n]`."""
    return lax.bitcast_convert_type(_shape(data, -1, 4), jnp.uint32)


def _half_words(data: Array) -> Array:
    """uint8 `[..., 2n]` to little-endian words, uint16 `[..., n]`."""
    return lax.bitcast_convert_type(_shape(data, -1, 2), jnp.uint16)


def _word_factors(d: Array, words: Array, unit: float) -> tuple[Array, Array]:
    """Factor of 32 numbers and signs of each eight, from words of 4 + 4 * 7 bits."""
    factors = _f16(d) * ((words >> 28).astype(jnp.float32) + 0.5) * unit
    return factors, _flatten(_eighth_signs(_bits(words, range(0, 28, 7), 127)))


def _half_factors(d: Array, scales: Array) -> Array:
    """Factors of 16 numbers each, from scales of four bits, as IQ2_XS and IQ2_S have them."""
    return _f16(d) * (_nibbles(scales, 1).astype(jnp.float32) + 0.5) * 0.25


def _iq3_xxs(d: Array, low: Array, high: Array) -> Array:
    factors, signs = _word_factors(d, _words(high), 0.5)
    return _signed(factors, codebooks.look_up(codebooks.IQ3_XXS, low), signs)


def _iq2_xxs(d: Array, low: Array) -> Array:
    words = _shape(low, 8, 8)  # four entries, then factor and signs
    factors, signs = _word_factors(d, _words(_flatten(words[..., 4:])), 0.25)
    entries = codebooks.look_up(codebooks.IQ2_XXS, _flatten(words[..., :4]))
    return _signed(factors, entries, signs)


def _iq2_xs(d: Array, low: Array, scales: Array) -> Array:
    words = _half_words(low)
    entries = codebooks.look_up(codebooks.IQ2_XS, words & 511)
    return _signed(_half_factors(d, scales), entries, _eighth_signs(words >> 9))


def _iq2_s(d: Array, low: Array, signs: Array, high: Array, scales: Array) -> Array:
    top = _flatten(_bits(high, range(0, 8, 2), 3)).astype(jnp.uint16)
    entries = codebooks.look_up(codebooks.IQ2_S, low.astype(jnp.uint16) | top << 8)
    return _signed(_half_factors(d, scales), entries, signs)


def _shifted(factors: Array, index: Array, minus: Array) -> Array:
    """Factors `[..., n]` of equal shares of 32 entries of IQ1, each moved by 1/8 up or down."""
    entries = codebooks.look_up(codebooks.IQ1, index)
    x = entries + jnp.where(minus, -0.125, 0.125)[..., None]
    return _flatten(factors[..., None] * _shape(_flatten(x), factors.shape[-1], -1))


def _iq1_s(d: Array, low: Array, high: Array) -> Array:
    words = _half_words(high)
    top = _flatten(_bits(words, range(0, 12, 3), 7))
    factors = _f16(d) * (2 * (words >> 12 & 7) + 1).astype(jnp.float32)
    minus = jnp.repeat(words >> 15, 4, axis=-1)
    return _shifted(factors, low.astype(jnp.uint16) | top << 8, minus)


def _iq1_m_word(words: Array) -> Array:
    """The float16 of a block: the top four bits of its four words."""
    return jnp.sum((words >> 12) << _along(words[..., 0], range(0, 16, 4)), -1, dtype=jnp.uint16)


def _iq1_m(low: Array, high: Array, scales: Array) -> Array:
    words = _half_words(scales)
    factors = _f16(_iq1_m_word(words)) * (
        2 * _flatten(_bits(words, range(0, 12, 3), 7)) + 1
    ).astype(jnp.float32)
    top = _nibbles(high, 1)
    return _shifted(factors, low.astype(jnp.uint16) | (top & 7).astype(jnp.uint16) << 8, top >> 3)


def _iq3_s(d: Array, low: Array, high: Array, signs: Array, scales: Array) -> Array:
    ninth = _bits(high, range(8), 1).reshape(low.shape).astype(jnp.uint16)
    entries = codebooks.look_up(codebooks.IQ3_S, low.astype(jnp.uint16) | ninth << 8)
    factors = _f16(d) * (1 + 2 * _nibbles(scales, 1)).astype(jnp.float32)
    return _signed(factors, entries, signs)


def _mxfp4(exponent: Array, low: Array) -> Array:
    """Integers times 2^(exponent - 128), as two factors that float32 can both represent."""
    # XLA's CPU backend treats subnormal factors and subnormal results as 0.
    half = exponent >> 1
    powers = [
        lax.bitcast_convert_type((e.astype(jnp.uint32) + 63) << 23, jnp.float32)
        for e in (half, exponent - half)
    ]
    return codebooks.look_up(codebooks.MXFP4, _nibbles(low, 16)) * powers[0] * powers[1]


def _nvfp4(scales: Array, low: Array) -> Array:
    """Integers times half an unsigned E4M3 scale, one for 16 numbers; 0x7F, a NaN, counts as 0."""
    exponent, mantissa = scales >> 3 & 15, (scales & 7).astype(jnp.float32)
    power = (jnp.maximum(exponent, 1).astype(jnp.uint32) + 116) << 23  # 2^(exponent - 11)
    factors = jnp.where(exponent > 0, 8 + mantissa, mantissa)
    factors = factors * lax.bitcast_convert_type(power, jnp.float32)
    factors = jnp.where(scales == 0x7F, 0.0, factors)
    x = codebooks.look_up(codebooks.MXFP4, _shape(_nibbles(low, 8), 4, 16))
    return (factors[..., None] * x).reshape(*low.shape[:-1], 64)


BLOCKS: dict[str, BlockType] = {
    "F32": BlockType(1, (4,), 0, _f32, may_be_odd=lambda x: ~jnp.isfinite(_f32(x))),
    "F16": BlockType(1, (2,), 1, _f16),
    "BF16": BlockType(1, (2,), 30, _bf16),
    "Q4_0": BlockType(32, (2, 16), 2, _q4_0),
    "Q4_1": BlockType(32, (2, 2, 16), 3, _q4_1),
    "Q5_0": BlockType(32, (2, 4, 16), 6, _q5_0),
    "Q5_1": BlockType(32, (2, 2, 4, 16), 7, _q5_1),
    "Q8_0": BlockType(32, (2, 32), 8, _q8_0),
    "Q4_K": BlockType(256, (2, 2, 12, 128), 12, _q4_k),
    "Q5_K": BlockType(256, (2, 2, 12, 32, 128), 13, _q5_k),
    "Q6_K": BlockType(256, (128, 64, 16, 2), 14, _q6_k, 16),
    "Q2_K": BlockType(256, (16, 64, 2, 2), 10, _q2_k, 16),
    "Q3_K": BlockType(256, (32, 64, 12, 2), 11, _q3_k, 16),
    "IQ4_NL": BlockType(32, (2, 16), 20, _iq4_nl),
    "IQ4_XS": BlockType(256, (2, 2, 4, 128), 23, _iq4_xs, may_be_odd=lambda d, *_: _odd_words(d)),
    "IQ3_S": BlockType(256, (2, 64, 8, 32, 4), 21, _iq3_s),
    "IQ3_XXS": BlockType(256, (2, 64, 32), 18, _iq3_xxs),
    "IQ2_S": BlockType(256, (2, 32, 32, 8, 8), 22, _iq2_s, 16),
    "IQ2_XS": BlockType(256, (2, 64, 8), 17, _iq2_xs, 16),
    "IQ2_XXS": BlockType(256, (2, 64), 16, _iq2_xxs),
    "IQ1_M": BlockType(
        256,
        (32, 16, 8),
        29,
        _iq1_m,
        16,
        lambda *fields: _odd_words(_iq1_m_word(_half_words(fields[-1]))),
    ),
    "IQ1_S": BlockType(256, (2, 32, 16), 19, _iq1_s),
    # 12 * 2^(253 - 128) is above float32's range.
    "MXFP4": BlockType(32, (1, 16), 39, _mxfp4, may_be_odd=lambda power, _: power > 252),
    "NVFP4": BlockType(64, (4, 32), 40, _nvfp4, 16),
    "Q1_0": BlockType(128, (2, 16), 41, _q1_0, 128),
    "Q2_0": BlockType(64, (2, 16), 42, _q2_0, 64),
    "TQ1_0": BlockType(256, (48, 4, 2), 34, _tq1_0, 256),
    "TQ2_0": BlockType(256, (64, 2), 35, _tq2_0, 256),
}


def _refuse_integers(*_: Array) -> Array:
    raise UserError("found a tensor of integers; expected numbers. It is no weight of a model.")


# Types of tables, such as the ids of a draft head's vocabulary; no weight has them.
INTEGERS: dict[str, BlockType] = {
    "I64": BlockType(1, (8,), 27, _refuse_integers),
    "BOOL": BlockType(1, (1,), -1, _refuse_integers),  # of safetensors alone
}


def block_type(dtype_name: str) -> BlockType:
    """Looks up a type in `BLOCKS` or `INTEGERS`; raises `UserError` for one that both lack."""
    if dtype_name in INTEGERS:
        return INTEGERS[dtype_name]
    if dtype_name not in BLOCKS:
        raise UserError(
            f"found block type {dtype_name!r}; expected one of {', '.join(BLOCKS)}. "
            "Convert the checkpoint to one of these."
        )
    return BLOCKS[dtype_name]


def row_bytes(dtype_name: str, n: int) -> int:
    """Bytes of a row of `n` elements; raises `UserError` unless they fill complete blocks."""
    block = block_type(dtype_name)
    if n % block.elements:
        raise UserError(
            f"found rows of {n} elements stored as {dtype_name}; expected a multiple of "
            f"{block.elements}, the elements of one block. Choose a type with smaller blocks: "
            "Q8_0, Q5_0 and Q4_0 hold 32, F32, F16 and BF16 one."
        )
    return n // block.elements * block.nbytes


def split(
    raw: UInt8[Array, "*lead row_bytes"] | UInt8[np.ndarray, "*lead row_bytes"], dtype_name: str
) -> tuple[Shaped[Array, "..."], ...]:
    """Splits packed rows into one aligned array for each field of the block; no byte changes.

    A word comes as uint16 `[..., blocks]`, any other field as uint8 `[..., blocks, size]`. Usable
    inside jit. Raises `UserError` for an unknown type or a broken last block.
    """
    block = block_type(dtype_name)
    blocks, rest = divmod(raw.shape[-1], block.nbytes)
    if rest:
        raise UserError(
            f"found rows of {raw.shape[-1]} bytes stored as {dtype_name}; expected a multiple of "
            f"{block.nbytes}, the bytes of one block. Pass full rows, as `TensorTable.raw` does."
        )
    rows = jnp.asarray(raw).reshape(*raw.shape[:-1], blocks, block.nbytes)
    fields, at = [], 0
    for size in block.fields:
        field = rows[..., at : at + size]
        # bitcast consumes a trailing axis of exactly 2 bytes.
        fields.append(lax.bitcast_convert_type(field, jnp.uint16) if size == 2 else field)
        at += size
    return tuple(fields)


def decode_fields(
    fields: Sequence[Array], dtype_name: str, out_dtype: jax.typing.DTypeLike = jnp.float32
) -> Float[Array, "*lead n"]:
    """Decodes what `split` returned to numbers `[..., n]`; usable inside jit.

    Computed in float32 as `dequantize_row_*` in ggml-quants.c does, bit for bit, then cast to
    `out_dtype`.
    """
    found = block_type(dtype_name).decode(*fields)
    values = found.numbers() if isinstance(found, Whole) else found
    return values.reshape(*values.shape[:-2], -1).astype(out_dtype)


def decode(
    raw: UInt8[Array, "*lead row_bytes"] | UInt8[np.ndarray, "*lead row_bytes"],
    dtype_name: str,
    out_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "*lead n"]:
    """Decodes packed rows, uint8 `[..., row_bytes]`, to numbers `[..., n]`."""
    return decode_fields(split(raw, dtype_name), dtype_name, out_dtype)


def _bytes(array: np.ndarray, dtype: str) -> np.ndarray:
    """`[..., n]` as the little-endian bytes of `dtype`, uint8 `[..., n * itemsize]`."""
    return np.ascontiguousarray(array.astype(dtype, copy=False)).view(np.uint8)


def _encode_bf16(rows: np.ndarray) -> np.ndarray:
    bits = rows.view(np.uint32)
    nearest_even = bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))
    # The carry of the rounding would turn a NaN into an infinity or a zero: quiet it instead.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return _bytes(np.where(is_nan, bits | 0x00400000, nearest_even) >> 16, "<u2")


# Types that round each number by itself.
_CASTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda rows: _bytes(rows, "<f4"),
    "F16": lambda rows: _bytes(rows, "<f2"),
    "BF16": _encode_bf16,
}
ENCODED = (*_CASTS, *ENCODERS)


def _encode_part(rows: np.ndarray, dtype_name: str, importance: np.ndarray | None) -> np.ndarray:
    """Blocks `[n, elements]` to bytes `[n, nbytes]`; raises `FloatingPointError`."""
    if dtype_name in _CASTS:
        with np.errstate(over="raise", invalid="raise"):
            return _CASTS[dtype_name](rows)
    if not np.abs(rows).max(initial=0) <= ENCODERS[dtype_name].most:  # a NaN is not, either
        raise FloatingPointError
    columns = [rows] if importance is None else [rows, importance]
    padded = [_pad(column) for column in columns]
    return np.asarray(encode_blocks(padded[0], dtype_name, *padded[1:]))[: len(rows)]


def _pad(blocks: np.ndarray, most: int | None = None) -> np.ndarray:
    """Adds zeros to one of few numbers of blocks, at most `most`: each compiles one program."""
    size = 64
    while size < len(blocks):
        size *= 8
    size = size if most is None else min(size, most)
    return np.pad(blocks, [(0, size - len(blocks))] + [(0, 0)] * (blocks.ndim - 1))


def check_encoded(dtype_name: str) -> None:
    """Raises `UserError` for a type without an encoder."""
    if dtype_name not in ENCODED:
        raise UserError(
            f"found block type {dtype_name!r} to write; expected one of {', '.join(ENCODED)}. "
            "Choose one of these types."
        )


def encode(
    array: Shaped[np.ndarray, "*lead n"],
    dtype_name: str,
    importance: Float[np.ndarray, " n"] | None = None,
) -> UInt8[np.ndarray, "*lead b"]:
    """Numbers `[..., n]` as packed rows, uint8 `[..., row_bytes]`.

    Rounds to nearest as `quantize_row_*_ref` in ggml-quants.c does, bit for bit. Scales of K
    types, IQ types, Q4_0 and Q5_0 come from a search, see `kquants`; `importance`, one number a
    column, weights the squared error that the search minimises.

    Raises `UserError` for a type without an encoder, rows that do not fill complete blocks, and
    values whose float16 form or scale would overflow.
    """
    check_encoded(dtype_name)
    block, n = BLOCKS[dtype_name], array.shape[-1]
    width = row_bytes(dtype_name, n)
    flat = array.reshape(-1, block.elements)
    weights = None
    if importance is not None:
        weights = np.asarray(importance, np.float32).reshape(-1, block.elements)
    out = np.empty((flat.shape[0], block.nbytes), np.uint8)
    step = _ENCODE_ELEMENTS // block.elements
    for start in range(0, flat.shape[0], step):
        part = np.ascontiguousarray(flat[start : start + step], np.float32)
        which = None
        if weights is not None:
            which = weights[np.arange(start, start + len(part)) % len(weights)]
        try:
            out[start : start + step] = _encode_part(part, dtype_name, which)
        except FloatingPointError as error:
            raise UserError(
                f"found values up to {np.abs(part).max():.4g} to store as {dtype_name}; expected "
                "finite values whose float16 form or scale is within 65504. Keep this tensor as "
                "F32 or BF16."
            ) from error
    return out.reshape(*array.shape[:-1], width)


def _as_blocks(x: Array, dtype_name: str) -> Array:
    return _shape(x, -1, BLOCKS[dtype_name].elements)


def _spread(importance: Array | None, x: Array, dtype_name: str) -> Array | None:
    """Importances of the blocks of rows, which they are broadcast to."""
    if importance is None:
        return None
    return _as_blocks(jnp.broadcast_to(importance, x.shape), dtype_name)


def fit_rows(
    x: Float[Array, "*lead n"], dtype_name: str, importance: Float[Array, "... n"] | None = None
) -> Scales:
    """Fits the scales that `encode` would choose for rows; usable inside jit.

    `importance` is broadcast to the rows.
    """
    weights = _spread(importance, x, dtype_name)
    return fit_scales(_as_blocks(x, dtype_name), dtype_name, weights)


def encode_fields(
    x: Float[Array, "*lead n"],
    dtype_name: str,
    scales: Scales,
    importance: Float[Array, "... n"] | None = None,
) -> tuple[Shaped[Array, "..."], ...]:
    """Encodes rows as blocks with given scales, in the fields of `split`; usable inside jit.

    The result is equal on every backend: see `kquants`. `importance`, broadcast to the rows, is for
    a single rounding: it weights what numbers lose that a type rounds together, and is not equal
    everywhere.
    """
    weights = _spread(importance, x, dtype_name)
    return quantize_blocks(_as_blocks(x, dtype_name), dtype_name, scales, weights)


@functools.partial(jax.jit, static_argnames="dtype_name")
def _quantize_part(x: Array, dtype_name: str, scales: Scales) -> tuple[Array, ...]:
    return quantize_blocks(x, dtype_name, scales)


def encode_stored(
    array: Float[np.ndarray, "*lead n"], dtype_name: str, scales: Sequence[np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Encodes arrays on the host as `encode_fields` does, a part of their blocks at a time."""
    x = array.reshape(-1, BLOCKS[dtype_name].elements)
    flat = [scale.reshape(len(x), *scale.shape[array.ndim :]) for scale in scales]
    step = _STORED_ELEMENTS // x.shape[1]
    parts = []
    for i in range(0, len(x), step):
        part, *own = (_pad(column[i : i + step], step) for column in (x, *flat))
        fields = jax.device_get(_quantize_part(part, dtype_name, tuple(own)))
        parts.append([field[: len(x) - i] for field in fields])
    return tuple(
        np.concatenate(field).reshape(*array.shape[:-1], -1, *field[0].shape[1:])
        for field in zip(*parts, strict=True)
    )


def is_cut(
    x: Float[Array, "*lead n"], rounded: Float[Array, "*lead n"], dtype_name: str, scales: Scales
) -> Array:
    """Whether numbers of rows lie outside the range of their scales."""
    numbers, levels = _as_blocks(x, dtype_name), _as_blocks(rounded, dtype_name)
    return lies_beyond(numbers, levels, dtype_name, scales).reshape(x.shape)


def join_rows(fields: Sequence[Array]) -> UInt8[Array, "*lead row_bytes"]:
    """Undoes `split`."""
    raw = join_fields(fields)
    return raw.reshape(*raw.shape[:-2], -1)
