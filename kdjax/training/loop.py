"""The training loop. It alone touches the clock, and its order is a contract."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kdjax.config import last_step
from kdjax.device.cluster import SharedFlag
from kdjax.errors import WriteError
from kdjax.formats.saved import FORM
from kdjax.models.decoder import Params
from kdjax.training.heldout import held_out, judge_rounded, masters_figures
from kdjax.training.hooks import Hook, Run, StepRecord
from kdjax.training.interrupts import StopSignals
from kdjax.training.job import Job
from kdjax.training.saving import Checkpoints, is_finished
from kdjax.training.step import StepMetrics, TrainState

_log = logging.getLogger("kdjax")
_FIRST = "first"  # in a step's record: held-out figures of a rounded student before the first


class _Delivery:
    """Hands each step's figures to the hooks one step late, when the device has them anyway."""

    def __init__(self, hooks: Sequence[Hook], schedule: optax.Schedule | None):
        self._hooks, self._schedule = hooks, schedule and jax.jit(schedule)
        self._pending: tuple[int, StepMetrics, Any, Mapping[str, np.ndarray]] | None = None
        self._last = time.perf_counter()
        self.stop = False

    def push(self, step: int, metrics: StepMetrics, batch: Mapping[str, np.ndarray]) -> None:
        """Delivers the previous step and keeps this one."""
        # Asked for now: behind the next step a program would make the host wait for that step.
        rate = {}
        if self._schedule is not None:
            rate = {"learning_rate": self._schedule(jnp.int32(step - 1))}
        self.flush()
        self._pending = step, metrics, rate, batch

    def flush(self) -> None:
        """Delivers what is pending; waits for that step."""
        if self._pending is None:
            return
        (step, metrics, rate, batch), self._pending = self._pending, None
        figures = metrics.means() | {name: float(value) for name, value in rate.items()}
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
        eval_every=job.config.eval.every,
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


def _begin_again(job: Job, state: TrainState) -> TrainState:
    """The state before the first step as the one after as many steps; `state` makes room for it."""
    steps = np.asarray(state.step)
    jax.tree.map(lambda x: x.delete(), state)
    begun = job.make_state()
    return dataclasses.replace(begun, step=jax.device_put(steps, job.step.shardings.step))


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
    first: dict[str, float] = job.read_record(start).get(_FIRST, {}) if start else {}
    stop = SharedFlag(job.step.placement.mesh)

    def due(every: int, step: int) -> bool:
        return step == last or (every > 0 and step % every == 0)

    def evaluate(step: int, state: TrainState) -> TrainState:
        """Returns the state, or the first if a rounded student ends worse than it began."""

        def judge(params: Params) -> dict[str, float]:
            return held_out(
                job.step.sum_evaluation,
                params,
                job.teacher_params,
                job.eval_batches(),
                job.step.spec.head.loss,
                job.heldout_bytes,
            )

        seen = job.step.see(state)
        figures = judge(job.step.add_extra(seen, state))
        if job.step.spec.form.rounds:
            masters = job.step.add_extra(state.params, state)
            figures |= masters_figures(judge(masters))
            first.update({} if step else figures)
            if step == last and first and saves:
                better, news = judge_rounded(first, figures)
                _log.info("%s", news)
                if not better:
                    del seen
                    state, figures = _begin_again(job, state), first
                    seen = job.step.see(state)
        for hook in hooks:
            hook.eval_end(step, figures)
        for hook in hooks:
            hook.student(step, seen)
        delivery.restart_clock()
        return state

    def save(step: int, state: TrainState) -> None:
        record = {"data": job.source.get_state(), "identity": job.identity}
        if form := job.step.spec.form.record:
            record[FORM] = form
        if first:
            record[_FIRST] = first
        checkpoints.save(step, state, record)
        for hook in hooks:
            hook.save_begin(step)
        delivery.restart_clock()

    if start == 0:
        evaluate(0, state)
    # The order is a contract: the batch is drawn after the save that recorded the position before
    # it; a step's figures pass the hooks (the NaN guard among them) before that step is saved.
    for step in range(start + 1, last + 1):
        params = state.params
        if job.source.pauses:
            delivery.flush()
            params = job.step.see(state)
        batch = job.source.next(params)
        del params
        if news := job.source.take_news():
            for hook in hooks:
                hook.news(step, *news)
            delivery.restart_clock()
        placed = job.step.put(batch)
        with jax.transfer_guard("disallow"):
            state, metrics = job.step.train(state, job.teacher_params, placed)
        delivery.push(step, metrics, batch)
        checkpoints.raise_failed()
        stopping = stop.any(signals.requested or delivery.stop)
        if stopping or due(config.checkpoint.every, step) or due(config.eval.every, step):
            delivery.flush()
        chosen = step == last and job.step.spec.form.rounds  # what the run ends with is judged
        if due(config.eval.every, step) and (chosen or not stopping):
            state = evaluate(step, state)
        if saves and (due(config.checkpoint.every, step) or stopping):
            save(step, state)
        if stopping and step < last:
            return "interrupted"
    return "finished"
