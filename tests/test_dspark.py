"""The head that drafts (DSpark): computed, trained, written, read, and judged by llama.cpp."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exporting import needs_llama_cpp, write_odd, write_small_tokenizer
from flax.traverse_util import flatten_dict, unflatten_dict
from scipy.special import log_softmax, softmax
from test_families import wide

import kdjax
from kdjax.errors import UserError
from kdjax.export.heads import export_head
from kdjax.formats import open_table
from kdjax.models.dspark import place_anchors, spread_taps
from kdjax.models.heads import attach_head, load_head, make_head
from kdjax.training.forms import DraftHead
from scripts.bench.synthetic import QWEN3_SHAPES, QWEN35_SHAPES, write_random_gguf
from scripts.checks import llama_answers

pytestmark = pytest.mark.usefixtures("one_device")

NONE = dict(experts=0, experts_used=0, expert_ffn=0)
SHAPE = QWEN3_SHAPES["tiny-experts"]._replace(hidden=128, ffn=256, rows=305, tied=True, **NONE)
DELTA = QWEN35_SHAPES["tiny-delta"]._replace(rows=305)  # layers with states that have no positions
TARGETS = {
    "qwen3": SHAPE,
    "qwen35": DELTA,
    "qwen35moe": DELTA._replace(ffn=0, experts=7, experts_used=2, expert_ffn=96, shared_ffn=64),
}
SLOTS, RANK = 4, 8
PROMPTS = [np.random.default_rng(n).integers(0, 300, n).tolist() for n in (24, 2, 9)]
NEW = dict(max_tokens=30, stop_ids=())


def calm(model):
    """The model with less of what its layers add."""
    flat: dict[tuple[str, ...], Any] = flatten_dict(model.params)
    for key in flat:
        if {"o", "out", "down"} & set(key[-2:]):
            flat[key] = 0.3 * flat[key]
    return model.replace(params=unflatten_dict(flat))


@pytest.fixture(scope="module")
def path(tmp_path_factory, request):
    """A model whose layers change little, so that a head can guess what it says."""
    folder, shape = tmp_path_factory.mktemp("dspark"), TARGETS[getattr(request, "param", "qwen3")]
    write_random_gguf(folder / "random.gguf", shape, recipe="f32")
    model = kdjax.load(folder / "random.gguf", dtype="float32")
    kdjax.export_gguf(calm(model), folder / "m.gguf", dtype="f32")
    return folder / "m.gguf"


@pytest.fixture(scope="module")
def model(path):
    return kdjax.load(path, dtype="float32")


BOTH = pytest.mark.parametrize("head", ["anchored", "bonus"], indirect=True)


def with_targets(*heads, others=("qwen35", "qwen35moe")):
    """Runs a test with these heads of a Qwen3, and with the first of them of other targets.

    Heads of a mixture of experts, whose layers alone differ, are compared with llama.cpp: what
    kdjax writes, drafts and accepts.
    """
    first, slow = "qwen3", [pytest.param(x, heads[0], marks=pytest.mark.slow) for x in others]
    return pytest.mark.parametrize(
        "path, head", [*((first, x) for x in heads), *slow], indirect=True
    )


EACH = with_targets("anchored", "bonus")
DENSE = with_targets("anchored", "bonus", others=["qwen35"])


@pytest.fixture(scope="module", params=["anchored"])
def head(model, request):
    """A head; the anchor's slot of "bonus" predicts nothing."""
    made = make_head(model, seed=1, layers=2, slots=SLOTS, rank=RANK)
    if request.param == "bonus":
        shape = dataclasses.replace(made.functions.shape, anchored=False)
        made = attach_head(model, shape, {"dspark": made.params["dspark"]})
    return unsettle(made)


