"""The head that drafts without a bias (DFlash): computed, trained, written, judged by llama.cpp."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exporting import needs_llama_cpp
from flax.traverse_util import flatten_dict, unflatten_dict
from scipy.special import log_softmax, softmax
from test_dspark import (
    NEW,
    PROMPTS,
    SHAPE,
    _run_blocks,
    check_gradient,
    check_served,
    compile_step,
    draft_by_hand,
    model,
    path,
    read_taps,
    run_slots,
    teach,
    unsettle,
)

import kdjax
from kdjax.errors import UserError
from kdjax.export.heads import export_head
from kdjax.formats import open_table
from kdjax.formats.gguf import write_gguf
from kdjax.models.dspark import place_anchors
from kdjax.models.dspark_files import MASK, SECTIONS
from kdjax.models.heads import load_head, make_head
from kdjax.training.forms import DraftHead

__all__ = ["model", "path"]  # fixtures
pytestmark = pytest.mark.usefixtures("one_device")

DRAFTS = 4
BLOCK = 1 + DRAFTS  # slots; the anchor's predicts nothing


@pytest.fixture(scope="module")
def head(model):
    return unsettle(make_head(model, seed=1, layers=2, slots=DRAFTS, rank=0))


def guess(model, head, taps, anchor):
    """Logits `[DRAFTS, V]` in NumPy: a mask's slot predicts the token that stands in its place."""
    states, _, embed = run_slots(model, head, taps, anchor, BLOCK)
    return states[1:] @ embed.T


def lay_out(*texts):
    """Columns `[1, T]` of a row of documents."""
    lengths = [len(text) for text in texts]
    columns = np.concatenate(texts), np.repeat(np.arange(len(texts)) + 1, lengths)
    columns = *columns, np.concatenate([np.arange(n) for n in lengths])
    return [jnp.asarray(x[None], jnp.int32) for x in columns]


@pytest.mark.parametrize("first", [0, 3])
def test_the_head_predicts_the_tokens_of_its_masks(model, head, first):
    """Blocks of two documents of a row; a block's last mask may lie beyond its document."""
    texts, checked = (PROMPTS[0], PROMPTS[2]), 0
    columns = lay_out(*texts)
    anchors = place_anchors(jnp.asarray([first]), 33, BLOCK)
    found, confidence = jax.device_get(_run_blocks(head.functions, head.params, *columns, anchors))
    assert confidence is None
    for text, start in zip(texts, (0, 24), strict=True):
        taps, _ = read_taps(model, head, text)
        last = min(len(text) - DRAFTS, 33 - start - BLOCK)
        for anchor in range((first - start) % BLOCK, last + 1, BLOCK):
            inside = slice(start + anchor, start + anchor + DRAFTS)
            expected = guess(model, head, taps[:anchor], text[anchor])
            np.testing.assert_allclose(found[inside], expected, atol=5e-5)
            checked += 1
    assert checked >= 5


@pytest.mark.slow
def test_runs_of_drafts_are_those_of_blocks_that_begin_everywhere(model, head):
    text = PROMPTS[0][:12]
    run = jax.jit(head.functions.draft_runs, static_argnums=4)
    states = np.asarray(run(head.params, *lay_out(text), DRAFTS), np.float64)[0]
    taps, _ = read_taps(model, head, text)
    _, _, embed = run_slots(model, head, taps[:1], text[1], 1)
    for anchor in range(1, len(text) - BLOCK + 1):
        expected = guess(model, head, taps[:anchor], text[anchor])
        for n in range(DRAFTS):
            found = states[1 + n, anchor + n] @ embed.T
            np.testing.assert_allclose(found, expected[n], atol=5e-5)


