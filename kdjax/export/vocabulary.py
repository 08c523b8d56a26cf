"""Writes the tokenizer in the files of each format, from the files of any other.

Files of a Hugging Face folder are copied as they are, and so are GGUF key-values.
`kdjax.models.tokenizer` converts one to the other.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Encoder
from tokenizers.processors import TemplateProcessing

from kdjax.errors import AS_FOLDER, UserError
from kdjax.export.staging import write_json
from kdjax.formats.files import load_json
from kdjax.models.encoders import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    is_sentencepiece,
    puts_one_space,
    puts_space,
    score_by_rank,
)
from kdjax.models.pretokenizers import PRE_TOKENIZERS, name_of
from kdjax.models.tokenizer import BYTE_TOKEN, Tokenizer, TokenizerFiles

_log = logging.getLogger(__name__)

_SPACES = (
    "the file's tokenizer puts a space before every text and after special tokens, as llama.cpp "
    "does; the source's only before a text without one. Ids differ at such places, as in"
)
# Texts whose ids and text must not change, for any vocabulary.
_SAMPLES = (
    "def f(x):\n    return x + 1  # ok\n",
    "  leading, trailing  \n\n\ttabs\r\n",
    "naïve café, 漢字, ру́сский, 🙂👩‍💻, \u200b",
    "1234567890 0x1F 3.14e-10 != <= -> ::",
    "'s 't 're I'll DON'T",
    "",
)


def special_ids(tokenizer: Tokenizer, files: TokenizerFiles) -> dict[str, int]:
    """The special tokens' ids by the names of config.json; leaves out missing ones."""
    eos, pad = tokenizer.eos_id if tokenizer.names_eos else None, tokenizer.pad_id
    if eos is not None and eos >= tokenizer.vocab_size:
        eos = None
    if pad is None and files.folder is not None:
        pad = tokenizer.find_end()
    named = {"bos_token_id": tokenizer.bos_id, "eos_token_id": eos, "pad_token_id": pad}
    return {name: i for name, i in named.items() if i is not None}


def generation_config(tokenizer: Tokenizer, files: TokenizerFiles) -> dict[str, Any]:
    """Makes `generation_config.json`: the folder's file, or special tokens only.

    Its `eos_token_id` lists all ids that end an answer, the file's ids or the named end first.
    """
    if files.folder is not None and (path := files.folder / "generation_config.json").is_file():
        entries = load_json(path, "a file")
        named = entries.get("eos_token_id")
    else:
        entries = special_ids(tokenizer, files)
        named = entries.get("eos_token_id", tokenizer.find_end())
    ends = named if isinstance(named, list) else [] if named is None else [named]
    others = [i for i in tokenizer.stop_ids if i not in ends and i < tokenizer.vocab_size]
    return entries | ({"eos_token_id": [*ends, *others]} if ends or others else {})


def _encoder_json(encoder: Encoder) -> dict[str, Any]:
    return json.loads(encoder.to_str())


def _pre_tokenizer(encoder: Encoder, folder: Path | None) -> str:
    """llama.cpp's name for the rule that splits text before merging."""
    described = _encoder_json(encoder)
    if (name := name_of(described)) is None:
        whole = bool(described["model"].get("ignore_merges"))
        raise UserError(
            f"{folder}/tokenizer.json cuts text in a way (ignore_merges={whole}) that has no known "
            f"name in llama.cpp; expected one of {', '.join(PRE_TOKENIZERS)}. {AS_FOLDER} and use "
            "llama.cpp's convert_hf_to_gguf.py, or take the model from GGUF (--student=FILE.gguf)."
        )
    return name


def gguf_values(tokenizer: Tokenizer, files: TokenizerFiles, rows: int) -> dict[str, Any]:
    """The tokenizer as GGUF key-values, one token for each of `rows` rows of the embedding.

    Raises `UserError` for a tokenizer of more tokens, and for one that llama.cpp has no name for.
    """
    values = dict(files.values) if files.folder is None else _values_of_folder(tokenizer, files)
    tokens = list(values["tokenizer.ggml.tokens"])
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"found a tokenizer of {tokenizer.vocab_size} tokens; expected at most the "
            f"{rows} rows of the embedding. Give the tokenizer of this student."
        )
    tokens = tokens[:rows] + [f"[PAD{i}]" for i in range(len(tokens), rows)]
    values["tokenizer.ggml.tokens"] = tokens
    if "tokenizer.ggml.token_type" in values:
        types = [int(kind) for kind in values["tokenizer.ggml.token_type"]][:rows]
        values["tokenizer.ggml.token_type"] = types + [UNUSED] * (rows - len(types))
    named = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    if others := set(tokenizer.list_unknown_ends()).difference(named):
        values.setdefault("tokenizer.ggml.eot_token_id", min(others))
    return {key: value for key, value in values.items() if not is_empty(value)}


