"""Exports: what is read back equals what was meant, and nothing half-made is ever left."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from exporting import (
    a_student,
    assert_same,
    corrupted,
    left_in,
    load,
    logits_of,
    short,
    write_odd,
    write_small_tokenizer,
)
from quick import cases

import kdjax
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import UserError
from kdjax.export import (
    SelfCheckError,
    export_apr,
    export_gguf,
    export_hf,
    formats,
    staging,
    vocabulary,
    weights,
)
from kdjax.formats import open_table
from kdjax.formats.blocks import decode
from kdjax.formats.gguf import write_gguf
from kdjax.formats.recipes import RECIPES, tensor_type
from kdjax.models.checkpoint import Checkpoint, cut_layers, open_checkpoint
from kdjax.models.decoder import Compute, functional
from kdjax.models.loading import count_parameters
from kdjax.models.model import load_model
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import from_gguf, load_tokenizer

GOLDENS = Path(__file__).parent / "goldens"
EXPORTS = {"hf": export_hf, "gguf": export_gguf, "apr": export_apr}
SUFFIXES = {"hf": "", "gguf": ".gguf", "apr": ".apr"}
ROUNDED = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


@pytest.fixture(scope="module")
def student(models):
    return a_student(models / "student.gguf")


@pytest.fixture(scope="module")
def exported(student, tmp_path_factory):
    """Path and report of the student in a format and type, written once; nothing may change it."""
    written = {}

    def export(kind, dtype="f32"):
        if (kind, dtype) not in written:
            out = tmp_path_factory.mktemp("exported") / f"student{SUFFIXES[kind]}"
            written[kind, dtype] = out, EXPORTS[kind](student, out, dtype=dtype)
        return written[kind, dtype]

    return export


def copied(path, folder):
    """A copy of a shared export, to replace or to spoil."""
    out = folder / path.name
    (shutil.copytree if path.is_dir() else shutil.copyfile)(path, out)
    return out


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("dtype", cases("f32", slow=["f16", "bf16"]))
def test_unquantized_exports_come_back_as_rounding_gives_them(kind, dtype, student, exported):
    """To the bit in f32; in f16 and bf16 as rounding gives them, and the report says how far."""
    out, report = exported(kind, dtype)
    model = load(out)
    assert short(model.spec) == short(student.spec)
    if dtype == "f32":
        assert report.error == 0 and "equal bit for bit" in str(report)
    else:
        assert 1e-5 < report.error < 2.0**-8
        assert f"rounded to {dtype.upper()}, relative error 0." in str(report)
        assert "bit for bit" not in str(report)
    whole = kind == "hf"  # elsewhere norms and biases stay F32

    def rounded(path, x):
        kept = "bias" in str(path) or "norm" in str(path)
        as_stored = jnp.asarray(x).astype(ROUNDED[dtype]).astype(jnp.float32)
        return x if kept and not whole else np.asarray(as_stored)

    want = jax.tree_util.tree_map_with_path(rounded, student.params)
    assert_same(model.params, want)
    np.testing.assert_array_equal(logits_of(model), logits_of(student.replace(params=want)))
    assert model.tokenizer.tokens == student.tokenizer.tokens
    assert left_in(out.parent) == [out.name]


@pytest.mark.parametrize(
    "dtype, error",
    cases(
        ("q4_k_m", 0.09),
        slow=[("q8_0", 0.01), ("q6_k", 0.02), ("q5_0", 0.06), ("q4_0", 0.12), ("iq4_xs", 0.09)],
    ),
)
def test_quantized_exports_lose_what_their_type_loses(dtype, error, student, exported):
    out, report = exported("gguf", dtype)
    assert 0.001 < report.error < error
    want = logits_of(student)
    assert np.linalg.norm(logits_of(load(out)) - want) < 0.6 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", cases("q4_k_m", slow=["q6_k", "q2_k", "bf16"]))
def test_blocks_as_they_are_have_the_header_of_their_recipe(dtype, student, tmp_path):
    """Rows of 128 are no whole K-blocks: most matrices have what stands in for the type."""
    export_gguf(student, tmp_path / "a.gguf", dtype=dtype)
    kept = kdjax.load(tmp_path / "a.gguf", weights="packed", dtype="float32")
    export_gguf(kept, tmp_path / "b.gguf")
    found = [open_table(tmp_path / f"{name}.gguf").metadata for name in "ab"]
    assert [x["general.file_type"] for x in found] == [RECIPES[dtype].file_type] * 2


def test_q4_k_m_has_the_types_of_llama_quantize(exported, models):
    ours, theirs = open_table(exported("gguf", "q4_k_m")[0]), open_table(models / "student.gguf")
    assert {n: ours.info(n)[1:] for n in ours} == {n: theirs.info(n)[1:] for n in theirs}
    assert ours.metadata.keys() == theirs.metadata.keys()
    for key in ours.metadata:
        np.testing.assert_array_equal(ours.metadata[key], theirs.metadata[key])


def test_iq4_gives_shared_values_and_early_layers_more_bits():
    """`llama_tensor_get_type` does so for a model of 24 layers whose values 7 heads share."""

    def types(part, groups, layers=24, width=1024):
        sizes = dict(layers=layers, groups=groups, tied=False)
        path = ("blocks", "attn" if part == "v" else "mlp", part, "weight")
        return [tensor_type(RECIPES["iq4_xs"], path, i, width, **sizes) for i in range(layers)]

    assert types("v", 7) == ["Q5_K"] * 24 and types("v", 2) == ["IQ4_XS"] * 24
    assert types("down", 7) == ["Q5_K"] * 3 + ["IQ4_XS"] * 21
    assert types("up", 7) == ["IQ4_XS"] * 24
    assert types("down", 7, width=896) == ["Q5_1"] * 3 + ["IQ4_NL"] * 21


def test_fewer_bits_are_mixed_as_llama_quantize_mixes_them():
    """Models of 24 and 32 layers; rows of 896 are no whole blocks of 256."""

    def types(kind, part, *, layers=24, width=1024, groups=7, experts=0):
        sizes = dict(layers=layers, groups=groups, tied=False, experts=experts)
        path = ("blocks", "attn" if part in "qkvo" else "mlp", part, "weight")
        return [tensor_type(RECIPES[kind], path, i, width, **sizes) for i in range(layers)]

    assert types("q2_k", "v") == ["Q4_K"] * 24 and types("q2_k", "v", groups=2) == ["Q3_K"] * 24
    assert types("q2_k", "down") == types("q2_k", "o") == ["Q3_K"] * 24
    assert types("q2_k", "gate") == ["Q2_K"] * 24
    assert types("q2_k", "q", width=896) == ["IQ4_NL"] * 24
    assert types("q3_k_m", "v", layers=32) == ["Q5_K"] * 2 + ["Q4_K"] * 30
    assert types("q3_k_m", "down") == ["Q5_K"] + ["Q4_K"] * 23
    assert types("q3_k_m", "o", width=896) == ["Q5_0"] * 24
    assert types("q3_k_m", "up") == ["Q3_K"] * 24
    assert types("mxfp4", "up") == ["Q8_0"] * 24
    assert types("mxfp4", "up", experts=8) == ["MXFP4"] * 24
    assert types("mxfp4", "q", experts=8) == ["Q8_0"] * 24
    tied = dict(layers=24, groups=7, tied=True)
    assert tensor_type(RECIPES["q2_k"], ("embed",), 0, 1536, **tied) == "Q6_K"
    assert tensor_type(RECIPES["q2_k"], ("embed",), 0, 896, **tied) == "Q8_0"


def test_a_tied_head_is_exported_tied(student, exported):
    folder = exported("hf")[0]
    assert student.spec.tied
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in open_table(folder)
    assert "output.weight" not in open_table(exported("gguf")[0])


def test_transformers_is_told_a_version_that_made_the_tokenizer(student, exported, tmp_path):
    """Without it, 4.57.3 to 5.17 say at each load that a large vocabulary is split wrongly."""

    def config(folder):
        return json.loads((folder / "config.json").read_text())

    assert config(exported("hf")[0])["transformers_version"] >= "5"
    source = shutil.copytree(exported("hf")[0], tmp_path / "source")
    older = config(source) | {"transformers_version": "4.51.3"}
    (source / "config.json").write_text(json.dumps(older))
    export_hf(load(source), tmp_path / "again")
    assert config(tmp_path / "again")["transformers_version"] == "4.51.3"


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory):
    return write_small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.gguf")


@pytest.mark.parametrize(
    "case",
    cases(
        "llama_scaled",
        slow=[
            "qwen3",
            "smollm3",
            "qwen2_untied",
            "qwen2_yarn",
            "qwen2_yarn_mscale",
            "llama",
            "olmo2",
        ],
    ),
)
@pytest.mark.parametrize("kind", EXPORTS)
def test_every_family_and_rope_comes_back(case, kind, small_tokenizer, tmp_path):
    """Through GGUF a Llama's rows are interleaved and its scaling becomes divisors."""
    model = load(GOLDENS / case)
    source = open_checkpoint(GOLDENS / case, tokenizer=str(small_tokenizer))
    out = tmp_path / f"a{SUFFIXES[kind]}"
    EXPORTS[kind](model.replace(checkpoint=source), out)
    again = load(out)
    assert_same(again.params, model.params)
    want = logits_of(model)[..., :142]
    np.testing.assert_allclose(logits_of(again), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_experts_come_back(kind, small_tokenizer, tmp_path):
    """In a folder as a tensor each, in GGUF as one a layer."""
    model = load(GOLDENS / "qwen3_moe")
    source = open_checkpoint(GOLDENS / "qwen3_moe", tokenizer=str(small_tokenizer))
    out = tmp_path / f"a{SUFFIXES[kind]}"
    EXPORTS[kind](model.replace(checkpoint=source), out)
    again = load(out)
    assert_same(again.params, model.params)
    assert (again.spec.experts, again.spec.experts_used, again.spec.expert_size) == (8, 3, 32)
    table = open_table(out)
    if kind == "gguf":
        assert table.info("blk.1.ffn_down_exps.weight").shape == (8, 48, 32)
        assert table.info("blk.1.ffn_gate_inp.weight").dtype == "F32"
    else:
        assert table.info("model.layers.1.mlp.experts.7.down_proj.weight").shape == (48, 32)


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("qwen3_moe_plain", "gguf", "norm_topk_prob=false.*Export with export_hf"),
        ("qwen3_moe", "apr", "without experts, which .apr files.*Use export_gguf"),
    ],
)
def test_experts_that_a_format_cannot_tell_are_refused(
    case, kind, message, small_tokenizer, tmp_path
):
    source = open_checkpoint(GOLDENS / case, tokenizer=str(small_tokenizer))
    with pytest.raises(UserError, match=message):
        EXPORTS[kind](load(GOLDENS / case).replace(checkpoint=source), tmp_path / f"a.{kind}")


