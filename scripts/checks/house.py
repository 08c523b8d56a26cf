"""Measures the code: steering figures, lines by room, arrows between rooms, words of the glossary.

    python -m scripts.checks.house [FOLDER] --json=house.json

FOLDER is a clone, by default this one. A room is a module or package directly below `kdjax`, or
the folder `configs` or `scripts`; an arrow is a room that imports from another, counted once. Names
with the config are the parameters and local names of all functions that take the full `Config` and
that `assemble` reaches through such functions. Words are those that CONTRIBUTING.md's glossary
advises against (`scripts.checks.words`). Sources are read, nothing is imported.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.checks.words import WORDS, find_words

LONG = 50  # lines that a function may have before it counts as long
_TOPS = ("kdjax", "configs", "scripts")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A module's text and its syntax tree."""

    source: str
    tree: ast.Module


def read_modules(root: Path) -> dict[str, Module]:
    """Reads all modules, by dotted name."""
    modules = {}
    for path in sorted(path for top in _TOPS for path in (root / top).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        text = path.read_text()
        modules[name.removesuffix(".__init__")] = Module(text, ast.parse(text))
    return modules


def name_room(module: str) -> str:
    """Names the room of a module; `kdjax` itself holds the public names."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "kdjax" else parts[0]


def list_imports(tree: ast.Module, modules: dict[str, Any]) -> Iterator[str]:
    """Yields the project's modules that a module imports."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                yield name


def takes_config(function: Function) -> bool:
    """Whether a parameter is the full `Config`."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(arg.annotation and ast.unparse(arg.annotation) == "Config" for arg in given)


def walk_config(modules: dict[str, Module]) -> tuple[list[str], set[str]]:
    """Functions that take the config, reached from `assemble`; their parameters and local names."""
    functions: dict[str, list[tuple[str, Function]]] = {}
    for module, (_, tree) in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, Function) and module.startswith("kdjax") and takes_config(node):
                functions.setdefault(node.name, []).append((module, node))
    reached, names, left, seen = [], set[str](), ["assemble"], set[str]()
    while left:
        if (name := left.pop()) in seen:
            continue
        seen.add(name)
        for module, function in functions.get(name, []):
            reached.append(f"{module}.{name}")
            names |= {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
                if isinstance(node, ast.Call):
                    left.append(getattr(node.func, "attr", getattr(node.func, "id", "")))
    return sorted(reached), names


def list_functions(modules: dict[str, Module]) -> list[tuple[int, str]]:
    """Lines and name of every function of kdjax, the longest first."""
    functions = [
        (node.end_lineno - node.lineno + 1, f"{name}.{node.name}")
        for name, module in modules.items()
        if name.startswith("kdjax")
        for node in ast.walk(module.tree)
        if isinstance(node, Function) and node.end_lineno
    ]
    return sorted(functions, reverse=True)


# Fields of the config that choose the student's form, and attributes that tell forms apart.
_FORM_FIELDS = re.compile(
    r"\bstudent\.(block|quantize\w*|imatrix|lora)\b|\bform\.(rounds|base|lora)\b"
)
_FORMS = "kdjax.training.forms"


def list_form_lines(modules: dict[str, Module]) -> list[str]:
    """Lines of code outside `training.forms` that ask which form a student has.

    Counted are reads of `_FORM_FIELDS`, strings that are such a name (tables have them; texts do
    not count), and `isinstance` with a class that a module imports from `training.forms`.
    """
    lines = set()
    for name, module in modules.items():
        if not name.startswith("kdjax") or name == _FORMS:
            continue
        forms = {
            alias.asname or alias.name
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ImportFrom) and node.module == _FORMS
            for alias in node.names
        }
        lines |= {(name, line) for line in _find_form_lines(module.tree, forms)}
    return [f"{name}:{line}" for name, line in sorted(lines)]


def _find_form_lines(tree: ast.Module, forms: set[str]) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                asks = _FORM_FIELDS.search(ast.unparse(node))
            case ast.Constant(value=str(text)):
                asks = _FORM_FIELDS.match(text) and " " not in text
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
                asks = any(getattr(x, "id", "") in forms for x in ast.walk(kind))
            case _:
                continue
        if asks:
            yield node.lineno


def count_arguments(tree: ast.Module, name: str) -> int:
    """Parameters of a module's function; 0 without one of this name."""
    for node in tree.body:
        if isinstance(node, Function) and node.name == name:
            return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
    return 0


def count_fields(tree: ast.Module, name: str = "Config") -> int:
    """Fields of a config's class, those of its sections included."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def count(name: str) -> int:
        fields = [x for x in classes[name].body if isinstance(x, ast.AnnAssign)]
        kinds = [ast.unparse(field.annotation) for field in fields]
        kinds = [kind for kind in kinds if "InitVar" not in kind]
        return sum(count(kind) if kind in classes else 1 for kind in kinds)

    return count(name) if name in classes else 0


def measure(root: Path) -> dict[str, Any]:
    """Measures a clone: the figures that the command prints, and the lists that they count."""
    modules = read_modules(root)
    lines = Counter[str]()
    arrows = set[tuple[str, str]]()
    words: dict[str, Counter[str]] = {word: Counter() for word in WORDS}
    uses = []
    for name, module in modules.items():
        room = name_room(name)
        lines[room] += module.source.count("\n")
        arrows |= {(room, name_room(other)) for other in list_imports(module.tree, modules)}
        if name.startswith("kdjax"):
            for line, word in find_words(module.source):
                words[word][room] += 1
                uses.append(f"{name}:{line}: {word}")
    arrows = {(a, b) for a, b in arrows if a != b and "kdjax" not in (a, b)}
    carriers, names = walk_config(modules)
    functions, forms = list_functions(modules), list_form_lines(modules)
    nothing = Module("", ast.Module([], []))
    figures = {
        "lines of kdjax": sum(n for room, n in lines.items() if room.startswith("kdjax")),
        f"functions over {LONG} lines": sum(n > LONG for n, _ in functions),
        "longest function": functions[0][0] if functions else 0,
        "names with the config": len(names),
        "functions with the config": len(carriers),
        "lines that ask for a form": len(forms),
        "arguments of make_step": count_arguments(
            modules.get("kdjax.training.step", nothing).tree, "make_step"
        ),
        "fields of Config": count_fields(modules.get("kdjax.config", nothing).tree),
        "arrows between rooms": len(arrows),
        "words of the glossary": sum(sum(rooms.values()) for rooms in words.values()),
    }
    return {
        "figures": figures,
        "lines": dict(sorted(lines.items())),
        "arrows": sorted(map(list, arrows)),
        "names": sorted(names),
        "functions": carriers,
        "long functions": {name: n for n, name in functions if n > LONG},
        "forms": forms,
        "words": {word: dict(sorted(rooms.items())) for word, rooms in words.items()},
        "uses": uses,
    }


def main(argv: list[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("folder", type=Path, nargs="?", default=Path("."))
    flags.add_argument("--json", type=Path)
    args = flags.parse_args(argv)
    house = measure(args.folder)
    words = {word: sum(rooms.values()) for word, rooms in house["words"].items()}
    rooms = Counter[str]()
    for counts in house["words"].values():
        rooms.update(counts)
    for title, table in (
        ("figures", house["figures"]),
        ("lines by room", house["lines"]),
        ("words, by word", words),
        ("words, by room", dict(sorted(rooms.items()))),
    ):
        print(f"\n{title}")
        for name, count in table.items():
            print(f"  {name:<28} {count:>7,}")
    if args.json:
        args.json.write_text(json.dumps(house, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
