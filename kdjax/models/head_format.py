"""Formats of heads' GGUF files: a kind of head is a `HeadFormat`, which `models.heads` reads."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kdjax.errors import UserError
from kdjax.formats.table import TensorTable
from kdjax.models.arch import ArchSpec, Layer
from kdjax.models.fields import check_gguf_fields
from kdjax.models.ropes import Rope
from kdjax.models.tapped import HeadShape, TappedFunctions


class HeadFormat(NamedTuple):
    """A kind of head: its functions, and its files."""

    architecture: str  # `general.architecture`
    part: str  # its name among the parameters of its target
    functions: type[TappedFunctions]
    sizes: Callable[..., Any]  # of the fields in a record of a run
    # Names of the parameters that decoders do not have; `{i}` is the layer.
    names: Mapping[tuple[str, ...], str]
    read_shape: Callable[[TensorTable, ArchSpec], HeadShape]
    list_entries: Callable[[Any], dict[str, Any]]  # key-values of a shape, without its tokenizer


class Getter(NamedTuple):
    """Reads a key-value of a head; raises `UserError` if it is absent and has no default."""

    table: TensorTable
    architecture: str

    def __call__(self, key: str, default: Any = None) -> Any:
        found = self.table.metadata.get(f"{self.architecture}.{key}", default)
        if found is None:
            source = self.table.paths[0]
            raise UserError(f"{source}: found no {self.architecture}.{key}; expected one.")
        return found

    def list_present(self, tensors: Mapping[str, str], keys: Mapping[str, str]) -> list[str]:
        """Names, by `tensors` and `keys`, for tensors that a file has, and key-values but 0."""
        others = [what for name, what in tensors.items() if name in self.table]
        return others + [what for key, what in keys.items() if self(key, 0)]


def list_sizes(shape: HeadShape) -> dict[str, Any]:
    """Key-values of every head, without the architecture's name in front."""
    spec = shape.spec
    return {
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.mlp_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.rms_eps,
        "rope.freq_base": spec.rope_theta,
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "target_layers": np.asarray(shape.taps, np.int32),
    }


def check_rest(get: Getter, shape: HeadShape, *known: str) -> None:
    """Raises `UserError` for key-values that may change what a head computes and that are not read.

    The keys of `list_sizes` are read, and `known` ones.
    """
    # Of head_dim, which `check_gguf_fields` compares with.
    widths = {"rope.dimension_count", "attention.value_length"}
    read = frozenset({*list_sizes(shape), "rope.scaling.type", *known} - widths)
    table, width = get.table, shape.spec.head_dim
    check_gguf_fields(table.metadata, get.architecture, width, table.paths[0], read)


def read_layers(get: Getter, vocabulary: int, *, family: str, qk_norm: bool) -> ArchSpec:
    """The architecture of a head's own layers; raises `UserError` for a scaled rotation."""
    if (scaled := get("rope.scaling.type", "none")) != "none":
        key = f"{get.architecture}.rope.scaling.type"
        raise UserError(f"{get.table.paths[0]}: found a head with {key}={scaled}; expected none.")
    heads, width = int(get("attention.head_count")), int(get("embedding_length"))
    return ArchSpec(
        family=family,
        vocab_size=vocabulary,
        hidden_size=width,
        layers=(Layer(Rope(float(get("rope.freq_base", 1e4)))),) * int(get("block_count")),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=int(get("attention.key_length", width // heads)),
        mlp_size=int(get("feed_forward_length")),
        max_positions=int(get("context_length")),
        rms_eps=float(get("attention.layer_norm_rms_epsilon")),
        tied=True,
        qkv_bias=False,
        qk_norm=qk_norm,
    )


def read_taps(get: Getter, width: int, target: ArchSpec) -> tuple[int, ...]:
    """The taps of a head of this width; raises `UserError` for a head of another model."""
    source = get.table.paths[0]
    if width != target.hidden_size:
        raise UserError(
            f"{source}: found a head of width {width}; expected {target.hidden_size}, the model's. "
            "It belongs to another model."
        )
    taps = tuple(int(x) for x in get("target_layers"))
    if any(not 0 <= tap <= target.num_layers for tap in taps):
        raise UserError(
            f"{source}: found taps {list(taps)}; expected layers up to {target.num_layers}, the "
            "model's. The head belongs to another model."
        )
    return taps
