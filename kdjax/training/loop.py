"""The training loop. It alone touches the clock, and its order is a contract."""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kdjax.config import last_step
from kdjax.device.cluster import SharedFlag
from kdjax.errors import WriteError
from kdjax.formats.saved import FORM, UNDECAYED
from kdjax.progress import timing
from kdjax.training.best import Judge
from kdjax.training.clock import Clock
from kdjax.training.heldout import merge_sums, read_sums, split_figures
from kdjax.training.hooks import Hook, Run, StepRecord
from kdjax.training.interrupts import StopSignals
from kdjax.training.job import Job
from kdjax.training.saving import UNJUDGED, Checkpoints, is_finished
from kdjax.training.step import StepMetrics, TrainState

_log = logging.getLogger("kdjax")


class _Taken(NamedTuple):
    """A step that was dispatched."""

    step: int
    metrics: StepMetrics
    rate: Mapping[str, Any]
    batch: Mapping[str, np.ndarray]
    seconds: float | None  # that it took, if it had ended when its dispatch returned


class _Delivery:
    """Hands each step's figures to the hooks one step late, when the device has them anyway."""

    def __init__(
        self, hooks: Sequence[Hook], schedule: optax.Schedule | None, *, stop: bool = False
    ):
        self._hooks, self._schedule = hooks, schedule and jax.jit(schedule)
        self._pending: _Taken | None = None
        self._last = time.perf_counter()
        self.stop = stop  # whether a hook has asked for it

    def push(self, step: int, metrics: StepMetrics, batch: Mapping[str, np.ndarray]) -> None:
        """Delivers the previous step and keeps this one."""
        # Read now: a program dispatched after the next step would make the host wait for that step.
        rate = {}
        if self._schedule is not None:
            rate = {"learning_rate": self._schedule(jnp.int32(step - 1))}
        # A CPU has ended it; else the seconds of the step before would hold the time of both.
        sums: list[Any] = jax.tree.leaves(metrics)  # arrays of devices, or of the host
        ended = all(getattr(x, "is_ready", lambda: True)() for x in sums)
        self.flush()
        self._pending = _Taken(step, metrics, rate, batch, self._read_clock() if ended else None)

    def flush(self) -> None:
        """Delivers what is pending; waits for that step."""
        if self._pending is None:
            return
        (step, metrics, rate, batch, seconds), self._pending = self._pending, None
        figures = metrics.means() | {name: float(value) for name, value in rate.items()}
        seconds = self._read_clock() if seconds is None else seconds
        record = StepRecord(step, figures, seconds, batch)
        for hook in self._hooks:
            self.stop |= bool(hook.step_end(record))

    def _read_clock(self) -> float:
        """Seconds since this clock was read."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    def restart_clock(self) -> None:
        """Excludes the pause that just ended from the next step's time."""
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
    latest = checkpoints.latest()
    record = {} if latest is None else job.read_record(latest)
    if is_finished(latest, job.config, job.workdir):
        return "finished"
    with timing("student"):
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
        with contextlib.ExitStack() as ends:  # calls all, even if one of them raises
            for hook in reversed(begun):
                ends.callback(hook.train_end, reason, error)

    try:
        for hook in hooks:
            hook.train_begin(run)
            begun.append(hook)
        with StopSignals() as signals:
            reason = _Loop(job, checkpoints, hooks, signals, record).run(state)
    except BaseException as error:
        with contextlib.suppress(WriteError):  # of the same disk, if `error` is not the news
            end("failed", error)
        raise
    end(reason)
    return reason


