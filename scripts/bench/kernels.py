"""Times kernels against their definitions in plain JAX and against what JAX ships.

    python -m scripts.bench.kernels --json=kernels.json
    python -m scripts.bench.kernels --only=float8,experts

A case has several forms: a kernel, the lines that define it as XLA compiles them, and others of
JAX; forward alone or with gradients. The figure is the median of `--groups` groups of `--calls`
calls, of which the last is waited for. `error` is the distance from the definition in float32,
relative to its norm. A form that does not compile is reported with its message, and the others run.
`GB/s` counts each input and output once, which is the least that a case moves.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kdjax.losses import kd
from kdjax.models import attention, decoding, delta, experts, weights
from kdjax.models.decoder import RMSNorm
from kdjax.models.experts import Choice
from kdjax.models.kernels import convolution, softmax

Function = Callable[..., Any]


class Case(NamedTuple):
    """A computation in several forms, all of the same arguments."""

    name: str
    forms: dict[str, Function]  # "plain" is the definition
    arguments: tuple[Any, ...]


def draw(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    """Draws normal numbers."""
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def with_gradients(case: Case, arguments: int) -> Case:
    """The gradients of the squared outputs' mean by the first arguments."""

    def differentiate(function: Function) -> Function:
        def loss(*inputs: Any) -> jax.Array:
            leaves = jax.tree.leaves(function(*inputs))
            return jnp.stack([jnp.mean(x.astype(jnp.float32) ** 2) for x in leaves]).sum()

        return jax.grad(loss, argnums=tuple(range(arguments)))

    forms = {name: differentiate(form) for name, form in case.forms.items()}
    return Case(f"{case.name}, gradients", forms, case.arguments)


def make_float8(rows: int, width: int, inner: int) -> list[Case]:
    """An MLP in float8, its norm included, and the rounding of its gated product alone."""
    norm = RMSNorm(width, 1e-6, jnp.bfloat16)
    norm.weight = nnx.Param(1 + draw(0, width, scale=0.1))
    shapes = (inner, width), (inner, width), (width, inner)
    matrices = [
        weights.Scaled(*weights.quantize_rows(draw(1 + i, *shape, scale=0.02)))
        for i, shape in enumerate(shapes)
    ]
    x, gate, up = draw(4, rows, width), draw(5, rows, inner), draw(6, rows, inner)

    def fit(kernels: bool) -> list[weights.Scaled]:
        return [dataclasses.replace(w, kernels=kernels) for w in matrices]

    def apply_mlp(kernels: bool, x: jax.Array) -> jax.Array:
        gate, up, down = fit(kernels)
        normal = weights.round_for(norm(x), gate)
        return x + weights.project(weights.gate_rows(normal, gate, up, jax.nn.silu), down)

    def apply_gate(kernels: bool, gate: jax.Array, up: jax.Array) -> jax.Array:
        ones = jnp.ones(rows, jnp.float32), *(jnp.ones(inner, jnp.float32),) * 2
        if kernels:
            values, scale = weights.swiglu.gate_and_round(gate, up, *ones)
        else:
            product = jax.lax.optimization_barrier(jax.nn.silu(gate) * up)
            values, scale = weights.quantize_rows(product)
        return values.astype(jnp.float32) * scale[:, None]

    def forms(function: Function) -> dict[str, Function]:
        return {n: functools.partial(function, n == "kernel") for n in ("kernel", "plain")}

    return [
        Case(f"float8 gate [{rows}, {inner}]", forms(apply_gate), (gate, up)),
        Case(f"float8 MLP [{rows}, {width}, {inner}]", forms(apply_mlp), (x,)),
    ]


