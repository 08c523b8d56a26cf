"""Two tokenizers on one text: the ids that both have, and the positions where both predict alike.

A position of the student's row is compared if a token of the teacher ends at the same byte, both
next tokens spell the same bytes, and the two ids are one of the shared pairs (arXiv:2610.08448).
All other positions are masked, each with a reason. Pure NumPy.
"""

import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kdjax.models.tokenizer import Tokenizer

# Why a position is masked; its place is -1, -2, ... in this order.
REASONS = (
    "no token of the teacher ends there",
    "the next token is cut otherwise",
    "the next token is not shared",
    "whitespace",
    "digits",
    "special tokens",
    "the end of a row",
    "bytes that are no text, or rewritten",
)
_ENDS, _NEXT, _UNSHARED, _WHITESPACE, _DIGITS, _SPECIAL, _ROOM, _UNREAD = range(-1, -9, -1)
# Tokens that say something only among all others of their sort: after "1" a tokenizer of single
# digits goes on with more, another has "123". Comparable only if both have the same tokens.
_SORTS = {_WHITESPACE: re.compile(rb"\s{2,}"), _DIGITS: re.compile(rb" ?[0-9]+")}
PREFIX = "teacher_"  # of the names of the teacher's columns in a batch
# These columns, and their types.
COLUMNS = dict.fromkeys(("tokens", "labels", "segment_ids", "positions", "places"), np.int32)
COLUMNS |= {"byte_weights": np.float32}
OWN_ROWS = "teacher_tokenizer"  # a cache's setting: its teacher read such rows, and they are there
_APART = 2**40  # between the bytes of two answers


class Reading(NamedTuple):
    """The teacher's ids of a text `[m]`, and for each id of the student `[n]` its place there.

    A place is an index of the teacher's ids, or below 0 for a reason of `REASONS`. `covers[u]` is
    the index of the student's id that spells the last byte of the teacher's id u, or -1.
    """

    ids: np.ndarray
    places: np.ndarray
    covers: np.ndarray


