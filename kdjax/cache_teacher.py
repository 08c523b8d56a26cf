"""`python -m kdjax.cache_teacher`: the command `kdjax cache` by its old name."""

import sys

from kdjax.commands.cache import command

if __name__ == "__main__":
    sys.exit(command())
