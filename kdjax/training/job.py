"""Assembles a run from its config: checkpoints, vocabulary, rows, models, the step.

Cheap checks come first, so that a wrong path or vocabulary fails in a second, before gigabytes
are read.
"""

import concurrent.futures
import dataclasses
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kdjax.config import (
    Config,
    EvalConfig,
    LossConfig,
    TrainConfig,
    choose_optim,
    count_own_rows,
)
from kdjax.data import pipeline
from kdjax.data.counts import TextCounts
from kdjax.data.pipeline import Source, TextSource
from kdjax.data.rows import Rows, RowSet
from kdjax.data.teacher_cache import (
    SeveralCaches,
    TeacherCache,
    open_caches,
)
from kdjax.device import sharding
from kdjax.device.machines import Machine
from kdjax.device.placement import Placement
from kdjax.device.runtime import mem_available
from kdjax.errors import UserError
from kdjax.formats.saved import UNDECAYED, saved_run
from kdjax.losses.kd import KDLoss
from kdjax.models.decoder import Compute, DecoderFunctions, Params, functional, initialise
from kdjax.models.loading import load_params
from kdjax.models.model import Model
from kdjax.progress import silence, timing
from kdjax.training import optim
from kdjax.training.ahead import shape_batch
from kdjax.training.forms import Form, form_of
from kdjax.training.identity import check_same_run, describe_cache, identify
from kdjax.training.inputs import (
    check_texts,
    count_run,
    find_begun,
    hash_divergence,
    hash_models,
    hash_rounding,
    list_read_rows,
    prepare_all,
    read_shared,
    warn_of_readings,
)
from kdjax.training.kinds import ask_kinds
from kdjax.training.mixtures import Teachers
from kdjax.training.pair import Pair, open_pair
from kdjax.training.plan import (
    Plan,
    choose_mesh,
    choose_plan,
    count_step_flops,
    replace_settings,
    shares_base,
)
from kdjax.training.rollouts import answer_source
from kdjax.training.saving import Checkpoints
from kdjax.training.step import Step, TrainState, assemble_step
from kdjax.training.teachers import NoTeacher, TeacherKind
from kdjax.training.trainable import leave_out
from kdjax.training.user_code import NO_CODE, UserCode
from kdjax.training.vocabulary import Vocabulary

