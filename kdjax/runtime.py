"""What must be decided before JAX touches a device: allocator, memory fraction, compilation cache.

XLA does not know about GPUs that share memory with the CPU (GB10, Jetson): its default grabs 75% of
what the driver calls total, which there is the machine's own RAM. So the driver is asked first,
through libcuda and without creating a context, and the answer decides the environment that JAX reads
at its first use of a device. A setting of the user's own always wins.
"""

import ctypes
import dataclasses
import enum
import os
import resource
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from kdjax.errors import UserError

GIB = 2**30


class Memory(enum.Enum):
    """How a machine's GPU memory relates to its RAM."""

    NONE = "none"  # no NVIDIA driver or no visible device
    DISCRETE = "discrete"  # memory of its own behind a bus
    COHERENT = "coherent"  # memory of its own, page tables shared with the CPU (GH200, GB200)
    INTEGRATED = "integrated"  # the machine's RAM (GB10, Jetson)
    UNKNOWN = "unknown"  # the driver answered with an error


@dataclasses.dataclass(frozen=True)
class Device:
    """One device as the driver describes it; None where it would not say."""

    integrated: int | None  # CU_DEVICE_ATTRIBUTE_INTEGRATED, 18
    host_page_tables: int | None  # CU_..._PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, 100
    total_bytes: int | None = None


def classify_device_memory(devices: Sequence[Device] | None) -> Memory:
    """The kind of memory of the visible devices; total over every combination of answers.

    `None` or no device is NONE. One refused answer, or devices of different kinds, is UNKNOWN:
    an error is never read as "integrated".
    """
    if not devices:
        return Memory.NONE
    kinds = {_classify(device) for device in devices}
    return kinds.pop() if len(kinds) == 1 else Memory.UNKNOWN


def _classify(device: Device) -> Memory:
    if device.integrated is None:
        return Memory.UNKNOWN
    if device.integrated == 1:
        return Memory.INTEGRATED
    if device.host_page_tables is None:
        return Memory.UNKNOWN
    return Memory.COHERENT if device.host_page_tables == 1 else Memory.DISCRETE


def probe_devices(load: Callable[[str], Any] = ctypes.CDLL) -> list[Device] | None:
    """Asks libcuda for every visible device; None without driver or devices. Creates no context.

    CUDA_VISIBLE_DEVICES is honoured by the driver itself. A failing `cuInit` or count on a present
    driver gives one device that answered nothing.
    """
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return None
    silent = Device(None, None)
    no_device = 100  # CUDA_ERROR_NO_DEVICE
    status = cuda.cuInit(0)
    if status:
        return None if status == no_device else [silent]
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)):
        return [silent]
    return [_ask(cuda, i) for i in range(count.value)]


def _ask(cuda: Any, index: int) -> Device:
    handle = ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(handle), index):
        return Device(None, None)

    def attribute(number: int) -> int | None:
        value = ctypes.c_int()
        failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return None if failed else value.value

    total = ctypes.c_size_t()
    failed = cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    return Device(attribute(18), attribute(100), None if failed else total.value)


