"""Writes each format's description of the model: config.json, GGUF key-values, `.apr` metadata.

Entries of the student's file are kept, unless kdjax knows better (shapes, the tied head, types).
Sources: Transformers' configuration files and modeling_rope_utils.py, llama.cpp's
gguf-py/gguf/constants.py.
"""

from pathlib import Path
from typing import Any

import numpy as np

from kdjax.export.vocabulary import is_empty
from kdjax.formats import TensorTable
from kdjax.formats.apr.metadata import INTEGERS, NEOX, OWN_KEY, TOKENIZER
from kdjax.models.arch import ArchSpec
from kdjax.models.families import FAMILIES
from kdjax.models.loading import count_parameters, is_gguf
from kdjax.models.schema import (
    OWN,
    SHAPE,
    config_entries,
    gguf_entries,
    layer_entries,
    own_entries,
    shape_entries,
)

TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Entries of the source's GGUF header that hold for its weights or its files only.
_STALE = (
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
    "quantize.",
    "split.",
    "tokenizer.",
)
# Entries with a flag for each layer, which change if layers are cut.
_BY_LAYER = ("attention.sliding_window_pattern", "attention.recurrent_layers")
# The corresponding entries of config.json.
_STALE_HF = (
    "quantization_config",
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "tokenizer.",
    "apr.",
)


def hf_config(spec: ArchSpec, source: TensorTable, dtype: str, ids: dict[str, Any]) -> dict:
    """Makes `config.json`; `ids` are the special tokens' ids by its names."""
    types = {"torch_dtype": TORCH_DTYPES[dtype]}
    if not is_gguf(source) and "architectures" in source.metadata:
        layers, kept = layer_entries(spec, source.metadata), _keep(source, _STALE_HF)
        if not all(_is_beside(path, source) for path in list_code(source)):
            del kept["auto_map"]
        return kept | shape_entries(spec) | types | layers
    return {
        "architectures": [FAMILIES[spec.family].hf_architecture],
        "model_type": spec.family,
        # Without it, Transformers 4.57.3 and later take the tokenizer for Mistral's, and warn.
        "transformers_version": "5.0.0",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **config_entries(spec, types | ids),
    }


def list_code(source: TensorTable) -> list[Path]:
    """Files of code that `auto_map` of a config.json names, whether or not they exist."""
    named: Any = source.metadata.get("auto_map")
    values = named.values() if isinstance(named, dict) else ()
    classes = (name for x in values for name in (x if isinstance(x, list) else [x]))
    local = (name for name in classes if isinstance(name, str) and "--" not in name)
    modules = sorted({name.partition(".")[0] for name in local})
    return [source.paths[0].parent / f"{module}.py" for module in modules]


def _is_beside(code: Path, source: TensorTable) -> bool:
    """Whether it is a file of the model's folder: a name may be an absolute path, or lead out."""
    beside = code.parent == source.paths[0].parent and code.stem.isidentifier()
    return beside and code.is_file()


def _keep(source: TensorTable, stale: tuple[str, ...]) -> dict[str, Any]:
    return {key: source.metadata[key] for key in source.metadata if not key.startswith(stale)}


def gguf_metadata(
    spec: ArchSpec, source: TensorTable, file_type: int, tokenizer: dict[str, Any]
) -> dict[str, Any]:
    """Key-values of the GGUF header, the tokenizer's last, as converters order them."""
    base: dict[str, Any] = {
        "general.architecture": FAMILIES[spec.family].gguf,
        "general.type": "model",
    }
    if is_gguf(source):
        kept = _keep(source, _STALE)
        base |= {key: value for key, value in kept.items() if not is_empty(value)}
        flags = [x.window > 0 or x.delta for x in spec.layers] + [False] * spec.drafts
        keys = [f"{FAMILIES[spec.family].gguf}.{name}" for name in _BY_LAYER]
        base |= {key: flags for key in keys if isinstance(base.get(key), list | np.ndarray)}
    base |= gguf_entries(spec) | {"general.file_type": file_type}
    return base | {"general.quantization_version": 2} | tokenizer


def as_json(value: Any) -> Any:
    """Converts a metadata value for JSON."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def apr_architecture(spec: ArchSpec, name: str, original_format: str) -> dict[str, Any]:
    """Makes a model's `.apr` metadata, without rope scaling and tokenizer."""
    rows = {row.hf: row for row in (*SHAPE, *OWN.values()) if row.hf}
    return {
        "model_type": spec.family,
        "name": name,
        "original_format": original_format,
        "architecture": spec.family,
        "param_count": count_parameters(spec),
        **{key: rows[name].value(spec) for key, name in INTEGERS.items()},
        "rope_theta": spec.rope_theta,
        "rope_type": NEOX,
        **{
            name: rows[name].value(spec)
            for name in ("rms_norm_eps", "tie_word_embeddings", "attention_bias", "hidden_act")
        },
        **({OWN_KEY: own} if (own := own_entries(spec)) else {}),
    }


def apr_metadata(spec: ArchSpec, name: str, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Makes the metadata of an `.apr` file; `tokenizer` holds GGUF key-values."""
    metadata = apr_architecture(spec, name, "kdjax")
    said = config_entries(spec, {})
    names = "rope_theta", "rms_norm_eps", "rope_scaling"
    metadata |= {name: said[name] for name in names if name in said}
    parts = {key: tokenizer.get(name) for key, name in TOKENIZER.items()}
    return metadata | {key: as_json(value) for key, value in parts.items() if value is not None}
