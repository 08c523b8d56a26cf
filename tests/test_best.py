"""The best checkpoint by a held-out figure, and the run that is stopped for making it worse."""

import contextlib
import logging
import types

import numpy as np
import pytest
import scipy.stats
from conftest import make_tiny_config
from test_run import go

import kdjax
from kdjax.commands.export import main as export
from kdjax.errors import COLLAPSED, UserError
from kdjax.formats.saved import Best, find_best, read_receipt, saved_steps
from kdjax.models.checkpoint import open_checkpoint
from kdjax.training import loop
from kdjax.training.best import (
    Judge,
    Part,
    WorseError,
    compare_parts,
    find_bound,
    list_parts,
)
from kdjax.training.saving import _Kept

pytestmark = pytest.mark.usefixtures("one_device")


@contextlib.contextmanager
def caplog_of(name):
    """The messages of a logger, for fixtures of a wider scope than `caplog`."""
    lines, log = [], logging.getLogger(name)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture(scope="module")
def judged_run(models, tmp_path_factory):
    """Workdir and log of a run of four steps whose second is, by its figures, the best."""
    folder = tmp_path_factory.mktemp("judged")
    config = make_tiny_config(models, folder)
    config.train.steps, config.optim.warmup_steps = 4, 1
    config.eval.every = config.checkpoint.every = 2
    config.eval.samples, config.checkpoint.keep = 0, 1
    losses, merge = iter([5.0, 3.0, 4.0]), loop.merge_sums
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "merge_sums", lambda *x: merge(*x) | {"loss": next(losses)})
        with caplog_of("kdjax") as lines:
            assert kdjax.distill(config, folder / "run") == "finished"
    return folder / "run", [line for line in lines if "best" in line]


@pytest.fixture
def judged(judged_run):
    return judged_run[0]


@pytest.fixture
def judged_log(judged_run):
    return judged_run[1]


def test_the_newest_steps_and_the_best_one_are_kept():
    for best, kept in ((None, [4, 6]), (2, [2, 4, 6]), (6, [4, 6])):
        found = best and Best(best, "loss", 3.0)
        policy = _Kept(2, types.SimpleNamespace(best=found))
        steps = [types.SimpleNamespace(step=step) for step in (1, 2, 4, 6)]
        chosen = policy.should_preserve(steps, context=None)
        assert [s.step for s, keeps in zip(steps, chosen, strict=True) if keeps] == kept
        assert policy.should_preserve(steps[:1], context=None) == [True]


@pytest.mark.slow
def test_the_best_step_stays_and_is_the_one_that_is_taken(judged, tmp_path, caplog, capsys):
    workdir = judged
    assert saved_steps(workdir) == [2, 4]
    assert find_best(workdir) == Best(2, "loss", 3.0)
    assert read_receipt(workdir)["best"] == {"step": 2, "name": "loss", "value": 3.0}
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(workdir).saved.step == 2
    assert "takes step 2, the best by held-out loss (3); the newest, 4, is" in caplog.text
    assert open_checkpoint(workdir / "checkpoints" / "newest").saved.step == 4
    for more, step in ((), 2), (("--step=newest",), 4):
        out = tmp_path / f"{step}.gguf"
        assert export([str(workdir), "--format=gguf", f"--out={out}", *more]) == 0
        assert f"{workdir}, step {step}: gguf" in capsys.readouterr().err


def parts(*means):
    return [{"loss": mean, "kl": mean, "agreement": mean, "tokens": 10.0} for mean in means]


@pytest.mark.slow
def test_the_run_says_which_step_was_best_and_what_it_gained(judged_log):
    assert judged_log[-1] == (
        "step 2 is the best that is saved: held-out loss 3; 5 before training"
    )


def judge_steps(values, record=None, name="loss", saved=lambda step: True):
    """A judge that has seen these figures of steps 0, 1, ..., and had those `saved` noted."""
    judge = Judge(name, 0.0, record or {})
    for step, value in values.items():
        judge.see(step, {name: value}, [])
        if step == 0:
            judge.begin()
        if saved(step):
            judge.note_saved(step)
    return judge


