"""Qwen3.5: delta layers and gated attention, read, written, trained and continued."""

import dataclasses
import json
import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_tiny_config, start_over
from exporting import ask_llama_cpp, needs_llama_cpp, read_tensors
from flax.traverse_util import flatten_dict
from quick import cases
from test_lora import shake
from test_run import Recorder, go, saved
from test_speculation import near

import kdjax
from kdjax.config import Config, OptimConfig
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import UserError
from kdjax.export import export_gguf, export_hf
from kdjax.formats import open_table
from kdjax.formats.gguf import write_gguf
from kdjax.formats.safetensors import write_folder
from kdjax.formats.saved import saved_run
from kdjax.models import decoder, names
from kdjax.models.adapters import Lora, join_adapters, split_adapters
from kdjax.models.checkpoint import cut_layers, open_checkpoint
from kdjax.models.decoder import Compute, functional
from kdjax.models.decoding import count_slots
from kdjax.models.importance import sum_squares
from kdjax.models.kernels import recurrent
from kdjax.models.model import load_model
from kdjax.training import optim
from kdjax.training.job import Job, assemble
from kdjax.training.trainable import list_paths
from kdjax.training.user_code import UserCode
from scripts.bench.synthetic import QWEN35_SHAPES, open_header, write_random_gguf
from scripts.checks import llama_answers

pytestmark = pytest.mark.usefixtures("one_device")

# Three value heads a key head; no row of the head is padding, which llama.cpp would draw.
SHAPE = QWEN35_SHAPES["tiny-delta-teacher"]._replace(
    layers=4, hidden=128, heads=4, ffn=256, rows=305, delta_width=32
)
EXPERTS = dict(ffn=0, experts=7, experts_used=2, expert_ffn=96, shared_ffn=64)
BOTH = pytest.mark.parametrize(
    "path",
    [
        pytest.param(SHAPE, id="dense"),
        pytest.param(SHAPE._replace(**EXPERTS), id="experts", marks=pytest.mark.slow),
    ],
    indirect=True,
)
PROMPT = np.random.default_rng(1).integers(0, 300, 75).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("qwen35") / "m.gguf"
    write_random_gguf(path, getattr(request, "param", SHAPE), recipe="f32")
    return path


@pytest.fixture(scope="module")
def model(path):
    return kdjax.load(path, dtype="float32")


def ask_llama(path, prompt):
    """llama.cpp's 12 greedy ids, and the log-probabilities `[V]` from which it took the first."""
    asked = dict(prompt=prompt, n_predict=12, temperature=0.0, ignore_eos=True, n_probs=400)
    with llama_answers.serve(path) as url:
        asked |= dict(cache_prompt=False, return_tokens=True)
        answer = llama_answers.ask(url, "/completion", asked)
    first = answer["completion_probabilities"][0]
    kept = {x["id"]: x["logprob"] for x in first["top_logprobs"]}
    assert first["id"] == answer["tokens"][0]  # ids that end no character are left out
    return answer["tokens"], np.array([kept[i] for i in range(len(kept))])


@needs_llama_cpp
@BOTH
def test_llama_cpp_writes_the_same(path, model):
    """Its order of value heads is the file's: Transformers, through our export, sees another."""
    ids, theirs = ask_llama(path, PROMPT)
    ours = np.asarray(jax.nn.log_softmax(model.logits([PROMPT + ids])))[0, len(PROMPT) - 1 : -1]
    assert np.abs(ours[0] - theirs).max() < 1e-3 * theirs.std()
    assert ours.argmax(-1).tolist() == ids
    answers = model.generate([PROMPT, PROMPT[:1], PROMPT[:30]], max_tokens=12, stop_ids=())
    assert answers[0].ids == ids
    assert model.generate([PROMPT], max_tokens=12, stop_ids=())[0].ids == ids


