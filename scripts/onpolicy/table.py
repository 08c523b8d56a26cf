"""Trains one student by several settings for the same seconds, and compares what each has learned.

    python -m scripts.onpolicy.table --models=DIR --prompts=prompts.jsonl \
        --development=development.jsonl --seconds=100 --settings=offline,reverse --out=OUT

One process, one pair on the devices, setting after setting from the same start. What counts as a
setting's time are the seconds of its steps and of its rounds of answers, from the first step behind
the compiling ones; the rate is constant after the warmup, so that no schedule needs to know when
the time is over. `before` trains nothing. Prints a line and writes OUT/table.json after each
setting: held-out KL, agreement, pass@1 on the development set, and what every round measured.
Exit status: 0 done, 2 bad input.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kdjax.config import Config, validate
from kdjax.device import runtime
from kdjax.errors import UserError, reporting
from kdjax.evaluation import passk
from kdjax.evaluation.problems import choose_format, load_humaneval, load_mbpp
from kdjax.formats.files import replacing
from kdjax.models.decoding import Sampling
from kdjax.models.model import Model, cast_params
from kdjax.training.heldout import held_out
from kdjax.training.hooks import Action, CollapseGuard, Hook, NonFiniteGuard, StepRecord
from kdjax.training.job import Job, build_step, make_source, prepare_all, survey
from kdjax.training.loop import train
from kdjax.training.plan import replace_settings

Fields = Mapping[str, Any]

OWN: Fields = {"rollout.share": 1.0, "loss.divergence": "reverse_kl"}
MIXED: Fields = OWN | {"loss.divergence": "0.5*forward_kl+0.5*reverse_kl"}
# A setting is its phases: what each changes of the config, and its share of the seconds.
SETTINGS: dict[str, tuple[tuple[Fields, float], ...]] = {
    "before": (),
    "offline": (({}, 1.0),),
    "ce": (({"loss.alpha": 1.0}, 1.0),),
    "reverse": ((OWN, 1.0),),
    "forward": ((OWN | {"loss.divergence": "forward_kl"}, 1.0),),
    "mixed": ((MIXED, 1.0),),
    "jsd": ((OWN | {"loss.divergence": "jsd"}, 1.0),),
    "tvd": ((OWN | {"loss.divergence": "total_variation"}, 1.0),),
    "fast": ((MIXED | {"optim.learning_rate": 2e-5}, 1.0),),
    "short": ((MIXED | {"rollout.max_tokens": 128}, 1.0),),
    "long": ((MIXED | {"rollout.max_tokens": 512}, 1.0),),
    "four": ((MIXED | {"rollout.answers": 4}, 1.0),),
    "beside": ((MIXED | {"rollout.share": 0.5}, 1.0),),
    "rare": ((MIXED | {"rollout.every": 32}, 1.0),),
    "fixed": ((MIXED | {"rollout.rounds": 1, "rollout.every": 48}, 1.0),),
    "own_ce": ((OWN | {"loss.alpha": 1.0}, 1.0),),
    "then_reverse": (({}, 0.5), (OWN, 0.5)),
    "then_mixed": (({}, 0.5), (MIXED, 0.5)),
}


def make_config(args: argparse.Namespace, changes: Fields) -> Config:
    """The config of a phase."""
    config = Config()
    config.teacher.path, config.student.path = args.teacher, args.student
    config.data.train, config.data.heldout = args.train, args.heldout
    config.data.seq_len, config.data.cache_dir = args.seq_len, str(args.out / "rows")
    config.loss.temperature, config.loss.alpha = 1.0, 0.0
    config.optim.learning_rate, config.optim.warmup_steps = 1e-5, 10
    config.train.steps, config.train.batch_size = 10**6, args.batch_size
    config.train.seed = args.seed
    config.eval.every = config.checkpoint.every = config.eval.samples = 0
    config.rollout.max_tokens, config.rollout.batch_size = args.max_tokens, args.rows
    if any(name.startswith("rollout.") for name in changes):
        config.rollout.prompts = args.prompts
    overrides = [part.split("=", 1) for part in args.set]
    for name, value in [*overrides, *changes.items()]:
        section, field = name.split(".")
        known = getattr(getattr(config, section), field)
        setattr(getattr(config, section), field, type(known)(value))
    config.optim.final_learning_rate = config.optim.learning_rate
    validate(config)
    return config


class Clock(Hook):
    """Counts a phase's seconds and stops it when they are over; keeps the figures of rounds."""

    _COMPILING = 2  # steps at the beginning that are not counted

    def __init__(self, seconds: float):
        self._seconds, self.spent, self.steps, self.tokens = seconds, 0.0, 0, 0.0
        self._seen = 0
        self.rounds: list[dict[str, float]] = []
        self.losses: list[float] = []

    def round_begin(self, step: int, figures: Mapping[str, float]) -> None:
        if self.rounds:  # the first compiles; its time is taken to be that of the second
            self.spent += figures["seconds"] * (2 if len(self.rounds) == 1 else 1)
        self.rounds.append({"step": step, **figures})

    def step_end(self, record: StepRecord) -> Action:
        self._seen += 1
        if self._seen > self._COMPILING:
            # Those that compiled did work, too.
            self.spent += record.seconds * (3 if self._seen == self._COMPILING + 1 else 1)
        self.steps, self.tokens = record.step, self.tokens + record.figures["tokens"]
        self.losses.append(record.figures["loss"])
        return Action.STOP if self.spent >= self._seconds else Action.CONTINUE


