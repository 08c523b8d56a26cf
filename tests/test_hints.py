"""Hints: the teacher reads more than its student, and both meet at the answer's ids."""

import dataclasses
import json
import logging

import numpy as np
import pytest
from conftest import make_tiny_config
from quick import cases
from resuming import assert_resumes
from test_rollouts import begin, rounds_of

from kdjax.commands import train as main
from kdjax.commands import verify as kdjax_verify
from kdjax.config import RolloutConfig, SmokeConfig, validate
from kdjax.data.pipeline import example
from kdjax.data.rollouts import FOLDER, Answer, Prompt, Room, read_prompts, read_round, round_path
from kdjax.device.runtime import device_summary
from kdjax.errors import BAD_INPUT, INTERRUPTED, UserError
from kdjax.evaluation import gap
from kdjax.losses.divergences import log_softmax
from kdjax.losses.kd import kd_loss
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.model import Model
from kdjax.training.caching import cache_teacher
from kdjax.training.hooks import StepRecord
from kdjax.training.job import assemble
from kdjax.training.pair import open_pair
from kdjax.training.plan import count_step_flops, make_plan
from kdjax.training.rollouts import open_prompts
from kdjax.training.step import complete_batch
from kdjax.training.teachers import CachedHidden, Dense
from kdjax.watch.smoke import Verdict

pytestmark = pytest.mark.usefixtures("two_devices")


def write_hints(path, count=12, exercises=8):
    """Lines of prompts with hints; the first are of exercises."""
    lines = []
    for i in range(count):
        said = zip(("user", "assistant"), (f"add {i}", f"a + {i}"), strict=True)
        line = {"messages": [{"role": role, "content": text} for role, text in said]}
        line["hint"] = f"a + {i}" + "!" * i
        if i < exercises:
            test = f"def check(f):\n    assert f(1) == {i + 1}\n"
            fields = {"prompt": f"def add{i}(a):\n", "entry_point": f"add{i}", "test": test}
            line["exercise"] = {"task_id": f"Add/{i}", "wording": "instruct", **fields}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_config(models, folder):
    """A run of a student that its own frozen start teaches, with hints and text beside."""
    config = make_tiny_config(models, folder)
    config.teacher.path, config.teacher.param_dtype = "self", "float32"
    config.data.seq_len, config.train.steps, config.train.batch_size = 64, 6, 8
    config.rollout = RolloutConfig(
        prompts=str(write_hints(folder / "hints.jsonl")), share=0.75, every=2, max_tokens=8,
        batch_size=16, hints=True, hint_tokens=40, gap_exercises=3,
    )  # fmt: skip
    config.loss.divergence, config.loss.temperature = "0.5*forward_kl+0.5*reverse_kl", 2.0
    config.checkpoint.every, config.eval.every, config.checkpoint.keep = 3, 0, 10
    validate(config)
    return config


