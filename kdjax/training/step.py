"""The training step and the evaluation step: pure functions, jitted in one place.

    batch --student--> hidden --chunk of logits--> loss and its gradient --optax--> next state
          --teacher--> hidden ----------^

The teacher's arrays are an argument: closed over, they would be folded into the program as
constants. They get no gradient, no optimizer slot, and are never donated.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.config import refusing
from kdjax.device.placement import Placement
from kdjax.device.sharding import (
    ROWS,
    batch_sharding,
    compiler_options,
    make_local_mesh,
    parameter_shardings,
    put_batch,
    replicated,
    row_shards,
    splits_state,
)
from kdjax.errors import UserError, check_type
from kdjax.losses.chunked import HeadSpec, LossSums, add_confidence
from kdjax.losses.kd import KDLoss, Schedules
from kdjax.losses.layers import ExtraSums, LayerLoss
from kdjax.losses.positions import EvalSums
from kdjax.losses.shared import SharedEvalSums
from kdjax.losses.topk import TopEvalSums
from kdjax.models.decoder import DecoderFunctions, ModelFunctions, Params
from kdjax.models.model import Model, check_model
from kdjax.models.shards import Spread, sum_rows
from kdjax.models.summary import describe_arrays, describe_step, make_table
from kdjax.models.weights import SomeRows
from kdjax.training.ahead import Ahead, place_shapes
from kdjax.training.batches import check_ids, complete_batch, read_ids, refuse_counted
from kdjax.training.forms import PLAIN, Form, check_form, choose_form
from kdjax.training.heldout import held_out
from kdjax.training.layer_losses import begin_projections, choose_losses, list_names, read_states
from kdjax.training.mixtures import Arrays, Teachers, name_arrays
from kdjax.training.pair import refuse_same, share_vocabulary
from kdjax.training.teachers import (
    SCHEDULED,
    Batch,
    Dense,
    NoTeacher,
    RunningTeacher,
    TeacherKind,
)
from kdjax.training.trainable import (
    TrainedLayers,
    find_frozen,
    keep_layers,
    leave_out,
    list_paths,
    put_back,
    train_only,
)
from kdjax.training.vocabulary import Vocabulary

Mean = tuple[Any, Any]  # a sum and its count, float32 scalars: divided last


@struct.dataclass
class TrainState:
    """Everything that is donated and saved, and nothing else: the teacher is not in it."""

    step: Any  # int32 scalar: optimizer steps done
    params: Params  # float32 masters
    opt_state: optax.OptState

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {text}" for name, text in self._describe().items())
        return f"<kdjax.{type(self).__name__} {parts}>"

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        return make_table(type(self).__name__, self._describe())

    def _describe(self) -> dict[str, str]:
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        step = describe_step(parts.pop("step"))
        return {"step": step} | {name: describe_arrays(tree) for name, tree in parts.items()}


@struct.dataclass(repr=False)
class FormedState(TrainState):
    """State of a student whose form has arrays in it, such as scales."""

    kept: Any


@struct.dataclass(repr=False)
class ExtraState(FormedState):
    """State of a step with layer losses: their projections, which the optimizer moves as well."""

    extra: Any  # by loss, then by layer: float32 [width, D]


_EXTRA = "_extra"  # name of the projections in the optimizer's tree, next to parameters


def _join(params: Params, extra: Params | None) -> Params:
    return params if extra is None else params | {_EXTRA: extra}


@struct.dataclass
class StepMetrics:
    """Figures of one optimizer step, or, added, of several: each a (sum, count), in nats."""

    loss: Mean  # the minimised loss, over trained positions
    ce: Mean
    divergence: Mean | None  # at the loss's temperature, without T^2; None: alpha is 1
    grad_norm: Mean  # of the masters' gradient, before clipping, over steps
    extra: dict[str, Mean] | None = None  # of layer losses, without their weights
    outside: Any = None  # counts for `refuse_counted`; None: the host has checked the batch

    def __add__(self, other: "StepMetrics") -> "StepMetrics":
        counts = [x.outside for x in (self, other) if x.outside is not None]
        pairs = (x.replace(outside=None) for x in (self, other))  # type: ignore[attr-defined]
        added = jax.tree.map(operator.add, *pairs)
        return added.replace(outside=sum(counts) if counts else None)

    def means(self) -> dict[str, float]:
        """Each sum divided by its count, and `tokens`, the trained positions; waits for them.

        Raises `UserError` if a batch on the devices had ids outside the vocabulary.
        """
        figures: StepMetrics = jax.device_get(self)
        refuse_counted(figures.outside)
        pairs = {field.name: getattr(figures, field.name) for field in dataclasses.fields(figures)}
        del pairs["outside"]
        pairs |= pairs.pop("extra") or {}
        means = {
            name: float(pair[0]) / max(float(pair[1]), 1.0) for name, pair in pairs.items() if pair
        }
        return means | {"tokens": float(figures.loss[1])}


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Arguments of `kd_step` that are no arrays; fixed for a run."""

    student: ModelFunctions
    # None: no teacher, the text alone trains; a tuple has one for each of several teachers.
    teacher: ModelFunctions | tuple[ModelFunctions | None, ...] | None
    kind: TeacherKind  # how the teacher reaches the loss
    head: HeadSpec
    tx: optax.GradientTransformation
    microbatches: int = 1  # parts of a batch, computed in turn, with equal sums
    reduce_dtype: str = "float32"  # of gradients while devices add them up
    # Shardings of student and teacher; None: one device, or the compiler splits them.
    spreads: tuple[Spread, Spread] | None = None
    form: Form = PLAIN  # of the student
    frozen: frozenset[str] = frozenset()  # paths of parameters that get no gradient
    some_layers: TrainedLayers = ()  # stacks of which some layers are trained
    extra: tuple[LayerLoss, ...] = ()  # losses of layers
    schedules: Schedules | None = None  # of the loss; `head.loss` has their last values
    shapes: Mapping[str, Any] | None = None  # of the teacher's arrays by path; None: not compared

    @property
    def asks_teacher(self) -> bool:
        """Whether a training step needs the teacher: at alpha = 1 only its figures would change."""
        return self.head.loss.has_divergence or self.schedules is not None


