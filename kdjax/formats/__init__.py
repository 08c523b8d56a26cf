"""Checkpoint files: lazy tensor tables with one interface."""

import hashlib
import os
import re
import shlex
from pathlib import Path

from kdjax.errors import MissingFileError, UserError, suggest_path
from kdjax.formats.apr.table import AprTable, is_apr
from kdjax.formats.files import load_json
from kdjax.formats.gguf import GGUFTable
from kdjax.formats.safetensors import SafetensorsTable
from kdjax.formats.table import LazyTensor, TensorInfo, TensorTable, rename_tensors

__all__ = [
    "LazyTensor",
    "TensorInfo",
    "TensorTable",
    "content_hash",
    "open_shapes",
    "open_table",
    "rename_tensors",
]

_PUBLISHED = re.compile(
    r"qwen2\.5-coder-(0\.5b|1\.5b|3b|7b|14b|32b)-instruct-\w+(-\d{5}-of-\d{5})?\.gguf",
    re.IGNORECASE,
)
_EXAMPLE = "qwen2.5-coder-7b-instruct-q4_k_m.gguf"


def _download_command(path: Path) -> tuple[str, bool]:
    """Returns a command that downloads `path`, or an example, and whether it is for `path`."""
    match = _PUBLISHED.search(path.name)
    name = match[0].lower() if match else _EXAMPLE
    size = match[1].upper() if match else "7B"
    folder = shlex.quote(str(path.parent)) if match else "models"
    command = f"hf download Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF {name} --local-dir {folder}"
    return command, match is not None


def open_table(path: str | os.PathLike[str], *, whole: bool = True) -> TensorTable:
    """Opens a checkpoint: a Hugging Face folder, or a `.safetensors`, `.apr` or GGUF file.

    Reads headers only; with `whole=False` a file may end after its header. Raises
    `MissingFileError` for a path that does not exist, with the command that downloads it if the
    name is that of a published file, and `UserError` for a broken file.
    """
    path = Path(path)
    if not path.exists():
        command, exact = _download_command(path)
        raise MissingFileError(
            f"{path}: found no such file or folder; expected a GGUF model, a Hugging Face folder "
            f"(config.json next to model.safetensors) or the workdir of a run.{suggest_path(path)} "
            f"{'Download it' if exact else 'Download one, for example'}: `{command}`"
        )
    if not (path.is_dir() or path.is_file()):
        raise UserError(
            f"{path}: found a pipe, socket or device; expected a regular file, which is read from "
            "any place in it. Write it to a disk first."
        )
    if path.is_dir() or path.suffix == ".safetensors":
        return SafetensorsTable(path, whole=whole)
    if is_apr(path):
        return AprTable(path, whole=whole)
    return GGUFTable(path, whole=whole)


def open_shapes(path: str | os.PathLike[str], *, whole: bool = True) -> TensorTable:
    """Opens a checkpoint as `open_table` does; a Hugging Face folder may lack its weights."""
    config = Path(path) / "config.json"
    if not config.is_file() or any(Path(path).glob("*.safetensors*")):
        return open_table(path, whole=whole)
    return TensorTable((config,), load_json(config, "a file"), {})


def content_hash(table: TensorTable) -> str:
    """SHA-256, in hex, of all files' bytes in order; for a single file it equals `sha256sum`."""
    digest = hashlib.sha256()
    for path in table.paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
