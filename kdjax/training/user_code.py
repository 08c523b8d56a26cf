"""User-defined Python objects in a run, in place of parts of the config."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from kdjax.config import OWN, USER_STUDENT, Config, flatten, refuse_conflicts
from kdjax.data.pipeline import BatchSource
from kdjax.device.placement import Placement
from kdjax.losses.divergences import FunctionDivergence, write_divergence
from kdjax.losses.kd import KDLoss
from kdjax.losses.layers import LayerLoss
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from kdjax.training.hooks import Hook, StepRecord
from kdjax.training.step import PARTS, TrainState, check_kind

_EXPECTED: dict[str, tuple[Any, str]] = {
    "batches": (BatchSource, "an object with next, get_state and set_state"),
    **PARTS,
    "student": (nnx.Module, "a Flax NNX module with hidden and head_weight"),
    "on_step": (Callable, "a function of a StepRecord"),
    "on_eval": (Callable, "a function of held-out figures"),
}
_DECIDING = ("optimizer", "student", "extra")  # they decide which arrays a state has


@dataclasses.dataclass(frozen=True)
class UserCode:
    """Parts of a run that `distill` takes as Python objects; None: the config decides.

    Raises `UserError` for an object of a wrong type.
    """

    batches: BatchSource | None = None
    optimizer: optax.GradientTransformation | None = None
    loss: KDLoss | None = None
    student: nnx.Module | None = None
    extra: LayerLoss | Sequence[LayerLoss] = ()
    on_step: Callable[[StepRecord], Any] | None = None
    on_eval: Callable[[Mapping[str, float]], Any] | None = None

    def __post_init__(self) -> None:
        for name, (kind, wanted) in _EXPECTED.items():
            value = getattr(self, name)
            if value is not None:
                check_kind(name, value, kind, wanted)

    def rewrite(self, config: Config) -> Config:
        """Copies the config with the loss's settings, as far as fields exist for them.

        With a custom student the file is read only for its tokenizer and its shapes. Raises
        `UserError` for settings that such a student cannot follow.
        """
        if self.loss is not None:
            settled, _ = self.loss.settle()
            loss = dataclasses.replace(
                config.loss,
                temperature=settled.temperature,
                alpha=settled.alpha,
                final_temperature=0.0,
                final_alpha=-1.0,
                divergence=write_divergence(self.loss.divergence) or "forward_kl",
            )
            config = dataclasses.replace(config, loss=loss)
        if self.student is None:
            return config
        refuse_conflicts(flatten(config) | {USER_STUDENT: type(self.student).__name__})
        student = dataclasses.replace(config.student, init="random")
        return dataclasses.replace(config, student=student)

    def name_loss(self, config: Config) -> Config:
        """Copies the config with the name of a user-defined divergence, `own:hellinger`."""
        if self.loss is None or write_divergence(self.loss.divergence) is not None:
            return config
        loss = dataclasses.replace(config.loss, divergence=OWN + _name(self.loss.divergence))
        return dataclasses.replace(config, loss=loss)

    def open_student(self, tokenizer: Tokenizer, placement: Placement) -> Model | None:
        """Makes a model of the custom module on these devices; None without one."""
        if self.student is None:
            return None
        return Model.from_module(self.student, tokenizer).replace(placement=placement)

    def describe(self, state: TrainState) -> dict[str, str]:
        """Names the user-defined objects, by the arguments of `distill`; `state` may be shapes.

        A divergence that configs can name is not user-defined.
        """
        found: dict[str, str] = {}
        for name in ("batches", "on_step", "on_eval"):
            if (value := getattr(self, name)) is not None:
                found[name] = _name(value)
        if self.loss is not None:
            named: list[Any] = [self.loss.temperature, self.loss.alpha]
            named = [schedule for schedule in named if callable(schedule)]
            if write_divergence(self.loss.divergence) is None:
                named.insert(0, self.loss.divergence)
            if named:
                found["loss"] = ", ".join(map(_name, named))
        if self.optimizer is not None:
            found["optimizer"] = f"state {_hash_shapes(state.opt_state)}"
        if self.student is not None:
            found["student"] = f"{_name(self.student)}, arrays {_hash_shapes(state.params)}"
        if self.extra:
            losses = self.extra if isinstance(self.extra, Sequence) else (self.extra,)
            arrays = _hash_shapes(getattr(state, "extra", None))
            found["extra"] = f"{', '.join(loss.name for loss in losses)}, arrays {arrays}"
        return found

    def identify(self, state: TrainState) -> dict[str, str]:
        """Part of a run's identity: the objects that decide which arrays its state has."""
        said = self.describe(state)
        return {f"own.{name}": said[name] for name in _DECIDING if name in said}

    def identify_finished(self, saved: Mapping[str, str]) -> dict[str, str]:
        """Part of a finished run's identity; builds no state."""
        given = [f"own.{n}" for n in _DECIDING if getattr(self, n) not in (None, ())]
        return {name: saved.get(name, "given") for name in given}

    @property
    def hooks(self) -> list[Hook]:
        """Makes a hook of the functions."""
        return [Calls(self.on_step, self.on_eval)] if self.on_step or self.on_eval else []


NO_CODE = UserCode()


class Calls(Hook):
    """Calls a user's functions: each step's record, and held-out figures with their `step`.

    `on_step` stops the run by returning True.
    """

    def __init__(
        self,
        on_step: Callable[[StepRecord], Any] | None,
        on_eval: Callable[[Mapping[str, float]], Any] | None,
    ):
        self._on_step, self._on_eval = on_step, on_eval

    def step_end(self, record: StepRecord) -> bool:
        said = self._on_step and self._on_step(record)
        # Accepts NumPy's and JAX's True, but no number: `file.write` returns one.
        return said is True or (getattr(said, "dtype", None) == "bool" and bool(said))

    def eval_end(self, step: int, figures: Mapping[str, float]) -> None:
        if self._on_eval is not None:
            self._on_eval({"step": step} | dict(figures))


def _name(code: Any) -> str:
    """Name, in its module, of a user's function or of an object's class."""
    if isinstance(code, FunctionDivergence):
        code = code.function
    return getattr(code, "__qualname__", type(code).__qualname__)


def _hash_shapes(tree: Any) -> str:
    """A short hash of names, shapes and types of a tree's arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    text = "\n".join(f"{jax.tree_util.keystr(p)} {x.shape} {x.dtype}" for p, x in leaves)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
