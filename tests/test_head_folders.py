"""Heads in speculators' folders: read as they are there, or refused by the entry that differs."""

import dataclasses
import json

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from quick import cases
from safetensors.numpy import load_file, save_file
from test_dspark import model, path, unsettle
from test_eagle import unsettle as unsettle_eagle

import kdjax
from kdjax.commands import export, generate
from kdjax.errors import UserError
from kdjax.evaluation import drafting
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.heads import add_output, attach_head

__all__ = ["model", "path"]  # fixtures
pytestmark = pytest.mark.usefixtures("one_device")

NAMES = {
    "fc/weight": "fc.weight",
    "fc_norm/weight": "hidden_norm.weight",
    "norm/weight": "norm.weight",
    "markov": "markov_head.markov_w1.weight",
    "bias": "markov_head.markov_w2.weight",
    "confidence/weight": "confidence_head.proj.weight",
    "confidence/bias": "confidence_head.proj.bias",
    "output": "lm_head.weight",
    "blocks/state_norm/weight": "layers.{i}.hidden_norm.weight",
    "blocks/attn_norm/weight": "layers.{i}.input_layernorm.weight",
    "blocks/attn/q/weight": "layers.{i}.self_attn.q_proj.weight",
    "blocks/attn/k/weight": "layers.{i}.self_attn.k_proj.weight",
    "blocks/attn/v/weight": "layers.{i}.self_attn.v_proj.weight",
    "blocks/attn/o/weight": "layers.{i}.self_attn.o_proj.weight",
    "blocks/attn/q_norm/weight": "layers.{i}.self_attn.q_norm.weight",
    "blocks/attn/k_norm/weight": "layers.{i}.self_attn.k_norm.weight",
    "blocks/mlp_norm/weight": "layers.{i}.post_attention_layernorm.weight",
    "blocks/mlp/gate/weight": "layers.{i}.mlp.gate_proj.weight",
    "blocks/mlp/up/weight": "layers.{i}.mlp.up_proj.weight",
    "blocks/mlp/down/weight": "layers.{i}.mlp.down_proj.weight",
}
DRAFTS = 3
LM_HEAD = "lm_head.weight"


def make_bonus(model):
    """A DSpark head whose anchor's slot predicts nothing."""
    made = kdjax.make_head(model, rank=8, **SIZES)
    shape = dataclasses.replace(made.functions.shape, anchored=False)
    return attach_head(model, shape, {"dspark": made.params["dspark"]})


IDS = tuple(range(290, 10, -7))
SIZES = dict(seed=1, layers=2, slots=DRAFTS, taps=(0, 2))
HEADS = {
    "dspark": lambda model: unsettle(kdjax.make_head(model, rank=8, **SIZES)),
    "bonus": lambda model: unsettle(make_bonus(model)),
    "dflash": lambda model: unsettle(kdjax.make_head(model, rank=0, **SIZES)),
    "eagle3": lambda model: unsettle_eagle(kdjax.make_eagle(model, seed=1)),
    "some ids": lambda model: unsettle_eagle(kdjax.make_eagle(model, seed=1, ids=IDS)),
}


VARIANTS = ("bonus", "some ids")


@pytest.fixture(
    scope="module", params=cases(*(h for h in HEADS if h not in VARIANTS), slow=VARIANTS)
)
def head(model, request):
    """A head as its folder has it: of EAGLE-3 with the unembedding."""
    return add_output(HEADS[request.param](model))