class Rendering(NamedTuple):
    """A record as a tokenizer reads it: text, ids, and the characters of each answer."""

    text: str
    ids: np.ndarray
    answers: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMap:
    """The teacher's id of each of the student's ids, int32 `[student.vocab_size]`; -1 for none."""

    student: Tokenizer
    teacher: Tokenizer
    teacher_ids: np.ndarray

    @property
    def shared(self) -> int:
        """Number of ids that both have."""
        return int((self.teacher_ids >= 0).sum())

    @functools.cached_property
    def complete(self) -> bool:
        """Whether each id of either side has its counterpart."""
        return self.shared == self.student.vocab_size == self.teacher.vocab_size

    @functools.cached_property
    def _masked(self) -> np.ndarray:
        """The place of a position whose next id must not be compared, by id; 0 for others."""
        masked = np.zeros(self.student.vocab_size, np.int32)
        spelled = _spell(self.student), _spell(self.teacher)
        for reason, sort in _SORTS.items():
            ours, theirs = ({x for x in side if sort.fullmatch(x)} for side in spelled)
            if ours != theirs:
                masked[[i for i, x in enumerate(spelled[0]) if sort.fullmatch(x)]] = reason
        masked[sorted(_specials(self.student))] = 0
        return masked

    @functools.cached_property
    def _is_special(self) -> np.ndarray:
        special = np.zeros(self.student.vocab_size, bool)
        special[sorted(_specials(self.student))] = True
        return special

    @functools.cached_property
    def _leads(self) -> tuple[int, int]:
        """Bytes that each tokenizer puts before a text: a space of SentencePiece's."""
        return _lead(self.student), _lead(self.teacher)

    def read_texts(self, pieces: Sequence[np.ndarray]) -> list[Reading]:
        """Reads pieces of text `[n]`, each of them one segment of a row, with the other tokenizer.

        A piece may begin and end within a word or a character, and its first id may be BOS, its
        last one the end of a text.
        """
        if self.complete:  # the teacher reads the student's own cut
            return [_read_alike(self.teacher_ids[ids]) for ids in pieces]
        parts = [self._take_text(ids) for ids in pieces]
        encoded = self.teacher.encode_batch([x.text for x in parts], parse_special=False)
        return [
            self._align_text(ids, part, theirs)
            for ids, part, theirs in zip(pieces, parts, encoded, strict=True)
        ]

    def _take_text(self, ids: np.ndarray) -> "_Text":
        """The text of a piece, and the byte of it at which each id ends; -1 where it is unknown."""
        opens = int(len(ids) > 0 and int(ids[0]) == self.student.opening_id)
        special = np.flatnonzero(self._is_special[ids[opens:]]) + opens
        stop = int(special[0]) if len(special) else len(ids)
        body = ids[opens:stop]
        spelled = _spell(self.student)
        raw = b"".join([spelled[i] for i in body.tolist()])
        lead = self._leads[0] if raw.startswith(b" ") else 0
        while lead < len(raw) and raw[lead] & 0xC0 == 0x80:  # the rest of a character
            lead += 1
        text, whole = _decode(raw[lead:])
        ends = np.full(len(ids), -1, np.int64)
        ends[:opens] = 0
        ends[opens:stop] = np.cumsum(self.student.spelled_lengths[body]) - lead
        ends[ends > len(text.encode())] = -1
        closed = whole and stop == len(ids) - 1 and bool(self.teacher_ids[ids[stop]] >= 0)
        if closed:
            ends[stop] = len(text.encode()) + 1
        return _Text(text, ends, closed, stop)

    def _align_text(self, ids: np.ndarray, part: "_Text", encoded: list[int]) -> Reading:
        data = part.text.encode()
        ends = _end_bytes(self.teacher, encoded, data)
        theirs, ends = self.teacher.open_text(encoded), ends.tolist()
        ends = [0] * (len(theirs) - len(encoded)) + ends
        if part.closed:
            theirs = [*theirs, int(self.teacher_ids[ids[part.stop]])]
            ends = [*ends, len(data) + 1]
        reading = self._align(ids, part.ends, np.array(theirs, np.int32), np.array(ends, np.int64))
        reading.places[part.ends < 0] = _UNREAD
        if part.stop < len(ids) and not part.closed:
            reading.places[max(part.stop - 1, 0) :] = _SPECIAL
        elif not part.closed:  # the text goes on: another cut may join its last token to the next
            last = reading.places >= len(theirs) - 2
            reading.places[last] = _ROOM
        return reading

    def read_record(self, ours: Rendering, theirs: Rendering) -> Reading:
        """Aligns the answers of one record that each tokenizer has in its own template."""
        ends = [
            _end_bytes(tokenizer, side.ids.tolist(), side.text.encode())
            for tokenizer, side in ((self.student, ours), (self.teacher, theirs))
        ]
        lines = [np.full(len(x), -1, np.int64) for x in ends]
        alike = len(ours.answers) == len(theirs.answers)
        texts = [side.text for side in (ours, theirs)]
        both = zip(ours.answers, theirs.answers, strict=True) if alike else ()
        for number, spans in enumerate(both):
            base = number * _APART
            bounds = [
                [len(text[:at].encode()) for at in span]
                for text, span in zip(texts, spans, strict=True)
            ]
            answers = [text[a:b].encode() for text, (a, b) in zip(texts, spans, strict=True)]
            common = _count_common(*answers)
            closing = []
            for line, end, (start, stop) in zip(lines, ends, bounds, strict=True):
                inside = (end >= start) & (end <= start + common)
                line[inside] = end[inside] - start + base
                marks = np.flatnonzero(end == stop)
                before = int(end[marks[0] - 1]) - start if len(marks) and marks[0] else -1
                closing.append((marks[:1], before))
            (mine, before), (other, as_there) = closing
            ended = len(mine) and len(other) and self._is_special[ours.ids[mine[0]]]
            if ended and before == as_there and 0 <= before <= common:
                lines[0][mine], lines[1][other] = [base + before + 1], [base + before + 1]
        return self._align(ours.ids, lines[0], theirs.ids.astype(np.int32), lines[1])

    def read_answer(self, ids: np.ndarray, begin: int, prompts: tuple[str, str]) -> Reading:
        """Aligns an answer, the ids from `begin` on; each prompt is in its model's template."""
        closed = bool(self._is_special[ids[-1]]) and len(ids) > begin
        spelled, words = _spell(self.student), ids[begin : len(ids) - closed].tolist()
        answer = _decode(b"".join([spelled[i] for i in words]))[0]
        ends = ["", ""]
        if closed and (other := int(self.teacher_ids[ids[-1]])) >= 0:
            ends = [self.student.tokens[ids[-1]], self.teacher.tokens[other]]
        sides = []
        for prompt, end, tokenizer in zip(prompts, ends, (self.student, self.teacher), strict=True):
            text = f"{prompt}{answer}{end}"
            own = ids if tokenizer is self.student else np.array(tokenizer.encode(text), np.int64)
            sides.append(Rendering(text, own, ((len(prompt), len(text)),)))
        return self.read_record(*sides)

    def _align(
        self, ids: np.ndarray, ends: np.ndarray, theirs: np.ndarray, their_ends: np.ndarray
    ) -> Reading:
        """Aligns two rows of ids by the bytes at which they end; -1 is nowhere."""
        known = np.flatnonzero(their_ends >= 0)
        line = their_ends[known]
        places = np.full(len(ids), _ENDS, np.int32)
        if len(known) and len(ids):
            at = np.searchsorted(line, ends, side="right") - 1
            meets = (at >= 0) & (line[at] == ends) & (ends >= 0)
            found = np.where(meets, known[at], 0)
            after = np.minimum(found + 1, len(theirs) - 1)
            following = np.append(ends[1:], -1)
            same = (found + 1 < len(theirs)) & (their_ends[after] == following) & (following >= 0)
            next_ids = np.append(ids[1:], 0)
            paired = self.teacher_ids[next_ids] == theirs[after]
            masked = self._masked[next_ids]
            reasons = (~same, _NEXT), (masked < 0, masked), (~paired, _UNSHARED)
            places = np.where(meets, found, places).astype(np.int32)
            taken = ~meets
            for odd, reason in reasons:
                places = np.where(odd & ~taken, reason, places).astype(np.int32)
                taken |= odd
        covers = np.full(len(theirs), -1, np.int64)
        ours = np.flatnonzero(ends >= 0)
        if len(ours):
            spot = np.searchsorted(ends[ours], their_ends, side="left")
            inside = (spot < len(ours)) & (their_ends >= 0)
            covers[inside] = ours[spot[inside]]
        return Reading(theirs, places, covers)


