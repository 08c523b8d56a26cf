"""`.apr` files, version 2: a lazy, memory-mapped table of their tensors, and a streaming writer.

All numbers are little-endian, and every section and tensor starts at a multiple of 64:

    header    64 bytes: `_HEADER`
    metadata  a JSON object, see `apr_metadata`
    index     an entry a tensor, sorted by name: name, type, shape, place and size of its data
    data      each tensor's bytes; Q4_K and Q6_K as in GGUF files
    footer    CRC-32 of all bytes before it

Every count and length is compared with the size of the file before it is used.
"""

import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.formats import files
from kdjax.formats.apr.metadata import as_config
from kdjax.formats.files import DOWNLOAD, Cursor, Data, TensorToWrite, bad
from kdjax.formats.table import TensorInfo, TensorTable, map_tensors

MAGIC, _OLD_MAGIC = b"APR\0", b"APRN"
ALIGNMENT = 64
MAX_METADATA = 16 << 20  # bytes
_VERSION = 2
_MAX_NAME, _MAX_DIMS = 256, 8
# Magic, major and minor version, flags, number of tensors, start and size of the metadata, starts
# of index and data, CRC-32 of the other 60 bytes, which end in 20 reserved ones.
_HEADER = struct.Struct("<4sBBHIQIQQI20s")
_FOOTER = struct.Struct("<I")
_MIN_ENTRY = 20  # bytes of an index entry without name and shape
_QUANTIZED, _ROW_MAJOR = 0x20, 0x400
_REFUSED = {
    0x01: "LZ4-compressed",
    0x02: "ZSTD-compressed",
    0x04: "encrypted",
    0x10: "sharded",
    0x800: "column-major",
}
DTYPES = {"F32": 0, "F16": 1, "BF16": 30, "Q4_K": 12, "Q6_K": 14}
_NAMES = {number: name for name, number in DTYPES.items()}
# Types of the format that are not read here; errors call them by name.
_OTHER_NAMES = {3: "F64", 4: "I32", 5: "I64", 6: "I8", 7: "U8", 8: "AprQ4", 9: "AprQ8"}
_OTHER_NAMES |= {128: "AprQ4", 129: "AprQ8"}
_HEAD = "lm_head.weight"
_CHUNK = 1 << 22


def is_apr(path: Path) -> bool:
    """Whether the file's name or its first bytes say that it is an `.apr` file."""
    if path.suffix == ".apr":
        return True
    with path.open("rb") as file:
        return file.read(4) in (MAGIC, _OLD_MAGIC)


class _Header(NamedTuple):
    flags: int
    tensors: int
    metadata: int  # start, bytes
    metadata_size: int
    index: int  # start; it ends at most where the data starts
    data: int  # start


def _checksum(header: bytes) -> int:
    """CRC-32 of the header without the four bytes that hold it."""
    return zlib.crc32(header[44:64], zlib.crc32(header[:40]))


def _check_kind(path: Path, data: memoryview) -> None:
    """Raises `UserError` unless the file starts with a complete `.apr` header of version 2."""
    magic, size = bytes(data[:4]), len(data)
    if magic != MAGIC:
        found = f"a file that starts with {magic!r}"
        remedy = "Pass an .apr file of version 2, or a GGUF model."
        if magic == _OLD_MAGIC:
            found += ", an .apr file of version 1"
            remedy = "Convert the model again, or use its GGUF file."
        raise bad(path, found, f"{MAGIC!r}", remedy)
    if size < _HEADER.size + _FOOTER.size:
        raise bad(path, f"{size} bytes", "a header of 64 and a footer of 4", DOWNLOAD)
    if data[4] != _VERSION:
        found = f".apr version {data[4]}.{data[5]}"
        raise bad(path, found, f"version {_VERSION}", "Convert the model again.")


