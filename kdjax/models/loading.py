"""From checkpoint to device: shapes, then shardings, then bytes, one tensor at a time.

Packed blocks are copied to the device as they are, and decoded there or kept; the host never holds
more than one tensor, and the device never more than the model and one tensor.
"""

import concurrent.futures
import dataclasses
import functools
import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.device.sharding import named_leaves, parameter_spec, replicated
from kdjax.errors import UserError
from kdjax.formats import LazyTensor, TensorTable
from kdjax.formats.blocks import BLOCKS, decode, row_bytes, split
from kdjax.formats.saved import SavedTable
from kdjax.formats.table import TensorInfo
from kdjax.models import names
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decoder import Compute, Params, functional
from kdjax.models.names import Layout
from kdjax.models.weights import Mixed, PackedMatrix, Scaled, Weight, quantize_rows

# How far two stored forms of one matrix may differ, in errors of their types: overall, and in a
# row. Of the published 0.5B (Q5_0 and Q8_0) and 1.5B (Q4_K and Q6_K) they differ by 1.12 and 0.86
# overall, by 1.55 and 1.05 in a row.
_OVERALL, _IN_A_ROW = 1.4, 2.5
_COMPARED = 4096  # rows at a time


def is_gguf(table: TensorTable) -> bool:
    """Whether names follow llama.cpp rather than Hugging Face."""
    return "general.architecture" in table.metadata


def is_saved(table: TensorTable) -> bool:
    """Whether the table is a saved step: named as in the tree, layers stacked."""
    return isinstance(table if table.base is None else table.base, SavedTable)


def has_tied_head(table: TensorTable, spec: ArchSpec) -> bool:
    """Whether the head is the embedding, as the header says; or in GGUF, up to rounding.

    A GGUF header does not say it, and some published files of tied models store the matrix twice,
    in two block types.
    """
    return spec.tied or (is_gguf(table) and repeats_embedding(table))


def repeats_embedding(table: TensorTable) -> bool:
    """Whether a stored head is the embedding but for the rounding of their types, in every row.

    Two matrices of one type of plain numbers must be equal. A head that a truncated file lacks
    counts as a separate one, which takes more memory.
    """
    embed, head = (table.info(_stored((key,), table)) for key in ("embed", "head"))
    if embed.shape != head.shape or not (table.holds(embed.name) and table.holds(head.name)):
        return False
    stored = table.raw(embed.name), table.raw(head.name)
    if embed.dtype == head.dtype and np.array_equal(*stored):
        return True
    error = rounding_error(embed.dtype) + rounding_error(head.dtype)
    if embed.dtype == head.dtype and BLOCKS[head.dtype].elements == 1:
        error = 0.0
    parts, types = [], (embed.dtype, head.dtype)
    for start in range(0, head.shape[0], _COMPARED):
        first = max(min(start, head.shape[0] - _COMPARED), 0)  # rows of one number: one program
        rows = (raw[first : first + _COMPARED] for raw in stored)
        parts.append([np.asarray(x)[start - first :] for x in _compare_rows(*rows, types=types)])
        if np.linalg.norm(parts[-1][0]) > _IN_A_ROW * error * np.linalg.norm(parts[-1][1]):
            return False
    off, size = map(np.concatenate, zip(*parts, strict=True))
    size = np.maximum(
        size, 0.01 * size.mean()
    )  # numbers near 0 round to other shares of their size
    alike = np.linalg.norm(off) <= _OVERALL * error * np.linalg.norm(size)
    return bool(alike and (off <= _IN_A_ROW * error * size).all())


@functools.partial(jax.jit, static_argnames="types")
def _compare_rows(embed: Array, head: Array, *, types: tuple[str, str]) -> tuple[Array, Array]:
    """Distances of the rows of two stored matrices, and sizes of the second's rows.

    Operation by operation all rows of the published 0.5B took 3 s of a core more.
    """
    a, b = decode(embed, types[0]), decode(head, types[1])
    return jnp.linalg.norm(a - b, axis=1), jnp.linalg.norm(b, axis=1)


def rounding_error(block: str) -> float:
    """Root mean square of what a type's rounding changes, as a share of the numbers' size.

    Of block types on normal numbers, within a third for those with 2 to 9 bits a number.
    """
    plain = {"F32": 0.0, "F16": 2.0**-12, "BF16": 2.0**-9}
    bits = 8 * BLOCKS[block].nbytes / BLOCKS[block].elements
    return plain.get(block, 0.07 * 2 ** (4.5 - bits))


