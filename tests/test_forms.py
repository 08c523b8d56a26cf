"""A rounded student: what the step sees, what moves, what is saved, and the bytes that ship."""

import contextlib
import functools
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import start_over
from exporting import ask_llama_cpp, needs_llama_cpp
from flax.traverse_util import flatten_dict
from quick import cases
from test_run import Recorder, go, saved

import kdjax
from kdjax.commands import export
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh, replicated
from kdjax.errors import UserError
from kdjax.formats import blocks, open_table
from kdjax.formats.blocks import encode, encode_stored, join_rows
from kdjax.formats.imatrix import write_importance
from kdjax.formats.recipes import choose_types
from kdjax.formats.saved import find_best
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.importance import sum_squares
from kdjax.models.model import load_model
from kdjax.training import forms
from kdjax.training.job import assemble
from kdjax.training.saving import Checkpoints
from kdjax.training.step import StepMetrics, TrainState, kd_gradients

pytestmark = pytest.mark.usefixtures("one_device")

RATE = 0.5  # of plain descent: a step is the gradient itself


@pytest.fixture(scope="module")
def pair(models):
    load = lambda name: kdjax.load(models / f"{name}.gguf", dtype="float32")  # noqa: E731
    return load("student"), load("teacher")


def batch(student, rows=4):
    ids = np.random.default_rng(3).integers(0, student.real_vocab, (rows, 17))
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def make(pair, **settings):
    loss = kdjax.KDLoss(kdjax.forward_kl, 1.0, 0.3)
    return kdjax.make_step(*pair, loss, optax.sgd(RATE), **settings)


@pytest.fixture(scope="module")
def rounded(pair):
    """A step of Q4_K_M, its first state, and what the first step made of it."""
    step = make(pair, form=kdjax.Rounded("q4_k_m"))
    first = step.init(pair[0].params)
    after, metrics = step(step.init(pair[0].params), pair[1].params, batch(pair[0]))
    return step, first, after, metrics


@pytest.mark.slow
def test_the_step_sees_what_the_exporter_writes(pair, rounded, tmp_path):
    """Bytes, decoded numbers and logits: of masters that a step has moved off their blocks."""
    step, _, state, _ = rounded
    student = pair[0]
    kdjax.export_gguf(student.replace(params=step.pack(state)), tmp_path / "kept.gguf")
    back = kdjax.load(tmp_path / "kept.gguf", dtype="float32")
    seen = step.see(state)
    jax.tree.map(np.testing.assert_array_equal, back.params, seen)
    ids = batch(student)["tokens"]
    logits = student.replace(params=seen).logits(ids)
    np.testing.assert_array_equal(back.logits(ids), logits)
    # Scales of these masters themselves are those that the exporter finds, but where two candidates
    # lose the same to the last bit: sums of two programs differ by that.
    again = step.init(state.params)
    kdjax.export_gguf(student.replace(params=step.pack(again)), tmp_path / "again.gguf")
    masters = student.replace(params=state.params)
    kdjax.export_gguf(masters, tmp_path / "q.gguf", dtype="q4_k_m")
    tables = [open_table(tmp_path / name) for name in ("again.gguf", "q.gguf", "kept.gguf")]
    types = {tables[0].info(name).dtype for name in tables[0]}
    assert {"Q4_K", "Q6_K", "F32"} <= types
    for name in tables[0]:
        assert len({table.info(name).dtype for table in tables}) == 1
        assert np.mean(tables[0].raw(name) == tables[1].raw(name)) > 0.999, name


