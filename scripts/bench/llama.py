"""Generation of one row on a CPU beside llama.cpp: equal weights, equal threads, by turns.

    taskset -c 0-3 python -m scripts.bench.llama MODEL.gguf --threads=4 --forms=F32,BF16,packed

Of each form both read one file: MODEL itself as it is ("packed"), or its numbers written as F32 or
BF16 to `--folder`. llama.cpp runs in a process of its own (`xllamacpp`, PyPI, here or in the
interpreter that `--python` names) with so many threads; those of XLA are bound by `taskset`. Both
read the same prompt and write the same number of ids greedily, again and again by turns; counted is
the time behind the prompt. Prints a line of JSON a form, with the median of the ratios of turns.
Exit status: 0 done, 77 xllamacpp is missing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.device import runtime
from kdjax.errors import UserError, reporting
from kdjax.formats import open_table
from kdjax.formats.blocks import decode, encode
from kdjax.formats.gguf import write_gguf
from kdjax.models import decoding
from kdjax.models.model import Model, load
from scripts.checks.llama_draft import SKIPPED, has_server

# Name: weights and dtype of `kdjax.load`, and `general.file_type` of the file.
FORMS = {
    "F32": ("dense", "float32", 0),
    "BF16": ("dense", "bfloat16", 32),
    "packed": ("packed", "float32", -1),
}

# Runs in the interpreter that has xllamacpp: a line of JSON asks, one behind a mark answers.
_WORKER = r"""
import json, sys
import xllamacpp

path, threads = sys.argv[1], int(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 1024, 1, True, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
for line in sys.stdin:
    asked = json.loads(line)
    answer = server.handle_completions(
        dict(asked, temperature=0.0, ignore_eos=True, cache_prompt=False)
    )
    answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
    print("TIMED" + json.dumps(answer["timings"]), flush=True)
import os
os._exit(0)
"""


class Server:
    """llama.cpp with one model."""

    def __init__(self, python: str, path: Path, threads: int):
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        command = [python, "-c", _WORKER, str(path), str(threads)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)

    def rate(self, prompt: str, count: int) -> float:
        """Tokens a second of `count` ids behind the prompt. Raises `UserError` if it fails."""
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        pipes[0].write(json.dumps({"prompt": prompt, "n_predict": count}) + "\n")
        pipes[0].flush()
        line = next((line for line in pipes[1] if "TIMED{" in line), None)
        if line is None:
            raise UserError("llama.cpp ended without an answer: run the same file with its server.")
        timings = json.loads(line.partition("TIMED")[2])
        return 1e3 * timings["predicted_n"] / timings["predicted_ms"]

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def write_as(source: Path, path: Path, dtype: str, file_type: int) -> None:
    """The file's numbers in blocks of another type; vectors stay as they are."""
    table = open_table(source)

    def data(name: str, kind: str) -> Iterator[np.ndarray]:
        raw = table.raw(name)
        for start in range(0, len(raw), 8192):
            part = raw[start : start + 8192]
            yield part if kind != dtype else encode(np.asarray(decode(part, stored[name])), dtype)

    stored = {name: table.info(name).dtype for name in table}
    kinds = {name: dtype if len(table.info(name).shape) > 1 else stored[name] for name in stored}
    metadata = {key: table.metadata[key] for key in table.metadata}
    metadata["general.file_type"] = np.uint32(file_type)
    tensors = []
    for name, kind in kinds.items():
        made = (lambda name=name, kind=kind: data(name, kind)) if kind == dtype else table.raw(name)
        tensors.append((name, kind, table.info(name).shape, made))
    write_gguf(path, metadata, tensors)


def our_rate(model: Model, ids: list[int], count: int) -> float:
    """Tokens a second of about `count` ids, behind the prompt and a few more."""
    calls, times = -(-count // decoding._STEPS), list[float]()
    model.generate(
        [ids],
        decoding.Sampling((1 + calls) * decoding._STEPS),
        on_text=lambda *_: times.append(time.perf_counter()),  # behind each call of the device
    )
    assert len(times) == 1 + calls
    return calls * decoding._STEPS / (times[-1] - times[0])


def compare(form: str, args: argparse.Namespace) -> dict[str, Any]:
    """Rates of both, turn by turn."""
    weights, dtype, file_type = FORMS[form]
    path = args.model
    if file_type >= 0:
        path = args.folder / f"{args.model.stem}-{form}.gguf"
        if not path.exists():
            write_as(args.model, path, form, file_type)
    server = Server(args.python, path, args.threads)
    model = load(str(path), weights=weights, dtype=dtype)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(args.prompt)
    our_rate(model, ids, 8)  # compiles
    server.rate(args.prompt, 8)
    ours, theirs = [], []
    for turn in range(args.turns):
        if turn % 2:
            theirs.append(server.rate(args.prompt, args.count))
            ours.append(our_rate(model, ids, args.count))
        else:
            ours.append(our_rate(model, ids, args.count))
            theirs.append(server.rate(args.prompt, args.count))
    server.close()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "form": form,
        "kdjax tokens/s": ours,
        "llama.cpp tokens/s": theirs,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("model", type=Path, help="a GGUF file")
    add("--folder", type=Path, default=Path("runs/bench"), help="for the files of other types")
    add("--forms", default=",".join(FORMS))
    add("--threads", type=int, default=2, help="of llama.cpp")
    add("--turns", type=int, default=5)
    add("--count", type=int, default=64, help="ids a turn")
    add("--prompt", default="def fibonacci(n):\n")
    add("--python", default=sys.executable, help="interpreter with xllamacpp")
    add("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    if not has_server(args.python):
        print(f"skipped: {args.python} has no xllamacpp (pip install xllamacpp)")
        return SKIPPED
    args.folder.mkdir(parents=True, exist_ok=True)
    runtime.configure()
    print(runtime.device_summary(), flush=True)
    rows = []
    for form in args.forms.split(","):
        rows.append(compare(form, args))
        print(json.dumps(rows[-1], default=lambda x: round(x, 3)), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
