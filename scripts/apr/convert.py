"""Converts a GGUF file to an .apr file, or back.

    python -m scripts.apr.convert model.gguf model.apr
    python -m scripts.apr.convert model.apr model.gguf

No weight is decoded on the way. The .apr file keeps the GGUF header as it was, so that the GGUF
file comes back byte for byte; one from elsewhere becomes a GGUF file with a header of its own.
"""

import argparse
import base64
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import UserError, reporting
from kdjax.export.headers import apr_architecture, as_json
from kdjax.formats.apr.metadata import GGUF_KEY, TOKENIZER
from kdjax.formats.apr.table import DTYPES, AprTable, verify_footer, write_apr
from kdjax.formats.files import bad, map_file, replacing
from kdjax.formats.gguf import GGUFTable, write_gguf
from kdjax.models.arch import ArchSpec
from kdjax.models.families import FAMILIES
from kdjax.models.names import APART, LAYER_OF, NAMES
from kdjax.models.ropes import scaling_to_config
from kdjax.models.schema import gguf_entries, spec_from_table

# GGUF files of the others interleave the rows of queries and keys, or fuse matrices by other names;
# .apr files do not.
_CONVERTIBLE = [
    name
    for name, family in FAMILIES.items()
    if family.apr and not (family.interleaved or family.experts or family.fused)
]
_HF_OF = {name.gguf: name.hf for name in NAMES if name.path[1:] not in APART}
_GGUF_OF = {hf: gguf for gguf, hf in _HF_OF.items()}
_USE_GGUF = "Use the GGUF file: kdjax reads it as it is."
_AGAIN = "Convert the GGUF file again."


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """GGUF to `.apr` or `.apr` to GGUF, as the suffixes say; `target` appears when it is whole.

    Raises `UserError` for other suffixes, a broken source, and a model that the target's format
    cannot hold.
    """
    source, target = Path(source), Path(target)
    suffixes = source.suffix, target.suffix
    if suffixes == (".gguf", ".apr"):
        gguf_to_apr(source, target)
    elif suffixes == (".apr", ".gguf"):
        apr_to_gguf(source, target)
    else:
        raise UserError(
            f"found {source.name} to convert to {target.name}; expected .gguf to .apr or .apr to "
            ".gguf. Give both files one of these suffixes."
        )


def _rename(name: str, names: Mapping[str, str]) -> str | None:
    match = LAYER_OF.fullmatch(name)
    if match is None:
        return names.get(name)
    other = names.get(f"{match[1]}.{{i}}.{match['rest']}")
    return other and other.format(i=match["i"])


def hf_name(gguf: str) -> str | None:
    """Hugging Face's name of the tensor; None for one that is no parameter of the table."""
    return _rename(gguf, _HF_OF)


def gguf_name(hf: str) -> str | None:
    """llama.cpp's name of the tensor; None for one that is no parameter of the table."""
    return _rename(hf, _GGUF_OF)


def _check_convertible(path: Path, table: GGUFTable, spec: ArchSpec) -> None:
    """Raises `UserError` for what an `.apr` file cannot hold."""
    if len(table.paths) > 1:
        found = f"one of {len(table.paths)} shards"
        raise bad(path, found, "a single file", "Merge the shards first, or use them as they are.")
    family = FAMILIES[spec.family]
    published = family.qkv_bias, False, family.qk_norm  # what config.json implies
    if family.name not in _CONVERTIBLE or (spec.qkv_bias, spec.o_bias, spec.qk_norm) != published:
        wanted = f"one of {', '.join(_CONVERTIBLE)} as published"
        raise bad(path, f"a {spec.family} model to convert", wanted, _USE_GGUF)
    others = {name: table.info(name).dtype for name in table}
    listed = [f"{name} ({dtype})" for name, dtype in others.items() if dtype not in DTYPES]
    if listed:
        shown = ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
        found = f"{len(listed)} tensors in types that .apr does not have: {shown}"
        raise bad(path, found, f"{', '.join(DTYPES)} only", _USE_GGUF)
    if strange := [name for name in table if hf_name(name) is None]:
        found = f"tensors without a name in .apr: {', '.join(strange[:4])}"
        raise bad(path, found, "parameters of the decoder only", _USE_GGUF)


def _read_header(path: Path, table: GGUFTable) -> bytes:
    """All bytes before the first tensor, checked that zeros fill what no tensor does."""
    data, order = map_file(path), sorted(table, key=table.start)
    first = at = table.start(order[0])
    for name in order:
        start = table.start(name)
        if start < at or data[at:start].any():
            found = f"{'data before' if start > at else 'an overlap at'} tensor {name!r}"
            raise bad(path, found, "tensors one behind the other, zeros between", _USE_GGUF)
        at = start + table.info(name).nbytes
    # Padding beyond the size of all else would be no padding; see `_read_stored`.
    if data[at:].any() or data.size - at > at:
        raise bad(path, "data behind the last tensor", "zeros up to its alignment", _USE_GGUF)
    return data[:first].tobytes()


