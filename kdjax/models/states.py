"""States inside a model by name, for losses of layers: no others are stored.

Letters: B rows, T positions, D hidden width, L layers.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kdjax.errors import UserError
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Block, Decoder, DecoderFunctions, Kind, ModuleFunctions, Params

_EMBEDDED, _STREAM = "embed", "x"
# The names of states in a decoder.
STATES = "embed, blocks/N, blocks/N/attn/q, blocks/N/attn/k, blocks/N/attn/v"


def check_states(spec: ArchSpec, name: str) -> tuple[str, int]:
    """Reads the name of a state: the part of a layer, and the layer's number.

    Raises `UserError` for a state that the architecture does not have.
    """
    if name == _EMBEDDED:
        return _EMBEDDED, 0
    match = re.fullmatch(r"blocks/(\d+)(?:/attn/([qkv]))?", name)
    if not match or int(match[1]) >= spec.num_layers:
        raise UserError(
            f"found a layer {name!r}; expected one of {STATES}, N from 0 to {spec.num_layers - 1}."
        )
    if match[2] and any(layer.delta for layer in spec.layers):
        raise UserError(
            f"found {name!r} of a {spec.family} model; expected blocks/N: some of its layers have "
            "no attention."
        )
    return match[2] or _STREAM, int(match[1])


def hidden_and_states(
    functions: ModuleFunctions,
    params: Params,
    tokens: Array,
    segment_ids: Array,
    positions: Array,
    names: Sequence[str],
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    """Hidden states of a model, and by name the states in `names`.

    Queries, keys and values are `[B, T, heads, width]`, normalised and rotated; all others are
    `[B, T, D]`. A custom module has a method of this name.
    """
    if not isinstance(functions, DecoderFunctions):
        return functions.hidden_and_states(params, tokens, segment_ids, positions, names)
    decoder, places = functions.merge(params), [check_states(functions.spec, x) for x in names]
    parts = sorted({part for part, _ in places} - {_EMBEDDED})
    wanted = {part: sorted({i for p, i in places if p == part}) for part in parts}
    angles, x = decoder.choose_angles(segment_ids, positions), decoder.embed_tokens(tokens)

    def layer(x: Array, block: Block, kind: Kind) -> tuple[Array, dict[str, Array]]:
        def mix(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            out, _ = decoder.mix_segments(segment_ids, kind.local, q, k, v)
            return out, {"q": q, "k": k, "v": v}

        recall = functools.partial(decoder.recall_segments, segment_ids)
        x, inside = block(x, decoder.make_turn(positions, angles, kind), mix, recall)
        return x, {part: x if part == _STREAM else inside[part] for part in parts}

    slots, buffers = _make_buffers(decoder, x, wanted)
    carry, _ = decoder.run_layers(layer, (x, buffers), slots, trained=True, around=_write_outputs)
    last, buffers = carry
    states = {
        name: x if part == _EMBEDDED else buffers[part][wanted[part].index(i)]
        for name, (part, i) in zip(names, places, strict=True)
    }
    return decoder.finish(last), states


def _make_buffers(
    decoder: Decoder, x: Float[Array, "B T D"], wanted: dict[str, list[int]]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Each layer's slot `[L]` in a buffer, and the buffers, by part: `wanted` has layers by part.

    The last place of a buffer is where all other layers write.
    """
    spec = decoder.spec
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    slots = {
        part: jnp.asarray([at.index(i) if i in at else len(at) for i in range(spec.num_layers)])
        for part, at in wanted.items()
    }
    buffers = {
        part: jnp.zeros(
            (len(at) + 1, *x.shape[:2])
            + ((x.shape[-1],) if part == _STREAM else (heads[part], spec.head_dim)),
            x.dtype,
        )
        for part, at in wanted.items()
    }
    return slots, buffers


def _write_outputs(run: Callable) -> Callable:
    """A layer's `run` that writes its outputs at its slots of the buffers in the carry."""

    def write(carry: Any, xs: Any) -> tuple[Any, None]:
        (carry, buffers), (*xs, slots) = carry, xs
        carry, outputs = run(carry, tuple(xs))
        place = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
        return (carry, jax.tree.map(place, buffers, outputs, slots)), None

    return write
