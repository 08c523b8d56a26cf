"""Hugging Face checkpoints: a lazy, memory-mapped table of safetensors files, and a writer.

Format: https://github.com/huggingface/safetensors#format; names of shards and index as Transformers
writes and reads them. Files are written by the safetensors library. Headers are read here: a plan
reads headers of remote and of truncated files, whose data is missing; an error must name the
damaged tensor; and bytes are mapped, not copied.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
import safetensors.numpy

from kdjax.errors import MissingFileError, UserError
from kdjax.formats.blocks import block_type
from kdjax.formats.files import (
    DOWNLOAD,
    TensorToWrite,
    bad,
    checked_chunks,
    cut_short,
    load_json,
    map_file,
    replacing,
    tensor_bytes,
)
from kdjax.formats.table import TensorInfo, TensorTable, map_tensors
from kdjax.progress import counted

_log = logging.getLogger("kdjax")
_MAX_DIMS = 8
_NUMBERS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_DTYPES = _NUMBERS | {"I64": np.int64, "BOOL": np.bool_}  # these of tables, not of weights
_SINGLE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as PEFT names them
SHARD_BYTES = 5_000_000_000  # long the default of `save_pretrained`; a larger tensor is a shard
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")


_Tensors = dict[str, tuple[TensorInfo, np.ndarray]]  # bytes as uint8, flat
_Opened = tuple[tuple[Path, ...], _Tensors, UserError | None]  # last: a truncated file's error


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds the config of a Hugging Face model or of a PEFT adapter."""
    return any((folder / name).is_file() for name in (_CONFIG, ADAPTER_CONFIG))


def _are_counts(value: object) -> TypeGuard[list[int]]:
    """Whether these are a few integers of 63 bits: products of larger ones cannot be printed."""
    if not isinstance(value, list) or len(value) > _MAX_DIMS:
        return False
    return all(type(n) is int and 0 <= n < 2**63 for n in value)


def _read_entry(path: Path, name: str, entry: object) -> tuple[TensorInfo, int]:
    """Reads one tensor's entry and its offset in the data section."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        found = f"tensor {name!r} described as {str(entry)[:80]}"
        raise bad(path, found, "its dtype, shape and data_offsets", DOWNLOAD)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        found = f"tensor {name!r} of type {str(dtype)[:80]}"
        save = "`model.to(torch.bfloat16).save_pretrained(...)`"
        remedy = f"Save the model again in bfloat16: {save}."
        raise bad(path, found, f"one of {', '.join(_NUMBERS)}", remedy)
    start, end = offsets
    nbytes = tensor_bytes(path, name, dtype, tuple(shape))
    if end - start != nbytes:
        found = f"{end - start} bytes for tensor {name!r}"
        raise bad(path, found, f"{nbytes}, as its shape and dtype say", DOWNLOAD)
    return TensorInfo(name, tuple(shape), dtype, nbytes), start


def _read_file(path: Path, *, whole: bool) -> tuple[_Tensors, UserError | None]:
    """Maps all tensors of one file, and returns the error of a truncated file with them.

    Raises that error unless `whole` is False.
    """
    data = map_file(path)
    size = data.size
    length = int.from_bytes(data[:8].tobytes(), "little")
    if size < 8 or length > size - 8:
        found = f"{size} bytes, with a header of {length}"
        remedy = "The download was cut, or this is not a safetensors file: download it again."
        raise bad(path, found, "a safetensors file at least as long as its header", remedy)
    header = load_json(path, "a header", data[8 : 8 + length].tobytes())
    body = data[8 + length :]
    tensors, spans = {}, {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info, start = _read_entry(path, name, entry)
        tensors[name] = info, body[start : start + info.nbytes]
        spans[name] = 8 + length + start, 8 + length + start + info.nbytes
    cut = cut_short(path, size, spans)
    if whole and cut:
        raise cut
    return tensors, cut


def _read_index(index: Path, *, whole: bool) -> _Opened:
    """Opens the shards in the order of their names, and the tensors that the index lists."""
    weight_map = load_json(index, "an index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name == Path(name).name for name in weight_map.values()
    ):
        found = "no weight_map, or one that names other folders"
        raise bad(index, found, "a weight_map from tensors to files next to it", DOWNLOAD)
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise MissingFileError(
            f"{index}: found an index of {len(names)} files without {', '.join(missing)}; "
            f"expected all of them in {index.parent}. Download the missing files into it."
        )
    opened = {name: _read_file(index.parent / name, whole=whole) for name in names}
    files = {name: tensors for name, (tensors, _) in opened.items()}
    if lost := [tensor for tensor, name in weight_map.items() if tensor not in files[name]]:
        found = f"tensors that their files do not hold: {', '.join(lost[:8])}"
        remedy = "Download index and shards from the same revision."
        raise bad(index, found, "every tensor of the index in the file it names", remedy)
    tensors = {tensor: files[name][tensor] for tensor, name in weight_map.items()}
    cut = next((cut for _, cut in opened.values() if cut), None)
    return tuple(index.parent / name for name in names), tensors, cut


def _read_folder(folder: Path, *, whole: bool) -> _Opened:
    """Opens the single file, or else the shards of the index, as Transformers does."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        if index.is_file():
            _log.warning(
                "%s: found %s and also %s; the first is read, as by "
                "Transformers. Delete the other.",
                *(folder, _SINGLE, _INDEX),
            )
        return (single,), *_read_file(single, whole=whole)
    if index.is_file():
        return _read_index(index, whole=whole)
    suffixes = (".gguf", ".apr", ".bin")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    found = f"a folder without {_SINGLE}"
    if others:
        found += f", but with {', '.join(others[:4])}"
    shapes = " Shapes alone, from a config.json, are enough for a student with student.init=random."
    raise MissingFileError(
        f"{folder}: found {found}; expected {_SINGLE} or {_INDEX} in it. Download the model with "
        "`hf download OWNER/MODEL --local-dir FOLDER`, or name a GGUF or .apr file itself."
        f"{shapes if (folder / _CONFIG).is_file() else ''}"
    )


