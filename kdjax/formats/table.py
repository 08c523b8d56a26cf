"""The one interface through which checkpoints are read: a table of lazy tensors, by name."""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdjax.errors import UserError
from kdjax.formats.blocks import row_bytes


class TensorInfo(NamedTuple):
    """A checkpoint's entry of one tensor, known before its data is read."""

    name: str
    shape: tuple[int, ...]  # row-major, as in NumPy: a projection is (out, in)
    dtype: str  # "F32", "BF16", "Q4_K", ...: a key of `formats.blocks.BLOCKS`
    nbytes: int  # of the tensor's data in the file


class LazyTensor(NamedTuple):
    """One tensor of a checkpoint, whose data is read when it is needed."""

    info: TensorInfo
    read: Callable[[], np.ndarray]  # as `TensorTable.raw` returns it
    held: bool = True  # whether its bytes are there; a truncated file may lack them


class TensorTable:
    """A mapping from names to lazy tensors, with the files and the header that they come from.

    Readers of formats are subclasses that fill in the fields when they open a file, of which they
    read the header. `replace`, and functions that use it, return a changed table.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        metadata: Mapping[str, Any],
        tensors: Mapping[str, LazyTensor],
        cut: UserError | None = None,
        base: "TensorTable | None" = None,
    ):
        self.paths = paths  # files with the data, in order; their bytes identify the checkpoint
        self.metadata = metadata  # GGUF key-values, or the Hugging Face `config.json`
        self.tensors = tensors
        # The error that opening the complete file would raise, if it was opened by its header.
        self.cut = cut
        self.base = base  # the table that this one adds trained numbers to

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def info(self, name: str) -> TensorInfo:
        """Raises `KeyError` for a name the checkpoint does not hold."""
        return self.tensors[name].info

    def holds(self, name: str) -> bool:
        """Whether the tensor's bytes are there; a truncated file may lack them."""
        return self.tensors[name].held

    def raw(self, name: str) -> np.ndarray:
        """Read-only uint8 `shape[:-1] + (row_bytes,)`, which `blocks.decode` turns into numbers.

        A zero-copy view into the memory-mapped file; for a 0-d tensor `(itemsize,)`. Raises
        `UserError` for a tensor whose data a truncated file lacks.
        """
        return self.tensors[name].read()

    def replace(
        self,
        tensors: Mapping[str, LazyTensor],
        *,
        paths: tuple[Path, ...] | None = None,
        metadata: Mapping[str, Any] | None = None,
        base: "TensorTable | None" = None,
    ) -> "TensorTable":
        """Returns a table of these tensors; its other fields, but for `base`, are this one's."""
        return TensorTable(
            self.paths if paths is None else paths,
            self.metadata if metadata is None else metadata,
            tensors,
            self.cut,
            base,
        )


def map_tensors(
    tensors: Mapping[str, tuple[TensorInfo, np.ndarray]], cut: UserError | None = None
) -> dict[str, LazyTensor]:
    """Makes lazy tensors of flat views into a memory-mapped file.

    Reading a tensor that is shorter than its header says raises `cut`.
    """

    return {
        name: LazyTensor(
            info,
            functools.partial(_read_view, info, data, cut),
            data.size == info.nbytes,
        )
        for name, (info, data) in tensors.items()
    }


def _read_view(info: TensorInfo, data: np.ndarray, cut: UserError | None) -> np.ndarray:
    if cut and data.size != info.nbytes:
        raise cut
    return data.reshape(*info.shape[:-1], row_bytes(info.dtype, (info.shape or (1,))[-1]))


def rename_tensors(
    table: TensorTable,
    rename: Callable[[str], str | None],
    metadata: Mapping[str, Any] | None = None,
) -> TensorTable:
    """Renames the tensors of a table, and leaves out those whose new name is None."""
    tensors = {}
    for old, tensor in table.tensors.items():
        if (name := rename(old)) is not None:
            tensors[name] = tensor._replace(info=tensor.info._replace(name=name))
    return table.replace(tensors, metadata=metadata)
