"""Forms of a student: its trained, seen, saved and exported parameters.

    base     parameters that are never trained, an argument of the step; {} for most forms
    masters  float32 parameters that the optimizer moves, part of the state
    kept     other arrays of the state, made at the start, such as scales; None for most forms

In each optimizer step, `see(base, kept, masters)` computes the parameters of the forward pass once,
and `pull` maps the gradient at these parameters to a gradient at the masters. A form knows its
settings, its bytes and its name in a run; the step, the loop, the plan and evaluation know nothing
else about it. `Rounded` rounds the masters, `RoundedSum` base + B A of adapters.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.config import (
    DSPARK,
    EAGLE3,
    NEW,
    OWN_BLOCK,
    DSparkConfig,
    LoraConfig,
    StudentConfig,
    check_drafts,
    say_why,
    split_drafts,
)
from kdjax.device.sharding import count_bytes, parameter_shardings
from kdjax.errors import UserError
from kdjax.formats.blocks import Scales, decode_fields, encode_fields, fit_rows, is_cut
from kdjax.formats.imatrix import read_importance
from kdjax.formats.kquants import WEIGHED
from kdjax.formats.recipes import parts_by_type
from kdjax.formats.saved import BLOCK, LORA
from kdjax.formats.start import read_masters, read_scales
from kdjax.models.adapters import (
    Lora,
    add_change,
    choose_lora,
    draw_adapters,
    join_adapters,
    shape_adapters,
    split_adapters,
)
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.attention import QUERY_BLOCK
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoder import Compute, ModelFunctions, Params, functional
from kdjax.models.draft_functions import DraftFunctions, draw_block, shape_block
from kdjax.models.dspark import HEAD, DSparkFunctions, DSparkShape, HeadSizes, place_anchors
from kdjax.models.eagle import PART as EAGLE
from kdjax.models.eagle import EagleFunctions, EagleShape, EagleSizes
from kdjax.models.heads import attach_head, check_tapped, choose_mask
from kdjax.models.lora import read_layer, read_numbers
from kdjax.models.mixture import Mixture, list_single_matrices
from kdjax.models.model import Model, attach_adapters, load_model
from kdjax.models.names import layers_of, list_fused, name_of
from kdjax.models.nextn import attach_block, find_block
from kdjax.models.tapped import HeadShape, TappedFunctions, draw_head, trace_head
from kdjax.models.weights import Scaled, name_numbers, stack_blocks
from kdjax.training.some_ids import OfSomeIds
from kdjax.training.teachers import Batch, RunningTeacher, Size, TeacherKind
from kdjax.training.trainable import list_paths, zeros_for

_log = logging.getLogger("kdjax")
Kept = Any  # arrays of a form in the state; None: it has none


class Runs(NamedTuple):
    """Hidden states `[B, T, D]` that a form's pass over a batch computes."""

    hidden: Array  # of the student
    later: tuple[Array, ...] = ()  # of its later predictions of the same tokens
    target: Array | None = None  # of its teacher, where the pass runs it; None: it does not
    confidence: Array | None = None  # no state: logits [B, T] that its draft is accepted


