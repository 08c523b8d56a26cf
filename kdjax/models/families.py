"""The model families, one row each: differences that no header tells.

Nothing else compares family names. Sources: Transformers' configuration and modeling files of each;
llama.cpp's convert_hf_to_gguf.py, src/models and gguf-py/gguf/constants.py.
"""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """Facts of a family, by which its files are read and written."""

    name: str  # in config.json (`model_type`)
    hf_architecture: str  # the class in Transformers
    qkv_bias: bool = False  # queries, keys and values have biases, whatever `attention_bias` says
    qk_norm: bool = False
    qk_norm_whole: bool = False  # over all heads together
    head_dim: int | None = None  # if config.json has none; None: hidden_size / heads
    activation: str = "silu"  # in its GGUF files, and in a config.json that names none
    tied: bool = False  # where config.json does not say
    rope_theta: float = 1e4  # likewise
    rms_eps: float = 1e-6  # likewise
    # Other values of its class in Transformers, for entries that a config.json does not have; one
    # that is null has none.
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    names_rope: bool = False  # its config.json has rotary parameters: Transformers assumes yarn's
    norm_offset: bool = False  # norms multiply by 1 + weight; GGUF files hold that sum
    pre_norms: bool = True  # of the inputs of attention and MLP
    post_norms: bool = False  # of their outputs, before these are added
    scaled_embedding: bool = False  # by the root of the width
    gated: bool = False  # heads of attention have gates in addition to queries
    # `model_type` of folders with an image model whose `text_config` is such a model.
    multimodal: str = ""
    rotated_part: float = 1.0  # of a head's columns, if config.json does not say
    # Every N-th layer sees all positions, the others a window; 0: all layers see all.
    window_period: int = 0
    # llama.cpp rotates nothing in every N-th layer; 0: all layers rotate.
    unrotated_period: int = 0
    # llama.cpp scales scores of GGUF models with N layers by the width over the heads.
    shared_scale_layers: int = 0
    gguf_name: str = ""  # `general.architecture`, where it is not `name`
    # A key of its GGUF headers that another family of this name does not have.
    gguf_mark: str = ""
    biases: bool = True  # `attention_bias` of config.json adds some; its class ignores it otherwise
    # The projections of attention whose biases llama.cpp reads from its files: "", "qkv" or "qkvo".
    # It opens no file with other tensors.
    gguf_biases: str = "qkv"
    gguf_tied: bool = True  # llama.cpp takes the embedding for a head that a file does not have
    # Activations that it computes, if not all.
    activations: tuple[str, ...] = ()
    apr: bool = True  # .apr files can store it
    apr_windows: bool = False  # and its windows
    fused: bool = False  # files keep q, k and v as one matrix, and gate and up as another
    fused_experts: bool = False  # Hugging Face's files have all experts of a layer in two tensors
    # Kinds of rope scaling that it computes, by the names of `rope_type`.
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "longrope")
    # Kinds whose divisors llama.cpp reads from its files; it opens no file with others.
    gguf_divisors: tuple[str, ...] = ()
    tapped: bool = False  # llama.cpp passes the inputs of its layers to heads that kdjax writes
    interleaved: bool = False  # llama.cpp stores the rows of q and k as pairs (i, i + D/2)
    pre_tokenizer: str = "unknown"  # for a file that names none: a key of `PRE_TOKENIZERS`
    # Rows of `schema` that not every family has, in the order in which they are written.
    fields: tuple[str, ...] = ("hidden_act", "attention_bias")

    @property
    def experts(self) -> bool:
        """Whether its MLPs are experts, of which a router picks a few for each token."""
        return "experts" in self.fields

    @property
    def delta(self) -> bool:
        """Whether it has delta layers in addition to attention."""
        return "delta" in self.fields

    @property
    def gguf(self) -> str:
        """`general.architecture` of its files."""
        return self.gguf_name or self.name


_OLMO: dict[str, Any] = dict(
    qk_norm=True,
    qk_norm_whole=True,
    pre_norms=False,
    post_norms=True,
    rms_eps=1e-5,
    gguf_biases="",
    gguf_tied=False,
    pre_tokenizer="dbrx",
)

