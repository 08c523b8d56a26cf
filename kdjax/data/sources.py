"""Files of text that a config names: folders, globs, names, the Hub's, installed packages.

`survey_files` says too what of a folder is left out, and why.
"""

import collections
import functools
import glob
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kdjax.data.fields import NAMED, Fields
from kdjax.data.installed import source_files
from kdjax.data.readers import READERS, find_form, find_other_content, is_table, read_text
from kdjax.errors import MissingFileError, UserError, suggest_path
from kdjax.hub import TEXT, choose_split, choose_tables, fetch_path

_log = logging.getLogger("kdjax")

# Suffixes of text in a folder, in addition to tables; a file that is named may have any suffix.
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".txt", ".md", ".rst", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cu", ".cuh", ".hpp", ".rs",
    ".go", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua",
    ".r", ".jl", ".swift", ".cs", ".hs", ".ml", ".ex", ".erl", ".clj", ".sh", ".bash", ".sql",
    ".html", ".css", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".tex", ".proto", ".cmake",
    ".dockerfile",
))
# fmt: on
_SKIPPED_FOLDERS = ("__pycache__", "node_modules")
_PYTHON = re.compile(r"(?:^|,)\s*python:")
_CARD = re.compile(r"---\n(?:.*\n)*?(?:task_categories|size_categories|dataset_info|configs):")
# Why files of a folder are left out.
OTHER_SUFFIX = "its suffix is none of text or records"
OTHER_SPLIT = "files of the split train are read; name this one to read it, too"
BESIDE_TABLES = "the folder is a data set, of which records alone are read"


def split_sources(text: str) -> tuple[list[str], list[str]]:
    """`"corpus,*.md,python:jax,flax"` as the patterns of files and the packages named last."""
    found = _PYTHON.search(text)
    paths, packages = (text[: found.start()], text[found.end() :]) if found else (text, "")
    packages = _PYTHON.sub(",", packages)
    return _split(paths), _split(packages)


def _split(text: str) -> list[str]:
    if os.path.lexists(os.path.expanduser(text)):  # a name may have commas in it
        return [text]
    return [part for part in map(str.strip, text.split(",")) if part]


class Survey(NamedTuple):
    """Files to read, and files of named folders that are left out."""

    files: list[Path]
    left_out: dict[Path, str]  # why

    def count(self) -> dict[str, dict[str, int]]:
        """Numbers of files that are left out, by reason and suffix, the most frequent first."""
        reasons = {reason: collections.Counter() for reason in self.left_out.values()}
        for path, reason in self.left_out.items():
            reasons[reason][find_form(path) or path.name] += 1
        return {reason: dict(counts.most_common()) for reason, counts in reasons.items()}


def find_files(patterns: str, fields: Fields = NAMED) -> list[Path]:
    """Files of comma-separated directories, globs and names, sorted, each once.

    `python:NAMES` at the end stands for the source files of installed packages, in the order of
    their names there (`installed.source_files`), wherever this machine keeps them. Files of a
    folder that are left out are named. Raises `MissingFileError` naming the first pattern that
    matches nothing.
    """
    survey = survey_files(patterns, fields)
    _report(tuple(sorted(survey.left_out.items())))
    return survey.files


def survey_files(patterns: str, fields: Fields = NAMED) -> Survey:
    """The files of `find_files`, with those that it leaves out; raises as it does."""
    files: set[Path] = set()
    left_out: dict[Path, str] = {}
    dead: set[Path] = set()
    paths, packages = split_sources(patterns)
    for pattern in (p for path in paths for p in _split(fetch_path(path, TEXT))):
        expanded = os.path.expanduser(pattern)
        matches = sorted(glob.glob(_escape_folders(expanded), recursive=True)) or [expanded]
        matched: set[Path] = set()
        for path in map(Path, matches):
            found = _survey_folder(path, fields) if path.is_dir() else Survey([path], {})
            matched |= set(found.files)
            left_out |= found.left_out
        links = {path for path in matched if path.is_symlink() and not path.exists()}
        matched = {path for path in matched - links if path.is_file()}
        if not matched:
            raise MissingFileError(_say_nothing(pattern, expanded, links, left_out))
        files |= matched
        dead |= links
    left_out = {path: why for path, why in left_out.items() if path not in files}
    left_out |= dict.fromkeys(dead, "a link to nothing")
    installed = [path for package in packages for path in source_files(package)]
    if not files and not installed:
        raise MissingFileError("no text was named: set data.train to directories, globs or files.")
    return Survey(list(dict.fromkeys([*sorted(files), *installed])), left_out)


