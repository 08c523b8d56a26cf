"""Conversations of a file: their messages as templates read them, and what the assistant says.

A template is a program, and may render a turn otherwise once more turns follow. So the answers are
found in the rendering of the complete conversation, by rendering it once more with another message
in place of one: what differs between the two is that message.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kdjax.errors import UserError
from kdjax.models.templates import has_marks
from kdjax.models.tokenizer import Tokenizer

_PRIVATE = range(0xE000, 0xF8FF)  # characters of Unicode's private use, for other messages
_UNREAD = ("function_call", "refusal", "audio")  # fields of an answer that no template writes
_FIXED = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # no kwargs
_NOT_WRITTEN = (
    "found {0}, which the chat template does not write{2}; expected a template that shows them to "
    "the model. {1}, or take another model's (data.tokenizer)."
)
_Message = dict[str, Any]
_Span = tuple[int, int]


class Conversation(NamedTuple):
    """Messages with a text each, and what else their template reads."""

    messages: tuple[_Message, ...]
    tools: tuple[Any, ...] = ()  # descriptions of functions
    variables: tuple[tuple[str, Any], ...] = ()  # of `chat_template_kwargs`, such as thinking
    trained: tuple[bool, ...] = ()  # whether each message carries loss if the assistant says it

    def render(self, tokenizer: Tokenizer, *, answer_next: bool = False) -> str:
        """Renders the conversation by the tokenizer's template."""
        return tokenizer.render(
            self.messages, self.tools, answer_next=answer_next, variables=dict(self.variables)
        )

    def say(self) -> str:
        """The content as text, equal for equal conversations; a split goes by it."""
        said = self.messages, self.tools
        return json.dumps(said, sort_keys=True, ensure_ascii=False, default=str)

    @property
    def last_thought(self) -> str:
        """The thought in the content of the last message; empty without one."""
        content = self.messages[-1].get("content") if self.messages else None
        thought, end, _ = (content or "").rpartition("</think>")
        return thought.rpartition("<think>")[2].strip() if end else ""

    def answered(self, answer: str) -> dict[str, Any]:
        """The conversation with an answer at its end, as a record of a file."""
        more = {"tools": list(self.tools), "chat_template_kwargs": dict(self.variables)}
        messages = [*self.messages, {"role": "assistant", "content": answer}]
        return {"messages": messages} | {name: value for name, value in more.items() if value}

    def before_answer(self) -> "Conversation":
        """The conversation without the answer that ends it, if there is one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return self
        return self._replace(messages=self.messages[:-1], trained=self.trained[:-1])


def is_conversation(record: object) -> bool:
    """Whether a record has `messages`, or a `prompt` that is a list of messages."""
    if not isinstance(record, Mapping):
        return False
    prompt = record.get("prompt")
    of_messages = isinstance(prompt, list) and all(isinstance(m, Mapping) for m in prompt)
    return isinstance(record.get("messages"), list) or (of_messages and bool(prompt))


def read_conversation(record: Mapping[str, Any]) -> Conversation:
    """Reads `messages`, or `prompt` and `completion` as lists of them, with `tools`.

    The parts of a content are joined, keys without a value left out. A message of `weight` 0, and
    one of a prompt, carries no loss. Raises `UserError` naming the first field that cannot be read.
    """
    messages, prompt = record.get("messages"), ()
    if not isinstance(messages, list):
        prompt = record["prompt"]
        completion = record.get("completion") or []
        if not isinstance(completion, list):
            raise UserError(
                "found a prompt of messages and a completion that is no list; expected both to be "
                "lists of messages, or both texts"
            )
        messages = [*prompt, *completion]
    read = [_read_message(message, i) for i, message in enumerate(messages)]
    trained = [_is_trained(m, i) and i >= len(prompt) for i, m in enumerate(messages)]
    variables = _read_json(record, "chat_template_kwargs", Mapping) or {}
    if fixed := next((name for name in _FIXED if name in variables), None):
        raise UserError(
            f"found {fixed} in chat_template_kwargs, which changes what is an answer; expected "
            "variables of the template, such as enable_thinking. Leave it out of the record."
        )
    return Conversation(
        messages=tuple(read),
        tools=tuple(_read_json(record, "tools", list) or ()),
        variables=tuple(sorted(variables.items())),
        trained=tuple(trained),
    )


def _read_json(record: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field that is a list or an object, or the JSON of one, as columns hold it."""
    value = record.get(name)
    if isinstance(value, str) and value.strip():
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if value is not None and value != "" and not isinstance(value, kind):
        expected = "a list of functions" if kind is list else "an object"
        raise UserError(f"found {name}={_shorten(value)}; expected {expected}, or its JSON")
    return value or None


