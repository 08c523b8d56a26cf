"""Decides JAX's settings before it touches a device: allocator, memory, compilation cache.

XLA does not know about GPUs that share memory with the CPU (GB10, Jetson): its default grabs 75% of
what the driver calls total, which on such machines is the RAM. So `probe` asks the driver first,
and the answer decides the environment that JAX reads at its first use of a device. A setting of the
user always wins. Importing this module starts nothing.
"""

import contextlib
import ctypes
import dataclasses
import enum
import importlib.metadata
import logging
import os
import re
import resource
import time
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.typing

from kdjax.device.probe import Device, Probe, probe_devices
from kdjax.errors import UserError

_log = logging.getLogger(__name__)

GIB = 2**30

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # deprecated; JAX refuses to start with both
UNIFIED = "TF_FORCE_UNIFIED_MEMORY"
PINNED_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
MANAGED = "MANAGED_MEMORY"  # ours: 1 forces unified memory, 0 forbids it
FLAGS, TRITON_PRODUCTS = "XLA_FLAGS", "xla_gpu_enable_triton_gemm"
PROGRAMS = Path("~/.cache/kdjax/xla")  # compiled programs, unless CACHE_DIR names a folder
CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"

_DISCRETE = "0.90"  # share of a discrete GPU that JAX may take
_RAM_LEFT, _RAM_SHARE_LEFT = 2 * GIB, 1 / 8  # RAM for the system, the larger of both
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


class DeviceMemory(enum.Enum):
    """How a machine's GPU memory relates to its RAM."""

    NONE = "none"  # no NVIDIA driver, or no visible device
    DISCRETE = "discrete"  # separate memory on a bus
    COHERENT = "coherent"  # separate memory, page tables shared with the CPU (GH200, GB200)
    INTEGRATED = "integrated"  # the machine's RAM (GB10, Jetson)
    UNKNOWN = "unknown"  # the driver failed, or its answers make no sense together


def classify_device_memory(devices: Sequence[Device]) -> DeviceMemory:
    """Classifies the memory of the visible devices, for every combination of answers.

    One refused answer makes the machine UNKNOWN, and so do devices of different kinds: an error
    never counts as "integrated".
    """
    kinds = {_classify(device) for device in devices}
    if not kinds:
        return DeviceMemory.NONE
    return kinds.pop() if len(kinds) == 1 else DeviceMemory.UNKNOWN


def _classify(device: Device) -> DeviceMemory:
    if None in dataclasses.astuple(device):
        return DeviceMemory.UNKNOWN
    if not {device.integrated, device.pageable, device.host_page_tables} <= {0, 1}:
        return DeviceMemory.UNKNOWN
    if device.integrated:
        return DeviceMemory.INTEGRATED
    # Pageable access alone is common: on x86 the open kernel driver offers it (HMM) for any card.
    coherent = device.pageable and device.host_page_tables
    return DeviceMemory.COHERENT if coherent else DeviceMemory.DISCRETE


