"""Times steps on the student's own answers beside steps on text: same pair, rows, kd_step.

    python -m scripts.onpolicy.cost --folder=/tmp/m --teacher=7b --student=0.5b --kinds=dequant,q4k

Models are random files of known shapes, as in `scripts.bench.step`, or files of one's own. A random
student never ends an answer: each answer's length is drawn from `--answer-tokens` and imposed.
On-policy seconds are those of whole rounds, from the first prompt's reading to the last step, with
all that `AnswerSource` does between them. A round of the same prompts and lengths comes before, so
that nothing is compiled while the clock runs; `compiled_s` says whether something was.

Ratios to steps on text are printed at equal positions and at equal trained tokens, where the
prompts in the rows count against the rounds. Then the round's own rows are trained on as a file of
conversations would be, whose text was there before: positions and trained tokens are equal, and
the ratio to that is the round's price alone.
"""

import argparse
import gc
import json
import string
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from kdjax.data.pipeline import TextSource
from kdjax.data.rollouts import FOLDER, read_round, round_path
from kdjax.device import runtime
from kdjax.errors import reporting
from kdjax.training import rollouts
from kdjax.training.job import Job, make_source
from scripts.bench.program import Request, configured, make_job
from scripts.bench.rollouts import ends
from scripts.bench.step import model_file

_WARMUP = 3  # steps before a clock starts


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/bench"), help="for model files")
    add("--teacher", default="7b", help="a known shape, or a file")
    add("--student", default="0.5b")
    add("--kinds", default="dequant", help="of teacher.backend, joined by commas")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="for every kind")
    add("--rows", type=int, default=8)
    add("--length", type=int, default=2048)
    add("--dtype", default="bfloat16")
    add("--every", type=int, default=32, help="steps a round")
    add("--rounds", type=int, default=1, help="timed, after one that compiles")
    add("--slots", type=int, default=1024, help="answers written at a time")
    add("--prompt-tokens", default="100:200")
    add("--answer-tokens", default="16:512")
    add("--steps", type=int, default=24, help="on text, and on a round's rows once more")
    add("--json", type=Path, help="where to write the figures")
    return parser.parse_args(argv)


def write_prompts(path: Path, lengths: tuple[int, int], count: int = 4096) -> None:
    """Texts of letters that no merge joins: of so many tokens as characters."""
    rng = np.random.default_rng(0)
    letters = np.asarray(list(string.ascii_uppercase))
    with path.open("w") as file:
        for length in rng.integers(lengths[0], lengths[1] + 1, count):
            file.write(json.dumps({"text": "".join(rng.choice(letters, length))}) + "\n")


def imposing(lengths: tuple[int, int]) -> Any:
    """Within it every answer ends at a length of its own, drawn by its number."""
    complete = rollouts.complete

    def impose(*args: Any, numbers: Sequence[int], **how: Any) -> Any:
        least, most = lengths
        drawn = [np.random.default_rng(n).integers(least, most + 1).item() for n in numbers]
        return complete(*args, numbers=numbers, limits=drawn, **how)

    return mock.patch.object(rollouts, "complete", impose)


def settings_of(kind: str, args: argparse.Namespace, prompts: Path) -> dict[str, Any]:
    """The config's fields by name."""
    settings = {
        "teacher.path": str(model_file(args.teacher, args.folder)),
        "student.path": str(model_file(args.student, args.folder)),
        "student.init": "random",
        "student.remat": "none",
        "teacher.backend": kind,
        "teacher.param_dtype": args.dtype,
        "train.compute_dtype": args.dtype,
        "train.batch_size": args.rows,
        "data.seq_len": args.length,
        "data.max_segments": 32,
        "rollout.prompts": str(prompts),
        "rollout.prompt_tokens": ends(args.prompt_tokens)[1],
        "rollout.max_tokens": ends(args.answer_tokens)[1],
        "rollout.batch_size": args.slots,
        "rollout.every": args.every,
    }
    return settings | dict(pair.split("=", 1) for pair in args.set)


class Steps:
    """A job's state, which steps move on."""

    def __init__(self, job: Job):
        self._job, self._state = job, job.make_state()
        self.compiled = 0.0  # seconds, until now
        jax.monitoring.register_event_duration_secs_listener(self._add_compiled)

    def _add_compiled(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            self.compiled += duration_secs

    def run(
        self, source: Any, count: int, every: int = 0
    ) -> tuple[float, float, list[dict[str, float]]]:
        """Seconds of so many steps, trained tokens, and figures of each round that began."""
        job, tokens, done = self._job, 0.0, None
        rounds: list[dict[str, float]] = []
        begun = time.perf_counter()
        for number in range(count):
            if every and number % every == 0:  # else a round would wait for the step before it
                jax.block_until_ready(done)
            batch = source.next(self._state.params)
            news = source.take_news() if every else None
            rounds += [news] if news else []
            tokens += float(batch["weights"].sum())
            self._state, done = job.step.train(self._state, job.teacher_params, job.step.put(batch))
        jax.block_until_ready(done)
        return time.perf_counter() - begun, tokens, rounds


def measure(kind: str, args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Figures of steps on text, and then of whole rounds."""
    prompts = folder / "prompts.jsonl"
    write_prompts(prompts, ends(args.prompt_tokens))
    settings = settings_of(kind, args, prompts)
    begun = time.perf_counter()
    job = make_job(Request(settings, []), configured(settings))
    steps = Steps(job)
    steps.run(job.source, _WARMUP)
    seconds, tokens, _ = steps.run(job.source, args.steps)
    offline = dict(step_s=seconds / args.steps, tokens=tokens / args.steps)
    yield {
        "teacher": kind,
        "on": "text",
        "ready_s": time.perf_counter() - begun - seconds,
    } | offline

    def source(name: str) -> Any:
        given = folder / f"{kind}-{name}"
        return make_source(job.config, given, job.pair, job.rows, None, job.step, job.teacher)

    with imposing(ends(args.answer_tokens)):
        steps.run(source("compiles"), 1, every=1)  # a whole round
        count = args.every * args.rounds
        compiled = steps.compiled
        seconds, tokens, rounds = steps.run(source("timed"), count, every=args.every)
        compiled = steps.compiled - compiled
    step, tokens = seconds / count, tokens / count
    writing = sum(news["seconds"] for news in rounds)
    yield {
        "teacher": kind,
        "on": "own answers",
        "step_s": step,
        "tokens": tokens,
        "round_s": writing / len(rounds),
        "rounds_share": writing / seconds,
        "compiled_s": compiled,
        "answers": rounds[-1]["answers"],
        "length": rounds[-1]["length"],
        "padding": rounds[-1]["padding"],
        "over_text_at_equal_positions": step / offline["step_s"],
        "over_text_at_equal_tokens": step / tokens * offline["tokens"] / offline["step_s"],
    }
    own = read_round(round_path(folder / f"{kind}-timed" / FOLDER, 0)).rows
    again = TextSource(own, batch_size=args.rows, seed=0)
    steps.run(again, _WARMUP)
    seconds, tokens, _ = steps.run(again, args.steps)
    yield {
        "teacher": kind,
        "on": "the same rows as text",
        "step_s": seconds / args.steps,
        "tokens": tokens / args.steps,
        "own_answers_over_this": step * args.steps / seconds,
    }


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement; returns the exit status."""
    args = arguments(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    runtime.configure()
    print(runtime.device_summary(), flush=True)
    rows: list[dict[str, Any]] = []
    for kind in args.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(kind, args, Path(folder)):
                rows.append(row)
                shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                print(json.dumps(shown), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
