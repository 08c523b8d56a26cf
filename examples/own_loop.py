"""A custom loop: packed teacher, dense student, a schedule, held-out figures, an export."""

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


def main(out: str = "runs/own-loop", steps: int = 60) -> None:
    teacher = kdjax.load(demo.TEACHER, weights="packed", dtype="float32")
    student = kdjax.load(demo.STUDENT, dtype="float32")
    batches = make_batches(demo.STORIES, student.tokenizer)
    heldout = make_batches(demo.HELD_OUT, student.tokenizer)[:2]
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup_steps=5, decay_steps=steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    step = kdjax.make_step(student, teacher, kdjax.KDLoss(kdjax.forward_kl), optimizer)
    state = step.init(student.params)
    print("before:", step.evaluate(state, teacher.params, heldout)["kl"])
    for number, batch in enumerate(itertools.islice(itertools.cycle(batches), steps), 1):
        state, metrics = step(state, teacher.params, batch)
        if number % 20 == 0:
            print(number, metrics.means())
    print("after:", step.evaluate(state, teacher.params, heldout)["kl"])
    trained = student.replace(params=state.params)
    kdjax.export_hf(trained, Path(out) / "student-hf", overwrite=True)
    print(trained.generate("Once upon a time", max_tokens=40)[0].text)


if __name__ == "__main__":
    main()
