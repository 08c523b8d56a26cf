"""`python -m kdjax.export`: the command `kdjax export` by its old name."""

import sys

from kdjax.commands.export import main

if __name__ == "__main__":
    sys.exit(main())
