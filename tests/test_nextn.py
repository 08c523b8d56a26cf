"""The block that drafts (MTP): read, written, computed, written with and trained."""

import contextlib
import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exporting import read_tensors
from flax.traverse_util import flatten_dict, unflatten_dict
from scipy.special import softmax
from test_library import read_programs

import kdjax
from kdjax.commands import evaluate, generate
from kdjax.errors import UserError
from kdjax.evaluation.drafting import choose_prompts
from kdjax.evaluation.target import Target
from kdjax.export import export_gguf, export_hf
from kdjax.formats import open_table
from kdjax.models.attention import attend_runs
from kdjax.models.checkpoint import cut_layers, drop_block, open_checkpoint
from kdjax.models.importance import sum_squares
from scripts.bench.synthetic import QWEN35_SHAPES, write_random_gguf
from scripts.checks import llama_answers

pytestmark = pytest.mark.usefixtures("one_device")

SHAPE = QWEN35_SHAPES["tiny-delta"]._replace(rows=305, drafts=1)
EXPERTS = dict(ffn=0, experts=7, experts_used=2, expert_ffn=96, shared_ffn=64)
PROMPTS = [np.random.default_rng(n).integers(0, 300, n).tolist() for n in (24, 2, 9)]
BOTH = pytest.mark.parametrize(
    "path",
    [
        pytest.param(SHAPE, id="dense"),
        pytest.param(SHAPE._replace(**EXPERTS), id="experts", marks=pytest.mark.slow),
    ],
    indirect=True,
)
NEW = dict(max_tokens=30, stop_ids=())


@pytest.fixture(scope="module")
def path(tmp_path_factory, request):
    """A model whose layers change little, and a block that passes its token on: it guesses well."""
    folder = tmp_path_factory.mktemp("nextn")
    write_random_gguf(folder / "random.gguf", getattr(request, "param", SHAPE), recipe="f32")
    model = kdjax.load(folder / "random.gguf", dtype="float32")
    flat: dict[tuple[str, ...], Any] = flatten_dict(model.params)
    for key in flat:
        if {"o", "out", "down"} & set(key[-2:]):
            flat[key] *= 0.3
    width = SHAPE.hidden
    only_token = jnp.concatenate([jnp.eye(width), jnp.zeros((width, width))], axis=1)[None]
    flat["mtp", "proj", "weight"] = only_token + 0.3 * flat["mtp", "proj", "weight"]
    model = model.replace(params=unflatten_dict(flat))
    export_gguf(model, folder / "m.gguf", dtype="f32")
    return folder / "m.gguf"


@pytest.fixture(scope="module")
def model(path):
    return kdjax.load(path, dtype="float32")


@pytest.fixture(scope="module")
def block(model):
    return kdjax.take_block(model)


def run_block(model, tokens, before):
    """Hidden states of the block in NumPy, for one text and the states before each token."""
    params: dict[tuple[str, ...], Any] = flatten_dict(model.params)
    spec = model.spec
    own = {k: np.asarray(x[0], np.float64) for k, x in params.items() if k[0] == "mtp"}
    w = {k[1:-1] if k[-1] == "weight" else k[1:]: x for k, x in own.items()}
    heads, groups, width, length = spec.num_heads, spec.num_kv_heads, spec.head_dim, len(tokens)

    def norm(x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + spec.rms_eps) * (1 + weight)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def rotate(x):  # the first quarter of a head, halves (i, i + R / 2)
        half = spec.rope.columns // 2
        angle = np.arange(length)[:, None] / spec.rope_theta ** (np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    token = np.asarray(model.params["embed"], np.float64)[tokens]
    both = np.concatenate([norm(token, w["enorm",]), norm(before, w["hnorm",])], axis=-1)
    x = both @ w["proj",].T
    y = norm(x, w["attn_norm",])
    q, gate = np.split((y @ w["attn", "q"].T).reshape(length, heads, 2 * width), 2, axis=-1)
    k, v = ((y @ w["attn", name].T).reshape(length, groups, width) for name in "kv")
    q, k = rotate(norm(q, w["attn", "q_norm"])), rotate(norm(k, w["attn", "k_norm"]))
    out = np.zeros_like(q)
    for head in range(heads):
        group = head * groups // heads
        scores = q[:, head] @ k[:, group].T / np.sqrt(width)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, group]
    x = x + (out * sigmoid(gate)).reshape(length, -1) @ w["attn", "o"].T
    y = norm(x, w["mlp_norm",])

    def pass_mlp(y, gate, up, down):
        gated = y @ gate.T
        return (gated * sigmoid(gated) * (y @ up.T)) @ down.T

    matrices = [w["mlp", name] for name in ("gate", "up", "down")]
    if not spec.experts:
        return norm(x + pass_mlp(y, *matrices), w["norm",])
    shared = [w["mlp", "shared", name] for name in ("gate", "up", "down")]
    x = x + sigmoid(y @ w["mlp", "shared_gate"])[:, None] * pass_mlp(y, *shared)
    scores = np.exp(y @ w["mlp", "router"].T)
    for row in range(length):
        chosen = np.argsort(-scores[row])[: spec.experts_used]
        for e in chosen:
            weight = scores[row, e] / scores[row, chosen].sum()
            x[row] += weight * pass_mlp(y[row], *(m[e] for m in matrices))
    return norm(x, w["norm",])


