"""Contracts on a small scratch project: validation, binding and planted faults; then our own."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from kdjax.errors import UserError
from scripts.contracts import __main__ as command
from scripts.contracts.bind import check_claims, check_mutants, locate, read_mutants, read_results
from scripts.contracts.changed import choose_base, select
from scripts.contracts.contracts import load_yaml, read_claims, validate
from scripts.contracts.mutate import mutate

REPOSITORY = Path(__file__).parent.parent
CONTRACT = """\
metadata: {version: "1.0.0", kind: kernel, description: d, references: [r]}
equations:
  e: {formula: a = b}
proof_obligations:
  - {type: invariant, property: p}
falsification_tests:
  - {id: T-1, rule: r, prediction: p, test: "tests/test_x.py::test_adds", if_fails: f}
  - {id: T-2, rule: r, prediction: p, test: "tests/test_x.py::test_cases", if_fails: f}
kani_harnesses:
  - {id: K-1, obligation: o, bound: 3, strategy: exhaustive, harness: "tests/test_x.py::test_proof"}
qa_gate: {id: G, name: n, description: d, checks: [bind], pass_criteria: all}
"""
PROPERTY = "  - {type: invariant, property: p}\n"
FIRST = CONTRACT[CONTRACT.index("{id: T-1") : CONTRACT.index("\n  - {id: T-2")]
TESTS = """
import pytest
from kdjax.x import add

def test_adds():
    assert add(2, 3) == 5

@pytest.mark.parametrize("n", [0, 1, 2])
def test_cases(n):
    assert add(n, 1) == n + 1

def test_proof():
    assert add(1, 1) == 2
"""
MUTANTS = """\
mutants:
  - id: minus
    fault: subtracts
    in: kdjax.x.add
    find: a + b
    replace: a - b
    kills: [T-1, T-2]
