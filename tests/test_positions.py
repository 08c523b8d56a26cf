"""One reading of positions: what it gives is what all logits at once give, in less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import read_positions, share_in_common

ROWS, LENGTH, REAL, WIDTH = 2, 11, 40, 48


def states(rng, *rows):
    """Hidden states [B T D] and a head, for each number of the head's rows."""
    return [(rng.normal(size=(ROWS, LENGTH, 8)), rng.normal(size=(n, 8))) for n in rows]


def spread(models, labels):
    """Each model's largest logit less its smallest, and the logit of the label."""
    own = [(jnp.max(z, -1) - jnp.min(z, -1)) for z in models]
    return own, jnp.take_along_axis(models[0], labels[..., None], -1)[..., 0]


@pytest.mark.parametrize("width", [WIDTH, REAL])
def test_figures_are_those_of_all_logits_at_once(rng, width):
    """A chunk that does not divide; heads of unlike widths; padding rows masked, or left out."""
    both = states(rng, 64, WIDTH)
    labels = rng.integers(0, REAL, (ROWS, LENGTH))
    spec = HeadSpec(KDLoss(), width, REAL, chunk_tokens=6)
    given = [tuple(jnp.asarray(x, jnp.float32) for x in state) for state in both]
    own, of_label = read_positions(spread, given, jnp.asarray(labels), spec=spec)
    for (hidden, head), got in zip(both, own, strict=True):
        z = (hidden @ head.T)[..., :REAL]
        least = -1e30 if width > REAL else z.min(-1)
        np.testing.assert_allclose(got, z.max(-1) - least, rtol=1e-5)
    want = np.take_along_axis(both[0][0] @ both[0][1].T, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(of_label, want, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_not_there_has_no_logits(rng):
    (hidden, head), *_ = states(rng, WIDTH)
    labels = jnp.zeros((ROWS, LENGTH), jnp.int32)

    def look(models, labels):
        assert models[0] is None
        return jnp.max(models[1], -1)

    spec = HeadSpec(KDLoss(), WIDTH, REAL, chunk_tokens=6)
    state = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    got = read_positions(look, [(None, None), state], labels, spec=spec)
    np.testing.assert_allclose(got, (hidden @ head.T)[..., :REAL].max(-1), rtol=1e-4)


def test_more_positions_take_no_more_logits():
    """16 times the text: the logits of a chunk stay the only ones."""
    vocab, shape = 4096, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    spec = HeadSpec(KDLoss(), vocab, vocab, chunk_tokens=32)

    def temporary(length):
        labels = jax.ShapeDtypeStruct((1, length), jnp.int32)
        read = jax.jit(lambda *a: read_positions(spread, [a[:2]], a[2], spec=spec))
        program = read.lower(shape((1, length, 8)), shape((vocab, 8)), labels).compile()
        return program.memory_analysis().temp_size_in_bytes

    logits = 4 * vocab * spec.chunk_tokens
    assert logits <= temporary(64) and temporary(1024) < 3 * logits


def test_the_share_in_common_is_of_sets():
    ids, others = (
        jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]]),
        jnp.asarray([[4, 9, 1, 0], [1, 2, 3, 4]]),
    )
    np.testing.assert_array_equal(share_in_common(ids, others), [0.5, 0.0])
