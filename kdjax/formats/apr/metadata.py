"""Translates an `.apr` file's description of its model into the names that kdjax reads.

Its tensors have Hugging Face's names, so the architecture gets the names of `config.json`; the
tokenizer gets those of GGUF, which has the same parts.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from kdjax.formats.files import bad, load_json
from kdjax.formats.table import TensorInfo

# The key under which `scripts/apr/convert.py` stores what it needs to restore a GGUF file.
GGUF_KEY = "kdjax.gguf"
# Entries of config.json for which `.apr` files have no name: each belongs to one family.
OWN_KEY = "kdjax.config"
# Numbers of the architecture: `.apr` name -> name in config.json.
INTEGERS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "head_dim": "head_dim",
}
_REALS = ("rope_theta", "rms_norm_eps")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_OPTIONAL = ("num_kv_heads", "head_dim")
# Parts of a tokenizer: `.apr` name -> GGUF name.
TOKENIZER = {
    "tokenizer.model": "tokenizer.ggml.model",
    "tokenizer.pre_type": "tokenizer.ggml.pre",
    "tokenizer.vocabulary": "tokenizer.ggml.tokens",
    "tokenizer.token_type": "tokenizer.ggml.token_type",
    "tokenizer.merges": "tokenizer.ggml.merges",
    "tokenizer.bos_token_id": "tokenizer.ggml.bos_token_id",
    "tokenizer.eos_token_id": "tokenizer.ggml.eos_token_id",
    "tokenizer.padding_token_id": "tokenizer.ggml.padding_token_id",
    "tokenizer.add_bos_token": "tokenizer.ggml.add_bos_token",
    "chat_template": "tokenizer.chat_template",
}
NEOX = 2  # rope_type: halves of a head rotate, as in Hugging Face's layout
ROPE_TYPE = "apr.rope_type"  # an entry added to those of config.json: the file's rope_type
_REMEDY = "Put the model's config.json next to the file."


def _is_integer(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 31


def _is_positive(value: object) -> bool:
    return _is_integer(value) and value > 0


def _is_real(value: Any) -> bool:
    # An int beyond float's range would overflow in math.isfinite.
    return type(value) in (int, float) and 0 < value < 1e300 and math.isfinite(value)


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_rope(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(item, str)
        if key in ("rope_type", "type")
        else item is None or _is_bool(item) or _is_real(item) or _are_reals(item)
        for key, item in value.items()
    )


def _are_reals(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_real, value))


def _is_own(value: object) -> bool:
    return isinstance(value, dict) and all(
        any(fits(item) for fits in (_is_real, _is_bool, _are_ids, _are_strings))
        or (
            key == "rope_parameters"
            and isinstance(item, dict)
            and all(map(_is_rope, item.values()))
        )
        for key, item in value.items()
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


def _are_strings(value: object) -> TypeGuard[list[str]]:
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        return False
    # JSON can spell halves of surrogate pairs, which are not text.
    try:
        return "".join(value).encode() is not None
    except UnicodeEncodeError:
        return False


def _are_pairs(value: object) -> bool:
    return _are_strings(value) and all(merge.count(" ") == 1 for merge in value)


def _is_text(value: object) -> bool:
    return _are_strings([value])


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(INTEGERS, (_is_positive, "a whole number above 0")),
    **dict.fromkeys(_REALS, (_is_real, "a number above 0")),
    **dict.fromkeys(("architecture", "model_type", "hidden_act", *TOKENIZER), (_is_text, "a text")),
    **dict.fromkeys((*_SWITCHES, "tokenizer.add_bos_token"), (_is_bool, "true or false")),
    "rope_scaling": (_is_rope, "an object of numbers"),
    "rope_type": (_is_integer, "a whole number"),
    OWN_KEY: (_is_own, "an object of numbers and lists"),
    "tokenizer.vocabulary": (_are_strings, "a list of texts"),
    "tokenizer.merges": (_are_pairs, "a list of texts with one space each"),
    "tokenizer.token_type": (_are_ids, "a list of whole numbers"),
    **dict.fromkeys(
        (f"tokenizer.{part}_token_id" for part in ("bos", "eos", "padding")),
        (_is_integer, "a token id"),
    ),
}


def _read_value(path: Path, stored: Mapping[str, Any], key: str) -> Any:
    """Reads the value of a known key, None if it is missing; raises `UserError` if malformed."""
    value = stored.get(key)
    # Some writers put the architecture under names like "model.hidden_size".
    value = stored.get(f"model.{key}") if value is None else value
    fits, wanted = _KINDS[key]
    if value is None or fits(value):
        return value
    found = f"metadata {key!r} = {str(value)[:80]!r}"
    raise bad(path, found, wanted, "Write the file again without it.")


def _architecture(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the architecture that the file states, under the names of config.json."""
    config = {INTEGERS[key]: _read_value(path, stored, key) for key in INTEGERS}
    others = (*_REALS, *_SWITCHES, "rope_scaling", "hidden_act")
    config |= {key: _read_value(path, stored, key) for key in others}
    config |= _read_value(path, stored, OWN_KEY) or {}
    family = _read_value(path, stored, "architecture") or _read_value(path, stored, "model_type")
    # "Qwen2ForCausalLM" is qwen2.
    config["model_type"] = family.lower().removesuffix("forcausallm") if family else None
    config[ROPE_TYPE] = _read_value(path, stored, "rope_type")
    return {key: value for key, value in config.items() if value is not None}


