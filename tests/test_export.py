"""Exports: what is read back equals what was meant, and nothing half-made is ever left."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exporting import a_student, corrupted, left_in, load, logits_of, short

from kdjax.errors import UserError
from kdjax.export import (
    SelfCheckError,
    export_apr,
    export_gguf,
    export_hf,
    formats,
    staging,
    vocabulary,
    weights,
)
from kdjax.formats import open_table
from kdjax.formats.synthetic import byte_alphabet
from kdjax.models.tokenizer import from_gguf, load_tokenizer

GOLDENS = Path(__file__).parent / "goldens"
EXPORTS = {"hf": export_hf, "gguf": export_gguf, "apr": export_apr}
SUFFIXES = {"hf": "", "gguf": ".gguf", "apr": ".apr"}
ROUNDED = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


@pytest.fixture(scope="module")
def student(models):
    return a_student(models / "student.gguf")


def export(kind, student, out, **how):
    path, spec, params = student
    return EXPORTS[kind](params, spec, path, out, **how)


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("dtype", ROUNDED)
def test_unquantized_exports_come_back_bit_for_bit(kind, dtype, student, tmp_path):
    out = tmp_path / f"student{SUFFIXES[kind]}"
    report = export(kind, student, out, dtype=dtype)
    spec, params = load(out)
    _, want_spec, want = student
    assert short(spec) == short(want_spec) and report.error == 0
    whole = kind == "hf"  # elsewhere norms and biases stay F32

    def rounded(path, x):
        kept = "bias" in str(path) or "norm" in str(path)
        as_stored = jnp.asarray(x).astype(ROUNDED[dtype]).astype(jnp.float32)
        return x if kept and not whole else np.asarray(as_stored)

    want = jax.tree_util.tree_map_with_path(rounded, want)
    jax.tree.map(np.testing.assert_array_equal, params, want)
    np.testing.assert_array_equal(logits_of(spec, params), logits_of(want_spec, want))
    assert load_tokenizer(out).tokens == load_tokenizer(student[0]).tokens
    assert left_in(tmp_path) == [out.name]


@pytest.mark.parametrize("dtype, error", [("q8_0", 0.01), ("q6_k", 0.02), ("q5_0", 0.06),
                                          ("q4_k_m", 0.09), ("q4_0", 0.12)])  # fmt: skip
def test_quantized_exports_lose_what_their_type_loses(dtype, error, student, tmp_path):
    report = export("gguf", student, tmp_path / "a.gguf", dtype=dtype)
    assert 0.001 < report.error < error
    spec, params = load(tmp_path / "a.gguf")
    want = logits_of(*student[1:])
    assert np.linalg.norm(logits_of(spec, params) - want) < 0.6 * np.linalg.norm(want)


def test_q4_k_m_has_the_types_of_llama_quantize(student, tmp_path, models):
    export("gguf", student, tmp_path / "a.gguf", dtype="q4_k_m")
    ours, theirs = open_table(tmp_path / "a.gguf"), open_table(models / "student.gguf")
    assert {n: ours.info(n)[1:] for n in ours} == {n: theirs.info(n)[1:] for n in theirs}
    assert ours.metadata.keys() == theirs.metadata.keys()
    for key in ours.metadata:
        np.testing.assert_array_equal(ours.metadata[key], theirs.metadata[key])


def test_a_tied_head_is_exported_tied(student, tmp_path):
    export("hf", student, tmp_path / "hf")
    export("gguf", student, tmp_path / "a.gguf")
    assert student[1].tied
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in open_table(tmp_path / "hf")
    assert "output.weight" not in open_table(tmp_path / "a.gguf")


def small_source(model):
    """A model of 160 rows with a tokenizer that fits: no byte beyond ASCII has a token."""
    tokens = [*byte_alphabet()[:140], "<|endoftext|>", "<|im_end|>"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 140 + [3, 3],
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.eos_token_id": 141,
        "tokenizer.ggml.padding_token_id": 140,
        "tokenizer.ggml.bos_token_id": 140,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokens[139] = "!!"
    special = vocabulary.Special(bos=140, eos=141, pad=140, add_bos=True)
    return vocabulary.Source(open_table(model), from_gguf(values, "test"), special, None, values)


@pytest.mark.parametrize("case", ["qwen2_untied", "qwen2_yarn", "qwen3", "llama", "llama_scaled"])
@pytest.mark.parametrize("kind", EXPORTS)
def test_every_family_and_rope_comes_back(case, kind, tmp_path):
    """Through GGUF a Llama's rows are interleaved and its scaling becomes divisors."""
    spec, params = load(GOLDENS / case)
    out = tmp_path / f"a{SUFFIXES[kind]}"
    EXPORTS[kind](params, spec, small_source(GOLDENS / case), out)
    found, again = load(out)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    want = logits_of(spec, params)
    np.testing.assert_allclose(logits_of(found, again), want, rtol=1e-4, atol=1e-4)


