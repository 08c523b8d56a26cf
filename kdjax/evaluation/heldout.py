"""Held-out figures of one model, or of a student against a teacher: overall, by position, by class.

Values of each position come off the device as they are, so that they can be sorted into any
buckets; sums are float64, merged, and divided once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kdjax.data.text import Document, documents, find_files
from kdjax.errors import UserError
from kdjax.evaluation.classes import CLASSES, END, class_ids, token_bytes
from kdjax.evaluation.target import Target
from kdjax.losses.chunked import HeadSpec, chunked, cut, joined
from kdjax.losses.divergences import cross_entropy, kl_divergence, log_softmax, soft_divergence
from kdjax.models.model import Vocabulary, align
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import mask_padding, unembed

# Positions are counted from the document's start, or from the row's where a document goes on in it:
# what counts is how much the model could see before.
POSITIONS = {"0-15": 0, "16-63": 16, "64-255": 64, "256-1023": 256, "1024+": 1024}
TOP = 5


class _Piece(NamedTuple):
    document: int
    start: int  # in the document's ids
    count: int  # ids, the last of which is only a target


def _rows(lengths: Sequence[int], row_length: int) -> list[list[_Piece]]:
    """Documents one after the other in rows of `row_length` ids, cut at a row's end.

    As `data.rows` packs them; the next piece repeats the last id, as its first input.
    """
    rows: list[list[_Piece]] = [[]]
    fill = 0
    for document, length in enumerate(lengths):
        start = 0
        while start < length - 1:
            if row_length - fill < 2:
                rows.append([])
                fill = 0
            take = min(row_length - fill, length - start)
            rows[-1].append(_Piece(document, start, take))
            fill += take
            start += take - 1
    return [row for row in rows if row]


@dataclasses.dataclass(frozen=True)
class Text:
    """Rows of one domain: arrays `[N, T]`, the model's inputs and what each target is."""

    tokens: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    weights: np.ndarray  # float32, 1 where the target counts
    classes: np.ndarray  # int8, index into CLASSES, of the target
    bytes: np.ndarray  # int32, of UTF-8 text that the target stands for

    def __len__(self) -> int:
        return len(self.tokens)


def read_text(patterns: str, tokenizer: Tokenizer, *, rows: int, seq_len: int) -> Text:
    """At most `rows` rows of `seq_len` positions, spread evenly over the text of `patterns`.

    Raises `UserError` for text that cannot be read or has no target.
    """
    read = list(documents(find_files(patterns), tokenizer))
    ids = tokenizer.encode_batch([document.text for document in read])
    lengths = [len(one) + document.open for one, document in zip(ids, read, strict=True)]
    packed = _rows(lengths, seq_len + 1)
    if not packed:
        raise UserError(f"{patterns}: the text is empty: no document has two tokens or more.")
    chosen = np.linspace(0, len(packed) - 1, min(rows, len(packed))).astype(np.int64)
    kinds = (np.int32, np.int32, np.int32, np.int32, np.float32, np.int8, np.int32)
    text = Text(*(np.zeros((len(chosen), seq_len), kind) for kind in kinds))
    known: dict[int, tuple[np.ndarray, ...]] = {}
    for row, which in enumerate(chosen):
        at = 0
        for segment, piece in enumerate(packed[which], 1):
            if piece.document not in known:  # pieces come in order: the last few would do
                known = {piece.document: _describe(read[piece.document], tokenizer)}
            _fill(text, row, at, segment, piece, known[piece.document])
            at += piece.count
    return text


def _describe(document: Document, tokenizer: Tokenizer) -> tuple[np.ndarray, ...]:
    """Ids, classes, bytes and weights of a document's tokens."""
    ids, offsets = tokenizer.encode_with_offsets(document.text)
    if document.open:
        ids, offsets = [*ids, tokenizer.end_of_text_id], [*offsets, (0, 0)]
    spans = document.trained
    weights = [1.0 if spans is None else float(any(a <= s < b for a, b in spans))
               for s, _ in offsets]  # fmt: skip
    classes = class_ids(document.text, document.source, offsets)
    sizes = token_bytes(document.text, offsets)
    return np.asarray(ids, np.int32), classes, sizes, np.asarray(weights, np.float32)


