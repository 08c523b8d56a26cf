"""Measures a draft model: drafts accepted along the teacher's text, and the speed-up.

Speculation reads only text that the teacher writes, so the draft is judged on it: on the teacher's
continuations of held-out prompts, greedy and at T = 1. A drafted token's probability of acceptance
is known exactly from both distributions at its position, and so is the expected number of accepted
drafts of every pass: nothing is simulated. A drafting block of a model's file drafts from its own
state after the first draft of a pass, so its probabilities differ by place in the pass.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kdjax.config import OWN_BLOCK
from kdjax.data import pipeline
from kdjax.data.fields import NAMED, Fields
from kdjax.data.rows import COLUMNS, Rows
from kdjax.data.sources import find_files
from kdjax.data.text import Opening, encode_chats, openings
from kdjax.device.sharding import row_shards, split_rows
from kdjax.errors import UserError
from kdjax.evaluation.heldout import POSITIONS, Values, compare, compare_own, shared_spec
from kdjax.evaluation.target import Target
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoding import pad_length
from kdjax.models.draft_functions import DraftFunctions
from kdjax.models.heads import is_head, load_head, open_head_table, read_shape
from kdjax.models.model import Model
from kdjax.models.nextn import find_block, take_block
from kdjax.models.speculation import BlockWriter, TappedWriter, time_drafts
from kdjax.models.tapped import TappedFunctions
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import unembed

MOST_DRAFTS = 16  # drafts a pass, of a draft model
MOST_OWN = 8  # drafts a pass, of a model's drafting block: this many of its passes judge a text
PROMPT_TOKENS = 128  # of a plain text
_SEVERAL = 9  # tokens of the longer of the two timed passes
_PASSES = 8  # timed passes in a call

# How a draft is judged: the temperature of the teacher's text, and the probability that each of its
# tokens is accepted if it was drafted.
RULES: dict[str, tuple[float, Callable[[Values], np.ndarray]]] = {
    "greedy": (0.0, lambda v: np.asarray(v.right)),
    # Given that speculative sampling emits y, it was a draft with q(y) min(1, p(y) / q(y)) / p(y).
    "sampled": (1.0, lambda v: np.exp(np.minimum(np.asarray(v.teacher_ce) - v.ce, 0.0))),
    # Drafts sampled from the top 10 ids, as llama.cpp samples them.
    "sampled_top10": (1.0, lambda v: np.minimum(np.asarray(v.drafted) * np.exp(v.teacher_ce), 1.0)),
    # Otherwise it drafts the top id at any temperature, and keeps it if the teacher draws it.
    "matched": (1.0, lambda v: np.asarray(v.right)),
}


class Costs(NamedTuple):
    """Costs of passes, in passes of the teacher over one token."""

    draft: float  # the draft's pass over one token
    more: float = 0.0  # each additional token in a pass of the teacher
    once: float = 0.0  # of a head that drafts a block in one pass: this pass; `draft` is then 0


class OwnDraft(NamedTuple):
    """A block or head that drafts with inner states of the teacher."""

    attach: Callable[[Model], Model]  # makes it of the loaded teacher
    most: int  # drafts a pass


def find_own(draft: str, served: Checkpoint) -> OwnDraft | None:
    """Finds the block or head that `--draft` names; None if it names another model.

    Raises `UserError` for a model without a block, and for a head of another model.
    """
    if draft == OWN_BLOCK:
        find_block(served.spec, served, new=False)
        return OwnDraft(take_block, MOST_OWN)
    path = Path(draft)
    return open_head(path, served) if is_head(path) else None


def open_head(path: Path, served: Checkpoint) -> OwnDraft:
    """A file's or folder's head as what drafts for a model; raises `UserError` for another's."""
    shape = read_shape(open_head_table(path), served.spec)
    return OwnDraft(functools.partial(load_head, path), shape.most)


