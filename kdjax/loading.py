"""From checkpoint to device: shapes, then shardings, then bytes, one tensor at a time.

Packed blocks travel to the device as they are and become numbers there; the host never holds
more than one tensor, and the device never more than the model and one tensor.
"""

import functools
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from kdjax.errors import UserError
from kdjax.formats import TensorTable
from kdjax.formats.blocks import decode
from kdjax.models import names
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Params
from kdjax.sharding import parameter_spec

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
    return decode(_unpermute(raw, heads), dtype, out_dtype)


def _store(buffer: Array, raw: Array, layer: Array, **how: Any) -> Array:
    value = _decode(raw, out_dtype=buffer.dtype, **how)
    return jax.lax.dynamic_update_index_in_dim(buffer, value, layer, 0)


def load_params(table: TensorTable, spec: ArchSpec, abstract: Params, mesh: Mesh) -> Params:
    """Reads every parameter of `abstract` from the table onto the mesh, in `abstract`'s dtypes.

    Raises `UserError` listing all tensors that are missing, misshapen or unknown.
    """
    leaves = jax.tree_util.tree_flatten_with_path(abstract)[0]
    plan = {tuple(k.key for k in keys): leaf for keys, leaf in leaves}
    sources = {path: _sources(path, spec, table) for path in plan}
    _check(sources, abstract, table)
    params: Params = {}
    for path, leaf in plan.items():
        place = jax.sharding.NamedSharding(mesh, parameter_spec(path, leaf.shape, mesh))
        heads = names.head_count(names.name_of(path), spec) if is_gguf(table) else 0
        value = _load_leaf(table, sources[path], leaf, place, heads, stacked=path[0] == "blocks")
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return params


def _load_leaf(table: TensorTable, sources: list[str], leaf: Any, place: Any, heads: int, *,
               stacked: bool) -> Array:  # fmt: skip
    def raw(name: str) -> Array:
        whole = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
        view = table.raw(name)
        moved = jax.block_until_ready(jax.device_put(view, whole, may_alias=False))
        _forget_pages(view)
        return moved

    if not stacked:
        how = dict(dtype=table.info(sources[0]).dtype, out_dtype=leaf.dtype, heads=heads)
        return _jitted(_decode, place, **how)(raw(sources[0]))
    buffer = jnp.zeros(leaf.shape, leaf.dtype, device=place)
    for layer, name in enumerate(sources):
        store = _jitted(_store, place, donate=True, dtype=table.info(name).dtype, heads=heads)
        buffer = store(buffer, raw(name), jnp.int32(layer))
    return buffer


def _forget_pages(view: np.ndarray) -> None:
    """Takes the file's pages out of this process; they stay in the page cache, to be read again."""
    base: Any = view
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


@functools.cache
def _jitted(function: Any, place: Any, donate: bool = False, **how: Any) -> Any:
    return jax.jit(
        functools.partial(function, **how),
        out_shardings=place,
        donate_argnums=(0,) if donate else (),
    )
