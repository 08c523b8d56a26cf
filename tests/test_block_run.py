"""Runs that train a block that drafts: resumed, opened again, on meshes, refused, as a command."""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import make_tiny_config
from exporting import read_tensors
from resuming import assert_goes_on, assert_trains_alike, finish
from test_disk import no_file_beyond
from test_nextn import SHAPE
from test_run import go

import kdjax
from kdjax import demo
from kdjax.commands import answers, draft, export, generate
from kdjax.config import validate
from kdjax.device.placement import Placement
from kdjax.device.runtime import Devices
from kdjax.device.sharding import make_mesh
from kdjax.errors import INTERRUPTED, NOT_WRITTEN, UserError
from kdjax.formats import open_table
from kdjax.formats.saved import SavedTable
from kdjax.models.decoder import Compute, functional
from kdjax.training import compiled, plan
from kdjax.training.job import assemble, build_step, survey, text_source
from kdjax.training.optim import optimizer
from kdjax.training.pair import open_pair
from kdjax.training.saving import Checkpoints
from kdjax.training.teachers import Packed
from kdjax.watch.verify import verify
from kdjax.watch.writers import JsonLines
from scripts.bench.synthetic import write_random_gguf

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A file in blocks, with a block that drafts."""
    path = tmp_path_factory.mktemp("served") / "m.gguf"
    write_random_gguf(path, SHAPE, recipe="q8_0")
    return path


def train_block(models, folder, path):
    """The config of a run that trains the block of the file at `path`, packed, in float32."""
    config = make_tiny_config(models, folder)
    config.teacher.path, config.student.path, config.student.block = "self", str(path), "own"
    config.teacher.weights, config.teacher.param_dtype = "packed", "float32"
    config.loss.divergence, config.loss.temperature = "total_variation", 1.0
    config.loss.alpha, config.optim.learning_rate = 0.0, 3e-3
    config.train.steps, config.eval.every, config.checkpoint.every = 4, 0, 0
    return config


@pytest.fixture
def config(models, tmp_path, served):
    return train_block(models, tmp_path, served)


@pytest.fixture(scope="module")
def run(models, tmp_path_factory, served):
    """A finished run: its config, workdir, job and recorder."""
    folder = tmp_path_factory.mktemp("block")
    return finish(train_block(models, folder, served), folder)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_saves_the_block_alone(run, tmp_path):
    """Its teacher is the arrays beside which the block trains."""
    _, workdir, job, _ = run
    ours = {id(x) for x in jax.tree.leaves(job.step.base)}
    assert ours == {id(x) for x in jax.tree.leaves(job.teacher_params)}
    figures = assert_goes_on(run, tmp_path / "parts", stop_at=2)
    assert figures[1]["acceptance"] > figures[0]["acceptance"] + 0.01
    assert {name.partition("/")[0] for name in SavedTable(workdir, 4)} == {"mtp"}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_a_run_opens_as_its_model_with_the_block(run, served, weights):
    """Its layers are the file's, in any form; the block is what the run saved."""
    _, workdir, job, _ = run
    how = dict(weights=weights, dtype="float32")
    block = kdjax.take_block(kdjax.load(workdir, base=str(served), **how))
    with contextlib.closing(Checkpoints(workdir, 2)) as checkpoints:
        state = checkpoints.restore(4, job.step.abstract, job.step.shardings)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-7),  # a norm is stored as 1 + weight
        block.params["mtp"],
        job.step.see(state)["mtp"],
    )
    base = kdjax.load(served, **how)
    layers = ({n: x for n, x in m.params.items() if n != "mtp"} for m in (block, base))
    jax.tree.map(np.testing.assert_array_equal, *layers)


@pytest.mark.slow
def test_another_base_or_block_is_refused(run, tmp_path, served):
    config, workdir, _, _ = run
    data = bytearray(served.read_bytes())
    data[-1] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(UserError, match=r"the block's numbers of .* they are nothing without it"):
        kdjax.load(workdir, base=str(tmp_path / "m.gguf"))
    shutil.copytree(workdir, tmp_path / "run")
    with (
        pytest.raises(UserError, match=r"student.sha256: the checkpoint has"),
        mock.patch.object(config.student, "path", str(tmp_path / "m.gguf")),
    ):
        go(config, tmp_path / "run")
    with (
        pytest.raises(UserError, match=r"student.block: the checkpoint has 'own', now 'new'"),
        mock.patch.object(config.student, "block", "new"),
    ):
        go(config, tmp_path / "run")


