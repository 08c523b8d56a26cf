"""Forms of a student: what the forward pass sees of its masters, once a step, and what is exported.

A form owns what a state keeps beside the masters. The step, the loop and evaluation ask it and know
no more.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from kdjax.errors import UserError
from kdjax.formats.blocks import Scales, decode_fields, encode_fields, fit_rows, is_cut
from kdjax.formats.imatrix import read_importance
from kdjax.formats.kquants import WEIGHED
from kdjax.formats.recipes import choose_types, parts_by_type
from kdjax.formats.saved import BLOCK, LORA
from kdjax.models.adapters import Lora, join_adapters, split_adapters
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decoder import Compute, Params, functional
from kdjax.models.families import FAMILIES
from kdjax.models.names import list_fused, name_of
from kdjax.models.weights import stack_blocks

Kept = Any  # arrays that a form keeps in the state; None for none


@dataclasses.dataclass(frozen=True)
class Form:
    """How a student's masters become its parameters: this one takes them as they are."""

    rounds: ClassVar[bool] = False  # whether what is seen is less exact than the masters

    def masters(self, params: Params) -> Params:
        """Selects what is trained of a model's parameters, or of gradients at them: here all."""
        return params

    def base(self, params: Params) -> Params | None:
        """Selects the parameters that are never trained, an argument of the step: here none."""

    def begin(self, params: Params) -> Kept:
        """Makes the arrays that the state keeps before the first step."""

    def see(self, kept: Kept, params: Params) -> Params:
        """Computes the parameters that the forward pass takes for the masters `params`."""
        return params

    def pull(self, kept: Kept, params: Params, seen: Params, grads: Params) -> Params:
        """The gradient of the masters, of the gradient at what was seen."""
        return grads

    def place(self, kept: Kept, masters: Params) -> Any:
        """Shardings of what is kept, given those of the masters."""

    def pack(self, kept: Kept, params: Params) -> Params:
        """Makes what is exported: numbers, or blocks."""
        return params

    @property
    def record(self) -> dict[str, Any]:
        """Record of the form in a saved step, as JSON; empty for plain masters."""
        return {}


PLAIN = Form()


@dataclasses.dataclass(frozen=True)
class Adapting(Form):
    """Adapters of a frozen base are the masters; what is kept is the base, an argument of the step.

    It is never donated, stepped or saved: a teacher may be the same arrays.
    """

    lora: Lora

    @property
    def record(self) -> dict[str, Any]:
        """Size and matrices, for `formats.saved`."""
        return {LORA: self.lora.record}

    def masters(self, params: Params) -> Params:
        """The adapters, or, of adapters alone, all."""
        return split_adapters(params)[1] or params

    def base(self, params: Params) -> Params | None:
        """All but the adapters."""
        return split_adapters(params)[0]

    def see(self, kept: Kept, params: Params) -> Params:
        """The base with its adapters; no array is copied."""
        return join_adapters(kept, params)


@dataclasses.dataclass(frozen=True)
class Drafting(Form):
    """The block that drafts is the masters; all else is the base, as that of `Adapting`.

    A teacher of the same arrays is the model that the block drafts for.
    """

    @property
    def record(self) -> dict[str, Any]:
        """Says that the parameters are a block's, for `formats.saved`."""
        return {BLOCK: True}

    def masters(self, params: Params) -> Params:
        """The block, or, of a block alone, all."""
        return {"mtp": params["mtp"]}

    def base(self, params: Params) -> Params | None:
        """All but the block."""
        return {name: x for name, x in params.items() if name != "mtp"}

    def see(self, kept: Kept, params: Params) -> Params:
        """The base with the block; no array is copied."""
        return {**kept, **params}


