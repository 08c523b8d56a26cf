"""Rechecks the receipt of a run against everything that it names.

    kdjax verify runs/demo

Hashes the config, both models, the packed rows, their source text and the saved parameters again,
and counts the tensors that differ from the student's file. Each check is a line; a failed one ends
the command with status 5.
"""

from pathlib import Path

from kdjax.commands.parsing import Parser
from kdjax.errors import CHECK_FAILED, FINISHED, reporting


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = Parser("verify", __doc__, CHECK_FAILED)
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="of a run that has ended")
    options = parser.parse_args(argv)
    from kdjax.watch.verify import verify

    for line in verify(options.workdir):
        print(line)
    return FINISHED