def is_empty(value: object) -> bool:
    """Whether the value is an empty list, for which GGUF has no element type."""
    return isinstance(value, list | np.ndarray) and not len(value)


def _values_of_folder(tokenizer: Tokenizer, files: TokenizerFiles) -> dict[str, Any]:
    ids, described = special_ids(tokenizer, files), _encoder_json(tokenizer.encoder)
    types = [NORMAL] * tokenizer.vocab_size
    for added in described["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    values: dict[str, Any] = {
        "tokenizer.ggml.tokens": list(tokenizer.tokens),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id if tokenizer.names_eos else None,
        "tokenizer.ggml.padding_token_id": ids.get("pad_token_id"),
        "tokenizer.ggml.bos_token_id": ids.get("bos_token_id", tokenizer.find_end()),
        "tokenizer.ggml.add_bos_token": tokenizer.opening_id is not None,
    }
    if is_sentencepiece(tokenizer.encoder):
        tokens, unknown = values["tokenizer.ggml.tokens"], described["model"].get("unk_token")
        for i, token in enumerate(tokenizer.tokens):
            if types[i] == NORMAL and BYTE_TOKEN.fullmatch(token):
                types[i] = BYTE
            elif token == unknown:
                types[i] = UNKNOWN
            elif types[i] == USER_DEFINED:  # text is searched for it before spaces are marked
                tokens[i] = tokenizer.encoder.id_to_token(i)
        values |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": score_by_rank(tokenizer.tokens, tokenizer.merges),
            "tokenizer.ggml.add_space_prefix": puts_space(tokenizer.encoder),
        }
    else:
        values |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_tokenizer(tokenizer.encoder, files.folder),
            "tokenizer.ggml.merges": list(tokenizer.merges),
        }
    if tokenizer.chat_template:
        values["tokenizer.chat_template"] = tokenizer.chat_template
    return {key: value for key, value in values.items() if value is not None}


def write_hf(tokenizer: Tokenizer, files: TokenizerFiles, folder: Path, context: int) -> None:
    """Writes the tokenizer's files into `folder`; `context` in tokens is `model_max_length`."""
    if files.folder is not None:
        for path in files.list_paths():
            target = folder / path.relative_to(files.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        return
    described = _encoder_json(tokenizer.encoder)
    ids, tokens = special_ids(tokenizer, files), tokenizer.tokens
    if tokenizer.opening_id is not None:
        bos = tokens[tokenizer.opening_id]
        encoder = Encoder.from_str(json.dumps(described))
        encoder.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.opening_id)],
        )
        described = _encoder_json(encoder)
    write_json(folder / "tokenizer.json", described)
    named = {name: ids.get(f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "added_tokens_decoder": {
            str(token["id"]): {flag: token[flag] for flag in flags}
            for token in described["added_tokens"]
        },
        **{name: None if i is None else tokens[i] for name, i in named.items()},
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    if tokenizer.chat_template:
        config["chat_template"] = tokenizer.chat_template
    write_json(folder / "tokenizer_config.json", config)


def compare_tokenizers(source: Tokenizer, written: Tokenizer) -> list[str]:
    """Lists the differences of the tokenizer read back from the source."""
    problems = [
        f"another {name.replace('_', ' ')}"
        for name in ("tokens", "special_ids", "eos_id", "chat_template")
        if getattr(source, name) != getattr(written, name)
    ]
    names = "".join(source.tokens[i] for i in sorted(source.special_ids)[:8])
    odd = []
    for text in (*_SAMPLES, names, f"a{names} b"):
        ids = source.encode(text)
        if written.encode(text) != ids or written.decode(ids) != source.decode(ids):
            odd.append(text)
    if puts_one_space(source.encoder) and not puts_one_space(written.encoder):
        added = [token.content for token in source.encoder.get_added_tokens_decoder().values()]
        known = [x for x in odd if x.startswith(" ") or any(token in x for token in added)]
        odd = [text for text in odd if text not in known]
        if known:
            _log.warning("%s %r", _SPACES, known[0])
    return problems + [f"other ids or text for {text!r}" for text in odd]
