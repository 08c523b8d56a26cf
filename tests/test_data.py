"""From text to batches: tokenizer, documents, packed rows, split, position; all by hand."""

import copy
import dataclasses
import errno
import importlib
import importlib.metadata
import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick import cases
from tokenizers import Tokenizer as Encoder
from tokenizers import models as encoder_models
from tokenizers import pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kdjax import progress
from kdjax.config import Config, DataConfig
from kdjax.data import installed, pipeline, rows, sources, text
from kdjax.data.installed import package_versions
from kdjax.data.rows import Rows
from kdjax.errors import MissingFileError, UserError
from kdjax.evaluation import heldout
from kdjax.formats import open_table
from kdjax.formats.gguf import write_gguf
from kdjax.models import long_text, pretokenizers
from kdjax.models.tokenizer import _find_refused, from_gguf, load_tokenizer
from kdjax.training import inputs
from scripts.checks import vocabularies

END = 999  # an id that no text gives


@pytest.fixture(scope="module")
def tokenizer(models):
    return load_tokenizer(models / "student.gguf")


def settings_of(tokenizer, patterns, **changes):
    settings = rows.RowSettings(patterns, "", tokenizer, 7, 0.5, END, max_segments=32)
    return dataclasses.replace(settings, **changes)


def prepare(folder, tokenizer, patterns, **changes):
    return rows.prepare_rows(settings_of(tokenizer, patterns, **changes), folder / "cache")


# --- tokenizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample", ["", "def f(self):\n    return x", "héllo  \t\n\n", "日本 🐍", "\r\n"]
)
def test_text_survives_a_round_trip(tokenizer, sample):
    assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert tokenizer.encode_batch([sample, sample]) == [tokenizer.encode(sample)] * 2


def test_special_tokens_padding_and_ends(tokenizer, models):
    metadata = open_table(models / "student.gguf").metadata
    assert tokenizer.vocab_size == 305 < len(metadata["tokenizer.ggml.tokens"])
    assert not any(t.startswith("[PAD") for t in tokenizer.tokens)
    (im_end,) = tokenizer.encode("<|im_end|>")
    assert im_end == tokenizer.eos_id != tokenizer.end_of_text_id
    assert tokenizer.tokens[tokenizer.end_of_text_id] == "<|endoftext|>"
    assert tokenizer.special_ids == {302, 303, 304}


def test_special_tokens_may_stand_anywhere(models):
    """Id 0 ends a text in GPT-NeoX's and SmolLM's vocabularies."""
    metadata = dict(open_table(models / "student.gguf").metadata)
    tokens, types = ["<|endoftext|>", "a", "<mid>", "b", "ab", "<end>"], [3, 1, 4, 1, 1, 3]
    values = {"tokens": tokens, "token_type": types, "merges": ["a b"], "eos_token_id": 0}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    tokenizer = from_gguf(metadata, "x")
    assert tokenizer.encode("ab<mid>b<|endoftext|>a<end>") == [4, 2, 3, 0, 1, 5]
    assert tokenizer.tokens == tuple(tokens) and tokenizer.end_of_text_id == 0
    assert tokenizer.special_ids == {0, 5} and tokenizer.added_ids == {0, 2, 5}
    twice = metadata | {"tokenizer.ggml.tokens": [*tokens[:5], "<mid>"]}
    with pytest.raises(
        UserError, match=r"'<mid>' at id [25] and at [25]; expected each token once"
    ):
        from_gguf(twice, "x")


def test_files_of_one_tokenizer_build_it_once(models):
    """Each keeps its template; a merge, a type or an end of its own makes another tokenizer."""
    metadata = dict(open_table(models / "student.gguf").metadata)
    first = from_gguf(metadata, "x")
    again = from_gguf(metadata | {"tokenizer.chat_template": "{{ messages }}"}, "y")
    assert again.encoder is first.encoder
    assert again.chat_template == "{{ messages }}" != first.chat_template
    merges, eos = metadata["tokenizer.ggml.merges"], metadata["tokenizer.ggml.eos_token_id"]

    def list_facts(tokenizer):
        return tokenizer.merges, tokenizer.eos_id, tokenizer.encoder.to_str()

    for other in ({"merges": merges[:-1]}, {"eos_token_id": eos - 1}, {"pre": "gpt-2"}):
        changed = from_gguf(metadata | {f"tokenizer.ggml.{k}": v for k, v in other.items()}, "z")
        assert changed.encoder is not first.encoder
        assert list_facts(changed) != list_facts(first), other


def test_a_second_header_of_one_tokenizer_is_not_decoded(models, tmp_path):
    """Unless a byte of it differs: published files have 300,000 strings, 0.2 s of a core."""
    first = from_gguf(open_table(models / "student.gguf").metadata, "x")
    equal = (models / "student.gguf").read_bytes()
    merges = [struct.pack("<Q", 3) + merge for merge in (b"i n", b"r e")]
    assert equal.count(b"".join(merges)) == 1
    other = equal.replace(b"".join(merges), b"".join(merges[::-1]))
    for name, stored in (("equal", equal), ("other", other)):
        (tmp_path / f"{name}.gguf").write_bytes(stored)
        metadata = open_table(tmp_path / f"{name}.gguf").metadata
        read = from_gguf(metadata, name)
        assert (read.encoder is first.encoder) == (name == "equal")
        assert isinstance(metadata.data["tokenizer.ggml.merges"], list) == (name == "other")
        assert metadata.stored("tokenizer.ggml.merges") != metadata["tokenizer.ggml.merges"]
        assert from_gguf(metadata, name).encoder is read.encoder  # decoded by now


def test_nfc_for_qwen2(tokenizer):
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("pre", "sample", "pieces"),
    [
        ("qwen2", "a 1234  b\n\nit's", ["a", "Ġ", "1", "2", "3", "4", "Ġ", "Ġb", "ĊĊ", "it", "'s"]),
        ("llama-bpe", "a 1234", ["a", "Ġ", "123", "4"]),
        ("gpt-2", "a 1234!", ["a", "Ġ1234", "!"]),
    ],
)
def test_pre_tokenizers_cut_as_published(models, pre, sample, pieces):
    metadata = dict(open_table(models / "student.gguf").metadata) | {"tokenizer.ggml.pre": pre}
    cut = from_gguf(metadata, "x").encoder.pre_tokenizer.pre_tokenize_str(sample)
    assert [piece for piece, _ in cut] == pieces


