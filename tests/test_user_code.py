"""Runs with Python of somebody's own in place of what the config names."""

import copy
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kdjax
from kdjax.errors import CheckError, UserError
from kdjax.formats.saved import saved_params
from kdjax.losses.divergences import parse_divergence, write_divergence
from kdjax.training.hooks import StepRecord
from kdjax.training.user_code import Calls, UserCode
from kdjax.watch.verify import verify

pytestmark = pytest.mark.usefixtures("one_device")

VOCABULARY = 256


def overlap(teacher_log_probs, student_log_probs):
    """A divergence that no config has a name for."""
    return 1 - jnp.sum(jnp.exp((teacher_log_probs + student_log_probs) / 2), axis=-1)


class Bigram(nnx.Module):
    """The next id by the last one alone."""

    def __init__(self, rows, seed=0):
        self.table = nnx.Param(0.1 * jax.random.normal(jax.random.key(seed), (rows, 16)))

    def hidden(self, tokens, segment_ids, positions):
        return jnp.tanh(self.table[...][tokens])

    def head_weight(self):
        return self.table[...]


class Rows:
    """The same rows of ids in every step."""

    def __init__(self):
        ids = np.random.default_rng(0).integers(0, VOCABULARY, (8, 33), dtype=np.int32)
        self.batch, self.drawn = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}, 0

    def next(self, params):
        self.drawn += 1
        return self.batch

    def get_state(self):
        return {"drawn": self.drawn}

    def set_state(self, state):
        self.drawn = state["drawn"]


def make_own(student):
    """All that `distill` takes as Python, made anew."""
    loss = kdjax.KDLoss(overlap, temperature=2.0, alpha=0.2)
    return dict(optimizer=optax.sgd(0.5), loss=loss, student=student, batches=Rows())


@pytest.fixture
def own_config(tiny_config):
    tiny_config.train.steps, tiny_config.optim.warmup_steps = 2, 1
    tiny_config.eval.every = tiny_config.checkpoint.every = 0
    return tiny_config


def test_a_run_of_ones_own_python_is_the_loop_of_make_step(own_config, tmp_path):
    """Optimizer, loss, module, batches, hooks; the receipt says that no hash is of their code.

    The module's head has no padding rows, as that of the file in its place has.
    """
    teacher = kdjax.load(own_config.teacher.path)
    assert teacher.tokenizer.vocab_size < teacher.vocab_size
    given = make_own(Bigram(teacher.tokenizer.vocab_size))
    records, figures = [], []
    hooks = dict(on_step=records.append, on_eval=figures.append)
    assert kdjax.distill(own_config, tmp_path / "a", **given, **hooks) == "finished"

    teacher = kdjax.load(own_config.teacher.path, compute_dtype="float32")
    student = kdjax.Model.from_module(Bigram(teacher.tokenizer.vocab_size), teacher.tokenizer)
    step = kdjax.make_step(student, teacher, given["loss"], optax.sgd(0.5))
    state, losses = step.init(student.params), []
    for _ in range(2):
        state, metrics = step(state, teacher.params, Rows().batch)
        losses.append(metrics.means()["loss"])
    (saved,) = saved_params(tmp_path / "a", 2)
    np.testing.assert_allclose(saved[1], state.params["table"], rtol=2e-6, atol=1e-8)
    np.testing.assert_allclose([r.figures["loss"] for r in records], losses, rtol=1e-6)
    assert "learning_rate" not in records[0].figures  # only the optimizer knows it
    assert [f["step"] for f in figures] == [0, 2] and losses[1] < losses[0]

    receipt = json.loads((tmp_path / "a" / "receipt.json").read_text())
    named = receipt["unhashed_python"]
    assert named["loss"] == "overlap" and named["student"].startswith("Bigram, arrays ")
    assert set(named) == {"batches", "loss", "optimizer", "student", "on_step", "on_eval"}
    assert receipt["config"]["loss"]["divergence"] == "own:overlap"
    assert receipt["config"]["loss"]["temperature"] == 2.0
    lines = verify(tmp_path / "a")
    assert "of no hash is the code given as Python: batches (Rows)" in lines[1]

    # Finished: the same Python goes on, less or other is another run.
    assert kdjax.distill(own_config, tmp_path / "a", **given) == "finished"
    with pytest.raises(UserError, match=r"own.optimizer: the checkpoint has 'state .*absent"):
        kdjax.distill(own_config, tmp_path / "a", **given | {"optimizer": None})


