"""ULD and GOLD: other projects' losses for a teacher of another tokenizer, as kinds of teacher.

ULD (arXiv:2402.12030) sorts both models' probabilities of a position and sums their differences;
position n of the one row is compared with position n of the other. GOLD (TRL 1.16, its
`ULDLoss` with `use_extended_uld`, `uld_use_hybrid_loss` and the merge "bayesian") joins tokens to
spans that spell equal bytes, compares the ids that both have by a Jensen-Shannon divergence of
their probabilities, and sorts the others.

Letters: B rows, T positions, V and U ids of student and teacher, G spans.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kdjax.losses.chunked import HeadSpec, LossSums
from kdjax.losses.kd import cross_entropy
from kdjax.losses.shared import take_positions
from kdjax.models import alignment
from kdjax.models.alignment import TokenMap, list_segments
from kdjax.models.weights import unembed
from kdjax.training.teachers import Batch, RunningTeacher, Student
from kdjax.training.vocabulary import Reread, read_own_row

_LEAST = 1e-8  # TRL's smallest probability
# Columns `[B, T]`, int32, at the student's position that predicts a span's last token; -1 for none:
# the student's position that predicts the first, and the teacher's that predict first and last.
SPANS = "span_begin", "teacher_span_begin", "teacher_span_end"


def find_spans(tokens: TokenMap, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The spans of a batch of texts that `read_batch` has completed, as columns `SPANS`."""
    columns = {name: np.full(batch["tokens"].shape, -1, np.int32) for name in SPANS}
    for row in range(len(batch["tokens"])):
        named = ("tokens", "labels", "segment_ids", "weights")
        for start, stop, ids in list_segments(*(np.asarray(batch[x][row]) for x in named)):
            part = tokens._take_text(ids)
            segment = batch["segment_ids"][row, start]
            at = np.flatnonzero(np.asarray(batch["teacher_segment_ids"][row]) == segment)
            theirs = np.asarray(batch["teacher_tokens"][row])[at]
            data = part.text.encode()
            ends = alignment._end_bytes(tokens.teacher, theirs.tolist(), data)
            ours = np.where(part.ends <= len(data), part.ends, -1)  # the end of a text is no span
            _, mine, other = np.intersect1d(ours, ends, return_indices=True)
            meets = (ours[mine] >= 0) & (mine <= stop - start)
            mine, other = mine[meets], other[meets]
            last = start + mine[1:] - 1
            columns["span_begin"][row, last] = start + mine[:-1]
            columns["teacher_span_begin"][row, last] = at[other[:-1]]
            columns["teacher_span_end"][row, last] = at[other[1:] - 1]
    return columns