def _apr_metadata(table: GGUFTable, spec: ArchSpec, header: bytes, size: int) -> dict[str, Any]:
    metadata = apr_architecture(spec, str(table.metadata.get("general.name", "")), "gguf")
    if scaling := scaling_to_config(spec.rope, spec.head_dim, spec.max_positions):
        metadata["rope_scaling"] = scaling
    for key, name in TOKENIZER.items():
        if name in table.metadata:
            metadata[key] = as_json(table.metadata[name])
    stored = {"header": base64.b64encode(header).decode(), "size": size}
    return metadata | {GGUF_KEY: stored}


def gguf_to_apr(source: Path, target: Path) -> None:
    """Writes the model as an `.apr` file, with the GGUF header kept for `apr_to_gguf`.

    Raises `UserError` for a split file, a family or block type that `.apr` cannot hold, and a
    header that leaves no room in its 16 MiB of metadata.
    """
    table = GGUFTable(source)
    spec = spec_from_table(table)
    _check_convertible(source, table, spec)
    header = _read_header(source, table)
    metadata = _apr_metadata(table, spec, header, source.stat().st_size)
    tensors = []
    for name in sorted(table, key=table.start):
        info = table.info(name)
        tensors.append((hf_name(name), info.dtype, info.shape, table.raw(name)))
    write_apr(target, metadata, tensors)


def apr_to_gguf(source: Path, target: Path) -> None:
    """Restores the GGUF file that the `.apr` file was, or writes one with a new header.

    Reads all of the source first to check its footer. Raises `UserError` for a damaged file, and
    for one from elsewhere whose family or tensors the new header cannot describe.
    """
    verify_footer(source)
    table = AprTable(source)
    stored = table.stored().get(GGUF_KEY)
    if stored is None:
        _write_new(table, target)
    else:
        _restore(table, stored, target)


def _read_stored(table: AprTable, stored: Any) -> tuple[bytes, int]:
    """The kept header and the size of the file it began."""
    path = table.paths[0]
    fields: Mapping[str, Any] = stored if isinstance(stored, dict) else {}
    size = fields.get("size")
    try:
        header = base64.b64decode(fields.get("header", ""), validate=True)
    except (TypeError, ValueError):
        header = b""
    # The .apr file has all the tensors and header too, so that only padding can be larger.
    if not header or type(size) is not int or not len(header) <= size <= 2 * path.stat().st_size:
        raise bad(path, f"a damaged {GGUF_KEY} in its metadata", "a GGUF header and size", _AGAIN)
    return header, size


def _restore(table: AprTable, stored: Any, target: Path) -> None:
    path = table.paths[0]
    header, size = _read_stored(table, stored)
    with replacing(target) as file:
        file.write(header)
        file.truncate(size)  # zeros between and behind the tensors
        file.flush()
        try:
            layout = GGUFTable(file.name)
        except UserError as error:
            raise bad(path, f"a stored GGUF header that {error}", "a whole one", _AGAIN) from error
        if len(layout) != len(table):
            found = f"{len(layout)} tensors in its GGUF header"
            raise bad(path, found, f"the {len(table)} of the file", _AGAIN)
        for name in layout:
            hf, info = hf_name(name) or name, layout.info(name)
            if hf not in table or table.info(hf)[1:] != info[1:]:
                found = f"no tensor {hf!r} of type {info.dtype} and shape {info.shape}"
                raise bad(path, found, "what its GGUF header lists", _AGAIN)
            file.seek(layout.start(name))
            file.write(np.ravel(table.raw(hf)).data)


def _write_new(table: AprTable, target: Path) -> None:
    """A GGUF file with a header made from the architecture and tokenizer of the `.apr` file."""
    path, spec = table.paths[0], spec_from_table(table)
    if spec.family not in _CONVERTIBLE or spec.rope_scaling:
        found = f"a {spec.family} model" + (" with rope scaling" if spec.rope_scaling else "")
        wanted = f"one of {', '.join(_CONVERTIBLE)} without"
        raise bad(path, found, wanted, "Use the .apr file: kdjax reads it as it is.")
    if strange := [name for name in table if gguf_name(name) is None]:
        found = f"tensors without a name in GGUF: {', '.join(strange[:4])}"
        raise bad(path, found, "parameters of the decoder only", "Leave them out.")
    tokenizer = {key: table.metadata[key] for key in TOKENIZER.values() if key in table.metadata}
    if tokenizer:
        tokenizer.setdefault("tokenizer.ggml.pre", FAMILIES[spec.family].pre_tokenizer)
    metadata = {
        "general.architecture": FAMILIES[spec.family].gguf,
        "general.type": "model",
    }
    infos = [table.info(name) for name in table]
    tensors = [(gguf_name(i.name) or "", i.dtype, i.shape, table.raw(i.name)) for i in infos]
    write_gguf(target, metadata | gguf_entries(spec) | tokenizer, tensors)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 after one line on what the files have wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="the file to read, .gguf or .apr")
    parser.add_argument("target", help="the file to write, .apr or .gguf")
    args = parser.parse_args(argv)
    convert(args.source, args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
