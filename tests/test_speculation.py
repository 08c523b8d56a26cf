"""Speculative generation is lossless: the big model's own text, whatever drafts it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import cases
from test_generate import opened, prompts_of

from kdjax.errors import UserError
from kdjax.models import decoding, speculation, weights
from kdjax.models.decoding import Sampling
from kdjax.models.drafts import check_same_ids, why_refused
from kdjax.models.speculation import judge


def both(models, big="teacher.gguf@dequant:float32", small="student.gguf@dequant:float32"):
    return opened(f"{models}/{big}"), opened(f"{models}/{small}")


@pytest.mark.parametrize("form", cases("dequant:float32", slow=["q4k:float32"]))
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


def test_the_device_stops_with_the_last_row_and_is_looked_at_seldom(models, monkeypatch):
    """No round runs for nobody; who reads along sees a few rounds at a time."""
    big, _ = both(models)
    advance, ran = speculation._advance, []

    def count(*args, **how):
        state, rounds = advance(*args, **how)
        ran.append(int(np.any(np.asarray(rounds.ids), axis=(1, 2)).sum()))
        return state, rounds

    monkeypatch.setattr(speculation, "_advance", count)
    how = dict(stop_ids=(), batch_size=3, draft=big)  # whose drafts are all accepted: 6 ids a round
    big.generate(prompts_of(3), max_tokens=20, **how)
    big.generate(prompts_of(3), max_tokens=50, **how)
    big.generate(prompts_of(3), max_tokens=50, on_text=lambda row, text: None, **how)
    assert ran == [4, 9, 8, 1]


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
    drafts = jax.vmap(jax.vmap(lambda k, x: jax.random.categorical(jax.random.fold_in(k, 0), x)))(
        keys[:, :2], of
    ).astype(jnp.int32)
    accepted, following = judge(logits, draft_logits, drafts, keys, sampling)
    ids = jnp.concatenate([drafts, following[:, None]], axis=1)
    ids = jnp.where(jnp.arange(3)[None] == accepted[:, None], following[:, None], ids)
    return np.asarray(ids), np.asarray(accepted)


@pytest.mark.parametrize("how", [dict(), dict(temperature=0.7, top_k=3), dict(top_p=0.8)])
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


@pytest.mark.parametrize("how", [dict(top_k=3), dict(top_p=0.7), dict(top_k=6, top_p=0.8), {}])
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
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(big.params))))

    def move(x):
        return x + 0.1 * jnp.std(x) * jax.random.normal(next(keys), x.shape)

    near = big.replace(params=jax.tree.map(move, big.params))
    count, prompt = 1600, prompts_of(1)[0]
    how = dict(max_tokens=2, stop_ids=(), temperature=0.3, top_k=3, batch_size=200)
    got = big.generate([prompt] * count, draft=near, draft_tokens=2, **how)

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


def test_what_cannot_draft_is_refused(models):
    big, small = both(models)
    for bad in (0, 65):
        with pytest.raises(UserError, match="drafts a pass; expected 1 to 64"):
            big.generate([[1]], draft=small, draft_tokens=bad, max_tokens=2)
    tokens = list(small.tokenizer.tokens)
    tokens[7] = "other"
    other = dataclasses.replace(small.tokenizer, tokens=tuple(tokens))
    with pytest.raises(UserError, match="id 7 is 'other' to it"):
        check_same_ids(big.tokenizer, other)
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
