"""The decoder against Transformers' own outputs, committed as goldens; shapes, NaNs, attention."""

import dataclasses
import functools
import importlib.util
import json
import math
import re
from pathlib import Path
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import transformers
from flax import nnx
from quick import cases
from transformers.modeling_rope_utils import RopeParameters

from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.models import attention, fields, weights
from kdjax.models.arch import ACTIVATIONS, Layer
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.decode_weights import join
from kdjax.models.decoder import Compute, Decoder, functional, initialise
from kdjax.models.families import FAMILIES
from kdjax.models.loading import count_parameters, load_params
from kdjax.models.model import load_model
from kdjax.models.ropes import rope_frequencies
from kdjax.models.schema import known_entries, spec_from_table
from scripts.bench.synthetic import GEMMA3_SHAPES, write_random_gguf
from scripts.checks import make_goldens

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(p.parent.name for p in GOLDENS.glob("*/expected.npz"))


@functools.cache
def load(folder, compute=None):
    checkpoint = open_checkpoint(folder)
    table, spec = checkpoint.table, checkpoint.spec
    apply, abstract = functional(spec, compute or Compute())
    return apply, load_params(table, spec, abstract, sharding.make_local_mesh(1))


def rows(tokens):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return tokens, jnp.ones_like(tokens), positions


def relative(got, want):
    return np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)


@pytest.mark.parametrize(
    "case", cases(*(case for case in CASES if case != "qwen3_5"), slow=["qwen3_5"])
)
def test_every_layer_and_the_logits_equal_transformers(case):
    expected = np.load(GOLDENS / case / "expected.npz")
    apply, params = load(GOLDENS / case)
    model = nnx.merge(apply.graph, params)
    hidden, layers = jax.jit(
        lambda p, *where: nnx.merge(apply.graph, p).hidden_and_layers(*where, keep_layers=True)
    )(params, *rows(expected["tokens"]))
    for i, want in enumerate(expected["layers"]):
        assert relative(layers[i], want) < 1e-5, f"layer {i}"
    logits = model.unembed(hidden)
    chex.assert_shape(logits, expected["logits"].shape)
    assert relative(logits, expected["logits"]) < 1e-5
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-4, atol=1e-4)


def test_goldens_cover_every_family_and_rope_kind():
    assert set(CASES) == set(make_goldens.CASES)


@pytest.mark.parametrize("remat", cases("full", slow=["dots"]))
def test_remat_changes_memory_and_nothing_else(remat):
    tokens = np.load(GOLDENS / "qwen2_tied" / "expected.npz")["tokens"]

    def gradient(compute):
        apply, params = load(GOLDENS / "qwen2_tied", compute)
        loss = jax.jit(jax.grad(lambda p: jnp.sum(apply.hidden(p, *rows(tokens)) ** 2)))
        return loss(params)

    chex.assert_trees_all_close(
        gradient(Compute(remat=remat)), gradient(Compute()), rtol=1e-4, atol=1e-3
    )


def test_bf16_follows_float32():
    expected = np.load(GOLDENS / "qwen2_tied" / "expected.npz")
    bf16 = Compute(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    apply, params = load(GOLDENS / "qwen2_tied", bf16)
    chex.assert_tree_all_finite(params)
    hidden = jax.jit(apply.hidden)(params, *rows(expected["tokens"]))
    assert hidden.dtype == jnp.bfloat16
    logits = nnx.merge(apply.graph, params).unembed(hidden)
    assert logits.dtype == jnp.float32
    assert relative(logits, expected["logits"]) < 0.03


@pytest.mark.parametrize("devices", [1, 2])
def test_products_of_cast_weights_are_joined(devices):
    """One product forwards and two backwards, equal to those apart; on one device only."""
    rng = np.random.default_rng(11)
    x = jnp.asarray(rng.normal(0, 1, (6, 32)), jnp.bfloat16)
    masters = [jnp.asarray(rng.normal(0, 0.1, (n, 32)), jnp.float32) for n in (24, 8, 8)]
    placement = Placement(sharding.make_mesh(1, 1, devices, jax.devices()[:devices]))

    def joined(x, masters):
        return weights.project_all(x, masters, placement)

    def apart(x, masters):
        return [weights.project(x, w) for w in masters]

    def total(function):
        return lambda *args: sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in function(*args))

    for a, b in zip(joined(x, masters), apart(x, masters), strict=True):
        np.testing.assert_array_equal(a, b)
    first, *rest = weights.project_all(x, masters, placement, whole=True)
    assert first.shape[1] == (40 if devices == 1 else 24)
    for a, b in zip((first[:, :24], *rest), apart(x, masters), strict=True):
        np.testing.assert_array_equal(a, b)
    found, wanted = (jax.grad(total(f), argnums=(0, 1))(x, masters) for f in (joined, apart))
    # x's gradients of three products are rounded to bf16 before they are added, joined only after.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=0.03)
    program = str(jax.make_jaxpr(jax.grad(total(joined), argnums=(0, 1)))(x, masters))
    assert program.count("dot_general[") == (3 if devices == 1 else 9)
    same = [w.astype(x.dtype) for w in masters]  # nothing to cast: joining would copy
    assert str(jax.make_jaxpr(joined)(x, same)).count("dot_general[") == 3


