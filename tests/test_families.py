"""Families with arithmetic of their own: every form, generation, training, and llama.cpp's logits.

Parity with Transformers is in test_models.py (goldens) and test_parity.py (random configs).
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exporting import (
    ask_llama_cpp,
    assert_same,
    load,
    logits_of,
    needs_llama_cpp,
    short,
    write_small_tokenizer,
)
from quick import cases

import kdjax
from kdjax.commands.export import read_model
from kdjax.errors import UserError
from kdjax.export import export_apr, export_gguf, export_hf, formats
from kdjax.export.headers import hf_config
from kdjax.formats import open_table
from kdjax.formats.gguf import write_gguf
from kdjax.formats.recipes import RECIPES, tensor_type
from kdjax.models.adapters import choose_lora
from kdjax.models.arch import Layer
from kdjax.models.checkpoint import cut_layers, open_checkpoint
from kdjax.models.decoder import Compute, functional
from kdjax.models.ropes import RopeScaling
from kdjax.models.schema import config_entries, gguf_entries, own_entries, spec_from_table
from scripts.bench.synthetic import QWEN35_SHAPES, write_random_gguf

GOLDENS = Path(__file__).parent / "goldens"
CASES = ["olmo3", "smollm3", "ministral3", "phi3_long", "granite", "minicpm", "olmo2", "phi3"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.gguf"))


def golden(case, tokenizer):
    """The golden's model, with a tokenizer to export."""
    return kdjax.load(GOLDENS / case, dtype="float32", tokenizer=tokenizer)


def as_gguf(case, tokenizer):
    """The same without the windows of Phi-3, which llama.cpp does not compute.

    Names that end in _llama3 or _stretched are of goldens with that scaling, or longrope.
    """
    name, _, scaled = case.rpartition("_")
    name = name if scaled in ("llama3", "stretched") else case
    model = golden("phi3_long" if name == "phi3_short" else name, tokenizer)
    rope = model.spec.rope
    if name != case:
        half = model.spec.head_dim // 2
        scaling = RopeScaling("llama3", factor=8.0, original_positions=64)
        if scaled == "stretched":
            near, far = tuple(1 + i / 8 for i in range(half)), tuple(2.0 + i for i in range(half))
            scaling = RopeScaling(
                "longrope", original_positions=16, divisors=near, long_divisors=far
            )
        rope = dataclasses.replace(rope, scaling=scaling)
        spec = dataclasses.replace(model.spec, layers=(Layer(rope),) * model.spec.num_layers)
        return model.replace(spec=spec, functions=functional(spec, Compute())[0])
    if not case.startswith("phi3"):
        return model
    if case == "phi3_short":  # llama.cpp's context, by which it chooses, is no less than 256
        scaling = dataclasses.replace(rope.scaling, original_positions=512)
        rope = dataclasses.replace(rope, scaling=scaling)
    layers = tuple(layer._replace(window=0, rope=rope) for layer in model.spec.layers)
    spec = dataclasses.replace(model.spec, layers=layers)
    return model.replace(spec=spec, functions=functional(spec, Compute())[0])


