"""Held-out figures of one model, or of a student against a teacher: overall, by position, by class.

Values of each position are read from the device, so that they can be sorted into any buckets; sums
are float64, merged, and divided once.
"""

import base64
import collections
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kdjax.data import pipeline
from kdjax.data.fields import NAMED, Fields
from kdjax.data.rows import (
    COLUMNS,
    Packer,
    Piece,
    Rows,
    WholePacker,
    tokenize_documents,
    warn_of_marks,
)
from kdjax.data.sources import find_files
from kdjax.data.text import Document, documents, encode_documents, render_records
from kdjax.device import cluster
from kdjax.device.sharding import row_shards, split_rows
from kdjax.errors import UserError
from kdjax.evaluation.classes import CLASSES, END, class_ids, token_bytes
from kdjax.evaluation.target import Target
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.divergences import (
    acceptance,
    jensen_shannon,
    kl_divergence,
    log_softmax,
    total_variation,
)
from kdjax.losses.kd import KDLoss, cross_entropy
from kdjax.losses.positions import COMPARED_CHUNK, read_positions, share_in_common
from kdjax.losses.shared import SharedIds, take_positions
from kdjax.losses.top_ids import keep_top_k, top_k
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.kernels.common import EXCLUDED
from kdjax.models.model import Model
from kdjax.models.nextn import take_block
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import SomeRows
from kdjax.progress import counted
from kdjax.training.heldout import compute_perplexity, count_bits
from kdjax.training.pair import choose_vocabulary
from kdjax.training.vocabulary import Vocabulary

_log = logging.getLogger("kdjax")

# Positions are counted from the document's start, or from the row's start for a document that began
# in an earlier row: what matters is how much the model could see before.
POSITIONS = {"0-15": 0, "16-63": 16, "64-255": 64, "256-1023": 256, "1024+": 1024}
TOP = 5
DRAWN = 10  # number of ids that llama.cpp samples a draft from
_OWN = ("ce", "entropy", "right", "drafted")  # the figures of one model, first of `Values`


@dataclasses.dataclass(frozen=True)
class Text:
    """Packed rows of one domain, with two more columns `[N, seq_len + 1]`, one entry for each id.

    As batch columns (`data.pipeline.Columns`) they describe each position's target.
    """

    rows: Rows
    classes: np.ndarray  # int8, index into CLASSES
    bytes: np.ndarray  # int32, UTF-8 bytes of the id's text
    files: Sequence[Path] = ()
    fields: Fields = NAMED

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        """Columns `[T]` of a row."""
        return {"classes": self.classes[row, 1:], "bytes": self.bytes[row, 1:]}

    def batches(self, size: int) -> list[dict[str, np.ndarray]]:
        """Yields batches of `size` rows; rows without weight or segment fill up the last."""
        return list(pipeline.eval_batches(self.rows, batch_size=size, limit=None, more=self))


