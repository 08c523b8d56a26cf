"""What a run left in its workdir, read leniently: a run may be going on, broken or half there."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.config import flatten
from kdjax.errors import UserError
from kdjax.watch import provenance

METRICS, SAMPLES = "metrics.jsonl", "samples.json"
_TRAIN = ("loss", "ce", "kl", "learning_rate", "tokens_per_second")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One run; figures that are unknown or not finite are NaN."""

    path: Path
    label: str
    train: dict[str, np.ndarray]  # float64 [steps]: `_TRAIN`, step, and tokens trained until then
    evals: list[dict[str, float]]  # in order of steps, each with the tokens trained until then
    receipt: dict[str, Any]  # empty if there is none
    samples: list[dict[str, Any]]
    notes: list[str]  # what a reader must know before the figures

    @property
    def config(self) -> dict[str, Any]:
        """The flat config of the receipt."""
        return flatten(self.receipt.get("config") or {})

    @property
    def temperature(self) -> float:
        """That of the loss; NaN if unknown."""
        known = [e["temperature"] for e in self.evals if "temperature" in e]
        return float(self.config.get("loss.temperature", known[0] if known else np.nan))

    @property
    def without_teacher(self) -> bool:
        """Whether the loss is the text's alone: a baseline."""
        return self.config.get("loss.alpha") == 1

    def compiled(self) -> np.ndarray:
        """bool [steps]: the first step of each session, which holds compilation."""
        sessions = self.receipt.get("sessions") or [{"start_step": 0}]
        return np.isin(self.train["step"], [s["start_step"] + 1 for s in sessions])


def read_run(path: Path, label: str = "") -> RunRecord:
    """The run of a workdir. Raises `UserError` if no run was ever begun there."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; expected the --workdir of a run.")
    notes: list[str] = []
    lines = _lines(path / METRICS, notes)
    receipt = _receipt(path, notes)
    if not lines and not receipt:
        raise UserError(
            f"{path}: found neither figures in {METRICS} nor a {provenance.FILE}; expected the "
            "--workdir of a run that has begun. Give that of another run, or start one there: "
            f"python -m kdjax.main --config=CONFIG --workdir={path}"
        )
    steps = [line for line in lines if line["kind"] == "train"]
    train = {name: _column(steps, name) for name in ("step", *_TRAIN)}
    train["tokens"] = np.nancumsum(_column(steps, "tokens"))
    evals = [
        {k: _number(v) for k, v in line.items() if k not in ("kind", "tokens")}
        | {"positions": _number(line.get("tokens")), "tokens": _tokens_at(line["step"], train)}
        for line in lines if line["kind"] == "eval"
    ]  # fmt: skip
    samples = _samples(path / SAMPLES, notes)
    record = RunRecord(path, label or path.resolve().name, train, evals, receipt, samples, notes)
    notes[:0] = _story(record)
    return record


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs, each with a label of its own: the end of its path that tells it from the others."""
    resolved = [path.resolve() for path in paths]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            raise UserError(f"{paths[i]} was given twice; name each run once.")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(paths):
        depth += 1
    labels = [os.path.join(*path.parts[-depth:]) for path in resolved]
    return [read_run(path, label) for path, label in zip(paths, labels, strict=True)]


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    found, bad = [], 0
    try:
        text = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in text:
        try:
            entry = json.loads(line)
            int(entry["step"])
            found += [entry] if entry["kind"] in ("train", "eval") else []
        except (ValueError, TypeError, KeyError):
            bad += 1
    if bad:
        notes.append(f"{bad} of {len(text)} lines of {METRICS} cannot be read and are left out")
    return sorted(found, key=lambda entry: entry["step"])


def _receipt(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return provenance.read(path) or {}
    except (OSError, ValueError) as error:
        notes.append(f"{provenance.FILE} cannot be read: {error}")
        return {}


def _samples(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        return list(json.loads(path.read_text())["samples"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes.append(f"{SAMPLES} cannot be read: {type(error).__name__}: {error}")
        return []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.asarray([_number(line.get(name)) for line in lines], np.float64)


def _tokens_at(step: int, train: Mapping[str, np.ndarray]) -> float:
    """Tokens trained up to the end of `step`."""
    before = train["tokens"][train["step"] <= step]
    return float(before[-1]) if len(before) else 0.0


def _story(run: RunRecord) -> list[str]:
    """How the run stands, and what of it is not there."""
    receipt, steps = run.receipt, run.train["step"]
    last = int(steps[-1]) if len(steps) else 0
    wanted = run.config.get("train.steps")
    of = f" of {wanted:,}" if wanted else ""
    story = []
    match receipt.get("status"):
        case None:
            story.append(f"no {provenance.FILE}: how the run ended, and what it was made of, is "
                         "not known")  # fmt: skip
        case "running":
            story.append(f"not finished: {last:,}{of} steps so far; the run goes on, or was killed")
        case "interrupted":
            story.append(f"not finished: stopped after {last:,}{of} steps, and can be resumed")
        case "failed":
            said = receipt.get("exit") or {}
            story.append(f"failed after {last:,}{of} steps: {said.get('error')}: "
                         f"{said.get('message')}")  # fmt: skip
    for name in ("loss", "ce", "kl"):
        bad = steps[~np.isfinite(run.train[name])]
        if len(bad):
            story.append(f"{name} is not finite or not logged in {len(bad)} steps, the first "
                         f"{int(bad[0]):,}")  # fmt: skip
    if not len(steps):
        story.append("no step was logged")
    if not run.evals:
        story.append("there was no held-out evaluation: how good the student is, is not known")
    if receipt.get("smoke"):
        story.append("a smoke run: the first steps of a longer one, with nothing saved")
    return story
