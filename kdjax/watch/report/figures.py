"""The curves of one run or several, drawn by matplotlib: SVG for the page, PNG beside it.

The page colours the SVG: each colour drawn here is a name there (`COLOURS`), with a value for light
and one for dark. Runs and parts differ in their dashes as well.
"""

import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from kdjax.watch.report.workdir import RunRecord

# Drawn colour: name in the page's style sheet. Blue, vermilion, green, purple, ochre, sky after
# Okabe and Ito, who chose them to be told apart by the colour-blind.
COLOURS = {
    "#1b2330": "ink", "#5a6472": "muted", "#d9dee5": "grid",
    "#0068a8": "c0", "#c84e00": "c1", "#007a5a": "c2", "#a4508b": "c3", "#8a6a00": "c4",
    "#2a8fc7": "c5",
}  # fmt: skip
INK, MUTED, GRID, *SERIES = COLOURS
_DASHES: list[Any] = ["-", (0, (5, 1.6)), (0, (1.5, 1.3)), (0, (6, 1.5, 1.5, 1.5))]
_BINS = 160  # points of a curve; longer runs are averaged
_PACE_STEPS = 8  # steps whose speed is averaged, at least: single ones are timed a step late
_LEGEND_COLUMNS, _LABEL = 3, 14  # and characters of a run's label
_SIZE = 4.9, 2.9  # inches of 72 units: about as wide as a phone, so that 10 units stay legible
_STYLE: Any = {
    "svg.fonttype": "none", "font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED,
    "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "axes.linewidth": 0.8,
    "grid.color": GRID, "grid.linewidth": 0.7, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "legend.fontsize": 9.5, "lines.linewidth": 1.8, "axes.grid": True,
    "axes.facecolor": "none", "axes.axisbelow": True, "axes.titlesize": 11,
    "axes.titlelocation": "left", "axes.titleweight": "bold",
    "xtick.major.size": 3, "ytick.major.size": 3,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One figure."""

    name: str  # of its PNG
    title: str
    note: str  # what a reader must know of it
    svg: str  # an <svg> element without XML prologue, colours as var(--name)
    png: bytes


def draw(runs: Sequence[RunRecord]) -> list[Drawn]:
    """Every figure that the runs have numbers for."""
    return [drawn for panel in _panels(runs) if (drawn := _draw(*panel, runs)) is not None]


Panel = Callable[[Axes, Sequence[RunRecord]], str | None]


def _panels(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str, Panel]]:
    if len(runs) == 1:
        yield "loss", "Training loss and its parts, nats a token", _loss_parts
    else:
        yield "loss", "Training loss, nats a token", _of_steps("loss")
        yield "ce", "Training cross-entropy, nats a token", _of_steps("ce")
        yield "training_kl", "Training divergence at T, nats a token", _of_steps("kl")
    yield "kl", "Held-out KL to the teacher, T = 1, nats a token", _of_evals("kl", "{:.3f}")
    yield "agreement", "Held-out top-1 agreement with the teacher", _agreement
    yield "heldout_ce", "Held-out cross-entropy, nats a token", _heldout_ce
    yield "learning_rate", "Learning rate", _learning_rate
    yield "throughput", "Throughput, positions a second", _throughput


def _draw(name: str, title: str, panel: Panel, runs: Sequence[RunRecord]) -> Drawn | None:
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        note = panel(axes, runs)
        if note is None:
            return None
        labels = axes.get_legend_handles_labels()[1]
        axes.set_title(title, pad=8 + 16 * -(-len(labels) // _LEGEND_COLUMNS))
        axes.set_xlabel("tokens trained")
        axes.xaxis.set_major_formatter(EngFormatter(sep="", places=None))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        if labels:
            axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=_LEGEND_COLUMNS,
                        borderaxespad=0, handlelength=2.4, columnspacing=1.2)  # fmt: skip
        files = {}
        for kind, paper in (("svg", "none"), ("png", "white")):
            with io.BytesIO() as file:
                figure.savefig(file, format=kind, facecolor=paper, dpi=160)
                files[kind] = file.getvalue()
    return Drawn(name, title, note, _inline(files["svg"].decode(), title), files["png"])


def _inline(svg: str, title: str) -> str:
    """An element for a page: no prologue, no metadata, no ids but those referred to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>',
                 rf'<svg viewBox="\1" role="img" aria-label="{title}">', svg)  # fmt: skip
    for colour, name in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", svg)


def _named(run: RunRecord) -> str:
    """The run's label for a legend: its end, with nothing that matplotlib would interpret."""
    text = run.label if len(run.label) <= _LABEL else "…" + run.label[1 - _LABEL :]
    return " " * text.startswith("_") + text.replace("$", r"\$")


def _look(index: int) -> dict[str, Any]:
    return {"color": SERIES[index % len(SERIES)], "linestyle": _DASHES[index % len(_DASHES)]}


