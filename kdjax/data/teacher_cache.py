"""A teacher's outputs on the disk: one record a row, in hashed shards beside an index.

A folder holds `index.json` and `shard-00000.bin`, ...: records of one NumPy type back to back,
first those of the training rows, then those of the held-out rows. The index says what the records
were made of, lists the finished shards, and says `complete` once all shards are there.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import MissingFileError, UserError
from kdjax.formats.files import replacing

_log = logging.getLogger("kdjax")

FORMAT = 1  # raise when records or fields change their meaning
KINDS = ("topk", "hidden")
INDEX = "index.json"
SHARD_BYTES = 512_000_000
_MAKE = "python -m kdjax.cache_teacher --config=... --out={}"


def record_type(kind: str, positions: int, *, k: int, width: int, dtype: str) -> np.dtype:
    """The record of one row; `k` ids a position, or `width` numbers of `dtype`, bf16 as bits."""
    if kind == "hidden":
        bits = {"bfloat16": "<u2", "float32": "<f4"}[dtype]
        return np.dtype([("hidden", bits, (positions, width))])
    columns = [
        ("ids", "u1", (k, 3)),
        ("logits", "<f2", (k,)),
        ("odds", "<f4", (2,)),
        ("label", "<f4", ()),
    ]
    return np.dtype([(name, number, (positions, *shape)) for name, number, shape in columns])


@dataclasses.dataclass(frozen=True)
class About:
    """What a cache was made of; a run that reads it must have been given the same."""

    kind: str  # a member of KINDS
    k: int  # ids a position; 0 for hidden states
    temperature: float | None  # at which the tail's odds were taken; None: serves any
    teacher: str  # SHA-256 of the model's files
    rows: str  # key of the packed rows: text, tokenizer and how they are packed
    tokenizer: str  # its content hash
    vocabulary: tuple[int, int]  # width of the heads, ids that exist
    positions: int  # a row
    width: int  # of the teacher's hidden states
    dtype: str  # train.compute_dtype, that of hidden states
    compute: str  # teacher.compute
    sides: tuple[int, int]  # rows of training, held-out rows

    @property
    def record(self) -> np.dtype:
        """The type of one row's record."""
        return record_type(self.kind, self.positions, k=self.k, width=self.width, dtype=self.dtype)

    @property
    def shard_rows(self) -> int:
        """Rows of every shard but the last."""
        return max(1, SHARD_BYTES // self.record.itemsize)

    @property
    def shards(self) -> list[range]:
        """The rows of each shard."""
        rows, step = sum(self.sides), self.shard_rows
        return [range(start, min(start + step, rows)) for start in range(0, rows, step)]

    def differences(self, other: "About", names: Iterable[str]) -> list[str]:
        """Lines naming the fields that differ, with both values."""
        return [
            f"{name}: the cache has {getattr(self, name)}, this run {getattr(other, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


def read_index(folder: Path) -> tuple[About, dict[str, Any]]:
    """What the cache was made of, and its index. Raises `UserError` for no or another format."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
        if (number := index["format"]) != FORMAT:
            raise UserError(f"{path}: found format {number}; expected {FORMAT}. Make it again.")
        fields: dict[str, Any] = index["about"]
        fields |= {name: tuple(fields[name]) for name in ("vocabulary", "sides")}
        return About(**fields), index
    except FileNotFoundError:
        raise MissingFileError(
            f"{path}: found no such file; expected a cached teacher. Make it: "
            f"`{_MAKE.format(folder)}`"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path}: found no index of a cached teacher ({type(error).__name__}: {error}); "
            "expected what `kdjax cache` writes. Delete the folder and make it again."
        ) from error


def _shard_name(number: int) -> str:
    return f"shard-{number:05}.bin"


def _find_damage(folder: Path, about: About, hashes: Mapping[str, str]) -> dict[str, str]:
    """The finished shards, of these SHA-256s, that are damaged: name to what is wrong."""
    sizes = {
        _shard_name(i): len(rows) * about.record.itemsize for i, rows in enumerate(about.shards)
    }

    def describe_damage(name: str) -> str:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return "is missing"
        if size != sizes.get(name):
            return f"has {size:,} bytes, expected {sizes.get(name, 0):,}"
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return "" if digest == hashes[name] else f"has SHA-256 {digest}, expected {hashes[name]}"

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        damage = zip(hashes, pool.map(describe_damage, hashes), strict=True)
        return {name: problem for name, problem in damage if problem}


def _save_index(folder: Path, about: About, shards: dict[str, str]) -> None:
    index = {
        "format": FORMAT,
        "complete": len(shards) == len(about.shards),
        "about": dataclasses.asdict(about),
        "record_bytes": about.record.itemsize,
        "shard_rows": about.shard_rows,
        "shards": dict(sorted(shards.items())),
    }
    with replacing(folder / INDEX) as file:
        file.write(json.dumps(index, indent=1).encode() + b"\n")


def _find_finished(folder: Path, about: About) -> dict[str, str]:
    """The whole shards that an earlier, stopped writer left: name to SHA-256."""
    if not (folder / INDEX).exists():
        return {}
    earlier, index = read_index(folder)
    names = [field.name for field in dataclasses.fields(About)]
    if lines := earlier.differences(about, names):
        raise UserError(
            f"{folder} holds another cache:\n  " + "\n  ".join(lines) + "\n"
            "Give another --out, delete that folder, or restore what it was made of."
        )
    damaged = _find_damage(folder, about, index["shards"])
    for name, problem in damaged.items():
        _log.warning("%s %s: written again", folder / name, problem)
    return {name: sha for name, sha in index["shards"].items() if name not in damaged}


def write(
    folder: Path, about: About, produce: Callable[[range], Iterable[np.ndarray]]
) -> dict[str, str]:
    """Writes the missing shards; `produce(rows)` yields the records of those rows, in order.

    Each shard is written aside, hashed and renamed, then listed: a writer that is killed continues
    at the first shard that is not listed, or is not as listed. Returns names and SHA-256s. Raises
    `UserError` for a folder with another cache and for a disk without room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = _find_finished(folder, about)
    shards = {_shard_name(i): rows for i, rows in enumerate(about.shards)}
    missing = {name: rows for name, rows in shards.items() if name not in done}
    row_bytes = about.record.itemsize
    need = sum(map(len, missing.values())) * row_bytes
    free = shutil.disk_usage(folder).free
    rows, size = sum(about.sides), sum(about.sides) * row_bytes / 1e9
    _log.info(
        f"{folder}: {rows:,} rows x {about.positions:,} positions x "
        f"{row_bytes / about.positions:.0f} bytes = {size:.2f} GB in {len(shards)} shards; "
        f"{len(done)} are there, {need / 1e9:.2f} GB are to be written, "
        f"{free / 1e9:.2f} GB are free"
    )
    if need > 0.99 * free:
        raise UserError(
            f"{folder}: found {free / 1e9:.2f} GB free on its disk; expected {need / 1e9:.2f} GB "
            "and 1% to spare. Make room, give another --out, a smaller --k, or less text."
        )
    for name, rows in missing.items():
        digest, written = hashlib.sha256(), 0
        with replacing(folder / name) as file:
            for block in produce(rows):
                data = np.ravel(block).view(np.uint8).data
                digest.update(data)
                file.write(data)
                written += len(block)
            assert written == len(rows), (written, rows)
        done[name] = digest.hexdigest()
        _save_index(folder, about, done)
        _log.info("%s: %d of %d", folder / name, len(done), len(shards))
    return done


class Side:
    """The records of one side of the split as batch columns, by row; read from the disk's map."""

    def __init__(self, cache: "TeacherCache", start: int):
        self._cache, self._start = cache, start

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Columns `teacher_*` of a row, `[T, ...]`: views of the map, copied by batching."""
        record = self._cache.record(self._start + row)
        return {f"teacher_{name}": np.asarray(record[name]) for name in record.dtype.names}


class TeacherCache:
    """A complete cache, opened for reading."""

    def __init__(self, folder: Path, about: About, sha256: str):
        self.about, self.sha256 = about, sha256  # of the index, shards' hashes included
        self._shards = [
            np.memmap(folder / _shard_name(i), about.record, "r", shape=(len(rows),))
            for i, rows in enumerate(about.shards)
        ]
        self.train, self.heldout = Side(self, 0), Side(self, about.sides[0])

    def record(self, row: int) -> Any:
        """The record of a row, still on the disk."""
        shard, at = divmod(row, self.about.shard_rows)
        return self._shards[shard][at]

    def __str__(self) -> str:
        about = self.about
        size = sum(about.sides) * about.record.itemsize
        content = f"top {about.k} ids at T={about.temperature:g}" if about.k else "hidden states"
        return f"cached teacher: {content}, {size / 1e9:.2f} GB in {len(about.shards)} shards"


def open_cache(folder: Path, expected: About) -> TeacherCache:
    """The cache in `folder`, every shard rehashed.

    Raises `UserError` if it is incomplete or damaged, or was made of another teacher, text or
    tokenizer, or for another temperature than `expected` says.
    """
    about, index = read_index(folder)
    names = ["teacher", "compute", "rows", "tokenizer", "vocabulary", "positions", "sides"]
    if about.temperature is not None:
        names.append("temperature")
    if lines := about.differences(expected, names):
        hint = ""
        if any(line.startswith("temperature") for line in lines):
            hint = " Hidden states (--kind=hidden) serve any temperature."
        raise UserError(
            f"{folder} is the cache of another run:\n  " + "\n  ".join(lines) + "\n"
            f"Restore those settings, or make a cache of this run: `{_MAKE.format('DIR')}`.{hint}"
        )
    count, total = len(index["shards"]), len(about.shards)
    if not index["complete"] or count != total:
        raise UserError(
            f"{folder}: found {count} of {total} shards; expected a complete cache. Finish it: "
            f"`{_MAKE.format(folder)}`"
        )
    if damaged := _find_damage(folder, about, index["shards"]):
        lines = "\n  ".join(f"{name} {problem}" for name, problem in damaged.items())
        raise UserError(
            f"{folder}: {len(damaged)} shards are not as they were written:\n  {lines}\n"
            f"Write these again: `{_MAKE.format(folder)}`"
        )
    canonical = json.dumps(index, sort_keys=True).encode()
    return TeacherCache(folder, about, hashlib.sha256(canonical).hexdigest())