@needs_llama_cpp
def test_llama_cpp_computes_with_what_the_step_saw(pair, rounded, tmp_path):
    """Logits and perplexity of the file; llama.cpp rounds what it multiplies the blocks with."""
    step, _, state, _ = rounded
    student, ids = pair[0], batch(pair[0])["tokens"][0].tolist()
    kdjax.export_gguf(student.replace(params=step.pack(state)), tmp_path / "kept.gguf")
    prompts = [ids[:n] for n in range(1, len(ids))]
    rows, real = student.spec.vocab_size, student.real_vocab  # llama.cpp counts padding rows too
    answers = ask_llama_cpp(tmp_path / "kept.gguf", prompts, rows)
    given = [[answer[i] for i in range(real)] for answer in answers]

    def normalise(logits):
        logits = np.asarray(logits, np.float64)
        return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

    def compare(params):
        ours = normalise(student.replace(params=params).logits([ids[:-1]])[0])
        both, places = (ours, normalise(given)), np.arange(len(ours))
        perplexities = (np.exp(-np.mean(x[places, ids[1:]])) for x in both)
        return np.abs(both[0] - both[1]).max(), *perplexities

    apart, ours, theirs_too = compare(step.see(state))
    assert apart < 0.25 * compare(state.params)[0]
    np.testing.assert_allclose(ours, theirs_too, rtol=1e-2)


def take_steps(pair_, rows):
    """The bytes of a step of Q4_0 before its first, and its state after three."""
    step = make(pair_, form=kdjax.Rounded("q4_0"))
    state = step.init(pair_[0].params)
    packed = jax.device_get(step.pack(state))
    for _ in range(3):
        state, _ = step(state, pair_[1].params, rows)
    return packed, jax.device_get(state)


@pytest.fixture(scope="module")
def alone(pair):
    """Takes the steps when a test first asks, so that a fault in them is that test's."""
    return functools.cache(lambda: take_steps(pair, batch(pair[0])))


@pytest.mark.slow
def test_a_mesh_rounds_as_one_device(pair, alone, models):
    """Scales lie with their rows, and steps and bytes are those of one device."""
    mesh = make_mesh(2, 2, 2)

    def load(name):
        checkpoint = open_checkpoint(models / f"{name}.gguf")
        return load_model(checkpoint, placement=Placement.on(mesh), dtype="float32")

    spread = take_steps((load("student"), load("teacher")), batch(pair[0]))
    packed, states = zip(alone(), spread, strict=True)
    jax.tree.map(np.testing.assert_array_equal, *packed)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *(s.params for s in states)
    )
    kept = [[x for x in jax.tree.leaves(s.kept) if x.dtype != np.float32] for s in states]
    same = [np.mean(a == b) for a, b in zip(*kept, strict=True)]
    assert min(same) > 0.95, same


@pytest.mark.slow
def test_a_plain_step_is_the_program_without_forms(pair):
    step = make(pair)
    spec = step.spec

    def plain(state, teacher, batch):
        grads, sums, count = kd_gradients(state.params, teacher, batch, spec)
        updates, opt_state = spec.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        figures = sums.loss, sums.ce, sums.divergence
        norm = optax.tree.norm(grads), jnp.ones((), jnp.float32)
        metrics = StepMetrics(*((figure, count) for figure in figures), norm)
        return TrainState(state.step + 1, params, opt_state), metrics

    options = {
        "donate_argnums": 0,
        "out_shardings": (step.shardings, replicated(step.placement.mesh)),
    }
    arguments = step.init(pair[0].params), pair[1].params, step.put(batch(pair[0]))
    texts = [
        re.sub(r"module @\w+", "", function.lower(*arguments, **base).as_text())
        for function, base in ((step.jitted, step.fixed), (jax.jit(plain, **options), {}))
    ]
    assert texts[0] == texts[1]


def test_gradients_at_the_rounded_numbers_move_the_masters(pair, rounded):
    step, first, after, metrics = rounded
    plain = make(pair)
    seen = step.see(first)
    moved, expected = plain(plain.init(seen), pair[1].params, batch(pair[0]))
    for ours, theirs in zip(metrics.means().items(), expected.means().items(), strict=True):
        if ours[0] != "grad_norm":
            assert ours == theirs
    straight = jax.tree.map(lambda x, y, z: x + (y - z), first.params, moved.params, seen)
    close = jax.tree.map(
        lambda a, b: np.mean(np.isclose(a, b, rtol=0, atol=1e-6)), after.params, straight
    )
    assert min(jax.tree.leaves(close)) > 0.98  # all but those that were cut
    assert any(
        np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (first.params, seen)), strict=True)
    )
    jax.tree.map(np.testing.assert_array_equal, after.kept, first.kept)  # fitted once


