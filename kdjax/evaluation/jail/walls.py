"""Confines a program in addition to bubblewrap: limits, and a separate user.

Limits: setrlimit(2). As root the program gets a separate user id, because RLIMIT_NPROC does not
bind root.
"""

import contextlib
import ctypes
import os
import resource
import socket

_DUMPABLE, _NO_NEW_PRIVS = 4, 38
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
