"""Opens the evaluated model: a workdir, a step of one, a model file or a Hugging Face folder."""

from typing import NamedTuple

from jax.sharding import Mesh

from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.models.checkpoint import Checkpoint, ModelArgument, open_checkpoint
from kdjax.models.model import Model, load_model

_ALIKE = 0.9  # share of equal tokens; names of special ones may differ between two files


class Target(NamedTuple):
    """A checkpoint and the form in which to load it."""

    form: ModelArgument
    checkpoint: Checkpoint

    def __str__(self) -> str:
        if self.checkpoint.saved is None:
            return str(self.form)
        return f"{self.checkpoint}, {self.form.dtype}"

    def load(self, mesh: Mesh, max_segments: int = 1) -> Model:
        """Loads its weights onto the mesh. Raises what reading or decoding them raises."""
        return load_model(
            self.checkpoint,
            placement=Placement.on(mesh),
            weights=self.form.weights,
            dtype=self.form.dtype,
            max_segments=max_segments,
        )


def open_target(text: str, student: str = "", tokenizer: str = "", *, fallback: str = "") -> Target:
    """Opens PATH[@WEIGHTS[:DTYPE]]; see `open_checkpoint`. The tokenizer is read at once.

    The tokenizer at `fallback` replaces one that cannot be read; see `Checkpoint.fall_back`.
    """
    form = ModelArgument.parse(text)
    checkpoint = open_checkpoint(form.path, student=student, tokenizer=tokenizer)
    if checkpoint.whole_step is not None and form.weights != "dense":
        raise UserError(f"{text}: a checkpoint has no such form; leave it out.")
    if tokenizer and checkpoint.saved is None:  # a run may have trained another one
        checkpoint.check_tokens(_ALIKE)
    return Target(form, checkpoint.fall_back(fallback))
