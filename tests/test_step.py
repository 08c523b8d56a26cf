"""The step: normalisation over the whole batch, every tensor stepped, any split, any mesh."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from quick import cases
from test_user_code import Bigram

import kdjax
from kdjax.config import OptimConfig
from kdjax.device import runtime, sharding
from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.divergences import forward_kl
from kdjax.losses.kd import KDLoss
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.decoder import Compute, functional
from kdjax.models.loading import load_params
from kdjax.models.shards import Shard
from kdjax.training import batches, optim, step
from kdjax.training.saving import load_state, save_state
from kdjax.training.teachers import Dense

GOLDENS = Path(__file__).parent / "goldens"
ROWS, LENGTH = 8, 12
OPTIM = OptimConfig(
    learning_rate=1e-3, final_learning_rate=0.0, warmup_steps=0,
    weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8, clip_norm=0.0,
)  # fmt: skip


def mesh_of(data=1, fsdp=1, tensor=1):
    return sharding.make_mesh(data, fsdp, tensor, jax.devices()[: data * fsdp * tensor])


@functools.cache
def model(name, mesh, remat="none"):
    checkpoint = open_checkpoint(GOLDENS / name)
    compute = Compute(max_segments=4, placement=Placement(mesh), remat=remat)
    functions, abstract = functional(checkpoint.spec, compute)
    params = load_params(checkpoint.table, checkpoint.spec, abstract, mesh)
    return functions, abstract, params


class Built(NamedTuple):
    state: step.TrainState
    step: step.Step
    teacher: dict
    mesh: jax.sharding.Mesh
    gradients: Callable
    once: Callable  # without donation, so that a state serves several tests


@functools.cache
def build(
    mesh=None,
    *,
    microbatches=1,
    clip_norm=0.0,
    learning_rate=1e-3,
    student="qwen2_tied",
    alpha=0.3,
    reduce_dtype="float32",
    split=False,
    remat="none",
):
    mesh = mesh or mesh_of()
    functions, abstract, params = model(student, mesh, remat)
    teacher_functions, _, teacher = model("qwen2_untied", mesh)
    loss = KDLoss(forward_kl, temperature=2.0, alpha=alpha)
    head = HeadSpec(loss, width=160, real_vocab=157, chunk_tokens=40)
    tx = optim.optimizer(
        dataclasses.replace(OPTIM, clip_norm=clip_norm, learning_rate=learning_rate), 100
    )
    spec = step.StepSpec(
        functions, teacher_functions, Dense(), head, tx, microbatches, reduce_dtype
    )
    made = step.Step(spec, abstract, Placement(mesh), teacher, split=split)
    spec = made.spec
    gradients = jax.jit(lambda p, t, b: step.kd_gradients(p, t, b, spec))
    one = functools.partial(step.kd_step, base={}, spec=spec)
    once = jax.jit(one, out_shardings=(made.shardings, None))
    return Built(made.init(params), made, teacher, mesh, gradients, once)


def batch(seed=0, lengths=(2, 2, 2, 2, 12, 12, 12, 12)):
    """Rows of very different numbers of trained positions, two documents each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 157, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = np.where(np.arange(LENGTH) < 5, 1, 2).astype(np.int32)[None].repeat(ROWS, 0)
    positions = np.where(np.arange(LENGTH) < 5, np.arange(LENGTH), np.arange(LENGTH) - 5)
    weights = (np.arange(LENGTH)[None] < np.array(lengths)[:, None]).astype(np.float32)
    return {
        "tokens": tokens[:, :-1], "labels": tokens[:, 1:], "segment_ids": segments,
        "positions": positions.astype(np.int32)[None].repeat(ROWS, 0), "weights": weights,
    }  # fmt: skip


def gradients(built, data):
    return built.gradients(built.state.params, built.teacher, sharding.put_batch(data, built.mesh))


