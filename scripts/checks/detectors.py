"""Every detector against a model, healthy and broken, and the healthy in many types.

    python -m scripts.checks.detectors qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --work=/tmp/detectors
    python -m scripts.checks.detectors kdjax/demo/teacher.gguf --work=/tmp/detectors --dtype=float32

Writes one re-quantized or damaged file at a time under --work and removes it again. Healthy forms
must have no finding; each damaged one must have the finding it is named for. Faults that detectors
need not see are tried too, and what is found is printed. With --json all findings of each model are
kept: a detector is needed that is the only one to name some broken model.
Exit status: 0 if all of that holds, 1 if not.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

import kdjax
from kdjax.device import runtime, sharding
from kdjax.evaluation.health import examine, probes
from kdjax.evaluation.target import open_target
from kdjax.formats import TensorTable, open_table
from kdjax.formats.blocks import BLOCKS, decode, encode
from kdjax.formats.gguf import write_gguf
from kdjax.models.schema import spec_from_table

HEALTHY = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_0", "Q4_K", "Q4_0")
_CHUNK = 1 << 24  # numbers decoded at a time
_END_LOGIT = 12.0  # of the end token at the mean hidden state
Change = Callable[[str, np.ndarray], np.ndarray]


def rewritten(
    table: TensorTable,
    path: Path,
    dtype: str,
    metadata: dict | None = None,
    change: Change | None = None,
    only: str = "",
    take: Callable[[str], str] = str,
) -> None:
    """The model with its matrices as `dtype`; those whose name starts with `only` are changed.

    Under each name lies the tensor of the name that `take` gives.
    """

    def chunks(name: str, kind: str) -> Iterator[np.ndarray]:
        info = table.info(take(name))
        raw = table.raw(take(name)) if len(info.shape) > 1 else table.raw(take(name))[None]
        step = max(1, _CHUNK // math.prod(info.shape[-1:]))
        for at in range(0, len(raw), step):
            rows = np.asarray(decode(raw[at : at + step], info.dtype))
            if change is not None and name.startswith(only):
                rows = change(name, rows.copy())
            yield encode(rows, kind)

    tensors = []
    for name in table:
        info = table.info(take(name))
        kind = dtype if len(info.shape) > 1 else "F32"
        touched = change is not None and name.startswith(only)
        if not touched and kind in ("", info.dtype):
            tensors.append((name, info.dtype, info.shape, table.raw(take(name))))
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


def reversed_heads(letters: str, heads: int) -> Change:
    """The heads of these projections in the opposite order."""

    def change(name: str, rows: np.ndarray) -> np.ndarray:
        if not any(f"attn_{letter}." in name for letter in letters):
            return rows
        whole = (
            rows.reshape(heads, -1) if len(rows) == 1 else rows.reshape(heads, -1, *rows.shape[1:])
        )
        return whole[::-1].reshape(rows.shape)

    return change


def exchanged(one: str, other: str) -> Callable[[str], str]:
    """Renames a tensor, these two parts in each other's place."""
    return lambda name: name.replace(one, "*").replace(other, one).replace("*", other)


def _row(scale: float) -> Change:
    def change(name: str, rows: np.ndarray) -> np.ndarray:
        rows[5] = scale * np.random.default_rng(0).standard_normal(rows.shape[1])
        return rows

    return change


def unseen(table: TensorTable) -> dict[str, dict]:
    """Faults that no detector names, and arguments of `rewritten`."""
    spec, family = spec_from_table(table), table.metadata["general.architecture"]
    low, mid = _layers(table)
    return {
        "a row of unit noise in a matrix": dict(change=_row(1.0), only=f"{low}ffn_up"),
        "a value matrix of noise": dict(change=_noise(0), only=f"{mid}attn_v.w"),
        "a matrix three times too large": dict(change=lambda n, x: 3 * x, only=f"{mid}attn_o"),
        "value heads exchanged": dict(change=reversed_heads("v", spec.num_kv_heads), only="blk."),
        "two layers exchanged": dict(take=exchanged(low, mid)),
        "theta off by a third": dict(metadata={f"{family}.rope.freq_base": 0.3 * spec.rope_theta}),
        "epsilon times 10": dict(
            metadata={f"{family}.attention.layer_norm_rms_epsilon": 10 * spec.rms_eps}
        ),
    }


def _layers(table: TensorTable) -> tuple[str, str]:
    """Prefixes of two layers' names: below the middle, and after it."""
    count = spec_from_table(table).num_layers
    return f"blk.{min(3, count // 4)}.", f"blk.{min(5, count // 2)}."


def _ends_at_once(path: Path) -> Change:
    """The end token's row along the mean hidden state: likely everywhere, and first of all."""
    model = kdjax.load(path, dtype="float32")
    assert model.tokenizer is not None and model.checkpoint is not None
    ids = np.asarray([probes.probe_ids(model.checkpoint)])
    columns = map(jax.numpy.asarray, (ids, np.ones_like(ids), np.arange(ids.size)[None]))
    mean = np.asarray(model.functions.hidden(model.params, *columns), np.float32)[0].mean(0)
    end, at = model.tokenizer.eos_id, 0

    def change(name: str, rows: np.ndarray) -> np.ndarray:
        nonlocal at
        if at <= end < at + len(rows):
            rows[end - at] = _END_LOGIT * mean / (mean @ mean)
        at += len(rows)
        return rows

    return change


