"""Times kernels against their definitions in plain JAX, and one on Pallas' Mosaic GPU backend.

    python -m scripts.bench.kernels --json=kernels.json

A case has several forms: a kernel, the lines that define it as XLA compiles them, and Mosaic GPU;
forward alone or with gradients. The figure is the median of `--groups` groups of `--calls` calls,
of which the last is waited for. `error` is the distance from the definition in float32, relative to
its norm. A form that does not compile is reported with its message, and the others run. `GB/s`
counts each input and output once, which is the least that a case moves.
"""

import argparse
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

from kdjax.models import delta
from kdjax.models.decoder import RMSNorm
from kdjax.models.kernels import norms

try:
    from jax.experimental.pallas import mosaic_gpu as mosaic
except ImportError:
    mosaic: Any = None

Function = Callable[..., Any]
EPS = 1e-6


class Case(NamedTuple):
    """A computation in several forms, all of the same arguments."""

    name: str
    forms: dict[str, Function]  # "plain" is the definition
    arguments: tuple[Any, ...]


def normalize(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The RMS norm's definition, `decoder.RMSNorm`."""
    norm = RMSNorm(x.shape[1], EPS, x.dtype)
    norm.weight = nnx.Param(weight)
    return norm(x)


def normalize_in_kernel(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The RMS norm of `models.kernels`, by Pallas' Triton backend."""
    pair: Any = norms.normalize_rows(x, weight, EPS)
    return pair[1]


def normalize_by_mosaic(x: jax.Array, weight: jax.Array) -> jax.Array:
    """RMS norm `[N, D]` by Mosaic GPU (JAX 0.11): a warp group holds a row in its registers."""
    width = x.shape[1]

    def body(x_ref: Any, weight_ref: Any, out_ref: Any) -> None:
        row = jax.lax.axis_index("row")
        x = x_ref.at[row][...].astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.sum(x * x) / width + EPS)
        out_ref.at[row][...] = (x * scale).astype(out_ref.dtype) * weight_ref[...]

    run = mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=x.shape[:1],
        grid_names=("row",),
    )
    return run(x, weight)


def _with_gradients(function: Function, arguments: int) -> Function:
    """The gradients of the squared outputs' mean by the first arguments."""

    def loss(*inputs: Any) -> jax.Array:
        leaves = jax.tree.leaves(function(*inputs))
        return jnp.stack([jnp.mean(x.astype(jnp.float32) ** 2) for x in leaves]).sum()

    return jax.grad(loss, argnums=tuple(range(arguments)))


def make_norm(rows: int, width: int) -> list[Case]:
    """RMS norms `[rows, width]` in bfloat16, forward and with gradients."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
    weight = 1 + 0.1 * jax.random.normal(keys[1], (width,), jnp.bfloat16)
    forms: dict[str, Function] = {
        "kernel": normalize_in_kernel,
        "plain": normalize,
    }
    title = f"RMS norm [{rows}, {width}]"
    both = {name: _with_gradients(form, 2) for name, form in forms.items()}
    forms["mosaic"] = normalize_by_mosaic
    return [
        Case(f"{title}, forward", forms, (x, weight)),
        Case(f"{title}, gradients", both, (x, weight)),
    ]


def make_delta(rows: int, length: int, groups: int, heads: int, width: int) -> list[Case]:
    """The gated delta rule `[rows, length]` of heads of `width` columns, bfloat16."""
    keys = jax.random.split(jax.random.key(1), 5)

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32)

    q, k = (delta.normalize_heads(draw(key, (rows, length, groups, width))) for key in keys[:2])
    v = draw(keys[2], (rows, length, heads, width)).astype(jnp.bfloat16)
    decay = -jax.nn.softplus(draw(keys[3], (rows, length, heads)))
    beta = jax.nn.sigmoid(draw(keys[4], (rows, length, heads)))
    ids = jnp.ones((rows, length), jnp.int32)
    arguments = (q * width**-0.5, k, v, decay, beta)

    def apply(in_kernels: bool, *inputs: Any) -> jax.Array:
        q, k, v, decay, beta = inputs
        return delta.apply_delta_rule(q, k, v, decay, beta, ids, in_kernels=in_kernels)[0]

    forms: dict[str, Function] = {
        "kernel": functools.partial(apply, True),
        "plain": functools.partial(apply, False),
    }
    title = f"delta rule [{rows}, {length}, {heads}, {width}]"
    both = {name: _with_gradients(form, 5) for name, form in forms.items()}
    return [
        Case(f"{title}, forward", forms, arguments),
        Case(f"{title}, gradients", both, arguments),
    ]


def _distance(result: Any, wanted: Any) -> float:
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
    size = sum(x.nbytes for x in (*case.arguments, *jax.tree.leaves(wanted)))
    rows = []
    for name, form in case.forms.items():
        row: dict[str, Any] = {"case": case.name, "form": name}
        rows.append(row)
        try:
            run = jax.jit(form)
            row["error"] = _distance(run(*case.arguments), wanted)
            times = []
            for _ in range(groups):
                begin = time.perf_counter()
                for _ in range(calls):
                    result = run(*case.arguments)
                jax.block_until_ready(result)
                times.append((time.perf_counter() - begin) / calls * 1e3)
        except Exception as error:  # of a compiler: whatever it raises is the finding
            row["failed"] = f"{type(error).__name__}: {error}"[:2000]
            print(f"{case.name} | {name} | failed: {row['failed'][:300]}")
            continue
        row |= {"ms": statistics.median(times), "min": min(times), "max": max(times)}
        row["GB/s"] = size / row["ms"] / 1e6
        print(f"{case.name} | {name} | {row['ms']:.3f} ms | error {row['error']:.2e}", flush=True)
    return rows


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Times kernels against plain JAX.")
    parser.add_argument("--calls", type=int, default=20, help="calls of which the last is awaited")
    parser.add_argument("--groups", type=int, default=9, help="groups of calls; the median counts")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the command")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    if args.small:
        cases = [*make_norm(64, 256), *make_delta(1, 128, 2, 4, 16)]
    else:  # of a 7B's and a Qwen3.5 9B's layers, 8 rows of 2,048 positions
        cases = [
            *make_norm(16384, 3584),
            *make_norm(16384, 1024),
            *make_delta(8, 2048, 16, 32, 128),
        ]
    rows = [row for case in cases for row in time_case(case, args.calls, args.groups)]
    if args.json:
        device = jax.devices()[0].device_kind
        args.json.write_text(
            json.dumps({"jax": jax.__version__, "device": device, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
