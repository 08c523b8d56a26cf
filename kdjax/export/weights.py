"""A student's parameters as the tensors of a checkpoint: names, shapes, and bytes on demand."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from kdjax.errors import UserError
from kdjax.formats.blocks import encode, join_rows
from kdjax.formats.files import Data
from kdjax.models import names
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, Params, functional
from kdjax.models.model import Model
from kdjax.models.weights import Adapted, Mixed, PackedMatrix, Scaled, from_bits, may_be_odd

# Elements encoded at a time: bounds the memory of an export in addition to the parameters.
_ELEMENTS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, and its leaf of the tree (or layer of the leaf)."""

    name: str  # in the file
    path: tuple[str, ...]
    layer: int | None
    expert: int | None  # its index in the layer; None: a tensor of all
    # Numbers, bf16 bits as uint16, blocks or float8; or a frozen one of these with its adapter.
    leaf: np.ndarray | jax.Array | PackedMatrix | Mixed | Scaled | Adapted
    place: int | None  # of the layer in the leaf
    layout: names.Layout

    @property
    def _place(self) -> tuple[int, ...]:
        return tuple(i for i in (self.place, self.expert) if i is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as in files, row-major."""
        return self.layout.file_shape(tuple(self.leaf.shape[len(self._place) :]))

    @property
    def blocks(self) -> PackedMatrix | None:
        """The blocks that the leaf holds for it; None for numbers."""
        leaf, place = self.leaf, self._place
        if isinstance(leaf, Adapted):
            frozen = dataclasses.replace(self, leaf=leaf.base)
            return frozen.blocks if leaf.a is None else None
        if isinstance(leaf, Mixed):
            layer, *rest = place
            leaf, place = leaf.stacks[int(leaf.which[layer])], (int(leaf.slot[layer]), *rest)
        if not isinstance(leaf, PackedMatrix):
            return None
        return leaf[place] if place else leaf

    def read(self) -> np.ndarray:
        """float32 numbers as the file holds them; raises `UserError` if one is not finite."""
        array = self._read_numbers()
        # The largest magnitude is NaN if any number is.
        if not np.isfinite(max(array.max(), -array.min())):
            self._refuse(array.size - int(np.count_nonzero(np.isfinite(array))))
        if self.layout.rate:
            return names.write_rate(array)
        if self.layout.offset:
            return array + np.float32(self.layout.offset)
        return self.layout.write_order(array)

    def check_finite(self) -> None:
        """Raises `UserError` if a number is not finite, as `read` does; stores no decoded block."""
        leaf, numbers = self.leaf, self.blocks
        if numbers is None:
            plain = isinstance(leaf, np.ndarray | jax.Array)
            numbers = leaf[self._place] if plain else self._read_numbers()
        if count := int(_count_odd(numbers)):
            self._refuse(count)

    def _refuse(self, count: int) -> NoReturn:
        raise UserError(
            f"found {count} numbers of {math.prod(self.shape)} in {self.name} that are not finite; "
            "expected none. The file is damaged, or the run broke: take another file or an earlier "
            "step, or train again."
        )

    def _read_numbers(self) -> np.ndarray:
        """float32, in the order of the parameter's rows; an adapter is added to its matrix."""
        leaf: Any = self.leaf
        if isinstance(leaf, Adapted):
            numbers = dataclasses.replace(self, leaf=leaf.base)._read_numbers()
            if leaf.a is None:
                return numbers
            a, b = (np.asarray(x[self._place], np.float32) for x in (leaf.a, leaf.b))
            return numbers + np.float32(leaf.scale) * (b @ a)
        if isinstance(leaf, Scaled):
            return np.asarray(leaf[self._place].decode() if self._place else leaf.decode())
        if (blocks := self.blocks) is not None:
            array = np.asarray(_decode(blocks))
        else:
            array = np.asarray(leaf[self._place] if self._place else leaf)
        if array.dtype == np.uint16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return array.astype(np.float32, copy=False)

    def find_kept(self, dtype: str) -> PackedMatrix | None:
        """Its blocks, if they have that type, so that they are written as they are."""
        blocks = self.blocks
        return blocks if blocks is not None and blocks.block == dtype else None

    def kept_bytes(self, blocks: PackedMatrix) -> np.ndarray:
        """The rows of its blocks as the file holds them, uint8."""
        return self.layout.write_order(np.asarray(_join(blocks.fields)))

    def stream(self, dtype: str, importance: np.ndarray | None = None) -> Data:
        """Returns a function, as the writers take it, that yields encoded rows, a part at a time.

        `importance`, float32 `[matrices, inputs]`, weights the errors, see `formats.imatrix`.

        Blocks of that type are written as they are, never rounded a second time.
        """
        if (blocks := self.find_kept(dtype)) is not None:

            def kept() -> np.ndarray:
                self.check_finite()
                return self.kept_bytes(blocks)

            return kept

        def parts() -> Iterator[np.ndarray]:
            width = self.shape[-1]
            weights = [None] if importance is None else list(importance)
            step = max(1, _ELEMENTS // width)
            # One matrix, or one for each expert with its own importance.
            matrices = self.read().reshape(len(weights), -1, width)
            for rows, weight in zip(matrices, weights, strict=True):
                for start in range(0, len(rows), step):
                    try:
                        yield encode(rows[start : start + step], dtype, weight)
                    except UserError as error:
                        raise UserError(f"{self.name}: {error}") from error

        return parts


_decode, _join = jax.jit(PackedMatrix.decode), jax.jit(join_rows)


@jax.jit
def _count_odd(numbers: Any) -> jax.Array:
    """Counts what is not finite, of numbers, bf16 bits or a `PackedMatrix`."""
    decoded = numbers.decode() if isinstance(numbers, PackedMatrix) else from_bits(numbers)
    return jnp.sum(~jnp.isfinite(decoded))


def check_finite(model: Model) -> None:
    """Raises `UserError` that names the first tensor with numbers that are not finite.

    Tensors are decoded, 9 s of a packed 1.5B on a CPU, only if `may_be_odd` cannot rule it out.
    """
    assert model.spec is not None
    if not may_be_odd(model.params):
        return
    try:
        for tensor in _list_tensors(model.params, model.spec, gguf=True):
            tensor.check_finite()
    except UserError as error:
        raise UserError(f"{model.checkpoint or model.name}: {error}") from error


def list_tensors(params: Params, spec: ArchSpec, *, gguf: bool) -> list[Tensor]:
    """Every tensor of the model, layer by layer; a tied head is the embedding.

    Names and order of rows are as in GGUF files (`gguf`), where a layer's experts are one tensor,
    or as in Hugging Face's, where each expert is one.

    Raises `UserError` if `params` do not fit `spec`, or are float8 in place of numbers or blocks.
    """
    for weight in jax.tree.leaves(params, is_leaf=lambda node: not isinstance(node, dict)):
        if not isinstance(weight, np.ndarray | jax.Array | PackedMatrix | Mixed | Adapted):
            raise UserError(
                f"found {type(weight).__name__} weights to export; expected numbers or blocks. "
                "Load the model with weights='dense'."
            )
    return _list_tensors(params, spec, gguf=gguf)


def _list_tensors(params: Params, spec: ArchSpec, *, gguf: bool) -> list[Tensor]:
    """The tensors of `list_tensors`, of weights in any form."""
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
            "Take this model's; of a run, name the student that it began with (--student=PATH)."
        )
    tensors = []
    for path in known:
        row, layout = names.name_of(path, spec), names.layout_of(path, spec, gguf=gguf)
        name, layers = row.gguf if gguf else row.hf, names.layers_of(path, spec)
        tensors += [
            Tensor(name.format(i=i, e=e), path, i, e, leaves[path], place, layout)
            for place, i in (((None, None),) if layers is None else enumerate(layers))
            for e in (range(spec.experts) if "{e}" in name else (None,))
        ]
    # Embedding, layers, norm, head.
    order = {"embed": -1, "norm": spec.num_layers, "head": spec.num_layers + 1}
    return sorted(tensors, key=lambda t: order.get(t.path[0], t.layer or 0))
