"""The training loop. It alone touches the clock, and its order is a contract."""

import contextlib
import dataclasses
import itertools
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
from kdjax.training.best import Judge
from kdjax.training.clock import Clock
from kdjax.training.heldout import (
    judge_rounded,
    masters_figures,
    merge_sums,
    read_sums,
    split_figures,
)
from kdjax.training.hooks import Hook, Run, StepRecord
from kdjax.training.interrupts import StopSignals
from kdjax.training.job import Job
from kdjax.training.saving import UNJUDGED, Checkpoints, is_finished
from kdjax.training.step import StepMetrics, TrainState

_log = logging.getLogger("kdjax")
_FIRST = "first"  # in a step's record: held-out figures of a rounded student before the first


class _Delivery:
    """Hands each step's figures to the hooks one step late, when the device has them anyway."""

    def __init__(
        self, hooks: Sequence[Hook], schedule: optax.Schedule | None, *, stop: bool = False
    ):
        self._hooks, self._schedule = hooks, schedule and jax.jit(schedule)
        self._pending: tuple[int, StepMetrics, Any, Mapping[str, np.ndarray]] | None = None
        self._last = time.perf_counter()
        self.stop = stop  # whether a hook has asked for it

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
    latest = checkpoints.latest()
    record = {} if latest is None else job.read_record(latest)
    if is_finished(latest, job.config, job.workdir):
        return "finished"
    judge = Judge.of(job.config, record)
    state, checkpoints.best = job.restore(checkpoints), judge.best
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
            reason = _Loop(job, checkpoints, hooks, signals, judge, record).run(state)
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


class _Loop:
    """The steps of a run; `record` is that of the step that the run goes on from."""

    def __init__(
        self,
        job: Job,
        checkpoints: Checkpoints,
        hooks: Sequence[Hook],
        signals: StopSignals,
        judge: Judge,
        record: Mapping[str, Any],
    ):
        mesh = job.step.placement.mesh
        self._job, self._checkpoints, self._signals = job, checkpoints, signals
        self._judge = judge
        self._clock = Clock(job.config.train.seconds, SharedFlag(mesh), record)
        self._hooks = [*hooks, self._clock]
        self._stop = SharedFlag(mesh)
        self._first: dict[str, float] = dict(record.get(_FIRST, {}))
        self._unjudged = bool(record.get(UNJUDGED))

    def run(self, state: TrainState) -> str:
        """Runs to the end, "finished", or to a stop request, "interrupted".

        A run that was stopped in its last step has its last evaluation alone.
        """
        job, config, start = self._job, self._job.config, int(state.step)
        last = last_step(config)
        delivery = _Delivery(self._hooks, job.schedule)
        saves = not config.smoke.steps  # a trial leaves nothing that the run could resume from

        def due(every: int, step: int, ending: bool) -> bool:
            return ending or (every > 0 and step % every == 0)

        def evaluate(step: int, state: TrainState, *, chosen: bool = False) -> TrainState:
            """Returns the state, or, if what a run ends with is `chosen`, the better one."""
            state = self._evaluate(step, state, chosen=chosen)
            delivery.restart_clock()
            return state

        def save(step: int, state: TrainState, *, unjudged: bool) -> None:
            record: dict[str, Any] = {"data": job.source.get_state(), "identity": job.identity}
            if form := job.step.spec.form.record:
                record[FORM] = form
            if self._first:
                record[_FIRST] = self._first
            if unjudged:
                record[UNJUDGED] = True
            self._checkpoints.best = self._judge.note_saved(step)
            self._checkpoints.save(step, state, record | self._clock.record | self._judge.record)
            for hook in self._hooks:
                hook.save_begin(step)
            delivery.restart_clock()

        if start == 0 or self._unjudged:
            evaluate(start, state)
        if start == 0:
            self._judge.begin()
        if self._unjudged:
            self._checkpoints.best = self._judge.note_saved(start)
            self._checkpoints.note_judged(start, self._judge.record)
            if start == last or self._clock.ended:
                for hook in self._hooks:
                    hook.save_begin(start)
                return "finished"
        # The order is a contract: the batch is drawn after the save that recorded the position
        # before it; a step's figures pass the hooks (the NaN guard among them) before that step is
        # saved.
        for step in itertools.count(start + 1):
            params = state.params
            if job.source.pauses:
                delivery.flush()
                params = job.step.see(state)
            batch = job.source.next(params)
            del params
            if news := job.source.take_news():
                for hook in self._hooks:
                    hook.news(step, *news)
                delivery.restart_clock()
            placed = job.step.put(batch, job.step.spec.microbatches)
            with jax.transfer_guard("disallow"):
                state, metrics = job.step.train(state, job.teacher_params, placed)
            delivery.push(step, metrics, batch)
            self._checkpoints.raise_failed()
            stopping = self._stop.any(self._signals.requested or delivery.stop)
            ending = self._clock.is_over() or step >= last
            evaluates = due(config.eval.every, step, ending)
            saving = saves and (stopping or due(config.checkpoint.every, step, ending))
            if stopping or saving or evaluates:
                delivery.flush()
            # What a rounded run ends with is judged; else who stops does not wait for it.
            chosen = ending and job.step.spec.form.rounds
            judged = evaluates and (chosen or not stopping)
            if judged:
                state = evaluate(step, state, chosen=chosen and saves)
            if saving:
                save(step, state, unjudged=evaluates and not judged)
            if stopping and not (ending and judged):
                return "interrupted"
            if ending:
                return "finished"
        raise AssertionError("a run has a last step")

    def _evaluate(self, step: int, state: TrainState, *, chosen: bool) -> TrainState:
        """Returns the state, or the first if a rounded student ends worse than it began."""
        job, loss = self._job, self._job.step.spec.head.loss

        def measure(params: Params) -> tuple[dict[str, float], list[dict[str, float]]]:
            inputs = params, job.teacher_params, job.eval_batches()
            given = read_sums(job.step.sum_evaluation, *inputs)
            return merge_sums(given, loss, job.heldout_bytes), split_figures(given, loss)

        seen = job.step.see(state)
        figures, parts = measure(job.step.add_extra(seen, state))
        if job.step.spec.form.rounds:
            masters = job.step.add_extra(state.params, state)
            figures |= masters_figures(measure(masters)[0])
            self._first.update({} if step else figures)
            if chosen and self._first:
                better, news = judge_rounded(self._first, figures)
                _log.info("%s", news)
                if not better:
                    del seen
                    state, figures, parts = _begin_again(job, state), self._first, []
                    seen = job.step.see(state)
        for hook in self._hooks:
            hook.eval_end(step, figures)
        for hook in self._hooks:
            hook.student(step, seen)
        self._judge.see(step, figures, parts)
        return state