def wide(case, tokenizer):
    """A random model of the family whose rows are whole blocks."""
    model = as_gguf(case, tokenizer)
    spec = dataclasses.replace(model.spec, hidden_size=64, head_dim=16)
    functions, shapes = functional(spec, Compute())
    rng = np.random.default_rng(3)

    def draw(path, leaf):
        around = float("norm" in jax.tree_util.keystr(path))
        return (around + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    return model.replace(spec=spec, functions=functions, params=params)


def rounded(spec):
    """The spec as GGUF tells it, whose reals are float32."""

    def of(value):
        if isinstance(value, float):
            return np.float32(value)
        if isinstance(value, tuple):
            return tuple(map(of, value))
        return {k: of(v) for k, v in vars(value).items()} if hasattr(value, "__dict__") else value

    return of(short(spec))


@pytest.mark.slow  # 15 s each
@pytest.mark.parametrize("case", CASES)
def test_a_family_teaches_learns_and_writes(case, tokenizer, tmp_path):
    """Packed is dense; greedy ids are the likeliest of the logits; every parameter is trained."""
    export_gguf(wide(case, tokenizer), tmp_path / "a.gguf", dtype="q8_0")
    packed, dense = (
        kdjax.load(tmp_path / "a.gguf", dtype="float32", weights=form)
        for form in ("packed", "dense")
    )
    prompts = [list(range(7, 19)), [5], list(range(30, 63))]
    answers = packed.generate(prompts, max_tokens=16, stop_ids=(), batch_size=2)
    texts = np.zeros((3, 49), np.int32)  # one program: what stands behind a text does not reach it
    for row, prompt, got in zip(texts, prompts, answers, strict=True):
        row[: len(prompt) + 16] = [*prompt, *got.ids]
    logits = np.asarray(dense.logits(texts))
    np.testing.assert_array_equal(packed.logits(texts), logits)
    for prompt, got, found in zip(prompts, answers, logits, strict=True):
        assert got.ids == found[len(prompt) - 1 :][:16].argmax(-1).tolist()
    student = golden(case, tokenizer)
    step = kdjax.make_step(student, packed, kdjax.KDLoss(), optax.sgd(1.0))
    state = step.init(student.params)
    tokens = np.random.default_rng(0).integers(0, 140, (2, 24)).astype(np.int32)
    state, metrics = step(
        state, packed.params, {"tokens": tokens, "labels": np.roll(tokens, -1, 1)}
    )
    assert np.isfinite(metrics.means()["loss"])
    for path, (new, old) in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: (np.asarray(a), b), state.params, student.params),
        is_leaf=lambda x: isinstance(x, tuple),
    ):
        assert np.isfinite(new).all() and (new != old).any(), path


@pytest.mark.parametrize(
    "case", cases("ministral3", "phi3_long", slow=["olmo3", "smollm3", "phi3"])
)
def test_a_family_comes_back_from_every_export(case, tokenizer, tmp_path):
    """From Hugging Face's files to GGUF, and from there to Hugging Face's and to .apr."""
    model = as_gguf(case, tokenizer)
    export_gguf(model, tmp_path / "a.gguf")
    again = load(tmp_path / "a.gguf")
    export_hf(again, tmp_path / "b")
    export_apr(again, tmp_path / "c.apr")
    for path in ("a.gguf", "b", "c.apr"):
        table, fused = open_table(tmp_path / path), case.startswith("phi3")
        names = "blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"
        assert fused != any(name in table for name in names)
    for found in (again, load(tmp_path / "b"), load(tmp_path / "c.apr")):
        assert rounded(found.spec) == rounded(model.spec)
        assert_same(found.params, model.params)


SCALARS = ("embedding_scale", "residual_scale", "score_scale", "logit_scale")


def test_scalars_of_granite_and_minicpm_come_back_from_every_file(tokenizer, tmp_path):
    """MiniCPM's depend on depth and width: as numbers in GGUF, as what makes them elsewhere."""
    for case, wanted in (
        ("granite", (6, 0.22, 0.4, 8)),
        ("minicpm", (12, 1.4 / 3**0.5, 12**-0.5, 48 / 16)),
    ):
        model = golden(case, tokenizer)
        assert [getattr(model.spec, name) for name in SCALARS] == pytest.approx(wanted)
        for kind, export in {"gguf": export_gguf, "apr": export_apr, "hf": export_hf}.items():
            export(model, tmp_path / f"{case}.{kind}")
            again = load(tmp_path / f"{case}.{kind}")
            assert [getattr(again.spec, name) for name in SCALARS] == pytest.approx(wanted)
            assert_same(again.params, model.params)
        export_hf(load(tmp_path / f"{case}.gguf"), tmp_path / "again", overwrite=True)
        told, first = (
            json.loads((tmp_path / out / "config.json").read_text())
            for out in ("again", f"{case}.hf")
        )
        names = {*own_entries(model.spec), "model_type", "architectures", "rms_norm_eps"}
        assert {k: told.get(k) for k in names} == {k: first.get(k) for k in names}
        header = open_table(tmp_path / f"{case}.gguf").metadata
        keys = ("embedding_scale", "residual_scale", "logit_scale")
        assert [header[f"{case}.{key}"] for key in keys] == pytest.approx(
            [wanted[i] for i in (0, 1, 3)]
        )


