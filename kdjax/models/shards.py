"""A model's arrays over several devices: what each has, what is gathered and what is summed.

Each device runs one device's program on its rows. On a mesh with `fsdp` it has a `Shard` of each
matrix, which is gathered where it is used; GPUs of one process may each have a part of the masters
over `data` (`sharding.splits_state`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.device.placement import Placement
from kdjax.device.sharding import ROW_AXES, ROWS, replicated
from kdjax.models.kernels.common import FP8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """This device's part of an array that a mesh splits; only inside `Spread.map_rows`."""

    part: Any
    axis: int = dataclasses.field(metadata=dict(static=True))  # counted from the last, below 0
    over: str = dataclasses.field(metadata=dict(static=True))  # "fsdp" or "data", of the mesh
    # In which float32 numbers are sent, the dtype of their products; None: unchanged.
    dtype: DTypeLike | None = dataclasses.field(default=None, metadata=dict(static=True))

    def __getitem__(self, index: Any) -> "Shard":
        """Layers: `index` applies to axes before the split one."""
        return dataclasses.replace(self, part=self.part[index])

    def gather(self) -> Array:
        """The full array. Its gradient is summed over the devices and scattered again."""
        axis = self.part.ndim + self.axis
        if self.dtype is not None and self.part.dtype == jnp.float32:
            return _gather_as(self.part, axis, self.over, self.dtype)
        if self.part.dtype != FP8:
            return jax.lax.all_gather(self.part, self.over, axis=axis, tiled=True)
        # NCCL has no float8; its bits are sent instead.
        bits = jax.lax.bitcast_convert_type(self.part, jnp.uint8)
        whole = jax.lax.all_gather(bits, self.over, axis=axis, tiled=True)
        return jax.lax.bitcast_convert_type(whole, FP8)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_as(part: Array, axis: int, over: str, dtype: DTypeLike) -> Array:
    """The full float32 array, rounded to `dtype`; its gradient is not rounded."""
    sent, count = part.astype(dtype), jax.lax.axis_size(over)
    if over == "fsdp":
        return jax.lax.all_gather(sent, over, axis=axis, tiled=True).astype(part.dtype)
    me = jax.lax.axis_index(over)
    pieces = [_shift(sent, over, by) for by in range(count)]
    ordered = [_pick(pieces, (me - i) % count, axis) for i in range(count)]
    return jnp.concatenate(ordered, axis).astype(part.dtype)


def _scatter(axis: int, over: str, dtype: DTypeLike, _: None, gradient: Array) -> tuple[Array]:
    if over == "fsdp":
        return (jax.lax.psum_scatter(gradient, over, scatter_dimension=axis, tiled=True),)
    count, me = jax.lax.axis_size(over), jax.lax.axis_index(over)
    parts = jnp.split(gradient, count, axis)
    sent = [_pick(parts, (me + by) % count, axis) for by in range(count)]
    return (sum(_shift(part, over, by) for by, part in enumerate(sent)),)  # type: ignore


def _pick(parts: Sequence[Array], place: Array, axis: int) -> Array:
    """The part at an index that differs between devices."""
    # For two parts a choice, as measured, which reads both; for more a slice, which reads one.
    if len(parts) == 2:
        return jax.lax.select_n(place, *parts)
    size = parts[0].shape[axis]
    return jax.lax.dynamic_slice_in_dim(jnp.concatenate(parts, axis), place * size, size, axis)


def _shift(x: Array, over: str, by: int) -> Array:
    """Copies the array of the device `by` places before this one; without NCCL in one process."""
    count = jax.lax.axis_size(over)
    pairs = [(i, (i + by) % count) for i in range(count)]
    return jax.lax.ppermute(x, over, pairs) if by else x


_gather_as.defvjp(lambda *arguments: (_gather_as(*arguments), None), _scatter)


def _is_shard(x: Any) -> bool:
    return isinstance(x, Shard)


