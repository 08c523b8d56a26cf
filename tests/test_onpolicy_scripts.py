"""Prompts and development problems made from documented functions, and the table of settings."""

import dataclasses
import json
import types
from unittest import mock

import pytest
from test_hints import write_hints

from kdjax.commands import parsing
from kdjax.config import list_phases
from kdjax.errors import UserError
from kdjax.evaluation.problems import load_humaneval
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.decoding import Completion
from scripts.bench.arms import run_arms
from scripts.checks import compare_passk
from scripts.corpus.conversations import functions
from scripts.onpolicy import exercises, invent, prompts, table

MODULE = '''"""A module of nothing but examples, as long as one that people wrote."""


def spread(values, width):
    """Gives every value width times, in order.

    >>> spread([1, 2], 2)
    [1, 1, 2, 2]
    >>> spread([], 3)
    []
    """
    out = []
    for value in values:
        out.extend([value] * width)
    return out


def lean(values):
    """Gives the values that are not none of the values."""
    kept = [value for value in values if value is not None]
    for value in kept:
        print(value)
    return kept


def wrong(values):
    """Gives the number of the values that there are.

    >>> wrong([1])
    2
    >>> wrong([])
    1
    """
    total = 0
    for value in values:
        total += 1
    return total


def add_two_numbers(a, b):
    """Gives the sum of the two numbers that it is given.

    >>> add_two_numbers(1, 2)
    3
    >>> add_two_numbers(1, 1)
    2
    """
    total = a + b
    print(total)
    return total
'''


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "module.py").write_text(MODULE)
    (folder / "copy.py").write_text(MODULE.replace("spread", "spread_out"))
    return str(folder)


def test_a_function_gives_four_kinds_of_prompt_and_its_bug_is_one_change():
    first = next(functions(MODULE))
    made = {kind: question for kind, question, _ in prompts.make_prompts(first)}
    assert set(made) <= set(prompts.KINDS) and {"complete", "describe", "test"} <= set(made)
    assert "out.extend" not in made["complete"] and "out.extend" in made["test"]
    assert prompts.break_function(first, prompts.random.Random(0)) != first.source
    broken = made["fix"]
    assert "value" in broken and "[value] * width" not in broken  # * became +


def test_problems_run_and_neither_they_nor_copies_nor_benchmarks_are_in_a_prompt(text):
    benchmark = [("add_two_numbers", "def add_two_numbers(a, b):\n    return a + b\n")]
    made, problems, _, counts = prompts.make(text, benchmark, development=1, seed=0, workers=1)
    assert len(problems) == 1 and problems[0]["entry_point"].startswith("spread")
    assert counts["functions with examples that tell"] == 2  # `wrong` fails its own
    asked = [prompt["messages"][0]["content"] for prompt in made]
    assert any("lean" in text for text in asked)
    assert not [text for text in asked if "spread" in text or "add_two_numbers" in text]


