"""Smaller files: mixtures of types, costs, their choice, and the command that makes a file."""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import io
import itertools
import json
import logging
import os
import re
import shutil
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exporting import needs_llama_cpp
from flax.traverse_util import flatten_dict
from quick import cases
from test_disk import no_file_beyond

import kdjax
from kdjax.commands import shrink
from kdjax.device import runtime
from kdjax.errors import NOT_WRITTEN, MissingFileError, UserError, WriteError
from kdjax.evaluation import choice, own_text
from kdjax.evaluation import costs as measuring
from kdjax.evaluation.choice import bound_bytes, choose_mixture, count_padded, list_types, solve
from kdjax.evaluation.costs import (
    Comparison,
    CostFile,
    measure_costs,
    round_matrices,
    round_params,
)
from kdjax.evaluation.own_text import OwnText
from kdjax.export import export_gguf
from kdjax.export.formats import count_gguf_bytes
from kdjax.formats import open_table
from kdjax.formats.blocks import BLOCKS, decode, encode
from kdjax.formats.locks import LOCK, locking
from kdjax.formats.recipes import identify_types, read_types
from kdjax.formats.saved import saved_steps
from kdjax.formats.start import check_start, read_masters, read_scales, write_start
from kdjax.models import gptq, importance
from kdjax.models.decoder import functional
from kdjax.models.mixture import Mixture, list_matrices
from kdjax.training.identity import identify
from kdjax.training.job import assemble
from kdjax.training.saving import Checkpoints
from kdjax.watch.guards import NonFiniteError
from scripts.bench import mixtures
from scripts.bench.ggml import open_ggml
from scripts.bench.synthetic import SHAPES, open_header, write_random_gguf

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module", autouse=True)
def few_types():
    """Three types, whose searches compile soon, in place of all."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_TYPES_256", "_TYPES_32"):
            patch.setattr(choice, name, ("Q4_0", "Q5_0", "Q8_0"))
        yield


@pytest.fixture(scope="module")
def model(models):
    return kdjax.load(models / "student.gguf", dtype="float32")


@pytest.fixture(scope="module")
def batches(model):
    tokens = np.random.default_rng(0).integers(0, model.real_vocab, (2, 4, 24)).astype(np.int32)
    columns = {"segment_ids": np.ones((4, 24), np.int32), "weights": np.ones((4, 24), np.float32)}
    columns["positions"] = np.tile(np.arange(24, dtype=np.int32), (4, 1))
    columns["weights"][0, :5] = 0
    return [columns | {"tokens": x} for x in tokens]


@pytest.fixture(scope="module")
def costs(model, batches):
    return measure_costs(Comparison(model, batches), {})


def count_file(path):
    return {name: open_table(path).info(name) for name in open_table(path)}


def test_a_file_of_types_is_one_that_students_exports_and_llama_quantize_read(
    model, tmp_path, monkeypatch
):
    """Anchored names: `output.weight` is also part of `blk.0.attn_output.weight`."""
    spec, path = model.spec, tmp_path / "types.txt"
    types = {name: "Q8_0" for name in list_matrices(spec)}
    types |= {"blk.1.ffn_down.weight": "Q4_0", "blk.0.attn_q.weight": "IQ4_NL"}
    mixture = Mixture.of_tensors(types, spec)
    mixture.write(path)
    assert "^blk\\.1\\.ffn_down\\.weight$=q4_0\n" in path.read_text()
    assert Mixture.named(str(path), spec) == mixture and mixture.tensors == types
    odd = tmp_path / "a,b=q8_0"  # a name is a name first, then a list
    odd.mkdir()
    named = str(shutil.copy(path, odd / "c,d.txt"))
    assert Mixture.named(named, spec) == mixture
    assert identify_types(named) == identify_types(str(path))
    form = kdjax.Rounded(str(path)).choose_types(spec)
    assert form.types == mixture.types
    export_gguf(model, tmp_path / "a.gguf", dtype=str(path))
    found = count_file(tmp_path / "a.gguf")
    assert {name: found[name].dtype for name in types} == types
    assert sum(found[name].nbytes for name in types) == mixture.nbytes
    assert count_gguf_bytes(model.checkpoint, mixture) == (tmp_path / "a.gguf").stat().st_size
    # A recipe before it takes what it leaves out; a name after it wins; a file alone must be whole.
    path.write_text("ffn_down=Q4_0 attn_q=q5_0\n")
    both = Mixture.named(f"q8_0,{path},blocks/attn/q=Q4_0", spec).tensors
    assert both["blk.0.ffn_down.weight"] == both["blk.0.attn_q.weight"] == "Q4_0"
    assert both["blk.0.ffn_up.weight"] == "Q8_0"
    path.write_text("blk.0.attn_q=q5_0\n")
    with pytest.raises(UserError, match="some layers of blocks/attn/q/weight alone"):
        Mixture.named(str(path), spec)
    monkeypatch.chdir(tmp_path)
    config = kdjax.Config()
    config.student.quantize = "types.txt"
    first = identify(config, {})["student.quantize"]
    assert first == identify_types("types.txt") and first.startswith("sha256:")
    path.rename(tmp_path / "b.txt")
    config.student.quantize = "b.txt"
    assert identify(config, {})["student.quantize"] == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found no type"),
        ("attn_q", "'attn_q'; expected NAME=TYPE"),
        ("attn_q=iq1_s", "type 'iq1_s', which cannot be trained"),
        ("(=q4_0", "no regular expression"),
    ],
)
def test_files_of_types_that_cannot_be_are_refused(text, message, tmp_path):
    path = tmp_path / "types.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_types(path)


@needs_llama_cpp
def test_sizes_are_those_that_llama_cpp_computes(model):
    """ggml's bytes of a row, type by type."""
    library = open_ggml()
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = ctypes.c_int, ctypes.c_int64
    library.ggml_type_name.restype = ctypes.c_char_p
    for parts in list_matrices(model.spec).values():
        types = ("IQ4_NL", "Q5_1", "F16")
        for dtype in (*types, *list_types(parts)):
            if parts[0].shape[-1] % BLOCKS[dtype].elements:
                continue
            number, rows = BLOCKS[dtype].ggml, parts[0].shape[:-1]
            row = library.ggml_row_size(number, parts[0].shape[-1])
            total = -(-row * int(np.prod(rows)) // 32) * 32
            assert count_padded(parts, dtype) == total
            assert library.ggml_type_name(number).decode().upper() == dtype


class TensorType(ctypes.Structure):
    """`llama_model_tensor_override` of llama.h."""

    _fields_ = [("pattern", ctypes.c_char_p), ("kind", ctypes.c_int)]


_FLAGS = ("requantize", "head", "copy", "pure", "split", "dry")


class QuantizeParams(ctypes.Structure):
    """`llama_model_quantize_params` of llama.h, of 2026."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("threads", "ftype", "output", "embedding")),
        *((name, ctypes.c_bool) for name in _FLAGS),
        *((name, ctypes.c_void_p) for name in ("imatrix", "values")),
        ("types", ctypes.POINTER(TensorType)),
        ("prune", ctypes.c_void_p),
    ]


@pytest.mark.skipif("LLAMA_LIBRARY" not in os.environ, reason="LLAMA_LIBRARY names no libllama")
@pytest.mark.parametrize("kind", ["student", "teacher"])
def test_llama_quantize_makes_the_types_and_the_size_of_the_file(models, kind, tmp_path):
    """`llama_model_quantize` with the words of the file, as `--tensor-type-file` passes them."""
    model = kdjax.load(models / f"{kind}.gguf", dtype="float32")
    source, ours, theirs = (tmp_path / f"{x}.gguf" for x in ("source", "ours", "theirs"))
    export_gguf(model, source)
    rng, types = np.random.default_rng(0), {}
    for name, parts in list_matrices(model.spec).items():
        types[name] = str(rng.choice(list_types(parts)))
    file = tmp_path / "types.txt"
    Mixture.of_tensors(types, model.spec).write(file)
    words = [word.partition("=")[::2] for word in file.read_text().split()]
    given = [(name.lower().encode(), BLOCKS[x.upper()].ggml) for name, x in words]
    library = ctypes.CDLL(os.environ["LLAMA_LIBRARY"])
    library.llama_model_quantize_default_params.restype = QuantizeParams
    params = library.llama_model_quantize_default_params()
    params.threads, params.ftype = 1, 7  # Q8_0, for what the file leaves out
    params.types = (TensorType * (len(given) + 1))(*given)
    arguments = (str(source).encode(), str(theirs).encode(), ctypes.byref(params))
    assert library.llama_model_quantize(*arguments) == 0
    export_gguf(model, ours, dtype=str(file))
    expected, found = count_file(ours), count_file(theirs)
    assert {name: x.dtype for name, x in found.items()} == {n: x.dtype for n, x in expected.items()}
    assert sum(x.nbytes for x in found.values()) == sum(x.nbytes for x in expected.values())
    assert abs(theirs.stat().st_size - ours.stat().st_size) < 1000  # their header has more entries


def test_the_choice_is_the_best_of_all(monkeypatch):
    """Against every combination, on random costs that do not fall with the size."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        options = [
            [(int(rng.integers(1, 9)) * 32, float(rng.random())) for _ in range(rng.integers(1, 5))]
            for _ in range(5)
        ]
        combinations = [list(x) for x in itertools.product(*map(range, map(len, options)))]

        def weigh(picks, options=options):
            pairs = [one[i] for one, i in zip(options, picks, strict=True)]
            return sum(size for size, _ in pairs), sum(cost for _, cost in pairs)

        least = sum(min(size for size, _ in one) for one in options)
        for budget in (least - 1, least, least + 97, least + 300, 10_000):
            fits = [weigh(x)[1] for x in combinations if weigh(x)[0] <= budget]
            found = solve(options, budget)
            if not fits:
                assert found is None
                continue
            assert weigh(found)[0] <= budget
            np.testing.assert_allclose(weigh(found)[1], min(fits))
    monkeypatch.setattr("kdjax.evaluation.choice._MOST_UNITS", 7)  # sizes are rounded up
    assert weigh(solve(options, least + 300))[0] <= least + 300


