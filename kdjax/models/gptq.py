"""Rounds matrices to GGML blocks so that what one column loses is made up for by the next ones.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) with the blocks of GGUF: the scales of a block are
fitted, by the exporter's search, to the numbers that the columns before it have left; its columns
are then rounded one after another with these scales. The numbers just before they are rounded are
masters to train from: with these scales they round to the same blocks. A matrix makes up for the
rounded ones before it, too: half of the way it keeps the outputs from the model's own inputs,
not from the inputs that rounded matrices return (GPTAQ, Li et al. 2025, arXiv:2504.02692). The head
is rounded after all layers, by what it reads; where it is the embedding as well, that is its input
matrix, too, and only columns make up for columns.
"""

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from kdjax.errors import UserError
from kdjax.formats.blocks import BLOCKS, Scales, decode_fields, encode_fields, fit_rows
from kdjax.formats.kquants import ENCODERS
from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decode_weights import SHARING
from kdjax.models.decoder import DecoderFunctions, Params
from kdjax.models.layerwise import cut_layer, run_layer
from kdjax.models.mixture import Mixture
from kdjax.models.model import Model
from kdjax.models.weights import Adapted
from kdjax.progress import counted

# int32 columns [B, T] of each batch: `tokens`, `segment_ids` and `positions`, others are not read.
Batches = Sequence[Mapping[str, np.ndarray]]
_DAMP = 0.01  # share of the mean of the Hessian's diagonal that is added to the diagonal
# Share of the way from a matrix's own numbers to those that give the exact outputs, by least
# squares, which shrink as inputs are noise. Half lowers the KL by a quarter; all of it raises it.
_SHARE = 0.5
_ROWS = 1 << 14  # of a head, at most, that are rounded at a time


@functools.partial(jax.jit, static_argnames="dtype")
def round_matrix(
    w: Float[Array, "out n"], hessian: Float[Array, "n n"], cross: Float[Array, "n n"], dtype: str
) -> tuple[Array, Scales, Array]:
    """Returns masters `[out, n]`, the scales of their blocks, and the rounded numbers.

    `hessian` sums outer products of the inputs x, `cross` sums the exact inputs' with x.
    """
    size, (rows, width) = BLOCKS[dtype].elements, w.shape
    w, diagonal = w.astype(jnp.float32), jnp.diagonal(hessian)
    dead = diagonal == 0
    damped = hessian + jnp.diag(jnp.where(dead, 1.0, _DAMP * jnp.mean(diagonal)))
    lower = jax.scipy.linalg.cho_factor(damped, lower=True)
    change = jnp.matmul(w, cross - hessian, precision=jax.lax.Precision.HIGHEST)
    w = w + _SHARE * jax.scipy.linalg.cho_solve(lower, change.T).T
    inverse = jax.scipy.linalg.cho_solve(lower, jnp.eye(width))
    upper = jnp.linalg.cholesky(inverse).T  # U^T U is the inverse
    importance = jnp.where(dead, 0.0, diagonal) + 1e-8 * jnp.mean(diagonal) + 1e-30

    def run_block(w: Array, number: Array) -> tuple[Array, tuple[Any, ...]]:
        start = number * size
        part = jax.lax.dynamic_slice(w, (0, start), (rows, size))
        weights = jax.lax.dynamic_slice(importance, (start,), (size,))
        scales = fit_rows(part, dtype, jnp.broadcast_to(weights, part.shape))
        own = jax.lax.dynamic_slice(upper, (start, start), (size, size))
        masters, lost = _round_columns(part, own, dtype, scales)
        rounded = decode_fields(encode_fields(masters, dtype, scales), dtype)
        later = jax.lax.dynamic_slice(upper, (start, 0), (size, width))
        later = jnp.where(jnp.arange(width)[None] >= start + size, later, 0.0)
        w = w - jnp.matmul(lost, later, precision=jax.lax.Precision.HIGHEST)
        return w, (masters, scales, rounded)

    _, (masters, scales, rounded) = jax.lax.scan(run_block, w, jnp.arange(width // size))
    # A block's scales are [blocks, out, 1, ...]: one block a row.
    scales = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, -1, *x.shape[3:]), scales)
    masters, rounded = (jnp.moveaxis(x, 0, 1).reshape(rows, width) for x in (masters, rounded))
    return masters, scales, rounded


def _divide_by_upper(lost: Array, upper: Array) -> Array:
    """Multiplies what columns lose, `[out, n]`, by the inverse of their part of U, `[n, n]`."""
    return jax.scipy.linalg.solve_triangular(upper.T, lost.T, lower=True).T