@needs_llama_cpp
@pytest.mark.parity
@pytest.mark.parametrize(
    ("kept", "values", "more"),
    [
        *(((0, 3), 2, {}), ((0, 1, 3), 6, {}), (None, 2, {}), (None, 6, {})),
        *(((0, 3), 2, EXPERTS), (None, 6, EXPERTS)),
    ],
)
def test_llama_cpp_computes_the_same_logits(kept, values, more, tmp_path):
    """Value heads equal to and three times the key heads, after 1, 16 and 75 ids.

    It aborts on a model of one kind of layers ("GGML_ASSERT(buffer) failed"): two are the fewest.
    """
    shape = SHAPE._replace(delta_values=values, **more)
    write_random_gguf(tmp_path / "m.gguf", shape, recipe="f32")
    whole = open_checkpoint(tmp_path / "m.gguf")
    placement = Placement.on(make_mesh(1, 1, 1, jax.devices()[:1]))
    ours = load_model(cut_layers(whole, kept or ()), placement=placement, dtype="float32")
    export_gguf(ours, tmp_path / "e.gguf", dtype="f32")
    prompts = [PROMPT[:n] for n in (1, 16, 75)]
    answers = ask_llama_cpp(tmp_path / "e.gguf", prompts, 305)
    logits = np.asarray(ours.logits([PROMPT]), np.float64)[0]
    for prompt, theirs in zip(prompts, answers, strict=True):
        row = logits[len(prompt) - 1]
        difference = [row[i] - theirs[i] for i in range(305)]  # equal but for a constant
        # Both sum in float32: 1.1e-5 on an Intel Xeon, below 1e-5 on an AMD EPYC.
        assert np.ptp(row) > 0.5 and np.ptp(difference) < 2e-5 * np.ptp(row)


