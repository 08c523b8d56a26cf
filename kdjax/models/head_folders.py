"""Heads in speculators' folders (`config.json`, safetensors), as tables with llama.cpp's names.

A folder may have copies of the target's embedding, and of its unembedding if the head has none:
kdjax takes the target's. EAGLE-3's `lm_head` is the head's; with `d2t`, of the target's ids
`d2t[i]` + i. Ids of taps are llama.cpp's: layers whose inputs are read.

Source: vllm-project/speculators 0.9.0, models/dflash/config.py and core.py, models/dspark/config.py
and model_definitions.py, models/eagle3/config.py and core.py, model.py (`DraftVocabMixin`),
convert/dflash/converter.py (ids of taps).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.files import load_json
from kdjax.formats.table import LazyTensor, TensorTable, rename_tensors
from kdjax.models import dspark_files, eagle_files
from kdjax.models.decoder import Params
from kdjax.models.dspark import DSparkShape
from kdjax.models.eagle import EagleShape
from kdjax.models.fields import check_fields
from kdjax.models.names import NAMES
from kdjax.models.schema import SHAPE
from kdjax.models.tapped import HeadShape, TappedFunctions

_KIND, _LAYERS = "speculators_model_type", "transformer_layer_config"
_LAYER_NAMES = {x.hf.removeprefix("model."): x.gguf for x in NAMES if x.path[0] == "blocks"}
_SIZES = {x.gguf: x.hf for x in SHAPE if x.gguf} | {"attention.key_length": "head_dim"}
# Entries of the layers that are read here or change nothing: an axis of text is all three.
_READ = frozenset((
    "model_type", "attention_bias", "hidden_act", "rope_theta", "rope_parameters", "rope_scaling",
    "mrope_section", "tie_word_embeddings", "vocab_size",
))  # fmt: skip


class _Folder(NamedTuple):
    """How speculators writes a kind of head."""

    architecture: str  # llama.cpp's
    model: str  # in `architectures`
    layers: str  # type of its layers
    taps: str  # the entry that has them
    tensors: Mapping[str, str]  # llama.cpp's names by the folder's
    copied: tuple[str, ...]  # tensors that are the target's
    left: tuple[str, ...] = ()  # tensors that another one has


_SPARK = _Folder(
    dspark_files.ARCHITECTURE,
    "DSparkSpeculator",
    "qwen3",
    "aux_hidden_state_layer_ids",
    _LAYER_NAMES
    | {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
        "confidence_head.proj.weight": "conf_proj.weight",
        "confidence_head.proj.bias": "conf_proj.bias",
    },
    ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight"),
)
_FOLDERS = {
    "dspark": _SPARK,
    "dflash": _SPARK._replace(model="DFlashSpeculator"),
    "eagle3": _Folder(
        eagle_files.ARCHITECTURE,
        "Eagle3Speculator",
        "llama",
        "eagle_aux_hidden_state_layer_ids",
        _LAYER_NAMES
        | {
            "fc.weight": "fc.weight",
            "norm.weight": "output_norm.weight",
            "layers.{i}.hidden_norm.weight": "blk.{i}.attn_norm_2.weight",
            "lm_head.weight": "output.weight",
            "d2t": "d2t",
        },
        ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"),
        ("t2d",),
    ),
}


def is_folder(path: Path) -> bool:
    """Whether it is a folder of speculators, of whatever kind."""
    config = path / "config.json"
    return config.is_file() and _KIND in load_json(config, "a file")


def open_folder(path: Path) -> TensorTable:
    """The head of a folder, as `open_table` opens a GGUF file of one.

    Rows of queries and keys are as they are rotated here. Raises `UserError` for a head with parts
    that kdjax does not compute.
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
    rope = _find_rope(layers)
    check_fields(layers, [rope], source, frozenset({*_READ, *_SIZES.values()}))
    folder = _FOLDERS[config[_KIND]]
    values = _translate(source, config, layers)
    entries = {f"{folder.architecture}.{key}": value for key, value in values.items()}
    entries |= {"general.architecture": folder.architecture}
    if folder.architecture == dspark_files.ARCHITECTURE:
        entries[dspark_files.MASK] = _get(source, config, "mask_token_id")
    table = rename_tensors(open_table(path), lambda name: _rename(path, folder, name), entries)
    if config[_KIND] == "dspark" and "markov_w1.weight" not in table:
        raise UserError(f"{path}: found no markov_head.markov_w1.weight; expected a DSpark head's.")
    if "d2t" in table:
        table = table.replace({**table.tensors, "d2t": _add_places(table.tensors["d2t"])})
    return table


def _add_places(offsets: LazyTensor) -> LazyTensor:
    """The ids of a table of their distances from their places."""

    def read() -> np.ndarray:
        ids = np.frombuffer(offsets.read(), "<i8")
        return (ids + np.arange(len(ids))).view(np.uint8)

    return offsets._replace(read=read)


