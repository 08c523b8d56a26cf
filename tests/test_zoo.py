"""Every family as a GGUF file of random blocks: packed is dense, and float8 follows."""

import numpy as np
import pytest

import kdjax
from scripts.bench.synthetic import SHAPES, write_random_gguf

TOKENS = np.random.default_rng(0).integers(0, 300, (1, 40))  # longer than the toy's window of 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    ["tiny-gemma", "tiny-student", "tiny-experts", "tiny-delta-teacher", "tiny-delta-experts"],
)
def test_a_family_runs_in_every_form(shape, tmp_path):
    write_random_gguf(tmp_path / "m.gguf", SHAPES[shape])
    exact = SHAPES[shape].experts or SHAPES[shape].delta_keys  # whose products are not in float8
    forms = ("packed", "dense") if exact else ("packed", "dense", "float8")
    logits = {}
    for form in forms:
        model = kdjax.load(tmp_path / "m.gguf", weights=form, dtype="float32")
        logits[form] = np.asarray(model.logits(TOKENS))
    np.testing.assert_array_equal(logits["packed"], logits["dense"])
    assert np.isfinite(logits["dense"]).all() and logits["dense"].std() > 0
    for form in forms[2:]:
        error = np.linalg.norm(logits[form] - logits["dense"])
        assert 0 < error < 0.2 * np.linalg.norm(logits["dense"]), form


def test_a_local_layer_forgets_what_is_beyond_its_window(tmp_path):
    """Where all layers are local, an id `layers * (window - 1)` back reaches nothing."""
    shape = SHAPES["tiny-gemma"]._replace(layers=2, window=8)
    write_random_gguf(tmp_path / "m.gguf", shape)
    model = kdjax.load(tmp_path / "m.gguf", dtype="float32")
    moved = TOKENS.copy()
    moved[0, 3] += 1
    change = np.abs(np.asarray(model.logits(moved) - model.logits(TOKENS)))[0].max(-1)
    assert (change[:3] == 0).all() and (change[3 : 3 + 15] > 0).all() and (change[18:] == 0).all()
