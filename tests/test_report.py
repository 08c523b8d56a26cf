"""Reports of runs of every kind: the page says what the files say, and needs nothing else."""

import base64
import dataclasses
import html.parser
import json
import math
import re
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from kdjax.commands.report import main
from kdjax.config import Config
from kdjax.data.rollouts import FOLDER, round_path, write_round
from kdjax.data.rows import Rows
from kdjax.errors import UserError
from kdjax.recipes import tiny
from kdjax.training.hooks import Run
from kdjax.watch.guards import NonFiniteError
from kdjax.watch.report import ReportPage, page
from kdjax.watch.report.workdir import read_run, read_runs

REPOSITORY = Path(__file__).parent.parent
PICTURES = [
    "agreement",
    "ce",
    "divergence",
    "heldout_ce",
    "heldout_loss",
    "kl",
    "learning_rate",
    "loss",
    "throughput",
]


def evaluation(step, ce=2.0, kl=0.5, agreement=0.5, **more):
    return (
        dict(
            kind="eval",
            step=step,
            student_ce=ce,
            student_perplexity=float(np.exp(ce)),
            teacher_ce=1.0,
            teacher_perplexity=2.718,
            kl=kl,
            divergence=kl / 8,
            loss=2 * kl,
            temperature=4.0,
            agreement=agreement,
            tokens=1000.0,
        )
        | more
    )


def step(number, loss=3.0, **more):
    return (
        dict(
            kind="train",
            step=number,
            loss=loss,
            ce=2.5,
            divergence=0.2,
            grad_norm=1.0,
            learning_rate=1e-4,
            tokens=100.0,
            tokens_per_second=50.0,
        )
        | more
    )


def receipt(status="finished", sessions=((0, 4),), **config):
    whole = tiny(Config())
    whole.loss.temperature, whole.loss.alpha = 4.0, 0.3
    for name, value in config.items():
        section, _, field = name.partition("_")
        setattr(getattr(whole, section), field, value)
    return {
        "format": 1,
        "status": status,
        "config": dataclasses.asdict(whole),
        "config_sha256": "c0ff",
        "kdjax": {"version": "0.1.0", "git_sha": "abc123", "git_dirty": False},
        "teacher": {"files": ["/m/teacher.gguf"], "sha256": "7ea"},
        "student": {"files": ["/m/student.gguf"], "sha256": "57d"},
        "data": {"rows": "key", "packed_sha256": "da7a"},
        "platform": {
            "host": "here",
            "devices": {"kind": "H200"},
            "packages": {"jax": "0.11.2"},
            "environment": {"XLA_FLAGS": "--x"},
        },
        "sessions": [
            dict(started="then", ended="now", start_step=a, end_step=b, reason=status)
            for a, b in sessions
        ],
        "plan": {
            "choice": "teacher.weights packed",
            "peak": 5e9,
            "limit": None,
            "resident": {"teacher, packed blocks": 4e9},
            "phases": {"evaluating": {"x": 1e9}},
        },
        "output": {"path": "checkpoints/4", "params_sha256": "0e7"},
        "exit": {"error": "NonFiniteError", "message": "step 3: loss not finite"},
        "smoke": None,
    }


def token(text, agrees):
    opinion = {"id": 5 if agrees else 6, "text": "T", "probability": 0.6, "of_students_id": 0.25}
    return {"id": 5, "text": text, "probability": 0.5, "teacher": opinion}


def a_sample():
    before = {"step": 0, "ended_by": "length", "tokens": [token("<b>", True), token("\n", False)]}
    after = {"step": 4, "ended_by": "stop", "tokens": [token("def", True), token(" f", True)]}
    return {
        "row": 0,
        "prompt_ids": [1],
        "prompt": "p & q",
        "reference": "r",
        "before": before,
        "after": after,
    }


WHOLE = [
    evaluation(0),
    *map(step, range(1, 3)),
    evaluation(2, 1.5, 0.4, 0.6),
    *map(step, range(3, 5)),
    evaluation(4, 1.2, 0.25, 0.75),
]


def workdir(folder, lines=WHOLE, receipt=None, samples=None):
    folder.mkdir(parents=True)
    text = "".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines)
    (folder / "metrics.jsonl").write_text(text, errors="surrogateescape")
    for name, value in (("receipt.json", receipt), ("samples.json", samples)):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


