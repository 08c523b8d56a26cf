"""Every entry of every family's config.json: absent, null and changed, compared with Transformers.

Its defaults need no torch. The logits do: the `parity` extra, `pytest -m parity`.
"""

import copy
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from test_models import headed, relative, rows

from kdjax.device import sharding
from kdjax.errors import UserError
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.decoder import Compute, functional
from kdjax.models.families import FAMILIES
from kdjax.models.loading import load_params
from kdjax.models.schema import spec_from_table

GOLDENS = Path(__file__).parent / "goldens"
# One golden of each family; Transformers has no class of MiniCPM.
CASES = ("qwen2_tied", "qwen3", "qwen3_moe", "llama_scaled", "mistral", "smollm3", "granite")
CASES += ("gemma3", "ministral3", "phi3", "phi3_long", "olmo2", "olmo3", "qwen3_5", "qwen3_5_moe")
# Cases beside one of the same classes, or of these with experts: only what that one's config lacks
# is changed. A program of delta nets takes two seconds to compile, and each change is a program.
COVERED = {"qwen3_5": "qwen3_5_moe", "phi3": "phi3_long"}
GONE = object()
# Transformers' names of entries that an error calls by their older ones.
OLDER = {"num_local_experts": "num_experts", "sliding_attention": "rope_theta"}
# It reads no numbers from these.
NAMES = ("model_type", "architectures", "transformers_version", "dtype")


def read_config(case):
    return json.loads((GOLDENS / case / "config.json").read_text())


def put(entries, place, value):
    """The entries with another value at a place, or without it."""
    found = entries = copy.deepcopy(entries)
    for name in place[:-1]:
        found = found[name]
    found[place[-1]] = value
    if value is GONE:
        del found[place[-1]]
    return entries


def list_places(entries, outer=()):
    for key, value in entries.items():
        if key not in NAMES:
            yield (*outer, key), value
            if isinstance(value, dict):
                yield from list_places(value, (*outer, key))


def read(entries):
    """The architecture, or the words of the refusal."""
    try:
        return spec_from_table(headed(**entries))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("value", [2**31, 2**63, 10**400, 4.5, -1, True])
def test_a_count_is_a_whole_number_that_an_array_can_have(value):
    counts = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
    for name in (*counts, "num_hidden_layers", "max_position_embeddings"):
        refusal = read(read_config("qwen3") | {name: value})
        assert isinstance(refusal, str) and name in refusal, (name, refusal)


def is_named(place, refusal):
    return any(key in refusal for key in (place[-1], OLDER.get(place[-1], place[-1])))


def test_each_family_has_a_case():
    assert {read_config(case)["model_type"] for case in CASES} == set(FAMILIES) - {"minicpm"}


@pytest.mark.parametrize("case", CASES)
def test_what_a_config_leaves_out_is_what_transformers_takes(case):
    """The spec of a header without an entry is that of Transformers' config of the same header."""
    base = read_config(case)
    if case != "phi3_long":  # whose divisors have a length
        base |= {"num_attention_heads": 6, "num_key_value_heads": 3}  # no family's default
    for place, _ in list_places(base):
        for value in (GONE, None):
            entries = put(base, place, value)
            found = read(entries)
            if isinstance(found, str) and is_named(place, found):
                continue
            try:
                config = transformers.AutoConfig.for_model(**copy.deepcopy(entries))
            except Exception:  # its validators raise any kind: there is nothing to compare with
                continue
            wanted = read(config.to_dict())
            if place == ("intermediate_size",) and FAMILIES[base["model_type"]].experts:
                continue  # no layer has it
            assert found == wanted, (place, "null" if value is None else "absent")


def test_experts_have_the_width_of_heads_that_transformers_gives_them():
    """Its class has no entry of its own: their number divides the width."""
    entries = put(read_config("qwen3_moe"), ("head_dim",), GONE)
    assert spec_from_table(headed(**entries)).head_dim == 48 // 4


