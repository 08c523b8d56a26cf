"""Adapters (LoRA) on a base that stays packed; the result is a folder that PEFT loads."""

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


def main(out: str = "runs/lora", steps: int = 60) -> None:
    teacher = kdjax.load(demo.TEACHER, weights="packed", dtype="float32")
    base = kdjax.load(demo.STUDENT, weights="packed", dtype="float32")
    student = kdjax.add_lora(base, rank=16)
    batches = make_batches(demo.STORIES, base.tokenizer)
    heldout = make_batches(demo.HELD_OUT, base.tokenizer)[:2]
    step = kdjax.make_step(student, teacher, kdjax.KDLoss(kdjax.forward_kl), optax.adamw(2e-3))
    state = step.init(student.params)  # the adapters alone
    print("before:", step.evaluate(state, teacher.params, heldout)["kl"])
    for batch in itertools.islice(itertools.cycle(batches), steps):
        state, _ = step(state, teacher.params, batch)
    print("after:", step.evaluate(state, teacher.params, heldout)["kl"])
    trained = student.replace(params=step.see(state))
    kdjax.export_peft(trained, Path(out) / "adapter", overwrite=True)
    kdjax.export_gguf_adapter(trained, Path(out) / "adapter.gguf", overwrite=True)


if __name__ == "__main__":
    main()
