"""Adapters on a loaded model: adds them, merges them, and loads a file's onto its base."""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array

from kdjax.errors import UserError
from kdjax.models.adapters import (
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    Lora,
    choose_lora,
    draw_adapters,
)
from kdjax.models.model import Model, attach_adapters, check_model
from kdjax.models.weights import Adapted, Mixed, PackedMatrix, Scaled, decode_weight, to_bits


def add_lora(
    model: Model,
    rank: int = DEFAULT_RANK,
    *,
    alpha: float = DEFAULT_ALPHA,
    targets: str = "",
    seed: int = 0,
) -> Model:
    """The model with adapters on its matrices, which are frozen as they are stored.

    y = x W^T + alpha / rank * (x A^T) B^T for the matrices that `targets` names, separated by
    commas, as PEFT (`q_proj`) or GGUF (`attn_q`) names them; "": all in the layers. A is drawn by
    `seed` and B is zero, so it computes what the model does. No array is copied: two models may
    share a base. Only A and B train (`make_step`), in float32. LoRA: Hu et al. 2021,
    arXiv:2106.09685. Raises `UserError` for unknown targets, for a rank above a matrix's, and for a
    model without an architecture that kdjax knows, with experts, or with adapters.

        base = kdjax.load("student.gguf", weights="packed")
        student = kdjax.add_lora(base, rank=16)
    """
    check_model(model)
    if model.spec is None:
        raise UserError(
            f"{model.name}: found a custom module to adapt; expected a model of kdjax.load, "
            "whose matrices have names. Add adapters to the module itself."
        )
    if Lora.of_params(model.params):
        raise UserError(
            f"{model.name}: found a model that has adapters; expected one without. Merge "
            "them first (kdjax.merge_lora), or train those."
        )
    if not isinstance(rank, int):
        raise UserError(f"found rank={rank!r}; expected a whole number.")
    if not isinstance(targets, str):
        raise UserError(f'found targets={targets!r}; expected text, such as "q_proj,v_proj".')
    lora = choose_lora(model.spec, rank, alpha, targets)
    return attach_adapters(model, lora, draw_adapters(lora, model.spec, seed))


def merge_lora(model: Model, dtype: DTypeLike = "float32") -> Model:
    """The model with its adapters added to their matrices: dense numbers of `dtype` throughout.

    `docs/lora.md` says when to merge. A model without adapters becomes dense, too.
    """
    check_model(model)
    on_cpu = model.placement is not None and model.placement.platform == "cpu"

    @jax.jit
    def merge(weight: Array | PackedMatrix | Mixed | Scaled | Adapted) -> Array:
        numbers = read_numbers(weight).astype(dtype)
        return to_bits(numbers) if on_cpu else numbers

    flat = {path: merge(leaf) for path, leaf in flatten_dict(model.params).items()}
    return model.replace(params=unflatten_dict(flat), kind=f"dense ({jnp.dtype(dtype).name})")


def read_numbers(weight: Array | PackedMatrix | Mixed | Scaled | Adapted) -> Array:
    """The numbers of a weight, for all layers."""
    if isinstance(weight, Adapted):
        numbers = read_numbers(weight.base).astype(jnp.float32)
        return numbers if weight.a is None else numbers + weight.change
    if isinstance(weight, Mixed):
        places = zip(weight.which, weight.slot, strict=True)
        return jnp.stack([weight.read(which, slot) for which, slot in places])
    return decode_weight(weight)


def read_layer(weight: Array | PackedMatrix | Mixed | Adapted, place: Array) -> Array:
    """The frozen numbers `[out, in]` of a stack's layer; only that layer's blocks are decoded."""
    if isinstance(weight, Adapted):
        return read_layer(weight.base, place)
    if isinstance(weight, Mixed):
        return weight.read(weight.which[place], weight.slot[place])
    return decode_weight(weight[place])
