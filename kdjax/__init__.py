"""Distil a large, quantized, frozen teacher into a small student, in JAX.

    teacher = kdjax.load("teacher.gguf", weights="packed")
    student = kdjax.load("student.gguf", dtype="float32")
    step = kdjax.make_step(student, teacher, kdjax.KDLoss(kdjax.forward_kl), optax.adamw(1e-5))

`docs/library.md` has complete programs. `__init__.pyi` lists the public names; each is imported at
its first use, so that `import kdjax` starts no device.
"""

import lazy_loader

__version__ = "0.2.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
