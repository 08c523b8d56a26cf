"""Completions before and after training: judged rightly, kept when resumed, changing nothing."""

import contextlib
import dataclasses
import functools
import json
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_tiny_config, start_over
from test_run import Recorder, saved
from toy_teacher import next_id_teacher

from kdjax.data.rows import Rows
from kdjax.device.runtime import device_summary
from kdjax.models.model import load
from kdjax.training.job import assemble
from kdjax.training.judging import judge, split_text
from kdjax.training.loop import train
from kdjax.training.saving import Checkpoints
from kdjax.watch import samples
from kdjax.watch.guards import NonFiniteGuard, NoSignalGuard, SharedGuard
from kdjax.watch.report.workdir import SAMPLES
from kdjax.watch.run import make_hooks
from kdjax.watch.samples import Samples, choose

pytestmark = pytest.mark.usefixtures("one_device")


@functools.cache
def opened(path, weights="dense"):
    return load(path, weights=weights, dtype="float32")


@pytest.fixture(scope="module")
def job(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    return assemble(make_tiny_config(models, folder), folder)


def hook_for(job, workdir, count=2, teacher=None):
    return Samples(
        workdir,
        count,
        job.step.spec.student,
        teacher or job.teacher,
        job.pair.tokenizer,
        job.rows.heldout,
    )


def go(job, workdir, *hooks):
    workdir.mkdir(exist_ok=True)
    job = start_over(job, workdir)
    with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
        return train(job, checkpoints, hooks, None)


def read(workdir):
    return json.loads((workdir / SAMPLES).read_text())["samples"]


@pytest.fixture(scope="module")
def straight(job, tmp_path_factory):
    """The workdir of a run with samples, and what was recorded of it."""
    workdir, recorder = tmp_path_factory.mktemp("straight"), Recorder()
    go(job, workdir, hook_for(job, workdir), recorder)
    return workdir, recorder


@pytest.mark.slow
def test_samples_change_no_figure_and_no_weight(job, straight, tmp_path):
    workdir, beside = straight
    without = Recorder()
    go(job, tmp_path / "without", without)
    assert without.calls == beside.calls and len(without.curve()) == 10 + 3
    (_, one), (_, two) = (saved(job, folder) for folder in (tmp_path / "without", workdir))
    chex.assert_trees_all_equal(one, two)


def test_the_students_own_words_before_and_after(job, straight):
    found = read(straight[0])
    assert len(found) == 2
    for sample in found:
        steps = [sample[when]["step"] for when in ("before", "after")]
        assert steps == [0, 10]
        assert 1 <= len(sample["prompt_ids"]) <= samples.PROMPT_TOKENS
        assert sample["prompt"] == job.pair.tokenizer.decode(sample["prompt_ids"])
        for when in ("before", "after"):
            tokens = sample[when]["tokens"]
            assert len(tokens) <= samples.NEW_TOKENS
            ids = [token["id"] for token in tokens]
            assert "".join(t["text"] for t in tokens) == job.pair.tokenizer.decode(ids)
            for token in tokens:
                opinion = token["teacher"]
                assert 0 < opinion["of_students_id"] <= opinion["probability"] <= 1
                same = opinion["of_students_id"] == opinion["probability"]
                assert same == (opinion["id"] == token["id"])
    assert found[0]["before"] != found[0]["after"]


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_written_before_training(job, straight, tmp_path):
    run = tmp_path / "run"
    assert go(job, run, hook_for(job, run), Recorder(stop_at=1)) == "interrupted"
    first = read(run)
    assert all(s["before"] and s["after"] is None for s in first)
    other = 3  # what the config says now; the prompts are those of the start
    assert go(job, run, hook_for(job, run, other)) == "finished"
    assert read(run) == read(straight[0])


@pytest.mark.slow
def test_a_new_run_in_an_old_folder_starts_over(job, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / SAMPLES).write_text('{"format": 1, "samples": [{"prompt_ids": [9], "before": 1}]}')
    go(job, run, hook_for(job, run), Recorder(stop_at=1))
    assert [s["prompt_ids"] for s in read(run)] != [[9]]


def test_what_goes_wrong_is_logged_and_harms_no_run(job, tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Samples, "_complete", broken)
    run = tmp_path / "run"
    assert go(job, run, hook_for(job, run)) == "finished"
    assert "no samples at step 0: RuntimeError: out of memory" in caplog.text
    assert not (run / SAMPLES).exists()


@pytest.fixture
def hooks_of(job, tmp_path):
    """The hooks of a run that asks for so many samples."""
    with contextlib.closing(Checkpoints(tmp_path, 2)) as checkpoints:

        def hooks_of(samples):
            evaluation = dataclasses.replace(job.config.eval, samples=samples)
            config = dataclasses.replace(job.config, eval=evaluation)
            ours = dataclasses.replace(job, config=config)
            return [type(hook) for hook in make_hooks(ours, checkpoints, device_summary())]

        yield hooks_of


def test_samples_are_made_if_wanted(hooks_of):
    assert Samples in hooks_of(2) and Samples not in hooks_of(0)


def test_only_the_first_process_writes(hooks_of, monkeypatch, job, tmp_path):
    """The others compute their rows of the samples, without which the first would wait."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert hooks_of(2) == [NonFiniteGuard, NoSignalGuard, SharedGuard, Samples]
    hook = hook_for(job, tmp_path)
    hook._last, hook._samples = 1, []
    monkeypatch.setattr(hook, "_describe", lambda *_: [])
    monkeypatch.setattr(hook, "_complete", lambda *_: [])
    hook.student(0, {})
    assert not (tmp_path / "samples.json").exists()


def test_a_teacher_without_a_decoder_has_no_opinion(job, tmp_path, caplog):
    caplog.set_level(logging.INFO, "kdjax")
    hook = hook_for(job, tmp_path, teacher=next_id_teacher(320))
    described = hook._describe([[1, 2]], [samples.Completion([5], "x", "length", [0.0])])
    assert "teacher" not in described[0]["tokens"][0] and "has no decoder" in caplog.text


def test_without_a_teacher_nobody_judges(job, tmp_path, caplog):
    hook = hook_for(job, tmp_path)
    hook._teacher = None
    described = hook._describe([[1, 2]], [samples.Completion([5], "x", "length", [0.0])])
    assert described[0]["tokens"][0]["id"] == 5 and "teacher" not in described[0]["tokens"][0]
    assert not caplog.text


# --- its parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["dense", pytest.param("packed", marks=pytest.mark.slow)])
def test_the_judgement_is_that_of_all_logits_at_once(models, weights):
    """Prompts of unlike lengths, one continuation shorter, against each row read on its own."""
    teacher = opened(models / "teacher.gguf", weights)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, n).tolist() for n in (3, 17, 64)]
    continuations = [rng.integers(0, 300, n).tolist() for n in (12, 5, 1)]
    real = teacher.real_vocab
    found = judge(teacher, prompts, continuations, real)
    for row, (prompt, ids) in enumerate(zip(prompts, continuations, strict=True)):
        tokens = jnp.asarray([[*prompt, *ids]], jnp.int32)
        logits = np.asarray(teacher.logits(tokens), np.float64)[0, len(prompt) - 1 : -1]
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        count = len(ids)
        assert found.top[row, :count].tolist() == p.argmax(-1).tolist()
        np.testing.assert_allclose(found.top_probability[row, :count], p.max(-1), rtol=1e-4)
        np.testing.assert_allclose(found.probability[row, :count], p[range(count), ids], rtol=1e-4)


def test_prompts_are_halves_of_the_longest_documents():
    length = 200
    tokens = np.arange(5 * length, dtype=np.uint32).reshape(5, length)
    segments = np.ones((5, length), np.uint16)
    segments[0, 3:], segments[0, 190:] = 2, 0
    segments[4, :], segments[4, :4] = 0, 1
    rows = Rows(tokens, segments, np.ones_like(segments, np.uint8))
    first, *_, last = choose(rows, 5)
    assert first["prompt"] == list(range(3, 3 + samples.PROMPT_TOKENS))
    assert first["reference"] == list(range(67, 67 + samples.NEW_TOKENS))
    assert (last["prompt"], last["reference"]) == ([800, 801], [802, 803])
    assert [p["row"] for p in choose(rows, 2)] == [1, 3]
    assert [p["row"] for p in choose(rows, 9)] == [0, 1, 2, 3, 4]
    assert choose(rows, 0) == []


def test_a_character_of_several_ids_is_shown_once(models):
    tokenizer = opened(models / "teacher.gguf").tokenizer
    text = "a € b"
    ids = tokenizer.encode(text)
    parts = split_text(tokenizer, ids)
    assert len(parts) == len(ids) > len(text) and "".join(parts) == text
    assert "€" in parts and parts[parts.index("€") - 1] == ""
    cut = split_text(tokenizer, ids[: parts.index("€")])
    assert "".join(cut) == "a \N{REPLACEMENT CHARACTER}"
