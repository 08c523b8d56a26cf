"""Bounded proofs of contracts/*.yaml, and claims that no other file tests."""

import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from test_probe import GB10, H200
from toy_teacher import next_id_teacher

from kdjax.config import TEACHER_BACKENDS, Config
from kdjax.data import pipeline
from kdjax.data.rows import Rows
from kdjax.device import runtime, sharding
from kdjax.device.probe import Device
from kdjax.device.runtime import GIB, DeviceMemory, Devices, classify_device_memory, memory_policy
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.apr.table import AprTable, write_apr
from kdjax.formats.blocks import BLOCKS, decode, encode, row_bytes, split
from kdjax.losses.chunked import EvalSums, HeadSpec, head_loss
from kdjax.losses.kd import KDLoss, kd_logit_gradient, kd_loss
from kdjax.models.model import narrow_head
from kdjax.models.weights import Packed
from kdjax.training import plan, step
from kdjax.training.heldout import held_out_figures, step_figures
from kdjax.training.hooks import Action, Hook, StepRecord
from kdjax.training.job import teacher_backend
from kdjax.training.loop import _Delivery
from kdjax.training.pair import Sources, _refuse_degenerate
from kdjax.training.saving import Checkpoints, check_same_run
from kdjax.watch import provenance
from kdjax.watch.smoke import Verdict

# ---- device memory


def test_classification_depends_on_no_compute_capability():
    """Every capability from 0.0 to 20.0, with every answer to the three questions."""
    for cc, *flags in itertools.product(range(200 + 1), (0, 1), (0, 1), (0, 1)):
        kind = classify_device_memory([Device(*flags, *divmod(cc, 10), 80 * GIB)])
        integrated, pageable, tables = flags
        own = DeviceMemory.COHERENT if pageable and tables else DeviceMemory.DISCRETE
        assert kind is (DeviceMemory.INTEGRATED if integrated else own)


def test_precedence_of_the_environment_is_total():
    """Each of 4 values of MANAGED_MEMORY, under each of XLA's own setting, on both kinds."""
    asked, seen = (None, "", "0", "1"), 0
    for managed, unified, device in itertools.product(asked, asked, (H200, GB10)):
        environ = {runtime.MANAGED: managed, runtime.UNIFIED: unified}
        environ = {name: value for name, value in environ.items() if value is not None}
        settings_, _ = memory_policy([device], environ=environ, mem_available=100 * GIB)
        on = (unified or managed) == "1"
        assert (settings_[runtime.ALLOCATOR] == "bfc") == (on or device is GB10)
        assert (runtime.FRACTION in settings_) == (not on)
        assert settings_.get(runtime.UNIFIED) == (None if unified else managed or None)
        seen += 1
    assert seen == 4 * 4 * 2


# ---- the frozen teacher


def test_every_block_type_stays_in_its_blocks():
    """The bytes of a packed matrix are those of its file, and its numbers the decoded ones."""
    assert len(BLOCKS) == 11
    rng = np.random.default_rng(0)
    for name, block in BLOCKS.items():
        raw = rng.integers(0, 60, (4, 3 * block.nbytes), dtype=np.uint8)
        kept = Packed(split(raw, name), name, jnp.float32)
        assert sum(field.nbytes for field in kept.fields) == raw.nbytes
        np.testing.assert_array_equal(kept.decode(), decode(raw, name))
        np.testing.assert_array_equal(kept[1:3].decode(), decode(raw[1:3], name))


def test_no_gradient_reaches_the_teacher_in_either_precision():
    """In 2 precisions, neither its hidden states nor its head get a gradient other than 0."""
    rng, spec = np.random.default_rng(1), HeadSpec(KDLoss(temperature=2.0, alpha=0.3), 8, 8, 6)
    labels, weights = jnp.zeros((1, 6), jnp.int32), jnp.ones((1, 6), jnp.float32)
    shapes, kinds = ((1, 6, 4), (8, 4)), (jnp.float32, jnp.bfloat16)
    assert len(kinds) == 2
    for dtype in kinds:
        h, w, *teacher = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes * 2)

        def loss(student, teacher):
            return head_loss(*student, *teacher, labels, weights, spec).loss

        ours, theirs = jax.grad(loss, (0, 1))((h, w), teacher)
        assert all(np.any(np.asarray(g, np.float32)) for g in ours)
        assert not any(np.any(np.asarray(g, np.float32)) for g in theirs)


