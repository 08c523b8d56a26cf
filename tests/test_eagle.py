"""The head that drafts token by token (EAGLE-3): computed, trained, written, run by llama.cpp."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exporting import needs_llama_cpp
from flax.traverse_util import flatten_dict, unflatten_dict
from scipy.special import log_softmax, softmax
from test_dflash import lay_out
from test_dspark import (
    NEW,
    PROMPTS,
    check_gradient,
    check_llamas_text,
    check_served,
    make_llama,
    model,
    norm,
    numbers_of,
    path,
    read_taps,
    rotate,
    teach,
    with_targets,
)

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


# Of 305; in no order, and three texts have ids that are not among them.
IDS = tuple(np.random.default_rng(3).permutation([i for i in range(300) if i % 5]).tolist())
KINDS = {"all ids": (), "some ids": IDS}
EACH = with_targets(*KINDS)
DENSE = with_targets(*KINDS, others=["qwen35"])
EXPERTS = with_targets(*KINDS, others=["qwen35moe"])


@pytest.fixture(scope="module", params=["all ids"])
def head(model, request):
    return unsettle(make_eagle(model, seed=1, ids=KINDS[request.param]))


def unsettle(made):
    """The head with random numbers for norms of ones, and a layer that changes its state."""
    draw = np.random.default_rng(0)
    flat: dict[tuple[str, ...], Any] = flatten_dict(made.params["eagle3"])
    for key, x in flat.items():
        if any("norm" in part for part in key):
            flat[key] = jnp.asarray(draw.uniform(0.5, 1.5, x.shape), jnp.float32)
        elif key[0] == "blocks":
            flat[key] = 3 * x
        elif key[0] == "output":
            flat[key] = x + 0.1 * jnp.asarray(draw.normal(size=x.shape), jnp.float32)
    return made.replace(params={**made.params, "eagle3": unflatten_dict(flat)})


def run_pass(model, head, taps, tokens, first):
    """States `[N, D]` of a pass of drafts in NumPy, before the last norm, each layer anew.

    The pass begins at the place `first` of `tokens`: from there on each state before a token is
    the head's. `taps` are of the places before.
    """
    w, embed = numbers_of(head.params["eagle3"], model.params["embed"])
    w = {k: x[0] if k.startswith("blocks/") else x for k, x in w.items()}
    spec = head.functions.shape.spec
    width, groups = spec.head_dim, spec.num_kv_heads
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
    """Logits `[N, I]` of a pass of drafts, over the head's ids."""
    w, embed = numbers_of(head.params["eagle3"], model.params["embed"])
    states = norm(run_pass(model, head, taps, tokens, first), w["norm"])
    return states @ w.get("output", embed[: model.real_vocab]).T


def ids_of(head, model):
    return np.asarray(head.functions.shape.ids or range(model.real_vocab))


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
    """0.1 CE and 0.9 total variation of passes' drafts in float64, summed by place in the pass.

    Both are over the head's ids; a label that is not among them has no CE.
    """
    embed, sums, places = np.asarray(model.params["embed"], np.float64), np.zeros(DRAFTS), 0
    ids = ids_of(head, model)
    for text in texts:
        taps, hidden = read_taps(model, head, text)
        target = softmax(hidden[: len(text)] @ embed[ids].T, axis=-1)
        for first in range(1, len(text) - 1):
            tokens = text[:-1][: first + DRAFTS]
            said, places = guess(model, head, taps, tokens, first), places + 1
            for n, logits in enumerate(said):
                ce = -log_softmax(logits)[ids == text[first + n + 1]].sum()
                tv = np.abs(softmax(logits) - target[first + n]).sum() / 2
                sums[n] += 0.1 * ce + 0.9 * tv
    return sums / places


TEXTS = PROMPTS[0][:8], PROMPTS[2][:6]


def make_batch(texts):
    names = "tokens", "segment_ids", "positions"
    batch = dict(zip(names, map(np.asarray, lay_out(*(x[:-1] for x in texts))), strict=True))
    batch["labels"] = np.asarray([[*texts[0][1:], *texts[1][1:]]])
    return batch | {"weights": np.ones((1, 12), np.float32)}


@pytest.mark.slow
@DENSE
def test_the_step_minimises_the_loss_of_its_passes(model, head):
    """Loss by draft and gradient are those of float64 passes, each of its own text."""
    texts, batch = TEXTS, make_batch(TEXTS)
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
    parts = {key[1] for key in began}
    assert parts == {"fc", "blocks", "norm"} | ({"output"} if head.functions.shape.ids else set())
    check_gradient(value, began, flatten_dict(state.params), parts, step=1e-6)


