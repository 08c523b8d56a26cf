"""GGUF files: both directions against gguf-py, and headers that are damaged or hostile."""

import struct
import time

import gguf
import numpy as np
import pytest

from kdjax.errors import MissingFileError, UserError
from kdjax.formats import content_hash, open_table
from kdjax.formats.blocks import BLOCKS, decode, encode, row_bytes
from kdjax.formats.gguf import GGUFTable, write_gguf
from scripts.bench.synthetic import random_blocks

METADATA = {
    "general.architecture": "qwen2",
    "a.bool": True,
    "an.int": 7,
    "a.big.int": 2**40,
    "a.negative.int": -3,
    "a.float": 0.5,
    "some.strings": ["Ġ Ġ", "", "né", "x" * 300],
    "some.ints": [1, -2, 3],
    "some.floats": [0.25, -1.5],
    "some.bools": [True, False],
    "an.array": np.arange(5, dtype=np.uint16),
}


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(name="t", shape=(4,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def pair(key="k", kind=4, value=b"\1\0\0\0"):
    return text(key) + struct.pack("<I", kind) + value


def header(tensors=(), pairs=(), *, version=3, counts=None, magic=b"GGUF"):
    counts = counts or (len(tensors), len(pairs))
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)


def file_of(path, head, data=b"", alignment=32):
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def some_tensors(rng):
    for dtype, block in BLOCKS.items():
        rows = random_blocks(rng, dtype, 6 * 256 // block.elements, 0.02)
        yield f"t.{dtype}", dtype, (2, 3, 256), rows.reshape(2, 3, -1)
    yield "vector", "F32", (3,), encode(np.arange(3.0), "F32")
    yield "scalar", "F32", (), encode(np.ones(1), "F32")


def test_round_trip(tmp_path, rng):
    tensors = list(some_tensors(rng))
    write_gguf(tmp_path / "x.gguf", METADATA, tensors)
    table = GGUFTable(tmp_path / "x.gguf")
    assert list(table) == [name for name, *_ in tensors] and len(table) == len(tensors)
    for name, dtype, shape, data in tensors:
        assert table.info(name) == (name, shape, dtype, data.nbytes)
        raw = table.raw(name)
        assert raw.shape == (*shape[:-1], row_bytes(dtype, (shape or (1,))[-1]))
        np.testing.assert_array_equal(raw, data.reshape(raw.shape))
        assert raw.dtype == np.uint8 and not raw.flags.owndata and not raw.flags.writeable
    assert list(table.metadata) == list(METADATA) and len(table.metadata) == len(METADATA)
    for key, value in METADATA.items():
        assert np.array_equal(table.metadata[key], value), key
        assert type(table.metadata[key]) is type(value) or isinstance(value, list), key
    assert table.metadata["an.array"].dtype == np.uint16
    assert table.metadata["some.ints"].dtype == np.int32
    assert "vector" in table and "nothing" not in table and 3 not in table
    assert "a.bool" in table.metadata and "nothing" not in table.metadata
    with pytest.raises(KeyError):
        table.info("nothing")
    with pytest.raises(KeyError):
        table.raw("nothing")


def test_gguf_py_reads_what_we_write(tmp_path, rng):
    known = gguf.GGMLQuantizationType.__members__
    tensors = [tensor for tensor in some_tensors(rng) if tensor[1] in known][:-1]
    write_gguf(tmp_path / "x.gguf", METADATA, tensors)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    for key, value in METADATA.items():
        field = reader.get_field(key)
        assert field is not None and np.array_equal(field.contents(), value), key
    kinds = {key: reader.fields[key].types[-1].name for key in METADATA}
    assert kinds["an.int"] == "UINT32" and kinds["a.big.int"] == "UINT64"
    assert kinds["a.negative.int"] == "INT32" and kinds["a.float"] == "FLOAT32"
    assert kinds["a.bool"] == "BOOL" and kinds["some.ints"] == "INT32"
    for (name, dtype, shape, data), tensor in zip(tensors, reader.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type.name) == (name, dtype)
        assert tuple(reversed(tensor.shape.tolist())) == shape
        assert tensor.data.tobytes() == data.tobytes()
        assert tensor.data_offset % 32 == 0


@pytest.mark.parametrize("alignment", [32, 64, 256])
def test_we_read_what_gguf_py_writes(tmp_path, rng, alignment):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.add_custom_alignment(alignment)
    writer.add_token_list(["a", "Ġb"])
    writer.add_uint8("small", 3)
    writer.add_float64("double", 0.1)
    dense = rng.standard_normal((3, 5)).astype(np.float32)
    packed = random_blocks(rng, "Q4_K", 4, 0.02).reshape(2, -1)
    writer.add_tensor("dense", dense)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    table = GGUFTable(tmp_path / "x.gguf")
    assert table.metadata["general.alignment"] == alignment
    assert table.metadata["tokenizer.ggml.tokens"] == ["a", "Ġb"]
    assert table.metadata["small"] == 3 and table.metadata["double"] == 0.1
    assert table.info("packed") == ("packed", (2, 512), "Q4_K", packed.nbytes)
    np.testing.assert_array_equal(table.raw("packed"), packed)
    np.testing.assert_array_equal(decode(table.raw("dense"), "F32"), dense)


def test_version_2_and_alignment_64(tmp_path, rng):
    tensors = list(some_tensors(rng))
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA | {"general.alignment": 64}, tensors)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + struct.pack("<I", 2) + whole[8:])
    table = GGUFTable(path)
    for name, _, _, data in tensors:
        assert table.raw(name).tobytes() == data.tobytes()
    assert all(table.start(name) % 64 == 0 for name in table)


