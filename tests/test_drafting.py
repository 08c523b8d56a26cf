"""Savings of a draft: blocks along the teacher's text, beside walks and hand calculation."""

import contextlib
import itertools
import json
import math

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import kdjax
from kdjax.commands import evaluate as command
from kdjax.config import validate
from kdjax.device.placement import Placement
from kdjax.device.sharding import make_mesh
from kdjax.errors import UserError
from kdjax.evaluation import drafting, heldout
from kdjax.evaluation.drafting import Costs, count_blocks, independent, speed_up
from kdjax.export import export_gguf
from kdjax.models.checkpoint import open_checkpoint
from kdjax.models.model import load, load_model
from kdjax.training.pair import open_pair, open_student

pytestmark = pytest.mark.usefixtures("one_device")


def walk(accepts, drafts):
    """Accepted drafts and passes of speculation over a text whose tokens are accepted or not."""
    at, accepted, passes = 1, 0, 0
    while at + drafts <= len(accepts):
        run = next((j for j in range(drafts) if not accepts[at + j]), drafts)
        accepted, passes, at = accepted + run, passes + 1, at + run + 1
    return accepted, passes


def test_blocks_are_those_of_a_walk_over_every_pattern():
    """256 patterns of 8 tokens, 1 to 7 drafts; then chances between, over all patterns at once."""
    patterns = list(itertools.product((0, 1), repeat=8))
    assert len(patterns) == 256
    rng = np.random.default_rng(0)
    chances = rng.uniform(size=8)
    for drafts in range(1, 8):
        walks = [walk(pattern, drafts) for pattern in patterns]
        for pattern, want in zip(patterns, walks, strict=True):
            got = count_blocks(np.asarray([pattern], float), np.asarray([8]), drafts)
            assert got == pytest.approx(want)
        likely = [np.prod(np.where(p, chances, 1 - chances)) for p in np.asarray(patterns)]
        want = np.asarray(likely) @ np.asarray(walks)
        assert count_blocks(chances[None], np.asarray([8]), drafts) == pytest.approx(want)
    # Texts add up, a shorter one ends where it ends, and one shorter than its drafts has no pass.
    two = np.asarray([[1, 1, 1, 1, 1, 1.0], [1, 1, 1, 0, 0, 0]])
    assert count_blocks(two, np.asarray([6, 3]), 2) == pytest.approx((2 + 2 + 2, 2 + 1))
    assert count_blocks(two, np.asarray([6, 3]), 3) == pytest.approx((3, 1))


def test_independent_blocks_and_speed_up():
    assert independent(0.8, 3) == pytest.approx(0.8 + 0.64 + 0.512)
    assert independent(0.8, 3) == pytest.approx((1 - 0.8**4) / 0.2 - 1)
    assert speed_up(2.0, 3, Costs(0.1)) == pytest.approx(3 / 1.3)
    assert speed_up(2.0, 3, Costs(0.1, 0.2)) == pytest.approx(3 / 1.9)


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    """`evaluate --draft` of the tiny pair, and its document."""
    folder = tmp_path_factory.mktemp("draft")
    text = "def f(x):\n    return x + 1\n\n" * 4
    (folder / "text.jsonl").write_text(
        json.dumps({"text": text}) + "\n" + json.dumps({"text": text[5:]})
    )
    out = folder / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())
        arguments = [f"{models}/student.gguf@dense:float32", f"--json={out}", "--draft"]
        arguments += [f"--teacher={models}/teacher.gguf@dense:float32", "--cost-ratio=0.25"]
        arguments += [f"--data={folder}/text.jsonl", "--rows=2", "--max-tokens=24", "--seq-len=64"]
        assert command.main(arguments) in (0, 9)  # random weights may be found broken
    return folder, json.loads(out.read_text())


