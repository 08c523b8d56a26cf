"""Phases of a run: exact resume over their borders, how they end, the best step, who is stopped."""

import dataclasses
import itertools
import json
import logging
import types

import chex
import jax
import numpy as np
import pytest
from conftest import make_tiny_config, start_over
from quick import cases
from resuming import Rounds, assert_resumes
from test_lora_run import adapt
from test_run import go, saved

import kdjax
from kdjax.commands.export import main as export
from kdjax.commands.parsing import override, run_parser
from kdjax.config import Config, choose_figure, list_phases, validate
from kdjax.data.rollouts import read_round, round_path, rounds_folder
from kdjax.device.cluster import SharedFlag
from kdjax.device.sharding import make_mesh
from kdjax.errors import COLLAPSED, UserError
from kdjax.formats.saved import Best, find_best, read_receipt, saved_run, saved_steps
from kdjax.models.checkpoint import open_checkpoint
from kdjax.training import loop
from kdjax.training.best import Judge, Part, WorseError, compare_parts
from kdjax.training.hooks import StepRecord
from kdjax.training.job import assemble, survey
from kdjax.training.phases import PHASE, Pace, Progress
from kdjax.training.saving import _Kept
from kdjax.watch.verify import verify

pytestmark = pytest.mark.usefixtures("two_devices")

ENDED = (2, 6, 9)  # text, the teacher's answers, own answers


def make_config(models, folder):
    """Text, the teacher's answers until the overlap rises no more, own answers."""
    config = make_tiny_config(models, folder)
    config.train.steps, config.optim.warmup_steps = 2, 1
    config.checkpoint.every, config.checkpoint.keep = 1, 20
    config.eval.every, config.eval.rows, config.eval.stop_worse = 3, 16, 0.0
    answers = {
        "rollout.prompts": config.data.train,
        "rollout.max_tokens": 8,
        "rollout.prompt_tokens": 12,
        "rollout.batch_size": 16,
    }
    small = {"optim.learning_rate": 1e-6}  # the overlap stays as it is
    cold = {"rollout.writer": "teacher", "rollout.every": 1, "train.until": "overlap"}
    own = {"rollout.every": 2, "loss.divergence": "reverse_kl", "rollout.share": 0.5}
    config.then = (
        answers | cold | small | {"train.steps": 20},
        answers | own | {"train.steps": 3},
    )
    return config


@pytest.fixture(scope="module")
def job(models, tmp_path_factory, steps_stay):
    """The job of such a run, to be started over."""
    folder = tmp_path_factory.mktemp("phases")
    return assemble(make_config(models, folder), folder / "never")


def test_the_plan_of_all_phases_says_who_chose_the_teachers_weights(job):
    assert "teacher.weights dense, by auto: dense needs" in job.plan.choice


def test_a_phase_that_leaves_its_chunks_to_the_plan_has_the_runs_own():
    config = Config(then=({"loss.chunk_tokens": 0}, {"loss.chunk_tokens": 64}))
    config.loss.chunk_tokens = 128  # as the plan has chosen for all
    assert [phase.loss.chunk_tokens for phase in list_phases(config)] == [128, 128, 64]


def test_a_run_goes_through_its_phases(job, straight):
    workdir, recorder = straight
    figures = recorder.last()
    begun = {step: f["phase"] for (kind, step), f in figures.items() if kind == PHASE}
    assert begun == {3: 1.0, 7: 2.0}
    progress = Progress.read(saved_run(workdir, 9))
    assert progress.ended == ENDED and progress.number == 3
    rates = [figures["step", step]["learning_rate"] for step in (1, 3, 7)]
    assert rates == pytest.approx([5e-4, 5e-7, 5e-4])  # each phase warms up by itself
    # Readings of the teacher's phase: four, the last no higher than the first by half a point.
    read = [figures["round", step]["overlap"] for step in (3, 4, 5, 6)]
    assert read[3] - read[0] < 0.005 and saved_run(workdir, 5)[PHASE]["readings"] == read[:3]
    folders = [rounds_folder(workdir, phase) for phase in range(3)]
    assert [len(list(folder.glob("*.npz"))) for folder in folders] == [0, 4, 2]
    evals = [step for kind, step in figures if kind == "eval"]
    assert evals == [0, 2, 3, 6, 9]  # at every border, too
    assert job.identity["then.1.loss.divergence"] == "reverse_kl"
    assert "then.1.optim.learning_rate" not in job.identity  # as of the run


