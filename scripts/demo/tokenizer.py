"""Trains a byte-level BPE tokenizer that cuts text as Qwen2's does; writes a Hugging Face folder.

    python -m scripts.demo.tokenizer FOLDER --text=/tmp/demo/text/train.jsonl --size=4000

GGUF files name this way of cutting `qwen2`. The last id is the end-of-text token. The text is the
patterns of `data.train`; `--megabytes` takes documents spread evenly over it up to that much.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as cuts

from kdjax.data.text import documents, find_files
from kdjax.models.pretokenizers import PRE_TOKENIZERS

END = "<|endoftext|>"


def untrained() -> Tokenizer:
    """An empty tokenizer with Qwen2's normalizer, cut and decoder."""
    tokenizer = Tokenizer(models.BPE())
    parts: dict[str, Any] = {
        "normalizer": normalizers.NFC(),
        "pre_tokenizer": cuts.Sequence(
            [
                *(cuts.Split(Regex(c), "isolated") for c in PRE_TOKENIZERS["qwen2"].cuts),
                cuts.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        "decoder": decoders.ByteLevel(),
    }
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def texts(patterns: str, most: float) -> Iterator[str]:
    """Texts of the patterns, every n-th so that they come to about `most` bytes."""
    files = find_files(patterns)
    every = max(1, round(sum(path.stat().st_size for path in files) / most))
    # Plain text and `text` records need no tokenizer.
    for i, document in enumerate(documents(files, cast(Any, None))):
        if i % every == 0:
            yield document.text


def train(patterns: str, size: int, most: float) -> Tokenizer:
    """A tokenizer of `size` ids, bytes and end-of-text among them."""
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=cuts.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,  # rulers of hyphens are not worth ids
    )
    tokenizer.train_from_iterator(texts(patterns, most), trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", required=True, help="folders, globs, files, joined by commas")
    parser.add_argument("--size", type=int, default=4000, help="ids, end-of-text included")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of text at most, about")
    args = parser.parse_args()
    tokenizer = train(args.text, args.size, args.megabytes * 1e6)
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    text = json.dumps(config, indent=2) + "\n"
    (args.folder / "tokenizer_config.json").write_text(text)
    print(f"{args.folder}: {tokenizer.get_vocab_size():,} ids")


if __name__ == "__main__":
    main()
