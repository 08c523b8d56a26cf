"""The tokenizer of an `.apr` file, and the way from GGUF and back, byte for byte."""

import base64
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from exporting import assert_same, load
from quick import cases

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.apr.table import AprTable, verify_footer, write_apr
from kdjax.formats.gguf import GGUFTable, write_gguf
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import load_tokenizer
from scripts.apr import convert as script
from scripts.apr.convert import convert, gguf_name, hf_name
from scripts.bench.synthetic import QWEN25_SHAPES, write_random_gguf

# ---- tokenizers


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny random teacher as GGUF, and what it becomes as .apr."""
    folder = tmp_path_factory.mktemp("apr")
    write_random_gguf(folder / "t.gguf", QWEN25_SHAPES["tiny-teacher"], seed=3)
    convert(folder / "t.gguf", folder / "t.apr")
    return folder / "t.gguf", folder / "t.apr"


def list_tensors(table):
    """All of a table's tensors as the writers take them."""
    infos = [table.info(name) for name in table]
    return [(i.name, i.dtype, i.shape, table.raw(i.name)) for i in infos]


def rewritten(source: Path, target: Path, drop=(), **changes):
    """The .apr file with other metadata."""
    table = AprTable(source)
    metadata = {key: value for key, value in table.stored().items() if key not in drop} | changes
    write_apr(target, metadata, list_tensors(table))
    return target


def test_the_tokenizer_is_that_of_the_gguf(pair):
    gguf, found = map(load_tokenizer, pair)
    assert found.content_hash == gguf.content_hash and found.eos_id == gguf.eos_id
    assert found.tokens == gguf.tokens and found.merges == gguf.merges
    assert found.chat_template == gguf.chat_template is not None
    text = "<|im_start|>def self.x(): return é\n"
    assert found.encode(text) == gguf.encode(text) and found.decode(gguf.encode(text)) == text


def test_a_tokenizer_without_types_and_names(pair, tmp_path):
    drop = ("tokenizer.token_type", "tokenizer.pre_type", "tokenizer.model", "chat_template")
    path = rewritten(pair[1], tmp_path / "x.apr", drop, **{"tokenizer.chat_template": "{{ 1 }}"})
    gguf, found = load_tokenizer(pair[0]), load_tokenizer(path)
    text = "<|im_start|>import self<|im_end|>"
    assert found.encode(text) == gguf.encode(text)
    assert found.special_ids == gguf.special_ids and found.tokens == gguf.tokens
    assert found.chat_template == "{{ 1 }}"


def test_a_tokenizer_that_is_not_whole(pair, tmp_path):
    short = {"tokenizer.vocabulary": ["a", "b"], "tokenizer.token_type": [1, 1]}
    with pytest.raises(UserError, match=r"found a \w+ token beyond the 2 of the vocabulary"):
        AprTable(rewritten(pair[1], tmp_path / "x.apr", **short))
    types = {"tokenizer.token_type": [1, 1]}
    with pytest.raises(UserError, match="found 2 token types for 384 tokens"):
        AprTable(rewritten(pair[1], tmp_path / "x.apr", **types))
    other = rewritten(pair[1], tmp_path / "x.apr", ("tokenizer.pre_type",), architecture="llama")
    with pytest.raises(UserError, match="pre-tokenizer 'unknown'"):
        load_tokenizer(other)


def test_the_tokenizer_beside_the_file(pair, tmp_path):
    path = rewritten(pair[1], tmp_path / "x.apr", ["tokenizer.merges"])
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(path)
    original = load_tokenizer(pair[0])
    original.encoder.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = load_tokenizer(path)
    assert found.encode("import self") == original.encode("import self")
    assert found.eos_id == original.eos_id


# ---- conversion


def test_the_apr_file_is_the_model(pair):
    gguf, table = map(open_table, pair)
    assert spec_from_table(table) == spec_from_table(gguf)
    assert len(table) == len(gguf)
    assert {table.info(n).dtype for n in table} == {"F32", "Q4_K", "Q6_K"}
    for name in gguf:
        hf = hf_name(name)
        assert gguf_name(hf) == name and table.info(hf)[1:] == gguf.info(name)[1:]
        np.testing.assert_array_equal(table.raw(hf), gguf.raw(name))
    assert "model.layers.2.mlp.down_proj.weight" in table and "lm_head.weight" in table
    verify_footer(pair[1])


def test_both_files_load_the_same_parameters(pair):
    gguf, apr = map(load, pair)
    assert apr.spec == gguf.spec
    assert_same(apr.params, gguf.params)


