"""Models of experts: the router's choices, their sum, packed weights, meshes, what is refused."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.nn import silu
from quick import cases

import kdjax
from kdjax.device import sharding
from kdjax.device.placement import Placement
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.formats.gguf import write_gguf
from kdjax.models import decoder
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.experts import Choice, choose_experts, lay_out, mix_experts, mix_experts_by_tiles
from kdjax.models.loading import count_parameters
from kdjax.models.model import load_model
from kdjax.models.schema import spec_from_table
from kdjax.training.teachers import Packed, RunningTeacher
from scripts.bench.synthetic import SHAPES, write_random_gguf

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("experts") / "tiny.gguf"
    write_random_gguf(path, SHAPES[getattr(request, "param", "tiny-experts")])
    return path


def model(path, weights, mesh=None):
    place = Placement.on(mesh or sharding.make_mesh(1, 1, 1, jax.devices()[:1]))
    return load_model(
        open_checkpoint(path), weights=weights, compute_dtype="float32", placement=place
    )


def logits(teacher, rows=2, length=16):
    tokens = np.random.default_rng(0).integers(0, 300, (rows, length))
    return np.asarray(teacher.logits(jnp.asarray(tokens, jnp.int32)))


@pytest.mark.parametrize("case", cases("qwen3_moe", slow=["qwen3_moe_plain", "qwen3_5_moe"]))
def test_the_router_chooses_as_transformers(case, monkeypatch):
    """The same experts in the same order, in every layer; weights that sum to 1 if normalised."""
    expected, found = np.load(GOLDENS / case / "expected.npz"), []

    def recorded(*args):
        choice = choose_experts(*args)
        jax.debug.callback(lambda *x: found.append(x), *choice, ordered=True)
        return choice

    monkeypatch.setattr(decoder, "choose_experts", recorded)
    loaded = kdjax.load(GOLDENS / case, dtype="float32")
    jax.block_until_ready(loaded.logits(jnp.asarray(expected["tokens"])))
    jax.effects_barrier()
    experts, weights = (np.stack(x) for x in zip(*found, strict=True))
    np.testing.assert_array_equal(experts, expected["experts"])
    sums = weights.sum(-1)
    assert np.allclose(sums, 1, atol=1e-6) == (case != "qwen3_moe_plain")
    assert np.all(sums < 1 + 1e-6)


def test_of_equal_experts_the_lowest_index_comes_first():
    router = jnp.zeros((8, 4)).at[5].set(1.0)
    choice = choose_experts(jnp.ones((3, 4)), router, 4, True)
    np.testing.assert_array_equal(choice.experts, [[5, 0, 1, 2]] * 3)
    assert choice.weights.dtype == jnp.float32
    np.testing.assert_allclose(
        choice.weights[:, 1:], np.asarray(choice.weights)[:, 1:2] * np.ones((1, 3))
    )


def test_the_router_is_float32_where_the_model_is_not():
    """bf16 products would not tell these two apart."""
    x = jnp.ones((1, 256), jnp.bfloat16)
    router = jnp.ones((2, 256), jnp.float32).at[1].add(1e-4)
    assert choose_experts(x, router, 1, True).experts[0, 0] == 1


@pytest.mark.parametrize("rows", [3, 11])  # as few as are gathered, and more
def test_the_sum_is_of_each_rows_own_experts(rows):
    rng = np.random.default_rng(rows)
    x = rng.normal(0, 1, (rows, 12)).astype(np.float32)
    gate, up = rng.normal(0, 0.3, (2, 6, 20, 12)).astype(np.float32)
    down = rng.normal(0, 0.3, (6, 12, 20)).astype(np.float32)
    experts = np.stack([rng.permutation(6)[:2] for _ in x]).astype(np.int32)
    weights = rng.random((rows, 2)).astype(np.float32)
    want = np.zeros_like(x)
    for i, row in enumerate(x):
        for e, weight in zip(experts[i], weights[i], strict=True):
            want[i] += weight * (down[e] @ (np.maximum(gate[e] @ row, 0) * (up[e] @ row)))
    choice = Choice(jnp.asarray(experts), jnp.asarray(weights))
    got = mix_experts(jnp.asarray(x), choice, *map(jnp.asarray, (gate, up, down)), jax.nn.relu)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_shared_expert_counts_by_its_own_gate():
    """For every row, beside those that are chosen."""
    spec = open_checkpoint(GOLDENS / "qwen3_5_moe").spec
    layer = decoder.Experts(spec, decoder.Compute(), nnx.Rngs(0))
    rows = 3 * jax.random.normal(jax.random.key(0), (9, spec.hidden_size))
    assert layer.shared is not None and layer.shared_gate is not None
    choice = choose_experts(rows, layer.router.weight[...], spec.experts_used, True)
    chosen = mix_experts(rows, choice, *(x[...] for x in (layer.gate, layer.up, layer.down)), silu)
    shares = 1 / (1 + np.exp(-np.asarray(rows @ layer.shared_gate[...])))
    want = np.asarray(chosen) + shares[:, None] * np.asarray(layer.shared(rows))
    np.testing.assert_allclose(layer(rows), want, rtol=1e-5, atol=1e-6)


def test_packed_gives_the_numbers_of_dequantized_bit_for_bit(tiny):
    lean = model(tiny, "packed")
    np.testing.assert_array_equal(logits(lean), logits(model(tiny, "dense")))
    assert lean.resident_bytes < 0.35 * model(tiny, "dense").resident_bytes
    router = lean.params["blocks"]["mlp"]["router"]["weight"]
    assert router.dtype == jnp.float32 and router.shape == (3, 8, 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiny", "axes"),
    [("tiny-experts", (2, 2, 1)), ("tiny-delta-experts", (1, 2, 1))],
    indirect=["tiny"],
)
def test_on_a_mesh_experts_are_split_by_rows_of_blocks(tiny, axes):
    alone = logits(model(tiny, "packed"), rows=4)
    devices = jax.devices()[: axes[0] * axes[1]]
    spread = model(tiny, "packed", sharding.make_mesh(*axes, devices))
    stack = "deltas" if "deltas" in spread.params else "blocks"
    gate = spread.params[stack]["mlp"]["gate"].fields[-1]
    assert gate.shape[:3] == (3, 8, 256)
    assert gate.addressable_shards[0].data.shape[:3] == (3, 8, 128)
    np.testing.assert_allclose(logits(spread, rows=4), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", cases("tiny-experts", slow=["tiny-delta-experts"]), indirect=True)
def test_text_is_written_as_the_whole_sequence_would_be_read(tiny):
    teacher = model(tiny, "packed")
    (written,) = teacher.generate(["return self"], kdjax.Sampling(max_tokens=6))
    start = teacher.tokenizer.encode("return self")
    ids = [*start, *written.ids]
    whole = jax.nn.log_softmax(jnp.asarray(teacher.logits(jnp.asarray([ids], jnp.int32)))[0])
    at = range(len(start) - 1, len(ids) - 1)
    want = [float(whole[i, ids[i + 1]]) for i in at]
    np.testing.assert_allclose(written.log_probs, want, atol=1e-3)


_SHARED = "shared_expert_intermediate_size"


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2: expected 1"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: expected \[\]"),
        ("qwen3_moe", {_SHARED: 64}, f"{_SHARED}=64: expected 0"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts used of 8"),
        ("qwen3_moe", {"num_local_experts": None}, "found no 'num_experts'"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func=sigmoid: unknown"),
        ("qwen3_5_moe", {_SHARED: None}, f"found no '{_SHARED}'"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob=False: expected True"),
    ],
)
def test_other_experts_are_refused_by_name(case, changes, message):
    table = open_table(GOLDENS / case)
    spec_from_table(table)
    config = json.loads((GOLDENS / case / "config.json").read_text())
    table.metadata = config | changes  # type: ignore[assignment]
    with pytest.raises(UserError, match=message):
        spec_from_table(table)


@pytest.mark.parametrize(
    ("key", "value"),
    [("expert_shared_count", 1), ("expert_gating_func", 2), ("leading_dense_block_count", 1)],
)
def test_a_header_of_other_experts_is_refused_by_name(tiny, monkeypatch, key, value):
    table = open_table(tiny)
    monkeypatch.setattr(table, "metadata", dict(table.metadata) | {f"qwen3moe.{key}": value})
    with pytest.raises(UserError, match=f"qwen3moe.{key}={value}: expected"):
        spec_from_table(table)


def test_float8_is_refused(tiny):
    with pytest.raises(UserError, match="experts, whose products are not computed in float8"):
        model(tiny, "float8")


def test_the_flops_are_those_of_the_experts_used(tiny):
    spec = open_checkpoint(tiny).spec
    wider = spec.forward_flops(1) - spec.__class__(
        **{**vars(spec), "experts_used": 1}
    ).forward_flops(1)
    assert wider == 2 * 3 * (3 * 256 * 256)  # of each of three layers one expert more
    assert count_parameters(spec) > 3 * 8 * 3 * 256 * 256


@pytest.mark.slow
def test_experts_of_one_layer_are_decoded_at_a_time(tmp_path):
    """By XLA's account, where a step of the scan runs four layers: all of them took 4.4."""
    shape = SHAPES["tiny-delta-experts"]._replace(experts=32, layers=8)
    write_random_gguf(tmp_path / "m.gguf", shape)
    teacher, tokens = model(tmp_path / "m.gguf", "packed"), jnp.zeros((4, 16), jnp.int32)
    read = jax.jit(lambda params: teacher.functions.hidden(params, tokens, 1 + tokens, tokens))
    used = read.lower(teacher.params).compile().memory_analysis().temp_size_in_bytes
    assert used < 1.5 * 4 * 32 * 3 * shape.expert_ffn * shape.hidden


