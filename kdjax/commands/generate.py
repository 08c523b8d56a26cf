"""Writes text with a model, as it grows.

    kdjax generate model.gguf@packed --prompt='def fibonacci(n):' --max-tokens=64
    kdjax generate runs/demo --prompt='One day, Lily'

MODEL is a GGUF or .apr file, a Hugging Face folder, hf:ORG/REPO[/FILE] of the Hub, a run's workdir
(its best checkpoint) or a step folder of one. `@dense` (the default), `@packed` or `@float8`
after it says how the weights are stored, then nothing or `:bfloat16` or `:float32`. With
`--draft=SMALL`, a smaller model of the same vocabulary, the same text takes fewer passes of the big
model; their number goes to standard error. `--draft=own` drafts with the block in the model's file.
Of several processes that an engine started only the first answers: a prompt is one row.
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence

import jax

from kdjax.commands.parsing import (
    Parser,
    add_cluster_flags,
    check_least,
    log_to_terminal,
    started,
)
from kdjax.config import OWN_BLOCK
from kdjax.device import sharding
from kdjax.errors import FINISHED, PEER_LOST, UserError, reporting
from kdjax.evaluation import drafting
from kdjax.evaluation.target import open_target
from kdjax.export.weights import check_finite
from kdjax.models.decoding import Drafted, Sampling
from kdjax.models.drafts import warn_if_refused


class Stream:
    """Prints one completion as it grows: complete characters, no part of a stop string."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._shown, self._stops = "", stops

    def __call__(self, number: int, text: str, *, ended: bool = False) -> None:
        """Prints the new text, for `on_text`; text that may begin a stop string once it `ended`."""
        text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # an id may end within a character
        begun = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        text = text[: len(text) - max(begun, default=0)] if not ended else text
        if text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = Parser("generate", __doc__, PEER_LOST)
    add = parser.add_argument
    add("model", metavar="MODEL", help="PATH[@dense|packed|float8[:DTYPE]]")
    add("--prompt", required=True, help="the text to continue; - reads it from standard input")
    add("--chat", action="store_true", help="the prompt is a user's turn of the chat template")
    add("--max-tokens", type=int, default=256, help="at most this many")
    add("--temperature", type=float, default=0.0, help="0, the default, takes the most probable id")
    add("--top-p", type=float, default=1.0, help="only ids of this much probability together")
    add("--top-k", type=int, default=0, help="only the N most probable ids; 0: all")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends before it; repeatable")
    add("--seed", type=int, default=0, help="of draws at a temperature above 0")
    add("--student", default="", metavar="PATH", help="file that a checkpoint's run began with")
    add("--tokenizer", default="", metavar="PATH", help="in place of the model's")
    add(
        "--draft",
        default="",
        metavar="SMALL",
        help=f"a model that drafts, in any of these forms, a DSpark, DFlash or EAGLE-3 head for "
        f"MODEL (GGUF, or a folder of speculators), or {OWN_BLOCK}: the block in its file",
    )
    add("--draft-tokens", type=int, metavar="N", help="drafted a pass (5), with --draft")
    text = "a head's drafts end before one of less confidence"
    add("--draft-p-min", type=float, default=0.0, metavar="P", help=text)
    add_cluster_flags(parser)
    args = parser.parse_args(argv)
    if args.draft_tokens is not None and not args.draft:
        parser.error(f"--draft-tokens={args.draft_tokens} needs --draft")
    if args.draft_p_min and not args.draft:
        parser.error(f"--draft-p-min={args.draft_p_min} needs --draft")
    check_least(args, draft_tokens=1)
    log_to_terminal(logging.WARNING)  # standard output is for the text
    with started(args):
        if jax.process_index() == 0:
            return _write_text(args)
    return FINISHED


def _read_prompt(asked: str) -> str:
    """The prompt, `-` for standard input; raises `UserError` for bytes that are not UTF-8."""
    try:
        # Bytes of the command line that are not UTF-8 come as lone surrogates.
        data = asked.encode("utf-8", "surrogateescape") if asked != "-" else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except UnicodeError as error:
        raise UserError(
            f"--prompt={ascii(asked)[1:-1]}: found bytes that are not UTF-8 ({error}); expected "
            "text in UTF-8. Convert it, for example with `iconv -f latin1 -t utf-8`."
        ) from error


def _write_text(args: argparse.Namespace) -> int:
    target = open_target(args.model, args.student, args.tokenizer)
    own = drafting.find_own(args.draft, target.checkpoint)
    other = args.draft if own is None else ""
    small = open_target(other, fallback=args.tokenizer) if other else None
    if small is not None:
        warn_if_refused(target.checkpoint, small.checkpoint)
    tokenizer = target.checkpoint.tokenizer
    text = _read_prompt(args.prompt)
    if args.chat and tokenizer.chat_template is None:
        raise UserError(
            f"--chat: {args.model} has no chat template. Leave --chat out, so that the model "
            "continues the prompt; or take an instruct model, or the --tokenizer of one."
        )
    if args.chat:
        text = tokenizer.render([{"role": "user", "content": text}], answer_next=True)
    sampling = Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop_ids=tokenizer.stop_ids,
        stop_strings=tuple(args.stop),
        seed=args.seed,
    )
    sampling.check()
    mesh = sharding.make_local_mesh(1)
    model, draft = target.load(mesh), small.load(mesh) if small else None
    for one in (model, draft):
        if one is not None:
            check_finite(one)
    if own is not None:
        draft = own.attach(model)
    args.draft_tokens = args.draft_tokens or min(5, own.most if own is not None else 5)
    begun = time.monotonic()
    stream = Stream(args.stop)
    (completion,) = model.generate(
        [text],
        sampling,
        draft=draft,
        draft_tokens=args.draft_tokens,
        draft_p_min=args.draft_p_min,
        on_text=stream,
    )
    stream(0, completion.text, ended=True)
    print()
    if completion.drafted is not None:
        rate = len(completion.ids) / (time.monotonic() - begun)
        _report_drafts(completion.drafted, args.draft_tokens, rate)
    return FINISHED


def _report_drafts(drafted: Drafted, drafts: int, rate: float) -> None:
    """Prints to standard error what a draft saved; `rate` in tokens a second."""
    print(
        f"{drafted.passes} passes over {drafts} drafts each: "
        f"{drafted.accepted / max(drafted.passes, 1):.2f} accepted a pass, "
        f"{rate:.1f} tokens/s, compiling included",
        file=sys.stderr,
    )
