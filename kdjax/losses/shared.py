"""Student and teacher of two vocabularies: rows of their heads, positions, held-out sums.

Once a step the rows of both heads are put in an order in which the ids that both have come first.
Then the divergence is over the first `HeadSpec.shared` columns of both sides' logits, and the
cross-entropy over all of the student's.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kdjax.losses.chunked import HeadSpec, add_sums, join_chunks, zero_unweighted
from kdjax.losses.divergences import acceptance, kl_divergence, log_softmax
from kdjax.losses.kd import cross_entropy
from kdjax.losses.positions import scan_positions


@dataclasses.dataclass(frozen=True)
class SharedIds:
    """The teacher's id of each of the student's rows, -1 for none; hashable, static under jit.

    `teacher_real` is the number of the teacher's ids; rows of its head beyond it are padding.
    """

    teacher_ids: tuple[int, ...]
    teacher_real: int

    @functools.cached_property
    def order(self) -> np.ndarray:
        """The student's rows, shared ones first, int32 `[V]`."""
        ids = np.array(self.teacher_ids)
        return np.concatenate([np.flatnonzero(ids >= 0), np.flatnonzero(ids < 0)]).astype(np.int32)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The place of each of the student's rows in `order`, int32 `[V]`."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(places), dtype=np.int32)
        return places

    @property
    def shared(self) -> int:
        """Number of ids that both have."""
        return sum(i >= 0 for i in self.teacher_ids)

    @functools.cached_property
    def teacher_rows(self) -> np.ndarray:
        """The teacher's rows in `order`, int32, filled up by any to all, or to a multiple of 128.

        To all if each id is shared, so that its logits have the student's padding.
        """
        rows = np.array(self.teacher_ids, np.int32)[self.order[: self.shared]]
        width = len(self.teacher_ids)
        size = width if self.shared == self.real else min(-(-self.shared // 128) * 128, width)
        return np.pad(rows, (0, size - len(rows)))

    @property
    def real(self) -> int:
        """Number of the student's ids that could be shared: all but padding, which ends them."""
        ids = self.teacher_ids
        return max((n + 1 for n, i in enumerate(ids) if i != PADDING), default=0)

    def order_student(self, head: Float[Array, "V D"]) -> Float[Array, "V D"]:
        """The student's head in `order`; its gradient comes back in the head's own order."""
        rows = len(self.teacher_ids)
        return _take_rows(head[:rows], tuple(self.order.tolist()), tuple(self.places.tolist()))

    def order_labels(self, labels: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Labels as rows of the ordered head."""
        return jnp.asarray(self.places)[labels]

    def take_teacher(self, head: Any) -> Any:
        """The teacher's head, numbers or `Scaled`, over the shared ids in `order`."""
        return head[jnp.asarray(self.teacher_rows)]


PADDING = -2  # in `SharedIds.teacher_ids`: a row of the student's head without a token


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _take_rows(head: Array, order: tuple[int, ...], places: tuple[int, ...]) -> Array:
    return head[jnp.asarray(order, jnp.int32)]


def _take_forward(head: Array, order: Any, places: Any) -> tuple[Array, None]:
    return _take_rows(head, order, places), None


def _take_backward(order: Any, places: tuple[int, ...], _: None, gradient: Array) -> tuple[Array]:
    return (gradient[jnp.asarray(places, jnp.int32)],)  # a scatter would add, row by row


_take_rows.defvjp(_take_forward, _take_backward)


def take_positions(values: Array, places: Int[Array, "B T"]) -> Array:
    """`values[b, places[b, t]]` of `[B, U, ...]`; any where a place is below 0."""
    at = jnp.maximum(places, 0)
    at = at.reshape(at.shape + (1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, at, axis=1)


class SharedEvalSums(NamedTuple):
    """Sums over weighted positions, float32; from `kl` to `student_mass` over compared ones."""

    student_ce: Float[Array, ""]  # over all of its ids, at all positions
    taught_ce: Float[Array, ""]  # of these the compared positions
    teacher_ce: Float[Array, ""]  # of the same bytes, over its own ids and its own cut
    divergence: Float[Array, ""]  # the trained one, at T, without T^2; 0 where masked
    kl: Float[Array, ""]  # forward, at T = 1, over shared ids
    agreement: Float[Array, ""]  # of the shared ids ranked first
    acceptance: Float[Array, ""]
    teacher_mass: Float[Array, ""]  # probability of all shared ids
    student_mass: Float[Array, ""]
    compared: Float[Array, ""]  # number of positions
    count: Float[Array, ""]


# Sums over compared positions, which are divided by their number.
OF_COMPARED = "kl", "agreement", "acceptance", "teacher_mass", "student_mass"


class SharedTeacher(NamedTuple):
    """Outputs of a teacher of another tokenizer for a batch; its row has the student's T."""

    hidden: Float[Array, "B T D"]
    head: Any  # over all of its ids
    labels: Int[Array, "B T"]
    weights: Float[Array, "B T"]
    places: Int[Array, "B T"]  # of each of the student's positions in the teacher's row


def _read_teacher(teacher: SharedTeacher, ids: SharedIds, spec: HeadSpec) -> tuple[Array, Array]:
    """Sum of the teacher's cross-entropy, and the log-sum of its logits at each position."""

    def read_chunk(total: Array, logits: Sequence[Any], label: Array, weight: Array) -> Any:
        (x,) = logits
        ce = cross_entropy(x, label)
        return total + jnp.sum(weight * jnp.where(weight != 0, ce, 0)), jax.nn.logsumexp(x, -1)

    rows = teacher.head.values.shape[0] if hasattr(teacher.head, "values") else len(teacher.head)
    chunk = max(1, spec.chunk_tokens * spec.width // rows)  # in the room of the student's logits
    own = dataclasses.replace(spec, width=rows, real_vocab=ids.teacher_real, chunk_tokens=chunk)
    start = jnp.zeros((), jnp.float32)
    states = [(teacher.hidden, teacher.head)]
    total, sums = scan_positions(
        read_chunk, start, states, teacher.labels, teacher.weights, spec=own
    )
    return total, join_chunks(sums, teacher.labels.shape[1])


def shared_evaluation(
    student_hidden: Float[Array, "B T D1"],
    student_head: Float[Array, "V1 D1"],
    teacher: SharedTeacher,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    ids: SharedIds,
    spec: HeadSpec,
) -> SharedEvalSums:
    """Held-out sums of a student against a teacher of another tokenizer."""
    teacher_ce, log_sums = _read_teacher(teacher, ids, spec)
    compared = weights * (teacher.places >= 0)
    theirs = take_positions(teacher.hidden, teacher.places)
    log_sums = take_positions(log_sums, teacher.places)
    n, temperature = ids.shared, spec.loss.temperature

    def add_chunk(sums: SharedEvalSums, logits: Sequence[Any], *columns: Array) -> Any:
        label, weight, compare, log_sum = columns
        s, t = logits
        soft = [log_softmax(x[..., :n], temperature) for x in (t, s)]
        hard = [log_softmax(x[..., :n], 1.0) for x in (t, s)]
        same = jnp.argmax(s[..., :n], axis=-1) == jnp.argmax(t[..., :n], axis=-1)
        whole = jax.nn.logsumexp(s, axis=-1)
        masses = [
            jnp.exp(jax.nn.logsumexp(x[..., :n], axis=-1) - total)
            for x, total in ((t, log_sum), (s, whole))
        ]
        one = jnp.ones_like(weight)
        zero = jnp.zeros_like(weight)
        values = spec.loss.divergence(*soft), kl_divergence(*hard), same, acceptance(*hard)
        ce = cross_entropy(s, label)
        sums = add_sums(sums, (ce, *[zero] * 9, one), weight)
        return add_sums(sums, (zero, ce, zero, *values, *masses, one, zero), compare), None

    hidden = zero_unweighted(student_hidden, weights), zero_unweighted(theirs, compared)
    zero = jnp.zeros((), jnp.float32)
    start = SharedEvalSums(zero, zero, teacher_ce, *[zero] * 8)
    states = (
        (hidden[0], ids.order_student(student_head)),
        (hidden[1], ids.take_teacher(teacher.head)),
    )
    columns = ids.order_labels(labels), weights, compared, log_sums
    return scan_positions(add_chunk, start, states, *columns, spec=spec)[0]
