"""The three exports, one function each."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdjax.errors import UserError
from kdjax.export import headers, vocabulary
from kdjax.export.card import model_card
from kdjax.export.check import ExportSummary, check_export
from kdjax.export.staging import stage, write_json
from kdjax.export.vocabulary import TokenizerFiles
from kdjax.export.weights import Tensor, list_tensors
from kdjax.formats.apr.table import DTYPES, write_apr
from kdjax.formats.files import TensorToWrite
from kdjax.formats.gguf import write_gguf
from kdjax.formats.recipes import RECIPES, tensor_type
from kdjax.formats.safetensors import SHARD_BYTES, write_folder
from kdjax.formats.table import TensorTable
from kdjax.models.arch import ArchSpec
from kdjax.models.families import FAMILIES
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer

HF_TYPES = ("f32", "bf16", "f16")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_0", "q4_k_m", "iq4_nl", "iq4_xs", "q4_0")
APR_TYPES = ("f32", "f16", "bf16", "q6_k", "q4_k_m")

PathLike = str | os.PathLike[str]


class _Source(NamedTuple):
    """What every export begins with."""

    spec: ArchSpec
    tensors: list[Tensor]
    header: TensorTable  # of the file that the model was loaded from
    tokenizer: Tokenizer
    files: TokenizerFiles

    def encode(self, kind: str) -> list[TensorToWrite]:
        """Every tensor, of the types that `llama-quantize` chooses."""
        model = {
            "layers": self.spec.num_layers,
            "groups": self.spec.num_heads // self.spec.num_kv_heads,
            "tied": self.spec.tied,
        }
        rows = []
        for tensor in self.tensors:
            layer, width = tensor.layer or 0, tensor.shape[-1]
            dtype = tensor_type(RECIPES[kind], tensor.path, layer, width, **model)
            rows.append((tensor.name, dtype, tensor.shape, tensor.stream(dtype)))
        return rows


def _open_source(model: Model, *, gguf: bool) -> _Source:
    if model.spec is None or model.checkpoint is None:
        missing = "a checkpoint" if model.spec else "an architecture that kdjax knows"
        raise UserError(
            f"{model}: found a model without {missing} to export; expected one that kdjax.load "
            "gave, whose file has the header and tokenizer to write. Save the parameters of a "
            "module of your own as arrays."
        )
    checkpoint, tensors = model.checkpoint, list_tensors(model.params, model.spec, gguf=gguf)
    files = vocabulary.find_tokenizer_files(checkpoint)
    return _Source(model.spec, tensors, checkpoint.header, checkpoint.tokenizer, files)


def _check_type(kind: str, known: tuple[str, ...], target: str) -> None:
    if kind not in known:
        raise UserError(
            f"found type {kind!r} for {target}; expected one of {', '.join(known)}. Pick one of "
            + ("them, or export GGUF, which has all types." if kind in GGUF_TYPES else "them.")
        )


def export_hf(
    model: Model,
    out: PathLike,
    *,
    dtype: str = "f32",
    card: str | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> ExportSummary:
    """Writes a folder that Transformers loads: safetensors, configs, tokenizer, model card.

    The model's parameters may be float32, bfloat16 or float16, on a device or on the host; header
    and tokenizer are those of its checkpoint. `dtype` is one of `HF_TYPES`, `card` the text of
    README.md.

    Raises `UserError` for a model that cannot be exported and `SelfCheckError` if what was written
    does not read back the same; nothing is left in either case, and `out` stays as it was.

        kdjax.export_hf(student.replace(params=state.params), "student-hf", dtype="bf16")
    """
    _check_type(dtype, HF_TYPES, "a Hugging Face folder")
    spec, tensors, header, tokenizer, files = _open_source(model, gguf=False)
    stored = dtype.upper()
    rows = [(t.name, stored, t.shape, t.stream(stored)) for t in tensors]
    config = headers.hf_config(spec, header, stored, vocabulary.special_ids(tokenizer, files))
    with stage(Path(out), folder=True, overwrite=overwrite) as aside:
        aside.mkdir()
        write_folder(aside, rows, shard_bytes)
        vocabulary.write_hf(tokenizer, files, aside, spec.max_positions)
        generation = vocabulary.generation_config(tokenizer, files)
        write_json(aside / "generation_config.json", generation)
        (aside / "README.md").write_text(card or model_card(spec), encoding="utf-8")
        # Last: without config.json no reader takes the folder for a model.
        write_json(aside / "config.json", config)
        return check_export(aside, tensors, spec, tokenizer)


def export_gguf(
    model: Model, out: PathLike, *, dtype: str = "f32", overwrite: bool = False
) -> ExportSummary:
    """Writes a GGUF file that llama.cpp loads; `dtype` is one of `GGUF_TYPES`.

    Block types are those that `llama-quantize` chooses, norms and biases F32. Header and tokenizer
    are kept where the model came from a GGUF file. Arguments and errors as of `export_hf`.
    """
    _check_type(dtype, GGUF_TYPES, "a GGUF file")
    source = _open_source(model, gguf=True)
    spec, tensors, header, tokenizer, files = source
    values = vocabulary.gguf_values(tokenizer, files, spec.vocab_size)
    metadata = headers.gguf_metadata(spec, header, RECIPES[dtype].file_type, values)
    rows = source.encode(dtype)
    divisors = headers.rope_divisors(spec)
    if divisors is not None:
        rows.append(("rope_freqs.weight", "F32", divisors.shape, divisors.view(np.uint8)))
    with stage(Path(out), folder=False, overwrite=overwrite) as aside:
        write_gguf(aside, metadata, rows)
        return check_export(aside, tensors, spec, tokenizer)


def export_apr(
    model: Model, out: PathLike, *, dtype: str = "f32", overwrite: bool = False
) -> ExportSummary:
    """Writes an `.apr` file; `dtype` is one of `APR_TYPES`.

    Raises `UserError` also where rows are no whole K-blocks, for which the format has no other
    type. Arguments and other errors as of `export_hf`.
    """
    _check_type(dtype, APR_TYPES, "an .apr file")
    if Path(out).suffix != ".apr":
        raise UserError(f"found --out={out}; expected a name that ends in .apr. Add the suffix.")
    source = _open_source(model, gguf=False)
    if source.spec.experts:
        raise UserError(
            f"found a {source.spec.family} model; expected one without experts, which .apr files "
            "cannot tell. Export --format=gguf or --format=hf."
        )
    spec, tensors, _, tokenizer, files = source
    if not FAMILIES[spec.family].apr or spec.window:
        raise UserError(
            f"found a {spec.family} model; expected one that .apr can describe, without windows "
            "and norms of 1 + weight. Export --format=gguf or --format=hf."
        )
    rows = source.encode(dtype)
    misfits = [
        f"{name} ({shape[-1]} columns)" for name, kind, shape, _ in rows if kind not in DTYPES
    ]
    if misfits:
        listed = ", ".join(misfits[:3]) + (", ..." if len(misfits) > 3 else "")
        raise UserError(
            f"found {len(misfits)} tensors whose rows are no whole blocks of 256: {listed}; .apr "
            "has no quantized type for them. Export --type=bf16 or f16, or --format=gguf."
        )
    values = vocabulary.gguf_values(tokenizer, files, spec.vocab_size)
    metadata = headers.apr_metadata(spec, Path(out).stem, values)
    with stage(Path(out), folder=False, overwrite=overwrite) as aside:
        write_apr(aside, metadata, rows)
        return check_export(aside, tensors, spec, tokenizer)
