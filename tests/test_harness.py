"""Log-likelihoods for lm-evaluation-harness, and its `kdjax` against its `hf` on an export.

The harness's part needs the `lm-eval` extra; its `hf`, the judge, needs torch too.
"""

import json
import sys

import jax
import numpy as np
import pytest
import yaml
from scipy.special import log_softmax

import kdjax
from kdjax.commands import cli
from kdjax.demo import HELD_OUT, TEACHER
from kdjax.errors import BAD_INPUT, FINISHED, UserError
from kdjax.evaluation.scoring import score
from kdjax.models.model import load

TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{start}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "tiny_until": {
        "output_type": "generate_until",
        "doc_to_text": "{{start}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def model(models):
    return load(models / "student.gguf", dtype="float32")


def score_alone(model, pairs):
    """The definition: a row for each pair, float64, every row of the head."""
    bare = model.replace(checkpoint=None)  # without a tokenizer no row is left out
    rows = [[*context, *continuation[:-1]] for context, continuation in pairs]
    length = max(map(len, rows))
    logits = np.asarray(bare.logits([row + [0] * (length - len(row)) for row in rows]), np.float64)
    for row, (_, continuation), values in zip(rows, pairs, logits, strict=True):
        count = len(continuation)
        log_p = log_softmax(values[len(row) - count : len(row)], axis=-1)
        greedy = bool(np.all(log_p.argmax(-1) == continuation))
        yield log_p[np.arange(count), continuation].sum(), greedy


def test_scores_of_a_batch_are_those_of_each_pair_alone(model):
    """Pairs of many lengths; some share their ids but for the last one."""
    rng = np.random.default_rng(0)
    context, other = rng.integers(0, 200, (2, 40)).tolist()
    pairs = [(context, [3]), (context, [5]), (context, [*other[:9]]), (context[:1], other[:2])]
    pairs += [([*context, 3], [7, 8]), ([*context, 3, 7], [9]), (other, context[:20])]
    best = int(np.argmax(np.asarray(model.replace(checkpoint=None).logits([context]))[0, -1]))
    pairs.append((context, [best]))
    found = score(model, pairs, batch_size=3)
    for (log_prob, greedy), (expected, first) in zip(found, score_alone(model, pairs), strict=True):
        np.testing.assert_allclose(log_prob, expected, rtol=2e-5)
        assert greedy == first
    assert found[-1].greedy and not found[0].greedy


def test_a_long_pair_is_cut_at_its_beginning(model):
    context = list(range(1, 60))
    (cut,), (short,) = (
        score(model, [(context, [5, 6])], max_length=20),
        score(model, [(context[-19:], [5, 6])]),
    )
    np.testing.assert_allclose(cut.log_prob, short.log_prob, rtol=1e-6)
    for bad in (([], [1]), ([1], []), ([1], list(range(21)))):
        with pytest.raises(UserError, match=r"pair 0: found a context .* expected 1 or more"):
            score(model, [bad], max_length=20)


@pytest.mark.slow
def test_rows_are_split_over_devices(models, model):
    pairs = [([4, 5, n], [n, n + 1]) for n in range(5)]
    spread = load(models / "student.gguf", dtype="float32", devices=jax.devices()[:2])
    one, two = score(model, pairs), score(spread, pairs, batch_size=3)
    np.testing.assert_allclose([x.log_prob for x in one], [x.log_prob for x in two], rtol=1e-5)


def test_the_command_says_that_the_harness_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    assert cli.main(["lm_eval", "--tasks", "x"]) == BAD_INPUT
    assert "pip install 'kdjax[lm-eval]'" in capsys.readouterr().err


# --- within the harness -------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder of three offline tasks over stories of the demo."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = []
    for line in HELD_OUT.read_text().splitlines()[:4]:
        text = json.loads(line)["text"]
        words = text.split(" ")
        choices = [" ".join(words[20:24]), "dog dog", words[20], "cat"]
        rows.append({"text": text, "start": " ".join(words[:20]), "choices": choices, "answer": 0})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"dataset_path": "json", "test_split": "test"}
    source["dataset_kwargs"] = {"data_files": {"test": str(folder / "rows.jsonl")}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **task}))
    return folder


def evaluate(lm, tasks):
    """Samples of each task, and the figures that the harness prints."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(lm, tasks=list(TASKS), task_manager=manager)
    return found["samples"], found["results"]


@pytest.fixture
def harnessed(tasks):
    """The demo's packed teacher in the harness; and, lazily, what it answers."""
    from kdjax.evaluation.harness import KdjaxLM

    return KdjaxLM(TEACHER, weights="packed", dtype="float32", batch_size=4)


def number(response):
    """The log-likelihood in a response: a pair in multiple choice, a number in a rolling task."""
    value = response[0]
    return float(value[0] if isinstance(value, list | tuple) else value)


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_answers_are_those_of_hf_on_the_exported_folder(tasks, harnessed, tmp_path):
    pytest.importorskip("torch")
    from lm_eval.models.huggingface import HFLM

    kdjax.export_hf(kdjax.load(TEACHER, dtype="float32"), tmp_path / "hf-folder")
    judge = HFLM(str(tmp_path / "hf-folder"), dtype="float32", device="cpu", batch_size=4)
    ours, figures = evaluate(harnessed, tasks)
    theirs, expected = evaluate(judge, tasks)
    for task in TASKS:
        for one, other in zip(ours[task], theirs[task], strict=True):
            if task == "tiny_until":
                assert one["resps"] == other["resps"]
                continue
            pair = [[number(r) for r in sample["resps"]] for sample in (one, other)]
            np.testing.assert_allclose(*pair, rtol=1e-4)
        for name, value in expected[task].items():
            if isinstance(value, float):
                assert f"{figures[task][name]:.4f}" == f"{value:.4f}", (task, name)


@pytest.mark.parity
@pytest.mark.slow
def test_the_command_runs_tasks_and_prints_their_table(tasks, capsys):
    arguments = f"--model_args pretrained={TEACHER},weights=packed --tasks tiny_choice"
    flags = [*arguments.split(), "--include_path", str(tasks), "--batch_size", "auto"]
    assert cli.main(["lm_eval", *flags, "--limit", "2"]) == FINISHED
    assert "tiny_choice" in capsys.readouterr().out
    assert cli.main(["lm_eval", *flags[:2], "--tasks", "tiny_none"]) == BAD_INPUT
    assert "error: lm_eval: Tasks not found: tiny_none." in capsys.readouterr().err
    assert cli.main(["lm_eval", "run"]) == BAD_INPUT
    assert "error: lm_eval: No tasks specified" in capsys.readouterr().err


@pytest.mark.parity
@pytest.mark.slow
def test_wrong_arguments_are_named(harnessed):
    from kdjax.evaluation.harness import KdjaxLM

    with pytest.raises(UserError, match="found weight; expected pretrained, weights"):
        KdjaxLM(TEACHER, weight="packed")
    with pytest.raises(UserError, match="--gen_kwargs: found num_beams; expected until"):
        harnessed._read_sampling({"num_beams": 4})
    sampling = harnessed._read_sampling({"until": "\n", "do_sample": False, "temperature": 0.7})
    assert (sampling.temperature, sampling.stop_strings) == (0.0, ("\n",))
    assert harnessed.tok_encode("Once") == harnessed.tokenizer.encode("Once")
