"""Writes the student of a checkpoint as files that others load.

    kdjax export runs/a --format=hf --out=exported/student
    kdjax export runs/a --format=gguf --type=q4_k_m --out=student-q4_k_m.gguf

What was written is read back and compared before it takes its place: after an error nothing is left
of it, and what was at --out before still is.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from kdjax.commands.parsing import Parser
from kdjax.device import runtime
from kdjax.errors import CHECK_FAILED, FINISHED, UserError, reporting
from kdjax.export.card import model_card
from kdjax.export.check import ExportSummary
from kdjax.export.formats import GGUF_TYPES, export_apr, export_gguf, export_hf
from kdjax.export.staging import check_target
from kdjax.formats.saved import RECEIPT, SavedTable, read_receipt, saved_run
from kdjax.models.checkpoint import Checkpoint, open_step
from kdjax.models.decoder import Compute, functional
from kdjax.models.model import Model


def read_model(checkpoint: Checkpoint) -> Model:
    """A saved step with its parameters on the host, as they were saved: no device is used."""
    assert isinstance(checkpoint.table, SavedTable)
    functions, _ = functional(checkpoint.spec, Compute())
    params, rows = checkpoint.table.read_tree(), checkpoint.spec.vocab_size
    return Model(functions, params, rows, spec=checkpoint.spec, checkpoint=checkpoint)


def _read_receipt(workdir: Path) -> dict[str, Any]:
    try:
        return read_receipt(workdir) or {}
    except ValueError as error:
        path = workdir / RECEIPT
        raise UserError(f"{path}: no JSON ({error}). Restore it, or move it away.") from error


def export(args: argparse.Namespace) -> ExportSummary:
    """Reads the checkpoint and writes it as asked."""
    workdir, out = Path(args.workdir), Path(args.out)
    check_target(out, folder=args.format == "hf", overwrite=args.overwrite)
    receipt = _read_receipt(workdir)
    checkpoint = open_step(workdir, args.step, student=args.student or "")
    assert checkpoint.saved is not None
    step, model = checkpoint.saved.step, read_model(checkpoint)
    options: dict[str, Any] = {"dtype": args.type, "overwrite": args.overwrite}
    print(f"{workdir} step {step}: {args.format} as {args.type} to {out}", file=sys.stderr)
    if args.format == "gguf":
        return export_gguf(model, out, **options)
    if args.format == "apr":
        return export_apr(model, out, **options)
    identity = saved_run(workdir, step).get("identity")
    card = model_card(checkpoint.spec, name=out.name, step=step, receipt=receipt, identity=identity)
    return export_hf(model, out, card=card, **options)


def _parser() -> Parser:
    parser = Parser("export", __doc__, CHECK_FAILED)
    parser.add_argument("workdir", metavar="WORKDIR", help="of a run that has saved")
    text = "hf: a Hugging Face folder; gguf: for llama.cpp; apr"
    parser.add_argument("--format", required=True, choices=("hf", "gguf", "apr"), help=text)
    parser.add_argument("--out", required=True, help="folder (hf) or file to make")
    text = "f32, the default, keeps every bit; hf: f32, f16, bf16; apr: those, q4_k_m and q6_k"
    parser.add_argument("--type", default="f32", choices=GGUF_TYPES, help=text)
    parser.add_argument("--step", type=int, help="a saved step; the newest by default")
    text = "the file or folder the run started from, if receipt.json does not say or it has moved"
    parser.add_argument("--student", metavar="PATH", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it is there")
    return parser


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    runtime.configure()
    print(f"{args.out}: {export(args)}")
    return FINISHED
