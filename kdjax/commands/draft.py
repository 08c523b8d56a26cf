"""Trains the block of a model that drafts for it (MTP, `nextn`), towards what the model says.

    kdjax draft model-q4_k_m.gguf --data=answers.jsonl --out=model-drafting.gguf
    llama-server -m model-drafting.gguf --spec-type draft-mtp --spec-draft-n-max 3

MODEL is the file that is served, as of `kdjax evaluate`, packed unless it says otherwise: its
layers stay as they are, bit for bit, and the block is trained beside them by total variation, which
is the share of its drafts that the model rejects. A model whose file has no block begins a new one
with --new. A sixteenth of the text's rows are kept apart, to judge by.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax

from kdjax.commands.parsing import Parser, log_to_terminal
from kdjax.device import runtime, sharding
from kdjax.errors import FINISHED, UserError, reporting
from kdjax.evaluation.heldout import read_text
from kdjax.evaluation.target import open_target
from kdjax.export import export_gguf
from kdjax.formats.blocks import ENCODED
from kdjax.losses.divergences import total_variation
from kdjax.losses.kd import KDLoss
from kdjax.models.nextn import pack_block, take_block
from kdjax.training.step import make_step

_HELD_OUT = 16  # of so many rows one is judged by
_SECONDS = 10.0  # between two lines of progress


def _parser() -> Parser:
    parser = Parser("draft", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="the served file, with @FORM (default: @packed)")
    add("--data", required=True, metavar="PATHS", help="text, best what MODEL itself answered")
    add("--out", required=True, type=Path, metavar="FILE", help="the GGUF file to make")
    add("--steps", type=int, default=1000, help="optimizer steps (1000)")
    add("--batch-size", type=int, default=8, help="rows a step (8)")
    add("--seq-len", type=int, default=512, help="positions a row (512)")
    add("--rows", type=int, default=100_000, help="rows of the text, at most")
    add("--learning-rate", type=float, default=3e-4, help="at its peak (3e-4)")
    add("--type", default="q8_0", help="block type of the block's matrices (q8_0)")
    add("--new", action="store_true", help="begin a new block, drawn by --seed")
    add("--seed", type=int, default=0, help="of the order of rows, and of a new block")
    return parser


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    if min(args.steps, args.rows, args.batch_size) < 1 or args.seq_len < 2 or args.seed < 0:
        raise UserError(
            "--steps, --rows and --batch-size must be 1 or more, --seq-len 2 or more, --seed 0 or "
            "more."
        )
    if args.type.upper() not in ENCODED:
        raise UserError(f"found --type={args.type}; expected one of {', '.join(ENCODED)}.")
    if args.out.exists():
        raise UserError(f"{args.out} exists; expected no file there. Name another.")
    runtime.configure()
    log_to_terminal()
    name = args.model if "@" in args.model else f"{args.model}@packed"
    target = open_target(name)
    text = read_text(args.data, target.checkpoint.tokenizer, rows=args.rows, seq_len=args.seq_len)
    (whole,) = text.batches(len(text.rows))
    columns = ("tokens", "labels", "segment_ids", "positions", "weights")
    rows = {column: np.asarray(whole[column]) for column in columns}
    held = np.arange(len(text.rows)) % _HELD_OUT == _HELD_OUT - 1
    if not held.any():
        raise UserError(
            f"{args.data}: found {len(held)} rows of {args.seq_len} positions; expected "
            f"{_HELD_OUT} or more. Give more text, or lower --seq-len."
        )
    segments = int(rows["segment_ids"].max())
    mesh = sharding.make_mesh(1, 1, 1, jax.local_devices()[:1])
    model = target.load(mesh, max_segments=max(segments, 1))
    block = take_block(model, seed=args.seed if args.new else None)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, min(20, args.steps), max(args.steps, 21), args.learning_rate / 10
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    with model.precision():
        step = make_step(block, model, KDLoss(total_variation), optimizer)
        state = step.init(block.params)

        def judge() -> str:
            batches = _cut({name: x[held] for name, x in rows.items()}, args.batch_size)
            figures = step.evaluate(state, model.params, batches)
            return f"{figures['acceptance']:.4f} of its drafts accepted at T = 1"

        print(f"before: {judge()}, {held.sum()} rows kept apart", flush=True)
        start = told = time.monotonic()
        batches = _draw({name: x[~held] for name, x in rows.items()}, args.batch_size, args.seed)
        for number, batch in enumerate(itertools.islice(batches, args.steps), 1):
            state, metrics = step(state, model.params, batch)
            if time.monotonic() - told > _SECONDS:
                told, rejected = time.monotonic(), metrics.means()["divergence"]
                print(f"step {number}, {told - start:.0f} s: rejects {rejected:.4f}", flush=True)
        print(f"after {args.steps} steps: {judge()}", flush=True)
    trained = block.replace(params=step.see(state))
    export_gguf(pack_block(trained, args.type.upper()), args.out)
    print(f"{args.out}: {model.source} with this block")
    return FINISHED


def _cut(rows: dict[str, np.ndarray], size: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of all rows in order; the last is filled with rows that count nothing."""
    for start in range(0, len(rows["tokens"]), size):
        part = {name: x[start : start + size] for name, x in rows.items()}
        more = size - len(part["tokens"])
        yield {name: np.pad(x, ((0, more), (0, 0))) for name, x in part.items()}


def _draw(rows: dict[str, np.ndarray], size: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of shuffled rows, without end."""
    rng, count = np.random.default_rng(seed), len(rows["tokens"])
    waiting = np.zeros((0,), np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, rng.permutation(count)])
        chosen, waiting = waiting[:size], waiting[size:]
        yield {name: x[chosen] for name, x in rows.items()}
