"""Runs every detector that applies to a model, cheapest first."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kdjax.evaluation.health import detectors, probes
from kdjax.evaluation.health.detectors import Finding, LogitStats, ask
from kdjax.evaluation.health.weights import matrix_stats
from kdjax.formats.saved import saved_params
from kdjax.models.arch import ArchSpec
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.decoder import DecoderFunctions, ModelFunctions, Params, functional
from kdjax.models.decoding import Sampling
from kdjax.models.model import Model
from kdjax.models.tokenizer import Tokenizer
from kdjax.training.saving import changed_tensors

PROBE_TOKENS = 512
_CHUNK = 32  # positions whose logits exist at once


def of_files(checkpoint: Checkpoint) -> list[Finding]:
    """What headers, tokenizer and tensors show, without running the model."""
    tokenizer, spec = checkpoint.tokenizer, checkpoint.spec
    stats = matrix_stats(checkpoint)
    questions = [
        (detectors.tokenizer_round_trip, tokenizer),
        (detectors.tokenizer_size, tokenizer, spec),
        (detectors.tokenizer_order, tokenizer),
        (detectors.special_tokens, tokenizer, checkpoint.header.metadata),
        (detectors.rope_theta, spec),
        (detectors.non_finite_weights, stats),
        (detectors.constant_weights, stats),
        (detectors.dead_rows, stats),
        (detectors.repeated_rows, stats),
        (detectors.large_rows, stats),
        (detectors.unlike_peers, stats),
        (detectors.noise_weights, stats),
    ]
    if (saved := checkpoint.saved) is not None:
        params, start = saved_params(saved.workdir, saved.step), checkpoint.header
        changed = changed_tensors(params, start, spec, init=saved.init, seed=saved.seed)
        questions.append((detectors.unchanged_weights, changed, saved.step))
    return ask(*questions)


@functools.partial(jax.jit, static_argnames=("apply", "real"))
def _predictions(
    params: Params, tokens: Array, *, apply: ModelFunctions, real: int
) -> tuple[Array, ...]:
    """Of the text `[T]`: entropy, CE of the next id and finiteness `[T-1]`; mean distribution."""
    batch = tokens[None, :-1]
    ones, places = jnp.ones_like(batch), jnp.arange(batch.shape[1], dtype=jnp.int32)[None]
    hidden = apply.hidden(params, batch, ones, places)[0]
    head = apply.head(params)[:real].astype(hidden.dtype)

    def one(xs: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        h, label, counts = xs
        logits = jnp.einsum("TD,VD->TV", h, head, preferred_element_type=jnp.float32)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        p = jnp.exp(log_p)
        ce = -jnp.take_along_axis(log_p, label[:, None], axis=-1)[:, 0]
        entropy = -jnp.sum(jnp.where(p > 0, p * log_p, 0.0), axis=-1)
        whole = jnp.sum(p * counts[:, None], axis=0)
        return entropy, ce, jnp.all(jnp.isfinite(logits), axis=-1), whole

    length = hidden.shape[0]
    pad = -length % _CHUNK
    counts = jnp.pad(jnp.ones((length,), jnp.float32), (0, pad))
    columns = jnp.pad(hidden, ((0, pad), (0, 0))), jnp.pad(tokens[1:], (0, pad)), counts
    chunks = tuple(x.reshape(-1, _CHUNK, *x.shape[1:]) for x in columns)
    entropy, ce, finite, whole = jax.lax.map(one, chunks)
    return (*(x.reshape(-1)[:length] for x in (entropy, ce, finite)), jnp.sum(whole, axis=0))


def logit_stats(
    apply: ModelFunctions, params: Params, ids: Sequence[int], real: int
) -> tuple[LogitStats, np.ndarray]:
    """Figures of the predictions for `ids` among the first `real` ids of the vocabulary.

    And the CE of each next id, nats.
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


