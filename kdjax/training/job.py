"""Assembles a run from its config: checkpoints, vocabulary, rows, models, the step.

Cheap checks come first, so that a wrong path or vocabulary fails in a second, before gigabytes
are read.
"""

import concurrent.futures
import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from kdjax.config import Config, count_own_rows, flatten, identity
from kdjax.data import pipeline
from kdjax.data.pipeline import BatchSource, TextSource
from kdjax.data.rows import (
    RowSet,
    RowSettings,
    prepare_rows,
    rows_key,
    warn_of_marks,
)
from kdjax.data.teacher_cache import CacheSpec, TeacherCache, hash_index, open_cache, read_index
from kdjax.device import cluster, sharding
from kdjax.device.placement import Placement
from kdjax.device.runtime import device_summary
from kdjax.errors import MissingFileError, UserError
from kdjax.formats.saved import read_receipt, saved_run
from kdjax.losses.kd import KDLoss
from kdjax.models.decoder import Compute, DecoderFunctions, Params, functional, initialise
from kdjax.models.loading import load_params
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from kdjax.training import optim
from kdjax.training.pair import Pair, open_pair
from kdjax.training.plan import Plan, choose_plan, count_step_flops, replace_settings
from kdjax.training.rollouts import (
    AnswerSource,
    answer_source,
    answers_key,
    check_templates,
    fix_answers,
    open_prompts,
)
from kdjax.training.saving import Checkpoints, check_same_run
from kdjax.training.step import Step, TrainState, make_step
from kdjax.training.teachers import (
    CachedHidden,
    CachedTopK,
    Dense,
    Float8,
    NoTeacher,
    Packed,
    TeacherKind,
)

_log = logging.getLogger("kdjax")

_PATHS = (  # fields of the config whose contents are compared instead of what they say
    "teacher.path",
    "teacher.cache",
    "student.path",
    "data.train",
    "data.heldout",
    "data.tokenizer",
    "rollout.prompts",
)


@dataclasses.dataclass
class Job:
    """Everything the loop needs; built by `assemble`."""

    config: Config
    workdir: Path
    pair: Pair
    rows: RowSet
    teacher: Model | None  # None: trains on the text alone
    step: Step
    kind: TeacherKind
    schedule: optax.Schedule  # learning rate by optimizer step
    source: BatchSource  # of training batches
    identity: dict[str, Any]  # what must not change when the run resumes
    plan: Plan | None = None  # None where nothing was planned: a benchmark
    cache: TeacherCache | None = None  # of the teacher, which is then not loaded

    def restore(self, checkpoints: Checkpoints) -> TrainState:
        """The state to start from: own checkpoint, else the student's file or random weights.

        A checkpoint also moves `source` to where the run was. Raises `UserError` if it is of a run
        that this config would not continue.
        """
        latest = checkpoints.latest()
        if latest is None:
            return self.make_state()
        self.source.set_state(self.read_record(latest)["data"])
        return checkpoints.restore(latest, self.step.abstract, self.step.shardings)

    def read_record(self, step: int) -> dict[str, Any]:
        """What was saved beside the state; raises `UserError` if it is of another run."""
        record = saved_run(self.workdir, step)
        check_same_run(record["identity"], self.identity, self.workdir)
        return record

    def make_state(self) -> TrainState:
        """The state before the first step: the student's file, or random weights of its shapes."""
        student, shardings = self.pair.student, self.step.shardings
        if self.config.student.init == "checkpoint":
            params = load_params(
                student.table, student.spec, self.step.abstract.params, self.step.placement.mesh
            )
        else:
            seed = self.config.train.seed
            draw = functools.partial(initialise, student.spec, Compute(), seed)
            params = jax.jit(draw, out_shardings=shardings.params)()
        return self.step.init(params, donate=True)

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
        return (self.step.put(batch) for batch in batches)

    @property
    def teacher_params(self) -> Params:
        """What the steps take as the teacher's arrays."""
        return self.teacher.params if self.teacher else {}

    @functools.cached_property
    def heldout_bytes(self) -> int:
        """UTF-8 bytes of the targets that held-out figures are of; 0 if the tokens do not tell."""
        sizes, config = self.pair.tokenizer.token_bytes, self.config.eval
        batches = pipeline.eval_batches(
            self.rows.heldout, batch_size=config.batch_size, limit=config.rows or None
        )
        if sizes is None:
            return 0
        return sum(int(sizes[b["labels"][b["weights"] != 0]].sum()) for b in batches)

    def flops_per_token(self) -> float:
        """Teacher forward, student forward and backward (twice the forward), causal attention."""
        return count_step_flops(self.config, self.pair, self.kind)


