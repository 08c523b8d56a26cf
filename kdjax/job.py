"""Assembles a run from its config: files, vocabulary, rows, models, compiled steps.

Cheap checks come first, so that a wrong path or vocabulary fails in a second, before gigabytes
are read.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kdjax import optim, sharding, step
from kdjax.checkpoint import Checkpoints, abstract_state, check_same_run
from kdjax.config import TEACHER_BACKENDS, Config, identity
from kdjax.data import pipeline
from kdjax.data.rows import RowSet, prepare_rows
from kdjax.errors import UserError
from kdjax.formats import TensorTable, content_hash
from kdjax.head import HeadSpec
from kdjax.loading import load_params
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, Params, functional, initialise
from kdjax.plan import Plan, choose, step_flops
from kdjax.runtime import device_summary
from kdjax.sources import Sources, open_sources
from kdjax.teacher import PROVIDERS, TeacherLogitsProvider, Vocabulary, truncated
from kdjax.tokenizer import Tokenizer

_log = logging.getLogger("kdjax")

BACKEND_VARIABLE = "KDJAX_TEACHER_BACKEND"


@dataclasses.dataclass
class Job:
    """Everything the loop needs; built by `assemble`."""

    config: Config
    workdir: Path
    mesh: Mesh
    sources: Sources
    rows: RowSet
    teacher: TeacherLogitsProvider | None  # None: trains on the text alone
    step_spec: step.StepSpec
    train_step: Callable[..., Any]
    eval_step: Callable[..., Any]
    shardings: step.TrainState
    abstract: step.TrainState
    identity: Callable[[], dict[str, Any]]  # waits for the hashes when first called

    def state(self, checkpoints: Checkpoints) -> tuple[step.TrainState, dict[str, Any] | None]:
        """The state to start from, in this order: own checkpoint, student's file, random weights.

        Returns the checkpoint's run record as well, or None for a new run. Raises `UserError` if
        the checkpoint is of a run that this config would not continue.
        """
        latest = checkpoints.latest()
        if latest is not None:
            run = checkpoints.read_run(latest)
            check_same_run(run["identity"], self.identity(), self.workdir)
            return checkpoints.restore(latest, abstract_state(self.abstract, self.shardings)), run
        return self._fresh_state(), None

    def _fresh_state(self) -> step.TrainState:
        source, spec = self.sources.student, self.sources.student_spec
        if self.config.student.init == "checkpoint":
            params = load_params(source, spec, self.abstract.params, self.mesh)
        else:
            make = functools.partial(initialise, spec, Compute(), self.config.train.seed)
            params = jax.jit(make, out_shardings=self.shardings.params)()
        begin = functools.partial(step.init_state, tx=self.step_spec.tx)
        return jax.jit(begin, out_shardings=self.shardings, donate_argnums=0)(params)

    def train_batches(self, state: dict[str, Any] | None) -> Any:
        """The iterator over training batches, at `state` if resumed."""
        iterator = pipeline.make_iterator(
            self.rows.train,
            batch_size=self.config.train.batch_size,
            seed=self.config.train.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        if state is not None:
            iterator.set_state(state)
        return iterator

    def eval_batches(self) -> Iterator[dict[str, Any]]:
        """Held-out batches on the devices, in a fixed order."""
        batches = pipeline.eval_batches(
            self.rows.heldout,
            batch_size=self.config.eval.batch_size,
            limit=self.config.eval.rows or None,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        return (self.put(batch) for batch in batches)

    @property
    def teacher_params(self) -> Params:
        """What the steps take as the teacher's arrays."""
        return self.teacher.params if self.teacher else {}

    @functools.cached_property
    def heldout_bytes(self) -> int:
        """UTF-8 bytes of the targets that held-out figures are of; 0 if the tokens do not tell."""
        sizes, config = self.sources.tokenizer.token_bytes, self.config.eval
        batches = pipeline.eval_batches(
            self.rows.heldout, batch_size=config.batch_size, limit=config.rows or None
        )
        if sizes is None:
            return 0
        return sum(int(sizes[b["labels"][b["weights"] != 0]].sum()) for b in batches)

    def put(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A host batch onto the mesh, without the row ids."""
        columns = {k: v for k, v in batch.items() if k != "row_ids"}
        return sharding.put_batch(columns, self.mesh)

    def flops_per_token(self) -> float:
        """Teacher forward, student forward and backward (twice the forward), causal attention."""
        return step_flops(self.config, self.sources)


def _check_batches(config: Config, mesh: Mesh) -> None:
    shards = sharding.row_shards(mesh)
    for name, rows in (
        (
            "train.batch_size / train.microbatches",
            config.train.batch_size // config.train.microbatches,
        ),
        ("eval.batch_size", config.eval.batch_size),
    ):
        if rows % shards:
            raise UserError(
                f"{name} = {rows} rows cannot be split over mesh.data x mesh.fsdp = {shards} "
                f"devices. Use a multiple of {shards}."
            )


def prepare(config: Config, tokenizer: Tokenizer) -> RowSet:
    """Packed rows of the configured text, from the cache if they are there."""
    folder = Path(config.data.cache_dir).expanduser()
    return prepare_rows(**row_settings(config, tokenizer), cache_dir=folder)


def row_settings(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the rows: the arguments of `rows_key` and, but for the cache, `prepare_rows`."""
    data = config.data
    end = tokenizer.end_of_text_id
    if data.end_of_document:
        if data.end_of_document not in tokenizer.tokens:
            raise UserError(
                f"data.end_of_document={data.end_of_document!r} is not a token of the tokenizer; "
                "leave it empty for the tokenizer's own end-of-text."
            )
        end = tokenizer.tokens.index(data.end_of_document)
    return dict(
        train=data.train,
        heldout=data.heldout,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        heldout_fraction=data.heldout_fraction,
        end_of_document_id=end,
        max_segments=data.max_segments,
    )


def teacher_backend(config: Config) -> str:
    """The backend asked for: `KDJAX_TEACHER_BACKEND`, else the config."""
    backend = os.environ.get(BACKEND_VARIABLE) or config.teacher.backend
    if backend not in TEACHER_BACKENDS:
        valid = ", ".join(TEACHER_BACKENDS)
        raise UserError(f"{BACKEND_VARIABLE}={backend!r}: must be one of {valid}")
    return backend


def survey(config: Config) -> tuple[Mesh, Sources, Plan]:
    """Opens, compares and plans; reads headers and allocates nothing.

    Raises `UserError` for a pair that cannot be distilled or a run that cannot fit.
    """
    backend = teacher_backend(config)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    _check_batches(config, mesh)
    sources = open_sources(config)
    vocabulary = sources.vocabulary
    _log.info("student: %s", _describe(sources.student, sources.student_spec))
    if sources.teacher is None or sources.teacher_spec is None:
        _log.info("no teacher: held-out figures are the student's alone")
    else:
        _log.info("teacher: %s", _describe(sources.teacher, sources.teacher_spec))
    _log.info("vocabulary: %d ids, head width %d", vocabulary.real, vocabulary.width)
    return mesh, sources, choose(config, sources, mesh, device_summary(), backend)


def assemble(config: Config, workdir: Path) -> Job:
    """Builds the job. Raises `UserError` for anything a user can mend."""
    mesh, sources, plan = survey(config)
    vocabulary = sources.vocabulary
    _log.info("%s; planned peak %.2f GB a device", plan.choice, plan.peak / 1e9)
    rows = prepare(config, sources.tokenizer)
    _log.info("rows: %s", rows.info)

    pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)  # hashing overlaps loading
    hashes = {
        f"{side}.sha256": None if table is None else pool.submit(content_hash, table)
        for side, table in (("teacher", sources.teacher), ("student", sources.student))
    }
    dtype = jnp.dtype(config.train.compute_dtype)
    shared: dict[str, Any] = dict(dtype=dtype, max_segments=config.data.max_segments)
    provider = _load_teacher(config, sources, plan.backend, mesh)
    apply, shapes = functional(sources.student_spec, Compute(remat=config.student.remat, **shared))
    step_spec = _step_spec(config, apply, provider, vocabulary)
    abstract = jax.eval_shape(functools.partial(step.init_state, tx=step_spec.tx), shapes)
    shardings = step.state_shardings(abstract, step_spec.tx, mesh)
    train_step, eval_step = step.compile_steps(step_spec, shardings, mesh)

    def run_identity() -> dict[str, Any]:
        sha = {name: hashed and hashed.result() for name, hashed in hashes.items()}
        return identity(config) | sha | {"data.rows": rows.key}

    return Job(config, workdir, mesh, sources, rows, provider, step_spec, train_step, eval_step,
               shardings, abstract, run_identity)  # fmt: skip


