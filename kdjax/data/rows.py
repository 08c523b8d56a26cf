"""Fixed rows of packed documents: tokenized once, cached by content, memory-mapped.

A row holds `seq_len + 1` ids, so that inputs are `row[:-1]` and targets `row[1:]`. Plain texts
follow one another and are cut at the row's end; the next row then starts with the last id of the
previous piece, so that every id but a document's first is a target exactly once. Records with a
question (conversations, prompts with completions, answers of a server) have separate rows,
which cut none of them.
"""

import bisect
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from kdjax.data.fields import Fields
from kdjax.data.readers import find_form, is_read_anew, is_table
from kdjax.data.sources import find_files
from kdjax.data.text import Document, documents, encode_documents
from kdjax.errors import UserError
from kdjax.formats.files import make_folder, writing
from kdjax.formats.locks import LOCK, LockedError, locking
from kdjax.models.long_text import LONG
from kdjax.models.tokenizer import Tokenizer
from kdjax.progress import Heartbeat

_log = logging.getLogger("kdjax")

FORMAT = 2  # raise when equal texts would produce other bytes
RECORDS = 3  # raise when equal records would; rows of format 2 cut them at row ends
FILES = 4  # raise when a form of files is read otherwise than before
LONG_RECORDS = ("leave_out", "cut")  # what becomes of records longer than a row
COLUMNS = {"tokens": np.uint32, "segments": np.uint16, "mask": np.uint8}
_SIDES = ("train", "heldout")
_ASIDE = ".making-"  # prefix of unfinished folders
_ELSEWHERE = "--config.data.cache_dir=DIR"  # names another folder for packed rows
_BATCH_CHARACTERS = 4_000_000  # of text tokenized at a time: bounds memory
_BLOCK = 16_000_000  # ids of records placed at a time: 5 bytes each


class Rows(NamedTuple):
    """Arrays `[N, seq_len + 1]`, memory-mapped.

    segments: 1, 2, ... within a row, 0 is padding. mask: 1 where the id carries loss as a target.
    """

    tokens: np.ndarray
    segments: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return self.tokens.shape[0]


class RowSet(NamedTuple):
    """Both sides of the split, and facts about them."""

    train: Rows
    heldout: Rows
    info: dict[str, Any]
    key: str  # SHA-256 of all text, the tokenizer and every parameter


_Files = tuple[list[Path], list[Path]]  # of training, held out


class Piece(NamedTuple):
    """Place of a part of a document: its ids `[start, start + count)`, from index `at` of a row."""

    row: int
    at: int
    segment: int
    start: int
    count: int

    def copy(
        self,
        values: Mapping[str, np.ndarray],
        row: Mapping[str, np.ndarray],
        opening_id: int | None = None,
    ) -> None:
        """Copies this part of a document's values `[n]` into the columns `[row_length]` of a row.

        The row's `segments` get the number of the segment. A continued part begins with
        `opening_id`, if given, in place of the last id before it.
        """
        place = slice(self.at, self.at + self.count)
        row["segments"][place] = self.segment
        for name, column in values.items():
            row[name][place] = column[self.start : self.start + self.count]
        if opening_id is not None and self.start:
            row["tokens"][self.at] = opening_id


class Packer:
    """Places documents in rows of `row_length` ids, one after another.

    A row ends when it is full, or after `max_segments` pieces (None: any number).
    """

    def __init__(self, row_length: int, max_segments: int | None = None):
        self._length, self._max_segments = row_length, max_segments
        self._row = self._fill = self._segment = 0

    @property
    def rows(self) -> int:
        """Rows begun so far."""
        return self._row + (self._fill > 0)

    def place(self, length: int) -> list[Piece]:
        """Places the next document, of `length` ids; no piece for one id, which has no target.

        Each piece after the first repeats the last id before it, as its first input.
        """
        pieces, start = [], 0
        while start < length - 1:
            if self._length - self._fill < 2 or self._segment == self._max_segments:
                self._row, self._fill, self._segment = self._row + 1, 0, 0
            count = min(self._length - self._fill, length - start)
            self._segment += 1
            pieces.append(Piece(self._row, self._fill, self._segment, start, count))
            self._fill += count
            start += count - 1  # the next piece repeats the last id, as its first input
        return pieces


