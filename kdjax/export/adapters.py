"""Adapters alone, as files for their unchanged base: a PEFT folder, a GGUF adapter.

Names are those of PEFT 0.19; llama.cpp's src/llama-adapter.cpp and convert_lora_to_gguf.py define
the GGUF file.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from kdjax.errors import UserError
from kdjax.export.card import model_card
from kdjax.export.check import ExportSummary, SelfCheckError
from kdjax.export.staging import stage, write_json
from kdjax.formats.files import TensorToWrite
from kdjax.formats.gguf import GGUFTable, write_gguf
from kdjax.formats.safetensors import ADAPTER, ADAPTER_CONFIG, read_peft, write_file
from kdjax.formats.table import TensorTable
from kdjax.models import names
from kdjax.models.adapters import PREFIX, Key, Lora, SavedSum, module_name, reorder, split_adapters
from kdjax.models.arch import ArchSpec
from kdjax.models.families import FAMILIES
from kdjax.models.model import Model, check_model

PathLike = str | os.PathLike[str]


def _take_apart(model: Model) -> tuple[Lora, dict[Key, np.ndarray]]:
    """Returns the adapters' size, and their arrays on the host.

    Raises `UserError` for a model without adapters, and for numbers that are not finite.
    """
    check_model(model)
    lora = Lora.of_params(model.params)
    if model.checkpoint is not None and isinstance(model.checkpoint.table, SavedSum):
        raise UserError(
            f"{model.checkpoint}: found adapters that trained under rounding (student.quantize); "
            "expected adapters alone: without the rounding they are another model. Export it "
            "whole: export_gguf (--format=gguf)."
        )
    if lora is None or model.spec is None:
        raise UserError(
            f"{model.name}: found a model without adapters; expected one of kdjax.add_lora, or of "
            "a run with student.lora.rank. Export it whole: export_hf or export_gguf "
            "(--format=hf or gguf)."
        )
    if model.checkpoint is not None:
        said, layers = model.checkpoint.header.metadata, model.spec.num_layers
        key = f"{FAMILIES[model.spec.family].gguf}.block_count"
        whole = said.get("num_hidden_layers", said.get(key, layers))
        if whole != layers:
            raise UserError(
                f"{model.name}: found adapters of {layers} layers and a base of {whole}, of which "
                "these were kept; expected one for each, or they are put on other layers. Export "
                "it whole: export_hf or export_gguf (--format=hf or gguf)."
            )
    flat: dict[Key, Any] = flatten_dict(split_adapters(model.params)[1])
    arrays = {path: np.asarray(x, np.float32) for path, x in flat.items()}
    broken = ["/".join(path) for path, x in arrays.items() if not np.isfinite(x).all()]
    if broken:
        raise UserError(
            f"found numbers in {broken[0]} that are not finite; expected none. The run broke: "
            "export an earlier step (--step), or train again."
        )
    return lora, arrays


def _list_tensors(
    arrays: dict[Key, np.ndarray], spec: ArchSpec, *, gguf: bool
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields each layer's A and B in a file's order: the matrix's name there, `a` or `b`, array."""
    for (*path, part), stack in arrays.items():
        name = names.name_of(tuple(path), spec)
        layout = names.layout_of(tuple(path), spec, gguf=gguf)
        layers = names.layers_of(tuple(path), spec) or ()
        for layer, array in zip(layers, reorder(stack, part, layout, write=True), strict=True):
            stem = (name.gguf if gguf else name.hf).format(i=layer)
            yield stem, part, np.ascontiguousarray(array)


def _as_written(tensors: dict[str, np.ndarray]) -> list[TensorToWrite]:
    return [(name, "F32", x.shape, x.view(np.uint8)) for name, x in tensors.items()]


def _check(table: TensorTable, tensors: dict[str, np.ndarray]) -> ExportSummary:
    """Compares a written file with the intended tensors, bit for bit."""
    wrong = set(table) ^ tensors.keys()
    wrong |= {
        name
        for name in tensors.keys() - wrong
        if table.info(name).shape != tensors[name].shape
        or not np.array_equal(table.raw(name).view(np.float32), tensors[name])
    }
    if wrong:
        raise SelfCheckError(f"the file just written has other tensors: {sorted(wrong)[:5]}")
    size = sum(x.nbytes for x in tensors.values())
    return ExportSummary(len(tensors), size, {"F32": len(tensors)}, 0.0)


def export_peft(
    model: Model, out: PathLike, *, base: str = "", overwrite: bool = False
) -> ExportSummary:
    """Writes a folder that PEFT loads on the model's base: adapters, float32, and their config.

    `base` is the base's name in the config, a path or a name of the Hub (default: the file that the
    model was loaded from). Raises `UserError` for a model without adapters.

        kdjax.export_peft(student.replace(params=step.see(state)), "adapter")
    """
    lora, arrays = _take_apart(model)
    spec = model.spec
    assert spec is not None

    tensors = {
        f"{PREFIX}{name.removesuffix('.weight')}.lora_{part.upper()}.weight": array
        for name, part, array in _list_tensors(arrays, spec, gguf=False)
    }
    if not base and model.checkpoint is not None:
        base = str(model.checkpoint.header.paths[0].resolve())
        if base.endswith(".safetensors"):
            base = str(Path(base).parent)
    modules = (module_name(path, spec).rpartition(".")[2] for path in lora.targets)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": list(dict.fromkeys(modules)),
        "use_dora": False,
        "use_rslora": False,
    }
    with stage(Path(out), folder=True, overwrite=overwrite) as aside:
        aside.mkdir()
        write_file(aside / ADAPTER, _as_written(tensors))
        card = model_card(spec, name=Path(out).name, library="peft", relation="adapter")
        (aside / "README.md").write_text(card, encoding="utf-8")
        write_json(aside / ADAPTER_CONFIG, config)
        return _check(read_peft(aside), tensors)


def export_gguf_adapter(model: Model, out: PathLike, *, overwrite: bool = False) -> ExportSummary:
    """Writes a GGUF file that llama.cpp adds to the model's base (`--lora FILE`): float32.

    B's rows are in the order of the base's rows: Llama's queries and keys are interleaved.
    Raises `UserError` for a model without adapters.
    """
    lora, arrays = _take_apart(model)
    spec = model.spec
    assert spec is not None
    tensors = {
        f"{name}.lora_{part}": array for name, part, array in _list_tensors(arrays, spec, gguf=True)
    }
    metadata = {
        "general.architecture": FAMILIES[spec.family].gguf,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": lora.alpha,
        "general.quantization_version": 2,
    }
    with stage(Path(out), folder=False, overwrite=overwrite) as aside:
        write_gguf(aside, metadata, _as_written(tensors))
        return _check(GGUFTable(aside), tensors)
