"""Checked reading and atomic writing, shared by the readers and writers of checkpoint files."""

import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kdjax.errors import MissingFileError, UserError, WriteError, suggest_path
from kdjax.formats.blocks import row_bytes

DOWNLOAD = "Download the file again."
MOST_UNPACKED = 1 << 28  # bytes of a packed file that are read at once: a small one may hold any
_MOST_BYTES = 2**50  # a thousand times the largest checkpoints: a header that says more is damaged

# A tensor to write: its bytes, as an array of any type and shape, or a function that returns them
# or their successive chunks.
Data = np.ndarray | Callable[[], np.ndarray | Iterable[np.ndarray]]
TensorToWrite = tuple[str, str, tuple[int, ...], Data]  # name, block type, row-major shape, data


def open_unpacked(path: Path) -> io.BufferedIOBase:
    """Opens a file to read, unpacked if it begins as gzip or Zstandard do.

    The caller bounds the number of bytes. Raises `UserError` where Zstandard needs a package and,
    while it is read, for packed bytes that are damaged.
    """
    file = path.open("rb")
    head = file.read(4)
    file.seek(0)
    if head.startswith(b"\x1f\x8b"):
        file.close()
        return _Unpacked(path, gzip.open(path))
    if head != b"\x28\xb5\x2f\xfd":
        return file
    file.close()
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"{path}: found Zstandard, which needs pyarrow. Install it: "
            "pip install 'kdjax[parquet]'. Or unpack the file: zstd -d FILE"
        ) from None
    return _Unpacked(path, pyarrow.input_stream(str(path), compression="zstd"))


def read_unpacked(path: Path) -> bytes:
    """The bytes of a file, unpacked; raises `UserError` for a packed one of very many."""
    with open_unpacked(path) as file:
        if not isinstance(file, _Unpacked):
            return file.read()
        data = file.read(MOST_UNPACKED + 1)
    if len(data) > MOST_UNPACKED:
        raise UserError(
            f"{path}: found more than {MOST_UNPACKED >> 20} MiB in a packed file that is read at "
            "once; expected less. Unpack it, or write its records as .jsonl, which is read by line."
        )
    return data


class _Unpacked(io.BufferedReader):
    """A packed file, unpacked as it is read; damage is a `UserError`."""

    def __init__(self, path: Path, file: Any):
        super().__init__(_Raw(path, file))


class _Raw(io.RawIOBase):
    def __init__(self, path: Path, file: Any):
        self._path, self._file = path, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(
                f"{self._path}: found packed bytes that cannot be unpacked ({error}). {DOWNLOAD}"
            ) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_given(path: str | os.PathLike[str], expected: str) -> io.BufferedReader:
    """Opens a file that a user named; raises `MissingFileError` if there is no such file."""
    if not Path(path).is_file():
        found = "a folder" if Path(path).is_dir() else "no such file"
        text = f"{path}: {found}; expected {expected}."
        raise MissingFileError(f"{text}{suggest_path(Path(path))}")
    return open(path, "rb")


def hash_given(path: str | os.PathLike[str], expected: str) -> str:
    """SHA-256 of the bytes of such a file."""
    with open_given(path, expected) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bad(path: Path, found: str, expected: str, remedy: str) -> UserError:
    """Makes the error for a file that is not what it should be."""
    return UserError(f"{path}: found {found}; expected {expected}. {remedy}")


def cut_short(path: Path, size: int, spans: Mapping[str, tuple[int, int]]) -> UserError | None:
    """Makes the error for a file of `size` bytes that ends before one of its tensors; None if none.

    `spans`: the bytes `[start, end)` of each tensor, as the header says. Raises `UserError` for
    tensors that share bytes, and for one that ends beyond any possible size of a file.
    """
    before, filled = "", 0
    for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        if end > start:
            if start < filled:
                found = f"the tensors {before!r} and {name!r} in the same bytes, from {start} on"
                raise bad(path, found, "separate bytes for each tensor", DOWNLOAD)
            before, filled = name, end
    if filled <= size:
        return None
    if filled > _MOST_BYTES:
        found = f"tensor {before!r} that ends at byte {filled} ({filled / 1e15:,.0f} million GB)"
        expected = "a shape and an offset within the file"
        raise bad(path, found, expected, f"Its header is damaged. {DOWNLOAD}")
    found = f"{size} bytes, {filled - size} too few for tensor {before!r}"
    expected = f"at least {filled} ({filled / 1e9:.2f} GB), of which {size / filled:.1%} are here"
    remedy = "The download was cut: download the file again. A plan needs the header only."
    return bad(path, found, expected, remedy)


def map_file(path: Path) -> np.ndarray:
    """The file's bytes, read-only uint8 `[size]`, mapped and not read."""
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def load_json(
    path: Path, what: str, data: bytes | None = None, remedy: str = DOWNLOAD
) -> dict[str, Any]:
    """Parses the JSON object in `data` (default: the file); errors call it `what`.

    Of equal keys the last counts. `remedy` says what to do about a damaged one.
    """
    try:
        value = json.loads(path.read_bytes() if data is None else data)
    except (ValueError, RecursionError) as error:
        raise bad(path, f"{what} that is no JSON ({error})", "a JSON object", remedy) from error
    if not isinstance(value, dict):
        found = f"{what} that is a JSON {type(value).__name__}"
        raise bad(path, found, "a JSON object", remedy)
    return value


