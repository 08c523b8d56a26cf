"""On-policy data: prompts in their order, answers packed as rows, rounds of them on the disk.

A round is one file, `round-00000.npz`: the columns of its rows, and a record of their inputs and of
what was measured. It is complete or absent, and its SHA-256 covers every column.
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

from kdjax.data.fields import NAMED, Fields
from kdjax.data.rows import COLUMNS, Rows, place_whole
from kdjax.data.sources import find_files
from kdjax.data.text import encode_chats, openings
from kdjax.errors import CheckError, UserError
from kdjax.formats.files import replacing
from kdjax.models.tokenizer import Tokenizer

_log = logging.getLogger("kdjax")

FORMAT = 1  # raise when a column or a field of the record changes its meaning
FOLDER = "rollouts"  # of a workdir
ROUND = "round"  # the kind of news that a round is
_NGRAM = 4  # ids: a sequence of this length that occurs again is a repetition
_RECORD = "record"  # in a round's file


class Prompt(NamedTuple):
    """Ids that the student continues, and the id that ends its answer."""

    ids: list[int]
    end: int


class Prompts:
    """An endless sequence: every prompt once, in a shuffled order, then all again."""

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        self._prompts, self._seed = prompts, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(np.asarray([len(prompt.ids), prompt.end, *prompt.ids], "<u4").tobytes())
        self.key = digest.hexdigest()  # SHA-256 of all ids

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, number: int) -> Prompt:
        epoch, at = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
            self._epoch, self._order = epoch, order
        return self._prompts[self._order[at]]


def read_prompts(
    patterns: str,
    tokenizer: Tokenizer,
    longest: int,
    seed: int,
    *,
    parse_special: bool = False,
    fields: Fields = NAMED,
) -> Prompts:
    """Reads prompts from files, named as for `data.train`, of at most `longest` ids, each once.

    `messages` are rendered with the assistant's turn opened, a `prompt` is taken as it is; longer
    ones are left out, and counted in a warning. Any other text is cut at line ends into prompts.
    Raises `UserError` if none is left.
    """
    ends: dict[tuple[int, ...], int] = {}  # of each prompt, the id that ends its answer
    too_long = 0
    found = openings(find_files(patterns, fields), tokenizer, fields)
    for opening, ids in encode_chats(found, tokenizer):
        if opening.chat:
            too_long += len(ids) > longest
            if 0 < len(ids) <= longest:
                ends[tuple(ids)] = tokenizer.end_of_turn_id
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
    if not ends:
        raise UserError(
            f"{patterns}: found {too_long} prompts of more than {longest} tokens and no other. "
            "Use shorter ones, or make room: rollout.prompt_tokens, or if it is 0 "
            "data.seq_len minus rollout.max_tokens."
        )
    if too_long:
        _log.warning("%d prompts of more than %d tokens are left out", too_long, longest)
    return Prompts([Prompt(list(ids), end) for ids, end in ends.items()], seed)


def _cut_at_lines(
    text: str, tokenizer: Tokenizer, longest: int, *, parse_special: bool
) -> Iterable[list[int]]:
    """Splits a text's ids at line ends into parts of at most `longest` ids; keeps longer lines."""
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
    """One answer of the student, with its prompt."""

    ids: np.ndarray  # uint32: prompt, answer, and the id that ends it unless it was cut off
    start: int  # of the answer in `ids`
    cut: bool
    log_probs: np.ndarray  # float32, nats, for each id of the answer without its end

    @classmethod
    def of(cls, prompt: Prompt, ids: Sequence[int], log_probs: ArrayLike, *, cut: bool) -> "Answer":
        """Joins prompt, answer `ids` and the end."""
        whole = np.asarray([*prompt.ids, *ids, *([] if cut else [prompt.end])], np.uint32)
        return cls(whole, len(prompt.ids), cut, np.asarray(log_probs, np.float32))

    @property
    def mask(self) -> np.ndarray:
        """1 where an id carries loss as a target: in the answer and at its end."""
        return (np.arange(len(self.ids)) >= self.start).astype(np.uint8)

    @property
    def own(self) -> np.ndarray:
        """The ids of the answer without its end."""
        return self.ids[self.start : self.start + len(self.log_probs)]


class Room(NamedTuple):
    """The rows that a round has to fill."""

    rows: int
    row_length: int
    max_segments: int

    def is_filled(self, answers: Sequence[Answer]) -> bool:
        """Whether these answers certainly fill the rows."""
        ids = sum(len(answer.ids) for answer in answers)
        most = self.rows * self.max_segments
        return ids >= self.rows * self.row_length or len(answers) >= most

    def pack(self, answers: Sequence[Answer], seed: Sequence[int]) -> tuple[Rows, int]:
        """Packs the first answers that fit into rows, shuffled by `seed`; returns their number too.

        No answer is cut, and a row holds several.
        """
        lengths = [len(answer.ids) for answer in answers]
        count = int(np.searchsorted(np.cumsum(lengths), self.rows * self.row_length, "right"))
        while True:
            pieces = place_whole(lengths[:count], self.row_length, self.max_segments)
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
        return Rows(**columns), count


def measure_answers(answers: Sequence[Answer]) -> dict[str, float]:
    """Measures the figures that the guards watch: a length, shares, and nats.

    `entropy` is the mean of -log p, at temperature 1, of the drawn ids: for draws at T = 1 the
    entropy. `repeated` is the share of four consecutive ids that occurred earlier in the answer.
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
    for name in COLUMNS:
        column = getattr(rows, name)
        digest.update(f"{name}{column.shape}".encode() + np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def rounds_folder(workdir: Path) -> Path:
    """The folder of a run's rounds."""
    return workdir / FOLDER


def round_path(folder: Path, number: int) -> Path:
    """The file of a round."""
    return folder / f"round-{number:05}.npz"


def write_round(path: Path, rows: Rows, record: Mapping[str, Any]) -> Round:
    """Writes a round, atomically. Raises `WriteError` for what the disk refuses."""
    whole = {"format": FORMAT, **record, "sha256": hash_columns(rows)}
    arrays: dict[str, Any] = rows._asdict()
    arrays[_RECORD] = np.frombuffer(json.dumps(whole, indent=1).encode(), np.uint8)
    with replacing(path) as file:
        np.savez(file, **arrays)
    return Round(rows, whole)


def read_round(path: Path) -> Round:
    """Reads a round; raises `CheckError` if its file is missing or was changed."""
    try:
        with path.open("rb") as file, np.load(file) as columns:
            record = json.loads(columns[_RECORD].tobytes())
            rows = Rows(*(columns[name] for name in COLUMNS))
        if record["format"] != FORMAT:
            raise CheckError(f"{path}: found format {record['format']}; expected {FORMAT}.")
        found, expected = hash_columns(rows), record["sha256"]
    except CheckError:
        raise
    except FileNotFoundError:
        raise CheckError(f"{path} is not there; expected the answers of a round.") from None
    except Exception as error:  # damaged archives raise many types
        raise CheckError(
            f"{path} cannot be read ({type(error).__name__}: {error}); expected a round's answers."
        ) from error
    if found != expected:
        raise CheckError(f"{path} has SHA-256 {found}; expected {expected}: it was changed.")
    return Round(rows, record)
