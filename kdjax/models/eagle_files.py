"""Files of EAGLE-3 heads (`models.eagle`), as llama.cpp reads them."""

from typing import Any

import numpy as np

from kdjax.errors import UserError
from kdjax.formats.table import TensorTable
from kdjax.models.arch import ArchSpec
from kdjax.models.eagle import PART, TAPS, EagleFunctions, EagleShape, EagleSizes
from kdjax.models.head_format import (
    Getter,
    HeadFormat,
    check_rest,
    list_sizes,
    read_layers,
    read_taps,
)

ARCHITECTURE = "eagle3"  # `general.architecture`
_OWN = {
    ("fc", "weight"): "fc.weight",
    ("norm", "weight"): "output_norm.weight",
    ("output",): "output.weight",
    ("blocks", "state_norm", "weight"): "blk.{i}.attn_norm_2.weight",
}
# Tensors of such files that kdjax does not compute with, and what they belong to.
_OTHERS = {
    "token_embd.weight": "an embedding",
    "rope_freqs.weight": "a scaled rotation",
}
# Key-values of such files, likewise.
_OTHER_KEYS = {
    "attention.sliding_window": "a sliding window",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
}


def list_entries(shape: EagleShape) -> dict[str, Any]:
    """Key-values that describe a head, without its tokenizer."""
    entries = list_sizes(shape) | {"target_hidden_size": shape.spec.hidden_size}
    return {f"{ARCHITECTURE}.{key}": value for key, value in entries.items()}


def read_shape(table: TensorTable, target: ArchSpec) -> EagleShape:
    """The shape of the head in a file; raises `UserError` for one that kdjax does not compute."""
    source, get = table.paths[0], Getter(table, ARCHITECTURE)
    if others := get.list_present(_OTHERS, _OTHER_KEYS):
        raise UserError(
            f"{source}: found a head with {others[0]}; expected an EAGLE-3 head without."
        )
    spec = read_layers(get, target.vocab_size, family="llama", qk_norm=False)
    taps = read_taps(get, spec.hidden_size, target)
    if (spec.num_layers, len(taps)) != (1, TAPS):
        raise UserError(
            f"{source}: found an EAGLE-3 head of {spec.num_layers} layers and {len(taps)} taps; "
            f"expected 1 layer and {TAPS} taps, as llama.cpp does."
        )
    shape = EagleShape(spec, taps, _read_ids(table, target), "output.weight" in table)
    check_rest(get, shape, "target_hidden_size", *_OTHER_KEYS)
    return shape


def _read_ids(table: TensorTable, target: ArchSpec) -> tuple[int, ...]:
    """The ids that the head drafts, () for all; raises `UserError` for a table that cannot be."""
    if "d2t" not in table:
        return ()
    info, source = table.info("d2t"), table.paths[0]
    if info.dtype != "I64" or len(info.shape) != 1 or "output.weight" not in table:
        raise UserError(
            f"{source}: found d2t of {info.dtype} {list(info.shape)}; expected I64 of one axis, "
            "with an output.weight of as many rows."
        )
    ids = np.frombuffer(table.raw("d2t"), "<i8")
    if ids.min() < 0 or ids.max() >= target.vocab_size or len(np.unique(ids)) < len(ids):
        raise UserError(
            f"{source}: found ids from {ids.min()} to {ids.max()} in d2t, {len(np.unique(ids))} "
            f"different ones of {len(ids)}; expected different ids below {target.vocab_size}, the "
            "model's. The head belongs to another model."
        )
    return tuple(ids.tolist())


FORMAT = HeadFormat(ARCHITECTURE, PART, EagleFunctions, EagleSizes, _OWN, read_shape, list_entries)
