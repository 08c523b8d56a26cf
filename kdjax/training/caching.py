"""Runs a teacher once over the rows that a run reads; writes its outputs for training."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.config import Config, TeacherConfig, settle_dtype
from kdjax.data import teacher_cache
from kdjax.data.answers import Said
from kdjax.data.pipeline import example, stack_examples
from kdjax.data.rows import Piece, RowSet, locate_answers
from kdjax.data.teacher_cache import CacheSpec
from kdjax.device import cluster, sharding
from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.losses.topk import TopTeacher
from kdjax.models.alignment import PREFIX
from kdjax.models.model import Model
from kdjax.training.identity import describe_cache
from kdjax.training.inputs import (
    hash_models,
    list_read_rows,
    prepare,
    prepare_all,
    read_shared,
    row_settings,
)
from kdjax.training.job import load_teacher, survey
from kdjax.training.pair import open_pair
from kdjax.training.teachers import (
    CachedHidden,
    CachedTopK,
    RunningTeacher,
    TeacherInBatch,
    TeacherKind,
)

_log = logging.getLogger("kdjax")
_ODD = "odd"  # next to a batch's records: counts of `_count_odd`


def cache_teacher(
    config: Config, out: Path, kind: CachedHidden | CachedTopK, *, all_rows: bool = False
) -> None:
    """Writes the teacher's outputs that a run of `config` reads into `out`, or adds missing ones.

    With `all_rows` every row of the text is cached. Several processes share the rows of each batch;
    the first writes. Raises `UserError` for bad input.
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
    config = settle_dtype(config, jax.default_backend())
    placement, pair, plan = survey(config)
    real = pair.vocabulary.real
    reader = pair.vocabulary.adapt(kind, ())
    if isinstance(kind, CachedTopK):
        _check_k(kind.k, real)
    rows = prepare_all(config, pair)
    read_shared(config, pair, rows)
    teacher_hash = str(hash_models(pair)["teacher.sha256"])
    spec = describe_cache(config, pair, rows, kind, teacher_hash)
    cluster.check_agreement("cache-spec", dataclasses.asdict(spec))
    loss = KDLoss(temperature=config.loss.temperature)
    head = HeadSpec(loss, *spec.vocabulary, plan.chunk_tokens, placement.kernels)
    size = config.eval.batch_size

    @functools.cache  # loads nothing if nothing is left to write
    def compute() -> Callable[[dict[str, Any]], dict[str, jax.Array]]:
        teacher = load_teacher(config, pair, plan.kind, placement)
        assert teacher is not None
        return _compile(teacher, reader, head)

    warned: list[bool] = []  # of the first batch

    def produce(numbers: Sequence[int]) -> Iterator[np.ndarray]:
        for start in range(0, len(numbers), size):
            mine = numbers[start : start + size]
            batch = pair.vocabulary.complete(_read_batch(rows, mine, size))
            outputs = compute()(batch)
            if np.any(np.asarray(jax.device_get(outputs.pop(_ODD)))):
                raise UserError(
                    f"{pair.teacher}: found outputs of the teacher that are not numbers; expected "
                    "numbers. Its weights are damaged: `kdjax evaluate` says where."
                )
            if jax.process_index() != 0:
                continue
            records = _make_records(outputs, spec)
            if spec.k and not warned:
                warned.append(True)
                _warn_of_tail(records["odds"][..., 0][batch["weights"] != 0], spec)
            yield records[: len(mine)]

    start = time.perf_counter()
    read = None if all_rows else list_read_rows(config, rows)
    teacher_cache.write(out, spec, produce, read)
    _log.info("done in %.1f s: --config.teacher.cache=%s", time.perf_counter() - start, out)


def cache_answers(config: Config, out: Path, k: int | None, *, rest: str = "tail") -> None:
    """Writes a server's log-probabilities of its answers, the run's text, as a top-k cache.

    `config.data.train`, and `data.heldout` if set, name .jsonl files of `data.answers`. `k` ids a
    position are stored (None: all that each position has); `rest` is as for `TeacherInBatch`. The
    run has no teacher.path. Raises `UserError` for other text, for positions of fewer than k ids,
    and for a temperature that does not suit `rest`.
    """
    TeacherInBatch(rest).check_loss(KDLoss(temperature=config.loss.temperature))
    config = dataclasses.replace(config, teacher=TeacherConfig())
    config = settle_dtype(config, jax.default_backend())
    pair = open_pair(config)
    if k is not None:
        _check_k(k, pair.vocabulary.real)
    rows = prepare(config.data, pair.tokenizer)
    settings, train = row_settings(config.data, pair.tokenizer), len(rows.train)
    placed: dict[int, list[tuple[Piece, Said]]] = {}
    least, place = pair.vocabulary.real, ""
    for side, document, piece in locate_answers(settings):
        said = document.said
        assert said is not None, document.source
        placed.setdefault(piece.row + side * train, []).append((piece, said))
        fewest = min(len(ids) for ids, _ in said.top)
        if fewest < least:
            least, place = fewest, document.source
    if k is not None and k > least:
        raise UserError(
            f"{place}: found a token with {least} alternatives and --k={k}; expected that many of "
            f"every token. Leave --k out, which then is {least}, or request more from the server."
        )
    spec = describe_cache(config, pair, rows, CachedTopK(k or least), "")
    if rest != "tail":
        spec = dataclasses.replace(spec, settings={**spec.settings, "rest": rest})
    teacher_cache.write(out, spec, functools.partial(_read_said, placed, spec, rest))
    _log.info(
        "train from it: --config.teacher.path= --config.teacher.cache=%s --config.data.train=%s",
        out,
        config.data.train,
    )


