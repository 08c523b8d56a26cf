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
    # More bits go to all value projections that four or more heads share, and to the first eighth
    # of down projections, in place of `gets_more_bits`.
    shared: bool = False


RECIPES: dict[str, Recipe] = {
    "q4_k_m": Recipe("Q4_K", "Q6_K", "Q6_K", 15),
    "q6_k": Recipe("Q6_K", "Q6_K", "Q6_K", 18),
    "q8_0": Recipe("Q8_0", "Q8_0", "Q8_0", 7),
    "q5_0": Recipe("Q5_0", "Q5_0", "Q6_K", 8),
    "iq4_nl": Recipe("IQ4_NL", "Q5_K", "Q6_K", 25, shared=True),
    "iq4_xs": Recipe("IQ4_XS", "Q5_K", "Q6_K", 30, shared=True),
    "q4_0": Recipe("Q4_0", "Q4_0", "Q6_K", 2),
    "bf16": Recipe("BF16", "BF16", "BF16", 32),
    "f16": Recipe("F16", "F16", "F16", 1),
    "f32": Recipe("F32", "F32", "F32", 0),
}
# What llama-quant.cpp takes for rows that are no whole K-blocks.
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


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
    recipe: Recipe,
    path: tuple[str, ...],
    layer: int,
    width: int,
    *,
    layers: int,
    groups: int,
    tied: bool,
) -> str:
    """Block type of the parameter at `path` of the tree, in `layer` of `layers` if it has layers.

    `groups` heads share a value. Norms, biases and routers get F32. A tied embedding is the output
    too, and gets the output's bits.
    """
    if path[-1] == "bias" or any(part.endswith("norm") or part == "router" for part in path):
        return "F32"
    if path in (("embed",), ("head",)):
        wanted = recipe.output if tied or path == ("head",) else recipe.base
    elif path[1:3] in (("attn", "v"), ("mlp", "down")):
        more = gets_more_bits(layer, layers)
        if recipe.shared:
            more = groups >= 4 if path[2] == "v" else layer < layers // 8
        wanted = recipe.more if more else recipe.base
    else:
        wanted = recipe.base
    return fitting(wanted, width)
