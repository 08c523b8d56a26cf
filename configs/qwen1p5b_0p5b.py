"""Qwen2.5-Coder 1.5B (Q4_K_M GGUF) into 0.5B: T = 1, alpha = 0, 1e-5, what measures best so far.

    kdjax train --config=qwen1p5b_0p5b:lora --workdir=runs/a

`:lora`, adapters of rank 64 at 1e-4, solves most: 250 s of an H100, three seeds, three wordings:
HumanEval +5.1 points (0.8 to 9.6), MBPP +2.1 (0.1 to 4.1)
(docs/records/2026-11-26-rank64-seeds-h100.md; docs/lora.md). The entire student, 6 minutes of an
H200: held-out KL 0.341 to 0.235 (docs/records/2026-11-22-1p5b-run-to-use.md). `:tiny`: a double on
random models.
"""

from kdjax.config import Config
from kdjax.recipes import check_kind, coder_pair, tiny


def get_config(kind: str = "") -> Config:
    """The run, with kind "lora" that of adapters, with kind "tiny" its small double."""
    check_kind("qwen1p5b_0p5b", kind, "lora", "tiny")
    config = coder_pair("1.5B")
    config.optim.learning_rate, config.optim.final_learning_rate = 1e-5, 1e-6
    config.optim.warmup_steps = 50
    config.train.steps, config.train.batch_size = 1500, 16
    if kind == "lora":
        config.student.lora.rank, config.student.lora.learning_rate = 64, 1e-4
        config.optim.warmup_steps, config.train.steps = 10, 1143
    return tiny(config) if kind == "tiny" else config
