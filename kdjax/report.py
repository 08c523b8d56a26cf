"""`python -m kdjax.report`: the command `kdjax report` by its old name."""

import sys

from kdjax.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
