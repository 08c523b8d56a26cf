"""First measurement of rollouts of delta nets: before, after, a trace of each."""

import gc
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

BEGIN = time.monotonic()
from kdjax.models import decoding, kernels  # noqa: E402
from kdjax.models.model import load  # noqa: E402
from scripts.bench import rollouts  # noqa: E402
from scripts.bench.program import device_events  # noqa: E402
from scripts.bench.step import model_file  # noqa: E402

out = Path(os.environ["OUT"]) / "roll"
out.mkdir(parents=True, exist_ok=True)
tiny = "--tiny" in sys.argv
LIMIT = 185 if not tiny else 260
shape, slots = ("tiny-delta", 8) if tiny else ("qwen3.5-0.8b", 1024)
args = rollouts.arguments(
    [f"--shape={shape}", f"--slots={slots}", "--folder=/tmp/m"]
    + (["--prompts=24", "--prompt-tokens=10:20", "--answer-tokens=4:12"] if tiny else [])
)
found: dict = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}


def say(text):
    line = f"[{time.monotonic() - BEGIN:6.1f} s] {text}"
    print(line, flush=True)
    with (out / "table.txt").open("a") as file:
        file.write(line + "\n")


def phase(name, function, least=0.0):
    """Runs it if there are so many seconds left; what fails is written down."""
    left = LIMIT - (time.monotonic() - BEGIN)
    if left < least:
        return say(f"{name}: skipped, {left:.0f} s left")
    try:
        found[name] = function()
    except BaseException:
        found[name] = {"error": traceback.format_exc()}
        say(f"{name}: FAILED\n{traceback.format_exc()}")
    gc.collect()
    (out / "first.json").write_text(json.dumps(found, indent=1, default=str))


def table(call, folder, times):
    """A traced call: kernels by name, in ms a step."""
    with jax.profiler.trace(str(folder)):
        call()
    sums, raw, events = {}, {}, device_events(folder)
    for start, end, name in events:
        sums.setdefault(re.sub(r"[._]\d+$", "", name), []).append(end - start)
        raw.setdefault(name, []).append(end - start)
    rows = sorted(
        ((sum(v) / times / 1e6, len(v) / times, k) for k, v in sums.items()), reverse=True
    )
    each = sorted(((sum(v) / times / 1e6, len(v) / times, k) for k, v in raw.items()), reverse=True)
    if events:
        span = max(e for _, e, _ in events) - min(s for s, _, _ in events)
        say(f"span {span / times / 1e6:.3f} ms a step, busy {sum(r[0] for r in rows):.3f} ms")
    for ms, count, name in rows[:45]:
        say(f"   {ms:8.3f} ms {count:7.1f} x  {name[:100]}")
    return {"grouped": rows[:80], "each": each[:250]}


start = time.monotonic()
path = (
    model_file(shape, args.folder) if args.folder.mkdir(parents=True, exist_ok=True) is None else ""
)
say(f"file written in {time.monotonic() - start:.1f} s")
start = time.monotonic()
model = load(str(path), weights="dense")
real = model.real_vocab
say(f"loaded in {time.monotonic() - start:.1f} s; {found['device']}; {real} ids")


def full(name):
    start = time.monotonic()
    engine = rollouts.full_engine(model, args, slots)
    at = engine._slots.positions + 0

    def advance():
        engine._slots = engine._slots._replace(positions=at + 0)
        jax.block_until_ready(engine._advance().drawn.ids)

    advance()
    compiled = time.monotonic() - start
    step = rollouts.timed(advance, 4) / decoding.STEPS
    say(
        f"{name}: step {1e3 * step:.3f} ms, {slots / step:,.0f} tokens/s (ready in {compiled:.1f} s)"
    )
    result = {"step_ms": 1e3 * step, "tokens_per_s": slots / step, "compile_s": compiled}
    result["trace"] = table(advance, out / f"trace-{name}", decoding.STEPS)
    count, length = engine._at_once, 64 if tiny else 192
    whole = np.full(count, length, np.int32)
    prompts = decoding._Prompts(
        np.ones((count, length), np.int32),
        whole,
        np.arange(count, dtype=np.int32),
        whole,
        whole.astype(np.uint32),
    )

    def fill():
        engine._slots = decoding._fill(
            model.params, engine._weights, engine._slots, prompts, writer=engine._writer
        )
        jax.block_until_ready(engine._slots.last)

    start = time.monotonic()
    fill()
    compiled = time.monotonic() - start
    ms = 1e3 * rollouts.timed(fill, 4)
    say(f"{name}: a fill of {count} x {length}: {ms:.2f} ms (ready in {compiled:.1f} s)")
    result |= {"fill_ms": ms, "fill_compile_s": compiled}
    result["fill_trace"] = table(fill, out / f"trace-fill-{name}", 1)
    stats = jax.local_devices()[0].memory_stats() or {}
    result["peak_gb"] = stats.get("peak_bytes_in_use", 0) / 1e9
    say(f"{name}: peak {result['peak_gb']:.2f} GB")
    return result


