"""Makes problems to choose settings by of invented exercises, and prompts that are like none.

    python -m scripts.onpolicy.exercises runs/prompts/invented.jsonl OUT runs/prompts/prompts.jsonl

The first file is of scripts.onpolicy.invent. Its first --count exercises whose examples are calls
on literals become problems in HumanEval's format, OUT/problems.jsonl: the examples are the tests.
Nobody has solved them; one whose examples are wrong fails for every student. What is no problem and
not like one goes to OUT/opened.jsonl as it is and to OUT/plain.jsonl asked for in words, and so do
the prompts of the other files to OUT under their names. Those among it that could be problems are
OUT/exercises.jsonl, in the same format: `kdjax answers` writes what passes, to train on.
Exit status: 0 done, 2 bad input.
"""

import argparse
import ast
import doctest
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kdjax.data.text import read_json_lines
from kdjax.errors import UserError, reporting
from kdjax.evaluation.problems import OPENING
from scripts.corpus.filters import Benchmark
from scripts.onpolicy.invent import ask_plainly, find_function
from scripts.onpolicy.prompts import write_lines

_LEAST_EXAMPLES = 2


def as_problem(exercise: str, task: str) -> dict[str, str] | None:
    """The exercise as a problem; None unless it has examples and all are calls on literals."""
    name = _name(exercise)
    lines = []
    try:
        for example in doctest.DocTestParser().get_examples(_docstring(exercise)):
            call = ast.parse(example.source.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != name:
                return None
            for given in [*call.args, *(keyword.value for keyword in call.keywords)]:
                ast.literal_eval(given)
            wanted = ast.literal_eval(example.want.strip())
            lines.append(f"    assert {ast.unparse(call)} == {wanted!r}\n")
    except (SyntaxError, ValueError, TypeError):
        return None
    if len(lines) < _LEAST_EXAMPLES:
        return None
    return {
        "task_id": task,
        "prompt": exercise + "\n",
        "entry_point": name,
        "canonical_solution": "    pass\n",
        "test": "def check(candidate):\n" + "".join(lines),
    }


def set_apart(exercises: Iterable[str], count: int) -> tuple[list[dict[str, str]], list[str]]:
    """The first `count` that can be problems, and those that are like none of them."""
    problems: list[dict[str, str]] = []
    others = []
    for exercise in exercises:
        problem = as_problem(exercise, f"Invented/{len(problems)}")
        if problem is None or len(problems) == count:
            others.append(exercise)
        else:
            problems.append(problem)
    held = hold(problems)
    return problems, [e for e in others if not held.why(e, _name(e))]


def hold(problems: Iterable[dict[str, str]]) -> Benchmark:
    """Tells what is like one of the problems."""
    return Benchmark((problem["entry_point"], problem["prompt"]) for problem in problems)


def _name(exercise: str) -> str:
    return find_function(exercise).name


def _docstring(exercise: str) -> str:
    return ast.get_docstring(find_function(exercise)) or ""


def _exercise(prompt: dict[str, Any]) -> str:
    return prompt.get("opening", "").removeprefix(OPENING).rstrip("\n")


def _read(path: Path) -> list[dict[str, Any]]:
    records = []
    for place, record in read_json_lines(path):
        try:
            record["messages"][0]["content"]
        except (TypeError, KeyError, IndexError):
            raise UserError(
                f'{place}: found no {{"messages": [...]}}; give what scripts.onpolicy.prompts and '
                "scripts.onpolicy.invent wrote."
            ) from None
        records.append(record)
    return records


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Writes the files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts.onpolicy.exercises", description=__doc__)
    parser.add_argument("invented", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("prompts", type=Path, nargs="*")
    parser.add_argument("--count", type=int, default=400, help="problems")
    args = parser.parse_args(argv)
    opened = {_exercise(prompt): prompt for prompt in _read(args.invented)}
    if "" in opened:
        raise UserError(
            f"{args.invented}: found a prompt that opens no function; give what "
            "scripts.onpolicy.invent wrote without --plain."
        )
    problems, kept = set_apart(opened, args.count)
    held = hold(problems)
    plain = [{"role": "user", "content": ask_plainly(exercise)} for exercise in kept]
    tested = (as_problem(exercise, f"Exercise/{i}") for i, exercise in enumerate(kept))
    files: dict[str, list[Any]] = {
        "problems.jsonl": problems,
        "exercises.jsonl": [exercise for exercise in tested if exercise],
        "opened.jsonl": [opened[exercise] for exercise in kept],
        "plain.jsonl": [{"kind": "invented", "messages": [turn]} for turn in plain],
    }
    for path in args.prompts:
        files[path.name] = [p for p in _read(path) if not held.why(p["messages"][0]["content"])]
    for name, records in files.items():
        write_lines(args.out / name, records)
        print(f"{name}: {len(records)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
