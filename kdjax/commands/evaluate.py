"""Measures a model: held-out text, a teacher, HumanEval and MBPP, and whether it is broken.

    kdjax evaluate runs/a --data=corpus/heldout --teacher=teacher.gguf@packed
    kdjax evaluate student.gguf --humaneval=HumanEval.jsonl.gz --mbpp=mbpp.jsonl --json=out.json

TARGET is a workdir (its best checkpoint), a step folder of one, a GGUF or .apr file, a Hugging
Face folder, or hf:ORG/REPO[/FILE] of the Hub. FORM is dense (the default), packed or float8, then
nothing or :bfloat16 or :float32. Processes that an engine started share rows, answers and programs;
the first prints.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import sys
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from kdjax.commands.parsing import (
    Parser,
    add_cluster_flags,
    add_fields_flag,
    check_least,
    check_seq_len,
    log_to_terminal,
    started,
)
from kdjax.config import OWN_BLOCK
from kdjax.data.fields import Fields
from kdjax.data.sources import find_files
from kdjax.device import cluster, sharding
from kdjax.device.placement import Placement
from kdjax.errors import (
    BROKEN,
    FINISHED,
    INFERENCE_FAILED,
    PEER_LOST,
    MissingFileError,
    UserError,
    WriteError,
    describe_error,
    reporting,
    status_of,
)
from kdjax.evaluation import drafting, heldout, passk, problems, sandbox, table
from kdjax.evaluation.health import examine
from kdjax.evaluation.health.detectors import Finding
from kdjax.evaluation.target import Target, open_target
from kdjax.export.staging import check_sources
from kdjax.formats.files import check_place
from kdjax.hub import fetch_path
from kdjax.models.checkpoint import Checkpoint, ModelArgument
from kdjax.models.decoding import Sampling, find_room
from kdjax.models.drafts import warn_if_refused
from kdjax.models.heads import is_head
from kdjax.models.model import Model
from kdjax.training.vocabulary import Vocabulary

_log = logging.getLogger("kdjax")
OTHER = "target"  # value of --draft: the target drafts for the teacher
_Name = TypeVar("_Name", bound=Hashable)


def parser() -> Parser:
    """The flags."""
    flags = Parser("evaluate", __doc__, INFERENCE_FAILED, BROKEN, PEER_LOST)
    add = flags.add_argument
    add("target", metavar="TARGET", help="workdir, step folder, model file or folder, with @FORM")
    add("--student", default="", help="the file that a checkpoint's run began with")
    add(
        "--tokenizer",
        default="",
        help="in place of the target's; of the teacher's too if unreadable",
    )
    text = "held-out text of one domain: folders, globs, files, joined by commas"
    add("--data", action="append", default=[], metavar="[NAME=]PATHS", help=text)
    add_fields_flag(add)
    add("--teacher", default="", metavar="PATH[@FORM]", help="to compare with on --data")
    draft = "measure instead the target as a draft for --teacher: --rows prompts of --data, "
    draft += "which the teacher continues; own: its drafting block as a draft for the target; a "
    draft += "GGUF file or a folder of speculators: a DSpark, DFlash or EAGLE-3 head for it"
    add("--draft", nargs="?", const=OTHER, default="", metavar="WHAT", help=draft)
    ratio = "a pass of the draft, in passes of the teacher; default: measured here, on one row"
    add("--cost-ratio", type=float, metavar="C", help=ratio)
    add("--rows", type=int, default=64, help="rows of each domain, at most")
    add("--seq-len", type=int, default=1024, help="positions a row; --draft takes --max-tokens")
    special = "in plain text <|endoftext|> and similar are special ids, as with data.parse_special"
    add("--parse-special", action="store_true", help=special)
    add("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz")
    add("--mbpp", type=Path, metavar="FILE", help="mbpp.jsonl or sanitized-mbpp.json")
    add("--limit", type=int, default=0, help="only the first problems of each; 0: all")
    words = "auto: by the chat template; all: three wordings greedily, then 5 samples of the first"
    add("--wording", choices=(*problems.WORDINGS, "auto", "all"), default="auto", help=words)
    add("--samples", type=int, help="answers to each problem; default: 1")
    add("--k", default="1", help="pass@k for these k, such as 1,10")
    add("--temperature", type=float, help="default: 0, or 0.8 for several samples")
    add("--top-p", type=float, default=0.95, help="has no effect at temperature 0")
    add("--max-tokens", type=int, default=768, help="of an answer")
    add("--seed", type=int, default=0, help="of draws at a temperature above 0")
    add("--timeout", type=float, default=sandbox.DEFAULT.wall_seconds, help="seconds a program")
    add(
        "--allow-unsandboxed",
        action="store_true",
        help="run programs where bubblewrap cannot confine them",
    )
    text = "do not look whether the model is broken; the exit status does not say it either"
    add("--no-health", action="store_true", help=text)
    add("--batch-size", type=int, default=8, help="rows at a time")
    add("--json", type=Path, help="write everything there, answers too")
    add_cluster_flags(flags)
    return flags


class BenchmarkPass(NamedTuple):
    """One way to ask the problems of a benchmark; its name follows the benchmark's."""

    name: str
    wording: str
    ks: tuple[int, ...]
    samples: int
    sampling: Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    """The flags, checked; files other than the models are read."""

    args: argparse.Namespace
    domains: dict[str, str]
    benchmarks: dict[str, list[problems.Problem]]
    passes: tuple[BenchmarkPass, ...]

    @property
    def asked(self) -> dict[str, tuple[list[problems.Problem], BenchmarkPass]]:
        """Problems and the ways to ask them, by the name of their figures in the document."""
        every = itertools.product(self.benchmarks.items(), self.passes)
        return {f"{name}{way.name}": (benchmark, way) for (name, benchmark), way in every}

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the long measurements in the document, in their order."""
        read = ("draft" if self.args.draft else "held_out",) if self.domains else ()
        return (*self.asked, *read)


def check(args: argparse.Namespace) -> Request:
    """Raises `UserError` for flags that cannot work, before a model is read."""
    least = {"rows": 1, "samples": 1, "max_tokens": 1, "batch_size": 1, "seq_len": 2, "limit": 0}
    check_least(args, **least)
    if args.teacher and not args.data:
        raise UserError("--teacher is compared on text: name some with --data=PATHS.")
    if args.draft == OTHER and not args.teacher:
        raise UserError("--draft: name the model that it is to draft for with --teacher=PATH.")
    own = args.draft not in ("", OTHER)
    if own and args.draft != OWN_BLOCK and not is_head(Path(args.draft)):
        raise UserError(
            f"--draft={args.draft}: found no file or folder of a head; expected one, {OTHER} "
            f"or {OWN_BLOCK}. A separate model is the target: --teacher names what it drafts for."
        )
    if own and (args.teacher or not args.data):
        raise UserError(
            f"--draft={args.draft}: the target drafts for itself: give --data and no --teacher."
        )
    if args.draft and args.parse_special:
        raise UserError("--parse-special has no meaning with --draft: leave it out.")
    if args.cost_ratio is not None and not (args.draft and args.cost_ratio > 0):
        raise UserError(
            f"--cost-ratio={args.cost_ratio:g} must be a number above 0, and needs --draft."
        )
    passes = _list_passes(args)
    models = filter(None, (args.target, args.teacher))
    sources: list[str | Path] = [ModelArgument.parse(text).path for text in models]
    split = [text.partition("=") for text in args.data]
    domains = {name: paths if equals else name for name, equals, paths in split}
    if len(domains) < len(split) or ("all" in domains and len(domains) > 1):
        raise UserError(
            f"--data: found the names {', '.join(name for name, *_ in split)}; expected a "
            "different one for each, and no `all`, which names all of them together."
        )
    if not all(domains.values()):
        raise UserError("--data: found a name without paths; expected --data=NAME=PATHS.")
    if not all(domains):
        raise UserError("--data: found paths without a name; expected --data=NAME=PATHS.")
    for patterns in domains.values():
        sources += find_files(patterns, Fields.parse(args.fields))
    benchmarks = {
        name: read(path)[: args.limit or None]
        for name, read in problems.BENCHMARKS.items()
        if (path := getattr(args, name)) is not None
    }
    if benchmarks:
        sandbox.check(args.allow_unsandboxed)
    if args.json:
        check_sources(args.json, [*sources, args.draft, args.humaneval, args.mbpp], "--json")
        check_place(args.json)
    return Request(args, domains, benchmarks, passes)


def _list_passes(args: argparse.Namespace) -> tuple[BenchmarkPass, ...]:
    """The ways to ask; `all` shows whether a gain holds for more than one wording."""
    every = args.wording == "all"
    samples = args.samples or (5 if every else 1)
    temperature = args.temperature
    if temperature is None:
        temperature = 0.0 if samples == 1 else 0.2 if every else 0.8
    try:
        ks = tuple(sorted({int(k) for k in args.k.split(",")}))
    except ValueError:
        raise UserError(f"--k={args.k}: expected whole numbers such as 1,10.") from None
    if not all(1 <= k <= samples for k in ks):
        raise UserError(f"--k={args.k}: each must be between 1 and --samples={samples}.")
    sampling = Sampling(args.max_tokens, temperature, args.top_p, seed=args.seed)
    passk.check_asked(sampling, samples, args.timeout)
    if every and samples == 1 and temperature:
        raise UserError(
            f"--temperature={temperature:g}: has no meaning with --wording=all and one sample; "
            "expected 0, or --samples=5: wordings are compared greedily."
        )
    if not every:
        return (BenchmarkPass("", args.wording, ks, samples, sampling),)
    greedy = dataclasses.replace(sampling, temperature=0.0)
    first, *others = problems.COMPARED
    passes = [BenchmarkPass("", first, (1,), 1, greedy)]
    passes += [BenchmarkPass(f" {wording}", wording, (1,), 1, greedy) for wording in others]
    if samples > 1:
        passes.append(BenchmarkPass(f" {first} x{samples}", first, ks, samples, sampling))
    return tuple(passes)


class _ModelFailedError(Exception):
    """The model stopped the evaluation: the message names the step and the error."""


@contextlib.contextmanager
def _model_at_work(step: str, *, alone: bool = True) -> Iterator[None]:
    """Blames errors of a step on the model, but for bad input where it does not work `alone`."""
    _say(step)
    try:
        yield
    # Out of memory, a missing tensor, an operation that XLA refuses: each means no figures.
    except Exception as error:
        if isinstance(error, UserError) and not alone:  # a text's or the other model's fault
            raise
        raise _ModelFailedError(f"{step}: {describe_error(error)}"[:2000]) from error


def evaluate(request: Request) -> tuple[dict[str, Any], int]:
    """Measures everything requested: returns the document and the exit status.

    An error first shows and writes the finished parts, and is then raised again. Raises
    `UserError` for paths that do not exist and a teacher that cannot be compared with.
    """
    args = request.args
    cluster.check_agreement("request", vars(args))
    for text in filter(None, (args.target, args.teacher)):
        fetch_path(ModelArgument.parse(text).path)
    document: dict[str, Any] = {"target": args.target, "mode": passk.INFERENCE, "broken": []}
    if request.benchmarks:
        document["sandbox"] = sandbox.describe(sandbox.held())
    teacher = open_target(args.teacher, fallback=args.tokenizer) if args.teacher else None
    try:
        _measure(document, request, teacher)
    except _ModelFailedError as failure:
        document |= {"mode": passk.INFERENCE_FAILED, "inference_error": str(failure)}
        for name, (benchmark, way) in request.asked.items():
            if name not in document:
                document[name] = _fail_benchmark(request, benchmark, way, str(failure))
    except BaseException as error:  # a user who stops it, a disk, a bug
        if (left := _list_left(document, request)) != request.parts and jax.process_index() == 0:
            _show(document | {"unfinished": left, "status": status_of(error)}, args.json)
        raise
    modes = [document["mode"], *(document[name]["mode"] for name in request.asked)]
    if passk.INFERENCE_FAILED in modes:
        return document, INFERENCE_FAILED
    return document, BROKEN if document["broken"] else FINISHED


def _measure(document: dict[str, Any], request: Request, teacher: Target | None) -> None:
    """Adds all measurements of the model to `document`."""
    args = request.args
    try:
        target = open_target(args.target, args.student, args.tokenizer)
    except MissingFileError:
        raise
    except UserError as error:
        if _opens_alone(args.target):  # so the form, --student or --tokenizer is at fault
            raise
        # The target exists, but is not a model that could answer.
        raise _ModelFailedError(str(error)) from error
    document["model"] = str(target)
    vocabulary = _check_together(request, target.checkpoint, teacher and teacher.checkpoint)
    texts, prompts = _read_domains(request, target, teacher)
    heldout.learn_texts(vocabulary, target, teacher, texts)
    if not args.no_health:
        with _model_at_work("reading the model"):
            _add_findings(document, examine.of_files(target.checkpoint))
    mesh = sharding.make_local_mesh()
    _run_model(document, request, target, mesh)
    if request.domains and not args.draft:
        document |= {"teacher": args.teacher, "held_out": None}
        with _model_at_work("held-out text", alone=False):
            document["held_out"] = heldout.measure(
                target, teacher, texts, mesh, batch_size=args.batch_size, vocabulary=vocabulary
            )
        if not args.no_health:
            with _model_at_work("comparing held-out figures", alone=False):
                figures, real = document["held_out"], vocabulary.real
                found = examine.of_figures(figures, real, target, teacher, mesh)
            _add_findings(document, found[0])
            document["bit_cost"] = found[1]
    if args.draft:
        document |= {"teacher": args.teacher or args.target, "draft": None}
        if teacher is not None:
            warn_if_refused(teacher.checkpoint, target.checkpoint)
        with _model_at_work("drafting", alone=False):
            document["draft"] = drafting.measure(
                target if teacher else None,
                teacher or target,
                prompts,
                mesh,
                new_tokens=args.max_tokens,
                batch_size=args.batch_size,
                cost_ratio=args.cost_ratio,
                seed=args.seed,
                own=drafting.find_own(args.draft, target.checkpoint),
            )


def _opens_alone(target: str) -> bool:
    """Whether the target opens as a model without its form, --student and --tokenizer."""
    try:
        open_target(ModelArgument.parse(target).path)
    except UserError:
        return False
    return True


def _list_left(document: dict[str, Any], request: Request) -> tuple[str, ...]:
    """Lists the parts of the request that have no figures yet."""
    return tuple(name for name in request.parts if document.get(name) is None)


def _keep(document: dict[str, Any], request: Request) -> None:
    """Writes the finished parts to --json, unless all are done: a kill leaves no time to write."""
    path, left = request.args.json, _list_left(document, request)
    if path and left and jax.process_index() == 0:
        try:
            table.write(path, _json_able(document | {"unfinished": left, "status": None}))
        except WriteError as error:  # written again later, then to a temporary file
            _log.warning("%s", error)


def _read_domains(
    request: Request, target: Target, teacher: Target | None
) -> tuple[dict[str, heldout.Text], dict[str, list[list[int]]]]:
    """Reads rows or, with a draft, prompts of each domain.

    Raises `UserError` for text that cannot be read, before the model works for hours.
    """
    args = request.args
    fields = Fields.parse(args.fields)
    if args.draft:
        draft, served = (target, teacher) if teacher else (None, target)
        sizes = {"count": args.rows, "new_tokens": args.max_tokens}
        read = functools.partial(drafting.read_prompts, draft, served, fields=fields)
        return {}, read(request.domains, **sizes)
    read = functools.partial(
        heldout.read_text,
        tokenizer=target.checkpoint.tokenizer,
        rows=args.rows,
        seq_len=args.seq_len,
        parse_special=args.parse_special,
        fields=fields,
    )
    return {name: read(patterns) for name, patterns in request.domains.items()}, {}


def _count_prompts(request: Request, checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Ids of each problem's prompt, by round; leaves out prompts without room for an answer."""
    tokenizer, counted = checkpoint.tokenizer, {}
    for name, (benchmark, way) in request.asked.items():
        wording = problems.choose_wording(way.wording, tokenizer)
        settings, lengths = _settings(request, way, wording, checkpoint), []
        for problem in benchmark:
            with contextlib.suppress(UserError):  # counts as a failure of the problem
                lengths.append(len(passk.encode_prompt(problem, tokenizer, settings)))
        counted[name] = lengths
    return counted


