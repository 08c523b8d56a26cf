"""Exports: what is read back equals what was meant, and nothing half-made is ever left."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax import sharding
from kdjax.checkpoint import Checkpoints
from kdjax.errors import UserError
from kdjax.export import (
    SelfCheckError,
    card,
    export_apr,
    export_gguf,
    export_hf,
    formats,
    staging,
    vocabulary,
    weights,
)
from kdjax.export import __main__ as command
from kdjax.formats import open_table
from kdjax.formats.synthetic import byte_alphabet
from kdjax.loading import load_params
from kdjax.models.arch import spec_from_table
from kdjax.models.decoder import Compute, functional
from kdjax.step import TrainState
from kdjax.tokenizer import from_gguf, load_tokenizer

GOLDENS = Path(__file__).parent / "goldens"
EXPORTS = {"hf": export_hf, "gguf": export_gguf, "apr": export_apr}
SUFFIXES = {"hf": "", "gguf": ".gguf", "apr": ".apr"}
ROUNDED = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


def load(path):
    """Spec and float32 parameters of a checkpoint, on the host."""
    table = open_table(path)
    spec = spec_from_table(table)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    _, abstract = functional(spec, Compute())
    return spec, jax.device_get(load_params(table, spec, abstract, mesh))


def short(spec):
    """GGUF's reals are float32, others have the decimals."""
    return dataclasses.replace(spec, rms_eps=float(f"{spec.rms_eps:.6g}"))


@functools.cache
def _forward(spec):
    apply, _ = functional(spec, Compute())

    def logits(params, tokens):
        where = (
            jnp.ones_like(tokens),
            jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape),
        )
        return jnp.einsum("BTD,VD->BTV", apply.hidden(params, tokens, *where), apply.head(params))

    return jax.jit(logits)


def logits_of(spec, params):
    tokens = np.random.default_rng(0).integers(0, 160, (2, 24)).astype(np.int32)
    return np.asarray(_forward(spec)(params, tokens))


@pytest.fixture(scope="module")
def student(models):
    """Path, spec and parameters that differ from the file's own."""
    spec, params = load(models / "student.gguf")
    rng = np.random.default_rng(7)

    def moved(x):
        return np.asarray(x) + rng.standard_normal(x.shape, np.float32) * np.float32(1e-3)

    return models / "student.gguf", spec, jax.tree.map(moved, params)


def export(kind, student, out, **how):
    path, spec, params = student
    return EXPORTS[kind](params, spec, path, out, **how)


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


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


def corrupted(encode):
    def encoded(rows, dtype):
        raw = encode(rows, dtype).copy()
        if rows.ndim == 2:
            raw[-1, 1] ^= 1 << 6
        return raw

    return encoded


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


@pytest.fixture(scope="module")
def workdir(student, tmp_path_factory):
    """Two saved steps of a run and its receipt; the second step's weights are the student's."""
    path, _, params = student
    folder = tmp_path_factory.mktemp("run")
    earlier = jax.tree.map(lambda x: x * np.float32(0.5), params)
    identity = {"teacher.sha256": "aa", "student.sha256": "bb", "loss.alpha": 0.25}
    with contextlib.closing(Checkpoints(folder, keep=2, asynchronous=False)) as checkpoints:
        for step, tree in ((5, earlier), (10, params)):
            state = TrainState(
                jnp.int32(step), jax.tree.map(jnp.asarray, tree), {"mu": jnp.ones(3)}
            )
            checkpoints.save(step, state, {"identity": identity, "data": {}})
    figures = {"step": 10, "student_ce": 1.25, "kl": 0.125, "agreement": 0.875, "tokens": 1000}
    receipt = {
        "format": 1,
        "config": {"student": {"path": path.name}, "loss": {"alpha": 0.25}},
        "cwd": str(path.parent),
        "teacher": {"files": ["/models/big.gguf"], "sha256": "aa" * 32},
        "held_out": {"first": figures | {"step": 0, "kl": 0.5}, "final": figures},
        "exit": {"reason": "finished", "status": 0},
    }
    (folder / "receipt.json").write_text(json.dumps(receipt))
    return folder


def run(*arguments):
    return command.main([str(argument) for argument in arguments])