def with_spec(case, tokenizer, **changes):
    """The golden's parameters in a model that differs from it."""
    model = load(GOLDENS / case)
    spec = dataclasses.replace(model.spec, **changes)
    functions = functional(spec, Compute())[0]
    source = open_checkpoint(GOLDENS / case, tokenizer=str(tokenizer))
    return model.replace(spec=spec, functions=functions, checkpoint=source)


@pytest.mark.slow
def test_local_layers_and_norms_of_one_and_more_come_back(small_tokenizer, tmp_path):
    """Hugging Face to GGUF, where norms are 1 + weight, and from there to Hugging Face."""
    near = load(GOLDENS / "gemma3").spec.layers[0]
    model = with_spec("gemma3", small_tokenizer, layers=(near,) * 4, attention_scale=0.0)
    EXPORTS["gguf"](model, tmp_path / "a.gguf")
    table = open_table(tmp_path / "a.gguf")
    raw = table.raw("blk.1.post_ffw_norm.weight").view(np.float32)
    weight = model.params["blocks"]["mlp_post_norm"]["weight"][1]
    np.testing.assert_array_equal(raw, 1 + np.asarray(weight))
    assert table.metadata["gemma3.attention.sliding_window"] == 7
    again = load(tmp_path / "a.gguf")
    EXPORTS["hf"](again, tmp_path / "b")
    want = logits_of(model)[..., :142]
    for found in (again, load(tmp_path / "b")):
        assert short(found.spec) == short(model.spec)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), found.params, model.params
        )
    np.testing.assert_allclose(logits_of(again), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "kept", "types"),
    cases(
        ("gemma3", (1, 2, 3), ["full_attention", "sliding_attention", "sliding_attention"]),
        slow=[
            ("qwen2_tied", (0, 2), ["full_attention"] * 2),  # an entry its family does not read
            ("llama", (0, 2), None),
            ("smollm3", (0, 3, 4), ["full_attention"] * 3),
        ],
    ),
)
def test_layers_that_are_cut_take_their_entries_with_them(
    case, kept, types, small_tokenizer, tmp_path
):
    source = open_checkpoint(GOLDENS / case, tokenizer=str(small_tokenizer))
    cut = cut_layers(source, kept)
    placement = Placement.on(make_mesh(1, 1, 1, jax.local_devices()[:1]))
    model = load_model(cut, placement=placement, dtype="float32")
    EXPORTS["hf"](model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["num_hidden_layers"], config.get("layer_types")) == (len(kept), types)
    again = load(tmp_path / "a")
    assert again.spec == cut.spec
    if case == "smollm3":
        assert config["no_rope_layers"] == [1, 0, 1]
        EXPORTS["apr"](model, tmp_path / "a.apr")
        assert load(tmp_path / "a.apr").spec == cut.spec
        with pytest.raises(UserError, match=r"than every 4th.*smollm3.*Export with export_hf"):
            EXPORTS["gguf"](model, tmp_path / "a.gguf")
    assert again.spec.layers == tuple(source.spec.layers[i] for i in kept)
    assert_same(again.params, model.params)


