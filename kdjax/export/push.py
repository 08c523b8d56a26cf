"""Uploads an exported folder or file to the Hugging Face Hub, with its model card."""

import os
from pathlib import Path
from typing import Any

from kdjax import hub
from kdjax.errors import MissingFileError, UserError
from kdjax.export.card import front_matter, model_card, read_card
from kdjax.formats.safetensors import ADAPTER_CONFIG, is_model_folder
from kdjax.formats.saved import read_receipt
from kdjax.models.checkpoint import open_checkpoint, read_base

CARD = "README.md"


def push_to_hub(
    path: str | os.PathLike[str],
    repository: str,
    *,
    private: bool = False,
    run: str | os.PathLike[str] = "",
) -> str:
    """Uploads an exported folder, or a GGUF or .apr file with a model card, in one commit.

    `repository` is ORG/REPO, made if it is not there, then `private` if asked. `run` is the workdir
    whose receipt the card of a file repeats; without it a file of `kdjax shrink` has the card next
    to it, and a folder of `export_hf` has its card already. Returns the address of the commit.
    Raises `UserError` for what no export made, and as `hub.upload` does.

        kdjax.export_gguf(student, "student-q4_k_m.gguf", dtype="q4_k_m")
        kdjax.push_to_hub("student-q4_k_m.gguf", "org/student-GGUF")
    """
    hub.check_repository(repository)
    path = Path(path)
    if not path.exists():
        raise MissingFileError(f"{path}: no such file or folder; expected an export to upload.")
    if path.is_dir():
        if not is_model_folder(path):
            raise UserError(
                f"{path}: found no config.json or adapter_config.json; expected a folder of "
                "`kdjax export`, or a GGUF file. Export first."
            )
        _check_base(path)
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
        names = {file.relative_to(path).as_posix(): file for file in inside}
        shown = {name: file for name, file in names.items() if not name.startswith(".")}
        return hub.upload(repository, shown, private=private)
    if path.suffix not in (".gguf", ".apr"):
        raise UserError(f"{path}: found neither a folder nor a .gguf or .apr file; expected one.")
    receipt = read_receipt(Path(run)) if run else {}
    if receipt is None:
        raise UserError(f"{run}: found no receipt.json; expected the workdir of a run.")
    card = _describe_file(path, receipt)
    files: dict[str, Path | bytes] = {path.name: path, CARD: card.encode()}
    return hub.upload(repository, files, private=private)


def _check_base(folder: Path) -> None:
    """Refuses adapters whose base is a path of this machine, which nobody else has."""
    config = folder / ADAPTER_CONFIG
    base = read_base(folder) if config.exists() else ""
    if base and Path(base).is_absolute():
        raise UserError(
            f"{config}: found the base {base!r}, a path of this machine; expected a repository of "
            "the Hub. Put its ORG/REPO as base_model_name_or_path, from which PEFT loads the base."
        )


def _describe_file(path: Path, receipt: dict[str, Any]) -> str:
    checkpoint = open_checkpoint(path)
    types = {checkpoint.table.info(name).dtype for name in checkpoint.table}
    relation = "finetune" if types <= {"F32", "F16", "BF16"} else "quantized"
    library = path.suffix.removeprefix(".")
    if not receipt and (card := read_card(path)):
        return front_matter({}, library, relation) + "\n" + card
    known: Any = dict(receipt=receipt, library=library, relation=relation)
    return model_card(checkpoint.spec, name=path.name, **known)
