"""The page: one self-contained HTML file, and its curves as PNG files next to it."""

import base64
import dataclasses
import io
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from textwrap import fill
from typing import Any

import jinja2
import numpy as np

from kdjax import __version__
from kdjax.config import Config, flatten
from kdjax.errors import UserError, WriteError
from kdjax.formats.files import replacing
from kdjax.formats.saved import RECEIPT, find_best
from kdjax.training.hooks import drop_uncompared
from kdjax.watch.report import FILE
from kdjax.watch.report.workdir import SAMPLES, TOPK, RunRecord, read_run, read_runs
from kdjax.watch.writers import METRICS

_NOTHING = "–"
# Column of the results: the figures of teacher and student, and their form.
_COLUMNS = {
    "CE": ("teacher_ce", "student_ce", "{:.4f}"),
    "perplexity": ("teacher_perplexity", "student_perplexity", "{:.3f}"),
    "bits a byte": ("teacher_bits_per_byte", "student_bits_per_byte", "{:.4f}"),
    "loss": ("", "loss", "{:.4f}"),
    "divergence": ("", "divergence", "{:.4f}"),
    "KL to the teacher": ("", "kl", "{:.4f}"),
    "agreement": ("", "agreement", "{:.2%}"),
    "acceptance": ("", "acceptance", "{:.2%}"),
    "compared": ("", "compared", "{:.1%}"),
    "mass on shared ids": ("teacher_mass", "student_mass", "{:.1%}"),
}
_SAME = "KL at T = 1"  # a divergence that already has a column
_PLACES = {
    "checkpoint": "checkpoints/{step}",
    "report": FILE,
    "figures": "report",
    "metrics": METRICS,
    "samples": SAMPLES,
    "receipt": RECEIPT,
    "curves": "tensorboard",
}


