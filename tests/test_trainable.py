"""Training some of the parameters: masks, names, and what is not computed for the others."""

import functools
import math
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import cases

import kdjax
from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.losses.chunked import HeadSpec
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.decoder import Compute, functional
from kdjax.models.loading import load_params
from kdjax.training import step
from kdjax.training.teachers import Dense

GOLDENS = Path(__file__).parent / "goldens"


def is_mlp(params):
    """True for the leaves of the MLPs."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(key.key == "mlp" for key in path), params
    )


def labels(params):
    return jax.tree.map(lambda on: "mlp" if on else "rest", is_mlp(params))


def others(params):
    return jax.tree.map(lambda on: not on, is_mlp(params))


ONLY_MLP = {
    "multi_transform": optax.multi_transform(
        {"mlp": optax.adamw(1e-2), "rest": optax.set_to_zero()}, labels
    ),
    "masked": optax.chain(
        optax.masked(optax.adamw(1e-2), is_mlp), optax.masked(optax.set_to_zero(), others)
    ),
    "freeze after clipping": optax.chain(
        optax.clip_by_global_norm(1e6), optax.adamw(1e-2), optax.masked(optax.set_to_zero(), others)
    ),
}
MESHES = dict(one={}, data=dict(data=4), fsdp=dict(fsdp=4), tensor=dict(tensor=2, data=2))


@functools.cache
def model(name, mesh):
    checkpoint = open_checkpoint(GOLDENS / name)
    compute = Compute(max_segments=4, placement=Placement(mesh))
    functions, abstract = functional(checkpoint.spec, compute)
    params = load_params(checkpoint.table, checkpoint.spec, abstract, mesh)
    rows = checkpoint.spec.vocab_size
    return kdjax.Model(functions, params, rows, spec=checkpoint.spec, placement=Placement(mesh))


def build(tx, axes, *, microbatches=1, split=False):
    sizes = dict(data=1, fsdp=1, tensor=1) | axes
    mesh = sharding.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    student, teacher = model("qwen2_tied", mesh), model("qwen2_untied", mesh)
    head = HeadSpec(kdjax.KDLoss(), width=160, real_vocab=157, chunk_tokens=40)
    spec = step.StepSpec(student.functions, teacher.functions, Dense(), head, tx, microbatches)
    made = step.Step(spec, student.params, Placement(mesh), teacher.params, split=split)
    return made, made.init(student.params), teacher.params, student


def make_batch(rows=8):
    ids = np.random.default_rng(0).integers(0, 157, (rows, 13), dtype=np.int32)
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


@functools.cache
def all_gradients():
    """Every parameter's, from a step that trains all."""
    made, state, teacher, _ = build(optax.sgd(1.0), {})
    after, _ = made(state, teacher, make_batch())
    return jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), after.params, model_params())


def model_params():
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    return jax.device_get(model("qwen2_tied", mesh).params)


def mlp_leaves(tree):
    return jax.tree.leaves(tree["blocks"]["mlp"])


@pytest.mark.parametrize(
    ("wrapper", "mesh", "microbatches", "split"),
    cases(
        ("multi_transform", "one", 2, False),
        slow=[
            ("masked", "data", 1, True),
            ("freeze after clipping", "fsdp", 1, False),
            ("multi_transform", "tensor", 2, False),
            ("masked", "one", 1, False),
            ("multi_transform", "data", 2, False),
        ],
    ),
)
def test_masked_parameters_stay_and_have_no_gradient(wrapper, mesh, microbatches, split):
    tx = ONLY_MLP[wrapper]
    made, state, teacher, _ = build(tx, MESHES[mesh], microbatches=microbatches, split=split)
    before = jax.device_get(state.params)
    assert len(made.spec.frozen) == 11 and not any("/mlp/" in path for path in made.spec.frozen)
    after, metrics = made(state, teacher, make_batch())
    moved = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), after.params, before)
    assert moved == is_mlp(before)
    expected = np.sqrt(sum(np.sum(np.square(x)) for x in mlp_leaves(all_gradients())))
    assert metrics.means()["grad_norm"] == pytest.approx(expected, rel=2e-3)
    moments = optax.tree.get(after.opt_state, "mu")
    if wrapper == "freeze after clipping":  # AdamW stands before the mask
        return
    assert moments["embed"] == optax.MaskedNode()
    sizes = sum(x.size for x in jax.tree.leaves(after.opt_state) if x.ndim)
    assert sizes == 2 * sum(x.size for x in mlp_leaves(before))
    gate, master = (x["blocks"]["mlp"]["gate"]["weight"] for x in (moments, after.params))
    assert gate.sharding == master.sharding


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        optax.contrib.muon(1e-2),
        optax.partition({"mlp": optax.adamw(1e-2), "rest": optax.sgd(1e-2)}, labels),
        optax.adafactor(1e-2),  # moments of other shapes than the parameters'
    ],
    ids=["muon", "partition", "adafactor"],
)
def test_wrappers_that_train_everything_do(tx):
    made, state, teacher, _ = build(tx, MESHES["fsdp"])
    before = jax.device_get(state.params)
    after, _ = made(state, teacher, make_batch())
    moved = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), after.params, before)
    moved["blocks"]["attn"]["k"].pop("bias")  # softmax takes a constant of all scores out
    assert not made.spec.frozen and all(jax.tree.leaves(moved))


