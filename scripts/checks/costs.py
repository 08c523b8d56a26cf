"""Pytest plugin: what each test costs, and how much memory its process holds after each module.

    pytest -p scripts.checks.costs --costs=FILE -n 2 --dist loadfile
    python -m scripts.checks.costs FILE [--top 30] [--json SUMS]

A line of FILE is a JSON object: a test with its processor seconds, its own and its children's, and
its wall seconds, each with the fixtures that it was the first to need; or a module with the
megabytes that were resident at its end and at most while it ran (Linux).
"""

import argparse
import json
import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_RESULTS = pytest.StashKey[Path]()


def _count_seconds() -> float:
    """Returns processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _read_megabytes(name: str) -> int:
    """Returns a line of the process's status, in MB."""
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return round(int(kilobytes) * 1024 / 1e6)


def _write(path: Path, **fields: Any) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with path.open("a") as file:
        file.write(json.dumps(dict(worker=worker, **fields)) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--costs`."""
    parser.addoption("--costs", type=Path, help="file that gets each test's costs")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the file's absolute path: tests change the working directory."""
    if path := config.getoption("--costs"):
        config.stash[_RESULTS] = path.resolve()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    """Measures a test with its setup and teardown, and memory at the end of its module."""
    path = item.config.stash.get(_RESULTS, None)
    if path is None:
        return (yield)
    cpu, wall = _count_seconds(), time.monotonic()
    result = yield
    took = dict(cpu=round(_count_seconds() - cpu, 3), wall=round(time.monotonic() - wall, 3))
    _write(path, test=item.nodeid, **took)
    if nextitem is None or nextitem.path != item.path:
        megabytes = dict(after=_read_megabytes("VmRSS"), peak=_read_megabytes("VmHWM"))
        _write(path, module=item.path.name, **megabytes)
        Path("/proc/self/clear_refs").write_text("5")  # the next module has a peak of its own
    return result


def sum_up(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns processor seconds by module and by test function, and megabytes by module."""
    modules, functions = defaultdict(float), defaultdict(float)
    for line in lines:
        if test := line.get("test"):
            modules[test.split("::")[0]] += line["cpu"]
            functions[test.split("[")[0]] += line["cpu"]
    megabytes = {x["module"]: {k: x[k] for k in ("peak", "after")} for x in lines if "module" in x}
    seconds = dict(module_seconds=modules, function_seconds=functions)
    return {
        name: {key: round(n, 1) for key, n in sorted(sums.items(), key=lambda item: -item[1])}
        for name, sums in seconds.items()
    } | dict(module_megabytes=megabytes)


def _print_sums(sums: dict[str, dict[str, Any]], top: int) -> None:
    modules = sums["module_seconds"]
    print(f"{sum(modules.values()):.0f} s of processor time in {len(modules)} modules")
    for table in (modules, sums["function_seconds"]):
        for name, seconds in list(table.items())[:top]:
            print(f"{seconds:8.1f} s  {name}")
    held = sums["module_megabytes"].items()
    for name, line in sorted(held, key=lambda item: -item[1]["peak"])[:top]:
        print(f"{line['peak']:6} MB at most, {line['after']} MB at its end  {name}")


def main(argv: list[str] | None = None) -> None:
    """Prints the sums of a file of costs, largest first."""
    parser = argparse.ArgumentParser(prog="python -m scripts.checks.costs")
    parser.add_argument("file", type=Path)
    parser.add_argument("--top", type=int, default=30, help="rows of each table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the sums, for a record")
    args = parser.parse_args(argv)
    lines = [json.loads(line) for line in args.file.read_text().splitlines()]
    sums = sum_up(lines)
    if args.json:
        args.json.write_text(json.dumps(sums, indent=1) + "\n")
    _print_sums(sums, args.top)


if __name__ == "__main__":
    main()
