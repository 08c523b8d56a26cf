"""One table from tree paths to checkpoint names and layouts, used by loading and by export."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kdjax.models.arch import STACKS, ArchSpec
from kdjax.models.families import FAMILIES


class Name(NamedTuple):
    """Names of one parameter of the tree in each kind of checkpoint.

    `{i}` is the layer, `{e}` an expert if each has a tensor. `rotary`, "q" or "k",
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

_SHARED = "mlp.shared_expert"
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
        *(
            (f"mlp.shared.{x}.weight", f"ffn_{x}_shexp.weight", f"{_SHARED}.{x}_proj.weight", "")
            for x in ("gate", "up", "down")
        ),
        ("mlp.shared_gate", "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", ""),
        ("mlp.gate", "ffn_gate_exps.weight", "mlp.experts.{e}.gate_proj.weight", ""),
        ("mlp.up", "ffn_up_exps.weight", "mlp.experts.{e}.up_proj.weight", ""),
        ("mlp.down", "ffn_down_exps.weight", "mlp.experts.{e}.down_proj.weight", ""),
    )
)

# Families with norms after attention and MLP as well have these in place of the names above.
_POST_NORMS = tuple(
    Name(("blocks", path, "weight"), f"blk.{{i}}.{gguf}.weight", f"model.layers.{{i}}.{hf}.weight")
    for path, gguf, hf in (
        ("attn_post_norm", "post_attention_norm", "post_attention_layernorm"),
        ("mlp_norm", "ffn_norm", "pre_feedforward_layernorm"),
        ("mlp_post_norm", "post_ffw_norm", "post_feedforward_layernorm"),
    )
)

# Matrices of a layer that some families' files store as one: its names, and the parameters whose
# rows it has, in this order.
_FUSED = (
    ("attn_qkv.weight", "self_attn.qkv_proj.weight", ("attn.q", "attn.k", "attn.v")),
    ("ffn_up.weight", "mlp.gate_up_proj.weight", ("mlp.gate", "mlp.up")),
)
# Fused matrices of all experts of a layer, in Hugging Face's files: one expert after another.
_FUSED_EXPERTS = (
    ("mlp.experts.gate_up_proj", ("gate", "up")),
    ("mlp.experts.down_proj", ("down",)),
)

