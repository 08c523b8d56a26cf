"""The student's own answers: prompts, rows, rounds on the disk, exact resume, the stop rule."""

import copy
import dataclasses
import functools
import json
import logging
import os
import shutil
import time
import types

import chex
import jax
import numpy as np
import pytest
from conftest import make_tiny_config, start_over
from quick import cases
from resuming import Death, Rounds, assert_resumes
from test_disk import no_file_beyond
from test_run import go

from kdjax import config as config_module
from kdjax.config import RolloutConfig, validate
from kdjax.data.pipeline import TextSource, example
from kdjax.data.rollouts import (
    FOLDER,
    Answer,
    Prompt,
    Prompts,
    Room,
    measure_answers,
    read_prompts,
    read_round,
    round_path,
    write_round,
)
from kdjax.data.rows import place_whole
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import COLLAPSED, CheckError, UserError, WriteError
from kdjax.losses.divergences import log_softmax
from kdjax.losses.kd import KDLoss
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.model import Model, load_model
from kdjax.training import loop
from kdjax.training.hooks import Hook
from kdjax.training.identity import identify
from kdjax.training.job import assemble, build_step, make_source
from kdjax.training.judging import TOP, compare
from kdjax.training.rollouts import AnswerSource, Author, check_templates, open_prompts
from kdjax.watch.guards import CollapseError, CollapseGuard

pytestmark = pytest.mark.usefixtures("one_device")

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(models):
    return open_checkpoint(str(models / "student.gguf")).tokenizer


# ---- prompts and rows


def test_prompts_are_conversations_with_the_turn_opened_and_texts_cut_at_lines(
    tokenizer, tmp_path, caplog
):
    """Each once: an answer is no part of it, and files under one licence begin alike."""
    chat = dataclasses.replace(tokenizer, chat_template=CHAT)
    user, answer = {"role": "user", "content": "sort"}, {"role": "assistant", "content": "no"}
    text = "".join(f"line {i}\n" for i in range(9))
    long = {"messages": [{"role": "user", "content": "x" * 99}]}
    records = [{"messages": [user]}, {"messages": [user, answer]}, {"text": text}]
    records += [{"text": text}, long]
    records.append({"messages": [user], "opening": "def "})
    records.append({"prompt": "a\nb\n c", "completion": "d"})
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    with caplog.at_level(logging.WARNING):
        prompts = read_prompts(str(tmp_path), chat, 30, 0)
    assert "1 prompts of more than 30 tokens are left out" in caplog.text
    once = [prompts[i] for i in range(len(prompts))]
    rendered = [p for p in once if chat.decode(p.ids) == "<user>sort\n<assistant>"]
    assert len(rendered) == 1 and {p.end for p in rendered} == {chat.eos_id}
    opened = [p for p in once if chat.decode(p.ids) == "<user>sort\n<assistant>def "]
    assert len(opened) == 1
    (whole,) = (p for p in once if chat.decode(p.ids) == "a\nb\n c")
    assert whole.end == chat.end_of_text_id
    pieces = [chat.decode(p.ids) for p in once if p not in [*rendered, *opened, whole]]
    assert all(piece.endswith("\n") and 0 < len(chat.encode(piece)) <= 30 for piece in pieces)
    assert sorted("".join(sorted(pieces)).split("\n")) == sorted(text.split("\n"))
    # Each once an epoch, in an order of the seed and the epoch.
    assert sorted(map(str, once)) == sorted(
        str(prompts[len(prompts) + i]) for i in range(len(once))
    )
    again = read_prompts(str(tmp_path), chat, 30, 0)
    assert again.key == prompts.key and [again[i] for i in range(len(once))] == once
    assert read_prompts(str(tmp_path), chat, 29, 0).key != prompts.key
    with pytest.raises(UserError, match=r"23 prompts of more than 2 tokens and no.*prompt_tok"):
        read_prompts(f"{tmp_path}/p.jsonl", chat, 2, 0)
    long = "y " * 40 + "\n"
    for text, parts in (
        ("no line end", 1),
        ("Q: why?\nA:", 1),
        (f"a\n{long}b", 2),
        (f"{long}b", 1),
    ):
        caplog.clear()
        (tmp_path / "one.jsonl").write_text(json.dumps({"text": text}))
        cut = read_prompts(f"{tmp_path}/one.jsonl", chat, 30, 0)
        found = sorted(chat.decode(cut[i].ids) for i in range(len(cut)))
        assert len(found) == parts and "".join(found) == text.replace(long, "")
        assert ("1 prompts of more than 30 tokens are left out" in caplog.text) == (long in text)


