"""Device memory policy, driven with the drivers of machines that are not here."""

import itertools
import json
import os
import subprocess
import sys

import jax
import pytest

from kdjax import runtime
from kdjax.errors import UserError
from kdjax.runtime import GIB, Device, Memory, classify_device_memory, configure, memory_policy

H200 = [Device(0, 0, 140 * GIB)]
RTX_4090 = [Device(0, 0, 24 * GIB)]
GB10 = [Device(1, 0, 120 * GIB)]
ORIN = [Device(1, 0, 60 * GIB)]
GH200 = [Device(0, 1, 96 * GIB)]
MEMINFO = "MemTotal: 125829120 kB\nMemFree: 1 kB\nMemAvailable: 104857600 kB\n"


class FakeCuda:
    """libcuda that answers from a table; `failing` names the call that returns an error."""

    def __init__(self, attributes, failing="", status=1):
        self.attributes, self.failing, self.status = attributes, failing, status

    def __getattr__(self, name):
        def call(*args):
            if name == self.failing:
                return self.status
            if name == "cuDeviceGetCount":
                args[0]._obj.value = 1
            elif name == "cuDeviceTotalMem_v2":
                args[0]._obj.value = 8 * GIB
            elif name == "cuDeviceGetAttribute":
                args[0]._obj.value = self.attributes[args[1]]
            elif name not in ("cuInit", "cuDeviceGet"):
                raise AssertionError(f"{name} would create a context")
            return 0

        return call


def run(devices, environ=None, **kwargs):
    environ = {} if environ is None else environ
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", "/unused")
    return configure(
        environ=environ, probe=lambda: devices, meminfo=lambda: MEMINFO, **kwargs
    ), environ


@pytest.fixture
def jax_not_started(monkeypatch):
    from jax._src import xla_bridge

    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)


@pytest.mark.parametrize(
    ("devices", "kind"),
    [(H200, Memory.DISCRETE), (RTX_4090, Memory.DISCRETE), (GB10, Memory.INTEGRATED),
     (ORIN, Memory.INTEGRATED), (GH200, Memory.COHERENT), (None, Memory.NONE), ([], Memory.NONE),
     (H200 + GB10, Memory.UNKNOWN), (GB10 + GB10, Memory.INTEGRATED)],
)  # fmt: skip
def test_known_machines(devices, kind):
    assert classify_device_memory(devices) is kind


def test_classification_is_total_and_an_error_is_never_integrated():
    for integrated, tables in itertools.product((None, 0, 1, 2), repeat=2):
        kind = classify_device_memory([Device(integrated, tables)])
        assert (kind is Memory.INTEGRATED) == (integrated == 1)
        if integrated is None:
            assert kind is Memory.UNKNOWN


def test_probe_reads_the_attributes():
    cuda = FakeCuda({18: 1, 100: 0})
    assert runtime.probe_devices(lambda _: cuda) == [Device(1, 0, 8 * GIB)]


@pytest.mark.parametrize(
    "failing", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute"]
)
def test_a_broken_driver_is_unknown_and_changes_nothing(failing, jax_not_started):
    cuda = FakeCuda({18: 1, 100: 0}, failing)
    devices = runtime.probe_devices(lambda _: cuda)
    assert classify_device_memory(devices) is Memory.UNKNOWN
    result, environ = run(devices)
    assert not result.applied and set(environ) == {"JAX_COMPILATION_CACHE_DIR"}