@pytest.fixture
def whole(tmp_path):
    return workdir(tmp_path / "a", WHOLE, receipt(), {"samples": [a_sample()]})


class Text(html.parser.HTMLParser):
    """The text of a page's tables by row, every address it would fetch, its classes and titles."""

    def __init__(self, source):
        super().__init__()
        self.rows, self.addresses, self.classes, self._in_row = [], [], [], False
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action")]
        self.classes += [(dict(attributes).get("class"), dict(attributes).get("title"))]
        if tag == "tr":
            self.rows.append([])
            self._in_row = True

    def handle_endtag(self, tag):
        self._in_row &= tag != "tr"

    def handle_data(self, data):
        if self._in_row and data.strip():
            self.rows[-1].append(data.strip())


def test_the_page_of_a_run(whole, drawing):
    out = page.write_page([whole])
    assert out == whole / "report.html"
    source = out.read_text()
    rows = Text(source).rows
    assert rows[:4] == [
        ["CE", "perplexity", "loss", "KL at T = 4", "KL to the teacher", "agreement"],
        ["teacher", "1.0000", "2.718", "–", "–", "–", "–"],
        ["student before training", "2.0000", "7.389", "1.0000", "0.0625", "0.5000", "50.00%"],
        ["student after 4 steps", "1.2000", "3.320", "0.5000", "0.0312", "0.2500", "75.00%"],
    ]
    assert (
        "KL to the teacher fell from 0.5000 to 0.2500 (-50.0%), agreement rose from 50.0% to "
        "75.0%, in 4 steps (400 tokens)." in source
    )
    said = {row[0]: row[1:] for row in rows if len(row) > 1}
    for name, value in {
        "config_sha256": "c0ff",
        "teacher.sha256": "7ea",
        "output.params_sha256": "0e7",
        "packages.jax": "0.11.2",
        "environment.XLA_FLAGS": "--x",
        "devices.kind": "H200",
        "choice": "teacher.weights packed",
        "peak": "5.00 GB",
        "loss.temperature": "4",
    }.items():
        assert said[name] == [value], name
    assert "loss = 0.3 · CE + 11.2 · KL at T = 4." in source
    pictures = sorted(p.name for p in (whole / "report").iterdir())
    assert pictures == [f"{name}.png" for name in PICTURES]
    for picture in (whole / "report").iterdir():
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert source.count('src="data:image/svg') == len(PICTURES)
    assert 'class="note"' not in source


def test_the_page_needs_nothing_else(whole, drawing):
    source = page.write_page([whole]).read_text()
    outside = [a for a in Text(source).addresses if not a.startswith(("#", "data:"))]
    assert outside == [] and "@import" not in source and "<script" not in source
    assert not re.findall(r"url\((?!#)", source)
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', source)
    for picture in map(base64.b64decode, pictures):
        root = xml.etree.ElementTree.fromstring(picture)
        assert root.tag.endswith("svg") and b"<script" not in picture


def test_samples_are_marked_by_more_than_colour(whole):
    source = page.write_page([whole]).read_text()
    found = [c for c in Text(source).classes if c[0] in ("yes", "no") and c[1]]
    assert [c[0] for c in found] == ["yes", "no", "yes", "yes"]
    assert found[1][1] == "teacher's probability: 25.0%; its choice: 'T', 60.0%"
    assert ".no {" in source and "text-decoration: underline" in source
    assert "1 of 2 tokens are the teacher's choice" in source
    assert "&lt;b&gt;" in source and "<b>" not in source  # what a model wrote is text
    assert "p &amp; q" in source and "↵\n</span>" in source


def test_own_answers_of_the_first_and_the_last_round_stand_side_by_side(tmp_path):
    run = workdir(tmp_path / "a")
    rows = Rows(*(np.zeros((1, 3), np.uint8) for _ in range(3)))
    for number, divergence in ((0, 0.75), (1, 0.5), (2, 0.25)):
        tokens = [token("x", True) | {"divergence": divergence} for _ in range(2)]
        shown = {"prompt": "<p>", "ended_by": "stop", "tokens": tokens}
        record = {"round": number, "samples": [shown]}
        write_round(round_path(run / FOLDER, number), rows, record)
    source = page.write_page([run]).read_text()
    assert "Round 0: divergence 0.7500 a token, 2 tokens" in source
    assert "Round 2: divergence 0.2500 a token" in source and "Round 1:" not in source
    assert 'title="divergence 0.250; teacher&#39;s probability' in source and "&lt;p&gt;" in source
    round_path(run / FOLDER, 2).write_bytes(b"PK")
    assert "round-00002.npz cannot be read" in page.write_page([run]).read_text()


