"""A model opened and not yet loaded: a file, a folder, or a step that a run saved."""

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kdjax.config import split_layers
from kdjax.errors import MissingFileError, UserError
from kdjax.formats import TensorTable, content_hash, open_shapes, open_table
from kdjax.formats.saved import (
    RECEIPT,
    SavedTable,
    read_receipt,
    resolve_path,
    saved_run,
    saved_steps,
)
from kdjax.hub import MODEL, PREFIX, TOKENIZER, fetch_path, origin
from kdjax.models.arch import ArchSpec, spec_from_table
from kdjax.models.loading import count_parameters, tensor_names
from kdjax.models.names import renumber
from kdjax.models.tokenizer import Tokenizer, load_tokenizer

# How commands name the kinds of weights of `model.load_model`.
FORMS = {"dequant": "dense", "q4k": "packed", "fp8": "float8", "fp8_precise": "float8_precise"}
_log = logging.getLogger("kdjax")
_DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Form:
    """PATH[@dequant|q4k|fp8|fp8_precise[:bfloat16|float32]]: a model as commands name it."""

    path: str
    backend: str = "dequant"
    dtype: str = "bfloat16"

    @classmethod
    def parse(cls, text: str) -> "Form":
        """Raises `UserError` for an unknown form; a path may hold an @ if a form follows it."""
        path, at, form = text.rpartition("@")
        backend, _, dtype = form.partition(":")
        revision = text.startswith(PREFIX) and backend not in FORMS
        if not at or "/" in form or revision:
            return cls(text)
        if backend not in FORMS or (dtype or _DTYPES[0]) not in _DTYPES:
            raise UserError(
                f"{text!r}: found the form {form!r}; expected {' or '.join(FORMS)}, then "
                f"nothing or : and {' or '.join(_DTYPES)}, such as {path}@q4k:bfloat16."
            )
        return cls(path, backend, dtype or _DTYPES[0])

    def __str__(self) -> str:
        return f"{Path(self.path).name}@{self.backend}:{self.dtype}"

    @property
    def weights(self) -> str:
        """The form in the words of `load_model`."""
        return FORMS[self.backend]


@dataclasses.dataclass(frozen=True)
class Saved:
    """Which step of which run a checkpoint is, and how that run began."""

    workdir: Path
    step: int
    init: str  # "checkpoint" or "random"
    seed: int
    student: "Checkpoint"  # what the run began with: its header describes the step's tensors too


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model whose header was read, and nothing else of it; `open_checkpoint` makes one."""

    table: TensorTable
    spec: ArchSpec
    tokenizer_path: str = ""  # another file or folder that holds its tokenizer
    saved: Saved | None = None

    def __str__(self) -> str:
        if self.saved is not None:
            return f"{self.saved.workdir}, step {self.saved.step}"
        return self.table.paths[0].name

    @property
    def path(self) -> Path:
        """The step's folder, or the first file of the model; its name stands in messages."""
        if self.saved is not None:
            return self.saved.workdir / "checkpoints" / str(self.saved.step)
        return self.table.paths[0]

    @property
    def header(self) -> TensorTable:
        """The table whose metadata describes the model: that of the run's student for a step."""
        return self.table if self.saved is None else self.saved.student.table

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Read when first asked for. Raises `UserError` if there is none."""
        if self.tokenizer_path:
            return load_tokenizer(self.tokenizer_path)
        return load_tokenizer(self.header.paths[0], self.header)

    def fall_back(self, tokenizer: str) -> "Checkpoint":
        """The same, with the tokenizer at `tokenizer` if its own cannot be read.

        The tokens that its header lists must be those of the other, as far as both go. Raises
        `UserError` if they are not, and if there is no other.
        """
        try:
            self.tokenizer  # noqa: B018
            return self
        except UserError:
            if not tokenizer:
                raise
        other = dataclasses.replace(self, tokenizer_path=tokenizer)
        listed = self.header.metadata.get("tokenizer.ggml.tokens", ())
        pairs = list(zip(listed, other.tokenizer.tokens, strict=False))  # either may be padded
        for i, (own, read) in enumerate(pairs):
            if own != read:
                raise UserError(
                    f"{self}: found {own!r} at id {i} of its vocabulary and {read!r} at that of "
                    f"{tokenizer}; expected one vocabulary. Name the model's own tokenizer."
                )
        proof = f"all {len(pairs):,} tokens agree" if pairs else "it lists no tokens to compare"
        _log.warning("%s: tokenizer not read; %s stands for it: %s", self, tokenizer, proof)
        return other

    @functools.cached_property
    def names(self) -> dict[tuple[str, ...], list[str]]:
        """See `loading.tensor_names`."""
        return tensor_names(self.table, self.spec)

    @functools.cached_property
    def sha256(self) -> str:
        """Of the files' bytes, in hex; reads all of them when first asked for."""
        return content_hash(self.table)

    def describe(self) -> str:
        """One line for a log."""
        spec, head = self.spec, "tied" if self.spec.tied else "untied"
        cut = ", of which not all is here" if self.table.cut else ""
        return (
            f"{self}: {spec.family}, {spec.num_layers} layers, width {spec.hidden_size}, "
            f"{spec.vocab_size:,} rows, {head}, {count_parameters(spec) / 1e9:.3f} B parameters"
            f"{cut}"
        )


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    tokenizer: str = "",
    student: str = "",
    shapes: bool = False,
    whole: bool = True,
) -> Checkpoint:
    """Opens a GGUF, .apr or safetensors file, a Hugging Face folder, or a run's workdir or step.

    An `hf:` path of these is downloaded first (`kdjax.hub`).

    A folder with `checkpoints/` is a workdir, of which the newest step counts. A step has neither
    architecture nor tokenizer: they come from the student that its run began with, which is
    `student` or what the run's receipt names. `tokenizer` names another file or folder for the
    tokenizer alone; with `shapes` a folder may hold its `config.json` and no weights, with
    `whole=False` a file no more than its header. Reads headers only. Raises `MissingFileError` if
    there is nothing at `path`, `UserError` for what cannot be understood.
    """
    path = Path(fetch_path(path, TOKENIZER if shapes else MODEL))
    if (path / "checkpoints").is_dir():
        return open_step(path, student=student, tokenizer=tokenizer)
    if path.name.isdigit() and path.parent.name == "checkpoints":
        workdir, step = path.parent.parent, int(path.name)
        return open_step(workdir, step, student=student, tokenizer=tokenizer)
    table = (open_shapes if shapes else open_table)(path, whole=whole)
    return Checkpoint(table, spec_from_table(table), tokenizer)