@pytest.mark.slow
def test_the_figures_are_those_of_the_teachers_own_text(models, found):
    """Beside logits of both models over text that the teacher wrote, in float64."""
    folder, document = found
    (domain,) = document["draft"]["domains"].values()
    costs = {"draft": 0.25, "more": 0.0, "once": 0.0, "measured": False}
    assert document["draft"]["costs"] == costs
    big, small = (load(f"{models}/{n}.gguf", dtype="float32") for n in ("teacher", "student"))
    prompts = drafting.choose_prompts(f"{folder}/text.jsonl", big.tokenizer, count=2, most=999)
    assert len(prompts) == 2 and prompts[0] != prompts[1]
    real = small.real_vocab
    written, longest = {}, 24 + max(map(len, prompts))
    for temperature in (0.0, 1.0):
        how = dict(max_tokens=24, temperature=temperature, stop_ids=big.tokenizer.stop_ids)
        answers = [c.ids for c in big.generate(prompts, **how)]
        texts = [[*prompt, *ids] for prompt, ids in zip(prompts, answers, strict=True)]
        padded = [text + [0] * (longest - len(text)) for text in texts]
        logits = (np.asarray(m.logits(padded), np.float64) for m in (big, small))
        written[temperature] = answers, *logits
    for rule, (temperature, _) in drafting.RULES.items():
        kept, totals = [], np.zeros((17, 2))
        for prompt, ids, *logits in zip(prompts, *written[temperature], strict=True):
            at = np.arange(len(ids)) + len(prompt) - 1
            p, q = (z[at, :real] for z in logits)
            p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (p, q))
            p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
            row = np.arange(len(ids))
            if rule == "sampled_top10":
                least = np.sort(q)[:, -10:-9]
                q = np.where(q >= least, q, 0)
                q /= q.sum(-1, keepdims=True)
            chance = np.minimum(1, q[row, ids] / p[row, ids])
            if not rule.startswith("sampled"):
                chance = (q.argmax(-1) == ids).astype(float)
            kept += chance[1:].tolist()
            for drafts in range(1, 17):
                one = count_blocks(chance[None], np.asarray([len(ids)]), drafts)
                totals[drafts] += one
        assert domain[rule]["tokens"] == len(kept)
        places = domain[rule]["places"]
        assert [places[x]["tokens"] for x in ("0-15", "16-63", "64-255")] == [30, len(kept) - 30, 0]
        assert sum(x["kept"] for x in places.values()) == pytest.approx(
            sum(kept), rel=1e-3, abs=1e-6
        )
        assert domain[rule]["kept"] == pytest.approx(np.mean(kept), rel=1e-3, abs=1e-6)
        for drafts, figures in domain[rule]["blocks"].items():
            want = totals[int(drafts), 0] / totals[int(drafts), 1]
            assert figures["accepted"] == pytest.approx(want, rel=1e-3, abs=1e-6)
            assert figures["speed_up"] == pytest.approx(
                (want + 1) / (1 + 0.25 * int(drafts)), rel=1e-3
            )
        best = domain[rule]["blocks"][str(domain[rule]["best"])]["speed_up"]
        assert best == max(x["speed_up"] for x in domain[rule]["blocks"].values())
    assert math.isclose(domain["sampled"]["tokens"], domain["matched"]["tokens"])


def test_figures_of_a_broken_draft_are_shown_as_such_and_none_is_best(tmp_path, capsys):
    """They were texts by then, which no format of a number takes: a traceback for status 9."""
    values = heldout.Values(*[np.full((1, 6), np.nan)] * len(heldout.Values._fields))
    mask = np.array([[0, 0, 1, 1, 1, 1]])
    texts = [drafting.Continuations("code", t, [{"weights": mask}]) for t in (0.0, 1.0)]
    figures = drafting.count_saved(texts, [[[values]]] * 2, Costs(0.25))
    assert figures["code"]["sampled"]["best"] is None
    document = {"target": "x", "mode": "inference", "broken": [{"detector": "d", "evidence": "e"}]}
    costs = {"draft": 0.25, "more": 0.0, "measured": False}
    document |= {"draft": {"costs": costs, "domains": figures}}
    command._show(document, tmp_path / "out.json")
    assert '"kept": "nan"' in (tmp_path / "out.json").read_text()
    said = capsys.readouterr().out
    assert "nan of the drafts kept" in said and "best with" not in said


@pytest.mark.slow
def test_a_draft_is_judged_by_the_seed_and_batches_that_are_asked_for(models, found, monkeypatch):
    """On text drawn by seed 0, 32 rows at a time, whatever the flags said."""
    folder, generate, asked = found[0], kdjax.Model.generate, []

    def note(model, prompts, *args, **more):
        asked.extend([(more.get("seed"), more["batch_size"])] if "batch_size" in more else [])
        return generate(model, prompts, *args, **more)

    monkeypatch.setattr("kdjax.device.cluster.started", lambda *_, **_s: contextlib.nullcontext())
    monkeypatch.setattr(kdjax.Model, "generate", note)
    flags = [f"{models}/student.gguf", f"--teacher={models}/teacher.gguf", "--draft", "--seed=7"]
    flags += [f"--data={folder}/text.jsonl", "--rows=2", "--max-tokens=4", "--cost-ratio=0.25"]
    # A row holds a prompt and its answer: --seq-len, which may be beyond the positions, is unused.
    assert command.main([*flags, "--batch-size=1", "--seq-len=99999"]) in (0, 9)
    assert asked[1:] == [(7, 1), (7, 1)]  # behind the examination


