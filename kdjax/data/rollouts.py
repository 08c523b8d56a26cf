"""A student's own answers: prompts in their order, answers as rows, rounds of them on the disk.

A round is one file, `round-00000.npz`: the columns of its rows, and a record of what they were made
of and of what was measured. It is whole or not there, and every column has its share in a SHA-256.
"""

import collections
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kdjax.data.rows import COLUMNS, Piece, Rows, TeacherRows, place_whole
from kdjax.data.text import encode_chats, find_files, openings
from kdjax.errors import CheckError, UserError
from kdjax.formats.files import replacing
from kdjax.models.tokenizer import Tokenizer

_log = logging.getLogger("kdjax")

FORMAT = 1  # raise when a column or a field of the record changes its meaning
FOLDER = "rollouts"  # of a workdir
ROUND = "round"  # the kind of news that a round is
_NGRAM = 4  # ids: what is written a second time is a repetition
_RECORD, _TEACHER = "record", "teacher_"  # in a round's file


class Prompt(NamedTuple):
    """Ids that the student goes on from, and the id that ends its answer."""

    ids: list[int]
    end: int
    hinted: Sequence[int] = ()  # ids that the teacher goes on from; none: the student's


class HeldExercise(NamedTuple):
    """An exercise that nothing trains on: its prompt, hint included, and what judges an answer."""

    prompt: Prompt
    exercise: Mapping[str, Any]


