"""What each format says of the model: config.json, GGUF key-values, `.apr` metadata.

What the student's own file says is kept; what kdjax knows better (shapes, the tied head, types)
replaces it. Sources: Transformers' configuration files and modeling_rope_utils.py,
llama.cpp's gguf-py/gguf/constants.py.
"""

import dataclasses
from typing import Any

import numpy as np

from kdjax.errors import UserError
from kdjax.export.vocabulary import is_empty
from kdjax.formats import TensorTable
from kdjax.formats.apr.metadata import INTEGERS, NEOX, TOKENIZER
from kdjax.models.arch import (
    ACTIVATIONS,
    LOCAL,
    WHOLE,
    ArchSpec,
    RopeScaling,
    every_layer_but,
    gguf_query_scalar,
    rope_frequencies,
    yarn_attention_factor,
)
from kdjax.models.families import FAMILIES, Family
from kdjax.models.loading import count_parameters, is_gguf

TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Of the source's GGUF header what holds for its weights or its files only.
_STALE = (
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
    "quantize.",
    "split.",
    "tokenizer.",
)
# config.json entries likewise.
_STALE_HF = (
    "quantization_config",
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "tokenizer.",
    "apr.",
)


def rope_divisors(spec: ArchSpec) -> np.ndarray | None:
    """float32 `[head_dim / 2]` for GGUF's `rope_freqs.weight`; None where the header says it all.

    llama.cpp keeps Llama 3's scaling as one divisor a frequency.
    """
    scaling = spec.rope_scaling
    if scaling is None or scaling.kind not in ("divisors", "llama3"):
        return None
    unscaled = rope_frequencies(dataclasses.replace(spec, rope_scaling=None))[0]
    return (unscaled / rope_frequencies(spec)[0]).astype(np.float32)


def _published_llama3(spec: ArchSpec, scaling: RopeScaling) -> RopeScaling:
    """The named scaling whose divisors these are; raises `UserError` if it is none of Llama 3's."""
    named = RopeScaling("llama3", factor=max(scaling.divisors), original_positions=8192)
    same = rope_frequencies(dataclasses.replace(spec, rope_scaling=named))[0]
    if not np.allclose(same, rope_frequencies(spec)[0], rtol=1e-4):
        raise UserError(
            "found a model with rope divisors of its own (rope_freqs.weight); expected those of "
            "Llama 3.1 or 3.2, the only ones that config.json can name. Export GGUF."
        )
    return named


