"""Lists what a run would hold in device memory, and says whether it fits. Allocates nothing.

    kdjax plan --config=qwen7b_0p5b
    kdjax plan --config=qwen7b_0p5b --config.train.batch_size=8 --config.data.seq_len=2048

Reads only the headers of both models: the beginning of a download is
enough. A run that does not fit ends with status 2 and the settings that
would.
"""

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from kdjax.commands.parsing import (
    RunCommand,
    log_to_terminal,
    parse_run,
    require_files,
    run_parser,
    started,
)
from kdjax.config import Config
from kdjax.errors import BAD_INPUT, FINISHED, MissingFileError, reporting
from kdjax.hub import fetch_headers

if TYPE_CHECKING:
    from kdjax.training.memory import Plan

_log = logging.getLogger("kdjax")


def survey_headers(config: Config) -> "Plan":
    """The plan of a run, from the headers of its models; allocates nothing.

    On a CPU XLA compiles the step and tells its memory.
    """
    from kdjax.training.compiled import ask_xla
    from kdjax.training.job import survey

    with started(lean=True), tempfile.TemporaryDirectory() as folder:
        headers = fetch_headers(config, Path(folder))
        placement, pair, plan = survey(headers, whole=False)
        return ask_xla(plan, headers, pair, placement)


def print_plan(plan: "Plan") -> int:
    """Prints a plan, in the first process alone; returns whether it fits, as an exit status."""
    if jax.process_index() == 0:
        print("\n".join(plan.lines()))
    return BAD_INPUT if plan.missing else FINISHED


def plan_run(run: RunCommand) -> int:
    """Plans a command line's run; returns the exit status."""
    try:
        require_files(run)
    except MissingFileError as error:
        require_files(run, text=False)
        _log.warning("planned without text: %s", error)
    return print_plan(survey_headers(run.config))


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    log_to_terminal()
    return plan_run(parse_run(run_parser("plan", __doc__), argv))
