"""Heads that draft (`models.dspark`): drawn, read from files, attached to a target."""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.blocks import decode
from kdjax.formats.saved import SPARK, SavedTable
from kdjax.formats.table import TensorTable
from kdjax.models.arch import ArchSpec, Layer
from kdjax.models.decoder import Compute, DecoderFunctions, Params
from kdjax.models.dspark import (
    HEAD,
    DSparkFunctions,
    DSparkShape,
    HeadSizes,
    draw_head,
    trace_head,
)
from kdjax.models.dspark_hub import is_folder, open_folder
from kdjax.models.families import FAMILIES
from kdjax.models.model import Model
from kdjax.models.names import name_of
from kdjax.models.ropes import Rope
from kdjax.models.tokenizer import Tokenizer

ARCHITECTURE = "dflash"  # `general.architecture`
MASK = "tokenizer.ggml.mask_token_id"
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


class HeadTensor(NamedTuple):
    """A tensor of a file, and its parameter: `layer` is its place in a stack, None without one."""

    name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]


def check_tapped(spec: ArchSpec, source: object) -> None:
    """Raises `UserError` for a target whose inner states llama.cpp passes to no head."""
    if not FAMILIES[spec.family].tapped:
        known = ", ".join(name for name, family in FAMILIES.items() if family.tapped)
        raise UserError(
            f"{source}: found a {spec.family} model; expected one of {known}, whose inner "
            "states llama.cpp passes to a head of kdjax. Train a small model (kdjax draft "
            "--kind=small), or a Qwen3.5's own block (--kind=mtp): docs/drafts.md."
        )


def make_head(
    model: Model,
    *,
    seed: int = 0,
    layers: int = 2,
    slots: int = 7,
    rank: int = 256,
    taps: tuple[int, ...] = (),
    confident: bool = True,
) -> Model:
    """A new DSpark or DFlash head for a model, drawn by `seed`, as a model that drafts for it.

    It has its own `layers`, drafts `slots` tokens a pass, adds a bias of this `rank` by the token
    before, and reads the inputs of the layers `taps`, by default 5 of them, evenly spread. If it is
    `confident`, it says how probable it is that a draft is accepted (`draft_p_min`). With rank 0 it
    is a DFlash head, which has neither bias nor confidence. Its parameters are the model's arrays
    and the head's float32 numbers. It trains (`make_step(head, model, loss, tx)` moves the head
    alone), it drafts (`model.generate(prompts, draft=head)`), and `export_head` writes it for
    llama.cpp's `draft-dspark` or `draft-dflash`. Raises `UserError` for a model that such a head
    cannot draft for.

        model = kdjax.load("model-q4_k_m.gguf", weights="packed")
        head = kdjax.make_head(model)
    """
    if model.spec is None or not isinstance(model.functions, DecoderFunctions):
        raise UserError(f"{model.name}: found a custom module; expected a model of kdjax.load.")
    check_tapped(model.spec, model.name)
    mask = choose_mask(model.tokenizer)
    sizes = HeadSizes(layers, slots, rank, mask, taps, confident and rank > 0)
    shape = sizes.shape(model.spec)
    _check_taps(shape.taps, model)
    return attach_head(model, shape, {HEAD: draw_head(shape, seed)})


def _check_taps(taps: tuple[int, ...], model: Model) -> None:
    """Raises `UserError` for taps that llama.cpp does not read.

    Of October 2026 it ends (`layer input tensor is null`) at the state after the last layer.
    """
    assert model.spec is not None
    last = model.spec.num_layers - 1
    if any(not 0 <= tap <= last for tap in taps) or list(taps) != sorted({*taps}):
        raise UserError(
            f"{model.name}: found taps={taps}; expected layers from 0 to {last}, each once and in "
            "order: llama.cpp passes the inputs of these to a head."
        )


