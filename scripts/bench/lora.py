"""Adapters on a packed base: memory and speed, beside PyTorch with PEFT and beside full training.

    python -m scripts.bench.lora --folder=/tmp/m --json=/tmp/m/lora.json
    python -m scripts.bench.lora --cases=24gb,torch --teacher=32b --json=/tmp/m/lora-32b.json
    JAX_PLATFORMS=cpu python -m scripts.bench.lora --plan --json=cards.json
    JAX_PLATFORMS=cpu python -m scripts.bench.lora --teacher=tiny-teacher --student=tiny-student \\
        --length=64 --small=tiny-student --memory-gb=0 --folder=/tmp/m

Cases: `24gb` is kdjax under a limit of the allocator (`--memory-gb`), `free` the same without one,
`torch` the peer of scripts.bench.peer (bf16 base and teacher, layers recomputed, compiled), `small`
a student of 0.5B, adapters and whole. `--plan` runs nothing: it plans, for each card of CARDS, a
pair of Qwen2.5's shapes by adapters and whole. Models are random Q4_K_M files of given shapes. Each
case is a process of its own; what it found is written before the next begins. The figures are those
of scripts.bench.step: `peak_gb` is the allocator's.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kdjax.config import Config
from kdjax.device.runtime import Devices
from kdjax.device.sharding import make_local_mesh
from kdjax.training.plan import make_plan
from kdjax.training.teachers import Packed
from scripts.bench import step
from scripts.bench.synthetic import QWEN25_SHAPES, pair_headers

# Of a card with so many GB: a teacher and a student that fit, or the largest there are.
CARDS = {
    8: ("1.5b", "1.5b"),
    16: ("7b", "7b"),
    24: ("14b", "7b"),
    48: ("32b", "14b"),
    80: ("32b", "32b"),
}
CASES = ("24gb", "free", "torch", "small")
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def device_gb() -> float:
    """Memory of the first GPU by its driver, 10^9 bytes; 0 without one."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0.0
    return float(found.split()[0]) * 2**20 / 1e9


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times adapters on a packed base.")
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/bench"), help="for model files and logs")
    add("--cases", default=",".join(CASES), help="joined by commas, in this order")
    add("--teacher", default="14b", help="a shape of scripts.bench.step, or a file")
    add("--student", default="7b")
    add("--small", default="0.5b", help="the student of the case `small`, below --student")
    add("--rows", type=int, default=8)
    add("--length", type=int, default=2048)
    add("--microbatches", type=int, default=8)
    add("--torch-microbatches", type=int, default=4)
    add("--remat", default="full")
    add("--memory-gb", type=float, default=24.0, help="of the allocator, in `24gb`; 0: no limit")
    add("--steps", type=int, default=6, help="timed ones, after three more")
    add("--dtype", default="bfloat16")
    add("--plan", action="store_true", help="plan a pair for each card instead")
    add("--json", type=Path, help="where to write the figures")
    return parser.parse_args(argv)


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Each case and the arguments of scripts.bench.step that measure it."""
    shared = [f"--folder={args.folder}", f"--rows={args.rows}", f"--length={args.length}"]
    shared += [f"--steps={args.steps}", f"--dtype={args.dtype}"]
    large = [*shared, f"--teacher={args.teacher}", f"--student={args.student}"]
    small = [*shared, f"--teacher={args.student}", f"--student={args.small}"]
    parts = [f"--set=train.microbatches={args.microbatches}", f"--set=student.remat={args.remat}"]
    theirs = [f"--set=train.microbatches={args.torch_microbatches}"]
    ours = [*large, "--variants=packed-lora", *parts]
    return {
        "24gb": ours,
        "free": ours,
        "torch": [*large, "--variants=torch-lora,torch-lora-eager", *theirs],
        "small": [*small, "--variants=packed-lora,packed-lora-dense,packed"],
    }


def plan_cards(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Plans each card's pair, packed, on an H200, in GB; nothing is allocated."""
    config, devices = Config(), Devices("gpu", "NVIDIA H200", 1, int(135.1e9), None)
    config.data.seq_len, config.train.batch_size = args.length, args.rows
    config.data.max_segments = 1
    config.train.microbatches, config.student.remat = args.microbatches, args.remat
    config.loss.chunk_tokens, config.student.init = 1024, "checkpoint"
    mesh, found = make_local_mesh(1), []
    for card, names in CARDS.items():
        pair = pair_headers(QWEN25_SHAPES[names[0]], QWEN25_SHAPES[names[1]])
        planned = {}
        for way, rank in (("adapters_gb", 16), ("whole_gb", 0)):
            config.student.lora.rank = rank
            planned[way] = make_plan(config, pair, mesh, devices, Packed()).peak / 1e9
        found.append(dict(card_gb=card, teacher=names[0], student=names[1], **planned))
        print(
            "{card_gb} GB: {teacher} into {student}, {adapters_gb:.2f} GB by adapters, "
            "{whole_gb:.2f} GB whole".format(**found[-1])
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """Runs the cases; returns the worst status."""
    args, worst, found = parse(argv), 0, {}
    if args.plan:
        cards = plan_cards(args)
        if args.json:
            args.json.write_text(json.dumps(cards, indent=1))
        return 0
    total = device_gb()
    for case in args.cases.split(","):
        limited = case == "24gb" and args.memory_gb and total
        if limited:
            os.environ[_FRACTION] = f"{args.memory_gb / total:.4f}"
        else:
            os.environ.pop(_FRACTION, None)
        kept = args.folder / f"lora-{case}.json"
        limit = f", at most {args.memory_gb:g} of {total:.1f} GB" if limited else ""
        print(f"\n{case}: {args.teacher} and {args.student}{limit}", flush=True)
        worst = max(worst, step.main([*commands(args)[case], "--matmul=1024", f"--json={kept}"]))
        if kept.exists():
            found[case] = json.loads(kept.read_text())
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    return worst


if __name__ == "__main__":
    sys.exit(main())
