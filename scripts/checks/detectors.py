"""Every detector against a published model, healthy and broken, and the healthy in many types.

    python -m scripts.checks.detectors qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --work=/tmp/detectors

Writes one re-quantized or damaged file at a time under --work and removes it again. Healthy forms
must have no finding; each damaged one must have the finding it is named for. Faults that are known
not to be seen are tried too, and what is found is printed. Exit status: 0 if all of that holds, 1
if not.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from kdjax.device import runtime, sharding
from kdjax.evaluation.health import examine
from kdjax.evaluation.target import open_target
from kdjax.formats import TensorTable, open_table
from kdjax.formats.blocks import BLOCKS, decode, encode
from kdjax.formats.gguf import write_gguf
from kdjax.models.arch import spec_from_table

HEALTHY = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_0", "Q4_K", "Q4_0")
_CHUNK = 1 << 24  # numbers decoded at a time
Change = Callable[[str, np.ndarray], np.ndarray]


def rewritten(
    table: TensorTable,
    path: Path,
    dtype: str,
    metadata: dict | None = None,
    change: Change | None = None,
    only: str = "",
) -> None:
    """The model with its matrices as `dtype`; those whose name starts with `only` are changed."""

    def chunks(name: str, kind: str) -> Iterator[np.ndarray]:
        info = table.info(name)
        raw = table.raw(name) if len(info.shape) > 1 else table.raw(name)[None]
        step = max(1, _CHUNK // math.prod(info.shape[-1:]))
        for at in range(0, len(raw), step):
            rows = np.asarray(decode(raw[at : at + step], info.dtype))
            if change is not None and name.startswith(only):
                rows = change(name, rows.copy())
            yield encode(rows, kind)

    tensors = []
    for name in table:
        info = table.info(name)
        kind = dtype if len(info.shape) > 1 else "F32"
        touched = change is not None and name.startswith(only)
        if not touched and kind in ("", info.dtype):
            tensors.append((name, info.dtype, info.shape, table.raw(name)))
            continue
        kind = kind or "F16"
        if math.prod(info.shape[-1:]) % BLOCKS[kind].elements:
            kind = "Q8_0"  # rows that are no whole K-blocks, as llama.cpp falls back
        tensors.append((name, kind, info.shape, lambda n=name, k=kind: chunks(n, k)))
    write_gguf(path, dict(table.metadata) | (metadata or {}), tensors)


def _nan(name: str, rows: np.ndarray) -> np.ndarray:
    rows.flat[len(rows.flat) // 2] = np.nan
    return rows


def _dead(name: str, rows: np.ndarray) -> np.ndarray:
    rows[: len(rows) // 2] = 0
    return rows


def _repeated(name: str, rows: np.ndarray) -> np.ndarray:
    rows[:] = rows[0]
    rows[:, 0] += (np.arange(len(rows)) // 2 * 2 / len(rows)).astype(np.float32)
    return rows


def _noise(scale: float) -> Change:
    """Noise instead of a matrix, of this size or, for 0, of the matrix's own."""

    def change(name: str, rows: np.ndarray) -> np.ndarray:
        if not name.endswith("weight") or "norm" in name:
            return rows
        noise = np.random.default_rng(0).standard_normal(rows.shape, np.float32)
        return noise * (scale or np.sqrt(np.mean(rows * rows)))

    return change