def test_no_driver_and_no_device():
    def missing(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert runtime.probe_devices(missing) is None
    assert runtime.probe_devices(lambda _: FakeCuda({}, "cuInit", status=100)) is None


@pytest.mark.parametrize(
    ("devices", "preallocate", "fraction"),
    [(H200, "true", "0.90"), (RTX_4090, "true", "0.90"), (GH200, "true", "0.85"),
     (GB10, "false", "0.733"), (ORIN, "false", "0.750")],
)  # fmt: skip
def test_policy_by_machine(devices, preallocate, fraction, jax_not_started):
    # GB10: (100 GiB available - 12 reserved) / 120.
    _, environ = run(devices)
    assert environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "bfc"
    assert environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == preallocate
    assert environ["XLA_CLIENT_MEM_FRACTION"] == fraction
    assert "TF_FORCE_UNIFIED_MEMORY" not in environ
    assert ("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in environ) == (preallocate == "false")


def test_integrated_budget_follows_available_memory():
    little, _ = memory_policy(Memory.INTEGRATED, GB10, 20 * GIB, None)
    assert little["XLA_CLIENT_MEM_FRACTION"] == "0.100"
    unknown, _ = memory_policy(Memory.INTEGRATED, [Device(1, 0)], None, None)
    assert "XLA_CLIENT_MEM_FRACTION" not in unknown


@pytest.mark.parametrize("devices", [H200, GB10, GH200])
def test_managed_memory_can_be_forced_or_forbidden(devices, jax_not_started):
    _, forced = run(devices, {"MANAGED_MEMORY": "1"})
    assert forced["TF_FORCE_UNIFIED_MEMORY"] == "1"
    assert forced["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    _, forbidden = run(devices, {"MANAGED_MEMORY": "0"})
    assert forbidden["TF_FORCE_UNIFIED_MEMORY"] == "0"
    with pytest.raises(UserError, match=r"MANAGED_MEMORY='yes': must be 1 .* or 0"):
        run(devices, {"MANAGED_MEMORY": "yes"})


@pytest.mark.parametrize(
    "name",
    ["XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"],
)
def test_the_users_own_setting_wins(name, jax_not_started):
    result, environ = run(H200, {name: "mine"})
    assert environ[name] == "mine" and result.kept == {name: "mine"} and name not in result.applied


def test_both_fraction_names_are_never_set(jax_not_started):
    _, environ = run(H200, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"})
    assert "XLA_CLIENT_MEM_FRACTION" not in environ


def test_cpu_platform_is_not_probed(jax_not_started):
    result, _ = run(H200, {"JAX_PLATFORMS": "cpu"})
    assert result.kind is Memory.NONE and not result.applied


def test_too_late_warns_and_sets_nothing(monkeypatch):
    jax.devices()
    warned = []
    monkeypatch.setattr(runtime.logging, "warning", lambda text, *args: warned.append(text % args))
    result, environ = run(H200)
    assert "XLA_CLIENT_MEM_FRACTION" in warned[0] and "XLA_CLIENT_MEM_FRACTION" not in environ
    assert not result.applied


def test_unwritable_cache_is_off_with_a_reason(tmp_path, jax_not_started):
    (tmp_path / "file").write_text("")
    environ: dict[str, str] = {}
    result = configure(
        environ=environ, probe=lambda: None, meminfo=str, cache_dir=tmp_path / "file" / "x"
    )
    assert result.cache.startswith("off (")


def test_mem_available():
    assert runtime.mem_available(MEMINFO) == 100 * GIB
    assert runtime.mem_available("nothing") is None


_CHILD = """
import json, os
from jaxlib import xla_client
from kdjax.runtime import GIB, Device, configure
configure(probe=lambda: [Device(1, 0, 120 * GIB)], meminfo=lambda: "MemAvailable: 104857600 kB")
print(json.dumps([{k: v for k, v in os.environ.items() if k.startswith(("XLA_", "TF_FORCE"))},
                  xla_client.generate_pjrt_gpu_plugin_options()]))
"""


def test_a_child_process_and_its_jax_see_the_settings(tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "TF_FORCE"))}
    child = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True,
                           env=clean | {"HOME": str(tmp_path)}, check=True)  # fmt: skip
    environ, options = json.loads(child.stdout.splitlines()[-1])
    assert environ["XLA_CLIENT_MEM_FRACTION"] == "0.733"
    assert options["allocator"] == "bfc" and options["memory_fraction"] == 0.733
    assert options["preallocate"] is False