@pytest.mark.slow
def test_the_library_takes_the_first_step_of_the_run(run, served):
    config, _, job, recorder = run
    model = kdjax.load(served, weights="packed", dtype="float32")
    loss, block = kdjax.KDLoss(kdjax.total_variation), kdjax.take_block(model)
    step = kdjax.make_step(block, model, loss, optimizer(config.optim, 4))
    batch = text_source(config.train, job.rows, None).next(None)
    found = step(step.init(block.params), model.params, batch)[1].means()
    first = next(call[2] for call in recorder.calls if call[0] == "step")
    for name in ("loss", "ce", "grad_norm"):
        assert found[name] == pytest.approx(first[name], rel=1e-4)


@pytest.mark.slow
def test_devices_that_share_rows_and_weights_train_alike(run, tmp_path):
    assert_trains_alike(run, tmp_path / "run", data=2, fsdp=2)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("teacher.path", "t.gguf", "teacher.path='t.gguf': must be 'self' with student.block"),
        ("student.lora.rank", 4, "student.lora.rank=4: must be 0 with student.block='own'"),
        ("mesh.tensor", 2, "mesh.tensor=2: must be 1 with student.block"),
        ("student.block", "yes", "student.block='yes': must be empty, or one of own"),
        ("student.block", "", "student.block='': must be set with student.later_drafts='0.5'"),
        ("student.later_drafts", "0.5,x", "student.later_drafts='0.5,x': must be empty, or at"),
        ("student.later_drafts", "0.5,0", "student.later_drafts='0.5,0': must be empty, or at"),
    ],
)
def test_settings_that_cannot_be_are_refused(config, field, value, message):
    config.student.later_drafts = "0.5"
    *sections, name = field.split(".")
    section = config
    for part in sections:
        section = getattr(section, part)
    setattr(section, name, value)
    with pytest.raises(UserError, match=message):
        validate(config)


def test_models_without_a_block_are_refused(models, config):
    config.student.path = str(models / "student.gguf")
    with pytest.raises(UserError, match=r"a qwen2 model; expected one of qwen3_5_text"):
        survey(config)


@pytest.mark.slow
def test_the_plan_counts_the_block_beside_the_layers(config, served):
    """The block alone has masters, moments and gradients; the head has none on a GPU either."""
    device = Devices("gpu", "NVIDIA H200", 1, 10**11, 9.9e14)
    pair = open_pair(config)
    made = plan.make_plan(config, pair, make_mesh(1, 1, 1, jax.devices()[:1]), device, Packed())
    shapes = functional(pair.student.spec, Compute())[1]["mtp"]
    masters = 4 * sum(x.size for x in jax.tree.leaves(shapes))
    model = kdjax.load(served, weights="packed", dtype="float32")
    layers = {name: x for name, x in model.params.items() if name != "mtp"}
    kept = sum(x.nbytes for x in jax.tree.leaves(layers))
    assert [*made.resident] == [
        "teacher, packed blocks",
        "the block that drafts, float32",
        "optimizer moments, float32",
    ]
    assert [*made.resident.values()] == pytest.approx([kept, masters, 2 * masters], rel=2e-3)
    assert made.gradients == masters == made.phases["the student runs backward"]["gradients"]
    head = 305 * SHAPE.hidden
    assert made.phases["the loss is computed"]["student's head"] == 4 * head  # numbers, no gradient
    forward = pair.student.spec.forward_flops(config.data.seq_len)
    flops = plan.count_step_flops(config, pair, Packed())
    products = sum(x.size for x in jax.tree.leaves(shapes) if x.ndim > 2)
    assert flops == pytest.approx(2 * forward + 6 * products + 2 * head, rel=0.05)


@pytest.mark.slow
def test_the_step_compiled_for_shapes_is_that_for_arrays(config):
    """`kdjax draft --plan` tells on a CPU what XLA says of the step that is then run."""
    config.teacher.param_dtype = config.train.compute_dtype = "bfloat16"
    pair, mesh = open_pair(config), make_mesh(1, 1, 1, jax.devices()[:1])
    placement, device = Placement.on(mesh), Devices("cpu", "cpu", 1, None, None)
    made = plan.choose_plan(config, pair, mesh, device, [Packed()])
    told = compiled.ask_xla(made, config, pair, placement)
    settled = plan.replace_settings(config, made.remat, made.chunk_tokens)
    teacher, step, _ = build_step(settled, pair, placement, Packed())
    rows = config.train.batch_size, config.data.seq_len
    batch = {
        name: jax.ShapeDtypeStruct(rows, "float32" if name == "weights" else "int32")
        for name in ("tokens", "labels", "segment_ids", "positions", "weights")
    }
    lowered = step.jitted.lower(step.abstract, teacher.params, batch, **step.fixed)
    used = lowered.compile().memory_analysis().temp_size_in_bytes
    assert [*told.phases["a step runs"].values()] == [used] and told.resident == made.resident