def test_the_command_exports_the_newest_step(workdir, student, tmp_path, capsys):
    out = tmp_path / "made" / "hf"
    assert run(workdir, "--format=hf", f"--out={out}") == 0
    assert "equal bit for bit" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, load(out)[1], student[2])
    readme = (out / "README.md").read_text()
    for said in ("after 10 optimizer steps", "aa" * 32, "big.gguf", "| 0.5 | 0.125 |",
                 '"loss.alpha": 0.25', "status 0", "## Not known"):  # fmt: skip
        assert said in readme
    assert run(workdir, "--format=gguf", "--step=5", f"--out={tmp_path}/a.gguf") == 0
    half = jax.tree.map(lambda x: x * np.float32(0.5), student[2])
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "a.gguf")[1], half)


def test_the_command_says_what_is_wrong(workdir, student, tmp_path, capsys, monkeypatch):
    def fails(wanted, *arguments, status=2):
        assert run(*arguments) == status
        assert re.search(wanted, capsys.readouterr().err, re.DOTALL)

    out = f"--out={tmp_path}/a.gguf"
    fails("no such folder", tmp_path / "none", "--format=gguf", out)
    fails("holds no checkpoint", tmp_path, "--format=gguf", out)
    fails("no step 7.*expected one of 5, 10", workdir, "--format=gguf", out, "--step=7")
    fails("no such file or folder.*--student", workdir, "--format=gguf", out, "--student=gone.gguf")
    bare = tmp_path / "bare"
    (bare).mkdir()
    (bare / "checkpoints").symlink_to(workdir / "checkpoints")
    fails("does not say which student.*--student=PATH", bare, "--format=gguf", out)
    assert run(bare, "--format=hf", f"--out={tmp_path}/hf", f"--student={student[0]}") == 0
    readme = (tmp_path / "hf" / "README.md").read_text()
    assert "`bb`" in readme and "How near it is to its teacher" in readme
    (tmp_path / "a.gguf").write_bytes(b"before")
    capsys.readouterr()
    fails("there already", workdir, "--format=gguf", out)
    monkeypatch.setattr(weights, "encode", corrupted(weights.encode))
    fails("self-check failed", workdir, "--format=gguf", out, "--overwrite", status=5)
    assert (tmp_path / "a.gguf").read_bytes() == b"before"


def test_a_card_without_records_claims_nothing(student):
    text = card.model_card(student[1])
    assert "Which files the teacher and the student were" in text and "SHA-256" not in text
    assert "distilled by" not in text and "The settings of the run." in text


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_transformers_loads_the_folder(dtype, student, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    path, spec, params = student
    export_hf(params, spec, path, tmp_path / "hf", dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, 300, (2, 32))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    spec, params = load(tmp_path / "hf")
    ours = np.asarray(_forward(spec)(params, tokens.astype(np.int32)))
    assert np.linalg.norm(ours - theirs) < 1e-4 * np.linalg.norm(theirs)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert model.config.tie_word_embeddings and model.generation_config.eos_token_id


@pytest.mark.parity
def test_transformers_tokenizer_gives_the_same_ids(student, tmp_path):
    import transformers

    path, spec, params = student
    export_hf(params, spec, path, tmp_path / "hf")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), load_tokenizer(path)
    for text in vocabulary._SAMPLES:
        assert theirs(text)["input_ids"] == ours.encode(text)
    messages = [{"role": "user", "content": "def f(self): return"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ours.render(messages, answer_next=True)
    assert theirs(rendered)["input_ids"] == ours.encode(rendered)
    assert (theirs.eos_token_id, theirs.pad_token) == (ours.eos_id, "<|endoftext|>")
    assert len(theirs) == ours.vocab_size


@pytest.mark.skipif("KDJAX_LLAMA_PYTHON" not in os.environ, reason="needs llama-cpp-python")
def test_llama_cpp_loads_the_files_and_agrees(models, tmp_path):
    """KDJAX_LLAMA_PYTHON names an interpreter with llama-cpp-python; the models are random."""
    script = Path(__file__).parent.parent / "scripts" / "check_llama_cpp.py"
    command = [sys.executable, str(script), str(models / "student.gguf"), "--text=README.md",
               "--window=64", "--windows=4", f"--out={tmp_path}",
               f"--python={os.environ['KDJAX_LLAMA_PYTHON']}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr
