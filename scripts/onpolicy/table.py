"""Trains one student by several settings for the same seconds, and compares what each has learned.

    python -m scripts.onpolicy.table --models=DIR --prompts=prompts.jsonl \
        --development=development.jsonl --seconds=100 --settings=offline,own --out=OUT

One process, one pair on the devices, setting after setting from the same start. A setting is a name
of `SETTINGS`, the fields of its last phase that differ, and the seed: `own+optim.beta2=0.99:3`.
What counts as a setting's time are the seconds of its steps and of its rounds of answers, from the
first step behind the compiling ones. The rate warms up over 10 steps and then falls by a cosine of
the time to a tenth, so that no schedule needs to know how many steps there will be. `before` trains
nothing. --follow=FILE reads settings from a file that may grow meanwhile, one a line, with its own
seconds and sets of problems if need be (`own:3 120 humaneval,mbpp`), up to a line `end`.
Prints a line and writes OUT/table.json after each setting: held-out KL, agreement, pass@1 on the
sets of problems, and what every round measured. What the table holds already is not run again.
Exit status: 0 done, 2 bad input.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import functools
import gc
import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kdjax.config import Config, count_teacher_positions, flatten, has_hints, validate
from kdjax.data.rollouts import Answer
from kdjax.data.rows import read_same
from kdjax.device import runtime
from kdjax.errors import UserError, reporting
from kdjax.evaluation import passk
from kdjax.evaluation.problems import (
    BENCHMARKS,
    choose_wording,
    load_humaneval,
    prompt_text,
)
from kdjax.formats.files import replacing
from kdjax.models.decoder import DecoderFunctions, Params
from kdjax.models.decoding import Completion, Sampling, complete
from kdjax.models.model import Model, cast_params
from kdjax.training.heldout import held_out
from kdjax.training.hooks import Hook, StepRecord
from kdjax.training.inputs import prepare_all
from kdjax.training.job import (
    Job,
    build_step,
    load_start,
    load_teacher,
    make_source,
    survey,
    text_source,
)
from kdjax.training.loop import train
from kdjax.training.plan import replace_settings
from kdjax.training.rollouts import AnswerSource, Author
from kdjax.training.saving import Checkpoints
from kdjax.training.several import name_arrays
from kdjax.training.step import Step
from kdjax.watch.guards import NonFiniteGuard
from scripts.onpolicy.invent import invent
from scripts.onpolicy.prompts import read_benchmark

Fields = dict[str, Any]

TEXT: Fields = {"optim.learning_rate": 2e-5}
OWN: Fields = {
    "rollout.share": 1.0,
    "rollout.every": 20,  # with 16 rows about 1,000 answers, as many as there are slots
    "rollout.max_tokens": 320,
    "rollout.prompt_tokens": 256,
    "optim.learning_rate": 1e-5,
    "loss.divergence": "reverse_kl",
}
WIDE: Fields = {"train.batch_size": 48, "train.microbatches": 3, "rollout.every": 6}
# Prompts of --invented, whose answers begin at the function's body.
INVENTED: Fields = {
    "rollout.prompts": "invented",
    "rollout.max_tokens": 192,
    "rollout.prompt_tokens": 384,
    "rollout.every": 24,
}
BESIDE: Fields = {"rollout.share": 0.5, "rollout.every": 40, "optim.learning_rate": 2e-5}
_SLOTS = 256  # of a call that judges a multiple
TAUGHT = "taught"  # settings of this name learn from answers that the teacher writes
# A setting is its phases: what each changes of the config, and its share of the seconds.
SETTINGS: dict[str, tuple[tuple[Fields, float], ...]] = {
    "before": (),
    "offline": ((TEXT, 1.0),),
    "ce": ((TEXT | {"loss.alpha": 1.0}, 1.0),),
    "own": ((OWN, 1.0),),
    "own_wide": ((OWN | WIDE, 1.0),),
    "own_ce": ((OWN | {"loss.alpha": 1.0}, 1.0),),
    "beside": ((OWN | BESIDE, 1.0),),
    "invented": ((OWN | INVENTED, 1.0),),
    "then_own": ((TEXT, 0.5), (OWN, 0.5)),
    "late_own": ((TEXT, 0.7), (OWN, 0.3)),
    "then_invented": ((TEXT, 0.5), (OWN | INVENTED, 0.5)),
    TAUGHT: ((OWN | {"loss.divergence": "forward_kl"}, 1.0),),
    f"{TAUGHT}_ce": ((OWN | {"loss.alpha": 1.0}, 1.0),),
}


class Setting(NamedTuple):
    """One line of the table to come."""

    name: str  # with the fields that differ
    seed: int
    seconds: float
    sets: tuple[str, ...]  # of problems

    @classmethod
    def read(cls, line: str, seconds: float, sets: Sequence[str]) -> "Setting":
        """Reads `NAME[+FIELD=VALUE ...][:SEED] [SECONDS [SETS]]`; raises `UserError` otherwise."""
        try:
            asked, *more = line.split()
            found = re.fullmatch(r"(.+?)(?::(\d+))?", asked)
            assert found is not None
            setting = cls(
                found[1],
                int(found[2] or 0),
                float(more[0]) if more else seconds,
                tuple(more[1].split(",")) if more[1:] else tuple(sets),
            )
            setting.phases()
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{line!r}: found no setting ({error}); expected NAME[+FIELD=VALUE][:SEED] "
                f"[SECONDS [SETS]] with a name of {', '.join(SETTINGS)}."
            ) from None
        return setting

    def phases(self) -> list[tuple[Fields, float]]:
        """Each phase's changes of the config, and its share of the seconds."""
        base, *others = re.split(r"\+(?=\w+\.\w+=)", self.name)  # a mixture has a plus, too
        phases = list(SETTINGS[base])
        changes: Fields = dict(part.split("=", 1) for part in others)
        return [*phases[:-1], *((fields | changes, share) for fields, share in phases[-1:])]

    @property
    def label(self) -> str:
        return f"{self.name}:{self.seed}"


