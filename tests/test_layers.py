"""Losses of layers beside the divergence, against plain JAX and NumPy in float64."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from quick import cases

import kdjax
from kdjax.errors import UserError
from kdjax.formats.saved import saved_run
from kdjax.models.decoder import functional
from kdjax.models.states import hidden_and_states
from kdjax.training.batches import complete_batch
from kdjax.training.teachers import CachedHidden

pytestmark = pytest.mark.usefixtures("one_device")

LENGTH = 16
KD = kdjax.KDLoss(temperature=2.0, alpha=0.3)


@functools.cache
def load(models, name, devices=1, **settings):
    return kdjax.load(models / f"{name}.gguf", devices=jax.devices()[:devices], **settings)


def load_pair(models, devices=1, weights="dense"):
    """Both in float32, the teacher's packed numbers as its dense ones."""
    teacher = load(models, "teacher", devices, weights=weights, dtype="float32")
    return load(models, "student", devices, dtype="float32"), teacher


def make_batch(rows=4):
    """Two documents a row, and positions without weight at the end of the second."""
    ids = np.random.default_rng(1).integers(0, 256, (rows, LENGTH + 1), dtype=np.int32)
    segments = np.repeat([[1] * 10 + [2] * 4 + [0] * 2], rows, axis=0).astype(np.int32)
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:], "segment_ids": segments}


def read_layers(model, batch):
    """Each layer's output `[L, B, T, D]` and the last hidden states, all kept, by the module."""
    params = model.params
    module = model.functions.merge(params)
    columns = [jnp.asarray(batch[n]) for n in ("tokens", "segment_ids", "positions")]
    hidden, layers = module.hidden_and_layers(*columns, keep_layers=True)
    return hidden, layers, model.functions.head(params)


def loss_by_hand(params, projections, student, teacher, batch, real, pairs, weight):
    """The minimised loss in plain JAX, logits whole, and its parts."""
    hidden, ours, head = read_layers(student.replace(params=params), batch)
    their_hidden, theirs, their_head = jax.lax.stop_gradient(read_layers(teacher, batch))
    s, t = hidden @ head.T, their_hidden @ their_head.T
    s, t = s[..., :real], t[..., :real]
    w = batch["weights"]
    ce = -jnp.take_along_axis(jax.nn.log_softmax(s), batch["labels"][..., None], -1)[..., 0]
    p, q = jax.nn.log_softmax(t / 2), jax.nn.log_softmax(s / 2)
    kl = jnp.sum(jnp.exp(p) * (p - q), -1)
    loss = jnp.sum(w * (KD.alpha * ce + (1 - KD.alpha) * 4 * kl))
    extra = 0.0
    for (a, b), matrix in zip(pairs, projections, strict=True):
        difference = ours[a] @ matrix.T - theirs[b]
        extra += jnp.sum(w * jnp.mean(difference**2, -1)) / len(pairs)
    return (loss + weight * extra) / jnp.sum(w), extra / jnp.sum(w)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "devices", "microbatches"),
    cases(("packed", 1, 2), slow=[("packed", 4, 1), ("dense", 1, 1)]),
)
def test_gradients_are_those_of_the_loss_written_out(models, weights, devices, microbatches):
    """Every parameter's and the projections', by one step of sgd at rate 1."""
    student, teacher = load_pair(models, devices, weights)
    plain_student, plain_teacher = load_pair(models)
    pairs, matrices = [(0, 1), (1, 2)], {}
    rng = np.random.default_rng(0)
    for a, _ in pairs:
        width = (teacher.spec.hidden_size, student.spec.hidden_size)
        matrices[f"blocks/{a}"] = rng.normal(size=width).astype(np.float32) / 8
    named = {f"blocks/{a}": f"blocks/{b}" for a, b in pairs}
    extra = kdjax.match_hidden(named, weight=0.7, matrices=matrices)
    step = kdjax.make_step(
        student, teacher, KD, optax.sgd(1.0), microbatches=microbatches, extra=extra
    )
    state = step.init(student.params)
    begun = jax.device_get(state.extra)["hidden_mse"]
    np.testing.assert_array_equal(begun["blocks_1"], matrices["blocks/1"])
    batch = make_batch(rows=4 if devices == 1 else 8)
    placed = jax.device_get(step.put(batch))
    after, metrics = step(state, teacher.params, batch)

    function = functools.partial(
        loss_by_hand,
        student=plain_student,
        teacher=plain_teacher,
        batch={k: jnp.asarray(v) for k, v in placed.items()},
        real=student.real_vocab,
        pairs=pairs,
        weight=0.7,
    )
    gradient = jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))
    (loss, other), (grads, of_matrices) = gradient(plain_student.params, [*matrices.values()])
    means = metrics.means()
    assert means["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert means["hidden_mse"] == pytest.approx(float(other), rel=1e-5)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, plain_student.params, after.params)
    for (path, a), b in zip(jax.tree.leaves_with_path(moved), jax.tree.leaves(grads), strict=True):
        scale = float(jnp.max(jnp.abs(b))) + 1e-8
        np.testing.assert_allclose(a / scale, b / scale, atol=2e-4, err_msg=str(path))
    for (name, begin), b in zip(begun.items(), of_matrices, strict=True):
        a = begin - after.extra["hidden_mse"][name]
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.max(jnp.abs(b))) + 1e-7)
    # What is minimised is what is evaluated.
    again = step.evaluate(step.init(student.params), teacher.params, [batch])
    assert again["loss"] == pytest.approx(means["loss"], rel=1e-5)
    assert again["hidden_mse"] == pytest.approx(means["hidden_mse"], rel=1e-5)