@pytest.mark.parametrize(
    ("event", "at"),
    cases(
        ("step", 5),  # within the teacher's phase
        ("stop", 6),  # asked to stop where it ends, and saved there
        slow=[
            ("step", 1),  # before anything was saved
            ("step", 2),  # text's last step is done and not saved
            ("round", 3),  # the teacher's first round is written, none of its steps trained
            ("stop", 2),  # asked to stop where the text ends
            ("step", 8),  # within own answers
        ],
    ),
)
def test_a_run_of_phases_killed_anywhere_resumed_is_the_same_bit_for_bit(
    job, straight, tmp_path, event, at
):
    workdir, whole = tmp_path / "run", straight[0]
    stop_at = at - 1 if event == "stop" else None
    assert_resumes(job, workdir, straight, event, at, stop_at=stop_at)
    assert saved_run(workdir, 9)[PHASE] == saved_run(whole, 9)[PHASE]
    assert find_best(workdir) == find_best(whole)


def test_the_teacher_writes_what_it_would_write(job):
    """Greedily, its own next ids; the compared answers are the student's."""
    phase = job.begin_phase(Progress(1, 2))
    author = phase.source._author
    cold = dataclasses.replace(phase.config.rollout, temperature=0.0)
    author = dataclasses.replace(author, config=dataclasses.replace(phase.config, rollout=cold))
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
        config=dataclasses.replace(
            phase.config, rollout=dataclasses.replace(cold, writer="student")
        ),
    )
    other, same = student.write(params, 0, 0)
    assert not np.array_equal(tokens, other.tokens[:, :-1])
    for name in ("overlap", "divergence"):
        assert same["figures"][name] == pytest.approx(record["figures"][name], rel=1e-6)


# ---- how a phase ends


def make_pace(progress=None, **changes):
    config = Config()
    config.train = dataclasses.replace(config.train, steps=100)
    for name, value in changes.items():
        setattr(config.train, name, value)
    return Pace(config, progress or Progress(), SharedFlag(make_mesh(1, 1, 1, jax.devices()[:1])))


def test_the_overlap_ends_a_phase_once_it_rises_no_more():
    pace = make_pace(until="overlap")
    for number, overlap in enumerate([0.5, 0.51, 0.52, 0.53, 0.516, 0.526, 0.534]):
        assert not pace.is_over(8 * number)
        pace.news(8 * number + 1, "round", {"overlap": overlap, "seconds": 1.0})
    assert pace.progress.last == 56 and not pace.is_over(55)  # the round under way is its last
    assert pace.is_over(56)
    assert make_pace(Progress(**dataclasses.asdict(pace.progress)), until="overlap").is_over(56)


def test_seconds_end_a_phase_and_what_compiles_is_not_counted():
    pace = make_pace(seconds=5.0)
    for step in range(1, 5):
        assert not pace.is_over(step)
        pace.step_end(StepRecord(step, {}, 60.0 if step == 1 else 1.0, {}))
        pace.news(step, "round", {"seconds": 60.0 if step == 1 else 0.5})
    assert pace.progress.seconds == 4.5
    pace.step_end(StepRecord(5, {}, 1.0, {}))
    assert pace.is_over(6)


def test_what_ended_a_phase_is_saved_and_the_next_begins_anew():
    under_way = Progress(1, 4, seconds=2.5, readings=(0.5, 0.6), last=9, ended=(4,))
    for progress in (Progress(), under_way, under_way.end(9)):
        assert Progress.read(json.loads(json.dumps({PHASE: dataclasses.asdict(progress)}))) == (
            progress
        )
    assert under_way.end(9) == Progress(2, 9, ended=(4, 9))
    pace = make_pace(under_way, seconds=4.0)
    for step in (6, 7):  # of a resumed process; the first compiles
        pace.step_end(StepRecord(step, {}, 1.5, {}))
    assert pace.progress.seconds == 4.0 and pace.is_over(8)


