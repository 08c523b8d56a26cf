"""A GGUF file whose layers lack one bit: the yardstick for what another form of a teacher costs.

    python -m scripts.checks.fewer_bits model.gguf fewer.gguf
    kdjax evaluate fewer.gguf --teacher=model.gguf --data=corpus/heldout
    kdjax evaluate model.gguf@float8 --teacher=model.gguf --data=corpus/heldout

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

from kdjax.evaluation.health.forms import find_wide_block, round_to_levels
from kdjax.formats import TensorTable, open_table
from kdjax.formats.blocks import block_type, decode, encode
from kdjax.formats.gguf import write_gguf

_PART = 1 << 17  # numbers that a thread takes at a time


def _rounded(table: TensorTable, name: str) -> np.ndarray:
    block = block_type(table.info(name).dtype)
    numbers = np.asarray(decode(table.raw(name), table.info(name).dtype))
    parts = np.array_split(numbers, max(1, numbers.size // _PART))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        fewer = functools.partial(round_to_levels, bits=block.bits - 1, group=block.group)
        return encode(np.concatenate(list(map(np.asarray, pool.map(fewer, parts)))), "BF16")


def write_fewer_bits(source: Path, target: Path) -> int:
    """Writes the file; returns how many matrices were rounded."""
    table = open_table(source)
    tensors, count = [], 0
    for name in table:
        info = table.info(name)
        if name.startswith("blk.") and len(info.shape) == 2 and find_wide_block(info.dtype):
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
