"""pass@k of generated programs: a program passes only by running, and failures are counted.

Estimator: Chen et al. 2021, arXiv:2107.03374, equation 1.
"""

import concurrent.futures
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kdjax.device import cluster
from kdjax.errors import UserError, describe_error
from kdjax.evaluation import problems as bench
from kdjax.evaluation import sandbox
from kdjax.evaluation.problems import Problem
from kdjax.models.decoding import Completion, Sampling
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer

_DRAWS = 10_000
INFERENCE, INFERENCE_FAILED = "inference", "inference_failed"
# Answers prompts (ids) in order, each up to a stop string. If it raises, the samples of that call
# count as failures.
Generate = Callable[[list[list[int]], tuple[str, ...]], Sequence[Completion]]
Asked = tuple[Problem, Completion | str]  # an answer, or the error in its place


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that one of k of the samples, drawn without replacement, is correct.

    1 - C(n-c, k) / C(n, k) as a product of ratios below 1: the binomials themselves overflow.
    Raises `ValueError` unless 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples is undefined")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a benchmark is run."""

    wording: str = "base"
    samples: int = 1
    ks: tuple[int, ...] = (1,)
    batch_size: int = 16
    room: int | None = None  # most ids of a prompt: the model's positions minus the answer's
    limits: sandbox.Limits = sandbox.DEFAULT
    allow_unsandboxed: bool = False  # run programs where this machine cannot confine them


def check_asked(sampling: Sampling, samples: int, seconds: float) -> None:
    """Raises `UserError` unless several samples can differ and each program has time to run.

    Messages name the commands' flags.
    """
    if samples > 1 and sampling.temperature == 0:
        raise UserError(f"--temperature=0 repeats one answer {samples} times; raise it.")
    if not 0 < seconds < math.inf:
        raise UserError(f"--timeout={seconds:g} must be above 0, in seconds.")
    sampling.check()


def answer_with(
    model: Model, tokenizer: Tokenizer, sampling: Sampling, settings: Settings, room: int = 0
) -> Generate:
    """Makes a `Generate` of a model: `settings.batch_size` rows at a time, up to its end tokens.

    `room` is as for `write_answers`: calls with equal room share their programs.
    """

    def generate(prompts: list[list[int]], stops: tuple[str, ...]) -> list[Completion]:
        ends = dict(stop_ids=tokenizer.stop_ids, stop_strings=stops)
        asked = dataclasses.replace(sampling, **ends)
        return model.generate(prompts, asked, batch_size=settings.batch_size, room=room)

    return generate


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer and how its program ended; `ended` is "stop", "length", or "" without answer."""

    task: str
    reason: str
    error: str
    ended: str
    answer: str


def _ask(
    problems: Sequence[Problem], tokenizer: Tokenizer, generate: Generate, settings: Settings
) -> list[Asked]:
    """Returns an answer, or the error's text, for every sample of problems asked at once.

    Only the text of an exception is kept: its frames hold what did not fit into memory.
    """
    asked: list[Asked] = []
    batch, prompts = [], []
    for problem in problems:
        try:
            prompts += [encode_prompt(problem, tokenizer, settings)] * settings.samples
            batch += [problem] * settings.samples
        except UserError as error:
            asked += [(problem, _say(error))] * settings.samples
    if not batch:
        return asked
    try:
        answers = list(generate(prompts, bench.stop_strings(batch[0], settings.wording)))
        if len(answers) != len(batch):
            raise RuntimeError(f"{len(answers)} answers to {len(batch)} prompts")
        return [*asked, *zip(batch, answers, strict=True)]
    # Any error while a model answers is counted as its failure.
    except Exception as error:
        return [*asked, *((problem, _say(error)) for problem in batch)]


def encode_prompt(problem: Problem, tokenizer: Tokenizer, settings: Settings) -> list[int]:
    """Ids of a problem's prompt. Raises `UserError` if it leaves no room for an answer."""
    ids = tokenizer.encode(bench.prompt_text(problem, settings.wording, tokenizer))
    if settings.wording not in bench.CHATS:
        ids = tokenizer.open_text(ids)
    if settings.room is not None and len(ids) > settings.room:
        raise UserError(
            f"{problem.task}: a prompt of {len(ids)} ids, with room for {settings.room}"
        )
    return ids


def run_answer(problem: Problem, answer: str, settings: Settings) -> sandbox.Outcome:
    """Runs an answer's program and the problem's tests; see `sandbox.run`."""
    return sandbox.run(
        bench.program(problem, settings.wording, answer),
        settings.limits,
        tests=problem.checks,
        names=problem.names,
        allow_unsandboxed=settings.allow_unsandboxed,
    )


def judge(asked: Asked, settings: Settings) -> Sample:
    """Makes the sample of an answer: how its program ended, or why there is none."""
    problem, answer = asked
    if isinstance(answer, str):
        return Sample(problem.task, INFERENCE_FAILED, answer, "", "")
    try:
        outcome = run_answer(problem, answer.text, settings)
    except Exception as error:  # the harness itself: out of memory, of descriptors, of disk
        outcome = sandbox.Outcome(sandbox.INFRASTRUCTURE, _say(error))
    return Sample(problem.task, outcome.reason, outcome.error, answer.reason, answer.text)


