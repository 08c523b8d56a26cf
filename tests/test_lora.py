"""Adapters of a frozen base: what they compute, what moves, what is formed, kept and written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from quick import cases

import kdjax
from kdjax.errors import UserError
from kdjax.models.adapters import Lora, join_adapters, list_adaptable, split_adapters
from kdjax.models.decoder import functional
from kdjax.models.weights import Adapted
from kdjax.training.step import kd_step

FORMS = ("packed", "dense", "float8")
LOSS = kdjax.KDLoss(kdjax.forward_kl, 1.0, 0.3)


@pytest.fixture(scope="module")
def teacher(models):
    return kdjax.load(models / "teacher.gguf", weights="packed", dtype="float32")


@pytest.fixture(scope="module")
def bases(models):
    file = models / "student.gguf"
    return {form: kdjax.load(file, weights=form, dtype="float32") for form in FORMS}


def batch(student, rows=5):
    ids = np.random.default_rng(3).integers(0, student.real_vocab, (rows, 17))
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def shake(model, by=0.05):
    """The model with adapters that do something."""
    frozen, adapters = split_adapters(model.params)
    keys = iter(jax.random.split(jax.random.key(7), len(jax.tree.leaves(adapters))))
    moved = jax.tree.map(lambda x: x + by * jax.random.normal(next(keys), x.shape), adapters)
    return model.replace(params=join_adapters(frozen, moved))


@pytest.mark.parametrize("form", FORMS)
def test_fresh_adapters_change_nothing_and_copy_nothing(bases, form):
    base = bases[form]
    student = kdjax.add_lora(base, rank=4)
    ids = batch(base)["tokens"]
    np.testing.assert_allclose(student.logits(ids), base.logits(ids), atol=1e-5)
    ours = {id(x) for x in jax.tree.leaves(split_adapters(student.params)[0])}
    assert ours == {id(x) for x in jax.tree.leaves(base.params)}
    again, other = kdjax.add_lora(base, rank=4), kdjax.add_lora(base, rank=4, seed=1)
    a = [flatten_dict(split_adapters(m.params)[1]) for m in (student, again, other)]
    for path, x in a[0].items():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, a[1][path])
        assert np.any(x != a[2][path]) == (path[-1] == "a")
        assert np.all(x == 0) == (path[-1] == "b")
    drawn = [x for path, x in a[0].items() if path[-1] == "a"]
    assert not any(np.array_equal(x, y) for x in drawn for y in drawn if x is not y)


@pytest.mark.parametrize("form", cases("dense", slow=["packed"]))
def test_merged_equals_applied(bases, form):
    student = shake(kdjax.add_lora(bases[form], rank=4, alpha=6.0))
    merged = kdjax.merge_lora(student)
    leaf = flatten_dict(student.params)["blocks", "mlp", "down", "weight"]
    plain = flatten_dict(kdjax.merge_lora(bases["dense"]).params)
    expected = plain["blocks", "mlp", "down", "weight"] + 6.0 / 4 * np.einsum(
        "lor,lri->loi", leaf.b, leaf.a
    )
    found = flatten_dict(merged.params)["blocks", "mlp", "down", "weight"]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    ids = batch(student)["tokens"]
    np.testing.assert_allclose(student.logits(ids), merged.logits(ids), atol=1e-4)
    answers = [
        m.generate([[5, 6, 7], [9, 8]], max_tokens=6, temperature=0.0) for m in (student, merged)
    ]
    assert answers[0] == answers[1]
    assert np.abs(student.logits(ids) - bases[form].logits(ids)).max() > 0.1


def make(student, teacher, **settings):
    return kdjax.make_step(student, teacher, LOSS, optax.sgd(0.1), **settings)


@pytest.fixture(scope="module")
def stepped(bases, teacher):
    """A student with adapters of a form of weights, the state behind a step, and its metrics."""

    @functools.cache
    def take(form):
        student = shake(kdjax.add_lora(bases[form], rank=4, alpha=6.0))
        step = make(student, teacher)
        return student, *step(step.init(student.params), teacher.params, batch(student))

    return take


@pytest.fixture(scope="module")
def whole(bases, teacher):
    """The step that trains all of a student, of whatever form its matrices were merged."""
    return make(bases["dense"], teacher)


@pytest.mark.parametrize("form", cases("packed", "dense", slow=["float8"]))
def test_a_step_moves_the_adapters_by_the_gradient_of_what_they_are(stepped, whole, teacher, form):
    """Against full training's gradient G of a merged W: dB = s G A^T, dA = s B^T G."""
    student, state, metrics = stepped(form)
    assert jax.tree.structure(state.params) == jax.tree.structure(split_adapters(student.params)[1])
    merged = kdjax.merge_lora(student)
    moved, expected = whole(whole.init(merged.params), teacher.params, batch(student))
    close = dict(rtol=2e-4) if form != "float8" else dict(rtol=0.1)  # which rounds activations
    np.testing.assert_allclose(metrics.means()["loss"], expected.means()["loss"], **close)
    before, after = flatten_dict(split_adapters(student.params)[1]), flatten_dict(state.params)
    old, new = flatten_dict(merged.params), flatten_dict(moved.params)
    for path in list_adaptable(student.spec):
        gradient = (old[path] - new[path]) / 0.1
        a, b = before[*path, "a"], before[*path, "b"]
        d_b = 1.5 * np.einsum("loi,lri->lor", gradient, a)
        d_a = 1.5 * np.einsum("lor,loi->lri", b, gradient)
        for part, d in (("a", d_a), ("b", d_b)):
            found = (before[*path, part] - after[*path, part]) / 0.1
            if form == "float8":
                assert np.linalg.norm(found - d) < 0.15 * np.linalg.norm(d), (path, part)
            else:
                np.testing.assert_allclose(found, d, atol=2e-5, rtol=2e-3)


