"""The student that the demo begins with: a small Qwen2 model that has read a few stories.

    bash scripts/demo/make_student.sh CORPUS OUT

calls this config and exports its result; text, steps, time and figures of the model that kdjax
ships are in its card, kdjax/demo/student.md. No teacher takes part, and none of the demo's own
stories is read. By hand, with your text:

    kdjax train --config=demo_student --workdir=runs/demo_student \
      --config.data.train=FILES --config.data.heldout=FILES
"""

from kdjax import demo
from kdjax.config import Config


def get_config() -> Config:
    """A run without a teacher: `loss.alpha=1`, `student.init=random`."""
    config = Config()
    config.student.path, config.student.init = str(demo.STUDENT_SHAPE), "random"
    config.student.remat = "none"
    config.data.train, config.data.heldout = str(demo.STORIES), str(demo.HELD_OUT)
    config.data.seq_len, config.data.max_segments = 256, 16
    config.loss.alpha, config.loss.chunk_tokens = 1.0, 1024
    config.optim.learning_rate, config.optim.final_learning_rate = 2e-3, 2e-4
    config.optim.warmup_steps, config.optim.weight_decay = 30, 0.1
    config.train.steps, config.train.batch_size = 120, 4
    config.train.compute_dtype = "float32"
    config.eval.every, config.eval.rows = 60, 40
    config.checkpoint.every, config.checkpoint.keep = 0, 1
    config.log.every, config.log.tensorboard = 20, False
    return config
