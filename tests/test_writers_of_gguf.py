"""Every family's GGUF writer with each optional tensor: llama.cpp opens the file, or it is refused.

llama.cpp's loader is the judge: it counts tensors, and opens no file with an unknown one.
"""

import dataclasses

import gguf
import jax
import numpy as np
import pytest
from exporting import ask_llama_cpp, needs_llama_cpp, open_by_llama_cpp, write_small_tokenizer
from test_families import as_gguf

from kdjax.errors import UserError
from kdjax.export import export_gguf
from kdjax.formats import open_table
from kdjax.models.decoder import Compute, functional
from kdjax.models.families import FAMILIES
from kdjax.models.schema import gguf_entries

CASES = ("qwen2_untied", "qwen3", "qwen3_moe", "llama", "mistral", "smollm3", "granite", "minicpm")
CASES += ("gemma3", "ministral3", "phi3_long", "olmo3", "olmo2", "qwen3_5", "qwen3_5_moe")
# A refusal's word for what differs, by the field of `ArchSpec`.
WORDS = {"tied": "tie_word_embeddings", "qk_norm": "attn_q_norm", "biases": "attention_bias"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.gguf"))


def plain(case, tokenizer):
    """A model of the family as its GGUF files can say it."""
    model = as_gguf(case, tokenizer)
    spec, fields = model.spec, {}
    if case == "gemma3":
        near, far = spec.layers[:2]
        fields = dict(layers=(*[near] * 5, far), attention_scale=0.0)
    elif case == "mistral":
        fields = dict(layers=tuple(layer._replace(window=0) for layer in spec.layers))
    elif spec.delta_value_heads:
        fields = dict(delta_value_dim=spec.delta_key_dim)
    elif spec.experts:
        fields = dict(norm_experts=True)
    return model, dataclasses.replace(spec, **fields)


def draw(model, spec):
    functions, shapes = functional(spec, Compute())
    rng = np.random.default_rng(3)

    def fill(path, leaf):
        around = float("norm" in jax.tree_util.keystr(path))
        return (around + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(fill, shapes)
    return model.replace(spec=spec, functions=functions, params=params)


def list_variants(spec):
    """Name of what differs -> fields of the architecture."""
    yield "tied", {"tied": True}
    yield "tied", {"tied": False}
    for qkv in (False, True):
        for o in (False, True):
            yield "biases", {"qkv_bias": qkv, "o_bias": o}
    yield "qk_norm", {"qk_norm": not spec.qk_norm}
    if spec.delta_value_heads:
        yield "drafts", {"drafts": 1}


@pytest.mark.slow
def test_each_family_has_a_case(tokenizer):
    assert {as_gguf(case, tokenizer).spec.family for case in CASES} == set(FAMILIES)


@needs_llama_cpp
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_opens_what_is_written_or_it_is_refused_by_name(case, tokenizer, tmp_path):
    model, spec = plain(case, tokenizer)
    written = []
    for number, (name, fields) in enumerate(list_variants(spec)):
        changed = dataclasses.replace(spec, **fields)
        try:
            gguf_entries(changed)
        except UserError as error:
            assert WORDS[name] in str(error), error
            continue
        written.append((fields, tmp_path / f"{number}.gguf"))
        export_gguf(draw(model, changed), written[-1][1])
    assert len(written) >= 2
    said = open_by_llama_cpp([path for _, path in written])
    assert not any(said), list(zip(written, said, strict=True))
    for _, path in written:
        check_listed(path)


def check_listed(path):
    """Compares the names with gguf-py's list of the architecture's tensors."""
    table = open_table(path)
    arch = next(
        a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == table.metadata["general.architecture"]
    )
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[arch]}
    numbers = range(table.metadata[f"{gguf.MODEL_ARCH_NAMES[arch]}.block_count"])
    listed = {name.format(bid=i) for name in known for i in numbers}
    stems = {n: n.removesuffix(".weight").removesuffix(".bias") for n in table}
    # gguf-py 0.19 does not list the next-token block of Qwen3.5, which llama.cpp opens.
    assert not {n for n, stem in stems.items() if stem not in listed and ".nextn." not in n}


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2_untied", "qwen3", "llama", "smollm3", "granite", "gemma3"])
def test_llama_cpp_adds_the_biases_that_it_reads(case, tokenizer, tmp_path):
    model, spec = plain(case, tokenizer)
    biased = "o" in FAMILIES[spec.family].gguf_biases
    made = draw(model, dataclasses.replace(spec, qkv_bias=True, o_bias=biased))
    export_gguf(made, tmp_path / "a.gguf")
    prompt = list(range(7, 19))
    (found,) = ask_llama_cpp(tmp_path / "a.gguf", [prompt])
    logits = np.asarray(made.logits(np.array([prompt])))[0, -1]
    # llama.cpp's sum is over the rows beyond the last token, too, which kdjax leaves out.
    heard = np.array([found[i] for i in range(len(logits))])
    assert len(heard) > 20 and len(found) == spec.vocab_size
    alike = heard - np.log(np.exp(heard).sum()), logits - jax.nn.logsumexp(logits)
    np.testing.assert_allclose(*alike, atol=1e-2)  # gelu is a table of F16 there: 5e-3
