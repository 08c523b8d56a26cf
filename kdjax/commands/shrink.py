"""Makes the best GGUF file of a size from a model, by one command.

    kdjax shrink model.gguf --size=750MB --out=small.gguf --text=text/ --seconds=600
    kdjax shrink model.gguf --like=q2_k --out=small.gguf --no-train

MODEL is a GGUF file or a Hugging Face folder, of the most bits that you have. The text should be of
the kind that the file is for; `own` among its names is what the model writes from its chat template
and from nothing (`own:500`: 500 texts). The parts: this text, importance of the inputs, cost of
each matrix in each block type, choice of the types that lose least within the size, GPTQ, training
under rounding from there (of adapters where masters do not fit), export, proof. Each part is stored
in the work folder, from which the same command goes on. The closing table compares the file with
the recipe of llama-quantize that is no larger.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.commands.export import read_model
from kdjax.commands.parsing import (
    PROMPT,
    Parser,
    add_fields_flag,
    check_least,
    check_seq_len,
    find_work,
    log_to_terminal,
    read_paths,
    started,
)
from kdjax.commands.plan import add_machine_flags, find_machine, print_plan, survey_headers
from kdjax.config import SELF, Config, flatten, validate
from kdjax.data.fields import Fields
from kdjax.data.pipeline import TextSource, eval_batches
from kdjax.data.rows import RowSet
from kdjax.data.sources import find_files
from kdjax.device import cluster, runtime
from kdjax.device.machines import Machine, parse_bytes
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_local_mesh
from kdjax.errors import BAD_INPUT, FINISHED, INTERRUPTED, NOT_FINITE, UserError, reporting
from kdjax.evaluation.choice import bound_bytes, check_costs, choose_mixture, list_types
from kdjax.evaluation.costs import (
    Comparison,
    CostFile,
    hash_rows,
    measure_costs,
    read_costs,
    round_params,
)
from kdjax.evaluation.own_text import LONGEST, QUESTION, OwnText
from kdjax.export import export_gguf
from kdjax.export.card import begin_card, check_card, place_card, show_bound, show_number
from kdjax.export.formats import check_gguf_tokenizer, count_gguf_bytes
from kdjax.export.staging import check_sources, check_suffix, check_target, stage
from kdjax.export.weights import check_finite
from kdjax.formats.files import bad, check_place, load_json, replacing
from kdjax.formats.imatrix import hash_importance
from kdjax.formats.locks import holding
from kdjax.formats.recipes import RECIPES
from kdjax.formats.saved import CHECKPOINTS, saved_steps
from kdjax.formats.start import write_start
from kdjax.models import gptq
from kdjax.models.adapters import choose_lora
from kdjax.models.arch import ArchSpec
from kdjax.models.checkpoint import Checkpoint, open_checkpoint, open_step, tie_head
from kdjax.models.decoding import count_slots
from kdjax.models.importance import measure_importance
from kdjax.models.loading import count_parameters
from kdjax.models.mixture import Mixture, count_weights, list_matrices, list_single_matrices
from kdjax.models.model import Model, load_model
from kdjax.progress import counted, silence
from kdjax.training.best import Part
from kdjax.training.compiled import ask_xla
from kdjax.training.forms import Rounded, spread_importance
from kdjax.training.inputs import prepare
from kdjax.training.job import survey
from kdjax.training.memory import Plan
from kdjax.training.pair import Pair
from kdjax.training.plan import list_plans, take_fitting, write_flags
from kdjax.watch.guards import NonFiniteError
from kdjax.watch.run import distill

_log = logging.getLogger("kdjax")

_RECIPES = ("q2_k", "q3_k_m", "iq4_xs", "q4_k_m", "q6_k", "q8_0")  # that files are compared with
# Rates of files below these bits a weight: with more bits there is less to mend (docs/quantize.md).
_RATES = ((3.6, 1e-5), (4.4, 5e-6), (math.inf, 3e-6))
_MOST_BITS = 32  # a weight: F32
_SHARE = 0.11  # of a GPU's bf16 peak that costs reach: 1,980 passes of a 1.5B in 130 s of an H200
_WRITING = 0.1  # of that peak, while a model writes
_SLOTS = {"cpu": 16, "gpu": 256}  # texts that are written at a time, at most
_FULL = 0.8  # of a device, which what is not counted may fill
_STACKS = 5  # of one parameter that costs have in memory: three exchanged, one rounded, its parts
_SOURCE = "python:flax,optax,numpy"
_TEXT = f"own,{_SOURCE}"  # about half of each (docs/quantize.md)
_RANK = 64  # of adapters, where the masters of a training do not fit
_LEAST_RANK = 4  # that is named where adapters do not fit
_FLAGS = {"train.microbatches": "--microbatches"}  # that change no result, but what needs memory
_READ = 64  # rows that importance and GPTQ read
_STEPS = 600  # where neither --steps nor --seconds says how long
_PACE = 6  # steps that are timed for --seconds; the first compiles


def _parser() -> Parser:
    parser = Parser("shrink", __doc__, NOT_FINITE, INTERRUPTED)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a GGUF file or a Hugging Face folder")
    add("--out", required=True, type=Path, metavar="FILE", help="the GGUF file to make")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--size", metavar="BYTES", help="of the file, as 750MB")
    size.add_argument("--bits", type=float, help="bits a weight of the matrices, as 3.2")
    size.add_argument("--like", metavar="RECIPE", help="the size of a recipe, as q2_k")
    words = "folders, files, `own`, by commas"
    add("--text", default=_TEXT, type=read_paths, metavar="PATHS", help=words)
    add_fields_flag(add)
    add("--heldout", default="", metavar="PATHS", help="text to judge by; default: 2%% of --text")
    add("--steps", type=int, default=_STEPS, help="optimizer steps")
    add("--seconds", type=float, default=0.0, help="train for this time; 0: for --steps")
    add("--no-train", dest="train", action="store_false", help="round by GPTQ, train nothing")
    words = ", ".join(f"{rate:g} below {bits:g} bits a weight" for bits, rate in _RATES[:-1])
    words = f"at its peak; default, of all numbers: {words}, else {_RATES[-1][1]:g}"
    add("--learning-rate", type=float, metavar="RATE", help=words)
    words = "train adapters of this rank under rounding, 0: all numbers; default: 0 if that fits"
    add("--rank", type=int, metavar="N", help=f"{words} the device, else {_RANK}")
    add("--costs", type=Path, metavar="FILE", help="costs of an earlier call: measure none")
    add("--work", type=Path, metavar="DIR", help="work folder; default: FILE with .shrink")
    add("--seq-len", type=int, default=1024, help="positions a row")
    add("--batch-size", type=int, default=16, help="rows a step")
    add("--microbatches", type=int, default=1, help="parts of a batch, to save memory")
    add("--rows", type=int, default=8, help="rows that costs are measured on")
    words, rows = "folder of packed rows, shared between calls and runs", Config().data.cache_dir
    add("--config.data.cache_dir", default=rows, dest="cache_dir", metavar="DIR", help=words)
    add_machine_flags(parser, "print sizes and memory; load and make nothing", hosts=False)
    add("--overwrite", action="store_true", help="replace --out if it is there")
    return parser


def _check_flags(args: argparse.Namespace) -> None:
    """Raises `UserError` for flags and files that cannot work; reads sizes, costs and sources."""
    check_least(args, steps=1, rows=1, seq_len=2, batch_size=1, microbatches=1, seconds=0, rank=0)
    if args.batch_size % args.microbatches:
        raise UserError(
            f"found --batch-size={args.batch_size} and --microbatches={args.microbatches}; "
            "expected parts with the same number of rows. Change one."
        )
    if args.learning_rate is not None and args.learning_rate <= 0:
        raise UserError(f"--learning-rate={args.learning_rate:g} must be above 0.")
    if args.like is not None and args.like not in RECIPES:
        raise UserError(f"found --like={args.like}; expected one of {', '.join(RECIPES)}.")
    if args.size is not None:
        args.size = parse_bytes("--size", args.size)
    if args.bits is not None and not 0 < args.bits <= _MOST_BITS:
        raise UserError(f"found --bits={args.bits:g}; expected more than 0, at most {_MOST_BITS}.")
    check_target(args.out, folder=False, overwrite=args.overwrite)
    check_suffix(args.out, ".gguf")
    check_card(args.out)
    args.work = find_work(args.work, args.out, ".shrink")
    args.own, args.checked = OwnText.find(args.text, args.work), False
    # A plan reads a little text, and does so before the model has written.
    args.sources = args.text if args.own is None else args.own.others or _SOURCE
    if not args.plan:  # which may be for another machine
        for text in filter(None, (args.sources, args.heldout)):
            find_files(text, Fields.parse(args.fields))
    if args.costs is not None:
        args.costs = read_costs(args.costs)


def _tie_head(checkpoint: Checkpoint, like: str | None) -> Checkpoint:
    """Takes a head that repeats the embedding for the embedding, so that the file has it once."""
    tied = tie_head(checkpoint)
    if tied.spec.tied and not checkpoint.spec.tied:
        sizes = ""
        if like:
            once, twice = (count_gguf_bytes(x, like) / 1e6 for x in (tied, checkpoint))
            sizes = f", {once:,.1f} MB of {like}; llama-quantize keeps both, {twice:,.1f} MB"
        _log.info("the head repeats the embedding: the file will have the matrix once%s", sizes)
    return tied


@dataclasses.dataclass(frozen=True)
class _Goal:
    """The bytes of the matrices, and of all else in the file."""

    matrices: int
    rest: int

    @property
    def nbytes(self) -> int:
        """Bytes of the file, at most."""
        return self.matrices + self.rest


def _prepare(args: argparse.Namespace, checkpoint: Checkpoint) -> tuple[Checkpoint, _Goal]:
    """Ties the head, checks tokenizer and costs, and finds the bytes; raises `UserError`."""
    checkpoint = _tie_head(checkpoint, args.like)
    # An export says how the file's spaces differ; a plan has none.
    with contextlib.nullcontext() if args.plan else silence():
        check_gguf_tokenizer(checkpoint)
    if args.costs is not None:
        check_costs(args.costs, checkpoint.spec)
    return checkpoint, _find_goal(args, checkpoint)


def _find_goal(args: argparse.Namespace, checkpoint: Checkpoint) -> _Goal:
    """Turns --size, --bits or --like into bytes; refuses what no file can have."""
    spec = checkpoint.spec
    least, most = bound_bytes(spec)
    smallest = {name: list_types(parts)[0] for name, parts in list_matrices(spec).items()}
    rest = count_gguf_bytes(checkpoint, Mixture.of_tensors(smallest, spec)) - least
    if args.bits is not None:
        goal = _Goal(int(args.bits * count_weights(spec) / 8), rest)
    else:
        size = count_gguf_bytes(checkpoint, args.like) if args.like else int(args.size)
        goal = _Goal(size - rest, rest)
    source = sum(path.stat().st_size for path in checkpoint.table.paths)
    given = f"{goal.nbytes / 1e6:,.1f} MB"
    if goal.matrices < least:
        bits = math.ceil(800 * least / count_weights(spec)) / 100  # that --bits takes
        raise UserError(
            f"found a size of {given}; the smallest mixture of types that can be written has "
            f"{(least + rest) / 1e6:,.1f} MB (--bits={bits:.2f}){_name_unfitting(spec)}. Raise the "
            "size."
        )
    if goal.nbytes >= source:
        raise UserError(
            f"found a size of {given}; the source {checkpoint} has {source / 1e6:,.1f} MB, which "
            "is no larger. Lower the size, or give the model in more bits."
        )
    if goal.matrices > most:
        _log.info("the largest mixture has %.1f MB: the file will be smaller", (most + rest) / 1e6)
    return goal


def _name_unfitting(spec: ArchSpec) -> str:
    """Words about the matrices that stay F16, since no block type fits their rows."""
    widths = [x.shape[-1] for x in list_single_matrices(spec) if list_types([x]) == ("F16",)]
    if not widths:
        return ""
    rows = ", ".join(f"{width:,}" for width in sorted(set(widths)))
    return f", of which {len(widths)} matrices stay F16: no block type fits rows of {rows} numbers"


def _find_recipe(args: argparse.Namespace, checkpoint: Checkpoint, nbytes: int) -> str:
    """The recipe that the file is compared with: the largest that is no larger, else the least."""
    if args.like:
        return args.like
    sizes = {name: count_gguf_bytes(checkpoint, name) for name in _RECIPES}
    fitting = {name: size for name, size in sizes.items() if size <= nbytes}
    return max(fitting, key=fitting.__getitem__) if fitting else min(sizes, key=sizes.__getitem__)


def _make_config(
    args: argparse.Namespace, spec: ArchSpec, types: str, start: str = "", bits: float = 8.0
) -> Config:
    """The run that trains the chosen types: the model is its own teacher.

    Adapters begin at the model's numbers, whose arrays are the teacher's.
    """
    config = Config()
    if args.rank:
        config.student.lora.rank = args.rank
        config.teacher.weights, config.teacher.param_dtype = "packed", "float32"
    config.teacher.path, config.student.path = SELF, args.model
    config.student.quantize, config.student.start = types, start
    config.student.head = "tied" if spec.tied else "untied"
    config.data.train, config.data.heldout = args.sources, args.heldout
    config.data.fields, config.data.seq_len = args.fields, args.seq_len
    config.data.cache_dir = args.cache_dir
    config.optim.learning_rate = next(rate for most, rate in _RATES if bits < most)
    if args.learning_rate is not None:
        config.optim.learning_rate = config.student.lora.learning_rate = args.learning_rate
    config.optim.final_learning_rate = 0.0
    config.train.batch_size, config.train.microbatches = args.batch_size, args.microbatches
    _set_steps(config, args.steps)
    config.eval.samples = 0
    platform = args.machine.summary.platform if args.machine else jax.default_backend()
    if platform == "cpu":
        config.train.compute_dtype = config.teacher.param_dtype = "float32"
    if args.own is not None and not (args.own.others or args.heldout):
        # Of 32 texts, a CPU's, 2% are none in half of all cases; e ** -5 is 0.7%.
        share = min(0.5, 5 / args.own.fill(platform).texts)
        config.data.heldout_fraction = max(config.data.heldout_fraction, share)
    return config


def _set_steps(config: Config, steps: int) -> None:
    """Sets the steps, and evaluates and saves after each third of them, the last one included."""
    config.train.steps, config.optim.warmup_steps = steps, max(0, min(20, steps - 1))
    config.eval.every = config.checkpoint.every = math.ceil(steps / 3)


def _load(checkpoint: Checkpoint, **form: Any) -> Model:
    """Loads a model on the first device."""
    return load_model(checkpoint, placement=Placement.on(make_local_mesh(1)), **form)


def _load_source(args: argparse.Namespace, checkpoint: Checkpoint, **form: Any) -> Model:
    """Loads MODEL; the first time raises `UserError` for numbers that are not finite."""
    model = _load(checkpoint, **form)
    if not args.checked:
        check_finite(model)
        args.checked = True
    return model


class _Work:
    """The work folder and what it has; each part is made once and found again."""

    def __init__(self, args: argparse.Namespace, checkpoint: Checkpoint, rows: RowSet):
        self.args, self.checkpoint, self.rows = args, checkpoint, rows
        self.folder: Path = args.work
        self.costs_batches, self.proof_batches = self._split_heldout()
        self.made_of = {
            "model": checkpoint.sha256,
            "rows": hash_rows(self.costs_batches),
            "positions": int(sum(b["weights"].sum() for b in self.costs_batches)),
        }
        if args.costs is None:
            self._open_costs().read()  # refuses costs of other rows before it measures importance
        self._model: Model | None = None

    def _open_costs(self, **made_of: str) -> CostFile:
        return CostFile(self.folder / "costs.json", self.made_of | made_of)

    def _split_heldout(self) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
        """Held-out rows for costs, and others for the proof; the same ones if there is one row."""
        held, most = self.rows.heldout, self.args.rows
        size = min(most, max(1, len(held) // 2))
        batches = list(eval_batches(held, batch_size=size, limit=None))
        proof = batches[1::2][: max(1, 64 // size)]
        return batches[:1], proof or batches[:1]

    @functools.cached_property
    def importance(self) -> Path:
        """The file of importances, named by the model and the rows that they are measured on."""
        made_of = self.checkpoint.sha256 + hash_rows(list(self.read_training()))
        return self.folder / f"importance-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}.gguf"

    def load(self) -> Model:
        """The model in float32, on the first device, until `free`."""
        if self._model is None:
            _log.info("loading %s", self.checkpoint)
            self._model = _load_source(self.args, self.checkpoint, dtype="float32")
        return self._model

    def free(self) -> None:
        """Lets the device have its memory back."""
        self._model = None
        gc.collect()

    def read_training(self) -> Iterator[dict[str, np.ndarray]]:
        """Reads batches of `_READ` rows that train, or of one batch if that is more."""
        size = min(self.args.rows, len(self.rows.train))
        source = TextSource(self.rows.train, batch_size=size, seed=0)
        return (source.next() for _ in range(max(1, _READ // size)))

    @property
    def weighed(self) -> str:
        """Says whether roundings are weighted; of experts no importance is measured."""
        return f"with{'out' * bool(self.checkpoint.spec.experts)} importance"

    def measure_importance(self) -> str:
        """Measures the importance of all inputs on text that trains; "" for experts."""
        if self.checkpoint.spec.experts:
            return ""
        if not self.importance.exists():
            read = counted([*self.read_training()], "importance, batches read")
            batches = (batch["tokens"] for batch in read)
            texts, size = [self.args.text], self.args.seq_len
            measure_importance(
                self.importance, self.load(), batches, datasets=texts, chunk_size=size
            )
        return str(self.importance)

    def spread(self, imatrix: str) -> dict[tuple[str, ...], np.ndarray]:
        """The importances by parameter."""
        return spread_importance(imatrix, self.checkpoint.spec) if imatrix else {}

    def measure_costs(self, imatrix: str) -> Mapping[str, Mapping[str, float]]:
        """Measures the costs, or goes on where an earlier call was stopped."""
        if self.args.costs is not None:
            return self.args.costs
        file = self._open_costs(importance=hash_importance(imatrix) if imatrix else "")
        known = file.read()
        tensors = list_matrices(self.checkpoint.spec)
        if all(set(list_types(x)) <= known.get(n, {}).keys() for n, x in tensors.items()):
            return known
        comparison = Comparison(self.load(), self.costs_batches)
        began = time.monotonic()
        costs = measure_costs(comparison, self.spread(imatrix), known, file.write)
        count = sum(map(len, costs.values()))
        _log.info("costs: %d measured in %.0f s", count, time.monotonic() - began)
        return costs

    def begin(self, mixture: Mixture, types: Path, imatrix: str) -> tuple[Rounded, Any, Any]:
        """The form, and masters and scales that GPTQ makes on the rows of the importance.

        An embedding that is no head, and models that GPTQ does not walk, are rounded with the
        importance.
        """
        form = Rounded(str(types), imatrix).choose_types(self.checkpoint.spec)
        model, scales = self.load(), {}
        masters: Any = model.params
        if gptq.suits(self.checkpoint.spec):
            masters, scales = gptq.round_model(model, list(self.read_training()), mixture)
        else:
            _log.info(
                "GPTQ is left out: the model has experts, delta layers or a block that drafts"
            )
        return form, masters, form.complete(masters, scales)

    def round(self, mixture: Mixture, types: Path, imatrix: str) -> tuple[Model, str]:
        """Rounds the model; returns it packed, on the host, and how it was made."""
        form, masters, kept = self.begin(mixture, types, imatrix)
        packed = jax.device_get(jax.jit(form.pack)({}, kept, masters))
        how = "by GPTQ" if gptq.suits(self.checkpoint.spec) else self.weighed
        return self.load().replace(params=packed), how

    def train(self, mixture: Mixture, types: Path, imatrix: str) -> tuple[Model, str]:
        """Trains the chosen types, from GPTQ's masters or by adapters; returns as `round` does."""
        # Costs that --costs names may be another model's or text's, and the types then equal.
        made_of = types.read_bytes() + self.importance.name.encode()
        name = hashlib.sha256(made_of).hexdigest()[:8]
        rank, rate = self.args.rank, self.args.learning_rate
        start = "" if rank else str(self.folder / f"start-{name}.npz")
        if start and not Path(start).exists():
            _, masters, kept = self.begin(mixture, types, imatrix)
            write_start(Path(start), masters, kept)
            del masters, kept
        self.free()
        spec = self.checkpoint.spec
        bits = 8 * mixture.nbytes / count_weights(spec)
        config = _make_config(self.args, spec, str(types), start, bits)
        config.student.imatrix = "" if start else imatrix
        # A run of another length is another run.
        steps, seconds = self.args.steps, self.args.seconds
        length = f"-{seconds:g}s" if seconds else f"-{steps}steps" * (steps != _STEPS)
        how = f"-rank{rank}" * bool(rank) + (f"-rate{rate:g}" if rate else "") + length
        workdir = self.folder / f"run-{name}{how}"
        if self.args.seconds:
            self._fit_steps(config, workdir)
        validate(config)
        reason = distill(config, workdir, suits_cpu=True, distributed="off")
        if reason != "finished":
            raise KeyboardInterrupt
        best = open_step(workdir)
        if best.saved is not None and not best.saved.step:
            return read_model(best), "untrained: no step was better"
        return read_model(best), f"trained{f' by adapters of rank {rank}' * bool(rank)}"

    def _fit_steps(self, config: Config, workdir: Path) -> None:
        """Sets the number of steps that fit into --seconds; times a few of them.

        A run that has saved goes on with the time that it began with.
        """
        pace, seconds = workdir.with_name(f"{workdir.name}.pace.json"), []
        saved = (workdir / CHECKPOINTS).is_dir() and saved_steps(workdir)
        if saved and not pace.exists():
            raise UserError(f"{workdir}: found a run without {pace}. Name another --work.")
        if not saved:  # a time may be of another --batch-size, or machine
            timed = copy.deepcopy(config)
            timed.train.steps = max(timed.train.steps, _PACE)
            timed.smoke.steps, timed.eval.rows = _PACE, 1  # a smoke run saves nothing
            trial = workdir.with_name(f"{workdir.name}.pace")
            shutil.rmtree(trial, ignore_errors=True)  # of a process that was killed
            note = lambda record: seconds.append(record.seconds)  # noqa: E731
            try:
                reason = distill(timed, trial, on_step=note, suits_cpu=True, distributed="off")
            except NonFiniteError as error:  # which names the file of the step's batch
                workdir.mkdir(exist_ok=True)
                for batch in trial.glob("nonfinite_*"):
                    batch.replace(workdir / batch.name)
                raise NonFiniteError(str(error).replace(f"{trial}", f"{workdir}")) from error
            finally:
                shutil.rmtree(trial, ignore_errors=True)
            if reason != "finished":
                raise KeyboardInterrupt
            with replacing(pace) as file:
                file.write(json.dumps({"step": float(np.median(seconds[1:]))}).encode())
        remedy = f"Remove it and {workdir}, and the same command times the steps anew."
        step = load_json(pace, "a step's seconds", remedy=remedy).get("step")
        if not isinstance(step, float) or not 0 < step < math.inf:
            raise bad(pace, f"a step of {step!r} seconds", "a number above 0", remedy)
        _set_steps(config, max(1, int(self.args.seconds / step)))
        _log.info("%d steps of %.2f s fit into --seconds", config.train.steps, step)


