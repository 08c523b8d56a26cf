"""A teacher's outputs on the disk: one record for each row, in hashed shards with an index.

A folder holds `index.json` and `shard-00000.bin`, ...: contiguous records of one NumPy type. Rows
of training are numbered first, then held-out rows. The index records the inputs and lists the
finished shards. In a cache of all rows a shard's number determines its rows, and the index says
`complete` once all are there. In a cache of some rows the index lists each shard's rows, and more
can be added.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.config import check_weights, name_numbers, read_weights, refuse_removed_weights
from kdjax.device import cluster
from kdjax.errors import MissingFileError, UserError, WriteError, suggest_path
from kdjax.formats.files import replacing
from kdjax.formats.locks import holding
from kdjax.models.alignment import COLUMNS, OWN_ROWS

_log = logging.getLogger("kdjax")

FORMAT, SOME_ROWS = 1, 2  # formats of an index: all rows, in order; the rows that it lists
KINDS = ("topk", "hidden")
INDEX = "index.json"
SHARD_BYTES = 512_000_000
_MAKE = "kdjax cache --config=... --out={}"


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Inputs of a cache: a run that reads it must have equal ones."""

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
    weights: str  # of the teacher: dense (packed has equal numbers), or float8
    sides: tuple[int, int]  # rows of training, held-out rows
    # Newer settings that are not at their default: fields of the teacher, `rest` of answers,
    # `OWN_ROWS` with the content hash of the teacher's tokenizer, where its rows differ.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def record(self) -> np.dtype:
        """The NumPy type of one row's record; bfloat16 is stored as its bits."""
        if self.kind == "hidden":
            bits = {"bfloat16": "<u2", "float32": "<f4"}[self.dtype]
            own = COLUMNS if OWN_ROWS in self.settings else {}
            columns = [(name, np.dtype(kind).str, (self.positions,)) for name, kind in own.items()]
            return np.dtype([("hidden", bits, (self.positions, self.width)), *columns])
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

    def cut(self, rows: np.ndarray) -> list[np.ndarray]:
        """Splits rows into parts of a shard's size."""
        step = self.shard_rows
        return [rows[start : start + step] for start in range(0, len(rows), step)]

    @property
    def shards(self) -> dict[str, np.ndarray]:
        """The rows of each shard of a cache of all rows."""
        parts = self.cut(np.arange(sum(self.sides)))
        return {_shard_name(number): rows for number, rows in enumerate(parts)}

    def differences(self, other: "CacheSpec", names: Iterable[str]) -> list[str]:
        """Lines naming the fields that differ, with both values."""
        return [
            f"{name}: the cache has {getattr(self, name)}, this run {getattr(other, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


def read_index(folder: Path) -> tuple[CacheSpec, dict[str, Any]]:
    """Reads a cache's spec and index; raises `UserError` for another format or no index."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
        if (number := index["format"]) not in (FORMAT, SOME_ROWS):
            raise UserError(
                f"{path}: found format {number}; expected {FORMAT} or {SOME_ROWS}. Make it again."
            )
        fields: dict[str, Any] = dict(index["about"])
        fields |= {name: tuple(fields[name]) for name in ("vocabulary", "sides")}
        if compute := fields.pop("compute", None):  # of an earlier version
            fields["weights"] = name_numbers(read_weights(compute))
        refuse_removed_weights(fields["weights"])
        spec = CacheSpec(**fields)
        _check_index(spec, index)
        return spec, index
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(
            f"{path}: found no such file; expected a cached teacher.{suggest_path(path)} Make it: "
            f"`{_MAKE.format(folder)}`"
        ) from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path}: found no index of a cached teacher ({type(error).__name__}: {error}); "
            "expected what `kdjax cache` writes. Delete the folder and make it again."
        ) from error


def _check_index(spec: CacheSpec, index: Mapping[str, Any]) -> None:
    """Checks an index before its rows are listed, which a damaged one could make too many.

    Raises `ValueError`, `KeyError` or `TypeError`.
    """
    counts = (spec.k, spec.positions, spec.width, *spec.vocabulary, *spec.sides)
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"counts of {', '.join(map(str, counts))}")
    if (spec.kind == "hidden") == bool(spec.k):
        raise ValueError(f"{spec.k} ids of kind {spec.kind}")
    heat = spec.temperature
    if spec.k if heat is None else not 0 < heat < math.inf:
        raise ValueError(f"a temperature of {heat}")
    if not spec.record.itemsize:
        raise ValueError("records of no bytes")
    if index["format"] == FORMAT:
        if not isinstance(index["shards"], dict) or "complete" not in index:
            raise ValueError("no list of shards")
        return
    for name, entry in index["shards"].items():
        sha256, total, runs = entry["sha256"], sum(spec.sides), entry["rows"]
        for first, last in runs or [(0, -1)]:
            if not (type(first) is type(last) is int and 0 <= first <= last < total):
                raise ValueError(f"rows {runs} in {name} of SHA-256 {sha256}")


def _shard_name(number: int) -> str:
    return f"shard-{number:05}.bin"


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A finished shard: the SHA-256 of its file, in hex, and the numbers of its rows."""

    sha256: str
    rows: np.ndarray


def _list_shards(spec: CacheSpec, index: Mapping[str, Any]) -> dict[str, _Shard]:
    """The finished shards of an index, by name."""
    if index["format"] == FORMAT:
        rows, none = spec.shards, np.empty(0, np.int64)
        return {name: _Shard(sha, rows.get(name, none)) for name, sha in index["shards"].items()}
    return {
        name: _Shard(entry["sha256"], _join_runs(entry["rows"]))
        for name, entry in index["shards"].items()
    }


def _find_runs(rows: np.ndarray) -> list[list[int]]:
    """Writes ascending numbers as [first, last] of consecutive ones."""
    ends = np.flatnonzero(np.diff(rows) != 1)
    firsts, lasts = rows[[0, *(ends + 1)]], rows[[*ends, -1]]
    return [[int(first), int(last)] for first, last in zip(firsts, lasts, strict=True)]


def _join_runs(runs: Iterable[Sequence[int]]) -> np.ndarray:
    return np.concatenate([np.arange(first, last + 1) for first, last in runs])


def _find_damage(folder: Path, spec: CacheSpec, shards: Mapping[str, _Shard]) -> dict[str, str]:
    """Finds damaged shards among the listed ones, and what is wrong with each."""

    def describe_damage(name: str) -> str:
        shard = shards[name]
        expected = len(shard.rows) * spec.record.itemsize
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return "is missing"
        if size != expected:
            return f"has {size:,} bytes, expected {expected:,}"
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return "" if digest == shard.sha256 else f"has SHA-256 {digest}, expected {shard.sha256}"

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        damage = zip(shards, pool.map(describe_damage, shards), strict=True)
        return {name: problem for name, problem in damage if problem}


def _save_index(
    folder: Path, spec: CacheSpec, shards: Mapping[str, _Shard], *, ordered: bool
) -> None:
    about = dataclasses.asdict(spec)
    if (folder / INDEX).exists():  # names of an earlier version stay, as does the hash
        about = read_index(folder)[1]["about"]
    index: dict[str, Any] = {"about": about, "record_bytes": spec.record.itemsize}
    if ordered:
        index = {"format": FORMAT, "complete": len(shards) == len(spec.shards)} | index
        index |= {"shard_rows": spec.shard_rows}
        index |= {"shards": {name: shards[name].sha256 for name in sorted(shards)}}
    else:
        listed = {
            name: {"sha256": shards[name].sha256, "rows": _find_runs(shards[name].rows)}
            for name in sorted(shards)
        }
        index = {"format": SOME_ROWS} | index | {"shards": listed}
    with replacing(folder / INDEX) as file:
        file.write(json.dumps(index, indent=1).encode() + b"\n")


def _are_ordered(spec: CacheSpec, shards: Mapping[str, np.ndarray]) -> bool:
    """Whether each shard has the rows of its number in a cache of all rows."""
    expected = spec.shards
    return all(np.array_equal(rows, expected.get(name, [])) for name, rows in shards.items())


def _find_finished(
    folder: Path, spec: CacheSpec
) -> tuple[dict[str, _Shard], dict[str, np.ndarray]]:
    """Lists the folder's undamaged shards, and the rows of the damaged ones."""
    if not (folder / INDEX).exists():
        return {}, {}
    earlier, index = read_index(folder)
    names = [field.name for field in dataclasses.fields(CacheSpec)]
    if lines := earlier.differences(spec, names):
        raise UserError(
            f"{folder} holds another cache:\n  " + "\n  ".join(lines) + "\n"
            "Give another --out, delete that folder, or restore its inputs."
        )
    shards = _list_shards(spec, index)
    damaged = _find_damage(folder, spec, shards)
    for name, problem in damaged.items():
        _log.warning("%s %s: written again", folder / name, problem)
    done = {name: shard for name, shard in shards.items() if name not in damaged}
    return done, {name: shards[name].rows for name in damaged if len(shards[name].rows)}


def _plan_shards(
    spec: CacheSpec, shards: Mapping[str, np.ndarray], wanted: np.ndarray
) -> dict[str, np.ndarray]:
    """Plans the rows of each shard to add to `shards` so that all `wanted` rows are there."""
    if len(wanted) == sum(spec.sides) and _are_ordered(spec, shards):
        return {name: rows for name, rows in spec.shards.items() if name not in shards}
    held = np.zeros(sum(spec.sides), bool)
    for rows in shards.values():
        held[rows] = True
    free = (name for number in itertools.count() if (name := _shard_name(number)) not in shards)
    return dict(zip(free, spec.cut(wanted[~held[wanted]]), strict=False))


def write(
    folder: Path,
    spec: CacheSpec,
    produce: Callable[[Sequence[int]], Iterable[np.ndarray]],
    wanted: np.ndarray | None = None,
) -> None:
    """Adds the shards that `wanted` rows lack, ascending; None: all rows.

    `produce(rows)` yields the records of those rows, in order. Of several processes the first
    writes, and all produce: on the others it yields nothing. Each shard is written aside, hashed
    and renamed, then listed: a writer that is killed continues at the first shard that is not
    listed, or is not as listed. Raises `UserError` for a folder with another cache, `LockedError`
    for one that another process writes, `WriteError` for a disk without room.
    """
    first, done, ordered = jax.process_index() == 0, dict[str, _Shard](), False
    plan: dict[str, list[list[int]]] = {}
    with contextlib.ExitStack() as held:
        if first:
            held.enter_context(holding(folder, "give another --out"))
            done, damaged = _find_finished(folder, spec)
            shards = {name: shard.rows for name, shard in done.items()} | damaged
            wanted = np.arange(sum(spec.sides)) if wanted is None else wanted
            missing = damaged | _plan_shards(spec, shards, wanted)
            ordered = _are_ordered(spec, shards | missing)
            _check_room(folder, spec, shards, missing)
            plan = {name: _find_runs(rows) for name, rows in sorted(missing.items())}
        plan = cluster.exchange("cache", plan)[0]
        for number, (name, runs) in enumerate(plan.items(), 1):
            rows = _join_runs(runs)
            records = produce(rows.tolist())
            if first:
                done[name] = _Shard(_write_shard(folder / name, len(rows), records), rows)
                _save_index(folder, spec, done, ordered=ordered)
                _log.info("%s: %d of %d", folder / name, number, len(plan))
            else:
                collections.deque(records, maxlen=0)


def _check_room(
    folder: Path,
    spec: CacheSpec,
    shards: Mapping[str, np.ndarray],
    missing: Mapping[str, np.ndarray],
) -> None:
    """Says what is to be written; raises `WriteError` if the disk has no room for it."""
    row_bytes = spec.record.itemsize
    more = sum(map(len, missing.values()))
    held = sum(len(rows) for name, rows in shards.items() if name not in missing)
    need, free = more * row_bytes, shutil.disk_usage(folder).free
    _log.info(
        f"{folder}: {held + more:,} of {sum(spec.sides):,} rows x {spec.positions:,} positions x "
        f"{row_bytes / spec.positions:.0f} bytes = {(held + more) * row_bytes / 1e9:.2f} GB; "
        f"{held:,} rows are there, {need / 1e9:.2f} GB are to be written, "
        f"{free / 1e9:.2f} GB are free"
    )
    if need > 0.99 * free:
        raise WriteError(
            f"{folder}: found {free / 1e9:.2f} GB free on its disk; expected {need / 1e9:.2f} GB "
            "and 1% to spare. Make room, give another --out, a smaller --k, or less text."
        )


def _write_shard(path: Path, rows: int, records: Iterable[np.ndarray]) -> str:
    """Writes records; returns their SHA-256."""
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
    """A cache, opened for reading."""

    def __init__(self, folder: Path, spec: CacheSpec, shards: Mapping[str, _Shard], sha256: str):
        self.spec, self.sha256 = spec, sha256  # of `hash_index`
        self._maps, place = [], np.full((sum(spec.sides), 2), -1, np.int32)
        for number, (name, shard) in enumerate(shards.items()):
            count = len(shard.rows)
            self._maps.append(np.memmap(folder / name, spec.record, "r", shape=(count,)))
            place[shard.rows, 0], place[shard.rows, 1] = number, np.arange(count)
        self._place = place  # the shard of each row and the record in it; -1: not cached
        self.train, self.heldout = Side(self, 0), Side(self, spec.sides[0])

    def read(self, row: int) -> dict[str, np.ndarray]:
        """Columns `teacher_*` of a row, `[T, ...]`: views of the disk's map, copied by batching."""
        shard, at = self._place[row]
        assert shard >= 0, row  # `open_cache` has all that are needed
        record: Any = self._maps[shard][at]
        return {f"teacher_{name}": np.asarray(record[name]) for name in record.dtype.names}

    def lacks(self, rows: np.ndarray) -> np.ndarray:
        """Selects the rows that are not cached."""
        return rows[self._place[rows, 0] < 0]

    def __str__(self) -> str:
        spec, rows = self.spec, sum(map(len, self._maps))
        content = f"top {spec.k} ids at T={spec.temperature:g}" if spec.k else "hidden states"
        of = f"{rows:,} of {sum(spec.sides):,} rows"
        size = rows * spec.record.itemsize / 1e9
        return f"cached teacher: {content} of {of}, {size:.2f} GB in {len(self._maps)} shards"


@dataclasses.dataclass(frozen=True)
class Side:
    """The training rows, or the held-out rows, of a cache; `Columns` of a batch source."""

    cache: TeacherCache
    start: int  # row of the cache at which the side begins

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return self.cache.read(self.start + row)


@dataclasses.dataclass(frozen=True)
class SeveralSides:
    """The same side of several caches: columns `teacher_0_*`, `teacher_1_*`, ..."""

    sides: tuple[Side, ...]

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {
            name.replace("teacher_", f"teacher_{number}_", 1): column
            for number, side in enumerate(self.sides)
            for name, column in side[row].items()
        }


class SeveralCaches:
    """Caches of several teachers over the same rows, with a weight each."""

    def __init__(self, caches: Sequence[TeacherCache], weights: Sequence[float]):
        self.caches, self.weights = caches, weights
        self.sha256 = join_hashes([(w, c.sha256) for w, c in zip(weights, caches, strict=True)])
        self.train = SeveralSides(tuple(cache.train for cache in caches))
        self.heldout = SeveralSides(tuple(cache.heldout for cache in caches))

    def __str__(self) -> str:
        pairs = zip(self.weights, self.caches, strict=True)
        return "; ".join(f"{weight:g} of a {cache}" for weight, cache in pairs)


def split_caches(text: str) -> list[tuple[float, Path]]:
    """The folders that `teacher.cache` names, with their weights: `"0.7*a,0.3*b"`.

    Without weights, `"a,b"`, all have the same. `UserError` for weights that are no shares, and for
    one that names no folder.
    """
    if not {",", "*"} & set(text) or Path(text).exists():
        return [(1.0, Path(text))]
    parts = [part.strip().rpartition("*") for part in text.split(",")]
    try:
        weights = [float(weight) if star else 1 / len(parts) for weight, star, _ in parts]
        if not all(folder for _, _, folder in parts):
            raise ValueError(text)
    except ValueError:
        raise UserError(
            f"teacher.cache={text!r}: expected folders by commas, such as a,b or 0.7*a,0.3*b"
        ) from None
    check_weights(weights)
    return [(weight, Path(folder)) for weight, (_, _, folder) in zip(weights, parts, strict=True)]


def join_hashes(hashes: Sequence[tuple[float, str]]) -> str:
    """SHA-256, in hex, of several caches, by weights and hashes; one has its own."""
    if len(hashes) == 1:
        return hashes[0][1]
    return hashlib.sha256(json.dumps([list(pair) for pair in hashes]).encode()).hexdigest()


def open_cache(folder: Path, expected: CacheSpec, needed: np.ndarray | None = None) -> TeacherCache:
    """The cache in `folder`, every shard rehashed.

    Raises `UserError` if it is damaged, lacks one of the `needed` rows (None: of all), or was made
    of another teacher, text or tokenizer, or for another temperature than `expected` says.
    """
    spec, index = read_index(folder)
    names = ["teacher", "weights", "rows", "tokenizer", "vocabulary", "positions", "sides"]
    names.append("settings")
    if not expected.teacher:  # a run without the teacher's file: its cache says what it said
        names = [n for n in names if n not in ("teacher", "weights", "settings")]
    if spec.temperature is not None:
        names.append("temperature")
    if lines := spec.differences(expected, names):
        hint = ""
        if any(line.startswith("temperature") for line in lines):
            hint = " Hidden states (kdjax cache --kind=hidden) serve any temperature."
        raise UserError(
            f"{folder} is the cache of another run:\n  " + "\n  ".join(lines) + "\n"
            f"Restore those settings, or make a cache of this run: `{_MAKE.format('DIR')}`.{hint}"
        )
    shards, total = _list_shards(spec, index), len(spec.shards)
    if index["format"] == FORMAT and not (index["complete"] and len(shards) == total):
        raise UserError(
            f"{folder}: found {len(shards)} of {total} shards; expected a complete cache. Finish "
            f"it: `{_MAKE.format(folder)} --all`"
        )
    if damaged := _find_damage(folder, spec, shards):
        lines = "\n  ".join(f"{name} {problem}" for name, problem in damaged.items())
        raise UserError(
            f"{folder}: {len(damaged)} shards are not as they were written:\n  {lines}\n"
            f"Write these again: `{_MAKE.format(folder)}`"
        )
    cache = TeacherCache(folder, spec, shards, hash_index(index))
    needed = np.arange(sum(spec.sides)) if needed is None else needed
    if len(missing := cache.lacks(needed)):
        raise UserError(
            f"{folder}: found {len(needed) - len(missing):,} of the {len(needed):,} rows that this "
            f"run reads; expected all. Add the others, with this run's config and flags: "
            f"`{_MAKE.format(folder)}`, or --all for every row of the text."
        )
    return cache


def open_caches(
    names: str, expected: Sequence[CacheSpec], needed: np.ndarray
) -> TeacherCache | SeveralCaches:
    """The cache of `teacher.cache`, or all that it names, each as `open_cache` opens it."""
    folders = split_caches(names)
    opened = [
        open_cache(folder, spec, needed)
        for (_, folder), spec in zip(folders, expected, strict=True)
    ]
    if len(opened) == 1:
        return opened[0]
    return SeveralCaches(opened, [weight for weight, _ in folders])


def hash_index(index: Mapping[str, Any]) -> str:
    """SHA-256, in hex, by which runs know a cache.

    Of a cache of all rows it covers the whole index, the shards' hashes among it. One that may
    grow is known by what it is made of and by its first shard.
    """
    if index["format"] == SOME_ROWS:
        index = {"about": index["about"], "first": min(index["shards"].items(), default=None)}
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
