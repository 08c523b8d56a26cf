"""The identity of a run, and runs of earlier revisions that go on."""

import dataclasses
import json
import shutil
import tarfile
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from earlier_runs import ROOT, SAVED, STEPS, describe_machine, hash_batch
from test_run import Recorder, go

from kdjax.config import Config, StudentConfig, TeacherConfig, flatten, read_section
from kdjax.data.rollouts import read_round, round_path
from kdjax.data.rows import RowSet
from kdjax.errors import CheckError, MissingFileError, UserError
from kdjax.formats.imatrix import write_importance
from kdjax.formats.saved import saved_params
from kdjax.training import identity
from kdjax.training.identity import (
    CONTENTS,
    FREE,
    describe_answers,
    describe_cache,
    identify,
    list_differences,
)
from kdjax.training.inputs import hash_contents
from kdjax.training.pair import Pair
from kdjax.training.teachers import CachedHidden
from kdjax.watch.provenance import params_hash
from kdjax.watch.run import distill
from kdjax.watch.verify import verify

EARLIER = Path(__file__).parent / "goldens" / "earlier"


@pytest.fixture(params=sorted(path.name.partition(".")[0] for path in EARLIER.glob("*.tar.xz")))
def earlier(request, tmp_path, monkeypatch):
    """Copies what `earlier_runs` made with a revision's code to the current directory."""
    with tarfile.open(EARLIER / f"{request.param}.tar.xz") as file:
        file.extractall(tmp_path, filter="data")
    for receipt in tmp_path.glob("run-*/receipt.json"):
        receipt.write_text(receipt.read_text().replace(ROOT, str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(workdir):
    nested = json.loads((workdir / "receipt.json").read_text())["config"]
    return read_section(Config(), {name: x for name, x in nested.items() if name in vars(Config())})


class Batches(Recorder):
    """Notes the hash of each step's batch, too."""

    def __init__(self):
        super().__init__()
        self.hashes = {}

    def step_end(self, record):
        self.hashes[str(record.step)] = hash_batch(record.batch)
        return super().step_end(record)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "hidden", "answers"])
def test_a_run_of_an_earlier_revision_goes_on(earlier, name):
    """To the same bits where those can be the same: one jax, one kind of processor."""
    workdir, made = Path(f"run-{name}"), json.loads(Path("made.json").read_text())
    shutil.rmtree(workdir / "checkpoints" / str(STEPS), ignore_errors=True)
    later = round_path(workdir / "rollouts", 1)
    written = read_round(later).sha256 if later.exists() else None
    later.unlink(missing_ok=True)
    then = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    watched = Batches()
    assert go(config_of(workdir), workdir, watched) == "finished"
    assert watched.calls[0] == ("begin", SAVED)
    same = made["machine"] == describe_machine()
    expected = {step: made["batches"][name][step] for step in ("3", "4")}
    if written and not same:  # another student's draws
        del expected["4"], watched.hashes["4"]
    assert watched.hashes == expected
    losses = {e["step"]: e["loss"] for e in then if e["kind"] == "eval"}
    seen = {step: figures["loss"] for kind, step, figures in watched.curve() if kind == "eval"}
    assert seen == {STEPS: pytest.approx(losses[STEPS], rel=0 if same else 1e-2)}
    if same:
        output = json.loads((workdir / "receipt.json").read_text())["output"]
        assert params_hash(saved_params(workdir, STEPS)) == output["params_sha256"]
        assert (read_round(later).sha256 if later.exists() else None) == written


def test_a_finished_run_of_an_earlier_revision_is_verified(earlier):
    lines = verify(Path("run-text"))
    assert [line.split()[0] for line in lines] == ["ok"] * 9


def test_a_run_of_what_was_removed_is_refused_by_the_field(earlier):
    """Text that the start model wrote once: the archive of c0b3fb1 has such a run."""
    with pytest.raises(
        UserError, match=r"rollout\.rounds was removed \(docs/records/.*answers MODEL"
    ):
        verify(Path("run-topk"))
    config = config_of(Path("run-answers"))  # of the same text, models and prompts
    with pytest.raises(UserError, match=r"(?s)cannot go on:\n  rollout\.rounds was removed"):
        go(config, Path("run-topk"))


@pytest.mark.slow
def test_a_run_on_own_answers_is_verified(earlier):
    """In rounds, whose prompts belong to its identity."""
    workdir = Path("run-answers")
    assert distill(config_of(workdir), workdir) == "finished"
    assert [line.split()[0] for line in verify(workdir)] == ["ok"] * 9
    assert distill(config_of(workdir), workdir) == "finished"  # which loads nothing
    prompts = next(Path("text").iterdir())
    prompts.write_text(prompts.read_text() + "more\n")
    with pytest.raises(CheckError, match=r"rollout\.prompts"):
        verify(workdir)


def test_a_run_of_an_earlier_revision_is_refused_by_the_field_that_differs(earlier):
    workdir = Path("run-hidden")
    config = config_of(workdir)
    config.optim.beta1 = 0.8
    with pytest.raises(UserError, match=r"optim\.beta1: the checkpoint has 0\.9, now 0\.8"):
        go(config, workdir)
    config = config_of(workdir)
    text = next(Path("text").iterdir())
    text.write_text(text.read_text() + "more\n")
    config.teacher.cache, config.teacher.weights = "", "dense"
    with pytest.raises(UserError, match=r"(?s)data\.rows: the checkpoint has .*teacher\.cache: "):
        go(config, workdir)


