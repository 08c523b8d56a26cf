"""Losses of layers in a step: checks of their layers and names, and their first projections."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kdjax.errors import UserError
from kdjax.losses.layers import TAKEN, LayerLoss
from kdjax.models.decoder import DecoderFunctions, ModelFunctions, Params
from kdjax.models.states import STATES, check_states, hidden_and_states
from kdjax.training.teachers import TeacherKind

_POSITIONS = 64  # of the row that shapes are computed for


def choose_losses(
    extra: LayerLoss | Sequence[LayerLoss],
    student: ModelFunctions,
    teacher: ModelFunctions | tuple[ModelFunctions | None, ...] | None,
    kind: TeacherKind,
) -> tuple[LayerLoss, ...]:
    """Lists the losses of `make_step(extra=)`; raises `UserError` for missing layers.

    `teacher` is a tuple for several teachers.
    """
    given: Any = extra
    losses: tuple[LayerLoss, ...] = tuple(given) if isinstance(given, Sequence) else (given,)
    for loss in losses:
        if not isinstance(loss, LayerLoss):
            raise UserError(
                f"found extra={loss!r}; expected a kdjax.LayerLoss, which names the layers that "
                f'its function takes: LayerLoss(f, student=["blocks/3"]).'
            )
        for name in loss.student:
            _check_name(loss, "student", student, name)
        runs = kind.runs and teacher is not None and not isinstance(teacher, tuple)
        if loss.teacher and not runs:
            found = "several teachers" if isinstance(teacher, tuple) else "one that does not run"
            raise UserError(
                f"{loss.name}: found layers of the teacher {list(loss.teacher)}, and {found} "
                f"({kind.name}); expected one that does: dense, packed or float8."
            )
        for name in loss.teacher:
            _check_name(loss, "teacher", teacher, name)
    if len({loss.name for loss in losses}) < len(losses):
        names = ", ".join(loss.name for loss in losses)
        raise UserError(f"found extra losses called {names}; expected other names: name=...")
    return losses


def _check_name(loss: LayerLoss, side: str, functions: Any, name: str) -> None:
    if isinstance(functions, DecoderFunctions):
        try:
            check_states(functions.spec, name)
        except UserError as error:
            raise UserError(f"{loss.name}, the {side}: {error}") from None


def read_states(
    functions: Any, params: Params, *columns: Array, names: Sequence[str]
) -> tuple[Array, dict[str, Array]]:
    """Computes hidden states, and layers by name; without names the model runs as usual."""
    if not names:
        return functions.hidden(params, *columns), {}
    return hidden_and_states(functions, params, *columns, names=tuple(names))


def list_names(losses: Sequence[LayerLoss], side: str) -> tuple[str, ...]:
    """Layers of "student" or "teacher" that some loss reads, each once."""
    return tuple(dict.fromkeys(name for loss in losses for name in getattr(loss, side)))


def begin_projections(
    losses: Sequence[LayerLoss],
    student: ModelFunctions,
    params: Params,
    teacher: ModelFunctions | None,
    teacher_params: Params | None,
) -> dict[str, dict[str, Array]]:
    """Makes the projections by loss and layer, float32; losses without any are absent.

    Computes no layer. Raises `UserError` for widths that do not fit, for a function that does not
    return sums, and for a custom module that does not return its layers.
    """
    ids = jax.ShapeDtypeStruct((1, _POSITIONS), jnp.int32)
    batch: dict[str, Any] = dict.fromkeys(("tokens", "labels", "segment_ids", "positions"), ids)
    batch["weights"] = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    ours = _ask_shapes("student", student, params, ids, list_names(losses, "student"))
    theirs = _ask_shapes("teacher", teacher, teacher_params, ids, list_names(losses, "teacher"))
    projections, named = {}, set(TAKEN)
    for number, loss in enumerate(losses):
        begun = loss.begin(ours, theirs, number)
        sums = jax.eval_shape(loss.sum, ours, theirs, batch, begun)
        if clash := named & sums.keys():
            raise UserError(
                f"{loss.name}: found a sum called {min(clash)}, which metrics have already; "
                "expected another name."
            )
        named |= sums.keys()
        if begun:
            projections[loss.name] = begun
    return projections


def _ask_shapes(
    side: str, functions: Any, params: Any, ids: Any, names: tuple[str, ...]
) -> Mapping[str, Any]:
    if not names:
        return {}

    def read(params: Any, *columns: Any) -> Any:
        return read_states(functions, params, *columns, names=names)[1]

    try:
        states = jax.eval_shape(read, params, ids, ids, ids)
    except AttributeError as error:
        if "hidden_and_states" not in str(error):
            raise
        states = {}
    if lacking := [name for name in names if name not in states]:
        raise UserError(
            f"found no layer {lacking[0]!r} of the {side}; a custom module needs a "
            "method hidden_and_states(tokens, segment_ids, positions, names), which returns hidden "
            f"states and a dict of the named ones. Models of files have {STATES}."
        )
    return states
