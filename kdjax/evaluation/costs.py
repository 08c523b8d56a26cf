"""Measures what each matrix loses in each block type: the KL of the model with it alone exchanged.

The KL of parameters of the model's shapes from the model itself is computed on rows of held-back
text, from the first layer on that differs. A matrix is rounded with the exporter's scales and put
in its place of the stack. The measured costs are a JSON file, from which `evaluation.choice`
chooses types.
"""

import collections
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from kdjax.errors import UserError
from kdjax.evaluation.choice import list_types
from kdjax.formats.blocks import BLOCKS, ENCODED, decode_fields, encode_fields, fit_rows
from kdjax.formats.files import load_json, replacing
from kdjax.formats.recipes import parts_by_type
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.divergences import kl_divergence, log_softmax
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import read_positions
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import DecoderFunctions, Params
from kdjax.models.layerwise import cut_layer, find_place, run_layer
from kdjax.models.mixture import Mixture, Part, list_matrices
from kdjax.models.model import Model
from kdjax.models.names import layers_of
from kdjax.progress import counted

_CHUNK = 1024  # positions whose logits exist at a time
_ELEMENTS = 1 << 24  # numbers rounded at a time
_SAVE_SECONDS = 10.0  # between two writes of the file
FORMAT = 1


class Figures(NamedTuple):
    """Distance of parameters from the model, over all weighted positions."""

    kl: float  # nats, of the model's distribution from theirs, at T = 1
    agreement: float  # share of positions where both rank the same id first
    positions: int


class Comparison:
    """Compares other parameters of a model with the model's, on rows of text, layer by layer.

    The model's hidden states are computed once. float32 products are as the backend makes them:
    TF32 on a GPU.
    """

    def __init__(self, model: Model, batches: Sequence[Mapping[str, np.ndarray]]):
        """`batches` have the columns of `data.pipeline`, all of one shape."""
        names = ("tokens", "segment_ids", "positions", "weights")
        self._batches = [tuple(jnp.asarray(batch[name]) for name in names) for batch in batches]
        self.model, functions, spec = model, model.functions, model.spec
        assert isinstance(functions, DecoderFunctions) and spec is not None
        self._layers = [
            (cut_layer(model, index), find_place(spec, index)) for index in range(spec.num_layers)
        ]
        self.spec = HeadSpec(KDLoss(), model.vocab_size, model.real_vocab, _CHUNK)
        self._embed, self._finish, self._find_head = map(
            jax.jit, (functions.embed_tokens, functions.finish, functions.head)
        )
        self._head = jax.block_until_ready(self._find_head(model.params))
        self._inputs: list[list[Array]] = []  # of each layer and batch, once some layer is first
        self._states = [self._finish(model.params, x) for x in self._run(model.params)]
        self._count = sum(float(batch[3].sum()) for batch in self._batches)
        if not self._count:
            raise UserError("the text has no position to compare at: give longer documents.")

        def compare(
            params: Params, x: Array, head: Array, state: Array, own: Array, weights: Array
        ) -> Array:
            sides = (functions.finish(params, x), head), (state, own)
            figures = read_positions(_compare, sides, weights, spec=self.spec)
            return jnp.stack([jnp.sum(x * weights) for x in figures])

        self._compare = jax.jit(compare)

    def measure(self, params: Params) -> Figures:
        """Returns the figures of parameters of the model's shapes."""
        return self.read(self.start(params))

    def start(self, params: Params, first: int | None = None) -> list[Array]:
        """Dispatches the comparison; returns float32 `[2]` a batch, sums of KL and agreement.

        `read` waits for them. All parameters are numbers. `first` is the first layer that differs
        from the model's, where embedding, head and norm are the model's: what comes before it is
        not computed again.
        """
        if first is None:
            last, head = self._run(params), self._find_head(params)
        else:
            if not self._inputs:
                self._inputs = list(self._walk(self.model.params))
            last, head = self._run(params, first), self._head
        rest = zip(last, self._states, self._batches, strict=True)
        return [self._compare(params, x, head, y, self._head, batch[3]) for x, y, batch in rest]

    def _run(self, params: Params, first: int = 0) -> list[Array]:
        """The last layer's output."""
        return collections.deque(self._walk(params, first), maxlen=1)[0]

    def _walk(self, params: Params, first: int = 0) -> Iterator[list[Array]]:
        """The input of a layer, and the outputs of it and of those after it, of each batch."""
        if first:
            states = self._inputs[first]
        else:
            states = [self._embed(params, batch[0]) for batch in self._batches]
        yield states
        for alone, place in self._layers[first:]:
            pairs = zip(states, self._batches, strict=True)
            states = [run_layer(alone, params, place, x, *batch[1:3]) for x, batch in pairs]
            yield states

    def read(self, started: Sequence[Array]) -> Figures:
        """The figures of what `start` dispatched; a KL that rounding put below 0 is 0."""
        kl, same = np.sum([np.asarray(x, np.float64) for x in started], axis=0) / self._count
        return Figures(max(float(kl), 0.0), float(same), int(self._count))

    def read_batches(self, started: Sequence[Array]) -> list[Figures]:
        """The figures of each batch that has a weighted position."""
        counts = [float(batch[3].sum()) for batch in self._batches]
        means = ((np.asarray(x) / n, n) for x, n in zip(started, counts, strict=True) if n)
        return [Figures(float(kl), float(same), int(n)) for (kl, same), n in means]


