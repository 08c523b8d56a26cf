"""Measures what a teacher of another tokenizer is worth, next to the same seconds of text alone.

    python -m scripts.bench.vocabularies --out=runs/two --config=configs/qwen1p5b_0p5b.py \
        --student=hf:HuggingFaceTB/SmolLM2-135M --seconds=250 --seeds=3
    python -m scripts.bench.vocabularies --out=runs/toy --toy --seconds=40 --rates=2e-3

Each arm is a run of the config: from the teacher (`loss.vocabulary=shared`, at each of `--alphas`)
or from the text alone (alpha 1), at each of `--rates`, with each seed, all for the same seconds of
steps, or `--steps` of them. `--teachers` says how the teacher is asked: in each step, with its
weights as the name says, or once (`cached`: its hidden states of all rows are stored in OUT first,
which no arm's seconds count). `--peers` adds arms of other projects' losses (`peer_losses`). Each
arm is a line of OUT/results.jsonl, and the table is by the best rate of each sort. With
`--toy` the demo's teacher teaches students of random weights whose tokenizers are trained on the
demo's stories: byte-level BPE and SentencePiece's BPE, `--ids` each. `--pace=N` times N steps,
three times in turn with N of a pair of the same shapes that is taken for one of one vocabulary;
with several `--teachers` in turn with N of each, and of the text alone.
Arguments that it does not know set fields (`--config.train.batch_size=4`); without `--config` the
demo's hold, whose weights are random with `--toy` and else the student's.
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from kdjax import demo
from kdjax.commands.parsing import load_config, override, run_parser
from kdjax.config import Config, set_fields, settle_dtype
from kdjax.data.pipeline import PREFETCH
from kdjax.device import cluster
from kdjax.errors import UserError, reporting
from kdjax.models.tokenizer import Tokenizer
from kdjax.training import pair, vocabulary
from kdjax.training.caching import cache_teacher
from kdjax.training.job import Job, assemble
from kdjax.training.teachers import CachedHidden
from kdjax.training.vocabulary import SharedVocabulary, Vocabulary, own_vocabulary
from kdjax.watch.run import distill
from scripts.bench.arms import run_arms
from scripts.bench.made_tokenizers import write_students
from scripts.bench.peer_losses import PEERS, SPANS, find_spans

FIGURES = "student_bits_per_byte", "teacher_bits_per_byte", "kl", "agreement"
SHARED = "compared", "teacher_mass", "student_mass"
ROUNDS = 3  # of `time_pace`
ONE = "one"
AROUND = 45  # seconds that an arm takes in addition to its own, on a GPU, where `--limit` counts


@dataclasses.dataclass(frozen=True)
class LiveTeacher:
    """A teacher that runs in each step."""

    weights: str

    def ask(self, config: Config, out: Path) -> dict[str, Any]:
        """Returns the fields of an arm's config that are this teacher's."""
        return {"teacher.weights": self.weights}


class CachedTeacher:
    """A teacher that ran once over all rows: its hidden states are stored in `out`."""

    def ask(self, config: Config, out: Path) -> dict[str, Any]:
        """Returns the fields as `LiveTeacher` does; stores what is missing, and says how long."""
        folder = out / f"cache-{Path(config.student.path).name}"
        begun = time.perf_counter()
        with cluster.started("auto", cluster.JOIN_TIMEOUT, suits_cpu=True):
            cache_teacher(copy.deepcopy(config), folder, CachedHidden(), all_rows=True)
        size = sum(path.stat().st_size for path in folder.iterdir())
        told = {"cache": folder.name, "gigabytes": size / 1e9}
        print(json.dumps(told | {"seconds": time.perf_counter() - begun}), flush=True)
        return {"teacher.cache": str(folder)}


# "teacher": as the config says, whose weights "auto" are dense or packed, as fits.
TEACHERS = {name: LiveTeacher(name) for name in ("dense", "float8", "packed")}
TEACHERS |= {"teacher": LiveTeacher("auto"), "cached": CachedTeacher()}


@dataclasses.dataclass(frozen=True)
class Arm:
    """A run: of a student, from a teacher (alpha below 1) or from the text alone (1)."""

    student: str
    alpha: float
    rate: float
    seed: int
    seconds: float
    fields: tuple[tuple[str, Any], ...] = ()
    loss: str = ""  # of `PEERS`; "": kdjax's
    teacher: str = "teacher"  # of `TEACHERS`

    @property
    def kind(self) -> str:
        """Names what the student learns from."""
        return "text" if self.alpha == 1 else f"{self.loss or self.teacher}, alpha {self.alpha:g}"

    @property
    def name(self) -> str:
        """Names its line and its folder."""
        kind = self.kind.replace(", alpha ", "-alpha")
        return f"{Path(self.student).name}-{kind}-rate{self.rate:g}-seed{self.seed}"


def change(config: Config, arm: Arm) -> Config:
    """The config of an arm: constant rate after the warmup, nothing but figures written."""
    config = copy.deepcopy(config)
    fields: dict[str, Any] = {
        "student.path": arm.student,
        "loss.alpha": arm.alpha,
        "optim.learning_rate": arm.rate,
        "optim.final_learning_rate": arm.rate,
        "train.seed": arm.seed,
        "train.seconds": arm.seconds,
        "train.steps": 1_000_000,
        "eval.samples": 0,
        "eval.every": 0,
        "checkpoint.every": 0,
    }
    set_fields(config, fields | dict(arm.fields))
    return config


def prepare(config: Config, out: Path, arm: Arm) -> Config:
    """The config of an arm with its teacher, who is asked first if that is once."""
    changed = change(config, arm)
    set_fields(changed, TEACHERS[arm.teacher].ask(changed, out))
    return changed


def run_arm(config: Config, out: Path, arm: Arm) -> dict[str, Any]:
    """Trains an arm; its first and last held-out figures, and the steps that its seconds took.

    `curve` has the bits a byte of each evaluation, by step.
    """
    workdir = out / arm.name
    with replace_loss(arm.loss):
        distill(prepare(config, out, arm), workdir, suits_cpu=True)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if line["kind"] == "eval"]
    receipt = json.loads((workdir / "receipt.json").read_text())
    told = dataclasses.asdict(arm) | {"kind": arm.kind, "two_tokenizers": receipt["two_tokenizers"]}
    named = {name: evals[-1].get(name) for name in (*FIGURES, *SHARED)}
    named["curve"] = [(line["step"], line[FIGURES[0]]) for line in evals]
    return told | named | {"before": evals[0][FIGURES[0]], "steps": evals[-1]["step"]}


@contextlib.contextmanager
def replace_loss(name: str) -> Iterator[None]:
    """Within it, two tokenizers are compared by this one of `PEERS`; by kdjax's loss if empty."""
    if not name:
        yield
        return
    complete = SharedVocabulary.complete

    def complete_spans(self: SharedVocabulary, batch: dict[str, Any]) -> dict[str, Any]:
        whole = complete(self, batch)
        return whole if SPANS[0] in whole else whole | find_spans(self.tokens, whole)

    with (
        mock.patch.object(SharedVocabulary, "complete", complete_spans),
        mock.patch.object(vocabulary, "Reread", PEERS[name]),
    ):
        yield


