"""Errors that a command reports in one line, and the exit statuses of all commands.

Each message says what was found, what was expected, and what to do. An error that a user, a disk or
a network has caused needs no traceback: `reporting` prints `error: ...` instead.
"""

import difflib
import errno
import functools
import glob
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec

FINISHED, UNFORESEEN, BAD_INPUT, SMOKE_FAILED, NOT_FINITE, CHECK_FAILED = 0, 1, 2, 3, 4, 5
COLLAPSED = 6
INFERENCE_FAILED, BROKEN = 8, 9
PEER_LOST = 69  # EX_UNAVAILABLE of sysexits.h
NOT_WRITTEN = 74  # EX_IOERR of sysexits.h
INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes
QUIT = 130  # what a shell reports for SIGINT

# Exit statuses of all commands and what they mean; `--help` and docs/commands.md show these lines.
STATUSES = {
    FINISHED: "finished; `kdjax COMMAND --help` says what that means",
    UNFORESEEN: "an error that nobody foresaw: its traceback is a bug of kdjax to report",
    BAD_INPUT: "bad input, or a file that cannot be read or written; the message says what to do",
    SMOKE_FAILED: "a smoke run failed",
    NOT_FINITE: "loss or gradient not finite; the batch is kept, the checkpoint is from before it",
    CHECK_FAILED: "a file did not read back as it was written, or a receipt does not hold",
    COLLAPSED: "the student's own answers collapsed, or training made it worse; the evidence is "
    "printed, checkpoints are kept",
    INFERENCE_FAILED: "the model does not run; its pass@k is 0",
    BROKEN: "the model runs and is broken; the evidence is printed",
    PEER_LOST: "another process of the run died: start all again, and the run goes on",
    NOT_WRITTEN: "a disk is full or takes no writing; what was saved before is kept",
    INTERRUPTED: "stopped by a signal and saved: the same command goes on from there",
    QUIT: "stopped at once; what was saved before is kept",
}
# Advice for a model that a GGUF file cannot describe.
AS_FOLDER = "Export with export_hf (--format=hf)"


class KdjaxError(Exception):
    """An error whose message is all that a user needs; `status` is the command's exit status."""

    status = UNFORESEEN


class UserError(KdjaxError, ValueError):
    """Bad input: a file, a field or a combination of them that cannot work."""

    status = BAD_INPUT


class MissingFileError(UserError, FileNotFoundError):
    """A path that does not exist; the message names the file that fits and how to get it."""

    def __str__(self) -> str:  # FileNotFoundError prints an errno tuple
        return str(self.args[0])


# Remedies for errors of the system that only writing raises.
_REMEDIES = {
    errno.ENOSPC: "Free some space on its disk",
    errno.EDQUOT: "Free some of your quota there",
    errno.EFBIG: "Raise the limit of a file's size (`ulimit -f`)",
    errno.EROFS: "Make that disk writable, or name a folder on another",
    errno.EIO: "Look at that disk, which fails (`dmesg` says how)",
}
_NO_ROOM = "RESOURCE_EXHAUSTED"
_PERMISSION = "Make it writable, or name a folder of yours"


def check_type(name: str, value: Any, kind: type, wanted: str) -> None:
    """Raises `UserError`, with the type of what was found, for an argument that is no `kind`."""
    if not isinstance(value, kind):
        raise UserError(f"found {type(value).__name__} as the {name}; expected {wanted}.")


class WriteError(UserError, OSError):
    """A file could not be written: a full disk, a quota, a missing permission, a failing disk."""

    status = NOT_WRITTEN

    def __str__(self) -> str:  # as in MissingFileError
        return str(self.args[0])

    @classmethod
    def of(cls, path: Path, error: OSError, elsewhere: str = "") -> "WriteError | None":
        """Makes the error for `path`; None if the system's error does not concern the disk.

        `elsewhere` is a setting that names another folder: `--config.data.cache_dir=DIR`.
        """
        remedy = _REMEDIES.get(error.errno or 0)
        if isinstance(error, PermissionError):
            remedy = _PERMISSION
        if remedy is None:
            return None
        said = os.strerror(error.errno or 0)
        text = f"{path} cannot be written: {said}. {remedy}, and run the same command again."
        new = cls(text + (elsewhere and f" Another folder: {elsewhere}."))
        new.errno = error.errno
        return new


