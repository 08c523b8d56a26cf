"""A streaming writer of GGUF files; `gguf` reads them."""

import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import UserError
from kdjax.formats.blocks import BLOCKS
from kdjax.formats.files import Data, checked_chunks, replacing, tensor_bytes
from kdjax.formats.gguf import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING, VERSIONS

_SCALAR_NUMBERS = {np.dtype(name): number for number, name in SCALARS.items()}


def _pack_string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _as_array(value: Any) -> np.ndarray:
    """Numbers in the type they are written with; NumPy arrays keep their own."""
    array = np.asarray(value)
    if isinstance(value, np.ndarray) or array.dtype.kind not in "iuf":
        return array
    if array.dtype.kind == "f":
        return array.astype("<f4")
    # llama.cpp reads counts and ids as uint32, but lists (of token types) as int32.
    kinds = ("<i4", "<i8", "<u8") if array.ndim else ("<u4", "<u8", "<i4", "<i8")
    for info in map(np.iinfo, kinds):
        if array.size and info.min <= array.min() and array.max() <= info.max:
            return array.astype(info.dtype)
    return array


def _pack_value(key: str, value: Any) -> bytes:
    """Type number and bytes of one metadata value."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _pack_string(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        head = struct.pack("<IIQ", ARRAY, STRING, len(value))
        return head + b"".join(map(_pack_string, value))
    array = _as_array(value)
    number = _SCALAR_NUMBERS.get(array.dtype)
    if number is None or array.ndim > 1 or not array.size:
        raise UserError(
            f"found metadata {key!r} = {str(value)[:80]!r} of type {type(value).__name__}; "
            "expected a str, bool, int, float or a list of one of them, not empty. "
            "Leave the key out."
        )
    kind = struct.pack("<I", number)
    if array.ndim:
        kind = struct.pack("<IIQ", ARRAY, number, len(array))
    return kind + array.tobytes()


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[tuple[str, str, tuple[int, ...], Data]],
) -> None:
    """Writes a GGUF v3 file; nothing appears under `path` before all of it is on the disk.

    `tensors` are (name, block type, row-major shape, data): the uint8 bytes in any shape, or a
    function that returns them or their successive chunks, called when its turn comes, so that no
    more than one need exist. Raises `UserError` for a value GGUF cannot hold and for data of
    another size than its shape has.
    """
    path, tensors = Path(path), list(tensors)
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    pairs = [_pack_string(key) + _pack_value(key, value) for key, value in metadata.items()]
    header = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(pairs)), *pairs]
    sizes, offset = [], 0
    for name, dtype, shape, _ in tensors:
        nbytes = tensor_bytes(path, name, dtype, shape)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        kind = struct.pack("<IQ", BLOCKS[dtype].ggml, offset)
        header += [_pack_string(name), dims, kind]
        sizes.append(nbytes)
        offset += -(-nbytes // alignment) * alignment
    with replacing(path) as file:
        file.write(b"".join(header))
        for (name, *_, data), nbytes in zip(tensors, sizes, strict=True):
            file.write(bytes(-file.tell() % alignment))
            file.writelines(checked_chunks(path, name, data, nbytes))
        file.write(bytes(-file.tell() % alignment))
