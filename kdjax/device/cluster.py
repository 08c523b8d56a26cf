"""Several processes as one run: they join as an engine started them, agree, and stop together.

An engine (Slurm, Open MPI, Kubeflow Trainer, JobSet, torchrun, SkyPilot) starts the same command in
every process and sets variables that say which process it is. Ray Train initialises JAX itself.
"""

import atexit
import collections
import contextlib
import functools
import json
import logging
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kdjax.device import runtime
from kdjax.errors import PEER_LOST, KdjaxError, UserError

_log = logging.getLogger("kdjax")

JOIN_TIMEOUT = 300  # seconds that processes wait for each other at the start
_DAY = 24 * 3600
GRACE = 10  # seconds that a process has to end by itself after another one failed
_PORT = 8476  # of the first process, where the engine names none


class Member(NamedTuple):
    """This process among those that an engine started."""

    engine: str
    index: int
    count: int
    address: str | None  # of the first process, host:port; None: JAX finds it
    local: int | None = None  # its index on the host; None: it has all devices that it sees

    def choose_gpus(self, gpus: int, environ: Mapping[str, str]) -> list[int] | None:
        """Indices of this process's GPUs among the `gpus` that it sees; None: JAX decides.

        All of them if it is alone on its host or its engine shows it no others, else the one of its
        local number. Raises `UserError` if there is none of this number.
        """
        if environ.get("JAX_LOCAL_DEVICE_IDS"):  # which JAX reads
            return None
        if self.local is None:  # where JAX knows the engine, it would take the first alone
            return list(range(gpus)) if gpus and self.address is None else None
        # Slurm shows a task its own with --gpus-per-task, unless --gpu-bind says otherwise.
        if gpus == 1 or (gpus and environ.get("SLURM_GPUS_PER_TASK") == str(gpus)):
            return list(range(gpus))
        if gpus and self.local >= gpus:
            raise UserError(
                f"process {self.index} of {self.count} ({self.engine}): found {gpus} GPUs for the "
                f"process of local number {self.local}; expected one for each process of the host. "
                "Show each process all GPUs of its host (srun --gpus-per-node), or its own alone "
                "(--gpus-per-task), or set JAX_LOCAL_DEVICE_IDS."
            )
        return [self.local]