@pytest.mark.slow
def test_a_run_of_three_drafts_resumes_bit_for_bit(models, tmp_path, served):
    """Its log and its held-out figures have each draft."""
    config = train_block(models, tmp_path, served)
    config.student.later_drafts, config.train.microbatches = "0.6,0.35", 2
    made = finish(config, tmp_path)
    held_out = assert_goes_on(made, tmp_path / "parts", stop_at=2)
    steps = [call[2] for call in made[3].calls if call[0] == "step"]
    for found in (*steps, *held_out):
        total = found["divergence"] + 0.6 * found["draft_2"] + 0.35 * found["draft_3"]
        assert found["loss"] == pytest.approx(total, rel=1e-5)
    assert steps[-1]["draft_3"] < steps[0]["draft_3"]


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_stopped(tmp_path, served, capsys):
    """Layers keep their bytes; a disk that is full has one message and costs no saved step."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.py").write_text(f"def f{i}(x):\n    return x * {i}\n" * 8)
    out, where = tmp_path / "o.gguf", [str(served), f"--data={text}"]
    how = ["--seq-len=32", "--steps=8", "--learning-rate=3e-3", f"--out={out}"]
    how += ["--rows=2", "--max-tokens=8"]
    how += [f"--config.data.cache_dir={tmp_path}/rows", "--config.eval.every=0"]

    def stop(self, record):
        if record.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(JsonLines, "step_end", stop):
        assert draft.main([*where, *how]) == INTERRUPTED
    assert "saved; resume with:" in capsys.readouterr().out and not out.exists()
    steps = tmp_path / "o.run" / "checkpoints"
    (stopped,) = (int(step.name) for step in steps.iterdir())
    assert 3 <= stopped < 8
    with no_file_beyond(1 << 18):
        assert draft.main([*where, *how]) == NOT_WRITTEN
    told = capsys.readouterr().err.splitlines()[-2:]
    assert "cannot be written" in told[0] and f"checkpoints/{stopped}: the run goes on" in told[1]
    assert draft.main([*where, *how]) == 0
    said = capsys.readouterr().out
    told = said.partition("T = 1: ")[2].split()
    assert float(told[2]) > float(told[0]) + 0.01
    assert re.search(r"\n  greedily: [0-3]\.\d\d accepted a pass, \d\.\d\d times", said)
    assert f"\n  llama-server -m {out} --spec-type draft-mtp --spec-draft-n-max " in said
    ours, theirs = read_tensors(out), read_tensors(served)
    changed = {n for n in theirs if ours[n] != theirs[n] and not n.endswith("ssm_a")}  # rounded
    assert changed and all(name.startswith("blk.4.") for name in changed)
    assert open_table(out).info("blk.4.nextn.eh_proj.weight").dtype == "Q8_0"
    assert generate.main([str(out), "--prompt=def f", "--max-tokens=4", "--draft=own"]) == 0
    assert "accepted a pass" in capsys.readouterr().err
    assert any("15 of 15 tensors changed" in line for line in verify(tmp_path / "o.run"))
    again = tmp_path / "again.gguf"
    assert export.main([str(tmp_path / "o.run"), "--format=gguf", f"--out={again}"]) == 0
    kinds = {n: open_table(again).info(n).dtype for n in theirs}
    assert kinds == {n: "F32" if n in changed else open_table(served).info(n).dtype for n in kinds}
    capsys.readouterr()
    for more, message in (
        ([f"--out={out}"], "is there already"),
        ([f"--out={served}", "--overwrite"], f"{served} is what the command reads"),
        ([f"--out={tmp_path}/p.gguf", "--steps=0"], "run:\n  train.steps=0"),
        ([f"--out={tmp_path}/p.gguf", f"--workdir={tmp_path}/p.gguf"], "p.gguf is where the parts"),
        ([f"--out={out}/p.gguf", f"--workdir={tmp_path}/p"], "o.gguf is no folder"),
        ([f"--out={tmp_path}/p.gguf", "--type=iq1_s"], "expected one of F32"),
        ([f"--out={tmp_path}/p.gguf", "--config.student.lora.rank=2"], "must be 0 with"),
    ):
        given = {flag.partition("=")[0]: flag for flag in [*where, *how, *more]}  # the last
        assert draft.main([*given.values()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_one_command_makes_a_small_draft_from_prompts(models, tmp_path, capsys):
    """The big model's answers train the small one, and judge it; a second call writes none anew."""
    lines = (json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(64))
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    big, small = models / "teacher.gguf", models / "student.gguf"
    out, how = tmp_path / "o.gguf", ["--kind=small", f"--draft={small}", "--seq-len=32"]
    how += [f"--prompts={tmp_path}/prompts.jsonl", "--answers=48", "--max-tokens=12"]
    how += ["--steps=2", "--rows=2", f"--config.data.cache_dir={tmp_path}/rows"]
    assert draft.main([f"{big}@dense:float32", f"--out={out}", *how]) == 0
    said = capsys.readouterr().out
    assert f"\n  llama-server -m {big} -md {out} --spec-type draft-simple" in said
    assert "accepted a pass" in said and "48 of 48 prompts answered" in said
    assert said.count("next:") == 1 and "kdjax verify" not in said  # the run's own are not said
    answers = (tmp_path / "o.answers.jsonl").read_bytes()
    assert 40 <= answers.count(b"def f") <= 48  # empty ones are left out
    # In the workdir a model of the draft's name stays.
    kept = shutil.copy(big, tmp_path / "o.run" / "o.gguf")
    again = [f"--out={out}", "--overwrite", *how]
    assert draft.main([f"{big}@dense:float32", *again]) == 0
    assert kept.read_bytes() == big.read_bytes()
    assert (tmp_path / "o.answers.jsonl").read_bytes() == answers
    assert open_table(out).info("blk.0.ffn_up.weight").dtype == "Q8_0"
    begun = [f"{big}@dense:float32", f"--draft={out}", "--prompt=def f"]
    assert generate.main([*begun, "--max-tokens=4"]) == 0