@dataclasses.dataclass(frozen=True)
class Form:
    """Form of a student: maps its masters to the seen parameters; here they are equal."""

    rounds: ClassVar[bool] = False  # whether seen parameters are less exact than masters
    # Arguments of `make_step` that conflict with the form, and the reason.
    conflicts: ClassVar[Mapping[str, str]] = {}
    # Whether a student differs from its file before the first step, so that the file may teach it.
    differs: ClassVar[bool] = False
    writes: ClassVar[bool] = True  # whether the trained student generates text
    beside: ClassVar[bool] = False  # whether the teacher's arrays are its base, in a run
    # For a run's plan: the name of the masters; whether embedding and head get no gradient;
    # whether matrices get none either, so that the backward pass goes through their adapters.
    title: ClassVar[str] = "student, float32 masters"
    freezes: ClassVar[bool] = False
    low_rank: ClassVar[bool] = False
    casts: ClassVar[bool] = True  # whether float32 matrices are cast for each product
    # Whether XLA puts a layer's gradients where its activations were: of one dtype they are.
    reuses: ClassVar[bool] = False
    # Weights of the losses of the student's later predictions, added to the loss of its first.
    later: ClassVar[tuple[float, ...]] = ()
    confidence: ClassVar[float] = 0.0  # weight of the loss of its confidence, see `Runs`
    logit_bytes: ClassVar[int] = 0  # an id of a position in a chunk, of other predictions' losses

    @property
    def sums_more(self) -> bool:
        """Whether a step sums losses of later predictions or of confidence."""
        return bool(self.later or self.confidence)

    def settle(self, student: Model) -> "Form":
        """Completes the form from its student; raises `UserError` for one that it does not fit."""
        return self

    def masters(self, params: Params) -> Params:
        """Selects the trained part of a model's parameters, or of their gradients: here all."""
        return params

    def base(self, params: Params) -> Params:
        """Selects the parameters that are never trained: here none."""
        return {}

    def join(self, base: Params, masters: Params) -> Params:
        """Undoes `base` and `masters`; no array is copied."""
        return masters

    def list_frozen(self, base: Params, masters: Params) -> frozenset[str]:
        """Lists paths of seen parameters that never get a gradient; arguments may be shapes."""
        return frozenset()

    def learns(self, params: Params) -> bool:
        """Whether a teacher with the student's own weights teaches it anything."""
        return False

    def begin(self, base: Params, masters: Params) -> Kept:
        """Makes the arrays that the state keeps, before the first step."""

    def read_kept(self, shapes: Kept) -> Kept:
        """Reads the arrays that a state begins with, which `begin` then does not make, or None."""

    def see(self, base: Params, kept: Kept, masters: Params) -> Params:
        """Computes the parameters that the forward pass takes."""
        return masters

    def pull(
        self,
        base: Params,
        kept: Kept,
        masters: Params,
        seen: Params,
        grads: Params,
        frozen: frozenset[str],
    ) -> Params:
        """Computes the gradient at the masters from the gradient at the seen parameters.

        `grads` has None at the `frozen` paths.
        """
        return zeros_for(self.masters(grads), frozen, masters)

    def spread(self, base: Params, masters: Params, mesh: Mesh) -> Any:
        """Returns shardings of the seen parameters, or arrays that have these shardings.

        `masters` are shardings.
        """
        return self.join(base, masters)

    def place(self, kept: Kept, seen: Any) -> Any:
        """Returns shardings of the kept arrays; here each device has all of them.

        `seen` are the shardings of the seen parameters; `kept` may be shapes.
        """
        meshes = [x.mesh for x in jax.tree.leaves(seen) if isinstance(x, NamedSharding)]
        return jax.tree.map(lambda _: NamedSharding(meshes[0], P()), kept)

    def mark(self, batch: dict[str, Array], step: Array | None) -> dict[str, Array]:
        """Returns the batch with the form's own columns and weights: here as it is.

        `step` is the number of optimizer steps done; None in an evaluation.
        """
        return batch

    def run(self, student: ModelFunctions, params: Params, batch: Mapping[str, Array]) -> Runs:
        """Hidden states of the student, and of its `later` predictions of the tokens: here none."""
        return Runs(student.hidden(params, *list_columns(batch)))

    def weigh_later(self, batch: Mapping[str, Array], number: int) -> Array:
        """Weights `[B, T]` of the student's `later` predictions, of which this is `number`.

        It begins this many tokens before: those that would begin before their document have none.
        """
        segments = batch["segment_ids"]
        within = segments[:, number:] == segments[:, :-number]
        return jnp.where(jnp.pad(within, ((0, 0), (number, 0))), batch["weights"], 0)

    def adapt(self, kind: TeacherKind) -> TeacherKind:
        """Returns the kind by which such a student learns from a teacher of this kind."""
        return kind

    def begin_parts(
        self, kind: TeacherKind, teacher: RunningTeacher, batch: Batch, parts: int
    ) -> tuple[TeacherKind, Batch]:
        """Lets the teacher compute for all `parts` of a batch before the first, see the kind's."""
        return kind.begin_parts(teacher, batch, parts)

    def check_teachers(self, student: Model, teachers: Sequence[Model]) -> None:
        """Raises `UserError` for teachers from which such a student does not learn."""

    def send_as(self, dtype: DTypeLike | None) -> DTypeLike | None:
        """Chooses the dtype in which devices exchange float32 matrices; None: float32.

        The products of the forward pass are in `dtype`.
        """
        return dtype

    def pack(self, base: Params, kept: Kept, masters: Params) -> Params:
        """Makes the exported parameters: numbers or blocks."""
        return self.see(base, kept, masters)

    def compile(self, function: Callable[..., Any], places: Any = None) -> Callable[..., Any]:
        """Prepares `see` or `pack` for calls between steps; results get the shardings `places`."""
        return function

    @property
    def record(self) -> dict[str, Any]:
        """Record of the form in a saved step, as JSON; empty for plain masters."""
        return {}

    # --- Methods for a run, whose student is a file: `training.pair`, `job`, `plan` call them ---

    @property
    def weights(self) -> str:
        """How the base is stored (`config.WEIGHTS`); "" without one, or if the teacher has it."""
        return ""

    def base_dtype(self, compute: DTypeLike) -> DTypeLike:
        """The dtype of the base's numbers, given the dtype of products."""
        return compute

    def open(self, student: Checkpoint) -> Checkpoint:
        """Returns the student as the form trains it; raises `UserError` if it does not fit."""
        return student

    def read_text(self, tokens: np.ndarray, mask: np.ndarray, real: int) -> "Form":
        """Completes the form from training rows `[N, T]` of `real` ids: here it is complete.

        `mask` is not 0 where an id is a target.
        """
        return self

    def find_start(self, student: Checkpoint) -> Checkpoint:
        """Returns the model of `teacher.path=self`: the student before training."""
        return student

    def draw(self, student: Checkpoint, seed: int) -> Params | None:
        """Makes the masters before the first step; None: the student's file has them."""
        return None

    def shapes(self, student: Checkpoint) -> Params:
        """Shapes of the masters."""
        return self.masters(functional(student.spec, Compute())[1])

    def shape_gradients(self, student: Checkpoint, compute: DTypeLike) -> Params:
        """Shapes of the gradients that a step forms, given the dtype of products."""
        return self.shapes(student)

    def shape_seen(self, student: Checkpoint, compute: DTypeLike) -> Params:
        """Shapes of the numbers that the forward pass sees in addition to masters and base."""
        return {}

    def count_kept(self, student: Checkpoint) -> int:
        """Bytes of the arrays that the state has in addition to masters and moments."""
        return 0

    def open_model(self, student: Checkpoint, compute: Compute, shared: Model | None) -> Model:
        """Makes the model that the step takes: shapes of masters, arrays of a base.

        `shared` is a teacher that has the base's arrays.
        """
        functions, shapes = functional(student.spec, compute)
        rows = student.spec.vocab_size
        return Model(functions, shapes, rows, spec=student.spec, placement=compute.placement)

    def choose_remat(self, remat: str) -> str:
        """Returns what the backward pass recomputes, given `student.remat`."""
        return remat

    def list_backward(self, spec: ArchSpec) -> ArchSpec:
        """Architecture of the layers that run backward."""
        return spec

    def count_ids(self, width: int) -> int:
        """Rows of the student's unembedding, given those that its teacher shares."""
        return width

    def count_columns(self, spec: ArchSpec) -> tuple[int, int]:
        """Columns of the student's unembedding, and how many of them have a gradient."""
        return spec.hidden_size, 0 if self.freezes else spec.hidden_size

    def count_taps(self, spec: ArchSpec) -> int:
        """Numbers a position that the student reads of its teacher's layers."""
        return 0

    def keep_more(self, spec: ArchSpec) -> int:
        """Numbers a position that the backward pass reads in addition to a student's layers."""
        return 0

    def count_attention(self, spec: ArchSpec, length: int, usual: Size) -> Size:
        """Bytes a position of the backward pass of attention; `usual` are a student's."""
        return usual

    def count_scores(self, spec: ArchSpec, length: int, *, on_cpu: bool) -> Size:
        """Bytes a position of scores that wait for the backward pass during the loss: here none."""
        return 0

    def count_flops(self, spec: ArchSpec, length: int, trained: float) -> float:
        """FLOP a token of the student; `trained` is the share of bytes that have a gradient."""
        return (2 + trained) * spec.forward_flops(length)


