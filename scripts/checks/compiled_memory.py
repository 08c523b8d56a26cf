"""Counts what a training step holds on a GPU that is not there, beside what is planned.

    pip install 'jax[cuda13]==0.11.2'  # with Python 3.12; no GPU, no driver
    export XLA_FLAGS=--xla_gpu_autotune_level=0 JAX_PLATFORMS=cpu
    python -m scripts.checks.compiled_memory --teacher=qwen3.5-9b --student=qwen3.5-0.8b \\
        --set=student.remat=full --json=points.jsonl

`training.compiled` compiles the step for the card, of which XLA tells arguments and temporaries; on
a GPU the sum was the measured peak to 1%. Of the models there are headers alone, of known shapes,
so that a 35B takes no memory here. XLA computes more again by itself where a step comes near the
card's memory: ask for the larger card (`--card=h200`) to see what it would hold. cuDNN's workspace
is counted as nothing.
JAX asks for the card in places where nobody can tell it; these are its functions of 0.11.2.
Each call adds a line to --json. Exit status: 0 done, 2 bad input.
"""

# pyright: reportAttributeAccessIssue=false

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdjax.errors import UserError, reporting

_BYTES = {"h100": 84_929_347_584, "h200": 150_754_820_096}
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {speed} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {size} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
runtime_version: {{ major: 13 minor: 0 patch: 0 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
device_description_str: "{name}"
"""
_CARDS = {
    "h100": _TARGET.format(
        speed=3_352_320_000_000, size=_BYTES["h100"], name="NVIDIA H100 80GB HBM3"
    ),
    "h200": _TARGET.format(speed=4_814_000_000_000, size=_BYTES["h200"], name="NVIDIA H200"),
}


def make_mesh(card: str) -> Any:
    """A mesh of one such device, for which programs can be compiled and not run."""
    import jax
    import numpy as np
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax._src.pallas.triton import gpu_info
    from jax.experimental import topologies

    patched: Any = gpu_info
    hopper = dict(arch_name="9.0", compute_capability=90)
    patched.get_gpu_info = lambda: gpu_info.GpuInfo(gpu_version=gpu_info.GpuVersion.H100, **hopper)
    patched = cudnn
    patched.check_cudnn_version = lambda: 91300
    patched.check_compute_capability = lambda _: True
    patched.is_cuda_compute_capability_equal = lambda version: version == "9.0"
    topology: Any = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=_CARDS[card]
    )
    devices = np.array(topology.devices).reshape(1, 1, 1)
    return jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))


def count(config: Any, shapes: tuple[str, str], card: str) -> dict[str, float]:
    """Arguments, temporaries and the plan of a step, in GB."""
    from kdjax.device.placement import Placement
    from kdjax.device.runtime import Devices
    from kdjax.device.sharding import make_local_mesh
    from kdjax.training import compiled, plan, teachers
    from scripts.bench.synthetic import SHAPES, pair_headers

    kind = teachers.RUNNING[config.teacher.weights]
    pair = pair_headers(SHAPES[shapes[0]], SHAPES[shapes[1]])
    placement = Placement(make_mesh(card), kernels=True)
    held = compiled.count_step(config, pair, placement, kind, "cuda")
    device = Devices("gpu", f"NVIDIA {card.upper()}", 1, int(0.9 * _BYTES[card]), None)
    made = plan.make_plan(config, pair, make_local_mesh(1), device, kind)
    step = max(sum(made.phases[name].values()) for name in plan.STEP_PHASES if name in made.phases)
    planned = sum(made.resident.values()) + step
    sizes = held._asdict() | {"total": sum(held), "planned": planned}
    return {name: round(size / 1e9, 2) for name, size in sizes.items()}


def make_config(args: argparse.Namespace) -> Any:
    """The config of scripts.bench.step's steps, and the fields that --set names."""
    from kdjax.commands.parsing import override, run_parser
    from kdjax.config import Config

    config = Config()
    config.teacher.weights, config.data.max_segments = "packed", 1
    config.data.seq_len, config.train.batch_size = 2048, 8
    config.loss.temperature, config.loss.alpha = 4.0, 0.3
    config.train.compute_dtype = config.teacher.param_dtype = "bfloat16"
    config.student.remat, config.loss.chunk_tokens = "none", 1024
    parser = run_parser("compiled_memory", __doc__)
    return override(config, [f"--config.{field}" for field in args.set], parser)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints and keeps the figures; returns the exit status."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    add("--teacher", required=True, help="a shape of scripts.bench.random_gguf")
    add("--student", required=True)
    add("--card", choices=_CARDS, default="h100")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the config")
    add("--json", type=Path, help="where a line is added")
    args = flags.parse_args(argv)
    asked: Mapping[str, Any] = dict(vars(args), json=None)
    try:
        found = count(make_config(args), (args.teacher, args.student), args.card)
    except (ImportError, KeyError) as error:
        raise UserError(
            f"found no {error}; expected jax[cuda13] and shapes of scripts.bench.random_gguf."
        ) from error
    line = json.dumps({k: v for k, v in asked.items() if v} | found)
    print(line)
    if args.json:
        with args.json.open("a") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
