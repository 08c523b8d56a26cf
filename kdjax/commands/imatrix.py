"""Measures which inputs of a model's matrices matter on a text: llama.cpp's importance matrix.

    kdjax imatrix model.gguf --data=text/ --out=model.imatrix.gguf
    kdjax export runs/a --format=gguf --type=q2_k --imatrix=model.imatrix.gguf --out=small.gguf

MODEL is as for `kdjax evaluate`. llama-quantize reads the file, too. Rows are read as continuous
text; a last row that the text does not fill is left out.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kdjax.commands.parsing import (
    Parser,
    add_fields_flag,
    check_least,
    check_seq_len,
    log_to_terminal,
    read_paths,
)
from kdjax.data.fields import Fields
from kdjax.device import runtime, sharding
from kdjax.errors import FINISHED, UserError, reporting
from kdjax.evaluation.heldout import read_text
from kdjax.evaluation.target import open_target
from kdjax.export.staging import check_sources, check_target
from kdjax.formats.locks import holding_file
from kdjax.models.importance import measure_importance
from kdjax.progress import counted


def _parser() -> Parser:
    parser = Parser("imatrix", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="workdir, step folder, model file or folder, with @FORM")
    text = "folders, globs, files, joined by commas"
    add("--data", required=True, type=read_paths, metavar="PATHS", help=text)
    add_fields_flag(add)
    add("--out", required=True, type=Path, metavar="FILE", help="the GGUF file to make")
    add("--rows", type=int, default=128, help="rows of the text, at most, spread evenly over it")
    add("--seq-len", type=int, default=512, help="positions a row")
    add("--batch-size", type=int, default=8, help="rows at a time")
    add("--overwrite", action="store_true", help="replace --out if it is there")
    return parser


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    check_least(args, rows=1, batch_size=1, seq_len=2)
    check_target(args.out, folder=False, overwrite=args.overwrite)
    log_to_terminal()
    runtime.configure(lean=True)
    target = open_target(args.model)
    check_sources(args.out, target.checkpoint.table.paths)
    check_seq_len(args, target.checkpoint)
    tokenizer = target.checkpoint.tokenizer
    sizes = {"rows": args.rows, "seq_len": args.seq_len}
    text = read_text(args.data, tokenizer, **sizes, fields=Fields.parse(args.fields))
    (whole,) = text.batches(len(text.rows))
    tokens = whole["tokens"][np.all(whole["segment_ids"] > 0, axis=1)]
    if not len(tokens):
        raise UserError(f"{args.data}: found no row of {args.seq_len} ids; lower --seq-len.")
    with holding_file(args.out, "give another --out"):
        model = target.load(sharding.make_local_mesh(1))

        def batches() -> Iterator[np.ndarray]:
            for start in counted(range(0, len(tokens), args.batch_size), "batches read"):
                yield tokens[start : start + args.batch_size]

        texts, size = [args.data], args.seq_len
        matrices, count = measure_importance(
            args.out, model, batches(), datasets=texts, chunk_size=size
        )
    print(f"{args.out}: {matrices} matrices, {count:,} positions")
    return FINISHED
