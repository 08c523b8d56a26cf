"""Whether one model may draft for another: equal ids, and llama.cpp's rules for a pair."""

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdjax.errors import UserError
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.tokenizer import Tokenizer

_log = logging.getLogger("kdjax")

# From llama.cpp's common/speculative.cpp.
_MOST_MORE_TOKENS, _FIRST_COMPARED = 128, 5
_TOKENS = "tokenizer.ggml.tokens"


def check_same_ids(big: Tokenizer | None, small: Tokenizer | None) -> None:
    """Raises `UserError` unless each id of both vocabularies is one token in both."""
    if big is None or small is None:
        return
    pairs = enumerate(zip(big.tokens, small.tokens, strict=False))
    if differing := next(((i, a, b) for i, (a, b) in pairs if a != b), None):
        i, ours, theirs = differing
        raise UserError(
            f"the draft's vocabulary is another: id {i} is {theirs!r} to it and {ours!r} to the "
            "model. Choose a draft of the same tokenizer."
        )


def warn_if_refused(big: Checkpoint, small: Checkpoint) -> None:
    """Logs once why llama.cpp would refuse `small` as a draft for `big`, if it would."""
    if reason := why_refused(big.header.metadata, small.header.metadata):
        _warn(big.path, small.path, reason)


@functools.cache  # a command looks at a pair before its long work, and its run does
def _warn(big: Path, small: Path, reason: str) -> None:
    _log.warning("llama.cpp would not draft with this pair: %s", reason)


def why_refused(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Why llama.cpp would not let one model draft for another; None if it would.

    `ours` are the key-values of the big model's GGUF file, `theirs` the draft's.

    Its rules: vocabularies of one type, equal BOS and EOS ids, sizes at most 128 apart, and equal
    text of each token from id 5 on. A server that refuses logs it, and serves without a draft.
    """
    for name, metadata in (("model", ours), ("draft", theirs)):
        if _TOKENS not in metadata:
            return f"the {name} is no GGUF file with a vocabulary: export it as one"
    kinds = [x.get("tokenizer.ggml.model") for x in (ours, theirs)]
    if kinds[0] != kinds[1]:
        return f"the model's vocabulary is of type {kinds[0]!r}, the draft's of {kinds[1]!r}"
    for end in ("bos", "eos"):
        adds = [_adds(x, end) for x in (ours, theirs)]
        if adds[0] != adds[1]:
            return f"the model {_say(adds[0], end)}, the draft {_say(adds[1], end)}"
        ids = [x.get(f"tokenizer.ggml.{end}_token_id") for x in (ours, theirs)]
        if adds[0] and ids[0] != ids[1]:
            return f"{end} is {ids[0]} to the model and {ids[1]} to the draft"
    a, b = (list(x[_TOKENS]) for x in (ours, theirs))
    if abs(len(a) - len(b)) > _MOST_MORE_TOKENS:
        return (
            f"the model has {len(a):,} tokens and the draft {len(b):,}: more than "
            f"{_MOST_MORE_TOKENS} apart"
        )
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if i >= _FIRST_COMPARED and one != other:
            return f"id {i} is {one!r} to the model and {other!r} to the draft"
    return None


def _adds(metadata: Mapping[str, Any], end: str) -> bool:
    """Whether llama.cpp adds the token to a text, by the header or the kind of vocabulary."""
    told = metadata.get(f"tokenizer.ggml.add_{end}_token")
    if told is not None:
        return bool(told)
    return end == "bos" and metadata.get("tokenizer.ggml.pre") == "llama-bpe"


def _say(adds: bool, end: str) -> str:
    place = "before" if end == "bos" else "after"
    return f"puts {end} {place} a text" if adds else f"puts no {end} {place} a text"
