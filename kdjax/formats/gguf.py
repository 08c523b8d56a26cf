"""GGUF files: a lazy, memory-mapped table of their tensors, and a streaming writer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. No count or length in a header is
believed before it is compared with the bytes that are left in the file.
"""

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdjax.errors import MissingFileError, UserError
from kdjax.formats.blocks import BLOCKS, row_bytes
from kdjax.formats.table import TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # equal but for the big-endian files that 3 allows
DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4  # GGML_MAX_DIMS
_STRING, _ARRAY = 8, 9
# `enum gguf_type`: number -> little-endian NumPy type of the fixed-size ones.
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_SCALAR_NUMBERS = {np.dtype(name): number for number, name in _SCALARS.items()}
_BLOCK_NAMES = {block.ggml: name for name, block in BLOCKS.items()}
# Types that llama.cpp writes and `blocks` does not decode, so that an error can call them by name.
_OTHER_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_SHARD = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")
_DOWNLOAD = "Download the file again."

Data = np.ndarray | Callable[[], np.ndarray | Iterable[np.ndarray]]


def _bad(path: Path, found: str, expected: str, remedy: str) -> UserError:
    return UserError(f"{path}: found {found}; expected {expected}. {remedy}")


class _Strings(NamedTuple):
    """An array of strings whose bytes have been walked but not decoded."""

    start: int
    count: int


class _Cursor:
    """Reads a header; every step is checked against the end of the file."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.data, self.at = path, data, 0

    def need(self, nbytes: int, what: str) -> None:
        left = len(self.data) - self.at
        if nbytes > left:
            found = f"a header cut short or damaged at byte {self.at}: {left} bytes are left"
            raise _bad(self.path, found, f"{nbytes} bytes for {what}", _DOWNLOAD)

    def number(self, fmt: str, what: str) -> Any:
        self.need(struct.calcsize(fmt), what)
        (value,) = struct.unpack_from(fmt, self.data, self.at)
        self.at += struct.calcsize(fmt)
        return value

    def bytes(self, nbytes: int, what: str) -> memoryview:
        self.need(nbytes, what)
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def string(self, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        return self.text(self.bytes(length, what), what)

    def text(self, data: memoryview, what: str) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            found = f"{what} with bytes that are no UTF-8 ({error.reason})"
            raise _bad(self.path, found, "UTF-8 text", _DOWNLOAD) from error

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
                return _Strings(start, count)
        found = f"{what} running past the end of the file, byte {len(data)}"
        raise _bad(self.path, found, f"{count} strings within it", _DOWNLOAD)

    def value(self, key: str) -> Any:
        """One metadata value; arrays of strings come undecoded, of numbers as views."""
        kind = self.number("<I", f"the type of {key!r}")
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind in _SCALARS:
            return self.array(kind, 1, key)[0].item()
        if kind != _ARRAY:
            found = f"value type {kind} for {key!r}"
            raise _bad(self.path, found, "one of the types 0 to 12 of GGUF", _DOWNLOAD)
        kind = self.number("<I", f"the element type of {key!r}")
        count = self.number("<Q", f"the length of {key!r}")
        if kind == _STRING:
            return self.strings(count, key)
        if kind in _SCALARS:
            return self.array(kind, count, key)
        found = f"an array {key!r} with elements of type {kind}"
        raise _bad(self.path, found, "strings or numbers", "Write the file without this key.")

    def array(self, kind: int, count: int, key: str) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        data = self.bytes(count * dtype.itemsize, f"{count} values of {key!r}")
        return np.frombuffer(data, dtype)


class _Metadata(Mapping[str, Any]):
    """Key-values of a header; arrays of strings become lists when first asked for."""

    def __init__(self, values: dict[str, Any], cursor: _Cursor):
        self._values, self._cursor = values, cursor

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Strings):
            value = self._values[key] = self._decode(value, key)
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

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Shard(NamedTuple):
    """One file: its bytes, key-values, and where in it each tensor starts."""

    path: Path
    data: np.ndarray
    metadata: _Metadata
    tensors: dict[str, tuple[TensorInfo, int]]


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of key-values."""
    path, magic = cursor.path, bytes(cursor.data[:4])
    if magic != MAGIC:
        found = f"a file that starts with {magic!r}"
        if bytes(cursor.data[:12]) == b"version http":
            found += ", a Git LFS pointer in place of the model"
        remedy = "Pass a GGUF model, or a Hugging Face folder with its config.json."
        raise _bad(path, found, f"{MAGIC!r}", remedy)
    cursor.at = 4
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        found, remedy = f"GGUF version {version}", "Convert the model again with today's llama.cpp."
        if version & 0xFFFF == 0 and version:
            found = "a big-endian GGUF file"
            remedy = "Convert it with gguf-py: `gguf-convert-endian FILE little`."
        raise _bad(path, found, "little-endian GGUF version 2 or 3", remedy)
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
            raise _bad(cursor.path, f"the key {key!r} twice", "it once", _DOWNLOAD)
        values[key] = cursor.value(key)
    return _Metadata(values, cursor)