# ---- vocabularies


def test_the_width_after_truncation_is_the_smaller_one_or_an_error():
    """Teachers of 1 to 8 ids, cut to -1 to 9."""
    for native, wanted in itertools.product(range(1, 8 + 1), range(-1, 10)):
        teacher = next_id_teacher(native)
        if not 1 <= wanted <= native:
            with pytest.raises(UserError, match=f"{native} rows to cut to {wanted}"):
                narrow_head(teacher, wanted)
            continue
        cut = narrow_head(teacher, wanted)
        assert cut.vocab_size == cut.params["head"].shape[0] == wanted


@settings(max_examples=25, deadline=None)
@given(kept=st.integers(1, 8), seed=st.integers(0, 1000))
def test_truncation_keeps_ranks_and_probabilities_of_what_is_left(kept, seed):
    """Cut before the softmax: the ratios among the ids that stay are unchanged."""
    teacher = next_id_teacher(8)
    noise = np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32)
    teacher.params["head"] = jnp.asarray(noise)
    rows = [jnp.asarray([[seed % 8, 3]], jnp.int32)] * 3
    whole = np.asarray(teacher.logits(*rows))[..., :kept]
    cut = np.asarray(narrow_head(teacher, kept).logits(*rows))
    np.testing.assert_array_equal(np.argsort(cut, -1), np.argsort(whole, -1))
    np.testing.assert_allclose(log_softmax(cut, -1), log_softmax(whole, -1), atol=1e-5)


# ---- the teacher's backend


def test_every_pair_of_settings_chooses_one_backend(monkeypatch):
    """12 pairs: the environment unset or one of three, and a config of three."""
    pairs = list(itertools.product((None, *TEACHER_BACKENDS), TEACHER_BACKENDS))
    assert len(pairs) == 12
    for environ, configured in pairs:
        config = Config()
        config.teacher.backend = configured
        monkeypatch.delenv("KDJAX_TEACHER_BACKEND", raising=False)
        if environ is not None:
            monkeypatch.setenv("KDJAX_TEACHER_BACKEND", environ)
        assert teacher_backend(config) == (environ or configured)


def test_auto_is_settled_by_what_fits(monkeypatch):
    """4 cases: each of the two plans fits or does not."""
    cases = list(itertools.product((True, False), repeat=2))
    assert len(cases) == 4
    monkeypatch.setattr(plan, "_remedy", lambda *_: "Buy another.")
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    sources = object.__new__(Sources)  # nothing of it is asked but whether there is a teacher
    object.__setattr__(sources, "teacher", object())
    where = Config(), sources, mesh, Devices("gpu", "x", 1, None, None)
    for fast, lean in cases:
        fits = {"dequant": fast, "q4k": lean}

        def made(config, sources, mesh, devices, backend, fits=fits):
            limit = 10e9 if fits[backend] else 1e9
            return plan.Plan(backend, "full", 1024, "gpu", {"all": 5e9}, {"any": {}}, limit, None)

        monkeypatch.setattr(plan, "make_plan", made)
        if not fast and not lean:
            with pytest.raises(UserError, match=r"does not fit: dequant needs 5\.00 GB, q4k"):
                plan.choose(*where, "auto")
            continue
        chosen = plan.choose(*where, "auto")
        assert chosen.backend == ("dequant" if fast else "q4k") and "by auto" in chosen.choice


# ---- the step


@settings(max_examples=40, deadline=None)
@given(vocab=st.integers(2, 8), seed=st.integers(0, 10_000), t=st.sampled_from((0.5, 1.0, 4.0)),
       alpha=st.sampled_from((0.0, 0.3, 1.0)))  # fmt: skip