def test_the_files_are_what_the_table_and_evaluate_read(text, tmp_path, capsys):
    out = tmp_path / "out"
    assert prompts.main([str(out), "--read", text, "--kinds=test,complete", "--most=3"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] >= 1
    problems = load_humaneval(out / "development.jsonl")  # in an order of Python's own trees
    problem = next(problem for problem in problems if "def spread" in problem.prompt)
    assert "check(candidate)" in problem.tests and problem.reference.startswith("    out = []")
    kept = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert len(kept) == 3 and {prompt["kind"] for prompt in kept} <= {"test", "complete"}


def test_a_script_asks_as_evaluate_does_and_a_task_shows_what_is_asked_of_it():
    function = next(functions(MODULE))
    made = {kind: question for kind, question, _ in prompts.make_prompts(function)}
    opened = {kind: opening for kind, _, opening in prompts.make_prompts(function)}
    assert (
        opened["script"].endswith('    """\n') and "def spread(values, width)" in opened["script"]
    )
    assert opened["task"].endswith("```python\n") and not opened["complete"]
    assert '"""Gives every value' in made["script"] and "out.extend" not in made["script"]
    assert "assert spread([1, 2], 2) == [1, 1, 2, 2]" in made["task"]
    assert "def spread" not in made["task"]


def test_a_problem_is_one_that_can_be_solved_where_answers_are_judged():
    record = {
        "task_id": "Development/0",
        "prompt": 'def call(function, x):\n    """Gives what the function gives of x."""\n',
        "entry_point": "call",
        "canonical_solution": "    return function(x)\n",
        "test": "def check(candidate):\n    assert call(len, [1]) == 1\n",
    }
    assert not prompts.passes(record)  # a program in another process cannot be handed `len`
    literal = {"test": "def check(candidate):\n    assert call(1, [2]) == [2]\n"}
    assert prompts.passes(record | literal | {"canonical_solution": "    return x\n"})


class Inventor:
    """Answers each request with the next of these."""

    def __init__(self, *answers):
        self.answers = answers

    def generate(self, asked, sampling, batch_size):
        assert len(asked) == len(self.answers)
        return [Completion([], answer, "stop", []) for answer in self.answers]


class Words:
    stop_ids = (0,)

    def render(self, messages, *, answer_next):
        return messages[0]["content"]

    def encode(self, text):
        return [1]


EXERCISE = ' {name}(values: List[int]) -> int:\n    """{says}\n\n    >>> f([1])\n    1\n    """'


def test_what_a_model_invents_is_kept_if_it_is_an_exercise_and_new():
    says = "Return how often the largest value of the list is in it, 0 for none."
    good = EXERCISE.format(name="largest_count", says=says)
    answers = (
        good,
        good + "\n    return max(values)",  # the same, with its body
        "no code at all",
        EXERCISE.format(name="brief", says="Too few words."),
        EXERCISE.format(name="add", says=says + " Another."),
    )
    model, words, benchmark = Inventor(*answers), Words(), [("add", "def add(a, b):")]
    made, counts = invent.invent(model, words, len(answers), benchmark)  # type: ignore[arg-type]
    assert counts == {
        "left out: is there already": 1,
        "left out: no exercise": 2,
        "left out: has an entry point's name": 1,
        "prompts": 1,
    }
    (turn,) = made[0]["messages"]
    assert "from typing import List\n\n\ndef largest_count" in turn["content"]
    assert "return max" not in turn["content"] and made[0]["opening"].endswith('    """\n')


def test_an_exercise_is_asked_for_in_words():
    says = "Return how often the largest value of the list is in it, 0 for none. Examples:"
    asked = invent.ask_plainly("def" + EXERCISE.format(name="largest_count", says=says))
    assert "largest_count" in asked and "in it, 0 for none." in asked and "Examples" not in asked
    assert "\n>>> f([1])\n1\n" in asked and '"""' not in asked


def test_exercises_with_examples_on_literals_become_problems_that_no_prompt_is_like(tmp_path):
    said = "Return how often the {} value of the list is in it, and nothing for an empty one."
    shown = '\n\n    >>> {0}([3, 3])\n    2\n    >>> {0}(values=[])\n    0\n    """'
    head = 'def {}(values: list) -> int:\n    """' + said

    def exercise(name: str, word: str, more: str = shown) -> str:
        return head.format(name, word) + more.format(name)

    problem = exercises.as_problem(exercise("largest", "largest"), "Invented/0")
    assert problem is not None
    judged = problem | {"canonical_solution": "    return values.count(3)\n"}
    assert prompts.passes(judged) and not prompts.passes(problem)
    other = exercise("of_names", "least", '\n\n    >>> of_names(x)\n    1\n    """')
    once = exercise("once", "least", '\n\n    >>> once([1])\n    1\n    """')
    assert exercises.as_problem(other, "") is None and exercises.as_problem(once, "") is None

    words = "Give the list back to front, as a new list, with every second value left out of it."
    shown = "\n\n    >>> turn([1, 2])\n    [2]\n    >>> turn([])\n    []\n"
    far = f'def turn(values: list) -> list:\n    """{words}{shown}    """'
    files = [exercise("largest", "largest"), exercise("smallest", "largest"), far]
    asked = [prompts.as_script(text) for text in files]
    records = [
        {"messages": [{"role": "user", "content": question}], "opening": opening}
        for question, opening in asked
    ]
    for name in ("invented", "others"):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    paths = [str(tmp_path / name) for name in ("invented.jsonl", "out", "others.jsonl")]
    assert exercises.main([*paths, "--count=1"]) == 0
    made = {path.name: path.read_text().splitlines() for path in (tmp_path / "out").iterdir()}
    assert {name: len(lines) for name, lines in made.items()} == {
        "problems.jsonl": 1,
        "exercises.jsonl": 1,
        "opened.jsonl": 1,
        "plain.jsonl": 1,
        "others.jsonl": 1,
    }
    assert json.loads(made["opened.jsonl"][0]) == records[2]
    names = [load_humaneval(tmp_path / "out" / f"{n}.jsonl") for n in ("problems", "exercises")]
    assert [one.names for (one,) in names] == [("largest",), ("turn",)]
    (tmp_path / "others.jsonl").write_text('{"text": "no prompt"}\n')
    assert exercises.main(paths) == 2


def parse_arms(*texts, hints="hints.jsonl"):
    """The arms of the published pair's config, by name."""
    parser = table._make_parser()
    asked = ["--config=onpolicy_1p5b_0p5b", "--development=d.jsonl", "--out=o", "--seconds=125"]
    run = parsing.parse_run(parser, [*asked, f"--hints={hints}", "--config.train.steps=130"])
    names = texts or table.list_arms(run.config, 125.0, hints)
    arms = [table.Arm.parse(text, run.config, run.options, parser) for text in names]
    return {arm.name: arm for arm in arms}


def test_every_arm_is_a_config_that_can_run():
    arms = parse_arms()
    assert len(arms) == 11
    for arm in arms.values():
        phases = list_phases(arm.config)
        seconds = [phase.train.seconds for phase in phases if arm.seconds]
        assert sum(seconds) == arm.seconds == (0 if arm.setting == "before" else 125), arm.name
        assert all(phase.teacher.path and not phase.eval.every for phase in phases)
    own, cold, text = (arms[f"{name}*0"].config for name in ("own", "cold_own", "text"))
    assert own.train.steps == 130 and text.train.steps == 559 and not text.rollout.prompts
    writers = [phase.rollout.writer for phase in list_phases(cold)]
    assert writers == ["teacher", "student"] and cold.train.until == "overlap"
    first, then = list_phases(arms["text_own*0"].config)
    assert first.train == dataclasses.replace(text.train, steps=335, seconds=75.0)
    assert (then.rollout.prompts, then.train.steps) == (own.rollout.prompts, 156)
    assert then.rollout == dataclasses.replace(own.rollout, every=18)
    rates = dataclasses.replace(own.optim, warmup_steps=then.optim.warmup_steps)
    assert then.optim == rates and then.loss == own.loss
    # The control asks the same questions, without the hints.
    plain = dataclasses.replace(arms["hints_big*0"].config, train=own.train)
    rollout = dataclasses.replace(plain.rollout, hints=False, hint_tokens=0)
    assert arms["own_unhinted*0"].config == dataclasses.replace(plain, rollout=rollout)
    assert (plain.rollout.max_tokens, own.rollout.max_tokens) == (512, 320)
    big = arms["big_hints_self*0"].config
    assert (big.student.path, big.teacher.path) == (own.teacher.path, "self")
    assert set(arms) - set(parse_arms(hints="")) == {
        f"{name}*0"
        for name in ("verified", "own_unhinted", "hints_big", "hints_self", "big_hints_self")
    }


def test_an_arm_is_read_with_the_fields_that_differ_and_its_seed():
    mixed = "0.5*jsd:beta=0.3+0.5*reverse_kl"
    text = f"cold_own+loss.divergence={mixed}+then.0.optim.learning_rate=2e-5*2"
    (arm,) = parse_arms(text).values()
    assert (arm.name, arm.setting) == (text, text.removesuffix("*2"))
    assert arm.config.train.seed == 2 and arm.config.loss.divergence == mixed
    assert arm.config.then[0]["optim.learning_rate"] == 2e-5
    for wrong, found in (
        ("nothing", "found the arm 'nothing'; expected NAME"),
        ("own*x", "expected NAME"),
        ("own+optim.beta2", "beta2"),
        ("own+optim.beta2=2", "own[+]optim.beta2=2: .*optim.beta2=2.0: must be at least 0"),
    ):
        with pytest.raises(UserError, match=f"(?s){found}"):
            parse_arms(wrong)


def test_arms_that_have_a_line_are_not_run_again_and_one_that_fails_is_passed_over(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("scripts.bench.arms.gc", mock.Mock())  # seconds of all that pytest holds
    monkeypatch.setattr("scripts.bench.arms.time", types.SimpleNamespace(monotonic=lambda: 5.0))
    seconds = {"a": 1, "b": 2, "c": 9, "d": 3}
    arms = [types.SimpleNamespace(name=name, seconds=s) for name, s in seconds.items()]
    ran = []

    def run(arm):
        ran.append(arm.name)
        return {"half": 1 / (len(ran) - 1)}  # the first fails

    for _ in range(2):
        run_arms(arms, run, tmp_path, until=19.0, around=6.0)
    assert ran == ["a", "b", "d", "a"]  # c would end too late
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["name"], line["half"]) for line in lines] == [("b", 1), ("d", 0.5), ("a", 1 / 3)]
    assert '"failed": "division by zero"' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_arms_train_and_are_judged_from_one_start(models, text, tmp_path, capsys):
    """By text; by itself with hints, which it measures first; and seeds of own answers."""
    hints = write_hints(tmp_path / "hints.jsonl")
    problem = {"task_id": "T/0", "prompt": "def f(a):\n", "entry_point": "f"}
    problem |= {"canonical_solution": "    return a", "test": "def check(f):\n    assert f(1) == 1"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem))
    (tmp_path / "held.py").write_text("".join(f"held_{i} = {i}\n" for i in range(60)))
    fields = {
        "teacher.path": models / "teacher.gguf",
        "student.path": models / "student.gguf",
        "teacher.allow_degenerate": True,  # hints gain it nothing
        "data.train": text,
        "data.heldout": tmp_path / "held.py",
        "data.cache_dir": tmp_path / "rows",
        "rollout.prompts": text,
        "rollout.max_tokens": 4,
        "rollout.every": 2,
        "rollout.gap_exercises": 2,
        "train.steps": 5,
        "train.microbatches": 1,
        "optim.warmup_steps": 1,
    }
    asked = [
        "--config=onpolicy_1p5b_0p5b:tiny",
        *(f"--config.{name}={value}" for name, value in fields.items()),
        f"--hints={hints}",
        f"--development={tmp_path}/problems.jsonl",
        f"--humaneval={tmp_path}/problems.jsonl",
        f"--beside=other={text}",
        *("--seconds=60", "--answer-tokens=2", "--rows=8", "--allow-unsandboxed", "--files"),
        f"--out={tmp_path}/out",
    ]
    arms = "own*1; own*2; before; hints_self; cold_own; own+student.lora.rank=2"
    assert table.main([*asked, f"--arms={arms}"]) == 0
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    found = {line["name"]: line for line in map(json.loads, lines)}
    names = ["own*1", "own*2", "before*0", "hints_self*0", "cold_own*0"]
    assert list(found) == [*names, "own+student.lora.rank=2*0"]
    assert found["own*1"]["ended"] == [5] and found["own*1"]["train_seconds"][0] > 0
    start = found["before*0"]["heldout"]["kl"]
    assert found["own*1"]["start"]["kl"] == found["own*2"]["start"]["kl"] == start
    assert found["own*1"]["heldout"]["kl"] != found["own*2"]["heldout"]["kl"] != start
    others = [found[name]["beside"]["other"] for name in ("before*0", "own*1", "own*2")]
    assert len(set(others)) == 3 and others == pytest.approx([others[0]] * 3, rel=0.1)
    assert found["hints_self*0"]["gap"]["exercises"] == 2
    assert found["hints_self*0"]["start"]["kl"] == pytest.approx(0, abs=1e-3)
    assert len(found["cold_own*0"]["ended"]) == 2
    judged = [tmp_path / "out" / name / "judged.json" for name in ("before-0", "own-1", "own-2")]
    assert "humaneval bare" in json.loads(judged[1].read_text())
    assert compare_passk.main([str(path) for path in judged]) == 0
    assert "| HumanEval, mean of 3 wordings | 1, 2 | 0.0 | 0.0 |" in capsys.readouterr().out
    before = open_checkpoint(str(tmp_path / "out" / "before-0" / "student.gguf"))
    assert before.spec == open_checkpoint(str(models / "student.gguf")).spec
    assert table.main([*asked, f"--arms={arms}"]) == 0
    assert (tmp_path / "out" / "results.jsonl").read_text().splitlines() == lines
    # Files are asked for of what each arm reads, before any trains.
    missing = f"--config.teacher.path={tmp_path}/none.gguf"
    assert table.main([*asked, missing, "--arms=hints_self*0"]) == 0
    assert table.main([*asked, f"--arms=own*3; own+rollout.prompts={tmp_path}/none.jsonl*0"]) == 2
    assert f"--config.rollout.prompts={tmp_path}/none.jsonl" in capsys.readouterr().err
    assert (tmp_path / "out" / "results.jsonl").read_text().splitlines() == lines
