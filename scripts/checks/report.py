"""Opens a report in a headless Chromium as a desk and a phone show it, light and dark.

    python3 -m scripts.checks.report runs/a/report.html --shots=/tmp/shots

Fails if the page logs an error, asks for anything but itself, shifts its layout, or is wider than
the window. Needs `chromium` (Debian: apt-get install chromium) or `CHROMIUM=PATH`.
"""

import argparse
import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDTHS = {"desk": 1280, "phone": 390}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SHIFT = 0.1  # what Web Vitals call good; a page that is parsed in pieces is not quite still
# How far content moves after it was first painted.
_WATCH = """window.shift = 0; new PerformanceObserver(
  list => list.getEntries().forEach(entry => { window.shift += entry.value; })
).observe({type: 'layout-shift', buffered: true})"""
_MEASURE = """JSON.stringify({
  width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
  shift: window.shift, figures: document.querySelectorAll('figure img').length})"""


def browser() -> str | None:
    """The Chromium to use, or None."""
    names = [os.environ["CHROMIUM"]] if os.environ.get("CHROMIUM") else _BROWSERS
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """A tab of a headless Chromium, driven by its DevTools protocol over a pipe."""

    def __init__(self, program: str, profile: str):
        to_browser, from_browser = os.pipe(), os.pipe()
        # The protocol's pipes are descriptors 3 and 4; a shell puts them there, from above 9.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser[0], from_browser[1])]
        place = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                place,
                "bash",
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
                "--disable-dev-shm-usage",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=ends,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser[0], from_browser[1], *ends):
            os.close(end)
        self._out = os.fdopen(to_browser[1], "wb", buffering=0)
        self._in = os.fdopen(from_browser[0], "rb")
        self._number, self._session, self.events = 0, None, []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result; events on the way are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser ended")
            text += byte
        return json.loads(text)

    def wait(self, event: str) -> None:
        """Until an event of that name has come."""
        while not any(e.get("method") == event for e in self.events):
            self.events.append(self._read())

    def close(self) -> None:
        """Ends the browser."""
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()


def look(page: Page, url: str, width: int, scheme: str) -> tuple[list[str], bytes]:
    """Lists the page's faults at that width and colour scheme, and takes a picture of all of it."""
    page(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=width < 600,
    )
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page("Emulation.setEmulatedMedia", features=[feature])
    page.events.clear()
    page("Page.navigate", url=url)
    page.wait("Page.loadEventFired")
    found = page("Runtime.evaluate", expression=_MEASURE)["result"]["value"]
    measured = json.loads(found)
    problems = []
    for event in page.events:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown" | "Log.entryAdded" | "Runtime.consoleAPICalled":
                problems.append(f"says {json.dumps(params)[:300]}")
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(
                (url, "data:")
            ):
                problems.append(f"asks for {params['request']['url']}")
    if measured["width"] > width:
        problems.append(f"is {measured['width']} pixels wide")
    if measured["shift"] > _SHIFT:
        problems.append(f"shifts its layout by {measured['shift']}")
    if not measured["figures"]:
        problems.append("shows no figure")
    page(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=measured["height"],
        deviceScaleFactor=1,
        mobile=width < 600,
    )
    picture = page("Page.captureScreenshot", format="png")["data"]
    return problems, base64.b64decode(picture)


def check(report: Path, shots: Path | None = None) -> list[str]:
    """Everything that is wrong with the report, at each width and in both colour schemes."""
    program = browser()
    if program is None:
        raise SystemExit("no chromium here: apt-get install chromium, or set CHROMIUM=PATH")
    problems = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = Page(program, profile)
        try:
            for name, width in WIDTHS.items():
                for scheme in ("light", "dark"):
                    found, picture = look(page, report.resolve().as_uri(), width, scheme)
                    problems += [f"{report} on a {name}, {scheme}: {p}" for p in found]
                    if shots:
                        shots.mkdir(parents=True, exist_ok=True)
                        (shots / f"{report.stem}_{name}_{scheme}.png").write_bytes(picture)
        finally:
            page.close()
    return problems


def main() -> int:
    """Runs the check; returns the exit status."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("report", type=Path)
    parser.add_argument("--shots", type=Path, help="a folder for pictures of the page")
    args = parser.parse_args()
    problems = check(args.report, args.shots)
    print("\n".join(problems) or f"{args.report}: renders at {sorted(WIDTHS.values())} pixels")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
