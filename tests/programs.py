"""Compiled programs that tests keep on disk, and so do the processes that they start; their Python.

python -m programs MODULE ARGUMENT...
"""

import gc
import re
import runpy
import sys
import threading
import zlib
from functools import partial

from jax._src import compilation_cache, compiler, distributed
from jax._src.interpreters import mlir

_COLLECTIVE = re.compile(r" (all-|reduce-scatter|collective-|ragged-|send|recv)[a-z-]*\(")
_write = compiler._cache_write
_make_context, _contexts = mlir.make_ir_context, threading.local()


def _write_safe(key, seconds, name, backend, executable, *callbacks):
    """Leaves programs with collectives out: once loaded they may run several at a time.

    `sharding.leave_cache_out` is for those. Of the programs of meshes most have none. JAX has the
    first process alone write; what the devices of others run has keys of its own.
    """
    if _COLLECTIVE.search(executable.hlo_modules()[0].to_string()):
        return
    if distributed.global_state.process_id and not any(callbacks):
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    else:
        _write(key, seconds, name, backend, executable, *callbacks)


def _share_context():
    """One MLIR context for 11 programs of a thread: one for each was a third of lowering."""
    number = getattr(_contexts, "number", 0)
    if number % 11 == 0:  # a context keeps the constants of its programs
        _contexts.shared = _make_context()
    _contexts.number = number + 1
    return _contexts.shared


def keep():
    """Has JAX's cache, if there is one, keep the programs that it loads as they were."""
    compiler._cache_write = _write_safe
    if not hasattr(mlir, "_thread_local_context"):  # a later JAX does it by itself
        mlir.make_ir_context = _share_context
    if not any(getattr(compilation_cache, name, None) for name in ("zstd", "zstandard")):
        # zlib's default level took 5.5 ms a program, a fourteenth of a test that compiles 75.
        compilation_cache.compress_executable = partial(zlib.compress, level=1)


def stay_on():
    """Has the cache stay on where a mesh has several CPU devices."""
    from kdjax.device import sharding

    sharding.leave_cache_out = lambda: None


def collect_seldom():
    """Has garbage be collected seldom, which was a sixth of a tracing test's time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


def call_with_room(function, *arguments):
    """Calls a function with room for the frames of all that it calls."""
    return function(*arguments)


# Python maps 16 kB more where a call's frame does not fit, and unmaps them when the call returns:
# where such a chunk ends a call takes 6.7 us in place of 0.04, which was 7% of the processor time
# of tests that trace. A frame of 560 kB has a chunk of 1 MB, whose rest is for other frames.
call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=70_000)


def run(arguments):
    """Runs a module as `python -m` of the arguments would."""
    collect_seldom()
    keep()
    stay_on()
    sys.argv = arguments
    named = dict(run_name="__main__", alter_sys=True)
    call_with_room(partial(runpy.run_module, arguments[0], **named))


if __name__ == "__main__":
    run(sys.argv[1:])
