"""Exports: what is read back equals what was meant, and nothing half-made is ever left."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kdjax import sharding
from kdjax.errors import UserError
from kdjax.export import SelfCheckError, export_apr, export_gguf, export_hf
from kdjax.export import __main__ as command
from kdjax.export import card, check, formats, staging, vocabulary, weights
from kdjax.formats import open_table
from kdjax.formats.synthetic import byte_alphabet
from kdjax.loading import load_params
from kdjax.models.arch import spec_from_table
from kdjax.models.decoder import Compute, functional
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
