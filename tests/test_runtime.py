"""Device memory policy, driven with the drivers of machines that are not here."""

import dataclasses
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from unittest import mock

import jax
import programs
import pytest
from jax._src import xla_bridge
from jax.sharding import NamedSharding, PartitionSpec
from test_probe import GB10, GH200, H200, ORIN, RTX_4090, SILENT

from kdjax.commands import cli
from kdjax.device import runtime
from kdjax.device.probe import Device, Probe
from kdjax.device.runtime import GIB, DeviceMemory, classify_device_memory, configure, memory_policy
from kdjax.device.sharding import make_local_mesh
from kdjax.errors import UserError


def policy(*devices, available=100 * GIB, **environ):
    return memory_policy(devices, environ=environ, mem_available=available)


def run(*devices, note="", available=100 * GIB, environ=None, **kwargs):
    """configure() on a machine with these devices and nothing else in its environment."""
    environ = {"JAX_COMPILATION_CACHE_DIR": ""} | (environ or {})
    result = configure(
        environ=environ,
        probe=lambda _: Probe(devices, note),
        mem_available=lambda: available,
        **kwargs,
    )
    return result, environ


@pytest.fixture(autouse=True)
def jax_as_it_was():
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_cpu_enable_async_dispatch",
    )
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def not_started(monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)


