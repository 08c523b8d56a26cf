"""`.apr` files: layout byte by byte, what is refused, and what they say of their model."""

import json
import math
import struct
import zlib

import numpy as np
import pytest

from kdjax.errors import UserError
from kdjax.formats import content_hash, open_table
from kdjax.formats.apr.table import AprTable, verify_footer, write_apr
from kdjax.formats.blocks import decode, encode, row_bytes
from kdjax.models.schema import spec_from_table
from scripts.bench.synthetic import random_blocks

MODEL = {
    "architecture": "qwen2",
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "vocab_size": 30,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}


def padded(data):
    return data + bytes(-len(data) % 64)


def entry(name=b"t", kind=0, shape=(4,), offset=0, size=None, length=None):
    size = math.prod(shape) * 4 if size is None else size
    head = struct.pack("<H", len(name) if length is None else length) + name
    return head + struct.pack(f"<BB{len(shape)}QQQ", kind, len(shape), *shape, offset, size)


def file_of(entries=(), body=bytes(64), text=None, crc=None, footer=True, **fields):
    """An .apr file put together here; `fields` overrides what its header says."""
    text = json.dumps(MODEL).encode() if text is None else text
    index = b"".join(entries)
    at_index = 64 + len(padded(text))
    said = {
        "magic": b"APR\0",
        "major": 2,
        "minor": 0,
        "flags": 0x400,
        "tensors": len(entries),
        "metadata": 64,
        "metadata_size": len(text),
        "index": at_index,
        "data": at_index + len(padded(index)),
    } | fields
    first = struct.pack("<4sBBHIQIQQ", *said.values())
    crc = zlib.crc32(first + bytes(20)) if crc is None else crc
    whole = first + struct.pack("<I", crc) + bytes(20) + padded(text) + padded(index) + body
    return whole + struct.pack("<I", zlib.crc32(whole)) * footer


def some_tensors(rng):
    for dtype, blocks in (("Q6_K", 12), ("F16", 3072), ("Q4_K", 12), ("BF16", 3072), ("F32", 3072)):
        yield f"t.{dtype}", dtype, (3, 4, 256), random_blocks(rng, dtype, blocks, 0.02)
    yield "vector", "F32", (3,), encode(np.arange(3.0), "F32")
    yield "a.scalar", "F32", (), encode(np.ones(1), "F32")


# ---- both directions


def test_round_trip(tmp_path, rng):
    tensors = list(some_tensors(rng))
    write_apr(tmp_path / "x.apr", MODEL | {"née": ["Ġ", 1.5, None]}, tensors)
    table = open_table(tmp_path / "x.apr")
    assert isinstance(table, AprTable) and table.paths == (tmp_path / "x.apr",)
    assert list(table) == sorted(name for name, *_ in tensors) and len(table) == 7
    for name, dtype, shape, data in tensors:
        assert table.info(name) == (name, shape, dtype, data.nbytes)
        raw = table.raw(name)
        assert raw.shape == (*shape[:-1], row_bytes(dtype, (shape or (1,))[-1]))
        np.testing.assert_array_equal(raw, data.reshape(raw.shape))
        assert raw.dtype == np.uint8 and not raw.flags.owndata and not raw.flags.writeable
    assert table.stored() == MODEL | {"née": ["Ġ", 1.5, None]}
    assert "vector" in table and "nothing" not in table and 3 not in table
    for method in (table.info, table.raw):
        with pytest.raises(KeyError):
            method("nothing")
    assert len(content_hash(table)) == 64
    verify_footer(tmp_path / "x.apr")


def test_a_file_is_known_by_its_first_bytes_too(tmp_path):
    (tmp_path / "model.bin").write_bytes(file_of([entry()]))
    assert isinstance(open_table(tmp_path / "model.bin"), AprTable)
    (tmp_path / "text.apr").write_text("hello")
    with pytest.raises(UserError, match=r"starts with b'hell'; expected b'APR.*Pass an \.apr file"):
        open_table(tmp_path / "text.apr")


