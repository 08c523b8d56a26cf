"""A teacher of another tokenizer: the pair's vocabulary, and the kind that reads its own row."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from jaxtyping import Array

from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec, LossSums, head_loss
from kdjax.losses.shared import (
    PADDING,
    SharedEvalSums,
    SharedIds,
    SharedTeacher,
    shared_evaluation,
    take_positions,
)
from kdjax.models.alignment import (
    COLUMNS,
    OWN_ROWS,
    PREFIX,
    REASONS,
    Reading,
    Rendering,
    TokenMap,
    count_places,
    hash_ids,
    map_tokens,
    read_batch,
)
from kdjax.models.tokenizer import Tokenizer
from kdjax.training.teachers import (
    COMPARED,
    Batch,
    CachedHidden,
    Dense,
    Float8,
    Packed,
    RunningTeacher,
    Student,
    TeacherKind,
    weigh_positions,
)

_log = logging.getLogger("kdjax")
LEAST_COMPARED = 0.5  # share of positions
LEAST_MASS = 0.9  # the teacher's probability of the shared ids, at compared positions
HOW_TO_GO_ON = "set --config.loss.allow_few_shared=True."
_T = TypeVar("_T")
_READS = Dense, Packed, Float8, CachedHidden  # kinds whose hidden states are of any row
_ROW = ("tokens", "segment_ids", "positions")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The ids that student and teacher share; the loss slices both heads to `width`."""

    width: int  # rows of the narrower head
    real: int  # ids that the tokenizer has

    @property
    def teacher_width(self) -> int:
        """Rows of the teacher's head that are loaded."""
        return self.width

    def describe(self) -> str:
        """Describes the compared ids for the log."""
        return f"{self.real} ids, head width {self.width}"

    @property
    def ids(self) -> SharedIds | None:
        """The map of ids as the loss reads it; None if both models have the same ids."""
        return None

    def complete(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Adds the teacher's columns to a batch on the host."""
        return batch

    def list_columns(self, shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the columns that `complete` adds to a batch of `[B, T]`."""
        return {}

    def read_as_teacher(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Returns a batch's rows as the teacher reads them, and each position's place there."""
        return batch, None

    def adapt(self, kind: TeacherKind, extra: object) -> TeacherKind:
        """The kind with which a step reads the teacher."""
        return kind

    def refuse(self, what: object, why: str, remedy: str = "") -> None:
        """Raises `UserError` for two tokenizers and a non-empty `what`, which they exclude."""

    def narrow(self, rows: int) -> "Vocabulary":
        """The vocabulary of a student whose head has `rows` rows."""
        return own_vocabulary(min(self.width, rows), self.real)

    def make_columns(self, read: Callable[[int], dict[str, Any]]) -> Any:
        """Makes the columns that each row has for the teacher; None: none. `read` reads a row."""
        return None

    @property
    def cache_settings(self) -> dict[str, str]:
        """A cache's settings by which it knows the teacher's own rows; {} without any."""
        return {}

    def find_reader(self, teacher: _T | None) -> _T | None:
        """The teacher, if it reads the student's ids."""
        return teacher

    def count_copies(self, student: int, teacher: int) -> int:
        """Bytes of heads in another order, in a step; the arguments are bytes of a row each."""
        return 0

    def learn(self, records: Iterable[tuple[Rendering, Rendering]]) -> None:
        """Reads the conversations of a run, which each model has in its own template."""

    def learn_prompts(self, prompts: Iterable[tuple[str, str]]) -> None:
        """Reads the prompts of self-generated answers, as each model's template renders them."""

    def mark_answers(self, batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
        """Marks the first `rows` rows of a batch, which are self-generated answers."""
        return batch

    def sample(self, batches: Iterable[dict[str, Any]], *, allow_few: bool) -> None:
        """Logs which share of the batches' positions is compared, and why others are masked.

        Raises `UserError` if it is below `LEAST_COMPARED`, unless `allow_few`.
        """

    @property
    def record(self) -> dict[str, Any]:
        """Its entry in a receipt; {} for one tokenizer."""
        return {}


@dataclasses.dataclass(frozen=True)
class SharedVocabulary(Vocabulary):
    """Another tokenizer's: a map of ids, the teacher's own rows, positions that both cut alike."""

    tokens: TokenMap
    teacher_rows: int
    records: dict[bytes, Reading] = dataclasses.field(default_factory=dict)
    prompts: dict[bytes, tuple[str, str]] = dataclasses.field(default_factory=dict)
    shares: dict[str, float] = dataclasses.field(default_factory=dict)  # of sampled positions

    @property
    def teacher_width(self) -> int:
        return self.teacher_rows

    @functools.cached_property
    def ids(self) -> SharedIds:  # type: ignore[override]
        known = self.tokens.teacher_ids.tolist()[: self.width]
        known += [PADDING] * (self.width - len(known))
        return SharedIds(tuple(known), self.tokens.teacher.vocab_size)

    def describe(self) -> str:
        tokens = self.tokens
        sizes = tokens.student.vocab_size, tokens.teacher.vocab_size
        return (
            f"two tokenizers: {tokens.shared:,} ids in common of the student's {sizes[0]:,} "
            f"({tokens.shared / sizes[0]:.1%}) and the teacher's {sizes[1]:,} "
            f"({tokens.shared / sizes[1]:.1%})"
        )

    def complete(self, batch: dict[str, Any]) -> dict[str, Any]:
        if "teacher_places" in batch:
            return batch
        needed = "tokens", "labels", "segment_ids", "weights"
        if any(isinstance(batch[name], jax.Array) for name in needed):
            batch = batch | {name: np.asarray(batch[name]) for name in needed}
        return batch | read_batch(self.tokens, batch, self.records, self.prompts)

    def list_columns(self, shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            f"{PREFIX}{name}": jax.ShapeDtypeStruct(shape, dtype) for name, dtype in COLUMNS.items()
        }

    def read_as_teacher(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        whole = self.complete(batch)
        return read_own_row(whole), whole["teacher_places"]

    def adapt(self, kind: TeacherKind, extra: object) -> TeacherKind:
        known = "" if type(kind) in _READS else f"a teacher of the kind {kind.name!r}"
        one = "its predictions have ids and positions of one row"
        self.refuse(known, one, "Cache hidden states (kdjax cache --kind=hidden)")
        self.refuse(extra and "losses of layers", "hidden states of two rows do not correspond")
        return Reread(kind, self.ids)

    def refuse(self, what: object, why: str, remedy: str = "Leave that out") -> None:
        if what:
            raise UserError(
                f"found two tokenizers and {what}; expected one tokenizer for both models: {why}. "
                f"{remedy}, or choose a teacher of the student's tokenizer."
            )

    def make_columns(self, read: Callable[[int], dict[str, Any]]) -> "RowColumns":
        return RowColumns(self, read)

    @property
    def cache_settings(self) -> dict[str, str]:
        return {OWN_ROWS: self.tokens.teacher.content_hash}

    def find_reader(self, teacher: _T | None) -> _T | None:
        return None

    def count_copies(self, student: int, teacher: int) -> int:
        return self.width * student + len(self.ids.teacher_rows) * teacher

    def narrow(self, rows: int) -> "SharedVocabulary":
        own = own_vocabulary(rows, self.real)
        return dataclasses.replace(self, width=own.width)

    @property
    def record(self) -> dict[str, Any]:
        tokens = self.tokens
        sizes = {"student_ids": tokens.student.vocab_size, "teacher_ids": tokens.teacher.vocab_size}
        return {"shared_ids": tokens.shared, **sizes, "positions": dict(self.shares)}

    def learn(self, records: Iterable[tuple[Rendering, Rendering]]) -> None:
        for ours, theirs in records:
            self.records[hash_ids(ours.ids)] = self.tokens.read_record(ours, theirs)

    def learn_prompts(self, prompts: Iterable[tuple[str, str]]) -> None:
        encode = self.tokens.student.encode
        self.prompts.update({hash_ids(np.array(encode(one))): (one, two) for one, two in prompts})

    def mark_answers(self, batch: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
        # Where nothing is compared the text teaches alone: no student learns from its own.
        weights = np.ones(batch["tokens"].shape, np.float32)
        weights[:rows] = 0
        return batch | {"ce_weights": weights}

    def sample(self, batches: Iterable[dict[str, Any]], *, allow_few: bool) -> None:
        counts: dict[str, int] = dict.fromkeys(["compared", *REASONS], 0)
        for batch in batches:
            for name, count in count_places(self.complete(batch)).items():
                counts[name] += count
        total = max(sum(counts.values()), 1)
        self.shares.update({name: count / total for name, count in counts.items()})
        _log.info(
            "two tokenizers: %s. The cross-entropy weighs loss.alpha where compared, else 1",
            describe_shares(self.shares),
        )
        if self.shares["compared"] < LEAST_COMPARED and not allow_few:
            raise UserError(
                f"found two tokenizers that cut the text too differently: "
                f"{describe_shares(self.shares)}; expected {LEAST_COMPARED:.0%} or more. Choose a "
                f"teacher whose tokenizer is nearer to the student's, or {HOW_TO_GO_ON}"
            )


@dataclasses.dataclass(frozen=True)
class RowColumns:
    """The teacher's columns of each row, made by the threads that build batches."""

    vocabulary: SharedVocabulary
    read: Callable[[int], dict[str, Any]]

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Columns `[T]` of a row."""
        batch = {name: np.asarray(x)[None] for name, x in self.read(row).items()}
        whole = self.vocabulary.complete(batch)
        return {name: whole[name][0] for name in whole.keys() - batch.keys()}


@dataclasses.dataclass(frozen=True)
class Reread(TeacherKind):
    """A kind of teacher that reads the text with its own tokenizer, from columns of the batch."""

    kind: TeacherKind
    ids: SharedIds
    name: ClassVar[str] = "shared"

    @property
    def runs(self) -> bool:  # type: ignore[override]
        """Whether the kind that reads does."""
        return self.kind.runs

    def check_columns(self, batch: dict[str, Any], placed: Batch, head: HeadSpec) -> Array | None:
        return self.kind.check_columns(batch, placed, head)

    def begin_parts(
        self, teacher: RunningTeacher, batch: Batch, parts: int
    ) -> tuple[TeacherKind, Batch]:
        kind, begun = self.kind.begin_parts(teacher, read_own_row(batch), parts)
        added = {name: x for name, x in begun.items() if name not in batch}
        return dataclasses.replace(self, kind=kind), batch | added

    def make_records(
        self, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> dict[str, Array]:
        """Makes the cache's records of the teacher's own row, and adds the columns of that row."""
        own = read_own_row(batch)
        weights = (own["segment_ids"] != 0).astype(np.float32)
        columns = {name: batch[f"{PREFIX}{name}"] for name in COLUMNS}
        return self.kind.make_records(teacher, own | {"weights": weights}, spec) | columns

    def sum_loss(
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> LossSums:
        hidden, head = student
        theirs, their_head = self.kind.read_outputs(teacher, read_own_row(batch))
        places = batch["teacher_places"]
        compared = (places >= 0).astype(batch["weights"].dtype)
        return head_loss(
            hidden,
            self.ids.order_student(head),
            take_positions(theirs, places),
            self.ids.take_teacher(their_head),
            self.ids.order_labels(batch["labels"]),
            weigh_positions(batch | {COMPARED: compared}, spec.loss),
            dataclasses.replace(spec, shared=self.ids.shared),
        )

    def sum_evaluation(  # type: ignore[override]
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> SharedEvalSums:
        theirs, their_head = self.kind.read_outputs(teacher, read_own_row(batch))
        columns = (batch[f"{PREFIX}{name}"] for name in ("labels", "byte_weights", "places"))
        said = SharedTeacher(theirs, their_head, *columns)
        return shared_evaluation(*student, said, batch["labels"], batch["weights"], self.ids, spec)


def read_own_row(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with the teacher's row in the place of the student's."""
    return batch | {name: batch[f"{PREFIX}{name}"] for name in _ROW}


def share_tokens(
    student: Tokenizer, teacher: Tokenizer, student_rows: int, teacher_rows: int
) -> SharedVocabulary:
    """Maps the ids of two tokenizers; raises `UserError` if their tokens have no known bytes."""
    for name, tokenizer in (("student", student), ("teacher", teacher)):
        if tokenizer.spelled is None:
            raise UserError(
                f"found a tokenizer of the {name} that is neither byte-level BPE nor of "
                "SentencePiece's kind; expected one of these, or one tokenizer for both models: "
                "the bytes of its tokens are not known."
            )
    own = own_vocabulary(student_rows, student.vocab_size)
    tokens = map_tokens(student, teacher, teacher_rows)
    if not tokens.shared:
        raise UserError(
            "found no token that both tokenizers have; expected some: the teacher could teach "
            "nothing. Choose another teacher."
        )
    return SharedVocabulary(own.width, own.real, tokens, teacher_rows)


def own_vocabulary(rows: int, real: int, beside: str = "") -> Vocabulary:
    """Returns the student's full vocabulary; raises `UserError` if its head has too few rows.

    The message says `beside` after the student's rows.
    """
    if not 0 < real <= rows:
        raise UserError(
            f"the tokenizer has {real:,} tokens, but the student's head has {rows:,} "
            f"rows{beside}: the model is not the one its tokenizer belongs to."
        )
    return Vocabulary(rows, real)


def describe_shares(shares: Mapping[str, float]) -> str:
    """Says which share of positions is compared, and why others are masked."""
    masked = sorted(((x, name) for name, x in shares.items() if name != "compared"), reverse=True)
    why = ", ".join(f"{share:.1%} {name}" for share, name in masked if share >= 5e-4)
    return f"{shares['compared']:.1%} of positions are compared" + (
        f"; masked: {why}" if why else ""
    )