def _say_nothing(pattern: str, expanded: str, links: set[Path], left_out: dict[Path, str]) -> str:
    only = f" but links to nothing ({name_some(sorted(links))})" if links else ""
    if left_out and not links:
        path, why = next(iter(left_out.items()))
        only = f" that is read ({path}: {why})"
    return (
        f"{pattern}: no file found{only}. Give a directory of text, a glob such as "
        f"'src/**/*.py', or a .txt, .jsonl or .parquet file.{suggest_path(expanded)}"
    )


def _escape_folders(pattern: str) -> str:
    """The pattern with `[`, `*` and `?` taken literally in each leading folder that exists so."""
    done, rest = "/" if pattern.startswith("/") else "", pattern.lstrip("/").split("/")
    while rest and os.path.lexists(os.path.join(done, rest[0])):
        done = os.path.join(done, rest.pop(0))
    return os.path.join(glob.escape(done), *rest)


def name_some(sources: Sequence[object]) -> str:
    """The first three, and the number of the others."""
    more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    return ", ".join(map(str, sources[:3])) + more


@functools.cache  # files are looked for before a run, and for its rows
def _report(left_out: tuple[tuple[Path, str], ...]) -> None:
    """Logs files that are left out, by reason."""
    reasons: dict[str, list[Path]] = {}
    for path, why in left_out:
        reasons.setdefault(why, []).append(path)
    for why, paths in reasons.items():
        if why != OTHER_SUFFIX:  # often many, and of no interest; `kdjax data` counts them
            level = logging.INFO if why in (OTHER_SPLIT, BESIDE_TABLES) else logging.WARNING
            _log.log(level, "%s: %s, left out", name_some(paths), why)


def _survey_folder(folder: Path, fields: Fields) -> Survey:
    """The files of text and records under a folder; raises for one that is locked."""
    every = {path: path.relative_to(folder).as_posix() for path in sorted(_walk(folder))}
    known = {path: name for path, name in every.items() if _is_known(path)}
    left_out = dict.fromkeys(every.keys() - known.keys(), OTHER_SUFFIX)
    tables = {name for path, name in known.items() if is_table(path)}
    if tables and _is_data_set(folder):
        left_out = dict.fromkeys(every, BESIDE_TABLES)
        left_out |= {path: OTHER_SPLIT for path, name in known.items() if name in tables}
        kept = {*choose_tables(sorted(tables))}
    else:
        kept = {*choose_split(sorted(tables))} | (set(known.values()) - tables)
        left_out |= {path: OTHER_SPLIT for path, name in known.items() if name not in kept}
    files = []
    for path, name in known.items():
        if name not in kept:
            continue
        left_out.pop(path, None)
        if other := find_other_content(path, fields):
            left_out[path] = f"{other}, which data.fields (--fields) may name"
        else:
            files.append(path)
    return Survey(files, left_out)


def _is_known(path: Path) -> bool:
    return find_form(path) in TEXT_SUFFIXES or find_form(path) in READERS


def _is_data_set(folder: Path) -> bool:
    """Whether it is a clone of a Hub data set, by its card, or was saved by `datasets`."""
    card = folder / "README.md"
    if card.is_file():
        try:
            if _CARD.match(read_text(card)):
                return True
        except UserError:
            pass  # no card
    saved = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return saved or (folder / "dataset_dict.json").is_file()


def _walk(folder: Path) -> Iterator[Path]:
    """The files under a folder, hidden ones left out; raises for a folder that is locked."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))