def _find_rope(layers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of a head's rotation."""
    return layers.get("rope_parameters") or layers.get("rope_scaling") or {}


def _list_needs(
    config: Mapping[str, Any], layers: Mapping[str, Any]
) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Entries, what the config has, and what kdjax computes."""
    kind = config.get(_KIND)
    if kind not in _FOLDERS:
        return [(_KIND, kind, tuple(_FOLDERS))]
    rope = _find_rope(layers)
    expected = _FOLDERS[kind].layers
    needs = [
        ("model_type", layers.get("model_type", "qwen3"), (expected,)),
        ("attention_bias", layers.get("attention_bias", False), (False,)),
        ("hidden_act", layers.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",)),
    ]
    for layer in layers.get("layer_types") or ():
        needs.append(("layer_types", layer, ("full_attention",)))
    if not layers.get("layer_types") and layers.get("use_sliding_window") is not False:
        needs.append(("sliding_window", layers.get("sliding_window"), (None,)))
    if kind == "eagle3":
        names = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
        names = *names, "embed_requires_grad"
        needs += [(name, config.get(name, False), (False,)) for name in names]
        width = layers.get("hidden_size")
        target = config.get("target_hidden_size") or width
        return [*needs, ("target_hidden_size", target, (width,))]
    needs.append(("draft_vocab_size", config.get("draft_vocab_size"), (layers.get("vocab_size"),)))
    if kind == "dflash":
        return [*needs, ("sample_from_anchor", config.get("sample_from_anchor", False), (False,))]
    return [
        *needs,
        ("markov_head_type", config.get("markov_head_type", "vanilla"), ("vanilla",)),
        ("confidence_head_with_markov", config.get("confidence_head_with_markov", True), (True,)),
    ]


def _translate(
    source: Path, config: Mapping[str, Any], layers: Mapping[str, Any]
) -> dict[str, Any]:
    """Key-values of llama.cpp, without the architecture before each."""
    kind = config[_KIND]
    name = _FOLDERS[kind].taps
    taps = config.get(name)
    if not isinstance(taps, list) or not taps or any(type(tap) is not int for tap in taps):
        raise UserError(f"{source}: found {name}={taps!r}; expected numbers of layers.")
    values = {key: _get(source, layers, name) for key, name in _SIZES.items()} | {
        "rope.freq_base": _get(source, layers.get("rope_parameters") or layers, "rope_theta"),
        "target_layers": taps,
    }
    if kind == "eagle3":
        return values
    anchored = config.get("sample_from_anchor", kind == "dspark")
    block = _get(source, config, "block_size")
    return values | {"block_size": block, "sample_from_anchor": anchored}


def _get(source: Path, entries: Mapping[str, Any], name: str) -> int | float:
    found = entries.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise UserError(f"{source}: found {name}={found!r}; expected a number.")
    return found


def _rename(path: Path, folder: _Folder, name: str) -> str | None:
    """llama.cpp's name of a tensor; None for a copy of the target's."""
    if name in (*folder.copied, *folder.left):
        return None
    layer = re.match(r"layers\.(\d+)\.", name)
    known = folder.tensors.get(re.sub(r"^layers\.\d+\.", "layers.{i}.", name))
    if known is None:
        raise UserError(f"{path}: found a tensor {name}; expected a head without.")
    return known.format(i=layer and layer[1])


def name_tensor(shape: HeadShape, name: str) -> str:
    """The folder's name of a tensor of a head, given llama.cpp's."""
    layer = re.match(r"blk\.(\d+)\.", name)
    known = {gguf: hf for hf, gguf in _FOLDERS[shape.kind].tensors.items()}
    return known[re.sub(r"^blk\.\d+\.", "blk.{i}.", name)].format(i=layer and layer[1])


def list_others(functions: TappedFunctions, params: Params) -> list[tuple[str, np.ndarray]]:
    """Tensors of a folder that are not the head's: of EAGLE-3 the embedding, and which ids it has.

    Numbers are float32, `t2d` is of bool.
    """
    shape = functions.shape
    if not isinstance(shape, EagleShape):
        return []
    every = jnp.arange(shape.spec.vocab_size, dtype=jnp.int32)
    embedding = jax.jit(functions.embed_tokens)(params, every[None])[0]
    others = [("embed_tokens.weight", np.asarray(embedding, np.float32))]
    return [*others, ("t2d", np.isin(every, shape.ids))] if shape.ids else others


def describe(shape: HeadShape, verifier: str) -> dict[str, Any]:
    """The `config.json` of a head; `verifier` is the class of its target in Transformers."""
    spec, folder = shape.spec, _FOLDERS[shape.kind]
    layers = {
        "attention_bias": False,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp_size,
        "max_position_embeddings": spec.max_positions,
        "model_type": folder.layers,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "vocab_size": spec.vocab_size,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": min(shape.most, 3)}
    config = {
        "architectures": [folder.model],
        "draft_vocab_size": spec.vocab_size,
        folder.taps: list(shape.taps),
        _KIND: shape.kind,
        "speculators_config": {
            "algorithm": shape.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [verifier], "name_or_path": None},
        },
        _LAYERS: layers,
    }
    if isinstance(shape, EagleShape):
        return config | {"draft_vocab_size": len(shape.ids) or spec.vocab_size}
    assert isinstance(shape, DSparkShape)
    proposal["speculative_tokens"] = shape.drafts
    config |= {"block_size": shape.block, "mask_token_id": shape.mask}
    config["sample_from_anchor"] = not shape.lead
    if shape.rank:
        config |= {"enable_confidence_head": shape.confident, "markov_rank": shape.rank}
    return config
