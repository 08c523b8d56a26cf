"""Measures a model of the demo and writes its card, every figure from a file or a measurement.

    python -m scripts.demo.card RECEIPT --gguf=teacher.gguf --type=q4_k_m --corpus=CORPUS \\
        --out=teacher.md

RECEIPT is the receipt.json of the model's run, CORPUS the folder of scripts/demo/make_stories.sh.
"""

import argparse
import collections
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from kdjax import demo
from kdjax.device import runtime
from kdjax.device.sharding import make_local_mesh
from kdjax.evaluation.heldout import measure, read_text
from kdjax.evaluation.target import open_target
from kdjax.formats import open_table
from kdjax.models.loading import count_parameters
from kdjax.models.schema import spec_from_table

TEMPLATE = Path(__file__).with_name("card.md.jinja")


def figures(model: str, corpus: Path, seq_len: int) -> dict[str, Any]:
    """Held-out figures of a model file, computed in float32."""
    mesh = make_local_mesh(1)
    target = open_target(model)
    tokenizer = target.checkpoint.tokenizer
    read = read_text(str(corpus / "heldout.jsonl"), tokenizer, rows=1 << 30, seq_len=seq_len)
    return measure(target, None, {"stories": read}, mesh, batch_size=16)["stories"]["overall"]


def block_types(path: Path) -> dict[str, int]:
    """Tensors of each type in a file."""
    table = open_table(path)
    return dict(sorted(collections.Counter(table.info(name).dtype for name in table).items()))


def card(args: argparse.Namespace) -> str:
    """The card's text."""
    receipt = json.loads(args.receipt.read_text())
    length = receipt["config"]["data"]["seq_len"]
    spec = spec_from_table(open_table(args.gguf))
    runtime.configure()
    known = {
        "role": args.out.stem,
        "kind": args.type,
        "gguf": args.gguf.name,
        "gguf_bytes": args.gguf.stat().st_size,
        "gguf_sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest(),
        "types": block_types(args.gguf),
        "spec": spec,
        "parameters": count_parameters(spec),
        "student_rows": json.loads((demo.STUDENT_SHAPE / "config.json").read_text())["vocab_size"],
        "tokenizer_sha256": hashlib.sha256(
            (demo.STUDENT_SHAPE / "tokenizer.json").read_bytes()
        ).hexdigest(),
        "receipt": receipt,
        "figures": figures(str(args.gguf) + "@dense:float32", args.corpus, length),
        "corpus": json.loads((args.corpus / "corpus.json").read_text()),
    }
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(known) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("receipt", type=Path)
    for name in ("gguf", "corpus", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--type", required=True, help="that the file was exported as")
    args = parser.parse_args()
    args.out.write_text(card(args), "utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
