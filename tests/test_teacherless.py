"""Training on the text alone: no teacher in the program, in the figures, or in what is left."""

import contextlib
import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import without_page

from kdjax import config as config_module
from kdjax import demo
from kdjax.commands.export import main as export
from kdjax.device.runtime import device_summary
from kdjax.errors import MissingFileError, UserError
from kdjax.formats import open_shapes, open_table
from kdjax.losses.chunked import HeadSpec, head_loss
from kdjax.losses.kd import KDLoss
from kdjax.losses.positions import head_evaluation
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import load_tokenizer
from kdjax.training import step
from kdjax.training.heldout import held_out_figures
from kdjax.training.job import assemble
from kdjax.training.loop import train
from kdjax.training.saving import Checkpoints
from kdjax.watch.run import make_hooks
from kdjax.watch.verify import verify

pytestmark = pytest.mark.usefixtures("one_device")

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 4096,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
COMPARED = ("teacher_ce", "teacher_perplexity", "kl", "divergence", "agreement")


@pytest.fixture
def shapes(tmp_path):
    """A folder of shapes and a tokenizer, without weights."""
    folder = tmp_path / "student"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo.STUDENT_SHAPE / name).read_bytes())
    return folder


@pytest.fixture
def alone(tiny_config, shapes):
    """A config without a teacher, from random weights, in two parts a step."""
    tiny_config.teacher.path, tiny_config.loss.alpha = "", 1.0
    tiny_config.student.path, tiny_config.student.init = str(shapes), "random"
    tiny_config.train.steps = 4
    tiny_config.train.batch_size, tiny_config.train.microbatches = 16, 2
    tiny_config.eval.every = tiny_config.checkpoint.every = 0
    return tiny_config


@pytest.mark.slow
def test_a_run_without_a_teacher_from_shapes_to_export(alone, tmp_path, capfd):
    workdir = tmp_path / "run"
    workdir.mkdir()
    config_module.validate(alone)
    job = assemble(alone, workdir)
    assert job.teacher is None and job.teacher_params == {}
    with contextlib.closing(Checkpoints(workdir, 1)) as store:
        hooks = make_hooks(job, store, device_summary())
        assert train(job, store, without_page(hooks), None) == "finished"
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if line["kind"] == "eval"]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(evals) == 2 and len(steps) == 4
    assert not {*COMPARED, "temperature"} & {key for line in evals for key in line}
    assert all("divergence" not in line and line["loss"] == line["ce"] for line in steps)
    # A fresh model of 2,000 ids is as good as a guess, and learns.
    assert evals[0]["student_ce"] == pytest.approx(math.log(2000), rel=0.05)
    assert evals[1]["student_ce"] < evals[0]["student_ce"] - 0.1
    said = capfd.readouterr().err
    assert "teacher ce" not in said and " kl " not in said and "agreement" not in said
    receipt = json.loads((workdir / "receipt.json").read_text())
    assert receipt["teacher"] is None
    assert receipt["student"]["files"] == [str((tmp_path / "student" / "config.json").resolve())]
    report = verify(workdir)
    assert any("trained on the text alone" in line for line in report)
    out = tmp_path / "student.gguf"
    assert export([str(workdir), "--format=gguf", "--type=q8_0", f"--out={out}"]) == 0
    spec = spec_from_table(open_table(out))
    assert (spec.vocab_size, spec.tied, spec.num_layers) == (4096, True, 2)
    assert load_tokenizer(out).vocab_size == 2000


def test_the_loss_without_a_teacher_is_the_cross_entropy(rng):
    spec = HeadSpec(KDLoss(temperature=4.0, alpha=1.0), width=24, real_vocab=20, chunk_tokens=8)
    hidden, head, other, wide = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 9, 8), (24, 8), (2, 9, 16), (32, 16))
    )
    labels = jnp.asarray(rng.integers(0, 20, (2, 9)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, (2, 9)), jnp.float32)

    def loss(hidden, head, *teacher):
        return head_loss(hidden, head, *teacher, labels, weights, spec)

    logits = np.einsum("btd,vd->btv", np.float64(hidden), np.float64(head))[..., :20]
    log_z = np.log(np.exp(logits).sum(-1))
    ce = log_z - np.take_along_axis(logits, np.asarray(labels)[..., None], -1)[..., 0]
    sums = loss(hidden, head, None, None)
    assert sums.divergence is None and float(sums.loss) == float(sums.ce)
    np.testing.assert_allclose(float(sums.ce), (ce * np.asarray(weights)).sum(), rtol=1e-5)
    # Its gradient is that of the same loss beside a teacher of no weight.
    gradients = [
        jax.grad(lambda h, w, t=teacher: loss(h, w, *t).loss, argnums=(0, 1))(hidden, head)
        for teacher in ((None, None), (other, wide))
    ]
    for mine, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    figures = head_evaluation(hidden, head, None, None, labels, weights, spec)
    assert figures[1:6] == (None,) * 5
    np.testing.assert_allclose(float(figures.student_ce), float(sums.ce), rtol=1e-6)


