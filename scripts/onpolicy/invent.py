"""Exercises that a model invents, as prompts: signature and docstring of a function, no body.

    python -m scripts.onpolicy.invent MODEL.gguf OUT.jsonl --count=8000 \
        --benchmark=HumanEval.jsonl.gz --benchmark=mbpp.jsonl

Each is asked for by what it works on, what it does and what it is about, drawn by the seed. Kept
is what parses, has a docstring of a sentence and arguments, is not there yet, and is no problem of
--benchmark (HumanEval's form, or MBPP's in a file of that name), no near copy of one, and has no
entry point's name. The prompts are of the kind `script` of scripts.onpolicy.prompts; with --plain
they are of the kind `describe`: the function is asked for in words, and nothing is opened.
Exit status: 0 done, 2 bad input.
"""

import argparse
import ast
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kdjax.device import runtime
from kdjax.errors import UserError, reporting
from kdjax.models.decoding import Sampling
from kdjax.models.model import Model, load
from kdjax.models.tokenizer import Tokenizer
from scripts.corpus.conversations import Function, conversations
from scripts.corpus.filters import Benchmark
from scripts.onpolicy.prompts import as_script, read_benchmark, write_lines

_THINGS = (
    "a list of integers",
    "a list of floats",
    "a list of strings",
    "a string",
    "a sentence",
    "two strings",
    "two lists",
    "a list of tuples",
    "a dictionary",
    "a list of dictionaries",
    "a matrix given as a list of lists",
    "a nested list",
    "an integer",
    "two integers",
    "a positive integer n",
    "a list and a number k",
    "a string and a character",
    "a string and an integer",
    "a set and a list",
    "a list of intervals",
)
_DEEDS = (
    "counts",
    "filters",
    "sorts by a rule",
    "groups",
    "checks a property of",
    "finds the best pair in",
    "finds the longest run in",
    "removes something from",
    "replaces parts of",
    "rearranges",
    "encodes",
    "decodes",
    "validates",
    "sums up by a rule",
    "compares",
    "merges",
    "splits",
    "searches in",
    "simulates steps on",
    "computes a number from",
    "converts",
    "generates a sequence from",
    "finds the smallest missing thing in",
    "finds positions in",
    "formats",
)
_ABOUT = (
    "digits and divisors",
    "words and vowels",
    "brackets and nesting",
    "dates and times",
    "prices and discounts",
    "grades and averages",
    "temperatures and changes",
    "coordinates and distances",
    "names and initials",
    "bits and binary numbers",
    "prime factors",
    "upper and lower case",
    "duplicates and order",
    "neighbours and differences",
    "prefixes and suffixes",
    "rows, columns and diagonals",
    "scores and ranks",
    "roman or other numerals",
    "steps and limits",
    "remainders and cycles",
    "thresholds and windows",
    "letters and positions",
    "parity",
    "inventories and orders",
    "sequences and recurrences",
    "mirrors and rotations",
    "measurements and units",
    "versions and identifiers",
    "paths and moves on a grid",
    "frequencies and ties",
)
_INVENT = (
    "Invent a short, self-contained Python exercise: a function that {deed} {thing}. It is about "
    "{about}. Write only the function's signature with type hints and its docstring, in a markdown "
    "code block, and leave the body out. The docstring says in one to four sentences exactly what "
    "is returned, special cases too, and has two examples with >>>. Do not take a well-known "
    "exercise."
)
_TYPING = ("Any", "Dict", "Iterable", "List", "Optional", "Set", "Tuple", "Union")


def ask(draw: random.Random) -> str:
    """A request for one exercise."""
    thing, deed, about = draw.choice(_THINGS), draw.choice(_DEEDS), draw.choice(_ABOUT)
    return _INVENT.format(thing=thing, deed=deed, about=about)


