"""The validator: each rule by a contract that breaks it alone, and what the reference accepts."""

import pytest

from kdjax.errors import UserError
from scripts.contracts import __main__ as command
from scripts.contracts.document import contract_files, load
from scripts.contracts.validate import check_file

GOOD = """\
metadata:
  version: "1.0.0"
  kind: kernel
  description: d
  references: [r]
  depends_on: [parent-v1]
equations:
  e: {formula: a = b}
proof_obligations:
  - type: invariant
    property: p
falsification_tests:
  - id: T-1
    prediction: p
    test: tests/test_x.py::test_adds
    if_fails: f
  - id: T-2
    prediction: p
    test: tests/test_x.py::test_cases
    if_fails: f
kani_harnesses:
  - id: K-1
    obligation: o
    bound: 3
    strategy: exhaustive
    harness: tests/test_x.py::test_proof
qa_gate: {id: G}
"""
OBLIGATION = "  - type: invariant\n    property: p\n"
PROOF = GOOD[GOOD.index("kani_harnesses") : GOOD.index("qa_gate")]
# Rule, severity, line, then what to replace in GOOD by what.
RULES = [
    ("SCHEMA-001", "ERROR", 5, "references: [r]", "references: []"),
    ("SCHEMA-002", "ERROR", 2, '"1.0.0"', '" "'),
    ("SCHEMA-003", "ERROR", 7, "  e: {formula: a = b}\n", ""),
    ("SCHEMA-004", "ERROR", 8, "formula: a = b", 'formula: ""'),
    ("PROVABILITY-001", "ERROR", 1, PROOF, ""),
    ("PROVABILITY-001", "ERROR", 16, OBLIGATION, OBLIGATION * 3),
    ("SCHEMA-005", "ERROR", 10, "    property: p\n", "    formal: q\n"),
    ("SCHEMA-006", "WARNING", 15, OBLIGATION, (OBLIGATION + "    formal: q\n") * 2),
    ("SCHEMA-007", "ERROR", 17, "T-2", "T-1"),
    ("SCHEMA-008", "ERROR", 13, "T-1\n    prediction: p", 'T-1\n    prediction: ""'),
    ("SCHEMA-009", "WARNING", 17, "    if_fails: f\nkani", "kani"),
    ("SCHEMA-010", "ERROR", 27, PROOF, PROOF + PROOF.split("\n", 1)[1]),
    ("SCHEMA-011", "ERROR", 22, "obligation: o", 'obligation: " "'),
    ("SCHEMA-012", "WARNING", 22, "    bound: 3\n", ""),
    ("SCHEMA-013", "WARNING", 1, "qa_gate: {id: G}\n", ""),
    ("SCHEMA-014", "ERROR", 12, OBLIGATION, OBLIGATION + "    requires: x\n"),
    ("SCHEMA-015", "ERROR", 12, OBLIGATION, OBLIGATION + "    applies_to_phase: x\n"),
    ("SCHEMA-016", "ERROR", 12, OBLIGATION, OBLIGATION + "    parent_contract: parent-v1\n"),
    ("SCHEMA-017", "ERROR", 11, "type: invariant", "type: subcontract\n    parent_contract: other"),
    ("SCHEMA-018", "ERROR", 27, "qa_gate:", "kind: KernelContract\nqa_gate:"),
    ("SCHEMA-019", "ERROR", 27, "qa_gate:", "falsification-test: []\nqa_gate:"),
    ("SCHEMA-019", "ERROR", 27, "qa_gate:", "QaGate: {}\nqa_gate:"),
    ("SCHEMA-019", "ERROR", 27, "qa_gate:", "story: []\nqa_gate:"),
    ("SCHEMA-020", "ERROR", 14, "    prediction: p\n    test: tests/test_x.py::test_a",
     "    id: T-1\n    prediction: p\n    test: tests/test_x.py::test_a"),
    ("SCHEMA-021", "ERROR", 10, OBLIGATION,
     OBLIGATION + "    applies_to: not_applicable\n    na_owner: o\n"),
    ("SCHEMA-022", "ERROR", 10, OBLIGATION,
     OBLIGATION + "    applies_to: not_applicable\n    na_reason: r\n"),
    ("SCHEMA-023", "ERROR", 12, OBLIGATION, OBLIGATION + "    na_reason: r\n"),
    ("PARSE", "ERROR", 2, '"1.0.0"', "1.0"),
    ("PARSE", "ERROR", 1, "  description: d\n", ""),
    ("PARSE", "ERROR", 3, "kind: kernel", "kind: colonel"),
    ("PARSE", "ERROR", 10, "type: invariant", "type: guess"),
    ("PARSE", "ERROR", 13, "id: T-1\n    prediction", "prediction"),
    ("PARSE", "ERROR", 22, "    obligation: o\n", ""),
    ("PARSE", "ERROR", 25, "strategy: exhaustive", "strategy: hope"),
    ("PARSE", "ERROR", 1, "metadata:", "metadata: ["),
]  # fmt: skip