def test_a_mistral_without_a_window_is_a_llama_in_gguf(small_tokenizer, tmp_path):
    layers = tuple(layer._replace(window=0) for layer in load(GOLDENS / "mistral").spec.layers)
    model = with_spec("mistral", small_tokenizer, layers=layers)
    EXPORTS["gguf"](model, tmp_path / "a.gguf")
    again = load(tmp_path / "a.gguf")
    assert short(again.spec) == dataclasses.replace(short(model.spec), family="llama")
    assert_same(again.params, model.params)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mistral", {}, "a window of 7 positions; expected none"),
        ("gemma3", {}, "query_pre_attn_scalar 24; expected 16"),
        ("gemma3", {"attention_scale": 0.0}, "other layers than all but every 6th"),
    ],
)
def test_windows_that_llama_cpp_does_not_compute_are_refused(
    case, changes, message, small_tokenizer, tmp_path
):
    model = with_spec(case, small_tokenizer, **changes)
    with pytest.raises(UserError, match=message):
        EXPORTS["gguf"](model, tmp_path / "a.gguf")
    with pytest.raises(UserError, match=r"one that \.apr can describe"):
        EXPORTS["apr"](model, tmp_path / "a.apr")
    assert not list(tmp_path.iterdir())


def test_what_gguf_cannot_tell_is_exported_otherwise_or_not_at_all(small_tokenizer, tmp_path):
    cases = {"llama_gelu": "hidden_act 'gelu'; expected silu", "qwen2_yarn_whole": "truncate=false"}
    for case, message in cases.items():
        model = load(GOLDENS / case)
        source = open_checkpoint(GOLDENS / case, tokenizer=str(small_tokenizer))
        model = model.replace(checkpoint=source)
        with pytest.raises(UserError, match=f"{message}.*Export with export_hf"):
            EXPORTS["gguf"](model, tmp_path / "a.gguf")
        EXPORTS["apr"](model, tmp_path / f"{case}.apr")
        assert spec_from_table(open_table(tmp_path / f"{case}.apr")) == model.spec


