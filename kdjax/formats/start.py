"""Masters of a rounded student and the scales of their blocks, in one file of NumPy (`.npz`).

Arrays are named `masters PATH` and `scales PATH TYPE NUMBER`, paths as Flax has them.
"""

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from flax.traverse_util import flatten_dict

from kdjax.formats.files import bad, hash_given, open_given, replacing

_EXPECTED = "masters and scales of kdjax shrink"
_MASTERS, _SCALES = "masters", "scales"
# Errors of NumPy and zipfile; a RuntimeError says "encrypted", or a newer version.
_DAMAGE = (ValueError, TypeError, EOFError, OSError, RuntimeError, struct.error, BadZipFile)

Where = tuple[str, ...]  # the path of a parameter; of scales the type follows it


def write_start(path: Path, masters: Mapping[str, Any], scales: Mapping[str, Any]) -> None:
    """Writes trees of masters and of scales; `path` appears once all of it is on the disk."""
    flat: list[dict[Where, Any]] = [flatten_dict(dict(tree)) for tree in (masters, scales)]
    named: dict[str, Any] = {f"{_MASTERS} {'/'.join(at)}": x for at, x in flat[0].items()}
    for at, parts in flat[1].items():
        named |= {f"{_SCALES} {'/'.join(at)}/{number}": x for number, x in enumerate(parts)}
    with replacing(path) as file:
        np.savez(file, **named)


def read_masters(path: str | os.PathLike[str]) -> dict[Where, np.ndarray]:
    """Reads the masters, float32; raises `UserError` for a file that is none of `write_start`."""
    return {tuple(name.split("/")): x for name, x in _read(path, _MASTERS)}


def read_scales(path: str | os.PathLike[str]) -> dict[Where, tuple[np.ndarray, ...]]:
    """Reads the scales by path and type; raises `UserError` as `read_masters` does."""
    scales: dict[Where, tuple[np.ndarray, ...]] = {}
    for name, x in _read(path, _SCALES):  # in the order that they were written in
        at = tuple(name.split("/"))[:-1]
        scales[at] = *scales.get(at, ()), x
    return scales


def check_start(path: str | os.PathLike[str]) -> None:
    """Raises `MissingFileError`, or `UserError` for no archive of arrays; reads only its list."""
    with _open(path):
        pass


def hash_start(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the file's bytes; raises `MissingFileError` if there is no such file."""
    return hash_given(path, _EXPECTED)


def _read(path: str | os.PathLike[str], kind: str) -> Iterator[tuple[str, np.ndarray]]:
    with _open(path) as arrays:
        for name in arrays.files:
            if name.startswith(f"{kind} "):
                yield name.removeprefix(f"{kind} "), np.asarray(arrays[name])


@contextlib.contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[Any]:
    # NumPy would leave a file that it opened itself open if it is no archive.
    with open_given(path, _EXPECTED) as file:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                yield arrays
        except _DAMAGE as error:
            found, remedy = f"what cannot be read ({error})", "Make it anew: kdjax shrink."
            raise bad(Path(path), found, _EXPECTED, remedy) from error
