"""Several processes as one run: who they are, that they agree, and how they end together."""

import concurrent.futures
import contextlib
import json
import platform
import signal
import subprocess
import threading
import time
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import lend_one
from forks import Parent
from jax.sharding import Mesh

from kdjax.commands.cli import main
from kdjax.data.rollouts import FOLDER, read_round, round_path
from kdjax.device import cluster, sharding
from kdjax.device.cluster import Member, SharedFlag, find_member
from kdjax.errors import BAD_INPUT, FINISHED, INTERRUPTED, PEER_LOST, UserError
from scripts.cluster import tiny

KUBEFLOW = {
    "JAX_COORDINATOR_ADDRESS": "job-0.svc:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "2",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
}


@pytest.mark.parametrize(
    ("environ", "member"),
    [
        ({}, None),
        (KUBEFLOW, Member("JAX_* variables", 2, 4, "job-0.svc:1234")),
        (KUBEFLOW | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        (SRUN, Member("slurm", 1, 2, None, 0)),
        # The batch script of an allocation of four tasks is alone: it must not wait.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        # One task a host has all GPUs of it.
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, Member("slurm", 1, 2, None)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "11(x2)"}, Member("slurm", 1, 2, None, 0)),
        (MPIRUN, Member("ompi", 1, 2, None, 1)),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            Member("ompi", 1, 2, None),
        ),
        (TORCHRUN, Member("torchrun", 3, 4, "a:29501")),
        (
            TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Member("torchrun", 3, 4, "a:29501", 1),
        ),
        (SKYPILOT, Member("SkyPilot", 1, 2, "10.0.0.1:8476")),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, None),
    ],
)
def test_each_engine_is_known_by_its_variables(environ, member):
    assert find_member(environ) == member


@pytest.mark.parametrize(
    ("local", "gpus", "environ", "taken"),
    [
        (3, 8, {}, [3]),  # each task sees all of its host
        (3, 8, {"SLURM_GPUS_PER_TASK": "1"}, [3]),  # also with --gpu-bind=none
        (3, 1, {"SLURM_GPUS_PER_TASK": "1"}, [0]),
        (3, 2, {"SLURM_GPUS_PER_TASK": "2"}, [0, 1]),
        (3, 1, {}, [0]),  # CUDA_VISIBLE_DEVICES, which a wrapper has set
        (3, 0, {}, [3]),  # on CPUs JAX does not ask
        (None, 8, {}, [*range(8)]),
        (None, 0, {}, None),
        (3, 2, {"JAX_LOCAL_DEVICE_IDS": "1"}, None),
    ],
)
def test_a_task_takes_its_gpus_of_those_that_it_sees(monkeypatch, local, gpus, environ, taken):
    """JAX alone takes that of the local number, whatever the task sees."""
    given = SRUN | {"SLURM_LOCALID": str(local or 0)} | environ
    given |= {"SLURM_STEP_TASKS_PER_NODE": "4(x2)" if local else "1(x2)"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    initialize = mock.Mock()
    monkeypatch.setattr(cluster, "_joined", [])
    monkeypatch.setattr(cluster, "_Peers", mock.Mock())
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    with cluster.joined(gpus=gpus):
        pass
    assert initialize.call_args.kwargs["local_device_ids"] == taken


def test_an_engine_that_jax_does_not_know_leaves_the_choice_to_it():
    for environ, taken in ((KUBEFLOW, None), (TORCHRUN, None), (SKYPILOT, None), (MPIRUN, [1])):
        assert find_member(environ).choose_gpus(2, {}) == taken


def test_a_task_without_a_gpu_of_its_number_is_refused_in_one_line():
    member = Member("slurm", 5, 8, None, 3)
    said = r"process 5 of 8 \(slurm\): found 2 GPUs for the process of local number 3; expected one"
    with pytest.raises(UserError, match=said) as refused:
        member.choose_gpus(2, {"SLURM_GPUS_PER_TASK": "1"})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "not JAX_PROCESS_ID"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "not JAX_COORDINATOR_ADDRESS"),
        (KUBEFLOW | {"JAX_PROCESS_ID": "first"}, "JAX_PROCESS_ID='first'.*whole numbers"),
    ],
)
def test_incomplete_variables_are_named(environ, says):
    with pytest.raises(UserError, match=says):
        find_member(environ)


def test_a_first_process_that_does_not_answer_is_named(monkeypatch):
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    start = time.monotonic()
    with (
        pytest.raises(UserError, match=r"process 2 of 4 .*waited 1 s .*127\.0\.0\.1:9.*refused"),
        cluster.joined(timeout=1),
    ):
        pass
    assert time.monotonic() - start < 5
    with cluster.joined("off"):  # alone, whatever the variables say
        assert jax.process_count() == 1
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with cluster.joined(timeout=1):  # by Ray, which did it before
        pass


def test_a_second_run_joins_nobody_anew_and_watches_the_others_again(monkeypatch):
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    initialize, peers = mock.Mock(), mock.Mock()
    monkeypatch.setattr(cluster, "_joined", [])
    monkeypatch.setattr(cluster, "_initialize", initialize)
    monkeypatch.setattr(cluster, "_Peers", peers)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: initialize.called)
    for _ in range(2):
        with cluster.joined():
            pass
    assert (initialize.call_count, peers.call_count) == (1, 2)


