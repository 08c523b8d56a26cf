"""What counting and compressing make of the demo's held-out text, for the teacher's card.

    python -m scripts.demo.baselines /tmp/demo/text --out=/tmp/demo/baselines.json

TEXT is the folder that scripts/demo/text.py writes. All figures are bits per UTF-8 byte of the same
text: a 5-gram model over the teacher's own tokens and training text; gzip -9 and xz -9e of the
text alone; and xz -9e of it after the whole training text, in a window that reaches back over all
of it: what the training text adds to the archive is not counted.
"""

import argparse
import concurrent.futures
import gzip
import json
import lzma
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kdjax import demo
from kdjax.models.tokenizer import Tokenizer, load_tokenizer
from scripts.demo.ngram import KneserNey

ORDER = 5


def training_texts(folder: Path) -> Iterator[str]:
    """The documents of train.jsonl."""
    with (folder / "train.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def heldout_texts(folder: Path) -> list[str]:
    """The held-out files, in order of their names."""
    return [path.read_text("utf-8") for path in sorted((folder / "heldout").glob("*.py"))]


def stream(texts: Iterable[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Ids of each document, the end of the text among them."""
    batch, made = [], []

    def flush() -> None:
        for ids in tokenizer.encode_batch(batch):
            made.append(np.asarray([*ids, tokenizer.end_of_text_id], np.int64))
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == 2000:
            flush()
    flush()
    return made


def ngram(folder: Path) -> dict[str, Any]:
    """The 5-gram model, on every target that the teacher is measured on."""
    tokenizer = load_tokenizer(demo.STUDENT_SHAPE)
    sizes, end = tokenizer.token_bytes, tokenizer.end_of_text_id
    assert sizes is not None
    train = np.concatenate(stream(training_texts(folder), tokenizer))
    model = KneserNey(train, ORDER, tokenizer.vocab_size)
    documents = stream(heldout_texts(folder), tokenizer)
    ids = np.concatenate([np.full(ORDER - 1, end, np.int64), *documents])
    nats = model.nats(ids)
    # As for the models: a document's first id is no target, and its end is no text.
    first = np.concatenate([np.arange(len(d)) == 0 for d in documents])
    targets = ids[ORDER - 1 :]
    scored = ~first & (targets != end)
    covered = int(sizes[targets[scored]].sum())
    bits = math.fsum(nats[scored]) / math.log(2)
    return {
        "train_tokens": len(train),
        "tokens": int(scored.sum()),
        "bytes": covered,
        "bits_per_byte": bits / covered,
    }


def xz(data: bytes, window: int) -> int:
    """Bytes that xz -9e makes, with a window of its own size."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": window}]
    return len(lzma.compress(data, lzma.FORMAT_XZ, filters=filters))


def compressors(folder: Path) -> dict[str, Any]:
    """gzip and xz alone, and xz after the training text."""
    text = "".join(heldout_texts(folder)).encode()
    before = "".join(training_texts(folder)).encode()
    window = min(max(1 << 26, len(before) + len(text)), 3 << 29)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:  # the library lets go of the GIL
        sizes = list(pool.map(xz, (before + text, before, text), (window, window, 1 << 26)))
    bits = {
        "gzip": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * sizes[2] / len(text),
        "xz_after_training_text": 8 * (sizes[0] - sizes[1]) / len(text),
    }
    return {"bytes": len(text), "training_bytes": len(before), "bits_per_byte": bits}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        packed = pool.submit(compressors, args.text)
        figures: dict[str, Any] = {"ngram": ngram(args.text), "order": ORDER}
        print(f"{ORDER}-gram: {figures['ngram']}", file=sys.stderr, flush=True)
        figures["compressors"] = packed.result()
    args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