_log = logging.getLogger("kdjax")


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
    schedule: optax.Schedule | None  # learning rate by optimizer step; None: a user's optimizer's
    source: Source  # of training batches
    identity: dict[str, Any]  # fields that must not change when the run resumes
    plan: Plan | None = None  # None where nothing was planned: a benchmark
    cache: TeacherCache | SeveralCaches | None = None  # the teacher's, which is then not loaded
    user_code: UserCode = NO_CODE  # what a user gave as Python
    counts: TextCounts | None = None  # None where nothing was counted: a benchmark
    form: Form | None = None  # the student's, completed from the text; None: the config's

    def restore(self, checkpoints: Checkpoints) -> TrainState:
        """The state to start from: the run's checkpoint, else the student's file or random weights.

        A checkpoint also moves `source` to its position. Raises `UserError` for the checkpoint of
        a run that this config would not continue.
        """
        latest = checkpoints.latest()
        if latest is None:
            if after := self.config.train.after:
                raise UserError(
                    f"found train.after={after} and no checkpoint in {self.workdir}; expected a "
                    f"run that has finished its {after} steps. Name its workdir."
                )
            return self.make_state()
        self.source.set_state(self.read_record(latest)["data"])
        return checkpoints.restore(latest, self.step.abstract, self.step.shardings)

    def read_record(self, step: int) -> dict[str, Any]:
        """Reads the saved record of the run; raises `UserError` if it is another run's."""
        record = saved_run(self.workdir, step)
        check_same_run(record["identity"], self.identity, self.workdir, step)
        if self.undecayed != record.get(UNDECAYED, []):
            raise UserError(
                f"{self.workdir} holds step {step} of a run whose weight decay moved A_log and "
                "dt_bias of delta layers, as an earlier version did; this version leaves them "
                "alone. Finish it with that version (receipt.json names its commit), or begin "
                f"another run from its student: student.path={self.workdir} and a new workdir."
            )
        return record

    @property
    def undecayed(self) -> list[str]:
        """Names of trained parameters that weight decay leaves alone and once did not."""
        if self.user_code.optimizer is not None:
            return []
        trained = leave_out(self.step.abstract.params, self.step.spec.frozen)
        return optim.list_undecayed(self.config.optim, trained)

    def make_state(self) -> TrainState:
        """The state before the first step: the student's file, or random weights of its shapes."""
        student, shardings = self.pair.student, self.step.shardings
        if custom := self.user_code.open_student(self.pair.tokenizer, self.step.placement):
            params = jax.device_put(custom.params, shardings.params)
            return self.step.init(params)
        drawn = (self.form or form_of(self.config.student)).draw(student, self.config.train.seed)
        if drawn is not None:
            params = jax.device_put(drawn, shardings.params)
        elif self.config.student.init == "checkpoint":
            params = load_params(
                student.table, student.spec, self.step.abstract.params, self.step.placement.mesh
            )
        else:
            seed = self.config.train.seed
            draw = functools.partial(initialise, student.spec, Compute(), seed)
            params = jax.jit(draw, out_shardings=shardings.params)()
        return self.step.init(params, donate=True)

    def eval_batches(self, rows: Rows | None = None) -> Iterator[dict[str, Any]]:
        """Yields batches of held-out or other rows on the devices, in a fixed order.

        A cached teacher has held-out rows only.
        """
        batches = pipeline.eval_batches(
            self.rows.heldout if rows is None else rows,
            batch_size=self.config.eval.batch_size,
            limit=self.config.eval.rows or None,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            more=self.cache and self.cache.heldout if rows is None else None,
        )
        return (self.step.put(batch, heldout=True) for batch in batches)

    @property
    def teacher_params(self) -> Params:
        """Arrays that the steps take for the teacher."""
        return self.teacher.params if self.teacher else {}

    @functools.cached_property
    def heldout_bytes(self) -> int:
        """UTF-8 bytes of the held-out targets; 0 if the tokenizer does not know them."""
        sizes, config = self.pair.tokenizer.token_bytes, self.config.eval
        batches = pipeline.eval_batches(
            self.rows.heldout, batch_size=config.batch_size, limit=config.rows or None
        )
        if sizes is None:
            return 0
        return sum(int(sizes[b["labels"][b["weights"] != 0]].sum()) for b in batches)

    def flops_per_token(self) -> float:
        """FLOP a token: teacher forward, student forward and backward, causal attention."""
        return count_step_flops(self.config, self.pair, self.kind)


def _check_batches(train: TrainConfig, evaluation: EvalConfig, placement: Placement) -> None:
    shards = sharding.row_shards(placement.mesh)
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


def survey(
    config: Config, *, whole: bool = True, machine: Machine | None = None
) -> tuple[Placement, Pair, Plan]:
    """Opens, compares and plans, for this machine by default; reads headers, allocates nothing.

    With `whole=False` the models' files may end after their headers, as in an unfinished download,
    and text is read only until each side has a document. Raises `UserError` for a pair that cannot
    be distilled, text that does not divide, or a run that cannot fit.
    """
    kinds = ask_kinds(config.teacher)
    machine = machine or Machine.here()
    axes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    meshes = sharding.list_meshes(*axes, machine.devices)
    placement = Placement.on(meshes[0])
    for kind in kinds:
        kind.check(placement)
    _check_batches(config.train, config.eval, placement)
    pair = open_pair(config, whole=whole)
    _log.info("student: %s", pair.student.describe())
    if pair.teacher is None:
        if not config.teacher.cache:
            _log.info("no teacher: held-out figures are the student's alone")
    else:
        _log.info("teacher: %s", pair.teacher.describe())
    _log.info("vocabulary: %s", pair.vocabulary.describe())
    if not whole:  # else it is read next
        check_texts(config.data, pair.tokenizer)
    mesh, plan = choose_mesh(
        meshes,
        lambda mesh: choose_plan(config, pair, mesh, machine.summary, kinds),
        asked=bool(config.mesh.fsdp),
    )
    return Placement.on(mesh), pair, plan


