"""The training step and the evaluation step: pure functions, jitted in one place."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array

from kdjax.device.sharding import compiler_options, parameter_shardings, replicated
from kdjax.losses.chunked import (
    EvalSums,
    HeadSpec,
    LossSums,
    head_evaluation,
    head_loss,
)
from kdjax.losses.topk import TopEvalSums, TopTeacher, cached_head_evaluation, cached_head_loss
from kdjax.models.decoder import ModelFunctions, Params
from kdjax.models.weights import from_bits

# tokens, labels, segment_ids, positions: int32 [B, T]; weights: float32. With a cached teacher also
# teacher_hidden [B, T, D], bf16 as its bits, or the columns of `TopTeacher`.
Batch = dict[str, Array]


@struct.dataclass
class TrainState:
    """Everything that is donated and saved, and nothing else: the teacher is not in it."""

    step: Any  # int32 scalar: optimizer steps done
    params: Params  # float32 masters
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What `kd_step` needs besides arrays; fixed for a run."""

    student: ModelFunctions
    teacher: ModelFunctions | None  # None: trains on the text alone, and compares with nothing
    head: HeadSpec
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    microbatches: int = (
        1  # parts a batch is split into, one after the other; the sums stay the same
    )


def _student(spec: StepSpec, params: Params, batch: Batch) -> tuple[Array, Array]:
    where = batch["tokens"], batch["segment_ids"], batch["positions"]
    return spec.student.hidden(params, *where), spec.student.head(params)


def _teacher(
    spec: StepSpec, teacher: Params, batch: Batch
) -> tuple[Array, Any] | tuple[None, None]:
    """The teacher's hidden states, run or cached in the batch, and its head, if there is one."""
    if spec.teacher is None:
        return None, None
    if "teacher_hidden" in batch:
        return from_bits(batch["teacher_hidden"]), spec.teacher.stored_head(teacher)
    where = batch["tokens"], batch["segment_ids"], batch["positions"]
    hidden = jax.lax.stop_gradient(spec.teacher.hidden(teacher, *where))
    return hidden, spec.teacher.stored_head(teacher)


def _loss_sums(spec: StepSpec, params: Params, teacher: Params, batch: Batch) -> LossSums:
    """Sums of a batch or a part of it; its columns say whether the teacher is cached in it."""
    student, ends = _student(spec, params, batch), (batch["labels"], batch["weights"], spec.head)
    sums: Any  # custom_vjp hides what it returns
    if spec.teacher is not None and "teacher_ids" in batch:
        sums = cached_head_loss(*student, TopTeacher.of(batch), *ends)
    else:
        sums = head_loss(*student, *_teacher(spec, teacher, batch), *ends)
    return sums


def _split(batch: Batch, parts: int) -> Batch:
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

    # At alpha = 1 the teacher would change nothing but the figures: it runs in evaluations only.
    alone = dataclasses.replace(spec, teacher=None) if spec.head.loss.alpha == 1 else spec

    def summed(params: Params, part: Batch) -> tuple[Array, LossSums]:
        sums = _loss_sums(alone, params, teacher, part)
        return sums.loss, sums

    gradient = jax.grad(summed, has_aux=True)
    if spec.microbatches == 1:
        grads, sums = gradient(params, batch)
    else:

        def accumulate(carry: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient(params, part)), None

        zero = jnp.zeros((), jnp.float32)
        sums = LossSums(zero, zero, None if alone.teacher is None else zero)
        start = jax.tree.map(jnp.zeros_like, params), sums
        (grads, sums), _ = jax.lax.scan(accumulate, start, _split(batch, spec.microbatches))
    # Counted in int32: float32 sums of ones stop counting at 2^24.
    count = jnp.sum(batch["weights"] != 0, dtype=jnp.int32).astype(jnp.float32)
    grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), grads)
    return grads, sums, count


def kd_step(
    state: TrainState, teacher: Params, batch: Batch, *, spec: StepSpec
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step; returns the next state and float32 scalars, sums not yet divided.

    Without `divergence` where the teacher has no part in the loss (alpha = 1).

    `teacher` is an argument: closed over it would be folded into the program as constants. It gets
    no gradient, no optimizer slot, and is never donated.
    """
    grads, sums, count = kd_gradients(state.params, teacher, batch, spec)
    updates, opt_state = spec.tx.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    known = {name: value for name, value in sums._asdict().items() if value is not None}
    metrics = dict(known, count=count, grad_norm=optax.tree.norm(grads),
                   learning_rate=spec.schedule(state.step))  # fmt: skip
    return TrainState(state.step + 1, params, opt_state), metrics


def eval_step(
    params: Params, teacher: Params, batch: Batch, *, spec: StepSpec
) -> EvalSums | TopEvalSums:
    """Held-out sums of one batch; rows of weight 0 count nothing."""
    student, ends = _student(spec, params, batch), (batch["labels"], batch["weights"], spec.head)
    if "teacher_ids" in batch:
        return cached_head_evaluation(*student, TopTeacher.of(batch), *ends)
    return head_evaluation(*student, *_teacher(spec, teacher, batch), *ends)


def init_state(params: Params, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))


def state_shardings(
    abstract: TrainState, tx: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Parameters by the rules, their moments beside them, everything else replicated."""
    params = parameter_shardings(abstract.params, mesh)
    everywhere = replicated(mesh)
    opt_state = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        abstract.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(everywhere, params, opt_state)  # type: ignore[arg-type]


def compile_steps(
    spec: StepSpec, shardings: TrainState, mesh: Mesh
) -> tuple[Callable[..., tuple[TrainState, dict[str, Array]]], Callable[..., Any]]:
    """The only `jax.jit` of the two steps: (state, teacher, batch) and (params, teacher, batch)."""
    options = compiler_options(mesh)
    train = jax.jit(
        functools.partial(kd_step, spec=spec),
        donate_argnums=0,
        out_shardings=(shardings, replicated(mesh)),
        compiler_options=options,
    )
    evaluate = jax.jit(
        functools.partial(eval_step, spec=spec),
        out_shardings=replicated(mesh),
        compiler_options=options,
    )
    return train, evaluate