def make_config(args: argparse.Namespace, changes: Fields) -> Config:
    """The config of a phase."""
    config = Config()
    config.teacher.path, config.student.path = args.teacher, args.student
    config.data.train, config.data.heldout = args.train, args.heldout
    config.data.seq_len, config.data.cache_dir = args.seq_len, str(args.cache or args.out / "rows")
    config.loss.temperature, config.loss.alpha = 1.0, 0.0
    config.train.steps, config.train.batch_size = 10**6, args.batch_size
    config.eval.every = config.checkpoint.every = config.eval.samples = 0
    config.rollout.batch_size = args.rows
    if any(name.startswith("rollout.") for name in changes):
        config.rollout.prompts = args.prompts
    overrides = [part.split("=", 1) for part in args.set]
    for name, value in [*changes.items(), *overrides]:
        section, field = name.split(".")
        value = str(args.invented) if value == "invented" else value
        known = type(getattr(getattr(config, section), field))
        whole = known in (int, float) and isinstance(value, str)
        setattr(getattr(config, section), field, known(float(value) if whole else value))
    validate(config)
    return config


class Clock(Hook):
    """Counts a phase's seconds and stops it when they are over; keeps the figures of rounds."""

    _COMPILING = 2  # steps at the beginning that are not counted
    _WARMUP, _LEAST = 10, 0.1  # steps; share of the rate that is left at the end

    def __init__(self, seconds: float, peak: float):
        self._seconds, self._peak = seconds, peak
        self.spent, self.steps, self.tokens = 0.0, 0, 0.0
        self.rounds: list[dict[str, float]] = []
        self.losses: list[float] = []

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(self.spent / self._seconds, 1.0)))
        warm = min((self.steps + 1) / (self._WARMUP + 1), 1.0)
        return self._peak * warm * (self._LEAST + (1 - self._LEAST) * cosine)

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        if self.rounds:  # the first compiles; its time is taken to be that of the second
            self.spent += figures["seconds"] * (2 if len(self.rounds) == 1 else 1)
        self.rounds.append({"step": step, **figures})

    def step_end(self, record: StepRecord) -> bool:
        self.steps, self.tokens = record.step, self.tokens + record.figures["tokens"]
        if self.steps > self._COMPILING:
            # Those that compiled did work, too.
            self.spent += record.seconds * (3 if self.steps == self._COMPILING + 1 else 1)
        self.losses.append(record.figures["loss"])
        return self.spent >= self._seconds