def test_texts_open_with_bos_where_the_file_asks(models, tokenizer, tmp_path):
    """Gemma and Llama were trained so: without it Gemma's first positions lose 7 nats."""
    metadata = open_table(models / "student.gguf").metadata
    asked = {"tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.add_bos_token": True}
    opening = from_gguf(dict(metadata) | asked, "x")
    assert tokenizer.opening_id is None and opening.content_hash != tokenizer.content_hash
    assert opening.open_text([8, 9]) == [5, 8, 9] == opening.open_text([5, 8, 9])
    (tmp_path / "a.txt").write_text("one two three four five six seven")
    (tmp_path / "b.txt").write_text("other text")
    sides = dict(patterns=f"{tmp_path}/a.txt", heldout=f"{tmp_path}/b.txt")
    plain = prepare(tmp_path, tokenizer, **sides).train
    opened = prepare(tmp_path, opening, **sides).train
    ids = opening.encode("one two three four five six seven")
    firsts = np.diff(opened.segments, prepend=0).astype(bool) & (opened.segments > 0)
    assert set(opened.tokens[firsts].tolist()) == {5} and 5 not in plain.tokens
    inputs = [i for row, first in zip(opened.tokens, firsts, strict=True) for i in row[~first]]
    assert inputs[: len(ids) + 1] == [*ids, END]  # each id once, as a target
    said = heldout.read_text(f"{tmp_path}/a.txt", opening, rows=9, seq_len=7)
    assert said.rows.tokens[:, 0].tolist() == [5] * len(said.rows)


def test_llama_3_takes_a_piece_that_is_a_token_whole(models):
    """Llama.cpp does so: 588 of Llama 3's tokens are out of their merges' reach."""
    metadata = dict(open_table(models / "student.gguf").metadata)
    values = {"tokens": ["a", "b", "c", "ab", "abc", "<end>"], "token_type": [1] * 5 + [3]}
    values |= {"merges": ["a b"], "eos_token_id": 5}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    ids = {
        pre: from_gguf(metadata | {"tokenizer.ggml.pre": pre}, "x").encode("abc<end>abca")
        for pre in ("llama-bpe", "gpt-2")
    }
    assert ids == {"llama-bpe": [4, 5, 3, 2, 0], "gpt-2": [3, 2, 5, 3, 2, 0]}


_RULE_NAMES = [names.split()[0] for names in pretokenizers._RULES]
_OTHERS = {*_RULE_NAMES} - {"qwen2", "llama-bpe"}
_PARTS = [
    *(
        "the",
        "def",
        "don't",
        "I'LL",
        "snake_case",
        "camelCase",
        "x",
        "naïve",
        "e\u0301a",
        "日本語の",
        "ไทย",
    ),
    *(
        "1",
        "1234567",
        "0x1F",
        "3.14",
        "٣٤",
        "=",
        "!=",
        "->",
        "...",
        '"""',
        "#",
        "<|im_end|>",
        "🐍👩‍💻",
    ),
    *(
        ";\n",
        "):\n",
        "\n\n",
        "\r\n",
        "\t",
        "  ",
        "        ",
        "\n    ",
        "\u3000",
        "a/b\n/c",
        "$",
        "(",
        ").",
    ),
]


def draw_text(seed, words):
    """Words of any kind with one space, or none, between them, on few lines or none."""
    rng = np.random.default_rng(seed)
    parts = _PARTS if seed % 2 else [part for part in _PARTS if "\n" not in part]
    chosen = rng.choice(np.array(parts, object), words)
    return "".join(p + " " * int(s) for p, s in zip(chosen, rng.random(words) < 0.7, strict=True))


def sentencepiece_metadata(prefix):
    """A vocabulary of letters, bytes and some words with the space that begins them."""
    words = ["the", "de", "def", "▁", "▁▁", "▁▁▁▁", "▁t", "▁the", "▁d", "▁x", "▁de", "▁def", "no"]
    letters = sorted(set("".join(_PARTS)) - {" ", "▁"})[:40]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, *words]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    values = {"model": "llama", "tokens": tokens, "token_type": types, "eos_token_id": 2}
    values |= {"scores": [-float(i) for i in range(len(tokens))], "add_space_prefix": prefix}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    "pre", cases("qwen2", "llama-bpe", "llama", slow=[*sorted(_OTHERS), "llama prefix"])
)
def test_long_texts_have_the_ids_of_the_whole(models, monkeypatch, caplog, pre):
    """Every way of cutting text that files name, and SentencePiece, which cuts nothing."""
    metadata = dict(open_table(models / "student.gguf").metadata) | {"tokenizer.ggml.pre": pre}
    if pre.startswith("llama") and pre not in pretokenizers.PRE_TOKENIZERS:
        metadata = sentencepiece_metadata(pre.endswith("prefix"))
    tokenizer = from_gguf(metadata, "x")
    tokenizer = dataclasses.replace(tokenizer, encoder=copy.deepcopy(tokenizer.encoder))
    if pre in pretokenizers.PRE_TOKENIZERS:  # merges of all that a cut leaves together
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=3_000, initial_alphabet=alphabet, show_progress=False, max_token_length=12
        )
        tokenizer.encoder.train_from_iterator([draw_text(i, 3_000) for i in (9, 10)], trainer)
    for name, value in dict(PIECE=300, LONG=600, AROUND=100).items():
        monkeypatch.setattr(long_text, name, value)
    for seed in range(4):
        text = draw_text(seed, 3_000)
        encoded = tokenizer.encoder.encode(text, add_special_tokens=False)
        assert tokenizer.encode_with_offsets(text) == (encoded.ids, encoded.offsets)
    assert not caplog.records


def test_no_more_than_some_pieces_of_a_text_are_encoded_at_a_time(tokenizer, monkeypatch, caplog):
    for name, value in dict(PIECE=1_000, LONG=2_000, AROUND=100, _AT_ONCE=4).items():
        monkeypatch.setattr(long_text, name, value)
    sizes, encode = [], long_text._encode
    monkeypatch.setattr(
        long_text, "_encode", lambda e, t: sizes.append(sum(map(len, t))) or encode(e, t)
    )
    text = "a" * 9_000 + " word" * 9_000
    parts = [ids for ids, _ in long_text.encode_pieces(tokenizer.encoder, text, "x.txt:7")]
    assert max(sizes) <= 4 * 2_200 and len(parts) > 5
    assert tokenizer.decode(np.concatenate(parts).tolist()) == text
    (warning,) = caplog.records
    said = "x.txt:7: found no safe place to cut 2000 characters from character 0 on"
    assert warning.getMessage().startswith(said)


