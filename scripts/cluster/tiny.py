"""A run small enough for any processor, and processes that train it together.

python -m scripts.cluster.tiny FOLDER     # writes teacher, student, text and config.py
mpirun -n 2 python -m kdjax.main --config=FOLDER/config.py --workdir=FOLDER/run
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.synthetic import write_tiny_pair, write_tiny_text

_CONFIG = """\
from kdjax.config import Config
from kdjax.recipes import tiny


def get_config():
    config = tiny(Config())
    config.teacher.path, config.student.path = "{folder}/teacher.gguf", "{folder}/student.gguf"
    config.data.train, config.data.cache_dir = "{folder}/text", "{folder}/rows"
    config.data.seq_len = 32
    config.train.steps, config.eval.every, config.checkpoint.every = 8, 4, 4
    config.train.batch_size, config.train.microbatches = 8, 1
    config.eval.batch_size, config.checkpoint.keep = 8, 8
    config.log.tensorboard = False
    return config
"""


def write(folder: Path) -> Path:
    """Writes all that the run needs into the folder; returns the config's path.

    Documents of very different lengths, so that the devices' rows hold different numbers of
    trained positions.
    """
    write_tiny_text(folder / "text", [1 + i % 12 for i in range(24)])
    write_tiny_pair(folder)
    config = folder / "config.py"
    config.write_text(_CONFIG.format(folder=folder.resolve()))
    return config


def commands(
    module: Sequence[str],
    processes: int,
    devices: int,
    *,
    last: Sequence[str] = (),
    **variables: str,
) -> list[tuple[list[str], dict[str, str]]]:
    """Makes the commands and environments of processes of so many emulated devices each.

    A module is run as Kubeflow Trainer would. `last` are more flags of the last process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flag = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.getenv('XLA_FLAGS', '')} {flag}",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.getenv("PYTHONPATH")])),
    }
    made = []
    for index in range(processes):
        place = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(index),
        }
        command = [sys.executable, "-m", *module, "--join_timeout=60"]
        command += last if index == processes - 1 else ()
        made.append((command, environment | (place if processes > 1 else {}) | variables))
    return made


_COMPARED = ("loss", "ce", "divergence", "grad_norm", "tokens", "student_ce", "kl", "agreement")


def read_figures(workdir: Path) -> dict[tuple[str, int, str], float]:
    """A run's figures by kind ("train", "eval"), step and name; of a repeated step the last."""
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {
        (row["kind"], row["step"], name): row[name]
        for row in rows
        for name in _COMPARED
        if name in row and "step" in row
    }


def largest_difference(one: Path, other: Path) -> float:
    """The largest relative difference between the figures of two runs' workdirs.

    Raises `KeyError` if one has a figure that the other lacks.
    """
    a, b = read_figures(one), read_figures(other)
    if odd := a.keys() ^ b.keys():
        raise KeyError(f"only one of {one} and {other} has {sorted(odd)}")
    return max(abs(a[key] - b[key]) / max(abs(a[key]), 1e-30) for key in a)


def main() -> None:
    print(write(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
