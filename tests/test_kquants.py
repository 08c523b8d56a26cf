"""Encoders that search: what they promise of any block, and how near they come on ordinary ones.

llama.cpp's own encoder, on real tensors, is the measure of `scripts/checks/llama_cpp.py`.
"""

import gguf
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import cases

from kdjax.errors import UserError
from kdjax.formats import blocks, codebooks, grids
from kdjax.formats.blocks import encode, row_bytes
from scripts.bench.ggml import make_encoder

TYPES = ("Q4_K", "Q5_K", "Q6_K")
LIMITS = {"Q4_K": 65504 * 63, "Q5_K": 65504 * 63, "Q6_K": 65504 * 31 * 127}
SIGNED = {"Q4_0": 8, "Q5_0": 16}  # one scale, and integers from minus this on
# Types with a grid, and the relative errors of normal numbers.
GRIDDED = {"IQ3_S": 0.135, "IQ3_XXS": 0.185, "IQ2_S": 0.25}
SLOWER_GRIDS = [dtype for dtype in GRIDDED if dtype != "IQ3_XXS"]
EXAMPLES = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)


def decoded(raw, dtype):
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])


def there_and_back(array, dtype):
    raw = encode(array, dtype)
    assert raw.shape == (*array.shape[:-1], row_bytes(dtype, array.shape[-1]))
    return decoded(raw, dtype)


def relative(x, y):
    return np.linalg.norm(np.float64(x) - y) / np.linalg.norm(np.float64(x))


def bound(x, dtype):
    """The most an element of each block may be off, `[blocks, 1]`, in float64.

    Half a step of the integers, widened because a fit may leave a group's ends outside; the
    rounding of scale and offset to the block's six bits (eight for Q6_K, whose largest of the other
    sign is cut); and what float16 cannot
    tell from 0, as often as the integers multiply it.
    """
    groups = np.float64(x).reshape(len(x), -1, 16 if dtype == "Q6_K" else 32)
    if dtype == "Q6_K":
        most = np.abs(groups).max(axis=(1, 2))
        return (most * (1.0 / 31 + 32 / 31 / 128) + 32 * 2**-24)[:, None]
    top = 15 if dtype == "Q4_K" else 31
    low = np.minimum(groups.min(axis=2), 0)
    span, offset = (groups.max(axis=2) - low).max(axis=1), -low.min(axis=1)
    return (1.2 * span / top + 1.3 * span / 126 + offset / 126 + (top + 1) * 2**-24)[:, None]


finite = st.floats(-1.0, 1.0, width=32)


@st.composite
def any_blocks(draw):
    """A few blocks over the whole range of exponents, some groups of another size than others."""
    x = draw(hnp.arrays(np.float32, (2, 256), elements=finite, fill=st.just(np.float32(0))))
    exponents = draw(hnp.arrays(np.int8, (2, 16), elements=st.integers(-12, 0)))
    whole = draw(st.integers(-30, 20))
    shift = draw(st.sampled_from([0.0, 0.0, 1.0, -1.0]))
    return np.ldexp(x + np.float32(shift), np.repeat(exponents, 16, 1) + whole).astype(np.float32)


@pytest.mark.parametrize("dtype", cases("Q4_K", "Q6_K", slow=["Q5_K"]))
@hypothesis.given(x=any_blocks())
@EXAMPLES
def test_any_block_decodes_within_the_bound_of_its_scale(dtype, x):
    error = np.abs(np.float64(x) - there_and_back(x, dtype))
    assert (error <= bound(x, dtype)).all(), (error / bound(x, dtype)).max()


def no_worse_than_gguf_py(x, dtype):
    """Squared errors of blocks of 32 against those of gguf-py's own encoder, in float64."""
    blocks = x.reshape(-1, 32)
    with np.errstate(all="ignore"):  # of inverses of blocks that are too small to have one
        theirs = gguf.quants.quantize(blocks, gguf.GGMLQuantizationType[dtype])
    lost = [
        np.square(np.float64(blocks) - decoded(raw, dtype)).sum(axis=1)
        for raw in (encode(blocks, dtype), theirs)
    ]
    # What float32 sums cannot tell apart.
    return bool((lost[0] <= lost[1] * (1 + 1e-5)).all())