def is_head(path: Path) -> bool:
    """Whether it is a GGUF file of a head, DFlash or DSpark, or a folder of speculators."""
    if path.suffix != ".gguf" or not path.is_file():
        return is_folder(path)
    return open_table(path).metadata.get("general.architecture") == ARCHITECTURE


def open_head_table(path: Path) -> TensorTable:
    """The table of a head's file or folder, with llama.cpp's names."""
    return open_folder(path, ARCHITECTURE, MASK) if is_folder(path) else open_table(path)


def choose_mask(tokenizer: Tokenizer | None) -> int:
    """The id whose embedding fills slots: of padding, or of an end of text."""
    if tokenizer is None:
        return 0
    named = (tokenizer.pad_id, tokenizer.eos_id, *sorted(tokenizer.special_ids), 0)
    return next(i for i in named if i is not None)


def attach_head(model: Model, shape: DSparkShape, head: Params) -> Model:
    """The head, under `dspark`, as a model that drafts for this one; its arrays may be shapes."""
    functions = model.functions
    assert isinstance(functions, DecoderFunctions)
    compute = Compute(dtype=functions.compute.dtype, placement=functions.compute.placement)
    own, _ = trace_head(shape, compute)
    made = DSparkFunctions(functions.graph, functions.spec, functions.compute, shape, own)
    kind = f"{model.kind}, its head that drafts"
    return model.replace(functions=made, params={**model.params, **head}, kind=kind)


def load_head(path: str | os.PathLike[str], model: Model, *, dtype: DTypeLike = "float32") -> Model:
    """Reads a DSpark or DFlash head, as what drafts for `model`.

    `path` is a GGUF file of llama.cpp or a folder of speculators. Its numbers get `dtype`. Raises
    `UserError` for a file of another kind or for another target.
    """
    table = open_head_table(Path(path))
    if model.spec is None or not isinstance(model.functions, DecoderFunctions):
        raise UserError(f"{model.name}: found a custom module; expected a model of kdjax.load.")
    shape = read_shape(table, model.spec)
    flat: dict[tuple[str, ...], list[np.ndarray]] = {}
    for tensor in list_head(shape):
        flat.setdefault(tensor.path, []).append(_read(table, tensor))
    stacked = {
        path: jnp.asarray(np.stack(parts) if path[0] == "blocks" else parts[0], dtype)
        for path, parts in flat.items()
    }
    return attach_head(model, shape, {HEAD: unflatten_dict(stacked)})


def load_saved_head(model: Model, *, dtype: DTypeLike = "float32") -> Model:
    """The head that a run saved, for its target: `model` is of the run's saved step."""
    checkpoint = model.checkpoint
    assert checkpoint is not None and checkpoint.saved is not None and model.spec is not None
    table = SavedTable(checkpoint.saved.workdir, checkpoint.saved.step)
    shape = HeadSizes(**table.form[SPARK]).shape(model.spec)
    read = jax.tree.map(lambda x: jnp.asarray(x, dtype), table.read_tree())
    return attach_head(model, shape, read)


def _read(table: TensorTable, tensor: HeadTensor) -> np.ndarray:
    if tensor.name not in table:
        raise UserError(f"{table.paths[0]}: found no {tensor.name}; expected the file of a head.")
    info = table.info(tensor.name)
    if info.shape != tensor.shape:
        raise UserError(
            f"{table.paths[0]}: found {tensor.name} of {list(info.shape)}; expected "
            f"{list(tensor.shape)}: the head is of another model."
        )
    return np.asarray(decode(table.raw(tensor.name), info.dtype)).reshape(info.shape)


def list_head(shape: DSparkShape) -> list[HeadTensor]:
    """Every tensor of a head's file, layer by layer."""
    _, shapes = trace_head(shape, Compute())
    flat: dict[tuple[str, ...], Any] = flatten_dict(shapes)
    own = {path: name for path, name in _OWN.items() if path in flat}
    tensors = [HeadTensor(name, path, None, flat[path].shape) for path, name in own.items()]
    for path in flat:
        if path[0] == "blocks":
            name = name_of(path, shape.spec).gguf
            tensors += [
                HeadTensor(name.format(i=i), path, i, flat[path].shape[1:])
                for i in range(shape.spec.num_layers)
            ]
    return tensors


