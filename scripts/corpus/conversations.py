"""Questions and answers made from documented functions that stand on their own."""

import ast
import builtins
import hashlib
import random
import re
import symtable
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from scripts.corpus.filters import parsed

# What an answer may import.
_OUTSIDE = sys.stdlib_module_names | {
    "numpy",
    "scipy",
    "pandas",
    "torch",
    "jax",
    "tensorflow",
    "sklearn",
    "requests",
    "yaml",
    "PIL",
}
_LEAST, _MOST = 3, 40  # lines of a function without its docstring
_HELPERS, _HELPER_LINES = 3, 40  # what else of its module an answer may hold
_ROLE = re.compile(r":[a-z:]+:`~?\.?([^`<]+?)(?:\s*<[^`>]*>)?`")
_NO_SENTENCE = re.compile(
    r"deprecat|internal|todo|fixme|http|^see |\bself\b|>>>|::|--|:param|:return|:arg|:math"
    r"|\bthis (class|method|module|package|library)\b",
    re.IGNORECASE,
)


class Function(NamedTuple):
    """A function of a module, with what it needs of that module."""

    name: str
    context: str  # imports, then constants and helpers as in the file; "" if it needs none
    opening: str  # up to the end of the docstring, as in the file
    source: str  # all of it, as in the file
    signature: str  # "name(a, b=1)"
    says: str  # the docstring's first paragraph, on one line
    examples: str  # its doctest lines; "" if it has none

    def after_context(self, code: str) -> str:
        """The code below what it needs."""
        return f"{self.context}\n\n\n{code}" if self.context else code

    def key(self) -> str:
        """The same for functions that differ in their docstrings and layout only."""
        node = ast.parse(self.source).body[0]
        assert isinstance(node, ast.FunctionDef)
        node.body = node.body[1:]
        # Python 3.12 adds a field, 3.13 omits empty ones: the text is that of 3.11.
        text = ast.dump(node, show_empty=True) if sys.version_info >= (3, 13) else ast.dump(node)
        return hashlib.sha256(text.replace(", type_params=[]", "").encode()).hexdigest()


