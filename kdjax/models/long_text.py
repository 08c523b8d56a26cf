"""Encodes long texts in pieces: `tokenizers` takes some 150 bytes for each character of a text.

A text is cut where a space follows another character, and only where the ids on both sides do not
depend on characters further away. Each piece is encoded with its surroundings, so that the
pre-tokenizer and merges find the words that they would find in the full text.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer as Encoder

_log = logging.getLogger("kdjax")

PIECE = 100_000  # characters
LONG = 2 * PIECE  # texts up to this length are encoded in one piece
AROUND = 500  # characters on both sides that a piece is encoded with
_AT_ONCE = 16  # pieces, on all cores
_TRIES = 100  # places tried for a cut
_PLACE = re.compile(r"\S(?=\s)")


class _Cut(NamedTuple):
    at: int
    around: int  # 0 at the ends, and if no place was safe


def _encode(encoder: Encoder, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids (uint32) and the characters `[start, end)` of each, int64 `[n, 2]`, for each text."""
    encoded = encoder.encode_batch(texts, add_special_tokens=False)
    return [
        (np.array(e.ids, np.uint32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encoded
    ]


def encode_texts(encoder: Encoder, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The joined results of `encode_pieces`; short texts are encoded all at once."""
    short = iter(_encode(encoder, [text for text in texts if len(text) <= LONG]))
    found = []
    for text in texts:
        if len(text) <= LONG:
            found.append(next(short))
        else:
            ids, offsets = zip(*encode_pieces(encoder, text), strict=True)
            found.append((np.concatenate(ids), np.concatenate(offsets)))
    return found


def _is_safe(encoder: Encoder, text: str, at: int) -> bool:
    """Whether the ids around `at` do not depend on characters more than `AROUND` away.

    Four beginnings are tried, one character apart: ids that depend on the beginning, such as merges
    of two in "xxxx", agree by chance at some distances.
    """
    spans = [(max(0, at - 2 * AROUND + i), at + AROUND) for i in range(4)]
    spans.append((at - AROUND, at + 2 * AROUND))
    near = []
    encoded = _encode(encoder, [text[start:end] for start, end in spans])
    for (ids, offsets), (start, _) in zip(encoded, spans, strict=True):
        begins = offsets[:, 0] + start - at
        kept = abs(begins) < AROUND // 2
        near.append((ids[kept].tolist(), begins[kept].tolist()))
    return all(other == near[0] for other in near)


def _find_cuts(encoder: Encoder, text: str, source: str) -> Iterator[_Cut]:
    """The beginning, places to cut, and the end."""
    yield _Cut(0, 0)
    at, warned = 0, False
    while len(text) - at > LONG:
        start, cut = at + PIECE, None
        for _ in range(_TRIES):
            place = _PLACE.search(text, start, at + LONG)
            if place is None:
                break
            if _is_safe(encoder, text, place.end()):
                cut = _Cut(place.end(), AROUND)
                break
            start = place.end() + AROUND
        if cut is None:
            cut = _Cut(at + PIECE, 0)
            if not warned:
                _log.warning(
                    "%s: found no safe place to cut %d characters from character %d on, which lack "
                    "spaces; they are cut anywhere, so a few ids may differ from an uncut text's",
                    source,
                    LONG,
                    at,
                )
            warned = True
        yield cut
        at = cut.at
    yield _Cut(len(text), 0)


def encode_pieces(
    encoder: Encoder, text: str, source: str = "text"
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids (uint32 `[n]`) and the characters `[start, end)` of each (int64 `[n, 2]`), in order.

    A few pieces are encoded at a time, so that memory does not grow with the text. Warns once,
    naming `source`, of a text that has no safe place to cut.
    """
    waiting: list[tuple[_Cut, _Cut]] = []

    def encode_waiting() -> tuple[np.ndarray, np.ndarray]:
        spans = [(a.at - a.around, b.at + b.around) for a, b in waiting]
        ids, offsets = [], []
        encoded = _encode(encoder, [text[start:end] for start, end in spans])
        for (a, b), (start, _), (some, places) in zip(waiting, spans, encoded, strict=True):
            places += start
            first, last = np.searchsorted(places[:, 0], (a.at, b.at))
            ids.append(some[first : last if b.around else None])
            offsets.append(places[first : last if b.around else None])
        waiting.clear()
        return np.concatenate(ids), np.concatenate(offsets)

    before = None
    for cut in _find_cuts(encoder, text, source):
        if before is not None:
            waiting.append((before, cut))
        before = cut
        if len(waiting) == _AT_ONCE:
            yield encode_waiting()
    if waiting:
        yield encode_waiting()
