"""Which text serves `kdjax shrink` best: one model at one size from each, judged on other texts.

    python -m scripts.bench.texts model.gguf --judged=code=code.jsonl,prose=prose.txt \
        --texts='installed=python:jax,flax;own=own:4096;both=own:4096,python:jax,flax' \
        --like=q2_k --steps=200 --out=runs/texts

For each of `--texts`, a name and what `kdjax shrink --text` takes, the command runs twice, with
`--no-train` and with `--steps`, and the KL and agreement of both files with the model are measured
on each of `--judged`, texts that no default has. A line of OUT/results.jsonl is one file; a later
call goes on with those that are not there. The model's own writing is made once for all of them.
Further flags are the command's, such as `--batch-size=16`. No arm begins that `--limit` seconds
leave no time for. Exit status: 0 done, 2 bad input.
"""

import argparse
import functools
import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kdjax
from kdjax.commands import shrink
from kdjax.data.pipeline import eval_batches
from kdjax.errors import FINISHED, UserError, reporting
from kdjax.evaluation.costs import Comparison
from kdjax.models.model import Model
from scripts.bench.arms import read_beside, run_arms

_OWN = "own-*"  # files of a model's own writing in a work folder


class Arm(NamedTuple):
    """A text, and whether the file is trained."""

    name: str
    text: str
    work: str  # name of the work folder
    steps: int  # 0: not trained
    seconds: float = 0.0


class Bench:
    """The model, the texts that judge, and files made from the texts that are judged."""

    def __init__(self, args: argparse.Namespace, more: list[str]):
        self.args, self.more = args, more

    def list_arms(self) -> Iterator[Arm]:
        """Untrained files first, then trained ones."""
        for steps in filter(None, (-1, self.args.steps)):
            for part in self.args.texts.split(";"):
                name, _, text = part.partition("=")
                how = f"{steps} steps" if steps > 0 else "untrained"
                yield Arm(f"{name} {how}", text, name, max(steps, 0))

    @functools.cached_property
    def model(self) -> Model:
        """The model in float32."""
        return kdjax.load(self.args.model, dtype="float32")

    @functools.cached_property
    def judges(self) -> dict[str, Comparison]:
        """A comparison on each of the texts that judge."""
        assert self.model.checkpoint is not None
        args, tokenizer = self.args, self.model.checkpoint.tokenizer
        texts = read_beside(args.judged, tokenizer, rows=args.judged_rows, seq_len=args.seq_len)
        size = min(4, args.judged_rows)
        return {
            name: Comparison(self.model, list(eval_batches(rows, batch_size=size, limit=None)))
            for name, rows in texts.items()
        }

    def run(self, arm: Arm) -> dict[str, Any]:
        """Makes the file and judges it."""
        args, begun = self.args, time.monotonic()
        out, work = args.out / f"{arm.name.replace(' ', '-')}.gguf", args.out / f"{arm.work}.shrink"
        work.mkdir(parents=True, exist_ok=True)
        for file in args.out.glob(f"*.shrink/{_OWN}") if "own" in arm.text else ():
            if not (work / file.name).exists():
                shutil.copy(file, work)
        flags = [args.model, f"--out={out}", f"--work={work}", f"--text={arm.text}", "--overwrite"]
        flags += [f"--like={args.like}", f"--seq-len={args.seq_len}", *self.more]
        status = shrink.main([*flags, f"--steps={arm.steps}" if arm.steps else "--no-train"])
        if status != FINISHED:
            raise UserError(f"kdjax shrink ended with status {status}.")
        found: dict[str, Any] = {"text": arm.text, "steps": arm.steps, "bytes": out.stat().st_size}
        found["shrink_seconds"] = time.monotonic() - begun
        params = kdjax.load(out, dtype="float32").params
        for name, judge in self.judges.items():
            started = judge.start(params)
            batches = [figures.kl for figures in judge.read_batches(started)]
            error = float(np.std(batches, ddof=1) / math.sqrt(len(batches)))
            found[name] = judge.read(started)._asdict() | {"kl_error": error, "batches": batches}
        found["mean_kl"] = float(np.mean([found[name]["kl"] for name in self.judges]))
        return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--texts", required=True, metavar="NAME=TEXT;...")
    parser.add_argument("--judged", required=True, metavar="NAME=PATH,...")
    parser.add_argument("--judged-rows", type=int, default=32)
    parser.add_argument("--like", default="q2_k")
    parser.add_argument("--steps", type=int, default=200, help="0: train nothing")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("runs/texts"))
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of this call")
    return parser


@reporting
def main(argv: list[str] | None = None) -> int:
    """Makes the files that are not there; returns the exit status."""
    begun = time.monotonic()
    args, more = _parser().parse_known_args(argv)
    bench = Bench(args, more)
    run_arms(bench.list_arms(), bench.run, args.out, until=begun + args.limit, around=30.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