@pytest.fixture
def warnings_logged():
    """Messages of kdjax.device.runtime's logger, whatever the root logger does."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("kdjax.device.runtime")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


# The classification.


@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        ((H200,), "discrete"),
        ((RTX_4090,), "discrete"),
        ((GB10,), "integrated"),
        ((ORIN,), "integrated"),
        ((GH200,), "coherent"),
        ((), "none"),
        ((SILENT,), "unknown"),
        ((H200, H200), "discrete"),
        ((H200, GB10), "unknown"),
        ((GB10, SILENT), "unknown"),
    ],
)
def test_known_machines(devices, kind):
    assert classify_device_memory(devices) is DeviceMemory(kind)


def every_device():
    """Each flag refused, 0, 1 or nonsense; capability and size answered or refused."""
    flags = itertools.product((None, 0, 1, 2), repeat=3)
    rest = itertools.product((None, 12), (None, 1), (None, 0, 120 * GIB))
    for first, last in itertools.product(flags, rest):
        yield Device(*first, *last)


def test_classification_is_total_and_an_error_is_never_integrated():
    seen = set()
    for device in every_device():
        kind = classify_device_memory([device])
        seen.add(kind)
        if None in dataclasses.astuple(device):
            assert kind is DeviceMemory.UNKNOWN
        if kind is DeviceMemory.INTEGRATED:
            assert device.integrated == 1
        for other in (H200, GB10):
            together = classify_device_memory([device, other])
            same = kind is classify_device_memory([other])
            assert together is (kind if same else DeviceMemory.UNKNOWN)
    assert seen == set(DeviceMemory) - {DeviceMemory.NONE}


# The policy.


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (H200, ("default", "true", "0.90", None)),
        (RTX_4090, ("default", "true", "0.90", None)),
        (GH200, ("default", "true", "0.85", None)),
        (GB10, ("bfc", "false", "0.733", "4")),  # (100 GiB available - 12 reserved) / 120
        (ORIN, ("bfc", "false", "0.750", "4")),
        (SILENT, (None,) * 4),
    ],
)
def test_policy_by_machine(device, expected):
    settings, _ = policy(device)
    names = (runtime.ALLOCATOR, runtime.PREALLOCATE, runtime.FRACTION, runtime.PINNED_GIB)
    assert settings == {n: v for n, v in zip(names, expected, strict=True) if v is not None}


@pytest.mark.parametrize("device", [H200, GH200])
def test_a_lean_command_takes_no_memory_ahead_of_its_use(device):
    environ = dict(environ={}, mem_available=None)
    [settings, [reason]] = memory_policy([device], **environ, lean=True)
    assert settings == policy(device)[0] | {runtime.PREALLOCATE: "false"}
    assert "grows to" in reason and "at the start" in policy(device)[1][0]


def test_without_a_gpu_nothing_is_set():
    assert policy(MANAGED_MEMORY="1") == ({}, ["nothing to set"])


@pytest.mark.parametrize(
    ("devices", "available", "fraction"),
    [
        ((GB10,), 20, "0.100"),
        ((GB10,), 5, "0.100"),
        ((GB10,), 60, "0.400"),
        ((GB10,), 119, "0.750"),
        ((ORIN,), 38, "0.500"),
        ((GB10, GB10), 60, "0.200"),
        ((GB10,), None, None),
    ],
)
def test_integrated_budget_follows_available_memory(devices, available, fraction):
    settings, _ = policy(*devices, available=available and available * GIB)
    assert settings.get(runtime.FRACTION) == fraction


@pytest.mark.parametrize("device", [H200, GB10, GH200, SILENT])
def test_managed_memory_forces_or_forbids(device):
    forced, _ = policy(device, MANAGED_MEMORY="1")
    assert forced[runtime.UNIFIED] == "1" and forced[runtime.ALLOCATOR] == "bfc"
    assert forced[runtime.PREALLOCATE] == "false" and runtime.FRACTION not in forced
    assert (runtime.PINNED_GIB in forced) == (device is GB10)
    plain, _ = policy(device)
    forbidden, _ = policy(device, MANAGED_MEMORY="0")
    assert runtime.UNIFIED not in plain
    assert forbidden == plain | {runtime.UNIFIED: "0"}
    assert policy(device, MANAGED_MEMORY="") == policy(device)


@pytest.mark.parametrize("devices", [(), (H200,), (SILENT,)])
@pytest.mark.parametrize("value", ["yes", "true", "2", " 1"])
def test_other_values_of_managed_memory_are_refused_everywhere(devices, value):
    with pytest.raises(UserError, match=rf"MANAGED_MEMORY='{value}': must be 1 .* 0 .* not set"):
        policy(*devices, MANAGED_MEMORY=value)


ALL_SETTINGS = (
    runtime.ALLOCATOR,
    runtime.PREALLOCATE,
    runtime.FRACTION,
    runtime.UNIFIED,
    runtime.PINNED_GIB,
)


@pytest.mark.parametrize("name", ALL_SETTINGS)
@pytest.mark.parametrize("device", [H200, GB10])
@pytest.mark.parametrize("managed", ["", "0", "1"])
def test_the_users_own_setting_wins(name, device, managed):
    without, _ = policy(device, MANAGED_MEMORY=managed)
    settings, reasons = policy(device, MANAGED_MEMORY=managed, **{name: "0"})
    assert name not in settings
    wanted = without.get(name, "0")
    assert (f"{name}=0 was set already and stays" in reasons) == (wanted != "0")


def test_managed_memory_yields_to_xlas_own_name():
    off, reasons = policy(H200, MANAGED_MEMORY="1", TF_FORCE_UNIFIED_MEMORY="0")
    assert off == policy(H200)[0] and "TF_FORCE_UNIFIED_MEMORY=0 was set" in reasons[1]
    # Unified memory that is asked for by that name must not be preallocated either.
    on, _ = policy(H200, MANAGED_MEMORY="0", TF_FORCE_UNIFIED_MEMORY="true")
    assert on == {runtime.ALLOCATOR: "bfc", runtime.PREALLOCATE: "false"}


def test_both_fraction_names_never_come_out():
    fractions = (None, "", "0.5")
    for device in (*every_device(), H200, GB10, GH200):
        for new, old, managed in itertools.product(fractions, fractions, (None, "0", "1")):
            own = {runtime.FRACTION: new, runtime.OLD_FRACTION: old, "MANAGED_MEMORY": managed}
            own = {name: value for name, value in own.items() if value is not None}
            if new and old:
                with pytest.raises(UserError, match="unset XLA_PYTHON_CLIENT_MEM_FRACTION"):
                    policy(device, **own)
                continue
            settings, _ = policy(device, **own)
            after = own | settings
            assert not (after.get(runtime.FRACTION) and after.get(runtime.OLD_FRACTION))
            assert runtime.OLD_FRACTION not in settings


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "FALSE", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "no", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", False),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "0", False),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "bfc", False),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", True),
    ],
)
def test_traps_are_named(name, value, warned):
    _, reasons = policy(H200, MANAGED_MEMORY="1", **{name: value})
    assert any("means true" in r or "never allocates unified" in r for r in reasons) == warned


# configure().


def test_configure_applies_and_describes(not_started, warnings_logged):
    result, environ = run(GB10, environ={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"})
    assert environ.items() >= result.settings.items() and runtime.FRACTION not in environ
    text = "\n".join(result.describe())
    for part in (
        "device memory: integrated",
        "XLA_PYTHON_CLIENT_ALLOCATOR=bfc",
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 was set already",
    ):
        assert part in text
    assert not warnings_logged


def test_configuring_twice_changes_nothing(not_started):
    _, environ = run(GB10)
    again, _ = run(GB10, environ=environ)
    assert "already" not in "\n".join(again.describe())
    again, after = run(GB10, available=30 * GIB, environ=environ)
    assert not again.settings and after == environ


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "--xla_gpu_enable_triton_gemm=false"),
        ("--xla_dump_to=d", "--xla_dump_to=d --xla_gpu_enable_triton_gemm=false"),
        ("--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true"),
        (" ", "--xla_gpu_enable_triton_gemm=false"),
        ("flags.txt", "flags.txt"),  # XLA reads them from there
    ],
)
@pytest.mark.parametrize("device", [H200, GB10])
def test_products_are_left_to_cublas_unless_the_user_says(not_started, device, before, after):
    _, environ = run(device, environ={"XLA_FLAGS": before} if before else {})
    assert environ["XLA_FLAGS"] == after
    assert runtime.says_products(environ) == (before == after)  # then writing leaves them, too
    assert run(device, environ=environ)[1]["XLA_FLAGS"] == after
    assert "XLA_FLAGS" not in run()[1]  # without a GPU


def test_xla_knows_the_flags_that_are_set():
    """XLA ends a process whose XLA_FLAGS it does not know."""
    own = {"JAX_PLATFORMS": "cpu"} | runtime._leave_products_to_cublas({})
    code = "import jax; print(jax.jit(lambda x: x + 1)(1))"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=os.environ | own, capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


def test_a_broken_driver_warns_and_changes_nothing(not_started, warnings_logged):
    result, environ = run(SILENT, note="cuInit returned 999")
    assert set(environ) == {"JAX_COMPILATION_CACHE_DIR"} and not result.settings
    assert "cuInit returned 999" in warnings_logged[0]
    assert result.kind is DeviceMemory.UNKNOWN and "cuInit returned 999" in result.reasons


@pytest.mark.parametrize(
    ("platforms", "probed"),
    [("cpu", False), ("tpu,cpu", False), ("cuda", True), ("gpu,cpu", True), ("", True)],
)
def test_only_a_gpu_platform_is_probed(platforms, probed, not_started):
    result, _ = run(H200, environ={"JAX_PLATFORMS": platforms})
    assert result.kind is (DeviceMemory.DISCRETE if probed else DeviceMemory.NONE)


def test_too_late_warns_and_sets_nothing(warnings_logged):
    jax.devices()
    result, environ = run(H200)
    (message,) = warnings_logged
    assert "already started" in message and "XLA_CLIENT_MEM_FRACTION=0.90" in message
    assert set(environ) == {"JAX_COMPILATION_CACHE_DIR"} and not result.settings
    assert "not applied" in "\n".join(result.describe())
    own = {name: "0" for name in ALL_SETTINGS} | {"XLA_FLAGS": f"--{runtime.TRITON_PRODUCTS}=true"}
    run(H200, environ=own)  # nothing to add, nothing to warn of
    assert len(warnings_logged) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "kept"), [(1, True), (2, False)])
def test_programs_of_several_cpu_devices_are_not_cached(tmp_path, devices, kept):
    """JAX has compiled a program before it knows that others will want several devices."""
    code = """if True:
        import jax, os, sys
        from kdjax.device import sharding
        double = jax.jit(lambda x: x * 2)
        double(1.0)
        before = len(os.listdir(sys.argv[1]))
        rows = jax.NamedSharding(sharding.make_mesh(-1, 1, 1), sharding.ROWS)
        double(jax.device_put(jax.numpy.ones(8), rows))
        print(before > 0, len(os.listdir(sys.argv[1])) > before)
    """
    own = {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    run = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(run, env=os.environ | own, capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(kept)], done.stderr


@pytest.mark.parametrize(("change", "kept"), [(lambda x: 2 * x, 1), (lambda x: x - x.sum(), 0)])
def test_tests_keep_programs_of_several_devices_without_collectives(monkeypatch, change, kept):
    """Their own writer: `tests/programs.py`."""
    place = NamedSharding(make_local_mesh(2), PartitionSpec("data"))
    lowered = jax.jit(change).lower(jax.ShapeDtypeStruct((8,), "float32", sharding=place))
    executable = lowered.compile().runtime_executable()
    assert "num_partitions=2" in executable.hlo_modules()[0].to_string()
    write = mock.Mock()
    monkeypatch.setattr(programs, "_write", write)
    programs._write_safe("key", 1.0, "name", None, executable, ())
    assert write.call_count == kept


def test_compilation_cache_precedence(tmp_path, not_started, monkeypatch):
    def cache(environ, chosen=None):
        jax.config.update("jax_compilation_cache_dir", chosen)
        return configure(environ=dict(environ), probe=lambda _: Probe()).cache

    monkeypatch.setenv("HOME", str(tmp_path))
    mine, theirs = str(tmp_path / ".cache" / "kdjax" / "xla"), str(tmp_path / "theirs")
    assert cache({}) == mine == jax.config.jax_compilation_cache_dir
    assert os.stat(mine).st_mode & 0o077 == 0
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    assert cache({}, theirs) == theirs  # through jax.config, and so is what goes with it
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.5
    slow = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "9"}
    assert cache(slow) == mine
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.5
    assert cache({"JAX_COMPILATION_CACHE_DIR": theirs}, mine) == theirs
    assert jax.config.jax_compilation_cache_dir == theirs
    assert cache({"JAX_COMPILATION_CACHE_DIR": ""}, mine).startswith("off (")
    assert jax.config.jax_compilation_cache_dir is None


def test_unwritable_cache_is_off_with_a_reason(tmp_path, not_started, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    jax.config.update("jax_compilation_cache_dir", None)
    result = configure(environ={}, probe=lambda _: Probe())
    assert result.cache.startswith("off (") and "file" in result.cache
    assert result.cache.endswith("; JAX_COMPILATION_CACHE_DIR=DIR names another folder)")


# After JAX started.


@pytest.mark.parametrize(
    ("meminfo", "available"),
    [
        (
            "MemTotal: 125829120 kB\nMemFree:  1 kB\nMemAvailable:   104857600 kB\nX: 2 kB\n",
            100 * GIB,
        ),
        ("", None),
        ("MemTotal: 1 kB", None),
        ("MemAvailable: lots kB", None),
        ("NotMemAvailable: 1 kB", None),
    ],
)
def test_mem_available(tmp_path, meminfo, available):
    (tmp_path / "meminfo").write_text(meminfo)
    assert runtime.mem_available(tmp_path / "meminfo") == available
    assert runtime.mem_available(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("files", "total"),
    [
        ({}, 16 * GIB),
        ({"sys/fs/cgroup/a/memory.max": str(4 * GIB)}, 4 * GIB),
        ({"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/memory.max": "1024"}, 1024),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63)}, 16 * GIB),
    ],
)
def test_the_ram_is_the_machines_or_a_groups_limit(tmp_path, files, total):
    meminfo = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: 1 kB\n"
    for name, text in ({"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert runtime.ram_total(tmp_path) == total
    assert runtime.ram_total(tmp_path / "none") is None


def test_device_summary_on_the_cpu():
    devices = runtime.device_summary()
    assert (devices.platform, devices.count) == ("cpu", jax.device_count())
    assert devices.peak_flops is None and devices.driver is None
    assert devices.memory_bytes is None or "GB of RAM for a run" in str(devices)
    assert runtime.peak_memory().endswith("GB host")


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "bfloat16", 312e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA GeForce RTX 4090", jax.numpy.bfloat16, 165.2e12),
        # Neighbours in name, not in speed; and what has no published figure.
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA GB200", "bfloat16", None),
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA GB10", "bfloat16", None),
        ("cpu", "bfloat16", None),
        ("NVIDIA H200", "float32", None),
    ],
)
def test_peaks_are_for_the_exact_device(kind, dtype, peak):
    assert runtime.peak_matmul_flops(kind, dtype) == peak


# What a real process ends up with.

_CHILD = """
import json, os
from jax._src import xla_bridge
from jaxlib import xla_client
from kdjax.device.probe import Device, Probe
from kdjax.device.runtime import GIB, configure
import_started = xla_bridge.backends_are_initialized()
device = Device(*json.loads(os.environ.pop("DEVICE")))
configure(probe=lambda _: Probe((device,)), mem_available=lambda: 100 * GIB)
import jax
print(json.dumps({"started": import_started or xla_bridge.backends_are_initialized(),
                  "environ": dict(os.environ), "cache": jax.config.jax_compilation_cache_dir,
                  "options": xla_client.generate_pjrt_gpu_plugin_options()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "own", "allocator", "fraction", "preallocate"),
    [
        (GB10, {}, "bfc", 0.733, False),
        (H200, {}, "default", 0.9, True),
        (H200, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "default", 0.5, True),
    ],
)
def test_a_child_process_and_its_jax_see_the_settings(
    tmp_path, device, own, allocator, fraction, preallocate
):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "TF_FORCE"))}
    clean |= {"HOME": str(tmp_path), "DEVICE": json.dumps(dataclasses.astuple(device))} | own
    child = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, env=clean, check=True
    )
    seen = json.loads(child.stdout.splitlines()[-1])
    assert not seen["started"], "importing kdjax.device.runtime or configuring started JAX"
    assert seen["options"]["allocator"] == allocator
    assert seen["options"]["memory_fraction"] == fraction
    assert seen["options"]["preallocate"] is preallocate
    assert seen["cache"] == str(tmp_path / ".cache/kdjax/xla")
    assert seen["environ"].get(runtime.PINNED_GIB) == ("4" if device is GB10 else None)
    assert runtime.UNIFIED not in seen["environ"]