def count_blocks(chances: np.ndarray, lengths: np.ndarray, drafts: int) -> tuple[float, float]:
    """Expected accepted drafts, and passes of the teacher, along texts of `lengths`.

    `chances` are `[N, T]`, or `[K, N, T]` if they differ by place in a pass.
    Passes follow each other as in speculation: one accepts some of its drafts and adds a token; the
    next begins there. A text's first token comes with its prompt, and passes whose drafts would
    reach beyond its end are left out. Each position is judged at most once, so its probability,
    given all before it, is all that is needed.
    """
    if chances.ndim == 2:
        chances = np.broadcast_to(chances, (drafts, *chances.shape))
    (count, length), place = chances.shape[-2:], np.arange(drafts)
    begins = np.zeros((count, length + drafts + 2))
    begins[:, 1:2] = 1.0
    accepted = passes = 0.0
    for at in range(1, length - drafts + 1):
        weight = begins[:, at] * (at + drafts <= lengths)
        # The probability that all drafts up to each are accepted; and that exactly this many are.
        reach = np.cumprod(chances[place, :, at + place].T, axis=1)
        exactly = np.concatenate([np.ones((count, 1)), reach], axis=1)
        exactly[:, :-1] -= reach
        begins[:, at + 1 : at + drafts + 2] += weight[:, None] * exactly
        accepted += float(np.sum(weight[:, None] * reach))
        passes += float(np.sum(weight))
    return accepted, passes


def independent(chance: float, drafts: int) -> float:
    """Accepted drafts a pass if all had one probability (arXiv:2211.17192, equation 1)."""
    return float(np.sum(chance ** np.arange(1, drafts + 1)))


def speed_up(accepted: float, drafts: int, costs: Costs) -> float:
    """Speed-up: tokens in the time of one plain token, for `accepted` of `drafts` a pass."""
    return (accepted + 1) / (1 + costs.once + drafts * (costs.draft + costs.more))


def choose_prompts(
    patterns: str, tokenizer: Tokenizer, *, count: int, most: int, fields: Fields = NAMED
) -> list[list[int]]:
    """Reads ids of at most `count` beginnings, spread evenly over the documents of `patterns`.

    For a conversation, everything before an answer of the assistant; a full `prompt`; for a text,
    half of it or 128 tokens. Beginnings of more than `most` tokens are left out. One of several
    equal ones, such as licence headers, is kept. Raises `UserError` if there are none.
    """
    every = list(openings(find_files(patterns, fields), tokenizer, fields))
    places = np.linspace(0, len(every) - 1, min(4 * count, len(every))).astype(int)
    fitting = list(begin_each((every[at] for at in places), tokenizer, most))
    if not fitting:
        raise UserError(
            f"{patterns}: found no beginning of 1 to {most} tokens to continue; expected longer "
            "documents, or conversations with shorter questions."
        )
    chosen = np.linspace(0, len(fitting) - 1, min(count, len(fitting))).astype(int)
    return [list(fitting[place]) for place in chosen]


