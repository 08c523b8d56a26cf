"""A server's answers with its log-probabilities of each token's alternatives.

A line of a .jsonl file is one request and its response:

    {"messages": [...], "response": R}    of /v1/chat/completions
    {"prompt": "...", "response": R}      of /v1/completions, or of llama.cpp's /completion
    {"tokens": [...], "start": 5, "teacher_ids": [[...]], "teacher_top_log_probs": [[...]]}

R is the response's JSON: OpenAI's `logprobs` (vLLM, llama.cpp) or llama.cpp's
`completion_probabilities`. The third form is for a custom teacher: ids of prompt and answer, the
number of ids of the prompt, and a list of k ids for each id of the answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kdjax.data.conversations import read_conversation
from kdjax.errors import UserError
from kdjax.models.tokenizer import Tokenizer

MOST = 1.01  # largest sum of probabilities: some are bfloat16, or printed with few digits
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"  # what servers write for a part of a character
_NAMED = "token_id:"  # how vLLM writes ids with return_tokens_as_token_ids
_ASK = (
    "Request them: logprobs=true and top_logprobs=N (chat), logprobs=N (completions), n_probs=N "
    "(llama.cpp's /completion)."
)

_Token = Mapping[str, Any]  # `token`, `logprob`, and `id` or `bytes` if the server sends them


class Said(NamedTuple):
    """An answer with its writer's natural log-probabilities at each of its tokens."""

    ids: np.ndarray  # uint32 [N]: prompt and answer
    start: int  # of the answer in `ids`
    top: list[tuple[np.ndarray, np.ndarray]]  # for each of its ids, the most probable
    # first: int32 and float32
    log_probs: np.ndarray  # float32 [N - start], of the answer's ids; NaN if missing

    @property
    def mask(self) -> np.ndarray:
        """1 where an id is of the answer."""
        return (np.arange(len(self.ids)) >= self.start).astype(np.uint8)


def is_answer(record: object) -> bool:
    """Whether a line of a file has log-probabilities; a response that is a text has none."""
    names = "response", "choices", "completion_probabilities", "teacher_ids"
    if not isinstance(record, Mapping) or isinstance(record.get("response"), str):
        return False
    return any(name in record for name in names)


def read_answers(record: Mapping[str, Any], source: str, tokenizer: Tokenizer) -> Iterator[Said]:
    """Reads the answers of a line; a request for several (`n`) has several; leaves out empty ones.

    Ids are the server's (llama.cpp's `id`, vLLM's `token_id:N`), else looked up by bytes or text;
    an alternative without an id belongs to the rest. Raises `UserError` naming `source` for a line
    without log-probabilities, ids outside the vocabulary or twice at a position, probabilities
    that add up to more than 1, a prompt whose length differs from the server's, and ids that were
    looked up and spell another text than the answer's.
    """
    try:
        for prompt, tokens, text in _read_choices(record, tokenizer):
            ids, log_probs, top = list(prompt), [], []
            for token, alternatives in tokens:
                found = _find_id(token, tokenizer)
                if found is None:
                    raise UserError(
                        f"found no id of the token {token['token']!r}; expected a token of the "
                        "student's tokenizer. vLLM writes ids with return_tokens_as_token_ids."
                    )
                ids.append(found)
                log_probs.append(token["logprob"])
                top.append(_sort(alternatives, tokenizer))
            _check_text(ids[len(prompt) :], [token for token, _ in tokens], text, tokenizer)
            _check(ids, len(prompt), top, tokenizer.vocab_size)
            if top:
                numbers = np.array(log_probs, np.float32)
                yield Said(np.array(ids, np.uint32), len(prompt), top, numbers)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise UserError(
            f"{source}: found no answer of a server ({type(error).__name__}: {error}); expected "
            "`messages` or `prompt`, and a `response` with log-probabilities."
        ) from error


def _read_choices(
    record: Mapping[str, Any], tokenizer: Tokenizer
) -> Iterator[tuple[Sequence[int], list[tuple[_Token, Sequence[_Token]]], str | None]]:
    """Yields for each answer its prompt's ids, its tokens with their alternatives, and its text."""
    if "teacher_ids" in record:
        ids, start = record["tokens"], record["start"]
        own = ({"id": i, "logprob": float("nan")} for i in ids[start:])
        top = (
            [{"id": i, "logprob": x} for i, x in zip(*both, strict=True)]
            for both in zip(record["teacher_ids"], record["teacher_top_log_probs"], strict=True)
        )
        yield ids[:start], list(zip(own, top, strict=True)), None
        return
    response = record.get("response", record)
    prompt = _read_prompt(record, response, tokenizer)
    for choice in response.get("choices", [response]):
        yield prompt, list(_read_tokens(choice)), _read_text(choice)


