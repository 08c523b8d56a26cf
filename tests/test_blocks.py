"""Block codecs against gguf-py, the reference implementation in Python, and ggml's own in C."""

import ctypes
import os
import re
from functools import partial
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import cases

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.blocks import BLOCKS, Whole, decode, encode, row_bytes, split
from kdjax.formats.kquants import ENCODERS, fit_scales
from scripts.bench.ggml import make_rounding, open_ggml
from scripts.bench.synthetic import random_blocks

DECODE = jax.jit(decode, static_argnums=(1, 2))
ENCODED = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "MXFP4")  # without a search


THEIRS = ("Q1_0", "Q2_0")  # gguf-py decodes neither: ggml's own functions judge


def ggml():
    """The library that xllamacpp brings."""
    pytest.importorskip("xllamacpp")
    return open_ggml()


def reference(raw, dtype):
    if dtype in THEIRS:
        decode_theirs = getattr(ggml(), f"dequantize_row_{dtype.lower()}")
        decode_theirs.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        raw, block = np.ascontiguousarray(raw), BLOCKS[dtype]
        out = np.empty((*raw.shape[:-1], raw.shape[-1] // block.nbytes * block.elements), "f4")
        decode_theirs(raw.ctypes.data, out.ctypes.data, out.size)
        return out
    kind = gguf.GGMLQuantizationType[dtype]
    with np.errstate(all="ignore"):  # arbitrary bytes hold infinities and NaN
        return gguf.quants.dequantize(raw, kind)


def bits(array):
    return np.asarray(array).view(np.uint32)


def arbitrary_rows(rng, dtype, rows=24, elements=768):
    return rng.integers(0, 256, (rows, row_bytes(dtype, elements)), np.uint8)


def test_the_table_agrees_with_gguf_py():
    for name, block in BLOCKS.items():
        if name in THEIRS:
            continue
        kind = gguf.GGMLQuantizationType[name]
        assert kind.value == block.ggml
        assert gguf.GGML_QUANT_SIZES[kind] == (block.elements, block.nbytes)


@pytest.mark.slow
def test_the_table_has_the_bits_of_a_number_and_those_that_share_a_factor():
    """Bits as in the type's name; groups as its decoder or its encoder shares factors."""
    others = {"IQ2_XS": 16, "IQ2_XXS": 32, "IQ1_S": 32, "IQ1_M": 16, "NVFP4": 16}
    others |= {"TQ1_0": 256, "TQ2_0": 256}
    for name, block in BLOCKS.items():
        if block.elements == 1:
            continue
        assert block.bits == int(re.search(r"\d", name)[0]), name
        fields = split(np.zeros((1, block.nbytes), np.uint8), name)
        found = jax.eval_shape(block.decode, *fields)
        if isinstance(found, Whole):
            expected = block.elements // found.factors.shape[-1]
        elif name in ENCODERS:
            scales = fit_scales(jnp.ones((1, block.elements), jnp.float32), name)
            expected = block.elements // scales[-1].shape[-1]
        else:
            expected = others.pop(name)
        assert block.group == expected, name
    assert not others


def test_the_table_agrees_with_ggml():
    library = ggml()
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    for name, block in BLOCKS.items():
        assert library.ggml_type_name(block.ggml).decode().upper() == name
        sizes = library.ggml_blck_size(block.ggml), library.ggml_type_size(block.ggml)
        assert sizes == (block.elements, block.nbytes)


@pytest.mark.parametrize("dtype", BLOCKS)
def test_decode_is_bit_exact_under_jit(dtype, rng):
    blocks = 3 * 768 // BLOCKS[dtype].elements
    valid = random_blocks(rng, dtype, blocks, 0.02).reshape(3, -1)
    got = jax.jit(partial(decode, dtype_name=dtype))(valid)
    assert got.dtype == jnp.float32 and got.shape == (3, 768)
    np.testing.assert_array_equal(bits(got), bits(reference(valid, dtype)))


@pytest.mark.parametrize("dtype", [name for name in BLOCKS if name not in THEIRS])
def test_decode_is_bit_exact_on_arbitrary_bytes(dtype, rng):
    check_on_arbitrary_bytes(dtype, rng)


@pytest.mark.parametrize("dtype", THEIRS)
def test_decode_is_ggmls_on_arbitrary_bytes(dtype, rng):
    check_on_arbitrary_bytes(dtype, rng)


def check_on_arbitrary_bytes(dtype, rng):
    raw = arbitrary_rows(rng, dtype)
    got, expected = DECODE(raw, dtype), reference(raw, dtype)
    if dtype == "MXFP4":  # a power of two down to 2^-128; XLA's CPU backend makes subnormals 0
        expected[np.abs(expected) < np.finfo(np.float32).tiny] *= 0
    number = ~np.isnan(expected)  # of a NaN only the payload may differ
    assert number.mean() > 0.8
    np.testing.assert_array_equal(bits(got)[number], bits(expected)[number])
    np.testing.assert_array_equal(np.isnan(got), ~number)


@pytest.mark.parametrize("dtype", BLOCKS)
def test_blocks_of_odd_numbers_are_known_by_their_factors(dtype, rng):
    """None is missed of arbitrary bytes, and none is named of a file's."""

    def look(raw):
        rows = raw.reshape(-1, BLOCKS[dtype].nbytes)
        odd = ~np.isfinite(DECODE(rows, dtype)).all(axis=-1)
        found = np.asarray(BLOCKS[dtype].may_be_odd(*split(rows, dtype))).reshape(-1)
        return odd, np.broadcast_to(found, odd.shape)

    odd, found = look(arbitrary_rows(rng, dtype, 300))
    assert (found | ~odd).all() and odd.any() == (dtype != "NVFP4")
    for scale in (0.02, 60.0):
        assert not np.any(look(random_blocks(rng, dtype, 768, scale)))


@pytest.mark.parametrize("dtype", BLOCKS)
def test_decode_keeps_leading_axes_and_casts_last(dtype, rng):
    raw = random_blocks(rng, dtype, 6 * 256 // BLOCKS[dtype].elements, 1.0).reshape(2, 3, -1)
    got, exact = DECODE(jnp.asarray(raw), dtype, jnp.bfloat16), DECODE(raw, dtype, jnp.float32)
    assert got.shape == (2, 3, 256) and got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))
    np.testing.assert_array_equal(DECODE(raw[1, 2], dtype, jnp.float32), exact[1, 2])


def test_q4_k_by_hand():
    block = np.zeros(144, np.uint8)
    block[0:2] = np.array([2.0], np.float16).view(np.uint8)
    block[2:4] = np.array([0.5], np.float16).view(np.uint8)
    block[4] = 3  # scale of group 0
    block[8] = 10  # minimum of group 0
    block[4 + 1] = 0b11 << 6  # high bits of the scale of group 5
    block[12 + 1] = 0x0F  # its low bits
    block[16] = 0x07  # element 0 of group 0
    block[16 + 64] = 0x90  # element 0 of group 5
    got = np.asarray(DECODE(block, "Q4_K"))
    assert got[0] == 2.0 * 3 * 7 - 0.5 * 10
    assert got[1] == -5.0
    assert got[5 * 32] == 2.0 * 63 * 9


def test_q6_k_by_hand():
    block = np.zeros(210, np.uint8)
    block[208:210] = np.array([0.25], np.float16).view(np.uint8)
    block[192] = 0x100 - 4  # scale of elements 0-15: -4
    block[0], block[128] = 0x0F, 0x03  # q of element 0: all six bits
    got = np.asarray(DECODE(block, "Q6_K"))
    assert got[0] == 0.25 * -4 * (63 - 32)
    assert got[1] == 0.25 * -4 * -32


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 300.0])
@pytest.mark.parametrize("dtype", ENCODED)
def test_encode_equals_the_reference(dtype, scale, rng):
    array = (rng.standard_normal((5, 7, 96)) * scale).astype(np.float32)
    array[0, 0] = 0.0  # a block without a scale
    # Halves, where roundings differ: of the values, and after division by Q8_0's scale, 1 here.
    array[1] = np.round(2 * array[1]) / 2
    array[3, 0, :32] = [127, *(np.arange(31) - 15.5)]
    array[2, 3, :32] = -array[2, 3, :32].max()
    got = encode(array, dtype)
    assert got.dtype == np.uint8 and got.shape == (5, 7, row_bytes(dtype, 96))
    with np.errstate(over="ignore"):
        expected = gguf.quants.quantize(array, gguf.GGMLQuantizationType[dtype])
    np.testing.assert_array_equal(got, expected.view(np.uint8))


