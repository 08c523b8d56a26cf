"""The model card of an exported folder or file: what a run's records say, what is not known."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from kdjax import __version__
from kdjax.config import flatten
from kdjax.errors import UserError
from kdjax.formats.files import hide_folders
from kdjax.hub import MODEL, PREFIX, TEXT, HubPath
from kdjax.models.arch import ArchSpec
from kdjax.models.loading import count_parameters
from kdjax.training.best import Part, find_bound, list_parts

_NO_RECORD = (
    "Which files the teacher and the student were: the checkpoint has no record of its run."
)
_FIGURES = {
    "student_ce": "cross-entropy with the text, nats a token",
    "student_perplexity": "perplexity",
    "kl": "KL(teacher to student) at T=1, nats a token",
    "kl_topk": "KL(teacher to student) at T=1 over the cached ids and any other, a lower bound",
    "divergence": "the divergence that was trained, at its temperature",
    "divergence_topk": "the trained divergence over the cached ids and any other, a lower bound",
    "agreement": "top-1 agreement with the teacher",
    "acceptance": "share of its drafts that the teacher would accept, at T=1",
    "acceptance_topk": "the acceptance over the cached ids and any other, an upper bound",
    "teacher_ce": "the teacher's cross-entropy",
    "tokens": "positions measured",
}
_NEVER_KNOWN = (
    "How it answers questions or writes whole programs: no figure here measures generated text.",
    "Its licence: the licences of the student's weights and of the training text apply.",
    "Which parts of the training text it may repeat.",
)


def model_card(
    spec: ArchSpec,
    *,
    name: str = "",
    step: int | None = None,
    receipt: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    library: str = "transformers",
    relation: str = "finetune",
) -> str:
    """README.md of a folder or file for the Hugging Face Hub, in Markdown.

    `library` and `relation` (finetune, quantized or adapter) are the Hub's `library_name` and
    `base_model_relation`; base model and data sets are named if the run took them from the Hub.
    https://huggingface.co/docs/hub/model-cards

    `receipt` is the run's `receipt.json`; without one `identity`, which a checkpoint holds, says
    which models and settings were used. Absolute paths lose their folders.
    """
    receipt = cast(Mapping[str, Any], hide_folders(receipt or {}))
    identity = cast(Mapping[str, Any], hide_folders(identity or {}))
    lines = [front_matter(receipt, library, relation), f"# {name or 'Exported student'}", ""]
    lines.append(_opening(spec, step, bool(receipt or identity)))
    unknown = []
    if hashes := _list_hashes(receipt, identity):
        lines += ["", "## Made from", "", "| what | SHA-256 |", "| --- | --- |", *hashes]
    else:
        unknown.append(_NO_RECORD)
    if figures := _list_figures(receipt.get("held_out") or {}, step):
        lines += ["", "## Measured on held-out text", "", *figures]
    else:
        unknown.append("How near it is to its teacher on held-out text: no receipt holds figures.")
    if end := receipt.get("exit"):
        lines += ["", f"The run ended: {end.get('reason')}, exit status {end.get('status')}."]
    elif receipt:
        unknown.append("How the run ended: its receipt was not closed when this was exported.")
    if command := receipt.get("command"):
        lines += ["", "## Command", "", "```bash", str(command), "```"]
    if settings := flatten(receipt.get("config") or {}) or identity:
        text = json.dumps(dict(settings), indent=1, sort_keys=True, default=str)
        lines += ["", "## Settings", "", "```json", text, "```"]
    else:
        unknown.append("The settings of the run.")
    lines += ["", "## Not known", "", *(f"- {item}" for item in (*unknown, *_NEVER_KNOWN))]
    return "\n".join([*lines, "", _closing(receipt), ""])


def front_matter(receipt: Mapping[str, Any], library: str, relation: str) -> str:
    """Makes the metadata that the Hub reads: the lines before a card's title."""
    sources = receipt.get("sources") or {}
    base = [HubPath.parse(text, MODEL).repository for text in sources.get("student.path", ())]
    texts = [text for text in sources.get("data.train", ()) if text.startswith(PREFIX)]
    data = dict.fromkeys(HubPath.parse(text, TEXT).repository for text in texts)
    lines = ["---", f"library_name: {library}"]
    if base:
        lines += ["base_model:", *(f"- {one}" for one in base)]
        lines.append(f"base_model_relation: {relation}")
    if data:
        lines += ["datasets:", *(f"- {one}" for one in data)]
    return "\n".join([*lines, "tags:", "- distillation", "- kdjax", "---", ""])


def begin_card(name: str) -> str:
    """Makes the lines that the card of a file of `kdjax shrink` begins with."""
    return f"# {name}\n\nMade by `kdjax shrink` of "


def place_card(file: Path) -> Path:
    """The path of a file's card, next to it."""
    return file.with_suffix(".md")


