"""A smaller GGUF file: the model learns under the rounding of Q2_K from its own larger file."""

import itertools
import json
from pathlib import Path

import numpy as np
import optax

import kdjax
from kdjax import demo


def make_batches(path, tokenizer, rows=8, length=128):
    """Documents one after another, cut into rows: tokens and the ids that follow them."""
    texts = (json.loads(line)["text"] for line in path.open())
    ids = [i for text in texts for i in [*tokenizer.encode(text), tokenizer.end_of_text_id]]
    size = rows * (length + 1)
    blocks = np.array(ids[: len(ids) // size * size], np.int32).reshape(-1, rows, length + 1)
    return [{"tokens": block[:, :-1], "labels": block[:, 1:]} for block in blocks]


def main(out: str = "runs/smaller", steps: int = 60) -> None:
    teacher = kdjax.load(demo.TEACHER, weights="packed", dtype="float32")
    student = kdjax.load(demo.TEACHER, dtype="float32")
    batches = make_batches(demo.STORIES, student.tokenizer)
    heldout = make_batches(demo.HELD_OUT, student.tokenizer)[:2]
    form = kdjax.Rounded("q2_k")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-4, weight_decay=0.0))
    step = kdjax.make_step(student, teacher, kdjax.KDLoss(), optimizer, form=form)
    state = step.init(student.params)
    print("rounded:", step.evaluate(state, teacher.params, heldout)["kl"])
    for batch in itertools.islice(itertools.cycle(batches), steps):
        state, _ = step(state, teacher.params, batch)
    print("trained:", step.evaluate(state, teacher.params, heldout)["kl"])
    file = Path(out) / "teacher-q2_k.gguf"
    kdjax.export_gguf(student.replace(params=step.pack(state)), file, overwrite=True)
    print(f"{file}: {file.stat().st_size:,} bytes, from {demo.TEACHER.stat().st_size:,}")


if __name__ == "__main__":
    main()
