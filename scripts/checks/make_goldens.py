"""Makes tests/goldens: small random models and what Transformers (torch, float32) makes of them.

    pip install -e '.[parity]' && python -m scripts.checks.make_goldens

Each folder is a Hugging Face checkpoint, and `expected.npz` beside it holds tokens, logits and the
output of every layer. `ropes.json` and `activations.json` are those functions alone. Remake them
when a case is added, at the end of its list; never to make a failing test pass.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
_SMALL = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
_LONGROPE = dict(
    short_factor=[1.0, 1.05, 1.1, 1.2, 1.3, 1.5], long_factor=[1.1, 1.5, 2.0, 3.0, 5.0, 9.0]
)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
_SHARED = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
)
_TOKENS = dict(bos_token_id=0, eos_token_id=1, pad_token_id=None)  # theirs are beyond 160 rows
_DELTA: dict[str, Any] = dict(
    num_hidden_layers=4,
    head_dim=16,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=1e4,
        partial_rotary_factor=0.25,
        mrope_section=[1, 1, 0],
        mrope_interleaved=True,
    ),
)
_MSCALE = dict(_YARN, mscale=1.5, mscale_all_dim=0.3)

# name -> (Transformers class prefix, config overrides); a case's place is its seed
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_tied": ("Qwen2", dict(tie_word_embeddings=True, rope_theta=1e6)),
    "qwen2_untied": ("Qwen2", dict(tie_word_embeddings=False, rope_theta=1e6)),
    "qwen2_yarn": ("Qwen2", dict(rope_theta=1e4, rope_scaling=_YARN)),
    "qwen3": ("Qwen3", dict(head_dim=16, rope_theta=1e6, tie_word_embeddings=True)),
    "llama": ("Llama", dict(rope_theta=1e4)),
    "llama_scaled": ("Llama", dict(rope_theta=5e5, rope_scaling=_LLAMA3, attention_bias=True)),
    "llama_linear": ("Llama", dict(rope_scaling=dict(rope_type="linear", factor=2.0))),
    "qwen2_yarn_whole": ("Qwen2", dict(rope_theta=1e4, rope_scaling=dict(_YARN, truncate=False))),
    "qwen2_yarn_mscale": ("Qwen2", dict(rope_theta=1e4, rope_scaling=_MSCALE)),
    "llama_gelu": ("Llama", dict(rope_theta=1e4, hidden_act="gelu")),
    "mistral": ("Mistral", dict(rope_theta=1e4, sliding_window=7)),
    "gemma3": (
        "Gemma3",
        dict(
            head_dim=16,
            num_hidden_layers=4,
            sliding_window=7,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention", *2 * ["sliding_attention"]],
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=2.0, rope_theta=1e5),
                sliding_attention=dict(rope_type="default", rope_theta=1e3),
            ),
        ),
    ),
    "qwen3_moe": ("Qwen3Moe", dict(head_dim=16, rope_theta=1e6, norm_topk_prob=True, **_EXPERTS)),
    "qwen3_moe_plain": ("Qwen3Moe", dict(head_dim=16, tie_word_embeddings=True, **_EXPERTS)),
    "olmo2": ("Olmo2", dict(rope_theta=5e5)),
    "ministral3": (
        "Ministral3",
        dict(
            head_dim=16,
            rope_parameters=dict(
                _YARN,
                original_max_position_embeddings=8,
                rope_theta=1e4,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        ),
    ),
    "phi3": ("Phi3", dict(pad_token_id=0, sliding_window=7)),
    "phi3_long": (
        "Phi3",
        dict(
            pad_token_id=0,
            tie_word_embeddings=True,
            hidden_size=64,
            original_max_position_embeddings=16,
            rope_parameters=dict(
                _LONGROPE, rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75
            ),
        ),
    ),
    "olmo3": (
        "Olmo3",
        dict(
            num_hidden_layers=4,
            sliding_window=7,
            rope_parameters=dict(
                full_attention=dict(_YARN, rope_theta=1e4),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
    ),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=5, **_TOKENS)),
    "granite": (
        "Granite",
        dict(
            embedding_multiplier=6.0,
            residual_multiplier=0.22,
            attention_multiplier=0.4,
            logits_scaling=8.0,
        ),
    ),
    # Transformers has no class of it: Granite's computes the same where its scalars are these.
    "minicpm": (
        "Granite",
        dict(
            embedding_multiplier=12.0,
            residual_multiplier=1.4 / 3**0.5,
            attention_multiplier=12**-0.5,
            logits_scaling=3.0,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5": ("Qwen3_5", _DELTA),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        dict(_DELTA, intermediate_size=None, **_SHARED),
    ),
}
# What config.json says in place of the class's own entries: None takes one out.
_TOLD_AS: dict[str, dict[str, Any]] = {
    "minicpm": dict(
        model_type="minicpm",
        architectures=["MiniCPMForCausalLM"],
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=16,
        embedding_multiplier=None,
        residual_multiplier=None,
        attention_multiplier=None,
        logits_scaling=None,
    )
}
# Families whose text model has a config class of its own, and norms of 1 + weight.
_TEXT_CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")}

# Rotary parameters whose frequencies are kept, beside those of the models.
ROPES: tuple[dict[str, Any], ...] = (
    dict(rope_type="default"),
    dict(rope_type="linear", factor=2.5),
    _LLAMA3,
    _YARN,
    dict(_YARN, truncate=False),
    dict(_YARN, beta_fast=4.0, beta_slow=2.0),
    dict(_YARN, beta_fast=1e-3, beta_slow=1e-4, truncate=False),
    dict(_YARN, attention_factor=0.7),
    dict(_YARN, attention_factor=0.7, mscale=2.0, mscale_all_dim=1.0),
    _MSCALE,
    dict(_YARN, mscale=2.0),
    dict(_YARN, factor=1.0),
    dict(_YARN, factor=None),
)
POINTS = np.linspace(-6, 6, 25, dtype=np.float32)


def rope_goldens() -> list[dict[str, Any]]:
    """Frequencies `[head_dim / 2]` and factor on cos and sin, for each of `ROPES` and contexts."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    goldens = []
    for parameters in ROPES:
        # An entry of the model's own wins over `parameters`.
        for own in ({}, {"original_max_position_embeddings": 64}):
            given = {**_SMALL, "head_dim": 32, "rope_scaling": parameters, "rope_theta": 1e4, **own}
            config = transformers.LlamaConfig(**copy.deepcopy(given))  # it changes what it is given
            kind = parameters["rope_type"]
            default = LlamaRotaryEmbedding.compute_default_rope_parameters
            compute = ROPE_INIT_FUNCTIONS.get(kind, default)
            inverse, factor = compute(config)
            kept = {"config": given | {"model_type": "llama"}, "factor": float(factor)}
            goldens.append(kept | {"inverse": [float(x) for x in inverse]})
    return goldens


