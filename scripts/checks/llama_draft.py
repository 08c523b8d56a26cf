"""Counts how many of a draft's tokens llama.cpp's server keeps, against another draft's.

    llama-server -m big.gguf -md draft.gguf -ngl 99 -ngld 99 -np 16 -c 32768 \\
        --spec-type draft-simple --spec-draft-n-max 1 --spec-draft-p-min 0 \\
        --spec-draft-sampling probabilistic
    python -m scripts.checks.llama_draft big.gguf --server=http://localhost:8080 \\
        --prompts=prompts.jsonl --count=128 --temperature=1 --json=trained.json \\
        [--against=published.json]

The counters are the server's own (`draft_n`, `draft_n_accepted` of each answer). With at most one
token drafted a pass (`--spec-draft-n-max 1`) each is judged; of more, those behind a rejected one
are judged by nobody. `probabilistic` is the rejection rule of speculative sampling; by default a
draft's likeliest id must be the one that the big model draws. `--against` tells how much fewer are
rejected than in another file of the same prompts, with the interval that holds for 95% of such
sets of prompts. At T = 1 a server draws from all ids, on one core: 128 tokens of 16 answers took
19 s beside an H200. Give several servers, and few tokens. Exit status: 0 done, 2 bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import UserError, reporting
from kdjax.evaluation.drafting import choose_prompts
from kdjax.models.tokenizer import load_tokenizer
from scripts.checks.llama_answers import ask

# Every id may be drawn, by its probability alone.
_WHOLE = dict(top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repeat_penalty=1.0, cache_prompt=False)


def fewer_rejected(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[float]:
    """By what share fewer drafts are rejected, and the ends of its interval of 95%.

    Both have (accepted, drafted) of the same prompts in order; prompts are drawn anew, each with
    both its answers. Empty where a set without one rejected makes the interval meaningless.
    """
    counts = np.array([before, after], float)
    drawn = np.random.default_rng(0).integers(0, len(before), (2000, len(before)))
    accepted, drafted = np.moveaxis(counts[:, [range(len(before)), *drawn]].sum(2), -1, 0)
    rejected = 1 - accepted / drafted
    if not rejected[0].all():
        return []
    fewer = 1 - rejected[1] / rejected[0]
    return [float(fewer[0]), *np.quantile(fewer[1:], [0.025, 0.975]).tolist()]


def count(args: argparse.Namespace) -> dict[str, Any]:
    """The server's counters of each prompt, in order, and their sums."""
    servers = args.server.split(",")
    for server in servers:
        ask(server, "/health")
    tokenizer = load_tokenizer(args.big)
    prompts = choose_prompts(args.prompts, tokenizer, count=args.count, most=1024)

    def answer(number: int) -> list[int]:
        body = dict(prompt=prompts[number], n_predict=args.max_tokens, seed=number + 1)
        server = servers[number % len(servers)]
        found = ask(server, "/completion", body | _WHOLE | {"temperature": args.temperature})
        return [found["timings"].get(name, 0) for name in ("draft_n_accepted", "draft_n")]

    with ThreadPoolExecutor(args.slots * len(servers)) as pool:
        rows = list(pool.map(answer, range(len(prompts))))
    accepted, drafted = map(sum, zip(*rows, strict=True))
    if not drafted:
        raise UserError(
            f"--server={args.server}: nothing was drafted; expected a llama-server with -md and "
            "--spec-type draft-simple, whose log says why a draft is refused."
        )
    kept = dict(accepted=accepted, drafted=drafted, share=accepted / drafted, rows=rows)
    return kept | dict(temperature=args.temperature, max_tokens=args.max_tokens)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Counts, compares, and writes what it found; returns the exit status."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = flags.add_argument
    add("big", type=Path, help="the GGUF file that is served, for its tokenizer")
    add("--server", required=True, metavar="URL[,URL...]", help="prompts are dealt out in turn")
    add("--prompts", required=True, help="text or conversations: files, globs")
    add("--count", type=int, default=128, help="of the prompts")
    add("--max-tokens", type=int, default=96, help="of an answer")
    add("--temperature", type=float, default=1.0)
    add("--slots", type=int, default=16, help="answers at a time, of each server")
    add("--against", type=Path, metavar="FILE", help="JSON of another draft")
    add("--json", type=Path, required=True, help="where the counters go")
    args = flags.parse_args(argv)
    other = json.loads(args.against.read_text()) if args.against else None
    found = count(args)
    print(f"{found['accepted']} of {found['drafted']} kept, {found['share']:.4f}")
    if other:
        if len(other["rows"]) != len(found["rows"]):
            raise UserError(f"{args.against}: found other prompts; expected the same.")
        found["fewer"] = fewer = fewer_rejected(other["rows"], found["rows"])
        print("fewer rejected, and 95% of it: " + ", ".join(f"{x:.1%}" for x in fewer))
    args.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
