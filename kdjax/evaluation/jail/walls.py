"""What keeps a program from the machine: namespaces, limits, a user of its own.

Namespaces: unshare(2), mount_setattr(2). Limits: setrlimit(2). As root the program becomes a user
id of its own, because RLIMIT_NPROC does not bind root; that user may not be able to read the
interpreter's folders, so they are bound into the scratch folder.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys

NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_PRIVATE, _BIND, _REC, _NOSUID = 0x40000, 0x1000, 0x4000, 0x2
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES = 0x20080522  # version 3 of capset(2)

libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags):
    return libc.unshare(flags) == 0


def mount(source, target, kind, flags, options=""):
    encoded = [None if x is None else os.fsencode(x) for x in (source, target, kind)]
    if libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options)):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def enter_namespaces():
    """Leaves the host's network, processes and mounts as far as permitted; returns which."""
    uid, gid = os.getuid(), os.getgid()
    if uid and unshare(NEWUSER):
        with contextlib.suppress(OSError):
            maps = dict(setgroups="deny", uid_map=f"{uid} {uid} 1", gid_map=f"{gid} {gid} 1")
            for name, text in maps.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
    flags = {"net": NEWNET, "pid": NEWPID, "mount": NEWNS, "ipc": NEWIPC | NEWUTS}
    return {name: unshare(flag) for name, flag in flags.items()}


def look_around():
    """What bubblewrap has closed, as seen from inside of it."""
    with open("/proc/self/net/dev") as file:
        interfaces = {line.split(":")[0].strip() for line in file if ":" in line}
    read_only = all(os.statvfs(path).f_flag & os.ST_RDONLY for path in ("/", "/usr", "/dev"))
    first = os.getpid() == 1
    return dict(net=interfaces == {"lo"}, pid=first, mount=read_only, ipc=True, proc=first)


def make_read_only(scratch, size):
    """The whole file system read-only, and a scratch folder of `size` bytes in memory."""
    mount(None, "/", None, _REC | _PRIVATE)
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # MOUNT_ATTR_RDONLY set; nothing cleared
    if libc.syscall(_MOUNT_SETATTR, -100, b"/", _AT_RECURSIVE, attributes, 32):
        raise OSError(ctypes.get_errno(), "mount_setattr")
    mount("tmpfs", scratch, "tmpfs", _NOSUID, f"size={size},nr_inodes=4096,mode=1777")


def mount_proc():
    """A /proc of the new process namespace alone; whether that was permitted."""
    try:
        mount("proc", "/proc", "proc", _NOSUID)
    except OSError:
        return False
    return True


def bind_libraries(scratch):
    """The import path's folders, where the program's own user can read them."""
    moved = {}
    for place, path in enumerate(sys.path):
        if os.path.isdir(path):
            target = os.path.join(scratch, f".python{place}")
            os.mkdir(target, 0o755)
            mount(path, target, None, _BIND | _REC)
            moved[path] = target
    sys.path[:] = [moved.get(path, path) for path in sys.path]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        if isinstance(where := getattr(module, "__path__", None), list):
            for old, new in moved.items():
                where[:] = [new + p[len(old) :] if p.startswith(old + os.sep) else p for p in where]


def limit(limits):
    """The program's limits; its judge takes those that are not of time and processes."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        # One second more before SIGKILL, so that SIGXCPU tells what happened.
        soft, hard = value, value + (name == "CPU")
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def drop_privileges(user):
    """That user if root, no capabilities in any case; returns whether the user changed."""
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


def die_with_parent():
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide_memory(hidden):
    """Closes this process to ptrace and /proc/PID/mem, also of others with the same user id."""
    libc.prctl(_DUMPABLE, 0 if hidden else 1, 0, 0, 0)


def block_sockets():
    """Refuses sockets in Python; against accidents where there is no network namespace."""

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
