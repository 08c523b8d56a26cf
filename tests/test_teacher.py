"""Teacher providers: the same numbers however the weights are kept, and what each keeps."""

import copy
import dataclasses
import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from toy_teacher import next_id_teacher

from kdjax.commands import generate
from kdjax.commands.parsing import apply_environment
from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.evaluation.target import open_target
from kdjax.formats import open_table
from kdjax.formats.blocks import BLOCKS, decode, decode_fields, split
from kdjax.formats.gguf import write_gguf
from kdjax.losses.chunked import HeadSpec
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import head_evaluation
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.loading import count_parameters
from kdjax.models.model import WEIGHTS, load_model, narrow_head
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import from_gguf
from kdjax.models.weights import Mixed, PackedMatrix
from kdjax.training.job import assemble
from kdjax.training.pair import align, open_pair
from kdjax.training.vocabulary import Vocabulary
from scripts.bench.synthetic import QWEN25_SHAPES, random_blocks, write_random_gguf


def model(path, weights, mesh=None):
    """Weights of bfloat16, computed with in float32."""
    placement = Placement.on(mesh or sharding.make_local_mesh(1))
    return load_model(
        open_checkpoint(path), weights=weights, compute_dtype="float32", placement=placement
    )


def logits(teacher, seed=0, rows=2, length=16):
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, 300, (rows, length)), jnp.int32)
    return np.asarray(teacher.logits(tokens))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Random teachers of 4 and 9 layers whose value and down projections mix Q4_K and Q6_K."""
    folder, paths = tmp_path_factory.mktemp("deep"), {}
    for layers in (4, 9):
        shape = QWEN25_SHAPES["tiny-teacher"]._replace(layers=layers)
        paths[layers] = folder / f"{layers}.gguf"
        write_random_gguf(paths[layers], shape)
    return paths


def as_llama(source, target):
    """The same tensors under the Llama family, whose GGUF rows of q and k are interleaved."""
    table = open_table(source)
    metadata = {key.replace("qwen2.", "llama."): value for key, value in table.metadata.items()}
    metadata["general.architecture"] = "llama"
    tensors = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    write_gguf(target, metadata, [t for t in tensors if not t[0].endswith(".bias")])


def as_dynamic(source, target):
    """The model's shape with every block type there is, in turn, as Unsloth's dynamic files mix."""
    table, rng = open_table(source), np.random.default_rng(0)
    types, tensors = itertools.cycle(name for name, b in BLOCKS.items() if b.elements > 1), []
    for name in table:
        info, data = table.info(name), table.raw(name)
        dtype = next(types) if len(info.shape) == 2 else info.dtype
        if dtype != info.dtype:
            blocks = math.prod(info.shape) // BLOCKS[dtype].elements
            data = random_blocks(rng, dtype, blocks, info.shape[1] ** -0.5)
        tensors.append((name, dtype, info.shape, data))
    write_gguf(target, dict(table.metadata), tensors)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_fields_are_the_same_bytes_and_numbers(name, rng):
    block = BLOCKS[name]
    raw = rng.integers(0, 256, (3, 5 * block.nbytes), dtype=np.uint8)
    fields = [np.asarray(field) for field in split(raw, name)]
    assert [f.shape for f in fields] == [(3, 5) if n == 2 else (3, 5, n) for n in block.fields]
    flat = [f.view(np.uint8).reshape(3, 5, n) for f, n in zip(fields, block.fields, strict=True)]
    np.testing.assert_array_equal(np.concatenate(flat, axis=-1).reshape(raw.shape), raw)
    whole = jax.eval_shape(lambda raw: decode_fields(split(raw, name), name), raw)
    assert whole.shape == (3, 5 * block.elements)


@pytest.mark.parametrize(
    "kind",
    [
        "mixed",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in ("dynamic", "BF16", "llama", "tied", "Q5_0")
        ),
    ],
)
def test_packed_gives_the_numbers_of_dense_bit_for_bit(models, deep, tmp_path, kind):
    path = deep[9]
    if kind == "llama":
        path = tmp_path / "llama.gguf"
        as_llama(deep[4], path)
    elif kind == "dynamic":
        path = tmp_path / "dynamic.gguf"
        as_dynamic(deep[4], path)
        used = {open_table(path).info(name).dtype for name in open_table(path)}
        assert used == {name for name, block in BLOCKS.items() if block.elements > 1} | {"F32"}
    elif kind != "mixed":
        path = tmp_path / "x.gguf"
        shape = QWEN25_SHAPES["tiny-student"]._replace(tied=kind == "tied")
        write_random_gguf(path, shape, recipe="q4_k_m" if kind == "tied" else kind.lower())
    lean, plain = model(path, "packed"), model(path, "dense")
    assert lean.vocab_size == plain.vocab_size
    gate = lean.params["blocks"]["mlp"]["gate"]["weight"]
    assert isinstance(gate, Mixed if kind == "dynamic" else PackedMatrix)
    assert isinstance(lean.params["blocks"]["mlp"]["down"]["weight"], Mixed) == (
        kind in ("mixed", "dynamic", "llama", "tied")
    )
    want = logits(plain)
    assert np.std(want) > 0.1
    np.testing.assert_array_equal(logits(lean), want)


def test_every_layer_reads_its_own_blocks(deep):
    """The published order scatters Q6_K over the layers; each layer must find its own."""
    teacher, table = model(deep[9], "packed"), open_table(deep[9])
    down = teacher.params["blocks"]["mlp"]["down"]["weight"]
    assert sorted(stack.block for stack in down.stacks) == ["Q4_K", "Q6_K"]
    for layer in range(9):
        name = f"blk.{layer}.ffn_down.weight"
        assert down.stacks[down.which[layer]].block == table.info(name).dtype
        read = jax.jit(Mixed.read)
        got = np.asarray(read(down, down.which[layer], down.slot[layer]))
        fields = split(table.raw(name), table.info(name).dtype)
        want = decode_fields(fields, table.info(name).dtype, jnp.bfloat16)
        np.testing.assert_array_equal(got, np.asarray(want))


def test_packed_keeps_the_bytes_of_the_file(deep):
    lean, table = model(deep[9], "packed"), open_table(deep[9])
    matrices = [table.info(n) for n in table if len(table.info(n).shape) == 2]
    vectors = sum(table.info(n).nbytes for n in table if len(table.info(n).shape) == 1)
    want = sum(info.nbytes for info in matrices) + vectors // 2  # float32 in the file, bf16 here
    indices = 2 * 2 * 9 * 4  # which and slot, of the two mixed stacks
    assert lean.resident_bytes == want + indices
    assert lean.resident_bytes < 0.35 * model(deep[9], "dense").resident_bytes
    assert "packed" in str(lean) and "GB resident, 384 head rows" in str(lean)


@pytest.mark.slow
def test_nothing_is_hoisted_out_of_the_layer_scan(deep):
    """Three times the layers must not need room for a single decoded layer more."""
    temporaries = {}
    for layers, path in deep.items():
        teacher = model(path, "packed")
        rows = [jnp.ones((1, 16), jnp.int32)] * 3
        compiled = jax.jit(teacher.functions.hidden).lower(teacher.params, *rows).compile()
        temporaries[layers] = compiled.memory_analysis().temp_size_in_bytes
    spec = spec_from_table(open_table(deep[4]))
    layer = (count_parameters(spec) - 2 * spec.vocab_size * spec.hidden_size) / spec.num_layers
    assert temporaries[4] > layer  # one decoded layer is there
    assert temporaries[9] - temporaries[4] < 0.1 * layer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "dynamic"])
def test_packed_on_a_mesh_equals_one_device(deep, tmp_path, kind):
    path = deep[4]
    if kind == "dynamic":
        path = tmp_path / "dynamic.gguf"
        as_dynamic(deep[4], path)
    alone = logits(model(path, "packed"), rows=4)
    mesh = sharding.make_mesh(2, 2, 2)
    spread = model(path, "packed", mesh=mesh)
    gate = spread.params["blocks"]["mlp"]["gate"]["weight"]
    gate = gate.stacks[0] if kind == "dynamic" else gate
    assert gate.fields[-1].addressable_shards[0].data.shape[1] == 512 // 2
    np.testing.assert_allclose(logits(spread, rows=4), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
# Untied and tied.
@pytest.mark.parametrize("which", ["teacher", "student"])
def test_truncated_is_the_first_columns(models, weights, which):
    whole = model(models / f"{which}.gguf", weights)
    cut = narrow_head(whole, 300)
    assert cut.vocab_size == 300
    assert cut.resident_bytes < whole.resident_bytes
    np.testing.assert_allclose(logits(cut), logits(whole)[..., :300], rtol=1e-5, atol=1e-5)
    assert narrow_head(whole, whole.vocab_size) is whole


@pytest.mark.parametrize("size", [0, -1, 385, 1_000_000])
def test_truncated_refuses_naming_both_sizes(models, size):
    whole = model(models / "teacher.gguf", "packed")
    with pytest.raises(UserError, match=rf"384 rows to cut to {size:,}; expected 1 to 384"):
        narrow_head(whole, size)


def test_truncation_renormalises_over_the_ids_that_are_left():
    """A fixture teacher's held-out figures by hand, cut from 8 ids to 6."""
    teacher = narrow_head(next_id_teacher(8, logit=2.0), 6)
    tokens = jnp.asarray([[0, 4, 7]], jnp.int32)  # favours 1 and 5; 0 after the last
    hidden = teacher.functions.hidden(teacher.params, tokens, tokens, tokens)
    student = jnp.zeros((1, 3, 2), jnp.float32), jnp.zeros((6, 2), jnp.float32)  # uniform
    spec = HeadSpec(KDLoss(), width=6, real_vocab=6, chunk_tokens=3)
    labels, weights = jnp.asarray([[1, 5, 3]], jnp.int32), jnp.ones((1, 3), jnp.float32)
    head = teacher.functions.head(teacher.params)
    sums = head_evaluation(*student, hidden, head, labels, weights, spec)
    p = np.exp([2.0, 0, 0, 0, 0, 0])
    p /= p.sum()
    np.testing.assert_allclose(sums.kl, 3 * np.sum(p * np.log(p * 6)), rtol=1e-5)
    np.testing.assert_allclose(sums.teacher_ce, -2 * np.log(p[0]) - np.log(p[1]), rtol=1e-5)


