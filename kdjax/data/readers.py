"""Records of files, by the form of each: a text, or a table with a record a line, element or row.

`READERS` has a row for each form that is more than a text; all other files are one text each.
Any file may be packed by gzip or Zstandard.
"""

import csv
import functools
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.data.fields import FORMS, NAMED, Fields, has_fields, list_columns
from kdjax.errors import UserError
from kdjax.formats.files import MOST_UNPACKED, open_unpacked, read_unpacked

PACKED = frozenset((".gz", ".zst"))
_HEAD = 1 << 20  # bytes of a file that show what it holds
_BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"
_ARROW = "Install it: pip install 'kdjax[parquet]'"
# How files begin that are neither text nor records, what they are, and what to do.
_OTHERS = (
    (b"version https://git-lfs", "a pointer of Git LFS", "Download the file: `git lfs pull`"),
    (b"%PDF-", "a PDF file", "Write its text to a .txt file"),
    (b"PK\x03\x04", "a ZIP archive, as .docx and .xlsx files are", "Unpack it, or export its text"),
    (b"PAR1", "a Parquet file", "Name it .parquet"),
    (b"ARROW1", "an Arrow file", "Name it .arrow"),
    (b"SQLite format 3\0", "an SQLite database", "Export its table as .csv or .jsonl"),
    (b"GGUF", "a model", "Name text"),
    (b"BZh", "a file packed by bzip2", "Unpack it, or pack it by gzip"),
    (b"\xfd7zXZ", "a file packed by xz", "Unpack it, or pack it by gzip"),
    (b"\xff\xfe", "text in UTF-16", "Convert it to UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "Convert it to UTF-8"),
)

Record = tuple[str, object]  # its place, "file" or "file:number", and what stands there


class Reader(NamedTuple):
    """How files of a form are read."""

    read: Callable[[Path, Fields], Iterator[Record]]
    table: bool = True  # whether it may hold several records
    optional: bool = False  # whether other content than records is common in such a file


def find_form(path: Path) -> str:
    """The suffix that says how a file is read, in lower case: `.jsonl` of `a.jsonl.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED else suffix


def read_records(files: Iterable[Path], fields: Fields = NAMED) -> Iterator[Record]:
    """Every record of the files with its place, "file" or "file:number"; a text file is one.

    Lines, elements of an array or rows are numbered from 1 on. Raises `UserError` naming the
    place of what cannot be read.
    """
    for path in files:
        reader = READERS.get(find_form(path), _TEXT)
        _refuse_others(path)
        for place, record in reader.read(path, fields):
            yield place, fields.rename(record, place)


def _refuse_others(path: Path) -> None:
    """Raises `UserError` for a file that is no text, by how it begins."""
    with open_unpacked(path) as file:
        head = file.read(512)
    own = {".parquet": b"PAR1", ".arrow": b"ARROW1"}.get(find_form(path))
    found = next((row for row in _OTHERS if row[0] != own and head.startswith(row[0])), None)
    if head[257:262] == b"ustar":
        found = b"", "a tar archive", "Unpack it"
    if found:
        raise UserError(
            f"{path}: found {found[1]}; expected text or records. {found[2]}, or leave it out of "
            "data.train."
        )


# --- text ---------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a file, unpacked, without a byte order mark; raises `UserError` unless UTF-8."""
    return _decode(read_unpacked(path), path)


def _decode(data: bytes, path: Path, line: int = 1) -> str:
    """Decodes the bytes of a file, or of its line `line`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data[: error.start].count(b"\n")
        raise UserError(
            f"{path}:{line}: byte {error.start} ({data[error.start]:#04x}) is not UTF-8. Convert "
            "the file to UTF-8 or leave it out of data.train."
        ) from error
    return text.removeprefix(_BOM) if line == 1 else text


def _read_plain(path: Path, fields: Fields) -> Iterator[Record]:
    yield str(path), {"text": read_text(path)}


def _read_notebook(path: Path, fields: Fields) -> Iterator[Record]:
    """The source of a notebook's cells, with an empty line after each; outputs are left out."""
    notebook = parse_json(read_text(path), str(path))
    try:
        sheets = notebook.get("worksheets") or [notebook]  # of format 3
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        sources = [cell["source"] if "source" in cell else cell["input"] for cell in cells]
        texts = [source if isinstance(source, str) else "".join(source) for source in sources]
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: found JSON that is no notebook ({type(error).__name__}: {error}); expected "
            "cells with a source each. Leave it out of data.train."
        ) from error
    yield str(path), {"text": "\n\n".join(text.rstrip("\n") for text in texts if text.strip())}


