"""Batches from rows: shuffled, split over processes, prefetched; the only importer of Grain.

Grain's map-style datasets make the position plain arithmetic: batch g is rows g*B .. g*B + B - 1 of
the shuffled sequence, so a resumed run, on any number of processes, sees the same rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np

from kdjax.data.rows import Rows, count_positions

_ENDLESS = 2**52  # rows
THREADS, PREFETCH = 2, 8  # threads that build rows, and batches they run ahead


@runtime_checkable  # tests check annotations with isinstance
class Columns(Protocol):
    """More columns of each row, such as a teacher's cached outputs."""

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Arrays `[T, ...]` of one row."""
        ...


class _Examples:
    """Grain's random-access source over rows."""

    def __init__(self, rows: Rows, more: Columns | None):
        self._rows, self._more = rows, more

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return example(self._rows, int(index), self._more)


def example(rows: Rows, index: int, more: Columns | None = None) -> dict[str, Any]:
    """One row as arrays `[T]`: tokens, labels, segment_ids, positions (int32), weights (float32).

    The columns of `more` are added, and `row_ids`, the row's number (int64).

    A position has weight 1 if its target is in the same document and carries loss. Positions count
    from 0 within each document.
    """
    tokens = rows.tokens[index].astype(np.int32)
    segments = rows.segments[index].astype(np.int32)
    inputs, targets = segments[:-1], segments[1:]
    trained = (inputs == targets) & (inputs != 0) & (rows.mask[index][1:] != 0)
    columns = {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "segment_ids": inputs,
        "positions": count_positions(inputs),
        "weights": trained.astype(np.float32),
        "row_ids": np.int64(index),
    }
    return columns | (more[index] if more else {})


def stack_examples(examples: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The batch of these examples, in order: columns `[T]` become `[B, T]`."""
    return {name: np.stack([one[name] for one in examples]) for name in examples[0]}


@runtime_checkable
class BatchSource(Protocol):
    """Source of training batches: all that `distill(batches=...)` needs.

    A batch holds arrays `[B, T]`, this process's share of the rows: see `example`. `params` are the
    student's parameters on the devices, before the step that trains on the batch. A source of
    on-policy answers reads them, and has finished reading when `next` returns.
    """

    def next(self, params: Any) -> dict[str, np.ndarray]:
        """The next batch."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Position before the next batch, small and JSON-able."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves a fresh source to a state of `get_state`: `next` returns that state's batch."""
        ...


class News(NamedTuple):
    """News of a source for the hooks, before the step that trains on its latest batch."""

    kind: str  # as logs call it: "round"
    figures: dict[str, float]


class Source(BatchSource):
    """Interface between the loop and a batch source, with defaults for a source without news."""

    @property
    def identity(self) -> dict[str, Any]:
        """The source's part of a run's identity, under separate names; JSON-able."""
        return {}

    @property
    def pauses(self) -> bool:
        """Whether the next batch takes time that does not count as a step's."""
        return False

    def take_news(self) -> News | None:
        """Returns the news of the latest batch, once; None without any."""
        return None


class _Given(Source):
    """Wraps a user-defined source, which has only `BatchSource`'s methods."""

    def __init__(self, source: BatchSource):
        self.next = source.next
        self.get_state = source.get_state
        self.set_state = source.set_state


def complete_source(source: BatchSource) -> Source:
    """Wraps a source unless it already is a `Source`."""
    return source if isinstance(source, Source) else _Given(source)


class TextSource(Source):
    """Endless batches of packed text, `batch_size` rows over all processes; a `Source`.

    Reshuffled every epoch. A process has consecutive rows, so that a device has the same rows
    however devices are split into processes. `batch_size` must be divisible by
    `process_count`.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        more: Columns | None = None,
    ):
        # Endless for any run. Grain's own endless length, 2^63 - 1, divided as a float by a batch
        # of 1 is 2^63, which no Python length holds.
        epochs = _ENDLESS // len(rows)
        dataset = grain.MapDataset.source(_Examples(rows, more)).shuffle(seed=seed).repeat(epochs)
        dataset = dataset.batch(batch_size // process_count)[process_index::process_count]
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=PREFETCH)
        self._batches: Any = iter(dataset.to_iter_dataset(options))

    def next(self, params: Any = None) -> dict[str, np.ndarray]:
        """Returns the next batch, for any parameters of the student."""
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """The position before the next batch."""
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves a fresh source to a position of `get_state`."""
        self._batches.set_state(state)


def list_rows(rows: int, *, batch_size: int, seed: int, batches: int) -> np.ndarray:
    """Numbers of the rows that the first batches of a `TextSource` have, ascending."""
    count = batches * batch_size
    if count >= rows:  # an epoch has every row once
        return np.arange(rows)
    order: Any = grain.MapDataset.range(rows).shuffle(seed=seed)
    return np.sort(np.asarray([order[i] for i in range(count)], np.int64))


def list_heldout(rows: int, limit: int | None) -> np.ndarray:
    """Numbers of the rows that an evaluation reads: `limit` or fewer, spread evenly over all."""
    return np.linspace(0, rows - 1, min(rows, limit or rows)).astype(np.int64)


def eval_batches(
    rows: Rows,
    *,
    batch_size: int,
    limit: int | None,
    process_index: int = 0,
    process_count: int = 1,
    more: Columns | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of the rows of `list_heldout`; pads the last.

    Padding rows have weight 0 and row id -1.
    """
    chosen = list_heldout(len(rows), limit)
    count = len(chosen)
    empty = {k: np.zeros_like(v) for k, v in example(rows, 0, more).items()}
    empty["row_ids"] = np.int64(-1)
    share = batch_size // process_count
    for start in range(process_index * share, count + process_index * share, batch_size):
        mine = range(start, start + share)
        parts = [example(rows, int(chosen[i]), more) if i < count else empty for i in mine]
        yield stack_examples(parts)
