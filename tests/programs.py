"""Compiled programs that tests keep on disk, and so do the processes that they start.

python -m programs MODULE ARGUMENT...
"""

import re
import runpy
import sys
import zlib
from functools import partial

from jax._src import compilation_cache, compiler

_COLLECTIVE = re.compile(r" (all-|reduce-scatter|collective-|ragged-|send|recv)[a-z-]*\(")
_write = compiler._cache_write


def _write_safe(key, seconds, name, backend, executable, *others):
    """Leaves programs with collectives out: once loaded they may run several at a time.

    `sharding.leave_cache_out` is for those. Of the programs of meshes most have none.
    """
    if not _COLLECTIVE.search(executable.hlo_modules()[0].to_string()):
        _write(key, seconds, name, backend, executable, *others)


def keep():
    """Has JAX's cache, if there is one, keep the programs that it loads as they were."""
    compiler._cache_write = _write_safe
    if not any(getattr(compilation_cache, name, None) for name in ("zstd", "zstandard")):
        # zlib's default level took 5.5 ms a program, a fourteenth of a test that compiles 75.
        compilation_cache.compress_executable = partial(zlib.compress, level=1)


def stay_on():
    """Has the cache stay on where a mesh has several CPU devices."""
    from kdjax.device import sharding

    sharding.leave_cache_out = lambda: None


if __name__ == "__main__":
    keep()
    stay_on()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
