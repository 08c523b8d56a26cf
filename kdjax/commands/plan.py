"""Lists what a run would hold in device memory, and says whether it fits. Allocates nothing.

    kdjax plan --config=qwen7b_0p5b
    kdjax plan --config=qwen7b_0p5b --config.train.batch_size=8 --config.data.seq_len=2048
    kdjax plan --config=qwen7b_0p5b --device=H100 --devices=2 --memory=16GB    # another machine
    kdjax plan --config=qwen7b_0p5b --device=H100 --devices=8 --hosts=2        # two of them
    kdjax plan --config=qwen7b_0p5b --rows=2           # and what it would train on

Reads only the headers of both models: the beginning of a download is enough. The plan depends on
the config and on the device's total memory, not on what other programs hold. A run that does not
fit ends with status 2 and the settings that would.
"""

import argparse
import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from kdjax.commands.data import show_run
from kdjax.commands.parsing import (
    Parser,
    RunCommand,
    check_least,
    log_to_terminal,
    parse_run,
    require_files,
    run_parser,
    started,
)
from kdjax.config import Config, flatten
from kdjax.device.machines import WORDS, Machine
from kdjax.device.runtime import count_total
from kdjax.device.sharding import list_meshes
from kdjax.errors import BAD_INPUT, FINISHED, MissingFileError, reporting
from kdjax.hub import fetch_headers

if TYPE_CHECKING:
    from kdjax.training.memory import Plan
    from kdjax.training.pair import Pair

_log = logging.getLogger("kdjax")


def add_machine_flags(parser: Parser, plan: str = "", *, hosts: bool = True) -> None:
    """Adds the flags of another machine, or of several `hosts`; `find_machine` reads them.

    With `plan`, its help, they need the flag --plan, which a command that only plans has not.
    """
    add = parser.add_argument
    if plan:
        add("--plan", action="store_true", help=plan)
    parser.set_defaults(plan=not plan, hosts=None)
    text = f"plan for it in place of this machine's: {', '.join(WORDS)}"
    add("--device", default="", metavar="NAME", help=text)
    text = "of one device, such as 16GB or 24GiB; a GPU's run takes 90%% of it; by default all that"
    add("--memory", default="", metavar="SIZE", help=f"{text} --device has")
    text = "number of devices in one process, for --device; default: 1"
    add("--devices", type=int, metavar="N", help=text)
    if hosts:
        text = "number of hosts with --devices each, one process a host, for --device; default: 1"
        add("--hosts", type=int, metavar="N", help=text)


def find_machine(options: argparse.Namespace, parser: Parser) -> Machine | None:
    """The machine that flags describe; None: this one.

    Raises `UserError` for flags that do not go together, and without --plan.
    """
    if options.device and not options.plan:
        parser.error("--device describes another machine: expected --plan with it")
    counts = [options.devices, options.hosts]
    if options.device:
        jax.config.update("jax_platforms", "cpu")  # nothing runs on a GPU of this machine
        numbers = (1 if number is None else number for number in counts)
        return Machine.describe(options.device, options.memory, *numbers)
    if options.memory or counts != [None, None]:
        parser.error(f"--memory, --devices and --hosts need --device, one of {', '.join(WORDS)}")
    return None


def survey_headers(
    config: Config, machine: Machine | None = None, flags: Mapping[str, str] | None = None
) -> "Plan":
    """The plan of a run, from the headers of its models; allocates nothing.

    On a CPU XLA compiles the step and tells its memory. `flags` has the flags of the command by the
    fields that they set; None: all, as `--config.FIELD`.
    """
    from kdjax.training.compiled import ask_xla
    from kdjax.training.job import survey

    here = started(lean=True) if machine is None else contextlib.nullcontext()
    with here, tempfile.TemporaryDirectory() as folder:
        headers = fetch_headers(config, Path(folder))
        machine = machine or Machine.here()
        placement, pair, plan = survey(headers, whole=False, machine=machine)
        told = ask_xla(plan, headers, pair, placement)
        return _add_least(told, headers, machine, pair, flags)


def _add_least(
    plan: "Plan",
    config: Config,
    machine: Machine,
    pair: "Pair",
    flags: Mapping[str, str] | None = None,
) -> "Plan":
    """Adds the smallest device that the run can go to; as `plan` is where nothing is smaller."""
    from kdjax.training.memory import CPU_ERROR, Least
    from kdjax.training.plan import list_plans, take_least, write_flags

    axes, summary = config.mesh, machine.summary
    mesh = list_meshes(axes.data, axes.fsdp, axes.tensor, machine.devices)[-1]
    leanest, changes = take_least(list_plans(config, pair, mesh, summary, plan.kind, flags))
    on_cpu = summary.platform == "cpu"
    needed = leanest.needed * (CPU_ERROR if on_cpu else 1)
    if needed >= plan.needed:
        needed, changes = plan.needed, {}
    shared = summary.count if on_cpu else 1  # emulated devices share the RAM
    total = math.ceil(count_total(summary.platform, needed * shared) / 1e7) * 1e7  # as it is shown
    written = write_flags(changes, flatten(config), flags)
    return dataclasses.replace(plan, least=Least(total, written, on_cpu))


def print_plan(plan: "Plan") -> int:
    """Prints a plan, in the first process alone; returns whether it fits, as an exit status."""
    if jax.process_index() == 0:
        print("\n".join(plan.lines()))
    return BAD_INPUT if plan.missing else FINISHED


def plan_run(run: RunCommand, machine: Machine | None = None, *, text: bool = True) -> int:
    """Plans a command line's run, for this machine or another; returns the exit status.

    Without `text` the command makes the run's text itself, so that no file of it is missing.
    """
    try:
        require_files(run, text=text)
    except MissingFileError as error:
        require_files(run, text=False)
        _log.warning("planned without text: %s", error)
    return print_plan(survey_headers(run.config, machine))


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    log_to_terminal()
    parser = run_parser("plan", __doc__)
    add_machine_flags(parser)
    text = "show this many rows of the text, too, as `kdjax data` does"
    parser.add_argument("--rows", type=int, metavar="N", help=text)
    run = parse_run(parser, argv)
    check_least(run.options, rows=0)
    status = plan_run(run, find_machine(run.options, parser))
    if run.options.rows is not None:
        show_run(run, run.options.rows)
    return status
