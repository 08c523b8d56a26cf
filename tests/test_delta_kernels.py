"""The kernels of the delta rule beside the JAX that defines them, interpreted or on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import cases
from test_kernels import INTERPRET, lower_for_gpu

from kdjax.models import delta
from kdjax.models.kernels import convolution, delta_rule

DOCUMENTS = (1, 2, 3, 58, 5, 64, 1, 200)  # borders in chunks of 64, on one, before one
HALF = jnp.bfloat16


def number(length, rows=2):
    ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(DOCUMENTS)])[:length]
    return jnp.asarray(np.broadcast_to(ids, (rows, len(ids))), jnp.int32)


def draw(length, groups, repeats, keys, width):
    """Inputs of the rule as a layer makes them, and the states before."""
    rng, heads = np.random.default_rng(0), groups * repeats

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(2, length, *shape)), jnp.float32)

    q, k = (delta.normalize_heads(normal(groups, keys)).astype(HALF) for _ in range(2))
    rate = jnp.asarray(rng.uniform(-5, 2, (1, 1, heads)), jnp.float32)
    decay = -jnp.exp(rate) * jax.nn.softplus(normal(heads))
    state = jnp.asarray(rng.normal(size=(2, heads, keys, width)), jnp.float32)
    return q, k, normal(heads, width).astype(HALF), decay, jax.nn.sigmoid(normal(heads)), state


def pull(function, *args):
    """Outputs of a function, and gradients of a sum that sees each number of them."""

    def loss(*args):
        outs = [x.astype(jnp.float32) for x in function(*args)]
        return sum(
            jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape))
            for x in outs
        )

    grads = jax.grad(loss, argnums=tuple(range(len(args))))
    return jax.jit(lambda *args: (*function(*args), *grads(*args)))(*args)


def errors(found, wanted, exact):
    """Distances of both from what is exact, over its norm."""
    for a, b, c in zip(found, wanted, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        yield tuple(np.linalg.norm(x - c) / np.linalg.norm(c) for x in (a, b))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "groups", "repeats", "keys", "width"),
    [
        (130, 1, 3, 32, 16),
        (301, 2, 2, 128, 128),
    ],
)
def test_chunks_in_kernels_are_as_exact_as_the_definition(length, groups, repeats, keys, width):
    """Outputs, states and all gradients, beside those of the definition in float32."""
    *inputs, state = draw(length, groups, repeats, keys, width)
    ids = number(length)

    def run(function, *args):
        return function(*args[:5], ids, args[5])

    def exact(*args):
        return delta.apply_delta_rule(*(x.astype(jnp.float32) for x in args[:5]), *args[5:])

    kernel = functools.partial(delta_rule.chunk_gated_delta_rule, size=64, interpret=INTERPRET)
    found, wanted, exact = (
        pull(functools.partial(run, function), *inputs, state)
        for function in (kernel, delta.apply_delta_rule, exact)
    )
    # With gradients to come the outputs are made by other kernels.
    kept: Any = jax.jit(lambda *args: jax.vjp(functools.partial(run, kernel), *args)[0])
    for a, b in zip(kept(*inputs, state), found, strict=False):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), atol=2.0**-7)
    for ours, theirs in errors(found, wanted, exact):
        assert ours < 1.5 * theirs < 1.5e-2


@pytest.mark.slow
def test_fast_states_lose_nothing_in_kernels():
    """Sums of 1,000 and more beside steps of .01: the gradient is a number, the outputs right."""
    q, k, v, decay, beta, state = draw(64, 1, 1, 16, 16)
    decay = jnp.where(jnp.arange(64)[None, :, None] % 7 == 3, -400.0, -0.01 + 0 * decay)
    args, ids = (q, k, v, decay, beta), jnp.ones((2, 64), jnp.int32)
    kernel: Any = functools.partial(delta_rule.chunk_gated_delta_rule, size=64, interpret=INTERPRET)
    out, last = kernel(*args, ids, state)
    recur: Any = delta.recur
    exact = recur(*(x.astype(jnp.float32) for x in args), ids, state)
    for a, b in zip((out, last), exact, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) < 6e-3 * np.linalg.norm(b)
    gradients = jax.grad(lambda d: jnp.sum(kernel(q, k, v, d, beta, ids, state)[1]))(decay)
    assert np.isfinite(gradients).all()


@pytest.mark.parametrize(
    ("dtype", "keys", "width"),
    cases((HALF, 16, 32), slow=[(jnp.float32, 16, 16), (jnp.float32, 32, 16)]),
)
def test_heads_of_a_kernel_are_those_defined(dtype, keys, width):
    """Outputs and gradients, over borders of documents and of the kernels' tiles."""
    rng, (groups, heads, length) = np.random.default_rng(1), (1, 3, 300)
    columns = 2 * groups * keys + heads * width
    mixed = jnp.asarray(rng.normal(size=(2, length, columns + 24)), dtype)  # 24 of others
    kernel = jnp.asarray(rng.normal(size=(columns, 4)), jnp.float32)
    ids = number(length)

    def ours(mixed, kernel):
        return convolution.make_heads(mixed, kernel, ids, groups, keys, heads, interpret=INTERPRET)

    def defined(mixed, kernel):
        heads_ = delta.make_heads(mixed, kernel, ids, groups, keys, heads)
        return tuple(x.astype(mixed.dtype) for x in heads_)

    found, wanted = (pull(function, mixed, kernel) for function in (ours, defined))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        limit = 1e-6 if dtype == jnp.float32 else 6e-3
        assert np.linalg.norm(a - b) < limit * np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_a_row_goes_on_in_kernels_as_defined(stacked, monkeypatch):
    """Rows of several lengths, one whose document began before; other layers' states stay."""
    rng, (groups, heads, width, length) = np.random.default_rng(2), (2, 4, 16, 70)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    columns = (2 * groups + heads) * width
    mixed, kernel = normal(3, length, columns + 8, dtype=HALF), normal(columns, 4)
    decay = -jax.nn.softplus(normal(3, length, heads))
    beta = jax.nn.sigmoid(normal(3, length, heads))
    inputs = delta.DeltaInputs(mixed, kernel, decay, beta)
    ids = number(length, 3).at[:, 6:].set(4).at[2].set(1)
    lengths = jnp.asarray([9, 40, length], jnp.int32)
    states, before = normal(2, 3, heads, width, width), normal(3, 3, columns, dtype=HALF)
    rest = inputs, groups, width, ids, lengths, before
    state = delta.Stacked(states, jnp.int32(1)) if stacked else states[1]
    for module, name in ((delta_rule, "chunk_gated_delta_rule"), (convolution, "make_heads")):
        run = functools.partial(getattr(module, name), interpret=INTERPRET)
        monkeypatch.setattr(module, name, run)
    out, (got, last) = jax.jit(lambda: delta.read_and_keep(*rest, state, in_kernels=True))()
    out_, (want, last_) = jax.jit(lambda: delta.read_and_keep(*rest, states[1]))()
    np.testing.assert_array_equal(last, last_)
    if stacked:
        np.testing.assert_array_equal(got[0], states[0])
        got = got[1]
    for row, n in enumerate(lengths):
        for a, b in ((out[row, :n], out_[row, :n]), (got[row], want[row])):
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            assert np.linalg.norm(a - b) < 6e-3 * np.linalg.norm(b)