def step_once(built, data=None):
    """Parameters before, state after, metrics."""
    data = sharding.put_batch(batch() if data is None else data, built.mesh)
    after, metrics = built.once(built.state, built.teacher, data)
    return jax.tree.map(np.asarray, built.state.params), after, metrics.means()


def assert_equal_gradients(got, want, limit=3e-6):
    """Loss, parts and count to 1e-6; gradients to float32 rounding (1.3e-6 seen)."""
    chex.assert_trees_all_close(got[1:], want[1:], rtol=1e-6)
    got, want = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t[0])]) for t in (got, want))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < limit, error


@pytest.mark.parametrize("microbatches", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_any_split_into_microbatches_is_the_same(microbatches):
    """Parts with 2 and with 12 trained positions a row: a mean of their means would differ."""
    data = batch(lengths=(2, 12) * 4)  # part m takes rows m, m + parts, ...
    want, got = gradients(build(), data), gradients(build(microbatches=microbatches), data)
    assert_equal_gradients(got, want)


@pytest.mark.parametrize(
    ("axes", "microbatches"),
    [
        (dict(data=2, fsdp=2, tensor=2), 1),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in ((dict(data=8), 1), (dict(tensor=4), 1), (dict(data=2, fsdp=2), 2))
        ),
    ],
)
def test_any_mesh_is_the_same(axes, microbatches):
    """`tensor` splits the vocabulary of the heads too: the chunked loss must not notice."""
    want = gradients(build(), batch())
    got = gradients(build(mesh_of(**axes), microbatches=microbatches), batch())
    assert_equal_gradients(got, want)


@pytest.mark.slow
def test_states_of_delta_nets_are_the_same_in_any_split():
    """Microbatches, layers computed again, rows and heads on other devices, beside one of each.

    Documents of 1, 62 and 17 positions, over the borders of chunks.
    """
    lengths = (1, 62, 17)
    ids = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)])
    at = np.concatenate([np.arange(n) for n in lengths])
    tokens = np.random.default_rng(4).integers(0, 157, (4, len(ids) + 1)).astype(np.int32)
    data = {
        "tokens": tokens[:, :-1], "labels": tokens[:, 1:],
        "weights": np.ones((4, len(ids)), np.float32),
        **{name: np.broadcast_to(x, (4, len(ids))).astype(np.int32)
           for name, x in (("segment_ids", ids), ("positions", at))},
    }  # fmt: skip
    want = gradients(build(student="qwen3_5"), data)
    for mesh, parts, remat in ((mesh_of(), 2, "full"), (mesh_of(2, 2, 2), 1, "dots")):
        built = build(mesh, microbatches=parts, remat=remat, student="qwen3_5")
        assert_equal_gradients(gradients(built, data), want, 1e-5)  # 5.7e-6 seen


@pytest.mark.slow
def test_devices_that_keep_parts_of_the_masters_take_the_same_step():
    count = 8
    whole, parts = build(), build(mesh_of(data=count), split=True, remat="full")
    assert_equal_gradients(gradients(parts, batch()), gradients(whole, batch()))
    (_, want, figures), (_, got, same) = step_once(whole), step_once(parts)
    assert same == pytest.approx(figures, rel=2e-6)
    moments = [optax.tree.get(state.opt_state, "mu") for state in (got, want)]
    assert_equal_gradients((moments[0],), (moments[1],))
    for tree in (got.params, moments[0]):
        gate = tree["blocks"]["mlp"]["gate"]["weight"]
        assert gate.addressable_shards[0].data.size * count == gate.size
    bytes_of = [
        sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
        for state in (got, want)
    ]
    assert bytes_of[0] < 1.1 * bytes_of[1] / count  # norms and biases are on all


