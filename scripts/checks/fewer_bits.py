"""A GGUF file whose layers lack one bit: the yardstick for what another form of a teacher costs.

    python -m scripts.checks.fewer_bits model.gguf fewer.gguf
    python -m kdjax.evaluate fewer.gguf --teacher=model.gguf --data=corpus/heldout
    python -m kdjax.evaluate model.gguf@fp8 --teacher=model.gguf --data=corpus/heldout

Each quantized matrix of a layer is rounded anew, in the groups of its own block type, to half as
many levels, evenly spaced between two values of each group that least squares chooses. These
stay float32 where a block type would round them too, so the loss is less than that of a real type
of so many bits. The result is stored as BF16. Embedding and head stay as they are.
"""

import argparse
import concurrent.futures
import functools
import os
from pathlib import Path

import numpy as np

from kdjax.formats import TensorTable, open_table
from kdjax.formats.blocks import decode, encode
from kdjax.formats.gguf import write_gguf
from kdjax.formats.kquants import fit_affine

# Bits a number and numbers a group.
_TYPES = {
    "Q4_0": (4, 32),
    "Q4_1": (4, 32),
    "Q4_K": (4, 32),
    "Q5_0": (5, 32),
    "Q5_1": (5, 32),
    "Q5_K": (5, 32),
    "Q6_K": (6, 16),
    "Q8_0": (8, 32),
}
_PART = 1 << 17  # numbers that a thread takes at a time


def fewer_levels(numbers: np.ndarray, bits: int, group: int) -> np.ndarray:
    """float32 `[rows, n]` rounded to 2^bits levels in each group of `group` neighbours."""
    x = np.ascontiguousarray(numbers.reshape(-1, group).T)
    top = 2**bits - 1
    scale, offset = fit_affine(x, top, top + 0.1 * np.arange(-10, 11))
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    q = np.rint((x + offset) * inverse).clip(0, top)
    return (q * scale - offset).astype(np.float32).T.reshape(numbers.shape)


def _rounded(table: TensorTable, name: str) -> np.ndarray:
    bits, group = _TYPES[table.info(name).dtype]
    numbers = np.asarray(decode(table.raw(name), table.info(name).dtype))
    parts = np.array_split(numbers, max(1, numbers.size // _PART))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        rounded = pool.map(functools.partial(fewer_levels, bits=bits - 1, group=group), parts)
        return encode(np.concatenate(list(rounded)), "BF16")


def write_fewer_bits(source: Path, target: Path) -> int:
    """Writes the file; returns how many matrices were rounded."""
    table = open_table(source)
    tensors, count = [], 0
    for name in table:
        info = table.info(name)
        if name.startswith("blk.") and len(info.shape) == 2 and info.dtype in _TYPES:
            tensors.append((name, "BF16", info.shape, functools.partial(_rounded, table, name)))
            count += 1
        else:
            tensors.append((name, info.dtype, info.shape, table.raw(name)))
    write_gguf(target, table.metadata, tensors)
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes a GGUF file with one bit less a weight.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    paths = parser.parse_args()
    print(f"{write_fewer_bits(paths.source, paths.target)} matrices rounded anew")