def test_answers_are_packed_whole_and_leave_little_room(rng):
    lengths = rng.integers(30, 512, 400).tolist()
    pieces = place_whole(lengths, 1025, 32)
    assert [piece.count for piece in pieces] == lengths
    taken = {}
    for piece in pieces:
        taken.setdefault(piece.row, []).append((piece.at, piece.at + piece.count, piece.segment))
    for spans in taken.values():
        assert [s[2] for s in sorted(spans)] == list(range(1, len(spans) + 1))
        assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
        assert max(s[1] for s in spans) <= 1025
    assert sum(lengths) / (len(taken) * 1025) > 0.97
    assert max(piece.segment for piece in place_whole([2] * 100, 1025, 8)) == 8


def make_answers(rng, count, longest, prompt=5):
    answers = []
    for i in range(count):
        size = int(rng.integers(0, longest))
        ids = rng.integers(10, 300, size).tolist()
        made = Prompt([1 + i % 5] * prompt, 7), ids, np.full(size, -0.5)
        answers.append(Answer.of(*made, cut=bool(i % 3 == 0)))
    return answers


def test_rows_hold_the_first_answers_with_loss_on_the_answer_and_its_end_only(rng):
    answers, room = make_answers(rng, 60, 20), Room(8, 65, 16)
    assert room.is_filled(answers) and not room.is_filled(answers[:20])
    rows, count = room.pack(answers, (0, 3))
    assert count > 0.8 * 8 * 65 / np.mean([len(a.ids) for a in answers])
    found = []
    for index in range(8):
        row = example(rows, index)
        for segment in range(1, rows.segments[index].max() + 1):
            inside = rows.segments[index] == segment
            found.append(rows.tokens[index][inside].tolist())
            trained = row["weights"][inside[:-1] & inside[1:]]
            assert trained[:4].tolist() == [0] * 4  # targets within the prompt
            assert trained[4:].all()
    assert sorted(found) == sorted(answer.ids.tolist() for answer in answers[:count])
    ended = [answer.ids[-1] == 7 and len(answer.ids) > 5 for answer in answers]
    assert all(a.cut or end for a, end in zip(answers, ended, strict=True))


def test_figures_of_answers():
    def answer(ids, cut=False):
        return Answer.of(Prompt([1, 2], 0), ids, np.full(len(ids), -2.0), cut=cut)

    again = [3, 4, 5, 6] * 3  # 9 groups of four, 4 of them different
    figures = measure_answers([answer(again), answer(again, cut=True), answer([8, 9])])
    assert figures == {
        "answers": 3,
        "length": pytest.approx(26 / 3),
        "cut_off": pytest.approx(1 / 3),
        "entropy": 2.0,
        "repeated": pytest.approx(10 / 18),
        "distinct": pytest.approx(2 / 3),
    }


# ---- runs


@pytest.fixture(scope="module")
def job(models, tmp_path_factory):
    """A job in rounds of four steps, two rows of eight the student's own; to be started over."""
    folder = tmp_path_factory.mktemp("rollouts")
    config = make_tiny_config(models, folder)
    config.rollout.prompts, config.rollout.share = config.data.train, 0.25
    config.rollout.every, config.rollout.max_tokens, config.rollout.answers = 4, 8, 2
    config.rollout.prompt_tokens, config.rollout.batch_size = 12, 16
    config.checkpoint.every, config.eval.every, config.checkpoint.keep = 3, 0, 10
    config.loss.divergence = "0.5*forward_kl+0.5*reverse_kl"
    validate(config)
    return assemble(config, folder / "never")


def begin(job, workdir, **changes):
    """The job for another run, with other sections of its config."""
    return start_over(job, workdir, config=dataclasses.replace(job.config, **changes))


def rounds_of(workdir):
    return {path.name: path.read_bytes() for path in (workdir / FOLDER).iterdir()}