def test_a_draft_is_planned_for_another_machine_before_its_answers_are_there(tmp_path, capsys):
    """The command makes the answers itself: their file is not missing, that of --data is."""
    flags = [str(demo.TEACHER), "--kind=small", f"--draft={demo.STUDENT}"]
    flags += [f"--out={tmp_path}/o.gguf", "--device=RTX4090"]
    assert draft.main([*flags, "--plan", "--devices=2", "--memory=8GB"]) == 0
    said = capsys.readouterr()
    assert "of 7.20: fits" in said.out and "mesh: data=2" in said.err
    assert "missing" not in said.err and not any(tmp_path.iterdir())
    assert draft.main([*flags, "--plan", f"--data={tmp_path}/text"]) == 0
    assert f"--config.data.train={tmp_path}/text\n" in capsys.readouterr().err
    assert draft.main(flags) == 2
    assert "--device describes another machine: expected --plan" in capsys.readouterr().err


def test_a_server_that_would_not_draft_is_not_suggested():
    """Vocabularies of 2,304 and 2,048 ids: llama.cpp allows 128 of difference."""

    def suggest(served):
        args = argparse.Namespace(model=str(served), out=demo.STUDENT)
        return draft._KINDS["small"].list_next(args, 3)

    refused, command = suggest(demo.TEACHER)
    assert "would not draft" in refused and "2,304 tokens and the draft 2,048" in refused
    assert "kdjax generate" in command
    assert suggest(demo.STUDENT)[0].startswith("  llama-server -m ")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--kind=small"], "name the small model that trains: --draft=SMALL.gguf"),
        (["--draft=s.gguf"], "--draft names a small model: give --kind=small"),
        (["--kind=small", "--draft=s.gguf", "--new"], "--new begins a block; expected none"),
        (["--data=a", "--prompts=b"], "--prompts: not allowed with argument --data"),
        (["--data=none/"], "error: none/: no file found"),
        (["--prompts=none/"], "error: none/: no file found"),
        (["--prompts="], "argument --prompts: found ''; expected folders, globs or files"),
        (["--answers=0"], "--answers=0 must be 1 or more"),
        (["--seed=-1"], "--seed=-1 must be 0 or more"),
        (["--kind=small", "--draft={models}/student.gguf", "--answers=1"], "to judge by"),
        (["--type=q4_k_m"], "found --type=q4_k_m; expected one of F32"),
        (["--out=a.apr"], "error: a.apr: expected a name that ends in .gguf. Add the suffix."),
        ([], r"a qwen2 model; expected one of qwen3_5_text"),
    ],
)
def test_flags_that_do_not_go_together_have_one_line(models, tmp_path, capsys, flags, message):
    """Nothing is made."""
    flags = [flag.format(models=models) for flag in flags]
    given = {flag.partition("=")[0]: flag for flag in (f"--out={tmp_path}/o.gguf", *flags)}
    assert draft.main([str(models / "student.gguf"), *given.values()]) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1 and not any(tmp_path.iterdir())


