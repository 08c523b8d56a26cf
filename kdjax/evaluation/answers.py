"""Writes a model's answers to a file, as text to train on; a stopped run goes on.

`WrittenAnswers` holds all answers to prompts, `VerifiedAnswers` programs that passed the tests of
their exercises: rejection sampling after Yuan et al. 2023 (arXiv:2308.01825), judged by the sandbox
and not by a model.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kdjax.data.conversations import Conversation
from kdjax.data.fields import NAMED, Fields
from kdjax.data.sources import find_files
from kdjax.data.text import openings
from kdjax.errors import UserError
from kdjax.evaluation import passk
from kdjax.evaluation import problems as bench
from kdjax.evaluation.drafting import begin_each
from kdjax.evaluation.passk import Generate, Settings
from kdjax.evaluation.problems import Problem
from kdjax.evaluation.sandbox import PASSED
from kdjax.formats.files import replacing
from kdjax.models.decoding import Sampling
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer


class PromptRecord(NamedTuple):
    """A prompt's ids, and their conversation or text."""

    ids: tuple[int, ...]
    chat: Conversation | None = None
    beginning: str = ""  # beginning of the assistant's turn, or of a text

    def answered(self, answer: str) -> dict[str, Any]:
        """The record with this answer."""
        text = f"{self.beginning}{answer}"
        if not self.chat:
            return {"text": text}
        return self.chat.answered(text)


def list_prompts(
    patterns: str, tokenizer: Tokenizer, most: int, fields: Fields = NAMED
) -> list[PromptRecord]:
    """Reads the beginnings of all documents of `patterns`, as `drafting.begin_each` does.

    Raises `UserError` if there are none.
    """
    opened = len(tokenizer.open_text([]))
    found = begin_each(openings(find_files(patterns, fields), tokenizer, fields), tokenizer, most)
    if not found:
        raise UserError(f"{patterns}: found no prompt of 1 to {most} ids; expected some.")
    prompts = []
    for ids, one in found.items():
        beginning = one.opening if one.chat else one.text
        if not one.whole:
            beginning = tokenizer.decode(list(ids[opened:]), start=True)
        prompts.append(PromptRecord(ids, one.chat, beginning))
    return prompts


_CALLS = 4  # calls of the model between two saves: programs run while the next answers are written


def state_path(out: Path) -> Path:
    """File next to `out` that records what was asked, and how."""
    return out.with_name(f"{out.name}.tried.json")


