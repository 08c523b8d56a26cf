"""The core tests by several Pythons, with the oldest packages that kdjax allows and the newest.

    python -m scripts.checks.versions --json=FILE      # all rows: about 5 minutes each on two cores
    python -m scripts.checks.versions --only 3.12 --surface   # CI: what meets the packages' APIs

uv makes each row's environment in --folder from pyproject.toml: "oldest" has the lower bound of
each dependency, the others have the newest of all, so the newest JAX that supports their Python.
Warnings of JAX, Flax, Orbax and Grain that something will go are errors, wherever the line is that
causes them. Python is found as PYTHON312, python3.12 or pyenv's; a row without its Python is not
tried, and says so.
Exit status: 0 every row that was tried passed, 1 one did not, 2 bad input.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdjax.errors import UserError, reporting

# Name of a row, its Python, whether it has the lowest versions that pyproject.toml allows.
ROWS = {
    "oldest": ("3.11", True),
    "3.11": ("3.11", False),
    "3.12": ("3.12", False),
    "3.13": ("3.13", False),
}
# Losses, steps, kernels interpreted, a run, resuming, text, downloads, settings of JAX and XLA.
_CORE = (
    "losses cached_loss step optim kernels delta_kernels run states generate defaults hub runtime"
)
# What of them meets an API of JAX, Flax, Orbax or Transformers that nothing else here does; by the
# others' numbers CI judges on 3.11. Two fifths of their seconds.
_SURFACE = {
    "optim": "",
    "states": "",
    "kernels": "",
    "delta_kernels": "",
    "defaults": "",
    "hub": "test_a_folder_is_uploaded_as_it_was_exported",
    "runtime": "test_xla_knows_the_flags_that_are_set",
    "losses": "test_gradient_is_analytic_and_agrees_with_autodiff "
    "test_evaluation_sums_match_the_oracle test_training_never_holds_all_logits",
    "cached_loss": "test_all_ids_cached_is_the_full_loss",
    "step": "test_any_mesh_is_the_same test_gradients_may_travel_in_bfloat16 "
    "test_a_state_of_parts_goes_on_on_any_number_of_devices "
    "test_one_trace_and_a_falling_loss_over_steps test_teacher_is_an_argument_and_keeps_its_bytes "
    "test_ids_outside_the_vocabulary_are_refused",
    "run": "test_train_10_is_train_5_stop_resume_train_5_bit_for_bit "
    "test_nan_stops_keeps_the_batch_and_the_last_good_checkpoint",
    "generate": "test_the_command test_the_kernel_draws_what_is_defined "
    "test_layers_of_several_kinds_hold_in_the_cache test_text_in_and_text_out",
}
_SHOWN = ["jax", "flax", "orbax-checkpoint", "grain", "huggingface_hub", "transformers"]
_GOING = [
    f"error::{kind}:(jax|flax|orbax|grain)(\\.|$)"
    for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
]


def list_surface() -> list[str]:
    """Returns the files, and the tests of files, that CI runs by the newest packages."""
    parts = [(f"tests/test_{name}.py", tests.split()) for name, tests in _SURFACE.items()]
    return [node for file, tests in parts for node in [f"{file}::{t}" for t in tests] or [file]]


def find_python(version: str) -> str | None:
    """Returns a Python of this version that runs: where pyenv sets another its shim fails."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    named = os.environ.get("PYTHON" + version.replace(".", "")), shutil.which(f"python{version}")
    for path in (*named, *sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)):
        if path and _ask(str(path), "import sys; print('%d.%d' % sys.version_info[:2])") == version:
            return str(path)
    return None