def _say(error: BaseException) -> str:
    return describe_error(error)[:2000]


class Benchmark(NamedTuple):
    """Problems of one kind, the model that answers them, and how they are run."""

    problems: Sequence[Problem]
    generate: Generate
    settings: Settings


def run_benchmark(
    problems: Sequence[Problem], tokenizer: Tokenizer, generate: Generate, settings: Settings
) -> dict[str, Any]:
    """Generates, runs and counts; JSON-able, `pass_at_k` by k as fractions.

    `mode` is "inference_failed", with the first error as `inference_error`, if no sample was
    generated; pass@k is then 0. Samples that were not generated, and programs that the sandbox
    could not run, are failures of their problems and are also counted separately. Several
    processes share the calls of `generate`, and the programs.
    """
    [figures] = run_benchmarks([Benchmark(problems, generate, settings)], tokenizer)
    return figures


def run_benchmarks(
    benchmarks: Iterable[Benchmark], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Yields each benchmark's figures, in order, once the first answers to the next are written.

    So no device waits for the slowest programs. An error during the next benchmark's answers is
    raised after the figures.
    """
    before: _Running | None = None
    with concurrent.futures.ThreadPoolExecutor(cluster.cores()) as pool:
        try:
            for benchmark in benchmarks:
                running = _Running(benchmark, tokenizer)
                try:
                    running.begin(pool, first=True)
                except BaseException:
                    if before is not None and jax.process_count() == 1:  # others go on
                        yield before.finish()
                    raise
                if before is not None:
                    yield before.finish()
                running.begin(pool)
                before = running
            if before is not None:
                yield before.finish()
        except BaseException:  # waiting programs do not start
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Running:
    """A benchmark whose answers are being written and whose programs run."""

    def __init__(self, benchmark: Benchmark, tokenizer: Tokenizer) -> None:
        self._benchmark, self._tokenizer = benchmark, tokenizer
        problems, _, settings = benchmark
        # All samples of a problem go into one call: a row's place in it decides its draws.
        together = max(1, settings.batch_size // settings.samples)
        calls = [problems[i : i + together] for i in range(0, len(problems), together)]
        self._left = list(cluster.share(calls))
        self._ran: list[list[concurrent.futures.Future[Sample]]] = []

    def begin(self, pool: concurrent.futures.Executor, *, first: bool = False) -> None:
        """Writes the answers of all calls, or of the first, and starts their programs."""
        _, generate, settings = self._benchmark
        count = 1 if first else len(self._left)
        calls, self._left = self._left[:count], self._left[count:]
        for call in calls:
            asked = _ask(call, self._tokenizer, generate, settings)
            self._ran.append([pool.submit(judge, one, settings) for one in asked])

    def finish(self) -> dict[str, Any]:
        """The figures, once all programs have ended."""
        problems, _, settings = self._benchmark
        mine = [[dataclasses.asdict(one.result()) for one in call] for call in self._ran]
        by_call = cluster.collect(f"samples of {problems[0].task}", mine)
        samples = [Sample(**fields) for fields in itertools.chain(*by_call)]
        return summarise(problems, samples, settings)


def summarise(
    problems: Sequence[Problem], samples: Sequence[Sample], settings: Settings
) -> dict[str, Any]:
    """The figures of these samples; see `run_benchmark`."""
    by_task: dict[str, list[Sample]] = {problem.task: [] for problem in problems}
    for sample in samples:
        by_task[sample.task].append(sample)
    correct = [sum(s.reason == sandbox.PASSED for s in ss) for ss in by_task.values()]
    rates = {
        str(k): sum(pass_at_k(settings.samples, c, k) for c in correct) / len(correct)
        for k in settings.ks
    }
    reasons = Counter(sample.reason for sample in samples)
    failed = [sample for sample in samples if sample.reason == INFERENCE_FAILED]
    figures: dict[str, Any] = {
        "mode": INFERENCE_FAILED if len(failed) == len(samples) else INFERENCE,
        "pass_at_k": rates,
        "problems": len(problems),
        "samples": len(samples),
        "wording": settings.wording,
        "reasons": dict(reasons.most_common()),
        "not_generated": len(failed),
        "infrastructure_failures": reasons[sandbox.INFRASTRUCTURE],
        "cut_off": sum(sample.ended == "length" for sample in samples),
    }
    if failed:
        figures["inference_error"] = failed[0].error
    return figures | {"results": [dataclasses.asdict(sample) for sample in samples]}


def draw_anew(of: np.ndarray, against: np.ndarray) -> tuple[float, float]:
    """95% interval of mean(of) - mean(against), each `[seeds, problems]` over equal problems.

    A bootstrap of 10,000 draws: problems jointly for both sides, seeds for each side.
    """
    rng, count = np.random.default_rng(0), of.shape[1]
    problems = rng.multinomial(count, np.full(count, 1 / count), _DRAWS) / count

    def mean(shares: np.ndarray) -> np.ndarray:
        count = len(shares)
        weights = rng.multinomial(count, np.full(count, 1 / count), _DRAWS) / count
        return np.sum(weights @ shares * problems, axis=1)

    low, high = np.quantile(mean(of) - mean(against), [0.025, 0.975])
    return float(low), float(high)
