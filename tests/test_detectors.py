"""Every detector against a model that is broken in its way, and healthy ones left alone."""

import contextlib
import dataclasses
import json
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from quick import cases
from tokenizers import Tokenizer as Encoder
from tokenizers import normalizers

from kdjax import demo
from kdjax.evaluation import table
from kdjax.evaluation.health import detectors, examine, forms, probes
from kdjax.evaluation.health.detectors import LogitStats
from kdjax.evaluation.health.weights import matrix_stats
from kdjax.evaluation.target import open_target
from kdjax.formats import open_table
from kdjax.formats.blocks import decode, encode
from kdjax.formats.gguf import write_gguf
from kdjax.models.checkpoint import Checkpoint, open_checkpoint
from kdjax.models.decoder import Compute, functional, initialise
from kdjax.models.decoding import Completion
from kdjax.models.loading import load_params
from kdjax.models.names import Layout
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import load_tokenizer
from kdjax.training.saving import changed_tensors
from scripts.bench.synthetic import QWEN25_SHAPES, write_random_gguf
from scripts.checks.detectors import exchanged, reversed_heads, rewritten

pytestmark = pytest.mark.usefixtures("one_device", "optimized")

SHAPE = QWEN25_SHAPES["tiny-student"]._replace(layers=1)


def altered(source, path, change=None, only="", metadata=None):
    """The model with tensors that start with `only` changed, as F32."""
    table = open_table(source)
    tensors = []
    for name in table:
        info, raw, kind = table.info(name), table.raw(name), table.info(name).dtype
        if change is not None and name.startswith(only):
            numbers = np.array(decode(raw, kind))
            numbers = np.asarray(change(numbers), np.float32)
            raw, kind = encode(numbers, "F32"), "F32"
        tensors.append((name, kind, info.shape, raw))
    write_gguf(path, dict(table.metadata) | (metadata or {}), tensors)
    return path


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("random") / "model.gguf"
    write_random_gguf(path, SHAPE, seed=3, recipe="q8_0")
    return path


@pytest.fixture(scope="module")
def bigram(random_model, tmp_path_factory):
    """A healthy toy: it has learned by counting which id follows which in the probe text.

    Embedding rows are an orthogonal-ish code of the id, layers add next to nothing, and the head
    turns the code into log-probabilities of the next id.
    """
    folder = tmp_path_factory.mktemp("bigram")
    table, tokenizer = open_table(random_model), load_tokenizer(random_model)
    ids = np.asarray(tokenizer.encode(probes.TEXT))
    rows, width = table.info("token_embd.weight").shape
    rng = np.random.default_rng(0)
    code = rng.standard_normal((rows, width)).astype(np.float32)
    code /= np.sqrt(np.mean(code**2, axis=1, keepdims=True))  # the final norm leaves it alone
    counts = np.full((rows, rows), 0.02)
    np.add.at(counts, (ids[:-1], ids[1:]), 1.0)
    wanted = np.log(counts / counts.sum(axis=1, keepdims=True))
    wanted = 1.5 * (wanted - wanted.mean(axis=1, keepdims=True))  # sure, also where it is wrong
    wanted += 0.01 * rng.standard_normal(wanted.shape)  # ids that never occur are still not one
    head = np.linalg.lstsq(code, wanted, rcond=None)[0].T.astype(np.float32)
    tensors = []
    for name in table:
        info, raw, kind = table.info(name), table.raw(name), table.info(name).dtype
        if name == "token_embd.weight":
            raw, kind = encode(code, "F32"), "F32"
        elif name.endswith(("attn_output.weight", "ffn_down.weight")):
            raw, kind = encode(np.array(decode(raw, kind)) * np.float32(1e-3), "F32"), "F32"
        tensors.append((name, kind, info.shape, raw))
    tensors.append(("output.weight", "F32", head.shape, encode(head, "F32")))
    path = folder / "bigram.gguf"
    # 1e6 and a short context: as published, and toys have no long one.
    write_gguf(path, dict(table.metadata), tensors)
    return path