@pytest.mark.parametrize("dtype", ["Q8_0", "Q5_0", "Q4_0"])
def test_encode_takes_scales_without_an_inverse_for_zero(dtype):
    array = np.full((1, 32), 1e-38, np.float32)  # 127 / 1e-38 is beyond float32
    assert not np.asarray(decode(encode(array, dtype), dtype)).any()


def test_encode_works_in_parts(rng, monkeypatch):
    array = rng.standard_normal((11, 64)).astype(np.float32)
    whole = {dtype: encode(array, dtype) for dtype in ENCODED}
    monkeypatch.setattr("kdjax.formats.blocks._ENCODE_ELEMENTS", 96)
    for dtype in ENCODED:
        np.testing.assert_array_equal(encode(array, dtype), whole[dtype])


def test_encode_accepts_other_floats_and_any_layout(rng):
    array = rng.standard_normal((64, 8)).astype(np.float16).T
    np.testing.assert_array_equal(decode(encode(array, "F16"), "F16"), array.astype(np.float32))
    np.testing.assert_array_equal(encode(array.astype(np.float64), "F16"), encode(array, "F16"))


def test_bfloat16_rounds_to_even_and_keeps_nan():
    array = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.nan, -np.inf, 3.4e38], np.float32)
    got = np.asarray(decode(encode(array, "BF16"), "BF16"))
    expected = np.array([1, 1 + 2**-6, np.nan, -np.inf, np.inf], np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q5_1"])
def test_row_bytes(dtype):
    assert row_bytes(dtype, 64) == 2 * BLOCKS[dtype].nbytes
    with pytest.raises(UserError, match=rf"rows of 65 elements stored as {dtype}.*multiple of 32"):
        row_bytes(dtype, 65)


def test_q3_k_by_hand():
    block = np.zeros(110, np.uint8)
    block[108:110] = np.array([0.5], np.float16).view(np.uint8)
    block[96:108] = 0xAA  # all scales 0b101010 less 32: 10
    block[0] = 0b1  # the third bit of element 0, which takes no 4 off
    block[32] = 0b11
    got = np.asarray(DECODE(block, "Q3_K"))
    assert got[0] == 0.5 * 10 * 3 and got[1] == 0.5 * 10 * -4


def test_iq4_xs_by_hand():
    block = np.zeros(136, np.uint8)
    block[0:2] = np.array([0.25], np.float16).view(np.uint8)
    block[2] = 0b10 << 2  # high bits of the scale of group 1
    block[4] = 0x5 << 4  # its low bits: 37 less 32
    block[8 + 16] = 0xF0  # elements 0 and 16 of group 1
    got = np.asarray(DECODE(block, "IQ4_XS"))
    assert got[32] == 0.25 * 5 * -127 and got[48] == 0.25 * 5 * 113
    assert got[0] == 0.25 * -32 * -127


def test_iq3_s_by_hand():
    block = np.zeros(110, np.uint8)
    block[0:2] = np.array([2.0], np.float16).view(np.uint8)
    block[2 + 63] = 0xFF  # the last four elements: entry 511, 7 2 6 1 of 15, 5, 13, 3
    block[66 + 7] = 0x80
    block[74 + 31] = 0x80  # the very last is below 0
    block[106 + 3] = 0x30  # scale of group 7: 2 * 3 + 1
    got = np.asarray(DECODE(block, "IQ3_S"))
    assert got[:4].tolist() == [2.0] * 4
    last = reference(block[None], "IQ3_S")[0, -4:]
    np.testing.assert_array_equal(got[-4:], last)
    assert got[-1] < 0 < got[-2] and got[-1] % 14 == 0


def test_iq1_m_by_hand():
    block = np.zeros(56, np.uint8)
    block[49::2] = (0x00, 0x00, 0x80, 0x30)  # 0x3800, a nibble in each word: 0.5
    block[55] |= 0b1110  # scale of the last 16: 7, so that the factor is 15
    block[30], block[47] = 1, 0x08  # entry 1 of 2,048, moved down
    got = np.asarray(DECODE(block, "IQ1_M"))
    assert got[:8].tolist() == [0.5 * (-1 + 0.125)] * 8
    assert got[240:248].tolist() == [7.5 * (x - 0.125) for x in (1, *[-1] * 7)]


def test_iq2_xxs_by_hand():
    block = np.zeros(66, np.uint8)
    block[0:2] = np.array([8.0], np.float16).view(np.uint8)
    block[58] = 1  # the last 32: the first entry has 43 in front
    block[62:66] = np.array([3 << 28 | 0b1], "<u4").view(np.uint8)  # first and eighth below 0
    got = np.asarray(DECODE(block, "IQ2_XXS"))
    assert got[:8].tolist() == [8 * 0.5 * 0.25 * 8] * 8
    assert got[224:232].tolist() == [-7 * 43, *[7 * 8] * 6, -7 * 8]


def test_q1_0_and_q2_0_by_hand():
    block = np.zeros(18, np.uint8)
    block[0:2] = np.array([0.5], np.float16).view(np.uint8)
    block[2], block[17] = 0b00000010, 0xC0
    got = np.asarray(DECODE(block, "Q1_0"))
    assert got[:3].tolist() == [-0.5, 0.5, -0.5] and got[-3:].tolist() == [-0.5, 0.5, 0.5]
    block[2] = 0b11100100  # 0, 1, 2, 3, the lowest bits first
    got = np.asarray(DECODE(block, "Q2_0"))
    assert got[:5].tolist() == [-0.5, 0, 0.5, 1, -0.5] and got[-1] == 1


@pytest.mark.parametrize("dtype", cases("IQ2_S", "Q8_0", slow=["IQ1_S", "IQ2_XXS", "IQ3_S"]))
def test_stacks_are_rounded_by_ggmls_encoder(dtype, rng):
    """Errors are as few bits make them; an importance lowers the ones that it weighs."""
    pytest.importorskip("xllamacpp")
    rounding, x = make_rounding(), jnp.asarray(rng.standard_normal((2, 3, 512), np.float32))
    importance = np.ones((2, 1, 512), np.float32)
    importance[0, 0, ::3] = 100
    got, weighed = np.asarray(rounding(x, dtype)), np.asarray(rounding(x, dtype, importance))
    bits = 8 * BLOCKS[dtype].nbytes / BLOCKS[dtype].elements
    assert got.shape == x.shape
    assert 1.2 * 2**-bits < np.linalg.norm(got - x) / np.linalg.norm(x) < 2.0 * 2**-bits or (
        dtype == "Q8_0"
    )
    np.testing.assert_array_equal(rounding(x[:, 1:2], dtype)[:, 0], got[:, 1])
    if dtype != "Q8_0":
        lost, least = (np.abs((y - x)[0, :, ::3]).mean() for y in (got, weighed))
        assert least < 0.9 * lost


def test_errors_say_what_fits():
    with pytest.raises(UserError, match=r"rows of 896 elements stored as Q4_K.*256.*Q8_0"):
        row_bytes("Q4_K", 896)
    with pytest.raises(
        UserError, match=r"'Q8_1'.*expected one of F32, F16, .*, MXFP4, NVFP4, Q1_0, Q2_0, TQ1_0"
    ):
        row_bytes("Q8_1", 256)
    with pytest.raises(UserError, match=r"rows of 145 bytes stored as Q4_K.*multiple of 144"):
        decode(np.zeros((2, 145), np.uint8), "Q4_K")
    with pytest.raises(UserError, match=r"'Q4_1' to write.*F32, F16, BF16, .*Q8_0, .*MXFP4"):
        encode(np.zeros((1, 256), np.float32), "Q4_1")


@pytest.mark.parametrize("dtype", ["F16", "Q8_0", "Q4_0"])
def test_encode_refuses_what_float16_cannot_hold(dtype):
    array = np.full((1, 32), 1e8, np.float32)
    with pytest.raises(UserError, match=rf"1e\+08 to store as {dtype}.*65504"):
        encode(array, dtype)


@pytest.mark.skipif("KDJAX_MODELS" not in os.environ, reason="KDJAX_MODELS names no folder")
def test_real_files_decode_like_gguf_py():
    paths = sorted(Path(os.environ["KDJAX_MODELS"]).glob("*.gguf"))
    assert paths
    for path in paths:
        table, seen = open_table(path), set()
        assert (
            len(table.metadata["tokenizer.ggml.tokens"]) == table.info("token_embd.weight").shape[0]
        )
        for name in table:
            info = table.info(name)
            if info.dtype in seen:
                continue
            seen.add(info.dtype)
            raw = table.raw(name)[:512]
            expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[info.dtype])
            np.testing.assert_array_equal(decode(raw, info.dtype), expected)


def test_rows_of_super_blocks_take_whole_blocks():
    """Q4_K and Q6_K rows of 1 to 1024 elements: 144 and 210 bytes a block of 256, or refused."""
    for name, nbytes in (("Q4_K", 144), ("Q6_K", 210)):
        for elements in range(1, 1024 + 1):
            if elements % 256:
                with pytest.raises(UserError, match="multiple of 256"):
                    row_bytes(name, elements)
            else:
                assert row_bytes(name, elements) == elements // 256 * nbytes


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half_float_survives_decoding_and_encoding(name):
    """All 65536 words but NaNs, whose payload may change."""
    words = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    numbers = np.asarray(decode(words.view(np.uint8), name))
    finite = np.isfinite(numbers)
    assert finite.sum() > 60000
    again = encode(np.where(finite, numbers, 0), name).view(np.uint16)
    np.testing.assert_array_equal(again[finite], words[finite])