def _prove(work: _Work, files: Mapping[str, Callable[[], tuple[Any, int]]]) -> dict[str, Any]:
    """Compares parameters with the model's on rows that chose nothing, one after the other."""
    comparison = Comparison(work.load(), work.proof_batches)
    found = {}
    for name, make in files.items():
        params, nbytes = make()
        started = comparison.start(params)
        figures, batches = comparison.read(started), comparison.read_batches(started)
        parts = {
            x: [Part(getattr(b, x), b.positions) for b in batches] for x in ("kl", "agreement")
        }
        found[name] = {"bytes": nbytes, **figures._asdict(), "parts": parts}
        del params, started
    return found


def _format_table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The closing table, in Markdown, and what the file gains over the recipe on the same rows."""
    lines = ["| file | MB | KL | agreement |", "| --- | --- | --- | --- |"]
    for name, row in found.items():
        kl, agreement = (show_bound(row["parts"][x]) for x in ("kl", "agreement"))
        cells = f"{_show_kl(row['kl'])}{kl}", f"{row['agreement']:.3f}{agreement}"
        lines.append(f"| {name} | {row['bytes'] / 1e6:,.1f} | {' | '.join(cells)} |")
    (recipe, first), *_, (file, last) = found.items()
    if bound := show_bound(last["parts"]["kl"], first["parts"]["kl"]):
        gap, count = last["kl"] - first["kl"], len(last["parts"]["kl"])
        lines += ["", f"KL of {file}, less the KL of {recipe}: {_show_kl(gap)}{bound}."]
        lines.append(f"±: 95% intervals over {count} batches of rows, paired for a difference.")
    return lines


def _show_kl(kl: float) -> str:
    """Four decimals, or three digits of less than a hundredth."""
    return f"{kl:.4f}" if abs(kl) >= 0.01 else show_number(kl, 3)


def _count_types(mixture: Mixture) -> str:
    types = list(mixture.tensors.values())
    return ", ".join(f"{types.count(dtype)} {dtype}" for dtype in sorted(set(types)))


def _count_free(mixture: Mixture, checkpoint: Checkpoint) -> int:
    """Matrices whose type is the source's: their numbers lie on its lattice and cost nothing."""
    stored = {name: checkpoint.table.info(name).dtype for name in checkpoint.table}
    exact = ("F32", "F16", "BF16")
    return sum(
        stored.get(name) == dtype and dtype not in exact for name, dtype in mixture.tensors.items()
    )


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A training with adapters of a rank, or of all numbers with rank 0, and what it takes."""

    rank: int
    config: Config
    placement: Placement
    pair: Pair
    plan: Plan

    @classmethod
    def of(cls, args: argparse.Namespace, checkpoint: Checkpoint, rank: int) -> "_Trial":
        """Plans it from headers; raises `UserError` for a model that has no such adapters."""
        trial = argparse.Namespace(**vars(args) | {"rank": rank})
        config = _make_config(trial, checkpoint.spec, _find_recipe(args, checkpoint, 0))
        config.teacher.weights = "packed"  # a kind by name is planned and not refused
        with silence():
            return cls(rank, config, *survey(config, whole=False, machine=args.machine))

    def describe(self) -> str:
        """Says what trains and how many GB that takes."""
        what = f"adapters of rank {self.rank} take" if self.rank else "to train all numbers takes"
        return f"{what} {self.plan.needed / 1e9:.2f} GB"

    def find_fitting(self, devices: runtime.Devices) -> tuple[Plan, str]:
        """The plan with the mildest flags that change no result, and these flags."""
        kind, mesh = self.plan.kind, self.placement.mesh
        plans = list_plans(self.config, self.pair, mesh, devices, kind, _FLAGS)
        plan, changes = take_fitting(plans)
        return plan, write_flags(changes, flatten(self.config), _FLAGS)


def _choose_rank(args: argparse.Namespace, checkpoint: Checkpoint) -> int:
    """Rank of the adapters that train: of --rank, or 0 for all numbers where those fit.

    Raises `UserError` for a rank that the model cannot have, flags that no run can have, and for
    a training that does not fit; with --plan of adapters the plan itself says that.
    """
    if not args.train:
        return args.rank or 0
    validate(_make_config(args, checkpoint.spec, _find_recipe(args, checkpoint, 0)))
    if args.rank:
        choose_lora(checkpoint.spec, args.rank)
    tried = [_Trial.of(args, checkpoint, args.rank or 0)]
    other = "Leave --rank out to train adapters. " if args.rank == 0 else ""
    if args.rank is None and tried[0].plan.missing:
        try:
            tried.append(_Trial.of(args, checkpoint, _RANK))
        except UserError:
            other = "Such a model has no adapters: take a larger device. "
    full, last = tried[0], tried[-1]
    fits = not last.plan.missing or (last.rank > 0 and (args.plan or _fits_by_xla(last)))
    if fits and last is not full:
        of = full.plan.missing / 1e9
        _log.info("%s, %.2f more than there are: %s (--rank)", full.describe(), of, last.describe())
    if fits:
        return last.rank
    needs = f"{', '.join(x.describe() for x in tried)}, {last.plan.missing / 1e9:.2f} more than"
    remedy = _find_remedy(args, checkpoint, tried)
    raise UserError(f"this run does not fit: {needs} there are. {remedy}{other}Or give --no-train.")


def _fits_by_xla(trial: _Trial) -> bool:
    """Whether XLA, whose account of a step is exact on a CPU, says that the training fits."""
    plan, config = trial.plan, trial.config
    return not ask_xla(plan, config, trial.pair, trial.placement).missing


def _find_remedy(args: argparse.Namespace, checkpoint: Checkpoint, tried: list[_Trial]) -> str:
    """Says with which flags a training would fit: parts of a batch, or also a smaller --rank."""
    devices, last = (args.machine or Machine.here()).summary, tried[-1].rank
    smaller = [last >> n for n in range(1, last.bit_length()) if last >> n >= _LEAST_RANK]
    size, flags = "", ""
    for trial in (*tried, *(_Trial.of(args, checkpoint, rank) for rank in smaller)):
        plan, flags = trial.find_fitting(devices)
        if trial.rank in smaller:
            flags = f"--rank={trial.rank} {flags}".strip()
        size = f"{plan.needed / 1e9:.2f} GB"
        if flags and not plan.missing:
            return f"It would fit with {flags} ({size}). "
    return (
        f"With {flags} it needs {size}: lower --seq-len, or take a larger device. " if flags else ""
    )


def _fit_slots(spec: ArchSpec, devices: runtime.Devices) -> int:
    """Texts that are written at a time: as many as the device has room for next to the weights."""
    size = 4 if devices.platform == "cpu" else 2
    room, weights = devices.memory_bytes or math.inf, size * count_parameters(spec)
    for halvings in range(6):
        slots = _SLOTS[devices.platform] >> halvings
        parts = count_slots(spec, size, slots, 2 * QUESTION, LONGEST, kernel=False)
        if weights + sum(parts.values()) <= _FULL * room:
            break
    return max(slots, 1)


def _write_own(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Lets the model write the text that `own` among --text stands for, or goes on."""
    if args.own is None:
        return
    devices = runtime.device_summary()
    on_cpu = devices.platform == "cpu"
    weights, dtype = ("dense", "float32") if on_cpu else ("packed", "bfloat16")
    load = functools.partial(_load_source, args, checkpoint, weights=weights, dtype=dtype)
    slots = _fit_slots(checkpoint.spec, devices)
    args.own.fill(devices.platform).write(checkpoint, load, slots)
    args.sources = args.own.name_sources(checkpoint.tokenizer)