def findings(path, mesh, answers=None):
    """Findings of all detectors but those of generation."""
    opened = open_target(f"{path}@dense:float32")
    found = examine.of_files(opened.checkpoint)
    found += examine.of_logits(opened.load(mesh))[0]
    return {finding.detector: finding.evidence for finding in found}


def test_a_healthy_toy_has_no_finding(bigram, mesh):
    assert findings(bigram, mesh) == {}


@pytest.mark.slow
def test_the_toys_of_the_demo_have_healthy_files(models, mesh):
    """Their weights are random: only what they predict may be called broken."""
    assert examine.of_files(open_checkpoint(models / "student.gguf")) == []


def nan(x):
    x.flat[5] = np.nan
    return x


def inf(x):
    x.flat[-1] = np.inf
    return x


def unread(x):
    x[190, 0] = np.inf  # of a control character that the text does not have
    return x


def third_dead(x):
    x[: len(x) // 3] *= 1e-9
    return x


def pairs(x):
    x[1::2] = x[::2]
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "only", "detector", "evidence"),
    [
        (nan, "blk.0.ffn_up", "non_finite_weights", "blk.0.ffn_up.weight (1 NaN, 0 Inf of"),
        (inf, "blk.0.attn_norm", "non_finite_weights", "blk.0.attn_norm.weight (0 NaN, 1 Inf"),
        (nan, "output_norm", "non_finite_logits", "positions"),
        (third_dead, "output.w", "dead_rows", "output.weight"),
        (lambda x: x * 0, "output_norm", "uniform_logits", "nats over"),
        (lambda x: x * 1e-3, "output.w", "uniform_logits", "nats over"),
    ],
)
def test_broken_weights_are_found(bigram, mesh, tmp_path, change, only, detector, evidence):
    found = findings(altered(bigram, tmp_path / "x.gguf", change, only), mesh)
    assert detector in found and evidence in found[detector], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "only", "detector", "evidence"),
    [
        (unread, "token_embd", "non_finite_weights", "token_embd.weight (0 NaN, 1 Inf"),
        (third_dead, "token_embd", "dead_rows", "token_embd.weight: 1"),
        (pairs, "token_embd", "repeated_rows", "token_embd.weight: "),
        (lambda x: x * 0 + 0.1, "blk.0.ffn_gate", "constant_weights", "blk.0.ffn_gate.weight"),
        (lambda x: x * 1e38, "output_norm", "non_finite_logits", "positions"),
        (lambda x: np.roll(x, 7, axis=0), "output.w", "near_chance", "a uniform guess has"),
    ],
)
def test_some_faults_are_seen_by_one_detector_alone(
    bigram, mesh, tmp_path, change, only, detector, evidence
):
    found = findings(altered(bigram, tmp_path / "x.gguf", change, only), mesh)
    assert list(found) == [detector] and evidence in found[detector], found


def test_a_model_that_knows_only_how_common_tokens_are_is_found(bigram, mesh, tmp_path):
    """Whatever stands before: no guess, no chance, and nothing else says it."""
    head = np.asarray(decode(open_table(bigram).raw("output.weight"), "F32"))
    ids = load_tokenizer(bigram).encode(probes.TEXT)
    wanted = np.log(np.bincount(ids, minlength=len(head)) + 0.3)
    row = np.linalg.lstsq(head, wanted - wanted.mean(), rcond=None)[0]
    size = np.sqrt(np.mean(row**2))
    path = altered(bigram, tmp_path / "x.gguf", lambda x: x * 1e-5 + row / size, "token_embd")
    found = findings(altered(path, tmp_path / "y.gguf", lambda x: x * size, "output_norm"), mesh)
    assert list(found) == ["constant_logits"], found


BROKEN_TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metadata", "detector", "evidence"),
    [
        ({"tokenizer.ggml.eos_token_id": 319}, "special_tokens", "is 319, the tokenizer has"),
        ({"tokenizer.ggml.bos_token_id": 4000}, "special_tokens", "bos_token_id is 4000"),
        ({"tokenizer.ggml.eos_token_id": 7}, "special_tokens", "is the ordinary token"),
        ({"tokenizer.chat_template": BROKEN_TEMPLATE}, "special_tokens", "<|turn|>, which is no"),
    ],
)
def test_broken_headers_are_found(bigram, mesh, tmp_path, metadata, detector, evidence):
    found = findings(altered(bigram, tmp_path / "x.gguf", metadata=metadata), mesh)
    assert detector in found and evidence in found[detector], found