def _sum_over_devices(
    function: Callable[..., Any], spec: StepSpec, outs: Callable[[Any], Any]
) -> Callable[..., Any]:
    """`function(params, teacher, batch)` on each device's rows; sums are added once, at the end.

    Each device runs one device's program, kernels too. `outs` makes the specs of the sums from the
    specs of `params`.
    """
    if spec.spreads is None:
        return function
    of_student, of_teacher = spec.spreads
    placement = of_student.placement
    # On CPUs processes add in another order than the devices of one do.
    ordered, dtype = placement.platform == "cpu", jnp.dtype(spec.reduce_dtype)

    def run(params: Params, teacher: Params, batch: Batch) -> Any:
        def local(params: Params, teacher: Params, batch: Batch) -> Any:
            sums = function(of_student.mark(params), of_teacher.mark(teacher), batch)
            return sum_rows(sums, dtype, ordered=ordered)

        specs = of_student.tree(params)
        ins = specs, of_teacher.tree(teacher), ROWS
        return placement.map_rows(local, ins, outs(specs))(params, teacher, batch)

    return run


class _Forward(NamedTuple):
    """Results of a batch's forward pass, of which losses are made."""

    student: tuple[Array, Array | SomeRows]  # hidden states and head
    teacher: RunningTeacher
    # Sums of layer losses, or of the student's later predictions, by name; their weighted total.
    extra: tuple[dict[str, Array], Array] | None = None
    confidence: Array | None = None  # of the student's drafts; None without


def _run_both(
    spec: StepSpec, kind: TeacherKind, params: Params, teacher: Params, batch: Batch
) -> _Forward:
    """Runs the student, and the teacher's layers that losses read."""
    running = RunningTeacher(spec.teacher, teacher)
    columns = batch["tokens"], batch["segment_ids"], batch["positions"]
    if not spec.extra:
        hidden, later, target, confidence = spec.form.run(spec.student, params, batch)
        student, running = (hidden, spec.student.head(params)), running._replace(known=target)
        if not later:
            return _Forward(student, running, confidence=confidence)
        if kind.runs and not isinstance(spec.teacher, tuple):  # once, for all predictions
            running = running._replace(known=running.hidden(batch))
        sums = _sum_later(spec, kind, later, student[1], running, batch)
        return _Forward(student, running, sums, confidence)
    projections: Any = params.get(_EXTRA, {})
    params = {name: x for name, x in params.items() if name != _EXTRA}
    names, theirs = list_names(spec.extra, "student"), {}
    hidden, ours = read_states(spec.student, params, *columns, names=names)
    if names := list_names(spec.extra, "teacher"):
        both = read_states(spec.teacher, teacher, *columns, names=names)
        known, theirs = jax.lax.stop_gradient(both)
        running = running._replace(known=known)
    extra, total = {}, jnp.zeros((), jnp.float32)
    for loss in spec.extra:
        sums = loss.sum(ours, theirs, batch, projections.get(loss.name, {}))
        extra |= sums
        total += loss.weight * sum(sums.values())
    return _Forward((hidden, spec.student.head(params)), running, (extra, total))


def _sum_later(
    spec: StepSpec,
    kind: TeacherKind,
    later: tuple[Array, ...],
    head: Array | SomeRows,
    running: RunningTeacher,
    batch: Batch,
) -> tuple[dict[str, Array], Array]:
    """Sums the losses of the student's later predictions by name, and their weighted total."""
    extra, total = {}, jnp.zeros((), jnp.float32)
    for n, (weight, hidden) in enumerate(zip(spec.form.later, later, strict=True), 1):
        part = batch | {"weights": spec.form.weigh_later(batch, n)}
        loss = kind.sum_loss((hidden, head), running, part, spec.head).loss
        extra[f"draft_{n + 1}"] = loss
        total += weight * loss
    return extra, total


