"""One mesh (`data`, `fsdp`, `tensor`) and the rules that place parameters and batches on it.

One device is the 1 x 1 x 1 mesh: the same code runs on a laptop and on a host of GPUs.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kdjax.device.runtime import TRITON_PRODUCTS, says_products
from kdjax.errors import UserError

_log = logging.getLogger("kdjax")

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")  # the axes that split a batch's rows
ROWS = P(ROW_AXES)

# Last keys of a parameter's path -> axes of its last two dimensions, (out, in). Column-parallel
# products split their outputs over `tensor`, row-parallel ones their inputs; `fsdp` the rest.
_COLUMN, _ROW = ("tensor", "fsdp"), ("fsdp", "tensor")
_RULES: dict[str, tuple[str, str]] = dict.fromkeys(
    ("q", "k", "v", "qkv", "gate", "up", "embed", "head"), _COLUMN
)
_RULES |= dict.fromkeys(("o", "out", "down"), _ROW)


def make_mesh(data: int, fsdp: int, tensor: int, devices: list[Any] | None = None) -> Mesh:
    """The mesh over `devices` (default: all); `data=-1` takes what the other axes leave."""
    devices = list(jax.devices()) if devices is None else devices
    others = fsdp * tensor
    if data == -1 and others > 0 and len(devices) % others == 0:
        data = len(devices) // others
    if data < 1 or data * others != len(devices):
        raise UserError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} does not make "
            f"{len(devices)} devices. Set the three so that their product is {len(devices)}; "
            "mesh.data=-1 fills in the rest."
        )
    here = sum(device.process_index == jax.process_index() for device in devices)
    if len(devices) > here and here % tensor:
        raise UserError(
            f"mesh.tensor={tensor} does not divide the {here} devices of a process: "
            " a row lies within one process. Set mesh.tensor to a divisor, or start fewer "
            "processes with more devices each."
        )
    if len(devices) > 1 and devices[0].platform == "cpu":
        leave_cache_out()
    # Auto: the compiler propagates shardings. make_mesh would default to Explicit axes.
    grid = np.asarray(devices).reshape(data, fsdp, tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def list_meshes(
    data: int, fsdp: int, tensor: int, devices: Sequence[Any] | None = None
) -> list[Mesh]:
    """The meshes over `devices` (default: all) that these sizes allow.

    With `fsdp=0` each that fits, most copies first.
    """
    given = None if devices is None else list(devices)
    if fsdp or data > 0:
        return [make_mesh(data, fsdp or 1, tensor, given)]
    count = jax.device_count() if given is None else len(given)
    most = max(count // tensor, 1)
    return [make_mesh(-1, n, tensor, given) for n in range(1, most + 1) if most % n == 0]


def leave_cache_out() -> None:
    """Turns JAX's compilation cache off: this process compiles every program anew.

    All collectives of a program share one channel, so each device must run them in one order. XLA's
    CPU backend does so in programs that it has compiled. In programs from the cache it runs several
    at once, which ends the process or mixes up their numbers (jaxlib 0.10.2, 0.12.0).
    """
    if jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        _log.info("several CPU devices: programs are compiled anew, none comes from the cache")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX checks once whether there is a cache


def make_local_mesh(count: int | None = None) -> Mesh:
    """The mesh over the first `count` devices of this process (default: all), by rows alone."""
    return make_mesh(-1, 1, 1, jax.local_devices()[:count])


def parameter_spec(path: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition of one parameter; an axis that does not divide its dimension is dropped."""
    key = next((k for k in reversed(path[-2:]) if k in _RULES), None)
    if key is None or path[-1] == "bias" or len(shape) < 2:
        return P()
    rule = _RULES[key]
    if mesh.shape["tensor"] == 1 and shape[-2] % mesh.shape["fsdp"] == 0:
        rule = ("fsdp", "tensor")  # full rows: they gather without being moved, and keep blocks
    axes: list[Any] = [None] * (len(shape) - 2) + [
        axis if size % mesh.shape[axis] == 0 else None
        for axis, size in zip(rule, shape[-2:], strict=True)
    ]
    return P(*axes)


