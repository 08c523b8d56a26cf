"""Tokenizers, rebuilt from a GGUF header or read from a Hugging Face folder.

Encoding is `tokenizers`' and chat templates are `transformers`' own; what lives here is the bridge
from GGUF key-values to them.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders

from kdjax.errors import UserError
from kdjax.formats import TensorTable, open_table
from kdjax.hub import TOKENIZER, fetch_path
from kdjax.models.encoders import (
    CONTROL,
    KINDS,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    Vocabulary,
    add_tokens,
    decoder_within,
    drop_added,
    is_byte_level,
    is_sentencepiece,
    rank_by_score,
    spell,
)
from kdjax.models.families import FAMILIES

_PADDING = re.compile(r"\[PAD\d+\]|<\|pad_\d+\|>")
_TEMPLATE_MARKS = re.compile(r"<\|[^|<>\s]+\|>|\[/?[A-Z_]{2,}\]")  # <|user|>, [INST]
_ANOTHER = (
    "Name a Hugging Face folder with a tokenizer.json, or a file, in its place: data.tokenizer of "
    "a config, --tokenizer of evaluate and generate, tokenizer= of kdjax.load."
)
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
# Of those that llama.cpp takes for the end of a generation (llama-vocab.cpp).
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>")
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # a token of SentencePiece


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, with what vocabulary alignment and chat data need beside it."""

    encoder: Encoder
    tokens: tuple[str, ...]  # by id, padding entries left out
    merges: tuple[str, ...]  # "left right", in order of rank
    special_ids: frozenset[int]
    eos_id: int
    chat_template: str | None
    names_eos: bool = True  # its file does; without one `eos_id` is the last id
    bos_id: int | None = None
    pad_id: int | None = None
    opening_id: int | None = None  # BOS, where the model's file puts it before every text

    @property
    def vocab_size(self) -> int:
        """Number of ids that some token has; heads are often padded beyond it."""
        return len(self.tokens)

    @property
    def end_of_text_id(self) -> int:
        """The id that closes a document; an instruct model's `eos_id` closes a turn instead."""
        return next(iter(self._added_named(_END_OF_TEXT)), self.eos_id)

    def _added_named(self, names: Sequence[str]) -> list[int]:
        """Ids of the names that are added tokens, special ones first: "</s>" is HTML in Gemma's."""
        found = [i for name in names if (i := self.encoder.token_to_id(name)) in self.added_ids]
        return sorted(found, key=lambda i: i not in self.special_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: the end of a text and of a turn."""
        turns = self.special_ids.intersection(self._added_named(_END_OF_TURN))
        return tuple(sorted({self.end_of_text_id, self.eos_id, *turns}))

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that text is searched for before it is cut: special and other ones."""
        return frozenset(self.encoder.get_added_tokens_decoder())

    def open_text(self, ids: list[int]) -> list[int]:
        """Ids of the beginning of a text, behind BOS where the model's file asks for it."""
        if self.opening_id is None or ids[:1] == [self.opening_id]:
            return ids
        return [self.opening_id, *ids]

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of all that decides ids: the serialised encoder, the template, and BOS."""
        said = [sorted(self.special_ids), self.chat_template]
        if self.opening_id is not None:
            said.append(self.opening_id)
        if "bos_token" in (self.chat_template or ""):
            said.append(self._named_tokens)
        whole = self.encoder.to_str() + json.dumps(said)
        return hashlib.sha256(whole.encode()).hexdigest()

    @functools.cached_property
    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes that each id stands for, int32; special ids stand for no text.

        None for a tokenizer that is neither byte-level nor of SentencePiece's kind.
        """
        if is_sentencepiece(self.encoder):
            texts = [
                BYTE_TOKEN.sub("x", token.replace(SPACE, " ")).encode() for token in self.tokens
            ]
        elif is_byte_level(self.encoder):
            # GPT-2's alphabet has one character for each byte.
            added = self.added_ids
            texts = [t.encode() if i in added else t for i, t in enumerate(self.tokens)]
        else:
            return None
        sizes = [0 if i in self.special_ids else len(text) for i, text in enumerate(texts)]
        return np.array(sizes, np.int32)

    @functools.cached_property
    def mark_ids(self) -> frozenset[int]:
        """Ids whose strings are marks and no text: special ones, and added ones written <|so|>.

        Of the latter some converters say that they are special, others not.
        """
        marks = (i for i in self.added_ids if re.fullmatch(r"<\|.+\|>", self.tokens[i]))
        return self.special_ids.union(marks)

    @functools.cached_property
    def _plain(self) -> Encoder:
        """The encoder that takes the strings of `mark_ids` for ordinary text."""
        described = json.loads(self.encoder.to_str())
        for token in described["added_tokens"]:
            token["special"] = token["id"] in self.mark_ids
        encoder = Encoder.from_str(json.dumps(described))
        encoder.encode_special_tokens = True
        return encoder

    @functools.cached_property
    def _mark_pattern(self) -> re.Pattern[str]:
        marks = {self.tokens[i] for i in self.mark_ids}
        marks |= set(_TEMPLATE_MARKS.findall(self.chat_template or ""))
        longest_first = sorted(marks, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def count_marks(self, text: str) -> dict[str, int]:
        """How often each string of `mark_ids`, and each mark of the chat template, is in a text."""
        return dict(collections.Counter(self._mark_pattern.findall(text)))

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Ids of the text; nothing is added at its ends.

        Strings of `mark_ids` become these, or ordinary text without `parse_special`.
        """
        encoder = self.encoder if parse_special else self._plain
        return encoder.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = True) -> list[list[int]]:
        """As `encode`, on all cores."""
        encoder = self.encoder if parse_special else self._plain
        encoded = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [e.ids for e in encoded]

    def decode(self, ids: Sequence[int], *, start: bool = False) -> str:
        """Text of the ids, special tokens included.

        With `start` the ids begin a text, whose first space may be one that encoding put there.
        """
        if start or self._within is None:
            return self.encoder.decode(list(ids), skip_special_tokens=False)
        known = (self.encoder.id_to_token(int(i)) for i in ids)
        return self._within.decode([token for token in known if token is not None])

    @functools.cached_property
    def _within(self) -> decoders.Decoder | None:
        return decoder_within(self.encoder) if is_sentencepiece(self.encoder) else None

    def encode_with_offsets(
        self, text: str, *, parse_special: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids as of `encode`, and the characters `[start, end)` that each came from."""
        encoder = self.encoder if parse_special else self._plain
        encoded = encoder.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    @property
    def _named_tokens(self) -> dict[str, Any]:
        """What a template may write by these names."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        size = self.vocab_size
        return {name: self.tokens[i] for name, i in ids.items() if i is not None and i < size}

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_next: bool = False) -> str:
        """The conversation through the chat template; `answer_next` opens the assistant's turn.

        Raises `UserError` if the tokenizer has no template or the template refuses the messages.
        """
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template, so `messages` cannot be rendered; use an "
                "instruct model's tokenizer (data.tokenizer, --tokenizer), or plain `text`."
            )
        try:
            rendered, _ = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=answer_next,
                **self._named_tokens,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(f"the chat template refuses the messages: {error}") from error
        return rendered[0]


def load_tokenizer(path: str | Path, table: TensorTable | None = None) -> Tokenizer:
    """The tokenizer of a GGUF or .apr file, or of a Hugging Face folder.

    A file without one of its own takes the `tokenizer.json` beside it. `table` spares opening the
    file once more. Raises `UserError` if there is no tokenizer.
    """
    path = Path(fetch_path(path, TOKENIZER))
    if path.is_dir():  # which may hold a tokenizer and no weights
        return _from_folder(path)
    table = open_table(path) if table is None else table
    if "general.architecture" in table.metadata or "tokenizer.ggml.tokens" in table.metadata:
        return from_gguf(table.metadata, str(path))
    return _from_folder(path.parent)


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Rebuilds a byte-level BPE tokenizer from GGUF key-values; `source` is named in errors.

    Raises `UserError` for key-values that are none of such a tokenizer.
    """
    try:
        return _rebuild(metadata, source)
    except UserError:
        raise
    except Exception as error:  # values of any type; the encoder's own errors have no type
        raise UserError(
            f"{source}: found a tokenizer that cannot be rebuilt ({type(error).__name__}: "
            f"{str(error)[:200]}); expected tokens, their types and merges of two. {_ANOTHER}"
        ) from error


def _rebuild(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    if "tokenizer.ggml.tokens" not in metadata:
        raise UserError(f"{source} holds no tokenizer (no tokenizer.ggml.tokens). {_ANOTHER}")
    model = metadata.get("tokenizer.ggml.model")
    if model not in KINDS:
        raise UserError(
            f"{source} has tokenizer model {model!r}; kdjax rebuilds {', '.join(KINDS)} "
            f"(byte-level, SentencePiece's and Gemma 4's BPE). {_ANOTHER}"
        )
    kind, rows = KINDS[model], metadata["tokenizer.ggml.tokens"]
    pre = metadata.get("tokenizer.ggml.pre", default_pre_tokenizer(metadata))
    if (rule := kind.rule(pre)) is None:
        raise UserError(
            f"{source} has tokenizer model {model!r} with pre-tokenizer {pre!r}; kdjax rebuilds it "
            f"with one of {', '.join(kind.rules)}. {_ANOTHER}"
        )
    tokens: list[str] = list(rows)
    parts = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges", [])]
    merges = [(left, right) for left, right in parts]
    stored = metadata.get("tokenizer.ggml.token_type")
    types = _guess_types(tokens, merges) if stored is None else [int(t) for t in stored]
    while types and types[-1] == UNUSED:  # "[PAD151665]" and its like
        types.pop()
    tokens = tokens[: len(types)]
    if kind.scored:
        merges = rank_by_score(tokens, types, [float(s) for s in metadata["tokenizer.ggml.scores"]])
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", kind.scored))
    words = Vocabulary(tokens, types, merges, rule, prefix)
    encoder = kind.build(words)
    for i, found in add_tokens(encoder, words).items():
        raise UserError(
            f"{source}: found special token {tokens[i]!r} at id {i} and at {found}; expected "
            f"each token once. {_ANOTHER}"
        )
    eos, template = (
        metadata.get("tokenizer.ggml.eos_token_id", len(tokens) - 1),
        metadata.get("tokenizer.chat_template"),
    )
    # A padding row is for an evaluation to name.
    if type(eos) is not int or not 0 <= eos < len(rows):
        raise UserError(
            f"{source}: found the end token {eos!r}; expected an id below {len(rows)}. {_ANOTHER}"
        )
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
    bos, pad = (i if type(i) is int and 0 <= i < len(tokens) else None for i in named)
    return Tokenizer(
        encoder=encoder,
        tokens=spell(encoder, tokens),
        merges=tuple(f"{left} {right}" for left, right in merges),
        special_ids=frozenset(i for i, t in enumerate(types) if t in (CONTROL, UNKNOWN)),
        eos_id=eos,
        chat_template=template if isinstance(template, str) else None,
        names_eos="tokenizer.ggml.eos_token_id" in metadata,
        bos_id=bos,
        pad_id=pad,
        opening_id=bos if opens_with_bos(metadata) else None,
    )


def default_pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    """How text is cut, a key of `PRE_TOKENIZERS`, in a file that does not say."""
    if "general.architecture" in metadata:  # GGUF files from before the key existed
        return "default"
    family = FAMILIES.get(metadata.get("model_type", ""))
    return family.pre_tokenizer if family else "unknown"


def opens_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a file asks for BOS before every text; where it does not say, its kind does."""
    if (said := metadata.get("tokenizer.ggml.add_bos_token")) is not None:
        return bool(said)
    kind = KINDS.get(metadata.get("tokenizer.ggml.model", ""))
    rule = kind and kind.rule(metadata.get("tokenizer.ggml.pre", default_pre_tokenizer(metadata)))
    return bool(rule and rule.bos)


def _guess_types(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[int]:
    """Types that a file does not tell: merging makes all tokens but single bytes and added ones."""
    made = {left + right for left, right in merges}
    known = ((NORMAL if len(t) == 1 or t in made else CONTROL) for t in tokens)
    pairs = zip(tokens, known, strict=True)
    return [UNUSED if kind == CONTROL and _PADDING.fullmatch(t) else kind for t, kind in pairs]


def _from_folder(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder} has no tokenizer.json; save the tokenizer there with "
            f"`AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`. {_ANOTHER}"
        )
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(folder)
    bos, first = fast.bos_token_id, fast("a")["input_ids"][:1]
    encoder = fast.backend_tokenizer
    encoder.no_truncation()
    encoder.no_padding()
    by_id = {i: token for token, i in encoder.get_vocab(with_added_tokens=True).items()}
    size = max(by_id) + 1
    missing = [i for i in range(size) if i not in by_id]
    if missing:
        raise UserError(f"{folder}/tokenizer.json has no token with id {missing[0]}")
    model = json.loads(encoder.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    added = fast.added_tokens_decoder
    if is_sentencepiece(encoder):
        merges = drop_added(merges, spell(encoder, [token.content for token in added.values()]))
    return Tokenizer(
        encoder=encoder,
        tokens=spell(encoder, [by_id[i] for i in range(size)]),
        merges=tuple(merges),
        special_ids=frozenset(i for i, token in added.items() if token.special),
        eos_id=int(fast.eos_token_id if fast.eos_token_id is not None else size - 1),
        chat_template=fast.chat_template if isinstance(fast.chat_template, str) else None,
        names_eos=fast.eos_token_id is not None,
        bos_id=bos,
        pad_id=fast.pad_token_id,
        opening_id=bos if first == [bos] else None,
    )
