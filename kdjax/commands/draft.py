"""Makes a draft for the very GGUF file that is served, by one command.

    kdjax draft model-q4_k_m.gguf --out=model-drafting.gguf
    kdjax draft big.gguf --kind=small --draft=small.gguf --prompts=prompts.jsonl --out=draft.gguf

MODEL is the served file, as for `kdjax evaluate`, packed by default. It answers the prompts, and
the draft is trained on its answers, or on the text of --data, towards what MODEL says there.

--kind=mtp trains the next-token block of MODEL's own file (Qwen3.5 and its like) by total
variation, which is the share of its drafts that the model rejects. The layers stay as they are, bit
for bit. (Rates of delta layers are stored as logarithms; they stay so if they were bfloat16, as in
published models, else they may change in the last bit.) For a model without a block --new begins
one. --kind=dspark or dflash trains a head that reads inner states of MODEL and drafts several
tokens in one pass, for llama.cpp's draft-dspark or draft-dflash; --kind=eagle3 trains one that
drafts a token a pass, for draft-eagle3. --kind=small trains a small model of the same vocabulary.

The parts: answers, training, export, proof. Each is stored next to --out, and the same command goes
on from there. The training is a run of `kdjax train`: --config.FIELD=VALUE sets any other field.
"""

import argparse
import dataclasses
import itertools
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax

from kdjax.commands import answers
from kdjax.commands.export import read_model
from kdjax.commands.parsing import (
    PROMPT,
    Parser,
    RunCommand,
    add_cluster_flags,
    add_fields_flag,
    allow_degenerate,
    check_least,
    find_work,
    log_to_terminal,
    override,
    read_paths,
    require_files,
    started,
)
from kdjax.commands.plan import add_machine_flags, find_machine, plan_run
from kdjax.commands.train import ENDS, carry_out, check_workdir
from kdjax.config import DSPARK, EAGLE3, NEW, OWN_BLOCK, SELF, Config, set_fields, validate
from kdjax.data.fields import Fields
from kdjax.data.rows import count_enough
from kdjax.data.sources import find_files
from kdjax.data.text import openings
from kdjax.device import cluster, sharding
from kdjax.errors import FINISHED, UserError, reporting
from kdjax.evaluation import drafting
from kdjax.evaluation.target import Target, open_target
from kdjax.export import export_gguf
from kdjax.export.formats import GGUF_TYPES
from kdjax.export.heads import HEAD_TYPES, export_head
from kdjax.export.staging import check_sources, check_suffix, check_target, stage
from kdjax.formats import open_table
from kdjax.formats.blocks import ENCODED
from kdjax.formats.files import check_place
from kdjax.formats.saved import CHECKPOINTS, read_receipt
from kdjax.models.checkpoint import Checkpoint, ModelArgument, open_checkpoint, open_step
from kdjax.models.drafts import check_same_ids, warn_if_refused, why_refused
from kdjax.models.heads import check_tapped, load_saved_head, read_shape
from kdjax.models.nextn import find_block, pack_block, take_block
from kdjax.progress import silence
from kdjax.training.inputs import prepare, row_settings
from kdjax.training.job import survey

_log = logging.getLogger("kdjax")

_PROMPTS = "python:jax,flax,optax,numpy"  # whose beginnings MODEL continues
_JUDGED = 128  # ids of each answer that judges the draft


# A draft model, None if inner states of the model draft; the model; what drafts with them, None for
# the model's own block.
_Opened = tuple[Target | None, Target, drafting.OwnDraft | None]


