"""Trained parameters of a student: their names, and parameters that an optimizer never moves."""

import fnmatch
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from kdjax.errors import UserError, suggest
from kdjax.formats.saved import HEADS
from kdjax.models import names
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Params
from kdjax.models.model import Model, check_model
from kdjax.models.shards import Shard

FROZEN, TRAINED = "frozen", "trained"
_BLOCK = "mtp"  # the drafting block: trained alone, or not at all


def _is_leaf(x: Any) -> bool:
    return not isinstance(x, dict)


def _path_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def list_paths(params: Params) -> list[str]:
    """Paths of all arrays."""
    return [_path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


class _Leaf(NamedTuple):
    """One parameter of the tree, and the names of its layers, or of itself."""

    path: str
    layers: list[tuple[str, str]]  # kdjax's name and GGUF's, "" if GGUF has none


def _list_leaves(params: Params, spec: ArchSpec | None) -> Iterator[_Leaf]:
    for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_leaf):
        ours = _path_name(path)
        keys = tuple(key.key for key in path)
        if spec is None or keys[0] in HEADS:
            yield _Leaf(ours, [(ours, "")])
            continue
        gguf, layers = names.name_of(keys, spec).gguf, names.layers_of(keys, spec)
        if layers is None or keys[0] == _BLOCK:
            yield _Leaf(ours, [(ours, gguf.format(i=spec.num_layers))])
            continue
        stack, rest = ours.split("/", 1)
        yield _Leaf(ours, [(f"{stack}/{i}/{rest}", gguf.format(i=i)) for i in layers])


def parameter_names(model: Model) -> dict[str, str]:
    """Every parameter's name, `blocks/3/mlp/gate/weight`, and GGUF's, `blk.3.ffn_gate.weight`.

    Each layer of a stack has a name. GGUF's names of a custom module, and of a head that drafts,
    which has another file, are empty.
    """
    check_model(model)
    leaves = _list_leaves(model.params, model.spec)
    return {ours: gguf for leaf in leaves for ours, gguf in leaf.layers}


def _matches(name: str, pattern: str, separator: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, pattern + separator)


def choose_layers(
    params: Params, spec: ArchSpec | None, patterns: str | Sequence[str]
) -> dict[str, tuple[bool, ...]]:
    """Chooses, for each parameter of the tree by its path, the layers that the patterns name.

    A pattern is a name of `parameter_names`, the beginning of one, or has `*` in it:
    `blocks/*/mlp`, `blk.3`, `*norm*`. Raises `UserError` for one that names nothing.
    """
    texts = patterns.split(",") if isinstance(patterns, str) else list(patterns)
    texts = [text.strip() for text in texts]
    leaves = list(_list_leaves(params, spec))

    def is_named(pair: tuple[str, str], text: str) -> bool:
        return _matches(pair[0], text, "/*") or _matches(pair[1], text, ".*")

    known = [pair for leaf in leaves for pair in leaf.layers]
    for text in texts:
        if not any(is_named(pair, text) for pair in known):
            listed = ", ".join(dict.fromkeys(leaf.path for leaf in leaves))
            near = suggest(text, [name for pair in known for name in pair if name])
            raise UserError(
                f"trainable: found {text!r}, which names no parameter; expected names of "
                f"kdjax.parameter_names(model) or patterns of them, such as blocks/*/mlp.{near} "
                f"The parameters are {listed}; layers are numbered, as in blocks/0/..."
            )
    return {
        leaf.path: tuple(any(is_named(pair, text) for text in texts) for pair in leaf.layers)
        for leaf in leaves
    }


# Path of a stack, and its trained layers.
TrainedLayers = tuple[tuple[str, tuple[bool, ...]], ...]


def train_only(
    optimizer: optax.GradientTransformation,
    params: Params,
    spec: ArchSpec | None,
    patterns: str | Sequence[str],
) -> tuple[optax.GradientTransformation, TrainedLayers]:
    """Restricts `optimizer` to the parameters that `choose_layers` chooses.

    Without patterns all parameters are chosen but the drafting block, which the loss does not
    reach. Other parameters have no moments. If some layers of a stack are chosen, all of its layers
    have moments, and only the chosen layers move; the second result lists these stacks. `params`
    may be shapes. Raises `UserError` for an empty list and as `choose_layers` does.
    """
    if not patterns and not isinstance(patterns, str):
        raise UserError("trainable: found an empty list; expected names, or '' for all parameters.")
    if not patterns:
        if spec is None or _BLOCK not in params or len(params) == 1:
            return optimizer, ()
        patterns = [name for name in params if name != _BLOCK]
    chosen = choose_layers(params, spec, patterns)
    layers = tuple((path, on) for path, on in chosen.items() if any(on) and not all(on))

    def label(path: tuple[Any, ...], _: Any) -> str:
        # Projections of layer losses, next to the student's parameters, are trained.
        return TRAINED if any(chosen.get(_path_name(path), (True,))) else FROZEN

    labels = functools.partial(jax.tree_util.tree_map_with_path, label)
    tx = optax.partition({TRAINED: optimizer, FROZEN: optax.set_to_zero()}, labels)
    if not layers:
        return tx, ()
    keep = optax.stateless(lambda updates, _: keep_layers(updates, layers))
    return optax.chain(keep, tx, keep), layers


def keep_layers(tree: Any, layers: TrainedLayers) -> Any:
    """Gradients or updates with zeros for layers that are not trained."""
    if not layers:
        return tree
    masks = dict(layers)

    def keep(path: tuple[Any, ...], x: Any) -> Any:
        mask = masks.get(_path_name(path))
        if mask is None:
            return x
        return x * np.asarray(mask, np.float32).reshape(-1, *[1] * (x.ndim - 1))

    return jax.tree_util.tree_map_with_path(keep, tree)


def find_frozen(tx: optax.GradientTransformation, params: Params) -> frozenset[str]:
    """Finds parameters that the optimizer never moves: their updates depend on no gradient.

    `optax.set_to_zero`, within `optax.freeze` and partitions, makes such updates. Reads the jaxpr
    of the update; updates within a loop or a condition count as moved. `params` may be shapes.
    Raises `UserError` if nothing is moved.
    """
    state = jax.eval_shape(tx.init, params)
    jaxpr = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p)[0])(params, state, params).jaxpr
    varying = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(not isinstance(x, Literal) and x in varying for x in equation.invars):
            varying |= set(equation.outvars)
    paths = list_paths(params)
    moved = [not isinstance(x, Literal) and x in varying for x in jaxpr.outvars]
    if not any(moved):
        raise UserError(
            "the optimizer moves no parameter: all updates are constants. Train some of "
            f"{', '.join(paths)}."
        )
    return frozenset(path for path, on in zip(paths, moved, strict=True) if not on)


def leave_out(tree: Params, frozen: frozenset[str]) -> Params:
    """Replaces frozen parameters by None, which is not a leaf."""
    if not frozen:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, x: None if _path_name(path) in frozen else x,
        tree,
        is_leaf=lambda x: isinstance(x, Shard),
    )


def put_back(tree: Params, whole: Params) -> Params:
    """Undoes `leave_out`: takes parameters that are None from `whole`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, tree, whole, is_leaf=lambda x: x is None
    )


def zeros_for(tree: Params, frozen: frozenset[str], params: Params) -> Params:
    """Fills in zeros for gradients of frozen parameters, as optimizers need them."""
    return put_back(tree, jax.tree.map(jnp.zeros_like, params)) if frozen else tree