def read_text(
    patterns: str,
    tokenizer: Tokenizer,
    *,
    rows: int,
    seq_len: int,
    parse_special: bool = False,
    fields: Fields = NAMED,
) -> Text:
    """Reads at most `rows` rows of `seq_len` positions, spread evenly over the text of `patterns`.

    `parse_special` is as for `data.rows.tokenize_documents`. Of a record longer than a row the end
    is read. Raises `UserError` for text that cannot be read or has no target.
    """
    files = find_files(patterns, fields)
    source = documents(files, tokenizer, fields)
    packer, placed = Packer(seq_len + 1), list[tuple[Document, list[Piece]]]()
    wholes = WholePacker[Document](seq_len + 1, seq_len + 1, "cut")
    for document, ids, _ in tokenize_documents(
        source, tokenizer, tokenizer.end_of_text_id, parse_special=parse_special
    ):
        if document.whole:
            wholes.add(document, len(ids))
        else:
            placed.append((document, packer.place(len(ids))))
    records, more = wholes.place(packer.rows)
    placed += ((document, [piece]) for document, piece in records)
    count = packer.rows + more
    marks: collections.Counter[str] = collections.Counter()
    for document, _ in placed:
        if document.open:
            marks.update(tokenizer.count_marks(document.text))
    warn_of_marks(patterns, dict(marks.most_common()), tokenizer, parse_special)
    if not count:
        raise UserError(f"{patterns}: the text is empty: no document has two tokens or more.")
    chosen = np.linspace(0, count - 1, min(rows, count)).astype(np.int64)
    at = {int(row): i for i, row in enumerate(chosen)}
    dtypes = COLUMNS | {"classes": np.int8, "bytes": np.int32}
    shape = len(at), seq_len + 1
    columns: dict[str, Any] = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
    for document, pieces in placed:
        if not any(piece.row in at for piece in pieces):
            continue
        values = _describe_tokens(document, tokenizer, parse_special=parse_special)
        for piece in pieces:
            if piece.row in at:
                row = {name: c[at[piece.row]] for name, c in columns.items()}
                piece.copy(values, row, tokenizer.opening_id)
    classes, sizes = columns.pop("classes"), columns.pop("bytes")
    return Text(Rows(**columns), classes, sizes, files, fields)


def _describe_tokens(
    document: Document, tokenizer: Tokenizer, *, parse_special: bool
) -> dict[str, np.ndarray]:
    """Ids, loss mask, classes and bytes of a document's tokens, its end included."""
    if document.said is not None:
        ids, mask = document.said.ids, document.said.mask
        offsets = tokenizer.find_offsets(ids.tolist())
    else:
        ((ids, places),) = encode_documents([document], tokenizer, parse_special=parse_special)
        mask, offsets = document.loss_mask(places), list(map(tuple, places.tolist()))
    if document.open:
        ids, offsets = np.append(ids, tokenizer.end_of_text_id), [*offsets, (0, 0)]
        mask = np.append(mask, True)
    return {
        "tokens": ids,
        "mask": mask,
        "classes": class_ids(document.text, document.source, offsets),
        "bytes": token_bytes(document.text, offsets),
    }


class Values(NamedTuple):
    """Figures of each position, float32 `[B, T]`; comparisons are zero without a teacher."""

    ce: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    right: Float[Array, "B T"]  # 1 where the model ranks the target first
    drafted: Float[Array, "B T"]  # probability that it drafts the target, from its top DRAWN ids
    teacher_ce: Float[Array, "B T"]
    teacher_entropy: Float[Array, "B T"]
    kl_ts: Float[Array, "B T"]  # KL(teacher || student), nats
    kl_st: Float[Array, "B T"]
    jsd: Float[Array, "B T"]  # Jensen-Shannon divergence, nats: at most ln 2
    tv: Float[Array, "B T"]  # total variation
    acceptance: Float[Array, "B T"]  # share of the model's drafts accepted at T = 1
    top1: Float[Array, "B T"]  # 1 where both rank the same id first
    top5: Float[Array, "B T"]  # part of the five ids ranked first that both share
    cosine: Float[Array, "B T"]  # of the two vectors of logits
    difference: Float[Array, "B T"]  # largest difference of a logit