def _check_batches(config: Config, placement: Placement) -> None:
    shards = sharding.row_shards(placement.mesh)
    train, evaluation = config.train, config.eval
    sizes = {
        "train.batch_size / train.microbatches": train.batch_size // train.microbatches,
        "eval.batch_size": evaluation.batch_size,
    }
    for name, rows in sizes.items():
        if rows % shards:
            raise UserError(
                f"{name} = {rows} rows cannot be split over mesh.data x mesh.fsdp = {shards} "
                f"devices. Use a multiple of {shards}."
            )


def ask_kinds(config: Config) -> tuple[TeacherKind, ...]:
    """The kinds that the config allows, fastest first: one, or with backend "auto" two.

    Raises `UserError` for settings that contradict each other.
    """
    teacher = config.teacher
    if not teacher.path:
        return (NoTeacher(),)
    if teacher.cache:
        if teacher.backend != "auto":
            raise UserError(
                f"found teacher.cache={teacher.cache} with the teacher backend "
                f"{teacher.backend!r} (teacher.backend or KDJAX_TEACHER_BACKEND); expected "
                "'auto': a cached teacher is not loaded. Leave one of them out."
            )
        spec = read_index(Path(teacher.cache))[0]
        if spec.kind == CachedTopK.name:
            return (CachedTopK(spec.k),)
        return (CachedHidden(),)
    if teacher.compute != "train":
        if teacher.backend != "auto":
            raise UserError(
                f"found teacher.compute={teacher.compute!r} with the teacher backend "
                f"{teacher.backend!r}; expected backend 'auto': fp8 products need weights of their "
                "own kind. Leave one of them out."
            )
        return (Float8(precise=teacher.compute == "fp8_precise"),)
    return {"auto": (Dense(), Packed()), "dequant": (Dense(),), "q4k": (Packed(),)}[teacher.backend]


def describe_cache(
    config: Config, pair: Pair, rows: RowSet, kind: CachedHidden | CachedTopK, teacher: str
) -> CacheSpec:
    """What a cache of this run's teacher, of SHA-256 `teacher`, is made of."""
    assert pair.teacher is not None  # as `validate` asks
    k = kind.k if isinstance(kind, CachedTopK) else 0
    return CacheSpec(
        kind=kind.name,
        k=k,
        temperature=config.loss.temperature if k else None,
        teacher=teacher,
        rows=rows.key,
        tokenizer=pair.tokenizer.content_hash,
        vocabulary=(pair.vocabulary.width, pair.vocabulary.real),
        positions=config.data.seq_len,
        width=pair.teacher.spec.hidden_size,
        dtype=config.train.compute_dtype,
        compute=config.teacher.compute,
        sides=(len(rows.train), len(rows.heldout)),
    )


def survey(config: Config, *, whole: bool = True) -> tuple[Placement, Pair, Plan]:
    """Opens, compares and plans; reads headers and allocates nothing.

    With `whole=False` the models' files may end behind their headers, as in a download under way.
    Raises `UserError` for a pair that cannot be distilled or a run that cannot fit.
    """
    kinds = ask_kinds(config)
    meshes = list(_ask_meshes(config))
    placement = Placement.on(meshes[0])
    for kind in kinds:
        kind.check(placement)
    _check_batches(config, placement)
    pair = open_pair(config, whole=whole)
    _log.info("student: %s", pair.student.describe())
    if pair.teacher is None:
        _log.info("no teacher: held-out figures are the student's alone")
    else:
        _log.info("teacher: %s", pair.teacher.describe())
    _log.info("vocabulary: %d ids, head width %d", pair.vocabulary.real, pair.vocabulary.width)
    mesh, plan = _choose_mesh(config, pair, meshes, kinds)
    return Placement.on(mesh), pair, plan


