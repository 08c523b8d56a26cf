"""The kernels beside the JAX that defines them, interpreted on a CPU and compiled on a GPU."""

import dataclasses
import functools
import re
import subprocess
import sys
import types
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from quick import cases

from kdjax.device import placement as placement_module
from kdjax.device.placement import Placement
from kdjax.losses import kd as losses
from kdjax.models import attention, delta, weights
from kdjax.models.kernels import cached_attention, recurrent, softmax, swiglu

WIDE = (6, 4864), (3, 8960), (2, 18944)
INTERPRET = jax.default_backend() != "gpu"


def logits(seed, *shape, scale=4.0):
    x = np.random.default_rng(seed).normal(0, scale, shape)
    return jnp.asarray(
        x + 30 * np.arange(shape[0])[(...,) + (None,) * (len(shape) - 1)], jnp.float32
    )


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("real", [5000, 4096, 1])
def test_sums_of_two_models_equal_the_definition(temperature, real):
    s, t = logits(0, 3, 2, 5000), logits(1, 3, 2, 5000)
    got = softmax.softmax_sums(s, t, temperature, real, interpret=INTERPRET)
    want = losses.softmax_sums(s, t, temperature, real)
    np.testing.assert_array_equal(got.peak, want.peak)
    np.testing.assert_array_equal(got.teacher_peak, want.teacher_peak)
    np.testing.assert_allclose(got.soft, want.soft, rtol=1e-5)
    np.testing.assert_allclose(got.teacher_soft, want.teacher_soft, rtol=1e-5)
    np.testing.assert_allclose(got.hard, want.hard, rtol=1e-5)
    np.testing.assert_allclose(got.distance, want.distance, rtol=3e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "width"), [(4, 3000), (4096, 700)])  # two sizes of a program
def test_sums_of_one_model_equal_the_definition(rows, width):
    s = logits(2, rows, width)
    got = softmax.softmax_sums(s, None, 2.0, width - 1, interpret=INTERPRET)
    want = losses.softmax_sums(s, None, 2.0, width - 1)
    assert got[3:] == want[3:] == (None, None, None)
    for a, b in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_ids_that_do_not_exist_count_nothing_whatever_they_hold():
    s, t = logits(3, 2, 4500), logits(4, 2, 4500)
    want = softmax.softmax_sums(s, t, 2.0, 4400, interpret=INTERPRET)
    wild = [x.at[:, 4400:].set(jnp.nan) for x in (s, t)]
    got = softmax.softmax_sums(*wild, 2.0, 4400, interpret=INTERPRET)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_logit_that_is_not_a_number_reaches_the_sums():
    s, t = logits(5, 2, 3000), logits(6, 2, 3000)
    found = softmax.softmax_sums(
        s.at[0, 7].set(jnp.nan), t.at[1, 2900].set(jnp.inf), 2.0, 3000, interpret=INTERPRET
    )
    assert np.isnan(found.soft[0, 0]) and np.isfinite(found.soft[1, 0])
    assert np.isnan(found.teacher_soft[1, 0]) and np.isfinite(found.teacher_soft[0, 0])


@pytest.mark.parametrize(
    "shape", [(5, 200), *(pytest.param(s, marks=pytest.mark.slow) for s in WIDE)]
)
def test_gated_and_rounded_equals_the_definition(shape):
    """Within one float8 step, 1/8: bf16 comes between in the definition, and not in the kernel."""
    rng = np.random.default_rng(7)
    gate, up = (jnp.asarray(rng.normal(0, 40, shape), jnp.bfloat16) for _ in range(2))
    rows = jnp.asarray(rng.uniform(0.01, 0.05, shape[0]), jnp.float32)
    scales = [jnp.asarray(rng.uniform(0.5, 2, shape[1]), jnp.float32) for _ in range(2)]
    gate = gate.at[-1].set(0)  # a row of zeros stays one
    values, scale = swiglu.gate_and_round(gate, up, rows, *scales, interpret=INTERPRET)
    g, u = (
        x.astype(jnp.float32) * rows[:, None] * y[None]
        for x, y in zip((gate, up), scales, strict=True)
    )
    exact = np.asarray(jax.nn.silu(g) * u)
    got = np.asarray(values, np.float32) * np.asarray(scale)[:, None]
    assert values.shape == shape and np.all(got[-1] == 0)
    most = np.abs(exact).max(axis=1, keepdims=True)
    np.testing.assert_allclose(scale, np.maximum(most[:, 0], 1e-30) / 448, rtol=1e-5)
    assert np.all(np.abs(got - exact) <= np.abs(exact) / 15.9 + most * 2.0**-17.5)