def _read_entry(cursor: _Cursor, index: int) -> tuple[TensorInfo, int]:
    """One tensor and its offset from the start of the data."""
    path, name = cursor.path, cursor.string(f"the name of tensor {index}")
    dims = cursor.number("<I", f"the rank of {name!r}")
    if dims > _MAX_DIMS:
        raise _bad(path, f"tensor {name!r} of rank {dims}", f"at most {_MAX_DIMS}", _DOWNLOAD)
    # GGUF lists the fastest-running axis first.
    shape = tuple(reversed([cursor.number("<Q", f"the shape of {name!r}") for _ in range(dims)]))
    if 0 in shape:
        raise _bad(path, f"tensor {name!r} of shape {shape}", "no empty axis", _DOWNLOAD)
    kind = cursor.number("<I", f"the block type of {name!r}")
    offset = cursor.number("<Q", f"the offset of {name!r}")
    if kind not in _BLOCK_NAMES:
        alias = f" ({_OTHER_NAMES[kind]})" if kind in _OTHER_NAMES else ""
        found = f"block type {kind}{alias} in tensor {name!r}"
        remedy = "Take a Q4_K_M, Q5_K_M, Q6_K, Q8_0 or F16 file of the same model."
        raise _bad(path, found, f"one of {', '.join(_BLOCK_NAMES.values())}", remedy)
    nbytes = 1
    for size in shape[:-1]:
        nbytes *= size
    try:
        nbytes *= row_bytes(_BLOCK_NAMES[kind], shape[-1] if shape else 1)
    except UserError as error:
        raise UserError(f"{path}: tensor {name!r}: {error}") from error
    return TensorInfo(name, shape, _BLOCK_NAMES[kind], nbytes), offset


def _read_shard(path: Path) -> _Shard:
    """Parses one file's header and checks that all its data is there."""
    size = path.stat().st_size
    data = np.asarray(np.memmap(path, np.uint8, mode="r")) if size else np.empty(0, np.uint8)
    cursor = _Cursor(path, data.data)
    tensor_count, pair_count = _read_preamble(cursor)
    metadata = _read_metadata(cursor, pair_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        found = f"general.alignment = {alignment!r}"
        raise _bad(path, found, "a power of two", "Write the file again with an alignment of 32.")
    entries = [_read_entry(cursor, index) for index in range(tensor_count)]
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, tuple[TensorInfo, int]] = {}
    for info, offset in entries:
        if info.name in tensors:
            raise _bad(path, f"the tensor {info.name!r} twice", "it once", _DOWNLOAD)
        if offset % alignment:
            found = f"tensor {info.name!r} at offset {offset}"
            raise _bad(path, found, f"a multiple of {alignment}", _DOWNLOAD)
        missing = base + offset + info.nbytes - size
        if missing > 0:
            raise _bad(
                path,
                f"{size} bytes, {missing} too few for tensor {info.name!r}",
                f"at least {size + missing}",
                "The download broke off: download the file again.",
            )
        tensors[info.name] = info, base + offset
    return _Shard(path, data, metadata, tensors)


