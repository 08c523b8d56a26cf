"""Times generation by the engine: tokens a second sustained, what a step costs, and the peer.

    python -m scripts.bench.rollouts --shape=0.5b --slots=1024 --prompts=8192
    python -m scripts.bench.rollouts --shape=7b --weights=packed --slots=512 --parts
    python -m scripts.bench.rollouts --shape=0.5b --peer --slots=128,512,1024

Random weights of a known shape, random prompts, answers whose lengths are drawn at random and
imposed (`limits`): every slot is refilled as its row ends, and the last rows finish among empty
slots. `full` is the rate of calls whose slots are all taken, positions as in the middle of a run.
All rows of the head are ids: the tokenizer of a random file names a few hundred, and draws would
read no others. `--trace=DIR` also profiles such a call and prints its kernels.

The peer is Transformers' `generate` in bf16 with SDPA: one batch, prompts of one length, answers of
one length, which spares it the padding and the waiting.
"""

# pyright: reportMissingImports=false

import argparse
import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.models import decoding
from kdjax.models.kernels import cached_attention
from kdjax.models.model import Model, load
from scripts.bench.peer import build
from scripts.bench.program import device_events
from scripts.bench.step import SHAPES, describe_model, model_file, spec_of

_CALLS = 5  # timed, after one more


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times generation.")
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/bench"), help="for model files")
    add("--shape", default="0.5b", help="a known shape, or a file")
    add("--weights", default="dense")
    add("--dtype", default="bfloat16")
    add("--slots", default="1024", metavar="128,1024")
    add("--prompts", type=int, default=4096)
    add("--prompt-tokens", default="100:200")
    add("--answer-tokens", default="16:512")
    add("--temperature", type=float, default=1.0)
    add("--top-p", type=float, default=1.0)
    add("--parts", action="store_true", help="also what a step costs, part by part")
    add("--trace", type=Path, metavar="DIR", help="also a profile of a full call, and its kernels")
    add("--peer", action="store_true", help="Transformers instead")
    add("--json", type=Path, help="where to write the figures")
    return parser.parse_args(argv)


def ends(text: str) -> tuple[int, int]:
    """The two ends of a range of lengths."""
    least, most = map(int, text.split(":"))
    return least, most


