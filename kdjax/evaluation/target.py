"""What is evaluated: a workdir, a step of one, a model file or a Hugging Face folder, in a form."""

import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.formats import TensorTable
from kdjax.models.arch import ArchSpec
from kdjax.models.checkpoint import Checkpoint, Form, Saved, open_checkpoint
from kdjax.models.model import Model, load_model
from kdjax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Target:
    """A checkpoint and the form in which it is to be loaded."""

    form: Form
    checkpoint: Checkpoint

    def __str__(self) -> str:
        return str(self.form) if self.saved is None else f"{self.checkpoint}, {self.form.dtype}"

    @property
    def table(self) -> TensorTable:
        """The table whose metadata describes the model: of a step, that of its student."""
        return self.checkpoint.header

    @property
    def spec(self) -> ArchSpec:
        return self.checkpoint.spec

    @property
    def tokenizer(self) -> Tokenizer:
        return self.checkpoint.tokenizer

    @property
    def saved(self) -> Saved | None:
        return self.checkpoint.saved

    @property
    def bos(self) -> int | None:
        return self.checkpoint.bos

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """As `Model.precision`."""
        exact = self.form.dtype == "float32"
        return jax.default_matmul_precision("highest" if exact else "default")

    def load(self, mesh: Mesh, max_segments: int = 1) -> Model:
        """Its weights on the mesh. Raises what reading or decoding them raises."""
        return load_model(
            self.checkpoint,
            placement=Placement.on(mesh),
            weights=self.form.weights,
            dtype=self.form.dtype,
            max_segments=max_segments,
        )


def open_target(text: str, student: str = "", tokenizer: str = "") -> Target:
    """Opens PATH[@BACKEND[:DTYPE]]; see `open_checkpoint`. The tokenizer is read at once."""
    form = Form.parse(text)
    checkpoint = open_checkpoint(form.path, student=student, tokenizer=tokenizer)
    if checkpoint.saved is not None and form.backend != "dequant":
        raise UserError(f"{text}: a checkpoint has no such form; leave it out.")
    checkpoint.tokenizer  # noqa: B018  # a model without one cannot be evaluated
    return Target(form, checkpoint)
