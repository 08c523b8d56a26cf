"""Adapters of a frozen base: which matrices have one, their initial values, and their files.

They are low-rank (LoRA: Hu et al. 2021, arXiv:2106.09685), as in PEFT: a change
alpha / rank * B A of a matrix W `[out, in]`, A `[rank, in]` and B `[out, rank]`.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from kdjax.device.sharding import make_mesh
from kdjax.errors import UserError, suggest
from kdjax.formats import LazyTensor, TensorTable
from kdjax.formats.blocks import decode
from kdjax.formats.safetensors import ADAPTER_CONFIG, read_peft
from kdjax.formats.saved import LORA, SavedTable
from kdjax.formats.table import TensorInfo
from kdjax.models import names
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decoder import Compute, Params, functional
from kdjax.models.families import FAMILIES
from kdjax.models.loading import is_gguf, is_saved, load_params, tensor_names
from kdjax.models.weights import Adapted

Key = tuple[str, ...]  # a parameter's path in the tree
Pair = tuple[np.ndarray, np.ndarray]  # A [L, rank, in] and B [L, out, rank], float32
DEFAULT_RANK, DEFAULT_ALPHA = 16, 32.0
_AT_A_TIME = 8  # columns of B and rows of A that one pass over the numbers adds
_ALL = "all-linear"  # PEFT's word for every matrix of the layers
PREFIX = "base_model.model."  # of PEFT's tensors
_ROW_A_HEAD = (("delta", "alpha"), ("delta", "beta"))  # 32 rows of a 9B, fewer than many a rank


@dataclasses.dataclass(frozen=True)
class Lora:
    """The size of adapters, and the matrices that have one."""

    rank: int
    alpha: float
    targets: tuple[Key, ...]

    @property
    def scale(self) -> float:
        """Factor of each product B A."""
        return self.alpha / self.rank

    @property
    def record(self) -> dict[str, Any]:
        """The record in a saved step, as JSON values; `of_record` reads it."""
        targets = ["/".join(path) for path in self.targets]
        return {"rank": self.rank, "alpha": self.alpha, "targets": targets}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Lora":
        """Reads what `record` wrote."""
        targets = tuple(tuple(path.split("/")) for path in record["targets"])
        return cls(int(record["rank"]), float(record["alpha"]), targets)

    @classmethod
    def of_params(cls, params: Params) -> "Lora | None":
        """Reads a model's parameters; None for a model without adapters."""
        found = {path: x for path, x in _list_adapted(params) if x.a is not None}
        if not found:
            return None
        first = next(iter(found.values()))
        rank = first.a.shape[-2]
        return cls(rank, first.scale * rank, tuple(found))


def _list_adapted(params: Params) -> Iterator[tuple[Key, Adapted]]:
    for path, leaf in flatten_dict(params).items():
        if isinstance(leaf, Adapted):
            yield path, leaf


@functools.lru_cache(maxsize=8)
def list_adaptable(spec: ArchSpec) -> dict[Key, tuple[int, ...]]:
    """Lists matrices of layers that can have adapters, by path, with their shapes `[L, out, in]`.

    L counts the layers that have the matrix: a model of two kinds of layers has a stack of each.
    """
    shapes: dict[Key, Any] = flatten_dict(functional(spec, Compute())[1])
    return {
        path: leaf.shape
        for path, leaf in shapes.items()
        if STACKS.get(path[0]) is not None
        and len(leaf.shape) == 3
        and not set(names.EXACT) & set(path)
    }


def module_name(path: Key, spec: ArchSpec) -> str:
    """PEFT's name of a matrix within its layer: `self_attn.q_proj`."""
    return names.name_of(path, spec).hf.removesuffix(".weight").partition("{i}.")[2]


def reorder(stack: np.ndarray, part: str, layout: names.Layout, *, write: bool) -> np.ndarray:
    """Puts A or B of all layers, as `part` says, into a file's order of the matrix, or back.

    B has the rows of the matrix, A its columns.
    """
    if (part == "a") != layout.columns:
        return stack
    return np.stack([(layout.write_order if write else layout.read_order)(x) for x in stack])


