"""`receipt.json`: a run's inputs, its outputs, and how it ended.

Written when training begins, renewed at every save, closed at any end; always by atomic
replacement. `kdjax.watch.verify` rechecks it.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdjax import __version__
from kdjax.config import Config
from kdjax.data.installed import package_versions
from kdjax.data.rows import packed_hash
from kdjax.data.sources import split_sources
from kdjax.device.runtime import Devices
from kdjax.formats.files import replacing
from kdjax.formats.saved import RECEIPT, saved_params
from kdjax.hub import origin
from kdjax.losses.divergences import list_files
from kdjax.training.hooks import Hook, Run, StepRecord, exit_status
from kdjax.training.job import Job
from kdjax.training.saving import Checkpoints
from kdjax.watch.provenance import FORMAT, config_hash, params_hash, read, source_revision
from kdjax.watch.smoke import Verdict

_log = logging.getLogger("kdjax")

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "numpy",
    "orbax-checkpoint",
    "grain",
    "ml-dtypes",
    "tokenizers",
    "transformers",
)
_PLAN = "choice", "peak", "resident", "phases", "limit"
_NO_MEANS = "student_perplexity", "teacher_perplexity", "temperature"
_ENVIRONMENT = ("KDJAX_", "XLA_", "JAX_", "MANAGED_MEMORY", "TF_FORCE_UNIFIED_MEMORY", "NVIDIA_TF")


class Receipt(Hook):
    """Keeps `workdir/receipt.json`.

    The models' hashes come with the run's identity, computed while the models load; the hashes
    of rows and output are computed outside of steps.
    """

    def __init__(
        self, job: Job, checkpoints: Checkpoints, devices: Devices, verdict: Verdict | None = None
    ):
        self._job, self._checkpoints, self._verdict = job, checkpoints, verdict
        self._devices = devices
        self._path = job.workdir / RECEIPT
        self._record: dict[str, Any] = {}

    def train_begin(self, run: Run) -> None:
        """Writes the receipt with status "running"."""
        rows, data = self._job.rows, self._job.config.data
        folder = Path(data.cache_dir).expanduser() / rows.info.get("text", rows.key)
        pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._rows_hash = pool.submit(packed_hash, folder.resolve())
        pool.shutdown(wait=False)
        earlier = self._read_earlier()
        resumed = earlier if run.start_step else {}
        started = _tell_time()
        saves = resumed.get("tokens_at_saves", {})
        self._per_step = run.tokens_per_step
        self._record = _describe_inputs(run, self._job, folder.resolve()) | {
            "platform": _describe_platform(self._devices),
            "started": resumed.get("started") or started,
            "ended": None,
            "exit": None,
            "resumed_from": (
                [*resumed.get("resumed_from", []), run.start_step] if run.start_step else []
            ),
            "steps": run.start_step,
            # Trained positions; None where an earlier session left no count.
            "tokens": saves.get(str(run.start_step)) if run.start_step else 0.0,
            "tokens_at_saves": saves,
            "positions": run.start_step * self._per_step,  # padding included
            "held_out": _begin_held_out(resumed.get("held_out", {})),
            "output": None,
            "best": resumed.get("best"),
            "smoke": None,
            "sessions": earlier.get("sessions", []),
        }
        _begin_session(self._record, run.start_step, started)
        self._write("running")

    def step_end(self, record: StepRecord) -> None:
        self._record["steps"] = record.step
        self._record["positions"] = record.step * self._per_step
        if self._record["tokens"] is not None:
            self._record["tokens"] += record.figures["tokens"]

    def eval_batches(self, step: int, batches: Sequence[Mapping[str, float]]) -> None:
        """Records the batches' figures, of which a model card makes intervals."""
        names = [name for name in batches[0] if name not in _NO_MEANS]
        held_out = self._record["held_out"]
        found = {name: [batch[name] for batch in batches] for name in names}
        held_out["batches"]["final"] = found
        if held_out["first"] is None:  # else of an earlier session, which may have kept none
            held_out["batches"]["first"] = found

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        """Records the first and the latest held-out figures."""
        held_out = self._record["held_out"]
        held_out["final"] = {"step": step, **figures}
        held_out["first"] = held_out["first"] or held_out["final"]

    def save_begin(self, step: int) -> None:
        """Renews the receipt, so that one left by a kill says how far the run came."""
        self._record["tokens_at_saves"][str(step)] = self._record["tokens"]
        best = self._checkpoints.best
        self._record["best"] = best and best._asdict()
        self._write("running")

    def train_end(self, reason: str, error: BaseException | None) -> None:
        """Hashes the output and closes the receipt; raises what a save in flight raised."""
        record, problem = self._record, None
        if not isinstance(error, KeyboardInterrupt):  # a second interrupt must not wait
            with contextlib.suppress(OSError):
                record["data"]["packed_sha256"] = self._rows_hash.result()
            try:
                record["output"] = self._hash_output()
            except Exception as raised:
                problem = raised
        if problem is not None and error is None:
            reason, error = "failed", problem
        smoke = self._verdict.outcome(error) if self._verdict else None
        verdict = smoke["verdict"] if smoke else None
        record["smoke"] = smoke
        _end_session(record, reason, error, verdict)
        self._write(reason)
        if problem is not None:
            raise problem

    def _hash_output(self) -> dict[str, Any] | None:
        """Describes the newest checkpoint, with the hash of its parameters, once it is written."""
        self._checkpoints.wait()
        step = self._checkpoints.latest()
        return None if step is None else _describe_output(self._job.workdir, step)

    def _read_earlier(self) -> dict[str, Any]:
        try:
            return read(self._job.workdir) or {}
        except ValueError as error:
            _log.warning("%s: %s; a new one is begun", self._path, error)
            return {}

    def _write(self, status: str) -> None:
        _write(self._path, self._record, status)


