"""A GGUF file to the same model, smaller: it trains, rounded, to say what it said before.

    kdjax train --config=requantize:q3_k_m --workdir=runs/q3 --config.student.path=model.gguf
    kdjax export runs/q3 --format=gguf --out=model-q3_k_m.gguf

After the file name the type: a recipe of the exporter, or types by name, such as `blocks=Q2_K`. The
teacher is the file itself, its numbers before they are rounded. The text is the Python of installed
packages: name text of the kind that the model is for. Scales are fitted once, at the start. The
rate suits what is to be mended: types of two bits lose much and take 2e-5, others 1e-5
(docs/rounding.md).
"""

from kdjax.config import SELF, Config

TWO_BITS, DEFAULT_RATE = 2e-5, 1e-5


def get_config(kind: str = "q4_0") -> Config:
    """The run of a type."""
    config = Config()
    config.teacher.path = SELF
    config.student.path = "model.gguf"
    config.student.quantize = kind
    config.data.train = "python:jax,flax,optax,numpy"
    config.loss.temperature, config.loss.alpha = 1.0, 0.0
    config.optim.learning_rate = TWO_BITS if "q2_k" in kind.lower() else DEFAULT_RATE
    config.optim.final_learning_rate = 0.0
    config.train.steps = 600
    config.eval.every = config.checkpoint.every = 200
    return config
