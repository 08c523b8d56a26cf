"""Runs tests of one scratch copy, each run in a fresh child: `mutate` starts it as a script.

    python worker.py ANSWER LIBRARY...

Reads one JSON request a line, answers with one a line. Libraries are imported once, here, where
JAX has not started; `kdjax` and the tests are imported by each child alone. So a run costs a second
of imports instead of five, and no run sees another's modules.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

# A fault must be seen by what the test itself compares, so annotations are not checked; .pyc files
# go by the second and the size, so that a mutant could run as another one's bytes.
_OPTIONS = [
    "-q", "-o", "addopts=", "--strict-markers", "-p", "no:cacheprovider", "--tb=line",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # plugins are among the libraries
]  # fmt: skip
# A mutant that does not run is no fault that a test found.
_NOT_A_FAULT = (NameError, ImportError, SyntaxError)


class _Watch:
    """Notes which of the wanted tests failed in their own body; drops their further cases."""

    def __init__(self, wanted: list[str], every: bool):
        self.wanted, self.every = wanted, every
        self.failed: set[str] = set()
        self.passed: set[str] = set()
        self.broken: list[str] = []

    def _test(self, nodeid: str) -> str:
        return next(w for w in self.wanted if nodeid == w or nodeid.startswith(f"{w}["))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # As their file has them, and not as the command line does: that is how they are tested.
        items.sort(key=lambda item: (str(item.path), item.location[1] or 0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        if not self.every and self._test(item.nodeid) in self.failed:
            pytest.skip("red already")

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is None:
            if call.when == "call":
                self.passed.add(self._test(item.nodeid))
        elif issubclass(call.excinfo.type, pytest.skip.Exception):
            return
        elif call.when != "call" or issubclass(call.excinfo.type, _NOT_A_FAULT):
            self.broken.append(f"{item.nodeid} ({call.when}): {call.excinfo.exconly()[:300]}")
        else:
            self.failed.add(self._test(item.nodeid))


def _child(request: dict[str, Any], answer: Path) -> None:
    """In the forked child: runs pytest and leaves its answer in a file."""
    os.setsid()
    log = os.open(answer.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    watch = _Watch(request["tests"], request["every"])
    options = _OPTIONS + request.get("options", [])
    code = pytest.main([*options, *request["tests"]], plugins=[watch])
    found = dict(code=int(code), failed=sorted(watch.failed), passed=sorted(watch.passed),
                 broken=watch.broken)  # fmt: skip
    answer.write_text(json.dumps(found))


def _run(request: dict[str, Any], answer: Path) -> dict[str, Any]:
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        try:
            _child(request, answer)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    deadline = time.monotonic() + request["timeout"]
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return dict(code=-1, failed=[], passed=[], broken=["ran out of time"])
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what a broken test left running
    try:
        return json.loads(answer.read_text())
    except (OSError, ValueError):
        return dict(code=-2, failed=[], passed=[], broken=["the process died"])


def main() -> None:
    """Serves requests until its input ends."""
    sys.dont_write_bytecode = True
    # Started by path: the first entry is this package's folder, whose names are no top-level ones.
    sys.path[0] = os.getcwd()
    answer, *libraries = sys.argv[1:]
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line), Path(answer))), flush=True)


if __name__ == "__main__":
    main()