def test_shards_and_their_index_read_back(student, tmp_path):
    path, spec, params = student
    export_hf(params, spec, path, tmp_path / "hf", shard_bytes=200_000)
    shards = [n for n in left_in(tmp_path / "hf") if n.endswith(".safetensors")]
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * spec.parameters()
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "hf")[1], params)


def test_a_folder_becomes_a_gguf_file_with_the_same_tokenizer(student, tmp_path):
    path, spec, params = student
    export_hf(params, spec, path, tmp_path / "hf", dtype="bf16")
    export_gguf(params, spec, tmp_path / "hf", tmp_path / "a.gguf")
    ours, theirs = open_table(tmp_path / "a.gguf").metadata, open_table(path).metadata
    for key in theirs:
        if key.startswith("tokenizer.") or key.startswith("qwen2."):
            np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
    export_hf(params, spec, tmp_path / "hf", tmp_path / "again", dtype="bf16")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json",
                 "config.json", "model.safetensors"):  # fmt: skip
        once, again = ((tmp_path / folder / name).read_bytes() for folder in ("hf", "again"))
        assert once == again or json.loads(once) == json.loads(again), name


def test_bf16_bits_are_numbers_too(student, tmp_path):
    path, spec, params = student
    bits = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)).view(np.uint16), params)
    export_hf(bits, spec, path, tmp_path / "a", dtype="bf16")
    export_hf(params, spec, path, tmp_path / "b", dtype="bf16")
    a, b = (tmp_path / n / "model.safetensors" for n in "ab")
    assert a.read_bytes() == b.read_bytes()


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", EXPORTS)
def test_an_interrupted_export_leaves_what_was_there(kind, before, student, tmp_path, monkeypatch):
    out = tmp_path / f"a{SUFFIXES[kind]}"
    if before:
        export(kind, student, out)
    read, count = weights.Tensor.read, iter(range(99))

    def breaks(self, **how):
        if next(count) == 9:
            raise Interrupted
        return read(self, **how)

    monkeypatch.setattr(weights.Tensor, "read", breaks)
    with pytest.raises(Interrupted):
        export(kind, student, out, dtype="f16", overwrite=True)
    monkeypatch.undo()
    assert left_in(tmp_path) == [out.name] * before
    if before:
        jax.tree.map(np.testing.assert_array_equal, load(out)[1], student[2])


