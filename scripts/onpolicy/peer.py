"""Seconds a step of TRL's DistillationTrainer, with Transformers' generate, on one GPU.

    python -m scripts.onpolicy.peer TEACHER SMALL prompts.jsonl --json=peer.json

TEACHER and SMALL are folders that Transformers reads; needs torch, transformers, trl, accelerate
and datasets, and nothing of kdjax. Student in float32 under bf16 autocast, teacher in bf16, forward
KL at T = 1, every answer the student's own. Prints and writes the seconds of each step; the first
has what runs only once. Exit status: 0 done, 2 bad input, 77 a package is missing.
"""

# pyright: reportMissingImports=false

import argparse
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SKIPPED = 77
_PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains `args.steps` steps; what each took, and what TRL logged."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            print(f"step {len(marks) - 1}: {marks[-1] - marks[-2]:.2f} s", flush=True)

    def load(folder: Path, dtype: Any) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.cuda()

    tokenizer = AutoTokenizer.from_pretrained(args.student)
    tokenizer.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    texts = []
    for line in args.prompts.read_text().splitlines():
        record = json.loads(line)
        asked = record["messages"]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        text += record.get("opening", "")
        if len(tokenizer(text)["input_ids"]) <= args.prompt_tokens:
            texts.append({"prompt": text})
    settings = DistillationConfig(
        output_dir=str(args.json.with_suffix("")),
        per_device_train_batch_size=args.at_once,
        gradient_accumulation_steps=args.answers // args.at_once,
        max_completion_length=args.max_tokens,
        max_steps=args.steps,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=1e-5,
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = DistillationTrainer(
        model=load(args.student, torch.float32),
        teacher_model=load(args.teacher, torch.bfloat16),
        args=settings,
        train_dataset=Dataset.from_list(texts[: 4 * args.answers * args.steps]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    marks.append(time.perf_counter())
    trainer.train()
    seconds = [b - a for a, b in itertools.pairwise(marks)]
    return {
        "answers": args.answers,
        "max_tokens": args.max_tokens,
        "seconds": seconds,
        "log": trainer.state.log_history,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the figures; returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts.onpolicy.peer", description=__doc__)
    add = parser.add_argument
    add("teacher", type=Path)
    add("student", type=Path)
    add("prompts", type=Path, help="as rollout.prompts, of `messages`")
    add("--answers", type=int, default=64, help="a step")
    add("--at-once", type=int, default=16, help="answers, of which --answers is a multiple")
    add("--max-tokens", type=int, default=192, help="of an answer")
    add("--prompt-tokens", type=int, default=384, help="longer prompts are left out")
    add("--steps", type=int, default=6)
    add("--json", type=Path, default=Path("peer.json"))
    args = parser.parse_args(argv)
    if args.answers % args.at_once:
        parser.error(f"--answers={args.answers} is no multiple of --at-once={args.at_once}")
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        print(f"not installed: {', '.join(missing)}")
        return SKIPPED
    args.json.write_text(json.dumps(run(args), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
