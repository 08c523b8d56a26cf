"""Claims against tests and planted faults: each names what exists, and each test has run."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from kdjax.errors import MissingFileError, UserError
from scripts.contracts.contracts import Claim, load_yaml

_CODE = ("kdjax", "scripts")  # where faults may be planted: a changed test would prove nothing


class Mutant(NamedTuple):
    """One change in one place of the code, and the claims whose tests must then go red."""

    id: str
    fault: str
    file: str  # relative to the repository
    find: str
    replace: str
    kills: tuple[str, ...]


def read_mutants(path: Path) -> list[Mutant]:
    """The list of planted faults. Raises `UserError` for an entry that lacks something."""
    data = load_yaml(path)
    entries = data.get("mutants") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: found no list under mutants. Add the planted faults.")
    mutants = []
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != set(Mutant._fields) or not entry["kills"]:
            raise UserError(f"{path}: {entry}: a mutant needs {', '.join(Mutant._fields)}.")
        mutants.append(Mutant(**entry)._replace(kills=tuple(entry["kills"])))
    return mutants


@functools.cache
def _functions(path: Path) -> set[str]:
    """Names of a file's functions; none if there is no file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def read_results(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Outcomes (passed, failed, skipped) of the cases of each test, from pytest's --junitxml.

    A test's key is `module.path.function`, without the parameters of the case.
    """
    outcomes = defaultdict(set)
    for path in paths:
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file. Write it with pytest --junitxml={path}.")
        for case in ElementTree.parse(path).iter("testcase"):
            marks = {child.tag for child in case}
            outcome = "failed" if marks & {"failure", "error"} else "passed"
            outcome = "skipped" if "skipped" in marks else outcome
            outcomes[f"{case.get('classname')}.{case.get('name', '').split('[')[0]}"].add(outcome)
    return outcomes


def check_claims(
    root: Path, claims: Sequence[Claim], results: dict[str, set[str]] | None = None
) -> Iterator[str]:
    """Claims whose test does not exist or, given results, did not run and pass there."""
    owner: dict[str, Path] = {}
    for claim in claims:
        if claim.id in owner:
            yield f"{claim.contract}: {claim.id} is also in {owner[claim.id]}. Rename one."
        owner.setdefault(claim.id, claim.contract)
        file, _, name = claim.test.partition("::")
        if name not in _functions((root / file).resolve()):
            yield f"{claim.contract}: {claim.id}: no test {claim.test}. Name one that exists."
        elif results is not None:
            key = f"{file.removesuffix('.py')}/{name}".replace("/", ".")
            outcomes = results.get(key) or {"not run"}
            for outcome in sorted(outcomes - {"passed"}):
                yield f"{claim.contract}: {claim.id}: {claim.test}: {outcome}. It must pass."


def check_mutants(root: Path, claims: Sequence[Claim], mutants: Sequence[Mutant]) -> Iterator[str]:
    """Faults in the wrong place or of unknown claims; falsification tests that have no fault."""
    ids: set[str] = set()
    known = {claim.id for claim in claims}
    for mutant in mutants:
        if mutant.id in ids:
            yield f"mutant {mutant.id} a second time. Rename it."
        ids.add(mutant.id)
        for name in set(mutant.kills) - known:
            yield f"mutant {mutant.id} kills {name}, which no contract has. Name a claim."
        path = (root / mutant.file).resolve()
        if not any(path.is_relative_to((root / name).resolve()) for name in _CODE):
            yield f"mutant {mutant.id}: {mutant.file} is not below {' or '.join(_CODE)}."
        elif mutant.find == mutant.replace:
            yield f"mutant {mutant.id} changes nothing."
        else:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            if (count := text.count(mutant.find)) != 1:
                yield f"mutant {mutant.id}: its text is {count} times in {mutant.file}, not once."
    killed = {name for mutant in mutants for name in mutant.kills}
    for claim in claims:
        if not claim.proof and claim.id not in killed:
            yield f"{claim.contract}: no mutant kills {claim.id}. Plant a fault for it."