def split_fused(table: TensorTable, spec: ArchSpec) -> TensorTable:
    """Splits matrices that the family's files fuse, under the names of other families.

    No bytes are copied.
    """
    if isinstance(table, SavedTable):
        return table
    fused = names.list_fused(spec, gguf=is_gguf(table))
    if is_gguf(table):
        fused |= names.list_paired(spec)
    if not any(name in table for name in fused):
        return table
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in table.tensors.items():
        whole = fused.get(name)
        if whole is None or whole.lead != tensor.info.shape[:-1]:
            tensors[name] = tensor
        else:
            tensors |= _split(tensor, whole)
    return table.replace(tensors)


def _split(tensor: LazyTensor, fused: names.Fused) -> dict[str, LazyTensor]:
    """The matrices that a tensor holds in its rows."""
    info, start, parts = tensor.info, 0, {}
    *stack, height = fused.lead
    if sum(rows for _, rows in fused.parts) > height:
        stack, height = [], math.prod(fused.lead)

    def read(rows: slice) -> np.ndarray:
        return tensor.read().reshape(*stack, height, -1)[..., rows, :]

    for part, rows in fused.parts:
        nbytes = info.nbytes // height * rows
        own = TensorInfo(part, (*stack, rows, info.shape[-1]), info.dtype, nbytes)
        take = functools.partial(read, slice(start, start + rows))
        parts[part] = LazyTensor(own, take, tensor.held)
        start += rows
    return parts


def _stored(path: tuple[str, ...], table: TensorTable, spec: ArchSpec | None = None) -> str:
    """The name under which the table holds a parameter, `{i}` and `{e}` as in `names.Name`."""
    if is_saved(table):
        return "/".join(path)
    name = names.name_of(path, spec)
    return name.gguf if is_gguf(table) else name.hf


def _sources(path: tuple[str, ...], spec: ArchSpec, table: TensorTable) -> list[str]:
    """Names of a parameter's tensors: one, one for each layer, or for each expert of each layer."""
    name = _stored(path, table, spec)
    if path == ("embed",) and spec.tied:
        # Stored twice: take the copy with more bits. Stored once: under either name.
        there = [n for n in (name, _stored(("head",), table)) if n in table]
        name = max(there, key=lambda n: table.info(n).nbytes, default=name)
    layers = names.layers_of(path, spec)
    if layers is None or is_saved(table):
        return [name]
    experts = range(spec.experts if "{e}" in name else 1)
    return [name.format(i=i, e=e) for i in layers for e in experts]


@functools.lru_cache(maxsize=8)
def _shapes(spec: ArchSpec) -> Mapping[tuple[str, ...], tuple[int, ...]]:
    """Every parameter's shape by its path in the tree, layers stacked."""
    return {path: leaf.shape for path, leaf in named_leaves(functional(spec, Compute())[1])}


def count_parameters(spec: ArchSpec) -> int:
    """Number of weights, the head counted once if tied."""
    return sum(map(math.prod, _shapes(spec).values()))


def tensor_names(table: TensorTable, spec: ArchSpec) -> dict[tuple[str, ...], list[str]]:
    """Maps each parameter's path to its tensors: one, one for each layer, or for each expert.

    Raises one `UserError` that lists every missing, misshapen or unknown tensor.
    """
    sources = {path: _sources(path, spec, table) for path in _shapes(spec)}
    problems, known = [], {_stored((key,), table) for key in ("embed", "head")}
    for path, tensors in sources.items():
        expected = _shapes(spec)[path][_stacked(table, path) :]
        expected = _layout(path, spec, table).file_shape(expected)
        for name in tensors:
            known.add(name)
            if name not in table:
                problems.append(f"{name}: missing, expected shape {list(expected)}")
            elif (found := table.info(name).shape) != expected:
                problems.append(f"{name}: shape {list(found)}, expected {list(expected)}")
    for name in table:
        if name not in known and not name.endswith(names.IGNORED):
            what = "not a tensor of this architecture"
            if name.endswith((".scale", ".input_scale")):
                what = "a factor of a matrix, as of NVFP4: kdjax applies none"
            problems.append(f"{name}: {what}")
    if problems:
        shown = "\n  ".join(problems[:40]) + ("\n  ..." if len(problems) > 40 else "")
        raise UserError(_mismatch(table, len(problems), shown))
    return sources


def _mismatch(table: TensorTable, count: int, shown: str) -> str:
    if isinstance(table, SavedTable):
        return (
            f"{table.folder} does not match its student ({count} tensors differ):\n  {shown}\n"
            "This run began with another model: name that one, base=PATH (--student=PATH)."
        )
    return (
        f"{table.paths[0]} does not match its own header ({count} tensors):\n  {shown}\n"
        "The file is damaged or of another architecture: download or convert it again."
    )


