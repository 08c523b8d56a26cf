"""Tokenizers of GGUF files: llama.cpp's ids, SentencePiece's spaces and bytes, files made of them.

`goldens/vocabularies.json` holds what the texts of llama.cpp's own tests need of each vocabulary,
and the ids that it expects: `python -m scripts.checks.vocabularies llama.cpp/models --extract`.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import generate_merges

import kdjax
from kdjax.errors import UserError
from kdjax.evaluation.health.detectors import tokenizer_order, tokenizer_round_trip
from kdjax.export import vocabulary
from kdjax.export.formats import check_gguf_tokenizer
from kdjax.export.vocabulary import compare_tokenizers
from kdjax.models.encoders import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    rank_by_score,
)
from kdjax.models.pretokenizers import PRE_TOKENIZERS, name_of
from kdjax.models.tokenizer import TokenizerFiles, from_gguf, load_tokenizer, opens_with_bos
from kdjax.training.pair import align

EXTRACTS = json.loads((Path(__file__).parent / "goldens" / "vocabularies.json").read_text())
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}"
)


def sentencepiece(**changes):
    """A vocabulary in SentencePiece's manner, with Gemma's special tokens."""
    words = ["▁", "t", "h", "e", "c", "a", "at", "th", "▁c", "▁th", "▁the", "▁cat", "▁▁", "▁▁▁"]
    typed = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    typed += [("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL), ("</s>", USER_DEFINED)]
    typed += [("    ", USER_DEFINED), ("\n\n", USER_DEFINED)]
    typed += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)] + [(w, NORMAL) for w in words]
    scores = [0.0] * (len(typed) - len(words)) + [-float(i) for i in range(len(words))]
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": [token for token, _ in typed],
        "token_type": [kind for _, kind in typed],
        "scores": scores,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
    } | changes
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return values | {"tokenizer.chat_template": TEMPLATE}


def said(tokenizer, text, **settings):
    return [tokenizer.tokens[i] for i in tokenizer.encode(text, **settings)]


@pytest.mark.parametrize("name", EXTRACTS)
def test_ids_are_those_that_llama_cpp_expects(name):
    assert len(EXTRACTS) == 14 and len(EXTRACTS[name]["texts"]) >= 43
    tokenizer = from_gguf(EXTRACTS[name]["values"], name)
    texts, ids = zip(*EXTRACTS[name]["texts"], strict=True)
    for text, expected in zip(texts, ids, strict=True):
        assert tokenizer.encode(text, parse_special=False) == expected, text


@pytest.mark.parametrize("name", EXTRACTS)
def test_texts_come_back_from_their_ids(name):
    tokenizer = from_gguf(EXTRACTS[name]["values"], name)
    for text, ids in EXTRACTS[name]["texts"]:
        assert tokenizer.decode(ids, start=True) == text
        half = max(len(ids) // 2, 1)
        parts = tokenizer.decode(ids[:half], start=True), tokenizer.decode(ids[half:])
        # What goes on keeps its space; a character may lie in both parts.
        assert "".join(parts) == text or "\ufffd" in "".join(parts)


def test_every_name_has_a_rule_that_is_found_again():
    values = EXTRACTS["qwen2"]["values"]
    for name, rule in PRE_TOKENIZERS.items():
        encoder = from_gguf(values | {"tokenizer.ggml.pre": name}, "x").encoder
        found = name_of(json.loads(encoder.to_str()))
        assert PRE_TOKENIZERS[found or ""]._replace(bos=rule.bos) == rule, name


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 1234  b", "a Ġ 1 2 3 4 Ġ Ġb"),
        ("deepseek-r1-qwen", "it's 12", "it 's Ġ 1 2"),
        ("deepseek-coder", "a b, 12", "a Ġb , Ġ 1 2"),
        ("falcon", "x==1234", "x == 123 4"),
        ("gpt-4o", "helloWorld DON'T 1234", "hello World ĠDON'T Ġ 123 4"),
        ("tekken", "helloWorld 12", "hello World Ġ 1 2"),
        ("tiny_aya", "1234567", "1 234 567"),
        ("bloom", "a, b 12", "a , Ġb Ġ12"),
    ],
)
def test_rules_cut_as_their_models_do(pre, text, pieces):
    values = EXTRACTS["qwen2"]["values"] | {"tokenizer.ggml.pre": pre}
    cut = from_gguf(values, "x").encoder.pre_tokenizer
    assert cut and [piece for piece, _ in cut.pre_tokenize_str(text)] == pieces.split()


def test_published_ways_to_describe_a_cut_have_names():
    """SmolLM's tokenizer.json names steps where GGUF files have expressions."""
    steps = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "use_regex": True},
    ]
    described = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": {}}
    assert name_of(described | {"normalizer": None}) == "smollm"
    assert name_of(described | {"normalizer": {"type": "NFC"}}) == "command-r"
    assert name_of(described | {"normalizer": None, "model": {"ignore_merges": True}}) is None