def test_forms_of_the_same_numbers_train_alike(stepped):
    """Packed blocks decode to the dense numbers, forwards and backwards."""
    states = [stepped(form)[1].params for form in ("packed", "dense")]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
def test_microbatches_add_up_to_the_same_gradient(bases, teacher):
    student = shake(kdjax.add_lora(bases["packed"], rank=4))
    found = []
    for parts in (1, 2):
        step = make(student, teacher, microbatches=parts)
        data = batch(student, rows=4)
        found.append(step(step.init(student.params), teacher.params, data)[0].params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), *found)


def _inner(jaxpr):
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for x in value if isinstance(value, tuple | list) else [value]:
                x = getattr(x, "jaxpr", x)
                if hasattr(x, "eqns"):
                    yield from _inner(x)


@pytest.mark.parametrize("remat", cases("none", slow=["dots", "full"]))
@pytest.mark.parametrize("form", FORMS)
def test_no_dense_gradient_and_no_second_base(bases, teacher, form, remat):
    """A step computes no stack of matrices and no copy of blocks or of the head's gradient: a
    layer's numbers exist within the loops alone."""
    base = bases[form]
    compute = dataclasses.replace(base.functions.compute, remat=remat)
    student = kdjax.add_lora(base.replace(functions=functional(base.spec, compute)[0]), rank=3)
    step = make(student, teacher)
    state, data = step.init(student.params), step.put(batch(student))
    jaxpr = jax.make_jaxpr(lambda *x: kd_step(*x, spec=step.spec))(
        state, teacher.params, data, step.base
    )
    shapes = set(list_adaptable(base.spec).values())
    shapes |= {(layers, inner, outer) for layers, outer, inner in shapes}
    head = base.spec.vocab_size, base.spec.hidden_size
    stacks, heads = set(), set()
    for inner in _inner(jaxpr.jaxpr):
        for equation in inner.eqns:
            for x in (v.aval for v in equation.outvars):
                shape = getattr(x, "shape", ())
                narrow = shape and x.dtype.itemsize < 4 and shape[0] == base.spec.num_layers
                if shape in shapes or (equation.primitive.name == "scan" and narrow):
                    stacks.add(str(x))
                if shape in (head, head[::-1]) and equation.primitive.name in (
                    "dot_general",
                    "add",
                ):
                    heads.add(str(x))
    assert not stacks and not heads


