"""What the contracts claim, and the planted faults that must make each claim's test fail."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.errors import UserError
from scripts.contracts.document import Document, Finding, contract_files, load
from scripts.contracts.schema import get
from scripts.contracts.validate import check, items

FOLDER = Path("contracts")
MUTANTS = "mutants.yaml"  # beside the contracts


class Claim(NamedTuple):
    """A falsification test or a bounded proof, and the pytest node that stands for it."""

    path: Path
    line: int
    id: str
    says: str
    node: str  # "" if the contract names none
    proof: bool
    strategy: str = ""
    bound: Any = None


class Mutant(NamedTuple):
    """One change in one place, and the falsification tests that must go red."""

    path: Path
    line: int
    id: str
    fault: str
    file: str  # relative to the repository
    find: str
    replace: str
    kills: tuple[str, ...]


def read_claims(paths: Iterable[Path]) -> list[Claim]:
    """Claims of all contracts, in order. Raises `UserError` for a contract with errors."""
    claims: list[Claim] = []
    for path in contract_files(paths):
        document = load(path)
        if errors := [f for f in check(document) if f.severity == "ERROR"]:
            raise UserError(f"{errors[0]} Run `python -m scripts.contracts validate` first.")
        claims += _claims(document)
    return claims


def _claims(document: Document) -> list[Claim]:
    found = []
    for section, key, says in (
        ("falsification_tests", "test", "prediction"),
        ("kani_harnesses", "harness", "obligation"),
    ):
        for where, fields in items(document.data, section):
            found.append(
                Claim(
                    path=document.path,
                    line=document.line(*where, key),
                    id=fields["id"],
                    says=str(get(fields, says) or ""),
                    node=str(get(fields, key) or ""),
                    proof=section == "kani_harnesses",
                    strategy=str(fields.get("strategy") or ""),
                    bound=fields.get("bound"),
                )
            )
    return found


def read_mutants(path: Path) -> list[Mutant]:
    """The list of planted faults. Raises `UserError` for an entry that lacks something."""
    document = load(path)
    data = document.data
    entries = data.get("mutants") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: found no list under mutants. Add the planted faults.")
    if document.doubles:
        where, line = document.doubles[0]
        raise UserError(f"{path}:{line}: the key {where[-1]} twice. Merge them.")
    mutants = []
    for i, fields in enumerate(entries):
        line = document.line("mutants", i)
        wanted = ("id", "fault", "file", "find", "replace")
        texts = fields if isinstance(fields, dict) else {}
        kills = texts.get("kills")
        if not all(isinstance(texts.get(key), str) for key in wanted) or not kills:
            raise UserError(
                f"{path}:{line}: a mutant needs {', '.join(wanted)} as texts and kills, a list of "
                "falsification tests. Complete it."
            )
        values = {key: texts[key] for key in wanted}
        mutants.append(Mutant(path=path, line=line, kills=tuple(map(str, kills)), **values))
    return mutants


def check_mutants(root: Path, claims: list[Claim], mutants: list[Mutant]) -> list[Finding]:
    """Errors in the list of mutants: ids, unknown tests, places; and tests that none would kill."""
    tests = {claim.id: claim for claim in claims if not claim.proof}
    findings, seen = [], set()

    def error(at: Claim | Mutant, rule: str, message: str, remedy: str) -> None:
        findings.append(Finding(at.path, at.line, "ERROR", rule, message, remedy))

    for mutant in mutants:
        if mutant.id in seen:
            error(mutant, "MUTANT-001", f"mutant {mutant.id} a second time", "Rename it.")
        seen.add(mutant.id)
        for name in mutant.kills:
            if name not in tests:
                error(mutant, "MUTANT-002", f"mutant {mutant.id} kills {name}, which no contract "
                      "has", "Name a falsification test.")  # fmt: skip
        if problem := _misplaced(root, mutant):
            error(mutant, "MUTANT-003", f"mutant {mutant.id}: {problem}",
                  "Find a text that the file holds exactly once, and replace it.")  # fmt: skip
    killed = {name for mutant in mutants for name in mutant.kills}
    for name, claim in tests.items():
        if name not in killed:
            error(claim, "MUTANT-004", f"no mutant kills {name}",
                  f"Plant a fault for it in {MUTANTS}.")  # fmt: skip
    return findings


def _misplaced(root: Path, mutant: Mutant) -> str | None:
    path = (root / mutant.file).resolve()
    # Only the code: a test changed to fail would prove nothing.
    code = [(root / name).resolve() for name in ("kdjax", "scripts")]
    if not any(map(path.is_relative_to, code)) or not path.is_file():
        return f"{mutant.file} is no file of kdjax/ or scripts/"
    count = path.read_text(encoding="utf-8").count(mutant.find) if mutant.find else 0
    if count != 1:
        return f"its text is found {count} times in {mutant.file}"
    return "it changes nothing" if mutant.find == mutant.replace else None