@pytest.mark.parametrize("head", ["some ids"], indirect=True)
def test_figures_of_some_ids_are_those_of_float64(model, head):
    """A head never drafts another id: its acceptance is over all ids of the target."""
    loss = kdjax.KDLoss(kdjax.forward_kl, alpha=0.1)
    step = kdjax.make_step(head, model, loss, optax.sgd(1.0), form=DraftEagle(later=()))
    found = step.evaluate(step.init(head.params), model.params, [make_batch(TEXTS)])
    embed, ids, rows = np.asarray(model.params["embed"], np.float64), ids_of(head, model), []
    for text in TEXTS:
        taps, hidden = read_taps(model, head, text)
        logits = hidden[: len(text)] @ embed[: model.real_vocab].T
        for first in range(1, len(text) - 1):
            (said,), label = guess(model, head, taps, text[: first + 1], first), text[first + 1]
            p, few, q = softmax(logits[first]), softmax(logits[first][ids]), softmax(said)
            kl = np.sum(few * (np.log(few) - np.log(q)))
            same = ids[said.argmax()] == logits[first].argmax()
            ces = -np.log(q[ids == label]).sum(), -np.log(p[label])
            rows.append((*ces, kl, kl, same, np.minimum(p[ids], q).sum()))
    names = "student_ce", "teacher_ce", "divergence", "kl", "agreement", "acceptance"
    for name, value in zip(names, np.mean(rows, axis=0), strict=True):
        assert found[name] == pytest.approx(value, abs=2e-5), name
    assert sum(label in IDS for text in TEXTS for label in text[2:]) < len(rows)
    assert found["loss"] == pytest.approx(0.1 * found["student_ce"] + 0.9 * found["kl"])


def test_ids_are_the_most_frequent_targets():
    """In their order; an id of prompts alone does not count."""
    tokens = np.asarray([[7, 7, 7, 5, 2, 2, 9], [7, 2, 5, 9, 1, 9, 9]])
    mask = np.asarray([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0]])
    assert DraftEagle(asked=3).read_text(tokens, mask, 12).ids == (2, 5, 9)
    assert DraftEagle(asked=5).read_text(tokens, mask, 12).ids == (0, 1, 2, 5, 9)
    assert DraftEagle().read_text(tokens, mask, 12).ids == ()
    with pytest.raises(UserError, match=r"found student.draft_ids=13; expected at most 12, t"):
        DraftEagle(asked=13).read_text(tokens, mask, 12)


@pytest.fixture(scope="module")
def learned(model, head):
    return teach(model, head, PROMPTS)


def write_by_hand(model, head, prompt, count):
    """Greedy rounds over whole texts, read anew each time: the text, passes, accepted drafts."""
    ids, passes, kept = list(prompt), 0, 0
    embed = np.asarray(model.params["embed"], np.float64)[: model.real_vocab]
    taps, _ = read_taps(model, head, ids)
    while len(ids) < len(prompt) + count:
        drafted = list(ids)
        for _ in range(DRAFTS):
            best = guess(model, head, taps, drafted, len(ids) - 1)[-1].argmax()
            drafted.append(int(ids_of(head, model)[best]))
        taps, states = read_taps(model, head, drafted)  # of what the next round has too
        told = (states[len(ids) - 1 : len(drafted)] @ embed.T).argmax(-1).tolist()
        same = [a == b for a, b in zip(drafted[len(ids) :], told, strict=False)]
        accepted = [*same, False].index(False)
        passes, kept = passes + 1, kept + accepted
        ids += told[: accepted + 1]
    return ids[len(prompt) : len(prompt) + count], passes, kept


@pytest.mark.slow
@DENSE
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
@EXPERTS
def test_llama_cpp_accepts_as_many(path, model, learned, tmp_path):
    """Its `draft-eagle3` changes no text, and accepts what kdjax does, after the first id."""
    check_served(path, model, learned, tmp_path, DRAFTS)


@pytest.mark.slow
@needs_llama_cpp
def test_llama_cpp_writes_a_llamas_text_with_its_head(tmp_path):
    """Its text with the head is its text without, and kdjax's, as are the accepted drafts."""
    path, target, prompts = make_llama(tmp_path)
    check_llamas_text(path, target, prompts, teach(target, make_eagle(target), prompts), DRAFTS)