def _ask_meshes(config: Config) -> Iterator[Mesh]:
    """The meshes that the config allows, those that copy most first."""
    asked, count = config.mesh, jax.device_count()
    if asked.fsdp or asked.data > 0:
        yield sharding.make_mesh(asked.data, asked.fsdp or 1, asked.tensor)
        return
    most = max(count // asked.tensor, 1)
    for fsdp in (n for n in range(1, most + 1) if most % n == 0):
        yield sharding.make_mesh(-1, fsdp, asked.tensor)


def _choose_mesh(
    config: Config, pair: Pair, meshes: Sequence[Mesh], kinds: Sequence[TeacherKind]
) -> tuple[Mesh, Plan]:
    """The first mesh whose plan fits, or the last; says why if there was a choice."""
    needs: list[str] = []
    for mesh in meshes:
        last = mesh is meshes[-1]
        try:
            plan = choose_plan(config, pair, mesh, device_summary(), kinds)
        except UserError:
            if last:
                raise
            plan = None
        if last or (plan and not plan.missing):
            break
        needs.append(f"fsdp={mesh.shape['fsdp']} does not fit")
    assert plan is not None
    if mesh.size > 1:
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        why = ", ".join(needs) or ("asked for" if config.mesh.fsdp else "each device holds all")
        _log.info("mesh: %s: %s", sizes, why)
    return mesh, plan


def prepare_all(config: Config, pair: Pair, placement: Placement) -> RowSet:
    """The rows of a run: packed text, from the cache if it is there.

    With `rollout.rounds=1` those of training are the start model's answers.
    """
    rows = prepare(config, pair.tokenizer)
    if not config.rollout.prompts:
        return rows
    if pair.teacher is not None:
        check_templates(config, pair.tokenizer, pair.teacher.tokenizer)
    return fix_answers(config, pair, placement, rows) if config.rollout.rounds == 1 else rows


def prepare(config: Config, tokenizer: Tokenizer) -> RowSet:
    """Packed rows of the configured text, from the cache if they are there."""
    folder = Path(config.data.cache_dir).expanduser()
    with cluster.first_before_others("rows"):
        rows = prepare_rows(row_settings(config, tokenizer), folder)
    _log.info("rows: %s", rows.info)
    for side in ("train", "heldout"):
        warn_of_marks(side, rows.info[side]["marks"], tokenizer, config.data.parse_special)
    return rows


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
        parse_special=data.parse_special,
    )


def assemble(config: Config, workdir: Path, source: BatchSource | None = None) -> Job:
    """Builds the job; `source` gives other training batches than the config's text.

    Raises `UserError` for anything a user can mend.
    """
    placement, pair, plan = survey(config)
    config = replace_settings(config, plan.remat, plan.chunk_tokens)
    _log.info("%s; planned peak %.2f GB a device", plan.choice, plan.peak / 1e9)
    rows = prepare_all(config, pair, placement)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:  # hashes while loading
        hashed = pool.submit(hash_models, pair)
        cache = None
        if isinstance(plan.kind, CachedHidden | CachedTopK):
            teacher_hash = str(hashed.result()["teacher.sha256"])
            spec = describe_cache(config, pair, rows, plan.kind, teacher_hash)
            cache = open_cache(Path(config.teacher.cache), spec)
            _log.info("%s", cache)
        teacher, step, schedule = build_step(config, pair, placement, plan.kind)
    made_of = {"data.rows": rows.key} | ({"teacher.cache": cache.sha256} if cache else {})
    source = source or make_source(config, workdir, pair, rows, cache, step, teacher)
    if isinstance(source, AnswerSource):
        made_of |= {"rollout.prompts": source.prompts_key}
    return Job(
        config=config,
        workdir=workdir,
        pair=pair,
        rows=rows,
        teacher=teacher,
        step=step,
        kind=plan.kind,
        schedule=schedule,
        source=source,
        identity=identity(config) | hashed.result() | made_of,
        plan=plan,
        cache=cache,
    )


def hash_models(pair: Pair) -> dict[str, str | None]:
    """SHA-256s of the models' files, which one process of a host reads for that."""
    sides = ("teacher", pair.teacher), ("student", pair.student)
    return cluster.once_a_host(
        "models",
        lambda: {f"{side}.sha256": opened and opened.sha256 for side, opened in sides},
    )


def check_finished(config: Config, workdir: Path) -> None:
    """Raises `UserError` unless the finished run in `workdir` is the one of `config`.

    Loads nothing: models and text are hashed where they are. A file that is gone since is taken as
    unchanged if the run's receipt has the same path.
    """
    saved = saved_run(workdir, config.train.steps)["identity"]
    current = identity(config)
    try:
        current |= _hash_inputs(config)
    except MissingFileError:
        then, now = flatten((read_receipt(workdir) or {}).get("config", {})), flatten(config)
        moved = [name for name in _PATHS if now[name] != then.get(name)]
        if not then:
            raise
        saved = {name: value for name, value in saved.items() if name in current}
        saved |= {name: then.get(name) for name in moved}
        current |= {name: now[name] for name in moved}
    check_same_run(saved, current, workdir)


