"""The embedded demo: its teacher, its text, its two configs, and how it is judged."""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from kdjax import config as config_module
from kdjax import demo
from kdjax.data.rows import RowSettings, prepare_rows
from kdjax.data.text import find_files
from kdjax.errors import UserError
from kdjax.formats import open_shapes, open_table
from kdjax.models.arch import spec_from_table
from kdjax.models.tokenizer import load_tokenizer
from kdjax.watch.report.page import closing_lines
from scripts.demo import compare

REPOSITORY = Path(__file__).parent.parent


def load(path):
    loader = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


configured = load("configs/demo.py").get_config


def test_the_teacher_is_the_file_of_its_card():
    data = demo.TEACHER.read_bytes()
    card = (demo.FOLDER / "teacher.md").read_text()
    assert len(data) <= 20e6 and f"{len(data):,} bytes" in card
    assert hashlib.sha256(data).hexdigest() in card
    table = open_table(demo.TEACHER)
    types = [table.info(name).dtype for name in table]
    assert set(types) == {"F32", "Q4_K", "Q6_K"} and types.count("Q4_K") > types.count("Q6_K") > 0
    assert f"{spec_from_table(table).parameters():,} parameters" in card
    assert all(f"{name}" in card for name in demo.HELD_OUT)


def test_student_and_teacher_share_tokens_and_not_a_width():
    student = spec_from_table(open_shapes(demo.STUDENT))
    teacher = spec_from_table(open_table(demo.TEACHER))
    assert 1e6 <= student.parameters() <= 3e6 < teacher.parameters()
    assert student.vocab_size < teacher.vocab_size
    ours, theirs = load_tokenizer(demo.STUDENT), load_tokenizer(demo.TEACHER)
    assert ours.tokens == theirs.tokens and ours.vocab_size < student.vocab_size
    text = "def f(x):\n\treturn x  # ä\n"
    assert ours.encode(text) == theirs.encode(text)


def test_the_baseline_differs_in_nothing_but_the_loss_and_its_rate():
    flat = [config_module.flatten(configured(kind)) for kind in ("", "baseline")]
    for kind in ("", "baseline"):
        config_module.validate(configured(kind))
    differing = {name for name, value in flat[0].items() if value != flat[1][name]}
    assert differing == {"loss.alpha", "optim.learning_rate"}
    assert flat[0]["loss.alpha"] < 1 == flat[1]["loss.alpha"]
    with pytest.raises(UserError, match="no such kind; expected 'baseline'"):
        configured("best")


@pytest.fixture
def library(tmp_path):
    """A standard library of a few files; those that must not train say `unseen`."""
    seen = {"os.py": "os", "xml/sax/expat.py": "expat", "xml/[odd].py": "odd"}
    unseen = (
        "argparse.py",
        "json/__init__.py",
        "json/tool.py",
        "json/deep/a.py",
        "test/test_os.py",
        "site-packages/other/a.py",
        "xml/notes.txt",
    )
    texts = {name: f"seen_{what} = 1" for name, what in seen.items()}
    texts |= {name: f"unseen = {number}" for number, name in enumerate(unseen)}
    for name, text in texts.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n" * 3)
    return tmp_path / "lib"


def test_heldout_modules_never_train(library, tmp_path):
    tokenizer = load_tokenizer(demo.STUDENT)
    text = demo.training_text(library), demo.heldout_text(library)
    settings = RowSettings(*text, tokenizer, 32, 0.5, tokenizer.end_of_text_id, max_segments=8)
    rows = prepare_rows(settings, tmp_path / "rows")
    trained, heldout = (
        tokenizer.decode(side.tokens[side.segments > 0].tolist())
        for side in (rows.train, rows.heldout)
    )
    assert "unseen" not in trained and "seen_" not in heldout
    assert all(name in trained for name in ("seen_os", "seen_expat", "seen_odd"))
    assert all(f"unseen = {n}" in heldout for n in (0, 1, 2))


