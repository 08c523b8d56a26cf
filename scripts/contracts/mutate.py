"""Planted faults: each is applied in a scratch copy, where the tests of its claims must go red."""

import compileall
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from kdjax.errors import UserError
from scripts.contracts.bind import Mutant, locate
from scripts.contracts.contracts import Claim

_COPIED = ("kdjax", "tests", "configs", "scripts", "contracts", "docs", "pyproject.toml")
_HASHES = PycInvalidationMode.CHECKED_HASH
_OF_CI = ("CI", "BUILD_NUMBER")
_TIMEOUT = 120.0  # seconds for the tests of one mutant
# What the tests import, and takes long.
_LIBRARIES = (
    "pytest hypothesis numpy scipy.special scipy.optimize scipy.stats jax "
    "jax.experimental.pallas.triton flax.nnx optax chex absl.flags orbax.checkpoint grain "
    "tokenizers transformers gguf pyarrow safetensors.numpy ml_collections.config_flags jaxtyping "
    "matplotlib.figure tensorboardX yaml"
)


class Worker:
    """A scratch copy of the repository and the process that runs its tests."""

    def __init__(self, root: Path, folder: Path, libraries: str = _LIBRARIES):
        self.folder = folder
        folder.mkdir()
        for name in _COPIED:
            if (root / name).is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(root / name, folder / name, ignore=ignore)
            elif (root / name).exists():
                shutil.copy2(root / name, folder / name)
        # Checked by their sources' hashes: no mutant runs as another one's bytes.
        for name in ("kdjax", "scripts", "configs"):
            compileall.compile_dir(folder / name, quiet=2, invalidation_mode=_HASHES)
        cache = os.environ.get("KDJAX_TEST_CACHE") or root / ".pytest_cache" / "xla"
        # Where CI is set pytest writes out whole differences: of two files' numbers, for minutes.
        asked = {name: value for name, value in os.environ.items() if name not in _OF_CI}
        environment = asked | {
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            # Read by tests/conftest.py: all programs but the mutated ones are compiled already.
            "KDJAX_TEST_CACHE": str(Path(cache).resolve()),
            "OPENBLAS_NUM_THREADS": "1",  # threads do not survive the fork
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a tenth of a second each; none is needed
        }
        script = Path(__file__).with_name("worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(folder / "answer.json"), *libraries.split()],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(self, tests: list[str], timeout: float) -> dict[str, Any]:
        """Runs tests, or single cases, in a fresh process, until each test has failed once."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = dict(tests=tests, timeout=timeout)
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise UserError(f"the test process ended with status {self._process.wait()}. Rerun.")
        return json.loads(answer)

    def check_green(self, cases: list[str], timeout: float) -> None:
        """Raises `UserError` unless every case passes without a fault."""
        answer = self.run(cases, timeout)
        if answer["code"] != 0 or set(cases) != set(answer["passed"]):
            silent = sorted(set(cases) - set(answer["passed"]))
            log = (self.folder / "answer.log").read_text(errors="replace").splitlines()
            raise UserError(
                f"tests are not green without any fault: {', '.join(silent or answer['failed'])}. "
                "Mend them first.\n" + "\n".join(log[-15:])
            )

    def close(self) -> None:
        """Ends the process."""
        with self._process:
            self._process.kill()


def _why_alive(
    worker: Worker, mutant: Mutant, tests: dict[str, str], timeout: float
) -> tuple[str, dict[str, Any]]:
    """Plants one fault; "" if every test that it names fails by what the test compares.

    And the worker's answer.
    """
    (place,) = locate(worker.folder, mutant)
    whole = place.file.read_text(encoding="utf-8")
    place.file.write_text(place.plant(mutant.replace), encoding="utf-8")
    try:
        answer = worker.run(sorted({tests[name] for name in mutant.kills}), timeout)
    finally:
        place.file.write_text(whole, encoding="utf-8")
    failed = {case.split("[")[0] for case in answer["failed"]}
    green = [name for name in mutant.kills if tests[name] not in failed]
    if answer["broken"]:
        return f"it does not run: {'; '.join(answer['broken'][:2])}", answer
    if answer["code"] not in (0, 1):
        return f"pytest ended with {answer['code']}", answer
    return (f"still green: {', '.join(green)}" if green else ""), answer


def _share_by_file(cases: Iterable[str], jobs: int) -> list[list[str]]:
    """All cases of a file in one of the shares, so that its fixtures are made once."""
    shares: list[list[str]] = [[] for _ in range(jobs)]
    files = [list(group) for _, group in groupby(sorted(cases), lambda case: case.split("::")[0])]
    for group in sorted(files, key=len, reverse=True):
        min(shares, key=len).extend(group)
    return shares


def mutate(
    root: Path,
    claims: Sequence[Claim],
    mutants: Sequence[Mutant],
    *,
    jobs: int = 2,
    passed: Collection[str] = (),
    say: Callable[[str], None] = print,
    took: dict[str, float] | None = None,
    timeout: float = _TIMEOUT,
    libraries: str = _LIBRARIES,
) -> dict[str, str]:
    """Mutants by id: "" for a killed one, for a survivor why; `say` gets a line for each.

    The line has the seconds of processor time that the tests took, and so has `took`, by id.

    Runs the cases that failed again, without a fault; raises `UserError` unless all pass then. The
    tests named in `passed` are left out: they passed in another run of this revision.
    """
    by_claim = {claim.id: claim.test for claim in claims}
    jobs = max(1, min(jobs, len(mutants)))
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    verdicts: dict[str, str] = {}
    red: set[str] = set()

    def work(worker: Worker) -> None:
        while not waiting.empty():
            with contextlib.suppress(queue.Empty):
                mutant = waiting.get_nowait()
                why, answer = _why_alive(worker, mutant, by_claim, timeout)
                verdicts[mutant.id] = why
                if took is not None:
                    took[mutant.id] = round(answer["seconds"], 2)
                red.update(answer["failed"])
                state = f"SURVIVED ({why})" if why else "killed"
                say(f"{state} {mutant.id} in {answer['seconds']:.1f} s: {mutant.fault}")

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kdjax-mutants-")))
        workers = [Worker(root, folder / str(i), libraries) for i in range(jobs)]
        for worker in workers:
            stack.callback(worker.close)
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        list(pool.map(work, workers))
        again = [case for case in red if case.split("[")[0] not in passed]
        shares = _share_by_file(again, jobs)
        list(pool.map(lambda w, s: s and w.check_green(s, timeout * len(s)), workers, shares))
        say(f"{len(again)} failed cases green without a fault")
    return verdicts
