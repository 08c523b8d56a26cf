"""The one interface through which checkpoints are read: a lazy table of named tensors."""

from collections.abc import Iterator, Mapping
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


class TensorTable:
    """Tensors of a checkpoint, by name; opening one reads headers only.

    A subclass fills in the fields when it opens its file: each tensor's `TensorInfo` and a flat
    view of its bytes.
    """

    paths: tuple[Path, ...]  # files with the data, in order; their bytes identify the checkpoint
    metadata: Mapping[str, Any]  # GGUF key-values, or the Hugging Face `config.json`
    # The error that opening the complete file would raise, if it was opened by its header alone.
    cut: UserError | None = None
    _tensors: Mapping[str, tuple[Any, ...]]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Raises `KeyError` for a name the checkpoint does not hold."""
        return self._tensors[name][0]

    def holds(self, name: str) -> bool:
        """Whether the tensor's bytes are there; a truncated file may lack them."""
        info, *data = self._tensors[name]
        return not data or data[0].size == info.nbytes

    def raw(self, name: str) -> np.ndarray:
        """Read-only uint8 `shape[:-1] + (row_bytes,)`, which `blocks.decode` turns into numbers.

        A zero-copy view into the memory-mapped file; for a 0-d tensor `(itemsize,)`. Raises
        `UserError` for a tensor whose data a truncated file lacks.
        """
        info, data = self._tensors[name]
        if self.cut and not self.holds(name):
            raise self.cut
        return data.reshape(*info.shape[:-1], row_bytes(info.dtype, (info.shape or (1,))[-1]))
