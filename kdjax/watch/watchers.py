"""The hooks of a run, listed in the one place that decides their order."""

import logging

import jax

from kdjax.device.runtime import Devices
from kdjax.training.hooks import Hook, NonFiniteGuard
from kdjax.training.job import Job
from kdjax.training.saving import Checkpoints
from kdjax.watch import writers
from kdjax.watch.receipt import Receipt
from kdjax.watch.report import ReportPage
from kdjax.watch.samples import Samples
from kdjax.watch.smoke import Verdict

_log = logging.getLogger("kdjax")


def make_hooks(
    job: Job, checkpoints: Checkpoints, devices: Devices, verdict: Verdict | None = None
) -> list[Hook]:
    """The hooks of `job` for this process, in the order in which the loop calls them.

    The guard is the first, so that no other hook records a broken step as good; every process has
    one. All others write files or to the terminal: only the first process has them. The receipt
    comes before the writers, so that a workdir with figures always says what they are of. Samples
    come before the page, which is the last because it reads the files of all the others.

    A smoke run has its `verdict` in place of samples and page, and leaves no curves in TensorBoard
    or Weights & Biases: they would be joined with those of the run that it tries.
    """
    config, workdir = job.config, job.workdir
    hooks: list[Hook] = [NonFiniteGuard(workdir, jax.process_index())]
    if jax.process_index() != 0:
        return hooks + ([verdict] if verdict else [])  # the verdict decides the exit status
    hooks += [
        Receipt(job, checkpoints, devices, verdict),
        writers.JsonLines(workdir),
        writers.Terminal(),
    ]
    if verdict:
        return [*hooks, verdict]
    if config.log.tensorboard:
        hooks.append(writers.TensorBoard(workdir))
    if config.log.wandb_project:
        hooks.append(writers.WeightsAndBiases(config.log.wandb_project, workdir))
    if jax.process_count() > 1:
        _log.info("no samples: they are made by runs of one process only")
    elif config.eval.samples:
        hooks.append(Samples(workdir, config.eval.samples, job.step_spec.student, job.teacher,
                             job.sources.tokenizer, job.rows.heldout))  # fmt: skip
    return [*hooks, ReportPage(workdir)]
