"""Does the demo's student learn more with the teacher than without? Both, for several seeds.

    python -m scripts.demo.compare --out=runs/compare
    python -m scripts.demo.compare --out=runs/random --start=random --equal=tokens

Runs configs/demo.py and configs/demo.py:baseline one after the other, each in a process of its own,
prints a table in Markdown and writes it as OUT/compare.json. The baseline trains on the text alone
for as long as the distilled student trained: its step is timed first, over `TRIAL` steps.
`--equal=tokens` gives both the same steps instead, `--start=random` begins with random weights.
Arguments it does not know go to every run (`--config.train.steps=50`). Exit status 1: the distilled
student did not win on held-out cross-entropy in each seed, or a run failed. What was interrupted
goes on where it was.
"""

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kdjax.formats.files import replacing

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = ("distilled", "baseline")
CONFIGS = {  # by what the student begins with
    "shipped": ("configs/demo.py", "configs/demo.py:baseline"),
    "random": ("configs/demo.py:random", "configs/demo.py:random_baseline"),
}
TRIAL = 60  # steps of the baseline that tell its speed
FAIR = 0.95  # of the distilled student's time; a machine's speed varies
FIGURES = {
    "CE": "student_ce",
    "perplexity": "student_perplexity",
    "bits a byte": "student_bits_per_byte",
    "KL": "kl",
    "agreement": "agreement",
}


def run(config: str, workdir: Path, seed: int, more: Sequence[str]) -> None:
    """One run, to its end. Raises `CalledProcessError` if it ends otherwise."""
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


def train(config: str, workdir: Path, seed: int, more: Sequence[str]) -> dict[str, Any]:
    """One run; its last held-out figures, the tokens it trained on and the seconds of its steps.

    The seconds are those of the loop: without compiling, evaluations and the report.
    """
    run(config, workdir, seed, more)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if line["kind"] == "eval"]
    steps = [line for line in lines if line["kind"] == "train"]
    trained = sum(line["tokens"] for line in steps)
    data = json.loads((workdir / "receipt.json").read_text())["config"]
    places = data["train"]["batch_size"] * data["data"]["seq_len"]
    paces = [places / line["tokens_per_second"] for line in steps[1:]]  # the first one compiles
    return {name: evals[-1][key] for name, key in FIGURES.items()} | {
        "first CE": evals[0]["student_ce"],
        "teacher CE": evals[-1]["teacher_ce"],
        "step": evals[-1]["step"],
        "tokens": trained,
        "seconds": statistics.fmean(paces) * len(steps),
    }


def steps_in(seconds: float, config: str, workdir: Path, seed: int, more: Sequence[str]) -> int:
    """How many steps of a config fill that time, rounded up, by a trial of `TRIAL` steps."""
    receipt = workdir / "receipt.json"
    if not receipt.exists():  # else the comparison was interrupted, and its answer holds
        # A trial may end with status 3: whether the loss fell is not asked here.
        with contextlib.suppress(subprocess.CalledProcessError):
            run(config, workdir, seed, [*more, f"--config.smoke.steps={TRIAL}"])
    return math.ceil(seconds / json.loads(receipt.read_text())["smoke"]["median_step_seconds"])


def verdict(runs: Sequence[dict[str, Any]], equal: str) -> list[int]:
    """The seeds in which the distilled student did not win; empty is a win in each.

    `equal` is "time" or "tokens". With "time" no win counts where the baseline trained for less
    than `FAIR` of the distilled student's time. Raises `ValueError` if one of the two is missing,
    or with "tokens" if they differ in steps or tokens.
    """
    lost = []
    for seed in sorted({run["seed"] for run in runs}):
        pair = {run["kind"]: run for run in runs if run["seed"] == seed}
        if set(pair) != set(KINDS):
            raise ValueError(f"seed {seed}: expected one run of each of {', '.join(KINDS)}")
        ours, theirs = pair["distilled"], pair["baseline"]
        if equal == "tokens" and any(ours[name] != theirs[name] for name in ("step", "tokens")):
            raise ValueError(f"seed {seed}: the two runs trained on different amounts of text")
        unfair = equal == "time" and theirs["seconds"] < FAIR * ours["seconds"]
        if unfair or not ours["CE"] < theirs["CE"]:
            lost.append(seed)
    return lost


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs and the mean of each kind, in Markdown."""
    names = ["step", "seconds", *FIGURES]
    lines = ["| student | seed | " + " | ".join(names) + " |", "| --- " * (2 + len(names)) + "|"]
    for kind in KINDS:
        mine = [run for run in runs if run["kind"] == kind]
        mean = {name: statistics.fmean(run[name] for run in mine) for name in names}
        for run in (*mine, mean | {"seed": "mean"}):
            cells = (f"{run[name]:.4f}" for name in FIGURES)
            amount = f"{run['step']:.0f} | {run['seconds']:.1f}"
            lines.append(f"| {kind} | {run['seed']} | {amount} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compare(out: Path, seed: int, args: argparse.Namespace, more: Sequence[str]) -> Iterator[Any]:
    """The two runs of a seed. Raises `CalledProcessError` if one fails."""
    with_teacher, alone = CONFIGS[args.start]
    distilled = train(with_teacher, out / f"distilled_{seed}", seed, more)
    yield {"kind": "distilled", "seed": seed} | distilled
    if args.equal == "time":
        steps = steps_in(distilled["seconds"], alone, out / f"trial_{seed}", seed, more)
        more = [*more, f"--config.train.steps={steps}"]
    yield {"kind": "baseline", "seed": seed} | train(alone, out / f"baseline_{seed}", seed, more)


def main() -> int:
    """Runs the comparison; returns the exit status."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="for the workdirs")
    parser.add_argument("--seeds", type=int, default=3, help="0 to SEEDS - 1")
    parser.add_argument("--start", choices=tuple(CONFIGS), default="shipped", help="the student")
    text = "what the baseline gets as much of"
    parser.add_argument("--equal", choices=("time", "tokens"), default="time", help=text)
    args, more = parser.parse_known_args()
    out = args.out.resolve()
    runs: list[dict[str, Any]] = []
    try:
        for seed in range(args.seeds):
            runs.extend(compare(out, seed, args, more))
    except subprocess.CalledProcessError as error:
        print(f"error: {error.cmd} ended with status {error.returncode}", file=sys.stderr)
        return 1
    lost = verdict(runs, args.equal)
    with replacing(out / "compare.json") as file:
        said = {"equal": args.equal, "start": args.start, "runs": runs, "lost": lost}
        file.write(json.dumps(said, indent=1).encode() + b"\n")
    print(table(runs))
    won = args.seeds - len(lost)
    print(f"\ndistilled wins on held-out CE in {won} of {args.seeds} seeds, at equal {args.equal}")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
