"""Measuring the code: figures of a small clone, and a ceiling for each word of the glossary."""

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.checks import house
from scripts.checks.words import WORDS, find_words

ROOT = Path(__file__).parents[1]

# The most uses of each word in kdjax/. Lower a number when fewer are left; never raise one.
CEILINGS = {
    "behind": 2,
    "beside": 2,
    "gives": 4,
    "so many": 4,
    "the same": 2,
    "that of": 41,
    "whole": 12,
    "one's own": 5,
    "own answers": 1,
    "likeliest": 0,
    "asks for": 10,
    "wants": 0,
    "who, what": 6,
    "told": 1,
}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Rows behind the first."""', ["behind"]),
        ("x = 1  # of each one so many", ["so many"]),
        ("x = f'found {n} rows beside the table'", ["beside"]),
        ("raise E('one file '\n    'that nobody wants')", ["wants"]),
        ("# Who only needs rows reads this. What is it?", ["who, what"]),
        ("behind = beside(whole)  # a row", []),
        ("x = 'behind'  # a row", []),  # one word is a name, not prose
        ('"""Returns `behind` and a whole number."""', []),
        ("x = 1  # as many rows as there are, behind a proxy", []),
        ("x = 1  # type: ignore[behind]", []),
        ('"""Takes one line\nand another\n\nthe whole."""', ["whole"]),
    ],
)
def test_only_the_words_of_prose_are_counted(source, expected):
    assert [word for _, word in find_words(source)] == expected


def test_a_word_is_found_at_its_line():
    assert list(find_words("x = 1\n\ny = 2  # beside x\n")) == [(3, "beside")]


@pytest.fixture
def clone(tmp_path):
    files = {
        "kdjax/config.py": """
            class LoraConfig:
                rank: int = 0
            class StudentConfig:
                quantize: str = ""
                lora: LoraConfig = None
                old: InitVar[str] = ""
            class Config:
                student: StudentConfig = None
                steps: int = 1
            TABLE = ("student.quantize", "found student.quantize and no file")
        """,
        "kdjax/training/forms.py": """
            class Form: pass
            class Rounded(Form): pass
            def choose(config): return config.student.quantize
        """,
        "kdjax/training/step.py": """
            from kdjax.training.forms import Rounded
            from kdjax.config import Config
            def make_step(student, *, form, kind=None):
                # student.quantize in a comment
                return isinstance(form, Rounded) and isinstance(kind, int)
        """,
        "kdjax/training/job.py": """
            from kdjax.config import Config
            from kdjax.training.step import make_step
            def assemble(config: Config):
                lora = config.student.lora.rank
                return build(config, lora)
            def build(config: Config, lora):
                return lora
            def unreached(config: Config, other):
                return other
        """,
        "kdjax/watch/look.py": """
            from kdjax.training import job, step
            # behind it
        """,
        "scripts/tool.py": "import kdjax.watch.look  # behind, of no room of kdjax",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[12:] for line in text.splitlines()) or text)
    (tmp_path / "scripts/tool.py").write_text(files["scripts/tool.py"] + "\n")
    long = "\n".join(f"    x = {i}" for i in range(house.LONG))
    (tmp_path / "kdjax/long.py").write_text(f"def count():\n{long}\n")
    return tmp_path


def test_figures_of_a_small_clone(clone, tmp_path, capsys):
    assert house.main([str(clone), f"--json={tmp_path / 'house.json'}"]) == 0
    measured = json.loads((tmp_path / "house.json").read_text())
    figures = measured["figures"]
    lines = sum(p.read_text().count("\n") for p in (clone / "kdjax").rglob("*.py"))
    assert figures == {
        "lines of kdjax": lines,
        "functions over 50 lines": 1,
        "longest function": 51,
        "names with the config": 2,  # config, lora
        "functions with the config": 2,
        "lines that ask for a form": 3,
        "arguments of make_step": 3,
        "fields of Config": 3,
        "arrows between rooms": 3,
        "words of the glossary": 1,
    }
    assert measured["forms"] == [
        "kdjax.config:11",
        "kdjax.training.job:5",
        "kdjax.training.step:6",
    ]
    assert measured["arrows"] == [
        ["kdjax.training", "kdjax.config"],
        ["kdjax.watch", "kdjax.training"],
        ["scripts", "kdjax.watch"],
    ]
    assert measured["words"]["behind"] == {"kdjax.watch": 1}
    assert measured["uses"] == ["kdjax.watch.look:3: behind"]
    shown = capsys.readouterr().out
    for name, value in figures.items():
        assert f"{name} {value:,}".split() in [line.split() for line in shown.splitlines()]


def test_words_of_the_glossary_only_become_fewer():
    counts = Counter[str]()
    for path in (ROOT / "kdjax").rglob("*.py"):
        counts.update(word for _, word in find_words(path.read_text()))
    over = {word: n for word, n in counts.items() if n > CEILINGS[word]}
    assert not over, "say it as CONTRIBUTING.md does; scripts.checks.house --json lists the uses"


def test_the_glossary_has_a_row_for_each_word():
    assert set(CEILINGS) == set(WORDS)
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text().partition("| instead of |")
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    for word in WORDS:
        assert any(word.partition(",")[0].lower() in row.split("|")[1].lower() for row in rows), (
            word
        )