def _split_batch(batch: Batch, parts: int) -> Batch:
    """`[B, T]` to `[parts, B / parts, T]`, part m taking rows m, m + parts, ...

    Interleaved, so that every device keeps an equal share of each part.
    """
    return {k: v.reshape(-1, parts, *v.shape[1:]).swapaxes(0, 1) for k, v in batch.items()}


def kd_gradients(
    params: Params, teacher: Params, batch: Batch, spec: StepSpec
) -> tuple[Params, LossSums, Array]:
    """Gradients of the loss averaged over the batch's weighted positions; sums and their count.

    The count of the entire batch divides once, after all microbatches: a mean of microbatch means
    would weigh positions of short microbatches more. Frozen parameters have None.
    """
    sum_gradients = functools.partial(_sum_gradients, spec=spec)
    sum_gradients = _sum_over_devices(
        sum_gradients, spec, lambda specs: (leave_out(specs, spec.frozen), P(), P())
    )
    grads, sums, count = sum_gradients(params, teacher, batch)
    count = count.astype(jnp.float32)
    grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), grads)
    grads = keep_layers(grads, spec.some_layers)
    return grads, sums, count


def _sum_gradients(
    params: Params, teacher: Params, batch: Batch, *, spec: StepSpec
) -> tuple[Params, LossSums, Array]:
    """Sums over the positions of one device: of gradients, of figures, and their count, int32."""
    kind = spec.kind if spec.asks_teacher else NoTeacher()
    # With layer losses a packed teacher runs, and is decoded, once a part.
    if spec.microbatches > 1 and not list_names(spec.extra, "teacher"):
        running = RunningTeacher(spec.teacher, teacher)
        kind, batch = spec.form.begin_parts(kind, running, batch, spec.microbatches)

    trained = leave_out(params, spec.frozen)

    def sum_loss(trained: Params, part: Batch) -> tuple[Array, LossSums]:
        seen = put_back(trained, params)
        ran = _run_both(spec, kind, seen, teacher, part)
        sums = kind.sum_loss(ran.student, ran.teacher, part, spec.head)
        if ran.extra is not None:
            extra, total = ran.extra
            sums = sums._replace(loss=sums.loss + total, extra=extra)
        sums = add_confidence(sums, ran.confidence, part["weights"], spec.form.confidence)
        return sums.loss, sums

    gradient = jax.grad(sum_loss, has_aux=True)
    if spec.microbatches == 1:
        grads, sums = gradient(trained, batch)
    else:

        def accumulate(carry: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient(trained, part)), None

        parts = _split_batch(batch, spec.microbatches)
        zero = jnp.zeros((), jnp.float32)
        sums = LossSums(zero, zero, None if isinstance(kind, NoTeacher) else zero)
        if spec.extra or spec.form.sums_more:
            first = jax.tree.map(lambda x: x[0], parts)
            shapes = jax.eval_shape(sum_loss, trained, first)[1].extra
            sums = sums._replace(extra=jax.tree.map(lambda _: zero, shapes))
        start = jax.tree.map(jnp.zeros_like, trained), sums
        (grads, sums), _ = jax.lax.scan(accumulate, start, parts)
    # Counted in int32: float32 sums of ones stop counting at 2^24.
    return grads, sums, jnp.sum(batch["weights"] != 0, dtype=jnp.int32)


def kd_step(
    state: TrainState, teacher: Params, batch: Batch, base: Params, *, spec: StepSpec
) -> tuple[TrainState, StepMetrics]:
    """Takes one optimizer step; returns the next state and the step's figures.

    `base` is the part of the student that is never trained, {} for most forms.
    """
    _refuse_other(spec.shapes, teacher)
    if spec.schedules is not None:
        batch = batch | _read_schedules(spec.schedules, state.step, batch)
    form, kept = spec.form, getattr(state, "kept", None)
    batch = form.mark(batch, state.step)
    seen = form.see(base, kept, state.params)  # once a step, whatever microbatches and remat repeat
    extra = getattr(state, "extra", None)
    grads, sums, count = kd_gradients(_join(seen, extra), teacher, batch, spec)
    moved = grads.pop(_EXTRA, None)
    whole = form.pull(base, kept, state.params, seen, grads, spec.frozen)
    whole, masters = _join(whole, moved), _join(state.params, extra)
    grads = leave_out(whole, spec.frozen)
    updates, opt_state = spec.tx.update(whole, state.opt_state, masters)
    params: Any = optax.apply_updates(masters, updates)
    extra = params.pop(_EXTRA, None)
    others = {name: (value, count) for name, value in (sums.extra or {}).items()}
    metrics = StepMetrics(
        loss=(sums.loss, count),
        ce=(sums.ce, count),
        divergence=None if sums.divergence is None else (sums.divergence, count),
        grad_norm=(optax.tree.norm(grads), jnp.ones((), jnp.float32)),
        extra=others or None,
    )
    return _state(state.step + 1, params, opt_state, kept, extra), metrics