class Echo(Hook):
    """One line a round."""

    def round_begin(self, step: int, figures: Mapping[str, float]) -> None:
        print(
            f"  step {step}: " + "  ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True
        )


class Keeper:
    """In place of checkpoints: holds the last parameters and writes nothing."""

    params: Any = None

    def latest(self) -> None:
        return None

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        self.params = state.params

    def raise_failed(self) -> None:
        """Nothing fails."""


@dataclasses.dataclass
class Started(Job):
    """A job that begins with these parameters."""

    params: Any = None

    def make_state(self) -> Any:
        return super().make_state() if self.params is None else self.step.init(self.params)


class Bench:
    """A pair on the devices, and problems to judge a student by."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._placement, self._pair, self._plan = survey(make_config(args, {}))
        self._teacher: Model | None = None
        self.problems = {"development": load_humaneval(args.development)[: args.limit or None]}
        if args.humaneval:
            self.problems["humaneval"] = load_humaneval(args.humaneval)[: args.limit or None]
        if args.mbpp:
            self.problems["mbpp"] = load_mbpp(args.mbpp)[: args.limit or None]

    def make_job(self, changes: Fields, params: Any, folder: Path) -> Started:
        """A job of one phase, with the teacher that the others had."""
        config = make_config(self._args, changes)
        config = replace_settings(config, self._plan.remat, self._plan.chunk_tokens)
        kind, pair = self._plan.kind, self._pair
        rows = prepare_all(config, pair, self._placement)
        teacher, step, schedule = build_step(config, pair, self._placement, kind, self._teacher)
        self._teacher = teacher
        source = make_source(config, folder, pair, rows, None, step, teacher)
        return Started(
            config, folder, pair, rows, teacher, step, kind, schedule, source, {}, params=params
        )

    def run(self, name: str) -> dict[str, Any]:
        """Trains and judges one setting."""
        args, begun = self._args, time.perf_counter()
        params: Any = None
        figures: dict[str, Any] = {"setting": name, "phases": []}
        for number, (changes, share) in enumerate(SETTINGS[name]):
            folder = args.out / name / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            job = self.make_job(changes, params, folder)
            clock, keeper = Clock(share * args.seconds), Keeper()
            rollout = job.config.rollout
            guard = CollapseGuard(folder, rollout.every, rollout.stop_growth)
            hooks = [NonFiniteGuard(folder), clock, Echo(), guard]
            try:
                train(job, keeper, hooks, None)  # type: ignore[arg-type]
            except Exception as error:  # one setting's end is a figure, not that of the table
                figures["error"] = f"{type(error).__name__}: {error}"[:600]
                return figures
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
        job = self.make_job({}, params, args.out)
        if params is None:
            params = job.make_state().params
        figures["heldout"] = held_out(
            job.step.evaluate,
            params,
            job.teacher_params,
            job.eval_batches(),
            job.step.spec.head.loss,
            0,
        )
        figures |= self._judge(job, params)
        now = time.perf_counter()
        return figures | {"training_wall": trained - begun, "judging_wall": now - trained}

    def _judge(self, job: Job, params: Any) -> dict[str, Any]:
        """pass@1 of each set of problems, and which samples passed, in order."""
        args, pair, step = self._args, self._pair, job.step
        student = Model(
            step.spec.student,
            step.abstract.params,
            pair.student.spec.vocab_size,
            placement=step.placement,
            own_tokenizer=pair.tokenizer,
        )
        student = student.replace(params=cast_params(student, params))
        tokenizer = pair.tokenizer
        settings = passk.Settings(
            form=choose_format("auto", tokenizer),
            samples=args.samples,
            batch_size=args.rows,
            allow_unsandboxed=args.allow_unsandboxed,
        )

        def generate(prompts: list[list[int]], stops: tuple[str, ...]) -> list[passk.Answer]:
            sampling = Sampling(
                args.answer_tokens,
                args.temperature if args.samples > 1 else 0.0,
                stop_ids=tokenizer.stop_ids,
                stop_strings=stops,
            )
            completions = student.generate(prompts, sampling, batch_size=args.rows)
            return [(c.text, c.reason) for c in completions]

        found = {}
        for name, problems in self.problems.items():
            result = passk.run_benchmark(problems, tokenizer, generate, settings)
            passed = "".join("01"[r["reason"] == "passed"] for r in result["results"])
            found[name] = {
                "pass_at_1": result["pass_at_k"]["1"],
                "problems": len(problems),
                "cut_off": result["cut_off"],
                "reasons": result["reasons"],
                "passed": passed,
            }
        return found


def _line(figures: Mapping[str, Any]) -> str:
    if "error" in figures:
        return f"{figures['setting']:<14} {figures['error']}"
    phases, heldout = figures["phases"], figures["heldout"]
    parts = [
        f"{figures['setting']:<14}",
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
    add("--development", type=Path, required=True)
    add("--humaneval", type=Path, help="at the end, once")
    add("--mbpp", type=Path, help="at the end, once")
    add("--settings", default="before,offline,reverse")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="of every setting")
    add("--seconds", type=float, default=100.0, help="of steps and rounds, a setting")
    add("--limit-seconds", type=float, default=1e9, help="no setting begins after so many")
    add("--seq-len", type=int, default=1024)
    add("--batch-size", type=int, default=32)
    add("--max-tokens", type=int, default=320, help="of an own answer")
    add("--rows", type=int, default=512, help="answers written at a time")
    add("--answer-tokens", type=int, default=512, help="of an answer that is judged")
    add("--samples", type=int, default=5)
    add("--temperature", type=float, default=0.2)
    add("--limit", type=int, default=0, help="problems of each set; 0: all")
    add("--seed", type=int, default=0)
    add("--allow-unsandboxed", action="store_true")
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if unknown := set(args.settings.split(",")) - set(SETTINGS):
        raise UserError(f"{', '.join(unknown)}: no setting; known are {', '.join(SETTINGS)}.")
    if args.models:
        args.teacher, args.student = (str(args.models / x) for x in (args.teacher, args.student))
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    runtime.open_devices(runtime.configure(), suits_cpu=True)
    begun, bench = time.perf_counter(), Bench(args)
    table: list[dict[str, Any]] = []
    for name in args.settings.split(","):
        if time.perf_counter() - begun > args.limit_seconds:
            print(f"{name}: not begun, {args.limit_seconds:.0f} s are over", flush=True)
            continue
        with contextlib.ExitStack() as after:
            after.callback(gc.collect)
            table.append(bench.run(name))
        print(_line(table[-1]), flush=True)
        with replacing(args.out / "table.json") as file:
            file.write(json.dumps(table, indent=1).encode())
    print(f"device: {jax.devices()[0].device_kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
