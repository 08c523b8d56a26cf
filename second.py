"""Final measurement of rollouts of delta nets, before and after, in one process of <= 150 s."""

import contextlib
import gc
import json
import os
import re
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

BEGIN = time.monotonic()
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from kdjax.models import decoding, delta, kernels  # noqa: E402
from kdjax.models.model import load  # noqa: E402
from scripts.bench import rollouts  # noqa: E402
from scripts.bench.program import device_events  # noqa: E402
from scripts.bench.step import model_file  # noqa: E402

out = Path(os.environ["OUT"]) / "roll"
out.mkdir(parents=True, exist_ok=True)
tiny = "--tiny" in sys.argv
LIMIT = 146 if not tiny else 500
shape, slots = ("tiny-delta", 8) if tiny else ("qwen3.5-0.8b", 1024)
few = slots // 4
args = rollouts.arguments(
    [f"--shape={shape}", f"--slots={slots}", "--folder=/tmp/m"]
    + (["--prompts=24", "--prompt-tokens=10:20", "--answer-tokens=4:12"] if tiny else [])
)
LENGTHS = (64,) if tiny else (128, 192, 256)
found: dict = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}
pool = ThreadPoolExecutor(12)
real_advance, real_fill = decoding._advance, decoding._fill
ready: dict = {}


def left():
    return LIMIT - (time.monotonic() - BEGIN)


def say(text):
    line = f"[{time.monotonic() - BEGIN:6.1f} s] {text}"
    print(line, flush=True)
    with (out / "table2.txt").open("a") as file:
        file.write(line + "\n")


def keep():
    (out / "second.json").write_text(json.dumps(found, indent=1, default=str))


def attempt(name, function):
    try:
        found.setdefault(name, {}).update(function())
    except BaseException:
        found.setdefault(name, {})["error"] = traceback.format_exc()
        say(f"{name}: FAILED\n{traceback.format_exc()}")
    gc.collect()
    keep()


def table(call, folder, times, rows_shown=30):
    with jax.profiler.trace(str(folder)):
        call()
    sums, events = {}, device_events(Path(folder))
    for start, end, name in events:
        sums.setdefault(re.sub(r"[._]\d+$", "", name), []).append(end - start)
    rows = sorted(
        ((sum(v) / times / 1e6, len(v) / times, k) for k, v in sums.items()), reverse=True
    )
    if events:
        span = max(e for _, e, _ in events) - min(s for s, _, _ in events)
        say(f"span {span / times / 1e6:.3f} ms, busy {sum(r[0] for r in rows):.3f} ms")
    for ms, count, name in rows[:rows_shown]:
        say(f"   {ms:8.3f} ms {count:7.1f} x  {name[:90]}")
    return rows[:60]


def dispatch(kind, original, place):
    """The program that was compiled before for these shapes, or the jitted function."""

    def call(params, weights, slots, *rest, **static):
        key = (kind, len(slots.last), rest[0].tokens.shape[1] if kind == "fill" else 0)
        compiled = ready.get(key)
        if compiled is not None:
            try:
                return compiled(params, weights, slots, *rest)
            except (TypeError, ValueError) as error:
                say(f"{key}: not as compiled: {str(error)[:300]}")
                ready.pop(key)
        return original(params, weights, slots, *rest, **static)

    call.lower = original.lower
    return call


def prompts_of(count, length):
    whole = np.full(count, length, np.int32)
    return decoding._Prompts(
        np.ones((count, length), np.int32),
        whole,
        np.arange(count, dtype=np.int32),
        whole,
        whole.astype(np.uint32),
    )


def compile_all(engine):
    """All programs of a queue at once: lowered one by one, compiled side by side."""
    begun, jobs = time.monotonic(), {}
    of = (
        lambda x, axis: jax.ShapeDtypeStruct(  # noqa: E731
            (*x.shape[:axis], few, *x.shape[axis + 1 :]), x.dtype, sharding=x.sharding
        )
    )
    less = engine._slots._replace(
        cache=jax.tree.map(lambda x: of(x, 1), engine._slots.cache),
        **{n: of(getattr(engine._slots, n), 0) for n in engine._slots._fields[1:]},
    )
    static = dict(writer=engine._writer, sampling=engine._sampling)
    for state in (engine._slots, less):
        count = len(state.last) if hasattr(state.last, "__len__") else state.last.shape[0]
        state = engine._weights, state, engine._seed, np.zeros(count, bool)
        lowered = real_advance.lower(engine._params, *state, **static)
        jobs["advance", count, 0] = pool.submit(lowered.compile)
    for length in LENGTHS:
        given = prompts_of(engine._at_once, length)
        lowered = real_fill.lower(
            engine._params, engine._weights, engine._slots, given, writer=engine._writer
        )
        jobs["fill", slots, length] = pool.submit(lowered.compile)
    lowered = time.monotonic() - begun
    for key, job in jobs.items():
        try:
            ready[key] = job.result()
        except Exception as error:
            say(f"{key}: {str(error)[:300]}")
    say(
        f"{len(ready)} programs lowered in {lowered:.1f} s, compiled in {time.monotonic() - begun:.1f} s"
    )