def list_columns(batch: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Tokens, segment ids and positions `[B, T]`, as models take them."""
    return batch["tokens"], batch["segment_ids"], batch["positions"]


PLAIN = Form()


@dataclasses.dataclass(frozen=True)
class Adapters(Form):
    """Trains the adapters of a student (`kdjax.add_lora`); their base is frozen.

    The base stays as it was loaded, packed or dense. It is never donated, stepped or saved, and a
    teacher may share its arrays. A student with adapters has this form by default.
    """

    lora: Lora | None = dataclasses.field(default=None, kw_only=True)  # the student's, once settled
    # A run's settings.
    asked: LoraConfig | None = dataclasses.field(default=None, compare=False, kw_only=True)

    conflicts: ClassVar[Mapping[str, str]] = {
        "trainable": say_why("optim.trainable", "student.lora.rank")
    }
    title: ClassVar[str] = "adapters, float32"
    freezes: ClassVar[bool] = True
    low_rank: ClassVar[bool] = True
    casts: ClassVar[bool] = False

    @property
    def record(self) -> dict[str, Any]:
        """Size and matrices, for `formats.saved`."""
        assert self.lora is not None
        return {LORA: self.lora.record}

    def settle(self, student: Model) -> "Adapters":
        """Reads the student's adapters; raises `UserError` for a student without."""
        lora = Lora.of_params(student.params)
        if lora is None:
            raise UserError(
                f"{student.name}: found a student without adapters and form=Adapters(); expected "
                "one with them: kdjax.add_lora(student, rank=16)."
            )
        return dataclasses.replace(self, lora=lora)

    def masters(self, params: Params) -> Params:
        """Selects the adapters, or the entire tree if it has nothing else."""
        return split_adapters(params)[1] or params

    def base(self, params: Params) -> Params:
        """Selects everything but the adapters."""
        return split_adapters(params)[0]

    def join(self, base: Params, masters: Params) -> Params:
        """Joins the base and its adapters; no array is copied."""
        return join_adapters(base, masters)

    def list_frozen(self, base: Params, masters: Params) -> frozenset[str]:
        """Lists all paths of the base."""
        return frozenset(list_paths(base))

    def learns(self, params: Params) -> bool:
        """Whether the adapters change anything: where B is zero they do not."""
        flat = _flatten(split_adapters(params)[1])
        return any(path[-1] == "b" and bool(jnp.any(x != 0)) for path, x in flat.items())

    def see(self, base: Params, kept: Kept, masters: Params) -> Params:
        """Returns the base with its adapters; no array is copied."""
        return self.join(base, masters)

    def send_as(self, dtype: DTypeLike | None) -> DTypeLike | None:
        """Returns None: float32 arrays of a base are scales, which devices exchange unrounded."""

    @property
    def weights(self) -> str:
        """How the frozen student is stored."""
        assert self.asked is not None
        return self.asked.weights

    def open(self, student: Checkpoint) -> Checkpoint:
        """Returns the student; raises `UserError` for targets and ranks that it does not have."""
        self.choose_lora(student)
        return student

    def choose_lora(self, student: Checkpoint) -> Lora:
        """Chooses the trained adapters: the student's if it has some, else the requested ones."""
        asked = self.asked
        assert asked is not None
        if student.adapters is None:
            return choose_lora(student.spec, asked.rank, asked.alpha, asked.targets)
        lora = student.adapters.lora
        if asked.rank != lora.rank:
            raise UserError(
                f"{student}: found adapters of rank {lora.rank} and student.lora.rank="
                f"{asked.rank}; expected one rank. Set it to {lora.rank}; the file decides alpha "
                "and matrices."
            )
        return lora

    def find_start(self, student: Checkpoint) -> Checkpoint:
        """Returns the base: the adapters are trained."""
        return student.base

    def draw(self, student: Checkpoint, seed: int) -> Params:
        """Reads the adapters of the student's file, or draws new ones."""
        if student.adapters is not None:
            return student.adapters.read_tree()
        return draw_adapters(self.choose_lora(student), student.spec, seed)

    def shapes(self, student: Checkpoint) -> Params:
        """Shapes of A and B."""
        return shape_adapters(self.choose_lora(student), student.spec)

    def open_model(self, student: Checkpoint, compute: Compute, shared: Model | None) -> Model:
        """Makes a model of the base, `shared` or loaded, with shapes of adapters."""
        lora, spec = self.choose_lora(student), student.spec
        functions, _ = functional(spec, dataclasses.replace(compute, scan=self._loops(compute)))
        assert compute.placement is not None
        if shared is not None:
            _log.info("the frozen student shares the teacher's arrays")
            model = shared.replace(functions=functions, spec=spec)
        else:
            model = load_model(
                student.base,
                placement=compute.placement,
                weights=self.weights,
                dtype=self.base_dtype(compute.dtype),
                compute_dtype=compute.dtype,
                max_segments=compute.max_segments,
            ).replace(functions=functions)
        model = attach_adapters(model.replace(checkpoint=None), lora, shape_adapters(lora, spec))
        _log.info("student: %d matrices with adapters, rank %d", len(lora.targets), lora.rank)
        return model

    def _loops(self, compute: Compute) -> bool:
        """Whether layers run in a loop, which decodes packed and float8 matrices one at a time."""
        return compute.scan or self.weights != "dense"

    def count_flops(self, spec: ArchSpec, length: int, trained: float) -> float:
        """Counts both passes without gradients of matrices; gradients of A and B are small."""
        return super().count_flops(spec, length, 0.0)


@dataclasses.dataclass(frozen=True)
class _Drafting(Form):
    """Trains what drafts for a frozen model, `part` of its parameters; all else is the base.

    A teacher that shares the base's arrays is the model that it drafts for.
    """

    part: ClassVar[str] = ""
    conflicts: ClassVar[Mapping[str, str]] = {
        "extra": "it reads layers, and all of a block's stay as they are"
    }
    differs: ClassVar[bool] = True
    writes: ClassVar[bool] = False
    beside: ClassVar[bool] = True
    freezes: ClassVar[bool] = True
    casts: ClassVar[bool] = False

    def masters(self, params: Params) -> Params:
        """Selects the part."""
        return {self.part: params[self.part]}

    def base(self, params: Params) -> Params:
        """Selects everything but the part."""
        return {name: x for name, x in params.items() if name != self.part}

    def join(self, base: Params, masters: Params) -> Params:
        """Joins base and part; no array is copied."""
        return {**base, **masters}

    def list_frozen(self, base: Params, masters: Params) -> frozenset[str]:
        """Lists all paths of the base."""
        return frozenset(list_paths(base))

    def learns(self, params: Params) -> bool:
        """True: the layers' predictions do not depend on what drafts."""
        return True

    def see(self, base: Params, kept: Kept, masters: Params) -> Params:
        """Returns the base with the part; no array is copied."""
        return self.join(base, masters)

    def send_as(self, dtype: DTypeLike | None) -> DTypeLike | None:
        """Returns None: float32 arrays of a base are scales, which devices exchange unrounded."""

    def choose_remat(self, remat: str) -> str:
        """Returns `none`: a block is one layer, a head a few."""
        return "none"

    def _refuse_adapters(self, student: Checkpoint, block: str) -> None:
        """Raises `UserError` for a model with adapters; `block` is `student.block`."""
        if student.adapters is not None:
            raise UserError(
                f"{student}: found adapters and student.block={block!r}; expected a model without "
                "them. Merge them first (kdjax export --format=gguf)."
            )


@dataclasses.dataclass(frozen=True)
class DraftBlock(_Drafting):
    """Trains the drafting block (MTP) of a student (`kdjax.take_block`); all else is the base.

    A teacher that shares the base's arrays is the model that the block drafts for. Such a student
    has this form by default.
    """

    new: bool = False  # of a run: the block is drawn, in place of the file's
    # Weights of the losses of a pass's drafts after the first, which are added to the first's: a
    # draft reads the block's state of the draft before, as it does in use. (): the first alone.
    later: tuple[float, ...] = ()  # type: ignore[misc]

    part: ClassVar[str] = "mtp"
    title: ClassVar[str] = "the block that drafts, float32"

    @property
    def record(self) -> dict[str, Any]:
        """Says that the parameters are a block's, for `formats.saved`."""
        return {BLOCK: True}

    def settle(self, student: Model) -> "DraftBlock":
        """Returns itself; raises `UserError` for a student without a block that trains.

        Raises it also for weights of later drafts that are not above 0, or too many.
        """
        check_drafts(self.later)
        if not isinstance(student.functions, DraftFunctions):
            raise UserError(
                f"{student.name}: found no block that drafts and form=DraftBlock(); expected a "
                "student of kdjax.take_block."
            )
        return self

    def run(self, student: ModelFunctions, params: Params, batch: Mapping[str, Array]) -> Runs:
        """Hidden states of the first draft at each token, and of the later drafts of passes.

        Draft n + 1 at a token belongs to the pass that began n tokens before it.
        """
        if not self.later:
            return super().run(student, params, batch)
        assert isinstance(student, DraftFunctions)
        drafts = student.draft_runs(params, *list_columns(batch), drafts=1 + len(self.later))
        _, first, *later = jnp.moveaxis(drafts, 1, 0)
        return Runs(first, tuple(later))

    def open(self, student: Checkpoint) -> Checkpoint:
        """Returns the student with its block, or a new one; raises `UserError` if it has none."""
        self._refuse_adapters(student, NEW if self.new else OWN_BLOCK)
        return dataclasses.replace(student, spec=find_block(student.spec, student, new=self.new))

    def draw(self, student: Checkpoint, seed: int) -> Params | None:
        """Draws a new block; None: the file has it."""
        return {"mtp": draw_block(student.spec, seed)} if self.new else None

    def open_model(self, student: Checkpoint, compute: Compute, shared: Model | None) -> Model:
        """Makes a model of the teacher's arrays, with shapes of the block."""
        assert shared is not None
        _log.info("student: the block that drafts, with the teacher's arrays")
        return attach_block(shared, student.spec, {"mtp": shape_block(student.spec)})

    def list_backward(self, spec: ArchSpec) -> ArchSpec:
        """Returns the architecture with the one layer of the block, for each draft of a pass."""
        return _repeat_attention(spec, 1 + len(self.later))

    def count_flops(self, spec: ArchSpec, length: int, trained: float) -> float:
        """Counts the layers without the head, and the block both ways; the head has no gradient."""
        leaves = jax.tree.leaves(shape_block(spec))
        products = sum(x.size for x in leaves if len(x.shape) > 2)
        scores = 2.0 * spec.num_heads * spec.head_dim * length
        block = 3 * (2.0 * products + scores) + 2.0 * spec.vocab_size * spec.hidden_size
        return spec.forward_flops(length) + block * (1 + len(self.later))


@dataclasses.dataclass(frozen=True)
class _Tapped(_Drafting):
    """Trains a head that reads inner states of its target, which runs once a step."""

    sizes: Any = None  # the student's, once settled: `HeadSizes` or `EagleSizes`

    functions: ClassVar[type[TappedFunctions]]
    maker: ClassVar[str]
    conflicts: ClassVar[Mapping[str, str]] = {
        **_Drafting.conflicts,
        "trainable": say_why("optim.trainable", "student.block"),
    }
    title: ClassVar[str] = "the head that drafts, float32"

    def settle(self, student: Model) -> Any:
        """Takes the head's sizes; raises `UserError` for a student without such a head."""
        if not isinstance(student.functions, self.functions):
            raise UserError(
                f"{student.name}: found no head that drafts and form={type(self).__name__}(); "
                f"expected a student of {self.maker}."
            )
        return dataclasses.replace(self, sizes=student.functions.shape.sizes)

    def begin_parts(
        self, kind: TeacherKind, teacher: RunningTeacher, batch: Batch, parts: int
    ) -> tuple[TeacherKind, Batch]:
        """Computes nothing before: each part's pass runs the teacher."""
        return kind, batch

    def check_teachers(self, student: Model, teachers: Sequence[Model]) -> None:
        """Raises `UserError` for a teacher that is not the model that the head drafts for."""
        own = list(map(id, jax.tree.leaves(self.base(student.params))))
        for teacher in teachers:
            if list(map(id, jax.tree.leaves(teacher.params))) != own:
                raise UserError(
                    f"{teacher.name}: found a teacher that is not the model that the head drafts "
                    "for; expected the one that was given to kdjax.make_head or kdjax.load_head: "
                    "its states teach the head."
                )

    @property
    def record(self) -> dict[str, Any]:
        """The head's sizes, for `formats.saved`."""
        assert self.sizes is not None
        return {self.part: self.sizes._asdict()}

    def open(self, student: Checkpoint) -> Checkpoint:
        """Returns the student; raises `UserError` for one that such a head cannot draft for."""
        self._refuse_adapters(student, self.part)
        check_tapped(student.spec, student)
        return student

    def shape(self, student: Checkpoint) -> HeadShape:
        """The shape of the head that the config describes."""
        return self._shape_like(student.spec)

    def draw(self, student: Checkpoint, seed: int) -> Params:
        """Draws a new head."""
        return {self.part: draw_head(self.shape(student), seed, student.read_unembedding)}

    def shapes(self, student: Checkpoint) -> Params:
        """Shapes of the head."""
        return {self.part: trace_head(self._shape_like(student.spec), Compute())[1]}

    def open_model(self, student: Checkpoint, compute: Compute, shared: Model | None) -> Model:
        """Makes a model of the teacher's arrays, with shapes of the head."""
        assert shared is not None
        _log.info("student: a head that drafts, with the teacher's arrays")
        return attach_head(shared, self.shape(student), self.shapes(student))

    def list_backward(self, spec: ArchSpec) -> ArchSpec:
        """Returns the architecture with the layers of the head, which attend, without gates."""
        layers = _repeat_attention(spec, self._count_passes(spec))
        return dataclasses.replace(layers, gated=False)

    def _shape_like(self, spec: ArchSpec) -> HeadShape:
        """The shape of a head for a target of this architecture."""
        raise NotImplementedError

    def _count_passes(self, spec: ArchSpec) -> int:
        """Layers that a step runs both ways."""
        return self._shape_like(spec).spec.num_layers

    def count_taps(self, spec: ArchSpec) -> int:
        """Numbers a position of all taps."""
        return len(self._shape_like(spec).taps) * spec.hidden_size


@dataclasses.dataclass(frozen=True)
class DraftHead(_Tapped):
    """Trains the DSpark or DFlash head of a student (`kdjax.make_head`); all else is the base.

    In each step the blocks of a row lie side by side from a place on that is drawn anew, so that
    each token is predicted by one slot. A slot has no weight if its block's anchor is in another
    document or in no answer, or if the row's end cuts the block: a server's are complete.
    Others weigh exp(-k / `decay`), k drafts after the first of a pass, in training only. The loss
    of the head's confidence, the chance of a slot's draft to be accepted, weighs `confidence`. Such
    a student has this form by default.
    """

    decay: float = 4.0
    confidence: float = 1.0  # type: ignore[misc]
    block: int = 0  # slots, the student's, once settled
    lead: int = 0  # slots before the first that predicts, likewise
    asked: DSparkConfig | None = dataclasses.field(default=None, compare=False)  # a run's settings

    part: ClassVar[str] = HEAD
    logit_bytes: ClassVar[int] = 8  # by XLA's account on a CPU
    functions: ClassVar[type[TappedFunctions]] = DSparkFunctions
    maker: ClassVar[str] = "kdjax.make_head"

    def settle(self, student: Model) -> "DraftHead":
        """Takes the head's slots too; raises `UserError` also for settings that cannot be."""
        settled = super().settle(student)
        assert isinstance(student.functions, DSparkFunctions)
        if not self.decay > 0:
            raise UserError(f"found decay={self.decay}; expected a number above 0.")
        if not self.confidence >= 0:
            raise UserError(f"found confidence={self.confidence}; expected 0 or a number above.")
        shape = student.functions.shape
        weight = self.confidence if shape.confident else 0.0
        return dataclasses.replace(settled, block=shape.block, lead=shape.lead, confidence=weight)

    def mark(self, batch: dict[str, Array], step: Array | None) -> dict[str, Array]:
        """Adds the places of `anchors`, int32 `[B, T]`, and weighs slots."""
        rows, length = batch["tokens"].shape
        first = jnp.zeros((rows,), jnp.int32)
        if step is not None:
            key = jax.random.fold_in(jax.random.key(0), step)
            first = jax.random.randint(key, (rows,), 0, self.block, jnp.int32)
        anchors = place_anchors(first, length, self.block)
        weights, segments = batch["weights"], batch["segment_ids"]
        # Whether a place's token is part of an answer: it was a label with a weight.
        told = (weights[:, :-1] != 0) & (segments[:, :-1] == segments[:, 1:])
        told = jnp.pad(told, ((0, 0), (1, 0)))
        # Anchors of the slots that predict the token after each place, and of which draft it is.
        begun = place_anchors(first - self.lead, length, self.block) + self.lead
        drafts = jnp.arange(length, dtype=jnp.int32)[None] - begun
        at = jnp.clip(begun, 0, length - 1)
        whole = (begun >= 0) & (begun <= length - self.block)
        begins = jnp.take_along_axis(told, at, axis=1) & whole
        inside = begins & (jnp.take_along_axis(segments, at, axis=1) == segments) & (drafts >= 0)
        if step is not None:
            weights = weights * jnp.exp(-drafts.astype(jnp.float32) / self.decay)
        return batch | {"anchors": anchors, "weights": jnp.where(inside, weights, 0)}

    def run(self, student: ModelFunctions, params: Params, batch: Mapping[str, Array]) -> Runs:
        """Hidden states of the slots at each token, and of the target, which is the teacher."""
        assert isinstance(student, DSparkFunctions)
        target, slots = student.hidden_and_blocks(params, *list_columns(batch), batch["anchors"])
        return Runs(slots, (), target, student.judge_slots(params, slots))

    def shape(self, student: Checkpoint) -> DSparkShape:
        """The shape of the head that the config describes."""
        return self._shape_like(student.spec, choose_mask(student.tokenizer))

    def _shape_like(self, spec: ArchSpec, mask: int = 0) -> DSparkShape:
        """The shape of a head for a target of this architecture; no size depends on `mask`."""
        asked = self.asked
        assert asked is not None
        sizes = HeadSizes(asked.layers, asked.slots, asked.rank, mask, (), asked.confidence > 0)
        return sizes.shape(spec)

    def count_columns(self, spec: ArchSpec) -> tuple[int, int]:
        """Columns of the target's unembedding, and of the bias, which alone have a gradient."""
        rank = self._shape_like(spec).rank
        return spec.hidden_size + rank, rank

    def keep_more(self, spec: ArchSpec) -> int:
        """Counts the taps, what joins them, and each layer's keys and values of the text."""
        layers = self._shape_like(spec).spec.num_layers
        layer = 4 * spec.num_kv_heads * spec.head_dim  # keys, normed, turned; values
        return self.count_taps(spec) + 3 * spec.hidden_size + layers * layer

    def count_attention(self, spec: ArchSpec, length: int, usual: Size) -> Size:
        """Counts a block of queries' float32 scores four times: of the text, and of all slots.

        Rows of a single block keep the scores of each layer as well.
        """
        block = 4 * 4 * 2 * spec.num_heads * min(length, QUERY_BLOCK)
        return block + self.count_scores(spec, length, on_cpu=True)

    def count_scores(self, spec: ArchSpec, length: int, *, on_cpu: bool) -> Size:
        """Counts each layer's scores four times, of rows of a single block, on a CPU.

        On an H200 a plan without them was 0.1% below the peak, with them 20% above it.
        """
        layers = self._shape_like(spec).spec.num_layers * (length <= QUERY_BLOCK)
        return on_cpu * 4 * layers * 4 * 2 * spec.num_heads * min(length, QUERY_BLOCK)

    def count_flops(self, spec: ArchSpec, length: int, trained: float) -> float:
        """Counts the draft head both ways, and its unembedding; the target is the teacher."""
        shape = self._shape_like(spec)
        flat = _flatten(trace_head(shape, Compute())[1])
        products = sum(x.size for path, x in flat.items() if path[0] in ("fc", "blocks"))
        products += sum(flat["blocks", "attn", name, "weight"].size for name in ("k", "v"))
        scores = 4.0 * spec.num_heads * spec.head_dim * length * shape.spec.num_layers
        columns, with_gradient = self.count_columns(spec)
        logits = 2.0 * spec.vocab_size * (2 * columns + with_gradient)
        return 3 * (2.0 * products + scores) + logits


@dataclasses.dataclass(frozen=True)
class DraftEagle(_Tapped):
    """Trains the EAGLE-3 head of a student (`kdjax.make_eagle`); all else is the base.

    A pass of drafts begins at every token but a document's first, which has no state before it.
    Each draft after a pass's first reads the head's own state, as it does in use; `later` are the
    weights of their losses, which are added to the first's. Such a student has this form by
    default.
    """

    later: tuple[float, ...] = (0.8, 0.64)  # type: ignore[misc]
    # In a run: how many ids the head drafts, 0 for all, and which, once the text is read.
    asked: int = dataclasses.field(default=0, compare=False)
    ids: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    part: ClassVar[str] = EAGLE
    functions: ClassVar[type[TappedFunctions]] = EagleFunctions
    maker: ClassVar[str] = "kdjax.make_eagle"
    logit_bytes: ClassVar[int] = 8  # by XLA's account on a CPU

    def settle(self, student: Model) -> "DraftEagle":
        """See `_Tapped.settle`; raises `UserError` also for weights that `check_drafts` refuses."""
        check_drafts(self.later)
        return super().settle(student)

    def mark(self, batch: dict[str, Array], step: Array | None) -> dict[str, Array]:
        """Takes the weight of each document's first token, where no pass begins."""
        return batch | {"weights": self.weigh_later(batch, 0)}

    def weigh_later(self, batch: Mapping[str, Array], number: int) -> Array:
        """See `Form.weigh_later`: a pass reads the state before the token that it begins at."""
        return super().weigh_later(batch, number + 1)

    def run(self, student: ModelFunctions, params: Params, batch: Mapping[str, Array]) -> Runs:
        """States of a pass's drafts at each token, and of the target, which is the teacher."""
        assert isinstance(student, EagleFunctions)
        runs = student.draft_runs(params, *list_columns(batch), drafts=1 + len(self.later))
        target, first, *later = jnp.moveaxis(runs, 1, 0)
        return Runs(first, tuple(later), target)

    def adapt(self, kind: TeacherKind) -> TeacherKind:
        """See `Form.adapt`: of some ids the head learns from the teacher's logits of these."""
        return OfSomeIds(kind, self.sizes.ids) if self.sizes.ids else kind

    def read_text(self, tokens: np.ndarray, mask: np.ndarray, real: int) -> "DraftEagle":
        """Chooses the ids that are most often a target, in their order.

        Raises `UserError` for more ids than there are.
        """
        if self.asked > real:
            raise UserError(
                f"found student.draft_ids={self.asked}; expected at most {real}, the model's ids, "
                "or 0 for all of them."
            )
        counts, part = np.zeros(real, np.int64), 4096
        for begin in range(0, len(tokens) if self.asked else 0, part):
            rows, told = (x[begin : begin + part] for x in (tokens, mask))
            counts += np.bincount(rows[told != 0], minlength=real)[:real]
        ids = np.sort(np.argsort(-counts, kind="stable")[: self.asked])
        if self.asked:
            share = counts[ids].sum() / max(counts.sum(), 1)
            _log.info("the head drafts %d ids, %.2f%% of the text", len(ids), 100 * share)
        return dataclasses.replace(self, ids=tuple(ids.tolist()))

    def _shape_like(self, spec: ArchSpec) -> EagleShape:
        return EagleSizes((), self.ids or tuple(range(self.asked))).shape(spec)

    def count_ids(self, width: int) -> int:
        """See `Form.count_ids`."""
        return self.asked or width

    def count_columns(self, spec: ArchSpec) -> tuple[int, int]:
        """Columns of the unembedding, of some ids the head's own."""
        return spec.hidden_size, spec.hidden_size if self.asked else 0

    def _count_passes(self, spec: ArchSpec) -> int:
        return 1 + len(self.later)

    def keep_more(self, spec: ArchSpec) -> int:
        """Counts the taps and, for each draft, states and tokens, shifted, normed and joined."""
        return self.count_taps(spec) + 9 * spec.hidden_size * self._count_passes(spec)

    def count_attention(self, spec: ArchSpec, length: int, usual: Size) -> Size:
        """Counts a block of queries' float32 scores four times.

        Rows of a single block keep the scores of each draft three times as well.
        """
        times = 4 + 3 * self._count_passes(spec) * (length <= QUERY_BLOCK)
        return 4 * times * spec.num_heads * min(length, QUERY_BLOCK)

    def count_scores(self, spec: ArchSpec, length: int, *, on_cpu: bool) -> Size:
        """Counts each draft's scores four times, the last's three, of rows of a single block."""
        times = (4 * self._count_passes(spec) - 1) * (length <= QUERY_BLOCK)
        return 4 * times * spec.num_heads * min(length, QUERY_BLOCK)

    def count_flops(self, spec: ArchSpec, length: int, trained: float) -> float:
        """Counts the drafts both ways, and their unembedding; the target is the teacher."""
        flat = _flatten(trace_head(self._shape_like(spec), Compute())[1])
        layer = sum(x.size for path, x in flat.items() if path[0] == "blocks")
        scores = 2.0 * spec.num_heads * spec.head_dim * length
        columns, with_gradient = self.count_columns(spec)
        logits = 2.0 * self.count_ids(spec.vocab_size) * (2 * columns + with_gradient)
        draft = 3 * (2.0 * layer + scores) + logits
        return 6.0 * flat["fc", "weight"].size + draft * self._count_passes(spec)


@dataclasses.dataclass(frozen=True)
class Rounded(Form):
    """The student rounded to the block types of a GGUF file; gradients go straight through.

    `text` is a recipe of `export_gguf`, a file of types, or types by name
    (`recipes.split_types`). A student with adapters settles it to a `RoundedSum`. The exporter's
    search fits the scales of every block once, at the start; `imatrix`, a file of
    llama-imatrix, weights the errors of this fit. `start` is a file of `formats.start`, whose
    masters and scales a run begins with in place of the student's numbers and a fit.
    Each step rounds to the integers of these scales, which are equal on every backend. State and
    checkpoints have the scales, and an export writes the integers that belong to them.

        step = kdjax.make_step(student, teacher, loss, optimizer, form=kdjax.Rounded("q4_0"))
    """

    text: str
    imatrix: str = ""
    start: str = ""
    types: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()  # paths; types of their layers
    # Weights of each input's errors in a fit, for some paths: float32 [L, 1, inputs].
    importance: Mapping[tuple[str, ...], np.ndarray] = dataclasses.field(
        default_factory=dict, compare=False
    )

    rounds: ClassVar[bool] = True
    differs: ClassVar[bool] = True

    @property
    def record(self) -> dict[str, Any]:
        """The types by name, for `formats.saved`."""
        types = {"/".join(path): list(types) for path, types in self.types}
        return super().record | {"quantize": self.text, "types": types}

    def settle(self, student: Model) -> "Rounded":
        """Chooses the types of the student's parameters; returns a `RoundedSum` for adapters.

        Raises `UserError` for types that cannot be trained, for a custom module, for a block or
        head that drafts, for a float8 base, and for importances of another model.
        """
        inner, rounded = choose_form(None, student), self.choose_types(student.spec)
        if isinstance(inner, _Drafting):
            raise UserError(
                f"found form=Rounded({self.text!r}) for a block or head that drafts; expected "
                "none: it trains as numbers next to layers that stay as they are stored. Leave it "
                "out."
            )
        if not isinstance(inner, Adapters):
            return rounded
        leaves = jax.tree.leaves(student.params, is_leaf=lambda x: isinstance(x, Scaled))
        if any(isinstance(x, Scaled) for x in leaves):
            raise UserError(
                f"{student.name}: found a base in float8 to round with its adapters; expected one "
                'loaded with weights="packed" or "dense", dtype="float32".'
            )
        given = {x.name: getattr(rounded, x.name) for x in dataclasses.fields(Rounded)}
        functions: Any = student.functions
        return RoundedSum(**given, lora=inner.lora, compute=functions.compute.dtype)

    def choose_types(self, spec: ArchSpec | None) -> "Rounded":
        """Returns the form with types and importances for a student of this architecture."""
        if spec is None:
            raise UserError(
                f"found form=Rounded({self.text!r}) for a custom module; expected a student "
                "that kdjax knows the architecture of: block types are chosen by the names of its "
                "parameters."
            )
        mixture = Mixture.named(self.text, spec)
        weighed = [path for path, kinds in mixture.types if not WEIGHED.isdisjoint(kinds)]
        importance = spread_importance(self.imatrix, spec, weighed) if self.imatrix else {}
        return dataclasses.replace(self, types=mixture.types, importance=importance)

    def learns(self, params: Params) -> bool:
        """True: it learns to predict in spite of its rounding."""
        return True

    def begin(self, base: Params, masters: Params) -> Kept:
        """Fits the scales."""
        kept = {}
        for path, types in self.types:
            weights = self.importance.get(path)
            for dtype, layers in parts_by_type(types):

                def fit(x: Array, weights: Any, dtype: str = dtype) -> Scales:
                    return fit_rows(x, dtype, weights)

                part = None if weights is None else _take(jnp.asarray(weights), layers)
                kept[*path, dtype] = self._map(fit, path, layers, (base, masters), part)
        return unflatten_dict(kept)

    def _map(
        self,
        function: Callable[[Array, Any], Any],
        path: tuple[str, ...],
        layers: tuple[int, ...] | None,
        given: tuple[Params, Params],
        parts: Any,
    ) -> Any:
        """Calls a function of a matrix's numbers, float32, in these layers, and of `parts`.

        `given` are base and masters; `parts` are arrays of these layers, stacked, as results are.
        """
        return function(_take(_flatten(given[1])[path], layers), parts)

    def complete(self, masters: Params, scales: Mapping[tuple[str, ...], Scales]) -> Kept:
        """Adds the scales that `models.gptq.round_model` left out, such as the embedding's."""
        rest = tuple((path, types) for path, types in self.types if (*path, types[0]) not in scales)
        fitted = jax.jit(dataclasses.replace(self, types=rest).begin)({}, masters)
        return unflatten_dict({**_flatten(fitted), **scales})

    def see(self, base: Params, kept: Kept, masters: Params) -> Params:
        """Returns the numbers that the blocks decode to."""

        def round_rows(dtype: str, scales: Scales, x: Array) -> Array:
            return decode_fields(encode_fields(x, dtype, scales), dtype).astype(x.dtype)

        return self._replace(round_rows, kept, masters)

    def pull(
        self,
        base: Params,
        kept: Kept,
        masters: Params,
        seen: Params,
        grads: Params,
        frozen: frozenset[str],
    ) -> Params:
        """Passes gradients straight through, unless they drive cut numbers further out of range."""
        grads = self._replace(_stop_outwards, kept, grads, masters, seen)
        return super().pull(base, kept, masters, seen, grads, frozen)

    def place(self, kept: Kept, seen: Any) -> Any:
        """Returns shardings of the scales, by their rows; blocks of a row stay together."""
        flat = _flatten(seen)
        places = {}
        for path, scales in _flatten(kept).items():
            rows: NamedSharding = flat[path[:-1]]
            place = NamedSharding(rows.mesh, P(*rows.spec[:-1]))
            places[path] = jax.tree.map(lambda _, place=place: place, scales)
        return unflatten_dict(places)

    def pack(self, base: Params, kept: Kept, masters: Params) -> Params:
        """Makes the exported student: blocks, as a packed model has them."""

        def encode(dtype: str, x: Array, scales: Scales) -> tuple[Array, ...]:
            return encode_fields(x, dtype, scales)

        return self._replace_all(encode, stack_blocks, base, kept, masters)

    def _replace_all(
        self,
        change: Callable[[str, Array, Scales], Any],
        join: Callable[[Any], Any],
        base: Params,
        kept: Kept,
        masters: Params,
    ) -> Params:
        """Changes rounded matrices; `join` joins their parts, each a type, layers and a result."""
        scales, made = _flatten(kept), self._list_exact(base, masters)
        for path, types in self.types:
            parts = []
            for dtype, layers in parts_by_type(types):
                run, of = functools.partial(change, dtype), scales[*path, dtype]
                found = self._map(run, path, layers, (base, masters), of)
                parts.append((dtype, layers, found))
            made[path] = join(parts)
        return unflatten_dict(made)

    def _list_exact(self, base: Params, masters: Params) -> dict[tuple[str, ...], Any]:
        """Lists the numbers of the parameters that are not rounded."""
        rounded = dict(self.types)
        return {path: x for path, x in _flatten(masters).items() if path not in rounded}

    def compile(self, function: Callable[..., Any], places: Any = None) -> Callable[..., Any]:
        """Compiles the function to one program."""
        return jax.jit(function, out_shardings=places)

    def open(self, student: Checkpoint) -> Checkpoint:
        """Returns the student; raises `UserError` also for types that it cannot have."""
        student = super().open(student)
        Rounded(self.text).choose_types(student.spec)
        return student

    def draw(self, student: Checkpoint, seed: int) -> Params | None:
        """Reads the masters of `start`, if there is one."""
        if not self.start:
            return super().draw(student, seed)
        return self._check(read_masters(self.start), self.shapes(student), "masters")

    def read_kept(self, shapes: Kept) -> Kept:
        """Reads the scales of `start`; None without one."""
        if not self.start:
            return None
        return self._check(read_scales(self.start), shapes, "scales")

    def _check(self, found: Mapping[tuple[str, ...], Any], shapes: Params, what: str) -> Params:
        """Returns the tree of what a start has; raises `UserError` if it is of other shapes."""
        has, needs = (
            jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (found, _flatten(shapes))
        )
        if has != needs:
            raise UserError(
                f"{self.start}: found {what} of another model or of other block types; expected "
                "the student's, of the types of student.quantize. Make it anew: kdjax shrink."
            )
        return unflatten_dict(found)

    def shape_seen(self, student: Checkpoint, compute: DTypeLike) -> Params:
        """Shapes of all parameters, as rounded numbers, float32."""
        return functional(student.spec, Compute())[1]

    def count_kept(self, student: Checkpoint) -> int:
        """Bytes of the scales."""
        plain = Rounded(self.text).choose_types(student.spec)
        return count_bytes(jax.eval_shape(plain.begin, {}, functional(student.spec, Compute())[1]))

    def _replace(self, change: Callable[..., Array], kept: Kept, *trees: Params) -> Params:
        """Changes the rounded matrices of the first tree, given these matrices of all trees.

        None, in place of a frozen matrix's gradient, stays None.
        """
        flats, scales = [_flatten(tree) for tree in trees], _flatten(kept)
        changed = dict(flats[0])
        for path, types in self.types:
            arrays = [flat[path] for flat in flats]
            parts = parts_by_type(types) if arrays[0] is not None else []
            for dtype, layers in parts:
                part = change(dtype, scales[*path, dtype], *(_take(x, layers) for x in arrays))
                if len(parts) > 1:
                    part = changed[path].at[jnp.asarray(layers)].set(part)
                changed[path] = part
        return unflatten_dict(changed)


def _stop_outwards(dtype: str, scales: Scales, g: Array, x: Array, y: Array) -> Array:
    """The gradient, 0 where it drives a number `x` further beyond what cut it."""
    outwards = is_cut(x, y, dtype, scales) & ((x - y) * g < 0)  # a step goes against g
    return jnp.where(outwards, 0, g)


@dataclasses.dataclass(frozen=True)
class RoundedSum(Rounded, Adapters):
    """The sum of a frozen base and its adapters, rounded: adapters under rounding.

    A layer is added up and rounded at a time, so that no stack of layers is float32 numbers. The
    forward pass sees rounded matrices in `compute`, the dtype of its products, in which it would
    take them anyway, and their gradients have this dtype. A file has the blocks
    that `Rounded` would make of the sum.
    """

    compute: DTypeLike = "float32"

    low_rank: ClassVar[bool] = False
    reuses: ClassVar[bool] = True

    def see(self, base: Params, kept: Kept, masters: Params) -> Params:
        """Returns the numbers that the blocks decode to; what is not rounded is float32."""

        def round_rows(dtype: str, x: Array, scales: Scales) -> Array:
            return decode_fields(encode_fields(x, dtype, scales), dtype, self.compute)

        def join(parts: Sequence[tuple[str, Any, Array]]) -> Array:
            return _join_layers([(layers, x) for _, layers, x in parts])

        return self._replace_all(round_rows, join, base, kept, masters)

    def pull(
        self,
        base: Params,
        kept: Kept,
        masters: Params,
        seen: Params,
        grads: Params,
        frozen: frozenset[str],
    ) -> Params:
        """Passes gradients straight through to A and B, but where they drive cut numbers further.

        The numbers of float32 tell what is cut: seen ones may have fewer bits.
        """
        changes, scales = _flatten(masters), _flatten(kept)
        given, pulled, rounded = _flatten(grads), {}, dict(self.types)
        assert self.lora is not None
        for path in self.lora.targets:
            parts = []
            for dtype, layers in parts_by_type(rounded.get(path, ("",))):

                def pull_rows(x: Array, parts: Any, dtype: str = dtype) -> tuple[Array, Array]:
                    scales, g, a, b = parts
                    if dtype:
                        y = decode_fields(encode_fields(x, dtype, scales), dtype)
                        g = _stop_outwards(dtype, scales, g, x, y)
                    return self.pull_one(g, a, b)

                arrays = given[path], changes[*path, "a"], changes[*path, "b"]
                of = scales.get((*path, dtype)), *(_take(x, layers) for x in arrays)
                parts.append((layers, self._map(pull_rows, path, layers, (base, masters), of)))
            for number, name in enumerate("ab"):
                pulled[*path, name] = _join_layers([(at, pair[number]) for at, pair in parts])
        return unflatten_dict(pulled)

    def _list_exact(self, base: Params, masters: Params) -> dict[tuple[str, ...], Any]:
        """Adds up what is not rounded."""
        changes, rounded = _flatten(masters), dict(self.types)
        return {
            path: self.add(path, leaf, changes)
            for path, leaf in _flatten(base).items()
            if path not in rounded
        }

    def _map(
        self,
        function: Callable[[Array, Any], Any],
        path: tuple[str, ...],
        layers: tuple[int, ...] | None,
        given: tuple[Params, Params],
        parts: Any,
    ) -> Any:
        """See `Rounded`; adds up a layer at a time."""
        base, masters = given
        leaf, changes = _flatten(base)[path], _flatten(masters)
        if path[0] not in STACKS:
            return function(self.add(path, leaf, changes), parts)
        own = {name: x for name, x in changes.items() if name[:-1] == path}

        def run(one: tuple[Array, Any]) -> Any:
            place, parts = one
            change = {name: x[place][None] for name, x in own.items()}
            numbers = self.add(path, read_layer(leaf, place)[None], change)
            found = function(numbers, jax.tree.map(lambda x: x[None], parts))
            return jax.tree.map(lambda x: x[0], found)

        places = jnp.arange(leaf.shape[0]) if layers is None else jnp.asarray(layers)
        return jax.lax.map(run, (places, parts))

    def shape_seen(self, student: Checkpoint, compute: DTypeLike) -> Params:
        """Shapes of all parameters, the rounded ones in the dtype of products."""
        flat = _flatten(functional(student.spec, Compute())[1])
        rounded = dict(Rounded(self.text).choose_types(student.spec).types)
        cast = {p: _cast_shapes(x, compute) if p in rounded else x for p, x in flat.items()}
        return unflatten_dict(cast)

    def list_frozen(self, base: Params, masters: Params) -> frozenset[str]:
        """Lists all paths except the matrices that have adapters."""
        assert self.lora is not None
        seen = jax.eval_shape(self.add_up, base, masters)
        adapted = {"/".join(path) for path in self.lora.targets}
        return frozenset(path for path in list_paths(seen) if path not in adapted)

    def add_up(self, base: Params, masters: Params) -> Params:
        """Adds the changes to the base's numbers, all at once."""
        changes = _flatten(masters)
        flat = {path: self.add(path, leaf, changes) for path, leaf in _flatten(base).items()}
        return unflatten_dict(flat)

    def add(self, path: tuple[str, ...], leaf: Any, changes: Mapping[Any, Array]) -> Array:
        """Adds a matrix's change to its numbers, float32, with equal bits on every backend."""
        assert self.lora is not None
        numbers = read_numbers(leaf).astype(jnp.float32)
        if path not in self.lora.targets:
            return numbers
        return add_change(numbers, changes[*path, "a"], changes[*path, "b"], self.lora.scale)

    def pull_one(self, g: Array, a: Array, b: Array) -> tuple[Array, Array]:
        """Computes scale B^T G for A and scale G A^T for B, with the gradient G of matrices."""
        assert self.lora is not None
        g = self.lora.scale * g.astype(jnp.float32)
        precision = jax.lax.Precision.HIGHEST
        of_a = jnp.einsum("lor,loi->lri", b, g, precision=precision)
        return of_a, jnp.einsum("loi,lri->lor", g, a, precision=precision)

    def spread(self, base: Params, masters: Params, mesh: Mesh) -> Any:
        """Returns shardings by the rules of dense parameters."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), base)
        seen = jax.eval_shape(self.add_up, shapes, self._shape_masters(shapes))
        return parameter_shardings(seen, mesh)

    def _shape_masters(self, base: Params) -> Params:
        assert self.lora is not None
        flat, shapes = _flatten(base), {}
        for path in self.lora.targets:
            layers, outer, inner = flat[path].shape
            for part, shape in (("a", (self.lora.rank, inner)), ("b", (outer, self.lora.rank))):
                shapes[*path, part] = jax.ShapeDtypeStruct((layers, *shape), jnp.float32)
        return unflatten_dict(shapes)

    def send_as(self, dtype: DTypeLike | None) -> DTypeLike | None:
        """Returns the dtype of the products."""
        return dtype

    def base_dtype(self, compute: DTypeLike) -> DTypeLike:
        """Returns float32: an export adds the changes to the exact numbers of the file."""
        return "float32"

    def _loops(self, compute: Compute) -> bool:
        return compute.scan

    def count_flops(self, spec: ArchSpec, length: int, trained: float) -> float:
        """Counts a full fine-tune: gradients of matrices are formed."""
        return Form.count_flops(self, spec, length, 1.0)

    def shape_gradients(self, student: Checkpoint, compute: DTypeLike) -> Params:
        """Shapes of the adapted matrices: their gradients make the gradients of A and B."""
        shapes = _flatten(_cast_shapes(functional(student.spec, Compute())[1], compute))
        return unflatten_dict({path: shapes[path] for path in self.choose_lora(student).targets})


def _join_layers(parts: Sequence[tuple[tuple[int, ...] | None, Array]]) -> Array:
    """Joins the layers of a stack, of which each part has some; None: all."""
    (layers, first), *others = parts
    if layers is None:
        return first
    total = sum(len(at or ()) for at, _ in parts)
    joined = jnp.zeros((total, *first.shape[1:]), first.dtype)
    for at, part in ((layers, first), *others):
        joined = joined.at[jnp.asarray(at)].set(part)
    return joined


def _cast_shapes(tree: Any, dtype: DTypeLike) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), tree)


# Functions of a student that is a part which drafts, and its form.
_PARTS: Mapping[type, type[Form]] = {
    DraftFunctions: DraftBlock,
    DSparkFunctions: DraftHead,
    EagleFunctions: DraftEagle,
}


def choose_form(form: Form | None, student: Model) -> Form:
    """Settles a form; None chooses the form that the student has by default.

    By default a student with adapters trains these, a student with a drafting block trains the
    block, and any other student trains all of its parameters.
    """
    if form is not None and not isinstance(form, Form):
        raise UserError(f"found form={form!r}; expected one such as kdjax.Rounded('q4_0').")
    if form is None:
        form = PLAIN
    if form is PLAIN and Lora.of_params(student.params) is not None:
        form = Adapters()
    parts = (kind for kind in _PARTS if isinstance(student.functions, kind))
    if form is PLAIN and (kind := next(parts, None)):
        form = _PARTS[kind]()
    return form.settle(student)


def form_of(student: StudentConfig) -> Form:
    """Returns the form that a config requests, before a student settles it."""
    if student.block == DSPARK:
        asked = student.dspark
        return DraftHead(decay=asked.decay, confidence=asked.confidence, asked=asked)
    if student.block == EAGLE3:
        return DraftEagle(later=split_drafts(student.later_drafts), asked=student.draft_ids)
    if student.block:
        return DraftBlock(new=student.block == NEW, later=split_drafts(student.later_drafts))
    if not student.quantize:
        return Adapters(asked=student.lora) if student.lora.rank else PLAIN
    if student.lora.rank:
        return RoundedSum(student.quantize, student.imatrix, asked=student.lora)
    return Rounded(student.quantize, student.imatrix, start=student.start)


def check_form(form: Form, student: Model, **settings: Any) -> None:
    """Raises `UserError` for settings of a step that conflict with the form.

    Raises it also for weights that no gradient reaches: packed ones, or float8.
    """
    for name, value in settings.items():
        if value and name in form.conflicts:
            raise UserError(
                f"found {name}={value!r} for a student of form {type(form).__name__}; expected "
                f"none: {form.conflicts[name]}. Leave it out."
            )
    dtypes = {x.dtype for x in jax.tree.leaves(form.masters(student.params))}
    odd = {t for t in dtypes if t.itemsize == 1 or not jnp.issubdtype(t, jnp.floating)}
    if odd:
        held = ", ".join(sorted(name_numbers(t) for t in odd))
        raise UserError(
            f"the student {student.source} holds {held} weights, which no gradient reaches. "
            'Load it with dtype="float32" and weights="dense".'
        )


def _repeat_attention(spec: ArchSpec, count: int) -> ArchSpec:
    """The architecture of `count` layers like its first one of attention, and of no others."""
    attends = next(layer for layer in spec.layers if not layer.delta)
    return dataclasses.replace(
        spec, layers=(attends,) * count, delta_key_heads=0, delta_value_heads=0, drafts=0
    )


def _flatten(tree: Params) -> dict[tuple[str, ...], Any]:
    return flatten_dict(tree)


def _take(x: Array, layers: tuple[int, ...] | None) -> Array:
    return x if layers is None else x[jnp.asarray(layers)]


def spread_importance(
    file: str, spec: ArchSpec, paths: Iterable[tuple[str, ...]] | None = None
) -> dict[tuple[str, ...], np.ndarray]:
    """Stacks the means of a file of llama-imatrix by layer; leaves out paths that it lacks.

    A head's, `[1, inputs]`, are a tied embedding's as well. Without paths, of all matrices.

    Raises `UserError` for a file of another model.
    """
    read, found = read_importance(file), {}
    if paths is None:
        paths = dict.fromkeys(part.path for part in list_single_matrices(spec))
    embed, head = (name_of((part,), spec).gguf for part in ("embed", "head"))
    if not spec.tied:
        read.pop(embed, None)  # a tied model's
    elif head in read:
        read.setdefault(embed, read[head])
    fused = {part: whole for whole, x in list_fused(spec, gguf=True).items() for part, _ in x.parts}
    shapes = _flatten(functional(spec, Compute())[1])
    for path in paths if not spec.experts else ():
        layers = layers_of(path, spec)
        names = [name_of(path, spec).gguf.format(i=i) for i in ((0,) if layers is None else layers)]
        rows = [read.get(fused.get(name, name)) for name in names]
        given = [row for row in rows if row is not None]
        if not given:
            continue
        width = shapes[path].shape[-1]
        if len(given) < len(rows) or any(row.shape != (1, width) for row in given):
            widths = ", ".join(str(n) for n in sorted({row.shape[-1] for row in given}))
            raise UserError(
                f"{file}: found importances of {len(given)} layers for {names[0]} and its like, of "
                f"{widths} inputs; expected {len(rows)} of {width}: the file is of another model."
            )
        found[path] = given[0] if layers is None else np.stack(given)
    if not found:
        raise UserError(
            f"{file}: found no importance of a tensor whose scales are searched for; expected "
            "some. Leave it out, or name a type such as q4_k_m."
        )
    return found