def test_a_missing_stack_is_named(tiny, tmp_path):
    table = open_table(tiny)
    left = [
        (n, table.info(n).dtype, table.info(n).shape, table.raw(n))
        for n in table
        if n != "blk.1.ffn_up_exps.weight"
    ]
    write_gguf(tmp_path / "a.gguf", dict(table.metadata), left)
    expected = r"blk.1.ffn_up_exps.weight: missing, expected shape \[8, 256, 256\]"
    with pytest.raises(UserError, match=expected):
        model(tmp_path / "a.gguf", "dense")


def test_stacks_of_gates_and_ups_in_one_are_read_apart(tiny, tmp_path):
    """Each expert's gate, then its up: convert_hf_to_gguf.py --fuse-gate-up-exps writes them so."""
    table = open_table(tiny)
    names = {name: name.replace("_up_", "_gate_up_") for name in table if "_up_exps" in name}
    rows = []
    for name in table:
        info, raw = table.info(name), table.raw(name)
        if name in names:
            gate = table.raw(name.replace("_up_", "_gate_"))
            raw, info = np.concatenate([gate, raw], axis=1), info._replace(shape=(8, 512, 256))
        if "_gate_exps" not in name:
            rows.append((names.get(name, name), info.dtype, info.shape, raw))
    write_gguf(tmp_path / "f.gguf", dict(table.metadata), rows)
    assert len(rows) == len(table) - 3
    np.testing.assert_array_equal(
        logits(model(tmp_path / "f.gguf", "packed")), logits(model(tiny, "packed"))
    )


