"""Mutated GGUF, .apr and safetensors files, and values of their headers: read, or refused clearly.

Cases are drawn from their number, so that one that fails comes back alone:
`check(path, made(suffix, number, valid))`.
"""

import contextlib
import gc
import json
import random
import struct
import time
import tracemalloc
import zlib
from collections import Counter

import numpy as np
import pytest
from test_apr import MODEL as ARCHITECTURE
from test_apr import padded

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.apr.table import write_apr
from kdjax.formats.blocks import BLOCKS
from kdjax.formats.files import Cursor
from kdjax.formats.gguf import write_gguf
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import from_gguf
from scripts.bench.synthetic import random_blocks

CASES, BATCHES = 5000, 5  # of each format
SECONDS = 2.0  # a case takes a millisecond; a busy machine may stop for a while
SLACK = 256 << 10  # bytes allocated beyond the size of the file
EDGES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}

METADATA = {
    "general.architecture": "qwen2",
    "general.alignment": 32,
    "a.bool": True,
    "an.int": 7,
    "a.big.int": 2**40,
    "a.float": 0.5,
    "some.strings": ["Ġ Ġ", "", "né", "x" * 300],
    "some.ints": [1, -2, 3],
    "some.bools": [True, False],
    "an.array": np.arange(5, dtype=np.uint16),
}
MODEL = ARCHITECTURE | {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "tokenizer.vocabulary": ["a", "b", "ab", "né"],
    "tokenizer.token_type": [1, 1, 1, 3],
    "tokenizer.merges": ["a b"],
    "tokenizer.eos_token_id": 3,
    "nested": [[{"a": [None, True]}]],
}