@pytest.mark.slow
def test_where_the_clock_ended_a_phase_is_saved(models, tmp_path, monkeypatch, steps_stay):
    """A run that is resumed behind it, by another clock, is the same run."""
    config = make_tiny_config(models, tmp_path)
    config.eval.every, config.checkpoint.every = 0, 3
    config.train.seconds, config.then = 3.0, ({"train.steps": 3, "optim.warmup_steps": 1},)
    clock, job = itertools.count(), assemble(config, tmp_path / "whole")
    ticking = types.SimpleNamespace(perf_counter=lambda: float(next(clock)))
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", ticking)
        assert go(config, tmp_path / "whole", job=job) == "finished"
        fresh = start_over(job, tmp_path / "resumed")
        assert go(config, tmp_path / "resumed", Rounds(5), job=fresh) == "interrupted"
    assert Progress.read(saved_run(tmp_path / "resumed", 6)).ended == (5,)
    assert go(config, tmp_path / "resumed", job=start_over(job, tmp_path / "resumed")) == "finished"
    (a, one), (b, two) = (saved(job, tmp_path / name) for name in ("whole", "resumed"))
    assert a == b == 8
    chex.assert_trees_all_equal(one, two)


# ---- the best step


@pytest.fixture(scope="module")
def judged(models, tmp_path_factory, undrawn):
    """The config and workdir of a run of two phases whose second is, by its figures, the worse."""
    folder = tmp_path_factory.mktemp("judged")
    config = make_tiny_config(models, folder)
    config.train.steps, config.optim.warmup_steps = 2, 1
    config.eval.every = config.eval.samples = 0
    config.checkpoint.keep = 1
    config.then = ({"train.steps": 2, "optim.weight_decay": 0.5},)
    losses, merge = iter([5.0, 3.0, 4.0]), loop.merge_sums
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "merge_sums", lambda *x: merge(*x) | {"loss": next(losses)})
        assert kdjax.distill(config, folder / "run") == "finished"
    return config, folder / "run"


def test_the_newest_steps_and_the_best_one_are_kept():
    for best, kept in ((None, [4, 6]), (2, [2, 4, 6]), (6, [4, 6])):
        found = best and Best(best, "loss", 3.0)
        policy = _Kept(2, types.SimpleNamespace(best=found))
        steps = [types.SimpleNamespace(step=step) for step in (1, 2, 4, 6)]
        chosen = policy.should_preserve(steps, context=None)
        assert [s.step for s, keeps in zip(steps, chosen, strict=True) if keeps] == kept
        assert policy.should_preserve(steps[:1], context=None) == [True]


def test_the_best_step_stays_and_is_the_one_that_is_taken(judged, tmp_path, caplog, capsys):
    _, workdir = judged
    assert saved_steps(workdir) == [2, 4]
    assert find_best(workdir) == Best(2, "loss", 3.0)
    assert read_receipt(workdir)["best"] == {"step": 2, "name": "loss", "value": 3.0}
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(workdir).saved.step == 2
    assert "step 2 is taken, the best by held-out loss (3); the newest, 4, is" in caplog.text
    assert open_checkpoint(workdir / "checkpoints" / "newest").saved.step == 4
    for more, step in ((), 2), (("--step=newest",), 4):
        out = tmp_path / f"{step}.gguf"
        assert export([str(workdir), "--format=gguf", f"--out={out}", *more]) == 0
        assert f"{workdir}, step {step}: gguf" in capsys.readouterr().err


def test_a_run_of_phases_is_one_run(judged):
    """One receipt, which is verified; another phase is another run."""
    config, workdir = judged[0], judged[1]
    assert any(line.startswith("ok    checkpoint") for line in verify(workdir))
    assert read_receipt(workdir)["phases"] == [{"number": 1, "begun": 2}]
    assert kdjax.distill(config, workdir) == "finished"
    others = {0.4: ({"train.steps": 2, "optim.weight_decay": 0.4},), 0.01: ()}
    for now, then in others.items():
        other = dataclasses.replace(config, then=then)
        found = rf"then.0.optim.weight_decay: the checkpoint has 0.5, now {now}"
        with pytest.raises(UserError, match=found):
            kdjax.distill(other, workdir)