class SafetensorsTable(TensorTable):
    """Tensors of a Hugging Face folder, or of one file with its `config.json`; see `TensorTable`.

    Opening reads headers only. Raises `MissingFileError` for a missing `config.json` or shard and
    `UserError` for a file that is damaged or, unless `whole` is False, cut short, or holds a type
    other than F32, F16, BF16.
    """

    def __init__(self, path: str | os.PathLike[str], *, whole: bool = True):
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        if path.is_dir():
            paths, tensors, cut = _read_folder(path, whole=whole)
        elif _SHARD.fullmatch(path.name) and (folder / _INDEX).is_file():
            remedy = f"Pass the folder: {folder}."
            raise bad(path, "one shard of several", "a complete checkpoint", remedy)
        else:
            paths, (tensors, cut) = (path,), _read_file(path, whole=whole)
        config = folder / _CONFIG
        if not config.is_file():
            raise MissingFileError(
                f"{config}: found no such file; expected the model's {_CONFIG} next to its "
                "weights. Copy it from the model's page, or download the full folder."
            )
        super().__init__(paths, load_json(config, "a file"), map_tensors(tensors, cut), cut)


def read_peft(folder: Path) -> TensorTable:
    """Opens an adapter's folder as PEFT saves it; `adapter_config.json` is its metadata.

    Reads headers only. Raises `MissingFileError` without `adapter_model.safetensors`, `UserError`
    for damaged files.
    """
    path = folder / ADAPTER
    if not path.is_file():
        raise MissingFileError(
            f"{folder}: found an {ADAPTER_CONFIG} without {ADAPTER}; expected both. Save "
            "the adapter again with PEFT's save_pretrained, which writes safetensors."
        )
    tensors, cut = _read_file(path, whole=True)
    metadata = load_json(folder / ADAPTER_CONFIG, "a file")
    return TensorTable((path,), metadata, map_tensors(tensors, cut), cut)


def _nbytes(tensor: TensorToWrite) -> int:
    _, dtype, shape, _ = tensor
    return math.prod(shape) * block_type(dtype).nbytes


def write_file(path: Path, tensors: Iterable[TensorToWrite]) -> None:
    """Writes one file; `path` appears once all of it is on the disk.

    `tensors` as `gguf.write_gguf` takes them, of types F32, F16 and BF16; all tensors of a
    file are in memory while it is written. Raises `UserError` for data whose size differs from what
    its shape and type say.
    """
    arrays = {}
    for tensor in counted(list(tensors), "tensors taken"):
        name, dtype, shape, data = tensor
        pieces = checked_chunks(path, name, data, _nbytes(tensor))
        chunks = [np.frombuffer(piece, np.uint8) for piece in pieces]
        whole = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        arrays[name] = whole.view(_DTYPES[dtype]).reshape(shape)
    with replacing(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        try:
            # Readers of PyTorch weights ask for this entry.
            safetensors.numpy.save_file(arrays, file.name, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), file.name) from error
        # The library has replaced the file by one that only its owner may read.
        with open(file.name, "rb") as written:
            os.fchmod(written.fileno(), mode)
            os.fsync(written.fileno())


def write_folder(
    folder: Path, tensors: Iterable[TensorToWrite], shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes `model.safetensors`, or numbered shards of at most `shard_bytes` and their index."""
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {tensor[0]: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=_nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file_name, names in split.filename_to_tensors.items():
        write_file(folder / file_name, [by_name[name] for name in names])
    if split.is_sharded:
        weight_map = dict(sorted(split.tensor_to_filename.items()))
        index = {"metadata": split.metadata, "weight_map": weight_map}
        with replacing(folder / _INDEX) as file:
            file.write(json.dumps(index, indent=2).encode() + b"\n")
