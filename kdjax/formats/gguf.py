"""GGUF files: a lazy, memory-mapped table of their tensors, and a streaming writer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count and length
in a header is compared with the bytes that are left in the file before it is used.
"""

import collections
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdjax.errors import MissingFileError, UserError
from kdjax.formats.blocks import BLOCKS, INTEGERS, block_type
from kdjax.formats.files import (
    DOWNLOAD,
    Cursor,
    TensorToWrite,
    bad,
    checked_chunks,
    cut_short,
    map_file,
    replacing,
    tensor_bytes,
)
from kdjax.formats.table import TensorInfo, TensorTable, map_tensors
from kdjax.progress import counted

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # equal, except that 3 allows big-endian files
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_STRING, _ARRAY = 8, 9
# `enum gguf_type`: number -> little-endian NumPy type of the fixed-size ones.
_SCALAR_TYPES = "<u1 <i1 <u2 <i2 <u4 <i4 <f4 |b1 <u8 <i8 <f8"
_SCALARS = dict(zip((*range(8), 10, 11, 12), _SCALAR_TYPES.split(), strict=True))
_SCALAR_NUMBERS = {np.dtype(name): number for number, name in _SCALARS.items()}
_BLOCK_NAMES = {block.ggml: name for name, block in (BLOCKS | INTEGERS).items()}
# `enum ggml_type` from 0 on, "-" for a free number: errors can name types that `blocks` lacks.
_GGML_TYPES = """
    F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS
    IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4
    NVFP4 Q1_0 Q2_0
"""
_SHARD = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


class _Strings(NamedTuple):
    """An array of strings whose bytes have been walked but not decoded."""

    start: int
    count: int
    end: int