def test_a_text_is_not_cut_where_ids_depend_on_what_is_far_away(monkeypatch, caplog):
    """Merges take x's by two, counted from the first: pieces that overlap would not agree."""
    for name, value in dict(PIECE=300, LONG=600, AROUND=101).items():
        monkeypatch.setattr(long_text, name, value)
    tokens = {"x": 0, " ": 1, "y": 2, "x ": 3, "x x ": 4}
    encoder = Encoder(encoder_models.BPE(tokens, [("x", " "), ("x ", "x ")]))
    for words, warnings in (("y " * 50 + "x " * 2_000, 1), ("y x " * 1_000, 0)):
        caplog.clear()
        ids = np.concatenate([ids for ids, _ in long_text.encode_pieces(encoder, words)])
        assert "".join(encoder.id_to_token(i) for i in ids) == words
        assert len(caplog.records) == warnings


def test_a_long_document_is_packed_as_a_short_one_and_says_how_far_it_is(
    tokenizer, tmp_path, monkeypatch, caplog
):
    (tmp_path / "a.txt").write_text(draw_text(1, 2_000))
    (tmp_path / "b.txt").write_text("a b c")
    sides = dict(patterns=f"{tmp_path}/a.txt", heldout=f"{tmp_path}/b.txt", parse_special=True)
    whole = prepare(tmp_path / "whole", tokenizer, **sides)
    monkeypatch.setattr(rows, "LONG", 1_000)
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    for name, value in dict(PIECE=500, LONG=1_000, AROUND=200, _AT_ONCE=4).items():
        monkeypatch.setattr(long_text, name, value)
    with caplog.at_level("INFO", logger="kdjax"):
        long = prepare(tmp_path / "long", tokenizer, **sides)
    for one, other in zip(whole.train, long.train, strict=True):
        np.testing.assert_array_equal(one, other)
    said = [r.getMessage() for r in caplog.records if "million tokens" in r.getMessage()]
    assert len(said) > 3 and f"{tmp_path}/a.txt: 0.0 million tokens of the text so far" in said


@pytest.mark.skipif("LLAMA_CPP_MODELS" not in os.environ, reason="needs llama.cpp's models/")
def test_ids_of_llama_cpps_vocabularies():
    folder = Path(os.environ["LLAMA_CPP_MODELS"])
    assert vocabularies.main([str(folder)]) == 0
    llama3 = load_tokenizer(folder / "ggml-vocab-llama-bpe.gguf")
    assert llama3.encode("Cửa Việt") == [34, 91163, 101798]


def test_a_gguf_header_may_have_no_types(models, tmp_path):
    metadata = dict(open_table(models / "student.gguf").metadata)
    types = metadata.pop("tokenizer.ggml.token_type")
    write_gguf(tmp_path / "m.gguf", metadata, [("t", "F32", (1,), np.zeros(1, "<f4"))])
    found, wanted = load_tokenizer(tmp_path / "m.gguf"), load_tokenizer(models / "student.gguf")
    assert 3 in types and found.encode("a<|im_end|>b") == wanted.encode("a<|im_end|>b")


def test_strings_of_special_tokens_may_be_ordinary_text(models):
    metadata = dict(open_table(models / "student.gguf").metadata)
    tokens, types = list(metadata["tokenizer.ggml.tokens"])[:305], [1] * 302 + [3] * 3
    tokens, types = [*tokens, "<tool>", "<|fim|>"], [*types, 4, 4]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = from_gguf(metadata, "x")
    sample = "a<|im_end|>\u00e9<tool>b<|fim|>"
    parsed, plain = (tokenizer.encode(sample, parse_special=p) for p in (True, False))
    marks = {tokens.index("<|im_end|>"), 306}
    assert parsed == tokenizer.encode(sample) and marks | {305} < set(parsed)
    assert 305 in plain and not marks & set(plain)  # <tool> is a token, and no mark
    assert tokenizer.decode(plain) == sample and tokenizer.mark_ids == marks | {302, 303, 304}
    assert tokenizer.encode_batch([sample], parse_special=False) == [plain]
    assert tokenizer.encode_with_offsets(sample, parse_special=False)[0] == plain
    counts = tokenizer.count_marks(f"{sample}<|im_end|><|im_end [INST]")
    assert counts == {"<|im_end|>": 2, "<|fim|>": 1}
    template = dataclasses.replace(tokenizer, chat_template="[INST] {{ x[0] }} [/INST]")
    assert template.count_marks("[INST] a[0] [/INST]") == {"[INST]": 1, "[/INST]": 1}


def test_unknown_tokenizers_are_named(models):
    metadata = dict(open_table(models / "student.gguf").metadata)
    with pytest.raises(UserError, match=r"pre-tokenizer 'mystery'.*qwen2, .*tekken"):
        from_gguf(metadata | {"tokenizer.ggml.pre": "mystery"}, "file.gguf")
    del metadata["tokenizer.ggml.tokens"]
    with pytest.raises(UserError, match=r"file.gguf holds no tokenizer"):
        from_gguf(metadata, "file.gguf")


