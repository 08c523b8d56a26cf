"""Shared by tests of exports: a student to export, and ways to look at what came of it."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import kdjax
from kdjax.formats import open_table
from kdjax.formats.blocks import BLOCKS
from kdjax.formats.gguf import write_gguf
from scripts.bench.synthetic import byte_alphabet

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp"
)


def load(path):
    """A checkpoint as a model of float32 parameters on the host."""
    model = kdjax.load(path, dtype="float32")
    return model.replace(params=jax.device_get(model.params))


def read_tensors(path):
    """Shape and bytes of each tensor of a file or folder."""
    table = open_table(path)
    return {name: (table.info(name).shape, table.raw(name).tobytes()) for name in table}


def short(spec):
    """GGUF's reals are float32, others have the decimals."""
    return dataclasses.replace(spec, rms_eps=float(f"{spec.rms_eps:.6g}"))


def logits_of(model):
    return np.asarray(model.logits(np.random.default_rng(0).integers(0, 140, (2, 24))))


def a_student(path):
    """A model whose parameters differ from the file's own."""
    model, rng = load(path), np.random.default_rng(7)

    def moved(x):
        return np.asarray(x) + rng.standard_normal(x.shape, np.float32) * np.float32(1e-3)

    return model.replace(params=jax.tree.map(moved, model.params))


def assert_same(params, want):
    jax.tree.map(np.testing.assert_array_equal, params, want)


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def corrupted(encode):
    def encoded(rows, *rest):
        raw = encode(rows, *rest).copy()
        if rows.ndim == 2:
            raw[-1, 1] ^= 1 << 6
        return raw

    return encoded


def write_small_tokenizer(path):
    """A file with a tokenizer that fits 160 rows: no byte beyond ASCII has a token."""
    tokens = [*byte_alphabet()[:140], "<|endoftext|>", "<|im_end|>"]
    tokens[139] = "!!"
    values = {
        "general.architecture": "qwen2",
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
    write_gguf(path, values, [("t", "F32", (1,), np.zeros(1, "<f4"))])
    return path


# Runs apart: llama.cpp's server ends with its process. Prints what it gives each id after a prompt.
_WORKER = r"""
import json, os, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, prompts, count, adapters = sys.argv[1], *map(json.loads, sys.argv[2:])
params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in adapters]
params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 256, 1, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
for prompt in prompts:
    # The id that is drawn must be whole text, or its probabilities are left out.
    asked = dict(prompt=prompt, n_predict=1, n_probs=count, logit_bias=[[40, 1e3]])
    (choice,) = server.handle_completions(asked)["choices"]
    found = choice["logprobs"]["content"][0]["top_logprobs"]
    print("FOUND" + json.dumps({x["id"]: x["logprob"] for x in found}), flush=True)
os._exit(0)
"""


def ask_llama_cpp(path, prompts, count=160, adapters=()):
    """Log-probabilities of the `count` likeliest ids after each prompt of ids, by llama.cpp."""
    given = [json.dumps(value) for value in (prompts, count, [str(path) for path in adapters])]
    command = [sys.executable, "-c", _WORKER, str(path), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line[5:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert len(lines) == len(prompts), done.stderr[-2000:]
    return [{int(i): value for i, value in json.loads(line).items()} for line in lines]


# Opens each file, one after another, and prints why llama.cpp did not. Runs apart: it may abort.
_OPENER = r"""
import ctypes, glob, json, os, sys
import xllamacpp
parts = glob.glob(os.path.join(os.path.dirname(xllamacpp.__file__), "*.so"))
llama = next(x for f in parts if hasattr(x := ctypes.CDLL(f), "llama_model_load_from_file"))

class Params(ctypes.Structure):  # longer than llama.cpp's, whose fields nobody sets here
    _fields_ = [("fields", ctypes.c_char * 1024)]

said = []

@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def log(level, text, _):
    if level == 4:
        said.append(text.decode(errors="replace").strip())

llama.llama_log_set(log, None)
llama.llama_model_default_params.restype = Params
llama.llama_model_load_from_file.restype = ctypes.c_void_p
llama.llama_model_load_from_file.argtypes = ctypes.c_char_p, Params
llama.llama_model_free.argtypes = (ctypes.c_void_p,)
llama.llama_backend_init()
for path in sys.argv[1:]:
    said.clear()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    print("FOUND" + json.dumps("" if model else " ".join(said)[:500] or "?"), flush=True)
    if model:
        llama.llama_model_free(model)
os._exit(0)
"""


def open_by_llama_cpp(paths):
    """The errors of llama.cpp for each file that it does not open, "" for others."""
    command = [sys.executable, "-c", _OPENER, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line[:5] == "FOUND"]
    assert len(found) == len(paths), (found, done.stderr[-2000:])
    return found


def write_odd(source, path, spoilt, number=np.nan):
    """A copy of a GGUF file whose tensor `spoilt` holds this number in one block of its rows."""
    table, rows = open_table(source), []
    for name in table:
        info, raw = table.info(name), np.array(table.raw(name))
        if name == spoilt:
            # The word of a factor: the first of Q4_K's fields, the last of Q6_K's.
            first, size = (0, 4) if info.dtype == "F32" else (0, 2)
            first = BLOCKS[info.dtype].nbytes - 2 if info.dtype == "Q6_K" else first
            word = np.array([number], f"<f{size}").view(np.uint8)
            raw.reshape(-1, raw.shape[-1])[-1, first : first + size] = word
        rows.append((name, info.dtype, info.shape, raw))
    write_gguf(path, table.metadata, rows)
    return path
