"""Places in the code by a dotted path and a few words, which layout and renamings do not lose.

`kdjax.data.rows.Packer.place` is a function, class or module. Its text is compared as a list of
words and signs: spaces, line breaks, comments and the comma before a closing bracket do not count.
"""

import ast
import functools
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CODE = ("kdjax", "scripts")  # where faults may be planted: a changed test would prove nothing
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)",
    re.DOTALL,
)
_WORD = re.compile(r"\w+|[^\w\s]")
_CLOSING = (")", "]", "}")


class _Word(NamedTuple):
    text: str
    start: int
    end: int


class Place(NamedTuple):
    """Characters `[start, end)` of a file."""

    file: Path
    scope: str  # where they were found; "" for a text whose lines are as far in as they will be
    start: int
    end: int
    renamed: Mapping[str, str]  # names of the text that was looked for, as they are there

    def plant(self, replace: str) -> str:
        """The file's text with `replace` in this place; lines are indented as the place's line."""
        text = self.file.read_text(encoding="utf-8")
        for old, new in self.renamed.items():
            replace = re.sub(rf"\b{old}\b", new, replace)
        line = text[text.rfind("\n", 0, self.start) + 1 : self.start]
        indent = line[: len(line) - len(line.lstrip())] if self.scope else ""
        return text[: self.start] + replace.replace("\n", "\n" + indent) + text[self.end :]


def split_words(text: str) -> list[_Word]:
    """The words and signs of Python code, which need be no whole statement."""
    bare = _STRING_OR_COMMENT.sub(lambda m: " " * len(m[0]) if m["comment"] else m[0], text)
    words = [_Word(match[0], *match.span()) for match in _WORD.finditer(bare)]
    behind = [word.text for word in words[1:]] + [""]
    return [w for w, b in zip(words, behind, strict=False) if w.text != "," or b not in _CLOSING]


class _Source:
    """A file's text, words, and the characters of its functions and classes by dotted path."""

    def __init__(self, file: Path, module: str, text: str):
        self.file = file
        self.words = split_words(text)
        self.scopes = {module: (0, len(text))}
        lines = [0]
        for line in text.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))

        def walk(nodes: Sequence[ast.stmt], path: str) -> None:
            for node in nodes:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    name = f"{path}.{node.name}"
                    # A property and its setter are one scope.
                    start, _ = self.scopes.get(name, (lines[first - 1], 0))
                    self.scopes[name] = start, lines[node.end_lineno or first]
                    if isinstance(node, ast.ClassDef):
                        walk(node.body, name)
                elif isinstance(node, ast.If | ast.Try | ast.With):
                    walk(node.body, path)

        walk(ast.parse(text).body, module)

    def find(self, scope: str, words: Sequence[str], *, renamed: bool = False) -> Iterator[Place]:
        """The places in a scope that hold these words, or the same but for some names."""
        start, end = self.scopes[scope]
        held = [word for word in self.words if start <= word.start and word.end <= end]
        texts = [word.text for word in held]
        gone = {w for w in words if w.isidentifier() and not keyword.iskeyword(w)} - set(texts)
        if gone and not renamed:
            return
        for at in range(len(texts) - len(words) + 1):
            names = _renaming(words, texts[at : at + len(words)], gone)
            if names is not None:
                last = held[at + len(words) - 1]
                yield Place(self.file, scope, held[at].start, last.end, names)


def _renaming(words: Sequence[str], texts: Sequence[str], gone: set[str]) -> dict[str, str] | None:
    """The names that stand for those that are gone, one for each; None if the words differ."""
    names: dict[str, str] = {}
    for word, text in zip(words, texts, strict=True):
        if word == text:
            continue
        if word not in gone or not text.isidentifier() or keyword.iskeyword(text):
            return None
        if names.setdefault(word, text) != text:
            return None
    return names if len(set(names.values())) == len(names) else None


def _open(root: Path, file: Path) -> _Source:
    parts = file.relative_to(root).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return _parse(file, module, file.read_text(encoding="utf-8"))


@functools.cache
def _parse(file: Path, module: str, text: str) -> _Source:
    return _Source(file, module, text)


def _sources(folder: Path) -> Iterator[_Source]:
    for file in sorted(folder.rglob("*.py")):
        yield _open(folder.parent, file)


def find_places(root: Path, scope: str, find: str) -> list[Place]:
    """Where the words of `find` stand in `scope`, the path of a function, class or module.

    Names that the scope no longer has may stand there for others. Else the text has moved: to
    another scope of that name, or to wherever its folder (`kdjax`, `scripts`) has it once.
    """
    root, words = root.resolve(), [word.text for word in split_words(find)]
    parts = scope.split(".")
    paths = [root.joinpath(*parts[:n]) for n in range(len(parts), 0, -1)]
    files = [f for path in paths for f in (path.with_suffix(".py"), path / "__init__.py")]
    named = next((_open(root, file) for file in files if file.is_file()), None)
    if named is not None and scope in named.scopes:
        for renamed in (False, True):
            if places := list(named.find(scope, words, renamed=renamed)):
                return places
    sources = list(_sources(root / parts[0])) if parts[0] in CODE else []
    alike = [(s, path) for s in sources for path in s.scopes if path.split(".")[-1] == parts[-1]]
    whole = [(source, next(iter(source.scopes))) for source in sources]
    for scopes, renamed in ((alike, False), (whole, False), (alike, True)):
        places = [p for source, path in scopes for p in source.find(path, words, renamed=renamed)]
        if len(places) == 1:
            return places
    return []