def test_documents_of_a_row_do_not_see_each_other():
    """Two documents packed in one row give what each gives alone."""
    apply, params = load(GOLDENS / "qwen3")
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 160, (1, n)).astype(np.int32) for n in (9, 13))
    packed = np.concatenate([first, second, np.zeros((1, 2), np.int32)], 1)
    segments = jnp.asarray([[1] * 9 + [2] * 13 + [0] * 2], jnp.int32)
    positions = jnp.asarray([[*range(9), *range(13), 0, 1]], jnp.int32)
    hidden = jax.jit(apply.hidden)
    together = hidden(params, jnp.asarray(packed), segments, positions)
    for alone, part in ((first, slice(0, 9)), (second, slice(9, 22))):
        np.testing.assert_allclose(
            together[:, part], hidden(params, *rows(alone)), rtol=1e-4, atol=1e-4
        )
    chex.assert_tree_all_finite(together)


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 16, 21])
def test_blockwise_attention_equals_one_block(monkeypatch, length):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, length, heads, 8))
        for key, heads in zip(keys, (4, 2, 2), strict=True)
    )
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(1, 4, (2, length)), 1))

    def value_and_gradient():
        def f(q, k, v):
            return jnp.sum(jnp.sin(attention.attend(q, k, v, segments)))

        return jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v)

    whole = value_and_gradient()
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    chex.assert_trees_all_close(value_and_gradient(), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("local", [None, True, False])
def test_a_window_ends_what_a_query_sees(monkeypatch, local):
    """Against the definition in NumPy, over several blocks of queries, and from a cache."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    rng, length, window = np.random.default_rng(3), 13, 4
    q, k, v = (rng.normal(0, 1, (2, length, 2, 8)).astype(np.float32) for _ in range(3))
    segments = np.asarray([[1] * 13, [1] * 6 + [2] * 7], np.int32)
    at = np.arange(length)
    behind = at[:, None] - at[None]
    near = (behind >= 0) & (behind < (length if local is False else window))
    seen = near[None] & (segments[:, :, None] == segments[:, None])
    scores = np.where(seen[:, None], np.einsum("bthd,bshd->bhts", q, k) * 0.3, -np.inf)
    wanted = np.einsum("bhts,bshd->bthd", scipy.special.softmax(scores, -1), v)
    how = dict(scale=0.3, window=window)
    flag = None if local is None else jnp.asarray(local)
    run = jax.jit(lambda *x: attention.attend(*x, **how))
    np.testing.assert_allclose(run(q, k, v, segments, flag), wanted, atol=1e-5)
    cache = (jnp.pad(x, ((0, 0), (0, 3), (0, 0), (0, 0))).swapaxes(1, 2) for x in (k, v))
    last = jnp.full((2, 1), length - 1, jnp.int32)
    got = attention.attend_cached(jnp.asarray(q[:, -1:]), *cache, last, flag, **how)
    np.testing.assert_allclose(got[0, 0], wanted[0, -1], atol=1e-5)


@pytest.mark.parametrize(
    ("case", "data", "fsdp", "tensor"),
    cases(("gemma3", 1, 1, 2), slow=[("gemma3", 2, 1, 1), ("gemma3", 1, 2, 1), ("olmo3", 1, 1, 2)]),
)
def test_layers_of_two_kinds_are_the_same_on_several_devices(case, data, fsdp, tensor):
    """OLMo 3 also takes one norm over the heads of both devices."""
    expected = np.load(GOLDENS / case / "expected.npz")
    placement = Placement.on(sharding.make_mesh(data, fsdp, tensor, jax.devices()[:2]))
    checkpoint = open_checkpoint(GOLDENS / case)
    model = load_model(checkpoint, placement=placement, dtype="float32")
    assert relative(model.logits(expected["tokens"]), expected["logits"]) < 1e-5


def test_packed_layout_counts_padding_as_a_segment():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0], [1, 2, 2, 3, 3, 3]], jnp.int32)
    lengths, starts = attention.packed_layout(segments, 3)
    np.testing.assert_array_equal(lengths, [[3, 2, -1, 1], [1, 2, 3, -1]])
    np.testing.assert_array_equal(starts, [[0, 3, -1, 5, -1], [0, 1, 3, -1, -1]])


def test_parameters_are_as_many_as_the_file_holds():
    for case in CASES:
        table = open_table(GOLDENS / case)
        held = sum(math.prod(table.info(name).shape) for name in table)
        assert count_parameters(spec_from_table(table)) == held, case


@pytest.mark.slow
def test_random_initialisation_has_the_shapes_of_loading():
    spec = spec_from_table(open_table(GOLDENS / "qwen3"))
    chex.assert_trees_all_equal_shapes_and_dtypes(
        initialise(spec, Compute(), 0), functional(spec, Compute())[1]
    )
    model = Decoder(spec, Compute(), nnx.Rngs(0))
    weight = np.asarray(model.blocks.mlp.gate.weight[...])
    assert abs(weight.std() - 0.02) < 0.002
    assert not np.allclose(weight[0], weight[1])  # every layer its own draw


def test_every_activation_equals_transformers():
    goldens = json.loads((GOLDENS / "activations.json").read_text())
    assert set(goldens) == set(ACTIVATIONS)
    for name, wanted in goldens.items():
        got = ACTIVATIONS[name](jnp.asarray(make_goldens.POINTS))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_activation_that_the_float8_kernel_lacks_is_computed_without_it():
    """The kernel gates by silu; on a CPU it would not even run."""
    rng = np.random.default_rng(0)
    draw = [jnp.asarray(rng.normal(0, 0.1, (64, 32)), jnp.float32) for _ in range(2)]
    scaled = [weights.Scaled(*weights.quantize_rows(w), kernels=True) for w in draw]
    x = jnp.asarray(rng.normal(0, 1, (4, 32)), jnp.float32)
    rounded = weights.Float8Rows(*weights.quantize_rows(x), x.dtype)
    got = weights.gate_rows(rounded, *scaled, ACTIVATIONS["gelu"])
    gate, up = (np.asarray(x @ w.T) for w in draw)
    wanted = gate * scipy.special.ndtr(gate) * up
    assert relative(got, wanted) < 0.1


def test_every_rope_equals_transformers():
    """Factors, truncation, mscale and others, whose effect on logits is 0.2 to 0.85."""
    goldens = json.loads((GOLDENS / "ropes.json").read_text())
    assert len(goldens) == 2 * len(make_goldens.ROPES)
    for golden in goldens:
        table = headed(**golden["config"])
        spec = spec_from_table(table)
        inverse, factor = rope_frequencies(spec.rope, spec.head_dim)
        np.testing.assert_allclose(inverse, golden["inverse"], rtol=1e-5, err_msg=str(golden))
        assert factor == pytest.approx(golden["factor"], rel=1e-6), golden


def headed(**config):
    """A checkpoint with this config.json."""
    table = open_table(GOLDENS / "qwen2_tied")
    table.metadata = config  # type: ignore[assignment]
    return table


QWEN2 = json.loads((GOLDENS / "qwen2_tied" / "config.json").read_text())
LLAMA = json.loads((GOLDENS / "llama" / "config.json").read_text())
LONGROPE = {"model_type": "phi3", "head_dim": 16, "original_max_position_embeddings": 64}
LONGROPE |= {"rope_scaling": {"rope_type": "longrope"}}
LONGROPE["rope_scaling"] |= {"short_factor": [1.0], "long_factor": [1.0] * 8}


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"minicpm"}))  # no class there
def test_every_field_that_transformers_has_is_known(name):
    """Its config's own fields and all that its modelling reads; a new one fails here."""
    config = transformers.AutoConfig.for_model(name)
    ours, place = known_entries(FAMILIES[name], gguf=False), name.removesuffix("_text")
    known = ours | fields.WITHOUT_EFFECT | set(fields.NEUTRAL)
    public = {name for name in vars(config) if not name.startswith("_")}
    assert set(config.to_dict()) | public <= known
    assert set(RopeParameters.__annotations__) <= (
        fields.ROPE_COMPUTED | fields.ROPE_WITHOUT_EFFECT | set(fields.ROPE_NEUTRAL)
    )
    spec_from_table(headed(**config.to_dict()))
    package = importlib.util.find_spec(f"transformers.models.{place}")
    source = Path(package.origin).with_name(f"modeling_{place}.py").read_text()
    read = set(re.findall(r"\bconfig\.(\w+)", source)) & known
    # Padding starts at zero, dropout trains, kernels compute the same; windows need their switch.
    harmless = {"pad_token_id", "attention_dropout", "_attn_implementation", "sliding_window"}
    harmless |= {"use_cache", "resid_pdrop"}  # of generation, and of training
    harmless |= {"output_router_logits", "router_aux_loss_coef", "initializer_range"}  # of training
    assert read & {"hidden_act", "hidden_activation"}
    assert not (read & fields.WITHOUT_EFFECT) - harmless


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "xielu"}, "hidden_act 'xielu'; expected one of silu, swish, gelu"),
        ({"hidden_act": ["silu"]}, r"hidden_act \"\['silu'\]\""),
        ({"mlp_bias": True}, "mlp_bias=True: expected False"),
        ({"use_sliding_window": True}, "use_sliding_window=True: expected False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "expected full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: expected 1.0"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map=.*: expected None"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0: unknown\n.*can be deleted from config.json"),
        ({"is_causal": False}, "is_causal=False: expected True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "curve": 1}}, "rotary curve=1"),
        ({"rope_scaling": {"partial_rotary_factor": 0.25}}, "rotary partial_rotary_factor=0.25"),
        ({"rope_scaling": {"rope_type": "linear"}}, "found no 'factor'"),
        ({"rope_scaling": "yarn"}, "found rotary parameters 'yarn'; expected an object"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not one of"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "found 'None' as 'short_factor'"),
        ({"hidden_size": "wide"}, "found 'wide' as 'hidden_size'; expected a number above 0"),
        ({"rms_norm_eps": 0}, "found '0' as 'rms_norm_eps'"),
    ],
)
def test_a_field_that_is_not_computed_is_refused(changes, message):
    spec_from_table(headed(**QWEN2))
    with pytest.raises(UserError, match=message):
        spec_from_table(headed(**QWEN2 | changes))


GEMMA3 = json.loads((GOLDENS / "gemma3" / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: expected None"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: expected None"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"layer_types": ["full_attention"]}, "layer_types .*; expected sliding_attention or"),
        ({"layer_types": ["chunked_attention"] * 4}, "found layer_types"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "rope_type 'yarn' for sliding_attention; expected default",
        ),
        ({"hidden_activation": "glu"}, "found hidden_activation 'glu'"),
        ({"sliding_window": "wide"}, "found 'wide' as 'sliding_window'"),
    ],
)
def test_a_field_of_local_layers_that_is_not_computed_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        spec_from_table(headed(**GEMMA3 | changes))