@pytest.fixture(scope="module")
def job(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hints")
    return assemble(make_config(models, folder), folder / "never")


def test_a_hint_stands_in_the_teachers_prompt_alone_and_held_exercises_in_none(
    models, tmp_path, caplog
):
    tokenizer = open_checkpoint(str(models / "student.gguf")).tokenizer
    file = str(write_hints(tmp_path / "hints.jsonl"))
    prompts = read_prompts(file, tokenizer, 44, 0, longest_hinted=44, hold=3)
    every = [prompts[i] for i in range(len(prompts))]
    held = [one.prompt for one in prompts.held]
    assert len(held) == 3 and len(every) + len(held) == 12
    texts = {tokenizer.decode(one.ids): tokenizer.decode(list(one.hinted)) for one in every + held}
    asked = "<|im_start|>user\n{}add 7<|im_end|>\n<|im_start|>assistant\n"
    assert texts[asked.format("")] == asked.format("a + 7!!!!!!!\n\n")
    # Whatever else is in the file, the same exercises are held out, at most half of them.
    assert not {tuple(one.ids) for one in every} & {tuple(one.ids) for one in held}
    for one in prompts.held:
        name = one.exercise["entry_point"].removeprefix("add")
        assert tokenizer.decode(one.prompt.ids) == asked.replace("7", name).format("")
    assert len(read_prompts(file, tokenizer, 44, 0, longest_hinted=44, hold=99).held) == 4
    # Without hints it is a file of prompts like any other; their key is another one.
    plain = read_prompts(file, tokenizer, 44, 0)
    assert len(plain) == 12 and not plain.held and not any(plain[i].hinted for i in range(12))
    assert plain.key != read_prompts(file, tokenizer, 44, 0, longest_hinted=44).key
    short = read_prompts(file, tokenizer, 44, 0, longest_hinted=38)
    assert "prompts of more than 38 tokens with their hints are left out" in caplog.text
    assert len(short) < 12
    (tmp_path / "none.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(UserError, match=r"no other hint; expected a `hint` beside the `messages`"):
        read_prompts(str(tmp_path / "none.jsonl"), tokenizer, 44, 0, longest_hinted=44)
    with pytest.raises(UserError, match=r"12 prompts of more than 9 tokens, 0 .*prompt_tokens"):
        read_prompts(file, tokenizer, 9, 0, longest_hinted=44)
    wrong = {"messages": [{"role": "system", "content": "a"}], "hint": "b"}
    (tmp_path / "none.jsonl").write_text(json.dumps(wrong))
    with pytest.raises(UserError, match=r"none.jsonl:1: found a hint that no turn of the user"):
        read_prompts(str(tmp_path / "none.jsonl"), tokenizer, 44, 0, longest_hinted=44)


def test_rows_of_teacher_and_student_meet_at_every_id_of_an_answer(rng):
    answers = []
    for i in range(60):
        own = rng.integers(100, 300, int(rng.integers(1, 20))).tolist()
        hinted = () if i % 4 == 0 else [5] * int(rng.integers(6, 30))
        prompt = Prompt([1 + i % 5] * 5, 7, hinted)
        answers.append(Answer.of(prompt, own, np.zeros(len(own)), cut=i % 3 == 0))
    room = Room(8, 65, 16, 110)
    assert room.is_filled(answers)
    rows, count = room.pack(answers, (0, 3))
    assert rows.teacher is not None and count > 20
    # What was written beyond what the teacher's rows hold changes nothing.
    narrow = room._replace(teacher_length=66)
    filled = [n for n in range(60) if narrow.is_filled(answers[:n])]
    assert len({narrow.pack(answers[:n], (0, 3))[1] for n in filled}) == 1 < len(filled)
    found = []
    for index in range(8):
        row = example(rows, index)
        trained, places = row["weights"] != 0, row["teacher_places"]
        assert not places[~trained].any() and len(row["teacher_tokens"]) == 110
        # The next id there is the label here, and both lie in the segment of one number.
        np.testing.assert_array_equal(
            row["teacher_tokens"][places[trained] + 1], row["labels"][trained]
        )
        np.testing.assert_array_equal(
            row["teacher_segment_ids"][places[trained]], row["segment_ids"][trained]
        )
        for segment in range(1, row["teacher_segment_ids"].max() + 1):
            inside = row["teacher_segment_ids"] == segment
            found.append(row["teacher_tokens"][inside].tolist())
            assert row["teacher_positions"][inside].tolist() == list(range(inside.sum()))
    assert sorted(found) == sorted(answer.read.tolist() for answer in answers[:count])


def predict(model, texts):
    """Logits of each text alone in a row; what fills it up stands behind."""
    rows = np.zeros((len(texts), 104), np.int32)
    for row, ids in zip(rows, texts, strict=True):
        row[: len(ids)] = ids
    return np.asarray(model.logits(rows))


def list_answers(batch):
    """Prompt and answer of each trained segment as student and as teacher read them."""
    for tokens, labels, segments, weights, theirs, their_segments, places in zip(
        *(np.asarray(batch[name]) for name in (
            "tokens", "labels", "segment_ids", "weights", "teacher_tokens", "teacher_segment_ids",
            "teacher_places",
        )), strict=True
    ):  # fmt: skip
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero((segments == segment) & (weights != 0))
            if not len(at):
                continue
            begins = np.flatnonzero(segments == segment)[0]
            their_begin = np.flatnonzero(their_segments == segments[at[0]])[0]
            ours = tokens[begins : at[-1] + 1].tolist()
            read = theirs[their_begin : places[at[-1]] + 1].tolist()
            yield ours, read, labels[at].tolist()


@pytest.mark.parametrize(
    ("weights", "microbatches"), cases(("dense", 1), slow=[("packed", 2), ("float8", 1)])
)
def test_the_loss_is_that_of_each_answer_behind_the_prompts_of_both(
    models, job, tmp_path, weights, microbatches
):
    """Written out: each answer alone, student and teacher each behind its own prompt."""
    if weights != "dense":
        config = make_config(models, tmp_path)
        config.teacher.weights, config.train.microbatches = weights, microbatches
        config.train.batch_size = 8 * microbatches
        job = assemble(config, tmp_path / "never")
    state = job.make_state()
    source = begin(job, tmp_path / "run").source
    batch = source.next(state.params)
    student = Model(job.step.spec.student, state.params, 320, placement=job.step.placement)
    real, loss = job.pair.vocabulary.real, job.step.spec.head.loss
    answers = list(list_answers(batch))
    assert sum(len(read) > len(ours) for ours, read, _ in answers) > 4

    both = (
        predict(model, [answer[side] for answer in answers])[..., :real]
        for side, model in enumerate((student, job.teacher))
    )
    sums = []
    for (ours, read, labels), s, t in zip(answers, *both, strict=True):
        ends = ((x, len(ids), len(labels)) for x, ids in ((s, ours), (t, read)))
        s, t = (x[end - count : end] for x, end, count in ends)
        sums += np.asarray(kd_loss(s, t, np.asarray(labels), loss)).tolist()
    _, metrics = job.step(state, job.teacher_params, batch)
    assert float(metrics.loss[1]) == len(sums)
    tolerance = dict(dense=1e-4, packed=1e-3, float8=0.05)[weights]
    np.testing.assert_allclose(metrics.means()["loss"], np.mean(sums), rtol=tolerance)


def test_a_run_taught_by_its_own_start_learns_from_hints_and_resumes_bit_for_bit(
    job, straight, tmp_path
):
    workdir, recorder = straight
    figures = recorder.last()
    assert figures["round", 1]["divergence"] > 0  # behind the prompts of both, as it trains
    assert figures["step", 1]["divergence"] > 0
    rows = read_round(round_path(workdir / FOLDER, 0)).rows
    assert rows.teacher is not None and rows.teacher.tokens.shape[1] == 104
    assert_resumes(job, tmp_path / "run", straight, "step", 4)
    assert rounds_of(tmp_path / "run") == rounds_of(workdir)


def test_the_plan_counts_the_teachers_longer_rows(job):
    rollout = dataclasses.replace(job.config.rollout, hints=False)
    plain = dataclasses.replace(job.config, rollout=rollout)
    asked = job.step.placement.mesh, device_summary(), Dense()
    phases = [make_plan(c, job.pair, *asked).phases for c in (plain, job.config)]
    sizes = [one["the teacher runs forward"]["teacher's hidden states"] for one in phases]
    assert sizes[1] == pytest.approx(sizes[0] * 104 / 64)
    before, after = (count_step_flops(c, job.pair, Dense()) for c in (plain, job.config))
    assert after - before > 0.6 * job.pair.teacher.spec.forward_flops(64)
    short = dataclasses.replace(job.config.rollout, hint_tokens=10**6)
    with pytest.raises(UserError, match=r"rows of 1000064 positions; it has 32768"):
        assemble(dataclasses.replace(job.config, rollout=short), job.workdir)


def test_without_hints_a_student_that_is_its_teacher_is_refused(models, tmp_path):
    config = make_config(models, tmp_path)
    pair = open_pair(config)
    assert pair.teacher is not None and pair.teacher.table is pair.student.table
    config.rollout.hints = False
    with pytest.raises(UserError, match="hold the same weights"):
        open_pair(config)


def test_settings_of_hints_that_cannot_work(job):
    for changes, found in (
        ({"rollout": RolloutConfig(hints=True)}, "rollout.hints=True: needs rollout.prompts"),
        ({"loss": dataclasses.replace(job.config.loss, alpha=1.0)}, "needs a teacher that reads"),
    ):
        with pytest.raises(UserError, match=found):
            validate(dataclasses.replace(job.config, **changes))


@pytest.mark.slow
def test_one_round_and_a_cache_hold_what_the_teacher_said_behind_its_hints(models, tmp_path):
    config = make_config(models, tmp_path)
    config.rollout.rounds, config.train.compute_dtype = 1, "float32"
    running = assemble(config, tmp_path / "a")
    assert example(running.rows.train, 0)["teacher_tokens"].shape == (104,)
    cache_teacher(config, tmp_path / "cache", CachedHidden())
    config.teacher.cache = str(tmp_path / "cache")
    cached = assemble(config, tmp_path / "b")
    losses = [
        one.step(one.make_state(), one.teacher_params, one.source.next(None))[1].means()
        for one in (running, cached)
    ]
    assert losses[0]["divergence"] > 0.001
    np.testing.assert_allclose(losses[0]["loss"], losses[1]["loss"], rtol=1e-5)


def test_columns_of_a_teachers_rows_are_all_there_and_inside(job):
    ids = np.ones((2, 8), np.int32)
    batch = {"tokens": ids, "labels": ids}
    wide = np.ones((2, 12), np.int32)
    read = {f"teacher_{n}": wide for n in ("tokens", "segment_ids", "positions")}
    whole = complete_batch(batch | read | {"teacher_places": ids})
    assert whole["teacher_tokens"].shape == (2, 12)
    assert complete_batch(
        batch | {"teacher_1_" + n[8:]: x for n, x in read.items()} | {"teacher_1_places": ids}
    )
    for wrong, found in (
        (read, "has no teacher_places"),
        (read | {"teacher_places": 12 * ids}, "from 12 to 12"),
        (read | {"teacher_places": wide}, r"teacher_places': \(2, 12\)"),
        (read | {"teacher_positions": ids, "teacher_places": ids}, "expected equal shapes"),
    ):
        with pytest.raises(UserError, match=found):
            complete_batch(batch | wrong)


# ---- the gap


def answer_as(told):
    """A stand-in for a model's answers: right in the second half, where prompts have hints."""

    def answer(job, model, prompts, temperature):
        if temperature:  # the student's
            return [[40 + i, 50] for i in range(len(prompts))]
        assert len(prompts) == 6 and all(map(len, prompts))
        texts = []
        for n, prompt in enumerate(prompts):
            name = job.pair.tokenizer.decode(list(prompt)).split("add ")[1][0]
            right = n >= 3 if told == "hints" else bool(told)
            texts.append(f"def add{name}(a):\n    return a + {name if right else 'b'}\n```\n")
        return [job.pair.tokenizer.encode(text) for text in texts]

    return answer


def test_the_gap_is_measured_on_held_exercises_printed_and_kept(job, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(gap, "_answer", answer_as("hints"))
    fresh = begin(job, tmp_path / "run")
    with caplog.at_level(logging.INFO):
        gap.check_gap(fresh)
    said = "solves 0.0% of 3 exercises held out of training, 100.0% with hints: +100.0 points"
    assert said in caplog.text
    figures = json.loads((tmp_path / "run" / gap.GAP).read_text())
    assert (figures["low"], figures["high"]) == (1.0, 1.0)
    # The KL, written out from the logits behind both prompts.
    held = open_prompts(job.config, job.pair.tokenizer).held
    texts = [
        [*ids, 40 + i] for i, one in enumerate(held) for ids in (one.prompt.hinted, one.prompt.ids)
    ]
    logits, values = predict(job.teacher, texts)[..., : job.pair.vocabulary.real], []
    said = [
        log_softmax(x[len(ids) - 2 : len(ids)], 1.0) for x, ids in zip(logits, texts, strict=True)
    ]
    for hinted, plain in zip(said[::2], said[1::2], strict=True):
        values += np.sum(np.exp(hinted) * (hinted - plain), axis=-1).tolist()
    np.testing.assert_allclose(figures["kl"], np.mean(values), rtol=1e-3)
    assert figures["kl"] > 1e-3
    # The same run, begun again, has it; another one measures anew.
    monkeypatch.setattr(gap, "measure_gap", None)
    gap.check_gap(fresh)
    with pytest.raises(TypeError):
        gap.check_gap(dataclasses.replace(fresh, identity=fresh.identity | {"train.seed": 1}))


def test_without_a_gap_the_run_stops_unless_told_to_go_on(job, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(gap, "_answer", answer_as(True))
    fresh = begin(job, tmp_path / "run")
    with pytest.raises(UserError, match=r"hints do not help this teacher: .*\+0.0 points .*95%"):
        gap.check_gap(fresh)
    allowed = dataclasses.replace(job.config.teacher, allow_degenerate=True)
    gap.check_gap(begin(job, tmp_path / "run", teacher=allowed))
    assert "hints do not help this teacher" in caplog.text
    # Measured is below two points in a hundred and above 0 for sure: it goes on.
    sure = {"exercises": 900, "plain": 0.5, "hinted": 0.51, "gain": 0.01, "low": 0.002}
    monkeypatch.setattr(gap, "measure_gap", lambda _, **__: sure | {"high": 0.018, "kl": 0.1})
    gap.check_gap(begin(job, tmp_path / "another"))
    monkeypatch.undo()
    cached = dataclasses.replace(fresh, kind=CachedHidden(), workdir=tmp_path / "cached")
    with pytest.raises(UserError, match=r"cannot be measured: found a teacher that comes from a c"):
        gap.check_gap(cached)
    rollout = dataclasses.replace(job.config.rollout, hints=False)
    gap.check_gap(begin(job, tmp_path / "plain", rollout=rollout))  # nothing to do
    assert not (tmp_path / "plain").exists()


@pytest.mark.usefixtures("without_walls")
def test_without_walls_the_gap_is_measured_only_if_asked_for(job, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(gap, "_answer", answer_as("hints"))
    fresh = begin(job, tmp_path / "run")
    with pytest.raises(UserError, match=r"cannot be measured: found no bubblewrap.*degenerate"):
        gap.check_gap(fresh)
    allowed = dataclasses.replace(job.config.teacher, allow_degenerate=True)
    gap.check_gap(begin(job, tmp_path / "run", teacher=allowed))
    assert "found no bubblewrap" in caplog.text and not (tmp_path / "run" / gap.GAP).exists()
    gap.check_gap(fresh, allow_unsandboxed=True)
    assert json.loads((tmp_path / "run" / gap.GAP).read_text())["gain"] == 1.0


@pytest.mark.parametrize("flags", [[], ["--allow-unsandboxed"]])
def test_the_flag_reaches_the_gap(tmp_path, monkeypatch, flags):
    gates = []

    def stood_in(config, workdir, *, gate, **_):
        gates.append(gate)
        return "interrupted"

    monkeypatch.setattr("kdjax.watch.run.distill", stood_in)
    assert main.main(["--config=demo", f"--workdir={tmp_path}/run", *flags]) == INTERRUPTED
    assert gates[0].keywords == {"allow_unsandboxed": bool(flags)}


def test_a_smoke_run_is_not_judged_by_text_without_hints(job):
    for hints, verdict in ((True, "PASS"), (False, "FAIL")):
        config = dataclasses.replace(
            job.config,
            smoke=SmokeConfig(steps=1),
            rollout=dataclasses.replace(job.config.rollout, hints=hints),
        )
        trial = Verdict(config)
        trial.step_end(StepRecord(1, {}, 0.1, {}))
        for step, loss in ((0, 1.0), (1, 1.5)):
            trial.eval_end(step, {"loss": loss})
        assert trial.outcome(None)["verdict"] == verdict


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_command_whose_hints_do_not_help_ends_before_step_one(models, tmp_path, capsys):
    """Nothing is stood in for: a teacher of random weights solves nothing, with hints too."""
    config = make_config(models, tmp_path)
    assert main.train_and_report(config, tmp_path / "run") == BAD_INPUT
    assert "the teacher solves 0.0% of 3 exercises held out of training" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert json.loads((tmp_path / "run" / gap.GAP).read_text())["kl"] > 1e-3
    config.teacher.allow_degenerate, config.train.steps = True, 3
    assert main.train_and_report(config, tmp_path / "run") == 0
    assert kdjax_verify.main([str(tmp_path / "run")]) == 0
