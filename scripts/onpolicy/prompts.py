"""Makes prompts for a student that learns from its own answers, and problems to choose settings by.

    python -m scripts.onpolicy.prompts OUT --read=python:stdlib,jax,numpy \
        --benchmark=HumanEval.jsonl.gz --benchmark=mbpp.jsonl

From documented functions of the text that --read names (as `data.train` does). Each becomes a
conversation whose answer is not given, of one of these kinds: complete it, write it from its
description, find the bug in it, write tests for it; complete it in a script, or write a script that
does what its first sentence and examples say, in the words and with the opened answer that
`kdjax evaluate` has for instruct models. An answer to complete in a script is opened up to the end
of the docstring: students copy it before they write anything of their own. Functions whose own
examples can be run become problems, in HumanEval's format, if the function passes them:
OUT/development.jsonl. No prompt holds a problem of --benchmark or of the development set, a near
copy of one, or a function of its name.
Writes OUT/prompts.jsonl, OUT/development.jsonl, OUT/prompts.json, which counts, and for runs that
read answers of people OUT/conversations.jsonl: the same functions, completed and described.
Exit status: 0 done, 2 bad input.
"""

import argparse
import ast
import concurrent.futures
import copy
import doctest
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.data.text import find_files
from kdjax.errors import UserError, reporting
from kdjax.evaluation import sandbox
from kdjax.evaluation.problems import (
    ASK,
    OPENING,
    humaneval_problem,
    load_humaneval,
    load_mbpp,
    program,
)
from kdjax.formats.files import replacing
from scripts.corpus.conversations import Function, conversations, functions
from scripts.corpus.filters import Benchmark, why_not

KINDS = ("complete", "describe", "fix", "test", "script", "task")
_LIMITS = sandbox.Limits(wall_seconds=5.0)  # of a function's own examples
_RUNS_ANYWHERE = frozenset((*sys.stdlib_module_names, "numpy"))
_LONGEST = 2400  # characters of a prompt: about 700 tokens
_FIX = (
    "This function has a bug. Find it and write the corrected function.\n\n{code}",
    "Something is wrong in this code:\n\n{code}\n\nPlease fix it.",
    "{code}\n\nThe function above does not do what its docstring says. Correct it.",
)
_TEST = (
    "Write tests with plain asserts for this function.\n\n{code}",
    "{code}\n\nPlease write a function `test_{name}` that checks the one above.",
    "How would you test this? Give five asserts.\n\n{code}",
)


_OTHER: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class _Breaker(ast.NodeTransformer):
    """Changes the n-th thing that can be changed: a comparison, an operator, a small number."""

    def __init__(self, place: int):
        self.left, self.changed = place, False

    def _swap(self, operator: Any) -> Any:
        other = _OTHER.get(type(operator))
        if other is None:
            return operator
        self.left -= 1
        if self.left != -1:
            return operator
        self.changed = True
        return other()

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        node.ops = [self._swap(op) for op in node.ops]
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        node.op = self._swap(node.op)
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        node.op = self._swap(node.op)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and abs(node.value) < 10:
            self.left -= 1
            if self.left == -1:
                self.changed, node = True, ast.Constant(node.value + 1)
        return node


def break_function(function: Function, draw: random.Random) -> str | None:
    """The function's source with one thing changed; None if nothing can be."""
    (node,) = ast.parse(function.source).body
    assert isinstance(node, ast.FunctionDef)
    counter = _Breaker(10**9)
    for part in node.body[1:]:
        counter.visit(copy.deepcopy(part))
    places = 10**9 - counter.left
    if not places:
        return None
    breaker = _Breaker(draw.randrange(places))
    node.body[1:] = [breaker.visit(part) for part in node.body[1:]]
    assert breaker.changed
    return ast.unparse(ast.fix_missing_locations(node))


def as_script(code: str) -> tuple[str, str]:
    """The question of a script whose function begins with `code`, and how the answer begins."""
    return ASK.format(code), f"{OPENING}{code}\n"


def make_prompts(function: Function) -> Iterator[tuple[str, str, str]]:
    """Kind, question and opening ("" for none) of each prompt; the function decides the words."""
    draw = random.Random(function.source + "on-policy")
    complete, describe = (turns[0]["content"] for turns in conversations(function))
    yield "complete", complete, ""
    yield "describe", describe, ""
    broken = break_function(function, draw)
    if broken is not None:
        code = f"```python\n{function.after_context(broken)}\n```"
        yield "fix", draw.choice(_FIX).format(code=code), ""
    code = f"```python\n{function.after_context(function.source)}\n```"
    yield "test", draw.choice(_TEST).format(code=code, name=function.name), ""
    yield "script", *as_script(function.after_context(function.opening))
    shown = [f"assert {e.source} == {e.want}" for e in _read_examples(function) or () if e.tells]
    if shown:
        said = "\n".join([function.says, *shown[:3]])
        yield "task", ASK.format(f'"""\n{said}\n"""'), OPENING


class _Example(NamedTuple):
    """A line of an example, and what it prints; "" for nothing."""

    source: str
    want: str
    tells: bool  # whether it shows what the function gives


