"""Figures of a model's tensors, one at a time, for the detectors of weights."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kdjax.evaluation.health.detectors import DEAD, MatrixStats
from kdjax.formats.blocks import decode
from kdjax.formats.saved import SavedTable
from kdjax.models.arch import STACKS
from kdjax.models.checkpoint import Checkpoint

_CHUNK = 1 << 25  # numbers on the device at a time
_VOCABULARY = ("embed", "head")
_SKETCHED = 2048  # rows of a matrix whose spectrum is looked at
_STEPS = 8  # of power iteration: the largest singular value of noise comes out 2 to 11% low


class _Tensor(NamedTuple):
    name: str
    kind: str  # the name that its peers in other layers share; "" without peers
    rows: np.ndarray
    dtype: str  # a block type, or "" for numbers
    matrix: bool


@functools.partial(jax.jit, static_argnames="dtype")
def _look(raw: Array, dtype: str) -> tuple[Array, ...]:
    """Counts NaN and Inf; finds the finite extremes, and each row's norm and two hashes."""
    x = decode(raw, dtype) if dtype else raw
    x = x.reshape(-1, x.shape[-1])
    finite = jnp.isfinite(x)
    zeroed = jnp.where(finite, x, 0.0).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    place = jnp.arange(x.shape[1], dtype=jnp.uint32)[None] * jnp.uint32(2) + jnp.uint32(1)
    # Equal rows have equal sums in any order of adding; others hardly ever.
    hashes = [
        jnp.sum((bits ^ (bits >> shift)) * (place * jnp.uint32(factor)), axis=1, dtype=jnp.uint32)
        for shift, factor in ((15, 2654435761), (13, 2246822519))
    ]
    least = jnp.min(jnp.where(finite, x, jnp.inf))
    most = jnp.max(jnp.where(finite, x, -jnp.inf))
    norms = jnp.sqrt(jnp.sum(zeroed * zeroed, axis=1))
    return jnp.sum(jnp.isnan(x)), jnp.sum(jnp.isinf(x)), least, most, norms, *hashes


@functools.partial(jax.jit, static_argnames="dtype")
def _measure_noise(raw: Array, dtype: str) -> Array:
    """The largest singular value over that of noise of the same size and norm.

    Noise has `rms * (sqrt(rows) + sqrt(columns))`, the edge of Marchenko and Pastur (1967).
    """
    x = (decode(raw, dtype) if dtype else raw).astype(jnp.float32)
    rows, columns = x.shape
    v = jax.random.normal(jax.random.key(0), (columns,))
    for _ in range(_STEPS):
        v = x.T @ (x @ (v / jnp.linalg.norm(v)))
    edge = jnp.sqrt(jnp.mean(x * x)) * (np.sqrt(rows) + np.sqrt(columns))
    return jnp.sqrt(jnp.linalg.norm(v)) / edge


def _stats(tensor: _Tensor, width: int) -> MatrixStats:
    step = max(1, _CHUNK // width)
    starts = range(0, len(tensor.rows), step)
    parts = [jax.device_get(_look(tensor.rows[i : i + step], tensor.dtype)) for i in starts]
    nan, inf, least, most, norms, *hashes = zip(*parts, strict=True)
    norm = np.concatenate(norms)
    # Compared with the root mean square: if most rows are dead, the median norm is near zero.
    # Without the largest rows: one that is a thousand times too large must not make the others
    # count as dead.
    common = norm[norm <= np.quantile(norm, 0.99)]
    dead = norm <= DEAD * np.sqrt(np.mean(np.square(common, dtype=np.float64)))
    median = float(np.median(norm))
    keys = np.stack([np.concatenate(h) for h in hashes], axis=1)[~dead]
    repeated = len(keys) - len(np.unique(keys, axis=0))
    low, high = float(np.min(least)), float(np.max(most))
    noise = 0.0
    if tensor.kind and tensor.matrix:
        noise = float(_measure_noise(tensor.rows[:_SKETCHED], tensor.dtype))
    return MatrixStats(
        name=tensor.name,
        kind=tensor.kind,
        size=len(norm) * width,
        nan=int(np.sum(nan)),
        inf=int(np.sum(inf)),
        spread=max(high - low, 0.0),  # -inf where nothing is finite
        norm=float(np.sqrt(np.mean(np.square(norm, dtype=np.float64)) / width)),
        rows=len(norm) * tensor.matrix,
        dead_rows=int(dead.sum()) * tensor.matrix,
        repeated_rows=repeated * tensor.matrix,
        large_row=int(np.argmax(norm)),
        large_norm=float(np.max(norm)) / median if median > 0 else 0.0,
        noise=noise,
    )


def _file_tensors(checkpoint: Checkpoint) -> Iterator[_Tensor]:
    """The tensors of a model's files."""
    for path, names in checkpoint.names.items():
        for name in names:
            raw, info = checkpoint.table.raw(name), checkpoint.table.info(name)
            if path[0] in _VOCABULARY:
                raw = raw[: checkpoint.tokenizer.vocab_size]
            matrix = len(info.shape) >= 2
            kind = "/".join(path) if path[0] in STACKS else ""
            rows = raw.reshape(-1, raw.shape[-1]) if matrix else raw[None]  # of experts all
            yield _Tensor(name, kind, rows, info.dtype, matrix)


def _saved_tensors(checkpoint: Checkpoint) -> Iterator[_Tensor]:
    """The tensors of a saved step, layer by layer; the type of plain numbers is ""."""
    assert isinstance(checkpoint.table, SavedTable)
    for name, array in checkpoint.table.arrays():
        if name in _VOCABULARY:
            array = array[: checkpoint.tokenizer.vocab_size]
        layers = {name: array}
        if name.partition("/")[0] in STACKS:
            layers = {f"{name}[{i}]": layer for i, layer in enumerate(array)}
        for part, layer in layers.items():
            kind = name if part != name else ""
            yield _Tensor(part, kind, layer.reshape(-1, layer.shape[-1]), "", layer.ndim >= 2)


def matrix_stats(checkpoint: Checkpoint) -> list[MatrixStats]:
    """Computes figures of every tensor, reading at most 32 M numbers at once.

    Rows of padding ids are left out of embedding and head.
    """
    saved = checkpoint.whole_step
    tensors = _file_tensors(checkpoint) if saved is None else _saved_tensors(checkpoint)
    stats = []
    for tensor in tensors:
        width = tensor.rows.shape[-1]
        if tensor.dtype:
            width = checkpoint.table.info(tensor.name).shape[-1]
        stats.append(_stats(tensor, width))
    return stats
