"""Lets llama.cpp judge drafts: how many of their tokens its server drafts and accepts.

    python -m scripts.checks.llama_draft BIG.gguf --draft=published.gguf,student.gguf \
        --prompts=prompts.jsonl --count=12 --max-tokens=96

For each draft, and each of `--ways`, the server answers the same prompts: greedily; at T = 1 as
it does by default, where the draft's likeliest id must be the one that the big model draws
(`matched`); and at T = 1 with the rejection rule of speculative sampling (`probabilistic`).
Printed are its own counters, its tokens/s with the draft (with `--alone` also without), and why it
would refuse one. `--p-min` is the least probability of a drafted token, below which it stops
drafting: at 0 no draft is withheld. With `--draft-tokens=1` each drafted token is judged; of more,
those behind a rejected one are drafted and judged by nobody. Of each draft but the first is told
how much fewer of its tokens are rejected than of the first's, with an interval over the prompts.

Needs `xllamacpp` (PyPI), here or in the interpreter that `--python` names. Exit status: 0 done, 2
bad input, 77 xllamacpp is missing.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdjax.errors import UserError, reporting
from kdjax.evaluation.drafting import choose_prompts
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.drafts import why_refused

SKIPPED = 77
# Temperature, and whether drafts are accepted by the rejection rule.
WAYS = {"greedy": (0.0, False), "matched": (1.0, False), "probabilistic": (1.0, True)}

# Runs in the interpreter that has xllamacpp: a request on standard input, counters on standard
# output behind a mark, as the library writes its log there too.
_WORKER = r"""
import json, sys, time
import xllamacpp

request = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = request["big"]
params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 4096, 1, False, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
if request["draft"]:
    draft = params.speculative.draft
    draft.mparams.path = request["draft"]
    draft.n_max, draft.n_min, draft.p_min = request["n_max"], 0, request["p_min"]
    draft.probabilistic = request["probabilistic"]
    draft.n_gpu_layers = 0
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = request["threads"]
    params.speculative.types = [
        xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
    ]
server = xllamacpp.Server(params)
rows = []
for seed, prompt in zip(request["seeds"], request["prompts"]):
    answer = server.handle_completions(
        dict(
            prompt=prompt, n_predict=request["max_tokens"], temperature=request["temperature"],
            seed=seed, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repeat_penalty=1.0,
            cache_prompt=False,
        )
    )
    answer = json.loads(answer) if isinstance(answer, str) else answer
    timings = answer["timings"]
    rows.append([timings.get("draft_n_accepted", 0), timings.get("draft_n", 0)])
    rows[-1] += [timings["predicted_n"], timings["predicted_ms"]]
print("COUNTED" + json.dumps(rows), flush=True)
import os
os._exit(0)
"""


class Counted(NamedTuple):
    """The server's counters of an answer."""

    accepted: int
    drafted: int
    tokens: int
    milliseconds: float


def count(python: str, request: dict[str, Any]) -> list[Counted]:
    """The server's counters of each prompt. Raises `UserError` with the end of its log."""
    done = subprocess.run(
        [python, "-c", _WORKER], input=json.dumps(request), capture_output=True, text=True
    )
    lines = [x for x in done.stdout.splitlines() if "COUNTED[" in x]
    if not lines:
        raise UserError(f"llama.cpp failed on {request['draft']}:\n{done.stderr[-2000:]}")
    return [Counted(*row) for row in json.loads(lines[-1].partition("COUNTED")[2])]


def count_beside(python: str, request: dict[str, Any], workers: int) -> list[Counted]:
    """Likewise, of as many servers at once, each with every so manyth prompt."""
    seeds = range(1, len(request["prompts"]) + 1)
    parts = [
        request | {"prompts": request["prompts"][i::workers], "seeds": list(seeds[i::workers])}
        for i in range(min(workers, len(seeds)))
    ]
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(functools.partial(count, python), parts))
    return [found[i % workers][i // workers] for i in range(len(seeds))]


def fewer_rejected(before: Sequence[Counted], after: Sequence[Counted]) -> list[float]:
    """By what share fewer drafts are rejected, and the ends of its interval of 95%.

    The interval is that of prompts drawn anew, each with both its answers.
    """
    counts = np.array([[x[:2] for x in before], [x[:2] for x in after]], float)
    drawn = np.random.default_rng(0).integers(0, len(before), (2000, len(before)))
    accepted, drafted = np.moveaxis(counts[:, [range(len(before)), *drawn]].sum(2), -1, 0)
    rejected = 1 - accepted / drafted
    if not rejected[0].all():  # too few for an interval
        return []
    fewer = 1 - rejected[1] / rejected[0]
    return [float(fewer[0]), *np.quantile(fewer[1:], [0.025, 0.975]).tolist()]


def has_server(python: str) -> bool:
    """Whether xllamacpp is there."""
    return not subprocess.run([python, "-c", "import xllamacpp"], capture_output=True).returncode


def run(args: argparse.Namespace) -> None:
    """Prints a line of JSON for each draft in each way."""
    big = open_checkpoint(args.big)
    prompts = choose_prompts(args.prompts, big.tokenizer, count=args.count, most=1024)
    request = dict(big=str(args.big), prompts=prompts, max_tokens=args.max_tokens)
    request |= dict(n_max=args.draft_tokens, p_min=args.p_min, threads=args.threads)
    first: dict[str, list[Counted]] = {}
    for draft in [*[""] * args.alone, *args.draft.split(",")]:
        if draft:
            reason = why_refused(big.header.metadata, open_checkpoint(draft).header.metadata)
            if reason:
                print(json.dumps({"draft": draft, "refused": reason}), flush=True)
                continue
        for way in args.ways:
            temperature, probabilistic = WAYS[way]
            if probabilistic and not draft:
                continue
            how = dict(draft=draft, temperature=temperature, probabilistic=probabilistic)
            found = count_beside(args.python, request | how, args.workers)
            row: dict[str, Any] = {"draft": draft or "none", "way": way}
            accepted, drafted, tokens, milliseconds = map(sum, zip(*found, strict=True))
            if drafted:
                row |= {"accepted": accepted, "drafted": drafted}
                row |= {"share": round(accepted / drafted, 4)}
                row |= {"accepted a pass": round(accepted / (tokens - accepted), 3)}
                if way in first:
                    fewer = fewer_rejected(first[way], found)
                    row |= {"fewer rejected, and 95% of it": [round(x, 4) for x in fewer]}
                first.setdefault(way, found)
            row |= {"tokens": tokens, "tokens/s": round(1e3 * tokens / milliseconds, 2)}
            print(json.dumps(row), flush=True)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    flags = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    flags.add_argument("big", type=Path, help="a GGUF file")
    flags.add_argument("--draft", required=True, help="GGUF files, joined by commas")
    flags.add_argument("--prompts", required=True, help="text or conversations: files, globs")
    flags.add_argument("--alone", action="store_true", help="also without a draft")
    flags.add_argument("--count", type=int, default=12, help="of the prompts")
    flags.add_argument("--max-tokens", type=int, default=96)
    flags.add_argument("--draft-tokens", type=int, default=5, help="at most so many a pass")
    flags.add_argument("--p-min", type=float, default=0.0)
    flags.add_argument("--threads", type=int, default=2, help="of each server")
    flags.add_argument("--workers", type=int, default=1, help="servers at once")
    flags.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    flags.add_argument("--python", default=sys.executable, help="interpreter with xllamacpp")
    args = flags.parse_args(argv)
    if not has_server(args.python):
        print(f"skipped: {args.python} has no xllamacpp (pip install xllamacpp)")
        return SKIPPED
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
