"""Qwen2.5-Coder 1.5B (Q4_K_M GGUF) into 0.5B: T = 1, alpha = 0, 1e-5, what measures best so far.

    python -m kdjax.main --config=configs/qwen1p5b_0p5b.py

Text, `:tiny` and the comparison with T = 4, alpha = 0.3, 1.5e-5: as in configs/qwen7b_0p5b.py.
One H200 takes 6 minutes. On Python of 745 packages and conversations made from it (24.6 M
positions) the KL on 14 other packages went from 0.341 to 0.235, top-1 agreement from 0.807 to
0.843, HumanEval from 52.6% to 59.6%; MBPP stayed within noise. Other temperatures, divergences and
rates end farther away: docs/records/2026-11-22-1p5b-run-to-use.md.

`:lora` trains adapters of rank 64 at 1e-4 in place of the student: what solves most. In 250 s, 899
steps of an H100 or 996 of an H200, three seeds gained 5.1 points of HumanEval (0.8 to 9.6) and 2.1
of MBPP (0.1 to 4.1) as means over three wordings: docs/records/2026-11-26-rank64-seeds-h100.md.
As it stands, 1,143 steps or 287 s of an H200, seed 1 gained 4.7 and 1.9, and docs/lora_files.md
makes its Q4_K_M file without loss: docs/records/2026-11-26-rank64-file-h200.md.
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
    """The run, with kind "lora" that of adapters, with kind "tiny" its small double."""
    if kind not in ("", "lora", "tiny"):
        raise UserError(
            f"configs/qwen1p5b_0p5b.py:{kind}: no such kind; expected 'lora' or 'tiny'."
        )
    config = Config()
    config.teacher.path = _TEACHER
    config.student.path = _STUDENT
    config.data.train = "python:stdlib,jax,flax,transformers"
    config.data.heldout = "python:optax,orbax"
    config.data.seq_len = 1024
    config.loss.temperature, config.loss.alpha = 1.0, 0.0
    config.optim.learning_rate, config.optim.final_learning_rate = 1e-5, 1e-6
    config.optim.warmup_steps = 50
    config.train.steps, config.train.batch_size = 1500, 16
    if kind == "lora":
        config.student.lora.rank, config.student.lora.learning_rate = 64, 1e-4
        config.optim.warmup_steps, config.train.steps = 10, 1143
    return tiny(config) if kind == "tiny" else config
