"""The float8 teacher: rounding by rows, products, loading, memory, and what it refuses."""

import json
import logging
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from scipy.special import log_softmax

import kdjax
from kdjax.config import WEIGHTS, Config, validate
from kdjax.data.teacher_cache import FORMAT, read_index
from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_local_mesh
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.blocks import decode
from kdjax.models import checkpoint
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.model import check_float8, load_model
from kdjax.models.weights import Scaled, from_bits, quantize_rows, to_bits
from kdjax.training import plan
from kdjax.training.identity import check_same_run, identify
from kdjax.training.job import assemble, survey
from kdjax.training.kinds import ask_kinds
from kdjax.training.teachers import Dense, Float8
from scripts.checks.fewer_bits import write_fewer_bits

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 300, (4, 24)), jnp.int32)


def model(path, weights, mesh=None):
    placement = Placement.on(mesh or make_local_mesh(1))
    return load_model(open_checkpoint(path), weights=weights, dtype="float32", placement=placement)


@pytest.fixture(scope="module")
def plain(models):
    return model(models / "teacher.gguf", "dense")


@pytest.fixture(scope="module")
def lean(models):
    return model(models / "teacher.gguf", "float8")


def logits(made):
    return np.asarray(made.logits(TOKENS), np.float64)


def matrices(params):
    """Path and stored weight of every matrix that is multiplied."""
    blocks = params["blocks"]
    for part, names in (("attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
        for name in names:
            yield (part, name), blocks[part][name]["weight"]
    yield ("head",), params["head"]


def test_a_row_loses_at_most_a_sixteenth_of_each_number(rng):
    """16 decades of row sizes, numbers of a row over 2^14, each to its own bound."""
    x = rng.normal(size=(64, 512)) * 2.0 ** rng.uniform(-12, 0, (64, 512))
    x = (x * 10.0 ** rng.uniform(-8, 8, (64, 1))).astype(np.float32)
    values, scale = jax.jit(quantize_rows)(x)
    assert values.dtype == jnp.float8_e4m3fn and scale.shape == (64,)
    q, s = np.asarray(values, np.float64), np.asarray(scale, np.float64)[:, None]
    assert np.all(np.abs(q).max(axis=1) == 448)
    error, most = np.abs(q * s - x), np.abs(x).max(axis=1, keepdims=True)
    # Half a unit of 4 bits, and below 2^-6 half of the fixed step 2^-9.
    assert np.all(error <= np.maximum(np.abs(x) / 16, most / 448 * 2.0**-10) * (1 + 1e-5))
    normal = np.abs(x) > most / 448 * 2.0**-6
    assert np.mean(normal) > 0.9 and np.max((error / np.abs(x))[normal]) > 0.055  # no vain bound


def test_rows_of_zeros_and_of_nothing_finite():
    x = jnp.asarray([[0, 0, 0], [1e-38, 0, 0], [3e38, -3e38, 1], [np.nan, 1, 2], [np.inf, 1, 2]])
    values, scale = (np.asarray(a, np.float32) for a in quantize_rows(x))
    with np.errstate(invalid="ignore"):
        got = values * scale[:, None]
    np.testing.assert_array_equal(got[:2], np.zeros((2, 3)))  # 448 / 1e-38 would be infinite
    np.testing.assert_allclose(got[2], [3e38, -3e38, 0], rtol=1e-6)
    assert np.isnan(got[3:]).any(axis=1).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 2.0**-7)])
def test_the_product_is_that_of_the_rounded_numbers(rng, dtype, tolerance):
    """Against float64, the largest operands included, whose sums float16 could not hold."""
    x = jnp.asarray(rng.normal(size=(24, 384)) * 10.0 ** rng.uniform(-3, 3, (24, 1)), dtype)
    weight = Scaled(*quantize_rows(jnp.asarray(rng.normal(size=(80, 384)), jnp.float32)))
    values, scale = quantize_rows(x)
    exact = np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None]
    dense = np.asarray(weight.decode(), np.float64)
    want = exact @ dense.T
    got = jax.jit(Scaled.project)(weight, x)
    assert got.dtype == dtype
    size = np.linalg.norm(exact, axis=1)[:, None] * np.linalg.norm(dense, axis=1)[None]
    assert np.max(np.abs(np.asarray(got, np.float64) - want) / size) < tolerance
    ones = jnp.full((1, 4096), 448.0, dtype)
    big = Scaled(*quantize_rows(ones.astype(jnp.float32))).project(ones)
    np.testing.assert_allclose(np.asarray(big, np.float64), 448.0**2 * 4096, rtol=2.0**-8)


def test_one_token_does_not_disturb_another(rng):
    """A scale a token: numbers of a million in one row leave the other rows' bits alone."""
    x = jnp.asarray(rng.normal(size=(8, 64)), jnp.float32)
    weight = Scaled(*quantize_rows(jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)))
    got, loud = weight.project(x), weight.project(x.at[3].mul(1e6))
    np.testing.assert_array_equal(np.delete(loud, 3, 0), np.delete(got, 3, 0))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32])