def _layout(path: tuple[str, ...], spec: ArchSpec, table: TensorTable) -> Layout:
    saved = isinstance(table, SavedTable)
    return Layout() if saved else names.layout_of(path, spec, gguf=is_gguf(table))


@dataclasses.dataclass(frozen=True)
class _Reading:
    """How a tensor's bytes become a weight; hashable, so that it can be static."""

    form: str  # "dense", "packed" or "float8"
    block: str  # of the bytes: a key of `blocks.BLOCKS`
    dtype: DTypeLike  # of the numbers, decoded or plain
    layout: Layout

    def __call__(self, raw: Array) -> Array | PackedMatrix | Scaled:
        read = self.layout.read_order
        if self.form == "packed":
            return PackedMatrix(split(read(raw), self.block), self.block, self.dtype)
        if self.form == "float8":
            return Scaled(*quantize_rows(self._decode(raw, jnp.float32)))
        # A norm's offset, in float32: in bfloat16 1 + weight has lost digits of the weight.
        if self.layout.offset:
            return (self._decode(raw, jnp.float32) - self.layout.offset).astype(self.dtype)
        return self._decode(raw, self.dtype)

    def _decode(self, raw: Array, dtype: DTypeLike) -> Array:
        read = self.layout.read_order
        if raw.ndim == 1:  # a bias: its rows are numbers of several bytes
            return read(decode(raw, self.block, dtype))
        return decode(read(raw), self.block, dtype)


@functools.partial(jax.jit, static_argnames=("reading", "place"))
def _read(raw: Array, reading: _Reading, place: Any) -> Weight:
    return jax.lax.with_sharding_constraint(reading(raw), place)


@functools.partial(jax.jit, static_argnames=("reading", "place"), donate_argnames="stack")
def _store(stack: Weight, raw: Array, number: Array, reading: _Reading, place: Any) -> Weight:
    """Writes a tensor's weight into its place in the stack; tensors count in order."""

    def write(buffer: Array, value: Array) -> Array:
        lead = buffer.shape[: buffer.ndim - value.ndim]  # layers; or layers and experts
        at = (*jnp.unravel_index(number, lead), *(jnp.zeros((), jnp.int32),) * value.ndim)
        return jax.lax.dynamic_update_slice(buffer, value[(None,) * len(lead)], at)

    stack = jax.tree.map(write, stack, reading(raw))
    return jax.lax.with_sharding_constraint(stack, place)


def load_params(
    table: TensorTable, spec: ArchSpec, abstract: Params, mesh: Mesh, *, matrices: str = "dense"
) -> Params:
    """Reads every parameter of `abstract` from the table onto the mesh.

    Weights become numbers of `abstract`'s dtypes on the device; with `matrices="packed"` matrices
    stay there in the file's blocks, as `PackedMatrix` and `Mixed`; with "float8" all but the
    embedding become `Scaled`. Raises `UserError` listing all tensors that are missing, misshapen or
    unknown. A router stays numbers: it is small, and its choices are those of float32.
    """
    if matrices == "float8" and (spec.experts or spec.delta_value_heads):
        parts = "experts" if spec.experts else "delta layers"
        raise UserError(
            f"{table.paths[0]} is a model of {parts}, whose products are not computed in float8. "
            "Load it packed or dense (@packed or @dense; teacher.weights=packed)."
        )
    planned = plan_params(table, spec, abstract, mesh, matrices=matrices)
    shapes, tree = jax.tree.flatten({path: [s.whole for s in planned[path]] for path in planned})
    begun = jax.tree.unflatten(tree, _make_zeros(tuple(shapes)) if shapes else [])
    sources, params = tensor_names(table, spec), {}
    _compile_programs(table, planned, begun, mesh)
    for path, stacks in planned.items():
        filled = [_fill(table, *pair, mesh) for pair in zip(stacks, begun.pop(path), strict=True)]
        params[path] = filled[0] if len(filled) == 1 else _mix(sources[path], stacks, filled, mesh)
    return unflatten_dict(params)


def shape_params(
    table: TensorTable, spec: ArchSpec, abstract: Params, mesh: Mesh, *, matrices: str = "dense"
) -> Params:
    """Shapes of the parameters that `load_params` makes; reads headers."""
    params: dict[tuple[str, ...], Any] = {}
    for path, stacks in plan_params(table, spec, abstract, mesh, matrices=matrices).items():
        shapes = [_shape_stack(table, stack) for stack in stacks]
        index = jax.ShapeDtypeStruct((sum(len(stack.readings) for stack in stacks),), jnp.int32)
        params[path] = shapes[0] if len(shapes) == 1 else Mixed(tuple(shapes), index, index)
    return unflatten_dict(params)