_FAULTS = """
import resource
from kdjax.device.runtime import configure
configure()
import jax, jax.numpy as jnp

@jax.jit  # 64 MiB are made, multiplied, and summed
def step(x):
    matrix = (x + jnp.arange(2**24, dtype=jnp.float32)).reshape(-1, 4096)
    return jnp.sum(matrix @ jnp.ones(4096))

faults = []
for i in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(float(i)).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("own", "kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "131072"}, False)]
)
def test_temporaries_of_the_next_step_on_a_cpu_are_those_of_the_last(tmp_path, own, kept):
    others = "MALLOC_", "JAX_", "XLA_", "LD_PRELOAD"  # the last one's allocator is CI's
    clean = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    clean |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)} | own

    def count() -> int:
        command = [sys.executable, "-c", _FAULTS]
        return int(subprocess.run(command, capture_output=True, env=clean, check=True).stdout)

    # On a busy machine one process of many found them new each time: three are asked.
    pages = 2**26 // 4096
    assert any(count() < pages // 10 for _ in range(3)) is kept


def test_classification_depends_on_no_compute_capability():
    """Every capability from 0.0 to 20.0, with every answer to the three questions."""
    kinds = {  # integrated, pageable access, the host's page tables
        (0, 0, 0): DeviceMemory.DISCRETE,
        (0, 0, 1): DeviceMemory.DISCRETE,
        (0, 1, 0): DeviceMemory.DISCRETE,  # HMM on an ordinary card
        (0, 1, 1): DeviceMemory.COHERENT,
        (1, 0, 0): DeviceMemory.INTEGRATED,
        (1, 0, 1): DeviceMemory.INTEGRATED,
        (1, 1, 0): DeviceMemory.INTEGRATED,
        (1, 1, 1): DeviceMemory.INTEGRATED,
    }
    for cc, (flags, kind) in itertools.product(range(200 + 1), kinds.items()):
        assert classify_device_memory([Device(*flags, *divmod(cc, 10), 80 * GIB)]) is kind


def test_precedence_of_the_environment_is_total():
    """Each of 4 values of MANAGED_MEMORY, under each of XLA's own setting, on both kinds."""
    asked, seen = (None, "", "0", "1"), 0
    for managed, unified, device in itertools.product(asked, asked, (H200, GB10)):
        environ = {runtime.MANAGED: managed, runtime.UNIFIED: unified}
        environ = {name: value for name, value in environ.items() if value is not None}
        settings_, _ = memory_policy([device], environ=environ, mem_available=100 * GIB)
        on = (unified or managed) == "1"
        assert (settings_[runtime.ALLOCATOR] == "bfc") == (on or device is GB10)
        assert (runtime.FRACTION in settings_) == (not on)
        assert settings_.get(runtime.UNIFIED) == (None if unified else managed or None)
        seen += 1
    assert seen == 4 * 4 * 2


