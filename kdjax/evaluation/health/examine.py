"""Runs every detector that applies to a model, cheapest first."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array
from scipy.optimize import linear_sum_assignment

from kdjax.evaluation.health import detectors, forms, probes
from kdjax.evaluation.health.detectors import Finding, LogitStats, ask
from kdjax.evaluation.health.weights import matrix_stats
from kdjax.evaluation.target import Target
from kdjax.formats.saved import SavedTable
from kdjax.losses.chunked import HeadSpec, join_chunks
from kdjax.losses.divergences import log_softmax
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import scan_positions
from kdjax.models.arch import ArchSpec
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoder import DecoderFunctions, ModelFunctions, Params, functional
from kdjax.models.decoding import Sampling
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import decode_weight, from_bits, slice_layers
from kdjax.training.saving import changed_tensors

_CHUNK = 32  # positions whose logits exist at once


def of_files(checkpoint: Checkpoint) -> list[Finding]:
    """Examines headers, tokenizer and tensors without running the model."""
    tokenizer, spec = checkpoint.tokenizer, checkpoint.spec
    stats = matrix_stats(checkpoint)
    questions = [
        (detectors.tokenizer_round_trip, tokenizer),
        (detectors.tokenizer_size, tokenizer, spec),
        (detectors.tokenizer_order, tokenizer),
        (detectors.special_tokens, tokenizer, checkpoint.header.metadata),
        (detectors.non_finite_weights, stats),
        (detectors.constant_weights, stats),
        (detectors.dead_rows, stats),
        (detectors.repeated_rows, stats),
        (detectors.large_rows, stats),
        (detectors.unlike_peers, stats),
        (detectors.noise_weights, stats),
    ]
    if (saved := checkpoint.whole_step) is not None:
        assert isinstance(checkpoint.table, SavedTable)
        table, start = checkpoint.table, checkpoint.header
        params = ((name, table.array(name)) for name in table.trained)
        changed = changed_tensors(params, start, spec, init=saved.init, seed=saved.seed)
        questions.append((detectors.unchanged_weights, changed, saved.step))
    return ask(*questions)


@functools.partial(jax.jit, static_argnames=("apply", "real"))
def _predictions(
    params: Params, tokens: Array, *, apply: ModelFunctions, real: int
) -> tuple[Array, ...]:
    """Entropy, CE of the next id and finiteness `[T-1]` of a text `[T]`; mean distribution."""
    batch, labels = tokens[None, :-1], tokens[None, 1:]
    ones, places = jnp.ones_like(batch), jnp.arange(batch.shape[1], dtype=jnp.int32)[None]
    state = apply.hidden(params, batch, ones, places), apply.head(params)

    def read_chunk(
        _: None, logits: Sequence[Array], labels: Array, counts: Array
    ) -> tuple[None, tuple[Any, Array]]:
        log_p = log_softmax(logits[0], 1.0)
        p = jnp.exp(log_p)
        ce = -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.where(p > 0, p * log_p, 0.0), axis=-1)
        finite = jnp.all(jnp.isfinite(logits[0]), axis=-1)
        return None, ((entropy, ce, finite), jnp.sum(p[0] * counts[0][:, None], axis=0))

    spec = HeadSpec(KDLoss(), width=real, real_vocab=real, chunk_tokens=_CHUNK)
    columns = labels, jnp.ones_like(labels, jnp.float32)
    _, (values, whole) = scan_positions(read_chunk, None, [state], *columns, spec=spec)
    return *(join_chunks(x, labels.shape[1])[0] for x in values), jnp.sum(whole, axis=0)


def logit_stats(
    apply: ModelFunctions, params: Params, ids: Sequence[int], real: int
) -> tuple[LogitStats, np.ndarray]:
    """Computes figures of the predictions for `ids` among the first `real` ids of the vocabulary.

    Returns the CE of each next id, in nats, too.
    """
    tokens = jnp.asarray(ids, jnp.int32)
    values = _predictions(params, tokens, apply=apply, real=real)
    entropy, ce, finite, whole = (np.asarray(x, np.float64) for x in values)
    mean = whole / max(whole.sum(), 1e-30)
    mean_entropy = -np.sum(np.where(mean > 0, mean * np.log(np.maximum(mean, 1e-300)), 0.0))
    stats = LogitStats(
        len(ce),
        int((finite == 0).sum()),
        real,
        float(entropy.mean()),
        float(mean_entropy),
        float(ce.mean()),
    )
    return stats, ce


def _move_rows(params: Params, names: Mapping[str, np.ndarray]) -> Params:
    """Reorders the rows of these projections of attention."""

    def move(leaf: Array, order: np.ndarray) -> Array:
        # Other leaves of a stack of several block types hold which layer has which type.
        return leaf[:, order] if leaf.ndim > 1 and leaf.shape[1] == len(order) else leaf

    attention = dict(params["blocks"]["attn"])
    for name, order in names.items():
        attention[name] = jax.tree.map(lambda leaf, order=order: move(leaf, order), attention[name])
    return {**params, "blocks": {**params["blocks"], "attn": attention}}


def _rows_of(heads: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Row indices of these heads, with each head's rows at these places."""
    return (heads[:, None] * len(places) + places).ravel()