@BOTH
def test_both_formats_hold_the_same(path, model, tmp_path):
    """GGUF to GGUF in float32, and a folder in bf16 to GGUF and back, bit for bit."""
    export_gguf(model, tmp_path / "again.gguf", dtype="f32")
    ours, theirs = read_tensors(tmp_path / "again.gguf"), read_tensors(path)
    rates = [name for name in theirs if name.endswith("ssm_a")]
    assert len(rates) == 3
    for name in rates:  # the logarithm of a float32 is rounded
        a, b = (np.frombuffer(x.pop(name)[1], np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(a, b, rtol=3e-7)
    assert ours == theirs
    export_hf(model, tmp_path / "hf", dtype="bf16")
    export_gguf(kdjax.load(tmp_path / "hf", dtype="float32"), tmp_path / "b.gguf", dtype="f32")
    export_hf(kdjax.load(tmp_path / "b.gguf", dtype="float32"), tmp_path / "back", dtype="bf16")
    assert read_tensors(tmp_path / "back") == read_tensors(tmp_path / "hf")
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("hf", "back")]
    assert configs[0] == configs[1]
    assert configs[0]["layer_types"] == 3 * ["linear_attention"] + ["full_attention"]


@BOTH
def test_the_text_part_of_a_folder_of_images_is_read(model, tmp_path, caplog):
    """A published folder: the text model beside images' tensors and blocks of later tokens."""
    export_hf(model, tmp_path / "hf", dtype="f32")
    table, folder = open_table(tmp_path / "hf"), tmp_path / "whole"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    inner = {**config, "mtp_num_hidden_layers": 1, "attn_output_gate": True}
    kind = config["model_type"].removesuffix("_text")
    outer = {"model_type": kind, "text_config": inner, "vision_config": {"depth": 1}}
    outer |= {"tie_word_embeddings": inner.pop("tie_word_embeddings")}
    rows = [
        (n.replace("model.", "model.language_model.", 1), "F32", i.shape, table.raw(n))
        for n, i in ((n, table.info(n)) for n in table)
    ]
    extra = np.zeros((4, 4 * 4), np.uint8)
    rows += [(n, "F32", (4, 4), extra) for n in ("model.visual.a.weight", "mtp.fc.weight")]
    folder.mkdir()
    write_folder(folder, rows)
    (folder / "config.json").write_text(json.dumps(outer))
    for file in (tmp_path / "hf").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    with caplog.at_level(logging.WARNING, "kdjax"):
        whole = open_checkpoint(folder)
    assert f"2 tensors of {len(rows)} are left out" in caplog.text
    assert whole.spec == open_checkpoint(tmp_path / "hf").spec
    tokens = np.asarray([PROMPT[:9]])
    found = kdjax.load(folder, dtype="float32").logits(tokens)
    np.testing.assert_allclose(found, model.logits(tokens), atol=1e-5)


def rewrite(path, target, more=(), **entries):
    """The file with other entries of its header, None for none, and more tensors."""
    table = open_table(path)
    metadata = {key: table.metadata[key] for key in table.metadata}
    metadata |= {f"qwen35.{key.replace('__', '.')}": value for key, value in entries.items()}
    rows = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    write_gguf(target, {k: v for k, v in metadata.items() if v is not None}, [*rows, *more])
    return target


def test_a_rounded_rate_is_refused(path, tmp_path):
    table = open_table(path)
    rows = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    at = next(i for i, row in enumerate(rows) if row[0] == "blk.1.ssm_a")
    rows[at] = ("blk.1.ssm_a", "F16", (6,), np.full((12,), 0xBC, np.uint8))
    write_gguf(tmp_path / "r.gguf", {k: table.metadata[k] for k in table.metadata}, rows)
    with pytest.raises(UserError, match=r"blk\.1\.ssm_a in F16"):
        kdjax.load(tmp_path / "r.gguf")


def test_factors_of_matrices_are_refused(path, tmp_path):
    """Files of NVFP4 may have them so, one number beside a matrix."""
    factor = [("blk.0.ffn_up.scale", "F32", (1,), np.ones(4, np.uint8))]
    with pytest.raises(
        UserError, match=r"blk\.0\.ffn_up\.scale: a factor of a matrix, as of NVFP4"
    ):
        open_checkpoint(rewrite(path, tmp_path / "f.gguf", factor)).names  # noqa: B018


def test_blocks_that_draft_are_left_out(path, model, tmp_path, caplog):
    """`nextn_predict_layers` counts among the blocks of a file."""
    block = [("blk.4.nextn.eh_proj.weight", "F32", (128, 256), np.zeros((128, 1024), np.uint8))]
    counts = {"block_count": 5, "nextn_predict_layers": 1}
    with caplog.at_level(logging.WARNING, "kdjax"):
        opened = open_checkpoint(rewrite(path, tmp_path / "n.gguf", block, **counts))
    assert "1 tensors of 57 are left out" in caplog.text
    assert opened.spec == model.spec and opened.names


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope__dimension_sections": [0, 2, 2, 0]}, "rope.dimension_sections = "),
        ({"rope__dimension_sections": [0, 0, 0, 16]}, "rope.dimension_sections = "),
        ({"ssm__time_step_rank": 5}, "5 value heads for 2 key heads"),
        ({"ssm__group_count": None}, "ssm.group_count"),
        ({"attention__gate_kind": 3}, "attention.gate_kind"),
    ],
)
def test_what_is_not_computed_is_refused(path, tmp_path, entries, message):
    with pytest.raises(UserError, match=message):
        open_checkpoint(rewrite(path, tmp_path / "x.gguf", **entries)).names  # noqa: B018


def test_a_form_without_its_products_is_refused(path):
    with pytest.raises(UserError, match=r"delta layers.*float8"):
        kdjax.load(path, weights="float8")


