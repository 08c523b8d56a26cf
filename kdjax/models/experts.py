"""A layer of experts: a router picks a few of many MLPs for each token.

Letters: N rows, K experts used by each, E experts, D width, F width of an expert.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from kdjax.models.weights import from_bits, project


class Choice(NamedTuple):
    """The experts of each row and what each counts."""

    experts: Int[Array, "N K"]  # the likeliest first
    weights: Float32[Array, "N K"]


def choose_experts(
    rows: Float[Array, "N D"], router: Float32[Array, "E D"], used: int, normalised: bool
) -> Choice:
    """The `used` likeliest experts of each row by a softmax over all, in float32.

    Of equal ones the lowest index comes first. `normalised` weights sum to 1.
    """
    logits = jnp.einsum(
        "ND,ED->NE", rows.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST
    )
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), used)
    if normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Choice(experts, weights)


def mix_experts(
    rows: Float[Array, "N D"],
    choice: Choice,
    gate: Shaped[Array, "E F D"],
    up: Shaped[Array, "E F D"],
    down: Shaped[Array, "E D F"],
    activation: Callable[[Array], Array],
) -> Float[Array, "N D"]:
    """Of each row the weighted sum of its experts' down(activation(gate(x)) * up(x)).

    Weights are numbers or their bits. Each expert sees all rows and counts nothing for most: the
    definition, which runs and has a gradient everywhere.
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
    """The same for few rows, such as those of text being written: only used experts are read."""
    gate, up, down = (from_bits(w[choice.experts]).astype(rows.dtype) for w in (gate, up, down))
    x = activation(jnp.einsum("ND,NKFD->NKF", rows, gate)) * jnp.einsum("ND,NKFD->NKF", rows, up)
    y = jnp.einsum("NKF,NKDF->NKD", x, down)
    return jnp.einsum("NKD,NK->ND", y.astype(jnp.float32), choice.weights).astype(rows.dtype)
