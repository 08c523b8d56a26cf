"""Which block type each tensor of a quantized model gets, as `llama-quantize` chooses them.

Source: `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp, which treats a fused matrix of
queries, keys and values as one of values (releases before March 2026 made it Q5_K in Q4_K_M).
Norms, biases and routers stay F32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kdjax.errors import UserError
from kdjax.formats.blocks import BLOCKS, ENCODED


def _mix_q2_k(part: str, layer: int, layers: int, groups: int, experts: int) -> str | None:
    return {"v": "Q4_K" if groups >= 4 else "Q3_K", "o": "Q3_K", "down": "Q3_K"}.get(part)


def _mix_q3_k_m(part: str, layer: int, layers: int, groups: int, experts: int) -> str | None:
    down = "Q5_K" if layer < layers // 16 else "Q4_K"
    parts = {"v": "Q5_K" if layer < 2 else "Q4_K", "o": "Q4_K", "down": down}
    return parts.get(part)


def _mix_mxfp4(part: str, layer: int, layers: int, groups: int, experts: int) -> str | None:
    return "MXFP4" if experts and part in ("gate", "up", "down") else None


class Recipe(NamedTuple):
    """Block types: of most matrices, of the more exact ones, of the output; `general.file_type`."""

    base: str
    more: str
    output: str
    file_type: int
    # More bits go to all value projections that four or more heads share, and to the first eighth
    # of down projections, in place of `gets_more_bits`.
    shared: bool = False
    # Chooses the type of a part of a layer (`v`, `down`) in place of these rules; None: the base.
    mix: Callable[[str, int, int, int, int], str | None] | None = None


RECIPES: dict[str, Recipe] = {
    "q4_k_m": Recipe("Q4_K", "Q6_K", "Q6_K", 15),
    "q6_k": Recipe("Q6_K", "Q6_K", "Q6_K", 18),
    "q8_0": Recipe("Q8_0", "Q8_0", "Q8_0", 7),
    "q5_0": Recipe("Q5_0", "Q5_0", "Q6_K", 8),
    "iq4_nl": Recipe("IQ4_NL", "Q5_K", "Q6_K", 25, shared=True),
    "iq4_xs": Recipe("IQ4_XS", "Q5_K", "Q6_K", 30, shared=True),
    "q4_0": Recipe("Q4_0", "Q4_0", "Q6_K", 2),
    "q3_k_m": Recipe("Q3_K", "Q4_K", "Q6_K", 12, mix=_mix_q3_k_m),
    "q2_k": Recipe("Q2_K", "Q3_K", "Q6_K", 10, mix=_mix_q2_k),
    "mxfp4": Recipe("Q8_0", "Q8_0", "Q8_0", 38, mix=_mix_mxfp4),  # of experts; all else is Q8_0
    "bf16": Recipe("BF16", "BF16", "BF16", 32),
    "f16": Recipe("F16", "F16", "F16", 1),
    "f32": Recipe("F32", "F32", "F32", 0),
}
_IN_QKV = (("attn", "q"), ("attn", "k"))
_EXACT = ("router", "shared_gate", "conv", "log_rate", "shift")
# Types that llama-quant.cpp takes for rows that do not fill complete K-blocks.
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_FALLBACKS |= dict.fromkeys(("IQ4_XS", "Q3_K", "Q2_K"), "IQ4_NL")


def gets_more_bits(place: int, layers: int) -> bool:
    """`use_more_bits` of llama-quant.cpp: the first and last eighth, and every third between."""
    eighth = layers // 8
    return place < eighth or place >= 7 * layers // 8 or (place - eighth) % 3 == 2


def fitting(dtype: str, width: int) -> str:
    """The type, or its replacement if rows of `width` do not fill complete blocks of it."""
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
    experts: int = 0,
    fused: bool = False,
) -> str:
    """Block type of the parameter at `path` of the tree, in `layer` of `layers` if it has layers.

    `groups` heads share a value; `experts` is their number in a layer; `fused` files store queries,
    keys and values as one matrix, as delta layers do. Norms, biases, routers and the decays of
    delta layers get F32. A tied embedding is also the output and gets the output's bits.
    """
    if path[-1] == "bias" or any(part.endswith("norm") or part in _EXACT for part in path):
        return "F32"
    part = "".join(path[2:3])
    if path[1:3] == ("delta", "qkv") or (fused and path[1:3] in _IN_QKV):
        part = "v"
    if path[1:2] != ("mlp",) or part == "shared":  # matrices outside stacks of experts
        experts = 0
    part = path[3] if part == "shared" else part
    if path in (("embed",), ("head",)):
        wanted = recipe.output if tied or path == ("head",) else recipe.base
    elif recipe.mix is not None:
        wanted = recipe.mix(part, layer, layers, groups, experts) or recipe.base
    elif part in ("v", "down"):
        more = gets_more_bits(layer, layers)
        if recipe.shared:
            more = groups >= 4 if part == "v" else layer < layers // 8
        wanted = recipe.more if more else recipe.base
    else:
        wanted = recipe.base
    return fitting(wanted, width)


def parts_by_type(types: Sequence[str]) -> list[tuple[str, tuple[int, ...] | None]]:
    """Groups layers by type: each type with its layers, None for all of them."""
    if len(set(types)) == 1:
        return [(types[0], None)]
    return [
        (dtype, tuple(i for i, other in enumerate(types) if other == dtype))
        for dtype in dict.fromkeys(types)
    ]


def split_types(text: str) -> tuple[Recipe | None, dict[tuple[str, ...], str]]:
    """Parses `"q4_k_m,embed=Q8_0"`: the recipe, None without one, and types by prefix of a path.

    Raises `UserError` for an unknown recipe, and for a type without an encoder.
    """
    first, *others = text.split(",")
    recipe = RECIPES.get(first.strip().lower())
    if recipe is None and "=" not in first:
        raise UserError(
            f"found quantize={text!r}; expected a recipe ({', '.join(RECIPES)}), or types by the "
            "beginning of a parameter's name, such as blocks=Q4_0 or q4_k_m,embed=Q8_0."
        )
    types = {}
    for part in others if recipe else [first, *others]:
        name, equals, dtype = part.strip().partition("=")
        if not equals:
            raise UserError(f"quantize={text!r}: found {part!r}; expected NAME=TYPE.")
        if dtype.upper() not in ENCODED:
            raise UserError(
                f"quantize={text!r}: found type {dtype!r}, which cannot be trained; expected one "
                f"of {', '.join(ENCODED)}."
            )
        types[tuple(name.strip("/").split("/"))] = dtype.upper()
    return recipe, types


def choose_types(
    text: str,
    shapes: Mapping[tuple[str, ...], tuple[int, ...]],
    *,
    layers: int,
    groups: int,
    tied: bool,
    experts: int = 0,
    fused: bool = False,
    stacks: Mapping[str, Sequence[int]] | None = None,
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Chooses the block types of a tree's matrices, one for each stacked layer; leaves out F32.

    `text` is parsed by `split_types`; the model's sizes are as for `tensor_type`; `stacks` holds
    the layers' numbers under each name, by default all under `blocks`. Raises `UserError` also for
    names that no parameter begins with, for rows that do not fill complete blocks of their type,
    and if nothing is left to round.
    """
    recipe, given = split_types(text)
    used: set[tuple[str, ...]] = set()
    chosen = {}
    for path, shape in shapes.items():
        matches = [name for name in given if path[: len(name)] == name]
        used.update(matches)
        numbers = (stacks or {"blocks": range(layers)}).get(path[0], (0,))
        model: dict[str, Any] = dict(layers=layers, groups=groups, tied=tied)
        model |= dict(experts=experts, fused=fused)
        base = recipe or RECIPES["f32"]
        types = [tensor_type(base, path, i, shape[-1], **model) for i in numbers]
        # A name selects matrices: other parameters under it stay as numbers.
        vector = tensor_type(RECIPES["f16"], path, 0, shape[-1], **model) == "F32"
        if matches and not vector:
            dtype = given[max(matches, key=len)]
            if shape[-1] % BLOCKS[dtype].elements:
                raise UserError(
                    f"quantize={text!r}: found rows of {shape[-1]} in {'/'.join(path)}; expected "
                    f"complete blocks of {BLOCKS[dtype].elements} for {dtype}. Name another type."
                )
            types = [dtype] * len(numbers)
        if set(types) != {"F32"}:
            chosen[path] = tuple(types)
    unknown = ["/".join(name) for name in given if name not in used]
    if unknown or not chosen:
        names = sorted({"/".join(path[:3]) for path in shapes})
        problem = f"no parameter begins with {unknown[0]!r}" if unknown else "it names no tensor"
        raise UserError(f"quantize={text!r}: {problem}; parameters are {', '.join(names)}.")
    return chosen
