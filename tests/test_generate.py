"""Generation: the cache changes nothing, rows do not see each other, and each ends as it should."""

import contextlib
import dataclasses
import functools
import itertools
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from exporting import write_odd
from quick import cases
from toy_teacher import next_id_teacher

from kdjax.commands import answers
from kdjax.commands import generate as command
from kdjax.commands.generate import Stream
from kdjax.demo import STUDENT, TEACHER
from kdjax.device import runtime
from kdjax.errors import UserError
from kdjax.evaluation.target import Target
from kdjax.models import decode_weights, decoder, decoding
from kdjax.models.checkpoint import ModelArgument
from kdjax.models.decoding import Sampling, complete, pick
from kdjax.models.kernels import softmax
from kdjax.models.model import load
from kdjax.models.shards import Spread

pytestmark = pytest.mark.usefixtures("one_device")

GOLDENS = Path(__file__).parent / "goldens"


@functools.cache
def opened(path):
    form = ModelArgument.parse(path)
    return load(form.path, weights=form.weights, dtype=form.dtype)


def prompts_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, int(rng.integers(1, 40))).tolist() for _ in range(count)]


def run(models, form="teacher.gguf@dense:float32", prompts=None, **sampling):
    settings = {"max_tokens": 20, "stop_ids": (), "batch_size": 4} | sampling
    prompts = prompts_of(4) if prompts is None else prompts
    return opened(f"{models}/{form}").generate(prompts, **settings)


def naive(models, prompt, count, form="teacher.gguf@dense:float32"):
    """Greedy ids and their log-probabilities, the whole text read again for each."""
    model = opened(f"{models}/{form}")
    ids, log_probs = list(prompt), []
    length = len(prompt) + count  # one program: what stands behind a position does not reach it
    for at in range(len(prompt) - 1, length - 1):
        row = np.zeros((1, length), np.int32)
        row[0, : len(ids)] = ids
        logits = np.asarray(model.logits(row))[0, at]
        ids.append(int(np.argmax(logits)))
        log_probs.append(float(jax.nn.log_softmax(logits)[ids[-1]]))
    return ids[len(prompt) :], log_probs


def test_greedy_with_a_cache_is_greedy_without(models):
    prompts = prompts_of(3)
    got = run(models, prompts=prompts)
    assert len({len(p) for p in prompts}) == 3  # of different lengths in one batch
    for prompt, completion in zip(prompts, got, strict=True):
        ids, log_probs = naive(models, prompt, 20)
        assert completion.ids == ids and completion.reason == "length"
        np.testing.assert_allclose(completion.log_probs, log_probs, atol=1e-4)