def written(folder, text, name="x-v1.yaml"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(("rule", "severity", "line", "old", "new"), RULES)
def test_each_rule_alone(tmp_path, rule, severity, line, old, new):
    assert GOOD.count(old) >= 1
    (finding,) = check_file(written(tmp_path, GOOD.replace(old, new, 1)))
    assert (finding.rule, finding.severity, finding.line) == (rule, severity, line)
    assert str(finding).startswith(f"{tmp_path}/x-v1.yaml:{line}: {severity} {rule} ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("  e: {formula: a = b}", "  - id: e\n    formula: a = b"),
        ("property: p", "statement: p"),
        ("prediction: p", "expected: p"),
        ("if_fails: f", "fails_if: f"),
        ("test: tests", "command: tests"),
        ("    if_fails: f", "    if_fails: f\n    evidence: dropped, as the reference drops it"),
        ("property: p", "property: p\n    id: ADSV-INV-001"),
        ("metadata:", "name: n\nversion: 2\nscope: s\nmetadata:"),
        ("type: invariant", "type: postcondition\n    requires: x"),
        ("type: invariant", "type: loop_variant\n    applies_to_phase: x"),
        ("type: invariant", "type: subcontract\n    parent_contract: parent-v1"),
        (
            "type: invariant",
            "applies_to: not_applicable\n    na_reason: r\n    na_owner: o\n    type: bound",
        ),
    ],
)
def test_what_the_reference_accepts_passes(tmp_path, old, new):
    assert check_file(written(tmp_path, GOOD.replace(old, new))) == []


def test_kinds_decide_what_is_needed(tmp_path):
    lean = "metadata:\n  version: '1'\n  description: d\n  references: [r]\n"
    assert check_file(written(tmp_path, lean + "  kind: registry\n")) == []
    findings = check_file(written(tmp_path, lean))
    assert [f.rule for f in findings] == ["SCHEMA-003", "PROVABILITY-001", "SCHEMA-013"]
    judged = "(no metadata.kind, judged kernel by default)"
    assert [judged in f.message for f in findings] == [True, False, False]


def test_files_that_hold_no_contract_are_walked_past(tmp_path):
    for name in ("b-v1.yaml", "sub/a-v1.yml", "binding.yaml", "mutants.yaml", "legacy/old.yaml"):
        written(tmp_path, GOOD, name)
    found = [str(p.relative_to(tmp_path)) for p in contract_files([tmp_path])]
    assert found == ["b-v1.yaml", "sub/a-v1.yml"]
    for paths, message in (([tmp_path / "none"], "no such file"), ([tmp_path / "legacy"], None)):
        if message:
            with pytest.raises(UserError, match=message):
                list(contract_files(paths))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="found no contract"):
        list(contract_files([tmp_path / "empty"]))


def test_yaml_that_cannot_be_read(tmp_path):
    for text, message in (("a: &a [*a]\n", "an alias contains itself"), ("a: [", "no YAML")):
        with pytest.raises(UserError, match=message):
            load(written(tmp_path, text))
    assert check_file(written(tmp_path, "[1]"))[0].message == "found a list"


def test_the_command_validates(tmp_path, capsys):
    assert command.main(["validate", str(written(tmp_path, GOOD))]) == 0
    assert capsys.readouterr().out == "0 errors, 0 warnings\nContract is valid.\n"
    text = GOOD.replace("qa_gate: {id: G}", "kind: x").replace("T-2", "T-1")
    assert command.main(["validate", str(written(tmp_path, text))]) == 1
    out = capsys.readouterr().out
    assert out.endswith("\n2 errors, 1 warnings\n") and len(out.splitlines()) == 4
    assert f"{tmp_path}/x-v1.yaml:17: ERROR SCHEMA-007 test T-1 a second time. Rename it." in out
    assert command.main(["validate", str(tmp_path / "none.yaml")]) == 1
    assert "no such file" in capsys.readouterr().err