def _compare(both: Sequence[Array], weights: Array) -> tuple[Array, Array]:
    """KL and agreement of each position, from the logits of parameters and model."""
    s, t = (log_softmax(x, 1.0) for x in both)
    same = jnp.argmax(s, axis=-1) == jnp.argmax(t, axis=-1)
    return jnp.where(weights > 0, kl_divergence(t, s), 0.0), same.astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="dtype")
def _round_blocks(x: Array, dtype: str, importance: Array | None) -> Array:
    fields = encode_fields(x, dtype, fit_rows(x, dtype, importance), importance)
    return decode_fields(fields, dtype)


def round_matrices(
    x: Float[Array, "*lead n"], dtype: str, importance: Float[np.ndarray, "*some n"] | None = None
) -> Float[Array, "*lead n"]:
    """Rounds numbers to a block type with the exporter's scales, a part at a time.

    `importance` weights the errors, and is broadcast to `x`. One program serves all shapes.
    """
    size = BLOCKS[dtype].elements
    blocks = x.reshape(-1, size)
    step = min(_ELEMENTS // size, 1 << (len(blocks) - 1).bit_length())
    weights = None
    if importance is not None:
        weights = jnp.broadcast_to(jnp.asarray(importance), x.shape).reshape(-1, size)
    found = []
    for start in range(0, len(blocks), step):
        parts = [y[start : start + step] for y in (blocks, weights) if y is not None]
        parts = [jnp.pad(y, ((0, step - len(y)), (0, 0)), mode="edge") for y in parts]
        found.append(_round_blocks(parts[0], dtype, parts[1] if len(parts) > 1 else None))
    del weights  # as large as x; what the parts join to needs the room
    whole = found[0] if len(found) == 1 else jnp.concatenate(found)
    return whole[: len(blocks)].reshape(x.shape)


@jax.jit
def _swap(stack: Array, other: Array, place: Array) -> Array:
    return stack.at[place].set(other[place].astype(stack.dtype))


def round_params(
    params: Params,
    mixture: Mixture,
    importance: Mapping[tuple[str, ...], np.ndarray],
    rounding: Callable[..., Array] = round_matrices,
) -> Params:
    """Rounds all matrices of a mixture; `importance` is as of `forms.spread_importance`."""
    flat: dict[tuple[str, ...], Any] = flatten_dict(params)
    for path, types in mixture.types:
        stack, weights = flat[path], importance.get(path)
        for dtype, layers in parts_by_type(types):
            if layers is None:
                flat[path] = rounding(stack, dtype, weights).astype(stack.dtype)
                continue
            at = np.array(layers)
            part = rounding(stack[at], dtype, None if weights is None else weights[at])
            flat[path] = flat[path].at[at].set(part.astype(stack.dtype))
    return unflatten_dict(flat)


def _list_swaps(
    spec: ArchSpec,
) -> dict[tuple[tuple[str, ...], ...], list[tuple[str, Sequence[Part]]]]:
    """Tensors by the parameters that they are made of: the order in which they are measured."""
    found: dict[tuple[tuple[str, ...], ...], list[tuple[str, Sequence[Part]]]] = {}
    for name, parts in list_matrices(spec).items():
        found.setdefault(tuple(part.path for part in parts), []).append((name, parts))
    return found


def measure_costs(
    comparison: Comparison,
    importance: Mapping[tuple[str, ...], np.ndarray],
    known: Mapping[str, Mapping[str, float]] | None = None,
    save: Callable[[dict[str, dict[str, float]]], None] = lambda costs: None,
    types: Callable[[Sequence[Part]], Sequence[str]] = list_types,
    rounding: Callable[..., Array] = round_matrices,
) -> dict[str, dict[str, float]]:
    """Measures the KL in nats of each tensor in each of its types, by name; goes on from `known`.

    `save` gets all costs every ten seconds and at the end. The model must be dense.
    `importance` is as of `forms.spread_importance`; `rounding` is as `round_matrices`.
    """
    spec = comparison.model.spec
    assert spec is not None
    flat: dict[tuple[str, ...], Any] = flatten_dict(comparison.model.params)
    costs = {name: dict(found) for name, found in (known or {}).items()}
    rounds = [
        (paths, dtype, [x for x in tensors if dtype not in costs.get(x[0], {})])
        for paths, tensors in _list_swaps(spec).items()
        for dtype in types(tensors[0][1])
    ]
    waiting: list[tuple[str, str, list[Array]]] = []
    swaps = [(x, y, z) for x, y, z in rounds if z and x[0] in flat]
    for _, dtype, tensors in (x for x in rounds if x[0][0] not in flat):  # a block that drafts
        costs |= {name: {dtype: 0.0} for name, _ in tensors}
    saved = time.monotonic()
    total = sum(len(tensors) for _, _, tensors in swaps)
    steps = iter(counted(range(total), "matrices exchanged"))
    for paths, dtype, tensors in swaps:
        rounded = {}  # the last ones go before the next are made
        rounded = {path: rounding(flat[path], dtype, importance.get(path)) for path in paths}
        for name, parts in tensors:
            next(steps)
            other = dict(flat)
            for part in parts:
                other[part.path] = _exchange(flat[part.path], rounded[part.path], part)
            started = comparison.start(unflatten_dict(other), _find_layer(parts, spec))
            waiting.append((name, dtype, started))
            if len(waiting) > 2:  # the device has work, and memory holds few stacks
                _note(costs, comparison, waiting.pop(0))
            if time.monotonic() - saved > _SAVE_SECONDS:
                save(costs)
                saved = time.monotonic()
    for one in waiting:
        _note(costs, comparison, one)
    save(costs)
    return costs


def _find_layer(parts: Sequence[Part], spec: ArchSpec) -> int | None:
    """The number of the layer that a tensor lies in; None for embedding and head."""
    part = parts[0]
    layers = layers_of(part.path, spec)
    return None if layers is None or part.place is None else layers[part.place]


def _exchange(stack: Array, rounded: Array, part: Part) -> Array:
    if part.place is None:
        return rounded.astype(stack.dtype)
    return _swap(stack, rounded, jnp.int32(part.place))


def _note(
    costs: dict[str, dict[str, float]], comparison: Comparison, one: tuple[str, str, list[Array]]
) -> None:
    name, dtype, started = one
    costs.setdefault(name, {})[dtype] = comparison.read(started).kl


class CostFile:
    """Costs as JSON, with what they were measured on; another model's or text's are refused."""

    def __init__(self, path: Path, made_of: Mapping[str, Any]):
        """`made_of` are JSON values, such as the hashes of model, rows and importance."""
        self.path, self.made_of = path, dict(made_of)

    def read(self) -> dict[str, dict[str, float]]:
        """The costs so far; {} without a file. Raises `UserError` for another model's."""
        if not self.path.exists():
            return {}
        found, costs = _load(self.path)
        differing = [
            f"{name} {found.get(name)!r}, now {value!r}"
            for name, value in self.made_of.items()
            if found.get(name) != value
        ]
        if differing:
            raise UserError(
                f"{self.path}: found costs of {'; '.join(differing)}. Name another --work, or "
                "remove the file."
            )
        return costs

    def write(self, costs: Mapping[str, Mapping[str, float]]) -> None:
        """Replaces the file."""
        whole = {"format": FORMAT, **self.made_of, "costs": costs}
        with replacing(self.path) as file:
            file.write((json.dumps(whole, indent=1) + "\n").encode())


def read_costs(path: Path) -> dict[str, dict[str, float]]:
    """Reads costs of any model and text, in types that can be written.

    Raises `UserError` for a file of another form.
    """
    return _load(path)[1]


def _load(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """A file's values, and the costs among them; raises `UserError` for another form."""
    remedy = "Name another, or remove it."
    found = load_json(path, "a file of costs", remedy=remedy)
    costs: Any = found.get("costs")
    rows = list(costs.values()) if isinstance(costs, dict) else [None]
    if found.get("format") != FORMAT or not all(
        isinstance(row, dict) and all(isinstance(x, int | float) for x in row.values())
        for row in rows
    ):
        raise UserError(
            f"{path}: found no costs of format {FORMAT}; expected a file of `kdjax shrink`. "
            f"{remedy}"
        )
    for name, row in costs.items():
        for dtype, cost in row.items():
            if dtype not in ENCODED or isinstance(cost, bool) or not 0 <= cost < math.inf:
                raise UserError(
                    f"{path}: found a cost of {cost} for {name} in {dtype}; expected numbers from "
                    f"0 on, of types among {', '.join(ENCODED)}. Leave others out."
                )
    return found, costs


def hash_rows(batches: Sequence[Mapping[str, np.ndarray]]) -> str:
    """SHA-256 of the rows of text that something is measured on."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in ("tokens", "segment_ids", "weights"):
            digest.update(np.ascontiguousarray(batch[name]).tobytes())
    return digest.hexdigest()
