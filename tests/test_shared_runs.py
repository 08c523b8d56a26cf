"""Runs with a teacher of another tokenizer: resume, meshes, kinds, own answers, conversations."""

import contextlib
import copy
import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import chex
import numpy as np
import pytest
from conftest import make_tiny_config, start_over
from quick import cases
from resuming import assert_goes_on, assert_resumes, assert_trains_alike, finish
from test_run import saved

from kdjax.commands import evaluate
from kdjax.config import Config, set_fields, validate
from kdjax.device.placement import Placement
from kdjax.device.runtime import Devices
from kdjax.device.sharding import make_local_mesh
from kdjax.errors import UserError
from kdjax.models import alignment
from kdjax.models.alignment import TokenMap
from kdjax.training import compiled, plan
from kdjax.training.caching import cache_teacher
from kdjax.training.job import assemble
from kdjax.training.teachers import RUNNING, CachedHidden, CachedTopK
from kdjax.training.vocabulary import SharedVocabulary
from scripts.bench.made_tokenizers import write_students
from scripts.bench.synthetic import SHAPES, pair_headers

pytestmark = pytest.mark.usefixtures("one_device")

SHAPE = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "max_window_layers": 2,
}
TURNS = (
    "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def make_config(models, folder):
    """The tiny run, with a student of random weights and of another tokenizer and template."""
    config = make_tiny_config(models, folder)
    texts = ["def f1_2(self):\n    return 12 + self.x\n", "self.x return def " * 3]
    marks = dict(end="<end>", template=TURNS, marks=["<turn>", "<|endoftext|>"])
    write_students(SHAPE, texts, 330, folder / "students", **marks)
    config.student.path, config.student.init = str(folder / "students/byte-level"), "random"
    config.loss.allow_few_shared = True
    return config


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    return finish(make_config(models, folder), folder)


def test_each_column_of_a_batch_has_a_number_a_position(run):
    """A column named `teacher_weights` would be repeated for each position."""
    job = run[2]
    placed = job.step.put(job.source.next({}))
    assert {"teacher_places", "teacher_byte_weights"} < placed.keys()
    assert {x.shape for x in placed.values()} == {placed["tokens"].shape}


def test_text_alone_is_not_encoded_for_a_teacher(run, tmp_path):
    """It trains as without a teacher, whom evaluations ask."""
    config = copy.deepcopy(run[0])
    config.loss.alpha = 1.0
    folders = tmp_path / "with", tmp_path / "without"
    for folder in folders:
        folder.mkdir()
    _, workdir, job, recorder = finish(config, folders[0])
    batch = job.source.next({})
    added = job.step.put(batch).keys() - job.step.put(batch, heldout=True).keys()
    assert not added and not any("teacher" in name for name in (*batch, *job.step.put(batch)))
    assert all("kl" in call[2] for call in recorder.calls if call[0] == "eval")

    config.teacher.path = ""
    _, without, other, _ = finish(config, folders[1])
    trained, wanted = (saved(*one)[1].params for one in ((job, workdir), (other, without)))
    chex.assert_trees_all_equal(trained, wanted)


@pytest.fixture(scope="module")
def cached(run, tmp_path_factory):
    """The same run from a cache of the teacher's hidden states."""
    folder = tmp_path_factory.mktemp("cached")
    config = copy.deepcopy(run[0])
    cache_teacher(config, folder / "cache", CachedHidden())
    config.teacher.cache = str(folder / "cache")
    return finish(config, folder)


def test_a_run_goes_on_bit_for_bit(run, tmp_path):
    figures = assert_goes_on(run, tmp_path / "parts", stop_at=3)
    assert 0 < figures[0]["compared"] < 1


@pytest.mark.slow
def test_a_run_trains_alike_on_a_mesh(run, tmp_path):
    assert_trains_alike(run, tmp_path / "mesh", data=2, fsdp=2)


def test_a_cache_trains_as_the_teacher_itself_bit_for_bit(cached, run, tmp_path):
    assert cached[3].curve() == run[3].curve()
    assert_goes_on(cached, tmp_path / "parts", stop_at=3)


def test_a_cache_says_what_its_teacher_read(cached, run, monkeypatch, tmp_path):
    """Rows of the teacher's tokens lie beside its states, and are read in place of the text."""
    job, live = cached[2], run[2]
    spec = job.cache.spec
    assert spec.settings == {"teacher_tokenizer": live.pair.teacher.tokenizer.content_hash}
    monkeypatch.setattr(alignment, "read_batch", None)
    batch = start_over(job, tmp_path).source.next({})
    monkeypatch.undo()
    for name, column in start_over(live, tmp_path).source.next({}).items():
        np.testing.assert_array_equal(batch[name], column)


def test_a_cache_of_another_pair_is_refused_in_a_line_each(cached, run, tmp_path):
    config = copy.deepcopy(cached[0])
    config.student.path = str(Path(config.student.path).parent / "sentencepiece")
    with pytest.raises(UserError, match=r"the cache of another run:\n  rows: .*\n  tokenizer: "):
        assemble(config, tmp_path)
    index = Path(cached[0].teacher.cache) / "index.json"
    other = tmp_path / "other"
    shutil.copytree(index.parent, other)
    text = index.read_text().replace(
        next(iter(json.loads(index.read_text())["about"]["settings"].values())), "0" * 64
    )
    (other / "index.json").write_text(text)
    config = copy.deepcopy(cached[0])
    config.teacher.cache = str(other)
    with pytest.raises(UserError, match=r"settings: the cache has \{'teacher_tokenizer': '0000"):
        assemble(config, tmp_path)
    with pytest.raises(UserError, match="two tokenizers and a teacher of the kind 'topk'"):
        cache_teacher(run[0], tmp_path / "topk", CachedTopK(8))


@pytest.mark.parametrize("weights", cases("packed", slow=["dense"]))
def test_a_step_is_planned_within_5_percent(run, weights):
    """By XLA's account on a CPU; heads of 8,000 rows of which 6,000 are shared are most of it."""
    sizes = dict(layers=3, hidden=384, heads=6, kv_heads=2, head=64, ffn=1024, rows=8000)
    teacher = SHAPES["tiny-teacher"]._replace(**sizes)
    student = teacher._replace(layers=2, hidden=256, heads=4, ffn=768)
    names = tuple(map(str, range(8000)))
    known = run[2].pair.tokenizer, run[2].pair.teacher.tokenizer
    tokenizers = [dataclasses.replace(one, tokens=names) for one in known]
    pair = pair_headers(teacher, student, tokenizers[0])
    ids = np.append(np.arange(6000, dtype=np.int32)[::-1], np.full(2000, -1, np.int32))
    shared = SharedVocabulary(8000, 8000, TokenMap(*tokenizers, ids), 8000)
    pair = dataclasses.replace(pair, vocabulary=shared)
    config, mesh = Config(), make_local_mesh(1)
    fields = {"data.seq_len": 256, "data.max_segments": 1, "train.batch_size": 8}
    fields |= {"train.microbatches": 1, "train.compute_dtype": "float32", "student.remat": "full"}
    set_fields(config, fields | {"loss.chunk_tokens": 512, "teacher.weights": weights})
    kind = RUNNING[weights]
    held = compiled.count_step(config, pair, Placement.on(mesh), kind)
    cpu = Devices("cpu", "test", 1, int(1e9), None)
    made = plan.make_plan(config, pair, mesh, cpu, kind)
    assert sum(made.resident.values()) == pytest.approx(held.arguments, rel=0.01)
    assert made.peak == pytest.approx(sum(held), rel=0.05)


@pytest.mark.slow
def test_evaluate_compares_a_run_with_its_teacher(run, tmp_path, monkeypatch):
    monkeypatch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())
    config, workdir, _, _ = run
    out = tmp_path / "figures.json"
    arguments = [workdir, f"--data={config.data.train}", f"--teacher={config.teacher.path}"]
    arguments += [f"--student={config.student.path}", "--rows=8", "--seq-len=32", f"--json={out}"]
    turns = [{"role": "user", "content": "x?"}, {"role": "assistant", "content": "return self.x"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    arguments[1:1] = [f"--data=chat={tmp_path / 'chat.jsonl'}"]
    arguments[2] = arguments[2].replace("--data=", "--data=text=")
    assert evaluate.main([*map(str, arguments), "--no-health"]) == 0
    chat, figures, _ = json.loads(out.read_text())["held_out"].values()
    assert chat["overall"]["compared"] > 0.3  # each side reads its own template
    assert 0.3 < figures["overall"]["compared"] < 1 and figures["overall"]["kl_ts"] > 0
    assert np.isnan(figures["classes"]["number"].get("kl_ts", np.nan))  # cut otherwise


@pytest.fixture(scope="module")
def job(models, tmp_path_factory):
    """A job on conversations, a quarter of whose rows are self-generated answers."""
    folder = tmp_path_factory.mktemp("answers")
    config = make_config(models, folder)
    path = folder / "chats.jsonl"
    lines = []
    for n, m in itertools.product(range(12), range(4)):
        said = f"return {n} + self.x", f"def f{n}_{m}(self):\n    return {n * m} + self.x"
        roles = zip(("user", "assistant"), said, strict=True)
        lines.append({"messages": [{"role": role, "content": text} for role, text in roles]})
    path.write_text("\n".join(map(json.dumps, lines)))
    config.data.train = config.rollout.prompts = str(path)
    config.data.seq_len, config.rollout.share, config.rollout.every = 96, 0.25, 4
    config.rollout.max_tokens, config.rollout.answers = 8, 2
    config.rollout.prompt_tokens, config.rollout.batch_size = 60, 16
    config.checkpoint.every, config.eval.every, config.checkpoint.keep = 3, 0, 10
    validate(config)
    return assemble(config, folder / "never")


@pytest.mark.slow
def test_answers_are_compared_in_the_teachers_template_and_teach_nothing_alone(job, tmp_path):
    source = start_over(job, tmp_path / "run").source
    batch = source.next(job.make_state().params)
    whole = job.step.vocabulary.complete(batch)
    own, trained = slice(0, 2), whole["weights"] != 0
    assert not batch["ce_weights"][own].any() and (batch["ce_weights"][2:] == 1).all()
    teacher, student = job.pair.teacher.tokenizer, job.pair.tokenizer
    for rows, least in ((own, 1), (slice(2, 8), 20)):
        compared = (whole["teacher_places"][rows] >= 0) & trained[rows]
        assert compared.sum() >= least
    for row in range(8):
        text = teacher.decode(whole["teacher_tokens"][row].tolist())
        assert "<|im_start|>assistant\n" in text and "<turn>" not in text
        assert "<turn>assistant: " in student.decode(whole["tokens"][row].tolist())
    # Of answers the divergence alone counts, by the float32 sums of a step.
    batch = {name: x[:2] for name, x in whole.items()}
    masked = batch | {"weights": batch["weights"] * (batch["teacher_places"] < 0)}
    assert masked["weights"].any()
    _, metrics = job.step(job.make_state(), job.teacher_params, spread(masked))
    assert metrics.means()["loss"] == 0 and metrics.means()["ce"] > 0


@pytest.mark.slow
def test_a_cache_of_conversations_trains_as_the_teacher_itself(job, tmp_path):
    config, ends = copy.deepcopy(job.config), []
    config.rollout.prompts = ""
    for cache in ("", str(tmp_path / "cache")):
        if cache:
            cache_teacher(config, tmp_path / "cache", CachedHidden())
        config.teacher.cache = cache
        folder = tmp_path / f"from-{len(ends)}"
        folder.mkdir()
        ends.append(finish(copy.deepcopy(config), folder))
    assert ends[0][3].curve() == ends[1][3].curve()
    batch = ends[1][2].source.next({})
    text = job.pair.teacher.tokenizer.decode(batch["teacher_tokens"][0].tolist())
    assert "<|im_start|>assistant\n" in text and (batch["teacher_places"] >= 0).any()


def spread(batch):
    """Its two rows, four times."""
    return {name: np.tile(x, (4, 1)) for name, x in batch.items()}


@pytest.mark.slow
def test_rounds_of_answers_go_on_bit_for_bit(job, straight, tmp_path):
    assert_resumes(job, tmp_path / "run", straight, "step", 6)
    figures = straight[1].last()
    assert figures["step", 10]["loss"] > 0 and "divergence" not in figures["round", 1]