def test_loss_is_no_less_than_zero_and_its_gradient_sums_to_zero(vocab, seed, t, alpha):
    rng = np.random.default_rng(seed)
    student, teacher = rng.normal(0, 3, (2, vocab)).astype(np.float32)
    label = np.asarray(seed % vocab)
    options = dict(temperature=t, alpha=alpha)
    assert float(kd_loss(student, teacher, label, **options)) >= 0
    gradient = np.asarray(kd_logit_gradient(student, teacher, label, **options), np.float64)
    assert abs(gradient.sum()) < 1e-5
    # Down the gradient the loss falls.
    lower = kd_loss(student - 1e-2 * np.float32(gradient), teacher, label, **options)
    assert float(lower) <= float(kd_loss(student, teacher, label, **options)) + 1e-6


def test_every_row_is_in_exactly_one_part():
    """Batches of 1 to 16 rows, split into every number of parts that divides them."""
    for rows in range(1, 16 + 1):
        batch = {"tokens": jnp.arange(rows * 3, dtype=jnp.int32).reshape(rows, 3)}
        for parts in (n for n in range(1, rows + 1) if rows % n == 0):
            split_ = np.asarray(step._split(batch, parts)["tokens"])
            assert split_.shape == (parts, rows // parts, 3)
            np.testing.assert_array_equal(np.sort(split_[..., 0].ravel()), np.arange(rows) * 3)


def test_the_logged_loss_is_the_mean_over_trained_positions():
    raw = dict(loss=30.0, ce=20.0, divergence=5.0, count=10.0, grad_norm=7.0, learning_rate=1e-3)
    want = dict(loss=3.0, ce=2.0, divergence=0.5, grad_norm=7.0, learning_rate=1e-3, tokens=10.0)
    assert step_figures(raw) == want
    assert step_figures(raw | dict(loss=0.0, count=0.0))["loss"] == 0.0


# ---- teacher and student alike


def test_the_override_is_a_total_function_of_its_two_settings(models, monkeypatch):
    """8 pairs: the config on or off, the variable unset, empty, 0 or 1."""
    tables = [open_table(models / "teacher.gguf")] * 2
    pairs = list(itertools.product((False, True), (None, "", "0", "1")))
    assert len(pairs) == 8
    for allowed, variable in pairs:
        config = Config()
        config.teacher.allow_degenerate = allowed
        monkeypatch.delenv("KDJAX_ALLOW_DEGENERATE_KD", raising=False)
        if variable is not None:
            monkeypatch.setenv("KDJAX_ALLOW_DEGENERATE_KD", variable)
        if allowed or variable == "1":
            assert _refuse_degenerate(config, *tables) is None
            continue
        with pytest.raises(UserError, match="hold the same weights"):
            _refuse_degenerate(config, *tables)


# ---- held-out figures


def sums(rng, count):
    """Sums over `count` positions with means of about 2 nats."""
    means = dict(student_ce=2.5, teacher_ce=1.5, divergence=0.2, kl=0.3, agreement=0.5)
    drawn = {name: mean * count * rng.uniform(0.5, 1.5) for name, mean in means.items()}
    return EvalSums(**drawn, count=float(count))


def test_nothing_evaluated_is_an_error_and_no_figure():
    for nothing in ([EvalSums(*[0.0] * 6)], [EvalSums(*[0.0] * 6)] * 3):
        with pytest.raises(ZeroDivisionError, match="no held-out position carries weight"):
            held_out_figures(nothing, KDLoss())


def test_figures_are_of_all_positions_and_no_mean_of_means():
    few = EvalSums(8.0, 6.0, 2.0, 4.0, 0.0, 1.0)
    many = EvalSums(99.0, 99.0, 9.9, 9.9, 99.0, 99.0)
    got = held_out_figures([few, many], KDLoss(temperature=4.0, alpha=0.5))
    assert got["student_ce"] == pytest.approx(1.07) and got["teacher_ce"] == pytest.approx(1.05)
    assert got["student_perplexity"] == pytest.approx(math.exp(1.07))
    assert got["teacher_perplexity"] == pytest.approx(math.exp(1.05))
    assert (got["kl"], got["agreement"], got["tokens"]) == (pytest.approx(0.139), 0.99, 100.0)
    assert got["divergence"] == pytest.approx(0.119) and got["temperature"] == 4.0
    assert got["loss"] == pytest.approx(0.5 * 1.07 + 0.5 * 16 * 0.119)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), counts=st.lists(st.integers(0, 9), min_size=1, max_size=32))
