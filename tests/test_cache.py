"""The cached teacher: its loss, its shards, and training from them."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_tiny_config
from scipy.special import log_softmax, logsumexp
from test_run import Recorder, go

from kdjax import teacher_cache
from kdjax.cache_teacher import cache_teacher
from kdjax.data import pipeline
from kdjax.errors import UserError
from kdjax.head import HeadSpec, head_evaluation, head_loss
from kdjax.head_cached import (
    TopTeacher,
    cached_head_evaluation,
    cached_head_loss,
    join_ids,
    split_ids,
    top_k,
    top_of_teacher,
)
from kdjax.job import assemble

REPOSITORY = Path(__file__).parent.parent
WIDTH, REAL = 50, 47


# ---- the loss


@functools.cache
def hidden_states():
    """Student's and teacher's hidden states and heads, labels, weights: 2 rows of 7."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 1, shape), jnp.float32)  # noqa: E731
    labels = jnp.asarray(rng.integers(0, REAL, (2, 7)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, (2, 7)), jnp.float32)
    return draw(2, 7, 8), draw(WIDTH, 8), draw(2, 7, 12), draw(WIDTH, 12), labels, weights


def spec_of(temperature=2.0, alpha=0.3):
    return HeadSpec(temperature, alpha, WIDTH, REAL, chunk_tokens=6)


@functools.cache
def top(spec, k):
    _, _, hidden, head, labels, weights = hidden_states()
    return jax.jit(lambda: top_of_teacher(hidden, head, labels, weights, spec, k))()


def gradients(loss):
    """Sums, and the gradients of `loss(hidden, head).loss`."""
    h, w = hidden_states()[:2]
    both = jax.jit(
        jax.value_and_grad(lambda h, w: (lambda s: (s.loss, s))(loss(h, w)), (0, 1), has_aux=True)
    )
    (_, sums), grads = both(h, w)
    return sums, grads


def from_cache(spec, k):
    *_, labels, weights = hidden_states()
    cached = top(spec, k)
    return gradients(lambda h, w: cached_head_loss(h, w, cached, labels, weights, spec))


@pytest.mark.parametrize(("temperature", "alpha"), [(1.0, 0.0), (2.0, 0.3), (4.0, 1.0)])
def test_all_ids_cached_is_the_full_loss(temperature, alpha):
    """Up to float16 logits: 2e-6 of the loss and 1e-5 of the gradient seen."""
    spec = spec_of(temperature, alpha)
    *_, h_t, w_t, labels, weights = hidden_states()
    want = gradients(lambda h, w: head_loss(h, w, h_t, w_t, labels, weights, spec))
    got = from_cache(spec, REAL)
    np.testing.assert_allclose(got[0], want[0], rtol=5e-5)
    for a, b in zip(got[1], want[1], strict=True):
        assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(b)


def merged(log_p, ids):
    """float64 log-probabilities of the ids and of all others together."""
    inside = np.take_along_axis(log_p, ids, -1)
    rest = log_p.copy()
    np.put_along_axis(rest, ids, -np.inf, -1)
    return np.concatenate([inside, logsumexp(rest, axis=-1, keepdims=True)], -1)


def oracle(spec, k, student):
    """Loss, CE, KL in float64 of student logits, the teacher's outcomes merged here."""
    _, _, h_t, w_t, labels, weights = (np.asarray(x, np.float64) for x in hidden_states())
    t = (h_t @ w_t.T)[..., :REAL]
    ids = np.argsort(-t, -1, kind="stable")[..., :k]
    q, p = (merged(log_softmax(x / spec.temperature, -1), ids) for x in (t, student))
    kl = (np.exp(q) * (q - p)).sum(-1)
    ce = -np.take_along_axis(log_softmax(student, -1), labels[..., None].astype(int), -1)[..., 0]
    loss = spec.alpha * ce + (1 - spec.alpha) * spec.temperature**2 * kl
    return [(weights * x).sum() for x in (loss, ce, kl)]