def _name_target(path: Key, spec: ArchSpec) -> tuple[str, ...]:
    """All names of a matrix: PEFT's, GGUF's, and our path."""
    gguf = names.name_of(path, spec).gguf.removesuffix(".weight").partition("{i}.")[2]
    module, ours = module_name(path, spec), "/".join(path[1:]).removesuffix("/weight")
    return module.rpartition(".")[2], gguf, module, ours, ours.rpartition("/")[2]


def choose_lora(
    spec: ArchSpec, rank: int = DEFAULT_RANK, alpha: float = DEFAULT_ALPHA, targets: str = ""
) -> Lora:
    """Adapters of the matrices that `targets` names, separated by commas; "": of all in the layers.

    Names are PEFT's (`q_proj`) or GGUF's (`attn_q`). Matrices of delta layers with one row a head
    have adapters only if they are named. Raises `UserError` for unknown names, for a rank above a
    matrix's, and for models with experts or fused matrices.
    """
    if spec.experts:
        raise UserError(
            f"found a {spec.family} model of {spec.experts} experts to adapt; expected one without "
            "experts, whose matrices are routed. Train all of it (student.lora.rank 0, --rank=0)."
        )
    if FAMILIES[spec.family].fused:
        raise UserError(
            f"found a {spec.family} model to adapt, whose files keep q, k and v as one matrix; "
            "expected one whose matrices have separate names, as adapters do. Train all of it "
            "(student.lora.rank 0, --rank=0)."
        )
    known = {path: _name_target(path, spec) for path in list_adaptable(spec)}
    words = [word.strip() for word in targets.split(",") if word.strip()]
    if not words or words == [_ALL]:
        chosen = {path for path in known if path[1:3] not in _ROW_A_HEAD}
    else:
        chosen = {path for path, aliases in known.items() if set(aliases) & set(words)}
        for word in words:
            if not any(word in aliases for aliases in known.values()):
                _refuse_target(word, known)
    wide = {path: shape for path, shape in list_adaptable(spec).items() if path in chosen}
    least = min(wide, key=lambda path: min(wide[path][1:]))
    if not 1 <= rank <= min(wide[least][1:]):
        raise UserError(
            f"found rank {rank} for adapters; expected 1 to {min(wide[least][1:])}: "
            f"{known[least][0]} has shape {list(wide[least][1:])}. Lower student.lora.rank "
            "(--rank), or leave that matrix out of student.lora.targets."
        )
    if not alpha > 0:
        raise UserError(f"found alpha={alpha} for adapters; expected a number above 0.")
    return Lora(rank, float(alpha), tuple(path for path in known if path in chosen))


def _refuse_target(word: str, known: Mapping[Key, tuple[str, ...]]) -> None:
    listed = ", ".join(f"{aliases[0]} ({aliases[1]})" for aliases in known.values())
    if word in ("embed_tokens", "token_embd", "embed", "lm_head", "output", "head"):
        raise UserError(
            f"found the target {word!r}; expected matrices of the layers: {listed}. Embedding and "
            "head, which may be one matrix, stay as they are: leave it out."
        )
    near = suggest(word, [alias for aliases in known.values() for alias in aliases[:2]])
    raise UserError(
        f"found the target {word!r}, which this model does not have; expected some of {listed}, by "
        f"commas, or nothing for all.{near}"
    )


def draw_adapters(lora: Lora, spec: ArchSpec, seed: int) -> Params:
    """A seeded, B zero: float32 arrays as a nested dict, `{..., "weight": {"a": A, "b": B}}`.

    A is uniform within 1 / sqrt(in), as in PEFT; each matrix has its random stream.
    """
    drawn: dict[Key, Array] = {}
    for path in lora.targets:
        layers, outer, inner = list_adaptable(spec)[path]
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(path).encode()))
        shape, bound = (layers, lora.rank, inner), inner**-0.5
        drawn[*path, "a"] = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        drawn[*path, "b"] = jnp.zeros((layers, outer, lora.rank), jnp.float32)
    return unflatten_dict(drawn)


