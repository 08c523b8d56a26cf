"""The three exports, one function each."""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from kdjax.errors import UserError
from kdjax.export import headers, vocabulary
from kdjax.export.card import model_card
from kdjax.export.check import ExportSummary, check_export
from kdjax.export.staging import check_suffix, stage, write_json
from kdjax.export.weights import Tensor, list_tensors
from kdjax.formats.apr.table import DTYPES, write_apr
from kdjax.formats.files import TensorToWrite
from kdjax.formats.gguf import count_gguf, write_gguf
from kdjax.formats.imatrix import read_importance
from kdjax.formats.kquants import WEIGHED
from kdjax.formats.recipes import RECIPES
from kdjax.formats.safetensors import SHARD_BYTES, write_folder
from kdjax.formats.table import TensorTable
from kdjax.models.arch import ArchSpec
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoder import Compute, functional
from kdjax.models.families import FAMILIES
from kdjax.models.mixture import Mixture
from kdjax.models.model import Model, check_model
from kdjax.models.names import list_fused
from kdjax.models.ropes import rope_tensors
from kdjax.models.tokenizer import Tokenizer, TokenizerFiles, from_gguf
from kdjax.models.weights import Adapted

HF_TYPES = ("f32", "bf16", "f16")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_0", "q4_k_m", "iq4_nl", "iq4_xs", "q4_0")
GGUF_TYPES += ("mxfp4", "q3_k_m", "q2_k")
APR_TYPES = ("f32", "f16", "bf16", "q6_k", "q4_k_m")
_TYPES = {
    "hf": (HF_TYPES, "a Hugging Face folder"),
    "gguf": (GGUF_TYPES, "a GGUF file"),
    "apr": (APR_TYPES, "an .apr file"),
}

_log = logging.getLogger("kdjax")

PathLike = str | os.PathLike[str]


class _Source(NamedTuple):
    """Inputs of every export."""

    spec: ArchSpec
    tensors: list[Tensor]
    header: TensorTable  # of the file that the model was loaded from
    tokenizer: Tokenizer
    files: TokenizerFiles

    def choose_types(self, kind: str | Mixture | None) -> list[str]:
        """Block type that `llama-quantize` chooses for each tensor; None keeps the stored one."""
        if kind is None:
            return [tensor.blocks.block if tensor.blocks else "F32" for tensor in self.tensors]
        if kind == "f32":
            return ["F32"] * len(self.tensors)
        mixture = kind if isinstance(kind, Mixture) else Mixture.named(kind, self.spec)
        return [mixture.type_of(tensor.path, tensor.layer) for tensor in self.tensors]

    def choose_file_type(self, kind: str | Mixture | None) -> int:
        """`general.file_type`; for a mixture that is not a recipe, that of its commonest type."""
        if isinstance(kind, str) and kind in RECIPES:
            return RECIPES[kind].file_type
        types = self.choose_types(kind)
        name = next((name for name in RECIPES if self.choose_types(name) == types), None)
        return RECIPES[name].file_type if name else _file_type(types)

    def encode(
        self, kind: str | Mixture | None, importance: Mapping[str, np.ndarray] | None = None
    ) -> list[TensorToWrite]:
        """Every tensor with its type by `choose_types`.

        Raises `UserError` for an importance of another model, and for one without any effect.
        """
        wholes = {
            part: whole
            for whole, fused in list_fused(self.spec, gguf=True).items()
            for part, _ in fused.parts
        }
        names = {wholes.get(tensor.name, tensor.name) for tensor in self.tensors}
        if importance and not importance.keys() & names:
            raise UserError(
                f"found importances of {min(importance)} and its like, none of a tensor that is "
                "written; expected some: the importance matrix is of another model."
            )
        rows, changed = [], False
        for tensor, dtype in zip(self.tensors, self.choose_types(kind), strict=True):
            width = tensor.shape[-1]
            weights = (importance or {}).get(wholes.get(tensor.name, tensor.name))
            if weights is not None and weights.shape[1] != width:
                raise UserError(
                    f"found an importance of {weights.shape[1]} inputs for {tensor.name}; expected "
                    f"{width}: the importance matrix is of another model."
                )
            searched = dtype in WEIGHED and tensor.find_kept(dtype) is None
            changed |= searched and weights is not None
            rows.append((tensor.name, dtype, tensor.shape, tensor.stream(dtype, weights)))
        if importance and not changed:
            raise UserError(
                f"found an importance and {kind or 'blocks as they are'}, where it changes no "
                "tensor; expected a type that searches scales, such as q4_k_m, and for trained "
                "blocks the masters (--masters). Name it, or leave the importance out."
            )
        return rows


def _fuse(rows: list[TensorToWrite], spec: ArchSpec, *, gguf: bool) -> list[TensorToWrite]:
    """Joins tensors that the family's files store as one matrix, one after another.

    Raises `UserError` if their block types differ.
    """
    fused = list_fused(spec, gguf=gguf)
    wholes = {part: whole for whole, rows in fused.items() for part, _ in rows.parts}
    by_name, found = {row[0]: row for row in rows}, {}
    for row in rows:
        name = wholes.get(row[0], row[0])
        if name not in found and row[0] not in wholes:
            found[name] = row
        elif name not in found:
            lead, parts = fused[name]
            found[name] = _join(name, lead, [by_name[part] for part, _ in parts])
    return list(found.values())


