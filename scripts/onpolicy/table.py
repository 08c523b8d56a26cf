"""Trains one student by several settings for the same seconds, and compares what each has learned.

    python -m scripts.onpolicy.table --models=DIR --prompts=prompts.jsonl \
        --development=development.jsonl --seconds=100 --settings=offline,own --out=OUT

One process, one pair on the devices, setting after setting from the same start; `own:3` is the
setting `own` with seed 3. What counts as a setting's time are the seconds of its steps and of its
rounds of answers, from the first step behind the compiling ones. The rate warms up over 10 steps
and then falls by a cosine of the time to a tenth, so that no schedule needs to know how many steps
there will be. `before` trains nothing. Prints a line and writes OUT/table.json after each setting:
held-out KL, agreement, pass@1 on the development set, and what every round measured.
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
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kdjax.config import Config, validate
from kdjax.data.rollouts import Answer
from kdjax.device import runtime
from kdjax.errors import UserError, reporting
from kdjax.evaluation import passk
from kdjax.evaluation.problems import choose_format, load_humaneval, load_mbpp, prompt_text
from kdjax.formats.files import replacing
from kdjax.models.decoder import Params
from kdjax.models.decoding import Completion, Sampling
from kdjax.models.model import Model, cast_params
from kdjax.training.heldout import held_out
from kdjax.training.hooks import Hook, NonFiniteGuard, StepRecord
from kdjax.training.job import (
    Job,
    build_step,
    make_source,
    prepare_all,
    survey,
    text_source,
)
from kdjax.training.loop import train
from kdjax.training.plan import replace_settings
from kdjax.training.rollouts import AnswerSource, Author
from kdjax.training.saving import Checkpoints
from kdjax.training.step import Step
from scripts.onpolicy.invent import invent
from scripts.onpolicy.prompts import read_benchmark

Fields = Mapping[str, Any]

TEXT: Fields = {"optim.learning_rate": 2e-5}
OWN: Fields = {
    "rollout.share": 1.0,
    "rollout.every": 16,
    "rollout.max_tokens": 384,
    "rollout.prompt_tokens": 512,
    "optim.learning_rate": 1e-5,
    "loss.divergence": "forward_kl",
}
REVERSE: Fields = {"loss.divergence": "reverse_kl"}
BOTH: Fields = {"loss.divergence": "0.5*forward_kl+0.5*reverse_kl"}
BESIDE: Fields = {"rollout.share": 0.5}
# Prompts of --invented, whose answers begin at the function's body.
INVENTED: Fields = OWN | {"rollout.prompts": "invented", "rollout.max_tokens": 192}
SLOW: Fields = {"optim.learning_rate": 5e-6}
FAST: Fields = {"optim.learning_rate": 2e-5}
FASTER: Fields = {"optim.learning_rate": 4e-5}
WIDE: Fields = {"train.batch_size": 64, "train.microbatches": 4, "rollout.every": 4}
TAUGHT = "taught"  # settings of this name learn from answers that the teacher writes
# A setting is its phases: what each changes of the config, and its share of the seconds.
SETTINGS: dict[str, tuple[tuple[Fields, float], ...]] = {
    "before": (),
    "offline": ((TEXT, 1.0),),
    "offline_slow": ((TEXT | {"optim.learning_rate": 1e-5}, 1.0),),
    "offline_fast": ((TEXT | FASTER, 1.0),),
    "ce": ((TEXT | {"loss.alpha": 1.0}, 1.0),),
    "own": ((OWN, 1.0),),
    "own_slow": ((OWN | SLOW, 1.0),),
    "own_fast": ((OWN | FAST, 1.0),),
    "own_wide": ((OWN | WIDE, 1.0),),
    "own_wide_fast": ((OWN | WIDE | FAST, 1.0),),
    "own_reverse": ((OWN | REVERSE, 1.0),),
    "own_both": ((OWN | BOTH, 1.0),),
    "own_jsd": ((OWN | {"loss.divergence": "jsd"}, 1.0),),
    "own_tvd": ((OWN | {"loss.divergence": "total_variation"}, 1.0),),
    "own_short": ((OWN | {"rollout.max_tokens": 128}, 1.0),),
    "own_four": ((OWN | {"rollout.answers": 4}, 1.0),),
    "own_rare": ((OWN | {"rollout.every": 64}, 1.0),),
    "own_ce": ((OWN | {"loss.alpha": 1.0}, 1.0),),
    "beside": ((OWN | BESIDE | FAST, 1.0),),
    "beside_both": ((OWN | BESIDE | BOTH | FAST, 1.0),),
    "beside_invented": ((INVENTED | BESIDE | FAST, 1.0),),
    "invented": ((INVENTED, 1.0),),
    "invented_slow": ((INVENTED | SLOW, 1.0),),
    "invented_both": ((INVENTED | BOTH, 1.0),),
    "then_own": ((TEXT, 0.5), (OWN, 0.5)),
    "then_reverse": ((TEXT, 0.5), (OWN | REVERSE, 0.5)),
    "then_invented": ((TEXT, 0.5), (INVENTED | SLOW, 0.5)),
    "fixed": ((OWN | {"rollout.rounds": 1, "rollout.every": 128}, 1.0),),
    TAUGHT: ((OWN, 1.0),),
    f"{TAUGHT}_ce": ((OWN | {"loss.alpha": 1.0}, 1.0),),
}


def make_config(args: argparse.Namespace, changes: Fields) -> Config:
    """The config of a phase."""
    config = Config()
    config.teacher.path, config.student.path = args.teacher, args.student
    config.data.train, config.data.heldout = args.train, args.heldout
    config.data.seq_len, config.data.cache_dir = args.seq_len, str(args.out / "rows")
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
        known = getattr(getattr(config, section), field)
        setattr(getattr(config, section), field, type(known)(value))
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
        """Of the next step."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(self.spent / self._seconds, 1.0)))
        warm = min((self.steps + 1) / (self._WARMUP + 1), 1.0)
        return self._peak * warm * (self._LEAST + (1 - self._LEAST) * cosine)

    def round_begin(self, step: int, figures: Mapping[str, float]) -> None:
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


