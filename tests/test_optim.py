"""Moments in bfloat16: rounding without bias, no stall, the same on any mesh and after a resume."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from quick import cases

from kdjax.config import OptimConfig
from kdjax.device import sharding
from kdjax.training import optim

SPEC = OptimConfig(
    learning_rate=1e-3, final_learning_rate=0.0, warmup_steps=0,
    weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, clip_norm=0.0,
)  # fmt: skip
NUMBERS = [1.0, 1.003, -0.7, 3.1e-5, -1.23e-20, 2.0**-126, 1e38, 0.0, -1.9999999, 65535.0]


def test_rounding_has_no_bias():
    """Over all 65,536 noises the mean is the number itself, exactly."""
    noises = jnp.arange(1 << 16, dtype=jnp.uint16)
    for number in np.float32(NUMBERS):
        x = jnp.full(noises.shape, number)
        rounded = np.asarray(optim.stochastic_bfloat16(x, noises)).astype(np.float64)
        assert len(np.unique(rounded)) <= 2
        assert rounded.mean() == pytest.approx(float(number), rel=1e-12, abs=0)


def test_what_bfloat16_holds_stays():
    """Each of its bit patterns, infinities among them; NaN stays NaN."""
    words = np.arange(65536, dtype=np.uint16)
    held = (words.astype(np.uint32) << 16).view(np.float32)
    for bits in (0, 1, 0x8000, 0xFFFF):
        noise = jnp.full(held.shape, bits, jnp.uint16)
        got = np.asarray(optim.stochastic_bfloat16(jnp.asarray(held), noise))
        same = got.view(np.uint16) == words
        assert np.all(same | np.isnan(held)) and np.all(np.isnan(got.astype(np.float32)[~same]))
        worst = jnp.asarray(np.uint32([0x7FFFFFFF, 0xFFFFFFFF]).view(np.float32))  # all ones: NaN
        assert np.isnan(np.asarray(optim.stochastic_bfloat16(worst, noise[:2]), np.float32)).all()


def test_noise_is_uniform_and_differs_by_place_and_seed():
    first, second = (np.asarray(optim.noise((64, 1024), seed)) for seed in (7, 8))
    for draw in (
        first,
        second,
        first ^ second,
        first[1:] ^ first[:-1],
        first[:, 1:] ^ first[:, :-1],
    ):
        high, low = np.bincount(draw.ravel() >> 8, minlength=256), np.bincount(draw.ravel() & 255)
        for counts in (high, low):  # 256 each; chi-squared of 255 degrees: 255 +- 22.6
            assert np.sum((counts - counts.mean()) ** 2) / counts.mean() < 255 + 6 * 22.6
        bits = (draw.ravel()[:, None] >> np.arange(16)) & 1
        assert np.abs(bits.mean(0) - 0.5).max() < 6 * 0.5 / np.sqrt(draw.size)


def adam(dtype, steps, beta2=0.999):
    """The second moments over `steps` of gradients that shrink to a tenth a quarter of the way."""
    spec = dataclasses.replace(SPEC, beta2=beta2, moment_dtype=dtype)
    inner = optax.scale_by_adam(b1=spec.beta1, b2=spec.beta2, eps=spec.eps)
    tx = inner if dtype == "float32" else optim.bfloat16_moments(inner)
    shape = (1024,)

    def one(state, step):
        g = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), shape)
        g = g * jnp.where(step < steps // 4, 1.0, 0.1)
        if dtype == "nearest":
            tx32 = inner.update(g, state)[1]
            return tx32._replace(nu=tx32.nu.astype(jnp.bfloat16).astype(jnp.float32)), None
        return tx.update(g, state)[1], None

    start = inner.init(jnp.zeros(shape)) if dtype == "nearest" else tx.init(jnp.zeros(shape))
    state = jax.jit(lambda s: jax.lax.scan(one, s, jnp.arange(steps))[0])(start)
    return state, np.asarray(state.nu, np.float64)


@pytest.mark.slow
def test_second_moments_track_float32_where_rounding_to_nearest_stalls():
    _, exact = adam("float32", 8000)
    state, stored = adam("bfloat16", 8000)
    assert state.mu.dtype == state.nu.dtype == jnp.bfloat16
    assert stored.mean() / exact.mean() == pytest.approx(1, abs=0.005)
    assert np.std(stored / exact) < 0.06
    stalled = adam("nearest", 8000)[1]
    assert stalled.mean() > 10 * exact.mean()  # what the scheme is for


def params(rng):
    return {"gate": {"weight": jnp.asarray(rng.standard_normal((8, 16, 4)), jnp.float32)},
            "norm": {"weight": jnp.asarray(rng.standard_normal(16), jnp.float32)}}  # fmt: skip


def steps(spec, start, gradients, place=lambda x: x):
    tx = optim.optimizer(spec, 100)
    state, now = place(tx.init(start)), start
    update = jax.jit(tx.update)
    for g in gradients:
        updates, state = update(g, state, now)
        now = optax.apply_updates(now, updates)
    return now, state


def test_float32_is_optax_adamw_bit_for_bit(rng):
    start, gradients = params(rng), [params(rng) for _ in range(3)]
    ours, state = steps(SPEC, start, gradients)
    options = dict(eps=SPEC.eps, weight_decay=SPEC.weight_decay, mask=optim.decay_mask)
    tx = optax.chain(optax.adamw(optim.schedule(SPEC, 100), b1=0.9, b2=0.999, **options))
    theirs, want = start, tx.init(start)
    for g in gradients:
        updates, want = jax.jit(tx.update)(g, want, theirs)
        theirs = optax.apply_updates(theirs, updates)
    assert jax.tree.structure(state) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, (ours, state), (theirs, want))


def test_bfloat16_is_near_float32_and_no_two_tensors_share_noise(rng):
    start, gradients = params(rng), [params(rng) for _ in range(20)]
    low = dataclasses.replace(SPEC, moment_dtype="bfloat16", beta2=0.95)
    ours, state = steps(low, start, gradients)
    exact, full = steps(dataclasses.replace(SPEC, beta2=0.95), start, gradients)
    moved = [np.ravel(x - y) for x, y in zip(*map(jax.tree.leaves, (exact, start)), strict=True)]
    off = [np.ravel(x - y) for x, y in zip(*map(jax.tree.leaves, (ours, exact)), strict=True)]
    assert 0 < np.linalg.norm(np.concatenate(off)) < 0.02 * np.linalg.norm(np.concatenate(moved))
    small, large = (sum(x.nbytes for x in jax.tree.leaves(s)) for s in (state, full))
    assert small < 0.51 * large
    same = {k: jnp.full((64,), 1.003) for k in "ab"}  # equal tensors: only the noise can differ
    _, state = steps(low, jax.tree.map(jnp.zeros_like, same), [same])
    mu, nu = (optax.tree.get(state, name) for name in ("mu", "nu"))
    assert np.any(mu["a"] != mu["b"]) and np.any(nu["a"] != nu["b"])


def test_any_mesh_rounds_alike(rng):
    spec = dataclasses.replace(SPEC, moment_dtype="bfloat16")
    start, gradients = params(rng), [params(rng) for _ in range(3)]
    mesh = sharding.make_mesh(2, 2, 2)
    split = {"gate": {"weight": NamedSharding(mesh, P(None, "tensor", "fsdp"))},
             "norm": {"weight": NamedSharding(mesh, P())}}  # fmt: skip
    alone, want = steps(spec, start, gradients)
    apart, got = steps(
        spec, jax.device_put(start, split), [jax.device_put(g, split) for g in gradients]
    )
    for a, b in zip(jax.tree.leaves((alone, want)), jax.tree.leaves((apart, got)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


# ---- Muon


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_layers_of_a_users_module_may_have_numbers_for_names(name):
    """Those of an `nnx.List` have."""
    params = {"layers": {0: {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}}
    assert optim.decay_mask(params) == {"layers": {0: {"kernel": True, "bias": False}}}
    tx = optim.optimizer(dataclasses.replace(SPEC, name=name), 100)
    updates, _ = tx.update(params, tx.init(params), params)
    assert all((x != 0).all() for x in jax.tree.leaves(updates))


def orthogonalize(x):
    """Keller Jordan's Newton-Schulz iteration, float64: five steps of his quintic."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / np.linalg.norm(wide)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * square + 2.0315 * square @ square) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


