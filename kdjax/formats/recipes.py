"""Which block type each tensor of a quantized model gets, as `llama-quantize` chooses them.

Source: `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp, which treats a fused matrix of
queries, keys and values as one of values (releases before March 2026 made it Q5_K in Q4_K_M).
Norms, biases and routers stay F32.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.errors import MissingFileError, UserError
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
_FALLBACKS |= dict.fromkeys(("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "Q3_K", "Q2_K"), "IQ4_NL")


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


class NamedTypes(NamedTuple):
    """A text that names block types, such as `"q4_k_m,types.txt,embed=Q8_0"`, in its parts."""

    recipe: Recipe | None
    prefixes: dict[tuple[str, ...], str]  # types by the beginning of a parameter's path
    patterns: list[tuple[str, str]]  # of files: regular expressions of tensors' names, and types


def split_types(text: str) -> NamedTypes:
    """Parses `"q4_k_m,embed=Q8_0"`: a recipe or none, files of types, types by prefix of a path.

    Raises `UserError` for an unknown recipe, and for a type without an encoder.
    """
    first, *others = _split(text)
    recipe = RECIPES.get(first.strip().lower())
    if recipe is None and "=" not in first and not Path(first).is_file():
        raise UserError(
            f"found quantize={text!r}; expected a recipe ({', '.join(RECIPES)}), a file of types "
            "as `llama-quantize --tensor-type-file` reads it, or types by the beginning of a "
            "parameter's name, such as blocks=Q4_0 or q4_k_m,embed=Q8_0."
        )
    types, patterns = {}, []
    for part in others if recipe else [first, *others]:
        if os.path.isfile(part.strip()):
            patterns += read_types(part.strip())
            continue
        name, equals, dtype = part.strip().partition("=")
        if not equals:
            expected = "expected NAME=TYPE, or a file of types"
            raise UserError(f"quantize={text!r}: found {part!r}; {expected}.")
        _check_writable(f"quantize={text!r}", dtype)
        types[tuple(name.strip("/").split("/"))] = dtype.upper()
    return NamedTypes(recipe, types, patterns)


def _split(text: str) -> list[str]:
    """The parts between commas; the name of a file may have commas in it."""
    return [text] if os.path.isfile(text) else text.split(",")


def _check_writable(source: object, dtype: str) -> None:
    if dtype.upper() not in ENCODED:
        raise UserError(
            f"{source}: found type {dtype!r}, which cannot be trained; expected one "
            f"of {', '.join(ENCODED)}."
        )


def read_types(path: str | Path) -> list[tuple[str, str]]:
    """Reads a file of `llama-quantize --tensor-type-file`: NAME=TYPE, separated by white space.

    NAME is a regular expression that is searched for in a tensor's name; the first that is found
    counts. Raises `UserError` for a file of another form.
    """
    try:
        words = Path(path).read_text(encoding="utf-8").split()
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file of types.") from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise UserError(f"{path}: found no text; expected lines of NAME=TYPE.") from error
    found = []
    for word in words:
        name, equals, dtype = word.rpartition("=")
        try:
            re.compile(name)
        except re.error as error:
            raise UserError(f"{path}: found {word!r}, no regular expression ({error}).") from error
        if not (name and equals):
            raise UserError(f"{path}: found {word[:80]!r}; expected NAME=TYPE.")
        _check_writable(path, dtype)
        found.append((name, dtype.upper()))
    if not found:
        raise UserError(f"{path}: found no type; expected lines of NAME=TYPE.")
    return found


def format_types(types: Mapping[str, str]) -> str:
    """Writes types by tensor's name as `read_types` and llama-quantize read them."""
    lines = (f"^{re.escape(name)}$={dtype.lower()}" for name, dtype in types.items())
    return "\n".join(lines) + "\n"


def identify_types(text: str) -> str:
    """The text with the content of each file of types, as a hash, in place of its name."""

    def one(part: str) -> str:
        name = part.strip()
        if name.lower() in RECIPES or not os.path.isfile(name):
            return part
        return "sha256:" + hashlib.sha256(Path(name).read_bytes()).hexdigest()

    return ",".join(map(one, _split(text)))


def is_vector(path: tuple[str, ...], width: int) -> bool:
    """Whether every recipe leaves a parameter F32: norms, biases, routers."""
    sizes: dict[str, Any] = dict(layers=1, groups=1, tied=False)
    return tensor_type(RECIPES["f16"], path, 0, width, **sizes) == "F32"


def _apply_patterns(
    types: list[str], patterns: Sequence[tuple[str, str]], names: Sequence[str], width: int
) -> list[str]:
    """The types of a parameter's layers after files of types, as llama-quantize applies these."""
    if not (patterns and names):
        return types
    chosen = list(types)
    for i, name in enumerate(names):
        found = next((dtype for pattern, dtype in patterns if re.search(pattern, name)), None)
        chosen[i] = chosen[i] if found is None else fitting(found, width)
    return chosen


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
    tensors: Mapping[tuple[str, ...], Sequence[str]] | None = None,
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Chooses the block types of a tree's matrices, one for each stacked layer; leaves out F32.

    `text` is parsed by `split_types`; the model's sizes are as for `tensor_type`; `stacks` holds
    the layers' numbers under each name, by default all under `blocks`; `tensors` the names in GGUF
    that files of types choose by, one for each layer. Raises `UserError` also for names that no
    parameter begins with, for rows that do not fill complete blocks of their type, and if nothing
    is left to round.
    """
    recipe, given, patterns = split_types(text)
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
        vector = is_vector(path, shape[-1])
        if not vector:
            types = _apply_patterns(types, patterns, (tensors or {}).get(path, ()), shape[-1])
        if matches and not vector:
            types = [given[max(matches, key=len)]] * len(numbers)
        for dtype in set(types):
            if shape[-1] % BLOCKS[dtype].elements:
                raise UserError(
                    f"quantize={text!r}: found rows of {shape[-1]} in {'/'.join(path)}; expected "
                    f"complete blocks of {BLOCKS[dtype].elements} for {dtype}. Name another type."
                )
        if patterns and "F32" in types and set(types) != {"F32"}:
            raise UserError(
                f"quantize={text!r}: found types for some layers of {'/'.join(path)} alone; "
                "expected one for each. Put a recipe before the file, such as q8_0,types.txt."
            )
        if set(types) != {"F32"}:
            chosen[path] = tuple(types)
    unknown = ["/".join(name) for name in given if name not in used]
    if unknown or not chosen:
        names = sorted({"/".join(path[:3]) for path in shapes})
        problem = f"no parameter begins with {unknown[0]!r}" if unknown else "it names no tensor"
        raise UserError(f"quantize={text!r}: {problem}; parameters are {', '.join(names)}.")
    return chosen