@pytest.fixture(scope="module")
def routed():
    """bf16 rows, experts whose widths the kernels take, and a choice that leaves one unused."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    rows = jax.random.normal(next(keys), (70, 256), jnp.bfloat16)
    gate, up = (jax.random.normal(next(keys), (5, 128, 256), jnp.bfloat16) / 16 for _ in range(2))
    down = jax.random.normal(next(keys), (5, 256, 128), jnp.bfloat16) / 11
    router = jax.random.normal(next(keys), (5, 256)).at[3].set(0.0)
    choice = choose_experts(rows, router.at[3].add(-1e3 * rows.mean(0)), 2, True)
    return rows, choice, gate, up, down


@pytest.mark.slow
def test_tiles_are_of_one_expert_and_hold_every_row(routed):
    choice = routed[1]
    tiles, slots = lay_out(choice.experts, 5, 16)
    assert len(tiles.experts) == -(-140 // 16) + 5 and len(tiles.rows) == 16 * len(tiles.experts)
    for row, (at, experts) in enumerate(zip(slots.tolist(), choice.experts.tolist(), strict=True)):
        for place, expert in zip(at, experts, strict=True):
            assert tiles.rows[place] == row and tiles.experts[place // 16] == expert
    assert len(np.unique(slots)) == slots.size
    counts = np.bincount(np.ravel(choice.experts), minlength=5)
    assert int(jnp.sum(tiles.experts < 5)) == sum(-(-counts // 16))


@pytest.mark.slow
def test_kernels_give_the_sum_and_its_gradient(routed):
    """Interpreted, so that they run without a GPU."""
    rows, choice, *matrices = routed

    def total(mix, rows, weights, *matrices):
        y = mix(rows, Choice(choice.experts, weights), *matrices, jax.nn.silu)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    tiles = functools.partial(mix_experts_by_tiles, interpret=True)
    given = (rows, choice.weights, *matrices)
    found, want = (
        jax.jit(jax.value_and_grad(functools.partial(total, mix), range(5), has_aux=True))(*given)
        for mix in (tiles, mix_experts)
    )
    ((_, y), gradients), ((_, wanted), others) = found, want
    for a, b in zip((y, *gradients), (wanted, *others), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


def test_a_bf16_router_is_exact():
    """In three parts of 8 bits each weight is whole."""
    rows = jax.random.normal(jax.random.key(1), (64, 256), jnp.bfloat16)
    router = jax.random.normal(jax.random.key(2), (16, 256))
    got = choose_experts(rows, router, 4, False)
    want = choose_experts(rows.astype(jnp.float32), router, 4, False)
    np.testing.assert_array_equal(got.experts, want.experts)
    # Of float32 sums in another order: 6e-7 on some processors. Two parts lose 1e-4 of a weight.
    np.testing.assert_allclose(got.weights, want.weights, rtol=2e-5, atol=1e-6)


def _inner_scans(jaxpr, depth=0):
    """Each scan's body and how many scans it lies in."""
    for equation in jaxpr.eqns:
        inside = depth + (equation.primitive.name == "scan")
        for body in jaxprs_in_params(equation.params):
            if inside > depth:
                yield body, depth
            yield from _inner_scans(body, inside)


@pytest.mark.slow
def test_a_layer_is_decoded_once_for_all_microbatches(tiny):
    """In the loop over layers; in the loop over parts within it no bits are shifted."""
    teacher = model(tiny, "packed")
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 300, (4, 12)), jnp.int32)
    at = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], (4, 12))
    batch = {"tokens": tokens, "segment_ids": jnp.ones_like(tokens), "positions": at}

    @jax.jit
    def both(params):
        running = RunningTeacher(teacher.functions, params)
        kind, more = Packed().begin_parts(running, batch, 2)
        return kind.read_outputs(running, more)[0], running.hidden(batch)

    np.testing.assert_allclose(*both(teacher.params), rtol=1e-4, atol=1e-4)
    trace = jax.make_jaxpr(lambda p: teacher.functions.hidden_in_parts(p, *batch.values(), 2))
    for body, depth in _inner_scans(trace(teacher.params).jaxpr):
        assert ("shift_right_logical" in str(body)) == (depth == 0)