@EACH
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
    assert list(values["eagle3.target_layers"]) == [*range(model.spec.num_layers)][-3:]
    assert "eagle3.rope.dimension_sections" not in values  # llama.cpp rotates pairs of columns
    if ids := head.functions.shape.ids:
        assert np.frombuffer(table.raw("d2t"), "<i8").tolist() == [*ids]
        assert table.info("d2t").dtype == "I64"
        assert table.info("output.weight").shape == (len(ids), 128)
    rows = np.asarray(layer["k"]["weight"][0]).reshape(-1, head.functions.shape.spec.head_dim, 256)
    stored = np.frombuffer(table.raw("blk.0.attn_k.weight"), np.float32).reshape(rows.shape)
    np.testing.assert_array_equal(stored[:, ::2], rows[:, : rows.shape[1] // 2])
    rest = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    extra = "blk.0.attn_q.bias", "F32", (128,), np.zeros(512, np.uint8)
    for key, value, others, wrong in (
        ("norm_before_residual", True, (), "with norm_before_residual; expected an EAGLE-3 head "),
        ("attention.sliding_window", 512, (), "with a sliding window; expected an EAGLE-3 head wi"),
        ("rope.scaling.factor", 8.0, (), "not compute:\n  eagle3.rope.scaling.factor=8.0: unknown"),
        ("rope.dimension_count", 8, (), r"eagle3.rope.dimension_count=8: expected 32"),
        ("attention.sliding_window", 0, (extra,), "found a tensor blk.0.attn_q.bias; expected a h"),
    ):
        write_gguf(tmp_path / "odd.gguf", {**values, f"eagle3.{key}": value}, [*rest, *others])
        with pytest.raises(UserError, match=wrong):
            load_head(tmp_path / "odd.gguf", model)


def test_files_with_an_unembedding_of_all_ids_are_read(model, head, tmp_path):
    """Its rows draft, not the target's; a table of ids that cannot be is refused."""
    export_head(head, tmp_path / "h.gguf", dtype="f32")
    table = open_table(tmp_path / "h.gguf")
    rest = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    rows = np.random.default_rng(0).normal(size=(model.vocab_size, 128)).astype("f4")
    output = "output.weight", "F32", rows.shape, rows.view(np.uint8)
    write_gguf(tmp_path / "own.gguf", table.metadata, [*rest, output])
    read = load_head(tmp_path / "own.gguf", model)
    np.testing.assert_array_equal(read.functions.head(read.params), rows)
    export_head(read, tmp_path / "again.gguf", dtype="f32")
    assert load_head(tmp_path / "again.gguf", model).functions.shape == read.functions.shape
    for ids, wrong in (
        (np.arange(304), r"found output.weight of \[305, 128\]; expected \[304, 128\]"),
        (np.arange(305) + 1, "found ids from 1 to 305 in d2t, 305 different ones of 305; expected"),
        (np.arange(305) // 2, "found ids from 0 to 152 in d2t, 153 different ones of 305; expec"),
        (np.arange(305.0), r"found d2t of F32 \[610\]; expected I64 of one axis"),
    ):
        kind = "I64" if ids.dtype == np.int64 else "F32"
        size = ids.nbytes // (8 if kind == "I64" else 4)
        d2t = "d2t", kind, (size,), ids.view(np.uint8)
        write_gguf(tmp_path / "odd.gguf", table.metadata, [*rest, output, d2t])
        with pytest.raises(UserError, match=wrong):
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
    with pytest.raises(UserError, match=r"found 3 ids, 2 different ones, from 1 to 2; expected di"):
        make_eagle(model, ids=(1, 2, 1))
    with pytest.raises(UserError, match=r"found draft_p_min=0.5 for a draft without confidence"):
        model.generate(PROMPTS[:1], draft=head, draft_p_min=0.5, max_tokens=2)
    loss = kdjax.KDLoss(kdjax.total_variation)
    with pytest.raises(UserError, match=r"no head that drafts and form=DraftEagle\(\).*make_eagle"):
        other = make_head(model, layers=1, slots=2, rank=0)
        kdjax.make_step(other, model, loss, optax.sgd(1.0), form=DraftEagle())
    with pytest.raises(UserError, match=r"no head that drafts and form=DraftHead\(\).*make_head"):
        kdjax.make_step(head, model, loss, optax.sgd(1.0), form=DraftHead())