def test_tokens_in_another_order_are_found(bigram, mesh, tmp_path):
    """A tokenizer of the same size whose ids mean something else."""
    tokens = list(open_table(bigram).metadata["tokenizer.ggml.tokens"])
    used = sorted(set(load_tokenizer(bigram).encode(probes.TEXT)))
    for new, old in zip(used, [tokens[i] for i in reversed(used)], strict=True):
        tokens[new] = old
    path = altered(bigram, tmp_path / "x.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    assert "near_chance" in findings(path, mesh)


def test_a_tokenizer_that_loses_text_is_found(bigram):
    tokenizer = load_tokenizer(bigram)
    assert detectors.tokenizer_round_trip(tokenizer) is None
    encoder = Encoder.from_str(tokenizer.encoder.to_str())
    encoder.normalizer = normalizers.Lowercase()
    found = detectors.tokenizer_round_trip(dataclasses.replace(tokenizer, encoder=encoder))
    assert found is not None and "comes back as" in found


def test_a_shuffled_vocabulary_is_found(bigram):
    """All text comes back from it, and common tokens may have kept their ids."""
    tokenizer = load_tokenizer(bigram)
    assert detectors.tokenizer_order(tokenizer) is None
    tokens = list(tokenizer.tokens)
    tokens[256:296] = np.random.default_rng(0).permutation(tokens[256:296]).tolist()
    shuffled = dataclasses.replace(tokenizer, tokens=tuple(tokens))
    found = detectors.tokenizer_order(shuffled)
    assert found is not None and "merges make a token" in found


@pytest.mark.parametrize(
    ("rows", "broken"), [(100, True), (400, False), (1300, False), (5000, True)]
)
def test_tokenizer_size(bigram, rows, broken):
    spec = dataclasses.replace(spec_from_table(open_table(bigram)), vocab_size=rows)
    assert (detectors.tokenizer_size(load_tokenizer(bigram), spec) is not None) == broken


def test_the_rope_probe_names_the_better_theta():
    """By pairs of tokens: a gain of 0.05 nats counts if all tokens have it, or not at all."""
    tokens = np.random.default_rng(0).exponential(size=430)
    asked = []

    def ces_with(theta):
        asked.append(theta)
        return tokens if theta != 1e5 else tokens + 0.1

    assert detectors.rope_theta(1e6, tokens + 0.02, ces_with) is None and asked == [1e4, 1e5]
    found = detectors.rope_theta(5e5, tokens + 0.05, ces_with)
    wanted = f"theta 500000 has {tokens.mean() + 0.05:.3f} nats a token, 10000 has"
    assert found is not None and wanted in found and "0.050 less" in found
    scattered = tokens + 0.05 + np.random.default_rng(1).standard_normal(430)
    assert detectors.rope_theta(5e5, scattered, ces_with) is None
    assert detectors.rope_theta(5e5, tokens * np.nan, ces_with) is None


def test_the_rope_probe_runs_the_model_with_the_other_theta(bigram, mesh):
    opened = open_target(f"{bigram}@dense:float32")
    facts = examine.of_logits(opened.load(mesh))[1]
    spec = opened.checkpoint.spec.replace_theta(1e4)
    other = opened._replace(checkpoint=dataclasses.replace(opened.checkpoint, spec=spec))
    want = examine.of_logits(other.load(mesh))[1]["ce"]
    assert facts["ce_with_theta_10000"] == pytest.approx(want, rel=1e-6)
    assert facts["ce_with_theta_10000"] != facts["ce"]


def test_logit_stats_against_numpy(random_model, mesh):
    opened = open_target(f"{random_model}@dense:float32")
    ids, real = probes.probe_ids(opened.checkpoint)[:70], 300
    provider = opened.load(mesh)
    tokens = np.asarray([ids[:-1]], np.int32)
    places = np.arange(len(ids) - 1, dtype=np.int32)[None]
    logits = np.asarray(provider.logits(*map(jax.numpy.asarray, (tokens, tokens * 0 + 1, places))))
    logits = logits[0, :, :real].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(log_p)
    kept = [i if i < real else 0 for i in ids[1:]]
    stats, ces = examine.logit_stats(provider.functions, provider.params, [ids[0], *kept], real)
    mean = p.mean(0)
    if kept == ids[1:]:
        assert stats.ce == pytest.approx(-log_p[range(len(kept)), kept].mean(), rel=1e-4)
    assert stats.entropy == pytest.approx(-(p * log_p).sum(-1).mean(), rel=1e-3)
    assert stats.mean_entropy == pytest.approx(-(mean * np.log(mean)).sum(), rel=1e-3)
    assert stats.positions == len(ids) - 1 == len(ces) and stats.non_finite == 0


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Six layers whose matrices have learned a direction, as all but value projections do."""
    folder = tmp_path_factory.mktemp("deep")
    write_random_gguf(folder / "random.gguf", SHAPE._replace(layers=6), seed=5, recipe="q8_0")

    def learn(x):
        if x.ndim < 2:
            return x
        rng = np.random.default_rng(x.size)
        direction = np.outer(rng.standard_normal(len(x)), rng.standard_normal(x.shape[1]))
        return x + 0.3 * np.std(x) * direction

    return altered(folder / "random.gguf", folder / "deep.gguf", learn, "blk.")


def noise_of(scale):
    def change(x):
        if x.ndim < 2:
            return x
        rng = np.random.default_rng(0)
        return rng.standard_normal(x.shape) * (scale or np.sqrt(np.mean(x**2)))

    return change


def one_large_row(x):
    x[5] *= 1e4
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "only", "detector", "evidence"),
    [
        (noise_of(1e-6), "blk.3.", "unlike_peers", ", and 6 tensors more"),
        (lambda x: x * 30, "blk.2.ffn_down", "unlike_peers", "blk.2.ffn_down.weight: root mean"),
        (lambda x: x * 1e-4, "blk.0.attn_norm", "unlike_peers", "blk.0.attn_norm.weight: root"),
        (noise_of(0), "blk.4.ffn_gate", "noise_weights", "blk.4.ffn_gate.weight: its largest"),
        (one_large_row, "blk.1.ffn_up", "large_rows", "blk.1.ffn_up.weight: row 5 has 9,"),
        (one_large_row, "token_embd", "large_rows", "token_embd.weight: row 5 has"),
    ],
)
def test_tensors_are_compared_with_their_peers(deep, tmp_path, change, only, detector, evidence):
    assert examine.of_files(open_checkpoint(deep)) == []
    path = altered(deep, tmp_path / "x.gguf", change, only)
    found = {f.detector: f.evidence for f in examine.of_files(open_checkpoint(path))}
    assert evidence in found[detector], found
    assert "dead_rows" not in found  # the other rows are as they were


def test_a_young_model_may_have_layers_of_noise(deep, tmp_path):
    """Half of the layers have learned nothing yet: weak, not broken."""
    path = deep
    for layer in range(3):
        path = altered(path, tmp_path / f"{layer}.gguf", noise_of(0), f"blk.{layer}.")
    assert examine.of_files(open_checkpoint(path)) == []


@pytest.mark.parametrize("packed", [False, True])
def test_heads_are_reordered_as_files_of_llama_are(random_model, mesh, packed):
    """Undone exactly: what is stored as pairs, or as halves of halves, comes back in order."""
    opened = open_target(f"{random_model}@{'packed' if packed else 'dense'}:float32")
    model, spec = opened.load(mesh), opened.checkpoint.spec

    def rows(params, name):
        weight = params["blocks"]["attn"][name]["weight"]
        return np.asarray(weight.decode() if hasattr(weight, "decode") else weight)

    pairs = examine.reorder_heads(model.params, spec, "pairs")
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
        mine = rows(model.params, name)
        np.testing.assert_array_equal(
            Layout(pairs=heads).write_order(rows(pairs, name)[0]), mine[0]
        )
        back = rows(examine.reorder_heads(pairs, spec, "halves"), name)
        np.testing.assert_array_equal(back, mine)
        assert not np.array_equal(rows(pairs, name), mine)


def test_rows_in_another_order_are_named_so():
    asked = []

    def ce_with(order):
        asked.append(order)
        return {"pairs": 3.3, "halves": 1.2}[order]

    found = detectors.rope_layout(3.35, 151665, ce_with)
    assert found is not None and "1.20 with the rows of q and k taken as halves" in found
    assert detectors.rope_layout(1.19, 151665, ce_with) is None and len(asked) == 2
    assert detectors.rope_layout(3.35, 151665, lambda order: 3.2) is None


@pytest.mark.slow
def test_a_model_of_simple_stories_is_asked_for_a_story(mesh):
    """The demo's teacher is near a guess at Python, which nobody taught it."""
    model = open_target(f"{demo.TEACHER}@dense:float32").load(mesh)
    assert model.checkpoint is not None
    found, facts = examine.of_logits(model)
    assert found == [] and facts["text"] == "a simple story" and facts["ce"] < 2
    stats, _ = examine.logit_stats(
        model.functions, model.params, probes.probe_ids(model.checkpoint), model.real_vocab
    )
    assert detectors.near_chance(stats.ce, stats.vocabulary, "code") is not None


@pytest.mark.slow
def test_a_learned_model_with_its_heads_reordered(mesh, tmp_path):
    """A model that uses its positions: the finding is of the order of rows, and not of theta."""
    assert findings(TEACHER, mesh) == {}

    def pairs(x):
        rows = x.reshape(len(x), -1)
        return Layout(pairs=len(x) // 64).write_order(rows).reshape(x.shape)

    path = TEACHER
    for layer in range(4):
        for name in ("q", "k"):
            path = altered(path, tmp_path / f"{layer}{name}", pairs, f"blk.{layer}.attn_{name}.")
    assert set(findings(path, mesh)) == {"rope_layout"}


def test_weight_figures_against_numpy(bigram):
    stats = {s.name: s for s in matrix_stats(open_checkpoint(bigram))}
    embed = stats["token_embd.weight"]
    tokenizer = load_tokenizer(bigram)
    assert embed.rows == tokenizer.vocab_size and embed.repeated_rows == embed.dead_rows == 0
    table = open_table(bigram)
    raw, info = table.raw("blk.0.ffn_up.weight"), table.info("blk.0.ffn_up.weight")
    numbers = np.asarray(decode(raw, info.dtype))
    up = stats["blk.0.ffn_up.weight"]
    assert up.size == numbers.size and up.rows == len(numbers)
    assert up.spread == pytest.approx(float(numbers.max() - numbers.min()))
    assert up.norm == pytest.approx(np.sqrt(np.mean(numbers.astype(np.float64) ** 2)), rel=1e-5)
    largest = np.linalg.svd(numbers, compute_uv=False)[0]
    edge = up.norm * (np.sqrt(len(numbers)) + np.sqrt(numbers.shape[1]))
    assert up.noise == pytest.approx(largest / edge, rel=0.1) and up.noise < largest / edge
    assert stats["output_norm.weight"].rows == 0


def answers(*texts, reason="length"):
    return [Completion([ord(c) for c in text], text, reason, []) for text in texts]


PROSE = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep."


def test_loops_are_found_and_code_is_not():
    loop = "so " + "again and " * 12
    found = detectors.repetition(answers(loop, loop, loop, PROSE))
    assert found is not None and "3 of 4" in found
    assert detectors.repetition(answers(loop, PROSE, PROSE, PROSE)) is None  # one may
    assert detectors.repetition(answers(loop, loop, loop, reason="stop")) is None
    code = "def f(a):\n    if a:\n        return 1\n    if not a:\n        return 2\n" * 1
    assert detectors.repetition(answers(code, code, PROSE, PROSE)) is None
    assert detectors.loop_share([1, 2, 3] * 10) == 1.0
    assert detectors.loop_share([9] * 10 + [1, 2] * 5) == 0.5
    assert detectors.loop_share([1, 2, 1, 2]) == 0.0  # twice is no loop


def test_silence_is_found():
    assert detectors.silence(answers("", " \n")) is not None
    assert detectors.silence(answers("", "x")) is None


@pytest.mark.slow
@pytest.mark.parametrize("init", ["checkpoint", "random"])
def test_weights_that_stayed_as_they_began_are_found(mesh, bigram, init):
    table = open_table(bigram)
    spec = spec_from_table(table)
    start = load_params(table, spec, functional(spec, Compute())[1], mesh)
    if init == "random":
        start = jax.jit(lambda: initialise(spec, Compute(), 0))()
    params = {name: np.array(x) for name, x in flatten_dict(start, sep="/").items()}

    def changed():
        return changed_tensors(params.items(), table, spec, init=init, seed=0)

    same = changed()
    found = detectors.unchanged_weights(same, 10)
    assert found is not None and f"after 10 steps {len(same)} of {len(same)} tensors are" in found
    assert detectors.unchanged_weights(same, 0) is None  # nothing was trained yet
    for array in params.values():
        array += 1e-3
    assert detectors.unchanged_weights(changed(), 10) is None


TEACHER = Path(__file__).parent / "goldens" / "python.gguf"  # what damage costs: it reads Python


def half_the_heads(name, rows):
    """Every other head of queries and keys with its rows interleaved."""
    if "attn_q." not in name and "attn_k." not in name:
        return rows
    heads = rows.reshape(-1, 2, 32, 1 if len(rows) == 1 else rows.shape[1]).copy()
    heads[::2] = heads[::2].swapaxes(1, 2).reshape(heads[::2].shape)
    return heads.reshape(rows.shape)


DAMAGE = {
    "gate": dict(take=exchanged("ffn_gate", "ffn_up")),
    "keys": dict(change=reversed_heads("k", 2), only="blk."),
    "keys and values": dict(change=reversed_heads("kv", 2), only="blk."),
    "layers": dict(take=exchanged("blk.1.", "blk.2.")),
    "embedding": dict(change=lambda n, x: 4 * x, only="token_embd"),
    "norm": dict(change=lambda n, x: 1.5 * x, only="blk.0.ffn_norm"),
    "sign": dict(change=lambda n, x: -x, only="blk.1.attn_output.w"),
    "half the heads": dict(change=half_the_heads, only="blk."),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "detector", "evidence"),
    cases(
        ("gate", "gate_order", "1.82 with gate and up projections exchanged"),
        slow=[
            ("keys", "head_order", "1.82 with key heads in the order"),
            ("keys and values", "head_order", "1.82 with key and value heads"),
            ("embedding", "sure_and_wrong", "entropy 0.35 nats where the CE is"),
        ],
    ),
)
def test_parts_in_each_others_place_are_named(mesh, tmp_path, damage, detector, evidence):
    """A model that has learned: weights tell which order they were trained in."""
    rewritten(open_table(TEACHER), tmp_path / "x.gguf", "", **DAMAGE[damage])
    found = findings(tmp_path / "x.gguf", mesh)
    assert list(found) == [detector] and evidence in found[detector], found


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["sign", "half the heads"])
def test_other_damage_is_not_called_an_order_of_rows(mesh, tmp_path, damage):
    """Any change of a broken layer may make text likelier: by 1.1 nats of 6.9 it was named."""
    rewritten(open_table(TEACHER), tmp_path / "x.gguf", "", **DAMAGE[damage])
    found = findings(tmp_path / "x.gguf", mesh)
    assert not {"rope_layout", "head_order", "gate_order"} & set(found), found