def tensor_bytes(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in `path`; raises `UserError` if its rows do not fill complete blocks."""
    try:
        return math.prod(shape[:-1]) * row_bytes(dtype, shape[-1] if shape else 1)
    except UserError as error:
        raise UserError(f"{path}: tensor {name!r}: {error}") from error


class Cursor:
    """Reads a header; every step is checked against the end of the data."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.data, self.at = path, data, 0

    def need(self, nbytes: int, what: str) -> None:
        """Raises `UserError` unless `nbytes` more bytes are there."""
        left = len(self.data) - self.at
        if nbytes > left:
            found = f"a header cut short or damaged at byte {self.at}: {left} bytes are left"
            raise bad(self.path, found, f"{nbytes} bytes for {what}", DOWNLOAD)

    def number(self, fmt: str, what: str) -> Any:
        """The next number, of a `struct` format."""
        self.need(struct.calcsize(fmt), what)
        (value,) = struct.unpack_from(fmt, self.data, self.at)
        self.at += struct.calcsize(fmt)
        return value

    def bytes(self, nbytes: int, what: str) -> memoryview:
        """The next `nbytes`, as a view."""
        self.need(nbytes, what)
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def text(self, data: memoryview, what: str) -> str:
        """Decodes bytes as UTF-8; raises `UserError` if they are not."""
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            found = f"{what} with bytes that are not UTF-8 ({error.reason})"
            raise bad(self.path, found, "UTF-8 text", DOWNLOAD) from error


def checked_chunks(path: Path, name: str, data: Data, nbytes: int) -> Iterator[memoryview]:
    """Yields a tensor's bytes in pieces; raises `UserError` unless they are `nbytes` in all."""
    parts, size = data() if callable(data) else data, 0
    for part in [parts] if isinstance(parts, np.ndarray) else parts:
        chunk = np.ravel(part).view(np.uint8).data
        size += len(chunk)
        yield chunk
    if size != nbytes:
        expected = f"{nbytes}, as its shape and type say"
        remedy = "Pass the encoded bytes of the full tensor."
        raise bad(path, f"{size} bytes of tensor {name!r} to write", expected, remedy)


@contextlib.contextmanager
def writing(path: Path, elsewhere: str = "") -> Iterator[None]:
    """Turns an `OSError` of the disk that holds `path`, raised in the block, into a `WriteError`.

    An `OSError` that names a file elsewhere passes: it concerns a file that the block read.
    `elsewhere` is as for `WriteError.of`.
    """
    try:
        yield
    except OSError as error:
        file = Path(error.filename2 or error.filename or path).absolute()
        folder = path.parent.absolute()
        refused = WriteError.of(path, error, elsewhere)
        if refused is None or not (file.is_relative_to(folder) or folder.is_relative_to(file)):
            raise
        raise refused from error


def check_place(path: Path) -> None:
    """Tries to write a file there, and leaves nothing; to be called before long work.

    Raises `UserError` where a file cannot be (a folder is there), `WriteError` where it cannot be
    written.
    """
    with _placing(path), tempfile.TemporaryFile(dir=path.parent) as file:
        file.write(b" ")


@contextlib.contextmanager
def _placing(path: Path) -> Iterator[None]:
    """Looks whether a file can be there, and makes its folder for the block, as `making` does."""
    with writing(path):
        check_file(path)
        with making(path.parent):
            yield


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """Makes the folder for the block; those made here that have no file at its end are removed.

    Raises as `make_folder`.
    """
    above = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        make_folder(folder)
        yield
    finally:
        if above:
            remove_empty(above[-1])


def make_folder(folder: Path, elsewhere: str = "") -> None:
    """Makes the folder unless it exists; `elsewhere` is as for `WriteError.of`.

    Raises `UserError` where a file has its name, `WriteError` where the disk refuses it.
    """
    check_folder(folder, elsewhere)
    with writing(folder, elsewhere):
        folder.mkdir(parents=True, exist_ok=True)


def check_folder(folder: Path, elsewhere: str = "") -> None:
    """Raises `UserError` where a file has the name of a folder or of one above it."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        place = f"Name another place{elsewhere and f': {elsewhere}'}."
        raise UserError(f"{there} is no folder; expected one. {place}")


def check_file(path: Path) -> None:
    """Raises `UserError` where a folder or a special file has the name of a file to write."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise UserError(f"{path} is {kind}; expected a file to write. Name another.")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file next to `path` that replaces it once all of it is on the disk.

    The file can be read too. Makes the folder. If the block raises, the temporary file is removed
    and `path` stays as it was. Raises `UserError` where a file cannot be, `WriteError` for a full
    disk or a folder that cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _placing(path):
        try:
            with temporary.open("w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the error names the folder already
                temporary.unlink(missing_ok=True)
            raise


def remove_empty(folder: Path) -> None:
    """Removes the folder and those within it, unless a file lies in one of them."""
    inner = list(os.walk(folder, topdown=False))
    if not any(files for _, _, files in inner):
        for path, _, _ in inner:
            with contextlib.suppress(OSError):  # another process may have been quicker
                os.rmdir(path)


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files that killed processes left; the caller holds the folder's lock."""
    for left in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.\d+\.tmp", left.name):
            left.unlink(missing_ok=True)


# A path of this machine within a text: after its last slash comes the name that stays.
_FOLDERS = re.compile(r"(?<![\w:/.~-])(?:~[\w.-]*)?/(?:[^/,:*'\"\n]+/)*(?=[^/\s,:*'\"])")


def hide_folders(value: Any) -> Any:
    """A record for others: absolute paths lose their folders, also within lists and texts."""
    if isinstance(value, Mapping):
        return {key: hide_folders(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [hide_folders(inner) for inner in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value
