"""The evaluation's document as text for a terminal, and as a JSON file."""

import json
from pathlib import Path
from typing import Any

from kdjax.formats.files import replacing

_COLUMNS = {
    "tokens": ("tokens", ",.0f"),
    "ce": ("CE", ".4f"),
    "perplexity": ("ppl", ".4g"),
    "bits_per_byte": ("bits/byte", ".4f"),
    "right": ("right", ".4f"),
    "teacher_ce": ("teacher CE", ".4f"),
    "kl_ts": ("KL(t||s)", ".4f"),
    "kl_st": ("KL(s||t)", ".4f"),
    "jsd": ("JSD", ".4f"),
    "top1": ("top-1", ".4f"),
    "top5": ("top-5", ".4f"),
}


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else format(value, form)


def _table(rows: dict[str, dict[str, Any]]) -> list[str]:
    names = [n for n in _COLUMNS if any(n in row for row in rows.values())]
    first = max(map(len, rows)) + 2
    lines = [" " * first + "".join(f"{_COLUMNS[n][0]:>12}" for n in names)]
    for label, row in rows.items():
        cells = "".join(f"{_cell(row.get(n), _COLUMNS[n][1]):>12}" for n in names)
        lines.append(f"{label:<{first}}{cells}")
    return lines


def _held_out(figures: dict[str, Any]) -> list[str]:
    rows: dict[str, dict[str, Any]] = {}
    for domain, found in figures.items():
        rows[domain] = found["overall"]
        for kind in ("positions", "classes"):
            rows |= {f"  {domain}: {name}": row for name, row in found[kind].items()}
    return _table(rows)


def _benchmark(name: str, found: dict[str, Any]) -> list[str]:
    rates = ", ".join(f"pass@{k} {rate:.4f}" for k, rate in found["pass_at_k"].items())
    if found["mode"] != "inference":
        return [f"{name}: {found['mode']}, {rates}: {found['inference_error']}"]
    ends = ", ".join(f"{count} {reason}" for reason, count in found["reasons"].items())
    lines = [
        f"{name}: {rates} ({found['problems']} problems, {found['samples']} samples, "
        f"{found['prompt']} prompts)",
        f"  how programs ended: {ends}; {found['cut_off']} answers cut off at --max-tokens",
    ]
    if found["not_generated"]:
        lines.append(f"  {found['not_generated']} samples were not generated and count as failures:"
                     f" {found['inference_error']}")  # fmt: skip
    if found["infrastructure_failures"]:
        lines.append(f"  {found['infrastructure_failures']} programs could not be run by the "
                     "sandbox and count as failures")  # fmt: skip
    return lines


def text(document: dict[str, Any]) -> str:
    """The document, readable."""
    lines = [str(document.get("model", document["target"]))]
    if "inference_error" in document:
        lines.append(f"inference_failed: {document['inference_error']}")
    lines += [f"BROKEN {f['detector']}: {f['evidence']}" for f in document["broken"]]
    if document["mode"] == "inference" and not document["broken"]:
        lines.append("no detector found it broken")
    if document.get("held_out"):
        lines += ["", *_held_out(document["held_out"])]
    for name in ("humaneval", "mbpp"):
        if name in document:
            lines += ["", *_benchmark(name, document[name])]
    if "sandbox" in document:
        lines += ["  sandbox: " + "; ".join(f"{k}: {v}" for k, v in document["sandbox"].items())]
    return "\n".join(lines)


def write(path: Path, document: dict[str, Any]) -> None:
    """The document as JSON; `path` appears when all of it is written."""
    with replacing(path) as file:
        file.write(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
                   .encode("utf-8", "backslashreplace") + b"\n")  # fmt: skip