@pytest.mark.parametrize("family", cases("gemma3", slow=["mistral", "smollm3"]))
def test_layers_of_several_kinds_hold_in_the_cache(family):
    """Prompts shorter and longer than the window of 7, and continued beyond it."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 160, count).tolist() for count in (3, 50)]
    form = f"{family}@dense:float32"
    for prompt, completion in zip(prompts, run(GOLDENS, form, prompts), strict=True):
        ids, log_probs = naive(GOLDENS, prompt, 20, form)
        assert completion.ids == ids
        np.testing.assert_allclose(completion.log_probs, log_probs, atol=1e-4)


def test_packed_generates_the_same(models):
    forms = [f"teacher.gguf@{weights}:float32" for weights in ("dense", "packed")]
    one, two = (run(models, form) for form in forms)
    assert [c.ids for c in one] == [c.ids for c in two]
    assert len({tuple(c.ids) for c in one}) > 1


@pytest.mark.slow
def test_bf16_on_a_cpu_writes_the_same_with_room_for_wide_weights_and_without(models, monkeypatch):
    """Layers lie apart in float32, or their bits are widened a part at a time."""
    how = dict(form="teacher.gguf@dense:bfloat16", prompts=prompts_of(3), max_tokens=2)
    roomy = run(models, **how)
    monkeypatch.setattr(decode_weights, "_has_room", lambda *_: False)
    cramped = run(models, **how)
    assert [c.ids[0] for c in cramped] == [c.ids[0] for c in roomy]
    first = [[c.log_probs[0] for c in rows] for rows in (roomy, cramped)]
    np.testing.assert_allclose(*first, atol=0.03)


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch(models):
    how = dict(temperature=1.0, top_p=0.9, seed=5)
    prompts = prompts_of(5)
    together = run(models, prompts=prompts, batch_size=5, **how)
    apart = run(models, prompts=prompts, batch_size=2, **how)
    assert [c.ids for c in together] == [c.ids for c in apart]
    same = run(models, prompts=[prompts[0]] * 5, batch_size=5, **how)
    assert len({tuple(c.ids) for c in same}) == 5  # samples of one prompt differ


def test_a_row_draws_by_its_number(models):
    how = dict(temperature=1.0, seed=5)
    prompts = prompts_of(5)
    all_of_them = run(models, prompts=prompts, **how)
    some = run(models, prompts=[prompts[4], prompts[1]], numbers=[4, 1], **how)
    assert some == [all_of_them[4], all_of_them[1]]
    same = run(models, prompts=[prompts[0]] * 2, numbers=[7, 7], **how)
    assert same[0] == same[1]
    for bad in ([0], [0, -1], [0, 2**32]):
        with pytest.raises(UserError, match=r"expected one whole number from 0 .* a prompt"):
            run(models, prompts=prompts[:2], numbers=bad)


@pytest.mark.slow
def test_several_new_ids_at_once_are_one_after_another(models):
    """Each row at its own position; what lay behind it in the cache is forgotten."""
    model = opened(f"{models}/teacher.gguf@dense:float32")
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 300, (2, 16)), jnp.int32)
    lengths = jnp.asarray([9, 5], jnp.int32)
    whole = model.logits(tokens)
    head = model.functions.head(model.params)[: model.real_vocab]
    _, cache = model.functions.prefill(model.params, tokens, jnp.asarray([12, 12], jnp.int32), 24)
    new = jnp.stack([row[n : n + 4] for row, n in zip(tokens, lengths, strict=True)])
    hidden, cache = model.functions.extend(model.params, new, lengths, cache)
    logits = np.asarray(hidden @ head.T)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(logits[row], whole[row, n : n + 4], atol=1e-4)
    one = jnp.stack([row[n + 4 : n + 5] for row, n in zip(tokens, lengths, strict=True)])
    hidden, _ = model.functions.extend(model.params, one, lengths + 4, cache)
    logits = np.asarray(hidden @ head.T)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(logits[row, 0], whole[row, n + 4], atol=1e-4)


@pytest.mark.slow
def test_a_row_depends_on_neither_slot_nor_device(models):
    """More prompts than slots, of answers of other lengths, on one device and on two."""
    path = f"{models}/teacher.gguf"
    two = load(path, dtype="float32", devices=jax.devices()[:2])
    prompts, how = prompts_of(7), dict(max_tokens=20, stop_ids=())
    limits = [3, 20, 1, 9, 17, 8, 12]
    for drawn in (dict(temperature=1.0, seed=5), {}):
        want = run(models, prompts=prompts, batch_size=7, **drawn)
        for slots in (2, 4):
            got = two.generate(prompts, **how, **drawn, limits=limits, batch_size=slots)
            assert [c.ids for c in got] == [c.ids[:n] for c, n in zip(want, limits, strict=True)]
            assert {c.reason for c in got} == {"length"}


@pytest.mark.slow
def test_the_last_rows_move_together(models, monkeypatch):
    """On each of two devices, when one of four slots would do."""
    monkeypatch.setattr(decoding, "_LEAST", 1)
    two = load(f"{models}/teacher.gguf", dtype="float32", devices=jax.devices()[:2])
    prompts, limits = prompts_of(8), [2, 3, 1, 30, 5, 4, 28, 2]
    how = dict(temperature=1.0, max_tokens=30, stop_ids=())
    packed = mock.Mock(side_effect=decoding._pack)
    monkeypatch.setattr(decoding, "_pack", packed)
    got = two.generate(prompts, **how, limits=limits, batch_size=8)
    assert packed.call_count == 1
    want = run(models, prompts=prompts, batch_size=4, **how)
    assert [c.ids for c in got] == [c.ids[:n] for c, n in zip(want, limits, strict=True)]


@pytest.mark.slow
def test_prompts_far_longer_than_the_others_have_a_cache_of_their_own(models, monkeypatch):
    opening = mock.Mock(side_effect=decoding._open)
    monkeypatch.setattr(decoding, "_open", opening)
    short, long = prompts_of(40), [7] * 400
    prompts, seen = [*short[:5], long, *short[5:]], []
    how = dict(temperature=1.0, seed=3, stop_ids=())
    got = run(
        models,
        prompts=prompts,
        batch_size=48,
        **how,
        on_text=lambda number, _: seen.append(number),
    )
    caches = [(call.kwargs["slots"], call.kwargs["capacity"]) for call in opening.call_args_list]
    assert caches == [(48, 128), (32, 512)]
    assert set(seen[:-1]) >= {0, 40} and seen[-1] == 5 and len(set(seen)) == 41
    alone = run(models, prompts=prompts[4:7], batch_size=3, **how, numbers=[4, 5, 6])
    assert [c.ids for c in got[4:7]] == [c.ids for c in alone]
    # Two of 32, but not two of 31; none beyond twice the room of the next; nor where all have more.
    most = [30] * 29 + [90] * 2 + [400]
    assert decoding.set_apart([*most[:-1], 300, 400], 20) == ([*range(31)], [31, 32])
    assert decoding.set_apart(most[2:], 20) == ([*range(29)], [29])
    assert decoding.set_apart([30, 300, 30, 281, 280], 20, room=300) == ([0, 2, 4], [1, 3])
    assert decoding.set_apart([30] * 14 + [400], 20) == ([*range(15)], [])
    assert decoding.set_apart([], 20) == ([], [])


def test_a_free_slot_takes_the_next_prompt(models):
    """In the prompts' order: the long first row holds its slot, the others share the second."""
    seen = []
    run(
        models,
        prompts=prompts_of(5),
        batch_size=2,
        max_tokens=40,
        limits=[40, 8, 8, 8, 8],
        on_text=lambda number, _: seen.append(number),
    )
    first = list(dict.fromkeys(seen))
    assert first == [0, 1, 2, 3, 4]
    assert seen.index(4) < len(seen) - 1 - seen[::-1].index(0)  # before the first has ended
    assert seen.count(0) == 5 and seen.count(1) == 1
    with pytest.raises(UserError, match="expected one whole number from 1 to 20 a prompt"):
        run(models, limits=[1, 2, 3, 21])


