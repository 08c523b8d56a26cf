"""Distil a large, quantized, frozen teacher into a small student, in JAX.

    teacher = kdjax.load("teacher.gguf", weights="packed")
    student = kdjax.load("student.gguf", dtype="float32")
    step = kdjax.make_step(student, teacher, kdjax.KDLoss(kdjax.forward_kl), optax.adamw(1e-5))

`docs/library.md` has complete programs. `__init__.pyi` lists the public names; each is imported at
its first use, so that `import kdjax` starts no device.
"""

from typing import Any

import lazy_loader

__version__ = "0.3.4"

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    from kdjax.config import RemovedError, refuse_removed

    if gone := refuse_removed(f"{__name__}.{name}"):
        raise RemovedError(f"{gone}.")  # no AttributeError, whose words `from ... import` drops
    return _find(name)
