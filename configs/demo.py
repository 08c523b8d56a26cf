"""The demo: a small student that has read a few stories learns to write them from kdjax's teacher.

    kdjax train --config=demo

Nothing is downloaded: teacher, student, stories and held-out stories are in kdjax/demo/, where the
models' cards say how all of it was made. After the file name `:baseline` trains the same student on
the same rows without the teacher, which then runs in evaluations only; `:random` begins with random
weights, and `:random_baseline` does without the teacher. scripts/demo/compare.py runs pairs.
`:q4_0` trains what a file of Q4_0 blocks holds (docs/rounding.md).
`:onpolicy` trains on half stories, half answers that the student writes (docs/onpolicy.md).

Held-out KL from the teacher goes from 1.85 to 0.75 nats a token, and each evaluation is better than
the one before. docs/records/2026-11-28-demo-stories.md has other models and settings.
"""

from typing import NamedTuple

from kdjax import demo
from kdjax.config import Config
from kdjax.recipes import check_kind

SUITS_CPU = True  # a GPU that JAX does not use is said, and no error


class Kind(NamedTuple):
    """Settings in which the kinds differ; the rates are the best that were tried for each."""

    init: str
    alpha: float
    learning_rate: float
    final_learning_rate: float
    steps: int
    rows: int  # a step


KINDS = {
    "": Kind("checkpoint", 0.0, 2e-3, 1e-4, 470, 4),
    "baseline": Kind("checkpoint", 1.0, 1e-3, 5e-5, 470, 4),
    "onpolicy": Kind("checkpoint", 0.0, 2e-3, 1e-4, 240, 4),
    "random": Kind("random", 0.2, 2e-3, 2e-4, 600, 2),
    "random_baseline": Kind("random", 1.0, 1e-3, 2e-4, 600, 2),
    "q4_0": Kind("checkpoint", 0.0, 2e-3, 1e-4, 470, 4),
}


def get_config(kind: str = "") -> Config:
    """The run of a kind of `KINDS`."""
    check_kind("demo", kind, *filter(None, KINDS))
    chosen = KINDS[kind]
    config = Config()
    config.teacher.path, config.teacher.param_dtype = str(demo.TEACHER), "float32"
    config.student.path, config.student.init = str(demo.STUDENT), chosen.init
    config.student.remat = "none"
    config.data.train, config.data.heldout = str(demo.STORIES), str(demo.HELD_OUT)
    config.data.seq_len, config.data.max_segments = 128, 8
    config.loss.temperature, config.loss.chunk_tokens = 1.0, 512
    config.loss.alpha = chosen.alpha
    config.optim.learning_rate = chosen.learning_rate
    config.optim.final_learning_rate = chosen.final_learning_rate
    config.optim.warmup_steps, config.optim.weight_decay = 20, 0.1
    config.train.steps, config.train.batch_size = chosen.steps, chosen.rows
    config.train.compute_dtype = "float32"
    config.eval.every, config.eval.rows = chosen.steps // 4, 80
    config.checkpoint.every, config.log.every, config.log.tensorboard = 0, 50, False
    if kind == "q4_0":
        config.student.quantize = kind
    if kind == "onpolicy":
        config.rollout.prompts = str(demo.STORIES)
        config.rollout.share, config.rollout.every = 0.5, 40
        config.rollout.prompt_tokens, config.rollout.max_tokens = 16, 48
        config.rollout.batch_size = 192
    return config