def test_the_librarys_own_heldout_modules_are_found():
    heldout = set(demo.heldout_files())
    assert {path.stem for path in heldout} >= {n for n in demo.HELD_OUT if n != "json"}
    assert heldout == set(find_files(demo.heldout_text()))
    trained = set(find_files(demo.training_text())) - heldout
    assert len(trained) > 300
    assert not {p for p in trained if {*p.parts, p.stem} & {*demo.HELD_OUT}}


def evaluation(step, student):
    figures = {
        "teacher_ce": 2.0,
        "teacher_perplexity": 7.389,
        "teacher_bits_per_byte": 1.25,
        "student_ce": student,
        "student_perplexity": 99.5,
        "student_bits_per_byte": 2.5,
        "kl": student - 2,
        "divergence": 0.1,
        "temperature": 1.0,
        "agreement": 0.25,
        "tokens": 1000.0,
    }
    return {"kind": "eval", "step": step} | figures


def test_a_run_closes_with_its_figures_and_places(tmp_path):
    lines = [evaluation(0, 8.0), evaluation(5, 6.0), evaluation(9, 4.5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "report.html").touch()
    (tmp_path / "checkpoints" / "9").mkdir(parents=True)
    said = [line.split() for line in closing_lines(tmp_path, 9)]
    assert ["teacher", "2.0000", "7.389", "1.2500", "–", "–"] in said
    assert [
        "student",
        "before",
        "training",
        "8.0000",
        "99.500",
        "2.5000",
        "6.0000",
        "25.00%",
    ] in said
    assert [
        "student",
        "after",
        "9",
        "steps",
        "4.5000",
        "99.500",
        "2.5000",
        "2.5000",
        "25.00%",
    ] in said
    assert ["checkpoint", f"{tmp_path}/checkpoints/9"] in said
    assert ["report", f"{tmp_path}/report.html"] in said
    assert not any(line[:1] == ["samples"] for line in said)
    assert "no held-out figures" in closing_lines(tmp_path / "checkpoints", 9)[0]


def runs(*ces):
    return [
        {"kind": kind, "seed": seed, "CE": ce, "step": 9, "tokens": 90.0}
        for seed, pair in enumerate(ces)
        for kind, ce in zip(compare.KINDS, pair, strict=True)
    ]


def test_distilled_must_win_in_each_seed():
    assert compare.verdict(runs((4.0, 5.0), (4.0, 4.1))) == []
    assert compare.verdict(runs((4.0, 5.0), (4.1, 4.0), (3.0, 3.0))) == [1, 2]
    with pytest.raises(ValueError, match="seed 0: expected one run of each"):
        compare.verdict(runs((4.0, 5.0))[:1])
    unequal = runs((4.0, 5.0))
    unequal[0]["tokens"] = 180.0
    with pytest.raises(ValueError, match="different amounts of text"):
        compare.verdict(unequal)


@pytest.mark.parametrize(("worse", "status"), [(-0.5, 0), (0.5, 1)])
def test_the_comparison_is_a_table_a_file_and_a_status(
    tmp_path, monkeypatch, capsys, worse, status
):
    asked = []

    def train(config, workdir, seed, more):
        asked.append((config, seed, list(more)))
        ce = 5.0 + (0 if "baseline" in config else worse)
        return dict.fromkeys(compare.FIGURES, 0.0) | {"CE": ce, "step": 9, "tokens": 90.0}

    monkeypatch.setattr(compare, "train", train)
    argv = ["demo_compare", f"--out={tmp_path}", "--seeds=2", "--config.train.steps=9"]
    monkeypatch.setattr("sys.argv", argv)
    assert compare.main() == status
    assert [a[:2] for a in asked] == [(c, s) for s in (0, 1) for c in compare.KINDS.values()]
    assert all(a[2] == ["--config.train.steps=9"] for a in asked)
    said = capsys.readouterr().out
    assert f"| distilled | mean | {5 + worse:.4f} |" in said and "| baseline | 1 | 5.0000 |" in said
    assert f"in {0 if status else 2} of 2 seeds" in said
    kept = json.loads((tmp_path / "compare.json").read_text())
    assert len(kept["runs"]) == 4 and kept["lost"] == ([0, 1] if status else [])