def list_entries(shape: DSparkShape) -> dict[str, Any]:
    """Key-values that describe a head, without its tokenizer but with the id of its mask."""
    spec = shape.spec
    entries = {
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.mlp_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.rms_eps,
        "attention.causal": False,
        "rope.freq_base": spec.rope_theta,
        "rope.dimension_count": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "target_layers": np.asarray(shape.taps, np.int32),
        "block_size": shape.block,
        "sample_from_anchor": not shape.lead,
        "has_confidence_head": shape.confident,
    }
    return {f"{ARCHITECTURE}.{key}": value for key, value in entries.items()} | {MASK: shape.mask}


def read_shape(table: TensorTable, target: ArchSpec) -> DSparkShape:
    """The shape of the head in a file; raises `UserError` for one that kdjax does not compute."""
    source, metadata = table.paths[0], table.metadata
    arch = metadata.get("general.architecture")
    if arch != ARCHITECTURE:
        raise UserError(f"{source}: found architecture {arch!r}; expected {ARCHITECTURE!r}.")
    get = _Getter(metadata, source)
    others = [what for name, what in _OTHERS.items() if name in table]
    if others := others + [what for key, what in _OTHER_KEYS.items() if get(key, 0)]:
        raise UserError(
            f"{source}: found a head with {others[0]}; expected a DSpark or DFlash head without."
        )
    vocabulary, rank = target.vocab_size, 0
    if "markov_w1.weight" in table:
        vocabulary, rank = table.info("markov_w1.weight").shape
    if rank and not get("sample_from_anchor", True):
        raise UserError(
            f"{source}: found a head whose first slot predicts nothing; expected "
            "dflash.sample_from_anchor=true."
        )
    spec = _read_layers(get, vocabulary)
    if spec.hidden_size != target.hidden_size:
        raise UserError(
            f"{source}: found a head of width {spec.hidden_size}; expected {target.hidden_size}, "
            "the model's. It belongs to another model."
        )
    taps = tuple(int(x) for x in get("target_layers"))
    if any(not 0 <= tap <= target.num_layers for tap in taps):
        raise UserError(
            f"{source}: found taps {list(taps)}; expected layers up to {target.num_layers}, the "
            "model's. The head belongs to another model."
        )
    if MASK not in metadata:
        raise UserError(
            f"{source}: found no {MASK}; expected the id of the head's mask token. Convert the "
            "head again, with its tokenizer."
        )
    confident = rank > 0 and "conf_proj.weight" in table
    shape = DSparkShape(spec, taps, 0, rank, int(metadata[MASK]), confident)
    return dataclasses.replace(shape, drafts=int(get("block_size")) - shape.lead)


def _read_layers(get: "_Getter", vocabulary: int) -> ArchSpec:
    """The architecture of a head's own layers."""
    heads, width = int(get("attention.head_count")), int(get("embedding_length"))
    return ArchSpec(
        family="qwen3",
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
        qk_norm=True,
    )


class _Getter(NamedTuple):
    """Reads a key-value of a head; raises `UserError` if it is absent and has no default."""

    metadata: Mapping[str, Any]
    source: object

    def __call__(self, key: str, default: Any = None) -> Any:
        found = self.metadata.get(f"{ARCHITECTURE}.{key}", default)
        if found is None:
            raise UserError(f"{self.source}: found no {ARCHITECTURE}.{key}; expected one.")
        return found


def count_head(shape: DSparkShape) -> int:
    """Number of the head's own parameters."""
    return sum(math.prod(tensor.shape) for tensor in list_head(shape))