def _ask(python: str, program: str) -> str | None:
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_uv() -> str:
    """Returns uv beside this Python, or of the PATH; raises `UserError` without one."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath]))
    if (uv := uv or shutil.which("uv")) is None:
        raise UserError("found no uv, which makes environments. pip install uv.")
    return uv


def install(python: str, folder: Path, lowest: bool) -> None:
    """Makes an environment in `folder` with the tests' packages, the lowest allowed or the newest.

    Raises `UserError` without uv, or with what it says of packages that do not go together.
    """
    uv = find_uv()
    shutil.rmtree(folder, ignore_errors=True)
    which = ("--resolution", "lowest-direct") if lowest else ("--upgrade",)
    target = ("--python", str(folder / "bin" / "python"))
    commands = ("venv", "--python", python, str(folder)), ("pip", "install", *target, *which)
    for command in (commands[0], (*commands[1], "-e", ".[test]")):
        done = subprocess.run([uv, *command, "--quiet"], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"uv could not make {folder}: {done.stderr.strip()[-600:]}")


def read_versions(python: str) -> dict[str, str]:
    """Returns the versions of the packages that a row names."""
    program = (
        "import importlib.metadata as m, json, platform; "
        f"print(json.dumps(dict(python=platform.python_version()) | "
        f"{{n: m.version(n) for n in {_SHOWN}}}))"
    )
    return json.loads(_ask(python, program) or "{}")


def list_filters(project: str) -> list[str]:
    """Returns pytest's filters of pyproject.toml's text, with those of what will go."""
    filters = tomllib.loads(project)["tool"]["pytest"]["ini_options"]["filterwarnings"]
    known = [line for line in filters if line.startswith("ignore:")]
    # Of the lines that match a warning the last one counts: what is known stays ignored.
    return [*(line for line in filters if line not in known), *_GOING, *known]


def run_tests(
    python: str, results: Path, filters: Sequence[str], tests: Sequence[str], jobs: int = 2
) -> dict[str, Any]:
    """Runs the tests by that Python; returns counts, seconds and the names of what failed."""
    command = [
        python,
        "-m",
        "pytest",
        "-n",
        str(jobs),
        "--dist",
        "loadfile",
        f"--junitxml={results}",
    ]
    command += ["-o", "filterwarnings=" + "\n".join(filters), *tests]
    results.unlink(missing_ok=True)
    start = time.monotonic()
    status = subprocess.run(command).returncode
    row: dict[str, Any] = dict(status=status, seconds=round(time.monotonic() - start))
    if not results.exists():
        return row
    cases = ET.parse(results).getroot().iter("testcase")
    ended = [(f"{case.get('classname')}::{case.get('name')}", _read_end(case)) for case in cases]
    for word in ("passed", "failed", "skipped"):
        row[word] = sum(end == word for _, end in ended)
    return row | dict(failures=[name for name, end in ended if end == "failed"])


def _read_end(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def try_row(
    name: str, folder: Path, tests: Sequence[str], keep: bool, jobs: int = 2
) -> dict[str, Any]:
    """Makes a row's environment, unless one is there to `keep`, and runs the tests in it."""
    version, lowest = ROWS[name]
    python = find_python(version)
    if python is None:
        where = f"PYTHON{version.replace('.', '')}, python{version}, pyenv"
        return dict(row=name, untried=f"no Python {version} ({where})")
    start = time.monotonic()
    made = folder / name / "bin" / "python"
    if not (keep and made.exists()):
        install(python, folder / name, lowest)
    built = round(time.monotonic() - start)
    versions = read_versions(str(made))
    print(name, *(f"{package} {version}" for package, version in versions.items()), flush=True)
    filters = list_filters(Path("pyproject.toml").read_text())
    ran = run_tests(str(made), folder / f"{name}.xml", filters, tests, jobs)
    return dict(row=name, versions=versions, built_seconds=built, **ran)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    names = ["python", *_SHOWN]
    lines = ["| row | " + " | ".join(names) + " | passed | failed | skipped | s |"]
    lines.append("| --- " * (len(names) + 5) + "|")
    for row in rows:
        if "untried" in row:
            lines.append(f"| {row['row']} | not tried: {row['untried']} " + "| " * 10 + "|")
            continue
        cells = [row["versions"].get(name, "?") for name in names]
        cells += [str(row.get(word, "?")) for word in ("passed", "failed", "skipped", "seconds")]
        lines.append(f"| {row['row']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the rows; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.checks.versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), help="rows")
    parser.add_argument("--folder", type=Path, default=Path(".venv-versions"))
    parser.add_argument("--keep", action="store_true", help="environments that are there")
    parser.add_argument("--jobs", type=int, default=2, help="processes of a row's tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--surface", action="store_true", help="the quarter of them that CI runs")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="in place of the core tests")
    args = parser.parse_args(argv)
    core = list_surface() if args.surface else [f"tests/test_{name}.py" for name in _CORE.split()]
    tests = args.tests or core
    if absent := [name for name in tests if not Path(name.partition("::")[0]).exists()]:
        raise UserError(f"no {', '.join(absent)} here. Run it in the repository.")
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.only:
        rows.append(try_row(name, args.folder.resolve(), tests, args.keep, args.jobs))
        if args.json:
            args.json.write_text(json.dumps(dict(tests=tests, rows=rows), indent=1) + "\n")
    print(format_table(rows))
    return int(any(row.get("status") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
