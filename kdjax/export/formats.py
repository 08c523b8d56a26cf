"""The three exports, one function each."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import UserError
from kdjax.export import headers, vocabulary
from kdjax.export.card import model_card
from kdjax.export.check import Report, check
from kdjax.export.staging import staged
from kdjax.export.vocabulary import Source
from kdjax.export.weights import Tensor, tensors
from kdjax.formats.apr.table import DTYPES, write_apr
from kdjax.formats.files import Data
from kdjax.formats.gguf_writer import write_gguf
from kdjax.formats.recipes import RECIPES, tensor_type
from kdjax.formats.safetensors_writer import SHARD_BYTES, write_folder
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Params

HF_TYPES = ("f32", "bf16", "f16")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_0", "q4_k_m", "q4_0")
APR_TYPES = ("f32", "f16", "bf16", "q6_k", "q4_k_m")

PathLike = str | os.PathLike[str]
_Row = tuple[str, str, tuple[int, ...], Data]


def _check_type(kind: str, known: tuple[str, ...], what: str) -> None:
    if kind not in known:
        raise UserError(
            f"found type {kind!r} for {what}; expected one of {', '.join(known)}. Pick one of them"
            + (", or export GGUF, which has all types." if kind in GGUF_TYPES else ".")
        )


def _source(source: PathLike | Source) -> Source:
    return source if isinstance(source, Source) else vocabulary.open_source(os.fspath(source))


def _rows(every: list[Tensor], spec: ArchSpec, kind: str, name: Callable[[Tensor], str], *,
          interleaved: bool) -> list[_Row]:  # fmt: skip
    recipe, rows = RECIPES[kind], []
    for tensor in every:
        place = tensor.layer or 0
        width = tensor.shape[-1]
        dtype = tensor_type(recipe, tensor.path, place, spec.num_layers, width, spec.tied)
        data = tensor.stream(dtype, interleaved=interleaved)
        rows.append((name(tensor), dtype, tensor.shape, data))
    return rows


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export_hf(
    params: Params,
    spec: ArchSpec,
    source: PathLike | Source,
    out: PathLike,
    *,
    dtype: str = "f32",
    card: str | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Writes a folder that Transformers loads: safetensors, configs, tokenizer, model card.

    `params` as `models.decoder.functional` describes them; `source` is the student's own file or
    folder, for its tokenizer and what of its config kdjax does not know. `dtype` is one of
    `HF_TYPES`; `card` the text of README.md.

    Raises `UserError` for input that cannot be exported and `SelfCheckError` if what was written
    does not read back the same; nothing is left in either case, and `out` stays as it was.
    """
    _check_type(dtype, HF_TYPES, "a Hugging Face folder")
    opened, every, stored = _source(source), tensors(params, spec), dtype.upper()
    rows = [(t.hf, stored, t.shape, t.stream(stored)) for t in every]
    ids = vocabulary.ids_for_config(opened.special)
    config = headers.hf_config(spec, opened.table, stored, ids)
    with staged(Path(out), folder=True, overwrite=overwrite) as aside:
        aside.mkdir()
        write_folder(aside, rows, shard_bytes)
        vocabulary.write_hf(opened, aside, spec.max_positions)
        _write_json(aside / "generation_config.json", vocabulary.generation_config(opened))
        (aside / "README.md").write_text(card or model_card(spec), encoding="utf-8")
        # Last: without it no reader takes the folder for a model.
        _write_json(aside / "config.json", config)
        return check(aside, every, spec, opened)


def export_gguf(
    params: Params,
    spec: ArchSpec,
    source: PathLike | Source,
    out: PathLike,
    *,
    dtype: str = "f32",
    overwrite: bool = False,
) -> Report:
    """Writes a GGUF file that llama.cpp loads; `dtype` is one of `GGUF_TYPES`.

    Block types are those that `llama-quantize` chooses, norms and biases F32. Header and tokenizer
    are those of `source` where it is a GGUF file. Arguments and errors as of `export_hf`.
    """
    _check_type(dtype, GGUF_TYPES, "a GGUF file")
    opened, every = _source(source), tensors(params, spec)
    tokenizer = vocabulary.gguf_values(opened, spec.vocab_size)
    metadata = headers.gguf_metadata(spec, opened.table, RECIPES[dtype].file_type, tokenizer)
    rows = _rows(every, spec, dtype, lambda t: t.gguf, interleaved=True)
    divisors = headers.rope_divisors(spec)
    if divisors is not None:
        rows.append(("rope_freqs.weight", "F32", divisors.shape, divisors.view(np.uint8)))
    with staged(Path(out), folder=False, overwrite=overwrite) as aside:
        write_gguf(aside, metadata, rows)
        return check(aside, every, spec, opened)


def export_apr(
    params: Params,
    spec: ArchSpec,
    source: PathLike | Source,
    out: PathLike,
    *,
    dtype: str = "f32",
    overwrite: bool = False,
) -> Report:
    """Writes an `.apr` file; `dtype` is one of `APR_TYPES`.

    Raises `UserError` also where rows are no whole K-blocks, for which the format has no other
    type. Arguments and other errors as of `export_hf`.
    """
    _check_type(dtype, APR_TYPES, "an .apr file")
    if Path(out).suffix != ".apr":
        raise UserError(f"found --out={out}; expected a name that ends in .apr. Add the suffix.")
    opened, every = _source(source), tensors(params, spec)
    rows = _rows(every, spec, dtype, lambda t: t.hf, interleaved=False)
    others = [
        f"{name} ({shape[-1]} columns)" for name, kind, shape, _ in rows if kind not in DTYPES
    ]
    if others:
        listed = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise UserError(
            f"found {len(others)} tensors whose rows are no whole blocks of 256: {listed}; .apr "
            "has no quantized type for them. Export --type=bf16 or f16, or --format=gguf."
        )
    tokenizer = vocabulary.gguf_values(opened, spec.vocab_size)
    metadata = headers.apr_metadata(spec, Path(out).stem, tokenizer)
    with staged(Path(out), folder=False, overwrite=overwrite) as aside:
        write_apr(aside, metadata, rows)
        return check(aside, every, spec, opened)
