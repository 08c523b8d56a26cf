"""Runs a run's teacher once over all its rows and keeps on the disk what training needs of it.

    kdjax cache --config=qwen1p5b_0p5b --out=cache --k=64
    kdjax train --config=qwen1p5b_0p5b --config.teacher.cache=cache --workdir=runs/a

The config is the run's own, other flags included. `topk` keeps the k likeliest ids of each
position, for the configured temperature alone; `hidden` the last hidden states, for any. The same
command continues one that was stopped.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.commands.parsing import log_to_terminal, parse_run, require_files, run_parser
from kdjax.config import Config
from kdjax.data import teacher_cache
from kdjax.data.pipeline import example
from kdjax.data.rows import RowSet
from kdjax.data.teacher_cache import About
from kdjax.device import runtime, sharding
from kdjax.errors import FINISHED, UserError, reporting
from kdjax.formats import content_hash
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.losses.topk import top_of_teacher
from kdjax.models.model import TeacherLogitsProvider
from kdjax.training import job

_log = logging.getLogger("kdjax")


def cache_teacher(config: Config, out: Path, kind: str, k: int) -> None:
    """Writes the cache of `config`'s teacher into `out`. Raises `UserError` for bad input."""
    if config.teacher.cache:
        raise UserError(
            f"found --config.teacher.cache={config.teacher.cache}; expected a teacher to run. "
            "Leave it out: --out names the folder to write."
        )
    if not config.teacher.path:
        raise UserError(
            "found --config.teacher.path=''; expected a teacher to run. Name its file or folder."
        )
    if jax.process_count() > 1:
        raise UserError(f"found {jax.process_count()} processes; expected one to write a cache.")
    mesh, sources, plan = job.survey(config)
    real = sources.vocabulary.real
    if kind == "topk" and not 0 < k <= real:
        raise UserError(f"found --k={k}; expected 1 to {real:,}, the ids of the vocabulary.")
    rows = job.prepare(config, sources.tokenizer)
    _log.info("rows: %s", rows.info)
    assert sources.teacher is not None  # its path is there
    sha = content_hash(sources.teacher)
    k = k if kind == "topk" else 0
    about = job.cache_about(config, sources, rows, sha, kind=kind, k=k)
    loss = KDLoss(temperature=config.loss.temperature)
    head = HeadSpec(loss, *about.vocabulary, plan.chunk_tokens)
    size = config.eval.batch_size

    @functools.cache  # the teacher is not loaded if nothing is left to write
    def compile_once() -> Callable[[dict[str, Any]], np.ndarray]:
        provider = job.load_teacher(config, sources, plan.backend, mesh)
        assert provider is not None
        return _compile_records(provider, about, head, mesh)

    def produce(numbers: range) -> Iterator[np.ndarray]:
        for start in range(numbers.start, numbers.stop, size):
            chunk = range(start, min(start + size, numbers.stop))
            batch = _make_batch(rows, chunk, size)
            records = compile_once()(batch)
            if start == 0 and kind == "topk":
                _warn_of_tail(records["odds"][..., 0][batch["weights"] != 0], about)
            yield records[: len(chunk)]

    start = time.perf_counter()
    teacher_cache.write(out, about, produce)
    _log.info("done in %.1f s: --config.teacher.cache=%s", time.perf_counter() - start, out)


def _warn_of_tail(log_odds: np.ndarray, about: About) -> None:
    """Says if most of the teacher's probability is with ids that are not kept, as at T = 4."""
    tail = float(np.mean(np.exp(-np.logaddexp(0.0, -log_odds))))
    if tail > 0.5:
        _log.warning(
            "at loss.temperature=%g the %d ids hold %.1f%% of the teacher's probability: training "
            "from them learns little of the rest. Take --config.loss.temperature=1 or "
            "--kind=hidden.",
            about.temperature,
            about.k,
            100 * (1 - tail),
        )


def _make_batch(rows: RowSet, numbers: range, size: int) -> dict[str, Any]:
    """The rows of these numbers, held-out rows after those of training; repeats the last one."""
    first = len(rows.train)
    examples = [
        example(rows.train, i) if i < first else example(rows.heldout, i - first) for i in numbers
    ]
    examples += examples[-1:] * (size - len(examples))
    return {name: np.stack([e[name] for e in examples]) for name in examples[0]}


def _compile_records(
    provider: TeacherLogitsProvider, about: About, head: HeadSpec, mesh: Any
) -> Callable[[dict[str, Any]], np.ndarray]:
    """The function from a batch to what the cache keeps of each of its rows."""
    options = sharding.compiler_options(mesh)
    place = sharding.batch_sharding(mesh)

    @functools.partial(jax.jit, out_shardings=place, compiler_options=options)
    def outputs(params: Any, batch: Any) -> dict[str, Any]:
        hidden = provider.apply.hidden(
            params, batch["tokens"], batch["segment_ids"], batch["positions"]
        )
        if about.kind == "hidden":
            # Positions without weight may hold anything, NaN too, and are never read.
            return {"hidden": jnp.where((batch["weights"] != 0)[..., None], hidden, 0)}
        weight = provider.apply.head(params)
        return top_of_teacher(
            hidden, weight, batch["labels"], batch["weights"], head, about.k
        )._asdict()

    def run(batch: dict[str, Any]) -> np.ndarray:
        columns = {name: value for name, value in batch.items() if name != "row_ids"}
        kept = jax.device_get(outputs(provider.params, sharding.put_batch(columns, mesh)))
        records = np.empty(len(batch["tokens"]), about.record)
        for name, value in kept.items():
            records[name] = value.view("<u2") if value.dtype == jnp.bfloat16 else value
        return records

    return run


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = run_parser("cache", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    kinds = "likeliest ids of each position, or its last hidden state"
    parser.add_argument("--kind", choices=teacher_cache.KINDS, default="topk", help=kinds)
    parser.add_argument("--k", type=int, default=64, help="ids a position, of --kind=topk")
    run = parse_run(parser, argv)
    log_to_terminal()
    require_files(run)
    os.environ.setdefault(runtime.PREALLOCATE, "false")
    for line in runtime.configure().describe():
        _log.info("%s", line)
    cache_teacher(run.config, run.options.out, run.options.kind, run.options.k)
    return FINISHED
