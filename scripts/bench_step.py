"""Times the training step on random tokens: one line a variant, side by side in one process.

    python scripts/bench_step.py --folder=/tmp/m --variants=q4k,dequant --rows=8 --length=2048

Models are random Q4_K_M files of the given shapes, made in the folder if they are not there. Peaks
are those of the whole process so far, so name the leanest variant first.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

from kdjax import runtime


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the training step.")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="for model files")
    parser.add_argument("--teacher", default="7b", help="a known shape, or a file")
    parser.add_argument("--student", default="0.5b")
    parser.add_argument("--variants", default="q4k,dequant", help="teacher backends, joined by ,")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--segments", type=int, default=8, help="documents a row")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=12, help="timed ones, after three more")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


def table_of(shape: str, folder: Path):
    from kdjax.formats import open_table
    from kdjax.formats.synthetic import QWEN25_SHAPES, write_random_gguf

    path = folder / f"{shape}.gguf" if shape in QWEN25_SHAPES else Path(shape)
    if not path.exists():
        write_random_gguf(path, QWEN25_SHAPES[shape])
    return open_table(path)


def random_batch(args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Rows of `segments` documents with random cuts, every position trained."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = args.rows, args.length
    cuts = np.sort(rng.integers(1, args.length, (args.rows, args.segments - 1)), axis=1)
    at = np.arange(args.length)
    segments = 1 + (at[None, None] >= cuts[:, :, None]).sum(axis=1)
    starts = np.take_along_axis(np.pad(cuts, ((0, 0), (1, 0))), segments - 1, axis=1)
    columns = {
        "tokens": rng.integers(0, vocab_size, shape),
        "labels": rng.integers(0, vocab_size, shape),
        "segment_ids": segments,
        "positions": at[None] - starts,
    }
    batch: dict[str, Any] = {name: column.astype(np.int32) for name, column in columns.items()}
    return batch | {"weights": np.ones(shape, np.float32)}


def measure(backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """Builds, compiles and runs one variant; returns its figures."""
    import jax
    import jax.numpy as jnp

    from kdjax import sharding, step
    from kdjax.head import HeadSpec
    from kdjax.models.arch import spec_from_table
    from kdjax.models.decoder import Compute, functional, initialise
    from kdjax.optim import OptimSpec, optimizer, schedule
    from kdjax.teacher import PROVIDERS, truncated

    mesh = sharding.make_mesh(-1, 1, 1)
    tables = table_of(args.teacher, args.folder), table_of(args.student, args.folder)
    teacher_spec, student_spec = map(spec_from_table, tables)
    student_spec = dataclasses.replace(student_spec, tied=True)
    shared: dict[str, Any] = dict(dtype=jnp.dtype(args.dtype), max_segments=args.segments)
    start = time.perf_counter()
    frozen = Compute(param_dtype=jnp.bfloat16, **shared)
    provider = PROVIDERS[backend](tables[0], teacher_spec, frozen, mesh)
    provider = truncated(provider, student_spec.vocab_size)
    jax.block_until_ready(provider.params)
    loaded = time.perf_counter() - start
    apply, shapes = functional(student_spec, Compute(remat=args.remat, **shared))
    optim = OptimSpec(1.5e-5, 5e-7, 20, 1000, 0.01, 0.9, 0.95, 1e-8, 1.0)
    head = HeadSpec(args.temperature, 0.3, student_spec.vocab_size, student_spec.vocab_size - 271 if
                    student_spec.vocab_size > 1000 else student_spec.vocab_size,
                    args.chunk_tokens)  # fmt: skip
    tx = optimizer(optim)
    spec = step.StepSpec(apply, provider.apply, head, tx, schedule(optim), args.microbatches)
    abstract = jax.eval_shape(functools.partial(step.init_state, tx=tx), shapes)
    shardings = step.state_shardings(abstract, tx, mesh)
    begin = lambda: step.init_state(initialise(student_spec, Compute(), 0), tx)  # noqa: E731
    state = jax.jit(begin, out_shardings=shardings)()
    batch = sharding.put_batch(random_batch(args, head.real_vocab), mesh)
    start = time.perf_counter()
    train_step, eval_step = step.compile_steps(spec, shardings, mesh)
    compiled = train_step.lower(state, provider.params, batch).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    evaluation = eval_step.lower(state.params, provider.params, batch).compile().memory_analysis()
    times = []
    for _ in range(args.steps + 3):
        start = time.perf_counter()
        state, metrics = compiled(state, provider.params, batch)
        loss = float(metrics["loss"] / metrics["count"])
        times.append(time.perf_counter() - start)
    median = sorted(times[3:])[args.steps // 2]
    tokens = args.rows * args.length
    flops = teacher_spec.forward_flops(args.length) + 3 * student_spec.forward_flops(args.length)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "variant": backend,
        "step_ms": median * 1e3,
        "spread_ms": (max(times[3:]) - min(times[3:])) * 1e3,
        "tokens_per_s": tokens / median,
        "tflops": flops * tokens / median / 1e12,
        "teacher_gb": provider.info.resident_bytes / 1e9,
        "arguments_gb": memory.argument_size_in_bytes / 1e9,
        "temporaries_gb": memory.temp_size_in_bytes / 1e9,
        "evaluation_temporaries_gb": evaluation.temp_size_in_bytes / 1e9,
        "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
        "load_s": loaded,
        "compile_s": seconds,
        "loss": loss,
    }


def main() -> None:
    args = arguments()
    runtime.configure()
    devices = runtime.device_summary()
    print(devices, flush=True)
    rows = []
    for variant in args.variants.split(","):
        rows.append(measure(variant, args))
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else v for k, v in rows[-1].items()),
              flush=True)  # fmt: skip
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items()}
        document = {"devices": str(devices), "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
