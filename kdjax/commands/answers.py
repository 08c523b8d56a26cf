"""Lets a model answer exercises and keeps what passes their own tests: text to train on.

    kdjax answers teacher.gguf@packed --exercises=problems.jsonl --out=verified.jsonl --samples=8
    kdjax train --config=CONFIG --workdir=runs/a --config.data.train=verified.jsonl

With --hint=solution the lines are prompts of a run whose teacher alone reads the hints:

    kdjax train --config=CONFIG --workdir=runs/b --config.rollout.prompts=verified.jsonl \
        --config.rollout.hints=True

MODEL is as of `kdjax evaluate`. Exercises are JSON lines of HumanEval's form: task_id, prompt,
entry_point, test and, never shown, canonical_solution. Each line of --out is a conversation with
the proof that its program passed. A run that was stopped goes on where it was. Keep the exercises
of benchmarks out: what is trained on cannot judge.
"""

import argparse
import dataclasses
import hashlib
import logging
from pathlib import Path

from kdjax.commands.parsing import Parser, check_least, log_to_terminal
from kdjax.device import runtime, sharding
from kdjax.errors import FINISHED, UserError, reporting
from kdjax.evaluation import problems, sandbox
from kdjax.evaluation.passk import Settings, answer_with, check_asked
from kdjax.evaluation.target import Target, open_target
from kdjax.evaluation.verified import HINTS, VerifiedAnswers, group
from kdjax.formats.files import make_place
from kdjax.models.checkpoint import Form
from kdjax.models.decoding import Sampling

_log = logging.getLogger("kdjax")


def _parser() -> Parser:
    parser = Parser("answers", __doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="workdir, step folder, model file or folder, with @FORM")
    add("--exercises", required=True, type=Path, metavar="FILE", help="JSON lines")
    add("--out", required=True, type=Path, metavar="FILE", help="conversations, JSON lines")
    add("--wording", choices=problems.CHATS, default="instruct", help="see docs/evaluation.md")
    add("--samples", type=int, default=4, help="answers to each exercise")
    add("--temperature", type=float, default=0.8, help="0 with one answer to each alone")
    add("--top-p", type=float, default=0.95, help="has no effect at temperature 0")
    add("--max-tokens", type=int, default=512, help="of an answer")
    text = "adds to each line a hint for rollout.hints: the program, the tests, or a failure"
    add("--hint", choices=HINTS, default="", help=text)
    add("--seed", type=int, default=0, help="of what is drawn")
    add("--limit", type=int, default=0, help="only the first exercises; 0: all")
    add("--batch-size", type=int, default=64, help="answers written at a time")
    add("--timeout", type=float, default=sandbox.DEFAULT.wall_seconds, help="seconds a program")
    add("--allow-unsandboxed", action="store_true", help="see `kdjax evaluate`")
    return parser


def _tell(args: argparse.Namespace, target: Target, exercises: list[problems.Problem]) -> dict:
    """Everything that decides the answers: a file with any of it different is another one."""
    asked = hashlib.sha256()
    for exercise in exercises:
        asked.update(f"{exercise.prompt}\0{exercise.checks}\0".encode("utf-8", "surrogatepass"))
    names = ("wording", "samples", "temperature", "top_p", "max_tokens", "seed", "batch_size")
    said = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    said |= {"--hint": args.hint} if args.hint else {}
    model = {"MODEL": target.checkpoint.sha256, "FORM": Form.parse(args.model).weights}
    return said | model | {"--exercises": asked.hexdigest()}


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = _parser().parse_args(argv)
    check_least(args, samples=1, max_tokens=1, batch_size=1, limit=0)
    sampling = Sampling(args.max_tokens, args.temperature, args.top_p, seed=args.seed)
    check_asked(sampling, args.samples, args.timeout)
    exercises = problems.load_humaneval(args.exercises)[: args.limit or None]
    if repeated := len(exercises) - len({exercise.task for exercise in exercises}):
        raise UserError(
            f"{args.exercises}: found {repeated} exercises with a task_id that another has; "
            "expected one of its own for each."
        )
    sandbox.check(args.allow_unsandboxed)
    runtime.configure()
    log_to_terminal()
    target = open_target(args.model)
    tokenizer = target.checkpoint.tokenizer
    if not tokenizer.chat_template:
        raise UserError(f"{args.model}: found no chat template; expected one to ask with.")
    if (most := target.checkpoint.spec.max_positions) <= args.max_tokens:
        raise UserError(
            f"--max-tokens={args.max_tokens}: the model has {most} positions; lower it."
        )
    room = most - args.max_tokens
    fit = [
        exercise
        for exercise in exercises
        if len(tokenizer.encode(problems.prompt_text(exercise, args.wording, tokenizer))) <= room
    ]
    if len(fit) < len(exercises):
        _log.warning(
            "%d of %d exercises are left out: of more than %d ids, which leave no room for answers "
            "of --max-tokens=%d",
            len(exercises) - len(fit),
            len(exercises),
            room,
            args.max_tokens,
        )
    answers = VerifiedAnswers(args.out, _tell(args, target, exercises))
    settings = Settings(
        wording=args.wording,
        samples=args.samples,
        batch_size=args.batch_size,
        room=room,
        limits=dataclasses.replace(sandbox.DEFAULT, wall_seconds=args.timeout),
        allow_unsandboxed=args.allow_unsandboxed,
    )
    make_place(args.out)
    if answers.tried:
        _log.info("goes on: %s", answers.describe())
    model = target.load(sharding.make_local_mesh())
    generate = answer_with(model, tokenizer, sampling, settings)
    for part in group(fit, settings):
        answers.write(part, tokenizer, generate, settings, args.hint)
        _log.info("%s", answers.describe())
    print(f"{args.out}: {answers.describe()}")
    return FINISHED
