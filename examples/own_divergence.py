"""A custom divergence: any function of two log-probabilities; its gradient is derived."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import optax

import kdjax
from kdjax import demo


def squared_hellinger(teacher_log_probs, student_log_probs):
    """Half the squared distance of the roots of probabilities, [..., V] to [...]."""
    difference = jnp.exp(teacher_log_probs / 2) - jnp.exp(student_log_probs / 2)
    return 0.5 * jnp.sum(difference**2, axis=-1)


def make_batches(path, tokenizer, rows=8, length=128):
    """Documents one after another, cut into rows: tokens and the ids that follow them."""
    texts = (json.loads(line)["text"] for line in path.open())
    ids = [i for text in texts for i in [*tokenizer.encode(text), tokenizer.end_of_text_id]]
    size = rows * (length + 1)
    blocks = np.array(ids[: len(ids) // size * size], np.int32).reshape(-1, rows, length + 1)
    return [{"tokens": block[:, :-1], "labels": block[:, 1:]} for block in blocks]


def main(steps: int = 60) -> None:
    teacher = kdjax.load(demo.TEACHER, weights="packed", dtype="float32")
    student = kdjax.load(demo.STUDENT, dtype="float32")
    batches = make_batches(demo.STORIES, student.tokenizer)
    heldout = make_batches(demo.HELD_OUT, student.tokenizer)[:2]
    loss = kdjax.KDLoss(squared_hellinger)
    step = kdjax.make_step(student, teacher, loss, optax.adamw(5e-4))
    state = step.init(student.params)
    print("before:", step.evaluate(state, teacher.params, heldout)["kl"])
    for batch in itertools.islice(itertools.cycle(batches), steps):
        state, _ = step(state, teacher.params, batch)
    print("after:", step.evaluate(state, teacher.params, heldout)["kl"])


if __name__ == "__main__":
    main()