@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize(("temperature", "alpha"), [(1.0, 0.0), (2.0, 0.3)])
def test_fewer_ids_are_the_merged_outcomes_in_float64(k, temperature, alpha):
    spec = spec_of(temperature, alpha)
    h, w = (np.asarray(x, np.float64) for x in hidden_states()[:2])
    got, _ = from_cache(spec, k)
    np.testing.assert_allclose(got, oracle(spec, k, (h @ w.T)[..., :REAL]), rtol=5e-4)
    assert float(got.kl) <= float(from_cache(spec, REAL)[0].kl) + 1e-4  # merging never adds


@pytest.mark.parametrize(("temperature", "alpha"), [(1.0, 0.0), (2.0, 0.3)])
def test_gradients_are_those_of_the_plain_formula(temperature, alpha):
    spec, k = spec_of(temperature, alpha), 5
    *_, labels, weights = hidden_states()
    cached = top(spec, k)
    ids = join_ids(cached.ids)

    def plain(h, w):
        s = (h @ w.T)[..., :REAL]
        inside = jax.nn.log_softmax(cached.logits.astype(jnp.float32) / temperature)
        tail = jax.nn.sigmoid(cached.odds[..., :1])
        q = jnp.concatenate([jnp.exp(inside) * (1 - tail), tail], -1)
        p = jax.nn.softmax(s / temperature)
        chosen = jnp.take_along_axis(p, ids, -1)
        p = jnp.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1)
        ce = -jnp.take_along_axis(jax.nn.log_softmax(s), labels[..., None], -1)[..., 0]
        kl = (q * (jnp.log(q) - jnp.log(p))).sum(-1)
        return (weights * (alpha * ce + (1 - alpha) * temperature**2 * kl)).sum()

    want = jax.jit(jax.grad(plain, (0, 1)))(*hidden_states()[:2])
    for a, b in zip(from_cache(spec, k)[1], want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def one_position(gap, odds=-7.0):
    """Two of 6 ids cached, the student's other logits `gap` below; arguments of both losses."""
    cached = TopTeacher(split_ids(jnp.asarray([[[2, 4]]], jnp.int32)), jnp.zeros((1, 1, 2), "f2"),
                        jnp.full((1, 1, 2), odds), jnp.zeros((1, 1)))  # fmt: skip
    w = jnp.where(jnp.isin(jnp.arange(6), jnp.asarray([2, 4])), gap, 0.0)[:, None]
    one = jnp.ones((1, 1))
    return (jnp.ones((1, 1, 1)), w, cached, one.astype(int), one, HeadSpec(1.0, 0.0, 6, 6, 4))


def kl_of_tails(q, p):
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


@pytest.mark.parametrize("gap", [3.0, 10.0, 200.0])
def test_the_students_tail_is_its_own_down_to_a_millionth(gap):
    """0.09 of the whole, 9e-5 (off by 2e-7), and e^-200, which is trained on as 1e-6."""
    h, w, *rest = one_position(gap)
    q, p = 1 / (1 + np.exp(7.0)), 1 / (1 + np.exp(gap) / 2)
    loss = lambda w: cached_head_loss(h, w, *rest).loss  # noqa: E731
    value, grad = jax.value_and_grad(loss)(w)
    np.testing.assert_allclose(value, kl_of_tails(q, max(p, 1e-6)), rtol=2e-4, atol=2e-6)
    inside, outside = grad[jnp.asarray([2, 4]), 0], grad[jnp.asarray([0, 1, 3, 5]), 0]
    np.testing.assert_allclose(inside, (q - p) / 2, rtol=1e-3, atol=1e-6)
    slope = p - q * min(1, p / 1e-6)
    np.testing.assert_allclose(outside, slope / 4, rtol=2e-3, atol=1e-12)
    held = cached_head_evaluation(h, w, *rest)
    np.testing.assert_allclose(held.kl_topk, kl_of_tails(q, p), rtol=2e-4)  # exact, whatever p


def test_two_models_without_a_tail_differ_by_a_millionth():
    h, w, *rest = one_position(200.0, odds=-200.0)
    value, grad = jax.value_and_grad(lambda w: cached_head_loss(h, w, *rest).loss)(w)
    assert 0 <= value < 1.2e-6 and np.all(np.abs(grad) < 1e-6)


def test_held_out_figures_of_cached_ids():
    """Cross-entropies and agreement are exact, the KLs at most the full ones."""
    spec = spec_of()
    h, w, h_t, w_t, labels, weights = hidden_states()
    full = head_evaluation(h, w, h_t, w_t, labels, weights, spec)
    got = cached_head_evaluation(h, w, top(spec, 5), labels, weights, spec)
    same = [x[0] for x in (full, got)], [x[1] for x in (full, got)], [x[4] for x in (full, got)]
    for a, b in same:
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert got.kl_topk < full.kl and got.kl_topk_temperature < full.kl_temperature
    itself = top_of_teacher(h, w, labels, weights, spec, 5)
    got = cached_head_evaluation(h, w, itself, labels, weights, spec)
    assert got.agreement == got.count == weights.sum() and got.kl_topk < 1e-5


@pytest.mark.parametrize("k", [1, 4, 30])
def test_top_k_by_groups_is_top_k(rng, k):
    """With many equal values: of these the lower ids come first."""
    x = jnp.asarray(rng.integers(0, 40, (3, 5, 1003)), jnp.float32)
    got, want = top_k(x, k), jax.lax.top_k(x, k)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def test_every_id_of_18_bits_comes_back():
    for start in range(0, 262144, 65536):
        ids = start + jnp.arange(65536, dtype=jnp.int32)
        np.testing.assert_array_equal(join_ids(split_ids(ids)), ids)


# ---- the shards


ABOUT = teacher_cache.About("topk", 4, 1.0, "a" * 64, "rows", "tokenizer", (50, 47), 6, 8,
                            "float32", "train", (7, 3))  # fmt: skip


@pytest.fixture
def small_shards(monkeypatch):
    """Four rows of `ABOUT` a shard."""
    monkeypatch.setattr(teacher_cache, "SHARD_BYTES", 4 * ABOUT.record.itemsize)


def records(rows):
    out = np.zeros(len(rows), ABOUT.record)
    for i, row in enumerate(rows):
        rng = np.random.default_rng(row)
        out[i] = np.frombuffer(rng.bytes(ABOUT.record.itemsize), ABOUT.record)[0]
    return out


def produce(rows):
    for start in range(rows.start, rows.stop, 3):
        yield records(range(start, min(start + 3, rows.stop)))


def same_bytes(columns, row):
    want = records(range(row, row + 1))[0]
    assert list(columns) == ["teacher_ids", "teacher_logits", "teacher_odds", "teacher_label"]
    for name, value in zip(want.dtype.names, columns.values(), strict=True):
        assert value.tobytes() == want[name].tobytes()


def test_rows_come_back_as_they_were_written(tmp_path, small_shards):
    teacher_cache.write(tmp_path, ABOUT, produce)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "index.json", "shard-00000.bin", "shard-00001.bin", "shard-00002.bin",
    ]  # fmt: skip
    cache = teacher_cache.open_cache(tmp_path, ABOUT)
    for row in range(7):
        same_bytes(cache.train[row], row)
    for row in range(3):
        same_bytes(cache.heldout[row], 7 + row)