def count_positions(segments: np.ndarray) -> np.ndarray:
    """Positions `[n]`, int32, from 0 within each segment of a row."""
    places = np.arange(len(segments), dtype=np.int32)
    starts = np.concatenate([[True], segments[1:] != segments[:-1]])
    return places - np.maximum.accumulate(np.where(starts, places, 0))


def place_whole(lengths: Sequence[int], row_length: int, max_segments: int) -> list[Piece]:
    """Places documents that must not be cut: one piece each, in the order of `lengths`.

    Best fit, longest first. None is longer than a row.
    """
    pieces: dict[int, Piece] = {}
    room: list[tuple[int, int]] = []  # ids that a row can still take, and the row; sorted
    segments: list[int] = []  # of each row
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[number]
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            left, row = row_length, len(segments)
            segments.append(0)
        else:
            left, row = room.pop(at)
        segments[row] += 1
        pieces[number] = Piece(row, row_length - left, segments[row], 0, length)
        if segments[row] < max_segments:
            bisect.insort(room, (left - length, row))
    return [pieces[number] for number in range(len(lengths))]


T = TypeVar("T")


class WholePacker(Generic[T]):
    """Gathers records that no row cuts, and places them by best fit.

    Of a record longer than a row the end is placed if `long` is `cut`, else nothing.
    """

    def __init__(self, row_length: int, max_segments: int, long: str):
        self._length, self._max_segments, self._cuts = (
            row_length,
            max_segments,
            long == LONG_RECORDS[1],
        )
        self._records: list[tuple[T, int]] = []
        self._ids = 0

    @property
    def full(self) -> bool:
        """Whether the records fill a block, which should be placed now."""
        return self._ids >= _BLOCK

    def add(self, record: T, length: int) -> int | None:
        """Adds a record of `length` ids; returns the first id that has a place, None if none."""
        first = max(length - self._length, 0)
        if length < 2 or (first and not self._cuts):
            return None
        self._records.append((record, length))
        self._ids += length - first
        return first

    def place(self, row: int) -> tuple[list[tuple[T, Piece]], int]:
        """Places all that were gathered, from `row` on; returns the number of their rows too."""
        lengths = [min(length, self._length) for _, length in self._records]
        pieces = place_whole(lengths, self._length, self._max_segments)
        placed = [
            (record, piece._replace(row=row + piece.row, start=length - piece.count))
            for (record, length), piece in zip(self._records, pieces, strict=True)
        ]
        self._records, self._ids = [], 0
        return placed, max((piece.row + 1 for piece in pieces), default=0)


class _SideWriter:
    """Packs the documents of one side, and appends each full row to the side's column files."""

    def __init__(
        self,
        folder: Path,
        row_length: int,
        max_segments: int,
        opening_id: int | None = None,
        long: str = LONG_RECORDS[0],
    ):
        folder.mkdir()
        self._opening_id = opening_id
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in COLUMNS}
        self._packer = Packer(row_length, max_segments)
        self._wholes = WholePacker[dict[str, np.ndarray]](row_length, max_segments, long)
        self._row = {name: np.zeros(row_length, dtype) for name, dtype in COLUMNS.items()}
        self._texts = 0  # rows of plain text that are written
        self.counts = dict(documents=0, records=0, tokens=0, targets=0, rows=0, long=0)
        self.forms: collections.Counter[str] = collections.Counter()  # documents by suffix
        self.long = ""  # the first record that is longer than a row
        self.marks: collections.Counter[str] = collections.Counter()  # in plain texts

    def _write_row(self) -> None:
        for name, file in self._files.items():
            file.write(self._row[name].tobytes())
            self._row[name][:] = 0
        self.counts["rows"] += 1

    def add(
        self, ids: np.ndarray, mask: np.ndarray, *, whole: bool = False, source: str = ""
    ) -> None:
        """Appends one document; one of a single id has no target and is left out."""
        values = {"tokens": ids, "mask": mask}
        if whole:
            first = self._wholes.add(values, len(ids))
            if first != 0 and len(ids) > 1:
                self.counts["long"] += 1
                self.long = self.long or source
            if first is None:
                return
            self._count(mask[first:], source)
            self.counts["records"] += 1
            if self._wholes.full:
                self._write_wholes()
            return
        pieces = self._packer.place(len(ids))
        if not pieces:
            return
        self._count(mask, source)
        for piece in pieces:
            if piece.row > self._texts:
                self._write_row()
                self._texts += 1
            piece.copy(values, self._row, self._opening_id)

    def _count(self, mask: np.ndarray, source: str) -> None:
        self.forms[find_form(Path(re.sub(r":\d+$", "", source)))] += 1
        self.counts["documents"] += 1
        self.counts["tokens"] += len(mask)
        self.counts["targets"] += int(mask[1:].sum())

    def _write_wholes(self) -> None:
        placed, rows = self._wholes.place(0)
        block = {name: np.zeros((rows, *row.shape), row.dtype) for name, row in self._row.items()}
        for values, piece in placed:
            row = {name: column[piece.row] for name, column in block.items()}
            piece.copy(values, row, self._opening_id)
        for name, file in self._files.items():
            file.write(block[name].tobytes())
        self.counts["rows"] += rows

    def finish(self) -> None:
        """Writes the last rows and the files out to the disk."""
        if self._packer.rows:
            self._write_row()
        self._write_wholes()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the files, complete or not."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # `finish` says what a disk refuses
                file.close()


