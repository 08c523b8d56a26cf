"""Qwen2.5-Coder 1.5B (Q4_K_M GGUF) into 0.5B by the student's own answers.

    python -m scripts.corpus.prompts runs/prompts --read=python:stdlib,jax,flax,transformers \
        --benchmark=HumanEval.jsonl.gz --benchmark=mbpp.jsonl
    python -m kdjax.main --config=configs/onpolicy_1p5b_0p5b.py

Every row is the student's own answers to those prompts, a new round every 6 steps; reverse KL. One
run with such prompts (2,716, one seed, one H200) took the held-out KL from 0.309 to 0.296
and HumanEval from 53.8% to 56.1% by kdjax's wording; by another wording and Transformers as the
writer it solved 92 of 164 before and after. The setting with 11,279 prompts of 47 packages had
58.2% (250 s, three seeds), where text for as many seconds had 55.6%:
docs/records/2026-11-23-own-answers.md, also of fourteen variations. By three wordings 250 s of
three seeds gained 0.2 points of HumanEval (-4.0 to 4.4) and 2.1 of MBPP (0.2 to 4.1):
docs/records/2026-11-26-arms-seeds-h200.md. The run warns that half of round 0's answers are cut off
at 320 tokens: with 640 it gained the same (docs/records/2026-11-26-own-rank64-h200.md). `:tiny` is
its small double on random models, with text for prompts.
"""

from kdjax.config import Config, tiny
from kdjax.errors import UserError

_TEACHER = "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
_STUDENT = "hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
_RANDOM = "in a clone of kdjax: python3 -m scripts.bench.random_gguf"
_PROMPTS = "in a clone of kdjax: python3 -m scripts.corpus.prompts runs/prompts"

# What brings the files that are not of the Hub.
DOWNLOADS = {
    "runs/prompts/prompts.jsonl": f"{_PROMPTS} --read=python:stdlib,jax,flax,transformers",
    "runs/tiny/teacher.gguf": f"{_RANDOM} --shape=tiny-teacher --out=runs/tiny/teacher.gguf",
    "runs/tiny/student.gguf": f"{_RANDOM} --shape=tiny-student --out=runs/tiny/student.gguf",
}


def get_config(kind: str = "") -> Config:
    """The run, or with kind "tiny" its small double."""
    if kind not in ("", "tiny"):
        raise UserError(f"configs/onpolicy_1p5b_0p5b.py:{kind}: no such kind; expected 'tiny'.")
    config = Config()
    config.teacher.path, config.student.path = _TEACHER, _STUDENT
    config.data.train = "python:stdlib,jax,flax,transformers"
    config.data.heldout = "python:optax,orbax"
    config.data.seq_len = 1024
    config.loss.temperature, config.loss.alpha = 1.0, 0.0
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
