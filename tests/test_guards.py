"""Guards of a run: a teacher from which nothing can be learned."""

import copy
import dataclasses
import re

import pytest
from conftest import make_tiny_config, start_over, without_page

from kdjax.commands.parsing import load_config
from kdjax.device import runtime
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.models.checkpoint import open_checkpoint
from kdjax.training.caching import cache_teacher
from kdjax.training.hooks import Hook
from kdjax.training.job import assemble
from kdjax.training.loop import train
from kdjax.training.saving import Checkpoints
from kdjax.training.teachers import CachedTopK
from kdjax.watch.guards import NoSignalGuard
from kdjax.watch.run import make_hooks
from scripts.checks.detectors import rewritten

pytestmark = pytest.mark.usefixtures("one_device")

REFUSED = r"kl(_topk)? \S+ nats, agreement (99|100)\.\d+%;.* KDJAX_ALLOW_DEGENERATE_KD=1"


class Stop(Hook):
    """Ends a run after a step."""

    def __init__(self, step):
        self._step = step

    def step_end(self, record):
        return record.step == self._step


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """A teacher, of a sharper guess than random weights have, and copies of it by block type."""
    folder = tmp_path_factory.mktemp("copies")
    table = open_table(models / "teacher.gguf")
    wider = dict(change=lambda _, rows: rows * 8, only="token_embd")
    rewritten(table, folder / "teacher.gguf", "", **wider)
    table = open_table(folder / "teacher.gguf")
    for dtype in ("BF16", "F16", "Q8_0", "Q4_0"):
        rewritten(table, folder / f"{dtype}.gguf", dtype)
    return folder


@pytest.fixture(scope="module")
def job(folder):
    """A run of three steps at no rate to speak of; the teacher's BF16 copy is its student."""
    config = make_tiny_config(folder, folder)
    config.student.path = str(folder / "BF16.gguf")
    config.train.steps, config.optim.warmup_steps = 3, 0
    config.optim.learning_rate = config.optim.final_learning_rate = 1e-9
    return assemble(config, folder / "assembled")


def go(job, workdir, student=None, *more, **changes):
    """Runs the job as `distill` does, with another student's file; how it ended."""
    config = copy.deepcopy(job.config)
    for name, value in changes.items():
        section, field = name.split("__")
        setattr(getattr(config, section), field, value)
    pair = job.pair
    if student is not None:
        pair = dataclasses.replace(pair, student=open_checkpoint(student))
    workdir.mkdir(exist_ok=True)
    with Checkpoints(workdir, 2) as checkpoints:
        again = start_over(job, workdir, config=config, pair=pair)
        hooks = without_page(make_hooks(again, checkpoints, runtime.device_summary()))
        return train(again, checkpoints, [*hooks, *more], None)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "Q8_0"])
def test_a_teacher_in_another_precision_is_refused(job, folder, tmp_path, dtype):
    with pytest.raises(UserError, match=REFUSED):
        go(job, tmp_path / "run", folder / f"{dtype}.gguf")
    assert "train" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_teacher_rounded_to_four_bits_teaches(job, folder, tmp_path):
    assert go(job, tmp_path / "run", folder / "Q4_0.gguf") == "finished"


@pytest.mark.slow
def test_a_run_that_is_its_teacher_near_its_end_goes_on(job, folder, tmp_path):
    """A copy is allowed once, stopped after a step and resumed where it is the teacher still."""
    run = tmp_path / "run"
    assert go(job, run, None, Stop(1), teacher__allow_degenerate=True) == "interrupted"
    assert go(job, run) == "finished"
    last = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"eval"' in line]
    kl, agreement = (float(re.search(rf'"{n}": ([^,]+)', last[-1])[1]) for n in ("kl", "agreement"))
    assert kl < NoSignalGuard.MOST_KL and agreement > NoSignalGuard.LEAST_AGREEMENT


@pytest.mark.slow
def test_a_cached_teacher_in_another_precision_is_refused(job, tmp_path):
    config = copy.deepcopy(job.config)
    cache_teacher(config, tmp_path / "cache", CachedTopK(8))
    config.teacher.cache = str(tmp_path / "cache")
    with pytest.raises(UserError, match=REFUSED):
        go(assemble(config, tmp_path), tmp_path / "run")


@pytest.mark.slow
def test_a_copy_trains_on_text_alone_and_then_with_its_teacher(job, folder, tmp_path):
    config = copy.deepcopy(job.config)
    config.loss.alpha, config.optim.learning_rate = 1.0, 1e-2
    assert go(assemble(config, tmp_path), tmp_path / "alone") == "finished"
    assert go(job, tmp_path / "taught", tmp_path / "alone") == "finished"


def test_a_rounded_copy_is_not_compared(job, tmp_path):
    """It learns to predict its teacher's text in spite of its rounding."""
    config = copy.deepcopy(job.config)
    config.student.quantize = "q4_0"
    with Checkpoints(tmp_path, 1) as checkpoints:
        for asked, guarded in ((job.config, True), (config, False)):
            rounded = dataclasses.replace(job, config=asked, workdir=tmp_path)
            hooks = make_hooks(rounded, checkpoints, runtime.device_summary())
            assert any(isinstance(hook, NoSignalGuard) for hook in hooks) == guarded


@pytest.mark.slow
def test_the_demo_goes_on(tmp_path):
    """Its models, text and settings, one step of it."""
    config = load_config("demo")[0]
    config.data.cache_dir = str(tmp_path / "rows")
    config.train.steps, config.train.batch_size, config.eval.rows = 1, 8, 8
    config.optim.warmup_steps = 0
    job = assemble(config, tmp_path)
    assert go(job, tmp_path / "run") == "finished"


# Measured on the demo's teacher, against it: copies of it, and its student.
@pytest.mark.parametrize(
    ("kl", "agreement", "refused"),
    [
        (0.0, 1.0, True),  # BF16
        (1.73e-4, 0.9921, True),  # F16
        (4.36e-4, 0.9866, True),  # Q8_0
        (1.27e-3, 0.9782, False),  # Q6_K
        (4.72e-2, 0.8748, False),  # Q4_0
        (1e-5, 0.01, False),  # two random models, each near a uniform guess
    ],
)
@pytest.mark.parametrize("name", ["kl", "kl_topk"])
def test_both_figures_decide(name, kl, agreement, refused):
    figures = {name: kl, "agreement": agreement}
    NoSignalGuard().eval_end(5, figures)  # near the end of a run
    if not refused:
        return NoSignalGuard().eval_end(0, figures)
    with pytest.raises(UserError, match="another precision"):
        NoSignalGuard().eval_end(0, figures)
