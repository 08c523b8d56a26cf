"""Which objective, text and layers make the best draft: trains several alike, and judges each.

    python -m scripts.bench.drafts BIG.gguf --draft=SMALL.gguf --prompts=train.jsonl \
        --heldout=chat=heldout.jsonl --text=python:jax,flax --passages=4000 --seconds=40 \
        --variants='text:forward_kl;teacher:total_variation;teacher:forward_kl@0,11,23|0,1,23#90>cut'

A variant is SOURCE:DIVERGENCE, then, if wanted, @LAYERS of the draft, #SECONDS, and >NAME under
which `--save` exports it. SOURCE is `text` (files), or what the `teacher` or the draft itself
(`own`) writes to `--prompts` and to `--passages` of the files, at `--temperatures`. Of sets of
layers joined by | each trains for `--try-seconds`, and the one that keeps the largest share at
T = 1 trains whole. The teacher's hidden states are computed once for each text, and each variant
trains for `--seconds` of the device, compilation not counted: the rate follows the clock. Judged
on the teacher's continuations of `--heldout`: `kdjax.evaluation.drafting` says what is counted. No
variant begins that `--limit` leaves no time for, and one that fails is told and passed over. What
is written stays under `--save`, and a later run reads it there. Prints a line of JSON a figure.
Exit status: 0 done, 2 bad input.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kdjax import make_step
from kdjax.config import split_layers
from kdjax.data import pipeline
from kdjax.data.rows import COLUMNS, Packer, Rows
from kdjax.data.text import documents, find_files
from kdjax.device import runtime
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import UserError, reporting
from kdjax.evaluation import drafting
from kdjax.evaluation.heldout import position_values
from kdjax.export import export_gguf, export_hf
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.models.checkpoint import cut_layers, open_checkpoint
from kdjax.models.decoder import DecoderFunctions, functional
from kdjax.models.model import Model, load_model
from kdjax.models.weights import to_bits
from kdjax.training.pair import share_vocabulary
from kdjax.training.step import Step
from kdjax.training.teachers import CachedHidden

_AT_ONCE = 8  # prompts a slot between two looks at the clock
_AFTER = 20.0  # seconds that judging a variant takes
_LOOK = 8  # steps between two looks at the clock

Text = tuple[list[int], int]  # ids, and how many of them are the prompt


def say(**figures: Any) -> None:
    """Prints a line of JSON."""
    short = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps(short), flush=True)


def pack(texts: Sequence[Text], length: int) -> Rows:
    """Rows of texts, one behind the other; prompts are no targets."""
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
    model: Model,
    prompts: list[list[int]],
    args: argparse.Namespace,
    *,
    temperature: float = 1.0,
    seconds: float = math.inf,
    most: int = 0,
) -> list[Text]:
    """Prompts with the model's continuations, up to `--tokens`, or as many as the seconds allow.

    Each ends at `most` ids, if given. The numbers of slots and of their places are always the same:
    programs that the judge's few prompts compile serve the many of a text.
    """
    assert model.tokenizer is not None
    how = dict(max_tokens=args.max_tokens, temperature=temperature, seed=args.seed)
    how |= dict(stop_ids=model.tokenizer.stop_ids, batch_size=args.slots)
    texts, begun, tokens = [], time.monotonic(), 0
    for start in range(0, len(prompts), _AT_ONCE * args.slots):
        if time.monotonic() - begun > seconds or tokens >= args.tokens:
            break
        part = prompts[start : start + _AT_ONCE * args.slots]
        limits = [most or args.max_tokens] * len(part)
        answers = model.generate(part, limits=limits, **how)  # type: ignore[arg-type]
        texts += [([*p, *a.ids], len(p)) for p, a in zip(part, answers, strict=True)]
        tokens += sum(len(a.ids) for a in answers)
    spent = time.monotonic() - begun
    say(wrote=model.source, temperature=temperature, tokens=tokens, write_seconds=spent)
    return texts


def write_all(model: Model, prompts: list[list[int]], args: argparse.Namespace) -> list[Text]:
    """Prompts with continuations, each at its turn's temperature, in an order of the seed."""
    turns, texts = args.temperatures, []
    for temperature in sorted(set(turns), reverse=True):
        part = [p for i, p in enumerate(prompts) if turns[i % len(turns)] == temperature]
        seconds = args.write_seconds * turns.count(temperature) / len(turns)
        texts += write(model, part, args, temperature=temperature, seconds=seconds)
    random.Random(args.seed).shuffle(texts)
    return texts