def test_several_runs_in_one_page(tmp_path):
    """A baseline beside a distilled run: one teacher, one start, and where the settings differ."""
    one = workdir(tmp_path / "x" / "run", WHOLE, receipt())
    two = workdir(
        tmp_path / "y" / "run",
        [*WHOLE[:-1], evaluation(4, 1.3, 0.45, 0.55)],
        receipt(loss_alpha=1.0, train_seed=7),
    )
    out = page.write_page([one, two])
    assert out == one / "comparison.html" and not (one / "report.html").exists()
    rows = Text(out.read_text()).rows
    assert [row[0] for row in rows[1:5]] == [
        "teacher",
        "student before training",
        "x/run: student after 4 steps",
        "y/run: student after 4 steps, without the teacher (alpha = 1)",
    ]
    assert rows[4][1] == "1.3000"
    at = next(i for i, row in enumerate(rows) if row[:1] == ["field"])
    assert rows[at : at + 3] == [
        ["field", "x/run", "y/run"],
        ["loss.alpha", "0.3", "1"],
        ["train.seed", "0", "7"],
    ]
    elsewhere = page.write_page([one, two], tmp_path / "out" / "both.html")
    assert elsewhere.read_text().count('src="data:image/svg') == len(PICTURES)
    assert len(list((tmp_path / "out" / "both").glob("*.png"))) == len(PICTURES)
    assert "compare them with care" not in out.read_text()


def test_what_forbids_a_comparison_is_said(tmp_path):
    one = workdir(tmp_path / "a", WHOLE, receipt())
    other = receipt()
    other["data"]["rows"] = "another"
    two = workdir(tmp_path / "b", WHOLE, other)
    assert (
        "are of different held-out rows: compare them with care"
        in page.write_page([one, two]).read_text()
    )


def test_the_loss_of_two_tokenizers_has_the_text_where_nothing_is_compared(tmp_path):
    known = receipt() | {"two_tokenizers": {"shared_ids": 990}}
    source = page.write_page([workdir(tmp_path / "a", WHOLE, known)]).read_text()
    said = "0.3 · CE + 11.2 · KL at T = 4 where the teacher is compared, CE elsewhere. "
    assert f"loss = {said}" in source


def test_losses_that_do_not_compare_are_not_on_one_axis_without_a_word(tmp_path):
    one = workdir(tmp_path / "a", WHOLE, receipt())
    two = workdir(tmp_path / "b", WHOLE, receipt(loss_temperature=1.0))
    said = (
        "The losses differ, and their values do not compare: "
        "a: 0.3 · CE + 11.2 · KL at T = 4; b: 0.3 · CE + 0.7 · KL at T = 1. "
    )
    assert page.write_page([one, two]).read_text().count(said) == 3  # of 10 pictures
    schedule = workdir(tmp_path / "c", WHOLE, receipt(loss_final_temperature=1.0))
    assert (
        "loss = 0.3 · CE + 11.2 · KL at T = 4, at the start: T from 4 to 1 at the end. "
        in page.write_page([schedule]).read_text()
    )


@pytest.mark.parametrize("value", ["/home/me/secret", "~/secret", "0.7*/home/secret/a,0.3*b"])
def test_a_page_has_no_absolute_path(tmp_path, value):
    record = receipt(teacher_path=f"{value}/teacher.gguf", data_train=f"{value}/x y,{value}/z")
    record["teacher"]["files"] = ["/home/me/secret/teacher.gguf"]
    record["data"]["folder"] = "/home/me/secret/rows"
    record["platform"]["environment"] = {"XLA_FLAGS": "--xla_dump_to=/home/secret/dump"}
    run = workdir(tmp_path / "a", ['{"kind": "tr', *WHOLE], record, samples="[")
    source = page.write_page([run]).read_text()
    assert "secret/" not in source and "/home" not in source and str(tmp_path) not in source
    assert "teacher.gguf" in source and "samples.json cannot be read" in source


