"""Rechecks a receipt against the files that it names, and that training changed the student."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.config import Config, identity
from kdjax.data.rows import packed_hash, rows_key
from kdjax.errors import UserError
from kdjax.formats import content_hash, open_shapes, open_table
from kdjax.models.tokenizer import load_tokenizer
from kdjax.training.job import row_settings
from kdjax.training.pair import student_spec
from kdjax.training.saving import changed_tensors, saved_params, saved_run, saved_steps
from kdjax.watch import provenance

_SHOWN = 5  # failures in the message


class _Failed(Exception):
    """A check that did not hold; the text says what was found and what the receipt says."""


def verify(workdir: Path) -> list[str]:
    """Lines of a report, one a check. Raises `UserError` naming the first checks that failed.

    Rehashes the config, both models, the packed rows, the text behind them and the checkpoint's
    parameters, and compares these with the student's file as it is loaded: every tensor must have
    changed. A file that is gone fails its check. Uses the CPU, and host memory for 256 MiB of
    parameters or the largest one.
    """
    receipt = _open(workdir)
    _stay_on_the_cpu()
    lines, failed = [], []
    for name, check in _CHECKS.items():
        try:
            lines.append(f"ok    {name}: {check(receipt, workdir)}")
        except _Failed as problem:
            failed.append(f"{name}: {problem}")
        except (OSError, ValueError, KeyError, TypeError) as problem:
            failed.append(f"{name}: cannot be checked: {type(problem).__name__}: {problem}")
    if failed:
        more = f"\n  and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        raise UserError(
            f"{workdir / provenance.FILE}: {len(failed)} of {len(_CHECKS)} checks failed:\n  "
            + "\n  ".join(failed[:_SHOWN])
            + more
            + "\nRestore the files it names, or take the run as one without evidence."
        )
    return lines


def _open(workdir: Path) -> dict[str, Any]:
    path = workdir / provenance.FILE
    try:
        receipt = provenance.read(workdir)
    except ValueError as error:
        raise UserError(f"{path}: found {error}; expected what a run of kdjax wrote.") from error
    if receipt is None:
        raise UserError(
            f"{path}: no such file; expected the receipt of a run. Give the run's --workdir."
        )
    return receipt


def _stay_on_the_cpu() -> None:
    from jax._src import xla_bridge  # there is no public way to ask

    if not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")


def _expect(what: str, found: Any, recorded: Any) -> None:
    if found != recorded:
        raise _Failed(f"found {what} {found}, the receipt says {recorded}")


def _config(receipt: dict[str, Any]) -> Config:
    """The run's config, with paths that hold whatever the current directory is."""
    nested = receipt["config"]
    config = Config(
        **{f.name: type(getattr(Config(), f.name))(**nested[f.name])
           for f in dataclasses.fields(Config)}
    )  # fmt: skip

    def absolute(pattern: str) -> str:
        return os.path.join(receipt["cwd"], os.path.expanduser(pattern.strip()))

    data = config.data
    for name in ("train", "heldout"):
        patterns = [absolute(p) for p in getattr(data, name).split(",") if p.strip()]
        setattr(data, name, ",".join(patterns))
    data.tokenizer = absolute(data.tokenizer) if data.tokenizer else ""
    config.student.path = absolute(config.student.path)
    config.teacher.path = absolute(config.teacher.path) if config.teacher.path else ""
    return config


def _ended(receipt: dict[str, Any], workdir: Path) -> str:
    if receipt["status"] == "running":
        raise _Failed("status is running: the run goes on, or was killed; resume it to its end")
    end = receipt["exit"]
    return f"{end['reason']}, status {end['status']}, {receipt['steps']} steps"


def _config_hash(receipt: dict[str, Any], workdir: Path) -> str:
    _expect("a config of hash", provenance.config_hash(receipt["config"]), receipt["config_sha256"])
    _expect("in the config seed", receipt["config"]["train"]["seed"], receipt["seed"])
    return f"sha256 {receipt['config_sha256']}"


def _model(side: str) -> Callable[[dict[str, Any], Path], str]:
    def check(receipt: dict[str, Any], workdir: Path) -> str:
        path = getattr(_config(receipt), side).path
        if not path:
            _expect(f"no {side} in the config and in the receipt", None, receipt[side])
            return "none: trained on the text alone"
        table = open_shapes(path) if side == "student" else open_table(path)
        _expect(f"in {table.paths[0]} sha256", content_hash(table), receipt[side]["sha256"])
        return f"{table.paths[0]}, sha256 {receipt[side]['sha256']}"

    return check


