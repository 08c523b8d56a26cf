"""Writes a head that drafts (`models.tapped`): a file for llama.cpp, or speculators' folder."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from kdjax.errors import UserError
from kdjax.export import vocabulary
from kdjax.export.check import SelfCheckError
from kdjax.export.staging import stage, write_json
from kdjax.formats.blocks import encode
from kdjax.formats.files import TensorToWrite
from kdjax.formats.gguf import GGUFTable, write_gguf
from kdjax.formats.recipes import RECIPES
from kdjax.formats.safetensors import write_folder
from kdjax.formats.table import TensorTable
from kdjax.models import head_folders
from kdjax.models.families import FAMILIES
from kdjax.models.heads import FORMATS, add_output, list_head, read_shape
from kdjax.models.model import Model
from kdjax.models.tapped import TappedFunctions

HEAD_TYPES = ("f32", "f16", "bf16")


def export_head(
    model: Model,
    out: str | os.PathLike[str],
    *,
    dtype: str = "f16",
    folder: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes a head as a GGUF file, or as a `folder` of speculators.

    `dtype`, of matrices, is one of `HEAD_TYPES`. `model` is of `kdjax.make_head` or
    `kdjax.make_eagle`. In a GGUF file embedding and unembedding are the target's and not there,
    except an unembedding that the head has. A folder of an EAGLE-3 head has both, as speculators
    writes it. A Q8_0 head is refused: it was slower, by 21% where F16 was 18% faster. Raises
    `UserError` for a model without a head, and for numbers that are not finite; both leave nothing.
    """
    if not isinstance(model.functions, TappedFunctions) or model.checkpoint is None:
        raise UserError(
            f"{model.name}: found no head; expected a model of kdjax.make_head or kdjax.make_eagle."
        )
    if dtype not in HEAD_TYPES:
        raise UserError(f"found type {dtype!r}; expected one of {', '.join(HEAD_TYPES)}.")
    model, write = (add_output(model), _write_folder) if folder else (model, _write_gguf)
    functions: Any = model.functions
    with stage(Path(out), folder=folder, overwrite=overwrite) as aside:
        written, rows = write(model, functions, aside, dtype)
        odd = [
            row[0] for row in rows if not np.array_equal(written.raw(row[0]), np.asarray(row[3]))
        ]
        read = read_shape(written, functions.spec)
        if odd or read.sizes != functions.shape.sizes:
            raise SelfCheckError(f"{out} reads back otherwise than it was written: {odd[:3]}.")


def _encode_head(
    model: Model, functions: TappedFunctions, dtype: str, *, gguf: bool
) -> list[TensorToWrite]:
    """The head's tensors by llama.cpp's names, rows in the order of a GGUF file or of a folder."""
    flat: dict[tuple[str, ...], Any] = flatten_dict(model.params[functions.shape.part])
    rows = []
    for tensor in list_head(functions.shape, gguf=gguf):
        leaf = flat[tensor.path]
        leaf = leaf if tensor.layer is None else leaf[tensor.layer]
        rows.append(_encode(tensor.name, tensor.layout.write_order(np.asarray(leaf)), dtype))
    tables = functions.shape.tables.items()
    return rows + [(name, "I64", x.shape, x.view(np.uint8)) for name, x in tables]


def _encode(name: str, numbers: np.ndarray, dtype: str) -> TensorToWrite:
    numbers = np.ascontiguousarray(numbers, np.float32)
    if not np.all(np.isfinite(numbers)):
        raise UserError(f"found numbers in {name} that are not finite; expected none.")
    kind = dtype.upper() if numbers.ndim > 1 else "F32"
    return name, kind, numbers.shape, encode(numbers, kind)


def _write_gguf(
    model: Model, functions: TappedFunctions, out: Path, dtype: str
) -> tuple[TensorTable, list[TensorToWrite]]:
    """Writes the file; returns it, read again, and what was written."""
    shape, checkpoint = functions.shape, model.checkpoint
    assert checkpoint is not None
    form, rows = FORMATS[shape.part], _encode_head(model, functions, dtype, gguf=True)
    values = vocabulary.gguf_values(
        checkpoint.tokenizer, checkpoint.tokenizer_files, shape.spec.vocab_size
    )
    metadata = {
        "general.architecture": form.architecture,
        "general.type": "model",
        "general.name": f"{out.stem}",
        **values,
        **form.list_entries(shape),
        "general.file_type": RECIPES[dtype].file_type,
        "general.quantization_version": 2,
    }
    write_gguf(out, metadata, rows)
    return GGUFTable(out), rows


def _write_folder(
    model: Model, functions: TappedFunctions, out: Path, dtype: str
) -> tuple[TensorTable, list[TensorToWrite]]:
    """Writes the folder; returns its table, and the head's part of what was written."""
    shape, rows = functions.shape, _encode_head(model, functions, dtype, gguf=False)
    named = {row[0]: (head_folders.name_tensor(shape, row[0]), *row[1:]) for row in rows}
    others = []
    for name, numbers in head_folders.list_others(functions, model.params):
        if numbers.dtype == bool:
            others.append((name, "BOOL", numbers.shape, numbers.view(np.uint8)))
        else:
            others.append(_encode(name, numbers, dtype))
    for name, ids in shape.tables.items():
        named[name] = name, "I64", ids.shape, (ids - np.arange(len(ids))).view(np.uint8)
    out.mkdir()
    write_folder(out, [*named.values(), *others])
    verifier = FAMILIES[functions.spec.family].hf_architecture
    write_json(out / "config.json", head_folders.describe(shape, verifier))
    return head_folders.open_folder(out), rows
