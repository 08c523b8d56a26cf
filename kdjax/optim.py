"""Schedule, decay mask and the optax chain."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class OptimSpec:
    """AdamW with linear warmup and cosine decay; steps are optimizer steps."""

    learning_rate: float
    final_learning_rate: float
    warmup_steps: int
    total_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip_norm: float  # global gradient norm; 0 turns clipping off


def schedule(spec: OptimSpec) -> optax.Schedule:
    """Learning rate by step: linear from 0 over the warmup, then cosine to the final rate.

    The first step already moves: step 0 uses learning_rate / (warmup_steps + 1).
    """
    decay = max(spec.total_steps - spec.warmup_steps, 1)

    def rate(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32)
        warm = (step + 1) / (spec.warmup_steps + 1)
        progress = jnp.clip((step - spec.warmup_steps) / decay, 0.0, 1.0)
        span = spec.learning_rate - spec.final_learning_rate
        cosine = spec.final_learning_rate + span * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return jnp.where(step < spec.warmup_steps, spec.learning_rate * warm, cosine)

    return rate


def decay_mask(params: Any) -> Any:
    """True for matrices, False for norms and biases; by name, for stacked ones are all 2-d."""

    def matrix(path: tuple[Any, ...], _: Any) -> bool:
        keys = [key.key for key in path]
        return keys[-1] != "bias" and not any("norm" in key for key in keys)

    return jax.tree_util.tree_map_with_path(matrix, params)


def optimizer(spec: OptimSpec) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW with decoupled, masked decay; moments are float32."""
    chain = [optax.clip_by_global_norm(spec.clip_norm)] if spec.clip_norm else []
    adamw = optax.adamw(
        schedule(spec),
        b1=spec.beta1,
        b2=spec.beta2,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        mask=decay_mask,
    )
    return optax.chain(*chain, adamw)