def gather_shards(tree: Any) -> Any:
    """The tree with full arrays in place of shards."""
    return jax.tree.map(lambda x: x.gather() if _is_shard(x) else x, tree, is_leaf=_is_shard)


@dataclasses.dataclass(frozen=True)
class Spread:
    """How a model's arrays are spread, for programs over its rows; hashable.

    Each device runs one device's program on its rows. It has full parameters, or shards, of which
    it gathers a layer at a time.
    """

    placement: Placement
    specs: tuple[P, ...]  # of each array, in the order of the parameters' leaves, without `tensor`
    dtype: DTypeLike | None = None  # in which parts of float32 matrices are sent; None: unchanged

    @classmethod
    def of(cls, arrays: Any, placement: Placement, dtype: DTypeLike | None = None) -> "Spread":
        """Reads how parameters, or their shardings, are spread."""
        ours = [axis for axis in ROW_AXES if placement.mesh.shape[axis] > 1]

        def spec(leaf: Any) -> P:
            place = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
            if not isinstance(place, NamedSharding) or not set(ours) & set(place.spec):
                return P()
            return P(*(axis if axis in ours else None for axis in place.spec))

        return cls(placement, tuple(map(spec, jax.tree.leaves(arrays))), dtype)

    def tree(self, params: Any) -> Any:
        """The specs, as the parameters' tree."""
        return jax.tree.unflatten(jax.tree.structure(params), self.specs)

    def mark(self, params: Any) -> Any:
        """The parameters of a device, split ones as `Shard`."""

        def one(leaf: Array, spec: P) -> Any:
            for place, axis in enumerate(spec):
                if axis is not None:
                    return Shard(leaf, place - leaf.ndim, axis, self.dtype)
            return leaf

        return jax.tree.map(one, params, self.tree(params))

    def map_rows(
        self, function: Callable[..., Any], ins: Sequence[Any] = (), outs: Any = ROWS
    ) -> Callable[..., Any]:
        """`function(params, *arrays)`, each device on its rows.

        `ins` and `outs` are the specs of the arrays and of the result; by default rows are the
        first axis, and their number divides evenly.
        """

        def run(params: Any, *arrays: Any) -> Any:
            def local(params: Any, *arrays: Any) -> Any:
                return function(self.mark(params), *arrays)

            specs = self.tree(params), *(ins or [ROWS] * len(arrays))
            return self.placement.map_rows(local, specs, outs)(params, *arrays)

        return run


def map_rows(function: Callable[..., Any], spread: Spread | None, **specs: Any) -> Any:
    """See `Spread.map_rows`; the function itself for a model without a placement."""
    return function if spread is None else spread.map_rows(function, **specs)


def gather_rows(tree: Any, spread: Spread | None) -> Any:
    """Small results, such as ids, on every device: each process may read them."""
    if spread is None or spread.placement.alone:
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(spread.placement.mesh))


def sum_rows(sums: Any, dtype: DTypeLike | None = None, *, ordered: bool = False) -> Any:
    """Adds the sums of devices to sums over all rows, within `map_rows`; shards stay in place.

    A shard's gradient was already summed over its axis when it was scattered. Matrices are sent in
    `dtype`, if one is given: in bfloat16, half the bytes. With `ordered` devices are added in
    order, so that the last bit does not depend on which process has which device.
    """

    def one(x: Any) -> Array:
        part, done = (x.part, x.over) if _is_shard(x) else (x, None)
        several = [a for a in ROW_AXES if a != done and jax.lax.axis_size(a) > 1]
        if not several:
            return part
        sent = part.astype(dtype) if dtype is not None and part.ndim > 1 else part
        if ordered:
            return jnp.sum(jax.lax.all_gather(sent, tuple(several)), axis=0).astype(part.dtype)
        return jax.lax.psum(sent, several).astype(part.dtype)

    return jax.tree.map(one, sums, is_leaf=_is_shard)