def test_bits_come_back(rng, dtype):
    x = jnp.asarray(rng.normal(size=(3, 5)), dtype)
    bits = to_bits(x)
    assert bits.dtype == {1: jnp.uint8, 2: jnp.uint16, 4: jnp.float32}[x.dtype.itemsize]
    np.testing.assert_array_equal(np.asarray(from_bits(bits)), np.asarray(x))


def test_the_teacher_holds_the_files_numbers_rounded_by_rows(plain, lean):
    dense = dict(matrices(plain.params))
    for path, weight in matrices(lean.params):
        values, scale = quantize_rows(dense[path])
        np.testing.assert_array_equal(np.asarray(from_bits(weight.values)), np.asarray(values))
        np.testing.assert_array_equal(np.asarray(weight.scale), np.asarray(scale))
    assert lean.params["embed"].dtype == jnp.float32
    assert isinstance(lean.params["head"], Scaled)


def test_a_matrix_takes_a_byte_a_number_and_four_a_row(models, plain, lean):
    saved = 0
    for _, weight in matrices(plain.params):
        saved += 3 * weight.size - 4 * weight.size // weight.shape[-1]
    assert lean.resident_bytes == plain.resident_bytes - saved
    assert str(lean).startswith("float8 (float32) teacher.gguf")


def test_what_it_costs_on_a_random_model(plain, lean):
    """The KL to the float32 teacher, about half the variance of the logits' error, is small."""
    p, q = (log_softmax(logits(made), axis=-1) for made in (plain, lean))
    kl = np.sum(np.exp(p) * (p - q), axis=-1)
    assert np.std(p) > 0.1
    assert 0 < kl.mean() < 0.01 * np.var(p)


