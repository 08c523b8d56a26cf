"""Compares exports and K-quant encoders with llama.cpp itself.

    python -m scripts.checks.llama_cpp MODEL.gguf --text='docs/*.md' --out=/tmp/exports

Encodes real tensors with kdjax and with llama.cpp and prints the ratio of their errors. Then it
loads MODEL with kdjax, exports it as GGUF in several types, and for each prints the perplexity of
the text in kdjax and in llama.cpp, computed from each one's own logits on the same ids: windows of
`--window` tokens, every position of the later half counted, as llama.cpp's own tool does.

Needs `llama-cpp-python` (the extra `llama`), here or in the interpreter that `--python` names.
Exit status: 0 within bounds, 1 beyond them, 2 bad input, 77 llama.cpp is missing.
"""

import argparse
import dataclasses
import glob
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.errors import UserError, reporting
from kdjax.export import export_gguf
from kdjax.formats import open_table
from kdjax.formats.blocks import decode, encode
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.loading import has_tied_head
from kdjax.models.model import Model, load_model
from kdjax.models.tokenizer import load_tokenizer

TYPES = ("f16", "q8_0", "q4_k_m", "q6_k")
MOST_PERPLEXITY, MOST_ERROR = 0.005, 1.05
SKIPPED = 77
_ROWS = 1024  # of a tensor, for the encoders

# What runs in the interpreter that has llama_cpp: "ppl MODEL IDS.npy WINDOW" prints the sum of
# negative log-likelihoods and their count, "quant TYPE IN.npy OUT.npy" encodes float32 rows.
_WORKER = r"""
import ctypes, json, sys
import numpy as np
import llama_cpp

def perplexity(model, ids, window):
    ids, window = np.load(ids), int(window)
    llama = llama_cpp.Llama(model, n_ctx=window, n_batch=window, logits_all=True, verbose=False,
                            flash_attn=False)
    total, count = 0.0, 0
    for row in ids:
        llama.reset()
        llama.eval(row.tolist())
        start = window // 2
        logits = np.asarray(llama.scores[start : window - 1], np.float64)
        top = logits.max(-1, keepdims=True)
        log = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        total -= log[np.arange(len(log)), row[start + 1 :]].sum()
        count += len(log)
    print(json.dumps([total, count]))

def quantize(kind, source, target):
    x = np.ascontiguousarray(np.load(source), np.float32)
    library = ctypes.CDLL(GGML)
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = ctypes.c_int, ctypes.c_int64
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    rows, width = x.shape
    out = np.empty((rows, library.ggml_row_size(int(kind), width)), np.uint8)
    where = x.ctypes.data, out.ctypes.data
    size = library.ggml_quantize_chunk(int(kind), *where, 0, rows, width, None)
    assert size == out.size, (size, out.size)
    np.save(target, out)

import os
GGML = os.path.join(os.path.dirname(llama_cpp.__file__), "lib", "libggml-base.so")
{"ppl": perplexity, "quant": quantize}[sys.argv[1]](*sys.argv[2:])
"""


def worker(python: str, *arguments: Any) -> str:
    """Output of the worker; raises `UserError` with the end of its errors if it fails."""
    command = [python, "-c", _WORKER, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"llama.cpp failed on {arguments}:\n{done.stderr[-2000:]}")
    return done.stdout