def _read_examples(function: Function) -> list[_Example] | None:
    """The function's examples; None if what they print cannot be compared."""
    found = []
    try:
        for example in doctest.DocTestParser().get_examples(function.examples):
            source, want = example.source.strip(), example.want.rstrip()
            if "doctest:" in source or example.exc_msg or "..." in want:
                return None
            ast.parse(source, mode="eval" if want else "exec")
            found.append(_Example(source, want, bool(want) and function.name in source))
    except (SyntaxError, ValueError):
        return None
    return found


def make_problem(function: Function, task: str) -> dict[str, str] | None:
    """The function as a problem whose tests are its own examples; None unless they all tell."""
    if not function.examples or not _imports(function.context) <= _RUNS_ANYWHERE:
        return None
    examples = _read_examples(function)
    if examples is None or sum(example.tells for example in examples) < 2:
        return None
    if not function.source.startswith(function.opening):
        return None
    lines = [f"assert repr({e.source}) == {e.want!r}" if e.want else e.source for e in examples]
    body = "".join(f"    {line}\n" for part in lines for line in part.split("\n"))
    return {
        "task_id": task,
        "prompt": function.after_context(function.opening) + "\n",
        "entry_point": function.name,
        "canonical_solution": function.source[len(function.opening) :].lstrip("\n") + "\n",
        "test": f"def check(candidate):\n{body}",
    }


def _imports(code: str) -> set[str]:
    """The packages that the code imports."""
    nodes = list(ast.walk(ast.parse(code)))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in named}


def passes(record: dict[str, str]) -> bool:
    """Whether the function itself passes where answers are judged, and an empty one does not.

    What a test hands to a function or has from it must be a literal there.
    """
    fields = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    problem = humaneval_problem(*(record[name] for name in fields))

    def run(solution: str) -> bool:
        whole = program(problem, "instruct", record["prompt"] + solution)
        checks = {"tests": problem.checks, "names": problem.names}
        return sandbox.run(whole, _LIMITS, **checks, allow_unsandboxed=True).passed

    return run(record["canonical_solution"]) and not run("    return None\n")


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
    patterns: str, benchmark: Sequence[tuple[str, str]], development: int, seed: int, workers: int
) -> tuple[list[dict[str, Any]], list[dict[str, str]], list[dict[str, Any]], dict[str, Any]]:
    """Prompts, problems, conversations of the prompts' functions, and the counts of all."""
    known, found = Benchmark(benchmark), read_functions(patterns)
    counts: Counter[str] = Counter({"functions": len(found)})
    order = sorted(found)
    random.Random(seed).shuffle(order)
    clean = []
    for key in order:
        why = known.why(found[key].after_context(found[key].source), found[key].name)
        if why is None:
            clean.append(found[key])
        else:
            counts[f"left out: {why}"] += 1
    candidates = [
        (function, problem)
        for i, function in enumerate(clean)
        if (problem := make_problem(function, f"Development/{i}"))
    ]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        good = list(pool.map(passes, [problem for _, problem in candidates]))
    problems = [pair for pair, ok in zip(candidates, good, strict=True) if ok]
    counts["functions with examples that tell"] = len(problems)
    problems = problems[:development]
    held = Benchmark([(f.name, f.after_context(f.source)) for f, _ in problems])
    prompts: list[dict[str, Any]] = []
    answered: list[dict[str, Any]] = []
    for function in clean:
        if held.why(function.after_context(function.source), function.name):
            counts["left out: development set"] += 1
            continue
        answered += [{"messages": turns} for turns in conversations(function)]
        for kind, question, opening in make_prompts(function):
            if len(question) <= _LONGEST:
                counts[kind] += 1
                turn = {"role": "user", "content": question}
                prompts.append({"kind": kind, "messages": [turn], "opening": opening})
    random.Random(seed).shuffle(prompts)
    tests = [problem for _, problem in problems]
    return prompts, tests, answered, dict(sorted(counts.items()))


def read_benchmark(path: Path) -> Iterator[tuple[str, str]]:
    load = load_mbpp if "mbpp" in path.name else load_humaneval
    for problem in load(path):
        entry = problem.names[0] if problem.names else ""
        yield entry, f"{problem.prompt}{problem.reference}"


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """Writes JSON lines; the file takes its place when all of them are there."""
    with replacing(path) as file:
        file.write("".join(json.dumps(record) + "\n" for record in records).encode())


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Makes the files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts.onpolicy.prompts", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--read", required=True, help="folders, globs, files; python:jax,flax")
    parser.add_argument("--benchmark", type=Path, action="append", default=[])
    parser.add_argument("--development", type=int, default=200, help="problems, at most")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--most", type=int, default=0, help="prompts, at most; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args(argv)
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        raise UserError(f"found --kinds={args.kinds}; {unknown} are none of {', '.join(KINDS)}.")
    benchmark = [entry for path in args.benchmark for entry in read_benchmark(path)]
    prompts, problems, answered, counts = make(
        args.read, benchmark, args.development, args.seed, args.workers
    )
    prompts = [prompt for prompt in prompts if prompt["kind"] in kinds][: args.most or None]
    files = {"prompts.jsonl": prompts, "development.jsonl": problems}
    files["conversations.jsonl"] = answered
    for name, records in files.items():
        write_lines(args.out / name, records)
    counts |= {"prompts": len(prompts), "problems": len(problems)}
    with replacing(args.out / "prompts.json") as file:
        file.write(json.dumps(counts, indent=1).encode() + b"\n")
    print(json.dumps(counts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