def mem_available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of RAM available without swapping; None if the kernel does not report them."""
    return _read_meminfo("MemAvailable", meminfo)


def _read_meminfo(name: str, meminfo: Path) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def ram_total(root: Path = Path("/")) -> int | None:
    """Bytes of RAM that this process may use at all; None if the kernel does not report them.

    That is the machine's, or the limit of a container or control group if it is lower. Unlike
    `mem_available` it does not depend on what other programs hold.
    """
    total = _read_meminfo("MemTotal", root / "proc/meminfo")
    groups = root / "sys/fs/cgroup"
    limits = [groups / "memory/memory.limit_in_bytes"]  # version 1
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):  # version 2: every group around this process has a limit
                inner = Path(line.removeprefix("0::").lstrip("/"))
                limits += [groups / group / "memory.max" for group in (inner, *inner.parents)]
    for path in limits:
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            total = min(int(path.read_text()), total) if total else None
    return total


def spare_memory(platform: str, total: int | float) -> int | float:
    """Bytes that a run may use of a device's `total`: a discrete GPU's, or the RAM.

    `count_total` is its inverse.
    """
    if platform != "cpu":
        return float(_DISCRETE) * total
    return total - max(_RAM_LEFT, _RAM_SHARE_LEFT * total)


def count_total(platform: str, usable: int | float) -> int | float:
    """Bytes of the smallest device of which `spare_memory` leaves that many."""
    if platform != "cpu":
        return usable / float(_DISCRETE)
    return max(usable + _RAM_LEFT, usable / (1 - _RAM_SHARE_LEFT))


def memory_policy(
    devices: Sequence[Device],
    *,
    environ: Mapping[str, str],
    mem_available: int | None,
    lean: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """Chooses the environment settings to add for these devices; returns the reasons too, as lines.

    `mem_available` is in bytes. With `lean` JAX preallocates nothing. Variables that `environ`
    already sets are left out of the settings and named in the reasons; an empty value counts as not
    set. MANAGED_MEMORY=1 forces unified memory, 0 forbids it. Raises `UserError` for another value,
    and if both names of the memory fraction are set.
    """
    asked = environ.get(MANAGED) or None
    if asked not in (None, "0", "1"):
        raise UserError(
            f"{MANAGED}={asked!r}: must be 1 (force unified memory), 0 (forbid it), or not set "
            "(off unless TF_FORCE_UNIFIED_MEMORY sets it)."
        )
    kind = classify_device_memory(devices)
    if kind is DeviceMemory.NONE:
        return {}, ["nothing to set"]
    if environ.get(FRACTION) and environ.get(OLD_FRACTION):
        raise UserError(
            f"{FRACTION} and {OLD_FRACTION} are both set, and JAX refuses to start with both: "
            f"unset {OLD_FRACTION}, the deprecated name."
        )
    unified = (environ.get(UNIFIED) or asked or "0").lower() in ("1", "true")
    if unified:
        wanted, reason = _unified(kind)
    elif kind is DeviceMemory.INTEGRATED:
        wanted, reason = _integrated(devices, mem_available)
    elif kind is DeviceMemory.UNKNOWN:
        wanted, reason = {}, "the driver did not say, so JAX's defaults stay"
    else:
        wanted, reason = _own_memory(kind, lean)
    if asked:
        wanted[UNIFIED] = asked
    settings, kept = _yield_to_user(wanted, environ)
    return settings, [reason, *kept, *_traps(environ, unified)]


def _unified(kind: DeviceMemory) -> tuple[dict[str, str], str]:
    # With preallocation XLA would take 100% of the device at once, whatever the fraction says.
    settings = {ALLOCATOR: "bfc", PREALLOCATE: "false"}
    if kind is DeviceMemory.INTEGRATED:
        settings[PINNED_GIB] = "4"
    return settings, (
        "unified allocations, as set: grown on demand by bfc, the only allocator that makes "
        "them; fractions below 1 have no effect"
    )


def _integrated(devices: Sequence[Device], available: int | None) -> tuple[dict[str, str], str]:
    # Unified allocations stay off: plain ones already are the shared RAM, JAX copies host arrays
    # in any case, and in unified mode XLA ignores the fraction, the only bound there is.
    settings = {ALLOCATOR: "bfc", PREALLOCATE: "false", PINNED_GIB: "4"}
    if available is None:
        return settings, "grown on demand by bfc to XLA's 75%: the kernel reports no MemAvailable"
    total = min(device.total_bytes or 0 for device in devices)
    # Not the driver's free figure, which leaves out the page cache: it can say 2 GiB with 73 GiB
    # of cache to give back.
    reserve = max(8 * GIB, total // 10)
    share = (available - reserve) / len(devices) / max(total, 1)
    fraction = min(max(share, 0.1), 0.75)
    return settings | {FRACTION: f"{fraction:.3f}"}, (
        f"up to {fraction:.1%} of {total / GIB:.1f} GiB, grown on demand by bfc: "
        f"{available / GIB:.1f} GiB are available, of which {reserve / GIB:.1f} stay for the system"
    )


def _own_memory(kind: DeviceMemory, lean: bool) -> tuple[dict[str, str], str]:
    # The rest is for what XLA does not allocate: the context, cuDNN, cuBLAS, NCCL. On a superchip
    # the operating system may also place page cache in the device's memory.
    fraction = _DISCRETE if kind is DeviceMemory.DISCRETE else "0.85"
    settings = {ALLOCATOR: "default", PREALLOCATE: str(not lean).lower(), FRACTION: fraction}
    how = f"grows to {fraction} of it" if lean else f"takes {fraction} of it at the start"
    return settings, f"XLA's default allocator {how}"


def _yield_to_user(
    wanted: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    settings, kept = {}, []
    for name, value in wanted.items():
        names = (FRACTION, OLD_FRACTION) if name == FRACTION else (name,)
        already = [n for n in names if environ.get(n)]
        if not already:
            settings[name] = value
        elif environ[already[0]] != value:  # a command that starts twice has set its own
            kept.append(f"{already[0]}={environ[already[0]]} was set already and stays")
    return settings, kept


def _traps(environ: Mapping[str, str], unified: bool) -> list[str]:
    """Lists settings of the user that do not do what they seem to."""
    traps = []
    preallocate = environ.get(PREALLOCATE, "")
    if preallocate not in ("false", "False") and preallocate.lower() in ("false", "no", "off"):
        traps.append(f"{PREALLOCATE}={preallocate} means true: only false, False and 0 mean false")
    allocator = environ.get(ALLOCATOR, "").lower()
    if unified and allocator not in ("", "default", "bfc"):
        traps.append(f"{ALLOCATOR}={allocator} never allocates unified memory: only bfc does")
    return traps


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The chosen settings, the reasons, and which of them were applied."""

    kind: DeviceMemory
    settings: Mapping[str, str]  # added to the environment; empty if JAX had already started
    reasons: Sequence[str]
    cache: str  # folder of the compilation cache, or the reason why it is off
    gpus: int = 0  # number that the driver shows to this process

    def describe(self) -> list[str]:
        """Lines for the log."""
        lines = [f"device memory: {self.kind.value}; {self.reasons[0]}"]
        lines += [f"  {reason}" for reason in self.reasons[1:]]
        if self.settings:
            lines.append("  set " + " ".join(f"{k}={v}" for k, v in self.settings.items()))
        return [*lines, f"compilation cache: {self.cache}"]