def test_any_split_into_batches_gives_the_same_figures(seed, counts):
    """Up to 32 batches of 0 to 9 positions, in any order, or added up beforehand."""
    rng = np.random.default_rng(seed)
    batches = [sums(rng, count) for count in (*counts, 1)]
    whole = EvalSums(*(math.fsum(column) for column in zip(*batches, strict=True)))
    want = held_out_figures([whole], KDLoss())
    for order in (batches, batches[::-1]):
        assert held_out_figures(order, KDLoss()) == pytest.approx(want, rel=1e-12)


# ---- what watches a run


class Listener(Hook):
    def __init__(self, stop_at=None):
        self.steps, self.stop_at = [], stop_at

    def step_end(self, record):
        self.steps.append(record.step)
        return Action.STOP if record.step == self.stop_at else Action.CONTINUE


RAW = dict(loss=1.0, ce=1.0, kl=1.0, count=1.0, grad_norm=1.0, learning_rate=1.0)


def test_each_step_is_delivered_once_in_order_one_late():
    """Runs of 1 to 10 steps, delivered at once after any of them."""
    for total, flushed in itertools.product(range(1, 10 + 1), repeat=2):
        first, second = Listener(), Listener()
        delivery = _Delivery([first, second])
        for i in range(1, total + 1):
            delivery.push(i, RAW, {})
            assert first.steps == list(range(1, i))
            if i == flushed:
                delivery.flush()
        delivery.flush()
        assert first.steps == second.steps == list(range(1, total + 1))


def test_a_stop_is_known_before_the_next_step_ends():
    """Asked for at any of 10 steps, by one of two hooks; the other still sees every step."""
    for stop_at, at in itertools.product(range(1, 10 + 1), (0, 1)):
        hooks = [Listener(), Listener()]
        hooks[at].stop_at = stop_at
        delivery = _Delivery(hooks)
        for i in range(1, 10 + 1):
            delivery.push(i, RAW, {})
            assert delivery.stop == (i > stop_at)
        delivery.flush()
        assert delivery.stop and hooks[0].steps == hooks[1].steps == list(range(1, 11))


def test_watching_a_step_costs_less_than_a_millisecond():
    delivery, times = _Delivery([Listener() for _ in range(5)]), []
    metrics = {name: np.float32(value) for name, value in RAW.items()}
    for i in range(200):
        start = time.perf_counter()
        delivery.push(i, metrics, {})
        times.append(time.perf_counter() - start)
    assert np.median(times) < 1e-3


# ---- checkpoints


def numbered(count, length=4):
    ids = np.arange(count * length, dtype=np.uint32).reshape(count, length)
    return Rows(ids, np.ones_like(ids, np.uint16), np.ones_like(ids, np.uint8))


def test_resumed_at_any_position_the_data_go_on():
    """After each of 0 to 12 batches, over two epochs."""

    def batches():
        return pipeline.TextSource(numbered(12), batch_size=2, seed=5)

    iterator, states, seen = batches(), [], []
    for _ in range(12 + 1):
        states.append(iterator.get_state())
        seen.append(list(iterator.next()["row_ids"]))
    assert sorted(itertools.chain(*seen[:6])) == list(range(12))
    for position, state in enumerate(states):
        resumed = batches()
        resumed.set_state(state)
        assert list(resumed.next()["row_ids"]) == seen[position]