def _read_message(message: Any, number: int) -> _Message:
    if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
        raise UserError(f"message {number} must be an object with a role and content.")
    read = {name: value for name, value in message.items() if value is not None}
    calls = read.pop("tool_calls", None)
    if calls:
        read["tool_calls"] = [_read_call(call, number) for call in calls]
    answers = read["role"] == "assistant"
    for name in _UNREAD:
        if answers and read.get(name):
            raise UserError(
                f"message {number} has {name}={_shorten(read[name])}, which no chat template "
                "writes; expected content or tool_calls. Rewrite it, or leave the record out."
            )
    read.pop("weight", None)
    if isinstance(content := read.get("content"), list | tuple):
        read["content"] = "".join(_read_part(part, number) for part in content)
    elif content is None and answers and calls:
        return read
    elif not isinstance(content, str):
        found = "null" if "content" in message else f"none among {', '.join(sorted(message))}"
        found = found if content is None else _shorten(content)
        raise UserError(
            f"message {number} has the content {found}; expected a text, or a list of parts with a "
            "text each (content may be null only with tool_calls)."
        )
    return read


def _read_part(part: Any, number: int) -> str:
    """The text of a part of a content."""
    if isinstance(part, str):
        return part
    named = part if isinstance(part, Mapping) and part.get("type", "text") == "text" else {}
    if isinstance(text := named.get("text"), str):
        return text
    raise UserError(
        f"message {number} has a part {_shorten(part)} in its content; expected parts of the type "
        "text: kdjax trains on text alone."
    )


def _read_call(call: Any, number: int) -> dict[str, Any]:
    """A call of a function, its arguments as an object."""
    read = {k: v for k, v in call.items() if v is not None} if isinstance(call, Mapping) else {}
    function = read.get("function", read)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"message {number} has {_shorten(call)} among its tool_calls; expected a function with "
            "its name and arguments."
        )
    function = {name: value for name, value in function.items() if value is not None}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # an answer may hold a wrong call: it stays as it is
            arguments = json.loads(arguments or "{}")
    function["arguments"] = arguments
    return read | {"function": function} if "function" in read else function


def _is_trained(message: Mapping[str, Any], number: int) -> bool:
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise UserError(
            f"message {number} has weight={weight!r}; expected 1, or 0 for an answer without loss."
        )
    return weight != 0


