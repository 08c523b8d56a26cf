"""What a run saved: its steps, its records, and the student's parameters as a tensor table.

A step lies in `workdir/checkpoints/<step>`: Orbax's tree under `state`, JSON under `run`. Nothing
here writes or deletes.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict

from kdjax.formats.table import NamedTensors, TensorInfo

RECEIPT = "receipt.json"
_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def step_folder(workdir: Path, step: int) -> Any:
    """The folder of a step, resolved: Orbax takes no relative path."""
    return (workdir / "checkpoints" / str(step)).resolve()


def saved_steps(workdir: Path) -> list[int]:
    """The complete steps under `workdir`, in order; touches nothing, unlike Orbax's manager."""
    return sorted(int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit())


def saved_run(workdir: Path, step: int) -> dict[str, Any]:
    """What `training.saving.Checkpoints.save` was given as `run`."""
    return dict(ocp.JsonCheckpointHandler().restore(step_folder(workdir, step) / "run"))


def read_receipt(workdir: Path) -> dict[str, Any] | None:
    """The run's `receipt.json`; None without one, empty if it is no object.

    Raises `ValueError` if it is no JSON.
    """
    try:
        receipt = json.loads((workdir / RECEIPT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return receipt if isinstance(receipt, dict) else {}


def resolve_path(receipt: Mapping[str, Any], path: str) -> str:
    """A path of a receipt's config, from the folder that the run was started in."""
    return os.path.join(receipt.get("cwd") or ".", os.path.expanduser(path))


def saved_params(workdir: Path, step: int) -> Iterator[tuple[str, np.ndarray]]:
    """The student's parameters as saved, by name (`blocks/attn/q/weight`), in order of names.

    Each is read to the host when its turn comes: no device memory, and no two of them at once.
    """
    table = SavedTable(workdir, step)
    return ((name, table.array(name)) for name in table)


def _info(name: str, leaf: Any) -> TensorInfo:
    dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape)
    return TensorInfo(name, shape, _TYPES[dtype.name], dtype.itemsize * math.prod(shape))


class SavedTable(NamedTensors):
    """The parameters of a saved step, layers stacked as in the tree; see `TensorTable`."""

    def __init__(self, workdir: Path, step: int):
        self.metadata = {}  # a step says nothing of its architecture
        self.folder = step_folder(workdir, step) / "state"
        self.paths = tuple(sorted(path for path in self.folder.rglob("*") if path.is_file()))
        metadata: Any = ocp.PyTreeCheckpointHandler().metadata(self.folder)
        leaves = flatten_dict(dict(getattr(metadata, "tree", metadata))["params"], sep="/")
        self._tensors = {name: (_info(name, leaves[name]),) for name in sorted(leaves)}

    def array(self, name: str) -> np.ndarray:
        """The numbers, read from the disk at each call."""
        item = unflatten_dict({f"params/{name}": 0}, sep="/")
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        args = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
        (array,) = jax.tree.leaves(ocp.PyTreeCheckpointHandler().restore(self.folder, args=args))
        return array

    def read_tree(self) -> dict[str, Any]:
        """All parameters as the tree that was saved: nested dicts of arrays on the host."""
        return unflatten_dict({name: self.array(name) for name in self}, sep="/")

    def raw(self, name: str) -> np.ndarray:
        """uint8 `shape[:-1] + (row_bytes,)`, read from the disk at each call."""
        array = np.ascontiguousarray(self.array(name))
        return array.view(np.uint8).reshape(*array.shape[:-1], -1)