@functools.partial(jax.jit, static_argnums=0)
def _run_layers(functions, params, *columns):
    return functions.hidden(params, *columns)


def read_states(model, tokens):
    """The layers' hidden states of one text, read anew; texts are padded to one length."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(tokens)] = tokens
    columns = row, np.ones_like(row), np.arange(64, dtype=np.int32)[None]
    hidden = _run_layers(model.functions, model.params, *columns)
    return np.asarray(hidden, np.float64)[0, : len(tokens)]


def head_of(model):
    params = model.params
    return np.asarray(params.get("head", params["embed"]), np.float64)[: model.real_vocab]


@BOTH
def test_the_block_computes_its_formula(model, block):
    """Documents are packed in a row; the first token of each has zeros before it."""
    rows = np.asarray([PROMPTS[0] + PROMPTS[2] + PROMPTS[1]])
    lengths = [24, 9, 2]
    ids = np.repeat([1, 2, 3], lengths)[None]
    at = np.concatenate([np.arange(n) for n in lengths])[None]
    found = np.asarray(block.logits(rows, ids, at))[0]
    start = 0
    for tokens in (PROMPTS[0], PROMPTS[2], PROMPTS[1]):
        states = read_states(model, tokens)
        before = np.concatenate([np.zeros((1, states.shape[1])), states[:-1]])
        expected = run_block(model, tokens, before) @ head_of(model).T
        np.testing.assert_allclose(found[start : start + len(tokens)], expected, atol=2e-5)
        start += len(tokens)


@pytest.mark.slow
def test_runs_of_drafts_are_those_of_passes_that_begin_everywhere(model, block):
    """The states of three drafts a pass, of a pass from each token of two documents of a row."""
    texts = PROMPTS[2], PROMPTS[0][:6]
    rows = np.asarray([[*texts[0], *texts[1]]])
    ids = np.repeat([1, 2], [9, 6])[None]
    at = np.concatenate([np.arange(9), np.arange(6)])[None]
    columns = dict(tokens=rows, segment_ids=ids, positions=at)
    batch = {name: x.astype(np.int32) for name, x in columns.items()}
    (states,) = block.hidden_states([batch], drafts=3)
    found = np.asarray(states[0])
    for tokens, start in zip(texts, (0, 9), strict=True):
        states = read_states(model, tokens)
        np.testing.assert_allclose(found[0, start : start + len(tokens)], states, atol=2e-5)
        for first in range(len(tokens)):
            before = np.concatenate([np.zeros((1, states.shape[1])), states])[: first + 1]
            for number in range(min(3, len(tokens) - first)):
                own = run_block(model, tokens[: first + number + 1], before)[-1]
                place = start + first + number
                np.testing.assert_allclose(found[1 + number, place], own, atol=2e-5)
                before = np.concatenate([before, own[None]])


@pytest.mark.slow
def test_runs_attend_alike_in_blocks_of_queries(monkeypatch):
    """Outputs and gradients of 11 positions of two documents, at once and by 4 queries."""
    draw = np.random.default_rng(0)
    q, *others = (
        jnp.asarray(draw.normal(size=(2, 11, n, 8)), jnp.float32) for n in (4,) + 6 * (2,)
    )
    ids = jnp.asarray(np.repeat([[1, 2]], [6, 5], axis=1).repeat(2, axis=0), jnp.int32)

    def run(q, others):
        return jnp.sum(jnp.sin(attend_runs(q, others[:3], others[3:], ids, scale=0.3)))

    expected = jax.value_and_grad(run, argnums=(0, 1))(q, others)
    monkeypatch.setattr("kdjax.models.attention.QUERY_BLOCK", 4)
    found = jax.value_and_grad(run, argnums=(0, 1))(q, others)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


def sum_rejected(model, texts, weights):
    """Total variation of each draft of passes that begin at each token, in float64: sums by place.

    The last token of a text is a label only.
    """
    head, sums = head_of(model), np.zeros(len(weights))
    for tokens in texts:
        states = read_states(model, tokens)[:-1]
        said = softmax(states @ head.T, axis=-1)
        for first in range(len(states)):
            before = np.concatenate([np.zeros((1, states.shape[1])), states])[: first + 1]
            for number in range(min(len(weights), len(states) - first)):
                own = run_block(model, tokens[: first + number + 1], before)[-1]
                drafted = softmax(head @ own)
                sums[number] += np.abs(drafted - said[first + number]).sum() / 2
                before = np.concatenate([before, own[None]])
    return sums


@pytest.mark.slow
def test_the_loss_of_three_drafts_is_that_of_passes_that_begin_everywhere(model, block):
    """Sums, held-out figures and the gradient are those of float64 passes, each read anew."""
    texts, weights = (PROMPTS[2], PROMPTS[0][:6]), (1, 0.6, 0.35)
    batch = {
        "tokens": np.asarray([[*texts[0][:-1], *texts[1][:-1]]]),
        "labels": np.asarray([[*texts[0][1:], *texts[1][1:]]]),
        "segment_ids": np.repeat([1, 2], [8, 5])[None],
        "positions": np.concatenate([np.arange(8), np.arange(5)])[None],
        "weights": np.ones((1, 13), np.float32),
    }
    loss, form = kdjax.KDLoss(kdjax.total_variation), kdjax.DraftBlock(later=weights[1:])
    step = kdjax.make_step(block, model, loss, optax.sgd(1.0), form=form)
    state = step.init(block.params)
    held_out = step.evaluate(state, model.params, [batch])
    state, metrics = step(state, model.params, batch)
    expected = sum_rejected(model, texts, weights) / 13
    for found, first in ((held_out, "divergence"), (metrics.means(), "divergence")):
        names = first, "draft_2", "draft_3"
        np.testing.assert_allclose([found[name] for name in names], expected, atol=2e-5)
        assert found["loss"] == pytest.approx(expected @ weights, abs=3e-5)
    assert held_out["acceptance"] == pytest.approx(1 - expected[0], abs=2e-5)

    began: dict[tuple[str, ...], Any] = flatten_dict({"mtp": block.params["mtp"]})
    moved: dict[tuple[str, ...], Any] = flatten_dict(state.params)
    draw = np.random.default_rng(0)
    way = {key: draw.normal(size=x.shape) for key, x in began.items()}

    def value(far):
        flat = {key: np.asarray(x, np.float64) + far * way[key] for key, x in began.items()}
        params = model.params | unflatten_dict(flat)
        return sum_rejected(model.replace(params=params), texts, weights) / 13 @ weights

    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    found = sum(np.sum((began[key] - moved[key]) * way[key]) for key in began)
    assert found == pytest.approx(slope, rel=2e-3) and abs(slope) > 1e-3


@BOTH
@pytest.mark.slow
def test_files_keep_the_block(path, model, tmp_path):
    """GGUF to GGUF in float32, and a folder in bf16 to GGUF and back, bit for bit."""
    export_gguf(model, tmp_path / "again.gguf", dtype="f32")
    ours, theirs = read_tensors(tmp_path / "again.gguf"), read_tensors(path)
    blocks = {name for name in theirs if name.startswith("blk.4.")}
    assert len(blocks) == (20 if model.spec.experts else 15) and {
        n for n in blocks if ".nextn." in n
    } == {
        f"blk.4.nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    }
    assert all(ours[name] == theirs[name] for name in blocks)
    header = open_table(tmp_path / "again.gguf").metadata
    arch = header["general.architecture"]
    assert (header[f"{arch}.block_count"], header[f"{arch}.nextn_predict_layers"]) == (5, 1)
    export_hf(model, tmp_path / "hf", dtype="bf16")
    export_gguf(kdjax.load(tmp_path / "hf", dtype="float32"), tmp_path / "b.gguf", dtype="f32")
    export_hf(kdjax.load(tmp_path / "b.gguf", dtype="float32"), tmp_path / "back", dtype="bf16")
    assert read_tensors(tmp_path / "back") == read_tensors(tmp_path / "hf")
    assert {
        n for n in read_tensors(tmp_path / "hf") if n.startswith("mtp.") and "layers" not in n
    } == {f"mtp.{n}.weight" for n in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["mtp_num_hidden_layers"], config["num_hidden_layers"]) == (1, 4)
    read = kdjax.load(tmp_path / "b.gguf", dtype="float32").params["mtp"]["proj"]["weight"]
    np.testing.assert_array_equal(read, model.params["mtp"]["proj"]["weight"].astype("bfloat16"))


@pytest.mark.slow
def test_the_layers_are_those_without_the_block(path, model, tmp_path):
    """It is in no result, no importance and no cut model."""
    dropped = drop_block(open_checkpoint(path))
    assert dropped.names and dropped.spec == dataclasses.replace(model.spec, drafts=0)
    params = {name: x for name, x in model.params.items() if name != "mtp"}
    export_gguf(model.replace(params=params, spec=dropped.spec), tmp_path / "t.gguf", dtype="f32")
    trunk = kdjax.load(tmp_path / "t.gguf", dtype="float32")
    assert "mtp" not in trunk.params and "nextn" not in "".join(open_table(tmp_path / "t.gguf"))
    np.testing.assert_array_equal(trunk.logits([PROMPTS[0]]), model.logits([PROMPTS[0]]))
    names = sum_squares(model, [np.asarray(PROMPTS[:1])])[0]
    assert len(names) == 4 * 3 + 3 * 5 + 4 + 1 and not any(x.startswith("blk.4.") for x in names)
    cut = cut_layers(open_checkpoint(path), (0, 3))
    assert cut.names and cut.spec.drafts == 0


def draft_by_hand(model, prompt, count, drafts):
    """Greedy rounds over whole texts, read anew each time: the text, passes, accepted drafts."""
    ids, passes, kept, head = list(prompt), 0, 0, head_of(model)
    while len(ids) < len(prompt) + count:
        states = read_states(model, ids)
        before = np.concatenate([np.zeros((1, states.shape[1])), states[:-1]])
        drafted = list(ids)
        for _ in range(drafts):
            own = run_block(model, drafted, before)[-1]
            drafted.append(int((head @ own).argmax()))
            before = np.concatenate([before, own[None]])
        told = (read_states(model, drafted) @ head.T).argmax(-1).tolist()[len(ids) - 1 :]
        same = [a == b for a, b in zip(drafted[len(ids) :], told, strict=False)]
        accepted = [*same, False].index(False)
        passes, kept = passes + 1, kept + accepted
        ids += told[: accepted + 1]
    return ids[len(prompt) : len(prompt) + count], passes, kept


@pytest.mark.slow
def test_the_block_drafts_and_the_text_stays(model, block):
    """Texts, passes and accepted drafts are those of whole texts read anew; slots are refilled.

    With experts they are compared with llama.cpp alone.
    """
    found = model.generate(PROMPTS, draft=block, draft_tokens=3, batch_size=2, **NEW)
    plain = model.generate(PROMPTS, **NEW)
    for prompt, answer, alone in zip(PROMPTS, found, plain, strict=True):
        ids, *counts = draft_by_hand(model, prompt, 30, 3)
        assert answer.ids == ids == alone.ids and [*answer.drafted] == counts
    assert sum(answer.drafted.accepted for answer in found) > 10


@pytest.mark.slow
def test_a_drawn_text_is_drawn_from_the_model(model, block):
    """At T = 1 the first ids of many answers are spread as the model's probabilities are."""
    count, prompt = 1000, PROMPTS[2]
    how = dict(max_tokens=2, stop_ids=(), batch_size=500, temperature=1.0, seed=3)
    answers = model.generate([prompt] * count, draft=block, draft_tokens=2, **how)
    shares = np.bincount([answer.ids[0] for answer in answers], minlength=305) / count
    p = np.asarray(jax.nn.softmax(model.logits([prompt])[0, -1]))
    expected = np.sqrt(2 / np.pi / count * p * (1 - p)).sum()  # of fair draws
    assert 0.5 * expected < np.abs(shares - p).sum() < 1.3 * expected
    assert any(answer.drafted.accepted for answer in answers)