def draft_by_hand(big, small, prompt, count, drafts):
    """Greedy rounds over whole texts, read anew each time: the text, passes, accepted drafts."""
    ids, passes, kept = list(prompt), 0, 0

    def follow(model, ids):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(ids)] = ids
        return np.asarray(model.logits(row))[0, : len(ids), :305].argmax(-1).tolist()

    while len(ids) < len(prompt) + count:
        drafted = list(ids)
        for _ in range(drafts):
            drafted += follow(small, drafted)[-1:]
        told = follow(big, drafted)[len(ids) - 1 :]
        same = [a == b for a, b in zip(drafted[len(ids) :], told, strict=False)]
        accepted = [*same, False].index(False)
        passes, kept = passes + 1, kept + accepted
        ids += told[: accepted + 1]
    return ids[len(prompt) : len(prompt) + count], passes, kept


@pytest.mark.slow
def test_states_step_back_to_the_last_accepted_draft(model):
    """Texts, passes and accepted drafts are those of whole texts read anew; also from one id on."""
    small, how = near(model, 0.05), dict(max_tokens=16, stop_ids=(), draft_tokens=3)
    prompts = [PROMPT[:1], PROMPT[1:3], PROMPT[9:40]]
    found = model.generate(prompts, draft=small, batch_size=2, **how)
    for prompt, answer in zip(prompts, found, strict=True):
        ids, *counts = draft_by_hand(model, small, prompt, 16, 3)
        assert answer.ids == ids and [*answer.drafted] == counts
    assert any(answer.drafted.accepted for answer in found)
    own = model.generate(prompts, draft=model, batch_size=2, **how)
    assert [a.drafted for a in own] == [(4, 12)] * 3
    assert [a.ids for a in own] == [a.ids for a in found]


@pytest.mark.slow
def test_rows_that_write_states_late_write_the_same(model):
    """Texts drawn by the kernels, through refilled slots, are those of the definitions."""
    placement = dataclasses.replace(model.placement, kernels=True)
    compute = dataclasses.replace(model.functions.compute, placement=placement)
    functions = functional(model.spec, compute)[0]
    placed = model.replace(functions=functions, placement=placement)
    how = dict(temperature=1.0, stop_ids=(), max_tokens=19, batch_size=3, limits=[13, 19, 2, 9, 17])
    prompts = [PROMPT[:n] for n in (3, 40, 1, 75, 20)]
    run, late = recurrent.pl.pallas_call, mock.Mock(wraps=recurrent.recur_with_pending_updates)

    def interpret(*args, **settings):
        return run(*args, **settings | {"interpret": True})

    with (
        mock.patch.object(recurrent.pl, "pallas_call", interpret),
        mock.patch.object(decoder, "states_fit", return_value=True),  # float32 as well
        mock.patch.object(recurrent, "recur_with_pending_updates", late),
    ):
        found = placed.generate(prompts, **how)
    assert late.call_count
    for got, want in zip(found, model.generate(prompts, **how), strict=True):
        assert got.ids == want.ids
        np.testing.assert_allclose(got.log_probs, want.log_probs, atol=1e-4)


def test_slots_count_states(model):
    """Three delta layers: 6 heads of 32 x 32 in float32, 3 inputs of 320 columns."""
    parts = count_slots(model.spec, 2, 10, 50, 50, kernel=True)
    assert parts["states"] == 10 * 3 * (4 * 6 * 32 * 32 + 2 * 3 * 320)
    assert parts["keys and values"] == 10 * 128 * 2 * 2 * 32 * 2
    # Of each of a call's 8 steps 2 keys, 6 values and 6 decays in float32, and 320 inputs.
    assert parts["news of states"] == 10 * 3 * 8 * (4 * (2 * 32 + 6 * 33) + 2 * 320)
    assert "news of states" not in count_slots(model.spec, 2, 10, 50, 50, kernel=False)


SOME = "in_proj_qkv,ssm_alpha,in_proj_b,out_proj,down_proj,q_proj"