def test_costs_are_measured(models):
    model = load(f"{models}/student.gguf", dtype="float32")
    assert 0 < drafting.time_pass(model, 1) < 60


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft"], "name the model that it is to draft for"),
        (["--cost-ratio=0.1"], "needs --draft"),
        (["--data=x", "--draft=own", "--parse-special"], "no meaning with --draft"),
        (["--data=x", "--draft=own", "--teacher=t.gguf"], "the target drafts for itself"),
        (["--data=x", "--draft=small.gguf"], "found no file or folder of a head"),
        (["--teacher=t.gguf", "--data=x", "--draft", "--cost-ratio=0"], "must be a number above 0"),
        (["--teacher=t.gguf", "--data=x", "--draft", "--cost-ratio=inf"], "a finite number"),
    ],
)
def test_flags_that_cannot_work(flags, message, capsys):
    assert command.main(["student.gguf", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_student_of_some_layers_is_those_layers(models, tiny_config):
    """The first layers of the teacher's file, as the config's student and in an exported file."""
    path = f"{models}/teacher.gguf"
    whole = load(path, dtype="float32")
    tiny_config.student.path, tiny_config.student.layers = path, "0,2"
    cut = open_student(tiny_config)
    assert cut.spec.num_layers == 2 and cut.spec.hidden_size == whole.spec.hidden_size
    placement = Placement.on(make_mesh(1, 1, 1, jax.local_devices()[:1]))
    model = load_model(cut, placement=placement, dtype="float32")
    for name, kept in flatten_dict(model.params).items():
        full = np.asarray(flatten_dict(whole.params)[name])
        np.testing.assert_array_equal(kept, full[[0, 2]] if name[0] == "blocks" else full)
    tiny_config.student.layers = "0,3"
    with pytest.raises(UserError, match="found no layer 3 to keep; expected 0 to 2"):
        open_student(tiny_config)
    for bad in ("2,0", "1,1", "a", "-1"):
        tiny_config.student.layers = bad
        with pytest.raises(UserError, match=r"student\.layers=.*whole numbers that rise"):
            validate(tiny_config)


def test_a_draft_that_llama_cpp_refuses_is_named_before_it_trains(tiny_config, caplog, monkeypatch):
    monkeypatch.setattr("kdjax.models.drafts._MOST_MORE_TOKENS", 8)
    open_pair(tiny_config)
    assert not caplog.records  # no draft
    tiny_config.loss.divergence = "0.5*forward_kl+0.5*total_variation"
    open_pair(tiny_config)
    open_pair(tiny_config)  # as kdjax draft does: at its start, and for its run
    assert caplog.text.count("the model has 384 tokens and the draft 320: more than 8 apart") == 1


@pytest.mark.slow
def test_of_equal_beginnings_one_is_judged(models, tmp_path):
    """Files under one licence begin alike, and would count as often as there are files."""
    model = load(f"{models}/teacher.gguf")
    tokenizer = model.tokenizer
    texts = ["# One licence for all of them.", *(f"def f{i}(a):\n    b" for i in range(3))]
    for i in range(12):
        (tmp_path / f"{i:02}.py").write_text(texts[max(0, i - 8)])
    found = drafting.choose_prompts(f"{tmp_path}/*.py", tokenizer, count=12, most=99)
    assert sorted(found) == sorted({tuple(ids): ids for ids in found}.values()) and len(found) == 4


@pytest.mark.slow
def test_a_run_of_some_layers_resumes_evaluates_and_exports(models, tiny_config, tmp_path):
    tiny_config.student.layers, tiny_config.train.steps = "1", 2
    tiny_config.optim.warmup_steps = 1
    work = tmp_path / "run"
    kdjax.distill(tiny_config, work)
    step = open_checkpoint(work)
    assert step.spec.num_layers == 1
    export_gguf(load(work, dtype="float32"), tmp_path / "draft.gguf", dtype="f32")
    draft, again = load(tmp_path / "draft.gguf", dtype="float32"), load(work, dtype="float32")
    assert draft.spec.num_layers == 1
    np.testing.assert_allclose(draft.logits([[1, 2, 3]]), again.logits([[1, 2, 3]]), atol=1e-5)
    tiny_config.student.layers = "0"
    with pytest.raises(UserError, match=r"student\.layers"):
        kdjax.distill(tiny_config, work)
