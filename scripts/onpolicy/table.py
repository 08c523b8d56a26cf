"""Trains by several settings for the same seconds, arm by arm, and judges what each has learned.

    python -m scripts.onpolicy.table --config=configs/onpolicy_1p5b_0p5b.py --hints=hints.jsonl \
        --development=problems.jsonl --out=OUT --limit=560 --arms='before; own*0; hints_big*0'

An arm is NAME, then, if wanted, +FIELD=VALUE for each field that differs and *SEED, as in
`own+optim.learning_rate=1e-5*2`. A name stands for fields of the config (`list_arms`); the base is
that of --config, flags --config.FIELD=VALUE and all: a run on own answers, whose train.steps are
those that --seconds hold. Arms train as `kdjax train` does, hints measured before, from the same
start and in one process, which keeps loaded models and compiled steps while arms share them;
nothing is saved but, with --files, OUT/ARM/student.gguf. `before` trains nothing.
Judged are the student of the last step on held-out text, on the texts of --beside=prose=DIR,c=DIR
(cross-entropy: what it forgets), on --development (greedy) and, if given, on HumanEval and MBPP in
all wordings, as `kdjax evaluate` does: OUT/ARM/judged.json holds what its --json would, for
scripts.checks.compare_passk. Each arm is a line of OUT/results.jsonl at once; a
later call goes on with the arms that are not there, and none begins that --limit leaves no time
for. Exit status: 0 done, 2 bad input.
"""

import copy
import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kdjax
from kdjax.commands import evaluate
from kdjax.commands.parsing import (
    Parser,
    log_to_terminal,
    override,
    parse_run,
    require_files,
    run_parser,
    started,
)
from kdjax.config import SELF, Config, has_hints, list_phases, set_fields, validate
from kdjax.data.rows import Rows
from kdjax.data.text import find_files
from kdjax.device.cluster import SharedFlag
from kdjax.errors import UserError, reporting
from kdjax.evaluation.gap import GAP, check_gap
from kdjax.formats.files import replacing
from kdjax.hub import fetch_files
from kdjax.models.decoder import Params
from kdjax.training.heldout import held_out
from kdjax.training.hooks import Hook, StepRecord
from kdjax.training.job import Job, assemble, open_writer
from kdjax.training.loop import train
from kdjax.training.phases import PHASE, Pace, Progress
from kdjax.training.saving import Checkpoints
from kdjax.watch.guards import CollapseGuard, NonFiniteGuard
from kdjax.watch.writers import JsonLines
from scripts.bench.arms import read_beside, run_arms

BEFORE = "before"
_ARM = re.compile(r"(?P<name>\w+)(?P<fields>\+.+?)?(?:\*(?P<seed>\d+))?")
_NEXT = re.compile(r"\+(?=[a-z]\w*\.)")  # before a field: a mixture of divergences has a plus, too
_AROUND = 90.0  # seconds that compiling and judging take
_HELD_OUT = ("loss", "kl", "student_ce", "agreement")  # and of solved problems, in a line
_SOLVED = ("mode", "pass_at_k", "problems", "samples", "not_generated", "cut_off", "reasons")


