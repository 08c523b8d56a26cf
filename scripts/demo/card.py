"""Measures a model of the demo and writes its card, every figure from a file or a measurement.

    python -m scripts.demo.card RUN --gguf=teacher.gguf --type=q4_k_m --text=TEXT --out=teacher.md
    python -m scripts.demo.card RUN --gguf=student.gguf --type=q8_0 --text=TEXT --out=student.md

RUN is the model's workdir, TEXT the folder of scripts/demo/text.py. `--manifest` says which
packages a corpus is made of: the card counts their licences, and packages.txt
(student_packages.txt) beside it names each.
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
from kdjax.models.schema import spec_from_table

TEMPLATE = Path(__file__).with_name("card.md.jinja")


def figures(model: str, text: Path, seq_len: int) -> dict[str, Any]:
    """Held-out figures of a workdir or a model file, computed in float32."""
    mesh = make_local_mesh(1)
    target = open_target(model)
    tokenizer = target.checkpoint.tokenizer
    read = read_text(str(text / "heldout"), tokenizer, rows=1 << 30, seq_len=seq_len)
    return measure(target, None, {"python": read}, mesh, batch_size=16)["python"]["overall"]


def packages(manifest: Path, out: Path) -> dict[str, Any]:
    """Writes the list of packages; returns how many there are of each licence."""
    said = [p for p in json.loads(manifest.read_text())["packages"] if p["side"] == "train"]
    lines = [f"{p['name']} {p['version']}: {p['licence']}" for p in said]
    out.write_text("\n".join(sorted(lines)) + "\n")
    licences = collections.Counter(p["licence"] for p in said)
    return {"count": len(said), "licences": licences.most_common(12)}


def block_types(path: Path) -> dict[str, int]:
    """Tensors of each type in a file."""
    table = open_table(path)
    return dict(sorted(collections.Counter(table.info(name).dtype for name in table).items()))


def card(args: argparse.Namespace) -> str:
    """The card's text."""
    receipt = json.loads((args.run / "receipt.json").read_text())
    length = receipt["config"]["data"]["seq_len"]
    role = args.out.stem
    listed = args.out.with_name("packages.txt" if role == "teacher" else f"{role}_packages.txt")
    runtime.configure()
    known = {
        "role": role,
        "kind": args.type,
        "gguf": args.gguf.name,
        "gguf_bytes": args.gguf.stat().st_size,
        "gguf_sha256": hashlib.sha256(args.gguf.read_bytes()).hexdigest(),
        "types": block_types(args.gguf),
        "spec": spec_from_table(open_table(args.gguf)),
        "student_rows": json.loads((demo.STUDENT_SHAPE / "config.json").read_text())["vocab_size"],
        "tokenizer_sha256": hashlib.sha256(
            (demo.STUDENT_SHAPE / "tokenizer.json").read_bytes()
        ).hexdigest(),
        "receipt": receipt,
        "f32": figures(str(args.run) + "@dense:float32", args.text, length),
        "quantized": figures(str(args.gguf) + "@dense:float32", args.text, length),
        "text": json.loads((args.text / "text.json").read_text()),
        "packages": packages(args.manifest, listed) if args.manifest else None,
        "packages_file": listed.name,
    }
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(known) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("run", type=Path)
    for name in ("gguf", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--type", required=True, help="that the file was exported as")
    parser.add_argument("--manifest", type=Path)
    args = parser.parse_args()
    args.out.write_text(card(args), "utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
