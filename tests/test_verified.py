"""Answers to prompts are kept, those to exercises if they pass; a stopped run goes on."""

import dataclasses
import hashlib
import json
import os

import pytest
from test_evaluate import answering, humaneval
from test_vocabularies import sentencepiece

import kdjax
from kdjax.commands import answers as command
from kdjax.data.readers import read_json_lines
from kdjax.demo import STUDENT
from kdjax.errors import UserError
from kdjax.evaluation import answers, passk, problems, sandbox
from kdjax.evaluation.answers import (
    PromptRecord,
    VerifiedAnswers,
    WrittenAnswers,
    group,
    list_prompts,
    state_path,
)
from kdjax.formats.locks import holding_file
from kdjax.models.decoding import Completion, Sampling
from kdjax.models.tokenizer import from_gguf, load_tokenizer

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
    for part in group(exercises, 4, 2):
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


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_asks_nothing_twice(tokenizer, tmp_path):
    exercises = problems.load_humaneval(humaneval(tmp_path, 20))
    parts, out = group(exercises, 4, 2), tmp_path / "out.jsonl"
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
    for damaged in ("{", '{"made_by": 3, "kept": 1, "sha256": ""}', "[]"):
        state_path(out).write_text(damaged)
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

    def generate(self, prompts, sampling, *, batch_size, room):
        assert sampling.temperature == 0.8 and len(prompts) == 6 == batch_size
        assert room == max(map(len, prompts)) + 32
        texts = [f"def add{i}(a):\n    return a + {i}" for i in (0, 0, 1, 9, 9, 9)]
        return [Completion([], text, "stop", []) for text in texts]

    monkeypatch.setattr(kdjax.Model, "generate", generate)
    flags = [str(models / "student.gguf"), f"--exercises={file}", f"--out={out}", "--samples=2"]
    flags += ["--max-tokens=32", "--allow-unsandboxed"]
    assert command.main([*flags, "--batch-size=6"]) == 0
    said = "3 exercises tried, 2 solved; 3 of 6 answers passed, 2 different kept; 3 exception"
    assert said in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2
    monkeypatch.setattr(command.Target, "load", None)  # needed for nothing again
    assert command.main([*flags, "--batch-size=6"]) == 0
    assert capsys.readouterr().out == f"{out}: {said}; nothing is left to write\n"
    assert command.main([*flags, "--batch-size=8"]) == 2
    assert "made with other --batch-size" in capsys.readouterr().err
    assert command.main([*flags, "--batch-size=6", "--limit=1"]) == 2
    assert "made with other --limit;" in capsys.readouterr().err
    assert command.main([*flags, "--samples=0"]) == 2
    file.write_text(file.read_text() + "\n" + file.read_text())
    assert command.main(flags) == 2
    assert "3 problems with a task_id that another has" in capsys.readouterr().err