def _list_shapes(tree: Params) -> dict[str, Any]:
    return dict(zip(list_paths(tree), map(jnp.shape, jax.tree.leaves(tree)), strict=True))


def _refuse_other(wanted: Mapping[str, Any] | None, arrays: Params, side: str = "teacher") -> None:
    """Raises `UserError` for arrays of another model on this side; costs time in traces only."""
    if wanted is None:
        return
    found = _list_shapes(arrays)
    for name in sorted(found.keys() | wanted):
        if found.get(name) != wanted.get(name):
            was, now = (shapes.get(name, "no such array") for shapes in (found, wanted))
            raise UserError(
                f"found in a step's {side} {name}: {was}; expected {now}. It is another model: "
                f"pass the params of the {side} that make_step was given."
            )


def _read_schedules(schedules: Schedules, step: Any, batch: Batch) -> Batch:
    """Columns of the step's temperature and alpha: they travel with the rows to all devices."""
    shape = batch["weights"].shape
    return {
        name: jnp.broadcast_to(jnp.asarray(schedule(step), jnp.float32), shape)
        for name, schedule in zip(SCHEDULED, schedules, strict=True)
        if schedule is not None
    }


def eval_step(
    params: Params, teacher: Params, batch: Batch, *, spec: StepSpec
) -> EvalSums | TopEvalSums | SharedEvalSums | ExtraSums:
    """Held-out sums of one batch; rows of weight 0 count nothing."""
    _refuse_other(spec.shapes, teacher)

    def sum_evaluation(params: Params, teacher: Params, batch: Batch) -> Any:
        ran = _run_both(spec, spec.kind, params, teacher, batch)
        sums = spec.kind.sum_evaluation(ran.student, ran.teacher, batch, spec.head)
        return sums if ran.extra is None else ExtraSums(sums, *ran.extra)

    batch = spec.form.mark(batch, None)
    return _sum_over_devices(sum_evaluation, spec, lambda _: P())(params, teacher, batch)


def _state(step: Any, params: Any, opt_state: Any, kept: Any, extra: Any = None) -> TrainState:
    if extra is not None:
        return ExtraState(step, params, opt_state, kept, extra)
    if kept is None:
        return TrainState(step, params, opt_state)
    return FormedState(step, params, opt_state, kept)


def init_state(
    params: Params,
    tx: optax.GradientTransformation,
    form: Form = PLAIN,
    base: Params | None = None,
    extra: Params | None = None,
    kept: Any = None,
) -> TrainState:
    """The state before the first step; `extra` are projections of layer losses.

    `kept` are the arrays that the form read; None: it makes them.
    """
    opt_state = tx.init(_join(params, extra))
    kept = form.begin(base or {}, params) if kept is None else kept
    return _state(jnp.zeros((), jnp.int32), params, opt_state, kept, extra)


