"""Heads in speculators' folders (`config.json`, safetensors), as tables with llama.cpp's names.

A folder has the head's numbers, and copies of the target's embedding and unembedding, which do not
train there: kdjax takes the target's. Ids of taps are llama.cpp's: layers whose inputs are read.

Source: vllm-project/speculators, models/dflash/config.py and core.py, models/dspark/config.py and
model_definitions.py, model.py (`DraftVocabMixin`), convert/dflash/converter.py (ids of taps).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.files import load_json
from kdjax.formats.table import TensorTable, rename_tensors
from kdjax.models.names import NAMES
from kdjax.models.schema import SHAPE

_KIND, _LAYERS = "speculators_model_type", "transformer_layer_config"
_COPIED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
_TENSORS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
} | {x.hf.removeprefix("model."): x.gguf for x in NAMES if x.path[0] == "blocks"}
_SIZES = {x.gguf: x.hf for x in SHAPE if x.gguf} | {"attention.key_length": "head_dim"}


def is_folder(path: Path) -> bool:
    """Whether it is a folder of speculators, of whatever kind."""
    config = path / "config.json"
    return config.is_file() and _KIND in load_json(config, "a file")


def open_folder(path: Path, architecture: str, mask: str) -> TensorTable:
    """The head of a folder, as `open_table` opens a GGUF file of one.

    Its key-values begin with `architecture`; `mask` has the id of the mask token. Raises
    `UserError` for a head with parts that kdjax does not compute.
    """
    source = path / "config.json"
    config = load_json(source, "a file")
    layers = config.get(_LAYERS)
    if not isinstance(layers, dict):
        raise UserError(f"{source}: found no {_LAYERS}; expected one, as speculators writes it.")
    for entry, found, expected in _list_needs(config, layers):
        if found not in expected:
            raise UserError(
                f"{source}: found {entry}={found!r}; expected {' or '.join(map(repr, expected))}, "
                "of a head that kdjax computes."
            )
    values = _translate(source, config, layers)
    entries = {f"{architecture}.{key}": value for key, value in values.items()}
    entries |= {"general.architecture": architecture, mask: _get(source, config, "mask_token_id")}
    table = rename_tensors(open_table(path), lambda name: _rename(path, name), entries)
    if config[_KIND] == "dspark" and "markov_w1.weight" not in table:
        raise UserError(f"{path}: found no markov_head.markov_w1.weight; expected a DSpark head's.")
    return table


def _list_needs(
    config: Mapping[str, Any], layers: Mapping[str, Any]
) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Entries, what the config has, and what kdjax computes."""
    rope = layers.get("rope_parameters") or layers.get("rope_scaling") or {}
    needs = [
        (_KIND, config.get(_KIND), ("dspark", "dflash")),
        ("model_type", layers.get("model_type", "qwen3"), ("qwen3",)),
        ("draft_vocab_size", config.get("draft_vocab_size"), (layers.get("vocab_size"),)),
        ("attention_bias", layers.get("attention_bias", False), (False,)),
        ("hidden_act", layers.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",)),
    ]
    for kind in layers.get("layer_types") or ():
        needs.append(("layer_types", kind, ("full_attention",)))
    if config.get(_KIND) == "dflash":
        return [*needs, ("sample_from_anchor", config.get("sample_from_anchor", False), (False,))]
    return [
        *needs,
        ("sample_from_anchor", config.get("sample_from_anchor", True), (True,)),
        ("markov_head_type", config.get("markov_head_type", "vanilla"), ("vanilla",)),
        ("confidence_head_with_markov", config.get("confidence_head_with_markov", True), (True,)),
    ]


def _translate(
    source: Path, config: Mapping[str, Any], layers: Mapping[str, Any]
) -> dict[str, Any]:
    """Key-values of llama.cpp, without the architecture before each."""
    taps = config.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, list) or not taps or any(type(tap) is not int for tap in taps):
        raise UserError(
            f"{source}: found aux_hidden_state_layer_ids={taps!r}; expected numbers of layers."
        )
    return {key: _get(source, layers, name) for key, name in _SIZES.items()} | {
        "rope.freq_base": _get(source, layers.get("rope_parameters") or layers, "rope_theta"),
        "block_size": _get(source, config, "block_size"),
        "target_layers": taps,
        "sample_from_anchor": config[_KIND] == "dspark",
    }


def _get(source: Path, entries: Mapping[str, Any], name: str) -> int | float:
    found = entries.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise UserError(f"{source}: found {name}={found!r}; expected a number.")
    return found


def _rename(path: Path, name: str) -> str | None:
    """llama.cpp's name of a tensor; None for a copy of the target's."""
    if name in _COPIED:
        return None
    layer = re.match(r"layers\.(\d+)\.", name)
    known = _TENSORS.get(re.sub(r"^layers\.\d+\.", "layers.{i}.", name))
    if known is None:
        raise UserError(f"{path}: found a tensor {name}; expected a head without.")
    return known.format(i=layer and layer[1])