def _read_header(path: Path, data: memoryview) -> _Header:
    _check_kind(path, data)
    packed, end = bytes(data[: _HEADER.size]), len(data) - _FOOTER.size
    *_, flags, tensors, metadata, metadata_size, index, start, crc, _ = _HEADER.unpack(packed)
    if crc != _checksum(packed):
        found = f"a header with checksum {crc:08x}"
        raise bad(path, found, f"{_checksum(packed):08x}, as its bytes say", DOWNLOAD)
    if kinds := [name for flag, name in _REFUSED.items() if flags & flag]:
        remedy = "Write it again in one file, row-major, uncompressed and unencrypted."
        raise bad(path, f"an .apr file that is {', '.join(kinds)}", "a plain one", remedy)
    if metadata_size > MAX_METADATA:
        wanted = f"at most {MAX_METADATA}"
        raise bad(path, f"{metadata_size} bytes of metadata", wanted, DOWNLOAD)
    if metadata < _HEADER.size or metadata + metadata_size > end:
        found = f"{metadata_size} bytes of metadata at byte {metadata} of {end}"
        raise bad(path, found, "metadata between header and footer", DOWNLOAD)
    if not _HEADER.size <= index <= start <= end:
        found = f"an index at byte {index} and data at byte {start} of {end}"
        raise bad(path, found, "first the index, then the data, then the footer", DOWNLOAD)
    if tensors * _MIN_ENTRY > start - index:
        found = f"{start - index} bytes of index for {tensors} tensors"
        raise bad(path, found, f"at least {tensors * _MIN_ENTRY}", DOWNLOAD)
    return _Header(flags, tensors, metadata, metadata_size, index, start)


def _read_entry(cursor: Cursor, number: int) -> tuple[TensorInfo, int]:
    """Reads one tensor's entry and its offset from the start of the data."""
    path = cursor.path
    length = cursor.number("<H", f"the length of name {number}")
    if length > _MAX_NAME:
        found = f"a name of {length} bytes for tensor {number}"
        raise bad(path, found, f"at most {_MAX_NAME}", DOWNLOAD)
    name = cursor.text(cursor.bytes(length, f"name {number}"), f"name {number}")
    kind, dims = cursor.number("<B", f"the type of {name!r}"), cursor.number("<B", "the rank")
    if kind not in _NAMES:
        alias = f" ({_OTHER_NAMES[kind]})" if kind in _OTHER_NAMES else ""
        remedy = "Write the model with one of these types, or use its GGUF file."
        found = f"type {kind}{alias} in tensor {name!r}"
        raise bad(path, found, f"one of {', '.join(DTYPES)}", remedy)
    if dims > _MAX_DIMS:
        raise bad(path, f"tensor {name!r} of rank {dims}", f"at most {_MAX_DIMS}", DOWNLOAD)
    shape = tuple(cursor.number("<Q", f"the shape of {name!r}") for _ in range(dims))
    offset = cursor.number("<Q", f"the offset of {name!r}")
    size = cursor.number("<Q", f"the size of {name!r}")
    # A tied model may store its head as a name without elements: `_read_index` leaves it out.
    if 0 in shape and name != _HEAD:
        raise bad(path, f"tensor {name!r} of shape {shape}", "no empty axis", DOWNLOAD)
    nbytes = files.tensor_bytes(path, name, _NAMES[kind], shape)
    if size != nbytes:
        found = f"{size} bytes for tensor {name!r}"
        raise bad(path, found, f"{nbytes}, as its shape and type say", DOWNLOAD)
    return TensorInfo(name, shape, _NAMES[kind], nbytes), offset


def _read_index(path: Path, data: memoryview, header: _Header) -> dict[str, tuple[TensorInfo, int]]:
    """Reads every tensor that has elements, and its offset in the file."""
    cursor = Cursor(path, data[: header.data])
    cursor.at = header.index
    last = None
    tensors: dict[str, tuple[TensorInfo, int]] = {}
    for number in range(header.tensors):
        info, offset = _read_entry(cursor, number)
        name = info.name.encode()
        if last is not None and name <= last:
            found = f"tensor {info.name!r} after {last.decode()!r}"
            raise bad(path, found, "an index sorted by name", DOWNLOAD)
        last = name
        if info.nbytes:
            tensors[info.name] = info, header.data + offset
    return tensors


class AprTable(TensorTable):
    """Tensors of an `.apr` file; see `TensorTable`.

    Opening reads header, metadata and index only, not the footer: see `verify_footer`. Raises
    `UserError` for a file that is not a plain `.apr` of version 2, is damaged, holds a type outside
    `DTYPES`, or, unless `whole` is False, is truncated; and if neither it nor a `config.json` next
    to it describes the model.
    """

    def __init__(self, path: str | os.PathLike[str], *, whole: bool = True):
        path = Path(path)
        self._data = files.map_file(path)
        self._header = _read_header(path, self._data.data)
        starts = _read_index(path, self._data.data, self._header)
        spans = {name: (start, start + info.nbytes) for name, (info, start) in starts.items()}
        if spans:  # a footer follows the last tensor
            last, (start, end) = max(spans.items(), key=lambda item: item[1])
            spans[last] = start, end + _FOOTER.size
        cut = files.cut_short(path, self._data.size, spans)
        if whole and cut:
            raise cut
        self.paths = (path,)
        tensors = {
            name: (info, self._data[start : start + info.nbytes])
            for name, (info, start) in starts.items()
        }
        infos = {name: info for name, (info, _) in starts.items()}
        # Named as in Hugging Face's config.json; the tokenizer as in GGUF: `tokenizer.ggml.*`.
        metadata = as_config(path, self.stored(), infos)
        super().__init__((path,), metadata, map_tensors(tensors, cut), cut)

    def stored(self) -> dict[str, Any]:
        """The file's metadata, parsed at each call: megabytes if it holds a tokenizer."""
        start = self._header.metadata
        data = self._data[start : start + self._header.metadata_size].tobytes()
        return files.load_json(self.paths[0], "metadata", data)


