"""Processes that tests start, forked from one that has imported kdjax: two seconds less of each.

python -m forks DESCRIPTOR MODULE...
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import programs

_REPOSITORY = Path(__file__).parents[1]
_NUMBER = struct.Struct("i")


class Parent:
    """A process that has imported modules and has started no thread and no device."""

    def __init__(self, *modules):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found = f"{_REPOSITORY / 'tests'}:{_REPOSITORY}"
        command = [sys.executable, "-m", "forks", str(theirs.fileno()), *modules]
        how = dict(cwd=_REPOSITORY, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._process = subprocess.Popen(command, env=os.environ | dict(PYTHONPATH=found), **how)
        theirs.close()

    def start(self, arguments, environment):
        """Forks a process that does what `python -m` of the arguments would, in the environment."""
        output, (ours, theirs) = os.memfd_create("output"), os.pipe()
        request = json.dumps([[*map(str, arguments)], dict(environment)]).encode()
        socket.send_fds(self._socket, [request], [output, theirs])
        os.close(theirs)
        return Fork(output, open(ours, "rb", buffering=0))

    def close(self):
        self._socket.close()
        assert self._process.wait(timeout=20) == 0


class Fork:
    """A forked process, with the methods of `Popen` that tests use.

    Its output, errors included, is read once it has ended.
    """

    def __init__(self, output, status):
        self._output, self._status, self.returncode = output, status, None
        self.pid = self._read()

    def _read(self):
        (number,) = _NUMBER.unpack(self._status.read(_NUMBER.size))
        return number

    def poll(self, timeout=0):
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._read())
            self._status.close()
        return self.returncode

    def communicate(self, timeout):
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        with open(self._output) as file:
            file.seek(0)
            return file.read(), None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def serve(requests):
    """Forks a process for each request and returns in it, with its arguments as `sys.argv`.

    Another, its parent, waits for it and reports its number, then its status.
    """
    while True:
        request, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 2)
        if not request:
            with contextlib.suppress(ChildProcessError):
                while True:  # so that the seconds that they took are counted
                    os.waitpid(-1, 0)
            os._exit(0)
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    requests.close()
    output, status = descriptors
    if child := os.fork():
        os.write(status, _NUMBER.pack(child))
        os.write(status, _NUMBER.pack(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(status)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    sys.argv[:], environment = json.loads(request)
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork has one of them"
    serve(requests)
    programs.run(sys.argv)