@pytest.mark.parametrize("dtype", SIGNED)
@hypothesis.given(x=any_blocks())
@EXAMPLES
def test_no_block_loses_more_than_by_the_reference(dtype, x):
    assert no_worse_than_gguf_py(x / np.float32(16), dtype)  # the largest have a float16 scale


@pytest.mark.parametrize("dtype", SIGNED)
def test_blocks_of_every_sort_lose_no_more_and_most_less(dtype, rng):
    half = SIGNED[dtype]
    x = rng.standard_t(4, (512, 32)).astype(np.float32)
    x[0], x[1], x[2] = 0, 3e-2, -700  # nothing, and constants
    x[3] = 0
    x[3, 7] = 50  # alone
    x[4:20, 9] = 40  # an outlier
    x[20:36] *= 1e-7  # scales among float16's subnormals, or 0
    x[36] = 1e-38
    x[37:40] *= 0.9999 * half * 65504 / np.abs(x[37:40]).max(axis=1, keepdims=True)
    assert no_worse_than_gguf_py(x, dtype)
    ours = relative(x[40:], there_and_back(x[40:], dtype))
    theirs = gguf.quants.quantize(x[40:], gguf.GGMLQuantizationType[dtype])
    assert ours < 0.98 * relative(x[40:], decoded(theirs, dtype))


@pytest.mark.parametrize("dtype", SIGNED)
def test_numbers_of_a_file_come_back(dtype, rng):
    """All of llama.cpp's blocks, since their largest is at the end of the range, and ours."""
    x = rng.standard_normal((64, 1024)).astype(np.float32) * np.float32(0.02)
    theirs = decoded(gguf.quants.quantize(x, gguf.GGMLQuantizationType[dtype]), dtype)
    np.testing.assert_array_equal(there_and_back(theirs, dtype), theirs)
    ours = there_and_back(x, dtype)
    np.testing.assert_array_equal(there_and_back(ours, dtype), ours)


