"""The matrix of versions: its Pythons, its filters of warnings, its rows in a table."""

import subprocess
import sys
from pathlib import Path

import pytest

from kdjax.errors import UserError
from scripts.checks import versions


def test_a_python_that_does_not_run_is_passed_over(monkeypatch, tmp_path):
    """Pyenv's shim of a version that is not set fails; the environment's variable comes first."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PYTHON311", str(tmp_path / "absent"))
    shim, real = tmp_path / "shim", tmp_path / "versions" / "3.11.9" / "bin" / "python"
    real.parent.mkdir(parents=True)
    shim.write_text("#!/bin/sh\nexit 127\n")
    real.write_text("#!/bin/sh\necho 3.11\n")
    shim.chmod(0o755), real.chmod(0o755)
    monkeypatch.setattr(versions.shutil, "which", lambda name: str(shim))
    assert versions.find_python("3.11") == str(real)
    assert versions.find_python("3.12") is None
    row = versions.try_row("3.12", tmp_path, [], keep=False)
    assert row["untried"] == "no Python 3.12 (PYTHON312, python3.12, pyenv)"


def test_without_uv_nothing_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(versions.shutil, "which", lambda name, path=None: None)
    with pytest.raises(UserError, match="pip install uv"):
        versions.install(sys.executable, tmp_path / "new", lowest=True)


_WARNS = """
import sys, types, warnings
import pytest

@pytest.mark.parametrize("module", ["jax.x", "flax", "orbax.checkpoint", "grain.y", "jaxother"])
@pytest.mark.parametrize("text", ["a is deprecated", "The Pallas Triton backend is deprecated"])
def test_it(module, text):
    warnings.warn_explicit(text, DeprecationWarning, "x.py", 1, module)
"""


@pytest.mark.slow
def test_what_jax_deprecates_is_an_error_wherever_it_comes_from(tmp_path, monkeypatch):
    """But for what pyproject.toml ignores by its words; packages with longer names are others."""
    (tmp_path / "test_warns.py").write_text(_WARNS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    filters = "\n".join(versions.list_filters(Path("pyproject.toml").read_text()))
    command += ["--rootdir", str(tmp_path), "-c", "/dev/null", "-o", f"filterwarnings={filters}"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert "4 failed, 6 passed" in done.stdout, done.stdout
    for module in ("jax.x", "flax", "orbax.checkpoint", "grain.y"):
        assert f"test_it[a is deprecated-{module}]" in done.stdout


def test_what_ci_runs_of_the_core_tests_is_of_each_file():
    nodes = versions.list_surface()
    assert {node.partition("::")[0] for node in nodes} == {
        f"tests/test_{name}.py" for name in versions._CORE.split()
    }
    for file, _, test in (node.partition("::") for node in nodes):
        assert f"\ndef {test or 'test_'}" in (Path(__file__).parents[1] / file).read_text()


def test_rows_are_read_from_what_pytest_wrote_and_shown(tmp_path, monkeypatch):
    results = tmp_path / "3.12.xml"

    def write(command):
        results.write_text(
            '<testsuites><testsuite><testcase classname="tests.test_a" name="test_b"/>'
            '<testcase classname="tests.test_a" name="test_c"><skipped/></testcase>'
            '<testcase classname="tests.test_a" name="test_d"><failure/></testcase>'
            '<testcase classname="tests.test_a" name="test_e"><error/></testcase>'
            "</testsuite></testsuites>"
        )
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(versions.subprocess, "run", write)
    row = versions.run_tests("python", results, [], [])
    counts = [row[word] for word in ("status", "passed", "failed", "skipped")]
    assert counts == [1, 1, 2, 1]
    assert row["failures"] == ["tests.test_a::test_d", "tests.test_a::test_e"]
    rows = [row | dict(row="3.12", versions=dict(python="3.12.1", jax="0.12.0"))]
    lines = versions.format_table([*rows, dict(row="3.13", untried="no Python")]).splitlines()
    assert lines[2].startswith("| 3.12 | 3.12.1 | 0.12.0 |") and "| 1 | 2 | 1 |" in lines[2]
    assert len({line.count("|") for line in lines}) == 1