def test_fixture_favours_the_next_id():
    got = next_id_teacher(5, logit=3.0).logits(*[jnp.asarray([[0, 2, 4]], jnp.int32)] * 3)
    np.testing.assert_array_equal(np.argmax(got, -1), [[1, 3, 0]])
    np.testing.assert_array_equal(np.sort(got, -1)[0, 0], [0, 0, 0, 0, 3])


@pytest.mark.slow
def test_a_run_gives_the_same_figures_with_dense_and_packed_weights(tiny_config, tmp_path):
    figures = {}
    for weights in ("dense", "packed"):
        tiny_config.teacher.weights = weights
        job = assemble(tiny_config, tmp_path)
        assert weights in job.teacher.kind
        state = job.make_state()
        batch = next(job.eval_batches())
        figures[weights] = job.step.sum_evaluation(state.params, job.teacher.params, batch)
        assert job.teacher.vocab_size == 320  # the student's, of 384
    assert figures["dense"].kl > 0 and figures["dense"].count > 0
    chex.assert_trees_all_equal(figures["dense"], figures["packed"])


def test_the_environment_wins_over_the_config(tiny_config):
    tiny_config.teacher.weights = "dense"
    apply_environment(tiny_config, {"KDJAX_TEACHER_WEIGHTS": ""})
    assert tiny_config.teacher.weights == "dense"
    apply_environment(tiny_config, {"KDJAX_TEACHER_WEIGHTS": "packed"})
    assert tiny_config.teacher.weights == "packed"
    with pytest.raises(UserError, match=r"WEIGHTS='cuda': must be one of auto, dense, packed"):
        apply_environment(tiny_config, {"KDJAX_TEACHER_WEIGHTS": "cuda"})