def test_the_writer_streams_and_is_atomic(tmp_path):
    path, calls = tmp_path / "sub" / "x.gguf", []

    def chunks():
        calls.append("chunks")
        yield np.zeros(8, np.uint8)
        yield np.full(8, 7, np.uint8)

    def broken():
        raise RuntimeError("stop")

    ones = np.ones((2, 4), np.float32)  # bytes of any dtype are written as they lie
    write_gguf(path, {}, [("a", "F32", (4,), chunks), ("b", "F32", (2, 4), lambda: ones)])
    assert calls == ["chunks"]
    assert bytes(GGUFTable(path).raw("a")) == bytes(8) + b"\x07" * 8
    np.testing.assert_array_equal(decode(GGUFTable(path).raw("b"), "F32"), ones)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="stop"):
        write_gguf(path, {}, [("a", "F32", (4,), broken)])
    with pytest.raises(UserError, match="found 16 bytes of tensor 'a' to write; expected 20"):
        write_gguf(path, {}, [("a", "F32", (5,), chunks)])
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["x.gguf"]


@pytest.mark.parametrize("value", [None, [], {}, [None], 2**70, [[1]], b"bytes", 1j, ["a", 1]])
def test_the_writer_refuses_values_gguf_cannot_hold(tmp_path, value):
    with pytest.raises(UserError, match=r"metadata 'key' = .*expected a str, bool, int"):
        write_gguf(tmp_path / "x.gguf", {"key": value}, [])
    assert not list(tmp_path.iterdir())


# ---- split files


def write_split(folder, rng, count=3):
    tensors = list(some_tensors(rng))
    for index in range(count):
        split = {"split.no": index, "split.count": count, "split.tensors.count": len(tensors)}
        metadata = split | (METADATA if index == 0 else {})
        name = f"m-{index + 1:05}-of-{count:05}.gguf"
        write_gguf(folder / name, metadata, tensors[index::count])
    return tensors


@pytest.mark.parametrize("opened", [1, 2, 3])
def test_any_shard_opens_all(tmp_path, rng, opened):
    tensors = write_split(tmp_path, rng)
    table = open_table(tmp_path / f"m-{opened:05}-of-00003.gguf")
    assert set(table) == {name for name, *_ in tensors}
    assert [path.name for path in table.paths] == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    assert table.metadata["an.int"] == 7
    for name, _, _, data in tensors:
        assert table.raw(name).tobytes() == data.tobytes()


