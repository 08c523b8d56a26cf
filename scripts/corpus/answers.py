"""Lets the teacher answer conversations itself: text to train on that it would have written.

    python -m scripts.corpus.answers teacher.gguf --read=instruct.jsonl --out=answers.jsonl \
        --seconds=300

The last turn of each conversation is replaced by the teacher's own, or added behind a user's; of a
line with `text` the teacher continues the beginning, of one with `prompt` that. Kept are answers
that ended by themselves and whose Python blocks all parse; a question that was answered in code
must be answered in code. With `--all` every answer is kept, also one that did not end, as a draft
wants: it is to know all that the teacher says. Prompts are shuffled, then grouped by length, so
that a batch has one of few shapes. OUT holds what was kept until 15 s ago, and at the end all. No
batch begins after --seconds.
Exit status: 0 done, 2 bad input.
"""

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.data.text import read_json_lines
from kdjax.device import runtime
from kdjax.errors import MissingFileError, UserError, reporting
from kdjax.evaluation.drafting import begin_text
from kdjax.formats.files import replacing
from kdjax.models.checkpoint import Form, open_checkpoint
from kdjax.models.decoding import Completion, Sampling
from kdjax.models.model import load
from kdjax.models.tokenizer import Tokenizer
from scripts.corpus.filters import parsed

SAVED_EVERY = 15.0  # seconds: the file of a large model's answers has hundreds of MB
LENGTHS = (128, 256, 448)  # tokens; a batch's prompts end in the same interval
_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)\n?```", re.DOTALL)


class Question(NamedTuple):
    """A conversation without its last answer, as ids, and whether that answer was code."""

    messages: list[dict[str, Any]]
    ids: list[int]
    code: bool
    text: str = ""  # instead, of a plain text the beginning

    def answered(self, text: str) -> dict[str, Any]:
        """The record with this answer."""
        if self.text:
            return {"text": self.text + text}
        said = {"role": "assistant", "content": text.strip()}
        return {"messages": [*self.messages, said]}


def read(path: Path, tokenizer: Tokenizer) -> Iterator[Question]:
    """Questions of a file of conversations. Raises `UserError` for another file."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file. Make it with scripts/corpus/wheels.py.")
    for place, record in read_json_lines(path):
        try:
            given = str(record.get("prompt", ""))
            plain = given or str(record.get("text", ""))
            asked, code = list(record.get("messages", [])), False
            if asked and asked[-1]["role"] == "assistant":
                code = "```" in asked.pop()["content"]
            fits = bool(plain.strip()) or asked[-1]["role"] == "user"
        except (TypeError, KeyError, IndexError, AttributeError):
            asked, code, plain, fits = [], False, "", False
        if not fits:
            raise UserError(
                f'{place}: found no {{"messages": [...]}} that ends with a user\'s turn '
                "or an assistant's behind one, and no text. Give lines of that form."
            )
        if asked:
            ids = tokenizer.encode(tokenizer.render(asked, answer_next=True))
            yield Question(asked, ids, code)
        else:
            ids = begin_text(plain, tokenizer, whole=bool(given))
            yield Question([], ids, False, tokenizer.decode(ids))


def batches(questions: Sequence[Question], size: int, seed: int) -> Iterator[list[Question]]:
    """Batches of prompts of like length, in an order that favours no length until the last.

    Questions longer than the longest of `LENGTHS` are left out.
    """
    order = list(questions)
    random.Random(seed).shuffle(order)
    waiting: dict[int, list[Question]] = {length: [] for length in LENGTHS}
    for question in order:
        length = next((n for n in LENGTHS if len(question.ids) <= n), None)
        if length is None:
            continue
        waiting[length].append(question)
        if len(waiting[length]) == size:
            yield waiting[length]
            waiting[length] = []
    yield from filter(None, waiting.values())


def why_not(answer: Completion, code: bool) -> str | None:
    """Why an answer is not kept; None if it is."""
    if answer.reason != "stop" or not answer.text.strip():
        return "did not end"
    blocks = _BLOCK.findall(answer.text)
    if code and not blocks:
        return "no code"
    return "syntax" if any(parsed(block) is None for block in blocks) else None


def run(args: argparse.Namespace) -> None:
    """Answers until the time is spent; prints a line a batch."""
    start = time.monotonic()
    out = Path(args.out)
    if out.exists() and not args.overwrite:
        raise UserError(f"{out}: is there already. Give another --out, or --overwrite.")
    form = Form.parse(args.model)
    tokenizer = open_checkpoint(form.path).tokenizer
    stop_ids = tokenizer.stop_ids
    sampling = Sampling(
        args.max_tokens, args.temperature, args.top_p, stop_ids=stop_ids, seed=args.seed
    )
    sampling.check()
    questions = list(read(Path(args.read), tokenizer))
    kept: list[str] = []
    tried = tokens = 0
    dropped: dict[str, int] = {}
    model = load(form.path, weights=form.weights, dtype=form.dtype, max_segments=1)

    def save() -> float:
        with replacing(out) as file:
            file.write("".join(kept).encode())
        return time.monotonic()

    begun = saved = time.monotonic()
    for batch in batches(questions, args.batch_size, args.seed):
        if time.monotonic() - start > args.seconds:
            break
        prompts = [q.ids for q in batch]
        numbers = range(tried, tried + len(batch))
        answers = model.generate(prompts, sampling, batch_size=args.batch_size, numbers=numbers)
        for question, answer in zip(batch, answers, strict=True):
            why = why_not(answer, question.code)
            if why and not (args.all and answer.text.strip()):
                dropped[why] = dropped.get(why, 0) + 1
            else:
                kept.append(json.dumps(question.answered(answer.text)) + "\n")
        if time.monotonic() - saved > SAVED_EVERY:
            saved = save()
        tried += len(batch)
        tokens += sum(len(a.ids) for a in answers)
        print(
            f"{tried} of {len(questions)} asked, {len(kept) / tried:.1%} kept, {tokens} tokens, "
            f"{tokens / (time.monotonic() - begun):.0f} tokens/s, {dropped}",
            flush=True,
        )
    if tried:
        save()


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    flags = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    flags.add_argument("model", help="PATH[@dense|packed[:bfloat16|float32]]")
    flags.add_argument("--read", required=True, help="conversations or texts, JSON lines")
    flags.add_argument("--out", required=True)
    flags.add_argument("--seconds", type=float, default=300.0, help="no batch begins after that")
    flags.add_argument("--batch-size", type=int, default=384)
    flags.add_argument("--max-tokens", type=int, default=512)
    flags.add_argument("--temperature", type=float, default=0.0)
    flags.add_argument("--top-p", type=float, default=1.0)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--all", action="store_true", help="keep every answer, for a draft")
    flags.add_argument("--overwrite", action="store_true")
    args = flags.parse_args(argv)
    runtime.configure()
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