def test_a_layer_is_as_exact_with_kernels_as_without(monkeypatch):
    rng = np.random.default_rng(8)
    x = jnp.asarray(rng.normal(0, 1, (8, 128)), jnp.bfloat16)
    matrices = [
        weights.Scaled(*weights.quantize_rows(jnp.asarray(rng.normal(0, 0.1, shape))))
        for shape in ((384, 128), (384, 128), (128, 384))
    ]

    def error(kernels):
        gate, up, down = (dataclasses.replace(w, kernels=kernels) for w in matrices)
        rows = weights.gate_rows(weights.round_for(x, gate), gate, up, jax.nn.silu)
        got = np.asarray(weights.project(rows, down), np.float32)
        return np.linalg.norm(got - exact) / np.linalg.norm(exact)

    g, u, d = (np.asarray(w.decode()) for w in matrices)
    rows = np.asarray(x, np.float32)
    exact = np.asarray(jax.nn.silu(rows @ g.T)) * (rows @ u.T) @ d.T
    plain = error(False)
    ran = []

    def interpreted(kernel):
        def run(*args):
            ran.append(kernel.__name__)
            return kernel(*args, interpret=INTERPRET)

        return run

    monkeypatch.setattr(swiglu, "gate_and_round", interpreted(swiglu.gate_and_round))
    # Numbers near the middle of two float8 round either way, so it is errors that are alike.
    assert 0 < error(True) < 1.1 * plain < 0.06
    assert ran == ["gate_and_round"]


def test_the_loss_is_the_same_with_kernels_and_without(monkeypatch):
    s, t, label = logits(9, 2, 3, 700), logits(10, 2, 3, 700), jnp.full((2, 3), 5)
    loss = losses.KDLoss(temperature=2.0, alpha=0.3)
    plain = losses.kd_parts_and_gradient(s, t, label, loss, real=690)
    kernel = softmax.softmax_sums
    monkeypatch.setattr(softmax, "softmax_sums", lambda *a: kernel(*a, interpret=INTERPRET))
    found = losses.kd_parts_and_gradient(s, t, label, loss, real=690, fused=True)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert np.all(np.asarray(found[2])[..., 690:] == 0)


def test_the_loss_of_shared_ids_is_the_same_with_kernels_and_without(monkeypatch):
    s, t, label = logits(9, 3, 3, 700), logits(10, 3, 3, 640), jnp.full((3, 3), 5)
    s = s.at[0, 0, 650].add(300.0)  # an id that the teacher lacks is alone likely
    s, t = s.at[..., 690:].set(jnp.nan), t.at[..., 600:].set(jnp.nan)
    loss, ids = losses.KDLoss(temperature=2.0, alpha=0.3), dict(real=690, shared=600)
    plain = losses.shared_parts_and_gradient(s, t, label, loss, **ids)
    kernel = softmax.softmax_sums
    monkeypatch.setattr(softmax, "softmax_sums", lambda *a: kernel(*a, interpret=INTERPRET))
    found = losses.shared_parts_and_gradient(s, t, label, loss, **ids, fused=True)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert np.all(np.asarray(found[2])[..., 690:] == 0)


@pytest.mark.parametrize(
    ("platform", "capability", "axes", "expected"),
    [
        ("gpu", "8.0", {}, True),
        ("gpu", "7.5", {}, False),
        ("gpu", "gfx942", {}, False),  # another maker's name
        ("gpu", "9.0", {"data": 2, "fsdp": 2}, True),  # each device runs them on its own rows
        ("gpu", "9.0", {"tensor": 2}, False),  # the compiler splits no kernel
        ("cpu", None, {}, False),
    ],
)
def test_kernels_are_for_gpus_with_whole_rows(platform, capability, axes, expected):
    """The mesh decides, not the process: 7 of 8 GPUs beside it change nothing."""
    placement = place(axes, platform, capability)
    assert placement.kernels == expected
    assert placement.platform == platform and placement.alone == (placement.mesh.size == 1)


def place(axes, platform="gpu", capability="9.0"):
    """A placement on devices that are not there."""
    shape = {"data": 1, "fsdp": 1, "tensor": 1} | axes
    devices = int(np.prod(list(shape.values())))
    mesh = mock.MagicMock(spec=Mesh, size=devices, shape=shape)
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    mesh.devices = np.asarray([device] * devices)
    return Placement.on(mesh)


