"""Files of DSpark and DFlash heads (`models.dspark`), as llama.cpp reads them."""

import dataclasses
from typing import Any

import numpy as np

from kdjax.errors import UserError
from kdjax.formats.table import TensorTable
from kdjax.models.arch import ArchSpec
from kdjax.models.dspark import HEAD, DSparkFunctions, DSparkShape, HeadSizes, follow_sections
from kdjax.models.head_format import (
    Getter,
    HeadFormat,
    check_rest,
    list_sizes,
    read_layers,
    read_taps,
)

ARCHITECTURE = "dflash"  # `general.architecture`
MASK = "tokenizer.ggml.mask_token_id"
SECTIONS = "rope.dimension_sections"
_OWN = {
    ("fc", "weight"): "fc.weight",
    ("fc_norm", "weight"): "enc.output_norm.weight",
    ("norm", "weight"): "output_norm.weight",
    ("markov",): "markov_w1.weight",
    ("bias",): "markov_w2.weight",
    ("confidence", "weight"): "conf_proj.weight",
    ("confidence", "bias"): "conf_proj.bias",
}
# Tensors of such files that kdjax does not compute with, and what they belong to.
_OTHERS = {
    "d2t": "a smaller vocabulary",
    "token_embd.weight": "an embedding",
    "output.weight": "an unembedding",
    "selector_hidden.weight": "DFlash2",
    "blk.0.attn_sinks.weight": "attention sinks",
}
# Key-values of such files, likewise.
_OTHER_KEYS = {
    "attention.sliding_window": "a sliding window",
    "attention.causal": "causal attention within a block",
}
_OWN_KEYS = "block_size", "sample_from_anchor", "has_confidence_head", "target_hidden_size"


def list_entries(shape: DSparkShape) -> dict[str, Any]:
    """Key-values that describe a head, without its tokenizer but with the id of its mask."""
    entries = list_sizes(shape) | {
        "attention.causal": False,
        "block_size": shape.block,
        "sample_from_anchor": not shape.lead,
        "has_confidence_head": shape.confident,
    }
    if shape.spec.rope_sections:
        entries[SECTIONS] = np.asarray(shape.spec.rope_sections, np.int32)
    return {f"{ARCHITECTURE}.{key}": value for key, value in entries.items()} | {MASK: shape.mask}


def read_shape(table: TensorTable, target: ArchSpec) -> DSparkShape:
    """The shape of the head in a file; raises `UserError` for one that kdjax does not compute."""
    source, get = table.paths[0], Getter(table, ARCHITECTURE)
    if others := get.list_present(_OTHERS, _OTHER_KEYS):
        raise UserError(
            f"{source}: found a head with {others[0]}; expected a DSpark or DFlash head without."
        )
    vocabulary, rank = target.vocab_size, 0
    if "markov_w1.weight" in table:
        vocabulary, rank = table.info("markov_w1.weight").shape
    spec = follow_sections(read_layers(get, vocabulary, family="qwen3", qk_norm=True), target)
    if any((sections := [int(x) for x in get(SECTIONS, ())])[1:]):
        raise UserError(
            f"{source}: found {ARCHITECTURE}.{SECTIONS}={sections}; expected none but the first, "
            "of a head that rotates by time."
        )
    taps = read_taps(get, spec.hidden_size, target)
    if MASK not in table.metadata:
        raise UserError(
            f"{source}: found no {MASK}; expected the id of the head's mask token. Convert the "
            "head again, with its tokenizer."
        )
    confident = rank > 0 and "conf_proj.weight" in table
    anchored = not rank or bool(get("sample_from_anchor", True))
    shape = DSparkShape(spec, taps, 0, rank, int(table.metadata[MASK]), confident, anchored)
    check_rest(get, shape, *_OTHER_KEYS, *_OWN_KEYS, SECTIONS)
    if (block := int(get("block_size"))) <= shape.lead:
        raise UserError(
            f"{source}: found {ARCHITECTURE}.block_size={block}; expected at least "
            f"{shape.lead + 1}, for 1 draft a pass."
        )
    return dataclasses.replace(shape, drafts=block - shape.lead)


FORMAT = HeadFormat(ARCHITECTURE, HEAD, DSparkFunctions, HeadSizes, _OWN, read_shape, list_entries)