# --- JSON ---------------------------------------------------------------------------------------


def read_json_lines(path: Path, fields: Fields = NAMED) -> Iterator[tuple[str, Any]]:
    """Every record of the file with its place, "file:line". Raises `UserError` for a bad line."""
    with open_unpacked(path) as file:
        number = 0
        while line := file.readline(MOST_UNPACKED + 1):
            number += 1
            if len(line) > MOST_UNPACKED:
                raise UserError(
                    f"{path}:{number}: found a line of more than {MOST_UNPACKED >> 20} MiB; "
                    "expected a record a line. Cut it."
                )
            text = _decode(line, path, number)
            if text.strip():
                yield f"{path}:{number}", parse_json(text, f"{path}:{number}")


def parse_json(text: str, place: str) -> Any:
    """Parses JSON; raises `UserError` naming the place, also for half of a character's escape."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: found {error.object[error.start]!r}, half of a character's escape; expected "
            "both halves. Leave it out: the text was cut there."
        ) from error
    except (ValueError, RecursionError) as error:
        decoded = isinstance(error, json.JSONDecodeError)
        line = f"line {error.lineno}, " if decoded and error.lineno > 1 else ""
        said = f"{error.msg} at {line}column {error.colno}" if decoded else str(error)
        raise UserError(
            f"{place}: not JSON ({said}). Each record must be one object with {FORMS}."
        ) from error
    return value


_ARRAY = re.compile(r"\s*\[\s*(?=\{)")
_LINES = re.compile(r"\s*\n\s*\{")


def _read_json(path: Path, fields: Fields) -> Iterator[Record]:
    """The records of an array, of lines, or the one of an object; other JSON is a text."""
    text = read_text(path)
    if _begins_lines(text):
        yield from read_json_lines(path)
        return
    array = _ARRAY.match(text)
    if not array and not _begins_record(text, fields):
        yield str(path), {"text": text}
        return
    value = parse_json(text, str(path))
    for number, record in enumerate(value if array else [value], 1):
        yield f"{path}:{number}", record


def _begins_lines(text: str) -> bool:
    """Whether a text begins with an object and, in another line, a second one."""
    first, end = _decode_first(text, 0)
    return isinstance(first, dict) and bool(_LINES.match(text, end))


def _begins_record(text: str, fields: Fields) -> bool:
    first, _ = _decode_first(text, 0)
    return isinstance(first, dict) and has_fields(first, fields)


def _decode_first(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins a text at `at`, and its end; None if there is none."""
    start = len(text) - len(text[at:].lstrip())
    if not text.startswith("{", start):
        return None, at
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, at


# --- tables -------------------------------------------------------------------------------------


def _read_separated(path: Path, fields: Fields, *, delimiter: str) -> Iterator[Record]:
    """The rows of a file of separated values, whose first row names the columns."""
    csv.field_size_limit(MOST_UNPACKED)
    rows = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    number = 0
    try:
        names = next(rows, [])
        list_columns(names, fields, path)
        for number, row in enumerate(rows, 1):
            if not row:
                continue
            if len(row) != len(names):
                raise UserError(
                    f"{path}:{rows.line_num}: found {len(row)} values in record {number}; expected "
                    f"{len(names)}, one for each of {', '.join(names)}. Quote values that hold "
                    f"{delimiter!r}."
                )
            yield f"{path}:{number}", _parse_cells(dict(zip(names, row, strict=True)))
    except csv.Error as error:
        raise UserError(
            f"{path}:{rows.line_num}: found a row that is not separated values ({error}); expected "
            "quotes in pairs."
        ) from error


def _parse_cells(record: dict[str, Any]) -> dict[str, Any]:
    """A row whose cells that hold a JSON list, such as messages, are lists."""
    for name, value in record.items():
        if name in ("messages", "conversations") and value.lstrip().startswith("["):
            record[name] = parse_json(value, name)
    return record