def _shrink(args: argparse.Namespace, checkpoint: Checkpoint, goal: _Goal) -> None:
    args.rank = _choose_rank(args, checkpoint)
    room = Machine.here().summary.memory_bytes
    if missing := _name_fewer_rows(args, checkpoint.spec, room):
        sizes = (x / 1e9 for x in (_count_measuring(checkpoint.spec, args), room or 0))
        _log.warning("importance, costs and GPTQ take about %.1f GB of %.1f: %s", *sizes, missing)
    check_place(args.work / "types.txt")
    _write_own(args, checkpoint)
    settings = _make_config(args, checkpoint.spec, "").data
    work = _Work(args, checkpoint, prepare(settings, checkpoint.tokenizer))
    imatrix = work.measure_importance()
    costs = work.measure_costs(imatrix)
    mixture = choose_mixture(costs, checkpoint.spec, goal.matrices)
    types = work.folder / "types.txt"
    mixture.write(types)
    free = _count_free(mixture, checkpoint)
    print(f"{types}: {_count_types(mixture)}; {free} of them have the type that the source stores")
    recipe = _find_recipe(args, checkpoint, count_gguf_bytes(checkpoint, mixture))
    spread = work.spread(imatrix)
    imatrix = imatrix if mixture.searches else ""
    make = work.train if args.train else work.round
    student, how = make(mixture, types, imatrix)

    def named(other: Mixture) -> Callable[[], tuple[Any, int]]:
        nbytes = count_gguf_bytes(checkpoint, other)
        return lambda: (round_params(work.load().params, other, spread), nbytes)

    def written(file: Path) -> tuple[Any, int]:
        return _load(open_checkpoint(file), dtype="float32").params, file.stat().st_size

    files = {f"{recipe}, {work.weighed}": named(Mixture.named(recipe, checkpoint.spec))}
    files[f"chosen types, {work.weighed}"] = named(mixture)
    with stage(args.out, folder=False, overwrite=args.overwrite) as aside:
        summary = export_gguf(student, aside)
        del student
        files[f"{args.out.name}, {how}"] = lambda: written(aside)
        found = _prove(work, files)
        _write_card(args, work, mixture, found, free)  # first: a call that finds --out does nothing
    print(f"{args.out}: {summary}", "", *_format_table(found), sep="\n")
    print(f"\nKL and agreement on {next(iter(found.values()))['positions']:,} positions")
    out = shlex.quote(str(args.out))
    print("next:", f"  kdjax generate {out} {PROMPT}", f"  llama-server -m {out}", sep="\n")


