"""Exports the student of a run, or another model, to files that other programs load.

    kdjax export runs/a --format=hf --out=exported/student
    kdjax export runs/a --format=gguf --type=q4_k_m --out=student-q4_k_m.gguf
    kdjax export runs/a --format=peft --out=exported/adapter
    kdjax export model.gguf --format=gguf --type=q2_k --imatrix=imatrix.gguf --out=model-q2_k.gguf
    kdjax export head.gguf --student=model.gguf --format=hf --out=head

A head that drafts (`kdjax draft --kind=dspark`, dflash, eagle3), of its run or its file, is written
alone: hf is a folder of speculators. A head's file needs its target, --student.

A model that no run has trained is rounded without training, a baseline for `student.quantize`. The
written file is read back and compared before it takes its place: after an error nothing is left of
it, and --out is unchanged.
"""

import argparse
import concurrent.futures
import sys
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import unflatten_dict

from kdjax.commands.parsing import Parser, log_to_terminal
from kdjax.device import runtime
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import CHECK_FAILED, FINISHED, UserError, reporting
from kdjax.export.adapters import export_gguf_adapter, export_peft
from kdjax.export.card import model_card
from kdjax.export.check import ExportSummary
from kdjax.export.formats import GGUF_TYPES, check_type, export_apr, export_gguf, export_hf
from kdjax.export.heads import export_head
from kdjax.export.staging import check_sources, check_suffix, check_target
from kdjax.formats.safetensors import is_model_folder
from kdjax.formats.saved import RECEIPT, SavedTable, find_head, read_receipt, saved_run
from kdjax.models.checkpoint import (
    CHECKPOINTS,
    NEWEST,
    Checkpoint,
    open_checkpoint,
    open_step,
)
from kdjax.models.decoder import Compute, functional
from kdjax.models.heads import is_head, load_head, load_saved_head
from kdjax.models.model import Model, load_model
from kdjax.models.weights import stack_blocks


def read_model(checkpoint: Checkpoint, *, masters: bool = False) -> Model:
    """Reads a model with its saved parameters on the host; uses no device.

    Matrices that were rounded in training are the blocks that the last step saw, unless `masters`.
    Matrices of a file, and a base with adapters or a drafting block, are as the file stores them.
    """
    if checkpoint.whole_step is None:
        on_host = Placement.on(make_mesh(1, 1, 1, jax.local_devices(backend="cpu")[:1]))
        return load_model(checkpoint, placement=on_host, weights="packed", dtype="float32")
    assert isinstance(checkpoint.table, SavedTable)
    functions, _ = functional(checkpoint.spec, Compute())
    table = checkpoint.table

    def read(name: str) -> Any:  # each once: masters are most of a step's bytes
        parts = () if masters else table.blocks(name)
        return stack_blocks(parts) if parts else table.array(name)

    # One is read while another is encoded; more would hold more masters at a time.
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        flat = dict(zip(table, pool.map(read, table), strict=True))
    params, rows = unflatten_dict(flat, sep="/"), checkpoint.spec.vocab_size
    return Model(functions, params, rows, spec=checkpoint.spec, checkpoint=checkpoint)


def _read_receipt(workdir: Path) -> dict[str, Any]:
    try:
        return read_receipt(workdir) or {}
    except ValueError as error:
        path = workdir / RECEIPT
        raise UserError(f"{path}: not JSON ({error}). Restore it, or move it away.") from error


def _open(args: argparse.Namespace) -> tuple[Checkpoint, dict[str, Any]]:
    """Finds a run's step, by --step or the best, and its receipt; or a model's file or folder."""
    path, student = Path(args.model), args.student or ""
    saved = (path / CHECKPOINTS).is_dir()
    unsaved = path.is_dir() and path.parent.name != CHECKPOINTS and not is_model_folder(path)
    if saved or unsaved:
        receipt = _read_receipt(path)  # first, since it names the student
        return open_step(path, args.step, student=student), receipt
    if args.step is not None or args.masters:
        raise UserError(
            f"{path}: found --{'masters' if args.masters else 'step'} with a model that is not a "
            "workdir; expected the workdir of a run. Leave it out."
        )
    checkpoint = open_checkpoint(path, student=student)
    return checkpoint, _read_receipt(checkpoint.saved.workdir) if checkpoint.saved else {}


def _open_head(args: argparse.Namespace) -> Model:
    """Opens a head's file or folder; raises `UserError` without its target."""
    if not args.student or args.step is not None:
        raise UserError(
            f"{args.model}: found a head; expected its target, --student=MODEL, and no --step."
        )
    return load_head(args.model, read_model(open_checkpoint(args.student)))


def _export_head(args: argparse.Namespace, head: Model) -> str:
    """Writes a head; raises `UserError` for a form that no program reads."""
    if args.format not in ("hf", "gguf") or args.imatrix or args.masters:
        raise UserError(
            f"{args.model}: found --format={args.format}"
            f"{' with --imatrix' * bool(args.imatrix)}{' with --masters' * args.masters} for a "
            "head that drafts; expected --format=gguf or hf, without them."
        )
    dtype, folder = args.type or "f16", args.format == "hf"
    export_head(head, args.out, dtype=dtype, folder=folder, overwrite=args.overwrite)
    return f"the head, {dtype}"