# GPUs that JAX does not use.


ON_CPU = runtime.Devices("cpu", "cpu", 1, None, None)


@pytest.fixture
def plugins(monkeypatch):
    """Packages that are installed, and a JAX whose platform nobody has named."""
    there = set()
    monkeypatch.setattr(runtime, "_asked_platforms", lambda: None)
    monkeypatch.setattr(runtime, "_installed", there.__contains__)
    return there


@pytest.mark.parametrize(
    ("driver", "installed", "said"),
    [
        ("580.95.05", "", "no plugin for CUDA. To use them: pip install 'kdjax[cuda13]'. To run"),
        ("550.54.15", "", "550.54.15 shows 2 GPUs, .* To use them: pip install 'kdjax[cuda12]'"),
        (None, "", "the NVIDIA driver shows 2 GPUs, .* pip install 'kdjax[cuda13]'"),
        (
            "550.54.15",
            "jax-cuda13-plugin",
            "does not serve. To use them: pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt && "
            "pip install 'kdjax[cuda12]'",
        ),
        ("580.95.05", "jax-cuda13-plugin", "jax-cuda13-plugin is installed: Unknown backend cuda"),
    ],
)
def test_gpus_that_jax_leaves_idle_stop_a_run_with_what_mends_it(plugins, driver, installed, said):
    plugins.add(installed)
    with pytest.raises(UserError) as error:
        runtime.refuse_idle_gpus(2, ON_CPU, driver=driver)
    assert re.search(said.replace("[", r"\["), str(error.value)), error.value
    assert "To run on the CPU: JAX_PLATFORMS=cpu." in str(error.value)