def test_a_run_writes_its_rounds_and_logs_them(job, straight):
    workdir, recorder = straight
    assert sorted(rounds_of(workdir)) == [f"round-{i:05}.npz" for i in range(3)]
    assert [call[1] for call in recorder.calls if call[0] == "round"] == [1, 5, 9]
    record = read_round(round_path(workdir / FOLDER, 1)).record
    assert record["round"] == 1 and record["prompts"] == job.source.identity["rollout.prompts"]
    first = read_round(round_path(workdir / FOLDER, 0)).record
    assert record["student"] != first["student"] and record["first"] == first["next"] > 0
    figures = recorder.last()["round", 5]
    assert set(figures) >= {"length", "cut_off", "entropy", "repeated", "distinct", "overlap"}
    assert figures["divergence"] > 0 and 0 <= figures["overlap"] <= 1
    sample = record["samples"][0]
    assert sample["prompt"] and 0 < len(sample["tokens"]) <= 8
    assert {"text", "divergence", "teacher"} <= set(sample["tokens"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "at"),
    cases(
        ("step", 6),  # within the second round, saved at step 3
        slow=[
            ("writing", 2),  # while the second round is being written
            ("stop", 6),  # asked to stop within a round, and saved there
            ("step", 1),  # before anything was saved
            ("round", 9),  # the round is written, none of its steps trained
        ],
    ),
)
def test_train_10_is_train_killed_anywhere_resumed_bit_for_bit(
    job, straight, tmp_path, monkeypatch, event, at
):
    workdir, replace, written = tmp_path / "run", os.replace, []

    def dying(source, target):
        written.extend([target] if "round-" in str(target) else [])
        if event == "writing" and len(written) == at and target is written[-1]:
            raise Death
        return replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dying)
        stop_at = at if event == "stop" else None
        assert_resumes(job, workdir, straight, event, at, stop_at=stop_at)
    assert rounds_of(workdir) == rounds_of(straight[0])


def test_the_student_writes_by_a_loop_of_layers_and_without_packing(job, tmp_path):
    """Written out for its gradients, it would take many times as long to compile."""
    student = dataclasses.replace(job.config.student, remat="none")
    data = dataclasses.replace(job.config.data, max_segments=4)
    config = dataclasses.replace(job.config, student=student, data=data)
    step = build_step(config, job.pair, job.step.placement, job.kind, job.teacher)[1]
    source = make_source(config, tmp_path, job.pair, job.rows, None, step, job.teacher)
    trains, writes = (x.compute for x in (step.spec.student, source._author.student.functions))
    assert (trains.scan, trains.max_segments) == (False, 4)
    assert (writes.scan, writes.max_segments) == (True, 1) and writes.dtype == trains.dtype


def test_a_fresh_source_goes_on_at_every_batch(job, tmp_path):
    params, source = job.make_state().params, begin(job, tmp_path / "run").source
    states, batches = [], []
    for _ in range(10):
        states.append(json.loads(json.dumps(source.get_state())))
        batches.append(source.next(params))
    assert [state["round"] is None for state in states] == [i % 4 == 0 for i in range(10)]
    for state, batch in zip(states, batches, strict=True):
        fresh = begin(job, tmp_path / "run").source
        fresh.set_state(state)
        chex.assert_trees_all_equal(fresh.next(params), batch)


def test_each_process_has_rows_of_the_batch_that_follow_each_other(job, tmp_path):
    params, whole = job.make_state().params, begin(job, tmp_path / "run").source
    text = functools.partial(TextSource, job.rows.train, batch_size=6, seed=job.config.train.seed)
    batches = [whole.next(params) for _ in range(2)]
    shares = []
    for index in range(2):
        place = dict(process_index=index, process_count=2)
        source = AnswerSource(whole._author, text(), tmp_path / "run", **place)
        shares.append([source.next(params) for _ in range(2)])
    for first, second, batch in zip(*shares, batches, strict=True):
        together = {name: np.concatenate([first[name], second[name]]) for name in batch}
        chex.assert_trees_all_equal(together, batch)


def test_a_round_that_is_gone_or_changed_is_not_resumed_from(job, tmp_path):
    source = begin(job, tmp_path / "run").source
    batches = [source.next(job.make_state().params)]
    state, path = source.get_state(), round_path(tmp_path / "run" / FOLDER, 0)
    batches.append(source.next({}))
    whole = path.read_bytes()
    at = whole.index(b"tokens.npy") + 200
    other = read_round(path)
    other.rows.tokens[0, 0] += 1
    for damaged, found in (
        (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "cannot be read"),
        (whole[:300], "cannot be read"),
        ("mask", "has SHA-256"),
        ("round", "the checkpoint expects"),
        (None, "is not there"),
    ):
        if damaged is None:
            path.unlink()
        elif isinstance(damaged, bytes):
            path.write_bytes(damaged)
        elif damaged == "round":  # whole, and another one
            write_round(path, other.rows, {})
        else:  # a column that is not the one of the record
            record = np.frombuffer(json.dumps(other.record).encode(), np.uint8)
            np.savez(path, **other.rows._asdict(), record=record)
        with pytest.raises(CheckError, match=rf"round-00000.npz .*{found}.*put a copy"):
            begin(job, tmp_path / "run").source.set_state(state)
    path.write_bytes(whole)
    fresh = begin(job, tmp_path / "run").source
    fresh.set_state(state)
    chex.assert_trees_all_equal(fresh.next({}), batches[1])