def drawn(text: str, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths between two, both included."""
    least, most = ends(text)
    return rng.integers(least, most + 1, count).tolist()


def timed(call: Callable[[], Any], calls: int = _CALLS) -> float:
    """Median seconds of a call that waits for its result, after one more."""
    call()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def sampling_of(args: argparse.Namespace) -> decoding.Sampling:
    longest = ends(args.answer_tokens)[1]
    return decoding.Sampling(longest, args.temperature, args.top_p)


def sustained(model: Model, args: argparse.Namespace, slots: int) -> dict[str, Any]:
    """The whole of a queue, from the first prompt's reading to the last id."""
    rng = np.random.default_rng(0)
    vocab = model.real_vocab
    lengths = drawn(args.prompt_tokens, args.prompts, rng)
    prompts = [rng.integers(0, vocab, n).tolist() for n in lengths]
    limits = drawn(args.answer_tokens, args.prompts, rng)
    generate = functools.partial(model.generate, sampling=sampling_of(args), batch_size=slots)
    few = [*prompts[:: max(1, len(prompts) // slots)], max(prompts, key=len)]
    # Compiles what the run will need: also fewer slots, once all rows but one have ended.
    generate(few, limits=[1] * (len(few) - 1) + [max(limits)])
    start = time.perf_counter()
    answers = generate(prompts, limits=limits)
    seconds = time.perf_counter() - start
    tokens = sum(len(answer.ids) for answer in answers)
    assert tokens == sum(limits)
    return dict(tokens=tokens, seconds=seconds, tokens_per_s=tokens / seconds)


def full_engine(model: Model, args: argparse.Namespace, slots: int) -> Any:
    """An engine all of whose slots are taken by rows in the middle of their answers."""
    rng = np.random.default_rng(1)
    sampling = sampling_of(args)
    lengths = drawn(args.prompt_tokens, slots, rng)
    rows = [
        decoding.Row(np.ones(n, np.int32), sampling.max_tokens, i, sampling, None)
        for i, n in enumerate(lengths)
    ]
    engine = decoding._Engine(model.as_writer("write"), model.params, rows, sampling, slots)
    # Of a row in flight, half of an answer is written on average, and long ones are met more often.
    limits = np.asarray(drawn(args.answer_tokens, 16 * slots, rng))
    met = rng.choice(limits, slots, p=limits / limits.sum())
    positions = np.asarray(lengths) + (met * rng.random(slots)).astype(int)
    engine._slots = engine._slots._replace(
        positions=jnp.asarray(positions, jnp.int32),
        limits=jnp.full((slots,), 2**30, jnp.int32),
        done=jnp.zeros((slots,), bool),
    )
    return engine


def full(model: Model, args: argparse.Namespace, slots: int) -> dict[str, Any]:
    """A step with all slots taken, and its parts."""
    engine = full_engine(model, args, slots)
    start = engine._slots.positions + 0

    def advance() -> None:
        engine._slots = engine._slots._replace(positions=start + 0)
        jax.block_until_ready(engine._advance().drawn.ids)

    step = timed(advance) / decoding.STEPS
    found = dict(full_tokens_per_s=slots / step, step_ms=1e3 * step)
    if args.trace:
        trace(advance, args.trace / f"{slots}-slots", decoding.STEPS)
    if args.parts:
        found |= parts(model, engine, slots)
    return found


def trace(call: Callable[[], Any], folder: Path, times: int) -> list[tuple[str, float, float]]:
    """Profiles a call of so many steps; prints and returns a step's kernels: name, ms, count.

    Kernels whose names differ in their numbers only are one line. Nothing on a CPU.
    """
    with jax.profiler.trace(str(folder)):
        call()
    sums: dict[str, list[float]] = {}
    for start, end, name in device_events(folder):
        sums.setdefault(re.sub(r"[._]\d+$", "", name), []).append(end - start)
    rows = [(name, sum(ns) / times / 1e6, len(ns) / times) for name, ns in sums.items()]
    rows.sort(key=lambda row: -row[1])
    for name, ms, count in [*rows[:40], ("all", sum(r[1] for r in rows), sum(r[2] for r in rows))]:
        print(f"{ms:9.3f} ms {count:8.1f} x  {name[:90]}", flush=True)
    return rows


def repeated(function: Callable[..., Any], *arrays: Any, count: int = 20) -> float:
    """Milliseconds of `function(x, *arrays)`, in a loop on the device that waits for each."""

    @jax.jit
    def run(*arrays: Any) -> Any:
        def one(x: Any, _: None) -> Any:
            y = jax.tree.leaves(function(x, *arrays))[0]
            return x * 0.5 + y.reshape(-1)[0].astype(x.dtype) * 1e-9, None

        return jax.lax.scan(one, jnp.float32(0), None, length=count)[0]

    return 1e3 * timed(lambda: jax.block_until_ready(run(*arrays))) / count


def parts(model: Model, engine: Any, slots: int) -> dict[str, float]:
    """Milliseconds of the head's product, of the draw, of attention, and of reading prompts."""
    functions: Any = model.functions
    spec, dtype = functions.spec, functions.compute.dtype
    rng, real = np.random.default_rng(2), model.real_vocab
    hidden = jnp.asarray(rng.normal(size=(slots, spec.hidden_size)), dtype)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(slots))
    sampling, head = engine._sampling, engine._weights[1]
    by_kernel = model.placement is not None and model.placement.kernels

    def product(x: Any, hidden: Any, head: Any) -> Any:
        hidden = hidden + x.astype(hidden.dtype)
        return jnp.einsum("BD,VD->BV", hidden, head, preferred_element_type=jnp.float32)

    def draw(x: Any, hidden: Any, head: Any, keys: Any) -> Any:
        return decoding.pick(product(x, hidden, head), keys, sampling, real, kernel=by_kernel)

    found = {"head_ms": repeated(product, hidden, head)}
    found["head_and_draw_ms"] = repeated(draw, hidden, head, keys)
    if by_kernel:
        found["attention_ms"] = attention(engine, spec, dtype, slots)
    at_once = engine._at_once
    longest = max(len(row.prompt) for row in engine._rows)
    length = decoding.pad_length(longest, engine._capacity)
    whole = np.full(at_once, length, np.int32)
    prompts = decoding._Prompts(
        np.ones((at_once, length), np.int32),
        whole,
        np.arange(at_once, dtype=np.int32),
        whole,
        whole.astype(np.uint32),
    )

    def fill() -> None:
        engine._slots = decoding._fill(
            model.params, engine._weights, engine._slots, prompts, writer=engine._writer
        )
        jax.block_until_ready(engine._slots.last)

    return found | {f"read_{at_once}_prompts_of_{length}_ms": 1e3 * timed(fill)}


def attention(engine: Any, spec: Any, dtype: Any, slots: int) -> float:
    """Milliseconds of the kernel over the engine's cache, all layers that have one."""
    heads, groups = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    q = jnp.ones((slots, heads, groups, spec.head_dim), dtype)
    new = jnp.ones((slots, heads, 1, spec.head_dim), dtype)
    layers = engine._slots.cache.k.shape[0]
    count = 2 * layers

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache: Any, positions: Any) -> Any:
        def one(cache: Any, index: Any) -> Any:
            layer, seen = index % layers, jnp.int32(cache.k.shape[3])
            out, keys, values = cached_attention.attend_and_keep(
                q, new, new, cache.k, cache.v, layer, positions, seen, scale=0.1
            )
            return type(cache)(keys, values), out[0, 0, 0, 0]

        return jax.lax.scan(one, cache, jnp.arange(count, dtype=jnp.int32))

    def call() -> None:
        slots = engine._slots
        cache, out = run(slots.cache, slots.positions)
        engine._slots = slots._replace(cache=cache)
        jax.block_until_ready(out)

    return 1e3 * timed(call) / 2


def peer(args: argparse.Namespace, rows: int, device: str = "cuda") -> dict[str, Any]:
    """Transformers' `generate`: prompts of 128, 128 new ids, prompts' reading included."""
    import torch

    spec = spec_of(model_file(args.shape, args.folder))
    model = build(
        describe_model(model_file(args.shape, args.folder)), torch.bfloat16, device
    ).eval()
    prompts = torch.randint(0, spec.vocab_size, (rows, 128), device=device)

    def generate() -> None:
        with torch.inference_mode():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                min_new_tokens=128,
                max_new_tokens=128,
                pad_token_id=0,
            )
        assert out.shape[1] == 256

    seconds = timed(generate, calls=1)
    return dict(tokens=128 * rows, seconds=seconds, tokens_per_s=128 * rows / seconds)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    model = None
    if not args.peer:
        path = str(model_file(args.shape, args.folder))
        model = load(path, weights=args.weights, dtype=args.dtype)
        model = model.replace(checkpoint=None) if args.shape in SHAPES else model
    who = "Transformers" if args.peer else f"kdjax {args.weights}"
    for slots in map(int, args.slots.split(",")):
        row = dict(who=who, shape=args.shape, slots=slots)
        rows.append(row)
        measures = (
            [functools.partial(peer, args, slots)]
            if model is None
            else [functools.partial(f, model, args, slots) for f in (sustained, full)]
        )
        for measure in measures:
            found = measure()
            row |= found
            figures = "; ".join(
                f"{name} {x:,.2f}" if x < 1e3 else f"{name} {x:,.0f}" for name, x in found.items()
            )
            print(f"{who}, {args.shape}, {slots} slots: {figures}", flush=True)
            if args.json:  # now, so that a command that is cut short keeps what it measured
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