@pytest.mark.parametrize("case", cases("llama_scaled", slow=["qwen2_tied", "qwen2_yarn", "qwen3"]))
def test_a_hugging_face_model_as_apr(tmp_path, case):
    folder = Path(__file__).parent / "goldens" / case
    table = open_table(folder)
    tensors = list_tensors(table)
    write_apr(tmp_path / "x.apr", {"architecture": case.split("_")[0]}, tensors)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    want, apr = load(folder), load(tmp_path / "x.apr")
    assert apr.spec == want.spec
    assert_same(apr.params, want.params)


def test_a_converted_file_needs_no_config(pair, tmp_path):
    (tmp_path / "x.apr").write_bytes(pair[1].read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 9}')
    assert spec_from_table(AprTable(tmp_path / "x.apr")) == spec_from_table(open_table(pair[0]))


def test_there_and_back_gives_the_same_bytes(pair, tmp_path):
    convert(pair[1], tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == pair[0].read_bytes()
    tied = tmp_path / "tied.gguf"
    shape = QWEN25_SHAPES["tiny-teacher"]._replace(tied=True)
    write_random_gguf(tied, shape, recipe="q6_k")
    tied.write_bytes(tied.read_bytes() + bytes(100))  # padding that some writers leave
    convert(tied, tmp_path / "tied.apr")
    convert(tmp_path / "tied.apr", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == tied.read_bytes()
    assert spec_from_table(open_table(tmp_path / "tied.apr")).tied


def test_rope_scaling_comes_along(pair, tmp_path):
    table = GGUFTable(pair[0])
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    metadata = dict(table.metadata) | {f"qwen2.rope.scaling.{k}": v for k, v in scaling.items()}
    tensors = list_tensors(table)
    write_gguf(tmp_path / "y.gguf", metadata, tensors)
    convert(tmp_path / "y.gguf", tmp_path / "y.apr")
    spec = spec_from_table(open_table(tmp_path / "y.apr"))
    assert spec.rope_scaling.kind == "yarn" and spec.rope_scaling.factor == 4.0
    assert spec == spec_from_table(open_table(tmp_path / "y.gguf"))
    with pytest.raises(UserError, match="a qwen2 model with rope scaling; expected one of qwen2"):
        convert(
            rewritten(tmp_path / "y.apr", tmp_path / "z.apr", ["kdjax.gguf"]), tmp_path / "z.gguf"
        )


def test_an_apr_file_from_elsewhere_becomes_a_gguf_file(pair, tmp_path):
    path = rewritten(pair[1], tmp_path / "x.apr", ["kdjax.gguf"])
    convert(path, tmp_path / "x.gguf")
    table, original = GGUFTable(tmp_path / "x.gguf"), open_table(pair[0])
    assert spec_from_table(table) == spec_from_table(original) and set(table) == set(original)
    for name in original:
        np.testing.assert_array_equal(table.raw(name), original.raw(name))
    assert load_tokenizer(tmp_path / "x.gguf").content_hash == load_tokenizer(pair[0]).content_hash


def test_models_that_apr_cannot_hold_are_refused(pair, tmp_path):
    def refused(message, source, target=tmp_path / "x.apr"):
        with pytest.raises(UserError, match=message):
            convert(source, target)
        assert not target.exists()

    write_random_gguf(tmp_path / "s.gguf", QWEN25_SHAPES["tiny-student"])
    refused(
        r"tensors in types .*: token_embd.weight \(Q8_0\), .*, \.\.\.; .*Use the GGUF",
        tmp_path / "s.gguf",
    )
    table = GGUFTable(pair[0])
    tensors = list_tensors(table)
    values = {key.replace("qwen2.", "llama."): table.metadata[key] for key in table.metadata}
    write_gguf(tmp_path / "l.gguf", values | {"general.architecture": "llama"}, tensors)
    refused("found a llama model to convert; expected one of qwen2, qwen3", tmp_path / "l.gguf")
    odd = [*tensors, ("odd.weight", "F32", (4,), np.zeros(4, "<f4"))]
    write_gguf(tmp_path / "o.gguf", dict(table.metadata), odd)
    refused("tensors without a name in .apr: odd.weight", tmp_path / "o.gguf")
    for index in (0, 1):
        split = {"split.no": index, "split.count": 2}
        name = f"m-{index + 1:05}-of-00002.gguf"
        write_gguf(tmp_path / name, dict(table.metadata) | split, tensors[index::2])
    refused("found one of 2 shards; expected a single file", tmp_path / "m-00001-of-00002.gguf")
    refused("found t.gguf to convert to y.gguf; expected", pair[0], tmp_path / "y.gguf")


def test_bytes_that_are_no_padding_are_not_lost(pair, tmp_path):
    whole, table = bytearray(pair[0].read_bytes()), GGUFTable(pair[0])
    path = tmp_path / "x.gguf"
    path.write_bytes(whole + b"\1")
    with pytest.raises(UserError, match="found data behind the last tensor"):
        convert(path, tmp_path / "x.apr")
    tensors = list_tensors(table)
    write_gguf(path, dict(table.metadata) | {"general.alignment": 4096}, tensors)
    convert(path, tmp_path / "x.apr")
    convert(tmp_path / "x.apr", tmp_path / "y.gguf")
    assert (tmp_path / "y.gguf").read_bytes() == path.read_bytes()
    last = table.info(tensors[-1][0])
    assert (GGUFTable(path).start(last.name) + last.nbytes) % 4096  # padding follows
    gap = GGUFTable(path).start("blk.0.attn_norm.weight") + 256 * 4
    path.write_bytes(path.read_bytes()[:gap] + b"\1" + path.read_bytes()[gap + 1 :])
    with pytest.raises(UserError, match=r"found data before tensor 'blk\.0\.ffn_down\.weight'"):
        convert(path, tmp_path / "z.apr")


def test_overlapping_tensors_are_refused(pair, tmp_path):
    whole = pair[0].read_bytes()
    first = whole.index(b"blk.0.attn_norm.weight")  # its offset follows name, rank, shape and type
    path = tmp_path / "x.gguf"
    at = first + len(b"blk.0.attn_norm.weight") + 4 + 8 + 4
    path.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
    with pytest.raises(
        UserError, match=r"tensors 'blk\.0\.attn_norm\.weight' and 'output\.weight' in the"
    ):
        convert(path, tmp_path / "x.apr")


@pytest.mark.parametrize("stored", [None, 5, {}, "size", "header", "text", "tensor", "fewer"])
def test_a_damaged_header_is_refused(pair, tmp_path, stored):
    good = AprTable(pair[1]).stored()["kdjax.gguf"]
    header = base64.b64decode(good["header"])
    kinds = {
        "size": (good | {"size": 2**60}, "a damaged kdjax.gguf"),
        "header": (good | {"header": "!"}, "a damaged kdjax.gguf"),
        "text": (
            good | {"header": base64.b64encode(header[:-3000]).decode()},
            "a stored GGUF header",
        ),
        "tensor": (
            good | {"header": base64.b64encode(header.replace(b"blk.2.", b"blk.3.")).decode()},
            "found no tensor 'model.layers.3",
        ),
    }
    # The last entry, output_norm.weight, cut off and the number of tensors made to fit.
    (count,) = struct.unpack_from("<Q", header, 8)
    fewer = header[: header.index(b"output_norm.weight") - 8].ljust(len(header), b"\0")
    fewer = fewer[:8] + struct.pack("<Q", count - 1) + fewer[16:]
    kinds["fewer"] = good | {"header": base64.b64encode(fewer).decode()}, "found 38 tensors in its"
    value, message = kinds.get(str(stored), (stored, "a damaged kdjax.gguf"))
    if stored is None:
        value = "text"
    path = rewritten(pair[1], tmp_path / "x.apr", **{"kdjax.gguf": value})
    with pytest.raises(UserError, match=message):
        convert(path, tmp_path / "x.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["x.apr"]


def test_a_damaged_file_is_not_converted(pair, tmp_path):
    whole = bytearray(pair[1].read_bytes())
    whole[-1000] ^= 4
    (tmp_path / "x.apr").write_bytes(whole)
    with pytest.raises(UserError, match="found a footer of"):
        convert(tmp_path / "x.apr", tmp_path / "x.gguf")


def test_the_script(pair, tmp_path, capsys):
    assert script.main([str(pair[0]), str(tmp_path / "a.apr")]) == 0
    assert (tmp_path / "a.apr").read_bytes() == pair[1].read_bytes()
    assert script.main([str(pair[0]), str(tmp_path / "a.txt")]) == 2
    assert capsys.readouterr().err.startswith("error: found t.gguf to convert to a.txt")


def test_random_models_know_the_tokenizer_of_an_apr_file(pair, tmp_path):
    write_random_gguf(tmp_path / "x.gguf", QWEN25_SHAPES["tiny-teacher"], tokenizer_from=pair[1])
    assert load_tokenizer(tmp_path / "x.gguf").tokens == load_tokenizer(pair[0]).tokens