def begin_rows(rows: Rows, count: int) -> list[list[int]]:
    """Ids of at most `count` beginnings, of the first documents of packed rows.

    Of a conversation it is all before its first answer, of a text half of it or 128 ids. Raises
    `UserError` for rows without any.
    """
    found = []
    for tokens, segments, mask in zip(*rows, strict=True):
        length = int(np.sum(segments == 1))
        answers = np.flatnonzero(mask[:length])
        most = min(PROMPT_TOKENS, length // 2)
        end = int(answers[0]) if len(answers) and answers[0] > 1 else most
        if end:
            found.append(tokens[:end].tolist())
        if len(found) == count:
            break
    if not found:
        raise UserError("found no held-out row to judge the draft on; expected more text.")
    return found


def read_prompts(
    draft: Target | None,
    teacher: Target,
    domains: dict[str, str],
    *,
    count: int,
    new_tokens: int,
    fields: Fields = NAMED,
) -> dict[str, list[list[int]]]:
    """Reads ids of at most `count` prompts of each domain that both models can continue.

    Raises `UserError` for text without any, and for more new tokens than a model has positions.
    """
    small = draft or teacher
    positions = min(target.checkpoint.spec.max_positions for target in (small, teacher))
    if new_tokens < 2 or new_tokens >= positions:
        raise UserError(
            f"found {new_tokens} tokens to continue prompts with; expected 2 to {positions - 1}."
        )
    tokenizer, most = small.checkpoint.tokenizer, positions - new_tokens
    return {
        name: choose_prompts(patterns, tokenizer, count=count, most=most, fields=fields)
        for name, patterns in domains.items()
    }


def begin_each(
    openings: Iterable[Opening], tokenizer: Tokenizer, most: int
) -> dict[tuple[int, ...], Opening]:
    """Openings by the ids to continue: all of a conversation, else as `begin_text` cuts them.

    The first of equal ones is kept; openings of more than `most` ids are left out.
    """
    found: dict[tuple[int, ...], Opening] = {}
    for one, ids in encode_chats(openings, tokenizer):
        if not one.chat:
            ids = begin_text(one.text, tokenizer, whole=one.whole)
        if 0 < len(ids) <= most:
            found.setdefault(tuple(ids), one)
    return found


def begin_text(text: str, tokenizer: Tokenizer, *, whole: bool = False) -> list[int]:
    """Cuts a text to continue: half of it or 128 tokens, or all of it if `whole`."""
    if whole:
        return tokenizer.open_text(tokenizer.encode(text, parse_special=False))
    ids, offsets = tokenizer.encode_with_offsets(text[: 64 * PROMPT_TOKENS], parse_special=False)
    count = min(PROMPT_TOKENS, len(ids) // 2)
    while count and offsets[count][0] < offsets[count - 1][1]:  # not within a character
        count -= 1
    return tokenizer.open_text(ids[:count])


class Continuations(NamedTuple):
    """The teacher's continuations of a domain's prompts at a temperature."""

    domain: str
    temperature: float
    batches: list[dict[str, np.ndarray]]  # their targets are the continuations

    @classmethod
    def of(
        cls,
        domain: str,
        temperature: float,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        batch_size: int,
    ) -> "Continuations":
        """Makes batches from ids of prompts and of their answers; a row holds both."""
        longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        shape = len(prompts), pad_length(longest) + 1
        columns: dict[str, Any] = {n: np.zeros(shape, dtype) for n, dtype in COLUMNS.items()}
        rows = Rows(**columns)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            rows.tokens[i, :end] = [*prompt, *answer]
            rows.segments[i, :end] = 1
            rows.mask[i, len(prompt) : end] = 1
        found = pipeline.eval_batches(rows, batch_size=batch_size, limit=None)
        return cls(domain, temperature, list(found))


def time_pass(model: Model, tokens: int) -> float:
    """Median seconds of a pass of one row over `count` new tokens, up to the next id.

    Several passes run on the device one after another, as in speculation: one call for each would
    time how fast the host launches.
    """
    own = isinstance(model.functions, DraftFunctions)
    writer = model.as_writer("draft" if own else "time")
    functions, real = writer.functions, writer.real
    least = pad_length(1)  # positions before the pass
    at, new = jnp.full((1,), least, jnp.int32), jnp.zeros((1, tokens), jnp.int32)

    @jax.jit
    def run(params: Any, weights: Any, new: Any, at: Any, cache: Any, before: Any) -> Any:
        layers, head = weights

        def extend(carry: Any, _: None) -> Any:
            new, cache = carry
            if isinstance(functions, DraftFunctions):
                hidden, cache = functions.draft_extend(params, new, before, at, cache, layers)
            else:
                hidden, cache = functions.extend(params, new, at, cache, layers)
                cache = cache._replace(read=None)
            logits = unembed(hidden, head)
            return (jnp.argmax(logits[..., :real], axis=-1).astype(jnp.int32), cache), None

        return jax.lax.scan(extend, (new, cache), None, length=_PASSES)[0][0]

    with model.precision():
        if own:
            both = model.params, model.params
            pair: Any = BlockWriter.of(writer, writer, both, 1)
            weights, (cache, states) = pair.prepare(both)[1], pair.open_cache(1, 2 * least)[1]
            before = states[0]
        else:
            weights, before = writer.prepare(model.params), None
            cache = writer.open_cache(1, 2 * least)
        call = functools.partial(run, model.params, weights, new, at, cache, before)
        return _time(call, model)


def time_block(model: Model) -> float:
    """Median seconds of a pass of a head that drafts, of one row: all that it drafts at once."""
    assert isinstance(model.functions, TappedFunctions)
    pair = model.as_drafter(model.functions.shape.at_once)
    assert isinstance(pair, TappedWriter)
    return _time(time_drafts(pair, model.params, pad_length(1), _PASSES), model)


def time_draft(model: Model, one: float) -> Costs:
    """Costs of a draft's passes, of which the teacher's over one token takes `one` second."""
    functions = model.functions
    if not isinstance(functions, TappedFunctions):
        return Costs(time_pass(model, 1) / one)
    cost = time_block(model) / one
    return Costs(0.0, once=cost) if functions.shape.at_once > 1 else Costs(cost)


def _time(run: Callable[[], Any], model: Model) -> float:
    """Median seconds of one of the passes that a call runs."""
    seconds = []
    with model.precision():
        for _ in range(8):
            begun = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append((time.perf_counter() - begun) / _PASSES)
    return float(np.median(seconds[2:]))


def _continue(
    teacher: Target,
    prompts: dict[str, list[list[int]]],
    mesh: Mesh,
    most: int,
    *,
    batch_size: int,
    seed: int,
    timed: bool,
) -> tuple[dict[float, dict[str, list[list[int]]]], tuple[float, float] | None]:
    """Writes the teacher's continuations by temperature and domain, and times its passes."""
    model = teacher.load(mesh)
    stops = teacher.checkpoint.tokenizer.stop_ids
    answers = {
        temperature: {
            name: [
                completion.ids
                for completion in model.generate(
                    part,
                    batch_size=min(len(part), batch_size),
                    max_tokens=most,
                    temperature=temperature,
                    stop_ids=stops,
                    seed=seed,
                )
            ]
            for name, part in prompts.items()
        }
        for temperature in sorted({temperature for temperature, _ in RULES.values()})
    }
    seconds = (time_pass(model, 1), time_pass(model, _SEVERAL)) if timed else None
    return answers, seconds


def measure(
    draft: Target | None,
    teacher: Target,
    prompts: dict[str, list[list[int]]],
    mesh: Mesh,
    *,
    new_tokens: int,
    batch_size: int,
    cost_ratio: float | None = None,
    seed: int = 0,
    own: OwnDraft | None = None,
) -> dict[str, Any]:
    """Measures 1 to 16 drafts a pass by domain and rule, and the best number; JSON-able.

    `prompts` come from `read_prompts`, for the same number of new tokens. At T = 1 `seed` decides
    the draws; `batch_size` rows are written and read at once. Without a `draft` the teacher's
    `own` drafts, by default its drafting block, 1 to 8 a pass.
    Costs are measured on this device, on one row, unless `cost_ratio` is the cost of a draft's pass
    in passes of the teacher; a teacher's pass over several tokens then costs as much as one over
    one token. Raises `UserError` for models that do not go together.
    """
    spec = shared_spec((draft or teacher).checkpoint, teacher.checkpoint)
    drawn = {"batch_size": batch_size, "seed": seed, "timed": cost_ratio is None}
    answers, seconds = _continue(teacher, prompts, mesh, new_tokens, **drawn)
    size = split_rows(batch_size, mesh) * row_shards(mesh)
    texts = [
        Continuations.of(name, temperature, prompts[name], part, size)
        for temperature, parts in answers.items()
        for name, part in parts.items()
    ]
    batches = [batch for text in texts for batch in text.batches]
    own = own or OwnDraft(take_block, MOST_OWN)
    if draft is None:
        values = iter(compare_own(teacher, mesh, batches, spec, size, own.most, own.attach))
    else:
        values = iter([one] for one in compare(draft, teacher, mesh, batches, spec, size))
    read = [[next(values) for _ in text.batches] for text in texts]
    costs = Costs(cost_ratio or 0.0)
    if seconds is not None:
        one, several = seconds
        model = draft.load(mesh) if draft else own.attach(teacher.load(mesh))
        more = (several - one) / one / (_SEVERAL - 1)
        costs = time_draft(model, one)._replace(more=more)
    figures = count_saved(texts, read, costs)
    return {"costs": costs._asdict() | {"measured": cost_ratio is None}, "domains": figures}


def count_saved(
    texts: Sequence[Continuations], values: Sequence[Sequence[Sequence[Values]]], costs: Costs
) -> dict[str, dict[str, Any]]:
    """Computes figures by domain and rule from both models' values, batch by batch; JSON-able.

    A batch has values for each place in a pass, or one for all places. Raises `UserError` for a
    text that ends with its prompts.
    """
    read = {
        (text.domain, text.temperature): [
            _unpack(place, text.batches) for place in zip(*found, strict=True)
        ]
        for text, found in zip(texts, values, strict=True)
    }
    return {
        domain: {
            rule: _figures(read[domain, temperature], chance, costs)
            for rule, (temperature, chance) in RULES.items()
        }
        for domain in dict.fromkeys(text.domain for text in texts)
    }


def _unpack(
    values: Sequence[Values], batches: Sequence[dict[str, np.ndarray]]
) -> tuple[Values, np.ndarray]:
    """Values `[N, T]` of the answers of each row, their first at 0, and their lengths."""
    rows = [
        Values(*(np.asarray(column, np.float64)[i][counted] for column in value))
        for value, batch in zip(values, batches, strict=True)
        for i, counted in enumerate(batch["weights"] != 0)
        if counted.any()
    ]
    lengths = np.asarray([len(row.ce) for row in rows])
    if not len(rows) or not (lengths > 1).any():
        raise UserError("the teacher ended every prompt at once: use prompts that it continues")
    columns = [np.zeros((len(rows), lengths.max())) for _ in Values._fields]
    for i, row in enumerate(rows):
        for column, own in zip(columns, row, strict=True):
            column[i, : lengths[i]] = own
    return Values(*columns), lengths  # type: ignore[arg-type]


def _figures(
    read: Sequence[tuple[Values, np.ndarray]], chance: Callable[[Values], np.ndarray], costs: Costs
) -> dict[str, Any]:
    """Figures from values by place in a pass; the share of kept drafts is of the first place."""
    lengths = read[0][1]
    inside = np.arange(read[0][0].ce.shape[1])[None] < lengths[:, None]
    by_place = np.stack([chance(values) * inside for values, _ in read])
    chances, alike = by_place[0], len(read) == 1
    # The first token comes with the prompt; drafts begin after it.
    tokens = int(np.sum(np.maximum(lengths - 1, 0)))
    share = float(np.sum(chances[:, 1:])) / max(tokens, 1)
    bounds = [*POSITIONS.values(), max(inside.shape[1], max(POSITIONS.values()) + 1)]
    places = {
        name: {
            "kept": float(chances[:, begin:end].sum()),
            "tokens": int(inside[:, begin:end].sum()),
        }
        for name, begin, end in zip(POSITIONS, [1, *bounds[1:]], bounds[1:], strict=False)
    }
    blocks = {}
    for drafts in range(1, (MOST_DRAFTS if alike else len(read)) + 1):
        accepted, passes = count_blocks(chances if alike else by_place, lengths, drafts)
        if passes == 0:  # every text is shorter
            break
        blocks[drafts] = {
            "accepted": accepted / passes,
            "passes": passes,
            "independent": independent(share, drafts),
            "speed_up": speed_up(accepted / passes, drafts, costs),
        }
    known = (k for k, block in blocks.items() if math.isfinite(block["speed_up"]))
    best = max(known, key=lambda k: blocks[k]["speed_up"], default=None)
    return {"tokens": tokens, "kept": share, "places": places, "best": best, "blocks": blocks}