class _Block:
    """The next-token block of the served file."""

    rate: ClassVar[float] = 3e-4
    types: ClassVar[Sequence[str]] = tuple(x.lower() for x in ENCODED)
    type: ClassVar[str] = "q8_0"

    def check_flags(self, args: argparse.Namespace) -> None:
        """Raises `UserError` for flags that this kind does not take."""
        if args.draft:
            raise UserError("--draft names a small model: give --kind=small, or leave it out.")

    def check_models(self, args: argparse.Namespace) -> None:
        """Raises `UserError` for models that this kind does not take."""
        served = _open_served(args)
        find_block(served.spec, served, new=args.new)

    def fill(self, config: Config, args: argparse.Namespace) -> None:
        """Sets what trains, and how."""
        config.teacher.path, config.student.path = SELF, _served(args)
        config.student.block = NEW if args.new else OWN_BLOCK
        config.loss.divergence = "total_variation"
        config.optim.final_learning_rate = args.learning_rate / 10

    def write(self, args: argparse.Namespace, checkpoint: Checkpoint, file: Path) -> None:
        """Writes the model with its trained block."""
        block = take_block(read_model(checkpoint))
        export_gguf(pack_block(block, args.type.upper()), file, overwrite=True)

    def open(self, args: argparse.Namespace, file: Path) -> _Opened:
        """Opens the model, whose own block drafts."""
        return None, open_target(str(file) + _form(args.model)), None

    def list_next(self, args: argparse.Namespace, drafts: int) -> list[str]:
        """Commands that use the file."""
        out = shlex.quote(str(args.out))
        return [
            f"  llama-server -m {out} --spec-type draft-mtp --spec-draft-n-max {drafts}",
            f"  kdjax generate {out} --draft=own {PROMPT}",
        ]


@dataclasses.dataclass(frozen=True)
class _Head:
    """A head that reads inner states of MODEL."""

    fields: Mapping[str, Any]  # of the run, by dotted names

    rate: ClassVar[float] = 6e-4
    types: ClassVar[Sequence[str]] = HEAD_TYPES
    type: ClassVar[str] = "f16"

    def check_flags(self, args: argparse.Namespace) -> None:
        """Raises `UserError` for flags that this kind does not take."""
        for flag, name in ((args.draft, "--draft"), (args.new, "--new")):
            if flag:
                raise UserError(f"{name} has no meaning with --kind={args.kind}: leave it out.")

    def check_models(self, args: argparse.Namespace) -> None:
        """Raises `UserError` for models that this kind does not take."""
        served = _open_served(args)
        check_tapped(served.spec, served)

    def fill(self, config: Config, args: argparse.Namespace) -> None:
        """Sets what trains, and how."""
        config.teacher.path, config.student.path = SELF, _served(args)
        set_fields(config, self.fields)
        config.loss.divergence, config.loss.alpha = "total_variation", 0.1
        config.optim.final_learning_rate = args.learning_rate / 10

    def write(self, args: argparse.Namespace, checkpoint: Checkpoint, file: Path) -> None:
        """Writes the trained head."""
        head = load_saved_head(read_model(checkpoint))
        export_head(head, file, dtype=args.type.lower(), overwrite=True)

    def open(self, args: argparse.Namespace, file: Path) -> _Opened:
        """Opens the model, and what drafts for it."""
        served = open_target(_served(args) + _form(args.model))
        return None, served, drafting.open_head(file, served.checkpoint)

    def list_next(self, args: argparse.Namespace, drafts: int) -> list[str]:
        """Commands that use the file."""
        shape = read_shape(open_table(args.out), _open_served(args).spec)
        return _list_paired(args, f"draft-{shape.kind}", drafts)