def _shorten(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


def render_answers(
    conversation: Conversation, tokenizer: Tokenizer
) -> tuple[str, tuple[_Span, ...]]:
    """Renders a conversation; returns the characters `[start, end)` of each answer, too.

    An answer is all that its writer has to say after the prompt that opens its turn, and the mark
    that ends it. A template with `{% generation %}` says itself what an answer is. Raises
    `UserError` for a conversation of which an answer cannot be found with certainty.
    """
    turns = _Turns(_fit_calls(conversation, tokenizer), tokenizer)
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    trained = [i for i in answers if conversation.trained[i]]
    if not trained:
        weighed = " of a weight above 0" if answers else ""
        raise UserError(f"no message of the assistant{weighed}, so nothing would be trained.")
    if turns.marked:
        silent = [turns.locate(i) for i in answers if i not in trained]
        return turns.text, tuple(
            (start, end)
            for start, end in turns.marked
            if not any(start <= first <= end for first, _ in silent)
        )
    if answers[0] == 0:
        raise UserError("a conversation cannot start with the assistant")
    spans = [(turns.find_start(i), turns.find_end(i)) for i in trained]
    return turns.text, tuple(spans)


def _fit_calls(conversation: Conversation, tokenizer: Tokenizer) -> Conversation:
    """Chooses the form of calls of functions that the template writes.

    Templates differ in whether arguments are an object or its JSON, and in whether the content of a
    message with calls is null, absent or empty. Raises `UserError` if calls or tools are unwritten.
    """
    if any(m.get("tool_calls") for m in conversation.messages):
        conversation = _form_written(conversation, tokenizer)
    alone = conversation._replace(tools=())
    if conversation.tools and conversation.render(tokenizer) == alone.render(tokenizer):
        raise UserError(_NOT_WRITTEN.format("tools", "Leave them out", ""))
    return conversation


def _form_written(conversation: Conversation, tokenizer: Tokenizer) -> Conversation:
    refusals = []
    for empty, as_text in itertools.product((..., None, ""), (False, True)):
        messages = tuple(_form_calls(m, empty, as_text) for m in conversation.messages)
        formed = conversation._replace(messages=messages)
        try:
            if _writes_calls(formed, tokenizer):
                return formed
        except UserError as error:
            refusals.append(str(error))
    said = f" ({refusals[-1]})" if refusals else ""
    raise UserError(_NOT_WRITTEN.format("tool_calls", "Write the calls into the content", said))


def _form_calls(message: _Message, empty: Any, as_text: bool) -> _Message:
    """A message with its calls in one form, and `empty` as content if it has none (...: absent)."""
    if not message.get("tool_calls"):
        return message
    calls = [_form_call(call, as_text) for call in message["tool_calls"]]
    content = {} if "content" in message or empty is ... else {"content": empty}
    return message | content | {"tool_calls": calls}


def _form_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    if "function" in call:
        return call | {"function": _form_call(call["function"], as_text)}
    arguments = call["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call | {"arguments": arguments}


def _writes_calls(conversation: Conversation, tokenizer: Tokenizer) -> bool:
    """Whether the rendering holds each call, and no Python object in place of JSON."""
    text = conversation.render(tokenizer)
    for i, message in enumerate(conversation.messages):
        calls = message.get("tool_calls", [])
        if not calls:
            continue
        other = [*conversation.messages]
        other[i] = message | {"tool_calls": [_rename_call(call) for call in calls]}
        if conversation._replace(messages=tuple(other)).render(tokenizer) == text:
            return False
        for function in (call.get("function", call) for call in calls):
            said = function["arguments"]
            if not isinstance(said, str) and str(said) != json.dumps(said) and str(said) in text:
                return False
    return True


def _rename_call(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return call | {"function": _rename_call(call["function"])}
    return call | {"name": f"{call['name']}_"}


class _Turns:
    """The rendering of a conversation, and the places of its messages there."""

    def __init__(self, conversation: Conversation, tokenizer: Tokenizer):
        self._conversation, self._tokenizer = conversation, tokenizer
        rendering = tokenizer.render_marked(
            conversation.messages, conversation.tools, variables=dict(conversation.variables)
        )
        self.text = rendering.text
        marks = has_marks(tokenizer.chat_template or "")
        self.marked = [span for span in rendering.generated if marks and span[0] < span[1]]
        self.locate = functools.cache(self._locate)

    def _render(self, messages: Sequence[_Message], *, answer_next: bool = False) -> str:
        part = self._conversation._replace(messages=tuple(messages))
        return part.render(self._tokenizer, answer_next=answer_next)

    def _locate(self, number: int) -> _Span:
        """The characters of the rendering that come from the texts of a message."""
        return self._locate_in(self.text, self._conversation.messages, number)

    def _locate_in(
        self, text: str, messages: Sequence[_Message], number: int, *, answer_next: bool = False
    ) -> _Span:
        """The characters of a text, a rendering of messages, that come from one of them."""
        other = [*messages]
        other[number] = _replace_texts(messages[number], _pick_character(text))
        changed = self._render(other, answer_next=answer_next)
        start = _count_common(text, changed)
        end = len(text) - _count_common(text[::-1], changed[::-1])
        if changed == text:
            raise UserError(
                f"the chat template leaves message {number} ({messages[number]['role']}) out of "
                "the conversation, so its tokens cannot be found; leave it out of the record, or "
                "set its weight to 0"
            )
        return start, max(start, end)

    def find_start(self, number: int) -> int:
        """The first character of an answer, after the prompt that opens its turn.

        Templates that rewrite earlier turns, or open the turn otherwise in a prompt than in a
        rendering, have another beginning: there the prompt is compared from the message before on.
        """
        messages = self._conversation.messages
        start, end = self.locate(number)
        prompt = self._render(messages[:number], answer_next=True)
        if self.text.startswith(prompt) and len(prompt) <= end:
            return len(prompt)
        before = self.locate(number - 1)[1]
        asked = self._locate_in(prompt, messages[:number], number - 1, answer_next=True)[1]
        opening = prompt[asked:]
        common = min(_count_common(opening, self.text[before:]), max(start - before, 0))
        unread = any(end > common for _, end in self._tokenizer.find_marks(opening))
        if before + common < start and unread:
            raise UserError(
                f"the chat template opens message {number} otherwise in a prompt, by "
                f"{opening!r}, than in the conversation, by {self.text[before:start]!r}, so its "
                "tokens cannot be found; split the conversation into single turns"
            )
        return before + common

    def find_end(self, number: int) -> int:
        """The end of an answer: after the mark that ends its turn.

        That is the first mark that ends answers before the next message, else the first mark. Where
        none follows the last answer, the text gets the mark that would open the next turn.
        """
        last = number + 1 == len(self._conversation.messages)
        end = self.locate(number)[1]
        until = self._find_next(number, end)
        closing = self._find_closing(self.text[end:until])
        if not closing and last:
            self.text = self.text[:end] + (added := self._close_last(number))
            closing = len(added)
        return end + closing

    def _find_next(self, number: int, end: int) -> int:
        """The beginning of the next message that the template writes after `end`."""
        for later in range(number + 1, len(self._conversation.messages)):
            with contextlib.suppress(UserError):
                if (start := self.locate(later)[0]) >= end:
                    return start
        return len(self.text)

    def _find_closing(self, text: str) -> int:
        """The length of a text up to the end of the mark that closes a turn; 0 without any."""
        marks = self._tokenizer.find_marks(text)
        stops = {self._tokenizer.tokens[i] for i in self._tokenizer.stop_ids}
        ends = [end for mark, end in marks if mark in stops] or [end for _, end in marks]
        return ends[0] if ends else 0

    def _close_last(self, number: int) -> str:
        """Finds what closes the last answer, where a template leaves that to the next turn."""
        messages = self._conversation.messages
        role = "tool" if messages[number].get("tool_calls") else "user"
        next_ = {"role": role, "content": (character := _pick_character(self.text))}
        longer = [*messages, next_]
        try:
            text = self._render(longer)
            _, end = self._locate_in(text, longer, number)
            opened = text[end : text.index(character, end)]
            if closing := self._find_closing(opened):
                return opened[:closing]
        except (UserError, ValueError):
            pass  # no such turn: the end of a text closes the answer
        eos = self._tokenizer.eos_id
        known = eos < self._tokenizer.vocab_size and eos in self._tokenizer.special_ids
        return self._tokenizer.tokens[eos] if known else ""


def _pick_character(text: str) -> str:
    """A character that the text has not."""
    return next(c for c in map(chr, _PRIVATE) if c not in text)


def _replace_texts(message: _Message, character: str) -> _Message:
    """The message with a character in place of each text."""
    names = ("content", "reasoning_content", "thinking", "reasoning")
    held = [name for name in names if isinstance(message.get(name), str)]
    texts: _Message = dict.fromkeys(held, character)
    if calls := message.get("tool_calls"):
        texts["tool_calls"] = [_replace_arguments(call, character) for call in calls]
    return message | texts


def _replace_arguments(call: dict[str, Any], character: str) -> dict[str, Any]:
    if "function" in call:
        return call | {"function": _replace_arguments(call["function"], character)}
    other = {character: character}
    as_text = isinstance(call["arguments"], str)
    return call | {"arguments": json.dumps(other, ensure_ascii=False) if as_text else other}


def _count_common(one: str, other: str) -> int:
    """The number of characters that two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