def find_kl(model, other, batches):
    """The mean KL of a model's from another one's logits, which whole programs compute."""
    total = count = 0.0
    for batch in batches:
        t, s = (
            np.asarray(jax.nn.log_softmax(x.logits(batch["tokens"])), np.float64)
            for x in (model, other)
        )
        kl = (np.exp(t) * (t - s)).sum(-1)
        total, count = total + (kl * batch["weights"]).sum(), count + batch["weights"].sum()
    return total / count


def test_costs_are_the_kl_of_one_exchanged_matrix(model, batches, costs):
    """Against logits, in float64, of a tree in which NumPy has put the rounded matrix."""
    assert costs.keys() == list_matrices(model.spec).keys()
    for name, path, place, dtype in (
        ("blk.1.ffn_up.weight", ("blocks", "mlp", "up", "weight"), 1, "Q4_0"),
        ("token_embd.weight", ("embed",), None, "Q4_0"),
    ):
        flat = {k: np.array(v) for k, v in flatten_dict(model.params).items()}
        matrix = flat[path] if place is None else flat[path][place]
        matrix[...] = np.asarray(decode(encode(matrix, dtype), dtype))
        other = model.replace(params=measuring.unflatten_dict(flat))
        np.testing.assert_allclose(costs[name][dtype], find_kl(model, other, batches), rtol=2e-3)
        assert costs[name]["Q8_0"] < costs[name][dtype]


@pytest.mark.parametrize("shape", cases("tiny-gemma", slow=["tiny-delta"]))
def test_a_cost_computes_no_layer_before_its_own(shape, batches, tmp_path, monkeypatch):
    """Delta nets and attention, local and global layers: the KL is the whole program's."""
    write_random_gguf(tmp_path / "m.gguf", SHAPES[shape])
    model, ran = kdjax.load(tmp_path / "m.gguf", dtype="float32"), []
    comparison, layers = Comparison(model, batches), model.spec.num_layers
    comparison.start(model.params, 0)  # the inputs of all layers
    run = measuring.run_layer
    monkeypatch.setattr(measuring, "run_layer", lambda *x: (ran.append(x[2]), run(*x))[1])
    for first in range(layers):
        parts = list_matrices(model.spec)[f"blk.{first}.ffn_down.weight"]
        flat = flatten_dict(model.params)
        for path, place, _ in parts:
            flat[path] = flat[path].at[place].set(round_matrices(flat[path][place], "Q4_0"))
        params = measuring.unflatten_dict(flat)
        found = comparison.read(comparison.start(params, first))
        assert len(ran) == (layers - first) * len(batches)
        ran.clear()
        whole = find_kl(model, model.replace(params=params), batches)
        assert whole > 1e-6
        np.testing.assert_allclose(found.kl, whole, rtol=1e-3)
        assert comparison.measure(params) == found
        ran.clear()
    assert comparison.read(comparison.start(model.params, 1)).kl == 0


def test_costs_are_kept_and_go_on(model, batches, costs, tmp_path, monkeypatch):
    file = CostFile(tmp_path / "costs.json", {"model": "aa"})
    assert file.read() == {}
    monkeypatch.setattr(measuring, "_SAVE_SECONDS", 0.0)
    comparison, done = Comparison(model, batches), []
    start = comparison.start

    def stop(*args):
        done.append(1)
        if len(done) > 9:
            raise KeyboardInterrupt
        return start(*args)

    monkeypatch.setattr(comparison, "start", stop)
    with pytest.raises(KeyboardInterrupt):
        measure_costs(comparison, {}, file.read(), file.write)
    known = file.read()
    assert 0 < sum(map(len, known.values())) < 10
    monkeypatch.setattr(comparison, "start", lambda *args: (done.append(2), start(*args))[1])
    assert measure_costs(comparison, {}, known, file.write) == file.read() == costs
    total = sum(map(len, costs.values()))
    assert done.count(2) == total - sum(map(len, known.values()))
    with pytest.raises(UserError, match=r"found costs of model 'aa', now 'bb'"):
        CostFile(file.path, {"model": "bb"}).read()
    for cost in (-1e-9, np.nan, np.inf, True):
        file.write(known | {"damaged": {"Q8_0": cost}})
        with pytest.raises(UserError, match=f"found a cost of {cost} for damaged in Q8_0"):
            file.read()


def test_the_chosen_types_lose_less_than_the_recipe_at_its_bytes(model, batches, costs):
    spec, comparison = model.spec, Comparison(model, batches)
    recipe = Mixture.named("q4_0", spec)
    chosen = choose_mixture(costs, spec, recipe.nbytes)
    assert chosen.nbytes <= recipe.nbytes
    first, second = (
        comparison.measure(round_params(model.params, x, {})) for x in (recipe, chosen)
    )
    assert second.kl < first.kl
    parts = comparison.read_batches(comparison.start(round_params(model.params, chosen, {})))
    counts = [x.positions for x in parts]
    assert sum(counts) == second.positions and len(parts) == len(batches)
    for name in ("kl", "agreement"):
        mean = np.average([getattr(x, name) for x in parts], weights=counts)
        assert mean == pytest.approx(getattr(second, name), rel=1e-5)
    least, most = bound_bytes(spec)
    assert choose_mixture(costs, spec, least).nbytes == least
    assert choose_mixture(costs, spec, most).nbytes <= most
    with pytest.raises(UserError, match="smallest mixture has"):
        choose_mixture(costs, spec, least - 1)


GRIDDED = ["IQ3_S", "IQ3_XXS", "IQ2_S"]  # several columns are rounded at once


@pytest.mark.parametrize("dtype", cases("Q4_0", slow=["IQ4_XS", *GRIDDED]))
def test_rounding_by_hessians_loses_less_of_the_output(model, dtype):
    """The output's error, by float64; masters and scales round to what was returned."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 40)) @ rng.normal(size=(40, 256)) + rng.normal(size=(2000, 256)) / 4
    w = rng.normal(size=(24, 256)).astype(np.float32)
    hessian = jnp.asarray((x.T @ x).astype(np.float32))

    def lost(numbers):
        return np.linalg.norm(x @ (np.asarray(numbers, np.float64) - w).T)

    plain = decode(encode(w, dtype, np.diag(hessian)), dtype)
    masters, scales, rounded = gptq.round_matrix(jnp.asarray(w), hessian, hessian, dtype)
    again = gptq.decode_fields(gptq.encode_fields(masters, dtype, scales), dtype)
    np.testing.assert_array_equal(again, rounded)
    assert lost(rounded) < 0.7 * lost(plain), (dtype, lost(rounded) / lost(plain))


def test_memory_of_rounding_is_counted(model):
    """A plan counts for a stage what its program takes, of which squares are the most."""
    spec = dataclasses.replace(model.spec, mlp_size=2048)
    w, square = (jax.ShapeDtypeStruct((n, 2048), jnp.float32) for n in (64, 2048))
    program = gptq.round_matrix.lower(w, square, square, "Q5_K").compile()
    found = program.memory_analysis()
    takes = found.temp_size_in_bytes + found.argument_size_in_bytes
    assert 0.75 * gptq.count_rounding_bytes(spec) < takes < gptq.count_rounding_bytes(spec)


def test_rounding_makes_up_for_inputs_that_rounding_changed():
    """Inputs that lost a part of two directions: the exact outputs, by float64, are nearer."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 64)) @ rng.normal(size=(64, 64)) / 8
    changed = x - 0.4 * x[:, :2] @ rng.normal(size=(2, 64)) / 8
    w = rng.normal(size=(24, 64)).astype(np.float32)
    hessian, cross = (jnp.asarray((y.T @ changed).astype(np.float32)) for y in (changed, x))

    def lost(cross):
        rounded = gptq.round_matrix(jnp.asarray(w), hessian, cross, "Q8_0")[2]
        return np.linalg.norm(changed @ np.asarray(rounded, np.float64).T - x @ w.T)

    # Half of the way: of a change that the inputs still tell, half of the outputs' is left.
    assert lost(cross) == pytest.approx(0.5 * lost(hessian), rel=0.05)