def make_experts(rows: int, width: int, inner: int, count: int, used: int) -> list[Case]:
    """A layer of experts: kernels of tiles, and products of groups as JAX ships them."""
    x = draw(0, rows, width)
    gate, up = (draw(n, count, inner, width, scale=width**-0.5) for n in (1, 2))
    down = draw(3, count, width, inner, scale=inner**-0.5)
    router = draw(4, count, width, dtype=jnp.float32, scale=width**-0.5)
    choice = jax.jit(functools.partial(experts.choose_experts, used=used, normalised=True))

    def sort(product: Function, x: jax.Array, *matrices: jax.Array) -> jax.Array:
        chosen, (gate, up, down) = Choice(*matrices[:2]), matrices[2:]
        flat = chosen.experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
        taken = x[order // used]
        hidden = jax.nn.silu(product(taken, gate, sizes)) * product(taken, up, sizes)
        y = product(hidden, down, sizes) * chosen.weights.reshape(-1)[order][:, None]
        total = jnp.zeros(x.shape, jnp.float32).at[order // used].add(y.astype(jnp.float32))
        return total.astype(x.dtype)

    def by_mosaic(x: jax.Array, weight: jax.Array, sizes: jax.Array, tile: int) -> jax.Array:
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

        blocks: Any = dict(block_m=tile, block_n=128, block_k=64, grid_block_n=1)
        blocks |= dict(max_concurrent_steps=4, transpose_rhs=True)
        return ragged_dot_mgpu.ragged_dot(x, weight, group_sizes=sizes, **blocks)

    def by_jax(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, weight.swapaxes(1, 2), sizes)

    def mix(function: Function, x: jax.Array, *rest: jax.Array) -> jax.Array:
        return function(x, Choice(*rest[:2]), *rest[2:], jax.nn.silu)

    forms = {
        "kernel": functools.partial(mix, experts.mix_experts_by_tiles),
        "plain": functools.partial(mix, experts.mix_experts),
        "ragged_dot": functools.partial(sort, by_jax),
        "mosaic 64": functools.partial(sort, functools.partial(by_mosaic, tile=64)),
        "mosaic 128": functools.partial(sort, functools.partial(by_mosaic, tile=128)),
    }
    name = f"experts [{rows}, {width}], {used} of {count} of {inner}"
    return [Case(name, forms, (x, *choice(x, router), gate, up, down))]


def make_softmax(rows: int, vocab: int) -> list[Case]:
    """Sums of two models' logits, and of blocks of one's."""
    both = draw(0, rows, vocab, dtype=jnp.float32), draw(1, rows, vocab, dtype=jnp.float32)
    real = vocab - vocab // 500
    of_pair: dict[str, Function] = {
        "kernel": lambda s, t: softmax.softmax_sums(s, t, 2.0, real),
        "plain": lambda s, t: kd.softmax_sums(s, t, 2.0, real),
    }
    of_one: dict[str, Function] = {
        name: functools.partial(function, least=None, blocks=64, temperature=1.0, real=real)
        for name, function in (("kernel", softmax.sum_blocks), ("plain", decoding.sum_blocks))
    }
    return [
        Case(f"softmax sums of two [{rows}, {vocab}]", of_pair, both),
        Case(f"softmax sums of blocks [{rows}, {vocab}]", of_one, both[:1]),
    ]


def make_cache(slots: int, rows: int, heads: int, group: int, width: int) -> list[Case]:
    """Attention of one new position a row over a cache that is half full."""
    q = draw(0, rows, 1, heads * group, width)
    k, v = (draw(n, rows, 1, heads, width) for n in (1, 2))
    cache = tuple(draw(n, 1, rows, heads, slots, width) for n in (3, 4))
    at = jnp.full((rows,), slots // 2, jnp.int32)

    def attend(kernel: bool, q: jax.Array, k: jax.Array, v: jax.Array, *cache: jax.Array) -> Any:
        return attention.attend_and_keep(q, k, v, cache, jnp.int32(0), at, kernel=kernel)[0]  # type: ignore[arg-type]

    forms = {"kernel": functools.partial(attend, True), "plain": functools.partial(attend, False)}
    name = f"attention over a cache [{rows}, {heads}, {group}, {slots}, {width}]"
    return [Case(name, forms, (q, k, v, *cache))]


def make_delta(rows: int, length: int, groups: int, heads: int, width: int) -> list[Case]:
    """The gated delta rule of heads of `width` columns, and the convolution that makes them."""
    q, k = (delta.normalize_heads(draw(n, rows, length, groups, width)) for n in (0, 1))
    v = draw(2, rows, length, heads, width)
    decay = -jax.nn.softplus(draw(3, rows, length, heads, dtype=jnp.float32))
    beta = jax.nn.sigmoid(draw(4, rows, length, heads, dtype=jnp.float32))
    ids = jnp.ones((rows, length), jnp.int32)
    columns = (2 * groups + heads) * width

    def apply(in_kernels: bool, *inputs: Any) -> jax.Array:
        return delta.apply_delta_rule(*inputs, ids, in_kernels=in_kernels)[0]  # type: ignore[call-arg]

    def make(function: Function, mixed: jax.Array, kernel: jax.Array) -> Any:
        return function(mixed, kernel, ids, groups, width, heads)

    rule = Case(
        f"delta rule [{rows}, {length}, {heads}, {width}]",
        {"kernel": functools.partial(apply, True), "plain": functools.partial(apply, False)},
        (q * width**-0.5, k, v, decay, beta),
    )
    heads_of = Case(
        f"delta convolution [{rows}, {length}, {columns}]",
        {
            "kernel": functools.partial(make, convolution.make_heads),
            "plain": functools.partial(make, delta.make_heads),
        },
        (draw(5, rows, length, columns), draw(6, columns, 4, dtype=jnp.float32)),
    )
    return [rule, with_gradients(rule, 5), heads_of, with_gradients(heads_of, 2)]


# Of a 7B's, a 30B-A3B's and a Qwen3.5 9B's layers, 8 rows of 2,048 positions; then small ones.
SHAPES: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "float8": (make_float8, (16384, 3584, 18944), (64, 256, 512)),
    "experts": (make_experts, (16384, 2048, 768, 128, 8), (128, 256, 128, 4, 2)),
    "softmax": (make_softmax, (1024, 151936), (8, 4096)),
    "cache": (make_cache, (1024, 256, 2, 7, 64), (64, 2, 2, 2, 32)),
    "delta": (make_delta, (8, 2048, 16, 32, 128), (1, 128, 2, 4, 16)),
}


def measure_distance(result: Any, wanted: Any) -> float:
    """Distance of two trees, relative to the second's norm."""
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True)
    parts = [
        (jnp.sum((a.astype(jnp.float32) - b) ** 2), jnp.sum(b.astype(jnp.float32) ** 2))
        for a, b in pairs
    ]
    above, below = (float(sum(part[n] for part in parts)) for n in (0, 1))
    return (above / max(below, 1e-30)) ** 0.5


def time_case(case: Case, calls: int, groups: int) -> list[dict[str, Any]]:
    """A row of each form: milliseconds a call, and the distance from the definition in float32."""
    exact = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, case.arguments
    )
    wanted = jax.jit(case.forms["plain"])(*exact)
    del exact
    size = sum(x.nbytes for x in (*case.arguments, *jax.tree.leaves(wanted)))
    rows = []
    for name, form in case.forms.items():
        row: dict[str, Any] = {"case": case.name, "form": name}
        rows.append(row)
        try:
            run = jax.jit(form)
            row["error"] = measure_distance(run(*case.arguments), wanted)
            times = []
            for _ in range(groups):
                begin = time.perf_counter()
                for _ in range(calls):
                    result = run(*case.arguments)
                jax.block_until_ready(result)
                times.append((time.perf_counter() - begin) / calls * 1e3)
        except Exception as error:  # of a compiler: whatever it raises is the finding
            row["failed"] = f"{type(error).__name__}: {error}"[:2000]
            print(f"{case.name} | {name} | failed: {row['failed'][:300]}", flush=True)
            continue
        row |= {"ms": statistics.median(times), "min": min(times), "max": max(times)}
        row["GB/s"] = size / row["ms"] / 1e6
        print(f"{case.name} | {name} | {row['ms']:.3f} ms | error {row['error']:.2e}", flush=True)
    return rows


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Times kernels against plain JAX.")
    parser.add_argument("--only", default=",".join(SHAPES), help="kinds of cases, by commas")
    parser.add_argument("--calls", type=int, default=20, help="calls of which the last is awaited")
    parser.add_argument("--groups", type=int, default=9, help="groups of calls; the median counts")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the command")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind in args.only.split(","):
        make, *shapes = SHAPES[kind]
        for case in make(*shapes[args.small]):
            rows += time_case(case, args.calls, args.groups)
        device = jax.devices()[0].device_kind
        found = {"jax": jax.__version__, "device": device, "rows": rows}
        if args.json:  # after each kind, so that a call that is cut short has what it measured
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
