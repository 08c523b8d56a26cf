"""python -m kdjax.main --config=configs/qwen7b_0p5b.py --workdir=runs/a

Flags, runtime, loop. Kept short: what it calls can be imported and tested.

Exit status: 0 finished, or a smoke run that passed; 2 bad input; 3 a smoke run that failed; 4 loss
or gradient not finite; 75 stopped by a signal and saved (the same command resumes); 130 stopped by
Ctrl-C at once.
"""

import logging
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags

from kdjax.config import Config, flatten, validate
from kdjax.device import runtime
from kdjax.errors import (
    BAD_INPUT,
    FINISHED,
    INTERRUPTED,
    NOT_FINITE,
    QUIT,
    SMOKE_FAILED,
    MissingFileError,
    UserError,
)  # fmt: skip
from kdjax.training.hooks import NonFiniteError, exit_status
from kdjax.watch.smoke import Verdict

_log = logging.getLogger("kdjax")

__all__ = ["BAD_INPUT", "FINISHED", "INTERRUPTED", "NOT_FINITE", "QUIT", "SMOKE_FAILED"]

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/, with get_config().")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints, metrics and logs go.")
_PLAN = flags.DEFINE_bool("plan", False, "Only print what would live where, and whether it fits.")


def open_workdir(path: str) -> Path:
    """Creates the folder; raises `UserError` if nothing can be written there."""
    workdir = Path(path)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise UserError(
            f"--workdir={path} cannot be written: {error.strerror}. Give a folder you own."
        ) from error
    return workdir


def distil(config: Config, workdir: Path, verdict: Verdict | None = None) -> str:
    """Assembles and trains; returns how the run ended. A smoke run is judged by `verdict`."""
    from kdjax.training.job import assemble
    from kdjax.training.loop import train
    from kdjax.training.saving import Checkpoints, check_fresh
    from kdjax.watch.watchers import make_hooks

    validate(config)
    for line in runtime.configure().describe():
        _log.info("%s", line)
    devices = runtime.device_summary()
    _log.info("%s", devices)
    with Checkpoints(workdir, config.checkpoint.keep) as checkpoints:
        if config.smoke.steps:
            check_fresh(checkpoints.latest(), workdir)
        if checkpoints.latest() == config.train.steps:
            _log.info("%s already holds step %d of %d: nothing to do.", workdir,
                         config.train.steps, config.train.steps)  # fmt: skip
            return "finished"
        job = assemble(config, workdir)
        hooks = make_hooks(job, checkpoints, devices, verdict)
        reason = train(job, checkpoints, hooks, devices.peak_flops)
        _log.info("%s", runtime.peak_memory())
        return reason


def show_plan(config: Config) -> bool:
    """Prints the plan of a run, allocating nothing; returns whether it fits."""
    from kdjax.training.job import survey

    validate(config)
    os.environ.setdefault(runtime.PREALLOCATE, "false")
    for line in runtime.configure().describe():
        _log.info("%s", line)
    _log.info("%s", runtime.device_summary())
    plan = survey(config)[2]
    print("\n".join(plan.lines()))
    return not plan.missing


def log_to_terminal() -> None:
    """Shows kdjax's own lines, with the time, and warnings of others."""
    # Libraries log through absl at INFO (Orbax a dozen lines a save); the run's own lines do not.
    absl_logging.set_verbosity(absl_logging.WARNING)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    _log.handlers, _log.propagate = [handler], False
    _log.setLevel(logging.INFO)


def configured() -> Config:
    """The config of the parsed flags; raises `MissingFileError` for a file without one."""
    if not isinstance(_CONFIG.value, Config):
        name = config_flags.get_config_filename(flags.FLAGS["config"])
        raise MissingFileError(f"--config={name}: no such file, or no get_config() -> Config.")
    return _CONFIG.value


def main(argv: list[str]) -> int:
    """Runs the command; returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; set fields by --config.<field>=")
    log_to_terminal()
    verdict = None
    try:
        config = configured()
        if _PLAN.value:
            return FINISHED if show_plan(config) else BAD_INPUT
        if not _WORKDIR.value:
            raise UserError("--workdir is missing: name the folder that checkpoints go to.")
        if config.smoke.steps:
            verdict = Verdict(config)
        reason = distil(config, open_workdir(_WORKDIR.value), verdict)
    except (UserError, NonFiniteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_status("failed", error, verdict.result if verdict else None)
    except KeyboardInterrupt:
        print("stopped at once; what was saved before is kept. The same command goes on from "
              f"there: {_same_command()}")  # fmt: skip
        return QUIT
    if verdict:
        return exit_status(reason, None, verdict.result)
    if reason == "interrupted":
        print(f"saved; resume with: {_same_command()}")
        return INTERRUPTED
    from kdjax.watch.report.page import closing_lines

    print(
        f"done: {_WORKDIR.value}",
        *closing_lines(Path(_WORKDIR.value), config.train.steps),
        sep="\n",
    )
    return FINISHED


def _same_command() -> str:
    """What was typed, as a shell takes it."""
    return shlex.join(sys.orig_argv)


def parse(argv: list[str]) -> list[str]:
    """Parses the command line; ends with status 2 and one clear message if it is wrong."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:  # one of get_config() comes with its whole traceback
        message = str(error).strip().splitlines()[-1]
    except OSError:  # the config file itself; ml_collections does not name it here
        named = next((arg for arg in argv if arg.startswith("--config=")), "--config")
        message = f"{named}: no such file, or no get_config() -> Config."
    except KeyError as error:  # ml_collections: a field that the dataclass does not have
        known = "\n  ".join(f"--config.{name}" for name in flatten(Config()))
        message = f"{error.args[0]}. The fields are:\n  {known}"
    print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def cli() -> None:
    """Entry point."""
    # Until the loop listens to signals, SIGTERM is Ctrl-C: what was begun aside is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    flags.mark_flag_as_required("config")
    try:
        app.run(main, flags_parser=parse)
    except SystemExit as end:
        if end.code == QUIT:  # threads that hash or save are not waited for
            sys.stdout.flush()
            os._exit(QUIT)
        raise


if __name__ == "__main__":
    cli()