def keep(path: Path | None, make: Callable[[], list[Text]]) -> list[Text]:
    """The texts of a file, which are made first if it is not there."""
    if path is not None and path.exists():
        with np.load(path) as kept:
            ids = np.split(kept["ids"], np.cumsum(kept["lengths"])[:-1])
            return [(x.tolist(), int(n)) for x, n in zip(ids, kept["prompts"], strict=True)]
    texts = make()
    if path is not None and texts:
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths, prompts = [len(ids) for ids, _ in texts], [n for _, n in texts]
        flat = np.concatenate([np.asarray(ids, np.int32) for ids, _ in texts])
        np.savez(path, ids=flat, lengths=lengths, prompts=prompts)
    return texts


def read_files(args: argparse.Namespace, model: Model) -> Iterator[str]:
    """The files of `--text`, in an order of the seed."""
    assert model.tokenizer is not None
    files = find_files(args.text)
    for place in np.random.default_rng(args.seed).permutation(len(files)):
        for document in documents([files[place]], model.tokenizer):
            yield document.text


def read_pieces(model: Model, args: argparse.Namespace) -> list[Text]:
    """Pieces of files of a row's length, at most `--tokens`."""
    assert model.tokenizer is not None
    texts, tokens = [], 0
    for text in read_files(args, model):
        ids = model.tokenizer.encode(text[: 8 * args.seq_len], parse_special=False)
        texts.append((ids[: args.seq_len], 1))
        tokens += len(texts[-1][0])
        if tokens > args.tokens:
            break
    return texts