def parts(*means):
    return [{"loss": mean, "kl": mean, "agreement": mean, "tokens": 10.0} for mean in means]


def test_a_phase_is_worse_if_it_is_by_more_than_its_error():
    grown, error = compare_parts([Part(1, 10), Part(5, 30)], [Part(1.2, 10), Part(5.4, 30)])
    assert grown == pytest.approx(0.35)
    # Of the weighed differences: 10 * -0.15 and 30 * 0.05, over 40.
    assert error == pytest.approx(np.sqrt(2 * (1.5**2 + 1.5**2)) / 40)
    assert compare_parts([Part(1, 10)], [Part(9, 10)])[1] == np.inf
    judge = Judge("loss", 2.0, {})
    judge.see(4, {"loss": 3.0}, parts(1, 2, 6))
    judge.begin_phase(4)
    assert judge.note_saved(4) == Best(4, "loss", 3.0)
    judge.see(6, {"loss": 3.1}, parts(1.3, 1.9, 6.1))  # within the error
    with pytest.raises(WorseError, match=r"loss worse by 0.11.*step 4 is the best saved") as caught:
        Judge("loss", 2.0, judge.record).see(8, {"loss": 3.11}, parts(1.11, 2.1, 6.12))
    assert caught.value.status == COLLAPSED
    Judge("loss", 0.0, judge.record).see(8, {"loss": 9.0}, parts(9, 9, 9))
    rising = Judge("agreement", 2.0, {})
    rising.see(0, {"agreement": 0.5}, parts(0.4, 0.5, 0.6))
    rising.begin_phase(0)
    rising.see(1, {"agreement": 0.6}, parts(0.5, 0.6, 0.7))
    with pytest.raises(WorseError):
        rising.see(2, {"agreement": 0.4}, parts(0.3, 0.4, 0.5))
    cached = Judge("acceptance", 2.0, {})  # against a cache of likeliest ids
    for step, share in ((1, 0.6), (2, 0.5)):
        cached.see(step, {"acceptance_topk": share}, [])
        assert cached.note_saved(step) == Best(1, "acceptance_topk", 0.6)
    assert Judge("kl", 2.0, {}).see(0, {"kl_topk": 1.0}, [{"kl_topk": 1.0, "tokens": 1.0}]) is None
    with pytest.raises(UserError, match=r"no held-out figure 'kl' .*eval.best"):
        Judge("kl", 2.0, {}).see(0, {"loss": 1.0}, [])


@pytest.mark.slow
def test_a_phase_that_makes_it_worse_stops_the_run(tiny_config, tmp_path, steps_stay):
    config = tiny_config
    config.eval.every, config.eval.rows, config.checkpoint.every = 0, 16, 1
    config.then = ({"train.steps": 3, "optim.learning_rate": 3.0},)
    with pytest.raises(WorseError, match=r"step 13: the phase has made the held-out loss worse"):
        go(config, tmp_path / "run")
    assert find_best(tmp_path / "run").step == 10 and saved_steps(tmp_path / "run")[-1] == 12


@pytest.mark.slow
@pytest.mark.usefixtures("steps_stay")
def test_adapters_go_through_phases_on_one_base(tiny_config, tmp_path):
    """A packed teacher writes; the frozen student is not loaded again; resumed bit for bit."""
    config = adapt(tiny_config)
    config.train.steps, config.optim.warmup_steps, config.checkpoint.every = 2, 1, 1
    config.then = (
        {
            "train.steps": 3,
            "rollout.prompts": config.data.train,
            "rollout.writer": "teacher",
            "rollout.every": 2,
            "rollout.max_tokens": 8,
            "rollout.prompt_tokens": 12,
            "rollout.batch_size": 16,
            "student.lora.learning_rate": 1e-3,
        },
    )
    job = assemble(config, tmp_path / "whole")
    bases = (phase.step.base for phase in (job, job.begin_phase(Progress(1, 2))))
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, bases), strict=True))
    assert go(config, tmp_path / "whole", job=job) == "finished"
    resumed = start_over(job, tmp_path / "resumed")
    assert go(config, tmp_path / "resumed", Rounds(3), job=resumed) == "interrupted"
    assert go(config, tmp_path / "resumed") == "finished"
    (a, one), (b, two) = (saved(job, tmp_path / name) for name in ("whole", "resumed"))
    assert a == b == 5
    chex.assert_trees_all_equal(one, two)


