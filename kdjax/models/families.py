"""The model families, a row each: what differs between them and no header says.

Nothing else compares family names. Sources: Transformers' configuration and modeling files of each;
llama.cpp's convert_hf_to_gguf.py, src/models and gguf-py/gguf/constants.py.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Family:
    """Facts of a family, by which its files are read and written."""

    name: str  # in config.json (`model_type`)
    hf_architecture: str  # the class in Transformers
    qkv_bias: bool = False  # queries, keys and values have biases, whatever `attention_bias` says
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json has none; None: hidden_size / heads
    activation: str = "silu"  # of its GGUF files, and of a config.json that names none
    tied: bool = False  # where config.json does not say
    rope_theta: float = 1e4  # likewise
    norm_offset: bool = False  # norms multiply by 1 + weight; GGUF files hold that sum
    post_norms: bool = False  # of what attention and MLP give, before it is added
    scaled_embedding: bool = False  # by the root of the width
    # Of every so many layers the last sees all positions, the others a window; 0: all see all.
    window_period: int = 0
    # llama.cpp scales scores of GGUF models of so many layers by the width over the heads.
    shared_scale_layers: int = 0
    experts: bool = False  # its MLPs are experts, of which a router picks a few a token
    gguf_name: str = ""  # `general.architecture`, where it is not `name`
    apr: bool = True  # .apr files hold it
    interleaved: bool = False  # llama.cpp stores the rows of q and k as pairs (i, i + D/2)
    pre_tokenizer: str = "unknown"  # of a file that names none: a key of `PRE_TOKENIZERS`
    # Models of contexts up to this were published with rope theta 1e4; later ones have 1e5 or more,
    # or scale their rotations (Qwen2-Math: 4,096; CodeLlama's relatives: 16,384).
    small_theta_context: int = 0
    # Entries of config.json and of a GGUF header that only this family has.
    computed: tuple[str, ...] = ()  # read from config.json for this family alone
    config_keys: tuple[str, ...] = ("attention_bias",)  # written there beside what all have
    gguf_keys: tuple[str, ...] = ()

    @property
    def gguf(self) -> str:
        """`general.architecture` of its files."""
        return self.gguf_name or self.name


_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")

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
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            qk_norm=True,
            head_dim=128,
            experts=True,
            gguf_name="qwen3moe",
            pre_tokenizer="qwen2",
            computed=("num_local_experts", *_EXPERTS),  # the first since Transformers 5
            config_keys=("attention_bias", "decoder_sparse_step", "mlp_only_layers", *_EXPERTS),
            gguf_keys=(
                "attention.key_length",
                "attention.value_length",
                "expert_count",
                "expert_used_count",
                "expert_feed_forward_length",
            ),
        ),
        Family(
            "llama",
            "LlamaForCausalLM",
            interleaved=True,
            small_theta_context=16384,
            config_keys=("attention_bias", "mlp_bias"),
            gguf_keys=("rope.dimension_count", "vocab_size"),
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            gguf_name="llama",
            interleaved=True,
            small_theta_context=32768,
            computed=("sliding_window",),
            config_keys=("sliding_window",),
            gguf_keys=("rope.dimension_count", "vocab_size"),
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            gguf_name="gemma3",
            apr=False,
            qk_norm=True,
            head_dim=256,
            activation="gelu_pytorch_tanh",
            norm_offset=True,
            post_norms=True,
            scaled_embedding=True,
            window_period=6,
            shared_scale_layers=62,
            tied=True,
            rope_theta=1e6,
            computed=(
                "hidden_activation",
                "query_pre_attn_scalar",
                "sliding_window",
                "layer_types",
                "rope_local_base_freq",
                "sliding_window_pattern",
                "_sliding_window_pattern",
            ),
            config_keys=(
                "hidden_activation",
                "query_pre_attn_scalar",
                "sliding_window",
                "layer_types",
                "rope_local_base_freq",
                "attention_bias",
            ),
            gguf_keys=(
                "attention.key_length",
                "attention.value_length",
                "attention.sliding_window",
                "attention.sliding_window_pattern",
                "rope.freq_base_swa",
            ),
        ),
    )
}
# By `general.architecture`; of several families of one name the first, which computes as much.
GGUF_FAMILIES = {f.gguf: f for f in reversed(FAMILIES.values())}
