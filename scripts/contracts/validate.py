"""The rules of the reference's validator: PROVABILITY-001 and SCHEMA-001 to 023.

Its rules for beat benchmarks (BEAT-001 to 007) and their competitors (CRUX-001, 002) are left out:
no contract here is one. `PARSE` stands for what its reader refuses before any rule is asked.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kdjax.errors import UserError
from scripts.contracts.document import Document, Finding, Where, load
from scripts.contracts.schema import (
    KERNEL,
    NOT_APPLICABLE,
    WORDS,
    filled,
    get,
    near_miss,
)

_LISTS = ("proof_obligations", "falsification_tests", "kani_harnesses")
_Fields = Mapping[str, Any]


def check_file(path: Path) -> list[Finding]:
    """Findings of one file, by line; one that is no YAML gives a single `PARSE` error."""
    try:
        document = load(path)
    except UserError as error:
        return [Finding(path, 1, "ERROR", "PARSE", str(error).rstrip("."), "")]
    return check(document)


def check(document: Document) -> list[Finding]:
    """Findings of one contract, by line. After a `PARSE` error only the file's keys are judged."""
    if not isinstance(document.data, dict):
        found = type(document.data).__name__
        return [_error(document, (), "PARSE", f"found a {found}", "Write a mapping.")]
    findings = list(_parse(document))
    if not findings:
        findings = [*_metadata(document), *_kernel(document), *_obligations(document)]
        findings += [*_tests(document), *_proofs(document)]
    findings += _keys(document)
    return sorted(findings, key=lambda finding: finding.line)


def _error(document: Document, where: Where, rule: str, message: str, remedy: str) -> Finding:
    return Finding(document.path, document.line(*where), "ERROR", rule, message, remedy)


def _warning(document: Document, where: Where, rule: str, message: str, remedy: str) -> Finding:
    return _error(document, where, rule, message, remedy)._replace(severity="WARNING")


def equations(data: _Fields) -> Iterator[tuple[Where, str, _Fields]]:
    """Place, name and fields of each equation, from a mapping by name or a list with ids."""
    section = data.get("equations") or {}
    if isinstance(section, dict):
        for name, fields in section.items():
            yield ("equations", name), name, fields if isinstance(fields, dict) else {}
        return
    for i, fields in enumerate(section):
        fields = fields if isinstance(fields, dict) else {}
        yield ("equations", i), str(fields.get("id", i)), fields


def items(data: _Fields, section: str) -> Iterator[tuple[Where, _Fields]]:
    """Place and fields of each entry of a list."""
    for i, fields in enumerate(data.get(section) or []):
        yield (section, i), fields


def _parse(document: Document) -> Iterator[Finding]:
    data = document.data
    metadata = data.get("metadata")
    if not isinstance(metadata, dict):
        yield _error(document, ("metadata",), "PARSE", "metadata is no mapping", "Add it.")
        return
    for key in ("version", "description"):
        if not isinstance(metadata.get(key), str):
            found = f"metadata.{key} is {metadata.get(key)!r}, not text"
            yield _error(document, ("metadata", key), "PARSE", found, "Give it, in quotes.")
    if not isinstance(data.get("equations") or {}, dict | list):
        yield _error(document, ("equations",), "PARSE", "equations is no mapping or list",
                     "Write one entry an equation.")  # fmt: skip
    for section in _LISTS:
        entries = data.get(section) or []
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            yield _error(document, (section,), "PARSE", f"{section} is no list of mappings",
                         "Write one entry each.")  # fmt: skip
            return
    required = {"falsification_tests": ("id",), "kani_harnesses": ("id", "obligation")}
    for section, keys in required.items():
        for where, fields in items(data, section):
            for key in keys:
                if not isinstance(fields.get(key), str):
                    yield _error(document, where, "PARSE", f"{key} is missing", "Give it as text.")
    yield from _words(document)


def _words(document: Document) -> Iterator[Finding]:
    for (section, key), allowed in WORDS.items():
        entries = [(("metadata",), document.data["metadata"])]
        if section != "metadata":
            entries = list(items(document.data, section))
        for where, fields in entries:
            value = fields.get(key)
            if value is not None and value not in allowed:
                yield _error(document, (*where, key), "PARSE", f"{key} is {value!r}",
                             f"Use one of {', '.join(allowed)}.")  # fmt: skip


def _metadata(document: Document) -> Iterator[Finding]:
    metadata = document.data["metadata"]
    if not metadata.get("references"):
        yield _error(document, ("metadata", "references"), "SCHEMA-001", "no references",
                     "List what the contract rests on under metadata.references.")  # fmt: skip
    if not metadata["version"].strip():
        yield _error(document, ("metadata", "version"), "SCHEMA-002", "the version is empty",
                     'Give one, such as "1.0.0".')  # fmt: skip


def _kernel(document: Document) -> Iterator[Finding]:
    """What only kernels need; the first error says so where the kind was not given."""
    kind = document.data["metadata"].get("kind")
    if kind not in (None, KERNEL):
        return
    first = kind is None
    for finding in _kernel_findings(document):
        if first and finding.severity == "ERROR":
            message = f"{finding.message} (no metadata.kind, judged kernel by default)"
            finding, first = finding._replace(message=message), False
        yield finding