def test_a_hugging_face_folder_gives_the_same_tokenizer(tokenizer, tmp_path):
    special = ["<|im_start|>", "<|endoftext|>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.encoder,
        eos_token="<|im_end|>",
        additional_special_tokens=special,
    )
    fast.chat_template = tokenizer.chat_template
    fast.save_pretrained(tmp_path)
    same = load_tokenizer(tmp_path)
    sample = "def f(self):\n    return <|im_end|> not int"
    assert same.encode(sample) == tokenizer.encode(sample)
    assert same.tokens == tokenizer.tokens and same.merges == tokenizer.merges
    assert same.special_ids == tokenizer.special_ids and same.eos_id == tokenizer.eos_id
    with pytest.raises(UserError, match=r"has no tokenizer.json"):
        load_tokenizer(tmp_path / "..")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": 5}, r"num_attention_heads=5 of its config.json \(ValueError: "),
        ({"num_attention_heads": 0}, r"num_attention_heads=0 of its config.json \(ZeroDiv"),
        ({"rms_norm_eps": "x"}, r"rms_norm_eps='x' of its config.json \(TypeError: Field"),
        ({"num_attention_heads": "x"}, r"num_attention_heads='x' of its .*expected int, got str"),
        ({"id2label": "x"}, r"id2label='x' of its config.json \(AttributeError: "),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters=.*Missing required keys"),
        ({"model_type": []}, r"refuses its config.json \(TypeError: unhashable"),
        ({}, r"refuses its tokenizer files \(TypeError: Special token eos_token"),
    ],
)
def test_what_transformers_refuses_is_named_in_one_line(config, message, tokenizer, tmp_path):
    """Its configs' validators run where a folder's tokenizer is opened, and raise any error."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.encoder, eos_token="<|im_end|>"
    ).save_pretrained(tmp_path)
    shape = {"model_type": "llama", "hidden_size": 72, "num_attention_heads": 4, "head_dim": 18}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert load_tokenizer(tmp_path).tokens == tokenizer.tokens
    (tmp_path / "config.json").write_text(json.dumps(shape | config))
    if not config:
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 3}')
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: Transformers refuses ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 900


@pytest.mark.slow
def test_of_every_field_that_transformers_refuses_the_name_is_found():
    """Each field of each class of config with nine wrong values."""
    from transformers import CONFIG_MAPPING, AutoConfig

    refused, named, tried = 0, 0, set()
    for path in sorted((Path(__file__).parent / "goldens").glob("*/config.json")):
        config = json.loads(path.read_text())
        if config["model_type"] not in CONFIG_MAPPING:
            continue
        wrongs = ("x", -1, [1], {"a": 1}, None, 0, 1.5, True, 3)
        names = {(config["model_type"], name) for name in config.keys() - {"model_type"}} - tried
        tried |= names
        for (_, name), wrong in itertools.product(sorted(names), wrongs):
            try:
                AutoConfig.for_model(**config | {name: wrong})
            except Exception as error:
                found = _find_refused(config | {name: wrong}, str(error.__cause__ or error))
                refused, named = refused + 1, named + ("=" in found)
    assert refused > 1000 and named >= 0.99 * refused


@pytest.mark.skipif("KDJAX_MODELS" not in os.environ, reason="needs the published files")
def test_ids_of_the_published_tokenizer():
    real = load_tokenizer(
        os.path.join(os.environ["KDJAX_MODELS"], "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")
    )
    assert real.vocab_size == 151665
    # From tiktoken with the published ranks and pattern.
    assert real.encode("Hello world 2024\n") == [9707, 1879, 220, 17, 15, 17, 19, 198]
    assert real.encode("<|im_start|>user") == [151644, 872]


def test_marks_in_plain_text_are_text_unless_asked_for(tmp_path, tokenizer, caplog):
    """Counted, warned of, and part of the rows' name; a conversation's are tokens in any case."""
    (tmp_path / "a.py").write_text('END = "<|endoftext|>"\n' * 3)
    (tmp_path / "b.txt").write_text("plain words without marks, held out or not\n" * 3)
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (tmp_path / "c.jsonl").write_text(json.dumps(chat) + "\n")
    end, turn = tokenizer.encode("<|endoftext|>")[0], tokenizer.encode("<|im_start|>")[0]
    keys = set()
    for parse, ends, kind in ((False, 0, "ordinary text"), (True, 3, "special ids")):
        config = Config()
        config.data = DataConfig(train=f"{tmp_path}/a.py,{tmp_path}/c.jsonl", seq_len=64)
        config.data.heldout, config.data.cache_dir = f"{tmp_path}/b.txt", f"{tmp_path}/cache"
        config.data.end_of_document = "<|im_end|>"
        config.data.parse_special = parse
        for _ in range(2):  # made, and then read from the cache
            caplog.clear()
            found = inputs.prepare(config.data, tokenizer)
            # Without a row's first id, which repeats the one before.
            assert np.count_nonzero(found.train.tokens[:, 1:] == end) == ends
            assert np.count_nonzero(found.train.tokens == turn) >= 2
            assert found.info["train"]["marks"] == {"<|endoftext|>": 3}
            assert found.info["heldout"]["marks"] == {}
            (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            assert warning == f"train: plain text holds 3 marks (<|endoftext|> 3), taken as {kind}"
        keys.add(found.key)
    assert len(keys) == 2


def test_marks_of_the_template_in_plain_text_have_their_own_advice(tokenizer, caplog):
    rows.warn_of_marks("train", {"<|im_start|>": 1234, "<|x|>": 2}, tokenizer, False)
    rows.warn_of_marks("heldout", {}, tokenizer, False)
    (record,) = caplog.records
    assert "holds 1,236 marks (<|im_start|> 1,234, <|x|> 2), taken as ordinary" in record.message
    assert "conversations as `messages`" in record.message and "--parse-special" in record.message


# --- documents ----------------------------------------------------------------------------------


KILLED_MAKER = """
import os, sys
from pathlib import Path
from kdjax.data import rows
from kdjax.models.tokenizer import load_tokenizer
rows._check_sides = lambda *_: os.kill(os.getpid(), 9)  # all is written, nothing renamed
tokenizer = load_tokenizer(sys.argv[1])
settings = rows.RowSettings(sys.argv[2], "", tokenizer, 7, 0.5, int(sys.argv[3]), max_segments=32)
rows.prepare_rows(settings, Path(sys.argv[4]))
"""


@pytest.mark.slow
def test_what_killed_makers_of_rows_leave_is_removed(tmp_path, tokenizer, models):
    """By the next one, whose rows are those of a fresh cache; a live maker's folder stays."""
    text, cache = tmp_path / "text", tmp_path / "cache"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n")
    command = [sys.executable, "-c", KILLED_MAKER, str(models / "student.gguf"), str(text)]
    for _ in range(2):
        killed = [*command, str(END), str(cache)]
        ended = subprocess.run(killed, cwd=Path(__file__).parents[1], timeout=60)
        assert ended.returncode == -9
        (left,) = [path for path in cache.iterdir() if path.is_dir()]  # the second removed one
        assert sorted(path.name for path in left.iterdir()) == ["heldout", "train"]
    with rows._make_aside(cache) as alive:
        made = prepare(tmp_path, tokenizer, str(text))
        assert sorted(cache.glob(".making-*")) == [alive, alive.with_suffix(".lock")]
    assert [path.name for path in cache.iterdir()] == [made.key]
    (tmp_path / "other").mkdir()
    prepare(tmp_path / "other", tokenizer, str(text))
    for path in (cache / made.key).rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "other" / path.relative_to(tmp_path)).read_bytes()