@pytest.mark.parametrize(("student_rows", "teacher_rows"), [(384, 320), (320, 0), (0, 384)])
def test_vocabularies_of_impossible_sizes_name_both(models, student_rows, teacher_rows):
    from kdjax.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(models / "teacher.gguf")
    with pytest.raises(UserError) as error:
        align(student_rows, teacher_rows, tokenizer, tokenizer)
    shown = {f"{rows:,} rows" for rows in (student_rows, teacher_rows)}
    assert all(text in str(error.value) for text in shown)


def extended(models, *, tokens=(), types=(), merges=(), **changes):
    """The toy teacher's tokenizer with further tokens and merges, or other values."""
    metadata = dict(open_table(models / "teacher.gguf").metadata)
    lists = {"tokens": tokens, "token_type": types, "merges": merges}
    sizes = {"tokens": 305, "token_type": 305, "merges": None}
    for name, more in lists.items():
        key = f"tokenizer.ggml.{name}"
        metadata[key] = [*list(metadata[key])[: sizes[name]], *more]
    return from_gguf(metadata | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}, "x")


@pytest.mark.parametrize(
    ("more", "cut"),
    [
        (dict(), None),
        (dict(tokens=["<think>", "</think>"], types=[4, 3]), "2 special and 0 other .* '<think>'"),
        (dict(tokens=["ĠĠĠĠĠx"], types=[1]), "0 special and 1 other .* and 0 merges"),
        (
            dict(tokens=["zq", "<new>"], types=[1, 3], merges=["z q"]),
            "the teacher's 307 tokens begin with the student's 305; .* 'zq' on, and 1 merges",
        ),
    ],
)
def test_a_vocabulary_that_begins_the_teachers_is_accepted(models, caplog, more, cut):
    caplog.set_level("INFO", "kdjax")
    student, teacher = extended(models), extended(models, **more)
    assert align(320, 384, student, teacher) == Vocabulary(320, 305)
    logged = [r.getMessage() for r in caplog.records if "vocabulary:" in r.getMessage()]
    assert len(logged) == (cut is not None) and (cut is None or re.search(cut, logged[0]))
    if more:
        with pytest.raises(UserError, match="smaller than the student's"):
            align(320, 384, teacher, student)


