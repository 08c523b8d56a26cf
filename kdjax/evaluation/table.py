"""The evaluation's document as text for a terminal, and as a JSON file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdjax.formats.files import replacing

# Key in the document -> label and format. A perfect twin has KL of 1e-8, another model of 1.
_OVERALL = {
    "tokens": ("positions", ",.0f"),
    "ce": ("CE, nats", ".4f"),
    "teacher_ce": ("  teacher's", ".4f"),
    "perplexity": ("perplexity", ".6g"),
    "teacher_perplexity": ("  teacher's", ".6g"),
    "entropy": ("entropy, nats", ".4f"),
    "teacher_entropy": ("  teacher's", ".4f"),
    "bits_per_byte": ("bits a byte", ".4f"),
    "right": ("target ranked first", ".4f"),
    "kl_ts": ("KL(teacher || model), nats", ".4g"),
    "kl_st": ("KL(model || teacher), nats", ".4g"),
    "jsd": ("Jensen-Shannon, nats", ".4g"),
    "tv": ("total variation", ".4g"),
    "acceptance": ("acceptance of drafts, T = 1", ".4f"),
    "top1": ("top-1 agreement", ".4f"),
    "top5": ("top-5 agreement", ".4f"),
    "cosine": ("cosine of logits, mean", ".6f"),
    "min_cosine": ("cosine of logits, least", ".6f"),
    "max_difference": ("|logit difference|, most", ".4g"),
}
_GROUPED = {
    "tokens": ("positions", ",.0f"),
    "ce": ("CE", ".4f"),
    "perplexity": ("perplexity", ".4g"),
    "bits_per_byte": ("bits/byte", ".4f"),
    "right": ("right", ".4f"),
    "kl_ts": ("KL(t||m)", ".4g"),
    "acceptance": ("accept", ".4f"),
    "top1": ("top-1", ".4f"),
}


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else format(value, form)


def _table(columns: dict[str, tuple[str, str]], rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Cells of the figures that some row has: a heading first, then a line a row."""
    names = [name for name in columns if any(name in row for row in rows.values())]
    return [["", *(columns[name][0] for name in names)]] + [
        [label, *(_cell(row.get(name), columns[name][1]) for name in names)]
        for label, row in rows.items()
    ]


def _align(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in cells
    ]


def _held_out(figures: dict[str, Any]) -> list[str]:
    """All figures, a column a domain; then the chief ones by place in the document and class."""
    overall = _table(_OVERALL, {name: domain["overall"] for name, domain in figures.items()})
    groups = {
        f"{domain}: {name}": row
        for domain, kinds in figures.items()
        for kind in ("positions", "classes")
        for name, row in kinds[kind].items()
    }
    return [*_align(list(zip(*overall, strict=True))), "", *_align(_table(_GROUPED, groups))]


def _benchmark(name: str, found: dict[str, Any]) -> list[str]:
    rates = ", ".join(f"pass@{k} {rate:.4f}" for k, rate in found["pass_at_k"].items())
    if found["mode"] != "inference":
        return [f"{name}: {found['mode']}, {rates}: {found['inference_error']}"]
    ends = ", ".join(f"{count} {reason}" for reason, count in found["reasons"].items())
    counts = f"{found['problems']} problems, {found['samples']} samples"
    lines = [
        f"{name}: {rates} ({counts}, {found['prompt']} prompts)",
        f"  how programs ended: {ends}; {found['cut_off']} answers cut off at --max-tokens",
    ]
    if count := found["not_generated"]:
        error = found["inference_error"]
        lines.append(f"  {count} samples were not generated and count as failures: {error}")
    if count := found["infrastructure_failures"]:
        lines.append(f"  {count} programs could not be run by the sandbox and count as failures")
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
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
