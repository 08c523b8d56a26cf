"""Trains a config through Ray Train, as docs/cluster.md shows it; on CPU devices of this host.

    python -m scripts.cluster.ray_program CONFIG WORKDIR PROCESSES [--config.FIELD=VALUE ...]

Each process leaves its id in WORKDIR.RANK. A worker that dies makes Ray start all of them again,
and the run goes on.
"""

# pyright: reportMissingImports=false
# Ray is no dependency: the script runs in an environment that has it.

import os
import sys
from pathlib import Path
from typing import Any


def train(settings: dict[str, Any]) -> None:
    """One worker, in which JaxTrainer has initialised JAX."""
    import ray.train

    import kdjax
    from kdjax.commands.parsing import parse_run, run_parser

    rank = ray.train.get_context().get_world_rank()
    Path(f"{settings['workdir']}.{rank}").write_text(str(os.getpid()))
    config = parse_run(run_parser("train", None), settings["flags"]).config
    kdjax.distill(config, settings["workdir"])


def main() -> None:
    config, workdir, processes, *flags = sys.argv[1:]
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer
    from ray.train.v2.jax.config import JaxConfig

    ray.init(num_cpus=int(processes), include_dashboard=False)
    JaxTrainer(
        train,
        train_loop_config=dict(workdir=workdir, flags=[f"--config={config}", *flags]),
        # JaxTrainer initialises JAX for GPUs and TPUs alone; JAX_PLATFORMS=cpu is heard after that.
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=int(processes)),
        run_config=RunConfig(
            storage_path=f"{workdir}.ray", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


if __name__ == "__main__":
    main()
