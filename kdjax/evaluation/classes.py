"""Classes of tokens (identifier, keyword, number, ...), by Pygments' lexer for the text's file."""

import ast
import bisect
import re
from collections.abc import Sequence

import numpy as np
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.token import Comment, Keyword, Literal, Name, Operator, Punctuation, String
from pygments.util import ClassNotFound

# In this order in every table; `class_ids` are indices into it.
_CODE = ("identifier", "keyword", "number", "whitespace", "comment/string", "operator")
CLASSES = (*_CODE, "text", "end of text")
_ID = {name: i for i, name in enumerate(CLASSES)}
END = _ID["end of text"]
_LINE = re.compile(r":\d+$|\.ipynb$")  # "data.jsonl:12", a text of unknown language
# Subtypes before what they belong to: `and` is Operator.Word, a string is a Literal.
_KINDS = {
    "keyword": (Operator.Word, Keyword),
    "identifier": (Name,),
    "comment/string": (Comment, String),
    "number": (Literal,),
    "operator": (Operator, Punctuation),
}


def _lexer(source: str, text: str):
    if _LINE.search(source):
        # Records carry no file name; the text of `source` is mostly Python, and prose is not.
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return TextLexer()
        return get_lexer_by_name("python")
    try:
        return get_lexer_for_filename(source)
    except ClassNotFound:
        return TextLexer()


def _class_of(kind) -> int:
    names = (name for name, parents in _KINDS.items() if any(kind in p for p in parents))
    return _ID[next(names, "text")]


def class_ids(text: str, source: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Class of each token of `text`, int8, from the characters `[start, end)` it came from.

    A token has the class of its first character other than whitespace, by the lexer for `source`
    (a file's name, or file:line). A token of whitespace alone is whitespace; one without
    characters is end of text. Prose, and files of no known language, are `text`, except numbers.
    """
    starts, kinds = [0], [_ID["text"]]
    for at, kind, _ in _lexer(source, text).get_tokens_unprocessed(text):
        starts.append(at)
        kinds.append(_class_of(kind))
    found = np.full(len(offsets), END, np.int8)
    for i, (a, b) in enumerate(offsets):
        piece = text[a:b]
        if not piece:
            continue
        if not (bare := piece.lstrip()):
            found[i] = _ID["whitespace"]
            continue
        kind = kinds[bisect.bisect_right(starts, b - len(bare)) - 1]
        if kind == _ID["text"] and bare[0].isdigit():
            kind = _ID["number"]
        # Lexers call the dots of `import a.b` part of the name.
        if kind == _ID["identifier"] and not (bare[0].isalnum() or bare[0] in "_$@"):
            kind = _ID["operator"]
        found[i] = kind
    return found


def token_bytes(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Number of UTF-8 bytes of `text` in each token, int32; they add up to the text's bytes.

    If several tokens share a character, the first gets its bytes.
    """
    sizes = [len(c.encode("utf-8", "surrogatepass")) for c in text]
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    counts, reached = np.zeros(len(offsets), np.int32), 0
    for i, (a, b) in enumerate(offsets):
        if b > reached:
            counts[i] = ends[b] - ends[max(a, reached)]
            reached = b
    return counts
