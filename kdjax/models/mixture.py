"""A mixture of block types: which type each matrix of a model has, chosen or named.

Export, rounding, plan and `llama-quantize --tensor-type-file` all read this one value.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict

from kdjax.errors import UserError
from kdjax.formats.blocks import row_bytes
from kdjax.formats.files import replacing
from kdjax.formats.kquants import WEIGHED
from kdjax.formats.recipes import choose_types, format_types, is_vector
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decoder import Compute, functional
from kdjax.models.families import FAMILIES
from kdjax.models.names import layers_of, list_fused, name_of


class Part(NamedTuple):
    """A matrix of a tensor: its parameter, and where it lies there."""

    path: tuple[str, ...]
    place: int | None  # its index in the stack; None outside of layers
    shape: tuple[int, ...]  # without the stack's axis


@functools.lru_cache(maxsize=16)
def list_matrices(spec: ArchSpec) -> dict[str, tuple[Part, ...]]:
    """Lists the tensors of a GGUF file that can be rounded, by name, in the order of the tree.

    A tensor has one part or, in families that fuse matrices, several.
    """
    shapes: dict[tuple[str, ...], Any] = flatten_dict(functional(spec, Compute())[1])
    found: dict[str, list[Part]] = {}
    for path, names in _name_tensors(spec).items():
        shape = tuple(shapes[path].shape)
        stacked = layers_of(path, spec) is not None
        for place, name in enumerate(names) if not is_vector(path, shape[-1]) else ():
            part = Part(path, place, shape[1:]) if stacked else Part(path, None, shape)
            found.setdefault(name, []).append(part)
    return {name: tuple(parts) for name, parts in found.items()}


def list_single_matrices(spec: ArchSpec) -> list[Part]:
    """Lists the matrices of all tensors of `list_matrices`, each alone."""
    return [part for parts in list_matrices(spec).values() for part in parts]


def count_weights(spec: ArchSpec) -> int:
    """Numbers of all matrices of `list_matrices`."""
    return sum(math.prod(part.shape) for part in list_single_matrices(spec))


def _name_tensors(spec: ArchSpec) -> dict[tuple[str, ...], list[str]]:
    """Names in GGUF of all parameters, one for each layer; parts of a tensor have its name."""
    fused = {part: name for name, x in list_fused(spec, gguf=True).items() for part, _ in x.parts}
    found = {}
    for path in flatten_dict(functional(spec, Compute())[1]):
        numbers = layers_of(path, spec)
        gguf = name_of(path, spec).gguf
        names = [gguf.format(i=i) for i in ((0,) if numbers is None else numbers)]
        found[path] = [fused.get(name, name) for name in names]
    return found


def count_bytes(part: Part, dtype: str) -> int:
    """Bytes of a matrix in blocks of a type; raises `UserError` for rows that do not fill them."""
    return math.prod(part.shape[:-1]) * row_bytes(dtype, part.shape[-1])


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The block types of a model's matrices; parameters that it does not list stay F32."""

    spec: ArchSpec
    types: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # paths; the types of their layers

    @classmethod
    def named(cls, text: str, spec: ArchSpec) -> "Mixture":
        """Chooses types by a text: a recipe, a file, types by name (`recipes.split_types`).

        Raises `UserError` for types that cannot be written and names of no parameter.
        """
        shapes: dict[tuple[str, ...], Any] = flatten_dict(functional(spec, Compute())[1])
        chosen = choose_types(
            text,
            {path: tuple(leaf.shape) for path, leaf in shapes.items()},
            layers=spec.num_layers,
            groups=spec.num_heads // spec.num_kv_heads,
            tied=spec.tied,
            experts=spec.experts,
            fused=FAMILIES[spec.family].fused,
            stacks={name: spec.places(delta=delta) for name, delta in STACKS.items()},
            tensors=_name_tensors(spec),
        )
        return cls(spec, tuple(sorted(chosen.items())))

    @classmethod
    def of_tensors(cls, types: Mapping[str, str], spec: ArchSpec) -> "Mixture":
        """Makes a mixture of types by tensor's name, of all of `list_matrices`."""
        chosen: dict[tuple[str, ...], list[str]] = {}
        for name, parts in list_matrices(spec).items():
            for part in parts:
                chosen.setdefault(part.path, []).append(types[name])
        return cls(spec, tuple(sorted((path, tuple(x)) for path, x in chosen.items())))

    def type_of(self, path: tuple[str, ...], layer: int | None) -> str:
        """The type of a parameter in the layer of this number; "F32" for one not listed."""
        layers = layers_of(path, self.spec)
        return self._look_up(path, None if layers is None or layer is None else layers.index(layer))

    def _look_up(self, path: tuple[str, ...], place: int | None) -> str:
        types = self._by_path.get(path)
        return "F32" if types is None else types[place or 0]

    @functools.cached_property
    def _by_path(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        return dict(self.types)

    @functools.cached_property
    def tensors(self) -> dict[str, str]:
        """Types by tensor's name in GGUF, of all matrices.

        Raises `UserError` for two types in one tensor, for families that fuse several matrices.
        """
        found = {}
        for name, parts in list_matrices(self.spec).items():
            types = {self._look_up(part.path, part.place) for part in parts}
            if len(types) > 1:
                raise UserError(
                    f"found {', '.join(sorted(types))} in the matrices that make up {name}; "
                    "expected one type. Name one for all of them."
                )
            found[name] = types.pop()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices in a file."""
        return sum(
            count_bytes(part, self._look_up(part.path, part.place))
            for part in list_single_matrices(self.spec)
        )

    @property
    def searches(self) -> bool:
        """Whether scales of some type are searched for, so that an importance changes them."""
        return any(dtype in WEIGHED for _, types in self.types for dtype in types)

    def write(self, path: Path) -> None:
        """Writes a file of types that `student.quantize` and llama-quantize read."""
        with replacing(path) as file:
            file.write(format_types(self.tensors).encode())
