"""The next-token block of a model (MTP, `nextn`) as a separate model: taken, drawn, attached."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from kdjax.errors import UserError
from kdjax.formats.blocks import encode, split
from kdjax.formats.recipes import fitting
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import DecoderFunctions, Params, functional
from kdjax.models.draft_functions import DraftFunctions, draw_block
from kdjax.models.families import FAMILIES
from kdjax.models.lora import read_numbers
from kdjax.models.model import Model, check_model
from kdjax.models.weights import PackedMatrix


def take_block(model: Model, *, seed: int | None = None, dtype: DTypeLike = "float32") -> Model:
    """The next-token block of a model (MTP, `nextn`), as a model that drafts for it.

    Its parameters are the model's arrays and the block's numbers in `dtype`. It drafts
    (`model.generate(prompts, draft=block)`), it trains (`make_step(block, model, loss, tx)` moves
    only the block; the layers stay as they are stored), and it is exported as the complete model
    with this block. With a `seed` the block is drawn at random, also for a model without a block
    whose family has such blocks. Raises `UserError` for a model without one.

        model = kdjax.load("model-q4_k_m.gguf", weights="packed")
        block = kdjax.take_block(model)
    """
    check_model(model)
    if model.spec is None or not isinstance(model.functions, DecoderFunctions):
        raise UserError(f"{model.name}: found a custom module; expected a model of kdjax.load.")
    spec, params = find_block(model.spec, model.name, new=seed is not None), dict(model.params)
    if seed is not None:
        params["mtp"] = draw_block(spec, seed)
    read = jax.jit(lambda weight: read_numbers(weight).astype(dtype))
    flat = {path: read(leaf) for path, leaf in flatten_dict(params["mtp"]).items()}
    return attach_block(model, spec, {"mtp": unflatten_dict(flat)})


def find_block(spec: ArchSpec, source: object, *, new: bool) -> ArchSpec:
    """The architecture of `source` with its next-token block, or with a new one.

    Raises `UserError` for a family without such blocks, and, unless `new`, a model without one.
    """
    if "drafts" not in FAMILIES[spec.family].fields:
        known = ", ".join(name for name, x in FAMILIES.items() if "drafts" in x.fields)
        raise UserError(
            f"{source}: found a {spec.family} model; expected one of {known}, whose files have a "
            "block that drafts. Train a small model: kdjax draft --kind=small (docs/drafts.md)."
        )
    if not new and not spec.drafts:
        raise UserError(
            f"{source}: found no block that drafts; expected blk.{spec.num_layers}.nextn.* or "
            "mtp.* in the file. Begin a new one: kdjax draft --new, student.block=new, "
            "take_block(model, seed=0)."
        )
    return dataclasses.replace(spec, drafts=1)


def attach_block(model: Model, spec: ArchSpec, block: Params) -> Model:
    """The block, under `mtp`, as a model that drafts for this one; its arrays may be shapes."""
    assert isinstance(model.functions, DecoderFunctions)
    functions, _ = functional(spec, model.functions.compute)
    draft = DraftFunctions(functions.graph, spec, functions.compute)
    kind = f"{model.kind}, its block that drafts"
    return model.replace(functions=draft, params={**model.params, **block}, spec=spec, kind=kind)


def pack_block(model: Model, dtype: str) -> Model:
    """The model with the matrices of its next-token block quantized to a type, for export.

    A row that is no multiple of the type's block gets the type that `llama-quantize` chooses.
    """

    def pack(x: jax.Array) -> jax.Array | PackedMatrix:
        if x.ndim < 3:
            return x
        kind = fitting(dtype, x.shape[-1])
        return PackedMatrix(split(encode(np.asarray(x, np.float32), kind), kind), kind, jnp.float32)

    flat: dict[tuple[str, ...], Any] = flatten_dict(model.params["mtp"])
    packed = unflatten_dict({path: pack(x) for path, x in flat.items()})
    return model.replace(params={**model.params, "mtp": packed})
