"""The Python source of installed packages: a corpus that every machine has."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from kdjax.errors import MissingFileError, suggest

STANDARD_LIBRARY = "stdlib"
LARGEST = 200_000  # bytes; beyond it files are mostly generated tables
# Third-party packages, and tests: some distributions of the standard library have them.
_SKIPPED = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test"))


def source_files(package: str) -> list[Path]:
    """The Python files of an installed package, in the order of their paths within it.

    "stdlib" is the standard library. Tests and files that are empty, larger than 200 kB or not
    UTF-8, or cannot be read, are left out. The package is not imported. Raises `MissingFileError`
    if there is none.
    """
    files = [path for root in _find_roots(package) for path in _walk(root)]
    if not files:
        raise MissingFileError(
            f"python:{package}: found the package, but no Python source in it; expected one that "
            "is not compiled. Name another."
        )
    return files


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Version of each installed package; the running Python's for the standard library."""
    python = platform.python_version()
    versions = {}
    for package in packages:
        mine = ", ".join(importlib.metadata.version(name) for name in _list_owners(package))
        versions[package] = mine or (python if _is_standard(package) else "unknown")
    return versions


def _list_owners(package: str) -> list[str]:
    """Names of the distributions that a package is of.

    All are read only if none of its name has its first file, as none of a namespace does.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(package) or []
        if any(str(file) in (f"{package}/__init__.py", f"{package}.py") for file in files):
            return [package]
    return sorted(set(_distributions().get(package, [])))


def _is_standard(package: str) -> bool:
    return package == STANDARD_LIBRARY or package in sys.stdlib_module_names


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _find_roots(package: str) -> list[Path]:
    """The folders of a package, or the one file of a module."""
    if package == STANDARD_LIBRARY:
        return [Path(sysconfig.get_path("stdlib"))]
    try:
        # A dotted name would import its parent.
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        hint = suggest(package, [STANDARD_LIBRARY, *_distributions()], "python:")
        raise MissingFileError(
            f"python:{package}: found no installed package of that name; expected one that this "
            f"Python imports, or python:{STANDARD_LIBRARY}.{hint} Install it, or name another; "
            "folders and files of text come before python:, as in FOLDER,python:jax,flax."
        )
    if spec.submodule_search_locations:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.has_location and spec.origin else []


def _walk(root: Path) -> Iterator[Path]:
    found = [str(root)]
    if root.is_dir():
        found = []
        for folder, inner, names in os.walk(root):
            inner[:] = [name for name in inner if name not in _SKIPPED]
            found += [os.path.join(folder, name) for name in names]
    for path in sorted((x for x in found if x.endswith(".py")), key=lambda x: x.split(os.sep)):
        with contextlib.suppress(OSError):  # a link to nothing
            status = os.stat(path)
            if status.st_size <= LARGEST and _is_text(path, status.st_size, status.st_mtime_ns):
                yield Path(path)


@functools.cache
def _is_text(path: str, size: int, changed: int) -> bool:
    """Whether a file, as it was at that time, has text in UTF-8; a run asks three times."""
    try:
        return bool(Path(path).read_bytes().decode("utf-8").strip())
    except UnicodeDecodeError:
        return False
