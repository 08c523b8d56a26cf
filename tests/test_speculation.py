"""Speculative generation is lossless: the big model's own text, whatever drafts it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import cases
from test_generate import opened, prompts_of

from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import UserError
from kdjax.models import decoding, speculation, weights
from kdjax.models.decoding import Sampling
from kdjax.models.drafts import check_same_ids, why_refused
from kdjax.models.model import load, load_model
from kdjax.models.speculation import judge


def both(models, big="teacher.gguf@dense:float32", small="student.gguf@dense:float32"):
    return opened(f"{models}/{big}"), opened(f"{models}/{small}")


@pytest.mark.parametrize("form", cases("dense:float32", slow=["packed:float32"]))
def test_greedy_speculation_gives_the_same_ids(models, form):
    big, small = both(models, f"teacher.gguf@{form}", f"student.gguf@{form}")
    how = dict(max_tokens=24, stop_ids=(), batch_size=3)
    prompts = prompts_of(5)
    plain = big.generate(prompts, **how)
    got = big.generate(prompts, draft=small, draft_tokens=3, **how)
    assert [c.ids for c in got] == [c.ids for c in plain]
    for one, other in zip(got, plain, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        assert one.reason == "length" and one.drafted.passes >= 23 // 4


@pytest.mark.slow
def test_a_row_ends_within_a_block(models):
    """At a stop id and at a stop string in the middle of what was accepted."""
    big, _ = both(models)
    prompts, how = prompts_of(3), dict(max_tokens=20, batch_size=3)
    plain = big.generate(prompts, stop_ids=(), **how)
    stop = (plain[0].ids[6],)
    want = big.generate(prompts, stop_ids=stop, **how)
    got = big.generate(prompts, stop_ids=stop, draft=big, draft_tokens=4, **how)
    assert all(c.drafted.accepted == 4 * c.drafted.passes for c in got)  # all of its own
    assert [c.ids for c in got] == [c.ids for c in want]
    assert [c.reason for c in got] == [c.reason for c in want]
    assert got[0].reason == "stop" and len(got[0].ids) <= 6
    text = plain[1].text[8:11]
    want = big.generate(prompts, stop_ids=(), stop_strings=(text,), **how)
    got = big.generate(prompts, stop_ids=(), stop_strings=(text,), draft=big, **how)
    assert [(c.ids, c.text) for c in got] == [(c.ids, c.text) for c in want]


def test_the_device_stops_with_the_last_row(models, monkeypatch):
    """No round runs for nobody; the host looks every few rounds."""
    big, _ = both(models)
    advance, ran = decoding._advance_on_cpu, []

    def count(*args, **how):
        slots, drawn, done = advance(*args, **how)
        ran.append(int(np.any(np.asarray(drawn.ids), axis=(1, 2)).sum()))
        return slots, drawn, done

    monkeypatch.setattr(decoding, "_advance_on_cpu", count)
    how = dict(stop_ids=(), batch_size=3, draft=big)  # whose drafts are all accepted: 6 ids a round
    big.generate(prompts_of(3), max_tokens=20, **how)
    big.generate(prompts_of(3), max_tokens=50, **how)
    assert ran == [4, 8, 1]


def near(model, share=0.3):
    """A draft of which some is accepted: the model with noise in its weights."""
    rng = np.random.default_rng(0)

    def move(x):
        numbers = np.asarray(x)
        noise = rng.normal(size=x.shape) * numbers.std()
        return jax.device_put((numbers + share * noise).astype(x.dtype), x.sharding)

    return model.replace(params=jax.tree.map(move, model.params))


# No draw of this seed is so near its threshold that weights 1e-4 apart draw another id. One of seed
# 5 was, and programs whose sums round otherwise fell on either side of it.
DRAWN = dict(temperature=1.0, top_p=0.9, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "slots", "drawn"), [("data", 2, DRAWN), ("fsdp", 4, {})])
def test_a_drafted_row_depends_on_neither_slot_nor_device(models, axis, slots, drawn):
    """More prompts than slots, of answers of other lengths, on one device and on two.

    One prompt is a single id: nothing stands before what a draft reads first.
    """
    count = {"data": (2, 1), "fsdp": (1, 2)}[axis]
    placement = Placement.on(make_mesh(*count, 1, jax.devices()[:2]))
    one, _ = both(models)
    two = load_model(one.checkpoint, placement=placement, dtype="float32")
    prompts, limits = [*prompts_of(6), [7]], [3, 20, 1, 9, 17, 8, 12]
    how = dict(max_tokens=20, stop_ids=(), draft_tokens=3) | drawn
    want = one.generate(prompts, draft=near(one), batch_size=7, **how)
    assert any(c.drafted.accepted for c in want) and any(
        c.drafted.accepted < 3 * c.drafted.passes for c in want
    )
    if not drawn:
        plain = one.generate(prompts, batch_size=7, max_tokens=20, stop_ids=())
        assert [c.ids for c in want] == [c.ids for c in plain]
    # Of its own drafts none is rejected, from the first id on.
    singles = [[i] for i in range(20, 27)]
    own = one.generate(singles, draft=one, batch_size=7, **how)
    assert all(c.drafted.accepted == 3 * c.drafted.passes == 15 for c in own)
    got = two.generate(prompts, draft=near(two), limits=limits, batch_size=slots, **how)
    assert [c.ids for c in got] == [c.ids[:n] for c, n in zip(want, limits, strict=True)]
    assert {c.reason for c in got} == {"length"}


@pytest.mark.slow
def test_a_sampled_row_does_not_depend_on_its_batch(models):
    big, small = both(models)
    how = dict(max_tokens=12, stop_ids=(), temperature=1.0, top_k=20, seed=3, draft=small)
    prompts = prompts_of(4)
    together = big.generate(prompts, batch_size=4, **how)
    apart = big.generate(prompts[2:], batch_size=1, numbers=[2, 3], **how)
    assert [c.ids for c in together[2:]] == [c.ids for c in apart]
    assert together != big.generate(prompts, batch_size=4, **how | dict(seed=4))


def one_round(p, q, count, sampling, seed=0):
    """The first two ids of `count` rounds of two drafts over fixed distributions `[3, V]`."""
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(jax.random.key(seed), i), 3))(
        jnp.arange(count)
    )
    p, q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (p, q))
    logits = jnp.broadcast_to(p, (count, *p.shape))
    draft_logits = jnp.broadcast_to(q[:2], (count, 2, q.shape[1]))
    of = speculation._log_probs(draft_logits, sampling)
    places = [
        speculation._draw(jnp.exp(of[:, i]), keys[:, i], speculation._DRAFT) for i in range(2)
    ]
    drafts = jnp.stack(places, axis=1)
    accepted, following = judge(logits, draft_logits, drafts, keys, sampling)
    ids = jnp.concatenate([drafts, following[:, None]], axis=1)
    ids = jnp.where(jnp.arange(3)[None] == accepted[:, None], following[:, None], ids)
    return np.asarray(ids), np.asarray(accepted)


@pytest.mark.parametrize(
    "how", cases(dict(temperature=0.7, top_k=3), slow=[dict(), dict(top_p=0.8)])
)
def test_speculative_sampling_draws_from_the_big_models_distribution(how):
    """40,000 rounds over 5 ids beside the exact probabilities, and their acceptance beside 1 - TV.

    The draft's favourite is the big model's least, so most of a wrong rule would show.
    """
    rng = np.random.default_rng(1)
    p, q = (rng.dirichlet(np.ones(5), 3) for _ in range(2))
    q[0] = p[0][np.argsort(np.argsort(-p[0]))][::-1]
    sampling, count = Sampling(**dict(temperature=1.0) | how), 40_000
    ids, accepted = one_round(p, q, count, sampling)

    def exact(x):
        x = x ** (1 / sampling.temperature)
        order = np.argsort(-x)
        cumulative = np.cumsum(x[order] / x.sum()) - x[order] / x.sum()
        kept = order[cumulative < sampling.top_p][: sampling.top_k or None]
        only = np.zeros_like(x)
        only[kept] = x[kept]
        return only / only.sum()

    p, q = ([exact(x) for x in side] for side in (p, q))
    alive = np.ones(count, bool)
    for place in range(3):  # of the rounds that came so far, what stands there is drawn from p
        found = np.bincount(ids[alive, place], minlength=5) / alive.sum()
        bound = 5 * np.sqrt(p[place] * (1 - p[place]) / alive.sum()) + 1e-9
        assert np.all(np.abs(found - p[place]) <= bound), (place, found, p[place])
        kept = np.minimum(p[place], q[place]).sum()
        if place < 2:
            rate = (accepted[alive] > place).mean()
            assert abs(rate - kept) < 5 * np.sqrt(0.25 / alive.sum())
            alive &= accepted > place


@pytest.mark.parametrize(
    "how", cases({}, slow=[dict(top_k=6, top_p=0.8), dict(top_k=3), dict(top_p=0.7)])
)
def test_plain_and_speculative_drawing_keep_the_same_ids(how):
    """Those equal to the last that is kept as well; a row of the head that is no id never."""
    logits = jnp.asarray([1, 3, 3, 0, 2, 2, 2, -1, 1, 9], jnp.float32)
    sampling = Sampling(temperature=0.9, **how)
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn, _ = decoding.pick(jnp.broadcast_to(logits[None], (len(keys), 10)), keys, sampling, 9)
    masked = weights.mask_padding(logits[None, None], 9, -jnp.inf)
    log_probs = speculation._log_probs(masked, sampling)[0, 0]
    found = np.bincount(np.asarray(drawn), minlength=10) / len(keys)
    np.testing.assert_allclose(found, np.exp(log_probs), atol=0.02)
    assert np.isfinite(log_probs).sum() == (found > 0).sum() == (5 if how else 9)


@pytest.mark.slow
def test_sampled_text_has_the_distribution_of_plain_sampling(models):
    """Pairs of first ids of 1,600 rows, drafted by a model nearby, beside exact probabilities."""
    _, big = both(models)
    count, prompt = 1600, prompts_of(1)[0]
    how = dict(max_tokens=2, stop_ids=(), temperature=0.3, top_k=3, batch_size=200)
    got = big.generate([prompt] * count, draft=near(big, 0.1), draft_tokens=2, **how)

    def of(ids):
        logits = np.asarray(big.logits([[*prompt, *ids]]), np.float64)[0, -1] / 0.3
        best = np.argsort(-logits)[:3]
        weights = np.exp(logits[best] - logits[best[0]])
        return dict(zip(best.tolist(), weights / weights.sum(), strict=True))

    exact = {(a, b): x * y for a, x in of([]).items() for b, y in of([a]).items()}
    pairs = [tuple(c.ids[:2]) for c in got]
    assert set(pairs) <= set(exact) and len(exact) == 9
    for pair, p in exact.items():
        assert abs(pairs.count(pair) / count - p) < 5 * np.sqrt(p * (1 - p) / count)
    assert any(c.drafted.accepted for c in got) and any(not c.drafted.accepted for c in got)


def test_what_cannot_draft_is_refused(models, types_unchecked):
    big, small = both(models)
    with pytest.raises(UserError, match=r"found str as the draft; expected a kdjax\.Model"):
        big.generate([[1]], draft="draft.gguf", max_tokens=2)
    for bad in (0, 65):
        with pytest.raises(UserError, match="drafts a pass; expected 1 to 64"):
            big.generate([[1]], draft=small, draft_tokens=bad, max_tokens=2)
    tokens = list(small.tokenizer.tokens)
    tokens[7] = "other"
    other = dataclasses.replace(small.tokenizer, tokens=tuple(tokens))
    with pytest.raises(UserError, match="id 7 is 'other' to it"):
        check_same_ids(big.tokenizer, other)
    elsewhere = load(f"{models}/student.gguf", dtype="float32", devices=jax.devices()[:2])
    with pytest.raises(
        UserError, match="model is on 1 devices and its draft on 2, or on other ones"
    ):
        big.generate([[1]], draft=elsewhere, max_tokens=2)
    with pytest.raises(UserError, match="draft's vocabulary is another"):
        big.generate([[1]], draft=small.replace(own_tokenizer=other), max_tokens=2)


def test_why_llama_cpp_would_refuse_a_draft():
    """Its rules of common/speculative.cpp, one by one."""
    tokens = [f"t{i}" for i in range(300)]
    known = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    known |= {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.add_bos_token": False}

    def refused(**changes):
        return why_refused(known, known | changes)

    name = "tokenizer.ggml."
    assert refused() is None
    assert refused(**{f"{name}tokens": ["x"] * 5 + tokens[5:]}) is None  # ids below 5 may differ
    assert "id 5 is 't5'" in refused(**{f"{name}tokens": [*tokens[:5], "x", *tokens[6:]]})
    assert refused(**{f"{name}tokens": tokens + ["x"] * 128}) is None
    assert "more than 128 apart" in refused(**{f"{name}tokens": tokens + ["x"] * 129})
    assert "of type 'gpt2', the draft's of 'llama'" in refused(**{f"{name}model": "llama"})
    assert "puts bos before a text" in refused(**{f"{name}add_bos_token": True})
    assert refused(**{f"{name}eos_token_id": 4}) is None  # not added, not compared
    added = {f"{name}add_eos_token": True}
    other_end = known | added | {f"{name}eos_token_id": 4}
    assert "eos is 3 to the model and 4" in why_refused(known | added, other_end)
    assert "the draft is no GGUF file with a vocabulary" in why_refused(known, {})