def mem_available(meminfo: str) -> int | None:
    """Bytes of MemAvailable in the text of /proc/meminfo; None if it is not there."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _read_meminfo() -> str:
    try:
        return Path("/proc/meminfo").read_text()
    except OSError:
        return ""


def memory_policy(kind: Memory, devices: Sequence[Device], available: int | None,
                  managed: str | None) -> tuple[dict[str, str], str]:  # fmt: skip
    """Environment settings for this kind of memory, and the reason in one line.

    `available` is MemAvailable in bytes. `managed` is MANAGED_MEMORY: "1" asks for unified memory
    (cuMemAllocManaged, which XLA reaches only through the bfc allocator), "0" forbids it, None
    leaves it off. Raises `UserError` for anything else.
    """
    if managed not in (None, "0", "1"):
        raise UserError(f"MANAGED_MEMORY={managed!r}: must be 1 (use unified memory) or 0 (never).")
    if kind in (Memory.NONE, Memory.UNKNOWN):
        why = "no NVIDIA GPU" if kind is Memory.NONE else "the driver did not answer"
        return {}, f"{why}: nothing changed"
    settings = {"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"}
    if managed == "1":
        settings |= {"TF_FORCE_UNIFIED_MEMORY": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return settings, "MANAGED_MEMORY=1: unified memory, which ignores fractions below 1"
    if managed == "0":
        settings["TF_FORCE_UNIFIED_MEMORY"] = "0"
    if kind is Memory.INTEGRATED:
        # The driver's free figure leaves out reclaimable page cache: MemAvailable is the budget.
        total = min((d.total_bytes for d in devices if d.total_bytes), default=0)
        settings |= {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "4",  # pinned staging is the same RAM
        }
        if not total or available is None:
            return settings, "integrated memory of unknown size: grown on demand"
        reserve = max(8 * GIB, total // 10)
        fraction = min(max((available - reserve) / total, 0.1), 0.75)
        settings["XLA_CLIENT_MEM_FRACTION"] = f"{fraction:.3f}"
        return settings, (
            f"integrated memory: {fraction:.0%} of {total / GIB:.0f} GiB, from {available / GIB:.0f} "
            f"GiB available less {reserve / GIB:.0f}; grown on demand, no unified allocations"
        )
    fraction = "0.90" if kind is Memory.DISCRETE else "0.85"
    settings |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_CLIENT_MEM_FRACTION": fraction}
    return settings, f"{kind.value} memory: {fraction} of it, preallocated"


# A name the user set -> the settings that it replaces. XLA refuses both fraction names at once.
_OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What was decided, and what was applied."""

    kind: Memory
    reason: str
    applied: Mapping[str, str]
    kept: Mapping[str, str]  # the user's own values that won
    cache: str

    def describe(self) -> list[str]:
        """Lines for the log."""
        lines = [f"device memory: {self.kind.value}; {self.reason}"]
        if self.applied:
            lines.append("set " + " ".join(f"{k}={v}" for k, v in self.applied.items()))
        if self.kept:
            lines.append("kept " + " ".join(f"{k}={v}" for k, v in self.kept.items()))
        return [*lines, f"compilation cache: {self.cache}"]


def configure(
    *,
    environ: MutableMapping[str, str] = os.environ,
    probe: Callable[[], Sequence[Device] | None] = probe_devices,
    meminfo: Callable[[], str] = _read_meminfo,
    cache_dir: Path = Path("~/.cache/kdjax/xla"),
) -> Runtime:
    """Decides and applies everything; call it before the first use of a JAX device.

    Warns, naming the settings, if JAX already started and can no longer see them.
    """
    devices = None if environ.get("JAX_PLATFORMS") == "cpu" else probe()
    kind = classify_device_memory(devices)
    managed = environ.get("MANAGED_MEMORY")
    wanted, reason = memory_policy(kind, devices or (), mem_available(meminfo()), managed)
    if _OLD_FRACTION in environ:
        wanted.pop("XLA_CLIENT_MEM_FRACTION", None)
    kept = {name: environ[name] for name in (*wanted, _OLD_FRACTION) if name in environ}
    applied = {name: value for name, value in wanted.items() if name not in environ}
    from jax._src import xla_bridge  # no public way to ask

    if applied and xla_bridge.backends_are_initialized():
        logging.warning("JAX already started: too late for %s", " ".join(applied))
        applied = {}
    environ.update(applied)
    return Runtime(kind, reason, applied, kept, _compilation_cache(environ, cache_dir))


def _compilation_cache(environ: Mapping[str, str], cache_dir: Path) -> str:
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return environ["JAX_COMPILATION_CACHE_DIR"]
    folder = cache_dir.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"off ({folder}: {error.strerror})"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    return str(folder)


# Dense bf16 FLOP/s with float32 accumulation, from NVIDIA's data sheets (half of "with sparsity").
_PEAK_BF16 = {
    "H200": 989e12, "H100": 989e12, "A100": 312e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
    "L40S": 362e12, "L4": 121e12, "B200": 2250e12,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices JAX found."""

    platform: str
    kind: str
    count: int
    memory_bytes: int | None  # that one device lets XLA use
    peak_flops: float | None  # of all together, dense bf16, where known

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 1e9:.1f} GB each" if self.memory_bytes else ""
        return f"{self.count} x {self.kind} ({self.platform}{memory}), jax {jax.__version__}"


def device_summary() -> Devices:
    """What JAX runs on; starts JAX if nothing did before."""
    devices = jax.devices()
    first = devices[0]
    stats = first.memory_stats() or {}
    names = sorted((n for n in _PEAK_BF16 if n in first.device_kind), key=len)
    peak = _PEAK_BF16[names[-1]] * len(devices) if names else None
    return Devices(first.platform, first.device_kind, len(devices), stats.get("bytes_limit"), peak)


def peak_memory() -> str:
    """One line: the most memory that XLA held on a device, and the most this process held in RAM."""
    host = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.1f} GB host"
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return (
        f"peak memory: {max(peaks) / 1e9:.1f} GB a device, {host}"
        if peaks
        else f"peak memory: {host}"
    )