class _Small:
    """A small model of the same vocabulary."""

    rate: ClassVar[float] = 2e-5
    types: ClassVar[Sequence[str]] = GGUF_TYPES
    type: ClassVar[str] = "q8_0"

    def check_flags(self, args: argparse.Namespace) -> None:
        """Raises `UserError` for flags that this kind does not take."""
        if not args.draft:
            raise UserError("--kind=small: name the small model that trains: --draft=SMALL.gguf.")
        if args.new:
            raise UserError("--new begins a block; expected none with --kind=small. Leave it out.")

    def check_models(self, args: argparse.Namespace) -> None:
        """Raises `UserError` for models that this kind does not take."""
        served, small = _open_served(args), open_checkpoint(args.draft)
        check_same_ids(served.tokenizer, small.tokenizer)
        warn_if_refused(served, small)

    def fill(self, config: Config, args: argparse.Namespace) -> None:
        """Sets what trains, and how: as configs/draft_1p5b_0p5b.py."""
        config.teacher.path, config.student.path = _served(args), args.draft
        config.loss.divergence = "0.3*forward_kl+0.7*total_variation"
        config.optim.final_learning_rate = 0.0

    def write(self, args: argparse.Namespace, checkpoint: Checkpoint, file: Path) -> None:
        """Writes the trained model."""
        export_gguf(read_model(checkpoint), file, dtype=args.type.lower(), overwrite=True)

    def open(self, args: argparse.Namespace, file: Path) -> _Opened:
        """Opens the draft and the model."""
        form = _form(args.model)
        return open_target(str(file) + form), open_target(_served(args) + form), None

    def list_next(self, args: argparse.Namespace, drafts: int) -> list[str]:
        """Commands that use the file; in place of the server's, why it would draft nothing."""
        commands = _list_paired(args, "draft-simple", drafts)
        served, small = _open_served(args), open_checkpoint(str(args.out))
        if reason := why_refused(served.header.metadata, small.header.metadata):
            commands[0] = f"  not llama-server, which would not draft with this pair: {reason}"
        return commands


def _list_paired(args: argparse.Namespace, kind: str, drafts: int) -> list[str]:
    """Commands that run a draft file with MODEL; `kind` is llama.cpp's name for it."""
    served, out = (shlex.quote(str(x)) for x in (_served(args), args.out))
    return [
        f"  llama-server -m {served} -md {out} --spec-type {kind} "
        f"--spec-draft-n-max {drafts} --spec-draft-p-min 0",
        f"  kdjax generate {served} --draft={out} --draft-tokens={drafts} {PROMPT}",
    ]


_SPARK = {"student.block": DSPARK}
_KINDS = {
    "mtp": _Block(),
    "dspark": _Head(_SPARK),
    "dflash": _Head(_SPARK | {"student.dspark.rank": 0, "student.dspark.confidence": 0.0}),
    "eagle3": _Head({"student.block": EAGLE3, "student.later_drafts": "0.8,0.64"}),
    "small": _Small(),
}


def _served(args: argparse.Namespace) -> str:
    return ModelArgument.parse(args.model).path


def _open_served(args: argparse.Namespace) -> Checkpoint:
    return open_checkpoint(_served(args))


def _form(model: str) -> str:
    """The form of MODEL, packed by default: `@packed`."""
    return model.removeprefix(ModelArgument.parse(model).path) or "@packed"


def _parser() -> Parser:
    parser = Parser("draft", __doc__, *ENDS)
    add = parser.add_argument
    add("model", metavar="MODEL", help="the served file, with @FORM (default: @packed)")
    text = "mtp: the block of MODEL's own file; dspark, dflash, eagle3: a head of its inner "
    text += "states; small: a separate model, of --draft"
    add("--kind", choices=_KINDS, default="mtp", help=text)
    add("--draft", default="", metavar="FILE", help="with --kind=small: the model to train")
    read = parser.add_mutually_exclusive_group()
    text = "MODEL answers these; as for `kdjax answers`"
    read.add_argument("--prompts", default=_PROMPTS, type=read_paths, metavar="FILES", help=text)
    text = "text to train on in place of answers, preferably MODEL's"
    read.add_argument("--data", type=read_paths, metavar="PATHS", help=text)
    add_fields_flag(add)
    add("--answers", type=int, default=4096, help="prompts that MODEL answers")
    add("--max-tokens", type=int, default=256, help="of an answer")
    add("--out", required=True, type=Path, metavar="FILE", help="the GGUF file to make")
    text = "for checkpoints, metrics and the report; by default FILE with .run in place of .gguf"
    add("--workdir", type=Path, help=text)
    add("--steps", type=int, default=1000, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="rows a step")
    add("--seq-len", type=int, default=512, help="positions a row")
    text = "at its peak; default: 3e-4 for mtp, 6e-4 for a head, 2e-5 for small"
    add("--learning-rate", type=float, help=text)
    text = "block type of the draft's matrices; default: f16 for a head, else q8_0"
    add("--type", help=text)
    add("--new", action="store_true", help="begin a new block, drawn by --seed")
    add("--seed", type=int, default=0, help="of the order of rows, and of a new block")
    add("--rows", type=int, default=16, help="held-out texts that judge it; 0: none")
    add("--overwrite", action="store_true", help="replace --out if it is there")
    add_machine_flags(parser, "as `kdjax plan`: train nothing")
    add_cluster_flags(parser)
    return parser