def find_rooms(
    counted: Mapping[_Name, Sequence[int]], max_tokens: int, placement: Placement | None
) -> dict[_Name, int]:
    """Positions of a slot for prompts of these numbers of ids, by round.

    If kernels read only the used part of a slot, all rounds have equal slots and share programs;
    elsewhere each step reads the full slot.
    """
    rooms = {name: find_room(lengths, max_tokens) for name, lengths in counted.items()}
    if placement is not None and placement.kernels:
        return dict.fromkeys(rooms, max(rooms.values(), default=0))
    return rooms


def _say(step: str) -> None:
    """Logs what begins: on a CPU it may take an hour."""
    if jax.process_index() == 0:
        _log.info("%s", step)


def _add_findings(document: dict[str, Any], findings: Sequence[Finding]) -> None:
    """Adds findings, and prints them at once: benchmarks may take an hour from here."""
    for finding in findings if jax.process_index() == 0 else ():
        print(f"BROKEN {finding.detector}: {finding.evidence}", file=sys.stderr)
    document["broken"] += [dataclasses.asdict(finding) for finding in findings]


def _check_together(
    request: Request, checkpoint: Checkpoint, teacher: Checkpoint | None
) -> Vocabulary:
    """Finds the ids to compare; raises `UserError` for requests that this model cannot fulfil."""
    args = request.args
    asked = "same" if args.draft else "auto"
    vocabulary = heldout.shared_vocabulary(checkpoint, teacher, asked)
    drafting.find_own(args.draft, checkpoint)
    most = checkpoint.spec.max_positions
    if request.domains and not args.draft:  # a draft's rows are as long as prompts and answers
        check_seq_len(args, checkpoint)
        check_seq_len(args, teacher or checkpoint, "teacher")
    if request.benchmarks and args.max_tokens >= most:
        raise UserError(
            f"--max-tokens={args.max_tokens} leaves no room for a prompt in {most} "
            "positions; lower it."
        )
    chats = {*problems.CHATS, "all"}
    if request.benchmarks and args.wording in chats and not checkpoint.tokenizer.chat_template:
        raise UserError(
            f"--wording={args.wording}: the tokenizer has no chat template; use base or bare."
        )
    return vocabulary


