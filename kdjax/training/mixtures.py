"""Several teachers of one student: a mixture of their predictions, weighted by row or overall."""

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kdjax.config import check_weights
from kdjax.errors import UserError
from kdjax.losses.chunked import HeadMixture, HeadSpec, LossSums
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import EvalSums
from kdjax.losses.topk import TopEvalSums, cached_head_loss
from kdjax.models.decoder import Params
from kdjax.training.teachers import (
    Batch,
    RunningTeacher,
    Student,
    TeacherKind,
)

# A step's teacher: its parameters, a list of them for several, or None without a model.
Arrays = Params | Sequence[Params | None] | None
WEIGHTS = "teacher_weights"  # a batch's column, of rows or of positions


def name_arrays(teacher: Arrays) -> Params:
    """Makes one tree of a step's teachers: several by their numbers, from "0".

    Raises `UserError` for anything but arrays, such as a model.
    """
    if teacher is None:
        return {}
    if isinstance(teacher, dict):
        return teacher
    parts = teacher if isinstance(teacher, list | tuple) else [teacher]
    if odd := [part for part in parts if not isinstance(part, dict | None)]:
        raise UserError(
            f"found {type(odd[0]).__name__} as a step's teacher; expected arrays: "
            "teacher.params, or for several [a.params, b.params]."
        )
    return {str(number): params or {} for number, params in enumerate(parts)}


def spread_weights(columns: dict[str, Any]) -> dict[str, Any]:
    """Repeats the teachers' weights of rows, `[B, N]`, at each position."""
    found, rows = columns.get(WEIGHTS), columns["tokens"].shape
    if found is None or found.ndim != 2 or found.shape[:1] != rows[:1]:
        return columns
    xp: Any = jnp if isinstance(found, jax.Array) else np
    return columns | {WEIGHTS: xp.broadcast_to(found[:, None], (*rows, found.shape[1]))}


class _Part(NamedTuple):
    """One of the teachers, with its own columns of the batch under their usual names."""

    kind: TeacherKind
    running: RunningTeacher
    batch: Batch