def test_inverses_keep_more_than_half_precision():
    """Keys that are alike, where errors grow: exact to float32's sums of halves."""
    shares = np.random.default_rng(0).uniform(0.2, 1, (64, 64)).astype(np.float32)
    lower: Any = np.tril(shares, -1)
    found = np.asarray(
        jax.jit(lambda x: delta_rule.invert_blocks(x, delta_rule._multiply_split))(lower)
    )
    exact = np.linalg.inv(np.eye(64) + lower.astype(np.float64))
    assert np.linalg.norm(found - exact) < 2e-4 * np.linalg.norm(exact)


def test_states_fit_where_kernels_take_them():
    fits = delta_rule.states_fit
    assert fits(128, 128, HALF) and fits(16, 64, jnp.float16)
    assert not (fits(128, 96, HALF) or fits(256, 128, HALF) or fits(8, 64, HALF))
    assert not fits(128, 128, jnp.float32)


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRET, reason="the other tests compile them there")
@pytest.mark.parametrize(
    ("length", "groups", "heads"), [(2048, 16, 16), (2048, 16, 32), (192, 16, 16), (130, 16, 48)]
)
def test_kernels_of_chunks_become_triton_without_a_gpu(length, groups, heads):
    """Shapes of a 0.8B, a 9B and a 27B: what Triton cannot take is found here, not on the GPU."""
    of, rows, width = jax.ShapeDtypeStruct, 8, 128
    columns = (2 * groups + heads) * width
    shapes = (
        of((rows, length, columns), HALF),
        of((columns, 4), jnp.float32),
        *(of((rows, length, heads), jnp.float32) for _ in range(2)),
    )
    ids = of((rows, length), jnp.int32)
    before = of((rows, 3, columns), HALF), of((rows, heads, width, width), jnp.float32)

    def read(ids, before, state, *inputs):
        inputs = delta.DeltaInputs(*inputs)
        return delta.read_states(inputs, groups, width, ids, before, state, in_kernels=True)

    def pull_all(ids, *inputs):
        return pull(functools.partial(read, ids, None, None), *inputs)

    for function, *args in ((pull_all, ids, *shapes), (read, ids, *before, *shapes)):
        text = lower_for_gpu(function, *args)
        kernels_ = "_solve_tril", "_chunk_fwd_h_o", "_causal_conv1d_fwd"
        assert all(f'"{name}"' in text for name in kernels_)
