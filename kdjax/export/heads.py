"""Writes a head that drafts (`models.tapped`) as a GGUF file, for llama.cpp."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from kdjax.errors import UserError
from kdjax.export import vocabulary
from kdjax.export.check import SelfCheckError
from kdjax.export.staging import stage
from kdjax.formats.blocks import encode
from kdjax.formats.gguf import GGUFTable, write_gguf
from kdjax.formats.recipes import RECIPES
from kdjax.models.heads import FORMATS, list_head, read_shape
from kdjax.models.model import Model
from kdjax.models.tapped import TappedFunctions

HEAD_TYPES = ("f32", "f16", "bf16")


def export_head(
    model: Model, out: str | os.PathLike[str], *, dtype: str = "f16", overwrite: bool = False
) -> None:
    """Writes a head as a GGUF file; `dtype`, of matrices, is one of `HEAD_TYPES`.

    `model` is of `kdjax.make_head` or `kdjax.make_eagle`. Embedding and unembedding are the
    target's and not in the file. A Q8_0 head is refused: it was slower, by 21% where F16 was 18%
    faster. Raises `UserError` for a model without a head, and for numbers that are not finite;
    both leave nothing.
    """
    functions = model.functions
    if not isinstance(functions, TappedFunctions) or model.checkpoint is None:
        raise UserError(
            f"{model.name}: found no head; expected a model of kdjax.make_head or kdjax.make_eagle."
        )
    if dtype not in HEAD_TYPES:
        raise UserError(f"found type {dtype!r}; expected one of {', '.join(HEAD_TYPES)}.")
    shape, checkpoint = functions.shape, model.checkpoint
    form = FORMATS[shape.part]
    flat: dict[tuple[str, ...], Any] = flatten_dict(model.params[shape.part])
    rows = []
    for tensor in list_head(shape):
        leaf = flat[tensor.path]
        numbers = np.asarray(leaf if tensor.layer is None else leaf[tensor.layer], np.float32)
        if not np.all(np.isfinite(numbers)):
            raise UserError(f"found numbers in {tensor.name} that are not finite; expected none.")
        numbers = np.ascontiguousarray(tensor.layout.write_order(numbers))
        kind = dtype.upper() if numbers.ndim > 1 else "F32"
        rows.append((tensor.name, kind, numbers.shape, encode(numbers, kind)))
    rows += [(name, "I64", x.shape, x.view(np.uint8)) for name, x in shape.tables.items()]
    values = vocabulary.gguf_values(
        checkpoint.tokenizer, checkpoint.tokenizer_files, shape.spec.vocab_size
    )
    metadata = {
        "general.architecture": form.architecture,
        "general.type": "model",
        "general.name": f"{Path(out).stem}",
        **values,
        **form.list_entries(shape),
        "general.file_type": RECIPES[dtype].file_type,
        "general.quantization_version": 2,
    }
    with stage(Path(out), folder=False, overwrite=overwrite) as aside:
        write_gguf(aside, metadata, rows)
        written = GGUFTable(aside)
        odd = [name for name, *_, data in rows if not np.array_equal(written.raw(name), data)]
        if odd or read_shape(written, functions.spec) != shape:
            raise SelfCheckError(f"{out} reads back otherwise than it was written: {odd[:3]}.")