def test_each_program_is_compiled_once(models):
    """Whether the slots are fresh or a call made them."""
    model = load(f"{models}/teacher.gguf", dtype="float32")
    decoding._fill.clear_cache()  # other tests of this process may have compiled the same
    model.generate([[i, 5] for i in range(3)], max_tokens=4, batch_size=1, stop_ids=())
    assert decoding._fill._cache_size() == 1


@pytest.mark.slow
def test_calls_of_one_room_share_their_programs(models):
    model = load(f"{models}/teacher.gguf", dtype="float32")
    fixed = dict(real=model.real_vocab, spread=model.spread, batch_size=3)
    sampling, long = Sampling(max_tokens=4), [7] * 140
    decoding._advance_on_cpu.clear_cache()  # other tests of this process may have compiled the same
    (short,) = complete(model.functions, model.params, [[1, 5]], sampling, room=200, **fixed)
    complete(model.functions, model.params, [long], sampling, room=200, **fixed)
    assert decoding._advance_on_cpu._cache_size() == 1
    (alone,) = complete(model.functions, model.params, [[1, 5]], sampling, **fixed)
    assert decoding._advance_on_cpu._cache_size() == 2 and alone.ids == short.ids


def test_prompts_are_read_at_few_lengths():
    """Never more than half as many positions again, from 64 on; and no more than the cache has."""
    padded = [decoding.pad_length(n) for n in range(1, 4097)]
    assert sorted({*padded}) == [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert all(n <= m and (m < 1.5 * n or m <= 128) for n, m in enumerate(padded, 1))
    assert [decoding.pad_length(*asked) for asked in ((600, 608), (600, 1000))] == [640, 768]


@pytest.mark.slow
def test_few_programs_read_prompts_of_many_lengths(models, monkeypatch):
    """The longest first: of the last a call may have few. More of them write the same answers."""
    model = load(f"{models}/teacher.gguf", dtype="float32")
    rng, lengths = np.random.default_rng(4), (330, 70, 530, 390, 130, 450, 140, 270, 100)
    prompts = [rng.integers(0, 300, n).tolist() for n in lengths]

    def answer():
        decoding._fill.clear_cache()  # other tests of this process may have compiled the same
        filled = mock.Mock(side_effect=decoding._fill)
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "_fill", filled)
            found = model.generate(prompts, max_tokens=12, stop_ids=(), batch_size=8)
        read = [call.args[3].tokens.shape[1] for call in filled.call_args_list]
        return [one.ids for one in found], read, decoding._fill._cache_size()

    ids, read, compiled = answer()
    assert read == [640, 512, 512, 384, 384, 192, 192, 128, 128] and compiled == 5
    monkeypatch.setattr(decoding, "pad_length", lambda longest, room=None: -(-longest // 64) * 64)
    others, read, compiled = answer()
    assert ids == others and compiled == len({*read}) == 7


@pytest.mark.slow
def test_another_seed_draws_others(models):
    one, other = (run(models, temperature=1.0, top_p=0.9, seed=seed) for seed in (5, 6))
    assert [c.ids for c in one] != [c.ids for c in other]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3, 4]),
        (2, 1.0, [0, 1]),
        (0, 0.55, [0, 1]),
        (0, 0.4, [0]),
        (3, 0.8, [0, 1]),
        (0, 0.94, [0, 1, 2, 3]),
        (1, 0.01, [0]),
        (9, 1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_k_and_top_p_keep_the_right_ids(top_k, top_p, kept):
    p = np.asarray([0.45, 0.25, 0.15, 0.1, 0.05], np.float32)
    order = np.asarray([3, 0, 4, 1, 2])  # rank -> id
    logits = np.zeros(5, np.float32)
    logits[order] = np.log(p)
    rows = 4000
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(rows))
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
    draw = jax.jit(functools.partial(pick, sampling=sampling))
    ids, log_probs = draw(jnp.broadcast_to(jnp.asarray(logits)[None], (rows, 5)), keys)
    share = np.bincount(np.asarray(ids), minlength=5)[order] / rows
    want = np.where(np.isin(np.arange(5), kept), p, 0)
    np.testing.assert_allclose(share, want / want.sum(), atol=0.03)
    assert np.all(share[want == 0] == 0)
    np.testing.assert_allclose(np.exp(log_probs), p[np.argsort(order)][np.asarray(ids)], rtol=1e-5)