def test_files_of_patterns(tmp_path):
    for name in ("b.py", "a.txt", "skip.bin", ".hidden/c.py", "__pycache__/d.py", "sub/e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [p.name for p in sources.find_files(str(tmp_path))]
    assert names == ["a.txt", "b.py", "e.jsonl"]
    both = sources.find_files(f"{tmp_path}/*.py, {tmp_path}/sub,{tmp_path}/b.py")
    assert [p.name for p in both] == ["b.py", "e.jsonl"]
    assert [p.name for p in sources.find_files(str(tmp_path / "skip.bin"))] == ["skip.bin"]
    with pytest.raises(MissingFileError, match=r"nothing/\*\.py: no file found"):
        sources.find_files(f"{tmp_path}/nothing/*.py")


def test_dead_links_empty_files_and_nul_bytes_are_named(tokenizer, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("one two\0three\0")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    (tmp_path / "good.txt").symlink_to(tmp_path / "a.txt")
    for again, pattern in enumerate((f"{tmp_path}", f"{tmp_path}/*")):
        caplog.clear()
        files = sources.find_files(pattern)
        assert [d.source for d in text.documents(files, tokenizer)] == [
            f"{tmp_path}/a.txt",
            f"{tmp_path}/good.txt",
        ]
        said = [
            f"{tmp_path}/gone.txt: a link to nothing, left out",  # once a process
            f"{tmp_path}/b.txt: no text there, left out",
            f"{tmp_path}/a.txt, {tmp_path}/good.txt: found NUL bytes, which are kept as text",
        ]
        assert [record.getMessage() for record in caplog.records] == said[again:]
    with pytest.raises(
        MissingFileError, match=r"no file found but links to nothing \(.*gone.txt\)"
    ):
        sources.find_files(f"{tmp_path}/gone.txt")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Where packages `alpha` and `beta` are installed, and how to have them elsewhere."""

    def install(*folders):
        for name, folder in zip(("alpha", "beta"), folders, strict=True):
            files = {"__init__": "raise SystemExit('imported')", "z": "z = 1", "sub/a": "a = 2"}
            files |= {"tests/t": "t = 1", "empty": " \n", "table": "x" * 200_001}
            for file, content in files.items():
                path = tmp_path / folder / name / f"{file}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{content}  # {name}" if content.strip() else content)
            (tmp_path / folder / name / "latin.py").write_bytes(b"# \xe9")
            (tmp_path / folder / name / "notes.txt").write_text("no source")
        monkeypatch.setattr(sys, "path", [str(tmp_path / f) for f in folders] + sys.path)
        return [tmp_path / f for f in folders]

    return install


def test_packages_are_text(packages, tmp_path):
    site, _ = packages("site", "site")
    (site / "one.py").write_text("one = 1\n")
    names = ["__init__.py", "sub/a.py", "z.py"]
    beta, alpha = ([site / package / name for name in names] for package in ("beta", "alpha"))
    assert sources.find_files("python:beta,alpha") == beta + alpha  # in the order given
    assert sources.find_files("python:one, python:alpha,one") == [site / "one.py", *alpha]
    (tmp_path / "a.txt").write_text("x")
    assert sources.find_files(f"{tmp_path}/*.txt,python:alpha") == [tmp_path / "a.txt", *alpha]
    # A folder comes before the file of its name; a link to nothing is no file.
    (site / "alpha" / "sub.py").write_text("sub = 1")
    (site / "alpha" / "y.py").symlink_to(site / "gone.py")
    (site / "alpha" / "z.py").write_text(" " * 9)  # was text when it was read before
    assert sources.find_files("python:alpha") == [*alpha[:2], site / "alpha" / "sub.py"]


@pytest.mark.slow
def test_the_standard_library_is_text_without_tests_and_packages_of_others():
    files = sources.find_files("python:stdlib")
    root = Path(json.__file__).parents[1]
    inside = [path.relative_to(root).parts for path in files]
    assert {("argparse.py",), ("json", "decoder.py")} <= set(inside)
    assert len(files) > 400 and inside == sorted(inside)
    assert not {"test", "site-packages", "dist-packages"} & {parts[0] for parts in inside}
    assert set(sources.find_files("python:json")) < set(files)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("python:no_such_package", "python:no_such_package: found no installed package"),
        ("python:jaxx", r"Did you mean python:jax\?"),
        ("python:json.decoder", "python:json.decoder: found no installed package"),
        ("python:_json", "python:_json: found the package, but no Python source"),
        ("python:jax,corpus/train", "python:corpus/train: .* come before python:"),
        ("python:", "no text was named"),
    ],
)
def test_packages_that_are_not_there_are_named(patterns, message):
    with pytest.raises(MissingFileError, match=message):
        sources.find_files(patterns)


def test_rows_of_packages_do_not_depend_on_where_they_lie(tokenizer, tmp_path, packages):
    keys, order = set(), set()
    for folders in (("a", "b"), ("d", "c")):  # by path alone, beta would come first in the second
        assert packages(*folders)
        importlib.invalidate_caches()
        made = prepare(tmp_path, tokenizer, "python:alpha,beta", heldout="python:beta")
        keys.add(made.key)
        order.add(made.train.tokens.tobytes())
        # All of beta is held out, although it is named for training too.
        assert [made.info[side]["documents"] for side in ("train", "heldout")] == [3, 3]
    assert len(keys) == len(order) == 1


def test_versions_of_packages(monkeypatch):
    import jax

    versions = package_versions(["stdlib", "json", "jax", "orbax"])
    python = ".".join(map(str, sys.version_info[:3]))
    assert versions["stdlib"] == versions["json"] == python
    assert versions["jax"] == jax.__version__
    assert versions["orbax"] == importlib.metadata.version("orbax-checkpoint")
    whole = importlib.metadata.packages_distributions
    monkeypatch.setattr(importlib.metadata, "packages_distributions", None)  # 0.6 s of a start
    assert package_versions(["jax", "numpy"])["jax"] == jax.__version__
    monkeypatch.setattr(importlib.metadata, "packages_distributions", whole)


def test_a_namespace_has_the_versions_of_all_its_distributions(tmp_path, monkeypatch):
    """One of them has the namespace's name."""
    for name, version, file in (("shared", 1, "shared/one.py"), ("other", 2, "shared/two.py")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (folder / "RECORD").write_text(f"{file},,\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed._distributions.cache_clear()
    assert package_versions(["shared"]) == {"shared": "2, 1"}
    installed._distributions.cache_clear()


def chat(*turns):
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]


def test_only_the_assistant_carries_loss(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": chat("hi", "one", "more", "two")}) + "\n")
    (document,) = text.documents([path], tokenizer)
    assert [document.text[a:b] for a, b in document.trained] == ["one<|im_end|>", "two<|im_end|>"]
    assert document.source == f"{path}:1" and not document.open


def test_of_a_prompt_and_its_completion_the_completion_carries_loss(tokenizer, tmp_path):
    """Marks in it are text; the end of the document is trained, as of any text."""
    record = {"prompt": "def f(x):\n", "completion": "    return '<|im_end|>'\n"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    pq.write_table(pa.table({k: [v] for k, v in record.items()}), tmp_path / "b.parquet")
    both = list(text.documents(sources.find_files(str(tmp_path)), tokenizer))
    for _, ids, mask in rows.tokenize_documents(both, tokenizer, tokenizer.end_of_text_id):
        trained = mask.astype(bool)
        assert tokenizer.decode(ids[~trained].tolist()) == record["prompt"]
        assert tokenizer.decode(ids[trained][:-1].tolist()) == record["completion"]
        assert ids[-1] == tokenizer.end_of_text_id and tokenizer.eos_id not in ids[:-1]
    assert [d.source[len(str(tmp_path)) :] for d in both] == ["/a.jsonl:1", "/b.parquet:1"]
    held = heldout.read_text(str(tmp_path), tokenizer, rows=4, seq_len=64)
    assert held.rows.mask.sum() == 2 * trained.sum()


def test_conversations_are_encoded_together_as_each_alone(tokenizer, tmp_path, monkeypatch):
    """One by one, they take one core of many: two minutes for 39 million tokens."""
    for name, value in dict(PIECE=300, LONG=600, AROUND=100).items():
        monkeypatch.setattr(long_text, name, value)
    answers = ["one", "two " * 9, "a long one of many words " * 40, "é<|im_end|>"]
    records = [{"messages": chat(f"{i}?", a)} for i, a in enumerate(answers)]
    records += [{"prompt": "x = ", "completion": "1"}, {"text": "plain"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    found = list(text.documents([path], tokenizer))
    alone = [next(rows.tokenize_documents([d], tokenizer, 7)) for d in found]
    encode, sizes = long_text._encode, []
    monkeypatch.setattr(long_text, "_encode", lambda e, t: (sizes.append(len(t)), encode(e, t))[1])
    together = list(rows.tokenize_documents(found, tokenizer, 7))
    assert sizes[:2] == [1, 3], "the completion, the conversations that are not long"
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(one[2], other[2])
    assert [bool(mask.all()) for *_, mask in together] == [False] * 5 + [True]


def test_json_lines_and_parquet(tokenizer, tmp_path):
    separator = "a\u2028b"  # a line separator inside a string is not a line end
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': separator}, ensure_ascii=False)}\n\n")
    pq.write_table(pa.table({"text": ["first", " ", "third"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"messages": [chat("q", "a")]}), tmp_path / "c.parquet")
    found = list(text.documents(sources.find_files(str(tmp_path)), tokenizer))
    assert [d.text for d in found][:3] == [separator, "first", "third"]
    assert found[2].source.endswith("b.parquet:3") and found[3].trained


def test_parquet_has_what_stands_beside_a_prompt(tokenizer, tmp_path):
    """Columns say what a line of JSON says: both give the same prompts."""
    asked = [{"role": "user", "content": "Add."}]
    for name, record in (("a", {"messages": asked, "opening": "def "}), ("b", {"prompt": "x = "})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record))
        columns = {key: [value] for key, value in record.items()}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    chats, beginnings = (
        list(text.openings(sorted(tmp_path.glob(f"{name}.*")), tokenizer)) for name in ("a", "b")
    )
    assert chats[0] == chats[1] and chats[0].opening == "def "
    assert beginnings[0] == beginnings[1] == text.Opening("x = ")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": ["hello"]}, "message 0 must be an object"),
        ({"messages": chat("q"), "opening": ["def "]}, r"found \['def '\] as the opening"),
        ({"prompt": 3}, "found 3 as prompt; expected a string"),
        ({"response": "x", "prompt": None}, "found None as prompt; expected a string"),
    ],
)
def test_a_prompt_of_another_kind_is_refused_by_its_line(tokenizer, tmp_path, record, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"a.jsonl:1: .*{message}"):
        list(text.openings([path], tokenizer))


def test_a_folder_that_cannot_be_listed_is_no_folder_without_text(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.py").write_text("x = 1")
    listed = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="locked"):
        sources.find_files(str(tmp_path))


def test_parquet_without_pyarrow_names_the_extra(tokenizer, tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'kdjax\[parquet\]'"):
        list(text.documents([tmp_path / "a.parquet"], tokenizer))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a.jsonl:2: not JSON \(.* at column"),
        ("a.jsonl", b'{"txt": "x"}', r"a.jsonl:1: expected .* found \['txt'\]"),
        ("a.jsonl", b'{"text": 3}', r"a.jsonl:1: found 3 as text; expected a string"),
        ("a.jsonl", b'{"messages": "x"}', r"a.jsonl:1: found 'x' as messages; expected a list"),
        ("a.jsonl", b'{"prompt": "x"}', r"a.jsonl:1: expected .*completion.* found \['prompt'\]"),
        ("a.jsonl", b"[1]", r"a.jsonl:1: expected .* found list"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "assistant", "content": "x"}]}',
            r"a.jsonl:1: a conversation cannot start with the assistant",
        ),
        (
            "a.jsonl",
            b'{"messages": [{"role": "user", "content": "x"}]}',
            r"a.jsonl:1: no message of the assistant",
        ),
        ("a.jsonl", b'{"messages": ["x"]}', r"a.jsonl:1: message 0 must be an object"),
        (
            "a.jsonl",
            b'{"text": "\\ud83d\\ude00 \\ud83d"}',
            r"a.jsonl:1: found '.ud83d', half of",
        ),
        ("a.jsonl", b'{"text": ' + b"1" * 5000, r"a.jsonl:1: not JSON \(.*integer string"),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl:1: not JSON \(.*recursion"),
        ("a.py", b"ok\nfine\n\xff", r"a.py:3: byte 8 \(0xff\) is not UTF-8"),
        ("a.parquet", b"PAR1 not really", r"a.parquet: not a readable Parquet file"),
        ("a.py", b"  \n", r"a.py: the text is empty"),
    ],
)
def test_bad_input_names_file_and_line_and_writes_nothing(
    tokenizer, tmp_path, name, content, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, tokenizer, str(tmp_path / name))
    assert not list(tmp_path.glob("cache/*"))


def test_parquet_without_a_column_and_tokenizer_without_a_template(tokenizer, tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"expected columns of .*; found body"):
        list(text.documents([tmp_path / "a.parquet"], tokenizer))
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"messages": chat("q", "a")}))
    plain = dataclasses.replace(tokenizer, chat_template=None)
    with pytest.raises(UserError, match=r"b.jsonl:1: the tokenizer has no chat template"):
        list(text.documents([path], plain))


