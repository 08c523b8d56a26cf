"""What a finished run prints last: its held-out figures, and where everything was written."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kdjax.errors import UserError
from kdjax.watch import provenance
from kdjax.watch.report import FILE
from kdjax.watch.report.page import measured, results_table
from kdjax.watch.report.workdir import METRICS, SAMPLES, read_run

_PLACES = {
    "checkpoint": "checkpoints/{step}", "report": FILE, "figures": "report", "metrics": METRICS,
    "samples": SAMPLES, "receipt": provenance.FILE, "curves": "tensorboard",
}  # fmt: skip


def closing(workdir: Path, step: int) -> list[str]:
    """Lines: a table of teacher, student before and after, and each output that is there.

    `step` is that of the last checkpoint. Figures that are not there, or cannot be read, are left
    out.
    """
    lines = []
    try:
        run = read_run(workdir)
        columns, rows = results_table([run])
        if rows:
            lines += ["", f"held-out figures: {measured([run])}"]
            lines += aligned([["", *columns], *([label, *cells] for label, cells in rows)])
    except UserError as error:
        lines.append(f"no held-out figures: {error}")
    places = {name: workdir / path.format(step=step) for name, path in _PLACES.items()}
    return [*lines, "", *(f"{name:<10}  {path}" for name, path in places.items() if path.exists())]


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines: the first column to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        figures = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *figures])