def _join(name: str, lead: tuple[int, ...], parts: list[TensorToWrite]) -> TensorToWrite:
    types = {dtype for _, dtype, _, _ in parts}
    if len(types) > 1:
        raise UserError(
            f"found {', '.join(sorted(types))} in the matrices that make up {name}; expected one "
            "type. Name one for all of them, such as quantize=q4_k_m,blocks/attn=Q5_K."
        )

    def chunks() -> Iterator[np.ndarray]:
        for *_, data in parts:
            rows = data() if callable(data) else data
            yield from [rows] if isinstance(rows, np.ndarray) else rows

    _, dtype, (_, width), _ = parts[0]
    return name, dtype, (*lead, width), chunks


def _open_source(model: Model, kind: str | None, *, gguf: bool) -> _Source:
    check_model(model)
    if model.spec is None or model.checkpoint is None:
        missing = "a checkpoint" if model.spec else "an architecture that kdjax knows"
        raise UserError(
            f"{model.name}: found a model without {missing} to export; expected one of "
            "kdjax.load, whose file has the header and tokenizer to write. Save the "
            "parameters of a custom module as arrays."
        )
    checkpoint, tensors = model.checkpoint, list_tensors(model.params, model.spec, gguf=gguf)
    tokenizer, files = checkpoint.tokenizer, checkpoint.tokenizer_files
    _warn_rounded(tensors, checkpoint, kind)
    return _Source(model.spec, tensors, checkpoint.header, tokenizer, files)


def _warn_rounded(tensors: list[Tensor], checkpoint: Checkpoint, kind: str | None) -> None:
    """Warns if bfloat16 parameters, `kdjax.load`'s default, are coarser than their file."""
    numbers = (t.leaf.base if isinstance(t.leaf, Adapted) else t.leaf for t in tensors)
    types = {str(x.dtype) for x in numbers if isinstance(x, np.ndarray | jax.Array)}
    if kind == "bf16" or not types & {"bfloat16", "uint16"}:  # a CPU stores bfloat16 as its bits
        return
    stored = (name for names in checkpoint.names.values() for name in names)
    infos = (checkpoint.table.info(name) for name in stored)
    if finer := {info.dtype for info in infos if len(info.shape) > 1} - {"BF16"}:
        _log.warning(
            "the parameters to export are bfloat16, and the matrices of %s are %s: the export is "
            "of rounded numbers. kdjax.load(..., dtype='float32') keeps the file's.",
            checkpoint,
            ", ".join(sorted(finer)),
        )


