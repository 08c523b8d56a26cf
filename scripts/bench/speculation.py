"""Speculative generation beside plain generation: tokens/s, and whether the text is the same.

    python -m scripts.bench.speculation BIG.gguf@q4k --draft=SMALL.gguf --draft-tokens=3,5,8

Prompts are the beginnings of files (`--text`) or random ids. The big model is timed alone as well.
With `--impose=0.8,0.9` drafts are accepted at random at these rates instead of by what the models
say, so that files of random weights tell the time of a pair that is not at hand; their text is
nothing. Greedy texts are the same but where rounding chooses between ids that are equally likely;
`widest gap` is the largest difference of their log-probabilities where two texts part.
Prints a line of JSON a measurement. Exit status: 0 done, 2 bad input.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from kdjax.data.text import documents, find_files
from kdjax.device import runtime
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import UserError, reporting
from kdjax.evaluation.drafting import time_pass
from kdjax.models import speculation
from kdjax.models.arch import ArchSpec
from kdjax.models.checkpoint import Form
from kdjax.models.decoder import Compute, functional, initialise
from kdjax.models.decoding import Completion, Sampling
from kdjax.models.model import Model, load
from kdjax.models.weights import to_bits
from scripts.bench.synthetic import QWEN25_SHAPES


def open_model(text: str, *, kernels: bool) -> Model:
    """A file in its form, or of `random:7b` random numbers of that shape, drawn on the device.

    `random:0.5b/8` has 8 layers.
    """
    kind, _, name = text.partition(":")
    if kind != "random":
        form = Form.parse(text)
        return load(form.path, weights=form.weights, dtype=form.dtype)
    shape_name, _, layers = name.partition("/")
    shape = QWEN25_SHAPES[shape_name]
    spec = ArchSpec(
        family="qwen2",
        vocab_size=shape.rows,
        hidden_size=shape.hidden,
        num_layers=int(layers) if layers else shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_width,
        mlp_size=shape.ffn,
        max_positions=32768,
        rope_theta=1e6,
        rms_eps=1e-6,
        tied=shape.tied,
        qkv_bias=True,
    )
    mesh = make_mesh(1, 1, 1, jax.local_devices()[:1])
    placement = Placement.on(mesh) if kernels else Placement(mesh)
    half = jnp.dtype("bfloat16")
    compute = Compute(dtype=half, param_dtype=half, placement=placement)
    params = jax.jit(lambda: initialise(spec, compute, 0))()
    if placement.platform == "cpu":
        params = jax.tree.map(jax.jit(to_bits), params)
    rows = shape.rows
    return Model(functional(spec, compute)[0], params, rows, "random", name, spec, placement)


def read_prompts(args: argparse.Namespace, model: Model) -> list[list[int]]:
    """Ids of `--prompts` prompts of `--prompt-tokens` each."""
    if not args.text:
        rng = np.random.default_rng(0)
        shape = args.prompts, args.prompt_tokens
        return rng.integers(0, 300, shape).tolist()
    tokenizer = model.tokenizer
    assert tokenizer is not None
    read = (tokenizer.encode(d.text) for d in documents(find_files(args.text), tokenizer))
    long = (tuple(ids[: args.prompt_tokens]) for ids in read if len(ids) >= args.prompt_tokens)
    different: dict[tuple[int, ...], None] = {}  # files under one licence begin alike
    while len(different) < args.prompts and (ids := next(long, None)):
        different[ids] = None
    if len(different) < args.prompts:
        raise UserError(
            f"--text={args.text} has {len(different)} different beginnings of {args.prompt_tokens} "
            f"tokens; expected {args.prompts}. Name more text."
        )
    return [list(ids) for ids in different]


@contextlib.contextmanager
def imposing(rate: float | None) -> Iterator[None]:
    """Within it each draft is accepted with probability `rate`, whatever the models say."""
    if rate is None:
        yield
        return

    def judge(logits: Any, draft_logits: Any, drafts: Any, keys: Any, sampling: Any) -> Any:
        draw = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1))))
        accepted = speculation._count_first(draw(keys[:, :-1]) < rate)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]

    with mock.patch.object(speculation, "judge", judge):
        yield


def timed(model: Model, prompts: Any, repeats: int, **how: Any) -> tuple[list[Completion], float]:
    """Completions, and the median seconds of `repeats` runs after one that compiles.

    It has more prompts than a batch: the program that refills slots is another than the first.
    """
    model.generate(prompts[: 2 * how["batch_size"] + 1], **how)
    seconds, answers = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        answers = model.generate(prompts, **how)
        seconds.append(time.perf_counter() - begun)
    return answers, float(np.median(seconds))


def first_gap(plain: Completion, other: Completion) -> float | None:
    """Where two texts part, by how many nats the two ids differ; None if they are the same.

    Rounding alone parts them at ids that are equally likely but for a rounding error.
    """
    pairs = enumerate(zip(plain.ids, other.ids, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    return None if at is None else abs(plain.log_probs[at] - other.log_probs[at])


def measure_passes(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model: milliseconds of passes of one row over so many tokens."""
    for text in [args.big, *args.draft.split(",")]:
        model = open_model(text, kernels=not args.plain)
        counts = map(int, args.passes.split(","))
        yield {"model": text, "resident": str(model)} | {
            f"ms over {count}": 1e3 * time_pass(model, count) for count in counts
        }


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of every size of batch."""
    if args.passes:
        yield from measure_passes(args)
        return
    models = [open_model(x, kernels=not args.plain) for x in (args.big, *args.draft.split(","))]
    prompts = read_prompts(args, models[0])
    for size in map(int, args.batch_size.split(",")):
        how: dict[str, Any] = dict(batch_size=size)
        how |= dict(sampling=Sampling(args.max_tokens, args.temperature, seed=1))
        alone = timed(models[0], prompts, args.repeats, **how)
        count = sum(len(a.ids) for a in alone[0])
        yield {"batch": size, "alone": str(models[0]), "tokens/s": count / alone[1]} | {
            "ms a step": 1e3 * alone[1] / args.max_tokens / -(-len(prompts) // size)
        }
        for small in models[1:]:
            for row in measure_pair(models[0], small, prompts, alone, args, **how):
                yield {"batch": size, "draft": str(small)} | row


def measure_pair(
    big: Model,
    small: Model,
    prompts: list[list[int]],
    alone: tuple[list[Completion], float],
    args: argparse.Namespace,
    *,
    sampling: Sampling,
    batch_size: int,
) -> Iterator[dict[str, Any]]:
    """A row for each imposed rate and number of drafts."""
    plain, plain_seconds = alone
    rates = [float(x) for x in args.impose.split(",")] if args.impose else [None]
    for rate in rates:
        with imposing(rate):
            for count in map(int, args.draft_tokens.split(",")):
                # The seed is part of the program: each rate is compiled for itself.
                drawn = dataclasses.replace(sampling, seed=1 + round(1000 * (rate or 0)))
                more = dict(draft=small, draft_tokens=count, sampling=drawn, batch_size=batch_size)
                got, seconds = timed(big, prompts, args.repeats, **more)
                passes = sum(c.drafted.passes for c in got if c.drafted)
                accepted = sum(c.drafted.accepted for c in got if c.drafted)
                tokens = sum(len(c.ids) for c in got)
                gaps = [first_gap(a, b) for a, b in zip(plain, got, strict=True)]
                yield {
                    "drafts": count,
                    "imposed": rate,
                    "accepted a pass": accepted / passes,
                    "accepted": accepted / passes / count,
                    "tokens/s": tokens / seconds,
                    "speed-up": plain_seconds / seconds,
                    "the same": gaps.count(None),
                    "of": len(got),
                    "widest gap": max((gap for gap in gaps if gap is not None), default=None),
                }


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    flags.add_argument("big", help="PATH[@dequant|q4k[:bfloat16|float32]], or random:7b")
    flags.add_argument("--draft", required=True, help="likewise; several joined by commas")
    flags.add_argument("--draft-tokens", default="3,5,8", help="of each pass, joined by commas")
    flags.add_argument("--text", default="", help="files whose beginnings are prompts")
    flags.add_argument("--prompts", type=int, default=20)
    flags.add_argument("--prompt-tokens", type=int, default=64)
    flags.add_argument("--max-tokens", type=int, default=128)
    flags.add_argument("--batch-size", default="1", help="rows at once, joined by commas")
    flags.add_argument("--temperature", type=float, default=0.0)
    flags.add_argument("--impose", default="", help="rates of acceptance, joined by commas")
    passes = "only times passes over so many tokens, joined by commas"
    flags.add_argument("--passes", default="", help=passes)
    flags.add_argument("--plain", action="store_true", help="random shapes without our kernels")
    flags.add_argument("--repeats", type=int, default=3)
    args = flags.parse_args(argv)
    runtime.configure()
    print(runtime.device_summary(), file=sys.stderr)
    for row in measure(args):
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(shown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