def test_a_round_that_the_disk_refuses_ends_the_run(job, tmp_path):
    source = begin(job, tmp_path / "run").source
    with (
        no_file_beyond(1000),
        pytest.raises(WriteError, match=r"round-00000.npz cannot be written"),
    ):
        source.next(job.make_state().params)
    assert not (tmp_path / "run" / FOLDER).exists()


def test_a_round_asks_for_no_more_answers_than_the_last_one_tells(job, tmp_path, monkeypatch):
    asked, complete = [], Author._complete

    def note(self, student, prompts, numbers):
        asked.append(len(prompts))
        return complete(self, student, prompts, numbers)

    monkeypatch.setattr(Author, "_complete", note)
    author = begin(job, tmp_path / "run").source._author
    params = job.make_state().params
    rows, record = author.write(params, 0, 0)
    assert record["figures"]["length"] > 6  # of at most 8: nearly all are cut off
    again, same = author.write(params, 0, 0, record["figures"]["length"])
    assert sum(asked[1:]) < asked[0]
    np.testing.assert_array_equal(rows.tokens, again.tokens)
    assert same["next"] == record["next"]


@pytest.mark.slow
def test_a_round_is_no_part_of_the_time_of_a_step(job, tmp_path, monkeypatch):
    taken, hours = [], [0]

    class Seconds(Hook):
        def step_end(self, record):
            taken.append(record.seconds)

    write = Author.write

    def slowly(*args):
        hours[0] += 1
        return write(*args)

    clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + 3600 * hours[0])
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(Author, "write", slowly)
    config = dataclasses.replace(job.config, train=copy.deepcopy(job.config.train))
    config.train.steps = 5  # the second round is written behind step 4
    go(config, tmp_path / "run", Seconds(), job=begin(job, tmp_path / "run", train=config.train))
    assert hours == [2] and len(taken) == 5 and max(taken) < 3600


@pytest.mark.slow
def test_answers_are_the_same_on_one_device_and_on_eight(job, straight):
    """And on the run's two."""
    kept = read_round(round_path(straight[0] / FOLDER, 0))
    prompts, real = open_prompts(job.config, job.pair.tokenizer), job.pair.vocabulary.real
    for count in (1, 8):
        placement = Placement.on(make_mesh(count, 1, 1, jax.devices()[:count]))
        student = load_model(job.pair.student, placement=placement, dtype="float32")
        author = Author(job.config, student, prompts, job.pair.tokenizer, real)
        rows, record = author.write(student.params, 0, 0)
        assert all(np.array_equal(a, b) for a, b in zip(rows, kept.rows, strict=True))
        shared = {name: kept.record["figures"][name] for name in record["figures"]}
        assert record["figures"] == pytest.approx(shared, rel=1e-4)


def test_cut_answers_may_be_left_out_and_train_with_a_warning(job, tmp_path, caplog):
    rollout = dataclasses.replace(job.config.rollout, every=2, train_cut=False)
    cold = dataclasses.replace(rollout, temperature=0.01)  # no answer happens upon an end
    started = begin(job, tmp_path / "run", rollout=cold)
    params, source = started.make_state().params, started.source
    with pytest.raises(UserError, match=r"answers of round 0 are cut off at rollout.max_tokens=8"):
        source.next(params)
    rollout = dataclasses.replace(rollout, train_cut=True)
    source = begin(job, tmp_path / "run", rollout=rollout).source
    with caplog.at_level(logging.WARNING):
        batches = [source.next(params) for _ in range(4)]
    assert caplog.text.count("cut off at rollout.max_tokens=8 and train without an end") == 1
    assert sorted(rounds_of(tmp_path / "run")) == ["round-00000.npz", "round-00001.npz"]
    own = [tuple(map(bytes, batch["tokens"][:2])) for batch in batches]
    assert set(own[0]) | set(own[1]) != set(own[2]) | set(own[3])
    assert all(batch["tokens"].shape == (8, 32) for batch in batches)