def _tokenizer(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF key-values of the stored tokenizer; empty where vocabulary or merges are missing."""
    parts = {name: _read_value(path, stored, key) for key, name in TOKENIZER.items()}
    if not parts["tokenizer.ggml.tokens"] or not parts["tokenizer.ggml.merges"]:
        return {}
    tokens, types = parts["tokenizer.ggml.tokens"], parts["tokenizer.ggml.token_type"]
    if types is not None and len(types) != len(tokens):
        found = f"{len(types)} token types for {len(tokens)} tokens"
        raise bad(path, found, "one for each", "Write the file again.")
    for key in ("bos", "eos", "padding"):
        if (parts[f"tokenizer.ggml.{key}_token_id"] or 0) >= len(tokens):
            found = f"a {key} token beyond the {len(tokens)} of the vocabulary"
            raise bad(path, found, "all of the tokens", "Write the file again with all of them.")
    if parts["tokenizer.ggml.model"] in (None, "bpe"):
        parts["tokenizer.ggml.model"] = "gpt2"
    if parts["tokenizer.chat_template"] is None and _is_text(stored.get("tokenizer.chat_template")):
        parts["tokenizer.chat_template"] = stored["tokenizer.chat_template"]
    return {name: value for name, value in parts.items() if value is not None}


def as_config(
    path: Path, stored: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """Reads the model's config and tokenizer from the metadata and a `config.json` next to it.

    `config.json` wins where both have a value, except for a file made from GGUF, which is complete.
    Raises `UserError` for malformed values, and if both lack a part of the architecture.
    """
    config = _architecture(path, stored)
    if "model.embed_tokens.weight" in tensors:
        # The vocabulary's size may leave out the padding rows that the embedding has.
        config["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    sibling, required = path.with_name("config.json"), ["model_type"]
    required += [INTEGERS[key] for key in INTEGERS if key not in _OPTIONAL]
    if stored.get(GGUF_KEY) is None and sibling.is_file():
        beside = load_json(sibling, "a file")
        config |= {key: value for key, value in beside.items() if value is not None}
    else:
        required += _REALS  # config.json may omit these: the family has defaults
    if missing := [key for key in required if key not in config]:
        found = f"metadata without {', '.join(missing)}, and no {sibling.name} that has them"
        raise bad(path, found, "the model's architecture in one of the two", _REMEDY)
    # config.json decides both; without one the file's tensors do.
    config.setdefault("tie_word_embeddings", "lm_head.weight" not in tensors)
    config.setdefault("attention_bias", "model.layers.0.self_attn.q_proj.bias" in tensors)
    return config | _tokenizer(path, stored)