def unsettle(made):
    """The head with random numbers for a bias of zeros, and for norms of ones."""
    draw = np.random.default_rng(0)
    flat: dict[tuple[str, ...], Any] = flatten_dict(made.params["dspark"])
    for key, x in flat.items():
        if any("norm" in part for part in key):
            flat[key] = jnp.asarray(draw.uniform(0.5, 1.5, x.shape), jnp.float32)
    if ("bias",) in flat:
        flat["bias",] = jnp.asarray(0.2 * draw.normal(size=flat["bias",].shape), jnp.float32)
    return made.replace(params={**made.params, "dspark": unflatten_dict(flat)})


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def rotate(x, positions):
    """The halves (i, i + E / 2) of heads `[T, H, E]`."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[:, None] / 1e6 ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _run_layers(functions, params, row):
    at, decoder = jnp.arange(64, dtype=jnp.int32)[None], functions.merge(params)
    hidden, layers = decoder.hidden_and_layers(row, jnp.ones_like(row), at, keep_layers=True)
    return hidden, jnp.concatenate([decoder.embed_tokens(row)[None], layers])


def read_taps(model, head, tokens):
    """Inputs of the tapped layers `[T, P D]` and the last hidden states `[T, D]` of one text."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(tokens)] = tokens
    hidden, inputs = _run_layers(model.functions, model.params, jnp.asarray(row))
    taps = [np.asarray(inputs)[i, 0, : len(tokens)] for i in head.functions.shape.taps]
    return np.concatenate(taps, axis=-1).astype(np.float64), np.asarray(hidden, np.float64)[0]


_numbers = []  # the last arguments of `numbers_of` and what it returned


def numbers_of(own, embed):
    """A head's parameters, by path, and its target's embedding in float64; the last are kept."""
    if not _numbers or _numbers[0] is not own or _numbers[1] is not embed:
        flat: dict[tuple[str, ...], Any] = flatten_dict(own)
        w = {
            "/".join(k).removesuffix("/weight"): np.asarray(x, np.float64) for k, x in flat.items()
        }
        _numbers[:] = own, embed, (w, np.asarray(embed, np.float64))
    return _numbers[-1]


