"""Compares blocks that drafts are trained for one or several a pass, at equal seconds.

    python -m scripts.checks.next_token --out=runs/nextn --seeds=3 --json=runs/nextn.json

Trains a tiny Qwen3.5 on the demo's stories and writes it as a Q4_K_M file, which is served. For
each seed a new block is trained twice for this file, packed, by total variation: for the first
draft of a pass alone, and for three (`DraftBlock(later=)`). Both see the same batches and get the
same seconds: each takes the steps that its measured step allows. Greedy answers to held-out
beginnings, and answers at T = 1, are counted by kdjax and by llama.cpp's `draft-mtp` (xllamacpp).
What lies in --out is used again.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import kdjax
from kdjax import demo
from kdjax.commands.parsing import log_to_terminal
from kdjax.config import split_drafts
from kdjax.errors import reporting
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from scripts.bench.synthetic import QWEN35_SHAPES, write_random_gguf
from scripts.checks.llama_answers import ask, serve

NEW, PROMPT = 64, 24  # ids of an answer, and of its prompt
ROWS, POSITIONS = 8, 64
_log = logging.getLogger("kdjax")


def read_ids(file: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each text of one of the demo's files, an end behind each."""
    lines = file.read_text().splitlines()
    end = tokenizer.stop_ids[:1]
    return [[*tokenizer.encode(json.loads(line)["text"]), *end] for line in lines]


def read_rows(tokenizer: Tokenizer, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the demo's stories, without end."""
    ids = [one for text in read_ids(demo.STORIES, tokenizer) for one in text]
    width = POSITIONS + 1
    rows = np.asarray(ids[: len(ids) // width * width], np.int32).reshape(-1, width)
    rng = np.random.default_rng(seed)
    while True:
        chosen = rows[rng.integers(0, len(rows), ROWS)]
        yield {"tokens": chosen[:, :-1], "labels": chosen[:, 1:]}


class Trainer:
    """One training; of a block for `later` drafts as well, towards the teacher, else on text."""

    def __init__(self, student: Model, teacher: Model | None, later: tuple[float, ...] = ()):
        self.student, self.teacher = student, teacher
        self.form = kdjax.DraftBlock(later=later) if teacher else None

    def run(self, steps: int, rate: float, seed: int) -> tuple[Model, float]:
        """The student after these steps, and the processor seconds of a step once compiled."""
        loss = kdjax.KDLoss(kdjax.total_variation, alpha=0.0 if self.teacher else 1.0)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, rate, min(20, steps // 2), steps, rate / 10
        )
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        step = kdjax.make_step(self.student, self.teacher, loss, tx, form=self.form)
        state, params = step.init(self.student.params), self.teacher and self.teacher.params
        assert self.student.tokenizer is not None
        batches, began = read_rows(self.student.tokenizer, seed), 0.0
        for number in range(1, steps + 1):
            state, metrics = step(state, params, next(batches))
            if number % 50 == 0 or number == steps:
                figures = {name: round(x, 4) for name, x in metrics.means().items()}
                _log.info("step %d: %s", number, figures)
            if number == 1:
                jax.block_until_ready(state)
                began = time.process_time()
        seconds = (time.process_time() - began) / max(steps - 1, 1)
        return self.student.replace(params=step.see(state)), seconds


def count_ours(model: Model, block: Model, prompts: list[list[int]], **how: Any) -> dict[str, Any]:
    """Counts the drafts that kdjax accepts."""
    how = dict(max_tokens=NEW, stop_ids=()) | how
    counts = [c.drafted for c in model.generate(prompts, draft=block, **how) if c.drafted]
    passes, kept = (sum(x) for x in zip(*counts, strict=True))
    return {"passes": passes, "accepted": kept, "length": 1 + kept / passes}


def count_theirs(file: Path, prompts: list[list[int]], most: int) -> dict[str, Any]:
    """Reads llama.cpp's counters; passes are the ids that are left after the accepted ones."""
    asked = dict(n_predict=NEW, temperature=0.0, ignore_eos=True, cache_prompt=False)
    rows = []
    with serve(file, draft="own", most=most) as url:
        for prompt in prompts:
            answer = ask(url, "/completion", asked | dict(prompt=prompt, return_tokens=True))
            timings = answer["timings"]
            rows.append((len(answer["tokens"]), timings["draft_n"], timings["draft_n_accepted"]))
    ids, drafted, kept = (sum(x) for x in zip(*rows, strict=True))
    passes = ids - kept - len(prompts)  # the first id comes from the prompt's pass
    return {"passes": passes, "accepted": kept, "drafted": drafted, "length": 1 + kept / passes}


def make_served(out: Path, steps: int) -> Path:
    """The served file: a tiny model that has learned the stories."""
    served = out / "served-q4_k_m.gguf"
    if not served.exists():
        tokenizer = kdjax.open_checkpoint(demo.STUDENT).tokenizer
        assert tokenizer is not None
        rows = len(tokenizer.tokens)
        shape = QWEN35_SHAPES["tiny-delta"]._replace(label="demo", rows=rows, drafts=1)
        write_random_gguf(out / "random.gguf", shape, recipe="f32", tokenizer_from=demo.STUDENT)
        trunk = kdjax.load(out / "random.gguf", dtype="float32")
        kdjax.export_gguf(Trainer(trunk, None).run(steps, 5e-3, 0)[0], served, dtype="q4_k_m")
    return served


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the experiment; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300, help="of the block for one draft")
    parser.add_argument("--trunk-steps", type=int, default=800)
    parser.add_argument("--later", default="0.6,0.35")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    log_to_terminal()
    out: Path = flags.out
    out.mkdir(parents=True, exist_ok=True)
    served = make_served(out, flags.trunk_steps)
    model = kdjax.load(served, weights="packed", dtype="float32")
    assert model.tokenizer is not None
    texts = read_ids(demo.HELD_OUT, model.tokenizer)
    prompts = [ids[:PROMPT] for ids in texts if len(ids) > PROMPT][: flags.prompts]
    arms: dict[str, tuple[float, ...]] = {"one": (), "several": split_drafts(flags.later)}
    most, rows = 1 + len(arms["several"]), []
    new = kdjax.take_block(model, seed=99)
    costs = {name: Trainer(new, model, later).run(48, 3e-3, 0)[1] for name, later in arms.items()}
    steps = {name: round(flags.steps * costs["one"] / cost) for name, cost in costs.items()}
    for seed in range(flags.seeds):
        for name, later in arms.items():
            begun = kdjax.take_block(model, seed=seed)
            block, cost = Trainer(begun, model, later).run(steps[name], 3e-3, seed)
            file = out / f"{name}-{seed}.gguf"
            kdjax.export_gguf(block, file, overwrite=True)
            read = kdjax.take_block(kdjax.load(file, weights="packed", dtype="float32"))
            row: dict[str, Any] = dict(
                seed=seed, drafts=1 + len(later), steps=steps[name], cost=cost
            )
            row["kdjax, greedy"] = count_ours(model, read, prompts, draft_tokens=most)
            how = dict(draft_tokens=most, temperature=1.0, seed=1)
            row["kdjax, T = 1"] = count_ours(model, read, prompts, **how)
            row["llama.cpp, greedy"] = count_theirs(file, prompts, most)
            rows.append(row)
            _log.info("%s", row)
            if flags.json:
                found = {"later": flags.later, "trunk_steps": flags.trunk_steps, "rows": rows}
                flags.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