def test_nothing_is_said_of_gpus_that_nobody_wants_or_that_are_used(plugins, monkeypatch):
    runtime.refuse_idle_gpus(0, ON_CPU, driver=None)
    runtime.refuse_idle_gpus(1, dataclasses.replace(ON_CPU, platform="gpu"), driver="580.1")
    monkeypatch.setattr(runtime, "_asked_platforms", lambda: "cpu")
    runtime.refuse_idle_gpus(1, ON_CPU, driver="580.1")


def test_a_run_that_suits_a_cpu_says_it_and_goes_on(plugins, warnings_logged):
    runtime.refuse_idle_gpus(1, ON_CPU, driver="580.95.05", suits_cpu=True)
    (line,) = warnings_logged
    assert "pip install 'kdjax[cuda13]'" in line and "goes on there" in line


def test_only_devices_that_answered_count_as_gpus(not_started):
    assert run(H200, H200)[0].gpus == 2
    assert run(SILENT)[0].gpus == 0  # a library without a driver, as in some containers
    assert run(H200, environ={"JAX_PLATFORMS": "cpu"})[0].gpus == 0


def test_a_run_asks_whether_gpus_stay_idle(plugins, monkeypatch, tmp_path):
    """`distill` and every command that starts JAX; the demo alone goes on."""
    from kdjax.commands import parsing
    from kdjax.config import Config
    from kdjax.watch.run import distill

    chosen = runtime.Runtime(DeviceMemory.DISCRETE, {}, ["x"], "off", gpus=1)
    monkeypatch.setattr(runtime, "configure", lambda **_: chosen)
    monkeypatch.setattr("kdjax.watch.run.validate", lambda _: None)
    with pytest.raises(UserError, match="JAX does not use them"):
        distill(Config(), tmp_path / "run")
    with pytest.raises(UserError, match="JAX does not use them"), parsing.started(lean=True):
        pass
    assert not (tmp_path / "run").exists()
    assert [parsing.load_config(name)[3] for name in ("demo", "qwen7b_0p5b")] == [True, False]


