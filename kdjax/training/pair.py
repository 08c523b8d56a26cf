"""Two checkpoints, proven to fit: one vocabulary, rows within both contexts, different weights."""

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from kdjax.config import SELF, Config, split_layers
from kdjax.errors import UserError
from kdjax.formats.blocks import decode
from kdjax.models.checkpoint import Checkpoint, cut_layers, drop_block, open_checkpoint, tie_head
from kdjax.models.drafts import warn_if_refused
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from kdjax.training.forms import form_of
from kdjax.training.vocabulary import Vocabulary, own_vocabulary, share_tokens

_log = logging.getLogger("kdjax")
# The end of each error about a teacher that teaches nothing.
HOW_TO_ALLOW = "set --config.teacher.allow_degenerate=True or KDJAX_ALLOW_DEGENERATE_KD=1."
_TEACHES_NOTHING = (
    "the KL would start at 0 and the teacher teach nothing. Use two different models, round the "
    "student (quantize), or, if this is meant,"
)
_CUT_DIFFERENTLY = "A text would be cut differently: choose models of one tokenizer."


@dataclasses.dataclass(frozen=True)
class Pair:
    """A student and its teacher, if there is one: headers read, nothing loaded."""

    teacher: Checkpoint | None
    student: Checkpoint
    tokenizer: Tokenizer
    vocabulary: Vocabulary


def open_pair(config: Config, *, whole: bool = True) -> Pair:
    """Opens both checkpoints and compares their vocabularies, contexts and contents.

    Reads headers, and tensors only until they differ; with `whole=False` files may end after
    their headers. Raises `UserError` for a pair that cannot be distilled, or that would
    teach nothing.
    """
    path, form = config.teacher.path, form_of(config.student)
    student = open_student(config, whole=whole)
    if path == SELF:
        teacher: Checkpoint | None = form.find_start(student)
    else:
        teacher = open_checkpoint(path, whole=whole) if path else None
    teacher = teacher and drop_block(teacher)
    for name, checkpoint in (("teacher", teacher), ("student", student)):
        if checkpoint and config.data.seq_len > checkpoint.spec.max_positions:
            raise UserError(
                f"data.seq_len={config.data.seq_len} exceeds the {name}'s context of "
                f"{checkpoint.spec.max_positions} positions. Lower data.seq_len (--seq-len)."
            )
    plain = config.student.init == "checkpoint" and not form.differs
    if teacher and plain and same_weights(teacher, student):
        _refuse_degenerate(teacher, student, allowed=config.teacher.allow_degenerate)
    teacher = teacher and teacher.fall_back(config.data.tokenizer)
    drafts = config.student.layers or "total_variation" in config.loss.divergence
    if teacher and drafts:
        warn_if_refused(teacher, student)
    tokenizer = student.tokenizer
    rows, real = student.spec.vocab_size, tokenizer.vocab_size
    if teacher is None:
        vocabulary = own_vocabulary(rows, real)
    else:
        sizes = rows, teacher.spec.vocab_size
        vocabulary = choose_vocabulary(*sizes, tokenizer, teacher.tokenizer, config.loss.vocabulary)
    return Pair(teacher, student, tokenizer, vocabulary)


def open_student(config: Config, *, whole: bool = True) -> Checkpoint:
    """Opens the student, or with `student.init=random` its shapes; ties its head by `student.head`.

    `student.layers` selects its layers.
    With "auto" it is tied as the stored matrices are; a folder of shapes alone is believed. Its
    tokenizer is `data.tokenizer` if that is set.
    """
    shapes = config.student.init == "random"
    tokenizer = config.data.tokenizer
    student = open_checkpoint(config.student.path, tokenizer=tokenizer, shapes=shapes, whole=whole)
    student = cut_layers(student, split_layers(config.student.layers))
    student = tie_head(student, config.student.head)
    return form_of(config.student).open(student)


