"""Small runs as an earlier revision left them, in tests/goldens/earlier/REVISION.tar.xz.

    git worktree add ../then c0b3fb1 && cp tests/earlier_runs.py ../then/tests/ && cd ../then
    PYTHONPATH=. python tests/earlier_runs.py c0b3fb1.tar.xz

Makes the archive, with the code of the worktree that it runs in: two random models of 3,000 and
20,000 weights, a little text, its packed rows, two caches of the teacher, and four runs of 4 steps
that were saved at 2: on text with a dense teacher, which is kept to its end; from hidden states of
a packed one; on answers of its own, in rounds; and from likeliest ids. `made.json` says on what
machine, and what batch each step had.
tests/test_identity.py goes on with them. Never remake one to make a test pass: users have such
files on their disks.
"""

import argparse
import contextlib
import copy
import hashlib
import json
import os
import platform
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  (the devices and the precision of a test)
import numpy as np

STEPS, SAVED = 4, 2
ROOT = "@ROOT@"  # in a receipt, the folder of all this
_WORDS = [*"xy=():.,012", "self", "return", "import", "def", "for", "in", "if", "not", "None"]


def describe_machine() -> dict[str, str]:
    """Facts that must be the same for parameters to be equal bit for bit."""
    import jax

    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = " ".join(sorted(line.partition(":")[2].split()))
                processor = f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()}"
                break
    return {"jax": jax.__version__, "processor": processor}


def hash_batch(batch: Any) -> str:
    """SHA-256, in hex, of a batch's columns."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(f"{name}{batch[name].shape}".encode() + np.asarray(batch[name]).tobytes())
    return digest.hexdigest()


def _write_text(folder: Path) -> None:
    rng = np.random.default_rng(1)
    folder.mkdir()
    for number in range(12):
        lines = [" ".join(rng.choice(_WORDS, 4)) for _ in range(6)]
        (folder / f"{number:02}.txt").write_text("\n".join(lines) + "\n")


def _write_models(folder: Path) -> None:
    from scripts.bench.synthetic import ModelShape, write_random_gguf

    teacher = ModelShape("earlier-teacher", 1, 32, 4, 2, 64, 320, tied=True)
    student = ModelShape("earlier-student", 1, 8, 2, 1, 16, 310, tied=True)
    for seed, (name, shape) in enumerate((("teacher", teacher), ("student", student))):
        write_random_gguf(folder / f"{name}.gguf", shape, seed=seed)


def _make_config() -> Any:
    from kdjax.config import Config, tiny

    config = tiny(Config())
    config.loss.temperature, config.loss.alpha = 4.0, 0.3
    config.optim.learning_rate, config.optim.final_learning_rate = 1e-3, 5e-7
    config.teacher.path, config.student.path = "teacher.gguf", "student.gguf"
    config.data.train, config.data.cache_dir = "text", "rows"
    config.data.seq_len, config.data.heldout_fraction = 16, 0.4
    config.train.steps, config.train.batch_size, config.train.microbatches = STEPS, 8, 1
    config.eval.every, config.eval.rows, config.eval.batch_size = SAVED, 8, 8
    config.eval.samples, config.checkpoint.every, config.checkpoint.keep = 0, SAVED, 9
    config.log.tensorboard = False
    return config


def _make_configs() -> dict[str, Any]:
    text = _make_config()
    text.teacher.backend = "dequant"
    hidden = copy.deepcopy(text)
    hidden.teacher.backend, hidden.teacher.cache = "auto", "cache-hidden"
    answers = copy.deepcopy(text)
    answers.rollout.prompts, answers.rollout.share, answers.rollout.every = "text", 0.5, 3
    answers.rollout.max_tokens, answers.rollout.stop_growth = 4, 0.0
    topk = copy.deepcopy(text)
    topk.teacher.backend, topk.teacher.cache = "auto", "cache-topk"
    return {"text": text, "hidden": hidden, "answers": answers, "topk": topk}


def _train(config: Any, workdir: Path) -> dict[int, str]:
    """Runs the config; returns the hash of each step's batch."""
    from kdjax.config import validate
    from kdjax.device import cluster
    from kdjax.training.hooks import Hook
    from kdjax.training.job import assemble
    from kdjax.training.loop import train
    from kdjax.training.saving import Checkpoints
    from kdjax.watch.receipt import Receipt
    from kdjax.watch.writers import JsonLines

    batches = dict[int, str]()

    class Batches(Hook):
        def step_end(self, record: Any) -> None:
            batches[record.step] = hash_batch(record.batch)

    validate(config)
    workdir.mkdir()
    with cluster.started("off") as devices, Checkpoints(workdir, 9) as checkpoints:
        job = assemble(config, workdir)
        hooks = [Receipt(job, checkpoints, devices), JsonLines(workdir), Batches()]
        assert train(job, checkpoints, hooks, None) == "finished"
    return batches


def _forget_machine(receipt: Path, root: Path) -> None:
    """Takes the maker's paths, name and environment out of a receipt."""
    record = json.loads(receipt.read_text().replace(str(root), ROOT))
    record["platform"] |= {"host": "", "environment": {}}
    receipt.write_text(json.dumps(record, indent=1) + "\n")


def _make(root: Path) -> None:
    from kdjax.training.caching import cache_teacher
    from kdjax.training.teachers import CachedHidden, CachedTopK

    _write_text(root / "text")
    _write_models(root)
    configs = _make_configs()
    kinds = {"hidden": (CachedHidden(), "q4k"), "topk": (CachedTopK(4), "dequant")}
    for name, (kind, backend) in kinds.items():
        config = copy.deepcopy(configs[name])
        config.teacher.cache, config.teacher.backend = "", backend
        cache_teacher(config, Path(f"cache-{name}"), kind)
    batches = {name: _train(config, root / f"run-{name}") for name, config in configs.items()}
    for name in configs:
        _forget_machine(root / f"run-{name}" / "receipt.json", root)
        if name != "text":  # the receipt has the hash of what it held
            shutil.rmtree(root / f"run-{name}" / "checkpoints" / str(STEPS))
    for lock in root.rglob(".lock"):
        lock.unlink()
    made = {"machine": describe_machine(), "batches": batches}
    (root / "made.json").write_text(json.dumps(made, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="REVISION.tar.xz")
    archive = parser.parse_args().archive.resolve()

    def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _make(Path(folder))
        with tarfile.open(archive, "w:xz") as file:
            for path in sorted(Path().iterdir()):
                file.add(path, filter=without_owner)
        os.chdir(archive.parent)


if __name__ == "__main__":
    main()