def _sibling_paths(path: Path, count: int) -> tuple[Path, ...]:
    """All shards of the split that `path` belongs to."""
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise _bad(
            path,
            f"one of {count} shards under the name {path.name}",
            f"a name like model-00001-of-{count:05}.gguf",
            "Give all shards the names they were published under.",
        )
    names = [f"{match['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]
    paths = tuple(path.with_name(name) for name in names)
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        listed = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise MissingFileError(
            f"{path}: found one of {count} shards without {listed} beside it; expected all "
            f"{count}. Download the missing files into {path.parent}."
        )
    return paths


def _read_shards(path: Path) -> tuple[_Shard, ...]:
    first = _read_shard(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= 99999:
        raise _bad(path, f"split.count = {count!r}", "1 to 99999", _DOWNLOAD)
    if count <= 1:
        return (first,)
    paths = _sibling_paths(path, count)
    shards = tuple(first if other == path else _read_shard(other) for other in paths)
    for index, shard in enumerate(shards):
        found = shard.metadata.get("split.no"), shard.metadata.get("split.count")
        if found != (index, count):
            found = f"split.no = {found[0]}, split.count = {found[1]}"
            wanted = f"{index} and {count}, as its name says"
            raise _bad(shard.path, found, wanted, "Do not mix shards of different models.")
    total = sum(len(shard.tensors) for shard in shards)
    expected = shards[0].metadata.get("split.tensors.count", total)
    if total != expected:
        found = f"{total} tensors in {count} shards"
        raise _bad(shards[0].path, found, f"{expected} (split.tensors.count)", _DOWNLOAD)
    return shards


class GGUFTable:
    """Tensors of a GGUF file, or of all shards of a split one; see `TensorTable`.

    Opening reads the header only. Raises `MissingFileError` for a missing shard and `UserError`
    for a file that is no little-endian GGUF v2 or v3, is damaged or cut short, or holds a block
    type outside `blocks.BLOCKS`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        shards = _read_shards(Path(path))
        self._paths = tuple(shard.path for shard in shards)
        self._metadata = shards[0].metadata
        self._tensors: dict[str, tuple[TensorInfo, np.ndarray, int]] = {}
        for shard in shards:
            for name, (info, start) in shard.tensors.items():
                if name in self._tensors:
                    found = f"the tensor {name!r} a second time in the split"
                    raise _bad(shard.path, found, "it once", _DOWNLOAD)
                self._tensors[name] = info, shard.data, start

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file, or all shards in order."""
        return self._paths

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key-values of the (first) file; lists of strings are decoded when asked for."""
        return self._metadata

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Raises `KeyError` for a name the file does not hold."""
        return self._tensors[name][0]

    def raw(self, name: str) -> np.ndarray:
        """Read-only uint8 view `shape[:-1] + (row_bytes,)`; 0-d: `(itemsize,)`."""
        info, data, start = self._tensors[name]
        return data[start : start + info.nbytes].reshape(*info.shape[:-1], -1)


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


def _chunks(data: Data) -> Iterator[np.ndarray]:
    parts = data() if callable(data) else data
    yield from [parts] if isinstance(parts, np.ndarray) else parts


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
        nbytes = int(np.prod(shape[:-1], dtype=np.int64)) * row_bytes(dtype, (shape or (1,))[-1])
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        kind = struct.pack("<IQ", BLOCKS[dtype].ggml, offset)
        header += [_pack_string(name), dims, kind]
        sizes.append(nbytes)
        offset += -(-nbytes // alignment) * alignment
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(b"".join(header))
            for (name, *_, data), nbytes in zip(tensors, sizes, strict=True):
                file.write(bytes(-file.tell() % alignment))
                start = file.tell()
                for chunk in _chunks(data):
                    file.write(np.ravel(chunk).view(np.uint8).data)
                if (found := file.tell() - start) != nbytes:
                    wanted = f"{nbytes}, as its shape and type say"
                    fix = "Pass the encoded bytes of the whole tensor."
                    raise _bad(path, f"{found} bytes of tensor {name!r} to write", wanted, fix)
            file.write(bytes(-file.tell() % alignment))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