def some_tensors(dtypes):
    rng = np.random.default_rng(0)
    for dtype in dtypes:
        elements = BLOCKS[dtype].elements
        rows = random_blocks(rng, dtype, 4 // min(elements, 4) * 2, 0.02)
        yield f"t.{dtype}", dtype, (2, rows.size // 2 // BLOCKS[dtype].nbytes * elements), rows
    yield "scalar", "F32", (), np.ones(1, "<f4")


def noting(read, fields):
    """`Cursor.number`, with the place and width of each number appended to `fields`."""

    def number(self, fmt, what):
        fields.append((self.at, struct.calcsize(fmt)))
        return read(self, fmt, what)

    return number


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """For each format a whole file, the places of the fields in its header, and their end."""
    folder, found = tmp_path_factory.mktemp("valid"), {}
    write_gguf(folder / "x.gguf", METADATA, some_tensors(("F32", "Q5_1", "Q8_0", "Q4_K")))
    kinds = ("F32", "BF16", "Q4_K", "Q6_K")
    write_apr(folder / "x.apr", MODEL, some_tensors(kinds))
    for suffix in ("gguf", "apr"):
        fields = (
            [] if suffix == "gguf" else [(4, 1), (6, 2), (8, 4), (12, 8), (20, 4), (24, 8), (32, 8)]
        )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Cursor, "number", noting(Cursor.number, fields))
            table = open_table(folder / f"x.{suffix}")
        assert len(fields) > 30 and len(table) == 5
        end = max(at + width for at, width in fields)
        found[suffix] = (folder / f"x.{suffix}").read_bytes(), fields, end
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    text = json.dumps(header).encode()
    (folder / "config.json").write_text("{}")
    whole = struct.pack("<Q", len(text)) + text + bytes(range(32))
    found["safetensors"] = whole, [(0, 8)], 8 + len(text)
    return found


# ---- mutations: each takes and returns the file's bytes


def field_edge(rng, data, fields, end):
    at, width = rng.choice(fields)
    value = rng.choice(EDGES) & (256**width - 1)
    return data[:at] + struct.pack(WORDS[width], value) + data[at + width :]


def field_nudge(rng, data, fields, end):
    """Off by a little, doubled, or the value of another field."""
    at, width = rng.choice(fields)
    other, size = rng.choice(fields)
    if at + width > len(data) or other + size > len(data):
        return data
    (value,) = struct.unpack_from(WORDS[width], data, at)
    (borrowed,) = struct.unpack_from(WORDS[size], data, other)
    value = rng.choice((value - 1, value + 1, value * 2, value + 64, len(data), borrowed))
    return data[:at] + struct.pack(WORDS[width], value & (256**width - 1)) + data[at + width :]


def bit_flips(rng, data, fields, end):
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(min(end, len(changed)))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncation(rng, data, fields, end):
    return data[: rng.randint(0, rng.choice((end, len(data))))]


def spliced(rng, data, fields, end):
    """Random or edge bytes, over others or between them."""
    at, size = rng.randint(0, end), rng.randint(1, 12)
    new = rng.choice((rng.randbytes(size), b"\xff" * size, bytes(size), b"[{" * size))
    return data[:at] + new + data[at + rng.choice((0, len(new))) :]


def deleted(rng, data, fields, end):
    at = rng.randint(0, end)
    return data[:at] + data[at + rng.randint(1, 64) :]


def duplicated(rng, data, fields, end):
    """A slice a second time, right behind itself or over another place."""
    start, at = rng.randint(0, end), rng.randint(0, end)
    part = data[start : start + rng.randint(1, 96)]
    if rng.random() < 0.5:
        return data[:start] + part + data[start:]
    return data[:at] + part + data[at + len(part) :]


MUTATIONS = (field_edge, field_nudge, bit_flips, truncation, spliced, deleted, duplicated)
WEIGHTS = (4, 3, 3, 1, 2, 1, 2)


def mutated(rng, data, fields, end):
    for mutation in rng.choices(MUTATIONS, WEIGHTS, k=rng.choice((1, 1, 1, 2, 3))):
        data = mutation(rng, data, fields, end)
    return data


def with_checksum(data):
    return data[:40] + struct.pack("<I", zlib.crc32(data[44:64], zlib.crc32(data[:40]))) + data[44:]


def apr_parts(rng, data):
    """Metadata or index mutated alone, in a file whose header tells their new places."""
    tensors, at, size, index, start = struct.unpack_from("<IQIQQ", data, 8)
    text, entries, body = data[at : at + size], data[index:start], data[start:]
    if rng.random() < 0.6:
        if rng.random() < 0.5:  # stays JSON
            values = json.loads(text)
            odd = (*EDGES, -1, 0.5, 1e400, None, True, "", "\ud800", [], {}, [1], ["a b c"], [[0]])
            values[rng.choice(list(values))] = rng.choice(odd)
            text = json.dumps(values).encode()
        else:
            text = mutated(rng, text, [(0, 1)], len(text))
    else:
        entries = mutated(rng, entries, [(0, 2)], len(entries))
        tensors += rng.choice((0, 0, 1, -1))
    at_index = 64 + len(padded(text))
    places = (64, len(text), at_index, at_index + len(padded(entries)))
    head = data[:8] + struct.pack("<IQIQQ", tensors, *places) + bytes(24)
    return head + padded(text) + padded(entries) + body


def safetensors_parts(rng, data, end):
    """A header that stays JSON, one of its values another."""
    header = json.loads(data[8:end])
    odd = (*EDGES, 10**400, -1, 0.5, None, True, "", "F16", "F8_E4M3", [], {}, [1] * 3000, [[0]])
    entry = header[rng.choice(("a", "b"))]
    key = rng.choice(list(entry))
    if isinstance(entry[key], list) and rng.random() < 0.6:
        entry[key][rng.randrange(len(entry[key]))] = rng.choice(odd)
    elif rng.random() < 0.3:
        header[rng.choice(("a", "c", ""))] = rng.choice((*odd, entry))
    else:
        entry[key] = rng.choice(odd)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[end:]


def made(suffix, number, valid):
    """The bytes of one case."""
    rng = random.Random(f"{suffix} {number}")
    data, fields, end = valid[suffix]
    if suffix == "safetensors":
        if rng.random() < 0.6:
            return safetensors_parts(rng, data, end)
        return mutated(rng, data, fields, end)
    if suffix == "gguf":
        return mutated(rng, data, fields, end)
    data = apr_parts(rng, data) if rng.random() < 0.4 else mutated(rng, data, fields, end)
    return with_checksum(data) if rng.random() < 0.9 and len(data) >= 64 else data


# ---- what must hold


def check_tensors(table, data):
    """Every tensor is a part of the file, of the size that its shape and type say."""
    for name in table:
        info, raw = table.info(name), table.raw(name)
        block = BLOCKS[info.dtype]
        elements = int(np.prod(info.shape, dtype=object))
        assert raw.nbytes == info.nbytes == elements // block.elements * block.nbytes > 0
        assert raw.shape[:-1] == info.shape[:-1] and raw.dtype == np.uint8
        whole = raw
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        start = raw.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        assert whole.nbytes == len(data) and 0 <= start <= len(data) - raw.nbytes
        assert raw.tobytes() == data[start : start + raw.nbytes]


def check(path, data):
    """Whether the file is read; fails on anything but a correct read or a clear refusal."""
    path.unlink(missing_ok=True)  # a new file: an earlier case's may still be mapped
    path.write_bytes(data)
    tracemalloc.reset_peak()
    before, started = tracemalloc.get_traced_memory()[0], time.process_time()
    table = values = None
    try:
        table = open_table(path)
        values = {key: table.metadata[key] for key in table.metadata}
    except UserError as error:
        message = str(error)
        assert message.startswith(f"{path}: ") and len(message) < 2000
        assert "found" in message and "expected" in message
    seconds, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1] - before
    assert seconds < SECONDS
    assert peak < len(data) + SLACK
    if table is not None:
        check_tensors(table, data)
    if values is not None and path.suffix == ".apr":  # whose values opening checks
        with contextlib.suppress(UserError):
            assert spec_from_table(table).num_layers == values["num_hidden_layers"]
    return values is not None