def parameter_shardings(abstract: Any, mesh: Mesh, *, split: bool = False) -> Any:
    """`NamedSharding` leaves for a nested dict of parameters or their shapes.

    With `split` the rows of matrices are split over `data`, for a mesh that has no other axis.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        spec = parameter_spec(tuple(key.key for key in path), leaf.shape, mesh)
        if split and len(spec) and leaf.shape[-2] % mesh.shape["data"] == 0:
            spec = P(*spec[:-2], "data", None)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, abstract)


def named_leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and leaf of a nested dict of parameters or their shapes."""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield tuple(key.key for key in keys), leaf


def count_shards(path: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> int:
    """Number of devices that one parameter is split over."""
    return math.prod(mesh.shape[axis] for axis in parameter_spec(path, shape, mesh) if axis)


def count_bytes(abstract: Any) -> int:
    """Bytes of all arrays of a tree, or of their shapes, each counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))


def tree_bytes(abstract: Any, mesh: Mesh) -> float:
    """Bytes of parameters, or of their shapes, on each device."""
    return sum(
        leaf.size * leaf.dtype.itemsize / count_shards(path, leaf.shape, mesh)
        for path, leaf in named_leaves(abstract)
    )


def splits_state(mesh: Mesh) -> bool:
    """Whether the GPUs of a process, `data` alone, each store 1 / N of masters and moments.

    Each gathers the others' parts in the compute dtype, a layer at a time. It receives the summed
    gradient of the part that it stores, and updates this part. The parts take 3 bytes where one sum
    of gradients takes 4, and copy engines move them during the products. Several processes, and
    GPUs that may not reach each other's memory, store everything and add gradients up once.
    """
    if mesh.size == 1 or mesh.shape["data"] != mesh.size:
        return False
    kinds = {getattr(device, "compute_capability", "") for device in mesh.devices.flat}
    here = {device.process_index for device in mesh.devices.flat} == {jax.process_index()}
    return here and all(kind in ("9.0", "10.0", "10.3") for kind in kinds)  # Hopper and Blackwell


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that every device holds in full."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over `data` and `fsdp`."""
    return NamedSharding(mesh, ROWS)


def row_shards(mesh: Mesh) -> int:
    """Number of devices that a batch's rows are split over."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def split_rows(count: int, mesh: Mesh) -> int:
    """Rows of each device, equal on all, of a batch that holds `count` rows or more."""
    return -(-count // row_shards(mesh))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's rows onto its devices; each column becomes one global array."""
    place = batch_sharding(mesh)
    return {k: jax.make_array_from_process_local_data(place, v) for k, v in batch.items()}


def put_whole_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts a batch as `put_batch` does, if every process has all of its rows."""
    place = batch_sharding(mesh)
    return {
        k: jax.make_array_from_callback(v.shape, place, v.__getitem__) for k, v in batch.items()
    }


def compiler_options(mesh: Mesh) -> dict[str, bool | str] | None:
    """XLA's options on an NVIDIA GPU, where cuBLASLt computes all products; None elsewhere.

    XLA would otherwise try its own kernels too. They save a tenth of a product but cost copies
    around it (341 ms against 337 for a 7B's hidden states at 16,384 positions on an H200), and
    trying them for float8 takes 77 s of compiling instead of 1. A user's word on products in
    XLA_FLAGS stands. Copy engines, not multiprocessors, move the arrays that two devices exchange.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return None
    options: dict[str, bool | str] = {} if says_products() else {TRITON_PRODUCTS: False}
    if splits_state(mesh):
        options["xla_gpu_collective_permute_mode"] = "COLLECTIVES_PEER_MEMORY"
    return options or None