# --- rows ---------------------------------------------------------------------------------------


def pack(folder, documents, length=8, most=32):
    writer = rows._SideWriter(folder / "side", length, most)
    for ids in documents:
        writer.add(np.asarray(ids, np.uint32), np.ones(len(ids), np.uint8))
    writer.finish()
    writer.close()
    return rows._open_side(folder / "side", writer.counts["rows"], length)


def test_packing_by_hand(tmp_path):
    packed = pack(tmp_path, [[1, 2, 3], [4], list(range(10, 22)), [5, 6]])
    # [4] has no target. The long one is cut after 14; the next row repeats 14 as its first input.
    np.testing.assert_array_equal(
        packed.tokens,
        [[1, 2, 3, 10, 11, 12, 13, 14], [14, 15, 16, 17, 18, 19, 20, 21], [5, 6, 0, 0, 0, 0, 0, 0]],
    )
    np.testing.assert_array_equal(
        packed.segments, [[1, 1, 1, 2, 2, 2, 2, 2], [1] * 8, [1, 1, 0, 0, 0, 0, 0, 0]]
    )


def test_a_row_closes_at_the_most_segments(tmp_path):
    packed = pack(tmp_path, [[1, 2], [3, 4], [5, 6]], most=2)
    np.testing.assert_array_equal(packed.tokens[:, :4], [[1, 2, 3, 4], [5, 6, 0, 0]])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), most=st.integers(1, 5))