@pytest.mark.slow
def test_the_figures_of_an_own_block_are_those_of_speculation(path, model, block, tmp_path):
    """`evaluate --draft=own` beside texts that are written with the block as the draft."""
    text = "def f(x):\n    return x + 1\n\n" * 4
    lines = [json.dumps({"text": text[i:]}) + "\n" for i in range(3)]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    out = tmp_path / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())
        arguments = [f"{path}@dense:float32", f"--json={out}", "--draft=own", "--rows=3"]
        arguments += [f"--data={tmp_path}/text.jsonl", "--max-tokens=24", "--seq-len=64"]
        assert evaluate.main(arguments) in (0, 9)  # random weights may be found broken
    found = json.loads(out.read_text())["draft"]
    assert found["costs"]["measured"] and 0 < found["costs"]["draft"] < 2
    (domain,) = found["domains"].values()
    assert [*domain["greedy"]["blocks"]] == [str(k) for k in range(1, 9)]
    how: dict[str, Any] = dict(stop_ids=model.tokenizer.stop_ids)
    every = f"{tmp_path}/text.jsonl", model.tokenizer
    prompts = choose_prompts(*every, count=3, most=999)
    first = model.generate(prompts, max_tokens=1, **how)
    begun = [prompt + one.ids for prompt, one in zip(prompts, first, strict=True)]
    how |= dict(draft=block, draft_tokens=3, max_tokens=23)
    counts = np.sum([c.drafted for c in model.generate(begun, **how)], axis=0)
    figures = domain["greedy"]["blocks"]["3"]
    # Passes whose drafts reach beyond the text are not judged: of each text one or two.
    assert 0 <= counts[0] - figures["passes"] <= 2 * len(prompts)
    accepted = figures["accepted"] * figures["passes"]
    assert -1e-6 <= counts[1] - accepted <= 6 * len(prompts) and accepted > 3