def test_an_order_counts_only_if_text_is_far_likelier_and_likely():
    def ces(**values):
        return lambda order: values[order.replace(" ", "_")]

    assert detectors.gate_order(17.5, 151665, ces(gate_and_up=1.2)) is not None  # beyond chance
    assert detectors.gate_order(17.5, 151665, ces(gate_and_up=11.0)) is None  # noise either way
    assert detectors.gate_order(3.0, 151665, ces(gate_and_up=2.6)) is None
    # A sign turned in a layer of the demo's teacher: better, and as broken as before.
    assert detectors.rope_layout(6.86, 4000, ces(pairs=5.74, halves=5.94)) is None
    # Its heads in pairs, every other one: so are the others then.
    assert detectors.rope_layout(4.83, 4000, ces(pairs=4.27, halves=4.77)) is None
    found = detectors.head_order(7.0, 4000, ces(key=4.0, key_and_value=2.0))
    assert found is not None and "2.00 with key and value heads" in found
    found = detectors.head_order(7.0, 4000, ces(key=2.0, key_and_value=6.0))
    assert found is not None and "2.00 with key heads" in found


def test_a_guess_worse_than_chance_is_named_on_any_text(mesh):
    found = detectors.near_chance(12.0, 151665, "mail", 1.0)
    assert found == "12.00 nats a token of mail, a uniform guess has 11.93"
    assert detectors.near_chance(11.9, 151665, "mail", 1.0) is None  # Greek to a small model
    figures = {name: {"overall": {"ce": ce}} for name, ce in (("a", 8.2), ("b", 8.4))}
    teacher = open_target(str(TEACHER))
    ids = teacher.checkpoint.tokenizer.vocab_size
    found, bit = examine.of_figures(figures, ids, teacher, None, mesh)
    assert [f.evidence for f in found] == ["8.40 nats a token of b, a uniform guess has 8.29"]
    assert bit is None


