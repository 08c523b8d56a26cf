"""How much better one setting of scripts.onpolicy.table is than another, over problems.

    python -m scripts.onpolicy.interval OUT/0/table.json OUT/1/table.json --of=own --against=offline

The seeds of a setting are put together: a problem's figure is the share of all its samples that
passed. The interval holds 95% of the mean differences of problems drawn anew (10,000 times, the
same problems for both). Exit status: 0 done, 2 bad input.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdjax.errors import UserError, reporting
from kdjax.evaluation.passk import draw_anew

SETS = ("development", "humaneval", "mbpp")


class Difference(NamedTuple):
    """Mean difference of two settings, its interval, and the means by seed."""

    mean: float
    low: float
    high: float
    of: list[float]
    against: list[float]


def read_shares(rows: Sequence[Mapping[str, Any]], setting: str, name: str) -> list[np.ndarray]:
    """Share of samples that passed, [problems], of each seed in order."""
    found = [row for row in rows if row["setting"] == setting and name in row]
    shares = []
    for row in sorted(found, key=lambda row: row["seed"]):
        passed = np.asarray([int(x) for x in row[name]["passed"]])
        shares.append(passed.reshape(row[name]["problems"], -1).mean(axis=1))
    if not shares:
        known = ", ".join(sorted({row["setting"] for row in rows}))
        raise UserError(f"no row of {setting} has {name}; the tables hold {known}.")
    return shares


def compare(rows: Sequence[Mapping[str, Any]], of: str, against: str, name: str) -> Difference:
    """The difference on the problems of `name`."""
    mine, others = (read_shares(rows, setting, name) for setting in (of, against))
    sizes = sorted({len(shares) for shares in [*mine, *others]})
    if len(sizes) > 1:
        raise UserError(
            f"found rows of {of} and {against} judged on {' and '.join(map(str, sizes))} problems "
            f"of {name}; expected the same ones. Leave out the tables of other problems."
        )
    low, high = draw_anew(np.stack(mine), np.stack(others), seeds=False)
    means = [[float(x.mean()) for x in shares] for shares in (mine, others)]
    return Difference(float(np.mean(mine) - np.mean(others)), low, high, *means)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each set of problems; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts.onpolicy.interval", description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--of", required=True)
    parser.add_argument("--against", default="offline")
    args = parser.parse_args(argv)
    rows = [row for path in args.tables for row in json.loads(path.read_text())]
    sets = [name for name in SETS if any(row["setting"] == args.of and name in row for row in rows)]
    if not sets:
        known = ", ".join(sorted({row["setting"] for row in rows}))
        raise UserError(f"found no judged row of {args.of}; the tables hold {known}.")
    for name in sets:
        found = compare(rows, args.of, args.against, name)
        by_seed = " ".join(f"{x:.4f}" for x in found.of)
        others = " ".join(f"{x:.4f}" for x in found.against)
        print(
            f"{name}: {args.of} {by_seed}, {args.against} {others}: "
            f"{100 * found.mean:+.1f} points, 95% {100 * found.low:+.1f} to {100 * found.high:+.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
