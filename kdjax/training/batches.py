"""A batch, the contract of every step: its columns, their defaults, and their errors.

`tokens` and `labels` `[B, T]`, int32; `weights` of positions, float32; `segment_ids`, 0 for
padding; `positions` within a segment. Columns of teachers have their own names
(`training.teachers`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec
from kdjax.training.mixtures import spread_weights
from kdjax.training.teachers import APART, refuse_odd

IGNORED = -100  # a label that does not train, to PyTorch's cross-entropy and to Transformers
_IDS, _COLUMNS = ("tokens", "labels"), ("segment_ids", "positions", "weights")
_WEIGHTS = "weights", *APART


def read_ids(
    tokens: Any, labels: Any, weights: Any, *, head: HeadSpec
) -> tuple[Array, Array, Array]:
    """Returns labels and weights without `IGNORED`, and the number of ids outside the vocabulary.

    Labels of weight 0 may have any value. Takes NumPy arrays too, and works within `jax.jit`.
    """
    weights = jnp.where(labels == IGNORED, 0, weights).astype(jnp.float32)
    odd = [(tokens < 0) | (tokens >= head.width), (labels < 0) | (labels >= head.real_vocab)]
    outside = sum(jnp.sum(x, dtype=jnp.int32) for x in (odd[0], odd[1] & (weights != 0)))
    return jnp.where(odd[1], 0, labels), weights, jnp.asarray(outside)


def check_ids(
    tokens: np.ndarray, labels: np.ndarray, weights: np.ndarray, *, head: HeadSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Reads ids of host arrays as `read_ids` does; raises `UserError` naming the first outside."""

    def outside(ids: np.ndarray, size: int) -> np.ndarray:
        inside = not ids.size or 0 <= ids.min() <= ids.max() < size
        return np.zeros((), bool) if inside else (ids < 0) | (ids >= size)

    given = labels
    odd = {"tokens": outside(tokens, head.width), "labels": outside(labels, head.real_vocab)}
    if odd["labels"].any():
        weights = np.where(labels == IGNORED, 0, weights)
        odd["labels"], labels = odd["labels"] & (weights != 0), np.where(odd["labels"], 0, labels)
    for name, where in odd.items():
        if where.any():
            row, at = np.argwhere(where)[0]
            found = {"tokens": tokens, "labels": given}[name][row, at]
            _refuse_outside(int(where.sum()), f" ({name}[{row}, {at}] is {found})")
    return labels, weights


def _refuse_outside(count: Any, example: str = "") -> None:
    """Raises `UserError` for ids outside the vocabulary, if there are any."""
    if count:
        raise UserError(
            f"found {count} ids outside the vocabulary in a batch{example}; expected tokens and "
            f"labels of the student's tokenizer, and labels of {IGNORED} where none is trained on."
        )


def refuse_counted(counts: Any) -> None:
    """Raises `UserError` for counts of the devices: ids outside the vocabulary, and positions
    where a teacher in the batch is impossible."""
    outside, *odd = np.ravel(0 if counts is None else counts)
    _refuse_outside(int(outside))
    refuse_odd(sum(map(int, odd)))


def complete_batch(batch: Any) -> dict[str, Any]:
    """Fills in the columns that a batch of `tokens` and `labels` `[B, T]` leaves out.

    segment_ids: 1 everywhere (0 is padding). positions: from 0 in each run of one segment. weights:
    1 where the label belongs to its token's segment, as the last label of a row always does. Lists
    become arrays.

    Raises `UserError` for a batch without tokens or labels, or of columns of other shapes or types,
    and for weights on the host that are below 0 or not finite.
    """
    if not isinstance(batch, Mapping):
        raise UserError(
            f"found a batch of type {type(batch).__name__}; expected a dict of arrays [B, T] with "
            "tokens and labels."
        )
    lacking = [name for name in _IDS if name not in batch]
    if lacking:
        raise UserError(f"the batch has no {' and no '.join(lacking)}; found {sorted(batch)}.")
    columns = {name: _as_array(name, batch[name]) for name in batch if name != "row_ids"}
    shape = tuple(columns["tokens"].shape)
    columns = spread_weights(columns)
    odd = {name: tuple(x.shape) for name, x in columns.items() if tuple(x.shape[:2]) != shape}
    if odd or len(shape) != 2 or 0 in shape:
        raise UserError(
            f"the batch's tokens are {shape}, expected [B, T] of 1 or more; other shapes: {odd}."
        )
    for name in {*_IDS, *_COLUMNS, *APART} & columns.keys():
        columns[name] = _as_type(name, columns[name])
    if not columns.keys() >= set(_COLUMNS):
        segments = np.asarray(columns.setdefault("segment_ids", np.ones(shape, np.int32)))
        at = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        begins = np.diff(segments, axis=1, prepend=segments[:, :1]) != 0
        starts = np.maximum.accumulate(np.where(begins, at, 0), axis=1)
        same = np.diff(segments, axis=1, append=segments[:, -1:]) == 0
        columns.setdefault("positions", at - starts)
        columns.setdefault("weights", (same & (segments != 0)).astype(np.float32))
    return columns


def _as_array(name: str, column: Any) -> Any:
    if isinstance(column, jax.Array | np.ndarray):
        return column
    try:
        return np.asarray(column)
    except ValueError:
        raise UserError(
            f"the batch's {name} are lists of different lengths; expected an array [B, T]: pad the "
            "rows, with segment 0 or labels of -100."
        ) from None


def _as_type(name: str, column: Any) -> Any:
    """Converts whole numbers to int32, weights to float32; raises as `complete_batch` does."""
    if name in _WEIGHTS:
        column = column.astype(np.float32) if column.dtype != np.float32 else column
        # One that is not finite makes all numbers of the student NaN; one below 0 lets a step climb
        # the loss there.
        good = not isinstance(column, np.ndarray) or (np.isfinite(column) & (column >= 0)).all()
        if not good:
            raise UserError(
                f"the batch's {name} hold numbers below 0 or not finite; expected finite ones from "
                "0 on, and 0 where nothing trains."
            )
        return column
    if column.dtype == np.int32:
        return column
    if not jnp.issubdtype(column.dtype, jnp.integer):
        raise UserError(f"the batch's {name} are {column.dtype}; expected whole numbers, int32.")
    limits = np.iinfo(np.int32)
    if isinstance(column, np.ndarray):  # so that no id becomes another one
        column = np.clip(column, limits.min, limits.max)
    return column.astype(np.int32)