SMOLLM3 = json.loads((GOLDENS / "smollm3" / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers \[1, 0\]; expected 1, or 0 for a layer"),
        ({"no_rope_layers": [1, 0, 2, 1, 1]}, "found no_rope_layers"),
        ({"no_rope_layers": [[1]] * 5}, "found no_rope_layers"),
        ({"no_rope_layers": "11101"}, "found no_rope_layers"),
        ({"no_rope_layers": None, "no_rope_layer_interval": "4"}, "found '4' as 'no_rope_layer_i"),
        ({"use_sliding_window": True}, "use_sliding_window=True: expected False"),
    ],
)
def test_a_field_of_unrotated_layers_that_is_not_computed_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        spec_from_table(headed(**SMOLLM3 | changes))


def test_layers_that_rotate_nothing_may_be_listed_or_counted():
    wanted = (True, True, True, False, True)
    counted = {k: v for k, v in SMOLLM3.items() if k != "no_rope_layers"}
    named = {k: v for k, v in SMOLLM3.items() if k != "no_rope_layer_interval"}
    neither = {k: v for k, v in counted.items() if k in named}
    for config in (counted, named, neither, named | {"no_rope_layers": [1, 1, 1, 0, 1, 1]}):
        assert tuple(x.rope is not None for x in spec_from_table(headed(**config)).layers) == wanted
    pairs = spec_from_table(headed(**counted | {"no_rope_layer_interval": 2}))
    assert [x.rope is None for x in pairs.layers] == [False, True, False, True, False]