@BOTH
@pytest.mark.slow
def test_llama_cpp_accepts_as_many(path, model, block):
    """Its `draft-mtp`, from the second id on: it draws the first from the prompt's pass."""
    pytest.importorskip("xllamacpp")
    asked = dict(n_predict=30, temperature=0.0, ignore_eos=True, cache_prompt=False)
    with llama_answers.serve(path, draft="own", most=3) as url:
        answers = [
            llama_answers.ask(url, "/completion", asked | dict(prompt=prompt, return_tokens=True))
            for prompt in PROMPTS
        ]
    how = dict(draft=block, draft_tokens=3, max_tokens=29, stop_ids=())
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        drafted, accepted = (answer["timings"][key] for key in ("draft_n", "draft_n_accepted"))
        ids = answer["tokens"]
        ours = model.generate([prompt + ids[:1]], **how)[0]
        assert ours.ids == ids[1:]
        # It drafts no further than the answer goes; of the last round kdjax counts all.
        rounds = 29 - accepted
        assert 3 * (rounds - 2) <= drafted <= 3 * rounds
        assert 0 <= ours.drafted.accepted - accepted <= 3


@pytest.fixture(scope="module")
def batch():
    rows = np.random.default_rng(5).integers(0, 300, (2, 33))
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


@pytest.mark.slow
def test_the_program_of_the_page_writes_the_layers_as_they_were(
    batch, tmp_path, monkeypatch, caplog
):
    path = tmp_path / "model-q4_k_m.gguf"
    write_random_gguf(path, SHAPE._replace(hidden=256, ffn=256), recipe="q4_k_m")
    (program,) = read_programs("drafts.md", "block").values()
    monkeypatch.chdir(tmp_path)
    exec(program, {"batch": batch, "prompts": ["def add("]})
    assert "rounded numbers" not in caplog.text
    before, after = read_tensors(path), read_tensors(tmp_path / "model-drafting.gguf")
    changed = {n for n in before if before[n] != after[n] and not n.endswith("ssm_a")}  # rounded
    assert changed and all(name.startswith("blk.4.") for name in changed)