def test_a_form_of_the_teacher_may_cost_some_bits_and_no_more():
    assert detectors.far_from_teacher(0.19, 0.0, "code") is None
    assert detectors.far_from_teacher(0.19, 0.01, "code") is None
    assert detectors.far_from_teacher(0.25, 0.04, "code") is not None  # a norm times 1.5
    assert detectors.far_from_teacher(0.67, 0.063, "code") is not None  # gate and up, one layer
    found = detectors.far_from_teacher(1.21, 0.063, "code")
    assert found is not None and "KL 1.21 nats a token of code" in found and "0.063" in found
    assert detectors.far_from_teacher(1.21, 0.4, "code") is None  # two bits a weight cost as much
    assert detectors.far_from_teacher(float("nan"), 0.0, "code") is None


@pytest.mark.parametrize(
    ("dtype", "levels", "group"), cases(("IQ3_S", 4, 32), slow=[("IQ2_S", 2, 16)])
)
def test_one_bit_less_is_known_of_every_block_type(dtype, levels, group):
    """Two bits lose one; a number of one bit has none to lose."""
    x = np.random.default_rng(0).normal(size=(1, 512)).astype(np.float32)
    params = {"blocks": {"w": jax.numpy.asarray(decode(encode(x, dtype), dtype))}}

    def drop(dtype):
        names, table = {("blocks", "w"): ["blk.0.w"]}, mock.Mock()
        table.info.return_value.dtype = dtype
        checkpoint = mock.Mock(spec=Checkpoint, names=names, table=table)
        return forms.drop_a_bit(params, checkpoint)

    fewer, count = drop(dtype)
    found = [len(np.unique(row)) for row in np.asarray(fewer["blocks"]["w"]).reshape(-1, group)]
    assert count == 1 and max(found) == levels
    assert [drop(name)[1] for name in ("IQ1_M", "TQ1_0", "F16", "BF16", "F8_E4M3")] == [0] * 5