def _warn_of_others(plan: Plan, placement: Placement) -> None:
    """Warns if other programs hold RAM that the run was planned to take."""
    needed = plan.peak * placement.mesh.size
    free = mem_available() if plan.platform == "cpu" else None
    if free is not None and free < needed:
        _log.warning(
            "the run is planned to take %.1f GB of RAM, of which other programs leave %.1f: end "
            "some of them, or the run may be slow or be killed",
            *(needed / 1e9, free / 1e9),
        )


def assemble(
    config: Config, workdir: Path, user_code: UserCode = NO_CODE, *, ahead: bool = False
) -> Job:
    """Builds the job; objects of `user_code` replace parts of the config.

    With `ahead` its programs are compiled in threads while text is read and models are loaded.
    Raises `UserError` for anything that a user can fix.
    """
    with timing("headers and plan"):
        placement, pair, plan = survey(config)
    config = replace_settings(config, plan.remat, plan.chunk_tokens)
    _log.info("%s; planned peak %.2f GB a device", plan.choice, plan.peak / 1e9)
    _warn_of_others(plan, placement)
    begun = begin_step(config, pair, placement, plan.kind, user_code) if ahead else None
    with timing("text"):
        rows = prepare_all(config, pair, find_begun(workdir))
    counts = count_run(config, rows)
    warn_of_readings(config, counts.epochs)
    read_shared(config, pair, rows)
    form = form_of(config.student).read_text(
        rows.train.tokens, rows.train.mask, pair.vocabulary.real
    )
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:  # hashes while loading
        hashed = pool.submit(hash_models, pair)
        cache = None
        if config.teacher.cache:
            sha256 = hashed.result()["teacher.sha256"] or ""
            kinds: tuple[Any, ...] = (plan.kind,)  # cached ones, as the config says
            if isinstance(plan.kind, Teachers):
                kinds = plan.kind.kinds
            specs = [describe_cache(config, pair, rows, kind, sha256) for kind in kinds]
            read = list_read_rows(config, rows)
            cache = open_caches(config.teacher.cache, specs, read)
            _log.info("%s", cache)
        with timing("teacher"):
            teacher, step, schedule = build_step(
                config, pair, placement, plan.kind, user_code=user_code, form=form, begun=begun
            )
        with timing("hashes"):
            hashed.result()
    made_of = {"data.rows": rows.key} | ({"teacher.cache": cache.sha256} if cache else {})
    made_of |= hash_rounding(config.student) | hash_divergence(config.loss)
    made_of |= user_code.identify(step.abstract)
    if user_code.batches is None:
        source = make_source(config, workdir, pair, rows, cache, step, teacher)
    else:
        source = pipeline.complete_source(user_code.batches)
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
        identity=identify(config, hashed.result() | made_of | source.identity),
        plan=plan,
        cache=cache,
        user_code=user_code,
        counts=counts,
        form=form,
    )


def make_source(
    config: Config,
    workdir: Path,
    pair: Pair,
    rows: RowSet,
    cache: TeacherCache | SeveralCaches | None,
    step: Step,
    teacher: Model | None,
) -> Source:
    """Makes the config's batch source: rows, or rounds of answers."""
    if not config.rollout.prompts:
        return text_source(config.train, rows, cache, step.trained_vocabulary)
    others = config.train.batch_size - count_own_rows(config)
    text = others and TextSource(rows.train, batch_size=others, seed=config.train.seed)
    student, loss = open_writer(pair, step), step.spec.head.loss
    reader = pair.vocabulary.find_reader(teacher)
    return answer_source(config, workdir, pair, student, reader, text or None, loss)


def open_writer(pair: Pair, step: Step) -> Model:
    """The student for generation and comparison; its parameters are shapes, to be replaced."""
    spec, trained = pair.student.spec, step.spec.student
    assert isinstance(trained, DecoderFunctions)
    # Without gradients layers are a loop and compile as one (17 s less for a 0.5B on an H200); one
    # text a row needs no packed attention.
    alone = dataclasses.replace(trained.compute, remat="none", scan=True, max_segments=1)
    functions = functional(spec, alone)[0]
    return Model(functions, step.abstract.params, spec.vocab_size, placement=step.placement)