@pytest.mark.parametrize("folder", [False, True])
def test_a_killed_export_leaves_nothing_that_looks_complete(folder, tmp_path):
    out = tmp_path / "a.gguf"
    code = f"""
import os, signal
from pathlib import Path
from kdjax.export.staging import staged
with staged(Path({str(out)!r}), folder={folder}) as aside:
    aside.mkdir() if {folder} else aside.write_bytes(b"GGUF")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    (left,) = left_in(tmp_path)
    assert left.startswith(".a.gguf.") and left.endswith(".partial")
    with staging.staged(out, folder=folder) as aside:
        aside.mkdir() if folder else aside.write_bytes(b"whole")
    assert left_in(tmp_path) == ["a.gguf"]


def upside_down(encode):
    return lambda rows, dtype: encode(rows[::-1] if rows.ndim == 2 else rows, dtype)


@pytest.mark.parametrize("kind, dtype, fault", [
    ("hf", "f32", corrupted), ("gguf", "bf16", corrupted), ("apr", "f16", corrupted),
    ("gguf", "q8_0", upside_down), ("gguf", "q4_0", upside_down), ("gguf", "q4_k_m", upside_down),
])  # fmt: skip
def test_a_failed_self_check_removes_nothing(kind, dtype, fault, student, tmp_path, monkeypatch):
    out = tmp_path / f"a{SUFFIXES[kind]}"
    export(kind, student, out)
    monkeypatch.setattr(weights, "encode", fault(weights.encode))
    with pytest.raises(SelfCheckError, match=r"not the bytes|times what"):
        export(kind, student, out, dtype=dtype, overwrite=True)
    assert left_in(tmp_path) == [out.name]
    jax.tree.map(np.testing.assert_array_equal, load(out)[1], student[2])


def test_the_self_check_sees_another_tokenizer_and_architecture(student, tmp_path, monkeypatch):
    path, spec, params = student
    source = vocabulary.open_source(path)
    tokens = list(source.values["tokenizer.ggml.tokens"])
    tokens[65], tokens[66] = tokens[66], tokens[65]
    wrong = source._replace(values=source.values | {"tokenizer.ggml.tokens": tokens})
    with pytest.raises(SelfCheckError, match=r"another tokens\n.*other ids or text"):
        export_gguf(params, spec, wrong, tmp_path / "a.gguf")
    bent = formats.headers.gguf_metadata

    def metadata(*args):
        return bent(*args) | {"qwen2.rope.freq_base": 1e4}

    monkeypatch.setattr(formats.headers, "gguf_metadata", metadata)
    with pytest.raises(SelfCheckError, match=r"rope_theta = 10000.0, expected 1000000.0"):
        export_gguf(params, spec, path, tmp_path / "a.gguf")
    assert not left_in(tmp_path)


@pytest.mark.parametrize("kind", EXPORTS)
def test_what_is_there_is_replaced_only_when_asked(kind, student, tmp_path):
    out = tmp_path / f"a{SUFFIXES[kind]}"
    export(kind, student, out, dtype="bf16")
    with pytest.raises(UserError, match=r"there already.*--overwrite"):
        export(kind, student, out)
    assert load_dtype(out) == "BF16"
    export(kind, student, out, overwrite=True)
    assert load_dtype(out) == "F32" and left_in(tmp_path) == [out.name]


def load_dtype(path):
    table = open_table(path)
    return table.info("token_embd.weight" if "token_embd.weight" in table else
                      "model.embed_tokens.weight").dtype  # fmt: skip


def test_folders_are_exchanged_where_the_system_cannot(student, tmp_path, monkeypatch):
    monkeypatch.setattr(staging.ctypes, "CDLL", lambda *_, **__: object())
    test_what_is_there_is_replaced_only_when_asked("hf", student, tmp_path)


def test_other_things_are_never_replaced(student, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(UserError, match=r"without config.json.*left alone"):
        export("hf", student, tmp_path / "mine", overwrite=True)
    with pytest.raises(UserError, match=r"is a folder; expected a file"):
        export("gguf", student, tmp_path / "mine", overwrite=True)
    with pytest.raises(UserError, match=r"is a file; expected a folder"):
        export("hf", student, tmp_path / "mine" / "thesis.txt", overwrite=True)
    assert left_in(tmp_path / "mine") == ["thesis.txt"]


def test_input_that_cannot_be_exported(student, tmp_path):
    path, spec, params = student
    broken = jax.tree.map(np.copy, params)
    broken["blocks"]["mlp"]["up"]["weight"][1, 2, 3] = np.nan
    with pytest.raises(UserError, match=r"1 numbers of \d+ in model.layers.1.mlp.up_proj.weight"):
        export_hf(broken, spec, path, tmp_path / "a")
    fewer = {k: v for k, v in params.items() if k != "norm"} | {"head": params["embed"][:-1]}
    with pytest.raises(UserError, match=r"norm/weight: missing\n.*head: unknown\n.*--student"):
        export_hf(fewer, spec, path, tmp_path / "a")
    broken["blocks"]["mlp"]["up"]["weight"][1, 2, 3] = 1e6
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight.*1e\+06 to store as F16"):
        export_hf(broken, spec, path, tmp_path / "a", dtype="f16")
    with pytest.raises(UserError, match=r"'q4_k_m' for a Hugging Face folder.*f32, bf16, f16"):
        export_hf(params, spec, path, tmp_path / "a", dtype="q4_k_m")
    with pytest.raises(UserError, match=r"no whole blocks of 256.*\(128 columns\).*bf16"):
        export_apr(params, spec, path, tmp_path / "a.apr", dtype="q4_k_m")
    with pytest.raises(UserError, match=r"ends in .apr"):
        export_apr(params, spec, path, tmp_path / "a.bin")
    assert not left_in(tmp_path)


def test_apr_takes_k_blocks_where_rows_are_whole(models, tmp_path):
    spec, params = load(models / "teacher.gguf")
    report = export_apr(params, spec, models / "teacher.gguf", tmp_path / "a.apr", dtype="q4_k_m")
    assert report.types.keys() == {"F32", "Q4_K", "Q6_K"} and report.error < 0.02
