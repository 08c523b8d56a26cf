"""Eight devices as 1 x 8, 2 x 4, 4 x 2 and 8 x 1 (processes x devices) are the same run.

    python -m scripts.cluster.certificate FOLDER     # about ten minutes of two cores

Emulated CPU devices, float32, rows with very different numbers of trained positions. Each split
trains from the start, one of them in two microbatches a device; then one run is killed and resumed
on each split in turn. Prints a Markdown table; exit status 1 if a figure differs by more than 1e-6
of itself.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.cluster import tiny

SPLITS = ((1, 8), (2, 4), (4, 2), (8, 1))
FLAGS = (
    "--config.train.steps=24",
    "--config.checkpoint.every=4",
    "--config.train.batch_size=16",
    "--config.eval.samples=0",
)
TOLERANCE = 1e-6


def run(
    config: Path, workdir: Path, split: tuple[int, int], *flags: str, kill_at: int = 0
) -> list[int]:
    """Trains to the end, or kills the last process once a step is saved; the exit statuses."""
    processes, devices = split
    kept = {"JAX_COMPILATION_CACHE_DIR": str(config.parent / "xla")}
    kept["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    started = tiny.start(config, workdir, processes, devices, *FLAGS, *flags, **kept)
    deadline = time.monotonic() + 300
    while kill_at and not (workdir / "checkpoints" / str(kill_at)).exists():
        if time.monotonic() > deadline or any(p.poll() is not None for p in started):
            break
        time.sleep(0.02)
    if kill_at:
        started[-1].kill()
    try:
        for process in started:
            process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        for process in started:
            process.kill()
    return [process.wait() for process in started]


def main() -> int:
    """Runs all splits; returns the exit status."""
    folder = Path(sys.argv[1])
    config = tiny.write(folder)
    cases: dict[str, tuple[tuple[int, int], tuple[str, ...]]] = {"1 x 8": (SPLITS[0], ())}
    cases |= {f"{p} x {d}": ((p, d), ()) for p, d in SPLITS[1:]}
    cases["2 x 4, two microbatches"] = SPLITS[1], ("--config.train.microbatches=2",)
    cases["2 x 4, mesh.fsdp=2"] = SPLITS[1], ("--config.mesh.fsdp=2",)
    worst = 0.0
    print("| processes x devices | exit statuses | largest difference to 1 x 8 |\n|---|---|---|")

    def report(name: str, workdir: Path, statuses: list[int]) -> None:
        nonlocal worst
        difference = float("inf")
        if not any(statuses):
            difference = tiny.largest_difference(folder / "1x8", workdir)
        worst = max(worst, difference)
        print(f"| {name} | {statuses} | {difference:.1e} |", flush=True)

    for name, (split, flags) in cases.items():
        workdir = folder / name.replace(" ", "").replace(",", "-")
        report(name, workdir, run(config, workdir, split, *flags))
    chain = folder / "chain"
    order = SPLITS[1], SPLITS[3], SPLITS[2]
    for split, step in zip(order, (4, 8, 12), strict=True):
        statuses = run(config, chain, split, kill_at=step)
        print(f"| {split[0]} x {split[1]}, the last killed after step {step} | {statuses} | |")
    report("then 1 x 8", chain, run(config, chain, SPLITS[0]))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.exit(main())