class _Tokens:
    """Logs every 10 s the number of tokens, and the current text."""

    def __init__(self) -> None:
        self._tokens, self._heartbeat = 0, Heartbeat()

    def add(self, tokens: int, source: str) -> None:
        self._tokens += tokens
        self._heartbeat.say(
            "%s: %.1f million tokens of the text so far", source, self._tokens / 1e6
        )


def tokenize_documents(
    source: Iterable[Document], tokenizer: Tokenizer, end_id: int, *, parse_special: bool = False
) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:
    """Yields documents with ids (uint32) and loss mask (uint8), in order; encodes texts in batches.

    `end_id` follows each open document. Strings of special tokens become special ids in
    conversations, whose template writes them, and in plain text only with `parse_special`. A long
    text is encoded in pieces, so that temporary memory does not grow with it.
    """
    progress = _Tokens()

    def encode_long(document: Document) -> np.ndarray:
        parts = []
        for part in tokenizer.encode_pieces(
            document.text, parse_special=parse_special, source=document.source
        ):
            parts.append(part)
            progress.add(len(part), document.source)
        return np.concatenate(parts)

    def tokenize(batch: list[Document]) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:
        whole = [d.text for d in batch if d.trained is None and len(d.text) <= LONG]
        plain = iter(tokenizer.encode_batch(whole, parse_special=parse_special))
        masked = [d for d in batch if d.trained is not None and d.said is None]
        parts = iter(encode_documents(masked, tokenizer, parse_special=parse_special))
        for document in batch:
            if document.said is not None:
                ids, mask = document.said.ids, document.said.mask
            elif document.trained is not None:
                ids, offsets = next(parts)
                mask = document.loss_mask(offsets).astype(np.uint8)
                progress.add(len(ids), document.source)
            else:
                long = len(document.text) > LONG
                ids = encode_long(document) if long else np.array(next(plain), np.uint32)
                ids = tokenizer.open_array(ids)
                mask = np.ones(len(ids), np.uint8)
                progress.add(0 if long else len(ids), document.source)
            if document.open:
                ids, mask = np.append(ids, np.uint32(end_id)), np.append(mask, np.uint8(1))
            yield document, ids, mask

    for batch in _gather(source):
        yield from tokenize(batch)