def test_the_layout_byte_by_byte(tmp_path, rng):
    dense, packed = np.arange(20, dtype="<f4"), random_blocks(rng, "Q4_K", 2, 0.02)
    tensors = [
        ("b", "F32", (4, 5), dense),
        ("Z", "Q4_K", (2, 256), packed),
        ("a", "F32", (), dense[:1]),
    ]
    write_apr(tmp_path / "x.apr", {"k": "é"}, tensors)
    whole = (tmp_path / "x.apr").read_bytes()
    # Header 0, metadata 64 (10 bytes), index 128 (three entries, 2+1+1+1+16 bytes and 8 an axis),
    # data 256: 80 bytes of b, 288 of Z at 128, 4 of a at 448; footer at 256 + 512.
    assert len(whole) == 256 + 512 + 4
    assert whole[:4] == b"APR\0" and whole[4:6] == b"\x02\x00"
    assert struct.unpack_from("<HIQIQQ", whole, 6) == (0x420, 3, 64, 10, 128, 256)
    assert struct.unpack_from("<I", whole, 40)[0] == zlib.crc32(whole[:40] + whole[44:64])
    assert whole[44:64] == bytes(20)
    assert whole[64:128] == '{"k":"é"}'.encode() + bytes(54)
    index = b"\x01\x00Z\x0c\x02" + struct.pack("<4Q", 2, 256, 128, 288)
    index += b"\x01\x00a\x00\x00" + struct.pack("<2Q", 448, 4)
    index += b"\x01\x00b\x00\x02" + struct.pack("<4Q", 4, 5, 0, 80)
    assert whole[128:256] == index + bytes(128 - len(index))
    assert whole[256:336] == dense.tobytes() and whole[336:384] == bytes(48)
    assert whole[384:672] == packed.tobytes() and whole[672:704] == bytes(32)
    assert whole[704:768] == dense[:1].tobytes() + bytes(60)
    assert struct.unpack("<I", whole[-4:])[0] == zlib.crc32(whole[:-4])
    write_apr(tmp_path / "x.apr", {}, tensors[:1])
    flags = struct.unpack_from("<H", (tmp_path / "x.apr").read_bytes(), 6)[0]
    assert flags == 0x400  # nothing quantized


def test_offsets_need_not_follow_the_names(tmp_path):
    data = np.arange(32, dtype="<f4")
    entries = [entry(b"a", offset=64), entry(b"b", offset=0)]
    (tmp_path / "x.apr").write_bytes(file_of(entries, data.tobytes()))
    table = AprTable(tmp_path / "x.apr")
    np.testing.assert_array_equal(decode(table.raw("a"), "F32"), data[16:20])
    np.testing.assert_array_equal(decode(table.raw("b"), "F32"), data[:4])


def test_the_writer_streams_and_is_atomic(tmp_path):
    path = tmp_path / "sub" / "x.apr"

    def chunked():
        yield np.zeros(8, np.uint8)
        yield np.full(2, 7, np.float32)

    write_apr(
        path, MODEL, [("a", "F32", (4,), chunked), ("b", "F32", (4,), lambda: np.ones(4, "<f4"))]
    )
    verify_footer(path)
    np.testing.assert_array_equal(decode(AprTable(path).raw("a"), "F32"), [0, 0, 7, 7])
    before = path.read_bytes()
    with pytest.raises(UserError, match="found 16 bytes of tensor 'a' to write; expected 20"):
        write_apr(path, MODEL, [("a", "F32", (5,), chunked)])
    with pytest.raises(ZeroDivisionError):
        write_apr(path, MODEL, [("a", "F32", (5,), lambda: 1 / 0)])
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["x.apr"]


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ([("t", "Q8_0", (32,))], {}, "found type Q8_0 in tensor 't'; expected one of F32, F16"),
        ([("t", "F32", (1,))] * 2, {}, "tensor 't' of rank 1 again; expected each name once"),
        ([("é" * 129, "F32", (1,))], {}, "at most 256 bytes"),
        ([("t", "F32", (1,) * 9)], {}, "tensor 't' of rank 9; expected .* a rank up to 8"),
        ([("t", "Q4_K", (100,))], {}, "tensor 't': found rows of 100 elements stored as Q4_K"),
        ([], {"k": "é" * (8 << 20)}, "found 16777224 bytes of metadata to write; expected at most"),
    ],
)
def test_the_writer_refuses_what_the_format_cannot_hold(tmp_path, tensors, metadata, message):
    with pytest.raises(UserError, match=message):
        write_apr(tmp_path / "x.apr", metadata, [(*t, np.zeros(4, np.uint8)) for t in tensors])
    assert not list(tmp_path.iterdir())


