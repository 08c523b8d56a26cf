"""Draws what runs left in their workdirs: one page that needs no network, and PNG files beside it.

    python -m kdjax.report runs/a                # runs/a/report.html, runs/a/report/*.png
    python -m kdjax.report runs/a runs/b         # both in one page: runs/a/comparison.html
    python -m kdjax.report runs/a runs/b --out=compared.html

A run may be going on, interrupted, or broken: the page says so and shows what there is.

Exit status: 0 done, 2 bad input.
"""

import argparse
import sys
from pathlib import Path

from kdjax.errors import FINISHED, reporting
from kdjax.watch.report import page


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kdjax.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workdir", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE.html")
    args = parser.parse_args(argv)
    print(page.write_page(args.workdir, args.out))
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
