"""The embedded demo: its models, its text, its configs, and how it is judged."""

import dataclasses
import hashlib
import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from kdjax import config as config_module
from kdjax import demo
from kdjax.data.rows import RowSettings, prepare_rows
from kdjax.data.text import find_files
from kdjax.errors import UserError
from kdjax.formats import open_shapes, open_table
from kdjax.models.loading import count_parameters
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import load_tokenizer
from kdjax.watch.report.page import closing_lines
from scripts.demo import compare
from scripts.demo.text import write as write_text

REPOSITORY = Path(__file__).parent.parent


def load(path):
    loader = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


configured = load("configs/demo.py").get_config


@pytest.mark.parametrize(
    ("path", "most", "packages"),
    [(demo.TEACHER, 20e6, "packages.txt"), (demo.STUDENT, 3e6, "student_packages.txt")],
    ids=["teacher", "student"],
)
def test_a_model_is_the_file_of_its_card(path, most, packages):
    data, card = path.read_bytes(), path.with_suffix(".md").read_text()
    assert len(data) <= most and f"{len(data):,} bytes" in card
    assert hashlib.sha256(data).hexdigest() in card
    table = open_table(path)
    types = Counter(table.info(name).dtype for name in table)
    assert all(f"{count} {kind}" in card for kind, count in types.items())
    assert set(types) > {"F32"} and types["F32"] < types.total() / 2
    assert f"{count_parameters(spec_from_table(table)):,} parameters" in card
    assert all(name in card for name in demo.HELD_OUT)
    listed = (demo.FOLDER / packages).read_text().splitlines()
    assert f"The {len(listed)} packages" in card and all(": " in line for line in listed)


def test_student_and_teacher_share_tokens_and_not_a_width():
    student = spec_from_table(open_table(demo.STUDENT))
    shape = spec_from_table(open_shapes(demo.STUDENT_SHAPE))
    assert student == dataclasses.replace(
        shape, rms_eps=student.rms_eps
    )  # a file has it in float32
    teacher = spec_from_table(open_table(demo.TEACHER))
    assert 1e6 <= count_parameters(student) <= 3e6 < count_parameters(teacher)
    assert student.vocab_size < teacher.vocab_size
    ours, theirs = load_tokenizer(demo.STUDENT), load_tokenizer(demo.TEACHER)
    assert ours.tokens == theirs.tokens == load_tokenizer(demo.STUDENT_SHAPE).tokens
    assert ours.vocab_size < student.vocab_size
    code = "def f(x):\n\treturn x  # ä\n"
    assert ours.encode(code) == theirs.encode(code)


def test_a_baseline_differs_in_nothing_but_the_loss_and_its_rates():
    flat = {}
    for kind in ("", "baseline", "random", "random_baseline"):
        config_module.validate(configured(kind))
        flat[kind] = config_module.flatten(configured(kind))

    def differing(one, other):
        return {name for name, value in flat[one].items() if value != flat[other][name]}

    rates = {"optim.learning_rate", "optim.final_learning_rate"}
    for with_teacher, alone in (("", "baseline"), ("random", "random_baseline")):
        assert "loss.alpha" in differing(with_teacher, alone) <= rates | {"loss.alpha"}
        assert flat[with_teacher]["loss.alpha"] < 1 == flat[alone]["loss.alpha"]
    for shipped, random in (("", "random"), ("baseline", "random_baseline")):
        assert "student.init" in differing(shipped, random)
        assert flat[shipped]["student.init"] == "checkpoint"
    with pytest.raises(UserError, match="no such kind; expected one of 'baseline', 'onpolicy', "):
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
    tokenizer = load_tokenizer(demo.STUDENT_SHAPE)
    patterns = demo.training_text(library), demo.heldout_text(library)
    settings = RowSettings(*patterns, tokenizer, 32, 0.5, tokenizer.end_of_text_id, max_segments=8)
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
        {"kind": kind, "seed": seed, "CE": ce, "step": 9, "tokens": 90.0, "seconds": 60.0}
        for seed, pair in enumerate(ces)
        for kind, ce in zip(compare.KINDS, pair, strict=True)
    ]