def _write_card(
    args: argparse.Namespace, work: _Work, mixture: Mixture, found: Mapping[str, Any], free: int
) -> None:
    """Writes what the file was made of next to it."""
    of = work.checkpoint
    lines = [
        f"{begin_card(args.out.name)}{of.path.name} (SHA-256 `{of.sha256}`), on text of "
        f"`{args.text}`. Types: {_count_types(mixture)}.",
        f"{free} matrices have the type of the source and lie on its lattice, so that their KL "
        "from the source is 0.",
        "",
        *_format_table(found),
        "",
        "KL and agreement are from the source, on held-out text that neither chose nor trained. "
        "`types.txt` in the work folder is a file for `llama-quantize --tensor-type-file`.",
    ]
    with replacing(place_card(args.out)) as file:
        file.write(("\n".join(lines) + "\n").encode())


def _count_measuring(spec: ArchSpec, args: argparse.Namespace) -> int:
    """Bytes that importance, costs, GPTQ and proof take; costs of an earlier call take none.

    They are float32 weights, stacks, states, logits and Hessians.
    """
    weights = count_parameters(spec)
    stacks: dict[tuple[str, ...], int] = {}
    for part in list_single_matrices(spec):
        stacks[part.path] = stacks.get(part.path, 0) + math.prod(part.shape)
    # Of each layer, and of those that take turns.
    states = (8 + spec.num_layers) * args.rows * args.seq_len * spec.hidden_size
    logits = 4 * min(1024, args.rows * args.seq_len) * spec.vocab_size
    others = weights if args.costs else _STACKS * max(stacks.values())  # of a proof, or a cost
    needed = 4 * (weights + others + states + logits)
    if not gptq.suits(spec) or (args.train and args.rank):  # adapters begin at the model's numbers
        return needed
    # Of the model itself and of what is rounded: states of all rows, those after a layer of one of
    # both, and a batch's inputs.
    read = 3 * max(_READ, args.rows) * spec.hidden_size + 2 * args.rows * spec.mlp_size
    rounds = 4 * (2 * weights + args.seq_len * read)
    return max(needed, rounds + gptq.count_rounding_bytes(spec))


