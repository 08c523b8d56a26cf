"""Documents from records: texts, conversations, prompts with completions, answers of a server."""

import hashlib
import itertools
import logging
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
from kdjax.data.fields import FORMS, NAMED, Fields, name_known
from kdjax.data.readers import read_records
from kdjax.data.sources import name_some
from kdjax.errors import UserError
from kdjax.models.alignment import Rendering
from kdjax.models.tokenizer import Tokenizer

_log = logging.getLogger("kdjax")

_CHATS = 1_024  # beginnings encoded at a time: bounds memory
_KINDS = dict.fromkeys(("text", "prompt", "completion"), (str, "a string"))
_KINDS |= {"messages": (list, "a list of messages")}


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


def documents(
    files: Iterable[Path],
    tokenizer: Tokenizer,
    fields: Fields = NAMED,
    empty: list[str] | None = None,
) -> Iterator[Document]:
    """Every non-empty document of the files, in order; `empty` gets the places of others.

    Warns once of empty ones, of JSON that is a text and of NUL bytes. Raises `UserError` naming
    file and line (or row) of the first thing that cannot be read.
    """
    empty = [] if empty is None else empty
    with_nul: list[str] = []
    json_texts: list[str] = []
    for source, record in read_records(files, fields):
        if source.lower().endswith(".json"):  # a record's place ends with its number
            json_texts.append(source)
        for document in _make_documents(record, source, tokenizer):
            if "\0" in document.text:
                with_nul.append(source)
            if document.text and not document.text.isspace():
                yield document
            elif not source.endswith("__init__.py"):  # of which packages are full
                empty.append(source)
    if empty:
        _log.warning("%s: no text there, left out", name_some(empty))
    if json_texts:
        _log.warning("%s: JSON that holds no records, read as text", name_some(json_texts))
    if with_nul:
        _log.warning("%s: found NUL bytes, which are kept as text", name_some(with_nul))


class Opening(NamedTuple):
    """The beginning of a text that a model goes on from."""

    text: str
    chat: Conversation | None = None  # up to the assistant's next turn
    whole: bool = True  # whether all of it is to be gone on from, or any beginning
    opening: str = ""  # what begins the turn of a conversation's answer


def openings(
    files: Iterable[Path], tokenizer: Tokenizer, fields: Fields = NAMED
) -> Iterator[Opening]:
    """Yields the beginning that a model goes on from, for every non-empty record, in order.

    Of `messages` the conversation up to the assistant's next turn, which is opened: an answer that
    ends them is left out. A record's `opening` stands at the beginning of that turn. Of a `prompt`
    that, of anything else its text, as it is. Raises as `documents`.
    """
    for source, record in read_records(files, fields):
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
    for name, (kind, wanted) in _KINDS.items():
        if name in fields and not isinstance(value := fields[name], kind):
            raise UserError(f"{source}: found {value!r:.60} as {name}; expected {wanted}.")
    content = sorted(fields) if isinstance(record, Mapping) else type(record).__name__
    known = name_known(fields) if fields else ""
    raise UserError(f"{source}: expected an object with {FORMS}; found {content}.{known}")


def render_records(
    files: Iterable[Path], ours: Tokenizer, theirs: Tokenizer, fields: Fields = NAMED
) -> Iterator[tuple[Rendering, Rendering]]:
    """Yields each conversation of the files as two tokenizers read it, each in its own template.

    Raises `UserError` naming the place of a record that one of the templates refuses.
    """
    for source, record in read_records(files, fields):
        if not is_conversation(record):
            continue
        assert isinstance(record, Mapping)
        sides = []
        for name, tokenizer in (("student", ours), ("teacher", theirs)):
            try:
                document = _render_conversation(record, source, tokenizer)
            except UserError as error:
                raise UserError(f"{error} (the {name}'s tokenizer)") from error
            ((ids, _),) = encode_documents([document], tokenizer, parse_special=False)
            sides.append(Rendering(document.text, ids, document.trained or ()))
        yield sides[0], sides[1]


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