def state_shardings(
    abstract: TrainState,
    tx: optax.GradientTransformation,
    placement: Placement,
    *,
    split: bool = False,
    form: Form = PLAIN,
    base: Params | None = None,
) -> TrainState:
    """Returns shardings: parameters by the rules, moments as their parameters, others replicated.

    `parameter_shardings` explains `split`.
    """
    params = parameter_shardings(abstract.params, placement.mesh, split=split)
    everywhere = replicated(placement.mesh)
    shapes = getattr(abstract, "extra", None)
    extra = jax.tree.map(lambda _: everywhere, shapes)

    def place(moment: Any, sharding: Any, parameter: Any) -> Any:
        if isinstance(moment, optax.MaskedNode):  # of parameters that the optimizer does not touch
            return moment
        return sharding if moment.shape == parameter.shape else everywhere

    opt_state = optax.tree.map_params(
        tx,
        place,
        abstract.opt_state,
        _join(params, extra),
        _join(abstract.params, shapes),
        transform_non_params=lambda _: everywhere,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    seen = form.spread(base or {}, params, placement.mesh)
    kept = form.place(getattr(abstract, "kept", None), seen)
    return _state(everywhere, params, opt_state, kept, extra)


def _count_frozen(student: ModelFunctions, params: Params, frozen: frozenset[str]) -> int:
    """Counts the first columns of a decoder's head, its embedding if tied, without a gradient."""
    if not isinstance(student, DecoderFunctions):  # names of a custom module say nothing
        return 0
    count = 0
    for part, columns in student.head_parts(params):
        if not frozen.issuperset(list_paths(part)):
            break
        count += columns
    return count


def _compute_dtype(student: ModelFunctions) -> DTypeLike | None:
    """Compute dtype of a decoder, whose products cast its masters; None for a custom module."""
    return student.compute.dtype if isinstance(student, DecoderFunctions) else None


def _without_gradients(spec: StepSpec) -> StepSpec:
    """The spec of evaluations; several devices would wait in a loop for each layer's gather."""
    student = spec.student
    if not isinstance(student, DecoderFunctions) or spec.spreads is not None:
        return spec
    return dataclasses.replace(spec, student=student.without_gradients())


class Step:
    """A compiled `kd_step`: `step(state, teacher.params, batch)` returns the next state, metrics.

    `train` and `sum_evaluation` are jitted, for complete batches on the devices; `train` is
    `jitted` with the arguments that are equal in every step, `fixed`.
    """

    def __init__(
        self,
        spec: StepSpec,
        params: Params,
        placement: Placement,
        teacher: Params | None = None,
        *,
        split: bool = False,
        vocabulary: Vocabulary | None = None,
    ):
        """`params` are the student's arrays or shapes, `teacher` the teacher's arrays: both are
        read and not stored, except the frozen base of adapters. Each of several devices runs its
        own rows, with these shardings. With `split`, each stores a part of masters and moments, see
        `sharding.splits_state`."""
        form, self.base = spec.form, spec.form.base(params)
        shapes = jax.eval_shape(lambda tree: tree, form.masters(params))
        self.placement = dataclasses.replace(placement, shapes=False)
        plain = Vocabulary(spec.head.width, spec.head.real_vocab)
        self.vocabulary = vocabulary or plain  # of evaluations
        self.trained_vocabulary = self.vocabulary if spec.asks_teacher else plain
        both: Any = spec.student, params, spec.teacher, teacher
        self._extra: Any = (spec.extra and begin_projections(spec.extra, *both)) or None
        begin = functools.partial(init_state, tx=spec.tx, form=form, extra=self._extra)
        try:
            self.abstract = jax.eval_shape(begin, shapes, base=self.base)
        except (KeyError, TypeError, ValueError) as error:
            if self._extra is None:
                raise
            raise UserError(
                "the optimizer's masks or labels are a tree of the student's parameters alone; "
                f"expected a function of the tree: next to them {_EXTRA!r} has the projections of "
                f"extra losses ({str(error).splitlines()[0][:80]})."
            ) from error
        self.shardings = state_shardings(
            self.abstract, spec.tx, placement, split=split, form=form, base=self.base
        )
        spreads, places = None, form.spread(self.base, self.shardings.params, placement.mesh)
        if not placement.alone:
            dtype = form.send_as(_compute_dtype(spec.student))
            of_student = Spread.of(
                _join(places, getattr(self.shardings, "extra", None)), placement, dtype
            )
            spreads = of_student, Spread.of(teacher or {}, placement)
        frozen = find_frozen(spec.tx, _join(shapes, self._extra))
        frozen |= form.list_frozen(self.base, shapes)
        head = dataclasses.replace(spec.head, frozen=_count_frozen(spec.student, params, frozen))
        known = _list_shapes(teacher or {})
        spec = dataclasses.replace(spec, spreads=spreads, frozen=frozen, head=head, shapes=known)
        self.spec = spec
        options = compiler_options(placement.mesh)
        everywhere = replicated(placement.mesh)
        self._outside: list[Any] = []  # counts of ids in earlier batches, not yet looked at
        self._read_ids = jax.jit(
            functools.partial(read_ids, head=spec.head),
            out_shardings=(batch_sharding(placement.mesh),) * 2 + (everywhere,),
        )
        self.jitted: Any = jax.jit(
            functools.partial(kd_step, spec=spec),
            donate_argnums=0,
            out_shardings=(self.shardings, everywhere),
            compiler_options=options,
        )
        self._train: Any = self.jitted
        self.hold(self.base)
        self.sum_evaluation: Any = jax.jit(
            functools.partial(eval_step, spec=_without_gradients(spec)),
            out_shardings=everywhere,
            compiler_options=options,
        )
        self._see, self._pack = form.compile(form.see, places), form.compile(form.pack)

    def hold(self, base: Params) -> None:
        """Takes the arrays of the student's part that never trains."""
        self.base, self.fixed = base, {"base": base}
        self.train: Any = functools.partial(self._train, **self.fixed)

    def compile_ahead(self, teacher: Params, batch: Params, heldout: Params) -> None:
        """Begins to compile training and evaluation on one device, in threads, for shapes.

        `batch` and `heldout` are shapes of a training batch and of an evaluation's.
        """
        place = functools.partial(place_shapes, place=replicated(self.placement.mesh))
        state = self.abstract
        seen = jax.eval_shape(self._see, self.base, getattr(state, "kept", None), state.params)
        self._train = Ahead(self.jitted, *place((state, teacher, batch)), **place(self.fixed))
        judged = place((self.add_extra(seen, state), teacher, heldout))
        self.sum_evaluation = Ahead(self.sum_evaluation, *judged)
        self.hold(self.base)

    def see(self, state: TrainState) -> Params:
        """Parameters that the forward pass computes with; they are also judged and exported."""
        return self._see(self.base, getattr(state, "kept", None), state.params)

    def add_extra(self, params: Params, state: TrainState) -> Params:
        """Parameters as `sum_evaluation` takes them: with projections of layer losses, if any."""
        return _join(params, getattr(state, "extra", None))

    def pack(self, state: TrainState) -> Params:
        """Parameters for `export_gguf`: blocks of a rounded student, plain masters unchanged.

        kdjax.export_gguf(student.replace(params=step.pack(state)), "student.gguf")
        """
        return self._pack(self.base, getattr(state, "kept", None), state.params)

    def init(self, params: Params, *, donate: bool = False) -> TrainState:
        """The state before the first step, from a copy of `params`: the model keeps its arrays.

        With `donate` the arrays themselves go into the state, and the model loses them. The state
        of a student with adapters has the adapters alone. Raises `UserError` for a model in place
        of its arrays, and for arrays of another model.
        """
        if not isinstance(params, Mapping):
            raise UserError(
                f"found {type(params).__name__} to begin with; expected arrays: student.params."
            )
        params = self.spec.form.masters(params)
        _refuse_other(_list_shapes(self.abstract.params), params, "student")

        kept = self.spec.form.read_kept(getattr(self.abstract, "kept", None))

        def begin(params: Params, base: Params, kept: Any) -> TrainState:
            if not donate:  # jit hands an argument that it only passes on back as it is
                params = jax.tree.map(jnp.copy, params)
            return init_state(params, self.spec.tx, self.spec.form, base, self._extra, kept)

        # A complete array cannot become the part of it that a device stores.
        placed = jax.tree.map(
            lambda x, place: x.sharding.is_equivalent_to(place, x.ndim),
            params,
            self.shardings.params,
        )
        donated = (0,) if donate and jax.tree.all(placed) else ()
        begun = jax.jit(begin, out_shardings=self.shardings, donate_argnums=donated)
        return begun(params, self.base, kept)

    def __call__(
        self, state: TrainState, teacher: Arrays, batch: Any
    ) -> tuple[TrainState, StepMetrics]:
        """Donates `state`; `batch` holds host or device arrays, as `complete_batch` takes them.

        Raises `UserError` for a batch that cannot be used, for a state that an earlier step took,
        and for arrays of other names or shapes than the teacher's.
        """
        refuse_donated(state)
        placed, outside = self._put(batch, self.spec.microbatches, self.trained_vocabulary)
        state, metrics = self.train(state, name_arrays(teacher), placed)
        return state, metrics if outside is None else metrics.replace(outside=outside)

    def evaluate(
        self, state: TrainState, teacher: Arrays, batches: Iterable[Any]
    ) -> dict[str, float]:
        """Held-out figures over all batches, as runs log them: see `heldout.held_out_figures`.

        Batches are as in training; positions of weight 0 do not count. The state is not donated.
        Raises `UserError` for batches that cannot be used, and if none has a position.

            print(step.evaluate(state, teacher.params, heldout)["kl"])
        """
        refuse_donated(state)
        placed = (self.put(batch, heldout=True) for batch in batches)
        judged, loss = self.add_extra(self.see(state), state), self.spec.head.loss
        try:
            return held_out(self.sum_evaluation, judged, name_arrays(teacher), placed, loss)
        except ZeroDivisionError:
            raise UserError(
                "found no position of weight in the batches of an evaluation; expected some. An "
                "exhausted iterator yields no batch: pass a list."
            ) from None

    def put(self, batch: Any, parts: int = 1, *, heldout: bool = False) -> Batch:
        """Completes a batch and puts it on the devices, which share its rows.

        `parts` is the number of microbatches. A batch of training gets a teacher's columns only if
        the loss asks the teacher. Labels of -100 get weight 0. Raises `UserError` for ids outside
        the vocabulary: in host arrays at once, in arrays on devices when a later batch is put and
        their count is ready.
        """
        return self._put(batch, parts, self.vocabulary if heldout else self.trained_vocabulary)[0]

    def _put(self, batch: Any, parts: int, vocabulary: Vocabulary) -> tuple[Batch, Array | None]:
        """Puts a batch as `put` does, and counts the ids outside in arrays on devices."""
        mesh, whole = self.placement.mesh, complete_batch(batch)
        ready = [x for x in self._outside if x.is_ready()]
        self._outside = [x for x in self._outside if not x.is_ready()]
        for count in ready:
            refuse_counted(count)
        ids = [whole[name] for name in ("tokens", "labels", "weights")]
        outside = None
        on_devices = any(isinstance(x, jax.Array) for x in ids)
        shards = row_shards(mesh) // (1 if on_devices else jax.process_count())
        if len(ids[0]) % (shards * parts):
            sharing = f"{parts} microbatches on each of the " if parts > 1 else "the "
            raise UserError(
                f"found a batch of {len(ids[0])} rows; expected a multiple of {shards * parts}: "
                f"{sharing}{shards} devices that share its rows."
            )
        if on_devices:
            whole["labels"], whole["weights"], outside = self._read_ids(*ids)
        else:
            whole["labels"], whole["weights"] = check_ids(*ids, head=self.spec.head)
        whole = vocabulary.complete(whole)
        on_host = {k: v for k, v in whole.items() if not isinstance(v, jax.Array)}
        placed = whole | put_batch(on_host, mesh)
        odd = self.spec.kind.check_columns(whole, placed, self.spec.head)
        if odd is not None:
            outside = jnp.stack([jnp.int32(0) if outside is None else outside, odd])
        if outside is not None:
            self._outside.append(outside)
        return placed, outside


def refuse_donated(state: TrainState) -> None:
    """Raises `UserError` for no state, and for one that an earlier step took, without arrays."""
    wanted = "what step.init(student.params) and each step return"
    check_type("state", state, TrainState, wanted)
    if any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array)):
        raise UserError(
            "found a state that an earlier step has taken (its arrays are donated); expected the "
            "state which that step returned: `state, metrics = step(state, ...)`."
        )