def check_type(kind: str, form: str, spec: ArchSpec | None = None) -> None:
    """Raises `UserError` for a type that files of a format do not have: `hf`, `gguf` or `apr`.

    Of types by name, or in a file, which GGUF files alone have, those that `spec` cannot have.
    """
    known, target = _TYPES[form]
    if form == "gguf" and ("=" in kind or "," in kind or Path(kind).is_file()):
        if spec is not None:
            Mixture.named(kind, spec)
    elif kind not in known:
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
    and tokenizer come from its checkpoint. `dtype` is one of `HF_TYPES`, `card` the text of
    README.md.

    Raises `UserError` for a model that cannot be exported and `SelfCheckError` if the written files
    do not read back equal; both leave nothing, and `out` stays as it was.

        kdjax.export_hf(student.replace(params=state.params), "student-hf", dtype="bf16")
    """
    check_type(dtype, "hf")
    spec, tensors, header, tokenizer, files = _open_source(model, dtype, gguf=False)
    stored = dtype.upper()
    apart = [(t.name, stored, t.shape, t.stream(stored)) for t in tensors]
    rows = _fuse(apart, spec, gguf=False)
    config = headers.hf_config(spec, header, stored, vocabulary.special_ids(tokenizer, files))
    with stage(Path(out), folder=True, overwrite=overwrite) as aside:
        aside.mkdir()
        write_folder(aside, rows, shard_bytes)
        vocabulary.write_hf(tokenizer, files, aside, spec.max_positions)
        generation = vocabulary.generation_config(tokenizer, files)
        write_json(aside / "generation_config.json", generation)
        for path in headers.list_code(header) if "auto_map" in config else []:
            shutil.copyfile(path, aside / path.name)
        (aside / "README.md").write_text(card or model_card(spec), encoding="utf-8")
        # Last: without config.json no reader takes the folder for a model.
        write_json(aside / "config.json", config)
        return check_export(aside, tensors, spec, tokenizer)


def export_gguf(
    model: Model,
    out: PathLike,
    *,
    dtype: str | None = None,
    imatrix: PathLike = "",
    overwrite: bool = False,
) -> ExportSummary:
    """Writes a GGUF file that llama.cpp loads; `dtype` is one of `GGUF_TYPES`, or a file of types.

    Block types are chosen as `llama-quantize` does; norms and biases are F32. A file is as
    `llama-quantize --tensor-type-file` reads it; types may also be named (`student.quantize`). By
    default numbers are F32, and blocks of the model (`Step.pack`) are written as they are.
    `imatrix` is a file of llama-imatrix: it weights errors by the importance of their inputs.
    Header and tokenizer are kept if the model came from a GGUF file. Arguments and errors: see
    `export_hf`.
    """
    if dtype is not None:
        check_type(dtype, "gguf")
    source = _open_source(model, dtype, gguf=True)
    metadata, rows = _list_gguf(source, dtype, read_importance(imatrix) if imatrix else None)
    with stage(Path(out), folder=False, overwrite=overwrite) as aside:
        write_gguf(aside, metadata, rows)
        return check_export(aside, source.tensors, source.spec, source.tokenizer)


def _list_gguf(
    source: _Source, dtype: str | Mixture | None, importance: Mapping[str, np.ndarray] | None = None
) -> tuple[dict[str, Any], list[TensorToWrite]]:
    """Metadata and tensors of a GGUF file."""
    spec, _, header, tokenizer, files = source
    values = vocabulary.gguf_values(tokenizer, files, spec.vocab_size)
    rows = _fuse(source.encode(dtype, importance), spec, gguf=True)
    metadata = headers.gguf_metadata(spec, header, source.choose_file_type(dtype), values)
    for name, divisors in rope_tensors(spec.rope, spec.head_dim).items():
        rows.append((name, "F32", divisors.shape, divisors.view(np.uint8)))
    return metadata, rows


def check_gguf_tokenizer(checkpoint: Checkpoint) -> None:
    """Raises `UserError` for the tokenizer of a folder whose ids no GGUF header can give."""
    tokenizer, files = checkpoint.tokenizer, checkpoint.tokenizer_files
    if files.folder is None:
        return
    values = vocabulary.gguf_values(tokenizer, files, checkpoint.spec.vocab_size)
    if odd := vocabulary.compare_tokenizers(tokenizer, from_gguf(values, str(checkpoint))):
        raise UserError(
            f"{files.folder}: found a tokenizer that a GGUF file cannot describe, which would have "
            f"{odd[0]}. Give the model as a GGUF file that llama.cpp's converter made."
        )


def count_gguf_bytes(checkpoint: Checkpoint, dtype: str | Mixture) -> int:
    """Bytes of the file that `export_gguf` would write of a checkpoint; reads no weights."""
    functions, shapes = functional(checkpoint.spec, Compute())
    empty = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), shapes)
    spec, rows = checkpoint.spec, checkpoint.spec.vocab_size
    model = Model(functions, empty, rows, spec=spec, checkpoint=checkpoint)
    return count_gguf(*_list_gguf(_open_source(model, "f32", gguf=True), dtype))


def _file_type(types: list[str]) -> int:
    """`general.file_type` of a mixture: of the recipe with the type that most matrices have."""
    base = Counter(dtype for dtype in types if dtype != "F32").most_common(1)
    known = [recipe.file_type for recipe in RECIPES.values() if base and recipe.base == base[0][0]]
    return (known or [RECIPES["f32"].file_type])[0]


def export_apr(
    model: Model, out: PathLike, *, dtype: str = "f32", overwrite: bool = False
) -> ExportSummary:
    """Writes an `.apr` file; `dtype` is one of `APR_TYPES`.

    Raises `UserError` also if rows do not fill complete K-blocks, for which the format has no other
    type. Arguments and other errors: see `export_hf`.
    """
    check_type(dtype, "apr")
    check_suffix(Path(out), ".apr")
    source = _open_source(model, dtype, gguf=False)
    if source.spec.experts:
        raise UserError(
            f"found a {source.spec.family} model; expected one without experts, which .apr files "
            "cannot describe. Use export_gguf or export_hf (--format=gguf or hf)."
        )
    spec, tensors, _, tokenizer, files = source
    family = FAMILIES[spec.family]
    if not family.apr or (spec.window and not family.apr_windows):
        raise UserError(
            f"found a {spec.family} model; expected one that .apr can describe, without windows "
            "and norms of 1 + weight. Use export_gguf or export_hf (--format=gguf or hf)."
        )
    rows = _fuse(source.encode(dtype), spec, gguf=False)
    misfits = [
        f"{name} ({shape[-1]} columns)" for name, kind, shape, _ in rows if kind not in DTYPES
    ]
    if misfits:
        listed = ", ".join(misfits[:3]) + (", ..." if len(misfits) > 3 else "")
        raise UserError(
            f"found {len(misfits)} tensors whose rows do not fill blocks of 256: {listed}; .apr "
            "has no quantized type for them. Take dtype='bf16' or 'f16' (--type), or export_gguf "
            "(--format=gguf)."
        )
    values = vocabulary.gguf_values(tokenizer, files, spec.vocab_size)
    metadata = headers.apr_metadata(spec, Path(out).stem, values)
    with stage(Path(out), folder=False, overwrite=overwrite) as aside:
        write_apr(aside, metadata, rows)
        return check_export(aside, tensors, spec, tokenizer)
