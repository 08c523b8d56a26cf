"""The planted faults that a change touches, by what git says of the files."""

import ast
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kdjax.errors import UserError
from scripts.contracts.bind import Mutant, locate
from scripts.contracts.contracts import FOLDER, MUTANTS, Claim, load_yaml

_COMMITS = 30  # that are compared at most on main: all are planted by hand before a tag


def _git(root: Path, *words: str) -> str | None:
    """Returns what git prints; None if there is no git, no repository, or it refuses."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def choose_base(root: Path) -> str | None:
    """The commit that a change is compared with; None if the clone does not know an earlier one.

    On a branch the merge base with `origin/main`; on main itself the last tag, but at most 30
    commits ago, or as far back as a shallow clone goes.
    """
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return None
    merged = _git(root, "merge-base", "origin/main", "HEAD")
    if merged and merged != head:
        return merged
    tag = _git(root, "describe", "--tags", "--abbrev=0", "HEAD^")
    if (
        tag
        and int(_git(root, "rev-list", "--first-parent", "--count", f"{tag}..HEAD") or 0)
        <= _COMMITS
    ):
        return tag
    known = (_git(root, "rev-list", "--first-parent", f"-{_COMMITS + 1}", "HEAD") or head).split()
    return known[-1] if len(known) > 1 else None


def _list_files(root: Path, base: str) -> set[Path]:
    """Files that differ from the base, in commits or in the working tree, new ones included."""
    differ = _git(root, "diff", "--name-only", "--no-renames", base)
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    if differ is None or new is None:
        raise UserError(f"--changed={base}: git knows no such commit here. Fetch it, or leave it.")
    return {(root / name).resolve() for name in (*differ.splitlines(), *new.splitlines())}


def _read_functions(text: str) -> dict[str, str]:
    """The functions of a module's text by name, each as a text that layout does not change."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.dump(node) for node in found}


def select(
    root: Path, claims: Sequence[Claim], mutants: Sequence[Mutant], base: str
) -> list[Mutant]:
    """The faults whose module, test function or entry differs from the base.

    What a test takes from fixtures and helpers is not compared. `UserError` for an unknown base.
    """
    files = _list_files(root, base)

    def read_before(path: Path) -> str:
        return _git(root, "show", f"{base}:{path.as_posix()}") or ""

    def read_entries(data: Any) -> dict[str, Any]:
        return {entry["id"]: entry for entry in (data or {}).get("mutants", ())}

    touched: set[str] = set()  # claims whose test differs
    for name in {claim.test.partition("::")[0] for claim in claims}:
        if (root / name).resolve() in files:
            before = _read_functions(read_before(Path(name)))
            now = _read_functions((root / name).read_text(encoding="utf-8"))
            differ = {f"{name}::{test}" for test in now if now[test] != before.get(test)}
            touched |= {claim.id for claim in claims if claim.test in differ}
    list_path = FOLDER / MUTANTS
    entries = read_entries(load_yaml(root / list_path))
    before = read_entries(yaml.safe_load(read_before(list_path)))
    return [
        mutant
        for mutant in mutants
        if touched & set(mutant.kills)
        or entries[mutant.id] != before.get(mutant.id)
        or any(place.file.resolve() in files for place in locate(root, mutant))
    ]