@pytest.mark.slow
def test_titles_and_labels_are_drawn_whole_and_shares_with_few_digits(tmp_path, drawing):
    """Text within the paper, read from the SVG's own words."""
    name = "a-long-name-of-a-run-that-somebody-chose-for-a-comparison-of-two"
    one, two = (workdir(tmp_path / x / name, WHOLE, receipt()) for x in "ab")
    pictures = re.findall(
        r'src="data:image/svg\+xml;base64,([^"]*)"', page.write_page([one, two]).read_text()
    )
    drawn = [base64.b64decode(picture).decode() for picture in pictures]
    for svg in drawn:
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert max(map(len, texts)) <= 48
        assert "".join(texts).replace(" ", "").count(name) == 2
    agreement = next(svg for svg in drawn if "top-1 agreement" in svg)
    assert ">60%<" in agreement and ">60.0" not in agreement


@pytest.mark.parametrize(
    ("lines", "record", "note"),
    [
        (WHOLE[:3], receipt("running"), "not finished: 2 of 20 steps so far"),
        (WHOLE[:4], receipt("interrupted"), "stopped after 2 of 20 steps, and can be resumed"),
        (
            [*WHOLE[:3], step(3, loss=None)],
            receipt("failed"),
            "failed after 3 of 20 steps: NonFiniteError: step 3: loss not finite",
        ),
        (
            [*WHOLE[:3], step(3, loss=None)],
            receipt("failed"),
            "loss is not finite or not logged in 1 steps, the first 3",
        ),
        ([step(1), step(2)], receipt(), "there was no held-out evaluation"),
        ([evaluation(0)], receipt("running"), "no step was logged"),
        ([], receipt("running"), "no step was logged"),
        (WHOLE, None, "no receipt.json"),
        (WHOLE, "{", "receipt.json cannot be read"),
        ([*WHOLE, '{"kind": "tr'], receipt(), "1 of 8 lines of metrics.jsonl cannot be read"),
        ([*WHOLE, "\udcff\n", "[" * 100_000], receipt(), "2 of 9 lines of metrics.jsonl cannot"),
        ([*WHOLE, step(math.inf), step(math.nan)], None, "2 of 9 lines of metrics.jsonl cannot"),
        (
            [
                step(
                    1,
                    loss=None,
                    ce=None,
                    divergence=None,
                    learning_rate=None,
                    tokens_per_second=None,
                ),
                evaluation(0, None or float("nan"), float("nan"), float("nan")),
            ],
            None,
            "divergence is not finite",
        ),
    ],
)
def test_a_run_that_is_not_whole_is_shown_as_far_as_it_goes(tmp_path, lines, record, note):
    source = page.write_page([workdir(tmp_path / "a", lines, record)]).read_text()
    assert note in source and "nan" not in {cell for row in Text(source).rows for cell in row}


def test_samples_that_are_not_whole(tmp_path):
    half = a_sample() | {"after": None}
    for token in half["before"]["tokens"]:
        del token["teacher"]
    source = page.write_page([workdir(tmp_path / "a", samples={"samples": [half]})]).read_text()
    assert "not made" in source and "choice</span>" not in source
    for name, samples in enumerate(("[", {"samples": [{}]}, {"samples": [1]})):
        source = page.write_page([workdir(tmp_path / str(name), samples=samples)]).read_text()
        assert "samples.json cannot be read" in source


def test_figures_are_those_of_the_files(tmp_path):
    """Tokens add up; a step's token count is not a held-out count; speed adds up times."""
    run = read_run(workdir(tmp_path / "a", WHOLE, receipt(sessions=((0, 2), (2, 4)))))
    assert run.train["tokens"].tolist() == [100, 200, 300, 400]
    assert [e["tokens"] for e in run.evals] == [0, 200, 400]
    assert [e["positions"] for e in run.evals] == [1000] * 3
    assert run.divergence == "KL at T = 4" and not run.without_teacher


def test_curves_average_and_bands_span(tmp_path):
    lines = [
        step(i, loss=float(i % 4), tokens_per_second=10.0 if i % 2 else 1000.0)
        for i in range(1, 4 * page._BINS + 1)
    ]
    run = read_run(workdir(tmp_path / "a", lines))
    curve = page._average(run, "loss")
    assert curve.values.tolist() == [1.5] * page._BINS
    assert curve.tokens.tolist() == [400.0 * (i + 1) for i in range(page._BINS)]
    least, greatest = curve.band
    assert ({*least}, {*greatest}) == ({0.0}, {3.0})
    # Half of the steps at 10, half at 1000: 2 / (1/10 + 1/1000), not their mean 505.
    speed = page._average(run, "tokens_per_second")
    np.testing.assert_allclose(np.median(speed.values), 2 / (1 / 10 + 1 / 1000))