def test_a_place_has_weight_if_a_mask_has_its_label():
    """None before an anchor; the first mask after it weighs 1."""
    form = DraftHead(block=4, lead=1, decay=2.0)
    segments = np.repeat([1, 2, 0], [7, 6, 3])[None]
    weights = np.asarray([[0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0]], np.float32)
    batch = {
        "tokens": jnp.zeros((1, 16), jnp.int32),
        "segment_ids": jnp.asarray(segments, jnp.int32),
        "weights": jnp.asarray(weights),
    }
    marked = form.mark(batch, None)
    np.testing.assert_array_equal(marked["anchors"][0], np.arange(16) // 4 * 4)
    # The anchors 0 and 8 are tokens of prompts; place 3 would belong to the slot of an anchor, 4.
    expected = [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(marked["weights"][0], expected)
    firsts, places = set(), set()
    for step in range(40):
        marked = form.mark(batch, jnp.int32(step))
        anchors, found = np.asarray(marked["anchors"][0]), np.asarray(marked["weights"][0])
        firsts.add(int(anchors[3]))
        places |= {*np.flatnonzero(found).tolist()}
        for t in np.flatnonzero(found):
            a = anchors[t + 1]
            assert 1 <= a <= t and segments[0, a - 1] == segments[0, a] == segments[0, t]
            assert weights[0, a - 1] == 1 and found[t] == pytest.approx(np.exp((a - t) / 2))
    assert firsts == {0, 1, 2, 3} and places == {3, 4, 5, 6, 9, 10, 11}


@pytest.mark.slow
def test_the_step_minimises_the_loss_of_its_blocks(model, head):
    """Its loss and its gradient are those of float64 blocks, each of its own text."""
    texts = PROMPTS[0][:14], PROMPTS[2]
    names = "tokens", "segment_ids", "positions"
    batch = dict(zip(names, map(np.asarray, lay_out(*(x[:-1] for x in texts))), strict=True))
    batch["labels"] = np.asarray([[*texts[0][1:], *texts[1][1:]]])
    batch["weights"] = np.ones((1, 21), np.float32)
    loss = kdjax.KDLoss(kdjax.total_variation, alpha=0.1)
    step = kdjax.make_step(head, model, loss, optax.sgd(1.0))
    state = step.init(head.params)
    marked = step.spec.form.mark({name: jnp.asarray(x) for name, x in batch.items()}, jnp.int32(0))
    weights = np.asarray(marked["weights"][0], np.float64)
    first = int(marked["anchors"][0, -1]) % BLOCK
    assert np.count_nonzero(weights) > 8
    began: dict[tuple[str, ...], Any] = flatten_dict({"dspark": head.params["dspark"]})
    state, metrics = step(state, model.params, batch)

    def value(params):
        whole = head.replace(params={**head.params, **unflatten_dict(params)})
        return sum_losses(model, whole, texts, first, weights) / np.count_nonzero(weights)

    assert metrics.means()["loss"] == pytest.approx(value(began), abs=1e-5)
    check_gradient(value, began, flatten_dict(state.params), ("fc", "blocks", "norm"))


def sum_losses(model, head, texts, first, weights):
    """The loss of blocks in float64, summed over the masks of two documents in a row."""
    total, start = 0.0, 0
    for text in texts:
        taps, states = read_taps(model, head, text)
        embed = np.asarray(model.params["embed"], np.float64)[: model.real_vocab]
        for anchor in range((first - start) % BLOCK, len(text) - 1, BLOCK):
            places = np.arange(anchor, min(anchor + DRAFTS, len(text) - 1))
            said = guess(model, head, taps[:anchor], text[anchor])[: len(places)]
            target = softmax(states[places] @ embed.T, axis=-1)
            ce = -log_softmax(said, axis=-1)[np.arange(len(places)), np.asarray(text)[places + 1]]
            tv = np.abs(softmax(said, axis=-1) - target).sum(-1) / 2
            total += np.sum(weights[start + places] * (0.1 * ce + 0.9 * tv))
        start += len(text) - 1
    return total


@pytest.mark.slow
def test_no_column_of_the_unembedding_has_a_gradient(model, head):
    """The step's products with a side of ids are of positions alone."""
    compiled, positions = compile_step(model, head, alpha=1.0)
    found = re.findall(r"f32\[(\d+),(\d+)\][^=]*? dot\(", compiled.as_text())
    sizes = {(int(a), int(b)) for a, b in found}
    assert {a + b - SHAPE.rows for a, b in sizes if SHAPE.rows in (a, b)} == {positions}


def draft_masks(model, head, taps, anchor, _):
    """Drafts of a block, greedily."""
    return guess(model, head, taps, anchor).argmax(-1).tolist()


@pytest.fixture(scope="module")
def learned(model, head):
    return teach(model, head, PROMPTS)


@pytest.mark.slow
def test_the_head_drafts_and_the_text_stays(model, learned):
    """Texts, passes and accepted drafts are those of whole texts read anew; slots are refilled."""
    how = dict(draft=learned, draft_tokens=DRAFTS, batch_size=2)
    found = model.generate(PROMPTS, **how, **NEW)
    plain = model.generate(PROMPTS, **NEW)
    for prompt, answer, alone in zip(PROMPTS, found, plain, strict=True):
        ids, *counts = draft_by_hand(model, learned, prompt, 30, draft=draft_masks)
        assert answer.ids == ids == alone.ids and [*answer.drafted] == counts
    assert sum(answer.drafted.accepted for answer in found) > 10


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("path", ["qwen3", "qwen35moe"], indirect=True)
def test_llama_cpp_accepts_as_many(path, model, learned, tmp_path):
    """Its `draft-dflash` changes no text, and accepts what kdjax does, after the first id."""
    check_served(path, model, learned, tmp_path, DRAFTS)


def test_files_keep_the_head(model, head, tmp_path):
    export_head(head, tmp_path / "h.gguf", dtype="f32")
    read, table = load_head(tmp_path / "h.gguf", model), open_table(tmp_path / "h.gguf")
    assert read.functions.shape == head.functions.shape
    ours, theirs = (flatten_dict(x.params["dspark"]) for x in (head, read))
    assert ours.keys() == theirs.keys()
    for key, x in ours.items():
        np.testing.assert_array_equal(theirs[key], x)
    assert not {name for name in table if name.startswith(("markov", "conf"))}
    values = table.metadata
    assert values["dflash.block_size"] == BLOCK and not values["dflash.sample_from_anchor"]
    # Published files of such heads have neither this key nor the vocabulary's size.
    left_out = {"dflash.sample_from_anchor", "dflash.has_confidence_head", "dflash.vocab_size"}
    rows = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    fewer = {key: x for key, x in values.items() if key not in left_out}
    write_gguf(tmp_path / "fewer.gguf", fewer, rows)
    assert load_head(tmp_path / "fewer.gguf", model).functions.shape == head.functions.shape
    for key, value, wrong in (
        ("attention.sliding_window", 512, "a head with a sliding window; expected a DSpark or DFl"),
        ("rope.scaling.type", "yarn", "a head with dflash.rope.scaling.type=yarn; expected none"),
        (SECTIONS, [11, 11, 10], rf"dflash.{SECTIONS}=\[11, 11, 10\]; expected none but the fi"),
        ("logit_scale", 0.5, r"dflash.logit_scale=0.5: expected 1.0"),
        ("block_size", 1, "dflash.block_size=1; expected at least 2, for 1 draft a pass"),
    ):
        write_gguf(tmp_path / "odd.gguf", fewer | {f"dflash.{key}": value}, rows)
        with pytest.raises(UserError, match=wrong):
            load_head(tmp_path / "odd.gguf", model)
    del fewer[MASK]
    write_gguf(tmp_path / "mask.gguf", fewer, rows)
    with pytest.raises(UserError, match=f"found no {MASK}; expected the id of the head's mask"):
        load_head(tmp_path / "mask.gguf", model)


def test_what_the_head_cannot_do_is_refused(model, head):
    with pytest.raises(UserError, match=r"found 5 drafts a pass; expected 1 to 4"):
        model.generate(PROMPTS[:1], draft=head, draft_tokens=5, max_tokens=2)
    with pytest.raises(UserError, match=r"found draft_p_min=0.5 for a draft without confidence"):
        model.generate(PROMPTS[:1], draft=head, draft_tokens=2, draft_p_min=0.5, max_tokens=2)
