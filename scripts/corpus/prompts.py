"""Makes prompts for a student that learns from its own answers, from documented functions.

    python -m scripts.corpus.prompts OUT --read=python:stdlib,jax,flax,transformers \
        --benchmark=HumanEval.jsonl.gz --benchmark=mbpp.jsonl

--read names text as `data.train` does. Each of its documented functions becomes two conversations
whose answer is not given: complete it, and write it from its description. No prompt holds a
problem of --benchmark, a near copy of one, or a function of its name. Writes OUT/prompts.jsonl, and
OUT/prompts.json, which counts. Exit status: 0 done, 2 bad input.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kdjax.data.sources import find_files
from kdjax.errors import reporting
from kdjax.evaluation.problems import load_humaneval, load_mbpp
from kdjax.formats.files import replacing
from scripts.corpus.conversations import Function, conversations, functions
from scripts.corpus.filters import Benchmark, why_not

KINDS = ("complete", "describe")
_LONGEST = 2400  # characters of a prompt: about 700 tokens


def read_functions(patterns: str) -> dict[str, Function]:
    """The documented functions of the text, each once, by their keys."""
    found: dict[str, Function] = {}
    for path in find_files(patterns):
        text = path.read_text(encoding="utf-8", errors="replace")
        if why_not(str(path), text) is None:
            for function in functions(text):
                found.setdefault(function.key(), function)
    return found


def make(
    patterns: str, benchmark: Sequence[tuple[str, str]], seed: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Prompts of the text's functions, and counts by kind and of what was left out.

    `benchmark` are the names and the code of problems that no prompt may hold.
    """
    known, found = Benchmark(benchmark), read_functions(patterns)
    counts, prompts = Counter({"functions": len(found)}), list[dict[str, Any]]()
    for _, function in sorted(found.items()):
        if why := known.why(function.after_context(function.source), function.name):
            counts[f"left out: {why}"] += 1
            continue
        for kind, (question, *_) in zip(KINDS, conversations(function), strict=True):
            if len(question["content"]) <= _LONGEST:
                counts[kind] += 1
                prompts.append({"kind": kind, "messages": [question]})
    random.Random(seed).shuffle(prompts)
    return prompts, dict(sorted(counts.items())) | {"prompts": len(prompts)}


def read_benchmark(path: Path) -> Iterator[tuple[str, str]]:
    """The names and the code of a file's problems, HumanEval's or MBPP's."""
    load = load_mbpp if "mbpp" in path.name else load_humaneval
    for problem in load(path):
        entry = problem.names[0] if problem.names else ""
        yield entry, f"{problem.prompt}{problem.reference}"


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Makes the files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts.corpus.prompts", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--read", required=True, help="folders, globs, files; python:jax,flax")
    parser.add_argument("--benchmark", type=Path, action="append", default=[])
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order")
    args = parser.parse_args(argv)
    benchmark = [entry for path in args.benchmark for entry in read_benchmark(path)]
    prompts, counts = make(args.read, benchmark, args.seed)
    lines, counted = "".join(json.dumps(x) + "\n" for x in prompts), json.dumps(counts, indent=1)
    for name, text in (("prompts.jsonl", lines), ("prompts.json", f"{counted}\n")):
        with replacing(args.out / name) as file:
            file.write(text.encode())
    print(counted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
