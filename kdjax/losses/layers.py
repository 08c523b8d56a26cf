"""Losses of layers, added to the divergence: hidden states, attention relations, custom ones.

Letters: B rows, T positions, D hidden width, H heads.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from kdjax.errors import UserError
from kdjax.models.kernels.common import EXCLUDED

# By name, as `states.STATES` says: [B, T, D], or [B, T, H, width].
LayerStates = Mapping[str, Array]
LayerFunction = Callable[[LayerStates, LayerStates, Mapping[str, Array]], Any]
TAKEN = ("loss", "ce", "divergence", "grad_norm", "tokens", "learning_rate", "step")


class ExtraSums(NamedTuple):
    """Held-out sums of a step with layer losses."""

    sums: Any  # the sums of a step without layer losses
    extra: dict[str, Array]  # by name, without their weights
    total: Float[Array, ""]  # weighted sum of the layer losses, added to the loss


@dataclasses.dataclass(frozen=True, eq=False)
class LayerLoss:
    """A loss of hidden states, added to the divergence: `make_step(..., extra=)`.

    `function(student_layers, teacher_layers, batch)` returns a number, or several by name: each a
    sum over the batch's positions, weighted by `batch["weights"]`. It gets the layers that
    `student` and `teacher` name, and no others are stored: "embed", "blocks/3" (the output of layer
    3, `[B, T, D]` in the dtype of computation), "blocks/3/attn/q", "k" or "v" (`[B, T, H, width]`,
    rotated). The teacher's have no gradient. The minimised loss is that of `KDLoss` plus `weight`
    times these, divided by the count of trained positions; metrics have each without its weight.

    `project` names student's layers that a trained matrix projects before the function sees them.
    A value is the projected width, or the initial matrix `[width, D]`, or a teacher's layer whose
    width to take if it differs. Raises `UserError` for a name that metrics already have, and if
    `student` is empty.

        def first_layers(student, teacher, batch):
            distance = jnp.mean((student["blocks/0"] - teacher["blocks/0"]) ** 2, axis=-1)
            return jnp.sum(batch["weights"] * distance)

        extra = kdjax.LayerLoss(first_layers, ["blocks/0"], ["blocks/0"], project={"blocks/0": 64})
    """

    function: LayerFunction
    student: Sequence[str]
    teacher: Sequence[str] = ()
    weight: float = 1.0
    name: str = "extra"
    project: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in TAKEN:
            raise UserError(f"name={self.name!r}: metrics have it already; expected another.")
        for side, names in (("student", self.student), ("teacher", self.teacher)):
            if isinstance(names, str) or not (names or side == "teacher"):
                raise UserError(
                    f"{self.name}: found {side}={names!r}; expected a list of layers, such as "
                    '["blocks/3"].'
                )
        if odd := sorted(set(self.project) - set(self.student)):
            raise UserError(f"project={odd}: expected names of student={list(self.student)}.")
        for name, asked in self.project.items():
            named, none = isinstance(asked, str), isinstance(asked, int) and asked < 1
            if none or (named and asked not in self.teacher):
                raise UserError(
                    f"{self.name}: found project={{{name!r}: {asked!r}}}; expected a width, a "
                    f"matrix or a name of teacher={list(self.teacher)}."
                )

    def begin(
        self, ours: Mapping[str, Any], theirs: Mapping[str, Any], number: int
    ) -> dict[str, Array]:
        """Makes the initial projections, float32; `ours`, `theirs` are layers or shapes.

        Raises `UserError` for a matrix of another width than its layer.
        """
        found = {}
        for place, (name, asked) in enumerate(sorted(self.project.items())):
            width = _check_hidden(self.name, name, ours[name]).shape[-1]
            if isinstance(asked, str):
                _check_hidden(self.name, asked, theirs[asked])
                if theirs[asked].shape[-1] == width:
                    continue
                asked = theirs[asked].shape[-1]
            if isinstance(asked, int):
                key = jax.random.fold_in(jax.random.key(number), place)
                found[_key(name)] = jax.random.normal(key, (asked, width)) / math.sqrt(width)
                continue
            matrix = jnp.asarray(asked, jnp.float32)
            if matrix.ndim != 2 or matrix.shape[1] != width:
                raise UserError(
                    f"{self.name}: found a projection {list(matrix.shape)} of {name}; expected "
                    f"[width, {width}]: the student's hidden states are {width} wide."
                )
            found[_key(name)] = matrix
        return found

    def sum(
        self,
        ours: LayerStates,
        theirs: LayerStates,
        batch: Mapping[str, Array],
        projections: Mapping[str, Array],
    ) -> dict[str, Float[Array, ""]]:
        """Computes the sums by name; raises `UserError` if the function returns something else."""
        layers = {name: ours[name] for name in self.student}
        for name, x in layers.items():
            matrix = projections.get(_key(name))
            if matrix is not None:
                layers[name] = jnp.einsum("BTD,ED->BTE", x, matrix.astype(x.dtype))
        given = self.function(layers, {name: theirs[name] for name in self.teacher}, batch)
        named = given if isinstance(given, Mapping) else {"": given}
        sums = {}
        for name, value in named.items():
            found = () if isinstance(value, Real) else getattr(value, "shape", value)
            if found != ():
                raise UserError(
                    f"{self.name}: {self.function} returned {found}; "
                    "expected a number, the sum over the batch's positions."
                )
            sums[f"{self.name}_{name}" if name else self.name] = jnp.asarray(value, jnp.float32)
        return sums


def _check_hidden(loss: str, name: str, x: Any) -> Any:
    """Returns a layer of hidden states; raises `UserError` for a layer with an axis of heads."""
    if len(x.shape) != 3:
        raise UserError(
            f"{loss}: found {name} of {len(x.shape)} axes; expected hidden states, [B, T, D], such "
            'as "blocks/3" has. kdjax.match_relations compares queries, keys and values.'
        )
    return x


def _key(name: str) -> str:
    """A layer's name as a key in a tree of arrays."""
    return name.replace("/", "_")


