"""What tests of exports share: a student to export, and ways to look at what came of it."""

import dataclasses

import jax
import numpy as np

import kdjax


def load(path):
    """A checkpoint as a model of float32 parameters on the host."""
    model = kdjax.load(path, dtype="float32")
    return model.replace(params=jax.device_get(model.params))


def short(spec):
    """GGUF's reals are float32, others have the decimals."""
    return dataclasses.replace(spec, rms_eps=float(f"{spec.rms_eps:.6g}"))


def logits_of(model):
    return np.asarray(model.logits(np.random.default_rng(0).integers(0, 140, (2, 24))))


def a_student(path):
    """A model whose parameters differ from the file's own."""
    model, rng = load(path), np.random.default_rng(7)

    def moved(x):
        return np.asarray(x) + rng.standard_normal(x.shape, np.float32) * np.float32(1e-3)

    return model.replace(params=jax.tree.map(moved, model.params))


def assert_same(params, want):
    jax.tree.map(np.testing.assert_array_equal, params, want)


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def corrupted(encode):
    def encoded(rows, dtype):
        raw = encode(rows, dtype).copy()
        if rows.ndim == 2:
            raw[-1, 1] ^= 1 << 6
        return raw

    return encoded