@pytest.mark.slow
def test_alpha_1_runs_the_teacher_in_evaluations_only(tiny_config, tmp_path):
    job = assemble(tiny_config, tmp_path)
    batch = job.step.put(job.source.next({}))

    def shapes(alpha):
        head = dataclasses.replace(job.step.spec.head, loss=KDLoss(alpha=alpha))
        spec = dataclasses.replace(job.step.spec, head=head, teacher=_Refusing())
        gradients = functools.partial(step.kd_gradients, spec=spec)
        return jax.eval_shape(gradients, job.step.abstract.params, job.teacher_params, batch)

    assert shapes(1.0)[1].divergence is None
    with pytest.raises(RuntimeError, match="the teacher ran"):
        shapes(0.99)
    job.config.loss.alpha = 1.0
    assert job.flops_per_token() == 3 * job.pair.student.spec.forward_flops(32)


class _Refusing:
    def hidden(self, *_):
        raise RuntimeError("the teacher ran")

    head = stored_head = hidden


@pytest.mark.parametrize(
    ("alpha", "path", "wrong"),
    [(0.3, "", True), (0.99, "", True), (1.0, "", False), (0.3, "teacher.gguf", False)],
)
def test_a_teacher_may_be_missing_only_at_alpha_1(tiny_config, alpha, path, wrong):
    tiny_config.teacher.path, tiny_config.loss.alpha = path, alpha
    if not wrong:
        return config_module.validate(tiny_config)
    with pytest.raises(UserError, match=rf"loss.alpha={alpha}: must be 1 with teacher.path=''"):
        config_module.validate(tiny_config)


def test_shapes_alone_start_nothing_but_a_random_student(alone, shapes):
    assert len(open_shapes(shapes)) == 0
    alone.student.init = "checkpoint"
    with pytest.raises(MissingFileError, match=r"expected model.safetensors.*student.init=random"):
        assemble(alone, shapes)


def test_a_head_too_narrow_for_its_tokenizer_is_refused(alone, shapes):
    (shapes / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 1999}))
    with pytest.raises(UserError, match=r"2,000 tokens.*1,999 rows"):
        assemble(alone, shapes)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_shapes_is_believed_about_its_head(alone, shapes, tied):
    (shapes / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": tied}))
    assert assemble(alone, shapes).pair.student.spec.tied is tied


def test_bits_per_byte_are_the_nats_over_the_bytes_of_the_targets(alone, tmp_path):
    """By hand: one document of known bytes, whose first id is the only one that is no target."""
    text = "naïve = '漢字'\n" + "x = 1\n" * 20
    folder = tmp_path / "known"
    folder.mkdir()
    (folder / "one.py").write_text(text)
    alone.data.heldout, alone.eval.rows = str(folder), 0
    job = assemble(alone, tmp_path)
    first = load_tokenizer(demo.STUDENT_SHAPE).encode(text)[0]
    opening = load_tokenizer(demo.STUDENT_SHAPE).decode([first])
    assert job.heldout_bytes == len(text.encode()) - len(opening.encode())
    batches = [(8.0, 6.0, 1.0, 1.0, 1.0, 2.0, 3.0), (4.0, 2.0, 1.0, 1.0, 0.0, 0.5, 1.0)]
    figures = held_out_figures([_sums(*b) for b in batches], KDLoss(), covered=6)
    assert figures["student_bits_per_byte"] == pytest.approx(12 / math.log(2) / 6)
    assert figures["teacher_bits_per_byte"] == pytest.approx(8 / math.log(2) / 6)
    assert figures["bytes"] == 6.0 and figures["tokens"] == 4.0
    assert "student_bits_per_byte" not in held_out_figures([_sums(*batches[0])], KDLoss())


def _sums(*values):
    from kdjax.losses.positions import EvalSums

    return EvalSums(*values)


def test_token_bytes_add_up_to_the_text():
    tokenizer = load_tokenizer(demo.STUDENT_SHAPE)
    text = "  def f(x):\n\treturn 'ß€😀' # 漢\r\n"
    sizes = tokenizer.token_bytes
    assert sizes[tokenizer.encode(text)].sum() == len(text.encode())
    assert sizes[tokenizer.end_of_text_id] == 0 and len(sizes) == tokenizer.vocab_size