@pytest.mark.parametrize("moment_dtype", cases("float32", slow=["bfloat16"]))
def test_muon_takes_each_matrix_of_a_stack_by_itself(moment_dtype):
    """And AdamW what is no matrix of a layer."""
    draw = np.random.default_rng(0)
    shapes = {
        "embed": (30, 8),
        "norm": {"weight": (8,)},
        "blocks": {
            "attn": {"q": {"weight": (3, 12, 8), "bias": (3, 12)}, "q_norm": {"weight": (3, 4)}},
            "mlp": {"experts": {"weight": (3, 2, 8, 20)}, "conv": (3, 20, 4)},
        },
    }
    params, grads = (
        jax.tree.map(
            lambda shape: jnp.asarray(draw.normal(size=shape), jnp.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        for _ in range(2)
    )
    both = {}
    for name in ("adamw", "muon"):
        settings = dict(name=name, moment_dtype=moment_dtype, beta1=0.9, weight_decay=0.1)
        tx = optim.optimizer(dataclasses.replace(SPEC, **settings), 100)
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
        both[name] = flatten_dict(updates, sep="/")
    matrices = {"blocks/attn/q/weight", "blocks/mlp/experts/weight"}
    for path in both["adamw"].keys() - matrices:
        np.testing.assert_array_equal(both["muon"][path], both["adamw"][path], err_msg=path)
    for path in matrices:
        trees = (both["muon"], flatten_dict(grads, sep="/"), flatten_dict(params, sep="/"))
        stacks = [np.asarray(tree[path], np.float64) for tree in trees]
        flat = [x.reshape(-1, *x.shape[-2:]) for x in stacks]
        for update, g, p in zip(*flat, strict=True):
            # Nesterov's momentum at step 1, both parts corrected for their bias.
            ahead = 0.9 * 0.1 * g / (1 - 0.9**2) + 0.1 * g / (1 - 0.9)
            scaled = 0.2 * np.sqrt(max(g.shape)) * orthogonalize(ahead)
            np.testing.assert_allclose(update, -1e-3 * (scaled + 0.1 * p), rtol=5e-3, atol=2e-7)
    moments = [x for x in jax.tree.leaves(state) if x.ndim > 1 and x.shape != (3,)]
    assert {x.dtype.name for x in moments} == {moment_dtype}
    numbers = sum(x.size for x in jax.tree.leaves(params))
    ones = sum(flatten_dict(params, sep="/")[path].size for path in matrices)  # one moment, not two
    assert sum(x.size for x in moments) == 2 * (numbers - ones) + ones - 2 * 8
