"""Whether a test can fail, and how it searches: read from its source, nothing is run."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_EXPECTING = {"raises", "warns", "deprecated_call", "fail"}  # of pytest
_LOOPS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@functools.cache
def _functions(path: Path) -> dict[str, _Function]:
    """Functions of a file by name, those of classes as `Class::name`."""
    found: dict[str, _Function] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, _Function):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            inner = [n for n in node.body if isinstance(n, _Function)]
            found |= {f"{node.name}::{n.name}": n for n in inner}
    return found


def _reached(path: Path, name: str) -> list[_Function]:
    """The test and the functions of its file that it calls, directly or not."""
    functions, waiting, seen = _functions(path), [name], set()
    while waiting:
        current = waiting.pop()
        if current in seen or current not in functions:
            continue
        seen.add(current)
        waiting += [n.id for n in ast.walk(functions[current]) if isinstance(n, ast.Name)]
    return [functions[name] for name in seen]


def asserts(path: Path, name: str) -> bool:
    """Whether the test, or a helper of its file that it uses, compares something.

    Counts an `assert` that is no constant, `pytest.raises` and its like, and calls of functions
    named assert_*, as NumPy's and chex's are.
    """
    return any(_asserts(node) for f in _reached(path, name) for node in ast.walk(f))


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    of_pytest = isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "pytest"
    return name.startswith("assert_") or (of_pytest and name in _EXPECTING)


def searches(path: Path, name: str) -> bool:
    """Whether hypothesis draws the test's inputs."""
    decorators = [_decorator(d) for d in _functions(path)[name].decorator_list]
    return "given" in decorators


def enumerates(path: Path, name: str) -> bool:
    """Whether the test goes through cases one by one: a loop of its own, or parameters."""
    decorators = [_decorator(d) for d in _functions(path)[name].decorator_list]
    loops = any(isinstance(n, _LOOPS) for f in _reached(path, name) for n in ast.walk(f))
    return "parametrize" in decorators or loops


def _decorator(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def mentions(path: Path, name: str, number: object) -> bool:
    """Whether the number stands in the test, its decorators, or a helper of its file."""
    return number in list(_numbers(path, name))


def _numbers(path: Path, name: str) -> Iterator[object]:
    for function in _reached(path, name):
        for node in ast.walk(function):
            if isinstance(node, ast.Constant) and type(node.value) in (int, float):
                yield node.value
