"""The page: one HTML file that needs nothing else, and its figures as PNG files beside it."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from kdjax._version import __version__
from kdjax.config import Config, flatten
from kdjax.errors import UserError
from kdjax.formats.files import replacing
from kdjax.watch.report import FILE
from kdjax.watch.report.workdir import RunRecord, read_runs

COMPARISON = "comparison.html"
_AT_T = "KL at T"
# Column: its key in an evaluation's figures for the teacher, for the student, and its form.
_COLUMNS = {
    "CE": ("teacher_ce", "student_ce", "{:.4f}"),
    "perplexity": ("teacher_perplexity", "student_perplexity", "{:.3f}"),
    "bits a byte": ("teacher_bits_per_byte", "student_bits_per_byte", "{:.4f}"),
    "KL to the teacher": ("", "kl", "{:.4f}"),
    _AT_T: ("", "kl_temperature", "{:.4f}"),
    "agreement": ("", "agreement", "{:.2%}"),
}
_NOTHING = "–"


def write(workdirs: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page of one run or several, and PNG files into a folder of its name beside it.

    By default `report.html` in the one workdir, or `comparison.html` in the first of several.
    Raises `UserError` for folders without a run, runs named twice, and a page that is no `.html`.
    """
    from kdjax.watch.report.figures import draw

    out = out or workdirs[0] / (FILE if len(workdirs) == 1 else COMPARISON)
    if out.suffix != ".html":
        raise UserError(f"--out={out}: expected a name that ends in .html, for the page.")
    runs = read_runs(workdirs)
    figures = draw(runs)
    html = _template().render(
        runs=runs, figures=figures, folder=out.stem, version=__version__,
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        columns=(results := results_table(runs))[0], rows=results[1], summary=summary(runs),
        measured=measured(runs), comparable=comparable(runs), differing=differing(runs),
        samples=[(run, list(_samples(run))) for run in runs if run.samples],
        settings=[_settings(run) for run in runs], facts=[_facts(run) for run in runs],
    )  # fmt: skip
    folder = out.with_suffix("")
    try:
        for figure in figures:
            with replacing(folder / f"{figure.name}.png") as file:
                file.write(figure.png)
        with replacing(out) as file:
            file.write(html.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror or error}. Give --out=FILE.html in a folder "
            "you own."
        ) from error
    return out


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["shown"] = shown
    return environment.get_template("template.html")


def shown(value: Any) -> str:
    """A setting or a fact as text."""
    match value:
        case None | "":
            return _NOTHING
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False)