HALF = """
import jax.numpy as jnp

def half(teacher_log_probs, student_log_probs):
    return 1 - jnp.sum(jnp.exp((teacher_log_probs + student_log_probs) / 2), axis=-1)
"""


@pytest.mark.slow
def test_a_config_names_a_divergence_of_a_file(own_config, tmp_path, monkeypatch):
    """Its hash is in receipt and identity; the same file in another folder is the same run."""
    (tmp_path / "mine.py").write_text(HALF)
    monkeypatch.chdir(tmp_path)
    own_config.loss.divergence = "0.5*mine.py:half+0.5*forward_kl"
    mixture = kdjax.Mixture(((0.5, overlap), (0.5, kdjax.forward_kl)))
    loss = kdjax.KDLoss(mixture, own_config.loss.temperature, own_config.loss.alpha)
    given = dict(batches=Rows(), on_step=lambda record: losses.append(record.figures["loss"]))
    losses: list[float] = []
    assert kdjax.distill(own_config, "a", **given) == "finished"
    config = copy.deepcopy(own_config)
    config.loss.divergence = "forward_kl"
    assert kdjax.distill(config, "b", **given | {"batches": Rows(), "loss": loss})
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-6)

    receipt = json.loads(Path("a/receipt.json").read_text())
    sha = hashlib.sha256(HALF.encode()).hexdigest()
    assert receipt["hashed_python"] == {"mine.py:half": sha}
    assert set(receipt["unhashed_python"]) == {"batches", "on_step"}
    monkeypatch.chdir("/")
    assert f"loss.divergence.sha256 of mine.py:half: {sha}" in verify(tmp_path / "a")[1]
    config.loss.divergence = own_config.loss.divergence.replace("mine.py", f"{tmp_path}/mine.py")
    assert kdjax.distill(config, tmp_path / "a", batches=Rows()) == "finished"

    (tmp_path / "mine.py").write_text(HALF.replace("1 -", "2 -"))
    with pytest.raises(UserError, match=rf"sha256 of mine.py:half: the checkpoint has '{sha}'"):
        kdjax.distill(config, tmp_path / "a", batches=Rows())
    with pytest.raises(CheckError, match=r"config: found files .*mine.py:half"):
        verify(tmp_path / "a")
    (tmp_path / "mine.py").unlink()
    with pytest.raises(CheckError, match=r"no such file; expected a Python file that defines half"):
        verify(tmp_path / "a")


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (HALF, "mine.py:hafl", r"mine.py defines no hafl; .* Did you mean half\?"),
        (HALF, "mien.py:half", r"mien.py:half: no such file; .* Did you mean mine.py\?"),
        ("half = 3", "mine.py:half", "found half=3; expected a function of two"),
        ("\n\nimport nowhere", "mine.py:half", "mine.py:3: ModuleNotFoundError: No module named"),
        ("def half(:", "mine.py:half", "mine.py:1: SyntaxError"),
        ("", "half", "'half' is unknown; .* functions of a file, as mine.py:alpha_divergence"),
    ],
)
def test_a_file_without_the_divergence_is_named(code, text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(code)
    with pytest.raises(UserError, match=said):
        kdjax.KDLoss(text)


def test_a_file_may_define_a_divergence_with_its_own_gradient(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from kdjax import total_variation as mine")
    read = parse_divergence("mine.py:mine")
    assert read.merges_tail and read.gradient_bytes == 0
    q, p = (np.log(np.asarray(x, np.float32)) for x in ((0.5, 0.3, 0.2), (0.25, 0.5, 0.25)))
    for name in ("__call__", "logit_gradient", "merged_gradient"):
        theirs, ours = (getattr(x, name)(q, p) for x in (kdjax.total_variation, read))
        jax.tree.map(np.testing.assert_array_equal, theirs, ours)


@pytest.mark.slow
def test_a_hook_stops_a_run_and_another_optimizer_does_not_go_on(own_config, tmp_path):
    """A loss of a name is part of the config, and of its hash."""
    own_config.train.steps, own_config.eval.samples = 3, 0
    loss = kdjax.KDLoss(kdjax.JensenShannon(0.3), temperature=1.0)
    reason = kdjax.distill(own_config, tmp_path / "a", loss=loss, on_step=lambda r: r.step == 1)
    assert reason == "interrupted"
    receipt = json.loads((tmp_path / "a" / "receipt.json").read_text())
    assert receipt["config"]["loss"]["divergence"] == "jsd:beta=0.3"
    assert set(receipt["unhashed_python"]) == {"on_step"}
    with pytest.raises(UserError, match=r"own.optimizer: .*absent.*, now 'state"):
        kdjax.distill(own_config, tmp_path / "a", loss=loss, optimizer=optax.sgd(1.0))


@pytest.mark.parametrize(
    ("said", "stops"),
    [(True, True), (np.True_, True), (jnp.array(True), True), (np.False_, False), (3, False)],
)
def test_true_of_any_library_stops_a_run(said, stops):
    assert Calls(lambda record: said, None).step_end(StepRecord(1, {}, 0.0, {})) is stops


@pytest.mark.parametrize(
    "text",
    [
        "forward_kl",
        "total_variation",
        "jsd:beta=0.3",
        "skewed_reverse_kl:skew=0.25",
        "0.7*forward_kl+0.3*skewed_forward_kl:skew=0.1",
        "0.5*folder/mine.py:half+0.5*jsd:beta=0.3",
    ],
)
def test_divergences_of_configs_are_written_as_they_are_read(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/mine.py").write_text(HALF)
    divergence = parse_divergence(text)
    assert parse_divergence(write_divergence(divergence)) == divergence


def test_a_share_that_is_no_number_is_refused(types_unchecked):
    with pytest.raises(UserError, match=r"beta='0.5': must be above 0 and below 1"):
        kdjax.JensenShannon("0.5")


def test_divergences_of_ones_own_have_no_name():
    whole = kdjax.KDLoss(overlap).divergence
    assert write_divergence(whole) is None
    assert write_divergence(kdjax.Mixture(((0.5, whole), (0.5, kdjax.forward_kl)))) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": 1e-4}, "found optimizer=0.0001; expected an optax.GradientTransformation"),
        ({"loss": "jsd"}, "found loss='jsd'; expected a kdjax.KDLoss"),
        ({"student": "student.gguf"}, "expected a Flax NNX module"),
        ({"batches": []}, "expected an object with next"),
        ({"on_step": "print"}, "found on_step='print'; expected a function"),
    ],
)
def test_what_is_no_such_thing_is_refused(given, message, types_unchecked):
    with pytest.raises(UserError, match=message):
        UserCode(**given)


@pytest.mark.slow
def test_a_head_and_batches_that_are_too_small_are_refused(own_config, tmp_path):
    with pytest.raises(UserError, match="tokens, but the student's head has 8 rows"):
        kdjax.distill(own_config, tmp_path / "a", student=Bigram(8))
    source = Rows()
    source.batch = {name: x[:3] for name, x in source.batch.items()}
    own_config.train.microbatches = 2
    with pytest.raises(UserError, match="a batch of 3 rows; expected a multiple of 2: 2 microb"):
        kdjax.distill(own_config, tmp_path / "b", batches=source)


@pytest.mark.parametrize("name", ["layers", "quantize"])
def test_a_module_of_ones_own_has_no_settings_of_files(tiny_config, tmp_path, name):
    setattr(tiny_config.student, name, "0")
    with pytest.raises(
        UserError, match=f"student.{name}='0': must be empty with distill.student=Bigram"
    ):
        kdjax.distill(tiny_config, tmp_path, student=Bigram(8))
