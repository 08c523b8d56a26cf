"""Draws the results of runs: one page that needs no network, and PNG files next to it.

    kdjax report runs/a                          # runs/a/report.html, runs/a/report/*.png
    kdjax report runs/a runs/b                   # both in one page: runs/a/comparison.html
    kdjax report runs/a runs/b --out=compared.html

A run may be going on, interrupted, or broken: the page says so and shows what there is.
"""

from pathlib import Path

from kdjax.commands.parsing import Parser
from kdjax.errors import FINISHED, reporting
from kdjax.watch.report import page


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = Parser("report", __doc__)
    parser.add_argument("workdir", nargs="+", type=Path, metavar="WORKDIR", help="of a run")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="path of the page")
    args = parser.parse_args(argv)
    print(page.write_page(args.workdir, args.out))
    return FINISHED