def test_the_first_step_of_a_session_is_no_speed(tmp_path):
    lines = [step(i, tokens_per_second=1.0 if i in (1, 3) else 50.0) for i in range(1, 5)]
    run = read_run(workdir(tmp_path / "a", lines, receipt(sessions=((0, 2), (2, 4)))))
    assert page._average(run, "tokens_per_second").values.tolist() == [50.0]


def test_other_divergences_and_top_k_caches_are_named(tmp_path):
    record = receipt(loss_divergence="reverse_kl", loss_temperature=1.0)
    columns, _ = page.results_table([read_run(workdir(tmp_path / "a", WHOLE, record))])
    assert "reverse_kl at T = 1" in columns and "KL to the teacher" in columns
    lines = [
        {f"{k}_topk" if k in ("kl", "divergence") else k: v for k, v in line.items()}
        for line in WHOLE
    ]
    topk = read_run(workdir(tmp_path / "b", lines, receipt()))
    assert [e["kl"] for e in topk.evals] == [0.5, 0.4, 0.25]
    assert any("over the ids that the teacher's cache holds" in note for note in topk.notes)
    assert set(topk.notes) & set(page.closing_lines(tmp_path / "b", 4))


def test_where_nothing_is_compared_no_figure_of_it_is_shown(tmp_path):
    """Two tokenizers may cut no held-out position alike; a KL of 0 would be a perfect copy."""
    none = dict.fromkeys(("compared", "kl", "divergence", "agreement", "acceptance"), 0.0)
    lines = [line | none if "kl" in line else line for line in WHOLE]
    columns, rows = page.results_table([read_run(workdir(tmp_path / "a", lines, receipt()))])
    assert "compared" in columns and "loss" in columns
    assert not {"KL to the teacher", "agreement", "acceptance"} & set(columns)
    assert "0.0%" in rows[-1][1] and "0.0000" not in rows[-1][1]


def test_errors_say_what_to_do(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"found neither figures .*kdjax train --config="):
        read_run(tmp_path / "empty")
    with pytest.raises(UserError, match=r"nowhere: no such folder; expected the --workdir"):
        read_run(tmp_path / "nowhere")
    one = workdir(tmp_path / "a")
    with pytest.raises(UserError, match="was given twice"):
        read_runs([one, tmp_path / "b" / ".." / "a"])
    with pytest.raises(UserError, match=r"--out=.*page: expected a name that ends in .html"):
        page.write_page([one], tmp_path / "page")
    (tmp_path / "file").write_text("")
    assert main([str(one), "--out", str(tmp_path / "file" / "r.html")]) == 2
    assert "file is no folder; expected one" in capsys.readouterr().err
    assert main([str(one)]) == 0
    assert capsys.readouterr().out == f"{one / 'report.html'}\n"


# --- at the end of a run ------------------------------------------------------------------------


def a_run(folder):
    return Run(folder, 0, 4, 64, 1.0, None, 1, {})


def test_the_hook_draws_a_finished_run_and_not_an_interrupted_one(whole):
    hook = ReportPage(whole)
    (whole / "report.html").write_text("of an earlier session")
    hook.train_begin(a_run(whole))
    assert not (whole / "report.html").exists()
    hook.train_end("interrupted", None)
    hook.train_end("failed", RuntimeError("out of memory"))
    assert not (whole / "report.html").exists()
    hook.train_end("failed", NonFiniteError("step 3"))
    assert (whole / "report.html").exists()
    (whole / "report.html").unlink()
    hook.train_end("finished", None)
    assert (whole / "report.html").exists()


def test_a_report_that_cannot_be_drawn_fails_no_run(whole, monkeypatch, caplog):
    def broken(_):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(page, "write_page", broken)
    ReportPage(whole).train_end("finished", None)
    assert "no report: RuntimeError: no fonts" in caplog.text
    assert f"Try again: kdjax report {whole}" in caplog.text


@pytest.mark.slow
def test_matplotlib_waits_for_the_first_drawing():
    import subprocess
    import sys

    code = "import sys, kdjax.main, kdjax.watch.report.page; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
