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
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from kdjax.errors import UserError
from kdjax.formats import TensorTable, open_table
from kdjax.hub import TOKENIZER, fetch_model
from kdjax.models.families import FAMILIES

# How text is cut before merging, by `tokenizer.ggml.pre`. Sources: the pre_tokenizer entries of
# published tokenizer.json files, and llama.cpp's llama-vocab.cpp.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3, "gpt-2": _GPT2, "default": _GPT2}
_NFC = ("qwen2",)  # those whose tokenizer.json normalizes to NFC
# Those that take a piece whole if it is a token, merges or not (`ignore_merges`, likewise).
WHOLE = ("llama-bpe",)

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # enum llama_token_type in llama.h
_PADDING = re.compile(r"\[PAD\d+\]|<\|pad_\d+\|>")
_TEMPLATE_MARKS = re.compile(r"<\|[^|<>\s]+\|>|\[/?[A-Z_]{2,}\]")  # <|user|>, [INST]
_ANOTHER = (
    "Name a Hugging Face folder with a tokenizer.json, or a file, in its place: data.tokenizer of "
    "a config, --tokenizer of evaluate and generate, tokenizer= of kdjax.load."
)
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, with what vocabulary alignment and chat data need beside it."""

    encoder: Encoder
    tokens: tuple[str, ...]  # by id, padding entries left out
    merges: tuple[str, ...]  # "left right", in order of rank
    special_ids: frozenset[int]
    eos_id: int
    chat_template: str | None

    @property
    def vocab_size(self) -> int:
        """Number of ids that some token has; heads are often padded beyond it."""
        return len(self.tokens)

    @property
    def end_of_text_id(self) -> int:
        """The id that closes a document; an instruct model's `eos_id` closes a turn instead."""
        known = (self.encoder.token_to_id(name) for name in _END_OF_TEXT)
        return next((i for i in known if i is not None), self.eos_id)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: the end of a text and of a turn."""
        return tuple(sorted({self.end_of_text_id, self.eos_id}))

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that text is searched for before it is cut: special and other ones."""
        return frozenset(self.encoder.get_added_tokens_decoder())

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of all that decides ids: the serialised encoder, and the template."""
        whole = self.encoder.to_str() + json.dumps([sorted(self.special_ids), self.chat_template])
        return hashlib.sha256(whole.encode()).hexdigest()

    @functools.cached_property
    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes that each id stands for, int32; special ids stand for no text.

        None for a tokenizer that is not byte-level.
        """
        if '"ByteLevel"' not in json.dumps(json.loads(self.encoder.to_str())["decoder"]):
            return None
        added = self.encoder.get_added_tokens_decoder()
        # GPT-2's alphabet has one character for each byte.
        sizes = [
            len(token.encode() if i in added else token) for i, token in enumerate(self.tokens)
        ]
        return np.array([0 if i in self.special_ids else n for i, n in enumerate(sizes)], np.int32)

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

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""
        return self.encoder.decode(list(ids), skip_special_tokens=False)

    def encode_with_offsets(
        self, text: str, *, parse_special: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids as of `encode`, and the characters `[start, end)` that each came from."""
        encoder = self.encoder if parse_special else self._plain
        encoded = encoder.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

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
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(f"the chat template refuses the messages: {error}") from error
        return rendered[0]


def load_tokenizer(path: str | Path, table: TensorTable | None = None) -> Tokenizer:
    """The tokenizer of a GGUF or .apr file, or of a Hugging Face folder.

    A file without one of its own takes the `tokenizer.json` beside it. `table` spares opening the
    file once more. Raises `UserError` if there is no tokenizer.
    """
    path = Path(fetch_model(path, TOKENIZER))
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
    pre = metadata.get("tokenizer.ggml.pre", default_pre_tokenizer(metadata))
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{source} has tokenizer model {model!r} with pre-tokenizer {pre!r}; kdjax rebuilds "
            f"model 'gpt2' with one of {', '.join(PRE_TOKENIZERS)}. {_ANOTHER}"
        )
    tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
    merges: list[str] = list(metadata.get("tokenizer.ggml.merges", []))
    stored = metadata.get("tokenizer.ggml.token_type")
    types = _guess_types(tokens, merges) if stored is None else [int(t) for t in stored]
    while types and types[-1] == _UNUSED:  # "[PAD151665]" and its like
        types.pop()
    tokens = tokens[: len(types)]
    added = {i for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)}
    # Added tokens number themselves from the vocabulary's end on; those before it are part of it.
    end = max((i + 1 for i in range(len(tokens)) if i not in added), default=0)
    vocab = {token: i for i, token in enumerate(tokens[:end])}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    encoder = Encoder(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in WHOLE))
    if pre in _NFC:
        encoder.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[pre]), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    encoder.decoder = decoders.ByteLevel()
    encoder.add_tokens(
        [
            AddedToken(tokens[i], special=types[i] == _CONTROL, normalized=False)
            for i in sorted(added)
        ]
    )
    for i in sorted(added):
        if (found := encoder.token_to_id(tokens[i])) != i:
            raise UserError(
                f"{source}: found special token {tokens[i]!r} at id {i} and at {found}; expected "
                f"each token once. {_ANOTHER}"
            )
    eos, template = (
        metadata.get("tokenizer.ggml.eos_token_id", len(tokens) - 1),
        metadata.get("tokenizer.chat_template"),
    )
    rows = len(metadata["tokenizer.ggml.tokens"])  # a padding row is for an evaluation to name
    if type(eos) is not int or not 0 <= eos < rows:
        raise UserError(
            f"{source}: found the end token {eos!r}; expected an id below {rows}. {_ANOTHER}"
        )
    return Tokenizer(
        encoder=encoder,
        tokens=tuple(tokens),
        merges=tuple(merges),
        special_ids=frozenset(i for i in added if types[i] == _CONTROL),
        eos_id=eos,
        chat_template=template if isinstance(template, str) else None,
    )


def default_pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    """How text is cut, a key of `PRE_TOKENIZERS`, in a file that does not say."""
    if "general.architecture" in metadata:  # GGUF files from before the key existed
        return "default"
    family = FAMILIES.get(metadata.get("model_type", ""))
    return family.pre_tokenizer if family else "unknown"


def _guess_types(tokens: Sequence[str], merges: Sequence[str]) -> list[int]:
    """Types that a file does not tell: merging makes all tokens but single bytes and added ones."""
    made = {merge.replace(" ", "") for merge in merges}
    known = ((_NORMAL if len(t) == 1 or t in made else _CONTROL) for t in tokens)
    pairs = zip(tokens, known, strict=True)
    return [_UNUSED if kind == _CONTROL and _PADDING.fullmatch(t) else kind for t, kind in pairs]


def _from_folder(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder} has no tokenizer.json; save the tokenizer there with "
            f"`AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)`. {_ANOTHER}"
        )
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(folder)
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
    return Tokenizer(
        encoder=encoder,
        tokens=tuple(by_id[i] for i in range(size)),
        merges=tuple(merges),
        special_ids=frozenset(i for i, token in added.items() if token.special),
        eos_id=int(fast.eos_token_id if fast.eos_token_id is not None else size - 1),
        chat_template=fast.chat_template if isinstance(fast.chat_template, str) else None,
    )