def reorder_heads(params: Params, spec: ArchSpec, order: str) -> Params:
    """Reorders the rows of q and k from `order` to Hugging Face's.

    "pairs" are rows (i, i + D/2) side by side; "halves" undoes the opposite mistake.
    """
    shape = (2, spec.head_dim // 2)
    places = np.arange(spec.head_dim).reshape(shape if order == "halves" else shape[::-1]).T.ravel()
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
    return _move_rows(params, {n: _rows_of(np.arange(c), places) for n, c in heads.items()})


def fit_key_heads(params: Params, spec: ArchSpec) -> np.ndarray:
    """For each group of query heads, the key head that its queries fit, `[num_kv_heads]`.

    Trained queries and keys read the same directions: ||Q K^T|| over ||Q|| ||K|| is larger for
    heads that belong together, in each of 28 examined layers (1.09 to 10 times, squared). One
    order is taken for all layers, the best by the sum of logarithms.
    """
    slices, read = slice_layers({n: params["blocks"]["attn"][n]["weight"] for n in ("q", "k")})
    groups = spec.num_kv_heads

    @jax.jit
    def scores(piece: Any) -> Array:
        weights = {n: from_bits(decode_weight(w)) for n, w in read(piece).items()}
        q, k = (weights[n].astype(jnp.float32) for n in ("q", "k"))
        products = jnp.square(q @ k.T).reshape(groups, -1, groups, spec.head_dim)
        norms = [jnp.sum(jnp.square(w).reshape(groups, -1), axis=1) for w in (q, k)]
        return jnp.log(jnp.sum(products, axis=(1, 3)) / (norms[0][:, None] * norms[1][None]))

    layers = [scores(jax.tree.map(lambda x, i=i: x[i], slices)) for i in range(spec.num_layers)]
    return linear_sum_assignment(np.sum(layers, axis=0), maximize=True)[1]


@dataclasses.dataclass(frozen=True)
class _Variants:
    """A model with its weights in other orders, or with another theta: cross-entropies of them."""

    model: Model
    decoder: DecoderFunctions
    ids: Any
    facts: dict[str, Any]  # gets each cross-entropy by name

    def _ce_with(self, name: str, params: Params) -> float:
        ce = logit_stats(self.decoder, params, self.ids, self.model.real_vocab)[0].ce
        self.facts[f"ce_with_{name}"] = ce
        return ce

    def ce_in_order(self, order: str) -> float:
        """With the rows of q and k as `reorder_heads` moves them."""
        return self._ce_with(order, reorder_heads(self.model.params, self.decoder.spec, order))

    def ce_of_gates(self, _: str) -> float:
        """With gate and up of the MLPs exchanged."""
        params = self.model.params
        mlp = params["blocks"]["mlp"]
        mlp = {**mlp, "gate": mlp["up"], "up": mlp["gate"]}
        return self._ce_with("gate_as_up", {**params, "blocks": {**params["blocks"], "mlp": mlp}})

    def ce_of_heads(self, heads: str) -> float:
        """With the key heads, or "key and value" heads, that the queries fit."""
        params, spec = self.model.params, self.decoder.spec
        rows = _rows_of(fit_key_heads(params, spec), np.arange(spec.head_dim))
        names = dict.fromkeys("kv" if heads == "key and value" else "k", rows)
        return self._ce_with(f"{heads.replace(' ', '_')}_heads_moved", _move_rows(params, names))

    def ces_with(self, theta: float) -> np.ndarray:
        """With another theta, one cross-entropy for each position."""
        functions = functional(self.decoder.spec.replace_theta(theta), self.decoder.compute)[0]
        stats, ces = logit_stats(functions, self.model.params, self.ids, self.model.real_vocab)
        self.facts[f"ce_with_theta_{theta:g}"] = stats.ce
        return ces


def _best_known(model: Model) -> tuple[str, list[int], LogitStats, np.ndarray]:
    """The probe text that the model knows best: name, ids, figures and CEs.

    The others are tried if it is weak at the first: a model that was taught simple English alone
    is healthy.
    """
    assert model.checkpoint is not None
    tried = []
    for name, text in probes.TEXTS.items():
        ids = probes.probe_ids(model.checkpoint, text)
        tried.append(
            (name, ids, *logit_stats(model.functions, model.params, ids, model.real_vocab))
        )
        stats = tried[-1][2]
        if stats.non_finite or stats.ce < detectors.WEAK * math.log(stats.vocabulary):
            break
    return min(tried, key=lambda one: (one[2].non_finite == 0, one[2].ce))


def of_logits(model: Model) -> tuple[list[Finding], dict[str, Any]]:
    """Examines a loaded checkpoint's predictions of plain text; findings and figures.

    Raises what running it raises.
    """
    decoder = model.functions
    assert model.checkpoint is not None and isinstance(decoder, DecoderFunctions)
    spec = model.checkpoint.spec
    with model.precision():
        text, ids, stats, ces = _best_known(model)
        findings = ask(
            (detectors.non_finite_logits, stats),
            (detectors.uniform_logits, stats),
            (detectors.constant_logits, stats),
        )
        facts: dict[str, Any] = {"text": text} | dataclasses.asdict(stats)
        # An order matters only to weights that predict something. Delta nets, and queries with
        # gates, order rows differently.
        if findings or spec.delta_value_heads:
            return findings, facts

        others = _Variants(model, decoder, ids, facts)
        about = stats.ce, stats.vocabulary
        findings = ask(
            (detectors.near_chance, *about, text),
            (detectors.sure_and_wrong, stats),
            (detectors.rope_layout, *about, others.ce_in_order),
            (detectors.gate_order, *about, others.ce_of_gates),
            (detectors.head_order, *about, others.ce_of_heads),
        )
        if not findings:  # with weights in a wrong order, any theta may seem better
            findings = ask((detectors.rope_theta, spec.rope_theta, ces, others.ces_with))
        return findings, facts


def of_figures(
    figures: Mapping[str, Any], real: int, target: Target, teacher: Target | None, mesh: Mesh
) -> tuple[list[Finding], float | None]:
    """Finds faults in held-out figures (`heldout.measure`), on any text; the head has `real` ids.

    Returns also the nats that one bit less a weight costs the teacher, if the divergence is large
    enough to need it, else None.
    """
    overall = {name: domain["overall"] for name, domain in figures.items()}
    findings, bit = [], None
    for name, row in overall.items():
        findings += ask((detectors.near_chance, row["ce"], real, name, 1.0))
    if teacher is None:
        return findings, bit
    # Of two tokenizers a text may have no position that is compared.
    compared = {name: row["kl_ts"] for name, row in overall.items() if "kl_ts" in row}
    name = max(compared, key=lambda name: compared[name], default="")
    checkpoints = target.checkpoint, teacher.checkpoint
    if name and compared[name] > detectors.FAR_NATS and forms.is_form_of(*checkpoints):
        bit = forms.cost_of_a_bit(target, teacher, mesh)
        findings += ask((detectors.far_from_teacher, compared[name], bit, name))
    return findings, bit


def probe_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Questions in the chat template, or, without one, beginnings to continue."""
    if tokenizer.chat_template:
        turns = [[{"role": "user", "content": question}] for question in probes.QUESTIONS]
        return [tokenizer.encode(tokenizer.render(t, answer_next=True)) for t in turns]
    return [tokenizer.open_text(tokenizer.encode(text)) for text in probes.BEGINNINGS]


def of_answers(model: Model) -> tuple[list[Finding], list[str]]:
    """Examines answers at temperature 0; findings and answers. Raises what generating raises."""
    assert model.tokenizer is not None
    sampling = Sampling(probes.ANSWER_TOKENS, stop_ids=model.tokenizer.stop_ids)
    prompts = probe_prompts(model.tokenizer)
    outputs = model.generate(prompts, sampling, batch_size=len(prompts))
    findings = ask((detectors.repetition, outputs), (detectors.silence, outputs))
    return findings, [output.text for output in outputs]
