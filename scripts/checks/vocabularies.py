"""Compares kdjax's ids with llama.cpp's, on the vocabularies in llama.cpp's repository.

    python -m scripts.checks.vocabularies llama.cpp/models

The folder holds `ggml-vocab-NAME.gguf` and beside it `.inp` and `.out`: texts, and the ids that
llama.cpp's own tests expect of them. Where the module `llama_cpp` is installed, it also encodes the
text of every token, and the two must agree. Exit status: 0 all equal, 1 not, 2 bad input.
"""

import argparse
import importlib
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

from kdjax.errors import UserError
from kdjax.models.tokenizer import PRE_TOKENIZERS, Tokenizer, load_tokenizer

_SEPARATOR = "\n__ggml_vocab_test__\n"


def read_expected(path: Path) -> list[tuple[str, list[int]]]:
    """Texts and ids that llama.cpp's tests keep for a vocabulary."""
    with path.with_name(path.name + ".inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().split(_SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines)]  # noqa: B905


def open_llama_cpp(path: Path) -> Callable[[str], list[int]] | None:
    """llama.cpp's own encoding, without special tokens; None where it is not installed."""
    try:
        llama_cpp = importlib.import_module("llama_cpp")
    except ImportError:
        return None
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return lambda text: model.tokenize(text.encode(), add_bos=False, special=False)


def texts_of_tokens(tokenizer: Tokenizer) -> list[str]:
    """The text of every token that is whole characters and in NFC.

    Qwen2's tokenizer.json asks for NFC; kdjax normalizes so, llama.cpp does not.
    """
    ordinary = (i for i in range(tokenizer.vocab_size) if i not in tokenizer.added_ids)
    texts = (tokenizer.decode([i]) for i in ordinary)
    return [x for x in texts if "\ufffd" not in x and unicodedata.is_normalized("NFC", x)]


def compare(path: Path) -> int:
    """Prints what differs, and the counts; returns how many texts have other ids."""
    tokenizer, differing = load_tokenizer(path), 0
    expected = read_expected(path)
    theirs = open_llama_cpp(path)
    if theirs:
        expected += [(text, theirs(text)) for text in texts_of_tokens(tokenizer)]
    for text, ids in expected:
        if (ours := tokenizer.encode(text, parse_special=False)) != ids:
            differing += 1
            if differing <= 5:
                print(f"  {text!r}: {ours}, expected {ids}")
    print(f"{path.name}: {differing} of {len(expected)} texts have other ids")
    return differing


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison over the vocabularies that kdjax knows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="llama.cpp's models/")
    folder = parser.parse_args(argv).folder
    known = (folder / f"ggml-vocab-{name}.gguf" for name in PRE_TOKENIZERS)
    paths = [path for path in known if path.with_name(path.name + ".inp").is_file()]
    if not paths:
        raise UserError(
            f"{folder} holds no ggml-vocab-*.gguf with its .inp and .out; give models/ of a "
            "checkout of llama.cpp."
        )
    return int(any([compare(path) for path in paths]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
