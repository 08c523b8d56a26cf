"""How the house stands: arrows between rooms, lines by room, names that go with the config.

    python -m scripts.checks.house [FOLDER] --json=house.json

FOLDER is a clone, this one if left out. A room is a module or package right below `kdjax`, or the
folder `configs` or `scripts`; an arrow is a room that imports from another, whatever how often.
Names of the config are the parameters and local names of all functions that take a whole `Config`
and that `assemble` reaches through such functions. Sources are read, nothing is imported.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TOPS = ("kdjax", "configs", "scripts")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_modules(root: Path) -> dict[str, tuple[ast.Module, int]]:
    """Each module's tree and lines, by its dotted name."""
    found = {}
    for path in sorted(path for top in _TOPS for path in (root / top).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        text = path.read_text()
        found[name.removesuffix(".__init__")] = ast.parse(text), text.count("\n")
    return found


def name_room(module: str) -> str:
    """The room of a module; `kdjax` itself is the public names."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "kdjax" else parts[0]


def list_imports(tree: ast.Module, modules: dict[str, Any]) -> Iterator[str]:
    """The modules of the house that a module imports."""
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
    """Whether a parameter is a whole `Config`."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return any(arg.annotation and ast.unparse(arg.annotation) == "Config" for arg in given)


def walk_config(modules: dict[str, tuple[ast.Module, int]]) -> tuple[list[str], set[str]]:
    """The functions that the config reaches from `assemble`, and their parameters and locals."""
    functions: dict[str, list[tuple[str, Function]]] = {}
    for module, (tree, _) in modules.items():
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


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("folder", type=Path, nargs="?", default=Path("."))
    flags.add_argument("--json", type=Path)
    args = flags.parse_args(argv)
    modules = read_modules(args.folder)
    lines: dict[str, int] = {}
    arrows = set[tuple[str, str]]()
    for module, (tree, count) in modules.items():
        room = name_room(module)
        lines[room] = lines.get(room, 0) + count
        arrows |= {(room, name_room(other)) for other in list_imports(tree, modules)}
    arrows = {(a, b) for a, b in arrows if a != b and "kdjax" not in (a, b)}
    functions, names = walk_config(modules)
    figures = {"arrows": len(arrows), "names": len(names), "functions": len(functions)}
    for name, count in (figures | lines).items():
        print(f"{name:<20} {count:>7,}")
    if args.json:
        told = {"arrows": sorted(map(list, arrows)), "names": sorted(names), "functions": functions}
        args.json.write_text(json.dumps({"lines": lines} | told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