@pytest.mark.parametrize("command", [["export", "--format=gguf"], ["imatrix", "--data=text"]])
def test_what_runs_beside_training_takes_no_memory_ahead_of_its_use(command, monkeypatch, capsys):
    def configure(**settings):
        raise UserError(str(settings))

    monkeypatch.setattr(runtime, "configure", configure)
    assert cli.main([*command, "m.gguf", "--out=out.gguf"]) == 2
    assert "{'lean': True}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("platform", "reason"), [("cuda", ".+"), ("nonsense", ".*backend 'nonsense'.*")]
)
def test_a_platform_that_jax_cannot_start_on_is_one_message(platform, reason):
    code = "from kdjax.device import runtime; runtime.device_summary()"
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )
    last = child.stderr.splitlines()[-1]
    told = rf"UserError: JAX_PLATFORMS={platform}: JAX cannot start there \({reason}\)\. Unset"
    assert re.search(told, last), last


def test_programs_that_were_cut_short_are_removed(tmp_path):
    """JAX keeps what is there under a program's name, whether it can be read or not."""
    folder, packed = tmp_path / "xla", zlib.compress(bytes(range(256)) * 64)
    folder.mkdir()
    for name, data in (("a", packed), ("b", packed[:-9]), ("c", b""), ("d", b"\x28\xb5\x2f\xfd.")):
        (folder / f"{name}-cache").write_bytes(data)
    runtime.remove_cut_programs(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a-cache", "d-cache"]
    (folder / "a-cache").write_bytes(packed[:40])
    os.utime(folder / "a-cache", (1, 1))  # looked at before
    (folder / "e-cache").write_bytes(packed[:40])
    runtime.remove_cut_programs(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a-cache", "d-cache"]


def test_ci_removes_them_from_the_tests_programs(tmp_path):
    """Tests of full disks cut some of what CI stores for two weeks."""
    lines = (Path(__file__).parents[1] / ".ci" / "run").read_text().splitlines()
    (line,) = [line for line in lines if "remove_cut_programs" in line]
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "cut-cache").write_bytes(zlib.compress(bytes(9000))[:9])
    environment = os.environ | {"KDJAX_TEST_CACHE": str(folder)}
    line = line.replace("python", sys.executable, 1)
    subprocess.run(["bash", "-euc", line], env=environment, check=True, timeout=60)
    assert not list(folder.iterdir())