def list_arms(base: Config, seconds: float, hints: str) -> dict[str, dict[str, Any]]:
    """The fields that each arm changes of the base; those on exercises need `hints`, a file."""

    def last(share: float = 1.0, pace: float = 1.0) -> dict[str, Any]:
        """A share of the seconds, and the steps in them: `pace` times as many as of own answers."""
        steps = round(share * pace * base.train.steps)
        return {"train.seconds": share * seconds, "train.steps": steps}

    # Text does best with a third of the rows a step and twice the rate of own answers.
    text: dict[str, Any] = last(pace=4.3) | {
        "rollout.prompts": "",
        "loss.divergence": "forward_kl",
        "optim.learning_rate": 2 * base.optim.learning_rate,
        "optim.final_learning_rate": 2 * base.optim.final_learning_rate,
        "train.batch_size": base.train.batch_size // base.train.microbatches,
        "train.microbatches": 1,
    }
    # An exercise is long, and so are answers: of those cut off at 320 students unlearn to end.
    longest = base.data.seq_len // 2
    room = min(384, base.data.seq_len - longest)
    asked: dict[str, Any] = {
        "rollout.prompts": hints,
        "rollout.prompt_tokens": room,
        "rollout.max_tokens": longest,
    }
    hinted = asked | {"rollout.hints": True, "rollout.hint_tokens": base.data.seq_len // 2}
    cold = {"rollout.writer": "teacher", "loss.divergence": "forward_kl", "eval.stop_worse": 0.0}
    own = {"rollout.writer": "student", "loss.divergence": base.loss.divergence}
    rows = base.train.microbatches  # times as many rows a step as text has
    after_text = (
        own
        | last(0.4, pace=rows)
        | {
            "rollout.prompts": base.rollout.prompts,
            "rollout.every": rows * base.rollout.every,
            "optim.learning_rate": base.optim.learning_rate,
            "optim.final_learning_rate": base.optim.final_learning_rate,
        }
    )
    arms: dict[str, dict[str, Any]] = {
        BEFORE: {},
        "text": text,
        "own": last(),
        "cold_own": cold
        | last(0.4, pace=0.8)
        | {"train.until": "overlap", "then": (own | last(0.6),)},
        "text_own": text | last(0.6, pace=4.3) | {"then": (after_text,)},
    }
    itself = {"teacher.path": SELF}
    on_exercises: dict[str, dict[str, Any]] = {
        "verified": text | {"data.train": hints, "loss.alpha": 0.5},
        "own_unhinted": asked | last(),
        "hints_big": hinted | last(pace=0.75),
        "hints_self": hinted | last() | itself,
        "big_hints_self": hinted | last(pace=0.4) | itself | {"student.path": base.teacher.path},
    }
    return arms | (on_exercises if hints else {})


class Arm(NamedTuple):
    """One line of the results to come."""

    name: str  # NAME+FIELD=VALUE*SEED
    setting: str  # the same without the seed
    seconds: float
    config: Config

    @classmethod
    def parse(cls, text: str, base: Config, args: Namespace, parser: Parser) -> "Arm":
        """Raises `UserError` for what is no arm and for one that cannot run."""
        known, found = list_arms(base, args.seconds, args.hints), _ARM.fullmatch(text)
        if not found or found["name"] not in known:
            raise UserError(
                f"found the arm {text!r}; expected NAME[+FIELD=VALUE ...][*SEED] with a name of "
                f"{', '.join(known)}, or, with --hints, on exercises."
            )
        config, seed = copy.deepcopy(base), int(found["seed"] or 0)
        config.train.seed = seed
        config.eval.every = config.checkpoint.every = 0
        set_fields(config, known[found["name"]])
        more = _NEXT.split(found["fields"] or "")[1:]
        config = override(config, [f"--config.{field}" for field in more], parser)
        try:
            validate(config)
        except UserError as error:
            raise UserError(f"{text}: {error}") from error
        setting = f"{found['name']}{found['fields'] or ''}"
        return cls(f"{setting}*{seed}", setting, args.seconds * (setting != BEFORE), config)


class Unsaved(Checkpoints):
    """In place of checkpoints: keeps none, so that an arm is trained whole or not at all."""

    def __init__(self) -> None:
        self.best = None

    def latest(self) -> None:
        return None

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Writes nothing."""

    def raise_failed(self) -> None:
        """Nothing fails."""


class Notes(Hook):
    """Keeps what a line of the results says of the training, and the student that was judged."""

    def __init__(self, job: Job):
        self._phases, self._flag = list_phases(job.config), SharedFlag(job.step.placement.mesh)
        self._paces = [Pace(job.config, Progress(), self._flag)]
        self._ends = [0]
        self._held_out: list[dict[str, float]] = []
        self.params: Params = {}

    def news(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        if kind == PHASE:
            config = self._phases[len(self._paces)]
            self._paces.append(Pace(config, Progress(), self._flag))
            self._ends.append(self._ends[-1])
        self._paces[-1].news(step, kind, figures)

    def step_end(self, record: StepRecord) -> None:
        self._ends[-1] = record.step
        self._rate = record.figures["learning_rate"]
        self._paces[-1].step_end(record)

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        self._held_out = [*self._held_out[:1], _shorten(figures)]

    def student(self, step: int, params: Params) -> None:
        self.params = params

    def tell(self) -> dict[str, Any]:
        """Seconds and last step of each phase, the last rate, held-out figures before and after."""
        return {
            "train_seconds": [pace.progress.seconds for pace in self._paces],
            "ended": self._ends,
            "last_rate": self._rate,
            "start": self._held_out[0],
            "heldout": self._held_out[1],
        }


def _shorten(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figures[name] for name in _HELD_OUT if name in figures}


class Table:
    """Judges, and keeps the job of the arm before, whose models the next one may share."""

    def __init__(self, args: Namespace):
        self._args, self._job = args, None
        self._beside: dict[str, Rows] | None = None
        shared = [
            f"--limit={args.problems}",
            f"--max-tokens={args.answer_tokens}",
            f"--batch-size={args.rows}",
            *["--allow-unsandboxed"] * args.allow_unsandboxed,
        ]
        files = {name: getattr(args, name) for name in ("humaneval", "mbpp")}
        asked = [f"--{name}={path}" for name, path in files.items() if path]
        every = [(f"--humaneval={args.development}",), (*asked, "--wording=all")]
        self._development, self._benchmarks = (
            evaluate.check(evaluate.parser().parse_args(["STUDENT", *shared, *flags]))
            for flags in every
        )

    def run(self, arm: Arm) -> dict[str, Any]:
        """Trains and judges one arm."""
        folder = self._args.out / re.sub(r"\W+", "-", arm.name)
        folder.mkdir(parents=True, exist_ok=True)
        job = self._job = assemble(arm.config, folder, like=self._job)
        figures = {"setting": arm.setting, "seed": arm.config.train.seed}
        params, begun = None, time.monotonic()
        if arm.setting != BEFORE:
            notes = Notes(job)
            check_gap(job, allow_unsandboxed=self._args.allow_unsandboxed)
            if has_hints(arm.config):
                figures["gap"] = json.loads((folder / GAP).read_text())
            collapse = CollapseGuard(folder, *(one.rollout for one in list_phases(arm.config)))
            hooks = [NonFiniteGuard(folder), notes, JsonLines(folder), collapse]
            if train(job, Unsaved(), hooks, None) == "interrupted":
                raise KeyboardInterrupt
            params, figures = notes.params, figures | notes.tell()
        else:
            params = job.step.see(job.make_state())
            figures["heldout"] = _shorten(self.read(job, params))
        trained = time.monotonic()
        figures |= {"training_wall": trained - begun, "beside": self.read_beside(job, params)}
        figures |= self.judge(job, params, folder / "judged.json")
        return figures | {"judging_wall": time.monotonic() - trained}

    def read(self, job: Job, params: Params, rows: Rows | None = None) -> Mapping[str, float]:
        """Figures of held-out rows, or of others as of them."""
        held = job.eval_batches(rows), job.step.spec.head.loss
        return held_out(job.step.sum_evaluation, params, job.teacher_params, *held)

    def read_beside(self, job: Job, params: Params) -> dict[str, float]:
        """The cross-entropy of each text of --beside, by name."""
        if self._beside is None:
            sizes = {"rows": job.config.eval.rows or 64, "seq_len": job.config.data.seq_len}
            self._beside = read_beside(self._args.beside, job.pair.tokenizer, **sizes)
        read = self._beside.items()
        return {name: self.read(job, params, rows)["student_ce"] for name, rows in read}

    def judge(self, job: Job, params: Params, path: Path) -> dict[str, Any]:
        """How many problems of each set the student solves; its answers are written to `path`."""
        checkpoint = job.pair.student
        student = open_writer(job.pair, job.step).replace(own_tokenizer=job.pair.tokenizer)
        if self._args.files:
            whole = student.replace(params=params, spec=checkpoint.spec, checkpoint=checkpoint)
            kdjax.export_gguf(whole, path.with_name("student.gguf"), dtype="bf16", overwrite=True)
        # Adapters are judged merged, as they ship.
        student = kdjax.merge_lora(student.replace(params=params), job.config.train.compute_dtype)
        solved: dict[str, dict[str, Any]] = {}
        both = self._development, self._benchmarks
        for request, other in (both, both[::-1]):
            for name, figures in evaluate.solve(request, student, checkpoint, other):
                solved["development" if request is self._development else name] = figures
                with replacing(path) as file:  # at once: a kill leaves what was judged
                    file.write(json.dumps({"target": str(path.parent), **solved}).encode())
        return {name: {key: of[key] for key in _SOLVED} for name, of in solved.items()}


def _make_parser() -> Parser:
    parser = run_parser("table", __doc__)
    parser.prog, add = "scripts.onpolicy.table", parser.add_argument
    add("--arms", default="", help="separated by semicolons; default: each once")
    add("--hints", default="", help="exercises that passed, of kdjax answers --hint")
    add("--development", type=Path, required=True, help="problems that choose")
    add("--beside", default="", metavar="NAME=PATH,...", help="other texts: what is forgotten")
    add("--humaneval", type=Path, help="as kdjax evaluate; leave it out to choose")
    add("--mbpp", type=Path, help="as --humaneval")
    add("--seconds", type=float, default=250.0, help="of steps and rounds, an arm")
    add("--limit", type=float, default=float("inf"), help="seconds of this call")
    add("--rows", type=int, default=1024, help="answers that are judged, written at a time")
    add("--answer-tokens", type=int, default=512, help="of an answer that is judged")
    add("--problems", type=int, default=0, help="the first of each set; 0: all")
    add("--files", action="store_true", help="writes each student")
    add("--allow-unsandboxed", action="store_true", help="as kdjax evaluate")
    add("--out", type=Path, required=True)
    return parser


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the arms that have no result yet; returns the exit status."""
    begun, parser = time.monotonic(), _make_parser()
    log_to_terminal()
    run = parse_run(parser, argv)
    args, base = run.options, fetch_files(run.config)
    if args.hints:
        find_files(args.hints)
    asked = [text.strip() for text in args.arms.split(";") if text.strip()]
    names = asked or list_arms(base, args.seconds, args.hints)
    arms = [Arm.parse(text, base, args, parser) for text in names]
    for arm in arms:
        require_files(run._replace(config=arm.config))
    table = Table(args)
    with started():
        run_arms(arms, table.run, args.out, until=begun + args.limit, around=_AROUND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
