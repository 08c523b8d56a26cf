"""Answers to exercises whose programs passed the exercises' own tests: text to train on.

Rejection sampling as of Yuan et al. 2023 (arXiv:2308.01825): the sandbox judges, no model does.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdjax.errors import UserError
from kdjax.evaluation import passk
from kdjax.evaluation import problems as bench
from kdjax.evaluation.passk import Generate, Settings
from kdjax.evaluation.problems import Problem
from kdjax.evaluation.sandbox import INFRASTRUCTURE, PASSED
from kdjax.formats.files import replacing
from kdjax.models.tokenizer import Tokenizer

HINTS = ("solution", "tests", "error")  # what a teacher can be told of an exercise
# What stands before the question. With docstrings or tests of its own a program would say how long
# an answer is to be, and its reader would end answers elsewhere.
_CODE = "\n```python\n{}\n```"
_SOLUTION = f"A function that solves the problem below:{_CODE}"
_TESTS = f"The answer to the problem below must pass these tests:{_CODE}"
_FAILED = f"This program fails at the problem below:{_CODE}\nIt ended with {{}}"
_CALLS = 4  # of the model between two savings: programs of one run while the next is written


def state_path(out: Path) -> Path:
    """File beside `out` that says which exercises were tried, and how."""
    return out.with_name(f"{out.name}.tried.json")


class VerifiedAnswers:
    """Answers that passed, in `out`, and beside it what was tried: a killed run goes on.

    Each line of `out` is a conversation, `messages`, with its `task` and `proof`: the SHA-256s of
    the program and of the tests, and the number of the sample. Equal programs are kept once.
    `made_by` tells what decides the answers; another one there is refused.
    """

    def __init__(self, out: Path, made_by: Mapping[str, Any]) -> None:
        self._out, self._state = out, state_path(out)
        self._made_by = json.loads(json.dumps(made_by))
        self.tried: dict[str, list[str]] = {}  # how each answer of a task ended
        self._lines: list[str] = []
        if not self._state.exists():
            if out.exists():
                raise UserError(
                    f"{out}: is there already, and {self._state.name} is not; expected both or "
                    "none. Give another --out, or remove it."
                )
            return
        try:
            found = json.loads(self._state.read_text())
            before, self.tried = found["made_by"], found["tried"]
            lines = out.read_text("utf-8").splitlines() if out.exists() else []
            # Answers are saved before their tasks: of a task that is not there they come again.
            self._lines = [line for line in lines if json.loads(line)["task"] in self.tried]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._state}: found {error!r}; remove it and {out}.") from error
        if before != self._made_by:
            every = before.keys() | self._made_by.keys()
            names = sorted(name for name in every if before.get(name) != self._made_by.get(name))
            raise UserError(
                f"{out}: found answers made with other {', '.join(names)}; expected the same to go "
                "on. Give another --out, or remove it."
            )

    def write(
        self,
        exercises: Sequence[Problem],
        tokenizer: Tokenizer,
        generate: Generate,
        settings: Settings,
        hint: str = "",
    ) -> None:
        """Adds the answers to exercises that were not tried; `describe` says how they ended.

        With a `hint` of `HINTS` each has one, what opens an answer, and the exercise: a prompt for
        a run with hints.
        """
        left = [exercise for exercise in exercises if exercise.task not in self.tried]
        if not left:
            return
        result = passk.run_benchmark(left, tokenizer, generate, settings)
        if result["mode"] == passk.INFERENCE_FAILED:
            raise UserError(f"the model gave no answer: {result['inference_error']}")
        by_task = {exercise.task: exercise for exercise in left}
        ends: dict[str, list[str]] = {task: [] for task in by_task}
        failed: dict[str, str] = {}  # of each task, the first program that failed and how
        for sample in result["results"] if hint == "error" else ():
            if sample["reason"] not in (PASSED, INFRASTRUCTURE, passk.INFERENCE_FAILED):
                code = bench.program(by_task[sample["task"]], settings.wording, sample["answer"])
                said = f"{sample['reason']}: {sample['error']}".strip(": \n")
                failed.setdefault(sample["task"], _FAILED.format(code.strip(), said))
        seen = set()
        for sample in result["results"]:
            exercise, wording = by_task[sample["task"]], settings.wording
            number = len(ends[exercise.task])
            ends[exercise.task].append(sample["reason"])
            program = bench.program(exercise, wording, sample["answer"])
            if sample["reason"] != PASSED or (exercise.task, program) in seen:
                continue
            seen.add((exercise.task, program))
            proof = {"program": _sha256(program), "tests": _sha256(exercise.checks)}
            record = {
                "messages": bench.conversation(exercise, wording, sample["answer"]),
                "task": exercise.task,
                "proof": proof | {"sample": number},
            }
            if hint:
                hints = {
                    "solution": _SOLUTION.format(bench.shorten(program, exercise.names)),
                    "tests": _TESTS.format(exercise.tests.strip()),
                    "error": failed.get(exercise.task, ""),
                }
                record |= {
                    "opening": bench.open_answer(wording),
                    "hint": hints[hint],
                    "exercise": bench.write_exercise(exercise, wording),
                }
            self._lines.append(json.dumps(record))
        self.tried |= ends
        self._save()

    def _save(self) -> None:
        for path, text in (
            (self._out, "".join(f"{line}\n" for line in self._lines)),
            (self._state, json.dumps({"made_by": self._made_by, "tried": self.tried}) + "\n"),
        ):
            with replacing(path) as file:
                file.write(text.encode())

    def describe(self) -> str:
        """One line: how many exercises were tried and solved, and how their programs ended."""
        ends = Counter(reason for reasons in self.tried.values() for reason in reasons)
        solved = sum(PASSED in reasons for reasons in self.tried.values())
        rest = ", ".join(f"{n} {reason}" for reason, n in ends.most_common() if reason != PASSED)
        return (
            f"{len(self.tried)} exercises tried, {solved} solved; {ends[PASSED]} of "
            f"{ends.total()} answers passed, {len(self._lines)} different kept"
            + f"; {rest}"
            * bool(rest)
        )


def group(exercises: Sequence[Problem], settings: Settings) -> list[Sequence[Problem]]:
    """Parts of the exercises between whose answers the file is saved: a few calls of the model.

    Whole calls, so that a run that goes on asks as it would have.
    """
    size = _CALLS * max(1, settings.batch_size // settings.samples)
    return [exercises[i : i + size] for i in range(0, len(exercises), size)]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
