"""The frozen teacher: where its weights live, and how its hidden states and head reach the loss."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kdjax.errors import UserError
from kdjax.formats import TensorTable
from kdjax.loading import load_params
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Apply, Compute, Params, functional, to_bits
from kdjax.tokenizer import Tokenizer

BACKENDS = ("auto", "dequant")


@dataclasses.dataclass(frozen=True)
class TeacherInfo:
    """What a provider says of itself."""

    kind: str
    vocab_size: int  # rows of the head
    resident_bytes: int  # on all devices together
    path: Path

    def __str__(self) -> str:
        return (
            f"{self.kind} teacher {self.path.name}: {self.resident_bytes / 1e9:.2f} GB resident, "
            f"{self.vocab_size:,} head rows"
        )


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A provider of teacher hidden states and head: pure functions and the arrays they take.

    Logits exist only inside a chunk of the loss, so hidden states and head stay apart here.
    """

    apply: Apply
    params: Params
    info: TeacherInfo


def dequantized(table: TensorTable, spec: ArchSpec, compute: Compute, mesh: Mesh) -> Teacher:
    """Every tensor as numbers of `compute.param_dtype`, made on the device at load."""
    apply, abstract = functional(spec, compute)
    params = load_params(table, spec, abstract, mesh)
    if jax.default_backend() == "cpu":
        params = jax.tree.map(jax.jit(to_bits, donate_argnums=0), params)
    resident = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    info = TeacherInfo(
        f"dequant ({jnp.dtype(compute.param_dtype).name})",
        spec.vocab_size,
        resident,
        table.paths[0],
    )
    return Teacher(apply, params, info)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The ids that student and teacher share; the loss slices both heads to `width`."""

    width: int  # rows of the narrower head
    real: int  # ids that a token of the tokenizer reaches


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
    if not 0 < real <= student.vocab_size:
        raise UserError(
            f"the tokenizer has {real:,} tokens, but the student's head has {student.vocab_size:,} "
            "rows: the checkpoint is not the one its tokenizer belongs to."
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
