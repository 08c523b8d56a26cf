"""Students that train rounded to GGUF block types or by adapters, against plain ones, arm by arm.

    python -m scripts.bench.quantize --small=0.5b.gguf --big=1.5b.gguf --text=python:jax,flax \
        --out=runs/quantize --limit=560

An arm is STUDENT<TEACHER:QUANTIZE, then, if wanted, ~, !, @RATE, #SECONDS and *SEED: models are
`small` and `big`, a teacher `self` is the student's own numbers at the start, QUANTIZE is as of
`student.quantize`, or empty for plain masters, or lora16 for adapters of that rank beside the
packed student; with ~ scales, which are fitted once, are then learned; with ! they are fitted by
the importance of the student's inputs on `--imatrix-rows` rows, and what is untrained is rounding
with an imatrix. Each arm trains for its seconds of the device, compilation not counted; the rate
follows the clock.
`--step-seconds` counts that many for each step, whatever it took: arms of equal steps. Judged on
held-out rows against the teacher: the student untrained, trained, its masters, and, of plain
masters, what `--then` makes of them; on the texts of `--beside=prose=DIR,c=DIR` its cross-entropy,
for what it keeps outside its own text. Arms of two models share files, arrays and the compiled
evaluation. Each arm is a line of OUT/results.jsonl at once, and, with `--files`, OUT/NAME.gguf the
blocks that it trained and OUT/NAME-start.gguf those before; a later call goes on with the arms that
are not there. No arm begins that `--limit` leaves no time for; one that fails is told and passed
over. Exit status: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import functools
import math
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

import kdjax
from kdjax.config import Config
from kdjax.data import pipeline
from kdjax.data.pipeline import TextSource
from kdjax.data.rows import Rows
from kdjax.device import runtime
from kdjax.errors import UserError, reporting
from kdjax.formats.blocks import is_cut
from kdjax.models.importance import measure_importance
from kdjax.models.model import Model
from kdjax.training.forms import Rounded
from kdjax.training.heldout import held_out
from kdjax.training.inputs import prepare
from kdjax.training.step import Step
from scripts.bench.arms import make_optimizer, read_beside, run_arms, train_for

QUEUE = (
    "small<big:#60*0; small<big:q4_0#60*0; small<self:q4_0@1e-5#60*0; big<self:blocks=Q2_K#200*0;"
    "big<self:blocks=Q3_K@5e-6#100*0; big<self:#12*0; big<self:blocks=Q2_K#60*0; small<big:#60*1;"
    "small<big:q4_0#60*1; small<big:#60*2; small<big:q4_0#60*2; small<big:q4_k_m#60*0;"
    "big<self:q2_k#100*0; big<self:q3_k_m@5e-6#60*0; small<self:q4_0@5e-6#60*0;"
    "small<self:q4_0@2e-5#60*0"
)
_ARM = re.compile(
    r"(?P<student>\w+)<(?P<teacher>\w+):(?P<quantize>[^~!@#*/]*(?:/[a-z][^~!@#*]*)?)(?P<learned>~?)(?P<imatrix>!?)"
    r"(?:@(?P<rate>[\d.e-]+))?(?:#(?P<seconds>[\d.]+))?(?:\*(?P<seed>\d+))?"
)
_AROUND = 75.0  # seconds that loading, compiling and judging take


class Arm(NamedTuple):
    """One line of the queue."""

    name: str
    student: str
    teacher: str
    quantize: str
    rate: float
    seconds: float
    seed: int
    imatrix: bool
    learned: bool

    @property
    def rank(self) -> int:
        """Rank of the adapters, or 0."""
        return int(self.quantize.removeprefix("lora")) if self.quantize[:4] == "lora" else 0

    @classmethod
    def parse(cls, text: str, scale: float) -> "Arm":
        """Raises `UserError` for what is no arm."""
        found = _ARM.fullmatch(text)
        if not found or {found["student"], found["teacher"]} - {"small", "big", "self"}:
            raise UserError(f"found the arm {text!r}; expected such as small<big:q4_0@2e-5#60*0")
        parts = found.groupdict()
        return cls(
            re.sub(r"\W+", "-", text.replace("~", "-learned").replace("!", "-imatrix")).strip("-"),
            found["student"],
            found["teacher"],
            found["quantize"],
            float(parts["rate"] or 2e-5),
            scale * float(parts["seconds"] or 60),
            int(parts["seed"] or 0),
            bool(parts["imatrix"]),
            bool(parts["learned"]),
        )


_FACTORS, _BLOCK = "factors", 32  # the masters of learned scales; numbers that share one
_PACE = 50.0  # how much faster a factor's logarithm moves than a weight


@dataclasses.dataclass(frozen=True)
class Learned(Rounded):
    """Scales fitted once and then multiplied by factors that are trained (LSQ, arXiv:1902.08153).

    A factor f of a block rounds x to f R(x / f); what lies within the range has the gradient
    f R(x / f) - x by log f, what is cut f R(x / f). Factors are not rounded to the file's halves.
    """

    def masters(self, params: Any) -> Any:
        """The parameters, and a factor's logarithm a block of each rounded matrix."""
        if _FACTORS in params:
            return params
        flat = _flatten(params)
        zeros = {path: _sum_blocks(jnp.zeros_like(flat[path])) for path, _ in self.types}
        return {**params, _FACTORS: unflatten_dict(zeros)}

    def begin(self, base: Any, masters: Any) -> Any:
        """See `Rounded`."""
        return super().begin(base, _drop_factors(masters))

    def spread(self, base: Any, masters: Any, mesh: Any) -> Any:
        """See `Rounded`; factors are not seen."""
        return _drop_factors(masters)

    def see(self, base: Any, kept: Any, masters: Any) -> Any:
        """The numbers that the blocks and their factors stand for."""
        params, factors = self._apart(masters)
        flat = _flatten(params)
        flat |= {path: flat[path] / f for path, f in factors.items()}
        flat = _flatten(super().see(base, kept, unflatten_dict(flat)))
        return unflatten_dict(flat | {path: flat[path] * f for path, f in factors.items()})

    def pull(
        self, base: Any, kept: Any, masters: Any, seen: Any, grads: Any, frozen: frozenset[str]
    ) -> Any:
        """Straight through to the masters, and to the factors' logarithms."""
        params, factors = self._apart(masters)
        given = _drop_factors(grads)
        x, of, rounded = (_flatten(tree) for tree in (params, given, seen))
        inside, levels = (
            tree | {path: tree[path] / f for path, f in factors.items()} for tree in (x, rounded)
        )
        trees = unflatten_dict(inside), unflatten_dict(levels)
        pulled = super().pull(base, kept, *trees, given, frozen)

        def mark_cut(dtype: str, scales: Any, numbers: Any, level: Any) -> Any:
            return is_cut(numbers, level, dtype, scales).astype(numbers.dtype)

        beyond, logs = _flatten(self._replace(mark_cut, kept, *trees)), {}
        for path in factors:
            along = of[path] * (rounded[path] - jnp.where(beyond[path] > 0, 0.0, x[path]))
            logs[path] = _PACE * _sum_blocks(along)
        return {**pulled, _FACTORS: unflatten_dict(logs)}

    def _apart(self, params: Any) -> tuple[Any, dict[tuple[str, ...], Any]]:
        """The parameters without factors, and these as wide as their matrices."""
        logs = _flatten(params[_FACTORS])
        wide = {path: jnp.repeat(jnp.exp(_PACE * x), _BLOCK, -1) for path, x in logs.items()}
        return _drop_factors(params), wide


