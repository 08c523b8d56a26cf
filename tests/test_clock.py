"""How a run ends by `train.seconds`, and goes on as the same run."""

import itertools
import json
import types

import chex
import jax
import pytest
from conftest import start_over
from resuming import Rounds
from test_run import Recorder, go, saved

from kdjax.device.cluster import SharedFlag
from kdjax.device.sharding import make_mesh
from kdjax.formats.saved import saved_run
from kdjax.training import loop
from kdjax.training.clock import Clock
from kdjax.training.hooks import StepRecord
from kdjax.training.job import assemble

pytestmark = pytest.mark.usefixtures("one_device")


def make_clock(limit, record=None):
    return Clock(limit, SharedFlag(make_mesh(1, 1, 1, jax.devices()[:1])), record or {})


def test_seconds_end_a_run_and_what_compiles_is_not_counted():
    clock = make_clock(5.0)
    for step in range(1, 5):
        assert not clock.is_over()
        clock.step_end(StepRecord(step, {}, 60.0 if step == 1 else 1.0, {}))
        clock.news(step, "round", {"seconds": 60.0 if step == 1 else 0.5})
    assert clock.record == {"clock": {"seconds": 4.5, "ended": False}}
    clock.step_end(StepRecord(5, {}, 1.0, {}))
    assert clock.is_over()
    assert make_clock(0.0).record == {} and not make_clock(0.0).is_over()


@pytest.mark.parametrize("name", ["clock", "phase"])
def test_what_the_clock_has_decided_is_saved(name):
    """Seconds go on; where it ended stays decided. Earlier versions had another name for both."""
    under_way = json.loads(json.dumps({name: {"seconds": 2.5, "ended": []}}))
    clock = make_clock(4.0, under_way)
    for step in (6, 7):  # of a resumed process; the first compiles
        assert not clock.is_over()
        clock.step_end(StepRecord(step, {}, 1.5, {}))
    assert not Clock.has_ended(under_way | clock.record) and clock.is_over()
    assert clock.record["clock"] == {"seconds": 4.0, "ended": True}
    ended = {name: {"seconds": 0.0, "ended": [7]}}
    assert Clock.has_ended(ended) and make_clock(4.0, ended).is_over()


@pytest.mark.slow
def test_where_the_clock_ended_a_run_is_saved(tiny_config, tmp_path, monkeypatch):
    """A run that is resumed and a straight one end at the same step of the same clock."""
    config = tiny_config
    config.eval.every, config.checkpoint.every, config.train.seconds = 0, 3, 3.0
    clock, job = itertools.count(), assemble(config, tmp_path / "whole")
    ticking = types.SimpleNamespace(perf_counter=lambda: float(next(clock)))
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", ticking)
        assert go(config, tmp_path / "whole", job=job) == "finished"
        fresh = start_over(job, tmp_path / "resumed")
        assert go(config, tmp_path / "resumed", Rounds(4), job=fresh) == "interrupted"
    # The step after the stop reached the limit: nothing of it is left to do but its evaluation.
    assert saved_run(tmp_path / "resumed", 5)["clock"]["ended"]
    last = Recorder()
    again = start_over(job, tmp_path / "resumed")
    assert go(config, tmp_path / "resumed", last, job=again) == "finished"
    assert [call[0] for call in last.calls] == ["begin", "eval", "checkpoint", "end"]
    (a, one), (b, two) = (saved(job, tmp_path / name) for name in ("whole", "resumed"))
    assert a == b == 5
    chex.assert_trees_all_equal(one, two)