class _Loop:
    """The steps of a run; `record` is the record of the step that it resumes from, empty for none.

    The order is a contract: a batch is drawn after the save that recorded the position before it; a
    step's figures pass the hooks (the NaN guard among them) before that step is saved.
    """

    def __init__(
        self,
        job: Job,
        checkpoints: Checkpoints,
        hooks: Sequence[Hook],
        signals: StopSignals,
        record: Mapping[str, Any],
    ):
        flag = SharedFlag(job.step.placement.mesh)
        self._job, self._checkpoints, self._signals = job, checkpoints, signals
        self._clock = Clock(job.config.train.seconds, flag, record)
        self._hooks = [*hooks, self._clock]
        self._delivery, self._stop = _Delivery(self._hooks, job.schedule), flag
        self._judge, self._unjudged = Judge.of(job.config, record), bool(record.get(UNJUDGED))
        checkpoints.best = self._judge.best

    def run(self, state: TrainState) -> str:
        """Runs to the end, "finished", or to a stop request, "interrupted"."""
        config, step = self._job.config, int(state.step)
        last = last_step(config)
        if step == 0:
            self._begin(state)
        elif self._unjudged and self._judge_again(step, state):
            return "finished"
        while True:
            step += 1
            state = self._take_step(step, state)
            stopping = self._stop.any(self._signals.requested or self._delivery.stop)
            ending = self._clock.is_over() or step >= last
            evaluating = ending or _is_due(config.eval.every, step)
            if evaluating and not stopping:  # a stop does not wait: `_judge_again` evaluates it
                self._evaluate(step, state)
            if stopping or ending or _is_due(config.checkpoint.every, step):
                self._save(step, state, unjudged=evaluating and stopping)
            if stopping:
                return "interrupted"
            if ending:
                _log.info("%s", self._judge.describe())
                return "finished"

    def _begin(self, state: TrainState) -> None:
        """Evaluates the student before training, and saves it if it may be exported."""
        with timing("evaluation"):
            self._evaluate(0, state)
        self._judge.begin()
        config, form = self._job.config, self._job.step.spec.form
        if (form.rounds or config.eval.best) and self._checkpoints.latest() is None:
            self._save(0, state)

    def _judge_again(self, step: int, state: TrainState) -> bool:
        """Evaluates a saved step before whose evaluation the run was stopped.

        Returns whether the run ends there.
        """
        self._evaluate(step, state)
        self._checkpoints.best = self._judge.note_saved(step)
        self._checkpoints.note_judged(step, self._judge.record)
        ended = self._clock.ended or step == last_step(self._job.config)
        if ended:
            for hook in self._hooks:
                hook.save_begin(step)
            _log.info("%s", self._judge.describe())
        return ended

    def _take_step(self, step: int, state: TrainState) -> TrainState:
        """Draws a batch and takes an optimizer step on it."""
        job, params = self._job, state.params
        if job.source.pauses:  # the current student writes the batch
            self._delivery.flush()
            params = job.step.see(state)
        batch = job.source.next(params)
        del params
        if news := job.source.take_news():
            for hook in self._hooks:
                hook.news(step, *news)
            self._delivery.restart_clock()
        placed = job.step.put(batch, job.step.spec.microbatches)
        with jax.transfer_guard("disallow"):
            state, metrics = job.step.train(state, job.teacher_params, placed)
        self._delivery.push(step, metrics, batch)
        self._checkpoints.raise_failed()
        return state

    def _evaluate(self, step: int, state: TrainState) -> None:
        """Hands the held-out figures and the student to the hooks and to the judge."""
        self._delivery.flush()
        job, loss = self._job, self._job.step.spec.head.loss
        seen = job.step.see(state)
        params = job.step.add_extra(seen, state)
        sums = read_sums(job.step.sum_evaluation, params, job.teacher_params, job.eval_batches())
        figures = merge_sums(sums, loss, job.heldout_bytes)
        batches = split_figures(sums, loss)
        for hook in self._hooks:
            hook.eval_batches(step, batches)
            hook.eval_end(step, figures)
        for hook in self._hooks:
            hook.student(step, seen)
        self._judge.see(step, figures, batches)
        self._delivery.restart_clock()

    def _save(self, step: int, state: TrainState, *, unjudged: bool = False) -> None:
        """Saves the step with what a run needs to go on from it; nothing of a smoke trial."""
        self._delivery.flush()
        job = self._job
        if job.config.smoke.steps:
            return
        record: dict[str, Any] = {"data": job.source.get_state(), "identity": job.identity}
        if form := job.step.spec.form.record:
            record[FORM] = form
        if job.undecayed:
            record[UNDECAYED] = job.undecayed
        if unjudged:
            record[UNJUDGED] = True
        self._checkpoints.best = self._judge.note_saved(step)
        self._checkpoints.save(state, record | self._clock.record | self._judge.record)
        for hook in self._hooks:
            hook.save_begin(step)
        self._delivery.restart_clock()


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
