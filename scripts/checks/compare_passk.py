"""Which of two models solves more problems? A paired test of what `kdjax evaluate --json` wrote.

    python -m scripts.checks.compare_passk before.json after.json [another.json ...]

Every other file against the first, benchmark by benchmark and over all problems together, as a
table in Markdown. A problem is better if more of its samples pass than before; over all, a problem
that was asked in several ways counts once, by its samples of all of them. p is that of an exact
two-sided sign test of how many are better and how many worse. Two pass rates of the same problems
say less: most of the difference between problems is in both. Files are refused if their problems,
samples a problem or wordings differ.

A second table has the later files as seeds of one setting, and those that commas join to the first,
`a-0.json,a-1.json`, as seeds of the other: each benchmark, and of `--wording=all` the mean over the
wordings, greedy. The interval holds 95% of the differences of problems and seeds drawn anew.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from kdjax.errors import UserError, reporting
from kdjax.evaluation.passk import draw_anew
from kdjax.evaluation.sandbox import PASSED

BENCHMARKS = {"development": "Development", "humaneval": "HumanEval", "mbpp": "MBPP"}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The benchmarks in a file of `kdjax evaluate --json`; raises `UserError` if there is none."""
    try:
        found = json.loads(path.read_text())
        named = {name: found[name] for name in found if name.partition(" ")[0] in BENCHMARKS}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: found no readable JSON ({error}); expected what `--json` wrote"
        ) from error
    kept = {name: of for name, of in named.items() if isinstance(of, dict) and "results" in of}
    if not kept:
        raise UserError(
            f"{path}: found neither HumanEval nor MBPP; expected a file of `kdjax evaluate TARGET "
            "--humaneval=FILE --json=THIS`"
        )
    return kept


def passed(benchmark: dict[str, Any]) -> dict[str, list[bool]]:
    """Whether each sample of each problem passed."""
    samples = defaultdict(list)
    for result in benchmark["results"]:
        samples[result["task"]].append(result["reason"] == PASSED)
    return samples


def count_changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """Samples of each problem that pass beyond those before; `ValueError` if they do not pair."""
    if before["wording"] != after["wording"]:
        raise ValueError(f"worded {before['wording']} there, {after['wording']} here")
    old, new = passed(before), passed(after)
    if (counts := {k: len(v) for k, v in old.items()}) != {k: len(v) for k, v in new.items()}:
        raise ValueError(
            f"{len(counts)} problems and {sum(counts.values())} samples there, "
            f"{len(new)} and {sum(map(len, new.values()))} here, or other problems"
        )
    return {task: sum(new[task]) - sum(old[task]) for task in old}


def pair(
    first: Path, before: dict[str, Any], path: Path, after: dict[str, Any], name: str
) -> dict[str, int]:
    """`count_changes` of two files' benchmark; raises `UserError` if they do not pair."""
    try:
        return count_changes(before[name], after[name])
    except ValueError as error:
        raise UserError(
            f"{path}: its {_title(name)} does not pair with that of {first}: {error}"
        ) from error


def table(paths: Sequence[Path]) -> list[str]:
    """Rows of Markdown: each benchmark of each later file against the first's."""
    before = read(paths[0])
    rows = [
        "| file | benchmark | passed before | passed | better | worse | p |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for path in paths[1:]:
        after, every = read(path), Counter[tuple[str, str]]()
        shared = [name for name in before if name in after]
        if not shared:
            raise UserError(f"{path}: found no benchmark that {paths[0]} has as well")
        for name in shared:
            change = pair(paths[0], before, path, after, name)
            every.update({(name.partition(" ")[0], task): c for task, c in change.items()})
            rows.append(row(path, _title(name), rate(before[name]), rate(after[name]), change))
        if len(shared) > 1:
            rows.append(row(path, "all", "", "", every))
    return rows


def _title(name: str) -> str:
    benchmark, space, way = name.partition(" ")
    return BENCHMARKS[benchmark] + space + way


def over_seeds(befores: Sequence[Path], afters: Sequence[Path]) -> list[str]:
    """Rows of Markdown: each way to ask, and the mean over the wordings of a benchmark."""
    sides = [[read(path) for path in paths] for paths in (befores, afters)]
    shared = [way for way in sides[0][0] if all(way in file for side in sides for file in side)]
    for path, file in zip(befores, sides[0], strict=True):
        for way in shared:
            pair(befores[0], sides[0][0], path, file, way)
    rows = []
    for name, title in BENCHMARKS.items():
        ways = [way for way in shared if way.partition(" ")[0] == name]
        # Of samples at a temperature there is one wording.
        first = sides[0][0]
        greedy = [way for way in ways if first[way]["samples"] == first[way]["problems"]]
        rows += [_row_of_seeds(sides, [way], _title(way)) for way in ways]
        if len(greedy) > 1:
            rows.append(_row_of_seeds(sides, greedy, f"{title}, mean of {len(greedy)} wordings"))
    head = [
        "| benchmark | seeds | before, % | after, % | gain | 95% |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return [*head, *rows]


def _row_of_seeds(
    sides: Sequence[Sequence[dict[str, dict[str, Any]]]], ways: Sequence[str], title: str
) -> str:
    def share(file: dict[str, dict[str, Any]]) -> list[float]:
        """Share of each problem's samples that passed, the mean over the ways to ask."""
        found = [passed(file[way]) for way in ways]
        return [float(np.mean([ends[task] for ends in found])) for task in sorted(found[0])]

    before, after = (np.asarray([share(file) for file in side]) for side in sides)
    low, high = draw_anew(after, before)
    seeds = f"{len(before)}, {len(after)}"
    means = f"{100 * before.mean():.1f} | {100 * after.mean():.1f}"
    gain = f"{100 * (after.mean() - before.mean()):+.1f}"
    return f"| {title} | {seeds} | {means} | {gain} | {100 * low:+.1f} to {100 * high:+.1f} |"


def rate(benchmark: dict[str, Any]) -> str:
    return f"{benchmark['reasons'].get(PASSED, 0)} of {benchmark['samples']}"


def row(path: Path, name: str, before: str, after: str, change: Mapping[Any, int]) -> str:
    better, worse = sum(c > 0 for c in change.values()), sum(c < 0 for c in change.values())
    p = binomtest(better, better + worse).pvalue if better + worse else 1.0
    return f"| {path.stem} | {name} | {before} | {after} | {better} | {worse} | {p:.2g} |"


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a file, or several seeds' by commas")
    parser.add_argument("after", nargs="+", type=Path)
    args = parser.parse_args(argv)
    before = [Path(path) for path in args.before.split(",")]
    print("\n".join([*table([before[0], *args.after]), "", *over_seeds(before, args.after)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