def _read_parquet(path: Path, fields: Fields) -> Iterator[Record]:
    def batches(columns: Callable[[list[str]], list[str]]) -> Iterator[Any]:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path)
        yield from file.iter_batches(columns=columns(file.schema_arrow.names))

    yield from _read_batches(path, fields, "Parquet", batches)


def _read_arrow(path: Path, fields: Fields) -> Iterator[Record]:
    """The rows of an Arrow file or, as `datasets` saves them, an Arrow stream."""

    def batches(columns: Callable[[list[str]], list[str]]) -> Iterator[Any]:
        import pyarrow

        with path.open("rb") as file:
            in_file = file.read(6) == b"ARROW1"
        with pyarrow.memory_map(str(path)) as file:
            if in_file:
                reader = pyarrow.ipc.open_file(file)
                found = map(reader.get_batch, range(reader.num_record_batches))
            else:
                reader = found = pyarrow.ipc.open_stream(file)
            chosen = columns(reader.schema.names)
            yield from (batch.select(chosen) for batch in found)

    yield from _read_batches(path, fields, "Arrow", batches)


def _read_batches(
    path: Path, fields: Fields, form: str, batches: Callable[..., Iterator[Any]]
) -> Iterator[Record]:
    """The records of a table in columns; other columns are not read."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: found {form}, which needs pyarrow. {_ARROW}") from None
    number = 0
    try:
        for batch in batches(lambda names: list_columns(names, fields, path)):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", _drop_nulls(record)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable {form} file ({error}).") from error


def _drop_nulls(value: Any) -> Any:
    """A value without the keys that a column of objects fills with null where a record has none."""
    if isinstance(value, Mapping):
        return {name: _drop_nulls(v) for name, v in value.items() if v is not None}
    return [_drop_nulls(v) for v in value] if isinstance(value, list) else value


# --- the table of forms -------------------------------------------------------------------------

_TEXT = Reader(_read_plain, table=False)
READERS: dict[str, Reader] = {
    ".jsonl": Reader(read_json_lines),
    ".ndjson": Reader(read_json_lines),
    ".parquet": Reader(_read_parquet),
    ".arrow": Reader(_read_arrow),
    ".json": Reader(_read_json, optional=True),
    ".csv": Reader(functools.partial(_read_separated, delimiter=","), optional=True),
    ".tsv": Reader(functools.partial(_read_separated, delimiter="\t"), optional=True),
    ".ipynb": Reader(_read_notebook, table=False),
}
_FIRST = frozenset((".jsonl", ".parquet"))  # tables of format 2 of rows


def is_table(path: Path) -> bool:
    """Whether a file may hold several records."""
    return READERS.get(find_form(path), _TEXT).table


def is_read_anew(path: Path) -> bool:
    """Whether rows of format 2 read the file otherwise: as text, with its mark, or not at all."""
    form = find_form(path)
    if (form in READERS and form not in _FIRST) or path.suffix.lower() in PACKED:
        return True
    with path.open("rb") as file:
        return file.read(3) == _BOM.encode()


def find_other_content(path: Path, fields: Fields) -> str:
    """Describes content other than records, in a file of their form; empty if it may hold some.

    Reads the beginning of a file of the forms in which other content is common.
    """
    if not READERS.get(find_form(path), _TEXT).optional:
        return ""
    try:
        with open_unpacked(path) as file:
            head = file.read(_HEAD).decode("utf-8", "ignore").removeprefix(_BOM)
    except (UserError, OSError):
        return ""  # reading it says what is wrong
    if find_form(path) != ".json":
        separator = "\t" if find_form(path) == ".tsv" else ","
        names = next(csv.reader(io.StringIO(head, newline=""), delimiter=separator), [])
        return "" if has_fields(dict.fromkeys(names, ""), fields) else _name_columns(names)
    array = _ARRAY.match(head)
    first, end = _decode_first(head, array.end() if array else 0)
    if not isinstance(first, dict) or has_fields(first, fields):
        return ""
    return _name_columns(first) if array or _LINES.match(head, end) else ""


def _name_columns(names: Iterable[str]) -> str:
    return f"records of {', '.join(list(names)[:8]) or 'nothing'}"