# ---- what cannot be


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"loss.alpha": 0.5}, r"then\[0\]: must have train.steps or train.seconds"),
        ({"train.steps": 0}, r"then\[0\]: must have train.steps or train.seconds"),
        ({"train.steps": 40, "rollout.promts": "x"}, r"promts='x': no such field. Did you mean ro"),
        ({"train.steps": 40, "student.path": "x"}, r"student.path='x': must be the same in all"),
        ({"train.steps": 40, "optim.name": "muon"}, r"optim.name='muon': must be the same in all"),
        ({"train.steps": "40"}, r"train.steps='40': must be of type int"),
        ({"train.steps": 40, "optim.beta1": 2.0}, r"then\[0\]: optim.beta1=2.0: must be at least"),
        (
            {"train.steps": 40, "train.until": "overlap"},
            r"train.until='overlap': needs rollout.pro",
        ),
        (3, r"then\[0\]=3: must be a dict of fields"),
    ],
)
def test_phases_that_cannot_work(tiny_config, changes, found):
    tiny_config.then = (changes,)
    with pytest.raises(UserError, match=found):
        validate(tiny_config)


def test_a_trial_may_be_longer_than_a_phase_that_it_does_not_run(tiny_config):
    tiny_config.train.steps, tiny_config.smoke.steps = 1000, 200
    tiny_config.then = ({"train.steps": 100},)
    validate(tiny_config)


def test_flags_change_phases_and_add_them(tiny_config):
    tiny_config.then = ({"train.steps": 40},)
    flags = ["--config.then.0.loss.alpha=1", "--config.then.1.train.seconds=2"]
    config = override(tiny_config, flags, run_parser("train", ""))
    assert config.then == ({"train.steps": 40, "loss.alpha": 1.0}, {"train.seconds": 2.0})
    phases = list_phases(config)
    assert [p.train.seed for p in phases] == [0, 1, 2] and phases[2].loss.alpha == 0.3
    assert choose_figure(config) == "kl" and choose_figure(tiny_config) == "loss"
    with pytest.raises(UserError, match=r"found 1 phases; expected then.1 next"):
        override(tiny_config, ["--config.then.2.train.steps=1"], run_parser("train", ""))


@pytest.mark.parametrize(
    ("flag", "found"),
    [
        (
            "then.0.train.stepz=4",
            "then.0.train.stepz: no such field. Did you mean --config.then.0.",
        ),
        ("then.0.train.steps=x", "then.0.train.steps=x: found no whole number"),
        (
            "then.0.train.steps",
            "then.0.train.steps: found no value; expected --config.then.0.train",
        ),
        ("then.0.teacher.backend=q4k", "then.0.teacher.backend was removed"),
    ],
)
def test_a_flag_of_a_phase_that_cannot_be_read_is_named_whole(tiny_config, flag, found):
    with pytest.raises(UserError, match=f"^--config.{found}"):
        override(tiny_config, [f"--config.{flag}"], run_parser("train", ""))


def test_text_of_a_later_phase_that_holds_nothing_is_refused_before_the_first(
    tiny_config, tmp_path
):
    (tmp_path / "empty.txt").write_text("\n")
    changes = {"train.steps": 40, "data.train": str(tmp_path / "empty.txt")}
    tiny_config.then = (changes,)
    with pytest.raises(UserError, match=r"^then\[0\]: .*empty"):
        survey(tiny_config)


def test_a_round_of_a_phase_lies_in_a_folder_of_its_own(straight):
    workdir, _ = straight
    first, second = (read_round(round_path(rounds_folder(workdir, n), 0)).record for n in (1, 2))
    assert first["settings"]["rollout.writer"] == "teacher" and first["seed"] == 1
    assert "rollout.writer" not in second["settings"] and second["seed"] == 2
