"""Uploads a student, or any exported folder or file, to the Hugging Face Hub.

    kdjax push runs/a ORG/REPO --type=bf16
    kdjax push student-q4_k_m.gguf ORG/REPO-GGUF --run=runs/a
    kdjax push small.gguf ORG/REPO-GGUF                      # made by kdjax shrink, with its card
    kdjax push exported/adapter ORG/REPO-lora --private

Of a workdir the best checkpoint is exported, checked and uploaded as a Transformers folder. A model
card comes along: what it was made from, its held-out figures, its settings. The token is HF_TOKEN
or what `hf auth login` stored; no file has it.
"""

import tempfile
from pathlib import Path

from kdjax.commands.export import export
from kdjax.commands.export import parser as export_parser
from kdjax.commands.parsing import Parser, log_to_terminal
from kdjax.device import runtime
from kdjax.errors import CHECK_FAILED, FINISHED, UserError, reporting
from kdjax.export.formats import HF_TYPES
from kdjax.export.push import push_to_hub
from kdjax.hub import check_repository
from kdjax.models.checkpoint import CHECKPOINTS


def _parser() -> Parser:
    parser = Parser("push", __doc__, CHECK_FAILED)
    add = parser.add_argument
    text = "the workdir of a run, an exported folder, a GGUF or .apr file"
    add("path", metavar="PATH", type=Path, help=text)
    add("repository", metavar="ORG/REPO", help="made if the account has none of this name")
    add("--type", choices=HF_TYPES, help="numbers of a workdir's export (default: f32)")
    text = "the workdir that a file is of, whose receipt its model card repeats"
    add("--run", default="", metavar="WORKDIR", help=text)
    add("--private", action="store_true", help="a repository that is made is private")
    return parser


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    log_to_terminal()
    runtime.configure(lean=True)
    check_repository(args.repository)
    if not (args.path / CHECKPOINTS).is_dir():
        if args.type:
            raise UserError(
                f"{args.path}: found --type={args.type} for what is no workdir, and is uploaded as "
                "it is; expected none. Leave it out, or `kdjax export` it with that type first."
            )
        print(push_to_hub(args.path, args.repository, private=args.private, run=args.run))
        return FINISHED
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / args.repository.rpartition("/")[2]
        flags = [str(args.path), "--format=hf", f"--type={args.type or 'f32'}", f"--out={out}"]
        export(export_parser().parse_args(flags))
        print(push_to_hub(out, args.repository, private=args.private))
    return FINISHED
