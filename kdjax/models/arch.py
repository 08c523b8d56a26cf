"""Decoder architectures as plain numbers, read from a checkpoint's own header.

One frozen `ArchSpec` describes all of `families.FAMILIES`; `decoder.Decoder` builds them.
Sources: the families' modeling files in Transformers and its modeling_rope_utils.py; llama.cpp's
gguf-py/gguf/constants.py for the GGUF keys and src/models for what no key says.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from kdjax.errors import UserError
from kdjax.formats import TensorTable
from kdjax.formats.apr.metadata import NEOX, ROPE_TYPE
from kdjax.formats.blocks import decode
from kdjax.models.families import FAMILIES, GGUF_FAMILIES, Family
from kdjax.models.fields import check_fields, check_gguf_fields

_gelu = functools.partial(jax.nn.gelu, approximate=False)
_gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
# What an MLP may apply to its gate, by Transformers' names (activations.py).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `kind` is "linear", "llama3", "yarn" or "divisors" (one divisor a frequency, as llama.cpp stores
    Llama 3.1's in `rope_freqs.weight`).
    """

    kind: str
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # on cos and sin
    truncate: bool = True  # yarn's ramp begins and ends at whole dimensions
    divisors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class ArchSpec:
    """Everything that fixes a decoder's shapes and arithmetic."""

    family: str
    vocab_size: int  # rows of the embedding, padding rows included
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    rope_theta: float
    rms_eps: float
    tied: bool  # the head is the embedding
    qkv_bias: bool
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of queries and keys, before rope (Qwen3)
    rope_scaling: RopeScaling | None = None
    activation: str = "silu"  # a key of `ACTIVATIONS`
    norm_offset: bool = False  # norms multiply by 1 + weight
    post_norms: bool = False  # of what attention and MLP give, before it is added
    scaled_embedding: bool = False  # by the root of hidden_size
    query_scalar: float = 0.0  # scores are scaled by its inverse root; 0: by head_dim's
    window: int = 0  # positions that a layer sees, its own included; 0: all that came before
    # Which layers see no more than the window, and turn by a theta of their own; (): all.
    local: tuple[bool, ...] = ()
    local_rope_theta: float = 0.0
    experts: int = 0  # MLPs in a layer, of which a router picks some a token; 0: one MLP for all
    experts_used: int = 0  # of them a token
    expert_size: int = 0  # width of one; `mlp_size` is then of no layer
    norm_experts: bool = False  # what the router gives those used is divided by its sum

    @property
    def score_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return (self.query_scalar or self.head_dim) ** -0.5

    def windows(self) -> tuple[int, ...]:
        """Of each layer its window, 0 for one that sees all."""
        local = self.local or (bool(self.window),) * self.num_layers
        return tuple(self.window if here else 0 for here in local)

    @property
    def mlp_width(self) -> int:
        """Units that a token passes through in a layer, of all experts used."""
        return self.experts_used * self.expert_size if self.experts else self.mlp_size

    def forward_flops(self, seq_len: int) -> float:
        """FLOP a token of one forward pass, causal attention and head included.

        Of experts those used.
        """
        d, hd = self.hidden_size, self.head_dim
        qo, kv = self.num_heads * hd, self.num_kv_heads * hd
        layer = 2 * d * qo + 2 * d * kv + 3 * d * self.mlp_width + d * self.experts
        products = self.num_layers * layer
        products += self.vocab_size * d
        seen = sum(_mean_keys(window or seq_len, seq_len) for window in self.windows())
        return 2.0 * products + 4.0 * qo * seen


def _mean_keys(window: int, length: int) -> float:
    """Keys that a query sees on average; half the length without a window."""
    window = min(window, length)
    return window - window * window / (2 * length)


def local_rope(spec: ArchSpec) -> ArchSpec:
    """The spec with the rotary parameters of its local layers, which are never scaled."""
    return dataclasses.replace(spec, rope_theta=spec.local_rope_theta, rope_scaling=None)


