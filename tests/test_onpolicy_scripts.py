"""Prompts and development problems made from documented functions, and the table of settings."""

import json

import pytest

from kdjax.errors import UserError
from kdjax.evaluation.problems import load_humaneval
from kdjax.models.decoding import Completion
from scripts.corpus.conversations import functions
from scripts.onpolicy import exercises, interval, invent, prompts, table

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


def test_every_setting_is_a_config_that_can_run(tmp_path):
    import argparse

    args = argparse.Namespace(
        teacher="t.gguf", student="s.gguf", train="t", heldout="h", seq_len=1024, out=tmp_path,
        batch_size=32, rows=512, prompts="p", invented="i", set=["optim.beta2=0.99"], cache=None,
    )  # fmt: skip
    for name, phases in table.SETTINGS.items():
        assert sum(share for _, share in phases) == (1.0 if phases else 0), name
        for changes, _ in phases:
            config = table.make_config(args, changes)
            assert config.optim.beta2 == 0.99
            assert bool(config.rollout.prompts) == any("rollout" in name for name in changes)


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
    far = f'def turn(values: list) -> list:\n    """{words}"""'
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
        "opened.jsonl": 1,
        "plain.jsonl": 1,
        "others.jsonl": 1,
    }
    assert json.loads(made["opened.jsonl"][0]) == records[2]
    assert len(load_humaneval(tmp_path / "out" / "problems.jsonl")) == 1
    (tmp_path / "others.jsonl").write_text('{"text": "no prompt"}\n')
    assert exercises.main(paths) == 2


def test_a_setting_is_read_with_the_fields_that_differ():
    mixed = "jsd:beta=0.3+0.5*reverse_kl"
    line = f"then_own+loss.divergence={mixed}+rollout.every=4:2 90 humaneval,mbpp"
    setting = table.Setting.read(line, 60.0, ["development"])
    assert setting[1:] == (2, 90.0, ("humaneval", "mbpp"))
    (text, _), (own, share) = setting.phases()
    assert text == table.TEXT and share == 0.5
    assert own == table.OWN | {"loss.divergence": mixed, "rollout.every": "4"}
    assert table.Setting.read("offline", 60.0, ["mbpp"]) == ("offline", 0, 60.0, ("mbpp",))
    for wrong in ("nothing", "own+optim.beta2", "own:x", "own soon"):
        with pytest.raises(UserError, match=r"expected NAME\[\+FIELD=VALUE\]"):
            table.Setting.read(wrong, 60.0, ["development"])


def test_a_file_of_settings_is_followed_as_it_grows(tmp_path):
    import argparse

    file = tmp_path / "settings"
    file.write_text("# these\nbefore\nunknown\nown:1 30\noffl")
    args = argparse.Namespace(follow=file, settings="", seconds=60.0, sets="development")
    queue = iter(table.Queue(args))
    assert next(queue).label == "before:0" and next(queue).label == "own:1"
    file.write_text(file.read_text() + "ine\nend\n")
    assert [setting.label for setting in queue] == ["offline:0"]


def test_the_interval_pairs_problems_and_puts_seeds_together(tmp_path, capsys):
    def row(setting, seed, passed):
        judged = {"problems": 4, "passed": passed}
        return {"setting": setting, "seed": seed, "humaneval": judged}

    # Problems differ much, the settings in one of eight samples of each problem or none.
    rows = [row("own", 1, "11111100"), row("own", 0, "11111100")]
    rows += [row("offline", 0, "11101000"), {"setting": "before", "error": "out of memory"}]
    found = interval.compare(rows, "own", "offline", "humaneval")
    assert found.mean == pytest.approx(0.25) and found.of == [0.75, 0.75]
    assert 0 <= found.low < 0.25 < found.high <= 0.5
    (tmp_path / "t.json").write_text(json.dumps(rows))
    assert interval.main([str(tmp_path / "t.json"), "--of=own"]) == 0
    assert "own 0.7500 0.7500, offline 0.5000: +25.0 points" in capsys.readouterr().out
    assert interval.main([str(tmp_path / "t.json"), "--of=none"]) == 2
    assert "the tables hold before, offline, own" in capsys.readouterr().err
    rows.append(rows[0] | {"humaneval": {"problems": 1, "passed": "11"}})
    with pytest.raises(UserError, match="judged on 1 and 4 problems of humaneval"):
        interval.compare(rows, "own", "offline", "humaneval")


@pytest.mark.slow
def test_the_table_trains_and_judges_settings_from_one_start(models, text, tmp_path, capsys):
    assert prompts.main([str(tmp_path / "made"), "--read", text]) == 0
    (tmp_path / "prompts.jsonl").write_text('{"text": "def f(x):\\n    return x\\n"}\n' * 9)
    (tmp_path / "held.py").write_text("".join(f"held_{i} = {i}\n" for i in range(60)))
    sides = [f"--{side}={models}/{side}.gguf" for side in ("teacher", "student")]
    small = ("rollout.max_tokens=4", "rollout.every=2", "rollout.prompt_tokens=20")
    asked = [
        *sides,
        f"--train={text}",
        f"--heldout={tmp_path}/held.py",
        f"--prompts={tmp_path}/prompts.jsonl",
        f"--development={tmp_path}/made/development.jsonl",
        "--settings=before,own:1,taught",
        "--seconds=0.2",
        *(f"--set={field}" for field in (*small, "train.compute_dtype=float32")),
        *("--seq-len=64", "--batch-size=8", "--rows=8", "--answer-tokens=2", "--samples=2"),
        "--allow-unsandboxed",
        f"--out={tmp_path}/out",
    ]
    assert table.main(asked) == 0
    before, own, taught = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [row["setting"] for row in (before, own, taught)] == ["before", "own", "taught"]
    assert own["seed"] == 1 and before["phases"] == []
    assert own["heldout"]["kl"] != before["heldout"]["kl"] != taught["heldout"]["kl"]
    (phase,) = own["phases"]
    assert phase["seconds"] >= 0.2 and phase["rounds"][0]["answers"] > 0
    assert own["development"]["passed"] == "00" * own["development"]["problems"]
    printed = capsys.readouterr().out
    assert "compiled after" in printed and "own:1" in printed