class Prompts:
    """An endless sequence: every prompt once, in an order of its own, then all again."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, held: Sequence[HeldExercise] = ()):
        self._prompts, self._seed, self.held = prompts, seed, held
        self._epoch, self._order = -1, np.empty(0, np.int64)
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(np.asarray([len(prompt.ids), prompt.end, *prompt.ids], "<u4").tobytes())
            if prompt.hinted:
                digest.update(np.asarray([len(prompt.hinted), *prompt.hinted], "<u4").tobytes())
        self.key = digest.hexdigest()  # SHA-256 of all ids

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, number: int) -> Prompt:
        epoch, at = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
            self._epoch, self._order = epoch, order
        return self._prompts[self._order[at]]


_ROOM = "rollout.prompt_tokens, or where it is 0 data.seq_len, less rollout.max_tokens"


def read_prompts(
    patterns: str,
    tokenizer: Tokenizer,
    longest: int,
    seed: int,
    *,
    parse_special: bool = False,
    longest_hinted: int = 0,
    hold: int = 0,
) -> Prompts:
    """The prompts of files as `data.train` names them, of at most `longest` ids, each once.

    `messages` are rendered with the assistant's turn opened, a `prompt` is taken as it is; longer
    ones are left out, and counted in a warning. Any other text is cut at line ends into prompts.
    With `longest_hinted` the teacher goes on from a record's `hint` too, the first of equal
    prompts, and those that are longer then are left out as well; `hold` exercises, at most half of
    all, are no prompts but `held`. Raises `UserError` if none is left, and if no hint is where
    hints are asked for.
    """
    ends: dict[tuple[int, ...], int] = {}  # of each prompt, the id that ends its answer
    hints: dict[tuple[int, ...], list[int]] = {}
    exercises: dict[tuple[int, ...], Mapping[str, Any]] = {}
    too_long = hinted_too_long = 0
    found = openings(find_files(patterns), tokenizer)
    for opening, ids, hinted in encode_chats(found, tokenizer, hints=bool(longest_hinted)):
        if opening.chat:
            too_long += len(ids) > longest
            hinted_too_long += len(hinted) > longest_hinted
            if 0 < len(ids) <= longest and len(hinted) <= longest_hinted:
                ends[tuple(ids)] = tokenizer.eos_id
                if hinted:
                    hints.setdefault(tuple(ids), hinted)
                if hinted and opening.exercise:
                    exercises.setdefault(tuple(ids), opening.exercise)
            continue
        if opening.whole:
            ids = tokenizer.encode(opening.text, parse_special=parse_special)
            ids = tokenizer.open_text(ids)
            too_long += len(ids) > longest
            if len(ids) <= longest:
                ends[tuple(ids)] = tokenizer.end_of_text_id
            continue
        most = longest - (tokenizer.opening_id is not None)
        for ids in _cut_at_lines(opening.text, tokenizer, most, parse_special=parse_special):
            too_long += len(ids) > most
            if len(ids) <= most:
                ends[tuple(tokenizer.open_text(ids))] = tokenizer.end_of_text_id
    if longest_hinted and not hints:
        raise UserError(
            f"{patterns}: found {too_long} prompts of more than {longest} tokens, "
            f"{hinted_too_long} of more than {longest_hinted} with their hints, and no other hint; "
            "expected a `hint` beside the `messages` of a line, as `kdjax answers --hint` writes "
            f"it. Give shorter ones, or make room: {_ROOM}; rollout.hint_tokens."
        )
    if hinted_too_long:
        _log.warning(
            "%d prompts of more than %d tokens with their hints are left out",
            hinted_too_long,
            longest_hinted,
        )
    if not ends:
        raise UserError(
            f"{patterns}: found {too_long} prompts of more than {longest} tokens and no other. "
            f"Give shorter ones, or make room: {_ROOM}."
        )
    if too_long:
        _log.warning("%d prompts of more than %d tokens are left out", too_long, longest)
    prompts = {ids: Prompt(list(ids), end, hints.get(ids, ())) for ids, end in ends.items()}
    held = _choose_held(exercises, hold)
    kept = [prompt for ids, prompt in prompts.items() if ids not in held]
    return Prompts(kept, seed, [HeldExercise(prompts[ids], exercises[ids]) for ids in held])


def _choose_held(
    exercises: Mapping[tuple[int, ...], Mapping[str, Any]], count: int
) -> list[tuple[int, ...]]:
    """Prompts of so many tasks, at most half of them, by the hash of the task: all of its own."""
    tasks: dict[str, list[tuple[int, ...]]] = {}
    for ids, exercise in exercises.items():
        tasks.setdefault(json.dumps(exercise.get("prompt")), []).append(ids)
    order = sorted(tasks, key=lambda task: hashlib.sha256(task.encode()).digest())
    return [ids for task in order[: min(count, len(tasks) // 2)] for ids in tasks[task]]


def _cut_at_lines(
    text: str, tokenizer: Tokenizer, longest: int, *, parse_special: bool
) -> Iterable[list[int]]:
    """The text's ids in parts of whole lines, as many as `longest` holds; one that is longer."""
    ids, offsets = tokenizer.encode_with_offsets(text, parse_special=parse_special)
    ends = [i for i, (_, end) in enumerate(offsets, 1) if text[end - 1 : end] == "\n"]
    if ends[-1:] != [len(ids)]:  # the last line has no end
        ends.append(len(ids))
    start = 0
    for end, after in zip(ends, [*ends[1:], math.inf], strict=True):
        if after - start > longest:
            yield ids[start:end]
            start = end


class Answer(NamedTuple):
    """One answer of the student behind its prompt."""

    ids: np.ndarray  # uint32: prompt, answer, and the id that ends it unless it was cut off
    start: int  # of the answer in `ids`
    cut: bool
    log_probs: np.ndarray  # float32, nats, of each id of the answer without its end
    hinted: Sequence[int] = ()  # the teacher's prompt; none: as the student's

    @classmethod
    def of(cls, prompt: Prompt, ids: Sequence[int], log_probs: ArrayLike, *, cut: bool) -> "Answer":
        """The answer `ids`, with the prompt before it and the end behind it."""
        whole = np.asarray([*prompt.ids, *ids, *([] if cut else [prompt.end])], np.uint32)
        numbers = np.asarray(log_probs, np.float32)
        return cls(whole, len(prompt.ids), cut, numbers, prompt.hinted)

    @property
    def mask(self) -> np.ndarray:
        """1 where an id carries loss as a target: in the answer and at its end."""
        return (np.arange(len(self.ids)) >= self.start).astype(np.uint8)

    @property
    def own(self) -> np.ndarray:
        """The ids of the answer without its end."""
        return self.ids[self.start : self.start + len(self.log_probs)]

    @property
    def read(self) -> np.ndarray:
        """The ids that the teacher reads: the same answer behind its own prompt."""
        if not self.hinted:
            return self.ids
        return np.concatenate([np.asarray(self.hinted, np.uint32), self.ids[self.start :]])