class _Text(NamedTuple):
    text: str
    ends: np.ndarray  # int64 [n]: bytes of the text up to and with each id
    closed: bool  # whether the last id ends the text
    stop: int  # index of the first special id after BOS


def map_tokens(student: Tokenizer, teacher: Tokenizer, rows: int) -> TokenMap:
    """Maps ids by the bytes that they spell, ends of texts and turns by role, marks by name.

    `rows` is the number of rows of the teacher's head.
    """
    ours, theirs = _ids_by_bytes(student), _ids_by_bytes(teacher)
    ids = np.full(student.vocab_size, -1, np.int32)
    for spelled, i in ours.items():
        ids[i] = theirs.get(spelled, -1)
    names = {teacher.tokens[i]: i for i in _specials(teacher) if i < teacher.vocab_size}
    for i in _specials(student):
        ids[i] = names.get(student.tokens[i], -1)
    ends = student.find_end(), teacher.find_end()
    turns = [
        x.end_of_turn_id if end is not None else None
        for x, end in zip((student, teacher), ends, strict=True)
    ]
    pairs = [ends, turns] if student.chat_template else [turns, ends]
    for mine, other in pairs:
        if mine is not None and other is not None and mine < len(ids):
            ids[ids == other] = -1
            ids[mine] = other
    ids[ids >= rows] = -1
    return TokenMap(student, teacher, ids)


