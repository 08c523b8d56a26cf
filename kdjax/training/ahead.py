"""Programs that threads compile before the arrays exist that they take."""

import contextlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from kdjax.training.vocabulary import Vocabulary

_IDS = "tokens", "labels", "segment_ids", "positions"


class Ahead:
    """A jitted function that a thread compiles for known shapes; its calls wait for the thread.

    A call with other arguments, and any call of a function that did not compile, is the jitted
    function's: it compiles then, or raises.
    """

    def __init__(self, jitted: Any, *shapes: Any, **fixed: Any):
        """Begins to compile; `shapes` and `fixed` are trees of shapes with shardings.

        It is traced here: threads that trace take turns with one that reads text, and a step whose
        tracing takes 1 s of a core was lowered 4.4 s later. XLA, which the thread waits for, takes
        no turns.
        """
        self._jitted = jitted
        self._compiled: Any = None
        lowered = None
        with contextlib.suppress(Exception):  # a call meets the error again, where it is reported
            lowered = jitted.lower(*shapes, **fixed)
        # No daemon: a process that ends within XLA's compiler ends by a signal.
        self._thread = threading.Thread(target=self._compile, args=(lowered,))
        self._thread.start()

    def _compile(self, lowered: Any) -> None:
        with contextlib.suppress(Exception):  # as above
            self._compiled = lowered and lowered.compile()

    @property
    def compiled(self) -> bool:
        """Whether the thread's program is what calls run; waits for it."""
        self._thread.join()
        return self._compiled is not None

    def __call__(self, *args: Any, **fixed: Any) -> Any:
        self._thread.join()
        if self._compiled is not None:
            try:
                return self._compiled(*args, **fixed)
            except (TypeError, ValueError):  # of arguments of other shapes, before the program runs
                self._compiled = None
        return self._jitted(*args, **fixed)


def shape_batch(rows: int, seq_len: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Shapes of the columns of a batch of text, `[rows, seq_len]`, on the devices."""
    size = rows, seq_len
    batch = {name: jax.ShapeDtypeStruct(size, jnp.int32) for name in _IDS}
    batch["weights"] = jax.ShapeDtypeStruct(size, jnp.float32)
    return batch | vocabulary.list_columns(size)


def place_shapes(tree: Any, place: Sharding) -> Any:
    """Shapes of a tree's arrays or shapes, as of arrays that lie as `place` says."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)
