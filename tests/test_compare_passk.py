"""The paired test of two evaluations, on what the evaluation itself writes."""

import json

import numpy as np
import pytest
from scipy.stats import binom

from kdjax.evaluation import passk, problems
from scripts.checks import compare_passk as compare


def benchmark(passes, samples=2, wording="instruct"):
    """An evaluation's result: so many samples of each problem passed."""
    made = [
        passk.Sample(f"T/{i}", "passed" if k < count else "wrong answer", "", "stop", "")
        for i, count in enumerate(passes)
        for k in range(samples)
    ]
    asked = [problems.Problem(f"T/{i}", *[""] * 4, (), "", (), ()) for i in range(len(passes))]
    return passk.summarise(asked, made, passk.Settings(samples=samples, ks=(1,), wording=wording))


@pytest.fixture
def write(tmp_path):
    def written(name, **benchmarks):
        (tmp_path / name).write_text(json.dumps({"status": 0} | benchmarks))
        return tmp_path / name

    return written


def test_problems_are_paired_and_benchmarks_added(write):
    # Better: 41 and 3, worse: 17 and 3; what is as before, or passes otherwise, counts nothing.
    before, after = [0] * 41 + [2] * 17 + [1, 2, 0], [1] * 41 + [1] * 17 + [1, 2, 0]
    small = [1, 1, 1, 0, 0, 0]
    first = write("a.json", humaneval=benchmark(before), mbpp=benchmark(small, 1))
    second = write("b.json", humaneval=benchmark(after), mbpp=benchmark(small[::-1], 1))
    assert compare.table([first, second])[2:] == [
        "| b | HumanEval | 37 of 122 | 61 of 122 | 41 | 17 | 0.0022 |",
        "| b | MBPP | 3 of 6 | 3 of 6 | 3 | 3 | 1 |",
        "| b | all |  |  | 44 | 20 | 0.0037 |",
    ]
    assert compare.table([first, first])[2].endswith("| 0 | 0 | 1 |")


def test_a_problem_that_was_asked_in_several_ways_counts_once_over_all(write):
    ways = ("humaneval", "humaneval request", "humaneval bare")
    before, after = [1] * 7, [2] * 6 + [0]
    first = write("a.json", **dict.fromkeys(ways, benchmark(before)))
    second = write("b.json", **dict.fromkeys(ways, benchmark(after)))
    rows = compare.table([first, second])[2:]
    assert rows[0].endswith("| 6 | 1 | 0.12 |")
    assert rows[-1] == "| b | all |  |  | 6 | 1 | 0.12 |"
    # Better in one way and worse in another is neither.
    asked = (benchmark(passes) for passes in (after, before, [0] * 7))
    third = write("c.json", **dict(zip(ways, asked, strict=True)))
    assert compare.table([first, third])[-1] == "| c | all |  |  | 0 | 1 | 1 |"


def test_a_gain_counts_over_wordings_problems_and_seeds(write):
    def asked(*passes):
        names = ("humaneval", "humaneval request", "humaneval bare")
        found = [benchmark(ends, 1) for ends in passes]
        return dict(zip(names, found, strict=True)) | {"humaneval instruct x2": benchmark([0] * 8)}

    none, some = [0] * 8, [0] * 4 + [1] * 4
    first = write("a.json", **asked(some, some, none))
    # One seed gains in one wording, the other in none: 4 of 24, and 0, in the mean a twelfth.
    one, other = (
        write("b.json", **asked(some, some, some)),
        write("c.json", **asked(some, some, none)),
    )
    rows = compare.over_seeds([first], [one, other])[2:]
    mean = "| HumanEval, mean of 3 wordings | 1, 2 | 33.3 | 41.7 | +8.3 | +0.0 to "
    assert rows[-1].startswith(mean) and len(rows) == 5
    assert rows[2].startswith("| HumanEval bare | 1, 2 | 0.0 | 25.0 | +25.0 | +0.0 to ")
    # Only in one of two draws of two seeds are both the same one.
    of, against = np.array([[0.0] * 8, [1.0] * 8]), np.zeros((1, 8))
    assert compare.draw_anew(of, against) == (0.0, 1.0)
    # Eight problems of which half are solved: the binomial's quantiles.
    low, high = compare.draw_anew(np.array([some]), against)
    assert (low, high) == tuple(binom.ppf([0.025, 0.975], 8, 0.5) / 8)


def test_seeds_of_both_sides_are_put_together_and_have_the_same_problems(write, capsys):
    """A problem differs more from others than the settings do: pairs tell, two rates would not."""
    own = [write(f"own-{i}.json", development=benchmark([2, 2, 2, 0])) for i in range(2)]
    text = [write(f"text-{i}.json", development=benchmark([2, 1, 1, 0])) for i in range(2)]
    assert compare.main([",".join(map(str, text)), *map(str, own)]) == 0
    said = capsys.readouterr().out
    assert "| own-1 | Development | 4 of 8 | 6 of 8 | 2 | 0 | 0.5 |" in said
    assert "| Development | 2, 2 | 50.0 | 75.0 | +25.0 | +0.0 to +50.0 |" in said
    other = write("other.json", development=benchmark([2, 2]))
    assert compare.main([f"{text[0]},{other}", str(own[0])]) == 2
    assert "other.json: its Development does not pair with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (dict(humaneval=benchmark([1, 1], wording="base")), "worded instruct there, base here"),
        (dict(humaneval=benchmark([1])), "2 problems and 4 samples there, 1 and 2 here"),
        (dict(humaneval=benchmark([1, 1], samples=1)), "4 samples there, 2 and 2 here"),
        (dict(mbpp=benchmark([1, 1])), "no benchmark that"),
        ({}, "neither HumanEval nor MBPP"),
    ],
)
def test_what_does_not_pair_is_refused(write, capsys, after, says):
    first = write("a.json", humaneval=benchmark([1, 1]))
    assert compare.main([str(first), str(write("b.json", **after))]) == 2
    assert says in capsys.readouterr().err


def test_what_is_no_evaluation_is_refused(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{")
    for name in ("a.json", "missing.json"):
        assert compare.main([str(tmp_path / name)] * 2) == 2
        assert "found no readable JSON" in capsys.readouterr().err
    for figures in (0.52, {"pass_at_k": {"1": 0.52}}):
        (tmp_path / "a.json").write_text(json.dumps({"humaneval": figures}))
        assert compare.main([str(tmp_path / "a.json")] * 2) == 2
        assert "found neither HumanEval nor MBPP" in capsys.readouterr().err
