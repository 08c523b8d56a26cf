"""Schedule, decay mask, the optax chain, and moments kept in bfloat16."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, BFloat16, Float, UInt16, UInt32

from kdjax.config import OptimConfig
from kdjax.models.arch import STACKS


def schedule(config: OptimConfig, steps: int, after: int = 0) -> optax.Schedule:
    """Learning rate by optimizer step: linear warmup from 0, then cosine to the final rate.

    The first step already moves: step 0 uses learning_rate / (warmup_steps + 1). A run that
    continues `after` N steps begins the schedule there, and ends at `steps`.
    """
    warmup, peak, final = config.warmup_steps, config.learning_rate, config.final_learning_rate
    decay = max(steps - after - warmup, 1)

    def rate(step: jax.typing.ArrayLike) -> Array:
        step = jnp.asarray(step, jnp.float32) - after
        progress = jnp.clip((step - warmup) / decay, 0.0, 1.0)
        cosine = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return jnp.where(step < warmup, peak * ((step + 1) / (warmup + 1)), cosine)

    return rate


# Rates at which a delta layer forgets, A_log and dt_bias: towards 0 means another memory, not a
# smaller model. Its authors leave them out of weight decay, and decay its convolution and gates
# (`_no_weight_decay` of flash-linear-attention's GatedDeltaNet and of Mamba 2; Megatron-LM leaves
# out all that have one axis).
RATES = ("log_rate", "shift")


def decay_mask(params: optax.Params) -> optax.Params:
    """True for matrices and convolutions, False for norms, biases and `RATES`.

    By name, since stacked ones are all 2-d.
    """

    def matrix(path: tuple[Any, ...], _: Any) -> bool:
        keys = [str(key.key) for key in path]  # keys of an `nnx.List` are numbers
        return keys[-1] not in ("bias", *RATES) and not any("norm" in key for key in keys)

    return jax.tree_util.tree_map_with_path(matrix, params)


def list_undecayed(config: OptimConfig, params: optax.Params) -> list[str]:
    """Names of `RATES` among these parameters, if they would decay but for `decay_mask`."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    last = {str(getattr(path[-1], "key", "")) for path, _ in paths}
    return [name for name in RATES if name in last and config.weight_decay]


def optimizer(config: OptimConfig, steps: int, after: int = 0) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW or Muon with decoupled, masked decay, in float32.

    `schedule` is the learning rate.
    """
    chain = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    if config.moment_dtype == "bfloat16":
        adam = bfloat16_moments(adam)
    adamw = optax.chain(  # the parts of optax.adamw, so that the first can be replaced
        adam if config.name == "adamw" else _muon(config, adam),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(schedule(config, steps, after)),
    )
    return optax.chain(*chain, adamw)


def _muon(config: OptimConfig, adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for the layers' matrices, `adam` for everything else.

    Each matrix of a stack is orthogonalized by itself. Updates are scaled to AdamW's root mean
    square of 0.2, so that a learning rate and a decay for AdamW serve both (Liu et al. 2025,
    arXiv:2502.16982).
    """

    def matrices(tree: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), tree)

    def scale(updates: optax.Updates, _: Any) -> optax.Updates:
        return jax.tree.map(lambda x: 0.2 * math.sqrt(max(x.shape[-2:])) * x, updates)

    muon = optax.contrib.scale_by_muon(beta=config.beta1, weight_dimension_numbers=matrices)
    if config.moment_dtype == "bfloat16":
        muon = bfloat16_moments(muon)
    transforms: dict[Any, Any] = {"muon": optax.chain(muon, optax.stateless(scale)), "adam": adam}
    return optax.partition(transforms, _choose_muon)


def _choose_muon(params: optax.Params) -> optax.Params:
    """Chooses each parameter's optimizer: "muon" for layers' matrices except convolutions."""

    def choose(path: tuple[Any, ...], x: Any, decayed: bool) -> str:
        keys = [str(key.key) for key in path]
        inside = keys[0] in STACKS and x.ndim >= 3 and not any("conv" in key for key in keys)
        return "muon" if decayed and inside else "adam"

    return jax.tree_util.tree_map_with_path(choose, params, decay_mask(params))


def bfloat16_moments(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx`, float32 `scale_by_adam` or `scale_by_muon`, its moments stored in half the memory.

    Stored by stochastic rounding. Rounded to nearest, a second moment would never fall: with
    beta2 = 0.999 it falls by at most 0.1% a step, less than half of bfloat16's spacing of 0.4% to
    0.8%. Which numbers round up depends only on the step and the position in the global array: a
    resumed run and any mesh round alike.
    """

    def moments(state: Any) -> Any:
        return {name: getattr(state, name) for name in ("mu", "nu") if hasattr(state, name)}

    def init(params: optax.Params) -> optax.OptState:
        state: Any = tx.init(params)
        halved: Any = optax.tree.cast(moments(state), jnp.bfloat16)
        return state._replace(**halved)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        widened: Any = optax.tree.cast(moments(state), jnp.float32)
        full = state._replace(**widened)
        done: tuple[Any, Any] = tx.update(updates, full, params)
        updates, after = done
        leaves, treedef = jax.tree.flatten(moments(after))
        rounded = [
            # Each leaf of each moment has a different seed in every step.
            stochastic_bfloat16(x, noise(x.shape, state.count * len(leaves) + i))
            for i, x in enumerate(leaves)
        ]
        return updates, after._replace(**jax.tree.unflatten(treedef, rounded))

    return optax.GradientTransformation(init, update)


def stochastic_bfloat16(
    x: Float[Array, "*shape"], bits: UInt16[Array, "*shape"]
) -> BFloat16[Array, "*shape"]:
    """Rounds float32 to a neighbour in bfloat16: up in size if the lost bits + `bits` carry.

    With uniform `bits` the expected result is exactly x, up to the largest bfloat16. Numbers of
    bfloat16 stay as they are, and so do infinities and NaN.
    """
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    high = (words >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(high, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def noise(shape: tuple[int, ...], seed: jax.typing.ArrayLike) -> UInt16[Array, "..."]:
    """Uniform 16 bits by position and seed: a hash, which fuses into its consumer.

    On GPUs `jax.random` is a separate kernel, whose counters and bits would take 16 bytes for each
    number of the student's largest tensors.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(int(np.prod(shape[axis + 1 :], dtype=np.int64)) & 0xFFFFFFFF)
        index += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return (_mix_bits(index ^ _mix_bits(jnp.asarray(seed, jnp.uint32))) >> 16).astype(jnp.uint16)


def _mix_bits(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A permutation of 32-bit numbers without visible pattern.

    lowbias32 of Wellons 2018, https://nullprogram.com/blog/2018/07/31/.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