@pytest.mark.slow
def test_the_block_alone_trains(batch, tmp_path):
    """Beside packed layers, towards what they say; the result is a file with another block.

    With experts, which tests/test_block_run.py lacks.
    """
    shape = SHAPE._replace(hidden=256, **EXPERTS)
    write_random_gguf(tmp_path / "q.gguf", shape, recipe="q4_k_m")
    model = kdjax.load(tmp_path / "q.gguf", weights="packed", dtype="float32")
    block = kdjax.take_block(model)
    loss = kdjax.KDLoss(kdjax.total_variation)
    step = kdjax.make_step(block, model, loss, optax.adam(3e-3))
    state = step.init(block.params)
    assert step.base and step.base["blocks"] is model.params["blocks"]
    assert set(state.params) == {"mtp"}
    losses = []
    for _ in range(8):
        state, metrics = step(state, model.params, batch)
        losses.append(metrics.means()["divergence"])
    assert losses[-1] < 0.9 * losses[0]
    trained = block.replace(params=step.see(state))
    export_gguf(trained, tmp_path / "t.gguf")  # layers in the blocks that they have
    before, after = read_tensors(tmp_path / "q.gguf"), read_tensors(tmp_path / "t.gguf")
    changed = {n for n in before if before[n] != after[n] and not n.endswith("ssm_a")}  # rounded
    assert changed and all(name.startswith("blk.4.") for name in changed)
    again = kdjax.take_block(kdjax.load(tmp_path / "t.gguf", weights="packed", dtype="float32"))
    rows = batch["tokens"]
    np.testing.assert_allclose(again.logits(rows), trained.logits(rows), atol=1e-5)


