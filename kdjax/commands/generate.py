"""Text from a model.

    python -m kdjax.generate model.gguf@q4k --prompt='def fibonacci(n):' --max-tokens=64

Exit status: 0 done, 2 bad input.
"""

import argparse
import sys

import jax

from kdjax.device import runtime, sharding
from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.models.checkpoint import Form, open_checkpoint
from kdjax.models.decoding import Sampling
from kdjax.models.model import load_model


class Stream:
    """Prints the text of one completion as it grows, whole characters only."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, number: int, text: str) -> None:
        """For `on_text`."""
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # an id may end within a character
        if text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kdjax.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="PATH[@dequant|q4k|fp8|fp8_precise[:DTYPE]]")
    parser.add_argument("--prompt", required=True, help="- reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="as a user's turn of the template")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        runtime.configure()
        form = Form.parse(args.model)
        checkpoint = open_checkpoint(form.path)
        tokenizer = checkpoint.tokenizer
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        if args.chat:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.render(turns, answer_next=True)
        ends = {tokenizer.end_of_text_id, tokenizer.eos_id}
        sampling = Sampling(
            args.max_tokens,
            args.temperature,
            args.top_p,
            args.top_k,
            tuple(sorted(ends)),
            tuple(args.stop),
            args.seed,
        )
        sampling.check()
        mesh = sharding.make_mesh(1, 1, 1, jax.local_devices()[:1])
        placement = Placement.on(mesh)
        model = load_model(checkpoint, weights=form.weights, dtype=form.dtype, placement=placement)
        model.generate([text], sampling, on_text=Stream())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