def list_changes(key, value):
    """Other values of an entry."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield 2 * value
    elif isinstance(value, float):
        yield 2 * value if value > 0.1 else value + 0.1
    elif isinstance(value, list):
        yield value[::-1]
    elif isinstance(value, str) and "act" in key:
        yield from ("gelu", "relu")
    elif key == "sliding_window":
        yield 5


def build(folder):
    """Transformers' model of a folder's config.json, with random weights, which it stores there."""
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    around = not type(model).__name__.startswith(("Gemma3", "Qwen3_5"))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "A_log" not in key:
                weight.copy_(around * ("norm" in key) + 0.2 * torch.randn_like(weight))
    aside = folder / "aside"
    model.save_pretrained(aside)
    shutil.copy(aside / "model.safetensors", folder)
    return model


def compare(folder, known, tokens):
    """The refusal of a folder, or how far its logits are off; None if Transformers refuses it.

    `known` has our logits by architecture and weights: half of the entries change neither.
    """
    try:
        spec = open_checkpoint(folder, shapes=True).spec
    except UserError as error:
        return str(error)
    if spec.hidden_size > 200 or spec.num_layers > 20 or spec.mlp_size > 1000:
        return None  # a default of billions
    torch = pytest.importorskip("torch")
    try:
        model = build(folder)
        with torch.no_grad():
            wanted = model(torch.from_numpy(tokens).long()).logits.numpy()
    except Exception:  # as above
        return None
    key = spec, (folder / "model.safetensors").read_bytes()
    if key not in known:
        known[key] = run(open_checkpoint(folder), tokens)
    return relative(known[key], wanted)


def run(checkpoint, tokens):
    """Our logits."""
    apply, abstract = functional(checkpoint.spec, Compute())
    params = load_params(checkpoint.table, checkpoint.spec, abstract, sharding.make_local_mesh(1))

    def compute(params, *where):
        decoder = apply.merge(params)
        return decoder.unembed(decoder.hidden(*where))

    return jax.jit(compute)(params, *rows(tokens))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_an_entry_that_changes_is_computed_or_refused(case, tmp_path):
    base, known = read_config(case), {}
    tokens = np.random.default_rng(0).integers(0, 160, (2, 24)).astype(np.int32)
    changed = [((), base)]
    covered = dict(list_places(read_config(COVERED[case]))) if case in COVERED else {}
    for place, value in list_places(base):
        if place in covered:
            continue
        others = [GONE, *list_changes(place[-1], value)]
        changed += [(place, put(base, place, other)) for other in others]
    for number, (place, entries) in enumerate(changed):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(entries))
        found = compare(folder, known, tokens)
        if isinstance(found, str):
            # Two entries that contradict each other are named by either's name.
            either = "layer_types|no_rope_layers|rotary parameters"
            named = is_named(place, found) or re.search(either, found)
            assert place and named, (place, found)
        else:
            assert found is None or found < 1e-4, (place, entries, found)
        shutil.rmtree(folder)


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_delta_layers_of_another_activation_are_refused(case):
    """Their convolution has it too in Transformers; the logits were off by half."""
    assert read(read_config(case) | {"hidden_act": "swish"}) != ""
    assert "found hidden_act 'gelu'; expected one of silu" in read(
        read_config(case) | {"hidden_act": "gelu"}
    )


@pytest.mark.parametrize("case", ["mistral", "ministral3", "phi3"])
def test_biases_that_a_class_does_not_add_are_refused(case):
    assert "found attention_bias; expected none" in read(
        read_config(case) | {"attention_bias": True}
    )


def test_a_ministral_without_rotary_parameters_is_refused():
    """Transformers takes yarn's then, with a factor of 16."""
    assert "found no rope_parameters" in read(
        put(read_config("ministral3"), ("rope_parameters",), GONE)
    )


def test_two_thetas_of_an_olmo_are_not_guessed():
    entries = put(read_config("olmo3"), ("rope_parameters", "sliding_attention"), GONE)
    assert "found no 'rope_theta'" in read(entries)
    entries["rope_parameters"]["full_attention"]["rope_theta"] = 5e5
    assert spec_from_table(headed(**entries)).local_rope_theta == 5e5