def _name_fewer_rows(args: argparse.Namespace, spec: ArchSpec, room: int | None) -> str:
    """Says what would fit where importance, costs and GPTQ do not; empty if they do."""

    def fits(rows: int) -> bool:
        fewer = argparse.Namespace(**vars(args) | {"rows": rows})
        return room is None or _count_measuring(spec, fewer) <= room

    if fits(args.rows):
        return ""
    halves = (args.rows >> n for n in range(1, args.rows.bit_length()))
    rows = next(filter(fits, halves), 0)
    other = "" if args.costs else ", or --costs of another"
    return f"take --rows={rows}{other}" if rows else f"take a larger device{other}"


def _plan(args: argparse.Namespace, checkpoint: Checkpoint) -> int:
    """Prints sizes, passes, minutes and memory; loads nothing."""
    machine = args.machine
    with cluster.started("off", lean=True) as here:
        checkpoint, goal = _prepare(args, checkpoint)
        spec = checkpoint.spec
        passes = sum(len(list_types(parts)) for parts in list_matrices(spec).values())
        positions = args.rows * args.seq_len
        head = 2 * spec.vocab_size * spec.hidden_size  # of a token; of the layers half, on average
        flops = passes * positions * (spec.forward_flops(args.seq_len) + head) / 2
        recipe = _find_recipe(args, checkpoint, goal.nbytes)
        devices = here if machine is None else machine.summary
        peak = devices.peak_flops and devices.peak_flops / devices.count
        minutes = f", about {flops / peak / _SHARE / 60:,.1f} minutes" if peak else ""
        if args.own is not None:
            ids = args.own.fill(devices.platform).count_ids()
            writing = ids * spec.forward_flops(args.seq_len)
            took = f" in about {writing / peak / _WRITING / 60:,.1f} minutes" if peak else ""
            print(f"self-generated text: at most {ids:,} ids{took}")
        print(f"{args.out}: at most {goal.nbytes / 1e6:,.1f} MB, compared with {recipe}")
        if args.costs is None:
            print(f"costs: {passes:,} passes of {positions:,} positions{minutes}")
        args.rank = _choose_rank(args, checkpoint)
        room, needed = devices.memory_bytes, _count_measuring(spec, args)
        of = f" of {room / 1e9:,.1f} GB" if room else ""
        print(f"arrays of importance, costs and GPTQ: about {needed / 1e9:,.1f} GB{of}")
        if missing := _name_fewer_rows(args, spec, room):
            print(f"that is too much: {missing}")
        if not args.train:
            return BAD_INPUT if missing else FINISHED
        if args.seconds:
            print(f"training: {args.seconds / 60:,.1f} minutes, and evaluations")
        status = print_plan(survey_headers(_make_config(args, spec, recipe), machine, _FLAGS))
        return BAD_INPUT if missing else status


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.machine = find_machine(args, parser)
    log_to_terminal()
    _check_flags(args)
    checkpoint = open_checkpoint(args.model)
    if checkpoint.saved is not None or checkpoint.adapters is not None:
        raise UserError(
            f"{checkpoint}: found a run or adapters; expected a model file or folder. Export it "
            "first: kdjax export --format=gguf."
        )
    check_sources(args.out, checkpoint.table.paths)
    check_seq_len(args, checkpoint)
    if args.plan:
        return _plan(args, checkpoint)
    try:
        with started():  # first: a head that is compared starts JAX
            checkpoint, goal = _prepare(args, checkpoint)
            check_place(args.out)
            with holding(args.work, "give another --work"):
                _shrink(args, checkpoint, goal)
    except KeyboardInterrupt:
        print(f"stopped; {args.work} has what is done, and the same command goes on from there")
        return INTERRUPTED
    return FINISHED