def _load_teacher(
    config: Config, sources: Sources, backend: str, mesh: Mesh
) -> TeacherLogitsProvider | None:
    """The teacher over the shared vocabulary, on the mesh; None if there is none."""
    if sources.teacher is None or sources.teacher_spec is None:
        return None
    frozen = Compute(
        dtype=jnp.dtype(config.train.compute_dtype),
        param_dtype=jnp.dtype(config.teacher.param_dtype),
        max_segments=config.data.max_segments,
    )
    provider = PROVIDERS[backend](sources.teacher, sources.teacher_spec, frozen, mesh)
    provider = truncated(provider, sources.vocabulary.width)
    _log.info("%s", provider.info)
    return provider


def _step_spec(config: Config, apply: Any, provider: TeacherLogitsProvider | None,
               vocabulary: Vocabulary) -> step.StepSpec:  # fmt: skip
    settings = dataclasses.asdict(config.optim)
    optim_spec = optim.OptimSpec(total_steps=config.train.steps, **settings)
    head = HeadSpec(
        temperature=config.loss.temperature,
        alpha=config.loss.alpha,
        width=vocabulary.width,
        real_vocab=vocabulary.real,
        chunk_tokens=config.loss.chunk_tokens,
        divergence=config.loss.divergence,
    )
    return step.StepSpec(
        student=apply,
        teacher=provider.apply if provider else None,
        head=head,
        tx=optim.optimizer(optim_spec),
        schedule=optim.schedule(optim_spec),
        microbatches=config.train.microbatches,
    )


def _describe(table: TensorTable, spec: ArchSpec) -> str:
    head = "tied" if spec.tied else "untied"
    return (
        f"{table.paths[0].name}: {spec.family}, {spec.num_layers} layers, width "
        f"{spec.hidden_size}, {spec.vocab_size:,} rows, {head}, "
        f"{spec.parameters() / 1e9:.3f} B parameters"
    )
