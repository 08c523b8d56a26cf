"""python -m scripts.contracts validate|bind|status|mutate|verify-receipt

    validate [PATH...]     the schema's rules, over contracts/ or the files and folders given
    bind [PATH...]         each claim's test exists, runs and can fail; each has a mutant
    status [PATH...]       each claim with its test, how that ended last, and when
    mutate [--only ID...]  plants each fault of contracts/mutants.yaml; its tests must go red
    verify-receipt WORKDIR rechecks what a run left behind

Run it in the repository. Exit status: 0 all is well, 1 something is not.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kdjax.errors import UserError
from scripts.contracts.bind import bind
from scripts.contracts.claims import FOLDER, MUTANTS, check_mutants, read_claims, read_mutants
from scripts.contracts.document import Finding, contract_files
from scripts.contracts.mutate import mutate
from scripts.contracts.results import read_results, report
from scripts.contracts.validate import check_file, summary

_ROOT = Path()


def _validate(args: argparse.Namespace) -> int:
    findings = [f for path in contract_files(args.paths) for f in check_file(path)]
    return _closed(findings, "Contract is valid.")


def _closed(findings: list[Finding], well: str) -> int:
    for finding in findings:
        print(finding)
    print(summary(findings))
    bad = any(finding.severity == "ERROR" for finding in findings)
    if not bad:
        print(well)
    return int(bad)


def _bind(args: argparse.Namespace) -> int:
    claims = read_claims(args.paths)
    findings = bind(_ROOT, claims, read_results(_ROOT))
    # Mutants cover the repository's own contracts; a single one is bound without the others.
    if args.paths == [FOLDER]:
        findings += check_mutants(_ROOT, claims, read_mutants(FOLDER / MUTANTS))
    tests = sum(not claim.proof for claim in claims)
    return _closed(findings, f"{tests} tests and {len(claims) - tests} proofs are bound.")


def _status(args: argparse.Namespace) -> int:
    for line in report(read_claims(args.paths), read_results(_ROOT)):
        print(line)
    return 0


def _mutate(args: argparse.Namespace) -> int:
    claims, mutants = read_claims([FOLDER]), read_mutants(FOLDER / MUTANTS)
    if findings := check_mutants(_ROOT, claims, mutants):
        return _closed(findings, "")
    if unknown := set(args.only) - {mutant.id for mutant in mutants}:
        raise UserError(f"no mutant {', '.join(sorted(unknown))} in {FOLDER / MUTANTS}.")
    chosen = [mutant for mutant in mutants if not args.only or mutant.id in args.only]
    start = time.monotonic()
    verdicts = mutate(_ROOT, claims, chosen, jobs=args.jobs, say=lambda s: print(s, flush=True))
    survivors = [verdict for verdict in verdicts if not verdict.killed]
    print(f"{len(verdicts) - len(survivors)} killed, {len(survivors)} survived, "
          f"{time.monotonic() - start:.0f} s")  # fmt: skip
    for verdict in survivors:
        print(f"survivor: {verdict.mutant.path}:{verdict.mutant.line}: {verdict.mutant.id}")
    return int(bool(survivors))


def _verify_receipt(args: argparse.Namespace) -> int:
    # By name: contracts are a lower row than what writes receipts.
    receipt = importlib.import_module("kdjax.watch.receipt")
    for line in receipt.verify(args.workdir):
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.contracts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "validate": _validate, "bind": _bind, "status": _status}  # fmt: skip
    for name, action in actions.items():
        command = commands.add_parser(name)
        command.add_argument("paths", nargs="*", type=Path, default=[FOLDER], metavar="PATH")
        command.set_defaults(action=action)
    command = commands.add_parser("mutate")
    command.add_argument("--only", nargs="+", default=[], metavar="ID", help="these mutants")
    command.add_argument("--jobs", type=int, default=2, help="scratch copies at work at a time")
    command.set_defaults(action=_mutate)
    command = commands.add_parser("verify-receipt")
    command.add_argument("workdir", type=Path)
    command.set_defaults(action=_verify_receipt)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        return args.action(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