def _make_config(args: argparse.Namespace) -> Config:
    """Makes the run's config: the model teaches its draft."""
    form, config = ModelArgument.parse(args.model), Config()
    config.teacher.weights = form.weights if args.model != form.path else "packed"
    config.teacher.param_dtype = config.train.compute_dtype = form.dtype
    config.data.train, config.data.seq_len = args.data or str(_answers(args)), args.seq_len
    config.data.fields = args.fields if args.data else ""  # answers have kdjax's own names
    config.data.heldout_fraction = 1 / 16
    config.loss.temperature, config.loss.alpha = 1.0, 0.0
    config.optim.learning_rate = args.learning_rate
    config.optim.warmup_steps = max(0, min(20, args.steps - 1))
    config.train.steps, config.train.batch_size = args.steps, args.batch_size
    config.train.seed = args.seed
    _KINDS[args.kind].fill(config, args)
    return config


def _answers(args: argparse.Namespace) -> Path:
    """The file of MODEL's answers."""
    return args.out.with_suffix(".answers.jsonl")


def _parse(argv: Sequence[str] | None) -> RunCommand:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    kind = _KINDS[args.kind]
    args.type = args.type or kind.type
    if args.type.lower() not in kind.types:
        known = ", ".join(x.upper() for x in kind.types)
        raise UserError(f"found --type={args.type}; expected one of {known}.")
    check_least(args, answers=1, max_tokens=2, rows=0, seed=0)
    args.machine = find_machine(args, parser)
    check_target(args.out, folder=False, overwrite=args.overwrite)
    check_suffix(args.out, ".gguf")
    args.workdir = find_work(args.workdir, args.out, ".run")
    if args.learning_rate is None:
        args.learning_rate = kind.rate
    kind.check_flags(args)
    check_sources(args.out, [_served(args), args.draft])
    config = override(_make_config(args), rest, parser)
    allow_degenerate(config, os.environ)  # which forms weights have, MODEL@FORM says
    validate(config)
    if not args.plan:  # a plan reads headers alone, and may be for another machine
        find_files(args.data or args.prompts, Fields.parse(args.fields))
        kind.check_models(args)
        if not (args.data or config.data.heldout):
            share = config.data.heldout_fraction
            _check_answers(args.answers, share)
            _check_answers(_count_prompts(args, count_enough(share)), share, args.prompts)
    return RunCommand(args, config, "draft", {})


def _count_prompts(args: argparse.Namespace, most: int) -> int:
    """Counts the prompts that MODEL has room to answer, up to `most`."""
    served, fields = _open_served(args), Fields.parse(args.fields)
    files, tokenizer = find_files(args.prompts, fields), served.tokenizer
    read = [*itertools.islice(openings(files, tokenizer, fields), most)]
    room = served.spec.max_positions - args.max_tokens
    return most if len(read) == most else len(drafting.begin_each(read, tokenizer, room))


def _check_answers(count: int, share: float, prompts: str = "") -> None:
    """Warns of answers of which none may be held out; raises `UserError` for a single one."""
    found = (
        f"{prompts}: found {count} prompt{'s' * (count > 1)}" if prompts else f"--answers={count}"
    )
    if count == 1:
        raise UserError(f"{found}; expected two or more, to train on and to judge by.")
    if 0 < count < (enough := count_enough(share)):
        _log.warning(
            "%s: data.heldout_fraction=%g may hold none of them out, which ends the command; %d "
            "nearly always leave one",
            *(found, share, enough),
        )


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    log_to_terminal()
    run = _parse(argv)
    if run.options.plan:
        return plan_run(run, run.options.machine, text=bool(run.options.data))
    check_place(run.options.out)
    status = _answer(run)
    if status == FINISHED:
        status = carry_out(run, part=True)
    if status != FINISHED or jax.process_index() != 0:
        return status
    _write(run)
    return FINISHED