def _shape_stack(table: TensorTable, stack: "_Stack") -> Any:
    """Shapes of a stack's arrays, or of a single tensor."""
    if stack.whole is not None:
        return stack.whole
    ((name, reading),) = stack.readings.items()
    info = table.info(name)
    stored = (*info.shape[:-1], row_bytes(info.dtype, info.shape[-1]))
    return jax.eval_shape(reading, jax.ShapeDtypeStruct(stored, jnp.uint8))


def plan_params(
    table: TensorTable, spec: ArchSpec, abstract: Params, mesh: Mesh, *, matrices: str
) -> dict[tuple[str, ...], list["_Stack"]]:
    """Plans the weights of `load_params`: for each parameter a stack for each block type."""
    sources = tensor_names(table, spec)
    planned: dict[tuple[str, ...], list[_Stack]] = {}
    for path, leaf in named_leaves(abstract):
        form, layout = "dense", _layout(path, spec, table)
        if len(leaf.shape) - (path[0] in STACKS) >= 2 and not set(names.EXACT) & set(path):
            # Ids index embeddings.
            form = "dense" if path[0] == "embed" and matrices == "float8" else matrices
        dtype = jnp.dtype(leaf.dtype)
        readings = {
            name: _Reading(form, table.info(name).dtype, dtype, layout) for name in sources[path]
        }
        planned[path] = [
            _plan_stack(table, group, path, leaf, mesh)
            for group in _group(table, readings, path, leaf)
        ]
    return planned


def _stacked(table: TensorTable, path: tuple[str, ...]) -> int:
    """Number of leading axes that count a parameter's tensors: 0, 1 for layers, 2 with experts."""
    if path[0] not in STACKS or is_saved(table):
        return 0
    return 2 if path[1:] in names.APART and not is_gguf(table) else 1


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Tensors of one weight: how each is read, and the shapes and shardings of its arrays."""

    readings: Mapping[str, _Reading]  # by name, in order
    place: Any  # shardings, of one tensor's arrays or of the stack's
    whole: Any  # shapes of the stack's arrays; None for a single tensor


def _group(
    table: TensorTable,
    readings: Mapping[str, _Reading],
    path: tuple[str, ...],
    leaf: jax.ShapeDtypeStruct,
) -> list[dict[str, _Reading]]:
    """Groups a parameter's tensors into stacks: packed blocks make one for each type."""
    kinds = sorted({reading.block for reading in readings.values()})
    if len(kinds) == 1 or not all(reading.form == "packed" for reading in readings.values()):
        return [dict(readings)]
    if len(readings) > leaf.shape[0]:
        raise UserError(
            f"{table.paths[0]} stores the experts of {'/'.join(path)} in several types: "
            f"{', '.join(kinds)}; expected one. Load it dense."
        )
    return [{n: r for n, r in readings.items() if r.block == kind} for kind in kinds]


def _mix(
    layers: Sequence[str], stacks: Sequence[_Stack], filled: Sequence[Any], mesh: Mesh
) -> Mixed:
    """Joins stacks of several block types into one weight, with the place of each layer."""
    orders = [list(stack.readings) for stack in stacks]
    which = [next(i for i, order in enumerate(orders) if name in order) for name in layers]
    slot = [orders[i].index(name) for i, name in zip(which, layers, strict=True)]
    index = [jax.device_put(np.array(x, np.int32), replicated(mesh)) for x in (which, slot)]
    return Mixed(tuple(filled), *index)


def _plan_stack(
    table: TensorTable,
    readings: Mapping[str, _Reading],
    path: tuple[str, ...],
    leaf: jax.ShapeDtypeStruct,
    mesh: Mesh,
) -> _Stack:
    """Shapes and shardings of a stack, or of a single tensor."""
    name, reading = next(iter(readings.items()))
    info, stacked = table.info(name), _stacked(table, path)
    size = row_bytes(info.dtype, info.shape[-1])
    one = jax.eval_shape(reading, jax.ShapeDtypeStruct((*info.shape[:-1], size), jnp.uint8))
    experts = leaf.shape[1:stacked]
    lead = (len(readings) // math.prod(experts), *experts) if stacked else ()

    def place_array(array: jax.ShapeDtypeStruct) -> NamedSharding:
        # Sharded as the weight, with inputs counted in blocks, which are not split; scales as its
        # rows.
        shape = (*lead, *array.shape)
        whole = (*shape, 1)[: len(leaf.shape)]
        return NamedSharding(mesh, P(*parameter_spec(path, whole, mesh)[: len(shape)]))

    def stack(array: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *array.shape), array.dtype, sharding=place)

    place = jax.tree.map(place_array, one)
    return _Stack(readings, place, jax.tree.map(stack, one, place) if stacked else None)


