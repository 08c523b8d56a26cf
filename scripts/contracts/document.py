"""YAML files as plain values with the line of each, and the keys that a mapping has twice."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kdjax.errors import MissingFileError, UserError

Where = tuple[str | int, ...]  # keys and indices from the top of a file

# Files and folders of the reference's tree that hold no contracts, and our own list of mutants.
_NO_CONTRACTS = {"binding.yaml", "external-corpora.yaml", "ontology.yaml", "mutants.yaml"}
_NO_FOLDERS = {"kaizen", "legacy", "pipelines", "publish-manifests"}


class Document(NamedTuple):
    """One YAML file."""

    path: Path
    data: Any
    lines: dict[Where, int]
    doubles: list[tuple[Where, int]]  # keys met a second time, with their line

    def line(self, *where: str | int) -> int:
        """The line of a value, or of the nearest one around it that the file has."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


class Finding(NamedTuple):
    """What is wrong in one place, and the way out."""

    path: Path
    line: int
    severity: str  # ERROR | WARNING
    rule: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.severity} {self.rule} {self.message}. {self.remedy}"


def load(path: Path) -> Document:
    """Reads one file; raises `UserError` if it is no YAML, refers to itself, or is not there."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingFileError(f"{path}: no such file. Give a contract or a folder.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Give a YAML file.") from error
    document = Document(path, None, {}, [])
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        data = _value(loader, node, document, (), ()) if node else None
    except yaml.YAMLError as error:
        said = re.sub(r"\s+", " ", str(error))
        raise UserError(f"{path}: found no YAML ({said}). Mend the syntax.") from error
    finally:
        loader.dispose()
    return document._replace(data=data)


def _value(loader: yaml.SafeLoader, node: Any, document: Document, where: Where,
           around: tuple[int, ...]) -> Any:  # fmt: skip
    if id(node) in around:
        raise UserError(f"{document.path}: an alias contains itself. Write the value out.")
    around = (*around, id(node))
    document.lines.setdefault(where, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, n, document, (*where, i), around) for i, n in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    values: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        line = key_node.start_mark.line + 1
        if key in values:
            document.doubles.append(((*where, key), line))
        document.lines[(*where, key)] = line
        values[key] = _value(loader, value_node, document, (*where, key), around)
    return values


def contract_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The contracts among `paths`, folders walked in order of name.

    Raises `UserError` for a path that does not exist, and where nothing is found.
    """
    found = False
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in (".yaml", ".yml"))
            files = [p for p in inside if not _skipped(p.relative_to(path))]
        elif path.exists():
            files = [path]
        else:
            raise MissingFileError(f"{path}: no such file or folder. Give contracts to read.")
        found |= bool(files)
        yield from files
    if not found:
        raise UserError("found no contract; expected .yaml files. Give a file or a folder.")


def _skipped(path: Path) -> bool:
    return path.name in _NO_CONTRACTS or not _NO_FOLDERS.isdisjoint(path.parts[:-1])