def test_split_by_gguf_py(tmp_path, rng):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2", split_max_tensors=2)
    arrays = {f"t{i}": rng.standard_normal((2, 4)).astype(np.float32) for i in range(5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file(path=tmp_path / "m.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    table = open_table(tmp_path / "m-00002-of-00003.gguf")
    assert table.metadata["general.architecture"] == "qwen2"
    for name, array in arrays.items():
        np.testing.assert_array_equal(decode(table.raw(name), "F32"), array)


def test_missing_shards(tmp_path, rng):
    write_split(tmp_path, rng)
    for index in (1, 3):
        (tmp_path / f"m-{index:05}-of-00003.gguf").unlink()
    with pytest.raises(MissingFileError) as caught:
        open_table(tmp_path / "m-00002-of-00003.gguf")
    message = str(caught.value)
    assert "without m-00001-of-00003.gguf, m-00003-of-00003.gguf next to it" in message
    assert f"Download the missing files into {tmp_path}" in message


def test_renamed_and_mixed_shards(tmp_path, rng):
    tensors = write_split(tmp_path, rng)
    first, second = (tmp_path / f"m-{i:05}-of-00003.gguf" for i in (1, 2))
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=r"one of 3 shards under the name renamed\.gguf"):
        open_table(renamed)
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=r"split\.no = 0, split\.count = 3; expected 1 and 3"):
        open_table(first)
    write_gguf(second, {"split.no": 1, "split.count": 3}, [])
    with pytest.raises(
        UserError, match=rf"found \d+ tensors in 3 shards; expected {len(BLOCKS) + 2}"
    ):
        open_table(first)
    write_gguf(second, {"split.no": 1, "split.count": 3}, tensors[: len(tensors[1::3])])
    with pytest.raises(UserError, match=r"'t\.F32' a second time in the split"):
        open_table(first)
    write_gguf(first, {"split.count": "many"}, [])
    with pytest.raises(UserError, match=r"split\.count = 'many'"):
        open_table(first)


# ---- damaged and hostile files

STRINGS = struct.pack("<IQ", 8, 3)  # an array of three strings
DATA = bytes(64)
BROKEN = {
    "empty": (b"", "found an empty file; expected b'GGUF'"),
    "magic": (header(magic=b"GGML"), "found a file that starts with b'GGML'; expected b'GGUF'"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "version 1": (header(version=1), "found GGUF version 1; expected little-endian GGUF version 2"),
    "version 0": (header(version=0), "found GGUF version 0"),
    "big-endian": (header(version=3 << 24), "found a big-endian GGUF file"),
    "no counts": (b"GGUF\x03\0\0\0\0\0", "expected 8 bytes for tensor count"),
    "tensor count": (header(counts=(2**60, 0)), f"the entries of {2**60} tensors"),
    "pair count": (header(counts=(0, 2**63)), f"{2**63} key-values"),
    "key length": (header([], [struct.pack("<Q", 2**62) + bytes(20)]), "bytes for key 0"),
    "key text": (header([], [struct.pack("<Q", 1) + b"\xff" + bytes(20)]), "key 0 with bytes that"),
    "double key": (header([], [pair(), pair()]), "the key 'k' twice"),
    "value type": (header([], [pair(kind=13)]), "value type 13 for 'k'"),
    "short value": (header([], [pair(kind=10, value=b"")]), "expected 8 bytes for 1 values of 'k'"),
    "long string": (header([], [pair(kind=8, value=bytes(7) + b"\x10")]), "the value of 'k'"),
    "element type": (
        header([], [pair(kind=9, value=struct.pack("<IQ", 9, 1) + bytes(12))]),
        "an array 'k' with elements of type 9",
    ),
    "array length": (
        header([], [pair(kind=9, value=struct.pack("<IQ", 5, 2**61))]),
        f"{2**61} values of 'k'",
    ),
    "strings count": (
        header([], [pair(kind=9, value=struct.pack("<IQ", 8, 2**61))]),
        f"{2**61} strings of k",
    ),
    "string length": (
        header([], [pair(kind=9, value=STRINGS + struct.pack("<Q", 2**64 - 1) + bytes(16))]),
        "k running past the end of the file",
    ),
    "last string": (
        header([], [pair(kind=9, value=STRINGS + bytes(16) + struct.pack("<Q", 999))]),
        "k running past the end of the file",
    ),
    "rank": (header([entry(shape=(1,) * 5)]), "tensor 't' of rank 5; expected at most 4"),
    "huge rank": (header([text("t") + b"\xff" * 32]), "tensor 't' of rank 4294967295"),
    "empty axis": (header([entry(shape=(4, 0))]), "tensor 't' of shape (0, 4)"),
    "huge shape": (
        header([entry(shape=(2**62,))]),
        f"tensor 't' that ends at byte {2**64 + 64} (18,447 million GB); expected a shape and an",
    ),
    "one place": (
        header([entry("a", (8,)), entry("b", (8,))]),
        "the tensors 'a' and 'b' in the same bytes, from 96 on; expected separate bytes",
    ),
    "overlap": (
        header([entry("b", (2,), offset=32), entry("a", (9,))]),
        "the tensors 'a' and 'b' in the same bytes, from 128 on",
    ),
    "block type": (
        header([entry("blk.0.w", kind=9)]),
        "block type 9 (Q8_1) in tensor 'blk.0.w'; expected one of F32, F16, BF16, Q4_0",
    ),
    "new block type": (header([entry(kind=999)]), "found block type 999 in tensor 't'"),
    "partial block": (header([entry(shape=(100,), kind=12)]), "tensor 't': found rows of 100"),
    "double tensor": (header([entry(), entry()]), "the tensor 't' twice"),
    "offset": (header([entry(offset=8)]), "tensor 't' at offset 8; expected a multiple of 32"),
    "far offset": (header([entry(offset=2**62)]), "tensor 't' that ends at byte 46116860184"),
    "alignment": (
        header([], [pair("general.alignment", value=struct.pack("<I", 24))]),
        "found general.alignment = 24; expected a power of two",
    ),
    "no alignment": (
        header([], [pair("general.alignment", value=struct.pack("<I", 0))]),
        "found general.alignment = 0",
    ),
    "alignment type": (
        header([], [pair("general.alignment", 8, text("32"))]),
        "found general.alignment = '32'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_say_what_is_wrong(tmp_path, case):
    head, message = BROKEN[case]
    # Data behind the header would be taken for it where a count or a length reaches too far.
    data = b"" if len(head) < 24 or "count" in case or "short" in case else DATA
    path = tmp_path / "x.gguf"
    path.write_bytes(head + data)
    with pytest.raises(UserError) as caught:
        open_table(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_truncated_data_names_the_tensor_and_the_bytes(tmp_path):
    head = header([entry("first", (4,)), entry("second", (8,), offset=32)])
    path = file_of(tmp_path / "x.gguf", head, bytes(64))
    size = path.stat().st_size
    assert len(GGUFTable(path)) == 2
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError) as caught:
        GGUFTable(path)
    message = str(caught.value)
    assert f"{size - 5} bytes, 5 too few for tensor 'second'; expected at least {size}" in message
    assert "download the file again" in message


@pytest.mark.slow
def test_truncation_at_every_byte(tmp_path, rng):
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA, [("t", "Q8_0", (2, 32), random_blocks(rng, "Q8_0", 2, 1.0))])
    whole = path.read_bytes()
    for size in range(len(whole) - len(whole) % 32 - 1):
        path.write_bytes(whole[:size])
        if size < len(whole) - 28:  # the last 28 bytes are padding
            with pytest.raises(UserError):
                GGUFTable(path)


def test_strings_that_are_no_text_fail_when_read(tmp_path):
    strings = struct.pack("<IQQ", 8, 2, 1) + b"a" + struct.pack("<Q", 1) + b"\xff"
    table = GGUFTable(file_of(tmp_path / "x.gguf", header([], [pair("k", 9, strings)])))
    with pytest.raises(UserError, match="entry 1 of 'k' with bytes that are not UTF-8"):
        table.metadata["k"]


# ---- speed, hash, missing files


@pytest.mark.slow
def test_a_152k_vocabulary_opens_in_under_300_ms(tmp_path):
    tokens = [f"Ġtoken{index}" for index in range(152_064)]
    merges = [f"Ġto ken{index}" for index in range(151_387)]
    metadata = {"tokens": tokens, "types": [1] * len(tokens), "merges": merges}
    write_gguf(tmp_path / "x.gguf", metadata, [])
    times = []
    for _ in range(4):
        start = time.process_time()  # other tests run beside this one
        table = GGUFTable(tmp_path / "x.gguf")
        times.append(time.process_time() - start)
    assert min(times) < 0.3
    assert table.metadata["merges"] == merges
    assert table.metadata["tokens"] is table.metadata["tokens"]  # decoded once


def test_content_hash_is_that_of_the_bytes(tmp_path, rng):
    import hashlib

    write_split(tmp_path, rng)
    table = open_table(tmp_path / "m-00002-of-00003.gguf")
    whole = b"".join(path.read_bytes() for path in table.paths)
    assert content_hash(table) == hashlib.sha256(whole).hexdigest()


def test_a_missing_file_comes_with_the_command_that_gets_it():
    with pytest.raises(MissingFileError) as caught:
        open_table("models/qwen2.5-coder-7b-instruct-q4_k_m.gguf")
    message = str(caught.value)
    assert message.startswith("models/qwen2.5-coder-7b-instruct-q4_k_m.gguf: found no such file")
    assert (
        "Download it: `hf download Qwen/Qwen2.5-Coder-7B-Instruct-GGUF "
        "qwen2.5-coder-7b-instruct-q4_k_m.gguf --local-dir models`" in message
    )
    with pytest.raises(FileNotFoundError, match=r"Coder-0\.5B-Instruct-GGUF .*-local-dir 'a b'"):
        open_table("a b/qwen2.5-coder-0.5b-instruct-q8_0.gguf")
    with pytest.raises(MissingFileError, match="Download one, for example: `hf download Qwen/"):
        open_table("nowhere/other.gguf")


def test_other_files_are_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match=r"starts with b'hell'; .*Pass a GGUF model, or a Hugging"):
        open_table(tmp_path / "notes.txt")
