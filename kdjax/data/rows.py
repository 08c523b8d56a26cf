"""Fixed rows of packed documents: tokenized once, cached by content, memory-mapped.

A row holds `seq_len + 1` ids, so that inputs are `row[:-1]` and targets `row[1:]`. Documents follow
one another and are cut at the row's end; the next row then starts with the last id of the piece
before, so that every id but a document's first is a target exactly once.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdjax.data.text import Document, documents, find_files
from kdjax.errors import UserError
from kdjax.models.tokenizer import Tokenizer

FORMAT = 1  # raise when the same inputs would give other bytes
_COLUMNS = {"tokens": np.uint32, "segments": np.uint16, "mask": np.uint8}
_SIDES = ("train", "heldout")
_BATCH_CHARACTERS = 4_000_000  # of text tokenized at a time: bounds memory


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
    """Both sides of the split, and what is known of them."""

    train: Rows
    heldout: Rows
    info: dict[str, Any]
    key: str  # SHA-256 of all text, the tokenizer and every parameter


class _Packer:
    """Packs documents into rows and appends them to the column files of one side."""

    def __init__(self, folder: Path, row_length: int, max_segments: int):
        folder.mkdir()
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in _COLUMNS}
        self._length, self._max_segments = row_length, max_segments
        self.counts = dict(documents=0, tokens=0, targets=0, rows=0)
        self._reset()

    def _reset(self) -> None:
        self._row = {name: np.zeros(self._length, dtype) for name, dtype in _COLUMNS.items()}
        self._fill = self._segment = 0

    def _close_row(self) -> None:
        if self._fill:
            for name, file in self._files.items():
                file.write(self._row[name].tobytes())
            self.counts["rows"] += 1
        self._reset()

    def add(self, ids: np.ndarray, mask: np.ndarray) -> None:
        """Appends one document; one of a single id has no target and is left out."""
        if len(ids) < 2:
            return
        self.counts["documents"] += 1
        self.counts["tokens"] += len(ids)
        self.counts["targets"] += int(mask[1:].sum())
        start = 0
        while start < len(ids) - 1:
            if self._length - self._fill < 2 or self._segment == self._max_segments:
                self._close_row()
            take = min(self._length - self._fill, len(ids) - start)
            where = slice(self._fill, self._fill + take)
            self._segment += 1
            self._row["tokens"][where] = ids[start : start + take]
            self._row["segments"][where] = self._segment
            self._row["mask"][where] = mask[start : start + take]
            self._fill += take
            start += take - 1  # the next piece repeats the last id, as its first input

    def close(self) -> None:
        """Writes the last row and the files out to the disk."""
        self._close_row()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.release()

    def release(self) -> None:
        """Closes the files, whole or not."""
        for file in self._files.values():
            file.close()


def _tokenized(source: Iterable[Document], tokenizer: Tokenizer,
               end_id: int) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:  # fmt: skip
    """Documents with ids (uint32) and loss mask (uint8), in order; whole texts in batches."""

    def flush(batch: list[Document]) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:
        plain = iter(tokenizer.encode_batch([d.text for d in batch if d.trained is None]))
        for document in batch:
            if document.trained is None:
                ids, mask = next(plain), None
            else:
                ids, offsets = tokenizer.encode_with_offsets(document.text)
                mask = [any(a <= s < b for a, b in document.trained) for s, _ in offsets]
            if document.open:
                ids = [*ids, end_id]
            flags = np.ones(len(ids), np.uint8) if mask is None else np.asarray(mask, np.uint8)
            yield document, np.asarray(ids, np.uint32), flags

    batch: list[Document] = []
    size = 0
    for document in source:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield from flush(batch)
            batch, size = [], 0
    yield from flush(batch)


def _hash_files(files: list[Path], digest: Any) -> None:
    for path in files:
        digest.update(path.suffix.lower().encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())


def _is_heldout(digest: bytes, fraction: float) -> bool:
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _find_sides(train: str, heldout: str) -> tuple[list[Path], list[Path]]:
    return find_files(train), find_files(heldout) if heldout else []


def rows_key(
    train: str,
    heldout: str,
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    heldout_fraction: float,
    end_of_document_id: int,
    max_segments: int,
) -> str:
    """SHA-256, in hex, of all text, the tokenizer and every parameter: the rows' cache folder."""
    parameters = [FORMAT, seq_len, end_of_document_id, max_segments, tokenizer.content_hash]
    parameters += [] if heldout else [heldout_fraction]
    digest = hashlib.sha256(json.dumps(parameters).encode())
    for side in _find_sides(train, heldout):
        digest.update(b"|")
        _hash_files(side, digest)
    return digest.hexdigest()