def _curve(axes: Axes, run: RunRecord, name: str, index: int, label: str) -> int:
    """Means of equal numbers of steps, and a band from least to greatest; returns that number."""
    good = np.isfinite(run.train[name])
    x, y = run.train["tokens"][good], run.train[name][good]
    if not len(y):
        return 0
    size = -(-len(y) // _BINS)
    starts = np.arange(0, len(y), size)
    counts = np.minimum(size, len(y) - starts)
    means = np.add.reduceat(y, starts) / counts
    at = x[starts + counts - 1]
    if size > 1:
        band = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        axes.fill_between(at, *band, color=SERIES[index % len(SERIES)], alpha=0.18, linewidth=0)
    marker = "o" if len(y) == 1 else None
    # The first is wide, so that another of the same values stays visible on it.
    width = 3.0 if index == 0 else 1.6
    axes.plot(at, means, label=label, marker=marker, linewidth=width, **_look(index))
    return size


def _binned(size: int) -> str:
    if size <= 1:
        return "Every step."
    return f"Lines: means of {size} steps; bands: their least and greatest."


def _loss_parts(axes: Axes, runs: Sequence[RunRecord]) -> str | None:
    (run,) = runs
    kl = "KL" if np.isnan(run.temperature) else f"KL at T = {run.temperature:g}"
    names = {"loss": "loss", "ce": "CE with the text", "kl": kl}
    size = max(_curve(axes, run, n, i, label) for i, (n, label) in enumerate(names.items()))
    if not size:
        return None
    return f"{_formula(run)}{_binned(size)}"


def _formula(run: RunRecord) -> str:
    alpha = run.config.get("loss.alpha")
    if alpha is None or np.isnan(run.temperature):
        return ""
    divergence = {"reverse_kl": "reverse KL", "jsd": "JSD"}.get(
        run.config.get("loss.divergence", ""), "KL"
    )
    factor = (1 - alpha) * run.temperature**2
    return f"loss = {alpha:g} · CE + {factor:.4g} · {divergence}. "


def _of_steps(name: str) -> Panel:
    def panel(axes: Axes, runs: Sequence[RunRecord]) -> str | None:
        sizes = [_curve(axes, run, name, i, _named(run)) for i, run in enumerate(runs)]
        return _binned(max(sizes)) if any(sizes) else None

    return panel


def _points(axes: Axes, run: RunRecord, name: str, index: int, label: str | None,
            form: str) -> bool:  # fmt: skip
    """A held-out figure over tokens: a ring at the start, a dot at each later evaluation."""
    known = [
        (e["tokens"], e[name], e["step"]) for e in run.evals if np.isfinite(e.get(name, np.nan))
    ]
    if not known:
        return False
    x, y, steps = zip(*known, strict=True)
    look = _look(index)
    axes.plot(x, y, label=label, marker="o", markersize=3.5, **look)
    if steps[0] == 0:
        axes.plot(x[:1], y[:1], marker="o", markersize=9, markerfacecolor="none",
                  markeredgewidth=1.6, **look)  # fmt: skip
    ends = {0: "start " if steps[0] == 0 else "", len(x) - 1: ""}
    for i, what in ends.items() if form else ():
        above = 10 if y[i] >= np.mean(y) else -16  # the curve goes the other way
        axes.annotate(what + form.format(y[i]), (x[i], y[i]), xytext=(8 if i == 0 else 0, above),
                      textcoords="offset points", ha="left" if i == 0 else "right",
                      fontsize=9.5)  # fmt: skip
    return True


def _of_evals(name: str, form: str) -> Panel:
    def panel(axes: Axes, runs: Sequence[RunRecord]) -> str | None:
        alone = len(runs) == 1
        drawn = [_points(axes, run, name, i, None if alone else _named(run), form if alone else "")
                 for i, run in enumerate(runs)]  # fmt: skip
        axes.margins(y=0.22 if alone else 0.08)
        return "Ring: before training." if any(drawn) else None

    return panel


def _agreement(axes: Axes, runs: Sequence[RunRecord]) -> str | None:
    axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.4g}%")
    return _of_evals("agreement", "{:.1%}")(axes, runs)


def _heldout_ce(axes: Axes, runs: Sequence[RunRecord]) -> str | None:
    many = len(runs) > 1
    drawn = False
    for i, run in enumerate(runs):
        drawn |= _points(axes, run, "student_ce", i, _named(run) if many else "student", "")
    teachers = {e["teacher_ce"] for run in runs for e in run.evals[-1:]
                if np.isfinite(e.get("teacher_ce", np.nan))}  # fmt: skip
    for i, ce in enumerate(sorted(teachers)):
        axes.axhline(ce, color=MUTED, linestyle=":", linewidth=1.4,
                     label=None if i else "teacher")  # fmt: skip
    return "Ring: before training. Dotted: the teacher." if drawn else None


def _learning_rate(axes: Axes, runs: Sequence[RunRecord]) -> str | None:
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.1e}".replace("e-0", "e-") if y else "0")
    if _of_steps("learning_rate")(axes, runs) is None:
        return None
    if len(runs) == 1:
        axes.get_lines()[0].set_label("_")  # one curve needs no legend
    axes.set_ylim(0, 1.06 * axes.dataLim.ymax or 1)
    return "As the optimizer used it."


def _throughput(axes: Axes, runs: Sequence[RunRecord]) -> str | None:
    sizes = [0]
    for i, run in enumerate(runs):
        good = np.isfinite(run.train["tokens_per_second"]) & ~run.compiled()
        x, speed = run.train["tokens"][good], run.train["tokens_per_second"][good]
        if not len(speed):
            continue
        sizes.append(max(_PACE_STEPS, -(-len(speed) // _BINS)))
        starts = np.arange(0, len(speed), sizes[-1])
        counts = np.minimum(sizes[-1], len(speed) - starts)
        pace = counts / np.add.reduceat(1 / speed, starts)  # times add up, speeds do not
        axes.plot(x[starts + counts - 1], pace, marker="o" if len(pace) < 4 else None,
                  label=_named(run) if len(runs) > 1 else "_", **_look(i))  # fmt: skip
    if not max(sizes):
        return None
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(0, 1.06 * axes.dataLim.ymax)
    return (f"Over {max(sizes)} steps at a time, evaluations, saves and the first step of a "
            "session, which holds compilation, left out.")  # fmt: skip