class CheckError(UserError):
    """Something on the disk differs from what was written, or from what a receipt says."""

    status = CHECK_FAILED


def suggest(wrong: str, names: Iterable[str], prefix: str = "") -> str:
    """Suggests the name that begins with `wrong`, or is nearest: ` Did you mean X?`; "" if none."""
    names = list(names)
    begun = [name for name in names if wrong and name.startswith(wrong)]
    near = begun or difflib.get_close_matches(wrong, names, n=1)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def suggest_path(path: str | Path) -> str:
    """Suggests an existing path that differs from `path` in one name: ` Did you mean X?`, or "".

    That name is the first one that is missing. `path` may be a file, a folder or a pattern.
    """
    wrong = Path(path)
    missing = [part for part in (wrong, *wrong.parents) if not os.path.lexists(part)]
    if not missing or glob.has_magic((first := missing[-1]).name):
        return ""
    try:
        names = [entry.name for entry in first.parent.iterdir()]
    except OSError:
        return ""
    for name in difflib.get_close_matches(first.name, names):
        near = first.parent / name / wrong.relative_to(first)
        if any(True for _ in glob.iglob(str(near), recursive=True)):
            return f" Did you mean {near}?"
    return ""


def _lacks_memory(error: BaseException) -> bool:
    """Whether device or host ran out of memory; XLA's class has another name in each jaxlib."""
    on_device = isinstance(error, RuntimeError) and str(error).startswith(_NO_ROOM)
    return on_device or isinstance(error, MemoryError)


def status_of(error: BaseException) -> int:
    """Exit status of a command that this error ends."""
    if isinstance(error, KdjaxError):
        return error.status
    if _lacks_memory(error):
        return BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return QUIT
    if isinstance(error, OSError):
        return NOT_WRITTEN if error.errno in _REMEDIES else BAD_INPUT
    return UNFORESEEN


def describe_error(error: BaseException) -> str:
    """The error's class and message; for a full memory, its message and the settings to lower."""
    if not _lacks_memory(error):
        return f"{type(error).__name__}: {error}"
    whose = "this machine's" if isinstance(error, MemoryError) else "the device's"
    said = str(error).removeprefix(f"{_NO_ROOM}: ").split("\n")[0].rstrip(".") or "no room"
    return (
        f"{whose} memory: {said}. Take fewer rows at a time (--batch-size, --microbatches, "
        "train.microbatches), shorter ones (--max-tokens, --seq-len, data.seq_len), or a model's "
        "weights as its file has them (@packed); `kdjax plan` says what a training run needs."
    )


def print_error(error: BaseException) -> None:
    """Prints the message to stderr, without a traceback."""
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, KdjaxError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if _lacks_memory(error):
        text = describe_error(error)
    print(f"error: {text or type(error).__name__}", file=sys.stderr)


_P = ParamSpec("_P")


def reporting(main: Callable[_P, int]) -> Callable[_P, int]:
    """Wraps a command: an expected error becomes a line on stderr and an exit status."""

    @functools.wraps(main)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> int:
        # Python's warnings about code without a file: code of a model or of a corpus.
        warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")
        try:
            return main(*args, **kwargs)
        except Exception as error:
            if not (isinstance(error, KdjaxError | OSError) or _lacks_memory(error)):
                raise
            print_error(error)
            return status_of(error)
        except KeyboardInterrupt:
            print(STATUSES[QUIT], file=sys.stderr)
            return QUIT

    return run
