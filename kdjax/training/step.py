"""The training step and the evaluation step: pure functions, jitted in one place.

    batch --student--> hidden --chunk of logits--> loss and its gradient --optax--> next state
          --teacher--> hidden ----------^

The teacher's arrays are an argument: closed over, they would be folded into the program as
constants. They get no gradient, no optimizer slot, and are never donated.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.device.placement import Placement
from kdjax.device.sharding import (
    ROWS,
    compiler_options,
    make_mesh,
    parameter_shardings,
    put_batch,
    replicated,
    splits_state,
)
from kdjax.errors import UserError
from kdjax.losses.chunked import EvalSums, HeadSpec, LossSums
from kdjax.losses.kd import KDLoss
from kdjax.losses.topk import TopEvalSums
from kdjax.models.decoder import DecoderFunctions, ModelFunctions, Params
from kdjax.models.model import Model
from kdjax.models.weights import Spread, sum_rows
from kdjax.training.pair import Vocabulary, share_vocabulary
from kdjax.training.teachers import Dense, NoTeacher, RunningTeacher, TeacherKind

# tokens, labels, segment_ids, positions: int32 [B, T]; weights: float32 [B, T]. A cached teacher
# adds its own columns, `teacher_...`.
Batch = dict[str, Array]
Mean = tuple[Any, Any]  # a sum and its count, float32 scalars: divided last


@struct.dataclass
class TrainState:
    """Everything that is donated and saved, and nothing else: the teacher is not in it."""

    step: Any  # int32 scalar: optimizer steps done
    params: Params  # float32 masters
    opt_state: optax.OptState


@struct.dataclass
class StepMetrics:
    """Figures of one optimizer step, or, added, of several: each a (sum, count), in nats."""

    loss: Mean  # what is minimised, over trained positions
    ce: Mean
    divergence: Mean | None  # at the loss's temperature, without T^2; None: alpha is 1
    grad_norm: Mean  # before clipping, over steps

    def __add__(self, other: "StepMetrics") -> "StepMetrics":
        return jax.tree.map(operator.add, self, other)

    def means(self) -> dict[str, float]:
        """Each sum divided by its count, and `tokens`, the trained positions; waits for them."""
        figures: StepMetrics = jax.device_get(self)
        pairs = {field.name: getattr(figures, field.name) for field in dataclasses.fields(figures)}
        means = {
            name: float(pair[0]) / max(float(pair[1]), 1.0) for name, pair in pairs.items() if pair
        }
        return means | {"tokens": float(figures.loss[1])}


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What `kd_step` needs besides arrays; fixed for a run."""

    student: ModelFunctions
    teacher: ModelFunctions | None  # None: trains on the text alone, and compares with nothing
    kind: TeacherKind  # how the teacher reaches the loss
    head: HeadSpec
    tx: optax.GradientTransformation
    microbatches: int = 1  # parts a batch is computed in, one after the other; the same sums
    reduce_dtype: str = "float32"  # of gradients while devices add them up
    layout: "Layout | None" = None  # None: one device, or plain JAX that the compiler splits


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a step lie on a mesh of several devices.

    Each device runs one device's program, kernels too, on its own rows; sums meet once, at the end.
    """

    student: Spread
    teacher: Spread
    reduce_dtype: DTypeLike | None = None  # of gradients between devices; None: their own

    @property
    def _ordered(self) -> bool:
        """On CPUs, where the way of a sum between processes is another one than within one."""
        return self.student.placement.platform == "cpu"

    def sum_over_rows(self, function: Callable[..., Any], outs: Callable[[Any], Any]) -> Any:
        """`function(params, teacher, batch)`, its sums added over all devices; `outs` are their
        specs, given those of `params`."""

        def run(params: Params, teacher: Params, batch: Batch) -> Any:
            def local(params: Params, teacher: Params, batch: Batch) -> Any:
                marked = self.student.mark(params), self.teacher.mark(teacher)
                sums = function(*marked, batch)
                return sum_rows(sums, self.reduce_dtype, ordered=self._ordered)

            specs = self.student.tree(params)
            ins = specs, self.teacher.tree(teacher), ROWS
            return self.student.placement.map_rows(local, ins, outs(specs))(params, teacher, batch)

        return run


def _run_student(spec: StepSpec, params: Params, batch: Batch) -> tuple[Array, Array]:
    columns = batch["tokens"], batch["segment_ids"], batch["positions"]
    return spec.student.hidden(params, *columns), spec.student.head(params)


def _split_batch(batch: Batch, parts: int) -> Batch:
    """`[B, T]` to `[parts, B / parts, T]`, part m taking rows m, m + parts, ...

    Interleaved, so that every device keeps an equal share of each part.
    """
    return {k: v.reshape(-1, parts, *v.shape[1:]).swapaxes(0, 1) for k, v in batch.items()}


def kd_gradients(
    params: Params, teacher: Params, batch: Batch, spec: StepSpec
) -> tuple[Params, LossSums, Array]:
    """Gradients of the loss averaged over the batch's weighted positions; sums and their count.

    The count of the whole batch divides once, after all microbatches: a mean of microbatch means
    would weigh positions of short microbatches more.
    """
    sum_gradients = functools.partial(_sum_gradients, spec=spec)
    if spec.layout is not None:
        sum_gradients = spec.layout.sum_over_rows(sum_gradients, lambda grads: (grads, P(), P()))
    grads, sums, count = sum_gradients(params, teacher, batch)
    count = count.astype(jnp.float32)
    grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), grads)
    return grads, sums, count


def _sum_gradients(
    params: Params, teacher: Params, batch: Batch, *, spec: StepSpec
) -> tuple[Params, LossSums, Array]:
    """Sums over the positions of one device: of gradients, of figures, and their count, int32."""
    # At alpha = 1 the teacher would change nothing but the figures: it runs in evaluations only.
    kind = NoTeacher() if spec.head.loss.alpha == 1 else spec.kind
    if spec.microbatches > 1:
        running = RunningTeacher(spec.teacher, teacher)
        kind, batch = kind.begin_parts(running, batch, spec.microbatches)

    def sum_loss(params: Params, part: Batch) -> tuple[Array, LossSums]:
        student = _run_student(spec, params, part)
        sums = kind.sum_loss(student, RunningTeacher(spec.teacher, teacher), part, spec.head)
        return sums.loss, sums

    gradient = jax.grad(sum_loss, has_aux=True)
    if spec.microbatches == 1:
        grads, sums = gradient(params, batch)
    else:

        def accumulate(carry: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient(params, part)), None

        parts = _split_batch(batch, spec.microbatches)
        zero = jnp.zeros((), jnp.float32)
        sums = LossSums(zero, zero, None if isinstance(kind, NoTeacher) else zero)
        start = jax.tree.map(jnp.zeros_like, params), sums
        (grads, sums), _ = jax.lax.scan(accumulate, start, parts)
    # Counted in int32: float32 sums of ones stop counting at 2^24.
    return grads, sums, jnp.sum(batch["weights"] != 0, dtype=jnp.int32)


def kd_step(
    state: TrainState, teacher: Params, batch: Batch, *, spec: StepSpec
) -> tuple[TrainState, StepMetrics]:
    """One optimizer step: the next state, and the step's figures."""
    grads, sums, count = kd_gradients(state.params, teacher, batch, spec)
    updates, opt_state = spec.tx.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    metrics = StepMetrics(
        loss=(sums.loss, count),
        ce=(sums.ce, count),
        divergence=None if sums.divergence is None else (sums.divergence, count),
        grad_norm=(optax.tree.norm(grads), jnp.ones((), jnp.float32)),
    )
    return TrainState(state.step + 1, params, opt_state), metrics