@pytest.mark.slow
def test_a_cache_of_an_earlier_revision_is_refused_if_a_bit_of_it_changed(earlier):
    workdir = Path("run-hidden")
    config = config_of(workdir)
    shard = next(Path("cache-hidden").glob("*.bin"))
    data = np.fromfile(shard, np.uint8)
    data[3] ^= 1
    data.tofile(shard)
    with pytest.raises(UserError, match="shards are not as they were written"):
        go(config, workdir)


# ---- the rule


def differing(saved, current):
    return [name for name, _, _ in list_differences(saved, current)]


def test_a_field_that_a_record_lacks_has_its_default_there():
    config = Config()
    current = identify(config, {"data.rows": "ab"})
    older = {name: value for name, value in current.items() if not name.startswith("optim.")}
    assert not differing(older, current) and not differing(current, older)
    config.optim.beta1, config.student.layers = 0.8, "0,2"
    changed = identify(config, {"data.rows": "ab", "teacher.cache": "cd"})
    assert differing(older, changed) == ["optim.beta1", "student.layers", "teacher.cache"]
    assert differing(changed, older) == differing(older, changed)
    assert differing(current | {"of.a.later.version": 1}, current) == ["of.a.later.version"]


def test_every_field_is_part_of_the_identity_or_is_said_to_be_free():
    """Each by itself, so that a new field is compared unless somebody decides otherwise."""
    config = Config()
    config.rollout.prompts, config.student.lora.rank = "prompts", 4
    config.student.block = "dspark"
    fields, known = flatten(config), identify(config, {})
    free = {name for name in fields if name in FREE or f"{name.partition('.')[0]}." in FREE}
    assert fields.keys() - known.keys() == free | CONTENTS.keys()
    without = identify(Config(), {})
    # They decide nothing.
    switched = "rollout.", "student.lora.", "student.dspark."
    assert not [name for name in without if name.startswith(switched)]
    config.rollout.prompts, config.rollout.every = "", 3
    config.student.lora.rank, config.student.lora.alpha = 0, 3.0
    config.student.block, config.student.dspark.rank = "", 7
    assert identify(config, {}) == without


def test_answers_are_those_of_fields_away_from_their_defaults():
    config = Config()
    before = describe_answers(config)
    assert len(before) == 8  # as rounds of earlier versions say
    config.rollout.prompt_tokens, config.rollout.share, config.student.remat = 9, 0.99, "none"
    assert describe_answers(config) == before | {"rows": 0}
    config.student.layers = "0,2"
    assert describe_answers(config)["student.layers"] == "0,2"


@pytest.mark.parametrize("field", ["imatrix", "start"])
def test_files_of_rounding_are_known_by_their_bytes(tiny_config, tmp_path, field):
    """Not by the path: a file that was copied is the same, one written anew is another."""
    names = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for name, scale in zip(names, (1, 1, 2), strict=True):
        write_importance(
            name, {"blk.0.attn_q.weight": np.full(4, scale)}, 1, datasets=["a"], chunk_size=8
        )

    def identity_by(name):
        setattr(tiny_config.student, field, str(name))
        return identify(tiny_config, hash_contents(tiny_config))

    first, copied, other = map(identity_by, names)
    assert not differing(first, copied)
    assert differing(first, other) == [f"student.{field}.sha256"]
    assert differing(identity_by(""), other) == [f"student.{field}.sha256"]
    with pytest.raises(MissingFileError, match="no such file"):
        identity_by(tmp_path / "gone.gguf")


def test_a_new_setting_is_asked_for_everywhere_from_one_place(monkeypatch):
    """The next capability adds one so: runs, rounds and caches differ by it."""

    @dataclasses.dataclass
    class Student(StudentConfig):
        quantize: str = ""

    @dataclasses.dataclass
    class Teacher(TeacherConfig):
        hint: str = ""

    @dataclasses.dataclass
    class Later(Config):
        teacher: Teacher = dataclasses.field(default_factory=Teacher)
        student: Student = dataclasses.field(default_factory=Student)

    fake = types.SimpleNamespace(width=310, real=305, hidden_size=8, content_hash="")
    fake.cache_settings = {}
    fake.spec = fake
    older, rounds = identify(Config(), {}), describe_answers(Config())
    monkeypatch.setattr(identity, "Config", Later)
    config = Later()
    assert not differing(older, identify(config, {})) and describe_answers(config) == rounds
    config.student.quantize, config.teacher.hint = "q4_0", "the answer is"
    assert differing(older, identify(config, {})) == ["student.quantize", "teacher.hint"]
    assert describe_answers(config) == rounds | {"student.quantize": "q4_0"}
    pair = mock.Mock(spec=Pair, teacher=fake, tokenizer=fake, vocabulary=fake)
    rows = RowSet("ab", "c", {}, "rows")
    made_of = describe_cache(config, pair, rows, CachedHidden(), "sha")
    assert made_of.settings == {"teacher.hint": "the answer is"}
    config.teacher.hint, config.teacher.weights = "", "float8"
    assert not describe_cache(config, pair, rows, CachedHidden(), "sha").settings
