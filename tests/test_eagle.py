"""The head that drafts token by token (EAGLE-3): computed, trained, written, run by llama.cpp."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exporting import needs_llama_cpp, write_small_tokenizer
from flax.traverse_util import flatten_dict, unflatten_dict
from scipy.special import log_softmax, softmax
from test_dflash import lay_out
from test_dspark import (
    NEW,
    PROMPTS,
    ask_server,
    calm,
    check_gradient,
    count,
    count_sure,
    model,
    norm,
    path,
    read_taps,
    rotate,
)
from test_families import wide

import kdjax
from kdjax.errors import UserError
from kdjax.export.heads import export_head
from kdjax.formats import open_table
from kdjax.formats.gguf import write_gguf
from kdjax.models.eagle import choose_taps
from kdjax.models.heads import load_head, make_eagle, make_head
from kdjax.training.forms import DraftEagle, DraftHead

__all__ = ["model", "path"]  # fixtures
pytestmark = pytest.mark.usefixtures("one_device")

DRAFTS = 3
WEIGHTS = 1, 0.8, 0.64


@pytest.fixture(scope="module")
def head(model):
    return unsettle(make_eagle(model, seed=1))


def unsettle(made):
    """The head with random numbers for norms of ones, and a layer that changes its state."""
    draw = np.random.default_rng(0)
    flat: dict[tuple[str, ...], Any] = flatten_dict(made.params["eagle3"])
    for key, x in flat.items():
        if any("norm" in part for part in key):
            flat[key] = jnp.asarray(draw.uniform(0.5, 1.5, x.shape), jnp.float32)
        elif key[0] == "blocks":
            flat[key] = 3 * x
    return made.replace(params={**made.params, "eagle3": unflatten_dict(flat)})


def numbers_of(head):
    flat: dict[tuple[str, ...], Any] = flatten_dict(head.params["eagle3"])
    w = {"/".join(k).removesuffix("/weight"): np.asarray(x, np.float64) for k, x in flat.items()}
    return {k: x[0] if k.startswith("blocks/") else x for k, x in w.items()}


def run_pass(model, head, taps, tokens, first):
    """States `[N, D]` of a pass of drafts in NumPy, before the last norm, each layer anew.

    The pass begins at the place `first` of `tokens`: from there on each state before a token is
    the head's. `taps` are of the places before.
    """
    w, spec = numbers_of(head), head.functions.shape.spec
    width, groups = spec.head_dim, spec.num_kv_heads
    embed = np.asarray(model.params["embed"], np.float64)
    before, states = list(taps[:first] @ w["fc"].T), []
    for last in range(first, len(tokens)):
        # Pairs of a token and the state before it: none for the first token of a text.
        places, g = np.arange(1, last + 1), np.stack(before)
        both = [norm(embed[tokens[1 : last + 1]], w["blocks/attn_norm"])]
        both = np.concatenate([*both, norm(g, w["blocks/state_norm"])], axis=-1)
        q, k, v = (
            (both @ w[f"blocks/attn/{x}"].T).reshape(len(both), -1, width) for x in ("q", "k", "v")
        )
        q, k = rotate(q, places), rotate(k, places)
        out = np.zeros(q.shape[1:])
        for number in range(spec.num_heads):
            group = number * groups // spec.num_heads
            weights = softmax(k[:, group] @ q[-1, number] / np.sqrt(width))
            out[number] = weights @ v[:, group]
        h = g[-1] + w["blocks/attn/o"] @ out.reshape(-1)
        y = norm(h, w["blocks/mlp_norm"])
        gate = w["blocks/mlp/gate"] @ y
        h = h + w["blocks/mlp/down"] @ (gate / (1 + np.exp(-gate)) * (w["blocks/mlp/up"] @ y))
        states.append(h)
        before.append(h)
    return np.stack(states)


def guess(model, head, taps, tokens, first):
    """Logits `[N, V]` of a pass of drafts."""
    embed = np.asarray(model.params["embed"], np.float64)[: model.real_vocab]
    return norm(run_pass(model, head, taps, tokens, first), numbers_of(head)["norm"]) @ embed.T


def test_drafts_are_those_of_passes_that_begin_everywhere(model, head):
    """They begin in two documents of a row, at each token but the first: no state precedes it."""
    texts, run = (PROMPTS[0][:14], PROMPTS[2]), jax.jit(head.functions.draft_runs, static_argnums=4)
    states = np.asarray(run(head.params, *lay_out(*texts), DRAFTS), np.float64)[0]
    embed, start = np.asarray(model.params["embed"], np.float64)[: model.real_vocab], 0
    for text in texts:
        taps, hidden = read_taps(model, head, text)
        np.testing.assert_allclose(
            states[0, start : start + len(text)], hidden[: len(text)], atol=5e-5
        )
        for first in range(1, len(text)):
            tokens = text[: first + DRAFTS]
            expected = guess(model, head, taps, tokens, first)
            for n in range(len(expected)):
                found = states[1 + n, start + first + n] @ embed.T
                np.testing.assert_allclose(found, expected[n], atol=1e-4)
        start += len(text)


def test_weights_leave_out_passes_without_a_state():
    """No pass begins at a document's first token, and no draft in another document than it."""
    form = DraftEagle(later=(0.5, 0.5))
    segments = np.repeat([1, 2, 0], [4, 5, 2])[None]
    batch = {"segment_ids": jnp.asarray(segments), "weights": jnp.asarray([[1.0] * 9 + [0.0] * 2])}
    marked = form.mark(batch, None)
    np.testing.assert_array_equal(marked["weights"][0], [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0])
    second, third = (form.weigh_later(marked, n)[0] for n in (1, 2))
    np.testing.assert_array_equal(second, [0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(third, [0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0])


def sum_losses(model, head, texts):
    """0.1 CE and 0.9 total variation of passes' drafts in float64, summed by place in the pass."""
    embed, sums, places = np.asarray(model.params["embed"], np.float64), np.zeros(DRAFTS), 0
    for text in texts:
        taps, hidden = read_taps(model, head, text)
        target = softmax(hidden[: len(text)] @ embed[: model.real_vocab].T, axis=-1)
        for first in range(1, len(text) - 1):
            tokens = text[:-1][: first + DRAFTS]
            said, places = guess(model, head, taps, tokens, first), places + 1
            for n, logits in enumerate(said):
                ce = -log_softmax(logits)[text[first + n + 1]]
                tv = np.abs(softmax(logits) - target[first + n]).sum() / 2
                sums[n] += 0.1 * ce + 0.9 * tv
    return sums / places


@pytest.mark.slow
def test_the_step_minimises_the_loss_of_its_passes(model, head):
    """Loss by draft and gradient are those of float64 passes, each of its own text."""
    texts = PROMPTS[0][:8], PROMPTS[2][:6]
    names = "tokens", "segment_ids", "positions"
    batch = dict(zip(names, map(np.asarray, lay_out(*(x[:-1] for x in texts))), strict=True))
    batch["labels"] = np.asarray([[*texts[0][1:], *texts[1][1:]]])
    batch["weights"] = np.ones((1, 12), np.float32)
    loss = kdjax.KDLoss(kdjax.total_variation, alpha=0.1)
    step = kdjax.make_step(head, model, loss, optax.sgd(1.0))
    assert step.spec.form == DraftEagle(later=WEIGHTS[1:], sizes=head.functions.shape.sizes)
    state = step.init(head.params)
    assert set(state.params) == {"eagle3"}
    began: dict[tuple[str, ...], Any] = flatten_dict({"eagle3": head.params["eagle3"]})
    state, metrics = step(state, model.params, batch)
    expected, found = sum_losses(model, head, texts), metrics.means()
    assert found["loss"] == pytest.approx(expected @ WEIGHTS, abs=3e-5)
    later = [found[name] for name in ("draft_2", "draft_3")]
    np.testing.assert_allclose(later, expected[1:], atol=2e-5)

    def value(params):
        whole = head.replace(params={**head.params, **unflatten_dict(params)})
        return sum_losses(model, whole, texts) @ WEIGHTS

    # Total variation bends where two probabilities are equal: by steps of 1e-5 the slope of `fc` is
    # 0.25% off.
    check_gradient(value, began, flatten_dict(state.params), ("fc", "blocks", "norm"), step=1e-6)


def teach(model, head, prompts):
    """The head after some steps on the model's own texts."""
    answers = model.generate(prompts, max_tokens=40, stop_ids=())
    rows = np.asarray([(p + a.ids)[-33:] for p, a in zip(prompts, answers, strict=True)])
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
    loss = kdjax.KDLoss(kdjax.total_variation, alpha=0.1)
    step = kdjax.make_step(head, model, loss, optax.adam(3e-3))
    state = step.init(head.params)
    for _ in range(60):
        state, _ = step(state, model.params, batch)
    return head.replace(params=step.see(state))


@pytest.fixture(scope="module")
def learned(model, head):
    return teach(model, head, PROMPTS)


def write_by_hand(model, head, prompt, count):
    """Greedy rounds over whole texts, read anew each time: the text, passes, accepted drafts."""
    ids, passes, kept = list(prompt), 0, 0
    embed = np.asarray(model.params["embed"], np.float64)[: model.real_vocab]
    while len(ids) < len(prompt) + count:
        drafted = list(ids)
        taps, _ = read_taps(model, head, ids)
        for _ in range(DRAFTS):
            drafted.append(int(guess(model, head, taps, drafted, len(ids) - 1)[-1].argmax()))
        told = (read_taps(model, head, drafted)[1][: len(drafted)] @ embed.T).argmax(-1)
        told = told.tolist()[len(ids) - 1 :]
        same = [a == b for a, b in zip(drafted[len(ids) :], told, strict=False)]
        accepted = [*same, False].index(False)
        passes, kept = passes + 1, kept + accepted
        ids += told[: accepted + 1]
    return ids[len(prompt) : len(prompt) + count], passes, kept


@pytest.mark.slow
def test_the_head_drafts_and_the_text_stays(model, learned):
    """Texts, passes and accepted drafts are those of whole texts read anew; slots are refilled."""
    how = dict(draft=learned, draft_tokens=DRAFTS, batch_size=2)
    found = model.generate([*PROMPTS, [7]], **how, **NEW)
    plain = model.generate([*PROMPTS, [7]], **NEW)
    assert [x.ids for x in found] == [x.ids for x in plain]
    for prompt, answer in zip(PROMPTS, found[:-1], strict=True):
        ids, *counts = write_by_hand(model, learned, prompt, 30)
        assert answer.ids == ids and [*answer.drafted] == counts
    assert sum(answer.drafted.accepted for answer in found) > 10


@pytest.mark.slow
@needs_llama_cpp
def test_llama_cpp_accepts_as_many(path, model, learned, tmp_path):
    """Its `draft-eagle3` changes no text, and accepts what kdjax does, after the first id."""
    export_head(learned, tmp_path / "h.gguf", dtype="f32")
    served, total = dict(draft=tmp_path / "h.gguf", kind="eagle3", most=DRAFTS), 0
    plain, drafting = (ask_server(path, PROMPTS, **how) for how in ({}, served))
    for prompt, alone, answer in zip(PROMPTS, plain, drafting, strict=True):
        ids = answer["tokens"]
        assert ids == alone["tokens"]
        how = dict(draft=learned, draft_tokens=DRAFTS, max_tokens=29, stop_ids=())
        ours = model.generate([prompt + ids[:1]], **how)[0]
        assert ours.ids == ids[1:]
        drafted, accepted = (count(key, [answer]) for key in ("draft_n", "draft_n_accepted"))
        rounds = 29 - accepted
        assert DRAFTS * (rounds - DRAFTS) <= drafted <= DRAFTS * rounds
        assert 0 <= ours.drafted.accepted - accepted <= DRAFTS
        total += accepted
    assert total > 10


@pytest.mark.slow
@needs_llama_cpp
def test_llama_cpp_writes_a_llamas_text_with_its_head(tmp_path):
    """Its text with the head is its text without, and kdjax's, as are the accepted drafts."""
    random = wide("llama", str(write_small_tokenizer(tmp_path / "tokenizer.gguf")))
    # llama.cpp draws padding rows as well, and no end of a text: both say nothing here.
    drawn = np.arange(random.spec.vocab_size) < min(random.tokenizer.special_ids)
    random = random.replace(
        params={**random.params, "head": random.params["head"] * drawn[:, None]}
    )
    kdjax.export_gguf(calm(random), tmp_path / "m.gguf", dtype="f32")
    target = kdjax.load(tmp_path / "m.gguf", dtype="float32")
    prompts = [[i % 130 + 3 for i in prompt] for prompt in PROMPTS]
    trained = teach(target, make_eagle(target), prompts)
    export_head(trained, tmp_path / "h.gguf", dtype="f32")
    served = dict(draft=tmp_path / "h.gguf", kind="eagle3", most=DRAFTS)
    plain, drafted = (ask_server(tmp_path / "m.gguf", prompts, **x) for x in ({}, served))
    begun = [prompt + answer["tokens"][:1] for prompt, answer in zip(prompts, plain, strict=True)]
    how = dict(draft=trained, draft_tokens=DRAFTS, max_tokens=29, stop_ids=(), batch_size=3)
    checked = 0
    for row, (prompt, x) in enumerate(zip(begun, target.generate(begun, **how), strict=True)):
        found = [answers[row]["tokens"][1:] for answers in (plain, drafted)]
        assert found[0] == found[1]
        same = count_sure(target, [*prompt, *x.ids], len(prompt))
        assert found[0][:same] == x.ids[:same]
        if same == len(x.ids):
            accepted = count("draft_n_accepted", [drafted[row]])
            assert 0 <= x.drafted.accepted - accepted <= DRAFTS
        checked += same
    assert checked > 60
    assert count("draft_n_accepted", drafted) > 10


def test_files_keep_the_head(model, head, tmp_path):
    """Rows of queries and keys lie in the file as pairs, as llama.cpp rotates them."""
    export_head(head, tmp_path / "h.gguf", dtype="f32")
    read, table = load_head(tmp_path / "h.gguf", model), open_table(tmp_path / "h.gguf")
    assert read.functions.shape == head.functions.shape
    ours, theirs = (flatten_dict(x.params["eagle3"]) for x in (head, read))
    assert ours.keys() == theirs.keys()
    for key, x in ours.items():
        np.testing.assert_array_equal(theirs[key], x)
    values, layer = table.metadata, head.params["eagle3"]["blocks"]["attn"]
    assert list(values["eagle3.target_layers"]) == [0, 1, 2]
    rows = np.asarray(layer["k"]["weight"][0]).reshape(-1, head.functions.shape.spec.head_dim, 256)
    stored = np.frombuffer(table.raw("blk.0.attn_k.weight"), np.float32).reshape(rows.shape)
    np.testing.assert_array_equal(stored[:, ::2], rows[:, : rows.shape[1] // 2])
    rest = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    write_gguf(tmp_path / "odd.gguf", {**values, "eagle3.norm_before_residual": True}, rest)
    with pytest.raises(UserError, match="found a head with norm_before_residual; expected an EAGL"):
        load_head(tmp_path / "odd.gguf", model)


def test_taps_are_low_middle_and_high():
    assert choose_taps(32) == (2, 16, 29) and choose_taps(7) == (2, 3, 4)
    assert choose_taps(4) == (1, 2, 3) and choose_taps(3) == (0, 1, 2)


def test_what_is_no_such_head_is_refused(models, model, head):
    with pytest.raises(UserError, match=r"found a qwen2 model; expected one of qwen3, .*llama"):
        make_eagle(kdjax.load(models / "student.gguf", dtype="float32"))
    with pytest.raises(UserError, match=r"found taps=\(0, 1\); expected 3 layers"):
        make_eagle(model, taps=(0, 1))
    with pytest.raises(UserError, match=r"found taps=\(0, 1, 3\); expected layers from 0 to 2"):
        make_eagle(model, taps=(0, 1, 3))
    with pytest.raises(UserError, match=r"found draft_p_min=0.5 for a draft without confidence"):
        model.generate(PROMPTS[:1], draft=head, draft_p_min=0.5, max_tokens=2)
    loss = kdjax.KDLoss(kdjax.total_variation)
    with pytest.raises(UserError, match=r"no head that drafts and form=DraftEagle\(\).*make_eagle"):
        other = make_head(model, layers=1, slots=2, rank=0)
        kdjax.make_step(other, model, loss, optax.sgd(1.0), form=DraftEagle())
    with pytest.raises(UserError, match=r"no head that drafts and form=DraftHead\(\).*make_head"):
        kdjax.make_step(head, model, loss, optax.sgd(1.0), form=DraftHead())