def _drop_factors(tree: Any) -> dict[str, Any]:
    return {name: x for name, x in tree.items() if name != _FACTORS}


def _flatten(tree: Any) -> dict[tuple[str, ...], Any]:
    return flatten_dict(tree)


def _sum_blocks(x: Any) -> Any:
    return jnp.sum(x.reshape(*x.shape[:-1], -1, _BLOCK), axis=-1)


class Bench:
    """Models, rows and steps, each made when first asked for and kept while arms share it."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._made = args, {}
        tokenizer, config = kdjax.open_checkpoint(args.small).tokenizer, Config().data
        config.train, config.heldout, config.heldout_fraction = args.text, args.heldout, 0.02
        config.seq_len, config.cache_dir = args.seq_len, str(args.out / "rows")
        self.rows = prepare(config, tokenizer)
        sizes = {"rows": args.heldout_rows, "seq_len": args.seq_len}
        self._beside = read_beside(args.beside, tokenizer, **sizes)

    def _keep(self, key: Any, make: Any) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def models(self, arm: Arm) -> tuple[Model, Model]:
        """The student and its teacher, both computing in `--compute`.

        A student has float32 masters, or adapters beside its file's blocks.
        """
        args = self._args
        teacher = arm.student if arm.teacher == "self" else arm.teacher

        def load(name: str, **form: Any) -> Model:
            path = {"small": args.small, "big": args.big}[name]
            begin = functools.partial(kdjax.load, path, compute_dtype=args.compute, **form)
            return self._keep((name, *form.values()), begin)

        if arm.rank:
            base = load(arm.student, weights="packed")
            student = kdjax.add_lora(base, rank=arm.rank, seed=arm.seed)
        else:
            student = load(arm.student, dtype="float32")
        return student, load(teacher, dtype=args.compute)

    def step(self, arm: Arm) -> Step:
        """The step of the arm's types; the evaluation is that of the first of its two models."""
        student, teacher = self.models(arm)
        loss = kdjax.KDLoss(kdjax.forward_kl, 1.0, 0.0)
        step = kdjax.make_step(
            student,
            teacher,
            loss,
            make_optimizer(),
            form=self._form(arm, student),
            microbatches=self._args.microbatches,
            chunk_tokens=self._args.chunk_tokens,
        )
        key = "evaluate", student.source, teacher.source, arm.rank
        step.sum_evaluation = self._keep(key, lambda: step.sum_evaluation)
        return step

    def _form(self, arm: Arm, student: Model) -> Rounded | None:
        if arm.rank or not arm.quantize:
            return None
        imatrix = self._importance(arm.student, student) if arm.imatrix else ""
        return (Learned if arm.learned else Rounded)(arm.quantize, imatrix)

    def _importance(self, name: str, student: Model) -> str:
        """The file of a model's importances, measured once on the rows that are trained on."""
        args, path = self._args, self._args.out / f"{name}.imatrix.gguf"
        if not path.exists():
            rows = TextSource(self.rows.train, batch_size=args.batch_size, seed=0)
            batches = -(-args.imatrix_rows // args.batch_size)
            tokens = (rows.next(None)["tokens"] for _ in range(batches))
            texts, size = [args.text], args.seq_len
            measure_importance(path, student, tokens, datasets=texts, chunk_size=size)
        return str(path)

    def judge(self, step: Step, teacher: Model, params: Any) -> dict[str, float]:
        """KL, agreement and cross-entropy of held-out rows, float32 sums.

        And the cross-entropy on each text of `--beside`.
        """
        args = self._args

        def measure(rows: Rows) -> dict[str, float]:
            batches = pipeline.eval_batches(
                rows, batch_size=args.batch_size, limit=args.heldout_rows
            )
            placed, loss = (step.put(batch, heldout=True) for batch in batches), step.spec.head.loss
            return held_out(step.sum_evaluation, params, teacher.params, placed, loss)

        found = measure(self.rows.heldout)
        kept = {name: found[name] for name in ("kl", "agreement", "student_ce", "tokens")}
        beside = {f"{name}_ce": measure(rows)["student_ce"] for name, rows in self._beside.items()}
        return kept | beside

    def run(self, arm: Arm) -> dict[str, Any]:
        """Trains and judges one arm; its blocks are written beside the results."""
        args = self._args
        student, teacher = self.models(arm)
        step = self.step(arm)
        state = step.init(student.params)
        found: dict[str, Any] = {"start": self.judge(step, teacher, step.see(state))}
        files = args.files and arm.quantize and not arm.rank and not arm.learned
        if files:
            self.write_blocks(step, student, state, f"{arm.name}-start")
        state, trained = self.train(step, state, teacher, arm)
        found |= trained
        seen = step.see(state)
        found["trained"] = self.judge(step, teacher, seen)
        if arm.rank:
            found["trained_parameters"] = sum(x.size for x in jax.tree.leaves(state.params))
        elif arm.quantize:
            found["masters"] = self.judge(step, teacher, _drop_factors(state.params))
            found["better"] = min(("start", "trained"), key=lambda name: found[name]["kl"])
            del seen
            if files:
                found["file"] = self.write_blocks(step, student, state, arm.name)
        else:
            for text in args.then.split(";"):
                form = Rounded(text).choose_types(student.spec)
                round_all = jax.jit(
                    lambda params, form=form: form.see({}, form.begin({}, params), params)
                )
                for name, params in (("then", state.params), ("start_then", student.params)):
                    found.setdefault(name, {})[text] = self.judge(step, teacher, round_all(params))
        memory = jax.local_devices()[0].memory_stats() or {}
        found["peak_gb"] = memory.get("peak_bytes_in_use", 0) / 1e9
        return found | arm._asdict()

    def write_blocks(self, step: Step, student: Model, state: Any, name: str) -> str:
        """Writes the blocks that the state's student is seen in; returns the file."""
        kept = student.replace(params=jax.device_get(step.pack(state)))
        return str(kdjax.export_gguf(kept, self._args.out / f"{name}.gguf", overwrite=True))

    def train(self, step: Step, state: Any, teacher: Model, arm: Arm) -> tuple[Any, dict[str, Any]]:
        """The state after the arm's seconds, and how fast it went."""
        args = self._args
        source = TextSource(self.rows.train, batch_size=args.batch_size, seed=arm.seed)
        given = step, state, teacher.params, source, arm.rate
        state, found = train_for(arm.seconds, *given, step_seconds=args.step_seconds)
        return state, found | {"tokens": found["steps"] * args.batch_size * args.seq_len}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--small", required=True)
    parser.add_argument("--big", required=True)
    parser.add_argument("--text", required=True, help="as data.train")
    parser.add_argument("--heldout", default="", help="as data.heldout")
    parser.add_argument("--beside", default="", metavar="NAME=TEXT,...", help="texts of others")
    parser.add_argument("--out", type=Path, default=Path("runs/quantize"))
    parser.add_argument("--arms", default=QUEUE, help="separated by semicolons")
    parser.add_argument("--then", default="q4_0;q4_k_m", help="what plain masters become")
    parser.add_argument("--files", action="store_true", help="write what rounded arms trained")
    parser.add_argument("--scale", type=float, default=1.0, help="times the seconds of each arm")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="0: what it takes")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of this call")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--imatrix-rows", type=int, default=128, help="of arms with !")
    parser.add_argument("--heldout-rows", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--compute", default="bfloat16", choices=("bfloat16", "float32"))
    return parser


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the arms that have no result yet; returns the exit status."""
    begun, args = time.monotonic(), _parser().parse_args(argv)
    runtime.configure()
    arms = [Arm.parse(text.strip(), args.scale) for text in args.arms.split(";") if text.strip()]
    args.out.mkdir(parents=True, exist_ok=True)
    around = _AROUND * min(args.scale, 1.0)
    run_arms(arms, Bench(args).run, args.out, until=begun + args.limit, around=around)
    return 0


if __name__ == "__main__":
    sys.exit(main())
