"""Two forms of one model: whether two files hold one, and what one bit of a weight is worth.

The cost of one bit less a weight is the yardstick for another form's cost;
`scripts/checks/fewer_bits.py` writes such a file.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from kdjax.evaluation.health.probes import probe_ids
from kdjax.evaluation.heldout import position_values, shared_spec
from kdjax.evaluation.target import Target
from kdjax.formats.blocks import BLOCKS, BlockType, decode
from kdjax.formats.kquants import fit_affine
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoder import Params
from kdjax.models.weights import from_bits, to_bits

_ALIKE = 0.9  # cosine of embedding rows; Q2_K keeps 0.95, two models trained apart have about 0
_ROWS = 256  # of the embedding that are compared


def find_wide_block(dtype: str) -> BlockType | None:
    """The block type of that name, if its numbers have two bits or more: one can go."""
    block = BLOCKS.get(dtype)
    return block if block and block.elements > 1 and block.bits > 1 else None


@functools.partial(jax.jit, static_argnames=("bits", "group"))
def round_to_levels(x: Float32[Array, "*rows n"], bits: int, group: int) -> Array:
    """Rounds to 2^bits evenly spaced levels in each group of `group` neighbours."""
    groups, top = x.reshape(-1, group), 2**bits - 1
    scale, offset = fit_affine(groups, top, tuple(top + 0.1 * np.arange(-10, 11)))
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    q = jnp.clip(jnp.rint((groups + offset) * inverse), 0, top)
    return (q * scale - offset).reshape(x.shape)


def drop_a_bit(params: Params, checkpoint: Checkpoint) -> tuple[Params, int]:
    """Rounds dense parameters to one bit less than the blocks of `checkpoint`'s layers have.

    Returns the number of rounded matrices too: 0 for files without blocks.
    """

    def one(keys: tuple, leaf: Array) -> Array:
        nonlocal count
        names = checkpoint.names.get(tuple(key.key for key in keys), [])
        kinds = [find_wide_block(checkpoint.table.info(name).dtype) for name in names]
        if keys[0].key != "blocks" or len(kinds) != len(leaf) or not any(kinds):
            return leaf
        layers = []
        for layer, kind in zip(leaf, kinds, strict=True):
            if kind is not None:
                numbers = from_bits(layer)
                rounded = round_to_levels(numbers.astype(jnp.float32), kind.bits - 1, kind.group)
                layer, count = to_bits(rounded.astype(numbers.dtype)), count + 1
            layers.append(layer)
        return jnp.stack(layers)

    count = 0
    return jax.tree_util.tree_map_with_path(one, params), count


def cost_of_a_bit(target: Target, teacher: Target, mesh: Mesh) -> float:
    """KL, nats a token of the probe text, from the teacher to itself at one bit less a weight than
    the target's blocks have; 0 if the target's file has none.
    """
    form = dataclasses.replace(teacher.form, weights="dense")
    model = teacher._replace(form=form).load(mesh)
    fewer, count = drop_a_bit(model.params, target.checkpoint)
    if not count:
        return 0.0
    ids = jnp.asarray(probe_ids(teacher.checkpoint), jnp.int32)
    tokens, labels = ids[None, :-1], ids[None, 1:]
    columns = tokens, jnp.ones_like(tokens), jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    spec, apply = shared_spec(target.checkpoint, teacher.checkpoint), model.functions

    @jax.jit
    def divergence(fewer: Params, params: Params) -> Array:
        ours, theirs = ((apply.hidden(p, *columns), apply.head(p)) for p in (fewer, params))
        return jnp.mean(position_values(*ours, labels, *theirs, spec=spec).kl_ts)

    with model.precision():
        return float(divergence(fewer, model.params))


def is_form_of(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    """Whether two files hold one model, as far as shapes and embeddings say.

    Their shapes are equal, and rows of the embedding have equal directions, at any scale. Steps of
    a run are never another form: training changed them.
    """

    def shape(checkpoint: Checkpoint) -> tuple[int, ...]:
        s = checkpoint.spec
        heads = s.num_heads, s.num_kv_heads, s.head_dim
        return s.hidden_size, s.num_layers, s.mlp_size, s.experts, *heads

    def rows(checkpoint: Checkpoint) -> np.ndarray:
        (name,) = checkpoint.names["embed",]
        raw = checkpoint.table.raw(name)[:_ROWS]
        return np.asarray(decode(raw, checkpoint.table.info(name).dtype), np.float64)

    if checkpoint.saved or other.saved or shape(checkpoint) != shape(other):
        return False
    x, y = rows(checkpoint), rows(other)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    cosines = np.sum(x * y, axis=1) / np.maximum(norms, 1e-30)
    return bool(np.median(cosines) > _ALIKE)