def test_a_form_is_told_from_a_student_and_from_a_model_trained_apart(bigram, deep, tmp_path):
    teacher, student = (open_checkpoint(path) for path in (demo.TEACHER, demo.STUDENT))
    assert not forms.is_form_of(student, teacher)
    one = open_checkpoint(deep)
    scaled = altered(deep, tmp_path / "scaled.gguf", lambda x: 4 * x, "token")
    assert forms.is_form_of(open_checkpoint(scaled), one)
    other = tmp_path / "other.gguf"
    write_random_gguf(other, SHAPE._replace(layers=6), seed=6, recipe="q8_0")
    assert not forms.is_form_of(open_checkpoint(other), one)
    assert not forms.is_form_of(open_checkpoint(bigram), one)


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory):
    """The teacher's matrices as Q4_0."""
    path = tmp_path_factory.mktemp("four-bits") / "x.gguf"
    rewritten(open_table(TEACHER), path, "Q4_0")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["layers", "norm", None])
def test_what_only_a_teacher_tells(monkeypatch, four_bits, tmp_path, capsys, damage):
    """Damage whose text stays plausible is weak by itself, and named beside its source."""
    from kdjax.commands import evaluate

    monkeypatch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())
    monkeypatch.setattr(examine, "of_answers", lambda _: ([], []))  # most of the time
    rewritten(open_table(four_bits), tmp_path / "x.gguf", "", **DAMAGE.get(damage, {}))
    (tmp_path / "text.py").write_text(probes.TEXT * 4)
    flags = [f"--json={tmp_path / 'out.json'}", f"--data=code={tmp_path / 'text.py'}", "--rows=2"]
    flags += ["--seq-len=256", f"--teacher={TEACHER}@dense:float32"]
    evaluate.main([f"{tmp_path / 'x.gguf'}@dense:float32", *flags])
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "out.json").read_text())
    named = {f["detector"] for f in document["broken"]}
    assert ("far_from_teacher" in named) == (damage is not None), document["broken"]
    if damage:
        assert named == {"far_from_teacher"} and 0.01 < document["bit_cost"] < 0.5
        assert 1.8 < document["probe"]["ce"] < 3.5
    else:
        assert document["bit_cost"] is None and "not found broken" in printed


