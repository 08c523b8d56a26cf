"""Parts that shipped configs share: the published pair, its small double, the check of a kind."""

from kdjax.config import Config
from kdjax.errors import UserError

_CODER = "hf:Qwen/Qwen2.5-Coder-{}-Instruct-GGUF/qwen2.5-coder-{}-instruct-q4_k_m.gguf"
_RANDOM = "in a clone of kdjax: python3 -m scripts.bench.random_gguf"

# What makes the files of `tiny`; a config's own `DOWNLOADS` have what makes others.
DOWNLOADS = {
    f"runs/tiny/{side}.gguf": f"{_RANDOM} --shape=tiny-{side} --out=runs/tiny/{side}.gguf"
    for side in ("teacher", "student")
}


def check_kind(name: str, kind: str, *kinds: str) -> None:
    """Raises `UserError` for a kind, the word after a config's name and a colon, that it lacks."""
    if kind and kind not in kinds:
        expected = ", ".join(map(repr, kinds))
        one = "one of " if len(kinds) > 1 else ""
        raise UserError(f"configs/{name}.py:{kind}: no such kind; expected {one}{expected}.")


def coder_pair(teacher: str) -> Config:
    """Qwen2.5-Coder of a size, "1.5B" or "7B", into 0.5B; the text is Python of packages.

    Both are the published Q4_K_M files of the Hugging Face Hub, or files of these names in models/.
    """
    config = Config()
    config.teacher.path = _CODER.format(teacher, teacher.lower())
    config.student.path = _CODER.format("0.5B", "0.5b")
    config.data.train = "python:stdlib,jax,flax,transformers"
    config.data.heldout = "python:optax,orbax"
    config.data.seq_len = 1024
    return config


def tiny(config: Config) -> Config:
    """Shrinks any config to one that runs on a laptop in a minute, with all of its parts.

    Its models are random ones of scripts/bench/random_gguf.py; they learn nothing useful.
    """
    config.teacher.path = "runs/tiny/teacher.gguf"
    config.student.path = "runs/tiny/student.gguf"
    config.data.train, config.data.heldout = "kdjax,tests", ""
    config.data.heldout_fraction = 0.2
    config.data.seq_len, config.data.cache_dir = 64, "runs/tiny/rows"
    config.loss.chunk_tokens = 128
    config.optim.learning_rate, config.optim.warmup_steps = 1e-3, 2
    config.train.steps, config.train.batch_size, config.train.microbatches = 20, 8, 2
    config.train.compute_dtype = "float32"
    config.eval.every, config.eval.rows = 10, 8
    config.checkpoint.every, config.log.every = 10, 1
    return config
