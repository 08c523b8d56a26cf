"""Contracts on small scratch projects: the binding, recorded results, and planted faults."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_contract_schema import GOOD, PROOF, written

from kdjax.errors import UserError
from scripts.contracts import __main__ as command
from scripts.contracts import assertions
from scripts.contracts.bind import bind
from scripts.contracts.claims import check_mutants, read_claims, read_mutants
from scripts.contracts.document import contract_files, load
from scripts.contracts.mutate import mutate
from scripts.contracts.results import Results, read_results, report
from scripts.contracts.validate import check_file

# ---- binding

TESTS = """
import pytest
from kdjax.x import add

def test_adds():
    assert add(2, 3) == 5

@pytest.mark.parametrize("n", [0, 1, 2])
def test_cases(n):
    compare(n)

def compare(n):
    assert add(n, 1) == n + 1

def test_proof():
    for n in range(3 + 1):
        compare(n)

def test_nothing():
    add(1, 2)
    assert True

def test_raises():
    with pytest.raises(TypeError):
        add(1)

@pytest.mark.skipif(True, reason="never")
def test_skipped():
    assert add(1, 1) == 2

class TestGroup:
    def test_inside(self):
        assert add(1, 1) == 2

@pytest.mark.skipif(False, reason="always runs")
def test_weak():
    assert add(0, 0) == 0
"""
MUTANTS = """\
mutants:
  - id: minus
    fault: subtracts
    file: kdjax/x.py
    find: a + b
    replace: a - b
    kills: [T-1, T-2]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second to import
    written(tmp_path, "", "kdjax/__init__.py")
    written(tmp_path, "def add(a, b):\n    return a + b\n", "kdjax/x.py")
    written(tmp_path, TESTS, "tests/test_x.py")
    written(tmp_path, "[tool.pytest.ini_options]\naddopts = '-q'\n", "pyproject.toml")
    written(tmp_path, GOOD, "contracts/x-v1.yaml")
    written(tmp_path, MUTANTS, "contracts/mutants.yaml")
    return tmp_path


def bound(project, results=None, **nodes):
    """Rules broken by each of these claims; those in capitals are proofs."""
    entries = {False: "", True: ""}
    for name, node in nodes.items():
        key = "harness" if name.isupper() else "test"
        common = "obligation: o, bound: 3, strategy: exhaustive, prediction: p, if_fails: f"
        entries[name.isupper()] += f"  - {{id: {name}, {common}, {key}: '{node}'}}\n"
    head, tests = GOOD[: GOOD.index("falsification")], "falsification_tests:\n" + entries[False]
    text = head + tests + (f"kani_harnesses:\n{entries[True]}" if entries[True] else PROOF)
    claims = read_claims([written(project, text, "contracts/x-v1.yaml")])
    found = bind(project, claims, results or Results({}))
    return {f.message.split(":")[0].split()[0]: f.rule for f in found}


def test_what_cannot_be_bound(project):
    test = "tests/test_x.py::test_"
    assert bound(
        project, plain=f"{test}adds", inside="tests/test_x.py::TestGroup::test_inside",
        expecting=f"{test}raises", one_case=f"{test}cases[1]", other="cargo test x",
        gone=f"{test}cases[7]", no_file="tests/test_y.py::test_adds", skipped=f"{test}skipped",
        silent=f"{test}nothing", PROOF=f"{test}proof", NO_LOOP=f"{test}adds",
    ) == {
        "other": "BIND-001", "gone": "BIND-002", "no_file": "BIND-002", "skipped": "BIND-003",
        "silent": "BIND-004", "NO_LOOP": "BIND-005",
    }  # fmt: skip


def test_a_test_that_was_skipped_when_it_ran_is_no_test(project):
    written(project, json.dumps({"tests/test_x.py::test_cases[1]": ["skipped", "today"],
                                 "tests/test_x.py::test_cases[2]": ["passed", "today"]}),
            ".pytest_cache/kdjax_results.json")  # fmt: skip
    found = bound(project, read_results(project), a="tests/test_x.py::test_cases")
    assert found == {"a": "BIND-003"}


def test_files_that_cannot_be_collected_say_why(project):
    written(project, "import nothing_of_that_name", "tests/test_x.py")
    with pytest.raises(UserError, match=r"(?s)cannot collect tests/test_x.py.*nothing_of_that"):
        bound(project, a="tests/test_x.py::test_adds")


def test_ids_are_unique_over_contracts(project):
    written(project, GOOD, "contracts/y-v1.yaml")
    findings = bind(project, read_claims([project / "contracts"]), Results({}))
    assert [f.rule for f in findings] == ["BIND-006"] * 3
    assert {f.path.name for f in findings} == {"y-v1.yaml"}