def test_a_tokenizer_of_the_hub_is_written(student, exported, tmp_path, monkeypatch):
    """By the path that a user gave, of which a folder in `models` stands for the download."""
    shutil.copytree(exported("hf")[0], tmp_path / "models" / "words")
    monkeypatch.chdir(tmp_path)
    checkpoint = dataclasses.replace(student.checkpoint, tokenizer_path="hf:some/words")
    export_gguf(student.replace(checkpoint=checkpoint), tmp_path / "a.gguf")
    assert load_tokenizer(tmp_path / "a.gguf").tokens == checkpoint.tokenizer.tokens


def test_templates_by_name_and_sentencepieces_file_are_kept(exported, tmp_path):
    """Transformers 5 saves the default apart, others in a folder."""
    source = shutil.copytree(exported("hf")[0], tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "tokenizer.model").write_bytes(b"words")
    model = load(source)
    assert model.tokenizer.render([{"role": "user", "content": "hi"}]) == "hi"
    export_hf(model, tmp_path / "out")
    for name in ("additional_chat_templates/tool_use.jinja", "tokenizer.model"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_shards_and_their_index_read_back(student, tmp_path):
    export_hf(student, tmp_path / "hf", shard_bytes=200_000)
    shards = [n for n in left_in(tmp_path / "hf") if n.endswith(".safetensors")]
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * count_parameters(student.spec)
    assert_same(load(tmp_path / "hf").params, student.params)


def test_a_folder_becomes_a_gguf_file_with_the_same_tokenizer(student, exported, tmp_path):
    folder = exported("hf", "bf16")[0]
    model = load(folder)
    export_gguf(model, tmp_path / "a.gguf", dtype="bf16")
    ours, theirs = (
        open_table(tmp_path / "a.gguf").metadata,
        student.checkpoint.header.metadata,
    )
    for key in theirs:
        if key.startswith(("tokenizer.", "qwen2.")):
            np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
    # bf16 numbers to bf16 lose nothing, and the report may say so.
    report = export_hf(model, tmp_path / "again", dtype="bf16")
    assert report.error == 0 and "equal bit for bit" in str(report)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "config.json",
        "model.safetensors",
    ):
        once, again = ((path / name).read_bytes() for path in (folder, tmp_path / "again"))
        assert once == again or json.loads(once) == json.loads(again), name


