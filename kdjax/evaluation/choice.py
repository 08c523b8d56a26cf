"""Chooses block types under a budget of bytes: the least sum of costs, by dynamic programming.

A multiple-choice knapsack: each tensor has one type of those measured (`evaluation.costs`), and the
sum of their bytes is bounded. Costs of single matrices are added up: what two matrices lose
together is taken as the sum of what each loses alone.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from kdjax.errors import UserError
from kdjax.formats.blocks import BLOCKS
from kdjax.models.arch import ArchSpec
from kdjax.models.mixture import Mixture, Part, count_bytes, list_matrices

# Types tried for rows of complete blocks of 256, of 32, and others.
_TYPES_256 = ("IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_TYPES_32 = ("Q4_0", "IQ4_NL", "Q5_0", "Q5_1", "Q8_0")
_ALIGNMENT = 32  # of tensors in a GGUF file
_MOST_UNITS = 1 << 19  # of the budget; more would take memory and change the choice by 1e-6

Costs = Mapping[str, Mapping[str, float]]  # nats, by tensor's name and type


def list_types(parts: Sequence[Part]) -> tuple[str, ...]:
    """Types that can be written for a tensor, by the width of its rows.

    A block that drafts, which no KL of the model sees, gets Q8_0.
    """
    width = parts[0].shape[-1]
    drafts = parts[0].path[0] == "mtp" and width % BLOCKS["Q8_0"].elements == 0
    for types in (("Q8_0",),) if drafts else (_TYPES_256, _TYPES_32):
        if width % BLOCKS[types[0]].elements == 0:
            return types
    return ("F16",)


def count_padded(parts: Sequence[Part], dtype: str) -> int:
    """Bytes that a tensor takes in a GGUF file, with those up to the next tensor."""
    nbytes = sum(count_bytes(part, dtype) for part in parts)
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def bound_bytes(spec: ArchSpec) -> tuple[int, int]:
    """Bytes of all matrices in the smallest mixture, and in the largest."""
    sizes = [
        [count_padded(parts, dtype) for dtype in list_types(parts)]
        for parts in list_matrices(spec).values()
    ]
    return sum(map(min, sizes)), sum(map(max, sizes))


def solve(options: Sequence[Sequence[tuple[int, float]]], budget: int) -> list[int] | None:
    """Picks one option (bytes, cost) of each list: the least sum of costs within the budget.

    Returns an index for each list, None if even the smallest options exceed the budget. Exact while
    the budget has at most 2^19 units of the sizes' common divisor; beyond, sizes are rounded up.
    """
    kept = [_prune(one) for one in options]
    room = budget - sum(one[0][0] for one in kept)
    if room < 0:
        return None
    rises = [[size - one[0][0] for size, _, _ in one] for one in kept]
    room = min(room, sum(one[-1] for one in rises))
    unit = functools.reduce(math.gcd, (rise for one in rises for rise in one)) or 1
    unit *= max(1, -(-(room // unit) // _MOST_UNITS))
    units = room // unit
    best, picks = np.zeros(units + 1), np.zeros((len(kept), units + 1), np.uint8)
    for pick, one, sizes in zip(picks, kept, rises, strict=True):
        new = np.full(units + 1, np.inf)
        for i, (size, (_, cost, _)) in enumerate(zip(sizes, one, strict=True)):
            step = -(-size // unit)
            if step > units:
                break
            candidate = best[: units + 1 - step] + cost
            better = candidate < new[step:]
            new[step:][better] = candidate[better]
            pick[step:][better] = i
        best = new
    chosen, left = [], units
    for pick, one, sizes in zip(picks[::-1], kept[::-1], rises[::-1], strict=True):
        i = int(pick[left])
        chosen.append(one[i][2])
        left -= -(-sizes[i] // unit)
    return chosen[::-1]


def _prune(options: Sequence[tuple[int, float]]) -> list[tuple[int, float, int]]:
    """The options that no smaller one is as good as, with their indices, the smallest first."""
    kept: list[tuple[int, float, int]] = []
    for size, cost, i in sorted((size, cost, i) for i, (size, cost) in enumerate(options)):
        if not kept or cost < kept[-1][1]:
            kept.append((size, cost, i))
    return kept


def check_costs(costs: Costs, spec: ArchSpec) -> None:
    """Raises `UserError` for costs of another model: of other tensors, or of other rows."""
    tensors = list_matrices(spec)
    if missing := [name for name in tensors if not costs.get(name)]:
        raise UserError(
            f"found no costs of {missing[0]} ({len(missing)} of {len(tensors)} matrices); expected "
            "costs of all. Measure them with the model that you shrink."
        )
    for name, parts in tensors.items():
        for dtype in costs[name]:
            try:
                count_padded(parts, dtype)
            except UserError as error:
                raise UserError(f"found costs of {name} in {dtype}: {error}") from error


def choose_mixture(costs: Costs, spec: ArchSpec, budget: int) -> Mixture:
    """Chooses the types whose costs add up to the least, all matrices within `budget` bytes.

    `costs` have all matrices, as `check_costs` proves. Raises `UserError` for a budget below the
    smallest mixture.
    """
    tensors = list_matrices(spec)
    types = [tuple(costs[name]) for name in tensors]
    options = [
        [(count_padded(parts, dtype), costs[name][dtype]) for dtype in given]
        for (name, parts), given in zip(tensors.items(), types, strict=True)
    ]
    found = solve(options, budget)
    if found is None:
        least = sum(min(size for size, _ in one) for one in options)
        raise UserError(
            f"found a budget of {budget / 1e6:,.1f} MB for the matrices; the smallest mixture has "
            f"{least / 1e6:,.1f} MB. Raise the size."
        )
    chosen = {name: given[i] for name, given, i in zip(tensors, types, found, strict=True)}
    return Mixture.of_tensors(chosen, spec)
