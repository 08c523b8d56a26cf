"""Qwen2.5-Coder 1.5B into 0.5B by the student's own answers (on-policy, reverse KL).

    python -m scripts.corpus.prompts runs/prompts --read=python:stdlib,jax,flax,transformers \
        --benchmark=HumanEval.jsonl.gz --benchmark=mbpp.jsonl
    kdjax train --config=onpolicy_1p5b_0p5b

A new round of answers every 6 steps. Three seeds of 250 s, three wordings: HumanEval 0.2 points
(-4.0 to 4.4), MBPP 2.1 (0.2 to 4.1), so less than `qwen1p5b_0p5b:lora` has from text
(docs/records/2026-11-26-arms-seeds-h200.md; docs/onpolicy.md). `:tiny`: a double on random models.
"""

from kdjax.config import Config
from kdjax.recipes import check_kind, coder_pair, tiny

_PROMPTS = "in a clone of kdjax: python3 -m scripts.corpus.prompts runs/prompts"

# What makes the prompts.
DOWNLOADS = {
    "runs/prompts/prompts.jsonl": f"{_PROMPTS} --read=python:stdlib,jax,flax,transformers",
}


def get_config(kind: str = "") -> Config:
    """The run, or with kind "tiny" its small double."""
    check_kind("onpolicy_1p5b_0p5b", kind, "tiny")
    config = coder_pair("1.5B")
    config.loss.divergence = "reverse_kl"
    config.optim.learning_rate, config.optim.final_learning_rate = 5e-6, 5e-7
    config.optim.warmup_steps = 10
    config.train.steps, config.train.batch_size, config.train.microbatches = 266, 48, 3
    config.rollout.prompts, config.rollout.share = "runs/prompts/prompts.jsonl", 1.0
    config.rollout.every, config.rollout.max_tokens = 6, 320
    config.rollout.prompt_tokens = 256
    if not kind:
        return config
    config = tiny(config)
    config.rollout.prompts = config.data.train
    config.rollout.max_tokens, config.rollout.prompt_tokens = 16, 32
    config.rollout.batch_size = 16
    return config