def list_arms(args: argparse.Namespace, students: Sequence[str]) -> Iterator[Arm]:
    """Lists each student's arms: seed by seed, so that an early end leaves complete seeds."""
    for seed in range(args.seeds):
        for student in students:
            asked = [("", teacher) for teacher in args.teachers]
            asked += [(peer, "teacher") for peer in args.peers]
            sorts = [(alpha, *one) for alpha in args.alphas for one in asked]
            for alpha, loss, teacher in (*sorts, (1.0, "", "teacher")):
                for rate in args.rates:
                    # Half of the teacher's ids are more than a made tokenizer has.
                    fields = (("loss.allow_few_shared", True),) if args.toy else ()
                    fields += (("train.steps", args.steps),) if args.steps else ()
                    fields += (("eval.every", args.curve),) if args.curve else ()
                    seconds = 0 if args.steps else args.seconds
                    yield Arm(student, alpha, rate, seed, seconds, fields, loss, teacher)


def summarise(out: Path) -> str:
    """The table in Markdown: of each student and sort of arm the best rate, over its seeds.

    Raises `UserError` without a result.
    """
    results = out / "results.jsonl"
    if not results.exists():
        raise UserError(
            f"found no result in {out}; expected one of an arm. Mend what the arms above say, or "
            "raise --limit, and run the command again."
        )
    records = [json.loads(line) for line in results.read_text().splitlines()]
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for record in records:
        key = Path(record["student"]).name, record["kind"], record["rate"]
        groups.setdefault(key, []).append(record)
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for (student, kind, rate), found in groups.items():
        mean = statistics.fmean(one[FIGURES[0]] for one in found)
        best[student, kind] = min(best.get((student, kind), (mean, rate)), (mean, rate))
    lines = [
        "| student | from | rate | bits a byte, each seed | mean | compared | steps |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (student, kind), (mean, rate) in sorted(best.items()):
        found = groups[student, kind, rate]
        each = ", ".join(f"{one[FIGURES[0]]:.4f}" for one in found)
        share, steps = found[0]["compared"], statistics.fmean(one["steps"] for one in found)
        cells = student, kind, f"{rate:g}", each, f"{mean:.4f}", f"{share:.1%}", f"{steps:.0f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def time_pace(config: Config, out: Path, arms: Mapping[str, Arm], steps: int) -> dict[str, Any]:
    """Seconds a step of each arm; one named `ONE` is of a pair that is taken for one vocabulary.

    All are timed in turn, `ROUNDS` times, so that other work on the machine slows all, and the
    fastest counts. An arm's name alone is for steps that draw their batches as a run does; `alone`
    are steps on one batch, without the host's part, of which `next` (to build a batch) and `put`
    (to place it) are the seconds. A line is printed as each is measured.
    """
    told: dict[str, Any] = {}

    def tell(name: str, found: float) -> None:
        told.setdefault(name, []).append(found)
        print(json.dumps({name: found}), flush=True)

    timed = {name: dataclasses.replace(arm, seconds=0) for name, arm in arms.items()}
    asked = {name: prepare(config, out, arm) for name, arm in timed.items()}
    with cluster.started("auto", cluster.JOIN_TIMEOUT, suits_cpu=True):
        jobs: dict[str, Job] = {}
        for name, changed in asked.items():
            settled = settle_dtype(changed, jax.default_backend())
            with take_for_one() if name == ONE else contextlib.nullcontext():
                jobs[name] = assemble(settled, out / f"pace-{name}", ahead=True)
        states = {name: job.make_state() for name, job in jobs.items()}
        for alone in (True, False) * ROUNDS:
            for name, job in jobs.items():
                states[name], found = _time_steps(job, states[name], steps, alone=alone)
                tell(f"{name}{' alone' * alone}", found)
        for name, job in jobs.items():
            begun = time.perf_counter()
            batches = [job.source.next(states[name].params) for _ in range(4 * PREFETCH)]
            tell(f"{name} next", (time.perf_counter() - begun) / len(batches))
            begun = time.perf_counter()
            jax.block_until_ready([job.step.put(x, job.step.spec.microbatches) for x in batches])
            tell(f"{name} put", (time.perf_counter() - begun) / len(batches))
    last, *others = [*arms][::-1]
    ratios = {
        f"{name}{of} to {last}{of}": min(told[name + of]) / min(told[last + of])
        for name in others
        for of in ("", " alone")
    }
    return told | ratios


def _time_steps(job: Job, state: Any, steps: int, *, alone: bool) -> tuple[Any, float]:
    """The next state, and seconds a step.

    Not timed are the first steps, which use up the batches that were built in the other's turn.
    """
    parts, begun = job.step.spec.microbatches, 0.0
    placed = job.step.put(job.source.next(state.params), parts)
    for number in range(-2 if alone else -2 * PREFETCH, steps):
        if number == 0:
            jax.block_until_ready(state)
            begun = time.perf_counter()
        if not alone:
            placed = job.step.put(job.source.next(state.params), parts)
        state, _ = job.step.train(state, job.teacher_params, placed)
    jax.block_until_ready(state)
    return state, (time.perf_counter() - begun) / steps


def take_for_one() -> Any:
    """Within it a pair is taken for one of one vocabulary, as wide as the narrower head."""

    def choose(rows: int, theirs: int, tokenizer: Tokenizer, *_: Any) -> Vocabulary:
        least = min(rows, theirs)
        if least < tokenizer.vocab_size:
            raise UserError(
                f"found a student of {tokenizer.vocab_size:,} ids and a teacher's head of "
                f"{theirs:,} rows; expected as many rows, to time the pair as one of one "
                "vocabulary. Name several --teachers: --pace then compares these."
            )
        return own_vocabulary(least, min(tokenizer.vocab_size, least))

    return mock.patch.object(pair, "choose_vocabulary", choose)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the arms, and prints the table; returns the exit status."""
    parser = run_parser("vocabularies", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--student", action="append", default=[], help="one or several; with --toy none")
    add("--toy", action="store_true", help="the demo's teacher, and made tokenizers")
    add("--ids", type=int, default=1000, help="ids of a made tokenizer")
    add("--seconds", type=float, default=250)
    add("--steps", type=int, default=0, help="of each arm, in place of seconds")
    add("--seeds", type=int, default=3)
    add("--alphas", type=float, nargs="*", default=[0.2])
    add("--teachers", nargs="*", default=["teacher"], choices=[*TEACHERS], help="how it is asked")
    add("--curve", type=int, default=0, help="steps between evaluations; 0: first and last")
    add("--limit", type=float, default=1e9, help="seconds; an arm that would end later is left out")
    add("--peers", nargs="*", default=[], choices=[*PEERS], help="other projects' losses")
    add("--rates", type=float, nargs="+", default=[1e-5, 3e-5, 1e-4])
    add("--pace", type=int, default=0, help="steps to time instead")
    args, rest = parser.parse_known_args(argv)
    named = args.config or ("demo:random" if args.toy else "demo")
    config = override(load_config(named)[0], rest, parser)
    students = args.student
    if args.toy:
        texts = [json.loads(line)["text"] for line in demo.STORIES.read_text().splitlines()]
        shape = json.loads((demo.STUDENT_SHAPE / "config.json").read_text())
        write_students(shape, texts, args.ids, args.out / "students")
        students = [str(args.out / "students" / x) for x in ("byte-level", "sentencepiece")]
    arms = list(list_arms(args, students))
    if args.pace:
        timed = {"two": arms[0], ONE: arms[0]}
        if len(args.teachers) > 1:
            first = {arm.teacher: arm for arm in arms[::-1] if arm.alpha != 1 and not arm.loss}
            timed = {name: first[name] for name in args.teachers} | {"text": arms[-1]}
        print(json.dumps(time_pace(config, args.out, timed, args.pace)))
        return 0
    until = time.monotonic() + args.limit
    run_arms(arms, lambda arm: run_arm(config, args.out, arm), args.out, until=until, around=AROUND)
    print(summarise(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
