"""Heads that draft (`models.tapped`): drawn, read from llama.cpp's files, attached to a target."""

import dataclasses
import os
from collections.abc import Sequence
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
from kdjax.formats.saved import SavedTable, find_head
from kdjax.formats.table import TensorTable
from kdjax.models import dspark_files, eagle_files
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, DecoderFunctions, Params
from kdjax.models.dspark import HeadSizes
from kdjax.models.eagle import TAPS, EagleShape, EagleSizes
from kdjax.models.families import FAMILIES
from kdjax.models.head_folders import is_folder, open_folder
from kdjax.models.head_format import HeadFormat
from kdjax.models.model import Model, check_model
from kdjax.models.names import Layout, layout_of, name_of
from kdjax.models.tapped import HeadShape, draw_head, trace_head
from kdjax.models.tokenizer import Tokenizer

# By the part of their target's parameters that they are.
FORMATS = {x.part: x for x in (dspark_files.FORMAT, eagle_files.FORMAT)}


class HeadTensor(NamedTuple):
    """A tensor of a file, and its parameter: `layer` is its place in a stack, None without one."""

    name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    layout: Layout


def check_tapped(spec: ArchSpec, source: object) -> None:
    """Raises `UserError` for a target whose inner states llama.cpp passes to no head."""
    if not FAMILIES[spec.family].tapped:
        known = ", ".join(name for name, family in FAMILIES.items() if family.tapped)
        raise UserError(
            f"{source}: found a {spec.family} model; expected one of {known}, whose inner "
            "states llama.cpp passes to a head. Train a small model (kdjax draft --kind=small): "
            "docs/drafts.md."
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
    cannot draft for, and for sizes that no head has.

        model = kdjax.load("model-q4_k_m.gguf", weights="packed")
        head = kdjax.make_head(model)
    """
    for name, size, least in (("layers", layers, 1), ("slots", slots, 1), ("rank", rank, 0)):
        if size < least:
            raise UserError(f"found {name}={size}; expected {least} or more.")
    check_model(model)
    mask = choose_mask(model.tokenizer)
    return _make(model, HeadSizes(layers, slots, rank, mask, taps, confident and rank > 0), seed)


def make_eagle(
    model: Model, *, seed: int = 0, taps: tuple[int, ...] = (), ids: Sequence[int] = ()
) -> Model:
    """A new EAGLE-3 head for a model, drawn by `seed`, as a model that drafts for it.

    Its one layer drafts a token a pass, and reads the inputs of the three layers `taps`, by default
    the third, the middle one and the third to last. With `ids` it drafts these alone, by its own
    rows of the unembedding, which begin as the model's and train. All else is as of `make_head`;
    llama.cpp runs it as `draft-eagle3`. Raises `UserError` for a model that such a head cannot
    draft for, and for ids that it does not have.

        model = kdjax.load("model-q4_k_m.gguf", weights="packed")
        head = kdjax.make_eagle(model)
    """
    check_model(model)
    if len(taps) not in (0, TAPS):
        raise UserError(f"found taps={taps}; expected {TAPS} layers, or () for the default ones.")
    if len(ids) and (len({*ids}) < len(ids) or not 0 <= min(ids) <= max(ids) < model.vocab_size):
        raise UserError(
            f"{model.name}: found {len(ids)} ids, {len({*ids})} different ones, from {min(ids)} to "
            f"{max(ids)}; expected different ones from 0 to {model.vocab_size - 1}."
        )
    return _make(model, EagleSizes(taps, tuple(map(int, ids))), seed)


def _make(model: Model, sizes: HeadSizes | EagleSizes, seed: int) -> Model:
    spec = _check_decoder(model)
    check_tapped(spec, model.name)
    shape = sizes.shape(spec)
    if sizes.taps:
        _check_taps(sizes.taps, model)
    drawn = draw_head(shape, seed, lambda ids: jax.jit(model.functions.head)(model.params)[ids])
    return attach_head(model, shape, {shape.part: drawn})


def _check_decoder(model: Model) -> ArchSpec:
    """The model's architecture; raises `UserError` for a custom module."""
    if model.spec is None or not isinstance(model.functions, DecoderFunctions):
        raise UserError(f"{model.name}: found a custom module; expected a model of kdjax.load.")
    return model.spec


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


def find_format(table: TensorTable) -> HeadFormat | None:
    """The format of a head's file; None for a file of anything else."""
    found = table.metadata.get("general.architecture")
    return next((x for x in FORMATS.values() if x.architecture == found), None)


def is_head(path: Path) -> bool:
    """Whether it is a GGUF file of a head, or a folder of speculators."""
    if path.suffix != ".gguf" or not path.is_file():
        return is_folder(path)
    return find_format(open_table(path)) is not None


def open_head_table(path: Path) -> TensorTable:
    """The table of a head's file or folder, with llama.cpp's names."""
    return open_folder(path) if is_folder(path) else open_table(path)


def read_shape(table: TensorTable, target: ArchSpec) -> HeadShape:
    """The shape of the head in a file; raises `UserError` for one that kdjax does not compute."""
    if (found := find_format(table)) is None:
        arch = table.metadata.get("general.architecture")
        known = " or ".join(repr(x.architecture) for x in FORMATS.values())
        raise UserError(f"{table.paths[0]}: found architecture {arch!r}; expected {known}.")
    shape = found.read_shape(table, target)
    known = {tensor.name for tensor in list_head(shape)} | {*shape.tables}
    if others := sorted({*table} - known):
        raise UserError(f"{table.paths[0]}: found a tensor {others[0]}; expected a head without.")
    return shape


def choose_mask(tokenizer: Tokenizer | None) -> int:
    """The id whose embedding fills slots: of padding, or of an end of text."""
    if tokenizer is None:
        return 0
    named = (tokenizer.pad_id, tokenizer.eos_id, *sorted(tokenizer.special_ids), 0)
    return next(i for i in named if i is not None)


def attach_head(model: Model, shape: HeadShape, head: Params) -> Model:
    """The head, by its part's name, as a model that drafts for this one; arrays may be shapes."""
    functions = model.functions
    assert isinstance(functions, DecoderFunctions)
    compute = Compute(dtype=functions.compute.dtype, placement=functions.compute.placement)
    own, _ = trace_head(shape, compute)
    made = FORMATS[shape.part].functions(
        functions.graph, functions.spec, functions.compute, shape, own
    )
    kind = f"{model.kind}, its head that drafts"
    return model.replace(functions=made, params={**model.params, **head}, kind=kind)


def add_output(model: Model) -> Model:
    """A model with an EAGLE-3 head that has an unembedding, the target's if it had none.

    Other heads stay as they are: their files have none.
    """
    functions: Any = model.functions
    shape = functions.shape
    if not isinstance(shape, EagleShape) or shape.own:
        return model
    head = {**model.params[shape.part], "output": jax.jit(functions.head)(model.params)}
    return attach_head(model, dataclasses.replace(shape, own=True), {shape.part: head})


def load_head(path: str | os.PathLike[str], model: Model, *, dtype: DTypeLike = "float32") -> Model:
    """Reads a DSpark, DFlash or EAGLE-3 head, as what drafts for `model`.

    `path` is a GGUF file of llama.cpp, or a folder of speculators. Its numbers get `dtype`. Raises
    `UserError` for a file of another kind or for another target.
    """
    table = open_head_table(Path(path))
    shape = read_shape(table, _check_decoder(model))
    flat: dict[tuple[str, ...], list[np.ndarray]] = {}
    for tensor in list_head(shape, gguf=not is_folder(Path(path))):
        flat.setdefault(tensor.path, []).append(_read(table, tensor))
    stacked = {
        path: jnp.asarray(np.stack(parts) if path[0] == "blocks" else parts[0], dtype)
        for path, parts in flat.items()
    }
    return attach_head(model, shape, {shape.part: unflatten_dict(stacked)})


def load_saved_head(model: Model, *, dtype: DTypeLike = "float32") -> Model:
    """The head that a run saved, for its target: `model` is of the run's saved step."""
    checkpoint = model.checkpoint
    assert checkpoint is not None and checkpoint.saved is not None and model.spec is not None
    table = SavedTable(checkpoint.saved.workdir, checkpoint.saved.step)
    part = find_head(table.form)
    assert part is not None
    shape = FORMATS[part].sizes(**table.form[part]).shape(model.spec)
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
    numbers = np.asarray(decode(table.raw(tensor.name), info.dtype)).reshape(info.shape)
    if not np.isfinite(numbers).all():
        raise UserError(
            f"{table.paths[0]}: found numbers in {tensor.name} that are not finite; expected none. "
            "The file is damaged: download or export it again."
        )
    return tensor.layout.read_order(numbers)


def list_head(shape: HeadShape, *, gguf: bool = True) -> list[HeadTensor]:
    """Every tensor of a head's file: those outside of its layers, then layer by layer.

    Names are llama.cpp's; without `gguf` rows are laid out as in speculators' folders.
    """
    own, (_, shapes) = FORMATS[shape.part].names, trace_head(shape, Compute())
    flat: dict[tuple[str, ...], Any] = flatten_dict(shapes)
    tensors = []
    for path in sorted(flat, key=lambda path: list(own).index(path) if path in own else len(own)):
        name, layout = own.get(path), Layout()
        if name is None:
            name, layout = name_of(path, shape.spec).gguf, layout_of(path, shape.spec, gguf=gguf)
        if path[0] != "blocks":
            tensors.append(HeadTensor(name, path, None, flat[path].shape, layout))
            continue
        tensors += [
            HeadTensor(name.format(i=i), path, i, flat[path].shape[1:], layout)
            for i in range(shape.spec.num_layers)
        ]
    return tensors