@dataclasses.dataclass(frozen=True)
class Rounded(Form):
    """Masters rounded to block types by the exporter's own search; gradients go straight through.

    Kept are the scales of every block, fitted once, at the start. A checkpoint has them: what is
    exported are the integers of these scales, which are equal on every backend.
    """

    rounds: ClassVar[bool] = True
    types: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # paths, and types of their layers
    text: str  # what the types were chosen by
    # Of some paths, float32 [L, 1, inputs]: how much the errors of each input count in a fit.
    importance: Mapping[tuple[str, ...], np.ndarray] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @property
    def record(self) -> dict[str, Any]:
        """The types by name, for `formats.saved`."""
        types = {"/".join(path): list(types) for path, types in self.types}
        return {"quantize": self.text, "types": types}

    def begin(self, params: Params) -> Kept:
        """The scales that fit best."""
        flat, kept = _flatten(params), {}
        for path, types in self.types:
            weights = self.importance.get(path)
            for dtype, layers in parts_by_type(types):
                part = None if weights is None else _take(jnp.asarray(weights), layers)
                kept[*path, dtype] = fit_rows(_take(flat[path], layers), dtype, part)
        return unflatten_dict(kept)

    def see(self, kept: Kept, params: Params) -> Params:
        """The numbers that the blocks stand for."""

        def round_rows(dtype: str, scales: Scales, x: Array) -> Array:
            return decode_fields(encode_fields(x, dtype, scales), dtype).astype(x.dtype)

        return self._replace(round_rows, kept, params)

    def pull(self, kept: Kept, params: Params, seen: Params, grads: Params) -> Params:
        """Straight through; but what lies beyond its scale's range is not driven further out."""

        def keep(dtype: str, scales: Scales, g: Array, x: Array, y: Array) -> Array:
            outwards = is_cut(x, y, dtype, scales) & ((x - y) * g < 0)  # a step goes against g
            return jnp.where(outwards, 0, g)

        return self._replace(keep, kept, grads, params, seen)

    def place(self, kept: Kept, masters: Params) -> Any:
        """Shardings of the scales, on the devices of their rows; blocks of a row stay together."""
        flat = _flatten(masters)
        places = {}
        for path, scales in _flatten(kept).items():
            rows: NamedSharding = flat[path[:-1]]
            place = NamedSharding(rows.mesh, P(*rows.spec[:-1]))
            places[path] = jax.tree.map(lambda _, place=place: place, scales)
        return unflatten_dict(places)

    def pack(self, kept: Kept, params: Params) -> Params:
        """The student in blocks, as a packed model has them: what is exported."""
        flat, scales = _flatten(params), _flatten(kept)
        for path, types in self.types:
            flat[path] = stack_blocks(
                [
                    (dtype, at, encode_fields(_take(flat[path], at), dtype, scales[*path, dtype]))
                    for dtype, at in parts_by_type(types)
                ]
            )
        return unflatten_dict(flat)

    def _replace(self, change: Callable[..., Array], kept: Kept, *trees: Params) -> Params:
        """The first tree with its rounded matrices changed, given those of the others."""
        flats, scales = [_flatten(tree) for tree in trees], _flatten(kept)
        changed = dict(flats[0])
        for path, types in self.types:
            arrays = [flat[path] for flat in flats]
            parts = parts_by_type(types)
            for dtype, layers in parts:
                part = change(dtype, scales[*path, dtype], *(_take(x, layers) for x in arrays))
                if len(parts) > 1:
                    part = changed[path].at[jnp.asarray(layers)].set(part)
                changed[path] = part
        return unflatten_dict(changed)


def _flatten(tree: Params) -> dict[tuple[str, ...], Any]:
    return flatten_dict(tree)


def _take(x: Array, layers: tuple[int, ...] | None) -> Array:
    return x if layers is None else x[jnp.asarray(layers)]


def choose_form(text: str, spec: ArchSpec | None, *, imatrix: str = "") -> Form:
    """The form of `student.quantize`: plain masters of "", else rounded ones.

    Raises `UserError` for types that cannot be trained and for a user's module.
    """
    if not text:
        if imatrix:
            raise UserError(
                f"found imatrix={imatrix!r} and no quantize; expected both: it weighs rounding "
                "errors."
            )
        return PLAIN
    if spec is None:
        raise UserError(
            f"found quantize={text!r} for a module of your own; expected a student that kdjax "
            "knows the architecture of: block types are chosen by the names of its parameters."
        )
    shapes = _flatten(functional(spec, Compute())[1])
    chosen = choose_types(
        text,
        {path: tuple(leaf.shape) for path, leaf in shapes.items()},
        layers=spec.num_layers,
        groups=spec.num_heads // spec.num_kv_heads,
        tied=spec.tied,
        experts=spec.experts,
        fused=FAMILIES[spec.family].fused,
        stacks={name: spec.places(delta=delta) for name, delta in STACKS.items()},
    )
    types = tuple(sorted(chosen.items()))
    weighed = [path for path, kinds in chosen.items() if not WEIGHED.isdisjoint(kinds)]
    importance = _spread_importance(imatrix, weighed, spec) if imatrix else {}
    return Rounded(types, text, importance)


def _spread_importance(
    file: str, paths: Iterable[tuple[str, ...]], spec: ArchSpec
) -> dict[tuple[str, ...], np.ndarray]:
    """Stacks the means of a file of llama-imatrix by layer; leaves out paths that it has not.

    Raises `UserError` for a file of another model.
    """
    read, found = read_importance(file), {}
    fused = {part: whole for whole, x in list_fused(spec, gguf=True).items() for part, _ in x.parts}
    shapes = _flatten(functional(spec, Compute())[1])
    for path in (path for path in paths if path[0] in STACKS and not spec.experts):
        layers = spec.places(delta=STACKS[path[0]])
        names = [name_of(path, spec).gguf.format(i=i) for i in layers]
        rows = [read.get(fused.get(name, name)) for name in names]
        given = [row for row in rows if row is not None]
        if not given:
            continue
        width = shapes[path].shape[-1]
        if len(given) < len(rows) or any(row.shape != (1, width) for row in given):
            widths = ", ".join(str(n) for n in sorted({row.shape[-1] for row in given}))
            raise UserError(
                f"{file}: found importances of {len(given)} layers for {names[0]} and its like, of "
                f"{widths} inputs; expected {len(rows)} of {width}: the file is of another model."
            )
        found[path] = np.stack(given)
    if not found:
        raise UserError(
            f"{file}: found no importance of a tensor whose scales are searched for; expected "
            "some. Leave it out, or name a type such as q4_k_m."
        )
    return found