def _in_pairs(head: int) -> Change:
    """The rows of q and k interleaved, as llama.cpp has them for llama and not for Qwen."""

    def change(name: str, rows: np.ndarray) -> np.ndarray:
        if "attn_q." not in name and "attn_k." not in name:
            return rows
        # A bias comes as one row.
        width = 1 if len(rows) == 1 else rows.shape[1]
        heads = rows.reshape(-1, 2, head // 2, width)
        return heads.swapaxes(1, 2).reshape(rows.shape)

    return change


def _row(scale: float) -> Change:
    def change(name: str, rows: np.ndarray) -> np.ndarray:
        rows[5] = scale * np.random.default_rng(0).standard_normal(rows.shape[1])
        return rows

    return change


def unseen(table: TensorTable) -> dict[str, dict]:
    """Faults that no detector names, and arguments of `rewritten`."""
    family = table.metadata["general.architecture"]
    return {
        "a row of unit noise in a matrix": dict(change=_row(1.0), only="blk.3.ffn_up"),
        "a value matrix of noise": dict(change=_noise(0), only="blk.5.attn_v.w"),
        "a matrix three times too large": dict(change=lambda n, x: 3 * x, only="blk.5.attn_o"),
        "theta 3e5 instead of 1e6": dict(metadata={f"{family}.rope.freq_base": 3e5}),
        "epsilon 1e-5 instead of 1e-6": dict(
            metadata={f"{family}.attention.layer_norm_rms_epsilon": 1e-5}
        ),
    }


def damaged(table: TensorTable) -> dict[str, tuple[str, dict]]:
    """Name -> the detector that must speak, and arguments of `rewritten`."""
    tokens = list(table.metadata["tokenizer.ggml.tokens"])
    order = np.random.default_rng(0).permutation(50000) + 1000
    mixed = tokens.copy()
    for new, old in zip(order, sorted(order), strict=True):
        mixed[new] = tokens[old]
    family = table.metadata["general.architecture"]
    head = spec_from_table(table).head_dim
    rng = np.random.default_rng(0)
    return {
        "one NaN in an F16 matrix": ("non_finite_weights", dict(change=_nan, only="blk.3.ffn_up")),
        "half of the embedding zero": ("dead_rows", dict(change=_dead, only="token_embd")),
        "rows of the head in pairs": ("repeated_rows", dict(change=_repeated, only="output.w")),
        "a zero matrix": (
            "constant_weights",
            dict(change=lambda n, x: 0 * x, only="blk.5.attn_output.w"),
        ),
        "final norm zero": ("uniform_logits", dict(change=lambda n, x: 0 * x, only="output_norm")),
        "embedding of noise": (
            "near_chance",
            dict(change=lambda n, x: rng.standard_normal(x.shape, np.float32), only="token_embd"),
        ),
        "theta 1e4 instead of 1e6": (
            "rope_theta",
            dict(metadata={f"{family}.rope.freq_base": 1e4}),
        ),
        "theta 1e5 instead of 1e6": (
            "rope_theta",
            dict(metadata={f"{family}.rope.freq_base": 1e5}),
        ),
        "q and k in pairs": ("rope_layout", dict(change=_in_pairs(head), only="blk.")),
        "a layer of noise at 1e-6": ("unlike_peers", dict(change=_noise(1e-6), only="blk.5.")),
        "a layer of noise at its own scale": (
            "noise_weights",
            dict(change=_noise(0), only="blk.5."),
        ),
        "a matrix thirty times too large": (
            "unlike_peers",
            dict(change=lambda n, x: 30 * x, only="blk.5.attn_output.w"),
        ),
        "one row a thousand times too large": (
            "large_rows",
            dict(change=_row(30.0), only="blk.3.ffn_up"),
        ),
        "tokens in another order": (
            "tokenizer_order",
            dict(metadata={"tokenizer.ggml.tokens": mixed}),
        ),
        "EOS beyond the vocabulary": (
            "special_tokens",
            dict(metadata={"tokenizer.ggml.eos_token_id": 151930}),
        ),
    }


def look(path: Path, dtype: str, until: str | None) -> tuple[list[str], dict, list[str]]:
    """Findings (as lines), figures of the probe, and answers; up to the finding `until`."""
    target = open_target(f"{path}@dequant:{dtype}")
    mesh = sharding.make_mesh(1, 1, 1, jax.local_devices()[:1])
    found, more = examine.of_files(target.checkpoint), []
    figures, answers = {}, []
    if not any(f.detector == until for f in found):
        model = target.load(mesh)
        more, figures = examine.of_logits(model)
    if until == "":
        last, answers = examine.of_answers(model)
        more += last
    lines = [f"{f.detector}: {f.evidence}" for f in found + more]
    return lines, figures, answers


def main() -> int:
    """Runs all; returns the exit status."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("model", type=Path)
    flags.add_argument("--work", type=Path, required=True)
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--only", default="", help="those whose name contains this")
    args = flags.parse_args()
    runtime.configure()
    table = open_table(args.model)
    args.work.mkdir(parents=True, exist_ok=True)
    path, good = args.work / "model.gguf", True

    def one(name: str, expected: str | None, make: Callable[[], Path]) -> None:
        nonlocal good  # None: whatever is found
        if args.only and args.only not in name:
            return
        start = time.monotonic()
        try:
            where = make()
            lines, figures, answers = look(where, args.dtype, expected)
        except Exception as error:
            if "to write" in str(error) and expected == "":  # no encoder of that type yet
                print(f"skip     {name}: {error}", flush=True)
                return
            raise
        finally:
            path.unlink(missing_ok=True)
        right = any(line.startswith(expected) for line in lines) if expected else not lines
        right |= expected is None
        good &= right
        seconds = time.monotonic() - start
        keys = ("ce", "entropy", "mean_entropy", "ce_with_theta_10000", "ce_with_theta_1e+06")
        short = {k: round(v, 3) for k, v in figures.items() if k in keys}
        print(f"{'ok' if right else 'WRONG':<8} {name} ({seconds:.0f} s) {short}", flush=True)
        for line in lines:
            print(f"           {line}", flush=True)
        if not right:
            print(f"           answers {answers}", flush=True)

    def write(**how) -> Path:
        rewritten(table, path, **how)
        return path

    one(f"healthy: as published ({args.model.name})", "", lambda: args.model)
    for dtype in HEALTHY:
        one(f"healthy: {dtype}", "", lambda d=dtype: write(dtype=d))
    for name, (expected, how) in damaged(table).items():
        one(f"broken: {name}", expected, lambda h=how: write(dtype="", **h))
    for name, how in unseen(table).items():
        one(f"unseen: {name}", None, lambda h=how: write(dtype="", **h))
    print("all as they should be" if good else "SOME ARE WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