@pytest.mark.slow
def test_microbatches_round_once(pair, rounded):
    step = make(pair, form=kdjax.Rounded("q4_k_m"), microbatches=2)
    state, _ = step(step.init(pair[0].params), pair[1].params, batch(pair[0]))
    for x, y in zip(*map(jax.tree.leaves, (state.params, rounded[2].params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize(
    "dtype",
    cases(
        "Q4_0",
        slow=["Q4_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4", "Q5_1", "IQ3_S", "IQ3_XXS", "IQ2_S"],
    ),
)
def test_what_lies_beyond_its_scale_is_not_driven_further_out(dtype, rng):
    x = {"embed": jnp.asarray(rng.standard_normal((2, 256)), jnp.float32)}
    form = forms.Rounded("", types=((("embed",), (dtype,)),))
    kept = form.begin({}, x)
    for value in (40.0, -40.0):
        far = {"embed": x["embed"].at[0, 5].set(value)}
        seen = form.see({}, kept, far)
        assert abs(seen["embed"][0, 5]) < 20
        for slope in (1.0, -1.0):
            grads = {"embed": jnp.full((2, 256), slope)}
            pulled = form.pull({}, kept, far, seen, grads, frozenset())["embed"]
            assert pulled[0, 5] == (0 if slope * value < 0 else slope)
            inside = pulled[1]
            assert np.mean(inside == slope) > 0.95


@pytest.mark.parametrize("dtype", cases("IQ3_S", slow=["IQ3_XXS", "IQ2_S"]))
def test_entries_of_a_grid_are_written_as_the_step_saw_them(dtype, rng):
    """Masters that have moved: the compiled step, and the export's parts read by gguf-py."""
    form = forms.Rounded("", types=((("embed",), (dtype,)),))
    x = {"embed": jnp.asarray(rng.standard_t(4, (16, 512)), jnp.float32)}
    kept = jax.jit(form.begin)({}, x)
    moved = {"embed": x["embed"] + 0.2 * jnp.sin(9 * x["embed"])}
    seen = jax.jit(form.see)({}, kept, moved)["embed"]
    scales = jax.device_get(kept["embed"][dtype])
    raw = join_rows([*map(jnp.asarray, encode_stored(np.asarray(moved["embed"]), dtype, scales))])
    kind = gguf.GGMLQuantizationType[dtype]
    np.testing.assert_array_equal(gguf.quants.dequantize(np.asarray(raw), kind), seen)


@pytest.mark.parametrize("dtype", ["Q4_K", "Q8_0", "F16"])
def test_what_is_stored_is_encoded_in_parts_by_one_program(dtype, rng, monkeypatch):
    """Parts of 100 blocks of 256 numbers, the last one smaller, and all at once."""
    monkeypatch.setattr(blocks, "_STORED_ELEMENTS", 256 * 100)
    compiled = blocks._quantize_part._cache_size()
    x = rng.standard_normal((3, 61, 512)).astype(np.float32)
    scales = blocks.fit_rows(jnp.asarray(x), dtype)
    whole = blocks.encode_fields(jnp.asarray(x), dtype, scales)
    parts = encode_stored(x, dtype, jax.device_get(scales))
    assert blocks._quantize_part._cache_size() == compiled + 1
    for ours, theirs in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_scales_are_fitted_by_an_importance(pair, tmp_path):
    """The bytes of the exporter with the same file, up to candidates that lose the same."""
    student, path = pair[0], tmp_path / "im.gguf"
    ids = batch(student)["tokens"]
    sums, count = sum_squares(student, [ids])
    write_importance(path, sums, count, datasets=["ids"], chunk_size=16)
    types = "q4_0,embed=Q4_0"
    steps = [make(pair, form=kdjax.Rounded(types, imatrix=name)) for name in ("", str(path))]
    files = ["plain.gguf", "weighed.gguf", "exported.gguf"]
    for step, name in zip(steps, files, strict=False):
        packed = step.pack(step.init(student.params))
        kdjax.export_gguf(student.replace(params=packed), tmp_path / name)
    kdjax.export_gguf(student, tmp_path / files[2], dtype=types, imatrix=path)
    tables = [open_table(tmp_path / name) for name in files]
    for name in sums:
        plain, weighed, exported = (table.raw(name) for table in tables)
        assert np.mean(weighed == exported) > 0.999
        assert np.mean(plain == weighed) < 0.99
    with pytest.raises(UserError, match="found no importance of a tensor whose scales"):
        make(pair, form=kdjax.Rounded("q8_0", str(path)))
    broken = jax.tree.map(lambda x: x, student.params)
    broken["blocks"]["attn_norm"]["weight"] *= jnp.array([[1.0], [jnp.nan]])
    with pytest.raises(UserError, match=r"found inputs of blk\.1\.\w+.weight that are not finite"):
        sum_squares(student.replace(params=broken), [ids])
    sums.pop("blk.1.ffn_down.weight")
    write_importance(path, sums, count, datasets=["ids"], chunk_size=16)
    with pytest.raises(UserError, match=r"of 1 layers .*, of 256 inputs; expected 2 of 256:"):
        make(pair, form=kdjax.Rounded("q4_0", str(path)))


SHAPES = {
    ("embed",): (64, 256),
    ("blocks", "mlp", "down", "weight"): (2, 256, 96),
    ("blocks", "attn", "q", "bias"): (2, 256),
}


def choose(text):
    return choose_types(text, SHAPES, layers=2, groups=1, tied=True)


def test_types_by_recipe_and_by_name():
    down = ("blocks", "mlp", "down", "weight")
    assert choose("q4_0") == {("embed",): ("Q6_K",), down: ("Q4_0", "Q4_0")}
    assert choose("blocks=q8_0") == {down: ("Q8_0", "Q8_0")}
    assert choose("q4_0,embed=F32") == {down: ("Q4_0", "Q4_0")}
    assert choose("q4_0,blocks=Q4_0,blocks/mlp/down=Q5_0")[down] == ("Q5_0", "Q5_0")


@pytest.mark.parametrize(
    "text, message",
    [
        ("q9", "expected a recipe .*q4_0"),
        ("blocks=IQ2_XS", "cannot be trained; expected one of .*Q4_K"),
        ("blocks=Q4_K", "complete blocks of 256"),
        ("f32", "names no tensor"),
        ("tail=Q4_0", "begins with 'tail'"),
        ("q4_0,embed", "NAME=TYPE"),
    ],
)
def test_types_that_cannot_be_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        choose(text)


class Remembering(kdjax.Form):
    """Keeps the first final norm, and says nothing of where it lies."""

    def begin(self, base, masters):
        return {"first": masters["norm"]["weight"]}


def test_arrays_that_a_users_form_keeps_are_on_every_device(pair):
    step = make(pair, form=Remembering())
    assert step.shardings.kept == {"first": replicated(step.placement.mesh)}
    state, first = step.init(pair[0].params), pair[0].params["norm"]["weight"]
    np.testing.assert_array_equal(state.kept["first"], first)


@pytest.mark.slow
def test_a_rounded_run_resumes_bit_for_bit_and_exports_its_last_integers(tiny_config, tmp_path):
    tiny_config.student.quantize, tiny_config.train.steps = "q4_0", 4
    tiny_config.eval.every = tiny_config.checkpoint.every = 0
    job = assemble(tiny_config, tmp_path / "straight")
    straight, second = Recorder(), Recorder()
    assert go(tiny_config, tmp_path / "straight", straight, job=job) == "finished"
    for hook, how in ((Recorder(stop_at=1), "interrupted"), (second, "finished")):
        parts = start_over(job, tmp_path / "resumed")
        assert go(tiny_config, tmp_path / "resumed", hook, job=parts) == how
    (_, ends), (_, resumed) = saved(job, tmp_path / "straight"), saved(job, tmp_path / "resumed")
    jax.tree.map(np.testing.assert_array_equal, ends, resumed)
    figures = [call[2] for call in straight.calls if call[0] == "eval"]
    assert [call[2] for call in second.calls if call[0] == "eval"] == figures[1:]
    with contextlib.closing(Checkpoints(tmp_path / "straight", 2)) as checkpoints:
        state = checkpoints.restore(4, job.step.abstract, job.step.shardings)
    seen = flatten_dict(job.step.see(state))
    out = tmp_path / "out.gguf"
    source = f"--student={tiny_config.student.path}"
    arguments = [str(tmp_path / "straight"), "--format=gguf", f"--out={out}", source]
    assert export.main(arguments) == 0
    back = kdjax.load(out, dtype="float32").params
    jax.tree.map(np.testing.assert_array_equal, flatten_dict(back), seen)
    assert {open_table(out).info(n).dtype for n in open_table(out)} >= {"Q4_0", "F32"}
    # What ships is not what a second search would find.
    table, q = open_table(out), "blk.0.ffn_up.weight"
    anew = encode(np.asarray(state.params["blocks"]["mlp"]["up"]["weight"][0]), "Q4_0")
    assert not np.array_equal(table.raw(q), anew)
    tiny_config.student.quantize = "q5_0"
    with pytest.raises(UserError, match=r"quantize: the checkpoint has 'q4_0', now 'q5_0'"):
        go(tiny_config, tmp_path / "straight")


@pytest.mark.slow
def test_a_student_is_its_own_teacher(tiny_config, tmp_path, caplog):
    """Its numbers before they are rounded: the student that is rounded is not the teacher."""
    tiny_config.teacher.path, tiny_config.teacher.param_dtype = "self", "float32"
    with pytest.raises(UserError, match="hold the same weights"):
        assemble(tiny_config, tmp_path)
    tiny_config.student.quantize = "blocks=Q3_K"
    tiny_config.optim.learning_rate, tiny_config.loss.alpha = 1.0, 0.0
    tiny_config.optim.warmup_steps, tiny_config.train.steps = 0, 3
    seen = Recorder()
    with pytest.raises(UserError, match="blocks of 256 for Q3_K"):
        assemble(tiny_config, tmp_path)
    tiny_config.student.quantize = "blocks=Q4_0"
    job = assemble(tiny_config, tmp_path / "run")

    def run(name, *hooks):
        return go(tiny_config, tmp_path / name, *hooks, job=start_over(job, tmp_path / name))

    with caplog.at_level("INFO", "kdjax"):
        assert run("run", seen) == "finished"
    first, last = (call[2] for call in seen.calls if call[0] == "eval")
    assert 1e-4 < first["kl"] < last["kl"]
    assert "no step is better than the student before training: held-out loss" in caplog.text
    # At a rate of 1 it ends worse than it began: step 0 is taken; so it is of a run that was
    # stopped between, or in its last step (what step 2 asks is heard at step 3).
    assert run("again", Recorder(stop_at=1)) == run("late", Recorder(stop_at=2)) == "interrupted"
    for name in ("again", "late"):
        caplog.clear()
        with caplog.at_level("INFO", "kdjax"):
            assert run(name) == "finished"
        assert "no step is better than the student before training" in caplog.text
    begun = jax.tree.map(np.asarray, job.make_state())
    _, ends = saved(job, tmp_path / "run")
    assert not all(map(np.array_equal, jax.tree.leaves(ends.params), jax.tree.leaves(begun.params)))
    for name in ("run", "again", "late"):
        assert find_best(tmp_path / name) == (0, "loss", first["loss"])
        step, newest = saved(job, tmp_path / name)
        assert step == 3
        jax.tree.map(np.testing.assert_array_equal, newest, ends)
        source = f"--student={tiny_config.student.path}"
        asked = ["--format=gguf", f"--out={tmp_path}/{name}.gguf", source]
        assert export.main([str(tmp_path / name), *asked]) == 0
        back = flatten_dict(kdjax.load(tmp_path / f"{name}.gguf", dtype="float32").params)
        seen_first = flatten_dict(job.step.see(job.make_state()))
        jax.tree.map(np.testing.assert_array_equal, back, seen_first)
