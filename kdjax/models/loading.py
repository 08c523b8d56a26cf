"""From checkpoint to device: shapes, then shardings, then bytes, one tensor at a time.

Packed blocks travel to the device as they are, to become numbers there or to stay; the host never
holds more than one tensor, and the device never more than the model and one tensor.
"""

import functools
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from kdjax.device.sharding import parameter_spec, replicated
from kdjax.errors import UserError
from kdjax.formats import TensorTable
from kdjax.formats.blocks import decode, split
from kdjax.models import names
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, Params, functional
from kdjax.models.kernels import FP8
from kdjax.models.weights import Mixed, Packed, Scaled, quantize_rows

# Two quantizations of one matrix differ by a few percent; unrelated matrices by about 140%.
SAME_MATRIX = 0.2


def is_gguf(table: TensorTable) -> bool:
    """Whether names follow llama.cpp rather than Hugging Face."""
    return "general.architecture" in table.metadata


def tied_in_fact(table: TensorTable) -> bool:
    """Whether the head repeats the embedding, up to quantization, on 64 rows spread over both.

    Some published GGUF files of tied models store the matrix twice, in two block types.
    """
    embed, head = (_stored(names.name_of((key,)), table) for key in ("embed", "head"))
    if head not in table:
        return True
    if table.info(embed).shape != table.info(head).shape:
        return False
    rows = np.linspace(0, table.info(embed).shape[0] - 1, 64).astype(int)
    a, b = (np.asarray(decode(table.raw(n)[rows], table.info(n).dtype)) for n in (embed, head))
    return float(np.linalg.norm(a - b)) < SAME_MATRIX * float(np.linalg.norm(b))


def _stored(name: names.Name, table: TensorTable) -> str:
    return name.gguf if is_gguf(table) else name.hf


def _sources(path: tuple[str, ...], spec: ArchSpec, table: TensorTable) -> list[str]:
    """Tensors that make up one parameter: one, or one a layer."""
    name = _stored(names.name_of(path), table)
    if path == ("embed",) and spec.tied:
        # Stored twice: take the copy that kept more bits.
        head = _stored(names.name_of(("head",)), table)
        if head in table and name in table:
            name = max(name, head, key=lambda n: table.info(n).nbytes)
    if "{i}" not in name:
        return [name]
    return [name.format(i=i) for i in range(spec.num_layers)]


def tensor_names(table: TensorTable, spec: ArchSpec) -> dict[tuple[str, ...], list[str]]:
    """The tensors of each parameter: tree path to one name, or to one a layer."""
    _, abstract = functional(spec, Compute())
    leaves = jax.tree_util.tree_flatten_with_path(abstract)[0]
    paths = [tuple(key.key for key in keys) for keys, _ in leaves]
    sources = {path: _sources(path, spec, table) for path in paths}
    _check(sources, abstract, table)
    return sources


def _check(plan: dict[tuple[str, ...], list[str]], abstract: Any, table: TensorTable) -> None:
    """Raises one `UserError` that lists every missing, misshapen or unknown tensor."""
    problems, known = [], set()
    for path, sources in plan.items():
        want = functools.reduce(lambda tree, key: tree[key], path, abstract).shape
        want = want[1:] if len(sources) > 1 or path[0] == "blocks" else want
        for source in sources:
            known.add(source)
            if source not in table:
                problems.append(f"{source}: missing, expected shape {list(want)}")
            elif table.info(source).shape != tuple(want):
                problems.append(
                    f"{source}: shape {list(table.info(source).shape)}, expected {list(want)}"
                )
    both = {_stored(names.name_of((key,)), table) for key in ("embed", "head")}
    for name in table:
        if name not in known | both and not name.endswith(names.IGNORED):
            problems.append(f"{name}: not a tensor of this architecture")
    if problems:
        shown = "\n  ".join(problems[:40]) + ("\n  ..." if len(problems) > 40 else "")
        raise UserError(
            f"{table.paths[0]} does not match its own header ({len(problems)} tensors):\n"
            f"  {shown}\n"
            "The file is damaged or of another architecture: download or convert it again."
        )


def _unpermute(rows: Array, heads: int) -> Array:
    """Undoes llama.cpp's interleaving of rotary rows: per head (pairs, 2) back to (2, pairs)."""
    if not heads:
        return rows
    split = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _decode(raw: Array, *, dtype: str, out_dtype: Any, heads: int) -> Array:
    if raw.ndim == 1:  # a bias: its rows are numbers, which are several bytes each
        return _unpermute(decode(raw, dtype, out_dtype), heads)
    return decode(_unpermute(raw, heads), dtype, out_dtype)


def _scaled(raw: Array, *, dtype: str, heads: int) -> Scaled:
    return Scaled(*quantize_rows(_decode(raw, dtype=dtype, out_dtype=jnp.float32, heads=heads)))


def _split(raw: Array, *, dtype: str, heads: int) -> tuple[Array, ...]:
    return split(_unpermute(raw, heads), dtype)


def _store(buffers: Any, raw: Array, layer: Array, *, read: Any) -> Any:
    """Writes what `read` makes of a tensor into layer `layer` of its stacks."""
    return jax.tree.map(
        lambda buffer, value: jax.lax.dynamic_update_index_in_dim(buffer, value, layer, 0),
        buffers,
        read(raw),
    )