def test_a_stopped_writer_continues_and_mends_what_is_damaged(tmp_path, small_shards):
    calls = []

    def stopped(rows):
        calls.append(rows.start)
        if len(calls) == 3:
            yield records(rows)[:1]
            raise KeyboardInterrupt
        yield from produce(rows)

    with pytest.raises(KeyboardInterrupt):
        teacher_cache.write(tmp_path, ABOUT, stopped)
    with pytest.raises(UserError, match="found 2 of 3 shards; expected a complete cache"):
        teacher_cache.open_cache(tmp_path, ABOUT)
    data = bytearray((tmp_path / "shard-00000.bin").read_bytes())
    data[10] ^= 1
    (tmp_path / "shard-00000.bin").write_bytes(data)
    calls.clear()

    def counted(rows):
        calls.append(rows.start)
        return produce(rows)

    teacher_cache.write(tmp_path, ABOUT, counted)
    assert calls == [0, 8]  # the altered one and the missing one
    calls.clear()
    teacher_cache.write(tmp_path, ABOUT, counted)
    assert calls == []
    same_bytes(teacher_cache.open_cache(tmp_path, ABOUT).train[1], 1)


SLOW_WRITER = """
import dataclasses, sys, time
import numpy as np
from pathlib import Path
from kdjax import teacher_cache
about = teacher_cache.About(**eval(sys.argv[2]))
teacher_cache.SHARD_BYTES = 4 * about.record.itemsize
def produce(rows):
    time.sleep(60 if rows.start == 8 else 0)
    yield np.zeros(len(rows), about.record)
teacher_cache.write(Path(sys.argv[1]), about, produce)
"""