def export(args: argparse.Namespace) -> ExportSummary | str:
    """Reads the model and writes it in the requested format."""
    out = Path(args.out)
    check_target(out, folder=args.format in ("hf", "peft"), overwrite=args.overwrite)
    if is_head(Path(args.model)):
        check_sources(out, [args.model])
        return _export_head(args, _open_head(args))
    checkpoint, receipt = _open(args)
    check_sources(out, checkpoint.table.paths)
    if (saved := checkpoint.saved) and find_head(SavedTable(saved.workdir, saved.step).form):
        return _export_head(args, load_saved_head(read_model(checkpoint)))
    kept = isinstance(checkpoint.table, SavedTable) and checkpoint.table.form.get("quantize")
    if args.masters and not kept:
        raise UserError(
            f"{checkpoint}: found --masters with a student that was not rounded in training; "
            "expected one of student.quantize. Leave it out."
        )
    adapters = args.format in ("peft", "gguf-adapter")
    if adapters and (args.type not in (None, "f32") or args.imatrix):
        raise UserError(
            f"found --format={args.format} with --type or --imatrix; expected neither: adapters "
            "are float32. Leave them out."
        )
    if args.imatrix and args.format != "gguf":
        raise UserError("found --imatrix without --format=gguf; expected both: leave one out.")
    if args.type and not adapters:
        check_type(args.type, args.format, checkpoint.spec)
    if args.format == "apr":
        check_suffix(out, ".apr")
    model = read_model(checkpoint, masters=args.masters)
    if adapters:
        write = export_peft if args.format == "peft" else export_gguf_adapter
        return write(model, out, overwrite=args.overwrite)
    if checkpoint.whole_step is None and checkpoint.adapters is None:
        kept = "stored"
    as_kept = args.format == "gguf" and bool(kept) and not args.masters and not args.type
    dtype = None if as_kept else args.type or "f32"
    options: dict[str, Any] = {"dtype": dtype, "overwrite": args.overwrite}
    print(f"{checkpoint}: {args.format} as {dtype or kept} to {out}", file=sys.stderr)
    if args.format == "gguf":
        return export_gguf(model, out, imatrix=args.imatrix, **options)
    if args.format == "apr":
        return export_apr(model, out, **options)
    card = None
    if saved := checkpoint.saved:
        identity = saved_run(saved.workdir, saved.step).get("identity")
        known: dict[str, Any] = dict(step=saved.step, receipt=receipt, identity=identity)
        card = model_card(checkpoint.spec, name=out.name, **known)
    return export_hf(model, out, card=card, **options)


def _read_step(text: str) -> int | str:
    if text != NEWEST and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a saved step, or {NEWEST}")
    return text if text == NEWEST else int(text)


def _read_type(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("found ''; expected a type of numbers, or no --type")
    return text


def parser() -> Parser:
    """The command's flags."""
    flags = Parser("export", __doc__, CHECK_FAILED)
    text = "the workdir of a run, a model file or a Hugging Face folder"
    flags.add_argument("model", metavar="MODEL", help=text)
    text = "hf: a Hugging Face folder; gguf: for llama.cpp; apr; peft, gguf-adapter: the adapters "
    text += "alone of a run with student.lora.rank; the other formats merge them"
    formats = ("hf", "gguf", "apr", "peft", "gguf-adapter")
    flags.add_argument("--format", required=True, choices=formats, help=text)
    flags.add_argument("--out", required=True, help="folder (hf) or file to make")
    text = "f32, the default, keeps every bit; hf: f32, f16, bf16; apr: those, q4_k_m and q6_k; "
    text += "gguf: by default the blocks that a run with student.quantize trained, or that a file "
    text += "stores"
    text += f". A file of types, or one of {', '.join(GGUF_TYPES)}"
    flags.add_argument("--type", type=_read_type, help=text)
    text = "the float32 masters of a run with student.quantize, in place of its blocks"
    flags.add_argument("--masters", action="store_true", help=text)
    text = "gguf: a file of `kdjax imatrix` or llama-imatrix, which weights the errors "
    text += "(--type=q6_k, q5_0, q4_k_m and below)"
    flags.add_argument("--imatrix", default="", metavar="FILE", help=text)
    text = f"a saved step, or {NEWEST}; by default the best by the run's held-out figures"
    flags.add_argument("--step", type=_read_step, help=text)
    text = "the file or folder the run started from, if receipt.json does not say or it has moved; "
    text += "the target of a head's file"
    flags.add_argument("--student", metavar="PATH", help=text)
    flags.add_argument("--overwrite", action="store_true", help="replace --out if it is there")
    return flags


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    log_to_terminal()
    runtime.configure(lean=True)
    print(f"{args.out}: {export(args)}")
    return FINISHED