@pytest.mark.parametrize("scan", cases(True, slow=[False]))
@pytest.mark.parametrize("remat", cases("none", slow=["full"]))
def test_the_layers_asked_for_are_those_of_all_whatever_is_computed_again(models, remat, scan):
    """Values and gradients; in a forward pass no array has all layers."""
    model = load(models, "teacher", dtype="float32")
    functions = model.functions
    compute = dataclasses.replace(functions.compute, remat=remat, scan=scan, placement=None)
    functions = functional(model.spec, compute)[0]
    batch = complete_batch(make_batch(rows=3))
    columns = [jnp.asarray(batch[n]) for n in ("tokens", "segment_ids", "positions")]
    names = ("embed", "blocks/1", "blocks/1/attn/q", "blocks/0/attn/v")

    def some(params):
        hidden, states = hidden_and_states(functions, params, *columns, names=names)
        return jnp.sum(hidden**2) + jnp.sum(jnp.sin(states["blocks/1"])), states

    def all_of_them(params):
        module = functions.merge(params)
        hidden, layers = module.hidden_and_layers(*columns, keep_layers=True)
        return jnp.sum(hidden**2) + jnp.sum(jnp.sin(layers[1])), layers

    (value, states), grads = jax.jit(jax.value_and_grad(some, has_aux=True))(model.params)
    (same, layers), wanted = jax.jit(jax.value_and_grad(all_of_them, has_aux=True))(model.params)
    assert float(value) == pytest.approx(float(same), rel=1e-6)
    np.testing.assert_allclose(states["blocks/1"], layers[1], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(grads, wanted, rtol=1e-4, atol=1e-5)
    spec = model.spec
    assert states["blocks/1/attn/q"].shape == (3, LENGTH, spec.num_heads, spec.head_dim)
    assert states["blocks/0/attn/v"].shape == (3, LENGTH, spec.num_kv_heads, spec.head_dim)
    assert spec.num_layers > 2
    text = str(jax.make_jaxpr(some)(model.params))
    tail = f"3,{LENGTH},{spec.hidden_size}]"
    assert f"[2,{tail}" in text
    assert f"[{spec.num_layers},{tail}" not in text


def numpy_relations(x, segments, heads):
    """Log of the relations `[heads, T, T]` of one row in float64, -inf where there is none."""
    x = np.asarray(x, np.float64).reshape(len(x), heads, -1)
    scores = np.einsum("ihd,jhd->hij", x, x) / np.sqrt(x.shape[-1])
    seen = np.tril(np.ones((len(x),) * 2, bool)) & (segments[:, None] == segments[None])
    scores = np.where(seen, scores, -np.inf)
    return scores - np.logaddexp.reduce(scores, -1, keepdims=True)


def relations_by_hand(ours, theirs, batch, heads):
    total = 0.0
    for part in "qkv":
        s, t = ours[f"blocks/0/attn/{part}"], theirs[f"blocks/1/attn/{part}"]
        for row, segments in enumerate(batch["segment_ids"]):
            q, p = (numpy_relations(x[row], segments, heads) for x in (s, t))
            with np.errstate(invalid="ignore"):
                terms = np.where(np.isfinite(p), np.exp(p) * (p - q), 0)
            total += np.sum(batch["weights"][row] * terms.sum(-1).mean(0)) / 3
    return total


def draw_states(rng, widths, part):
    """Queries of 4 heads, keys and values of 2, 8 or 12 wide."""
    return {
        f"{part}/attn/{name}": rng.normal(size=(2, LENGTH, heads, widths)).astype(np.float32)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }


def test_relations_are_those_of_the_paper_within_segments(rng):
    """Value in float64, gradient by a central difference; padding may hold anything."""
    batch = complete_batch(make_batch(rows=2))
    ours, theirs = draw_states(rng, 8, "blocks/0"), draw_states(rng, 12, "blocks/1")
    loss = kdjax.match_relations({"blocks/0": "blocks/1"}, heads=4)

    def value(ours):
        return jax.jit(loss.sum)(ours, theirs, batch, {})["relations"]

    expected = relations_by_hand(ours, theirs, batch, 4)
    assert expected > 1 and float(value(ours)) == pytest.approx(expected, rel=1e-5)
    grads = jax.grad(value)(ours)
    direction = {name: rng.normal(size=x.shape) for name, x in ours.items()}
    ends = [
        relations_by_hand({n: x + e * direction[n] for n, x in ours.items()}, theirs, batch, 4)
        for e in (1e-5, -1e-5)
    ]
    slope = sum(np.sum(np.asarray(grads[n], np.float64) * direction[n]) for n in ours)
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)
    spoilt = {
        n: np.where(batch["segment_ids"][..., None, None] == 0, np.nan, x) for n, x in ours.items()
    }
    assert float(value(spoilt)) == pytest.approx(expected, rel=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.grad(value)(spoilt)))
    same = dict(zip(theirs, ours.values(), strict=True))
    assert float(jax.jit(loss.sum)(ours, same, batch, {})["relations"]) == 0


