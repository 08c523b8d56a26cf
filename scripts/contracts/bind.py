"""Claims against tests: each must exist, run, and be able to fail."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kdjax.errors import UserError
from scripts.contracts import assertions
from scripts.contracts.claims import Claim
from scripts.contracts.document import Finding
from scripts.contracts.results import Results, matches

# Runs inside pytest: writes each test with whether a mark, as evaluated here, skips it.
_COLLECTOR = """
import json, sys, pytest
from _pytest.skipping import evaluate_skip_marks
class Collector:
    def pytest_collection_finish(self, session):
        found = {i.nodeid: evaluate_skip_marks(i) is not None for i in session.items}
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)
sys.exit(pytest.main(sys.argv[2:], plugins=[Collector()]))
"""


def collect(root: Path, files: list[str]) -> dict[str, bool]:
    """Tests of these files by node id, and whether each is skipped by a mark; one pytest call.

    Raises `UserError` with pytest's own words if a file cannot be collected.
    """
    present = [file for file in files if (root / file).is_file()]
    if not present:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "collected.json"
        options = ["--collect-only", "-qq", "-o", "addopts=", "-p", "no:cacheprovider"]
        command = [sys.executable, "-c", _COLLECTOR, str(out), *options, *present]
        path = os.pathsep.join(filter(None, [str(root.resolve()), os.environ.get("PYTHONPATH")]))
        environ = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)
        if done.returncode not in (0, 5) or not out.exists():
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise UserError(f"pytest cannot collect {', '.join(present)}. Mend this first:\n{tail}")
        return json.loads(out.read_text())


def bind(root: Path, claims: list[Claim], results: Results) -> list[Finding]:
    """What is wrong between claims and the tests under `root`, by contract and line."""
    files = sorted({claim.node.partition("::")[0] for claim in claims if claim.node})
    collected = collect(root, files)
    findings = [f for claim in claims for f in _bind(root, claim, collected, results)]
    first: dict[str, Claim] = {}
    for claim in claims:
        if claim.id in first:
            findings.append(_error(claim, "BIND-006", f"{claim.id} is also in "
                                   f"{first[claim.id].path}", "Rename one."))  # fmt: skip
        first.setdefault(claim.id, claim)
    return findings


def _error(claim: Claim, rule: str, message: str, remedy: str) -> Finding:
    return Finding(claim.path, claim.line, "ERROR", rule, message, remedy)


def _bind(root: Path, claim: Claim, collected: dict[str, bool],
          results: Results) -> Iterator[Finding]:  # fmt: skip
    file, _, name = claim.node.partition("::")
    if not file or not name:
        key = "harness" if claim.proof else "test"
        yield _error(claim, "BIND-001", f"{claim.id} names no test",
                     f"Put tests/test_x.py::test_y under {key}.")  # fmt: skip
        return
    nodes = [node for node in collected if matches(node, claim.node)]
    if not nodes:
        yield _error(claim, "BIND-002", f"{claim.id}: no test {claim.node}",
                     "Name one that `pytest --collect-only` lists.")  # fmt: skip
        return
    last = results.of(claim.node)
    if any(collected[node] for node in nodes) or (last and last.outcome == "skipped"):
        yield _error(claim, "BIND-003", f"{claim.id}: {claim.node} is skipped",
                     "Bind a test that runs here.")  # fmt: skip
    path, function = root / file, name.partition("[")[0]
    if not assertions.asserts(path, function):
        yield _error(claim, "BIND-004", f"{claim.id}: {claim.node} asserts nothing",
                     "Compare what happens with what must.")  # fmt: skip
    if claim.proof and (problem := _no_proof(path, function, claim)):
        yield _error(claim, "BIND-005", f"{claim.id}: {claim.node} {problem}",
                     "Draw inputs with hypothesis or go through all of them.")  # fmt: skip


def _no_proof(path: Path, function: str, claim: Claim) -> str | None:
    """Why the test is no search over the stated bound; None if it is one."""
    if claim.strategy == "exhaustive":
        if not assertions.enumerates(path, function):
            return "goes through no cases, though the strategy is exhaustive"
    elif not assertions.searches(path, function):
        return f"is no hypothesis test, though the strategy is {claim.strategy or 'not given'}"
    if claim.bound is None or not assertions.mentions(path, function, claim.bound):
        return f"does not hold the bound {claim.bound}"
    return None