def test_llama_cpps_name_says_how_text_is_cut_and_whether_pieces_stay_whole(models, tmp_path):
    metadata = dict(open_table(models / "student.gguf").metadata)
    for name in ("llama-bpe", "qwen2", "gpt-2"):
        encoder = from_gguf(metadata | {"tokenizer.ggml.pre": name}, "x").encoder
        assert vocabulary._pre_tokenizer(encoder, tmp_path) == name
        encoder.model.ignore_merges = not encoder.model.ignore_merges
        if name == "llama-bpe":
            assert vocabulary._pre_tokenizer(encoder, tmp_path) == "dbrx"
            continue
        with pytest.raises(UserError, match=r"\(ignore_merges=\w+\) that has no known name"):
            vocabulary._pre_tokenizer(encoder, tmp_path)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["host", "device"])
@pytest.mark.parametrize("bits", [False, True])
def test_parameters_may_be_bf16_or_its_bits_anywhere(bits, place, student, exported, tmp_path):
    def stored(x):
        x = np.asarray(x.astype(jnp.bfloat16))
        return place(x.view(np.uint16) if bits else x)

    params = jax.tree.map(stored, student.params)
    export_hf(student.replace(params=params), tmp_path / "a", dtype="bf16")
    a, b = (path / "model.safetensors" for path in (tmp_path / "a", exported("hf", "bf16")[0]))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.slow
def test_an_export_of_numbers_coarser_than_their_file_says_so(models, exported, tmp_path, caplog):
    """`kdjax.load` keeps bfloat16: a file of that, or float32 numbers, says nothing."""

    def said(path, kind, **options):
        caplog.clear()
        export_hf(kdjax.load(path, **options), tmp_path / "hf", dtype=kind, overwrite=True)
        return " ".join(record.getMessage() for record in caplog.records)

    gguf = models / "student.gguf"
    line = r"bfloat16, and the matrices of .*student.gguf are Q\w+, .*: .* dtype='float32'\) keeps"
    assert re.search(line, said(gguf, "f32"))
    assert re.search("of .* are F32: ", said(exported("hf", "f32")[0], "f16"))
    assert not said(gguf, "bf16") + said(gguf, "f32", dtype="float32")