@pytest.mark.parametrize("distance", ["mse", "cosine"])
def test_distances_of_hidden_states_are_their_definitions(rng, distance):
    batch = complete_batch(make_batch(rows=2))
    s, t = (rng.normal(size=(2, LENGTH, 6)).astype(np.float32) for _ in range(2))
    x, y = s.astype(np.float64), t.astype(np.float64)
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    expected = {"mse": np.mean((x - y) ** 2, -1), "cosine": 1 - np.sum(x * y, -1) / norms}[distance]
    loss = kdjax.match_hidden({"blocks/0": "embed"}, distance)
    s[batch["weights"] == 0] = np.nan
    ((name, value),) = jax.jit(loss.sum)({"blocks/0": s}, {"embed": t}, batch, {}).items()
    assert name == f"hidden_{distance}"
    assert float(value) == pytest.approx(np.sum(batch["weights"] * expected), rel=1e-5)
    grads = jax.grad(lambda s: jax.jit(loss.sum)({"blocks/0": s}, {"embed": t}, batch, {})[name])(s)
    assert np.isfinite(grads).all()


class Bigram(nnx.Module):
    """The next id by the last one alone, with its layers by name."""

    def __init__(self, rows, width=8):
        self.table = nnx.Param(jax.random.normal(jax.random.key(0), (rows, width)))

    def hidden(self, tokens, segment_ids, positions):
        return jnp.tanh(self.table[...][tokens])

    def hidden_and_states(self, tokens, segment_ids, positions, names):
        return self.hidden(tokens, segment_ids, positions), {"table": self.table[...][tokens]}

    def head_weight(self):
        return self.table[...]


