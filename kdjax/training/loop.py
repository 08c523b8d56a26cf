"""The training loop. It alone touches the clock, and its order is a contract."""

import contextlib
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kdjax.config import last_step
from kdjax.device.cluster import SharedFlag
from kdjax.errors import WriteError
from kdjax.training.heldout import held_out
from kdjax.training.hooks import Hook, Run, StepRecord
from kdjax.training.interrupts import StopSignals
from kdjax.training.job import Job
from kdjax.training.rollouts import AnswerSource
from kdjax.training.saving import Checkpoints, is_finished
from kdjax.training.step import StepMetrics, TrainState


class _Delivery:
    """Hands each step's figures to the hooks one step late, when the device has them anyway."""

    def __init__(self, hooks: Sequence[Hook], schedule: optax.Schedule):
        self._hooks, self._schedule = hooks, jax.jit(schedule)
        self._pending: tuple[int, StepMetrics, jax.Array, Mapping[str, np.ndarray]] | None = None
        self._last = time.perf_counter()
        self.stop = False

    def push(self, step: int, metrics: StepMetrics, batch: Mapping[str, np.ndarray]) -> None:
        """Delivers the previous step and keeps this one."""
        # Asked for now: behind the next step a program would make the host wait for that step.
        rate = self._schedule(jnp.int32(step - 1))
        self.flush()
        self._pending = step, metrics, rate, batch

    def flush(self) -> None:
        """Delivers what is pending; waits for that step."""
        if self._pending is None:
            return
        (step, metrics, rate, batch), self._pending = self._pending, None
        figures = metrics.means() | {"learning_rate": float(rate)}
        now = time.perf_counter()
        record = StepRecord(step, figures, now - self._last, batch)
        self._last = now
        for hook in self._hooks:
            self.stop |= bool(hook.step_end(record))

    def restart_clock(self) -> None:
        """Leaves the pause that just ended out of the next step's time."""
        self._last = time.perf_counter()


def train(
    job: Job, checkpoints: Checkpoints, hooks: Sequence[Hook], peak_flops: float | None
) -> str:
    """Runs the job to its end or to a stop request; returns "finished" or "interrupted".

    A run that already finished returns at once. A smoke run (`smoke.steps`) takes the first steps
    of the same run, evaluates before and after, and saves nothing. Hooks may raise; whatever is
    raised passes through, after every hook's `train_end("failed", error)`. Raises `UserError` for
    a smoke run over a checkpoint, and for the checkpoint of another run.
    """
    if is_finished(checkpoints.latest(), job.config, job.workdir):
        job.read_record(job.config.train.steps)
        return "finished"
    state = job.restore(checkpoints)
    run = Run(
        workdir=job.workdir,
        start_step=int(state.step),
        total_steps=last_step(job.config),
        tokens_per_step=job.config.train.batch_size * job.config.data.seq_len,
        flops_per_token=job.flops_per_token(),
        peak_flops=peak_flops,
        log_every=job.config.log.every,
        config=job.identity,
    )
    begun: list[Hook] = []

    def end(reason: str, error: BaseException | None = None) -> None:
        with contextlib.ExitStack() as ends:  # calls all, whatever one of them raises
            for hook in reversed(begun):
                ends.callback(hook.train_end, reason, error)

    try:
        for hook in hooks:
            hook.train_begin(run)
            begun.append(hook)
        with StopSignals() as signals:
            reason = _run_steps(job, checkpoints, hooks, signals, state)
    except BaseException as error:
        with contextlib.suppress(WriteError):  # of the same disk, if `error` is not the news
            end("failed", error)
        raise
    end(reason)
    return reason


def _run_steps(
    job: Job,
    checkpoints: Checkpoints,
    hooks: Sequence[Hook],
    signals: StopSignals,
    state: TrainState,
) -> str:
    config, start, last = job.config, int(state.step), last_step(job.config)
    saves = not config.smoke.steps  # a trial leaves nothing that the run could resume from
    delivery = _Delivery(hooks, job.schedule)
    stop = SharedFlag(job.step.placement.mesh)

    def due(every: int, step: int) -> bool:
        return step == last or (every > 0 and step % every == 0)

    def evaluate(step: int, state: TrainState) -> None:
        figures = held_out(
            job.step.evaluate,
            state.params,
            job.teacher_params,
            job.eval_batches(),
            job.step.spec.head.loss,
            job.heldout_bytes,
        )
        for hook in hooks:
            hook.eval_end(step, figures)
        for hook in hooks:
            hook.student(step, state.params)
        delivery.restart_clock()

    def save(step: int, state: TrainState) -> None:
        record = {"data": job.source.get_state(), "identity": job.identity}
        checkpoints.save(step, state, record)
        for hook in hooks:
            hook.save_begin(step)
        delivery.restart_clock()

    if start == 0:
        evaluate(0, state)
    # The order is a contract: the batch is drawn after the save that recorded the position before
    # it; a step's figures pass the hooks (the NaN guard among them) before that step is saved.
    for step in range(start + 1, last + 1):
        if isinstance(job.source, AnswerSource) and job.source.round_is_over:
            delivery.flush()  # a round is no part of the time of the step before it
        batch = job.source.next(state.params)
        if isinstance(job.source, AnswerSource) and (news := job.source.take_news()):
            for hook in hooks:
                hook.round_begin(step, news)
            delivery.restart_clock()
        placed = job.step.put(batch)
        with jax.transfer_guard("disallow"):
            state, metrics = job.step.train(state, job.teacher_params, placed)
        delivery.push(step, metrics, batch)
        checkpoints.raise_failed()
        stopping = stop.any(signals.requested or delivery.stop)
        if stopping or due(config.checkpoint.every, step) or due(config.eval.every, step):
            delivery.flush()
        if due(config.eval.every, step) and not stopping:
            evaluate(step, state)
        if saves and (due(config.checkpoint.every, step) or stopping):
            save(step, state)
        if stopping and step < last:
            return "interrupted"
    return "finished"