def test_a_prompt_is_gone_on_from_whole_and_of_a_text_the_beginning(tmp_path):
    """Each once; a conversation loses its answer and keeps what opens it."""
    tokenizer = load_tokenizer(STUDENT)
    given, asked = "def add(a, b):\n    return a + b\n", [{"role": "user", "content": "Add."}]
    chat = [*asked, {"role": "assistant", "content": "No."}]
    lines = [
        {"prompt": given, "completion": "# no"},
        {"text": given},
        {"text": given},
        {"messages": chat, "opening": "Sure:"},
        {"prompt": given * 50},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    tokenizer = dataclasses.replace(tokenizer, chat_template=template)
    whole, begun, said = list_prompts(f"{tmp_path}/q.jsonl", tokenizer, 100)
    assert (whole.beginning, tokenizer.decode(list(whole.ids))) == (given, given)
    assert given.startswith(begun.beginning) and 0 < len(begun.ids) == len(whole.ids) // 2
    assert begun.answered("x") == {"text": f"{begun.beginning}x"}
    answer = {"role": "assistant", "content": "Sure: 3"}
    assert said.answered(" 3") == {"messages": [*asked, answer]}
    with pytest.raises(UserError, match="found no prompt of 1 to 3 ids"):
        list_prompts(f"{tmp_path}/q.jsonl", tokenizer, 3)


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_a_beginning_is_the_text_to_the_letter(tmp_path, kind):
    """Not cut within a character of several ids, and without the space that encoding puts first."""
    tokenizer = load_tokenizer(STUDENT)
    if kind == "SentencePiece":
        tokenizer = from_gguf(sentencepiece(), "x")
    for count in range(6, 16):
        given = "ab" + "日本語の文章" * count
        (tmp_path / "q.jsonl").write_text(json.dumps({"text": given}))
        (begun,) = list_prompts(f"{tmp_path}/q.jsonl", tokenizer, 300)
        assert begun.beginning and given.startswith(begun.beginning)
        assert tokenizer.open_text(tokenizer.encode(begun.beginning)) == list(begun.ids)


def test_an_exercise_is_known_by_its_id_as_a_text(tokenizer, tmp_path):
    """Numbers became texts in the file of what was tried, and were asked twice."""
    path = humaneval(tmp_path, 2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(r | {"task_id": i}) for i, r in enumerate(records)))
    exercises = problems.load_humaneval(path)
    for _ in range(2):
        kept = VerifiedAnswers(tmp_path / "out.jsonl", {"seed": 0})
        kept.write(exercises, tokenizer, answering(right), SETTINGS)
        assert kept.describe().startswith("2 exercises tried")
    path.write_text(json.dumps(records[0] | {"prompt": None}))
    with pytest.raises(UserError, match="HumanEval/0' has no prompt, or one of another kind"):
        problems.load_humaneval(path)


def test_what_is_said_to_prompts_is_kept_and_asked_once(models, tmp_path):
    """A kill between the two files writes some answers again, and each draws as it would have."""
    model = kdjax.load(f"{models}/student.gguf", dtype="float32")
    prompts = [PromptRecord((i, i + 1, 7), None, f"{i}:") for i in range(12)]
    sampling, fixed = Sampling(6, temperature=1.0, stop_ids=()), dict(batch_size=4, room=16)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    parts = group(prompts, 1, 1)
    assert [len(part) for part in parts] == [4, 4, 4]
    for path, count in ((whole, 3), (out, 2)):
        kept = WrittenAnswers(path, {"seed": 0}, samples=2)
        for part in parts[:count]:
            kept.write(part, model, sampling, **fixed)
    lines = whole.read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    asked = [list(prompt.ids) for prompt in prompts for _ in range(2)]
    said = model.generate(asked, sampling, batch_size=4)  # all at once
    assert texts == [f"{i // 2}:{one.text}" for i, one in enumerate(said)]
    assert len(set(texts)) == 24
    with out.open("a") as file:
        file.write(json.dumps({"text": "8: of no part that is told of"}) + "\n")
    kept = WrittenAnswers(out, {"seed": 0}, samples=2)
    assert kept.asked == 8
    kept.write(parts[2], model, sampling, **fixed)
    assert out.read_bytes() == whole.read_bytes()
    for text in ("", "\n".join(lines[:9]), whole.read_text().replace("3:", "33:"), "\xff"):
        out.write_bytes(text.encode("latin-1"))
        with pytest.raises(UserError, match=r"found other lines than the 24 that were saved; .*"):
            WrittenAnswers(out, {"seed": 0}, samples=2)
    out.unlink()
    with pytest.raises(UserError, match=r"remove it and out\.jsonl\.tried\.json"):
        WrittenAnswers(out, {"seed": 0}, samples=2)
    assert kept.describe(12).startswith("12 of 12 prompts answered, 24 answers kept; ")
    ended = WrittenAnswers(tmp_path / "ended.jsonl", {}, ended=True)
    ended.write(prompts, model, sampling, **fixed)  # each is cut off
    assert ended.asked == 12 and not (tmp_path / "ended.jsonl").read_text()
    said = "12 of 12 prompts answered, 0 answers kept, 12 left out: empty or cut off; "
    assert ended.describe(12).startswith(said)


