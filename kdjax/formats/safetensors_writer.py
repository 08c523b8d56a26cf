"""A streaming writer of safetensors files, in shards where they would grow large.

Format: https://github.com/huggingface/safetensors#format; names of shards and index as Transformers
writes and reads them. `safetensors` reads them back.
"""

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path

from kdjax.formats.blocks import BLOCKS
from kdjax.formats.files import Data, checked_chunks, replacing

SHARD_BYTES = 5_000_000_000  # as `save_pretrained` had it for years
_ALIGNMENT = 8  # of the data, from the start of the file

_Tensor = tuple[str, str, tuple[int, ...], Data]


def _nbytes(tensor: _Tensor) -> int:
    _, dtype, shape, _ = tensor
    return math.prod(shape) * BLOCKS[dtype].nbytes


def write_file(path: Path, tensors: Iterable[_Tensor]) -> None:
    """Writes one file; nothing appears under `path` before all of it is on the disk.

    `tensors` as `gguf_writer.write_gguf` takes them, of types F32, F16 and BF16. Raises `UserError`
    for data of another size than its shape has.
    """
    tensors, offset = list(tensors), 0
    # Readers of PyTorch weights ask for this entry.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        name, dtype, shape, _ = tensor
        end = offset + _nbytes(tensor)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            name, _, _, data = tensor
            file.writelines(checked_chunks(path, name, data, _nbytes(tensor)))


def _shards(tensors: Iterable[_Tensor], most: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _nbytes(tensor)
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def write_folder(folder: Path, tensors: Iterable[_Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `model.safetensors`, or numbered shards of at most `shard_bytes` and their index."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0])
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard)
        weight_map |= {tensor[0]: name for tensor in shard}
    total = sum(_nbytes(tensor) for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with replacing(folder / "model.safetensors.index.json") as file:
        file.write(json.dumps(index, indent=2).encode() + b"\n")
