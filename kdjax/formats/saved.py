"""Reads saved runs: steps, records, and the student's parameters as a tensor table.

A step lies in `workdir/checkpoints/<step>`: Orbax's tree under `state`, JSON under `run`, which
has a checksum of every array. Nothing here writes or deletes.
"""

import contextlib
import functools
import glob
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from flax.traverse_util import unflatten_dict

from kdjax.errors import CheckError, UserError
from kdjax.formats.blocks import decode_fields, encode_stored
from kdjax.formats.checksums import checksum
from kdjax.formats.recipes import parts_by_type
from kdjax.formats.table import LazyTensor, TensorInfo, TensorTable

CHECKPOINTS = "checkpoints"  # the folder of the steps, in a workdir
RECEIPT = "receipt.json"
FORM = "form"  # in `run`, of a rounded student: its block types, and the text that chose them
LORA = "lora"  # in `run`, of a student with adapters: their rank and matrices
BLOCK = "block"  # in `run`, of a block that drafts, trained alone: true
HEADS = "dspark", "eagle3"  # in `run`, of a head that drafts: its sizes, by its kind
BEST = "best"  # in `run`: the best step so far, and the held-out figure that chose it
UNDECAYED = "undecayed"  # in `run`: rates of delta layers, which earlier versions decayed
CHECKSUMS, DIGEST = "checksums", "sha256"  # of the arrays; of everything else in `run`
_STEP = "step"  # the array with the step's number
_PARAMS = "params/"  # prefix of the student's parameters
_SCALES = "kept/"  # prefix of a rounded student's scales
LayerNumbers = tuple[int, ...] | None  # numbers of layers in a stack; None for all
_SHOWN = 3  # arrays that a message names
_END = 80  # characters of a library's message that are shown of its beginning and of its end
_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def find_head(form: Mapping[str, Any]) -> str | None:
    """The kind of the head, of `HEADS`, that a record of a form is of; None for another form."""
    return next((kind for kind in HEADS if kind in form), None)


class OrbaxPath(type(epath.Path())):  # type: ignore[misc]
    """A local path as Orbax takes it, whatever characters are in it.

    Orbax lists files by patterns, and its own paths take `[1]` in a folder's name for a part of the
    pattern: arrays of such a folder are never merged. They also take `/gs`, `/s3`, `/az` and `/hf`
    for services.
    """

    _uri_scheme = None

    def glob(self, pattern: str) -> Iterator["OrbaxPath"]:
        """Paths that `pattern` matches within this folder."""
        found = glob.iglob(os.path.join(glob.escape(os.fspath(self)), pattern))
        return (type(self)(path) for path in found)


def step_folder(workdir: Path, step: int) -> Path:
    """Folder of a step, as an absolute path: Orbax takes no relative one.

    Raises `UserError` for one that it cannot read, see `check_folder`.
    """
    check_folder(workdir)
    return (workdir / CHECKPOINTS / str(step)).resolve()


def check_folder(workdir: Path) -> None:
    """Raises `UserError` for a folder whose steps could not be saved or read.

    TensorStore takes `\\` for `/`, and names that are not UTF-8 not at all.
    """
    path = os.path.realpath(workdir / CHECKPOINTS)  # `resolve` raises for links in a circle
    if "\\" in path or path != path.encode(errors="ignore").decode():
        raise UserError(
            f"{path!r} cannot hold checkpoints; expected a path of UTF-8 without \\. Rename the "
            "folder, or name another."
        )


def saved_when(workdir: Path, step: int) -> str:
    """When a step was saved, in local time: `2026-11-28 04:07:40`."""
    seconds = step_folder(workdir, step).stat().st_mtime
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def saved_steps(workdir: Path) -> list[int]:
    """Lists the complete steps under `workdir`; changes nothing, unlike Orbax's manager."""
    return sorted(int(p.name) for p in (workdir / CHECKPOINTS).glob("*") if p.name.isdigit())


class Best(NamedTuple):
    """A step and its held-out figure, by which the best saved step is chosen."""

    step: int
    name: str
    value: float

    @classmethod
    def read(cls, record: Mapping[str, Any], name: str = BEST) -> "Best | None":
        """Reads the entry `name` of a saved step's record; None without it (older versions)."""
        saved = record.get(name)
        return saved and cls(saved["step"], saved["name"], saved["value"])

    @property
    def record(self) -> dict[str, Any]:
        """The record that a saved step holds."""
        return {BEST: self._asdict()}


class DamagedError(CheckError):
    """A saved step that cannot be read, or holds something else than was saved."""

    def __init__(self, folder: Path, problem: str, details: str = ""):
        super().__init__(
            f"{folder} is damaged: {problem}. Name an older step; the command that trained goes on "
            "from the newest intact one."
        )
        self.problem, self.details = problem, details  # one line, and a library's full message