class _Cursor(Cursor):
    """A `Cursor` that knows GGUF's strings and values."""

    def string(self, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        return self.text(self.bytes(length, what), what)

    def strings(self, count: int, what: str) -> _Strings:
        """Steps over `count` strings: the 300k of a Qwen2.5 header take 0.05 s."""
        self.need(8 * count, f"{count} strings of {what}")
        start = at = self.at
        data, end, unpack = self.data, len(self.data) - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > end:
                break
            at += 8 + unpack(data, at)[0]
        else:
            if at <= len(data):
                self.at = at
                return _Strings(start, count, at)
        found = f"{what} running past the end of the file, byte {len(data)}"
        raise bad(self.path, found, f"{count} strings within it", DOWNLOAD)

    def value(self, key: str) -> Any:
        """Reads a metadata value; arrays of strings stay undecoded, arrays of numbers are views."""
        kind = self.number("<I", f"the type of {key!r}")
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind in _SCALARS:
            return self.array(kind, 1, key)[0].item()
        if kind != _ARRAY:
            found = f"value type {kind} for {key!r}"
            raise bad(self.path, found, "one of the types 0 to 12 of GGUF", DOWNLOAD)
        kind = self.number("<I", f"the element type of {key!r}")
        count = self.number("<Q", f"the length of {key!r}")
        if kind == _STRING:
            return self.strings(count, key)
        if kind in _SCALARS:
            return self.array(kind, count, key)
        found = f"an array {key!r} with elements of type {kind}"
        raise bad(self.path, found, "strings or numbers", "Write the file without this key.")

    def array(self, kind: int, count: int, key: str) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        data = self.bytes(count * dtype.itemsize, f"{count} values of {key!r}")
        return np.frombuffer(data, dtype)


class _Metadata(collections.UserDict[str, Any]):
    """Key-values of a header; arrays of strings are decoded to lists at first access."""

    def __init__(self, values: dict[str, Any], cursor: _Cursor):
        super().__init__()
        self.data, self._cursor = values, cursor
        self._strings = {k: value for k, value in values.items() if isinstance(value, _Strings)}

    def stored(self, key: str) -> Any:
        """The value; of an array of strings its bytes, decoded or not: 10 MB take 10 ms to hash."""
        strings = self._strings.get(key)
        if strings is None:
            return self.data[key]
        return self._cursor.data[strings.start : strings.end]

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        if isinstance(value, _Strings):
            value = self.data[key] = self._decode(value, key)
        return value

    def _decode(self, strings: _Strings, key: str) -> list[str]:
        data, at, unpack = self._cursor.data, strings.start, struct.Struct("<Q").unpack_from
        decoded = []
        try:
            for _ in range(strings.count):
                start = at + 8
                at = start + unpack(data, at)[0]
                decoded.append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError:
            self._cursor.text(data[start:at], f"entry {len(decoded)} of {key!r}")
        return decoded


class _Shard(NamedTuple):
    """One file: its bytes, its key-values, and the offset at which each tensor starts."""

    path: Path
    data: np.ndarray
    metadata: _Metadata
    tensors: dict[str, tuple[TensorInfo, int]]
    cut: UserError | None  # the error to raise if the file ends too early


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Reads the numbers of tensors and of key-values."""
    path, magic = cursor.path, bytes(cursor.data[:4])
    if magic != _MAGIC:
        found = f"a file that starts with {magic!r}" if magic else "an empty file"
        if bytes(cursor.data[:12]) == b"version http":
            found += ", a Git LFS pointer in place of the model"
        remedy = "Pass a GGUF model, or a Hugging Face folder with its config.json."
        raise bad(path, found, f"{_MAGIC!r}", remedy)
    cursor.at = 4
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        found, remedy = f"GGUF version {version}", "Convert the model again with today's llama.cpp."
        if version & 0xFFFF == 0 and version:
            found = "a big-endian GGUF file"
            remedy = "Convert it with gguf-py: `gguf-convert-endian FILE little`."
        raise bad(path, found, "little-endian GGUF version 2 or 3", remedy)
    tensors, pairs = cursor.number("<Q", "tensor count"), cursor.number("<Q", "key-value count")
    # The shortest tensor entry takes 24 bytes, the shortest key-value 13.
    cursor.need(24 * tensors, f"the entries of {tensors} tensors")
    cursor.need(13 * pairs, f"{pairs} key-values")
    return tensors, pairs


def _read_metadata(cursor: _Cursor, count: int) -> _Metadata:
    values: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"key {index}")
        if key in values:
            raise bad(cursor.path, f"the key {key!r} twice", "it once", DOWNLOAD)
        values[key] = cursor.value(key)
    return _Metadata(values, cursor)


def _read_entry(cursor: _Cursor, index: int) -> tuple[TensorInfo, int]:
    """Reads one tensor's entry and its offset from the start of the data."""
    path, name = cursor.path, cursor.string(f"the name of tensor {index}")
    dims = cursor.number("<I", f"the rank of {name!r}")
    if dims > _MAX_DIMS:
        raise bad(path, f"tensor {name!r} of rank {dims}", f"at most {_MAX_DIMS}", DOWNLOAD)
    # GGUF lists the fastest-running axis first.
    shape = tuple(reversed([cursor.number("<Q", f"the shape of {name!r}") for _ in range(dims)]))
    if 0 in shape:
        raise bad(path, f"tensor {name!r} of shape {shape}", "no empty axis", DOWNLOAD)
    kind = cursor.number("<I", f"the block type of {name!r}")
    offset = cursor.number("<Q", f"the offset of {name!r}")
    if kind not in _BLOCK_NAMES:
        alias = dict(enumerate(_GGML_TYPES.split())).get(kind, "-")
        alias = "" if alias == "-" else f" ({alias})"
        found = f"block type {kind}{alias} in tensor {name!r}"
        remedy = "Take a Q4_K_M, Q5_K_M, Q6_K, Q8_0 or F16 file of the same model."
        raise bad(path, found, f"one of {', '.join(BLOCKS)}", remedy)
    dtype = _BLOCK_NAMES[kind]
    return TensorInfo(name, shape, dtype, tensor_bytes(path, name, dtype, shape)), offset


def _read_shard(path: Path) -> _Shard:
    """Parses one file's header."""
    data = map_file(path)
    size, cursor = data.size, _Cursor(path, data.data)
    tensor_count, pair_count = _read_preamble(cursor)
    metadata = _read_metadata(cursor, pair_count)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        found = f"general.alignment = {alignment!r}"
        raise bad(path, found, "a power of two", "Write the file again with an alignment of 32.")
    entries = [_read_entry(cursor, index) for index in range(tensor_count)]
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, tuple[TensorInfo, int]] = {}
    for info, offset in entries:
        if info.name in tensors:
            raise bad(path, f"the tensor {info.name!r} twice", "it once", DOWNLOAD)
        if offset % alignment:
            found = f"tensor {info.name!r} at offset {offset}"
            raise bad(path, found, f"a multiple of {alignment}", DOWNLOAD)
        tensors[info.name] = info, base + offset
    spans = {name: (start, start + info.nbytes) for name, (info, start) in tensors.items()}
    return _Shard(path, data, metadata, tensors, cut_short(path, size, spans))