# ---- guards


def round_figures(number, **changes):
    figures = {"round": float(number), "length": 40.0, "repeated": 0.1, "cut_off": 0.2}
    return figures | {"divergence": 0.03} | changes


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"length": 81.0}, "length: 40 in round 0, now 81; the limit is 80"),
        ({"repeated": 0.25}, "repeated: 0.1 in round 0, now 0.25"),
        ({"cut_off": 0.6}, "cut_off: 0.2 in round 0, now 0.6"),
        ({"divergence": 0.09}, "divergence: 0.03 in round 0, now 0.09; the limit is 0.06"),
    ],
)
def test_a_collapse_stops_the_run_and_names_the_last_good_checkpoint(tmp_path, changes, found):
    for step in (4, 12, 20):
        folder = tmp_path / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        (folder / "_CHECKPOINT_METADATA").touch()
    guard = CollapseGuard(tmp_path, RolloutConfig(every=8, stop_growth=2.0))
    guard.news(1, "round", round_figures(0))
    guard.news(9, "round", round_figures(1, length=79.0, divergence=0.05))
    with pytest.raises(CollapseError) as caught:
        guard.news(25, "round", round_figures(3, **changes))
    message = str(caught.value)
    assert caught.value.status == COLLAPSED and found in message
    assert "the student of step 16 still wrote good ones" in message
    assert f"The last good checkpoint is {tmp_path / 'checkpoints' / '12'}." in message
    unread = {n: x for n, x in round_figures(3).items() if n != "divergence"}
    with pytest.raises(CollapseError, match=r"divergence: 0.03 in round 0, now none, of empty an"):
        guard.news(25, "round", unread)
    free = RolloutConfig(every=8, stop_growth=0.0)
    CollapseGuard(tmp_path, free).news(25, "round", round_figures(3, **changes))


def test_a_resumed_run_is_compared_with_its_first_round(straight, tmp_path):
    workdir, recorder = straight
    guard = CollapseGuard(workdir, RolloutConfig(every=4, stop_growth=1.5))
    figures = recorder.last()["round", 1] | {"round": 1.0}
    guard.news(5, "round", figures)
    longer = figures | {"length": 1.6 * figures["length"]}
    with pytest.raises(CollapseError, match=r"step 0 .* That is the start: begin anew, in another"):
        guard.news(5, "round", longer)
    shutil.copytree(workdir / "rollouts", tmp_path / "rollouts")
    with pytest.raises(CollapseError, match=r"step 4 .* No checkpoint .*raise checkpoint.keep"):
        CollapseGuard(tmp_path, RolloutConfig(every=4)).news(9, "round", longer | {"length": 99.0})


def test_another_template_is_refused_unless_accepted(job, tokenizer, tmp_path, caplog):
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    rollout = dataclasses.replace(job.config.rollout, prompts=str(tmp_path))
    config = dataclasses.replace(job.config, rollout=rollout)

    def check(theirs):
        ours, theirs = (dataclasses.replace(tokenizer, chat_template=x) for x in (CHAT, theirs))
        check_templates(config.rollout, ours, theirs)

    check(CHAT)
    check(CHAT + "{# renders the same #}")
    for other in (CHAT.replace("<{{", "|{{"), None):
        with pytest.raises(UserError, match=r"chat templates of teacher and student differ"):
            check(other)
    config.rollout.allow_other_template = True
    with caplog.at_level(logging.WARNING):
        check(None)
    assert "differ" in caplog.text


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"max_tokens": 30}, "rollout.max_tokens=30: must be less than data.seq_len=32 by .*=12"),
        ({"share": 0.01}, "rollout.share=0.01: must be at least one row"),
        ({"share": 0.0}, "rollout.share=0.0: must be above 0"),
    ],
)
def test_settings_that_cannot_work(job, changes, found):
    rollout = dataclasses.replace(job.config.rollout, **changes)
    with pytest.raises(UserError, match=found):
        validate(dataclasses.replace(job.config, rollout=rollout))


def test_prompts_belong_to_the_identity_of_a_run(job, tmp_path):
    assert job.identity["rollout.prompts"] == open_prompts(job.config, job.pair.tokenizer).key
    assert job.identity["rollout.every"] == 4 and "rollout.batch_size" not in job.identity
    without = dataclasses.replace(job.config, rollout=config_module.RolloutConfig())
    assert not [name for name in identify(without, {}) if name.startswith("rollout.")]


