"""`kdjax COMMAND ...`: the console script, and the process of every command."""

import gc
import importlib
import io
import os
import signal
import sys
from typing import Any, TextIO

from kdjax import __version__
from kdjax.errors import (
    FINISHED,
    NOT_WRITTEN,
    QUIT,
    STATUSES,
    UserError,
    print_error,
    reporting,
    status_of,
    suggest,
)

COMMANDS = {
    "train": "train a student from a teacher, or from text alone",
    "plan": "list what a run would hold in device memory, and say whether it fits",
    "data": "show what a run trains on: counts of its text, and rows with what carries loss",
    "cache": "run a teacher once over the text and store what training needs of it",
    "evaluate": "measure a model: held-out text, a teacher, HumanEval, MBPP, its health",
    "lm_eval": "run lm-evaluation-harness with a model that kdjax reads",
    "generate": "write text with a model",
    "answers": "let a model answer prompts, or exercises and keep answers that pass their tests",
    "draft": "make a draft for a model: its file's block, a head, or a smaller model",
    "shrink": "make the best GGUF file of a size from a model",
    "imatrix": "measure which inputs of a model's matrices matter on a text",
    "export": "write a trained student, or any model, for Transformers, llama.cpp or as .apr",
    "push": "upload a student, or an exported folder or file, to the Hugging Face Hub",
    "report": "draw the results of runs: one HTML page, and PNG files",
    "verify": "recheck a run's receipt against the files that it names",
}

_HELP = """\
usage: kdjax COMMAND ...

Distils a large, quantized, frozen teacher into a small student.

commands:
{commands}

`kdjax COMMAND --help` says what each one needs. To try it without a download:

    kdjax train --config=demo

exit status, of all commands:
{statuses}"""


def help_text() -> str:
    """Text that `kdjax --help` prints."""
    commands = "\n".join(f"  {name:<9} {text}" for name, text in COMMANDS.items())
    statuses = "\n".join(f"  {status:>3}  {text}" for status, text in STATUSES.items())
    return _HELP.format(commands=commands, statuses=statuses)


def _unspellable(argument: str) -> UserError:
    """Makes the error for an argument with bytes that Python could not decode."""
    try:
        os.fsencode(argument).decode()
    except UnicodeError:
        return UserError(f"found {argument!r}; expected UTF-8: rename the file or folder.")
    return UserError(
        f"found {argument!r}, which is UTF-8, in a locale of {sys.getfilesystemencoding()}; "
        "expected one of UTF-8: set LC_ALL=C.UTF-8, or PYTHONUTF8=1."
    )


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names; returns the exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    for argument in rest:
        if argument != argument.encode(errors="ignore").decode():  # no output could name it
            raise _unspellable(argument)
    if name in COMMANDS:
        # NumPy and JAX print a Ctrl-C during their imports, and turn it into an ImportError.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            command = importlib.import_module(f"kdjax.commands.{name}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if not gc.isenabled():  # by `run`, for the imports
            gc.freeze()
            gc.enable()
        return command.main(rest)
    if name in ("-h", "--help"):
        print(help_text())
    elif name == "--version":
        print(f"kdjax {__version__}")
    else:
        hint = suggest(name, COMMANDS)
        raise UserError(f"{name}: no such command.{hint} `kdjax --help` lists them.")
    return FINISHED


def _hear_again(lost: "sys.UnraisableHookArgs") -> None:
    """Raises again a Ctrl-C that Python would only print, such as within JAX's callback of `gc`."""
    if lost.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # no thread: the callback may hold a lock
    else:
        sys.__unraisablehook__(lost)


class _Unbroken(io.FileIO):
    """An output whose reader may leave, as `head` does: what follows is written nowhere."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            return memoryview(data).nbytes


def _open_output(stream: TextIO | None, number: int) -> TextIO:
    """Opens an output of the process for any text, so that no print ends a command.

    None is an output that was closed (`>&-`): without the null device the next file that is opened
    would get its number.
    """
    if stream is None:
        return open(os.devnull, "w", errors="backslashreplace")
    file = _Unbroken(number, "wb", closefd=False)
    at_once = getattr(stream, "write_through", False)  # PYTHONUNBUFFERED, python -u
    lines = getattr(stream, "line_buffering", False)
    return io.TextIOWrapper(
        file if at_once else io.BufferedWriter(file),  # as Python does
        stream.encoding,
        errors="backslashreplace",
        line_buffering=lines,
        write_through=at_once,
    )


def run(*command: str) -> None:
    """Runs the process of `kdjax`, or of one command, such as `python -m kdjax.main` for `train`.

    SIGTERM acts as Ctrl-C until training handles signals itself, so that temporary files go.
    No garbage is looked for during imports, nor later among what they made, 200,000 objects that
    stay: of 4.8 s of a core before XLA begins with a run's step it took 0.8.
    """
    gc.disable()
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))  # takes its number
    sys.stdout, sys.stderr = _open_output(sys.stdout, 1), _open_output(sys.stderr, 2)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler)
    sys.unraisablehook = _hear_again
    # Transformers, used for tokenizers only, would advise every user to install PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    status = main([*command, *sys.argv[1:]])
    try:
        sys.stdout.flush()
    except OSError as error:  # Python would flush again, and print a traceback
        print_error(error)
        os._exit(status or status_of(error))
    # Does not wait for threads that hash or save, nor for a save that failed.
    if status in (QUIT, NOT_WRITTEN):
        os._exit(status)
    sys.exit(status)
