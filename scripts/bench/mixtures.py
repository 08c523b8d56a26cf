"""Chosen types against the recipes at equal bytes: untrained, begun by GPTQ, and trained.

    python -m scripts.bench.mixtures --model=1.5b.gguf --text=python:jax,flax --out=runs/mixtures \
        --reference-steps=100 --train='q2_k:120;q3_k_m:60'

First a reference that lies on no lattice. The numbers of a published file lie on those of its own
types. To each is added uniform noise as wide as a step of its group's scale, and
`--reference-steps` steps towards the published model heal what this costs; its KL from there is
printed. Then, on rows of the text: importance, costs of each matrix in each type, and for each of
`--recipes` the recipe's types and the chosen ones of no more bytes, each rounded with importance,
those of `--ggml` also by ggml's encoders, as llama-quantize does, and those of `--gptq` by GPTQ.
With `--wider` types that kdjax does not write are measured, too, and chosen from in further rows,
rounded by ggml's own encoder (`scripts.bench.ggml`): `--wider=IQ2_S,IQ3_XXS,IQ3_S`. `--train`
trains the chosen types, with `--both` also the recipe's, for seconds, from the masters of
`--start`. A file that stores its tied head next to its embedding has them as one matrix in the
reference and in chosen types; recipes are as llama-quantize makes them of the file, which keeps
both. KL and agreement are from the reference, on held-out rows that no cost was measured on.
Each row is a line of OUT/results.jsonl at once; OUT/costs.json, OUT/types-RECIPE.txt and, with
`--files`, the reference as OUT/reference.gguf (BF16) stay. A later call takes that reference, and
goes on with the rows that are not there. No arm begins that `--limit` seconds leave no time for.
Exit status: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

import kdjax
from kdjax.config import Config
from kdjax.data.pipeline import TextSource, eval_batches
from kdjax.device import runtime
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_local_mesh
from kdjax.errors import reporting
from kdjax.evaluation.choice import choose_mixture, count_padded, list_types
from kdjax.evaluation.costs import (
    Comparison,
    CostFile,
    hash_rows,
    measure_costs,
    round_matrices,
    round_params,
)
from kdjax.formats.blocks import BLOCKS, fit_rows
from kdjax.formats.kquants import ENCODERS
from kdjax.models.checkpoint import open_checkpoint, tie_head
from kdjax.models.decoder import DecoderFunctions, functional
from kdjax.models.gptq import round_model
from kdjax.models.importance import measure_importance
from kdjax.models.loading import tensor_names
from kdjax.models.mixture import Mixture, Part, list_matrices
from kdjax.models.model import Model, load_model
from kdjax.training.forms import Rounded, spread_importance
from kdjax.training.inputs import prepare
from scripts.bench.arms import make_optimizer, run_arms, set_rate, train_for
from scripts.bench.ggml import make_rounding

RECIPES = "q2_k,q3_k_m,iq4_xs,q4_k_m"


class Arm(NamedTuple):
    """One line of the table: types of a recipe or chosen at its bytes, and what is done to them."""

    name: str
    recipe: str
    choice: str  # recipe, chosen, wider
    how: str  # importance, ggml, gptq, trained
    seconds: float = 0.0


def _list_arms(args: argparse.Namespace) -> Iterator[Arm]:
    both = "recipe", "chosen"
    ways = [("importance", args.recipes, (*both, "wider") if args.wider else both)]
    if args.ggml:
        ways += [("ggml", args.ggml, both)]
    if args.gptq:
        ways += [("gptq", args.gptq, both)]
    for how, recipes, choices in ways:
        for recipe, choice in itertools.product(recipes.split(","), choices):
            yield Arm(f"{recipe} {choice} {how}", recipe, choice, how)
    for text in filter(None, args.train.split(";")):
        recipe, _, seconds = text.partition(":")
        for choice in ("chosen", "recipe") if args.both else ("chosen",):
            name = f"{recipe} {choice} trained {seconds} s from {args.start}"
            yield Arm(name, recipe, choice, "trained", float(seconds))


@functools.partial(jax.jit, static_argnames="dtype")
def _add_noise(x: Any, dtype: str, key: Any) -> tuple[Any, Any]:
    """x with uniform noise of a step of each group's scale, and its root mean square in steps.

    Of a type that kdjax does not write it is the least distance of two numbers of a block.
    """
    if dtype in ENCODERS:
        inverse = jnp.abs(fit_rows(x, dtype)[-1])
        step = jnp.where(inverse > 0, 1 / jnp.where(inverse > 0, inverse, 1), 0)
    else:
        gaps = jnp.diff(jnp.sort(x.reshape(-1, BLOCKS[dtype].elements), axis=-1), axis=-1)
        least = 1e-3 * jnp.max(gaps, axis=-1, keepdims=True)  # less is an error of float32
        step = jnp.min(gaps, axis=-1, where=gaps > least, initial=jnp.inf)
        step = jnp.where(jnp.isfinite(step), step, 0)
    step = step.reshape(*x.shape[:-1], -1)
    step = jnp.repeat(step, x.shape[-1] // step.shape[-1], axis=-1)
    noise = jax.random.uniform(key, x.shape, minval=-0.5, maxval=0.5)
    return x + step * noise, jnp.sqrt(jnp.mean(jnp.square(jnp.where(step > 0, noise, 0))))


class Bench:
    """The reference, its rows, its costs and what is made of them."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.began = args, time.monotonic()
        self.stored = args.out / "reference.gguf"
        path = self.stored if self.stored.exists() else args.model
        self.student = self._load(path)
        self.published = open_checkpoint(args.model).spec  # whose matrices recipes are for
        self.judges: dict[bool, Comparison] = {}
        config = Config().data
        config.train, config.heldout, config.seq_len = args.text, args.heldout, args.seq_len
        config.cache_dir = str(args.out / "rows")
        assert self.student.checkpoint is not None
        self.rows = prepare(config, self.student.checkpoint.tokenizer)
        held = list(eval_batches(self.rows.heldout, batch_size=args.cost_rows, limit=None))
        self.cost_batches = held[:1]
        self.judged = (held[1:] or held)[: args.heldout_rows // args.cost_rows or 1]
        self.say("rows")

    def _load(self, path: Path) -> Model:
        """Loads a file in float32; a head that repeats the embedding is the embedding."""
        found, here = tie_head(open_checkpoint(path)), Placement.on(make_local_mesh(1))
        return load_model(found, placement=here, dtype="float32", compute_dtype=self.args.compute)

    def as_published(self, model: Model, mixture: Mixture) -> Model:
        """Returns the model with its embedding once more, as its head, where a mixture has both."""
        functions, spec = model.functions, mixture.spec
        assert isinstance(functions, DecoderFunctions)
        if spec == model.spec:
            return model
        flat: dict[tuple[str, ...], Any] = flatten_dict(model.params)
        twice = unflatten_dict(flat | {("head",): flat["embed",]})
        return model.replace(
            spec=spec, functions=functional(spec, functions.compute)[0], params=twice
        )

    def say(self, what: str) -> None:
        """Logs the seconds so far."""
        print(f"{what}: {time.monotonic() - self.began:.0f} s", flush=True)

    def make_reference(self) -> dict[str, Any]:
        """Moves the model off its file's lattices, and heals it; says how far both went."""
        args, published = self.args, self.student
        if not args.reference_steps or self.stored.exists():
            return {"steps": 0}
        moved, distance = self._dither(published)
        teacher = self.teach(published)
        loss = kdjax.KDLoss(kdjax.forward_kl, 1.0, 0.0)
        settings: dict[str, Any] = self.sizes() | {"allow_degenerate": True}
        step = kdjax.make_step(published, teacher, loss, make_optimizer(), **settings)
        state: Any = step.init(moved)
        source = TextSource(self.rows.train, batch_size=args.batch_size, seed=7)
        for done in range(args.reference_steps):
            set_rate(state, args.reference_rate, done + 1, done / args.reference_steps)
            state, _ = step(state, teacher.params, source.next(None))
        healed, exact = state.params, self.exact
        judge = Comparison(exact, self.judged)
        figures = {
            name: judge.measure(params)._asdict()
            for name, params in (("moved", moved), ("healed", healed))
        }
        del state, moved, judge, teacher
        self.student = published.replace(params=healed)
        del self.exact
        self.say("reference")
        if args.files:
            host = self.student.replace(params=jax.device_get(healed))
            print(kdjax.export_gguf(host, self.stored, dtype="bf16"))
            del host, healed, published
            self.student = self._load(self.stored)
            self.say("stored")
        return {"steps": args.reference_steps, "distance in steps": distance} | figures

    def _dither(self, model: Model) -> tuple[Any, dict[str, float]]:
        """Adds to each number of a block uniform noise as wide as one step of its lattice.

        Training alone moves numbers by a few percent of a step, and rounding undoes that. Returns
        also the mean distance from the lattice in steps, by type; 0.289 is that of any number.
        """
        assert model.checkpoint is not None
        table = model.checkpoint.table
        flat: dict[tuple[str, ...], Any] = flatten_dict(model.params)
        found: dict[str, list[float]] = {}
        stored = tensor_names(table, self.spec)["embed",]  # of two copies the finer one's
        for number, (name, parts) in enumerate(list_matrices(self.spec).items()):
            name = stored[0] if parts[0].path == ("embed",) else name
            dtype = table.info(name).dtype if name in table else "F32"
            for part in parts if BLOCKS[dtype].elements > 1 else ():
                x = flat[part.path] if part.place is None else flat[part.path][part.place]
                noisy, size = _add_noise(x, dtype, jax.random.key(number))
                found.setdefault(dtype, []).append(float(size))
                if part.place is not None:
                    noisy = flat[part.path].at[part.place].set(noisy)
                flat[part.path] = noisy
        means = {dtype: float(np.mean(sizes)) for dtype, sizes in found.items()}
        return unflatten_dict(flat), means

    def cast(self, params: Any) -> Any:
        """Parameters in the dtype of the products."""
        return jax.tree.map(lambda x: x.astype(self.args.compute), params)

    def sizes(self) -> dict[str, Any]:
        """Arguments of `make_step`."""
        return {"microbatches": self.args.microbatches, "chunk_tokens": self.args.chunk_tokens}

    def teach(self, student: Model) -> Model:
        """A student as the steps take it for their teacher."""
        return student.replace(params=self.cast(student.params))

    @property
    def spec(self) -> Any:
        """The architecture."""
        return self.student.spec

    @functools.cached_property
    def exact(self) -> Model:
        """The reference with float32 activations."""
        functions = self.student.functions
        assert isinstance(functions, DecoderFunctions)
        compute = dataclasses.replace(functions.compute, dtype=jnp.dtype(jnp.float32))
        return self.student.replace(functions=functional(self.spec, compute)[0])

    @functools.cached_property
    def imatrix(self) -> str:
        """The file of importances, on rows that train."""
        path = self.args.out / "importance.gguf"
        if not path.exists():
            tokens = (batch["tokens"] for batch in self.read_training(self.args.imatrix_rows))
            texts, size = [self.args.text], self.args.seq_len
            measure_importance(path, self.exact, tokens, datasets=texts, chunk_size=size)
        self.say("importance")
        return str(path)

    def list_types(self, parts: Sequence[Part]) -> tuple[str, ...]:
        """Types that are measured for a tensor: those that kdjax writes, and `--wider`."""
        fits = [x for x in self.args.wider if parts[0].shape[-1] % BLOCKS[x].elements == 0]
        return (*list_types(parts), *fits)

    @functools.cached_property
    def rounding(self) -> Callable[..., Any]:
        """The function that rounds stacks of matrices."""
        return make_rounding() if self.args.wider else round_matrices

    @functools.cached_property
    def costs(self) -> Any:
        """Costs of all matrices, from the file or measured."""
        importance = spread_importance(self.imatrix, self.spec)
        file = CostFile(self.args.out / "costs.json", self.made_of)
        comparison, began = Comparison(self.exact, self.cost_batches), time.monotonic()
        costs = measure_costs(
            comparison, importance, file.read(), file.write, self.list_types, self.rounding
        )
        count = sum(map(len, costs.values()))
        print(f"{count} costs in {time.monotonic() - began:.1f} s", flush=True)
        return costs

    def read_training(self, rows: int) -> Iterator[dict[str, np.ndarray]]:
        """Reads batches of 8 of these rows that train."""
        source = TextSource(self.rows.train, batch_size=8, seed=0)
        return (source.next(None) for _ in range(max(1, rows // 8)))

    @property
    def made_of(self) -> dict[str, str]:
        """The rows that costs are measured on, for the file of costs."""
        return {"rows": hash_rows(self.cost_batches)}

    def judge(self, mixture: Mixture) -> Comparison:
        """The judge of all rows of the table whose mixtures have as many matrices."""
        tied = mixture.spec.tied
        if tied not in self.judges:
            self.judges[tied] = Comparison(self.as_published(self.exact, mixture), self.judged)
        return self.judges[tied]

    def mixture(self, arm: Arm) -> Mixture:
        """The types of an arm; written as a file of types."""
        recipe = Mixture.named(arm.recipe, self.published)
        if arm.choice == "recipe":
            return recipe
        padded = sum(
            count_padded(parts, recipe.tensors[name])
            for name, parts in list_matrices(self.published).items()
        )
        costs = self.costs
        if arm.choice == "chosen":
            given = {name: list_types(parts) for name, parts in list_matrices(self.spec).items()}
            costs = {name: {x: costs[name][x] for x in types} for name, types in given.items()}
        found = choose_mixture(costs, self.spec, padded)
        name = f"types-{arm.recipe}{'' if arm.choice == 'chosen' else '-' + arm.choice}.txt"
        found.write(self.args.out / name)
        return found

    def run(self, arm: Arm) -> dict[str, Any]:
        """Judges one arm."""
        mixture = self.mixture(arm)
        types = list(mixture.tensors.values())
        found: dict[str, Any] = {"bytes": mixture.nbytes, "recipe": arm.recipe}
        found |= {"types": {x: types.count(x) for x in sorted(set(types))}}
        if known := self.costs:
            sums = [known.get(n, {}).get(x, math.nan) for n, x in mixture.tensors.items()]
            found["sum of costs"] = float(np.nansum(sums))
        if arm.how in ("importance", "ggml"):
            rounding = make_rounding(()) if arm.how == "ggml" else self.rounding
            exact = self.as_published(self.exact, mixture).params
            importance = spread_importance(self.imatrix, mixture.spec)
            params = round_params(exact, mixture, importance, rounding)
        elif arm.how == "trained":
            params, trained = self.train(arm, mixture)
            found |= trained
        else:
            masters, kept = self.begin(mixture)
            params = self._see(self._form(mixture), masters, kept)
        figures = self.judge(mixture).measure(params)
        memory = jax.local_devices()[0].memory_stats() or {}
        found["peak_gb"] = memory.get("peak_bytes_in_use", 0) / 1e9
        return found | figures._asdict() | arm._asdict()

    def _form(self, mixture: Mixture) -> Rounded:
        file = self.args.out / "arm.txt"
        mixture.write(file)
        imatrix = self.imatrix if mixture.searches else ""
        return Rounded(str(file), imatrix).choose_types(mixture.spec)

    def begin(self, mixture: Mixture) -> tuple[Any, Any]:
        """Masters and scales by GPTQ; an embedding that is no head gets the exporter's search."""
        began = time.monotonic()
        rows = list(self.read_training(self.args.gptq_rows))
        masters, scales = round_model(self.as_published(self.exact, mixture), rows, mixture)
        kept = self._form(mixture).complete(masters, scales)
        jax.block_until_ready(masters)
        print(f"GPTQ: {time.monotonic() - began:.1f} s", flush=True)
        return masters, kept

    def _see(self, form: Rounded, masters: Any, kept: Any) -> Any:
        return jax.jit(form.see)({}, kept, masters)

    def train(self, arm: Arm, mixture: Mixture) -> tuple[Any, dict[str, Any]]:
        """Trains the types for the arm's seconds; returns the rounded numbers."""
        args = self.args
        loss = kdjax.KDLoss(kdjax.forward_kl, 1.0, 0.0)
        form = self._form(mixture)
        student = self.as_published(self.student, mixture)
        teacher = self.teach(student)
        step = kdjax.make_step(student, teacher, loss, make_optimizer(), form=form, **self.sizes())
        state: Any = step.init(student.params)
        if args.start != "plain":
            masters, kept = self.begin(mixture)
            # The step donates its state: others keep what the masters share with the reference.
            state = state.replace(params=jax.tree.map(jnp.copy, masters), kept=kept)
            del masters, kept
        rate = 2e-5 if arm.recipe == "q2_k" else 1e-5
        source = TextSource(self.rows.train, batch_size=args.batch_size, seed=args.seed)
        given = step, state, teacher.params, source, rate
        state, found = train_for(arm.seconds, *given)
        if args.files:
            kept = student.replace(params=jax.device_get(step.pack(state)))
            name = f"{arm.recipe}-{arm.choice}-trained.gguf"
            print(kdjax.export_gguf(kept, args.out / name, overwrite=True))
        return step.see(state), found | {"rate": rate, "seed": args.seed}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, help="as data.train")
    parser.add_argument("--heldout", default="", help="as data.heldout")
    parser.add_argument("--out", type=Path, default=Path("runs/mixtures"))
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument(
        "--wider", default=(), type=lambda x: tuple(x.split(",")), metavar="TYPES", help="as IQ3_S"
    )
    parser.add_argument("--reference-steps", type=int, default=100)
    parser.add_argument("--reference-rate", type=float, default=1e-5)
    parser.add_argument("--gptq", default="", metavar="RECIPES", help="round by GPTQ, too")
    parser.add_argument("--ggml", default="", metavar="RECIPES", help="round by ggml, too")
    parser.add_argument("--gptq-rows", type=int, default=64)
    parser.add_argument("--train", default="", metavar="RECIPE:SECONDS;...")
    parser.add_argument("--both", action="store_true", help="train the recipe's types, too")
    parser.add_argument("--start", default="plain", choices=("plain", "gptq"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", action="store_true", help="write reference and trained files")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of this call")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--imatrix-rows", type=int, default=128)
    parser.add_argument("--cost-rows", type=int, default=4, help="rows that costs are measured on")
    parser.add_argument("--heldout-rows", type=int, default=32)
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--compute", default="bfloat16", choices=("bfloat16", "float32"))
    return parser


@reporting
def main(argv: list[str] | None = None) -> int:
    """Makes the rows that are not there; returns the exit status."""
    begun, args = time.monotonic(), _parser().parse_args(argv)
    runtime.configure()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    print(bench.make_reference(), flush=True)
    run_arms(_list_arms(args), bench.run, args.out, until=begun + args.limit, around=10.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
