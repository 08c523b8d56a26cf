"""Prompts made from documented functions."""

import json

import pytest

from scripts.corpus import prompts

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


def test_neither_benchmarks_nor_copies_of_theirs_are_in_a_prompt(text):
    solution = MODULE[MODULE.index("def spread") : MODULE.index("def lean")]
    benchmark = [("add_two_numbers", "def add_two_numbers(a, b):\n    return a + b\n")]
    benchmark += [("repeated", solution.replace("spread", "repeated"))]
    made, counts = prompts.make(text, benchmark, seed=0)
    assert counts["functions"] > 4
    asked = [prompt["messages"][0]["content"] for prompt in made]
    assert any("lean" in text for text in asked)
    assert not [text for text in asked if "spread" in text or "add_two_numbers" in text]


def test_the_file_is_what_a_run_reads(text, tmp_path, capsys):
    """A question of each kind a function, without its answer; problems of a benchmark's file."""
    benchmark = tmp_path / "mbpp.jsonl"
    problem = {"task_id": 11, "text": "Add.", "code": "def wrong(a):\n    return a + 1"}
    benchmark.write_text(json.dumps(problem | {"test_list": ["assert wrong(1) == 2"]}))
    asked = ["--read", text, f"--benchmark={benchmark}"]
    assert prompts.main([str(tmp_path / "out"), *asked]) == 0
    counts = json.loads(capsys.readouterr().out)
    made = [json.loads(x) for x in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert counts["prompts"] == len(made) == 2 * counts["complete"] == 2 * counts["describe"] > 4
    assert json.loads((tmp_path / "out" / "prompts.json").read_text()) == counts
    for record in made:
        (turn,) = record["messages"]
        assert turn["role"] == "user" and record["kind"] in prompts.KINDS
        assert "out.extend" not in turn["content"] and "wrong" not in turn["content"]