def test_models_that_have_nothing_to_write_are_refused(student, models, tmp_path):
    for lost, missing in (("spec", "an architecture that kdjax knows"), ("checkpoint", "a check")):
        with pytest.raises(UserError, match=f"found a model without {missing}.*kdjax.load"):
            export_hf(student.replace(**{lost: None}), tmp_path / "a")
    packed = kdjax.load(models / "teacher.gguf", weights="float8")
    with pytest.raises(UserError, match=r"found \w+ weights to export.*weights='dense'"):
        export_hf(packed, tmp_path / "a")
    assert not left_in(tmp_path)


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", EXPORTS)
def test_an_interrupted_export_leaves_what_was_there(
    kind, before, student, exported, tmp_path, monkeypatch
):
    out = tmp_path / f"student{SUFFIXES[kind]}"
    if before:
        copied(exported(kind)[0], tmp_path)
    read, count = weights.Tensor.read, iter(range(99))

    def breaks(self):
        if next(count) == 9:
            raise Interrupted
        return read(self)

    monkeypatch.setattr(weights.Tensor, "read", breaks)
    with pytest.raises(Interrupted):
        EXPORTS[kind](student, out, dtype="f16", overwrite=True)
    monkeypatch.undo()
    assert left_in(tmp_path) == [out.name] * before
    if before:
        assert_same(load(out).params, student.params)


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_that_looks_complete(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from kdjax.export.staging import stage
out = Path(sys.argv[1])
with stage(out / "a.gguf", folder=False) as file, stage(out / "hf", folder=True) as folder:
    file.write_bytes(b"GGUF")
    folder.mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent.parent
    )
    assert killed.returncode == -signal.SIGKILL
    left = left_in(tmp_path)
    assert [name.split(".")[1] for name in left] == ["a", "hf"]
    assert all(name.startswith(".") and name.endswith(".partial") for name in left)
    with staging.stage(tmp_path / "a.gguf", folder=False) as aside:
        aside.write_bytes(b"whole")
    with staging.stage(tmp_path / "hf", folder=True) as aside:
        aside.mkdir()
    assert left_in(tmp_path) == ["a.gguf", "hf"]


def upside_down(encode):
    return lambda rows, *rest: encode(rows[::-1] if rows.ndim == 2 else rows, *rest)


@pytest.mark.parametrize(
    "kind, dtype, fault",
    [
        ("hf", "f32", corrupted),
        ("gguf", "bf16", corrupted),
        ("apr", "f16", corrupted),
        ("gguf", "q8_0", upside_down),
        ("gguf", "q4_0", upside_down),
        ("gguf", "q4_k_m", upside_down),
    ],
)
def test_a_failed_self_check_removes_nothing(
    kind, dtype, fault, student, exported, tmp_path, monkeypatch
):
    out = copied(exported(kind)[0], tmp_path)
    monkeypatch.setattr(weights, "encode", fault(weights.encode))
    with pytest.raises(SelfCheckError, match=r"not the bytes|times what"):
        EXPORTS[kind](student, out, dtype=dtype, overwrite=True)
    assert left_in(tmp_path) == [out.name]
    assert_same(load(out).params, student.params)


def test_the_self_check_sees_another_tokenizer_and_architecture(student, tmp_path, monkeypatch):
    files = student.checkpoint.tokenizer_files
    tokens = list(files.values["tokenizer.ggml.tokens"])
    tokens[65], tokens[66] = tokens[66], tokens[65]
    wrong = files._replace(values=files.values | {"tokenizer.ggml.tokens": tokens})
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "tokenizer_files", wrong)
        with pytest.raises(SelfCheckError, match=r"another tokens\n.*other ids or text"):
            export_gguf(student, tmp_path / "a.gguf")
    bent = formats.headers.gguf_metadata

    def metadata(*args):
        return bent(*args) | {"qwen2.rope.freq_base": 1e4}

    monkeypatch.setattr(formats.headers, "gguf_metadata", metadata)
    with pytest.raises(SelfCheckError, match=r"rope_theta = 10000.0, expected 1000000.0"):
        export_gguf(student, tmp_path / "a.gguf")
    assert not left_in(tmp_path)


def test_a_folder_is_read_back_by_the_safetensors_library_too(student, tmp_path, monkeypatch):
    class Reader:
        def __init__(self, file):
            self.keys, self._file = file.keys, file

        def get_tensor(self, name):
            array = self._file.get_tensor(name)
            return array[::-1] if name == "model.norm.weight" else array

    whole = safetensors.safe_open

    @contextlib.contextmanager
    def reading(*args, **settings):
        with whole(*args, **settings) as file:
            yield Reader(file)

    monkeypatch.setattr(safetensors, "safe_open", reading)
    with pytest.raises(SelfCheckError, match=r"model.norm.weight: safetensors reads other"):
        EXPORTS["hf"](student, tmp_path / "folder", dtype="bf16")
    assert not left_in(tmp_path)