@pytest.mark.slow
def test_a_state_of_parts_goes_on_on_any_number_of_devices(tmp_path):
    """Masters and moments keep their bits; the next step is that of one device."""
    one, first = build(), build(mesh_of(data=4), split=True)
    save_state(tmp_path, step_once(first)[1])
    states = [load_state(tmp_path, made.step) for made in (one, build(mesh_of(data=2), split=True))]
    chex.assert_trees_all_equal(*states)
    (want, _), (got, _) = (
        made.once(state, made.teacher, sharding.put_batch(batch(1), made.mesh))
        for made, state in zip((one, build(mesh_of(data=2), split=True)), states, strict=True)
    )
    moments = [optax.tree.get(state.opt_state, "mu") for state in (got, want)]
    assert_equal_gradients((moments[0],), (moments[1],))


@pytest.mark.slow
def test_so_they_do_in_microbatches():
    parts = build(mesh_of(data=2), split=True, microbatches=4)
    assert_equal_gradients(gradients(parts, batch()), gradients(build(), batch()))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_parts_are_gathered_in_order_and_their_gradients_added(count, rng):
    """Whole numbers, of which bfloat16 and sums in any order keep every bit."""
    whole = rng.integers(-200, 200, (3, 16, 5)).astype(np.float32)
    factors = rng.integers(-200, 200, (count, *whole.shape)).astype(np.float32)

    def one(part, factor):
        def scaled(part):
            gathered = Shard(part, -2, "data", jnp.bfloat16).gather()
            return jnp.sum(gathered * factor[0]), gathered

        gradient, gathered = jax.grad(scaled, has_aux=True)(part)
        return gathered[None], gradient

    rows, parts = P("data"), P(None, "data")
    run = Placement(mesh_of(data=count)).map_rows(one, (parts, rows), (rows, parts))
    gathered, gradient = jax.jit(run)(whole, factors)
    np.testing.assert_array_equal(gathered, np.broadcast_to(whole, factors.shape))
    np.testing.assert_array_equal(gradient, factors.sum(axis=0))


def test_a_state_of_parts_begins_with_whole_arrays_without_a_warning():
    """pytest makes an error of JAX's warning that arrays could not be donated."""
    whole, parts = build(mesh_of(data=4)), build(mesh_of(data=4), split=True)
    state = parts.step.init(whole.state.params, donate=True)
    chex.assert_trees_all_equal(state.params, parts.state.params)


def test_gradients_may_travel_in_bfloat16():
    """Each device's are rounded to 8 bits: 2^-9 of a number at most, and not less than 2^-12."""
    exact, rounded = (
        gradients(build(mesh_of(data=2), reduce_dtype=dtype), batch())
        for dtype in ("float32", "bfloat16")
    )
    chex.assert_trees_all_equal(rounded[1:], exact[1:])
    for a, b in zip(jax.tree.leaves(rounded[0]), jax.tree.leaves(exact[0]), strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert 2**-12 < error < 2**-7 if a.ndim > 1 else error == 0


def test_parameters_are_really_split():
    state = build(mesh_of(data=2, fsdp=2, tensor=2)).state
    gate = state.params["blocks"]["mlp"]["gate"]["weight"]
    assert gate.addressable_shards[0].data.size * 4 == gate.size
    moments = optax.tree.get(state.opt_state, "mu")["blocks"]["mlp"]["gate"]["weight"]
    assert moments.sharding == gate.sharding


def test_mean_is_over_trained_positions_of_the_whole_batch():
    """Each row alone, weighted by its own count, adds up to the batch."""
    built = build()
    _, sums, count = gradients(built, batch())
    total = weight = 0.0
    for row in range(ROWS):
        lengths = np.zeros(ROWS, int)
        lengths[row] = batch()["weights"][row].sum()
        _, alone, n = gradients(built, batch(lengths=lengths))
        total, weight = total + float(alone.loss), weight + float(n)
    assert weight == float(count) == 56
    np.testing.assert_allclose(sums.loss, total, rtol=1e-5)


def test_batch_without_trained_positions_changes_nothing_but_the_counter():
    before, after, metrics = step_once(build(), batch(lengths=np.zeros(ROWS, int)))
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and after.step == 1
    chex.assert_trees_all_equal(after.params, before)


def first_delta(learning_rate):
    built = build(learning_rate=learning_rate)
    before, after, _ = step_once(built)
    return jax.tree.map(lambda a, b: np.asarray(a) - b, after.params, before)


@pytest.mark.slow
def test_twice_the_learning_rate_is_twice_the_first_step():
    one, two = first_delta(1e-4), first_delta(2e-4)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.linalg.norm(b) / np.linalg.norm(a) == pytest.approx(2.0, rel=1e-2)


@pytest.mark.parametrize("student", cases("qwen2_tied", slow=["qwen3", "qwen2_untied"]))
def test_every_tensor_of_the_student_is_stepped(student):
    before, after, _ = step_once(build(student=student))
    moved = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), after.params, before)
    # A key bias adds one constant to all scores of a query, and softmax takes constants out.
    moved["blocks"]["attn"].get("k", {}).pop("bias", None)
    assert all(jax.tree.leaves(moved)), moved
    layers = np.any(np.asarray(after.params["blocks"]["mlp"]["up"]["weight"])
                    != before["blocks"]["mlp"]["up"]["weight"], axis=(1, 2))  # fmt: skip
    assert layers.all()


