"""Chooses training text: licences, files that people wrote, copies, benchmarks."""

import ast
import functools
import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence

# SPDX identifiers, and what packages wrote before there were any, without "license" and "the".
_PERMISSIVE = frozenset(
    (
        "mit",
        "mit-0",
        "mit-cmu",
        "x11",
        "expat",
        "bsd",
        "bsd-2-clause",
        "bsd-3-clause",
        "0bsd",
        "apache-2.0",
        "isc",
        "psf",
        "psf-2.0",
        "python-2.0",
        "cnri-python",
        "unlicense",
        "zlib",
        "bsl-1.0",
        "cc0-1.0",
        "ncsa",
        "apache",
        "apache 2.0",
        "apache 2",
        "apache2.0",
        "apache2",
        "apache software",
        "apache version 2.0",
        "new bsd",
        "modified bsd",
        "simplified bsd",
        "freebsd",
        "3-clause bsd",
        "2-clause bsd",
        "bsd 3-clause",
        "bsd 2-clause",
        "isc (iscl)",
        "python software foundation",
        "unlicense (unlicense)",
        "zlib/libpng",
        "mit no attribution",
        "mit no attribution (mit-0)",
        "mit (mit)",
        "dfsg approved",
    )
)
_COPYLEFT = re.compile(
    r"general public licen[sc]e|\b[al]?gpl-?v?[0-9]|mozilla public licen[sc]e|\bMPL[- ]?[12]"
    r"|all rights reserved\.? *proprietary|proprietary and confidential",
    re.IGNORECASE,
)
_GENERATED = re.compile(
    r"(auto-?|automatically |machine-? ?)generated|generated (by|from|with|using)\b|do not edit"
    r"|code ?gen(erator)?\b.*generated",
    re.IGNORECASE,
)
_OTHERS = re.compile(
    r"(^|/)(_?vendor(ed)?|_vendored_packages|third_?party|extern(al)?s?|_distutils|blib2to3)(/|$)"
)
_GENERATED_NAMES = re.compile(r"(_pb2|_pb2_grpc|_grpc|_version|versioneer|lextab|yacctab)\.py$")
_TESTS = re.compile(r"(^|/)(tests?|testing|testdata|test_[^/]*|[^/]*_test\.py|conftest\.py)(/|$)")

LARGEST, SMALLEST = 100_000, 200  # bytes of a file
_LONG_LINE = 100  # characters, on average over a file
_HEAD = 15  # lines in which a file says that it was generated; its licence may take more
SHINGLE = 5  # lines
WINDOW = 10  # words


def permissive(expression: str, classifiers: Sequence[str] = (), field: str = "") -> bool:
    """Whether a package's metadata declares a licence that lets its text be used freely.

    `expression` is License-Expression (SPDX), `classifiers` the names after "License ::", `field`
    the free License line; the first that says anything decides. Every licence joined by AND, and
    every classifier, must be permissive; of those joined by OR one is enough.
    """
    if expression.strip():
        return _expression(expression)
    if classifiers:
        return all(_known(name) for name in classifiers)
    return _expression(field.strip().split("\n")[0])


def _expression(text: str) -> bool:
    """An SPDX expression; exceptions (WITH ...) only add permissions."""
    text = re.sub(r"\s+with\s+[\w.-]+", "", text, flags=re.IGNORECASE)
    if not re.search(r"\s(and|or)\s", text, re.IGNORECASE):
        return _known(text.strip("() \t") if text.startswith("(") else text)
    words = [w.strip() for w in re.split(r"\b(and|or)\b|([()])", text, flags=re.IGNORECASE) if w]
    marks = ("and", "or", "(", ")")
    return _truth([w.lower() if w.lower() in marks else str(_known(w)) for w in words if w])