def shape_adapters(lora: Lora, spec: ArchSpec) -> Params:
    """Shapes of `draw_adapters`."""
    return jax.eval_shape(functools.partial(draw_adapters, lora, spec, 0))


def freeze_matrices(params: Params, spec: ArchSpec, scale: float) -> Params:
    """The parameters with every matrix of the layers frozen, without changes yet."""
    flat: dict[Key, Any] = flatten_dict(params)
    for path in list_adaptable(spec):
        flat[path] = Adapted(flat[path], scale=scale)
    return unflatten_dict(flat)


def split_adapters(params: Params) -> tuple[Params, Params]:
    """The frozen part of a model's parameters, and its adapters, a tree as of `draw_adapters`."""
    flat: dict[Key, Any] = flatten_dict(params)
    adapters: dict[Key, Any] = {}
    for path, leaf in _list_adapted(params):
        if leaf.a is not None:
            adapters[*path, "a"], adapters[*path, "b"] = leaf.a, leaf.b
            flat[path] = dataclasses.replace(leaf, a=None, b=None)
    return unflatten_dict(flat), unflatten_dict(adapters)


def join_adapters(frozen: Params, adapters: Params) -> Params:
    """Undoes `split_adapters`; no array is copied."""
    flat: dict[Key, Any] = flatten_dict(frozen)
    for (*path, part), array in flatten_dict(adapters).items():
        flat[tuple(path)] = dataclasses.replace(flat[tuple(path)], **{part: array})
    return unflatten_dict(flat)