def find_member(environ: Mapping[str, str]) -> Member | None:
    """Reads an engine's variables; None where no engine started several processes.

    A lone process within a Slurm allocation is alone: only tasks of an `srun` step wait for others.
    Raises `UserError` for variables that are incomplete or not numbers.
    """
    if "JAX_NUM_PROCESSES" in environ or "JAX_PROCESS_ID" in environ:  # Kubeflow Trainer, JobSet
        names = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"
        index, count = _read_numbers(environ, "the JAX runtime's variables", *names)
        address = _read(environ, "the JAX runtime's variables", "JAX_COORDINATOR_ADDRESS")
        member = Member("JAX_* variables", index, count, address)
    elif "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
        index, count, local = _read_numbers(environ, "srun", *names)
        alone = re.fullmatch(r"1(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        member = Member("slurm", index, count, None, None if alone else local)
    elif "OMPI_COMM_WORLD_SIZE" in environ:
        names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
        index, count, local = _read_numbers(environ, "mpirun", *names)
        alone = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        member = Member("ompi", index, count, None, None if alone else local)
    elif "RANK" in environ and "WORLD_SIZE" in environ and "MASTER_ADDR" in environ:
        index, count = _read_numbers(environ, "torchrun", "RANK", "WORLD_SIZE")
        # torchrun's store listens at MASTER_PORT.
        port = _read_numbers(environ, "torchrun", "MASTER_PORT")[0] + 1
        local = None
        if environ.get("LOCAL_WORLD_SIZE", "1") != "1":
            local = _read_numbers(environ, "torchrun", "LOCAL_RANK")[0]
        member = Member("torchrun", index, count, f"{environ['MASTER_ADDR']}:{port}", local)
    elif "SKYPILOT_NODE_IPS" in environ:
        names = "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"
        index, count = _read_numbers(environ, "SkyPilot", *names)
        first = environ["SKYPILOT_NODE_IPS"].split()[0]
        member = Member("SkyPilot", index, count, f"{first}:{_PORT}")
    else:
        return None
    return member if member.count > 1 else None


def _read(environ: Mapping[str, str], engine: str, name: str) -> str:
    if not environ.get(name):
        raise UserError(
            f"{engine} set some variables and not {name}; set it, or give --distributed=off."
        )
    return environ[name]


def _read_numbers(environ: Mapping[str, str], engine: str, *names: str) -> list[int]:
    values = [_read(environ, engine, name) for name in names]
    bad = [f"{n}={v!r}" for n, v in zip(names, values, strict=True) if not v.isdecimal()]
    if bad:
        raise UserError(f"{engine}: {', '.join(bad)}: expected whole numbers.")
    return list(map(int, values))


@contextlib.contextmanager
def started(
    distributed: str = "auto",
    timeout: int = JOIN_TIMEOUT,
    *,
    suits_cpu: bool = False,
    lean: bool = False,
) -> Iterator[runtime.Devices]:
    """Starts JAX with the memory that a run needs, the processes `joined`; returns the devices.

    `lean` is as for `runtime.configure`. Raises as `joined` and `runtime.refuse_idle_gpus` do.
    """
    chosen = runtime.configure(lean=lean)
    for line in chosen.describe():
        _log.info("%s", line)
    with joined(distributed, timeout, gpus=chosen.gpus):
        yield runtime.open_devices(chosen, suits_cpu=suits_cpu)


_joined: list[Member] = []  # holds this process once it has joined


@contextlib.contextmanager
def joined(
    distributed: str = "auto", timeout: int = JOIN_TIMEOUT, *, gpus: int = 0
) -> Iterator[None]:
    """Joins the processes that an engine started, before JAX asks for devices; once a process.

    "auto" joins if an engine's variables are set; "off" never does. Of its `gpus` the process takes
    the ones that `Member.choose_gpus` names. If Ray or the caller has initialised JAX, it stays as
    it is. Called again, processes that joined here watch each other anew. A process that dies ends
    the others with `PEER_LOST`, at once or, if its host is lost, in 12 seconds; one that fails, in
    `GRACE` seconds. One that is done waits for the others. Raises `UserError` if the others do not
    come within `timeout` seconds, or if there is no GPU for the process.
    """
    if distributed not in ("auto", "off"):
        raise UserError(f"found --distributed={distributed}; expected auto or off.")
    member = find_member(os.environ) if distributed == "auto" else None
    if member is None or (jax.distributed.is_initialized() and not _joined):
        yield
        return
    if not _joined:
        _initialize(member, timeout, gpus)
        _joined.append(member)
    peers = _Peers(member)
    try:
        yield
    except BaseException as error:
        peers.tell(_FAILED)
        if not isinstance(error, KdjaxError):
            time.sleep(1)  # a dead peer's collective fails before its end is reported
        raise
    exchange("end", None)  # the first still writes its report: JAX's exit waits for `GRACE` seconds
    peers.tell(_DONE)


def _initialize(member: Member, timeout: int, gpus: int) -> None:
    known: dict[str, Any] = dict(cluster_detection_method=member.engine)
    known["local_device_ids"] = member.choose_gpus(gpus, os.environ)
    if member.address is not None:
        known |= dict(
            coordinator_address=member.address,
            num_processes=member.count,
            process_id=member.index,
            cluster_detection_method="deactivate",
        )
        _check_address(member, member.address, timeout)
    try:
        jax.distributed.initialize(
            **known, initialization_timeout=timeout, shutdown_timeout_seconds=GRACE
        )
    except (RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise UserError(
            f"process {member.index} of {member.count} ({member.engine}) could not join the run at "
            f"{_state().coordinator_address} within {timeout} s: {said} Check "
            f"that all {member.count} processes were started, that this host reaches that address "
            "and port, and that no other run uses the port; --join_timeout sets the time."
        ) from error
    atexit.register(jax.distributed.shutdown)  # waits for the others, `GRACE` seconds at most


def _check_address(member: Member, address: str, timeout: int) -> None:
    """Waits until the first process listens at its address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{member.engine}: the address {address!r} is not host:port.")
    if member.index == 0:
        return
    end, reason = time.monotonic() + timeout, "nobody answers"
    while time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            return
        except OSError as error:
            reason = error.strerror or str(error) or reason
            time.sleep(0.2)
    raise UserError(
        f"process {member.index} of {member.count} ({member.engine}) waited {timeout} s for the "
        f"first process at {address}: {reason}. Check that it was started and that this host "
        "reaches that address and port; --join_timeout sets the time."
    )


_DONE, _FAILED = b"D", b"F"  # a process's last word


class _Peers:
    """A connection of each process to the first: the kernel closes it when a process dies.

    JAX's heartbeats, however short their timeout, end a process by SIGABRT with a C++ stack.
    """

    def __init__(self, member: Member):
        self._connections: list[socket.socket] = []
        self._told = False
        key = f"kdjax/{_number('peers', member.index)}"
        host = _state().coordinator_address.rpartition(":")[0]
        if member.index == 0:
            listener = socket.create_server(("", 0))
            port = listener.getsockname()[1]
            _state().client.key_value_set(key, str(port))
            self._start(self._accept, listener, member.count - 1)
        else:
            port = int(_state().client.blocking_key_value_get(key, 60_000))
            connection = socket.create_connection((host.strip("[]"), port), timeout=60)
            connection.sendall(member.index.to_bytes(4))
            self._start(self._listen, connection, "the first process, or one that it watched,")

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _accept(self, listener: socket.socket, count: int) -> None:
        for _ in range(count):
            connection, (host, *_) = listener.accept()
            index = int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
            self._start(self._listen, connection, f"process {index}, on {host},")
        listener.close()

    def _listen(self, connection: socket.socket, name: str) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("IDLE", 4), ("INTVL", 2), ("CNT", 4)):  # a lost host: 12 seconds
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)
        self._connections.append(connection)
        try:
            word = connection.recv(1)
        except OSError:
            word = b""
        if word == _DONE:
            return
        if word == _FAILED:
            time.sleep(GRACE)
        text = (
            f"error: {name} has {'failed' if word else 'died'}; its own log says why. What was "
            "saved is kept: start all processes again, and they go on from there.\n"
        )
        if not self._told:
            # A collective that waits for a dead peer cannot be interrupted.
            os.write(2, text.encode())
            os._exit(PEER_LOST)

    def tell(self, word: bytes) -> None:
        """Sends this process's last word; the end of others no longer ends this one."""
        self._told = word == _DONE
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(word)


def _state() -> Any:
    from jax._src import distributed  # address and key-value store have no public name

    return distributed.global_state


def check_agreement(name: str, mine: Mapping[str, Any]) -> None:
    """Proves that all processes have the same values; see `exchange` for `name`.

    Raises `UserError`, in every process, with each field that differs and the values of the
    processes.
    """
    if jax.process_count() == 1:
        return
    found = exchange(name, {key: str(value) for key, value in mine.items()}, JOIN_TIMEOUT)
    lines = [
        f"{field}: " + ", ".join(f"process {i} has {found[i].get(field)}" for i in odd)
        for field in sorted({field for values in found for field in values})
        if (odd := _find_differences(field, found))
    ]
    if lines:
        raise UserError(
            "the processes of this run were not started alike:\n  " + "\n  ".join(lines) + "\n"
            "Start all of them with the same command, files and environment."
        )


def _find_differences(field: str, found: Sequence[Mapping[str, str]]) -> list[int]:
    """The first process and the first that differs from it in the field; empty if none does."""
    first = found[0].get(field)
    return next(([0, i] for i, values in enumerate(found) if values.get(field) != first), [])


def exchange(name: str, mine: Any, timeout: int = _DAY) -> list[Any]:
    """Exchanges JSON-able values: returns those of all processes, in their order.

    All processes call it equally often with the same `name`.
    """
    if jax.process_count() == 1:
        return [mine]
    client, folder = _state().client, f"kdjax/{_number(name, jax.process_index())}/"
    client.key_value_set_bytes(f"{folder}{jax.process_index()}", json.dumps(mine).encode())
    keys = [f"{folder}{process}" for process in range(jax.process_count())]
    return [json.loads(client.blocking_key_value_get_bytes(k, timeout * 1000)) for k in keys]


_uses: collections.Counter[tuple[int, str]] = collections.Counter()


def _number(name: str, process: int) -> str:
    """Numbers the name by its uses in this process: a program may call `distill` again."""
    _uses[process, name] += 1
    return f"{name}/{_uses[process, name]}"


def share(items: Sequence[Any]) -> Sequence[Any]:
    """Selects this process's part of the items; `collect` gathers the results."""
    return items[jax.process_index() :: jax.process_count()]


def collect(name: str, results: Sequence[Any]) -> list[Any]:
    """Gathers the results of all items, in their order, from each process's `share`."""
    parts = exchange(name, results)
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


def once_a_host(name: str, make: Callable[[], Any]) -> Any:
    """Makes a JSON-able value in this host's first process; returns it in all of the host's."""
    first = exchange(f"{name} by host", platform.node()).index(platform.node())
    return exchange(name, make() if first == jax.process_index() else None)[first]


@functools.cache
def cores() -> int:
    """Number of processors for each process of this host, divided evenly."""
    hosts = exchange("hosts", platform.node())
    return max(1, (os.cpu_count() or 1) // hosts.count(platform.node()))


@contextlib.contextmanager
def first_before_others(name: str) -> Iterator[None]:
    """Runs the block in the first process, then in the others, which use the files it made."""
    if jax.process_count() == 1:
        yield
        return
    key = f"kdjax-{_number(name, jax.process_index())}"
    barrier = functools.partial(_state().client.wait_at_barrier, key, _DAY * 1000)
    if jax.process_index() != 0:
        barrier()
        yield
        return
    try:
        yield
    finally:
        barrier()


def check_shared(folder: Path) -> None:
    """Raises `UserError` unless all processes see the same folder: checkpoints are made by all."""
    token = folder / ".processes"
    with first_before_others("folder"):
        if jax.process_index() == 0 and jax.process_count() > 1:
            token.write_text(f"{os.getpid()} {time.time()}")
    seen = token.read_text() if token.exists() else "(none)"
    check_agreement("folder", {f"what lies at {folder}, which must be on a shared disk": seen})


class SharedFlag:
    """A flag that is equal in all processes at each step: whether any of them has raised it.

    With several processes the answer is one call late, once the devices have exchanged it.
    """

    def __init__(self, mesh: Mesh):
        self._place = NamedSharding(mesh, P(mesh.axis_names))
        self._total = jax.jit(jax.numpy.sum, out_shardings=NamedSharding(mesh, P()))
        self._asked: jax.Array | None = None

    def any(self, mine: bool) -> bool:
        """Whether any process has raised the flag; every process must call it equally often."""
        if jax.process_count() == 1:
            return mine
        here = np.full(len(self._place.addressable_devices), mine, np.int32)
        before = self._asked
        flags = jax.make_array_from_process_local_data(self._place, here)
        self._asked = self._total(flags)
        return before is not None and bool(jax.device_get(before) > 0)
