"""Where a model lives and by which programs it computes: a value that travels with the model."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kdjax.device.sharding import AXES, ROW_AXES

_log = logging.getLogger("kdjax")


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and whether the kernels of `models.kernels` replace the JAX lines that define them.

    Nothing below a command or `training.job` asks JAX how many devices there are.
    """

    mesh: Mesh
    kernels: bool = False
    shapes: bool = False  # whether loaded parameters are shapes: programs are compiled, not run

    @classmethod
    def on(cls, mesh: Mesh) -> "Placement":
        """Placement on a mesh; kernels on NVIDIA GPUs of Ampere or later, without a `tensor` axis.

        Each device then runs the program of one device (`map_rows`). The compiler splits what
        `tensor` splits, and it cannot partition kernels.
        """
        device = mesh.devices.flat[0]
        able = device.platform == "gpu" and capability(device) >= 8.0
        return cls(mesh, able and mesh.shape["tensor"] == 1 and _has_triton())

    @property
    def platform(self) -> str:
        """Platform by JAX's name: "cpu", "gpu", "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def alone(self) -> bool:
        """Whether the mesh is one device."""
        return self.mesh.size == 1

    def map_rows(self, function: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        """Maps `function` over the devices: each runs it on its rows, as a program of one device.

        `ins` and `outs` are specs of `data` and `fsdp` for its arguments and results; a result with
        neither must be equal on all devices (`jax.lax.psum`). The compiler splits over `tensor`.
        """
        if self.alone:
            return function
        # cuDNN's partitioner refuses an axis that the compiler would split, even one of size 1.
        ours = ROW_AXES if self.mesh.shape["tensor"] > 1 else AXES
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=ins,
            out_specs=outs,
            axis_names=set(ours),
            check_vma=False,
        )

    def map_heads(self, function: Callable[..., Any], split: int) -> Callable[..., Any]:
        """Maps `function` over the devices: each runs it on its heads.

        The first `split` arguments are `[B, T, heads, D]`; the others are equal on all devices of
        `tensor`.
        """
        if self.mesh.shape["tensor"] == 1:
            return function
        heads = P(None, None, "tensor")
        inside = not jax.sharding.get_abstract_mesh().empty  # called within `map_rows`

        def run(*arrays: Any) -> Any:
            mapped = jax.shard_map(
                function,
                mesh=None if inside else self.mesh,
                in_specs=(heads,) * split + (P(),) * (len(arrays) - split),
                out_specs=heads,
                axis_names={"tensor"} if inside else set(AXES),
                check_vma=False,
            )
            return mapped(*arrays)

        return run


def capability(device: Any) -> float:
    """An NVIDIA GPU's compute capability, such as 9.0; 0 for anything else."""
    try:
        return float(getattr(device, "compute_capability", "unknown"))
    except ValueError:  # other makers' names, such as gfx942
        return 0.0


@functools.cache
def _has_triton() -> bool:
    """Whether JAX has Pallas' Triton backend, deprecated since 0.11; warns once if it has not."""
    try:
        from jax.experimental.pallas import triton

        for name in ("CompilerParams", "dot", "load", "store"):
            getattr(triton, name)
    except Exception as error:  # gone, moved, or refused by the jaxlib at hand
        _log.warning(
            "JAX %s has no kernels of Pallas' Triton backend (%s): plain JAX computes what they "
            "would, more slowly and in more memory. A step of a packed Qwen3.5 9B into 0.8B takes "
            "at least 786 ms and 81 GB of an H200 in place of 670 ms and 60 GB, and plans count "
            "kernels. Install a JAX that has them: 0.10.2 to 0.12.",
            *(jax.__version__, " ".join(str(error).split()) or type(error).__name__),
        )
        return False
    return True
