"""Trains a model's drafting block (MTP, `nextn`) towards the model's predictions.

    kdjax draft model-q4_k_m.gguf --data=answers.jsonl --out=model-drafting.gguf
    llama-server -m model-drafting.gguf --spec-type draft-mtp --spec-draft-n-max 3

MODEL is the served file, as for `kdjax evaluate`, packed by default. Its layers stay as they are,
bit for bit. (Rates of delta layers are stored as logarithms; they stay so if they were bfloat16, as
in published models, else they may change in the last bit.) The block is trained by total variation,
which is the share of its drafts that the model rejects. For a model without a block --new begins
one. It is a run of `kdjax train` with student.block: the same command resumes one that was stopped,
and --config.FIELD=VALUE sets any other field.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import jax

from kdjax.commands.export import read_model
from kdjax.commands.parsing import Parser, RunCommand, add_cluster_flags, log_to_terminal, override
from kdjax.commands.train import ENDS, carry_out
from kdjax.config import NEW, OWN_BLOCK, SELF, Config, validate
from kdjax.errors import FINISHED, UserError, reporting
from kdjax.export import export_gguf
from kdjax.export.staging import check_target
from kdjax.formats.blocks import ENCODED
from kdjax.formats.files import make_place
from kdjax.formats.saved import read_receipt
from kdjax.models.checkpoint import ModelArgument, open_step
from kdjax.models.nextn import pack_block, take_block


def _parser() -> Parser:
    parser = Parser("draft", __doc__, *ENDS)
    add = parser.add_argument
    add("model", metavar="MODEL", help="the served file, with @FORM (default: @packed)")
    add("--data", required=True, metavar="PATHS", help="text, preferably MODEL's answers")
    add("--out", required=True, type=Path, metavar="FILE", help="the GGUF file to make")
    text = "for checkpoints, metrics and the report; by default FILE with .run in place of .gguf"
    add("--workdir", type=Path, help=text)
    add("--steps", type=int, default=1000, help="optimizer steps (%(default)s)")
    add("--batch-size", type=int, default=8, help="rows a step (%(default)s)")
    add("--seq-len", type=int, default=512, help="positions a row (%(default)s)")
    add("--learning-rate", type=float, default=3e-4, help="at its peak (%(default)s)")
    add("--type", default="q8_0", help="block type of the block's matrices (%(default)s)")
    add("--new", action="store_true", help="begin a new block, drawn by --seed")
    add("--seed", type=int, default=0, help="of the order of rows, and of a new block")
    add("--overwrite", action="store_true", help="replace --out if it is there")
    add("--plan", action="store_true", help="as `kdjax plan`: train nothing")
    add_cluster_flags(parser)
    return parser


def _make_config(args: argparse.Namespace) -> Config:
    """Makes the run's config: the model's layers teach the block."""
    form, config = ModelArgument.parse(args.model), Config()
    config.teacher.path, config.student.path = SELF, form.path
    config.teacher.weights = form.weights if args.model != form.path else "packed"
    config.teacher.param_dtype = config.train.compute_dtype = form.dtype
    config.student.block = NEW if args.new else OWN_BLOCK
    config.data.train, config.data.seq_len = args.data, args.seq_len
    config.data.heldout_fraction = 1 / 16
    config.loss.divergence, config.loss.temperature, config.loss.alpha = "total_variation", 1.0, 0.0
    config.optim.learning_rate = args.learning_rate
    config.optim.final_learning_rate = args.learning_rate / 10
    config.optim.warmup_steps = max(0, min(20, args.steps - 1))
    config.train.steps, config.train.batch_size = args.steps, args.batch_size
    config.train.seed = args.seed
    return config


def _parse(argv: Sequence[str] | None) -> RunCommand:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.type.upper() not in ENCODED:
        raise UserError(f"found --type={args.type}; expected one of {', '.join(ENCODED)}.")
    check_target(args.out, folder=False, overwrite=args.overwrite)
    args.workdir = args.workdir or args.out.with_suffix(".run")
    config = override(_make_config(args), rest, parser)
    validate(config)
    return RunCommand(args, config, "draft", {})


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    log_to_terminal()
    run = _parse(argv)
    if not run.options.plan:
        make_place(run.options.out)
    status = carry_out(run)
    if status != FINISHED or run.options.plan or jax.process_index() != 0:
        return status
    _write(run.options)
    return FINISHED


def _write(args: argparse.Namespace) -> None:
    """Writes the model with its trained block, and prints the drafts accepted before and after."""
    checkpoint = open_step(args.workdir)
    block = take_block(read_model(checkpoint))
    export_gguf(pack_block(block, args.type.upper()), args.out, overwrite=args.overwrite)
    held_out = (read_receipt(args.workdir) or {}).get("held_out", {})
    shares = [held_out.get(which, {}).get("acceptance") for which in ("first", "final")]
    if None not in shares:
        print("of its drafts accepted at T = 1: {:.4f} before, {:.4f} after".format(*shares))
    print(f"{args.out}: {checkpoint}")
    print(f"next:\n  kdjax generate {shlex.quote(str(args.out))} --draft=own --prompt='def '")
