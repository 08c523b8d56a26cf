"""The smoke verdict: exactly N steps of the configured run, judged on held-out text."""

import contextlib
import dataclasses
import itertools
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_tiny_config, start_over, without_page
from scipy.special import rel_entr
from test_run import Recorder

from kdjax.commands import train as main
from kdjax.config import Config, SmokeConfig
from kdjax.device import runtime
from kdjax.errors import SMOKE_FAILED, UserError
from kdjax.formats.saved import saved_steps
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import EvalSums, head_evaluation
from kdjax.training.heldout import held_out_figures
from kdjax.training.hooks import Run, StepRecord
from kdjax.training.job import assemble
from kdjax.training.loop import train
from kdjax.training.saving import Checkpoints
from kdjax.watch import provenance
from kdjax.watch.guards import NonFiniteError
from kdjax.watch.run import make_hooks
from kdjax.watch.smoke import Verdict
from kdjax.watch.verify import verify

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def job(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    config = make_tiny_config(models, folder)
    config.smoke.steps = 7
    return assemble(config, folder)


def go(job, workdir, steps, stop_at=None):
    """A run of the command's hooks, a trial if `steps`; returns its parts."""
    workdir.mkdir(exist_ok=True)
    config = dataclasses.replace(job.config, smoke=SmokeConfig(steps=steps))
    job = start_over(job, workdir, config=config)
    recorder, verdict = Recorder(stop_at), Verdict(config) if steps else None
    with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
        hooks = make_hooks(job, checkpoints, runtime.device_summary(), verdict)
        hooks = [*without_page(hooks), recorder]
        reason = train(job, checkpoints, hooks, None)
    return recorder, verdict, reason


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_trial_is_the_start_of_the_run_and_leaves_no_trace_in_it(job, tmp_path, capsys):
    trial, verdict, reason = go(job, tmp_path / "run", 7)
    assert (reason, verdict.result) == ("finished", "PASS")
    printed = capsys.readouterr().out
    steps = [call for call in trial.calls if call[0] == "step"]
    assert [call[1] for call in steps] == [1, 2, 3, 4, 5, 6, 7]
    # The schedule is the whole run's: two steps of warmup, then a cosine over the other eight.
    low, high = job.config.optim.final_learning_rate, job.config.optim.learning_rate
    cosine = [low + (high - low) * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(5)]
    rates = [call[2]["learning_rate"] for call in steps]
    assert rates == pytest.approx([high / 3, high * 2 / 3, *cosine], rel=1e-5)
    evals = [call[1] for call in trial.calls if call[0] == "eval"]
    assert evals == [0, 5, 7]
    assert saved_steps(tmp_path / "run") == []
    assert not any(call[0] == "checkpoint" for call in trial.calls)
    assert [e["step"] for e in metrics(tmp_path / "run") if e["kind"] == "train"][-1] == 7

    found = provenance.read(tmp_path / "run")
    first, last = (next(c[2] for c in trial.calls if c[:2] == ("eval", s)) for s in (0, 7))
    loss = [first["loss"], last["loss"]]
    smoke = found["smoke"]
    assert (smoke["verdict"], smoke["steps"], smoke["full_run_steps"]) == ("PASS", 7, 10)
    assert [smoke["before"]["loss"], smoke["after"]["loss"]] == pytest.approx(loss, rel=1e-12)
    assert (
        smoke["before"]["kl"] == first["kl"] and smoke["after"]["student_ce"] == last["student_ce"]
    )
    assert smoke["projected_seconds"] == pytest.approx(10 * smoke["median_step_seconds"])
    assert found["exit"]["status"] == 0 and found["output"] is None
    assert printed.startswith(
        f"F-DISTILL-SMOKE-001 PASS: held-out loss fell from {loss[0]:.6f} to "
        f"{loss[1]:.6f} in 7 steps\n"
    )
    for part in (f"kl {first['kl']:.6f} -> {last['kl']:.6f}", "s a step", "10 steps would take"):
        assert part in printed
    assert "checkpoint: none: a smoke run saves nothing" in "\n".join(verify(tmp_path / "run"))

    straight, _, _ = go(job, tmp_path / "straight", 0)
    assert steps == [call for call in straight.calls if call[0] == "step"][:7]
    # The run itself, in the same workdir, is what it would have been without the trial.
    whole, _, _ = go(job, tmp_path / "run", 0)
    assert whole.calls == straight.calls
    found = provenance.read(tmp_path / "run")
    assert found["smoke"] is None and found["resumed_from"] == []
    assert [s["smoke"] for s in found["sessions"]] == ["PASS", None]
    with pytest.raises(UserError, match=r"holds a checkpoint at step 10; a smoke run"):
        go(job, tmp_path / "run", 7)


def test_a_stopped_trial_is_not_decided(job, tmp_path, capsys):
    _, verdict, reason = go(job, tmp_path / "run", 9, stop_at=3)
    assert (reason, verdict.result) == ("interrupted", "UNDECIDED")
    assert "F-DISTILL-SMOKE-001 UNDECIDED: stopped after 4 of 9 steps" in capsys.readouterr().out
    assert saved_steps(tmp_path / "run") == []
    found = provenance.read(tmp_path / "run")
    assert found["exit"]["status"] == 75 and found["smoke"]["after"] is None


@pytest.mark.slow
def test_the_command_exits_3_when_the_loss_rises(tiny_config, tmp_path, monkeypatch, capsys):
    """A learning rate that ruins the student, but leaves every figure finite."""
    tiny_config.optim.learning_rate, tiny_config.optim.warmup_steps = 0.3, 0
    tiny_config.smoke.steps = 2
    tiny_config.log.tensorboard = True
    code = main.train_and_report(tiny_config, tmp_path / "run")
    output = capsys.readouterr().out
    assert code == SMOKE_FAILED == 3, output
    assert "F-DISTILL-SMOKE-001 FAIL: held-out loss did not fall: " in output
    assert "done:" not in output
    found = provenance.read(tmp_path / "run")
    assert found["smoke"]["after"]["loss"] > found["smoke"]["before"]["loss"]
    assert found["exit"] == dict(reason="finished", error=None, message=None, status=3)
    # A second curve in TensorBoard's folder would be joined to the run's own.
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "receipt.json",
    ]