class _LayersOf(TensorTable):
    """Some layers of a table, numbered anew; all else is as it was."""

    def __init__(self, table: TensorTable, layers: Sequence[int]):
        self.paths, self.metadata, self.cut = table.paths, table.metadata, table.cut
        self._table = table
        self._tensors = {
            name: (table.info(old)._replace(name=name), old)
            for old in table
            if (name := renumber(old, layers)) is not None
        }

    def holds(self, name: str) -> bool:
        """As of the table."""
        return self._table.holds(self._tensors[name][1])

    def raw(self, name: str) -> np.ndarray:
        """As of the table."""
        return self._table.raw(self._tensors[name][1])


def cut_layers(checkpoint: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """The same model with these of its layers alone, embedding and head kept; () keeps all.

    Raises `UserError` for a layer that it does not have.
    """
    if not layers:
        return checkpoint
    spec = checkpoint.spec
    if max(layers) >= spec.num_layers:
        raise UserError(
            f"{checkpoint}: found no layer {max(layers)} to keep; expected 0 to "
            f"{spec.num_layers - 1}. Mend student.layers."
        )
    local = tuple(spec.local[i] for i in layers) if spec.local else ()
    spec = dataclasses.replace(spec, num_layers=len(layers), local=local)
    return dataclasses.replace(checkpoint, table=_LayersOf(checkpoint.table, layers), spec=spec)


def open_step(
    workdir: Path, step: int | None = None, *, student: str = "", tokenizer: str = ""
) -> Checkpoint:
    """Opens a run's saved step, the newest by default; otherwise as `open_checkpoint`.

    Raises `MissingFileError` for a workdir or step that is not there.
    """
    if not workdir.is_dir():
        raise MissingFileError(f"{workdir}: no such folder; expected the --workdir of a run.")
    steps = saved_steps(workdir)
    if not steps:
        raise MissingFileError(
            f"{workdir} holds no complete checkpoint; expected some under {workdir}/checkpoints. "
            "Name the --workdir of a run that has saved."
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise MissingFileError(
            f"found no step {step} in {workdir}; expected one of {', '.join(map(str, steps))}."
        )
    student, tokenizer = run_sources(workdir, student, tokenizer)
    identity = saved_run(workdir, step)["identity"]
    source = open_checkpoint(student, tokenizer=tokenizer, shapes=True)
    source = cut_layers(source, split_layers(identity.get("student.layers", "")))
    table = SavedTable(workdir, step)
    # The run may have tied a head that the student's file stores twice, or untied one.
    spec = dataclasses.replace(source.spec, tied="head" not in table)
    saved = Saved(workdir, step, identity["student.init"], int(identity["train.seed"]), source)
    return Checkpoint(table, spec, source.tokenizer_path, saved)


def run_sources(workdir: Path, student: str = "", tokenizer: str = "") -> tuple[str, str]:
    """Paths of the student and of the tokenizer that a run began with, or those given.

    From the run's receipt; relative paths count from the folder that the run was started in, and
    what the Hub's cache has no more is fetched again. The
    tokenizer is "" if it is the student's own. Raises `MissingFileError` if nobody says which
    student it was, or it is there no more.
    """
    receipt = _receipt_paths(workdir)
    student = fetch_path(student or receipt.get("student", ""), TOKENIZER)
    if not student:
        raise MissingFileError(
            f"{workdir} does not say which student it began with (no {RECEIPT} with its config): "
            "name it with --student=PATH, the run's student.path."
        )
    if not Path(student).exists():
        raise MissingFileError(
            f"{student}: no such file or folder; expected the student that the run in {workdir} "
            "began with, for its config and tokenizer. Say where it is now: --student=PATH."
        )
    ours = "" if tokenizer else fetch_path(receipt.get("tokenizer", ""), TOKENIZER)
    return student, tokenizer or (ours if Path(ours).exists() else "")


def _receipt_paths(workdir: Path) -> dict[str, str]:
    try:
        receipt = read_receipt(workdir) or {}
        config = receipt["config"]
        data = config.get("data") or {}
        named = {"student": config["student"]["path"], "tokenizer": data.get("tokenizer")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}

    def absolute(path: str) -> str:
        path = os.path.expanduser(path)
        return path if Path(path).exists() else origin(path) or resolve_path(receipt, path)

    return {name: absolute(path) for name, path in named.items() if path}
