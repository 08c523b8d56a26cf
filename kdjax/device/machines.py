"""The devices that a run is planned for: this machine's, or described ones of another."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kdjax.device.runtime import Devices, device_summary, peak_matmul_flops, ram_total, spare_memory
from kdjax.errors import UserError

# GPUs by the word for them: the driver's name, compute capability, and bytes that the driver calls
# total. The two of Hopper were measured here; others are totals that PyTorch's errors print.
CARDS: dict[str, tuple[str, str, float]] = {
    "H100": ("NVIDIA H100 80GB HBM3", "9.0", 85.0e9),
    "H200": ("NVIDIA H200", "9.0", 150.1e9),
    "A100-40GB": ("NVIDIA A100-SXM4-40GB", "8.0", 42.3e9),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", "8.0", 85.0e9),
    "B200": ("NVIDIA B200", "10.0", 191.5e9),
    "L40S": ("NVIDIA L40S", "8.9", 47.6e9),
    "L4": ("NVIDIA L4", "8.9", 23.6e9),
    "RTX4090": ("NVIDIA GeForce RTX 4090", "8.9", 25.4e9),
    "RTX3090": ("NVIDIA GeForce RTX 3090", "8.6", 25.4e9),
}
ANY_GPU, CPU = "gpu", "cpu"
WORDS = (*CARDS, ANY_GPU, CPU)
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_MOST_DEVICES = 2**16  # each is an object of a plan: 100 million fill the memory


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """A device of another machine: a mesh of these can be planned, and nothing runs on it."""

    id: int
    platform: str
    device_kind: str
    compute_capability: str
    process_index: int = 0


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind, and what is said of them together."""

    summary: Devices
    devices: Sequence[Any] | None = None  # None: all of JAX's

    @classmethod
    def here(cls) -> "Machine":
        """The devices that JAX found, over all processes; starts JAX if it has not started."""
        return cls(device_summary())

    @classmethod
    def describe(cls, word: str, memory: str = "", count: int = 1, hosts: int = 1) -> "Machine":
        """`count` devices of the kind that one of `WORDS` names, each with `memory`, as `24GB`.

        Each of the `hosts` has `count` of them in a process. Without `memory` a card has its data
        sheet's, and a CPU this machine's RAM. Raises `UserError` for an unknown word, for a GPU
        whose memory nobody says, and for CPUs of several hosts.
        """
        named = {name.lower(): name for name in WORDS}
        name = named.get(word.lower().replace(" ", ""))
        if name is None:
            raise UserError(f"--device={word}: expected one of {', '.join(WORDS)}.")
        for flag, number in (("--devices", count), ("--hosts", hosts)):
            if number < 1:
                raise UserError(f"{flag}={number} must be 1 or more.")
        if count * hosts > _MOST_DEVICES:
            raise UserError(
                f"found {count * hosts:,} devices (--devices, --hosts); expected at most "
                f"{_MOST_DEVICES:,}."
            )
        total = parse_bytes("--memory", memory) if memory else None
        if name == CPU and hosts > 1:
            raise UserError(f"--hosts={hosts}: expected GPUs; found --device={CPU}.")
        if name == CPU:
            shared = ram_total() if total is None else total
            usable = None if shared is None else int(spare_memory(CPU, shared))
            summary = Devices(CPU, CPU, count, usable, None)
            if count == 1:
                return cls(summary, jax.local_devices(backend=CPU)[:1])
            return cls(summary, [AbsentDevice(n, CPU, CPU, "") for n in range(count)])
        if name == ANY_GPU and total is None:
            raise UserError(f"--device={ANY_GPU} needs --memory, such as --memory=16GB.")
        kind, capability, listed = CARDS.get(name, ("GPU", "8.0", 0.0))
        peak = peak_matmul_flops(kind, jnp.bfloat16)
        usable = int(spare_memory("gpu", listed if total is None else total))
        summary = Devices("gpu", kind, count * hosts, usable, peak and peak * count * hosts)
        numbers = range(count * hosts)
        return cls(summary, [AbsentDevice(n, "gpu", kind, capability, n // count) for n in numbers])


def parse_bytes(flag: str, text: str) -> float:
    """Bytes of a text such as 750MB, 16 GB or 24GiB; raises `UserError`, naming the flag."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]I?)?B?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * _UNITS[(match[2] or "").upper()] if match else 0.0
    if not 0 < size < math.inf:
        raise UserError(f"{flag}={text}: expected a size above 0, such as 750MB, 16GB or 24GiB.")
    return size