# --- the judgement, without a run ---------------------------------------------------------------


def judged(before, after, *, steps=3, done=3, seconds=(9.0, 1.0, 3.0), error=None, **loss):
    config = Config()
    config.smoke.steps, config.train.steps = steps, 1000
    config.loss = dataclasses.replace(config.loss, **{"temperature": 4.0, "alpha": 0.3} | loss)
    verdict = Verdict(config)
    verdict.train_begin(Run(Path(), 0, steps, 64, 1.0, None, 1, {}))

    def figures(student_ce, divergence, agreement=0.5):
        sums = EvalSums(student_ce, 1.0, divergence, 0.5, agreement, 0.5, 1.0)
        settings = config.loss
        return held_out_figures([sums], KDLoss("jsd", settings.temperature, settings.alpha))

    verdict.eval_end(0, figures(**before))
    for i in range(done):
        verdict.step_end(StepRecord(i + 1, {}, seconds[i], {}))
    if after:
        verdict.eval_end(steps, figures(**after))
    return verdict.outcome(error)


def ce_kl(ce, kl):
    return dict(student_ce=ce, divergence=kl)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (ce_kl(2.0, 0.09), "PASS"),
        (ce_kl(2.0, 0.1), "FAIL"),  # equal is not lower
        (ce_kl(1.9, 0.11), "FAIL"),  # 0.3 * 0.1 less, 0.7 * 16 * 0.01 more
        (ce_kl(2.3, 0.09), "PASS"),
        (ce_kl(math.nan, 0.0), "FAIL"),
        (ce_kl(2.0, -math.inf), "FAIL"),
        (ce_kl(2.0, 0.09) | {"agreement": math.nan}, "FAIL"),
        (None, "UNDECIDED"),
    ],
)
def test_the_verdict_is_on_the_minimised_loss(after, verdict):
    outcome = judged(ce_kl(2.0, 0.1), after)
    assert outcome["verdict"] == verdict
    assert outcome["before"]["loss"] == pytest.approx(1.72)


# The teacher has two modes. The student leaves one of them, where the reverse KL is small, for a
# spread over ids that the teacher does not want, where the forward KL is smaller.
@pytest.mark.parametrize(
    ("divergence", "verdict"), [("forward_kl", "PASS"), ("reverse_kl", "FAIL"), ("jsd", "FAIL")]
)
def test_the_verdict_is_on_the_trained_divergence(divergence, verdict):
    """Logits, beside the loss worked out here in float64 at T = 1 and alpha = 0.01."""
    q, one_mode, spread = (np.asarray(p) for p in ((495, 495, 10), (980, 10, 10), (200, 200, 600)))
    config = Config()
    config.smoke.steps, config.loss.divergence = 1, divergence
    judge, losses = Verdict(config), []
    spec = HeadSpec(KDLoss(divergence, 1.0, 0.01), 3, 3, chunk_tokens=1)
    one = jnp.ones((1, 1))
    for step, p in enumerate((one_mode, spread)):
        s, t = (jnp.log(jnp.asarray(x / 1000, jnp.float32))[None, None] for x in (p, q))
        sums = head_evaluation(s, jnp.eye(3), t, jnp.eye(3), one.astype(int), one, spec)
        judge.eval_end(step, held_out_figures([sums], spec.loss))
        a, b = p / 1000, q / 1000
        m = (a + b) / 2
        soft = {
            "forward_kl": rel_entr(b, a).sum(),
            "reverse_kl": rel_entr(a, b).sum(),
            "jsd": rel_entr(a, m).sum() / 2 + rel_entr(b, m).sum() / 2,
        }[divergence]
        losses.append(-np.log(a[1]) / 100 + 0.99 * soft)
    judge.step_end(StepRecord(1, {}, 1.0, {}))
    outcome = judge.outcome(None)
    assert outcome["verdict"] == verdict
    shown = [outcome[when]["loss"] for when in ("before", "after")]
    assert shown == pytest.approx(losses, rel=1e-5)


