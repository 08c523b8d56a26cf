"""Live parity with Transformers on torch, float32: needs the `parity` extra; `pytest -m parity`."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from test_models import load, relative, rows

from scripts.checks import make_goldens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


def compare(path, model, tokens):
    """Largest relative error over the layers, and of the logits."""
    apply, params = load(path)
    expected = make_goldens.expected(model, tokens)

    def run(p, *where):
        decoder = nnx.merge(apply.graph, p)
        hidden, layers = decoder.hidden_and_layers(*where, keep_layers=True)
        return decoder.unembed(hidden), layers

    logits, layers = jax.jit(run)(params, *rows(tokens))
    by_layer = [relative(a, b) for a, b in zip(layers, expected["layers"], strict=True)]
    return max(by_layer), relative(logits, expected["logits"])


@pytest.mark.parametrize("case", make_goldens.CASES)
@pytest.mark.parametrize("seed", [101, 102])
def test_random_models(case, seed, tmp_path):
    model = make_goldens.build(case, seed)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(seed).integers(0, 160, (3, 40)).astype(np.int32)
    layers, logits = compare(tmp_path, model, tokens)
    assert layers < 1e-4 and logits < 1e-4


def gguf_parity(path, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    return compare(path, model, tokens)


@pytest.mark.parametrize("name", ["teacher", "student"])
def test_quantized_files_through_transformers_own_loader(models, name):
    tokens = np.random.default_rng(0).integers(0, 300, (2, 48)).astype(np.int32)
    layers, logits = gguf_parity(models / f"{name}.gguf", tokens)
    assert layers < 1e-4 and logits < 1e-4


@pytest.mark.skipif("KDJAX_MODELS" not in os.environ, reason="needs the published files")
def test_the_published_half_billion():
    path = Path(os.environ["KDJAX_MODELS"]) / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    tokens = np.random.default_rng(0).integers(0, 151_000, (1, 32)).astype(np.int32)
    layers, logits = gguf_parity(path, tokens)
    print(f"published 0.5B: layers {layers:.1e}, logits {logits:.1e}")
    assert layers < 1e-4 and logits < 1e-4


@pytest.mark.skipif("KDJAX_MODELS" not in os.environ, reason="needs the published files")
def test_greedy_decoding_of_the_published_half_billion():
    """20 prompts x 64 tokens, ragged, in one batch here; one by one there."""
    from kdjax.models.model import load

    path = Path(os.environ["KDJAX_MODELS"]) / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    ours = load(path, dtype="float32")
    source = Path(make_goldens.__file__).read_text() + Path(__file__).read_text()
    prompts = [ours.tokenizer.encode(source[i * 97 : i * 97 + 20 + 11 * i]) for i in range(20)]
    got = ours.generate(prompts, max_tokens=64, stop_ids=(), batch_size=20)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    same = 0
    for prompt, completion in zip(prompts, got, strict=True):
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None
            )
        same += completion.ids == ids[0, len(prompt) :].tolist()
    print(f"published 0.5B: {same} of 20 greedy continuations of 64 tokens equal")
    assert same == 20
