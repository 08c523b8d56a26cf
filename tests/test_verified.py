"""Answers to exercises: what passes is kept with its proof, and a stopped run goes on."""

import dataclasses
import hashlib
import json

import pytest
from test_evaluate import answering, humaneval

import kdjax
from kdjax.commands import answers as command
from kdjax.data.text import openings, read_json_lines
from kdjax.errors import UserError
from kdjax.evaluation import passk, problems, sandbox
from kdjax.evaluation.verified import HINTS, VerifiedAnswers, group, state_path
from kdjax.models.decoding import Completion
from kdjax.models.tokenizer import load_tokenizer

SETTINGS = passk.Settings(wording="instruct", samples=2, batch_size=4, allow_unsandboxed=True)


@pytest.fixture
def tokenizer(models):
    return load_tokenizer(models / "student.gguf")


def right(call, row):
    """A right answer to an exercise and a wrong one; to the second, two equal right ones."""
    i = 2 * call + row // 2
    wrong = f"def add{i}(a):\n    return None\n"
    return wrong if row % 2 and i != 1 else f"def add{i}(a):\n    return a + {i}\n```\nSo."


def test_what_passes_is_kept_with_its_proof(tokenizer, tmp_path):
    exercises = problems.load_humaneval(humaneval(tmp_path, 4))
    kept = VerifiedAnswers(tmp_path / "out.jsonl", {"seed": 0})
    for part in group(exercises, SETTINGS):
        kept.write(part, tokenizer, answering(right), SETTINGS)
    records = [record for _, record in read_json_lines(tmp_path / "out.jsonl")]
    assert [record["task"] for record in records] == [f"HumanEval/{i}" for i in range(4)]
    asked, answered = records[2]["messages"]
    assert asked["role"] == "user" and "def add2(a):" in asked["content"]
    body = "```python\ndef add2(a):\n    return a + 2\n```"
    assert answered["role"] == "assistant" and answered["content"].endswith(body)
    # The proof is of the program that ran: it can be run again.
    program = problems.program(exercises[2], "instruct", "def add2(a):\n    return a + 2")
    digest = hashlib.sha256(program.encode()).hexdigest()
    assert records[2]["proof"]["program"] == digest and records[2]["proof"]["sample"] == 0
    names, checks = exercises[2].names, exercises[2].checks
    ran = sandbox.run(program, tests=checks, names=names, allow_unsandboxed=True)
    assert ran.reason == "passed"
    assert "4 exercises tried, 4 solved; 5 of 8 answers passed, 4 different" in kept.describe()
    # What the student reads is what the template makes of it, with the loss on the answer.
    tokenizer.render(records[0]["messages"])


@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_makes_a_prompt_of_each_answer_that_passed(tokenizer, tmp_path, hint):
    """`rollout.hints` reads the same question, its opening, a hint, and what judges it."""
    exercises = problems.load_humaneval(humaneval(tmp_path, 2))
    kept = VerifiedAnswers(tmp_path / "out.jsonl", {"--hint": hint})
    kept.write(exercises, tokenizer, answering(right), SETTINGS, hint)
    first, second = (record for _, record in read_json_lines(tmp_path / "out.jsonl"))
    told = {
        "solution": ("A function that solves the problem below", "    return a + 0\n```"),
        "tests": (
            "The answer to the problem below must pass these tests",
            "    assert f(1) == 1\n",
        ),
        "error": (
            "This program fails at the problem below",
            "    return None\n```\nIt ended with wrong answer: A",
        ),
    }
    begin, within = told[hint]
    assert first["hint"].startswith(f"{begin}:\n```python\n") and within in first["hint"]
    if hint == "error":
        assert second["hint"] == ""  # no answer failed
    judged, wording = problems.read_exercise(first["exercise"])
    assert wording == "instruct" and judged == dataclasses.replace(exercises[0], reference="")
    # The student is asked as the model was; the hint stands in the teacher's prompt alone.
    (opening, *_) = openings([tmp_path / "out.jsonl"], tokenizer)
    assert opening.text == problems.prompt_text(exercises[0], "instruct", tokenizer)
    assert first["hint"] in opening.hinted and first["hint"] not in opening.text
    assert opening.hinted.endswith(problems.OPENING)
    # The question comes last: what stands behind it decides how an answer ends.
    asked = first["messages"][0]["content"]
    assert f"{first['hint']}\n\n{asked}" in opening.hinted
    with pytest.raises(UserError, match=r"found an exercise of .*expected task_id, prompt"):
        problems.read_exercise(first["exercise"] | {"wording": "base"})