def test_another_run_is_named_field_by_field(tmp_path):
    saved = {"optim.learning_rate": 1e-3, "data.rows": "ab", "gone": 1}
    check_same_run(saved, dict(saved), tmp_path)
    with pytest.raises(UserError) as error:
        check_same_run(saved, {"optim.learning_rate": 2e-3, "data.rows": "ab", "new": 2}, tmp_path)
    for line in ("optim.learning_rate: the checkpoint has 0.001, now 0.002",
                 "gone: the checkpoint has 1, now '(absent)'",
                 "new: the checkpoint has '(absent)', now 2"):  # fmt: skip
        assert line in str(error.value)
    assert "data.rows" not in str(error.value)


def test_a_save_that_was_cut_short_is_cleared_and_never_resumed(tmp_path):
    left = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp-1"
    (left / "state").mkdir(parents=True)
    (left / "state" / "half").write_bytes(b"x")
    checkpoints = Checkpoints(tmp_path, 2)
    try:
        assert checkpoints.latest() is None and not left.exists()
    finally:
        checkpoints.close()


# ---- files


def test_any_flipped_bit_of_an_apr_header_is_refused(tmp_path):
    """All 512 bits of the 64 bytes, the checksum's own among them."""
    model = dict(architecture="qwen2", hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
                 vocab_size=9, intermediate_size=8, max_position_embeddings=9, rope_theta=1e6,
                 rms_norm_eps=1e-6)  # fmt: skip
    path = tmp_path / "x.apr"
    write_apr(path, model, [("t", "F32", (4,), np.zeros(4, "<f4"))])
    whole = path.read_bytes()
    assert list(AprTable(path)) == ["t"]
    for bit in range(512):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            AprTable(path)


def test_rows_of_super_blocks_take_whole_blocks():
    """Q4_K and Q6_K rows of 1 to 1024 elements: 144 and 210 bytes a block of 256, or refused."""
    for name, nbytes in (("Q4_K", 144), ("Q6_K", 210)):
        for elements in range(1, 1024 + 1):
            if elements % 256:
                with pytest.raises(UserError, match="multiple of 256"):
                    row_bytes(name, elements)
            else:
                assert row_bytes(name, elements) == elements // 256 * nbytes


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half_float_survives_decoding_and_encoding(name):
    """All 65536 words but NaNs, whose payload may change."""
    words = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    numbers = np.asarray(decode(words.view(np.uint8), name))
    finite = np.isfinite(numbers)
    assert finite.sum() > 60000
    again = encode(np.where(finite, numbers, 0), name).view(np.uint16)
    np.testing.assert_array_equal(again[finite], words[finite])


# ---- smoke runs and receipts


def test_a_trial_is_decided_only_by_all_of_its_steps():
    """Trials of 1 to 6 steps, ended after 0 to 6, with a loss that fell."""
    figures = dict(loss=2.0, student_ce=2.0, divergence=0.1, kl=0.1)
    for wanted, done in itertools.product(range(1, 6 + 1), range(6 + 1)):
        config = Config()
        config.smoke.steps = wanted
        verdict = Verdict(config)
        verdict.eval_end(0, figures)
        for i in range(done):
            verdict.step_end(StepRecord(i + 1, {}, 1.0, {}))
        verdict.eval_end(done, figures | {"loss": 1.0} if done else figures)
        outcome = verdict.outcome(None)
        assert outcome["verdict"] == ("PASS" if done == wanted else "UNDECIDED")
        assert outcome["steps"] == done


def test_any_changed_bit_changes_the_hash_of_parameters():
    """Each of the 512 bits of a tensor, and none of its neighbours' places."""
    tensor = np.arange(16, dtype=np.float32)
    seen = {provenance.params_hash([("a", tensor)])}
    for bit in range(512):
        changed = tensor.copy()
        changed.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        seen.add(provenance.params_hash([("a", changed)]))
    assert len(seen) == 512 + 1
