"""Importance matrices of llama.cpp: the mean square of each input of a matrix over a text.

Both forms are read, the first is written: GGUF, with `NAME.in_sum2` and `NAME.counts` for a matrix,
and the older binary one (https://github.com/ggml-org/llama.cpp, tools/imatrix and tools/quantize).
"""

import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.files import hash_given, open_given
from kdjax.formats.gguf import write_gguf

_EXPECTED = "an importance matrix of llama-imatrix"
_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_importance(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads float32 `[matrices, inputs]` by the tensor's name in GGUF; each expert has a row.

    Inputs of an expert that no token chose have importance 1, as for llama-quantize.
    Raises `UserError` for a file of neither form, and for numbers below 0 or not finite.
    """
    path = Path(path)
    with open_given(path, _EXPECTED) as file:
        is_gguf = file.read(4) == b"GGUF"
    found = _read_gguf(path) if is_gguf else _read_legacy(path)
    if not found:
        raise UserError(
            f"{path}: found no importance matrix; expected a file of `kdjax imatrix` or of "
            "llama-imatrix with some. Make it again, or leave it out."
        )
    for name, values in found.items():
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise UserError(f"{path}: found numbers of {name} below 0 or not finite; expected none")
    return found


def hash_importance(path: str | os.PathLike[str]) -> str:
    """SHA-256 of an importance file's bytes; raises `MissingFileError` if there is no such file."""
    return hash_given(path, _EXPECTED)


def _read_gguf(path: Path) -> dict[str, np.ndarray]:
    table = open_table(path)
    found = {}
    for name in (name for name in table if name.endswith(_SUMS)):
        matrix = name.removesuffix(_SUMS)
        if matrix + _COUNTS not in table:
            raise UserError(f"{path}: found {name} without {_COUNTS[1:]}; expected both.")
        parts = [table.info(matrix + part) for part in (_SUMS, _COUNTS)]
        (size, each), types = (math.prod(x.shape) for x in parts), {x.dtype for x in parts}
        if types != {"F32"} or size % each:
            raise UserError(
                f"{path}: found {size} sums of {matrix} and {each} counts in "
                f"{', '.join(sorted(types))}; expected F32 and "
                "equally many sums for each count. Make it again."
            )
        sums, counts = (table.raw(matrix + part).view("<f4") for part in (_SUMS, _COUNTS))
        counts = counts.reshape(-1, 1)
        means = sums.reshape(len(counts), -1) / np.where(counts > 0, counts, 1)
        found[matrix] = np.where(counts > 0, means, np.float32(1))
    return found


def _read_legacy(path: Path) -> dict[str, np.ndarray]:
    data, at = path.read_bytes(), 4
    found = {}
    try:
        for _ in range(struct.unpack_from("<i", data)[0]):
            (size,) = struct.unpack_from("<i", data, at)
            name = data[at + 4 : at + 4 + size].decode()
            calls, count = struct.unpack_from("<ii", data, at + 4 + size)
            if min(size, count) < 0:
                raise ValueError("a length below 0")
            at += 12 + size
            values = np.frombuffer(data, "<f4", count, at)
            at += 4 * count
            found[name] = (values / max(calls, 1)).astype(np.float32)[None]
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise UserError(
            f"{path}: found no importance matrix ({error}); expected a file of `kdjax imatrix` or "
            "of llama-imatrix."
        ) from error
    return found


def write_importance(
    path: str | os.PathLike[str],
    sums: Mapping[str, np.ndarray],
    count: int,
    *,
    datasets: Sequence[str],
    chunk_size: int,
) -> None:
    """Writes sums of squares `[inputs]` by name, of `count` positions, as llama-imatrix does."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(datasets),
        "imatrix.chunk_count": count // chunk_size,
        "imatrix.chunk_size": chunk_size,
    }
    rows = []
    for name in sorted(sums):
        values = np.asarray(sums[name], "<f4")
        rows.append((name + _SUMS, "F32", (1, len(values)), values.view(np.uint8)))
        rows.append((name + _COUNTS, "F32", (1, 1), np.array([count], "<f4").view(np.uint8)))
    write_gguf(path, metadata, rows)
