"""Compares two caches of the same rows: what a server said of its answers, and kdjax's own teacher.

    kdjax cache --config=CONFIG --from=answers.jsonl --out=served
    kdjax cache --config=CONFIG --config.data.train=answers.jsonl --k=64 --all --out=own
    python -m scripts.checks.served served own --json=served.json

Figures are means over the answers' tokens, in nats: the KL of the one teacher from the other over
the k + 1 outcomes of the first, the ids that both have, and the KL of a uniform student from each.
`--ask=MODEL.gguf` writes answers.jsonl first, by llama.cpp's own server (xllamacpp).
Exit status: 0 the teachers agree (KL below --most), 1 they do not, 2 bad input.
"""

import argparse
import concurrent.futures
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.data.teacher_cache import TeacherCache, open_cache, read_index
from kdjax.errors import UserError, reporting

_QUESTIONS = (
    "Write a Python function that adds two numbers.",
    "What does the keyword yield do?",
    "Sort a list of names in place.",
    "Read a file line by line in Python.",
    "What is a decorator?",
    "Write a regular expression for a date.",
    "How do I reverse a string?",
    "Explain a hash table in two sentences.",
)


def ask(model: Path, out: Path, tokens: int, k: int) -> None:
    """Writes a server's answers to the questions, chats and every fourth a completion."""
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(model), 2048, 4, False
    server = llama.Server(params)

    def answer(number: int) -> dict[str, Any]:
        text, settings = _QUESTIONS[number], {"temperature": 0.8, "seed": number}
        if number % 4 == 3:
            prompt = f'def f{number}(path):\n    """{text}"""\n'
            body = settings | {"prompt": prompt, "n_predict": tokens, "n_probs": k}
            return {"prompt": prompt, "response": server.handle_completions(body)}
        messages = [{"role": "user", "content": text}]
        body = settings | {"messages": messages, "max_tokens": tokens}
        body |= {"logprobs": True, "top_logprobs": k}
        return {"messages": messages, "response": server.handle_chat_completions(body)}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        lines = [json.dumps(line) + "\n" for line in pool.map(answer, range(len(_QUESTIONS)))]
    out.write_text("".join(lines))


def _read(cache: TeacherCache) -> list[tuple[dict[int, float], float, float]]:
    """For each position of an answer: log-probabilities by id, the tail's, the label's."""
    positions = []
    for row in range(sum(cache.spec.sides)):
        columns = cache.read(row)
        ids = columns["teacher_ids"].astype(np.int64) @ np.array([1, 256, 65536])
        odds = columns["teacher_odds"][:, 1].astype(np.float64)
        logits = columns["teacher_logits"].astype(np.float64)
        inside = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
        inside -= np.logaddexp(0, odds)[:, None]
        tail = -np.logaddexp(0, -odds)
        for at in range(cache.spec.positions):
            by_id = dict(zip(ids[at].tolist(), inside[at].tolist(), strict=True))
            label = float(columns["teacher_label"][at])
            positions.append((by_id, float(tail[at]), label))
    return positions


def compare(served: TeacherCache, own: TeacherCache) -> dict[str, Any]:
    """The figures; positions count where the server has an answer, any but its placeholder."""
    real, kls, uniform, common, labels, first = served.spec.vocabulary[1], [], [], [], [], []
    for (a, a_tail, a_label), (b, b_tail, b_label) in zip(_read(served), _read(own), strict=True):
        if list(a) == list(range(served.spec.k)):  # no token of an answer
            continue
        shared = [i for i in a if i in b]
        p, q = (np.array([side[i] for i in shared]) for side in (a, b))
        rest = [np.log(max(1e-12, 1 - np.exp(side).sum())) for side in (p, q)]
        kls.append(float(np.exp(p) @ (p - q) + np.exp(rest[0]) * (rest[0] - rest[1])))
        pair = []
        for side, tail in ((a, a_tail), (b, b_tail)):
            x = np.array(list(side.values()))
            others = np.log((real - len(x)) / real)
            pair.append(float(np.exp(x) @ (x + np.log(real)) + np.exp(tail) * (tail - others)))
        uniform.append(pair)
        common.append(len(shared) / len(a))
        labels.append(abs(a_label - b_label))
        first.append(next(iter(a)) == next(iter(b)))
    means = np.mean(uniform, axis=0)
    return {
        "positions": len(kls),
        "k": served.spec.k,
        "kl": float(np.mean(kls)),
        "kl_largest": float(np.max(kls)),
        "ids_in_common": float(np.mean(common)),
        "same_first_id": float(np.mean(first)),
        "label_log_prob_difference": float(np.mean(labels)),
        "kl_uniform_served": float(means[0]),
        "kl_uniform_own": float(means[1]),
    }


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("served", type=Path, nargs="?", help="cache of a server's answers")
    parser.add_argument("own", type=Path, nargs="?", help="cache of the same rows by kdjax")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--most", type=float, default=0.01, help="KL above which they disagree")
    parser.add_argument("--ask", type=Path, help="GGUF file that answers; writes answers.jsonl")
    parser.add_argument("--answers", type=Path, default=Path("answers.jsonl"))
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    parser.add_argument("--k", type=int, default=64, help="alternatives a token")
    args = parser.parse_args(argv)
    if args.ask:
        ask(args.ask, args.answers, args.tokens, args.k)
        return 0
    if args.own is None:
        raise UserError("two caches are to be given, or --ask=MODEL.gguf.")
    served, own = (open_cache(path, read_index(path)[0]) for path in (args.served, args.own))
    if served.spec.rows != own.spec.rows:
        raise UserError(f"{args.served} and {args.own} are of other rows: make both of one text.")
    figures = compare(served, own)
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(not figures["kl"] < args.most)


if __name__ == "__main__":
    sys.exit(main())