@pytest.mark.parametrize("by_weight", [False, True])
@pytest.mark.parametrize(
    "how", cases(dict(temperature=1.0), slow=[dict(temperature=0.7, top_p=0.9, top_k=90)])
)
def test_ids_are_drawn_with_their_probabilities(how, by_weight):
    """Chi-square against float64; more ids than blocks, and no multiple of their number."""
    rng, rows, ids = np.random.default_rng(11), 30_000, 301
    logits = rng.normal(0, 1.5, ids).astype(np.float32)
    p = np.exp((logits.astype(float) - logits.max()) / how["temperature"])
    kept = np.argsort(-p)[: how.get("top_k", ids)]
    before = np.cumsum(p[kept]) / p[kept].sum() - p[kept] / p[kept].sum()
    kept = kept[before < how.get("top_p", 1.0)]
    want = p[kept] / p[kept].sum()
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(2), i))(jnp.arange(rows))
    if by_weight:
        weights = np.zeros(ids)
        weights[kept] = 3.0 * want
        same = jnp.broadcast_to(jnp.asarray(weights, jnp.float32), (rows, ids))
        drawn = jax.jit(decoding.draw_by_weight)(same, keys)
    else:
        draw = jax.jit(functools.partial(pick, sampling=Sampling(**how)))
        drawn, _ = draw(jnp.broadcast_to(jnp.asarray(logits)[None], (rows, ids)), keys)
    counts = np.bincount(np.asarray(drawn), minlength=ids)
    assert counts[kept].sum() == rows
    assert scipy.stats.chisquare(counts[kept], want * rows).pvalue > 1e-3


@pytest.mark.parametrize(
    "how", cases(dict(temperature=0.7, top_p=0.9), slow=[{}, dict(temperature=1.0)])
)
def test_the_kernel_draws_what_is_defined(how):
    rng = np.random.default_rng(12)
    logits = jnp.asarray(rng.normal(0, 2, (6, 5000)), jnp.float32).at[:, 4990:].set(100.0)
    keys = jax.random.split(jax.random.key(3), 6)
    want = pick(logits, keys, Sampling(**how), 4990)
    run = functools.partial(softmax.sum_blocks, interpret=jax.default_backend() != "gpu")
    with mock.patch.object(softmax, "sum_blocks", run):
        got = pick(logits, keys, Sampling(**how), 4990, kernel=True)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    assert np.all(np.asarray(got[0]) < 4990)


