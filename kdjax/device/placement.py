"""Where a model lives and by which programs it computes: a value that travels with the model."""

import dataclasses
from typing import Any

from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and whether the kernels of `models.kernels` replace the JAX lines that define them.

    Nothing below a command or `training.job` asks JAX how many devices there are.
    """

    mesh: Mesh
    kernels: bool = False

    @classmethod
    def on(cls, mesh: Mesh) -> "Placement":
        """With kernels on one NVIDIA GPU of Ampere or later: no kernel is split over a mesh."""
        device = mesh.devices.flat[0]
        able = mesh.size == 1 and device.platform == "gpu" and capability(device) >= 8.0
        return cls(mesh, able and _has_pallas_triton())

    @property
    def platform(self) -> str:
        """As JAX names it: "cpu", "gpu", "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def alone(self) -> bool:
        """Whether the mesh is one device."""
        return self.mesh.size == 1


def capability(device: Any) -> float:
    """An NVIDIA GPU's compute capability, such as 9.0; 0 for anything else."""
    try:
        return float(getattr(device, "compute_capability", "unknown"))
    except ValueError:  # other makers' names, such as gfx942
        return 0.0


def _has_pallas_triton() -> bool:
    try:  # deprecated since JAX 0.11
        import jax.experimental.pallas.triton  # noqa: F401
    except ImportError:
        return False
    return True