def _ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The id of each spelling: of several the first that is no single byte of SentencePiece's."""
    spelled, special = _spell(tokenizer), _specials(tokenizer)
    single = {i for i, token in enumerate(tokenizer.tokens) if re.fullmatch("<0x..>", token)}
    found: dict[bytes, int] = {}
    for of_byte in (False, True):
        for i, text in enumerate(spelled):
            if text and i not in special and (i in single) == of_byte:
                found.setdefault(text, i)
    return found


def _specials(tokenizer: Tokenizer) -> set[int]:
    return {i for i in tokenizer.mark_ids if i < tokenizer.vocab_size}


def _spell(tokenizer: Tokenizer) -> list[bytes]:
    assert tokenizer.spelled is not None  # `pair` refuses others
    return tokenizer.spelled


def _lead(tokenizer: Tokenizer) -> int:
    spelled = _spell(tokenizer)
    ids = tokenizer.encode("a")
    return int(bool(ids) and b"".join(spelled[i] for i in ids).startswith(b" "))


def _count_common(one: bytes, other: bytes) -> int:
    """Number of bytes that two texts begin with alike."""
    size = min(len(one), len(other))
    sides = (np.frombuffer(x, np.uint8, size) for x in (one, other))
    differing = np.flatnonzero(np.not_equal(*sides)) if size else []
    return int(differing[0]) if len(differing) else size


def _decode(data: bytes) -> tuple[str, bool]:
    """The text up to the first byte that is none, and whether that is all of it."""
    try:
        return data.decode(), True
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), False


def _end_bytes(tokenizer: Tokenizer, ids: Sequence[int], data: bytes) -> np.ndarray:
    """The byte of a text at which each of its ids ends, int64; -1 where they spell other bytes."""
    line, sizes = np.array(ids, np.int64), tokenizer.spelled_lengths
    spelled, lead = _spell(tokenizer), _lead(tokenizer)
    # SentencePiece puts its space at the start of a text, and again after each special token.
    marks = [n + 1 for n, i in enumerate(ids) if i in tokenizer.mark_ids] if lead else []
    ends, at = np.full(len(ids), -1, np.int64), 0
    for start, stop in itertools.pairwise([0, *marks, len(ids)]):
        said, rest = b"".join([spelled[i] for i in ids[start:stop]]), data[at:]
        spaces = [len(x) - len(x.lstrip(b" ")) for x in (said, rest)]
        extra = min(max(spaces[0] - spaces[1], 0), lead)
        common = _count_common(said[extra:], rest)
        own = np.cumsum(sizes[line[start:stop]]) - extra
        ends[start:stop] = np.where(own <= common, own + at, -1)
        if common < len(said) - extra:
            break
        at += common
    return ends


def _read_alike(ids: np.ndarray) -> Reading:
    places = np.arange(len(ids), dtype=np.int32)
    return Reading(ids.astype(np.int32), places, places.astype(np.int64))


def hash_ids(ids: np.ndarray) -> bytes:
    """A key of a record's ids."""
    return hashlib.sha256(np.ascontiguousarray(ids, np.int32).tobytes()).digest()


def list_segments(tokens: np.ndarray, labels: np.ndarray, segments: np.ndarray, weights: Any):
    """Yields first and end index, and ids, of each segment of a row `[T]`; padding has none.

    A segment's last label belongs to it if it has a weight, as at the end of a full row.
    """
    edges = np.flatnonzero(np.diff(segments)) + 1
    for start, stop in zip([0, *edges], [*edges, len(segments)], strict=True):
        if segments[start] == 0:
            continue
        ids = tokens[start:stop]
        if weights[stop - 1] != 0:
            ids = np.append(ids, labels[stop - 1])
        yield int(start), int(stop), ids