class Room(NamedTuple):
    """The rows that a round is to fill."""

    rows: int
    row_length: int
    max_segments: int
    teacher_length: int = 0  # of the rows that the teacher reads; 0: it reads the student's

    def is_filled(self, answers: Sequence[Answer]) -> bool:
        """Whether these answers are surely as many as fit."""
        ids, read = (sum(map(len, texts)) for texts in self._list_texts(answers))
        most = self.rows * self.max_segments
        filled = ids >= self.rows * self.row_length or len(answers) >= most
        return filled or (self.teacher_length > 0 and read >= self.rows * self.teacher_length)

    def _list_texts(self, answers: Sequence[Answer]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Ids that student and teacher read of each."""
        return [answer.ids for answer in answers], [answer.read for answer in answers]

    def pack(self, answers: Sequence[Answer], seed: Sequence[int]) -> tuple[Rows, int]:
        """The first answers, as many as fit, in rows of an order drawn from `seed`; their number.

        Each answer is whole, and a row holds several.
        """
        texts = self._list_texts(answers)
        lengths, others = ([len(ids) for ids in one] for one in texts)
        count = int(np.searchsorted(np.cumsum(lengths), self.rows * self.row_length, "right"))
        beside = self.teacher_length
        if beside:  # so that what was written beyond it does not count
            most = np.searchsorted(np.cumsum(others), self.rows * beside, "right")
            count = min(count, int(most))
        while True:
            pieces = place_whole(
                lengths[:count],
                self.row_length,
                self.max_segments,
                (others[:count], beside) if beside else None,
            )
            over = [piece for piece in pieces if piece.row >= self.rows]
            if not over:
                break
            count -= -(-len(over) // 2)
        columns: dict[str, Any] = {
            name: np.zeros((self.rows, self.row_length), dtype) for name, dtype in COLUMNS.items()
        }
        order = np.random.default_rng(list(seed)).permutation(self.rows)
        for answer, piece in zip(answers[:count], pieces, strict=True):
            row = {name: column[order[piece.row]] for name, column in columns.items()}
            piece.copy({"tokens": answer.ids, "mask": answer.mask}, row)
        if not beside:
            return Rows(**columns), count
        moved = [piece._replace(row=int(order[piece.row])) for piece in pieces]
        return Rows(**columns, teacher=self._pack_read(answers[:count], moved)), count

    def _pack_read(self, answers: Sequence[Answer], pieces: Sequence[Piece]) -> TeacherRows:
        """The teacher's rows: in each the answers of the student's row, in the same order."""
        size = self.rows, self.teacher_length
        tokens, segments = np.zeros(size, np.uint32), np.zeros(size, np.uint16)
        places = np.zeros((self.rows, self.row_length - 1), np.int32)
        filled = np.zeros(self.rows, int)
        both = zip(answers, pieces, strict=True)
        for answer, piece in sorted(both, key=lambda pair: pair[1].segment):
            read, at = answer.read, int(filled[piece.row])
            theirs = Piece(piece.row, at, piece.segment, 0, len(read))
            row = {"tokens": tokens[piece.row], "segments": segments[piece.row]}
            theirs.copy({"tokens": read}, row)
            filled[piece.row] += len(read)
            # The id before the answer predicts its first; the last id predicts nothing.
            predicts = np.arange(answer.start - 1, len(answer.ids) - 1)
            places[piece.row, piece.at + predicts] = at + len(read) - len(answer.ids) + predicts
        return TeacherRows(tokens, segments, places)


def measure_answers(answers: Sequence[Answer]) -> dict[str, float]:
    """Measures the figures that the guards watch; all but the length are shares, or nats.

    `entropy` is the mean of -log p of the drawn ids at temperature 1: the entropy of what was drawn
    at T = 1. `repeated` is the share of four ids in a row that the same answer had before.
    """
    lengths = np.asarray([len(answer.log_probs) for answer in answers])
    again = grams = 0
    for answer in answers:
        own = answer.own.tolist()
        seen = collections.Counter(zip(*(own[i:] for i in range(_NGRAM)), strict=False))
        total = max(len(own) - _NGRAM + 1, 0)
        again, grams = again + total - len(seen), grams + total
    drawn = int(lengths.sum())
    return {
        "answers": float(len(answers)),
        "length": float(lengths.mean()),
        "cut_off": float(np.mean([answer.cut for answer in answers])),
        "entropy": float(-sum(float(a.log_probs.sum()) for a in answers) / max(drawn, 1)),
        "repeated": again / max(grams, 1),
        "distinct": len({answer.own.tobytes() for answer in answers}) / len(answers),
    }


class Round(NamedTuple):
    """The rows of a round and its record, which is JSON."""

    rows: Rows
    record: dict[str, Any]

    @property
    def sha256(self) -> str:
        """SHA-256 of the columns, in hex."""
        return self.record["sha256"]


def hash_columns(rows: Rows) -> str:
    """SHA-256, in hex, of the rows."""
    digest = hashlib.sha256()
    for name, column in _columns(rows).items():
        digest.update(f"{name}{column.shape}".encode() + np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def rounds_folder(workdir: Path, phase: int = 0) -> Path:
    """The folder of a phase's rounds."""
    return workdir / (f"{FOLDER}-{phase}" if phase else FOLDER)


def _columns(rows: Rows) -> dict[str, np.ndarray]:
    """All arrays of the rows by the names of a round's file."""
    columns = {name: getattr(rows, name) for name in COLUMNS}
    if rows.teacher is not None:
        columns |= {f"{_TEACHER}{name}": x for name, x in vars(rows.teacher).items()}
    return columns


def round_path(folder: Path, number: int) -> Path:
    """The file of a round."""
    return folder / f"round-{number:05}.npz"


def write_round(path: Path, rows: Rows, record: Mapping[str, Any]) -> Round:
    """Writes a round, whole or not at all. Raises `WriteError` for what the disk refuses."""
    whole = {"format": FORMAT, **record, "sha256": hash_columns(rows)}
    arrays: dict[str, Any] = _columns(rows)
    arrays[_RECORD] = np.frombuffer(json.dumps(whole, indent=1).encode(), np.uint8)
    with replacing(path) as file:
        np.savez(file, **arrays)
    return Round(rows, whole)


def read_round(path: Path) -> Round:
    """The round of a file; raises `CheckError` if it is not there, or not as it was written."""
    try:
        with path.open("rb") as file, np.load(file) as columns:
            record = json.loads(columns[_RECORD].tobytes())
            theirs = {n.removeprefix(_TEACHER): columns[n] for n in columns if _TEACHER in n}
            teacher = TeacherRows(**theirs) if theirs else None
            own: dict[str, Any] = {name: columns[name] for name in COLUMNS}
            rows = Rows(**own, teacher=teacher)
        if record["format"] != FORMAT:
            raise CheckError(f"{path}: found format {record['format']}; expected {FORMAT}.")
        found, expected = hash_columns(rows), record["sha256"]
    except CheckError:
        raise
    except FileNotFoundError:
        raise CheckError(f"{path} is not there; expected the answers of a round.") from None
    except Exception as error:  # what a damaged archive raises has no one type
        raise CheckError(
            f"{path} cannot be read ({type(error).__name__}: {error}); expected a round's answers."
        ) from error
    if found != expected:
        raise CheckError(f"{path} has SHA-256 {found}; expected {expected}: it was changed.")
    return Round(rows, record)