@pytest.mark.parametrize("kind", EXPORTS)
def test_what_is_there_is_replaced_only_when_asked(kind, student, exported, tmp_path):
    out = copied(exported(kind, "bf16")[0], tmp_path)
    with pytest.raises(UserError, match=r"there already.*overwrite=True"):
        EXPORTS[kind](student, out)
    assert embedding_type(out) == "BF16"
    EXPORTS[kind](student, out, overwrite=True)
    assert embedding_type(out) == "F32" and left_in(tmp_path) == [out.name]


def embedding_type(path):
    table = open_table(path)
    names = ("token_embd.weight", "model.embed_tokens.weight")
    return next(table.info(name).dtype for name in names if name in table)


def test_folders_are_exchanged_where_the_system_cannot(student, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(staging.ctypes, "CDLL", lambda *_, **__: object())
    test_what_is_there_is_replaced_only_when_asked("hf", student, exported, tmp_path)


def test_other_things_are_never_replaced(student, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(UserError, match=r"without config.json.*stays as it is"):
        export_hf(student, tmp_path / "mine", overwrite=True)
    with pytest.raises(UserError, match=r"is a folder; expected a file"):
        export_gguf(student, tmp_path / "mine", overwrite=True)
    with pytest.raises(UserError, match=r"is a file; expected a folder"):
        export_hf(student, tmp_path / "mine" / "thesis.txt", overwrite=True)
    assert left_in(tmp_path / "mine") == ["thesis.txt"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"pipe is no regular file; expected"):
        export_gguf(student, tmp_path / "pipe", overwrite=True)


def test_input_that_cannot_be_exported(student, tmp_path):
    params = student.params
    broken = student.replace(params=jax.tree.map(np.copy, params))
    broken.params["blocks"]["mlp"]["up"]["weight"][1, 2, 3] = np.nan
    with pytest.raises(UserError, match=r"1 numbers of \d+ in model.layers.1.mlp.up_proj.weight"):
        export_hf(broken, tmp_path / "a")
    fewer = {k: v for k, v in params.items() if k != "norm"} | {"head": params["embed"][:-1]}
    with pytest.raises(UserError, match=r"norm/weight: missing\n.*head: unknown\n.*--student"):
        export_hf(student.replace(params=fewer), tmp_path / "a")
    broken.params["blocks"]["mlp"]["up"]["weight"][1, 2, 3] = 1e6
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight.*1e\+06 to store as F16"):
        export_hf(broken, tmp_path / "a", dtype="f16")
    with pytest.raises(UserError, match=r"'q4_k_m' for a Hugging Face folder.*f32, bf16, f16"):
        export_hf(student, tmp_path / "a", dtype="q4_k_m")
    with pytest.raises(UserError, match=r"do not fill blocks of 256.*\(128 columns\).*bf16"):
        export_apr(student, tmp_path / "a.apr", dtype="q4_k_m")
    with pytest.raises(UserError, match=r"ends in .apr"):
        export_apr(student, tmp_path / "a.bin")
    assert not left_in(tmp_path)


@pytest.mark.parametrize("dtype", [None, "q8_0"])
def test_blocks_with_a_scale_that_is_not_finite_are_not_written(dtype, models, tmp_path):
    """Blocks are written as they are, without their numbers: those of one row are NaN."""
    odd = write_odd(models / "teacher.gguf", tmp_path / "odd.gguf", "blk.1.ffn_up.weight")
    assert open_table(odd).info("blk.1.ffn_up.weight").dtype == "Q4_K"
    model = kdjax.load(odd, weights="packed", dtype="float32")
    match = r"found 256 numbers of \d+ in blk\.1\.ffn_up\.weight that are not finite; expected none"
    with pytest.raises(UserError, match=match):
        export_gguf(model, tmp_path / "a.gguf", dtype=dtype)
    assert left_in(tmp_path) == ["odd.gguf"]


@pytest.mark.slow
def test_apr_takes_k_blocks_where_rows_are_whole(models, tmp_path):
    report = export_apr(load(models / "teacher.gguf"), tmp_path / "a.apr", dtype="q4_k_m")
    assert report.types.keys() == {"F32", "Q4_K", "Q6_K"} and report.error < 0.02


def test_the_page_on_exports_runs(models, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs" / "export.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "student.gguf").symlink_to(models / "student.gguf")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/export.md", "exec"), {})
    assert "equal bit for bit" in capsys.readouterr().out
    assert left_in(tmp_path) == ["student-hf", "student-q8_0.gguf", "student.apr", "student.gguf"]


# ---- downloads that were cut


@pytest.mark.parametrize(
    ("kind", "file"), [("hf", "hf/model.safetensors"), ("gguf", "a.gguf"), ("apr", "a.apr")]
)
def test_a_cut_file_says_its_whole_size_and_its_header_can_be_read(models, tmp_path, kind, file):
    """Each format: what is there is read, what is not there is named."""
    path = tmp_path / file
    out = path if path.parent == tmp_path else path.parent
    EXPORTS[kind](a_student(models / "student.gguf"), out)
    spec = open_checkpoint(out).spec
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError) as error:
        open_table(out)
    found, size = re.search(r"found (\d+) bytes.* at least (\d+)", str(error.value)).groups()
    assert int(found) == len(whole) // 2
    assert len(whole) - 64 <= int(size) <= len(whole)  # zeros may fill the end
    assert "of which 50.0% are here. The download was cut" in str(error.value)
    table = open_table(out, whole=False)
    assert spec_from_table(table) == spec
    held = [tensor for tensor in table if table.holds(tensor)]
    assert 0 < len(held) < len(table)
    for tensor in table:
        if table.holds(tensor):
            assert table.raw(tensor).nbytes == table.info(tensor).nbytes
        else:
            with pytest.raises(UserError, match="The download was cut"):
                table.raw(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [False, True])
def test_an_importance_matrix_weighs_errors(student, tmp_path, rng, legacy):
    """In both forms of llama.cpp; of another model's, and of a broken file, one line says so."""
    name, path = "blk.0.ffn_up.weight", tmp_path / "imatrix"
    width = student.spec.hidden_size
    sums, count = np.float32(rng.lognormal(0, 2, width)) * 8, 8

    def write(sums):
        if legacy:
            entry = struct.pack("<ii", 1, len(name)) + name.encode()
            path.write_bytes(entry + struct.pack("<ii", count, len(sums)) + sums.tobytes())
        else:
            counts = np.float32([count])
            tensors = [(f"{name}.in_sum2", "F32", (1, len(sums)), sums.view(np.uint8))]
            tensors.append((f"{name}.counts", "F32", (1, 1), counts.view(np.uint8)))
            write_gguf(path, {"general.type": "imatrix"}, tensors)

    write(sums)
    export_gguf(student, tmp_path / "blind.gguf", dtype="q4_0")
    export_gguf(student, tmp_path / "seeing.gguf", dtype="q4_0", imatrix=path)
    tables = [open_table(tmp_path / f"{kind}.gguf") for kind in ("blind", "seeing")]
    want = np.asarray(student.params["blocks"]["mlp"]["up"]["weight"][0])
    lost = [
        np.sum(sums * np.square(np.asarray(decode(t.raw(name), "Q4_0")) - want)) for t in tables
    ]
    assert lost[1] < 0.97 * lost[0]
    other = "blk.1.ffn_up.weight"
    np.testing.assert_array_equal(*(table.raw(other) for table in tables))
    write(sums[:-2])
    with pytest.raises(UserError, match=f"importance of {width - 2} inputs for {name}"):
        export_gguf(student, tmp_path / "no.gguf", dtype="q4_0", imatrix=path)
    name = f"model.{name}"
    write(sums)
    with pytest.raises(UserError, match=r"found importances of model.blk.0.ffn_up"):
        export_gguf(student, tmp_path / "no.gguf", dtype="q4_0", imatrix=path)
    write(-sums)
    with pytest.raises(UserError, match=f"{name} below 0"):
        export_gguf(student, tmp_path / "no.gguf", dtype="q4_0", imatrix=path)
    path.write_bytes(b"\x05\x00\x00\x00nothing of the kind")
    with pytest.raises(UserError, match="no importance matrix"):
        export_gguf(student, tmp_path / "no.gguf", dtype="q4_0", imatrix=path)