def _gather(source: Iterable[Document]) -> Iterator[list[Document]]:
    """Batches of documents, each of `_BATCH_CHARACTERS` or, the last, fewer."""
    batch: list[Document] = []
    size = 0
    for document in source:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def warn_of_marks(
    name: str, marks: Mapping[str, int], tokenizer: Tokenizer, parse_special: bool
) -> None:
    """Warns of strings of special tokens in plain text, rarely what its author meant.

    `name` is the text's; `marks` counts the strings, the most frequent first.
    """
    if not marks:
        return
    shown = ", ".join(f"{mark} {count:,}" for mark, count in list(marks.items())[:4])
    kind = "special ids" if parse_special else "ordinary text"
    template = tokenizer.chat_template or ""
    advice = ""
    if any(mark in template for mark in marks):
        advice = (
            "; some are marks of the chat template: write conversations as `messages`, or set "
            "data.parse_special=True for rendered ones (evaluate: --parse-special)"
        )
    total = f"{sum(marks.values()):,}"
    _log.warning(
        "%s: plain text holds %s marks (%s), taken as %s%s", name, total, shown, kind, advice
    )


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """Settings that decide the packed rows of a run, in addition to the bytes of its text."""

    train: str  # comma-separated directories, globs and files
    heldout: str  # likewise; if empty, `heldout_fraction` of the documents of `train` is held out
    tokenizer: Tokenizer
    seq_len: int
    heldout_fraction: float
    end_of_document_id: int
    max_segments: int  # documents, or parts of documents, in a row
    parse_special: bool = False  # whether plain texts get special ids for such strings
    long: str = LONG_RECORDS[0]  # what becomes of records longer than a row
    fields: str = ""  # names of the columns of records, as `data.fields`

    @property
    def named(self) -> Fields:
        """The fields of records that have other names; raises `UserError` for a wrong form."""
        return Fields.parse(self.fields)

    def find_files(self) -> _Files:
        """The files of training, and those held out; raises `MissingFileError` if there is none."""
        fields = self.named
        heldout = find_files(self.heldout, fields) if self.heldout else []
        return find_files(self.train, fields), heldout


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _is_heldout(digest: bytes, fraction: float) -> bool:
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def rows_key(settings: RowSettings, files: _Files | None = None, begun: str = "") -> str:
    """SHA-256, in hex, of all text, the tokenizer and every setting: the rows' cache folder.

    `files` are the files that the settings name, if already listed. `begun` is the key of the rows
    that a run began with: if it is an earlier version's key of this text, it stays.
    """
    files = files or settings.find_files()
    *earlier, key = _list_keys(settings, files)
    return begun if begun in earlier and not settings.fields else key


def _list_keys(settings: RowSettings, files: _Files) -> list[str]:
    """The keys of this text, the last one this version's; others are of earlier versions."""
    numbers = FORMAT, settings.seq_len, settings.end_of_document_id, settings.max_segments
    parameters = [*numbers, settings.parse_special, settings.tokenizer.content_hash]
    parameters += [] if settings.heldout else [settings.heldout_fraction]
    hashes, every = b"", [*files[0], *files[1]]
    for side in files:
        hashes += b"|"
        for path in side:  # the suffix says how a file is read
            hashes += path.suffix.lower().encode() + b"\0" + _hash_file(path)
    keys = [_hash_parameters(parameters, hashes)]
    if tables := any(map(is_table, every)):
        parameters += [RECORDS, settings.long]
        keys.append(_hash_parameters(parameters, hashes))
    if (tables and settings.fields) or any(map(is_read_anew, every)):
        forms = [find_form(path) for path in every]  # of a packed file another than its suffix
        keys.append(_hash_parameters([*parameters, FILES, settings.fields, forms], hashes))
    return keys


def _hash_parameters(parameters: list[Any], hashes: bytes) -> str:
    return hashlib.sha256(json.dumps(parameters).encode() + hashes).hexdigest()


def packed_hash(folder: Path) -> str:
    """SHA-256, in hex, of the cached rows themselves: every column file of both sides, in order.

    Raises `FileNotFoundError` for one that is not there.
    """
    digest = hashlib.sha256()
    for name in (f"{side}/{column}.bin" for side in _SIDES for column in COLUMNS):
        digest.update(name.encode() + b"\0" + _hash_file(folder / name))
    return digest.hexdigest()


def prepare_rows(settings: RowSettings, cache_dir: Path, begun: str = "") -> RowSet:
    """Returns packed rows of the text that `settings` name, from the cache if it has them.

    With `heldout` empty, `heldout_fraction` of the documents is held out, each by the hash of its
    text: copies of a document land on one side, for any order or number of the others. With
    `heldout` set, training leaves out every document that is in it. `begun` is as for `rows_key`.
    Raises `UserError` for unreadable, empty or one-sided text and for rows of an earlier version
    that are gone, `WriteError` for a full disk; all leave no files.
    """
    files = settings.find_files()
    key, row_length = rows_key(settings, files, begun), settings.seq_len + 1
    folder = cache_dir / key
    _remove_unfinished(cache_dir)
    if (rows := _open_rows(folder, row_length, key)) is not None:
        return rows
    if key == begun and key != rows_key(settings, files):
        raise UserError(
            f"{folder}: found no rows, with which this run began; expected rows of the version "
            "that began it, which read the text otherwise. Restore the folder, or choose a new "
            "--workdir: this version cuts no conversation at row ends, and reads .json as records."
        )
    with writing(folder, _ELSEWHERE):
        make_folder(cache_dir, _ELSEWHERE)
        with _make_aside(cache_dir) as aside, contextlib.ExitStack() as writing_files:
            writers = []
            for side in _SIDES:
                opening_id, long = settings.tokenizer.opening_id, settings.long
                writer = _SideWriter(
                    aside / side, row_length, settings.max_segments, opening_id, long
                )
                writing_files.callback(writer.close)
                writers.append(writer)
            left_out = _pack_sides(writers, settings, files)
            info = _check_sides(writers, settings, left_out["held out"])
            if settings.long != LONG_RECORDS[1]:
                left_out["longer than a row"] = sum(w.counts["long"] for w in writers)
            info["left_out"] = left_out
            (aside / "meta.json").write_text(json.dumps(info, indent=1))
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete one: `_open_rows` refused it
            try:
                os.replace(aside, folder)
            except OSError:
                if not folder.is_dir():  # else another process was first, with equal bytes
                    raise
    rows = _open_rows(folder, row_length, key)
    assert rows is not None, folder
    return rows