class Paced(NamedTuple):
    """State of an optimizer whose rate is an array, so that one program serves all rates."""

    inner: Any
    rate: Any


def pace(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` times `Paced.rate`."""

    def init(params: Any) -> Paced:
        return Paced(tx.init(params), jnp.zeros((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Paced]:
        updates, inner = tx.update(updates, state.inner, params)
        updates = jax.tree.map(lambda x: x * state.rate, updates)
        return updates, Paced(inner, state.rate)

    return optax.GradientTransformation(init, update)


def follow(step: Step, clock: Clock, evaluate: Any) -> Step:
    """The step at the clock's rate; it evaluates by a program that is compiled."""

    def run(state: Any, teacher: Params, batch: Any) -> Any:
        shardings: Any = step.shardings.opt_state
        rate, held = jax.device_put(np.float32(clock.rate), shardings.rate), state.opt_state
        paced = dataclasses.replace(state, opt_state=held._replace(rate=rate))
        return step.train(paced, teacher, batch)

    followed = copy.copy(step)
    followed.train, followed.sum_evaluation = run, evaluate  # type: ignore[assignment]
    return followed


class TeachersAnswers(Author):
    """Writes what the teacher answers, where `Author` has the student's answers."""

    def _complete(self, student: Model, prompts: Any, numbers: Any) -> list[Answer]:
        assert self.teacher is not None
        return super()._complete(self.teacher, prompts, numbers)


class Echo(Hook):
    """One line a round."""

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        print(
            f"  step {step}: " + "  ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True
        )


class Keeper(Checkpoints):
    """In place of checkpoints: holds the last parameters and writes nothing."""

    def __init__(self) -> None:
        self.params: Any = None

    def latest(self) -> None:
        return None

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        self.params = state.params

    def raise_failed(self) -> None:
        """Nothing fails."""


class Bench:
    """A pair on the devices, and problems to judge a student by."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._placement, self._pair, self._plan = survey(make_config(args, {}))
        self._teacher: Model | None = None
        self._start: Model | None = None  # the student's, for settings with loss.beyond
        self._judges = concurrent.futures.ThreadPoolExecutor(8)
        self._steps: dict[tuple[Any, ...], Step] = {}  # by the fields that decide the program
        loads = {"development": load_humaneval} | BENCHMARKS
        paths = {name: getattr(args, name) for name in loads}
        self.problems = {
            name: load(paths[name])[: args.limit or None]
            for name, load in loads.items()
            if paths[name]
        }

    def make_job(self, name: str, seed: int, changes: Fields, folder: Path) -> Job:
        """A job of one phase, with the teacher and the programs that the others had."""
        config = make_config(self._args, changes)
        config.train.seed = seed
        config = replace_settings(config, self._plan.remat, self._plan.chunk_tokens)
        kind, pair = self._plan.kind, self._pair
        rows = prepare_all(config, pair, self._placement)
        fields = _program_fields(config)
        if fields not in self._steps:
            whole = copy.deepcopy(config)
            whole.optim.learning_rate = whole.optim.final_learning_rate = 1.0  # times the clock's
            whole.optim.warmup_steps = 0
            place = self._placement
            self._teacher = self._teacher or load_teacher(whole, pair, kind, place)
            teacher = self._teacher
            assert teacher is not None
            self._start = self._start or load_start(whole, pair, kind, place, teacher)
            start = None if whole.loss.beyond == 1 else self._start
            _, step, _ = build_step(whole, pair, place, kind, teacher, start=start)
            spec = dataclasses.replace(step.spec, tx=pace(step.spec.tx))
            arrays = name_arrays([teacher.params, start.params]) if start else teacher.params
            self._steps[fields] = Step(spec, step.abstract.params, place, arrays)
        step, teacher = self._steps[fields], self._teacher
        source = make_source(config, folder, pair, rows, None, step, teacher)
        if name.startswith(TAUGHT) and isinstance(source, AnswerSource):
            fields = {f.name: getattr(source._author, f.name) for f in dataclasses.fields(Author)}
            source._author = TeachersAnswers(**fields)
        start = None if config.loss.beyond == 1 else self._start
        rate: optax.Schedule = lambda _: jnp.ones(())  # noqa: E731
        return Job(config, folder, pair, rows, teacher, step, kind, rate, source, {}, start=start)

    def invent(self) -> None:
        """Has the teacher write the prompts of `--invented`."""
        args, begun = self._args, time.perf_counter()
        teacher = self.make_job("offline", 0, {}, args.out).teacher
        assert teacher is not None
        sets = (args.development, args.humaneval, args.mbpp)  # no exercise is like one of theirs
        known = [entry for path in sets if path for entry in read_benchmark(path)]
        prompts, counts = invent(teacher, self._pair.tokenizer, args.invent, known)
        with replacing(args.invented) as file:
            file.write("".join(json.dumps(prompt) + "\n" for prompt in prompts).encode())
        print(f"invented: {counts} {time.perf_counter() - begun:.1f} s", flush=True)

    def warm(self, settings: Sequence[Setting]) -> None:
        """Compiles what these settings will run: the steps side by side, then the rest in turn.

        What runs must not run beside other programs: from several threads at once CUDA graphs were
        captured wrongly (jax 0.11.2), and one process died.
        """
        folder, begun = self._args.out / "warm", time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        base = self.make_job("offline", 0, {}, folder)
        state = base.make_state()
        params = state.params
        steps: dict[Any, Callable[[], Any]] = {}
        runs: dict[Any, Callable[[], Any]] = {
            name: functools.partial(self._answer, base, params, name)
            for name in dict.fromkeys(name for setting in settings for name in setting.sets)
        }
        runs["held-out"] = functools.partial(self._look, base, params)
        for setting in settings:
            for changes, _ in setting.phases():
                try:
                    job = self.make_job(setting.name, 0, changes, folder)
                except Exception:  # the setting will say so itself
                    logging.exception("%s was not compiled", setting.name)
                    continue
                config, source = job.config, job.source
                steps[_program_fields(config)] = functools.partial(self._compile_step, job, state)
                if isinstance(source, AnswerSource):
                    author, rollout = source._author, config.rollout
                    room = rollout.max_tokens, rollout.prompt_tokens, rollout.temperature
                    runs[type(author), *room] = functools.partial(author.write, params, 0, 0)

        def tell(name: Any, load: Callable[[], Any]) -> None:
            try:
                load()
            except Exception:
                logging.exception("%s was not compiled", name)
            print(f"  after {time.perf_counter() - begun:.0f} s: {name}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(len(steps) or 1) as pool:
            list(pool.map(tell, steps, steps.values()))
        for name, load in runs.items():
            tell(name, load)

    def _look(self, job: Job, params: Any) -> dict[str, float]:
        """The held-out figures."""
        batches, loss = job.eval_batches(), job.step.spec.head.loss
        return held_out(job.step.sum_evaluation, params, job.teacher_params, batches, loss, 0)

    def _compile_step(self, job: Job, state: Any) -> None:
        """For the compilation cache; nothing runs, since two steps at once need not fit."""
        columns = text_source(job.config, job.rows, None).next()
        if has_hints(job.config):
            columns |= read_same(columns, count_teacher_positions(job.config))
        batch = job.step.put(columns)
        job.step.train.lower(state, job.teacher_params, batch).compile()

    def run(self, setting: Setting) -> Callable[[], dict[str, Any]]:
        """Trains one setting; gives its figures once it is judged."""
        args, begun = self._args, time.perf_counter()
        params: Any = None
        figures: dict[str, Any] = {"setting": setting.name, "seed": setting.seed, "phases": []}
        base = self.make_job("offline", 0, {}, args.out)
        for number, (changes, share) in enumerate(setting.phases()):
            folder = args.out / setting.label.replace("/", "_") / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            job = self.make_job(setting.name, setting.seed, changes, folder)
            clock = Clock(share * setting.seconds, job.config.optim.learning_rate)
            keeper, step = Keeper(), job.step
            if params is not None:
                start = params
                job.make_state = lambda step=step, start=start: step.init(start)
            job.step = follow(step, clock, base.step.sum_evaluation)
            job.config.eval.rows = 1  # the figures before the first step: nobody reads them
            hooks = [NonFiniteGuard(folder), clock, Echo()]  # a collapse is a result, too
            train(job, keeper, hooks, None)
            params = keeper.params
            figures["phases"].append(
                {
                    "changes": dict(changes),
                    "seconds": clock.spent,
                    "steps": clock.steps,
                    "tokens": clock.tokens,
                    "loss": _tenths(clock.losses),
                    "rounds": clock.rounds,
                }
            )
        trained = time.perf_counter()
        if params is None:
            params = base.make_state().params
        figures["heldout"] = self._look(base, params)
        judged = self._judge(base, params, setting.sets)
        walls = {"training_wall": trained - begun, "judging_wall": time.perf_counter() - trained}
        return lambda: figures | walls | {name: judge.result() for name, judge in judged.items()}

    def _answer(
        self,
        job: Job,
        params: Any,
        name: str,
        prompts: Sequence[Sequence[int]] = (),
        stops: tuple[str, ...] = (),
    ) -> list[Completion]:
        """The student's answers to problems `name`; without prompts, a few ids of each program."""
        args, pair, step = self._args, self._pair, job.step
        student = Model(
            step.spec.student,
            step.abstract.params,
            pair.student.spec.vocab_size,
            placement=step.placement,
            own_tokenizer=pair.tokenizer,
        )
        student = student.replace(params=cast_params(student, params))
        assert isinstance(student.functions, DecoderFunctions)
        sampling = Sampling(
            args.answer_tokens,
            args.temperature,
            stop_ids=pair.tokenizer.stop_ids,
            stop_strings=stops,
        )
        limits = None
        if not prompts:
            prompts = self._prompts[name] * self._samples(name)
            # Some rows last until the slots are fewer.
            limits = [min(args.answer_tokens, 40 if i < 8 else 1) for i in range(len(prompts))]
        # Sets share their programs, but for one with a prompt that is longer than a row.
        lengths = [len(prompt) for found in self._prompts.values() for prompt in found]
        longest = max((n for n in lengths if n <= args.seq_len), default=0)
        with student.precision():
            return complete(
                student.functions,
                student.params,
                prompts,
                sampling,
                real=student.real_vocab,
                spread=student.spread,
                tokenizer=pair.tokenizer,
                limits=limits,
                batch_size=min(args.rows, -(-len(prompts) // _SLOTS) * _SLOTS),
                room=longest + args.answer_tokens,
            )

    def _samples(self, name: str) -> int:
        return 1 if name == "mbpp" else self._args.samples

    @functools.cached_property
    def _prompts(self) -> dict[str, list[list[int]]]:
        """The prompts of each set of problems."""
        tokenizer = self._pair.tokenizer
        wording = choose_wording("auto", tokenizer)
        return {
            name: [tokenizer.encode(prompt_text(problem, wording, tokenizer)) for problem in found]
            for name, found in self.problems.items()
        }

    def _judge(
        self, job: Job, params: Any, sets: Sequence[str]
    ) -> dict[str, concurrent.futures.Future[dict[str, Any]]]:
        """pass@1 of each set of problems, and which samples passed, in order.

        The answers are written when this returns; their programs, one of which may take 15 seconds,
        run on.
        """
        args, tokenizer, turn = self._args, self._pair.tokenizer, threading.Lock()

        def judge(name: str, written: threading.Event) -> dict[str, Any]:
            problems = self.problems[name]

            def generate(prompts: list[list[int]], stops: tuple[str, ...]) -> list[Completion]:
                try:
                    with turn:
                        return self._answer(job, params, name, prompts, stops)
                finally:
                    written.set()

            settings = passk.Settings(
                wording=choose_wording("auto", tokenizer),
                samples=self._samples(name),
                batch_size=10**6,  # all in one call: the engine fills its slots by itself
                allow_unsandboxed=args.allow_unsandboxed,
            )
            result = passk.run_benchmark(problems, tokenizer, generate, settings)
            return {
                "pass_at_1": result["pass_at_k"]["1"],
                "problems": len(problems),
                "cut_off": result["cut_off"],
                "reasons": result["reasons"],
                "passed": "".join("01"[r["reason"] == "passed"] for r in result["results"]),
            }

        events = {name: threading.Event() for name in sets}
        judged = {name: self._judges.submit(judge, name, event) for name, event in events.items()}
        for name, event in events.items():
            while not event.wait(0.2) and not judged[name].done():
                pass
        return judged


def _program_fields(config: Config) -> tuple[Any, ...]:
    """Key that two configs share whose steps are one program."""
    fields = flatten(config)
    rates = ("optim.learning_rate", "optim.final_learning_rate", "optim.warmup_steps")
    kept = [n for n in fields if n.startswith(("loss.", "optim.")) and n not in rates]
    shape = config.train.batch_size, config.train.microbatches, config.data.seq_len
    return *shape, count_teacher_positions(config), *(fields[name] for name in kept)


def _tenths(losses: Sequence[float]) -> list[float]:
    """Means of the losses over each tenth of the steps."""
    return [float(np.mean(part)) for part in np.array_split(losses, 10) if len(part)]


def _line(figures: Mapping[str, Any]) -> str:
    if "error" in figures:
        return f"{figures['setting']}:{figures['seed']}  {figures['error']}"
    phases, heldout = figures["phases"], figures["heldout"]
    parts = [
        f"{figures['setting']}:{figures['seed']}",
        f"{sum(p['seconds'] for p in phases):6.1f} s",
        f"{sum(p['steps'] for p in phases):5} steps",
        f"{sum(p['tokens'] for p in phases) / 1e6:6.2f} M",
        f"kl {heldout['kl']:.4f} agreement {heldout['agreement']:.4f}",
    ]
    for name in ("development", "humaneval", "mbpp"):
        if name in figures:
            parts.append(f"{name} {figures[name]['pass_at_1']:.4f}")
    rounds = [r for p in phases for r in p["rounds"]]
    if rounds:
        first, last = rounds[0], rounds[-1]
        parts += [f"{k} {first[k]:.3g}>{last[k]:.3g}" for k in ("divergence", "length", "padding")]
    return "  ".join([*parts, f"wall {figures['training_wall']:.0f}+{figures['judging_wall']:.0f}"])


class Queue:
    """The settings that are asked for, in order; those of a file as it grows."""

    _END = "end"

    def __init__(self, args: argparse.Namespace):
        self._file, self._asked = args.follow, args.settings.split(",")
        self._defaults = args.seconds, args.sets.split(",")

    def _lines(self) -> list[str]:
        if not self._file:
            return [*self._asked, self._END]
        whole = self._file.read_text().split("\n")[:-1]  # the last line may be under way
        return [line.strip() for line in whole if line.strip() and not line.startswith("#")]

    def _read(self, line: str) -> Setting | None:
        try:
            return Setting.read(line, *self._defaults)
        except UserError as error:
            if not self._file:
                raise
            print(error, flush=True)  # others may follow
            return None

    def read(self) -> list[Setting]:
        """Settings that were asked for so far."""
        found = [self._read(line) for line in self._lines() if line != self._END]
        return [setting for setting in found if setting]

    def __iter__(self) -> Iterator[Setting]:
        place = 0
        while True:
            lines = self._lines()[place:]
            if not lines:
                time.sleep(0.5)
            elif lines[0] == self._END:
                return
            else:
                place += 1
                setting = self._read(lines[0])
                if setting:
                    yield setting


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts.onpolicy.table", description=__doc__)
    add = parser.add_argument
    add("--models", type=Path, help="folder of the published pair's two GGUF files")
    add("--teacher", default="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
    add("--student", default="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
    add("--train", default="python:stdlib,jax,flax,transformers", help="text of the offline runs")
    add("--heldout", default="python:optax,orbax")
    add("--prompts", required=True)
    add("--invented", type=Path, help="prompts of the settings that are named after it")
    add("--invent", type=int, default=0, help="requests to the teacher that make --invented first")
    add("--development", type=Path, required=True)
    add("--humaneval", type=Path, help="no prompt is like its problems; see --sets")
    add("--mbpp", type=Path, help="as --humaneval")
    add("--sets", default="development", help="development, humaneval, mbpp: what judges")
    add("--settings", default="before,offline,own")
    add("--follow", type=Path, help="a file of settings, in place of --settings")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="of every setting")
    add("--seconds", type=float, default=100.0, help="of steps and rounds, a setting")
    add("--limit-seconds", type=float, default=1e9, help="no setting begins after so many")
    add("--seq-len", type=int, default=1024)
    add("--batch-size", type=int, default=16)
    add("--rows", type=int, default=1024, help="answers written at a time")
    add("--answer-tokens", type=int, default=512, help="of an answer that is judged")
    add("--samples", type=int, default=5, help="of MBPP's problems, of which there are more, 1")
    add("--temperature", type=float, default=0.2)
    add("--limit", type=int, default=0, help="problems of each set; 0: all")
    add("--allow-unsandboxed", action="store_true")
    add("--cache", type=Path, help="of rows; default: in --out")
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    queue = Queue(args)
    queue.read()
    if args.models:
        args.teacher, args.student = (str(args.models / x) for x in (args.teacher, args.student))
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    runtime.open_devices(runtime.configure(), suits_cpu=True)
    begun, bench = time.perf_counter(), Bench(args)
    if args.invent:
        try:
            bench.invent()
        except Exception:  # the other settings go without
            logging.exception("nothing was invented")
    book = args.out / "table.json"
    table: list[dict[str, Any]] = json.loads(book.read_text()) if book.exists() else []
    held = {f"{row['setting']}:{row['seed']}" for row in table if "error" not in row}

    def note(setting: Setting, figures: Callable[[], dict[str, Any]]) -> None:
        """Writes a setting down when it is judged."""
        try:
            table.append(figures())
        except Exception as error:  # one setting's end is a figure, not that of the table
            logging.exception("%s ended", setting.label)
            why = f"{type(error).__name__}: {error}"[:600]
            table.append({"setting": setting.name, "seed": setting.seed, "error": why})
        print(_line(table[-1]), flush=True)
        with replacing(book) as file:
            file.write(json.dumps(table, indent=1).encode())

    print(f"loaded after {time.perf_counter() - begun:.0f} s", flush=True)
    bench.warm([setting for setting in queue.read() if setting.label not in held])
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    with concurrent.futures.ThreadPoolExecutor(1) as clerk:
        for setting in queue:
            if setting.label in held:
                continue
            if time.perf_counter() - begun > args.limit_seconds:
                print(f"{setting.label}: not begun, its time is over", flush=True)
                break
            print(f"{setting.label} after {time.perf_counter() - begun:.0f} s", flush=True)
            trained: concurrent.futures.Future[Any] = concurrent.futures.Future()
            try:
                trained.set_result(bench.run(setting))
            except Exception as error:
                trained.set_exception(error)
            gc.collect()
            clerk.submit(note, setting, lambda trained=trained: trained.result()())
    print(f"device: {jax.devices()[0].device_kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
