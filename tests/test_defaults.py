"""The defaults are the recipe that measured best, and the examples of the pages train with it."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import kdjax
from kdjax import demo
from kdjax.config import Config
from kdjax.models.adapters import DEFAULT_ALPHA
from kdjax.training.job import make_loss

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = pytest.mark.usefixtures("one_device")

# A config of an example: `config = Config()` and the fields that are set below it.
EXAMPLE = re.compile(r"^( *)(config = (?:kdjax\.)?Config\(\)\n(?:\1config\..*\n)+)", re.MULTILINE)


def list_examples():
    """The example configs of the pages and of `distill`: pairs of a place and its lines."""
    pages = [(page.name, page.read_text()) for page in sorted(DOCS.glob("*.md"))]
    for place, text in (*pages, ("distill", kdjax.distill.__doc__)):
        for indent, lines in EXAMPLE.findall(text):
            yield place, re.sub(f"^{indent}", "", lines, flags=re.MULTILINE)


EXAMPLES = list(list_examples())


def test_a_run_and_a_loop_minimise_the_same_loss_by_default():
    run, loop = make_loss(Config().loss, Config().train), kdjax.KDLoss()
    names = [field.name for field in dataclasses.fields(kdjax.KDLoss)]
    assert names == ["divergence", "temperature", "alpha"]
    for name in names:
        assert getattr(run, name) == getattr(loop, name), name
    assert (loop.divergence, loop.temperature, loop.alpha) == (kdjax.forward_kl, 1.0, 0.0)


def test_the_default_rates_are_those_of_the_records():
    """1e-5 to 1e-6: 2026-11-22-1p5b-run-to-use.md; 1e-4: 2026-11-26-rank64-seeds-h100.md."""
    config = Config()
    assert (config.optim.learning_rate, config.optim.final_learning_rate) == (1e-5, 1e-6)
    assert (config.student.lora.learning_rate, config.student.lora.alpha) == (1e-4, DEFAULT_ALPHA)


def read_config(example):
    """The config of an example's lines."""
    names = {"Config": Config, "kdjax": kdjax}
    exec(example[1], names)
    return names["config"]


def train_on_the_demo(config, folder):
    """The held-out KL of the demo's student before and after 24 steps of the config's recipe."""
    config.teacher.path, config.teacher.param_dtype = str(demo.TEACHER), "float32"
    config.student.path, config.student.remat = str(demo.STUDENT), "none"
    config.data.train = str(demo.STORIES)
    config.data.heldout = str(demo.HELD_OUT)
    config.data.cache_dir = str(folder / "rows")
    config.data.seq_len, config.data.max_segments, config.loss.chunk_tokens = 64, 8, 256
    config.train.steps, config.train.batch_size, config.train.compute_dtype = 24, 4, "float32"
    config.eval.every, config.eval.samples, config.checkpoint.every = 0, 0, 0
    config.log.tensorboard = False
    kdjax.distill(config, folder / "run")
    text = (folder / "run" / "metrics.jsonl").read_text()
    logged = [json.loads(line) for line in text.splitlines()]
    before, after = (record["kl"] for record in logged if record["kind"] == "eval")
    return before, after


@pytest.mark.slow
def test_each_example_brings_the_demo_s_student_nearer_to_its_teacher(tmp_path):
    """Loss and optimizer are the example's; models, text and length are the demo's."""
    assert {"cluster.md", "distill", "settings.md"} <= {place for place, _ in EXAMPLES}
    recipes = {repr((config.loss, config.optim)): config for config in map(read_config, EXAMPLES)}
    for number, config in enumerate(recipes.values()):
        before, after = train_on_the_demo(config, tmp_path / str(number))
        assert after < before, (config.loss, config.optim)
