"""Encoders of `tokenizers` from the vocabulary of a GGUF file: byte-level BPE, and SentencePiece's.

SentencePiece writes a space as U+2581, has a token for each byte that no other token covers, and
merges the pair whose token has the highest score. Its scores become merges here, in the order that
Transformers derives from a tokenizer.model.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from kdjax.models.pretokenizers import PRE_TOKENIZERS, Rule

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama_token_type in llama.h
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # what text is searched for before it is cut
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # in SentencePiece's tokens


class EncoderParts(NamedTuple):
    """Parts of an encoder."""

    tokens: Sequence[str]  # by id
    types: Sequence[int]
    merges: Sequence[tuple[str, str]]  # in order of rank
    rule: Rule  # how text is cut
    prefix: bool  # whether a space is put before a text

    def ids(self) -> dict[str, int]:
        """Ids by token, up to the last that is not added; added tokens get the ids after it."""
        end = max((i + 1 for i, kind in enumerate(self.types) if kind not in ADDED), default=0)
        return {token: i for i, token in enumerate(self.tokens[:end])}


def _cut(rule: Rule) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in rule.cuts]


def byte_level(words: EncoderParts) -> Encoder:
    """An encoder whose tokens are spelt in GPT-2's characters for bytes."""
    model = models.BPE(words.ids(), list(words.merges), ignore_merges=words.rule.whole)
    encoder = Encoder(model)
    if words.rule.nfc:
        encoder.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*_cut(words.rule), last])
    encoder.decoder = decoders.ByteLevel()
    return encoder


def sentencepiece(words: EncoderParts) -> Encoder:
    """An encoder whose tokens are text with marked spaces, and bytes spelt <0x0A>."""
    unknown = next(
        (t for t, kind in zip(words.tokens, words.types, strict=True) if kind == UNKNOWN), None
    )
    model = models.BPE(
        words.ids(),
        list(words.merges),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=words.rule.whole,
    )
    encoder = Encoder(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    back: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if words.prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    encoder.normalizer = normalizers.Sequence(steps)
    if words.rule.cuts:
        encoder.pre_tokenizer = pre_tokenizers.Sequence(_cut(words.rule))
    encoder.decoder = decoders.Sequence(back)
    return encoder


class TokenizerKind(NamedTuple):
    """A value of `tokenizer.ggml.model`."""

    build: Callable[[EncoderParts], Encoder]
    rules: Mapping[str, Rule]  # by `tokenizer.ggml.pre`; a single rule holds whatever the file says
    scored: bool = False  # merges follow from scores

    def rule(self, pre: str) -> Rule | None:
        """The rule of this name, or the only rule; None for an unknown name."""
        return self.rules.get(pre) if len(self.rules) > 1 else next(iter(self.rules.values()))


KINDS = {
    "gpt2": TokenizerKind(byte_level, PRE_TOKENIZERS),
    "llama": TokenizerKind(sentencepiece, {"default": Rule((), bos=True)}, scored=True),
    # No merge makes a token of several line feeds.
    "gemma4": TokenizerKind(
        sentencepiece, {"default": Rule((r"[^\n]+|[\n]+",), whole=True, bos=True)}
    ),
}


def rank_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The pairs of tokens that make a token, the highest score first; without added tokens."""
    ids = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind not in ADDED}
    pairs = []
    for token, i in ids.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        made = [(left, right) for left, right in cuts if left in ids and right in ids]
        made.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        pairs += [(scores[i], len(left), len(right), (left, right)) for left, right in made]
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return [pair[3] for pair in pairs]


def score_by_rank(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Scores from which `rank_by_score` derives these merges; 0 for tokens without a merge."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, 0)) for token in tokens]


def drop_added(merges: Sequence[str], added: Sequence[str]) -> list[str]:
    """The merges without added tokens, which are cut out of text before merging."""
    names = frozenset(added)
    parts = ((merge, *merge.split(" ")) for merge in merges)
    return [m for m, left, right in parts if names.isdisjoint((left, right, left + right))]


def _decodes(encoder: Encoder, step: bytes) -> bool:
    return encoder.decoder is not None and step in encoder.decoder.__getstate__()


def is_byte_level(encoder: Encoder) -> bool:
    """Whether tokens are spelt in GPT-2's characters for bytes."""
    return _decodes(encoder, b'"ByteLevel"')


@functools.cache
def byte_alphabet() -> dict[str, bytes]:
    """The byte of each character of GPT-2's alphabet; printable bytes are themselves."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in own)
    shifted = {chr(256 + n): bytes([b]) for n, b in enumerate(others)}
    return {chr(b): bytes([b]) for b in own} | shifted


def is_sentencepiece(encoder: Encoder) -> bool:
    """Whether tokens are text with marked spaces, and single bytes spelt <0x0A>."""
    return _decodes(encoder, b'"ByteFallback"')


def puts_space(encoder: Encoder) -> bool:
    """Whether a space is put before a text."""
    described = json.loads(encoder.to_str())
    steps = json.dumps([described["normalizer"], described["pre_tokenizer"]])
    never = '"prepend_scheme": "never"' in steps
    return '"Prepend"' in steps or ('"Metaspace"' in steps and not never)


def puts_one_space(encoder: Encoder) -> bool:
    """Whether that space is left out of a text that begins with one; llama.cpp puts it always."""
    return puts_space(encoder) and '"Prepend"' not in encoder.to_str()


def spell(encoder: Encoder, tokens: Sequence[str]) -> tuple[str, ...]:
    """Tokens as merges spell them: files write SentencePiece's user-defined ones with spaces."""
    if not is_sentencepiece(encoder):
        return tuple(tokens)
    return tuple(token.replace(" ", SPACE) for token in tokens)


def decoder_within(encoder: Encoder) -> decoders.Decoder | None:
    """The decoder without the step that removes the space before a text."""
    if encoder.decoder is None:
        return None
    described = json.loads(encoder.decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    kept = [step for step in steps if step["type"] != "Strip"]
    kept = [s | {"prepend_scheme": "never"} if s["type"] == "Metaspace" else s for s in kept]
    within = decoders.Sequence([])
    within.__setstate__(json.dumps({"type": "Sequence", "decoders": kept}).encode())
    return within


def add_tokens(encoder: Encoder, words: EncoderParts) -> dict[int, int | None]:
    """Adds the tokens that text is searched for; returns the ids that differ from the file's."""
    added = [i for i, kind in enumerate(words.types) if kind in ADDED]
    encoder.add_tokens(
        [
            AddedToken(words.tokens[i], special=words.types[i] != USER_DEFINED, normalized=False)
            for i in added
        ]
    )
    found = {i: encoder.token_to_id(words.tokens[i]) for i in added}
    return {i: got for i, got in found.items() if got != i}
