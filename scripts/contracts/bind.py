"""Claims against tests and planted faults: each names what exists, and each test has run."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from kdjax.errors import MissingFileError, UserError
from scripts.contracts.contracts import Claim, load_yaml
from scripts.contracts.places import CODE, Place, find_places


class Mutant(NamedTuple):
    """One change in one place of the code, and the claims whose tests must then go red."""

    id: str
    fault: str
    where: str  # function, class or module, by its dotted path; or a file
    find: str  # words that it has once
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
        entry = dict(entry) if isinstance(entry, dict) else {}
        entry["where"] = entry.pop("in", None) or entry.pop("file", None)
        if set(entry) != set(Mutant._fields) or not entry["where"] or not entry["kills"]:
            keys = ", ".join(Mutant._fields).replace("where", "in")
            raise UserError(f"{path}: {entry}: a mutant needs {keys}.")
        mutants.append(Mutant(**entry)._replace(kills=tuple(entry["kills"])))
    return mutants


def locate(root: Path, mutant: Mutant) -> list[Place]:
    """Where the text of a mutant is: one place if all is well."""
    if mutant.where.endswith(".py"):  # a file: its very text
        file = (root / mutant.where).resolve()
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        spans = [match.span() for match in re.finditer(re.escape(mutant.find), text)]
        return [Place(file, "", *span, {}) for span in spans]
    return find_places(root, mutant.where, mutant.find)


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
    for claim in claims:
        file, _, name = claim.test.partition("::")
        if name not in _functions((root / file).resolve()):
            yield f"{claim.contract}: {claim.id}: no test {claim.test}. Name one that exists."
        elif results is not None:
            for outcome in sorted(outcomes_of(claim, results) - {"passed"}):
                yield f"{claim.contract}: {claim.id}: {claim.test}: {outcome}. It must pass."


def outcomes_of(claim: Claim, results: dict[str, set[str]]) -> set[str]:
    """How the cases of a claim's test ended, or `not run`."""
    return results.get(claim.test.replace(".py::", "/").replace("/", ".")) or {"not run"}


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
        if mutant.where.replace("/", ".").split(".")[0] not in CODE:
            yield f"mutant {mutant.id}: {mutant.where} is not below {' or '.join(CODE)}."
        elif mutant.find == mutant.replace:
            yield f"mutant {mutant.id} changes nothing."
        elif (count := len(locate(root, mutant))) != 1:
            yield f"mutant {mutant.id}: its text is {count} times in {mutant.where}, not once."
    killed = {name for mutant in mutants for name in mutant.kills}
    for claim in claims:
        if not claim.proof and claim.id not in killed:
            yield f"{claim.contract}: no mutant kills {claim.id}. Plant a fault for it."
