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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kdjax.config import FP8_COMPUTES, TEACHER_BACKENDS, Config, identity
from kdjax.data import pipeline
from kdjax.data.rows import RowSet, RowSettings, prepare_rows
from kdjax.data.teacher_cache import About, TeacherCache, open_cache, read_index
from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.device.runtime import device_summary
from kdjax.errors import UserError
from kdjax.formats import TensorTable, content_hash
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.models.arch import ArchSpec
from kdjax.models.checkpoint import FORMS, Checkpoint
from kdjax.models.decoder import Compute, Params, functional, initialise
from kdjax.models.loading import load_params
from kdjax.models.model import Model, cached, check_fp8, load_model, narrow_head
from kdjax.models.tokenizer import Tokenizer
from kdjax.training import optim, step
from kdjax.training.pair import Sources, Vocabulary, open_sources
from kdjax.training.plan import Plan, choose, settled, step_flops
from kdjax.training.saving import Checkpoints, abstract_state, check_same_run

_log = logging.getLogger("kdjax")

BACKEND_VARIABLE = "KDJAX_TEACHER_BACKEND"


class Steps(NamedTuple):
    """What two checkpoints and a config make on a mesh: a teacher in memory, and both steps."""

    teacher: Model | None
    step_spec: step.StepSpec
    train_step: Callable[..., Any]
    eval_step: Callable[..., Any]
    shardings: step.TrainState
    abstract: step.TrainState


@dataclasses.dataclass
class Job:
    """Everything the loop needs; built by `assemble`."""

    config: Config
    workdir: Path
    mesh: Mesh
    sources: Sources
    rows: RowSet
    teacher: Model | None  # None: trains on the text alone
    step_spec: step.StepSpec
    train_step: Callable[..., Any]
    eval_step: Callable[..., Any]
    shardings: step.TrainState
    abstract: step.TrainState
    identity: Callable[[], dict[str, Any]]  # waits for the hashes when first called
    plan: Plan | None = None  # None where nothing was planned: a benchmark
    cache: TeacherCache | None = None  # of the teacher, which is then not loaded

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
        return self.fresh_state(), None

    def fresh_state(self) -> step.TrainState:
        """The state before the first step: the student's file, or random weights of its shapes."""
        source, spec = self.sources.student, self.sources.student_spec
        if self.config.student.init == "checkpoint":
            params = load_params(source, spec, self.abstract.params, self.mesh)
        else:
            make = functools.partial(initialise, spec, Compute(), self.config.train.seed)
            params = jax.jit(make, out_shardings=self.shardings.params)()
        begin = functools.partial(step.init_state, tx=self.step_spec.tx)
        return jax.jit(begin, out_shardings=self.shardings, donate_argnums=0)(params)

    def train_batches(self, state: dict[str, Any] | None) -> pipeline.BatchSource:
        """The source of training batches, at `state` if resumed."""
        source = pipeline.TextSource(
            self.rows.train,
            batch_size=self.config.train.batch_size,
            seed=self.config.train.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            more=self.cache and self.cache.train,
        )
        if state is not None:
            source.set_state(state)
        return source

    def eval_batches(self) -> Iterator[dict[str, Any]]:
        """Held-out batches on the devices, in a fixed order."""
        batches = pipeline.eval_batches(
            self.rows.heldout,
            batch_size=self.config.eval.batch_size,
            limit=self.config.eval.rows or None,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            more=self.cache and self.cache.heldout,
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
        kind = self.cache and self.cache.about.kind
        return step_flops(self.config, self.sources, kind)


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
    return prepare_rows(row_settings(config, tokenizer), folder)


def row_settings(config: Config, tokenizer: Tokenizer) -> RowSettings:
    """What decides the rows; raises `UserError` for an unknown `data.end_of_document`."""
    data = config.data
    end = tokenizer.end_of_text_id
    if data.end_of_document:
        if data.end_of_document not in tokenizer.tokens:
            raise UserError(
                f"data.end_of_document={data.end_of_document!r} is not a token of the tokenizer; "
                "leave it empty for the tokenizer's own end-of-text."
            )
        end = tokenizer.tokens.index(data.end_of_document)
    return RowSettings(
        train=data.train,
        heldout=data.heldout,
        tokenizer=tokenizer,
        seq_len=data.seq_len,
        heldout_fraction=data.heldout_fraction,
        end_of_document_id=end,
        max_segments=data.max_segments,
    )


def cache_about(
    config: Config, sources: Sources, rows: RowSet, teacher: str, *, kind: str, k: int = 0
) -> About:
    """What a cache of this run's teacher, of SHA-256 `teacher`, is made of."""
    assert sources.teacher_spec is not None  # as `validate` asks
    return About(
        kind=kind,
        k=k,
        temperature=config.loss.temperature if kind == "topk" else None,
        teacher=teacher,
        rows=rows.key,
        tokenizer=sources.tokenizer.content_hash,
        vocabulary=(sources.vocabulary.width, sources.vocabulary.real),
        positions=config.data.seq_len,
        width=sources.teacher_spec.hidden_size,
        dtype=config.train.compute_dtype,
        compute=config.teacher.compute,
        sides=(len(rows.train), len(rows.heldout)),
    )


def teacher_backend(config: Config) -> str:
    """The backend asked for: the cache's kind, what fp8 needs, KDJAX_TEACHER_BACKEND, the config.

    Raises `UserError` for an unknown name, and for one beside an fp8 teacher.
    """
    if config.teacher.cache:
        kind = read_index(Path(config.teacher.cache))[0].kind
        if kind == "topk" and config.loss.divergence != "forward_kl":
            raise UserError(
                f"teacher.cache={config.teacher.cache} holds the likeliest ids, over which only "
                f"loss.divergence=forward_kl is defined; found {config.loss.divergence!r}. Use "
                "that, or cache hidden states (--kind=hidden)."
            )
        return kind
    backend = os.environ.get(BACKEND_VARIABLE) or config.teacher.backend
    if backend not in TEACHER_BACKENDS:
        valid = ", ".join(TEACHER_BACKENDS)
        raise UserError(f"{BACKEND_VARIABLE}={backend!r}: must be one of {valid}")
    compute = config.teacher.compute
    if compute == "train":
        return backend
    if backend != "auto":
        raise UserError(
            f"found teacher.compute={compute!r} with the teacher backend {backend!r}; expected "
            "backend 'auto': fp8 products need weights of their own kind. Leave one of them out."
        )
    return compute


def survey(config: Config) -> tuple[Mesh, Sources, Plan]:
    """Opens, compares and plans; reads headers and allocates nothing.

    Raises `UserError` for a pair that cannot be distilled or a run that cannot fit.
    """
    backend = teacher_backend(config)
    if backend in FP8_COMPUTES:
        check_fp8(jax.local_devices()[0])
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
    config = settled(config, plan.remat, plan.chunk_tokens)
    _log.info("%s; planned peak %.2f GB a device", plan.choice, plan.peak / 1e9)
    rows = prepare(config, sources.tokenizer)
    _log.info("rows: %s", rows.info)

    pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)  # hashing overlaps loading
    hashes = {
        f"{side}.sha256": None if table is None else pool.submit(content_hash, table)
        for side, table in (("teacher", sources.teacher), ("student", sources.student))
    }

    def sha256() -> dict[str, Any]:
        return {name: hashed and hashed.result() for name, hashed in hashes.items()}

    cache = None
    if config.teacher.cache:
        teacher = sha256()["teacher.sha256"]
        expected = cache_about(config, sources, rows, teacher, kind=plan.backend)
        cache = open_cache(Path(config.teacher.cache), expected)
        _log.info("%s", cache)
    steps = build_steps(config, sources, mesh, plan.backend)

    def run_identity() -> dict[str, Any]:
        made_of = {"teacher.cache": cache.sha256} if cache else {}
        return identity(config) | sha256() | {"data.rows": rows.key} | made_of

    return Job(config, workdir, mesh, sources, rows, *steps, run_identity, plan, cache)


