"""Lets a model answer prompts, or exercises, whose answers are kept if they pass the tests.

    kdjax answers teacher.gguf --prompts=prompts.jsonl --out=text.jsonl --seconds=400
    kdjax answers teacher.gguf@packed --exercises=problems.jsonl --out=verified.jsonl --samples=8
    kdjax train --config=CONFIG --workdir=runs/a --config.data.train=text.jsonl,verified.jsonl

Prompts are files as for `data.train`: for `messages` the assistant's next turn is written, a
`prompt` is continued, and so is the first half of a text, or its first 128 tokens; each once, in an
order drawn by --seed. A line of --out has prompt and answer: a draft learns from both.

Exercises are JSON lines of HumanEval's form: task_id, prompt, entry_point, test and, never shown,
canonical_solution. Answers that pass the tests are kept, as conversations with the proof.
Keep the exercises of benchmarks out: a benchmark that was trained on cannot judge.

MODEL is as for `kdjax evaluate`. A stopped run goes on where it was.
"""

import argparse
import dataclasses
import hashlib
import logging
import math
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kdjax.commands.parsing import (
    Parser,
    add_fields_flag,
    check_least,
    log_to_terminal,
    read_paths,
)
from kdjax.data.fields import Fields
from kdjax.data.sources import find_files, split_sources
from kdjax.device import runtime, sharding
from kdjax.errors import FINISHED, UserError, reporting
from kdjax.evaluation import problems, sandbox
from kdjax.evaluation.answers import VerifiedAnswers, WrittenAnswers, group, list_prompts
from kdjax.evaluation.passk import Settings, answer_with, check_asked
from kdjax.evaluation.target import Target, open_target
from kdjax.export.staging import check_sources
from kdjax.export.weights import check_finite
from kdjax.formats.files import check_file
from kdjax.formats.locks import holding_file
from kdjax.models.checkpoint import ModelArgument
from kdjax.models.decoding import Sampling, find_room
from kdjax.models.model import Model

_log = logging.getLogger("kdjax")

# Defaults of --samples, --temperature and --top-p; prompts draw from the model's distribution.
_DEFAULTS = {"prompts": (1, 1.0, 1.0), "exercises": (4, 0.8, 0.95)}
_NOTHING_LEFT = "; nothing is left to write"
_OF_EXERCISES, _OF_PROMPTS = ("wording", "timeout", "allow_unsandboxed"), ("ended",)


def _parser() -> Parser:
    parser = Parser("answers", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="workdir, step folder, model file or folder, with @FORM")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompts", type=read_paths, metavar="FILES", help="as for data.train")
    add_fields_flag(add)
    asked.add_argument("--exercises", type=Path, metavar="FILE", help="JSON lines")
    add("--out", required=True, type=Path, metavar="FILE", help="JSON lines to train on")
    add("--samples", type=int, help="answers to each; default: 1 to a prompt, 4 to an exercise")
    text = "default: 1 for prompts, 0.8 for exercises; 0 needs --samples=1"
    add("--temperature", type=float, help=text)
    text = "has no effect at temperature 0; default: 1 for prompts, 0.95 for exercises"
    add("--top-p", type=float, help=text)
    add("--max-tokens", type=int, default=512, help="of an answer")
    add("--seed", type=int, default=0, help="of the draws, and of the order of prompts")
    add("--limit", type=int, default=0, help="only the first N; 0: all")
    add("--seconds", type=float, default=0.0, help="no request starts after that; 0: no limit")
    add("--batch-size", type=int, default=64, help="answers written at a time")
    add("--ended", action="store_true", help="for prompts: drop answers that --max-tokens cut off")
    text = "for exercises: see docs/passk.md; default: instruct"
    add("--wording", choices=problems.CHATS, help=text)
    text = f"for exercises: seconds a program; default: {sandbox.DEFAULT.wall_seconds:g}"
    add("--timeout", type=float, help=text)
    add("--allow-unsandboxed", action="store_true", help="for exercises: see `kdjax evaluate`")
    return parser