def read_exercise(answer: str) -> tuple[str, str] | None:
    """Name and opening of the first function of an answer that began with a `def`."""
    code = answer.split("```")[0].rstrip()
    for text in (code, f"{code}\n    pass"):
        try:
            nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        except (SyntaxError, ValueError):
            continue
        if not nodes:
            return None
        node = nodes[0]
        said = ast.get_docstring(node) or ""
        if len(said.split(">>>")[0].split()) < 8 or not node.args.args or not said.isascii():
            return None
        lines = text.split("\n")[node.lineno - 1 : node.body[0].end_lineno]
        opening = "\n".join(lines).rstrip()
        hints = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        used = [name for name in _TYPING if name in hints]
        head = f"from typing import {', '.join(used)}\n\n\n" if used else ""
        return node.name, head + opening
    return None


def find_function(exercise: str) -> ast.FunctionDef:
    """The function that an exercise opens."""
    return next(n for n in ast.parse(exercise).body if isinstance(n, ast.FunctionDef))


def ask_plainly(opening: str) -> str:
    """A request for the function of an opening, in words."""
    node = find_function(opening)
    told, sign, shown = (ast.get_docstring(node) or "").partition(">>>")
    says = re.sub(r"\s*\bExamples?\W*$", "", " ".join(told.split()))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{node.name}({ast.unparse(node.args)}){returns}"
    function = Function(node.name, "", opening, opening, signature, says, f"{sign}{shown}".strip())
    _, described = conversations(function)
    return described[0]["content"]


def invent(
    model: Model,
    tokenizer: Tokenizer,
    count: int,
    benchmark: Iterable[tuple[str, str]],
    *,
    seed: int = 0,
    batch_size: int = 1024,
    max_tokens: int = 224,
    plain: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Prompts from `count` requests, and what was left out."""
    draw, known = random.Random(seed), Benchmark(benchmark)
    opened = "```python\ndef"  # without a space: the name's first token has it
    asked = [
        tokenizer.encode(
            tokenizer.render([{"role": "user", "content": ask(draw)}], answer_next=True) + opened
        )
        for _ in range(count)
    ]
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=0.9,
        stop_ids=tokenizer.stop_ids,
        stop_strings=("\n```",),
        seed=seed,
    )
    completions = model.generate(asked, sampling, batch_size=batch_size)
    prompts: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    for completion in completions:
        read = read_exercise("def" + completion.text)
        if read is None:
            counts["left out: no exercise"] += 1
            continue
        name, opening = read
        why = known.why(opening, name) or ("is there already" if opening in prompts else None)
        if why is not None:
            counts[f"left out: {why}"] += 1
            continue
        question, begun = as_script(opening)
        if plain:
            question, begun = ask_plainly(opening), ""
        turn = {"role": "user", "content": question}
        prompts[opening] = {"kind": "invented", "messages": [turn], "opening": begun}
    counts["prompts"] = len(prompts)
    return list(prompts.values()), dict(counts)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts.onpolicy.invent", description=__doc__)
    add = parser.add_argument
    add("model")
    add("out", type=Path)
    add("--count", type=int, default=8000, help="requests")
    add("--benchmark", type=Path, action="append", default=[])
    add("--batch-size", type=int, default=1024)
    add("--max-tokens", type=int, default=224)
    add("--plain", action="store_true", help="asks in words, and opens no answer")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    runtime.open_devices(runtime.configure(), suits_cpu=True)
    model, begun = load(args.model), time.perf_counter()
    if model.tokenizer is None:
        raise UserError(f"{args.model} has no tokenizer; give a GGUF file or a whole folder.")
    benchmark = [entry for path in args.benchmark for entry in read_benchmark(path)]
    prompts, counts = invent(
        model,
        model.tokenizer,
        args.count,
        benchmark,
        seed=args.seed,
        batch_size=args.batch_size,
        max_tokens=args.max_tokens,
        plain=args.plain,
    )
    write_lines(args.out, prompts)
    print(f"{counts} {time.perf_counter() - begun:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