def llama_version(python: str) -> str | None:
    """Version of llama-cpp-python there; None if it is missing."""
    code = "import llama_cpp; print(llama_cpp.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def windows(patterns: str, model: str, window: int, most: int) -> np.ndarray:
    """Ids of the text, int32 `[n, window]`."""
    paths = sorted(p for pattern in patterns.split(",") for p in glob.glob(pattern, recursive=True))
    if not paths:
        raise UserError(f"--text={patterns}: no such files.")
    text = "\n\n".join(Path(path).read_text(encoding="utf-8") for path in paths)
    ids = load_tokenizer(model).encode(text)
    count = min(most, len(ids) // window)
    if not count:
        raise UserError(f"--text has {len(ids)} tokens; expected at least {window}. Give more.")
    return np.asarray(ids[: count * window], np.int32).reshape(count, window)


def load(path: Path) -> Model:
    """Makes a model of float32 parameters; a head that repeats the embedding is tied."""
    checkpoint = open_checkpoint(path)
    spec = dataclasses.replace(
        checkpoint.spec, tied=has_tied_head(checkpoint.table, checkpoint.spec)
    )
    placement = Placement(sharding.make_local_mesh(1))
    return load_model(
        dataclasses.replace(checkpoint, spec=spec), dtype="float32", placement=placement
    )


def negative_log_likelihood(model: Model, ids: np.ndarray) -> tuple[float, int]:
    """Sum over the later half of each window, in nats, in float32; and the number of positions."""
    apply, params = model.functions, model.params
    start = ids.shape[1] // 2

    def one(params: Any, row: jax.Array) -> jax.Array:
        places = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
        hidden = apply.hidden(params, row, jnp.ones_like(row), places)[:, start:-1]
        logits = jnp.einsum("BTD,VD->BTV", hidden, apply.head(params))
        log = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.take_along_axis(log, row[:, start + 1 :, None], axis=-1).sum()

    step = jax.jit(one)
    with model.precision():
        total = sum(float(step(params, jnp.asarray(row[None]))) for row in ids)
    return total, len(ids) * (ids.shape[1] - 1 - start)


def compare_perplexity(
    python: str, model: Path, kinds: Sequence[str], ids: np.ndarray, out: Path
) -> list[dict[str, Any]]:
    """A row for each type: perplexities of kdjax and llama.cpp, and what the export cost."""
    loaded = load(model)
    np.save(out / "ids.npy", ids)
    total, count = negative_log_likelihood(loaded, ids)
    rows = [{"type": "float32 in kdjax", "kdjax": np.exp(total / count), "positions": count}]
    _print(rows[-1])
    for kind in kinds:
        path = out / f"{kind}.gguf"
        began = time.perf_counter()
        report = export_gguf(loaded, path, dtype=kind, overwrite=True)
        seconds = time.perf_counter() - began
        total, count = negative_log_likelihood(load(path), ids)
        theirs = json.loads(worker(python, "ppl", path, out / "ids.npy", ids.shape[1]))
        ours, theirs = np.exp(total / count), np.exp(theirs[0] / theirs[1])
        rows.append(
            {
                "type": kind,
                "kdjax": ours,
                "llama.cpp": theirs,
                "difference": theirs / ours - 1,
                "bytes": path.stat().st_size,
                "seconds": seconds,
                "error": report.error,
            }
        )
        _print(rows[-1])
        path.unlink()
    return rows


def compare_encoders(
    python: str, model: Path, kinds: Sequence[str], count: int, out: Path
) -> list[dict[str, Any]]:
    """A row for each K type: relative errors of both encoders over the same real tensors."""
    table = open_table(model)
    fits = [n for n in table if len(table.info(n).shape) == 2 and table.info(n).shape[1] % 256 == 0]
    chosen = [fits[i] for i in np.unique(np.linspace(0, len(fits) - 1, count).astype(int))]
    rows = []
    for kind in kinds:
        lost = np.zeros((len(chosen), 2))
        for i, name in enumerate(chosen):
            info = table.info(name)
            x = np.asarray(decode(table.raw(name)[:_ROWS], info.dtype))
            np.save(out / "x.npy", x)
            worker(python, "quant", _ggml(kind), out / "x.npy", out / "q.npy")
            for j, raw in enumerate((encode(x, kind), np.load(out / "q.npy"))):
                lost[i, j] = np.linalg.norm(x - np.asarray(decode(raw, kind))) / np.linalg.norm(x)
        # Numbers that came from such blocks may come back exactly, from both.
        ratio = np.divide(lost[:, 0], lost[:, 1], out=np.ones(len(lost)), where=lost[:, 1] > 1e-6)
        rows.append(
            {
                "type": kind,
                "tensors": len(chosen),
                "kdjax": lost[:, 0].mean(),
                "llama.cpp": lost[:, 1].mean(),
                "ratio": ratio.mean(),
                "worst ratio": ratio.max(),
            }
        )
        _print(rows[-1])
    for name in ("x.npy", "q.npy"):
        (out / name).unlink(missing_ok=True)
    return rows


def _ggml(kind: str) -> int:
    from kdjax.formats.blocks import BLOCKS

    return BLOCKS[kind].ggml


def _print(row: dict[str, Any]) -> None:
    said = (f"{k} {v:,.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print("  ".join(said), flush=True)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--text", required=True, help="files to measure on: globs, with commas")
    parser.add_argument("--out", type=Path, required=True, help="folder for the exports")
    parser.add_argument("--python", default=sys.executable, help="interpreter with llama_cpp")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--kquants", default="Q4_K,Q5_K,Q6_K")
    parser.add_argument("--source", type=Path, help="file to take tensors for the encoders from")
    parser.add_argument("--tensors", type=int, default=8, help="real tensors for the encoders")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args(argv)
    version = llama_version(args.python)
    if version is None:
        print(f"skipped: {args.python} has no llama-cpp-python (`pip install 'kdjax[llama]'`)")
        return SKIPPED
    print(f"llama-cpp-python {version}, jax {jax.__version__}")
    args.out.mkdir(parents=True, exist_ok=True)

    def split(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    encoders = compare_encoders(
        args.python, args.source or args.model, split(args.kquants), args.tensors, args.out
    )
    perplexity: list[dict[str, Any]] = []
    if kinds := split(args.types):
        ids = windows(args.text, str(args.model), args.window, args.windows)
        perplexity = compare_perplexity(args.python, args.model, kinds, ids, args.out)
    if args.json:
        found = {"llama_cpp": version, "perplexity": perplexity, "encoders": encoders}
        args.json.write_text(json.dumps(found, indent=1, default=float) + "\n")
    bad = [row["type"] for row in encoders if not row["worst ratio"] <= MOST_ERROR]
    bad += [
        row["type"] for row in perplexity if not abs(row.get("difference", 0.0)) <= MOST_PERPLEXITY
    ]
    print(f"beyond the bounds: {', '.join(bad)}" if bad else "all within the bounds")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
