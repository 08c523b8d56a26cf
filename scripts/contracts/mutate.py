"""Planted faults: each is applied in a scratch copy, where its tests must go red."""

import concurrent.futures
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.errors import UserError
from scripts.contracts.claims import Claim, Mutant

COPIED = ("kdjax", "tests", "configs", "scripts", "contracts", "pyproject.toml")
CACHE_VARIABLE = "KDJAX_TEST_CACHE"  # read by tests/conftest.py
TIMEOUT = 120.0  # seconds for the tests of one mutant
# What the tests import, and takes long.
LIBRARIES = (
    "pytest", "hypothesis", "numpy", "scipy.special", "jax", "flax.nnx", "optax", "chex",
    "absl.flags", "orbax.checkpoint", "grain", "tokenizers", "transformers", "gguf", "pyarrow",
    "safetensors.numpy", "ml_collections.config_flags", "jaxtyping", "tensorboardX", "yaml",
)  # fmt: skip


class Verdict(NamedTuple):
    """How one mutant fared."""

    mutant: Mutant
    killed: bool
    why: str  # for a survivor


class Worker:
    """A scratch copy of the repository and the process that runs its tests."""

    def __init__(self, root: Path, folder: Path, libraries: Sequence[str] = LIBRARIES):
        self.folder = folder
        for name in COPIED:
            source = root / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(source, folder / name, ignore=ignore)
            elif source.exists():
                shutil.copy2(source, folder / name)
        script = Path(__file__).with_name("worker.py")
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        environ = {
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            # The programs are the repository's own, but for the mutated ones.
            CACHE_VARIABLE: str((root / ".pytest_cache" / "xla").resolve()),
            "OPENBLAS_NUM_THREADS": "1",  # threads do not survive the fork
        }
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(folder / "answer.json"), *libraries],
            cwd=folder, env=os.environ | environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, bufsize=1,
        )  # fmt: skip

    def run(self, tests: list[str], *, every: bool = False, timeout: float) -> dict[str, Any]:
        """Runs tests by node id in a fresh process; all their cases, or until each has failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = dict(tests=tests, every=every, timeout=timeout)
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise UserError(f"the test process ended with status {self._process.wait()}. Rerun.")
        return json.loads(answer)

    def log(self) -> str:
        """The end of what pytest printed last."""
        lines = (self.folder / "answer.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def close(self) -> None:
        """Ends the process."""
        with self._process:
            self._process.kill()


@contextlib.contextmanager
def applied(root: Path, mutant: Mutant) -> Iterator[None]:
    """The fault planted under `root`, and taken out at the end."""
    path = root / mutant.file
    whole = path.read_bytes()
    path.write_text(whole.decode().replace(mutant.find, mutant.replace, 1), encoding="utf-8")
    try:
        yield
    finally:
        path.write_bytes(whole)


def try_mutant(worker: Worker, mutant: Mutant, nodes: dict[str, str], timeout: float) -> Verdict:
    """Plants one fault; it is killed if every test it names fails by what it compares."""
    tests = sorted({nodes[name] for name in mutant.kills})
    with applied(worker.folder, mutant):
        answer = worker.run(tests, timeout=timeout)
    green = [name for name in mutant.kills if nodes[name] not in answer["failed"]]
    if answer["code"] == 1 and not green and not answer["broken"]:
        return Verdict(mutant, True, "")
    why = f"pytest ended with {answer['code']}"
    if answer["broken"]:
        why = f"it does not run: {'; '.join(answer['broken'][:2])}"
    elif answer["code"] in (0, 1):
        why = f"still green: {', '.join(green)}"
    return Verdict(mutant, False, why)


def mutate(root: Path, claims: list[Claim], mutants: list[Mutant], *, jobs: int,
           say: Callable[[str], None], timeout: float = TIMEOUT,
           libraries: Sequence[str] = LIBRARIES) -> list[Verdict]:  # fmt: skip
    """Verdicts on all mutants, in order; `say` gets a line for each as it is found.

    First runs the same tests without a fault. Raises `UserError` if one of them is not green.
    """
    nodes = {claim.id: claim.node for claim in claims if not claim.proof}
    tests = sorted({nodes[name] for mutant in mutants for name in mutant.kills})
    jobs = max(1, min(jobs, len(mutants)))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kdjax-mutants-")))
        free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for i in range(jobs):
            (folder / str(i)).mkdir()
            worker = Worker(root, folder / str(i), libraries)
            stack.callback(worker.close)
            free.put(worker)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(jobs))

        def lent(task: Callable[[Worker], Any]) -> concurrent.futures.Future[Any]:
            def work() -> Any:
                worker = free.get()
                try:
                    return task(worker)
                finally:
                    free.put(worker)

            return pool.submit(work)

        def one(mutant: Mutant) -> Callable[[Worker], Verdict]:
            return lambda worker: _told(say, try_mutant(worker, mutant, nodes, timeout))

        shares = [tests[i::jobs] for i in range(jobs)]
        whole = timeout * len(tests)
        for done in [lent(lambda w, s=share: _green(w, s, whole)) for share in shares if share]:
            done.result()
        say(f"{len(tests)} tests green without a fault")
        verdicts = [lent(one(mutant)) for mutant in mutants]
        return [verdict.result() for verdict in verdicts]


def _told(say: Callable[[str], None], verdict: Verdict) -> Verdict:
    state = "killed  " if verdict.killed else "SURVIVED"
    why = f" ({verdict.why})" if verdict.why else ""
    say(f"{state} {verdict.mutant.id}: {verdict.mutant.fault}{why}")
    return verdict


def _green(worker: Worker, tests: list[str], timeout: float) -> None:
    answer = worker.run(tests, every=True, timeout=timeout)
    if answer["code"] != 0 or set(tests) != set(answer["passed"]):
        silent = sorted(set(tests) - set(answer["passed"]))
        raise UserError(
            f"tests are not green without any fault: {', '.join(silent or answer['failed'])}. "
            f"Mend them first.\n{worker.log()}"
        )