def _answer(run: RunCommand) -> int:
    """Writes MODEL's answers to the prompts, or goes on; returns the exit status."""
    args = run.options
    if args.data:
        return FINISHED
    if args.distributed == "auto" and cluster.find_member(os.environ) is not None:
        raise UserError(
            "found several processes and no --data; expected the answers, which one process "
            "writes: kdjax answers MODEL --prompts=FILES --out=answers.jsonl."
        )
    check_workdir(args.workdir)
    if not (args.workdir / CHECKPOINTS).is_dir():
        _check_run(run)
    flags = [
        f"--prompts={args.prompts}",
        f"--fields={args.fields}",
        f"--limit={args.answers}",
        f"--seed={args.seed}",
    ]
    flags += [f"--max-tokens={args.max_tokens}", f"--out={_answers(args)}"]
    return answers.main([_served(args) + _form(args.model), *flags])


def _check_run(run: RunCommand) -> None:
    """Raises `UserError` for a run that its models or settings refuse, whatever the answers are."""
    data = run.config.data
    others = dataclasses.replace(run.config, data=dataclasses.replace(data, train=""))
    require_files(run._replace(config=others))
    with started(run.options), silence():
        row_settings(data, survey(run.config)[1].tokenizer)


def _write(run: RunCommand) -> None:
    """Writes the draft, judges it and puts it into place; prints what it saves."""
    args, kind = run.options, _KINDS[run.options.kind]
    checkpoint = open_step(args.workdir)
    with stage(args.out, folder=False, overwrite=args.overwrite) as aside:
        kind.write(args, checkpoint, aside)
        drafts, lines = _judge(run, checkpoint, aside) if args.rows else (3, [])
    held_out = (read_receipt(args.workdir) or {}).get("held_out", {})
    shares = [held_out.get(which, {}).get("acceptance") for which in ("first", "final")]
    if None not in shares:
        print("of its drafts accepted at T = 1: {:.4f} before, {:.4f} after".format(*shares))
    print(f"{args.out}: {checkpoint}", *lines, "next:", *kind.list_next(args, drafts), sep="\n")


def _judge(run: RunCommand, checkpoint: Checkpoint, file: Path) -> tuple[int, list[str]]:
    """Counts what the draft in `file` saves along MODEL's continuations of held-out texts.

    Returns the best number of drafts a pass, and lines that say what it saves.
    """
    args = run.options
    draft, served, own = _KINDS[args.kind].open(args, file)
    rows = prepare(run.config.data, checkpoint.tokenizer).heldout
    prompts = drafting.begin_rows(rows, args.rows)
    found = drafting.measure(
        draft,
        served,
        {"held out": prompts},
        sharding.make_local_mesh(),
        new_tokens=min(_JUDGED, args.max_tokens),
        batch_size=len(prompts),
        seed=args.seed,
        own=own,
    )
    rules: Mapping[str, Any] = found["domains"]["held out"]
    best = rules["greedy"]["best"] or 3
    lines = [f"{best} drafts a pass, along what the model adds to {len(prompts)} held-out texts:"]
    for rule, name in (("greedy", "greedily"), ("sampled", "at T = 1")):
        if block := rules[rule]["blocks"].get(best):
            lines.append(
                f"  {name}: {block['accepted']:.2f} accepted a pass, {block['speed_up']:.2f} times "
                "the speed without a draft, on this machine"
            )
    if rules["greedy"]["blocks"].get(best, {}).get("speed_up", 0) <= 1:
        lines.append("  drafting is slower here (docs/acceptance.md)")
    return best, lines