def functions(text: str) -> Iterator[Function]:
    """Functions of a module that can be asked for, in order.

    Those at its top level, not decorated, documented by a sentence, 3 to 40 lines long, that use
    nothing but parameters, builtins, imports of well-known modules, and at most 3 small functions
    and constants of the module, which then belong to the answer.
    """
    tree = parsed(text)
    if tree is None:
        return
    module = _Module(tree, text.split("\n"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (found := _function(node, module)):
            yield found


def _outside(module: str | None) -> bool:
    return bool(module) and module != "__future__" and module.split(".")[0] in _OUTSIDE


class _Module:
    """Parts of a module that complete its functions."""

    def __init__(self, tree: ast.Module, lines: list[str]):
        self.lines = lines
        self.imports: dict[str, str] = {}  # name -> the statement that imports it
        self.helpers: dict[str, ast.stmt] = {}
        self._read(tree.body)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                self.helpers[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.helpers[node.targets[0].id] = node

    def _read(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.If | ast.Try):  # TYPE_CHECKING, or one version or another
                self._read(node.body)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name
                    if _outside(alias.name) and "." not in name:
                        self.imports[name] = ast.unparse(ast.Import([alias]))
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and _outside(node.module):
                for alias in node.names:
                    one = ast.ImportFrom(node.module, [alias], 0)
                    self.imports[alias.asname or alias.name] = ast.unparse(one)

    def source(self, node: ast.stmt) -> str:
        """A statement as in the file."""
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno]).rstrip()

    def context(self, source: str, name: str) -> str | None:
        """Imports and helpers that a function needs; None if they are too many or elsewhere."""
        imports, helpers, known = set[str](), list[ast.stmt](), {name}
        wanted = free_names(source) - known
        while wanted:
            one = wanted.pop()
            known.add(one)
            if one in self.imports:
                imports.add(self.imports[one])
            elif one in self.helpers:
                helpers.append(self.helpers[one])
                wanted |= free_names(self.source(helpers[-1])) - known
            else:
                return None
            size = sum((h.end_lineno or h.lineno) - h.lineno + 1 for h in helpers)
            if len(helpers) > _HELPERS or size > _HELPER_LINES:
                return None
        parts = ["\n".join(sorted(imports))] if imports else []
        parts += [self.source(h) for h in sorted(helpers, key=lambda h: h.lineno)]
        return "\n\n\n".join(parts)


def _function(node: ast.FunctionDef, module: _Module) -> Function | None:
    docstring, name = ast.get_docstring(node), node.name
    if not docstring or node.decorator_list or name.startswith("test") or len(node.body) < 2:
        return None
    first, end = node.body[0], node.end_lineno or node.lineno
    doc_lines = (first.end_lineno or first.lineno) - first.lineno + 1
    says = sentence(docstring)
    if not _LEAST <= end - node.lineno + 1 - doc_lines <= _MOST or not says or doc_lines > _MOST:
        return None
    source = module.source(node)
    context = module.context(source, name)
    if context is None or not _does_something(node):
        return None
    opening = "\n".join(module.lines[node.lineno - 1 : first.end_lineno]).rstrip()
    signature = f"{name}({ast.unparse(node.args)})"
    if node.returns is not None:
        signature += f" -> {ast.unparse(node.returns)}"
    return Function(name, context, opening, source, signature, says, _examples(docstring))


def free_names(source: str) -> set[str]:
    """Names that a function reads from outside, builtins left out."""
    found: set[str] = set()

    def walk(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            outside = symbol.is_global() or (top and not symbol.is_assigned())
            if outside and symbol.is_referenced():
                found.add(symbol.get_name())
            elif symbol.is_declared_global():  # it writes what is not its own
                found.add(f"global {symbol.get_name()}")
        for child in table.get_children():
            walk(child, False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes of older code
        walk(symtable.symtable(source, "function", "exec"), True)
    return found - set(dir(builtins))


def _does_something(node: ast.FunctionDef) -> bool:
    """Not a stub, a warning about itself, or one that raises whatever it is given."""
    rest = node.body[1:]
    return not isinstance(rest[0], ast.Raise | ast.Pass) and any(
        isinstance(part, ast.Return | ast.Yield | ast.YieldFrom | ast.For | ast.While | ast.With)
        for statement in rest
        for part in ast.walk(statement)
    )


def sentence(docstring: str) -> str:
    """A docstring's first paragraph on one line if it is a plain sentence, else ""."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    paragraph = _ROLE.sub(r"`\1`", paragraph).replace("``", "`")
    words = paragraph.split()
    if not 3 <= len(words) <= 60 or not paragraph.isascii() or _NO_SENTENCE.search(paragraph):
        return ""
    if not words[0].strip("`',").isalpha() or ": " in paragraph[:20]:
        return ""
    return paragraph[0].upper() + paragraph[1:] + ("" if paragraph[-1] in ".!`" else ".")


def _examples(docstring: str) -> str:
    """The doctest lines of a docstring, with what they print."""
    kept, inside = [], False
    for line in docstring.split("\n"):
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))
        if inside:
            kept.append(line)
    return textwrap.dedent("\n".join(kept)).strip()


_COMPLETE = (
    "Complete the following Python function.\n\n{code}",
    "Please complete this function:\n\n{code}",
    "Fill in the body of this Python function. Answer with the whole function.\n\n{code}",
    "{code}\n\nImplement the function above.",
    "I have the signature and the docstring. Can you write the rest?\n\n{code}",
)
_WRITE = (
    "Write a Python function `{signature}`. {says}{examples}",
    "Implement `{signature}` in Python.\n\n{says}{examples}",
    "I need a Python function called `{name}`. What it should do: {says}{examples}",
    "Please write a function in Python.\n\nSignature: `{signature}`\nDescription: {says}{examples}",
    "{says}\n\nWrite that as a Python function named `{name}`, with a docstring.{examples}",
    "How would you write `{signature}` in Python? {says}{examples}",
)
_BEFORE = (
    "Here is the function:",
    "Here is an implementation of `{name}`:",
    "Sure, here is `{name}`:",
    "This function does it:",
    "You can write it like this:",
)


def conversations(function: Function) -> list[list[dict[str, str]]]:
    """Two conversations whose answer is the function: it is completed, and it is described.

    Which words are used, the function's text decides.
    """
    draw = random.Random(function.source)
    code = f"```python\n{function.after_context(function.opening)}\n```"
    shown = f"\n\nFor example:\n\n```\n{function.examples}\n```" if function.examples else ""
    described = dict(
        name=function.name, signature=function.signature, says=function.says, examples=shown
    )
    asked = (
        draw.choice(_COMPLETE).format(code=code),
        draw.choice(_WRITE).format(**described),
    )
    answer = f"```python\n{function.after_context(function.source)}\n```"
    made = []
    for question in asked:
        before = draw.choice(_BEFORE).format(name=function.name) + "\n\n"
        said = before + answer if draw.random() < 0.4 else answer
        made.append([dict(role="user", content=question), dict(role="assistant", content=said)])
    return made
