"""`receipt.json`: what a run was made of, what it made, and how it ended.

Written when training begins, renewed at every save, closed however the run ends; always by atomic
replacement. `kdjax.watch.verify` rechecks it.
"""

import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from kdjax._version import __version__
from kdjax.config import Config
from kdjax.data.rows import packed_hash
from kdjax.device.runtime import Devices
from kdjax.formats.files import replacing
from kdjax.training.hooks import Action, Hook, Run, StepRecord, exit_status
from kdjax.training.job import Job
from kdjax.training.saving import Checkpoints, saved_params
from kdjax.watch.provenance import FILE, FORMAT, config_hash, params_hash, read, source_revision
from kdjax.watch.smoke import Verdict
from kdjax.watch.verify import verify

__all__ = ["Receipt", "verify"]

_log = logging.getLogger("kdjax")

_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "numpy",
             "orbax-checkpoint", "grain", "ml-dtypes", "tokenizers", "transformers")  # fmt: skip
# Settings outside the config that can change what is computed, or where.
_ENVIRONMENT = ("KDJAX_", "XLA_", "JAX_", "MANAGED_MEMORY", "TF_FORCE_UNIFIED_MEMORY", "NVIDIA_TF")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """The value with None for what JSON cannot say."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _platform(devices: Devices) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "devices": {key: value for key, value in dataclasses.asdict(devices).items()
                    if key != "peak_flops"},
        "packages": _versions(),
        "environment": {key: value for key, value in sorted(os.environ.items())
                        if key.startswith(_ENVIRONMENT)},
    }  # fmt: skip


class Receipt(Hook):
    """Keeps `workdir/receipt.json`. In a cluster the first process writes it.

    The models' hashes come with the run's identity, computed while the models load; those of the
    rows and of the output cost no time of a step.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints, devices: Devices,
                 verdict: Verdict | None = None):  # fmt: skip
        self._job, self._checkpoints, self._verdict = job, checkpoints, verdict
        self._devices = devices
        self._path = job.workdir / FILE
        self._writes = jax.process_index() == 0

    def train_begin(self, run: Run) -> None:
        """Writes the receipt with status "running"."""
        pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        folder = self._rows_folder()
        self._rows_hash = pool.submit(packed_hash, folder)
        pool.shutdown(wait=False)
        self._per_step = run.tokens_per_step
        earlier = self._earlier()
        sessions = earlier.get("sessions", [])
        if sessions and sessions[-1]["ended"] is None:
            sessions[-1]["reason"] = "killed"
        self._steps = run.start_step
        resumed = earlier if run.start_step else {}
        self._tokens: float | None = 0.0
        self._saved = {}
        if run.start_step:
            self._saved = dict(resumed.get("tokens_at_saves", {}))
            self._tokens = self._saved.get(str(run.start_step))
        self._session = dict(started=_now(), ended=None, start_step=run.start_step, reason=None)
        self._record = _inputs(self._job.config, run, self._job, folder) | {
            "platform": _platform(self._devices),
            "started": resumed.get("started") or self._session["started"],
            "resumed_from": resumed.get("resumed_from", []) + [run.start_step] * bool(resumed),
            "held_out": {"first": resumed.get("held_out", {}).get("first"), "final": None},
            "output": None,
            "smoke": None,
        }
        if run.start_step and not resumed:  # made before there were receipts, or deleted
            self._record["resumed_from"] = [run.start_step]
        mine = {"kdjax": self._record["kdjax"], "config_sha256": self._record["config_sha256"]}
        self._record["sessions"] = [*sessions, self._session | mine]
        self._write("running")

    def step_end(self, record: StepRecord) -> Action:
        """Counts."""
        self._steps = record.step
        if self._tokens is not None:
            self._tokens += record.figures["tokens"]
        return Action.CONTINUE

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """Keeps the first and the latest held-out figures."""
        entry = {"step": step, **figures}
        held_out = self._record["held_out"]
        held_out["final"] = entry
        held_out["first"] = held_out["first"] or entry

    def save_begin(self, step: int) -> None:
        """Renews the receipt, so that one left by a kill says how far the run came."""
        self._saved[str(step)] = self._tokens
        self._write("running")

    def train_end(self, reason: str, error: BaseException | None) -> None:
        """Hashes the output and closes the receipt; raises what a save in flight raised."""
        problem = None
        if not isinstance(error, KeyboardInterrupt):  # who asked twice wants no more waiting
            self._record["data"]["packed_sha256"] = self._hash_of_rows()
            try:
                self._record["output"] = self._output()
            except Exception as raised:
                problem = raised
        if problem is not None and error is None:
            reason, error = "failed", problem
        outcome = self._verdict.outcome(error) if self._verdict else None
        self._record["smoke"] = outcome
        status = exit_status(reason, error, outcome["verdict"] if outcome else None)
        self._end(reason, error, status)
        if problem is not None:
            raise problem

    def _end(self, reason: str, error: BaseException | None, status: int) -> None:
        self._record["ended"] = _now()
        self._record["exit"] = {
            "reason": reason,
            "error": error and type(error).__name__,
            "message": error and str(error)[:2000],
            "status": status,
        }
        smoke = self._record["smoke"]
        self._record["sessions"][-1] |= {
            "ended": self._record["ended"],
            "end_step": self._steps,
            "reason": reason,
            "status": status,
            "smoke": smoke and smoke["verdict"],
        }
        self._write(reason)

    def _output(self) -> dict[str, Any] | None:
        """The newest checkpoint and the hash of what it holds on the disk, once it is there."""
        self._checkpoints.wait()
        step = self._checkpoints.latest()
        if step is None or not self._writes:
            return None
        sha = params_hash(saved_params(self._job.workdir, step))
        return {"step": step, "path": f"checkpoints/{step}", "params_sha256": sha}

    def _rows_folder(self) -> Path:
        cache = Path(self._job.config.data.cache_dir).expanduser()
        return (cache / self._job.rows.key).resolve()

    def _hash_of_rows(self) -> str | None:
        try:
            return self._rows_hash.result()
        except OSError:
            return None

    def _earlier(self) -> dict[str, Any]:
        try:
            return read(self._job.workdir) or {}
        except ValueError as error:
            _log.warning("%s: %s; a new one is begun", self._path, error)
            return {}

    def _write(self, status: str) -> None:
        if not self._writes:
            return
        record = self._record | {
            "status": status,
            "steps": self._steps,
            # Trained positions; None where an earlier session left no count.
            "tokens": self._tokens,
            "positions": self._steps * self._per_step,  # padding included
            "tokens_at_saves": self._saved,
        }
        with replacing(self._path) as file:
            file.write(json.dumps(_finite(record), indent=1, allow_nan=False).encode() + b"\n")