def configure(
    *,
    lean: bool = False,
    environ: MutableMapping[str, str] | None = None,
    probe: Callable[[Mapping[str, str]], Probe] = probe_devices,
    mem_available: Callable[[], int | None] = mem_available,
) -> Runtime:
    """Decides and applies everything; call it once, before the first use of a JAX device.

    With `lean` JAX preallocates no memory, which a run on the same device would lack. Compiled
    programs are stored in ~/.cache/kdjax/xla, unless JAX_COMPILATION_CACHE_DIR or jax.config names
    another folder. Warns, naming the settings, if JAX has already started and no longer reads them.
    Raises `UserError` for settings that cannot work. The other arguments are for tests: `environ`
    is os.environ if left out.
    """
    from jax._src import xla_bridge  # no public function says whether JAX has started

    environ = os.environ if environ is None else environ
    probed = probe(environ) if _wants_gpu(environ) else Probe(note="JAX_PLATFORMS excludes GPUs")
    kind = classify_device_memory(probed.devices)
    settings, reasons = memory_policy(
        probed.devices, environ=environ, mem_available=mem_available(), lean=lean
    )
    if kind not in (DeviceMemory.NONE, DeviceMemory.UNKNOWN):
        settings |= _leave_products_to_cublas(environ)
    if probed.note:
        reasons.append(probed.note)
    if kind is DeviceMemory.UNKNOWN:
        _log.warning("device memory: %s; %s", kind.value, "; ".join(reasons))
    if settings and xla_bridge.backends_are_initialized():
        late = " ".join(f"{name}={value}" for name, value in settings.items())
        _log.warning("JAX has already started; too late to set %s", late)
        reasons.append(f"not applied, because JAX had already started: {late}")
        settings = {}
    environ.update(settings)
    if FLAGS in settings:
        _added.add(settings[FLAGS])
    # On a CPU a step dispatched ahead holds its temporaries in addition to the running step's, 4 GB
    # for a 0.5B student, and computes nothing sooner.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if kind is DeviceMemory.NONE:
        _keep_freed_memory(environ)
    gpus = sum(device.total_bytes is not None for device in probed.devices)
    return Runtime(kind, settings, reasons, _compilation_cache(environ), gpus)


def _leave_products_to_cublas(environ: Mapping[str, str]) -> dict[str, str]:
    """Has XLA leave products to cuBLAS, as `sharding.compiler_options` does for one program.

    On an H200 the trials were 100 of the 161 s of GPTQ on a 1.5B, and 4 of a start's 36.
    `decoding` turns them on for programs that read few rows again and again. Flags of a file stay:
    XLA takes a value that begins with no dash for a file's name, and ends a process without it.
    """
    flags = environ.get(FLAGS, "").strip()
    if says_products(environ) or TRITON_PRODUCTS in flags:
        return {}
    return {FLAGS: f"{flags} --{TRITON_PRODUCTS}=false".strip()}