@pytest.mark.parametrize(
    ("targets", "counts", "narrow"),
    cases((SOME, (2, 5), {"alpha", "beta"}), slow=[("", (7, 6), set())]),
)
def test_adapters_reach_both_kinds_of_layers(path, model, targets, counts, narrow, tmp_path):
    """PEFT's folder has Transformers' order of value heads, which merged files have as well.

    Matrices with a row a head have adapters if they are named.
    """
    student = shake(kdjax.add_lora(model, rank=4, targets=targets), by=0.2)
    lora = Lora.of_params(student.params)
    assert lora is not None
    stacks = [stack for stack, *_ in lora.targets]
    assert tuple(map(stacks.count, ("blocks", "deltas"))) == counts
    assert {x[2] for x in lora.targets} & {"alpha", "beta", "conv"} == narrow
    ids = [PROMPT]
    wanted = np.asarray(student.logits(ids))
    assert np.abs(wanted - model.logits(ids)).max() > 0.05
    kdjax.export_peft(student, tmp_path / "peft", base=str(path))
    back = kdjax.load(tmp_path / "peft", dtype="float32")
    np.testing.assert_allclose(back.logits(ids), wanted, atol=1e-5)
    jax.tree.map(
        np.testing.assert_array_equal, *(split_adapters(x.params)[1] for x in (back, student))
    )
    export_gguf(back, tmp_path / "merged.gguf", dtype="f32")
    export_hf(model, tmp_path / "base")
    on_folder = kdjax.load(tmp_path / "peft", base=str(tmp_path / "base"), dtype="float32")
    export_hf(on_folder, tmp_path / "merged")
    for merged in ("merged.gguf", "merged"):
        found = kdjax.load(tmp_path / merged, dtype="float32").logits(ids)
        np.testing.assert_allclose(found, wanted, atol=3e-4)


@pytest.mark.slow
def test_adapters_of_both_kinds_of_layers_train_under_rounding(path, tmp_path):
    """A step moves all of them; the file is the sum of base and adapters within half a step."""
    teacher = kdjax.load(path, weights="packed", dtype="float32")
    student = shake(kdjax.add_lora(teacher, rank=4), by=0.001)
    loss, form = kdjax.KDLoss(kdjax.forward_kl, 1.0, 0.0), kdjax.Rounded("q8_0")
    step = kdjax.make_step(student, teacher, loss, optax.adamw(1e-4), form=form)
    state: Any = step.init(student.params)
    ids = np.asarray([PROMPT[:33]])
    state, _ = step(state, teacher.params, {"tokens": ids[:, :-1], "labels": ids[:, 1:]})
    moved = join_adapters(split_adapters(student.params)[0], state.params)
    before, after = (flatten_dict(split_adapters(x)[1]) for x in (student.params, moved))
    assert {x[0] for x in after} == {"blocks", "deltas"}
    assert all(np.any(np.asarray(x != before[name])) for name, x in after.items())
    export_gguf(student.replace(params=step.pack(state)), tmp_path / "a.gguf")
    made = flatten_dict(kdjax.load(tmp_path / "a.gguf", dtype="float32").params)
    summed = flatten_dict(kdjax.merge_lora(student.replace(params=moved)).params)
    rows = [path[:-1] for path in after if path[-1] == "a"]
    assert ("deltas", "delta", "out", "weight") in rows
    for name in rows:
        wanted = np.asarray(summed[name], np.float64)
        error = np.abs(np.asarray(made[name]) - wanted).max()
        assert error < np.abs(wanted).max() / 100, name


@needs_llama_cpp
@pytest.mark.parity
def test_llama_cpp_adds_adapters_to_both_kinds_of_layers(path, model, tmp_path):
    student = shake(kdjax.add_lora(model, rank=4), by=0.2)
    kdjax.export_gguf_adapter(student, tmp_path / "a.gguf")
    (theirs,) = ask_llama_cpp(path, [PROMPT], 305, adapters=[tmp_path / "a.gguf"])
    row, plain = (np.asarray(x.logits([PROMPT]), np.float64)[0, -1] for x in (student, model))
    difference = [row[i] - theirs[i] for i in range(305)]  # equal but for a constant
    assert np.ptp(difference) < 1e-4 * np.ptp(row) < 1e-2 * np.ptp(row - plain)