def test_a_minicpm_of_fewer_layers_keeps_its_scale(tokenizer, tmp_path):
    """config.json tells it by the number of layers."""
    source = open_checkpoint(GOLDENS / "minicpm", tokenizer=tokenizer)
    cut = cut_layers(source, (0, 2))
    config = hf_config(cut.spec, cut.header, "F32", {})
    assert (config["num_hidden_layers"], config["dim_model_base"]) == (2, 16)
    assert config["scale_depth"] == pytest.approx(1.4 * (2 / 3) ** 0.5)


def test_older_minicpm_files_have_the_published_scalars(tokenizer, tmp_path):
    export_gguf(golden("minicpm", tokenizer), tmp_path / "a.gguf")
    table = open_table(tmp_path / "a.gguf")
    scales = ("embedding_scale", "residual_scale", "logit_scale")
    table.metadata = {k: v for k, v in table.metadata.items() if not k.endswith(scales)}
    spec = spec_from_table(table)
    assert [getattr(spec, name) for name in SCALARS] == pytest.approx(
        [12, 1.4 / 3**0.5, 12**-0.5, 48 / 256]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.scaling.finetuned": False}, "rope.scaling.finetuned = false; expected true"),
        ({"logit_scale": None}, "the GGUF header has no granite.logit_scale"),
        ({"residual_scale": "0.2"}, "granite.residual_scale = '0.2'; expected a number"),
        ({"expert_count": 8}, "expert_count=8: expected 0"),
    ],
)
def test_a_granite_header_that_asks_for_more_is_refused(changes, message, tokenizer, tmp_path):
    export_gguf(golden("granite", tokenizer), tmp_path / "a.gguf")
    table = open_table(tmp_path / "a.gguf")
    changed = dict(table.metadata) | {f"granite.{key}": value for key, value in changes.items()}
    table.metadata = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(UserError, match=message):
        spec_from_table(table)


def test_code_beside_a_minicpm_is_what_is_computed(tokenizer):
    source = open_checkpoint(GOLDENS / "minicpm", tokenizer=tokenizer)
    source.table.metadata |= {"auto_map": {"AutoModel": "modeling_minicpm.MiniCPMModel"}}
    assert spec_from_table(source.table) == source.spec