@pytest.mark.slow
def test_safetensors_give_the_same_teacher(models, tmp_path, monkeypatch):
    """The student's folder in float32 and its own GGUF: one row's scale and all, bit for bit."""
    from kdjax.export import export_hf

    source = models / "student.gguf"
    export_hf(kdjax.load(source, dtype="float32"), tmp_path / "hf")
    for a, b in zip(
        *(jax.tree.leaves(model(p, "float8").params) for p in (source, tmp_path / "hf")),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_on_a_mesh_as_on_one_device(models, lean):
    alone = logits(lean)
    spread = model(models / "teacher.gguf", "float8", mesh=sharding.make_mesh(2, 2, 2))
    gate = spread.params["blocks"]["mlp"]["gate"]["weight"]
    assert gate.values.addressable_shards[0].data.shape[1:] == (512 // 2, 256 // 2)
    assert gate.scale.addressable_shards[0].data.shape[1:] == (512 // 2,)
    # Sums in another order turn the rounding of a few activations, and what follows from them.
    error = np.linalg.norm(logits(spread) - alone, axis=-1) / np.linalg.norm(alone, axis=-1)
    assert np.median(error) < 1e-5 and error.max() < 0.2


@pytest.mark.slow
def test_a_run_with_an_fp8_teacher(tiny_config, tmp_path, caplog):
    tiny_config.teacher.weights = "float8"
    validate(tiny_config)
    with caplog.at_level(logging.WARNING, "kdjax"):
        job = assemble(tiny_config, tmp_path)
    assert "emulated on the CPU" in caplog.text
    state = job.make_state()
    batch = next(job.eval_batches())
    sums = job.step.sum_evaluation(state.params, job.teacher.params, batch)
    assert "float8" in job.teacher.kind and np.isfinite(sums.kl) and sums.kl > 0
    made = survey(tiny_config)[2]
    assert made.kind == Float8() and "asked for" in made.choice
    assert made.resident["teacher, float8 and scales"] == job.teacher.resident_bytes


def test_a_run_resumes_with_weights_of_the_same_numbers_alone(tmp_path):
    """Packed ones decode to those of dense ones; of an earlier version's float8 nothing goes on."""
    named = {weights: identify(teacher_of(weights), {}) for weights in ("auto", *WEIGHTS)}
    for weights in ("dense", "packed"):
        check_same_run(named[weights], named["auto"], tmp_path)
    earlier = {k: v for k, v in named["auto"].items() if k != "teacher.weights"}
    check_same_run(earlier | {"teacher.compute": "train"}, named["packed"], tmp_path)
    for weights in WEIGHTS:
        with pytest.raises(UserError, match=r"teacher\.compute was removed \("):
            check_same_run(earlier | {"teacher.compute": "fp8"}, named[weights], tmp_path)
    for weights in {*WEIGHTS} - {"dense", "packed"}:
        with pytest.raises(UserError, match=r"teacher\.weights: the checkpoint has"):
            check_same_run(named["auto"], named[weights], tmp_path)


def test_weights_with_float32_sums_are_refused_by_name(tiny_config, models, tmp_path):
    """In a config, a form, a saved run and a cache's index."""
    now, said = identify(teacher_of("float8"), {}), "float8_precise was removed .*before-the-cut"
    tiny_config.teacher.weights = "float8_precise"
    about = {"weights": "float8_precise", "vocabulary": [1, 1], "sides": [1, 1]}
    (tmp_path / "index.json").write_text(json.dumps({"format": FORMAT, "about": about}))
    for use in (
        lambda: validate(tiny_config),
        lambda: model(models / "teacher.gguf", "float8_precise"),
        lambda: checkpoint.ModelArgument.parse("teacher.gguf@float8_precise"),
        lambda: check_same_run(now | {"teacher.weights": "float8_precise"}, now, tmp_path),
        lambda: read_index(tmp_path),
    ):
        with pytest.raises(UserError, match=said):
            use()


def teacher_of(weights):
    config = Config()
    config.teacher.weights = weights
    return config


def test_float8_is_one_of_the_ways_to_keep_a_teacher(tiny_config):
    tiny_config.teacher.weights = "float8"
    assert ask_kinds(tiny_config.teacher) == (Float8(),)
    tiny_config.teacher.weights = "fp4"
    with pytest.raises(
        UserError, match=r"weights='fp4': must be one of auto, dense, packed, float"
    ):
        validate(tiny_config)


@pytest.mark.parametrize(
    ("platform", "capability", "able"),
    [
        ("gpu", "8.0", False),
        ("gpu", "8.9", True),
        ("gpu", "9.0", True),
        ("gpu", "12.1", True),
        ("gpu", "gfx942", False),
        ("cpu", None, True),
    ],
)
def test_a_gpu_without_fp8_is_refused_before_anything_is_read(
    tiny_config, monkeypatch, platform, capability, able
):
    device = SimpleNamespace(
        device_kind="Some GPU", platform=platform, compute_capability=capability or "unknown"
    )
    if able:
        check_float8(device)
        return
    shape = {"data": 1, "fsdp": 1, "tensor": 1}
    mesh = mock.MagicMock(spec=Mesh, size=1, shape=shape)
    mesh.devices = np.asarray([device])
    monkeypatch.setattr(sharding, "make_mesh", lambda *_: mesh)
    tiny_config.teacher.weights, tiny_config.teacher.path = "float8", "/none"
    with pytest.raises(UserError, match=rf"Some GPU of compute capability {capability}; expected"):
        survey(tiny_config)


def test_the_bound_on_speed_counts_fp8_twice_as_fast(tiny_config):
    from kdjax.device.runtime import Devices
    from kdjax.training.pair import open_pair

    pair = open_pair(tiny_config)
    devices = Devices("gpu", "NVIDIA H200", 1, int(135e9), 989e12)
    alone = plan.replace_settings(tiny_config, "full", 128)
    made = [
        plan.make_plan(alone, pair, make_local_mesh(1), devices, k) for k in (Dense(), Float8())
    ]
    length = tiny_config.data.seq_len
    frozen, trained = (x.spec.forward_flops(length) for x in (pair.teacher, pair.student))
    want = (frozen + 3 * trained) / (frozen / 2 + 3 * trained)
    assert made[1].tokens_per_s / made[0].tokens_per_s == pytest.approx(want)


def test_every_float8_number_is_kept():
    """253 finite numbers, 0 of either sign being one, in a row whose largest is 448."""
    bits = np.arange(256, dtype=np.uint8)
    numbers = np.asarray(jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn), np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    assert len(numbers) == 253
    for number in numbers:
        values, scale = quantize_rows(jnp.asarray([[448.0, number]], jnp.float32))
        assert float(scale[0]) == 1.0 and float(values[0, 1]) == number


@pytest.mark.slow
def test_the_yardstick_has_half_the_levels(models, tmp_path):
    """`fewer_bits`: 8 levels in each group of a Q4_K layer, better than evenly spread."""
    source = models / "teacher.gguf"
    assert write_fewer_bits(source, tmp_path / "fewer.gguf") > 0
    before, after = open_table(source), open_table(tmp_path / "fewer.gguf")
    assert list(before) == list(after)
    kinds = {name: (before.info(name).dtype, after.info(name).dtype) for name in before}
    assert kinds["token_embd.weight"][0] == kinds["token_embd.weight"][1]
    name = next(n for n, kind in kinds.items() if kind == ("Q4_K", "BF16"))
    x, y = (np.asarray(decode(t.raw(name), t.info(name).dtype)) for t in (before, after))
    groups, rounded = x.reshape(-1, 32), y.reshape(-1, 32)
    levels = [len(np.unique(group)) for group in rounded]
    assert max(levels) == 8 and np.mean([len(np.unique(group)) for group in groups]) > 10
    low, step = groups.min(1, keepdims=True), np.ptp(groups, axis=1, keepdims=True) / 7
    even = low + step * np.rint((groups - low) / np.maximum(step, 1e-30))
    assert 0.1 < np.linalg.norm(y - x) / np.linalg.norm(even.reshape(x.shape) - x) < 0.99