@contextlib.contextmanager
def reading(folder: Path, part: str) -> Iterator[None]:
    """Makes a `DamagedError` of whatever Orbax raises for files that are cut, changed or gone."""
    try:
        yield
    except (DamagedError, PermissionError, MemoryError):
        raise
    except Exception as error:
        said = str(error).partition(" [")[0].partition("\n")[0]  # without TensorStore's details
        said = said.replace(f"{folder}/", "")
        if len(said) > 2 * _END:  # its beginning says what was read, its end why that failed
            said = f"{said[:_END]} ... {said[-_END:]}"
        problem = f"{part} cannot be read ({type(error).__name__}: {said})"
        raise DamagedError(folder, problem, str(error)) from error


def saved_run(workdir: Path, step: int) -> dict[str, Any]:
    """Reads `run` as passed to `training.saving.Checkpoints.save`, and the arrays' checksums.

    Raises `DamagedError` if it differs from what was saved, and `CheckError` for a folder of
    another number than its step's.
    """
    folder = step_folder(workdir, step)
    if (inside := int(_read(folder, _STEP))) != step:
        raise CheckError(
            f"{folder} holds step {inside}; expected step {step}, as the folder is named. Rename "
            f"it to {inside}, or move it elsewhere."
        )
    with reading(folder, "run/metadata"):
        record = dict(ocp.JsonCheckpointHandler().restore(OrbaxPath(folder / "run")))
        saved = record.pop(DIGEST, None)  # absent from steps of older versions
        if saved not in (None, record_digest(record)):
            raise DamagedError(folder, "run/metadata holds other values than were saved")
    return record


def find_best(workdir: Path) -> Best | None:
    """The best step as the newest one records it; None without a record, or if it is deleted."""
    steps = saved_steps(workdir)
    best = Best.read(saved_run(workdir, steps[-1])) if steps else None
    return best if best and best.step in steps else None