@pytest.mark.parametrize(
    ("body", "good"),
    [
        ("np.testing.assert_array_equal(1, 1)", True),
        ("chex.assert_trees_all_close(1, 1)", True),
        ("helper()", True),
        ("with pytest.warns(UserWarning): pass", True),
        ("pytest.fail('always')", True),
        ("assert 1", False),
        ("print('assert')", False),
        ("other.raises(1)", False),
    ],
)
def test_what_counts_as_an_assertion(tmp_path, body, good):
    text = f"def helper():\n    assert x == 1\n\ndef test_a():\n    {body}\n"
    assert assertions.asserts(written(tmp_path, text, f"{abs(hash(body))}.py"), "test_a") == good


def test_proofs_search_or_enumerate_up_to_their_bound(tmp_path):
    text = (
        "@given(st.integers(0, 12))\ndef test_drawn(n):\n    assert n\n\n"
        "def test_loop():\n    for n in range(7 + 1):\n        assert n\n"
    )
    path = written(tmp_path, text, "proofs.py")
    assert assertions.searches(path, "test_drawn") and not assertions.searches(path, "test_loop")
    assert assertions.enumerates(path, "test_loop")
    assert not assertions.enumerates(path, "test_drawn")
    assert assertions.mentions(path, "test_drawn", 12) and assertions.mentions(path, "test_loop", 7)
    assert not assertions.mentions(path, "test_loop", 12)


# ---- results


