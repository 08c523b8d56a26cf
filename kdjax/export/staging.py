"""Writes next to the target, file or folder, and then puts all of it in place at once."""

import contextlib
import ctypes
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kdjax.errors import UserError
from kdjax.formats.files import make_folder, writing
from kdjax.formats.safetensors import is_model_folder

_AT_FDCWD, _EXCHANGE = -100, 2  # fcntl.h, RENAME_EXCHANGE of linux/fs.h


def check_target(out: Path, *, folder: bool, overwrite: bool) -> None:
    """Raises `UserError` for a target that exists, or that must not be replaced."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise UserError(
            f"{out} is there already. Name another path, or replace it: overwrite=True "
            "(--overwrite)."
        )
    special = out.exists() and not (out.is_file() or out.is_dir())  # /dev/null would be replaced
    if folder != out.is_dir() or special:
        kind, other = ("a file", "a folder") if folder else ("a folder", "a file")
        kind = "no regular file" if special else kind
        raise UserError(f"{out} is {kind}; expected {other} to replace. Name another.")
    if folder and any(out.iterdir()) and not is_model_folder(out):
        raise UserError(
            f"{out} is a folder without config.json, so no export made it; it stays as it is. "
            "Name another path."
        )


def check_suffix(out: Path, suffix: str) -> None:
    """Raises `UserError` for a file whose name does not end in `suffix`: readers go by it."""
    if out.suffix != suffix:
        raise UserError(f"{out}: expected a name that ends in {suffix}. Add the suffix.")


def check_sources(out: Path, sources: Iterable[str | Path | None], flag: str = "--out") -> None:
    """Raises `UserError` for a target that is one of the files that it is made of, or their folder.

    Sources that are not there are passed over.
    """
    if not out.exists():
        return
    there = [Path(source) for source in filter(None, sources) if Path(source).exists()]
    if any(out.samefile(place) for path in there for place in (path, path.parent)):
        raise UserError(f"{out} is what the command reads; expected another. Give another {flag}.")


@contextlib.contextmanager
def stage(out: Path, *, folder: bool, overwrite: bool = False) -> Iterator[Path]:
    """Yields a path in a hidden folder next to `out`; it replaces `out` at the end.

    If the block raises, nothing is left and `out` stays as it was; a kill leaves the hidden folder,
    which the next export to `out` removes. Raises `UserError` as `check_target` does, `WriteError`
    for a full disk or a folder that cannot be written.
    """
    check_target(out, folder=folder, overwrite=overwrite)
    aside = out.parent / f".{out.name}.{os.uname().nodename}-{os.getpid()}.partial"
    with writing(out):
        make_folder(out.parent)
        _sweep(out)
        aside.mkdir()
        try:
            yield aside / out.name
            _sync(aside)
            check_target(out, folder=folder, overwrite=overwrite)  # hours may have passed
            _replace(aside / out.name, out)
            _sync_one(out.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _sweep(out: Path) -> None:
    """Removes hidden folders of killed exports on this machine."""
    partial = re.escape(f".{out.name}.{os.uname().nodename}-") + r"(\d+)\.partial"
    for left in out.parent.iterdir():
        match = re.fullmatch(partial, left.name)
        if match and (int(match[1]) == os.getpid() or not _is_alive(int(match[1]))):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Formats JSON as Transformers writes its configs: indented UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync_one(path)


def _replace(new: Path, out: Path) -> None:
    """Replaces `out` by `new`; an existing folder is exchanged with it."""
    if not (new.is_dir() and out.exists()):
        os.replace(new, out)
        return
    # No rename replaces a folder that is not empty. Linux can exchange two names at once.
    with contextlib.suppress(OSError, AttributeError):
        exchange = ctypes.CDLL(None, use_errno=True).renameat2
        if not exchange(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(out), _EXCHANGE):
            return
    # Elsewhere neither exists for a moment; the old folder comes back if the second rename fails.
    old = new.with_name(f"{new.name}.old")
    os.rename(out, old)
    try:
        os.rename(new, out)
    except BaseException:
        os.rename(old, out)
        raise