_added: set[str] = set()  # values of XLA_FLAGS to which `configure` added its word on products


def says_products(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user's XLA_FLAGS say who computes products, or name a file, which may."""
    flags = environ.get(FLAGS, "").strip()
    return flags not in _added and (
        TRITON_PRODUCTS in flags or bool(flags and not flags.startswith("-"))
    )


def _keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Lets glibc reuse blocks of up to 256 MiB that are freed, instead of returning them.

    XLA's CPU backend allocates a step's temporaries anew each time. Pages from the kernel are
    zeroed, with a page fault every 4 kB: 20 of the 120 ms of a step of configs/demo.py.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not Linux
        return
    if "MALLOC_MMAP_THRESHOLD_" not in environ and "MALLOC_TRIM_THRESHOLD_" not in environ:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(option, 2**28)


def _wants_gpu(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    return platforms == [""] or not {"cuda", "gpu"}.isdisjoint(platforms)


def _compilation_cache(environ: Mapping[str, str]) -> str:
    if CACHE_DIR in environ:
        # JAX reads its variables once, when imported: it does not see one that was set later.
        jax.config.update("jax_compilation_cache_dir", environ[CACHE_DIR] or None)
        return environ[CACHE_DIR] or f"off ({CACHE_DIR} is empty)"
    if chosen := jax.config.values["jax_compilation_cache_dir"]:
        return str(chosen)  # the calling program has set it
    try:
        folder = PROGRAMS.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # JAX runs programs from it
        with contextlib.suppress(OSError):  # another process does so, or it can be read alone
            remove_cut_programs(folder)
    except (OSError, RuntimeError) as error:  # the latter of expanduser: a user without a home
        return f"off ({error}; {CACHE_DIR}=DIR names another folder)"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    return str(folder)


def remove_cut_programs(folder: Path) -> None:
    """Removes programs that a kill or a full disk cut short, of those written since the last call.

    JAX would warn of each in every process, compile it again, and never replace it.
    """
    checked = folder.with_name(f"{folder.name}.checked")
    since, now = checked.stat().st_mtime if checked.exists() else 0.0, time.time()
    for entry in folder.glob("*-cache"):
        if entry.stat().st_mtime >= since and not _is_complete(entry.read_bytes()):
            entry.unlink(missing_ok=True)
    checked.touch()
    os.utime(checked, (now, now))


def _is_complete(data: bytes) -> bool:
    """Whether packed bytes have their end; Zstandard, which is no dependency, is not unpacked."""
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(data)
    except zlib.error:
        return data.startswith(b"\x28\xb5\x2f\xfd")
    return unpacker.eof


# Dense FLOP/s of bf16 or f16 matrix products with float32 accumulation, per device, by the driver's
# full name: "H100 PCIe", "RTX 4090 D" and MIG slices are other devices with other peaks.
# Data sheets print the rate with sparsity, twice the dense one. None is published for GB10.
_PEAK_FLOPS = {
    r"H200": 989e12,  # H200 data sheet, SXM: 1979 with sparsity
    r"H100 80GB HBM3": 989e12,  # H100 data sheet, SXM: 1979 with sparsity
    r"A100-(SXM4|PCIE)-[48]0GB|A100 80GB PCIe": 312e12,  # A100 data sheet
    r"B200": 2250e12,  # HGX B200 data sheet: 36 PFLOP/s with sparsity for eight
    r"L40S": 362e12,  # L40S data sheet: 733 with sparsity
    r"L4": 121e12,  # L4 data sheet: 242 with sparsity
    r"GeForce RTX 4090": 165.2e12,  # Ada architecture white paper, appendix
    r"GeForce RTX 3090": 71e12,  # GA102 architecture white paper, appendix
}


def peak_matmul_flops(device_kind: str, dtype: jax.typing.DTypeLike) -> float | None:
    """Peak FLOP/s of one device, for utilisation; None if no data sheet has it."""
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return None  # float32 depends on whether TF32 is allowed
    name = device_kind.removeprefix("NVIDIA ")
    return next((peak for kind, peak in _PEAK_FLOPS.items() if re.fullmatch(kind, name)), None)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices JAX found, over all processes."""

    platform: str
    kind: str
    count: int
    memory_bytes: int | None  # that XLA may use on one device; on a CPU of the RAM, that all share
    peak_flops: float | None  # sum over all devices, dense bf16; None if unknown
    driver: str | None = None  # NVIDIA's kernel driver, such as 580.95.05

    def __str__(self) -> str:
        shared = "of RAM for a run" if self.platform == "cpu" else "each"
        memory = f", {self.memory_bytes / 1e9:.1f} GB {shared}" if self.memory_bytes else ""
        driver = f", driver {self.driver}" if self.driver else ""
        where = f"{self.platform}{memory}{driver}"
        return f"{self.count} x {self.kind} ({where}), jax {jax.__version__}"


def device_summary() -> Devices:
    """Describes JAX's devices; starts JAX if it has not started.

    Raises `UserError` if JAX cannot start on the platform that JAX_PLATFORMS names.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a missing plugin
        if not (asked := _asked_platforms()):
            raise
        extra, reason = _cuda_extra(_driver_version()), str(error) or "it has no such plugin"
        raise UserError(
            f"JAX_PLATFORMS={asked}: JAX cannot start there ({reason}). "
            f"Unset it, set JAX_PLATFORMS=cpu, or, for an NVIDIA GPU, pip install 'kdjax[{extra}]'."
        ) from error
    first = jax.local_devices()[0]  # devices of other processes have no statistics here
    memory = (first.memory_stats() or {}).get("bytes_limit")
    if first.platform == "cpu":
        total = ram_total()
        memory = int(spare_memory("cpu", total)) if total else None
    peak = peak_matmul_flops(first.device_kind, jnp.bfloat16)
    return Devices(
        platform=first.platform,
        kind=first.device_kind,
        count=len(devices),
        memory_bytes=memory,
        peak_flops=peak and peak * len(devices),
        driver=_driver_version() if first.platform == "gpu" else None,
    )


def refuse_idle_gpus(
    gpus: int, devices: Devices, *, driver: str | None, suits_cpu: bool = False
) -> None:
    """Raises `UserError` if the driver shows GPUs and JAX uses only the CPU, as without a plugin.

    The message names the command that installs the plugin. For a run that `suits_cpu` it is a
    warning. JAX_PLATFORMS silences both.
    """
    if not gpus or devices.platform != "cpu" or _asked_platforms():
        return
    extra = _cuda_extra(driver)
    wrong = "cuda12" if extra == "cuda13" else "cuda13"
    commands, reason = [f"pip install 'kdjax[{extra}]'"], "it has no plugin for CUDA"
    if _installed(f"jax-{extra}-plugin"):
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            reason = f"jax-{extra}-plugin is installed: {error}"
    elif _installed(f"jax-{wrong}-plugin"):
        reason = f"jax-{wrong}-plugin is installed, which this driver does not serve"
        commands.insert(0, f"pip uninstall -y jax-{wrong}-plugin jax-{wrong}-pjrt")
    shown = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    found = f"the NVIDIA driver{f' {driver}' if driver else ''} shows {shown}, and JAX does not use"
    remedy = f"To use them: {' && '.join(commands)}. To run on the CPU: JAX_PLATFORMS=cpu."
    message = f"{found} them: {reason}. {remedy}"
    if not suits_cpu:
        raise UserError(message)
    _log.warning("%s This run suits a CPU and goes on there.", message)


def _asked_platforms() -> str | None:
    return jax.config.values["jax_platforms"]  # JAX_PLATFORMS, or what the program has set


def _cuda_extra(driver: str | None) -> str:
    """Name of kdjax's extra for a driver: CUDA 13 needs driver 580 or newer."""
    major = (driver or "").partition(".")[0]
    return "cuda12" if major.isdigit() and int(major) < 580 else "cuda13"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def open_devices(chosen: Runtime, *, suits_cpu: bool = False) -> Devices:
    """Starts JAX and logs its devices; raises as `refuse_idle_gpus`. `chosen` is `configure`'s."""
    devices = device_summary()
    _log.info("%s", devices)
    driver = _driver_version()
    refuse_idle_gpus(chosen.gpus, devices, driver=driver, suits_cpu=suits_cpu)
    return devices


def _driver_version() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip() or None
    except OSError:
        return None


def peak_memory() -> str:
    """One line: the peak memory of XLA on a device, and of this process in RAM."""
    host = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.1f} GB host"
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    device = f"{max(peaks) / 1e9:.1f} GB a device, " if peaks else ""
    return f"peak memory: {device}{host}"