@pytest.mark.parametrize("first, tied", [(1.0, True), (1.1, True), (1.1, False)])
def test_a_stage_reads_what_the_stages_before_it_made(model, batches, monkeypatch, first, tied):
    """Stand-ins for the rounding: with a first matrix of other numbers later inputs differ.

    A head that is the embedding, too, makes up for none of it.
    """
    differs, model = [], model if tied else repeat_embedding(model, 0.01)

    def stand_in(w, hessian, cross):
        differs.append(not np.array_equal(hessian, cross))
        return w, (), w * (first if len(differs) == 1 else 1)

    programs = collections.defaultdict(lambda: stand_in)
    monkeypatch.setattr(gptq, "_compile_all", lambda *_: programs)
    gptq.round_model(model, batches, Mixture.named("q4_0", model.spec))
    later = 7 * model.spec.num_layers - 3  # q, k and v of the first layer read the same
    assert differs == [False] * 3 + [first != 1] * later + [not tied]


def test_a_stack_is_made_when_the_layers_of_those_before_it_are_gone(model, batches, monkeypatch):
    """All layers next to all stacks took 5 GB more than was planned, of a 1.5B."""
    made, alive, stack = [], [], jnp.stack

    def stand_in(w, hessian, cross):
        masters = w + 1
        made.append(weakref.ref(masters))
        return masters, (), w

    def watch(arrays):
        alive.append(sum(ref() is not None for ref in made))
        return stack(arrays)

    programs = collections.defaultdict(lambda: stand_in)
    monkeypatch.setattr(gptq, "_compile_all", lambda *_: programs)
    monkeypatch.setattr(gptq.jnp, "stack", watch)
    gptq.round_model(model, batches, Mixture.named("q4_0", model.spec))
    layers = model.spec.num_layers
    # The layer that was rounded last has a name as well; the head stays.
    gone = [len(made) - count for count in alive]
    assert all(
        count in (n, n - 1) for n, count in zip(range(0, 7 * layers, layers), gone, strict=True)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_rounded_by_what_it_reads(model, batches, monkeypatch, tied):
    """In parts of its rows as at once; its output, by float64, loses less than by importance."""
    model = model if tied else repeat_embedding(model, 0.01)
    path = ("embed",) if tied else ("head",)
    types = {x: ("Q4_0",) for x in (("embed",), path)}
    mixture = Mixture(model.spec, tuple(types.items()))
    masters, kept = gptq.round_model(model, batches, mixture)
    # Of an embedding that is no head the search's are added.
    assert kept.keys() == {(*path, "Q4_0")}
    monkeypatch.setattr(gptq, "_ROWS", 150)  # of 320: three parts of 107
    parts, _ = gptq.round_model(model, batches, mixture)
    near = np.isclose(parts[path[0]], masters[path[0]], rtol=1e-3, atol=1e-5)
    assert near.mean() > 0.998  # but for numbers half of the way between two others
    form = kdjax.Rounded("q4_0").choose_types(model.spec)
    form = dataclasses.replace(form, types=mixture.types)
    columns = [[jnp.asarray(x[n]) for n in ("tokens", "segment_ids", "positions")] for x in batches]
    read = np.concatenate([model.functions.hidden(model.params, *x) for x in columns])
    read = np.asarray(read, np.float64).reshape(-1, model.spec.hidden_size)
    diagonal = np.square(read).mean(0)[None].astype(np.float32)
    weighed = dataclasses.replace(form, importance={path: diagonal})
    exact = np.asarray(model.params[path[0]], np.float64)

    def lost(kept, masters):
        seen = np.asarray(form.see({}, kept, masters)[path[0]], np.float64)
        return np.linalg.norm(read @ (seen - exact).T)

    complete = form.complete(masters, kept)
    assert set(complete) == {x for (x,) in types}
    found = lost(complete, masters)
    assert found < 0.8 * lost(weighed.begin({}, model.params), model.params)


@pytest.mark.slow
def test_all_layers_are_rounded_by_hessians_and_a_run_begins_with_them(
    model, models, batches, tmp_path
):
    mixture = Mixture.named("q4_0,blocks/mlp/up=Q5_0", model.spec)
    masters, kept = gptq.round_model(model, batches, mixture)
    form = kdjax.Rounded("q4_0,blocks/mlp/up=Q5_0").choose_types(model.spec)
    rest = tuple((path, kinds) for path, kinds in form.types if (*path, kinds[0]) not in kept)
    assert not rest
    wanted = jax.eval_shape(form.begin, {}, model.params)
    found = jax.tree.map(lambda x: x.shape, measuring.unflatten_dict(kept))["blocks"]
    assert found == jax.tree.map(lambda x: x.shape, wanted)["blocks"]
    file, complete = tmp_path / "start.npz", form.complete(masters, kept)
    write_start(file, masters, complete)
    loss, rate = kdjax.KDLoss(kdjax.forward_kl, 1.0, 0.0), optax.sgd(0.1)
    started = kdjax.Rounded(form.text, start=str(file))
    read = started.draw(kdjax.open_checkpoint(models / "student.gguf"), 0)

    def begin(form):
        step = kdjax.make_step(model, model, loss, rate, form=form, allow_degenerate=True)
        return step.see(step.init(jax.tree.map(jnp.asarray, read)))

    jax.tree.map(np.testing.assert_array_equal, begin(started), form.see({}, complete, masters))
    with pytest.raises(UserError, match="found scales of another model or of other block types"):
        begin(dataclasses.replace(started, text="q5_0"))
    with pytest.raises(UserError, match="found masters of another model"):
        started.draw(kdjax.open_checkpoint(models / "teacher.gguf"), 0)


def test_files_that_are_no_start_are_refused(tmp_path):
    """In one line, by the look before a run and by both readers."""
    one = {"norm": np.ones(4, np.float32)}
    file, array = tmp_path / "start.npz", io.BytesIO()
    write_start(file, one, {"embed": {"Q8_0": (one["norm"], np.zeros(4, np.uint16))}})
    assert read_masters(file).keys() == {("norm",)}
    assert [x.dtype for x in read_scales(file)["embed", "Q8_0"]] == [np.float32, np.uint16]
    with pytest.raises(MissingFileError, match=r"expected masters and scales .* Did you mean"):
        check_start(tmp_path / "start.npy")
    np.save(array, one["norm"])
    for number, data in enumerate((b"", b"# text", array.getvalue(), file.read_bytes()[:-100])):
        (tmp_path / f"{number}.npz").write_bytes(data)
        for read in check_start, read_masters, read_scales:
            with pytest.raises(UserError, match=r"^.*npz: found what cannot be read \(.*shrink.$"):
                read(tmp_path / f"{number}.npz")
    whole = file.read_bytes()
    directory = whole.index(b"PK\1\2")
    for at, value in (
        (directory + 6, 173),  # a later version of zip
        (directory + 8, 1 << 6),  # encrypted
        (directory + 45, 255),  # an array that begins before the file
        (whole.index(b"PK\5\6") + 15, 255),  # so does the directory
    ):
        data = bytearray(whole)
        data[at] = value
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"found what cannot be read \(.*shrink.$"):
            read_masters(file)
    file.write_bytes(whole.replace(one["norm"].tobytes(), bytes(16), 1))
    with pytest.raises(UserError, match=r"found what cannot be read \(Bad CRC-32"):
        read_masters(file)


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        lines = (f"def f{i}_{j}(x):\n    return x * {i} + {j}\n" for j in range(12))
        (folder / f"a{i}.py").write_text("".join(lines))
    return folder


