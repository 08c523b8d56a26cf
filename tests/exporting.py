"""What tests of exports share: a student to export, and ways to look at what came of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.device import sharding
from kdjax.formats import open_table
from kdjax.models.arch import spec_from_table
from kdjax.models.decoder import Compute, functional
from kdjax.models.loading import load_params


def load(path):
    """Spec and float32 parameters of a checkpoint, on the host."""
    table = open_table(path)
    spec = spec_from_table(table)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    _, abstract = functional(spec, Compute())
    return spec, jax.device_get(load_params(table, spec, abstract, mesh))


def short(spec):
    """GGUF's reals are float32, others have the decimals."""
    return dataclasses.replace(spec, rms_eps=float(f"{spec.rms_eps:.6g}"))


@functools.cache
def forward(spec):
    apply, _ = functional(spec, Compute())

    def logits(params, tokens):
        where = (
            jnp.ones_like(tokens),
            jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape),
        )
        return jnp.einsum("BTD,VD->BTV", apply.hidden(params, tokens, *where), apply.head(params))

    return jax.jit(logits)


def logits_of(spec, params):
    tokens = np.random.default_rng(0).integers(0, 160, (2, 24)).astype(np.int32)
    return np.asarray(forward(spec)(params, tokens))


def a_student(path):
    """Path, spec and parameters that differ from the file's own."""
    spec, params = load(path)
    rng = np.random.default_rng(7)

    def moved(x):
        return np.asarray(x) + rng.standard_normal(x.shape, np.float32) * np.float32(1e-3)

    return path, spec, jax.tree.map(moved, params)


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def corrupted(encode):
    def encoded(rows, dtype):
        raw = encode(rows, dtype).copy()
        if rows.ndim == 2:
            raw[-1, 1] ^= 1 << 6
        return raw

    return encoded
