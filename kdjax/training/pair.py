"""The checkpoints of a run: opened, understood and compared, but not yet read."""

import dataclasses
import logging
import os
from typing import Any

import numpy as np

from kdjax.config import Config
from kdjax.errors import UserError
from kdjax.formats import TensorTable, open_shapes, open_table
from kdjax.formats.blocks import decode
from kdjax.models.arch import ArchSpec, spec_from_table
from kdjax.models.loading import has_tied_head, tensor_names
from kdjax.models.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger("kdjax")

DEGENERATE_VARIABLE = "KDJAX_ALLOW_DEGENERATE_KD"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The ids that student and teacher share; the loss slices both heads to `width`."""

    width: int  # rows of the narrower head
    real: int  # ids that a token of the tokenizer reaches


@dataclasses.dataclass(frozen=True)
class Sources:
    """What the headers of both checkpoints say; None for a teacher that there is not."""

    teacher: TensorTable | None
    student: TensorTable
    teacher_spec: ArchSpec | None
    student_spec: ArchSpec
    tokenizer: Tokenizer
    vocabulary: Vocabulary


def open_sources(config: Config) -> Sources:
    """Opens both checkpoints and compares their vocabularies, contexts and contents.

    Reads headers, and tensors only as far as the two agree. Raises `UserError` for a pair that
    cannot be distilled, or that would teach nothing.
    """
    teacher = open_table(config.teacher.path) if config.teacher.path else None
    fresh = config.student.init == "random"
    student = (open_shapes if fresh else open_table)(config.student.path)
    ours, theirs = student_spec(config, student), spec_from_table(teacher) if teacher else None
    for name, spec in (("teacher", theirs), ("student", ours)):
        if spec and config.data.seq_len > spec.max_positions:
            raise UserError(
                f"data.seq_len={config.data.seq_len} exceeds the {name}'s context of "
                f"{spec.max_positions} positions. Lower data.seq_len."
            )
    if teacher and config.student.init == "checkpoint" and same_weights(teacher, student):
        _refuse_degenerate(config, teacher, student)
    tokenizer = load_tokenizer(config.data.tokenizer or config.student.path)
    if theirs is None:
        vocabulary = own_vocabulary(ours, tokenizer)
    else:
        vocabulary = align(ours, theirs, tokenizer, load_tokenizer(config.teacher.path))
    return Sources(teacher, student, theirs, ours, tokenizer, vocabulary)


def student_spec(config: Config, table: TensorTable) -> ArchSpec:
    """The student's architecture, its head tied as `student.head` asks.

    With "auto" as the stored matrices are; a folder of shapes alone is believed.
    """
    spec, head = spec_from_table(table), config.student.head
    if head == "auto" and not len(table):
        return spec
    tied = has_tied_head(table) if head == "auto" else head == "tied"
    return dataclasses.replace(spec, tied=tied)


def same_weights(a: TensorTable, b: TensorTable) -> bool:
    """Whether two checkpoints hold the same numbers, whatever their names, formats and types.

    Compares tensor by tensor and stops at the first difference, so that two real models cost one
    small tensor.
    """
    ours, theirs = (tensor_names(table, spec_from_table(table)) for table in (a, b))
    # A tied head may or may not be stored a second time.
    shared = sorted(ours.keys() & theirs.keys(), key=lambda path: a.info(ours[path][0]).nbytes)
    return all(len(ours[path]) == len(theirs[path]) for path in shared) and all(
        _same_tensor(a, x, b, y)
        for path in shared
        for x, y in zip(ours[path], theirs[path], strict=True)
    )


def _same_tensor(a: TensorTable, x: str, b: TensorTable, y: str) -> bool:
    raw, kinds = (a.raw(x), b.raw(y)), (a.info(x).dtype, b.info(y).dtype)
    if a.info(x).shape != b.info(y).shape:
        return False
    if kinds[0] == kinds[1] and np.array_equal(*raw):
        return True
    first = [np.atleast_2d(r)[:64] for r in raw]  # most differences show in the first rows
    return all(
        np.array_equal(decode(one, kinds[0]), decode(other, kinds[1]))
        for one, other in (first, raw)
    )


def _refuse_degenerate(config: Config, teacher: TensorTable, student: TensorTable) -> None:
    paths = f"{teacher.paths[0]} (teacher) and {student.paths[0]} (student)"
    asked = os.environ.get(DEGENERATE_VARIABLE)
    if asked not in (None, "", "0", "1"):
        raise UserError(f"{DEGENERATE_VARIABLE}={asked!r}: must be 1 or 0.")
    if config.teacher.allow_degenerate or asked == "1":
        _log.warning("%s hold the same weights: the KL starts at 0", paths)
        return
    raise UserError(
        f"{paths} hold the same weights, whatever their names: the KL would start at 0 and the "
        "teacher teach nothing. Give two different models, or, if this is meant, set "
        f"--config.teacher.allow_degenerate=True or {DEGENERATE_VARIABLE}=1."
    )


def align(student: ArchSpec, teacher: ArchSpec, student_tokenizer: Tokenizer,
          teacher_tokenizer: Tokenizer) -> Vocabulary:  # fmt: skip
    """Decides the shared vocabulary after comparing every token, merge and special id.

    Heads of one tokenizer are padded to different widths (Qwen2.5 7B: 152,064 rows, 0.5B:
    151,936), so sizes prove nothing. Raises `UserError` naming the first id that differs.
    """
    real = student_tokenizer.vocab_size
    if teacher.vocab_size < student.vocab_size or teacher_tokenizer.vocab_size < real:
        raise UserError(
            f"the teacher's vocabulary ({teacher_tokenizer.vocab_size:,} tokens, "
            f"{teacher.vocab_size:,} rows) is smaller than the student's "
            f"({student_tokenizer.vocab_size:,} tokens, {student.vocab_size:,} rows). "
            "The teacher must know every token the student can predict: choose a teacher of the "
            "same tokenizer family."
        )
    ours, theirs = student_tokenizer.tokens, teacher_tokenizer.tokens
    for i in range(real):
        if ours[i] != theirs[i]:
            raise UserError(
                f"tokenizers differ at id {i}: the student has {ours[i]!r}, the teacher "
                f"{theirs[i]!r}. "
                "Logits of different tokens cannot be compared: choose models of one tokenizer."
            )
    _check_rest(student_tokenizer, teacher_tokenizer)
    beside = f" (the teacher's {teacher.vocab_size:,} rows)"
    return own_vocabulary(student, student_tokenizer, beside)


def own_vocabulary(student: ArchSpec, tokenizer: Tokenizer, beside: str = "") -> Vocabulary:
    """The student's own vocabulary; raises `UserError` if its head has too few rows for it.

    The message says `beside` after the student's rows.
    """
    real = tokenizer.vocab_size
    if not 0 < real <= student.vocab_size:
        raise UserError(
            f"the tokenizer has {real:,} tokens, but the student's head has {student.vocab_size:,} "
            f"rows{beside}: the checkpoint is not the one its tokenizer belongs to."
        )
    return Vocabulary(student.vocab_size, real)


def _check_rest(student: Tokenizer, teacher: Tokenizer) -> None:
    for i, (ours, theirs) in enumerate(zip(student.merges, teacher.merges, strict=False)):
        if ours != theirs:
            raise UserError(
                f"tokenizers differ at merge {i}: the student has {ours!r}, the teacher "
                f"{theirs!r}. "
                "The same text would be cut differently: choose models of one tokenizer."
            )
    specials: list[tuple[str, Any, Any]] = [
        ("special ids", sorted(student.special_ids), sorted(teacher.special_ids)),
        ("number of merges", len(student.merges), len(teacher.merges)),
    ]
    for what, ours, theirs in specials:
        if ours != theirs:
            raise UserError(
                f"tokenizers differ in their {what}: the student has {ours}, the teacher {theirs}. "
                "Choose models of one tokenizer."
            )
