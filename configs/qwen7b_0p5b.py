"""Qwen2.5-Coder 7B (Q4_K_M GGUF) into 0.5B, on one GPU.

    kdjax train --config=qwen7b_0p5b --workdir=runs/a

Models (about 5 GB) come from the Hugging Face Hub unless models/ has them; the text is the Python
of installed packages. The rates are those of the 1.5B; this pair has not been trained to its end:
500 of the 50,000 steps took 2 min 53 s of an H200 (docs/records/2026-11-22-7b-shape-500-steps.md).
`:reference` is the plan of aprender, T = 4, alpha = 0.3, 1.5e-5 to 5e-7: it gains less
(docs/records/2026-11-22-1p5b-run-to-use.md). `:tiny`: the reference on random models, for a
laptop.
"""

from kdjax.config import Config
from kdjax.recipes import check_kind, coder_pair, tiny


def get_config(kind: str = "") -> Config:
    """The run; of kind "reference" as aprender planned it, of kind "tiny" its small double."""
    check_kind("qwen7b_0p5b", kind, "reference", "tiny")
    config = coder_pair("7B")
    config.data.seq_len = 512
    config.optim.learning_rate, config.optim.final_learning_rate = 1e-5, 1e-6
    config.optim.warmup_steps = 50
    config.train.steps, config.train.batch_size = 50_000, 16
    config.eval.every, config.checkpoint.every = 1000, 1000
    if kind:
        config.loss.temperature, config.loss.alpha = 4.0, 0.3
        config.optim.learning_rate, config.optim.final_learning_rate = 1.5e-5, 5e-7
        config.optim.warmup_steps = 20
    return tiny(config) if kind == "tiny" else config