def sum_sorted(p: Float[Array, "... V"], q: Float[Array, "... U"]) -> Float[Array, "..."]:
    """Sum of differences of the sorted probabilities, the shorter side filled up with 0."""
    width = max(p.shape[-1], q.shape[-1])
    sides = [
        jnp.pad(-jnp.sort(-x, axis=-1), [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
        for x in (p, q)
    ]
    return jnp.abs(sides[0] - sides[1]).sum(-1)


def merge_spans(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    begins: Int[Array, "B G"],
    ends: Int[Array, "B G"],
) -> Float[Array, "B G V"]:
    """Probabilities of each span's last token times those of the tokens before it in the span."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    said = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
    said = jnp.maximum(said, jnp.log(_LEAST))
    before = jnp.cumsum(said, axis=1) - said  # of all positions before
    first, last = (take_positions(before, at) for at in (begins, ends))
    return jnp.exp(take_positions(log_probs, ends) + (last - first)[..., None])


def compare_spans(
    p: Float[Array, "... V"], q: Float[Array, "... U"], ids: Int[np.ndarray, " V"], beta: float
) -> Float[Array, "..."]:
    """GOLD's loss of merged probabilities: the shared ids' divergence, and the others sorted.

    `ids` is the teacher's id of each of the student's, below 0 for none. The share of the teacher's
    ids that are shared weighs the first part, the rest the second.
    """
    mine = np.flatnonzero(ids >= 0)
    others = [np.setdiff1d(np.arange(p.shape[-1]), mine)]
    others.append(np.setdiff1d(np.arange(q.shape[-1]), ids[mine]))
    log_p, log_q = (jnp.log(jnp.maximum(x, _LEAST)) for x in (p[..., mine], q[..., ids[mine]]))
    mixed = jnp.logaddexp(log_p + jnp.log1p(-beta), log_q + jnp.log(beta))
    parts = ((beta, log_q), (1 - beta, log_p))
    matched = sum(share * jnp.exp(x) * (x - mixed) for share, x in parts)
    weight = len(mine) / q.shape[-1]
    loss = weight * jnp.sum(matched, axis=-1)
    if not all(map(len, others)):  # as TRL, which then leaves them out
        return loss
    return loss + (1 - weight) * sum_sorted(p[..., others[0]], q[..., others[1]])


@dataclasses.dataclass(frozen=True)
class PeerLoss(Reread):
    """A teacher of another tokenizer under one of these losses; all logits exist at once.

    The divergence is the mean over compared positions, or spans, of a batch; the cross-entropy has
    the weight alpha everywhere.
    """

    name: ClassVar[str] = "peer"

    def compare(
        self, logits: Array, said: Array, batch: Batch, teacher_ids: np.ndarray
    ) -> tuple[Array, Array]:
        """Differences `[B, T]` at the student's positions, and 1 where there is one, else 0."""
        raise NotImplementedError

    def sum_loss(
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> LossSums:
        hidden, head = student
        theirs, their_head = self.kind.read_outputs(teacher, read_own_row(batch))
        logits = unembed(hidden, head[: spec.real_vocab].astype(hidden.dtype))
        said = unembed(theirs, their_head[: self.ids.teacher_real])
        ids = np.array(self.ids.teacher_ids[: spec.real_vocab])
        values, counts = self.compare(logits, said, batch, ids)
        counts = counts * (batch["weights"] != 0)
        ce = jnp.sum(batch["weights"] * cross_entropy(logits, batch["labels"]))
        share = jnp.sum(batch["weights"] != 0) / jnp.maximum(counts.sum(), 1)
        divergence = share * jnp.sum(jnp.where(counts != 0, values, 0))
        return LossSums(spec.loss.combine(ce, divergence), ce, divergence)


class Uld(PeerLoss):
    """ULD: position n of a text with position n, all ids sorted."""

    def compare(self, logits: Array, said: Array, batch: Batch, teacher_ids: np.ndarray) -> Any:
        ours, theirs = batch["segment_ids"], batch["teacher_segment_ids"]
        at = jnp.broadcast_to(jnp.arange(ours.shape[1]), ours.shape)
        within, begins = at - _find_begins(ours, ours), _find_begins(theirs, ours)
        places = jnp.minimum(begins + within, ours.shape[1] - 1)
        after = jnp.minimum(places + 1, ours.shape[1] - 1)  # a position that predicts a token
        same = (jnp.take_along_axis(theirs, after, axis=1) == ours) & (after > places)
        q = jax.nn.softmax(take_positions(said, places), axis=-1)
        return sum_sorted(jax.nn.softmax(logits, axis=-1), q), same.astype(jnp.float32)


def _find_begins(row: Int[Array, "B U"], segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The first place in `row` of each position's segment."""
    return jnp.argmax(row[:, None] == segments[..., None], axis=-1)


class Gold(PeerLoss):
    """GOLD: spans of equal bytes; shared ids by JSD, the others sorted."""

    def compare(self, logits: Array, said: Array, batch: Batch, teacher_ids: np.ndarray) -> Any:
        begins, their_begins, their_ends = (batch[name] for name in SPANS)
        ends = jnp.broadcast_to(jnp.arange(logits.shape[1]), begins.shape)
        p = merge_spans(logits, batch["labels"], begins, ends)
        q = merge_spans(said, batch["teacher_labels"], their_begins, their_ends)
        return compare_spans(p, q, teacher_ids, 0.5), (begins >= 0).astype(jnp.float32)


PEERS = {"uld": Uld, "gold": Gold}