def before():
    """As main has it: states written each step, rows placed by one scatter."""

    def place(at, kept, x):
        return kept.at[:, at, :, : x.shape[3]].set(x, mode="drop")

    jax.clear_caches()
    with (
        mock.patch.object(decoding, "write_late", lambda spec, cache, count: cache),
        mock.patch.object(decoding, "_place_rows", place),
    ):
        return full("before")


def after():
    jax.clear_caches()
    return full("after")


def queue():
    jax.clear_caches()
    return rollouts.sustained(model, args, slots)


def alone():
    """The kernel of a position alone, by its columns and warps, in ms a step of 18 layers."""
    layers, rows, heads, width, columns = (
        (18, 1024, 16, 128, 6144) if not tiny else (2, 4, 2, 16, 96)
    )
    result = {}
    interpret = jax.default_backend() != "gpu"
    for dtype in (jnp.float32, jnp.bfloat16):
        states = jnp.zeros((layers, rows, heads, width, width), dtype)
        inputs = jnp.zeros((layers, rows, 3, columns), jnp.bfloat16)
        news = kernels.News(
            *(jnp.zeros((layers, rows, heads, 8, width), jnp.float32) for _ in range(2)),
            jnp.zeros((layers, rows, heads, 8), jnp.float32),
            jnp.zeros((layers, rows, 8, columns), jnp.bfloat16),
        )
        for size, warps in ((128, 8), (64, 4), (32, 4), (128, 4)):
            if LIMIT - (time.monotonic() - BEGIN) < 90:
                return result
            size = min(size, width)
            with (
                mock.patch.object(kernels, "_NEWS_COLUMNS", size),
                mock.patch.object(kernels, "_NEWS_WARPS", warps),
            ):

                def run(states, inputs, news):
                    mixed = jnp.ones((rows, columns), jnp.bfloat16)
                    kernel = jnp.ones((columns, 4), jnp.float32)
                    decay = -jnp.ones((rows, heads), jnp.float32)
                    alive = jnp.ones((rows,), bool)

                    def step(carry, i):
                        inputs, states, news = carry
                        _, *carry = kernels.read_with_news(
                            mixed,
                            kernel,
                            decay,
                            -decay,
                            alive,
                            inputs,
                            states,
                            news,
                            i % layers,
                            i // layers,
                            interpret,
                        )
                        return tuple(carry), None

                    carry = inputs, states, news
                    steps = jnp.arange((8 if not tiny else 1) * layers, dtype=jnp.int32)
                    return jax.lax.scan(step, carry, steps)[0]

                jitted = jax.jit(run, donate_argnums=(0, 1, 2))
                best = []
                for _ in range(3):
                    start = time.perf_counter()
                    inputs, states, news = jax.block_until_ready(jitted(states, inputs, news))
                    best.append(time.perf_counter() - start)
                ms = 1e3 * min(best[1:]) / 8
                result[f"{jnp.dtype(dtype).name} {size} {warps}"] = ms
                say(
                    f"kernel alone, {jnp.dtype(dtype).name}, {size} columns, {warps} warps: {ms:.3f} ms"
                )
        del states, inputs, news
    return result


phase("after", after)
phase("alone", alone, 70)
phase("before", before, 60)
phase("queue", queue, 60 if not tiny else 0)
if isinstance(found.get("queue"), dict) and "tokens_per_s" in found["queue"]:
    say(f"queue: {found['queue']}")
say("end")