def test_tied_embedding_learns_from_both_its_uses():
    data = batch()
    data["tokens"] = data["tokens"].copy()  # the labels are a view of the same ids
    data["tokens"][:, 1] = 158  # an id beyond the tokenizer: no softmax touches it
    grads, *_ = gradients(build(), data)
    embed = np.abs(np.asarray(grads["embed"])).sum(1)
    absent = np.setdiff1d(np.arange(157), np.union1d(data["tokens"], data["labels"]))
    assert embed[158] > 0  # as input only
    assert len(absent) and np.all(embed[absent] > 0)  # as output only
    assert not np.any(embed[[157, 159]])  # neither


def test_teacher_is_an_argument_and_keeps_its_bytes():
    built = build()
    before = jax.tree.map(np.array, built.teacher)
    data = sharding.put_batch(batch(), built.mesh)
    arguments = (jax.tree.map(jnp.copy, built.state), built.teacher, data)
    lowered = built.step.jitted.lower(*arguments, **built.step.fixed)
    donated = [info.donated for info in jax.tree.leaves(lowered.args_info[0][1])]
    assert donated and not any(donated)
    compiled = lowered.compile()
    sizes = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[:2]))
    used = compiled.memory_analysis()
    assert used is not None and used.argument_size_in_bytes >= sizes  # not folded to constants
    built.step.train(*arguments)
    chex.assert_trees_all_equal(built.teacher, before)


def test_one_trace_and_a_falling_loss_over_steps():
    built = build(student="qwen3", alpha=0.0)
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(
        lambda s, t, b: step.kd_step(s, t, b, {}, spec=built.step.spec), n=1
    )
    train = jax.jit(counted, out_shardings=(built.step.shardings, None))
    state, losses = built.state, []
    for _ in range(12):
        state, metrics = train(state, built.teacher, sharding.put_batch(batch(), built.mesh))
        chex.assert_tree_all_finite(metrics)
        losses.append(metrics.means()["loss"])
    assert state.step == 12
    assert losses[-1] < 0.8 * losses[0] and all(np.diff(losses) < 0)


@pytest.mark.slow
def test_clipping_divides_after_the_count():
    """The clipped norm is of the averaged gradient, so it does not depend on microbatches."""
    updates = []
    for microbatches in (1, 4):
        before, after, metrics = step_once(build(microbatches=microbatches, clip_norm=0.1))
        assert metrics["grad_norm"] > 0.1  # the figure reported is before clipping
        updates.append(np.asarray(after.params["embed"]) - before["embed"])
    np.testing.assert_allclose(*updates, rtol=1e-3, atol=1e-7)


