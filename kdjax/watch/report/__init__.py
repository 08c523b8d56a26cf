"""`report.html`: the results of runs, as one page of curves, figures and samples.

`workdir` reads, `page` draws and writes. Only drawing imports matplotlib.
"""

import logging
from pathlib import Path

from kdjax.training.hooks import Hook, Run
from kdjax.watch.guards import NonFiniteError

FILE = "report.html"

_log = logging.getLogger("kdjax")


class ReportPage(Hook):
    """Writes `workdir/report.html` when a run is finished, or stopped by a NaN.

    A page that cannot be drawn is a warning, and does not change how the run ends.
    """

    def __init__(self, workdir: Path):
        self._workdir = workdir

    def train_begin(self, run: Run) -> None:
        """Removes the page of an earlier session, which is out of date."""
        (self._workdir / FILE).unlink(missing_ok=True)

    def train_end(self, reason: str, error: BaseException | None) -> None:
        """Draws the page, unless the run was interrupted."""
        if reason != "finished" and not isinstance(error, NonFiniteError):
            return
        try:
            from kdjax.watch.report import page

            page.write_page([self._workdir])
        except Exception as problem:
            _log.warning(
                "no report: %s: %s\nTry again: kdjax report %s",
                type(problem).__name__,
                problem,
                self._workdir,
            )
