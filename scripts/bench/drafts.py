"""Which objective, text and layers make the best draft: trains several alike, and judges each.

    python -m scripts.bench.drafts BIG.gguf --draft=SMALL.gguf --prompts=train.jsonl \
        --heldout=heldout.jsonl --text=python:jax,flax --steps=200 \
        --variants='text:forward_kl;teacher:total_variation;teacher:forward_kl@0,5,11,17,23'

A variant is SOURCE:DIVERGENCE, then nothing or @LAYERS of the draft. SOURCE is `text` (files), or
what the `teacher` or the draft itself (`own`) writes to `--prompts` at T = 1, once, for at most
`--write-seconds`. All train the same number of steps over rows of the same size from the same
weights, so that they cost the same GPU seconds but for writing, and are judged on the teacher's
continuations of `--heldout`: `kdjax.evaluation.drafting` says what is counted. With `--save` each
is exported as GGUF. Prints a line of JSON a figure. Exit status: 0 done, 2 bad input.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from kdjax import make_step
from kdjax.config import split_layers
from kdjax.data import pipeline
from kdjax.data.rows import COLUMNS, Packer, Rows
from kdjax.device import runtime
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import UserError, reporting
from kdjax.evaluation import drafting
from kdjax.evaluation.heldout import position_values
from kdjax.export import export_gguf
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.models.checkpoint import cut_layers, open_checkpoint
from kdjax.models.model import Model, load_model
from kdjax.training.pair import share_vocabulary

_AT_ONCE, _SLOTS = 1024, 256  # prompts between two looks at the clock; rows that grow at once


def say(**figures: Any) -> None:
    """Prints a line of JSON."""
    short = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps(short), flush=True)


def pack(texts: Sequence[tuple[list[int], int]], length: int) -> Rows:
    """Rows of texts, ids and where their targets begin, one behind the other."""
    packer = Packer(length + 1)
    placed = [(text, packer.place(len(text[0]))) for text in texts]
    rows = Rows(**{n: np.zeros((packer.rows, length + 1), d) for n, d in COLUMNS.items()})
    for (ids, begin), pieces in placed:
        mask = (np.arange(len(ids)) >= begin).astype(np.uint8)
        values = {"tokens": np.asarray(ids, np.uint32), "mask": mask}
        for piece in pieces:
            piece.copy(values, {name: x[piece.row] for name, x in rows._asdict().items()})
    return rows


def write(
    model: Model, prompts: list[list[int]], args: argparse.Namespace, temperature: float
) -> list[tuple[list[int], int]]:
    """Prompts with the model's continuations, as many as the seconds allow."""
    assert model.tokenizer is not None
    how = dict(max_tokens=args.max_tokens, temperature=temperature)
    how |= dict(
        stop_ids=model.tokenizer.stop_ids, seed=args.seed, batch_size=min(_SLOTS, len(prompts))
    )
    texts, begun, tokens = [], time.monotonic(), 0
    for start in range(0, len(prompts), _AT_ONCE):
        if time.monotonic() - begun > args.write_seconds:
            break
        part = prompts[start : start + _AT_ONCE]
        answers = model.generate(part, **how)  # type: ignore[arg-type]
        texts += [([*p, *a.ids], len(p)) for p, a in zip(part, answers, strict=True) if a.ids]
        tokens += sum(len(a.ids) for a in answers)
    seconds = time.monotonic() - begun
    say(wrote=model.source, temperature=temperature, tokens=tokens, seconds=seconds)
    return texts


