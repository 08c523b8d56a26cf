"""Distils a teacher into a student, from a config to a trained checkpoint and a report.

    kdjax train --config=demo
    kdjax train --config=my_config.py --workdir=runs/a --config.train.steps=2000

The config is a Python file with get_config(), or one that comes with kdjax; `:KIND` after its name
picks a variant of it. The same command resumes a run that was stopped.
"""

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from kdjax.commands.parsing import (
    PROMPT,
    RunCommand,
    add_cluster_flags,
    log_to_terminal,
    parse_run,
    require_files,
    run_parser,
)
from kdjax.commands.plan import add_machine_flags, find_machine, plan_run
from kdjax.config import Config
from kdjax.errors import (
    CHECK_FAILED,
    COLLAPSED,
    FINISHED,
    INTERRUPTED,
    NOT_FINITE,
    PEER_LOST,
    QUIT,
    SMOKE_FAILED,
    KdjaxError,
    UserError,
    print_error,
    reporting,
)
from kdjax.formats.saved import CHECKPOINTS, check_folder, saved_steps
from kdjax.progress import timing
from kdjax.training.hooks import exit_status
from kdjax.watch.smoke import Verdict

_log = logging.getLogger("kdjax")
# How a training run may end, in addition to what every command does.
ENDS = SMOKE_FAILED, NOT_FINITE, CHECK_FAILED, COLLAPSED, PEER_LOST, INTERRUPTED


def check_workdir(workdir: Path) -> Path:
    """Returns the folder, not made yet; raises `UserError` if it cannot hold a run."""
    check_folder(workdir)
    there = next(p for p in (workdir, *workdir.absolute().parents) if os.path.lexists(p))
    reason = "" if there.is_dir() else f"{there} is no folder"
    if reason or not os.access(there, os.W_OK | os.X_OK):
        reason = reason or f"{there} is not writable"
        raise UserError(f"--workdir={workdir} cannot be written: {reason}. Give a folder you own.")
    return workdir


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = run_parser("train", __doc__, *ENDS)
    text = "folder for checkpoints, metrics and the report; runs/<name of the config> by default"
    parser.add_argument("--workdir", help=text)
    add_machine_flags(parser, "as `kdjax plan`: train nothing")
    add_cluster_flags(parser)
    log_to_terminal()
    run = parse_run(parser, argv)
    run.options.machine = find_machine(run.options, parser)
    return carry_out(run)


def carry_out(run: RunCommand, *, part: bool = False) -> int:
    """Plans or trains a command line's run; returns the exit status.

    A run that is `part` of another command leaves it to that command to say what comes next.
    """
    if run.options.plan:
        return plan_run(run, run.options.machine)
    workdir = Path(run.options.workdir or Path("runs", run.name))
    check_workdir(workdir)
    if not (workdir / CHECKPOINTS).is_dir():  # a finished run may have lost its files
        require_files(run)
    options = {name: getattr(run.options, name) for name in ("distributed", "join_timeout")}
    options["suits_cpu"] = run.suits_cpu
    return train_and_report(run.config, workdir, part=part, **options)


def train_and_report(config: Config, workdir: Path, *, part: bool = False, **options: Any) -> int:
    """Trains and says how the run ended; returns the exit status. `options` are `distill`'s."""
    verdict = Verdict(config) if config.smoke.steps else None
    try:
        # Importing JAX takes a second, in which a signal may arrive.
        with timing("imports", 0.0):
            from kdjax.watch.run import distill

        reason = distill(config, workdir, verdict=verdict, **options)
    except (KdjaxError, OSError) as error:
        print_error(error)
        return exit_status("failed", error, verdict.result if verdict else None)
    except KeyboardInterrupt:
        print(
            "stopped at once; what was saved before is kept. The same command goes on from "
            f"there: {_same_command()}"
        )
        return QUIT
    if verdict:
        return exit_status(reason, None, verdict.result)
    if reason == "interrupted":
        print(f"saved; resume with: {_same_command()}")
        return INTERRUPTED
    import jax

    from kdjax.watch.report.page import closing_lines

    if jax.process_index() != 0:
        return FINISHED
    print(f"done: {workdir}", *closing_lines(workdir, saved_steps(workdir)[-1]), sep="\n")
    if not part:
        print("\n".join(list_next(config, workdir)))
    return FINISHED


def list_next(config: Config, workdir: Path) -> list[str]:
    """Commands to type after a finished run, below a title; none after one of a block or head."""
    student, run = config.student, shlex.quote(str(workdir))
    if student.block:
        return []
    out, options = f"{workdir.name}.gguf", "gguf" if student.quantize else "gguf --type=q8_0"
    if student.lora.rank:
        out, options = f"{workdir.name}-adapter", "peft"
    return [
        "next:",
        f"  kdjax generate {run} {PROMPT}",
        f"  kdjax export {run} --format={options} --out={shlex.quote(out)}",
        f"  kdjax verify {run}",
    ]


def _same_command() -> str:
    """The current command, quoted for a shell."""
    return shlex.join(sys.orig_argv)