def write_folder(folder, model, head, **others):
    """Writes a head as speculators 0.9 does; `others` are further tensors."""
    folder.mkdir()
    shape, tensors = head.functions.shape, dict(others)
    eagle = shape.kind == "eagle3"
    for key, x in flatten_dict(head.params[shape.part], sep="/").items():
        layers = x if key.startswith("blocks/") else x[None]
        tensors |= {NAMES[key].format(i=i): np.array(row) for i, row in enumerate(layers)}
    embed = np.asarray(model.params["embed"])
    tensors["embed_tokens.weight"] = embed  # a copy of the target's, which does not train there
    if not eagle:
        tensors["lm_head.weight"] = embed.copy()
    elif shape.ids:
        tensors["d2t"] = np.asarray(shape.ids) - np.arange(len(shape.ids))
        tensors["t2d"] = np.isin(np.arange(len(embed)), shape.ids)
    save_file(tensors, folder / "model.safetensors")
    spec, dspark = shape.spec, shape.kind == "dspark"
    layers = {
        "attention_bias": False,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp_size,
        "max_position_embeddings": spec.max_positions,
        "model_type": "llama" if eagle else "qwen3",
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_eps,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "vocab_size": spec.vocab_size,
    }
    config = {
        "draft_vocab_size": spec.vocab_size,
        "speculators_model_type": shape.kind,
        "transformer_layer_config": layers,
    }
    if eagle:
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
        config["draft_vocab_size"] = len(shape.ids) or spec.vocab_size
    else:
        first = 0 if dspark and shape.anchored else 1
        config |= {"block_size": DRAFTS + first, "sample_from_anchor": not first}
        config |= {"aux_hidden_state_layer_ids": [0, 2], "mask_token_id": shape.mask}
        layers |= {"layer_types": ["full_attention"] * 2, "sliding_window": None}
    if dspark:
        config |= {"confidence_head_with_markov": True, "markov_head_type": "vanilla"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change(folder, name, value):
    """Sets an entry of the config, or of its layers; None takes it out."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    layers = config["transformer_layer_config"]
    place = layers if name in layers or name.startswith("layers.") else config
    name = name.removeprefix("layers.")
    place.pop(name, None)
    if value is not None:
        place[name] = value
    file.write_text(json.dumps(config))


def test_a_folder_has_the_head(path, model, head, tmp_path):
    """Its numbers and sizes, from both versions of Transformers' config; a GGUF file is made."""
    folder = write_folder(tmp_path / "head", model, head)
    read = kdjax.load_head(folder, model)
    assert read.functions.shape == head.functions.shape
    compare(head, read)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    layers = config["transformer_layer_config"]
    layers["rope_theta"] = layers.pop("rope_parameters")["rope_theta"]
    file.write_text(json.dumps(config))
    assert kdjax.load_head(folder, model).functions.shape == head.functions.shape
    kdjax.export_head(read, tmp_path / "head.gguf", dtype="f32")
    assert kdjax.load_head(tmp_path / "head.gguf", model).functions.shape == head.functions.shape
    own = drafting.find_own(str(folder), open_checkpoint(str(path)))
    assert own is not None and own.most == head.functions.shape.most


def compare(head, read):
    ours, theirs = (flatten_dict(x.params[head.functions.shape.part]) for x in (head, read))
    assert ours.keys() == theirs.keys()
    for key, x in ours.items():
        np.testing.assert_array_equal(theirs[key], x)


def test_a_written_folder_is_speculators(model, head, tmp_path):
    """Its tensors and entries are those of the test's own writer; it reads back."""
    shape = head.functions.shape
    kdjax.export_head(head, tmp_path / "ours", dtype="f32", folder=True)
    theirs = load_file(write_folder(tmp_path / "theirs", model, head) / "model.safetensors")
    if shape.kind != "eagle3":  # speculators leaves out what is the target's
        theirs = {k: x for k, x in theirs.items() if k not in ("embed_tokens.weight", LM_HEAD)}
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert ours[name].dtype == x.dtype
        np.testing.assert_array_equal(ours[name], x)
    written, wanted = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")
    )
    for config in (written, wanted):
        config |= config.pop("transformer_layer_config")
    # What speculators takes these for if they are not there.
    defaults = {"layer_types", "sliding_window", "confidence_head_with_markov", "markov_head_type"}
    assert {k: written[k] for k in wanted.keys() - defaults} == {
        k: wanted[k] for k in wanted.keys() - defaults
    }
    compare(head, kdjax.load_head(tmp_path / "ours", model))