def test_of_one_process_the_flag_is_its_own():
    flag = SharedFlag(sharding.make_mesh(-1, 1, 1))
    assert [flag.any(word) for word in (False, True, False)] == [False, True, False]


@pytest.mark.parametrize(
    ("kinds", "processes", "splits"),
    [
        (("9.0", "9.0"), (0, 0), True),
        (("8.9", "8.9"), (0, 0), False),
        (("9.0", "9.0"), (0, 1), False),
        (("9.0",), (0,), False),
        (("9.0",) * 4, (0,) * 4, True),
    ],
)
def test_gpus_of_a_process_store_a_part_of_the_masters_each(kinds, processes, splits):
    devices = np.empty(len(kinds), object)
    for i, (kind, process) in enumerate(zip(kinds, processes, strict=True)):
        devices[i] = types.SimpleNamespace(compute_capability=kind, process_index=process)
    mesh = mock.Mock(spec=Mesh, devices=devices, size=len(kinds), shape={"data": len(kinds)})
    assert sharding.splits_state(mesh) == splits


class Store:
    """Stands for JAX's key-value store, for threads that play processes."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self._changed:
            assert key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout_in_ms / 1000)
            return self._values[key]


@pytest.mark.parametrize("items", [7, 3, 1, 0])
def test_what_processes_do_together_comes_back_in_order(monkeypatch, items):
    state, place = types.SimpleNamespace(client=Store()), threading.local()
    monkeypatch.setattr(cluster, "_state", lambda: state)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: place.index)
    done = []

    def work(index):
        place.index = index
        mine = cluster.share(range(items))
        done.extend(mine)
        cluster.collect("squares", list(mine))  # a name may be used again
        return cluster.collect("squares", [x * x for x in mine])

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    assert found == [[x * x for x in range(items)]] * 3
    assert sorted(done) == list(range(items))


def test_one_process_of_a_host_reads_for_all_of_it(monkeypatch):
    state, place = types.SimpleNamespace(client=Store()), threading.local()
    monkeypatch.setattr(cluster, "_state", lambda: state)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: place.index)
    monkeypatch.setattr(platform, "node", lambda: "ab"[place.index // 2])
    read = []

    def work(index):
        place.index = index
        return cluster.once_a_host("file", lambda: read.append(index) or f"by {index}")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == ["by 0", "by 0", "by 2", "by 2"]
    assert sorted(read) == [0, 2]


# --- processes ----------------------------------------------------------------------------------


UNDRAWN = """
from kdjax.training.hooks import Hook
from kdjax.watch.report import ReportPage

ReportPage.train_end = Hook.train_end  # three seconds of each process that ends
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tiny.write(tmp_path_factory.mktemp("cluster") / "tiny")
    path.write_text(path.read_text() + UNDRAWN)
    return path


IMPORTED = (
    *(f"kdjax.commands.{name}" for name in ("train", "cache", "evaluate", "generate")),
    "kdjax.watch.run",
    "huggingface_hub.hf_api",  # a fifth of a second more
)


@pytest.fixture(scope="module")
def launch():
    """Starts a module in processes, which find programs that tests have compiled.

    They are forked from one that has imported it, but for the last `real`, which are as a user's.
    """
    with contextlib.closing(Parent(*IMPORTED)) as parent:

        def launch(processes, devices, *module, real=0, **how):
            found = f"{Path(__file__).parent}:{Path.cwd()}"
            module = ["programs", *map(str, module)]
            made = tiny.commands(module, processes, devices, PYTHONPATH=found, **how)
            forked = processes - real
            started = [parent.start(command[3:], given) for command, given in made[:forked]]
            return started + [run(*one) for one in made[forked:]]

        yield launch


def run(command, environment):
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment, **how)


@pytest.fixture
def train(launch, config):
    def train(workdir, processes, devices, *flags, **how):
        named = f"--config={config}", f"--workdir={workdir}"
        return launch(processes, devices, "kdjax.main", *named, *flags, **how)

    return train


