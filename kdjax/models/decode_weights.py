"""Weights made ready for generation: laid out once more, as products of few rows take them best.

A step of generation multiplies one id a row with every weight. Decoded once, the layers apart and
the matrices of one input joined, it reads each number once and starts few products. On a CPU one
row takes weights as narrow as they are stored: its product takes as long as their bytes.
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
from kdjax.device.sharding import count_bytes
from kdjax.formats.blocks import Whole, read_whole
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decoder import Compute, DecoderFunctions, Layers, Params
from kdjax.models.few_rows import GROUP, Grouped
from kdjax.models.shards import Spread, gather_shards, map_rows
from kdjax.models.weights import (
    Adapted,
    Joined,
    Mixed,
    Packed,
    Reader,
    Scaled,
    decode_weight,
    from_bits,
    slice_layers,
    to_bits,
)

# The weights of a layer that multiply the same rows.
_SHARING = [
    ("attn", "qkv"),
    ("attn", "o"),
    ("delta", ("qkv", "gate", "alpha", "beta")),
    ("delta", ("out",)),
    ("mlp", ("gate", "up")),
    ("mlp", ("down",)),
    ("proj", ()),  # itself
]


def is_on_cpu(compute: Compute) -> bool:
    """Whether a decoder is placed on a CPU."""
    return compute.placement is not None and compute.placement.platform == "cpu"


def product_dtype(compute: Compute) -> Any:
    """Dtype of weights that are prepared for products, unless they are narrow.

    XLA's CPU backend widens bf16 one number after another at each product, which takes twenty times
    as long as one row's: there they lie wide.
    """
    return jnp.dtype(jnp.float32 if is_on_cpu(compute) else compute.dtype)


def prepare_weights(
    params: Params, *, functions: DecoderFunctions, spread: Spread | None, rows: int | None = None
) -> tuple[Layers | None, Any]:
    """Prepares the weights that each id multiplies: the layers, if there is room, and the head.

    On a CPU one row is multiplied with weights as narrow as they are stored.
    """
    narrow = rows == 1 and is_on_cpu(functions.compute)
    prepare: Any = functools.partial(_prepare, functions=functions, spread=spread, narrow=narrow)
    itemsize = product_dtype(functions.compute).itemsize
    if narrow and (numbers := count_layers(functions.spec, 1, 1, None)):
        layers, _ = jax.eval_shape(functools.partial(prepare, apart=True), params)
        itemsize = count_bytes(layers) / numbers
    return prepare(params, apart=_has_room(functions, spread, itemsize))


@functools.partial(jax.jit, static_argnames=("functions", "spread", "apart", "narrow"))
def _prepare(
    params: Params,
    *,
    functions: DecoderFunctions,
    spread: Spread | None,
    apart: bool,
    narrow: bool = False,
) -> tuple[Layers | None, Any]:
    def prepare(params: Params) -> tuple[Layers | None, Any]:
        layers = unstack_layers(params, functions, narrow=narrow) if apart else None
        return layers, ready_head(params, functions.compute, narrow=narrow)

    return map_rows(prepare, spread, outs=P())(params)


def unstack_layers(params: Params, functions: DecoderFunctions, *, narrow: bool) -> Layers:
    """The weights of each layer as one id a row multiplies them best.

    Numbers of `product_dtype`, or, for one row on a CPU, `narrow` ones; an array a layer, those
    that multiply the same rows joined; float8 stays so.
    """
    spec, dtype = functions.spec, product_dtype(functions.compute)
    choice = (_choose_narrow,) if narrow else ()
    stacks = {
        STACKS[name]: slice_layers(params[name], *choice) for name in STACKS if name in params
    }

    def one(number: int) -> Params:
        delta = spec.layers[number].delta
        (slices, read), index = stacks[delta], spec.places(delta=delta).index(number)
        return _share(read(jax.tree.map(lambda x: x[index], slices)), dtype, narrow=narrow)

    return tuple(map(one, range(spec.num_layers)))


@functools.partial(jax.jit, static_argnames=("functions", "spread"))
def prepare_block(params: Params, *, functions: DecoderFunctions, spread: Spread | None) -> Params:
    """The weights of the block that drafts as `unstack_layers` makes those of a layer."""

    def prepare(params: Params) -> Params:
        slices, read = slice_layers(params["mtp"])
        dtype = product_dtype(functions.compute)
        return _share(read(jax.tree.map(lambda x: x[0], slices)), dtype, narrow=False)

    return map_rows(prepare, spread, outs=P())(params)


def _share(weights: Params, dtype: DTypeLike, *, narrow: bool) -> Params:
    """The weights of a layer, with those that multiply the same rows joined."""
    for part, names in _SHARING:
        if part not in weights or "router" in weights[part]:  # experts stay as they are stored
            continue
        linears = [weights[part][name] for name in names] if names else [weights[part]]
        found = [linear["weight"] for linear in linears]
        if not isinstance(found[0], Scaled):
            found = join([prepare_weight(x, dtype, narrow=narrow) for x in found])
        for linear, weight in zip(linears, found, strict=True):
            linear["weight"] = weight
    return weights


def ready_head(params: Params, compute: Compute, *, narrow: bool) -> Array | Grouped | Joined:
    """The unembedding as `unstack_layers` makes the layers; numbers unless `narrow`."""
    weight = gather_shards(params["head" if "head" in params else "embed"])
    ready = prepare_weight(weight, product_dtype(compute), narrow=narrow)
    return join([ready])[0] if narrow else ready


def prepare_weight(
    weight: Array | Packed | Scaled | Grouped | Adapted, dtype: DTypeLike, *, narrow: bool
) -> Array | Grouped:
    """A weight as products of few rows take it: numbers of `dtype`, or no wider than stored.

    An adapter is added to its matrix.
    """
    if narrow and isinstance(weight, Packed) and is_whole(weight):
        return regroup(weight)
    if isinstance(weight, Grouped):
        return weight
    bits = to_bits(decode_weight(weight))
    return bits if narrow and bits.dtype == jnp.uint16 else from_bits(bits).astype(dtype)


def join(weights: Sequence[Array | Grouped]) -> list[Array | Joined]:
    """Joins matrices of one kind into one for `project_all`; a single one stays as it is.

    Matrices of several kinds stay apart.
    """
    kinds = {(jax.tree.structure(w), jax.tree.leaves(w)[0].dtype) for w in weights}
    if len(kinds) > 1:
        return [one for w in weights for one in join([w])]
    first = jax.tree.leaves(weights[0])[0]
    none = jnp.zeros((0, first.shape[1]), first.dtype)
    sizes = tuple(jax.tree.leaves(w)[0].shape[0] for w in weights)
    whole = Joined(jax.tree.map(lambda *x: jnp.concatenate(x), *weights), sizes)
    return [whole, *[none] * (len(weights) - 1)]


def is_whole(weight: Packed) -> bool:
    """Whether `regroup` can make it whole numbers."""
    exact = jnp.dtype(weight.dtype) == jnp.float32  # rounded ones are no longer factor * q
    return exact and jax.eval_shape(_read_whole, weight) is not None


def _read_whole(weight: Packed) -> Whole | None:
    return read_whole(weight.fields, weight.block)


def regroup(weight: Packed, *, minimums: bool = False) -> Grouped:
    """The matrix `[out, in]` as whole numbers; with `minimums` also where all are 0."""
    whole = _read_whole(weight)
    assert whole is not None
    q, factors, lowest = whole
    if minimums and lowest is None:
        lowest = jnp.zeros_like(factors)
    repeats = q.shape[1] // factors.shape[1] // GROUP
    pieces = q.reshape(q.shape[0], -1, GROUP).swapaxes(1, 2).reshape(q.shape)
    shared = (x if x is None else jnp.repeat(x, repeats, axis=1) for x in (factors, lowest))
    return Grouped(pieces.astype(jnp.int8), *shared)


def _choose_narrow(weight: Packed | Mixed) -> Reader:
    """How `slice_layers` reads a weight's blocks: as whole numbers where all of them can be."""
    if isinstance(weight, Packed):
        return regroup if is_whole(weight) else Packed.decode
    every = all(map(is_whole, weight.stacks))
    return functools.partial(regroup, minimums=True) if every else Packed.decode


def _has_room(functions: DecoderFunctions, spread: Spread | None, itemsize: int | float) -> bool:
    """Whether the layers may lie in memory a second time, with so many bytes a number."""
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
) -> int:
    """Bytes of the layers apart where so many bytes are free (None: unknown); 0: they stay stacked.

    Experts stay as they are stored: of few rows each multiplies few. Shards stay shards.
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