def _compare(
    both: Sequence[Array | None], labels: Array, compared: Array | None = None, *, shared: int = 0
) -> Values:
    """Computes all figures from logits `[B, T, V]` of the model, and of a teacher if given.

    With `shared` the two are compared over that many ids, the first, where `compared` is not 0;
    comparisons are NaN elsewhere.
    """
    teacher_logits, logits = both
    assert logits is not None
    if shared:
        own = _compare([None, logits], labels)[: len(_OWN)]
        seen = [x[..., :shared] for x in (teacher_logits, logits)]  # type: ignore[index]
        others = _compare(seen, jnp.minimum(labels, shared - 1))[len(_OWN) :]
        known = jnp.where(labels < shared, others[0], jnp.nan), *others[1:]
        return Values(*own, *(jnp.where(compared != 0, x, jnp.nan) for x in known))
    s = log_softmax(logits, 1.0)
    top = top_k(s, TOP)[1]
    drafted = jnp.exp(-cross_entropy(keep_top_k(s, DRAWN), labels))
    right = (top[..., 0] == labels).astype(jnp.float32)
    own = cross_entropy(s, labels), _entropy(s), right, drafted
    if teacher_logits is None:
        return Values(*own, *[jnp.zeros_like(own[0])] * (len(Values._fields) - len(own)))
    t = log_softmax(teacher_logits, 1.0)
    teacher_top = top_k(t, TOP)[1]
    # Ids that do not exist hold -1e30 on both sides.
    x, y = (jnp.where(z == EXCLUDED, 0.0, z) for z in (logits, teacher_logits))
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return Values(
        *own,
        teacher_ce=cross_entropy(t, labels),
        teacher_entropy=_entropy(t),
        kl_ts=kl_divergence(t, s),
        kl_st=kl_divergence(s, t),
        jsd=jensen_shannon(t, s),
        tv=total_variation(t, s),
        acceptance=acceptance(t, s),
        top1=(top[..., 0] == teacher_top[..., 0]).astype(jnp.float32),
        top5=share_in_common(top, teacher_top),
        cosine=jnp.sum(x * y, axis=-1) / jnp.maximum(norms, 1e-30),
        difference=jnp.max(jnp.abs(x - y), axis=-1),
    )


def _entropy(log_probs: Array) -> Array:
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def position_values(
    hidden: Float[Array, "B T D1"],
    head: Float[Array, "V1 D1"] | SomeRows,
    labels: Int[Array, "B T"],
    teacher_hidden: Float[Array, "B T D2"] | None = None,
    teacher_head: Float[Array, "V2 D2"] | None = None,
    places: Int[Array, "B T"] | None = None,
    *,
    spec: HeadSpec,
    ids: SharedIds | None = None,
) -> Values:
    """All figures of every position at T = 1, `chunk_tokens` positions of logits at a time.

    A teacher of another tokenizer has `ids`, and hidden states of another row, of which `places`
    are the student's positions: below 0, comparisons are NaN.
    """
    if ids is None or teacher_hidden is None or places is None:
        states = (teacher_hidden, teacher_head), (hidden, head)
        return read_positions(_compare, states, labels, spec=spec)
    assert isinstance(head, Array)
    theirs = take_positions(teacher_hidden, places)
    states = (theirs, ids.take_teacher(teacher_head)), (hidden, ids.order_student(head))
    compare_shared = functools.partial(_compare, shared=ids.shared)
    columns = ids.order_labels(labels), (places >= 0).astype(jnp.int32)
    return read_positions(compare_shared, states, *columns, spec=spec)


def _forward(
    target: Target, mesh: Mesh, batches: Sequence[dict[str, np.ndarray]]
) -> Iterator[tuple[Array, Array]]:
    """Yields hidden states of each batch, and the head; frees the model after the last batch."""
    if not batches:
        return
    model = target.load(mesh, max(int(batch["segment_ids"].max()) for batch in batches))
    head = jax.block_until_ready(jax.jit(model.functions.head)(model.params))
    told = counted(batches, f"batches, {target}") if jax.process_index() == 0 else batches
    for hidden in model.hidden_states(told):
        yield hidden, head


def compare(
    target: Target,
    teacher: Target | None,
    mesh: Mesh,
    batches: Sequence[dict[str, np.ndarray]],
    spec: HeadSpec,
    size: int,
    vocabulary: Vocabulary | None = None,
) -> list[Values]:
    """Yields all figures of every position of each batch of `size` rows, on the host.

    One model is on the devices at a time: the teacher's hidden states wait on the host. Several
    processes share the batches, and each has all figures.
    """
    mine, vocabulary = cluster.share(batches), vocabulary or Vocabulary(spec.width, spec.real_vocab)
    waiting: Sequence[tuple[Any, ...]] = [()] * len(mine)
    if teacher is not None:
        read = [vocabulary.read_as_teacher(batch) for batch in mine]
        with _precision(teacher):
            states = _forward(teacher, mesh, [batch for batch, _ in read])
            waiting = [
                (np.asarray(hidden), head, places)
                for (hidden, head), (_, places) in zip(states, read, strict=True)
            ]
    compute = jax.jit(functools.partial(position_values, spec=spec, ids=vocabulary.ids))
    with _precision(target, teacher):
        ours = zip(_forward(target, mesh, mine), mine, waiting, strict=True)
        found = [_encode(compute(*own, b["labels"], *theirs)) for own, b, theirs in ours]
    return [_decode(text, size) for text in cluster.collect("values", found)]