def results_table(runs: Sequence[RunRecord]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Columns and rows of held-out figures: teacher, student before, student after, of every run.

    A teacher or a start that several runs share is one row. A column that nobody has is left out,
    and KL at T where T is 1, or not the same in all runs.
    """
    before, after = [], []
    temperatures = {run.temperature for run in runs}
    at_t = len(temperatures) == 1 and 1.0 not in temperatures
    columns = [c for c in _COLUMNS if c != _AT_T or at_t]
    for run in runs:
        name = f"{run.label}: " if len(runs) > 1 else ""
        if not run.evals:
            continue
        first, last = run.evals[0], run.evals[-1]
        before.append((f"{name}teacher", _figures(last, 0, columns)))
        if first["step"] == 0:
            before.append((f"{name}student before training", _figures(first, 1, columns)))
        if last["step"] > 0:
            kind = ", without the teacher (alpha = 1)" if run.without_teacher else ""
            after.append((f"{name}student after {last['step']:,.0f} steps{kind}",
                          _figures(last, 1, columns)))  # fmt: skip
    rows = [*_joined(before), *after]
    used = [c for c in columns if any(f[c] != _NOTHING for _, f in rows)]
    return used, [(label, [figures[c] for c in used]) for label, figures in rows]


def _figures(entry: Mapping[str, float], side: int, columns: Sequence[str]) -> dict[str, str]:
    """The cells of one row; `side` is 0 for the teacher, 1 for the student."""

    def cell(key: str, form: str) -> str:
        value = entry.get(key, math.nan) if key else math.nan
        return form.format(value) if math.isfinite(value) else _NOTHING

    return {column: cell(_COLUMNS[column][side], _COLUMNS[column][2]) for column in columns}


def _joined(rows: list[tuple[str, dict[str, str]]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Rows of one kind and the same figures as one, without a run's name."""
    for i, (label, figures) in enumerate(rows):
        kind = label.rpartition(": ")[2]
        alike = [j for j, (other, f) in enumerate(rows)
                 if f == figures and other.rpartition(": ")[2] == kind]  # fmt: skip
        if alike[0] == i:
            yield (kind if len(alike) > 1 else label), figures


def summary(runs: Sequence[RunRecord]) -> list[str]:
    """A sentence a run: what moved on held-out text from before training to the last evaluation."""
    lines = []
    for run in runs:
        if len(run.evals) < 2 or run.evals[0]["step"] != 0:
            continue
        first, last = run.evals[0], run.evals[-1]
        name = f"{run.label}: held-out" if len(runs) > 1 else "Held-out"
        kl, agreement = ((first.get(k, math.nan), last.get(k, math.nan))
                         for k in ("kl", "agreement"))  # fmt: skip
        change = f" ({last['kl'] / first['kl'] - 1:+.1%})" if kl[0] > 0 else ""
        lines.append(
            f"{name} KL to the teacher {_verb(*kl)} {kl[0]:.4f} to {kl[1]:.4f}{change}, agreement "
            f"{_verb(*agreement)} {agreement[0]:.1%} to {agreement[1]:.1%}, in "
            f"{last['step']:,.0f} steps ({last['tokens']:,.0f} tokens)."
        )
    return lines


def _verb(before: float, after: float) -> str:
    return "fell from" if after < before else "rose from" if after > before else "went from"


def measured(runs: Sequence[RunRecord]) -> str:
    """Units of the results, and over how many positions they are."""
    counts = sorted({run.evals[-1]["positions"] for run in runs if run.evals})
    over = " or ".join(f"{count:,.0f}" for count in counts if math.isfinite(count))
    return f"CE and KL in nats a token{f', over {over} positions' if over else ''}."


def comparable(runs: Sequence[RunRecord]) -> list[str]:
    """What forbids comparing the runs' held-out figures directly."""
    doubts = []
    for what, of in (
        ("are of different held-out rows", lambda r: (r.receipt.get("data") or {}).get("rows")),
        ("are over different numbers of positions",
         lambda r: r.evals[-1]["positions"] if r.evals else None),
        ("have different teachers", lambda r: (r.receipt.get("teacher") or {}).get("sha256")),
    ):  # fmt: skip
        if len({value for run in runs if (value := of(run)) is not None}) > 1:
            doubts.append(f"Held-out figures of these runs {what}: compare them with care.")
    return doubts


def differing(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Fields of the configs that are not the same in all runs, and each run's value."""
    fields = dict.fromkeys(name for run in runs for name in run.config)
    rows = [(f, [shown(run.config[f]) if f in run.config else _NOTHING for run in runs])
            for f in fields]  # fmt: skip
    return [(field, values) for field, values in rows if len(set(values)) > 1]


def _settings(run: RunRecord) -> list[tuple[str, Any, bool]]:
    """Field, value, and whether it differs from the default."""
    default = flatten(Config())
    return [(k, v, k not in default or default[k] != v) for k, v in run.config.items()]


def _facts(run: RunRecord) -> dict[str, dict[str, Any]]:
    """What the receipt says of files, machine and plan, by heading."""
    receipt = run.receipt
    if not receipt:
        return {}
    kdjax, data = receipt.get("kdjax") or {}, receipt.get("data") or {}
    machine = dict(receipt.get("platform") or {})
    dirty = " with changes that are not committed" if kdjax.get("git_dirty") else ""
    hashes = {
        "kdjax": f"{kdjax.get('version')}, commit {kdjax.get('git_sha') or 'unknown'}{dirty}",
        "config, SHA-256": receipt.get("config_sha256"),
        "rows, key": data.get("rows"),
        "rows, SHA-256": data.get("packed_sha256"),
    }
    for side in ("teacher", "student"):
        files = receipt.get(side) or {}
        hashes[f"{side}, file"] = ", ".join(files.get("files", []))
        hashes[f"{side}, SHA-256"] = files.get("sha256")
    output = receipt.get("output") or {}
    hashes |= {"output": output.get("path"), "output, SHA-256": output.get("params_sha256")}
    sessions = {
        f"session {i}": f"{s.get('started')} to {s.get('ended') or '?'}: steps "
        f"{s.get('start_step')} to {s.get('end_step', '?')}, {s.get('reason') or 'not ended'}"
        for i, s in enumerate(receipt.get("sessions", []), 1)
    }
    machine |= {f"device, {k}": v for k, v in (machine.pop("devices", None) or {}).items()}
    for group in ("packages", "environment"):
        machine |= machine.pop(group, None) or {}
    facts = {"Hashes": hashes, "Sessions": sessions, "Environment": machine,
             "Memory plan, on each device": _plan(receipt.get("plan") or {})}  # fmt: skip
    return {heading: rows for heading, rows in facts.items() if rows}


def _plan(plan: Mapping[str, Any]) -> dict[str, str]:
    if not plan:
        return {}

    def gb(size: float | None) -> str:
        return f"{size / 1e9:.2f} GB" if size else "unknown"

    rows = {"choice": plan["choice"], "planned peak": gb(plan["peak"]), "limit": gb(plan["limit"])}
    rows |= {name: gb(size) for name, size in plan["resident"].items()}
    return rows | {f"while {name}": gb(sum(parts.values()))
                   for name, parts in plan["phases"].items()}  # fmt: skip


def _samples(run: RunRecord) -> Iterator[dict[str, Any]]:
    for number, sample in enumerate(run.samples, 1):
        sides = [(title, _completion(sample.get(when))) for title, when in
                 (("Before training", "before"), ("After training", "after"))]  # fmt: skip
        yield {"number": number, "sides": sides} | {k: sample.get(k) for k in
                                                    ("row", "prompt", "reference")}  # fmt: skip


def _completion(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The marked tokens of a completion, and how many of them are the teacher's own choice."""
    if found is None:
        return None
    tokens = []
    for token in found["tokens"]:
        opinion = token.get("teacher")
        agrees = None if opinion is None else opinion["id"] == token["id"]
        text, said = token["text"], ""
        if opinion:
            said = f"teacher gives it {opinion['of_students_id']:.1%}"
        if opinion and not agrees:
            said += f"; its own: {opinion['text']!r}, {opinion['probability']:.1%}"
            text = text.replace("\n", "↵\n") or "␣"  # what has no glyph could carry no mark
        tokens.append({"text": text, "agrees": agrees, "said": said})
    judged = [t["agrees"] for t in tokens if t["agrees"] is not None]
    verdict = f"{sum(judged)} of {len(judged)} tokens are the teacher's choice" if judged else ""
    return {"tokens": tokens, "verdict": verdict, "step": found.get("step"),
            "stopped": found.get("ended_by") == "stop"}  # fmt: skip
