"""The entries of a grid that are nearest to numbers: what IQ3_S, IQ3_XXS and IQ2_S round to.

These types round four or eight numbers at once, to one entry of a table (`codebooks`). All entries
are compared, on a CPU a few at a time, so that temporaries have no more numbers than the input.
Numbers are rounded to a small part of a step first: distances are then whole numbers that float32
holds exactly, and the nearest entry is the same one on every backend.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from kdjax.formats import codebooks

_TOGETHER = 16  # entries that one pass over the numbers compares on a CPU


class Grid(NamedTuple):
    """A table of entries, and how finely numbers are compared with it."""

    entries: np.ndarray  # float32 [entries, size]
    fine: float  # parts of 1 that numbers are rounded to, a power of two
    # Of `guess`: numbers from 0 up in cells of this width, this many.
    width: float
    cells: int

    @property
    def size(self) -> int:
        """Numbers of an entry."""
        return self.entries.shape[1]

    @property
    def top(self) -> float:
        """The largest number of an entry."""
        return float(self.entries.max())


GRIDS = {
    "IQ3_S": Grid(codebooks.IQ3_S, 32, 1.0, 16),
    "IQ3_XXS": Grid(codebooks.IQ3_XXS, 8, 4.0, 16),
    "IQ2_S": Grid(codebooks.IQ2_S, 8, 8.5, 5),
}


def _columns(x: Array, size: int) -> list[Array]:
    groups = x.reshape(*x.shape[:-1], -1, size)
    return [groups[..., j] for j in range(size)]


@functools.partial(jax.jit, static_argnames="name")
def find_nearest(
    x: Float[Array, "*lead n"], name: str, weights: Float[Array, "*lead n"] | None = None
) -> Int32[Array, "*lead entries"]:
    """The number of the entry nearest to each `size` numbers, in units of the grid's entries.

    `weights` multiply the squared distances. Distances count to a share of 2^-13; of equal ones the
    first counts. Numbers beyond twice the largest of an entry count as twice that.
    """
    grid = GRIDS[name]
    count, size = grid.entries.shape
    entries = grid.entries * grid.fine
    most = 2 * grid.top
    x = jnp.rint(jnp.clip(x, -most, most) * grid.fine)
    # Columns of an entry, and its squared length.
    table = np.concatenate([entries.T, (entries**2).sum(axis=1)[None]])
    numbers = _columns(x, size)
    w = None if weights is None else _columns(weights, size)
    own = sum(y * y if w is None else w[j] * y * y for j, y in enumerate(numbers))
    slopes = [-2 * y if w is None else -2 * w[j] * y for j, y in enumerate(numbers)]

    def number(entry: Array, index: Any, own: Array, slopes: Any, w: Any) -> Array:
        """The entry's distance; its last bits make room for its index: one minimum finds both."""
        distance = own + entry[size] if w is None else own
        for j, slope in enumerate(slopes):
            distance += (slope if w is None else w[j] * entry[j] + slope) * entry[j]
        return (lax.bitcast_convert_type(distance, jnp.int32) & -count) | index

    def compare_in_passes(*given: Any) -> Array:
        parts = jnp.asarray(table.T.reshape(-1, _TOGETHER, size + 1))

        def compare(i: Array, best: Array) -> Array:
            rows = lax.dynamic_index_in_dim(parts, i, keepdims=False)
            for place in range(_TOGETHER):
                best = jnp.minimum(best, number(rows[place], i * _TOGETHER + place, *given))
            return best

        first = jnp.full(numbers[0].shape, np.iinfo(np.int32).max, jnp.int32)
        return lax.fori_loop(0, count // _TOGETHER, compare, first)

    # On a GPU a pass of a loop waits for the host (70 us on an H200): GPTQ, which rounds a few
    # columns at a time, took 50 times as long, and a step of training is slower too.
    def compare_at_once(*given: Any) -> Array:
        wide = jax.tree.map(lambda x: x[..., None], given)
        along = (size + 1, *(1,) * numbers[0].ndim, count)
        index = np.arange(count, dtype=np.int32).reshape(along[1:])
        return number(jnp.asarray(table.reshape(along)), index, *wide).min(axis=-1)

    best = lax.platform_dependent(own, slopes, w, cpu=compare_in_passes, default=compare_at_once)
    return best & (count - 1)


@functools.cache
def _guesses(name: str) -> np.ndarray:
    """The entry nearest to the middle of each cell, uint16 `[cells ^ size]`, first digits first."""
    grid = GRIDS[name]
    middles = (np.arange(grid.cells) + 0.5) * grid.width
    middles = np.minimum(middles, grid.top)
    places = np.arange(grid.cells**grid.size)
    found, step = [], 1 << 16
    for start in range(0, len(places), step):
        digits = places[start : start + step, None] // grid.cells ** np.arange(grid.size)
        x = middles.astype(np.float32)[digits % grid.cells]
        found.append(np.argmin((grid.entries**2).sum(axis=1) - 2 * x @ grid.entries.T, axis=1))
    return np.concatenate(found).astype(np.uint16)


def guess(x: Float[Array, "*lead n"], name: str) -> Float[Array, "*lead n"]:
    """Entries near to numbers, at the cost of two lookups: of the middle of each number's cell."""
    grid = GRIDS[name]
    cells = jnp.clip(jnp.floor(x * (1 / grid.width)), 0, grid.cells - 1).astype(jnp.int32)
    places = sum(cell * grid.cells**j for j, cell in enumerate(_columns(cells, grid.size)))
    found = codebooks.look_up(_guesses(name), jnp.asarray(places))
    return codebooks.look_up(grid.entries, found).reshape(x.shape)
