"""Documents from files: plain text and source code, JSON lines, Parquet; text or conversations."""

import functools
import glob
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdjax.data.answers import Said, is_answer, read_answers
from kdjax.data.conversations import (
    Conversation,
    is_conversation,
    read_conversation,
    render_answers,
)
from kdjax.data.installed import source_files
from kdjax.errors import MissingFileError, UserError, suggest_path
from kdjax.hub import TEXT, fetch_path
from kdjax.models.tokenizer import Tokenizer

_log = logging.getLogger("kdjax")

# What a directory is searched for; a file named outright is read whatever its suffix.
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".txt", ".md", ".rst", ".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".cu", ".cuh",
    ".hpp", ".rs", ".go", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".rb", ".php",
    ".pl", ".lua", ".r", ".jl", ".swift", ".cs", ".hs", ".ml", ".ex", ".erl", ".clj", ".sh",
    ".bash", ".sql", ".html", ".css", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".json",
    ".tex", ".proto", ".cmake", ".dockerfile",
))
# fmt: on
TABLE_SUFFIXES = frozenset((".jsonl", ".parquet"))
_CHATS = 1_024  # beginnings encoded at a time: bounds memory
_SKIPPED_FOLDERS = ("__pycache__", "node_modules")
# The fields of a record, and how messages tell them.
_FIELDS = (("text",), ("messages",), ("prompt", "completion"), ("prompt",))
_BESIDE = ("opening", "tools", "chat_template_kwargs")  # what a conversation's record may have too
_FORMS = '"text" (a string), "messages" (a list), or "prompt" and "completion" (strings)'
_PYTHON = re.compile(r"(?:^|,)\s*python:")


class Document(NamedTuple):
    """One text to train on.

    `trained` lists the character spans whose tokens carry loss; None means all of them. A document
    that is `open` is plain text, whose marks are text and which gets an end-of-document token; a
    conversation ends as its template ends it. `content` is what the file holds of a text that was
    rendered.
    """

    text: str
    source: str  # "file" or "file:line"
    trained: tuple[tuple[int, int], ...] | None = None
    open: bool = True
    said: Said | None = None  # its ids, of a server's answer, which is not tokenized again
    content: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is a record of a question and answers, which no row cuts."""
        return self.trained is not None

    def loss_mask(self, offsets: np.ndarray) -> np.ndarray:
        """Whether each token carries loss, from the characters `[start, end)` it came from.

        So does a token of which a part is in a span: a word joined to the space before it.
        """
        starts, stops = offsets[:, 0], offsets[:, 1]
        if self.trained is None:
            return np.ones(len(starts), bool)
        begins, ends = np.array(self.trained, np.int64).reshape(-1, 2, 1).swapaxes(0, 1)
        return np.any((starts < ends) & ((begins <= starts) | (begins < stops)), axis=0)

    def digest(self) -> bytes:
        """SHA-256 of what the file holds: what decides the held-out split."""
        content = self.content or self.text
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, *, parse_special: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids of each without an end, and the characters `[start, end)` of each, int64 `[n, 2]`.

    A conversation's marks are special ids, those of plain text only with `parse_special`.
    """
    special = [parse_special or not document.open for document in documents]
    encoded = {
        parse: iter(
            tokenizer.encode_batch_with_offsets(
                [d.text for d, parses in zip(documents, special, strict=True) if parses == parse],
                parse_special=parse,
            )
        )
        for parse in (False, True)
    }
    for document, parse in zip(documents, special, strict=True):
        ids, offsets = next(encoded[parse])
        if document.open:
            ids = tokenizer.open_array(ids)
            before = np.zeros((len(ids) - len(offsets), 2), np.int64)
            offsets = np.concatenate([before, offsets])
        yield ids, offsets


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


