"""A layer of experts: a router picks a few of many MLPs for each token.

Letters: N rows, K experts used by each, E experts, D width, F width of an expert.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from kdjax.models.kernels import grouped_matmul
from kdjax.models.kernels.grouped_matmul import TILE_ROWS, Tiles
from kdjax.models.weights import from_bits, project


class Choice(NamedTuple):
    """The experts of each row and their weights."""

    experts: Int[Array, "N K"]  # the most probable first
    weights: Float32[Array, "N K"]


def choose_experts(
    rows: Float[Array, "N D"], router: Float32[Array, "E D"], used: int, normalised: bool
) -> Choice:
    """The top `used` experts of each row, by a softmax over all in float32.

    Among equal experts the lowest index comes first. `normalised` weights sum to 1.
    """
    logits = route_rows(rows, router)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), used)
    if normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Choice(experts, weights)


def route_rows(rows: Float[Array, "N D"], router: Float32[Array, "E D"]) -> Float32[Array, "N E"]:
    """A router's products, with float32 precision for rows of bf16 too."""
    if rows.dtype != jnp.bfloat16:
        rows = rows.astype(jnp.float32)
        return jnp.einsum("ND,ED->NE", rows, router, precision=jax.lax.Precision.HIGHEST)
    # Three parts of 8 bits make a weight, and the products of bf16 numbers are exact in float32: on
    # a GPU two and a half times as fast as products of float32 numbers.
    parts, rest = [], router
    for _ in range(3):  # XLA removes a round trip to bf16; reduce_precision survives
        parts.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - parts[-1]
    weights = jnp.concatenate(parts).astype(jnp.bfloat16)
    logits = jnp.einsum("ND,ED->NE", rows, weights, preferred_element_type=jnp.float32)
    return jnp.sum(logits.reshape(rows.shape[0], len(parts), -1), axis=1)


def mix_experts(
    rows: Float[Array, "N D"],
    choice: Choice,
    gate: Shaped[Array, "E F D"],
    up: Shaped[Array, "E F D"],
    down: Shaped[Array, "E D F"],
    activation: Callable[[Array], Array],
) -> Float[Array, "N D"]:
    """Computes for each row the weighted sum of its experts' down(activation(gate(x)) * up(x)).

    Weights are numbers or their bits. Each expert computes all rows and has weight 0 for most: the
    definition, which runs and has a gradient on every device.
    """
    if rows.shape[0] * choice.experts.shape[1] <= gate.shape[0]:
        return _gather_experts(rows, choice, gate, up, down, activation)

    def add(total: Array, expert: tuple[Array, ...]) -> tuple[Array, None]:
        index, gate, up, down = expert
        weight = jnp.sum(jnp.where(choice.experts == index, choice.weights, 0.0), axis=-1)
        y = project(activation(project(rows, gate)) * project(rows, up), down)
        return total + weight[:, None] * y.astype(jnp.float32), None

    start = jnp.zeros(rows.shape, jnp.float32)
    experts = jnp.arange(gate.shape[0], dtype=jnp.int32), gate, up, down
    return jax.lax.scan(add, start, experts)[0].astype(rows.dtype)


def _gather_experts(
    rows: Array,
    choice: Choice,
    gate: Array,
    up: Array,
    down: Array,
    activation: Callable[[Array], Array],
) -> Array:
    """`mix_experts` for few rows, as in generation: only used experts are read."""
    gate, up, down = (from_bits(w[choice.experts]).astype(rows.dtype) for w in (gate, up, down))
    x = activation(jnp.einsum("ND,NKFD->NKF", rows, gate)) * jnp.einsum("ND,NKFD->NKF", rows, up)
    y = jnp.einsum("NKF,NKDF->NKD", x, down)
    return jnp.einsum("NKD,NK->ND", y.astype(jnp.float32), choice.weights).astype(rows.dtype)


def mix_experts_by_tiles(
    rows: Float[Array, "N D"],
    choice: Choice,
    gate: Shaped[Array, "E F D"],
    up: Shaped[Array, "E F D"],
    down: Shaped[Array, "E D F"],
    activation: Callable[[Array], Array],
    interpret: bool = False,
) -> Float[Array, "N D"]:
    """Computes `mix_experts` in kernels that each multiply a tile of rows with one expert.

    Rows are sorted by expert, and each expert's rows padded to full tiles. The gradient is
    computed by `mix_experts`.
    """
    apart = activation is not jax.nn.silu or not grouped_matmul.tiles_fit(gate.shape, rows.dtype)
    if apart or rows.shape[0] * choice.experts.shape[1] <= gate.shape[0]:
        return mix_experts(rows, choice, gate, up, down, activation)
    gate, up, down = (from_bits(weight).astype(rows.dtype) for weight in (gate, up, down))
    return _mix_by_tiles(rows, choice, gate, up, down, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _mix_by_tiles(
    rows: Array, choice: Choice, gate: Array, up: Array, down: Array, interpret: bool
) -> Array:
    tiles, slots = lay_out(choice.experts, gate.shape[0], TILE_ROWS)
    hidden = grouped_matmul.widen_tiles(tiles, rows, gate, up, interpret=interpret)
    y = grouped_matmul.narrow_tiles(tiles, hidden, down, interpret=interpret)
    total = jnp.sum(y[slots].astype(jnp.float32) * choice.weights[..., None], axis=1)
    return total.astype(rows.dtype)


def _mix_forward(*arguments: Any) -> tuple[Array, Any]:
    return _mix_by_tiles(*arguments), arguments[:-1]


def _mix_backward(interpret: bool, residuals: Any, gradient: Array) -> tuple[Any, ...]:
    rows, (experts, weights), *matrices = residuals

    def define(rows: Array, weights: Array, *matrices: Array) -> Array:
        gate, up, down = matrices
        return mix_experts(rows, Choice(experts, weights), gate, up, down, jax.nn.silu)

    to_rows, to_weights, *to_matrices = jax.vjp(define, rows, weights, *matrices)[1](gradient)
    return to_rows, Choice(None, to_weights), *to_matrices  # type: ignore[arg-type]


_mix_by_tiles.defvjp(_mix_forward, _mix_backward)


def lay_out(experts: Int[Array, "N K"], count: int, height: int) -> tuple[Tiles, Int[Array, "N K"]]:
    """Tiles of `height` rows, each of one expert, and the places of each row's results.

    The number of tiles is the worst case's; tiles left over belong to expert `count`, which does
    not exist. Padding rows are row 0, whose results there are never read.
    """
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    ends = jnp.cumsum(jnp.bincount(flat, length=count)).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    sizes = (ends - starts + height - 1) // height
    last = jnp.cumsum(sizes)
    first = last - sizes
    places = jnp.arange(-(-flat.size // height) + count, dtype=jnp.int32)
    owner = jnp.searchsorted(last, places, side="right", method="compare_all").astype(jnp.int32)
    known = jnp.minimum(owner, count - 1)
    inside = (places - first[known])[:, None] * height + jnp.arange(height, dtype=jnp.int32)[None]
    at = starts[known][:, None] + inside
    real = (at < ends[known][:, None]) & (owner < count)[:, None]
    rows = jnp.where(real, order[jnp.minimum(at, flat.size - 1)] // experts.shape[1], 0)
    theirs = flat[order]
    put = first[theirs] * height + jnp.arange(flat.size, dtype=jnp.int32) - starts[theirs]
    slots = jnp.zeros(flat.shape, jnp.int32).at[order].set(put, unique_indices=True)
    return Tiles(owner, rows.reshape(-1)), slots.reshape(experts.shape)
