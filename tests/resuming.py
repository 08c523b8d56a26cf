"""Runs that are killed, or asked to stop, and go on: they end as one that nothing stopped."""

import contextlib
from unittest import mock

import chex
import jax
import numpy as np
import pytest
from conftest import start_over
from test_run import Recorder, go, saved

from kdjax.training.hooks import Hook
from kdjax.training.job import assemble


class Rounds(Recorder):
    """Notes rounds, too."""

    def news(self, step, kind, figures):
        fixed = {name: value for name, value in figures.items() if name != "seconds"}
        self.calls.append((kind, step, fixed))

    def last(self):
        """The last figures of each step, round and evaluation."""
        return {call[:2]: call[2] for call in self.calls if len(call) == 3}


class Death(BaseException):
    """An end as sudden as kill -9: nothing catches it."""


class Dies(Hook):
    def __init__(self, event, at):
        self._event, self._at = event, at

    def step_end(self, record):
        if (self._event, self._at) == ("step", record.step):
            raise Death
        return super().step_end(record)

    def news(self, step, kind, figures):
        if (self._event, self._at) == ("round", step):
            raise Death


def finish(config, folder):
    """A finished run in `folder`: its config, workdir, job and recorder."""
    recorder, job = Recorder(), assemble(config, folder / "run")
    assert go(config, folder / "run", recorder, job=job) == "finished"
    return config, folder / "run", job, recorder


def assert_goes_on(run, parts, *, stop_at):
    """Stops a run of `finish` after a step, in `parts`: it goes on to the bit; held-out figures."""
    _, workdir, job, recorder = run
    second = Recorder()
    for hook, ends in ((Recorder(stop_at=stop_at), "interrupted"), (second, "finished")):
        assert go(job.config, parts, hook, job=start_over(job, parts)) == ends
    (_, straight), (_, resumed) = saved(job, workdir), saved(job, parts)
    chex.assert_trees_all_equal(straight, resumed)
    figures = [call[2] for call in recorder.calls if call[0] == "eval"]
    assert [call[2] for call in second.calls if call[0] == "eval"] == figures[1:]
    return figures


def run_straight(job, workdir):
    """The workdir of a run that nothing stops, and what was recorded of it."""
    recorder = Rounds()
    assert go(job.config, workdir, recorder, job=start_over(job, workdir)) == "finished"
    return workdir, recorder


def assert_resumes(job, workdir, straight, event, at, *, stop_at=None):
    """Dies at the event, or is asked to stop after a step, goes on, and ends bit for bit alike."""
    whole, recorder = straight
    first, second = Rounds(stop_at), Rounds()
    with contextlib.suppress(Death):
        hooks = first, Dies(event, at)
        assert go(job.config, workdir, *hooks, job=start_over(job, workdir)) == "interrupted"
    assert go(job.config, workdir, second, job=start_over(job, workdir)) == "finished"
    assert first.last() | second.last() == recorder.last()
    (a, one), (b, two) = (saved(job, path) for path in (workdir, whole))
    assert a == b
    chex.assert_trees_all_equal(one, two)


def assert_trains_alike(run, workdir, **mesh):
    """Trains the run of `finish` anew on another mesh, stopped after a step: it comes near it.

    Losses and parameters are compared.
    """
    config, before, one, recorder = run
    with mock.patch.multiple(config.mesh, **mesh):
        ours, job = Recorder(stop_at=2), assemble(config, workdir)
        assert mesh.items() <= job.step.placement.mesh.shape.items()
        assert go(config, workdir, ours, job=job) == "interrupted"
        assert go(config, workdir, ours, job=start_over(job, workdir)) == "finished"
    for a, b in zip(ours.curve(), recorder.curve(), strict=True):
        assert a[2]["loss"] == pytest.approx(b[2]["loss"], rel=1e-4)
    (_, found), (_, expected) = saved(job, workdir), saved(one, before)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3), found.params, expected.params
    )
