"""HumanEval written by llama.cpp and by kdjax: the same prompts, and the same greedy answers."""

import contextlib
import dataclasses
import importlib.machinery
import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from exporting import needs_llama_cpp
from test_evaluate import humaneval

import kdjax
from kdjax import demo
from kdjax.data.pipeline import eval_batches
from kdjax.evaluation import passk, problems
from kdjax.evaluation.heldout import read_text
from kdjax.models.decoding import Completion, Sampling
from kdjax.models.tokenizer import load_tokenizer
from scripts.checks import compare_passk, llama_answers, llama_draft, llama_kl
from scripts.checks.llama_answers import count_equal, serve


@pytest.mark.slow
def test_llama_cpp_writes_the_answers_that_kdjax_writes(tmp_path):
    pytest.importorskip("xllamacpp")
    model, file = kdjax.load(demo.STUDENT, dtype="float32"), tmp_path / "f32.gguf"
    # llama.cpp rounds what it multiplies blocks with, and texts part where two ids are close.
    kdjax.export_gguf(model, file, dtype="f32")
    asked, tokenizer = problems.load_humaneval(humaneval(tmp_path)), model.tokenizer

    def generate(prompts, stops):
        sampling = Sampling(12, 0.0, stop_ids=tokenizer.stop_ids, stop_strings=stops)
        return model.generate(prompts, sampling)

    settings = passk.Settings(wording="bare", batch_size=4, allow_unsandboxed=True)
    ours = passk.run_benchmark(asked, tokenizer, generate, settings)
    against, out = tmp_path / "ours.json", tmp_path / "theirs.json"
    against.write_text(json.dumps({"humaneval": ours}))
    flags = ["--wording=bare", "--max-tokens=12", "--positions=256", "--slots=2", "--threads=1"]
    flags += ["--allow-unsandboxed", f"--against={against}", f"--json={out}"]
    command = [sys.executable, "-m", "scripts.checks.llama_answers", str(file)]
    command += [f"--humaneval={tmp_path / 'h.jsonl'}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(out.read_text())["humaneval"]
    assert all(result["answer"] for result in theirs["results"])
    assert theirs["equal"] == {"problems": 3, "answers": 3, "verdicts": 3}
    assert "3 problems, 3 answers, 3 verdicts" in done.stdout
    with serve(file) as url:  # the same by a server that runs already
        status = llama_answers.main([*command[3:], f"--server={url}"])
    assert status == 0
    assert json.loads(out.read_text())["humaneval"]["results"] == theirs["results"]
    assert llama_answers.main([*command[3:], f"--server={url}"]) == 2  # it has ended


@pytest.mark.slow
def test_llama_cpp_counts_the_tokens_of_a_draft(tmp_path):
    """A model keeps all that it drafts itself, and some of what another does."""
    pytest.importorskip("xllamacpp")
    model = kdjax.load(demo.STUDENT, dtype="float32")
    other = model.replace(params=jax.tree.map(lambda x: 1.3 * x, model.params))
    files = {}
    for name, one in (("big", model), ("small", other)):
        files[name] = tmp_path / f"{name}.gguf"
        kdjax.export_gguf(one, files[name], dtype="f32")
    stories = (json.loads(line)["text"] for line in demo.HELD_OUT.read_text().splitlines())
    (tmp_path / "t.txt").write_text("\n".join(stories))
    flags = [str(files["big"]), f"--prompts={tmp_path / 't.txt'}", "--count=1", "--max-tokens=24"]
    found = {}
    for name in ("small", "big"):
        out, before = tmp_path / f"{name}.json", tmp_path / "small.json"
        against = [f"--against={before}"] * (name == "big")
        with serve(files["big"], draft=files[name]) as url:
            servers = ",".join([url] * (1 + (name == "big")))  # answers are dealt out
            asked = [*flags, f"--server={servers}", f"--json={out}", "--temperature=0", *against]
            assert llama_draft.main(asked) == 0
        found[name] = json.loads(out.read_text())
    assert found["big"]["accepted"] == found["big"]["drafted"] > 0
    assert found["small"]["accepted"] < found["small"]["drafted"]
    assert found["big"]["fewer"][0] == 1
    with serve(files["big"]) as url:  # nothing is drafted there
        assert llama_draft.main([*flags, f"--server={url}", f"--json={out}"]) == 2


def test_fewer_rejected_pairs_the_answers_of_a_prompt():
    rng = np.random.default_rng(1)
    before = [(int(x), 100) for x in rng.integers(60, 95, 400)]
    after = [(100 - round(0.8 * (100 - x)), 100) for x, _ in before]
    fewer, low, high = llama_draft.fewer_rejected(before, after)
    assert fewer == pytest.approx(0.2, abs=0.01) and low <= fewer <= high
    assert high - low < 0.01  # pairs: each alone would be 0.09 wide
    apart = llama_draft.fewer_rejected(before, rng.permutation(after).tolist())
    assert apart[2] - apart[1] > 0.04
    assert llama_draft.fewer_rejected([(5, 5)], before[:1]) == []


def test_what_two_writers_share_is_counted_by_problem():
    def found(*ends):
        samples = [passk.Sample(f"T/{i}", reason, "", "", text) for i, text, reason in ends]
        return {"results": [dataclasses.asdict(sample) for sample in samples]}

    ours = found((0, "a", "passed"), (1, "b", "passed"), (2, "c", "timeout"))
    theirs = found((2, "d", "timeout"), (1, "b", "passed"), (3, "e", "passed"))
    assert count_equal(ours, theirs) == {"problems": 2, "answers": 1, "verdicts": 2}


def test_a_file_is_judged_by_three_wordings(models, tmp_path, monkeypatch, capsys):
    """Its server begins once; names are those of `kdjax evaluate --wording=all`."""
    prompts, served = [], []

    @contextlib.contextmanager
    def fake(model, **sizes):
        served.append(model)
        yield "http://localhost:1"

    def answer(self, ids, stops):
        prompts.append(load_tokenizer(models / "student.gguf").decode(ids))
        return Completion([], "    return a + 1\n", "stop", [])

    monkeypatch.setattr(llama_answers, "serve", fake)
    monkeypatch.setattr(llama_answers, "ask", lambda *_: {})
    monkeypatch.setattr(llama_answers.Writer, "_answer", answer)
    package = types.ModuleType("xllamacpp")
    package.__spec__ = importlib.machinery.ModuleSpec("xllamacpp", None)
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    out, model = tmp_path / "out.json", models / "student.gguf"
    flags = [str(model), f"--humaneval={humaneval(tmp_path)}", f"--json={out}", "--wording=all"]
    flags += ["--limit=2", "--slots=1", "--allow-unsandboxed"]
    assert llama_answers.main(flags) == 0 and served == [model]
    found = compare_passk.read(out)
    wordings = {name: figures["wording"] for name, figures in found.items()}
    names = "humaneval", "humaneval request", "humaneval bare"
    assert wordings == dict(zip(names, ("instruct", "request", "bare"), strict=True))
    assert len(prompts) == 6 and prompts[4].endswith('"""Adds 0 to a."""\n')
    assert "instruct" not in prompts[4] and len(set(prompts)) == 6
    assert compare_passk.passed(found["humaneval bare"])["HumanEval/1"] == [True]
    assert llama_answers.main([*flags, f"--against={out}"]) == 0
    assert capsys.readouterr().out.count("2 problems, 2 answers, 2 verdicts") == 3
    rows = compare_passk.over_seeds([out], [out])
    assert any("mean of 3 wordings" in row for row in rows)


def test_what_is_refused_is_refused_before_an_answer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(llama_answers, "judge", lambda *_: pytest.fail("answers are written"))
    (tmp_path / "b.json").write_text("no JSON")
    flags = ["a.gguf", f"--humaneval={humaneval(tmp_path)}", "--server=http://localhost:1"]
    for wrong, message in (
        ([f"--json={tmp_path}"], "is a folder; expected a file to write"),
        ([f"--json={tmp_path}/a.json", f"--against={tmp_path}/b.json"], "found no readable JSON"),
    ):
        assert llama_answers.main([*flags, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@needs_llama_cpp
def test_the_kl_by_llama_cpp_is_that_of_the_models_logits(tmp_path):
    """KL and agreement of two files by llama.cpp are those of kdjax's logits in float32."""
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a small dog. " * 20)
    files = [demo.FOLDER / f"{name}.gguf" for name in ("teacher", "student")]
    out = tmp_path / "kl.json"
    flags = [f"--text={text}", "--rows=2", "--seq-len=32", f"--json={out}"]
    assert llama_kl.main([str(files[0]), str(files[1]), str(files[0]), *flags]) == 0
    found = json.loads(out.read_text())
    models = [kdjax.load(path, dtype="float32", compute_dtype="float32") for path in files]
    rows = read_text(str(text), load_tokenizer(files[0]), rows=2, seq_len=32).rows
    expected = []
    for batch in eval_batches(rows, batch_size=1, limit=2):
        ids = batch["tokens"][:, :32]
        base, other = (
            np.asarray(jax.nn.log_softmax(model.logits(ids)), np.float64)[0, 16:]
            for model in models
        )
        expected.append((np.exp(base) * (base - other)).sum(-1).mean())
    assert found[str(files[1])]["kl"] == pytest.approx(np.mean(expected), rel=0.05)
    assert found[str(files[1])]["positions"] == 32 and found[str(files[0])]["kl"] == 0