def lower_for_gpu(function, *shapes):
    """The program for a GPU that is not there; skips the test where jax wants one."""
    try:
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    except RuntimeError as error:
        if "AbstractDevice" not in str(error):  # which jax wants from 0.11 on
            raise
        pytest.skip(str(error))
    return lowered.as_text()


@pytest.mark.skipif(not INTERPRET, reason="the other tests compile them there")
def test_kernels_become_triton_without_a_gpu():
    """Shapes of a 7B: what Triton cannot take is found here, not on the GPU."""
    rows, row = (16384, 18944), jnp.float32
    of = jax.ShapeDtypeStruct
    half, chunk = of(rows, jnp.bfloat16), of((8, 128, 151_936), row)
    cases = [
        (swiglu.gate_and_round, half, half, *(of((n,), row) for n in (*rows[:1], *rows[1:] * 2))),
        (lambda s, t: softmax.softmax_sums(s, t, 4.0, 151_665), chunk, chunk),
        (lambda s: softmax.softmax_sums(s, None, 1.0, 151_665), chunk),
    ]
    for function, *shapes in cases:
        assert "triton" in lower_for_gpu(function, *shapes)


@pytest.mark.parametrize("length", cases(1, slow=[3]))
def test_a_few_positions_change_the_states_of_their_layer_alone(length):
    """The recurrence, over a border of two documents; other layers' states stay."""
    rng, (rows, groups, heads, width) = np.random.default_rng(6), (3, 2, 6, 64)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(0, 0.3, shape), dtype)

    mixed = normal(rows, length, (2 * groups + heads) * width, dtype=jnp.bfloat16)
    decay, beta = -jnp.abs(normal(rows, length, heads)), jax.nn.sigmoid(normal(rows, length, heads))
    inputs = delta.DeltaInputs(mixed, normal(mixed.shape[2], 4), decay, beta)
    ids = jnp.asarray(np.minimum(np.arange(length) // 2, 1)[None].repeat(rows, 0), jnp.int32)
    states, before = normal(3, rows, heads, width, width), normal(rows, 3, mixed.shape[2])
    stacked = delta.Stacked(states, jnp.int32(1))
    rest = inputs, groups, width, ids, before
    run = functools.partial(recurrent.fused_recurrent_gated_delta_rule, interpret=INTERPRET)
    with mock.patch.object(recurrent, "fused_recurrent_gated_delta_rule", run):
        out, got = delta.read_states(*rest, stacked, in_kernels=True)
    want, state = delta.read_states(*rest, states[1])
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, want)), atol=2.0**-8)
    np.testing.assert_allclose(got[1], state, atol=1e-5)
    np.testing.assert_array_equal(got[::2], states[::2])


