"""Asks the CUDA driver about the visible devices, before JAX starts.

Run as a script, it prints the answers as JSON; `probe_devices` does that in a child process. Three
reasons for the child: after `cuInit` a forked worker can no longer use CUDA; `cuInit` fixes
CUDA_VISIBLE_DEVICES for the life of its process; and a driver that hangs or crashes takes only the
child with it. The child imports the standard library alone, so it costs about as much as starting
Python. It creates no context and allocates nothing on the device.

Attribute numbers: CUdevice_attribute in CUDA's cuda.h.
"""

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

_INTEGRATED = 18
_MAJOR, _MINOR = 75, 76
_PAGEABLE = 88
_HOST_PAGE_TABLES = 100

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, also the answer to an empty CUDA_VISIBLE_DEVICES


@dataclasses.dataclass(frozen=True)
class Device:
    """One device as the driver describes it; None where the driver returned an error."""

    integrated: int | None = None
    pageable: int | None = None  # whether it can read memory of malloc
    host_page_tables: int | None = None  # whether it does so by the CPU's page tables
    major: int | None = None  # compute capability
    minor: int | None = None
    total_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Probe:
    """The visible devices, and a note on what went wrong or why there are none."""

    devices: tuple[Device, ...] = ()
    note: str = ""

    def to_json(self) -> str:
        """One line for `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Probe":
        """Parses a line of `to_json`; raises ValueError, KeyError or TypeError for another text."""
        fields = json.loads(text)
        return cls(tuple(Device(**device) for device in fields["devices"]), fields["note"])


def _broken(note: str) -> Probe:
    """Makes the probe of a driver that does not even return its number of devices."""
    return Probe((Device(),), note)


def ask_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Probe:
    """Asks libcuda in this process, with the effects named above. Never raises."""
    try:
        cuda = load("libcuda.so.1")
    except OSError as error:
        return Probe(note=f"no NVIDIA driver: {error}")
    try:
        if status := cuda.cuInit(0):
            if status == _NO_DEVICE:
                return Probe(note="no visible NVIDIA device")
            return _broken(f"cuInit returned {status}")
        count = ctypes.c_int()
        if status := cuda.cuDeviceGetCount(ctypes.byref(count)):
            return _broken(f"cuDeviceGetCount returned {status}")
        failures: list[str] = []
        devices = tuple(_ask_device(cuda, index, failures) for index in range(count.value))
    except AttributeError as error:  # a library of that name without the entry point
        return _broken(str(error))
    return Probe(devices, "; ".join(failures) if devices else "no visible NVIDIA device")


def _ask_device(cuda: Any, index: int, failures: list[str]) -> Device:
    def answered(call: str, status: int) -> bool:
        if status:
            failures.append(f"{call} returned {status} for device {index}")
        return not status

    handle = ctypes.c_int()
    if not answered("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(handle), index)):
        return Device()

    def attribute(number: int) -> int | None:
        value = ctypes.c_int()
        status = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value if answered(f"cuDeviceGetAttribute({number})", status) else None

    total = ctypes.c_size_t()
    status = cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    return Device(
        integrated=attribute(_INTEGRATED),
        pageable=attribute(_PAGEABLE),
        host_page_tables=attribute(_HOST_PAGE_TABLES),
        major=attribute(_MAJOR),
        minor=attribute(_MINOR),
        total_bytes=total.value if answered("cuDeviceTotalMem", status) else None,
    )


def probe_devices(
    environ: Mapping[str, str] | None = None,
    *,
    command: tuple[str, ...] = (sys.executable, "-I", "-S", __file__),
    timeout: float = 60.0,
) -> Probe:
    """Asks the driver in a child process that sees `environ`, or this one's. Never raises.

    The driver itself honours CUDA_VISIBLE_DEVICES. A child that crashes, prints something else or
    takes longer than `timeout` seconds counts as one device without answers. A minute is long for a
    probe, but a driver without its persistence daemon must wake every GPU first.
    """
    env = dict(os.environ if environ is None else environ)
    try:
        child = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return _broken(f"the driver did not answer in {timeout:g} s")
    except OSError as error:
        return _broken(f"the driver could not be asked: {error}")
    try:
        return Probe.from_json(child.stdout.splitlines()[-1])
    except (ValueError, KeyError, TypeError, IndexError):
        return _broken(f"asking the driver ended with status {child.returncode}")


if __name__ == "__main__":
    print(ask_driver().to_json())
