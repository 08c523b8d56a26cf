"""Checksums of arrays: equal on the host and on any mesh of devices.

Each element's bits are mixed with its position in the entire array, and the results are added
modulo 2^32. The mixing is one-to-one, so one changed element always changes the sum; any other
damage passes with a chance of 1 in 4 billion. A sum does not depend on the order: each device adds
its own shards.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 1 << 16  # elements mixed at a time on the host: they stay in its cache
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint32"}  # by bytes an element


def checksum(array: np.ndarray) -> int:
    """Checksum of an array on the host; an element of 8 bytes counts as two of 4."""
    bits = np.ravel(array).view(_UNSIGNED[array.dtype.itemsize])
    places = np.arange(min(_BLOCK, bits.size), dtype=np.uint32)
    total = 0
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK].astype(np.uint32)
        mixed = _mix(block, places[: block.size] + np.uint32(start % 2**32))
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**32


def add_up(array: jax.Array) -> jax.Array:
    """Checksum, uint32, of an array on devices, of at most 4 bytes an element; to be jitted."""
    bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize])
    place, step = jnp.zeros(array.shape, jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        place += along * np.uint32(step % 2**32)
        step *= array.shape[axis]
    return _mix(bits.astype(jnp.uint32), place).sum(dtype=jnp.uint32)


def _mix(bits: Any, place: Any) -> Any:
    """The finalizer of MurmurHash3 over the bits and their place, both uint32."""
    x = bits + place * np.uint32(0x9E3779B1)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