@pytest.mark.parametrize(("ce", "weak"), [(1.2, False), (3.5, True)])
def test_no_finding_is_said_beside_chance(ce, weak):
    probe = {"ce": ce, "text": "a simple story", "vocabulary": 151665}
    lines = table.text({"target": "x", "mode": "inference", "broken": [], "probe": probe})
    wanted = f"{ce:.2f} nats a token of a simple story, a uniform guess has 11.93; not"
    assert wanted in lines and ("weak: " in lines) == weak and ("--teacher" in lines) == weak


@pytest.mark.slow
def test_a_broken_model_ends_with_status_9_and_its_evidence(
    bigram, mesh, tmp_path, monkeypatch, capsys
):
    from kdjax.commands import evaluate

    monkeypatch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())
    path = altered(bigram, tmp_path / "x.gguf", nan, "blk.0.ffn_up")
    assert evaluate.main([str(path), f"--json={tmp_path / 'out.json'}"]) == 9
    printed = capsys.readouterr()
    assert "BROKEN non_finite_weights: " in printed.out and "BROKEN" in printed.err
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["status"] == 9 and document["mode"] == "inference"
    assert "non_finite_weights" in [f["detector"] for f in document["broken"]]


def test_non_finite_figures_suppress_what_cannot_be_said():
    broken = LogitStats(10, 3, 300, float("nan"), float("nan"), float("nan"))
    assert detectors.non_finite_logits(broken) is not None
    for other in (detectors.uniform_logits, detectors.constant_logits, detectors.sure_and_wrong):
        assert other(broken) is None
    assert detectors.near_chance(broken.ce, broken.vocabulary, "x") is None


def test_every_detector_has_a_broken_model_and_a_line_of_the_page():
    """Planted here or in scripts/checks/detectors.py; the page says when it speaks."""
    root = Path(__file__).parent.parent
    planted = Path(__file__).read_text() + (root / "scripts/checks/detectors.py").read_text()
    page = (root / "docs/health.md").read_text()
    hints = {name: getattr(x, "__annotations__", {}) for name, x in vars(detectors).items()}
    named = [name for name, of in hints.items() if of.get("return") == str | None]
    named = [name for name in named if not name.startswith("_")]
    assert len(named) > 20
    for name in named:
        assert f'"{name}"' in planted or f"detectors.{name}(" in planted, name
        assert f"`{name}`" in page, name
