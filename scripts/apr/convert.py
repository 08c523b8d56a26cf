"""Converts a GGUF file to an .apr file, or back.

    python -m scripts.apr.convert model.gguf model.apr
    python -m scripts.apr.convert model.apr model.gguf

A GGUF file that became an .apr file comes back byte for byte.
"""

import argparse
import sys
from collections.abc import Sequence

from kdjax.errors import reporting
from kdjax.export.apr import convert


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 after one line on what the files have wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="the file to read, .gguf or .apr")
    parser.add_argument("target", help="the file to write, .apr or .gguf")
    args = parser.parse_args(argv)
    convert(args.source, args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