def test_the_footer_finds_any_changed_byte(tmp_path):
    path, whole = tmp_path / "x.apr", file_of([entry()])
    for at in (0, 70, len(whole) - 60, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UserError, match="the checksum of all bytes before it"):
            verify_footer(path)
    for size in (0, 3, 100):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="found a footer of"):
            verify_footer(path)


# ---- damaged and hostile files

LIMIT = 2**64 - 1
BROKEN = {
    "empty": (b"", "starts with b''"),
    "magic": (file_of(magic=b"APQ\0"), r"starts with b'APQ\x00'; expected b'APR\x00'"),
    "version 1": (file_of(magic=b"APRN"), "an .apr file of version 1; expected"),
    "short": (file_of()[:67], "found 67 bytes; expected a header of 64 and a footer of 4"),
    "version 3": (file_of(major=3, minor=1), "found .apr version 3.1; expected version 2"),
    "checksum": (file_of(crc=0x1234), "found a header with checksum 00001234; expected "),
    "flipped": (file_of()[:50] + b"\1" + file_of()[51:], "found a header with checksum"),
    "LZ4": (
        file_of(flags=0x401),
        "found an .apr file that is LZ4-compressed; expected a plain one",
    ),
    "ZSTD": (file_of(flags=0x402), "found an .apr file that is ZSTD-compressed"),
    "encrypted": (file_of(flags=0x404), "found an .apr file that is encrypted"),
    "sharded": (file_of(flags=0x410), "found an .apr file that is sharded"),
    "column-major": (file_of(flags=0x800), "found an .apr file that is column-major"),
    "much metadata": (
        file_of(metadata_size=(16 << 20) + 1),
        "16777217 bytes of metadata; expected",
    ),
    "far metadata": (file_of(metadata=2**63), "of metadata at byte 9223372036854775808 of"),
    "metadata in header": (file_of(metadata=60), "bytes of metadata at byte 60 of"),
    "long metadata": (file_of(metadata_size=5000), "5000 bytes of metadata at byte 64 of"),
    "far index": (file_of(index=LIMIT), "found an index at byte 18446744073709551615 and data"),
    "index in header": (file_of(index=0), "found an index at byte 0 and data"),
    "far data": (file_of(data=LIMIT), "and data at byte 18446744073709551615 of"),
    "tensor count": (file_of(tensors=2**32 - 1), "bytes of index for 4294967295 tensors"),
    "no JSON": (file_of(text=b"{nothing"), "found metadata that is no JSON"),
    "not UTF-8": (file_of(text=b'{"a":"\xff"}'), "found metadata that is no JSON"),
    "deep JSON": (file_of(text=b"[" * 100_000), "found metadata that is no JSON"),
    "list": (file_of(text=b"[1]"), "found metadata that is a JSON list; expected a JSON object"),
    "long name": (file_of([entry(bytes(257))]), "a name of 257 bytes for tensor 0; expected at"),
    "name past end": (file_of([entry(length=200)]), "bytes for name 0"),
    "name text": (file_of([entry(b"\xff")]), "name 0 with bytes that are not UTF-8"),
    "I32": (file_of([entry(kind=4)]), "found type 4 (I32) in tensor 't'; expected one of F32, F16"),
    "AprQ4": (file_of([entry(kind=128)]), "found type 128 (AprQ4) in tensor 't'"),
    "old AprQ8": (file_of([entry(kind=9)]), "found type 9 (AprQ8) in tensor 't'"),
    "unknown type": (file_of([entry(kind=77)]), "found type 77 in tensor 't'"),
    "rank": (file_of([entry(shape=(1,) * 9)]), "tensor 't' of rank 9; expected at most 8"),
    "empty axis": (file_of([entry(shape=(0, 4))]), "tensor 't' of shape (0, 4)"),
    "size": (file_of([entry(size=20)]), "20 bytes for tensor 't'; expected 16, as its shape and"),
    "huge shape": (file_of([entry(shape=(LIMIT,) * 8, size=4)]), "found 4 bytes for tensor 't'"),
    "partial block": (file_of([entry(kind=12, shape=(100,))]), "tensor 't': found rows of 100"),
    "far offset": (file_of([entry(offset=LIMIT)]), "tensor 't' that ends at byte"),
    "past end": (file_of([entry(offset=49)]), "1 too few for tensor 't'"),
    "unsorted": (file_of([entry(b"b"), entry(b"a")]), "tensor 'a' after 'b'; expected an index"),
    "double": (file_of([entry(b"a"), entry(b"a")]), "tensor 'a' after 'a'; expected an index"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_say_what_is_wrong(tmp_path, case):
    whole, message = BROKEN[case]
    (tmp_path / "x.apr").write_bytes(whole)
    with pytest.raises(UserError) as caught:
        open_table(tmp_path / "x.apr")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'x.apr'}: ")


def test_the_good_file_is_good(tmp_path):
    (tmp_path / "x.apr").write_bytes(file_of([entry(offset=48)]))  # BROKEN differs by one field
    assert list(AprTable(tmp_path / "x.apr")) == ["t"]


def test_truncation_at_every_byte(tmp_path):
    path, whole = tmp_path / "x.apr", file_of([entry(offset=48)])
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError):
            AprTable(path)


