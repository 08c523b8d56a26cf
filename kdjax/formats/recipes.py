"""Which block type each tensor of a quantized model gets, as `llama-quantize` chooses them.

Source: `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp. Norms, biases and routers stay
F32.
"""

from typing import NamedTuple

from kdjax.formats.blocks import BLOCKS


class Recipe(NamedTuple):
    """Block types of matrices: most, those that get more bits, the output; `general.file_type`."""

    base: str
    more: str
    output: str
    file_type: int


RECIPES: dict[str, Recipe] = {
    "q4_k_m": Recipe("Q4_K", "Q6_K", "Q6_K", 15),
    "q5_k_m": Recipe("Q5_K", "Q6_K", "Q6_K", 17),
    "q6_k": Recipe("Q6_K", "Q6_K", "Q6_K", 18),
    "q8_0": Recipe("Q8_0", "Q8_0", "Q8_0", 7),
    "q5_0": Recipe("Q5_0", "Q5_0", "Q6_K", 8),
    "q4_0": Recipe("Q4_0", "Q4_0", "Q6_K", 2),
    "bf16": Recipe("BF16", "BF16", "BF16", 32),
    "f16": Recipe("F16", "F16", "F16", 1),
    "f32": Recipe("F32", "F32", "F32", 0),
}
# What llama-quant.cpp takes for rows that are no whole K-blocks.
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def gets_more_bits(place: int, layers: int) -> bool:
    """`use_more_bits` of llama-quant.cpp: the first and last eighth, and every third between."""
    eighth = layers // 8
    return place < eighth or place >= 7 * layers // 8 or (place - eighth) % 3 == 2


def fitting(dtype: str, width: int) -> str:
    """The type, or what stands in for it where rows of `width` are no whole blocks of it."""
    for choice in (dtype, _FALLBACKS.get(dtype, "F16")):
        if width % BLOCKS[choice].elements == 0:
            return choice
    return "F16"


def tensor_type(
    recipe: Recipe, path: tuple[str, ...], layer: int, layers: int, width: int, tied: bool
) -> str:
    """Block type of the parameter at `path` of the tree, in `layer` of `layers` if it has layers.

    Norms, biases and routers get F32. A tied embedding is the output too, and gets the output's
    bits.
    """
    if path[-1] == "bias" or any(part.endswith("norm") or part == "router" for part in path):
        return "F32"
    if path in (("embed",), ("head",)):
        wanted = recipe.output if tied or path == ("head",) else recipe.base
    elif path[1:3] in (("attn", "v"), ("mlp", "down")) and gets_more_bits(layer, layers):
        wanted = recipe.more
    else:
        wanted = recipe.base
    return fitting(wanted, width)
