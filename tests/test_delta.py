"""The gated delta rule: chunks are the recurrence, and documents of a row do not meet."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdjax
from kdjax.formats import open_table
from kdjax.models import delta
from kdjax.models.delta import DeltaInputs, invert_unit_lower, normalize_heads

GOLDEN = Path(__file__).parent / "goldens" / "qwen3_5"
# Operation by operation each shape of each would be a program of its own.
apply_delta_rule, recur, convolve = map(
    jax.jit, (delta.apply_delta_rule, delta.recur, delta.convolve)
)
read_and_keep = jax.jit(delta.read_and_keep, static_argnums=(1, 2))
DOCUMENTS = (1, 2, 3, 64, 5, 127, 1, 70, 28)  # 301 positions; borders on, before and in chunks


def draw(length, *, groups=2, repeats=3, rows=2, seed=0, alike=False):
    """Inputs as a layer makes them; `alike` keys are nearly one, which a power series cannot."""
    rng = np.random.default_rng(seed)
    heads = groups * repeats

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(rows, length, *shape)), jnp.float32)

    q, k = normal(groups, 16), normal(groups, 16)
    k = k + 20 if alike else k
    rate = jnp.asarray(rng.uniform(-5, -3 if alike else 2, (1, 1, heads)), jnp.float32)
    decay = -jnp.exp(rate) * jax.nn.softplus(normal(heads))
    beta = jax.nn.sigmoid(normal(heads) + (4 if alike else 0))
    return normalize_heads(q) / 4, normalize_heads(k), normal(heads, 8), decay, beta


def number(lengths, rows=2):
    ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)])
    return jnp.asarray(np.broadcast_to(ids, (rows, len(ids))), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def pull(function, *args):
    """The outputs, and the gradients by all real inputs of a sum that sees each output."""

    def loss(*reals):
        out, state = function(*reals, *args[5:])
        weigh = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weigh) + jnp.sum(jnp.sin(state))

    return function(*args), jax.grad(loss, argnums=tuple(range(5)))(*args[:5])


def assert_close(found, wanted, limit):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= limit * max(np.linalg.norm(b), 1e-3)


@pytest.mark.parametrize("alike", [False, True], ids=["keys", "like keys"])
def test_chunks_are_the_recurrence(alike):
    """Outputs, the last state and all gradients, over documents of 1 to 127 positions."""
    ids = number(DOCUMENTS)
    inputs = draw(ids.shape[1], alike=alike)
    state = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, 16, 8)), jnp.float32)
    with jax.default_matmul_precision("highest"):
        (out, last), grads = pull(apply_delta_rule, *inputs, ids, state)
        (out_, last_), grads_ = pull(recur, *inputs, ids, state)
    assert_close((out, last), (out_, last_), 1e-5)
    assert_close(grads, grads_, 1e-4)


def test_documents_of_a_row_do_not_meet():
    """Packed rows are their documents apart; the convolution as well, to the last bit."""
    ids = number(DOCUMENTS)
    inputs = draw(ids.shape[1])
    out = np.asarray(apply_delta_rule(*inputs, ids)[0])
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, ids.shape[1], 12)).astype(np.float32)
    kernel = rng.normal(size=(12, 4)).astype(np.float32)
    mixed, start = np.asarray(convolve(x, kernel, ids)), 0
    for length in DOCUMENTS:  # each alone, before padding
        part = slice(start, start + length)
        one = np.repeat((np.arange(128) < length)[None].astype(np.int32), 2, 0)
        *first, text = (
            np.pad(y[:, part], [(0, 0), (0, 128 - length), *[(0, 0)] * (y.ndim - 2)])
            for y in map(np.asarray, (*inputs, x))
        )
        alone, _ = apply_delta_rule(*first, one)
        assert_close(out[:, part], np.asarray(alone)[:, :length], 1e-5)
        apart = np.asarray(convolve(text, kernel, one))[:, :length]
        np.testing.assert_array_equal(mixed[:, part], apart)
        start += length


@pytest.mark.slow
def test_a_text_may_be_read_in_parts():
    """State and the last inputs of the convolution carry a document from call to call."""
    ids, inputs = np.asarray(number((150,))), [np.asarray(x) for x in draw(150)]
    whole, last = apply_delta_rule(*inputs, ids)
    x = np.random.default_rng(3).normal(size=(2, 150, 12)).astype(np.float32)
    kernel = np.random.default_rng(4).normal(size=(12, 4)).astype(np.float32)
    state = before = None
    outs, mixed = [], []
    for part, run in ((slice(0, 100), apply_delta_rule), (slice(100, 101), recur),
                      (slice(101, 150), apply_delta_rule)):  # fmt: skip
        out, state = run(*(y[:, part] for y in inputs), ids[:, part], state)
        outs.append(out)
        mixed.append(convolve(x[:, part], kernel, ids[:, part], before))
        before = x[:, part.stop - 3 : part.stop]
    assert_close((np.concatenate(outs, 1), state), (whole, last), 1e-5)
    np.testing.assert_array_equal(np.concatenate(mixed, 1), convolve(x, kernel, ids))


def test_the_inverse_is_exact_where_powers_cancel():
    """All ones below the diagonal: the tenth power of them holds numbers of 1e9."""
    lower = jnp.tril(jnp.ones((1, 64, 64), jnp.float32), -1)
    inverse = np.asarray(invert_unit_lower(lower))[0].astype(np.float64)
    wanted = np.linalg.inv(np.tril(np.ones((64, 64))))
    np.testing.assert_allclose(inverse, wanted, atol=1e-5)


@pytest.mark.slow
def test_what_is_beyond_a_rows_length_is_not_read():
    """State and last inputs are those of the row cut there; of an earlier document none are left.

    Also of a row that goes on, whose ids before have their own inputs and state.
    """
    rng = np.random.default_rng(5)

    def draw_inputs(length):
        q, k, v, decay, beta = draw(length, rows=3)
        mixed = jnp.concatenate([x.reshape(3, length, -1) for x in (q, k, v)], axis=-1)
        return DeltaInputs(mixed, kernel, decay, beta)

    kernel = jnp.asarray(rng.normal(size=(2 * 2 * 16 + 6 * 8, 4)), jnp.float32)
    inputs, ids = draw_inputs(9), jnp.ones((3, 9), jnp.int32)
    before = jnp.asarray(rng.normal(size=(3, 3, 112)), jnp.float32)
    state = jnp.asarray(rng.normal(size=(3, 6, 16, 8)), jnp.float32)
    lengths = (1, 6, 9)
    _, found = read_and_keep(inputs, 2, 16, ids, jnp.asarray(lengths), before, state)
    for row, length in enumerate(lengths):
        part = inputs._replace(
            **{x: getattr(inputs, x)[row:, :length] for x in ("mixed", "decay", "beta")}
        )
        rest = ids[row:, :length], jnp.full(3 - row, length), before[row:], state[row:]
        _, wanted = read_and_keep(part, 2, 16, *rest)
        assert_close([x[row] for x in found], [x[0] for x in wanted], 1e-6)
        inputs_so_far = jnp.concatenate([before, inputs.mixed], 1)[row, : length + 3]
        np.testing.assert_array_equal(found[1][row], inputs_so_far[-3:])
    apart = ids.at[:, 0].set(0)
    _, kept = read_and_keep(inputs, 2, 16, apart, jnp.asarray(lengths), before, state)
    assert not any(x[0].any() for x in kept) and all(x[1:].any() for x in kept)


def read_by_formulas(tensors, tokens):
    """Logits `[T, V]` of the golden's tensors in float64, from the published equations alone.

    Value head h reads key head h // 3 in Hugging Face's files.
    """

    def part(name):
        return tensors[f"model.layers.{layer}.{name}"]

    def rms(x, weight):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * weight

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def attend(x):
        q, k, v = (x @ part(f"self_attn.{name}_proj.weight").T for name in "qkv")
        q, gate = np.split(q.reshape(len(x), 4, 32), 2, axis=-1)
        q = rms(q, 1 + part("self_attn.q_norm.weight"))
        k = rms(k.reshape(len(x), 2, 16), 1 + part("self_attn.k_norm.weight"))
        v = v.reshape(len(x), 2, 16)
        turn = np.exp(1j * np.arange(len(x))[:, None] / np.array([1, 100.0]))  # 10,000^(i / 2)
        for heads in (q, k):  # the first 4 of 16 columns
            pairs = (heads[..., :2] + 1j * heads[..., 2:4]) * turn[:, None]
            heads[..., :2], heads[..., 2:4] = pairs.real, pairs.imag
        out = np.zeros_like(q)
        for head in range(4):
            scores = q[:, head] @ k[:, head // 2].T / 4
            scores = np.where(np.tri(len(x)), np.exp(scores), 0)
            out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, head // 2]
        return (out * sigmoid(gate)).reshape(len(x), 64) @ part("self_attn.o_proj.weight").T

    def remember(x):
        mixed = x @ part("linear_attn.in_proj_qkv.weight").T
        kernel, past = part("linear_attn.conv1d.weight")[:, 0], np.zeros((3, 112))
        past = np.concatenate([past, mixed])
        mixed = sum(past[i : i + len(x)] * kernel[:, i] for i in range(4))
        mixed *= sigmoid(mixed)
        q, k, v = np.split(mixed, [32, 64], axis=-1)
        q, k = (y.reshape(-1, 2, 16) for y in (q, k))
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        v = v.reshape(-1, 6, 8)
        alpha, beta = (x @ part(f"linear_attn.in_proj_{name}.weight").T for name in "ab")
        fade = np.log1p(np.exp(alpha + part("linear_attn.dt_bias")))
        kept = np.exp(-np.exp(part("linear_attn.A_log")) * fade)
        out = np.zeros_like(v)
        for head in range(6):
            state = np.zeros((16, 8))
            for t in range(len(x)):
                key = k[t, head // 3]
                state = kept[t, head] * state
                news = sigmoid(beta[t, head]) * (v[t, head] - state.T @ key)
                state = state + np.outer(key, news)
                out[t, head] = state.T @ q[t, head // 3] / 4
        gate = (x @ part("linear_attn.in_proj_z.weight").T).reshape(-1, 6, 8)
        out = rms(out, part("linear_attn.norm.weight")) * gate * sigmoid(gate)
        return out.reshape(-1, 48) @ part("linear_attn.out_proj.weight").T

    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(4):
        mix = attend if layer == 3 else remember
        x = x + mix(rms(x, 1 + part("input_layernorm.weight")))
        normal = rms(x, 1 + part("post_attention_layernorm.weight"))
        gate, up = (normal @ part(f"mlp.{name}_proj.weight").T for name in ("gate", "up"))
        x = x + (gate * sigmoid(gate) * up) @ part("mlp.down_proj.weight").T
    return rms(x, 1 + tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def test_layers_are_the_published_formulas():
    """Documents of 5, 20 and 1 positions, in a row and by hand each alone."""
    table = open_table(GOLDEN)
    tensors = {
        name: table.raw(name).view(np.float32).reshape(table.info(name).shape).astype(np.float64)
        for name in table
    }
    lengths = (5, 20, 1)
    ids = number(lengths, 1)
    at = jnp.concatenate([jnp.arange(n, dtype=jnp.int32) for n in lengths])[None]
    tokens = np.random.default_rng(6).integers(0, 160, (1, 26)).astype(np.int32)
    model = kdjax.load(GOLDEN, dtype="float32")
    hidden = jax.jit(model.functions.hidden)(model.params, jnp.asarray(tokens), ids, at)
    found = np.asarray(hidden[0] @ model.functions.head(model.params).T)
    documents = np.split(tokens[0], np.cumsum(lengths)[:-1])
    wanted = np.concatenate([read_by_formulas(tensors, document) for document in documents])
    assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