def run(models, text, tmp_path, *flags):
    where = [str(models / "student.gguf"), f"--out={tmp_path}/small.gguf", f"--text={text}"]
    sizes = ["--seq-len=32", "--batch-size=2", "--rows=2", "--heldout=" + str(text / "a3*.py")]
    given = {flag.partition("=")[0]: flag for flag in [*where, *sizes, *flags]}  # the last counts
    return shrink.main([*given.values()])


@pytest.fixture
def exact(models, tmp_path):
    """A folder with the student in F32, so that a smaller file exists."""
    folder = tmp_path / "models"
    folder.mkdir()
    student = kdjax.load(models / "student.gguf", dtype="float32")
    export_gguf(student, folder / "student.gguf")
    return folder


def test_sizes_that_no_file_can_have_are_refused(exact, text, tmp_path, capsys, monkeypatch):
    """Both figures are said; nothing is loaded or made."""
    monkeypatch.setattr(shrink, "_RECIPES", ("q4_0", "q5_0", "q8_0"))
    monkeypatch.setattr(shrink, "load_model", lambda *_, **__: pytest.fail("loaded"))
    for flag, message in (
        ("--size=10kB", r"size of [\d.,-]+ MB; the smallest mixture of types .* has [\d.]+ MB"),
        ("--size=900MB", r"size of 900.0 MB; the source .* has [\d.]+ MB, which is no larger"),
    ):
        assert run(exact, text, tmp_path, flag) == 2
        assert re.search(message, capsys.readouterr().err), flag
    with monkeypatch.context() as patch:
        for name in ("_TYPES_256", "_TYPES_32"):
            patch.setattr(choice, name, ("Q2_K",))
        assert run(exact, text, tmp_path, "--size=10kB") == 2
        said = capsys.readouterr().err
        assert re.search(r"\d\), of which \d+ matrices stay F16: no block type fits rows of", said)
    assert run(exact, text, tmp_path, "--bits=2") == 2
    bits = re.search(r"has [\d.]+ MB \((--bits=[\d.]+)\)\. Raise", capsys.readouterr().err)
    assert run(exact, text, tmp_path, "--plan", "--no-train", bits[1]) == 0
    capsys.readouterr()
    assert run(exact, text, tmp_path, "--plan", "--no-train", "--bits=6") == 0
    said = capsys.readouterr().out
    assert re.search(
        r"small.gguf: at most 0.\d MB, compared with q5_0\ncosts: 45 passes of 64", said
    )
    assert "\narrays of importance, costs and GPTQ: about 0.0 GB" in said
    assert not (tmp_path / "small.shrink").exists()


