"""Counts what a trunk accepts of its own next-token block before and after the block is trained.

    python -m scripts.checks.next_token --out=runs/nextn --steps=300 --json=runs/nextn.json

Trains a tiny Qwen3.5 on the demo's text, then its block on that text alone, as blocks are
published, and writes both as a Q4_K_M file, which is served. Of this file, packed, the block is
then trained by total variation, and for comparison on the text alone for as many steps. Greedy
answers to held-out beginnings are counted by kdjax and by llama.cpp's `draft-mtp` (xllamacpp), 3
drafts a pass. What lies in --out is used again. Exit status: 0 if the greedily accepted drafts a
pass rise by 30% by both, 1 if not.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax

import kdjax
from kdjax import demo
from kdjax.commands.parsing import log_to_terminal
from kdjax.errors import reporting
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from scripts.bench.synthetic import QWEN35_SHAPES, write_random_gguf
from scripts.checks.llama_answers import ask, serve

SHAPE = QWEN35_SHAPES["tiny-delta"]._replace(label="demo", rows=4000, drafts=1)
DRAFTS, NEW, PROMPT, PROMPTS = 3, 48, 32, 16
ROWS, POSITIONS = 8, 64
ENOUGH = 1.3
_log = logging.getLogger("kdjax")


def read_rows(tokenizer: Tokenizer, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the demo's training text, without end."""
    held = set(demo.heldout_files())
    files = sorted({f for d in demo.training_folders() for f in d.glob("*.py")} - held)
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(file.read_text(errors="replace"))
        if len(ids) > 300_000:
            break
    width = POSITIONS + 1
    rows = np.asarray(ids[: len(ids) // width * width], np.int32).reshape(-1, width)
    rng = np.random.default_rng(seed)
    while True:
        chosen = rows[rng.integers(0, len(rows), ROWS)]
        yield {"tokens": chosen[:, :-1], "labels": chosen[:, 1:]}


def train(student: Model, teacher: Model | None, steps: int, rate: float, seed: int) -> Model:
    """The student after so many steps: towards the teacher by total variation, or the text."""
    loss = kdjax.KDLoss(kdjax.total_variation, alpha=0.0 if teacher else 1.0)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, rate, 20, steps, rate / 10)),
    )
    step = kdjax.make_step(student, teacher, loss, tx)
    state, params = step.init(student.params), teacher and teacher.params
    tokenizer = student.tokenizer
    assert tokenizer is not None
    start, batches = time.time(), read_rows(tokenizer, seed)
    for number in range(1, steps + 1):
        state, metrics = step(state, params, next(batches))
        if number % 25 == 0 or number == steps:
            figures = {k: round(v, 4) for k, v in metrics.means().items()}
            _log.info("step %d, %.0f s: %s", number, time.time() - start, figures)
    return student.replace(params=step.see(state))


def count_ours(model: Model, block: Model, prompts: list[list[int]], **how: Any) -> dict[str, Any]:
    """Counts the drafts that kdjax accepts."""
    how = dict(max_tokens=NEW, stop_ids=(), draft_tokens=DRAFTS) | how
    counts = [c.drafted for c in model.generate(prompts, draft=block, **how) if c.drafted]
    passes, kept = (sum(x) for x in zip(*counts, strict=True))
    return {"passes": passes, "accepted": kept, "a pass": round(kept / passes, 3)}


def count_theirs(file: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Reads llama.cpp's counters; passes are the ids that are left after the accepted ones."""
    asked = dict(n_predict=NEW, temperature=0.0, ignore_eos=True, cache_prompt=False)
    rows = []
    with serve(file, draft="own", most=DRAFTS) as url:
        for prompt in prompts:
            body = asked | dict(prompt=prompt, return_tokens=True)
            answer = ask(url, "/completion", body)
            timings = answer["timings"]
            rows.append((len(answer["tokens"]), timings["draft_n"], timings["draft_n_accepted"]))
    ids, drafted, kept = (sum(x) for x in zip(*rows, strict=True))
    passes = ids - kept - len(prompts)  # the first id comes from the prompt's pass
    return {"passes": passes, "accepted": kept, "drafted": drafted, "a pass": kept / passes}


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the experiment; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--trunk-steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    log_to_terminal()
    out: Path = flags.out
    out.mkdir(parents=True, exist_ok=True)
    served = out / "served-q4_k_m.gguf"
    if not served.exists():
        write_random_gguf(out / "random.gguf", SHAPE, recipe="f32", tokenizer_from=demo.STUDENT)
        trunk = kdjax.load(out / "random.gguf", dtype="float32")
        trunk = train(trunk, None, flags.trunk_steps, 5e-3, 0)
        block = train(kdjax.take_block(trunk), None, flags.steps, 3e-3, 1)
        kdjax.export_gguf(block, served, dtype="q4_k_m")
    model = kdjax.load(served, weights="packed", dtype="float32")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    texts = [f.read_text(errors="replace") for f in demo.heldout_files()]
    prompts = [list(tokenizer.encode(x))[200 : 200 + PROMPT] for x in texts if len(x) > 4000]
    prompts = [x for x in prompts if len(x) == PROMPT][:PROMPTS]
    before = kdjax.take_block(model)
    blocks = {
        "published": before,
        "text alone": train(before, None, flags.steps, 1e-3, 2),
        "total variation": train(before, model, flags.steps, 1e-3, 2),
    }
    rows = []
    for name, block in blocks.items():
        file = out / f"{name.replace(' ', '-')}.gguf"
        kdjax.export_gguf(block, file, dtype=None)
        read = kdjax.take_block(kdjax.load(file, weights="packed", dtype="float32"))
        rows.append(
            {
                "block": name,
                "kdjax, greedy": count_ours(model, read, prompts),
                "kdjax, T = 1": count_ours(model, read, prompts, temperature=1.0, seed=1),
                "llama.cpp, greedy": count_theirs(file, prompts),
            }
        )
        _log.info("%s", rows[-1])
    found = {"steps": flags.steps, "trunk_steps": flags.trunk_steps, "prompts": len(prompts)}
    found |= {"drafts": DRAFTS, "ids": NEW, "rows": rows}
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1) + "\n")
    gains = {by: rows[-1][by]["a pass"] / rows[0][by]["a pass"] for by in list(rows[0])[1:]}
    _log.info("times as many as before: %s", {by: round(x, 2) for by, x in gains.items()})
    return 0 if min(x for by, x in gains.items() if "greedy" in by) >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
