"""The kinds of teacher. Each owns its bytes, its arithmetic, its loading and its part of the loss.

A kind is a frozen value, static under jit. `kinds.ask_kinds` is the one place where the config's
strings become kinds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.formats.blocks import BLOCKS
from kdjax.losses.chunked import (
    Given,
    HeadSpec,
    LossSums,
    Weighing,
    Weights,
    head_loss,
)
from kdjax.losses.kd import KDLoss, Schedules
from kdjax.losses.positions import EvalSums, head_evaluation
from kdjax.losses.topk import (
    TopEvalSums,
    TopTeacher,
    cached_head_evaluation,
    cached_head_loss,
    top_of_teacher,
)
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoder import Compute, Params, functional
from kdjax.models.model import Model, check_float8, load_model, load_unembedding, narrow_head
from kdjax.models.weights import from_bits, to_bits

Size = int | float  # bytes
# tokens, labels, segment_ids, positions: int32 [B, T]; weights: float32 [B, T]. A cached teacher
# adds its own columns, `teacher_...`.
Batch = dict[str, Array]
Student = tuple[Array, Any]  # hidden states [B, T, D] and head: [V, D], or `SomeRows`


class RunningTeacher(NamedTuple):
    """A teacher within the compiled step: its functions, and its arrays as they were passed in."""

    functions: Any  # `ModelFunctions`; None: there is no teacher; a tuple of several teachers'
    params: Params
    known: Array | None = None  # hidden states, if already computed

    def hidden(self, batch: Batch) -> Array:
        """Hidden states `[B, T, D]`."""
        if self.known is not None:
            return self.known
        assert self.functions is not None
        columns = batch["tokens"], batch["segment_ids"], batch["positions"]
        return jax.lax.stop_gradient(self.functions.hidden(self.params, *columns))

    def hidden_in_parts(self, batch: Batch, parts: int) -> Array:
        """Hidden states `[B, T, D]` of `Decoder`s, a layer at a time for all parts of a batch."""
        functions: Any = self.functions
        columns = batch["tokens"], batch["segment_ids"], batch["positions"]
        return functions.hidden_in_parts(self.params, *columns, parts)

    @property
    def head(self) -> Any:
        """`[V, D]` as stored: numbers, or float8 with scales."""
        assert self.functions is not None
        return self.functions.stored_head(self.params)


# Columns of a batch in addition to `weights`, float32 `[B, T]`: weights of a position's
# cross-entropy and of its divergence, and, for a loss with schedules, the step's temperature and
# alpha.
APART = "ce_weights", "divergence_weights"
SCHEDULED = tuple(f"loss_{name}" for name in Schedules._fields)
COMPARED = "teacher_compared"  # 1 where a teacher of another tokenizer predicts alike, else 0
KNOWN = "labels_known"  # 1 where the student's head has the label, else 0


def weigh_positions(batch: Batch, loss: Any) -> Weights:
    """Collects the loss's weights: one for each position, or several that differ by position."""
    if not {*APART, *SCHEDULED, COMPARED, KNOWN} & batch.keys():
        return batch["weights"]
    shape = batch["weights"].shape
    alpha: Any = batch.get("loss_alpha", loss.alpha)
    if (compared := batch.get(COMPARED)) is not None:  # elsewhere the text teaches alone
        alpha = jnp.where(compared != 0, alpha, 1.0)
    ce, divergence = (batch.get(name, 1.0) for name in APART)
    amounts = [alpha * ce * batch.get(KNOWN, 1.0), (1 - alpha) * divergence]
    if set(SCHEDULED) & batch.keys():
        amounts.append(batch.get("loss_temperature", loss.temperature))
    columns = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in amounts)
    weighing = Weighing(batch["weights"], *columns)
    return weighing._replace(compared=compared, known=batch.get(KNOWN))


