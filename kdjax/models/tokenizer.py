"""Tokenizers, rebuilt from a GGUF header or read from a Hugging Face folder.

`tokenizers` encodes and `transformers` renders chat templates; this module builds them from GGUF
key-values.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import textwrap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders

from kdjax.errors import UserError
from kdjax.formats import TensorTable, open_table
from kdjax.formats.files import load_json
from kdjax.hub import TOKENIZER, fetch_path
from kdjax.models.encoders import (
    CONTROL,
    KINDS,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    EncoderParts,
    add_tokens,
    byte_alphabet,
    decoder_within,
    drop_added,
    is_byte_level,
    is_sentencepiece,
    rank_by_score,
    spell,
)
from kdjax.models.families import FAMILIES
from kdjax.models.long_text import encode_pieces, encode_texts
from kdjax.models.pretokenizers import Rule
from kdjax.models.templates import Rendering, render_template

_PADDING = re.compile(r"\[PAD\d+\]|<\|pad_\d+\|>")
_TEMPLATE_MARKS = re.compile(r"<\|[^|<>\s]+\|>|\[/?[A-Z_]{2,}\]")  # <|user|>, [INST]
_ANOTHER = (
    "Name a Hugging Face folder with a tokenizer.json, or a file, in its place: data.tokenizer of "
    "a config, --tokenizer of evaluate and generate, tokenizer= of kdjax.load."
)
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
# Some of the tokens that llama.cpp takes for the end of a generation (llama-vocab.cpp).
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>")
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # a token of SentencePiece


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Converts text to ids and back; has facts for vocabulary alignment and chat data."""

    encoder: Encoder
    tokens: tuple[str, ...]  # by id, padding entries left out
    merges: tuple[str, ...]  # "left right", in order of rank
    special_ids: frozenset[int]
    eos_id: int
    chat_template: str | None
    names_eos: bool = True  # whether its file names EOS; otherwise `eos_id` is the last id
    bos_id: int | None = None
    pad_id: int | None = None
    opening_id: int | None = None  # BOS, if the model's file puts it before every text
    named_ends: frozenset[int] = frozenset()  # other ids in its file that end answers

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a token; heads are often padded beyond it."""
        return len(self.tokens)

    @property
    def end_of_text_id(self) -> int:
        """The id that closes a document; an instruct model's `eos_id` closes a turn instead.

        Raises `UserError` for a tokenizer that names no EOS and has no token of a known name.
        """
        if (end := self.find_end()) is not None:
            return end
        raise UserError(
            "found a tokenizer without eos_token_id and without a token such as "
            f"{_END_OF_TEXT[0]}; expected one that ends a text. Name it: data.end_of_document of "
            "a config; or put tokenizer.ggml.eos_token_id into the GGUF file (gguf-new-metadata "
            "--special-token-by-id eos ID), eos_token into tokenizer_config.json."
        )

    def find_end(self) -> int | None:
        """`end_of_text_id`; None if the tokenizer has none."""
        named = self.eos_id if self.names_eos else None
        return next(iter(self._added_named(_END_OF_TEXT)), named)

    @property
    def end_of_turn_id(self) -> int:
        """The id that closes an answer; raises `UserError` as `end_of_text_id` does."""
        if self.names_eos:
            return self.eos_id
        turns = self._added_named(_END_OF_TURN)
        return turns[0] if turns else self.end_of_text_id

    def _added_named(self, names: Sequence[str]) -> list[int]:
        """Ids of these names among added tokens, special ones first: Gemma has "</s>" as HTML."""
        found = [i for name in names if (i := self.encoder.token_to_id(name)) in self.added_ids]
        return sorted(found, key=lambda i: i not in self.special_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: the end of a text and of a turn; () if none is known."""
        turns = self.special_ids.intersection(self._added_named(_END_OF_TURN))
        named = {self.eos_id} if self.names_eos else set[int]()
        end = self.find_end()
        ends = set[int]() if end is None else {end}
        return tuple(sorted({*ends, *named, *turns, *self.named_ends}))

    def list_unknown_ends(self) -> list[int]:
        """Lists the ids in `stop_ids` that llama.cpp does not know by their names."""
        known = {*_END_OF_TEXT, *_END_OF_TURN}
        size = self.vocab_size
        return [i for i in self.stop_ids if i < size and self.tokens[i] not in known]

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of added tokens, special or not: text is searched for them before it is cut."""
        return frozenset(self.encoder.get_added_tokens_decoder())

    def open_text(self, ids: list[int]) -> list[int]:
        """Ids of the beginning of a text, after BOS if the model's file adds it."""
        if self.opening_id is None or ids[:1] == [self.opening_id]:
            return ids
        return [self.opening_id, *ids]

    def open_array(self, ids: np.ndarray) -> np.ndarray:
        """Opens an array, uint32 `[n]`, as `open_text` does."""
        opened = np.array(self.open_text(ids[:1].tolist()), np.uint32)
        return np.concatenate([opened, ids[1:]])

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of everything that decides ids: the serialised encoder, the template, and BOS."""
        said = [sorted(self.special_ids), self.chat_template]
        if self.opening_id is not None:
            said.append(self.opening_id)
        if "bos_token" in (self.chat_template or ""):
            said.append(self._named_tokens)
        whole = self.encoder.to_str() + json.dumps(said)
        return hashlib.sha256(whole.encode()).hexdigest()

    @functools.cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Number of UTF-8 bytes of each id, int32; 0 for special ids.

        None for a tokenizer that is neither byte-level nor of SentencePiece's kind.
        """
        if (spelled := self.spelled) is None:
            return None
        sizes = [0 if i in self.special_ids else len(text) for i, text in enumerate(spelled)]
        return np.array(sizes, np.int32)

    @functools.cached_property
    def spelled_lengths(self) -> np.ndarray:
        """Number of bytes of each entry of `spelled`, int64."""
        return np.array([len(text) for text in self.spelled or []], np.int64)

    @functools.cached_property
    def spelled(self) -> list[bytes] | None:
        """The bytes of each token, special ones by name; None in the cases of `token_bytes`."""
        if is_sentencepiece(self.encoder):
            return [
                bytes([int(token[3:5], 16)])
                if BYTE_TOKEN.fullmatch(token)
                else token.replace(SPACE, " ").encode()
                for token in self.tokens
            ]
        if not is_byte_level(self.encoder):
            return None
        added, alphabet = self.added_ids, byte_alphabet()
        return [
            t.encode() if i in added else b"".join(alphabet.get(c, c.encode()) for c in t)
            for i, t in enumerate(self.tokens)
        ]

    @functools.cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """The id of each spelling that only one token has; None in the cases of `token_bytes`."""
        spelled = self.spelled or []
        counts = collections.Counter(spelled)
        return {text: i for i, text in enumerate(spelled) if counts[text] == 1}

    @functools.cached_property
    def mark_ids(self) -> frozenset[int]:
        """Ids whose strings are marks, not text: special tokens, and added tokens such as <|this|>.

        Converters differ in whether they declare added tokens special.
        """
        marks = (i for i in self.added_ids if re.fullmatch(r"<\|.+\|>", self.tokens[i]))
        return self.special_ids.union(marks)

    @functools.cached_property
    def _plain(self) -> Encoder:
        """The encoder that reads the strings of `mark_ids` as ordinary text."""
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

    def find_marks(self, text: str) -> list[tuple[str, int]]:
        """Strings of `mark_ids`, and marks of the chat template, in a text; each with its end."""
        return [(m[0], m.end()) for m in self._mark_pattern.finditer(text)]

    def count_marks(self, text: str) -> dict[str, int]:
        """Counts of each string that `find_marks` finds in a text."""
        return dict(collections.Counter(mark for mark, _ in self.find_marks(text)))

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Ids of the text, without BOS or EOS.

        Strings of `mark_ids` become their ids, or ordinary text without `parse_special`.
        """
        encoder = self.encoder if parse_special else self._plain
        return encoder.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = True) -> list[list[int]]:
        """Encodes each text as `encode` does, on all cores."""
        encoder = self.encoder if parse_special else self._plain
        encoded = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [e.ids for e in encoded]

    def encode_pieces(
        self, text: str, *, parse_special: bool = True, source: str = "text"
    ) -> Iterator[np.ndarray]:
        """Encodes a long text as `encode` does, on all cores; yields uint32 ids piece by piece."""
        encoder = self.encoder if parse_special else self._plain
        return (ids for ids, _ in encode_pieces(encoder, text, source))

    def decode(self, ids: Sequence[int], *, start: bool = False) -> str:
        """Text of the ids, special tokens included.

        With `start` the ids begin a text, whose first space encoding may have added.
        """
        if start or self._within is None:
            return self.encoder.decode(list(ids), skip_special_tokens=False)
        known = (self.encoder.id_to_token(int(i)) for i in ids)
        return self._within.decode([token for token in known if token is not None])

    def find_offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Characters `[start, end)` of `decode(ids)` that each id spells, entirely or in part."""
        offsets: list[tuple[int, int]] = []
        at = 0
        for i in range(1, len(ids) + 1):
            text = self.decode(ids[len(offsets) : i])
            if i == len(ids) or not text.endswith("\N{REPLACEMENT CHARACTER}"):
                offsets += [(at, at + len(text))] * (i - len(offsets))
                at += len(text)
        return offsets

    @functools.cached_property
    def _within(self) -> decoders.Decoder | None:
        return decoder_within(self.encoder) if is_sentencepiece(self.encoder) else None

    def encode_with_offsets(
        self, text: str, *, parse_special: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes as `encode`; returns the characters `[start, end)` of each id too."""
        ((ids, offsets),) = self.encode_batch_with_offsets([text], parse_special=parse_special)
        return ids.tolist(), list(map(tuple, offsets.tolist()))

    def encode_batch_with_offsets(
        self, texts: Sequence[str], *, parse_special: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes texts as `encode_with_offsets`, on all cores: uint32 ids, int64 `[n, 2]`."""
        return encode_texts(self.encoder if parse_special else self._plain, texts)

    @property
    def _named_tokens(self) -> dict[str, Any]:
        """Tokens that a template may refer to by name."""
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id if self.names_eos else None}
        size = self.vocab_size
        return {name: self.tokens[i] for name, i in ids.items() if i is not None and i < size}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answer_next: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation by the chat template; `answer_next` opens the assistant's turn.

        `tools` are descriptions of functions, and `variables` what else the template may read, such
        as `enable_thinking`. Templates that write the date write `template_worker.DATE`. Raises
        `UserError` if the tokenizer has no template, the template refuses the messages or exceeds
        the bounds of `render_template`.
        """
        return self.render_marked(
            messages, tools, answer_next=answer_next, variables=variables
        ).text

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        answer_next: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """Renders as `render`; also returns what the template marks as the assistant's words."""
        if self.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template, so `messages` cannot be rendered; use plain "
                "`text`, an instruct model, or its tokenizer (data.tokenizer, --tokenizer)."
            )
        given = self._named_tokens | dict(variables or {})
        given |= {"tools": tools or None, "add_generation_prompt": answer_next}
        return render_template(self.chat_template, [dict(m) for m in messages], given)