def test_both_ways_of_writing_local_ropes_are_one():
    """Published files have the names of Transformers 4; 5 writes a dict a kind of layer."""
    ropes = GEMMA3["rope_parameters"]
    old = {k: v for k, v in GEMMA3.items() if k not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 1e5, "rope_local_base_freq": 1e3, "sliding_window_pattern": 2}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    old.pop("_sliding_window_pattern")
    spec, wanted = (spec_from_table(headed(**config)) for config in (old, GEMMA3))
    assert ropes["sliding_attention"]["rope_theta"] == spec.local_rope_theta == 1e3
    assert spec.windows() == (7, 0, 7, 0) and wanted.windows() == (7, 0, 7, 7)
    layers = (*spec.layers[:3], spec.layers[0])
    assert dataclasses.replace(spec, layers=layers) == wanted


def test_work_of_a_window_counts_the_keys_that_are_seen():
    spec = spec_from_table(headed(**GEMMA3))
    length, window = 24, spec.window
    whole = sum(range(1, length + 1)) - length / 2  # a query's own key counts half
    near = sum(min(i, window) for i in range(1, length + 1)) - window / 2
    all_see = dataclasses.replace(spec, layers=(Layer(spec.rope),) * 4)
    fewer = all_see.forward_flops(length) - spec.forward_flops(length)
    assert fewer == pytest.approx(3 * 4 * 64 * (whole - near) / length)