def sum_of_squares(ours, theirs, batch):
    squares = jnp.sum(ours["table"] ** 2, axis=-1) * batch["weights"]
    return {"all": jnp.sum(squares), "count": jnp.sum(batch["weights"])}


def test_a_function_and_a_module_of_ones_own_and_their_state(tmp_path):
    """Without a teacher; several sums are several figures, and projections come back."""
    student = kdjax.Model.from_module(Bigram(256))
    extra = kdjax.LayerLoss(sum_of_squares, ["table"], weight=0.5, project={"table": 3})
    optimizer = optax.adam(0.1)
    step = kdjax.make_step(student, None, kdjax.KDLoss(alpha=1), optimizer, extra=[extra])
    begun = step.init(student.params)
    matrix = np.asarray(begun.extra["extra"]["table"], np.float64)
    state, metrics = step(begun, {}, make_batch())
    means = metrics.means()
    assert means["extra_count"] == 1
    assert means["loss"] == pytest.approx(means["ce"] + 0.5 * (means["extra_all"] + 1), rel=1e-6)
    weights = complete_batch(make_batch())["weights"]
    layer = np.asarray(student.params["table"], np.float64)[make_batch()["tokens"]]
    expected = np.sum(weights[..., None] * (layer @ matrix.T) ** 2) / weights.sum()
    assert means["extra_all"] == pytest.approx(expected, rel=1e-5)
    assert (metrics + metrics).means() == pytest.approx(means | {"tokens": 2 * means["tokens"]})
    kdjax.save_state(tmp_path, state)
    found = kdjax.load_state(tmp_path, step)
    chex.assert_trees_all_equal(found, state)
    assert np.any(np.asarray(found.extra["extra"]["table"]) != matrix)


def make(models, **settings):
    student, teacher = load_pair(models)
    settings = {"optimizer": optax.sgd(0.1), "loss": KD, "teacher": teacher} | settings
    return kdjax.make_step(student, **settings)


