"""How alike two forms of a model are, on text: what quantization, or a way of computing, costs.

    python -m kdjax.fidelity teacher.gguf@dequant:bfloat16 teacher.gguf@q4k \\
        --data=code=corpus/heldout --data=prose='docs/**/*.md'

A and B are forms, as `kdjax.models.checkpoint` explains. One is on the device at a time: hidden
states of the first wait on the host, so that two models fit where one does.

Exit status: 0 done, 2 bad input.
"""

import argparse
import functools
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kdjax.data import pipeline
from kdjax.data.rows import Rows, pack_rows
from kdjax.device import runtime, sharding
from kdjax.errors import UserError
from kdjax.losses.chunked import ComparisonSums, HeadSpec, head_comparison
from kdjax.models.checkpoint import Form, open_form, precision
from kdjax.models.model import align
from kdjax.models.tokenizer import Tokenizer


def compare(
    a: str, b: str, domains: dict[str, str], *, rows: int, seq_len: int, batch_size: int
) -> dict[str, dict[str, float]]:
    """Figures by domain, and over "all" of them: means in nats a token, and two extremes.

    `domains` maps a name to comma-separated files, folders or globs; at most `rows` rows of
    `seq_len` positions are taken of each, spread evenly. Raises `UserError` for files that cannot
    be read and for models of different tokenizers.
    """
    mesh = sharding.make_mesh(-1, 1, 1)
    batch_size = math.lcm(batch_size, sharding.row_shards(mesh))
    first, second = open_form(a), open_form(b)
    narrow, wide = sorted((first, second), key=lambda o: o.spec.vocab_size)
    vocabulary = align(narrow.spec, wide.spec, narrow.tokenizer, wide.tokenizer)
    spec = HeadSpec(1.0, 0.0, vocabulary.width, vocabulary.real, chunk_tokens=512)
    batches = _batches(domains, first.tokenizer, rows, seq_len, batch_size)
    flat = [batch for domain in batches.values() for batch in domain]
    most = max(int(batch["segment_ids"].max()) for batch in flat)

    with precision(first):
        provider = first.provider(mesh, most)
        print(provider.info, file=sys.stderr)
        waiting = [np.asarray(hidden) for hidden in provider.hidden_states(flat, mesh)]
        head = jax.block_until_ready(jax.jit(provider.apply.head)(provider.params))
        del provider
    measure = jax.jit(functools.partial(head_comparison, spec=spec))
    sums: list[ComparisonSums] = []
    with precision(first, second):
        provider = second.provider(mesh, most)
        print(provider.info, file=sys.stderr)
        other = jax.jit(provider.apply.head)(provider.params)
        hidden_b = provider.hidden_states(flat, mesh)
        for one, two, batch in zip(waiting, hidden_b, flat, strict=True):
            text = batch["labels"], batch["weights"]
            sums.append(jax.device_get(measure(one, head, two, other, *text)))
    figures, at = {}, 0
    for name, domain in batches.items():
        figures[name] = _figures(sums[at : at + len(domain)])
        at += len(domain)
    return figures | {"all": _figures(sums)} if len(batches) > 1 else figures


def _batches(domains: dict[str, str], tokenizer: Tokenizer, rows: int, seq_len: int,
             batch_size: int) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    batches = {}
    for name, patterns in domains.items():
        with tempfile.TemporaryDirectory() as folder:
            packed: Rows = pack_rows(
                patterns,
                Path(folder),
                tokenizer=tokenizer,
                seq_len=seq_len,
                end_of_document_id=tokenizer.end_of_text_id,
                max_segments=seq_len,
            )
            batches[name] = list(pipeline.eval_batches(packed, batch_size=batch_size, limit=rows))
    return batches


def _figures(sums: list[ComparisonSums]) -> dict[str, float]:
    values = [[float(x) for x in column] for column in zip(*sums, strict=True)]
    columns = dict(zip(ComparisonSums._fields, values, strict=True))
    extremes = {"max_difference": max, "min_cosine": min}
    count = math.fsum(columns.pop("count"))
    if not count:
        raise UserError("the text has no position to compare: give longer documents.")
    figures = {
        name: extremes[name](column) if name in extremes else math.fsum(column) / count
        for name, column in columns.items()
    }
    for model in "ab":
        figures[f"perplexity_{model}"] = math.exp(min(figures[f"ce_{model}"], 700.0))
    return figures | {"tokens": count}


_LABELS = {
    "kl_ab": "KL(A || B), nats",
    "kl_ba": "KL(B || A), nats",
    "agreement": "top-1 agreement",
    "entropy_a": "entropy of A, nats",
    "entropy_b": "entropy of B, nats",
    "perplexity_a": "perplexity of A",
    "perplexity_b": "perplexity of B",
    "cosine": "cosine of logits, mean",
    "min_cosine": "cosine of logits, least",
    "max_difference": "|logit difference|, most",
    "tokens": "positions",
}


def table(figures: dict[str, dict[str, float]]) -> str:
    """The figures as text, one column a domain."""
    width = max(12, *(len(name) + 2 for name in figures))
    lines = [" " * 26 + "".join(f"{name:>{width}}" for name in figures)]
    for key, label in _LABELS.items():
        form = ",.0f" if key == "tokens" else ".3e" if key.startswith("kl") else ".6g"
        lines.append(f"{label:<26}" + "".join(f"{f[key]:>{width}{form}}" for f in figures.values()))
    return "\n".join(lines)


def _domains(texts: list[str]) -> dict[str, str]:
    """NAME=PATHS, or PATHS, which names itself."""
    split = [text.partition("=") for text in texts]
    return {name: paths if equals else name for name, equals, paths in split}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kdjax.fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="PATH[@dequant|q4k|fp8|fp8_precise[:DTYPE]]")
    parser.add_argument("b", metavar="B")
    text = "text of one domain: folders, globs, files, joined by commas"
    parser.add_argument("--data", action="append", required=True, metavar="[NAME=]PATHS", help=text)
    parser.add_argument("--rows", type=int, default=16, help="rows of each domain, at most")
    parser.add_argument("--seq-len", type=int, default=1024, help="positions a row")
    parser.add_argument("--batch-size", type=int, default=4, help="rows at a time")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args(argv)
    try:
        for name in ("rows", "seq_len", "batch_size"):
            if getattr(args, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be 1 or more.")
        runtime.configure()
        print(runtime.device_summary(), file=sys.stderr)
        figures = compare(args.a, args.b, _domains(args.data), rows=args.rows,
                          seq_len=args.seq_len, batch_size=args.batch_size)  # fmt: skip
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"A = {Form.parse(args.a)}\nB = {Form.parse(args.b)}\n\n{table(figures)}")
    if args.json:
        document = {"a": args.a, "b": args.b, "figures": figures}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