def same_weights(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether two checkpoints hold equal numbers, under any names, formats and types.

    Compares tensor by tensor and stops at the first difference, so that two different models cost
    one small tensor.
    """
    # A tied head may or may not be stored a second time.
    shared = sorted(
        a.names.keys() & b.names.keys(), key=lambda path: a.table.info(a.names[path][0]).nbytes
    )
    return all(len(a.names[path]) == len(b.names[path]) for path in shared) and all(
        _same_tensor(a, x, b, y)
        for path in shared
        for x, y in zip(a.names[path], b.names[path], strict=True)
    )


def _same_tensor(a: Checkpoint, x: str, b: Checkpoint, y: str) -> bool:
    if not (a.table.holds(x) and b.table.holds(y)):
        return False
    raw = a.table.raw(x), b.table.raw(y)
    infos = a.table.info(x), b.table.info(y)
    if infos[0].shape != infos[1].shape:
        return False
    if infos[0].dtype == infos[1].dtype and np.array_equal(*raw):
        return True
    first = [np.atleast_2d(tensor)[:64] for tensor in raw]  # most differences show in 64 rows
    return all(
        np.array_equal(decode(one, infos[0].dtype), decode(other, infos[1].dtype))
        for one, other in (first, raw)
    )


def refuse_same(teacher: Model, student: Model) -> None:
    """Raises `UserError` for a student that is its teacher, or was loaded from the same weights."""
    files = teacher.checkpoint, student.checkpoint
    both = all(x is not None and len(x.table) for x in files)
    if teacher.params is student.params or (both and same_weights(*files)):  # type: ignore[arg-type]
        raise UserError(
            f"{teacher.source} (teacher) and {student.source} (student) hold the same weights: "
            f"{_TEACHES_NOTHING} as for a student whose parameters were replaced since, "
            "make_step(..., allow_degenerate=True)."
        )


def _refuse_degenerate(teacher: Checkpoint, student: Checkpoint, *, allowed: bool) -> None:
    paths = f"{teacher.table.paths[0]} (teacher) and {student.table.paths[0]} (student)"
    if allowed:
        _log.warning("%s hold the same weights: the KL starts at 0", paths)
        return
    raise UserError(
        f"{paths} hold the same weights, whatever their names: {_TEACHES_NOTHING} {HOW_TO_ALLOW}"
    )


def share_vocabulary(student: Model, teacher: Model | None, asked: str = "auto") -> Vocabulary:
    """Finds the ids that two loaded models share, by their tokenizers if both have one.

    `asked` is as for `choose_vocabulary`: two tokenizers may share a part of their ids. Without
    tokenizers their heads must have equally many rows, else `UserError`.
    """
    tokenizer = student.tokenizer
    if teacher is None:
        real = tokenizer.vocab_size if tokenizer else student.vocab_size
        return own_vocabulary(student.vocab_size, real)
    if tokenizer and teacher.tokenizer:
        sizes = student.vocab_size, teacher.vocab_size
        return choose_vocabulary(*sizes, tokenizer, teacher.tokenizer, asked)
    if student.vocab_size != teacher.vocab_size:
        raise UserError(
            f"found heads of {student.vocab_size:,} rows (student) and {teacher.vocab_size:,} "
            "(teacher) and not both tokenizers; expected tokenizers, to prove that ids have "
            "one meaning, or heads of equally many rows."
        )
    known = tokenizer or teacher.tokenizer
    return own_vocabulary(student.vocab_size, known.vocab_size if known else student.vocab_size)


def choose_vocabulary(
    student_rows: int,
    teacher_rows: int,
    student: Tokenizer,
    teacher: Tokenizer,
    asked: str = "auto",
    *,
    either: bool = False,
) -> Vocabulary:
    """Proves that two models have one vocabulary, or maps the ids of two tokenizers.

    `asked` is `loss.vocabulary`: "same" raises `UserError` if the proof fails, "auto" says so and
    maps, "shared" maps without a proof. With `either` the teacher's vocabulary may as well be the
    beginning of the student's, as where models are compared and none trains.
    """
    if asked != "shared":
        if either and (teacher_rows, teacher.vocab_size) < (student_rows, student.vocab_size):
            with contextlib.suppress(_Differ):  # its message would name the other side
                return align(teacher_rows, student_rows, teacher, student)
        try:
            return align(student_rows, teacher_rows, student, teacher)
        except _Differ as error:
            if asked == "same":
                raise
            _log.warning("two tokenizers: %s. The loss compares what both have", error.found)
    return share_tokens(student, teacher, student_rows, teacher_rows)


class _Differ(UserError):
    """An error of two tokenizers that differ: `found` says how, the message also what helps."""

    def __init__(self, found: str, remedy: str):
        super().__init__(f"{found}. {remedy}")
        self.found = found


def align(
    student_rows: int, teacher_rows: int, student: Tokenizer, teacher: Tokenizer
) -> Vocabulary:
    """Decides the shared vocabulary after comparing every token, merge and added token.

    The student's vocabulary must be the beginning of the teacher's, as Qwen2.5's is of Qwen3's;
    the teacher's further ids are cut, and the log says which. Heads of one tokenizer are padded to
    different widths (Qwen2.5 7B: 152,064 rows, 0.5B: 151,936), so sizes prove
    nothing. Raises `UserError` naming the first id that differs.
    """
    real = student.vocab_size
    if teacher_rows < student_rows or teacher.vocab_size < real:
        raise _Differ(
            f"the teacher's vocabulary ({teacher.vocab_size:,} tokens, {teacher_rows:,} rows) is "
            f"smaller than the student's ({real:,} tokens, {student_rows:,} rows)",
            "The teacher must know every token the student can predict: choose a teacher of the "
            "same tokenizer family.",
        )
    _check_same(
        "id",
        student.tokens,
        teacher.tokens[:real],
        "Logits of different tokens cannot be compared: choose models of one tokenizer.",
    )
    _check_added(student, teacher)
    _check_merges(student, teacher)
    if beyond := teacher.vocab_size - real:
        special = sum(i >= real for i in teacher.added_ids)
        _log.info(
            "vocabulary: the teacher's %d tokens begin with the student's %d; cut are %d special "
            "and %d other tokens, from %r on, and %d merges",
            teacher.vocab_size,
            real,
            special,
            beyond - special,
            teacher.tokens[real],
            len(teacher.merges) - len(student.merges),
        )
    return own_vocabulary(student_rows, real, f" (the teacher's {teacher_rows:,} rows)")


def _check_added(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raises `UserError` unless both tokenizers find the same special ids before they cut text.

    Converters disagree whether some of these are special (Qwen2.5's `<|fim_prefix|>`), which
    changes no id.
    """
    shared = {i for i in teacher.added_ids if i < student.vocab_size}
    if not (differing := sorted(student.added_ids ^ shared)):
        return
    i, kinds = differing[0], ["a special token", "one that merges make"]
    ours, theirs = kinds if i in student.added_ids else kinds[::-1]
    raise _Differ(
        f"tokenizers differ in their special ids: {i} ({student.tokens[i]!r}) is {ours} to the "
        f"student, {theirs} to the teacher, one of {len(differing)} such ids",
        _CUT_DIFFERENTLY,
    )


def _check_merges(student: Tokenizer, teacher: Tokenizer) -> None:
    """Raises `UserError` unless the student's merges begin the teacher's, and suffice for its ids.

    Further merges make tokens that are cut: the student's text is the teacher's, cut finer.
    """
    ours, theirs = student.merges, teacher.merges
    shared, known = min(len(ours), len(theirs)), set(student.tokens)
    _check_same("merge", ours[:shared], theirs[:shared], _CUT_DIFFERENTLY)
    counts = f"the student has {len(ours):,}, the teacher {len(theirs):,}"
    if shared < len(ours):
        raise _Differ(
            f"tokenizers differ in their number of merges: {counts}; expected at least as many of "
            "the teacher",
            _CUT_DIFFERENTLY,
        )
    if clash := next((m for m in theirs[shared:] if m.replace(" ", "") in known), None):
        raise _Differ(
            f"tokenizers differ in their number of merges: {counts}, {clash!r} among them, which "
            "makes a token of the student",
            _CUT_DIFFERENTLY,
        )


def _check_same(name: str, ours: Sequence[str], theirs: Sequence[str], remedy: str) -> None:
    if ours == theirs:
        return
    i = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    raise _Differ(
        f"tokenizers differ at {name} {i}: the student has {ours[i]!r}, the teacher {theirs[i]!r}",
        remedy,
    )