def test_schedule():
    rates = dict(learning_rate=1.5e-5, final_learning_rate=5e-7, warmup_steps=4)
    rate = optim.schedule(dataclasses.replace(OPTIM, **rates), 20)
    rising = np.asarray([rate(s) for s in range(4)])
    np.testing.assert_allclose(rising, 1.5e-5 * np.arange(1, 5) / 5, rtol=1e-6)
    np.testing.assert_allclose(rate(4), 1.5e-5, rtol=1e-6)
    np.testing.assert_allclose(rate(12), (1.5e-5 + 5e-7) / 2, rtol=1e-5)
    np.testing.assert_allclose(np.asarray([rate(20), rate(25)]), 5e-7, rtol=1e-5)


def test_a_state_is_shown_in_one_line_and_in_a_short_table():
    state = build().state
    leaves = len(jax.tree.leaves(state.params))
    parts = f"params: {leaves} arrays, float32, .* GB, opt_state: .*float32/int32, .* GB"
    assert re.fullmatch(f"<kdjax.TrainState step: 0, {parts}>", repr(state))
    table = state._repr_html_()
    assert table.count("<tr>") == 3 and len(table) < 800 and "TrainState" in table
    params = jax.tree.map(jnp.copy, state.params)  # donated below; the state is shared by tests
    formed = step.FormedState(jnp.int32(4), params, (), kept={"scales": jnp.ones(3)})
    assert repr(formed).startswith("<kdjax.FormedState step: 4, ")
    assert repr(formed).endswith("opt_state: no arrays, kept: 1 arrays, float32, 1.2e-08 GB>")
    shown = []
    jax.jit(lambda x: shown.append(repr(x)) or x.params, donate_argnums=0)(formed)
    formed.step.delete()
    for text in (*shown, repr(formed), repr(jax.eval_shape(lambda: formed.replace(step=1)))):
        assert text.startswith("<kdjax.FormedState step: unknown, params: ")


def test_decay_mask_is_matrices_only():
    _, abstract, _ = model("qwen3", mesh_of())
    flat = jax.tree_util.tree_flatten_with_path(optim.decay_mask(abstract))[0]
    masked = {".".join(k.key for k in path): on for path, on in flat}
    assert masked["embed"] and masked["blocks.attn.q.weight"] and masked["blocks.mlp.down.weight"]
    assert not any(masked[k] for k in masked if "norm" in k or k.endswith("bias"))


def test_mesh_that_does_not_fit_names_the_numbers():
    with pytest.raises(ValueError, match=r"mesh.data=3 x mesh.fsdp=1 x mesh.tensor=1 .* 8 devices"):
        sharding.make_mesh(3, 1, 1)


def test_evaluation_ignores_rows_without_weight():
    built = build()
    evaluate = built.step.sum_evaluation
    data = batch()
    half = {**data, "weights": data["weights"] * (np.arange(ROWS) < 4).astype(np.float32)[:, None]}
    first = {k: v[:4] for k, v in data.items()}
    a, b = (evaluate(built.state.params, built.teacher, x) for x in (half, first))
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_products_on_a_gpu_are_left_to_cublas():
    """A name that this XLA knows: an unknown one would end every run on a GPU."""
    assert sharding.compiler_options(mesh_of()) is None
    devices = np.array([mock.Mock(platform="gpu")])
    gpu = mock.Mock(spec=jax.sharding.Mesh, devices=devices, shape={"data": 1}, size=1)
    options = sharding.compiler_options(gpu)
    assert options == {"xla_gpu_enable_triton_gemm": False}
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 2, compiler_options={"xla_gpu_no_such": True})(1)