def eval_step(
    params: Params, teacher: Params, batch: Batch, *, spec: StepSpec
) -> EvalSums | TopEvalSums:
    """Held-out sums of one batch; rows of weight 0 count nothing."""

    def sum_evaluation(params: Params, teacher: Params, batch: Batch) -> Any:
        student = _run_student(spec, params, batch)
        running = RunningTeacher(spec.teacher, teacher)
        return spec.kind.sum_evaluation(student, running, batch, spec.head)

    if spec.layout is not None:
        sum_evaluation = spec.layout.sum_over_rows(sum_evaluation, lambda _: P())
    return sum_evaluation(params, teacher, batch)


def init_state(params: Params, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))


def state_shardings(
    abstract: TrainState,
    tx: optax.GradientTransformation,
    placement: Placement,
    *,
    split: bool = False,
) -> TrainState:
    """Parameters by the rules, their moments beside them, everything else replicated.

    `split` is as of `parameter_shardings`.
    """
    params = parameter_shardings(abstract.params, placement.mesh, split=split)
    everywhere = replicated(placement.mesh)
    opt_state = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        abstract.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(everywhere, params, opt_state)  # type: ignore[arg-type]


def _compute_dtype(student: ModelFunctions) -> DTypeLike | None:
    """Of a decoder, whose every product casts its masters; None for a module of one's own."""
    return student.compute.dtype if isinstance(student, DecoderFunctions) else None