def record_digest(record: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of a record as JSON."""
    plain = json.loads(json.dumps(record))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def find_damage(workdir: Path, step: int) -> DamagedError | None:
    """Checks a saved step, reading all of it, an array at a time; returns the error, None if none.

    Steps of older versions have no checksums and are only read. Raises `CheckError` for a folder of
    another number than its step's.
    """
    folder = step_folder(workdir, step)
    try:
        saved: dict[str, int] | None = saved_run(workdir, step).get(CHECKSUMS)
        names = _listed_names(folder)
        found = {name: checksum(_read(folder, name)) for name in sorted(names)}
        saved = found if saved is None else saved
        wrong = sorted(name for name in names | saved.keys() if found.get(name) != saved.get(name))
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" * (len(wrong) > _SHOWN)
            numbers = f"other numbers than were saved in {', '.join(wrong[:_SHOWN])}{more}"
            raise DamagedError(folder, f"found {numbers}")
        _open_tree(folder)
    except DamagedError as error:
        return error
    return None


def _open(folder: Path, name: str) -> ts.TensorStore:
    """Opens one array of the state as Orbax stores it: its shape and type; reads no data.

    Uses TensorStore, since Orbax opens all arrays at once, and if some cannot be read, prints a
    traceback for each of the others.
    """
    base = {"driver": "file", "path": f"{folder}/state/"}  # in a URL `#` and `%41` mean more
    place = {"driver": "ocdbt", "base": base, "path": name.replace("/", ".")}
    with reading(folder, f"state: {name}"):
        return ts.open({"driver": "zarr", "kvstore": place}, open=True).result()


def _read(folder: Path, name: str) -> np.ndarray:
    store = _open(folder, name)
    with reading(folder, f"state: {name}"):
        return store.read().result()


def _listed_names(folder: Path) -> set[str]:
    """Names of the tree's arrays as Orbax lists them, without places that hold none.

    Checks its second list too: Orbax reads that list while it reads arrays.
    """
    state = folder / "state"
    for path in (state / "array_metadatas").glob("process_*"):
        with reading(folder, str(path.relative_to(folder))):
            for entry in json.loads(path.read_bytes())["array_metadatas"]:
                for field in ("param_name", "write_shape", "chunk_shape"):
                    entry["array_metadata"][field]  # raises if it is missing
    with reading(folder, "state/_METADATA"):
        entries = json.loads((state / "_METADATA").read_bytes())["tree_metadata"]
        return {
            "/".join(key["key"] for key in entry["key_metadata"])
            for entry in entries.values()
            if not entry["value_metadata"]["skip_deserialize"]
        }


def _open_tree(folder: Path) -> None:
    """Opens the state as a run does, and reads one of its arrays."""
    with reading(folder, "state"):
        handler, state = ocp.PyTreeCheckpointHandler(), OrbaxPath(folder / "state")
        metadata: Any = handler.metadata(state)
        leaves, structure = jax.tree.flatten(getattr(metadata, "tree", metadata))
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = structure.unflatten([ocp.ArrayRestoreArgs(sharding=place)] * len(leaves))
        item = structure.unflatten([0] + [ocp.PLACEHOLDER] * (len(leaves) - 1))
        handler.restore(state, args=ocp.args.PyTreeRestore(item=item, restore_args=placed))


def array_name(path: Any) -> str:
    """Names an array of the state for its checksum, by its path in the tree: `params/embed`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def read_receipt(workdir: Path) -> dict[str, Any] | None:
    """Reads the run's `receipt.json`; None without the file, empty if it holds no object.

    Raises `ValueError` if it is not JSON.
    """
    try:
        receipt = json.loads((workdir / RECEIPT).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return receipt if isinstance(receipt, dict) else {}


def resolve_path(receipt: Mapping[str, Any], path: str) -> str:
    """Resolves a path of a receipt's config from the folder that the run was started in."""
    return os.path.join(receipt.get("cwd") or ".", os.path.expanduser(path))


def saved_params(workdir: Path, step: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the student's saved parameters, by name (`blocks/attn/q/weight`), in order of names.

    Each is read to the host when it is yielded: one at a time, and no device memory.
    """
    return SavedTable(workdir, step).arrays()


class SavedTable(TensorTable):
    """The parameters of a saved step, layers stacked as in the tree; see `TensorTable`."""

    def __init__(self, workdir: Path, step: int):
        self._step = step_folder(workdir, step)
        self.folder = self._step / "state"
        record = saved_run(workdir, step)
        self._checksums = record.get(CHECKSUMS, {})
        self.form: dict[str, Any] = record.get(FORM, {})
        self._listed = sorted(_listed_names(self._step))
        listed = [name for name in self._listed if name.startswith(_PARAMS)]
        tensors = {name.removeprefix(_PARAMS): self._lazy_tensor(name) for name in listed}
        paths = tuple(sorted(path for path in self.folder.rglob("*") if path.is_file()))
        super().__init__(paths, {}, tensors)  # a step says nothing of its architecture

    def _lazy_tensor(self, name: str) -> LazyTensor:
        store = _open(self._step, name)
        dtype, shape = np.dtype(store.dtype.numpy_dtype), tuple(store.shape)
        nbytes = dtype.itemsize * math.prod(shape)
        name = name.removeprefix(_PARAMS)
        info = TensorInfo(name, shape, _TYPES[dtype.name], nbytes)
        return LazyTensor(info, functools.partial(self._read_bytes, name))

    def _checked(self, name: str) -> np.ndarray:
        array = _read(self._step, name)
        if self._checksums.get(name) not in (None, checksum(array)):
            raise DamagedError(self._step, f"found other numbers than were saved in {name}")
        return array

    def array(self, name: str) -> np.ndarray:
        """Reads masters from the disk at each call; raises `DamagedError` if a checksum differs."""
        return self._checked(_PARAMS + name)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """All masters by name, each read when its turn comes."""
        return ((name, self.array(name)) for name in self)

    @property
    def rounds(self) -> bool:
        """Whether the forward pass saw other numbers than the masters."""
        return "types" in self.form

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that training was to change."""
        return tuple(self)

    def blocks(self, name: str) -> list[tuple[str, LayerNumbers, tuple[np.ndarray, ...]]]:
        """Fields of a rounded matrix's blocks, by type and layers; empty for other parameters.

        The blocks use the saved scales, as the training step did.
        """
        types = self.form.get("types", {}).get(name)
        if types is None:
            return []
        masters, found = self.array(name), []
        for dtype, layers in parts_by_type(types):
            begin = f"{_SCALES}{name}/{dtype}/"
            scales = [self._checked(n) for n in self._listed if n.startswith(begin)]
            part = masters if layers is None else masters[list(layers)]
            found.append((dtype, layers, encode_stored(part, dtype, scales)))
        return found

    def numbers(self, name: str) -> np.ndarray:
        """Numbers that the forward pass computed with; for a rounded student the rounded ones."""
        array = self.array(name)
        for dtype, layers, fields in self.blocks(name):
            at = slice(None) if layers is None else list(layers)
            array[at] = np.asarray(decode_fields([jnp.asarray(x) for x in fields], dtype))
        return array

    def read_tree(self) -> dict[str, Any]:
        """Reads all masters as the saved tree: nested dicts of arrays on the host."""
        return unflatten_dict({name: self.array(name) for name in self}, sep="/")

    def _read_bytes(self, name: str) -> np.ndarray:
        """Bytes of `numbers`, uint8 `shape[:-1] + (row_bytes,)`; each call reads the disk."""
        array = np.ascontiguousarray(self.numbers(name))
        return array.view(np.uint8).reshape(*array.shape[:-1], -1)