def _hash_inputs(config: Config) -> dict[str, Any]:
    """What `assemble` adds to the identity of a run, from the files alone."""
    pair = open_pair(config)
    made_of: dict[str, Any] = {"data.rows": rows_key(row_settings(config, pair.tokenizer))}
    if config.rollout.prompts:
        prompts = open_prompts(config, pair.tokenizer)
        if config.rollout.rounds == 1:
            key = answers_key(config, made_of["data.rows"], pair.student.sha256, prompts)
            made_of["data.rows"] = key
        else:
            made_of["rollout.prompts"] = prompts.key
    if config.teacher.cache:
        made_of["teacher.cache"] = hash_index(read_index(Path(config.teacher.cache))[1])
    return made_of | hash_models(pair)


def make_source(
    config: Config,
    workdir: Path,
    pair: Pair,
    rows: RowSet,
    cache: TeacherCache | None,
    step: Step,
    teacher: Model | None,
) -> BatchSource:
    """The batches of the config: of its rows, or, in rounds, of the student's own answers."""
    if not config.rollout.prompts or config.rollout.rounds == 1:
        return text_source(config, rows, cache)
    others = config.train.batch_size - count_own_rows(config)
    text = others and TextSource(rows.train, batch_size=others, seed=config.train.seed)
    spec, trained = pair.student.spec, step.spec.student
    assert isinstance(trained, DecoderFunctions)
    # As it writes and is compared: no gradients, so that layers are a loop and compile as one
    # (17 s less of a 0.5B on an H200), and one text a row, which needs no packed attention.
    alone = dataclasses.replace(trained.compute, remat="none", scan=True, max_segments=1)
    functions = functional(spec, alone)[0]
    student = Model(functions, step.abstract.params, spec.vocab_size, placement=step.placement)
    return answer_source(config, workdir, pair, student, teacher, text or None)


def text_source(config: Config, rows: RowSet, cache: TeacherCache | None) -> TextSource:
    """Training batches of the rows, this process's share."""
    return TextSource(
        rows.train,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        more=cache and cache.train,
    )


def load_teacher(
    config: Config, pair: Pair, kind: TeacherKind, placement: Placement
) -> Model | None:
    """The teacher, or what training needs of a cached one, over the shared vocabulary, if any."""
    if pair.teacher is None:
        return None
    compute = Compute(
        dtype=jnp.dtype(config.train.compute_dtype),
        param_dtype=jnp.dtype(config.teacher.param_dtype),
        max_segments=config.data.max_segments,
        placement=placement,
    )
    teacher = kind.load(pair.teacher, pair.vocabulary.width, compute)
    _log.info("%s", teacher)
    return teacher


def build_step(
    config: Config,
    pair: Pair,
    placement: Placement,
    kind: TeacherKind,
    teacher: Model | None = None,
) -> tuple[Model | None, Step, optax.Schedule]:
    """Loads the teacher, unless it is given, and prepares step and schedule; compiles nothing."""
    teacher = teacher or load_teacher(config, pair, kind, placement)
    compute = Compute(
        dtype=jnp.dtype(config.train.compute_dtype),
        remat=config.student.remat,
        # Layers are looped over only under remat "full": a loop copies what it keeps of each
        # layer, 28 of the 114 ms of forward and backward of a 0.5B at 16,384 positions on an H200.
        scan=config.student.remat == "full",
        max_segments=config.data.max_segments,
        placement=placement,
    )
    functions, shapes = functional(pair.student.spec, compute)
    step = make_step(
        Model(functions, shapes, pair.student.spec.vocab_size, placement=placement),
        teacher,
        KDLoss(config.loss.divergence, config.loss.temperature, config.loss.alpha),
        optim.optimizer(config.optim, config.train.steps),
        microbatches=config.train.microbatches,
        chunk_tokens=config.loss.chunk_tokens,
        reduce_dtype=config.train.reduce_dtype,
        kind=kind,
        vocabulary=pair.vocabulary,
    )
    return teacher, step, optim.schedule(config.optim, config.train.steps)
