"""Writes a GGUF file of random weights in the shape of a real model.

    python -m scripts.bench.random_gguf --shape=7b --out=/tmp/teacher.gguf

The 7B file, 4.7 GB with the block types of Q4_K_M, takes about 20 seconds.
"""

import argparse
import sys
from collections.abc import Sequence

from kdjax.errors import reporting
from scripts.bench.synthetic import RECIPES, SHAPES, write_random_gguf


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 after one line on what the arguments have wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", required=True, help="the file to write")
    parser.add_argument("--recipe", choices=RECIPES, default="q4_k_m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer-from", help="a GGUF file to copy the tokenizer from")
    parser.add_argument("--layer-order", choices=("published", "numeric"), default="published")
    parser.add_argument(
        "--untied", action="store_true", help="an output.weight of its own, as published files have"
    )
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    if args.untied:
        shape = shape._replace(tied=False)
    write_random_gguf(
        args.out,
        shape,
        seed=args.seed,
        recipe=args.recipe,
        layer_order=args.layer_order,
        tokenizer_from=args.tokenizer_from,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
