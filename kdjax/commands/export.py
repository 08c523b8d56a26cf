"""Writes the student of a checkpoint as files that others load.

    kdjax export runs/a --format=hf --out=exported/student
    kdjax export runs/a --format=gguf --type=q4_k_m --out=student-q4_k_m.gguf

What was written is read back and compared before it takes its place: after an error nothing is left
of it, and what was at --out before still is.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kdjax.commands.parsing import Parser
from kdjax.device import runtime
from kdjax.errors import CHECK_FAILED, FINISHED, MissingFileError, UserError, reporting
from kdjax.export.card import model_card
from kdjax.export.check import Report
from kdjax.export.formats import GGUF_TYPES, export_apr, export_gguf, export_hf
from kdjax.export.staging import check_target
from kdjax.export.vocabulary import open_source
from kdjax.formats.saved import saved_params, saved_run, saved_steps
from kdjax.models.arch import ArchSpec, spec_from_table
from kdjax.models.checkpoint import run_sources
from kdjax.models.decoder import Params

_RECEIPT = "receipt.json"


def read_params(workdir: Path, step: int) -> Params:
    """The student's parameters at a saved step: a nested dict of float32 arrays on the host."""
    params: Params = {}
    for name, array in saved_params(workdir, step):
        *path, last = name.split("/")
        node = params
        for key in path:
            node = node.setdefault(key, {})
        node[last] = array
    return params


def read_receipt(workdir: Path) -> dict[str, Any]:
    """The run's `receipt.json`, empty if there is none; raises `UserError` if it is no JSON."""
    path = workdir / _RECEIPT
    if not path.is_file():
        return {}
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: no JSON ({error}). Restore it, or move it away.") from error
    return receipt if isinstance(receipt, dict) else {}


def choose_step(workdir: Path, asked: int | None) -> int:
    """The step to export, the newest by default; raises `UserError` if it is not there."""
    if not workdir.is_dir():
        raise MissingFileError(f"{workdir}: no such folder; expected the --workdir of a run.")
    steps = saved_steps(workdir)
    if not steps:
        raise UserError(
            f"{workdir} holds no checkpoint; expected some under {workdir}/checkpoints. Name the "
            "--workdir of a run that has saved."
        )
    if asked is not None and asked not in steps:
        raise UserError(
            f"found no step {asked} in {workdir}; expected one of {', '.join(map(str, steps))}."
        )
    return steps[-1] if asked is None else asked


def export(args: argparse.Namespace) -> Report:
    """Reads the checkpoint and writes it as asked."""
    workdir, out = Path(args.workdir), Path(args.out)
    check_target(out, folder=args.format == "hf", overwrite=args.overwrite)
    step = choose_step(workdir, args.step)
    receipt = read_receipt(workdir)
    source = open_source(*run_sources(workdir, args.student or ""))
    params = read_params(workdir, step)
    # The run may have tied a head that the student's file stores twice, or untied one.
    spec: ArchSpec = dataclasses.replace(spec_from_table(source.table), tied="head" not in params)
    how: dict[str, Any] = {"dtype": args.type, "overwrite": args.overwrite}
    print(f"{workdir} step {step}: {args.format} as {args.type} to {out}", file=sys.stderr)
    if args.format == "gguf":
        return export_gguf(params, spec, source, out, **how)
    if args.format == "apr":
        return export_apr(params, spec, source, out, **how)
    identity = saved_run(workdir, step).get("identity")
    card = model_card(spec, name=out.name, step=step, receipt=receipt, identity=identity)
    return export_hf(params, spec, source, out, card=card, **how)


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
    report = export(args)
    print(f"{args.out}: {report}")
    return FINISHED