def test_results_are_recorded_and_reported(project):
    """By this repository's own conftest.py."""
    conftest = Path(__file__).with_name("conftest.py").read_text()
    written(project, conftest, "tests/conftest.py")
    done = subprocess.run([sys.executable, "-m", "pytest", "tests"], cwd=project,
                          env={"PYTHONPATH": str(project), "JAX_PLATFORMS": "cpu"},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout
    results = read_results(project)
    assert results.of("tests/test_x.py::test_cases").outcome == "passed"
    assert results.of("tests/test_x.py::test_skipped").outcome == "skipped"
    assert results.of("tests/test_x.py::test_gone") is None
    text = "\n".join(report(read_claims([project / "contracts"]), results))
    when = results.of("tests/test_x.py::test_adds").when
    assert f"  T-1: p\n    tests/test_x.py::test_adds: passed {when}" in text
    assert text.endswith("3 claims: 3 passed, 0 skipped, 0 failed, 0 never run")


def test_the_worst_case_and_the_oldest_run_count():
    results = Results({})
    assert results.of("t") is None
    results.by_node.update(
        {"t[1]": results_of("passed", 3), "t[2]": results_of("failed", 2), "tt": None}
    )
    assert results.of("t") == results_of("failed", 2)


def results_of(outcome, day):
    from scripts.contracts.results import Last

    return Last(outcome, f"2026-01-0{day}")


# ---- planted faults


def planted(project, mutants):
    path = written(project, mutants, "contracts/mutants.yaml")
    return read_claims([project / "contracts"]), read_mutants(path)


@pytest.mark.parametrize(
    ("old", "new", "rules"),
    [
        ("", "", []),
        ("T-1, T-2", "T-1", ["MUTANT-004"]),
        ("T-1, T-2", "T-1, T-2, T-9", ["MUTANT-002"]),
        ("T-1, T-2", "T-1, T-2, K-1", ["MUTANT-002"]),
        ("a + b", "a", ["MUTANT-003"]),
        ("a - b", "a + b", ["MUTANT-003"]),
        ("kdjax/x.py", "tests/test_x.py", ["MUTANT-003"]),
        ("kdjax/x.py", "kdjax/../kdjax/y.py", ["MUTANT-003"]),
        ("mutants:\n", "mutants:\n" + MUTANTS.split("\n", 1)[1], ["MUTANT-001"]),
    ],
)
def test_the_list_of_mutants_is_checked(project, old, new, rules):
    claims, mutants = planted(project, MUTANTS.replace(old, new, 1))
    assert [f.rule for f in check_mutants(project, claims, mutants)] == rules


def test_a_mutant_that_lacks_something_is_refused(project):
    for text in ("mutants: []", MUTANTS.replace("    find: a + b\n", ""), "- 1"):
        with pytest.raises(UserError, match=r"a mutant needs|no list under mutants"):
            planted(project, text)


def test_faults_are_killed_survive_or_do_not_run(project):
    # The cases that are dropped once one is red must not spoil the file that follows.
    written(project, TESTS, "tests/test_before.py")
    cases = GOOD.replace("tests/test_x.py::test_cases", "tests/test_before.py::test_cases")
    written(project, cases, "contracts/x-v1.yaml")
    more = [
        ("weak", "a + b", "a + b * (a != 5)"),  # no test has a = 5
        ("half", "a + b", "a * b - 1"),  # 2 * 3 - 1: only one of the two tests sees it
        ("name", "a + b", "c + b"),
        ("syntax", "return a + b", "return a +"),
        ("hangs", "return a + b", "import time; time.sleep(60)"),
    ]
    entry = MUTANTS.split("\n", 1)[1]
    text = MUTANTS
    for name, find, replace in more:
        text += entry.replace("minus", name).replace("a + b", find).replace("a - b", replace)
    claims, mutants = planted(project, text)
    said = []
    before = (project / "kdjax" / "x.py").read_text()
    verdicts = mutate(project, claims, mutants, jobs=2, say=said.append, timeout=4.0,
                      libraries=("pytest",))  # fmt: skip
    found = {v.mutant.id: (v.killed, v.why) for v in verdicts}
    assert found["minus"] == (True, "")
    assert found["weak"] == (False, "still green: T-1, T-2")
    assert found["half"] == (False, "still green: T-1")
    assert not found["name"][0] and "does not run: " in found["name"][1]
    assert "NameError" in found["name"][1]
    assert found["syntax"] == (False, "pytest ended with 4")
    assert found["hangs"] == (False, "it does not run: ran out of time")
    assert said[0] == "2 tests green without a fault"
    assert "killed   minus: subtracts" in said
    assert (project / "kdjax" / "x.py").read_text() == before


def test_tests_must_be_green_without_a_fault(project):
    written(project, "def add(a, b):\n    return a + b if a - 2 else 0\n", "kdjax/x.py")
    claims, mutants = planted(project, MUTANTS)
    with pytest.raises(UserError, match=r"not green without any fault: tests/test_x.py::test_adds"):
        mutate(project, claims, mutants, jobs=1, say=print, libraries=("pytest",))


def test_the_command_binds_and_mutates(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    monkeypatch.setattr(command, "mutate", lambda *a, **k: mutate(*a, **k, libraries=("pytest",)))
    assert command.main(["bind"]) == 0
    assert "2 tests and 1 proofs are bound." in capsys.readouterr().out
    assert command.main(["mutate", "--only", "minus", "--jobs", "1"]) == 0
    assert "1 killed, 0 survived" in capsys.readouterr().out
    assert command.main(["mutate", "--only", "plus"]) == 1
    assert "no mutant plus" in capsys.readouterr().err
    written(project, MUTANTS.replace("a - b", "b + a"), "contracts/mutants.yaml")
    assert command.main(["mutate"]) == 1
    assert "survivor: contracts/mutants.yaml:2: minus" in capsys.readouterr().out
    assert command.main(["status"]) == 0
    assert capsys.readouterr().out.endswith(
        "3 claims: 0 passed, 0 skipped, 0 failed, 3 never run\n"
    )
    written(project, GOOD.replace("T-2", "T-1"), "contracts/x-v1.yaml")
    assert command.main(["bind"]) == 1
    assert "Run `python -m scripts.contracts validate` first" in capsys.readouterr().err


# ---- receipts, and this repository


def test_a_receipt_is_verified_by_name(tmp_path, monkeypatch, capsys):
    seen = []

    def verify(workdir):
        seen.append(workdir)
        if workdir.name == "bad":
            raise UserError("teacher: found another hash.")
        return ["teacher: as recorded", "all is as recorded"]

    monkeypatch.setitem(sys.modules, "kdjax.watch.receipt", types.SimpleNamespace(verify=verify))
    assert command.main(["verify-receipt", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "teacher: as recorded\nall is as recorded\n"
    assert command.main(["verify-receipt", str(tmp_path / "bad")]) == 1
    assert capsys.readouterr().err == "error: teacher: found another hash.\n"
    assert seen == [tmp_path, tmp_path / "bad"]


def test_the_table_of_identifiers_names_what_there_is():
    """Its last column points at claims and gates; a row that is kept as it was is one itself."""
    folder = Path(__file__).parent.parent / "contracts"
    there = {claim.id for claim in read_claims([folder])}
    there |= {load(path).data["qa_gate"]["id"] for path in contract_files([folder])}
    rows = re.findall(r"^\| (.+?) \| (kept|changed|n/a|open) \| (.+) \|$",
                      (folder / "README.md").read_text(), re.MULTILINE)  # fmt: skip
    assert len(rows) > 120 and len({name for name, *_ in rows}) == len(rows)
    pattern = r"\b(?:F|FT|KANI|FALSIFY)-[A-Z0-9-]+-\d+\b(?!-)"
    for name, verdict, where in rows:
        named = re.findall(pattern, where)
        own = re.fullmatch(pattern, name) and verdict == "kept"
        if "same id" in where or (own and not named and "mutant" not in where):
            named = [*named, name]
        if verdict in ("kept", "changed"):
            assert set(named) <= there, (name, set(named) - there)


def test_the_contracts_of_this_repository_are_valid_and_covered():
    root = Path(__file__).parent.parent
    assert [f for p in contract_files([root / "contracts"]) for f in check_file(p)] == []
    claims = read_claims([root / "contracts"])
    mutants = read_mutants(root / "contracts" / "mutants.yaml")
    assert check_mutants(root, claims, mutants) == []
    assert len(mutants) >= 40