def reorder_heads(params: Params, spec: ArchSpec, order: str) -> Params:
    """The same parameters with the rows of q and k, taken to lie as `order`, in Hugging Face's.

    "pairs" are rows (i, i + D/2) side by side; "halves" undoes the opposite mistake.
    """
    shape = (2, spec.head_dim // 2)
    places = np.arange(spec.head_dim).reshape(shape if order == "halves" else shape[::-1]).T.ravel()

    def move(leaf: Array, heads: int) -> Array:
        rows = heads * spec.head_dim
        if leaf.ndim < 2 or leaf.shape[1] != rows:  # which layer has which block type
            return leaf
        return leaf[:, (np.arange(heads)[:, None] * spec.head_dim + places).ravel()]

    attention = dict(params["blocks"]["attn"])
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
        attention[name] = jax.tree.map(lambda leaf, heads=heads: move(leaf, heads), attention[name])
    return {**params, "blocks": {**params["blocks"], "attn": attention}}


def probe_ids(checkpoint: Checkpoint) -> list[int]:
    """The probe text in the model's tokens, as much of it as its context holds."""
    spec = checkpoint.spec
    ids = [i for i in checkpoint.tokenizer.encode(probes.TEXT) if i < spec.vocab_size]
    return ids[: min(PROBE_TOKENS, spec.max_positions)]


def of_logits(model: Model) -> tuple[list[Finding], dict[str, Any]]:
    """What a loaded checkpoint predicts of plain text, and the figures.

    Raises what running it raises.
    """
    decoder = model.functions
    assert model.checkpoint is not None and isinstance(decoder, DecoderFunctions)
    ids, spec = probe_ids(model.checkpoint), model.checkpoint.spec
    with model.precision():
        stats, ces = logit_stats(model.functions, model.params, ids, model.real_vocab)
        findings = ask(
            (detectors.non_finite_logits, stats),
            (detectors.uniform_logits, stats),
            (detectors.constant_logits, stats),
            (detectors.near_chance, stats),
        )
        facts: dict[str, Any] = dataclasses.asdict(stats)
        if findings:  # rotation means something only to weights that were trained with one
            return findings, facts

        def ce_in_order(order: str) -> float:
            params = reorder_heads(model.params, spec, order)
            other = logit_stats(model.functions, params, ids, model.real_vocab)[0]
            facts[f"ce_with_{order}"] = other.ce
            return other.ce

        def ces_with(theta: float) -> np.ndarray:
            other = dataclasses.replace(spec, rope_theta=theta)
            functions = functional(other, decoder.compute)[0]
            stats, ces = logit_stats(functions, model.params, ids, model.real_vocab)
            facts[f"ce_with_theta_{theta:g}"] = stats.ce
            return ces

        findings = ask((detectors.rope_layout, stats.ce, stats.vocabulary, ce_in_order))
        if not findings:  # with rows in another order, any theta may happen to be better
            evidence = detectors.better_theta(spec.rope_theta, ces, ces_with)
            findings = [Finding("rope_theta", evidence)] if evidence else []
        return findings, facts


def probe_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Questions through the chat template, or beginnings to go on with where there is none."""
    if tokenizer.chat_template:
        turns = [[{"role": "user", "content": question}] for question in probes.QUESTIONS]
        return [tokenizer.encode(tokenizer.render(t, answer_next=True)) for t in turns]
    return [tokenizer.open_text(tokenizer.encode(text)) for text in probes.BEGINNINGS]


def of_answers(model: Model) -> tuple[list[Finding], list[str]]:
    """What it says at temperature 0 shows, and what it said. Raises what generating raises."""
    assert model.tokenizer is not None
    sampling = Sampling(probes.ANSWER_TOKENS, stop_ids=model.tokenizer.stop_ids)
    prompts = probe_prompts(model.tokenizer)
    outputs = model.generate(prompts, sampling, batch_size=len(prompts))
    findings = ask(
        (detectors.repetition, outputs), (detectors.non_text, outputs), (detectors.silence, outputs)
    )
    return findings, [output.text for output in outputs]
