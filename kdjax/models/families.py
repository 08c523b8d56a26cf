"""The model families, a row each: what differs between them and no header says.

Nothing else compares family names. Sources: Transformers' configuration_{qwen2,qwen3,llama}.py;
llama.cpp's convert_hf_to_gguf.py and gguf-py/gguf/constants.py.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Family:
    """Facts of a family, by which its files are read and written."""

    name: str  # in GGUF headers (`general.architecture`) and config.json (`model_type`)
    hf_architecture: str  # the class in Transformers
    qkv_bias: bool = False  # queries, keys and values have biases, whatever `attention_bias` says
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json has none; None: hidden_size / heads
    interleaved: bool = False  # llama.cpp stores the rows of q and k as pairs (i, i + D/2)
    pre_tokenizer: str = "unknown"  # of a file that names none: a key of `PRE_TOKENIZERS`
    # Models of contexts up to this were published with rope theta 1e4; later ones have 1e5 or more,
    # or scale their rotations (Qwen2-Math: 4,096; CodeLlama's relatives: 16,384).
    small_theta_context: int = 0
    # Entries of config.json and of a GGUF header that only this family has.
    config_keys: tuple[str, ...] = ("attention_bias",)
    gguf_keys: tuple[str, ...] = ()


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            qkv_bias=True,
            pre_tokenizer="qwen2",
            small_theta_context=4096,
            config_keys=("use_sliding_window", "max_window_layers"),
        ),
        Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, head_dim=128, pre_tokenizer="qwen2"),
        Family(
            "llama",
            "LlamaForCausalLM",
            interleaved=True,
            small_theta_context=16384,
            config_keys=("attention_bias", "mlp_bias"),
            gguf_keys=("rope.dimension_count", "vocab_size"),
        ),
    )
}
