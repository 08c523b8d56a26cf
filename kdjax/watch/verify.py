"""Rechecks a receipt against the files that it names, and that training changed the student."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.config import SELF, Config, RemovedError, find_removed, map_files, read_section
from kdjax.data.rows import packed_hash
from kdjax.data.sources import split_sources
from kdjax.errors import CheckError, UserError, suggest_path
from kdjax.formats import TensorTable, content_hash, open_table
from kdjax.formats.saved import RECEIPT, resolve_path, saved_params, saved_run, saved_steps
from kdjax.training.forms import form_of
from kdjax.training.identity import identify, list_differences
from kdjax.training.inputs import hash_divergence, hash_rounding, hash_text, name_hashes
from kdjax.training.pair import open_student
from kdjax.training.saving import changed_tensors
from kdjax.watch import provenance
from kdjax.watch.writers import METRICS

_DAMAGED = ValueError, LookupError, TypeError, AttributeError, RecursionError  # of a receipt
_SHOWN = 5  # failures in the message
_APART = ("step", "tokens")  # of held-out figures: when, and over how many positions


class _Failed(Exception):
    """A check that did not hold; the text says what was found and what the receipt says."""


def verify(workdir: Path) -> list[str]:
    """Rechecks the run of `workdir`; returns one line a check. Raises `CheckError` if any fails.

    Rehashes the config, both models, the packed rows, their source text and the checkpoint's
    parameters. Compares the parameters with the student's file: every tensor must have changed. A
    missing file fails its check. Uses the CPU, and host memory for the largest parameter.
    """
    run = _Recheck(workdir)
    _stay_on_the_cpu()
    lines, failures = [], []
    for name, check in _CHECKS.items():
        try:
            lines.append(f"ok    {name}: {check(run)}")
        except RemovedError:
            raise
        except _Failed as problem:
            failures.append(f"{name}: {problem}")
        except (OSError, *_DAMAGED) as problem:
            failures.append(f"{name}: cannot be checked: {type(problem).__name__}: {problem}")
    if failures:
        shown = failures[:_SHOWN]
        if len(failures) > _SHOWN:
            shown.append(f"and {len(failures) - _SHOWN} more")
        listed = "\n  ".join(shown)
        raise CheckError(
            f"{workdir / RECEIPT}: {len(failures)} of {len(_CHECKS)} checks failed:\n  {listed}"
            "\nRestore the files it names, or take the run as one without evidence."
        )
    return lines


def _stay_on_the_cpu() -> None:
    from jax._src import xla_bridge  # no public function says whether JAX has started

    if not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")


def _expect(what: str, found: object, recorded: object) -> None:
    if found != recorded:
        raise _Failed(f"found {what} {found}, the receipt says {recorded}")


def _kept_the_start(held_out: Mapping[str, Any]) -> bool:
    """Whether a rounded run of an earlier version ended with the student before training.

    Its last figures are its first, those of its masters among them.
    """
    ends = [held_out[which] or {} for which in ("first", "final")]
    first, final = ({n: x for n, x in end.items() if n not in _APART} for end in ends)
    return "masters_loss" in first and first == final


class _Recheck:
    """A run to recheck. Each check returns its result as text, or raises `_Failed`."""

    def __init__(self, workdir: Path):
        path = workdir / RECEIPT
        try:
            receipt = provenance.read(workdir)
        except ValueError as error:
            raise UserError(
                f"{path}: found {error}; expected what a run of kdjax wrote."
            ) from error
        if receipt is None:
            raise UserError(
                f"{path}: no such file; expected the receipt of a run. Name the run's --workdir."
                f"{suggest_path(workdir)}"
            )
        self.workdir, self.receipt = workdir, receipt

    @functools.cached_property
    def config(self) -> Config:
        """The run's config, with paths that do not depend on the current directory."""
        nested = self.receipt["config"]
        # Receipts of older versions lack newer fields, which have their defaults.
        known = {n: x for n, x in nested.items() if n in vars(Config()) or find_removed(n)}
        config = read_section(Config(), known)
        for section, name in (
            (config.data, "tokenizer"),
            (config.student, "path"),
            (config.student, "imatrix"),
            (config.student, "start"),
            (config.teacher, "path"),
        ):
            if (path := getattr(section, name)) not in ("", SELF):
                setattr(section, name, resolve_path(self.receipt, path))
        for section, name in (
            (config.data, "train"),
            (config.data, "heldout"),
            (config.rollout, "prompts"),
        ):
            setattr(section, name, self._resolve_text(getattr(section, name)))
        resolve = functools.partial(resolve_path, self.receipt)
        config.loss.divergence = map_files(config.loss.divergence, resolve)
        return config

    def _resolve_text(self, names: str) -> str:
        paths, packages = split_sources(names)
        paths = [resolve_path(self.receipt, path) for path in paths]
        paths += [f"python:{','.join(packages)}"] if packages else []
        return ",".join(paths)

    @property
    def python(self) -> dict[str, str]:
        """User code in the run, by the arguments of `distill`; empty in older receipts."""
        return self.receipt.get("unhashed_python", {})

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Hashes of the identity's text and prompts, from today's files."""
        begun = self.receipt["data"]["rows"]
        return hash_text(self.config, open_student(self.config).tokenizer, begun)

    def end(self) -> str:
        if self.receipt["status"] == "running":
            raise _Failed("status is running: the run goes on, or was killed; resume it to its end")
        end = self.receipt["exit"]
        return f"{end['reason']}, status {end['status']}, {self.receipt['steps']} steps"

    def config_hash(self) -> str:
        receipt = self.receipt
        sha = provenance.config_hash(receipt["config"])
        _expect("a config of hash", sha, receipt["config_sha256"])
        _expect("in the config seed", receipt["config"]["train"]["seed"], receipt["seed"])
        return f"sha256 {sha}" + self._tell_python()

    def _tell_python(self) -> str:
        files = hash_divergence(self.config.loss)
        _expect("files", files, name_hashes(self.receipt.get("hashed_python", {})))
        said = "".join(f"; {name}: {sha}" for name, sha in files.items())
        named = ", ".join(f"{k} ({v})" for k, v in self.python.items())
        return said + (named and f"; of no hash is the code given as Python: {named}")

    def teacher(self) -> str:
        path = self.config.teacher.path
        if not path:
            known = {k: v for k, v in (self.receipt["teacher"] or {}).items() if k != "cache"}
            _expect("no teacher in the config and in the receipt", {}, known)
            cached = self.config.teacher.cache
            return f"none: {'what it said is cached' if cached else 'trained on the text alone'}"
        if path == SELF:
            teacher = form_of(self.config.student).find_start(open_student(self.config))
            return self._recheck_model("teacher", teacher.table)
        return self._recheck_model("teacher", open_table(path))

    def student(self) -> str:
        return self._recheck_model("student", open_student(self.config).table)

    def _recheck_model(self, side: str, table: TensorTable) -> str:
        sha = content_hash(table)
        _expect(f"in {table.paths[0]} sha256", sha, self.receipt[side]["sha256"])
        return f"{table.paths[0]}, sha256 {sha}"

    def rows(self) -> str:
        data = self.receipt["data"]
        if data["packed_sha256"] is None:
            raise _Failed("the run could not hash its packed rows")
        sha = packed_hash(Path(data["folder"]))
        _expect(f"in {data['folder']} sha256", sha, data["packed_sha256"])
        return f"{data['folder']}, sha256 {sha}"

    def text(self) -> str:
        key = self.hashes["data.rows"]
        _expect("text of key", key, self.receipt["data"]["rows"])
        return f"key {key}"

    @property
    def output(self) -> dict[str, Any]:
        """The receipt's entry of the newest checkpoint."""
        if self.receipt["output"] is None:
            raise _Failed("the run left no checkpoint")
        return self.receipt["output"]

    def checkpoint(self) -> str:
        receipt, steps = self.receipt, saved_steps(self.workdir)
        if receipt["smoke"]:
            if steps:
                raise _Failed("a smoke run saves nothing, but there is a checkpoint")
            return "none: a smoke run saves nothing"
        path, step = self.output["path"], self.output["step"]
        if step not in steps:
            raise _Failed(f"{path} is missing; there are {steps}")
        _expect("a newest checkpoint of step", steps[-1], step)
        if receipt["status"] != "failed":
            _expect("in the checkpoint step", step, receipt["steps"])
        # The checkpoint's record of its config and inputs.
        saved = saved_run(self.workdir, step)["identity"]
        teacher = receipt["teacher"] or {}
        contents = {
            "teacher.sha256": teacher.get("sha256"),
            "student.sha256": receipt["student"]["sha256"],
            "data.rows": receipt["data"]["rows"],
        }
        if "cache" in teacher:
            contents["teacher.cache"] = teacher["cache"]
        if "rollout.prompts" in saved:
            contents["rollout.prompts"] = self.hashes.get("rollout.prompts")
        contents |= hash_rounding(self.config.student) | hash_divergence(self.config.loss)
        named = {f"own.{name}": text for name, text in self.python.items()}
        contents |= {name: text for name, text in named.items() if name in saved}
        for name, was, stated in list_differences(saved, identify(self.config, contents)):
            _expect(f"in the checkpoint {name}", was, stated)
        return f"{path}, of the same config, models and rows"

    def held_out(self) -> str:
        lines = (self.workdir / METRICS).read_text().splitlines()
        logged = {e["step"]: e for line in lines if (e := json.loads(line))["kind"] == "eval"}
        moves = []
        for which in ("first", "final"):
            figures = self.receipt["held_out"][which]
            if figures is None:
                raise _Failed(f"the receipt has no {which} figures")
            entry = logged.get(figures["step"])
            _expect(f"in {METRICS} the {which} figures", entry, {"kind": "eval", **figures})
            moves.append(f"loss {figures['loss']} at step {figures['step']}")
        return f"as in {METRICS}; {', '.join(moves)}"

    def parameters(self) -> str:
        """Hashes the saved parameters and counts, layer by layer, which differ from the file's."""
        if self.receipt["smoke"]:
            return "not kept by a smoke run"
        output, config, digest = self.output, self.config, hashlib.sha256()

        def read_params() -> Iterator[tuple[str, np.ndarray]]:
            for name, tensor in saved_params(self.workdir, output["step"]):
                if not np.isfinite(tensor).all():
                    raise _Failed(f"found numbers in {name} that are not finite; expected none")
                provenance.add_tensor(digest, name, tensor)
                yield name, tensor

        if "student" in self.python:
            for _ in read_params():
                pass
            _expect("parameters of sha256", digest.hexdigest(), output["params_sha256"])
            return f"a module of your own, what it began with is not kept; {digest.hexdigest()}"
        student, init, seed = open_student(config), config.student.init, config.train.seed
        begun = form_of(config.student).draw(student, seed)
        changed = changed_tensors(
            read_params(), student.table, student.spec, init=init, seed=seed, begun=begun
        )
        _expect("parameters of sha256", digest.hexdigest(), output["params_sha256"])
        same = [name for name, differs in changed.items() if not differs]
        count = f"{len(changed) - len(same)} of {len(changed)} tensors changed"
        if len(same) == len(changed) and _kept_the_start(self.receipt["held_out"]):
            return f"{count}: an earlier version saved the student before training, the better"
        if same:
            shown = ", ".join(same[:_SHOWN]) + (", ..." if len(same) > _SHOWN else "")
            raise _Failed(f"{count}; as in the student's file: {shown}")
        return f"{count}; sha256 {output['params_sha256']}"


_CHECKS: dict[str, Callable[[_Recheck], str]] = {
    "end": _Recheck.end,
    "config": _Recheck.config_hash,
    "teacher": _Recheck.teacher,
    "student": _Recheck.student,
    "rows": _Recheck.rows,
    "text": _Recheck.text,
    "checkpoint": _Recheck.checkpoint,
    "held-out": _Recheck.held_out,
    "parameters": _Recheck.parameters,
}