def load_tokenizer(path: str | Path, table: TensorTable | None = None) -> Tokenizer:
    """Loads the tokenizer of a GGUF or .apr file, or of a Hugging Face folder.

    For a file without a tokenizer, the `tokenizer.json` in its folder is read. With a `table` the
    file is not opened again. Raises `UserError` if there is no tokenizer.
    """
    path = Path(fetch_path(path, TOKENIZER))
    if path.is_dir():  # it may have a tokenizer and no weights
        return _from_folder(path)
    table = open_table(path) if table is None else table
    if "general.architecture" in table.metadata or "tokenizer.ggml.tokens" in table.metadata:
        return from_gguf(table.metadata, str(path))
    return _from_folder(path.parent)


class TokenizerFiles(NamedTuple):
    """The place of a tokenizer: a folder's files or the key-values of a GGUF header."""

    folder: Path | None  # with tokenizer.json; None if key-values have the tokenizer
    values: dict[str, Any]  # the key-values

    def list_paths(self) -> list[Path]:
        """The tokenizer's files in the folder, without the model's config.json."""
        if self.folder is None:
            return []
        patterns = [name for name in TOKENIZER if name != "config.json"]
        paths = (path for name in patterns for path in sorted(self.folder.glob(name)))
        return [path for path in paths if path.is_file()]