def test_fields_that_change_nothing_are_accepted():
    nothing = {"some_new_switch": None, "pruned_heads": {}, "use_mrope": False, "temperature": 0.7}
    assert spec_from_table(headed(**QWEN2 | nothing)) == spec_from_table(headed(**QWEN2))


GEMMA = {"model_type": "gemma3_text", "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (GEMMA | {"layer_types": 5}, "layer_types"),
        (GEMMA | {"layer_types": [["a"]] * LLAMA["num_hidden_layers"]}, "layer_types"),
        (GEMMA | {"sliding_window_pattern": "x"}, "layer_types"),
        (GEMMA | {"rope_parameters": {"sliding_attention": "x"}}, "its header"),
        ({"model_type": "qwen3_5_text", "rope_parameters": {"mrope_section": 5}}, "rope_sections"),
        (
            {"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": "x"}},
            "query_growth",
        ),
        ({"rope_theta": 1, "rope_scaling": YARN}, "rotary parameters"),
        (LONGROPE, "rotary parameters"),
        ({"head_dim": 70_000}, "rotary parameters"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "rope_scaling"),
    ],
)
def test_values_of_another_kind_are_refused_by_their_entry(changes, named):
    with pytest.raises(UserError, match=rf"found {named} that cannot be read"):
        spec_from_table(headed(**LLAMA | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": "x"}, "rope_scaling that"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": [1.0, 2.0]}, "rope_scaling that"),
        ({"rope.scaling.yarn_attn_factor": "z"}, "rope_scaling that"),
        ({"general.architecture": np.array([1, 2])}, r"holds a array\(\[1, 2\]\) model"),
    ],
)
def test_values_of_another_kind_in_a_gguf_header_are_refused(models, monkeypatch, changes, named):
    table = open_table(models / "student.gguf")
    said = {k if k.startswith("general") else f"qwen2.{k}": v for k, v in changes.items()}
    monkeypatch.setattr(table, "metadata", dict(table.metadata) | said)
    with pytest.raises(UserError, match=named):
        spec_from_table(table)