@pytest.mark.parametrize("flags", ["--xla_gpu_enable_triton_gemm=true", "flags.txt"])
def test_what_the_user_says_of_products_stands_in_steps(flags, monkeypatch):
    environ = {"XLA_FLAGS": flags}
    monkeypatch.setattr(sharding, "says_products", lambda: runtime.says_products(environ))
    devices = np.array([mock.Mock(platform="gpu")])
    gpu = mock.Mock(spec=jax.sharding.Mesh, devices=devices, shape={"data": 1}, size=1)
    assert sharding.compiler_options(gpu) is None
    monkeypatch.setattr(sharding, "splits_state", lambda _: True)
    assert list(sharding.compiler_options(gpu) or {}) == ["xla_gpu_collective_permute_mode"]


def test_every_row_is_in_exactly_one_part():
    """Batches of 1 to 16 rows, split into every number of parts that divides them."""
    for rows in range(1, 16 + 1):
        batch = {"tokens": jnp.arange(rows * 3, dtype=jnp.int32).reshape(rows, 3)}
        counts = [n for n in range(1, rows + 1) if rows % n == 0]
        split = jax.jit(lambda b, counts=counts: [step._split_batch(b, n) for n in counts])
        for parts, pieces in zip(counts, jax.device_get(split(batch)), strict=True):
            assert pieces["tokens"].shape == (parts, rows // parts, 3)
            first = pieces["tokens"][..., 0].ravel()
            np.testing.assert_array_equal(np.sort(first), np.arange(rows) * 3)


def test_the_logged_loss_is_the_mean_over_trained_positions():
    metrics = step.StepMetrics((30.0, 10.0), (20.0, 10.0), (5.0, 10.0), (7.0, 1.0))
    want = dict(loss=3.0, ce=2.0, divergence=0.5, grad_norm=7.0, tokens=10.0)
    assert metrics.means() == want
    assert dataclasses.replace(metrics, loss=(0.0, 0.0)).means()["loss"] == 0.0


def test_metrics_of_several_steps_merge_by_their_counts():
    built = build()
    metrics = [
        built.once(built.state, built.teacher, sharding.put_batch(batch(lengths=n), built.mesh))[1]
        for n in ((2,) * 8, (12,) * 8)
    ]
    few, many = (m.means() for m in metrics)
    merged = (metrics[0] + metrics[1]).means()
    assert merged["tokens"] == 16 + 96
    assert merged["loss"] == pytest.approx((16 * few["loss"] + 96 * many["loss"]) / 112, rel=1e-5)
    assert merged["grad_norm"] == pytest.approx((few["grad_norm"] + many["grad_norm"]) / 2)


def test_the_state_is_a_copy_of_the_model():
    built = build()
    _, _, params = model("qwen2_tied", built.mesh)
    state = built.step.init(params)
    built.step(state, built.teacher, batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_a_batch_is_completed_as_its_segments_say():
    segments = np.array([[1, 1, 1, 2, 2, 0], [3, 3, 4, 4, 4, 4]], np.int32)
    ids = np.zeros((2, 6), np.int32)
    whole = batches.complete_batch({"tokens": ids, "labels": ids, "segment_ids": segments})
    np.testing.assert_array_equal(whole["positions"], [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    np.testing.assert_array_equal(whole["weights"], [[1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 1]])
    plain = batches.complete_batch({"tokens": ids, "labels": ids})
    assert plain["weights"].all() and plain["segment_ids"].all()
    np.testing.assert_array_equal(plain["positions"], np.arange(6)[None].repeat(2, 0))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (dict(tokens=np.zeros((2, 3), np.int32)), "no labels; found"),
        (dict(tokens=np.zeros((2, 3)), labels=np.zeros((2, 4))), r"labels.*\(2, 4\)"),
        (dict(tokens=np.zeros(3), labels=np.zeros(3)), r"expected \[B, T\]"),
        ([1, 2], "type list; expected a dict"),
        (dict(tokens=[[1, 2], [3]], labels=[[1, 2], [3]]), "lists of different lengths"),
        (dict(tokens=np.zeros((2, 3)), labels=np.zeros((2, 3))), "float64; expected whole numbers"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused(columns, message):
    with pytest.raises(UserError, match=message):
        batches.complete_batch(columns)


def test_lists_and_other_whole_numbers_make_a_batch():
    whole = batches.complete_batch({"tokens": [[1, 2, 3]], "labels": np.array([[2, 3, 2**40]])})
    assert {k: str(v.dtype) for k, v in whole.items()} == {
        "tokens": "int32", "labels": "int32", "segment_ids": "int32", "positions": "int32",
        "weights": "float32",
    }  # fmt: skip
    assert whole["labels"][0, 2] == 2**31 - 1  # no id that 2**40 would wrap to


def plain(data):
    return {name: data[name] for name in ("tokens", "labels")}


@pytest.mark.parametrize("put", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_labels_of_minus_100_do_not_train(put):
    """They count like weight 0, whether weights are given or filled in."""
    built, data = build(), plain(batch())
    drop = np.random.default_rng(1).random((ROWS, LENGTH)) < 0.2
    ignored = {**data, "labels": np.where(drop, -100, data["labels"])}
    weights = np.where(drop, 0, batches.complete_batch(data)["weights"])
    for more in ({}, {"weights": np.ones_like(weights)}):
        want = step_once(built, batches.complete_batch({**data, "weights": weights}))
        placed = built.step.put(jax.tree.map(put, {**ignored, **more}))
        got = step_once(built, jax.device_get(placed))
        assert want[2]["tokens"] == (~drop).sum()
        chex.assert_trees_all_equal(got[1].params, want[1].params)
        assert got[2] == want[2]


@pytest.mark.parametrize(
    ("column", "value"), [("tokens", 160), ("tokens", -1), ("labels", 157), ("labels", -1)]
)
def test_ids_outside_the_vocabulary_are_refused(column, value):
    """Those of 157 tokens, or of 160 rows; at once on the host, else by a count seen later."""
    built, data = build(), plain(batch())
    data[column] = data[column].copy()
    data[column][2, 5] = value
    message = rf"1 ids outside the vocabulary in a batch \({column}\[2, 5\] is {value}\)"
    with pytest.raises(UserError, match=message):
        built.step.put(data)
    weightless = {**data, "weights": np.ones((ROWS, LENGTH), np.float32)}
    weightless["weights"][2, 5] = 0
    if column == "labels":
        built.step.put(weightless)
    placed = jax.tree.map(jnp.asarray, data)
    state = jax.tree.map(jnp.copy, built.state)
    state, metrics = built.step(state, built.teacher, placed)
    with pytest.raises(UserError, match="1 ids outside the vocabulary"):
        (metrics + dataclasses.replace(metrics, outside=None)).means()
    with pytest.raises(UserError, match="1 ids outside the vocabulary"):
        built.step.put(batch())
    built.step.put(batch())  # said once


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("weights", np.nan),
        ("ce_weights", np.inf),
        ("divergence_weights", -np.inf),
        ("weights", -1e-9),
    ],
)
def test_weights_below_0_or_not_finite_are_refused(column, value):
    data = batch() | {column: np.ones((ROWS, LENGTH), np.float32)}
    data[column][2, 5] = value
    with pytest.raises(UserError, match=f"the batch's {column} hold numbers below 0 or not finite"):
        build().step.put(data)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: [model]])
def test_a_step_refuses_a_model_where_it_wants_arrays(wrap, types_unchecked):
    built = build()
    with pytest.raises(UserError, match=r"found object as a step's teacher; .* teacher.params"):
        built.step(built.state, wrap(object()), batch())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": kdjax.forward_kl}, r"found loss=ForwardKL\(\); expected a kdjax.KDLoss"),
        ({"optimizer": 1e-4}, "found optimizer=0.0001; expected an optax.GradientTr"),
        ({"microbatches": 0}, "found microbatches=0; expected 1 or more"),
        ({"chunk_tokens": 0}, "found chunk_tokens=0; expected 1 or more"),
        ({"microbatches": 1.5}, "found microbatches=1.5; expected a whole number"),
        ({"student": "s.gguf"}, "found str as the student; expected a kdjax.Model, as kdjax.load"),
        ({"teacher": {}, "loss": kdjax.KDLoss(alpha=1)}, "found dict as the teacher; expected a"),
        ({"kind": kdjax.TeacherInBatch}, r"found kind=<class .*>; expected one such as kdjax.Te"),
    ],
)
def test_what_makes_no_step_is_refused(given, message, types_unchecked):
    module = kdjax.Model.from_module(Bigram(8))
    parts = {"loss": kdjax.KDLoss(alpha=1), "optimizer": optax.sgd(1.0), "student": module}
    with pytest.raises(UserError, match=message):
        kdjax.make_step(**{"teacher": None} | parts | given)