def find_files(patterns: str) -> list[Path]:
    """Files of comma-separated directories, globs and names, sorted, each once.

    `python:NAMES` at the end stands for the source files of installed packages, in the order of
    their names there (`installed.source_files`), wherever this machine keeps them. Links to
    nothing are left out with a warning. Raises `MissingFileError` naming the first pattern that
    matches nothing.
    """
    files: set[Path] = set()
    dead: set[Path] = set()
    paths, packages = split_sources(patterns)
    for pattern in (p for path in paths for p in _split(fetch_path(path, TEXT))):
        expanded = os.path.expanduser(pattern)
        matches = sorted(glob.glob(_escape_folders(expanded), recursive=True)) or [expanded]
        matched: set[Path] = set()
        for path in map(Path, matches):
            matched |= set(_walk(path)) if path.is_dir() else {path}
        links = {path for path in matched if path.is_symlink() and not path.exists()}
        matched = {path for path in matched - links if path.is_file()}
        if not matched:
            only = f" but links to nothing ({_name_some(sorted(links))})" if links else ""
            raise MissingFileError(
                f"{pattern}: no file found{only}. Give a directory of text, a glob such as "
                f"'src/**/*.py', or a .txt, .jsonl or .parquet file.{suggest_path(expanded)}"
            )
        files |= matched
        dead |= links
    if dead:
        _warn_of_links(tuple(sorted(dead)))
    installed = [path for package in packages for path in source_files(package)]
    if not files and not installed:
        raise MissingFileError("no text was named: set data.train to directories, globs or files.")
    return list(dict.fromkeys([*sorted(files), *installed]))


def _escape_folders(pattern: str) -> str:
    """The pattern with `[`, `*` and `?` taken literally in each leading folder that exists so."""
    done, rest = "/" if pattern.startswith("/") else "", pattern.lstrip("/").split("/")
    while rest and os.path.lexists(os.path.join(done, rest[0])):
        done = os.path.join(done, rest.pop(0))
    return os.path.join(glob.escape(done), *rest)


@functools.cache  # files are looked for before a run, and for its rows
def _warn_of_links(links: tuple[Path, ...]) -> None:
    _log.warning("%s: a link to nothing, left out", _name_some(links))


def _walk(folder: Path) -> Iterator[Path]:
    """The files of text under a folder, hidden folders left out; raises for one that is locked."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        for name in names:
            if Path(name).suffix.lower() in TEXT_SUFFIXES | TABLE_SUFFIXES:
                yield Path(parent, name)


def documents(files: Iterable[Path], tokenizer: Tokenizer) -> Iterator[Document]:
    """Every non-empty document of the files, in order.

    Warns once of empty ones and once of NUL bytes. Raises `UserError` naming file and line (or
    row) of the first thing that cannot be read.
    """
    empty: list[str] = []
    with_nul: list[str] = []
    for source, record in _read_records(files):
        for document in _make_documents(record, source, tokenizer):
            if "\0" in document.text:
                with_nul.append(source)
            if document.text and not document.text.isspace():
                yield document
            elif not source.endswith("__init__.py"):  # of which packages are full
                empty.append(source)
    if empty:
        _log.warning("%s: no text there, left out", _name_some(empty))
    if with_nul:
        _log.warning("%s: found NUL bytes, which are kept as text", _name_some(with_nul))


def _name_some(sources: Sequence[object]) -> str:
    more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    return ", ".join(map(str, sources[:3])) + more


class Opening(NamedTuple):
    """The beginning of a text that a model goes on from."""

    text: str
    chat: Conversation | None = None  # up to the assistant's next turn
    whole: bool = True  # whether all of it is to be gone on from, or any beginning
    opening: str = ""  # what begins the turn of a conversation's answer


def openings(files: Iterable[Path], tokenizer: Tokenizer) -> Iterator[Opening]:
    """Yields the beginning that a model goes on from, for every non-empty record, in order.

    Of `messages` the conversation up to the assistant's next turn, which is opened: an answer that
    ends them is left out. A record's `opening` stands at the beginning of that turn. Of a `prompt`
    that, of anything else its text, as it is. Raises as `documents`.
    """
    for source, record in _read_records(files):
        if isinstance(record, Mapping) and is_conversation(record):
            opening = record.get("opening") or ""
            if not isinstance(opening, str):
                raise UserError(
                    f"{source}: found {opening!r} as the opening; expected a text, or none. Leave "
                    "it out."
                )
            try:
                chat = read_conversation(record).before_answer()
                text = f"{chat.render(tokenizer, answer_next=True)}{opening}"
            except UserError as error:
                raise UserError(f"{source}: {error}") from error
            yield Opening(text, chat=chat, opening=opening)
            continue
        prompt = record.get("prompt") if isinstance(record, Mapping) else None
        whole = isinstance(prompt, str)
        text = str(prompt) if whole else _make_document(record, source, tokenizer).text
        if text.strip():
            yield Opening(text, whole=whole)


def encode_chats(
    found: Iterable[Opening], tokenizer: Tokenizer
) -> Iterator[tuple[Opening, list[int]]]:
    """Each beginning with the ids of a conversation, encoded on all cores.

    No ids of any other text, which is cut before it is encoded.
    """
    found = iter(found)
    while batch := list(itertools.islice(found, _CHATS)):
        encoded = iter(tokenizer.encode_batch([one.text for one in batch if one.chat]))
        for one in batch:
            yield one, next(encoded) if one.chat else []


def _read_records(files: Iterable[Path]) -> Iterator[tuple[str, object]]:
    """Every record of the files with its place, "file" or "file:line"; a text file is one."""
    for path in files:
        suffix = path.suffix.lower()
        if suffix == ".jsonl":
            yield from read_json_lines(path)
        elif suffix == ".parquet":
            yield from _read_parquet(path)
        else:
            yield str(path), {"text": _read_text(path)}


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}:{line}: byte {error.start} ({data[error.start]:#04x}) is not UTF-8. Convert "
            "the file to UTF-8 or leave it out of data.train."
        ) from error


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Every record of the file with its place, "file:line". Raises `UserError` for a bad line."""
    # Split on newlines only: str.splitlines would cut inside strings at U+2028.
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "\\u" in line:
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{path}:{number}: found {error.object[error.start]!r}, half of a character's "
                "escape; expected both halves. Leave it out: the text was cut there."
            ) from error
        except (ValueError, RecursionError) as error:
            decoded = isinstance(error, json.JSONDecodeError)
            said = f"{error.msg} at column {error.colno}" if decoded else str(error)
            raise UserError(
                f"{path}:{number}: not JSON ({said}). Each line must be one object with {_FORMS}."
            ) from error
        yield f"{path}:{number}", record