# Parameters of delta layers, and a norm of their families with another name in GGUF files.
_DELTA = tuple(
    Name(("deltas", "delta", *path.split(".")), "blk.{i}." + gguf, "model.layers.{i}." + hf)
    for path, gguf, hf in (
        ("qkv.weight", "attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
        ("gate.weight", "attn_gate.weight", "linear_attn.in_proj_z.weight"),
        ("alpha.weight", "ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
        ("beta.weight", "ssm_beta.weight", "linear_attn.in_proj_b.weight"),
        ("conv", "ssm_conv1d.weight", "linear_attn.conv1d.weight"),
        ("log_rate", "ssm_a", "linear_attn.A_log"),
        ("shift", "ssm_dt.bias", "linear_attn.dt_bias"),
        ("norm.weight", "ssm_norm.weight", "linear_attn.norm.weight"),
        ("out.weight", "ssm_out.weight", "linear_attn.out_proj.weight"),
    )
) + tuple(
    Name(
        (stack, "mlp_norm", "weight"),
        "blk.{i}.post_attention_norm.weight",
        "model.layers.{i}.post_attention_layernorm.weight",
    )
    for stack in ("blocks", "deltas")
)

# The drafting block after the layers: a layer, and the parameters of its input and output.
_MTP = tuple(
    Name(("mtp", path, "weight"), f"blk.{{i}}.nextn.{gguf}.weight", f"mtp.{hf}.weight")
    for path, gguf, hf in (
        ("enorm", "enorm", "pre_fc_norm_embedding"),
        ("hnorm", "hnorm", "pre_fc_norm_hidden"),
        ("proj", "eh_proj", "fc"),
        ("norm", "shared_head_norm", "norm"),
    )
)

# Tensors a checkpoint may hold that are not parameters: derived or metadata.
IGNORED = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "rotary_emb.inv_freq",
)

LAYER_OF = re.compile(r"(blk|model\.layers)\.(?P<i>0|[1-9]\d{0,8})\.(?P<rest>.+)")
NAMES = (*_TOP, *_LAYER)
# Parameters of a layer whose experts have a tensor each in Hugging Face's files.
APART = frozenset(name.path[1:] for name in _LAYER if "{e}" in name.hf)
_BY_PATH = {name.path: name for name in NAMES}
_BY_PATH_POST = _BY_PATH | {name.path: name for name in _POST_NORMS}
_BY_PATH_DELTA = (
    _BY_PATH
    | {("deltas", *name.path[1:]): name for name in _LAYER}
    | {name.path: name for name in _DELTA}
)
_BY_PATH_DELTA |= {
    ("mtp", *path[1:]): name._replace(hf=name.hf.replace("model.layers.{i}", "mtp.layers.0"))
    for path, name in _BY_PATH_DELTA.items()
    if path[0] == "blocks"
} | {name.path: name for name in _MTP}
# Parameters that stay float32 numbers in every form: they are small, and they decide routing or the
# decay of states.
EXACT = ("router", "conv")


def name_of(path: tuple[str, ...], spec: ArchSpec | None = None) -> Name:
    """Looks up a tree path in the table; `KeyError` for a parameter that it lacks.

    Embedding and head have one name for any `spec`.
    """
    if spec is None:
        return _BY_PATH[path]
    if spec.delta_value_heads:
        return _BY_PATH_DELTA[path]
    return (_BY_PATH_POST if spec.post_norms else _BY_PATH)[path]


def layers_of(path: tuple[str, ...], spec: ArchSpec) -> tuple[int, ...] | None:
    """Numbers of the layers that have a parameter; None for a parameter outside of layers."""
    return spec.places(delta=STACKS[path[0]]) if path[0] in STACKS else None


class Fused(NamedTuple):
    """A tensor that a file stores in place of several, joined one after another."""

    lead: tuple[int, ...]  # its shape without the columns
    # Names of its parts, and their rows: in all, or in each matrix of a stack.
    parts: tuple[tuple[str, int], ...]


def list_fused(spec: ArchSpec, *, gguf: bool) -> dict[str, Fused]:
    """Tensors that a file fuses, by name; empty for families that fuse none."""
    if FAMILIES[spec.family].fused_experts and not gguf:
        return _list_fused_experts(spec)
    if not FAMILIES[spec.family].fused:
        return {}
    rows = dict.fromkeys(("attn.k", "attn.v"), spec.num_kv_heads * spec.head_dim)
    rows |= {"attn.q": spec.num_heads * spec.head_dim}
    rows |= dict.fromkeys(("mlp.gate", "mlp.up"), spec.mlp_size)
    place = "blk." if gguf else "model.layers."
    found = {}
    for i in range(spec.num_layers):
        for in_gguf, in_hf, parts in _FUSED:
            own = [name_of(("blocks", *part.split("."), "weight")) for part in parts]
            names = [(name.gguf if gguf else name.hf).format(i=i) for name in own]
            counts = [rows[part] for part in parts]
            fused = f"{place}{i}.{in_gguf if gguf else in_hf}"
            found[fused] = Fused((sum(counts),), tuple(zip(names, counts, strict=True)))
    return found


def _list_fused_experts(spec: ArchSpec) -> dict[str, Fused]:
    rows = {"gate": spec.expert_size, "up": spec.expert_size, "down": spec.hidden_size}
    found = {}
    for stack, delta in STACKS.items():
        for i in spec.places(delta=delta):
            for whole, parts in _FUSED_EXPERTS:
                names = [name_of((stack, "mlp", part), spec).hf for part in parts]
                apart = tuple(
                    (name.format(i=i, e=e), rows[part])
                    for e in range(spec.experts)
                    for name, part in zip(names, parts, strict=True)
                )
                lead = spec.experts, sum(rows[part] for part in parts)
                layer = names[0].format(i=i, e=0).partition("mlp.")[0]
                found[layer + whole] = Fused(lead, apart)
    return found


def list_paired(spec: ArchSpec) -> dict[str, Fused]:
    """Stacks of experts that some GGUF files store as one, each gate above its up, by name."""
    found, size = {}, spec.expert_size
    for stack, delta in STACKS.items():
        for i in spec.places(delta=delta) if spec.experts else ():
            parts = (name_of((stack, "mlp", x), spec).gguf.format(i=i) for x in ("gate", "up"))
            fused = Fused((spec.experts, 2 * size), tuple((name, size) for name in parts))
            found[f"blk.{i}.ffn_gate_up_exps.weight"] = fused
    return found


def renumber(name: str, layers: Sequence[int]) -> str | None:
    """Renames a tensor for a model with only these layers; None if it is of another layer."""
    match = LAYER_OF.fullmatch(name)
    if match is None:
        return name
    if (layer := int(match["i"])) not in layers:
        return None
    return f"{match[1]}.{layers.index(layer)}.{match['rest']}"


class Layout(NamedTuple):
    """Differences between a file's tensor and its parameter; hashable, static under jit."""

    pairs: int = 0  # heads whose rotary rows are interleaved, (pairs, 2); 0: none
    offset: float = 0.0  # the file's number minus the parameter
    # Value heads are grouped by key head: number of key heads, and of value heads for each.
    values: tuple[int, int] | None = None
    skip: int = 0  # rows before those of values
    columns: bool = False  # values are columns, not rows
    one: int | None = None  # position of an additional axis of size 1 in the file
    rate: bool = False  # -exp of the parameter, float32

    @property
    def moves(self) -> bool:
        """Whether rows are reordered, so that a slice of them is not a slice of the parameter."""
        return bool(self.pairs or (self.values and not self.columns))

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the file's tensor for a parameter of this shape."""
        return shape if self.one is None else (*shape[: self.one], 1, *shape[self.one :])

    def read_order(self, rows: Any) -> Any:
        """Reorders the rows of a file, numbers or bytes, as in the tree."""
        if self.one is not None:
            rows = rows.squeeze(self.one)
        if self.pairs:
            rows = _swap_pairs(rows, self.pairs, -1, 2)
        return rows if self.values is None else self._take(rows, self._order(rows))

    def write_order(self, rows: Any) -> Any:
        """Undoes `read_order`."""
        if self.pairs:
            rows = _swap_pairs(rows, self.pairs, 2, -1)
        if self.values is not None:
            rows = self._take(rows, np.argsort(self._order(rows)))
        return rows.reshape(self.file_shape(rows.shape))

    def _order(self, rows: Any) -> np.ndarray:
        """Indices of the file's rows, or heads of columns, in the tree's order."""
        assert self.values is not None
        groups, repeats = self.values
        count = groups * repeats if self.columns else rows.shape[0] - self.skip
        moved = np.arange(count).reshape(groups, repeats, -1).swapaxes(0, 1).ravel()
        return np.concatenate([np.arange(self.skip), self.skip + moved])

    def _take(self, rows: Any, order: np.ndarray) -> Any:
        if not self.columns:
            return rows[order]
        return rows.reshape(*rows.shape[:-1], len(order), -1)[..., order, :].reshape(rows.shape)


def _swap_pairs(rows: Any, heads: int, a: int, b: int) -> Any:
    """Transposes rows (a, b) of each head to (b, a); one of these is 2, the other -1."""
    return rows.reshape(heads, a, b, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def layout_of(path: tuple[str, ...], spec: ArchSpec, *, gguf: bool) -> Layout:
    """Layout of a parameter in a GGUF file, or in a Hugging Face file.

    Trees have Hugging Face's order of rotary rows, but GGUF's of value heads, since columns of
    blocks cannot be reordered. llama.cpp stores the rows of q and k as pairs in some families,
    norms of 1 + weight as the sum, and the decay rate of a state as -exp.
    """
    rotary = name_of(path, spec).rotary
    if gguf:
        pairs, norm = 0, path[-2:-1] and path[-2].endswith("norm") and path[1] != "delta"
        if FAMILIES[spec.family].interleaved and rotary:
            pairs = spec.num_heads if rotary == "q" else spec.num_kv_heads
        offset = 1.0 if spec.norm_offset and norm else 0.0
        return Layout(pairs, offset, rate=path[-1] == "log_rate")
    if path[-1] == "shared_gate":
        return Layout(one=0)
    groups, part = spec.delta_key_heads, path[2] if path[1:2] == ("delta",) else ""
    if not part or part == "norm":
        return Layout()
    values = (groups, spec.delta_value_heads // groups)
    return Layout(
        values=None if values[1] == 1 else values,
        skip=2 * groups * spec.delta_key_dim if part in ("qkv", "conv") else 0,
        columns=part == "out",
        one=1 if part == "conv" else None,
    )


def read_rate(a: np.ndarray) -> np.ndarray:
    """float32 log(-a) of GGUF's `ssm_a`; a bfloat16 number if its exponential is -a.

    float32 cannot restore every logarithm below 1: its exponential has fewer bits.
    """
    rate = np.log(-a.astype(np.float64)).astype(np.float32)
    short = rate.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.where(write_rate(short) == a, short, rate)


def write_rate(log_rate: np.ndarray) -> np.ndarray:
    """float32 -exp of the parameter, as GGUF's `ssm_a`."""
    return -np.exp(log_rate.astype(np.float64)).astype(np.float32)