def load_params(
    table: TensorTable, spec: ArchSpec, abstract: Params, mesh: Mesh, *, matrices: str = "dense"
) -> Params:
    """Reads every parameter of `abstract` from the table onto the mesh.

    Weights become numbers of `abstract`'s dtypes on the device; with `matrices="packed"` matrices
    stay there in the file's blocks, as `Packed` and `Mixed`; with "fp8" all but the embedding
    become `Scaled`. Raises `UserError` listing all tensors that are missing, misshapen or unknown.
    """
    sources = tensor_names(table, spec)
    params: Params = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(abstract)[0]:
        path = tuple(key.key for key in keys)
        heads = names.head_count(names.name_of(path), spec) if is_gguf(table) else 0
        load = _load_dense
        if len(leaf.shape) - (path[0] == "blocks") == 2:
            scaled = _load_dense if path[0] == "embed" else _load_scaled  # ids look embeddings up
            load = {"dense": load, "packed": _load_packed, "fp8": scaled}[matrices]
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = load(table, sources[path], path, leaf, mesh, heads)
    return params


def _load_dense(table: TensorTable, sources: list[str], path: tuple[str, ...], leaf: Any,
                mesh: Mesh, heads: int) -> Array:  # fmt: skip
    place = NamedSharding(mesh, parameter_spec(path, leaf.shape, mesh))
    if path[0] != "blocks":
        how = dict(dtype=table.info(sources[0]).dtype, out_dtype=leaf.dtype, heads=heads)
        return _jitted(_decode, place, **how)(_to_device(table, sources[0], mesh))
    buffer = jnp.zeros(leaf.shape, leaf.dtype, device=place)
    for layer, name in enumerate(sources):
        how = dict(dtype=table.info(name).dtype, out_dtype=leaf.dtype, heads=heads)
        store = _storing(_decode, place, **how)
        buffer = store(buffer, _to_device(table, name, mesh), jnp.int32(layer))
    return buffer


def _load_scaled(table: TensorTable, sources: list[str], path: tuple[str, ...], leaf: Any,
                 mesh: Mesh, heads: int) -> Scaled:  # fmt: skip
    spec = parameter_spec(path, leaf.shape, mesh)
    place = Scaled(NamedSharding(mesh, spec), NamedSharding(mesh, P(*spec[:-1])))
    if path[0] != "blocks":
        how = dict(dtype=table.info(sources[0]).dtype, heads=heads)
        return _jitted(_scaled, place, **how)(_to_device(table, sources[0], mesh))
    stack = Scaled(
        jnp.zeros(leaf.shape, FP8, device=place.values),
        jnp.zeros(leaf.shape[:-1], jnp.float32, device=place.scale),
    )
    for layer, name in enumerate(sources):
        store = _storing(_scaled, place, dtype=table.info(name).dtype, heads=heads)
        stack = store(stack, _to_device(table, name, mesh), jnp.int32(layer))
    return stack


def _load_packed(table: TensorTable, sources: list[str], path: tuple[str, ...], leaf: Any,
                 mesh: Mesh, heads: int) -> Packed | Mixed:  # fmt: skip
    def stack(block: str, members: list[str]) -> Packed:
        how = dict(dtype=block, heads=heads)
        first = jax.eval_shape(functools.partial(_split, **how), table.raw(members[0]))
        lead = () if path[0] != "blocks" else (len(members),)
        shapes = [(*lead, *field.shape) for field in first]
        place = tuple(_field_sharding(path, shape, len(lead), mesh) for shape in shapes)
        if not lead:
            fields = _jitted(_split, place, **how)(_to_device(table, members[0], mesh))
            return Packed(fields, block, leaf.dtype)
        fields = tuple(
            jnp.zeros(shape, field.dtype, device=p)
            for shape, field, p in zip(shapes, first, place, strict=True)
        )
        for slot, name in enumerate(members):
            raw = _to_device(table, name, mesh)
            fields = _storing(_split, place, **how)(fields, raw, jnp.int32(slot))
        return Packed(fields, block, leaf.dtype)

    types = [table.info(name).dtype for name in sources]
    kinds = sorted(set(types))
    stacks = tuple(
        stack(kind, [n for n, t in zip(sources, types, strict=True) if t == kind]) for kind in kinds
    )
    if len(stacks) == 1:
        return stacks[0]
    which = [kinds.index(kind) for kind in types]
    slot = [types[:layer].count(kind) for layer, kind in enumerate(types)]
    index = functools.partial(jnp.asarray, dtype=jnp.int32, device=replicated(mesh))
    return Mixed(stacks, index(which), index(slot))


def _field_sharding(path: tuple[str, ...], shape: tuple[int, ...], lead: int,
                    mesh: Mesh) -> NamedSharding:  # fmt: skip
    """As the weight itself, its inputs counted in blocks; a block stays whole."""
    spec = parameter_spec(path, shape[: lead + 2], mesh)
    return NamedSharding(mesh, spec)


def _to_device(table: TensorTable, name: str, mesh: Mesh) -> Array:
    """The tensor's bytes, on every device."""
    view = table.raw(name)
    moved = jax.block_until_ready(jax.device_put(view, replicated(mesh), may_alias=False))
    _forget_pages(view)
    return moved


def _forget_pages(view: np.ndarray) -> None:
    """Takes the file's pages out of this process; they stay in the page cache, to be read again."""
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


@functools.cache
def _jitted(function: Any, place: Any, **how: Any) -> Any:
    return jax.jit(functools.partial(function, **how), out_shardings=place)


@functools.cache
def _storing(read: Any, place: Any, **how: Any) -> Any:
    store = functools.partial(_store, read=functools.partial(read, **how))
    return jax.jit(store, out_shardings=place, donate_argnums=0)