def check_card(file: Path) -> None:
    """Raises `UserError` if what is there under the name of a file's card is no card of it."""
    card = place_card(file)
    if os.path.lexists(card) and not read_card(file):
        raise UserError(
            f"{card} is there, where the card of {file.name} is written, and is none. Move it, or "
            "give another --out."
        )


def read_card(file: Path) -> str:
    """Reads the card that `kdjax shrink` wrote next to a file; "" for none, or another file's.

    Absolute paths lose their folders.
    """
    card = place_card(file)
    text = card.read_text(errors="replace") if card.is_file() else ""
    return hide_folders(text) if text.startswith(begin_card(file.name)) else ""


def _opening(spec: ArchSpec, step: int | None, trained: bool) -> str:
    model = (
        f"A {spec.family} model of {spec.num_layers} layers, {count_parameters(spec):,} "
        f"parameters, {'tied' if spec.tied else 'untied'} head"
    )
    if not trained and step is None:
        return f"{model}, exported by kdjax {__version__}."
    after = "" if step is None else f" after {step:,} optimizer steps"
    return f"{model}, distilled by kdjax{after}."


def _list_hashes(receipt: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    rows = []
    for side, title in (("teacher", "the teacher"), ("student", "the student before training")):
        entry = receipt.get(side) or {}
        files = ", ".join(str(path).rpartition("/")[2] for path in entry.get("files", ()))
        if sha := entry.get("sha256") or identity.get(f"{side}.sha256"):
            rows.append(f"| {title}{f' ({files})' if files else ''} | `{sha}` |")
    if sha := (receipt.get("data") or {}).get("packed_sha256"):
        rows.append(f"| the packed text | `{sha}` |")
    if sha := receipt.get("config_sha256"):
        rows.append(f"| the settings | `{sha}` |")
    return rows


def _list_figures(held_out: Mapping[str, Any], step: int | None) -> list[str]:
    first, final = held_out.get("first"), held_out.get("final")
    if not first or not final:
        return []
    sides = [_read_parts(held_out, end) for end in ("first", "final")]
    steps = f"step {first.get('step', 0)}", f"step {final.get('step')}"
    rows = [["", *steps, "change"], ["---"] * 4]
    for key, label in _FIGURES.items():
        if isinstance(final.get(key), int | float):
            parts = (side.get(key) for side in sides)
            rows.append([label, *_show_row(first.get(key), final[key], *parts)])
    width = 4 if any(row[3] for row in rows[2:]) else 3
    lines = [f"| {' | '.join(row[:width])} |" for row in rows]
    if (count := max(map(len, sides[1].values()), default=0)) > 1:
        paired = ", paired for a change" if width == 4 else ""
        lines += ["", f"±: 95% intervals over {count} held-out batches{paired}."]
    if step is not None and final.get("step") != step:
        lines += ["", f"The weights are those of step {step}, not of the step of the last figures."]
    return lines


def _read_parts(held_out: Mapping[str, Any], end: str) -> dict[str, list[Part]]:
    """The means of each batch, by figure; without those that a batch has no number of."""
    columns = (held_out.get("batches") or {}).get(end) or {}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    known = [key for key in _FIGURES if None not in columns.get(key, [None]) and key != "tokens"]
    return {key: list_parts(rows, key) for key in known}


def _show_row(
    first: object, final: int | float, before: list[Part] | None, now: list[Part] | None
) -> tuple[str, str, str]:
    """A figure before and after, and its change if its batches say how sure that is."""
    ends = _show(first) + show_bound(before), _show(final) + show_bound(now)
    bound = show_bound(now, before) if before and before != now else ""
    if not bound or not isinstance(first, int | float):
        return *ends, ""
    return *ends, _show(final - first) + bound


def show_bound(now: Sequence[Part] | None, before: Sequence[Part] | None = None) -> str:
    """Half of a figure's 95% interval, " ± 0.012", or of its change since `before`.

    Without two batches, or with others before, "".
    """
    if not now or (before and [x.count for x in before] != [x.count for x in now]):
        return ""
    bound = find_bound(now, before)
    return f" ± {show_number(bound, 2)}" if math.isfinite(bound) else ""


def show_number(value: float, digits: int) -> str:
    """Writes a number of this many digits without an exponent: 0.000018."""
    return np.format_float_positional(value, digits, fractional=False, trim="-")


def _show(value: object) -> str:
    return f"{value:,.6g}" if isinstance(value, int | float) else "not measured"


def _closing(receipt: Mapping[str, Any]) -> str:
    trainer = receipt.get("kdjax") or {}
    version = trainer.get("version", __version__)
    commit = f" ({trainer['git_sha']})" if trainer.get("git_sha") else ""
    return f"Trained with kdjax {version}{commit}, exported with {__version__}."