# ---- what a file says of its model


def written(folder, metadata, tensors=(), config=None):
    data = [(name, "F32", shape, np.zeros(shape, "<f4")) for name, shape in tensors]
    write_apr(folder / "x.apr", metadata, data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return AprTable(folder / "x.apr")


def test_a_spec_from_the_files_own_metadata(tmp_path):
    spec = spec_from_table(written(tmp_path, MODEL | {"hidden_dim": None, "head_dim": None}))
    sizes = spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim
    assert sizes == (8, 2, 2, 1, 4)
    assert (spec.family, spec.vocab_size, spec.mlp_size) == ("qwen2", 30, 16)
    assert (spec.max_positions, spec.rope_theta, spec.rms_eps) == (64, 1e6, 1e-6)
    assert spec.tied and spec.qkv_bias and not spec.o_bias and not spec.qk_norm


def test_the_last_of_double_keys_counts(tmp_path):
    text = json.dumps(MODEL).encode().replace(b"{", b'{"num_heads": 64, ', 1)
    (tmp_path / "x.apr").write_bytes(file_of(text=text))
    assert spec_from_table(AprTable(tmp_path / "x.apr")).num_heads == 2


def test_other_spellings_of_the_metadata(tmp_path):
    metadata = {f"model.{key}": value for key, value in MODEL.items()}
    table = written(tmp_path, metadata | {"model.architecture": "Qwen2ForCausalLM"})
    assert spec_from_table(table).family == "qwen2" and spec_from_table(table).num_layers == 2


def test_rows_and_heads_are_what_the_tensors_say(tmp_path):
    embed, head = ("model.embed_tokens.weight", (32, 8)), ("lm_head.weight", (32, 8))
    table = written(tmp_path, MODEL, [embed, head])
    assert spec_from_table(table).vocab_size == 32 and not spec_from_table(table).tied
    table = written(tmp_path, MODEL, [embed, ("lm_head.weight", (0, 8))])
    assert list(table) == ["model.embed_tokens.weight"] and "lm_head.weight" not in table
    assert spec_from_table(table).tied
    biased = ("model.layers.0.self_attn.q_proj.bias", (8,))
    llama = MODEL | {"architecture": "llama"}
    assert spec_from_table(written(tmp_path, llama, [embed, biased])).qkv_bias
    assert not spec_from_table(written(tmp_path, llama, [embed])).qkv_bias


def test_a_config_beside_the_file_fills_and_wins(tmp_path):
    config = {"model_type": "qwen3", "num_hidden_layers": 7, "rope_theta": 5e5, "head_dim": 16}
    table = written(tmp_path, MODEL, config=config | {"rms_norm_eps": None})
    spec = spec_from_table(table)
    assert (spec.family, spec.num_layers, spec.rope_theta, spec.head_dim) == ("qwen3", 7, 5e5, 16)
    assert spec.num_heads == 2 and spec.rms_eps == 1e-6
    whole = {
        "model_type": "qwen2",
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 16,
        "max_position_embeddings": 64,
        "vocab_size": 30,
        "tie_word_embeddings": False,
    }
    spec = spec_from_table(written(tmp_path, {}, config=whole))
    assert (spec.num_layers, spec.num_kv_heads, spec.tied) == (3, 4, False)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: found a file that is a JSON list"):
        AprTable(tmp_path / "x.apr")


@pytest.mark.parametrize("key", [k for k in MODEL if k != "num_kv_heads"])
def test_what_neither_says_is_named(tmp_path, key):
    metadata = {k: v for k, v in MODEL.items() if k != key}
    name = {"architecture": "model_type", "num_layers": "num_hidden_layers"}.get(key, key)
    name = "num_attention_heads" if key == "num_heads" else name
    with pytest.raises(UserError, match=rf"metadata without {name}, and no config.json .* Put the"):
        written(tmp_path, metadata)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_heads", "two"),
        ("num_layers", 0),
        ("hidden_size", 8.0),
        ("vocab_size", True),
        ("head_dim", 2**31),
        ("rope_theta", -1),
        ("rope_theta", math.inf),
        ("rms_norm_eps", 10**400),
        ("architecture", 5),
        ("architecture", "\ud800"),
        ("tie_word_embeddings", "no"),
        ("rope_scaling", {"factor": "x"}),
        ("kdjax.config", {"scale_emb": "x"}),
        ("tokenizer.vocabulary", ["a", 1]),
        ("tokenizer.vocabulary", ["\udfff"]),
        ("tokenizer.merges", ["a b c"]),
        ("tokenizer.token_type", [None]),
        ("tokenizer.eos_token_id", -1),
    ],
)
def test_malformed_values_are_refused(tmp_path, key, value):
    text = json.dumps(MODEL | {key: value}).encode()  # escapes what is no text
    (tmp_path / "x.apr").write_bytes(file_of(text=text))
    with pytest.raises(UserError, match=rf"found metadata '{key}' = .*; expected \w+"):
        AprTable(tmp_path / "x.apr")


def test_interleaved_llama_rows_are_refused(tmp_path):
    llama = MODEL | {"architecture": "llama"}
    assert spec_from_table(written(tmp_path, llama | {"rope_type": 2})).family == "llama"
    with pytest.raises(UserError, match="a llama model of rope_type 0, whose query and key rows"):
        spec_from_table(written(tmp_path, llama | {"rope_type": 0}))


def test_any_flipped_bit_of_an_apr_header_is_refused(tmp_path):
    """All 512 bits of the 64 bytes, the checksum's own among them."""
    path = tmp_path / "x.apr"
    write_apr(path, MODEL, [("t", "F32", (4,), np.zeros(4, "<f4"))])
    whole = path.read_bytes()
    assert list(AprTable(path)) == ["t"]
    for bit in range(512):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            AprTable(path)