def test_unlikely_ids_keep_their_own_probabilities():
    """Ids of 2e-9 each: 24 bits for all would give some of them 6e-8 and the others nothing."""
    logits = jnp.full((1, 2048), -20.0).at[0, 5].set(0.0)
    uniform = jnp.linspace(0, 1, 4096, endpoint=False, dtype=jnp.float32)
    block = jnp.exp(jnp.broadcast_to(logits[:, 16:32], (4096, 16)))
    counts = np.bincount(np.asarray(decoding._invert(block, uniform)), minlength=16)
    np.testing.assert_allclose(counts, 256, atol=1)


def test_no_weight_no_draw():
    """Every set of places among 8 of equal weight, at numbers from 0 to the last below 1."""
    sets = (np.arange(1, 256)[:, None] >> np.arange(8)) & 1
    for uniform in (0.0, 2**-24, 0.25, 0.4999, 0.5, 0.75, 1 - 2**-24):
        got = decoding._invert(
            jnp.asarray(sets, jnp.float32), jnp.full((len(sets),), uniform, jnp.float32)
        )
        for places, place in zip(sets, np.asarray(got), strict=True):
            taken = np.flatnonzero(places)
            assert place == taken[int(uniform * len(taken))]


@pytest.mark.slow
def test_temperature_sharpens():
    logits = jnp.broadcast_to(jnp.asarray([[1.0, 0.0]]), (4000, 2))
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(1), i))(jnp.arange(4000))
    for temperature in (0.5, 2.0):
        ids, _ = pick(logits, keys, Sampling(temperature=temperature))
        want = 1 / (1 + np.exp(-1 / temperature))
        assert np.mean(np.asarray(ids) == 0) == pytest.approx(want, abs=0.03)


def test_stop_ids_end_a_row_and_are_left_out(models):
    free = run(models)[0]
    stop = free.ids[7]
    first = free.ids.index(stop)
    stopped = run(models, stop_ids=(stop,))[0]
    assert stopped.ids == free.ids[:first] and stopped.reason == "stop"
    assert len(stopped.log_probs) == first
    at_once = run(models, stop_ids=(free.ids[0],))[0]
    assert at_once[:4] == ([], "", "stop", [])


def test_stop_strings_are_cut_off_even_inside_a_token(models):
    tokenizer = opened(f"{models}/teacher.gguf@dense:float32").tokenizer
    free = run(models)[1]
    stop = free.text[6:9]
    end = free.text.index(stop)
    stopped = run(models, stop_strings=("never", stop))[1]
    assert stopped.text == free.text[:end] and stopped.reason == "stop"
    assert tokenizer.decode(stopped.ids).startswith(stopped.text)
    assert len(tokenizer.decode(stopped.ids[:-1])) < end


@pytest.mark.parametrize(
    "count", [1, 17, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 33))]
)
def test_exactly_so_many_tokens(models, count):
    got = run(models, max_tokens=count)
    assert [len(c.ids) for c in got] == [count] * 4
    assert got[0].ids == run(models, max_tokens=40)[0].ids[:count]