def _truth(tokens: list[str]) -> bool:
    """The value of True, False, and, or, ( and ); False if they make no expression."""
    try:
        tree = ast.parse(" ".join(tokens), mode="eval").body
    except SyntaxError:
        return False

    def value(node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            join = all if isinstance(node.op, ast.And) else any
            return join(value(part) for part in node.values)
        return isinstance(node, ast.Constant) and node.value is True

    return value(tree)


def _known(name: str) -> bool:
    name = re.sub(r"\b(the|licen[sc]e[ds]?)\b|,", " ", name.lower())
    return " ".join(name.split()).removesuffix("+") in _PERMISSIVE


def is_test(path: str) -> bool:
    """Whether a path (with /) belongs to a package's own tests."""
    return bool(_TESTS.search(path))


def why_not(path: str, text: str) -> str | None:
    """Why a Python file is no text to learn from, in a word or two; None if it is one."""
    if _OTHERS.search(path):
        return "vendored"
    if not SMALLEST <= len(text.encode("utf-8", "replace")) <= LARGEST:
        return "size"
    lines = text.split("\n")
    if _GENERATED_NAMES.search(path) or _GENERATED.search("\n".join(lines[:_HEAD])):
        return "generated"
    if _COPYLEFT.search("\n".join(lines[: 4 * _HEAD])):
        return "licence of the file"
    if len(text) / len(lines) > _LONG_LINE or max(map(len, lines)) > 20 * _LONG_LINE:
        return "long lines"
    dense = "".join(text.split())
    numbers = sum(map(len, re.findall(r"\b(?:0x[0-9a-fA-F]+|[0-9][0-9.eE+-]*)", text)))
    if numbers > 0.2 * len(dense):
        return "numbers"
    return "syntax" if parsed(text) is None else None


@functools.lru_cache(maxsize=1)
def parsed(text: str) -> ast.Module | None:
    """The syntax tree, or None for what is no Python of this interpreter's version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of older code
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _hashed(parts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest())


def shingles(text: str) -> set[int]:
    """Hashes of every 5 successive lines; blank lines, comments and white space do not count."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    lines = [line for line in lines if line and not line.startswith("#")]
    last = max(1, len(lines) - SHINGLE + 1)
    return {_hashed(lines[i : i + SHINGLE]) for i in range(last)} if lines else set()


class Copies:
    """Tells texts that repeat what was added before."""

    def __init__(self, share: float):
        self._share, self._seen = share, set[int]()

    def has(self, found: set[int]) -> bool:
        """Whether more than the share of these shingles was added before."""
        return len(found & self._seen) > self._share * len(found)

    def add(self, found: set[int]) -> None:
        """Remembers a text's shingles."""
        self._seen |= found


class Benchmark:
    """Tells texts that hold problems of a benchmark, or their solutions.

    `problems` are (entry point or "", text of prompt and solution). A text is contaminated if it
    shares two distinct windows of 10 words with one problem, names the benchmark, or defines a
    function under an entry point's name of three words or more: shorter ones, as `add`, are
    everybody's. A function that is asked about by its name may have none of these either.
    """

    _NAMED = re.compile(r"human[-_ ]?eval|\bmbpp\b|evalplus|big_?code[-_ ]?eval", re.IGNORECASE)

    def __init__(self, problems: Iterable[tuple[str, str]]):
        self._windows: dict[tuple[str, ...], set[int]] = {}
        self.entries: set[str] = set()
        for number, (entry, text) in enumerate(problems):
            self.entries.add(entry)
            for window in _windows(text):
                self._windows.setdefault(window, set()).add(number)
        self.entries.discard("")
        long = sorted(e for e in self.entries if len(e.split("_")) > 2)
        self._defined = re.compile(rf"\bdef ({'|'.join(long)})\(") if long else None

    def why(self, text: str, name: str = "") -> str | None:
        """How a text, or the function of a name, is contaminated, in a few words; None if not."""
        if self._NAMED.search(text):
            return "names a benchmark"
        if self._defined and self._defined.search(text):
            return "defines an entry point"
        shared: dict[int, set[tuple[str, ...]]] = {}
        for window in _windows(text):
            for number in self._windows.get(window, ()):
                shared.setdefault(number, set()).add(window)
        if any(len(w) > 1 for w in shared.values()):
            return "shares words"
        return "has an entry point's name" if name in self.entries else None


def _windows(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[i:] for i in range(WINDOW)), strict=False)