@pytest.mark.slow
def test_importance_is_of_both_kinds_of_layers(model):
    """The first delta layer's matrices take the normalised embedding, all of a layer the same."""
    found, count = sum_squares(model, [np.asarray([PROMPT[:40]])])
    x = np.asarray(model.params["embed"], np.float64)[PROMPT[:40]]
    x /= np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + model.spec.rms_eps)
    x *= 1 + np.asarray(model.params["deltas"]["attn_norm"]["weight"], np.float64)[0]
    for part in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"):
        np.testing.assert_allclose(found[f"blk.0.{part}.weight"], (x * x).sum(0), rtol=1e-4)
    assert count == 40 and len(found) == 4 * 3 + 3 * 5 + 4 + 1  # the head
    assert found["blk.3.attn_q.weight"].shape == (128,) and "blk.3.attn_qkv.weight" not in found


def test_rates_of_states_come_back():
    """-exp and back: all numbers of bfloat16, and float32 within its own rounding."""
    short = np.arange(0x3C00, 0x4040, dtype=np.uint32) << 16  # 0.0078 to 3
    rates = np.concatenate([short, short | (1 << 31)]).view(np.float32)
    np.testing.assert_array_equal(names.read_rate(names.write_rate(rates)), rates)
    rates = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_allclose(names.read_rate(names.write_rate(rates)), rates, atol=1.2e-7)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Config, folder and steps of a run: a packed teacher of both kinds of layers, a student too.

    Both have experts; dense ones would differ in their MLPs, which all other runs train. The job
    serves other runs, so that its step is compiled once.
    """
    folder = tmp_path_factory.mktemp("pair")
    student = QWEN35_SHAPES["tiny-delta"]._replace(hidden=64, ffn=128, rows=305, delta_width=16)
    student = student._replace(**EXPERTS)
    write_random_gguf(folder / "teacher.gguf", SHAPE._replace(**EXPERTS))
    write_random_gguf(folder / "student.gguf", student, seed=1)
    config = make_tiny_config(folder, folder)
    config.teacher.weights, config.eval.samples = "packed", 0
    config.train.steps, config.eval.every, config.checkpoint.every = 6, 3, 3
    job, steps = assemble(config, folder / "straight"), Recorder()
    again = start_over(job, folder / "again")
    assert go(config, folder / "straight", steps, job=job) == "finished"
    return config, folder, steps, again


@pytest.mark.slow
def test_a_pair_trains_and_resumes_bit_for_bit(run):
    config, folder, straight, again = run
    first, second = Recorder(stop_at=2), Recorder()
    config.checkpoint.every = 0
    assert go(config, folder / "again", first, job=again) == "interrupted"
    more = start_over(again, folder / "again")
    assert go(config, folder / "again", second, job=more) == "finished"
    (a, one), (b, two) = (saved(again, folder / name) for name in ("straight", "again"))
    assert a == b == 6
    assert saved_run(folder / "again", 6)["undecayed"] == ["log_rate", "shift"]
    chex.assert_trees_all_equal(one, two)
    losses = [call[2]["loss"] for call in straight.calls if call[0] == "step"]
    assert losses[-1] < losses[0] and second.calls[0] == ("begin", 3)


@needs_llama_cpp
@pytest.mark.slow
def test_llama_cpp_writes_what_the_trained_student_writes(run, tmp_path):
    _, folder, _, job = run
    start = kdjax.load(folder / "student.gguf", dtype="float32")
    params = jax.tree.map(jax.numpy.asarray, saved(job, folder / "straight")[1].params)
    trained = start.replace(params=params)
    assert np.any(np.asarray(start.params["embed"]) != params["embed"])
    export_gguf(trained, tmp_path / "t.gguf", dtype="f32")
    ids, _ = ask_llama(tmp_path / "t.gguf", PROMPT[:40])
    assert trained.generate([PROMPT[:40]], max_tokens=12, stop_ids=())[0].ids == ids


@pytest.mark.slow
def test_weight_decay_leaves_rates_of_delta_layers_alone():
    """A_log, dt_bias, norms and biases; a step without a gradient moves all others towards 0."""
    spec = open_header(QWEN35_SHAPES["tiny-delta"]).spec
    params = jax.tree.map(lambda x: jnp.ones(x.shape), functional(spec, Compute())[1])
    config = OptimConfig(weight_decay=0.5, learning_rate=0.1, warmup_steps=0)
    tx = optim.optimizer(config, 10)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    moved = {name: float(jnp.abs(x).max()) for name, x in flatten_dict(updates, sep="/").items()}
    still = {name for name, by in moved.items() if by == 0}
    assert {name.rpartition("/")[2] for name in still} == {"weight", "log_rate", "shift"}
    assert all("norm" in name for name in still if name.endswith("weight"))
    delta = {name for name in moved if "/delta/" in name} - still
    ends = [name.rpartition("/delta/")[2] for name in delta]
    assert {"conv", "alpha/weight", "beta/weight", "gate/weight", "qkv/weight"} <= set(ends)
    assert all(moved[name] == pytest.approx(0.05) for name in moved.keys() - still)


def test_a_run_says_which_rates_its_decay_leaves_alone():
    spec = open_header(QWEN35_SHAPES["tiny-delta"]).spec
    params = functional(spec, Compute())[1]
    config, rates = Config(), [name for name in list_paths(params) if name.endswith("log_rate")]

    def named(frozen=(), **user):
        parts = SimpleNamespace(frozen=frozenset(frozen))
        step = SimpleNamespace(abstract=SimpleNamespace(params=params), spec=parts)
        job = SimpleNamespace(step=step, config=config, user_code=UserCode(**user))
        return Job.undecayed.fget(job)

    assert named() == ["log_rate", "shift"] and named(rates) == ["shift"]
    assert named(optimizer=optax.sgd(0.1)) == []
    config.optim.weight_decay = 0.0
    assert named() == []


def test_periods_computed_again_keep_no_copies_of_weights():
    """Two periods of four layers: what is kept of weights are the stacks that were given."""
    spec = open_header(QWEN35_SHAPES["tiny-delta"]._replace(layers=8)).spec
    functions, shapes = functional(spec, Compute(remat="full"))

    def pull(params, ids):
        return jax.vjp(lambda x: functions.hidden(x, ids, ids, ids), params)[1]

    kept = jax.eval_shape(pull, shapes, jax.ShapeDtypeStruct((1, 16), np.int32))
    sizes = {x.shape for x in jax.tree.leaves(kept) if spec.mlp_size in x.shape[-2:]}
    wide = spec.hidden_size, spec.mlp_size
    assert sizes == {(2, layers, *pair) for layers in (1, 3) for pair in (wide, wide[::-1])}


@pytest.mark.slow
def test_periods_computed_again_have_the_same_gradients():
    spec = open_header(QWEN35_SHAPES["tiny-delta"]._replace(layers=8)).spec
    params = decoder.initialise(spec, Compute(), 0)
    ids = jnp.arange(70, dtype=jnp.int32)[None]

    def gradient(remat):
        functions, _ = functional(spec, Compute(remat=remat))

        def run(params):
            return (functions.hidden(params, ids, jnp.ones_like(ids), ids) ** 2).sum()

        return jax.jit(jax.grad(run))(params)

    # By norms: eight layers amplify what a CPU rounds in another order to 0.0005 of every array.
    def norms(tree):
        return jax.tree.map(jnp.linalg.norm, jax.tree.map(jnp.ravel, tree))

    again, kept = gradient("full"), gradient("none")
    apart = norms(jax.tree.map(jnp.subtract, again, kept))
    chex.assert_trees_all_equal_comparator(
        lambda d, n: d < 1e-3 * n, lambda d, n: f"{d / n} of the norm", apart, norms(kept)
    )