def test_every_id_but_a_documents_first_is_a_target_once(tmp_path_factory, lengths, most):
    start, documents = 1, []
    for n in (*lengths, 2):
        documents.append(list(range(start, start + n)))
        start += n
    packed = pack(tmp_path_factory.mktemp("pack"), documents, 8, most)
    targets = []
    for i in range(len(packed)):
        one = pipeline.example(packed, i)
        on = one["weights"] > 0
        targets += list(one["labels"][on])
        np.testing.assert_array_equal(one["labels"][on], one["tokens"][on] + 1)
        assert not np.any(on & (one["segment_ids"] == 0))
    assert targets == [t for d in documents if len(d) > 1 for t in d[1:]]


def test_examples_by_hand():
    packed = rows.Rows(
        np.array([[7, 8, 9, 4, 5, 0]], np.uint32),
        np.array([[1, 1, 1, 2, 2, 0]], np.uint16),
        np.array([[0, 0, 1, 1, 1, 0]], np.uint8),
    )
    one = pipeline.example(packed, 0)
    np.testing.assert_array_equal(one["tokens"], [7, 8, 9, 4, 5])
    np.testing.assert_array_equal(one["labels"], [8, 9, 4, 5, 0])
    np.testing.assert_array_equal(one["positions"], [0, 1, 2, 0, 1])
    # 8 carries no loss; 4 follows another document; the last has no target.
    np.testing.assert_array_equal(one["weights"], [0, 1, 0, 1, 0])


def test_chat_trains_the_first_and_the_end_token_and_nothing_after(tokenizer, tmp_path):
    lines = [json.dumps({"messages": chat(f"q{i}", "ab")}) for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    made = prepare(tmp_path, tokenizer, str(tmp_path), seq_len=60)
    one = pipeline.example(made.train, 0)
    trained = one["labels"][one["weights"] > 0]
    turn = [*tokenizer.encode("ab"), tokenizer.eos_id]
    np.testing.assert_array_equal(trained[: 2 * len(turn)], turn * 2)
    assert END not in one["tokens"]  # a conversation ends as its template ends it


def write_documents(folder, count, word="w"):
    folder.mkdir(exist_ok=True)
    for i in range(count):
        (folder / f"{i:03}.py").write_text(f"{word}{i} = {i}\n" * 3)


def words(side):
    return {t.tobytes() for t in side.tokens}


def test_text_documents_end_with_the_end_token(tokenizer, tmp_path):
    write_documents(tmp_path / "t", 8)
    made = prepare(tmp_path, tokenizer, str(tmp_path / "t"))
    tokens = np.concatenate([made.train.tokens.ravel(), made.heldout.tokens.ravel()])
    assert (tokens == END).sum() == 8


def test_copies_land_on_one_side_and_others_do_not_move_them(tokenizer, tmp_path):
    folder = tmp_path / "t"
    write_documents(folder, 20)
    for i in range(20):
        (folder / f"z{i:03}.py").write_text((folder / f"{i:03}.py").read_text())
    digests = {}
    for i, document in enumerate(text.documents(sources.find_files(str(folder)), tokenizer)):
        digests[i] = rows._is_heldout(document.digest(), 0.5)
    assert [digests[i] for i in range(20)] == [digests[20 + i] for i in range(20)]
    made = prepare(tmp_path, tokenizer, str(folder), seq_len=60)
    assert 5 < made.info["heldout"]["documents"] / 2 < 15
    total = sum(made.info[side]["documents"] for side in ("train", "heldout"))
    assert total == 40


def test_explicit_heldout_takes_its_copies_out_of_training(tokenizer, tmp_path):
    write_documents(tmp_path / "t", 6)
    write_documents(tmp_path / "h", 2)  # the same two texts as in t
    made = prepare(tmp_path, tokenizer, str(tmp_path / "t"), heldout=str(tmp_path / "h"))
    assert (made.info["train"]["documents"], made.info["heldout"]["documents"]) == (4, 2)
    with pytest.raises(UserError, match=r"no document is left for train out of 6.*also in"):
        prepare(tmp_path, tokenizer, str(tmp_path / "t"), heldout=str(tmp_path / "t"))


@pytest.mark.parametrize("content", ["", " \n\t\n", "\N{NO-BREAK SPACE}\n"])
def test_text_of_white_space_alone_is_called_so(tokenizer, tmp_path, content):
    write_documents(tmp_path / "h", 2)
    blank = tmp_path / "blank.txt"
    blank.write_text(content)
    with pytest.raises(UserError, match=r"left for train out of 2: data.train holds no text"):
        prepare(tmp_path, tokenizer, str(blank), heldout=str(tmp_path / "h"))
    with pytest.raises(UserError, match=r"left for heldout out of 2: data.heldout holds no text"):
        prepare(tmp_path, tokenizer, str(tmp_path / "h"), heldout=str(blank))
    with pytest.raises(UserError, match="the text is empty"):
        prepare(tmp_path, tokenizer, str(blank))


def test_one_sided_split_is_refused(tokenizer, tmp_path):
    write_documents(tmp_path / "t", 3)
    said = r"heldout out of 3: add documents \(459 nearly always .*; shrink: --text\), name others"
    with pytest.raises(UserError, match=said):  # 0.99 ** 459 = 0.0099
        prepare(tmp_path, tokenizer, str(tmp_path / "t"), heldout_fraction=0.01)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("train", "heldout", "fraction", "message"),
    [
        ("t", "", 1e-9, "no document is left for heldout out of 6: add documents"),
        ("t", "", 1 - 1e-9, "no document is left for train out of 6: add documents"),
        ("t", "t", 0.5, r"no document is left for train out of 6: all of data.train \(--text\) is"),
        ("blank", "t", 0.5, "no document is left for train out of 6: data.train holds no text"),
        ("blank", "", 0.5, "the text is empty"),
    ],
)
def test_a_split_is_refused_before_anything_is_encoded(
    tokenizer, tmp_path, monkeypatch, train, heldout, fraction, message
):
    """In the very words of the run that reads all of the text."""
    write_documents(tmp_path / "t", 6)
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text(" ")
    sides = {"heldout": heldout and str(tmp_path / heldout), "heldout_fraction": fraction}
    asked = settings_of(tokenizer, str(tmp_path / train), **sides)
    with pytest.raises(UserError, match=message) as late:
        rows.prepare_rows(asked, tmp_path / "cache")
    monkeypatch.setattr(rows, "tokenize_documents", lambda *_, **__: pytest.fail("encodes"))
    with pytest.raises(UserError) as early:
        rows.check_split(asked)
    assert str(early.value) == str(late.value)