@contextlib.contextmanager
def _make_aside(cache_dir: Path) -> Iterator[Path]:
    """Yields a temporary folder for unfinished rows; its lock ends with the process."""
    aside = cache_dir / f"{_ASIDE}{secrets.token_hex(6)}"
    with locking(aside.with_suffix(LOCK), ""):
        aside.mkdir()
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _remove_unfinished(cache_dir: Path) -> None:
    """Removes unfinished folders of killed processes."""
    for aside in {left.with_suffix("") for left in cache_dir.glob(f"{_ASIDE}*")}:
        # A live process holds its lock; another user's folder can be neither locked nor removed.
        with (
            contextlib.suppress(OSError, LockedError),
            locking(aside.with_suffix(LOCK), "") as held,
        ):
            if held:
                shutil.rmtree(aside, ignore_errors=True)


def _pack_sides(writers: list[_SideWriter], settings: RowSettings, files: _Files) -> dict[str, int]:
    """Packs the documents of both sides into the writers (training, held out).

    Returns the numbers of documents that are left out: of training because they are held out, and
    for having no text.
    """
    left_out, empty = 0, list[str]()

    for side, document, ids, mask in _split_sides(settings, files, empty):
        if side is None:
            left_out += 1
            continue
        writers[side].add(ids, mask, whole=document.whole, source=document.source)
        if document.open:
            writers[side].marks.update(settings.tokenizer.count_marks(document.text))
    for writer in writers:
        writer.finish()
    return {"held out": left_out, "without text": len(empty)}


def _split_sides(
    settings: RowSettings, files: _Files, empty: list[str] | None = None
) -> Iterator[tuple[int | None, Document, np.ndarray, np.ndarray]]:
    """Yields the documents of `_split_documents` with ids and loss mask."""
    split, read = itertools.tee(_split_documents(settings, files, empty))
    tokenized = tokenize_documents(
        (document for _, document in read),
        settings.tokenizer,
        settings.end_of_document_id,
        parse_special=settings.parse_special,
    )
    for (side, document), (_, ids, mask) in zip(split, tokenized, strict=True):
        yield side, document, ids, mask


def _split_documents(
    settings: RowSettings, files: _Files, empty: list[str] | None = None
) -> Iterator[tuple[int | None, Document]]:
    """Yields documents with their side: 0 training, 1 held out; None: left out of training.

    `empty` gets the places of those without text.
    """
    empty = [] if empty is None else empty
    apart: set[bytes] = set()
    for document in _read(files[1], settings, empty):
        apart.add(document.digest())
        yield 1, document
    for document in _read(files[0], settings, empty):
        digest = document.digest()
        if files[1]:
            yield None if digest in apart else 0, document
        else:
            yield int(_is_heldout(digest, settings.heldout_fraction)), document


def _read(files: list[Path], settings: RowSettings, empty: list[str]) -> Iterator[Document]:
    found: list[str] = []  # of these files alone, which `documents` names
    yield from documents(files, settings.tokenizer, settings.named, found)
    empty += found


def check_split(settings: RowSettings) -> None:
    """Raises `UserError` for text that leaves one side of `prepare_rows` empty.

    Encodes nothing, and stops once each side has a document.
    """
    counts, left_out = [0, 0], 0
    for side, _ in _split_documents(settings, settings.find_files()):
        if side is None:
            left_out += 1
            continue
        counts[side] += 1
        if all(counts):
            return
    _check_counts(counts, settings, left_out)


