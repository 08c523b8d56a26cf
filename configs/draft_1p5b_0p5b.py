"""A draft for Qwen2.5-Coder 1.5B: the 0.5B, for what speculative decoding keeps of its tokens.

    kdjax train --config=draft_1p5b_0p5b --config.data.train=answers.jsonl

The text is the teacher's own, for a draft reads no other: give what it wrote (`kdjax answers
--prompts`), best what these steps read once, 40 million tokens. With 26 million, all at T = 1, and
`--config.student.quantize=q4_0`, 2,818 steps in 12 minutes of an H100 had 17 to 24% fewer drafts
rejected by llama.cpp at T = 1, in files of packages that it had not read. Seven tenths of the loss
are total variation, whose gradient is the acceptance's, three the forward KL.
`--config.student.layers=0,1,2,3,20,21,22,23` keeps a third of the layers, and wants
`--config.optim.learning_rate=3e-4`. docs/drafts.md has the whole path; `:tiny` as in
configs/qwen7b_0p5b.py.
"""

from kdjax.config import Config, tiny
from kdjax.errors import UserError

_TEACHER = "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
_STUDENT = "hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
_RANDOM = "in a clone of kdjax: python3 -m scripts.bench.random_gguf"

# What brings the files of `:tiny`.
DOWNLOADS = {
    "runs/tiny/teacher.gguf": f"{_RANDOM} --shape=tiny-teacher --out=runs/tiny/teacher.gguf",
    "runs/tiny/student.gguf": f"{_RANDOM} --shape=tiny-student --out=runs/tiny/student.gguf",
}


def get_config(kind: str = "") -> Config:
    """The run, or with kind "tiny" its small double."""
    if kind not in ("", "tiny"):
        raise UserError(f"configs/draft_1p5b_0p5b.py:{kind}: no such kind; expected 'tiny'.")
    config = Config()
    config.teacher.path = _TEACHER
    config.student.path = _STUDENT
    config.data.train = "python:stdlib,jax,flax,transformers"
    config.data.heldout = "python:optax,orbax"
    config.data.seq_len = 1024
    config.loss.divergence = "0.3*forward_kl+0.7*total_variation"
    config.loss.temperature, config.loss.alpha = 1.0, 0.0
    config.optim.learning_rate, config.optim.final_learning_rate = 2e-5, 0.0
    config.optim.warmup_steps = 30
    config.train.steps, config.train.batch_size = 2456, 16
    return tiny(config) if kind else config
