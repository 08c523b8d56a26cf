"""Rows and a clock, the same for every program; NumPy alone, so that the peer can have them."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

WARMUP = 3  # steps before the clock starts
GROUP = 4  # steps dispatched before the last is waited for, as training loops dispatch them


def ids_of(width: int) -> int:
    """How many rows of an embedding have a token: Qwen2.5's tokenizer leaves 271 of its without."""
    return width - 271 if width == 151_936 else width


class MadeRows(NamedTuple):
    """Arrays `[N, length + 1]` as `kdjax.data.rows.Rows` holds them."""

    tokens: np.ndarray  # int32
    segments: np.ndarray  # int32: 1, 2, ... within a row
    mask: np.ndarray  # uint8: all trained


def made_rows(rows: int, length: int, vocab: int, documents: str = "1", most: int = 32) -> MadeRows:
    """Random rows, the same for the same arguments.

    `documents` is how many there are in a row, cut at random ("8"), or the range of their lengths
    ("50:2000"); the last of a row, and the `most`-th, goes to its end.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    segments = np.empty_like(tokens)
    for row in segments:
        starts = np.zeros(length + 1, np.int32)
        starts[_cuts(rng, length, documents, most)] = 1
        row[:] = 1 + np.cumsum(starts)
    return MadeRows(tokens, segments, np.ones(tokens.shape, np.uint8))


def _cuts(rng: np.random.Generator, length: int, documents: str, most: int) -> np.ndarray:
    if ":" not in documents:
        count = min(int(documents), length)
        return rng.choice(np.arange(1, length), count - 1, replace=False)
    shortest, longest = (int(part) for part in documents.split(":"))
    ends = np.cumsum(rng.integers(shortest, longest + 1, most - 1))
    return ends[ends < length]


class Clock(NamedTuple):
    """Seconds a step: of the first, with compilation; then of groups of steps. And a last value."""

    first: float
    median: float
    spread: float
    processor: float  # of the host's cores
    value: float


def timed_steps(step: Callable[[], Any], wait: Callable[[Any], float], steps: int) -> Clock:
    """Runs `WARMUP` steps, then `steps` in groups; `wait` returns when a step's result is there."""
    warm = []
    for _ in range(WARMUP):
        start = time.perf_counter()
        wait(step())
        warm.append(time.perf_counter() - start)
    times, value, begun = [], float("nan"), time.process_time()
    sizes = [GROUP] * (steps // GROUP) + [steps % GROUP] * (steps % GROUP > 0)
    for size in sizes:
        start = time.perf_counter()
        for _ in range(size - 1):
            step()
        value = wait(step())
        times.append((time.perf_counter() - start) / size)
    processor = (time.process_time() - begun) / steps
    return Clock(warm[0], statistics.median(times), max(times) - min(times), processor, value)


def made_records(record: np.dtype, rows: int, vocab: int) -> np.ndarray:
    """Random records of a cached teacher, of the type `CacheSpec.record`."""
    rng = np.random.default_rng(0)
    made = np.zeros(rows, record)
    if "hidden" in (record.names or ()):
        numbers = rng.standard_normal(made["hidden"].shape, dtype=np.float32)
        bits = made["hidden"].dtype == np.uint16
        made["hidden"] = numbers.view(np.uint32) >> 16 if bits else numbers
        return made
    k = made["logits"].shape[-1]
    first = rng.integers(0, vocab, (*made["label"].shape, 1))
    ids = (first + np.arange(k) * (vocab // k)) % vocab  # distinct, and all over the vocabulary
    made["ids"] = ids[..., None] >> np.array([0, 8, 16]) & 255
    made["logits"] = -np.cumsum(rng.exponential(0.2, ids.shape), -1)
    made["logits"] -= made["logits"][..., :1]
    made["odds"], made["label"] = -3.0, -2.0
    return made