def text_source(
    train: TrainConfig,
    rows: RowSet,
    cache: TeacherCache | SeveralCaches | None,
    vocabulary: Vocabulary | None = None,
) -> TextSource:
    """Makes training batches of the rows, this process's share."""
    read = vocabulary and vocabulary.make_columns(lambda row: pipeline.example(rows.train, row))
    return TextSource(
        rows.train,
        batch_size=train.batch_size,
        seed=train.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        more=cache.train if cache else read,
    )


def load_teacher(
    config: Config, pair: Pair, kind: TeacherKind, placement: Placement
) -> Model | None:
    """Loads the teacher, or the needed parts of a cached one, cut to the shared vocabulary."""
    if pair.teacher is None:
        return None
    compute = Compute(
        dtype=jnp.dtype(config.train.compute_dtype),
        param_dtype=jnp.dtype(config.teacher.param_dtype),
        max_segments=config.data.max_segments,
        placement=placement,
    )
    teacher = kind.load(pair.teacher, pair.vocabulary.teacher_width, compute)
    _log.info("%s", teacher)
    return teacher


def build_step(
    config: Config,
    pair: Pair,
    placement: Placement,
    kind: TeacherKind,
    teacher: Model | None = None,
    *,
    user_code: UserCode = NO_CODE,
    form: Form | None = None,
    begun: Step | None = None,
) -> tuple[Model | None, Step, optax.Schedule | None]:
    """Loads the teacher, unless it is given, and prepares step and schedule; compiles nothing.

    `form` is the student's, completed from the text; None: as the config says. `begun` is the step
    if `begin_step` has made it.
    """
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
    steps = config.train.steps, config.train.after
    tx, schedule = user_code.optimizer, None
    if tx is None:
        asked = choose_optim(config)
        tx, schedule = optim.optimizer(asked, *steps), optim.schedule(asked, *steps)
    form, shared = form or form_of(config.student), shares_base(config, pair, kind)
    student = user_code.open_student(pair.tokenizer, placement) or form.open_model(
        pair.student, compute, teacher if shared else None
    )
    if begun is not None:
        begun.hold(begun.spec.form.base(student.params))
        return teacher, begun, schedule
    vocabulary = pair.vocabulary
    if user_code.student is not None:  # its head may have other rows than the file's
        vocabulary = vocabulary.narrow(student.vocab_size)
    step = assemble_step(  # `open_pair` has judged the pair
        student,
        teacher,
        vocabulary,
        user_code.loss or make_loss(config.loss, config.train),
        tx,
        microbatches=config.train.microbatches,
        chunk_tokens=config.loss.chunk_tokens,
        reduce_dtype=config.train.reduce_dtype,
        kind=kind,
        form=form,
        trainable=config.optim.trainable,
        extra=user_code.extra,
    )
    return teacher, step, schedule


def begin_step(
    config: Config, pair: Pair, placement: Placement, kind: TeacherKind, user_code: UserCode
) -> Step | None:
    """Makes the step from headers, and begins to compile its programs in threads.

    Returns None for several devices, and where batches, form or parameters are known later.
    """
    known = kind.runs or isinstance(kind, NoTeacher)
    if user_code != NO_CODE or not (known and placement.alone) or form_of(config.student).beside:
        return None
    shapes = dataclasses.replace(placement, shapes=True)
    with silence():
        teacher, step, _ = build_step(config, pair, shapes, kind)
    sizes = config.train.batch_size, config.eval.batch_size
    read = zip(sizes, (step.trained_vocabulary, step.vocabulary), strict=True)
    batches = [shape_batch(rows, config.data.seq_len, vocabulary) for rows, vocabulary in read]
    step.compile_ahead(teacher.params if teacher else {}, *batches)
    return step


def make_loss(loss: LossConfig, train: TrainConfig) -> KDLoss:
    """Makes a config's loss; parameters with final values change linearly by step."""

    def line(first: float, final: float, unchanged: float) -> float | optax.Schedule:
        if final in (unchanged, first):
            return first
        return optax.linear_schedule(
            first, final, max(train.steps - train.after - 1, 1), train.after
        )

    temperature = line(loss.temperature, loss.final_temperature, 0.0)
    return KDLoss(loss.divergence, temperature, line(loss.alpha, loss.final_alpha, -1.0))