def test_what_is_no_state_or_model_is_refused(types_unchecked, tmp_path):
    """Arrays or a path where the library needs the state, the step, the model or the config."""
    built, path = build(), tmp_path / "x"
    for call, found in (
        (lambda: built.step(built.state.params, built.teacher, batch()), "dict as the state"),
        (lambda: built.step.evaluate({}, built.teacher, [batch()]), "dict as the state"),
        (lambda: kdjax.save_state(path, {}), "dict as the state"),
        (lambda: kdjax.load_state(path, None), "step=None; expected what kdjax.make_step"),
        (lambda: kdjax.distill("demo", path), "str as the config; expected a kdjax.Config"),
        (lambda: kdjax.export_gguf(built.state, path), "TrainState as the model"),
        (lambda: kdjax.export_hf("s.gguf", path), "str as the model"),
        (lambda: kdjax.export_peft("s.gguf", path), "str as the model"),
        (lambda: kdjax.add_lora("s.gguf", rank=1), "str as the model"),
        (lambda: kdjax.merge_lora("s.gguf"), "str as the model"),
        (lambda: kdjax.make_head("s.gguf"), "str as the model"),
        (lambda: kdjax.make_eagle("s.gguf"), "str as the model"),
        (lambda: kdjax.take_block("s.gguf"), "str as the model"),
        (lambda: kdjax.parameter_names("s.gguf"), "str as the model"),
    ):
        with pytest.raises(UserError, match=f"found {found}"):
            call()
    assert not path.exists()