def test_few_answers_are_warned_of_before_a_model_is_loaded(caplog):
    """None of 72 is held out once in 104 times, of 71 once in 98: 0.9375 ** 72 = 0.0096."""
    for count in (71, 72):
        draft._check_answers(count, 1 / 16)
    (said,) = caplog.messages
    assert said.startswith("--answers=71: ") and "; 72 nearly always leave one" in said


@pytest.mark.parametrize("given, told", [(1, "1 prompt; expected two"), (5, "5 prompts: ")])
def test_few_prompts_are_told_of_before_a_model_is_loaded(
    models, tmp_path, capsys, monkeypatch, given, told
):
    """A prompt that comes twice has one answer."""
    lines = [json.dumps({"text": f"{i} dogs sat there and {i} came"}) for i in (0, *range(given))]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(draft, "_answer", lambda _: 3)
    model = str(models / "student.gguf")
    files = [f"--out={tmp_path}/o.gguf", f"--prompts={tmp_path}/p.jsonl"]
    flags = ["--kind=small", f"--draft={model}", *files]
    assert draft.main([model, *flags]) == (2 if given == 1 else 3)
    assert f"p.jsonl: found {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "hold the same weights, whatever their names"),
        (["--seq-len=99999"], "data.seq_len=99999 exceeds the teacher's context"),
        (["--config.data.heldout=none/"], "--config.data.heldout=none/"),
        (["--config.data.end_of_document=zz"], "data.end_of_document='zz' is not a token"),
    ],
)
def test_what_needs_no_answers_is_refused_before_they_are_written(
    models, tmp_path, capsys, monkeypatch, flags, message
):
    """They take long."""
    monkeypatch.setattr(answers, "main", lambda _: pytest.fail("answers are written"))
    lines = (json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(80))
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    big, small = models / "teacher.gguf", models / "student.gguf"
    copied = shutil.copy(big, tmp_path / "other.gguf")
    given = ["--kind=small", f"--draft={small if flags else copied}", f"--out={tmp_path}/o.gguf"]
    assert draft.main([str(big), f"--prompts={tmp_path}/prompts.jsonl", *given, *flags]) == 2
    assert message in capsys.readouterr().err.splitlines()[-2 if "heldout" in message else -1]
    assert {file.name for file in tmp_path.iterdir()} == {"prompts.jsonl", "other.gguf"}
    if not flags:  # the message says how it is meant
        monkeypatch.setenv("KDJAX_ALLOW_DEGENERATE_KD", "1")
        monkeypatch.setattr(answers, "main", lambda _: 3)
        assert draft.main([str(big), f"--prompts={tmp_path}/prompts.jsonl", *given]) == 3


@pytest.mark.slow
def test_a_new_block_begins_where_the_file_has_none(config, tmp_path):
    write_random_gguf(tmp_path / "n.gguf", SHAPE._replace(drafts=0), recipe="q8_0")
    config.student.path = str(tmp_path / "n.gguf")
    with pytest.raises(UserError, match=r"no block that drafts; .*student\.block=new"):
        survey(config)
    config.student.block, config.train.steps, config.optim.warmup_steps = "new", 1, 0
    job = assemble(config, tmp_path / "run")
    begun = job.make_state()
    drawn = kdjax.take_block(kdjax.load(config.student.path), seed=config.train.seed)
    jax.tree.map(np.testing.assert_array_equal, begun.params["mtp"], drawn.params["mtp"])
    assert go(config, tmp_path / "run", job=job) == "finished"
    opened = kdjax.load(tmp_path / "run", base=config.student.path, weights="packed")
    assert opened.spec.drafts == 1 and "mtp" in opened.params