@pytest.mark.parametrize("there", [True, False])
def test_code_that_a_folder_names_is_written_beside_it_or_not_named(there, tokenizer, tmp_path):
    source = shutil.copytree(GOLDENS / "minicpm", tmp_path / "source")
    path = source / "config.json"
    names = {"AutoConfig": "configuration_minicpm.C", "AutoTokenizer": [None, "far/repo--t.T"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": names}))
    if there:
        (source / "configuration_minicpm.py").write_text("x = 1")
    kdjax.export_hf(kdjax.load(source, tokenizer=tokenizer, dtype="float32"), tmp_path / "out")
    assert (tmp_path / "out" / "configuration_minicpm.py").is_file() == there
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.get("auto_map") == (names if there else None)


@pytest.mark.parametrize("case", cases("minicpm_stretched", slow=["granite_stretched"]))
def test_two_sets_of_divisors_come_back_from_every_export(case, tokenizer, tmp_path):
    """GGUF keeps them as tensors; config.json beside the length, which only Phi-3 has apart."""
    model = as_gguf(case, tokenizer)
    export_gguf(model, tmp_path / "a.gguf")
    again = load(tmp_path / "a.gguf")
    export_hf(again, tmp_path / "b")
    rope = json.loads((tmp_path / "b" / "config.json").read_text())["rope_scaling"]
    assert rope["rope_type"] == "longrope" and rope["original_max_position_embeddings"] == 16
    for found in (again, load(tmp_path / "b")):
        assert found.spec.layers == model.spec.layers
        np.testing.assert_allclose(logits_of(found), logits_of(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["qwen2_tied", "qwen3", "smollm3", "olmo2"])
@pytest.mark.parametrize("scaled", ["llama3", "stretched"])
def test_divisors_that_llama_cpp_does_not_read_are_refused(case, scaled, tokenizer):
    """It opens no such file: it counts one tensor more than it knows."""
    kind = {"llama3": "llama3", "stretched": "longrope"}[scaled]
    with pytest.raises(UserError, match=f"model with {kind}; expected another rope scaling"):
        gguf_entries(as_gguf(f"{case}_{scaled}", tokenizer).spec)


@pytest.mark.parametrize(
    ("case", "key", "kept"),
    cases(
        ("olmo3", "olmo2.attention.sliding_window_pattern", (0, 1, 2)),
        slow=[("tiny-delta-teacher", "qwen35.attention.recurrent_layers", (0, 1, 2))],
    ),
)
def test_a_flag_a_layer_is_cut_with_its_layers(case, key, kept, tokenizer, tmp_path):
    """Published files have it; of a whole model it is written as it was."""
    if case in QWEN35_SHAPES:
        write_random_gguf(tmp_path / "a.gguf", QWEN35_SHAPES[case])
    else:
        export_gguf(golden(case, tokenizer), tmp_path / "a.gguf")
    table = open_table(tmp_path / "a.gguf")
    spec = spec_from_table(table)
    flags = [layer.window > 0 or layer.delta for layer in spec.layers]
    rows = [(n, table.info(n).dtype, table.info(n).shape, table.raw(n)) for n in table]
    write_gguf(tmp_path / "b.gguf", dict(table.metadata) | {key: flags}, rows)
    export_gguf(read_model(open_checkpoint(tmp_path / "b.gguf")), tmp_path / "whole.gguf")
    assert list(open_table(tmp_path / "whole.gguf").metadata[key]) == flags
    cut = read_model(cut_layers(open_checkpoint(tmp_path / "b.gguf"), kept))
    export_gguf(cut, tmp_path / "cut.gguf")
    assert list(open_table(tmp_path / "cut.gguf").metadata[key]) == [flags[i] for i in kept]
    write_gguf(tmp_path / "c.gguf", dict(table.metadata) | {key: flags[:-1]}, rows)
    with pytest.raises(
        UserError, match=f"found {len(flags) - 1} values of {key}; expected one for each"
    ):
        open_checkpoint(tmp_path / "c.gguf")


def test_an_olmo_is_known_by_its_window(tokenizer, tmp_path):
    for case, family in (("olmo2", "olmo2"), ("olmo3", "olmo3")):
        export_gguf(golden(case, tokenizer), tmp_path / "a.gguf", overwrite=True)
        assert open_table(tmp_path / "a.gguf").metadata["general.architecture"] == "olmo2"
        assert open_checkpoint(tmp_path / "a.gguf").spec.family == family


def test_the_factor_that_converters_write_beside_yarn_changes_nothing(tokenizer, tmp_path):
    """Published files of OLMo 3 have it; llama.cpp computes yarn's own in its place."""
    export_gguf(golden("olmo3", tokenizer), tmp_path / "a.gguf")
    table = open_table(tmp_path / "a.gguf")
    spec, key = spec_from_table(table), "olmo2.rope.scaling.yarn_attn_factor"
    table.metadata = dict(table.metadata) | {key: 1.3}
    assert spec_from_table(table) == spec
    table.metadata = table.metadata | {"olmo2.rope.scaling.type": "linear"}
    with pytest.raises(UserError, match=r"yarn_attn_factor = 1\.3 without yarn; expected 1"):
        spec_from_table(table)


def test_what_llama_cpp_does_not_compute_of_an_olmo_is_refused(tokenizer, tmp_path):
    model = golden("olmo3", tokenizer)
    layers = model.spec.layers
    other = dataclasses.replace(layers[0].rope, theta=7e3)
    near = tuple(x._replace(rope=other) if x.window else x for x in layers)
    biased = dataclasses.replace(model.spec, qkv_bias=True, o_bias=True)
    for spec, message in (
        (dataclasses.replace(model.spec, layers=near), "rope_theta 7000 in layers with a window"),
        (dataclasses.replace(model.spec, layers=layers[1:]), "other layers than all but every 4th"),
        (biased, r"olmo3 model with attention_bias \(on q, k, v, o\); expected none"),
    ):
        with pytest.raises(UserError, match=message):
            gguf_entries(spec)
    # The two thetas come back from a folder, by the entry that tells them apart.
    apart = model.replace(spec=dataclasses.replace(model.spec, layers=near))
    source = open_checkpoint(GOLDENS / "olmo3", tokenizer=tokenizer)
    config = config_entries(apart.spec, {})
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 7e3
    table = source.table
    table.metadata = config | {"model_type": "olmo3"}
    assert spec_from_table(table).layers == near


@pytest.mark.slow
def test_longrope_turns_by_the_longest_text(tokenizer):
    """Transformers does so: a text beyond the original 16 positions turns otherwise from its start.

    What is generated turns by its prompt and the most that may follow.
    """
    model = golden("phi3_long", tokenizer)
    ids = np.random.default_rng(1).integers(0, 140, (1, 24))
    short, long = (np.asarray(model.logits(ids[:, :count]))[0, :12] for count in (16, 17))
    assert np.abs(short - long).max() > 0.01
    np.testing.assert_allclose(np.asarray(model.logits(ids))[0, :12], long, atol=1e-5)
    for most, whole in ((8, 13), (20, 24)):
        (got,) = model.generate([ids[0, :5].tolist()], max_tokens=most, stop_ids=())
        text = np.concatenate([ids[0, :5], got.ids, np.zeros(whole, int)])[: max(whole, 5 + most)]
        logits = np.asarray(model.logits(text[None]))[0]
        assert got.ids == logits[4 : 4 + most].argmax(-1).tolist()


def test_longrope_turns_a_document_by_its_own_length(tokenizer):
    """Packed beside one above the original 16 positions, a short one as by itself."""
    model = golden("phi3_long", tokenizer)
    lengths = (10, 17, 5, 16)
    ids = np.random.default_rng(2).integers(0, 140, (2, sum(lengths))).astype(np.int32)
    at = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    segments = np.repeat(np.arange(1, 5, dtype=np.int32), lengths)
    where = [jnp.asarray(np.broadcast_to(x, ids.shape)) for x in (ids, segments, at)]
    alone = [model.logits(part) for part in np.split(ids, np.cumsum(lengths)[:-1], axis=1)]
    head = model.functions.head(model.params)
    for hidden in (
        model.functions.hidden(model.params, *where),
        model.functions.hidden_in_parts(model.params, *where, 2),
    ):
        logits = np.asarray(hidden @ head.T)[..., : alone[0].shape[-1]]
        np.testing.assert_allclose(logits, np.concatenate(alone, 1), atol=1e-4)


def test_what_an_export_cannot_say_of_a_phi_is_refused(tokenizer, tmp_path):
    near = golden("phi3", tokenizer)
    with pytest.raises(UserError, match="phi3 model with a window of 7 positions; expected none"):
        export_gguf(near, tmp_path / "a.gguf")
    export_apr(near, tmp_path / "a.apr")
    assert load(tmp_path / "a.apr").spec == near.spec
    long = golden("phi3_long", tokenizer)
    with pytest.raises(UserError, match=r"qwen2 model with longrope.*Export with export_hf"):
        gguf_entries(dataclasses.replace(long.spec, family="qwen2"))
    with pytest.raises(UserError, match="phi3 model to adapt, whose files keep q, k and v as one"):
        choose_lora(long.spec)
    parts = [("a", "Q4_K", (2, 256), np.zeros(1)), ("b", "Q6_K", (2, 256), np.zeros(1))]
    with pytest.raises(UserError, match="Q4_K, Q6_K in the matrices that make up w; expected one"):
        formats._join("w", (4,), parts)


def test_a_matrix_of_queries_keys_and_values_has_the_type_of_llama_quantize():
    """`llama_tensor_get_type` takes it for values: of 32 layers, worked out by hand.

    That of Phi-3, whose tree has its parts, and of Qwen3.5's delta layers.
    """
    sizes = dict(layers=32, groups=3, tied=True)
    fused = [(("blocks", "attn", part, "weight"), sizes | dict(fused=True)) for part in "qkv"]
    delta = ("deltas", "delta", "qkv", "weight"), sizes
    for recipe, wanted in (
        ("q4_k_m", ["Q6_K", "Q4_K", "Q6_K", "Q6_K"]),
        ("q3_k_m", ["Q5_K", "Q4_K", "Q4_K", "Q4_K"]),
        ("q2_k", ["Q3_K"] * 4),
        ("iq4_xs", ["IQ4_XS"] * 4),
        ("q6_k", ["Q6_K"] * 4),
    ):
        for path, model in [*fused, delta]:
            found = [tensor_type(RECIPES[recipe], path, i, 3072, **model) for i in (0, 4, 6, 31)]
            assert found == wanted, (recipe, path)
    others = [("delta", part) for part in ("gate", "alpha", "beta", "out")]
    for path in others:  # of no category there
        found = tensor_type(RECIPES["q4_k_m"], ("deltas", *path, "weight"), 0, 3072, **sizes)
        assert found == "Q4_K"
    sizes["experts"] = 256  # those of a shared expert are an MLP's, and no stack
    for recipe, path, wanted in (
        ("q4_k_m", ("mlp", "shared", "down"), "Q6_K"),
        ("q4_k_m", ("mlp", "shared", "up"), "Q4_K"),
        ("mxfp4", ("mlp", "shared", "down"), "Q8_0"),
        ("mxfp4", ("delta", "gate"), "Q8_0"),
        ("mxfp4", ("mlp", "down"), "MXFP4"),
        ("mxfp4", ("mlp", "shared_gate"), "F32"),
    ):
        assert tensor_type(RECIPES[recipe], ("deltas", *path), 0, 3072, **sizes) == wanted, path


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["olmo2", "olmo3", "smollm3", "ministral3", "phi3", "phi3_long"])
def test_transformers_computes_the_same_of_a_written_folder(case, tokenizer, tmp_path):
    """By way of GGUF, from which every entry of config.json is written anew."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    model = as_gguf(case, tokenizer)
    export_gguf(model, tmp_path / "a.gguf")
    export_hf(kdjax.load(tmp_path / "a.gguf", dtype="float32"), tmp_path / "b")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, 140, (1, 40))
    for count in (12, 40):
        ours = np.asarray(model.logits(ids[:, :count]))
        with torch.no_grad():
            wanted = theirs.eval()(torch.from_numpy(ids[:, :count])).logits.numpy()
        np.testing.assert_allclose(ours, wanted[..., : ours.shape[-1]], atol=1e-4)


@needs_llama_cpp
@pytest.mark.parity
@pytest.mark.parametrize(
    "case",
    [
        *("olmo2", "olmo3", "smollm3", "ministral3", "phi3", "phi3_short", "phi3_long"),
        *("granite", "minicpm", "granite_llama3", "minicpm_llama3", "minicpm_stretched"),
        *("llama_llama3", "llama_stretched", "granite_stretched"),
    ],
)
def test_llama_cpp_computes_the_same_logits(case, tokenizer, tmp_path):
    model, rng = as_gguf(case, tokenizer), np.random.default_rng(0)
    export_gguf(model, tmp_path / "a.gguf")
    lengths = (24, 60) if case.endswith(("_long", "_stretched")) else (3, 24, 60)
    prompts = [rng.integers(0, 138, n).tolist() for n in lengths]
    answers = ask_llama_cpp(tmp_path / "a.gguf", prompts)
    for prompt, theirs in zip(prompts, answers, strict=True):
        ours = np.asarray(model.logits([prompt]), np.float64)[0, -1]
        difference = [ours[i] - theirs[i] for i in range(len(ours))]
        # Equal but for a constant; Granite's are divided by 8.
        assert np.ptp(ours) > 0.5 and np.ptp(difference) < 1e-5 * np.ptp(ours)
