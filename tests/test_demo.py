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
from kdjax.errors import UserError
from kdjax.formats import open_shapes, open_table
from kdjax.models.loading import count_parameters
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import load_tokenizer
from kdjax.watch.report.page import closing_lines
from scripts.demo import compare, stories

REPOSITORY = Path(__file__).parent.parent


def load(path):
    loader = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


configured = load("configs/demo.py").get_config


@pytest.mark.parametrize(
    ("path", "most"), [(demo.TEACHER, 10e6), (demo.STUDENT, 3e6)], ids=["teacher", "student"]
)
def test_a_model_is_the_file_of_its_card(path, most):
    data, card = path.read_bytes(), path.with_suffix(".md").read_text()
    assert len(data) <= most and f"{len(data):,} bytes" in card
    assert hashlib.sha256(data).hexdigest() in card
    table = open_table(path)
    types = Counter(table.info(name).dtype for name in table)
    assert all(f"{count} {kind}" in card for kind, count in types.items())
    assert set(types) > {"F32"} and types["F32"] < types.total() / 2
    assert f"{count_parameters(spec_from_table(table)):,} parameters" in card
    stories = demo.HELD_OUT.read_text("utf-8").splitlines()
    size = sum(len(json.loads(line)["text"]) for line in stories)
    assert f"{len(stories)} stories ({size:,} bytes)" in card
    read = hashlib.sha256(demo.STORIES.read_bytes()).hexdigest() in card
    assert read == (path == demo.TEACHER)  # the student has not read them


def test_the_demo_is_small_and_its_parts_share_no_story():
    files = [path for path in demo.FOLDER.rglob("*") if path.is_file() and "__" not in str(path)]
    assert sum(path.stat().st_size for path in files) < 12e6
    trained, held = (
        set(path.read_text("utf-8").splitlines()) for path in (demo.STORIES, demo.HELD_OUT)
    )
    assert len(trained) == 4500 and len(held) == 400 and not trained & held


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
    text = "One day, Lily said:\n\t'ä!'  \n"
    assert ours.encode(text) == theirs.encode(text)


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


def test_stories_are_kept_once_if_they_end_and_their_words_are_common(tmp_path):
    def story(number, word="ball"):
        return f"One day Tim saw a {word}. " + "He ran to the park. " * (15 + number)

    told = [story(number).strip() for number in range(6)]
    told += [
        told[0],  # twice
        story(7, "quasar").strip(),  # a word that one story has
        story(8).strip() + " And then",  # no end
        "**Title**\n" + story(9).strip(),
        story(10).strip()[:100],  # too short
        "“" + story(11).strip() + "”",
    ]
    answers = tmp_path / "answers.jsonl"
    lines = [{"messages": [{"role": "assistant", "content": text}]} for text in told]
    answers.write_text("\n".join(map(json.dumps, lines)))
    said = stories.clean([answers], tmp_path / "out", shared=2)
    assert (said["answers"], said["kept"], said["heldout"]["stories"]) == (12, 6, 6)
    again = stories.clean([tmp_path / "out" / "heldout.jsonl"], tmp_path / "again", shared=2)
    assert again["kept"] == 6


def test_the_parts_of_a_corpus_share_no_story(tmp_path, monkeypatch):
    monkeypatch.setattr(stories, "HELD_OUT", 3)
    monkeypatch.setattr(stories, "DEMO", 5)
    told = [f"One day Tim saw a ball. {'He ran to the park. ' * n}He slept." for n in range(16, 28)]
    answers = tmp_path / "answers.jsonl"
    answers.write_text("\n".join(json.dumps({"text": text}) for text in told))
    stories.clean([answers], tmp_path, shared=1)
    names = ("heldout", "stories", "rest")
    parts = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in names]
    assert [len(part) for part in parts] == [3, 5, 4]
    assert len({line for part in parts for line in part}) == 12


def test_requests_for_stories_are_drawn_by_a_seed(tmp_path):
    for name in ("a", "b"):
        stories.write_prompts(tmp_path / name, 20)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    asked = [
        json.loads(line)["messages"][0]["content"]
        for line in (tmp_path / "a").read_text().splitlines()
    ]
    assert len(set(asked)) == 20 and all("Write only the story" in text for text in asked)
