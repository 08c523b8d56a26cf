"""The worth of hints before anything trains: does the teacher solve more with them?

A gap between the teacher with its hints and without is what its student can gain from them: where
there is none, the run would only pass on how the teacher talks of a hint. Measured on exercises
that are held out of training (`rollout.gap_exercises`), whose own tests judge.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.config import list_hinted
from kdjax.data.rollouts import HeldExercise
from kdjax.device import cluster
from kdjax.errors import UserError
from kdjax.evaluation import problems as bench
from kdjax.evaluation import sandbox
from kdjax.evaluation.passk import Settings, draw_anew, run_answer
from kdjax.formats.files import replacing
from kdjax.losses.kd import KDLoss
from kdjax.models.decoder import DecoderFunctions
from kdjax.models.model import Model, cast_params
from kdjax.training.job import Job, open_writer
from kdjax.training.judging import compare_behind
from kdjax.training.pair import HOW_TO_ALLOW
from kdjax.training.rollouts import answer_prompts, open_prompts

_log = logging.getLogger("kdjax")

GAP = "gap.json"  # in a workdir
LEAST = 0.02  # of exercises that the teacher solves with hints alone: less is no gap
_AT_ONCE = 32  # rows that are read together


def check_gap(job: Job, *, allow_unsandboxed: bool = False) -> None:
    """Measures the gap of a run's first hints, prints it and keeps it in the workdir's `gap.json`.

    The teacher's programs run where this machine can confine them, or `allow_unsandboxed`. A run
    that begins again finds the figures there. Raises `UserError` for a teacher whom hints help by
    less than two points in a hundred exercises, if the interval holds 0, and where nothing can be
    measured; with `teacher.allow_degenerate` a line says so and the run goes on.
    """
    hinted = list_hinted(job.config)
    if not hinted:
        return
    job = dataclasses.replace(job, config=hinted[0])
    path = job.workdir / GAP
    made_of = hashlib.sha256(json.dumps(job.identity, sort_keys=True).encode()).hexdigest()
    try:
        figures = _read(path, made_of) or measure_gap(job, allow_unsandboxed=allow_unsandboxed)
    except NothingToMeasureError as error:
        return _refuse(job, f"the gain by hints cannot be measured: {error}")
    _log.info("%s", describe(figures))
    if jax.process_index() == 0:
        job.workdir.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({"of": made_of, **figures}, indent=1).encode())
    if figures["gain"] < LEAST and figures["low"] <= 0:
        _refuse(
            job,
            f"hints do not help this teacher: {describe(figures)}; expected {100 * LEAST:g} points "
            "or more, or an interval above 0. Write other hints, or take another teacher.",
        )


class NothingToMeasureError(UserError):
    """There is no teacher that answers, no exercise that judges, or no place to run programs."""


def _refuse(job: Job, message: str) -> None:
    """Raises `UserError`, or warns where the user has allowed a teacher that teaches nothing."""
    if job.config.teacher.allow_degenerate:
        _log.warning("%s", message)
        return
    raise UserError(f"{message} If this is meant, {HOW_TO_ALLOW}")


def _read(path: Path, made_of: str) -> dict[str, Any] | None:
    """The figures of a file that an earlier start of this run left; one for all processes."""
    found = None
    if jax.process_index() == 0 and path.exists():
        try:
            found = json.loads(path.read_text())
        except ValueError:
            found = None
    found = cluster.exchange("gap-file", found)[0]
    return found if isinstance(found, dict) and found.get("of") == made_of else None


def describe(figures: Mapping[str, Any]) -> str:
    """Says the figures in one line."""
    low, high = 100 * figures["low"], 100 * figures["high"]
    return (
        f"the teacher solves {figures['plain']:.1%} of {figures['exercises']} exercises held out "
        f"of training, {figures['hinted']:.1%} with hints: {100 * figures['gain']:+.1f} points "
        f"(95%: {low:+.1f} to {high:+.1f}); KL of the two on the student's answers "
        f"{figures['kl']:.4f}"
    )


def measure_gap(job: Job, *, allow_unsandboxed: bool = False) -> dict[str, Any]:
    """The teacher's pass@1, greedy, without hints and with them, their difference and its interval.

    `kl` is the mean of KL(with || without), nats, over the tokens that the student at its start
    answers to the same exercises. The result is JSON-able. Raises `NothingToMeasureError`.
    """
    held = open_prompts(job.config, job.pair.tokenizer).held
    if not held:
        raise NothingToMeasureError(
            "found no two exercises in rollout.prompts; expected lines with an `exercise`, as "
            "`kdjax answers --hint` writes them."
        )
    teacher = job.teacher
    if teacher is None or not job.kind.runs or not isinstance(teacher.functions, DecoderFunctions):
        raise NothingToMeasureError(
            "found a teacher that comes from a cache and answers nothing; expected one that runs. "
            "Measure with the same config, without teacher.cache and with smoke.steps=1."
        )
    try:
        sandbox.check(allow_unsandboxed)
    except UserError as error:
        raise NothingToMeasureError(str(error)) from error
    count = len(held)
    prompts = [one.prompt.ids for one in held], [list(one.prompt.hinted) for one in held]
    answers = _answer(job, teacher, [*prompts[0], *prompts[1]], 0.0)
    passed = np.asarray(_run_programs(job, [*held, *held], answers, allow_unsandboxed), np.float64)
    plain, hinted = passed[:count], passed[count:]
    low, high = draw_anew(hinted[None], plain[None], seeds=False)
    return {
        "exercises": count,
        "plain": float(plain.mean()),
        "hinted": float(hinted.mean()),
        "gain": float(hinted.mean() - plain.mean()),
        "low": low,
        "high": high,
        "kl": _measure_kl(job, teacher, *prompts),
    }


def _answer(
    job: Job, model: Model, prompts: Sequence[Sequence[int]], temperature: float
) -> list[list[int]]:
    said = answer_prompts(
        job.config,
        model,
        job.pair.tokenizer,
        job.pair.vocabulary.real,
        prompts,
        temperature,
        batch_size=min(job.config.rollout.batch_size, len(prompts)),
    )
    return [list(one.ids) for one in said]


def _run_programs(
    job: Job,
    held: Sequence[HeldExercise],
    answers: Sequence[Sequence[int]],
    allow_unsandboxed: bool,
) -> list[bool]:
    """Whether each answer's program passed; the first process runs them for all."""

    def run(one: HeldExercise, ids: Sequence[int]) -> bool:
        exercise, wording = bench.read_exercise(one.exercise)
        settings = Settings(wording=wording, allow_unsandboxed=allow_unsandboxed)
        answer = job.pair.tokenizer.decode(list(ids))
        return run_answer(exercise, answer, settings).passed

    passed = None
    if jax.process_index() == 0:
        with concurrent.futures.ThreadPoolExecutor(cluster.cores()) as pool:
            passed = list(pool.map(run, held, answers))
    return cluster.exchange("gap", passed)[0]


def _measure_kl(
    job: Job, teacher: Model, plain: Sequence[list[int]], hinted: Sequence[list[int]]
) -> float:
    """Mean KL of the teacher with hints from itself without, on the student's own answers."""
    student = open_writer(job.pair, job.step)
    state = job.make_state()
    student = student.replace(params=cast_params(student, job.step.see(state)))
    answers = _answer(job, student, plain, job.config.rollout.temperature)
    jax.tree.map(lambda x: x.delete(), state)
    del state, student
    total, ids = 0.0, 0
    width = job.config.rollout.max_tokens
    for start in range(0, len(answers), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        filled = [own + [0] * (width - len(own)) for own in answers[part]]
        sides = (teacher, hinted[part]), (teacher, plain[part])
        with teacher.precision():
            found = compare_behind(*sides, filled, job.pair.vocabulary.real, KDLoss())
        for own, values in zip(answers[part], np.asarray(found.divergence), strict=True):
            total, ids = total + float(values[: len(own)].sum()), ids + len(own)
    return total / max(ids, 1)
