"""Errors that a user can cause and mend.

Each message says what was found, what was expected, and what to do. `main` prints it without a
traceback and exits with status 2.
"""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

# Exit statuses of `kdjax.commands.train`. 1 is Python's own, for an error that nobody foresaw.
FINISHED, BAD_INPUT, SMOKE_FAILED, NOT_FINITE, INTERRUPTED = 0, 2, 3, 4, 75
QUIT = 130  # by Ctrl-C, at once; what a shell reports for SIGINT

_P = ParamSpec("_P")


class UserError(ValueError):
    """Bad input: a file, a field or a combination of them that cannot work."""


class MissingFileError(UserError, FileNotFoundError):
    """A path that does not exist; the message names the file that fits and how to get it."""

    def __str__(self) -> str:  # FileNotFoundError would print an errno tuple
        return str(self.args[0])


def reporting(main: Callable[_P, int]) -> Callable[_P, int]:
    """A command's main, with a `UserError` as a line on stderr and the status `BAD_INPUT`."""

    @functools.wraps(main)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return BAD_INPUT

    return run
