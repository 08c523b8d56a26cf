"""The k largest logits of each position, and log-probabilities renormalised over them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_GROUP = 16  # ids whose largest logit is compared first: sorting 151,936 numbers a position is slow


def top_k(logits: Float[Array, "*B V"], k: int) -> tuple[Float[Array, "*B K"], Int[Array, "*B K"]]:
    """The k largest and their ids, as `jax.lax.top_k`: largest first, of equal ones the lower id.

    The k largest lie in the k groups of the largest maxima, so only these are sorted.
    """
    width = logits.shape[-1]
    if k * _GROUP >= width:
        values, ids = jax.lax.top_k(logits, k)
        return values, ids
    pad = ((0, 0),) * (logits.ndim - 1) + ((0, -width % _GROUP),)
    groups = jnp.pad(logits, pad, constant_values=-jnp.inf)
    groups = groups.reshape(*logits.shape[:-1], -1, _GROUP)
    which = jnp.sort(jax.lax.top_k(jnp.max(groups, axis=-1), k)[1], axis=-1)  # lower ids first
    candidates = jnp.take_along_axis(groups, which[..., None], axis=-2)
    values, at = jax.lax.top_k(candidates.reshape(*logits.shape[:-1], -1), k)
    return values, jnp.take_along_axis(which, at // _GROUP, axis=-1) * _GROUP + at % _GROUP


def keep_top_k(log_probs: Float[Array, "*B V"], count: int) -> Float[Array, "*B V"]:
    """Log-probabilities over the `count` largest alone; minus infinity for all others.

    Ids that tie with the last of them are included.
    """
    largest, _ = top_k(log_probs, min(count, log_probs.shape[-1]))
    return jax.nn.log_softmax(jnp.where(log_probs >= largest[..., -1:], log_probs, -jnp.inf))