@functools.partial(jax.jit, static_argnames="arrays")
def _make_zeros(arrays: tuple[jax.ShapeDtypeStruct, ...]) -> list[Array]:
    """All stacks of a model by one program: one for each shape took 18 ms a shape to compile."""
    return [
        jax.lax.with_sharding_constraint(jnp.zeros(array.shape, array.dtype), array.sharding)
        for array in arrays
    ]


def _compile_programs(
    table: TensorTable,
    planned: Mapping[tuple[str, ...], Sequence["_Stack"]],
    begun: Mapping[tuple[str, ...], Sequence[Any]],
    mesh: Mesh,
) -> None:
    """Compiles the programs of `_fill` in threads, all at once; calls find them.

    One after the other 22 programs of a 1.5B and a 0.5B took 4.1 of 7.0 s of loading on an H200.
    """
    if mesh.is_multi_process:  # processes compile in one order
        return
    lowered: dict[Any, Any] = {}
    for path, stacks in planned.items():
        for number, (stack, arrays) in enumerate(zip(stacks, begun[path], strict=True)):
            for name, reading in stack.readings.items():
                info = table.info(name)
                shape = (*info.shape[:-1], row_bytes(info.dtype, info.shape[-1]))
                key = path, number, reading, shape
                if key in lowered:
                    continue
                place = _place_bytes(shape, mesh, reading, stack.place)
                raw = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=place)
                fixed = reading, stack.place
                if stack.whole is None:
                    lowered[key] = _read.lower(raw, *fixed)
                else:
                    lowered[key] = _store.lower(arrays, raw, jnp.int32(0), *fixed)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for program in lowered.values():
            pool.submit(program.compile)  # an error comes again where the program is called


def _fill(table: TensorTable, stack: _Stack, begun: Any, mesh: Mesh) -> Weight:
    """Makes a weight: fills `begun`, zeros, with tensors in order, or takes a single tensor."""
    for number, (name, reading) in enumerate(stack.readings.items()):
        raw = _to_device(table, name, mesh, reading, stack.place)
        if stack.whole is None:
            return _read(raw, reading, stack.place)
        begun = _store(begun, raw, jnp.int32(number), reading, stack.place)
    return begun


def _to_device(table: TensorTable, name: str, mesh: Mesh, reading: _Reading, places: Any) -> Array:
    """Copies a tensor's bytes to the devices: each gets its rows if `fsdp` splits them.

    A process reads the rows of its devices, and a host reads each page of the file once.
    """
    view = table.raw(name)
    if reading.layout.rate:
        if reading.block != "F32":
            raise UserError(
                f"{table.paths[0]}: found {name} in {reading.block}; expected F32, in which "
                "llama.cpp's converter writes it. Convert the model again."
            )
        view = names.read_rate(view.view(np.float32)).view(np.uint8)
    place = _place_bytes(view.shape, mesh, reading, places)
    if jax.process_count() == 1 and not place.spec:
        moved = jax.device_put(view, place, may_alias=False)
    else:  # device_put would compare the arrays of all processes
        copies: dict[str, np.ndarray] = {}  # several devices may hold equal rows

        def copy(at: Any) -> np.ndarray:
            if str(at) not in copies:
                copies[str(at)] = np.array(view[at])
            return copies[str(at)]

        moved = jax.make_array_from_callback(view.shape, place, copy)
    jax.block_until_ready(moved)
    _forget_pages(view)
    return moved


def _place_bytes(
    shape: tuple[int, ...], mesh: Mesh, reading: _Reading, places: Any
) -> NamedSharding:
    """The sharding of a tensor's bytes: by rows if `fsdp` splits the weight's."""
    spec = jax.tree.leaves(places)[0].spec
    split = len(spec) > 1 and spec[-2] == "fsdp" and not reading.layout.moves and len(shape) >= 2
    rows = P(*(None,) * (len(shape) - 2), "fsdp")
    return NamedSharding(mesh, rows if split else P())


def _forget_pages(view: np.ndarray) -> None:
    """Unmaps the file's pages from this process; they stay in the page cache."""
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
