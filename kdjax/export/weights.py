"""A student's parameters as the tensors of a checkpoint: names, shapes, and bytes when asked."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from kdjax.errors import UserError
from kdjax.formats.blocks import encode
from kdjax.formats.files import Data
from kdjax.models import names
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, Params, functional

# Elements encoded at a time: bounds what an export holds beside the parameters.
_ELEMENTS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and the leaf of the tree (or layer of it) that it is."""

    name: str  # in the file
    path: tuple[str, ...]
    layer: int | None
    expert: int | None  # of the layer's; None: a tensor of all
    leaf: np.ndarray | jax.Array  # an array of numbers, or of bf16 bits as uint16
    heads: int  # whose rotary rows the file interleaves; 0 for none
    offset: float  # what the file holds beyond it

    @property
    def _place(self) -> tuple[int, ...]:
        return tuple(i for i in (self.layer, self.expert) if i is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        """As in files, row-major."""
        return tuple(self.leaf.shape[len(self._place) :])

    def read(self) -> np.ndarray:
        """float32 numbers as the file holds them; raises `UserError` if one is not finite."""
        array = np.asarray(self.leaf[self._place] if self._place else self.leaf)
        if array.dtype == np.uint16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        array = array.astype(np.float32, copy=False)
        # The largest magnitude is NaN if any number is.
        if not np.isfinite(max(array.max(), -array.min())):
            count = array.size - np.count_nonzero(np.isfinite(array))
            raise UserError(
                f"found {count} numbers of {array.size} in {self.name} that are not finite; "
                "expected none. The run broke: export an earlier step with --step, or train again."
            )
        return array + np.float32(self.offset) if self.offset else interleave(array, self.heads)

    def stream(self, dtype: str) -> Data:
        """What the writers take: a function that yields the encoded rows, a part at a time."""

        def parts() -> Iterator[np.ndarray]:
            rows = self.read().reshape(-1, self.shape[-1])
            step = max(1, _ELEMENTS // self.shape[-1])
            for start in range(0, len(rows), step):
                try:
                    yield encode(rows[start : start + step], dtype)
                except UserError as error:
                    raise UserError(f"{self.name}: {error}") from error

        return parts


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows: per head (2, pairs) to (pairs, 2); `heads` = 0: as is."""
    if not heads:
        return rows
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def list_tensors(params: Params, spec: ArchSpec, *, gguf: bool) -> list[Tensor]:
    """Every tensor of the model, layer by layer; a tied head is the embedding.

    Names and order of rotary rows are those of `gguf` files, where a layer's experts are one
    tensor, or of Hugging Face's, where each is one.

    Raises `UserError` if `params` are not of `spec`, or are blocks or float8 in place of numbers.
    """
    for weight in jax.tree.leaves(params, is_leaf=lambda node: not isinstance(node, dict)):
        if not isinstance(weight, np.ndarray | jax.Array):
            raise UserError(
                f"found {type(weight).__name__} weights to export; expected arrays of numbers. "
                "Load the model with weights='dense'."
            )
    _, abstract = functional(spec, Compute())
    known: dict[tuple[str, ...], Any] = flatten_dict(abstract)
    leaves: dict[tuple[str, ...], Any] = flatten_dict(params)
    problems = [f"{'/'.join(path)}: missing" for path in known if path not in leaves]
    problems += [f"{'/'.join(path)}: unknown" for path in leaves if path not in known]
    problems += [
        f"{'/'.join(path)}: shape {list(leaves[path].shape)}, expected {list(leaf.shape)}"
        for path, leaf in known.items()
        if path in leaves and leaves[path].shape != leaf.shape
    ]
    if problems:
        listed = "\n  ".join(problems[:20])
        raise UserError(
            f"the parameters are not those of this {spec.family} model:\n  {listed}\n"
            "Give the student that the run started from, with --student=PATH."
        )
    tensors = []
    for path in known:
        row, heads, offset = names.name_of(path, spec), 0, 0.0
        name = row.hf
        if gguf:
            name, heads = row.gguf, names.head_count(row, spec)
            offset = names.gguf_offset(path, spec)
        tensors += [
            Tensor(name.format(i=i, e=e), path, i, e, leaves[path], heads, offset)
            for i in (range(spec.num_layers) if "{i}" in name else (None,))
            for e in (range(spec.experts) if "{e}" in name else (None,))
        ]
    # Embedding, layers, norm, head.
    order = {"embed": -1, "norm": spec.num_layers, "head": spec.num_layers + 1}
    return sorted(tensors, key=lambda t: order.get(t.path[0], t.layer or 0))