def verify_footer(path: str | os.PathLike[str]) -> None:
    """Reads the entire file; raises `UserError` if its bytes differ from what was written."""
    path = Path(path)
    left, crc = path.stat().st_size - _FOOTER.size, 0
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
        footer = file.read(_FOOTER.size)
    if left or footer != _FOOTER.pack(crc):
        found = f"a footer of {footer.hex() or 'no bytes'}"
        wanted = f"{_FOOTER.pack(crc).hex()}, the checksum of all bytes before it"
        raise bad(path, found, wanted, DOWNLOAD)


class _Plan(NamedTuple):
    """A tensor to write, and its place in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Data
    nbytes: int
    offset: int


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _place(path: Path, tensors: Iterable[TensorToWrite]) -> list[_Plan]:
    """Places tensors one after another, in the given order."""
    plans, names, offset = [], set(), 0
    for name, dtype, shape, data in tensors:
        if dtype not in DTYPES:
            found, wanted = f"type {dtype} in tensor {name!r}", f"one of {', '.join(DTYPES)}"
            raise bad(path, found, wanted, "Write a GGUF file, which holds more types.")
        if name in names or len(name.encode()) > _MAX_NAME or len(shape) > _MAX_DIMS:
            found = f"tensor {name!r} of rank {len(shape)}" + (" again" if name in names else "")
            wanted = f"each name once, at most {_MAX_NAME} bytes, and a rank up to {_MAX_DIMS}"
            raise bad(path, found, wanted, "Rename or reshape it.")
        nbytes = files.tensor_bytes(path, name, dtype, shape)
        names.add(name)
        plans.append(_Plan(name, dtype, shape, data, nbytes, offset))
        offset += _aligned(nbytes)
    return plans


def _entry(plan: _Plan) -> bytes:
    name, dims = plan.name.encode(), len(plan.shape)
    head = struct.pack("<H", len(name)) + name
    fields = (DTYPES[plan.dtype], dims, *plan.shape, plan.offset, plan.nbytes)
    return head + struct.pack(f"<BB{dims}QQQ", *fields)


def _front(path: Path, metadata: Mapping[str, Any], plans: list[_Plan]) -> bytes:
    """Header, metadata and index, each padded."""
    text = json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > MAX_METADATA:
        found = f"{len(text)} bytes of metadata to write"
        raise bad(path, found, f"at most {MAX_METADATA}", "Leave something out.")
    index = b"".join(map(_entry, sorted(plans, key=lambda plan: plan.name.encode())))
    flags = _ROW_MAJOR | _QUANTIZED * any(plan.dtype.startswith("Q") for plan in plans)
    at_index = _HEADER.size + _aligned(len(text))
    places = (_HEADER.size, len(text), at_index, at_index + _aligned(len(index)))
    fields = (MAGIC, _VERSION, 0, flags, len(plans), *places)
    crc = _checksum(_HEADER.pack(*fields, 0, b""))
    parts = (_HEADER.pack(*fields, crc, b""), text, index)
    return b"".join(part + bytes(-len(part) % ALIGNMENT) for part in parts)


def write_apr(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[TensorToWrite],
) -> None:
    """Writes an `.apr` file; `path` appears once all of it is on the disk.

    `metadata` is anything that JSON holds; `tensors` are as `gguf.write_gguf` takes them, and are
    written in the given order. Raises `UserError` for a type outside `DTYPES`, metadata above
    16 MiB, and data whose size differs from what its shape and type say.
    """
    path = Path(path)
    plans = _place(path, tensors)
    front = _front(path, metadata, plans)
    with files.replacing(path) as file:
        file.write(front)
        crc = zlib.crc32(front)
        for plan in plans:
            padding = bytes(-plan.nbytes % ALIGNMENT)
            data = files.checked_chunks(path, plan.name, plan.data, plan.nbytes)
            for chunk in itertools.chain(data, [padding]):
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
        file.write(_FOOTER.pack(crc))