@pytest.mark.parametrize("dtype", cases(jnp.bfloat16, slow=[jnp.float32]))
def test_states_that_are_written_late_are_those_written_at_once(dtype):
    """Two calls of eight positions, of layer 1 of 2; of a row that has ended nothing is kept."""
    rng, (rows, groups, heads, keys, width) = np.random.default_rng(7), (3, 2, 4, 16, 32)
    steps, alive, others = 8, jnp.asarray([True, False, True]), np.asarray([0, 2])

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    columns = 2 * groups * keys + heads * width
    mixed = normal(2 * steps, rows, 1, columns + 8, dtype=dtype)  # 8 columns of others
    kernel = normal(columns, 4)
    decay = -jax.nn.softplus(normal(2 * steps, rows, 1, heads))
    beta = jax.nn.sigmoid(normal(2 * steps, rows, 1, heads))
    states, before = normal(2, rows, heads, keys, width), normal(2, rows, 3, columns, dtype=dtype)
    shapes = jax.eval_shape(lambda: delta.hold_news(states, before, groups, steps, INTERPRET)).news
    # What nobody wrote may be anything.
    never = recurrent.PendingUpdates(*(jnp.full(x.shape, jnp.nan, x.dtype) for x in shapes))
    run = functools.partial(recurrent.recur_with_pending_updates, interpret=INTERPRET)
    ids, one = jnp.ones((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32)
    with mock.patch.object(recurrent, "recur_with_pending_updates", run):
        step = jax.jit(delta.read_late)
        kept, last, state, latest, news = states, before, states[1], before[1], never
        for at in range(2 * steps):
            late = delta.Late(news, jnp.int32(at % steps), alive)
            inputs = delta.DeltaInputs(mixed[at], kernel, decay[at], beta[at])
            out, kept, last, late = step(inputs, last, delta.Stacked(kept, jnp.int32(1)), late)
            news = late.news if (at + 1) % steps else never
            rest = groups, keys, ids, one, latest, state
            want, (state, latest) = delta.read_and_keep(inputs, *rest)
            found = (np.asarray(x, np.float32)[others] for x in (out, want))
            np.testing.assert_allclose(*found, atol=1e-5 if dtype == jnp.float32 else 2.0**-6)
            if at % steps < steps - 1:
                np.testing.assert_array_equal(kept[1, 0] == states[1, 0], at < steps)
    np.testing.assert_allclose(kept[1][others], state[others], atol=1e-5)
    np.testing.assert_array_equal(last[1][others], latest[others])
    for after, first in ((kept, states), (last, before)):
        np.testing.assert_array_equal(after[0], first[0])
        np.testing.assert_array_equal(after[1, 1], first[1, 1])


@pytest.mark.parametrize(
    ("new", "dtype", "local"),
    [(1, jnp.bfloat16, None), (3, jnp.float32, None), (3, jnp.float32, True)],
)
def test_attention_over_a_cache_is_the_one_defined(new, dtype, local):
    """Rows that begin, end a block, and reach the end of the cache; other layers stay."""
    rng, (batch, heads, groups, slots, width) = np.random.default_rng(3), (4, 2, 7, 160, 32)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = (normal(batch, new, heads * n, width) for n in (groups, 1, 1))
    cache = tuple(normal(3, batch, heads, slots, width) for _ in range(2))
    positions = jnp.asarray([0, 64, 63, slots - new], jnp.int32)
    one = jnp.int32(1)
    how = dict(scale=0.2, window=0 if local is None else 70)
    rest = cache, one, positions, None if local is None else jnp.bool_(local)
    want, kept = attention.attend_and_keep(q, k, v, *rest, **how)
    run = functools.partial(cached_attention.attend_and_keep, interpret=INTERPRET)
    with mock.patch.object(cached_attention, "attend_and_keep", run):
        got, ours = attention.attend_and_keep(q, k, v, *rest, **how, kernel=True)
    tolerance = 2e-5 if dtype == jnp.float32 and INTERPRET else 2.0**-6
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=tolerance)
    for a, b in zip(ours, kept, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- a JAX without Triton


class Refusing(types.ModuleType):
    """A module that is there, and refuses whatever is asked of it."""

    def __getattr__(self, name):
        raise NotImplementedError("Triton is\nnot supported any more")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, r"cannot import name 'triton'|None in sys.modules"),
        (Refusing("triton"), "Triton is not supported any more"),
        (types.ModuleType("triton"), "no attribute 'CompilerParams'"),
    ],
    ids=["gone", "refusing", "moved"],
)
def test_a_gpu_without_kernels_is_told_once_with_what_it_costs(module, reason, monkeypatch, caplog):
    """670 and 786 ms, 60.36 and 81.32 GB: docs/records/2026-11-26-qwen35-kernels-h200.md."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", module)
    if module:
        monkeypatch.setattr(jax.experimental.pallas, "triton", module, raising=False)
    else:
        monkeypatch.delattr(jax.experimental.pallas, "triton", raising=False)
    asked = functools.cache(placement_module._has_triton.__wrapped__)
    monkeypatch.setattr(placement_module, "_has_triton", asked)
    assert not any(place(axes).kernels for axes in ({}, {}, {"data": 2}, {"tensor": 2}))
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelname == "WARNING" and re.search(reason, said) and jax.__version__ in said
    for figure in ("786 ms", "81 GB", "670 ms", "60 GB"):
        assert figure in said


def test_kdjax_is_imported_without_triton():
    """Kernels are what a GPU loses, nothing else; a process, for all of kdjax is imported anew."""
    program = (
        "import sys; sys.modules['jax.experimental.pallas.triton'] = None\n"
        "from kdjax.models.kernels import common, delta_rule, softmax\n"
        "assert common.plgpu is None"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_gpu_with_kernels_is_told_nothing(caplog):
    placement_module._has_triton.cache_clear()
    assert place({}).kernels and not place({"tensor": 2}).kernels
    assert not caplog.records