def locate_answers(settings: RowSettings) -> Iterator[tuple[int, Document, Piece]]:
    """Yields the place of each answer of a server in the rows of `prepare_rows`, and its side.

    Raises `UserError` for a document of another kind.
    """
    limits = settings.seq_len + 1, settings.max_segments, settings.long
    packers = [WholePacker[Document](*limits) for _ in _SIDES]
    rows = [0, 0]

    def place(side: int) -> Iterator[tuple[int, Document, Piece]]:
        placed, count = packers[side].place(rows[side])
        rows[side] += count
        return ((side, document, piece) for document, piece in placed)

    for side, document, ids, _ in _split_sides(settings, settings.find_files()):
        if document.said is None:
            raise UserError(
                f"{document.source}: found text without a teacher's log-probabilities; expected "
                "answers of a server alone, as data.train and data.heldout."
            )
        if side is None:
            continue
        packers[side].add(document, len(ids))
        if packers[side].full:
            yield from place(side)
    for side in range(len(_SIDES)):
        yield from place(side)


def count_enough(share: float) -> int:
    """The number of documents of which 99 times in 100 one is on a side that takes this share."""
    return math.ceil(math.log(0.01) / math.log1p(-share))


def _check_counts(counts: Sequence[int], settings: RowSettings, left_out: int) -> None:
    """Raises `UserError` unless each side has a document; left-out ones belong to training."""
    total = sum(counts)
    if total == 0:
        named = ", ".join(filter(None, (settings.train, settings.heldout)))
        raise UserError(f"{named}: the text is empty: no document has two tokens or more.")
    for name, count in zip(_SIDES, counts, strict=True):
        if not count:
            share = settings.heldout_fraction
            enough = count_enough(share if name == "heldout" else 1 - share)
            hint = (
                f"add documents ({enough:,} nearly always leave one; shrink: --text), name others "
                "to judge by, data.heldout (shrink: --heldout), or change "
                f"data.heldout_fraction={share:g} of a config"
            )
            if settings.heldout:
                hint = f"data.{name} holds no text, or less than two tokens a document"
            if left_out and name == "train":
                hint = "all of data.train (--text) is also in data.heldout (--heldout)"
            raise UserError(f"no document is left for {name} out of {total}: {hint}.")


def _check_sides(
    writers: list[_SideWriter], settings: RowSettings, left_out: int
) -> dict[str, Any]:
    """Counts rows, tokens and marks of both sides; raises `UserError` if one has no row."""
    counts = [writer.counts["documents"] for writer in writers]
    long = next((writer.long for writer in writers if writer.long), "")
    if long and not all(counts) and settings.long != LONG_RECORDS[1]:
        raise UserError(
            f"{long}: found a record longer than a row of {settings.seq_len + 1:,} tokens, and "
            f"none for {_SIDES[counts.index(0)]} that is shorter. Raise data.seq_len (--seq-len), "
            f"or set data.long={LONG_RECORDS[1]} of a config, which keeps the ends of long ones."
        )
    _check_counts(counts, settings, left_out)
    sides: dict[str, Any] = {}
    for name, writer in zip(_SIDES, writers, strict=True):
        counts = writer.counts
        fill = counts["tokens"] / (counts["rows"] * (settings.seq_len + 1))
        found = {"marks": dict(writer.marks.most_common()), "first_long": writer.long}
        found["forms"] = dict(writer.forms.most_common())
        sides[name] = counts | {"fill": round(fill, 4)} | found
    return sides


def _open_rows(folder: Path, row_length: int, key: str) -> RowSet | None:
    """Opens the cached rows; None if they are absent or incomplete."""
    try:
        info = json.loads((folder / "meta.json").read_text())
        train, heldout = (
            _open_side(folder / side, info[side]["rows"], row_length) for side in _SIDES
        )
    except (OSError, ValueError, KeyError):
        return None
    return RowSet(train, heldout, info, key)


def _open_side(folder: Path, rows: int, row_length: int) -> Rows:
    columns = {}
    for name, dtype in COLUMNS.items():
        path = folder / f"{name}.bin"
        if path.stat().st_size != rows * row_length * np.dtype(dtype).itemsize:
            raise ValueError(f"{path} was cut short")
        columns[name] = np.memmap(path, dtype, "r", shape=(rows, row_length))
    return Rows(**columns)
