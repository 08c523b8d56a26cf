"""Distil a large, quantized, frozen teacher into a small student, in JAX.

    teacher = kdjax.load("teacher.gguf", weights="packed")
    student = kdjax.load("student.gguf", dtype="float32")
    step = kdjax.make_step(student, teacher, kdjax.KDLoss(kdjax.forward_kl), optax.adamw(1e-5))

`docs/library.md` has whole programs. A name is imported at its first use: `import kdjax` starts no
device.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ROOMS = {
    "kdjax.config": ("Config",),
    "kdjax.errors": ("UserError",),
    "kdjax.models.checkpoint": ("Checkpoint", "open_checkpoint"),
    "kdjax.models.model": ("Model", "load"),
    "kdjax.models.decoding": ("Completion", "Sampling"),
    "kdjax.losses.divergences": (
        "Divergence",
        "JensenShannon",
        "SkewedForwardKL",
        "SkewedReverseKL",
        "forward_kl",
        "reverse_kl",
        "total_variation",
    ),
    "kdjax.losses.kd": ("KDLoss",),
    "kdjax.training.step": ("Step", "StepMetrics", "TrainState", "make_step"),
    "kdjax.data.pipeline": ("BatchSource",),
    "kdjax.watch.run": ("distill",),
    "kdjax.export": ("export_gguf", "export_hf"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = ["__version__", *sorted(_ROOM_OF)]

if TYPE_CHECKING:
    from kdjax.config import Config as Config
    from kdjax.data.pipeline import BatchSource as BatchSource
    from kdjax.errors import UserError as UserError
    from kdjax.export import export_gguf as export_gguf
    from kdjax.export import export_hf as export_hf
    from kdjax.losses.divergences import Divergence as Divergence
    from kdjax.losses.divergences import JensenShannon as JensenShannon
    from kdjax.losses.divergences import SkewedForwardKL as SkewedForwardKL
    from kdjax.losses.divergences import SkewedReverseKL as SkewedReverseKL
    from kdjax.losses.divergences import forward_kl as forward_kl
    from kdjax.losses.divergences import reverse_kl as reverse_kl
    from kdjax.losses.divergences import total_variation as total_variation
    from kdjax.losses.kd import KDLoss as KDLoss
    from kdjax.models.checkpoint import Checkpoint as Checkpoint
    from kdjax.models.checkpoint import open_checkpoint as open_checkpoint
    from kdjax.models.decoding import Completion as Completion
    from kdjax.models.decoding import Sampling as Sampling
    from kdjax.models.model import Model as Model
    from kdjax.models.model import load as load
    from kdjax.training.step import Step as Step
    from kdjax.training.step import StepMetrics as StepMetrics
    from kdjax.training.step import TrainState as TrainState
    from kdjax.training.step import make_step as make_step
    from kdjax.watch.run import distill as distill


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'kdjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ROOM_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