BITS = "--bits=6"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--like=q9"], "error: found --like=q9; expected one of "),
        (["--size=-5MB"], "--size=-5MB: expected a size above 0"),
        ([f"--size={'9' * 400}"], "expected a size above 0"),
        ([BITS, "--learning-rate=0"], "--learning-rate=0 must be above 0"),
        (["--bits=nan"], "argument --bits: found 'nan'; expected a finite number"),
        (["--bits=inf"], "argument --bits: found 'inf'; expected a finite number"),
        (["--bits=x"], "argument --bits: found 'x'; expected a finite number"),
        (["--bits=1e308"], "error: found --bits=1e+308; expected more than 0, at most 32"),
        (["--bits=0"], "error: found --bits=0; expected more than 0, at most 32"),
        ([BITS, "--text="], "argument --text: found ''; expected folders, globs or files"),
        ([BITS, "--text=own,none/"], "error: none/: no file found"),
        ([BITS, "--heldout=none/"], "error: none/: no file found"),
        ([BITS, "--costs=none.json"], "none.json: No such file"),
        ([BITS, "--costs=no.json"], "no.json: found no costs of format 1; expected"),
        ([BITS, "--costs=nan.json"], "nan.json: found a cost of nan for a in Q8_0; expected"),
        ([BITS, "--costs=iq1.json"], "iq1.json: found a cost of 0.1 for a in IQ1_S; expected"),
        ([BITS, "--fields=x"], "as in messages=conversations,role=from,content=value. `kdjax"),
        ([BITS, "--costs=less.json"], "less.json: found a cost of -1e-09 for a in Q8_0; expected"),
        ([BITS, "--costs=cut.json"], "expected a JSON object. Name another, or remove it."),
        ([BITS, "--text=own:x"], "error: found own:x; expected 2 texts or more, such as own:64."),
        ([BITS, "--out=a.safetensors"], "error: a.safetensors: expected a name that ends in .gguf"),
        ([BITS, "--plan", "--out=a"], "error: a: expected a name that ends in .gguf. Add the"),
        ([BITS, "--out=a.gguf", "--work=./a.gguf"], "a.gguf is where the parts are stored. Give"),
        ([BITS, "--out=notes.gguf"], "notes.md is there, where the card of notes.gguf is written"),
    ],
)
def test_what_flags_say_wrong_is_refused_before_the_model_is_opened(
    flags, message, models, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no.json").write_text('{"format": 1, "costs": {"a": 3}}')
    for name, costs in (
        ("nan", '{"Q8_0": NaN}'),
        ("less", '{"Q8_0": -1e-9}'),
        ("iq1", '{"IQ1_S": 0.1}'),
    ):
        (tmp_path / f"{name}.json").write_text(f'{{"format": 1, "costs": {{"a": {costs}}}}}')
    (tmp_path / "cut.json").write_text('{"format": 1, "costs": {"a')
    (tmp_path / "notes.md").write_text("# notes.gguf\n\nOf a user.\n")
    monkeypatch.setattr(shrink, "open_checkpoint", lambda _: pytest.fail("opened"))
    assert run(models, text, tmp_path, *flags) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


def test_what_would_fail_late_is_refused_before_a_model_is_read(
    exact, text, tmp_path, capsys, monkeypatch
):
    """A file that would replace its source, and rows beyond the context."""
    monkeypatch.setattr(shrink, "started", lambda *_, **__: pytest.fail("started"))
    source = exact / "student.gguf"
    before = source.read_bytes()
    for flags, message in (
        ([f"--out={source}", "--overwrite"], f"error: {source} is what the command reads"),
        (["--seq-len=99999"], "--seq-len=99999: the model has "),
    ):
        assert run(exact, text, tmp_path, BITS, *flags) == 2
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == 1
    assert source.read_bytes() == before


def test_a_tokenizer_that_no_gguf_file_has_is_refused_before_a_model_is_read(
    exact, text, tmp_path, capsys, monkeypatch
):
    def refuse(checkpoint):
        raise UserError(f"{checkpoint}: odd")

    monkeypatch.setattr(shrink, "check_gguf_tokenizer", refuse)
    monkeypatch.setattr(shrink, "load_model", lambda *_, **__: pytest.fail("loaded"))
    for more in ("--plan", "--no-train"):
        assert run(exact, text, tmp_path, BITS, more) == 2
        assert capsys.readouterr().err.splitlines()[-1] == "error: student.gguf: odd"
    assert not (tmp_path / "small.shrink").exists()


@pytest.mark.parametrize("plan", [(), ("--plan",)], ids=["file", "plan"])
def test_what_the_export_says_of_a_tokenizer_is_said_once(
    plan, exact, text, tmp_path, capsys, monkeypatch
):
    """At the start by a plan alone, which exports nothing."""
    log = logging.getLogger("kdjax")
    monkeypatch.setattr(shrink, "check_gguf_tokenizer", lambda _: log.warning("other spaces"))
    assert run(exact, text, tmp_path, "--size=10kB", *plan) == 2
    said = capsys.readouterr().err
    assert "the smallest mixture" in said and said.count("other spaces") == len(plan)


def test_too_few_documents_are_refused_with_what_the_command_takes(
    exact, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(shrink, "load_model", lambda *_, **__: pytest.fail("loaded"))
    rows = f"--config.data.cache_dir={tmp_path}/rows"
    assert run(exact, text, tmp_path, BITS, f"--text={text}/a1.py", "--heldout=", rows) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    for advice in ("nearly always leave one; shrink: --text)", "data.heldout (shrink: --heldout)"):
        assert advice in said
    held = f"--heldout={text}/a1.py"
    assert run(exact, text, tmp_path, BITS, f"--text={text}/a1.py", held, rows) == 2
    both = "all of data.train (--text) is also in data.heldout (--heldout)."
    assert capsys.readouterr().err.splitlines()[-1].endswith(both)


@pytest.mark.parametrize("name", ["small.gguf", "own"])
def test_a_model_with_numbers_that_are_not_finite_is_refused_before_it_works(
    name, models, text, tmp_path, capsys, monkeypatch
):
    """A row that no text reads, so that importance and costs would be numbers."""
    student = kdjax.load(models / "student.gguf", dtype="float32")
    odd = jax.tree.map(np.array, student.params)
    odd["embed"][-1, 3] = np.nan
    monkeypatch.setattr(shrink, "load_model", lambda *_, **__: student.replace(params=odd))
    for part in ("measure_importance", "measure_costs"):
        monkeypatch.setattr(shrink, part, lambda *_, **__: pytest.fail("worked"))
    monkeypatch.setattr(own_text.WrittenAnswers, "write", lambda *_, **__: pytest.fail("wrote"))
    source = tmp_path / "exact"
    source.mkdir()
    export_gguf(student, source / "student.gguf")
    words = [f"--text=own,{text}"] if name == "own" else []
    assert run(source, text, tmp_path, BITS, "--no-train", *words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: student.gguf: found 1 numbers of " in last
    assert " in token_embd.weight that are not" in last


def test_a_home_that_takes_no_rows_is_named_with_the_flag_for_others(
    exact, text, tmp_path, capsys, monkeypatch
):
    (home := tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(shrink._Work, "measure_importance", lambda _: (_ for _ in ()).throw(Killed))
    assert run(exact, text, tmp_path, BITS) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    flag = "--config.data.cache_dir="
    assert last == f"error: {home} is no folder; expected one. Name another place: {flag}DIR."
    with pytest.raises(Killed):
        run(exact, text, tmp_path, BITS, f"{flag}{tmp_path}/rows")
    assert list((tmp_path / "rows").glob("*/meta.json"))


@pytest.mark.parametrize("plan", [(), ("--plan",)], ids=["file", "plan"])
def test_the_memory_is_set_before_the_head_is_compared(plan, exact, text, tmp_path, monkeypatch):
    """A comparison starts JAX, which then takes no settings of a GPU's memory."""
    order = []

    @contextlib.contextmanager
    def started(*_, **__):
        order.append("started")
        yield None

    def compare(*_):
        order.append("compared")
        raise UserError("seen")

    for where in (shrink, shrink.cluster):
        monkeypatch.setattr(where, "started", started)
    monkeypatch.setattr(shrink, "tie_head", compare)
    assert run(exact, text, tmp_path, "--bits=6", *plan) == 2
    assert order == ["started", "compared"]


@pytest.mark.parametrize("plan", [(), ("--plan",)], ids=["file", "plan"])
def test_flags_that_no_run_can_have_are_refused_before_anything_is_measured(
    plan, exact, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(shrink._Work, "__init__", lambda *_: pytest.fail("read"))
    assert run(exact, text, tmp_path, BITS, "--microbatches=3", *plan) == 2
    said = capsys.readouterr().err
    assert "found --batch-size=2 and --microbatches=3; expected parts with the same number" in said
    assert not (tmp_path / "small.shrink").exists()


@pytest.mark.slow
def test_costs_of_another_call_take_no_start_of_another_text(exact, text, tmp_path, monkeypatch):
    """Its types are equal; the work folder's start is of what an earlier call read."""
    begun = []

    def train(config, workdir, **_):
        begun.append((config.student.start, workdir.name))
        raise Killed

    monkeypatch.setattr(shrink, "distill", train)
    with pytest.raises(Killed):
        run(exact, text, tmp_path, BITS)
    costs = tmp_path / "costs.json"
    costs.write_bytes((tmp_path / "small.shrink" / "costs.json").read_bytes())
    for words in (f"--text={text}/a1*.py", f"--text={text}"):
        with pytest.raises(Killed):
            run(exact, text, tmp_path, BITS, f"--costs={costs}", words)
    assert begun[0] == begun[2] and not set(begun[0]) & set(begun[1])


def test_two_calls_do_not_share_a_work_folder(exact, text, tmp_path, capsys, monkeypatch):
    """The second would replace the first one's types; what a killed call left goes."""
    monkeypatch.setattr(shrink, "prepare", lambda *_: pytest.fail("read the text"))
    work = tmp_path / "small.shrink"
    work.mkdir()
    with locking(work / LOCK, ""):
        assert run(exact, text, tmp_path, BITS) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"^error: .*small.shrink is in use by process .*give another --work\.$", said, re.M
    )
    left = work / ".costs.json.123.tmp"
    left.touch()
    with pytest.raises(pytest.fail.Exception):
        run(exact, text, tmp_path, BITS)
    assert not left.exists() and not (work / LOCK).exists()


@pytest.mark.parametrize("text", ['{"step', "[1.0]", "{}", '{"step": 0.0}', '{"step": NaN}'])
def test_a_damaged_time_of_a_step_is_refused(text, tmp_path, monkeypatch):
    (tmp_path / "run-1.pace.json").write_text(text)
    (tmp_path / "run-1" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(shrink, "saved_steps", lambda _: [0])
    work = SimpleNamespace(args=SimpleNamespace(seconds=10.0))
    with pytest.raises(
        UserError, match=r"run-1.pace.json: found a step.* Remove it and .*run-1, and"
    ):
        shrink._Work._fit_steps(work, kdjax.Config(), tmp_path / "run-1")
    (tmp_path / "run-1.pace.json").unlink()
    with pytest.raises(UserError, match=r"run-1: found a run without .*Name another --work"):
        shrink._Work._fit_steps(work, kdjax.Config(), tmp_path / "run-1")


@pytest.mark.parametrize(("saved", "steps"), [([], 5), ([0], 10)])
def test_a_time_counts_for_the_run_that_began_with_it(saved, steps, tmp_path, monkeypatch):
    """A call that was stopped before the run saved may have had another --batch-size."""
    (tmp_path / "run-1.pace.json").write_text('{"step": 1.0}')
    (tmp_path / "run-1" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(shrink, "saved_steps", lambda _: saved)

    def distill(*_, on_step, **__):
        for seconds in (9.0, 2.0, 2.0):  # the first compiles
            on_step(SimpleNamespace(seconds=seconds))
        return "finished"

    monkeypatch.setattr(shrink, "distill", distill)
    config, work = kdjax.Config(), SimpleNamespace(args=SimpleNamespace(seconds=10.0))
    shrink._Work._fit_steps(work, config, tmp_path / "run-1")
    assert config.train.steps == steps and not config.smoke.steps


@pytest.mark.parametrize("timed", [0, 1, 3])
def test_steps_that_were_stopped_while_they_were_timed_leave_no_time(timed, tmp_path, monkeypatch):
    """A signal ends the run of the steps, which returns; the median of no step is no number."""

    def distill(config, workdir, on_step, **__):
        assert config.smoke.steps > 3 and not workdir.exists()  # nothing is saved
        workdir.mkdir()
        for _ in range(timed):
            on_step(SimpleNamespace(seconds=1.0))
        return "interrupted"

    (tmp_path / "run-1.pace").mkdir()  # of a process that was killed

    monkeypatch.setattr(shrink, "distill", distill)
    work = SimpleNamespace(args=SimpleNamespace(seconds=10.0))
    with pytest.raises(KeyboardInterrupt):
        shrink._Work._fit_steps(work, kdjax.Config(), tmp_path / "run-1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [NonFiniteError, WriteError, KeyboardInterrupt])
def test_steps_that_failed_while_they_were_timed_leave_no_folder(error, tmp_path, monkeypatch):
    """But the batch of a loss that is not finite, which the message names."""

    def distill(config, workdir, **__):
        workdir.mkdir()
        (workdir / "metrics.jsonl").touch()
        if error is NonFiniteError:
            (workdir / "nonfinite_step_2.npz").write_text("rows")
        raise error(f"the batch is in {workdir}/nonfinite_step_2.npz")

    monkeypatch.setattr(shrink, "distill", distill)
    work = SimpleNamespace(args=SimpleNamespace(seconds=10.0))
    with pytest.raises(error) as raised:
        shrink._Work._fit_steps(work, kdjax.Config(), tmp_path / "run-1")
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    batch = tmp_path / "run-1" / "nonfinite_step_2.npz"
    assert left == [batch] * (error is NonFiniteError)
    assert not left or (batch.read_text() == "rows" and str(batch) in str(raised.value))


@pytest.mark.slow
def test_a_work_folder_may_be_the_folder_of_the_model(exact, text, tmp_path, capsys, monkeypatch):
    """The model stays, also if the file has its name; more rows than there are mean all of them."""
    monkeypatch.setattr(shrink, "_RECIPES", ("q4_0",))
    source, out = exact / "student.gguf", tmp_path / "made" / "student.gguf"
    before = source.read_bytes()
    flags = ["--like=q4_0", "--no-train", f"--work={exact}", f"--rows={10**12}"]
    assert run(exact, text, tmp_path, *flags, f"--out={out}") == 0
    assert source.read_bytes() == before
    assert run(exact, text, tmp_path, *flags, f"--out={exact}/small.gguf") == 0
    assert (exact / "small.gguf").read_bytes() == out.read_bytes() != before
    said = capsys.readouterr().out
    assert f"{exact}/small.gguf: " in said and f"\nnext:\n  kdjax generate {out} --prompt=" in said


@pytest.mark.slow
def test_the_command_makes_a_file_of_the_size(exact, text, tmp_path, capsys, monkeypatch):
    """Chosen types, importance, and the table; a second call measures nothing again."""
    monkeypatch.setattr(shrink, "_RECIPES", ("q4_0", "q5_0", "q8_0"))
    source = kdjax.open_checkpoint(exact / "student.gguf")
    assert run(exact, text, tmp_path, "--like=q5_0", "--no-train") == 0
    said = capsys.readouterr().out
    out, work = tmp_path / "small.gguf", tmp_path / "small.shrink"
    assert out.stat().st_size <= count_gguf_bytes(source, "q5_0")
    ends = r"([\d.]+) ± [\d.]+ \| [\d.]+ ± [\d.]+ \|$"
    rows = re.findall(rf"^\| (.+) \| [\d.]+ \| {ends}", said, re.M)
    weighed, gptq = "chosen types, with importance", "small.gguf, by GPTQ"
    assert [name for name, _ in rows] == ["q5_0, with importance", weighed, gptq]
    assert float(rows[2][1]) < float(rows[1][1]) <= float(rows[0][1])
    types = Mixture.named(str(work / "types.txt"), source.spec).tensors
    table = open_table(out)
    assert {name: table.info(name).dtype for name in types} == types
    card = out.with_suffix(".md").read_text()
    assert source.sha256 in card and "\n0 matrices have the type of the source" in card
    gain = (
        r"\nKL of small.gguf, by GPTQ, less the KL of q5_0, with importance: (-0\.\d+) ± [\d.e-]+\."
    )
    for page in (said, card):
        assert float(re.search(gain, page)[1]) == pytest.approx(
            float(rows[2][1]) - float(rows[0][1]), abs=1e-4
        )
    assert json.loads((work / "costs.json").read_text())["model"] == source.sha256
    flags = ["--like=q5_0", "--no-train", "--overwrite", f"--text={text}/a1*.py"]
    assert run(exact, text, tmp_path, *flags) == 2
    assert "found costs of importance" in capsys.readouterr().err
    monkeypatch.setattr(shrink, "measure_costs", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(
        shrink, "measure_importance", lambda *_, **__: pytest.fail("measured again")
    )
    assert run(exact, text, tmp_path, "--like=q5_0", "--no-train") == 2
    assert "is there already" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # as of a model with experts
        patch.setattr(shrink.gptq, "suits", lambda _: False)
        assert run(exact, text, tmp_path, "--bits=6", "--no-train", "--overwrite") == 0
        assert "\n| small.gguf, with importance | " in capsys.readouterr().out
        patch.setattr(shrink._Work, "weighed", "without importance")  # of which there is none
        assert run(exact, text, tmp_path, "--bits=6", "--no-train", "--overwrite") == 0
    names = re.findall(r"^\| (.+?) \| [\d.]+ \|", capsys.readouterr().out, re.M)
    assert [x.split(", ")[1] for x in names] == ["without importance"] * 3
    flags = ["--bits=6", "--no-train", "--overwrite", f"--heldout={text}/a1*.py"]
    assert run(exact, text, tmp_path, *flags) == 2
    assert "found costs of rows" in capsys.readouterr().err and out.exists()


@pytest.mark.parametrize(("experts", "said"), [(0, "with importance"), (4, "without importance")])
def test_of_experts_no_importance_is_measured_and_none_is_said(experts, said):
    work = shrink._Work.__new__(shrink._Work)
    work.checkpoint = SimpleNamespace(spec=SimpleNamespace(experts=experts))
    assert work.weighed == said
    if experts:
        assert work.measure_importance() == ""


@pytest.mark.parametrize(("gigabytes", "slots"), [(8, 8), (24, 64), (48, 256), (None, 256)])
def test_texts_are_written_as_many_at_a_time_as_fit(gigabytes, slots):
    """A 7B: 15.2 GB of weights, and 44 MB of keys and values for each text of 768 ids."""
    spec, room = open_header(SHAPES["7b"]).spec, gigabytes and gigabytes * 10**9
    devices = runtime.Devices("gpu", "", 1, room, None, None)
    assert shrink._fit_slots(spec, devices) == slots


@pytest.mark.parametrize("machine", ["--device=H100", "--device=cpu --memory=64GB"])
def test_a_plan_advises_what_the_command_takes(machine, exact, text, tmp_path, capsys, monkeypatch):
    """Fields of the run are no flags of it, and a machine's RAM is more than what a run may use."""
    monkeypatch.setattr("kdjax.training.compiled.ask_xla", lambda plan, *_: plan)
    flags = ["--like=q4_0", "--plan", "--batch-size=64", *machine.split()]
    assert run(exact, text, tmp_path, *flags) == 0
    _, _, said = capsys.readouterr().out.partition(": fits; the smallest ")
    first, second, *_ = said.splitlines()
    place = " of RAM" if "cpu" in machine else ""
    what = "machine" if place else "device"
    assert re.fullmatch(rf"{what} that it can go to has [0-9.]+{place} with", first)
    assert re.fullmatch(r" +--microbatches=\d+", second)


def test_a_plan_has_minutes_of_costs_and_of_own_text_apart(exact, text, tmp_path, capsys):
    flags = "--like=q5_0", "--no-train", "--plan", "--device=H100"
    said = []
    for sources in (text, f"own:4096,{text}"):
        assert run(exact, text, tmp_path, *flags, f"--text={sources}") == 0
        said.append(re.search(r"costs: .*", capsys.readouterr().out)[0])
    assert said[0] == said[1]
    # For another machine, which has the text.
    assert run(exact, text, tmp_path, *flags, "--text=none/", "--heldout=none/") == 0


def test_text_that_is_not_given_is_half_the_models_own(tmp_path):
    own = OwnText.find(shrink._parser().get_default("text"), tmp_path)
    assert own is not None and own.others == "python:flax,optax,numpy"


@pytest.mark.parametrize("text, least", [("own", 0.134), ("own:4096", 0.02), ("own,src/", 0.02)])
def test_text_of_the_model_alone_has_texts_to_judge_by(text, least, models, tmp_path):
    """None of a CPU's 32 is held out once in 100 times if 13.4% are: 0.866 ** 32 = 0.01."""
    args = shrink._parser().parse_args(["m.gguf", "--out=a.gguf", "--bits=4", f"--text={text}"])
    own = OwnText.find(text, tmp_path)
    args.own, args.sources, args.machine = own, text, None
    spec = kdjax.open_checkpoint(models / "student.gguf").spec
    share = shrink._make_config(args, spec, "q4_k_m").data.heldout_fraction
    assert share >= least and (share == 0.02) == (text != "own")


@pytest.mark.slow
def test_the_model_writes_the_text_that_own_stands_for(exact, text, tmp_path, capsys, monkeypatch):
    """A plan writes nothing and counts it; the command reads it with the other sources, once."""
    monkeypatch.setattr(shrink, "_RECIPES", ("q5_0",))
    monkeypatch.setattr(own_text, "LONGEST", 40)
    flags = ["--like=q5_0", "--no-train", f"--text=own:6,{text}"]
    assert run(exact, text, tmp_path, *flags, "--plan") == 0
    assert "self-generated text: at most 624 ids\n" in capsys.readouterr().out  # 6 x (40 + 128 / 2)
    assert not (tmp_path / "small.shrink").exists()
    seen, real, checks = [], shrink.prepare, []
    monkeypatch.setattr(shrink, "prepare", lambda data, *x: (seen.append(data), real(data, *x))[1])
    monkeypatch.setattr(shrink, "check_finite", lambda *x: checks.append(x))
    assert run(exact, text, tmp_path, *flags) == 0
    assert len(checks) == 1  # of three loads
    files = sorted((tmp_path / "small.shrink").glob("own-*.jsonl"))
    read = [str(file) for file in files if "questions" not in file.name]
    assert sorted(seen[-1].train.split(",")) == sorted([*read, str(text)]) and len(read) in (1, 2)
    assert f"on text of `own:6,{text}`" in (tmp_path / "small.md").read_text()
    monkeypatch.setattr(OwnText, "write", lambda *_: None)  # the files are read as they are
    assert run(exact, text, tmp_path, *flags, "--overwrite") == 0
    assert seen[-1] == seen[-2]


def test_a_head_that_repeats_the_embedding_is_counted_once(exact, text, tmp_path, capsys):
    """Published files of tied models store it twice; plan and costs of both files are one."""
    said = []
    student = kdjax.load(exact / "student.gguf", dtype="float32")
    twice, other = (repeat_embedding(student, change) for change in (0.0, 1.0))
    file = CostFile(tmp_path / "costs.json", {})
    file.write({name: {"Q8_0": 0.0} for name in list_matrices(student.spec)})
    for model, status in ((student, 0), (twice, 0), (other, 2)):
        export_gguf(model, exact / "student.gguf", overwrite=True)
        flags = "--plan", "--no-train", "--like=q5_0"
        assert run(exact, text, tmp_path, *flags, f"--costs={file.path}") == status
        if status:
            assert (
                "found no costs of output.weight (1 of 16 matrices); expected"
                in capsys.readouterr().err
            )
        assert run(exact, text, tmp_path, *flags) == 0
        out, err = capsys.readouterr()
        said.append(re.search(r"costs: (\d+) passes", out)[1])
        assert ("MB of q5_0; llama-quantize keeps both" in err) is (model is twice), err
    assert said[0] == said[1] != said[2]


def test_the_sizes_of_one_head_and_of_two_are_said(model, tmp_path, monkeypatch, caplog):
    sizes = {True: 2 * 10**9, False: 3 * 10**9}
    monkeypatch.setattr(shrink, "count_gguf_bytes", lambda x, _: sizes[x.spec.tied])
    export_gguf(repeat_embedding(model), tmp_path / "a.gguf", dtype="f32")
    with caplog.at_level("INFO", "kdjax"):
        shrink._tie_head(kdjax.open_checkpoint(tmp_path / "a.gguf"), "q5_0")
    assert "once, 2,000.0 MB of q5_0; llama-quantize keeps both, 3,000.0 MB" in caplog.text


@pytest.mark.parametrize(("gigabytes", "advice"), [(74, "--rows=4"), (40, "a larger device")])
def test_rows_that_fit_are_named(gigabytes, advice):
    """A 7B needs 79.4 GB at --rows=16, 75.2 at 8, 73.1 at 4, 72.5 at 1."""
    args = argparse.Namespace(rows=16, seq_len=1024, costs=None, train=False, rank=0)
    spec = open_header(SHAPES["7b"]).spec
    said = shrink._name_fewer_rows(args, spec, gigabytes * 10**9)
    assert said == f"take {advice}, or --costs of another"
    assert not shrink._name_fewer_rows(args, spec, 10**12)
    assert not shrink._name_fewer_rows(args, spec, None)


def test_a_7b_is_planned_from_its_header(tmp_path, capsys, monkeypatch):
    """7.6 G weights: 30.5 GB in float32 and stacks of 7.6 GB; an H200 has room, 40 GB have not."""
    monkeypatch.chdir(tmp_path)
    header = open_header(SHAPES["7b"])
    with open(header.table.paths[0], "wb") as file:  # sparse
        file.truncate(15_231_000_000)
    monkeypatch.setattr(shrink, "open_checkpoint", lambda _: header)
    # The header has no tokenizer: its matrices alone are counted.
    named = lambda x: x if isinstance(x, Mixture) else Mixture.named(x, header.spec)  # noqa: E731
    monkeypatch.setattr(shrink, "count_gguf_bytes", lambda _, types: named(types).nbytes)
    monkeypatch.setattr(shrink, "check_gguf_tokenizer", lambda _: None)
    plan = [str(header.table.paths[0]), "--out=small.gguf", "--like=q8_0", "--no-train", "--plan"]
    assert shrink.main([*plan, "--device=H200"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"most ([\d,.]+) MB.*\n.* about [\d.]+ minutes\n.* about ([\d.]+) GB", said)
    assert found, said
    assert float(found[1].replace(",", "")) == pytest.approx(7615.6 * 34 / 32, rel=0.001)
    assert 66 < float(found[2]) < 76
    names, file = list_matrices(header.spec), CostFile(tmp_path / "costs.json", {})
    file.write({name: {"Q8_0": 0.0} for name in names})
    assert shrink.main([*plan, "--device=H200", f"--costs={file.path}"]) == 0
    said = capsys.readouterr().out  # GPTQ: twice 30.5 GB, states of 4.1, and six squares of 1.4
    assert " passes of " not in said
    assert float(re.search(r" about ([\d.]+) GB", said)[1]) == pytest.approx(73.6, abs=0.1)
    assert shrink.main([*plan, "--device=H100", "--memory=40GB"]) == 2
    assert "that is too much" in capsys.readouterr().out
    assert shrink.main([*plan[:-1], "--device=H100"]) == 2
    assert "expected --plan with it" in capsys.readouterr().err


class Killed(BaseException):
    """Ends the process where it is, for all that the command can do about it."""


@pytest.mark.slow
def test_a_full_disk_or_a_kill_in_any_part_loses_nothing(
    exact, text, tmp_path, capsys, monkeypatch
):
    """One line, no file, and the next call goes on with what the parts before have stored."""
    monkeypatch.setattr(shrink, "_RECIPES", ("q4_0",))
    parts = (importance, "write_importance"), (CostFile, "write"), (Mixture, "write")
    for owner, name in (*parts, (shrink, "export_gguf"), (shrink, "_write_card")):
        real = getattr(owner, name)

        def full(*args, real=real, **kwargs):
            with no_file_beyond(100):
                return real(*args, **kwargs)

        def kill(*args, real=real, **kwargs):
            real(*args, **kwargs)
            raise Killed

        monkeypatch.setattr(owner, name, full)
        assert run(exact, text, tmp_path, "--like=q4_0", "--no-train") == NOT_WRITTEN, name
        said = capsys.readouterr().err
        assert len(re.findall(r"^error: .+ cannot be written: File too large\. ", said, re.M)) == 1
        assert "Traceback" not in said, said
        monkeypatch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            run(exact, text, tmp_path, "--like=q4_0", "--no-train")
        assert not (tmp_path / "small.gguf").exists()
        monkeypatch.setattr(owner, name, real)
        if owner is CostFile:  # each part is made once
            monkeypatch.setattr(
                shrink, "measure_importance", lambda *_, **__: pytest.fail("measured again")
            )
        if name == "export_gguf":
            monkeypatch.setattr(shrink, "measure_costs", lambda *_: pytest.fail("measured again"))
    assert run(exact, text, tmp_path, "--like=q4_0", "--no-train") == 0
    assert (tmp_path / "small.gguf").exists() and (tmp_path / "small.md").exists()


def repeat_embedding(student, change=0.0):
    """A tied model with its embedding, or a changed one, once more, as its head."""
    head = student.params | {"head": student.params["embed"] + change}
    spec = dataclasses.replace(student.spec, tied=False)
    functions = functional(spec, student.functions.compute)[0]
    return student.replace(params=head, spec=spec, functions=functions)


def store_twice(path, out, dtype):
    """Writes a file of a tied model with the embedding once more, as its head."""
    twice = repeat_embedding(kdjax.load(path, dtype="float32"))
    export_gguf(twice, out, dtype=dtype, overwrite=True)
    assert "output.weight" in open_table(out)


@pytest.mark.slow
def test_the_command_trains_and_goes_on(exact, text, tmp_path, capsys, monkeypatch):
    """From a file that stores its tied head twice, as some published ones do."""
    store_twice(exact / "student.gguf", exact / "student.gguf", "f32")
    monkeypatch.setattr(shrink, "_RECIPES", ("q4_0", "q5_0", "q8_0"))
    flags = ["--like=q4_0", "--steps=7"]
    with monkeypatch.context() as patch:
        real = shrink.write_start

        def full(*args):
            with no_file_beyond(100):
                real(*args)

        patch.setattr(shrink, "write_start", full)
        assert run(exact, text, tmp_path, *flags) == NOT_WRITTEN
        assert "cannot be written: File too large" in capsys.readouterr().err
        patch.setattr(shrink, "write_start", real)
        patch.setattr(
            shrink, "export_gguf", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        assert run(exact, text, tmp_path, *flags) == 75
    assert (
        not (tmp_path / "small.gguf").exists() and "same command goes on" in capsys.readouterr().out
    )
    monkeypatch.setattr(gptq, "round_model", lambda *_: pytest.fail("rounded again"))
    assert run(exact, text, tmp_path, *flags) == 0
    said = capsys.readouterr().out
    (start,), (receipt,) = (
        sorted((tmp_path / "small.shrink").glob(x)) for x in ("*.npz", "run-*/receipt.json")
    )
    config = json.loads(receipt.read_text())["config"]
    assert config["student"]["start"] == str(start)
    assert config["checkpoint"]["every"] == 3  # saved at 3, 6 and 7, each as large as the model
    names = re.findall(r"^\| (.+?) \| [\d.]+ \|", said, re.M)
    untrained = [f"{x}, with importance" for x in ("q4_0", "chosen types")]
    assert names == [*untrained, "small.gguf, trained"]
    made = kdjax.open_checkpoint(tmp_path / "small.gguf")
    assert made.spec.tied and "output.weight" not in made.table  # the matrix is there once
    again = ["--like=q4_0", "--steps=3", "--learning-rate=0.5", "--overwrite"]
    assert run(exact, text, tmp_path, *again) == 0  # in a run of its own
    assert "| small.gguf, untrained: no step was better |" in capsys.readouterr().out
    runs = sorted((tmp_path / "small.shrink").glob("run-*"))
    assert [x.name.split("-", 2)[2] for x in runs] == ["7steps", "rate0.5-3steps"]


@pytest.mark.parametrize(
    ("megabytes", "flags", "message"),
    [
        (1, "--batch-size=64", "to train all numbers takes 0.0. GB, adapters of rank 64 take"),
        (1, "--batch-size=64 --rank=16", "fit: adapters of rank 16 take"),
        (1, "--rank=0", "Leave --rank out to train adapters. Or give --no-train"),
        (14, "--batch-size=64", r"would fit with --microbatches=\d+ \(0.01 GB"),
        (14, "--batch-size=64 --rank=64", r"would fit with --microbatches=\d+ \(0.01 GB"),
        (9.5, "--batch-size=64", r"would fit with --rank=32 --microbatches=64 \(0.01 GB"),
    ],
)
def test_a_training_that_does_not_fit_is_refused_before_it_measures(
    megabytes, flags, message, exact, text, tmp_path, capsys, monkeypatch
):
    """In one line, with what would fit."""
    monkeypatch.setattr("kdjax.training.plan.GPU_OVERHEAD", 0)
    devices = runtime.Devices("gpu", "", 1, int(megabytes * 1e6), None, None)
    monkeypatch.setattr("kdjax.device.machines.device_summary", lambda: devices)
    monkeypatch.setattr(shrink, "load_model", lambda *_, **__: pytest.fail("loaded"))
    assert run(exact, text, tmp_path, "--like=q4_0", *flags.split()) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: this run does not fit: ") and "--config" not in said[-1]
    assert re.search(message, said[-1]) and "more than there are" in said[-1]
    assert not (tmp_path / "small.shrink").exists()


@pytest.mark.slow
def test_adapters_train_where_masters_do_not_fit(exact, text, tmp_path, capsys, monkeypatch):
    """The file has the numbers of the last step; a stopped call goes on, and says what trains."""
    monkeypatch.setattr(shrink, "_RECIPES", ("q4_0", "q5_0", "q8_0"))
    monkeypatch.setattr(shrink, "_RANK", 4)
    monkeypatch.setattr(gptq, "round_model", lambda *_: pytest.fail("GPTQ's masters have no base"))
    monkeypatch.setattr("kdjax.training.plan.GPU_OVERHEAD", 0)
    full, seen = "student, float32 masters", "student, rounded, "
    for memory, flag, status, parts in (
        ("8MB", "", 0, ["adapters, float32", f"{seen}bfloat16"]),
        ("8MB", "--rank=0", 2, ["error: this run does not fit", "more than there are. Leave"]),
        ("16MB", "--rank=0 --batch-size=64", 2, ["It would fit with --microbatches=32 (0."]),
        ("5MB", "", 2, ["adapters, float32", " too much; "]),  # the plan of what needs least
        ("20MB", "", 0, [full, f"{seen}float32"]),
        ("20MB", "--rank=2", 0, ["adapters, float32", f"{seen}bfloat16"]),
    ):
        flags = ["--plan", "--device=H100", f"--memory={memory}", *flag.split()]
        assert run(exact, text, tmp_path, "--like=q4_0", *flags) == status, flags
        said = "".join(capsys.readouterr())
        assert all(part in said for part in parts), (flags, said)
        assert "student, packed" not in said  # the teacher has these arrays
        assert "error" not in said or "--config" not in said  # flags that the command lacks
    assert run(exact, text, tmp_path, "--like=q4_0", "--rank=999") == 2
    assert "found rank 999 for adapters; expected 1 to" in capsys.readouterr().err
    config, real = [], shrink.distill
    monkeypatch.setattr(shrink, "distill", lambda *x, **y: (config.append(x), real(*x, **y))[1])
    flags = ["--like=q4_0", "--steps=6", "--rank=4"]
    with monkeypatch.context() as patch:
        patch.setattr(shrink, "read_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(exact, text, tmp_path, *flags) == 75
    assert run(exact, text, tmp_path, *flags) == 0
    assert "| small.gguf, trained by adapters of rank 4 |" in capsys.readouterr().out
    settings, workdir = config[-1]
    assert workdir.name.endswith("-rank4-6steps") and not list(workdir.parent.glob("start-*"))
    job = assemble(settings, workdir)
    with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
        state = checkpoints.restore(saved_steps(workdir)[-1], job.step.abstract, job.step.shardings)
    assert any(np.asarray(x).any() for k, x in flatten_dict(state.params).items() if k[-1] == "b")
    made = kdjax.load(tmp_path / "small.gguf", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, made.params, job.step.see(state))


@pytest.mark.slow
@needs_llama_cpp  # ggml rounds to types that kdjax does not write
def test_the_bench_leaves_the_lattice_and_takes_costs_of_ggml(models, text, tmp_path):
    """Numbers of the reference lie as far off as any; rows of the table are made once."""
    out = tmp_path / "mix"
    sizes = "seq-len=32 batch-size=2 cost-rows=2 heldout-rows=4 imatrix-rows=8 gptq-rows=8"
    sizes += " chunk-tokens=64 compute=float32 reference-steps=2 recipes=q5_0 gptq=q5_0"
    sizes += " wider=IQ3_S ggml=q5_0"
    flags = [f"--{flag}" for flag in f"{sizes} train=q5_0:1 start=gptq files".split()]
    held = tmp_path / "held"
    held.mkdir()
    for number in range(8):
        (held / f"{number}.txt").write_text(f"of the {number}th document a part " * 20)
    store_twice(models / "student.gguf", tmp_path / "twice.gguf", "q8_0,head=Q5_1")
    where = [f"--model={tmp_path}/twice.gguf", f"--text={text}", f"--out={out}"]
    where.append(f"--heldout={held}")
    assert mixtures.main([*where, *flags]) == 0
    lines = (out / "results.jsonl").read_text()
    rows = {row["name"]: row for row in map(json.loads, lines.splitlines())}
    assert len(rows) == 8 and all(row["kl"] >= 0 for row in rows.values())
    for name, row in rows.items():
        assert row["bytes"] <= rows["q5_0 recipe importance"]["bytes"], name
    chosen, wider = (rows[f"q5_0 {x} importance"]["sum of costs"] for x in ("chosen", "wider"))
    assert wider <= chosen and "IQ3_S" not in rows["q5_0 chosen importance"]["types"]
    measured = json.loads((out / "costs.json").read_text())["costs"]["blk.0.ffn_down.weight"]
    assert 1 < measured["IQ3_S"] / measured["Q4_0"] < 100
    reference = open_table(out / "reference.gguf")
    assert reference.info("blk.0.ffn_up.weight").dtype == "BF16"
    assert "output.weight" not in reference
    recipe, chosen = (rows[f"q5_0 {x} importance"]["types"] for x in ("recipe", "chosen"))
    assert sum(recipe.values()) == sum(chosen.values()) + 1
    assert mixtures.main([*where, *flags]) == 0
    assert (out / "results.jsonl").read_text() == lines
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32))
    noisy, size = mixtures._add_noise(x, "Q4_0", jax.random.key(0))
    assert 0.28 < float(size) < 0.3
    again = np.asarray(decode(encode(np.asarray(noisy), "Q4_0"), "Q4_0"))
    plain = np.asarray(decode(encode(np.asarray(x), "Q4_0"), "Q4_0"))
    assert np.linalg.norm(again - noisy) > 0.9 * np.linalg.norm(plain - x)
