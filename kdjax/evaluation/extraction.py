"""Finds the program in a chat model's answer: its code block, and what the function needs of it.

Fences follow CommonMark, with three forms that chat models also write: an indented fence, an
opening fence after text, and a closing fence within a string. Names are resolved by `symtable`, so
that a parameter is never taken for a global.
"""

import ast
import dataclasses
import itertools
import re
import symtable
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_OPENING = re.compile(r"(?P<before>.*?)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)$")
_AFTER_TEXT = re.compile(r"\s*(?:python|py)?[\d.]*\s*$", re.IGNORECASE)
_CLOSING = re.compile(r"\s*(`{3,}|~{3,})\s*$")
_CLOSINGS = 8  # closing fences that are tried: more would take quadratic time on hostile text
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_ENDS = {"exit", "quit", "_exit", "abort", "main"}  # calls that end a program, as unittest.main()
_REFUSED = (SyntaxError, ValueError, RecursionError, MemoryError)  # of Python's own parser


class Code(NamedTuple):
    """An answer's program; `futures`, imports of `__future__`, come before anything else."""

    futures: str
    body: str


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Top-level statements that share lines, and the global names that they touch."""

    text: str
    nodes: tuple[ast.stmt, ...]
    binds: frozenset[str]
    imports: frozenset[str]  # the names among `binds` that come by an import
    stores: frozenset[str]  # names whose attributes or items are assigned
    reads: frozenset[str]  # also within functions and classes

    @property
    def defines(self) -> bool:
        """Whether it only defines and imports."""
        return all(isinstance(node, _DEFINED) for node in self.nodes)

    @property
    def future(self) -> bool:
        """Whether it imports from `__future__`."""
        return any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in self.nodes)

    @property
    def ends(self) -> bool:
        """Whether it asserts, or calls what ends a program."""
        calls = (n.func for n in self._walk() if isinstance(n, ast.Call))
        named = (getattr(f, "attr", getattr(f, "id", "")) for f in calls)
        return any(isinstance(n, ast.Assert) for n in self.nodes) or not _ENDS.isdisjoint(named)

    def _walk(self) -> Iterator[ast.AST]:
        return itertools.chain.from_iterable(map(ast.walk, self.nodes))


def extract_code(answer: str, asked: Sequence[str], *, opened: bool) -> Code:
    """Extracts the code block that defines the `asked` names, and what they need of it.

    An `opened` answer begins inside a code block, which counts if it defines the names. Of several
    other blocks the last one that defines them counts, as the answer's last word; names that it
    lacks are taken from the other blocks. Text up to `</think>` is no answer.
    """
    blocks = []
    if opened:
        blocks = [_first_closed(answer)]
    if not (blocks and _count_bound(blocks[0], asked)):
        said = answer if opened else _skip_thought(answer)
        # Without any fence all of the text is taken for code.
        blocks = _find_blocks(said) or blocks or [said]
    parsed = [_parse(block) for block in blocks]
    counts = [sum(name in _bound(units) for name in asked) for units in parsed]
    if not any(counts):
        return Code("", max(blocks, key=len))
    last = max(range(len(blocks)), key=lambda i: (counts[i], i))
    others = [unit for i, units in enumerate(parsed) if i != last for unit in units]
    units = _select(parsed[last], others, frozenset(asked))
    futures = [unit.text for unit in units if unit.future]
    return Code("\n".join(futures), "\n".join(unit.text for unit in units if not unit.future))


def _skip_thought(answer: str) -> str:
    """The text after a model's thought; nothing if the thought has no end."""
    _, ended, rest = answer.rpartition("</think>")
    return "" if not ended and answer.lstrip().startswith("<think>") else rest


def _first_closed(answer: str) -> str:
    """The code of an answer that begins inside a block."""
    return _close(answer.split("\n"), "```")[0]


def _close(lines: Sequence[str], marks: str) -> tuple[str, int]:
    """The code up to the fence that closes it, and the number of its lines.

    That is the first closing fence, unless only the code up to a later one is Python: the first
    lies within a string.
    """

    def closes(line: str) -> bool:
        found = _CLOSING.match(line)
        return bool(found) and found[1].startswith(marks)

    ends = [i for i, line in enumerate(lines) if closes(line)] or [len(lines)]
    for end in ends[:_CLOSINGS]:
        if _parse(code := "\n".join(lines[:end])):
            return code, end
    return "\n".join(lines[: ends[0]]), ends[0]


