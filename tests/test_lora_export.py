"""Adapters as files: of PEFT's, of llama.cpp's, and merged; read back, judged, refused."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from exporting import ask_llama_cpp, needs_llama_cpp, write_small_tokenizer
from quick import cases
from test_lora import shake

import kdjax
from kdjax.commands.export import read_model
from kdjax.errors import MissingFileError, UserError
from kdjax.formats import open_table
from kdjax.models.adapters import Lora, split_adapters
from kdjax.models.checkpoint import cut_layers, open_checkpoint

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.gguf"))


def adapted(case, tokenizer, **settings):
    """The golden's model with adapters that do something."""
    model = kdjax.load(GOLDENS / case, dtype="float32", tokenizer=tokenizer)
    return shake(kdjax.add_lora(model, rank=4, alpha=6.0, **settings), by=0.2)


def same_adapters(a, b):
    parts = (split_adapters(model.params)[1] for model in (a, b))
    jax.tree.map(np.testing.assert_array_equal, *parts)


@pytest.mark.parametrize("targets", ["", "q_proj,down_proj"])
def test_a_peft_folder_opens_as_what_was_written(models, tmp_path, targets):
    base = kdjax.load(models / "student.gguf", dtype="float32")
    student = shake(kdjax.add_lora(base, rank=4, alpha=6.0, targets=targets))
    summary = kdjax.export_peft(student, tmp_path / "adapter")
    assert summary.error == 0 and summary.types == {"F32": summary.tensors}
    back = kdjax.load(tmp_path / "adapter", weights="packed", dtype="float32")  # by its own word
    assert Lora.of_params(back.params) == Lora.of_params(student.params)
    same_adapters(back, student)
    ids = [[5, 6, 7, 8]]
    np.testing.assert_allclose(back.logits(ids), student.logits(ids), atol=1e-4)
    kdjax.export_peft(back, tmp_path / "adapter", overwrite=True)
    same_adapters(kdjax.load(tmp_path / "adapter", dtype="float32"), student)


@pytest.mark.parametrize("dtype", cases("q4_k_m", slow=[None]))
def test_merged_files_hold_the_sum(models, tmp_path, dtype):
    base = kdjax.load(models / "student.gguf", weights="packed", dtype="float32")
    student = shake(kdjax.add_lora(base, rank=4, targets="q_proj,down_proj"))
    kdjax.export_gguf(student, tmp_path / "merged.gguf", dtype=dtype)
    kdjax.export_gguf(kdjax.merge_lora(student), tmp_path / "sum.gguf", dtype=dtype or "f32")
    ours, theirs = (open_table(tmp_path / f"{name}.gguf") for name in ("merged", "sum"))
    kept = open_table(models / "student.gguf")
    for name in ours:
        if "attn_q.weight" in name or "ffn_down" in name:
            assert np.mean(ours.raw(name) == theirs.raw(name)) > 0.99, name
        elif ours.info(name).dtype == kept.info(name).dtype:
            assert np.array_equal(ours.raw(name), kept.raw(name))  # never a second rounding
    ids = [[5, 6, 7, 8]]
    back = kdjax.load(tmp_path / "merged.gguf", dtype="float32")
    close = 1e-4 if dtype is None else 3.0
    np.testing.assert_allclose(back.logits(ids), student.logits(ids), atol=close)
    if dtype is None:
        kdjax.export_hf(student, tmp_path / "hf")
        folder = kdjax.load(tmp_path / "hf", dtype="float32")
        np.testing.assert_allclose(folder.logits(ids), student.logits(ids), atol=1e-4)


def test_a_gguf_adapter_says_what_llama_cpp_reads(tokenizer, tmp_path):
    """B's rows of a Llama's queries are interleaved as the base's are."""
    student = adapted("llama", tokenizer)
    kdjax.export_gguf_adapter(student, tmp_path / "a.gguf")
    with pytest.raises(UserError, match="found an adapter; expected a model"):
        kdjax.load(tmp_path / "a.gguf")
    table = open_table(tmp_path / "a.gguf")
    wanted = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    assert wanted.items() <= table.metadata.items()
    assert table.metadata["adapter.lora.alpha"] == 6.0
    q = student.params["blocks"]["attn"]["q"]["weight"]
    spec = student.spec
    assert table.info("blk.0.attn_q.weight.lora_a").shape == (4, spec.hidden_size)
    b = table.raw("blk.0.attn_q.weight.lora_b").view(np.float32)
    half = spec.head_dim // 2
    np.testing.assert_array_equal(b[1], q.b[0][half])  # per head 0, half, 1, half + 1, ...
    np.testing.assert_array_equal(b[2], q.b[0][1])


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["qwen2_tied", "llama", "gemma3", "qwen3_5"])
def test_peft_computes_the_same_logits(case, tokenizer, tmp_path):
    torch, transformers, peft = (
        pytest.importorskip(name) for name in ("torch", "transformers", "peft")
    )
    student = adapted(case, tokenizer)
    kdjax.export_peft(student, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(GOLDENS / case, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = np.random.default_rng(0).integers(0, 138, (2, 20))
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)).logits.numpy()
    ours = np.asarray(student.logits(ids))
    np.testing.assert_allclose(ours, wanted[..., : ours.shape[-1]], atol=2e-4)
    plain = np.asarray(kdjax.load(GOLDENS / case, dtype="float32", tokenizer=tokenizer).logits(ids))
    assert np.abs(ours - plain).max() > 0.05
    theirs.save_pretrained(tmp_path / "theirs")  # PEFT's own folder opens as a start
    back = kdjax.load(tmp_path / "theirs", base=str(GOLDENS / case), dtype="float32")
    same_adapters(back, student)


