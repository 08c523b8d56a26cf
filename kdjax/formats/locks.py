"""Locks on folders, which the kernel releases when their holder dies, however it dies."""

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from kdjax.errors import UserError
from kdjax.formats.files import check_place, making, remove_leftovers, writing

_log = logging.getLogger("kdjax")

LOCK = ".lock"  # the name of a folder's lock file
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of a disk without locks


class LockedError(UserError):
    """Another process holds the lock; the message says which."""


@contextlib.contextmanager
def locking(path: Path, otherwise: str, what: Path | None = None) -> Iterator[bool]:
    """Holds the lock file `path` for the block, and removes it afterwards.

    Errors name `what`, by default the folder of `path`.

    Yields False where the disk has no locks. Raises `LockedError` if another process holds the
    lock, with its name and with `otherwise`, which says what to do instead of waiting.
    """
    descriptor = None
    while descriptor is None:
        descriptor, held = _try_lock(path, otherwise, what or path.parent)
    try:
        yield held
    finally:
        with contextlib.suppress(OSError):  # the folder may be gone, or no longer writable
            path.unlink()
        os.close(descriptor)


@contextlib.contextmanager
def holding(folder: Path, otherwise: str) -> Iterator[None]:
    """Makes the folder, locks it for the block, and removes what killed processes left there.

    Folders that were made here and have no file at the end are removed again.

    Raises `UserError` where a file has its name, `WriteError` where the disk refuses it, and
    `LockedError` as `locking` does.
    """
    with contextlib.ExitStack() as held:
        with writing(folder / LOCK):
            held.enter_context(making(folder))
            if held.enter_context(locking(folder / LOCK, otherwise)):
                remove_leftovers(folder)
        yield


@contextlib.contextmanager
def holding_file(path: Path, otherwise: str) -> Iterator[None]:
    """Makes the folder of a file, tries to write there, and locks the file for the block.

    Folders that were made here and have no file at the end are removed again. Raises `UserError`
    where `path` cannot be a file, `WriteError` where the disk refuses it, and `LockedError` as
    `locking` does.
    """
    with making(path.parent):
        check_place(path)
        with locking(path.with_name(f".{path.name}{LOCK}"), otherwise, path):
            yield


def _try_lock(path: Path, otherwise: str, what: Path) -> tuple[int | None, bool]:
    """Opens the file and tries to lock it; returns no file if its last holder has removed it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, descriptor):
            os.close(descriptor)
            return None, False
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        holder = f"process {os.getpid()} on {platform.node()}, since {since}"
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the name
            os.truncate(descriptor, 0)
            os.write(descriptor, holder.encode())
        return descriptor, True
    except BlockingIOError:
        holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
        os.close(descriptor)
        raise LockedError(
            f"{what} is in use by {holder}. Wait until it ends, stop it, or {otherwise}."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
        _log.warning(
            "%s: its disk has no locks (%s); two processes at once would damage what is there",
            what,
            error.strerror,
        )
        return descriptor, False


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