def match_hidden(
    pairs: Mapping[str, str],
    distance: str = "mse",
    *,
    weight: float = 1.0,
    project: bool = True,
    matrices: Mapping[str, ArrayLike] | None = None,
) -> LayerLoss:
    """Distance of student's from teacher's layers: a mean over `pairs`, `{student's: teacher's}`.

    "mse" is the mean square of the differences (Jiao et al. 2020, TinyBERT, arXiv:1909.10351),
    "cosine" is 1 - cosine (Sanh et al. 2019, DistilBERT, arXiv:1910.01108), in float32. If
    widths differ, a matrix `[teacher's D, student's D]` is trained, drawn at random unless
    `matrices` has it; `project=False` refuses that.

        extra = kdjax.match_hidden({"blocks/1": "blocks/3", "blocks/3": "blocks/7"}, "cosine")
    """
    if distance not in _DISTANCES:
        raise UserError(f"distance={distance!r}: must be one of {', '.join(_DISTANCES)}.")

    def sum_distances(ours: LayerStates, theirs: LayerStates, batch: Mapping[str, Array]) -> Array:
        weights = batch["weights"]
        total = jnp.zeros(())
        for mine, other in pairs.items():
            both = (mine, ours[mine]), (other, theirs[other])
            s, t = (_keep_weighted(_check_hidden(name, n, x), weights) for n, x in both)
            if s.shape != t.shape:
                raise UserError(
                    f"hidden_{distance}: found {mine} {s.shape[-1]} wide and the teacher's {other} "
                    f"{t.shape[-1]}; expected one width: a matrix [{t.shape[-1]}, student's width]."
                )
            total += jnp.sum(weights * _DISTANCES[distance](s, t))
        return total / len(pairs)

    begun: dict[str, Any] = dict(pairs) if project else {}
    name = f"hidden_{distance}"
    given = begun | dict(matrices or {})
    return LayerLoss(sum_distances, tuple(pairs), tuple(pairs.values()), weight, name, given)


