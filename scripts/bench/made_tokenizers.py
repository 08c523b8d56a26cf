"""Small tokenizers of two kinds, trained on a given text: byte-level BPE and SentencePiece's."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kdjax.models.tokenizer import Tokenizer


def make_byte_level(
    texts: Sequence[str],
    size: int,
    *,
    end: str = "<|endoftext|>",
    template: str | None = None,
    marks: Sequence[str] = (),
) -> Tokenizer:
    """Byte-level BPE of `size` ids; tokens may end within a character."""
    encoder: Any = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(texts, trainer)
    return _wrap(encoder, end, marks, template)


def make_sentencepiece(
    texts: Sequence[str],
    size: int,
    *,
    end: str = "</s>",
    template: str | None = None,
    marks: Sequence[str] = (),
) -> Tokenizer:
    """BPE of SentencePiece's kind: a space before each text, bytes for unknown characters."""
    trained: Any = Encoder(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", end, *marks]
    size -= 256 + len(special)
    # Named here: among characters seen equally often, the trainer takes others in every process.
    counts = Counter("".join(texts).replace(" ", "▁"))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:40]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += sorted(model["vocab"], key=lambda name: model["vocab"][name])
    known, merges = {name: i for i, name in enumerate(names)}, [tuple(m) for m in model["merges"]]
    encoder: Any = Encoder(
        models.BPE(known, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    encoder.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    encoder.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    encoder.add_special_tokens(special)
    return _wrap(encoder, end, ["<unk>", *marks], template)


def _wrap(encoder: Encoder, end: str, marks: Sequence[str], template: str | None) -> Tokenizer:
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    tokens = tuple(sorted(vocabulary, key=lambda name: vocabulary[name]))
    merges = json.loads(encoder.to_str())["model"]["merges"]
    return Tokenizer(
        encoder=encoder,
        tokens=tokens,
        merges=tuple(" ".join(m) for m in merges),
        special_ids=frozenset(vocabulary[name] for name in (end, *marks)),
        eos_id=vocabulary[end],
        chat_template=template,
    )


def write_students(
    shape: dict[str, Any], texts: Sequence[str], size: int, folder: Path, **settings: Any
) -> None:
    """Writes FOLDER/byte-level and FOLDER/sentencepiece: a Qwen2's and a Llama's shape, each with
    a tokenizer of `size` ids, trained on the texts; `settings` are its end, template and marks."""
    made = ("byte-level", make_byte_level, "qwen2"), ("sentencepiece", make_sentencepiece, "llama")
    for name, make, family in made:
        tokenizer = make(texts, size, **settings)
        out, end = folder / name, tokenizer.tokens[tokenizer.eos_id]
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.encoder.save(str(out / "tokenizer.json"))
        ids = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_id}
        named = {"architectures": [f"{family.title()}ForCausalLM"], "model_type": family}
        own = {"use_sliding_window", "max_window_layers"} if family == "llama" else set[str]()
        config = {k: v for k, v in shape.items() if k not in own} | named | ids
        (out / "config.json").write_text(json.dumps(config | {"bos_token_id": None}))
        about = {"eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
        about |= {"unk_token": "<unk>"} if family == "llama" else {}
        about |= {"chat_template": x} if (x := tokenizer.chat_template) else {}
        (out / "tokenizer_config.json").write_text(json.dumps(about))