def test_a_kill_behind_the_first_answers_is_no_file_of_anothers(models, tmp_path, monkeypatch):
    model = kdjax.load(f"{models}/student.gguf", dtype="float32")
    prompts, out = (
        [PromptRecord((i, i + 1, 7), None, f"{i}:") for i in range(2)],
        tmp_path / "out.jsonl",
    )
    write = lambda: WrittenAnswers(out, {}).write(  # noqa: E731
        prompts, model, Sampling(6, temperature=1.0, stop_ids=()), batch_size=4, room=16
    )
    replacing = answers.replacing

    def kill(path):
        if path == state_path(out) and out.exists():
            raise KeyboardInterrupt
        return replacing(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(answers, "replacing", kill)
        write()
    first = out.read_bytes()
    assert WrittenAnswers(out, {}).asked == 0
    write()
    assert out.read_bytes() == first and WrittenAnswers(out, {}).asked == 2


def test_answers_go_to_no_folder_and_not_among_the_prompts(models, tmp_path, capsys):
    """A later call would take them for prompts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "q.jsonl").write_text('{"text": "def f(x):"}\n')
    flags = [str(models / "student.gguf"), f"--prompts={folder}", "--max-tokens=4"]
    for out, message in (
        (f"{folder}/../texts/a.jsonl", "a.jsonl is within "),
        (str(tmp_path), "is a folder; expected a file to write. Name another."),
        ("", "error: . is a folder"),
    ):
        assert command.main([*flags, f"--out={out}"]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["q.jsonl"]


def test_two_calls_do_not_write_into_one_file(models, tmp_path, capsys):
    """The later save of two calls would replace the answers of the other."""
    (tmp_path / "q.jsonl").write_text('{"text": "def f(x):"}\n')
    flags = [str(models / "student.gguf"), f"--prompts={tmp_path}/q.jsonl", "--max-tokens=4"]
    out = tmp_path / "made" / "a.jsonl"
    with holding_file(out, ""):
        assert command.main([*flags, f"--out={out}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: {out} is in use by process {os.getpid()} on ")
    assert last.endswith("Wait until it ends, stop it, or give another --out.")
    assert not out.parent.exists()


@pytest.mark.slow
def test_the_command_answers_prompts(models, tmp_path, capsys, monkeypatch):
    texts = [{"text": f"def f{i}(x):\n    return x + {i}\n"} for i in range(9)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(x) + "\n" for x in texts))
    out = tmp_path / "out.jsonl"
    flags = [str(models / "student.gguf"), f"--prompts={tmp_path}/q.jsonl", f"--out={out}"]
    more = ["--max-tokens=4"]
    assert command.main([*flags, *more, "--limit=8", "--batch-size=2"]) == 0
    assert "8 of 8 prompts answered, 8 answers kept" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 8
    first = out.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(command.Target, "load", lambda *_: pytest.fail("loaded"))
        assert command.main([*flags, *more, "--limit=8"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith(" 8 answers kept; nothing is left to write\n") and not said.err
    assert command.main([*flags, *more, "--batch-size=3"]) == 0  # which decides nothing
    assert "9 of 9 prompts answered, 9 answers kept" in capsys.readouterr().out
    assert out.read_text().startswith(first) and len(out.read_text()) > len(first)
    assert command.main([*flags, *more, "--limit=8"]) == 0
    assert "9 of 9 prompts answered" in capsys.readouterr().out
    for bad, message in (
        ("--temperature=0.5", "made with other --temperature;"),
        ("--timeout=2", "--timeout has no meaning with --prompts"),
        (f"--exercises={out}", "not allowed with argument"),
        (f"--out={tmp_path}/q.jsonl", "q.jsonl is what the command reads"),
        ("--seconds=-1", "--seconds=-1 must be 0 or more"),
        ("--seconds=nan", "--seconds: found 'nan'; expected a finite number"),
        ("--seed=1", "made with other --seed;"),
        ("--samples=0", "--samples=0 must be 1 or more"),
    ):
        others = flags[:-1] if bad.startswith("--out=") else flags
        assert command.main([*others, *more, bad]) == 2
        assert message in capsys.readouterr().err
    assert command.main([flags[0], flags[2], f"--exercises={out}", "--ended"]) == 2
    assert "--ended has no meaning with --exercises" in capsys.readouterr().err
    assert command.main([flags[0], f"--out={out}"]) == 2
    assert "one of the arguments --prompts --exercises is required" in capsys.readouterr().err