@pytest.mark.slow
def test_a_student_keeps_the_block_that_it_has(model, batch):
    """Its loss reaches the layers alone, and no decay moves the block."""
    loss = kdjax.KDLoss(kdjax.forward_kl, alpha=1.0)
    step = kdjax.make_step(model, None, loss, optax.adamw(1e-2, weight_decay=0.5))
    state, _ = step(step.init(model.params), None, batch)
    trained: dict[tuple[str, ...], Any] = flatten_dict(state.params)
    began: dict[tuple[str, ...], Any] = flatten_dict(model.params)
    for key, x in trained.items():
        same = np.array_equal(x, began[key])
        assert same == (key[0] == "mtp"), key
    names = kdjax.parameter_names(model)
    assert names["mtp/proj/weight"] == "blk.4.nextn.eh_proj.weight"
    assert names["blocks/3/attn/q/weight"] == "blk.3.attn_q.weight" and "deltas/3/conv" not in names


@pytest.mark.slow
def test_a_new_block_is_drawn_for_a_model_without_one(tmp_path):
    write_random_gguf(tmp_path / "m.gguf", SHAPE._replace(drafts=0), recipe="f32")
    model = kdjax.load(tmp_path / "m.gguf", dtype="float32")
    with pytest.raises(UserError, match=r"no block that drafts; expected blk\.4\.nextn"):
        kdjax.take_block(model)
    block = kdjax.take_block(model, seed=1)
    answers = model.generate(PROMPTS[2:], draft=block, max_tokens=4, stop_ids=())
    assert answers[0].ids == model.generate(PROMPTS[2:], max_tokens=4, stop_ids=())[0].ids
    export_gguf(block, tmp_path / "b.gguf", dtype="f32")
    read = kdjax.load(tmp_path / "b.gguf", dtype="float32")
    assert read.spec and read.spec.drafts == 1
    np.testing.assert_array_equal(
        read.params["mtp"]["proj"]["weight"], block.params["mtp"]["proj"]["weight"]
    )


def test_what_is_no_block_is_refused(models, block, model):
    with pytest.raises(UserError, match="found a block that drafts; expected a model to generate"):
        block.generate(PROMPTS[:1], max_tokens=2)
    other = kdjax.load(models / "student.gguf", dtype="float32")
    with pytest.raises(UserError, match=r"a qwen2 model; expected one of qwen3_5_text"):
        kdjax.take_block(other)
    loss = kdjax.KDLoss(kdjax.total_variation)
    with pytest.raises(UserError, match=r"form=Rounded\('q4_0'\) for a block or head that drafts"):
        kdjax.make_step(block, model, loss, optax.sgd(1.0), form=kdjax.Rounded("q4_0"))
    with pytest.raises(UserError, match=r"found no block that drafts and form=DraftBlock\(\)"):
        kdjax.make_step(model, model, loss, optax.sgd(1.0), form=kdjax.DraftBlock())


def test_a_file_without_a_block_is_refused_before_it_is_loaded(models, capsys, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("loaded"))
    assert generate.main([str(models / "student.gguf"), "--prompt=ab", "--draft=own"]) == 2
    assert capsys.readouterr().err.endswith("(docs/drafts.md).\n")