def _keep_weighted(x: Float[Array, "B T D"], weights: Float[Array, "B T"]) -> Array:
    """float32 states, zero where a position has no weight and may hold anything."""
    return jnp.where((weights != 0)[..., None], x, 0).astype(jnp.float32)


def _mean_square(s: Array, t: Array) -> Array:
    return jnp.mean((s - t) ** 2, axis=-1)


def _cosine_distance(s: Array, t: Array) -> Array:
    def unit(x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-12))

    return 1 - jnp.sum(unit(s) * unit(t), axis=-1)


_DISTANCES = {"mse": _mean_square, "cosine": _cosine_distance}


def match_relations(
    pairs: Mapping[str, str],
    heads: int,
    *,
    weight: float = 1.0,
    parts: Sequence[str] = ("q", "k", "v"),
) -> LayerLoss:
    """KL(teacher || student) of attention relations over `{student's: teacher's}` layers.

    The relation of a position to those before it in its segment is the softmax of products of
    queries with queries, keys with keys, values with values, all heads joined and cut into `heads`
    (Wang et al. 2021, MiniLMv2, arXiv:2012.15828). A mean over pairs, parts and heads, in nats.
    Widths of the models may differ; no matrix is trained. Products, `[heads, T, T]` float32, exist
    for one row at a time.

        extra = kdjax.match_relations({"blocks/5": "blocks/20"}, heads=16)
    """
    if heads < 1:
        raise UserError(f"heads={heads}: must be at least 1.")
    names = [(f"{s}/attn/{part}", f"{t}/attn/{part}") for s, t in pairs.items() for part in parts]

    def sum_relations(ours: LayerStates, theirs: LayerStates, batch: Mapping[str, Array]) -> Array:
        total = jnp.zeros(())
        for mine, other in names:
            for name, x in ((mine, ours[mine]), (other, theirs[other])):
                if (x.shape[2] * x.shape[3]) % heads:
                    raise UserError(
                        f"relations: found {name} of {x.shape[2]} heads, each {x.shape[3]} wide; "
                        f"expected a multiple of heads={heads}."
                    )
            columns = ours[mine], theirs[other], batch["segment_ids"], batch["weights"]
            compare = functools.partial(_compare_relations, heads=heads)
            total += jnp.sum(jax.lax.map(jax.checkpoint(compare), columns))
        return total / len(names)

    student, teacher = ([pair[side] for pair in names] for side in (0, 1))
    return LayerLoss(sum_relations, student, teacher, weight, "relations")


def _compare_relations(row: tuple[Array, ...], *, heads: int) -> Float[Array, ""]:
    """The weighted sum over a row's positions; `row` holds both models' states and two columns."""
    s, t, segment_ids, weights = row
    real = segment_ids != 0
    length = segment_ids.shape[0]
    seen = jnp.tril(jnp.ones((length, length), bool))
    seen &= segment_ids[:, None] == segment_ids[None]
    theirs, ours = (_log_relations(x, real, seen, heads) for x in (t, s))
    distance = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
    return jnp.sum(weights * jnp.where(weights != 0, jnp.mean(distance, axis=0), 0))


def _log_relations(
    x: Float[Array, "T H W"], real: Array, seen: Array, heads: int
) -> Float[Array, "heads T T"]:
    x = jnp.where(real[:, None, None], x, 0).astype(jnp.float32).reshape(x.shape[0], heads, -1)
    scores = jnp.einsum("IHW,JHW->HIJ", x, x) / math.sqrt(x.shape[-1])
    return jax.nn.log_softmax(jnp.where(seen[None], scores, EXCLUDED), axis=-1)