def test_the_overlap_and_the_divergence_are_those_of_the_logits(job):
    real, loss = job.pair.vocabulary.real, KDLoss("reverse_kl", 2.0)
    params = job.make_state().params
    student = Model(
        job.step.spec.student, params, 320, placement=job.step.placement,
        own_tokenizer=job.pair.tokenizer,
    )  # fmt: skip
    prompts, answers = [[5, 6, 7], [9]], [[20, 21], [30, 31]]
    compared = compare(job.teacher, student, prompts, answers, real, loss)
    rows = [[5, 6, 7, 20, 21], [9, 30, 31, 0, 0]]
    theirs = job.teacher.replace(own_tokenizer=job.pair.tokenizer).logits(rows)[..., :real]
    ours = student.logits(rows)[..., :real]
    for row, place in ((0, [2, 3]), (1, [0, 1])):
        t, s = (np.asarray(x)[row, place] for x in (theirs, ours))
        wanted = loss.divergence(log_softmax(t, 2.0), log_softmax(s, 2.0))
        np.testing.assert_allclose(compared.divergence[row], wanted, rtol=1e-3)
        top = [set(np.argsort(-x)[:TOP]) for x in (*t, *s)]
        shared = [len(top[i] & top[2 + i]) / TOP for i in range(2)]
        np.testing.assert_allclose(compared.overlap[row], shared, atol=1e-6)
        chosen = np.take_along_axis(
            np.asarray(log_softmax(s, 1.0)), np.asarray(answers)[row][:, None], 1
        )
        np.testing.assert_allclose(compared.students[row], np.exp(chosen[:, 0]), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["packed", "float8"])
def test_own_answers_are_read_by_every_kind_of_teacher(tiny_config, weights, tmp_path):
    config = tiny_config
    config.teacher.weights = weights
    config.rollout = config_module.RolloutConfig(prompts=config.data.train, every=2, max_tokens=8)
    config.rollout.prompt_tokens, config.rollout.batch_size = 12, 16
    config.train.steps, config.eval.every, config.checkpoint.every = 3, 0, 0
    recorder = Rounds()
    assert go(config, tmp_path / "run", recorder) == "finished"
    seen = recorder.last()
    assert seen["round", 1]["divergence"] > 0 and seen["step", 3]["loss"] > 0


def test_the_teacher_writes_what_it_would_write(job):
    """Greedily, its own next ids; the compared answers are the student's."""
    cold = dataclasses.replace(job.config.rollout, temperature=0.0, writer="teacher")
    author = dataclasses.replace(
        job.source._author, config=dataclasses.replace(job.config, rollout=cold)
    )
    params = job.make_state().params
    rows, record = author.write(params, 0, 0)
    tokens, trained = rows.tokens[:, :-1], rows.mask[:, 1:] != 0
    inside = (rows.segments[:, 1:] == rows.segments[:, :-1]) & (rows.segments[:, 1:] != 0)
    row = int(np.argmax((trained & inside).sum(1)))
    length = int((rows.segments[row] == 1).sum())
    ids = rows.tokens[row, :length].tolist()
    real = job.pair.vocabulary.real
    reader = job.teacher.replace(own_tokenizer=job.pair.tokenizer)
    likeliest = np.argmax(np.asarray(reader.logits([ids]))[0, :, :real], -1)
    answered = [i for i in range(length - 1) if rows.mask[row, i + 1]]
    assert len(answered) > 3
    ends = set(job.pair.tokenizer.stop_ids)
    assert all(ids[i + 1] == likeliest[i] or ids[i + 1] in ends for i in answered)
    student = dataclasses.replace(
        author,
        config=dataclasses.replace(job.config, rollout=dataclasses.replace(cold, writer="student")),
    )
    other, same = student.write(params, 0, 0)
    assert not np.array_equal(tokens, other.tokens[:, :-1])
    for name in ("overlap", "divergence"):
        assert same["figures"][name] == pytest.approx(record["figures"][name], rel=1e-6)


def test_an_endless_sequence_of_few_prompts():
    prompts = Prompts([Prompt([i], 0) for i in range(3)], seed=1)
    assert {prompts[i].ids[0] for i in range(30, 33)} == {0, 1, 2}