def follow(step: Step, clock: Clock) -> Step:
    """The step at the clock's rate."""

    def run(state: Any, teacher: Params, batch: Any) -> Any:
        shardings: Any = step.shardings.opt_state
        rate, held = jax.device_put(np.float32(clock.rate), shardings.rate), state.opt_state
        paced = dataclasses.replace(state, opt_state=held._replace(rate=rate))
        return step.train(paced, teacher, batch)

    followed = copy.copy(step)
    followed.train = run  # type: ignore[assignment]
    return followed


class TeachersAnswers(Author):
    """Writes what the teacher answers, where `Author` has the student's answers."""

    def _complete(self, student: Model, prompts: Any, numbers: Any) -> list[Answer]:
        assert self.teacher is not None
        return super()._complete(self.teacher, prompts, numbers)


class Echo(Hook):
    """One line a round."""

    def round_begin(self, step: int, figures: Mapping[str, float]) -> None:
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
        self._judges = concurrent.futures.ThreadPoolExecutor(8)
        self._steps: dict[tuple[str, float, int], Step] = {}  # by divergence, alpha, microbatches
        sets = {"development": load_humaneval(args.development)}
        if args.final:
            sets = {"humaneval": load_humaneval(args.humaneval)}
            sets |= {"mbpp": load_mbpp(args.mbpp)} if args.mbpp else {}
        self.problems = {name: found[: args.limit or None] for name, found in sets.items()}

    def make_job(self, name: str, seed: int, changes: Fields, folder: Path) -> Job:
        """A job of one phase, with the teacher and the programs that the others had."""
        config = make_config(self._args, changes)
        config.train.seed = seed
        config = replace_settings(config, self._plan.remat, self._plan.chunk_tokens)
        kind, pair = self._plan.kind, self._pair
        rows = prepare_all(config, pair, self._placement)
        loss = config.loss.divergence, config.loss.alpha, config.train.microbatches
        if loss not in self._steps:
            whole = copy.deepcopy(config)
            whole.optim.learning_rate = whole.optim.final_learning_rate = 1.0  # times the clock's
            whole.optim.warmup_steps = 0
            teacher, step, _ = build_step(whole, pair, self._placement, kind, self._teacher)
            assert teacher is not None
            spec = dataclasses.replace(step.spec, tx=pace(step.spec.tx))
            shapes = step.abstract.params
            self._steps[loss] = Step(spec, shapes, self._placement, teacher.params)
            self._teacher = teacher
        step, teacher = self._steps[loss], self._teacher
        source = make_source(config, folder, pair, rows, None, step, teacher)
        if name.startswith(TAUGHT) and isinstance(source, AnswerSource):
            fields = {f.name: getattr(source._author, f.name) for f in dataclasses.fields(Author)}
            source._author = TeachersAnswers(**fields)
        return Job(
            config, folder, pair, rows, teacher, step, kind, lambda _: jnp.ones(()), source, {}
        )

    def invent(self) -> None:
        """Has the teacher write the prompts of `--invented`."""
        args, begun = self._args, time.perf_counter()
        teacher = self.make_job("offline", 0, {}, args.out).teacher
        assert teacher is not None
        sets = (args.development, args.humaneval, args.mbpp)
        known = [entry for path in sets if path for entry in read_benchmark(path)]
        prompts, counts = invent(teacher, self._pair.tokenizer, args.invent, known)
        with replacing(args.invented) as file:
            file.write("".join(json.dumps(prompt) + "\n" for prompt in prompts).encode())
        print(f"invented: {counts} {time.perf_counter() - begun:.1f} s", flush=True)

    def warm(self, settings: Sequence[str]) -> None:
        """Compiles what these settings will run, side by side: one after another takes minutes."""
        names = dict.fromkeys(setting.partition(":")[0] for setting in settings)
        phases = [(name, changes) for name in names for changes, _ in SETTINGS[name]]
        folder = self._args.out / "warm"
        folder.mkdir(parents=True, exist_ok=True)
        base = self.make_job("offline", 0, {}, folder)
        state = base.make_state()
        params = state.params
        loads: dict[Any, Callable[[], Any]] = {"judge": lambda: self._answer(base, params, least=1)}
        for name, changes in phases:
            job = self.make_job(name, 0, changes, folder)
            config, source = job.config, job.source
            loss = config.loss.divergence, config.loss.alpha, config.train.batch_size
            loads[loss] = functools.partial(self._compile_step, job, state)
            if isinstance(source, AnswerSource):
                author, rollout = source._author, config.rollout
                writer = type(author), rollout.max_tokens, rollout.prompts
                loads[writer] = functools.partial(author.write, params, 0, 0)
        with concurrent.futures.ThreadPoolExecutor(len(loads)) as pool:
            for load in [pool.submit(load) for load in loads.values()]:
                load.result()

    def _compile_step(self, job: Job, state: Any) -> None:
        """For the compilation cache; nothing runs, since two steps at once need not fit."""
        batch = job.step.put(text_source(job.config, job.rows, None).next())
        job.step.train.lower(state, job.teacher_params, batch).compile()

    def run(self, setting: str) -> Callable[[], dict[str, Any]]:
        """Trains one setting, `name` or `name:seed`; gives its figures once it is judged."""
        args, begun = self._args, time.perf_counter()
        name, _, seed = setting.partition(":")
        params: Any = None
        figures: dict[str, Any] = {"setting": name, "seed": int(seed or 0), "phases": []}
        for number, (changes, share) in enumerate(SETTINGS[name]):
            folder = args.out / setting.replace(":", "-") / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            job = self.make_job(name, int(seed or 0), changes, folder)
            clock = Clock(share * args.seconds, job.config.optim.learning_rate)
            keeper, step = Keeper(), job.step
            if params is not None:
                start = params
                job.make_state = lambda step=step, start=start: step.init(start)
            job.step = follow(step, clock)
            job.config.eval.rows = (
                1  # the loop's own figures before the first step: nobody reads them
            )
            hooks = [NonFiniteGuard(folder), clock, Echo()]  # a collapse is a result, too
            train(job, keeper, hooks, None)
            params = keeper.params
            figures["phases"].append(
                {
                    "changes": dict(changes),
                    "seconds": clock.spent,
                    "steps": clock.steps,
                    "tokens": clock.tokens,
                    "loss": [clock.losses[0], clock.losses[-1]],
                    "rounds": clock.rounds,
                }
            )
        trained = time.perf_counter()
        job = self.make_job("offline", 0, {}, args.out)
        if params is None:
            params = job.make_state().params
        loss = job.step.spec.head.loss
        batches = job.eval_batches()
        found = held_out(job.step.evaluate, params, job.teacher_params, batches, loss, 0)
        figures["heldout"] = found
        judged = self._judge(job, params)
        walls = {"training_wall": trained - begun, "judging_wall": time.perf_counter() - trained}
        return lambda: figures | walls | {name: judge.result() for name, judge in judged.items()}

    def _answer(
        self,
        job: Job,
        params: Any,
        prompts: Sequence[Sequence[int]] = (),
        stops: tuple[str, ...] = (),
        *,
        least: int = 0,
    ) -> list[Completion]:
        """The student's answers, to be judged; with `least`, ids of all problems, and no more."""
        args, pair, step = self._args, self._pair, job.step
        student = Model(
            step.spec.student,
            step.abstract.params,
            pair.student.spec.vocab_size,
            placement=step.placement,
            own_tokenizer=pair.tokenizer,
        )
        student = student.replace(params=cast_params(student, params))
        sampling = Sampling(
            args.answer_tokens,
            args.temperature,
            stop_ids=pair.tokenizer.stop_ids,
            stop_strings=stops,
        )
        if least:
            form = choose_format("auto", pair.tokenizer)
            found = [problem for problems in self.problems.values() for problem in problems]
            texts = [prompt_text(problem, form, pair.tokenizer) for problem in found]
            prompts = [pair.tokenizer.encode(text) for text in texts] * args.samples
        limits = [least] * len(prompts) if least else None
        return student.generate(list(prompts), sampling, batch_size=args.rows, limits=limits)

    def _judge(self, job: Job, params: Any) -> dict[str, concurrent.futures.Future[dict[str, Any]]]:
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
                        return self._answer(job, params, prompts, stops)
                finally:
                    written.set()

            settings = passk.Settings(
                form=choose_format("auto", tokenizer),
                samples=1 if name == "mbpp" else args.samples,
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

        events = {name: threading.Event() for name in self.problems}
        judged = {name: self._judges.submit(judge, name, event) for name, event in events.items()}
        for name, event in events.items():
            while not event.wait(0.2) and not judged[name].done():
                pass
        return judged


def _line(figures: Mapping[str, Any]) -> str:
    if "error" in figures:
        return f"{figures['setting']:<14} {figures['error']}"
    phases, heldout = figures["phases"], figures["heldout"]
    parts = [
        f"{figures['setting'] + ':' + str(figures['seed']):<14}",
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
    add("--humaneval", type=Path, help="no prompt is like its problems; see --final")
    add("--mbpp", type=Path, help="as --humaneval")
    add("--final", action="store_true", help="judges on these two in place of --development")
    add("--settings", default="before,offline,own")
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
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    settings = args.settings.split(",")
    if unknown := {x.partition(":")[0] for x in settings} - set(SETTINGS):
        raise UserError(f"{', '.join(unknown)}: no setting; known are {', '.join(SETTINGS)}.")
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
    table: list[dict[str, Any]] = []

    def note(name: str, figures: Callable[[], dict[str, Any]]) -> None:
        """Writes a setting down when it is judged."""
        try:
            table.append(figures())
        except Exception as error:  # one setting's end is a figure, not that of the table
            logging.exception("%s ended", name)
            why = f"{type(error).__name__}: {error}"[:600]
            table.append({"setting": name, "error": why})
        print(_line(table[-1]), flush=True)
        with replacing(args.out / "table.json") as file:
            file.write(json.dumps(table, indent=1).encode())

    print(f"loaded after {time.perf_counter() - begun:.0f} s", flush=True)
    bench.warm(settings)
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    with concurrent.futures.ThreadPoolExecutor(1) as clerk:
        for name in settings:
            if time.perf_counter() - begun > args.limit_seconds:
                print(f"{name}: not begun, {args.limit_seconds:.0f} s are over", flush=True)
                continue
            trained: concurrent.futures.Future[Any] = concurrent.futures.Future()
            try:
                trained.set_result(bench.run(name))
            except Exception as error:
                trained.set_exception(error)
            gc.collect()
            clerk.submit(note, name, lambda trained=trained: trained.result()())
    print(f"device: {jax.devices()[0].device_kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