@pytest.mark.slow
def test_the_step_holds_no_more_than_a_layer_of_numbers(teacher, tmp_path):
    """By XLA's account, of 16 layers of 768 KiB: dense ones together are 12 MiB."""
    from scripts.bench.synthetic import QWEN25_SHAPES, write_random_gguf

    shape = QWEN25_SHAPES["tiny-student"]._replace(layers=16, hidden=256, ffn=256)
    write_random_gguf(tmp_path / "deep.gguf", shape, seed=5)
    base = kdjax.load(tmp_path / "deep.gguf", weights="packed", dtype="float32")
    student = kdjax.add_lora(base, rank=2)
    step = make(student, teacher)
    state, data = step.init(student.params), step.put(batch(student, rows=1))
    lowered = step.jitted.lower(state, teacher.params, data, base=step.base)
    numbers = 4 * sum(np.prod(s) for s in list_adaptable(base.spec).values())
    found = lowered.compile().memory_analysis()
    assert found.temp_size_in_bytes < numbers / 2
    assert found.alias_size_in_bytes < numbers / 8  # what is donated: the adapters
    moments = jax.tree.leaves(step.init(student.params))
    assert sum(x.nbytes for x in moments) < numbers / 8


@pytest.mark.slow
def test_a_student_that_is_its_teacher_is_refused(bases, models):
    base = bases["packed"]
    with pytest.raises(UserError, match="the same weights"):
        make(kdjax.add_lora(base, rank=4), base)
    make(kdjax.add_lora(base, rank=4), base, allow_degenerate=True)
    learned = shake(kdjax.add_lora(base, rank=4))
    step = make(learned, base)  # beside the base that it shares every array with
    _, metrics = step(step.init(learned.params), base.params, batch(base))
    assert metrics.means()["divergence"] > 0.01


def test_targets_by_every_name(bases):
    base = bases["packed"]
    down = ("blocks", "mlp", "down", "weight")
    for text in ("down_proj", "ffn_down", "mlp.down_proj", "mlp/down", "down"):
        student = kdjax.add_lora(base, targets=text)
        assert Lora.of_params(student.params) == Lora(16, 32.0, (down,))
        assert all(
            isinstance(flatten_dict(student.params)[p], Adapted) for p in list_adaptable(base.spec)
        )
    both = kdjax.add_lora(base, targets="q_proj, attn_v")
    assert [p[2] for p in Lora.of_params(both.params).targets] == ["q", "v"]
    for text in ("", "all-linear"):
        every = Lora.of_params(kdjax.add_lora(base, targets=text).params)
        assert set(every.targets) == set(list_adaptable(base.spec))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"targets": "q_porj"}, "Did you mean q_proj"),
        ({"targets": "lm_head"}, "Embedding and head"),
        ({"targets": "token_embd"}, "Embedding and head"),
        ({"rank": 65}, "expected 1 to 64: k_proj has shape"),
        ({"rank": 0}, "found rank 0"),
        ({"rank": 2.5}, "found rank=2.5; expected a whole number"),
        ({"targets": ["q_proj"]}, r"found targets=\['q_proj'\]; expected text"),
        ({"alpha": 0.0}, "alpha=0"),
    ],
)
def test_what_cannot_be_adapted_is_refused(bases, settings, message, types_unchecked):
    with pytest.raises(UserError, match=message):
        kdjax.add_lora(bases["packed"], **settings)


def test_adapters_are_neither_added_twice_nor_chosen_by_name(bases, teacher):
    student = kdjax.add_lora(bases["packed"])
    with pytest.raises(UserError, match="has adapters"):
        kdjax.add_lora(student)
    with pytest.raises(UserError, match="adapters are what trains"):
        make(student, teacher, trainable="blocks/*/mlp")
    with pytest.raises(UserError, match=r"a student without adapters and form=Adapters\(\)"):
        make(bases["packed"], teacher, form=kdjax.Adapters())
    with pytest.raises(UserError, match="a base in float8 to round"):
        make(kdjax.add_lora(bases["float8"]), teacher, form=kdjax.Rounded("q4_0"))