def _check(args: argparse.Namespace) -> Sampling:
    """Fills in defaults for prompts or exercises; raises `UserError` for flags of the other."""
    kind = "prompts" if args.prompts else "exercises"
    for name in _OF_EXERCISES if args.prompts else _OF_PROMPTS:
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} has no meaning with --{kind}.")
    for name, value in zip(("samples", "temperature", "top_p"), _DEFAULTS[kind], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_file(args.out)
    args.wording = args.wording or "instruct"
    args.timeout = sandbox.DEFAULT.wall_seconds if args.timeout is None else args.timeout
    check_least(args, samples=1, max_tokens=1, batch_size=1, limit=0, seconds=0)
    sampling = Sampling(args.max_tokens, args.temperature, args.top_p, seed=args.seed)
    check_asked(sampling, args.samples, args.timeout)
    return sampling


def _tell(args: argparse.Namespace, target: Target, asked: Iterable[str], *more: str) -> dict:
    """Everything that decides the answers: an existing file must agree in all of it."""
    digest = hashlib.sha256()
    for one in asked:
        digest.update(one.encode("utf-8", "surrogatepass"))
    names = ("samples", "temperature", "top_p", "max_tokens", "seed", *more)
    said: dict[str, Any] = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    model = {"MODEL": target.checkpoint.sha256, "FORM": ModelArgument.parse(args.model).weights}
    return said | model | {"--prompts" if args.prompts else "--exercises": digest.hexdigest()}


def _load(target: Target) -> Model:
    """Loads the model; raises `UserError` for numbers that are not finite."""
    model = target.load(sharding.make_local_mesh())
    check_finite(model)
    return model


def _answer_prompts(
    args: argparse.Namespace, target: Target, sampling: Sampling, until: float
) -> str:
    tokenizer = target.checkpoint.tokenizer
    most = target.checkpoint.spec.max_positions - args.max_tokens
    fields = Fields.parse(args.fields)
    check_sources(args.out, find_files(args.prompts, fields))
    out = Path(os.path.realpath(args.out))
    for folder in map(Path, split_sources(args.prompts)[0]):
        if folder.is_dir() and out.is_relative_to(folder.resolve()):
            raise UserError(
                f"{args.out} is within {folder}, whose files are prompts, and so would the answers "
                "be. Give an --out elsewhere."
            )
    prompts = list_prompts(args.prompts, tokenizer, most, fields)
    made_by = _tell(args, target, (repr(prompt.ids) for prompt in prompts), "ended")
    random.Random(args.seed).shuffle(prompts)
    with holding_file(args.out, "give another --out"):
        answers = WrittenAnswers(args.out, made_by, samples=args.samples, ended=args.ended)
        prompts = prompts[: args.limit or None]
        parts = group(prompts[answers.asked :], args.batch_size, args.samples)
        if not parts:
            return answers.describe(len(prompts)) + _NOTHING_LEFT
        if answers.asked:
            _log.info("goes on: %s", answers.describe(len(prompts)))
        model = _load(target)
        room = find_room([len(prompt.ids) for prompt in prompts], args.max_tokens)
        sampling = dataclasses.replace(sampling, stop_ids=tokenizer.stop_ids)
        for part in parts:
            if time.monotonic() > until:
                break
            answers.write(part, model, sampling, batch_size=args.batch_size, room=room)
            _log.info("%s", answers.describe(len(prompts)))
        return answers.describe(len(prompts))


def _answer_exercises(
    args: argparse.Namespace, target: Target, sampling: Sampling, until: float
) -> str:
    check_sources(args.out, [args.exercises])
    exercises = problems.load_humaneval(args.exercises)
    asked = [f"{exercise.prompt}\0{exercise.checks}\0" for exercise in exercises]
    exercises = exercises[: args.limit or None]
    sandbox.check(args.allow_unsandboxed)
    tokenizer = target.checkpoint.tokenizer
    if not tokenizer.chat_template:
        raise UserError(f"{args.model}: found no chat template; expected one, for exercises.")
    room = target.checkpoint.spec.max_positions - args.max_tokens
    lengths = [
        len(tokenizer.encode(problems.prompt_text(exercise, args.wording, tokenizer)))
        for exercise in exercises
    ]
    fit = [one for one, length in zip(exercises, lengths, strict=True) if length <= room]
    if len(fit) < len(exercises):
        _log.warning(
            "%d of %d exercises are left out: of more than %d ids, which leave no room for answers "
            "of --max-tokens=%d",
            len(exercises) - len(fit),
            len(exercises),
            room,
            args.max_tokens,
        )
    made_by = _tell(args, target, asked, "wording", "batch_size", "limit")
    with holding_file(args.out, "give another --out"):
        answers = VerifiedAnswers(args.out, made_by)
        if all(one.task in answers.tried for one in fit):
            return answers.describe() + _NOTHING_LEFT
        settings = Settings(
            wording=args.wording,
            samples=args.samples,
            batch_size=args.batch_size,
            room=room,
            limits=sandbox.allow(args.timeout),
            allow_unsandboxed=args.allow_unsandboxed,
        )
        if answers.tried:
            _log.info("goes on: %s", answers.describe())
        model = _load(target)
        positions = find_room([length for length in lengths if length <= room], args.max_tokens)
        generate = answer_with(model, tokenizer, sampling, settings, positions)
        for part in group(fit, args.batch_size, args.samples):
            if time.monotonic() > until:
                break
            answers.write(part, tokenizer, generate, settings)
            _log.info("%s", answers.describe())
        return answers.describe()


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    sampling = _check(args)
    until = time.monotonic() + (args.seconds or math.inf)
    log_to_terminal()
    runtime.configure()
    target = open_target(args.model)
    if (most := target.checkpoint.spec.max_positions) <= args.max_tokens:
        raise UserError(
            f"--max-tokens={args.max_tokens}: the model has {most} positions; lower it."
        )
    answer = _answer_prompts if args.prompts else _answer_exercises
    print(f"{args.out}: {answer(args, target, sampling, until)}")
    return FINISHED