def _find_blocks(text: str) -> list[str]:
    """The code of every fenced block; one that is not closed goes on to the text's end."""
    lines, blocks, i = text.split("\n"), [], 0
    while i < len(lines):
        found = _OPENING.match(lines[i])
        i += 1
        if found and (not found["before"].strip() or _AFTER_TEXT.match(found["info"])):
            code, count = _close(lines[i:], found["marks"])
            blocks.append(code)
            i += count + 1
    return blocks


def _count_bound(code: str, asked: Sequence[str]) -> int:
    bound = _bound(_parse(code))
    return sum(name in bound for name in asked)


def _bound(units: Sequence[_Unit]) -> set[str]:
    """Names that the statements define or assign; an example of use imports them."""
    return {name for unit in units for name in unit.binds - unit.imports}


def _parse(code: str) -> list[_Unit]:
    """The code's top-level statements; none if it is not Python, also when dedented."""
    for text in (code, textwrap.dedent(code)):
        try:
            tree, lines = ast.parse(text), text.split("\n")
            return [_read(nodes, lines) for nodes in _group(tree.body)]
        except _REFUSED:
            continue
    return []


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _group(body: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Groups statements that share a line."""
    groups: list[list[ast.stmt]] = []
    for node in body:
        if groups and _first_line(node) <= (groups[-1][-1].end_lineno or 0):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _read(nodes: Sequence[ast.stmt], lines: Sequence[str]) -> _Unit:
    text = "\n".join(lines[_first_line(nodes[0]) - 1 : nodes[-1].end_lineno])
    table = symtable.symtable(text, "<answer>", "exec")
    symbols = table.get_symbols()
    imports = frozenset(s.get_name() for s in symbols if s.is_imported())
    inner = [s for t in _tables_within(table) for s in t.get_symbols() if s.is_global()]
    reads = {s.get_name() for s in symbols if s.is_referenced()} | {s.get_name() for s in inner}
    stored = (
        _root(n)
        for node in nodes
        if not isinstance(node, _DEFINED)
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute | ast.Subscript) and not isinstance(n.ctx, ast.Load)
    )
    return _Unit(
        text=text,
        nodes=tuple(nodes),
        binds=frozenset(s.get_name() for s in symbols if s.is_assigned()) | imports,
        imports=imports,
        stores=frozenset(stored),
        reads=frozenset(reads),
    )


def _tables_within(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _tables_within(child)


def _root(node: ast.expr) -> str:
    """The name at the beginning of `a.b[c].d` or `a().b`; "" for another expression."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _reach(names: frozenset[str], units: Sequence[_Unit]) -> set[str]:
    """The names, and those that the statements that bind them read, and so on."""
    reached, left = set(names), list(names)
    while left:
        name = left.pop()
        found = {read for unit in units if name in unit.binds for read in unit.reads} - reached
        reached |= found
        left += found
    return reached


def _select(own: Sequence[_Unit], others: Sequence[_Unit], asked: frozenset[str]) -> list[_Unit]:
    """Selects what the `asked` names need, and all definitions and imports of the block `own`.

    Needed is what binds or changes a name that is read, and a call of an imported module, such as
    `sys.setrecursionlimit(9999)`. An example of use, a print or a test is not. From `others` come
    names that `own` does not bind.
    """
    bound = {name for unit in own for name in unit.binds}
    imports = {name for unit in own for name in unit.imports}
    needed, chosen = set(asked), set[int]()

    def needs(unit: _Unit) -> bool:
        if (unit.binds | unit.stores) & needed or unit.stores & imports:
            return True
        reached = _reach(unit.reads, own)
        if unit.defines or unit.ends or asked & reached:
            return False
        data = {name for u in own if not u.defines for name in u.binds & needed}
        return bool(reached & data) or bool(not unit.binds and unit.reads & imports)

    def add(units: Sequence[_Unit]) -> bool:
        """Whether one more of them is needed."""
        before = len(chosen)
        for unit in units:
            wanted = needs(unit) if units is own else unit.binds & (needed - bound)
            if id(unit) not in chosen and wanted:
                chosen.add(id(unit))
                needed.update(unit.reads)
        return len(chosen) > before

    while add(own) or add(others):
        pass
    return [u for u in others if id(u) in chosen] + [u for u in own if id(u) in chosen or u.defines]
