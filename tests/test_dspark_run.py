"""Runs that train a head that drafts: resumed bit for bit, as a command, its file used."""

import re

import numpy as np
import pytest
from conftest import make_tiny_config
from resuming import assert_goes_on, assert_trains_alike, finish
from test_dspark import DELTA, SHAPE

from kdjax.commands import draft, export, generate
from kdjax.config import SELF, set_fields
from kdjax.evaluation import drafting
from kdjax.formats import open_table
from kdjax.formats.saved import SavedTable
from kdjax.models.checkpoint import open_checkpoint
from kdjax.watch.verify import verify
from scripts.bench.synthetic import write_random_gguf

pytestmark = pytest.mark.usefixtures("one_device")


# The Qwen3.5 has a block of its own, as published files do.
TARGETS = {"qwen3": SHAPE, "qwen35": DELTA._replace(drafts=1)}


@pytest.fixture(scope="module")
def served(tmp_path_factory, request):
    """A file in blocks."""
    path = tmp_path_factory.mktemp("served") / "m.gguf"
    write_random_gguf(path, TARGETS[getattr(request, "param", "qwen3")], recipe="q8_0")
    return path


SPARK = {"student.block": "dspark", "student.dspark.layers": 1, "student.dspark.rank": 8}
KINDS = {
    "dspark": SPARK,
    "dflash": SPARK | {"student.dspark.rank": 0, "student.dspark.confidence": 0.0},
    "eagle3": {"student.block": "eagle3", "student.later_drafts": "0.8,0.64"},
    "some ids": {"student.block": "eagle3", "student.draft_ids": 64},
}


@pytest.fixture(scope="module", params=["dspark"])
def run(models, tmp_path_factory, served, request):
    """A finished run: its config, workdir, job and recorder. The parameter is the head's kind."""
    folder = tmp_path_factory.mktemp("head")
    config = make_tiny_config(models, folder)
    config.teacher.path, config.student.path = SELF, str(served)
    config.teacher.weights, config.teacher.param_dtype = "packed", "float32"
    config.loss.divergence, config.loss.temperature = "total_variation", 1.0
    config.loss.alpha, config.optim.learning_rate = 0.1, 1e-3
    config.train.steps, config.eval.every, config.checkpoint.every = 4, 0, 0
    set_fields(config, KINDS[request.param])
    return finish(config, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "served, run",
    [  # an EAGLE-3 head of all ids and one of some
        *(("qwen3", kind) for kind in KINDS if kind != "eagle3"),
        ("qwen35", "eagle3"),
    ],
    indirect=True,
)
def test_a_run_resumes_bit_for_bit_and_saves_the_head_alone(run, tmp_path):
    figures = assert_goes_on(run, tmp_path / "parts", stop_at=2)
    assert figures[1]["acceptance"] > figures[0]["acceptance"]
    losses = [call[2]["loss"] for call in run[3].calls if call[0] == "step"]
    # Negated gradients raise acceptance, too, where it begins at 0.02; the steps' losses then rise.
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert {name.partition("/")[0] for name in SavedTable(run[1], 4)} == {run[0].student.block}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["dspark", "some ids"], indirect=True)
def test_devices_that_share_rows_and_weights_train_alike(run, tmp_path):
    assert_trains_alike(run, tmp_path / "run", data=2, fsdp=2)


SMALL = ["student.dspark.layers=1", "student.dspark.rank=8", "student.dspark.slots=2"]
FEW = "student.draft_ids=64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served", "kind", "flags", "entry"),
    [
        ("qwen3", "dspark", SMALL, ("dflash.block_size", 2)),
        ("qwen3", "dflash", [SMALL[0], SMALL[2]], ("dflash.block_size", 3)),
        ("qwen3", "eagle3", [FEW, "mesh.data=2"], ("eagle3.block_count", 1)),
        ("qwen35", "eagle3", [], ("eagle3.block_count", 1)),
    ],
    indirect=["served"],
)
def test_one_command_makes_a_head_and_judges_it(tmp_path, served, capsys, kind, flags, entry):
    """The other commands take its file."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.py").write_text(f"def f{i}(x):\n    return x * {i}\n" * 8)
    out = tmp_path / "o.gguf"
    how = [str(served), f"--kind={kind}", f"--data={text}", "--seq-len=32", "--steps=24"]
    how += ["--learning-rate=3e-3", f"--out={out}", "--rows=2", "--max-tokens=12"]
    how += [f"--config.data.cache_dir={tmp_path}/rows", "--config.eval.every=0"]
    how += [f"--config.{flag}" for flag in flags]
    assert draft.main(how) == 0
    said = capsys.readouterr().out
    shares = said.partition("T = 1: ")[2].split()
    assert float(shares[2]) > float(shares[0])
    assert re.search(r"\n  greedily: [0-8]\.\d\d accepted a pass, \d\.\d\d times", said)
    assert f"-md {out} --spec-type draft-{kind} --spec-draft-n-max " in said
    table = open_table(out)
    assert table.info("fc.weight").dtype == "F16"
    assert np.array_equal(table.metadata[entry[0]], entry[1])
    assert ("d2t" in table) == (FEW in flags)
    assert any("tensors changed" in line for line in verify(tmp_path / "o.run"))
    with_head = [f"--draft={out}", "--max-tokens=12", "--draft-tokens=2"]
    assert generate.main([str(served), "--prompt=def f", *with_head]) == 0
    assert "over 2 drafts each" in capsys.readouterr().err
    assert export.main([str(tmp_path / "o.run"), "--format=hf", f"--out={tmp_path}/hf"]) == 0
    assert drafting.find_own(f"{tmp_path}/hf", open_checkpoint(str(served))) is not None
    own = drafting.find_own(str(out), open_checkpoint(str(served)))  # as evaluate --draft finds it
    assert own is not None and own.most == (8 if kind == "eagle3" else 2)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--new"], "--new has no meaning with --kind=dspark"),
        (["--draft=s.gguf"], "--draft has no meaning with --kind=dspark"),
        (["--type=q8_0"], "found --type=q8_0; expected one of F32, F16, BF16"),
        ([], "found a qwen2 model; expected one of qwen3"),
        (["--kind=dflash", "--new"], "--new has no meaning with --kind=dflash"),
        (["--kind=dflash"], "found a qwen2 model; expected one of qwen3"),
        (["--kind=eagle3"], "found a qwen2 model; expected one of qwen3"),
    ],
)
def test_what_a_head_cannot_have_is_refused_in_one_line(models, tmp_path, capsys, flags, message):
    kind = [] if any(flag.startswith("--kind=") for flag in flags) else ["--kind=dspark"]
    command = [str(models / "student.gguf"), *kind, f"--out={tmp_path}/o.gguf", *flags]
    assert draft.main(command) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1 and not any(tmp_path.iterdir())
