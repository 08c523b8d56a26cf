"""Weights for generation, in the layout that products of few rows read fastest.

A step of generation multiplies one id a row with every weight. With weights decoded once, layers
unstacked and the matrices of one input joined, it reads each number once and starts few products.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.device.runtime import mem_available
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decoder import Compute, DecoderFunctions, Layers, Params
from kdjax.models.shards import Spread, gather_shards, map_rows
from kdjax.models.weights import (
    Adapted,
    Joined,
    PackedMatrix,
    Scaled,
    decode_weight,
    from_bits,
    slice_layers,
    to_bits,
)

# The weights of a layer that share an input, in the order of their products.
SHARING = [
    ("attn", "qkv"),
    ("attn", "o"),
    ("delta", ("qkv", "gate", "alpha", "beta")),
    ("delta", ("out",)),
    ("mlp", ("gate", "up")),
    ("mlp", ("down",)),
    ("proj", ()),  # itself
]


def product_dtype(compute: Compute) -> Any:
    """Dtype of weights that are prepared for products.

    XLA's CPU backend widens bf16 one number after another at each product, which takes twenty times
    as long as the product of one row: there weights are float32.
    """
    on_cpu = compute.placement is not None and compute.placement.platform == "cpu"
    return jnp.dtype(jnp.float32 if on_cpu else compute.dtype)


def prepare_weights(
    params: Params, *, functions: DecoderFunctions, spread: Spread | None, few: bool = False
) -> tuple[Layers | None, Any]:
    """The weights that each id is multiplied with: the layers, if there is room, and the head.

    For `few` ids layers stay stacked.
    """
    size = product_dtype(functions.compute).itemsize
    apart = not few and _has_room(functions, spread, size)
    return _prepare(params, functions=functions, spread=spread, apart=apart)


@functools.partial(jax.jit, static_argnames=("functions", "spread", "apart"))
def _prepare(
    params: Params, *, functions: DecoderFunctions, spread: Spread | None, apart: bool
) -> tuple[Layers | None, Any]:
    def prepare(params: Params) -> tuple[Layers | None, Any]:
        layers = unstack_layers(params, functions) if apart else None
        return layers, ready_head(params, functions.compute)

    return map_rows(prepare, spread, outs=P())(params)


def unstack_layers(params: Params, functions: DecoderFunctions) -> Layers:
    """The weights of each layer, in the layout for one id a row.

    Numbers of `product_dtype`, one array a layer, weights of one input joined; float8 is
    unchanged.
    """
    spec, dtype = functions.spec, product_dtype(functions.compute)
    stacks = {STACKS[name]: slice_layers(params[name]) for name in STACKS if name in params}

    def one(number: int) -> Params:
        delta = spec.layers[number].delta
        (slices, read), index = stacks[delta], spec.places(delta=delta).index(number)
        return _share(read(jax.tree.map(lambda x: x[index], slices)), dtype)

    return tuple(map(one, range(spec.num_layers)))


@functools.partial(jax.jit, static_argnames=("functions", "spread"))
def prepare_block(params: Params, *, functions: DecoderFunctions, spread: Spread | None) -> Params:
    """The weights of the next-token block, as `unstack_layers` makes a layer's."""

    def prepare(params: Params) -> Params:
        slices, read = slice_layers(params["mtp"])
        dtype = product_dtype(functions.compute)
        return _share(read(jax.tree.map(lambda x: x[0], slices)), dtype)

    return map_rows(prepare, spread, outs=P())(params)


def _share(weights: Params, dtype: DTypeLike) -> Params:
    """The weights of a layer, with the weights of one input joined."""
    for part, names in SHARING:
        if part not in weights or "router" in weights[part]:  # experts stay as they are stored
            continue
        linears = [weights[part][name] for name in names] if names else [weights[part]]
        found = [linear["weight"] for linear in linears]
        if not isinstance(found[0], Scaled):
            found = join([prepare_weight(x, dtype) for x in found])
        for linear, weight in zip(linears, found, strict=True):
            linear["weight"] = weight
    return weights


def ready_head(params: Params, compute: Compute) -> Array:
    """The numbers of the unembedding, in `product_dtype`."""
    weight = gather_shards(params["head" if "head" in params else "embed"])
    return prepare_weight(weight, product_dtype(compute))


def prepare_weight(weight: Array | PackedMatrix | Scaled | Adapted, dtype: DTypeLike) -> Array:
    """The numbers of a weight in `dtype`; an adapter is added to its matrix."""
    # By way of bits, or XLA would drop the rounding of a conversion there and back.
    return from_bits(to_bits(decode_weight(weight))).astype(dtype)


def join(weights: Sequence[Array]) -> list[Array | Joined]:
    """Joins matrices of one input for `project_all`, in the place of the first."""
    first = weights[0]
    none = jnp.zeros((0, first.shape[1]), first.dtype)
    whole = Joined(jnp.concatenate(weights), tuple(len(w) for w in weights))
    return [whole, *[none] * (len(weights) - 1)]


def _has_room(functions: DecoderFunctions, spread: Spread | None, itemsize: int) -> bool:
    """Whether memory has room for a copy of the layers with `itemsize` bytes a number."""
    shards = spread.placement.mesh.shape["fsdp"] if spread else 1
    device = spread.placement.mesh.local_devices[0] if spread else jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        free = mem_available()
    room = count_layers(functions.spec, itemsize, shards, free) > 0
    if spread and spread.placement.mesh.is_multi_process:  # all run the same program
        room = bool(np.all(multihost_utils.process_allgather(np.asarray(room))))
    return room


def count_layers(
    spec: ArchSpec, itemsize: int | float, shards: int, free: int | float | None
) -> int | float:
    """Bytes of the unstacked layers, if `free` bytes are enough (None: unknown); 0: stay stacked.

    Experts stay as they are stored: with few rows each multiplies few. Shards stay shards.
    """
    if spec.experts or shards > 1:
        return 0
    attention = (2 + spec.gated) * spec.num_heads + 2 * spec.num_kv_heads
    values = spec.delta_value_heads * spec.delta_value_dim
    delta = spec.delta_columns + 2 * values + 2 * spec.delta_value_heads
    count = len(spec.places(delta=True))
    columns = (spec.num_layers - count) * attention * spec.head_dim + count * delta
    numbers = spec.hidden_size * (columns + spec.num_layers * 3 * spec.mlp_size)
    needed = int(numbers * itemsize)
    return needed if free is None or 1.5 * needed < free else 0