class Step:
    """A compiled `kd_step`: `step(state, teacher.params, batch)` gives the next state and metrics.

    `train` and `evaluate` are the two jitted functions, for batches that are on the devices whole.
    """

    def __init__(
        self,
        spec: StepSpec,
        params: Params,
        placement: Placement,
        teacher: Params | None = None,
        *,
        split: bool = False,
    ):
        """`params` are the student's, or their shapes, `teacher` the teacher's arrays: looked at
        and not kept. Each device of several runs its own rows, as these arrays lie. With `split`
        each keeps a part of masters and moments, see `sharding.splits_state`."""
        shapes = jax.eval_shape(lambda tree: tree, params)
        self.placement = placement
        self.abstract = jax.eval_shape(functools.partial(init_state, tx=spec.tx), shapes)
        self.shardings = state_shardings(self.abstract, spec.tx, placement, split=split)
        layout = None
        if not placement.alone:
            layout = Layout(
                Spread.of(self.shardings.params, placement, _compute_dtype(spec.student)),
                Spread.of(teacher or {}, placement),
                jnp.dtype(spec.reduce_dtype),
            )
        self.spec = spec = dataclasses.replace(spec, layout=layout)
        options = compiler_options(placement.mesh)
        everywhere = replicated(placement.mesh)
        self.train = jax.jit(
            functools.partial(kd_step, spec=spec),
            donate_argnums=0,
            out_shardings=(self.shardings, everywhere),
            compiler_options=options,
        )
        self.evaluate = jax.jit(
            functools.partial(eval_step, spec=spec),
            out_shardings=everywhere,
            compiler_options=options,
        )

    def init(self, params: Params, *, donate: bool = False) -> TrainState:
        """The state before the first step, from a copy of `params`: the model stays whole.

        With `donate` the arrays themselves go into the state, and the model loses them.
        """

        def begin(params: Params) -> TrainState:
            if not donate:  # jit hands an argument that it only passes on back as it is
                params = jax.tree.map(jnp.copy, params)
            return init_state(params, self.spec.tx)

        # Whole arrays of which a device keeps a part cannot become that part.
        placed = jax.tree.map(
            lambda x, place: x.sharding.is_equivalent_to(place, x.ndim),
            params,
            self.shardings.params,
        )
        donated = (0,) if donate and jax.tree.all(placed) else ()
        return jax.jit(begin, out_shardings=self.shardings, donate_argnums=donated)(params)

    def __call__(
        self, state: TrainState, teacher: Params, batch: Any
    ) -> tuple[TrainState, StepMetrics]:
        """Donates `state`; `batch` holds host or device arrays, as `complete_batch` takes them."""
        return self.train(state, teacher, self.put(batch))

    def put(self, batch: Any) -> Batch:
        """A batch, whole and on the devices, its rows split over them."""
        whole = complete_batch(batch)
        on_host = {k: v for k, v in whole.items() if not isinstance(v, jax.Array)}
        return whole | put_batch(on_host, self.placement.mesh)