def activation_goldens() -> dict[str, list[float]]:
    """Values of each activation that kdjax knows at `POINTS`."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.activations import ACT2FN

    from kdjax.models.arch import ACTIVATIONS

    points = torch.from_numpy(POINTS)
    return {name: ACT2FN[name](points).tolist() for name in ACTIVATIONS}


def build(name: str, seed: int) -> Any:
    """A random float32 Transformers model of the case, in eval mode; norms are random too."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    prefix, overrides = CASES[name]
    given = copy.deepcopy({**_SMALL, **overrides})  # it changes what it is given
    config = getattr(transformers, _TEXT_CONFIGS.get(prefix, f"{prefix}Config"))(**given)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            # Norms near 1, everything else large enough that attention is far from uniform.
            weight.copy_(
                (prefix not in _TEXT_CONFIGS) + 0.2 * torch.randn_like(weight)
                if "norm" in key
                else 0.2 * torch.randn_like(weight)
            )
    return model


def save(name: str, model: Any, folder: Path) -> None:
    """Writes the case's checkpoint, under its family's own names."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name in _TOLD_AS:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | _TOLD_AS[name]
        config = {key: value for key, value in sorted(config.items()) if value is not None}
        path.write_text(json.dumps(config, indent=2) + "\n")


def expected(model: Any, tokens: np.ndarray) -> dict[str, Any]:
    """float32 logits `[B, T, V]` and layer outputs `[L, B, T, D]` (before the final norm).

    And the experts that each layer's router chose, `[L, B T, K]`, if there are any.
    """
    import torch  # pyright: ignore[reportMissingImports]

    captured: list[Any] = []
    handles = [
        layer.register_forward_hook(
            lambda _m, _i, out: captured.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in model.model.layers
    ]
    chosen: list[np.ndarray] = []
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    handles += [
        router.register_forward_hook(lambda _m, _i, out: chosen.append(out[2].numpy()))
        for router in routers
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens).long()).logits
    for handle in handles:
        handle.remove()
    layers = np.stack([layer.numpy() for layer in captured])
    found = dict(tokens=tokens, logits=logits.numpy(), layers=layers)
    return found | ({"experts": np.stack(chosen)} if chosen else {})


def main() -> None:
    """Writes every case."""
    for seed, name in enumerate(CASES):
        model = build(name, seed)
        folder = GOLDENS / name
        save(name, model, folder)
        tokens = np.random.default_rng(seed).integers(0, 160, (2, 24)).astype(np.int32)
        np.savez_compressed(folder / "expected.npz", **expected(model, tokens))
        print(folder)
    (GOLDENS / "ropes.json").write_text(json.dumps(rope_goldens(), indent=1))
    (GOLDENS / "activations.json").write_text(json.dumps(activation_goldens()))


if __name__ == "__main__":
    main()
