"""What is evaluated: a workdir, a checkpoint of one, a model file or a Hugging Face folder."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kdjax.device.placement import Placement
from kdjax.device.sharding import parameter_shardings
from kdjax.errors import MissingFileError, UserError
from kdjax.formats import TensorTable, open_shapes, open_table
from kdjax.models.arch import ArchSpec, spec_from_table
from kdjax.models.checkpoint import Form
from kdjax.models.decoder import Compute, functional
from kdjax.models.model import PROVIDERS, TeacherInfo, TeacherLogitsProvider
from kdjax.models.tokenizer import Tokenizer, load_tokenizer
from kdjax.models.weights import to_bits
from kdjax.training.saving import saved_names, saved_params, saved_run, saved_steps

_RECEIPT = "receipt.json"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint, and how its run began."""

    workdir: Path
    step: int
    init: str  # "checkpoint" or "random"
    seed: int


@dataclasses.dataclass(frozen=True)
class Target:
    """A model opened and not yet loaded; `table` is the student's source of a checkpoint."""

    form: Form
    table: TensorTable
    spec: ArchSpec
    tokenizer: Tokenizer
    saved: Saved | None = None

    def __str__(self) -> str:
        if self.saved is None:
            return str(self.form)
        return f"{self.saved.workdir}, step {self.saved.step}, {self.form.dtype}"

    @property
    def compute(self) -> Compute:
        """How it computes, one document a row."""
        dtype = jnp.dtype(self.form.dtype)
        return Compute(dtype=dtype, param_dtype=dtype)

    @property
    def bos(self) -> int | None:
        """The id that its file asks to put before text, if any."""
        metadata = self.table.metadata
        wanted = metadata.get("tokenizer.ggml.add_bos_token")
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        return int(bos) if wanted and bos is not None else None

    def precision(self) -> Any:
        """Context in which a float32 form multiplies in float32, as `forms.precision`."""
        exact = self.form.dtype == "float32"
        return jax.default_matmul_precision("highest" if exact else "default")

    def load(self, mesh: Mesh, max_segments: int = 1) -> TeacherLogitsProvider:
        """Its weights on the mesh. Raises what reading or decoding them raises."""
        compute = dataclasses.replace(
            self.compute, max_segments=max_segments, placement=Placement.on(mesh)
        )
        if self.saved is None:
            return PROVIDERS[self.form.backend](self.table, self.spec, compute, mesh)
        apply, abstract = functional(self.spec, compute)
        places = parameter_shardings(abstract, mesh)
        params: dict[str, Any] = {}
        for name, array in saved_params(self.saved.workdir, self.saved.step):
            path = name.split("/")
            node, place, want = params, places, abstract
            for key in path[:-1]:
                node, place, want = node.setdefault(key, {}), place[key], want[key]
            leaf = want[path[-1]]
            if leaf.shape != array.shape:
                raise UserError(
                    f"{self}: found {name} of shape {array.shape}, expected {leaf.shape}: "
                    "--student is not the model that this run began with. Name that one."
                )
            on_device = jax.device_put(np.asarray(array).astype(leaf.dtype), place[path[-1]])
            node[path[-1]] = to_bits(on_device) if jax.default_backend() == "cpu" else on_device
        resident = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        info = TeacherInfo(
            f"checkpoint ({self.form.dtype})",
            self.spec.vocab_size,
            resident,
            str(self.saved.workdir),
        )
        return TeacherLogitsProvider(apply, params, info)


def open_target(text: str, student: str = "", tokenizer: str = "") -> Target:
    """Opens PATH[@BACKEND[:DTYPE]]; a folder with `checkpoints/` is a workdir, the newest counts.

    A checkpoint has neither shapes nor tokenizer: they come from the student's source, `student` or
    what the run's receipt names. Raises `MissingFileError` if there is nothing at PATH, and
    `UserError` for what cannot be understood.
    """
    form = Form.parse(text)
    path = Path(form.path)
    saved = None
    if (path / "checkpoints").is_dir():
        saved = path, _newest(path)
    elif path.name.isdigit() and path.parent.name == "checkpoints" and path.is_dir():
        saved = path.parent.parent, int(path.name)
    if saved is None:
        table = open_table(path)
        spec = spec_from_table(table)
        return Target(form, table, spec, load_tokenizer(tokenizer or path))
    return _open_saved(form, *saved, student, tokenizer)


def _newest(workdir: Path) -> int:
    steps = saved_steps(workdir)
    if not steps:
        raise MissingFileError(
            f"{workdir} holds no complete checkpoint; let the run save one first."
        )
    return steps[-1]


def _open_saved(form: Form, workdir: Path, step: int, student: str, tokenizer: str) -> Target:
    receipt = _receipt(workdir)
    source = student or receipt.get("student", "")
    if not source:
        raise MissingFileError(
            f"{workdir} does not say which student it began with (no {_RECEIPT}): name it with "
            "--student=PATH, the run's student.path."
        )
    if form.backend != "dequant":
        raise UserError(f"{workdir}@{form.backend}: a checkpoint has no such form; leave it out.")
    table = open_shapes(source)
    tied = "head" not in saved_names(workdir, step)
    spec = dataclasses.replace(spec_from_table(table), tied=tied)
    identity = saved_run(workdir, step)["identity"]
    saved = Saved(workdir, step, identity["student.init"], int(identity["train.seed"]))
    text = load_tokenizer(tokenizer or receipt.get("tokenizer") or source)
    return Target(form, table, spec, text, saved)


def _receipt(workdir: Path) -> dict[str, str]:
    """Paths of the run's student and tokenizer, as far as its receipt names files still there."""
    try:
        receipt = json.loads((workdir / _RECEIPT).read_text())
        config, start = receipt["config"], receipt["cwd"]
        named = {"student": config["student"]["path"], "tokenizer": config["data"]["tokenizer"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    paths = {k: os.path.join(start, os.path.expanduser(v)) for k, v in named.items() if v}
    return {k: v for k, v in paths.items() if Path(v).exists()}
