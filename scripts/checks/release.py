"""Builds a release, checks it, installs it on clean Pythons and runs the demo from there.

    python -m pip install -e '.[dev,release]'
    python -m scripts.checks.release --out=dist --json=FILE     # about 5 minutes a row on two cores
    python -m twine upload dist/*                               # by hand, by who may

`python -m build` and `twine check --strict` work on a copy of the commit, so that no file that git
does not know comes along. Wheel and sdist are each installed on every Python, by uv, and run in an
empty folder without the repository: version, the demo, a GGUF file of its student, its text.
Exit status: 0 every row that was tried passed, 1 one did not, 2 bad input.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kdjax.errors import UserError, reporting
from scripts.checks.versions import find_python, find_uv

PYTHONS = ("3.11", "3.12", "3.13")


def build(out: Path, scratch: Path) -> list[Path]:
    """Returns wheel and sdist of HEAD in `out`, made and checked by the packages that PyPI names.

    Raises `UserError` with what git, build or twine says.
    """
    copy = scratch / "copy"
    copy.mkdir()
    run(["git", "archive", "--format=tar", "HEAD", "--output", str(scratch / "head.tar")])
    run(["tar", "-xf", str(scratch / "head.tar"), "-C", str(copy)])
    made = out.resolve()
    run([sys.executable, "-m", "build", "--outdir", str(made), str(copy)])
    files = [*made.glob("*.whl"), *made.glob("*.tar.gz")]
    if len(files) != 2:
        raise UserError(f"{out} has {len(files)} files of a release, not a wheel and an sdist.")
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)])
    return files


def run(command: list[str], cwd: Path | None = None) -> str:
    """Returns what a command prints; raises `UserError` with the end of it where it fails."""
    # Without the repository's path: what is installed must do alone.
    names = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=names, capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-800:]
        raise UserError(f"{' '.join(command[:4])} ... ended with {done.returncode}: {said}")
    return done.stdout


def try_file(file: Path, python: str, folder: Path, steps: int | None) -> dict[str, Any]:
    """Installs a file in a new environment; runs the demo, exports its student, lets it write."""
    uv, made = find_uv(), folder / "env"
    run([uv, "venv", "--quiet", "--python", python, str(made)])
    run([uv, "pip", "install", "--quiet", "--python", str(made / "bin" / "python"), str(file)])
    work, kdjax = folder / "work", str(made / "bin" / "kdjax")
    work.mkdir()
    start = time.monotonic()
    version = run([kdjax, "--version"], work).split()[-1]
    fewer = [] if steps is None else [f"--config.train.steps={steps}"]
    run([kdjax, "train", "--config=demo", "--workdir=runs/demo", *fewer], work)
    seconds = round(time.monotonic() - start)
    run([kdjax, "export", "runs/demo", "--format=gguf", "--type=q8_0", "--out=demo.gguf"], work)
    text = run([kdjax, "generate", "demo.gguf", "--prompt=One day, Lily", "--max-tokens=24"], work)
    if not text.strip():
        raise UserError(f"the student of {file.name} wrote nothing.")
    return dict(version=version, demo_seconds=seconds, text=text.strip())


def try_row(file: Path, version: str, scratch: Path, steps: int | None) -> dict[str, Any]:
    """Tries a file by a Python, if there is one; the row says what came of it."""
    row: dict[str, Any] = dict(file=file.name, bytes=file.stat().st_size, python=version)
    if (python := find_python(version)) is None:
        return row | dict(untried=f"no Python {version}")
    folder = scratch / f"{version}-{file.suffix}"
    folder.mkdir()
    try:
        return row | try_file(file, python, folder, steps)
    except UserError as error:
        return row | dict(failed=str(error))
    finally:
        shutil.rmtree(folder)


@reporting
def main(argv: list[str] | None = None) -> int:
    """Builds and tries all rows; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.checks.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="a new or empty folder")
    parser.add_argument("--only", nargs="+", choices=PYTHONS, default=list(PYTHONS), help="Pythons")
    parser.add_argument("--steps", type=int, help="of the demo, in place of all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rows")
    args = parser.parse_args(argv)
    if args.out.exists() and any(args.out.iterdir()):
        raise UserError(f"{args.out} is not empty. Give a new folder by --out.")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        files = build(args.out, Path(scratch))
        for file, version in [(file, version) for file in files for version in args.only]:
            rows.append(try_row(file, version, Path(scratch), args.steps))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