def _fill(text: Text, row: int, at: int, segment: int, piece: _Piece,
          known: tuple[np.ndarray, ...]) -> None:  # fmt: skip
    """Writes a piece into a row. Its last id is an input too if there is room, as in training."""
    ids, classes, sizes, weights = (c[piece.start : piece.start + piece.count] for c in known)
    count = piece.count - 1  # targets
    where = slice(at, at + count)
    inputs = slice(at, min(at + piece.count, text.tokens.shape[1]))
    width = inputs.stop - at
    text.tokens[row, inputs] = ids[:width]
    text.segment_ids[row, inputs] = segment
    text.positions[row, inputs] = np.arange(width)
    text.labels[row, where], text.classes[row, where] = ids[1:], classes[1:]
    text.bytes[row, where], text.weights[row, where] = sizes[1:], weights[1:]


class Values(NamedTuple):
    """Of each position, float32 `[B, T]`; those of the pair are zero without a teacher."""

    ce: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    right: Float[Array, "B T"]  # 1 where the model ranks the target first
    teacher_ce: Float[Array, "B T"]
    kl_ts: Float[Array, "B T"]  # KL(teacher || student), nats
    kl_st: Float[Array, "B T"]
    jsd: Float[Array, "B T"]  # Jensen-Shannon divergence, nats: at most ln 2
    top1: Float[Array, "B T"]  # 1 where both rank the same id first
    top5: Float[Array, "B T"]  # part of the five ids ranked first that both share


def _log_probabilities(hidden: Array, head: Array, spec: HeadSpec) -> Array:
    logits = unembed(hidden, cut(head, hidden, spec))
    return log_softmax(mask_padding(logits, spec.real_vocab), 1.0)


def _values(s: Array, t: Array | None, labels: Array) -> Values:
    """Of log-probabilities `[B, T, V]`."""
    order = jax.lax.top_k(s, TOP)[1]
    entropy = -jnp.sum(jnp.exp(s) * s, axis=-1)
    own = cross_entropy(s, labels), entropy, (order[..., 0] == labels).astype(jnp.float32)
    if t is None:
        return Values(*own, *[jnp.zeros_like(entropy)] * 6)
    theirs = jax.lax.top_k(t, TOP)[1]
    shared = jnp.any(order[..., :, None] == theirs[..., None, :], axis=-1)
    return Values(*own, cross_entropy(t, labels), kl_divergence(t, s), kl_divergence(s, t),
                  soft_divergence(t, s, "jsd"),
                  (order[..., 0] == theirs[..., 0]).astype(jnp.float32),
                  jnp.mean(shared.astype(jnp.float32), axis=-1))  # fmt: skip


def position_values(
    hidden: Float[Array, "B T D1"],
    head: Float[Array, "V1 D1"],
    labels: Int[Array, "B T"],
    teacher_hidden: Float[Array, "B T D2"] | None = None,
    teacher_head: Float[Array, "V2 D2"] | None = None,
    *,
    spec: HeadSpec,
) -> Values:
    """All figures of every position at T = 1, `chunk_tokens` positions of logits at a time."""

    def one(xs: tuple[Array, ...]) -> Values:
        s = _log_probabilities(xs[0], head, spec)
        if teacher_hidden is None or teacher_head is None:
            return _values(s, None, xs[1])
        return _values(s, _log_probabilities(xs[2], teacher_head, spec), xs[1])

    inputs = (hidden, labels) if teacher_hidden is None else (hidden, labels, teacher_hidden)
    made = jax.lax.map(one, tuple(chunked(x, spec) for x in inputs))
    return Values(*(joined(x, labels.shape[1]) for x in made))


def _batches(text: Text, size: int) -> list[dict[str, np.ndarray]]:
    """Batches of `size` rows, the last filled up with rows without weight or segment."""
    batches = []
    for start in range(0, len(text), size):
        columns = dataclasses.asdict(text)
        part = {name: column[start : start + size] for name, column in columns.items()}
        lack = size - len(part["tokens"])
        batches.append({k: np.pad(v, ((0, lack), (0, 0))) for k, v in part.items()})
    return batches


def _forward(target: Target, mesh: Mesh, batches: Sequence[dict[str, np.ndarray]],
             use: Callable[[int, Array, Array], Any]) -> list[Any]:  # fmt: skip
    """What `use(batch number, hidden, head)` makes of each batch, with only this model loaded."""
    most = max(int(batch["segment_ids"].max()) for batch in batches)
    with target.precision():
        provider = target.load(mesh, most)
        head = jax.block_until_ready(jax.jit(provider.apply.head)(provider.params))
        states = provider.hidden_states(batches, mesh)
        return [use(i, hidden, head) for i, hidden in enumerate(states)]


