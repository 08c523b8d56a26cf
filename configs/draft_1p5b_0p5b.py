"""A draft for Qwen2.5-Coder 1.5B: the 0.5B, trained for what speculative decoding accepts.

    kdjax train --config=draft_1p5b_0p5b --config.data.train=answers.jsonl

The text is the teacher's own (`kdjax answers --prompts`), best 40 million tokens, read once. With
26 million and `--config.student.quantize=q4_0`, 12 minutes of an H100: 20.7% (16.9 to 24.3) fewer
drafts rejected by llama.cpp at T = 1 (docs/records/2026-11-26-draft-read-twice-h100.md;
docs/drafts.md). Seven tenths of the loss are total variation, whose gradient is the acceptance's.
`:tiny`: a double on random models, for a laptop.
"""

from kdjax.config import Config
from kdjax.recipes import check_kind, coder_pair, tiny


def get_config(kind: str = "") -> Config:
    """The run, or with kind "tiny" its small double."""
    check_kind("draft_1p5b_0p5b", kind, "tiny")
    config = coder_pair("1.5B")
    config.loss.divergence = "0.3*forward_kl+0.7*total_variation"
    config.optim.learning_rate, config.optim.final_learning_rate = 2e-5, 0.0
    config.optim.warmup_steps = 30
    config.train.steps, config.train.batch_size = 2456, 16
    return tiny(config) if kind else config
