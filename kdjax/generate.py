"""`python -m kdjax.generate`: the command `kdjax generate` by its old name."""

import sys

from kdjax.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
