"""Confines a program in addition to bubblewrap: limits, a separate user, no System V IPC.

Limits: setrlimit(2). As root the program gets a separate user id, because RLIMIT_NPROC does not
bind root. No limit counts System V's shared memory, queues and semaphores: seccomp(2) refuses them.
"""

import contextlib
import ctypes
import errno
import os
import resource
import socket
import struct

_DUMPABLE, _NO_NEW_PRIVS, _SECCOMP = 4, 38, 22
# By machine: its number in linux/audit.h, and its shmget, semget, msgget in unistd.h.
_IPC = {
    "x86_64": (0xC000003E, (29, 64, 68)),
    "aarch64": (0xC00000B7, (194, 190, 186)),
}
_X32 = 0x40000000  # the first number of x86_64's second table of calls
_CAPABILITIES = 0x20080522  # version 3 of capset(2)

libc = ctypes.CDLL(None, use_errno=True)


def look_around():
    """Checks from the inside what bubblewrap has closed."""
    with open("/proc/self/net/dev") as file:
        interfaces = {line.split(":")[0].strip() for line in file if ":" in line}
    read_only = all(os.statvfs(path).f_flag & os.ST_RDONLY for path in ("/", "/usr", "/dev"))
    first = os.getpid() == 1
    return dict(net=interfaces == {"lo"}, pid=first, mount=read_only, proc=first)


def limit(limits):
    """Sets the program's limits; its judge gets them except time and processes."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        # One second more before SIGKILL, so that SIGXCPU tells what happened.
        soft, hard = value, value + (name == "CPU")
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def drop_privileges(user):
    """Becomes `user` if root, drops all capabilities; returns whether the user changed."""
    changed = False
    if user is not None and os.getuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            changed = True
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    libc.capset(header, none)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    return changed


def _filter(audit, calls):
    """A program of linux/filter.h: EPERM for the calls, other tables of calls included."""
    load, equal, above, end = 0x20, 0x15, 0x35, 0x06
    count = len(calls)  # jumps are counted from the next word; the last one refuses
    words = [
        (load, 0, 0, 4),
        (equal, 0, count + 3, audit),
        (load, 0, 0, 0),
        (above, count + 1, 0, _X32),
        *((equal, count - i, 0, call) for i, call in enumerate(calls)),
        (end, 0, 0, 0x7FFF0000),
        (end, 0, 0, 0x00050000 | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *word) for word in words)


def refuse_ipc():
    """Refuses System V IPC to this process and all that it starts; returns whether it could.

    It needs `drop_privileges`, after which no program gains any.
    """
    machine = os.uname().machine
    if machine not in _IPC:
        return False
    words = _filter(*_IPC[machine])
    code = ctypes.create_string_buffer(words, len(words))

    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("words", ctypes.c_void_p)]

    program = Program(len(code) // 8, ctypes.addressof(code))
    return libc.prctl(_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0


def hide_memory(hidden):
    """Closes this process to ptrace and /proc/PID/mem, also of others with the same user id."""
    libc.prctl(_DUMPABLE, 0 if hidden else 1, 0, 0, 0)


def block_sockets():
    """Refuses sockets in Python, against accidents without a network namespace."""

    def refuse(*_, **__):
        raise OSError("no network here")

    class Refused:
        def __init__(self, *_, **__):
            refuse()

    import _socket

    for module in (socket, _socket):
        setattr(module, "socket", Refused)  # noqa: B010
    names = "create_connection create_server socketpair fromfd getaddrinfo gethostbyname"
    for name in names.split():
        setattr(socket, name, refuse)