def _sibling_paths(path: Path, count: int) -> tuple[Path, ...]:
    """All shards of the split that `path` belongs to."""
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        found = f"one of {count} shards under the name {path.name}"
        expected = f"a name like model-00001-of-{count:05}.gguf"
        raise bad(path, found, expected, "Give all shards the names they were published under.")
    names = [f"{match['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]
    paths = tuple(path.with_name(name) for name in names)
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        listed = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise MissingFileError(
            f"{path}: found one of {count} shards without {listed} next to it; expected all "
            f"{count}. Download the missing files into {path.parent}."
        )
    return paths


def _read_shards(path: Path) -> tuple[_Shard, ...]:
    first = _read_shard(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= 99999:
        raise bad(path, f"split.count = {count!r}", "1 to 99999", DOWNLOAD)
    if count <= 1:
        return (first,)
    paths = _sibling_paths(path, count)
    shards = tuple(first if other == path else _read_shard(other) for other in paths)
    for index, shard in enumerate(shards):
        number, total = shard.metadata.get("split.no"), shard.metadata.get("split.count")
        if (number, total) != (index, count):
            found = f"split.no = {number}, split.count = {total}"
            expected = f"{index} and {count}, as its name says"
            raise bad(shard.path, found, expected, "Do not mix shards of different models.")
    total = sum(len(shard.tensors) for shard in shards)
    expected = shards[0].metadata.get("split.tensors.count", total)
    if total != expected:
        found = f"{total} tensors in {count} shards"
        raise bad(shards[0].path, found, f"{expected} (split.tensors.count)", DOWNLOAD)
    return shards


class GGUFTable(TensorTable):
    """Tensors of a GGUF file, or of all shards of a split one; see `TensorTable`.

    Opening reads the header only. Raises `MissingFileError` for a missing shard and `UserError`
    for a file that is no little-endian GGUF v2 or v3, is damaged or, unless `whole` is False, cut
    short, or holds a block type outside `blocks.BLOCKS` and `INTEGERS`.
    """

    def __init__(self, path: str | os.PathLike[str], *, whole: bool = True):
        shards = _read_shards(Path(path))
        cut = next((shard.cut for shard in shards if shard.cut), None)
        if whole and cut:
            raise cut
        tensors: dict[str, tuple[TensorInfo, np.ndarray]] = {}
        self._starts: dict[str, int] = {}
        for shard in shards:
            for name, (info, start) in shard.tensors.items():
                if name in tensors:
                    found = f"the tensor {name!r} a second time in the split"
                    raise bad(shard.path, found, "it once", DOWNLOAD)
                tensors[name] = info, shard.data[start : start + info.nbytes]
                self._starts[name] = start
        metadata = shards[0].metadata  # lists of strings are decoded at first access
        paths = tuple(shard.path for shard in shards)
        super().__init__(paths, metadata, map_tensors(tensors, cut), cut)

    def start(self, name: str) -> int:
        """Offset of the tensor's data, in bytes from the start of the file that holds it."""
        return self._starts[name]


def _pack_string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _as_array(value: object) -> np.ndarray:
    """Converts numbers to the type that is written; NumPy arrays keep their dtype."""
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


def _pack_value(key: str, value: object) -> bytes:
    """Type number and bytes of one metadata value."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _pack_string(value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
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
        kind = struct.pack("<IIQ", _ARRAY, number, len(array))
    return kind + array.tobytes()


def _lay_out(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]
) -> tuple[bytes, list[int], int]:
    """The header, the bytes of each tensor, and what their starts are multiples of."""
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    pairs = [_pack_string(key) + _pack_value(key, value) for key, value in metadata.items()]
    header = [_MAGIC, struct.pack("<IQQ", _VERSIONS[-1], len(tensors), len(pairs)), *pairs]
    sizes, offset = [], 0
    for name, dtype, shape, _ in tensors:
        nbytes = tensor_bytes(path, name, dtype, shape)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        kind = struct.pack("<IQ", block_type(dtype).ggml, offset)
        header += [_pack_string(name), dims, kind]
        sizes.append(nbytes)
        offset += -(-nbytes // alignment) * alignment
    return b"".join(header), sizes, alignment


def count_gguf(metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> int:
    """Bytes of the file that `write_gguf` would write; no data is read."""
    header, sizes, alignment = _lay_out(Path("a GGUF file"), metadata, tensors)
    return sum(-(-nbytes // alignment) * alignment for nbytes in (len(header), *sizes))


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[TensorToWrite],
) -> None:
    """Writes a GGUF v3 file; `path` appears once all of it is on the disk.

    `tensors` are (name, block type, row-major shape, data): uint8 bytes in any shape, or a
    function that returns them or their successive chunks. Functions are called one after another,
    so that one tensor at a time is in memory. Raises `UserError` for a value GGUF cannot hold and
    for data whose size differs from what its shape and type say.
    """
    path, tensors = Path(path), list(tensors)
    header, sizes, alignment = _lay_out(path, metadata, tensors)
    with replacing(path) as file:
        file.write(header)
        for (name, *_, data), nbytes in zip(
            counted(tensors, "tensors written"), sizes, strict=True
        ):
            file.write(bytes(-file.tell() % alignment))
            file.writelines(checked_chunks(path, name, data, nbytes))
        file.write(bytes(-file.tell() % alignment))
