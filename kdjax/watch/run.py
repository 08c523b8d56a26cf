"""Runs a config from start to end: assembles, trains and watches it."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from kdjax.config import (
    Config,
    check_fields,
    flatten,
    last_step,
    refusing,
    settle_dtype,
    validate,
)
from kdjax.data.pipeline import BatchSource
from kdjax.device import cluster, runtime
from kdjax.errors import WriteError
from kdjax.formats.locks import holding
from kdjax.formats.saved import CHECKPOINTS, check_folder, saved_steps, saved_when
from kdjax.hub import fetch_files
from kdjax.losses.kd import KDLoss
from kdjax.losses.layers import LayerLoss
from kdjax.models.decoder import DecoderFunctions
from kdjax.progress import PHASES, timing
from kdjax.training.forms import form_of
from kdjax.training.hooks import Hook, StepRecord
from kdjax.training.inputs import check_finished
from kdjax.training.job import Job, assemble, survey
from kdjax.training.loop import train
from kdjax.training.saving import Checkpoints, is_finished
from kdjax.training.user_code import UserCode
from kdjax.watch import writers
from kdjax.watch.guards import CollapseGuard, NonFiniteGuard, NoSignalGuard, SharedGuard
from kdjax.watch.receipt import Receipt, close_finished
from kdjax.watch.report import FILE as REPORT
from kdjax.watch.report import ReportPage
from kdjax.watch.samples import Samples
from kdjax.watch.smoke import Verdict

_log = logging.getLogger("kdjax")


@refusing("distill({}=)")
def distill(
    config: Config,
    workdir: str | Path,
    *,
    batches: BatchSource | None = None,
    optimizer: optax.GradientTransformation | None = None,
    loss: KDLoss | None = None,
    student: nnx.Module | None = None,
    extra: LayerLoss | Sequence[LayerLoss] = (),
    on_step: Callable[[StepRecord], Any] | None = None,
    on_eval: Callable[[Mapping[str, float]], Any] | None = None,
    verdict: Verdict | None = None,
    suits_cpu: bool = False,
    distributed: str = "auto",
    join_timeout: int = cluster.JOIN_TIMEOUT,
) -> str:
    """Trains the config's student in `workdir`; returns "finished" or "interrupted".

    A run that was stopped continues from its newest checkpoint. `batches` replaces the batches of
    the config's text, of which held-out figures still are; `optimizer` replaces what `optim` says,
    `loss` what `loss` says; `extra` are losses of layers, added to it as in `make_step`. `student`
    is a Flax NNX module, as `Model.from_module` takes it, that trains in place of `student.path`,
    with the tokenizer of that file; the plan of memory takes that file's sizes.
    `on_step(record)` gets each finished step, and stops the run by returning True;
    `on_eval(figures)` gets the held-out figures and their `step`. The receipt names such Python
    and says that no hash covers its code. `verdict` judges a smoke run (`smoke.steps`).
    With `distributed="auto"` processes that an engine started train together, see
    `cluster.started`; all share the disk of `workdir`.
    A GPU that JAX does not use is an error, unless the run `suits_cpu`.
    Raises `UserError` for a run that cannot start, `LockedError` if another process trains in
    `workdir`, `WriteError` if a disk is full or read-only, and `NonFiniteError` if a loss becomes
    NaN.

        config = kdjax.Config()
        config.teacher.path, config.student.path = "teacher.gguf", "student.gguf"
        config.data.train = "corpus"
        kdjax.distill(config, "runs/a")
    """
    workdir = Path(workdir)
    user_code = UserCode(batches, optimizer, loss, student, extra, on_step, on_eval)
    check_fields(config)  # `rewrite` copies, without attributes that are no fields
    config = user_code.rewrite(config)
    validate(config)
    config = user_code.name_loss(config)
    check_folder(workdir)
    if config.log.tracker:
        writers.import_tracker(config.log.tracker)
    with contextlib.ExitStack() as held:
        held.callback(PHASES.clear)
        joined = cluster.started(distributed, join_timeout, suits_cpu=suits_cpu)
        with timing("devices"):
            devices = held.enter_context(joined)
        config = settle_dtype(config, jax.default_backend())
        with timing("downloads"):
            config = fetch_files(config, check=functools.partial(survey, whole=False))
        held.enter_context(_naming_checkpoint(workdir))
        held.enter_context(_holding(workdir))
        cluster.check_agreement("config", flatten(config))
        cluster.check_shared(workdir)
        checkpoints = held.enter_context(Checkpoints(workdir, config.checkpoint.keep))
        step = checkpoints.latest()
        if step is not None and is_finished(step, config, workdir):
            check_finished(config, workdir, user_code)
            _close(workdir, step, config.train.steps)
            return "finished"
        if step is not None:
            when, last = saved_when(workdir, step), last_step(config)
            _log.info("resuming %s from step %d of %d, saved %s", workdir, step, last, when)
        job = assemble(config, workdir, user_code, ahead=True)
        if not config.smoke.steps:
            checkpoints.check_room(job.step.abstract)
        chosen = {"the teacher's kind": job.kind} | flatten(job.config)
        cluster.check_agreement("job", job.identity | chosen)
        hooks = make_hooks(job, checkpoints, devices, verdict)
        reason = train(job, checkpoints, hooks, devices.peak_flops)
        _log.info("%s", runtime.peak_memory())
        return reason


@contextlib.contextmanager
def _holding(workdir: Path) -> Iterator[None]:
    """Makes the workdir and locks it; of several processes the first one does, for all."""
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            held.enter_context(holding(workdir, "give another workdir"))
        yield


def _close(workdir: Path, step: int, steps: int) -> None:
    """Completes the receipt and the page of a run that was killed after its last save."""
    if jax.process_index() == 0:
        closed = close_finished(workdir, step)
        if closed or not (workdir / REPORT).exists():
            ReportPage(workdir).train_end("finished", None)
    more = f" More steps: a larger train.steps and train.after={step}."
    _log.info(
        "%s already holds step %d of %d: nothing to do.%s",
        *(workdir, step, steps, more if step == steps else ""),
    )


@contextlib.contextmanager
def _naming_checkpoint(workdir: Path) -> Iterator[None]:
    """Adds to a `WriteError` the checkpoint from which the same command resumes."""
    try:
        yield
    except WriteError as error:
        steps = saved_steps(workdir)
        saved = "No checkpoint was saved: the run begins anew."
        if steps:
            newest = workdir / CHECKPOINTS / str(steps[-1])
            saved = f"The last good checkpoint is {newest}: the run goes on from there."
        raise WriteError(f"{error}\n{saved}") from error


def make_hooks(
    job: Job, checkpoints: Checkpoints, devices: runtime.Devices, verdict: Verdict | None = None
) -> list[Hook]:
    """The hooks of `job` for this process, in the order in which the loop calls them.

    The guard is the first, so that no other hook records a broken step as good; every process has
    one, and samples, of which each computes its rows. All others write files or to the terminal:
    only the first process has them. The receipt comes before the writers, so that a workdir with
    figures always says what they are of. Samples come before the page, which is the last because it
    reads the files of all the others.

    A smoke run has its `verdict` in place of samples and page, and writes no curves to TensorBoard
    or Weights & Biases, where they would join the curves of the full run.
    """
    config, workdir = job.config, job.workdir
    hooks: list[Hook] = [NonFiniteGuard(workdir, jax.process_index()), *job.user_code.hooks]
    form = form_of(config.student)
    # Of a form that differs from its file this file may be the teacher, and a block that drafts may
    # do it well before it has learned more.
    if not (config.teacher.allow_degenerate or config.loss.alpha == 1 or form.differs):
        hooks.append(NoSignalGuard())
    hooks.append(SharedGuard(config.loss.allow_few_shared))
    first = jax.process_index() == 0
    if first:
        hooks += [
            Receipt(job, checkpoints, devices, verdict),
            writers.JsonLines(workdir),
            writers.Terminal(),
        ]
    if config.rollout.prompts:  # behind the writers of what it stops at
        hooks.append(CollapseGuard(workdir, config.rollout))
    if verdict:
        return [*hooks, verdict]  # the verdict decides the exit status of every process
    if first and config.log.tensorboard:
        hooks.append(writers.TensorBoard(workdir))
    if first and config.log.tracker:
        hooks.append(writers.Tracker(config.log.tracker, workdir))
    writes = isinstance(job.step.spec.student, DecoderFunctions) and form.writes
    if config.eval.samples and writes:
        student, placement = job.step.spec.student, job.step.placement
        reader = job.pair.vocabulary.find_reader(job.teacher)
        samples = reader, job.pair.tokenizer, job.rows.heldout, placement
        hooks.append(Samples(workdir, config.eval.samples, student, *samples))
    return [*hooks, ReportPage(workdir)] if first else hooks