@needs_llama_cpp
@pytest.mark.parity
@pytest.mark.parametrize("case", ["qwen2_tied", "llama"])
def test_llama_cpp_computes_the_same_logits(case, tokenizer, tmp_path):
    student = adapted(case, tokenizer)
    base = kdjax.load(GOLDENS / case, dtype="float32", tokenizer=tokenizer)
    kdjax.export_gguf(base, tmp_path / "base.gguf")
    kdjax.export_gguf_adapter(student, tmp_path / "adapter.gguf")
    prompts = [np.random.default_rng(0).integers(0, 138, n).tolist() for n in (3, 24)]
    found = ask_llama_cpp(tmp_path / "base.gguf", prompts, adapters=[tmp_path / "adapter.gguf"])
    for prompt, theirs in zip(prompts, found, strict=True):
        ours = np.asarray(student.logits([prompt]), np.float64)[0, -1]
        difference = [ours[i] - theirs[i] for i in range(len(ours))]
        assert np.ptp(ours) > 0.5 and np.ptp(difference) < 1e-4 * np.ptp(ours)
        plain = np.asarray(base.logits([prompt]), np.float64)[0, -1]
        assert np.ptp(ours - plain) > 0.01 * np.ptp(ours)


@pytest.fixture
def folder(models, tmp_path):
    """A PEFT folder of the student's, to be damaged."""
    base = kdjax.load(models / "student.gguf", weights="packed", dtype="float32")
    kdjax.export_peft(shake(kdjax.add_lora(base, rank=4)), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_rslora": True}, "found use_rslora=True"),
        ({"use_dora": True}, "found use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "found modules_to_save"),
        ({"bias": "all"}, "found bias='all'"),
        ({"rank_pattern": {"q_proj": 2}}, "found rank_pattern"),
        ({"peft_type": "IA3"}, "found peft_type 'IA3'"),
        ({"r": 8}, r"lora_A.weight: shape \[4, 128\], expected \[8, 128\]"),
        ({"r": "four"}, "expected numbers"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan; expected numbers"),
        ({"lora_alpha": 1e400}, "lora_alpha=inf; expected numbers"),
        ({"r": True}, "found r=True"),
        ({"alora_invocation_tokens": [1, 2]}, "found alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "found layer_replication"),
        ({"use_bdlora": {"a": 1}}, "found use_bdlora"),
        ({"arrow_config": {"a": 1}}, "found arrow_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "found init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "loftq"}, "found init_lora_weights='loftq'"),
        ({"base_model_name_or_path": "../adapter"}, r"whose base, '\.\./adapter', is not"),
        ({"base_model_name_or_path": "a" * 5000}, "whose base, 'aaa"),
        ({"base_model_name_or_path": "/gone/model.gguf"}, "whose base, '/gone/model.gguf', is not"),
    ],
)
def test_configs_of_other_adapters_are_refused_by_name(folder, changes, message):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        kdjax.load(folder)


@pytest.mark.parametrize("start", [False, None, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_base_alone_are_taken(folder, start):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"init_lora_weights": start}))
    assert open_checkpoint(folder).adapters.lora.rank == config["r"]


def test_damaged_adapters_and_those_of_another_base_are_refused(folder, models, tmp_path):
    with pytest.raises(UserError, match="is damaged or of another base"):
        kdjax.load(folder, base=str(models / "teacher.gguf"))
    shutil.copytree(folder, tmp_path / "cut")
    file = tmp_path / "cut" / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(UserError, match="too few for tensor"):
        kdjax.load(tmp_path / "cut")
    data = bytearray((folder / file.name).read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    (folder / file.name).write_bytes(data)
    with pytest.raises(UserError, match="numbers that are not finite"):
        kdjax.load(folder)
    (folder / file.name).unlink()
    with pytest.raises(MissingFileError, match="without adapter_model"):
        kdjax.load(folder)


def test_models_without_adapters_are_not_exported_as_such(models, tmp_path):
    base = kdjax.load(models / "student.gguf", weights="packed")
    for export in (kdjax.export_peft, kdjax.export_gguf_adapter):
        with pytest.raises(UserError, match="a model without adapters"):
            export(base, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["llama", "student.gguf"])
def test_adapters_of_kept_layers_are_not_exported_for_the_whole_base(
    case, models, tokenizer, tmp_path
):
    """A loader would put those of layer 1 on layer 0."""
    whole = models / case if case.endswith(".gguf") else GOLDENS / case
    kept = cut_layers(open_checkpoint(whole, tokenizer=tokenizer), (1,))
    student = kdjax.add_lora(read_model(kept), rank=4)
    for export in (kdjax.export_peft, kdjax.export_gguf_adapter):
        with pytest.raises(UserError, match=r"adapters of 1 layers and a base of [2-9].*whole"):
            export(student, tmp_path / "out")
