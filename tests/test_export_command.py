"""The export command on a run's checkpoint, and exports in Transformers and llama.cpp."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exporting import a_student, assert_same, corrupted, load
from quick import cases

import kdjax
from kdjax import progress
from kdjax.commands import export as command
from kdjax.commands import generate
from kdjax.export import card, export_gguf, export_hf, vocabulary, weights
from kdjax.formats import open_table
from kdjax.formats.blocks import decode
from kdjax.formats.imatrix import write_importance
from kdjax.training.saving import Checkpoints
from kdjax.training.step import TrainState


@pytest.fixture(scope="module")
def student(models):
    return a_student(models / "student.gguf")


@pytest.fixture(scope="module")
def workdir(student, tmp_path_factory):
    """Two saved steps of a run and its receipt; the second step's weights are the student's."""
    path, params = student.checkpoint.path, student.params
    folder = tmp_path_factory.mktemp("run")
    earlier = jax.tree.map(lambda x: x * np.float32(0.5), params)
    identity = {"teacher.sha256": "aa", "student.sha256": "bb", "loss.alpha": 0.25}
    identity |= {"student.init": "checkpoint", "train.seed": 0}
    with contextlib.closing(Checkpoints(folder, keep=2, asynchronous=False)) as checkpoints:
        for step, tree in ((5, earlier), (10, params)):
            state = TrainState(
                jnp.int32(step), jax.tree.map(jnp.asarray, tree), {"mu": jnp.ones(3)}
            )
            checkpoints.save(state, {"identity": identity, "data": {}})
    figures = {"step": 10, "student_ce": 1.25, "kl": 0.125, "agreement": 0.875, "tokens": 1000}
    receipt = {
        "format": 1,
        "config": {
            "student": {"path": path.name},
            "data": {"tokenizer": ""},
            "loss": {"alpha": 0.25},
        },
        "cwd": str(path.parent),
        "teacher": {"files": ["/models/big.gguf"], "sha256": "aa" * 32},
        "held_out": {"first": figures | {"step": 0, "kl": 0.5}, "final": figures},
        "exit": {"reason": "finished", "status": 0},
        "command": "kdjax train --config=mine.py --workdir=/home/me/runs/a",
    }
    (folder / "receipt.json").write_text(json.dumps(receipt))
    return folder


def run(*arguments):
    return command.main([str(argument) for argument in arguments])


def test_a_step_without_adapters_is_named(workdir, tmp_path, capsys):
    assert run(workdir, "--format=peft", f"--out={tmp_path}/a") == 2
    said = f"error: {workdir}, step 10: found a model without adapters"
    assert capsys.readouterr().err.startswith(said)


def test_the_command_exports_the_newest_step(workdir, student, tmp_path, capsys):
    out = tmp_path / "made" / "hf"
    assert run(workdir, "--format=hf", f"--out={out}") == 0
    assert "equal bit for bit" in capsys.readouterr().out
    assert_same(load(out).params, student.params)
    readme = (out / "README.md").read_text()
    for words in (
        "after 10 optimizer steps",
        "aa" * 32,
        "big.gguf",
        "| 0.5 | 0.125 |",
        '"loss.alpha": 0.25',
        "status 0",
        "kdjax train --config=mine.py --workdir=a\n",
        "## Not known",
    ):
        assert words in readme
    assert run(workdir, "--format=gguf", "--step=5", f"--out={tmp_path}/a.gguf") == 0
    half = jax.tree.map(lambda x: x * np.float32(0.5), student.params)
    assert_same(load(tmp_path / "a.gguf").params, half)


def test_the_command_says_what_is_wrong(workdir, student, tmp_path, capsys, monkeypatch):
    def fails(wanted, *arguments, status=2):
        assert run(*arguments) == status
        assert re.search(wanted, capsys.readouterr().err, re.DOTALL)

    out = f"--out={tmp_path}/a.gguf"
    fails(
        "found no such file or folder.* or the workdir of a run",
        tmp_path / "none",
        "--format=gguf",
        out,
    )
    (file := tmp_path / "student.gguf").write_bytes(b"GGUF")
    fails("student.gguf: found a header cut short", file, "--format=gguf", out)
    named = student.checkpoint.path
    fails("found --step with a model that is not a workdir", named, "--format=hf", out, "--step=5")
    fails("needs none; .* Leave it out", named, "--format=hf", out, f"--student={named}")
    fails("found --masters with a model", named, "--format=gguf", out, "--masters")
    fails("found --masters with a student that was not", workdir, "--format=hf", out, "--masters")
    fails("found a model without adapters", named, "--format=peft", f"--out={tmp_path}/p")
    fails("holds no complete checkpoint", tmp_path, "--format=gguf", out)
    fails("no step 7.*expected one of 5, 10", workdir, "--format=gguf", out, "--step=7")
    fails("no such file or folder.*--student", workdir, "--format=gguf", out, "--student=gone.gguf")
    bare = tmp_path / "bare"
    (bare).mkdir()
    (bare / "checkpoints").symlink_to(workdir / "checkpoints")
    fails("does not say which student.*--student=PATH", bare, "--format=gguf", out)
    named = f"--student={student.checkpoint.path}"
    assert run(bare, "--format=hf", f"--out={tmp_path}/hf", named) == 0
    readme = (tmp_path / "hf" / "README.md").read_text()
    assert "`bb`" in readme and "How near it is to its teacher" in readme
    (bare / "config.json").write_text("{}")  # of whom ever: a workdir it stays
    assert run(bare, "--format=gguf", "--step=5", f"--out={tmp_path}/5.gguf", named) == 0
    (bare / "receipt.json").write_text("{cut")
    fails("receipt.json: not JSON.*Restore it", bare, "--format=gguf", out)
    path = student.checkpoint.path
    where = ["--format=gguf", f"--out={path}", "--overwrite"]
    fails("is what the command reads", path, *where, "--type=q4_0")
    fails("found ''; expected a type of numbers", path, "--format=gguf", out, "--type=")
    with monkeypatch.context() as patch:  # a type is refused first, and nothing else is said
        patch.setattr(command, "read_model", lambda *_, **__: pytest.fail("read"))
        for form, kind, wanted in (
            ("hf", "q4_k_m", "'q4_k_m' for a Hugging Face folder"),
            ("apr", "q2_k", "'q2_k' for an .apr file"),
            ("gguf", "q9", "'q9' for a GGUF file"),
            ("gguf", "q4_0,blocks/none=Q8_0", "quantize='q4_0,blocks/none=Q8_0': no parameter"),
            ("peft", "q4_0", "found --format=peft with --type"),
        ):
            where = f"--format={form}", f"--type={kind}", f"--out={tmp_path}/new.apr"
            fails(rf"\Aerror: (found type )?{wanted}", path, *where)
        where = "--format=apr", f"--out={tmp_path}/new.bin"
        fails(r"\Aerror: .*new.bin: expected a name that ends in .apr", path, *where)
    folder = ["--format=hf", "--overwrite", f"--out={tmp_path}/hf"]
    fails("is what the command reads", tmp_path / "hf", *folder)
    (tmp_path / "a.gguf").write_bytes(b"before")
    capsys.readouterr()
    fails("there already", workdir, "--format=gguf", out)
    monkeypatch.setattr(weights, "encode", corrupted(weights.encode))
    fails("the file just written", workdir, "--format=gguf", out, "--overwrite", status=5)
    assert (tmp_path / "a.gguf").read_bytes() == b"before"


@pytest.mark.slow
def test_a_model_that_no_run_trained_is_written_as_the_library_writes_it(
    student, tmp_path, capsys, monkeypatch
):
    """Rounded plainly, as stored, or as a folder that is a model again."""
    file, made = student.checkpoint.path, tmp_path / "made"
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    assert run(file, "--format=gguf", "--type=q4_0", f"--out={made}-q4_0.gguf") == 0
    published = load(file)
    export_gguf(
        kdjax.load(file, weights="packed", dtype="float32"), tmp_path / "plain.gguf", dtype="q4_0"
    )
    assert Path(f"{made}-q4_0.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    assert run(f"{made}-q4_0.gguf", "--format=gguf", f"--out={made}-again.gguf") == 0
    assert Path(f"{made}-again.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    assert run(file, "--format=hf", f"--out={made}") == 0
    assert run(made, "--format=hf", f"--out={made}-twice") == 0
    assert_same(load(f"{made}-twice").params, published.params)
    assert "Which files the teacher and the student were" in (made / "README.md").read_text()
    said = capsys.readouterr().err
    assert "student.gguf: gguf as q4_0" in said and "made-q4_0.gguf: gguf as stored" in said
    assert "tensors written: 25 of 26" in said and "tensors read back: 25 of 26" in said


@pytest.mark.slow
def test_what_is_kept_counts_in_the_error(student, tmp_path):
    """Blocks of the type that is asked for lose nothing: of all numbers the loss is a part."""
    export_gguf(student, tmp_path / "a.gguf", dtype="q4_k_m")
    kept = kdjax.load(tmp_path / "a.gguf", weights="packed", dtype="float32")
    found = export_gguf(kept, tmp_path / "b.gguf", dtype="q6_k")
    before, after = (open_table(tmp_path / f"{name}.gguf") for name in "ab")
    lost = total = 0.0
    types = {name: (before.info(name).dtype, after.info(name).dtype) for name in before}
    rounded = {name: pair for name, pair in types.items() if pair[1] != "F32"}
    assert any(a == b for a, b in rounded.values()) and any(a != b for a, b in rounded.values())
    for name, pair in rounded.items():
        numbers = [
            np.asarray(decode(table.raw(name), dtype))
            for table, dtype in zip((before, after), pair, strict=True)
        ]
        lost += np.square(numbers[0] - numbers[1]).sum()
        total += np.square(numbers[0]).sum()
    assert found.error == pytest.approx((lost / total) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("kind", cases("q4_0", slow=["", "bf16", "q8_0", "mxfp4"]))
def test_an_importance_that_would_weigh_nothing_is_refused(student, tmp_path, capsys, kind):
    """So are types of no search, blocks as stored, and a type that all blocks have already."""
    model, path = tmp_path / "q4_0.gguf", tmp_path / "im.gguf"
    export_gguf(student, model, dtype="q4_0")
    sums = {"blk.0.ffn_gate.weight": np.ones(student.spec.hidden_size)}
    write_importance(path, sums, 512, datasets=["text"], chunk_size=512)
    flags = ["--format=gguf", f"--out={tmp_path}/a.gguf", f"--imatrix={path}"]
    assert run(model, *flags, *([f"--type={kind}"] if kind else [])) == 2
    said = capsys.readouterr().err
    assert f"found an importance and {kind or 'blocks as they are'}, where it changes" in said
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.slow
def test_generate_writes_the_same_from_a_workdir_as_from_its_export(
    workdir, student, tmp_path, capsys
):
    exported, flags = tmp_path / "a.gguf", ["--prompt=def f(", "--max-tokens=5"]
    assert run(workdir, "--format=gguf", f"--out={exported}") == 0
    capsys.readouterr()
    texts = []
    for model in (workdir, workdir / "checkpoints" / "10", exported):
        source = [] if model is exported else [f"--student={student.checkpoint.path}"]
        assert generate.main([f"{model}@dense:float32", *source, *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts == [texts[0]] * 3 and texts[0] != "\n"
    folder = tmp_path / "hf"
    assert run(exported, "--format=hf", f"--out={folder}") == 0
    capsys.readouterr()
    assert generate.main([f"{exported}@dense:float32", f"--draft={folder}", *flags]) == 0
    said = capsys.readouterr()
    assert said.out == texts[0]
    assert re.match(
        r"\d\d:\d\d:\d\d llama.cpp would not draft with this pair: the draft is", said.err
    )


def test_a_card_without_records_claims_nothing(student):
    text = card.model_card(student.spec)
    assert "Which files the teacher and the student were" in text and "SHA-256" not in text
    assert "distilled by" not in text and "The settings of the run." in text


def test_a_card_has_the_intervals_that_batches_allow(student):
    """Two batches with 1 and 3 positions, worked by hand; t of one degree is 12.7062."""
    first = {"step": 0, "student_ce": 3.5, "student_perplexity": 33.1, "kl": 0.5, "tokens": 4}
    final = {"step": 9, "student_ce": 2.75, "student_perplexity": 15.6, "kl": 0.25, "tokens": 4}
    counts = {"tokens": [1.0, 3.0]}
    batches = {
        "first": counts | {"student_ce": [2.0, 4.0], "kl": [0.5, None]},
        "final": counts | {"student_ce": [2.0, 3.0], "kl": [0.25, 0.25]},
    }

    def write(held_out):
        return card.model_card(student.spec, receipt={"held_out": held_out}).splitlines()

    text = write({"first": first, "final": final, "batches": batches})
    # Weighed differences from the mean: 1 * 0.75 and 3 * -0.25, so that the error is 1.5 / 4.
    assert "|  | step 0 | step 9 | change |" in text
    row = "| cross-entropy with the text, nats a token | 3.5 ± 9.5 | 2.75 ± 4.8 | -0.75 ± 4.8 |"
    assert row in text
    assert "| perplexity | 33.1 | 15.6 |  |" in text
    assert "| KL(teacher to student) at T=1, nats a token | 0.5 | 0.25 ± 0 |  |" in text
    assert "±: 95% intervals over 2 held-out batches, paired for a change." in text
    other = {"first": counts | {"tokens": [2.0, 2.0], "student_ce": [3.0, 4.0]}}
    text = write({"first": first, "final": final, "batches": batches | other})
    assert "|  | step 0 | step 9 |" in text and "change" not in "".join(text)
    assert write({"first": first, "final": final}).count("±") == 0


def test_a_card_has_no_absolute_path(student):
    config = {"teacher": {"path": "/home/me/t.gguf"}, "data": {"train": "~/text,/home/me/more"}}
    files = {"files": ["/home/me/t.gguf"], "sha256": "7ea"}
    for records in ({"receipt": {"config": config, "teacher": files}}, {"identity": config}):
        text = card.model_card(student.spec, **records)
        assert "t.gguf" in text and '"text,more"' in text and "/home" not in text


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_transformers_loads_the_folder(dtype, student, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    export_hf(student, tmp_path / "hf", dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, 300, (2, 32))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    ours = np.asarray(load(tmp_path / "hf").logits(tokens))
    theirs = theirs[..., : ours.shape[-1]]
    assert np.linalg.norm(ours - theirs) < 1e-4 * np.linalg.norm(theirs)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert model.config.tie_word_embeddings and model.generation_config.eos_token_id


@pytest.mark.parity
def test_transformers_tokenizer_gives_the_same_ids(student, tmp_path):
    import transformers

    export_hf(student, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = student.tokenizer
    for text in vocabulary._SAMPLES:
        assert theirs(text)["input_ids"] == ours.encode(text)
    messages = [{"role": "user", "content": "def f(self): return"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ours.render(messages, answer_next=True)
    assert theirs(rendered)["input_ids"] == ours.encode(rendered)
    assert (theirs.eos_token_id, theirs.pad_token) == (ours.eos_id, "<|endoftext|>")
    assert len(theirs) == ours.vocab_size


@pytest.mark.skipif("KDJAX_LLAMA_PYTHON" not in os.environ, reason="needs llama-cpp-python")
def test_llama_cpp_loads_the_files_and_agrees(models, tmp_path):
    """KDJAX_LLAMA_PYTHON names an interpreter with llama-cpp-python; the models are random."""
    command = [
        *(sys.executable, "-m", "scripts.checks.llama_cpp", str(models / "student.gguf")),
        *("--text=README.md", "--window=64", "--windows=4", f"--out={tmp_path}"),
        f"--python={os.environ['KDJAX_LLAMA_PYTHON']}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parity
@pytest.mark.skipif("KDJAX_MODELS" not in os.environ, reason="needs the published files")
def test_the_published_half_billion_in_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    path = Path(os.environ["KDJAX_MODELS"]) / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    published = load(path)
    export_hf(published, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = Path(__file__).read_text()
    ids = published.tokenizer.encode(text)
    assert tokenizer(text)["input_ids"] == ids
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = np.asarray([ids[:48]])
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    ours = np.asarray(published.logits(tokens))
    theirs = theirs[..., : ours.shape[-1]]
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    print(f"published 0.5B exported: logits {error:.1e}")
    assert error < 1e-4
