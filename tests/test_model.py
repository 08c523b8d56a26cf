"""One opened and one loaded bundle: what each reads, and what it refuses."""

import json
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import cases

from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import MissingFileError, UserError
from kdjax.formats import gguf
from kdjax.models import loading
from kdjax.models.checkpoint import ModelArgument, open_checkpoint, run_sources
from kdjax.models.model import Model, load, load_model


@pytest.fixture(scope="module")
def student(models):
    return load(models / "student.gguf", dtype="float32")


def test_a_header_is_parsed_once_and_the_decoder_traced_once(models, monkeypatch):
    opened, traced = [], []
    parse, functional = gguf._read_shards, loading.functional
    monkeypatch.setattr(gguf, "_read_shards", lambda *a: (opened.append(a), parse(*a))[1])
    monkeypatch.setattr(loading, "functional", lambda *a: (traced.append(a), functional(*a))[1])
    loading._shapes.cache_clear()
    checkpoint = open_checkpoint(models / "student.gguf")
    first = (
        checkpoint.names,
        checkpoint.tokenizer.tokens,
        checkpoint.spec,
        checkpoint.tokenizer.opening_id,
    )
    again = (
        checkpoint.names,
        checkpoint.tokenizer.tokens,
        checkpoint.spec,
        checkpoint.tokenizer.opening_id,
    )
    assert first == again and len(opened) == len(traced) == 1


def test_rows_that_fsdp_splits_are_read_once_and_only_for_the_devices_that_hold_them(
    models, monkeypatch
):
    taken: dict[str, list[int]] = {}

    class Read(np.ndarray):
        name: str

        def __getitem__(self, at):
            found = np.asarray(self).__getitem__(at)
            taken[self.name].append(found.nbytes)
            return found

    def raw(table, name, whole=gguf.GGUFTable.raw):
        view = whole(table, name).view(Read)
        view.name, taken[name] = name, []
        return view

    monkeypatch.setattr(gguf.GGUFTable, "raw", raw)
    mesh = make_mesh(2, 2, 1, jax.devices()[:4])
    checkpoint = open_checkpoint(models / "teacher.gguf")
    load_model(checkpoint, placement=Placement(mesh), weights="packed")
    table = checkpoint.table
    matrices = [name for name in taken if len(table.info(name).shape) > 1]
    assert len(matrices) > 7
    for name in matrices:
        assert taken[name] == [table.info(name).nbytes // 2] * 2, name


@pytest.mark.parametrize(
    ("weights", "fsdp"), cases(("packed", 2), slow=[("packed", 1), ("dense", 1), ("float8", 1)])
)
def test_programs_of_a_load_are_compiled_by_threads_for_it_to_find(models, caplog, weights, fsdp):
    caplog.set_level("DEBUG", "jax._src.dispatch")
    mesh = make_mesh(1, fsdp, 1, jax.devices()[-fsdp:])  # devices that no other test loads onto
    checkpoint = open_checkpoint(models / "teacher.gguf")
    load_model(checkpoint, placement=Placement(mesh), weights=weights, dtype="float16")
    finished = [record for record in caplog.records if "XLA compilation" in record.getMessage()]
    by = [r.threadName for r in finished if re.search(r"\b(_store|_read)\b", r.getMessage())]
    assert len(by) > 5 and threading.main_thread().name not in by


def test_logits_of_lists_are_those_of_arrays(student):
    rows = np.random.default_rng(0).integers(0, 300, (2, 9))
    places = np.broadcast_to(np.arange(9), (2, 9))
    explicit = student.logits(jnp.asarray(rows), np.ones_like(rows), places)
    np.testing.assert_array_equal(student.logits(rows.tolist()), explicit)
    assert explicit.shape == (2, 9, student.real_vocab) and explicit.dtype == jnp.float32
    assert student.real_vocab == student.tokenizer.vocab_size < student.vocab_size
    bare = student.replace(checkpoint=None)
    assert bare.tokenizer is None and bare.real_vocab == student.vocab_size


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2], r"shape \(2,\).*a single row in brackets"),
        ([[1, 2], [3]], "rows of equal length"),
        ([[0.5]], "whole numbers"),
        ([[1, -1]], "ids from -1 to 1; expected 0 to 319"),
        ([[10**6]], "ids from 1000000 to 1000000"),
    ],
)
def test_tokens_that_are_none_are_refused(student, tokens, message):
    with pytest.raises(UserError, match=message):
        student.logits(tokens)