@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, BATCHES))]
)
@pytest.mark.parametrize(
    "suffix",
    ["gguf", *(pytest.param(s, marks=pytest.mark.slow) for s in ("apr", "safetensors"))],
)
def test_mutated_files_are_read_or_refused(tmp_path, valid, suffix, batch, types_unchecked):
    # To check annotations, at 0.1 ms a call, would be most of the time, and their messages most of
    # the memory.
    path, outcomes = tmp_path / f"x.{suffix}", Counter()
    (tmp_path / "config.json").write_text("{}")  # which stands beside a safetensors file
    cases = {number: made(suffix, number, valid) for number in range(batch, CASES, BATCHES)}
    gc.collect()
    tracemalloc.start()
    try:
        assert check(path, valid[suffix][0])
        for number, data in cases.items():
            try:
                outcomes[check(path, data)] += 1
            except Exception as error:
                error.add_note(f"in case {number} of {suffix}")
                raise
    finally:
        tracemalloc.stop()
    # Neither all harmless nor all stopped by the first check.
    assert outcomes.total() == CASES // BATCHES
    print(suffix, batch, outcomes)
    assert outcomes[True] > 10 and outcomes[False] > 200


# ---- what the values of a header mean: architecture and tokenizer


ODD = (*EDGES, -1, 7, 0.5, 1e400, float("nan"), None, True)
ODD += ("", "x", "\ud800", [], {}, [1], ["a b c"])
ODD_LISTS = (
    lambda v: v[:-1],
    lambda v: v * 2,
    lambda v: v[::-1],
    lambda v: [*v[:5], None],
    lambda v: v[1:] + v[:1],
    lambda v: v[:1] * len(v),
    lambda v: [str(x) for x in v],
)


def meaning(number, metadata):
    """The key-values of one case: one to three of another type, value or order."""
    rng, values = random.Random(f"meaning {number}"), dict(metadata)
    keys = [key for key in values if key.startswith(("qwen2.", "tokenizer.", "general.arch"))]
    for key in rng.choices(keys, k=rng.choice((1, 1, 2, 3))):
        value = values.get(key)
        if rng.random() < 0.1:
            values.pop(key, None)
        elif isinstance(value, list | np.ndarray) and rng.random() < 0.8:
            values[key] = rng.choice(ODD_LISTS)(list(value))
        elif isinstance(value, int) and rng.random() < 0.4:
            values[key] = value + rng.choice((-1, 1, value, 2**20))
        else:
            values[key] = rng.choice(ODD)
    return values


@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, BATCHES))]
)
def test_values_of_any_kind_make_a_model_or_are_refused(models, batch):
    table, outcomes = open_table(models / "teacher.gguf"), Counter()
    metadata = {key: table.metadata[key] for key in table.metadata}
    for number in range(batch, 1000, BATCHES):
        table.metadata = meaning(number, metadata)
        try:
            spec_from_table(table)
            tokenizer = from_gguf(table.metadata, "x.gguf")
            ids = tokenizer.encode("def f(x):\n    return x")
            assert all(0 <= i < len(tokenizer.tokens) for i in ids)
            assert 0 <= tokenizer.end_of_text_id < len(tokenizer.tokens)
            outcomes[True] += 1
        except UserError as error:
            assert len(str(error)) < 2000
            outcomes[False] += 1
        except Exception as error:
            error.add_note(f"in case {number}")
            raise
    assert outcomes[True] > 10 and outcomes[False] > 50, outcomes