def _read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{path}: found Parquet, which needs pyarrow. Install it: pip install 'kdjax[parquet]'"
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        there = file.schema_arrow.names
        names = next((x for x in _FIELDS if set(x) <= set(there)), None)
        if names is None:
            raise UserError(f"{path}: expected columns of {_FORMS}; found {', '.join(there)}.")
        number = 0
        columns = [*names, *(name for name in _BESIDE if name in there)]
        for batch in file.iter_batches(columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", _drop_nulls(record)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}).") from error


def _drop_nulls(value: Any) -> Any:
    """A value without the keys that a column of objects fills with null where a record has none."""
    if isinstance(value, Mapping):
        return {name: _drop_nulls(v) for name, v in value.items() if v is not None}
    return [_drop_nulls(v) for v in value] if isinstance(value, list) else value


def _make_documents(record: object, source: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a record: one, or each answer of a server."""
    if not is_answer(record):
        yield _make_document(record, source, tokenizer)
        return
    assert isinstance(record, Mapping)
    for said in read_answers(record, source, tokenizer):
        yield Document(tokenizer.decode(said.ids.tolist()), source, (), open=False, said=said)


def _make_document(record: object, source: str, tokenizer: Tokenizer) -> Document:
    fields: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
    if isinstance(fields.get("text"), str):
        return Document(fields["text"], source)
    if is_conversation(record):
        return _render_conversation(fields, source, tokenizer)
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        return Document(text, source, ((len(prompt), len(text)),))
    content = sorted(fields) if isinstance(record, Mapping) else type(record).__name__
    raise UserError(f"{source}: expected an object with {_FORMS}; found {content}.")


def _render_conversation(record: Mapping[str, Any], source: str, tokenizer: Tokenizer) -> Document:
    """Renders the messages; only what the assistant says, its end token included, carries loss."""
    try:
        conversation = read_conversation(record)
        text, spans = render_answers(conversation, tokenizer)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    if conversation.last_thought not in text:
        _warn_of_thoughts(tokenizer.chat_template, source)
    return Document(text, source, spans, open=False, content=conversation.say())


_warned_of: set[str | None] = set()  # templates


def _warn_of_thoughts(template: str | None, source: str) -> None:
    if template not in _warned_of:
        _warned_of.add(template)
        _log.warning(
            "%s: the chat template leaves the thought before </think> out of the last answer; what "
            "follows it trains, here and in other records",
            source,
        )
