"""The fidelity report: its figures against plain NumPy, and what bad input says."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from kdjax.data import pipeline
from kdjax.data.rows import pack_rows
from kdjax.device import runtime, sharding
from kdjax.errors import UserError
from kdjax.evaluation import fidelity
from kdjax.formats import open_table
from kdjax.formats.synthetic import QWEN25_SHAPES, write_random_gguf
from kdjax.models.arch import spec_from_table
from kdjax.models.decoder import Compute
from kdjax.models.model import dequantized
from kdjax.models.tokenizer import load_tokenizer

SIZES = dict(rows=8, seq_len=24, batch_size=8)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.py").write_text("def f(x):\n    return x + 1\n" * 6)
    (folder / "b.md").write_text("Some words for a change, and more of them.\n" * 4)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another random model of the teacher's tokenizer, with another padding."""
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    write_random_gguf(path, QWEN25_SHAPES["tiny-teacher"]._replace(rows=320), seed=9)
    return path


def test_one_form_against_itself_differs_in_nothing(models, text):
    form = f"{models}/teacher.gguf@q4k:float32"
    domains = {"code": f"{text}/a.py", "prose": f"{text}/b.md"}
    figures = fidelity.compare(form, form, domains, **SIZES)
    assert list(figures) == ["code", "prose", "all"]
    for domain in figures.values():
        assert domain["kl_ab"] == domain["kl_ba"] == domain["max_difference"] == 0
        assert domain["agreement"] == 1 and domain["perplexity_a"] == domain["perplexity_b"]
        assert domain["min_cosine"] == pytest.approx(1, abs=1e-5)
    assert figures["all"]["tokens"] == figures["code"]["tokens"] + figures["prose"]["tokens"]


def log_probabilities(path, batch, real):
    table = open_table(path)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    teacher = dequantized(table, spec_from_table(table), Compute(), mesh)
    columns = [jnp.asarray(batch[k]) for k in ("tokens", "segment_ids", "positions")]
    logits = teacher.logits(*columns)
    logits = np.asarray(logits, np.float64)[..., :real][batch["weights"] != 0]
    return logits, log_softmax(logits, axis=-1)


def test_figures_against_numpy(models, other, text, tmp_path):
    teacher = models / "teacher.gguf"
    forms = [f"{path}@dequant:float32" for path in (teacher, other)]
    got = fidelity.compare(*forms, {"x": f"{text}/a.py"}, **SIZES)["x"]
    tokenizer = load_tokenizer(teacher)
    rows = pack_rows(
        f"{text}/a.py", tmp_path, tokenizer=tokenizer, seq_len=24, max_segments=24,
        end_of_document_id=tokenizer.end_of_text_id,
    )  # fmt: skip
    (batch,) = pipeline.eval_batches(rows, batch_size=8, limit=8)
    labels = batch["labels"][batch["weights"] != 0]
    (a, p), (b, q) = (log_probabilities(x, batch, tokenizer.vocab_size) for x in (teacher, other))
    at = np.arange(len(labels))
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    want = {
        "kl_ab": (np.exp(p) * (p - q)).sum(-1).mean(),
        "kl_ba": (np.exp(q) * (q - p)).sum(-1).mean(),
        "agreement": (a.argmax(-1) == b.argmax(-1)).mean(),
        "entropy_a": -(np.exp(p) * p).sum(-1).mean(),
        "entropy_b": -(np.exp(q) * q).sum(-1).mean(),
        "ce_a": -p[at, labels].mean(),
        "ce_b": -q[at, labels].mean(),
        "perplexity_a": np.exp(-p[at, labels].mean()),
        "perplexity_b": np.exp(-q[at, labels].mean()),
        "cosine": cosine.mean(),
        "min_cosine": cosine.min(),
        "max_difference": np.abs(a - b).max(),
        "tokens": len(labels),
    }
    assert got.keys() == want.keys() and want["kl_ab"] > 0.1
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_the_command_prints_a_table_and_writes_json(models, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "configure", lambda: None)
    out = tmp_path / "figures.json"
    arguments = [f"{models}/teacher.gguf", f"{models}/teacher.gguf@q4k", f"--data=code={text}/a.py",
                 "--rows=8", "--seq-len=24", "--batch-size=8", f"--json={out}"]  # fmt: skip
    assert fidelity.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "A = teacher.gguf@dequant:bfloat16" in printed and "B = teacher.gguf@q4k" in printed
    figures = json.loads(out.read_text())["figures"]["code"]
    assert figures["kl_ab"] == 0 and figures["max_difference"] == 0  # packed, to the last bit
    assert f"{figures['perplexity_a']:.6g}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{m}/teacher.gguf@q5", "{m}/teacher.gguf"], "found the form 'q5'; expected dequant or"),
        (["{m}/teacher.gguf@q4k:float16", "{m}/teacher.gguf"], "expected .* bfloat16 or float32"),
        (["{m}/none.gguf", "{m}/teacher.gguf"], "found no such file"),
        (["{m}/teacher.gguf", "{m}/teacher.gguf", "--rows=0"], "--rows must be 1 or more"),
    ],
)
def test_bad_input_ends_with_status_2(models, text, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(runtime, "configure", lambda: None)
    arguments = [argument.format(m=models) for argument in arguments]
    assert fidelity.main([*arguments, f"--data={text}"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_models_of_other_tokenizers_are_refused(models, text, tmp_path):
    from kdjax.formats.gguf_writer import write_gguf

    table = open_table(models / "teacher.gguf")
    tokens = list(table.metadata["tokenizer.ggml.tokens"])
    tokens[3], tokens[4] = tokens[4], tokens[3]
    tensors = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    write_gguf(
        tmp_path / "x.gguf", dict(table.metadata) | {"tokenizer.ggml.tokens": tokens}, tensors
    )
    with pytest.raises(UserError, match="differ at id 3"):
        forms = f"{models}/teacher.gguf", str(tmp_path / "x.gguf")
        fidelity.compare(*forms, {"x": f"{text}/a.py"}, **SIZES)