def full(name):
    engine = rollouts.full_engine(model, args, slots)
    where = engine._slots.cache.k.sharding
    engine._slots = jax.tree.map(lambda x: jax.device_put(x, where), engine._slots)
    compile_all(engine)
    at = engine._slots.positions + 0

    def advance():
        engine._slots = engine._slots._replace(positions=at + 0)
        jax.block_until_ready(engine._advance().drawn.ids)

    step = rollouts.timed(advance, 5) / decoding.STEPS
    say(f"{name}: step {1e3 * step:.3f} ms, {slots / step:,.0f} tokens/s")
    result = {"step_ms": 1e3 * step, "full_tokens_per_s": slots / step}
    found[name] = dict(result)
    result["trace"] = table(advance, f"/tmp/trace-{name}", decoding.STEPS)
    given = prompts_of(engine._at_once, LENGTHS[-1 if tiny else 1])

    def fill():
        engine._slots = decoding._fill(
            model.params, engine._weights, engine._slots, given, writer=engine._writer
        )
        jax.block_until_ready(engine._slots.last)

    ms = 1e3 * rollouts.timed(fill, 3)
    say(f"{name}: a fill of {engine._at_once} x {given.tokens.shape[1]}: {ms:.2f} ms")
    result["fill_ms"] = ms
    result["fill_trace"] = table(fill, f"/tmp/trace-fill-{name}", 1, 16)
    stats = jax.local_devices()[0].memory_stats() or {}
    result["peak_gb"] = stats.get("peak_bytes_in_use", 0) / 1e9
    return result


def queue(name):
    result = rollouts.sustained(model, args, slots)
    say(f"{name}: queue {result['tokens_per_s']:,.0f} tokens/s, {result['seconds']:.2f} s")
    return {
        "queue_tokens": result["tokens"],
        "queue_s": result["seconds"],
        "queue_tokens_per_s": result["tokens_per_s"],
    }


def measure(name, patches, queue_least):
    jax.clear_caches()
    ready.clear()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(
            mock.patch.object(decoding, "_advance", dispatch("advance", real_advance, 1))
        )
        if tiny:
            stack.enter_context(mock.patch.object(decoding, "_advance_on_cpu", decoding._advance))
        stack.enter_context(mock.patch.object(decoding, "_fill", dispatch("fill", real_fill, 3)))
        attempt(name, lambda: full(name))
        if left() > queue_least:
            attempt(name, lambda: queue(name))
        else:
            say(f"{name}: no queue, {left():.0f} s left")


def old_place(at, kept, x):
    return kept.at[:, at, :, : x.shape[3]].set(x, mode="drop")


def alone():
    """The kernel of runs alone, ms of a layer of 32 x 192, by columns and warps."""
    rows, length, heads, width = (32, 192, 16, 128) if not tiny else (2, 4, 2, 16)
    interpret = jax.default_backend() != "gpu"
    normal = np.random.default_rng(0).normal
    q = jnp.asarray(normal(size=(rows, length, heads, width)) * 0.09, jnp.float32)
    v = q.astype(jnp.bfloat16)
    kept = jnp.full((rows, length, heads), 0.9, jnp.float32)
    result = {}
    for size, warps in ((16, 2), (32, 4), (8, 1), (16, 1)):
        with (
            mock.patch.object(kernels, "_RUN_COLUMNS", size),
            mock.patch.object(kernels, "_RUN_WARPS", warps),
        ):
            run = jax.jit(lambda q, v, kept: kernels.recur(q, q, v, kept, kept, interpret))
            ms = 1e3 * rollouts.timed(lambda: jax.block_until_ready(run(q, v, kept)), 5)  # noqa: B023
        result[f"{size} {warps}"] = ms
        say(f"positions one after the other, {size} columns, {warps} warps: {ms:.3f} ms a layer")
    return result


path = (
    model_file(shape, args.folder) if args.folder.mkdir(parents=True, exist_ok=True) is None else ""
)
model = load(str(path), weights="dense")
# Ids of all rows of the head: the tokenizer of a random file names 305 of them.
model = model.replace(checkpoint=None)
say(f"loaded; {found['device']}; {model.real_vocab} ids")
attempt("alone", alone)
times = {k: v for k, v in found["alone"].items() if k != "error"}
patches = []
if times:
    best = min(times, key=lambda k: times[k])
    columns, warps = map(int, best.split())
    patches = [
        mock.patch.object(kernels, "_RUN_COLUMNS", columns),
        mock.patch.object(kernels, "_RUN_WARPS", warps),
    ]
if not times or (min(times.values()) > 0.75 and not tiny):
    patches = [mock.patch.object(delta, "_MANY", 2**60)]
found["chosen"] = best if times else ""
say(f"chosen: {found['chosen']}, by positions: {bool(times and (min(times.values()) <= 0.75))}")
measure("after", patches, 30)
if left() > 20:
    old = [
        mock.patch.object(decoding, "write_late", lambda spec, cache, count: cache),
        mock.patch.object(decoding, "_place_rows", old_place),
        mock.patch.object(delta, "_MANY", 2**60),
    ]
    measure("before", old, 38)
say("end")
os._exit(0)