def test_a_killed_writer_leaves_whole_shards_and_is_continued(tmp_path, small_shards):
    about = dataclasses.asdict(ABOUT)
    command = [sys.executable, "-c", SLOW_WRITER, str(tmp_path), str(about)]
    child = subprocess.Popen(command, cwd=REPOSITORY)
    index = tmp_path / "index.json"
    try:
        while not (index.exists() and len(json.loads(index.read_text())["shards"]) == 2):
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        child.kill()  # SIGKILL, inside the third shard
        child.wait()
    starts = []

    def rest(rows):
        starts.append(rows.start)
        return produce(rows)

    teacher_cache.write(tmp_path, ABOUT, rest)
    assert starts == [8]
    same_bytes(teacher_cache.open_cache(tmp_path, ABOUT).heldout[2], 9)


@pytest.mark.parametrize("how", ["altered", "truncated", "missing"])
def test_a_shard_that_is_not_as_written_is_refused(tmp_path, small_shards, how):
    teacher_cache.write(tmp_path, ABOUT, produce)
    path = tmp_path / "shard-00001.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if how == "truncated" else data)
    says = {"altered": "SHA-256", "truncated": "bytes, expected", "missing": "is missing"}
    with pytest.raises(UserError, match=rf"shard-00001.bin .*{says[how]}"):
        teacher_cache.open_cache(tmp_path, ABOUT)


@pytest.mark.parametrize(
    ("field", "value"),
    [("teacher", "b" * 64), ("compute", "fp8"), ("rows", "other"), ("tokenizer", "other"),
     ("temperature", 2.0), ("vocabulary", (50, 46)), ("sides", (6, 4))],
)  # fmt: skip
def test_a_cache_of_something_else_is_refused_with_both_values(tmp_path, field, value):
    teacher_cache.write(tmp_path, ABOUT, produce)
    other = dataclasses.replace(ABOUT, **{field: value})
    mine = re.escape(str(getattr(ABOUT, field)))
    with pytest.raises(UserError, match=rf"{field}: the cache has {mine}, this run "):
        teacher_cache.open_cache(tmp_path, other)
    with pytest.raises(UserError, match=rf"holds another cache:\n  {field}: the cache has"):
        teacher_cache.write(tmp_path, other, produce)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    free = 10 * ABOUT.record.itemsize
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr(teacher_cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"expected 0\.00 GB and 1% to spare"):
        teacher_cache.write(tmp_path, ABOUT, produce)
    assert not list(tmp_path.iterdir())


# ---- training from it


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A config, and its live teacher's curve."""
    folder = tmp_path_factory.mktemp("cached")
    config = make_tiny_config(models, folder)
    config.train.steps, config.eval.every, config.checkpoint.every = 4, 2, 0
    config.optim.warmup_steps = 1
    return config, folder, curve(config, folder / "live")


def curve(config, workdir):
    recorder = Recorder()
    assert go(config, workdir, recorder) == "finished"
    return recorder.curve()