def test_alpha_and_temperature_decide():
    better_text, worse_teacher = ce_kl(1.0, 0.1), ce_kl(2.0, 0.05)
    assert judged(worse_teacher, better_text, alpha=1.0)["verdict"] == "PASS"
    assert judged(worse_teacher, better_text, alpha=0.0)["verdict"] == "FAIL"
    # 0.5 * 1 less of text against 0.5 * T^2 * 0.05 more of KL: level at T = sqrt(20).
    assert judged(worse_teacher, better_text, alpha=0.5, temperature=4.4)["verdict"] == "PASS"
    assert judged(worse_teacher, better_text, alpha=0.5, temperature=4.6)["verdict"] == "FAIL"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((1.0, 0.06), (1.4, 0.04), "rose from 1.0000 to 1.4000"),  # of the 7B shape at T = 4
        ((1.0, 0.06), (0.9, 0.04), None),
        ((1.0, 0.06), (1.4, 0.08), None),  # the verdict says FAIL
    ],
)
def test_a_student_that_leaves_its_teacher_is_warned_of(before, after, words, capsys):
    """While the loss falls: at T = 4 the divergence may fall and the KL at T = 1 rise."""
    config = Config()
    config.smoke.steps, config.loss.temperature, config.loss.alpha = 1, 4.0, 0.0
    judge = Verdict(config)
    judge.train_begin(Run(Path("."), 0, 1, 64, 1.0, None, 1, {}))
    for step, (kl, divergence) in enumerate((before, after)):
        figures = dict(loss=16 * divergence, student_ce=2.0, kl=kl, divergence=divergence)
        judge.eval_end(step, figures)
    judge.step_end(StepRecord(1, {}, 1.0, {}))
    warning = judge.outcome(None)["warning"]
    judge.train_end("finished", None)
    printed = capsys.readouterr().out
    assert (warning is None) == (words is None) == ("  warning: the trained loss" not in printed)
    assert warning is None or (words in warning and "loss.temperature=4 and" in warning)


def test_the_projection_is_the_median_step_times_the_run():
    outcome = judged(
        ce_kl(2.0, 0.1), ce_kl(1.0, 0.1), steps=4, done=4, seconds=(90.0, 1.0, 9.0, 2.0)
    )
    assert outcome["median_step_seconds"] == 2.0  # the first holds compilation
    assert outcome["projected_seconds"] == 2000.0
    assert judged(ce_kl(2.0, 0.1), ce_kl(1.0, 0.1), steps=1, done=1)["median_step_seconds"] == 9.0


def test_a_trial_that_breaks_off():
    error = NonFiniteError("step 2: loss not finite")
    outcome = judged(ce_kl(2.0, 0.1), None, done=1, error=error)
    assert (outcome["verdict"], outcome["why"]) == ("FAIL", str(error))
    assert judged(ce_kl(2.0, 0.1), ce_kl(1.0, 0.1), done=2)["verdict"] == "UNDECIDED"
    outcome = judged(ce_kl(2.0, 0.1), None, done=1, error=MemoryError())
    assert outcome["verdict"] == "UNDECIDED" and "1 of 3 steps by MemoryError" in outcome["why"]


def test_metrics_stay_json_when_the_student_is_ruined(tmp_path):
    from kdjax.watch.writers import JsonLines

    hook = JsonLines(tmp_path)
    hook.train_begin(Run(tmp_path, 0, 1, 64, 1.0, None, 1, {}))
    hook.eval_end(1, {"kl": math.nan, "student_ce": math.inf, "agreement": 0.5})
    hook.train_end("finished", None)
    text = (tmp_path / "metrics.jsonl").read_text()
    parsed = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert parsed == {"kind": "eval", "step": 1, "kl": None, "student_ce": None, "agreement": 0.5}


def test_a_trial_is_decided_only_by_all_of_its_steps():
    """Trials of 1 to 6 steps, ended after 0 to 6, with a loss that fell."""
    figures = dict(loss=2.0, student_ce=2.0, divergence=0.1, kl=0.1)
    for wanted, done in itertools.product(range(1, 6 + 1), range(6 + 1)):
        config = Config()
        config.smoke.steps = wanted
        verdict = Verdict(config)
        verdict.eval_end(0, figures)
        for i in range(done):
            verdict.step_end(StepRecord(i + 1, {}, 1.0, {}))
        verdict.eval_end(done, figures | {"loss": 1.0} if done else figures)
        outcome = verdict.outcome(None)
        assert outcome["verdict"] == ("PASS" if done == wanted else "UNDECIDED")
        assert outcome["steps"] == done