def read_text(patterns: str, model: Model, args: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Pieces of files, as many as the rows of all steps hold."""
    from kdjax.data.text import documents, find_files

    assert model.tokenizer is not None
    rng, texts, tokens = np.random.default_rng(args.seed), [], 0
    files = find_files(patterns)
    for place in rng.permutation(len(files)):
        for document in documents([files[place]], model.tokenizer):
            ids = model.tokenizer.encode(document.text[: 8 * args.seq_len], parse_special=False)
            texts.append((ids[: args.seq_len], 1))
            tokens += len(texts[-1][0])
        if tokens > args.steps * args.batch_size * args.seq_len:
            break
    return texts


def batches(rows: Rows, args: argparse.Namespace) -> Iterator[dict[str, np.ndarray]]:
    """Shuffled, for all steps."""
    source = pipeline.TextSource(rows, batch_size=args.batch_size, seed=args.seed)
    for _ in range(args.steps):
        batch = source.next()
        batch.pop("row_ids")
        yield batch


@functools.partial(jax.jit, static_argnums=0)
def _compare(spec: HeadSpec, *arrays: Any) -> Any:
    return position_values(*arrays, spec=spec)


class Judge:
    """The teacher's continuations of held-out prompts, and what a draft saves on them."""

    def __init__(
        self, teacher: Model, prompts: dict[str, list[list[int]]], args: argparse.Namespace
    ):
        self._teacher, self._domains = teacher, list(prompts)
        self._batches = {}
        for temperature in (0.0, 1.0):
            for name, part in prompts.items():
                texts = write(teacher, part, args, temperature)
                rows = drafting._pack([ids[:n] for ids, n in texts], [ids[n:] for ids, n in texts])
                found = list(pipeline.eval_batches(rows, batch_size=8, limit=None))
                self._batches[name, temperature] = found
        self._one, several = (drafting.time_pass(teacher, n) for n in (1, 9))
        self._more = (several - self._one) / self._one / 8
        say(pass_of=teacher.source, ms=1e3 * self._one, each_token_more=self._more)

    def judge(self, draft: Model, **named: Any) -> None:
        """Prints a line for each rule."""
        own = share_vocabulary(draft, self._teacher)
        spec = HeadSpec(KDLoss(), own.width, own.real, chunk_tokens=256)
        compute = functools.partial(_compare, spec)
        seconds = drafting.time_pass(draft, 1)
        costs = drafting.Costs(seconds / self._one, max(self._more, 0.0))
        heads = [jax.jit(model.functions.head)(model.params) for model in (draft, self._teacher)]
        read = {}
        for key, found in self._batches.items():
            states = [model.hidden_states(found) for model in (draft, self._teacher)]
            values = [
                jax.device_get(compute(ours, heads[0], batch["labels"], theirs, heads[1]))
                for ours, theirs, batch in zip(*states, found, strict=True)
            ]
            read[key] = drafting._unpack(iter(values), found)
        pairs = [(name, rule) for name in self._domains for rule in drafting.RULES]
        for name, rule in pairs:
            temperature, chance = drafting.RULES[rule]
            figures = drafting._figures(read[name, temperature], chance, costs)
            at_5 = figures["blocks"][5]
            best = figures["blocks"][figures["best"]]
            say(
                **named,
                domain=name,
                rule=rule,
                kept=figures["kept"],
                accepted_of_5=at_5["accepted"],
                independent_of_5=at_5["independent"],
                by_drafts={k: round(x["accepted"], 3) for k, x in figures["blocks"].items()},
                tokens=figures["tokens"],
                ms=1e3 * seconds,
                cost=costs.draft,
                best=figures["best"],
                speed_up=best["speed_up"],
            )


def run(args: argparse.Namespace) -> None:
    """Trains and judges all variants."""
    placement = Placement.on(make_mesh(1, 1, 1, jax.local_devices()[:1]))

    def open_model(path: str, layers: str = "", dtype: str = "bfloat16") -> Model:
        checkpoint = cut_layers(open_checkpoint(path), split_layers(layers))
        return load_model(
            checkpoint,
            placement=placement,
            dtype=dtype,
            compute_dtype=args.dtype,
            max_segments=32,
        )

    def choose(patterns: str, count: int) -> list[list[int]]:
        assert teacher.tokenizer is not None
        most = min(args.seq_len - args.max_tokens, args.prompt_tokens)
        return drafting.choose_prompts(patterns, teacher.tokenizer, count=count, most=most)

    teacher = open_model(args.big, dtype=args.dtype)
    domains = [text.rpartition("=")[::2] for text in args.heldout]
    heldout = {name: choose(paths, args.heldout_prompts) for name, paths in domains}
    judge = Judge(teacher, heldout, args)
    judge.judge(open_model(args.draft, dtype=args.dtype), variant="as published")
    prompts = choose(args.prompts, 10**6)
    np.random.default_rng(args.seed).shuffle(prompts)
    rows: dict[str, Rows] = {}
    for number, variant in enumerate(args.variants.split(";")):
        recipe, _, layers = variant.partition("@")
        source, _, divergence = recipe.partition(":")
        if source not in ("text", "teacher", "own"):
            raise UserError(f"--variants: found {variant!r}; expected text:, teacher: or own:")
        student = open_model(args.draft, layers, "float32")
        if source not in rows:
            texts = (
                read_text(args.text, teacher, args)
                if source == "text"
                else write(teacher if source == "teacher" else student, prompts, args, 1.0)
            )
            rows[source] = pack(texts, args.seq_len)
        rate = args.cut_learning_rate if layers else args.learning_rate
        warmup = min(20, args.steps // 4)
        schedule = optax.warmup_cosine_decay_schedule(0, rate, warmup, args.steps, rate / 10)
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01)
        )
        step = make_step(student, teacher, KDLoss(divergence), optimizer, chunk_tokens=args.chunk)
        state, begun, losses = step.init(student.params, donate=True), 0.0, []
        for i, batch in enumerate(batches(rows[source], args)):
            state, metrics = step(state, teacher.params, batch)
            if i == 1:  # the first compiled
                jax.block_until_ready(metrics)
                begun = time.monotonic()
            if i % 50 == 49 or i == args.steps - 1:
                losses.append(round(float(metrics.means()["loss"]), 4))
        seconds = (time.monotonic() - begun) * args.steps / max(args.steps - 2, 1)
        say(variant=variant, rows=len(rows[source]), train_seconds=seconds, losses=losses)
        trained = student.replace(params=state.params)
        del state, step
        half = trained.replace(params=jax.tree.map(lambda x: x.astype(args.dtype), trained.params))
        judge.judge(half, variant=variant)
        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            for kind in args.types.split(","):
                path = args.save / f"variant{number}-{kind}.gguf"
                export_gguf(trained, path, dtype=kind, overwrite=True)
                say(variant=variant, saved=str(path), bytes=path.stat().st_size)
        del trained, half, student


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    flags = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    flags.add_argument("big", help="the model to draft for")
    flags.add_argument("--draft", required=True, help="what all drafts begin with")
    flags.add_argument("--prompts", required=True, help="text or conversations to train on")
    judged = "likewise, to judge on; several are told apart"
    flags.add_argument(
        "--heldout", required=True, action="append", metavar="[NAME=]PATHS", help=judged
    )
    flags.add_argument("--text", default="", help="of the source `text`")
    flags.add_argument("--variants", required=True, metavar="SOURCE:DIVERGENCE[@LAYERS];...")
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--batch-size", type=int, default=16)
    flags.add_argument("--seq-len", type=int, default=1024)
    flags.add_argument("--prompt-tokens", type=int, default=320, help="longer ones are left out")
    flags.add_argument("--max-tokens", type=int, default=256, help="of a continuation")
    flags.add_argument("--heldout-prompts", type=int, default=128)
    flags.add_argument("--write-seconds", type=float, default=45.0)
    flags.add_argument("--learning-rate", type=float, default=1e-5)
    flags.add_argument("--cut-learning-rate", type=float, default=2e-4, help="with fewer layers")
    flags.add_argument("--chunk", type=int, default=4096, help="positions with logits at a time")
    flags.add_argument("--dtype", default="bfloat16", help="that both compute in")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--save", type=Path, help="folder for GGUF files")
    flags.add_argument("--types", default="q4_k_m", help="of these files")
    args = flags.parse_args(argv)
    runtime.configure()
    print(runtime.device_summary(), file=sys.stderr)
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
