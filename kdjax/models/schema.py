"""One table of an architecture's fields: what config.json and GGUF headers call each of them.

`spec_from_table` reads a header by the table's rows; `config_entries` and `gguf_entries` write one
by them. A family (`families`) lists the rows that not every family has. `fields` refuses an entry
of a header that no row reads, unless it changes nothing.
Sources: Transformers' configuration and modeling files; llama.cpp's gguf-py/gguf/constants.py for
the GGUF keys and src/models for what no key says.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import AS_FOLDER, UserError
from kdjax.formats import TensorTable
from kdjax.formats.apr.metadata import NEOX, ROPE_TYPE
from kdjax.models.arch import ACTIVATIONS, ArchSpec, Layer
from kdjax.models.families import FAMILIES, Family, find_gguf_family
from kdjax.models.fields import NEUTRAL, check_fields, check_gguf_fields
from kdjax.models.loading import repeats_embedding
from kdjax.models.ropes import (
    SCALING_KEYS,
    Rope,
    read_number,
    rope_frequencies,
    scaling_from_config,
    scaling_from_gguf,
    scaling_to_config,
    scaling_to_gguf,
    short,
)

_ORIGINAL, _GROWTH = "original_max_position_embeddings", "llama_4_scaling_beta"
# Values in `layer_types`.
LOCAL, WHOLE, DELTA = "sliding_attention", "full_attention", "linear_attention"
SECTIONS = (11, 11, 10, 0)  # of Qwen's rotations, for the axes of an image
# Facts are listed layer by layer: a damaged header with 2**31 layers would take 16 GB.
MOST_LAYERS = 1 << 16
_COLUMNS = 65_536  # the most that rotate: a damaged header's number took all memory
_NO_MLP = 1  # `mlp_size` where no layer has a dense MLP and the header names no size


@dataclasses.dataclass(frozen=True)
class Header:
    """A header that is being read: config.json, or, with an `arch`, a GGUF header."""

    table: TensorTable
    family: Family
    path: Path
    arch: str = ""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # read so far, by row

    def get(self, name: str, default: Any = None) -> Any:
        """An entry, unchecked."""
        if self.arch:
            return self.table.metadata.get(f"{self.arch}.{name}", default)
        return self.config.get(name, default)

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The entries of config.json, with what Transformers assumes in place of absent ones."""
        return {**self.family.absent, **self.table.metadata}

    def real(self, name: str, default: Any = None) -> float:
        """A number above 0; raises `UserError` for anything else, or without entry and default."""
        if self.arch:
            return float(self._gguf_number(name, default, (int, float)))
        return read_number(self.config, name, self.path, default)

    def count(self, name: str, default: Any = None) -> int:
        """A whole number above 0; raises as `real` does."""
        if self.arch:
            return int(self._gguf_number(name, default, (int,)))
        value = self.real(name, default)
        if value != int(value) or value >= 2**31:
            raise UserError(
                f"{self.path}: found {str(self.get(name, default))[:60]} as {name!r}; expected a "
                "whole number below 2**31. Download the file again."
            )
        return int(value)

    def _gguf_number(self, name: str, default: Any, kinds: tuple[type, ...]) -> Any:
        value = self.get(name, default)
        if value is None:
            raise UserError(
                f"{self.path}: the GGUF header has no {self.arch}.{name}. The file is "
                "incomplete; convert it again with convert_hf_to_gguf.py, or download it again."
            )
        if type(value) not in kinds or not 0 < value < 2**31:
            raise UserError(
                f"{self.path}: found {self.arch}.{name} = {str(value)[:80]!r}; expected a number "
                "between 0 and 2**31, a whole number where it is a count. Download the file again."
            )
        return value

    @functools.cached_property
    def ropes(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Rotary parameters in config.json: of full attention, of local layers ({}: none)."""
        # Transformers 5 moved rope_theta and rope_scaling into rope_parameters; old entries win.
        rope = self.get("rope_scaling") or self.get("rope_parameters") or {}
        if self.family.names_rope and not rope:
            raise UserError(
                f"{self.path}: found no rope_parameters; expected the model's: it is not "
                "known whether it is scaled. Copy the entry from the model's page."
            )
        local: Any = {}
        if "local" in self.family.fields:
            if "local_rope_theta" in self.family.fields:
                local = {"rope_theta": self.get("rope_local_base_freq") or 10000.0}
            both = self.get("rope_parameters") or rope
            if isinstance(both, Mapping) and (LOCAL in both or WHOLE in both):  # since 5
                old = {} if rope is both else rope
                local, rope = local | (both.get(LOCAL) or {}), {**(both.get(WHOLE) or {}), **old}
        for found in (rope, local):
            if not isinstance(found, Mapping):
                raise UserError(
                    f"{self.path}: found rotary parameters {found!r}; expected an object."
                )
        kind = local.get("rope_type", "default")
        if kind != "default":
            raise UserError(
                f"{self.path}: found rope_type {kind!r} for {LOCAL}; expected default: local "
                "layers have no rope scaling."
            )
        return rope, local


Read = Callable[[Header], Any]
Check = Callable[[ArchSpec, Family], None]


@dataclasses.dataclass(frozen=True)
class FieldRow:
    """A field of an architecture: its names in both headers, how it is read and written.

    A row without readers is only written. A row with a reader and no name has no entry.
    """

    name: str  # a field of `ArchSpec`, or something that makes one, or a name for the row
    hf: str = ""  # its entry of config.json
    gguf: str = ""  # its key in a GGUF header, without the architecture's name
    read_hf: Read | None = None
    read_gguf: Read | None = None
    field: str = ""  # the field of `ArchSpec`, if it is not `name`
    write: Callable[[ArchSpec], Any] | None = None  # its value; None: the field's
    write_gguf: Callable[[ArchSpec], Any] | None = None  # its value in a GGUF header, if another
    also: tuple[str, ...] = ()  # other entries that the readers use
    check_gguf: Check | None = None  # raises `UserError` for what no GGUF header can say
    by_layer: bool = False  # its value changes when layers are cut

    def value(self, spec: ArchSpec, *, gguf: bool = False) -> Any:
        """The value that is written; None is left out of a GGUF header."""
        write = (gguf and self.write_gguf) or self.write
        return write(spec) if write else getattr(spec, self.field or self.name)


def _number(kind: str, name: str, hf: str, gguf: str, default: Any, **more: Any) -> FieldRow:
    def reader(entry: str) -> Read:
        def read(header: Header) -> Any:
            other = default(header) if callable(default) else default
            return getattr(header, kind)(entry, other)

        return read

    readers: dict[str, Any] = dict(read_hf=reader(hf), read_gguf=reader(gguf))
    return FieldRow(name, hf, gguf, **readers | more)


def _count(name: str, hf: str, gguf: str, default: Any = None, **more: Any) -> FieldRow:
    """A whole number above 0; the default may be a function of the header."""
    return _number("count", name, hf, gguf, default, **more)


def _real(name: str, hf: str, gguf: str, default: Any = None, **more: Any) -> FieldRow:
    """A number above 0; the default may be a function of the header."""
    return _number("real", name, hf, gguf, default, **more)


def _fact(name: str) -> FieldRow:
    """A row whose value comes from the family, whatever the header says."""

    def read(header: Header) -> Any:
        return getattr(header.family, name)

    return FieldRow(name, read_hf=read, read_gguf=read)


def _has(tensor: str) -> Read:
    return lambda header: tensor in header.table


def _read_hf_layer_count(header: Header) -> int:
    layers = header.count("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise UserError(
            f"{header.path}: found num_hidden_layers = {layers}; expected at most {MOST_LAYERS}. "
            "Download the file again."
        )
    return layers


def _read_drafts(header: Header) -> int:
    """Next-token blocks after the layers; `checkpoint.take_text` corrects the header's number."""
    known = "drafts" in header.family.fields
    name = "nextn_predict_layers" if header.arch else "mtp_num_hidden_layers"
    return int(header.get(name) or 0) if known else 0


def _read_gguf_layer_count(header: Header) -> int:
    layers = header.count("block_count") - _read_drafts(header)
    if layers > len(header.table):
        raise UserError(
            f"{header.path}: found {header.arch}.block_count = {layers}; expected at most its "
            f"{len(header.table)} tensors. Download the file again."
        )
    return layers


def _read_tied(header: Header) -> bool:
    """The header's word; but not of a head that is stored apart with other numbers.

    Transformers reads such a folder like this, with a warning.
    """
    tied = bool(header.get("tie_word_embeddings", header.family.tied))
    stored = all(name in header.table for name in ("model.embed_tokens.weight", "lm_head.weight"))
    return tied and (not stored or repeats_embedding(header.table))


def _check_tied(spec: ArchSpec, family: Family) -> None:
    if spec.tied and not family.gguf_tied:
        raise UserError(
            f"found a {spec.family} model with tie_word_embeddings; expected a separate head, "
            f"without which llama.cpp opens no file of this family. {AS_FOLDER}."
        )


# Rows that all families have, and that exports always write.
SHAPE = (
    FieldRow(
        "vocab_size",
        "vocab_size",
        read_hf=lambda header: header.count("vocab_size"),
        read_gguf=lambda header: header.table.info("token_embd.weight").shape[0],
        also=("vocab_size",),  # in a GGUF header, which has the embedding's rows as well
    ),
    _count("hidden_size", "hidden_size", "embedding_length"),
    _count(
        "mlp_size",
        "intermediate_size",
        "feed_forward_length",
        # A file whose layers are all experts may lack it.
        lambda header: _NO_MLP if header.family.experts else None,
        write=lambda spec: None if spec.experts and spec.mlp_size == _NO_MLP else spec.mlp_size,
    ),
    FieldRow(
        "num_layers",
        "num_hidden_layers",
        "block_count",
        read_hf=_read_hf_layer_count,
        read_gguf=_read_gguf_layer_count,
        write_gguf=lambda spec: spec.num_layers + spec.drafts,
    ),
    _count("num_heads", "num_attention_heads", "attention.head_count"),
    _count(
        "num_kv_heads",
        "num_key_value_heads",
        "attention.head_count_kv",
        lambda header: header.fields["num_heads"],
    ),
    FieldRow(
        "head_dim",
        "head_dim",
        read_hf=lambda header: header.count("head_dim", header.family.head_dim or _width(header)),
        read_gguf=lambda header: header.count("attention.key_length", _width(header)),
        also=("attention.key_length",),
    ),
    _count("max_positions", "max_position_embeddings", "context_length"),
    _real(
        "rms_eps",
        "rms_norm_eps",
        "attention.layer_norm_rms_epsilon",
        lambda header: None if header.arch else header.family.rms_eps,
    ),
    FieldRow(
        "tied",
        "tie_word_embeddings",
        read_hf=_read_tied,
        read_gguf=lambda header: "output.weight" not in header.table,
        check_gguf=_check_tied,
    ),
)


def _width(header: Header) -> int:
    """Width of a head if the header does not name it."""
    return header.fields["hidden_size"] // header.fields["num_heads"]


def _read_activation(header: Header) -> str:
    name = "hidden_activation" if "hidden_activation" in header.family.fields else "hidden_act"
    value = str(header.get(name) or header.family.activation)
    if value not in (header.family.activations or ACTIVATIONS):
        known = ", ".join(header.family.activations or ACTIVATIONS)
        raise UserError(f"{header.path}: found {name} {value!r}; expected one of {known}.")
    return value


def _check_activation(spec: ArchSpec, family: Family) -> None:
    if ACTIVATIONS[spec.activation] is not ACTIVATIONS[family.activation]:
        raise UserError(
            f"found a model with hidden_act {spec.activation!r}; expected {family.activation}, "
            f"which llama.cpp computes in every {spec.family} model. {AS_FOLDER}."
        )


def _scaling_entry(spec: ArchSpec) -> dict[str, Any] | None:
    entry = scaling_to_config(spec.rope, spec.head_dim, spec.max_positions)
    original = 0 if spec.rope is None else spec.rope.original_positions
    if entry and original and "original_positions" not in FAMILIES[spec.family].fields:
        entry = {"rope_type": entry.pop("type"), **entry, _ORIGINAL: original}
    if not spec.query_growth:
        return entry
    plain = {"rope_type": "default", _ORIGINAL: spec.growth_length}
    return (entry or plain) | {_GROWTH: short(spec.query_growth)}


def _check_divisors(spec: ArchSpec, family: Family) -> None:
    kind = spec.rope_scaling.kind if spec.rope_scaling is not None else ""
    kind = "llama3" if kind == "divisors" else kind
    if kind in ("llama3", "longrope") and kind not in family.gguf_divisors:
        raise UserError(
            f"found a {spec.family} model with {kind}; expected another rope scaling, since "
            f"llama.cpp reads no divisors from files of this family. {AS_FOLDER}."
        )


def _biased(header: Header) -> bool:
    biased = bool(header.get("attention_bias", False))
    if biased and not header.family.biases:
        raise UserError(
            f"{header.path}: found attention_bias; expected none, since the class of "
            f"{header.family.name} adds no biases in attention. Set it to false."
        )
    return biased


def _check_biases(spec: ArchSpec, family: Family) -> None:
    found = "qkv" * spec.qkv_bias + "o" * spec.o_bias
    if not set(found) <= set(family.gguf_biases):
        wanted = f"on {', '.join(family.gguf_biases)} alone" if family.gguf_biases else "none"
        raise UserError(
            f"found a {spec.family} model with attention_bias (on {', '.join(found)}); expected "
            f"{wanted}, as llama.cpp computes. {AS_FOLDER}."
        )


def _check_norms(spec: ArchSpec, family: Family) -> None:
    if spec.qk_norm != family.qk_norm:
        found, wanted = ("with", "none") if spec.qk_norm else ("without", "some")
        raise UserError(
            f"found a {spec.family} model {found} norms of queries and keys (attn_q_norm); "
            f"expected {wanted}, as llama.cpp computes. Convert its first file again."
        )


# Rows that are read for all families too.
COMMON = (
    FieldRow(
        "rope_theta",
        "rope_theta",
        "rope.freq_base",
        read_hf=lambda header: read_number(
            header.ropes[0],
            "rope_theta",
            header.path,
            header.real("rope_theta", header.family.rope_theta),
        ),
        read_gguf=lambda header: header.real("rope.freq_base", 10000.0),
    ),
    FieldRow(
        "rope_scaling",
        "rope_scaling",
        read_hf=lambda h: scaling_from_config(h.config, h.ropes[0], h.path, h.family.scalings),
        read_gguf=lambda h: scaling_from_gguf(h.table, h.arch),
        write=_scaling_entry,
        also=("rope_parameters", _ORIGINAL, *SCALING_KEYS),
        check_gguf=_check_divisors,
    ),
    FieldRow(
        "activation",
        read_hf=_read_activation,
        read_gguf=lambda header: header.family.activation,
        also=("hidden_act",),
        check_gguf=_check_activation,
    ),
    FieldRow(
        "qkv_bias",
        read_hf=lambda header: header.family.qkv_bias or _biased(header),
        read_gguf=_has("blk.0.attn_q.bias"),
        also=("attention_bias",),
    ),
    FieldRow(
        "o_bias",
        read_hf=lambda header: _biased(header) and not header.family.qkv_bias,
        read_gguf=_has("blk.0.attn_output.bias"),
        check_gguf=_check_biases,
    ),
    FieldRow(
        "qk_norm",
        read_hf=lambda header: header.family.qk_norm,
        # A family with delta nets always has it: layer 0 may have no attention.
        read_gguf=lambda h: h.family.delta or "blk.0.attn_q_norm.weight" in h.table,
        check_gguf=_check_norms,
    ),
    *map(_fact, ("qk_norm_whole", "norm_offset", "gated", "pre_norms", "post_norms")),
    FieldRow(
        "embedding_scale",
        read_hf=lambda header: _embedding_scale(header),
        read_gguf=lambda header: _embedding_scale(header),
    ),
)


def _embedding_scale(header: Header) -> float:
    return header.fields["hidden_size"] ** 0.5 if header.family.scaled_embedding else 1.0


def _neutral(name: str) -> FieldRow:
    """An entry that changes nothing but stands in the family's files."""
    return FieldRow(name, name, write=lambda _: NEUTRAL[name])


def _read_query_scalar(header: Header) -> float:
    scalar = header.real("query_pre_attn_scalar", 256)
    return 0.0 if scalar == header.fields["head_dim"] else scalar**-0.5


def _gguf_attention_scale(family: Family, layers: int, width: int) -> float:
    """The scale that llama.cpp computes, since GGUF has no key for it; `width` is D over heads."""
    return width**-0.5 if layers == family.shared_scale_layers else 0.0


def _query_scalar(spec: ArchSpec) -> float | int:
    return short(spec.attention_scale**-2) if spec.attention_scale else spec.head_dim


def _check_query_scalar(spec: ArchSpec, family: Family) -> None:
    width = spec.hidden_size // spec.num_heads
    theirs = _gguf_attention_scale(family, spec.num_layers, width)
    if spec.attention_scale != theirs:
        expected = width if theirs else spec.head_dim
        raise UserError(
            f"found a model with query_pre_attn_scalar {_query_scalar(spec):g}; expected "
            f"{expected}, which llama.cpp computes for {spec.num_layers} layers. "
            f"{AS_FOLDER}."
        )


def _read_window(header: Header) -> int:
    return 0 if header.get("sliding_window") is None else header.count("sliding_window")


def _read_gguf_window(header: Header) -> int:
    # Phi-3's headers name a window, which llama.cpp does not compute.
    has_window = header.family.window_period > 0
    return int(header.get("attention.sliding_window") or 0) if has_window else 0


def _check_window(spec: ArchSpec, family: Family) -> None:
    if spec.window and not family.window_period:
        raise UserError(
            f"found a {spec.family} model with a window of {spec.window} positions; expected none, "
            f"as llama.cpp computes. {AS_FOLDER}, or set sliding_window to null if no text "
            "is longer."
        )


def every_layer_but(period: int, layers: int) -> tuple[bool, ...]:
    """Flags of layers: false for every `period`-th."""
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def _read_layer_types(header: Header) -> tuple[bool, ...]:
    layers, types = header.fields["num_layers"], header.get("layer_types")
    if types is None:
        period = header.get("sliding_window_pattern", header.get("_sliding_window_pattern"))
        return every_layer_but(int(period or header.family.window_period), layers)
    if len(types) != layers or set(types) - {LOCAL, WHOLE}:
        raise UserError(
            f"{header.path}: found layer_types {str(types)[:80]}; expected {LOCAL} or {WHOLE} for "
            f"each of {layers} layers."
        )
    return tuple(kind == LOCAL for kind in types)


def _read_pattern(header: Header) -> tuple[bool, ...]:
    pattern = header.get("attention.sliding_window_pattern", header.family.window_period)
    if isinstance(pattern, int):
        return every_layer_but(pattern, header.fields["num_layers"])
    return _read_flags(header, "attention.sliding_window_pattern", pattern)


def _read_flags(header: Header, name: str, listed: Any) -> tuple[bool, ...]:
    layers = header.fields["num_layers"]
    if len(listed) != layers:
        raise UserError(
            f"{header.path}: found {len(listed)} values of {header.arch}.{name}; expected one for "
            f"each of {layers} layers. Download the file again."
        )
    return tuple(map(bool, listed))


def _check_pattern(spec: ArchSpec, family: Family) -> None:
    local = tuple(window > 0 for window in spec.windows())
    if spec.window and local != every_layer_but(family.window_period, spec.num_layers):
        raise UserError(
            f"found windows in other layers than all but every {family.window_period}th; expected "
            f"this pattern, which llama.cpp computes. {AS_FOLDER}."
        )


def _read_growth_length(header: Header) -> int:
    default = header.count(_ORIGINAL, header.fields["max_positions"])
    return int(read_number(header.ropes[0], _ORIGINAL, header.path, default))


def _read_columns(header: Header) -> int:
    """Columns that rotate; as in Transformers, an entry among the rotary parameters wins."""
    given = header.ropes[0].get("partial_rotary_factor") or header.get("partial_rotary_factor")
    part = read_number(
        {"partial_rotary_factor": given},
        "partial_rotary_factor",
        header.path,
        header.family.rotated_part,
    )
    return int(header.fields["head_dim"] * part)


def _rotated_columns(spec: ArchSpec) -> int:
    return (spec.rope and spec.rope.columns) or spec.head_dim


def _read_near_theta(header: Header) -> float:
    # Without it, Transformers 5 takes the family's theta, 4 full attention's.
    theta = header.family.rope_theta
    default = theta if header.fields["rope_theta"] == theta else None
    return read_number(header.ropes[1], "rope_theta", header.path, default)


def _ropes_by_type(spec: ArchSpec) -> dict[str, Any] | None:
    """Rotations by type of layer, as Transformers 5 writes them."""
    if not spec.window or spec.rope is None:
        return None
    whole = {"rope_type": "default", **(_scaling_entry(spec) or {})}
    thetas = {WHOLE: spec.rope_theta, LOCAL: spec.local_rope_theta}
    parts = {WHOLE: whole, LOCAL: {"rope_type": "default"}}
    return {kind: part | {"rope_theta": short(thetas[kind])} for kind, part in parts.items()}


def _check_near_theta(spec: ArchSpec, family: Family) -> None:
    if spec.window and spec.local_rope_theta != spec.rope_theta:
        raise UserError(
            f"found rope_theta {spec.local_rope_theta:g} in layers with a window and "
            f"{spec.rope_theta:g} in others; expected one for all, as llama.cpp computes in "
            f"{spec.family} models. {AS_FOLDER}."
        )


def _read_rotated(header: Header) -> tuple[bool, ...]:
    layers, flags = header.fields["num_layers"], header.get("no_rope_layers")
    if flags is None:
        period = header.count("no_rope_layer_interval", header.family.unrotated_period)
        return every_layer_but(period, layers)
    if not isinstance(flags, list) or len(flags) < layers or any(x not in (0, 1) for x in flags):
        raise UserError(
            f"{header.path}: found no_rope_layers {str(flags)[:80]}; expected 1, or 0 for a layer "
            f"that rotates nothing, for each of {layers} layers."
        )
    return tuple(flag == 1 for flag in flags[:layers])


def _check_rotated(spec: ArchSpec, family: Family) -> None:
    period = family.unrotated_period
    if _rotated(spec) != every_layer_but(period, spec.num_layers):
        raise UserError(
            f"found other layers without rotation than every {period}th; expected this pattern, "
            f"which llama.cpp computes in every {spec.family} model. {AS_FOLDER}."
        )


def _rotated(spec: ArchSpec) -> tuple[bool, ...]:
    return tuple(layer.rope is not None for layer in spec.layers)


def _read_rotates(header: Header) -> None:
    """Refuses a GGUF header of Granite that switches all rotation off."""
    if not header.get("rope.scaling.finetuned", True):
        raise UserError(
            f"{header.path}: found granite.rope.scaling.finetuned = false; expected true, which "
            "rotates queries and keys. Use a model of GraniteForCausalLM."
        )


def _root_of_layers(header: Header) -> float:
    return header.fields["num_layers"] ** 0.5


def _write_scale_depth(spec: ArchSpec) -> float:
    # Seven digits: the scale may have been stored as float32.
    return float(f"{spec.residual_scale * spec.num_layers**0.5:.7g}")


def _write_base_width(spec: ArchSpec) -> float | int:
    width = float(f"{spec.hidden_size / spec.logit_scale:.7g}")
    return int(width) if width.is_integer() else width


def _only_hf(value: int) -> Read:
    """A default for config.json; a GGUF header must have the entry."""
    return lambda header: None if header.arch else value


def _layer_types(spec: ArchSpec) -> list[str]:
    return [DELTA if x.delta else LOCAL if x.window else WHOLE for x in spec.layers]


def _read_delta_types(header: Header) -> tuple[bool, ...]:
    layers, types = header.fields["num_layers"], header.get("layer_types")
    if types is None:
        return every_layer_but(header.count("full_attention_interval", 4), layers)
    if len(types) != layers or set(types) - {DELTA, WHOLE}:
        raise UserError(
            f"{header.path}: found layer_types {str(types)[:80]}; expected {DELTA} or {WHOLE} for "
            f"each of {layers} layers."
        )
    return tuple(kind == DELTA for kind in types)


def _read_recurrent(header: Header) -> tuple[bool, ...]:
    layers = header.fields["num_layers"]
    listed = header.get("attention.recurrent_layers")
    if listed is None:
        return every_layer_but(header.count("full_attention_interval", 4), layers)
    if len(listed) == layers + header.fields["drafts"]:
        listed = listed[:layers]
    return _read_flags(header, "attention.recurrent_layers", listed)


def _full_interval(spec: ArchSpec) -> int | None:
    """N if every N-th layer attends and no other; None for another pattern."""
    deltas = tuple(layer.delta for layer in spec.layers)
    every = (n for n in (4, *range(1, len(deltas) + 2)))
    return next((n for n in every if every_layer_but(n, len(deltas)) == deltas), None)


def _check_full_interval(spec: ArchSpec, _: Family) -> None:
    if _full_interval(spec) is None:
        raise UserError(
            f"found layers {', '.join(_layer_types(spec))[:120]}; expected attention in every N-th "
            f"layer alone, the only pattern that a GGUF header has. {AS_FOLDER}, or choose "
            "other layers (student.layers)."
        )


def _read_value_heads(entry: str, of_keys: str) -> Read:
    def read(header: Header) -> int:
        heads, groups = header.count(entry), header.fields["delta_key_heads"]
        if heads % groups:
            raise UserError(
                f"{header.path}: found {heads} value heads for {groups} key heads in delta layers "
                f"({entry}, {of_keys}); expected a multiple of the key heads. Download the file "
                "again."
            )
        return heads

    return read


def _read_inner_size(header: Header) -> int:
    return header.count("ssm.inner_size") // header.fields["delta_value_heads"]


def _check_state(spec: ArchSpec, _: Family) -> None:
    if spec.delta_key_dim != spec.delta_value_dim:
        raise UserError(
            f"found delta layers with keys of {spec.delta_key_dim} and values of "
            f"{spec.delta_value_dim}; expected one width, as llama.cpp computes. "
            f"{AS_FOLDER}."
        )


def _read_sections(header: Header) -> tuple[int, ...]:
    """Pairs of columns that rotate by each axis; raises `UserError` unless all rotate for a text.

    The axes alternate, column by column, as far as their sections reach (llama.cpp's IMROPE). A
    text has one position for time, height and width; a pair in no section would not rotate.
    """
    name = "rope.dimension_sections" if header.arch else "mrope_section"
    found = header.get(name) if header.arch else header.ropes[0].get(name)
    sections = tuple(SECTIONS if found is None else found)
    sections = (*map(int, sections), *(0,) * (4 - len(sections)))
    whole = min(sum(sections), header.fields["columns"] // 2)
    if len(sections) != 4 or not all(i < 3 * sections[i % 3] for i in range(max(whole, 1))):
        raise UserError(
            f"{header.path}: found {name} = {list(sections)}; expected time, height and width "
            f"to share all columns, as {list(SECTIONS)} do. Use a checkpoint of a text model."
        )
    return sections


def _rope_parameters(spec: ArchSpec) -> dict[str, Any]:
    scaling = _scaling_entry(spec) or {"rope_type": "default"}
    return scaling | {
        "rope_theta": short(spec.rope_theta),
        "partial_rotary_factor": _rotated_columns(spec) / spec.head_dim,
        "mrope_section": list(spec.rope_sections[:3]),
        "mrope_interleaved": True,
    }


def _read_experts_used(header: Header) -> int:
    count = header.fields["experts"]
    used = header.count("expert_used_count" if header.arch else "num_experts_per_tok")
    if used > count:
        raise UserError(
            f"{header.path}: found {used} experts used of {count}; expected no more than there "
            "are. Download the file again."
        )
    return used


def _always(_: Header) -> bool:
    return True


def _check_norm_experts(spec: ArchSpec, family: Family) -> None:
    if not spec.norm_experts:
        raise UserError(
            "found a model with norm_topk_prob=false; expected true, which llama.cpp computes in "
            f"every {spec.family} model. {AS_FOLDER}."
        )


# Rows of the families that list them, written in the order of the family's list.
OWN = {
    row.name: row
    for row in (
        FieldRow("hidden_act", "hidden_act", write=lambda spec: spec.activation),
        FieldRow(
            "hidden_activation",
            "hidden_activation",
            read_hf=_read_activation,
            write=lambda spec: spec.activation,
        ),
        FieldRow("attention_bias", "attention_bias", write=lambda spec: spec.o_bias),
        FieldRow("max_window_layers", "max_window_layers", write=lambda spec: spec.num_layers),
        *map(
            _neutral,
            ("mlp_bias", "use_sliding_window", "decoder_sparse_step", "mlp_only_layers"),
        ),
        FieldRow("key_length", gguf="attention.key_length", write=lambda spec: spec.head_dim),
        FieldRow("value_length", gguf="attention.value_length", write=lambda spec: spec.head_dim),
        FieldRow("rotated_columns", gguf="rope.dimension_count", write=_rotated_columns),
        FieldRow(
            "columns",
            "partial_rotary_factor",
            read_hf=_read_columns,
            read_gguf=lambda header: header.count(
                "rope.dimension_count", header.fields["head_dim"]
            ),
            write=lambda spec: _rotated_columns(spec) / spec.head_dim,
            also=("rope.dimension_count",),
        ),
        FieldRow(
            "original_positions",
            _ORIGINAL,
            "rope.scaling.original_context_length",
            read_hf=lambda header: header.get(_ORIGINAL),
            write=lambda spec: (spec.rope and spec.rope.original_positions) or spec.max_positions,
        ),
        FieldRow(
            "query_growth",
            gguf="attention.temperature_scale",
            read_hf=lambda header: float(header.ropes[0].get(_GROWTH) or 0.0),
            read_gguf=lambda header: float(header.get("attention.temperature_scale") or 0.0),
            also=(_GROWTH,),
        ),
        FieldRow(
            "growth_length",
            gguf="rope.scaling.original_context_length",
            read_hf=_read_growth_length,
            read_gguf=lambda h: h.count(
                "rope.scaling.original_context_length", h.fields["max_positions"]
            ),
            write=lambda spec: spec.growth_length or spec.max_positions,
        ),
        FieldRow(
            "yarn_log_multiplier",
            gguf="rope.scaling.yarn_log_multiplier",
            read_gguf=lambda header: header.get("rope.scaling.yarn_log_multiplier"),
            write=lambda _: 0.0,
        ),
        FieldRow("no_gguf_window", gguf="attention.sliding_window", write=lambda _: 0),
        FieldRow("gguf_vocab_size", gguf="vocab_size", write=lambda spec: spec.vocab_size),
        _count(
            "experts",
            "num_experts",
            "expert_count",
            read_hf=lambda header: header.count("num_experts", header.get("num_local_experts")),
            also=("num_local_experts",),  # since Transformers 5
        ),
        _count(
            "experts_used",
            "num_experts_per_tok",
            "expert_used_count",
            read_hf=_read_experts_used,
            read_gguf=_read_experts_used,
        ),
        _count("expert_size", "moe_intermediate_size", "expert_feed_forward_length"),
        _count(
            "shared_size", "shared_expert_intermediate_size", "expert_shared_feed_forward_length"
        ),
        FieldRow("always_norm_experts", field="norm_experts", read_hf=_always, read_gguf=_always),
        FieldRow(
            "norm_experts",
            "norm_topk_prob",
            read_hf=lambda header: bool(header.get("norm_topk_prob", False)),
            read_gguf=_always,
            check_gguf=_check_norm_experts,
        ),
        FieldRow(
            "attention_scale",
            "query_pre_attn_scalar",
            read_hf=_read_query_scalar,
            read_gguf=lambda header: _gguf_attention_scale(
                header.family, header.fields["num_layers"], _width(header)
            ),
            write=_query_scalar,
            check_gguf=_check_query_scalar,
        ),
        FieldRow(
            "window",
            "sliding_window",
            "attention.sliding_window",
            read_hf=_read_window,
            read_gguf=_read_gguf_window,
            write=lambda spec: spec.window or None,
            check_gguf=_check_window,
        ),
        FieldRow(
            "local",
            "layer_types",
            read_hf=_read_layer_types,
            read_gguf=_read_pattern,
            write=_layer_types,
            also=(
                "sliding_window_pattern",
                "_sliding_window_pattern",
                "attention.sliding_window_pattern",
            ),
            check_gguf=_check_pattern,
            by_layer=True,
        ),
        _real(
            "embedding_multiplier",
            "embedding_multiplier",
            "embedding_scale",
            1.0,
            field="embedding_scale",
        ),
        _real(
            "residual_multiplier",
            "residual_multiplier",
            "residual_scale",
            1.0,
            field="residual_scale",
        ),
        _real(
            "attention_multiplier",
            "attention_multiplier",
            "attention.scale",
            lambda header: header.fields["head_dim"] ** -0.5 if header.arch else 1.0,
            field="attention_scale",
            write=lambda spec: spec.score_scale,
        ),
        _real(
            "logits_scaling",
            "logits_scaling",
            "logit_scale",
            lambda header: None if header.arch else 1.0,
            field="logit_scale",
        ),
        FieldRow(
            "rotates", gguf="rope.scaling.finetuned", read_gguf=_read_rotates, write=lambda _: None
        ),
        # MiniCPM. GGUF files without its three keys are older than the keys, and of published
        # models, whose values are the defaults.
        _real(
            "scale_emb",
            "scale_emb",
            "embedding_scale",
            lambda header: 12.0 if header.arch else 1.0,
            field="embedding_scale",
        ),
        FieldRow(
            "scale_depth",
            "scale_depth",
            "residual_scale",
            read_hf=lambda header: header.real("scale_depth", 1.0) / _root_of_layers(header),
            read_gguf=lambda header: header.real("residual_scale", 1.4 / _root_of_layers(header)),
            field="residual_scale",
            write=_write_scale_depth,
            write_gguf=lambda spec: spec.residual_scale,
            by_layer=True,
        ),
        FieldRow(
            "dim_model_base",
            "dim_model_base",
            "logit_scale",
            read_hf=lambda h: h.fields["hidden_size"] / h.real("dim_model_base", 1.0),
            read_gguf=lambda h: h.real("logit_scale", h.fields["hidden_size"] / 256),
            field="logit_scale",
            write=_write_base_width,
            write_gguf=lambda spec: spec.logit_scale,
        ),
        # Names the code in published folders, whose class computes what this family does.
        FieldRow("auto_map", read_hf=lambda _: None, also=("auto_map",)),
        FieldRow(
            "rotated",
            "no_rope_layers",
            read_hf=_read_rotated,
            read_gguf=lambda header: every_layer_but(
                header.family.unrotated_period, header.fields["num_layers"]
            ),
            write=lambda spec: [int(rotates) for rotates in _rotated(spec)],
            also=("no_rope_layer_interval",),
            check_gguf=_check_rotated,
            by_layer=True,
        ),
        FieldRow(
            "local_rope_theta",
            "rope_local_base_freq",
            "rope.freq_base_swa",
            read_hf=lambda header: read_number(header.ropes[1], "rope_theta", header.path),
            read_gguf=lambda header: header.real("rope.freq_base_swa", 10000.0),
            write=lambda spec: spec.local_rope_theta or None,
        ),
        FieldRow(
            "near_rope_theta",
            "rope_parameters",
            read_hf=_read_near_theta,
            read_gguf=lambda header: header.fields["rope_theta"],
            write=_ropes_by_type,
            check_gguf=_check_near_theta,
        ),
        FieldRow(
            "rope_sections",
            gguf="rope.dimension_sections",
            read_hf=_read_sections,
            read_gguf=_read_sections,
            write=lambda spec: list(spec.rope_sections),
            also=("mrope_section", "mrope_interleaved"),
        ),
        # Replaces `rope_theta` and `rope_scaling`, as in published files.
        FieldRow("rope_parameters", "rope_parameters", write=_rope_parameters),
        _count("delta_key_heads", "linear_num_key_heads", "ssm.group_count", _only_hf(16)),
        FieldRow(
            "delta_value_heads",
            "linear_num_value_heads",
            "ssm.time_step_rank",
            read_hf=_read_value_heads("linear_num_value_heads", "linear_num_key_heads"),
            read_gguf=_read_value_heads("ssm.time_step_rank", "ssm.group_count"),
        ),
        _count("delta_key_dim", "linear_key_head_dim", "ssm.state_size", _only_hf(128)),
        FieldRow(
            "delta_value_dim",
            "linear_value_head_dim",
            read_hf=lambda header: header.count("linear_value_head_dim", 128),
            read_gguf=_read_inner_size,
            also=("ssm.inner_size",),
            check_gguf=_check_state,
        ),
        FieldRow(
            "delta_values",
            gguf="ssm.inner_size",
            write=lambda spec: spec.delta_value_heads * spec.delta_value_dim,
        ),
        _count("delta_kernel", "linear_conv_kernel_dim", "ssm.conv_kernel", _only_hf(4)),
        FieldRow(
            "drafts",
            "mtp_num_hidden_layers",
            "nextn_predict_layers",
            read_hf=_read_drafts,
            read_gguf=_read_drafts,
            by_layer=True,
        ),
        FieldRow(
            "delta",
            "layer_types",
            read_hf=_read_delta_types,
            read_gguf=_read_recurrent,
            write=_layer_types,
            also=("full_attention_interval", "attention.recurrent_layers"),
            check_gguf=_check_full_interval,
            by_layer=True,
        ),
        FieldRow("full_interval", gguf="full_attention_interval", write=_full_interval),
    )
}


def _layers(fields: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Each layer's facts, from the rows of ropes and windows."""
    layers = _windows(fields)
    rotated = fields.get("rotated", (True,) * len(layers))
    return tuple(x if y else x._replace(rope=None) for x, y in zip(layers, rotated, strict=True))


def _windows(fields: Mapping[str, Any]) -> tuple[Layer, ...]:
    columns, window = fields.get("columns", 0), fields.get("window")
    columns = 0 if columns == fields["head_dim"] else columns
    whole = Layer(Rope(fields["rope_theta"], fields["rope_scaling"], columns))
    if "delta" in fields:
        return tuple(Layer(None, delta=True) if delta else whole for delta in fields["delta"])
    if not window:
        return (whole,) * fields["num_layers"]
    if "local" not in fields:
        return (Layer(whole.rope, window),) * fields["num_layers"]
    theta = fields.get("local_rope_theta") or fields["near_rope_theta"]
    near = Layer(Rope(theta), window)
    return tuple(near if local else whole for local in fields["local"])


def _rows(family: Family) -> Iterator[FieldRow]:
    yield from (*SHAPE, *COMMON, *(OWN[name] for name in family.fields))


def known_entries(family: Family, *, gguf: bool) -> frozenset[str]:
    """The entries of config.json, or of a GGUF header, that a family reads."""
    names = {"model_type"}
    for row in _rows(family):
        if (row.read_gguf if gguf else row.read_hf) is not None:
            names |= {row.gguf if gguf else row.hf, *row.also}
    return frozenset(names - {""})


def spec_from_table(table: TensorTable) -> ArchSpec:
    """Reads the spec from a checkpoint's header; raises `UserError` for unknown architectures."""
    with _reading(table.paths[0], "its header"):
        header = _open_header(table)
    for row in _rows(header.family):
        read = row.read_gguf if header.arch else row.read_hf
        if read is not None:
            with _reading(header.path, (row.gguf if header.arch else row.hf) or row.name):
                header.fields[row.field or row.name] = read(header)
    known = known_entries(header.family, gguf=bool(header.arch))
    if header.arch:
        check_gguf_fields(
            table.metadata,
            header.arch,
            header.fields["head_dim"],
            header.path,
            known,
        )
    names = {field.name for field in dataclasses.fields(ArchSpec)} & set(header.fields)
    given = {name: header.fields[name] for name in names}
    with _reading(header.path, "rotary parameters"):
        layers = _layers(header.fields)
        for rope in {layer.rope for layer in layers}:
            _check_rope(rope, header.fields["head_dim"])
    return ArchSpec(family=header.family.name, layers=layers, **given)


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turns an error about a value into a `UserError` that names its entry, `what`."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: found {what} that cannot be read ({type(error).__name__}: "
            f"{str(error)[:120]}); expected a value as in published models. Download the file "
            "again."
        ) from error


def _check_rope(rope: Rope | None, head_dim: int) -> None:
    """Raises if a rotation cannot be computed: divisors of another length, a logarithm of 0."""
    columns = (rope and rope.columns) or head_dim
    if columns > _COLUMNS:
        raise ValueError(f"{columns} columns of a head rotate")
    with np.errstate(all="ignore"):
        for long in (False, True):
            frequencies, factor = rope_frequencies(rope, head_dim, long=long)
            if not np.isfinite([*frequencies, factor]).all():
                raise ValueError("frequencies that are not finite")


def _open_header(table: TensorTable) -> Header:
    """The header and its family; checks the entries of config.json."""
    arch, path = table.metadata.get("general.architecture"), table.paths[0]
    if arch is not None:
        family = find_gguf_family(arch, table.metadata)
        header = Header(table, _known_family(family, arch, path), path, arch)
        if "token_embd.weight" not in table:
            if table.metadata.get("general.type") == "adapter":
                raise UserError(
                    f"{path}: found an adapter; expected a model. Name the adapter's run or PEFT "
                    "folder, or its base model (llama.cpp takes both, -m and --lora)."
                )
            raise UserError(
                f"{path}: found no tensor token_embd.weight; expected a complete model."
            )
        return header
    name = table.metadata.get("model_type")
    found = FAMILIES.get(name) if isinstance(name, str) else None
    family = _known_family(found, name, path)
    header = Header(table, family, path if path.suffix == ".apr" else path.with_name("config.json"))
    _check_rope_rows(family, table)
    known = known_entries(family, gguf=False)
    check_fields(table.metadata, header.ropes, header.path, known)
    return header


def _known_family(family: Family | None, name: object, path: Path) -> Family:
    if name is None:
        raise UserError(
            f"{path}: found no general.architecture (GGUF) or model_type (config.json); expected "
            "one of them. Name the file or folder of a model."
        )
    if family is None:
        raise UserError(
            f"{path} holds a {name!r} model; kdjax knows {', '.join(FAMILIES)}. "
            "Use a checkpoint of one of these families."
        )
    return family


def _check_rope_rows(family: Family, table: TensorTable) -> None:
    """Raises `UserError` for an .apr file whose rows of q and k have llama.cpp's order."""
    found = table.metadata.get(ROPE_TYPE)
    if family.interleaved and found not in (None, NEOX):
        raise UserError(
            f"{table.paths[0]}: found a {family.name} model of rope_type {found}, whose query and "
            f"key rows are interleaved; expected rope_type {NEOX}, rows in Hugging Face's order. "
            "Convert it again from Hugging Face's files, or use its GGUF file."
        )


def shape_entries(spec: ArchSpec) -> dict[str, Any]:
    """The entries of config.json for the shape, which every family has."""
    return {name: value for name, value in _entries(spec, SHAPE).items() if value is not None}


def _entries(spec: ArchSpec, rows: Iterable[FieldRow]) -> dict[str, Any]:
    values = {row.hf: row.value(spec) for row in rows if row.hf}
    return {k: short(v) if isinstance(v, float) else v for k, v in values.items()}


def layer_entries(spec: ArchSpec, written: Container[str]) -> dict[str, Any]:
    """The entries of config.json that change when layers are cut: the family's and the `written`.

    Entries of other families count only if a file has them: Transformers often adds `layer_types`.
    """
    own = FAMILIES[spec.family].fields
    rows = (row for row in OWN.values() if row.by_layer)
    return _entries(spec, (row for row in rows if row.name in own or row.hf in written))


def own_entries(spec: ArchSpec) -> dict[str, Any]:
    """The entries of config.json that the family reads and not all families have, if not None."""
    rows = (OWN[name] for name in FAMILIES[spec.family].fields)
    entries = _entries(spec, (row for row in rows if row.read_hf is not None))
    return {name: value for name, value in entries.items() if value is not None}


def config_entries(spec: ArchSpec, ids: Mapping[str, Any]) -> dict[str, Any]:
    """All entries of a config.json for the model, with `ids` of special tokens among them.

    Raises `UserError` for a rotation that config.json cannot describe.
    """
    rope = {k: v for k, v in _entries(spec, COMMON).items() if v is not None}
    scaling = {k: rope.pop(k) for k in ("rope_scaling",) if k in rope}
    own = _entries(spec, (OWN[name] for name in FAMILIES[spec.family].fields))
    if "rope_parameters" in FAMILIES[spec.family].fields:
        rope, scaling = {}, {}
    return {**rope, **shape_entries(spec), **ids, **scaling, **own}


def gguf_entries(spec: ArchSpec) -> dict[str, Any]:
    """The architecture as GGUF key-values; raises `UserError` if GGUF cannot describe it."""
    family = FAMILIES[spec.family]
    for row in _rows(family):
        if row.check_gguf is not None:
            row.check_gguf(spec, family)
    own = [OWN[name] for name in family.fields]
    if spec.head_dim * spec.num_heads != spec.hidden_size:
        own = [OWN["key_length"], OWN["value_length"], *own]
    rows = (row for row in (*SHAPE, *COMMON, *own) if row.gguf)
    values = {row.gguf: row.value(spec, gguf=True) for row in rows}
    values = {
        key: values[key] for key in ("block_count", "context_length")
    } | values  # llama.cpp's order
    values |= scaling_to_gguf(spec.rope, logs="yarn_log_multiplier" in family.fields)
    return {f"{family.gguf}.{k}": v for k, v in values.items() if v is not None}