def test_a_split_is_looked_for_no_further_than_it_takes(tokenizer, tmp_path, monkeypatch):
    write_documents(tmp_path / "t", 40)
    read, real = [], rows.documents

    def count(files, *others):
        for document in real(files, *others):
            read.append(document)
            yield document

    monkeypatch.setattr(rows, "documents", count)
    rows.check_split(settings_of(tokenizer, str(tmp_path / "t"), heldout_fraction=0.5))
    assert 2 <= len(read) < 20


def test_cache_is_by_content(tokenizer, tmp_path, monkeypatch):
    write_documents(tmp_path / "t", 8)
    first = prepare(tmp_path, tokenizer, str(tmp_path / "t"))
    calls = []
    real = rows._pack_sides
    monkeypatch.setattr(rows, "_pack_sides", lambda *args: calls.append(1) or real(*args))
    assert prepare(tmp_path, tokenizer, str(tmp_path / "t")).key == first.key and not calls
    keys = {first.key}
    for change in (
        dict(seq_len=9),
        dict(max_segments=3),
        dict(end_of_document_id=5),
        dict(heldout_fraction=0.4),
    ):
        keys.add(prepare(tmp_path, tokenizer, str(tmp_path / "t"), **change).key)
    (tmp_path / "t" / "000.py").write_text("changed\n")
    keys.add(prepare(tmp_path, tokenizer, str(tmp_path / "t")).key)
    assert len(keys) == 6 and len(calls) == 5


def test_a_broken_cache_is_made_again_and_a_failed_one_leaves_nothing(
    tokenizer, tmp_path, monkeypatch
):
    write_documents(tmp_path / "t", 8)
    first = prepare(tmp_path, tokenizer, str(tmp_path / "t"))
    before = np.array(first.train.tokens)
    column = tmp_path / "cache" / first.key / "train" / "tokens.bin"
    column.write_bytes(column.read_bytes()[:-4])
    np.testing.assert_array_equal(
        prepare(tmp_path, tokenizer, str(tmp_path / "t")).train.tokens, before
    )

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(rows.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare(tmp_path, tokenizer, str(tmp_path / "t"), seq_len=11)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.key]


# --- batches ------------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path):
    return pack(tmp_path, [[100 * i + j for j in range(8)] for i in range(1, 13)])


def take(source, n):
    return [source.next()["row_ids"] for _ in range(n)]


@pytest.mark.parametrize("size", [1, 4])
def test_each_epoch_has_every_row_once_in_another_order(packed, size):
    epochs = np.concatenate(take(pipeline.TextSource(packed, batch_size=size, seed=0), 24 // size))
    first, second = epochs[:12], epochs[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert list(first) != list(second) and list(first) != list(range(12))


def test_batches_have_the_promised_types(packed):
    batch = pipeline.TextSource(packed, batch_size=4, seed=0).next()
    assert all(batch[k].shape == (4, 7) for k in batch if k != "row_ids")
    assert batch["weights"].dtype == np.float32
    assert all(batch[k].dtype == np.int32 for k in ("tokens", "labels", "segment_ids", "positions"))


def test_a_restored_source_continues_with_the_next_batch(packed):
    source = pipeline.TextSource(packed, batch_size=4, seed=3)
    take(source, 4)
    state = json.loads(json.dumps(source.get_state()))
    rest = take(source, 5)
    fresh = pipeline.TextSource(packed, batch_size=4, seed=3)
    fresh.set_state(state)
    np.testing.assert_array_equal(take(fresh, 5), rest)
    other = pipeline.TextSource(packed, batch_size=4, seed=4)
    other.set_state(state)
    assert np.any(np.array(take(other, 5)) != np.array(rest))


@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_processes_sees_the_same_rows_and_position(packed, count):
    whole = pipeline.TextSource(packed, batch_size=4, seed=0)
    first = take(whole, 2)
    state = whole.get_state()
    parts = []
    for index in range(count):
        part = pipeline.TextSource(
            packed, batch_size=4, seed=0, process_index=index, process_count=count
        )
        assert [len(ids) for ids in take(part, 2)] == [4 // count] * 2
        assert part.get_state() == state
        fresh = pipeline.TextSource(
            packed, batch_size=4, seed=0, process_index=index, process_count=count
        )
        parts.append(take(fresh, 2))
    for step in range(2):
        np.testing.assert_array_equal(np.concatenate([p[step] for p in parts]), first[step])


def test_eval_batches_are_even_padded_and_the_same_for_processes(packed):
    batches = list(pipeline.eval_batches(packed, batch_size=4, limit=6))
    ids = np.concatenate([b["row_ids"] for b in batches])
    np.testing.assert_array_equal(ids, [0, 2, 4, 6, 8, 11, -1, -1])
    assert not batches[1]["weights"][2:].any() and batches[1]["weights"][:2].any()
    split = [
        list(pipeline.eval_batches(packed, batch_size=4, limit=6, process_index=i, process_count=2))
        for i in range(2)
    ]
    for whole, *halves in zip(batches, *split, strict=True):
        together = np.concatenate([half["row_ids"] for half in halves])
        np.testing.assert_array_equal(together, whole["row_ids"])
    everything = pipeline.eval_batches(packed, batch_size=5, limit=None)
    assert sum((b["row_ids"] >= 0).sum() for b in everything) == 12


def numbered(count, length=4):
    ids = np.arange(count * length, dtype=np.uint32).reshape(count, length)
    return Rows(ids, np.ones_like(ids, np.uint16), np.ones_like(ids, np.uint8))


def test_resumed_at_any_position_the_data_go_on():
    """After each of 0 to 12 batches, over two epochs."""

    def batches():
        return pipeline.TextSource(numbered(12), batch_size=2, seed=5)

    iterator, states, seen = batches(), [], []
    for _ in range(12 + 1):
        states.append(iterator.get_state())
        seen.append(list(iterator.next()["row_ids"]))
    assert sorted(itertools.chain(*seen[:6])) == list(range(12))
    for position, state in enumerate(states):
        resumed = batches()
        resumed.set_state(state)
        assert list(resumed.next()["row_ids"]) == seen[position]