def test_distilled_must_win_in_each_seed():
    assert compare.verdict(runs((4.0, 5.0), (4.0, 4.1)), "tokens") == []
    assert compare.verdict(runs((4.0, 5.0), (4.1, 4.0), (3.0, 3.0)), "time") == [1, 2]
    with pytest.raises(ValueError, match="seed 0: expected one run of each"):
        compare.verdict(runs((4.0, 5.0))[:1], "time")


def test_the_baseline_must_have_had_as_much():
    unequal = runs((4.0, 5.0))
    unequal[1] |= {"tokens": 180.0, "step": 18}
    assert compare.verdict(unequal, "time") == []
    with pytest.raises(ValueError, match="different amounts of text"):
        compare.verdict(unequal, "tokens")
    unequal[1]["seconds"] = 50.0
    assert compare.verdict(unequal, "time") == [0]


@pytest.mark.parametrize(
    ("worse", "flags", "status"),
    [(-0.5, [], 0), (0.5, [], 1), (-0.5, ["--equal=tokens", "--start=random"], 0)],
)
def test_the_comparison_is_a_table_a_file_and_a_status(
    tmp_path, monkeypatch, capsys, worse, flags, status
):
    asked = []

    def run(config, workdir, seed, more):
        """Steps of 2 s with the teacher and of 0.75 s without, 2 rows of 8 positions."""
        asked.append((config, seed, more))
        alone, workdir = "baseline" in config, Path(workdir)
        said = {"config": {"train": {"batch_size": 2}, "data": {"seq_len": 8}}}
        said["smoke"] = {"median_step_seconds": 0.75}
        figures = dict.fromkeys(compare.FIGURES.values(), 0.0) | {"teacher_ce": 2.0}
        figures["student_ce"] = 5.0 + (0 if alone else worse)
        pace = {"tokens_per_second": 16 / (0.75 if alone else 2), "tokens": 15.0}
        lines = [{"kind": "train", "step": step} | pace for step in range(1, 10)]
        lines[0]["tokens_per_second"] = 1e-3  # it compiled
        lines.append({"kind": "eval", "step": 9} | figures)
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "receipt.json").write_text(json.dumps(said))
        (workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "FAIR", 0.3)  # the made-up baseline takes no other time
    argv = ["demo_compare", f"--out={tmp_path}", "--seeds=2", "--config.optim.eps=1", *flags]
    monkeypatch.setattr("sys.argv", argv)
    assert compare.main() == status
    with_teacher, alone = compare.CONFIGS["random" if flags else "shipped"]
    trial = [] if flags else [(alone, ["--config.smoke.steps=60"])]
    more = [] if flags else ["--config.train.steps=24"]  # 9 x 2 s at 0.75 s a step
    expected = [(with_teacher, []), *trial, (alone, more)] * 2
    assert [(config, more[1:]) for config, _, more in asked] == expected
    said = capsys.readouterr().out
    assert f"| distilled | mean | 9 | 18.0 | {5 + worse:.4f} |" in said
    assert "| baseline | 1 | 9 | 6.8 | 5.0000 |" in said
    assert f"in {0 if status else 2} of 2 seeds" in said
    kept = json.loads((tmp_path / "compare.json").read_text())
    assert len(kept["runs"]) == 4 and kept["lost"] == ([0, 1] if status else [])


def test_the_student_s_text_has_nothing_of_the_standard_library(tmp_path):
    module = next(p for p in demo.heldout_files() if p.name == "heapq.py").read_text()
    trained = (demo.standard_library() / "bisect.py").read_text()
    own = "".join(f"def of_our_own_{i}():\n    return 'a text of our own {i}'\n" for i in range(9))
    documents = {
        "a/bisect_copy.py": trained,
        "a/backport.py": own + module,
        "a/mixed.py": own + own.replace("own", "one") + "import os\n",
        "a/argparse.py": own,
        "a/own.py": own,
    }
    corpus = tmp_path / "train.jsonl"
    lines = [json.dumps({"text": text, "source": name}) for name, text in documents.items()]
    corpus.write_text("\n".join(lines))
    said = write_text(tmp_path / "out", [corpus], with_library=False)
    written = (tmp_path / "out" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in written] == ["a/mixed.py", "a/own.py"]
    dropped = {one["source"] for one in said["dropped"]}
    assert dropped == {"a/bisect_copy.py", "a/backport.py", "a/argparse.py"}
