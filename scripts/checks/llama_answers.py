"""Lets llama.cpp write the answers to HumanEval and MBPP; kdjax's sandbox judges them.

    python -m scripts.checks.llama_answers student.gguf --humaneval=HumanEval.jsonl.gz \\
        --wording=all --json=out.json [--against=kdjax.json]

A GGUF file is served by llama.cpp's own server (`pip install xllamacpp`, on a CPU; or one that
serves the same file already, with `--server=URL`, such as `llama-server -np 64 -c 131072 -ngl 99`
on a GPU), which reads the ids of the very prompts of `kdjax evaluate` and answers greedily, with
`--wording=all` in its three wordings. The JSON is that of `kdjax evaluate`, so that
`scripts.checks.compare_passk` pairs two of them; `--against` counts how many answers and verdicts
are those that another writer of the same file has. Exit status: 0 done, 2 bad input, 77 xllamacpp
is missing.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdjax.errors import UserError, reporting
from kdjax.evaluation import passk, problems, sandbox, table
from kdjax.formats.files import check_place
from kdjax.models.decoding import Completion
from kdjax.models.tokenizer import load_tokenizer
from scripts.checks import compare_passk

SKIPPED = 77


# Runs apart, as llama.cpp's server ends with its process only.
_SERVER = """
import json, sys, xllamacpp