def read_passages(model: Model, args: argparse.Namespace) -> list[list[int]]:
    """Prompts from files: their beginnings, as those of held-out files are, and lines within."""
    assert model.tokenizer is not None
    rng, most = np.random.default_rng(args.seed), drafting.PROMPT_TOKENS
    prompts: dict[tuple[int, ...], None] = {}  # files under one licence begin alike
    for text in read_files(args, model) if args.passages else []:
        lines = [0, *(i + 1 for i, c in enumerate(text) if c == "\n" and i < len(text) // 2)]
        starts = rng.choice(lines, min(len(lines), len(text) // (8 * most), 4), replace=False)
        for start in {0, *starts.tolist()}:
            ids = model.tokenizer.encode(text[start : start + 8 * most], parse_special=False)
            prompts[tuple(ids[: min(most, len(ids) // 2)])] = None
        if len(prompts) >= args.passages:
            break
    return [list(prompt) for prompt in prompts if prompt][: args.passages]


@functools.partial(jax.jit, static_argnums=0)
def _compare(spec: HeadSpec, *arrays: Any) -> Any:
    return position_values(*arrays, spec=spec)


class Judge:
    """The teacher's continuations of held-out prompts, and what a draft saves on them."""

    def __init__(
        self, teacher: Model, prompts: dict[str, list[list[int]]], args: argparse.Namespace
    ):
        self._teacher = teacher
        self._texts: list[drafting.Text] = []
        self._seconds: dict[int, float] = {}  # of a draft's pass, by its layers
        flat = [prompt for part in prompts.values() for prompt in part]
        for temperature in (0.0, 1.0):
            how = dict(temperature=temperature, most=args.heldout_tokens)
            run = functools.partial(write, teacher, flat, args, **how)
            found = iter(keep(args.save and args.save / f"heldout-{temperature:g}.npz", run))
            for name, part in prompts.items():
                mine = [
                    text for text in itertools.islice(found, len(part)) if len(text[0]) > text[1]
                ]
                halves = [ids[:n] for ids, n in mine], [ids[n:] for ids, n in mine]
                self._texts.append(drafting.Text.of(name, temperature, *halves, batch_size=16))
        self._states = [list(teacher.hidden_states(text.batches)) for text in self._texts]
        self._one, several = (drafting.time_pass(teacher, n) for n in (1, 9))
        self._more = (several - self._one) / self._one / 8
        say(pass_of=teacher.source, ms=1e3 * self._one, each_token_more=self._more)

    def judge(self, draft: Model, **named: Any) -> float:
        """Prints a line for each rule; returns the mean share kept at T = 1."""
        own = share_vocabulary(draft, self._teacher)
        size = draft.spec.num_layers if draft.spec else 0
        if size not in self._seconds:
            self._seconds[size] = drafting.time_pass(draft, 1)
        seconds = self._seconds[size]
        spec = HeadSpec(KDLoss(), own.width, own.real, chunk_tokens=1024)
        compute = functools.partial(_compare, spec)
        costs = drafting.Costs(seconds / self._one, max(self._more, 0.0))
        heads = [jax.jit(model.functions.head)(model.params) for model in (draft, self._teacher)]
        read = []
        for text, theirs in zip(self._texts, self._states, strict=True):
            states = zip(draft.hidden_states(text.batches), theirs, text.batches, strict=True)
            read.append(
                [
                    jax.device_get(compute(our, heads[0], batch["labels"], their, heads[1]))
                    for our, their, batch in states
                ]
            )
        saved = drafting.count_saved(self._texts, read, costs)
        kept = []
        for name, rule in itertools.product(saved, drafting.RULES):
            figures = saved[name][rule]
            at_5 = figures["blocks"][5]
            best = figures["blocks"][figures["best"]]
            kept += [figures["kept"]] if rule == "sampled" else []
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
        return float(np.mean(kept))


class Lesson(NamedTuple):
    """Rows to train on, and the teacher's hidden states there."""

    columns: dict[str, np.ndarray]  # [N, T] each
    hidden: jax.Array  # bits [N, T, D]

    def batch(self, rows: np.ndarray) -> dict[str, Any]:
        """Those rows."""
        columns = {name: x[rows] for name, x in self.columns.items()}
        return columns | {"teacher_hidden": _take(self.hidden, rows)}


@jax.jit
def _take(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    return hidden[rows]


@functools.partial(jax.jit, donate_argnums=0)
def _put(hidden: jax.Array, part: jax.Array, at: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(hidden, to_bits(part), at, 0)


def make_lesson(teacher: Model, rows: Rows, size: int) -> Lesson:
    """Computes the hidden states, `size` rows at a time."""
    begun = time.monotonic()
    batches = list(pipeline.eval_batches(rows, batch_size=size, limit=None))
    hidden: Any = None
    for number, states in enumerate(teacher.hidden_states(batches)):
        if hidden is None:
            shape = len(batches) * size, *states.shape[1:]
            hidden = jnp.zeros(shape, jax.eval_shape(to_bits, states).dtype)
        hidden = _put(hidden, states, number * size)
    columns = {
        name: np.concatenate([batch[name] for batch in batches])[: len(rows)]
        for name in batches[0]
        if name != "row_ids"
    }
    jax.block_until_ready(hidden)
    tokens = int(columns["weights"].sum())
    seconds = time.monotonic() - begun
    say(rows=len(rows), targets=tokens, hidden_seconds=seconds, gigabytes=hidden.nbytes / 1e9)
    return Lesson(columns, hidden)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW whose rate is set before each step."""

    def make(learning_rate: Any) -> optax.GradientTransformation:
        adamw = optax.adamw(learning_rate, b2=0.95, weight_decay=0.01)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    return optax.inject_hyperparams(make)(learning_rate=0.0)


def teach(
    step: Step, start: Any, teacher: Model, lesson: Lesson, args: argparse.Namespace, **plan: Any
) -> tuple[Any, dict[str, Any]]:
    """Parameters after the seconds of the plan, and how it went.

    The rate rises over the first steps, and falls as a cosine to nothing at the last second.
    """
    state = step.init(start)
    rng, order = np.random.default_rng(args.seed), np.zeros(0, int)
    begun, spent, losses, done = 0.0, 0.0, [], 0
    for done in itertools.count(1):
        if len(order) < args.batch_size:
            order = np.concatenate([order, rng.permutation(len(lesson.columns["tokens"]))])
        rows, order = order[: args.batch_size], order[args.batch_size :]
        rate = plan["rate"] * min(done / args.warmup, 1.0)
        rate *= 0.5 + 0.5 * math.cos(math.pi * min(spent / plan["seconds"], 1.0))
        state.opt_state.hyperparams["learning_rate"] = jnp.float32(rate)  # type: ignore[attr-defined]
        state, metrics = step(state, teacher.params, lesson.batch(rows))
        if done == 2:  # the first compiled
            jax.block_until_ready(metrics)
            begun = time.monotonic()
        elif done > 2 and done % _LOOK == 0:
            loss = metrics.means()["loss"]
            spent = time.monotonic() - begun
            losses += [round(loss, 4)] if done % (8 * _LOOK) == 0 else []
            if spent >= plan["seconds"]:
                break
    positions = done * args.batch_size * args.seq_len
    rate = (done - 2) * args.batch_size * args.seq_len / spent
    passes = done * args.batch_size / len(lesson.columns["tokens"])
    figures = dict(train_seconds=spent, steps=done, positions=positions, each_text=passes)
    return state.params, figures | dict(positions_a_second=rate, losses=losses)


class Course:
    """The teacher, what is written for a text, and the drafts that learn from it."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._ends = args, time.monotonic() + args.limit
        self._placement = Placement.on(make_mesh(1, 1, 1, jax.local_devices()[:1]))
        self._teacher = self._open(args.big, dtype=args.dtype)
        assert self._teacher.tokenizer is not None
        domains = [text.rpartition("=")[::2] for text in args.heldout]
        with concurrent.futures.ThreadPoolExecutor(1) as reader:
            prompts = reader.submit(self._read_prompts)  # while XLA compiles what the judge needs
            heldout = {name: self._choose(paths, args.heldout_prompts) for name, paths in domains}
            self._judge = Judge(self._teacher, heldout, args)
            self._judge.judge(self._open(args.draft, dtype=args.dtype), variant="as published")
            self._prompts = prompts.result()
        say(prompts=len(self._prompts), seconds_left=self._left())
        self._lesson: tuple[str, Lesson] | None = None
        self._steps: dict[tuple[str, int], Step] = {}
        self._draft = self._open(args.draft, dtype="float32")

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _open(self, path: str, layers: str = "", *, dtype: str) -> Model:
        checkpoint = cut_layers(open_checkpoint(path), split_layers(layers))
        how = dict(placement=self._placement, dtype=dtype, compute_dtype=self._args.dtype)
        return load_model(checkpoint, max_segments=32, **how)  # type: ignore[arg-type]

    def _read_prompts(self) -> list[list[int]]:
        args = self._args
        prompts = [*self._choose(args.prompts, 10**6), *read_passages(self._teacher, args)]
        random.Random(args.seed).shuffle(prompts)
        return prompts

    def _choose(self, patterns: str, count: int) -> list[list[int]]:
        tokenizer = self._teacher.tokenizer
        assert tokenizer is not None
        most = min(self._args.seq_len - self._args.max_tokens, self._args.prompt_tokens)
        return drafting.choose_prompts(patterns, tokenizer, count=count, most=most)

    def _texts(self, source: str) -> list[Text]:
        if source == "text":
            return read_pieces(self._teacher, self._args)
        args, own = self._args, source == "own"
        writer = self._open(args.draft, dtype=args.dtype) if own else self._teacher
        run = functools.partial(write_all, writer, self._prompts, args)
        found = keep(args.save and args.save / f"{source}.npz", run)
        ends = np.cumsum([len(ids) - begin for ids, begin in found])
        count = int(np.searchsorted(ends, args.tokens)) + 1
        return [text for text in found[:count] if len(text[0]) > text[1]]

    def _prepare(self, source: str) -> Lesson:
        if self._lesson is None or self._lesson[0] != source:
            self._lesson = None  # frees its memory before the next takes its own
            rows = pack(self._texts(source), self._args.seq_len)
            self._lesson = source, make_lesson(self._teacher, rows, self._args.batch_size)
        return self._lesson[1]

    def _make_step(self, student: Model, divergence: str) -> Step:
        """The step of a loss and a number of layers, made once.

        Its layers are written out: a loop would copy what it keeps of each.
        """
        assert student.spec is not None and isinstance(student.functions, DecoderFunctions)
        key = divergence, student.spec.num_layers
        if key not in self._steps:
            compute = dataclasses.replace(student.functions.compute, scan=False)
            trained = student.replace(functions=functional(student.spec, compute)[0])
            how: dict[str, Any] = dict(chunk_tokens=self._args.chunk, kind=CachedHidden())
            loss = KDLoss(divergence)
            self._steps[key] = make_step(trained, self._teacher, loss, make_optimizer(), **how)
        return self._steps[key]

    def try_to_hold(self, variant: str) -> None:
        """Trains and judges a variant; an error of one leaves the others their time."""
        try:
            self.hold(variant)
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            say(variant=variant, failed=f"{type(error).__name__}: {error}"[:300])

    def hold(self, variant: str) -> None:
        """Trains and judges one variant, or says why not."""
        args = self._args
        variant, _, name_out = variant.partition(">")
        variant, _, spent = variant.partition("#")
        wanted = float(spent or args.seconds)
        recipe, _, choices = variant.partition("@")
        source, _, divergence = recipe.partition(":")
        sets = choices.split("|")
        if source not in ("text", "teacher", "own"):
            raise UserError(f"--variants: found {variant!r}; expected text:, teacher: or own:")
        if len({len(split_layers(layers)) for layers in sets}) > 1:
            raise UserError(f"--variants: {variant!r} has sets of different numbers of layers")
        if self._left() < 2 * _AFTER:
            say(variant=variant, left_out=f"{self._left():.0f} s are left")
            return
        lesson = self._prepare(source)
        rate = args.cut_learning_rate if choices else args.learning_rate

        def learn(layers: str, seconds: float, **named: Any) -> tuple[Model, float]:
            student = self._draft
            if layers:
                student = self._open(args.draft, layers, dtype="float32")
            step = self._make_step(student, divergence)
            plan = dict(rate=rate, seconds=seconds)
            params, figures = teach(step, student.params, self._teacher, lesson, args, **plan)
            say(**named, rate=f"{rate:g}", **figures)
            half = jax.tree.map(lambda x: x.astype(args.dtype), params)
            kept = self._judge.judge(student.replace(params=half), **named)
            return student.replace(params=params), kept

        best, most = sets[0], -1.0
        for layers in sets if len(sets) > 1 else []:
            if self._left() > args.try_seconds + 2 * _AFTER:
                _, kept = learn(layers, args.try_seconds, variant=f"{recipe}@{layers}", tried=True)
                best, most = max((best, most), (layers, kept), key=lambda pair: pair[1])
        name = f"{recipe}@{best}" if best else recipe
        seconds = min(wanted, self._left() - _AFTER)
        if seconds < wanted / 2:
            say(variant=name, left_out=f"{self._left():.0f} s are left")
            return
        trained, _ = learn(best, seconds, variant=name)
        if args.save and name_out:
            save(trained, args.save / name_out, args.types.split(","), variant=name)
        say(variant=name, seconds_left=self._left())


def save(model: Model, path: Path, kinds: Sequence[str], **named: Any) -> None:
    """A folder in bfloat16 of the name, or GGUF files beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        if kind == "hf":
            export_hf(model, path, overwrite=True)
        else:
            export_gguf(model, Path(f"{path}-{kind}.gguf"), dtype=kind, overwrite=True)
        say(**named, saved=str(path), kind=kind)


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
    flags.add_argument("--text", default="", help="files of the source `text`, and for passages")
    flags.add_argument("--passages", type=int, default=0, help="of these files, as more prompts")
    flags.add_argument(
        "--variants", required=True, metavar="SOURCE:DIVERGENCE[@LAYERS|...][#SECONDS][>NAME];..."
    )
    flags.add_argument("--seconds", type=float, default=40.0, help="of training, for a variant")
    flags.add_argument("--try-seconds", type=float, default=15.0, help="for a set of layers")
    flags.add_argument("--limit", type=float, default=math.inf, help="seconds of the whole run")
    flags.add_argument("--batch-size", type=int, default=16)
    flags.add_argument("--seq-len", type=int, default=1024)
    flags.add_argument("--prompt-tokens", type=int, default=320, help="longer ones are left out")
    flags.add_argument("--max-tokens", type=int, default=256, help="of a continuation")
    fewer = "of a continuation that is judged, if fewer"
    flags.add_argument("--heldout-tokens", type=int, default=0, help=fewer)
    flags.add_argument("--heldout-prompts", type=int, default=128)
    flags.add_argument("--write-seconds", type=float, default=90.0, help="compilation counted")
    turns = "of texts that are written, in turn: 1 1 0 writes every third greedily"
    flags.add_argument("--temperatures", type=float, nargs="+", default=[1.0], help=turns)
    flags.add_argument("--tokens", type=int, default=3_000_000, help="of a text, at most")
    flags.add_argument("--slots", type=int, default=1024, help="rows that are written at once")
    flags.add_argument("--learning-rate", type=float, default=1e-5)
    flags.add_argument("--cut-learning-rate", type=float, default=2e-4, help="with fewer layers")
    flags.add_argument("--warmup", type=int, default=20, help="steps")
    flags.add_argument("--chunk", type=int, default=4096, help="positions with logits at a time")
    flags.add_argument("--dtype", default="bfloat16", help="that both compute in")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--save", type=Path, help="folder for texts and drafts")
    flags.add_argument("--types", default="q4_k_m", help="GGUF types, and hf for a folder")
    args = flags.parse_args(argv)
    runtime.configure()
    print(runtime.device_summary(), file=sys.stderr)
    course = Course(args)
    for variant in args.variants.split(";"):
        course.try_to_hold(variant)
    return 0


if __name__ == "__main__":
    sys.exit(main())
