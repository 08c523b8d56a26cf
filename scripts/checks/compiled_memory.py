"""Counts what a training step holds on a GPU that is not there, beside what is planned.

    pip install 'jax[cuda13]==0.11.2'  # with Python 3.12; no GPU, no driver
    export XLA_FLAGS=--xla_gpu_autotune_level=0 JAX_PLATFORMS=cpu
    python -m scripts.checks.compiled_memory --teacher=qwen3.5-9b --student=qwen3.5-0.8b \\
        --set=student.remat=full --json=points.jsonl

XLA compiles the step for the card and tells its arguments and temporaries; on a GPU the sum was the
measured peak to 1%. Of the models there are headers alone, of known shapes, so that a 35B takes no
memory here. XLA computes more again by itself where a step comes near the card's memory: ask for
the larger card (`--card=h200`) to see what it would hold. cuDNN's workspace is counted as nothing.
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


def place(tree: Any, mesh: Any) -> Any:
    """The shapes of arrays, as those of the mesh's device."""
    import jax

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)


def shape_parameters(table: Any, spec: Any, abstract: Any, mesh: Any, *, matrices: str) -> Any:
    """Shapes of the parameters that `loading.load_params` would make."""
    import jax
    import jax.numpy as jnp
    from flax.traverse_util import unflatten_dict

    from kdjax.formats.blocks import row_bytes
    from kdjax.models import loading

    made = dict[Any, Any]()
    planned = loading.plan_params(table, spec, abstract, mesh, matrices=matrices)
    for path, parts in planned.items():
        stacks, count = [], sum(len(part.readings) for part in parts)
        for part in parts:
            whole = part.whole
            if whole is None:
                ((name, reading),) = part.readings.items()
                info = table.info(name)
                stored = (*info.shape[:-1], row_bytes(info.dtype, info.shape[-1]))
                whole = jax.eval_shape(reading, jax.ShapeDtypeStruct(stored, jnp.uint8))
            stacks.append(whole)
        place_of = jax.ShapeDtypeStruct((count,), jnp.int32)
        mixed = loading.Mixed(tuple(stacks), place_of, place_of)
        made[path] = stacks[0] if len(stacks) == 1 else mixed
    return place(unflatten_dict(made), mesh)


def count(config: Any, shapes: tuple[str, str], card: str) -> dict[str, float]:
    """Arguments, temporaries and the plan of a step, in GB."""
    import jax
    import jax.numpy as jnp

    from kdjax.device.placement import Placement
    from kdjax.device.runtime import Devices
    from kdjax.device.sharding import make_local_mesh
    from kdjax.models import model
    from kdjax.training import job, plan, teachers
    from scripts.bench.synthetic import SHAPES, pair_headers

    mesh, kind = make_mesh(card), teachers.RUNNING[config.teacher.weights]
    placement = Placement(mesh, kernels=True)
    pair = pair_headers(SHAPES[shapes[0]], SHAPES[shapes[1]])
    assert pair.teacher is not None
    patched: Any = model
    patched.load_params = shape_parameters
    teacher = model.load_model(
        pair.teacher,
        placement=placement,
        weights=kind.name,
        dtype=config.teacher.param_dtype,
        compute_dtype=config.train.compute_dtype,
        max_segments=config.data.max_segments,
    )
    params, width = teacher.params, pair.vocabulary.width
    if width < teacher.vocab_size:
        name = "head" if "head" in params else "embed"
        cut = jax.eval_shape(lambda x: jax.tree.map(lambda y: y[:width], x), params[name])
        params |= {name: place(cut, mesh)}
    teacher = teacher.replace(params=params, vocab_size=width)
    _, step, _ = job.build_step(config, pair, placement, kind, teacher=teacher)
    rows = config.train.batch_size, config.data.seq_len
    ids = ("tokens", "labels", "segment_ids", "positions")
    batch = {name: jax.ShapeDtypeStruct(rows, jnp.int32) for name in ids}
    batch["weights"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    fixed = {name: place(value, mesh) for name, value in step.fixed.items()}
    traced = step.jitted.trace(place(step.abstract, mesh), params, place(batch, mesh), **fixed)
    compiled: Any = traced.lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    device = Devices("gpu", f"NVIDIA {card.upper()}", 1, int(0.9 * _BYTES[card]), None)
    made = plan.make_plan(config, pair, make_local_mesh(1), device, kind)
    trained = [sum(v.values()) for k, v in made.phases.items() if not k.startswith("evaluating")]
    held = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    planned = sum(made.resident.values()) + max(trained)
    sizes = dict(arguments=held[0], temporaries=held[1], total=sum(held), planned=planned)
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
