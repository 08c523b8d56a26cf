"""What the readers and writers of checkpoint files share: checked reading, atomic writing."""

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kdjax.errors import UserError

DOWNLOAD = "Download the file again."

# A tensor to write: its bytes, as an array of any type and shape, or a function that returns them
# or their successive chunks.
Data = np.ndarray | Callable[[], np.ndarray | Iterable[np.ndarray]]


def bad(path: Path, found: str, expected: str, remedy: str) -> UserError:
    """The error for a file that is not what it should be."""
    return UserError(f"{path}: found {found}; expected {expected}. {remedy}")


def map_file(path: Path) -> np.ndarray:
    """The file's bytes, read-only uint8 `[size]`, mapped and not read."""
    # An empty file cannot be mapped.
    if not path.stat().st_size:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def load_json(path: Path, data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`, which `what` describes; the last of equal keys counts."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad(path, f"{what} that is no JSON ({error})", "a JSON object", DOWNLOAD) from error
    if not isinstance(value, dict):
        found = f"{what} that is a JSON {type(value).__name__}"
        raise bad(path, found, "a JSON object", DOWNLOAD)
    return value


class Cursor:
    """Reads a header; every step is checked against the end of the data."""

    def __init__(self, path: Path, data: memoryview):
        self.path, self.data, self.at = path, data, 0

    def need(self, nbytes: int, what: str) -> None:
        """Raises `UserError` unless `nbytes` more are there."""
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
        """Those bytes as UTF-8; raises `UserError` if they are none."""
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            found = f"{what} with bytes that are no UTF-8 ({error.reason})"
            raise bad(self.path, found, "UTF-8 text", DOWNLOAD) from error


def chunks(data: Data) -> Iterator[memoryview]:
    """The bytes to write, piece by piece."""
    parts = data() if callable(data) else data
    for part in [parts] if isinstance(parts, np.ndarray) else parts:
        yield np.ravel(part).view(np.uint8).data


def check_written(path: Path, name: str, found: int, nbytes: int) -> None:
    """Raises `UserError` if a tensor came with another number of bytes than its shape has."""
    if found != nbytes:
        wanted = f"{nbytes}, as its shape and type say"
        fix = "Pass the encoded bytes of the whole tensor."
        raise bad(path, f"{found} bytes of tensor {name!r} to write", wanted, fix)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path`, readable too, that takes its place once all of it is on the disk.

    Makes the folder; if the block raises, nothing is left behind and `path` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
