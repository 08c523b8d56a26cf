"""KL and agreement of GGUF files from a reference file, each by llama.cpp's own logits.

    python -m scripts.checks.llama_kl reference.gguf small.gguf other.gguf \\
        --text=python:optax --rows=16 --json=kl.json

Windows of `--seq-len` ids of the text's rows, as `kdjax evaluate` makes them; in the later half of
each, every position counts, as in `llama-perplexity --kl-divergence`. The library is that of the
package xllamacpp, on the CPU, or the one that `LLAMA_LIBRARY` names. A file's line has the mean
over positions and the standard error over windows. Exit status: 0 done, 2 bad input.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.data.pipeline import eval_batches
from kdjax.device import cluster
from kdjax.errors import UserError, reporting
from kdjax.evaluation.heldout import read_text
from kdjax.models.tokenizer import load_tokenizer
from scripts.bench.ggml import open_ggml


class _Settings(ctypes.Structure):
    """Parameters of a model or a context: at least as large as llama.cpp's, which fills them."""

    _fields_ = [("words", ctypes.c_uint32 * 256)]


class _Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("ids", ctypes.POINTER(ctypes.c_int32)),
        ("embeddings", ctypes.c_void_p),
        ("places", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    ]


class Reader:
    """A GGUF file as llama.cpp computes it on a CPU."""

    def __init__(self, path: Path, length: int, threads: int):
        named = os.environ.get("LLAMA_LIBRARY")
        self.library: Any = ctypes.CDLL(named) if named else open_ggml()
        call, pointer = self.library, ctypes.c_void_p
        call.llama_log_set(_SILENT, None)
        for name in ("model_default_params", "context_default_params"):
            getattr(call, f"llama_{name}").restype = _Settings
        for name in ("model_load_from_file", "init_from_model", "get_memory", "model_get_vocab"):
            getattr(call, f"llama_{name}").restype = pointer
        call.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Settings]
        call.llama_init_from_model.argtypes = [pointer, _Settings]
        call.llama_get_memory.argtypes = call.llama_model_get_vocab.argtypes = [pointer]
        call.llama_vocab_n_tokens.argtypes = [pointer]
        call.llama_memory_clear.argtypes = [pointer, ctypes.c_bool]
        call.llama_set_n_threads.argtypes = [pointer, ctypes.c_int32, ctypes.c_int32]
        call.llama_batch_init.restype = _Batch
        call.llama_decode.argtypes = [pointer, _Batch]
        call.llama_batch_free.argtypes = [_Batch]
        call.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        call.llama_get_logits.argtypes = [pointer]
        settings = call.llama_context_default_params()
        if settings.words[0] != 512 or settings.words[3] != 1:
            raise UserError(
                "found parameters of a context in another order; expected n_ctx, n_batch, "
                "n_ubatch, n_seq_max. Use xllamacpp 2026.10."
            )
        settings.words[0] = settings.words[1] = length
        model = call.llama_model_load_from_file(
            str(path).encode(), call.llama_model_default_params()
        )
        if not model:
            raise UserError(f"found no model that llama.cpp loads in {path}; expected a GGUF file.")
        self.context = call.llama_init_from_model(model, settings)
        call.llama_set_n_threads(self.context, threads, threads)
        self.vocabulary = call.llama_vocab_n_tokens(call.llama_model_get_vocab(model))

    def log_softmax(self, ids: np.ndarray, start: int) -> np.ndarray:
        """Log-probabilities float32 `[n - start, vocabulary]` after ids `[n]` from `start` on."""
        call, count = self.library, len(ids)
        batch = call.llama_batch_init(count, 0, 1)
        batch.count = count
        for place, token in enumerate(ids.tolist()):
            batch.ids[place], batch.places[place] = token, place
            batch.sequences[place], batch.sequence[place][0] = 1, 0
            batch.wanted[place] = place >= start
        call.llama_memory_clear(call.llama_get_memory(self.context), True)
        status = call.llama_decode(self.context, batch)
        call.llama_batch_free(batch)
        if status:
            raise UserError(f"llama_decode returned {status}")
        shape = count - start, self.vocabulary
        logits = np.ctypeslib.as_array(call.llama_get_logits(self.context), shape)
        top = logits.max(-1, keepdims=True)
        return logits - (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def compare(base: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Mean KL(base || other) and share of equal first choices, of log-probabilities `[n, v]`."""
    ids = min(base.shape[-1], other.shape[-1])
    base, other = base[:, :ids], other[:, :ids]
    kl = (np.exp(base) * (base - other)).sum(-1, dtype=np.float64)
    return float(kl.mean()), float((base.argmax(-1) == other.argmax(-1)).mean())


def summarise(found: Sequence[tuple[float, float]], positions: int) -> dict[str, float]:
    """Means over windows, and the standard error of the KL."""
    kl = np.array([one[0] for one in found])
    error = kl.std(ddof=1) / len(kl) ** 0.5 if len(kl) > 1 else float("nan")
    agreement = float(np.mean([one[1] for one in found]))
    figures = {"kl": float(kl.mean()), "kl_error": float(error), "agreement": agreement}
    return figures | {"positions": positions, "windows": len(kl)}


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("reference", type=Path)
    add("files", type=Path, nargs="+")
    add("--text", required=True, help="as data.heldout")
    add("--rows", type=int, default=16)
    add("--seq-len", type=int, default=1024)
    add("--threads", type=int, default=cluster.cores())
    add("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    tokenizer = load_tokenizer(args.reference)
    text = read_text(args.text, tokenizer, rows=args.rows, seq_len=args.seq_len)
    batches = eval_batches(text.rows, batch_size=1, limit=args.rows)
    windows = [batch["tokens"][0][: args.seq_len] for batch in batches]
    base, start = Reader(args.reference, args.seq_len, args.threads), args.seq_len // 2
    others = {path: Reader(path, args.seq_len, args.threads) for path in args.files}
    found: dict[Path, list[tuple[float, float]]] = {path: [] for path in others}
    began = time.monotonic()
    for ids in windows:
        exact = base.log_softmax(np.asarray(ids), start)
        for path, other in others.items():
            found[path].append(compare(exact, other.log_softmax(np.asarray(ids), start)))
        positions = len(found[args.files[0]]) * (args.seq_len - start)
        table = {str(path): summarise(one, positions) for path, one in found.items()}
        seconds = {"seconds": time.monotonic() - began}
        args.json.write_text(json.dumps(table | seconds, indent=1))
    print(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