def test_what_a_step_cannot_take_is_refused_in_words():
    built = build(microbatches=4)
    with pytest.raises(UserError, match=r"tokens are \(0, \d+\), expected \[B, T\] of 1 or more"):
        built.step(built.state, built.teacher, jax.tree.map(lambda x: x[:0], batch()))
    with pytest.raises(UserError, match="a batch of 6 rows; expected a multiple of 4: 4 micro"):
        built.step(built.state, built.teacher, jax.tree.map(lambda x: x[:6], batch()))
    state = jax.tree.map(jnp.copy, built.state)
    fewer = built.teacher | {"norm": {"weight": built.teacher["norm"]["weight"][:-1]}}
    for other, message in (
        (state.params, r"teacher head: no such array; expected \(160, \d+\). It is another mod"),
        (fewer, r"teacher norm/weight: \((\d+),\); expected \((?!\1)\d+,\)"),
    ):
        with pytest.raises(UserError, match=message):
            built.step(state, other, batch())
        with pytest.raises(UserError, match=message):
            built.step.evaluate(state, other, [batch()])
    with pytest.raises(UserError, match=r"a step's student head: .* It is another mod"):
        built.step.init(built.teacher)
    built.step(state, built.teacher, batch())
    with pytest.raises(UserError, match="a state that an earlier step has taken"):
        built.step(state, built.teacher, batch())
    several = build(mesh_of(data=4))
    with pytest.raises(UserError, match="a batch of 6 rows; expected a multiple of 4: the 4 dev"):
        several.step.put(jax.tree.map(lambda x: x[:6], batch()))
