"""Runs one untrusted program under limits, and its judge: `python -I -S jail FD`.

Standard input brings two JSON messages: the job, and the tests, read only when the program's
process has been forked. Lines of JSON come back on descriptor FD: what is held, then the verdict.
"""

import json
import os
import socket
import struct
import sys

import judge
import walls

sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # a program's `import judge` is its own
_HEAD = struct.Struct("<Q")


def read_message():
    def read(count):
        data = b""
        while len(data) < count:
            if not (part := os.read(0, count - len(data))):
                raise EOFError("no job on standard input")
            data += part
        return data

    return json.loads(read(_HEAD.unpack(read(_HEAD.size))[0]))


def send(fd, message):
    os.write(fd, json.dumps(message).encode() + b"\n")


def forget_streams(*streams):
    null = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(null, stream)
    os.close(null)


def run_program(job, connection, held):
    os.chdir(job["scratch"])
    forget_streams(0, 1, 2)
    walls.limit(job["limits"])
    held["user"] = walls.drop_privileges(job["user"] if held["mount"] else None)
    held["ipc"] = walls.refuse_ipc()
    walls.hide_memory(False)
    walls.block_sockets()
    # A root's limit on processes binds nothing.
    held["processes"] = os.getuid() != 0
    judge.serve(connection.detach(), job["program"], held)


def run_judge(job, fd, held):
    """Forks the program and judges it; within a wall every process dies when this one ends."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    walls.hide_memory(True)  # before a program exists that could open it
    child = os.fork()
    if child == 0:
        ours.close()
        os.close(fd)
        run_program(job, theirs, held)
    theirs.close()
    tests = read_message()
    walls.limit({name: job["limits"][name] for name in ("AS", "FSIZE", "NOFILE", "CORE")})
    walls.drop_privileges(job["user"] + 1 if held["mount"] else None)
    walls.hide_memory(True)  # a change of user may undo it
    channel = judge.Channel(ours, child)
    send(fd, {"held": channel.receive()["held"]})
    forget_streams(0, 1, 2)
    reason, error = judge.judge(channel, tests["code"], tests["names"])
    send(fd, {"reason": reason, "error": error[:500]})
    os._exit(0)


def main():
    fd = int(sys.argv[1])
    job = read_message()
    sys.path += job["paths"]
    nothing = dict.fromkeys(("net", "pid", "mount", "proc"), False)
    held = walls.look_around() if job["wall"] else nothing
    run_judge(job, fd, held)


main()