@dataclasses.dataclass(frozen=True)
class TeacherKind:
    """How a teacher is stored and reaches the loss; this base class runs it in every step."""

    name: ClassVar[str] = ""  # as logs, plans and caches call it; of `WEIGHTS` if it runs
    runs: ClassVar[bool] = True  # whether it computes hidden states in every step
    in_batch: ClassVar[bool] = False  # whether all of it comes with the batch, without a model
    logit_bytes: ClassVar[int] = 4  # of its float32 logits, an id of a position in a chunk
    flop_rate: ClassVar[float] = 1.0  # speed of its products, relative to bf16
    resident: ClassVar[str] = ""  # what stays on the devices, as the plan says; "": numbers
    decodes: ClassVar[bool] = False  # whether layers and head are decoded when used
    extra_bytes: ClassVar[int] = 0  # added to the activations of an MLP's unit at a position
    loss: ClassVar[Callable[..., Any]] = staticmethod(head_loss)
    evaluation: ClassVar[Callable[..., Any]] = staticmethod(head_evaluation)

    def check(self, placement: Placement) -> None:
        """Raises `UserError` for devices that cannot run it."""

    def check_loss(self, loss: KDLoss) -> None:
        """Raises `UserError` for a loss that this kind cannot serve."""

    def check_columns(self, batch: dict[str, Any], placed: Batch, head: HeadSpec) -> Array | None:
        """Counts trained positions with impossible columns; None if the host has checked.

        `batch` is complete; `placed` is the batch on the devices. Raises `UserError` for columns
        that are absent or of another shape, and for impossible values in host arrays.
        """

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        """Bytes on each device, with the head cut to `width` rows."""
        raise NotImplementedError

    def flops(self, teacher: Checkpoint, width: int, seq_len: int) -> float:
        """FLOP a position of a step."""
        return teacher.spec.forward_flops(seq_len)

    def load(self, teacher: Checkpoint, width: int, compute: Compute) -> Model:
        """The teacher on the compute's placement, its head cut to `width` rows."""
        assert compute.placement is not None
        model = load_model(
            teacher,
            placement=compute.placement,
            weights=self.name,
            dtype=compute.param_dtype,
            compute_dtype=compute.dtype,
            max_segments=compute.max_segments,
        )
        return narrow_head(model, width)

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        """Runs the teacher for the loss: hidden states `[B, T, D]` and a head."""
        return teacher.hidden(batch), teacher.head

    def begin_parts(
        self, teacher: RunningTeacher, batch: Batch, parts: int
    ) -> tuple["TeacherKind", Batch]:
        """Returns the kind that computes the loss of a part, and the batch to split."""
        return self, batch

    def make_records(
        self, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> dict[str, Array]:
        """Makes a cache's records `[B, T, ...]`, by their names, of a running teacher."""
        raise NotImplementedError

    def sum_loss(
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> LossSums:
        """Sums of the loss over a batch's weighted positions."""
        compare: Any = self.loss  # custom_vjp hides what it returns
        outputs = self.read_outputs(teacher, batch)
        return compare(*student, *outputs, batch["labels"], weigh_positions(batch, spec.loss), spec)

    def sum_evaluation(
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> EvalSums | TopEvalSums:
        """Held-out sums over a batch's weighted positions."""
        outputs = self.read_outputs(teacher, batch)
        return self.evaluation(*student, *outputs, batch["labels"], batch["weights"], spec)


@dataclasses.dataclass(frozen=True)
class Dense(TeacherKind):
    """Numbers, decoded at load."""

    name: ClassVar[str] = "dense"

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        return sharding.tree_bytes(_narrow_shapes(teacher, width, dtype), mesh)


@dataclasses.dataclass(frozen=True)
class Packed(TeacherKind):
    """The file's blocks, decoded a layer at a time."""

    name: ClassVar[str] = "packed"
    resident: ClassVar[str] = "packed blocks"
    decodes: ClassVar[bool] = True

    def begin_parts(
        self, teacher: RunningTeacher, batch: Batch, parts: int
    ) -> tuple[TeacherKind, Batch]:
        """Computes hidden states of the full batch first, so that a layer is decoded once a step.

        Decoding a layer of experts takes as long as its products for 4,000 positions.
        """
        hidden = to_bits(teacher.hidden_in_parts(batch, parts))
        return CachedHidden(), batch | {"teacher_hidden": hidden}

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        spec, total = teacher.spec, 0.0
        for path, names in teacher.names.items():
            kept = width / spec.vocab_size if path == (spec.head,) else 1.0
            for info in map(teacher.table.info, names):
                if "router" in path:
                    total += 4 * math.prod(info.shape)
                elif len(info.shape) >= 2:
                    blocks = *info.shape[:-1], info.shape[-1] // BLOCKS[info.dtype].elements
                    total += kept * info.nbytes / sharding.count_shards(path, blocks, mesh)
                else:
                    total += jnp.dtype(dtype).itemsize * math.prod(info.shape)
        return total


@dataclasses.dataclass(frozen=True)
class Float8(TeacherKind):
    """float8_e4m3fn with a scale a row, multiplied as such."""

    name: ClassVar[str] = "float8"
    flop_rate: ClassVar[float] = 2.0  # data sheets give float8 twice the rate of bf16
    resident: ClassVar[str] = "float8 and scales"
    extra_bytes: ClassVar[int] = 1  # what the down projection multiplies, in float8

    def check(self, placement: Placement) -> None:
        check_float8(placement.mesh.devices.flat[0])

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        total: Size = 0
        for path, leaf in sharding.named_leaves(_narrow_shapes(teacher, width, dtype)):
            itemsize = leaf.dtype.itemsize
            if len(leaf.shape) == 3 or path == ("head",):
                itemsize, scales = 1, (*leaf.shape[:-1], 1)
                total += 4 * math.prod(scales) / sharding.count_shards(path, scales, mesh)
            total += itemsize * leaf.size / sharding.count_shards(path, leaf.shape, mesh)
        return total


@dataclasses.dataclass(frozen=True)
class CachedHidden(TeacherKind):
    """Hidden states that come with the batch, and the head for their logits."""

    name: ClassVar[str] = "hidden"
    runs: ClassVar[bool] = False
    resident: ClassVar[str] = "its head"

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        head = width * teacher.spec.hidden_size * jnp.dtype(dtype).itemsize
        return head / mesh.shape["tensor"]

    def flops(self, teacher: Checkpoint, width: int, seq_len: int) -> float:
        return 2.0 * width * teacher.spec.hidden_size

    def load(self, teacher: Checkpoint, width: int, compute: Compute) -> Model:
        return narrow_head(load_unembedding(teacher, compute, "cached (hidden)"), width)

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        return from_bits(batch["teacher_hidden"]), teacher.head

    def make_records(
        self, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> dict[str, Array]:
        """Makes the cache's records of a running teacher; zeros at positions without weight."""
        # Positions without weight may hold anything, NaN too, and are never read.
        return {"hidden": jnp.where((batch["weights"] != 0)[..., None], teacher.hidden(batch), 0)}


@dataclasses.dataclass(frozen=True)
class CachedTopK(TeacherKind):
    """The top-k ids of each position, which come with the batch; nothing is loaded."""

    name: ClassVar[str] = "topk"
    runs: ClassVar[bool] = False
    in_batch: ClassVar[bool] = True
    resident: ClassVar[str] = "cached"
    logit_bytes: ClassVar[int] = 0
    loss: ClassVar[Callable[..., Any]] = staticmethod(cached_head_loss)
    evaluation: ClassVar[Callable[..., Any]] = staticmethod(cached_head_evaluation)
    k: int = 0  # ids a position

    def check_loss(self, loss: KDLoss) -> None:
        if callable(loss.temperature):
            raise UserError(
                "found a schedule of the temperature and a cache of top-k ids; expected the "
                "temperature that it was written for. Cache hidden states (kdjax cache "
                "--kind=hidden)."
            )

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        return 0

    def flops(self, teacher: Checkpoint, width: int, seq_len: int) -> float:
        return 0.0

    def load(self, teacher: Checkpoint, width: int, compute: Compute) -> Model:
        return load_unembedding(teacher, compute, "cached (topk)", empty=True)

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        return (TopTeacher.of(batch),)

    def make_records(
        self, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> dict[str, Array]:
        """Makes the cache's records of a running teacher."""
        assert teacher.functions is not None
        head = teacher.functions.head(teacher.params)
        columns = batch["labels"], batch["weights"]
        return top_of_teacher(teacher.hidden(batch), head, *columns, spec, self.k)._asdict()


@dataclasses.dataclass(frozen=True)
class TeacherInBatch(TeacherKind):
    """A teacher whose predictions come with the batch: from a server, an ensemble, a custom model.

        step = make_step(student, None, loss, tx, kind=TeacherInBatch(rest="tail"))

    Log-probabilities at T = 1, nats, of what follows `tokens[t]`. Without `rest` the batch has
    `teacher_log_probs` `[B, T, V]` over the ids of the student's tokenizer, or over all rows of its
    head. With it `teacher_ids` (int32, distinct at a position) and `teacher_top_log_probs`
    `[B, T, k]`. `rest` says where the remaining probability is: "tail", on all other ids together,
    as in a top-k cache, and the temperature is 1; or "absent", on no other id: the k ids are
    normalised.
    Raises `UserError` for another `rest`; the step for columns of other shapes, ids outside the
    vocabulary or twice at a position, and probabilities that add up to 0 or to more than 1 (by 1%).
    """

    rest: str = ""
    name: ClassVar[str] = "batch"
    runs: ClassVar[bool] = False
    in_batch: ClassVar[bool] = True
    resident: ClassVar[str] = "in the batch"
    logit_bytes: ClassVar[int] = 0

    def __post_init__(self):
        if self.rest not in ("", "tail", "absent"):
            raise UserError(
                f"rest={self.rest!r}: must be 'tail' or 'absent', the meaning of the probability "
                "outside the top-k ids; or empty, if all ids come with the batch"
            )

    @property
    def loss(self) -> Callable[..., Any]:  # type: ignore[override]
        """The loss of merged outcomes, or of all ids."""
        return cached_head_loss if self.rest else head_loss

    @property
    def evaluation(self) -> Callable[..., Any]:  # type: ignore[override]
        """The held-out sums of merged outcomes, or of all ids."""
        return cached_head_evaluation if self.rest else head_evaluation

    def check_loss(self, loss: KDLoss) -> None:
        if self.rest == "tail" and loss.temperature != 1:
            scheduled = callable(loss.temperature)
            found = "a schedule" if scheduled else f"{loss.temperature:g}"
            raise UserError(
                f"found temperature={found} and rest='tail'; expected 1: the tail's "
                "probability at T does not follow from it at 1. Pass all ids "
                "(teacher_log_probs), or use rest='absent'."
            )

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        if not self.rest:
            return batch["teacher_log_probs"], Given()
        ids, log_probs = batch["teacher_ids"], batch["teacher_top_log_probs"]
        # Ids that no head has, and NaN, would make the gradient NaN where they weigh 0.
        read = (batch["weights"] != 0)[..., None]
        ids = jnp.where(read, ids, jnp.arange(ids.shape[-1], dtype=ids.dtype))
        log_probs = jnp.where(read, log_probs, -math.log(ids.shape[-1]))
        columns = ids, log_probs, batch["labels"]
        return (TopTeacher.from_log_probs(*columns, tail=self.rest == "tail"),)

    def check_columns(self, batch: dict[str, Any], placed: Batch, head: HeadSpec) -> Array | None:
        names = ["teacher_ids", "teacher_top_log_probs"] if self.rest else ["teacher_log_probs"]
        found = [tuple(batch[name].shape) if name in batch else () for name in names]
        rows, last = tuple(batch["tokens"].shape), (found[0] or (0,))[-1]
        fits = 0 < last <= head.real_vocab if self.rest else last in (head.real_vocab, head.width)
        if not fits or any(shape != (*rows, last) for shape in found):
            shown = ", ".join(f"{name} {shape}" for name, shape in zip(names, found, strict=True))
            wanted = f"k from 1 to {head.real_vocab}" if self.rest else str(head.real_vocab)
            raise UserError(
                f"found of a teacher in the batch: {shown}; expected arrays of {rows} and of "
                f"{wanted} ids at each position, as TeacherInBatch(rest={self.rest!r}) says."
            )
        if not self.rest:
            return _count_odd(None, placed[names[0]], placed["weights"], head.real_vocab)
        ids, log_probs = (batch[name] for name in names)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise UserError(f"the batch's teacher_ids are {ids.dtype}; expected whole numbers.")
        if any(isinstance(x, jax.Array) for x in (ids, log_probs, batch["weights"])):
            columns = (placed[name] for name in (*names, "weights"))
            return _count_odd(*columns, head.real_vocab)
        odd = _find_odd(np, ids, log_probs, batch["weights"], head.real_vocab)
        if odd.any():
            row, at = np.argwhere(odd)[0]
            total = float(np.exp(np.float64(log_probs[row, at])).sum())
            refuse_odd(
                int(odd.sum()),
                f" At [{row}, {at}]: ids {np.asarray(ids)[row, at].tolist()}, in sum {total:.4g}.",
            )
        return None


def refuse_odd(count: int, example: str = "") -> None:
    """Raises `UserError` if a teacher in a batch is impossible at any position."""
    if count:
        raise UserError(
            f"found {count} positions whose teacher is impossible; expected ids of the student's "
            "vocabulary, each once at a position, and log-probabilities whose probabilities add "
            f"up to more than 0 and at most 1.{example}"
        )


_MOST = 1.01  # largest sum of probabilities: log-probabilities in bfloat16 are off by 0.4%


def _find_odd(xp: Any, ids: Any, log_probs: Any, weights: Any, real: int) -> Any:
    """Marks positions `[B, T]` with impossible ids or log-probabilities, such as NaN.

    All of them -inf, as a server's padding, would be a loss of 1e27.
    """
    total = xp.exp(log_probs[..., :real].astype(np.float32)).sum(-1)
    good = (total > 0) & (total <= _MOST)
    if ids is not None:
        ordered = xp.sort(ids, axis=-1)
        good &= (ordered[..., 0] >= 0) & (ordered[..., -1] < real)
        good &= (ordered[..., 1:] != ordered[..., :-1]).all(-1)
    return ~good & (weights != 0)


@functools.partial(jax.jit, static_argnums=3)
def _count_odd(ids: Any, log_probs: Any, weights: Any, real: int) -> Array:
    return jnp.sum(_find_odd(jnp, ids, log_probs, weights, real), dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class NoTeacher(TeacherKind):
    """None: the student trains on the text alone."""

    name: ClassVar[str] = "none"
    runs: ClassVar[bool] = False
    logit_bytes: ClassVar[int] = 0

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        return None, None


def _narrow_shapes(teacher: Checkpoint, width: int, dtype: DTypeLike) -> Params:
    """Shapes of a dense teacher with its head cut to `width` rows."""
    compute = Compute(param_dtype=jnp.dtype(dtype))
    shapes = functional(teacher.spec, compute)[1]
    cut = dataclasses.replace(teacher.spec, vocab_size=width)
    return shapes | {cut.head: functional(cut, compute)[1][cut.head]}


# Kinds that run in every step, by `teacher.weights`.
RUNNING: dict[str, TeacherKind] = {k.name: k for k in (Dense(), Packed(), Float8())}
