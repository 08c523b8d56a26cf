"""Memory of training some of the parameters: XLA's account of compiled steps, nothing allocated.

    python -m scripts.bench.trained --json=docs/records/NAME.json

The student has the shapes of Qwen2.5 0.5B, float32, AdamW, on text alone, 2 microbatches of 64
positions a device; layers are computed again. "State" is masters and moments, "arguments" what a
device holds of them and of the batch, "temporaries" what its step needs beside them.
Exit status: 0, or 2 for bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import optax

import kdjax
from kdjax.device.placement import Placement
from kdjax.device.sharding import count_bytes, make_mesh
from kdjax.errors import reporting
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, functional
from kdjax.training.pair import Vocabulary
from scripts.bench.synthetic import SHAPES, open_header

CHOICES = {
    "all": "",
    "the MLPs": "blocks/*/mlp",
    "attention": "blocks/*/attn",
    "norms": "*norm*",
    "layer 23": "blocks/23",
}
_COLUMNS = ("tokens", "labels", "segment_ids", "positions", "weights")


def measure(spec: ArchSpec, trainable: str, devices: int) -> dict[str, float]:
    """GB of a device: moments and masters, all arguments, temporaries."""
    mesh = make_mesh(-1, 1, 1, jax.devices()[:devices])
    placement = Placement.on(mesh)
    functions, shapes = functional(spec, Compute(remat="full", placement=placement))
    student = kdjax.Model(functions, shapes, spec.vocab_size, spec=spec, placement=placement)
    step = kdjax.make_step(
        student,
        None,
        kdjax.KDLoss(alpha=1),
        optax.adamw(1e-4),
        microbatches=2,
        chunk_tokens=64,
        vocabulary=Vocabulary(spec.vocab_size, spec.vocab_size),
        trainable=trainable,
    )
    rows = 2 * devices
    batch = {
        name: jax.ShapeDtypeStruct((rows, 64), "float32" if name == "weights" else "int32")
        for name in _COLUMNS
    }
    memory = step.jitted.lower(step.abstract, {}, batch).compile().memory_analysis()
    return {
        "state": count_bytes(step.abstract) / 1e9,
        "arguments": memory.argument_size_in_bytes / 1e9,
        "temporaries": memory.temp_size_in_bytes / 1e9,
    }


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file that keeps all figures")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 4)
    spec, found = open_header(SHAPES["0.5b"]).spec, []
    for devices in (1, 4):
        for name, trainable in CHOICES.items():
            figures = measure(spec, trainable, devices)
            found.append({"trainable": name, "devices": devices, **figures})
            shown = " | ".join(f"{x:.2f}" for x in figures.values())
            print(f"| {name} | {devices} | {shown} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"jax": jax.__version__, "found": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