def _kernel_findings(document: Document) -> Iterator[Finding]:
    data = document.data
    listed = list(equations(data))
    if not listed:
        yield _error(document, ("equations",), "SCHEMA-003", "no equation", "State at least one.")
    for where, name, fields in listed:
        if not filled(fields, "formula"):
            yield _error(document, where, "SCHEMA-004", f"equation {name} has no formula",
                         "Write it under formula.")  # fmt: skip
    counts = {section: len(data.get(section) or []) for section in _LISTS}
    if missing := [section for section, count in counts.items() if not count]:
        yield _error(document, (missing[0],), "PROVABILITY-001", f"no {', no '.join(missing)}",
                     "Add them, or give metadata.kind.")  # fmt: skip
    elif counts["falsification_tests"] < counts["proof_obligations"]:
        tests, wanted = counts["falsification_tests"], counts["proof_obligations"]
        yield _error(document, ("falsification_tests",), "PROVABILITY-001",
                     f"{tests} falsification tests for {wanted} proof obligations",
                     "Add a test for each obligation.")  # fmt: skip
    if not data.get("qa_gate"):
        yield _warning(document, ("qa_gate",), "SCHEMA-013", "no qa_gate", "Add one.")


def _obligations(document: Document) -> Iterator[Finding]:
    depends = document.data["metadata"].get("depends_on") or []
    seen: set[str] = set()
    for where, fields in items(document.data, "proof_obligations"):
        if not filled(fields, "property"):
            yield _error(document, where, "SCHEMA-005", "an obligation without a property",
                         "Say under property what holds.")  # fmt: skip
        formal = str(get(fields, "formal") or "").strip()
        if formal and formal in seen:
            yield _warning(document, (*where, "formal"), "SCHEMA-006",
                           f"formal {formal!r} a second time", "Merge the two.")  # fmt: skip
        seen.add(formal)
        yield from _typed_keys(document, where, fields, depends)
        yield from _not_applicable(document, where, fields)


def _typed_keys(document: Document, where: Where, fields: _Fields,
                depends: list[Any]) -> Iterator[Finding]:  # fmt: skip
    kind = str(fields.get("type") or "invariant")
    for rule, key, allowed in (
        ("SCHEMA-014", "requires", ("postcondition",)),
        ("SCHEMA-015", "applies_to_phase", ("loop_invariant", "loop_variant")),
        ("SCHEMA-016", "parent_contract", ("subcontract",)),
    ):
        if filled(fields, key) and kind not in allowed:
            yield _error(document, (*where, key), rule, f"{key} on an obligation of type {kind}",
                         f"Only {' or '.join(allowed)} has it.")  # fmt: skip
    parent = fields.get("parent_contract")
    if kind == "subcontract" and parent and parent not in depends:
        yield _error(document, (*where, "parent_contract"), "SCHEMA-017",
                     f"parent_contract {parent} is not in metadata.depends_on",
                     "List it there.")  # fmt: skip


def _not_applicable(document: Document, where: Where, fields: _Fields) -> Iterator[Finding]:
    keys = {"SCHEMA-021": "na_reason", "SCHEMA-022": "na_owner"}
    if fields.get("applies_to") == NOT_APPLICABLE:
        for rule, key in keys.items():
            if not filled(fields, key):
                yield _error(document, where, rule, f"not applicable without {key}", "Give it.")
        return
    for key in keys.values():
        if filled(fields, key):
            yield _error(document, (*where, key), "SCHEMA-023", f"{key} on what is applicable",
                         f"Take it out, or set applies_to: {NOT_APPLICABLE}.")  # fmt: skip


def _tests(document: Document) -> Iterator[Finding]:
    seen: set[str] = set()
    for where, fields in items(document.data, "falsification_tests"):
        name = fields["id"]
        if name in seen:
            yield _error(document, where, "SCHEMA-007", f"test {name} a second time", "Rename it.")
        seen.add(name)
        if not filled(fields, "prediction"):
            yield _error(document, where, "SCHEMA-008", f"test {name} predicts nothing",
                         "Say under prediction what it would see.")  # fmt: skip
        if not filled(fields, "if_fails"):
            yield _warning(document, where, "SCHEMA-009", f"test {name} has no if_fails",
                           "Say what a failure would mean.")  # fmt: skip


def _proofs(document: Document) -> Iterator[Finding]:
    seen: set[str] = set()
    for where, fields in items(document.data, "kani_harnesses"):
        name = fields["id"]
        if name in seen:
            yield _error(document, where, "SCHEMA-010", f"harness {name} twice", "Rename it.")
        seen.add(name)
        if not filled(fields, "obligation"):
            yield _error(document, where, "SCHEMA-011", f"harness {name} has no obligation",
                         "Name what it proves.")  # fmt: skip
        if fields.get("bound") is None:
            yield _warning(document, where, "SCHEMA-012", f"harness {name} has no bound",
                           "State how far it goes.")  # fmt: skip


def _keys(document: Document) -> Iterator[Finding]:
    for key in document.data:
        if key == "kind":
            yield _error(document, (key,), "SCHEMA-018", "kind at the top level is not read",
                         "Move it to metadata.kind.")  # fmt: skip
        elif (meant := near_miss(key)) is not None:
            yield _error(document, (key,), "SCHEMA-019", f"unknown key {key!r}",
                         f"Write {meant}.")  # fmt: skip
    for where, line in document.doubles:
        place = ".".join(map(str, where))
        yield Finding(document.path, line, "ERROR", "SCHEMA-020", f"the key {place} twice",
                      "The first is lost: merge them.")  # fmt: skip


def summary(findings: list[Finding]) -> str:
    """The closing line."""
    errors = sum(finding.severity == "ERROR" for finding in findings)
    return f"{errors} errors, {len(findings) - errors} warnings"