@dataclasses.dataclass(frozen=True)
class Teachers(TeacherKind):
    """Several teachers, each with its kind; `make_step(student, [a, b], loss, tx, kind=...)`.

        kind = Teachers((Dense(), TeacherInBatch(rest="tail")), weights=(0.7, 0.3))

    `weights` add up to 1; without them the batch has `teacher_weights`, `[B, N]` of rows or `[B, T,
    N]` of positions, such as 1 for the teacher of a row's domain and 0 for the others. Columns of
    the batch have the teacher's number, from 0, in their names: `teacher_1_ids`.

    The student learns the mixture of the teachers' probabilities at T = 1, softened at T like one
    teacher. Teachers known by top-k ids have no probabilities of each other's ids: if all are of
    this sort, the loss is the weighted sum of the divergences from each. Under the forward KL at
    T = 1 it has the mixture's gradient; for a row of one teacher it is that teacher's loss.

    Raises `UserError` for weights that do not add up to 1, and for teachers of both sorts.
    """

    kinds: tuple[TeacherKind, ...]
    weights: tuple[float, ...] = ()
    name: ClassVar[str] = "several"

    def __post_init__(self):
        if len(self.kinds) < 2 or len(self.weights) not in (0, len(self.kinds)):
            raise UserError(
                f"found {len(self.kinds)} teachers and {len(self.weights)} weights; expected two "
                "teachers or more, and a weight for each of them, or no weights."
            )
        if self.weights:
            check_weights(self.weights)
        if len({kind.loss is cached_head_loss for kind in self.kinds}) > 1:
            raise UserError(
                "found teachers known by top-k ids and others known by all ids; expected "
                "all of one sort: top-k ids have no mixture."
            )

    @property
    def in_batch(self) -> bool:  # type: ignore[override]
        """Whether the batch has all of the teachers."""
        return all(kind.in_batch for kind in self.kinds)

    @property
    def runs(self) -> bool:  # type: ignore[override]
        """Whether a teacher computes hidden states in every step."""
        return any(kind.runs for kind in self.kinds)

    @property
    def logit_bytes(self) -> int:  # type: ignore[override]
        """Bytes of the logits of all teachers."""
        return sum(kind.logit_bytes for kind in self.kinds)

    @property
    def _merged(self) -> bool:
        """Whether the teachers are known by top-k ids."""
        return self.kinds[0].loss is cached_head_loss

    def check_loss(self, loss: KDLoss) -> None:
        for kind in self.kinds:
            kind.check_loss(loss)

    def check_columns(self, batch: dict[str, Any], placed: Batch, head: HeadSpec) -> Array | None:
        counts = [
            kind.check_columns(self._own_columns(batch, n), self._own_columns(placed, n), head)
            for n, kind in enumerate(self.kinds)
        ]
        if not self.weights:
            counts.append(self._check_weights(batch, placed))
        known = [count for count in counts if count is not None]
        return sum(known[1:], known[0]) if known else None

    def _check_weights(self, batch: dict[str, Any], placed: Batch) -> Array | None:
        rows = tuple(batch["tokens"].shape)
        found = tuple(batch[WEIGHTS].shape) if WEIGHTS in batch else ()
        if found != (*rows, len(self.kinds)):
            raise UserError(
                f"the batch's {WEIGHTS} are {found}; expected a number for each of "
                f"{len(self.kinds)} teachers, of rows [B, {len(self.kinds)}] or of positions."
            )
        if isinstance(batch[WEIGHTS], jax.Array) or isinstance(batch["weights"], jax.Array):
            odd = _find_odd_weights(jnp, placed[WEIGHTS], placed["weights"])
            return jnp.sum(odd, dtype=jnp.int32)
        odd = _find_odd_weights(np, batch[WEIGHTS], batch["weights"])
        if odd.any():
            row, at = np.argwhere(odd)[0]
            raise UserError(
                f"the batch's {WEIGHTS}[{row}, {at}] are {batch[WEIGHTS][row, at].tolist()}; "
                "expected shares that add up to 1."
            )
        return None

    def _own_columns(self, batch: dict[str, Any], number: int) -> dict[str, Any]:
        """Selects columns for the teacher of a number: its `teacher_ids` is `teacher_0_ids`."""
        mine = f"teacher_{number}_"
        shared = {k: v for k, v in batch.items() if not k.startswith("teacher_")}
        own = {k.replace(mine, "teacher_", 1): v for k, v in batch.items() if k.startswith(mine)}
        return shared | own

    def _parts(self, teacher: RunningTeacher, batch: Batch) -> Iterator[_Part]:
        functions: Any = teacher.functions or (None,) * len(self.kinds)
        for number, kind in enumerate(self.kinds):
            running = RunningTeacher(functions[number], teacher.params.get(str(number), {}))
            yield _Part(kind, running, self._own_columns(batch, number))

    def _shares(self, batch: Batch) -> Array:
        """`[B, T, N]`."""
        if not self.weights:
            return batch[WEIGHTS].astype(jnp.float32)
        shape = *batch["tokens"].shape, len(self.weights)
        return jnp.broadcast_to(jnp.asarray(self.weights, jnp.float32)[None, None], shape)

    def begin_parts(
        self, teacher: RunningTeacher, batch: Batch, parts: int
    ) -> tuple[TeacherKind, Batch]:
        kinds = []
        for number, part in enumerate(self._parts(teacher, batch)):
            kind, own = part.kind.begin_parts(part.running, part.batch, parts)
            kinds.append(kind)
            batch = batch | {
                name.replace("teacher_", f"teacher_{number}_", 1): column
                for name, column in own.items()
                if name.startswith("teacher_")
            }
        return dataclasses.replace(self, kinds=tuple(kinds)), batch

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        outputs = [p.kind.read_outputs(p.running, p.batch) for p in self._parts(teacher, batch)]
        hidden, heads = zip(*outputs, strict=True)
        return (*hidden, self._shares(batch)), HeadMixture(heads)

    def _add(self, method: str, teacher: RunningTeacher, batch: Batch, *others: Any) -> Any:
        """Sums each teacher's loss, with positions weighted by its share."""
        shares = self._shares(batch)
        student, spec = others
        sums = []
        for number, part in enumerate(self._parts(teacher, batch)):
            weights = jnp.where(batch["weights"] != 0, batch["weights"] * shares[..., number], 0)
            weighed = part.batch | {"weights": weights}
            sums.append(getattr(part.kind, method)(student, part.running, weighed, spec))
        return functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), sums)

    def sum_loss(
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> LossSums:
        if self._merged:
            return self._add("sum_loss", teacher, batch, student, spec)
        return super().sum_loss(student, teacher, batch, spec)

    def sum_evaluation(
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> EvalSums | TopEvalSums:
        if self._merged:
            return self._add("sum_evaluation", teacher, batch, student, spec)
        return super().sum_evaluation(student, teacher, batch, spec)


def _find_odd_weights(xp: Any, shares: Any, weights: Any) -> Any:
    """Marks weighted positions `[B, T]` whose teachers' weights do not add up to 1."""
    good = (shares >= 0).all(-1) & (xp.abs(shares.sum(-1) - 1) < 1e-3)
    return ~good & (weights != 0)