settings = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.warmup, params.n_gpu_layers = settings["model"], False, 0
params.verbosity = 1  # no line a token
params.n_ctx, params.n_parallel = settings["slots"] * settings["positions"], settings["slots"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
if settings["draft"]:
    draft, kinds = params.speculative.draft, xllamacpp.common_speculative_type
    draft.n_max, draft.n_min, draft.p_min = settings["most"], 0, settings["least"]
    if settings["draft"] == "own":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
    else:
        draft.mparams.path = settings["draft"]
        kind = "COMMON_SPECULATIVE_TYPE_DRAFT_" + settings["kind"].upper()
        params.speculative.types = [getattr(kinds, kind)]
server = xllamacpp.Server(params)
print("ADDRESS", server.listening_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def serve(
    model: Path,
    *,
    draft: str | Path = "",
    kind: str = "simple",
    most: int = 1,
    least: float = 0.0,
    slots: int = 2,
    positions: int = 256,
    threads: int = 2,
) -> Iterator[str]:
    """The address of a llama.cpp server of a GGUF file, on the CPU; it ends with the context.

    `draft` is a file whose model drafts at most `most` ids a pass, or "own", the file's own block;
    `kind` is the file's, `simple`, `dspark`, `dflash` or `eagle3`; its drafts end before one of
    less confidence than `least`.
    Raises `UserError` with the end of its log if it does not begin.
    """
    settings = dict(model=str(model), draft=str(draft), most=most, slots=slots)
    settings |= dict(kind=kind, least=least)
    settings |= dict(positions=positions, threads=threads)
    command = [sys.executable, "-c", _SERVER, json.dumps(settings)]
    with tempfile.TemporaryFile("w+") as log:
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        with subprocess.Popen(command, text=True, **pipes) as server:
            try:
                lines = iter(server.stdout or ())
                address = next((line.split()[-1] for line in lines if "ADDRESS" in line), "")
                if not address:
                    log.seek(0)
                    raise UserError(f"{model}: llama.cpp does not serve it.\n{log.read()[-2000:]}")
                yield address
            finally:
                server.kill()


class Writer:
    """A llama.cpp server that writes `slots` answers at a time."""

    def __init__(self, address: str, args: argparse.Namespace) -> None:
        self._address, self._slots, self._most = address, args.slots, args.max_tokens
        ask(address, "/health")

    def answer(self, prompts: list[list[int]], stops: tuple[str, ...]) -> list[Completion]:
        """A `passk.Generate`."""
        with concurrent.futures.ThreadPoolExecutor(self._slots) as pool:
            return list(pool.map(lambda ids: self._answer(ids, stops), prompts))

    def _answer(self, ids: list[int], stops: tuple[str, ...]) -> Completion:
        asked = dict(prompt=ids, n_predict=self._most, temperature=0.0, stop=list(stops))
        found = ask(self._address, "/completion", asked | {"cache_prompt": False})
        reason = "length" if found["stop_type"] == "limit" else "stop"
        return Completion([], found["content"], reason, [])


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON that a running llama.cpp server answers. Raises `UserError` if there is none."""
    head = {"Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, head)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise UserError(
            f"--server={url}: {error}; expected llama.cpp's server, as http://localhost:8080."
        ) from None


def count_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, int]:
    """How many problems both have, and of how many answer and verdict are the same."""
    one, other = ({x["task"]: x for x in found["results"]} for found in (ours, theirs))
    both = sorted(one.keys() & other.keys())
    return {
        "problems": len(both),
        "answers": sum(one[task]["answer"] == other[task]["answer"] for task in both),
        "verdicts": sum(one[task]["reason"] == other[task]["reason"] for task in both),
    }


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    add("model", type=Path, help="a GGUF file")
    add("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz")
    add("--mbpp", type=Path, metavar="FILE", help="mbpp.jsonl")
    words = "all: three wordings, as `kdjax evaluate` has them"
    add("--wording", choices=(*problems.WORDINGS, "all"), default="instruct", help=words)
    add("--limit", type=int, default=0, help="only the first problems of each; 0: all")
    add("--max-tokens", type=int, default=768, help="of an answer")
    add("--positions", type=int, default=2048, help="of a slot")
    add("--slots", type=int, default=4, help="answers at a time")
    add("--server", default="", metavar="URL", help="of a llama-server that serves the file")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--against", type=Path, metavar="FILE", help="JSON of another writer of the same file")
    add("--json", type=Path, required=True, help="where the figures and answers go")
    add("--allow-unsandboxed", action="store_true", help="see `kdjax evaluate`")
    return flags


def judge(args: argparse.Namespace) -> dict[str, Any]:
    """The document of `kdjax evaluate` with llama.cpp's answers."""
    paths = {
        name: path for name in problems.BENCHMARKS if (path := getattr(args, name)) is not None
    }
    if not paths:
        raise UserError("found no problems; expected --humaneval=FILE or --mbpp=FILE.")
    first, *others = problems.COMPARED if args.wording == "all" else (args.wording,)
    ways = {"": first} | {f" {wording}": wording for wording in others}
    asked = {
        f"{name}{way}": (problems.BENCHMARKS[name](path)[: args.limit or None], wording)
        for name, path in paths.items()
        for way, wording in ways.items()
    }
    sandbox.check(args.allow_unsandboxed)
    tokenizer = load_tokenizer(args.model)
    if first in problems.CHATS and not tokenizer.chat_template:
        raise UserError(f"{args.model}: found no chat template; expected --wording=base or bare.")
    settings = passk.Settings(
        batch_size=args.slots,
        room=args.positions - args.max_tokens,
        allow_unsandboxed=args.allow_unsandboxed,
    )
    document: dict[str, Any] = {"target": str(args.model), "writer": "llama.cpp", "broken": []}
    sizes = dict(slots=args.slots, positions=args.positions, threads=args.threads)
    served = contextlib.nullcontext(args.server) if args.server else serve(args.model, **sizes)
    with served as address:
        writer = Writer(address, args)
        benchmarks = [
            passk.Benchmark(of, writer.answer, dataclasses.replace(settings, wording=wording))
            for of, wording in asked.values()
        ]
        document |= zip(asked, passk.run_benchmarks(benchmarks, tokenizer), strict=True)
    return document


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    args = parser().parse_args(argv)
    if not args.server and importlib.util.find_spec("xllamacpp") is None:
        print("skipped: `pip install xllamacpp`")
        return SKIPPED
    other = compare_passk.read(args.against) if args.against else {}
    check_place(args.json)
    document = judge(args)
    for name in (x for x in document if x.partition(" ")[0] in problems.BENCHMARKS):
        print("\n".join(table.describe_benchmark(name, document[name])))
        if name in other:
            document[name]["equal"] = equal = count_equal(document[name], other[name])
            print(f"  as {args.against}: " + ", ".join(f"{v} {k}" for k, v in equal.items()))
    table.write(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
