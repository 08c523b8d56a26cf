"""Lets llama.cpp write the answers to HumanEval and MBPP; kdjax's sandbox judges them.

    python -m scripts.checks.llama_answers student.gguf --humaneval=HumanEval.jsonl.gz \\
        --wording=request --json=out.json [--against=kdjax.json]

A GGUF file is served by llama.cpp's own server (`pip install xllamacpp`, on a CPU; or one that
serves the same file already, with `--server=URL`, such as `llama-server -np 64 -c 131072 -ngl 99`
on a GPU), which reads the ids of the very prompts of `kdjax evaluate` and answers greedily. The
JSON is that of `kdjax evaluate`, so that `scripts.checks.compare_passk` pairs two of them;
`--against` counts how many answers and verdicts are those that another writer of the same file
has. Exit status: 0 done, 2 bad input, 77 xllamacpp is missing.
"""

import argparse
import concurrent.futures
import functools
import importlib.util
import json
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdjax.errors import UserError, reporting
from kdjax.evaluation import passk, problems, sandbox, table
from kdjax.models.decoding import Completion
from kdjax.models.tokenizer import load_tokenizer

SKIPPED = 77


class Writer:
    """llama.cpp's server of one file, with `slots` answers at a time.

    Its own ends with the process; one of `--server` goes on.
    """

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        self._slots, self._most = args.slots, args.max_tokens
        if args.server:
            ask(args.server, "/health")
            self._complete = functools.partial(ask, args.server, "/completion")
            return
        llama = importlib.import_module("xllamacpp")
        params = llama.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel = args.slots * args.positions, args.slots
        params.warmup, params.n_gpu_layers, params.verbosity = False, 0, 0  # no line a token
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
        self._complete = llama.Server(params).handle_completions

    def answer(self, prompts: list[list[int]], stops: tuple[str, ...]) -> list[Completion]:
        """A `passk.Generate`."""
        with concurrent.futures.ThreadPoolExecutor(self._slots) as pool:
            return list(pool.map(lambda ids: self._answer(ids, stops), prompts))

    def _answer(self, ids: list[int], stops: tuple[str, ...]) -> Completion:
        asked = dict(prompt=ids, n_predict=self._most, temperature=0.0, stop=list(stops))
        found = self._complete(asked | {"cache_prompt": False})
        if "choices" in found:  # the library answers as OpenAI's interface, the server as its own
            (choice,) = found["choices"]
            text, cut = choice["text"], choice["finish_reason"] == "length"
        elif "content" in found:
            text, cut = found["content"], found["stop_type"] == "limit"
        else:
            raise RuntimeError(f"llama.cpp: {json.dumps(found)[:300]}")
        return Completion([], text, "length" if cut else "stop", [])


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
    add("--wording", choices=problems.WORDINGS, default="instruct")
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
    asked = {
        name: problems.BENCHMARKS[name](path)[: args.limit or None] for name, path in paths.items()
    }
    sandbox.check(args.allow_unsandboxed)
    tokenizer = load_tokenizer(args.model)
    if args.wording in problems.CHATS and not tokenizer.chat_template:
        raise UserError(f"{args.model}: found no chat template; expected --wording=base or bare.")
    settings = passk.Settings(
        wording=args.wording,
        batch_size=args.slots,
        room=args.positions - args.max_tokens,
        allow_unsandboxed=args.allow_unsandboxed,
    )
    writer = Writer(args.model, args)
    document: dict[str, Any] = {"target": str(args.model), "writer": "llama.cpp", "broken": []}
    for name, benchmark in asked.items():
        document[name] = passk.run_benchmark(benchmark, tokenizer, writer.answer, settings)
    return document


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    args = parser().parse_args(argv)
    if not args.server and importlib.util.find_spec("xllamacpp") is None:
        print("skipped: `pip install xllamacpp`")
        return SKIPPED
    other = json.loads(args.against.read_text()) if args.against else {}
    document = judge(args)
    for name in problems.BENCHMARKS:
        if name not in document:
            continue
        print("\n".join(table.describe_benchmark(name, document[name])))
        if name in other:
            document[name]["equal"] = equal = count_equal(document[name], other[name])
            print(f"  as {args.against}: " + ", ".join(f"{v} {k}" for k, v in equal.items()))
    table.write(args.json, document)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the server's threads would not end