@pytest.mark.slow
def test_gradients_of_frozen_parameters_take_no_memory_and_no_products():
    data = make_batch()
    used = {}
    for name, tx in (("all", optax.adamw(1e-2)), ("mlp", ONLY_MLP["multi_transform"])):
        made, state, teacher, _ = build(tx, {}, microbatches=2)
        compiled = made.jitted.lower(state, teacher, made.put(data), **made.fixed).compile()
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        assert memory is not None and cost is not None
        used[name] = memory.temp_size_in_bytes, cost["flops"]
    frozen = sum(x.size for x in jax.tree.leaves(model_params())) - sum(
        x.size for x in mlp_leaves(model_params())
    )
    assert used["all"][0] - used["mlp"][0] > 4 * frozen  # float32 gradients, and their sums
    assert used["mlp"][1] < 0.95 * used["all"][1]


def named_step(models, names, **settings):
    student, teacher = (
        kdjax.load(models / f"{n}.gguf", dtype="float32") for n in ("student", "teacher")
    )
    tx = optax.adamw(1e-2, weight_decay=0.1)
    made = kdjax.make_step(student, teacher, kdjax.KDLoss(), tx, trainable=names, **settings)
    ids = np.random.default_rng(0).integers(0, 256, (8, 17), dtype=np.int32)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}
    after, metrics = made(made.init(student.params), teacher.params, batch)
    return student, after, metrics


@pytest.mark.parametrize(
    ("names", "expected"),
    cases(
        ("blk.1, output_norm", r"blocks/1/.*|norm/weight"),
        slow=[
            (["blk.*.attn_q.weight"], r"blocks/\d+/attn/q/weight"),
            ("blocks/*/mlp", r"blocks/\d+/mlp/.*"),
        ],
    ),
)
def test_named_parameters_and_layers_alone_are_trained(models, names, expected):
    student, after, metrics = named_step(models, names)
    known = kdjax.parameter_names(student)
    want = {name for name in known if re.fullmatch(expected, name)}
    moved = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(after.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        before = student.params
        for key in path:
            before = before[key.key]
        pairs = [(name, leaf, before)]
        if name.startswith("blocks/"):
            rest = name.removeprefix("blocks/")
            pairs = [
                (f"blocks/{i}/{rest}", a, b)
                for i, (a, b) in enumerate(zip(leaf, before, strict=True))
            ]
        moved |= {n for n, a, b in pairs if np.any(np.asarray(a) != np.asarray(b))}
    # A key bias has no gradient: softmax takes a constant of all scores out.
    assert moved <= want and all(name.endswith("k/bias") for name in want - moved)
    assert 0 < metrics.means()["grad_norm"] < named_step(models, "*")[2].means()["grad_norm"]


def test_parameters_have_our_names_and_ggufs(models):
    model = kdjax.load(models / "student.gguf")
    known = kdjax.parameter_names(model)
    assert model.checkpoint is not None and model.spec is not None
    assert known["blocks/1/mlp/gate/weight"] == "blk.1.ffn_gate.weight"
    assert known["embed"] == "token_embd.weight"
    assert set(known.values()) == set(model.checkpoint.table) - {"output.weight"}
    assert len(known) == 2 + 12 * model.spec.num_layers


class Untied(nnx.Module):
    """A head that is no `embed`, though it has one; no block that drafts is called `mtp`."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 4, rngs=rngs)
        self.out = nnx.Linear(4, 16, use_bias=False, rngs=rngs)
        self.mtp = nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    def hidden(self, tokens, segment_ids, positions):
        return self.mtp(self.embed(tokens))

    def head_weight(self):
        return self.out.kernel[...].T


def test_parameters_of_a_module_of_ones_own_are_trained_whatever_their_names():
    student = kdjax.Model.from_module(Untied())
    loss = kdjax.KDLoss(alpha=1)
    batch = {"tokens": [[1, 2, 3]], "labels": [[2, 3, 4]]}
    for named, expected in (("out", {"out"}), ("", {"embed", "mtp", "out"})):
        built = kdjax.make_step(student, None, loss, optax.sgd(1.0), trainable=named)
        state, _ = built(built.init(student.params), {}, batch)
        moved = jax.tree.map(lambda a, b: bool((a != b).any()), student.params, state.params)
        assert {name for name, part in moved.items() if any(part.values())} == expected


def test_names_without_a_parameter_are_refused(models):
    student, teacher = (
        kdjax.load(models / f"{n}.gguf", dtype="float32") for n in ("student", "teacher")
    )
    with pytest.raises(
        UserError, match=r"'blocks/\*/mpl', which names no parameter.*blocks/mlp/up"
    ):
        kdjax.make_step(
            student, teacher, kdjax.KDLoss(), optax.sgd(1.0), trainable="blocks/*/mlp, blocks/*/mpl"
        )
    with pytest.raises(UserError, match="trainable: found an empty list; expected names"):
        kdjax.make_step(student, teacher, kdjax.KDLoss(), optax.sgd(1.0), trainable=[])
    with pytest.raises(UserError, match="found reduce_dtype='x'; expected float32 or bfloat16"):
        kdjax.make_step(student, teacher, kdjax.KDLoss(), optax.sgd(1.0), reduce_dtype="x")
    with pytest.raises(UserError, match="moves no parameter"):
        kdjax.make_step(student, teacher, kdjax.KDLoss(), optax.set_to_zero())
