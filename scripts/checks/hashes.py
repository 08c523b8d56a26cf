"""Hashes what a revision computes, so that a change that must alter no number can show it.

    python -m scripts.checks.hashes --out=before.json
    python -m scripts.checks.hashes --out=after.json --against=before.json

On the demo's pair: the parameters after 20 steps by a dense, a packed, a float8 and a cached
teacher and on own answers; logits and greedy texts of both models, alone and with a draft; the
bytes of exports; the programs that steps are before XLA compiles them (`--programs`: these alone,
in seconds). Hashes of two machines or of two versions of JAX differ; compare on one.
Exit status: 0 the hashes are equal or nothing was compared, 1 they differ, 2 bad input.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import kdjax
from kdjax import demo
from kdjax.commands.parsing import load_config
from kdjax.config import flatten
from kdjax.errors import UserError, reporting
from kdjax.formats.saved import saved_steps, step_folder
from kdjax.training.teachers import CachedHidden, CachedTopK

STEPS = 20
_PROMPTS = ("def read(path):\n", "import os\n\n\nclass Name:\n", "for i in range(")
KINDS = ("dense", "packed", "float8", "cached", "own")


def _hash_tree(tree: Any) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of all leaves."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _hash_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _make_text(folder: Path) -> Path:
    """A few modules of the standard library: every kind of run reads the same few rows."""
    folder.mkdir(parents=True)
    source = demo.standard_library() / "email"
    for path in sorted(source.glob("*.py")):
        shutil.copy(path, folder)
    return folder


def _make_config(kind: str, folder: Path) -> kdjax.Config:
    config = load_config("demo:onpolicy" if kind == "own" else "demo")[0]
    config.data.train, config.data.heldout = str(folder / "text"), ""
    config.data.heldout_fraction, config.data.cache_dir = 0.4, str(folder / "rows")
    config.train.steps, config.optim.warmup_steps = STEPS, 2
    config.eval.every, config.eval.rows, config.checkpoint.every = 10, 8, 10
    config.rollout.every = 5
    if kind in ("packed", "float8"):
        config.teacher.weights = kind
    if kind == "own":
        config.rollout.prompts, config.rollout.batch_size = str(folder / "text"), 16
    return config


def _train(kind: str, folder: Path) -> str:
    """The hash of the state after the last step of a run of that kind."""
    config = _make_config(kind, folder)
    if kind == "cached":
        cache = folder / "cache"
        flags = [f"--config.{name}={value}" for name, value in _changed(config)]
        command = [sys.executable, "-m", "kdjax", "cache", "--config=configs/demo.py", *flags]
        subprocess.run([*command, f"--out={cache}", "--kind=topk", "--k=16"], check=True)
        config.teacher.cache = str(cache)
    workdir = folder / kind
    kdjax.distill(config, workdir, suits_cpu=True)
    return _hash_tree(kdjax.load(step_folder(workdir, saved_steps(workdir)[-1])).params)


def _changed(config: kdjax.Config) -> Iterator[tuple[str, Any]]:
    fields = flatten(config)
    for name in (
        *("data.train", "data.heldout", "data.heldout_fraction", "data.cache_dir"),
        *("train.steps", "optim.warmup_steps", "eval.every", "eval.rows"),
    ):
        yield name, fields[name]


_COLUMNS = dict.fromkeys(("tokens", "labels", "segment_ids", "positions"), ((), "int32"))
_COLUMNS |= {"weights": ((), "float32")}
_TOP = {  # columns of a cache of 4 ids: their axes behind [B, T], and types
    "teacher_ids": ((4, 3), "uint8"),
    "teacher_logits": ((4,), "float16"),
    "teacher_odds": ((2,), "float32"),
    "teacher_label": ((), "float32"),
}
_SETTINGS: dict[str, dict[str, Any]] = {  # of steps beside a dense teacher
    "alpha 1": {"loss": kdjax.KDLoss(alpha=1)},
    "jsd at T = 2": {"loss": kdjax.KDLoss("jsd", temperature=2.0, alpha=0.3)},
    "rounded": {"quantize": "q4_0"},
    "some parameters": {"trainable": "blocks/*/mlp"},
}


def _hash_program(
    student: kdjax.Model, teacher: kdjax.Model, columns: Any = _COLUMNS, **settings: Any
) -> str:
    """SHA-256 of a step and its evaluation as XLA gets them: StableHLO without places of source."""
    settings = {"loss": kdjax.KDLoss(alpha=0.1)} | settings
    step = kdjax.make_step(student, teacher, optimizer=optax.adamw(1e-4), **settings)
    batch = {
        name: jax.ShapeDtypeStruct((8, 32, *axes), dtype) for name, (axes, dtype) in columns.items()
    }
    train = step.jitted.lower(step.abstract, teacher.params, batch, **step.fixed)
    seen = jax.eval_shape(step.see, step.abstract)
    evaluate = step.sum_evaluation.lower(seen, teacher.params, batch)
    return hashlib.sha256((train.as_text() + evaluate.as_text()).encode()).hexdigest()


def hash_programs() -> Iterator[tuple[str, str]]:
    """Names and hashes of steps: each kind of teacher and student, on one device and on four."""
    for count in (1, 4):
        devices = jax.devices()[:count]
        student = kdjax.load(demo.STUDENT, dtype="float32", devices=devices)
        for form in ("dense", "packed", "float8"):
            teacher = kdjax.load(demo.TEACHER, weights=form, devices=devices)
            for parts in (1, 2):
                title = f"program: {form}, devices {count}, microbatches {parts}"
                yield title, _hash_program(student, teacher, microbatches=parts)
    student, teacher = kdjax.load(demo.STUDENT, dtype="float32"), kdjax.load(demo.TEACHER)
    for name, settings in _SETTINGS.items():
        yield f"program: {name}", _hash_program(student, teacher, **settings)
    assert teacher.spec is not None
    hidden = {"teacher_hidden": ((teacher.spec.hidden_size,), "bfloat16")}
    for kind, columns in ((CachedHidden(), hidden), (CachedTopK(4), _TOP)):
        digest = _hash_program(student, teacher, _COLUMNS | columns, kind=kind)
        yield f"program: cached {kind.name}", digest
    adapted = kdjax.add_lora(kdjax.load(demo.STUDENT, weights="packed"), rank=4)
    yield "program: adapters", _hash_program(adapted, teacher, allow_degenerate=True)


def hash_everything(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and hashes, one after the other; `folder` is scratch and exists."""
    yield from hash_programs()
    _make_text(folder / "text")
    teacher, student = (kdjax.load(path, dtype="float32") for path in (demo.TEACHER, demo.STUDENT))
    models = {"teacher": teacher, "student": student}
    for form in ("packed", "float8"):
        models[f"teacher {form}"] = kdjax.load(demo.TEACHER, weights=form)
    for name, model in models.items():
        assert model.tokenizer is not None
        ids = [model.tokenizer.encode(_PROMPTS[0])]
        yield f"logits of {name}", _hash_tree(model.logits(ids))
        if "float8" not in name:
            texts = [c.text for c in model.generate(list(_PROMPTS), max_tokens=24)]
            yield f"texts of {name}", _hash_tree([np.frombuffer(t.encode(), "u1") for t in texts])
    texts = teacher.generate(list(_PROMPTS), max_tokens=24, draft=student, draft_tokens=3)
    yield "texts with a draft", _hash_tree([np.frombuffer(c.text.encode(), "u1") for c in texts])
    kdjax.export_hf(student, folder / "hf")
    (folder / "hf" / "README.md").unlink(missing_ok=True)  # names version and date
    yield "export hf", _hash_files(folder / "hf")
    for dtype in ("f32", "q8_0", "q4_0", "q4_k_m"):
        kdjax.export_gguf(student, folder / f"{dtype}.gguf", dtype=dtype)
        digest = hashlib.sha256((folder / f"{dtype}.gguf").read_bytes()).hexdigest()
        yield f"export gguf {dtype}", digest
    for kind in KINDS:
        yield f"{STEPS} steps, {kind}", _train(kind, folder)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the hashes")
    parser.add_argument("--against", type=Path, help="JSON file of the revision before")
    parser.add_argument("--programs", action="store_true", help="hash the steps' programs alone")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 4)
    if args.against and not args.against.is_file():
        raise UserError(f"--against={args.against}: no such file. Write it with --out there.")
    with tempfile.TemporaryDirectory() as folder:
        hashes = dict(hash_programs() if args.programs else hash_everything(Path(folder)))
    args.out.write_text(json.dumps({"jax": jax.__version__, "hashes": hashes}, indent=1) + "\n")
    if not args.against:
        return 0
    before = json.loads(args.against.read_text())["hashes"]
    if args.programs:
        before = {name: x for name, x in before.items() if name.startswith("program: ")}
    differing = [name for name in before if hashes.get(name) != before[name]]
    print("\n".join(differing) or f"{len(before)} hashes are equal.")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