def test_the_command_writes_a_head(path, model, head, tmp_path, capsys):
    """To a folder of a file, and to a file of a folder; other formats are refused."""
    kdjax.export_head(head, tmp_path / "h.gguf", dtype="f32")
    how = [f"--student={path}", "--type=f32"]
    for source, form, out in (("h.gguf", "hf", "folder"), ("folder", "gguf", "again.gguf")):
        made = [str(tmp_path / source), f"--format={form}", f"--out={tmp_path / out}"]
        assert export.main([*made, *how]) == 0
        compare(head, kdjax.load_head(tmp_path / out, model))
    for flags, message in (
        (["--format=apr", f"--student={path}"], "found --format=apr for a head that drafts"),
        (["--format=hf"], "found a head; expected its target, --student=MODEL"),
    ):
        assert export.main([str(tmp_path / "h.gguf"), f"--out={tmp_path}/x", *flags]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_generate_drafts_with_a_folder(path, model, head, tmp_path, capsys):
    folder = write_folder(tmp_path / "head", model, head)
    how = [str(path), "--prompt=a b c", "--max-tokens=9", "--temperature=0"]
    said = []
    for more in ([], [f"--draft={folder}", f"--draft-tokens={DRAFTS}"]):
        assert generate.main([*how, *more]) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out and "accepted" in said[1].err + said[1].out


PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("speculators_model_type", "mtp", "found speculators_model_type='mtp'; expected 'dspark"),
        ("model_type", "llama", "found model_type='llama'; expected 'qwen3', of a head that kdjax"),
        ("draft_vocab_size", 64, "found draft_vocab_size=64; expected 305"),
        ("layer_types", ["sliding_attention"], "found layer_types='sliding_attention'; expected"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "found rope_type='yarn'; ex"),
        ("attention_bias", True, "found attention_bias=True; expected False"),
        (
            "layers.use_sliding_window",
            True,
            "not compute:\n  use_sliding_window=True: expected Fal",
        ),
        ("layers.mlp_bias", True, "not compute:\n  mlp_bias=True: expected False"),
        ("layers.final_logit_softcapping", 30.0, "final_logit_softcapping=30.0: expected None"),
        ("rope_parameters", PARTIAL, "rotary partial_rotary_factor=0.25: expected 1.0"),
        ("mask_token_id", None, "found mask_token_id=None; expected a number"),
        ("head_dim", "32", "found head_dim='32'; expected a number"),
        ("aux_hidden_state_layer_ids", None, "found aux_hidden_state_layer_ids=None; expected num"),
        ("hidden_size", 96, "found a head of width 96; expected 128, the model's"),
        ("transformer_layer_config", None, "found no transformer_layer_config; expected one"),
    ],
)
def test_entries_that_kdjax_does_not_compute_are_refused(model, tmp_path, name, value, message):
    made = kdjax.make_head(model, layers=2, slots=DRAFTS, rank=0, taps=(0, 2))
    folder = write_folder(tmp_path / "head", model, made)
    change(folder, name, value)
    with pytest.raises(UserError, match=message):
        kdjax.load_head(folder, model)


def test_a_window_is_refused_unless_no_layer_has_it(model, tmp_path):
    """speculators writes the size of the window of a head whose layers all see the full text."""
    head = add_output(kdjax.make_eagle(model))
    folder = write_folder(tmp_path / "head", model, head)
    change(folder, "layers.sliding_window", 512)
    with pytest.raises(UserError, match="found sliding_window=512; expected None, of a head that"):
        kdjax.load_head(folder, model)
    change(folder, "layers.layer_types", ["full_attention"])
    change(folder, "layers.use_sliding_window", False)
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    change(folder, "rope_parameters", sections)  # of a target whose positions have three axes
    assert kdjax.load_head(folder, model).functions.shape.taps == head.functions.shape.taps


def test_parts_that_kdjax_does_not_compute_are_refused(model, tmp_path):
    made = kdjax.make_head(model, layers=2, slots=DRAFTS, rank=4, taps=(0, 2))
    gate = {"markov_head.gate_proj.weight": np.zeros((4, 4), np.float32)}
    folder = write_folder(tmp_path / "head", model, made, **gate)
    with pytest.raises(UserError, match=r"found a tensor markov_head.gate_proj.weight; expected"):
        kdjax.load_head(folder, model)
    for name, value in (
        ("markov_head_type", "gated"),
        ("confidence_head_with_markov", False),
    ):
        folder = write_folder(tmp_path / name, model, made)
        change(folder, name, value)
        with pytest.raises(UserError, match=f"found {name}={value!r}; expected "):
            kdjax.load_head(folder, model)