def measure(target: Target, teacher: Target | None, domains: dict[str, str], mesh: Mesh, *,
            rows: int, seq_len: int, batch_size: int) -> dict[str, Any]:  # fmt: skip
    """Figures by domain, each with `overall`, `positions` and `classes`; JSON-able.

    One model is on the devices at a time: the teacher's hidden states wait on the host. Raises
    `UserError` for text or models that do not go together.
    """
    shared = vocabulary(target, teacher)
    spec = HeadSpec(1.0, 0.0, shared.width, shared.real, chunk_tokens=256)
    texts = {
        name: read_text(patterns, target.tokenizer, rows=rows, seq_len=seq_len)
        for name, patterns in domains.items()
    }
    batches = {name: _batches(text, batch_size) for name, text in texts.items()}
    flat = [batch for domain in batches.values() for batch in domain]
    waiting: list[Any] = []
    if teacher is not None:
        waiting = _forward(teacher, mesh, flat, lambda i, h, w: (np.asarray(h), w if i == 0 else 0))
    compute = jax.jit(functools.partial(position_values, spec=spec))

    def use(i: int, hidden: Array, head: Array) -> Values:
        theirs = (waiting[i][0], waiting[0][1]) if waiting else ()
        return jax.device_get(compute(hidden, head, flat[i]["labels"], *theirs))

    values = _forward(target, mesh, flat, use)
    figures, at, pair = {}, 0, teacher is not None
    for name, domain in batches.items():
        figures[name] = _figures(values[at : at + len(domain)], domain, pair)
        at += len(domain)
    if len(figures) > 1:
        figures["all"] = _figures(values, flat, pair)
    return figures


def vocabulary(target: Target, teacher: Target | None) -> Vocabulary:
    """The ids that are compared. Raises `UserError` for models of different tokenizers."""
    real = min(target.tokenizer.vocab_size, target.spec.vocab_size)
    if teacher is None:
        return Vocabulary(target.spec.vocab_size, real)
    return align(target.spec, teacher.spec, target.tokenizer, teacher.tokenizer)


def _figures(values: Sequence[Values], batches: Sequence[dict[str, np.ndarray]],
             pair: bool) -> dict[str, Any]:  # fmt: skip
    columns = {
        name: np.concatenate([np.asarray(getattr(v, name), np.float64).ravel() for v in values])
        for name in Values._fields
    }
    columns |= {
        name: np.concatenate([batch[name].ravel() for batch in batches])
        for name in ("weights", "positions", "classes", "bytes")
    }
    counted = columns.pop("weights") != 0
    columns = {name: column[counted] for name, column in columns.items()}
    if not counted.any():
        raise UserError("the text has no position to evaluate: give longer documents.")
    bucket = np.searchsorted(list(POSITIONS.values()), columns["positions"], side="right") - 1
    everything = np.ones(len(bucket), bool)
    groups = {
        "positions": {name: bucket == i for i, name in enumerate(POSITIONS)},
        "classes": {name: columns["classes"] == i for i, name in enumerate(CLASSES)},
    }
    return {"overall": _means(columns, everything, pair)} | {
        kind: {name: _means(columns, where, pair) for name, where in group.items() if where.any()}
        for kind, group in groups.items()
    }


def _means(columns: dict[str, np.ndarray], where: np.ndarray, pair: bool) -> dict[str, Any]:
    """Sums over the positions of `where`, each divided once by their count."""
    names = Values._fields if pair else Values._fields[:3]
    count = int(where.sum())
    mean = {name: math.fsum(columns[name][where]) / count for name in names}
    figures: dict[str, Any] = {"tokens": count, "ce": mean.pop("ce")}
    figures["perplexity"] = math.exp(min(figures["ce"], 700.0))
    if covered := int(columns["bytes"][where].sum()):
        # The end of a text is a token and no text: its nats have no bytes to be spread over.
        nats = math.fsum(columns["ce"][where & (columns["classes"] != END)])
        figures["bits_per_byte"] = nats / math.log(2) / covered
        figures["bytes"] = covered
    return figures | mean
