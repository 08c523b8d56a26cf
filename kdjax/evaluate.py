"""`python -m kdjax.evaluate`: the command `kdjax evaluate` by its old name."""

import sys

from kdjax.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
