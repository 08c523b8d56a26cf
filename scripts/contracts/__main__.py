"""python -m scripts.contracts validate|bind|status|mutate

    validate [PATH...]     the schema's rules, over contracts/ or the files and folders given
    bind [RESULTS.xml...]  each claim's test exists and each fault has its place; given what
                           pytest --junitxml wrote, each test also ran and passed
    status [RESULTS.xml...] lists each claim, how many faults it has, its test, how that ended
    mutate [--only ID...]  plants each fault of contracts/mutants.yaml; its tests must go red
    mutate --json FILE     the same, and what came out as JSON: the last is in docs/records
    mutate --changed [BASE] those faults alone that what changed since BASE touches
    mutate --passed RESULTS.xml...  tests that passed there are not run once more without a fault

Run it in the repository. Exit status: 0 all is well, 1 something is not.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from kdjax.errors import UserError
from scripts.contracts.bind import (
    check_claims,
    check_mutants,
    locate,
    outcomes_of,
    read_mutants,
    read_results,
)
from scripts.contracts.changed import choose_base, select
from scripts.contracts.contracts import FOLDER, MUTANTS, read_claims, validate
from scripts.contracts.mutate import mutate

_ROOT = Path()


def _report(problems: list[str], well: str) -> int:
    print("\n".join([*problems, f"{len(problems)} problems" if problems else well]))
    return int(bool(problems))


def _bind(results: list[Path]) -> int:
    claims, mutants = read_claims([FOLDER]), read_mutants(FOLDER / MUTANTS)
    outcomes = read_results(results) if results else None
    problems = [*check_claims(_ROOT, claims, outcomes), *check_mutants(_ROOT, claims, mutants)]
    for mutant in mutants:
        for place in locate(_ROOT, mutant):
            if place.scope not in ("", mutant.where):
                print(f"note: mutant {mutant.id} was in {mutant.where}, is in {place.scope}")
    return _report(problems, f"{len(claims)} claims and {len(mutants)} faults are bound.")


def _status(results: list[Path]) -> int:
    claims, outcomes = read_claims([FOLDER]), read_results(results)
    faults = Counter(name for mutant in read_mutants(FOLDER / MUTANTS) for name in mutant.kills)
    ended = [" and ".join(sorted(outcomes_of(claim, outcomes))) for claim in claims]
    rows = [
        (claim.id, "proof" if claim.proof else f"{faults[claim.id]} faults", claim.test, outcome)
        for claim, outcome in zip(claims, ended, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(ended).most_common()))
    return 0


def _mutate(
    only: list[str], changed: str | None, jobs: int, json_path: Path | None, results: list[Path]
) -> int:
    claims, mutants = read_claims([FOLDER]), read_mutants(FOLDER / MUTANTS)
    mutants = [mutant for mutant in mutants if not only or mutant.id in only]
    if unknown := set(only) - {mutant.id for mutant in mutants}:
        raise UserError(f"no mutant {', '.join(sorted(unknown))} in {FOLDER / MUTANTS}.")
    if problems := [p for p in check_mutants(_ROOT, claims, mutants) if p.startswith("mutant")]:
        return _report(problems, "")
    base = changed or (choose_base(_ROOT) if changed is not None else None)
    if base:
        listed, mutants = len(mutants), select(_ROOT, claims, mutants, base)
        print(f"{len(mutants)} of {listed} faults: those that what changed since {base} touches.")
    elif changed is not None:
        print("This clone knows no earlier commit: all faults are planted.")
    if not mutants:
        return 0
    outcomes = read_results(results)
    passed = {claim.test for claim in claims if outcomes_of(claim, outcomes) == {"passed"}}
    start, took = time.monotonic(), dict[str, float]()
    say = functools.partial(print, flush=True)
    verdicts = mutate(_ROOT, claims, mutants, jobs=jobs, passed=passed, say=say, took=took)
    alive = [f"survivor {name}: {why}" for name, why in verdicts.items() if why]
    seconds = time.monotonic() - start
    if json_path:
        whole = dict(wall_seconds=round(seconds), processor_seconds=round(sum(took.values())))
        by_id = {n: dict(survived=verdicts[n], processor_seconds=took[n]) for n in sorted(took)}
        json_path.write_text(json.dumps(dict(**whole, faults=by_id), indent=1) + "\n")
    return _report(alive, f"{len(verdicts)} faults planted, all found, {seconds:.0f} s")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.contracts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    command = commands.add_parser("validate")
    command.add_argument("paths", nargs="*", type=Path, default=[FOLDER], metavar="PATH")
    command = commands.add_parser("bind")
    command.add_argument("results", nargs="*", type=Path, metavar="RESULTS.xml")
    command = commands.add_parser("status")
    command.add_argument("results", nargs="*", type=Path, metavar="RESULTS.xml")
    command = commands.add_parser("mutate")
    command.add_argument("--only", nargs="+", default=[], metavar="ID", help="these mutants")
    text = "those that a change touches; BASE: a commit, else the merge base, tag or 30 commits ago"
    command.add_argument("--changed", nargs="?", const="", metavar="BASE", help=text)
    jobs = (os.cpu_count() or 1) + 1  # tests also wait: for a disk, for a signal that a fault loses
    command.add_argument("--jobs", type=int, default=jobs, help="scratch copies at work at a time")
    text = "file that gets each fault's verdict and processor seconds, for the record of the last"
    command.add_argument("--json", type=Path, metavar="FILE", help=text)
    text = "what --junitxml wrote of this revision: its passed tests do not run without a fault"
    command.add_argument("--passed", nargs="+", default=[], type=Path, metavar="XML", help=text)
    args = parser.parse_args(argv)
    try:
        if args.command == "validate":
            return _report(validate(args.paths), "Contracts are valid.")
        if args.command == "bind":
            return _bind(args.results)
        if args.command == "status":
            return _status(args.results)
        return _mutate(args.only, args.changed, args.jobs, args.json, args.passed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