def find_tokenizer_files(path: str | Path, table: TensorTable | None = None) -> TokenizerFiles:
    """Finds the place of a file's or folder's tokenizer; `table` as in `load_tokenizer`."""
    path = Path(fetch_path(path, TOKENIZER))
    if path.is_dir():
        return TokenizerFiles(path, {})
    metadata = (open_table(path) if table is None else table).metadata
    values = {key: metadata[key] for key in metadata if key.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" in values:
        values.setdefault("tokenizer.ggml.pre", default_pre_tokenizer(metadata))
        return TokenizerFiles(None, values)
    return TokenizerFiles(path.parent, {})


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Rebuilds a byte-level BPE tokenizer from GGUF key-values; `source` is named in errors.

    Raises `UserError` for key-values without such a tokenizer.
    """
    try:
        return _rebuild(metadata, source)
    except UserError:
        raise
    except Exception as error:  # values may have any type, and the encoder raises bare exceptions
        raise UserError(
            f"{source}: found a tokenizer that cannot be rebuilt ({type(error).__name__}: "
            f"{str(error)[:200]}); expected tokens, their types and merges of two. {_ANOTHER}"
        ) from error


def _read_parts(metadata: Mapping[str, Any], rule: Rule, *, scored: bool) -> EncoderParts:
    """Reads tokens without padding rows, their types, and merges, by score if `scored`."""
    tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
    parts = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges", [])]
    merges = [(left, right) for left, right in parts]
    stored = metadata.get("tokenizer.ggml.token_type")
    types = _guess_types(tokens, merges) if stored is None else [int(t) for t in stored]
    while types and types[-1] == UNUSED:  # "[PAD151665]" and its like
        types.pop()
    tokens = tokens[: len(types)]
    if scored:
        merges = rank_by_score(tokens, types, [float(s) for s in metadata["tokenizer.ggml.scores"]])
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", scored))
    return EncoderParts(tokens, types, merges, rule, prefix)


def _rebuild(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    if "tokenizer.ggml.tokens" not in metadata:
        raise UserError(f"{source} holds no tokenizer (no tokenizer.ggml.tokens). {_ANOTHER}")
    model = metadata.get("tokenizer.ggml.model")
    if model not in KINDS:
        raise UserError(
            f"{source} has tokenizer model {model!r}; kdjax rebuilds {', '.join(KINDS)} "
            f"(byte-level, SentencePiece's and Gemma 4's BPE). {_ANOTHER}"
        )
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    key = _hash_values(metadata)
    if (built := _IN_USE.get(key)) is not None:
        return dataclasses.replace(built, chat_template=template)
    kind, rows = KINDS[model], metadata["tokenizer.ggml.tokens"]
    pre = metadata.get("tokenizer.ggml.pre", default_pre_tokenizer(metadata))
    if (rule := kind.rule(pre)) is None:
        raise UserError(
            f"{source} has tokenizer model {model!r} with pre-tokenizer {pre!r}; kdjax rebuilds it "
            f"with one of {', '.join(kind.rules)}. {_ANOTHER}"
        )
    words = _read_parts(metadata, rule, scored=kind.scored)
    tokens = words.tokens
    encoder = kind.build(words)
    for i, found in add_tokens(encoder, words).items():
        raise UserError(
            f"{source}: found special token {tokens[i]!r} at id {i} and at {found}; expected "
            f"each token once. {_ANOTHER}"
        )
    eos = metadata.get("tokenizer.ggml.eos_token_id", len(tokens) - 1)
    # `kdjax evaluate` reports a padding row.
    if type(eos) is not int or not 0 <= eos < len(rows):
        raise UserError(
            f"{source}: found the end token {eos!r}; expected an id below {len(rows)}. {_ANOTHER}"
        )
    names = "bos", "padding", "eot", "eom"
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    bos, pad, *ends = (i if type(i) is int and 0 <= i < len(tokens) else None for i in named)
    tokenizer = Tokenizer(
        encoder=encoder,
        tokens=spell(encoder, tokens),
        merges=tuple(f"{left} {right}" for left, right in words.merges),
        special_ids=frozenset(i for i, t in enumerate(words.types) if t in (CONTROL, UNKNOWN)),
        eos_id=eos,
        chat_template=template,
        names_eos="tokenizer.ggml.eos_token_id" in metadata,
        bos_id=bos,
        pad_id=pad,
        opening_id=bos if opens_with_bos(metadata) else None,
        named_ends=frozenset(i for i in ends if i is not None),
    )
    _IN_USE[key] = tokenizer
    return tokenizer


# By `_hash_values`: a student's and a teacher's file mostly have one tokenizer, which takes 2 s to
# build (151,665 ids).
_IN_USE: weakref.WeakValueDictionary[str, Tokenizer] = weakref.WeakValueDictionary()


def _hash_values(metadata: Mapping[str, Any]) -> str:
    """Hashes the key-values that `_rebuild` reads, but for the chat template.

    Strings of a GGUF header are not decoded for it: for two headers that took 0.5 s.
    """
    stored = getattr(metadata, "stored", metadata.get)
    values = {key: stored(key) for key in metadata if key.startswith("tokenizer.ggml.")}
    values.setdefault("tokenizer.ggml.pre", default_pre_tokenizer(metadata))
    text = json.dumps(values, sort_keys=True, default=_hash_array)
    return hashlib.sha256(text.encode()).hexdigest()


def _hash_array(array: Any) -> str:
    """Hashes an array of numbers, or bytes."""
    numbers = np.asarray(array)
    return f"{numbers.dtype.str} {hashlib.sha256(numbers.tobytes()).hexdigest()}"


def default_pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    """Chooses the pre-tokenizer, a key of `PRE_TOKENIZERS`, for a file that names none."""
    if "general.architecture" in metadata:  # GGUF files from before the key existed
        return "default"
    family = FAMILIES.get(metadata.get("model_type", ""))
    return family.pre_tokenizer if family else "unknown"


def opens_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether BOS opens every text: by the file, or by the kind of tokenizer."""
    if (said := metadata.get("tokenizer.ggml.add_bos_token")) is not None:
        return bool(said)
    kind = KINDS.get(metadata.get("tokenizer.ggml.model", ""))
    rule = kind and kind.rule(metadata.get("tokenizer.ggml.pre", default_pre_tokenizer(metadata)))
    return bool(rule and rule.bos)


def _guess_types(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[int]:
    """Types of tokens in a file without types: tokens that no merge makes are control tokens."""
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
    fast = _open_by_transformers(folder)
    bos, first = fast.bos_token_id, fast("a")["input_ids"][:1]
    encoder = fast.backend_tokenizer
    encoder.no_truncation()
    encoder.no_padding()
    by_id = {i: token for token, i in encoder.get_vocab(with_added_tokens=True).items()}
    size = max(by_id) + 1
    if size > len(by_id):
        missing = next(i for i in itertools.count() if i not in by_id)
        raise UserError(
            f"{folder}/tokenizer.json has no token with id {missing}, and one with id {size - 1}; "
            f"expected ids without a gap. {_ANOTHER}"
        )
    path = folder / "generation_config.json"
    ends = load_json(path, "a file").get("eos_token_id") if path.is_file() else None
    ends = ends if isinstance(ends, list) else [ends]
    template = fast.chat_template
    if isinstance(template, dict):  # several templates, by name
        template = template.get("default")
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
        chat_template=template if isinstance(template, str) else None,
        names_eos=fast.eos_token_id is not None,
        bos_id=bos,
        pad_id=fast.pad_token_id,
        opening_id=bos if first == [bos] else None,
        named_ends=frozenset(i for i in ends if type(i) is int and 0 <= i < size),
    )


def _open_by_transformers(folder: Path) -> Any:
    """Loads a tokenizer by Transformers; raises `UserError` if it refuses the folder."""
    from transformers import CONFIG_MAPPING, AutoTokenizer, PretrainedConfig

    path, given = folder / "config.json", dict[str, Any]()
    config = load_json(path, "a file") if path.is_file() else {}
    try:
        if path.is_file() and config.get("model_type") not in CONFIG_MAPPING:
            # For a model without a class there (MiniCPM) it would ask to run the folder's code, and
            # read longrope as for a class; nothing in the config concerns the tokenizer.
            given["config"] = PretrainedConfig()
        # None, the default, asks on standard input whether to run the folder's code.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **given)
    except Exception as error:  # validators of Transformers and its tokenizers raise any kind
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{folder}: found a tokenizer that is code in the folder (auto_map of "
                f"tokenizer_config.json), which kdjax never runs. {_ANOTHER}"
            ) from error
        cause = error.__cause__ or error
        said = textwrap.shorten(f"{type(cause).__name__}: {cause}", 300)
        raise UserError(
            f"{folder}: Transformers refuses {_find_refused({} if given else config, said)} "
            f"({said}). "
            "Correct it, or save config and tokenizer again as `save_pretrained` writes them. "
            f"{_ANOTHER}"
        ) from error


def _find_refused(config: dict[str, Any], said: str) -> str:
    """Names what Transformers refuses in a folder: the field without which it accepts the config.

    If there is no such field (the defaults of a large model do not fit the other fields of a small
    one), it is the first field that the error `said` names, or the field that it accepts as 1.
    """
    from transformers import AutoConfig

    def is_taken(fields: Mapping[str, Any]) -> bool:
        try:
            AutoConfig.for_model(**fields)
        except Exception:  # any kind, as above
            return False
        return True

    if not config or is_taken(config):
        return "its tokenizer files"
    names = [name for name in config if name != "model_type"]
    left_out = (n for n in names if is_taken({k: v for k, v in config.items() if k != n}))
    quoted = (n for n in re.findall(r"['`](\w+)['`]", said) if n in names)
    as_one = (n for n in names if is_taken(config | {n: 1}))
    name = next(itertools.chain(left_out, quoted, as_one), None)
    return f"{name}={config[name]!r} of its config.json" if name else "its config.json"