def nothing(ours, theirs, batch):
    return jnp.zeros(())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (kdjax.match_hidden({"blocks/9": "blocks/0"}), "hidden_mse, the student: .*'blocks/9'"),
        (kdjax.match_hidden({"blocks/0": "layers/0"}), "hidden_mse, the teacher: .*'layers/0'"),
        (
            kdjax.match_hidden({"blocks/0": "blocks/0"}, project=False),
            r"found blocks/0 \d+ wide and the teacher's blocks/0 \d+; expected one width",
        ),
        (
            kdjax.match_hidden({"blocks/0": "embed"}, matrices={"blocks/0": np.ones((4, 3))}),
            r"a projection \[4, 3\] of blocks/0; expected \[width, ",
        ),
        (
            kdjax.match_hidden({"blocks/0": "embed"}, matrices={"blocks/0": np.ones((4, 128))}),
            r"found blocks/0 4 wide and the teacher's embed",
        ),
        (
            kdjax.match_relations({"blocks/0": "blocks/0"}, heads=7),
            "expected a multiple of heads=7",
        ),
        (kdjax.LayerLoss(lambda s, t, b: b["weights"], ["embed"]), "returned .1, 64.; expected a"),
        (
            kdjax.match_hidden({"blocks/0/attn/q": "blocks/0"}),
            "hidden_mse: found blocks/0/attn/q of 4 axes; expected hidden states",
        ),
        (
            kdjax.match_hidden({"embed": "blocks/1/attn/k"}, project=False),
            "hidden_mse: found blocks/1/attn/k of 4 axes",
        ),
        (kdjax.LayerLoss(lambda s, t, b: None, ["embed"]), "returned None; expected a number"),
        ([kdjax.LayerLoss(nothing, ["embed"])] * 2, "extra losses called extra, extra"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(models, extra, message):
    with pytest.raises(UserError, match=message):
        make(models, extra=extra)


def test_teachers_optimizers_and_names_that_do_not_suit_are_refused(models):
    extra = kdjax.match_hidden({"blocks/0": "blocks/0"})
    with pytest.raises(UserError, match=r"one that does not run .hidden.; expected one"):
        make(models, extra=extra, kind=CachedHidden())
    teacher = load_pair(models)[1]
    with pytest.raises(UserError, match=r"several teachers .*; expected one that does"):
        make(models, extra=extra, teacher=[teacher, teacher])
    mask = jax.tree.map(lambda _: True, load_pair(models)[0].params)
    with pytest.raises(UserError, match="masks or labels are a tree of the student's"):
        make(models, extra=extra, optimizer=optax.masked(optax.sgd(0.1), mask))
    student = kdjax.Model.from_module(Bigram(256))
    lost = kdjax.LayerLoss(nothing, ["blocks/0"])
    with pytest.raises(
        UserError, match="no layer 'blocks/0' of the student; a custom module needs a"
    ):
        kdjax.make_step(student, None, kdjax.KDLoss(alpha=1), optax.sgd(0.1), extra=lost)
    for given, message in (
        (dict(name="loss"), "name='loss': metrics have it already"),
        (dict(project={"embed": "head"}), "extra: found project=.'embed': 'head'.; expected a wid"),
        (dict(project={"embed": 0}), "extra: found project=.'embed': 0.; expected a width"),
        (dict(project={"blocks/1": 3}), "project=.'blocks/1'.: expected names of student"),
    ):
        with pytest.raises(UserError, match=message):
            kdjax.LayerLoss(nothing, ["embed"], **given)
    same = {"blocks/0": "blocks/0"}
    for function, given, message in (
        (kdjax.match_hidden, [{}], r"hidden_mse: found student=\(\); expected a list of layers"),
        (kdjax.match_relations, [{}, 2], r"relations: found student=\[\]; expected a list"),
        (functools.partial(kdjax.match_relations, parts=()), [same, 2], r"found student=\[\]"),
        (kdjax.match_relations, [same, 0], "heads=0: must be at least 1"),
        (kdjax.LayerLoss, [nothing, "embed"], "extra: found student='embed'; expected a list"),
        (kdjax.LayerLoss, [nothing, ["embed"], "embed"], "extra: found teacher='embed'; expected"),
    ):
        with pytest.raises(UserError, match=message):
            function(*given)
    with pytest.raises(UserError, match="distance='l1': must be one of mse, cosine"):
        kdjax.match_hidden({"embed": "embed"}, "l1")


@pytest.mark.slow
def test_a_run_logs_layer_losses_and_goes_on(tiny_config, tmp_path):
    """With some parameters trained and in microbatches; stopped, it ends in the same bits."""
    config = tiny_config
    config.train.steps, config.optim.warmup_steps, config.eval.samples = 4, 1, 0
    config.eval.every = config.checkpoint.every = 2
    config.train.batch_size = 16
    config.train.microbatches, config.optim.trainable = 2, "blocks/*/mlp"
    config.teacher.weights = "packed"

    def extra():
        pairs = {"blocks/1": "blocks/2"}
        return [kdjax.match_hidden(pairs, "cosine"), kdjax.match_relations(pairs, heads=2)]

    assert kdjax.distill(config, tmp_path / "a", extra=extra()) == "finished"
    entries = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert all({"hidden_cosine", "relations"} <= set(entry) for entry in entries)
    receipt = json.loads((tmp_path / "a" / "receipt.json").read_text())
    assert receipt["unhashed_python"]["extra"].startswith("hidden_cosine, relations, arrays ")
    stop = dict(on_step=lambda record: record.step == 2)
    assert kdjax.distill(config, tmp_path / "b", extra=extra(), **stop) == "interrupted"
    with pytest.raises(UserError, match=r"own\.extra: the checkpoint has"):
        kdjax.distill(config, tmp_path / "b")
    assert kdjax.distill(config, tmp_path / "b", extra=extra()) == "finished"
    a, b = (
        {name: x for name, x in saved_run(tmp_path / run, 4)["checksums"].items()} for run in "ab"
    )
    assert a == b and any(name.startswith("extra/hidden_cosine") for name in a)
    assert kdjax.load(tmp_path / "a").spec is not None  # the student, without the projections
