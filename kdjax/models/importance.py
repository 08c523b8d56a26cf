"""Importance of a matrix's inputs: sums of their squares over a text, as in llama-imatrix."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Int

from kdjax.errors import UserError
from kdjax.formats.imatrix import write_importance
from kdjax.models import names
from kdjax.models.arch import STACKS
from kdjax.models.decoder import Params
from kdjax.models.model import Model
from kdjax.models.weights import Adapted, Scaled


def sum_squares(
    model: Model, batches: Iterable[Int[np.ndarray, "_ T"]]
) -> tuple[dict[str, np.ndarray], int]:
    """Sums float64 `[inputs]` by the tensor's name in GGUF, and the number of positions.

    Matrices of layers and the head, under the embedding's name if it is tied, have sums, all from
    one pass; a row is one text from its first position on. A batch is summed in float32. Raises
    `UserError` for experts, float8 and custom modules, and for inputs that are not finite.
    """
    spec = model.spec
    if spec is None or spec.experts:
        what = "with experts" if spec else "of a custom module"
        raise UserError(f"found a model {what}; expected a dense one of a known architecture.")
    flat: dict[tuple[str, ...], Any] = flatten_dict(model.params)
    stacks = {name for name, delta in STACKS.items() if delta is not None}
    paths = [p for p in flat if p[0] in stacks and p[-1] == "weight" and "norm" not in p[-2]]
    if any(isinstance(flat[path], Scaled) for path in paths):
        raise UserError(
            "found a model in float8; expected one kept dense or packed. Name another form."
        )
    layers = {name: spec.places(delta=delta) for name, delta in STACKS.items()}
    zeros = {path: jnp.zeros((len(layers[path[0]]), flat[path].shape[-1])) for path in paths}

    def run(
        zeros: dict[tuple[str, ...], Array], params: Params, tokens: Array
    ) -> tuple[Array, Array]:
        seen = flatten_dict(params)
        seen |= {path: Adapted(seen[path], sums=zeros[path]) for path in paths}
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        columns = tokens, jnp.ones_like(tokens), positions
        last = model.functions.hidden(unflatten_dict(seen), *columns).astype(jnp.float32)
        return jnp.sum(last), jnp.sum(last**2, axis=(0, 1))

    # The gradient of `Adapted.sums` is the sum of squares, whatever follows the product.
    measure = jax.jit(jax.grad(run, has_aux=True))
    total = {path: np.zeros(zero.shape) for path, zero in zeros.items()}
    head, count = np.zeros(spec.hidden_size), 0
    for tokens in batches:
        layered, of_head = measure(zeros, model.params, jnp.asarray(tokens, jnp.int32))
        for path, sums in layered.items():
            total[path] += np.asarray(sums, np.float64)
        head += np.asarray(of_head, np.float64)
        count += tokens.size
    fused = names.list_fused(spec, gguf=True)
    found = {
        names.name_of(path, spec).gguf.format(i=layer): sums[place]
        for path, sums in total.items()
        for place, layer in enumerate(layers[path[0]])
    }
    found[names.name_of((spec.head,), spec).gguf] = head
    for whole, rows in fused.items():  # they are multiplied with the same
        found[whole], *_ = [found.pop(part) for part, _ in rows.parts]
    if odd := [name for name, sums in found.items() if not np.isfinite(sums).all()]:
        raise UserError(
            f"{model.checkpoint or 'the model'}: found inputs of {odd[0]} that are not finite; "
            "expected numbers. Its weights are damaged: `kdjax evaluate` says where."
        )
    return found, count


def measure_importance(
    path: str | os.PathLike[str],
    model: Model,
    batches: Iterable[Int[np.ndarray, "_ T"]],
    *,
    datasets: Sequence[str],
    chunk_size: int,
) -> tuple[int, int]:
    """Writes what `sum_squares` finds, by `write_importance`; returns the matrices and positions.

    `datasets` and `chunk_size`, positions a row, are noted in the file.
    """
    sums, count = sum_squares(model, batches)
    write_importance(path, sums, count, datasets=datasets, chunk_size=chunk_size)
    return len(sums), count