def read_batch(
    tokens: TokenMap,
    batch: Mapping[str, np.ndarray],
    records: Mapping[bytes, Reading],
    prompts: Mapping[bytes, tuple[str, str]] | None = None,
) -> dict[str, np.ndarray]:
    """The teacher's columns `[B, T]` of a batch, under the names `teacher_...`.

    `records` has the readings of conversations, by `hash_ids` of the student's ids, and `prompts`
    both renderings of the prompts that answers follow; any other segment is read as text.
    `teacher_places` is as in `Reading`; `teacher_byte_weights` weigh the teacher's own positions so
    that its cross-entropies add up over the bytes that are trained.
    """
    count, length = batch["tokens"].shape
    segments = [
        (row, *segment)
        for row in range(count)
        for segment in list_segments(
            *(np.asarray(batch[x][row]) for x in ("tokens", "labels", "segment_ids", "weights"))
        )
    ]
    readings: list[Any] = [records.get(hash_ids(ids)) if records else None for *_, ids in segments]
    for n, (row, start, stop, ids) in enumerate(segments if prompts else ()):
        trained = np.flatnonzero(np.asarray(batch["weights"][row, start:stop]))
        begin = int(trained[0]) + 1 if len(trained) else len(ids)
        if readings[n] is None and (both := (prompts or {}).get(hash_ids(ids[:begin]))):
            readings[n] = tokens.read_answer(ids, begin, both)
    texts = [n for n, reading in enumerate(readings) if reading is None]
    read = tokens.read_texts([segments[n][-1] for n in texts])
    for n, reading in zip(texts, read, strict=True):
        readings[n] = reading
    columns: dict[str, Any] = {n: np.zeros((count, length), x) for n, x in COLUMNS.items()}
    columns["places"][:] = _SPECIAL
    filled = np.zeros(count, np.int64)
    for (row, start, stop, _), reading in zip(segments, readings, strict=True):
        filled[row] = _write_segment(columns, batch, row, start, stop, reading, int(filled[row]))
    _balance(columns, batch, tokens)
    return {f"{PREFIX}{name}": column for name, column in columns.items()}


def _write_segment(
    columns: dict[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
    row: int,
    start: int,
    stop: int,
    reading: Reading,
    at: int,
) -> int:
    """Writes a segment from `at` on of the teacher's row; returns where the next one begins."""
    room = columns["tokens"].shape[1] - at
    size = min(len(reading.ids), room)
    place = slice(at, at + size)
    columns["tokens"][row, place] = reading.ids[:size]
    columns["segment_ids"][row, place] = batch["segment_ids"][row, start]
    columns["positions"][row, place] = np.arange(size)
    labels = reading.ids[1 : size + 1]
    columns["labels"][row, at : at + len(labels)] = labels
    places = reading.places[: stop - start]
    moved = np.where(places >= 0, places + at, places)
    columns["places"][row, start:stop] = np.where(places >= size, _ROOM, moved)
    trained = np.asarray(batch["weights"][row, start:stop]) != 0
    covers = reading.covers[1 : size + 1]
    # The student's id at index i is the target of its position i - 1.
    targets = np.where((covers >= 1) & (covers <= stop - start), trained[covers - 1], False)
    columns["byte_weights"][row, at : at + len(covers)] = targets
    return at + size


def _balance(
    columns: dict[str, np.ndarray], batch: Mapping[str, np.ndarray], tokens: TokenMap
) -> None:
    """Scales each row's weights to the bytes of the student's targets: edges of rows differ."""
    ours, theirs = tokens.student.token_bytes, tokens.teacher.token_bytes
    assert ours is not None and theirs is not None
    wanted = (ours[np.asarray(batch["labels"])] * (np.asarray(batch["weights"]) != 0)).sum(1)
    found = (theirs[columns["labels"]] * (columns["byte_weights"] != 0)).sum(1)
    scale = np.where(found > 0, wanted / np.maximum(found, 1), 0)
    columns["byte_weights"] *= scale[:, None].astype(np.float32)


def count_places(batch: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Counts weighted positions of a batch: `compared`, and the masked ones by reason."""
    places = np.asarray(batch["teacher_places"])[np.asarray(batch["weights"]) != 0]
    counts = {"compared": int((places >= 0).sum())}
    return counts | {name: int((places == -1 - n).sum()) for n, name in enumerate(REASONS)}
