"""Runs a teacher once over all rows of a run and writes what training needs of it to the disk."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.config import Config
from kdjax.data import teacher_cache
from kdjax.data.pipeline import example
from kdjax.data.rows import RowSet
from kdjax.data.teacher_cache import CacheSpec
from kdjax.device import cluster, sharding
from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.models.model import Model
from kdjax.training.job import describe_cache, hash_models, load_teacher, prepare_all, survey
from kdjax.training.teachers import CachedHidden, CachedTopK, RunningTeacher

_log = logging.getLogger("kdjax")


def cache_teacher(config: Config, out: Path, kind: CachedHidden | CachedTopK) -> None:
    """Writes the cache of `config`'s teacher into `out`; continues one that was stopped.

    Several processes share the rows of each batch; the first writes. Raises `UserError` for bad
    input.
    """
    if config.teacher.cache:
        raise UserError(
            f"found --config.teacher.cache={config.teacher.cache}; expected a teacher to run. "
            "Leave it out: --out names the folder to write."
        )
    if not config.teacher.path:
        raise UserError(
            "found --config.teacher.path=''; expected a teacher to run. Name its file or folder."
        )
    placement, pair, plan = survey(config)
    real = pair.vocabulary.real
    if isinstance(kind, CachedTopK) and not 0 < kind.k <= real:
        raise UserError(f"found --k={kind.k}; expected 1 to {real:,}, the ids of the vocabulary.")
    rows = prepare_all(config, pair, placement)
    teacher_hash = str(hash_models(pair)["teacher.sha256"])
    spec = describe_cache(config, pair, rows, kind, teacher_hash)
    cluster.check_agreement("cache-spec", dataclasses.asdict(spec))
    loss = KDLoss(temperature=config.loss.temperature)
    head = HeadSpec(loss, *spec.vocabulary, plan.chunk_tokens, placement.kernels)
    size = config.eval.batch_size

    @functools.cache  # nothing is loaded if nothing is left to write
    def compute() -> Callable[[dict[str, Any]], dict[str, jax.Array]]:
        teacher = load_teacher(config, pair, plan.kind, placement)
        assert teacher is not None
        return _compile(teacher, kind, head)

    def produce(numbers: range) -> Iterator[np.ndarray]:
        for start in range(numbers.start, numbers.stop, size):
            mine = range(start, min(start + size, numbers.stop))
            batch = _read_batch(rows, mine, size)
            outputs = compute()(batch)
            if jax.process_index() != 0:
                continue
            records = _make_records(outputs, spec)
            if start == 0 and spec.k:
                _warn_of_tail(records["odds"][..., 0][batch["weights"] != 0], spec)
            yield records[: len(mine)]

    start = time.perf_counter()
    teacher_cache.write(out, spec, produce)
    _log.info("done in %.1f s: --config.teacher.cache=%s", time.perf_counter() - start, out)


def _warn_of_tail(log_odds: np.ndarray, spec: CacheSpec) -> None:
    """Says if most of the teacher's probability is with ids that are not kept, as at T = 4."""
    tail = float(np.mean(np.exp(-np.logaddexp(0.0, -log_odds))))
    if tail > 0.5:
        _log.warning(
            "at loss.temperature=%g the %d ids hold %.1f%% of the teacher's probability: training "
            "from them learns little of the rest. Take --config.loss.temperature=1 or "
            "--kind=hidden.",
            spec.temperature,
            spec.k,
            100 * (1 - tail),
        )


def _read_batch(rows: RowSet, numbers: range, size: int) -> dict[str, Any]:
    """Those rows, held-out ones after those of training; the last is repeated up to `size`."""
    first = len(rows.train)
    examples = [
        example(rows.train, i) if i < first else example(rows.heldout, i - first) for i in numbers
    ]
    examples += examples[-1:] * (size - len(examples))
    return {name: np.stack([e[name] for e in examples]) for name in examples[0]}


def _compile(
    teacher: Model, kind: CachedHidden | CachedTopK, head: HeadSpec
) -> Callable[[dict[str, Any]], dict[str, jax.Array]]:
    """The function from a batch to what is kept of it, which the first process has whole."""
    assert teacher.placement is not None and teacher.spread is not None  # as `load_teacher` loads
    mesh, spread = teacher.placement.mesh, teacher.spread
    several = jax.process_count() > 1

    @functools.partial(
        jax.jit,
        out_shardings=sharding.replicated(mesh) if several else sharding.batch_sharding(mesh),
        compiler_options=sharding.compiler_options(mesh),
    )
    def outputs(params: Any, batch: Any) -> dict[str, Any]:
        def records(params: Any, batch: Any) -> dict[str, Any]:
            return kind.make_records(RunningTeacher(teacher.functions, params), batch, head)

        return spread.map_rows(records)(params, batch)

    def compute(batch: dict[str, Any]) -> dict[str, jax.Array]:
        columns = {name: value for name, value in batch.items() if name != "row_ids"}
        return outputs(teacher.params, sharding.put_whole_batch(columns, mesh))

    return compute


def _make_records(outputs: dict[str, jax.Array], spec: CacheSpec) -> np.ndarray:
    values = jax.device_get(outputs)
    records = np.empty(len(next(iter(values.values()))), spec.record)
    for name, value in values.items():
        records[name] = value.view("<u2") if value.dtype == jnp.bfloat16 else value
    return records