def test_weights_of_an_unknown_kind_are_refused(models):
    with pytest.raises(UserError, match="weights='int3'; expected one of dense, packed, float8"):
        load(models / "student.gguf", weights="int3")


class _Bigram(nnx.Module):
    def __init__(self, rows, width, rngs, steps=None):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (rows, width)))
        self.steps = steps

    def hidden(self, tokens, segment_ids, positions):
        return self.embed[...][tokens]

    def head_weight(self):
        return self.embed[...]


def test_a_module_of_ones_own(student):
    module = _Bigram(7, 3, nnx.Rngs(0))
    model = Model.from_module(module)
    table = np.asarray(module.embed[...], np.float64)
    np.testing.assert_allclose(model.logits([[2, 5]])[0], table[[2, 5]] @ table.T, rtol=1e-5)
    assert model.vocab_size == model.real_vocab == 7 and model.tokenizer is None
    told = Model.from_module(module, student.tokenizer)
    assert told.tokenizer is student.tokenizer and told.real_vocab == 7
    counting = _Bigram(7, 3, nnx.Rngs(0), steps=nnx.Variable(jnp.zeros(2)))
    with pytest.raises(UserError, match=r"_Bigram has 1 arrays that are not an nnx\.Param"):
        Model.from_module(counting)


def test_a_model_is_shown_in_one_line_and_in_a_short_table(student):
    shown, table = repr(student), student._repr_html_()
    assert shown == f"<kdjax.Model {student}>" and "\n" not in shown and len(shown) < 120
    assert "student.gguf" in shown and f"{student.resident_bytes / 1e9:.2f} GB" in shown
    assert table.count("<tr>") == 3 and len(table) < 800
    leaves = len(jax.tree.leaves(student.params))
    assert f"{leaves} arrays, float32, " in table and "qwen2, 2 layers, width " in table
    odd = student.replace(kind="<b>", params={}, spec=None)
    assert "&lt;b&gt;" in odd._repr_html_() and "no arrays" in odd._repr_html_()


def test_forms():
    assert ModelArgument.parse("a@b/c.gguf") == ModelArgument("a@b/c.gguf")
    form = ModelArgument.parse("a@b/c.gguf@float8:float32")
    assert (form.path, form.weights, form.dtype) == ("a@b/c.gguf", "float8", "float32")
    assert str(form) == "c.gguf@float8:float32"
    old = {"dequant": "dense", "q4k": "packed", "fp8": "float8"}
    for word, weights in old.items():
        assert ModelArgument.parse(f"c.gguf@{word}:float32") == ModelArgument(
            "c.gguf", weights, "float32"
        )
    with pytest.raises(UserError, match="found the form 'q5k'; expected dense or packed"):
        ModelArgument.parse("c.gguf@q5k")


def test_a_runs_receipt_names_its_student_and_tokenizer(tmp_path):
    def record(student, tokenizer):
        config = {"student": {"path": student}, "data": {"tokenizer": tokenizer}}
        receipt = {"cwd": str(tmp_path / "home"), "config": config}
        (tmp_path / "receipt.json").write_text(json.dumps(receipt))

    for name in ("s.gguf", "t.json", "other.gguf"):
        path = tmp_path / "home" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    home = str(tmp_path / "home")
    with pytest.raises(MissingFileError, match=r"does not say which student.*--student=PATH"):
        run_sources(tmp_path)
    record("s.gguf", "")
    assert run_sources(tmp_path) == (f"{home}/s.gguf", "")
    record("s.gguf", "t.json")
    assert run_sources(tmp_path) == (f"{home}/s.gguf", f"{home}/t.json")
    given = f"{home}/other.gguf"
    assert run_sources(tmp_path, given, "mine") == (given, "mine")
    record("gone.gguf", "gone.json")
    with pytest.raises(MissingFileError, match=r"gone\.gguf: no such file.*--student=PATH"):
        run_sources(tmp_path)
    assert run_sources(tmp_path, given) == (given, "")


def test_a_folder_is_named_by_more_than_its_file(tmp_path):
    """Both models of two folders were called model.safetensors."""
    golden = Path(__file__).parent / "goldens" / "llama"
    cached = tmp_path / "models--org--Small-Model" / "snapshots" / (40 * "a")
    mine = tmp_path / "mine"
    for folder, name in ((mine, "mine/model.safetensors"), (cached, "hf:org/Small-Model")):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(golden)
        assert str(open_checkpoint(folder)) == name == load(folder).source