def rope_parameters(spec: ArchSpec) -> dict[str, Any] | None:
    """`rope_scaling` of config.json."""
    scaling = spec.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "divisors":
        scaling = _published_llama3(spec, scaling)
    config: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        config["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        config["low_freq_factor"] = scaling.low_freq_factor
        config["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        config |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        config |= {"attention_factor": scaling.attention_factor, "truncate": scaling.truncate}
    return config


def _hf_shape(spec: ArchSpec) -> dict[str, Any]:
    """The architecture's numbers by the names of config.json."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": _short(spec.rms_eps),
        "tie_word_embeddings": spec.tied,
    }


def hf_config(spec: ArchSpec, source: TensorTable, dtype: str, ids: dict[str, Any]) -> dict:
    """`config.json`; `ids` are the special tokens' ids by its names."""
    shape = _hf_shape(spec) | {"torch_dtype": TORCH_DTYPES[dtype]}
    if not is_gguf(source) and "architectures" in source.metadata:
        if "layer_types" in source.metadata:  # one a layer, of which some may be cut off
            shape["layer_types"] = [
                "sliding_attention" if window else "full_attention" for window in spec.windows()
            ]
        return _keep(source, _STALE_HF) | shape
    config = {
        "architectures": [FAMILIES[spec.family].hf_architecture],
        "model_type": spec.family,
        # Without one, Transformers 4.57.3 and later take the tokenizer for Mistral's, and warn.
        "transformers_version": "5.0.0",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "rope_theta": _short(spec.rope_theta),
        **shape,
        **ids,
    }
    if scaling := rope_parameters(spec):
        config["rope_scaling"] = scaling
    family = FAMILIES[spec.family]
    own: dict[str, Any] = {
        "hidden_act": spec.activation,
        "hidden_activation": spec.activation,
        "use_sliding_window": False,
        "max_window_layers": spec.num_layers,
        "attention_bias": spec.o_bias,
        "mlp_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_used,
        "moe_intermediate_size": spec.expert_size,
        "norm_topk_prob": spec.norm_experts,
        "query_pre_attn_scalar": spec.query_scalar or spec.head_dim,
        "sliding_window": spec.window or None,
        "rope_local_base_freq": _short(spec.local_rope_theta),
        "layer_types": [LOCAL if window else WHOLE for window in spec.windows()],
    }
    activation = "hidden_activation" if "hidden_activation" in family.computed else "hidden_act"
    return config | {key: own[key] for key in (activation, *family.config_keys)}


def _short(value: float) -> float:
    """The shortest number that is the same float32: 1e-6 for 9.99999997e-07."""
    return float(str(np.float32(value)))


def gguf_shape(spec: ArchSpec) -> dict[str, Any]:
    """The architecture as GGUF key-values; raises `UserError` for one that GGUF cannot tell."""
    scaling, family = spec.rope_scaling, FAMILIES[spec.family]
    if ACTIVATIONS[spec.activation] is not ACTIVATIONS[family.activation]:
        raise UserError(
            f"found a model with hidden_act {spec.activation!r}; expected {family.activation}, "
            f"which llama.cpp computes in every {spec.family} model. Export --format=hf."
        )
    if spec.experts and not spec.norm_experts:
        raise UserError(
            "found a model with norm_topk_prob=false; expected true, which llama.cpp computes in "
            f"every {spec.family} model. Export --format=hf."
        )
    _check_windows(spec, family)
    if scaling is not None and not scaling.truncate:
        raise UserError(
            "found yarn with truncate=false; expected whole dimensions, which llama.cpp computes. "
            "Export --format=hf."
        )
    values: dict[str, Any] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.mlp_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.layer_norm_rms_epsilon": float(spec.rms_eps),
        "rope.freq_base": float(spec.rope_theta),
    }
    if spec.head_dim * spec.num_heads != spec.hidden_size:
        values |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    own: dict[str, Any] = {
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "expert_count": spec.experts,
        "expert_used_count": spec.experts_used,
        "expert_feed_forward_length": spec.expert_size,
    }
    if spec.local:
        own["attention.sliding_window"] = spec.window
        own["rope.freq_base_swa"] = float(spec.local_rope_theta)
    values |= {key: own[key] for key in family.gguf_keys if key in own}
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling is not None and scaling.kind == "yarn":
        # llama.cpp multiplies yarn's own factor by `attn_factor`.
        theirs = yarn_attention_factor(scaling.factor)
        values |= {
            "rope.scaling.original_context_length": scaling.original_positions,
            "rope.scaling.attn_factor": float(scaling.attention_factor / theirs),
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
    return {f"{family.gguf}.{key}": value for key, value in values.items()}


def _check_windows(spec: ArchSpec, family: Family) -> None:
    """Raises `UserError` for windows and scales of scores that no key of a GGUF header says."""
    scalar = gguf_query_scalar(family, spec.num_layers, spec.hidden_size // spec.num_heads)
    if spec.query_scalar != scalar:
        raise UserError(
            f"found a model with query_pre_attn_scalar {spec.query_scalar:g}; expected "
            f"{scalar or spec.head_dim:g}, which llama.cpp computes for {spec.num_layers} layers. "
            "Export --format=hf."
        )
    if not spec.window:
        return
    if not family.window_period:
        raise UserError(
            f"found a {spec.family} model with a window of {spec.window} positions; expected none, "
            "as llama.cpp computes. Export --format=hf, or set sliding_window to null if texts "
            "are never longer."
        )
    if spec.local != every_layer_but(family.window_period, spec.num_layers):
        raise UserError(
            f"found layers with a window other than all but each {family.window_period}th; "
            "expected what llama.cpp computes. Export --format=hf."
        )


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
    base |= gguf_shape(spec) | {"general.file_type": file_type}
    return base | {"general.quantization_version": 2} | tokenizer


def as_json(value: Any) -> Any:
    """A metadata value as JSON takes it."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def apr_architecture(spec: ArchSpec, name: str, original_format: str) -> dict[str, Any]:
    """What `.apr` metadata say of a model but for rope scaling and tokenizer."""
    shape = _hf_shape(spec)
    return {
        "model_type": spec.family,
        "name": name,
        "original_format": original_format,
        "architecture": spec.family,
        "param_count": count_parameters(spec),
        **{key: shape[name] for key, name in INTEGERS.items()},
        "rope_theta": spec.rope_theta,
        "rope_type": NEOX,
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.o_bias,
        "hidden_act": spec.activation,
    }


def apr_metadata(spec: ArchSpec, name: str, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Metadata of an `.apr` file; `tokenizer` as GGUF key-values."""
    metadata = apr_architecture(spec, name, "kdjax")
    metadata |= {"rope_theta": _short(spec.rope_theta), "rms_norm_eps": _short(spec.rms_eps)}
    if scaling := rope_parameters(spec):
        metadata["rope_scaling"] = scaling
    parts = {key: tokenizer.get(name) for key, name in TOKENIZER.items()}
    return metadata | {key: as_json(value) for key, value in parts.items() if value is not None}