def with_cache(config, folder, **changes):
    for name, value in {"teacher__cache": str(folder), **changes}.items():
        section, field = name.split("__")
        part = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def make(run, kind, k=0):
    config, folder, _ = run
    out = folder / f"{kind}{k}"
    if not out.exists():
        cache_teacher(config, out, kind, k)
    return out


def test_hidden_states_train_as_the_teacher_itself_bit_for_bit(run):
    config, folder, live = run
    assert curve(with_cache(config, make(run, "hidden")), folder / "from-hidden") == live


def test_all_ids_train_as_the_teacher_itself(run):
    config, folder, live = run
    got = curve(with_cache(config, make(run, "topk", 305)), folder / "from-topk")
    assert [call[:2] for call in got] == [call[:2] for call in live]
    for (_, _, a), (_, _, b) in zip(got, live, strict=True):
        a = {name.replace("kl_topk", "kl"): value for name, value in a.items()}
        assert a.keys() == b.keys()
        np.testing.assert_allclose([a[k] for k in b], list(b.values()), rtol=2e-4)
    assert "kl_topk" in got[0][2] and "kl" not in got[0][2]  # named for what it is


@pytest.mark.parametrize("kind", ["topk", "hidden"])
def test_the_teacher_is_not_loaded(run, tmp_path, kind):
    """The compiled step's arguments: the state and the batch; of hidden states also the head."""
    config = with_cache(run[0], make(run, kind, 8 if kind == "topk" else 0))
    job = assemble(config, tmp_path)
    head = 0 if kind == "topk" else 320 * 256 * 2
    assert sum(x.nbytes for x in jax.tree.leaves(job.teacher.params)) == head
    batch = job.put(next(job.train_batches(None)))
    state = job.fresh_state()
    arguments = jax.tree.leaves((state, batch))
    compiled = job.train_step.lower(state, job.teacher.params, batch).compile()
    local = sum(x.addressable_shards[0].data.nbytes for x in arguments)
    assert compiled.memory_analysis().argument_size_in_bytes <= local + head + 1024


@pytest.mark.parametrize(
    "changes", [dict(train__microbatches=2), dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=2)]
)
def test_microbatches_and_meshes_change_nothing(run, tmp_path, changes):
    config = with_cache(run[0], make(run, "topk", 8), mesh__data=8, train__batch_size=16)
    want = curve(config, tmp_path / "one")
    if "mesh__data" not in changes:
        changes = changes | {"mesh__data": 8}
    got = curve(with_cache(config, config.teacher.cache, **changes), tmp_path / "other")
    for (_, _, a), (_, _, b) in zip(got, want, strict=True):
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [(dict(loss__temperature=2.0), "temperature: the cache has 4.0, this run 2.0"),
     (dict(data__heldout_fraction=0.3), "rows: the cache has"),
     (dict(loss__divergence="jsd"), "only loss.divergence=forward_kl")],
)  # fmt: skip
def test_a_changed_run_is_refused(run, tmp_path, changes, says):
    config = with_cache(run[0], make(run, "topk", 8), **changes)
    with pytest.raises(UserError, match=says):
        assemble(config, tmp_path)


def test_another_teacher_is_refused(run, tmp_path):
    config = with_cache(run[0], make(run, "topk", 8))
    other = tmp_path / "teacher.gguf"
    data = bytearray(Path(config.teacher.path).read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    config.teacher.path = str(other)
    with pytest.raises(UserError, match=r"teacher: the cache has [0-9a-f]{64}, this run "):
        assemble(config, tmp_path)


def test_batches_carry_the_rows_own_columns(run, tmp_path):
    job = assemble(with_cache(run[0], make(run, "topk", 8)), tmp_path)
    batch, cache = next(job.train_batches(None)), job.cache
    for got, row in zip(batch["teacher_label"], batch["row_ids"], strict=True):
        np.testing.assert_array_equal(got, cache.train[int(row)]["teacher_label"])
    held = pipeline.eval_batches(job.rows.heldout, batch_size=2, limit=None, more=cache.heldout)
    got = next(held)["teacher_odds"][1]
    np.testing.assert_array_equal(got, cache.heldout[1]["teacher_odds"])