def packed_hash(folder: Path) -> str:
    """SHA-256, in hex, of the cached rows themselves: every column file of both sides, in order.

    Raises `FileNotFoundError` for one that is not there.
    """
    digest = hashlib.sha256()
    for name in (f"{side}/{column}.bin" for side in _SIDES for column in _COLUMNS):
        digest.update(name.encode() + b"\0")
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def prepare_rows(
    train: str,
    heldout: str,
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    heldout_fraction: float,
    end_of_document_id: int,
    cache_dir: Path,
    max_segments: int,
) -> RowSet:
    """Rows of the text in `train` and `heldout` (comma-separated patterns), cached by content.

    With `heldout` empty, `heldout_fraction` of the documents is held out, each by the hash of its
    own text: copies of a document land on one side, whatever the order or number of the others.
    With `heldout` given, training leaves out every document that is in it. Raises `UserError` for
    unreadable, empty or one-sided text; nothing is left behind then.
    """
    key = rows_key(
        train,
        heldout,
        tokenizer=tokenizer,
        seq_len=seq_len,
        heldout_fraction=heldout_fraction,
        end_of_document_id=end_of_document_id,
        max_segments=max_segments,
    )
    files = _find_sides(train, heldout)
    final = cache_dir / key
    opened = _open(final, seq_len + 1, key)
    if opened is not None:
        return opened
    cache_dir.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".making-", dir=cache_dir))
    try:
        packers = [_Packer(aside / side, seq_len + 1, max_segments) for side in _SIDES]
        _fill(packers, files, heldout_fraction, tokenizer, end_of_document_id)
        info = _check_sides(packers, seq_len, bool(heldout))
        (aside / "meta.json").write_text(json.dumps(info, indent=1))
        shutil.rmtree(final, ignore_errors=True)  # an incomplete one; `_open` refused it
        try:
            os.replace(aside, final)
        except OSError:
            if not final.is_dir():  # else another process was first, with the same bytes
                raise
    finally:
        for packer in packers:
            packer.release()
        shutil.rmtree(aside, ignore_errors=True)
    made = _open(final, seq_len + 1, key)
    assert made is not None, final
    return made


def _fill(packers: list[_Packer], files: tuple[list[Path], list[Path]], fraction: float,
          tokenizer: Tokenizer, end_id: int) -> None:  # fmt: skip
    apart: set[bytes] = set()
    for document, ids, mask in _tokenized(documents(files[1], tokenizer), tokenizer, end_id):
        apart.add(document.digest())
        packers[1].add(ids, mask)
    for document, ids, mask in _tokenized(documents(files[0], tokenizer), tokenizer, end_id):
        digest = document.digest()
        if files[1]:
            if digest not in apart:
                packers[0].add(ids, mask)
        else:
            packers[_is_heldout(digest, fraction)].add(ids, mask)
    for packer in packers:
        packer.close()


def pack_rows(
    patterns: str,
    folder: Path,
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    end_of_document_id: int,
    max_segments: int,
) -> Rows:
    """Rows of all the text in `patterns`, made in `folder/rows`; for evaluation, not cached."""
    packer = _Packer(folder / "rows", seq_len + 1, max_segments)
    try:
        source = documents(find_files(patterns), tokenizer)
        for _, ids, mask in _tokenized(source, tokenizer, end_of_document_id):
            packer.add(ids, mask)
        packer.close()
    finally:
        packer.release()
    if not packer.counts["rows"]:
        raise UserError(f"{patterns}: the text is empty: no document has two tokens or more.")
    return _open_side(folder / "rows", packer.counts["rows"], seq_len + 1)


def _check_sides(packers: list[_Packer], seq_len: int, explicit: bool) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for name, packer in zip(_SIDES, packers, strict=True):
        counts = packer.counts
        sides[name] = dict(counts)
        if counts["rows"]:
            sides[name]["fill"] = round(counts["tokens"] / (counts["rows"] * (seq_len + 1)), 4)
            continue
        total = sum(p.counts["documents"] for p in packers)
        if total == 0:
            raise UserError("the text is empty: no document has two tokens or more.")
        hint = (
            "all of data.train is also in data.heldout" if explicit and name == "train"
            else "data.heldout holds no text" if explicit
            else "change data.heldout_fraction, add documents, or set data.heldout"
        )  # fmt: skip
        raise UserError(f"no document is left for {name} out of {total}: {hint}.")
    return sides


def _open(folder: Path, row_length: int, key: str) -> RowSet | None:
    """The cached rows, or None if they are absent or not whole."""
    try:
        info = json.loads((folder / "meta.json").read_text())
        train, heldout = (
            _open_side(folder / side, info[side]["rows"], row_length) for side in _SIDES
        )
    except (OSError, ValueError, KeyError):
        return None
    return RowSet(train, heldout, info, key)


def _open_side(folder: Path, rows: int, length: int) -> Rows:
    columns = {n: _map(folder / f"{n}.bin", t, rows, length) for n, t in _COLUMNS.items()}
    return Rows(**columns)


def _map(path: Path, dtype: Any, rows: int, length: int) -> np.ndarray:
    if path.stat().st_size != rows * length * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} was cut short")
    return np.memmap(path, dtype, "r", shape=(rows, length))
