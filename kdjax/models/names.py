"""One table from tree paths to checkpoint names, used by loading and by export."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from kdjax.models.arch import ArchSpec
from kdjax.models.families import FAMILIES


class Name(NamedTuple):
    """Where one parameter of the tree lives in each kind of checkpoint.

    `{i}` stands for the layer, `{e}` for an expert where each has a tensor. `rotary`, "q" or "k",
    names the head count by which llama.cpp interleaves the rows of some families.
    """

    path: tuple[str, ...]
    gguf: str
    hf: str
    rotary: str = ""


_TOP = (
    Name(("embed",), "token_embd.weight", "model.embed_tokens.weight"),
    Name(("norm", "weight"), "output_norm.weight", "model.norm.weight"),
    Name(("head",), "output.weight", "lm_head.weight"),
)

_LAYER = tuple(
    Name(("blocks", *path.split(".")), "blk.{i}." + gguf, "model.layers.{i}." + hf, rotary)
    for path, gguf, hf, rotary in (
        ("attn_norm.weight", "attn_norm.weight", "input_layernorm.weight", ""),
        ("attn.q.weight", "attn_q.weight", "self_attn.q_proj.weight", "q"),
        ("attn.q.bias", "attn_q.bias", "self_attn.q_proj.bias", "q"),
        ("attn.k.weight", "attn_k.weight", "self_attn.k_proj.weight", "k"),
        ("attn.k.bias", "attn_k.bias", "self_attn.k_proj.bias", "k"),
        ("attn.v.weight", "attn_v.weight", "self_attn.v_proj.weight", ""),
        ("attn.v.bias", "attn_v.bias", "self_attn.v_proj.bias", ""),
        ("attn.o.weight", "attn_output.weight", "self_attn.o_proj.weight", ""),
        ("attn.o.bias", "attn_output.bias", "self_attn.o_proj.bias", ""),
        ("attn.q_norm.weight", "attn_q_norm.weight", "self_attn.q_norm.weight", ""),
        ("attn.k_norm.weight", "attn_k_norm.weight", "self_attn.k_norm.weight", ""),
        ("mlp_norm.weight", "ffn_norm.weight", "post_attention_layernorm.weight", ""),
        ("mlp.gate.weight", "ffn_gate.weight", "mlp.gate_proj.weight", ""),
        ("mlp.up.weight", "ffn_up.weight", "mlp.up_proj.weight", ""),
        ("mlp.down.weight", "ffn_down.weight", "mlp.down_proj.weight", ""),
        ("mlp.router.weight", "ffn_gate_inp.weight", "mlp.gate.weight", ""),
        ("mlp.gate", "ffn_gate_exps.weight", "mlp.experts.{e}.gate_proj.weight", ""),
        ("mlp.up", "ffn_up_exps.weight", "mlp.experts.{e}.up_proj.weight", ""),
        ("mlp.down", "ffn_down_exps.weight", "mlp.experts.{e}.down_proj.weight", ""),
    )
)

# Of families with norms behind attention and MLP as well, these in place of those above.
_POST_NORMS = tuple(
    Name(("blocks", path, "weight"), f"blk.{{i}}.{gguf}.weight", f"model.layers.{{i}}.{hf}.weight")
    for path, gguf, hf in (
        ("attn_post_norm", "post_attention_norm", "post_attention_layernorm"),
        ("mlp_norm", "ffn_norm", "pre_feedforward_layernorm"),
        ("mlp_post_norm", "post_ffw_norm", "post_feedforward_layernorm"),
    )
)

# Tensors a checkpoint may hold that are not parameters: derived or metadata.
IGNORED = ("rope_freqs.weight", "rotary_emb.inv_freq")

LAYER_OF = re.compile(r"(blk|model\.layers)\.(?P<i>0|[1-9]\d{0,8})\.(?P<rest>.+)")
NAMES = (*_TOP, *_LAYER)
# Parameters whose experts have a tensor each in Hugging Face's files.
APART = frozenset(name.path for name in _LAYER if "{e}" in name.hf)
_BY_PATH = {name.path: name for name in NAMES}
_BY_PATH_POST = _BY_PATH | {name.path: name for name in _POST_NORMS}


def name_of(path: tuple[str, ...], spec: ArchSpec | None = None) -> Name:
    """The row of the table for a tree path; `KeyError` if the tree has a parameter it lacks.

    Embedding and head have the same names whatever the `spec`.
    """
    return (_BY_PATH_POST if spec is not None and spec.post_norms else _BY_PATH)[path]


def renumber(name: str, layers: Sequence[int]) -> str | None:
    """A tensor's name where its model has only these layers; None for one of another layer."""
    match = LAYER_OF.fullmatch(name)
    if match is None:
        return name
    if (layer := int(match["i"])) not in layers:
        return None
    return f"{match[1]}.{layers.index(layer)}.{match['rest']}"


def head_count(name: Name, spec: ArchSpec) -> int:
    """Heads whose rotary rows lie interleaved in GGUF files, or 0 where the rows are in order."""
    if not FAMILIES[spec.family].interleaved or not name.rotary:
        return 0
    return spec.num_heads if name.rotary == "q" else spec.num_kv_heads


def gguf_offset(path: tuple[str, ...], spec: ArchSpec) -> float:
    """What GGUF files hold beyond the parameter: norms of `norm_offset` as 1 + weight."""
    return 1.0 if spec.norm_offset and path[-2:-1] and path[-2].endswith("norm") else 0.0