def _check_k(k: int, real: int) -> None:
    if not 0 < k <= real:
        raise UserError(f"found --k={k}; expected 1 to {real:,}, the ids of the vocabulary.")


def _read_said(
    placed: Mapping[int, Sequence[tuple[Piece, Said]]],
    spec: CacheSpec,
    rest: str,
    numbers: Sequence[int],
) -> Iterator[np.ndarray]:
    """Yields records of these rows, from the answers whose pieces lie in them."""
    for number in numbers:
        # One entry for each id; the first is no target. Positions without an answer get distinct
        # ids.
        shape = spec.positions + 1, spec.k
        ids = np.broadcast_to(np.arange(spec.k, dtype=np.int32), shape).copy()
        log_probs, own = np.zeros(shape, np.float32), np.full(shape[0], np.nan, np.float32)
        labels = np.zeros(shape[0], np.int32)
        for piece, said in placed.get(number, ()):
            first = max(piece.start + 1, said.start)
            for n in range(first, piece.start + piece.count):
                at = piece.at + n - piece.start
                likeliest, numbers_of = said.top[n - said.start]
                ids[at], log_probs[at] = likeliest[: spec.k], numbers_of[: spec.k]
                labels[at], own[at] = said.ids[n], said.log_probs[n - said.start]
        columns = (jnp.asarray(x[None, 1:]) for x in (ids, log_probs, labels))
        top = jax.device_get(TopTeacher.from_log_probs(*columns, tail=rest == "tail"))
        lowest = np.finfo(np.float16).min
        label = np.where(np.isnan(own[1:]), top.label[0], own[1:])
        top = top._replace(logits=np.maximum(top.logits, lowest), label=label[None])
        yield _make_records(top._asdict(), spec)


def _warn_of_tail(log_odds: np.ndarray, spec: CacheSpec) -> None:
    """Warns if most of the teacher's probability is on ids that are not stored, as at T = 4."""
    tail = float(np.mean(np.exp(-np.logaddexp(0.0, -log_odds))))
    if tail > 0.5:
        _log.warning(
            "at loss.temperature=%g the %d ids hold %.1f%% of the teacher's probability: training "
            "from them learns little of the rest. Take %s or --kind=hidden.",
            spec.temperature,
            spec.k,
            100 * (1 - tail),
            "a larger --k" if spec.temperature == 1 else "--config.loss.temperature=1",
        )


def _read_batch(rows: RowSet, numbers: Sequence[int], size: int) -> dict[str, Any]:
    """Reads rows, held-out ones last; repeats the last row up to `size`."""
    first = len(rows.train)
    examples = [
        example(rows.train, i) if i < first else example(rows.heldout, i - first) for i in numbers
    ]
    examples += examples[-1:] * (size - len(examples))
    return stack_examples(examples)


def _compile(
    teacher: Model, kind: TeacherKind, head: HeadSpec
) -> Callable[[dict[str, Any]], dict[str, jax.Array]]:
    """Compiles the function from a batch to its records, which the first process gets in full."""
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
            made = kind.make_records(RunningTeacher(teacher.functions, params), batch, head)
            segments = batch.get(f"{PREFIX}segment_ids", batch["segment_ids"])
            return made | {_ODD: _count_odd(made, segments)}

        return spread.map_rows(records)(params, batch)

    def compute(batch: dict[str, Any]) -> dict[str, jax.Array]:
        columns = {name: value for name, value in batch.items() if name != "row_ids"}
        return outputs(teacher.params, sharding.put_whole_batch(columns, mesh))

    return compute


def _count_odd(made: Mapping[str, jax.Array], segments: jax.Array) -> jax.Array:
    """Counts a row's positions of text, int32 `[B]`, at which an output is no number."""
    values = [x for x in made.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    odd = [jnp.isnan(x).reshape(*segments.shape, -1).any(axis=-1) for x in values]
    within = functools.reduce(jnp.logical_or, odd) & (segments != 0)
    return jnp.sum(within, axis=1, dtype=jnp.int32)


def _make_records(outputs: Mapping[str, Any], spec: CacheSpec) -> np.ndarray:
    values = jax.device_get(outputs)
    records = np.empty(len(next(iter(values.values()))), spec.record)
    for name, value in values.items():
        records[name] = value.view("<u2") if value.dtype == jnp.bfloat16 else value
    return records