def damaged(table: TensorTable) -> dict[str, tuple[str, dict]]:
    """Name -> the detector that must speak, and arguments of `rewritten`."""
    tokens = list(table.metadata["tokenizer.ggml.tokens"])
    order = np.random.default_rng(0).permutation(len(tokens) // 3) + 1000
    mixed = tokens.copy()
    for new, old in zip(order, sorted(order), strict=True):
        mixed[new] = tokens[old]
    family = table.metadata["general.architecture"]
    head, heads = spec_from_table(table).head_dim, spec_from_table(table).num_kv_heads
    rng, (low, mid) = np.random.default_rng(0), _layers(table)
    head_rows = "output.w" if "output.weight" in table else "token_embd"
    return {
        "one NaN in an F16 matrix": ("non_finite_weights", dict(change=_nan, only=f"{low}ffn_up")),
        "final norm times 1e38": (
            "non_finite_logits",
            dict(change=lambda n, x: np.float32(1e38) * x, only="output_norm"),
        ),
        "final norm an eighth": (
            "uniform_logits",
            dict(change=lambda n, x: x / 8, only="output_norm"),
        ),
        "the end token everywhere": (
            "silence",
            dict(change=_ends_at_once(table.paths[0]), only=head_rows),
        ),
        "half of the embedding zero": ("dead_rows", dict(change=_dead, only="token_embd")),
        "rows of the head in pairs": ("repeated_rows", dict(change=_repeated, only=head_rows)),
        "a zero matrix": (
            "constant_weights",
            dict(change=lambda n, x: 0 * x, only=f"{mid}attn_output.w"),
        ),
        "final norm zero": ("uniform_logits", dict(change=lambda n, x: 0 * x, only="output_norm")),
        "embedding of noise": (
            "near_chance",
            dict(change=lambda n, x: rng.standard_normal(x.shape, np.float32), only="token_embd"),
        ),
        "theta 1e5 for another": ("rope_theta", dict(metadata={f"{family}.rope.freq_base": 1e5})),
        "q and k in pairs": ("rope_layout", dict(change=_in_pairs(head), only="blk.")),
        "gate and up exchanged": ("gate_order", dict(take=exchanged("ffn_gate", "ffn_up"))),
        "key heads exchanged": (
            "head_order",
            dict(change=reversed_heads("k", heads), only="blk."),
        ),
        "key and value heads exchanged": (
            "head_order",
            dict(change=reversed_heads("kv", heads), only="blk."),
        ),
        "embedding four times as large": (
            "sure_and_wrong",
            dict(change=lambda n, x: 4 * x, only="token_embd"),
        ),
        "a layer of noise at 1e-6": ("unlike_peers", dict(change=_noise(1e-6), only=mid)),
        "a layer of noise at its own scale": (
            "noise_weights",
            dict(change=_noise(0), only=mid),
        ),
        "a matrix a thousand times too small": (
            "unlike_peers",
            dict(change=lambda n, x: 1e-3 * x, only=f"{mid}attn_output.w"),
        ),
        "one row hundreds of times too large": (
            "large_rows",
            dict(change=_row(10.0), only=f"{low}ffn_up"),
        ),
        "tokens in another order": (
            "tokenizer_order",
            dict(metadata={"tokenizer.ggml.tokens": mixed}),
        ),
        "EOS beyond the vocabulary": (
            "special_tokens",
            dict(metadata={"tokenizer.ggml.eos_token_id": len(tokens) - 1}),
        ),
    }


def look(path: Path, dtype: str) -> tuple[list[str], dict, list[str]]:
    """Findings (as lines), figures of the probe, and answers."""
    target = open_target(f"{path}@dense:{dtype}")
    mesh = sharding.make_local_mesh(1)
    found, model = examine.of_files(target.checkpoint), target.load(mesh)
    more, figures = examine.of_logits(model)
    last, answers = examine.of_answers(model)
    lines = [f"{f.detector}: {f.evidence}" for f in found + more + last]
    return lines, figures, answers


def main() -> int:
    """Runs all; returns the exit status."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("model", type=Path)
    flags.add_argument("--work", type=Path, required=True)
    flags.add_argument("--dtype", default="bfloat16")
    flags.add_argument("--only", default="", help="those whose name contains this")
    flags.add_argument("--json", type=Path, help="findings and figures of each model")
    args = flags.parse_args()
    runtime.configure()
    table = open_table(args.model)
    args.work.mkdir(parents=True, exist_ok=True)
    path, good, kept = args.work / "model.gguf", True, {}

    def one(name: str, expected: str | None, make: Callable[[], Path]) -> None:
        nonlocal good  # None: whatever is found
        if args.only and args.only not in name:
            return
        start = time.monotonic()
        try:
            where = make()
            lines, figures, answers = look(where, args.dtype)
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
        kept[name] = {"findings": lines, "figures": short, "seconds": round(seconds, 1)}
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
    if args.json:
        args.json.write_text(json.dumps({"model": args.model.name, "found": kept}, indent=1) + "\n")
    print("all as they should be" if good else "SOME ARE WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