def _read_prompt(
    record: Mapping[str, Any], response: Mapping[str, Any], tokenizer: Tokenizer
) -> Sequence[int]:
    if ids := response.get("prompt_token_ids"):
        return ids
    if "messages" in record:
        conversation = read_conversation(record)
        ids = tokenizer.encode(conversation.render(tokenizer, answer_next=True))
    elif isinstance(record["prompt"], str):
        ids = tokenizer.open_text(tokenizer.encode(record["prompt"]))
    else:
        ids = record["prompt"]
    said = (response.get("usage") or {}).get("prompt_tokens", response.get("tokens_evaluated"))
    if said not in (None, len(ids)):
        raise UserError(
            f"found a prompt of {said} tokens at the server and of {len(ids)} here; expected the "
            "same ids: the student's tokenizer and chat template must be the server's. Send the "
            "rendered text as `prompt`, or keep `prompt_token_ids` (vLLM: return_token_ids)."
        )
    return ids


def _read_tokens(choice: Mapping[str, Any]) -> Iterable[tuple[_Token, Sequence[_Token]]]:
    """Each token of an answer with its alternatives."""
    said = choice.get("logprobs") or {}
    entries = choice.get("completion_probabilities", said.get("content"))
    if entries is None and said.get("top_logprobs"):  # of /v1/completions, by text
        columns = said["tokens"], said["token_logprobs"], said["top_logprobs"]
        for token, log_prob, others in zip(*columns, strict=True):
            alternatives = [{"token": t, "logprob": x} for t, x in (others or {}).items()]
            yield {"token": token, "logprob": log_prob}, alternatives
        return
    if entries is None or any("logprob" not in e or not e.get("top_logprobs") for e in entries):
        sampled = entries and ("top_probs" in entries[0] or "probs" in entries[0])
        what = "probabilities after sampling" if sampled else "no log-probabilities of alternatives"
        raise UserError(f"found {what}; expected the model's. {_ASK}")
    for entry in entries:
        yield entry, entry["top_logprobs"]


def _read_text(choice: Mapping[str, Any]) -> str | None:
    """The text of an answer; None if the response has none."""
    texts = choice.get("message") or {}, choice
    said = (some.get(name) for some in texts for name in ("content", "text"))
    return next((text for text in said if isinstance(text, str)), None)


def _check_text(
    ids: Sequence[int], tokens: Sequence[_Token], text: str | None, tokenizer: Tokenizer
) -> None:
    """Raises `UserError` unless ids of an answer, found by the texts of tokens, spell its text.

    A token that is a part of a character has no text: servers write U+FFFD, and some
    lose the space of a SentencePiece token. Both are the texts of other tokens.
    """
    unnamed = [token for token in tokens if not _has_id(token)]
    spelled = tokenizer.decode([i for i in ids if i not in tokenizer.special_ids])
    if text is None:
        right = not any(_NO_TEXT.encode() in _spell(token) for token in unnamed)
    else:
        right = not unnamed or text.strip().rstrip(_NO_TEXT) in spelled
    if right:
        return
    said = "none in the response" if text is None else repr(_shorten(text))
    raise UserError(
        f"found token texts that spell {_shorten(spelled)!r} and the answer's text, {said}; "
        "expected both alike: the server's texts are not its tokens' own bytes. Request ids: vLLM "
        "writes them with return_tokens_as_token_ids, llama.cpp with n_probs (/completion)."
    )


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _has_id(token: _Token) -> bool:
    """Whether the server says a token's id."""
    return "id" in token or token["token"].startswith(_NAMED)


def _find_id(token: _Token, tokenizer: Tokenizer) -> int | None:
    """Looks up the id of a token; None if its text belongs to no id, or to several."""
    if "id" in token:
        return int(token["id"])
    text = token["token"]
    if _has_id(token):
        return int(text.removeprefix(_NAMED))
    return tokenizer.ids_by_bytes.get(_spell(token))


def _spell(token: _Token) -> bytes:
    """The bytes of a token, as far as the server says them."""
    return bytes(token["bytes"]) if token.get("bytes") else token["token"].encode()


def _sort(alternatives: Sequence[_Token], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities of the alternatives, the most probable first."""
    clear = (t for t in alternatives if _has_id(t) or _NO_TEXT.encode() not in _spell(t))
    pairs = [(_find_id(token, tokenizer), token["logprob"]) for token in clear]
    known = [(i, x) for i, x in pairs if i is not None]
    log_probs = np.array([x for _, x in known], np.float32)
    order = np.argsort(-log_probs, kind="stable")
    return np.array([i for i, _ in known], np.int64)[order], log_probs[order]


def _check(
    ids: Sequence[int], start: int, top: Sequence[tuple[np.ndarray, np.ndarray]], real: int
) -> None:
    """Raises `UserError` for the first position that no model can have predicted."""
    if not all(0 <= i < real for i in ids):
        odd = next(i for i in ids if not 0 <= i < real)
        raise UserError(f"found id {odd}; expected ids of the student's tokenizer, below {real}.")
    for at, (others, log_probs) in enumerate(top):
        total = float(np.exp(log_probs.astype(np.float64)).sum())
        unique = np.unique(others)
        if len(unique) < len(others) or not len(unique) or not 0 <= unique[0] <= unique[-1] < real:
            found = f"alternatives {others.tolist()}; expected each id once, and below {real}"
        elif not total <= MOST:
            found = f"probabilities that add up to {total:.4g}; expected at most 1"
        else:
            continue
        raise UserError(f"token {at} of the answer (id {ids[start + at]}): found {found}.")
