"""Figures of a model's tensors, one at a time: what the detectors of weights look at."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kdjax.evaluation.health.detectors import DEAD, MatrixStats
from kdjax.formats.blocks import decode
from kdjax.formats.saved import saved_params
from kdjax.models.checkpoint import Checkpoint, Saved

_CHUNK = 1 << 25  # numbers on the device at a time
_VOCABULARY = ("embed", "head")
_Tensor = tuple[str, np.ndarray, str, bool]  # name, rows, block type, whether it is a matrix


@functools.partial(jax.jit, static_argnames="dtype")
def _look(raw: Array, dtype: str) -> tuple[Array, ...]:
    """NaN, Inf, least and greatest finite number, and of each row its norm and two hashes."""
    x = decode(raw, dtype) if dtype else raw
    x = x.reshape(-1, x.shape[-1])
    finite = jnp.isfinite(x)
    zeroed = jnp.where(finite, x, 0.0).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    place = jnp.arange(x.shape[1], dtype=jnp.uint32)[None] * jnp.uint32(2) + jnp.uint32(1)
    # Rows that are equal have equal sums, whatever the order of adding; others hardly ever.
    hashes = [
        jnp.sum((bits ^ (bits >> shift)) * (place * jnp.uint32(factor)), axis=1, dtype=jnp.uint32)
        for shift, factor in ((15, 2654435761), (13, 2246822519))
    ]
    least = jnp.min(jnp.where(finite, x, jnp.inf))
    most = jnp.max(jnp.where(finite, x, -jnp.inf))
    norms = jnp.sqrt(jnp.sum(zeroed * zeroed, axis=1))
    return jnp.sum(jnp.isnan(x)), jnp.sum(jnp.isinf(x)), least, most, norms, *hashes


def _stats(
    name: str, size: int, chunks: Iterator[tuple[np.ndarray, str]], matrix: bool
) -> MatrixStats:
    parts = [jax.device_get(_look(*chunk)) for chunk in chunks]
    nan, inf, least, most, norms, *hashes = zip(*parts, strict=True)
    norm = np.concatenate(norms)
    # Compared with the root mean square: where most rows are dead, the median norm is near zero.
    dead = norm <= DEAD * np.sqrt(np.mean(np.square(norm, dtype=np.float64)))
    keys = np.stack([np.concatenate(h) for h in hashes], axis=1)[~dead]
    repeated = len(keys) - len(np.unique(keys, axis=0))
    low, high = float(np.min(least)), float(np.max(most))
    return MatrixStats(
        name=name,
        size=size,
        nan=int(np.sum(nan)),
        inf=int(np.sum(inf)),
        spread=max(high - low, 0.0),  # -inf where nothing is finite
        rows=len(norm) * matrix,
        dead_rows=int(dead.sum()) * matrix,
        repeated_rows=repeated * matrix,
    )


def _file_tensors(checkpoint: Checkpoint) -> Iterator[_Tensor]:
    """The tensors of a model's files."""
    for path, names in checkpoint.names.items():
        for name in names:
            raw, info = checkpoint.table.raw(name), checkpoint.table.info(name)
            if path[0] in _VOCABULARY:
                raw = raw[: checkpoint.tokenizer.vocab_size]
            matrix = len(info.shape) == 2
            yield name, raw if matrix else raw[None], info.dtype, matrix


def _saved_tensors(checkpoint: Checkpoint, saved: Saved) -> Iterator[_Tensor]:
    """The tensors of a saved step, layer by layer; numbers are no blocks: their type is ""."""
    for name, array in saved_params(saved.workdir, saved.step):
        if name in _VOCABULARY:
            array = array[: checkpoint.tokenizer.vocab_size]
        layers = {name: array}
        if name.startswith("blocks/"):
            layers = {f"{name}[{i}]": layer for i, layer in enumerate(array)}
        for part, layer in layers.items():
            yield part, np.atleast_2d(layer), "", layer.ndim == 2


def matrix_stats(checkpoint: Checkpoint) -> list[MatrixStats]:
    """Figures of every tensor, read a part at a time: no more than 32 M numbers at once.

    Of embedding and head the rows of padding ids are left out.
    """
    saved = checkpoint.saved
    tensors = _file_tensors(checkpoint) if saved is None else _saved_tensors(checkpoint, saved)
    stats = []
    for name, rows, dtype, matrix in tensors:
        width = rows.shape[-1] if not dtype else checkpoint.table.info(name).shape[-1]
        step = max(1, _CHUNK // width)
        chunks = ((rows[at : at + step], dtype) for at in range(0, len(rows), step))
        stats.append(_stats(name, len(rows) * width, chunks, matrix))
    return stats