def test_a_gguf_factor_means_what_llama_cpp_takes_it_for(models, monkeypatch):
    """0 is 1, and a file without a type is linear (llama-model.cpp)."""
    table = open_table(models / "student.gguf")
    plain = dict(table.metadata)
    for said, factor in (({"type": "linear", "factor": 0.0}, 1.0), ({"factor": 4.0}, 4.0)):
        changed = {f"qwen2.rope.scaling.{name}": value for name, value in said.items()}
        monkeypatch.setattr(table, "metadata", plain | changed)
        scaling = spec_from_table(table).rope.scaling
        assert scaling is not None and (scaling.kind, scaling.factor) == ("linear", factor)


def test_fields_of_published_phis_are_accepted():
    phi = json.loads((GOLDENS / "phi3_long" / "config.json").read_text())
    said = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
    said["auto_map"] = {"AutoConfig": "configuration_phi3.Phi3Config"}
    assert spec_from_table(headed(**phi | said)) == spec_from_table(headed(**phi))
    with pytest.raises(UserError, match="full_attn_mod=2: expected 1"):
        spec_from_table(headed(**phi | {"full_attn_mod": 2}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", 0.5),
        ("rope.dimension_count", 4),
        ("rope.scaling.yarn_ext_factor", 0.0),
        ("attention.causal", False),
        ("attention.sliding_window", 512),
        ("final_logit_softcapping", 30.0),
        ("rope.freq_base_swa", 1e4),
        ("attention.scale", 0.1),
        ("ssm.state_size", 16),
    ],
)
def test_a_gguf_header_that_asks_for_more_is_refused(models, monkeypatch, key, value):
    table = open_table(models / "student.gguf")
    spec_from_table(table)
    family = table.metadata["general.architecture"]
    changed = dict(table.metadata) | {f"{family}.{key}": value}
    monkeypatch.setattr(table, "metadata", changed)
    with pytest.raises(UserError, match=rf"{family}\.{re.escape(key)}={value}: (expected|unknown)"):
        spec_from_table(table)


def test_keys_of_a_gguf_header_that_change_nothing_are_accepted(models, monkeypatch):
    table = open_table(models / "student.gguf")
    spec, family = spec_from_table(table), table.metadata["general.architecture"]
    nothing = {"vision.block_count": 27, "mm.tokens_per_image": 256, "expert_used_count": 0}
    nothing |= {"rope.scaling.finetuned": True, "attention.sliding_window": 0}
    changed = dict(table.metadata) | {f"{family}.{key}": v for key, v in nothing.items()}
    monkeypatch.setattr(table, "metadata", changed | {"gemma3.attention.sliding_window": 9})
    assert spec_from_table(table) == spec


@pytest.mark.parametrize("pattern", [2, [1, 0, 1, 0, 1, 0, 1]])
def test_a_gguf_header_may_say_which_layers_are_local(tmp_path, monkeypatch, pattern):
    write_random_gguf(tmp_path / "g.gguf", GEMMA3_SHAPES["tiny-gemma"])
    table = open_table(tmp_path / "g.gguf")
    assert spec_from_table(table).windows() == (16,) * 5 + (0, 16)
    said = {"gemma3.attention.sliding_window_pattern": pattern, "gemma3.rope.freq_base_swa": 2e4}
    monkeypatch.setattr(table, "metadata", dict(table.metadata) | said)
    spec = spec_from_table(table)
    assert spec.windows() == (16, 0, 16, 0, 16, 0, 16) and spec.local_rope_theta == 2e4


def test_unknown_family_is_named():
    table = open_table(GOLDENS / "llama")
    table.metadata["model_type"] = "mamba"  # type: ignore[index]
    with pytest.raises(UserError, match=r"'mamba'.*qwen2, qwen3, qwen3_moe, llama"):
        spec_from_table(table)


@pytest.mark.parametrize(
    ("rows", "width", "count"), [(1000, 3000, 3), (5, 64, 1), (64, 48, 65), (5, 1280, 1)]
)
def test_products_with_bits_are_those_with_their_numbers(rng, rows, width, count):
    """In parts, of which the last begins earlier; of many rows at once; of float32 made ready."""
    weight = jnp.asarray(rng.normal(size=(rows, width)), jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(count, width)), jnp.bfloat16)
    want = x.astype(jnp.float32) @ weight.astype(jnp.float32).T
    with mock.patch.object(weights, "_WIDENED", 2**18):
        got = weights.project(x, weights.to_bits(weight))
    (wide,) = join([weight.astype(jnp.float32)])
    for y in (got, weights.project(x, wide)):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=2**-8, atol=1e-3)