def complete_batch(batch: Any) -> dict[str, Any]:
    """`tokens` and `labels` `[B, T]`, with what is left out of the other columns filled in.

    segment_ids: 1 everywhere (0 is padding). positions: from 0 in each run of one segment. weights:
    1 where the label belongs to the same segment; the last label of a row does.
    Raises `UserError` for a batch without tokens or labels, or of columns of other shapes.
    """
    lacking = [name for name in ("tokens", "labels") if name not in batch]
    if lacking:
        raise UserError(f"the batch has no {' and no '.join(lacking)}; found {sorted(batch)}.")
    shape = tuple(batch["tokens"].shape)
    columns = {name: batch[name] for name in batch if name != "row_ids"}
    odd = {name: tuple(x.shape) for name, x in columns.items() if tuple(x.shape[:2]) != shape}
    if odd or len(shape) != 2:
        raise UserError(f"the batch's tokens are {shape}, expected [B, T]; other shapes: {odd}.")
    if not {"segment_ids", "positions", "weights"} <= columns.keys():
        segments = np.asarray(columns.setdefault("segment_ids", np.ones(shape, np.int32)))
        at = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        begins = np.diff(segments, axis=1, prepend=segments[:, :1]) != 0
        starts = np.maximum.accumulate(np.where(begins, at, 0), axis=1)
        same = np.diff(segments, axis=1, append=segments[:, -1:]) == 0
        columns.setdefault("positions", at - starts)
        columns.setdefault("weights", (same & (segments != 0)).astype(np.float32))
    return columns


def make_step(
    student: Model,
    teacher: Model | None,
    loss: KDLoss,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    chunk_tokens: int = 1024,
    reduce_dtype: str = "float32",
    kind: TeacherKind | None = None,
    vocabulary: Vocabulary | None = None,
) -> Step:
    """The step that teaches `student` what `teacher` predicts; nothing compiles before its call.

    `chunk_tokens` positions of a device have logits at a time; several devices add their gradients
    up in `reduce_dtype`. `kind` says how the teacher reaches the loss
    (default: it runs beside the student; without one the text alone trains, and alpha must be 1).
    `vocabulary` is that of models already proven to fit; the student's parameters may be shapes.
    Raises `UserError` for models whose vocabularies do not agree, for devices that are not the
    same, and for a student whose weights cannot be trained.

        step = make_step(student, teacher, KDLoss(forward_kl), optax.adamw(1e-5))
        state = step.init(student.params)
        state, metrics = step(state, teacher.params, {"tokens": ids[:, :-1], "labels": ids[:, 1:]})
    """
    if teacher is None and loss.alpha != 1:
        raise UserError(f"found no teacher and alpha={loss.alpha}; without one alpha must be 1.")
    placement = _share_placement(student, teacher)
    dtypes = {x.dtype for x in jax.tree.leaves(student.params)}
    odd = {t.name for t in dtypes if t.itemsize == 1 or not jnp.issubdtype(t, jnp.floating)}
    if odd:
        raise UserError(
            f"the student {student.source} holds {', '.join(sorted(odd))} weights, which no "
            'gradient reaches. Load it with dtype="float32" and weights="dense".'
        )
    vocabulary = vocabulary or share_vocabulary(student, teacher)
    head = HeadSpec(loss, vocabulary.width, vocabulary.real, chunk_tokens, placement.kernels)
    spec = StepSpec(
        student=student.functions,
        teacher=teacher and teacher.functions,
        kind=kind or (Dense() if teacher else NoTeacher()),
        head=head,
        tx=optimizer,
        microbatches=microbatches,
        reduce_dtype=reduce_dtype,
    )
    arrays = teacher.params if teacher else None
    return Step(spec, student.params, placement, arrays, split=_splits(spec, placement))


def _splits(spec: StepSpec, placement: Placement) -> bool:
    """Of a `Decoder` only: a module of one's own does not gather its masters."""
    student = spec.student
    return isinstance(student, DecoderFunctions) and splits_state(
        placement.mesh, loops=student.compute.scan, reduce_dtype=spec.reduce_dtype
    )


def _share_placement(student: Model, teacher: Model | None) -> Placement:
    """Where both models are; a module of one's own, which is nowhere, goes where the teacher is."""
    known = [model.placement for model in (student, teacher) if model and model.placement]
    if not known:
        return Placement.on(make_mesh(1, 1, 1, jax.local_devices()[:1]))
    if known[0].mesh != known[-1].mesh:
        raise UserError("teacher and student are on different devices: load both on the same.")
    return known[0]