def _plan(job: Job) -> dict[str, Any] | None:
    """Bytes on each device, as planned."""
    plan = job.plan
    if plan is None:
        return None
    parts = {"resident": plan.resident, "phases": plan.phases, "limit": plan.limit}
    return {"choice": plan.choice, "peak": plan.peak} | parts


def _inputs(config: Config, run: Run, job: Job, rows: Path) -> dict[str, Any]:
    """What the run is made of."""
    nested = dataclasses.asdict(config)
    sha, dirty = source_revision()
    files: dict[str, Any] = {
        side: None
        if table is None
        else {
            "files": [str(path.resolve()) for path in table.paths],
            "sha256": run.config[f"{side}.sha256"],
        }
        for side, table in (("teacher", job.sources.teacher), ("student", job.sources.student))
    }
    if job.teacher:
        info = job.teacher.info
        files["teacher"] |= {"backend": info.kind, "resident_bytes": info.resident_bytes}
    if job.cache:
        files["teacher"]["cache"] = job.cache.sha256
    return {
        "format": FORMAT,
        "kdjax": {"version": __version__, "git_sha": sha, "git_dirty": dirty},
        "config": nested,
        "config_sha256": config_hash(nested),
        "seed": config.train.seed,
        "cwd": os.getcwd(),  # relative paths of the config start here
        **files,
        "plan": _plan(job),
        "data": {"rows": job.rows.key, "folder": str(rows), "packed_sha256": None},
        "ended": None,
        "exit": None,
    }
