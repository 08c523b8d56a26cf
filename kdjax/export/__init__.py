"""Students as files that others load: a Hugging Face folder, a GGUF file, an `.apr` file.

    kdjax export runs/a --format=hf --out=exported/student
    kdjax export runs/a --format=peft --out=exported/adapter

Every export is written next to its target, read back and compared, and only then put in place.
"""

from kdjax.export.adapters import export_gguf_adapter, export_peft
from kdjax.export.check import ExportSummary, SelfCheckError
from kdjax.export.formats import APR_TYPES, GGUF_TYPES, HF_TYPES, export_apr, export_gguf, export_hf
from kdjax.export.heads import export_head
from kdjax.export.push import push_to_hub

__all__ = [
    "APR_TYPES",
    "GGUF_TYPES",
    "HF_TYPES",
    "ExportSummary",
    "SelfCheckError",
    "export_apr",
    "export_gguf",
    "export_gguf_adapter",
    "export_head",
    "export_hf",
    "export_peft",
    "push_to_hub",
]