def rope_frequencies(spec: ArchSpec) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[head_dim / 2]` (float32, radians a position), factor on cos and sin.

    Follows Transformers' modeling_rope_utils.py, so that checkpoints mean the same here.
    """
    exponent = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    inverse = (1.0 / np.float32(spec.rope_theta) ** exponent).astype(np.float32)
    scaling = spec.rope_scaling
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "linear":
        return inverse / np.float32(scaling.factor), 1.0
    if scaling.kind == "divisors":
        return inverse / np.asarray(scaling.divisors, np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    return _yarn(inverse, spec, scaling)


def _llama3(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelength = 2 * np.pi / inverse
    low = scaling.original_positions / scaling.low_freq_factor
    high = scaling.original_positions / scaling.high_freq_factor
    stretched = np.where(wavelength > low, inverse / scaling.factor, inverse)
    smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    medium = (wavelength >= high) & (wavelength <= low)
    return np.where(medium, between, stretched).astype(np.float32)


def _yarn(inverse: np.ndarray, spec: ArchSpec, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    def boundary(rotations: float) -> float:
        turns = math.log(scaling.original_positions / (rotations * 2 * math.pi))
        return spec.head_dim * turns / (2 * math.log(spec.rope_theta))

    low, high = boundary(scaling.beta_fast), boundary(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    width = high - low if high != low else 1e-3
    keep = 1 - np.clip((np.arange(spec.head_dim // 2, dtype=np.float32) - low) / width, 0, 1)
    frequencies = inverse / scaling.factor * (1 - keep) + inverse * keep
    return frequencies.astype(np.float32), scaling.attention_factor


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cos and sin by when contexts grow `factor` times."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def spec_from_table(table: TensorTable) -> ArchSpec:
    """Reads the spec from a checkpoint's header; raises `UserError` for unknown architectures."""
    if "general.architecture" in table.metadata:
        return _from_gguf(table)
    return _from_hf(table)


def _find_family(name: object, table: TensorTable) -> Family:
    known = GGUF_FAMILIES if "general.architecture" in table.metadata else FAMILIES
    if not isinstance(name, str) or name not in known:
        raise UserError(
            f"{table.paths[0]} holds a {name!r} model; kdjax knows {', '.join(known)}. "
            "Use a checkpoint of one of these families."
        )
    return known[str(name)]


_EPSILON = "attention.layer_norm_rms_epsilon"
_REALS = "rope.freq_base", "rope.freq_base_swa", _EPSILON


def _from_gguf(table: TensorTable) -> ArchSpec:
    meta = table.metadata
    arch = meta["general.architecture"]
    family = _find_family(arch, table)

    def key(name: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{name}", default)
        if value is None:
            raise UserError(
                f"{table.paths[0]}: the GGUF header has no {arch}.{name}. The file is "
                "incomplete; convert it again with convert_hf_to_gguf.py, or download it again."
            )
        kinds = (int, float) if name in _REALS else (int,)
        if type(value) not in kinds or not 0 < value < 2**31:
            raise UserError(
                f"{table.paths[0]}: found {arch}.{name} = {str(value)[:80]!r}; expected a number "
                "between 0 and 2**31, whole where it counts. Download the file again."
            )
        return value

    if "token_embd.weight" not in table:
        raise UserError(
            f"{table.paths[0]}: no tensor token_embd.weight; this is not a whole model."
        )
    hidden, heads = int(key("embedding_length")), int(key("attention.head_count"))
    head_dim = int(key("attention.key_length", hidden // heads))
    check_gguf_fields(meta, arch, head_dim, table.paths[0], family.gguf_keys)
    layers = int(key("block_count"))
    if layers > len(table):
        raise UserError(
            f"{table.paths[0]}: found {arch}.block_count = {layers}; expected at most its "
            f"{len(table)} tensors. Download the file again."
        )
    window = int(meta.get(f"{arch}.attention.sliding_window") or 0) if family.window_period else 0
    experts: dict[str, Any] = {}
    if family.experts:
        count, used = int(key("expert_count")), int(key("expert_used_count"))
        size = int(key("expert_feed_forward_length"))
        experts = _experts(count, used, size, True, table.paths[0])
    return ArchSpec(
        family=family.name,
        vocab_size=table.info("token_embd.weight").shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(key("attention.head_count_kv", heads)),
        head_dim=head_dim,
        # llama.cpp's files of experts alone may lack it.
        mlp_size=int(key("feed_forward_length", 1 if experts else None)),
        max_positions=int(key("context_length")),
        rope_theta=float(key("rope.freq_base", 10000.0)),
        rms_eps=float(key(_EPSILON)),
        tied="output.weight" not in table,
        qkv_bias="blk.0.attn_q.bias" in table,
        o_bias="blk.0.attn_output.bias" in table,
        qk_norm="blk.0.attn_q_norm.weight" in table,
        rope_scaling=_gguf_scaling(table, arch),
        activation=family.activation,
        norm_offset=family.norm_offset,
        post_norms=family.post_norms,
        scaled_embedding=family.scaled_embedding,
        query_scalar=gguf_query_scalar(family, layers, hidden // heads),
        window=window,
        local=_gguf_local(meta, arch, family, layers) if window else (),
        local_rope_theta=float(key("rope.freq_base_swa", 10000.0)) if window else 0.0,
        **experts,
    )


def _experts(count: int, used: int, size: int, normalised: bool, path: Path) -> dict[str, Any]:
    """The fields of an `ArchSpec` for experts; raises `UserError` where more are used than are."""
    if used > count:
        raise UserError(
            f"{path}: found {used} experts used of {count}; expected no more than there are. "
            "Download the file again."
        )
    return dict(experts=count, experts_used=used, expert_size=size, norm_experts=normalised)


def gguf_query_scalar(family: Family, layers: int, width: int) -> float:
    """`ArchSpec.query_scalar` of a GGUF file, which has no key for it; `width` is D over heads."""
    return float(width) if layers == family.shared_scale_layers else 0.0


def _gguf_local(
    meta: Mapping[str, Any], arch: str, family: Family, layers: int
) -> tuple[bool, ...]:
    pattern = meta.get(f"{arch}.attention.sliding_window_pattern", family.window_period)
    if isinstance(pattern, int):
        return every_layer_but(pattern, layers)
    return tuple(bool(local) for local in pattern)


def every_layer_but(period: int, layers: int) -> tuple[bool, ...]:
    """All layers but each `period`-th."""
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def _gguf_scaling(table: TensorTable, family: str) -> RopeScaling | None:
    meta = table.metadata
    if "rope_freqs.weight" in table:
        info = table.info("rope_freqs.weight")
        divisors = np.ones(info.shape)  # of a header alone, from which nothing is rotated
        if table.holds("rope_freqs.weight"):
            divisors = np.asarray(decode(table.raw("rope_freqs.weight"), info.dtype))
        return RopeScaling("divisors", divisors=tuple(float(x) for x in divisors))
    kind = meta.get(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{table.paths[0]}: rope scaling {kind!r} is not one of none, linear, yarn."
        )

    def number(name: str, default: float) -> float:
        return float(meta.get(f"{family}.rope.scaling.{name}", default))

    factor = number("factor", 1.0)
    original = int(number("original_context_length", 0.0))
    if kind == "linear":
        return RopeScaling(kind, factor=factor, original_positions=original)
    return RopeScaling(
        kind,
        factor=factor,
        original_positions=original or int(meta[f"{family}.context_length"]),
        beta_fast=number("yarn_beta_fast", 32.0),
        beta_slow=number("yarn_beta_slow", 1.0),
        attention_factor=number("attn_factor", 1.0) * yarn_attention_factor(factor),
    )


def _from_hf(table: TensorTable) -> ArchSpec:
    config, path = table.metadata, table.paths[0]
    path = path if path.suffix == ".apr" else path.with_name("config.json")
    family = _find_family(config.get("model_type"), table)
    _check_rope_rows(family, table)
    rope, local_rope = _hf_ropes(config, family, path)
    check_fields(config, (rope, local_rope), path, family.computed)
    name = "hidden_activation" if "hidden_activation" in family.computed else "hidden_act"
    act = str(config.get(name) or family.activation)
    if act not in ACTIVATIONS:
        raise UserError(f"{path}: found {name} {act!r}; expected one of {', '.join(ACTIVATIONS)}.")

    def count(name: str, default: Any = None) -> int:
        return int(_read_number(config, name, path, default))

    def real(name: str, default: Any = None) -> float:
        return _read_number(config, name, path, default)

    hidden, heads = count("hidden_size"), count("num_attention_heads")
    layers = count("num_hidden_layers")
    biased = bool(config.get("attention_bias", False))
    head_dim = count("head_dim", family.head_dim or hidden // heads)
    scalar = real("query_pre_attn_scalar", 256) if family.window_period else 0.0
    window, local = _hf_windows(config, family, layers, path)
    experts: dict[str, Any] = {}
    if family.experts:
        number = count("num_experts", config.get("num_local_experts"))
        used, size = count("num_experts_per_tok"), count("moe_intermediate_size")
        normalised = bool(config.get("norm_topk_prob", False))
        experts = _experts(number, used, size, normalised, path)
    return ArchSpec(
        family=family.name,
        vocab_size=count("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=count("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp_size=count("intermediate_size"),
        max_positions=count("max_position_embeddings"),
        rope_theta=_read_number(rope, "rope_theta", path, real("rope_theta", family.rope_theta)),
        rms_eps=real("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        qkv_bias=family.qkv_bias or biased,
        o_bias=biased and not family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=_hf_scaling(config, rope, path),
        activation=act,
        norm_offset=family.norm_offset,
        post_norms=family.post_norms,
        scaled_embedding=family.scaled_embedding,
        query_scalar=0.0 if scalar == head_dim else scalar,
        window=window,
        local=local,
        local_rope_theta=_read_number(local_rope, "rope_theta", path) if local else 0.0,
        **experts,
    )


LOCAL, WHOLE = "sliding_attention", "full_attention"  # of `layer_types`


def _hf_ropes(
    config: Mapping[str, Any], family: Family, path: Path
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rotary parameters of layers that see all positions, and of local ones ({}: none)."""
    # Transformers 5 moved rope_theta and rope_scaling into rope_parameters; it prefers the old.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    local: Any = {}
    if family.window_period:
        local = {"rope_theta": config.get("rope_local_base_freq") or 10000.0}
        if isinstance(rope, Mapping) and (LOCAL in rope or WHOLE in rope):  # since 5
            local, rope = local | (rope.get(LOCAL) or {}), rope.get(WHOLE) or {}
    for found in (rope, local):
        if not isinstance(found, Mapping):
            raise UserError(f"{path}: found rotary parameters {found!r}; expected an object.")
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise UserError(
            f"{path}: found rope_type {kind!r} for {LOCAL}; expected default: local layers are "
            "never stretched."
        )
    return rope, local


def _hf_windows(
    config: Mapping[str, Any], family: Family, layers: int, path: Path
) -> tuple[int, tuple[bool, ...]]:
    """`ArchSpec.window` and `ArchSpec.local`."""
    if "sliding_window" not in family.computed or config.get("sliding_window") is None:
        return 0, ()
    window = int(_read_number(config, "sliding_window", path))
    if not family.window_period:
        return window, ()
    types = config.get("layer_types")
    if types is None:
        period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
        local = every_layer_but(int(period or family.window_period), layers)
    elif len(types) != layers or set(types) - {LOCAL, WHOLE}:
        raise UserError(
            f"{path}: found layer_types {str(types)[:80]}; expected {LOCAL} or {WHOLE} for each "
            f"of {layers} layers."
        )
    else:
        local = tuple(kind == LOCAL for kind in types)
    return (window, local) if any(local) else (0, ())


def _read_number(entries: Mapping[str, Any], name: str, path: Path, default: Any = None) -> float:
    """A number above 0; raises `UserError` for anything else, and where there is no default."""
    value: Any = entries.get(name)
    value = default if value is None else value
    if type(value) in (int, float) and 0 < value < 1e300:
        return float(value)
    found = "no" if value is None else f"{str(value)[:60]!r} as"
    raise UserError(f"{path}: found {found} {name!r}; expected a number above 0.")


def _check_rope_rows(family: Family, table: TensorTable) -> None:
    """Raises `UserError` for an .apr file whose rows of q and k lie as llama.cpp's do."""
    found = table.metadata.get(ROPE_TYPE)
    if family.interleaved and found not in (None, NEOX):
        raise UserError(
            f"{table.paths[0]}: found a {family.name} model of rope_type {found}, whose query and "
            f"key rows are interleaved; expected rope_type {NEOX}, rows in Hugging Face's order. "
            "Convert it again from Hugging Face's files, or use its GGUF file."
        )


def _hf_scaling(
    config: Mapping[str, Any], rope: Mapping[str, Any], path: Path
) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(f"{path}: rope type {kind!r} is not one of default, linear, llama3, yarn.")

    def number(name: str, default: Any = None) -> float:
        return _read_number(rope, name, path, default)

    if kind == "linear":
        return RopeScaling(kind, factor=number("factor"))
    context = _read_number(config, "max_position_embeddings", path)
    original = number("original_max_position_embeddings", context)
    # An entry of the model's own wins, as in Transformers' `standardize_rope_params`.
    original = _read_number(config, "original_max_position_embeddings", path, original)
    if kind == "llama3":
        return RopeScaling(
            kind,
            factor=number("factor"),
            original_positions=int(original),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    factor = number("factor", context / original)
    attention = yarn_attention_factor(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = yarn_attention_factor(factor, number("mscale"))
        attention /= yarn_attention_factor(factor, number("mscale_all_dim"))
    return RopeScaling(
        kind,
        factor=factor,
        original_positions=int(original),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=number("attention_factor", attention),
        truncate=bool(rope.get("truncate", True)),
    )
