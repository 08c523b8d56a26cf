"""The demo's teacher, from nothing: a Qwen2 model that learns to write stories in simple English.

    bash scripts/demo/make_teacher.sh CORPUS OUT

calls this config and exports its result; text, steps, time and figures of the model that kdjax
ships are in its card, kdjax/demo/teacher.md. By hand, with your text:

    kdjax train --config=demo_teacher --workdir=runs/demo_teacher \
      --config.data.train=FILES --config.data.heldout=FILES
"""

from kdjax import demo
from kdjax.config import Config


def get_config() -> Config:
    """A run without a teacher: `loss.alpha=1`, `student.init=random`."""
    config = Config()
    config.student.path, config.student.init = str(demo.TEACHER_SHAPE), "random"
    config.student.remat = "none"
    config.data.tokenizer = str(demo.STUDENT_SHAPE)
    config.data.train, config.data.heldout = str(demo.STORIES), str(demo.HELD_OUT)
    config.data.seq_len, config.data.max_segments = 256, 16
    config.loss.alpha, config.loss.chunk_tokens = 1.0, 32_768
    config.optim.learning_rate, config.optim.final_learning_rate = 2e-3, 2e-5
    config.optim.warmup_steps, config.optim.weight_decay = 60, 0.1
    config.train.steps, config.train.batch_size = 320, 128
    config.eval.every, config.eval.rows, config.eval.batch_size = 80, 0, 64
    config.checkpoint.every, config.checkpoint.keep = 0, 1
    config.log.every = 40
    return config