def test_a_stopped_run_goes_on_and_asks_nothing_twice(tokenizer, tmp_path):
    exercises = problems.load_humaneval(humaneval(tmp_path, 20))
    parts, out = group(exercises, SETTINGS), tmp_path / "out.jsonl"
    assert [len(part) for part in parts] == [8, 8, 4]
    whole = VerifiedAnswers(tmp_path / "whole.jsonl", {"seed": 0})
    for i, part in enumerate(parts):
        whole.write(part, tokenizer, answering(lambda c, r, i=i: right(c + 4 * i, r)), SETTINGS)

    def stop(call, row):
        if call == 2:
            raise KeyboardInterrupt
        return right(call + 4, row)

    first = VerifiedAnswers(out, {"seed": 0})
    first.write(parts[0], tokenizer, answering(right), SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        first.write(parts[1], tokenizer, answering(stop), SETTINGS)
    # A kill between the two files: its answers are there, its tasks are not.
    with out.open("a") as file:
        file.write(json.dumps({"task": "HumanEval/9", "messages": []}) + "\n")
    second, asked = VerifiedAnswers(out, {"seed": 0}), []
    assert list(second.tried) == [f"HumanEval/{i}" for i in range(8)]

    def count(i):
        def answer(call, row):
            asked.append(row)
            return right(call + 4 * i, row)

        return answer

    for i, part in enumerate(parts):
        second.write(part, tokenizer, answering(count(i)), SETTINGS)
    assert len(asked) == 2 * 12
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"made with other seed, top_p; expected the same"):
        VerifiedAnswers(out, {"seed": 1, "top_p": 1.0})
    state_path(out).write_text("{")
    with pytest.raises(UserError, match=r"tried.json: found .*remove it"):
        VerifiedAnswers(out, {"seed": 0})
    state_path(out).unlink()
    with pytest.raises(UserError, match=r"is there already, and out\.jsonl\.tried\.json is not"):
        VerifiedAnswers(out, {"seed": 0})


def test_a_model_without_answers_stops_it(tokenizer, tmp_path):
    exercises = problems.load_humaneval(humaneval(tmp_path))
    kept = VerifiedAnswers(tmp_path / "out.jsonl", {})
    with pytest.raises(UserError, match="gave no answer: RuntimeError: out of memory"):
        fail = answering(lambda call, row: RuntimeError("out of memory"))
        kept.write(exercises, tokenizer, fail, SETTINGS)
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command(models, tmp_path, monkeypatch, capsys):
    file, out = humaneval(tmp_path), tmp_path / "out.jsonl"

    def generate(self, prompts, sampling, *, batch_size):
        assert sampling.temperature == 0.8 and len(prompts) == 6 == batch_size
        texts = [f"def add{i}(a):\n    return a + {i}" for i in (0, 0, 1, 9, 9, 9)]
        return [Completion([], text, "stop", []) for text in texts]

    monkeypatch.setattr(kdjax.Model, "generate", generate)
    flags = [str(models / "student.gguf"), f"--exercises={file}", f"--out={out}", "--samples=2"]
    flags += ["--max-tokens=32", "--allow-unsandboxed"]
    assert command.main([*flags, "--batch-size=6"]) == 0
    said = "3 exercises tried, 2 solved; 3 of 6 answers passed, 2 different kept; 3 exception"
    assert said in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    monkeypatch.setattr(kdjax.Model, "generate", None)  # asked for nothing again
    assert command.main([*flags, "--batch-size=6"]) == 0
    assert command.main([*flags, "--batch-size=8"]) == 2
    assert "made with other --batch-size" in capsys.readouterr().err
    assert command.main([*flags, "--samples=0"]) == 2
    file.write_text(file.read_text() + "\n" + file.read_text())
    assert command.main(flags) == 2
    assert "3 exercises with a task_id that another has" in capsys.readouterr().err
