"""Hugging Face folders: reading, and every way in which they can be broken."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kdjax.errors import MissingFileError, UserError, WriteError
from kdjax.formats import content_hash, open_table
from kdjax.formats.blocks import decode
from kdjax.formats.safetensors import SafetensorsTable, write_file

CONFIG = {"model_type": "qwen2", "hidden_size": 8}


@pytest.fixture
def arrays(rng):
    return {
        "a.weight": rng.standard_normal((6, 8)).astype(ml_dtypes.bfloat16),
        "b.weight": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "c.bias": rng.standard_normal(5).astype(np.float32),
        "d": np.array(7.5, np.float32),
    }


def save(folder, arrays, name="model.safetensors", config=True):
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(arrays, folder / name, metadata={"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def save_split(folder, arrays):
    where = {}
    for index, (name, array) in enumerate(arrays.items()):
        where[name] = f"model-{index % 2 + 1:05}-of-00002.safetensors"
        del array
    for shard in set(where.values()):
        save(folder, {n: a for n, a in arrays.items() if where[n] == shard}, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def header_only(path, header, body=b""):
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + body)
    return path


def check(table, arrays):
    assert set(table) == set(arrays) and len(table) == len(arrays)
    assert table.metadata == CONFIG
    for name, array in arrays.items():
        info, raw = table.info(name), table.raw(name)
        assert (info.name, info.shape, info.nbytes) == (name, array.shape, array.nbytes)
        assert raw.dtype == np.uint8 and not raw.flags.writeable and not raw.flags.owndata
        got = np.asarray(decode(raw, info.dtype)).reshape(info.shape)
        np.testing.assert_array_equal(got, array.astype(np.float32))
    assert "nothing" not in table
    with pytest.raises(KeyError):
        table.info("nothing")


def test_folder(tmp_path, arrays):
    table = open_table(save(tmp_path / "m", arrays))
    check(table, arrays)
    assert [path.name for path in table.paths] == ["model.safetensors"]
    assert table.raw("d").shape == (4,)
    assert table.raw("b.weight").shape == (2, 3, 8)


def test_single_file(tmp_path, arrays):
    folder = save(tmp_path / "m", arrays, "student.safetensors")
    check(open_table(folder / "student.safetensors"), arrays)


def test_shards(tmp_path, arrays):
    table = open_table(save_split(tmp_path / "m", arrays))
    check(table, arrays)
    assert [path.name for path in table.paths] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert list(table) == list(arrays)
    assert len(content_hash(table)) == 64


def test_an_empty_tensor(tmp_path):
    array = np.zeros((0, 4), np.float32)
    table = open_table(save(tmp_path / "m", {"empty": array}))
    assert table.raw("empty").shape == (0, 16)


def test_missing_config(tmp_path, arrays):
    folder = save(tmp_path / "m", arrays, config=False)
    with pytest.raises(MissingFileError, match=r"config\.json: found no such file; .*Copy it"):
        open_table(folder)


def test_broken_config(tmp_path, arrays):
    folder = save(tmp_path / "m", arrays)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config\.json: found a file that is a JSON list"):
        open_table(folder)


def test_missing_shards_are_all_listed(tmp_path, arrays):
    folder = save_split(tmp_path / "m", arrays)
    for path in folder.glob("model-*"):
        path.unlink()
    with pytest.raises(MissingFileError) as caught:
        open_table(folder)
    for shard in (1, 2):
        assert f"model-{shard:05}-of-00002.safetensors" in str(caught.value)


def test_one_shard_is_not_a_checkpoint(tmp_path, arrays):
    folder = save_split(tmp_path / "m", arrays)
    with pytest.raises(UserError, match=r"one shard of several.*Pass the folder: .*m\."):
        open_table(folder / "model-00001-of-00002.safetensors")


def test_index_and_shards_of_different_revisions(tmp_path, arrays):
    folder = save_split(tmp_path / "m", arrays)
    save(folder, {"other": arrays["c.bias"]}, "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match=r"do not hold: a\.weight, c\.bias; .*same revision"):
        open_table(folder)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": "../b.safetensors"}}'])
def test_broken_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"index\.json: found"):
        open_table(tmp_path)


def test_folder_without_weights_names_what_is_there(tmp_path):
    (tmp_path / "x.gguf").touch()
    with pytest.raises(MissingFileError, match=r"but with x\.gguf; expected model\.safetensors"):
        open_table(tmp_path)


def test_truncation_at_every_byte(tmp_path, arrays):
    path = save(tmp_path / "m", arrays) / "model.safetensors"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"too few for tensor|as long as its header"):
            SafetensorsTable(path)


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "a header that is no JSON"),
        (b"[" * 100_000, "a header that is no JSON"),
        (b"\xff\xfe", "a header that is no JSON"),
        (b"[]", "a header that is a JSON list"),
        ({"t": 3}, "tensor 't' described as 3"),
        ({"t": TENSOR | {"shape": None}}, "expected its dtype, shape and data_offsets"),
        ({"t": TENSOR | {"shape": [-2]}}, "expected its dtype, shape and data_offsets"),
        ({"t": TENSOR | {"shape": [True]}}, "expected its dtype, shape and data_offsets"),
        ({"t": TENSOR | {"data_offsets": [8]}}, "expected its dtype, shape and data_offsets"),
        ({"t": TENSOR | {"dtype": "F8_E4M3"}}, "type F8_E4M3; expected one of F32, F16, BF16"),
        ({"t": TENSOR | {"shape": [3]}}, "found 8 bytes for tensor 't'; expected 12"),
        ({"t": TENSOR | {"data_offsets": [8, 0]}}, "found -8 bytes for tensor 't'"),
        ({"t": TENSOR | {"data_offsets": [8, 16]}}, "8 too few for tensor 't'; expected at least"),
        ({"t": TENSOR, "u": TENSOR}, "tensors 't' and 'u' in the same bytes, from"),
    ],
)
def test_broken_header(tmp_path, header, message):
    path = header_only(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(UserError, match=r"x\.safetensors: found") as caught:
        open_table(path)
    assert message in str(caught.value)


def test_absurd_header_length(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(UserError, match="with a header of 9223372036854775808"):
        open_table(path)


# ---- writing


def to_write(arrays):
    """Each tensor in two chunks, as exports hand over what they convert piece by piece."""
    for name, array in arrays.items():
        bits = np.ravel(array).view(np.uint8)
        dtype = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[array.dtype.name]
        yield name, dtype, array.shape, lambda bits=bits: iter((bits[:2], bits[2:]))


def test_what_is_written_reads_equal_with_the_modes_of_other_files(arrays, tmp_path):
    write_file(tmp_path / "model.safetensors", to_write(arrays))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    check(SafetensorsTable(tmp_path), arrays)
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1 and len(list(tmp_path.iterdir())) == 2
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_full_disk_leaves_the_file_as_it_was(arrays, tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")

    def full(arrays, name, metadata):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(WriteError, match="No space left"):
        write_file(path, to_write(arrays))
    assert path.read_bytes() == b"before" and [*tmp_path.iterdir()] == [path]


def test_a_folder_with_two_sets_of_weights_is_read_as_transformers_reads_it(tmp_path, caplog):
    """The single file wins over shards of an earlier save; the line names both."""
    (tmp_path / "config.json").write_text("{}")
    for name, value in (("model.safetensors", 1), ("model-00001-of-00001.safetensors", 2)):
        write_file(tmp_path / name, [("a", "F32", (1,), np.full(1, value, "<f4").view(np.uint8))])
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert SafetensorsTable(tmp_path).raw("a").view("<f4") == 1
    assert "found model.safetensors and" in caplog.text and "index.json" in caplog.text
    (tmp_path / "model.safetensors").unlink()
    assert SafetensorsTable(tmp_path).raw("a").view("<f4") == 2
