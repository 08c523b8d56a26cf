"""Does the demo's student learn more with the teacher than without? Both, for several seeds.

    python -m scripts.demo.compare --out=runs/compare

Runs configs/demo.py and configs/demo.py:baseline one after the other, each in a process of its own,
prints a table in Markdown and writes it as OUT/compare.json. Arguments it does not know go to every
run (`--config.train.steps=50`). Exit status 1: the distilled student did not win on held-out
cross-entropy in each seed, or a run failed. What was interrupted goes on where it was.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdjax.formats.files import replacing

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = {"distilled": "configs/demo.py", "baseline": "configs/demo.py:baseline"}
FIGURES = {
    "CE": "student_ce",
    "perplexity": "student_perplexity",
    "bits a byte": "student_bits_per_byte",
    "KL": "kl",
    "agreement": "agreement",
}


def train(config: str, workdir: Path, seed: int, more: Sequence[str]) -> dict[str, Any]:
    """One run, to its end; the last held-out figures, the tokens it trained on and its seconds."""
    command = [
        sys.executable,
        "-m",
        "kdjax.main",
        f"--config={config}",
        f"--workdir={workdir}",
        f"--config.train.seed={seed}",
        *more,
    ]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if line["kind"] == "eval"]
    trained = sum(line["tokens"] for line in lines if line["kind"] == "train")
    return {name: evals[-1][key] for name, key in FIGURES.items()} | {
        "first CE": evals[0]["student_ce"],
        "teacher CE": evals[-1]["teacher_ce"],
        "step": evals[-1]["step"],
        "tokens": trained,
    }


def verdict(runs: Sequence[dict[str, Any]]) -> list[int]:
    """The seeds in which the distilled student did not win; empty is a win in each.

    Raises `ValueError` if the two of a seed differ in steps or tokens, or one of them is missing.
    """
    lost = []
    for seed in sorted({run["seed"] for run in runs}):
        pair = {run["kind"]: run for run in runs if run["seed"] == seed}
        if set(pair) != set(KINDS):
            raise ValueError(f"seed {seed}: expected one run of each of {', '.join(KINDS)}")
        ours, theirs = pair["distilled"], pair["baseline"]
        if any(ours[name] != theirs[name] for name in ("step", "tokens")):
            raise ValueError(f"seed {seed}: the two runs trained on different amounts of text")
        if not ours["CE"] < theirs["CE"]:
            lost.append(seed)
    return lost


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs and the mean of each kind, in Markdown."""
    lines = [
        "| student | seed | " + " | ".join(FIGURES) + " |",
        "| --- " * (2 + len(FIGURES)) + "|",
    ]
    for kind in KINDS:
        mine = [run for run in runs if run["kind"] == kind]
        mean = {name: statistics.fmean(run[name] for run in mine) for name in FIGURES}
        for run in (*mine, mean | {"seed": "mean"}):
            cells = (f"{run[name]:.4f}" for name in FIGURES)
            lines.append(f"| {kind} | {run['seed']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs the comparison; returns the exit status."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="for the workdirs")
    parser.add_argument("--seeds", type=int, default=3, help="0 to SEEDS - 1")
    args, more = parser.parse_known_args()
    out = args.out.resolve()
    runs = []
    for seed in range(args.seeds):
        for kind, config in KINDS.items():
            workdir = out / f"{kind}_{seed}"
            try:
                figures = train(config, workdir, seed, more)
            except subprocess.CalledProcessError as error:
                print(f"error: {workdir} ended with status {error.returncode}", file=sys.stderr)
                return 1
            runs.append({"kind": kind, "seed": seed} | figures)
    lost = verdict(runs)
    with replacing(out / "compare.json") as file:
        file.write(json.dumps({"runs": runs, "lost": lost}, indent=1).encode() + b"\n")
    print(table(runs))
    won = args.seeds - len(lost)
    print(f"\ndistilled wins on held-out CE in {won} of {args.seeds} seeds")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