def add_change(numbers: Array, a: Array, b: Array, scale: float) -> Array:
    """numbers + scale B A, `[L, out, in]` float32: the same bits on every backend.

    A and scale B are taken with 12 significant bits, whose products are exact, and added in the
    order of the rank: whether a backend rounds products before it adds them then changes nothing.
    """

    def add(numbers: Array, parts: tuple[Array, Array]) -> tuple[Array, None]:
        for row, column in zip(*parts, strict=True):
            numbers = numbers + column[..., :, None] * row[..., None, :]
        return numbers, None

    def split(x: Array, axis: int) -> Array:
        """A few of the rank at a time: parts, rank of a part, and the other axes."""
        x = jnp.moveaxis(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11), axis, 0)
        x = jnp.pad(x, [(0, -len(x) % _AT_A_TIME)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, _AT_A_TIME, *x.shape[1:])

    return jax.lax.scan(add, numbers, (split(a, -2), split(scale * b, -1)))[0]


@dataclasses.dataclass(frozen=True)
class StoredAdapters:
    """Adapters on a disk, of which only the header was read."""

    lora: Lora
    paths: tuple[Path, ...]  # of their files
    read: Callable[[Key], Pair]  # float32, layers stacked
    name: str  # for messages

    def read_tree(self) -> Params:
        """All of them, on the host."""
        flat: dict[Key, np.ndarray] = {}
        for path in self.lora.targets:
            flat[*path, "a"], flat[*path, "b"] = self.read(path)
        return unflatten_dict(flat)


def saved_adapters(table: SavedTable, name: str) -> StoredAdapters:
    """Reads the adapters of a run's saved step."""

    def read(path: Key) -> Pair:
        stem = "/".join(path)
        return table.array(f"{stem}/a"), table.array(f"{stem}/b")

    return StoredAdapters(Lora.of_record(table.form[LORA]), table.paths, read, name)


class SavedSum(SavedTable):
    """A saved step of adapters that trained under rounding, as one of all the student's parameters.

    Its masters are base + scale B A, with the bits that the step rounded (`add_change`); blocks are
    those of the scales that were saved.
    """

    def __init__(self, workdir: Path, step: int, base: TensorTable, spec: ArchSpec):
        super().__init__(workdir, step)
        self._lora, self._beside, self._spec = Lora.of_record(self.form[LORA]), base, spec
        self.paths, self.cut = (*base.paths, *self.paths), base.cut
        self._shapes: dict[Key, Any] = flatten_dict(functional(spec, Compute())[1])
        self.tensors = {"/".join(path): self._sum_tensor(path) for path in self._shapes}

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the matrices with adapters."""
        return tuple("/".join(path) for path in self._lora.targets)

    def _sum_tensor(self, path: Key) -> LazyTensor:
        name, shape = "/".join(path), tuple(self._shapes[path].shape)
        info = TensorInfo(name, shape, "F32", 4 * math.prod(shape))
        return LazyTensor(info, functools.partial(self._read_bytes, name))

    def array(self, name: str) -> np.ndarray:
        """The sum, float32; reads the base and the adapters of this parameter at each call."""
        path, cpu = tuple(name.split("/")), jax.local_devices(backend="cpu")[:1]
        shape = jax.ShapeDtypeStruct(self._shapes[path].shape, jnp.float32)
        mesh = make_mesh(1, 1, 1, cpu)
        read = load_params(self._beside, self._spec, unflatten_dict({path: shape}), mesh)
        (numbers,) = jax.tree.leaves(read)
        if path in self._lora.targets:
            read_part = super().array
            a, b = (jax.device_put(read_part(f"{name}/{part}"), cpu[0]) for part in "ab")
            numbers = add_change(numbers, a, b, self._lora.scale)
        return np.array(numbers)


_REFUSED = {  # what PEFT has and kdjax has not, and its plain value
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "use_qalora": False,
    "lora_bias": False,
    "target_parameters": None,
    "alora_invocation_tokens": None,
    "layer_replication": None,
    "use_bdlora": None,
    "arrow_config": None,
    "init_lora_weights": True,
}
# Initial values that involve A and B alone. With others (pissa, olora, corda, loftq) PEFT changes
# the base when it loads an adapter: it subtracts the initial B A.
_PLAIN_STARTS = (True, "gaussian", "eva", "orthogonal")


def open_peft(folder: Path, spec: ArchSpec) -> StoredAdapters:
    """The adapters of a PEFT folder, for a base of this architecture; reads headers.

    Raises `UserError` for adapters that are not plain LoRA, are damaged, or belong to another base:
    tensors that are missing, misshapen or unknown are listed.
    """
    table = read_peft(folder)
    rank, alpha = _read_rank(table.metadata, folder / ADAPTER_CONFIG)
    stored = _match_peft(table, spec, rank)
    lora = Lora(rank, alpha, tuple(stored))

    def read(path: Key) -> Pair:
        parts = []
        for part in ("A", "B"):
            tensors = [f"{stem}.lora_{part}.weight" for stem in stored[path]]
            arrays = [
                np.asarray(decode(table.raw(n), table.info(n).dtype), np.float32) for n in tensors
            ]
            bad = [n for n, x in zip(tensors, arrays, strict=True) if not np.isfinite(x).all()]
            if bad:
                raise UserError(
                    f"{table.paths[0]}: found numbers that are not finite in {bad[0]}; expected "
                    "none. The adapter is damaged: save or download it again."
                )
            layout = names.layout_of(path, spec, gguf=False)
            parts.append(reorder(np.stack(arrays), part.lower(), layout, write=False))
        return parts[0], parts[1]

    return StoredAdapters(lora, table.paths, read, str(folder))


def _read_rank(config: Mapping[str, Any], where: Path) -> tuple[int, float]:
    """Rank and alpha of plain LoRA; raises `UserError` for other kinds of adapters."""
    if (kind := config.get("peft_type")) != "LORA":
        raise UserError(f"{where}: found peft_type {kind!r}; expected 'LORA', the kind kdjax has.")
    if config.get("init_lora_weights") in _PLAIN_STARTS:
        config = {**config, "init_lora_weights": True}
    for name, plain in _REFUSED.items():
        if (found := config.get(name)) not in (plain, None, [], {}, False):
            raise UserError(
                f"{where}: found {name}={found!r}; expected {plain!r}: kdjax has adapters of one "
                "rank on the matrices, and no others. Merge it with PEFT "
                "(merge_and_unload) and open the merged model."
            )
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if (
        type(rank) is not int
        or type(alpha) not in (int, float)
        or not 0 < alpha < math.inf
        or rank < 1
    ):
        raise UserError(
            f"{where}: found r={rank!r}, lora_alpha={alpha!r}; expected numbers above 0. Save or "
            "download the adapter again."
        )
    return rank, float(alpha)


def _match_peft(table: TensorTable, spec: ArchSpec, rank: int) -> dict[Key, list[str]]:
    """Maps each adapted matrix to the stems of its layers' tensors."""
    stored, known, problems = {}, set(), []
    for path, (_, outer, inner) in list_adaptable(spec).items():
        stem = PREFIX + names.name_of(path, spec).hf.removesuffix(".weight")
        stems = [stem.format(i=i) for i in names.layers_of(path, spec) or ()]
        wanted = {}
        for stem in stems:
            wanted[f"{stem}.lora_A.weight"] = (rank, inner)
            wanted[f"{stem}.lora_B.weight"] = (outer, rank)
        known |= wanted.keys()
        if not any(name in table for name in wanted):
            continue
        stored[path] = stems
        for name, shape in wanted.items():
            if name not in table:
                problems.append(f"{name}: missing, expected shape {list(shape)}")
            elif (found := table.info(name).shape) != shape:
                problems.append(f"{name}: shape {list(found)}, expected {list(shape)}")
    problems += [f"{name}: not of this base" for name in table if name not in known]
    if problems or not stored:
        shown = "\n  ".join(problems[:20]) + ("\n  ..." if len(problems) > 20 else "")
        raise UserError(
            f"{table.paths[0]} does not fit its base, a {spec.family} model of {spec.num_layers} "
            f"layers ({len(problems)} tensors):\n  {shown or 'it holds no adapter'}\n"
            "It is damaged or of another base: name the base that it was trained on."
        )
    return stored


def merge_adapters(base: TensorTable, spec: ArchSpec, adapters: StoredAdapters) -> TensorTable:
    """Adds adapters to the tensors of their base: adapted ones are float32, others as stored.

    A tensor is merged each time that it is read, in the file's own order of rows.
    """
    gguf, saved, stored = is_gguf(base), is_saved(base), tensor_names(base, spec)
    read_pair = functools.lru_cache(maxsize=1)(adapters.read)  # its layers come in turn

    def merge(name: str, path: Key, place: int | None) -> LazyTensor:
        stored_info = base.info(name)

        def read() -> np.ndarray:
            raw = base.raw(name)
            a, b = (x if place is None else x[place : place + 1] for x in read_pair(path))
            change = np.float32(adapters.lora.scale) * (b @ a)
            numbers = np.asarray(decode(raw, stored_info.dtype), np.float32)
            if not saved:
                layout = names.layout_of(path, spec, gguf=gguf)
                change = np.stack([layout.write_order(x) for x in change])
            merged = numbers + (change if place is None else change[0])
            merged = np.ascontiguousarray(merged, np.float32)
            return merged.view(np.uint8).reshape(*merged.shape[:-1], -1)

        info = stored_info._replace(dtype="F32", nbytes=4 * int(np.prod(stored_info.shape)))
        return LazyTensor(info, read, base.holds(name))

    tensors = dict(base.tensors)
    for path in adapters.lora.targets:
        places = (None,) if saved else range(len(stored[path]))
        pairs = zip(stored[path], places, strict=True)
        tensors |= {name: merge(name, path, place) for name, place in pairs}
    return base.replace(tensors, paths=(*base.paths, *adapters.paths), base=base)