def end(started: list[subprocess.Popen], timeout: float = 150) -> list[tuple[int, str]]:
    """Exit statuses and outputs."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, out) for p, out in zip(started, outputs, strict=True)]


def wait_for_step(workdir: Path, step: int, started: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 150
    saved = workdir / "checkpoints" / str(step)
    while not saved.exists():
        assert time.monotonic() < deadline, "no such step"
        assert all(process.poll() is None for process in started), end(started)
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_stopped_and_resumed_on_other_splits_it_is_the_same_run(train, config, tmp_path):
    """Text and the student's own answers on 4 devices of one process, then 2 x 2: one dies, one
    gets SIGTERM, and one device alone goes on."""
    rollout = dict(share=0.25, every=4, max_tokens=8, prompt_tokens=12, batch_size=16)
    rollout |= {"prompts": config.parent / "text"}
    flags = [f"--config.rollout.{name}={value}" for name, value in rollout.items()]
    flags += ["--config.train.steps=16", "--config.checkpoint.every=2", "--config.eval.every=8"]
    flags += ["--config.eval.samples=0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ((status, output),) = end(train(whole, 1, 4, *flags))
    assert status == FINISHED, output

    started = train(parts, 2, 2, *flags)
    wait_for_step(parts, 6, started)
    started[1].kill()
    killed = time.monotonic()
    (first, said), _ = end(started)
    assert (first, time.monotonic() - killed < 25) == (PEER_LOST, True), said
    assert "process 1, on 127.0.0.1, has died" in said
    written = read_files(parts / FOLDER)
    assert len(written) >= 2
    assert written.items() <= read_files(whole / FOLDER).items()  # to the last bit

    started = train(parts, 2, 2, *flags, real=1)
    wait_for_step(parts, 8, started)
    started[1].send_signal(signal.SIGTERM)
    ends = end(started)
    assert [status for status, _ in ends] == [INTERRUPTED, INTERRUPTED], ends

    ((status, output),) = end(train(parts, 1, 1, *flags, "--config.train.microbatches=2"))
    assert status == FINISHED, output
    assert tiny.largest_difference(whole, parts) < 1e-6
    rows = [read_round(round_path(run / FOLDER, 2)).sha256 for run in (whole, parts)]
    assert rows[0] == rows[1]


LATE = """
import time

import jax

from kdjax.device import cluster

cluster.GRACE = 1
with cluster.joined(timeout=60):
    time.sleep(4 * (1 - jax.process_index()))
print("ended")
"""


@pytest.mark.slow
def test_a_process_that_is_done_waits_for_the_first(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    made = tiny.commands(["late"], 2, 1, PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    started = [run(*one) for one in made]
    assert [(status, out.splitlines()[-1]) for status, out in end(started)] == [(0, "ended")] * 2


@pytest.mark.slow
def test_processes_that_were_started_otherwise_say_in_what(train, tmp_path):
    last = ["--config.optim.learning_rate=1"]
    for status, output in end(train(tmp_path / "run", 2, 1, last=last)):
        assert status == BAD_INPUT, output
        assert "optim.learning_rate: process 0 has 0.001, process 1 has 1.0" in output
        assert "Traceback" not in output


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
def test_processes_cache_a_teacher_as_one_does_and_go_on_after_a_kill(launch, config, tmp_path):
    command = "cache", f"--config={config}", "--k=8", "--config.eval.batch_size=2"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ((status, output),) = end(launch(1, 2, "kdjax", *command, f"--out={whole}"))
    assert status == FINISHED, output

    started = launch(2, 1, "kdjax", *command, f"--out={parts}")
    deadline = time.monotonic() + 150
    while not list(parts.glob(".shard-*.tmp")):
        assert time.monotonic() < deadline and started[1].poll() is None, end(started)
        time.sleep(0.005)
    started[1].kill()
    (status, output), _ = end(started)
    assert status == PEER_LOST, output
    assert not (parts / "index.json").exists()

    for status, output in end(launch(2, 1, "kdjax", *command, f"--out={parts}", real=1)):
        assert status == FINISHED, output
    assert read_files(parts) == read_files(whole)


@pytest.mark.slow
def test_processes_evaluate_as_one_does(launch, config, tmp_path, capfd):
    """Held-out rows, a teacher, and what problems' programs did: the same JSON to the last bit."""
    problems = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f"def f{i}(x):\n",
            "entry_point": f"f{i}",
            "canonical_solution": "    return x\n",
            "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        }
        for i in range(5)
    ]
    file = tmp_path / "HumanEval.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    models, text = config.parent, config.parent / "text"
    command = ["evaluate", models / "student.gguf", f"--teacher={models / 'teacher.gguf'}"]
    command += [f"--data={text}", "--rows=7", "--seq-len=32", "--batch-size=2", "--samples=2"]
    command += [f"--humaneval={file}", "--max-tokens=8", "--allow-unsandboxed"]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    with lend_one():
        status = main([*map(str, command), f"--json={one}"])
    assert "CE, nats" in capfd.readouterr().out
    ends = end(launch(2, 1, "kdjax", *command, f"--json={two}", real=1))
    assert [status for status, _ in ends] == [status] * 2, ends
    assert ["CE, nats" in said for _, said in ends] == [True, False]
    found = json.loads(two.read_text())
    assert found == json.loads(one.read_text())
    assert len(found["humaneval"]["results"]) == 10


@pytest.mark.slow
def test_of_several_processes_the_first_alone_answers_a_prompt(launch, config, capfd):
    command = "generate", config.parent / "student.gguf", "--prompt=def f(", "--max-tokens=4"
    (status, said), (other, nothing) = end(launch(2, 1, "kdjax", *command, real=1))
    assert (status, other) == (FINISHED, FINISHED), (said, nothing)
    with lend_one():
        assert main([*map(str, command)]) == FINISHED
    alone = capfd.readouterr()
    assert (said, nothing) == (alone.out + alone.err, "")
