"""Random GGUF files: what they hold, and that they are what real files look like."""

import math
import os
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import tokenizers

from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.blocks import BLOCKS, decode
from kdjax.formats.gguf import write_gguf
from scripts.bench import random_gguf
from scripts.bench.synthetic import (
    QWEN25_SHAPES,
    RECIPES,
    byte_alphabet,
    random_blocks,
    tensor_plan,
    write_random_gguf,
)

STEP = jax.jit(decode, static_argnums=1)
TEACHER, STUDENT = QWEN25_SHAPES["tiny-teacher"], QWEN25_SHAPES["tiny-student"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_random_gguf(folder / "teacher.gguf", TEACHER)
    write_random_gguf(folder / "student.gguf", STUDENT, seed=1)
    return open_table(folder / "teacher.gguf"), open_table(folder / "student.gguf")


def types_of(table, part):
    return [
        table.info(f"blk.{layer}.{part}.weight").dtype
        for layer in range(table.metadata["qwen2.block_count"])
    ]


def test_the_teacher_has_the_mix_of_q4_k_m(pair):
    teacher, _ = pair
    assert types_of(teacher, "attn_q") == ["Q4_K"] * 3
    assert types_of(teacher, "attn_v") == types_of(teacher, "ffn_down") == ["Q4_K", "Q4_K", "Q6_K"]
    assert teacher.info("output.weight")[1:3] == ((384, 256), "Q6_K")
    assert teacher.info("token_embd.weight")[1:3] == ((384, 256), "Q4_K")
    assert teacher.info("blk.0.attn_k.weight").shape == (128, 256)
    assert teacher.info("blk.0.ffn_norm.weight").dtype == "F32"


def test_the_student_falls_back_where_rows_are_no_k_blocks(pair):
    _, student = pair
    assert types_of(student, "attn_q") == types_of(student, "ffn_up") == ["Q5_0"] * 2
    assert types_of(student, "attn_v") == ["Q5_0", "Q8_0"]
    assert types_of(student, "ffn_down") == ["Q4_K", "Q6_K"]
    assert student.info("token_embd.weight").dtype == "Q8_0"
    assert "output.weight" not in student


def test_the_plan_of_7b_is_that_of_the_published_file():
    plan = tensor_plan(QWEN25_SHAPES["7b"], RECIPES["q4_k_m"], "numeric")
    assert len(plan) == 339
    assert sum(
        math.prod(shape) // BLOCKS[dtype].elements * BLOCKS[dtype].nbytes
        for _, dtype, shape in plan
    ) == pytest.approx(4.676e9, rel=1e-3)
    richer = {name.split(".")[1] for name, dtype, _ in plan if dtype == "Q6_K" and "blk" in name}
    expected = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert richer == {str(layer) for layer in expected}
    published = tensor_plan(QWEN25_SHAPES["7b"], RECIPES["q4_k_m"])
    assert sorted(name for name, *_ in published) == sorted(name for name, *_ in plan)
    richer = {name.split(".")[1] for name, dtype, _ in published if dtype == "Q6_K"} - {"weight"}
    assert sorted(map(int, richer)) == [0, 1, 5, 6, 7, 8, 9, 10, 13, 16, 19, 21, 24, 27]


@pytest.mark.skipif("KDJAX_MODELS" not in os.environ, reason="KDJAX_MODELS names no folder")
@pytest.mark.parametrize("size", ["0.5b", "1.5b", "7b"])
def test_the_plan_is_that_of_the_real_file(size):
    path = Path(os.environ["KDJAX_MODELS"]) / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
    if not path.exists():
        pytest.skip(f"no {path}")
    table = open_table(path)
    plan = tensor_plan(QWEN25_SHAPES[size]._replace(tied=False), RECIPES["q4_k_m"])
    assert plan == [(name, table.info(name).dtype, table.info(name).shape) for name in table]


def test_whole_files_decode_bit_for_bit_like_gguf_py(pair):
    for table in pair:
        tensors = gguf.GGUFReader(table.paths[0]).tensors
        assert [tensor.name for tensor in tensors] == list(table)
        for tensor in tensors:
            got = np.asarray(STEP(table.raw(tensor.name), tensor.tensor_type.name))
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert got.shape == table.info(tensor.name).shape
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", BLOCKS)
def test_random_blocks_are_centred_and_scaled(dtype, rng):
    blocks = random_blocks(rng, dtype, 2**18 // BLOCKS[dtype].elements, 0.02)
    values = np.asarray(STEP(blocks, dtype))
    assert abs(values.mean()) < 0.05 * 0.02
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert np.abs(values).max() < 0.2


def test_weights_keep_the_scale_of_activations(pair):
    for table in pair:
        for name in table:
            info = table.info(name)
            values = np.asarray(STEP(table.raw(name), info.dtype))
            if name.endswith("norm.weight"):
                assert (values == 1).all()
            elif name.endswith(".bias"):
                assert 0 < np.abs(values).max() < 0.2
            else:
                assert values.std() * math.sqrt(info.shape[1]) == pytest.approx(1, rel=0.05)


def test_the_seed_decides_every_byte(tmp_path):
    files = []
    for index, seed in enumerate((3, 3, 4)):
        write_random_gguf(tmp_path / str(index), STUDENT, seed=seed)
        files.append((tmp_path / str(index)).read_bytes())
    assert files[0] == files[1] != files[2]


def test_large_tensors_are_written_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.bench.synthetic._CHUNK_BYTES", 1000)
    write_random_gguf(tmp_path / "x.gguf", STUDENT)
    raw = open_table(tmp_path / "x.gguf").raw("token_embd.weight")
    assert len(np.unique(raw, axis=0)) == len(raw)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_writes_a_valid_file(tmp_path, recipe):
    write_random_gguf(tmp_path / "x.gguf", TEACHER, recipe=recipe)
    table = open_table(tmp_path / "x.gguf")
    assert table.info("blk.0.attn_q.weight").dtype == RECIPES[recipe].base
    assert table.metadata["general.file_type"] == RECIPES[recipe].file_type
    assert len(table) == len(tensor_plan(TEACHER, RECIPES[recipe]))


# ---- the tokenizer


def test_teacher_and_student_share_all_tokens_but_padding(pair):
    tokens = [list(table.metadata["tokenizer.ggml.tokens"]) for table in pair]
    types = [table.metadata["tokenizer.ggml.token_type"] for table in pair]
    real = 256 + 46 + 3
    assert tokens[0][:real] == tokens[1][:real] and len(set(tokens[0])) == len(tokens[0])
    assert [len(part) for part in tokens] == [384, 320]
    for part, kinds in zip(tokens, types, strict=True):
        assert part[real - 3 : real] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        assert part[real:] == [f"[PAD{index}]" for index in range(real, len(part))]
        assert kinds.dtype == np.int32 and (kinds[real - 3 : real] == 3).all()
        assert (kinds[: real - 3] == 1).all() and (kinds[real:] == 5).all()


def test_special_ids_are_set_as_real_files_set_them(pair):
    metadata = pair[0].metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokens[metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    assert tokens[metadata["tokenizer.ggml.padding_token_id"]] == "<|endoftext|>"
    assert tokens[metadata["tokenizer.ggml.bos_token_id"]] == "<|endoftext|>"
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    assert "<|im_start|>" in metadata["tokenizer.chat_template"]


def test_the_tokenizer_is_a_sound_bpe(pair):
    metadata = pair[1].metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    known = set(byte_alphabet())
    assert len(known) == 256 and list(tokens[:256]) == byte_alphabet()
    assert known == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for left, right in merges:
        assert {left, right} <= known and left + right not in known
        known.add(left + right)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    source = "def f(self, n):\n    if n == 0:\n        return True\n    é = [not self]\n"
    encoded = tokenizer.encode(source)
    assert tokenizer.decode(encoded.ids) == source
    assert len(encoded.ids) < 0.65 * len(source) and "return" in encoded.tokens


def test_a_copied_tokenizer_grows_and_shrinks_its_padding(tmp_path, pair):
    _, student = pair
    for rows in (500, 310):
        shape = STUDENT._replace(rows=rows)
        write_random_gguf(tmp_path / "x.gguf", shape, tokenizer_from=student.paths[0])
        table = open_table(tmp_path / "x.gguf")
        tokens = table.metadata["tokenizer.ggml.tokens"]
        assert tokens[:305] == student.metadata["tokenizer.ggml.tokens"][:305]
        assert len(tokens) == rows and tokens[-1] == f"[PAD{rows - 1}]"
        assert len(table.metadata["tokenizer.ggml.token_type"]) == rows
        for key in student.metadata:
            if key.startswith("tokenizer.") and "token_type" not in key and "tokens" not in key:
                assert table.metadata[key] == student.metadata[key]


def test_errors(tmp_path, pair):
    path = tmp_path / "x.gguf"
    with pytest.raises(UserError, match=r"tokenizer of 305 tokens .*at most 300, the rows"):
        write_random_gguf(path, STUDENT._replace(rows=300))
    with pytest.raises(UserError, match="recipe 'q3'; expected one of q4_k_m"):
        write_random_gguf(path, STUDENT, recipe="q3")
    with pytest.raises(UserError, match="found seed -1"):
        write_random_gguf(path, STUDENT, seed=-1)
    write_gguf(tmp_path / "bare.gguf", {}, [])
    with pytest.raises(UserError, match=r"bare\.gguf: found no tokenizer\.ggml\.tokens"):
        write_random_gguf(path, STUDENT, tokenizer_from=tmp_path / "bare.gguf")
    assert not path.exists()


def test_the_script(tmp_path, capsys, pair):
    out = tmp_path / "x.gguf"
    arguments = ["--shape=tiny-student", f"--out={out}"]
    assert random_gguf.main([*arguments, "--seed=1"]) == 0
    assert out.read_bytes() == pair[1].paths[0].read_bytes()
    assert random_gguf.main([*arguments, "--untied", "--recipe=q8_0"]) == 0
    assert "output.weight" in open_table(out)
    assert random_gguf.main([*arguments, f"--tokenizer-from={tmp_path}/none.gguf"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/none.gguf: found no such file")
