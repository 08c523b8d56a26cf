"""Seconds from the command to the first step of a run, by phase: with nothing cached, then cached.

    python -m scripts.bench.startup --folder=/tmp/m --json=startup.json
    python -m scripts.bench.startup --teacher=teacher.gguf --student=student.gguf

Each case is `kdjax train --config=qwen1p5b_0p5b` in a process of its own, for three steps: with
nothing cached; with the rows; with rows and compiled programs. Without files the pair has random
weights in the published shapes, and the tokenizer of `--tokenizer`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.bench.synthetic import SHAPES, write_random_gguf

CASES = ("nothing cached", "rows cached", "rows and programs cached")
_LINE = re.compile(r"first step after ([\d.]+) s: (.*) \(parts")


def make_pair(args: argparse.Namespace) -> list[str]:
    """Paths of teacher and student, written if they are not there."""
    paths = []
    for side, shape in (("teacher", "1.5b"), ("student", "0.5b")):
        path = getattr(args, side) or args.folder / f"{side}.gguf"
        if not Path(path).exists():
            sizes = SHAPES[shape]._replace(tied=False)
            write_random_gguf(path, sizes, seed=len(paths), tokenizer_from=args.tokenizer)
        paths.append(str(path))
    return paths


def run_case(case: str, paths: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Runs the command once; returns the seconds of its phases, or what it printed."""
    rows, programs = (args.folder / name for name in ("rows", "programs"))
    for folder, kept in ((rows, case != CASES[0]), (programs, case == CASES[2])):
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work := args.folder / "run", ignore_errors=True)
    fields = {
        "teacher.path": paths[0],
        "student.path": paths[1],
        "data.cache_dir": rows,
        "train.steps": 3,
        "optim.warmup_steps": 0,
        "checkpoint.every": 0,
        "eval.every": 0,
    } | dict(pair.split("=", 1) for pair in args.set)
    command = [sys.executable, "-m", "kdjax.main", f"--config={args.config}", f"--workdir={work}"]
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs)}
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = {"case": case, "whole": time.perf_counter() - begin}
    log = done.stdout + done.stderr
    if (line := _LINE.search(log)) is None:
        return found | {"failed": log[-2000:]}
    parts = (part.rpartition(" ") for part in line[2].split(", "))
    return found | {"first step after": float(line[1])} | {n: float(s) for n, _, s in parts}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Times the start of a run.")
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/startup"), help="for models, rows, programs")
    add("--teacher", help="a file; by default random weights of the 1.5B's shape")
    add("--student", help="a file; by default random weights of the 0.5B's shape")
    add("--tokenizer", help="a GGUF file whose tokenizer the random files get")
    add("--config", default="qwen1p5b_0p5b")
    add("--set", action="append", default=[], metavar="FIELD=VALUE")
    add("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    paths, rows = make_pair(args), []
    for case in CASES:
        rows.append(run_case(case, paths, args))
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