"""


def write(folder, text, name="x-v1.yaml"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---- validation


@pytest.mark.parametrize(
    ("problem", "old", "new"),
    [
        ("version is missing", '"1.0.0"', '" "'),
        ("version is 1.0, not text", '"1.0.0"', "1.0"),
        ("references is missing", "[r]", "[]"),
        ("kind is 'colonel'", "kind: kernel", "kind: colonel"),
        ("unknown key 'owner'", "description: d", "description: d, owner: o"),
        ("equations: nothing there", "\n  e: {formula: a = b}", " {}"),
        ("equations e: formula is missing", "a = b", '""'),
        ("property is missing", ", property: p", ""),
        ("type is 'guess'", "invariant", "guess"),
        ("proof_obligations: found NoneType", "\n" + PROPERTY, "\n"),
        ("unknown key 'formal'", "property: p", "property: p, formal: q"),
        ("property 'p' 2 times", PROPERTY, PROPERTY * 2),
        ("fewer than", PROPERTY, "".join(PROPERTY.replace("y: p", f"y: {p}") for p in "pqr")),
        ("id 'T-1' is also in", "T-2", "T-1"),
        ("id 'K-1' is also in", "id: G", "id: K-1"),
        ("no file docs/none.md here", "[r]", "[docs/none.md]"),
        ("'r' 2 times", "[r]", "[r, r]"),
        ("depends_on: y-v1 is no other", "[r]", "[r], depends_on: [y-v1]"),
        ("depends_on: x-v1 is no other", "[r]", "[r], depends_on: [x-v1]"),
        ("falsification_tests 0: prediction is missing", "prediction: p", 'prediction: ""'),
        ("falsification_tests 0: test is missing", 'test: "tests/test_x.py::test_adds", ', ""),
        ("falsification_tests 0: found str", FIRST, "T-1"),
        ("strategy is 'hope'", "exhaustive", "hope"),
        ("bound is missing", "bound: 3, ", ""),
        ("keys missing or unknown: qa_gate", CONTRACT[CONTRACT.index("qa_gate") :], ""),
        ("keys missing or unknown: kind", "qa_gate", "kind: KernelContract\nqa_gate"),
        ("is no contract", CONTRACT, "[1]"),
    ],
)
def test_each_rule_alone(tmp_path, problem, old, new):
    path = write(tmp_path, CONTRACT)
    assert validate([path]) == [] and old in CONTRACT
    (found,) = validate([write(tmp_path, CONTRACT.replace(old, new, 1))])
    assert found.startswith(f"{path}: ") and problem in found
    with pytest.raises(UserError, match=re.escape(problem)):
        read_claims([tmp_path])


def test_yaml_that_cannot_be_read(tmp_path):
    for text in ("a: [", "a: {b: 1, b: 2}"):
        with pytest.raises(UserError, match="found no YAML"):
            load_yaml(write(tmp_path, text))
    with pytest.raises(UserError, match="no such file"):
        validate([tmp_path / "none.yaml"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="found no contract"):
        validate([tmp_path / "empty"])


# ---- binding


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second to import
    write(tmp_path, "", "kdjax/__init__.py")
    write(tmp_path, "def add(a, b):\n    return a + b\n", "kdjax/x.py")
    write(tmp_path, TESTS, "tests/test_x.py")
    write(tmp_path, "[tool.pytest.ini_options]\naddopts = '-q'\n", "pyproject.toml")
    write(tmp_path, CONTRACT, "contracts/x-v1.yaml")
    write(tmp_path, MUTANTS, "contracts/mutants.yaml")
    monkeypatch.setattr(command, "mutate", lambda *a, **k: mutate(*a, **k, libraries="pytest"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(project, results=None):
    return list(check_claims(project, read_claims([project / "contracts"]), results))


def test_links_of_contracts_lead_somewhere(project):
    links = "[kdjax/x.py, a/b.yaml (aprender), https://x.org/y.pdf], depends_on: [y-v1]"
    write(project, CONTRACT.replace("[r]", links), "contracts/x-v1.yaml")
    other = CONTRACT.replace("T-2", "T-3").replace("id: G", "id: H")
    write(project, other, "contracts/y-v1.yaml")
    found = [line.split(": ", 1) for line in validate([project / "contracts"])]
    assert [path.rpartition("/")[2] for path, _ in found] == ["y-v1.yaml"] * 2
    assert [line.split(" is also in ")[0] for _, line in found] == ["id 'T-1'", "id 'K-1'"]


def test_claims_name_tests_that_exist(project):
    assert problems(project) == []
    write(project, CONTRACT.replace("test_adds", "test_gone"), "contracts/x-v1.yaml")
    (gone,) = problems(project)
    assert "T-1: no test tests/test_x.py::test_gone" in gone


def test_the_status_lists_each_claim_and_how_its_test_ended(project, capsys):
    case = '<testcase classname="tests.test_x" name="{}">{}</testcase>'
    ended = {"test_adds": "", "test_cases[1]": "", "test_cases[2]": "<failure/>"}
    cases = "".join(case.format(*item) for item in ended.items())
    write(project, f"<testsuite>{cases}</testsuite>", "results.xml")
    assert command.main(["status", "results.xml"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "T-1 1 faults tests/test_x.py::test_adds passed",
        "T-2 1 faults tests/test_x.py::test_cases failed and passed",
        "K-1 proof tests/test_x.py::test_proof not run",
        "1 passed, 1 failed and passed, 1 not run",
    ]
    assert command.main(["status", "none.xml"]) == 1


def test_claims_hold_where_their_tests_ran_and_passed(project):
    case = '<testcase classname="tests.test_x" name="{}">{}</testcase>'
    good = [case.format(name, "") for name in ("test_adds", "test_cases[1-a]", "test_proof")]
    path = project / "results.xml"
    for extra, state in (
        ("", None),
        (case.format("test_cases[2]", "<failure/>"), "failed"),
        (case.format("test_cases[2]", "<error/>"), "failed"),
        (case.format("test_cases[2]", "<skipped/>"), "skipped"),
    ):
        path.write_text(f"<testsuites><testsuite>{''.join(good)}{extra}</testsuite></testsuites>")
        found = problems(project, read_results([path]))
        assert [line.split("test_cases: ")[1] for line in found] == (
            [f"{state}. It must pass."] if state else []
        )
    path.write_text("<testsuite/>")
    assert len(problems(project, read_results([path]))) == 3
    with pytest.raises(UserError, match=r"no such file. Write it with pytest --junitxml"):
        read_results([project / "none.xml"])


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "", None),
        ("T-1, T-2", "T-1, T-2, K-1", None),
        ("T-1, T-2", "T-1", "no mutant kills T-2"),
        ("T-1, T-2", "T-1, T-2, T-9", "kills T-9, which no contract has"),
        ("find: a + b", "find: b", "2 times in kdjax.x.add"),
        ("in: kdjax.x.add", "file: kdjax/x.py", None),
        ("in: kdjax.x.add\n    find: a + b", "file: kdjax/x.py\n    find: a", "3 times in kdjax/x"),
        ("a - b", "a + b", "changes nothing"),
        ("kdjax.x.add", "tests.test_x", "tests.test_x is not below kdjax"),
        ("in: kdjax.x.add", "file: kdjax/y.py", "0 times in kdjax/y.py"),
        ("find: a + b", "find: a * b", "0 times in kdjax.x.add"),
        ("mutants:\n", "mutants:\n" + MUTANTS.split("\n", 1)[1], "minus a second time"),
    ],
)
def test_the_list_of_faults_is_checked(project, old, new, problem):
    path = write(project, MUTANTS.replace(old, new, 1), "contracts/mutants.yaml")
    found = list(check_mutants(project, read_claims([project / "contracts"]), read_mutants(path)))
    assert len(found) == bool(problem) and (not problem or problem in found[0])


@pytest.mark.parametrize(
    ("code", "planted"),
    [
        ("def add(a, b):\n    return (\n        a  # one\n        + b\n    )\n", "        a - b\n"),
        ("def add(x, b):\n    return x + b\n", "    return x - b\n"),
        ("def add(b, a):\n    return b + a\n", None),  # both names are still there
        ("def add(x, y):\n    return x + x\n", None),
        ("def add(x, y):\n    return x + x or x + y\n", "    return x + x or x - y\n"),
        ("def sum_both(a, b):\n    return a + b\n", "    return a - b\n"),
        ("def sum_both(x, b):\n    return x + b\n", None),
        (
            "def _add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n",
            "add(a, b):\n    return a - b",
        ),
        ("def one(a, b):\n    return a + b\n\n\ndef two(a, b):\n    return a + b\n", None),
        ("class Sum:\n    def add(self, a, b):\n        return a + b\n", "        return a - b\n"),
        ("import os\n", None),
    ],
)
def test_layout_and_renamings_do_not_lose_a_fault(project, code, planted):
    (mutant,) = read_mutants(project / "contracts" / "mutants.yaml")
    for name in ("x", "y"):  # the same when the function has moved to another file
        write(project, code if name == "x" else "", "kdjax/x.py")
        write(project, code if name == "y" else "", "kdjax/y.py")
        places = locate(project, mutant)
        assert len(places) == bool(planted)
        assert not planted or planted in places[0].plant(mutant.replace)


def test_a_fault_of_several_lines_goes_in_as_far_as_its_place(project):
    write(project, "def add(a, b):\n    if a:\n        return f(a, b,)\n", "kdjax/x.py")
    entry = {"find": "if a:\n    return f(a, b)", "replace": "if a:\n    b = 1\n    return b"}
    (mutant,) = read_mutants(project / "contracts" / "mutants.yaml")
    (place,) = locate(project, mutant._replace(**entry))
    planted = place.plant(entry["replace"])
    assert planted == "def add(a, b):\n    if a:\n        b = 1\n        return b\n"


def test_a_fault_that_lacks_something_is_refused(project):
    for text in ("mutants: []", MUTANTS.replace("    find: a + b\n", ""), "- 1"):
        with pytest.raises(UserError, match=r"a mutant needs|no list under mutants|no YAML"):
            read_mutants(write(project, text, "contracts/mutants.yaml"))


# ---- planted faults


@pytest.mark.slow
def test_faults_are_killed_survive_or_do_not_run(project):
    # The cases that are dropped once one is red must not spoil the file that follows.
    write(project, TESTS, "tests/test_before.py")
    text = CONTRACT.replace("test_x.py::test_cases", "test_before.py::test_cases")
    claims = read_claims([write(project, text, "contracts/x-v1.yaml")])
    faults = {
        "weak": "a + b * (a != 5)",  # no test has a = 5
        "half": "a * b - 1",  # 2 * 3 - 1: only one of the two tests sees it
        "name": "c + b",
        "syntax": "a +",
        "hangs": "__import__('time').sleep(60)",
        "once": "a - b if os.path.exists('tried') else open('tried', 'w') and time.sleep(60)",
    }
    write(project, "import os, time\n" + (project / "kdjax" / "x.py").read_text(), "kdjax/x.py")
    entry = MUTANTS.split("\n", 1)[1]
    text = MUTANTS + "".join(
        entry.replace("minus", name).replace("a - b", fault) for name, fault in faults.items()
    )
    mutants = read_mutants(write(project, text, "contracts/mutants.yaml"))
    before, said = (project / "kdjax" / "x.py").read_text(), []
    options = dict(say=said.append, timeout=4.0, libraries="pytest")
    verdicts = mutate(project, claims, mutants, **options)
    assert verdicts["minus"] == ""
    assert any(re.fullmatch(r"killed minus in \d+\.\d s: subtracts", line) for line in said)
    assert verdicts["weak"] == "still green: T-1, T-2"
    assert verdicts["half"] == "still green: T-1"
    assert re.search("does not run: .*NameError", verdicts["name"])
    assert verdicts["syntax"] == "pytest ended with 4"
    assert re.match(r"it does not run: ran out of time in .*x\.py.* in add <", verdicts["hangs"])
    assert verdicts["once"] == ""  # the second time it runs
    assert said[-1] == "2 failed cases green without a fault"
    assert (project / "kdjax" / "x.py").read_text() == before


@pytest.mark.slow
def test_tests_must_be_green_without_a_fault(project, capsys):
    write(project, "def add(a, b):\n    return a + b if a - 2 else 0\n", "kdjax/x.py")
    assert command.main(["mutate"]) == 1
    assert "not green without any fault: tests/test_x.py::test_adds" in capsys.readouterr().err
    case = '<testcase classname="tests.test_x" name="{}"/>'
    text = f"<x>{''.join(map(case.format, ('test_adds', 'test_cases[1]', 'test_cases[2]')))}</x>"
    results = write(project, text, "results.xml")
    assert command.main(["mutate", f"--passed={results}"]) == 0  # they passed with another code
    assert "0 failed cases green without a fault" in capsys.readouterr().out
    write(project, text.replace("/><", "><failure/></testcase><", 1), "results.xml")
    assert command.main(["mutate", f"--passed={results}"]) == 1


@pytest.mark.slow
def test_the_command(project, capsys):
    assert command.main(["validate"]) == command.main(["bind"]) == 0
    well = "Contracts are valid.\n3 claims and 1 faults are bound.\n"
    assert capsys.readouterr().out == well
    assert command.main(["mutate", "--only", "minus", "--jobs", "1", "--json", "last.json"]) == 0
    assert json.loads(Path("last.json").read_text())["faults"]["minus"]["survived"] == ""
    assert "1 faults planted, all found" in capsys.readouterr().out
    assert command.main(["mutate", "--only", "plus"]) == 1
    assert "no mutant plus" in capsys.readouterr().err
    write(project, MUTANTS.replace("a - b", "b + a"), "contracts/mutants.yaml")
    assert command.main(["mutate"]) == 1
    assert "survivor minus: still green: T-1, T-2" in capsys.readouterr().out
    write(project, CONTRACT.replace("T-2", "T-1"), "contracts/x-v1.yaml")
    assert command.main(["validate"]) == command.main(["bind"]) == 1
    assert "1 problems" in capsys.readouterr().out


# ---- the faults that a change touches


@pytest.fixture
def clone(project):
    """The project as a repository of one commit, and what runs git in it."""
    entry = MUTANTS.split("\n", 1)[1].replace("minus", "times").replace("a - b", "a * b")
    other = entry.replace("kdjax.x.add", "kdjax.y.twice").replace("a + b", "a + a")
    write(project, "def twice(a):\n    return a + a\n", "kdjax/y.py")
    write(project, TESTS.replace("add(", "twice("), "tests/test_y.py")
    contract = CONTRACT.replace("T-", "Y-").replace("K-", "L-").replace("id: G", "id: H")
    write(project, contract.replace("test_x.py", "test_y.py"), "contracts/y-v1.yaml")
    other = other.replace("times", "y").replace("T-", "Y-")
    write(project, MUTANTS + other, "contracts/mutants.yaml")

    def git(*words):
        named = ("-c", "user.name=n", "-c", "user.email=e@x")
        done = subprocess.run(
            ["git", "-C", project, *named, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    git("add", "."), git("commit", "-qm", "one")
    return git


def touched(project, base="HEAD"):
    mutants = read_mutants(project / "contracts" / "mutants.yaml")
    claims = read_claims([project / "contracts"])
    return [mutant.id for mutant in select(project, claims, mutants, base)]


def test_faults_are_those_of_modules_tests_and_entries_that_differ(project, clone):
    assert touched(project) == []
    write(project, TESTS + "\n\ndef test_more():\n    pass\n", "tests/test_x.py")
    assert touched(project) == []  # no test of a claim differs
    write(project, TESTS.replace("add(2, 3) == 5", "add(2, 3)"), "tests/test_x.py")
    assert touched(project) == ["minus"]
    clone("checkout", "-q", ".")
    write(project, "def twice(a):\n    return a + a  # anew\n", "kdjax/y.py")
    assert touched(project) == ["y"]
    clone("commit", "-qam", "two")
    assert touched(project) == [] and touched(project, "HEAD^") == ["y"]
    (project / "kdjax" / "y.py").rename(project / "kdjax" / "z.py")  # git does not know it yet
    assert touched(project) == ["y"]
    clone("checkout", "-q", ".")
    (project / "kdjax" / "z.py").unlink()
    path = project / "contracts" / "mutants.yaml"
    write(project, path.read_text().replace("a - b", "b - a"), "contracts/mutants.yaml")
    assert touched(project) == ["minus"]
    with pytest.raises(UserError, match="--changed=gone: git knows no such commit"):
        touched(project, "gone")


def test_the_base_is_the_merge_base_the_last_tag_or_thirty_commits_ago(project, clone, tmp_path):
    assert choose_base(tmp_path / "none") is None and choose_base(project) is None  # one commit
    first = clone("rev-parse", "HEAD")
    for number in range(40):
        clone("commit", "-q", "--allow-empty", "-m", str(number))
    assert choose_base(project) == clone("rev-parse", "HEAD~30")
    clone("tag", "v0", first)
    assert choose_base(project) == clone("rev-parse", "HEAD~30")  # nearer than the tag
    clone("tag", "v1", "HEAD~7"), clone("tag", "v2")
    assert choose_base(project) == "v1"  # not the tag of what is compared
    clone("commit", "-q", "--allow-empty", "-m", "more")
    assert choose_base(project) == "v2"
    clone("update-ref", "refs/remotes/origin/main", "HEAD~2")
    assert choose_base(project) == clone("rev-parse", "HEAD~2")
    clone("update-ref", "refs/remotes/origin/main", "HEAD")
    assert choose_base(project) == "v2"
    shallow = tmp_path / "shallow"
    clone("clone", "-q", "--depth=1", project.as_uri(), str(shallow))
    assert choose_base(shallow) is None
    clone("clone", "-q", "--no-tags", "--depth=4", project.as_uri(), str(shallow) + "4")
    assert choose_base(Path(f"{shallow}4")) == clone("rev-parse", "HEAD~3")


def test_the_command_plants_what_changed_or_all(project, clone, monkeypatch, capsys):
    planted = []
    monkeypatch.setattr(command, "mutate", lambda *a, **k: planted.extend(m.id for m in a[2]) or {})
    write(project, "def twice(a):\n    return a + a  # anew\n", "kdjax/y.py")
    assert command.main(["mutate", "--changed"]) == 0  # of one commit: nothing to compare with
    assert planted == ["minus", "y"] and "all faults" in capsys.readouterr().out
    planted.clear()
    assert command.main(["mutate", "--changed", "HEAD"]) == 0 and planted == ["y"]
    assert "1 of 2 faults" in capsys.readouterr().out
    clone("commit", "-qam", "two")
    assert command.main(["mutate", "--changed", "HEAD"]) == 0 and planted == ["y"]


# ---- this repository


def test_the_contracts_of_this_repository_are_valid_and_covered():
    folder = REPOSITORY / "contracts"
    assert validate([folder]) == []
    claims, mutants = read_claims([folder]), read_mutants(folder / "mutants.yaml")
    assert list(check_claims(REPOSITORY, claims)) == []
    assert list(check_mutants(REPOSITORY, claims, mutants)) == []
    assert len(mutants) >= 165 and len(claims) >= 183
