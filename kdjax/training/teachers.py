"""The kinds of teacher: each owns its bytes, its arithmetic, its loading and its part of the loss.

A kind is a frozen value, static under jit. `job.ask_kinds` is the one place where the config's
strings become kinds.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.formats.blocks import BLOCKS
from kdjax.losses.chunked import EvalSums, HeadSpec, LossSums, head_evaluation, head_loss
from kdjax.losses.topk import (
    TopEvalSums,
    TopTeacher,
    cached_head_evaluation,
    cached_head_loss,
    top_of_teacher,
)
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoder import Compute, ModelFunctions, Params, functional
from kdjax.models.model import Model, check_fp8, load_head, load_model, narrow_head
from kdjax.models.weights import from_bits, to_bits

Size = int | float  # bytes
Batch = dict[str, Array]
Student = tuple[Array, Array]  # hidden states [B, T, D] and head [V, D]


class RunningTeacher(NamedTuple):
    """A teacher within the compiled step: its functions, and its arrays as they were passed in."""

    functions: ModelFunctions | None  # None: there is no teacher
    params: Params

    def hidden(self, batch: Batch) -> Array:
        """Hidden states `[B, T, D]`."""
        assert self.functions is not None
        columns = batch["tokens"], batch["segment_ids"], batch["positions"]
        return jax.lax.stop_gradient(self.functions.hidden(self.params, *columns))

    def hidden_in_parts(self, batch: Batch, parts: int) -> Array:
        """As `hidden`, a layer at a time for all parts of the batch; of a `Decoder` only."""
        functions: Any = self.functions
        columns = batch["tokens"], batch["segment_ids"], batch["positions"]
        return functions.hidden_in_parts(self.params, *columns, parts)

    @property
    def head(self) -> Any:
        """`[V, D]` as stored: numbers, or float8 with scales."""
        assert self.functions is not None
        return self.functions.stored_head(self.params)


@dataclasses.dataclass(frozen=True)
class TeacherKind:
    """How a teacher is kept and how it reaches the loss; the base runs beside the student."""

    name: ClassVar[str] = ""  # as logs, plans and caches call it
    runs: ClassVar[bool] = True  # whether it computes hidden states in every step
    logit_bytes: ClassVar[int] = 4  # of its float32 logits, an id of a position in a chunk
    flop_rate: ClassVar[float] = 1.0  # of its products, in units of bf16's
    resident: ClassVar[str] = ""  # what stays on the devices, for the plan; "": dense numbers
    decodes: ClassVar[bool] = False  # whether a layer, or the head, becomes numbers when used
    extra_bytes: ClassVar[int] = 0  # beside the activations, of an MLP's unit at a position
    loss: ClassVar[Callable[..., Any]] = staticmethod(head_loss)
    evaluation: ClassVar[Callable[..., Any]] = staticmethod(head_evaluation)

    @property
    def weights(self) -> str:
        """As `load_model` calls them."""
        return "dense"

    def check(self, placement: Placement) -> None:
        """Raises `UserError` for devices that cannot run it."""

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        """On each device, with the head cut to `width` rows."""
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
            weights=self.weights,
            dtype=compute.param_dtype,
            compute_dtype=compute.dtype,
            max_segments=compute.max_segments,
        )
        return narrow_head(model, width)

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        """What the loss takes of the teacher: hidden states `[B, T, D]` and a head."""
        return teacher.hidden(batch), teacher.head

    def begin_parts(
        self, teacher: RunningTeacher, batch: Batch, parts: int
    ) -> tuple["TeacherKind", Batch]:
        """What computes the loss of a part of the batch, and what of it belongs in the batch."""
        return self, batch

    def sum_loss(
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> LossSums:
        """Sums of the loss over a batch's weighted positions."""
        compare: Any = self.loss  # custom_vjp hides what it returns
        outputs = self.read_outputs(teacher, batch)
        return compare(*student, *outputs, batch["labels"], batch["weights"], spec)

    def sum_evaluation(
        self, student: Student, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> EvalSums | TopEvalSums:
        """Held-out sums over a batch's weighted positions."""
        outputs = self.read_outputs(teacher, batch)
        return self.evaluation(*student, *outputs, batch["labels"], batch["weights"], spec)


@dataclasses.dataclass(frozen=True)
class Dense(TeacherKind):
    """Numbers, dequantized at load."""

    name: ClassVar[str] = "dequant"

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        return sharding.tree_bytes(_narrow_shapes(teacher, width, dtype), mesh)


@dataclasses.dataclass(frozen=True)
class Packed(TeacherKind):
    """The file's own blocks, decoded a layer at a time."""

    name: ClassVar[str] = "q4k"
    resident: ClassVar[str] = "packed blocks"
    decodes: ClassVar[bool] = True

    @property
    def weights(self) -> str:
        return "packed"

    def begin_parts(
        self, teacher: RunningTeacher, batch: Batch, parts: int
    ) -> tuple[TeacherKind, Batch]:
        """Hidden states of the whole batch come first: a layer is decoded once a step.

        To decode a layer of experts takes as long as their products for 4,000 positions.
        """
        hidden = to_bits(teacher.hidden_in_parts(batch, parts))
        return CachedHidden(), batch | {"teacher_hidden": hidden}

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        spec, total = teacher.spec, 0.0
        head = ("embed",) if spec.tied else ("head",)
        for path, names in teacher.names.items():
            kept = width / spec.vocab_size if path == head else 1.0
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
    """float8_e4m3fn with a scale a row, multiplied as such; `precise` sums in float32."""

    name: ClassVar[str] = "fp8"
    flop_rate: ClassVar[float] = 2.0  # data sheets give float8 twice the rate of bf16
    resident: ClassVar[str] = "float8 and scales"
    extra_bytes: ClassVar[int] = 1  # what the down projection multiplies, in float8
    precise: bool = False

    @property
    def weights(self) -> str:
        return "float8_precise" if self.precise else "float8"

    def check(self, placement: Placement) -> None:
        check_fp8(placement.mesh.devices.flat[0])

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
    """Hidden states that come with the batch, and the head that makes logits of them."""

    name: ClassVar[str] = "hidden"
    runs: ClassVar[bool] = False
    resident: ClassVar[str] = "its head"

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        head = width * teacher.spec.hidden_size * jnp.dtype(dtype).itemsize
        return head / mesh.shape["tensor"]

    def flops(self, teacher: Checkpoint, width: int, seq_len: int) -> float:
        return 2.0 * width * teacher.spec.hidden_size

    def load(self, teacher: Checkpoint, width: int, compute: Compute) -> Model:
        return narrow_head(load_head(teacher, compute, "cached (hidden)"), width)

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        return from_bits(batch["teacher_hidden"]), teacher.head

    def make_records(
        self, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> dict[str, Array]:
        """What the cache keeps of a running teacher; zeros at positions without weight."""
        # Positions without weight may hold anything, NaN too, and are never read.
        return {"hidden": jnp.where((batch["weights"] != 0)[..., None], teacher.hidden(batch), 0)}


@dataclasses.dataclass(frozen=True)
class CachedTopK(TeacherKind):
    """The likeliest ids of each position, which come with the batch; nothing is loaded."""

    name: ClassVar[str] = "topk"
    runs: ClassVar[bool] = False
    resident: ClassVar[str] = "cached"
    logit_bytes: ClassVar[int] = 0
    loss: ClassVar[Callable[..., Any]] = staticmethod(cached_head_loss)
    evaluation: ClassVar[Callable[..., Any]] = staticmethod(cached_head_evaluation)
    k: int = 0  # ids a position

    def resident_bytes(self, teacher: Checkpoint, width: int, dtype: DTypeLike, mesh: Mesh) -> Size:
        return 0

    def flops(self, teacher: Checkpoint, width: int, seq_len: int) -> float:
        return 0.0

    def load(self, teacher: Checkpoint, width: int, compute: Compute) -> Model:
        return load_head(teacher, compute, "cached (topk)", empty=True)

    def read_outputs(self, teacher: RunningTeacher, batch: Batch) -> tuple[Any, ...]:
        return (TopTeacher.of(batch),)

    def make_records(
        self, teacher: RunningTeacher, batch: Batch, spec: HeadSpec
    ) -> dict[str, Array]:
        """What the cache keeps of a running teacher."""
        assert teacher.functions is not None
        head = teacher.functions.head(teacher.params)
        columns = batch["labels"], batch["weights"]
        return top_of_teacher(teacher.hidden(batch), head, *columns, spec, self.k)._asdict()


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
    head = "embed" if teacher.spec.tied else "head"
    return shapes | {head: functional(cut, compute)[1][head]}
