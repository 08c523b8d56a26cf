"""Counts the glossary's words (CONTRIBUTING.md) in the prose of kdjax.

Prose is docstrings, comments, and strings of two words or more, such as errors and help texts.
Names of code do not count: text between backticks is left out, and so are comments that configure a
tool. A pattern counts every use, so that nobody has to judge one: the glossary says which uses of a
word stay, and the patterns leave those out.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

# Each word of the glossary, and the pattern of the uses that it advises against.
WORDS = {
    "behind": r"\bbehind\b(?! a proxy)",
    "beside": r"\bbeside\b",
    "gives": r"\b(gives|gave)\b",
    "so many": r"\b(so|as) (many|often)\b(?!( \w+){0,3} as\b)|\bso-manieth\b",
    "the same": r"\bthe same(?=[.,;:)]| (of|for|before|after)\b)|^those\b[.,]",
    "that of": r"\b(that|those) of\b",
    "whole": r"\bwhole\b(?! numbers?\b)",
    "one's own": r"\b(one|someone|user)'s own\b|\bof (your|its|their) own\b",
    "own answers": r"\bown (answers?|texts?)\b",
    "likeliest": r"\blikeliest\b",
    "asks for": r"\bask(s|ed)? for\b|\b(is|are|was|were|be) asked\b",
    "wants": r"\b(wants?|wanted)\b",
    "who, what": r"(?-i:(?:^|[.:;] )(Who|Whoever|What|Whose) )(?![^.]*\?)",
    "told": r"\btold\b",
}
_PATTERNS = {word: re.compile(p, re.IGNORECASE) for word, p in WORDS.items()}
_TOOLS = re.compile(r"#\s*(type:|noqa|pyright:|fmt:|!)")


def read_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each docstring, comment, and string of two words or more."""
    inner = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [x.value if isinstance(x, ast.Constant) else "`_`" for x in node.values]
            yield from _pick(node.lineno, "".join(map(str, parts)))
            inner |= {id(x) for x in ast.walk(node)}
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield from _pick(node.lineno, node.value if isinstance(node.value, str) else "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _TOOLS.match(token.string):
            yield token.start[0], token.string.lstrip("# ")


def _pick(line: int, text: str) -> Iterator[tuple[int, str]]:
    if re.search(r"[A-Za-z]+\s+[A-Za-z]+", text):
        yield line, text


def find_words(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and word of each use that the glossary advises against."""
    for line, text in read_prose(source):
        text = re.sub(r"`[^`]*`", "`_`", text)
        text = re.sub(r"\s+", " ", text)
        for word, pattern in _PATTERNS.items():
            for _ in pattern.finditer(text):
                yield line, word
