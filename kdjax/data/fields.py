"""Fields of a record: the names that kdjax reads, and `data.fields`, which renames others.

messages=conversations,role=from,content=value       as ShareGPT has them
user=instruction+input,assistant=output              as Alpaca has them
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdjax.errors import UserError, suggest

# The fields of a record, and how messages tell them.
FIELDS = (("text",), ("messages",), ("prompt", "completion"), ("prompt",))
BESIDE = ("opening", "tools", "chat_template_kwargs")  # what a conversation's record may have too
FORMS = '"text" (a string), "messages" (a list), or "prompt" and "completion" (strings)'
_ANSWERS = frozenset(("response", "choices", "completion_probabilities", "teacher_ids"))
_NAMES = (
    "text",
    "prompt",
    "completion",
    "messages",
    "role",
    "content",
    "system",
    "user",
    "assistant",
    "tools",
)
_NESTED = frozenset(("role", "content"))  # of each message
_OPTIONAL = frozenset(("system", "tools"))
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # of ShareGPT
# Columns of well-known data sets, and what names them.
_KNOWN = (
    (("conversations",), "messages=conversations,role=from,content=value"),
    (("instruction", "input", "output"), "user=instruction+input,assistant=output"),
    (("instruction", "output"), "user=instruction,assistant=output"),
    (("instruction", "response"), "user=instruction,assistant=response"),
    (("question", "answer"), "user=question,assistant=answer"),
    (("prompt", "response"), "user=prompt,assistant=response"),
)


class Fields(NamedTuple):
    """Fields of a record, and the columns that hold each, as `data.fields` says."""

    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Fields":
        """Parses `NAME=COLUMN,NAME=COLUMN+COLUMN`; raises `UserError` for another form."""
        if not text.strip():
            return NAMED
        columns: dict[str, tuple[str, ...]] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            held = tuple(column.strip() for column in value.split("+"))
            if name not in _NAMES or not equals or not all(held) or name in columns:
                raise UserError(
                    f"data.fields={text}: found {part.strip()!r}; expected NAME=COLUMN, each NAME "
                    f"once, of {', '.join(_NAMES)}, as in {_KNOWN[0][1]}.{suggest(name, _NAMES)}"
                )
            columns[name] = held
        own = columns.keys() - _NESTED - _OPTIONAL
        if own not in ({"text"}, {"prompt"}, {"prompt", "completion"}, {"messages"}, _PAIR):
            raise UserError(
                f"data.fields={text}: found {', '.join(sorted(own)) or 'no record'}; expected "
                "text, messages, user and assistant, prompt and completion, or prompt."
            )
        return cls(tuple(columns.items()))

    @property
    def held(self) -> list[str]:
        """The columns of a record, without the fields of each message."""
        return [c for name, held in self.columns if name not in _NESTED for c in held]

    def rename(self, record: object, place: str) -> object:
        """The record by the names that kdjax reads; unchanged if it has none of the columns.

        Texts of several columns are joined by a newline, empty ones left out. Raises `UserError`
        naming the place and column of what is missing.
        """
        if not isinstance(record, Mapping) or record.keys().isdisjoint(self.held):
            return record
        columns = dict(self.columns)
        read = {k: v for k, v in record.items() if k not in self.held}
        for name, held in columns.items():
            if name not in _NESTED:
                value = _join(name, [record.get(c) for c in held], held, place)
                read |= {} if value is None else {name: value}
        if "messages" in columns:
            names = [columns.get(name, (name,))[0] for name in ("role", "content")]
            read["messages"] = [_rename_message(message, *names) for message in read["messages"]]
        if "user" in columns:
            roles = "user", "assistant"
            read["messages"] = [{"role": role, "content": read.pop(role)} for role in roles]
        if "system" in columns and "messages" in read and (system := read.pop("system", None)):
            read["messages"] = [{"role": "system", "content": system}, *read["messages"]]
        return read


NAMED = Fields()  # the names that kdjax reads
_PAIR = {"user", "assistant"}


def _join(name: str, values: list[Any], held: Sequence[str], place: str) -> Any:
    """The value of a field from its columns; None if it is optional and they have none."""
    if name in ("messages", "tools"):
        value = values[0]
        if name == "messages" and not isinstance(value, list):
            found = "none" if value is None else repr(value)[:60]
            raise UserError(f"{place}: found {found} as {held[0]}; expected a list of messages.")
        return value
    for column, value in zip(held, values, strict=True):
        missing = value is None and column == held[0] and name not in _OPTIONAL
        if missing or not isinstance(value, str | None):
            found = "nothing" if value is None else repr(value)[:60]
            raise UserError(
                f"{place}: found {found} as {column}; expected a text, which data.fields takes for "
                f"{name}."
            )
    return "\n".join(value for value in values if value) or (None if name in _OPTIONAL else "")


def _rename_message(message: Any, role: str, content: str) -> Any:
    if not isinstance(message, Mapping):
        return message
    read = {k: v for k, v in message.items() if k not in (role, content)}
    said = message.get(role)
    read |= {"role": _ROLES.get(str(said), said)} if role in message else {}
    return read | ({"content": message[content]} if content in message else {})


def has_fields(names: Iterable[str], fields: Fields = NAMED) -> bool:
    """Whether a record with these names is one that kdjax reads."""
    there = set(names)
    return (
        any({*one} <= there for one in FIELDS)
        or not there.isdisjoint(_ANSWERS)
        or not there.isdisjoint(fields.held)
    )


def list_columns(there: Sequence[str], fields: Fields, path: Path) -> list[str]:
    """The columns of a table to read; raises `UserError` if they make no record."""
    held = [name for name in dict.fromkeys(fields.held) if name in there]
    names = held or next((one for one in FIELDS if {*one} <= {*there}), None)
    if names is None:
        raise UserError(
            f"{path}: expected columns of {FORMS}; found {', '.join(there)}.{name_known(there)}"
        )
    return list(dict.fromkeys([*names, *(name for name in BESIDE if name in there)]))


def name_known(there: Iterable[str]) -> str:
    """Says how to name the columns of a record with these names."""
    names = set(there)
    line = next((line for known, line in _KNOWN if {*known} <= names), None)
    if line is None:
        return " Name the columns by data.fields (--fields), as in user=question,assistant=answer."
    return f" Set data.fields={line} (--fields)"
