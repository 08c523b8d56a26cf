"""Reads a run's workdir leniently: the run may be going on, broken or incomplete."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.config import flatten, name_files
from kdjax.data.rollouts import FOLDER, read_round
from kdjax.errors import CheckError, UserError, suggest_path
from kdjax.formats.files import hide_folders
from kdjax.formats.saved import RECEIPT
from kdjax.watch import provenance
from kdjax.watch.writers import METRICS

SAMPLES = "samples.json"
_TRAIN = ("step", "loss", "ce", "divergence", "learning_rate", "tokens_per_second")
_SAMPLE = "prompt", "reference", "before", "after"
TOPK = (
    "KL and divergence are over the ids that the teacher's cache holds, and lower than over all "
    "ids; the acceptance is higher"
)


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One run; figures that are unknown or not finite are NaN."""

    path: Path
    label: str
    train: dict[str, np.ndarray]  # float64 [steps]: `_TRAIN`, and tokens trained until then
    evals: list[dict[str, float]]  # in order of steps, each with the tokens trained until then
    receipt: dict[str, Any]  # empty if there is none
    samples: list[dict[str, Any]]
    rounds: list[dict[str, Any]]  # records of the first and the last round of answers
    notes: list[str]  # warnings to read before the figures

    @property
    def config(self) -> dict[str, Any]:
        """The flat config of the receipt."""
        return flatten(self.receipt.get("config") or {})

    @property
    def loss(self) -> str:
        """Formula of the minimised loss, as `0.3 · CE + 0.7 · KL at T = 1`; "": unknown."""
        alpha, temperature = (self.config.get(f"loss.{name}") for name in ("alpha", "temperature"))
        if alpha is None or temperature is None:
            return ""
        changing = [
            f"{name} from {first:g} to {final:g}"
            for name, first, final, unchanged in (
                ("T", temperature, self.config.get("loss.final_temperature", 0), 0),
                ("alpha", alpha, self.config.get("loss.final_alpha", -1), -1),
            )
            if final not in (unchanged, first)
        ]
        kl = f"{(1 - alpha) * temperature**2:.4g} · {self.divergence}"
        if self.receipt.get("two_tokenizers") and not self.without_teacher:
            kl += " where the teacher is compared, CE elsewhere"
        if changing:  # so its values at two steps are of two losses
            kl += f", at the start: {' and '.join(changing)} at the end"
        return f"{alpha:g} · CE + {kl}"

    @property
    def divergence(self) -> str:
        """The divergence that trains, as the config names it, and its temperature."""
        logged = [e["temperature"] for e in self.evals if "temperature" in e]
        temperature = self.config.get("loss.temperature", logged[0] if logged else math.nan)
        name = name_files(self.config.get("loss.divergence", "forward_kl"))
        name = name.replace("forward_kl", "KL")
        return f"{name} at T = {temperature:g}" if math.isfinite(temperature) else name

    @property
    def without_teacher(self) -> bool:
        """Whether the loss has no teacher: a baseline trained on text alone."""
        return self.config.get("loss.alpha") == 1


def read_run(path: Path, label: str = "") -> RunRecord:
    """Reads the run of a workdir. Raises `UserError` if no run has begun there."""
    if not path.is_dir():
        raise UserError(
            f"{path}: no such folder; expected the --workdir of a run.{suggest_path(path)}"
        )
    notes: list[str] = []
    lines = _read_metrics(path / METRICS, notes)
    receipt, samples = {}, []
    try:
        receipt = provenance.read(path) or {}
    except (OSError, ValueError) as error:
        notes.append(f"{RECEIPT} cannot be read: {error}")
    try:
        read = json.loads((path / SAMPLES).read_text())["samples"]
        samples = [{name: sample[name] for name in _SAMPLE} for sample in read]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes.append(f"{SAMPLES} cannot be read: {type(error).__name__}: {error}")
    if not lines and not receipt:
        raise UserError(
            f"{path}: found neither figures in {METRICS} nor a {RECEIPT}; expected the "
            "--workdir of a run that has begun. Name another run's, or start one there: "
            f"kdjax train --config=CONFIG --workdir={path}"
        )
    steps = [figures for kind, figures in lines if kind == "train"]
    train = {name: np.asarray([s.get(name, math.nan) for s in steps]) for name in _TRAIN}
    train["tokens"] = np.nancumsum([s.get("tokens", math.nan) for s in steps])
    evals = []
    for kind, figures in lines:
        if kind == "eval":
            trained = train["tokens"][train["step"] <= figures["step"]]
            figures["positions"] = figures.get("tokens", math.nan)
            figures["tokens"] = float(trained[-1]) if len(trained) else 0.0
            evals.append(figures)
    rounds = _read_rounds(path, notes)
    name, receipt = label or path.resolve().name, hide_folders(receipt)
    run = RunRecord(path, name, train, evals, receipt, samples, rounds, notes)
    notes[:] = hide_folders([*_describe_end(run), *notes])
    return run