def test_tokenizers_that_cut_text_differently_are_refused(models):
    plain = extended(models)
    merges, types = list(plain.merges), [1] * 302 + [3] * 3
    swapped = dataclasses.replace(plain, merges=(merges[1], merges[0], *merges[2:]))
    with pytest.raises(UserError, match=f"differ at merge 0: .*{re.escape(repr(merges[0]))}, the"):
        align(320, 384, plain, swapped)
    fewer = dataclasses.replace(plain, merges=tuple(merges[:-1]))
    with pytest.raises(UserError, match=f"has {len(merges)}, the teacher {len(merges) - 1}; expe"):
        align(320, 384, plain, fewer)
    with pytest.raises(UserError, match=f"{re.escape(repr(merges[-1]))} among them, which makes"):
        align(320, 384, fewer, plain)
    ordinary = extended(models, token_type=[*types[:304], 1])
    with pytest.raises(UserError, match=r"special ids: 304 \('.*'\) is a special token to the stu"):
        align(320, 384, plain, ordinary)
    with pytest.raises(UserError, match=r"304 \('.*'\) is one that merges make to the student"):
        align(320, 384, ordinary, plain)
    told_otherwise = extended(models, token_type=[*types[:304], 4])  # user-defined, not control
    assert align(320, 384, plain, told_otherwise) == Vocabulary(320, 305)


