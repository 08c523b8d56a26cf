"""Interpolated Kneser-Ney of ids below 4,096: what a model must beat to be more than counting.

Chen and Goodman 1998, equations 24 to 26: one discount an order, n1 / (n1 + 2 n2); below the
highest order a gram counts once for each id that comes before it. An n-gram is one int64, 12 bits
an id, so counting is sorting.
"""

import numpy as np

BITS = 12


class KneserNey:
    """A model of `order`, trained on a stream of ids; `vocabulary` ids exist."""

    def __init__(self, ids: np.ndarray, order: int, vocabulary: int):
        if vocabulary > 1 << BITS or order * BITS > 63:
            raise ValueError(f"{vocabulary} ids or order {order}: more than an int64 holds")
        self.order, self.vocabulary = order, vocabulary
        grams, counts = np.unique(_grams(ids, order), return_counts=True)
        self._orders: list[_Order] = []
        for n in range(order, 0, -1):
            self._orders.insert(0, _Order(grams, counts))
            if n > 1:
                grams, counts = np.unique(grams & ((1 << BITS * (n - 1)) - 1), return_counts=True)

    def nats(self, ids: np.ndarray) -> np.ndarray:
        """-log p of `ids[order - 1:]`, each given the `order - 1` ids before it, float64."""
        p = np.full(len(ids) - self.order + 1, 1.0 / self.vocabulary)
        for n, level in enumerate(self._orders, 1):
            p = level.interpolated(_grams(ids, n)[self.order - n :], p)
        return -np.log(p)


class _Order:
    """Sorted grams of one order, their counts, and sums over those that share a history."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray):
        ones, twos = (counts == 1).sum(), (counts == 2).sum()
        # Of a few ids counted millions of times none may be rare; unseen ones keep a share.
        self._discount = float(np.clip(ones / max(ones + 2 * twos, 1), 0.1, 0.9))
        self._grams, self._counts = grams, counts
        self._histories, starts = np.unique(grams >> BITS, return_index=True)
        self._totals = np.add.reduceat(counts, starts)
        self._kinds = np.diff(starts, append=len(grams))

    def interpolated(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probabilities of the grams' last ids; those of the order below for unseen histories."""
        count = _found(self._grams, self._counts, grams)
        total = _found(self._histories, self._totals, grams >> BITS)
        kinds = _found(self._histories, self._kinds, grams >> BITS)
        known = np.maximum(total, 1)
        p = np.maximum(count - self._discount, 0) / known + self._discount * kinds / known * lower
        return np.where(total > 0, p, lower)


def _grams(ids: np.ndarray, order: int) -> np.ndarray:
    """Every run of `order` ids, the oldest in the highest bits."""
    ids = np.asarray(ids, np.int64)
    grams = np.zeros(len(ids) - order + 1, np.int64)
    for i in range(order):
        grams = (grams << BITS) | ids[i : i + len(grams)]
    return grams


def _found(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
