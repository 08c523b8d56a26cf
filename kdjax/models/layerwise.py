"""Runs the layers of a decoder one at a time, by one program for each kind of layer."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Int

from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.decoder import DecoderFunctions, Params, functional
from kdjax.models.model import Model


def cut_layer(model: Model, index: int) -> DecoderFunctions:
    """The functions of one layer alone; equal, and compiled once, for layers of one kind."""
    spec, functions = model.spec, model.functions
    assert spec is not None and isinstance(functions, DecoderFunctions)
    one = dataclasses.replace(spec, layers=(spec.layers[index],), drafts=0)
    return functional(one, functions.compute)[0]


def find_place(spec: ArchSpec, index: int) -> int:
    """The place of a layer in the stack of its kind."""
    return spec.places(delta=spec.layers[index].delta).index(index)


@functools.partial(jax.jit, static_argnums=0)
def run_layer(
    alone: DecoderFunctions,
    params: Params,
    place: int | Array,
    x: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Lets text pass the layer at `place` of its stack, of parameters of numbers.

    `alone` is the layer's `cut_layer`. The place is an argument of the program.
    """
    delta = alone.spec.layers[0].delta
    one = {name: leaf for name, leaf in params.items() if name not in STACKS}
    for name in (name for name, kind in STACKS.items() if kind is delta and name in params):
        one[name] = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place, 1), params[name])
    return alone.read_segments(one, x, segment_ids, positions)[0]