def load_teacher(config: Config, sources: Sources, backend: str, mesh: Mesh) -> Model | None:
    """The teacher, or what training needs of a cached one, over the shared vocabulary, if any."""
    if sources.teacher is None or sources.teacher_spec is None:
        return None
    placement = Placement.on(mesh)
    checkpoint = Checkpoint(sources.teacher, sources.teacher_spec)
    dtype = config.teacher.param_dtype
    if backend in FORMS:
        provider = load_model(
            checkpoint,
            weights=FORMS[backend],
            dtype=dtype,
            compute_dtype=config.train.compute_dtype,
            max_segments=config.data.max_segments,
            placement=placement,
        )
    else:
        provider = cached(checkpoint, dtype, placement, kind=backend)
    provider = narrow_head(provider, sources.vocabulary.width)
    _log.info("teacher: %s", provider)
    return provider


def build_steps(config: Config, sources: Sources, mesh: Mesh, backend: str) -> Steps:
    """Loads the teacher in the form of `backend`, and prepares both steps; compiles nothing."""
    vocabulary = sources.vocabulary
    dtype = jnp.dtype(config.train.compute_dtype)
    placement = Placement.on(mesh)
    shared: dict[str, Any] = dict(
        dtype=dtype, max_segments=config.data.max_segments, placement=placement
    )
    provider = load_teacher(config, sources, backend, mesh)
    apply, shapes = functional(sources.student_spec, trained(config.student.remat, **shared))
    step_spec = _step_spec(config, apply, provider, vocabulary, placement)
    abstract = jax.eval_shape(functools.partial(step.init_state, tx=step_spec.tx), shapes)
    shardings = step.state_shardings(abstract, step_spec.tx, mesh)
    return Steps(provider, step_spec, *step.compile_steps(step_spec, shardings, mesh), shardings,
                 abstract)  # fmt: skip


def trained(remat: str, **shared: Any) -> Compute:
    """How a student that trains computes.

    Layers are looped over only under remat "full": a loop copies what it keeps of each layer, 28 of
    the 114 ms of forward and backward of a 0.5B at 16,384 positions on an H200.
    """
    return Compute(remat=remat, scan=remat == "full", **shared)


def _step_spec(config: Config, apply: Any, provider: Model | None,
               vocabulary: Vocabulary, placement: Placement) -> step.StepSpec:  # fmt: skip
    settings = dataclasses.asdict(config.optim)
    optim_spec = optim.OptimSpec(total_steps=config.train.steps, **settings)
    head = HeadSpec(
        loss=KDLoss(config.loss.divergence, config.loss.temperature, config.loss.alpha),
        width=vocabulary.width,
        real_vocab=vocabulary.real,
        chunk_tokens=config.loss.chunk_tokens,
        kernels=placement.kernels,
    )
    return step.StepSpec(
        student=apply,
        teacher=provider.functions if provider else None,
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
