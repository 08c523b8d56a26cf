"""The driver's answers, from drivers of machines that are not here."""

import sys

import pytest

from kdjax.device import probe
from kdjax.device.probe import Device, Probe
from kdjax.device.runtime import GIB, DeviceMemory, classify_device_memory

# integrated, pageable access, host page tables, compute capability, total memory
H200 = Device(0, 0, 0, 9, 0, 140 * GIB)
RTX_4090 = Device(0, 1, 0, 8, 9, 24 * GIB)  # pageable through HMM, not through page tables
GB10 = Device(1, 1, 1, 12, 1, 120 * GIB)
ORIN = Device(1, 0, 0, 8, 7, 60 * GIB)
GH200 = Device(0, 1, 1, 9, 0, 96 * GIB)
SILENT = Device()

NUMBERS = {"integrated": 18, "pageable": 88, "host_page_tables": 100, "major": 75, "minor": 76}
CALLS = ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceTotalMem_v2")


class FakeCuda:
    """libcuda of a machine with `devices`; `failing` (a call or an attribute) returns `status`."""

    def __init__(self, *devices, failing=None, status=999):
        self.devices, self.failing, self.status = devices, failing, status

    def __getattr__(self, name):
        def call(*args):
            if self.failing in (name, args[1] if name == "cuDeviceGetAttribute" else name):
                return self.status
            if name == "cuDeviceGetCount":
                args[0]._obj.value = len(self.devices)
            elif name == "cuDeviceGet":
                args[0]._obj.value = args[1]
            elif name == "cuDeviceTotalMem_v2":
                args[0]._obj.value = self.devices[args[1].value].total_bytes
            elif name == "cuDeviceGetAttribute":
                field = next(f for f, number in NUMBERS.items() if number == args[1])
                args[0]._obj.value = getattr(self.devices[args[2].value], field)
            elif name != "cuInit":
                raise AssertionError(f"{name} is not a harmless question")
            return 0

        return call


@pytest.mark.parametrize("devices", [(H200,), (RTX_4090,), (GB10,), (ORIN,), (H200, GH200)])
def test_probe_repeats_what_the_driver_says(devices):
    assert probe.ask_driver(lambda _: FakeCuda(*devices)) == Probe(devices)


@pytest.mark.parametrize("failing", [*CALLS, *NUMBERS.values()])
def test_each_call_of_a_broken_driver_failing_in_turn_is_unknown(failing):
    answer = probe.ask_driver(lambda _: FakeCuda(GB10, failing=failing))
    assert classify_device_memory(answer.devices) is DeviceMemory.UNKNOWN
    assert "returned 999" in answer.note
    assert str(failing).removesuffix("_v2") in answer.note


def test_a_library_without_the_entry_points_is_unknown():
    answer = probe.ask_driver(lambda _: object())
    assert classify_device_memory(answer.devices) is DeviceMemory.UNKNOWN


def test_no_driver_and_no_device_are_none():
    def missing(_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    hidden = FakeCuda(H200, failing="cuInit", status=100)  # CUDA_VISIBLE_DEVICES is empty
    for load in (missing, lambda _: hidden, lambda _: FakeCuda()):
        answer = probe.ask_driver(load)
        assert classify_device_memory(answer.devices) is DeviceMemory.NONE and answer.note


def python(code):
    return (sys.executable, "-I", "-S", "-c", code)


def test_the_real_child_answers_and_leaves_libcuda_to_itself():
    answer = probe.probe_devices({"CUDA_VISIBLE_DEVICES": ""})
    assert answer.devices == () and answer.note


def test_the_child_sees_the_given_environment_and_its_answer_arrives():
    code = (
        "import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == '1'; print('driver chatter');"
        f"print({Probe((GB10, SILENT), 'x').to_json()!r})"
    )
    answer = probe.probe_devices({"CUDA_VISIBLE_DEVICES": "1"}, command=python(code))
    assert answer == Probe((GB10, SILENT), "x")


@pytest.mark.parametrize(
    ("command", "note"),
    [
        (python("import os; os.abort()"), "status -6"),
        (python("print('{}')"), "status 0"),
        (python(""), "status 0"),
        (python("import time; time.sleep(60)"), "did not answer in 0.3 s"),
        (("/no/such/python",), "could not be asked"),
    ],
)
def test_a_child_that_crashes_hangs_or_mumbles_is_unknown(command, note):
    answer = probe.probe_devices(
        {}, command=command, timeout=0.3 if "sleep" in command[-1] else 60.0
    )
    assert classify_device_memory(answer.devices) is DeviceMemory.UNKNOWN
    assert note in answer.note
