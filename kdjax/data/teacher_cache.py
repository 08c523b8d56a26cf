"""A teacher's outputs on the disk: one record a row, in hashed shards beside an index.

A folder holds `index.json` and `shard-00000.bin`, ...: records of one NumPy type back to back,
first those of the training rows, then those of the held-out rows. The index says what the records
were made of, lists the finished shards, and says `complete` once all shards are there.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.device import cluster
from kdjax.errors import MissingFileError, UserError, WriteError
from kdjax.formats.files import remove_leftovers, replacing, writing
from kdjax.formats.locks import LOCK, locking

_log = logging.getLogger("kdjax")

FORMAT = 1  # raise when records or fields change their meaning
KINDS = ("topk", "hidden")
INDEX = "index.json"
SHARD_BYTES = 512_000_000
_MAKE = "kdjax cache --config=... --out={}"


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a cache was made of: a run that reads it must have the same."""

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
        """The NumPy type of one row's record; bfloat16 is kept as its bits."""
        if self.kind == "hidden":
            bits = {"bfloat16": "<u2", "float32": "<f4"}[self.dtype]
            return np.dtype([("hidden", bits, (self.positions, self.width))])
        columns = [
            ("ids", "u1", (self.k, 3)),
            ("logits", "<f2", (self.k,)),
            ("odds", "<f4", (2,)),
            ("label", "<f4", ()),
        ]
        return np.dtype([(name, kind, (self.positions, *shape)) for name, kind, shape in columns])

    @property
    def shard_rows(self) -> int:
        """Rows of every shard but the last."""
        return max(1, SHARD_BYTES // self.record.itemsize)

    @property
    def shards(self) -> list[range]:
        """The rows of each shard."""
        rows, step = sum(self.sides), self.shard_rows
        return [range(start, min(start + step, rows)) for start in range(0, rows, step)]

    def differences(self, other: "CacheSpec", names: Iterable[str]) -> list[str]:
        """Lines naming the fields that differ, with both values."""
        return [
            f"{name}: the cache has {getattr(self, name)}, this run {getattr(other, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


def read_index(folder: Path) -> tuple[CacheSpec, dict[str, Any]]:
    """What the cache was made of, and its index; raises `UserError` for another format or none."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
        if (number := index["format"]) != FORMAT:
            raise UserError(f"{path}: found format {number}; expected {FORMAT}. Make it again.")
        fields: dict[str, Any] = index["about"]
        fields |= {name: tuple(fields[name]) for name in ("vocabulary", "sides")}
        return CacheSpec(**fields), index
    except FileNotFoundError:
        raise MissingFileError(
            f"{path}: found no such file; expected a cached teacher. Make it: "
            f"`{_MAKE.format(folder)}`"
        ) from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(
            f"{path}: found no index of a cached teacher ({type(error).__name__}: {error}); "
            "expected what `kdjax cache` writes. Delete the folder and make it again."
        ) from error


def _shard_name(number: int) -> str:
    return f"shard-{number:05}.bin"


def _find_damage(folder: Path, spec: CacheSpec, hashes: Mapping[str, str]) -> dict[str, str]:
    """What is wrong with each damaged shard of those listed; `hashes` are their SHA-256s."""
    row_bytes = spec.record.itemsize
    sizes = {_shard_name(i): len(rows) * row_bytes for i, rows in enumerate(spec.shards)}

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


def _save_index(folder: Path, spec: CacheSpec, shards: dict[str, str]) -> None:
    index = {
        "format": FORMAT,
        "complete": len(shards) == len(spec.shards),
        "about": dataclasses.asdict(spec),
        "record_bytes": spec.record.itemsize,
        "shard_rows": spec.shard_rows,
        "shards": dict(sorted(shards.items())),
    }
    with replacing(folder / INDEX) as file:
        file.write(json.dumps(index, indent=1).encode() + b"\n")


def _find_finished(folder: Path, spec: CacheSpec) -> dict[str, str]:
    """SHA-256 by name of the undamaged shards that a stopped writer left in the folder."""
    if not (folder / INDEX).exists():
        return {}
    earlier, index = read_index(folder)
    names = [field.name for field in dataclasses.fields(CacheSpec)]
    if lines := earlier.differences(spec, names):
        raise UserError(
            f"{folder} holds another cache:\n  " + "\n  ".join(lines) + "\n"
            "Give another --out, delete that folder, or restore what it was made of."
        )
    damaged = _find_damage(folder, spec, index["shards"])
    for name, problem in damaged.items():
        _log.warning("%s %s: written again", folder / name, problem)
    return {name: sha for name, sha in index["shards"].items() if name not in damaged}


def write(
    folder: Path, spec: CacheSpec, produce: Callable[[range], Iterable[np.ndarray]]
) -> dict[str, str]:
    """Writes the missing shards; `produce(rows)` yields the records of those rows, in order.

    Of several processes the first writes, and all produce: on the others it yields nothing. Each
    shard is written aside, hashed and renamed, then listed: a writer that is killed continues
    at the first shard that is not listed, or is not as listed. Returns names and SHA-256s. Raises
    `UserError` for a folder with another cache, `LockedError` for one that another process writes,
    `WriteError` for a disk without room.
    """
    first, done = jax.process_index() == 0, dict[str, str]()
    shards = {_shard_name(i): rows for i, rows in enumerate(spec.shards)}
    with contextlib.ExitStack() as held:
        if first:
            with writing(folder / INDEX):
                folder.mkdir(parents=True, exist_ok=True)
                if held.enter_context(locking(folder / LOCK, "give another --out")):
                    remove_leftovers(folder)
            done = _find_finished(folder, spec)
            _check_room(folder, spec, done)
        done = cluster.exchange("cache", done)[0]
        for name, rows in shards.items():
            if name in done:
                continue
            records = produce(rows)
            if first:
                done[name] = _write_shard(folder / name, len(rows), records)
                _save_index(folder, spec, done)
                _log.info("%s: %d of %d", folder / name, len(done), len(shards))
            else:
                collections.deque(records, maxlen=0)
    return done


def _check_room(folder: Path, spec: CacheSpec, done: Mapping[str, str]) -> None:
    """Says what is to be written; raises `WriteError` if the disk has no room for it."""
    shards = {_shard_name(i): rows for i, rows in enumerate(spec.shards)}
    missing = {name: rows for name, rows in shards.items() if name not in done}
    row_bytes = spec.record.itemsize
    need = sum(map(len, missing.values())) * row_bytes
    free = shutil.disk_usage(folder).free
    rows, size = sum(spec.sides), sum(spec.sides) * row_bytes / 1e9
    _log.info(
        f"{folder}: {rows:,} rows x {spec.positions:,} positions x "
        f"{row_bytes / spec.positions:.0f} bytes = {size:.2f} GB in {len(shards)} shards; "
        f"{len(done)} are there, {need / 1e9:.2f} GB are to be written, "
        f"{free / 1e9:.2f} GB are free"
    )
    if need > 0.99 * free:
        raise WriteError(
            f"{folder}: found {free / 1e9:.2f} GB free on its disk; expected {need / 1e9:.2f} GB "
            "and 1% to spare. Make room, give another --out, a smaller --k, or less text."
        )


def _write_shard(path: Path, rows: int, records: Iterable[np.ndarray]) -> str:
    """Writes so many records; returns their SHA-256."""
    digest, written = hashlib.sha256(), 0
    with replacing(path) as file:
        for block in records:
            data = np.ravel(block).view(np.uint8).data
            digest.update(data)
            file.write(data)
            written += len(block)
        assert written == rows, (written, rows)
    return digest.hexdigest()


class TeacherCache:
    """A complete cache, opened for reading."""

    def __init__(self, folder: Path, spec: CacheSpec, sha256: str):
        self.spec, self.sha256 = spec, sha256  # of the index, shards' hashes included
        self._shards = [
            np.memmap(folder / _shard_name(i), spec.record, "r", shape=(len(rows),))
            for i, rows in enumerate(spec.shards)
        ]
        self.train, self.heldout = Side(self, 0), Side(self, spec.sides[0])

    def read(self, row: int) -> dict[str, np.ndarray]:
        """Columns `teacher_*` of a row, `[T, ...]`: views of the disk's map, copied by batching."""
        shard, at = divmod(row, self.spec.shard_rows)
        record: Any = self._shards[shard][at]
        return {f"teacher_{name}": np.asarray(record[name]) for name in record.dtype.names}

    def __str__(self) -> str:
        spec = self.spec
        size = sum(spec.sides) * spec.record.itemsize
        content = f"top {spec.k} ids at T={spec.temperature:g}" if spec.k else "hidden states"
        return f"cached teacher: {content}, {size / 1e9:.2f} GB in {len(spec.shards)} shards"


@dataclasses.dataclass(frozen=True)
class Side:
    """The training rows, or the held-out rows, of a cache; `Columns` of a batch source."""

    cache: TeacherCache
    start: int  # row of the cache at which the side begins

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return self.cache.read(self.start + row)


def open_cache(folder: Path, expected: CacheSpec) -> TeacherCache:
    """The cache in `folder`, every shard rehashed.

    Raises `UserError` if it is incomplete or damaged, or was made of another teacher, text or
    tokenizer, or for another temperature than `expected` says.
    """
    spec, index = read_index(folder)
    names = ["teacher", "compute", "rows", "tokenizer", "vocabulary", "positions", "sides"]
    if spec.temperature is not None:
        names.append("temperature")
    if lines := spec.differences(expected, names):
        hint = ""
        if any(line.startswith("temperature") for line in lines):
            hint = " Hidden states (--kind=hidden) serve any temperature."
        raise UserError(
            f"{folder} is the cache of another run:\n  " + "\n  ".join(lines) + "\n"
            f"Restore those settings, or make a cache of this run: `{_MAKE.format('DIR')}`.{hint}"
        )
    count, total = len(index["shards"]), len(spec.shards)
    if not index["complete"] or count != total:
        raise UserError(
            f"{folder}: found {count} of {total} shards; expected a complete cache. Finish it: "
            f"`{_MAKE.format(folder)}`"
        )
    if damaged := _find_damage(folder, spec, index["shards"]):
        lines = "\n  ".join(f"{name} {problem}" for name, problem in damaged.items())
        raise UserError(
            f"{folder}: {len(damaged)} shards are not as they were written:\n  {lines}\n"
            f"Write these again: `{_MAKE.format(folder)}`"
        )
    return TeacherCache(folder, spec, hash_index(index))


def hash_index(index: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of an index: of the whole cache, whose shards' hashes it holds."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
