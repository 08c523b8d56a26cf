"""ggml's own block encoders, for types that kdjax reads and does not write.

The library is that of the package xllamacpp, or the shared library that `GGML_LIBRARY` names.
"""

import ctypes
import importlib.util
import itertools
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kdjax.errors import UserError
from kdjax.evaluation.costs import round_matrices
from kdjax.formats.blocks import BLOCKS, decode, row_bytes
from kdjax.formats.kquants import ENCODERS

_ELEMENTS = 1 << 22  # numbers that a thread encodes at a time
_FLOATS = ctypes.POINTER(ctypes.c_float)


def open_ggml() -> ctypes.CDLL:
    """Loads ggml's library; raises `UserError` if there is none."""
    if named := os.environ.get("GGML_LIBRARY"):
        return ctypes.CDLL(named)
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        raise UserError(
            "found no library of ggml; expected the package xllamacpp. Install it, or name a "
            "libggml-base in GGML_LIBRARY."
        )
    return ctypes.CDLL(str(next(Path(found.origin).parent.glob("*.so"))))


def make_encoder() -> Callable[[np.ndarray, str, np.ndarray | None], np.ndarray]:
    """Returns a function of float32 rows `[m, n]`, a type and an importance, float32 `[n]` or None.

    The function returns packed rows, uint8 `[m, row_bytes]`. For types that ggml writes with an
    importance alone (IQ2_XXS, IQ2_XS, IQ1_S), None counts as ones.
    """
    library = open_ggml()
    quantize, requires = library.ggml_quantize_chunk, library.ggml_quantize_requires_imatrix
    quantize.restype, requires.restype = ctypes.c_size_t, ctypes.c_bool
    quantize.argtypes = [ctypes.c_int, _FLOATS, ctypes.c_void_p, *[ctypes.c_int64] * 3, _FLOATS]

    def run(x: np.ndarray, dtype: str, importance: np.ndarray | None) -> np.ndarray:
        x, kind = np.ascontiguousarray(x, np.float32), BLOCKS[dtype].ggml
        if importance is None and requires(kind):
            importance = np.ones(x.shape[1], np.float32)
        out, weights = np.zeros((len(x), row_bytes(dtype, x.shape[1])), np.uint8), None
        if importance is not None:
            importance = np.ascontiguousarray(importance, np.float32)
            weights = importance.ctypes.data_as(_FLOATS)
        quantize(kind, x.ctypes.data_as(_FLOATS), out.ctypes.data, 0, *x.shape, weights)
        return out

    return run


def make_rounding(own: Collection[str] = ENCODERS) -> Callable[..., Any]:
    """Returns a function as `costs.round_matrices`, for every type that kdjax or ggml writes.

    Types `own` are rounded by kdjax, others by ggml on all cores.
    """
    encode = make_encoder()

    def round_stack(x: Any, dtype: str, importance: np.ndarray | None = None) -> Any:
        if dtype in own:
            return round_matrices(x, dtype, importance)
        host = np.asarray(x, np.float32)
        rows = host.reshape(-1, *host.shape[-2:])
        weights: list[np.ndarray | None] = [None] * len(rows)
        if importance is not None:
            shape = *host.shape[:-2], 1, host.shape[-1]
            weights = list(np.broadcast_to(importance, shape).reshape(len(rows), -1))
        step = max(1, _ELEMENTS // host.shape[-1])
        starts = itertools.product(range(len(rows)), range(0, host.shape[-2], step))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = pool.map(
                lambda at: encode(rows[at[0]][at[1] : at[1] + step], dtype, weights[at[0]]), starts
            )
            raw = np.concatenate(list(parts))
        return decode(jnp.asarray(raw), dtype).reshape(host.shape)

    return round_stack
