"""Transformers' assisted generation with exported folders accepts as many drafts as kdjax does.

    python -m scripts.checks.assisted BIG.gguf --draft=SMALL.gguf --prompts=prompts.jsonl --count=20

Both models are exported as folders (a folder is taken as it is). Both programs draft the same
number of tokens a pass and withhold none. Greedily they should write the same texts but for
rounding, and at T = 1 accept as many drafts within noise, which `error` gives: the standard error
of the mean over texts. Prints a line of JSON for each way and program. Exit status: 0 done, 2 bad
input, 77 PyTorch is missing.
"""

# pyright: reportMissingImports=false

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Both programs share the device's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

from kdjax.errors import reporting
from kdjax.evaluation.drafting import choose_prompts
from kdjax.export import export_hf
from kdjax.models.model import Model, load

SKIPPED = 77


def open_folder(path: Path, into: Path) -> Path:
    """The folder, or one that is exported of a file."""
    if path.is_dir():
        return path
    export_hf(load(path), into)
    return into


def load_theirs(path: Path, model: Model, args: argparse.Namespace) -> Any:
    """Of Transformers, on the device that PyTorch has."""
    import torch
    import transformers

    dtype = getattr(torch, args.dtype)
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    config = found.generation_config
    # Rows of the head that no token has are no ids to us.
    config.suppress_tokens = list(range(model.real_vocab, model.vocab_size))
    config.num_assistant_tokens, config.assistant_confidence_threshold = args.draft_tokens, 0.0
    config.num_assistant_tokens_schedule = "constant"
    return found.to("cuda" if torch.cuda.is_available() else "cpu")


def theirs(
    models: Sequence[Any], prompts: list[list[int]], temperature: float, args: argparse.Namespace
) -> Iterator[tuple[list[int], int]]:
    """Each text, and the passes of the big model that it took."""
    import torch

    big, small = models
    passes = [0]
    hook = big.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    how: dict[str, Any] = dict(do_sample=temperature > 0, max_new_tokens=args.max_tokens)
    if temperature > 0:
        how |= dict(temperature=temperature, top_k=0, top_p=1.0)
    torch.manual_seed(0)
    for prompt in prompts:
        passes[0] = 0
        ids = torch.tensor([prompt], device=big.device)
        mask = torch.ones_like(ids)
        ends = dict(eos_token_id=None, pad_token_id=0)
        got = big.generate(
            ids, attention_mask=mask, assistant_model=small, repetition_penalty=1.0, **ends, **how
        )
        yield got[0, len(prompt) :].tolist(), passes[0]
    hook.remove()


def ours(
    models: Sequence[Model], prompts: list[list[int]], temperature: float, args: argparse.Namespace
) -> Iterator[tuple[list[int], int]]:
    """Each text but its first id, which comes with the prompt, and the passes that it took.

    Theirs drafts before it has read the prompt: its first id comes with a pass over drafts.
    """
    big, small = models
    how: dict[str, Any] = dict(max_tokens=args.max_tokens, temperature=temperature, stop_ids=())
    more: dict[str, Any] = dict(draft=small, draft_tokens=args.draft_tokens, batch_size=1)
    for got in big.generate(prompts, **how, **more):
        assert got.drafted is not None
        yield got.ids[1:], got.drafted.passes


def run(args: argparse.Namespace) -> None:
    """Prints the lines."""
    with tempfile.TemporaryDirectory() as place:
        paths = [
            open_folder(path, Path(place) / name)
            for name, path in (("big", args.big), ("small", args.draft))
        ]
        own = [load(path, dtype=args.dtype) for path in paths]
        assert own[0].tokenizer is not None
        most = own[0].spec.max_positions - args.max_tokens if own[0].spec else args.max_tokens
        prompts = choose_prompts(
            args.prompts, own[0].tokenizer, count=args.count, most=min(most, 1024)
        )
        others = [load_theirs(path, model, args) for path, model in zip(paths, own, strict=True)]
        for temperature in (0.0, 1.0):
            texts = {}
            programs = (("transformers", theirs, others), ("kdjax", ours, own))
            for name, write, models in programs:
                begun = time.monotonic()
                found = list(write(models, prompts, temperature, args))  # type: ignore[operator]
                rates = [len(ids) / passes - 1 for ids, passes in found]
                texts[name] = [ids for ids, _ in found]
                row: dict[str, Any] = {"program": name, "temperature": temperature}
                row["accepted a pass"] = round(float(np.mean(rates)), 3)
                row["error"] = round(float(np.std(rates)) / max(len(rates) - 1, 1) ** 0.5, 3)
                row["texts"], row["seconds"] = len(found), round(time.monotonic() - begun, 1)
                if name == "kdjax" and temperature == 0:
                    same = zip(texts["transformers"], texts["kdjax"], strict=True)
                    row["the same text"] = sum(a[1:] == b for a, b in same)
                print(json.dumps(row), flush=True)


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    flags = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    flags.add_argument("big", type=Path, help="a GGUF file or a Hugging Face folder")
    flags.add_argument("--draft", type=Path, required=True, help="likewise")
    flags.add_argument("--prompts", required=True, help="text or conversations: files, globs")
    flags.add_argument("--count", type=int, default=20, help="of the prompts")
    flags.add_argument("--max-tokens", type=int, default=128)
    flags.add_argument("--draft-tokens", type=int, default=5, help="a pass")
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = flags.parse_args(argv)
    try:
        import torch  # noqa: F401
    except ImportError:
        print("skipped: there is no PyTorch (pip install torch)")
        return SKIPPED
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