def _run_model(document: dict[str, Any], request: Request, target: Target, mesh: Mesh) -> None:
    """Loads the model, measures it, and frees it on return."""
    with _model_at_work("loading the model"):
        model = target.load(mesh)
    if not request.args.no_health:
        _examine(document, model)
    for name, figures in solve(request, model, target.checkpoint):
        document[name] = figures
        _keep(document, request)


def _examine(document: dict[str, Any], model: Model) -> None:
    """Adds what the model's logits and answers say of its health."""
    with _model_at_work("looking whether it is broken"):
        findings, document["probe"] = examine.of_logits(model)
    _add_findings(document, findings)
    with _model_at_work("letting it answer"):
        findings, document["probe"]["answers"] = examine.of_answers(model)
    _add_findings(document, findings)


def solve(
    request: Request, model: Model, checkpoint: Checkpoint, *others: Request
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the model's results on each benchmark, by their name in the document.

    Ids and positions are the checkpoint's. `others` are requests for equally many tokens, whose
    calls shall share programs with these.
    """
    tokenizer = checkpoint.tokenizer
    counted = {
        (number, name): lengths
        for number, one in enumerate((request, *others))
        for name, lengths in _count_prompts(one, checkpoint).items()
    }
    rooms = find_rooms(counted, request.args.max_tokens, model.placement)

    def benchmarks() -> Iterator[passk.Benchmark]:
        for name, (benchmark, way) in request.asked.items():
            wording = problems.choose_wording(way.wording, tokenizer)
            settings = _settings(request, way, wording, checkpoint)
            _say(f"{name}: {len(benchmark)} problems, {settings.samples} answers to each")
            room = rooms[0, name]
            generate = passk.answer_with(model, tokenizer, way.sampling, settings, room)
            yield passk.Benchmark(benchmark, generate, settings)

    yield from zip(request.asked, passk.run_benchmarks(benchmarks(), tokenizer), strict=True)


def _settings(
    request: Request, way: BenchmarkPass, wording: str, checkpoint: Checkpoint | None
) -> passk.Settings:
    args = request.args
    return passk.Settings(
        wording=wording,
        samples=way.samples,
        ks=way.ks,
        batch_size=args.batch_size,
        room=checkpoint.spec.max_positions - args.max_tokens if checkpoint else None,
        limits=sandbox.allow(args.timeout),
        allow_unsandboxed=args.allow_unsandboxed,
    )


def _fail_benchmark(
    request: Request, benchmark: Sequence[problems.Problem], way: BenchmarkPass, error: str
) -> dict[str, Any]:
    """A benchmark whose every sample failed because the model does not run."""
    settings = _settings(request, way, way.wording, None)
    samples = [
        passk.Sample(problem.task, passk.INFERENCE_FAILED, error, "", "")
        for problem in benchmark
        for _ in range(settings.samples)
    ]
    return passk.summarise(benchmark, samples, settings)


def _json_able(value: Any) -> Any:
    """Writes NaN and infinities as text: JSON has none, and null would hide which."""
    if isinstance(value, dict):
        return {key: _json_able(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_able(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    request = check(parser().parse_args(argv))
    log_to_terminal()
    with started(request.args):
        document, status = evaluate(request)
        if jax.process_index() == 0:
            _show(document | {"status": status}, request.args.json)
        if "inference_error" in document and jax.process_count() > 1:
            raise SystemExit(status)  # the other processes notice: they may wait for its rows
    return status


def _show(document: dict[str, Any], path: Path | None) -> None:
    try:
        print(table.text(document), flush=True)
    finally:  # also if printing fails
        if path:
            _write(path, _json_able(document))
            if "unfinished" in document:
                _log.info("finished parts are in %s", path)


def _write(path: Path, document: dict[str, Any]) -> None:
    """Writes the document; on a full disk to the temporary folder: it may hold hours of work."""
    try:
        table.write(path, document)
    except WriteError as error:
        aside = Path(tempfile.gettempdir(), f"kdjax-{os.getpid()}-{path.name}")
        table.write(aside, document)
        raise WriteError(f"{error} The figures are in {aside}.") from error
