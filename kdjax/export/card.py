"""The model card of an exported folder: what the run's own records say, and what they do not."""

import json
from collections.abc import Mapping
from typing import Any

from kdjax import __version__
from kdjax.config import flatten
from kdjax.models.arch import ArchSpec

_FRONT = """---
library_name: transformers
tags:
- distillation
- kdjax
---
"""
_NO_RECORD = (
    "Which files the teacher and the student were: no record of the run is beside the checkpoint."
)
_FIGURES = {
    "student_ce": "cross-entropy with the text, nats a token",
    "student_perplexity": "perplexity",
    "kl": "KL(teacher to student) at T=1, nats a token",
    "kl_topk": "KL(teacher to student) at T=1 over the cached ids and any other, a lower bound",
    "divergence": "the divergence that was trained, at its temperature",
    "divergence_topk": "the same over the cached ids and any other, a lower bound",
    "agreement": "top-1 agreement with the teacher",
    "teacher_ce": "the teacher's cross-entropy",
    "tokens": "positions measured",
}
_NEVER_KNOWN = (
    "How it answers questions or writes whole programs: no figure here is of generated text.",
    "Its licence: that of the student's own weights and of the training text apply.",
    "What of the training text it may repeat.",
)


def model_card(
    spec: ArchSpec,
    *,
    name: str = "",
    step: int | None = None,
    receipt: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
) -> str:
    """README.md of a Hugging Face folder, in Markdown.

    `receipt` is the run's `receipt.json`; without one `identity`, which a checkpoint holds, says
    which models and settings were used.
    """
    receipt = receipt or {}
    lines = [_FRONT, f"# {name or 'Exported student'}", ""]
    lines.append(_opening(spec, step, bool(receipt or identity)))
    unknown = []
    hashes = _hashes(receipt, identity or {})
    if hashes:
        lines += ["", "## Made from", "", "| what | SHA-256 |", "| --- | --- |", *hashes]
    else:
        unknown.append(_NO_RECORD)
    figures = _figures(receipt.get("held_out"), step)
    if figures:
        lines += ["", "## Measured on held-out text", "", *figures]
    else:
        unknown.append("How near it is to its teacher on held-out text: no receipt holds figures.")
    if exit := receipt.get("exit"):
        lines += ["", f"The run ended: {exit.get('reason')}, exit status {exit.get('status')}."]
    elif receipt:
        unknown.append("How the run ended: its receipt was not closed when this was exported.")
    config = receipt.get("config")
    settings = flatten(dict(config)) if isinstance(config, dict) else identity
    if settings:
        text = json.dumps(dict(settings), indent=1, sort_keys=True, default=str)
        lines += ["", "## Settings", "", "```json", text, "```"]
    else:
        unknown.append("The settings of the run.")
    lines += ["", "## Not known", "", *(f"- {item}" for item in (*unknown, *_NEVER_KNOWN))]
    return "\n".join([*lines, "", _closing(receipt), ""])


def _opening(spec: ArchSpec, step: int | None, trained: bool) -> str:
    size = f"{spec.parameters():,} parameters"
    tied = "tied" if spec.tied else "untied"
    what = f"A {spec.family} model of {spec.num_layers} layers, {size}, {tied} head"
    if not trained and step is None:
        return f"{what}, exported by kdjax {__version__}."
    after = "" if step is None else f" after {step:,} optimizer steps"
    return f"{what}, distilled by kdjax{after}."


def _hashes(receipt: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    rows = []
    for side in ("teacher", "student"):
        entry = receipt.get(side)
        entry = entry if isinstance(entry, dict) else {}
        sha = entry.get("sha256") or identity.get(f"{side}.sha256")
        files = ", ".join(str(path).rpartition("/")[2] for path in entry.get("files", ()))
        if sha:
            start = "the student before training" if side == "student" else "the teacher"
            rows.append(f"| {start}{f' ({files})' if files else ''} | `{sha}` |")
    if sha := (receipt.get("data") or {}).get("packed_sha256"):
        rows.append(f"| the packed text | `{sha}` |")
    if sha := receipt.get("config_sha256"):
        rows.append(f"| the settings | `{sha}` |")
    return rows


def _figures(held_out: Any, step: int | None) -> list[str]:
    held_out = held_out if isinstance(held_out, dict) else {}
    first, final = held_out.get("first"), held_out.get("final")
    if not first or not final:
        return []
    head = f"| | step {first.get('step', 0)} | step {final.get('step')} |"
    rows = [head, "| --- | --- | --- |"]
    for key, label in _FIGURES.items():
        if isinstance(final.get(key), int | float):
            rows.append(f"| {label} | {_number(first.get(key))} | {_number(final[key])} |")
    if step is not None and final.get("step") != step:
        rows += ["", f"The weights are those of step {step}, not of the step of the last figures."]
    return rows


def _number(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, int | float) else "not measured"


def _closing(receipt: Mapping[str, Any]) -> str:
    made = receipt.get("kdjax") if isinstance(receipt.get("kdjax"), dict) else {}
    sha = made.get("git_sha") if made else None
    version = made.get("version", __version__) if made else __version__
    return f"Trained with kdjax {version}{f' ({sha})' if sha else ''}, exported with {__version__}."
