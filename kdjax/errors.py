"""Errors that a user can cause and mend.

Each message says what was found, what was expected, and what to do. `main` prints it without a
traceback and exits with status 2.
"""

# Exit statuses of `kdjax.main`. 1 is Python's own, for an error that nobody foresaw.
FINISHED, BAD_INPUT, SMOKE_FAILED, NOT_FINITE, INTERRUPTED = 0, 2, 3, 4, 75
QUIT = 130  # by Ctrl-C, at once; what a shell reports for SIGINT


class UserError(ValueError):
    """Bad input: a file, a field or a combination of them that cannot work."""


class MissingFileError(UserError, FileNotFoundError):
    """A path that does not exist; the message names the file that fits and how to get it."""

    def __str__(self) -> str:  # FileNotFoundError would print an errno tuple
        return str(self.args[0])