def close_finished(workdir: Path, step: int) -> bool:
    """Closes the receipt of a run whose process died after its last save, at `step`.

    Returns whether it did: False if the run closed it, or left none.
    """
    try:
        record = read(workdir)
    except ValueError:
        record = None
    if not record or record["output"] is not None:
        return False
    config, data = record["config"], record["data"]
    record |= {
        "resumed_from": [*record["resumed_from"], step],
        "steps": step,
        "tokens": record["tokens_at_saves"].get(str(step)),
        "positions": step * config["train"]["batch_size"] * config["data"]["seq_len"],
        "output": _describe_output(workdir, step),
    }
    with contextlib.suppress(OSError):
        data["packed_sha256"] = packed_hash(Path(data["folder"]))
    _begin_session(record, step, _tell_time())
    _end_session(record, "finished")
    _write(workdir / RECEIPT, record, "finished")
    return True


def _begin_held_out(earlier: Mapping[str, Any]) -> dict[str, Any]:
    """The first figures of the session that this one goes on from, and of their batches."""
    batches = {"first": earlier.get("batches", {}).get("first"), "final": None}
    return {"first": earlier.get("first"), "final": None, "batches": batches}


def _tell_time() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _begin_session(record: dict[str, Any], step: int, started: str) -> None:
    """Adds a session that starts at `step`; an earlier one without an end was killed."""
    sessions = record["sessions"]
    if sessions and sessions[-1]["ended"] is None:
        sessions[-1]["reason"] = "killed"
    session = {"started": started, "ended": None, "start_step": step, "reason": None}
    made_by = {name: record[name] for name in ("kdjax", "config_sha256")}
    record["sessions"] = [*sessions, session | made_by]


def _end_session(
    record: dict[str, Any],
    reason: str,
    error: BaseException | None = None,
    verdict: str | None = None,
) -> None:
    """Records how the run and its session ended."""
    status, ended = exit_status(reason, error, verdict), _tell_time()
    record |= {
        "ended": ended,
        "exit": {
            "reason": reason,
            "error": error and type(error).__name__,
            "message": error and str(error)[:2000],
            "status": status,
        },
    }
    record["sessions"][-1] |= {
        "ended": ended,
        "end_step": record["steps"],
        "reason": reason,
        "status": status,
        "smoke": verdict,
    }


def _describe_output(workdir: Path, step: int) -> dict[str, Any]:
    sha = params_hash(saved_params(workdir, step))
    return {"step": step, "path": f"checkpoints/{step}", "params_sha256": sha}


def _write(path: Path, record: Mapping[str, Any], status: str) -> None:
    record = _replace_non_finite({**record, "status": status})
    with replacing(path) as file:
        file.write(json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")


def _describe_inputs(run: Run, job: Job, rows: Path) -> dict[str, Any]:
    """Describes the run's inputs: models, text, rows and cache, with their hashes."""
    config = dataclasses.asdict(job.config)
    sha, dirty = source_revision()
    files: dict[str, Any] = {"teacher": None}
    for side, checkpoint in (("teacher", job.pair.teacher), ("student", job.pair.student)):
        if checkpoint is not None:
            paths = [str(path.resolve()) for path in checkpoint.table.paths]
            files[side] = {"files": paths, "sha256": run.config[f"{side}.sha256"]}
    if job.teacher:
        files["teacher"] |= {
            "weights": job.teacher.kind,
            "resident_bytes": job.teacher.resident_bytes,
        }
    if job.cache:
        files["teacher"] = (files["teacher"] or {}) | {"cache": job.cache.sha256}
    plan = job.plan
    return {
        "format": FORMAT,
        "kdjax": {"version": __version__, "git_sha": sha, "git_dirty": dirty},
        "config": config,
        "config_sha256": config_hash(config),
        # Functions of files that the config names, and SHA-256s of these files.
        "hashed_python": list_files(job.step.spec.head.loss.divergence),
        # User code, by the arguments of `distill`: its name only, no hash.
        "unhashed_python": job.user_code.describe(job.step.abstract),
        "seed": job.config.train.seed,
        "cwd": os.getcwd(),  # relative paths of the config start here
        "command": shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        **files,
        "two_tokenizers": job.pair.vocabulary.record or None,
        # Bytes on each device, as planned.
        "plan": plan and {name: getattr(plan, name) for name in _PLAN},
        "data": {
            "rows": job.rows.key,
            "folder": str(rows),
            "packed_sha256": None,
            "counts": job.counts and job.counts.describe(),
        },
        "sources": _describe_sources(job.config),
    }


def _describe_sources(config: Config) -> dict[str, list[str]]:
    """Where files came from: `hf:ORG/REPO/FILE@COMMIT`, `python:jax==0.10.2`; not local ones."""
    paths = {"teacher.path": config.teacher.path, "student.path": config.student.path}
    paths["data.tokenizer"] = config.data.tokenizer
    sources = {field: [name] for field, path in paths.items() if (name := origin(path))}
    for side in ("train", "heldout"):
        patterns, packages = split_sources(getattr(config.data, side))
        named = [name for pattern in patterns if (name := origin(pattern))]
        versions = package_versions(packages).items()
        named += [f"python:{name}=={version}" for name, version in versions]
        if named:
            sources[f"data.{side}"] = named
    return sources


def _describe_platform(devices: Devices) -> dict[str, Any]:
    """The machine, and settings outside the config that can change what is computed."""
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)}
    seen = dataclasses.asdict(devices)
    del seen["peak_flops"]
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "devices": seen,
        "packages": packages,
        "environment": settings,
    }


def _replace_non_finite(value: Any) -> Any:
    """Replaces numbers that JSON cannot hold by None."""
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
