"""The evaluation's document as text for a terminal, and as a JSON file."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdjax.evaluation.health.detectors import WEAK
from kdjax.evaluation.passk import INFERENCE
from kdjax.evaluation.problems import BENCHMARKS
from kdjax.formats.files import replacing

# Key in the document -> label and format. An equal model has a KL of 1e-8, another one of 1.
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


def _cell(value: int | float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(columns: dict[str, tuple[str, str]], rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Cells of all figures that some row has: a heading, then a line for each row."""
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
    """All figures, a column for each domain; then the main ones by position and class."""
    overall = _table(_OVERALL, {name: domain["overall"] for name, domain in figures.items()})
    groups = {
        f"{domain}: {name}": row
        for domain, kinds in figures.items()
        for kind in ("positions", "classes")
        for name, row in kinds[kind].items()
    }
    return [*_align(list(zip(*overall, strict=True))), "", *_align(_table(_GROUPED, groups))]


_SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_KEPT_BY = {
    "greedy": "greedily",
    "sampled": "at T = 1 by speculative sampling",
    "sampled_top10": "at T = 1 by speculative sampling from the draft's top 10",
    "matched": "at T = 1 if the teacher draws the draft's top id",
}


def _drafts(found: dict[str, Any]) -> list[str]:
    """Blocks of each domain and rule, a column for each number of drafts."""
    draft, more = found["costs"]["draft"], found["costs"]["more"]
    lines = [
        f"costs, in passes of the teacher over one token: {draft:.3f} the draft's pass, "
        f"{more:.3f} each additional token in the teacher's "
        f"({'measured here' if found['costs']['measured'] else 'as given'})"
    ]
    for domain, rules in found["domains"].items():
        for rule, figures in rules.items():
            blocks = {k: x for k, x in figures["blocks"].items() if k in _SHOWN}
            rows = {
                "drafts a pass": [str(k) for k in blocks],
                "accepted a pass": [f"{x['accepted']:.3f}" for x in blocks.values()],
                "  if independent": [f"{x['independent']:.3f}" for x in blocks.values()],
                "speed-up": [f"{x['speed_up']:.2f}" for x in blocks.values()],
            }
            lines += [
                "",
                f"{domain}, {_KEPT_BY[rule]}: {figures['kept']:.4f} of the drafts kept over "
                f"{figures['tokens']:,} tokens of the teacher's",
                *_align([[name, *cells] for name, cells in rows.items()]),
            ]
            shares = [
                f"{x['kept'] / x['tokens']:.4f} of {x['tokens']:,} at {name}"
                for name, x in figures["places"].items()
                if x["tokens"]
            ]
            lines.append("kept by place in the answer: " + ", ".join(shares))
            if best := figures["best"]:
                gain = figures["blocks"][best]["speed_up"]
                advice = f"best with {best} a pass" if gain > 1 else "drafting is slower"
                lines.append(f"{advice}: {gain:.2f} times the speed without")
    return lines


def describe_benchmark(name: str, found: dict[str, Any]) -> list[str]:
    """Lines of one benchmark: its rates, and how programs ended."""
    rates = ", ".join(f"pass@{k} {rate:.4f}" for k, rate in found["pass_at_k"].items())
    if found["mode"] != INFERENCE:
        return [f"{name}: {found['mode']}, {rates}: {found['inference_error']}"]
    ends = ", ".join(f"{count} {reason}" for reason, count in found["reasons"].items())
    counts = f"{found['problems']} problems, {found['samples']} samples"
    lines = [
        f"{name}: {rates} ({counts}, worded {found['wording']})",
        f"  how programs ended: {ends}; {found['cut_off']} answers cut off at --max-tokens",
    ]
    if count := found["not_generated"]:
        error = found["inference_error"]
        lines.append(f"  {count} samples were not generated and count as failures: {error}")
    if count := found["infrastructure_failures"]:
        lines.append(f"  {count} programs could not be run by the sandbox and count as failures")
    return lines


def _say_health(probe: dict[str, Any]) -> str:
    """Says, for a model without findings, how far from chance it is."""
    chance = math.log(probe["vocabulary"])
    beside = f"{probe['ce']:.2f} nats a token of {probe['text']}, a uniform guess has {chance:.2f}"
    if probe["ce"] < WEAK * chance:
        return f"{beside}; not found broken"
    return (
        f"weak: {beside}; not found broken. Damage can look so: compare it with its source by "
        "--teacher"
    )


def text(document: dict[str, Any]) -> str:
    """The document, readable."""
    lines = [str(document.get("model", document["target"]))]
    if "inference_error" in document:
        lines.append(f"inference_failed: {document['inference_error']}")
    lines += [f"BROKEN {f['detector']}: {f['evidence']}" for f in document["broken"]]
    if document["mode"] == INFERENCE and not document["broken"]:
        probe = document.get("probe")
        lines.append(_say_health(probe) if probe else "not asked whether it is broken")
    if document.get("held_out"):
        lines += ["", *_held_out(document["held_out"])]
    if document.get("draft"):
        lines += ["", *_drafts(document["draft"])]
    for name in document:
        if name.partition(" ")[0] in BENCHMARKS:
            lines += ["", *describe_benchmark(name, document[name])]
    if "sandbox" in document:
        lines += ["  sandbox: " + "; ".join(f"{k}: {v}" for k, v in document["sandbox"].items())]
    if "unfinished" in document:
        lines += ["", "stopped before it had: " + ", ".join(document["unfinished"])]
    return "\n".join(lines)


def write(path: Path, document: dict[str, Any]) -> None:
    """The document as JSON; `path` appears when all of it is written."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