def _round_columns(part: Array, upper: Array, dtype: str, scales: Scales) -> tuple[Array, Array]:
    """A block's numbers just before each column is rounded, and what each column lost / U_jj.

    Columns that the type rounds together take one step.
    """
    (rows, size), encoder = part.shape, ENCODERS.get(dtype)
    together = encoder.joint if encoder else None
    joint, at = together.size if together else 1, jnp.arange(size)

    def round_at(masters: Array, j: Array) -> Array:
        if together is None:
            rounded = decode_fields(encode_fields(masters, dtype, scales), dtype)
            return jax.lax.dynamic_slice(rounded, (0, j), (rows, joint))
        inverse = scales[-1].reshape(rows, -1)  # of the groups of the block
        own = jax.lax.dynamic_slice(inverse, (0, j * inverse.shape[1] // size), (rows, 1))
        return together.round(jax.lax.dynamic_slice(masters, (0, j), (rows, joint)), own)

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        (masters, lost), j = carry, i * joint
        error = jax.lax.dynamic_slice(masters, (0, j), (rows, joint)) - round_at(masters, j)
        own = jax.lax.dynamic_slice(upper, (j, j), (joint, joint))
        error = error / own if joint == 1 else _divide_by_upper(error, own)
        later = jax.lax.dynamic_slice(upper, (j, 0), (joint, size))
        later = jnp.where(at[None] >= j + joint, later, 0.0)
        masters = masters - jnp.matmul(error, later, precision=jax.lax.Precision.HIGHEST)
        return masters, jax.lax.dynamic_update_slice(lost, error, (0, j))

    return jax.lax.fori_loop(0, size // joint, step, (part, jnp.zeros_like(part)))


def suits(spec: ArchSpec) -> bool:
    """Whether all layers are dense attention ones, the only ones that are walked one by one."""
    return not (spec.experts or spec.places(delta=True) or spec.drafts)


def round_model(
    model: Model, batches: Batches, mixture: Mixture
) -> tuple[Params, dict[tuple[str, ...], Any]]:
    """Rounds all matrices of layers, one stage of a layer after the other, and the head, on text.

    Each reads the text as the rounded matrices before it return it, and next to it as the model
    itself does; one stage's Hessians are in memory at a time. Returns float32 masters, and for each
    rounded path and type its scales, as `training.forms.Rounded` stores them; an embedding that is
    no head stays as it is. Raises `UserError` for a model with experts or delta layers.
    """
    spec, functions = model.spec, model.functions
    if spec is None or not suits(spec):
        raise UserError(
            f"{model.name}: found experts, delta layers or a block that drafts; expected a dense "
            "model, whose layers GPTQ rounds one by one. Leave GPTQ out."
        )
    assert isinstance(functions, DecoderFunctions)
    flat: dict[tuple[str, ...], Any] = flatten_dict(model.params)
    stacks = {path: leaf for path, leaf in flat.items() if path[0] in STACKS}
    others = {path: leaf for path, leaf in flat.items() if path[0] not in STACKS}
    columns = [(jnp.asarray(x["segment_ids"]), jnp.asarray(x["positions"])) for x in batches]
    embed = jax.jit(functions.embed_tokens)
    states = exact_states = [embed(model.params, jnp.asarray(x["tokens"])) for x in batches]
    chosen, head = dict(mixture.types), (spec.head,)
    types = {path: kinds for path, kinds in chosen.items() if path[0] in STACKS}
    found: dict[tuple[str, ...], list[Any]] = {path: [] for path in types}
    shapes = {path: leaf.shape[1:] for path, leaf in stacks.items()}
    shapes[head] = _split_rows(flat[head].shape)[1:]
    alike = {path: jax.ShapeDtypeStruct(x, flat[path].dtype) for path, x in shapes.items()}
    programs = _compile_all(alike, chosen)
    for index in counted(range(spec.num_layers), "layers rounded"):
        alone = cut_layer(model, index)
        exact = {path: leaf[index : index + 1] for path, leaf in stacks.items()}
        layer = dict(exact)
        for stage in _split_stages(types):
            pair = unflatten_dict(others | exact), unflatten_dict(others | layer)
            both = zip(exact_states, states, columns, strict=True)
            parts = (_measure(alone, stage[0], *pair, x, y, *more) for x, y, more in both)
            sums = _add_up(parts)
            for path in stage:
                w, dtype = exact[path][0], types[path][index]
                *made, rounded = programs[w.shape, dtype](w, *sums)
                found[path].append(made)
                layer[path] = rounded[None].astype(layer[path].dtype)
        exact_states = _run_layer(alone, others | exact, exact_states, columns)
        states = _run_layer(alone, others | layer, states, columns)
    kept: dict[tuple[str, ...], Any] = {}
    for dtype in chosen.get(head, ()):
        both = zip(exact_states, states, strict=True)
        hessian, cross = _add_up(_measure_head(functions, model.params, x, y) for x, y in both)
        sums = hessian, hessian if spec.tied else cross
        flat[head], kept[*head, dtype] = _round_parts(flat[head], sums, programs, dtype)
    for path in types:  # a stack at a time, waited for: its layers' arrays go
        rows = found.pop(path)
        flat[path] = jax.block_until_ready(jnp.stack([masters for masters, _ in rows]))
        for dtype in dict.fromkeys(types[path]):
            chosen = [x for (_, x), kind in zip(rows, types[path], strict=True) if kind == dtype]
            kept[*path, dtype] = jax.tree.map(lambda *x: jnp.stack(x), *chosen)
    return unflatten_dict(flat), kept


def _split_rows(shape: Sequence[int]) -> tuple[int, int, int]:
    """The shape of a matrix in parts of few rows: their number, their rows and the columns."""
    parts = math.ceil(shape[0] / _ROWS)
    return parts, math.ceil(shape[0] / parts), shape[1]


def _round_parts(
    w: Float[Array, "out n"], sums: tuple[Array, Array], programs: Mapping[Any, Any], dtype: str
) -> tuple[Array, Scales]:
    """Rounds a matrix of many rows a part at a time; returns its masters and its scales."""
    count, rows, width = _split_rows(w.shape)
    parts = jnp.pad(w, ((0, count * rows - len(w)), (0, 0))).reshape(count, rows, width)
    made = [programs[(rows, width), dtype](part, *sums)[:2] for part in parts]
    return jax.tree.map(lambda *x: jnp.concatenate(x)[: len(w)], *made)


def _compile_all(
    alike: Mapping[Any, jax.ShapeDtypeStruct], types: Mapping[Any, Sequence[str]]
) -> dict[Any, Callable[..., tuple[Array, Scales, Array]]]:
    """Compiles `round_matrix` for each shape of matrices and type, at once."""
    lowered = {}
    for path, w in alike.items():
        kinds = dict.fromkeys(types.get(path, ()))
        square = jax.ShapeDtypeStruct((w.shape[-1],) * 2, jnp.float32)
        for kind in kinds:
            if (w.shape, kind) not in lowered:
                lowered[w.shape, kind] = round_matrix.lower(w, square, square, kind)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda program: program.compile(), lowered.values())
        return dict(zip(lowered, compiled, strict=True))


def _split_stages(paths: Collection[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Splits the matrices of a layer into stages, of one input; it depends on those before."""
    stages = [tuple(p for p in paths if p[1] == part and p[2] in names) for part, names in SHARING]
    return [stage for stage in stages if stage]


def _run_layer(
    alone: DecoderFunctions,
    flat: dict[tuple[str, ...], Any],
    states: Sequence[Array],
    columns: Sequence[tuple[Array, Array]],
) -> list[Array]:
    """Lets all batches pass a layer."""
    params, read = unflatten_dict(flat), zip(states, columns, strict=True)
    return [run_layer(alone, params, 0, x, *more) for x, more in read]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _measure(
    functions: DecoderFunctions,
    path: tuple[str, ...],
    exact: Params,
    params: Params,
    exact_x: Float[Array, "B T D"],
    x: Float[Array, "B T D"],
    *columns: Array,
) -> tuple[Float[Array, "n n"], Float[Array, "n n"]]:
    """Sums of outer products of a matrix's inputs, and of its exact inputs with them."""
    return _multiply(
        _read_inputs(functions, path, exact, exact_x, *columns),
        _read_inputs(functions, path, params, x, *columns),
    )


@functools.partial(jax.jit, static_argnums=0)
def _measure_head(
    functions: DecoderFunctions,
    params: Params,
    exact_x: Float[Array, "B T D"],
    x: Float[Array, "B T D"],
) -> tuple[Float[Array, "D D"], Float[Array, "D D"]]:
    """Sums as `_measure`'s, of what the head reads."""
    theirs, ours = (
        functions.finish(params, y).astype(jnp.float32).reshape(-1, y.shape[-1])
        for y in (exact_x, x)
    )
    return _multiply(theirs, ours)


def _add_up(parts: Iterable[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Adds the sums of all batches, one after the other."""
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)


def _multiply(theirs: Float[Array, "N n"], ours: Float[Array, "N n"]) -> tuple[Array, Array]:
    """Sums of outer products of inputs, and of the exact inputs with them."""
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return product(ours.T, ours), product(theirs.T, ours)


def _read_inputs(
    functions: DecoderFunctions, path: tuple[str, ...], params: Params, x: Array, *columns: Array
) -> Float[Array, "N n"]:
    """Reads the inputs of a matrix of a layer, N of B T positions."""
    flat: dict[tuple[str, ...], Any] = flatten_dict(params)

    def run(zeros: Array) -> Array:
        seen = flat | {
            other: Adapted(leaf, sums=zeros if other == path else None)
            for other, leaf in flat.items()
            if other[0] in STACKS and leaf.ndim == 3
        }
        out, _ = functions.read_segments(unflatten_dict(seen), x, *columns)
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(run)(jnp.zeros((1, math.prod(x.shape[:2]), flat[path].shape[-1])))[0]


def count_rounding_bytes(spec: ArchSpec) -> int:
    """Bytes of a stage's two float32 sums of outer products, and of what rounding makes of them.

    These are up to four squares more: factor, inverse and what they are made from. A head takes
    more where it is large: the parts of its rows, and the masters that are made of the parts'.
    """
    squares = 6 * max(spec.hidden_size, spec.num_heads * spec.head_dim, spec.mlp_size) ** 2
    count, rows, width = _split_rows((spec.vocab_size, spec.hidden_size))
    return 4 * max(squares, 2 * count * rows * width + 6 * (width + rows) * width)