def test_text_streams_as_it_grows(models, capsys):
    seen = []
    got = run(
        models,
        prompts=prompts_of(1),
        batch_size=1,
        max_tokens=40,
        on_text=lambda number, text: seen.append((number, text)),
    )
    texts = [text for number, text in seen if number == 0]
    assert len(texts) == 5 and texts[-1] == got[0].text  # 8, 16, 24, 32, 40 tokens
    pairs = itertools.pairwise(texts)
    assert all(b.startswith(a.rstrip("�")) for a, b in pairs)
    stream = Stream()
    for text in ("a", "a�", "aé", "aéb"):
        stream(0, text)
    assert capsys.readouterr().out == "aéb"
    stream = Stream(["bcd", "x"])  # no stop string is shown that goes on in the next call
    for text in ("ab", "abc"):
        stream(0, text)
    assert capsys.readouterr().out == "a"
    stream(0, "abcab")
    assert capsys.readouterr().out == "bca"
    stream(0, "abcab", ended=True)
    assert capsys.readouterr().out == "b"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(max_tokens=0), "max_tokens=0: must be 1 or more"),
        (dict(temperature=-1.0), "temperature=-1.0: must be 0 or more"),
        (dict(temperature=float("inf")), "temperature=inf: must be 0 or more, and finite"),
        (dict(top_p=0.0), "top_p=0.0: must be above 0"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(stop_strings=("",)), "no empty text"),
        (dict(prompts=[[1], []]), r"prompt 1 is empty"),
        (dict(prompts=[[1, -1]]), r"prompt 0 holds the id -1; expected .* 0 to 304"),
        (dict(prompts=[[1], [10**6]]), r"prompt 1 holds the id 1000000"),
        (dict(max_tokens=40_000), r"prompt 0 has .* more than the model's 32768 positions"),
    ],
)
def test_what_cannot_be_generated(models, how, message):
    with pytest.raises(UserError, match=message):
        run(models, **how)


def test_a_model_without_a_decoder_is_refused():
    with pytest.raises(UserError, match=r"next id.*no decoder to generate with"):
        next_id_teacher(320).generate([[1]])


def test_text_in_and_text_out(models):
    """A prompt as text is its ids; one prompt alone; the tokenizer's ends are the stops."""
    model = opened(f"{models}/teacher.gguf@dense:float32")
    tokenizer = model.tokenizer
    (one,) = model.generate("def f(", max_tokens=5)
    ends = tuple(sorted({tokenizer.end_of_text_id, tokenizer.eos_id}))
    ids = tokenizer.encode("def f(")
    assert [one] == model.generate([ids], Sampling(max_tokens=5, stop_ids=ends))
    assert tokenizer.decode(one.ids) == one.text
    bare = model.replace(checkpoint=None)
    (untold,) = bare.generate([ids], max_tokens=5)
    assert untold.text == "" and len(untold.ids) == 5
    with pytest.raises(UserError, match="no tokenizer for 'def f"):
        bare.generate("def f(")


def test_a_prompt_is_read_by_the_attention_that_is_sooner_done(models, monkeypatch):
    """On a GPU: a short one by XLA's, a long one by cuDNN's, as one segment however many rows have
    in training."""
    model, seen = opened(f"{models}/teacher.gguf@dense:float32"), []

    def attend(q, k, v, segment_ids, *, implementation, max_segments, **_):
        seen.append((q.shape[1], implementation, max_segments))
        return q

    monkeypatch.setattr(decoder, "attend", attend)
    monkeypatch.setattr(decoder.Decoder, "_attention", lambda self, dtype: "cudnn")
    compute = dataclasses.replace(model.functions.compute, max_segments=32)
    functions, _ = decoder.functional(model.spec, compute)
    for length in (128, 192, 256):
        tokens = jnp.zeros((2, length), jnp.int32)
        read = functools.partial(functions.prefill, capacity=length)
        jax.eval_shape(read, model.params, tokens, tokens[:, 0] + 1)
        jax.eval_shape(functions.hidden, model.params, tokens, tokens, tokens)
    packed = "cudnn", 32
    short, long = (128, "xla", 1), (256, "cudnn", 1)
    assert seen == [short, (128, *packed), (192, *short[1:]), (192, *packed), long, (256, *packed)]