def _rows(receipt: dict[str, Any], workdir: Path) -> str:
    data = receipt["data"]
    if data["packed_sha256"] is None:
        raise _Failed("the run could not hash its packed rows")
    found = packed_hash(Path(data["folder"]))
    _expect(f"in {data['folder']} sha256", found, data["packed_sha256"])
    return f"{data['folder']}, sha256 {found}"


def _text(receipt: dict[str, Any], workdir: Path) -> str:
    config = _config(receipt)
    tokenizer = load_tokenizer(config.data.tokenizer or config.student.path)
    _expect("text of key", rows_key(row_settings(config, tokenizer)), receipt["data"]["rows"])
    return f"key {receipt['data']['rows']}"


def _checkpoint(receipt: dict[str, Any], workdir: Path) -> str:
    if receipt["smoke"]:
        if saved_steps(workdir):
            raise _Failed("a smoke run saves nothing, but there is a checkpoint")
        return "none: a smoke run saves nothing"
    output = receipt["output"]
    if output is None:
        raise _Failed("the run left no checkpoint")
    steps = saved_steps(workdir)
    if output["step"] not in steps:
        raise _Failed(f"{output['path']} is missing; there are {steps}")
    _expect("a newest checkpoint of step", steps[-1], output["step"])
    if receipt["status"] != "failed":
        _expect("in the checkpoint step", output["step"], receipt["steps"])
    # What the checkpoint itself says it was trained by.
    saved = saved_run(workdir, output["step"])["identity"]
    teacher = receipt["teacher"] or {}
    stated = identity(_config(receipt)) | {
        "teacher.sha256": teacher.get("sha256"),
        "student.sha256": receipt["student"]["sha256"],
        "data.rows": receipt["data"]["rows"],
    }
    if "cache" in teacher:
        stated["teacher.cache"] = teacher["cache"]
    for name in sorted(saved.keys() | stated.keys()):
        _expect(f"in the checkpoint {name}", saved.get(name), stated.get(name))
    return f"{output['path']}, of the same config, models and rows"


def _held_out(receipt: dict[str, Any], workdir: Path) -> str:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    evals = [e for line in lines if (e := json.loads(line))["kind"] == "eval"]
    for which in ("first", "final"):
        figures = receipt["held_out"][which]
        if figures is None:
            raise _Failed(f"the receipt has no {which} figures")
        found = next((e for e in evals if e["step"] == figures["step"]), None)
        _expect(f"in metrics.jsonl the {which} figures", found, {"kind": "eval", **figures})
    first, final = (receipt["held_out"][w] for w in ("first", "final"))
    name = "loss" if "loss" in first else "student_ce"  # logs before loss was a held-out figure
    return (
        f"as in metrics.jsonl; {name} {first[name]} at step {first['step']}, "
        f"{final[name]} at step {final['step']}"
    )


def _changed(receipt: dict[str, Any], workdir: Path) -> str:
    """Hashes the saved parameters and counts, layer by layer, which differ from the file's."""
    if receipt["smoke"]:
        return "not kept by a smoke run"
    output = receipt["output"]
    if output is None:
        raise _Failed("the run left no checkpoint")
    config, digest = _config(receipt), hashlib.sha256()
    table = open_shapes(config.student.path)

    def hashed() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in saved_params(workdir, output["step"]):
            provenance.add_tensor(digest, name, tensor)
            yield name, tensor

    changed = changed_tensors(hashed(), table, student_spec(config, table),
                              init=config.student.init, seed=config.train.seed)  # fmt: skip
    _expect("parameters of sha256", digest.hexdigest(), output["params_sha256"])
    same = [name for name, differs in changed.items() if not differs]
    total = len(changed)
    if same:
        shown = ", ".join(same[:_SHOWN]) + (", ..." if len(same) > _SHOWN else "")
        raise _Failed(
            f"{total - len(same)} of {total} tensors changed; as in the student's file: {shown}"
        )
    return f"{total} of {total} tensors changed; sha256 {output['params_sha256']}"


_CHECKS: dict[str, Callable[[dict[str, Any], Path], str]] = {
    "end": _ended,
    "config": _config_hash,
    "teacher": _model("teacher"),
    "student": _model("student"),
    "rows": _rows,
    "text": _text,
    "checkpoint": _checkpoint,
    "held-out": _held_out,
    "parameters": _changed,
}