def _read_rounds(workdir: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Reads the first and the last round of answers, if both have answers to show."""
    folders = sorted(workdir.glob(f"{FOLDER}*"), key=lambda folder: (len(folder.name), folder.name))
    files = [file for folder in folders for file in sorted(folder.glob("round-*.npz"))]
    try:
        records = [read_round(path).record for path in dict.fromkeys([*files[:1], *files[-1:]])]
    except CheckError as error:
        notes.append(str(error))
        return []
    return records if len(records) == 2 and all(r.get("samples") for r in records) else []


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Reads the runs; the label of each is the end of its path that distinguishes it."""
    resolved = [Path(os.path.realpath(path)) for path in paths]
    for i, path in enumerate(resolved):
        if path in resolved[:i]:
            raise UserError(f"{paths[i]} was given twice; name each run once.")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(paths):
        depth += 1
    return [
        read_run(path, os.path.join(*full.parts[-depth:]))
        for path, full in zip(paths, resolved, strict=True)
    ]


def _read_metrics(path: Path, notes: list[str]) -> list[tuple[str, dict[str, float]]]:
    """Kind and figures of each line, in order of steps."""
    lines, bad, topk = [], 0, False
    text = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in text:
        try:
            entry = json.loads(line)
            kind, figures = entry.pop("kind"), {"step": float(int(entry.pop("step")))}
            for name, value in entry.items():
                topk |= "_topk" in name
                number = float(value) if isinstance(value, int | float) else math.nan
                figures[name.removesuffix("_topk")] = number
            lines.append((kind, figures))
        except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError):
            bad += 1
    if bad:
        notes.append(f"{bad} of {len(text)} lines of {METRICS} cannot be read and are left out")
    if topk:
        notes.append(TOPK)
    return sorted(lines, key=lambda line: line[1]["step"])


def _describe_end(run: RunRecord) -> list[str]:
    """Describes the state of the run, and its missing parts."""
    receipt, steps = run.receipt, run.train["step"]
    planned = run.config.get("train.steps", 0)
    done = f"{int(steps[-1]) if len(steps) else 0:,}" + (f" of {planned:,}" if planned else "")
    notes = []
    match receipt.get("status"):
        case None:
            notes.append(f"no {RECEIPT}: how the run ended, and what it was made of, is not known")
        case "running":
            notes.append(f"not finished: {done} steps so far; the run goes on, or was killed")
        case "interrupted":
            notes.append(f"not finished: stopped after {done} steps, and can be resumed")
        case "failed":
            end = receipt.get("exit") or {}
            notes.append(f"failed after {done} steps: {end.get('error')}: {end.get('message')}")
    for name in ("loss", "ce", "divergence"):
        bad = steps[~np.isfinite(run.train[name])]
        if len(bad) and not (name == "divergence" and run.without_teacher):
            notes.append(
                f"{name} is not finite or not logged in {len(bad)} steps, the first {int(bad[0]):,}"
            )
    if not len(steps):
        notes.append("no step was logged")
    if not run.evals:
        notes.append("there was no held-out evaluation: how good the student is, is not known")
    if receipt.get("smoke"):
        notes.append("a smoke run: the first steps of a longer one, with nothing saved")
    return notes
