"""Compares kdjax's ids with llama.cpp's, on vocabularies and whole models in GGUF.

    python -m scripts.checks.vocabularies llama.cpp/models MODEL.gguf

A folder holds `ggml-vocab-NAME.gguf` and, beside most, `.inp` and `.out`: texts, and the ids that
llama.cpp's own tests expect of them. Where the module `llama_cpp` is installed, it also encodes the
text of every token, and of random runs of tokens, and the two must agree. Tokenizers of a kind that
kdjax refuses are listed. Exit status: 0 all equal, 1 not, 2 bad input.
"""

import argparse
import importlib
import json
import random
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from kdjax.errors import UserError, reporting
from kdjax.formats import open_table
from kdjax.models.encoders import KINDS, SPACE, is_sentencepiece
from kdjax.models.tokenizer import Tokenizer, load_tokenizer

_LONGEST = 48  # characters of a text that an extract keeps
_KEPT = ("model", "pre", "add_space_prefix")  # key-values that an extract keeps as they are
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
    """The text of every token that is whole characters and in NFC, and as many of a few in a row.

    The published tokenizers of some vocabularies normalize to NFC; so does kdjax, and llama.cpp
    does not.
    """
    ordinary = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.added_ids]
    texts = (tokenizer.decode([i]) for i in ordinary)
    whole = [x for x in texts if "\ufffd" not in x and "\0" not in x]
    draw = random.Random(0)
    runs = ["".join(draw.choices(whole, k=draw.randint(2, 12))) for _ in whole]
    return [x for x in (*whole, *runs) if unicodedata.is_normalized("NFC", x)]


def spelled(tokenizer: Tokenizer, text: str) -> str:
    """A text in the characters of tokens."""
    if is_sentencepiece(tokenizer.encoder):
        return SPACE + text.replace(" ", SPACE)
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(text)) + text


def extract(path: Path) -> dict[str, Any]:
    """Cuts a vocabulary to what its shorter texts need, whatever the cut, with ids counted anew.

    That is every token that is part of a text, and every merge of such tokens.
    """
    tokenizer, metadata = load_tokenizer(path), open_table(path).metadata
    texts = [(text, ids) for text, ids in read_expected(path) if 0 < len(text) <= _LONGEST]
    parts = {i for _, ids in texts for i in ids}
    for text in (spelled(tokenizer, text) for text, _ in texts):
        pieces = (text[a:b] for a in range(len(text)) for b in range(a + 1, len(text) + 1))
        parts |= {i for piece in pieces if (i := tokenizer.encoder.token_to_id(piece)) is not None}
    kept = sorted(parts)
    values = {f"tokenizer.ggml.{key}": metadata.get(f"tokenizer.ggml.{key}") for key in _KEPT}
    tokens = {tokenizer.tokens[i] for i in kept}
    merges = ((m, *m.split(" ")) for m in metadata.get("tokenizer.ggml.merges", []))
    values |= {
        "tokenizer.ggml.tokens": [metadata["tokenizer.ggml.tokens"][i] for i in kept],
        "tokenizer.ggml.token_type": [int(metadata["tokenizer.ggml.token_type"][i]) for i in kept],
        "tokenizer.ggml.merges": [m for m, a, b in merges if tokens.issuperset((a, b, a + b))],
        "tokenizer.ggml.eos_token_id": 0,
    }
    if "tokenizer.ggml.scores" in metadata:
        scores = metadata["tokenizer.ggml.scores"]
        values["tokenizer.ggml.scores"] = [float(scores[i]) for i in kept]
    new = {old: place for place, old in enumerate(kept)}
    return {
        "values": {key: value for key, value in values.items() if value is not None},
        "texts": [[text, [new[i] for i in ids]] for text, ids in texts],
    }


def compare(path: Path) -> int:
    """Prints what differs, and the counts; returns how many texts have other ids."""
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        print(f"{path.name}: refused: {error}")
        return 0
    inputs = path.with_name(path.name + ".inp")
    expected = read_expected(path) if inputs.is_file() else []
    theirs = open_llama_cpp(path)
    if theirs:
        expected += [(text, theirs(text)) for text in texts_of_tokens(tokenizer)]
    differing = 0
    for text, ids in expected:
        if (ours := tokenizer.encode(text, parse_special=False)) != ids:
            differing += 1
            if differing <= 5:
                print(f"  {text!r}: {ours}, expected {ids}")
    print(f"{path.name}: {differing} of {len(expected)} texts have other ids")
    return differing


@reporting
def main(argv: list[str] | None = None) -> int:
    """Runs the comparison over the files, and over the vocabularies of folders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", type=Path, nargs="+", help="llama.cpp's models/, or GGUF files")
    parser.add_argument("--extract", type=Path, help="write what tests need of them to this file")
    args = parser.parse_args(argv)
    given = args.paths
    found = [sorted(p.glob("ggml-vocab-*.gguf")) if p.is_dir() else [p] for p in given]
    if empty := [str(path) for path, files in zip(given, found, strict=True) if not files]:
        raise UserError(
            f"{', '.join(empty)} holds no ggml-vocab-*.gguf; give models/ of a checkout of "
            "llama.cpp, or a GGUF file."
        )
    if args.extract:
        paths = [p for files in found for p in files if p.with_name(p.name + ".inp").is_file()]
        kinds = {p: open_table(p).metadata["tokenizer.ggml.model"] for p in paths}
        paths = [p for p in paths if kinds[p] in KINDS]
        extracts = {path.stem.removeprefix("ggml-vocab-"): path for path in paths}
        lines = (f"{json.dumps(name)}: {json.dumps(extract(p))}" for name, p in extracts.items())
        args.extract.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    return int(any([compare(path) for files in found for path in files]))


if __name__ == "__main__":
    sys.exit(main())