def compare_own(
    target: Target,
    mesh: Mesh,
    batches: Sequence[dict[str, np.ndarray]],
    spec: HeadSpec,
    size: int,
    drafts: int,
    attach: Callable[[Model], Model] = take_block,
) -> list[list[Values]]:
    """Compares a model's drafting block with the model, as `compare` does two models.

    `attach` makes the block, or a head, of the model.
    For each batch, yields the figures of the first draft of a pass at every position, then of the
    second, and so on up to `drafts`.
    """
    mine, found = cluster.share(batches), []
    compute = jax.jit(functools.partial(position_values, spec=spec))
    with _precision(target):
        block = attach(target.load(mesh))
        functions: Any = block.functions
        made = (jax.jit(make)(block.params) for make in functions.list_heads())
        theirs, *_, ours = [*jax.block_until_ready([*made])] * 2
        states = block.hidden_states(mine, drafts=drafts)
        for batch, read in zip(mine, states, strict=True):
            layers, *own = (read[:, number] for number in range(drafts + 1))
            inputs = batch["labels"], layers, theirs
            found.append([_encode(compute(one, ours, *inputs)) for one in own])
    return [[_decode(x, size) for x in texts] for texts in cluster.collect("values", found)]


def measure(
    target: Target,
    teacher: Target | None,
    texts: dict[str, Text],
    mesh: Mesh,
    *,
    batch_size: int,
    vocabulary: Vocabulary | None = None,
) -> dict[str, Any]:
    """Measures figures by domain, each with `overall`, `positions` and `classes`; JSON-able.

    `texts` come from `read_text` with the target's tokenizer, by name; for several, "all" has the
    figures over all of them. `vocabulary` is the models', which has learned these texts; default:
    found here. Raises `UserError` for models that do not go together.
    """
    if vocabulary is None:
        vocabulary = shared_vocabulary(target.checkpoint, teacher and teacher.checkpoint)
        learn_texts(vocabulary, target, teacher, texts)
    spec = _make_spec(vocabulary)
    size = split_rows(batch_size, mesh) * row_shards(mesh)
    batches = {name: text.batches(size) for name, text in texts.items()}
    flat = [batch for domain in batches.values() for batch in domain]
    values = compare(target, teacher, mesh, flat, spec, size, vocabulary)
    rest, pair = iter(values), teacher is not None
    figures = {
        name: _figures([next(rest) for _ in domain], domain, pair)
        for name, domain in batches.items()
    }
    return figures | ({"all": _figures(values, flat, pair)} if len(figures) > 1 else {})


def learn_texts(
    vocabulary: Vocabulary, target: Target, teacher: Target | None, texts: Mapping[str, Text]
) -> None:
    """Reads the conversations of `texts` for a vocabulary, as each model's template renders them.

    Raises `UserError` naming a record that one of the templates refuses.
    """
    if teacher is not None:
        both = target.checkpoint.tokenizer, teacher.checkpoint.tokenizer
        for text in texts.values():
            vocabulary.learn(render_records(text.files, *both, text.fields))


def _encode(values: Values) -> str:
    """Encodes values as text, to send them between processes."""
    return base64.b64encode(np.stack(jax.device_get(values)).tobytes()).decode()


