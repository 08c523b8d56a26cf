"""Reads the claims of contracts/*.yaml and checks them by the reference's schema.

The schema is that of aprender's contracts. It allows more keys than are used here. A key that no
contract here needs is refused, so that its rules need no code: whatever passes, passes there too.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kdjax.errors import MissingFileError, UserError

FOLDER = Path("contracts")
MUTANTS = "mutants.yaml"  # beside the contracts

# The keys of an entry of each section; a `!` marks those that must be filled.
_KEYS = {
    "metadata": "version! kind! description! references! depends_on",
    "equations": "formula!",
    "proof_obligations": "type! property!",
    "falsification_tests": "id! rule! prediction! test! if_fails!",
    "kani_harnesses": "id! obligation! property bound! strategy! harness!",
    "qa_gate": "id! name! description! checks! pass_criteria!",
}
_LISTS = ("proof_obligations", "falsification_tests", "kani_harnesses")
_NOT_TEXT = {"references", "depends_on", "bound", "checks"}
_TYPES = (
    "invariant equivalence bound monotonicity idempotency linearity symmetry associativity "
    "conservation ordering completeness soundness involution determinism roundtrip state_machine "
    "classification independence termination safety liveness precondition postcondition frame "
    "loop_invariant loop_variant old_state"
)
# The words that the schema allows under some keys.
_WORDS = {
    "kind": {"kernel"},  # of the schema's 13 kinds the one that must have all sections
    "strategy": {"exhaustive", "stub_float", "compositional", "bounded_int"},
    "type": set(_TYPES.split()),
}


class Claim(NamedTuple):
    """A falsification test or a proof (a test of every case), and the pytest that it names."""

    id: str
    test: str  # tests/test_x.py::test_y
    proof: bool
    contract: Path


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: the reader would lose the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key, count in Counter(keys).items():
            if count > 1:
                raise yaml.MarkedYAMLError(None, None, f"key {key!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> Any:
    """The values of one file; raises `UserError` for one that is missing or not YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file. Give a contract or a folder.") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{path}: found no YAML ({text}). Mend the syntax.") from error


def contract_files(paths: Iterable[Path]) -> list[Path]:
    """The contracts among `paths`: files, and the `*.yaml` of folders in order of name."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    files = [path for path in files if path.name != MUTANTS]
    if not files:
        raise UserError("found no contract; expected .yaml files. Give a file or a folder.")
    return files


def validate(paths: Iterable[Path]) -> list[str]:
    """Lists the faults of these contracts: one line each, with file, place and remedy.

    An identifier may be in one place of all files. A contract depends on others of its folder,
    and a reference that ends in a suffix is a file of the folder above, an address, or has behind
    it, in parentheses, the system that it is of.
    """
    problems: list[str] = []
    owners: dict[str, Path] = {}
    for path in contract_files(paths):
        wrong = list(_check(path))
        if not wrong:
            data = load_yaml(path)
            wrong = [*_check_links(path, data["metadata"])]
            for name in _ids(data):
                if name in owners:
                    wrong.append(f"id {name!r} is also in {owners[name]}. Rename one.")
                owners.setdefault(name, path)
        problems += [f"{path}: {problem}" for problem in wrong]
    return problems


def _ids(data: dict[str, Any]) -> Iterator[str]:
    """Every identifier of a contract: its tests, its proofs and its gate."""
    for entry in (*data["falsification_tests"], *data["kani_harnesses"], data["qa_gate"]):
        yield entry["id"]


def _check_links(path: Path, metadata: dict[str, Any]) -> Iterator[str]:
    for name in metadata.get("depends_on") or ():
        if name == path.stem or not path.with_name(f"{name}.yaml").is_file():
            yield f"depends_on: {name} is no other contract beside it. Name one, or drop it."
    references = metadata["references"]
    for name, count in Counter(references).items():
        if count > 1:
            yield f"references: {name!r} {count} times. Name it once."
        elif re.fullmatch(r"[\w/.-]+\.\w+", name) and not (path.parent.parent / name).is_file():
            yield f"references: no file {name} here. Name one that exists."


def _check(path: Path) -> Iterator[str]:
    data = load_yaml(path)
    if not isinstance(data, dict) or not isinstance(data.get("equations"), dict):
        yield "is no contract: expected a mapping with equations by name."
        return
    if set(data) != set(_KEYS):
        odd = ", ".join(sorted(map(str, set(data) ^ set(_KEYS))))
        yield f"keys missing or unknown: {odd}. Write {', '.join(_KEYS)}."
        return
    for section in _KEYS:
        value: Any = data[section]
        if section in _LISTS and not isinstance(value, list):
            yield f"{section}: found {type(value).__name__}. Write a list."
            return
        entries: Any = value if section == "equations" else {"": value}
        if section in _LISTS:
            entries = dict(enumerate(value))
        if not entries:
            yield f"{section}: nothing there. Give at least one."
        for name, entry in entries.items():
            yield from _check_entry(section, f"{section} {name}".strip(), entry)
    if len(data["falsification_tests"]) < len(data["proof_obligations"]):
        yield "falsification_tests: fewer than proof_obligations. Add one for each."
    values = Counter(e.get("property") for e in data["proof_obligations"] if isinstance(e, dict))
    for value, count in values.items():
        if value and count > 1:
            yield f"proof_obligations: property {value!r} {count} times. Merge them."


def _check_entry(section: str, place: str, entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{place}: found {type(entry).__name__}. Write a mapping of keys."
        return
    keys = {key.rstrip("!"): key.endswith("!") for key in _KEYS[section].split()}
    for key in entry:
        if key not in keys:
            yield f"{place}: unknown key {key!r}. Use {', '.join(keys)}."
    for key, required in keys.items():
        value = entry.get(key)
        if required and (value is None or not str(value).strip() or value == []):
            yield f"{place}: {key} is missing. Fill it."
        elif value is not None and key not in _NOT_TEXT and not isinstance(value, str):
            yield f"{place}: {key} is {value!r}, not text. Put it in quotes."
        elif value is not None and key in _WORDS and value not in _WORDS[key]:
            yield f"{place}: {key} is {value!r}. Use one of {', '.join(sorted(_WORDS[key]))}."


def read_claims(paths: Iterable[Path]) -> list[Claim]:
    """The claims of all contracts, in order. Raises `UserError` for an invalid contract."""
    for problem in validate(paths):
        raise UserError(problem)
    claims = []
    for path in contract_files(paths):
        data = load_yaml(path)
        claims += [Claim(e["id"], e["test"], False, path) for e in data["falsification_tests"]]
        claims += [Claim(e["id"], e["harness"], True, path) for e in data["kani_harnesses"]]
    return claims
