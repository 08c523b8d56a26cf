"""Trains a head for a file for a given time, and counts the drafts that its target accepts.

    python -m scripts.bench.draft_heads smollm2.gguf --folder=runs/heads --seconds=900
    python -m scripts.bench.draft_heads --tiny

The target writes the text: continuations of Python source (code), and answers to questions in its
chat template (prose), half of them greedy, half at T = 1, for --answer-seconds. The head trains on
them for --seconds, of which compilation is no part; the learning rate falls with the seconds that
are left. Then kdjax counts the head's accepted drafts on prompts of packages and of nouns that
nobody trained on, by rule and domain: a JSON line each. --judge=FILE judges the head on further
files of the same model, such as one in fewer bits.

The folder has the answers, the state, the head and lines.jsonl. The same command goes on from
there; --stop-after ends it in time, with the state saved, for machines that end a command.
"""

import argparse
import functools
import itertools
import json
import random
import re
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kdjax
from kdjax.data.sources import find_files
from kdjax.models.decoding import Sampling
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from scripts.bench.program import peak_bytes
from scripts.bench.synthetic import QWEN3_SHAPES, write_random_gguf

_WORDS = Path(__file__).parents[1] / "demo" / "words.json"
_ASKED = (  # of a noun, an adjective and another noun; the last two are for judging alone
    "Write a short story about a {1} {0} and a {2}.",
    "Explain to a child what a {0} is, and what it has to do with a {2}.",
    "What should I know before I buy a {1} {0}?",
    "Describe a {1} {0} in three paragraphs.",
    "Give me five facts about the {0} and the {2}.",
    "Write an e-mail to a friend about the {1} {0} that you saw next to the {2}.",
    "How would you compare a {0} with a {2}?",
    "Write a news report: a {1} {0} was found in a {2}.",
    "Why do people like a {1} {0}? Write a short essay.",
    "Give instructions: how to draw a {1} {0} with a {2}.",
    "Write a dialogue between a {0} and a {1} {2}.",
    "What is the history of the {0}?",
    "Summarize what is known about the {1} {0}.",
    "Write a diary entry of somebody who lost a {1} {0} and found a {2}.",
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains and judges a head that drafts.")
    add = parser.add_argument
    add("target", nargs="?", default="", help="the GGUF file that is served; with --tiny: random")
    add("--folder", type=Path, default=Path("runs/heads"), help="answers, state, head, lines")
    add("--judge", action="append", default=[], metavar="FILE", help="another target of the head")
    text = "packages whose source is continued; those that are not installed are left out"
    add("--code", default="stdlib,numpy,scipy,jax,optax,transformers,torch,sympy,pandas", help=text)
    add("--heldout-code", default="networkx,flax,matplotlib", help="packages that judge")
    add("--answer-seconds", type=float, default=240.0)
    add("--seconds", type=float, default=900.0, help="of training")
    add("--stop-after", type=float, default=0.0, metavar="S", help="of all; 0: at the end")
    add("--prompt-tokens", type=int, default=64)
    add("--new-tokens", type=int, default=256)
    add("--slots", type=int, default=1024, help="answers that are written at once")
    add("--rows", type=int, default=48, help="a step")
    add("--layers", type=int, default=2)
    add("--block", type=int, default=7, help="tokens that a pass drafts")
    add("--rank", type=int, default=128, help="of a DSpark head's bias; 0: a DFlash head")
    add("--eagle", action="store_true", help="an EAGLE-3 head, of no --layers and no --rank")
    add("--rate", type=float, default=1e-3)
    add("--dtype", default="bfloat16", help="that the models compute in")
    add("--judged", type=int, default=64, help="prompts of each domain; 0: nothing is judged")
    add("--tiny", action="store_true", help="smallest sizes: a try on a CPU")
    args = parser.parse_args(argv)
    if args.tiny:
        small = dict(seconds=20.0, answer_seconds=1.0, new_tokens=48, slots=16, rows=4, layers=1)
        small |= dict(block=4, rank=min(8, args.rank), judged=4, dtype="float32", prompt_tokens=16)
        packages = dict(code="optax", heldout_code="flax")
        vars(args).update(small | packages)
    return args


class Prompts:
    """Token ids to continue: code, and questions for prose. Training and judging share none."""

    def __init__(self, packages: str, tokenizer: Tokenizer, tokens: int, *, judged: bool):
        known = [x for x in packages.split(",") if x == "stdlib" or find_spec(x) is not None]
        pieces = list[str]()
        for path in sorted(find_files("python:" + ",".join(known))):
            text = path.read_text(encoding="utf-8", errors="replace")
            cut = re.split(r"\n(?=(?:def|class|@) ?\w)", text)[:40]
            pieces += [x[: 16 * tokens] for x in cut if len(x) > 4 * tokens]
        random.Random(0).shuffle(pieces)
        self.pieces, self.tokens, self.tokenizer = pieces, tokens, tokenizer
        self.forms = _ASKED[-2:] if judged else _ASKED[:-2]
        self.words = {
            kind: [x for x in text.split() if (sum(x.encode()) % 10 == 0) is judged]
            for kind, text in json.loads(_WORDS.read_text()).items()
        }
        self.chat = "@"
        if tokenizer.chat_template is not None:
            self.chat = tokenizer.render([{"role": "user", "content": "@"}], answer_next=True)

    def code(self, part: int, count: int) -> list[list[int]]:
        """The first ids of functions and classes; fewer than `count` at the end of the text."""
        draw = random.Random(part)
        pieces = self.pieces[part * count : (part + 1) * count]
        found = self.tokenizer.encode_batch(pieces, parse_special=False)
        begun = (x[: draw.randint(self.tokens // 2, self.tokens)] for x in found if x)
        return [self.tokenizer.open_text(x) for x in begun]

    def prose(self, part: int, count: int) -> list[list[int]]:
        """Questions about random words."""
        draw, texts = random.Random(part), []
        for _ in range(count):
            nouns = draw.sample(self.words["nouns"], 2)
            adjective = draw.choice(self.words["adjectives"])
            asked = draw.choice(self.forms).format(nouns[0], adjective, nouns[1])
            texts.append(self.chat.replace("@", asked))
        return self.tokenizer.encode_batch(texts)


class Run:
    """A folder's work, part by part; every part goes on from what the folder has."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.began = args, time.monotonic()
        args.folder.mkdir(parents=True, exist_ok=True)
        if not args.target:
            args.target = str(args.folder / "tiny.gguf")
            sizes = dict(hidden=128, ffn=256, experts=0, experts_used=0, expert_ffn=0)
            shape = QWEN3_SHAPES["tiny-experts"]._replace(**sizes)
            write_random_gguf(Path(args.target), shape, recipe="q8_0")
        self.target = self._load(args.target)
        assert self.target.tokenizer is not None
        self.stop_ids = self.target.tokenizer.stop_ids
        how = self.target.tokenizer, args.prompt_tokens
        self.prompts = Prompts(args.code, *how, judged=False)
        self.judged = Prompts(args.heldout_code, *how, judged=True)
        self.note("begun", code=len(self.prompts.pieces), device=jax.devices()[0].device_kind)

    def _load(self, path: str) -> Model:
        return kdjax.load(path, weights="packed", dtype=self.args.dtype)

    def note(self, part: str, **values: Any) -> None:
        """Writes and prints a line."""
        line = json.dumps({"part": part, **values})
        print(line, flush=True)
        with (self.args.folder / "lines.jsonl").open("a") as file:
            file.write(line + "\n")

    def is_over(self) -> bool:
        """Whether the command has to end."""
        most = self.args.stop_after
        return bool(most) and time.monotonic() - self.began > most

    def answer(self) -> bool:
        """Lets the target write; returns whether it has written for long enough."""
        args, half = self.args, self.args.slots // 2
        folder = args.folder / "answers"
        folder.mkdir(exist_ok=True)
        spent = sum(float(np.load(path)["seconds"]) for path in folder.glob("*.npz"))
        for part in itertools.count(len([*folder.glob("*.npz")])):
            if spent > args.answer_seconds:
                return True
            if self.is_over():
                return False
            begun = time.monotonic()
            mine = self.prompts.code(part, half) + self.prompts.prose(part, half)
            sampling = Sampling(args.new_tokens, float(part % 2), stop_ids=self.stop_ids, seed=part)
            found = self.target.generate(mine, sampling, batch_size=len(mine))
            seconds = time.monotonic() - begun
            tokens, weights = self._lay_out(mine, [x.ids for x in found])
            aside = folder / "part"
            np.savez(aside, tokens=tokens, weights=weights, seconds=seconds)
            aside.with_suffix(".npz").rename(folder / f"{part:05}.npz")
            spent += seconds
            self.note("answers", file=part, tokens=int(weights.sum()), seconds=round(seconds, 1))
        return True

    def _lay_out(self, prompts: list[list[int]], answers: list[list[int]]) -> Any:
        """Rows of prompt and answer, its end included, and weights of their labels."""
        args = self.args
        shape = len(prompts), 2 * args.prompt_tokens + args.new_tokens + 1
        tokens, weights = np.zeros(shape, np.int32), np.zeros((shape[0], shape[1] - 1), np.int8)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            row = [*prompt, *answer][: shape[1]]
            if len(answer) < args.new_tokens and len(row) < shape[1]:
                row.append(self.stop_ids[0])
            tokens[i, : len(row)] = row
            weights[i, min(len(prompt), shape[1]) - 1 : len(row) - 1] = 1
        return tokens, weights

    def train(self) -> Model | None:
        """Trains the head for the seconds that are left; None if they are not over yet."""
        args = self.args
        sizes = dict(layers=args.layers, slots=args.block, rank=args.rank)
        make = kdjax.make_eagle if args.eagle else functools.partial(kdjax.make_head, **sizes)
        head = make(self.target)
        adam = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0, b2=0.95, weight_decay=0.0)
        tx = optax.chain(optax.clip_by_global_norm(1.0), adam)
        loss = kdjax.KDLoss(kdjax.total_variation, alpha=0.1)
        step = kdjax.make_step(head, self.target, loss, tx, chunk_tokens=2048)
        state = step.init(head.params)
        state, spent = self._restore(state)
        parts = [np.load(path) for path in sorted((args.folder / "answers").glob("*.npz"))]
        rows, weights = (np.concatenate([x[k] for x in parts]) for k in ("tokens", "weights"))
        begun, saved, sums, known = time.monotonic(), time.monotonic(), None, int(state.step)
        for number in itertools.count(known):
            draw = np.random.default_rng(number).integers(0, len(rows), args.rows)
            batch = dict(tokens=rows[draw, :-1], labels=rows[draw, 1:])
            batch |= dict(weights=weights[draw].astype(np.float32))
            state = self._set_rate(state, number, spent / args.seconds)
            state, metrics = step(state, self.target.params, batch)
            if number == known:  # compiled
                jax.block_until_ready(state)
                self.note("compiled", seconds=round(time.monotonic() - begun, 1))
                begun, last, noted = time.monotonic(), spent, time.monotonic()
            sums = metrics if sums is None else sums + metrics
            if (number + 1) % 20 == 0:
                means = {k: round(float(x), 4) for k, x in sums.means().items()}
                spent, sums = last + time.monotonic() - begun, None
                over = spent >= args.seconds or self.is_over()
                if time.monotonic() - noted > 10 or over:
                    noted = time.monotonic()
                    each = (time.monotonic() - begun) / (number - known)  # the first was compiled
                    rate = args.rows * (rows.shape[1] - 1) / each
                    self.note("train", step=number + 1, seconds=round(spent, 1),
                              step_ms=round(1e3 * each, 1), positions_a_second=round(rate),
                              peak_gb=round(peak_bytes() / 1e9, 3), **means)  # fmt: skip
                if over or time.monotonic() - saved > 120:
                    self._save(state, spent)
                    saved = time.monotonic()
                if over:
                    break
        trained = head.replace(params=step.see(state))
        kdjax.export_head(trained, args.folder / "head.gguf", overwrite=True)
        return trained if spent >= args.seconds else None

    def _set_rate(self, state: Any, number: int, share: float) -> Any:
        """The state with its learning rate: a warm-up of 200 steps, then a cosine to a tenth."""
        falls = 0.1 + 0.45 * (1 + np.cos(np.pi * min(1.0, share)))
        rate = jnp.float32(self.args.rate * min(1.0, (number + 1) / 200) * falls)
        clip, adam = state.opt_state
        adam = adam._replace(hyperparams={**adam.hyperparams, "learning_rate": rate})
        return state.replace(opt_state=(clip, adam))

    def _save(self, state: Any, spent: float) -> None:
        leaves: Any = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
        aside = self.args.folder / "state.part.npz"
        np.savez(aside, spent=spent, **leaves)
        aside.rename(self.args.folder / "state.npz")

    def _restore(self, state: Any) -> tuple[Any, float]:
        path = self.args.folder / "state.npz"
        if not path.exists():
            return state, 0.0
        kept, (leaves, tree) = np.load(path), jax.tree.flatten(state)
        read = [jax.device_put(kept[str(i)], x.sharding) for i, x in enumerate(leaves)]
        return jax.tree.unflatten(tree, read), float(kept["spent"])

    def judge(self, head: Path) -> None:
        """Counts accepted drafts of the head in its file, on each target, domain and rule."""
        args = self.args
        for path in (args.target, *args.judge) if args.judged else ():
            model = self.target if path == args.target else self._load(path)
            draft = kdjax.load_head(head, model)
            for domain in ("code", "prose"):
                prompts = getattr(self.judged, domain)(0, args.judged)
                for heat in (0.0, 1.0):
                    self._count(model, draft, Path(path).name, domain, prompts, heat)

    def _count(self, model: Model, draft: Model, name: str, domain: str, prompts: Any, heat: float):
        args = self.args
        sampling = Sampling(min(128, args.new_tokens), heat, stop_ids=self.stop_ids)
        at_once = min(32, len(prompts))
        begun = time.monotonic()
        found = model.generate(
            prompts, sampling, draft=draft, draft_tokens=args.block, batch_size=at_once
        )
        seconds, counts = time.monotonic() - begun, [x.drafted for x in found if x.drafted]
        passes, accepted = sum(x.passes for x in counts), sum(x.accepted for x in counts)
        values = dict(
            target=name, domain=domain, temperature=heat, block=args.block, prompts=len(prompts),
            ids=sum(len(x.ids) for x in found), passes=passes,
            accepted_a_pass=round(accepted / passes, 3),
            accepted_length=round(accepted / passes + 1, 3),
            seconds=round(seconds, 1),
        )  # fmt: skip
        if not heat:
            alone = model.generate(prompts, sampling, batch_size=at_once)
            values["texts_equal"] = sum(a.ids == b.ids for a, b in zip(found, alone, strict=True))
        self.note("judged", **values)


def main(argv: Sequence[str] | None = None) -> None:
    run = Run(arguments(argv))
    if run.answer() and run.train() is not None:
        run.judge(run.args.folder / "head.gguf")


if __name__ == "__main__":
    main()
