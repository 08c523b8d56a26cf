"""A complete run of a pair: plan, checkpoints, held-out figures, receipt; then a file."""

from pathlib import Path

import kdjax
from kdjax import demo


def make_config(steps: int) -> kdjax.Config:
    """Replace the paths by those of your pair and text; docs/settings.md lists every field."""
    config = kdjax.Config()
    config.teacher.path, config.teacher.weights = str(demo.TEACHER), "packed"
    config.student.path = str(demo.STUDENT)
    config.data.train, config.data.heldout = str(demo.STORIES), str(demo.HELD_OUT)
    config.data.seq_len = 128
    config.optim.learning_rate, config.optim.final_learning_rate = 2e-3, 1e-4
    config.optim.warmup_steps = min(20, steps // 2)
    config.train.steps, config.train.batch_size = steps, 8
    config.train.compute_dtype = config.teacher.param_dtype = "float32"
    config.eval.every, config.eval.rows, config.eval.samples = steps, 16, 1
    config.log.tensorboard = False
    return config


def main(out: str = "runs/pair", steps: int = 100) -> None:
    workdir = Path(out)
    kdjax.distill(make_config(steps), workdir)  # called again, it goes on where it was stopped
    student = kdjax.load(workdir, dtype="float32")  # the best checkpoint
    print(student.generate("Once upon a time", max_tokens=40)[0].text)
    print(kdjax.export_gguf(student, workdir / "student-q8_0.gguf", dtype="q8_0", overwrite=True))


if __name__ == "__main__":
    main()