def write_page(workdirs: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page of one run or several, and PNG files into a folder of its name next to it.

    By default `report.html` in the one workdir, or `comparison.html` in the first of several.
    Raises `UserError` for folders without a run, runs named twice, and a page that is not `.html`;
    `WriteError` for a full disk.
    """
    out = out or workdirs[0] / (FILE if len(workdirs) == 1 else "comparison.html")
    if out.suffix != ".html":
        raise UserError(f"--out={out}: expected a name that ends in .html, for the page.")
    runs = read_runs(workdirs)
    pictures = list(_draw_pictures(runs))
    columns, rows = results_table(runs)
    html = _template().render(
        runs=runs,
        version=__version__,
        folder=out.stem,
        columns=columns,
        rows=rows,
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        pictures=pictures,
        summary=[line for run in runs if (line := _summarise(run, len(runs) > 1))],
        measured=_describe_units(runs),
        doubts=_list_doubts(runs),
        differing=_list_differing(runs) if len(runs) > 1 else [],
        default=flatten(Config()),
    )
    try:
        for picture in pictures:
            with replacing(out.with_suffix("") / f"{picture.name}.png") as file:
                file.write(picture.png)
        with replacing(out) as file:
            file.write(html.encode("utf-8", "backslashreplace"))
    except WriteError:
        raise
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror or error}. Give --out=FILE.html in a folder "
            "you own."
        ) from error
    return out


def closing_lines(workdir: Path, step: int) -> list[str]:
    """Writes a finished run's last lines: held-out figures as a table, and each output.

    `step` is that of the last checkpoint. Figures that are not there, or cannot be read, are left
    out.
    """
    lines = []
    try:
        run = read_run(workdir)
        columns, rows = results_table([run])
        if rows:
            lines += ["", f"held-out figures: {_describe_units([run])}"]
            cells = [["", *columns], *([label, *cells] for label, cells in rows)]
            first, *others = [max(map(len, column)) for column in zip(*cells, strict=True)]
            for label, *figures in cells:
                aligned = (f.rjust(width) for f, width in zip(figures, others, strict=True))
                lines.append("  ".join([label.ljust(first), *aligned]))
            lines += [TOPK] if TOPK in run.notes else []
    except UserError as error:
        lines.append(f"no held-out figures: {error}")
    try:
        best = find_best(workdir)
    except UserError as error:  # the newest step is damaged: the figures stand all the same
        best, lines = None, [*lines, "", str(error)]
    if best and best.step != step:
        lines += ["", f"the best by held-out {best.name} is step {best.step}, {best.value:.6g}"]
    places = {name: workdir / path.format(step=step) for name, path in _PLACES.items()}
    return [*lines, "", *(f"{name:<10}  {path}" for name, path in places.items() if path.exists())]


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"shown": _show, "marked": _mark_tokens, "facts": _list_facts}
    environment.filters["divergence"] = _mean_divergence
    environment.globals["zip"] = zip
    return environment.get_template("template.html")


def _show(value: object) -> str:
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


# ---- the table


def results_table(runs: Sequence[RunRecord]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Columns and rows of held-out figures: teacher, student before, student after, of every run.

    A teacher or a start that several runs share is one row. Empty columns are left out, and so is
    the divergence if it is the KL at T = 1, or differs between runs.
    """
    rows: dict[tuple[bool, str, tuple[str, ...], str], list[str]] = {}  # labels of runs
    for run in runs:
        if not run.evals:
            continue
        first, last = run.evals[0], run.evals[-1]
        without = ", without the teacher (alpha = 1)" if run.without_teacher else ""
        after = f"student after {last['step']:,.0f} steps{without}"
        for late, kind, figures, side in (
            (False, "teacher", last, 0),
            (False, "student before training", first if first["step"] == 0 else {}, 1),
            (True, after, last if last["step"] > 0 else {}, 1),
        ):
            if figures:
                key = late, kind, _cells(figures, side), run.label if late else ""
                rows.setdefault(key, []).append(run.label)
    if not rows:
        return [], []
    labelled = [
        (f"{labels[0]}: {kind}" if len(labels) == 1 < len(runs) else kind, cells)
        for (_, kind, cells, _), labels in sorted(rows.items(), key=lambda row: row[0][0])
    ]
    divergences = {run.divergence for run in runs}
    title = divergences.pop() if len(divergences) == 1 else _SAME
    names = [title if name == "divergence" else name for name in _COLUMNS]
    columns = zip(*(cells for _, cells in labelled), strict=True)
    used = [n != _SAME and {*c} != {_NOTHING} for n, c in zip(names, columns, strict=True)]
    shown = [(label, list(compress(cells, used))) for label, cells in labelled]
    return list(compress(names, used)), shown


def _cells(figures: Mapping[str, float], side: int) -> tuple[str, ...]:
    """The cells of one row; `side` is 0 for the teacher, 1 for the student."""
    figures = drop_uncompared(figures)
    values = ((figures.get(of[side], math.nan), of[2]) for of in _COLUMNS.values())
    return tuple(form.format(v) if math.isfinite(v) else _NOTHING for v, form in values)


def _summarise(run: RunRecord, several: bool) -> str:
    """Says in a sentence how held-out figures moved from the first evaluation to the last."""
    if len(run.evals) < 2 or run.evals[0]["step"] != 0:
        return ""
    first, last = run.evals[0], run.evals[-1]
    moves = []
    for name, title, form in (
        ("kl", "KL to the teacher", "{:.4f}"),
        ("agreement", "agreement", "{:.1%}"),
        ("student_ce", "CE", "{:.4f}"),
    ):
        before, after = first.get(name, math.nan), last.get(name, math.nan)
        if math.isfinite(before) and math.isfinite(after) and (name != "student_ce" or not moves):
            verb = "fell" if after < before else "rose" if after > before else "went"
            change = f" ({after / before - 1:+.1%})" if name != "agreement" and before > 0 else ""
            moves.append(
                f"{title} {verb} from {form.format(before)} to {form.format(after)}{change}"
            )
    subject = f"{run.label}: held-out" if several else "Held-out"
    done = f"in {last['step']:,.0f} steps ({last['tokens']:,.0f} tokens)"
    return f"{subject} {', '.join(moves)}, {done}." if moves else ""


def _describe_units(runs: Sequence[RunRecord]) -> str:
    """States the units of the results and their number of positions."""
    counts = sorted({run.evals[-1]["positions"] for run in runs if run.evals})
    over = " or ".join(f"{count:,.0f}" for count in counts if math.isfinite(count))
    return f"CE and KL in nats a token{f', over {over} positions' if over else ''}."


def _list_doubts(runs: Sequence[RunRecord]) -> list[str]:
    """Lists the reasons against comparing the runs' held-out figures directly."""
    rows = {(run.receipt.get("data") or {}).get("rows") for run in runs} - {None}
    teachers = {(run.receipt.get("teacher") or {}).get("sha256") for run in runs} - {None}
    positions = {run.evals[-1]["positions"] for run in runs if run.evals}
    doubts = {
        "are of different held-out rows": rows,
        "are over different numbers of positions": positions,
        "have different teachers": teachers,
    }
    return [
        f"Held-out figures of these runs {doubt}: compare them with care."
        for doubt, values in doubts.items()
        if len(values) > 1
    ]


def _list_differing(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Fields of the configs that differ between runs, and each run's value."""
    fields = dict.fromkeys(name for run in runs for name in run.config)
    rows = [(field, [_show(run.config.get(field)) for run in runs]) for field in fields]
    return [(field, values) for field, values in rows if len(set(values)) > 1]


def _list_facts(receipt: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Lists the receipt's files, sessions, machine and plan, by heading."""
    named = ("kdjax", "config_sha256", "teacher", "student", "data", "output")
    facts = {
        "Files and hashes": flatten({name: receipt.get(name) for name in named if receipt}),
        "Sessions": {
            f"session {i}": f"{s.get('started')} to {s.get('ended') or '?'}: steps "
            f"{s.get('start_step')} to {s.get('end_step', '?')}, {s.get('reason') or 'not ended'}"
            for i, s in enumerate(receipt.get("sessions", []), 1)
        },
        "Environment": flatten(receipt.get("platform") or {}),
        "Memory plan, on each device": {
            name: f"{value / 1e9:.2f} GB" if isinstance(value, int | float) else value
            for name, value in flatten(receipt.get("plan") or {}).items()
        },
    }
    return {heading: rows for heading, rows in facts.items() if rows}


def _mark_tokens(tokens: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Text, class and title of each token: whether the teacher agrees; "" if unjudged.

    A token without a glyph cannot carry a mark, and gets a glyph if the teacher differs.
    """
    for token in tokens:
        opinion = token.get("teacher")
        if not opinion:
            yield token["text"], "", ""
            continue
        title = f"teacher's probability: {opinion['of_students_id']:.1%}"
        if "divergence" in token:
            title = f"divergence {token['divergence']:.3f}; {title}"
        if opinion["id"] == token["id"]:
            yield token["text"], "yes", title
        else:
            title += f"; its choice: {opinion['text']!r}, {opinion['probability']:.1%}"
            yield token["text"].replace("\n", "↵\n") or "␣", "no", title


def _mean_divergence(tokens: Sequence[dict[str, Any]]) -> float:
    return float(np.mean([token["divergence"] for token in tokens])) if tokens else math.nan


# ---- the curves

# Blue, vermilion, green, purple, ochre, sky by Okabe and Ito, who chose colours that colour-blind
# readers can distinguish. Runs and parts differ in their dashes as well.
_COLOURS = "#0068a8", "#c84e00", "#007a5a", "#a4508b", "#8a6a00", "#2a8fc7"
_DASHES = "-", (0, (5, 1.6)), (0, (1.5, 1.3)), (0, (6, 1.5, 1.5, 1.5))
_BINS = 160  # points of a curve; longer runs are averaged
_PACE_STEPS = 8  # least number of steps to average speed over: one is timed a step late
_LABEL, _TITLE = 30, 48  # characters of a line of a run's label, and of a title
_STYLE: dict[str, Any] = {
    "figure.figsize": (4.9, 2.9),  # inches of 72 units: as wide as a phone, so that 10 are legible
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.linewidth": 0.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.fonttype": "none",
}
_PERCENT = "%"  # form of shares: as many decimals as the axis needs
# Name of the PNG: title, figure, form of its values.
_TRAINED = {
    "loss": ("Training loss, nats a token", "loss", ""),
    "ce": ("Training cross-entropy, nats a token", "ce", ""),
    "divergence": ("Training divergence, nats a token", "divergence", ""),
    "learning_rate": ("Learning rate", "learning_rate", "{:.1e}"),
    "throughput": ("Throughput, positions a second", "tokens_per_second", "{:,.0f}"),
}
_HELD_OUT = {
    "heldout_loss": ("Held-out loss, nats a token", "loss", ""),
    "kl": ("Held-out KL to the teacher, T = 1, nats a token", "kl", ""),
    "agreement": ("Held-out top-1 agreement with the teacher", "agreement", _PERCENT),
    "acceptance": ("Held-out acceptance of drafts, T = 1", "acceptance", _PERCENT),
    "heldout_ce": ("Held-out cross-entropy, nats a token", "student_ce", ""),
}


_LOSSES = "loss", "divergence", "heldout_loss"  # pictures of what depends on the loss
_APART = "The losses differ, and their values do not compare"


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values over the tokens trained until then, float64 `[N]`."""

    label: str
    tokens: np.ndarray
    values: np.ndarray
    # Least and greatest value of the averaged steps.
    band: tuple[np.ndarray, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Picture:
    """The curves of one figure, one for each run."""

    name: str  # of its PNG
    title: str
    note: str  # explanation for the reader
    svg: str  # base64
    png: bytes


def _draw_pictures(runs: Sequence[RunRecord]) -> Iterator[Picture]:
    """A picture of every figure that a run has."""
    size = _bin_size(max(len(run.train["step"]) for run in runs))
    losses = _describe_losses(runs)
    steps = f"Lines: means of {size} steps; bands: their least and greatest."
    for name, (title, figure, form) in _TRAINED.items():
        note = steps if size > 1 else "Every step."
        if name == "loss" or (name in _LOSSES and losses.startswith(_APART)):
            note = losses + note
        if name == "throughput":
            note = (
                f"Over {max(size, _PACE_STEPS)} steps at a time, evaluations, saves and the first "
                "step of a session, which holds compilation, left out."
            )
        if curves := [curve for run in runs if (curve := _average(run, figure))]:
            yield Picture(name, title, note, *_draw(name, title, form, curves))
    teachers = {e["teacher_ce"] for run in runs for e in run.evals[-1:] if "teacher_ce" in e}
    for name, (title, figure, form) in _HELD_OUT.items():
        level = teachers if name == "heldout_ce" else set()
        note = "A dot an evaluation; at 0: before training." + " Dotted: the teacher." * bool(level)
        if name in _LOSSES and losses.startswith(_APART):
            note = losses + note
        if curves := [curve for run in runs if (curve := _list_evaluations(run, figure))]:
            yield Picture(name, title, note, *_draw(name, title, form, curves, "o", level))


def _describe_losses(runs: Sequence[RunRecord]) -> str:
    """Says what the loss is; of runs with several, that their values do not compare."""
    losses = {run.label: run.loss for run in runs if run.loss}
    if len(set(losses.values())) < 2:
        return f"loss = {next(iter(losses.values()))}. " if losses else ""
    named = "; ".join(f"{label}: {loss}" for label, loss in losses.items())
    return f"{_APART}: {named}. "


def _bin_size(steps: int) -> int:
    return max(1, math.ceil(steps / _BINS))


def _average(run: RunRecord, figure: str) -> Curve | None:
    """Means of equal numbers of steps; for speeds, of the times, since speeds do not add."""
    values, good = run.train[figure], np.isfinite(run.train[figure])
    speed = figure == "tokens_per_second"
    if speed:
        sessions = run.receipt.get("sessions") or [{"start_step": 0}]
        good &= ~np.isin(run.train["step"], [s["start_step"] + 1 for s in sessions])  # compiled
        values = 1 / values
    if not good.any():
        return None
    tokens, values = run.train["tokens"][good], values[good]
    size = max(_bin_size(len(values)), _PACE_STEPS if speed else 1)
    starts = np.arange(0, len(values), size)
    counts = np.minimum(size, len(values) - starts)
    means = np.add.reduceat(values, starts) / counts
    tokens = tokens[starts + counts - 1]
    if speed:
        return Curve(run.label, tokens, 1 / means)
    band = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return Curve(run.label, tokens, means, band if size > 1 else None)


def _list_evaluations(run: RunRecord, figure: str) -> Curve | None:
    points = [(e["tokens"], e.get(figure, math.nan)) for e in run.evals]
    known = np.asarray([point for point in points if math.isfinite(point[1])])
    return Curve(run.label, *known.T) if len(known) else None


def _draw(
    name: str,
    title: str,
    form: str,
    curves: Sequence[Curve],
    marker: str = "",
    levels: Collection[float] = (),
) -> tuple[str, bytes]:
    """SVG without paper, in base64, and PNG on white."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    style: Any = _STYLE | {"svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(layout="constrained")
        axes = figure.add_subplot(title=fill(title, _TITLE), xlabel="tokens trained")
        for i, curve in enumerate(curves):
            colour, dashes = _COLOURS[i % len(_COLOURS)], _DASHES[i % len(_DASHES)]
            if curve.band:
                low, high = curve.band
                axes.fill_between(curve.tokens, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(
                curve.tokens,
                curve.values,
                label=fill(curve.label, _LABEL).lstrip("_"),  # matplotlib hides labels in _
                color=colour,
                linestyle=dashes,
                # The first line is wide, so that an equal one stays visible on it.
                linewidth=1.6 if i else 2.8,
                marker=marker or "o" * (len(curve.values) == 1),
                markersize=4,
            )
        for level in levels:
            axes.axhline(level, color="#5a6472", linestyle=":")
        if form == _PERCENT:
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.6g}%")
        elif form:
            axes.yaxis.set_major_formatter(lambda value, _: form.format(value))
        if name in ("learning_rate", "throughput"):
            axes.set_ylim(0, 1.05 * max(curve.values.max() for curve in curves) or 1)
        axes.xaxis.set_major_formatter(EngFormatter(sep="", places=None))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        if len(curves) > 1:
            axes.legend()
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", facecolor="none", metadata={"Date": None})
        figure.savefig(png, format="png", facecolor="white", dpi=160)
    return base64.b64encode(svg.getvalue()).decode(), png.getvalue()