def test_the_start_is_a_candidate_where_it_is_saved():
    """And a run that was stopped between says what one says that was not."""
    worse = judge_steps({0: 3.0, 1: 3.5, 2: 4.0})
    assert worse.best == Best(0, "loss", 3.0)
    assert "held-out loss 3 there, and 4 after step 2. Export and" in worse.describe()
    first = judge_steps({0: 3.0, 1: 3.5})
    assert judge_steps({2: 4.0}, first.record).describe() == worse.describe()
    unsaved = judge_steps({0: 3.0, 1: 3.5, 2: 4.0}, saved=bool)
    assert unsaved.best == Best(1, "loss", 3.5)
    assert "step 1 is the best that is saved: held-out loss 3.5, no better than 3 before" in (
        unsaved.describe()
    )
    better = judge_steps({0: 0.25, 1: 0.5, 2: 0.375}, name="agreement")
    assert better.describe().endswith("held-out agreement 0.5; 0.25 before training")
    assert judge_steps({1: 2.0}).describe() == "step 1 is the best that is saved: held-out loss 2"
    assert judge_steps({0: 2.0}, saved=lambda step: False).describe() == "no step is saved"


def test_an_interval_is_students_t_over_batches():
    """SciPy has it for numbers of equal weights; the batches of a growth are paired."""
    before, now = np.array([1.0, 4.0, 2.0, 7.0]), np.array([1.5, 4.1, 2.7, 7.4])
    sides = [[Part(x, 8.0) for x in side] for side in (before, now)]
    for found, numbers in (
        (find_bound(sides[1]), now),
        (find_bound(sides[1], sides[0]), now - before),
    ):
        low, high = scipy.stats.t.interval(
            0.95, len(numbers) - 1, numbers.mean(), scipy.stats.sem(numbers)
        )
        assert found == pytest.approx((high - low) / 2)
    assert find_bound([Part(1.0, 8.0)]) == np.inf
    batches = [{"kl": 1.0, "loss": 2.0, "tokens": 8.0, "compared": 0.25}]
    assert list_parts(batches, "kl") == [Part(1.0, 2.0)]
    assert list_parts(batches, "loss") == [Part(2.0, 8.0)]


def test_a_run_is_worse_if_it_is_by_more_than_its_error():
    grown, error = compare_parts([Part(1, 10), Part(5, 30)], [Part(1.2, 10), Part(5.4, 30)])
    assert grown == pytest.approx(0.35)
    # Of the weighed differences: 10 * -0.15 and 30 * 0.05, over 40.
    assert error == pytest.approx(np.sqrt(2 * (1.5**2 + 1.5**2)) / 40)
    assert compare_parts([Part(1, 10)], [Part(9, 10)])[1] == np.inf
    judge = Judge("loss", 2.0, {})
    judge.see(4, {"loss": 3.0}, parts(1, 2, 6))
    judge.begin()
    assert judge.note_saved(4) == Best(4, "loss", 3.0)
    judge.see(6, {"loss": 3.1}, parts(1.3, 1.9, 6.1))  # within the error
    with pytest.raises(WorseError, match=r"loss worse by 0.11.*step 4 is the best saved") as caught:
        Judge("loss", 2.0, judge.record).see(8, {"loss": 3.11}, parts(1.11, 2.1, 6.12))
    assert caught.value.status == COLLAPSED
    Judge("loss", 0.0, judge.record).see(8, {"loss": 9.0}, parts(9, 9, 9))
    rising = Judge("agreement", 2.0, {})
    rising.see(0, {"agreement": 0.5}, parts(0.4, 0.5, 0.6))
    rising.begin()
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
def test_a_run_that_makes_it_worse_is_stopped(tiny_config, tmp_path):
    config = tiny_config
    config.eval.every, config.eval.rows, config.eval.stop_worse = 2, 16, 2.0
    config.checkpoint.every, config.optim.warmup_steps = 1, 0
    config.optim.learning_rate = 3.0
    with pytest.raises(WorseError, match=r"step 2: training has made the held-out loss worse"):
        go(config, tmp_path / "run")
    assert saved_steps(tmp_path / "run")[-1] == 1
