"""Tries a published model: every layer and the logits against Transformers, packed against not.

    pip install -e '.[parity]' && python -m scripts.checks.parity MODEL.gguf --length=640

Both compute in float32 on random ids, of which a window, if the model has one, should see fewer
than `--length`. Prints the largest relative error of a layer, that of the last logits, packed and
dequantized, bytes and seconds. `--no_torch` leaves Transformers out.
Exit status: 0 within 1e-4, 1 beyond it, 2 bad input.
"""

import argparse
import itertools
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from kdjax.errors import reporting
from kdjax.models.model import Model, load

MOST_ERROR = 1e-4
_LOGITS = 16  # last positions whose logits are compared


def run(model: Model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Layers `[L, B, T, D]`, the last logits `[B, 16, V]`, and seconds of a second call."""
    functions: Any = model.functions
    at = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    @jax.jit
    def forward(params: Any) -> Any:
        decoder = nnx.merge(functions.graph, params)
        where = tokens, np.ones_like(tokens), at
        hidden, layers = decoder.hidden_and_layers(*where, keep_layers=True)
        return layers, decoder.unembed(hidden[:, -_LOGITS:])

    with model.precision():
        jax.block_until_ready(forward(model.params))
        begun = time.perf_counter()
        layers, logits = jax.block_until_ready(forward(model.params))
    return np.asarray(layers), np.asarray(logits), time.perf_counter() - begun


def run_transformers(path: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Runs the model by torch, as `run` does."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    where: dict[str, Any] = dict(pretrained_model_name_or_path=path)
    if path.is_file():
        where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    captured: list[Any] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _m, _i, out: captured.append(out[0] if isinstance(out, tuple) else out)
        )
    begun = time.perf_counter()
    with torch.no_grad():
        ids = torch.from_numpy(tokens).long()
        logits = model(input_ids=ids, logits_to_keep=_LOGITS).logits
    seconds = time.perf_counter() - begun
    return np.stack([layer.numpy() for layer in captured]), logits.numpy(), seconds


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference over that of what is wanted."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def compare(path: Path, length: int, *, torch: bool) -> dict[str, Any]:
    """The figures of one model."""
    figures: dict[str, Any] = {"model": path.name}
    made = {}
    for weights in ("packed", "dense") if path.suffix == ".gguf" else ("dense",):
        model = load(path, weights=weights, dtype="float32")
        assert model.spec is not None and model.checkpoint is not None
        table, spec = model.checkpoint.table, model.spec
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, (1, length))
        made[weights] = run(model, tokens.astype(np.int32))
        figures[f"{weights} seconds"] = round(made[weights][2], 2)
        figures[f"{weights} bytes"] = model.resident_bytes
        figures |= {"what": model.checkpoint.describe(), "window": spec.window}
        figures["types"] = dict(Counter(table.info(name).dtype for name in table))
    if torch:
        made["transformers"] = run_transformers(path, tokens.astype(np.int32))
        figures["transformers seconds"] = round(made["transformers"][2], 2)
    names = list(made)
    for name, other in itertools.pairwise(names):
        pairs = zip(made[name][0], made[other][0], strict=True)
        figures[f"{name} to {other}: layers"] = max(relative(a, b) for a, b in pairs)
        figures[f"{name} to {other}: logits"] = relative(made[name][1], made[other][1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return figures | {"peak bytes": peak}


@reporting
def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--length", type=int, default=640, help="positions")
    parser.add_argument("--no_torch", action="store_true", help="only packed against dequantized")
    args = parser.parse_args()
    figures = compare(args.model, args.length, torch=not args.no_torch)
    print(json.dumps(figures, indent=1))
    errors = [value for key, value in figures.items() if " to " in key]
    return int(max(errors, default=0.0) > MOST_ERROR)


if __name__ == "__main__":
    sys.exit(main())