def retold(models, path, name="teacher", **changes):
    """A toy model's file with other tokenizer values."""
    table = open_table(models / f"{name}.gguf")
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    tensors = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    write_gguf(path, dict(table.metadata) | changes, tensors)
    return str(path)


def test_another_tokenizer_stands_for_one_that_cannot_be_read(
    tiny_config, models, tmp_path, caplog
):
    usual = open_pair(tiny_config)
    paths = {
        n: retold(models, tmp_path / f"{n}.gguf", n, pre="new") for n in ("teacher", "student")
    }
    for name, path in paths.items():
        config = copy.deepcopy(tiny_config)
        getattr(config, name).path = path
        with pytest.raises(
            UserError, match=r"'new'.*Name a .*: data.tokenizer of a config, --token"
        ):
            open_pair(config)
        config.data.tokenizer = str(models / "student.gguf")
        pair = open_pair(config)
        assert pair.vocabulary == usual.vocabulary
        assert pair.tokenizer.content_hash == usual.tokenizer.content_hash
        assert pair.student.tokenizer is pair.tokenizer
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert re.fullmatch(r"teacher.gguf: tokenizer not read; .*student.gguf .*: all 305 .*", warning)
    with pytest.raises(UserError, match="'new'"):
        open_target(paths["teacher"])
    opened = open_target(paths["teacher"], fallback=str(models / "student.gguf"))
    assert opened.checkpoint.tokenizer.content_hash == usual.tokenizer.content_hash
    tokens = list(open_table(models / "teacher.gguf").metadata["tokenizer.ggml.tokens"])
    tokens[3], tokens[4] = tokens[4], tokens[3]
    config = copy.deepcopy(tiny_config)
    config.teacher.path = retold(models, tmp_path / "x.gguf", pre="new", tokens=tokens)
    config.data.tokenizer = str(models / "student.gguf")
    with pytest.raises(UserError, match=r"x.gguf: found .* at id 3 of its vocabulary and "):
        open_pair(config)


@pytest.mark.slow
def test_generate_takes_the_tokenizer_that_the_message_asks_for(models, tmp_path, capsys):
    path = retold(models, tmp_path / "m.gguf", "student", pre="new")
    ask = [f"{path}@dense:float32", "--prompt=def f(", "--max-tokens=3"]
    assert (
        generate.main(ask) == 2
        and "--tokenizer of evaluate and generate" in capsys.readouterr().err
    )
    assert generate.main([*ask, f"--tokenizer={models}/student.gguf"]) == 0
    told = capsys.readouterr().out
    assert generate.main([f"{models}/student.gguf@dense:float32", *ask[1:]]) == 0
    assert capsys.readouterr().out == told


@pytest.mark.slow
def test_every_block_type_stays_in_its_blocks():
    """The bytes of a packed matrix are those of its file, and its numbers the decoded ones."""
    assert len(BLOCKS) == 28
    rng = np.random.default_rng(0)
    for name, block in BLOCKS.items():
        raw = rng.integers(0, 60, (4, 3 * block.nbytes), dtype=np.uint8)
        kept = PackedMatrix(split(raw, name), name, jnp.float32)
        assert sum(field.nbytes for field in kept.fields) == raw.nbytes
        numbers = np.asarray(jax.jit(decode, static_argnums=1)(raw, name))
        np.testing.assert_array_equal(jax.jit(PackedMatrix.decode)(kept), numbers)
        np.testing.assert_array_equal(jax.jit(PackedMatrix.decode)(kept[1:3]), numbers[1:3])


@pytest.mark.slow
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