def test_a_device_without_room_ends_the_command_in_one_line(models, monkeypatch, capsys):
    monkeypatch.setattr(Target, "load", lambda *_: jnp.zeros(1 << 50).block_until_ready())
    assert command.main([f"{models}/student.gguf", "--prompt=def f("]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the device's memory: ") and said.count("\n") == 1
    assert "shorter ones (--max-tokens" in said and "(@packed)" in said


def test_the_command(models, monkeypatch, capsys):
    monkeypatch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())
    arguments = [f"{models}/teacher.gguf@packed:float32", "--prompt=def f(", "--max-tokens=9"]
    assert command.main(arguments) == 0
    tokenizer = opened(f"{models}/teacher.gguf@packed:float32").tokenizer
    ends = (tokenizer.end_of_text_id, tokenizer.eos_id)
    prompt = tokenizer.encode("def f(")
    form = "teacher.gguf@packed:float32"
    want = run(models, form, [prompt], batch_size=1, max_tokens=9, stop_ids=ends)
    assert capsys.readouterr().out == want[0].text.rstrip("�") + "\n"
    draft = [f"--draft={models}/student.gguf@dense:float32", "--draft-tokens=3"]
    assert command.main([*arguments, *draft]) == 0
    said = capsys.readouterr()
    assert said.out == want[0].text.rstrip("�") + "\n" and "accepted a pass" in said.err
    for prompt, message in (("x", "more than the model's 32768"), ("", "prompt 0 is empty")):
        long = f"--max-tokens={32768 if prompt else 1}"
        assert command.main([arguments[0], f"--prompt={prompt}", long]) == 2
        assert message in capsys.readouterr().err
    assert command.main([str(STUDENT), "--prompt=x", "--chat"]) == 2
    assert f"--chat: {STUDENT} has no chat template. Leave --chat" in capsys.readouterr().err
    assert command.main([*arguments, f"--tokenizer={TEACHER}"]) == 2
    assert "expected one vocabulary" in capsys.readouterr().err
    assert command.main([arguments[0], "--prompt=x", "--top-p=2"]) == 2
    assert "top_p=2.0: must be" in capsys.readouterr().err
    for flags, found in (
        (draft[1:], "=3 needs --draft"),
        ([draft[0], "--draft-tokens=0"], "=0 must"),
    ):
        assert command.main([*arguments, *flags]) == 2
        assert f"error: --draft-tokens{found}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "spoilt", "number"),
    [
        ("packed", "blk.1.ffn_up.weight", np.nan),
        ("packed:float32", "token_embd.weight", np.inf),
        ("packed", "blk.0.attn_norm.weight", -np.inf),
        ("dense", "blk.1.ffn_down.weight", np.nan),
        ("float8", "blk.0.attn_q.weight", np.nan),
    ],
)
def test_a_model_of_odd_numbers_writes_nothing(
    form, spoilt, number, models, tmp_path, monkeypatch, capsys
):
    """It wrote exclamation marks, the token of id 0, and ended well."""
    monkeypatch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())
    monkeypatch.setattr(decoding, "write_answers", lambda *_, **_s: pytest.fail("wrote"))
    odd = write_odd(models / "teacher.gguf", tmp_path / "odd.gguf", spoilt, number)
    (tmp_path / "q.jsonl").write_text('{"text": "def f(x):"}\n')
    prompts = [f"--prompts={tmp_path}/q.jsonl", f"--out={tmp_path}/new/a.jsonl", "--max-tokens=4"]
    for main, model, *flags in (
        (command.main, f"{odd}@{form}", "--prompt=x"),
        (command.main, f"{models}/teacher.gguf", "--prompt=x", f"--draft={odd}@{form}"),
        (answers.main, f"{odd}@{form}", *prompts),
    ):
        assert main([model, *flags]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: odd.gguf: found ")
        assert f" in {spoilt} that are not finite; expected none" in last
    assert not (tmp_path / "new").exists()


def test_processes_agree_on_whether_the_layers_fit_a_second_time(models, monkeypatch):
    """Each asks its own host; with two answers they would run two programs."""
    model = opened(f"{models}/teacher.gguf@dense:float32")
    mesh = mock.Mock(is_multi_process=True, shape={"fsdp": 1}, local_devices=jax.devices())
    spread = mock.Mock(spec=Spread)
    spread.placement = mock.Mock(mesh=mesh)
    for others, agreed in ((True, True), (False, False)):
        gather = mock.Mock(side_effect=lambda mine, others=others: np.asarray([mine, others]))
        monkeypatch.setattr(decode_weights.multihost_utils, "process_allgather", gather)
        assert decode_weights._has_room(model.functions, spread, 4) == agreed


@pytest.mark.parametrize("flags", ["", "--xla_gpu_enable_triton_gemm=false", "flags.txt"])
def test_writing_turns_triton_on_unless_the_user_says(flags, monkeypatch):
    """The flag that kdjax adds for all other programs is no word of the user's."""
    environ = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    monkeypatch.setattr(decoding, "says_products", lambda: runtime.says_products(environ))
    monkeypatch.setattr(runtime, "_added", set())
    wanted = decoding._advance if flags else decoding._advance_on_gpu
    assert decoding._choose_call("gpu") is wanted
    assert decoding._choose_call("cpu") is decoding._advance_on_cpu