@pytest.mark.parametrize("dtype", SIGNED)
def test_scales_beyond_float16_are_refused(dtype):
    x = np.ones((2, 32), np.float32)
    for value in (1.01 * SIGNED[dtype] * 65504, np.inf, -np.inf, np.nan):
        x[1, 5] = value
        with pytest.raises(UserError, match=rf"to store as {dtype}.*65504"):
            encode(x, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_zeros_are_zero_bytes(dtype):
    assert not there_and_back(np.zeros((3, 512), np.float32), dtype).any()


@pytest.mark.parametrize("value", [1.0, -1.0, 3e-2, -700.0])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_constant_comes_back(dtype, value):
    x = np.full((2, 256), value, np.float32)
    np.testing.assert_allclose(there_and_back(x, dtype), x, rtol=2e-3)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_the_format_can_say_exactly_stays(dtype, rng):
    """Blocks whose integers and scales are whole numbers, the largest scale in use."""
    low, high = {"Q4_K": (0, 15), "Q5_K": (0, 31), "Q6_K": (-32, 31)}[dtype]
    k, top = (16, -128) if dtype == "Q6_K" else (32, 63)
    q = rng.integers(low, high + 1, (8, 256 // k, k))
    q[..., 0], q[..., 1] = low, high
    scales = rng.integers(1, 64, (8, 256 // k, 1))
    scales[:, 0] = top
    x = (q * scales).reshape(8, 256).astype(np.float32)
    np.testing.assert_array_equal(there_and_back(x, dtype), x)


@pytest.mark.parametrize("dtype, most", [("Q4_K", 0.075), ("Q5_K", 0.038), ("Q6_K", 0.018)])
def test_normal_weights_lose_as_little_as_they_must(dtype, most, rng):
    x = rng.standard_normal((64, 1024)).astype(np.float32)
    for scale in (1e-3, 1.0, 100.0):
        y = there_and_back(x * np.float32(scale), dtype)
        assert relative(x * np.float32(scale), y) < most


# The errors of llama.cpp's `ggml_quantize_chunk` on numbers of this kind, as of llama-cpp-python
# 0.3.36: normal, and Student's t of 4 degrees.
LEVELS = {"IQ4_NL": (0.0761, 0.0933), "IQ4_XS": (0.0767, 0.0942)}


@pytest.mark.parametrize("dtype", LEVELS)
def test_levels_lose_no_more_than_llama_cpps(dtype, rng):
    drawn = rng.standard_normal((64, 1024)), rng.standard_t(4, (64, 1024))
    for most, x in zip(LEVELS[dtype], drawn, strict=True):
        for scale in (1e-3, 1.0, -100.0):
            y = np.float32(x * scale)
            assert relative(y, there_and_back(y, dtype)) < most


@pytest.mark.parametrize("dtype", ["IQ4_NL", "IQ4_XS"])
def test_levels_that_a_block_has_come_back(dtype, rng):
    """The largest scale is the one that float16 and six bits hold exactly."""
    levels = codebooks.IQ4[rng.integers(0, 16, (4, 8, 32))]
    levels[..., 0], levels[..., 1] = -127, 113
    x = np.float32(levels * np.float32(-0.5)).reshape(4, 256)
    np.testing.assert_array_equal(there_and_back(x, dtype), x)
    assert not there_and_back(np.zeros((2, 256), np.float32), dtype).any()
    for value in (1e9, np.inf, np.nan):
        x[0, 5] = value
        with pytest.raises(UserError, match=rf"to store as {dtype}.*65504"):
            encode(x, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_search_beats_the_plain_step(dtype, rng):
    x = rng.standard_t(4, (32, 1024)).astype(np.float32)
    searched = relative(x, there_and_back(x, dtype))
    if dtype == "Q6_K":
        largest = np.take_along_axis(g := x.reshape(-1, 16), abs(g).argmax(1)[:, None], 1)
        scale = (largest / -32).reshape(-1, 16)
        d = np.take_along_axis(scale, abs(scale).argmax(1)[:, None], 1) / -128
        scale = np.float16(d) * np.rint(scale / np.float16(d)).clip(-128, 127)
        q = np.rint(x.reshape(-1, 16, 16) / scale[..., None]).clip(-32, 31)
        plain = (q * scale[..., None]).reshape(x.shape)
    else:
        top = 15 if dtype == "Q4_K" else 31
        groups = x.reshape(-1, 32)
        low = np.minimum(groups.min(axis=1, keepdims=True), 0)
        scale = (groups.max(axis=1, keepdims=True) - low) / top
        plain = (np.rint((groups - low) / scale) * scale + low).reshape(x.shape)
    assert searched < 0.99 * relative(x, plain)


@pytest.mark.parametrize("dtype", TYPES)
def test_an_outlier_costs_its_own_group_only(dtype, rng):
    x = rng.standard_normal((4, 256)).astype(np.float32)
    x[:, 40] = 50.0
    error = np.abs(x - there_and_back(x, dtype))
    assert (error[:, 40] < 2.0).all()
    assert error[:, 64:].max() < 0.5


@pytest.mark.parametrize("dtype", TYPES)
def test_subnormal_scales_lose_precision_and_not_the_block(dtype, rng):
    x = (rng.standard_normal((4, 256)) * 3e-6).astype(np.float32)
    assert relative(x, there_and_back(x, dtype)) < 0.2
    assert not there_and_back(np.full((1, 256), 1e-40, np.float32), dtype).any()


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_values_fit_and_larger_ones_are_refused(dtype):
    x = np.zeros((1, 256), np.float32)
    x[0, 3], x[0, 4] = LIMITS[dtype], -LIMITS[dtype] / 2
    y = there_and_back(x, dtype)
    assert np.isfinite(y).all() and abs(y[0, 3] / x[0, 3] - 1) < 0.05
    for value in (2.0 * LIMITS[dtype], np.inf, -np.inf, np.nan):
        x[0, 5] = value
        with pytest.raises(UserError, match=rf"to store as {dtype}.*65504"):
            encode(x, dtype)


@pytest.mark.parametrize(
    "dtype", cases(*TYPES, *SIGNED, "IQ4_NL", "IQ4_XS", "IQ3_XXS", slow=SLOWER_GRIDS)
)
def test_parts_change_no_byte(dtype, rng, monkeypatch):
    x = rng.standard_normal((40, 256)).astype(np.float32)
    whole = encode(x, dtype)
    monkeypatch.setattr(blocks, "_ENCODE_ELEMENTS", 7 * 256)
    np.testing.assert_array_equal(encode(x, dtype), whole)
    one = np.concatenate([encode(row[None], dtype) for row in x])
    np.testing.assert_array_equal(one, whole)


@pytest.mark.parametrize("dtype", TYPES)
def test_again_from_its_own_numbers_it_moves_little(dtype, rng):
    x = rng.standard_normal((16, 256)).astype(np.float32)
    once = there_and_back(x, dtype)
    assert relative(once, there_and_back(once, dtype)) < 0.1 * relative(x, once)


FEW = {"Q2_K": 0.29, "Q3_K": 0.165}  # relative errors of normal numbers


@pytest.mark.parametrize("dtype", [*FEW, *GRIDDED])
def test_few_bits_lose_as_little_as_they_must(dtype, rng):
    x = rng.standard_normal((32, 1024)).astype(np.float32)
    for scale in (1e-2, 1.0, 100.0):
        y = x * np.float32(scale)
        assert relative(y, there_and_back(y, dtype)) < (FEW | GRIDDED)[dtype]
    assert not there_and_back(np.zeros((1, 256), np.float32), dtype).any()
    one = np.concatenate([encode(row[None], dtype) for row in x])
    np.testing.assert_array_equal(one, encode(x, dtype))
    x[0, 5] = np.inf
    with pytest.raises(UserError, match=rf"to store as {dtype}"):
        encode(x, dtype)


SEARCHED = ["Q2_K", "Q3_K", "Q4_0", "IQ4_NL", *GRIDDED]


@pytest.mark.parametrize(
    "dtype",
    cases(
        *("Q3_K", "Q4_0", "IQ3_XXS", "Q4_K", "IQ4_XS", "Q5_1"),
        slow=["Q2_K", "IQ4_NL", *SLOWER_GRIDS, "Q5_K", "Q6_K", "Q5_0"],
    ),
)
def test_an_importance_lowers_the_errors_that_it_weighs(dtype, rng):
    x = rng.standard_t(5, (64, 1024)).astype(np.float32) * np.float32(0.02)
    importance = np.exp(rng.standard_normal(1024)).astype(np.float32)
    weighed, blind = (decoded(encode(x, dtype, w), dtype) for w in (importance, None))
    lost = [np.sum(importance * np.square(np.float64(y) - x)) for y in (weighed, blind)]
    assert lost[0] < 0.99 * lost[1]


@pytest.mark.parametrize(
    "dtype, weighted",
    [(t, False) for t in SEARCHED]
    + [(t, True) for t in [*SEARCHED, "Q4_K", "Q5_K", "Q6_K", "Q5_0", "IQ4_XS"]],
)
def test_errors_weighted_by_importance_are_no_larger_than_llama_cpps(dtype, weighted, rng):
    pytest.importorskip("xllamacpp")
    encode_theirs = make_encoder()
    x = rng.standard_t(5, (64, 1024)).astype(np.float32) * np.float32(0.02)
    importance = np.exp(rng.standard_normal(1024)).astype(np.float32) if weighted else None
    ours, theirs = encode(x, dtype, importance), encode_theirs(x, dtype, importance)
    weights = 1 if importance is None else importance
    lost = [weights * np.square(np.float64(decoded(raw, dtype)) - x) for raw in (ours, theirs)]
    assert lost[0].sum() <= lost[1].sum()
    if dtype in FEW:  # of single blocks too
        ours, theirs = (part.reshape(-1, 256).sum(axis=1) for part in lost)
        assert (ours <= 1.01 * theirs).all(), (ours / theirs).max()


def their_grid(dtype):
    """gguf-py's table, and the levels' factor: scale of a group = d * unit * (2 * q + 1)."""
    kind = getattr(gguf.quants, dtype)
    kind.init_grid()
    units = {"IQ3_S": 1, "IQ3_XXS": 0.25, "IQ2_S": 0.125}
    return np.float64(kind.grid.reshape(-1, kind.grid.shape[-1])), units[dtype]


def least_errors(x, dtype, factors):
    """Squared errors of eights `[n, 8]` under factors `[m]`, every entry tried: `[m, n]`."""
    grid, _ = their_grid(dtype)
    parts = x.reshape(-1, grid.shape[1])
    squares, products = (parts**2).sum(axis=1, keepdims=True), parts @ grid.T
    own = (grid**2).sum(axis=1)
    least = [(squares - 2 * f * products + f * f * own).min(axis=1) for f in factors]
    return np.reshape(least, (len(factors), len(x), -1)).sum(axis=2)


@pytest.mark.parametrize("dtype", cases("IQ3_XXS", slow=SLOWER_GRIDS))
def test_entries_and_signs_are_the_best_of_all_of_the_grid(dtype, rng):
    """With the scales of the search, each eight against every entry; all signs of IQ3_XXS."""
    x = rng.standard_t(5, (1, 256)).astype(np.float32)
    scales = blocks.fit_rows(jnp.asarray(x), dtype)
    y = np.float64(blocks.decode_fields(blocks.encode_fields(jnp.asarray(x), dtype, scales), dtype))
    np.testing.assert_array_equal(decoded(encode(x, dtype), dtype), y)
    eights, patterns = np.float64(x).reshape(-1, 8), np.arange(256)
    flips = 1 - 2.0 * (patterns[:, None] >> np.arange(8) & 1)
    ours = np.square(y - x).reshape(-1, 8).sum(axis=1)
    factors = np.repeat(1 / np.float64(scales[-1]).ravel(), 32 // scales[-1].size)
    best = []
    for eight, factor in zip(eights, factors, strict=True):
        tried = flips[:1]  # the signs that numbers have are the best
        if dtype == "IQ3_XXS":  # unless minus signs must be even in number
            tried = flips[flips.prod(axis=1) == np.sign(eight).prod()]
        best.append(least_errors(np.abs(eight) * tried, dtype, [factor]).min())
    # Numbers count in parts of a step; the sign that is wrong is that of the smallest number.
    assert (ours <= np.multiply(best, 1.02) + 1e-9).all() and ours.sum() <= 1.002 * sum(best)


@pytest.mark.parametrize("dtype", cases("IQ3_XXS", slow=SLOWER_GRIDS))
def test_a_gpu_finds_the_same_entries_without_a_loop(dtype, rng, monkeypatch):
    most = 2 * grids.GRIDS[dtype].top
    x = jnp.asarray(rng.uniform(0, most, (4, 256)).astype(np.float32))
    weights = jnp.asarray(rng.uniform(0.1, 2, x.shape).astype(np.float32))
    find = grids.find_nearest.__wrapped__  # unjitted: it is traced anew below
    here = [find(x, dtype), find(x, dtype, weights)]
    with monkeypatch.context() as there:
        there.setattr(grids.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
        for ours, theirs in zip(here, [find(x, dtype), find(x, dtype, weights)], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    traced = grids.find_nearest.trace(jax.ShapeDtypeStruct(x.shape, x.dtype), dtype)
    for platform, loops in (("cuda", False), ("cpu", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.while" in text) == loops


@pytest.mark.parametrize("dtype", ["IQ3_S", "IQ2_S"])
def test_scales_are_near_the_best_of_all(dtype, rng):
    """All 16 scales of each group, for scales of the block about the one that was found."""
    x = rng.standard_normal((1, 256)).astype(np.float32)
    ours = np.square(np.float64(there_and_back(x, dtype)) - x).sum()
    d = np.asarray(blocks.fit_rows(jnp.asarray(x), dtype)[0]).view(np.float16).astype(np.float64)
    best = np.inf
    for share in np.linspace(0.75, 1.35, 13):
        factors = d.item() * share * their_grid(dtype)[1] * (2 * np.arange(16) + 1)
        lost = least_errors(np.abs(np.float64(x)).reshape(-1, 8), dtype, factors)
        groups = lost.reshape(16, -1, 2 if dtype == "IQ2_S" else 4).sum(axis=2)
        best = min(best, groups.min(axis=0).sum())
    assert ours <= 1.05 * best, ours / best


def test_an_odd_sign_goes_to_the_smallest_number():
    x = np.tile(np.float32([3, -5, 7, 2, 4, 6, 8, 5]), (1, 32))  # one minus in each eight
    y = there_and_back(x, "IQ3_XXS").reshape(-1, 8)
    assert (np.sign(y) == [1, -1, 1, -1, 1, 1, 1, 1]).all()
    weights = np.tile(np.float32([0.01, 1, 1, 1, 1, 1, 1, 1]), 32)
    y = decoded(encode(x, "IQ3_XXS", weights), "IQ3_XXS").reshape(-1, 8)
    assert (np.sign(y) == [-1, -1, 1, 1, 1, 1, 1, 1]).all()
