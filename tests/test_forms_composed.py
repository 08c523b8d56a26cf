"""Adapters under rounding: what is seen, what moves, what is saved, and the file that ships."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import start_over
from flax.traverse_util import flatten_dict, unflatten_dict
from quick import cases
from test_run import Recorder, go, saved

import kdjax
from kdjax.commands import export
from kdjax.errors import UserError
from kdjax.evaluation.health.examine import of_files
from kdjax.formats import open_table
from kdjax.formats.blocks import decode_fields, encode_fields, is_cut
from kdjax.models.adapters import add_change
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.lora import read_numbers
from kdjax.training.job import assemble
from kdjax.training.saving import Checkpoints

pytestmark = pytest.mark.usefixtures("one_device")
RANK, ALPHA = 3, 6.0


@pytest.fixture(scope="module")
def teacher(models):
    return kdjax.load(models / "teacher.gguf", dtype="float32")


@pytest.fixture(scope="module", params=cases("dense", slow=["packed"]))
def student(request, models):
    base = kdjax.load(models / "student.gguf", weights=request.param, dtype="float32")
    return kdjax.add_lora(base, rank=RANK, alpha=ALPHA, targets="q_proj,down_proj")


def batch(student, rows=4):
    ids = np.random.default_rng(3).integers(0, student.real_vocab, (rows, 17))
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def make(student, teacher, optimizer=None, **settings):
    loss = kdjax.KDLoss(kdjax.forward_kl, 1.0, 0.3)
    settings = {"form": kdjax.Rounded("q4_0")} | settings
    return kdjax.make_step(student, teacher, loss, optimizer or optax.sgd(1.0), **settings)


def moved(state):
    """The state with a B that is not zero."""
    rng = np.random.default_rng(7)
    flat = flatten_dict(state.params)
    for path, x in flat.items():
        if path[-1] == "b":
            flat[path] = jnp.asarray(rng.normal(0, 0.02, x.shape), jnp.float32)
    tree = jax.tree.unflatten(jax.tree.structure(state.params), [flat[p] for p in sorted(flat)])
    return state.replace(params=tree)


def change_of(params, path):
    """alpha / rank B A in float64."""
    a, b = (np.asarray(params[*path, part], np.float64) for part in ("a", "b"))
    return ALPHA / RANK * (b @ a)


def test_the_forward_pass_sees_the_sum_rounded_once(student, teacher):
    """Against float64: within half a level of base + B A, of scales that are those of the base."""
    step = make(student, teacher)
    first = step.init(student.params)
    state = moved(first)
    jax.tree.map(np.testing.assert_array_equal, state.kept, first.kept)
    base = {p: np.asarray(read_numbers(x), np.float64) for p, x in flatten_dict(step.base).items()}
    seen, masters = flatten_dict(step.see(state)), flatten_dict(state.params)
    kept = flatten_dict(state.kept)
    assert {path[:-1] for path in kept} <= seen.keys() and seen.keys() == base.keys()
    changed = 0
    for path, numbers in seen.items():
        exact = base[path]
        if (*path, "a") in masters:
            exact, changed = exact + change_of(masters, path), changed + 1
        dtypes = [p[-1] for p in kept if p[:-1] == path]
        if not dtypes:
            np.testing.assert_array_equal(numbers, exact)
            continue
        (dtype,) = dtypes
        fields = encode_fields(jnp.asarray(exact, jnp.float32), dtype, kept[*path, dtype])
        wanted = np.asarray(decode_fields(fields, dtype), np.float64)
        same = np.asarray(numbers, np.float64) == wanted
        assert same.mean() > 0.999, path  # but where the sum lies between two levels
    assert changed == 2


@pytest.mark.slow
def test_the_gradient_of_the_adapters_is_that_of_the_sum(student, teacher):
    """Straight through rounding: A moves by scale B^T G, B by scale G A^T, in float64."""
    step = make(student, teacher)
    state, data = moved(step.init(student.params)), batch(student)
    before = {p: np.asarray(x, np.float64) for p, x in flatten_dict(state.params).items()}
    seen = step.see(state)
    dense = kdjax.load(student.checkpoint.path, dtype="float32").replace(params=seen)
    plain = make(dense, teacher, form=None)
    after, _ = plain(plain.init(seen), teacher.params, data)
    slopes = {
        path: np.asarray(x, np.float64) - np.asarray(y, np.float64)
        for (path, x), y in zip(
            flatten_dict(seen).items(), flatten_dict(after.params).values(), strict=True
        )
    }
    kept = jax.tree.map(jnp.copy, flatten_dict(state.kept))
    stepped, metrics = step(state, teacher.params, data)
    ends = {p: np.asarray(x, np.float64) for p, x in flatten_dict(stepped.params).items()}
    base = {p: np.asarray(read_numbers(x), np.float64) for p, x in flatten_dict(step.base).items()}
    total, rounded = 0.0, flatten_dict(seen)
    for path in {p[:-1] for p in before}:
        a, b, g = before[*path, "a"], before[*path, "b"], ALPHA / RANK * slopes[path]
        numbers = base[path] + change_of(before, path)
        beyond = is_cut(*map(jnp.float32, (numbers, rounded[path])), "Q4_0", kept[*path, "Q4_0"])
        assert 0 < np.mean(beyond) < 0.1
        g = np.where(beyond & ((numbers - np.asarray(rounded[path], np.float64)) * g < 0), 0, g)
        of_a, of_b = np.swapaxes(b, -1, -2) @ g, g @ np.swapaxes(a, -1, -2)
        total += np.sum(of_a**2) + np.sum(of_b**2)
        for part, wanted in (("a", of_a), ("b", of_b)):
            got = before[*path, part] - ends[*path, part]
            assert np.linalg.norm(got - wanted) < 1e-4 * np.linalg.norm(wanted), (path, part)
    assert metrics.means()["grad_norm"] == pytest.approx(np.sqrt(total), rel=1e-4)


def test_only_adapters_are_trained_and_saved(student, teacher):
    step = make(student, teacher, optax.adam(1e-2))
    state = step.init(student.params)
    assert {path[-1] for path in flatten_dict(state.params)} == {"a", "b"}
    losses = []
    for _ in range(6):
        state, metrics = step(state, teacher.params, batch(student))
        losses.append(metrics.means()["loss"])
    assert losses[-1] < losses[0]
    assert not any(x.is_deleted() for x in jax.tree.leaves(step.base))
    record = step.spec.form.record
    assert record["lora"]["rank"] == RANK and record["quantize"] == "q4_0"


def test_the_file_holds_what_was_seen(student, teacher, tmp_path):
    step = make(student, teacher)
    state = moved(step.init(student.params))
    kdjax.export_gguf(student.replace(params=step.pack(state)), tmp_path / "a.gguf")
    back = kdjax.load(tmp_path / "a.gguf", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, back.params, step.see(state))


def test_the_sum_has_the_same_bits_in_another_order_of_operations(rng):
    """Products of 12 bits are exact: NumPy, which fuses nothing, has the bits of a program."""
    w, a, b = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, 32, 64), (2, 11, 64), (2, 32, 11))
    )
    got = jax.jit(lambda *x: add_change(*x, 1.7))(w, a, b)

    def cut(x):
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 2**12) / 2**12, exponent).astype(np.float32)

    wanted, a, b = w.copy(), cut(a), cut(np.float32(1.7) * b)
    for i in range(11):
        wanted = wanted + b[:, :, i : i + 1] * a[:, i : i + 1]
    np.testing.assert_array_equal(got, wanted)
    exact = w + 1.7 * (np.asarray(b, np.float64) / np.float32(1.7) @ np.asarray(a, np.float64))
    np.testing.assert_allclose(got, exact, atol=1e-5)


@pytest.mark.slow
def test_layers_of_several_types_are_those_of_the_sum_rounded_at_once(models, tmp_path):
    """Also as products in bfloat16 take them: equal blocks, scales and gradients of equal ones."""
    types = tmp_path / "types.txt"
    types.write_text("blk.0.ffn_down=Q5_0 blk.1.ffn_down=Q8_0 blk.1.attn_q=Q5_0 blk.0.attn_q=Q4_0")
    form, teacher = kdjax.Rounded(f"q4_0,{types}"), kdjax.load(models / "teacher.gguf")
    found = {}
    for compute in ("float32", "bfloat16"):
        base = kdjax.load(
            models / "student.gguf", weights="packed", dtype="float32", compute_dtype=compute
        )
        student = kdjax.add_lora(base, rank=RANK, alpha=ALPHA, targets="q_proj,down_proj")
        step = make(student, teacher, form=form)
        found[compute] = step, moved(step.init(student.params))
    (step, state), (narrow, other) = found.values()
    jax.tree.map(np.testing.assert_array_equal, state.kept, other.kept)
    seen, cast, used = step.see(state), narrow.see(other), step.spec.form
    plain = kdjax.Rounded(form.text).choose_types(step.spec.student.spec)
    total = used.add_up(step.base, state.params)
    whole = jax.jit(plain.see)({}, state.kept, total)
    jax.tree.map(np.testing.assert_array_equal, seen, whole)
    rng, grads = np.random.default_rng(5), {}
    for path, x in flatten_dict(cast).items():
        assert x.dtype == (jnp.bfloat16 if path in dict(plain.types) else jnp.float32), path
        np.testing.assert_array_equal(x, flatten_dict(seen)[path].astype(x.dtype))
        grads[path] = jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16)
    grads = unflatten_dict(grads)
    pulled = [
        jax.jit(a.spec.form.pull, static_argnames="frozen")(
            a.base,
            b.kept,
            b.params,
            c,
            jax.tree.map(lambda x, d=d: x.astype(d), grads),
            frozenset(),
        )
        for (a, b), c, d in zip(found.values(), (seen, cast), ("float32", "bfloat16"), strict=True)
    ]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), *pulled)
    kept = plain.pull({}, state.kept, total, seen, grads, frozenset())
    for path in used.lora.targets:  # A's, of the gradient that the sum's masters would get
        b = np.asarray(flatten_dict(state.params)[*path, "b"], np.float64)
        g = np.asarray(flatten_dict(kept)[path], np.float64)
        wanted = ALPHA / RANK * np.swapaxes(b, -1, -2) @ g
        np.testing.assert_allclose(
            flatten_dict(pulled[0])[*path, "a"], wanted, rtol=1e-3, atol=1e-4
        )
    kdjax.export_gguf(student.replace(params=narrow.pack(other)), tmp_path / "a.gguf")
    back = kdjax.load(tmp_path / "a.gguf", dtype="float32").params
    jax.tree.map(np.testing.assert_array_equal, back, seen)


@pytest.mark.slow
def test_two_devices_train_the_same_file(models):
    from kdjax.device.placement import Placement
    from kdjax.device.sharding import make_mesh
    from kdjax.models.checkpoint import open_checkpoint
    from kdjax.models.model import load_model

    def run(mesh):
        def load(name, weights):
            checkpoint = open_checkpoint(models / f"{name}.gguf")
            place = Placement.on(mesh)
            return load_model(checkpoint, placement=place, weights=weights, dtype="float32")

        student = kdjax.add_lora(load("student", "packed"), rank=RANK)
        teacher = load("teacher", "dense")
        step = make(student, teacher, optax.sgd(0.5))
        state = step.init(student.params)
        for _ in range(2):
            state, _ = step(state, teacher.params, batch(student))
        return jax.device_get(state)

    one, two = (
        run(make_mesh(*sizes, 1, jax.devices()[:n])) for sizes, n in (((1, 1), 1), ((1, 2), 2))
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), one.params, two.params)
    jax.tree.map(np.testing.assert_array_equal, one.kept, two.kept)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_exports_what_it_trained(tiny_config, tmp_path, capsys):
    """And evaluates it: the file, the saved step and the run's last figures are one student."""
    config = tiny_config
    config.student.quantize, config.train.steps = "q4_0", 4
    config.student.lora.rank, config.student.lora.learning_rate = 4, 1e-2
    config.optim.warmup_steps = 0
    config.eval.every, config.checkpoint.every = 2, 2
    job = assemble(config, tmp_path / "straight")
    straight = Recorder()
    assert go(config, tmp_path / "straight", straight, job=job) == "finished"
    for hook, how in ((Recorder(stop_at=1), "interrupted"), (Recorder(), "finished")):
        parts = start_over(job, tmp_path / "resumed")
        assert go(config, tmp_path / "resumed", hook, job=parts) == how
    (_, ends), (_, resumed) = saved(job, tmp_path / "straight"), saved(job, tmp_path / "resumed")
    jax.tree.map(np.testing.assert_array_equal, ends, resumed)
    assert {path[-1] for path in flatten_dict(ends.params)} == {"a", "b"}
    with contextlib.closing(Checkpoints(tmp_path / "straight", 2)) as checkpoints:
        state = checkpoints.restore(4, job.step.abstract, job.step.shardings)
    seen, step = job.step.see(state), str(tmp_path / "straight" / "checkpoints" / "newest")
    out, source = tmp_path / "out.gguf", f"--student={config.student.path}"
    assert export.main([step, "--format=gguf", f"--out={out}", source]) == 0
    for path, base in ((out, {}), (step, {"base": config.student.path})):
        back = kdjax.load(path, dtype="float32", **base).params
        jax.tree.map(np.testing.assert_array_equal, back, seen)
    assert {open_table(out).info(n).dtype for n in open_table(out)} >= {"Q4_0", "F32"}
    opened = open_checkpoint(step, student=config.student.path)
    assert "unchanged_weights" not in {found.detector for found in of_files(opened)}
    capsys.readouterr()
    assert export.main([step, "--format=peft", f"--out={tmp_path / 'alone'}", source]) == 2
    assert "adapters that trained under rounding" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"need student.lora.weights=dense"):
        kdjax.load(step, weights="packed", base=config.student.path)
    heldout = list(job.eval_batches())
    plain = kdjax.make_step(
        kdjax.load(out, dtype="float32"), job.teacher, job.step.spec.head.loss, optax.sgd(1.0)
    )
    figures = plain.evaluate(plain.init(seen), job.teacher.params, heldout)
    logged = [call[2] for call in straight.calls if call[0] == "eval"]
    assert figures["kl"] == pytest.approx(logged[-1]["kl"], rel=1e-4)
    assert logged[-1]["loss"] < logged[0]["loss"]
    planned = job.plan.resident
    assert planned["adapters, float32"] == sum(x.nbytes for x in jax.tree.leaves(ends.params))
    assert planned["its scales"] == sum(x.nbytes for x in jax.tree.leaves(ends.kept))
    assert planned["student, rounded, float32"] == sum(x.nbytes for x in jax.tree.leaves(seen))
    config.student.quantize = "q5_0"
    with pytest.raises(UserError, match=r"quantize: the checkpoint has 'q4_0', now 'q5_0'"):
        go(config, tmp_path / "straight")