# Types of arguments of `make_step` and `distill`, and their description in errors.
PARTS: dict[str, tuple[Any, str]] = {
    "optimizer": (optax.GradientTransformation, "an optax.GradientTransformation"),
    "loss": (KDLoss, "a kdjax.KDLoss"),
}


def check_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Raises `UserError` for an argument that is something else."""
    if not isinstance(value, kind):
        raise UserError(f"found {name}={value!r}; expected {wanted}.")


@refusing("make_step({}=)")
def make_step(
    student: Model,
    teacher: Model | Sequence[Model | None] | None,
    loss: KDLoss,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    chunk_tokens: int = 1024,
    reduce_dtype: str = "float32",
    kind: TeacherKind | None = None,
    form: Form | None = None,
    trainable: str | Sequence[str] = "",
    extra: LayerLoss | Sequence[LayerLoss] = (),
    allow_degenerate: bool = False,
) -> Step:
    """Makes the step that teaches `student` the predictions of `teacher`; its call compiles it.

    `chunk_tokens` positions of a device have logits at a time; several devices add their gradients
    up in `reduce_dtype`. `kind` says how the teacher reaches the loss. By default the teacher runs
    in the step; without a teacher the text alone trains, and alpha must be 1. With a
    `TeacherInBatch` the teacher has no model: `teacher` is None, here and in each step. From
    several teachers, `[a, b]`, the student learns a mixture (`Teachers`); a step takes
    `[a.params, b.params]`, and the kind or the batch's `teacher_weights` weigh them.

    `form` selects the trained parameters and computes the ones of the forward pass:
    `Rounded("q4_0")` rounds the student to the blocks of a GGUF file. By default (None) a student
    with adapters trains these (`Adapters`), one of `take_block` its block (`DraftBlock`), one of
    `make_head` its head (`DraftHead`), and any other all of its parameters. `trainable` names the
    trained parameters for `trainable.choose_layers`; by default the optimizer decides. `extra` is
    one or several losses of layers, added to `loss`, each with another name (`LayerLoss`); the
    state has their projections, and the optimizer moves them.

    Raises `UserError` for models whose vocabularies do not agree, for models on different devices,
    for a student whose weights cannot be trained, for a student that is its teacher, unless
    `allow_degenerate`, and for names that no parameter has.

        step = make_step(student, teacher, KDLoss(forward_kl), optax.adamw(1e-5))
        state = step.init(student.params)
        state, metrics = step(state, teacher.params, {"tokens": ids[:, :-1], "labels": ids[:, 1:]})
    """
    _check_arguments(loss, optimizer, microbatches, chunk_tokens)
    _check_models(student, teacher, kind)
    models = _list_models(teacher)
    form = choose_form(form, student)
    for model in () if allow_degenerate or form.learns(student.params) else models:
        refuse_same(model, student)
    # Several teachers share the student's vocabulary; only one may have another tokenizer.
    asked = "same" if len(models) > 1 else "auto"
    vocabulary, *_ = [share_vocabulary(student, model, asked) for model in models or [None]]
    return assemble_step(
        student,
        teacher,
        vocabulary,
        loss,
        optimizer,
        microbatches=microbatches,
        chunk_tokens=chunk_tokens,
        reduce_dtype=reduce_dtype,
        kind=kind,
        form=form,
        trainable=trainable,
        extra=extra,
    )


def assemble_step(
    student: Model,
    teacher: Model | Sequence[Model | None] | None,
    vocabulary: Vocabulary,
    loss: KDLoss,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    chunk_tokens: int = 1024,
    reduce_dtype: str = "float32",
    kind: TeacherKind | None = None,
    form: Form | None = None,
    trainable: str | Sequence[str] = "",
    extra: LayerLoss | Sequence[LayerLoss] = (),
) -> Step:
    """Makes the step of models that are proven to share `vocabulary`; otherwise as `make_step`.

    The student's parameters may be shapes.
    """
    _check_arguments(loss, optimizer, microbatches, chunk_tokens)
    if reduce_dtype not in ("float32", "bfloat16"):
        raise UserError(f"found reduce_dtype={reduce_dtype!r}; expected float32 or bfloat16.")
    models = _list_models(teacher)
    kind = _choose_kind(kind, teacher)
    if not models and not kind.in_batch and loss.alpha != 1:
        raise UserError(f"found no teacher and alpha={loss.alpha}; without one alpha must be 1.")
    kind.check_loss(loss)
    loss, schedules = loss.settle()
    placement = _share_placement(student, models)
    form = choose_form(form, student)
    check_form(form, student, trainable=trainable, extra=extra)
    form.check_teachers(student, models)
    kind = form.adapt(vocabulary.adapt(kind, extra))
    sizes = vocabulary.width, vocabulary.real, chunk_tokens
    head = HeadSpec(loss, *sizes, placement.kernels, accepts=form.confidence > 0)
    optimizer, layers = train_only(optimizer, form.masters(student.params), student.spec, trainable)
    functions, arrays = _read_teachers(teacher)
    spec = StepSpec(
        student=student.functions,
        teacher=functions,
        kind=kind,
        head=head,
        tx=optimizer,
        microbatches=microbatches,
        reduce_dtype=reduce_dtype,
        form=form,
        some_layers=layers,
        extra=choose_losses(extra, student.functions, functions, kind),
        schedules=schedules,
    )
    split = _splits(spec, placement)
    return Step(spec, student.params, placement, arrays, split=split, vocabulary=vocabulary)


def _read_teachers(teacher: Model | Sequence[Model | None] | None) -> tuple[Any, Any]:
    """Functions and arrays of the teacher, or of several; None without."""
    if isinstance(teacher, Sequence):
        functions = tuple(model and model.functions for model in teacher)
        return functions, name_arrays([model and model.params for model in teacher])
    return (teacher.functions, teacher.params) if isinstance(teacher, Model) else (None, None)


def _check_arguments(loss: Any, optimizer: Any, microbatches: int, chunk_tokens: int) -> None:
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        check_kind(name, value, *PARTS[name])
    for name, count in (("microbatches", microbatches), ("chunk_tokens", chunk_tokens)):
        check_kind(name, count, Integral, "a whole number")
        if count < 1:
            raise UserError(f"found {name}={count}; expected 1 or more.")


def _check_models(student: Any, teacher: Any, kind: Any) -> None:
    check_model(student, "student")
    several = teacher if isinstance(teacher, list | tuple) else [teacher]
    for model in several:
        if model is not None:
            check_model(model, "teacher")
    if kind is not None:
        check_kind("kind", kind, TeacherKind, "one such as kdjax.TeacherInBatch()")


def _list_models(teacher: Model | Sequence[Model | None] | None) -> list[Model]:
    """Lists the teachers that are models."""
    several = list(teacher) if isinstance(teacher, Sequence) else [teacher]
    return [model for model in several if isinstance(model, Model)]


def _choose_kind(
    kind: TeacherKind | None, teacher: Model | Sequence[Model | None] | None
) -> TeacherKind:
    """Chooses the kind of the teacher: by default dense, for each model."""
    several = list(teacher) if isinstance(teacher, Sequence) else None
    if kind is None and several is not None:
        kind = Teachers(tuple(Dense() for _ in several))
    kind = kind or (Dense() if teacher else NoTeacher())
    _check_kinds(kind, several)
    return kind


def _splits(spec: StepSpec, placement: Placement) -> bool:
    """Whether masters are split. Only a `Decoder` gathers them; a custom module does not.

    A loop over layers would wait for each gather, and only one sum rounds gradients to a dtype.
    """
    student = spec.student
    gathers = isinstance(student, DecoderFunctions) and not student.compute.scan
    return gathers and spec.reduce_dtype == "float32" and splits_state(placement.mesh)


def _check_kinds(kind: TeacherKind, several: Sequence[Model | None] | None) -> None:
    """Raises `UserError` unless the kind has one entry for each teacher."""
    kinds = len(kind.kinds) if isinstance(kind, Teachers) else None
    given = None if several is None else len(several)
    alone = kinds is not None and several is None and kind.in_batch
    if kinds != given and not alone:
        raise UserError(
            f"found {'one teacher' if given is None else f'a list of {given}'} and kind={kind}; "
            "expected a list with a model for each kind of `Teachers`, None for a teacher in "
            "the batch."
        )


def _share_placement(student: Model, teachers: Sequence[Model]) -> Placement:
    """Placement of all models; a custom module, which has none, takes the teacher's."""
    known = [model.placement for model in (student, *teachers) if model.placement]
    if not known:
        return Placement.on(make_local_mesh(1))
    if any(known[0].mesh != other.mesh for other in known):
        raise UserError("teacher and student are on different devices: load both on the same ones.")
    return known[0]
