"""Trains the demo's student on conversations cut at row ends and on complete ones, for equal steps.

    python -m scripts.checks.whole_records --out=runs/whole --steps=150 --seeds=2 --json=whole.json

The demo's stories become conversations: a beginning that the user gives, and two answers of the
teller. Rows of both runs have one shape, so that equal steps are equal seconds. Rows that are cut
are those of versions before 28 November 2026: records follow one another, a row ends where it is
full, and the next one begins in the middle of an answer, without its question. Held-out rows hold
complete conversations for all runs; the loss is on their answers alone. Rows of complete records
have padding and so fewer targets: `longer` takes more steps, for as many targets as `cut`.
"""

import argparse
import dataclasses
import json
import logging
import re
import shutil
import time
from pathlib import Path
from typing import Any
from unittest import mock

import kdjax
from configs import demo as shipped
from kdjax import demo
from kdjax.config import Config
from kdjax.data import text
from kdjax.data.pipeline import TextSource
from kdjax.data.rows import RowSet, prepare_rows
from kdjax.models.tokenizer import load_tokenizer
from kdjax.training.inputs import row_settings
from kdjax.watch.writers import METRICS

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Listener: {{ m.content }}\n"
    "{% else %}Teller: {{ m.content }}<|endoftext|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Teller: {% endif %}"
)


def write_conversations(stories: Path, out: Path) -> None:
    """Writes each story as a conversation of two answers; short ones are left out."""
    with out.open("w") as file:
        for line in stories.read_text().splitlines():
            parts = re.split(r"(?<=[.!?]) ", json.loads(line)["text"])
            if len(parts) < 5:
                continue
            half = (len(parts) + 1) // 2
            said = [f"Tell me a story. {parts[0]}", " ".join(parts[1:half])]
            said += ["What came then?", " ".join(parts[half:])]
            roles = "user", "assistant", "user", "assistant"
            turns = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")


def make_config(out: Path, steps: int, seed: int) -> Config:
    """The demo's run on the conversations in `out`, in rows of 256 tokens."""
    config = shipped.get_config()
    config.data.train, config.data.heldout = f"{out}/train.jsonl", f"{out}/heldout.jsonl"
    config.data.tokenizer, config.data.cache_dir = f"{out}/tokenizer", f"{out}/rows"
    config.data.seq_len, config.data.max_segments = 256, 32
    config.train.steps, config.train.batch_size, config.train.seed = steps, 4, seed
    config.eval.every, config.eval.rows, config.eval.samples = steps, 80, 0
    return config


def cut_rows(config: Config, out: Path) -> RowSet:
    """The rows of versions that cut records at row ends."""
    settings = row_settings(config.data, load_tokenizer(Path(config.data.tokenizer)))
    with mock.patch.object(text.Document, "whole", property(lambda _: False)):
        return prepare_rows(settings, out / "cut")


def train(config: Config, workdir: Path, rows: RowSet | None) -> dict[str, Any]:
    """Trains, on these rows in place of the config's if given; returns held-out figures."""
    began = time.perf_counter()
    size, seed = config.train.batch_size, config.train.seed
    source = None if rows is None else TextSource(rows.train, batch_size=size, seed=seed)
    kdjax.distill(config, workdir, batches=source, suits_cpu=True)
    lines = [json.loads(line) for line in (workdir / METRICS).read_text().splitlines()]
    figures = [line for line in lines if line["kind"] == "eval"]
    return {"seconds": time.perf_counter() - began, "first": figures[0], "final": figures[-1]}


def main() -> None:
    """Runs the pairs of runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for data and runs")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default="cut,complete,longer", help="which runs of each seed")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    logging.getLogger("kdjax").setLevel(logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, stories in (("train", demo.STORIES), ("heldout", demo.HELD_OUT)):
        write_conversations(stories, options.out / f"{name}.jsonl")
    folder = options.out / "tokenizer"
    shutil.copytree(demo.FOLDER / "student", folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = make_config(options.out, options.steps, 0)
    cut = cut_rows(config, options.out)
    settings = row_settings(config.data, load_tokenizer(folder))
    complete = prepare_rows(settings, Path(config.data.cache_dir))
    result: dict[str, Any] = {"config": dataclasses.asdict(config), "runs": []}
    result["rows"] = {"cut": cut.info["train"], "complete": complete.info["train"]}
    per_row = [side["targets"] / side["rows"] for side in result["rows"].values()]
    longer = round(options.steps * per_row[0] / per_row[1])
    arms = {
        "cut": (cut, options.steps),
        "complete": (None, options.steps),
        "longer": (None, longer),
    }
    for seed in range(options.seeds):
        for name in options.arms.split(","):
            rows, steps = arms[name]
            config = make_config(options.out, steps, seed)
            figures = train(config, options.out / f"{name}{seed}", rows)
            result["runs"].append({"rows": name, "seed": seed} | figures)
            print(name, seed, json.dumps(figures), flush=True)
            options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
