"""Runs tests of one scratch copy, each run in a fresh child: `mutate` starts it as a script.

    python worker.py ANSWER LIBRARY...

Reads one JSON request a line, answers with one a line. The worker imports the libraries once, while
JAX has not started; `kdjax` and the tests are imported by each child alone. So a run costs a second
of imports instead of five, and no run sees another's modules.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A fault must be seen by what the test itself compares, so annotations are not checked.
_OPTIONS = ["-q", "-o", "addopts=", "--strict-markers", "-p", "no:cacheprovider", "--tb=line"]
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are among the libraries
_OPTIONS += ["-p", "no:unraisableexception"]  # it collects garbage five times at the end: 0.3 s
# A mutant that does not run is no fault that a test found.
_NOT_A_FAULT = (NameError, ImportError, SyntaxError)


class _Watch:
    """Notes which cases passed or failed in their own body; skips the rest of a red test."""

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.passed: set[str] = set()
        self.broken: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # In the order of their file, as the suite runs them, and not in that of the command line.
        items.sort(key=lambda item: (str(item.path), item.location[1] or 0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        if item.nodeid.split("[")[0] in {case.split("[")[0] for case in self.failed}:
            pytest.skip("red already")

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is None:
            if call.when == "call":
                self.passed.add(item.nodeid)
        elif issubclass(call.excinfo.type, pytest.skip.Exception):
            return
        elif call.when != "call" or issubclass(call.excinfo.type, _NOT_A_FAULT):
            self.broken.append(f"{item.nodeid} ({call.when}): {call.excinfo.exconly()[:300]}")
        else:
            self.failed.add(item.nodeid)


def _run_tests(request: dict[str, Any], answer: Path) -> None:
    """In the forked child: runs pytest and leaves its answer in a file."""
    os.setsid()
    log = os.open(answer.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    # Into the log itself: pytest puts files of its own in the place of 1 and 2.
    faulthandler.dump_traceback_later(0.9 * request["timeout"], file=log)
    watch = _Watch()
    code = int(pytest.main([*_OPTIONS, *request["tests"]], plugins=[watch]))
    sets = dict(failed=sorted(watch.failed), passed=sorted(watch.passed))
    answer.write_text(json.dumps(dict(code=code, broken=watch.broken, **sets)))


def _stack(answer: Path) -> str:
    """Where the thread that ran the tests was when its time was nearly over."""
    log = answer.with_suffix(".log").read_text(errors="replace")
    _, found, stack = log.rpartition("(most recent call first):\n")
    frames = [line.strip() for line in stack.splitlines()[:6]]
    return f" in {' < '.join(frames)}" if found else ""


def _serve(request: dict[str, Any], answer: Path) -> dict[str, Any]:
    """The answer of a child of its own, or why there is none."""
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        try:
            _run_tests(request, answer)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    deadline = time.monotonic() + request["timeout"]
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            why = f"ran out of time{_stack(answer)}"
            return dict(code=-1, failed=[], passed=[], broken=[why], seconds=request["timeout"])
        time.sleep(0.01)
    seconds = ended[2].ru_utime + ended[2].ru_stime
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what a broken test left running
    try:
        return json.loads(answer.read_text()) | dict(seconds=seconds)
    except (OSError, ValueError):
        said = answer.with_suffix(".log").read_text(errors="replace").strip()[-300:]
        why = f"the process died: {said}"
        return dict(code=-2, failed=[], passed=[], broken=[why], seconds=seconds)


def main() -> None:
    """Serves requests until its input ends."""
    sys.dont_write_bytecode = False  # whatever the environment says
    # Python put this script's folder first, whose modules are no top-level ones.
    sys.path[0] = os.getcwd()
    answer, *libraries = sys.argv[1:]
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # One failing example is enough: the smallest one took 9 s to look for. A machine that others
    # keep busy makes examples slowly (8 in 35 s), which is no failure of a test.
    hypothesis.settings.register_profile(
        "unshrunk",
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("unshrunk")
    gc.freeze()  # no child looks through what the libraries hold
    for line in sys.stdin:
        found = _serve(json.loads(line), Path(answer))
        # One of 235 children died on a busy machine, and never again; one may hang likewise.
        if found["code"] in (-1, -2):
            found = _serve(json.loads(line), Path(answer))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
