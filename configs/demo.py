"""The demo: a student of 2.4 M parameters learns Python from the teacher that kdjax ships.

    python -m kdjax.main --config=configs/demo.py

Nothing is downloaded: the teacher is kdjax/demo/teacher.gguf (its card is beside it), the text this
machine's own standard library, and the held-out text modules of it that neither model has seen.
`:baseline` after the file name trains the same student on the same rows without the teacher, which
then runs in evaluations only; scripts/demo/compare.py runs both.

A minute and a half on 2 CPU cores, 2,300 tokens/s, 1.1 GB. Held-out cross-entropy goes from 8.33
to about 5.39 nats a token, of the baseline to 5.69; the teacher has 2.58. docs/results.md says what
was tried to choose the settings.
"""

from kdjax import demo
from kdjax.config import Config
from kdjax.errors import UserError


def get_config(kind: str = "") -> Config:
    """The run, or with kind "baseline" the same without a teacher in the loss."""
    if kind not in ("", "baseline"):
        raise UserError(f"configs/demo.py:{kind}: no such kind; expected 'baseline'.")
    config = Config()
    config.teacher.path, config.teacher.param_dtype = str(demo.TEACHER), "float32"
    config.student.path, config.student.init = str(demo.STUDENT), "random"
    config.student.remat = "none"
    config.data.train, config.data.heldout = demo.training_text(), demo.heldout_text()
    config.data.seq_len, config.data.max_segments = 128, 8
    config.loss.temperature, config.loss.chunk_tokens = 1.0, 512
    config.loss.alpha = 1.0 if kind else 0.2
    config.optim.learning_rate = 1e-3 if kind else 2e-3  # the best that was tried for each
    config.optim.final_learning_rate = 2e-4
    config.optim.warmup_steps, config.optim.weight_decay = 20, 0.1
    config.train.steps, config.train.batch_size = 600, 2
    config.train.compute_dtype = "float32"
    config.eval.every, config.eval.rows = 150, 80
    config.checkpoint.every, config.log.every, config.log.tensorboard = 0, 50, False
    return config