def run_slots(model, head, taps, anchor, slots):
    """States `[slots, D]` of a block in NumPy; the head's numbers and the target's embedding.

    `taps` are of the text before the anchor, which is a token.
    """
    w, embed = numbers_of(head.params["dspark"], model.params["embed"])
    spec, place = head.functions.shape.spec, len(taps)
    heads, groups, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
    text = norm(taps @ w["fc"].T, w["fc_norm"])
    x = embed[[anchor] + [head.functions.shape.mask] * (slots - 1)]
    places = place + np.arange(slots)
    for i in range(spec.num_layers):
        own = {k.removeprefix("blocks/"): v[i] for k, v in w.items() if k.startswith("blocks/")}

        def project(y, name, own=own):
            matrix = own[f"attn/{name}"]
            return (y @ matrix.T).reshape(len(y), len(matrix) // width, width)

        y = norm(x, own["attn_norm"])
        q = rotate(norm(project(y, "q"), own["attn/q_norm"]), places)
        before = rotate(norm(project(text, "k"), own["attn/k_norm"]), np.arange(place))
        inside = rotate(norm(project(y, "k"), own["attn/k_norm"]), places)
        k = np.concatenate([before, inside])
        v = np.concatenate([project(text, "v"), project(y, "v")])
        out = np.zeros_like(q)
        for number in range(heads):
            group = number * groups // heads
            weights = softmax(q[:, number] @ k[:, group].T / np.sqrt(width), axis=-1)
            out[:, number] = weights @ v[:, group]
        x = x + out.reshape(slots, -1) @ own["attn/o"].T
        y = norm(x, own["mlp_norm"])
        gate = y @ own["mlp/gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ own["mlp/up"].T)) @ own["mlp/down"].T
    return norm(x, w["norm"]), w, embed[: model.real_vocab]


def run_block(model, head, taps, anchor, known):
    """Logits `[SLOTS, V]` of a block in NumPy, and its confidence `[SLOTS]`, a logit.

    `known` are the tokens before each slot's prediction, the anchor's own first.
    """
    lead = head.functions.shape.lead
    states, w, embed = run_slots(model, head, taps, anchor, lead + SLOTS)
    return judge_slots(states[lead:], w, embed, known)


def judge_slots(states, w, embed, known):
    """Predictions of a block's states `[N, D]` after the tokens `known`: see `run_block`."""
    before = w["markov"][known]
    logits = states @ embed.T + before @ w["bias"][: len(embed)].T
    joined = np.concatenate([states, before], axis=-1)
    return logits, (joined @ w["confidence"].T + w["confidence/bias"])[:, 0]


@functools.partial(jax.jit, static_argnums=0)
def _run_blocks(functions, params, *columns):
    states = functions.hidden_and_blocks(params, *columns)[1][0]
    logits = (states @ functions.head(params).T)[:, : SHAPE.rows]
    return logits, functions.judge_slots(params, states)


@BOTH
def test_the_head_computes_its_formula_within_documents(model, head):
    """Blocks of two documents of a row: each sees its own text before its anchor, and no more."""
    block = head.functions.shape.block
    texts = PROMPTS[0], PROMPTS[2]
    rows = np.asarray([[*texts[0], *texts[1]]], np.int32)
    ids = np.repeat([1, 2], [24, 9])[None].astype(np.int32)
    at = np.concatenate([np.arange(24), np.arange(9)])[None].astype(np.int32)
    for first in (0, 2):
        anchors = place_anchors(jnp.asarray([first]), 33, block)
        columns = (jnp.asarray(x) for x in (rows, ids, at))
        found = jax.device_get(_run_blocks(head.functions, head.params, *columns, anchors))
        checked = 0
        for text, start in zip(texts, (0, 24), strict=True):
            taps, _ = read_taps(model, head, text)
            for anchor in range((first - start) % block, len(text) - block + 1, block):
                known = text[anchor : anchor + SLOTS]
                expected = run_block(model, head, taps[:anchor], text[anchor], known)
                inside = slice(start + anchor, start + anchor + SLOTS)
                for values, wanted in zip(found, expected, strict=True):
                    np.testing.assert_allclose(values[inside], wanted, atol=5e-5)
                checked += 1
        assert checked >= 5


def test_weights_are_of_blocks_in_answers_and_one_document():
    """A slot counts if its anchor's token was answered and lies in its own document."""
    form = DraftHead(block=4, decay=2.0)
    segments = np.repeat([1, 2, 0], [7, 6, 3])[None]
    weights = np.asarray([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]], np.float32)
    batch = {
        "tokens": jnp.zeros((1, 16), jnp.int32),
        "segment_ids": jnp.asarray(segments, jnp.int32),
        "weights": jnp.asarray(weights),
    }
    marked = form.mark(batch, None)
    np.testing.assert_array_equal(marked["anchors"][0], np.arange(16) // 4 * 4)
    # The anchors 0 and 8 are tokens of prompts; of 4's block, place 7 is in another document.
    expected = [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(marked["weights"][0], expected)
    firsts = set()
    for step in range(40):
        marked = form.mark(batch, jnp.int32(step))
        anchors, found = np.asarray(marked["anchors"][0]), np.asarray(marked["weights"][0])
        firsts.add(int(anchors[3]))
        for t in np.flatnonzero(found):
            a = anchors[t]
            assert a >= 1 and segments[0, a - 1] == segments[0, a] == segments[0, t]
            assert weights[0, a - 1] == 1 and found[t] == pytest.approx(np.exp((a - t) / 2))
    assert firsts == {0, 1, 2, 3}


def sum_losses(model, head, texts, first, weights, accepted):
    """The loss of blocks in float64, summed over the slots of two documents in a row.

    `accepted` are shares of accepted drafts by block, which the confidence learns, or is empty and
    gets them.
    """
    embed, total, start = np.asarray(model.params["embed"], np.float64), 0.0, 0
    learned, block = iter([*accepted]), head.functions.shape.block
    for text in texts:
        taps, states = read_taps(model, head, text)
        for anchor in range((first - start) % block, len(text) - 1, block):
            slots = np.arange(min(SLOTS, len(text) - 1 - anchor))
            known = (text[anchor:] + [0] * SLOTS)[:SLOTS]
            said = run_block(model, head, taps[:anchor], text[anchor], known)
            said, confidence = (x[slots] for x in said)
            target = softmax(states[anchor + slots] @ embed[: model.real_vocab].T, axis=-1)
            ce = -log_softmax(said, axis=-1)[slots, np.asarray(text)[anchor + slots + 1]]
            tv = np.abs(softmax(said, axis=-1) - target).sum(-1) / 2
            own = weights[start + anchor + slots]
            share = next(learned, None)
            if share is None:
                accepted.append(share := 1 - tv)
            missed = np.logaddexp(0, confidence) - share * confidence
            total += np.sum(own * (0.1 * ce + 0.9 * tv + missed))
        start += len(text) - 1
    return total


@pytest.mark.slow
@DENSE
def test_the_step_minimises_the_loss_of_its_blocks(model, head):
    """Its loss and its gradient are those of float64 blocks, each of its own text."""
    texts = PROMPTS[0][:14], PROMPTS[2]
    batch = {
        "tokens": np.asarray([[*texts[0][:-1], *texts[1][:-1]]]),
        "labels": np.asarray([[*texts[0][1:], *texts[1][1:]]]),
        "segment_ids": np.repeat([1, 2], [13, 8])[None],
        "positions": np.concatenate([np.arange(13), np.arange(8)])[None],
        "weights": np.ones((1, 21), np.float32),
    }
    step = kdjax.make_step(
        head, model, kdjax.KDLoss(kdjax.total_variation, alpha=0.1), optax.sgd(1.0)
    )
    assert isinstance(step.spec.form, DraftHead)
    state = step.init(head.params)
    assert set(state.params) == {"dspark"}
    marked = step.spec.form.mark({name: jnp.asarray(x) for name, x in batch.items()}, jnp.int32(0))
    weights = np.asarray(marked["weights"][0], np.float64)
    first = int(marked["anchors"][0, -1]) % head.functions.shape.block
    count = np.count_nonzero(weights)
    assert count > 8
    began: dict[tuple[str, ...], Any] = flatten_dict({"dspark": head.params["dspark"]})
    state, metrics = step(state, model.params, batch)
    accepted = []

    def value(params):
        whole = head.replace(params={**head.params, **unflatten_dict(params)})
        return sum_losses(model, whole, texts, first, weights, accepted) / count

    assert metrics.means()["loss"] == pytest.approx(value(began), abs=1e-5)
    parts = "fc", "blocks", "markov", "bias", "norm", "confidence"
    check_gradient(value, began, flatten_dict(state.params), parts)


def check_gradient(value, began, moved, parts, step=1e-5):
    """A step of size 1 has moved each part of a head by the slope of `value`."""
    draw = np.random.default_rng(0)
    for part in parts:
        way = {key: draw.normal(size=x.shape) * (key[1] == part) for key, x in began.items()}
        ends = (
            {key: np.asarray(x, np.float64) + far * way[key] for key, x in began.items()}
            for far in (step, -step)
        )
        up, down = map(value, ends)
        found = sum(np.sum((began[key] - moved[key]) * way[key]) for key in began)
        assert found == pytest.approx((up - down) / (2 * step), rel=2e-3, abs=2e-6), part


ROW = np.random.default_rng(5).integers(0, 300, (2, 33))


def compile_step(model, head, **settings):
    """The compiled step of two rows, and how many positions it has."""
    loss = kdjax.KDLoss(kdjax.total_variation, alpha=settings.pop("alpha", 0.1))
    step = kdjax.make_step(head, model, loss, optax.sgd(1.0), **settings)
    data = {"tokens": ROW[:, :-1], "labels": ROW[:, 1:]}
    batch = step.put(data, settings.get("microbatches", 1))
    return step.jitted.lower(step.abstract, model.params, batch, **step.fixed).compile(), 64


@pytest.mark.slow
def test_a_step_runs_the_target_once(model, head):
    """With its predictions a step has the products of its unembedding more than without."""
    counts, parts = [], 2
    for alpha in (0.1, 1.0):
        compiled, positions = compile_step(model, head, alpha=alpha, microbatches=parts)
        counts.append(compiled.cost_analysis()["flops"])
    layers = sum(x.size for x in jax.tree.leaves(model.params["blocks"]) if x.ndim > 2)
    products = 2 * positions // parts * model.params["embed"].size
    assert products < counts[0] - counts[1] < 1.5 * products < 2 * positions // parts * layers / 4


@pytest.mark.slow
def test_the_bias_alone_of_the_unembedding_has_a_gradient(model, head):
    """One of the step's products with a side of ids is of positions, and one of the rank."""
    compiled, positions = compile_step(model, head, alpha=1.0)
    found = re.findall(r"f32\[(\d+),(\d+)\][^=]*? dot\(", compiled.as_text())
    sizes = {(int(a), int(b)) for a, b in found}
    others = {a + b - SHAPE.rows for a, b in sizes if SHAPE.rows in (a, b)}
    assert others == {positions, RANK}


def test_another_teacher_than_the_target_is_refused(path, model, head):
    """Its states, and not another model's, are what a head learns from and drafts for."""
    with pytest.raises(UserError, match="a teacher that is not the model that the head drafts for"):
        compile_step(kdjax.load(path, dtype="float32"), head)


def draft_slots(model, head, taps, anchor, least):
    """Drafts of a block, up to the first of less confidence than `least`."""
    lead, known = head.functions.shape.lead, [anchor]
    states, w, embed = run_slots(model, head, taps, anchor, lead + SLOTS)
    for state in states[lead:]:
        (logits,), (confidence,) = judge_slots(state[None], w, embed, known[-1:])
        if 1 / (1 + np.exp(-confidence)) < least:
            break
        known.append(int(logits.argmax()))
    return known[1:]


def draft_by_hand(model, head, prompt, count, least=0.0, draft=draft_slots):
    """Greedy rounds over whole texts, read anew each time: the text, passes, accepted drafts."""
    ids, passes, kept = list(prompt), 0, 0
    embed = np.asarray(model.params["embed"], np.float64)[: model.real_vocab]
    taps, _ = read_taps(model, head, ids)
    while len(ids) < len(prompt) + count:
        drafted = ids + draft(model, head, taps[: len(ids) - 1], ids[-1], least)
        taps, states = read_taps(model, head, drafted)  # of what the next round has too
        told = (states[len(ids) - 1 : len(drafted)] @ embed.T).argmax(-1).tolist()
        same = [a == b for a, b in zip(drafted[len(ids) :], told, strict=False)]
        accepted = [*same, False].index(False)
        passes, kept = passes + 1, kept + accepted
        ids += told[: accepted + 1]
    return ids[len(prompt) : len(prompt) + count], passes, kept


def teach(model, head, prompts):
    """The head after some steps on the model's own texts."""
    answers = model.generate(prompts, max_tokens=40, stop_ids=())
    rows = np.asarray([(p + a.ids)[-33:] for p, a in zip(prompts, answers, strict=True)])
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    step = kdjax.make_step(
        head, model, kdjax.KDLoss(kdjax.total_variation, alpha=0.1), optax.adam(3e-3)
    )
    state = step.init(head.params)
    for _ in range(60):
        state, _ = step(state, model.params, batch)
    return head.replace(params=step.see(state))


@pytest.fixture(scope="module")
def learned(model, head):
    return teach(model, head, PROMPTS)


@pytest.fixture(scope="module")
def middle(model, learned):
    """A confidence that some of the drafts have, and some have not."""
    taps, _ = read_taps(model, learned, PROMPTS[0])
    judged = [
        run_block(model, learned, taps[:n], PROMPTS[0][n], PROMPTS[0][n : n + SLOTS])[1]
        for n in range(2, 20)
    ]
    return float(1 / (1 + np.exp(-np.median(judged))))


@pytest.fixture(scope="module")
def plain(model):
    """The model's answers without drafts."""
    return model.generate(PROMPTS, **NEW)


@pytest.mark.slow
@DENSE
@pytest.mark.parametrize("confident", [False, True])
def test_the_head_drafts_and_the_text_stays(model, learned, middle, plain, confident):
    """Texts, passes and accepted drafts are those of whole texts read anew; slots are refilled."""
    least = confident * middle
    how = dict(draft=learned, draft_tokens=SLOTS, batch_size=2, draft_p_min=least)
    found = model.generate(PROMPTS, **how, **NEW)
    for prompt, answer, alone in zip(PROMPTS, found, plain, strict=True):
        ids, *counts = draft_by_hand(model, learned, prompt, 30, least)
        assert answer.ids == ids == alone.ids and [*answer.drafted] == counts
    assert sum(answer.drafted.accepted for answer in found) > (1 if confident else 10)


@pytest.mark.slow
@needs_llama_cpp
@EACH
def test_llama_cpp_accepts_as_many(path, model, learned, tmp_path, middle):
    """Its `draft-dspark`, from the second id on: it draws the first from the prompt's pass."""
    export_head(learned, tmp_path / "h.gguf", dtype="f32")
    served = dict(draft=tmp_path / "h.gguf", kind="dspark", most=SLOTS, least=middle)
    answers = ask_server(path, PROMPTS, **served)
    how = dict(draft=learned, draft_tokens=SLOTS, max_tokens=29, stop_ids=(), draft_p_min=middle)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        drafted, accepted = (count(key, [answer]) for key in ("draft_n", "draft_n_accepted"))
        ids = answer["tokens"]
        ours = model.generate([prompt + ids[:1]], **how)[0]
        assert ours.ids == ids[1:]
        # It drafts no further than the answer goes; of the last round kdjax counts all.
        rounds = 29 - accepted
        assert accepted <= drafted <= SLOTS * rounds
        assert drafted < SLOTS * (rounds - 2)
        assert 0 <= ours.drafted.accepted - accepted <= SLOTS


def ask_server(path, prompts, **served):
    """Answers of llama.cpp's server to prompts, greedily."""
    asked = dict(n_predict=30, temperature=0.0, ignore_eos=True, cache_prompt=False)
    asked["return_tokens"] = True
    with llama_answers.serve(path, threads=1, **served) as url:
        return [llama_answers.ask(url, "/completion", asked | dict(prompt=p)) for p in prompts]


def count(what, answers):
    return sum(answer["timings"].get(what, 0) for answer in answers)


def count_sure(model, text, start):
    """Ids of a text from `start` on before the first whose two best logits are within 0.02.

    llama.cpp caches keys and values in F16, which decides where these are 0.0027 apart.
    """
    row = np.zeros((1, 64), np.int32)
    row[0, : len(text)] = text
    logits = np.asarray(model.logits(row))[0, start - 1 : len(text) - 1, : model.real_vocab]
    best = np.sort(logits, axis=-1)
    return [*(best[:, -1] - best[:, -2] < 0.02), True].index(True)


def check_served(path, model, head, folder, most):
    """llama.cpp's text with a head is its text without; it accepts what kdjax does, and some."""
    export_head(head, folder / "h.gguf", dtype="f32")
    served, total = dict(draft=folder / "h.gguf", kind=head.functions.shape.kind, most=most), 0
    plain, drafting = (ask_server(path, PROMPTS, **how) for how in ({}, served))
    for prompt, alone, answer in zip(PROMPTS, plain, drafting, strict=True):
        ids = answer["tokens"]
        assert ids == alone["tokens"]
        # It draws the first id from the prompt's pass.
        how = dict(draft=head, draft_tokens=most, max_tokens=29, stop_ids=())
        ours = model.generate([prompt + ids[:1]], **how)[0]
        assert ours.ids == ids[1:]
        drafted, accepted = (count(key, [answer]) for key in ("draft_n", "draft_n_accepted"))
        # It drafts no further than the answer goes, which cuts at most the last rounds; of the
        # last one kdjax counts all.
        rounds = 29 - accepted
        assert most * (rounds - most) <= drafted <= most * rounds
        assert 0 <= ours.drafted.accepted - accepted <= most
        total += accepted
    assert total > 10


def make_llama(folder):
    """A Llama's file whose layers change little, the model, and prompts of its ids."""
    random = wide("llama", str(write_small_tokenizer(folder / "tokenizer.gguf")))
    # llama.cpp draws padding rows as well, and no end of a text: both say nothing here.
    drawn = np.arange(random.spec.vocab_size) < min(random.tokenizer.special_ids)
    random = random.replace(
        params={**random.params, "head": random.params["head"] * drawn[:, None]}
    )
    kdjax.export_gguf(calm(random), folder / "m.gguf", dtype="f32")
    model = kdjax.load(folder / "m.gguf", dtype="float32")
    return folder / "m.gguf", model, [[i % 130 + 3 for i in prompt] for prompt in PROMPTS]


def check_llamas_text(path, model, prompts, head, most, **more):
    """llama.cpp's text with a head is its text without, and kdjax's where that is sure.

    Returns its answers with the head, and, with settings `more` of the server, those with these.
    """
    file = path.with_name("h.gguf")
    export_head(head, file, dtype="f32")
    served = dict(draft=file, kind=head.functions.shape.kind, most=most)
    settings = [{}, served, *([served | more] if more else [])]
    plain, *drafted = (ask_server(path, prompts, **how) for how in settings)
    begun = [prompt + answer["tokens"][:1] for prompt, answer in zip(prompts, plain, strict=True)]
    how = dict(draft=head, draft_tokens=most, max_tokens=29, stop_ids=(), batch_size=3)
    checked = 0
    for row, (prompt, x) in enumerate(zip(begun, model.generate(begun, **how), strict=True)):
        first, *others = (answers[row]["tokens"][1:] for answers in (plain, *drafted))
        assert all(other == first for other in others)
        same = count_sure(model, [*prompt, *x.ids], len(prompt))
        assert first[:same] == x.ids[:same]
        if same == len(x.ids):
            accepted = count("draft_n_accepted", [drafted[0][row]])
            assert 0 <= x.drafted.accepted - accepted <= most
        checked += same
    assert checked > 60
    assert count("draft_n_accepted", drafted[0]) > 10
    return drafted


@pytest.mark.slow
@needs_llama_cpp
def test_llama_cpp_writes_a_llamas_text_with_its_head(tmp_path):
    """Its text with the head is its text without, whatever the confidence, and kdjax's."""
    path, model, prompts = make_llama(tmp_path)
    made = make_head(model, layers=1, slots=SLOTS, rank=RANK, taps=(0, 2))
    trained = teach(model, made, prompts)
    drafted, sure = check_llamas_text(path, model, prompts, trained, SLOTS, least=0.5)
    assert count("draft_n", sure) < count("draft_n", drafted)


@EACH
def test_files_keep_the_head(model, head, tmp_path):
    export_head(head, tmp_path / "h.gguf", dtype="f32")
    read = load_head(tmp_path / "h.gguf", model)
    assert read.functions.shape == head.functions.shape
    ours, theirs = (flatten_dict(x.params["dspark"]) for x in (head, read))
    assert ours.keys() == theirs.keys()
    for key, x in ours.items():
        np.testing.assert_array_equal(theirs[key], x)
    values = open_table(tmp_path / "h.gguf").metadata
    assert values["dflash.has_confidence_head"]
    assert values["dflash.sample_from_anchor"] == head.functions.shape.anchored
    # A target whose positions have three axes: the head rotates all its columns by the first.
    sections = [16, 0, 0, 0] if model.spec.rope_sections else []
    assert [*values.get("dflash.rope.dimension_sections", [])] == sections
    export_head(head, tmp_path / "folder", folder=True)
    assert load_head(tmp_path / "folder", model).functions.shape == head.functions.shape
    plain = make_head(model, layers=1, slots=2, rank=4, confident=False)
    export_head(plain, tmp_path / "plain.gguf")
    assert load_head(tmp_path / "plain.gguf", model).functions.shape == plain.functions.shape
    assert not open_table(tmp_path / "plain.gguf").metadata["dflash.has_confidence_head"]
    export_head(head, tmp_path / "half.gguf")
    half = load_head(tmp_path / "half.gguf", model)
    found = half.params["dspark"]["fc"]["weight"]
    np.testing.assert_array_equal(found, head.params["dspark"]["fc"]["weight"].astype("float16"))
    odd = write_odd(tmp_path / "half.gguf", tmp_path / "odd.gguf", "fc.weight")
    with pytest.raises(UserError, match=r"odd.gguf: found numbers in fc.weight that are not finit"):
        load_head(odd, model)


def test_a_heads_parameters_have_names_next_to_the_models(model, head):
    names = kdjax.parameter_names(head)
    assert kdjax.parameter_names(model).items() < names.items()
    assert names["dspark/fc/weight"] == "" and "dspark/blocks/attn/q/weight" in names


def test_taps_are_spread_without_the_first():
    assert spread_taps(28) == (1, 7, 14, 21, 27) and spread_taps(4) == (1, 2, 3)
    assert spread_taps(2) == (1,) and spread_taps(1) == (0,)


def test_what_is_no_head_is_refused(models, model, head, path):
    with pytest.raises(UserError, match=r"found a qwen2 model; expected one of qwen3, .*llama"):
        make_head(kdjax.load(models / "student.gguf", dtype="float32"))
    with pytest.raises(UserError, match="found a head that drafts; expected a model to generate"):
        head.generate(PROMPTS[:1], max_tokens=2)
    with pytest.raises(UserError, match=r"found taps=\(1, 3\); expected layers from 0 to 2"):
        make_head(model, taps=(1, 3))
    for name, size, least in (("layers", 0, 1), ("slots", 0, 1), ("rank", -1, 0)):
        with pytest.raises(UserError, match=f"found {name}={size}; expected {least} or more"):
            make_head(model, **{name: size})
    with pytest.raises(UserError, match=r"found draft_p_min=2.0; expected a probability, 0 to 1"):
        model.generate(PROMPTS[:1], draft=head, draft_tokens=2, draft_p_min=2.0, max_tokens=2)
    plain = make_head(model, layers=1, slots=2, rank=4, confident=False)
    with pytest.raises(UserError, match=r"found draft_p_min=0.5 for a draft without confidence"):
        model.generate(PROMPTS[:1], draft=plain, draft_tokens=2, draft_p_min=0.5, max_tokens=2)
    with pytest.raises(UserError, match=r"found 5 drafts a pass; expected 1 to 4"):
        model.generate(PROMPTS[:1], draft=head, draft_tokens=5, max_tokens=2)
    with pytest.raises(UserError, match=r"found architecture 'qwen3'; expected 'dflash'"):
        load_head(path, model)
    loss = kdjax.KDLoss(kdjax.total_variation)
    with pytest.raises(UserError, match=r"found no head that drafts and form=DraftHead"):
        kdjax.make_step(model, model, loss, optax.sgd(1.0), form=DraftHead())
    with pytest.raises(UserError, match=r"found trainable='blk.0' for a student of form DraftHead"):
        kdjax.make_step(head, model, loss, optax.sgd(1.0), trainable="blk.0")
    with pytest.raises(UserError, match=r"form=Rounded\('q4_0'\) for a block or head that drafts"):
        kdjax.make_step(head, model, loss, optax.sgd(1.0), form=kdjax.Rounded("q4_0"))