_QWEN35: dict[str, Any] = dict(
    tapped=True,
    apr=False,
    gguf_biases="",
    activations=("silu", "swish"),  # in delta layers too
    qk_norm=True,
    head_dim=256,
    norm_offset=True,
    gated=True,
    rotated_part=0.25,
    pre_tokenizer="qwen35",
)
_QWEN35_FIELDS = (
    "hidden_act",
    "attention_bias",
    "key_length",
    "value_length",
    "columns",
    "rotated_columns",
    "rope_sections",
    "rope_parameters",
    "delta_key_heads",
    "delta_value_heads",
    "delta_key_dim",
    "delta_value_dim",
    "delta_values",
    "delta_kernel",
    "drafts",
    "delta",
    "full_interval",
)

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            absent={"num_key_value_heads": 32},
            qkv_bias=True,
            pre_tokenizer="qwen2",
            fields=("hidden_act", "use_sliding_window", "max_window_layers"),
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            tapped=True,
            absent={"num_key_value_heads": 32},
            qk_norm=True,
            head_dim=128,
            pre_tokenizer="qwen2",
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            tapped=True,
            absent={"num_key_value_heads": 4},
            qk_norm=True,
            gguf_name="qwen3moe",
            pre_tokenizer="qwen2",
            fields=(
                "hidden_act",
                "attention_bias",
                "decoder_sparse_step",
                "mlp_only_layers",
                "key_length",
                "value_length",
                "experts",
                "experts_used",
                "expert_size",
                "norm_experts",
            ),
        ),
        Family(
            "llama",
            "LlamaForCausalLM",
            tapped=True,
            gguf_biases="qkvo",
            gguf_divisors=("llama3", "longrope"),
            interleaved=True,
            fields=(
                "hidden_act",
                "attention_bias",
                "mlp_bias",
                "rotated_columns",
                "gguf_vocab_size",
            ),
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            tapped=True,
            biases=False,
            gguf_biases="qkvo",
            absent={"num_key_value_heads": 8, "sliding_window": 4096},
            gguf_name="llama",
            gguf_divisors=("llama3", "longrope"),
            interleaved=True,
            fields=("hidden_act", "window", "rotated_columns", "gguf_vocab_size"),
        ),
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            absent={"num_key_value_heads": 4},
            interleaved=True,
            tied=True,
            rope_theta=2e6,
            unrotated_period=4,
            fields=(
                "hidden_act",
                "attention_bias",
                "mlp_bias",
                "rotated",
                "rotated_columns",
                "gguf_vocab_size",
            ),
        ),
        Family(
            "granite",
            "GraniteForCausalLM",
            gguf_biases="qkvo",
            gguf_divisors=("llama3", "longrope"),
            interleaved=True,
            fields=(
                "hidden_act",
                "attention_bias",
                "mlp_bias",
                "embedding_multiplier",
                "residual_multiplier",
                "attention_multiplier",
                "logits_scaling",
                "rotates",
                "rotated_columns",
                "gguf_vocab_size",
            ),
        ),
        Family(
            "minicpm",
            "MiniCPMForCausalLM",
            gguf_biases="qkvo",
            gguf_divisors=("llama3", "longrope"),
            interleaved=True,
            tied=True,
            fields=(
                "hidden_act",
                "attention_bias",
                "scale_emb",
                "scale_depth",
                "dim_model_base",
                "auto_map",
                "rotated_columns",
                "gguf_vocab_size",
            ),
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            absent={"num_key_value_heads": 4, "sliding_window": 4096},
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
            fields=(
                "key_length",
                "value_length",
                "hidden_activation",
                "attention_scale",
                "window",
                "local",
                "local_rope_theta",
                "attention_bias",
            ),
        ),
        Family(
            "ministral3",
            "Ministral3ForCausalLM",
            biases=False,
            gguf_biases="qkvo",
            absent={"num_key_value_heads": 8},
            gguf_name="mistral3",
            interleaved=True,
            head_dim=128,
            rms_eps=1e-5,
            names_rope=True,
            scalings=("yarn",),
            pre_tokenizer="tekken",
            fields=(
                "key_length",
                "value_length",
                "hidden_act",
                "attention_bias",
                "window",
                "rotated_columns",
                "gguf_vocab_size",
                "query_growth",
                "growth_length",
                "yarn_log_multiplier",
            ),
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            biases=False,
            gguf_biases="",
            absent={"original_max_position_embeddings": 4096},
            fused=True,
            apr_windows=True,
            rms_eps=1e-5,
            scalings=("longrope", "su"),
            gguf_divisors=("longrope",),
            fields=(
                "hidden_act",
                "attention_bias",
                "window",
                "no_gguf_window",
                "columns",
                "rotated_columns",
                "original_positions",
                "auto_map",
            ),
        ),
        Family(
            "olmo3",
            "Olmo3ForCausalLM",
            absent={"sliding_window": 4096},
            gguf_name="olmo2",
            gguf_mark="attention.sliding_window",
            window_period=4,
            apr_windows=True,
            rope_theta=5e5,
            fields=("hidden_act", "attention_bias", "window", "local", "near_rope_theta"),
            **_OLMO,
        ),
        Family("olmo2", "Olmo2ForCausalLM", **_OLMO),
        Family(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            absent={"num_key_value_heads": 4},
            gguf_name="qwen35",
            multimodal="qwen3_5",
            fields=_QWEN35_FIELDS,
            **_QWEN35,
        ),
        Family(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            absent={"num_key_value_heads": 2},
            gguf_name="qwen35moe",
            multimodal="qwen3_5_moe",
            fused_experts=True,
            fields=(
                *_QWEN35_FIELDS,
                "experts",
                "experts_used",
                "expert_size",
                "shared_size",
                "always_norm_experts",
            ),
            **_QWEN35,
        ),
    )
}


def find_gguf_family(name: object, keys: Container[str]) -> Family | None:
    """The family of a `general.architecture` whose header has these keys; None if it is unknown.

    Among several families of one name, the first that fits.
    """
    for family in FAMILIES.values() if isinstance(name, str) else ():
        if family.gguf == name and (not family.gguf_mark or f"{name}.{family.gguf_mark}" in keys):
            return family
    return None
