"""A teacher whose figures can be computed by hand."""

import dataclasses

import jax
import jax.numpy as jnp

from kdjax.models.model import Model


@dataclasses.dataclass(frozen=True)
class _NextId:
    vocab_size: int
    logit: float

    def hidden(self, params, tokens, segment_ids, positions):
        return self.logit * jax.nn.one_hot(tokens, self.vocab_size, dtype=jnp.float32)

    def head(self, params):
        return params["head"]

    stored_head = head


def next_id_teacher(vocab_size, logit=10.0):
    """After id i it gives `logit` to id i + 1 (the last wraps), 0 to others; it sees one token."""
    head = jnp.roll(jnp.eye(vocab_size, dtype=jnp.float32), 1, axis=0)
    return Model(_NextId(vocab_size, logit), {"head": head}, vocab_size, "next id")