class _Answers:
    """Answers in `out`, one a line, and a record of what was asked next to it.

    `made_by` holds everything that decides the answers; a file made by something else is refused.
    """

    def __init__(self, out: Path, made_by: Mapping[str, Any]) -> None:
        self._out, self._state = out, state_path(out)
        self._made_by = json.loads(json.dumps(made_by))
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
            before, kept, digest = dict(found["made_by"]), int(found["kept"]), found["sha256"]
            self._go_on(found)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._state}: found {error!r}; remove it and {out}.") from error
        if before != self._made_by:
            every = before.keys() | self._made_by.keys()
            names = sorted(name for name in every if before.get(name) != self._made_by.get(name))
            raise UserError(
                f"{out}: found answers made with other {', '.join(names)}; expected the same to go "
                f"on. Give another --out, or remove it and {self._state.name}."
            )
        # Answers are saved before their prompts: answers to prompts that are not listed come again.
        saved = out.read_bytes().splitlines(keepends=True)[:kept] if out.exists() else []
        if hashlib.sha256(b"".join(saved)).hexdigest() != digest:
            raise UserError(
                f"{out}: found other lines than the {kept:,} that were saved; expected these to "
                f"go on. Give another --out, or remove it and {self._state.name}."
            )
        self._lines = [line.decode() for line in saved]

    def _go_on(self, found: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _save(self, **state: Any) -> None:
        if not self._state.exists():  # without it, after a kill, `out` would look like another's
            self._tell("")
        text = "".join(self._lines)
        with replacing(self._out) as file:
            file.write(text.encode())
        self._tell(text, **state)

    def _tell(self, text: str, **state: Any) -> None:
        saved = {"kept": text.count("\n"), "sha256": _sha256(text)}
        with replacing(self._state) as file:
            file.write(f"{json.dumps({'made_by': self._made_by, **saved, **state})}\n".encode())


class WrittenAnswers(_Answers):
    """A model's answers to prompts, in `out`, with the number of prompts next to it.

    A line is the conversation with the answer, `messages`, or the `text` of prompt and answer.
    `samples` is the number of answers to each prompt. Empty ones are left out, and with `ended`
    so are answers that were cut off.
    """

    def __init__(
        self, out: Path, made_by: Mapping[str, Any], *, samples: int = 1, ended: bool = False
    ) -> None:
        self.asked, self._samples, self._ended = 0, samples, ended
        self._tokens, self._seconds = 0, 0.0  # totals of this process
        super().__init__(out, made_by)

    def _go_on(self, found: Mapping[str, Any]) -> None:
        self.asked = int(found.get("asked", 0))

    def write(
        self,
        prompts: Sequence[PromptRecord],
        model: Model,
        sampling: Sampling,
        batch_size: int,
        room: int,
    ) -> None:
        """Adds the answers to the next prompts; a sample's random key is its number among all."""
        begun, first = time.monotonic(), self.asked * self._samples
        each = [prompt for prompt in prompts for _ in range(self._samples)]
        said = model.generate(
            [prompt.ids for prompt in each],
            sampling,
            batch_size=batch_size,
            room=room,
            numbers=range(first, first + len(each)),
        )
        self._lines += [
            f"{json.dumps(prompt.answered(one.text))}\n"
            for prompt, one in zip(each, said, strict=True)
            if one.text.strip() and (one.reason == "stop" or not self._ended)
        ]
        self.asked += len(prompts)
        self._tokens += sum(len(one.ids) for one in said)
        self._seconds += time.monotonic() - begun
        self._save(asked=self.asked)

    def describe(self, count: int) -> str:
        """One line: how many of `count` prompts were answered, what was left out, how fast."""
        speed = f"; {self._tokens / self._seconds:,.1f} tokens/s" if self._seconds else ""
        done = f"{self.asked:,} of {max(count, self.asked):,} prompts answered"
        out, why = self.asked * self._samples - len(self._lines), "empty or cut off"
        left = f", {out:,} left out: {why if self._ended else 'empty'}" if out else ""
        return f"{done}, {len(self._lines):,} answers kept{left}{speed}"


class VerifiedAnswers(_Answers):
    """Answers that passed, in `out`, and a record of all tries next to it.

    Each line of `out` is a conversation, `messages`, with its `task` and `proof`: the SHA-256s of
    the program and of the tests, and the number of the sample. Equal programs are kept once.
    """

    def __init__(self, out: Path, made_by: Mapping[str, Any]) -> None:
        self.tried: dict[str, list[str]] = {}  # how each answer of a task ended
        super().__init__(out, made_by)

    def _go_on(self, found: Mapping[str, Any]) -> None:
        self.tried = dict(found.get("tried", {}))

    def write(
        self,
        exercises: Sequence[Problem],
        tokenizer: Tokenizer,
        generate: Generate,
        settings: Settings,
    ) -> None:
        """Adds the answers to exercises not tried yet; `describe` says how they ended."""
        left = [exercise for exercise in exercises if exercise.task not in self.tried]
        if not left:
            return
        result = passk.run_benchmark(left, tokenizer, generate, settings)
        if result["mode"] == passk.INFERENCE_FAILED:
            raise UserError(f"the model gave no answer: {result['inference_error']}")
        by_task = {exercise.task: exercise for exercise in left}
        ends: dict[str, list[str]] = {task: [] for task in by_task}
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
            self._lines.append(f"{json.dumps(record)}\n")
        self.tried |= ends
        self._save(tried=self.tried)

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


_T = TypeVar("_T")


def group(asked: Sequence[_T], batch_size: int, samples: int) -> list[Sequence[_T]]:
    """Splits requests into parts of a few model calls; the file is saved after each.

    Parts are complete calls, so that a resumed run makes the same calls.
    """
    size = _CALLS * max(1, batch_size // samples)
    return [asked[i : i + size] for i in range(0, len(asked), size)]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