def _decode(text: str, rows: int) -> Values:
    data: Any = np.frombuffer(base64.b64decode(text), np.float32)
    return Values(*data.reshape(len(Values._fields), rows, -1))


def _precision(*targets: Target | None) -> contextlib.AbstractContextManager[Any]:
    """Context that makes heads multiply in float32, not TF32, if one of the models does."""
    exact = any(target is not None and target.form.dtype == "float32" for target in targets)
    return jax.default_matmul_precision("highest" if exact else "default")


def shared_spec(model: Checkpoint, teacher: Checkpoint | None) -> HeadSpec:
    """Head of the comparison of two models; raises `UserError` if their vocabularies differ."""
    return _make_spec(shared_vocabulary(model, teacher, "same"))


def _make_spec(shared: Vocabulary) -> HeadSpec:
    return HeadSpec(KDLoss(), shared.width, shared.real, chunk_tokens=COMPARED_CHUNK)


def shared_vocabulary(
    model: Checkpoint, teacher: Checkpoint | None, asked: str = "auto"
) -> Vocabulary:
    """Finds the compared ids, of two tokenizers those that both have.

    `asked` is as for `choose_vocabulary`; either of the models may have the larger vocabulary.
    """
    rows, tokenizer = model.spec.vocab_size, model.tokenizer
    if teacher is None:
        return Vocabulary(rows, min(tokenizer.vocab_size, rows))
    sizes = rows, teacher.spec.vocab_size
    shared = choose_vocabulary(*sizes, tokenizer, teacher.tokenizer, asked, either=True)
    if shared.record:
        _log.info("%s", shared.describe())
    return shared


def _figures(
    values: Sequence[Values], batches: Sequence[dict[str, np.ndarray]], pair: bool
) -> dict[str, Any]:
    """Figures over all positions with weight, and by place in the document and class of target."""
    columns = {
        name: np.concatenate([np.asarray(getattr(v, name), np.float64).ravel() for v in values])
        for name in (Values._fields if pair else _OWN)
    }
    columns |= {
        name: np.concatenate([batch[name].ravel() for batch in batches])
        for name in ("weights", "positions", "classes", "bytes")
    }
    counted = columns.pop("weights") != 0
    columns = {name: column[counted] for name, column in columns.items()}
    if not counted.any():
        raise UserError("the text has no position to evaluate: give longer documents.")
    bucket = np.searchsorted(list(POSITIONS.values()), columns.pop("positions"), side="right") - 1
    groups = {
        "positions": {name: bucket == i for i, name in enumerate(POSITIONS)},
        "classes": {name: columns["classes"] == i for i, name in enumerate(CLASSES)},
    }

    def summarise(members: np.ndarray) -> dict[str, Any]:
        return _summarise({name: column[members] for name, column in columns.items()})

    return {"overall": _summarise(columns)} | {
        kind: {name: summarise(members) for name, members in group.items() if members.any()}
        for kind, group in groups.items()
    }


def _summarise(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Means over the positions of `columns`, summed and divided once, and two extremes."""
    classes, sizes = columns["classes"], columns["bytes"]
    figures: dict[str, Any] = {"tokens": len(classes)}
    for name in (name for name in Values._fields if name in columns):
        known = columns[name][~np.isnan(columns[name])]
        if name == "kl_ts" and len(known) < len(classes):  # of two tokenizers
            figures["compared"] = len(known) / len(classes)
        if not len(known):
            continue
        if name == "difference":
            figures["max_difference"] = float(known.max())
            continue
        figures[name] = math.fsum(known) / len(known)
        if name in ("ce", "teacher_ce"):
            perplexity = compute_perplexity(figures[name])
            figures[name.removesuffix("ce") + "perplexity"] = perplexity
        if name == "cosine":
            figures["min_cosine"] = float(known.min())
    if covered := int(sizes.sum()):
        # The end of a text is a token without bytes, so its nats are left out.
        nats = math.fsum(columns["ce"][classes != END])
        figures["bits_per_byte"] = count_bits(nats, covered)
        figures["bytes"] = covered
    return figures