@pytest.mark.parametrize("name", ["llama-spm", "tiny"])
def test_scores_become_the_merges_that_transformers_makes(name):
    values = sentencepiece() if name == "tiny" else EXTRACTS[name]["values"]
    tokens, types, scores = (
        values[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores")
    )
    ids = {token: i for i, token in enumerate(tokens)}
    skipped = {t for t, kind in zip(tokens, types, strict=True) if kind in (2, 3, 4)}
    theirs = generate_merges(ids, dict(zip(tokens, scores, strict=True)), skipped)
    assert theirs and rank_by_score(tokens, types, scores) == theirs


def test_sentencepiece_marks_spaces_and_falls_back_to_bytes():
    tokenizer = from_gguf(sentencepiece(), "x")
    assert said(tokenizer, "the cat") == ["▁the", "▁cat"]
    assert said(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    # A space before each text, those after special tokens too, as llama.cpp puts it.
    assert said(tokenizer, "the<bos>the") == ["▁the", "<bos>", "▁the"]
    assert "<bos>" not in said(tokenizer, "<bos>the", parse_special=False)
    # User-defined tokens are looked for first, and spelled as merges would.
    assert said(tokenizer, "the    cat\n\n") == ["▁the", "▁▁▁▁", "▁cat", "\n\n"]
    plain = from_gguf(sentencepiece(add_space_prefix=False), "x")
    assert said(plain, "the cat") == ["th", "e", "▁cat"]
    assert plain.decode(plain.encode("the cat")) == "the cat"


def test_only_the_start_of_a_text_loses_its_space():
    tokenizer = from_gguf(sentencepiece(), "x")
    ids = tokenizer.encode("the cat é")
    assert tokenizer.decode(ids, start=True) == "the cat é"
    assert tokenizer.decode(ids[1:]) == " cat é"
    for healthy in (EXTRACTS["llama-spm"]["values"], sentencepiece(add_space_prefix=False)):
        assert tokenizer_order(from_gguf(healthy, "x")) is None
    assert tokenizer_round_trip(from_gguf(healthy, "x")) is None


def test_bytes_marks_and_ends_of_sentencepiece():
    tokenizer = from_gguf(sentencepiece(), "x")
    sizes = tokenizer.token_bytes
    assert sizes is not None
    expected = {"▁the": 4, "<0xC3>": 1, "<bos>": 0, "▁▁▁▁": 4, "</s>": 4}
    assert {t: int(sizes[tokenizer.tokens.index(t)]) for t in expected} == expected
    # In Gemma's vocabulary </s> is HTML.
    assert tokenizer.tokens[tokenizer.end_of_text_id] == "<eos>"
    assert [tokenizer.tokens[i] for i in tokenizer.stop_ids] == ["<eos>", "<end_of_turn>"]
    rendered = tokenizer.render([{"role": "user", "content": "the cat"}])
    assert rendered.startswith("<bos><start_of_turn>user\nthe cat<end_of_turn>")
    assert {2, 4, 5} < set(tokenizer.encode(rendered))


@pytest.mark.parametrize(("eos", "ends"), [(1, [1, 5]), (5, [5, 1]), (400, [1, 5])])
def test_a_written_folder_stops_where_an_answer_ends(tmp_path, eos, ends):
    """At the end that the file names first; 400 is no token but a padding row."""
    values = sentencepiece(eos_token_id=eos)
    values["tokenizer.ggml.tokens"] += [f"[PAD{i}]" for i in range(200)]
    values["tokenizer.ggml.token_type"] += [UNUSED] * 200
    values["tokenizer.ggml.scores"] += [0.0] * 200
    config = vocabulary.generation_config(from_gguf(values, "x"), TokenizerFiles(None, values))
    assert config["eos_token_id"] == ends
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(UserError, match=r"generation_config\.json"):
        vocabulary.generation_config(from_gguf(values, "x"), TokenizerFiles(tmp_path, {}))


def test_answers_end_where_a_file_says_so(tmp_path):
    """By GGUF's key for the end of a turn, and by generation_config.json; 4 has no known name."""
    source = from_gguf(sentencepiece(eot_token_id=4), "x")
    assert source.stop_ids == (1, 4, 5)
    assert source.content_hash == from_gguf(sentencepiece(), "x").content_hash
    vocabulary.write_hf(source, TokenizerFiles(None, {}), tmp_path, 64)
    for said, ends in (([4, 1, 10**6], (1, 4, 5)), (4, (1, 4, 5)), (None, (1, 5))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
        assert load_tokenizer(tmp_path).stop_ids == ends


def test_a_file_that_does_not_say_opens_texts_as_its_kind_does():
    values = sentencepiece()
    assert opens_with_bos(values)
    assert not opens_with_bos(values | {"tokenizer.ggml.add_bos_token": False})
    bpe = EXTRACTS["llama-bpe"]["values"]
    assert opens_with_bos(bpe)
    assert not opens_with_bos(bpe | {"tokenizer.ggml.pre": "qwen2"})


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_survives_a_folder_and_a_file(tmp_path, prefix):
    """GGUF to tokenizer.json to GGUF: the same ids, text, merges and names."""
    values = sentencepiece(add_space_prefix=prefix)
    source = from_gguf(values, "x")
    files = TokenizerFiles(None, values)
    vocabulary.write_hf(source, files, tmp_path, 64)
    folder = load_tokenizer(tmp_path)
    assert compare_tokenizers(source, folder) == []
    assert folder.merges == source.merges and folder.stop_ids == source.stop_ids
    again = TokenizerFiles(tmp_path, {})
    written = vocabulary.gguf_values(folder, again, source.vocab_size + 3)
    back = from_gguf(written, "y")
    assert compare_tokenizers(source, back) == [] and back.merges == source.merges
    for key in ("model", "tokens", "token_type", "add_bos_token", "add_space_prefix"):
        expected = {"add_bos_token": True, "add_space_prefix": prefix}.get(key)
        expected = values[f"tokenizer.ggml.{key}"] if expected is None else expected
        got = written[f"tokenizer.ggml.{key}"]
        assert (got[: len(expected)] if isinstance(got, list) else got) == expected, key


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_folder_that_puts_fewer_spaces_than_llama_cpp_is_written_and_said(
    tmp_path, caplog, scheme
):
    """Folders that newer Transformers saves; what differs elsewhere is refused as ever."""
    values = sentencepiece()
    vocabulary.write_hf(from_gguf(values, "x"), TokenizerFiles(None, values), tmp_path, 64)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text()) | {"normalizer": None}
    marks = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    path.write_text(json.dumps(described | {"pre_tokenizer": marks}))
    folder = load_tokenizer(tmp_path)
    written = vocabulary.gguf_values(folder, TokenizerFiles(tmp_path, {}), folder.vocab_size)
    assert folder.encode(" the") == folder.encode("the")
    back = from_gguf(written, "y")
    assert back.encode("the cat") == folder.encode("the cat")
    assert back.encode(" the") != folder.encode(" the")
    assert compare_tokenizers(folder, back) == []
    assert "as llama.cpp does; the source's only before a text without one" in caplog.text
    other = from_gguf(written | {"tokenizer.ggml.add_space_prefix": False}, "z")
    assert any("DON'T" in problem for problem in compare_tokenizers(folder, other))


def test_a_folder_that_no_gguf_header_describes_is_named(tmp_path):
    values = sentencepiece()
    source = from_gguf(values, "x")
    demo = kdjax.open_checkpoint(Path(kdjax.__file__).parent / "demo" / "student.gguf")
    for normalizer in ([], [{"type": "Lowercase"}]):
        vocabulary.write_hf(source, TokenizerFiles(None, values), tmp_path, 64)
        path = tmp_path / "tokenizer.json"
        described = json.loads(path.read_text())
        described["normalizer"]["normalizers"] += normalizer
        path.write_text(json.dumps(described))
        checkpoint = dataclasses.replace(demo, tokenizer_path=str(tmp_path))
        if not normalizer:
            check_gguf_tokenizer(checkpoint)
    with pytest.raises(UserError, match="cannot describe, which would have other ids or text for"):
        check_gguf_tokenizer(checkpoint)


def test_sentencepiece_vocabularies_are_proven_to_align():
    teacher = from_gguf(sentencepiece(), "x")
    assert align(300, 320, teacher, teacher).real == teacher.vocab_size
    scores = np.array(sentencepiece()["tokenizer.ggml.scores"])
    scores[-4], scores[-5] = scores[-5], scores[-4]
    other = from_gguf(sentencepiece(scores=scores), "x")
    with pytest.raises(UserError, match="tokenizers differ at merge"):
        align(300, 320, teacher, other)
    short = dataclasses.replace(teacher, tokens=teacher.tokens[:-1])
    with pytest.raises(UserError, match="smaller than the student's"):
        align(300, 320, teacher, short)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", None])
def test_other_kinds_are_refused_by_name(model):
    with pytest.raises(UserError, match=rf"tokenizer model {model!r}.*gpt2, llama, gemma4"):
        from_gguf(sentencepiece(model=model), "x")


def test_a_tokenizer_that_names_no_end_ends_no_text():
    """Its last token is an ordinary word, and was written after every text."""
    values = sentencepiece(eos_token_id=None)
    values = {key: value for key, value in values.items() if value is not None}
    named = from_gguf(values, "x")  # by its token <eos>
    assert [named.tokens[i] for i in named.stop_ids] == ["<eos>", "<end_of_turn>"]
    assert named.tokens[named.end_of_turn_id] == "<end_of_turn>"
    tokens = list(values["tokenizer.ggml.tokens"])
    for name in ("<eos>", "<end_of_turn>", "</s>"):
        tokens[tokens.index(name)] = f"<{name[1:-1]} of another name>"
    unnamed = from_gguf(values | {"tokenizer.ggml.tokens": tokens}, "x")
    assert unnamed.stop_ids == () and unnamed.find_end() is None
    for read in (lambda: unnamed.end_of_text_id, lambda: unnamed.end_of_turn_id):
        with pytest.raises(UserError, match=r"without eos_token_id .* data\.end_of_document"):
            read()
    assert "eos_token_id" not in vocabulary.generation_config(unnamed, TokenizerFiles(None, values))


def test_a_written_folder_keeps_its_ends_and_adds_those_that_trained(tmp_path):
    source = from_gguf(sentencepiece(), "x")
    vocabulary.write_hf(source, TokenizerFiles(None, {}), tmp_path, 64)
    files, path = TokenizerFiles(tmp_path, {}), tmp_path / "generation_config.json"
    for said, ends in ((7, [7, 1, 5]), ([5, 1], [5, 1]), (None, [1, 5])):
        path.write_text(json.dumps({"eos_token_id": said, "top_k": 3}))
        written = vocabulary.generation_config(source, files)
        assert written == {"eos_token_id": ends, "top_k": 3}
    trained = dataclasses.replace(source, named_ends=frozenset([4]))
    values = vocabulary.gguf_values(trained, TokenizerFiles(None, sentencepiece()), 600)
    assert values["tokenizer.ggml.eot_token_id"] == 4
    values = vocabulary.gguf_values(source, TokenizerFiles(None, sentencepiece()), 600)
    assert "tokenizer.ggml.eot_token_id" not in values
