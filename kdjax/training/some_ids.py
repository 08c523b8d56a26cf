"""A student whose head has some of the teacher's ids alone: the kind that its step takes.

As in speculators (models/eagle3/core.py, `verifier_lm_head`), the student learns the teacher's
distribution normalised over the student's ids. A label that the student lacks counts nothing for
the cross-entropy. Held-out agreement and acceptance are over all ids: what the student lacks it
never proposes.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from kdjax.losses.chunked import HeadSpec, LossSums, head_loss
from kdjax.losses.positions import EvalSums, evaluate_some
from kdjax.training.teachers import KNOWN, Batch, RunningTeacher, TeacherKind, weigh_positions


@dataclasses.dataclass(frozen=True)
class OfSomeIds(TeacherKind):
    """A kind of teacher, of which a student with a head of `ids` alone, `SomeRows`, learns."""

    kind: TeacherKind
    ids: tuple[int, ...]
    name: ClassVar[str] = "some ids"

    def check_columns(self, batch: dict[str, Any], placed: Batch, head: HeadSpec) -> Array | None:
        """See `TeacherKind`."""
        return self.kind.check_columns(batch, placed, head)

    def sum_loss(
        self, student: Any, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> LossSums:
        """See `TeacherKind`."""
        hidden, head = student
        theirs, their_head = self.kind.read_outputs(teacher, batch)
        count, places = len(self.ids), head.places[batch["labels"]]
        known = (places < count).astype(batch["weights"].dtype)
        return head_loss(
            hidden,
            head.rows,
            theirs,
            their_head[jnp.asarray(self.ids)],
            jnp.minimum(places, count - 1),
            weigh_positions(batch | {KNOWN: known}, spec.loss),
            dataclasses.replace(spec, width=count, real_vocab=count),
        )

    def sum_evaluation(
        self, student: Any, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> EvalSums:
        """See `TeacherKind`."""
        theirs = self.kind.read_outputs(teacher, batch)
        columns = batch["labels"], batch["weights"]
        return evaluate_some(student, theirs, *columns, jnp.asarray(self.ids), spec)
