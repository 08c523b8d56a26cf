"""Checks the entries of headers that no row of `schema` reads.

An entry is read, or has no effect on the result, or is refused unless its value is neutral.
Sources: Transformers' configuration_utils.py, configuration files of the families and
modeling_rope_utils.py; the config.json files of published models.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import UserError

# fmt: off
WITHOUT_EFFECT = frozenset((
    # what wrote the file, and how it is loaded
    "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
    "name_or_path", "_commit_hash", "torchscript", "use_bfloat16", "tf_legacy_loss", "model_name",
    "unsloth_version", "unsloth_fixed", "transformers.js_config", "is_llama_config",
    "_attn_implementation_autoset", "attn_implementation", "_attn_implementation",
    "_experts_implementation", "gradient_checkpointing", "_flash_attn_2_enabled",
    "ignore_keys_at_rope_validation",
    # of training only
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    # the outputs of a call, and the number of parts that it computes
    "use_cache", "output_hidden_states", "output_attentions", "output_scores", "return_dict",
    "return_dict_in_generate", "tie_last_hidden_states", "chunk_size_feed_forward",
    "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    # only read where `use_sliding_window` is true; a family whose windows have no such switch
    # computes them
    "sliding_window", "max_window_layers",
    # of models that draft for this one (MiniCPM)
    "mup_denominator",
    # of classifiers
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "classifier_dropout",
    # of generation, and of tokenizers
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "tokenizer_class",
    "prefix", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "max_length",
    "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty",
    "is_decoder",
))
# Values that mean nothing, of a list its elements'; None always does.
NEUTRAL: dict[str, Any] = {
    "mlp_bias": False, "use_sliding_window": False, "layer_types": "full_attention",
    "is_causal": True, "is_encoder_decoder": False, "add_cross_attention": False,
    "tie_encoder_decoder": False, "cross_attention_hidden_size": None, "pruned_heads": {},
    "per_layer_config": None, "quantization_config": None, "auto_map": None,
    "partial_rotary_factor": 1.0, "rope_interleaved": False, "use_mrope": False,
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    # every layer has experts alone, whose weights sum to 1
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "shared_expert_intermediate_size": 0,
    "num_shared_experts": 0, "n_shared_experts": 0,
    # in Phi-4-mini's files; Transformers' class reads none of them
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
    # a next-token block in a family that is not known to have one, and its separate embedding; a
    # gate of attention's output, states in float32
    "mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": False, "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
}
ROPE_COMPUTED = frozenset((
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "truncate", "short_factor", "long_factor",
))
ROPE_WITHOUT_EFFECT = frozenset(("finetuned",))  # it said how a file came about
ROPE_NEUTRAL: dict[str, Any] = {"partial_rotary_factor": 1.0, "mrope_section": None}
# Of a GGUF header, by names without the family's: how files came about, and what llama.cpp reads
# in other architectures only.
GGUF_WITHOUT_EFFECT = frozenset((
    "rope.scaling.finetuned", "tensor_data_layout", "attention.layer_norm_epsilon",
    "decoder_start_token_id",
))
# Of files that say how images become embeddings, which text has no part of.
_GGUF_OF_IMAGES = ("vision.", "mm.")
GGUF_NEUTRAL: dict[str, Any] = {
    "expert_count": 0, "expert_used_count": 0, "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_gating_func": 1,  # softmax
    "expert_group_count": 1, "expert_group_used_count": 1, "leading_dense_block_count": 0,
    "interleave_moe_layer_step": 1, "nextn_predict_layers": 0, "attention.sliding_window": 0,
    "logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0,
    "use_parallel_residual": False, "attention.causal": True, "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
    "rope.scale_linear": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
# fmt: on


def _means_nothing(value: object, neutral: object) -> bool:
    value = np.asarray(value, object)
    return all(item is None or item == neutral for item in value.ravel().tolist())


def _list_problems(
    entries: Mapping[str, Any], neutral: Mapping[str, Any], known: frozenset[str] = frozenset()
) -> list[str]:
    problems = []
    for name, value in entries.items():
        if name not in known and not _means_nothing(value, neutral.get(name)):
            wanted = f"expected {neutral[name]}" if name in neutral else "unknown"
            problems.append(f"{name}={str(value)[:60]}: {wanted}")
    return problems


def check_fields(
    config: Mapping[str, Any],
    ropes: Sequence[Mapping[str, Any]],
    path: Path,
    known: frozenset[str],
) -> None:
    """Raises one `UserError` that lists every entry that may change the model's results.

    `ropes` are the entries of config.json that hold rotary parameters, `known` the names that are
    read; `path` is named.
    """
    # .apr files store tokenizer and notes among the entries of config.json.
    own = {k: v for k, v in config.items() if not k.startswith(("tokenizer.", "apr."))}
    problems = _list_problems(own, NEUTRAL, known | WITHOUT_EFFECT)
    for rope in ropes:
        harmless = ROPE_COMPUTED | ROPE_WITHOUT_EFFECT | known
        rope_problems = _list_problems(rope, ROPE_NEUTRAL, harmless)
        problems += [f"rotary {problem}" for problem in rope_problems]
    if problems:
        raise UserError(
            f"{path} sets what this decoder does not compute:\n  "
            + "\n  ".join(problems)
            + "\nUse a checkpoint without it. An unknown entry that changes nothing can be deleted "
            "from config.json."
        )


def check_gguf_fields(
    metadata: Mapping[str, Any],
    arch: str,
    head_dim: int,
    path: Path,
    known: frozenset[str],
) -> None:
    """Checks the key-values of a GGUF header that begin with `arch`, as `check_fields` does."""
    whole = {"rope.dimension_count": head_dim, "attention.value_length": head_dim}
    known = known | GGUF_WITHOUT_EFFECT
    own = {key.removeprefix(f"{arch}."): key for key in metadata if key.startswith(f"{arch}.")}
    own = {name: key for name, key in own.items() if not name.startswith(_GGUF_OF_IMAGES)}
    named = {name: metadata[key] for name, key in own.items() if name not in known}
    if problems := _list_problems(named, GGUF_NEUTRAL | whole):
        raise UserError(
            f"{path} sets what this decoder does not compute:\n  "
            + "\n  ".join(f"{arch}.{problem}" for problem in problems)
            + "\nUse a file without it. An unknown key that changes nothing can be taken out with "
            "gguf-py's gguf-new-metadata --remove-metadata KEY."
        )
