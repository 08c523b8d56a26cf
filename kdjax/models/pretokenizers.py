"""How text is cut before merging, by the names in GGUF files (`tokenizer.ggml.pre`).

Source: llama.cpp's llama-vocab.cpp. Where it approximates the pre_tokenizer of a published
tokenizer.json, which it quotes (classes of letters in tekken and gpt-4o), the published expression
stands here. llama.cpp normalizes nothing; published tokenizers do.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s+(?!\S)|\s+"
_QWEN2 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|\s*[\r\n]+|{_END}"
)
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_END}"
)
_LLAMA3 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_END}"
)
_MINICPM5 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")
_SEED = _QWEN2.replace(r"\p{N}|", r"\p{N}{1}|").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    rf"|\s*[\r\n]|{_END}"
)
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_END}"
)
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_END}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words_by_case(short: str, digits: str) -> str:
    """Words that end where an upper-case letter follows a lower-case one."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{short}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{short}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_END}"
    )


_TEKKEN = _words_by_case("", r"\p{N}")
_GPT4O = _words_by_case(f"{_SHORT}?", r"\p{N}{1,3}")
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_THREE_FROM_THE_END = r"\d{1,3}(?=(?:\d{3})*\b)"
_FALCON_MARKS = r"[\p{P}\$\+<=>\^~\|`]+"
_LATIN = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽ"
    "ᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ί"
    "ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_ASIAN = (
    "[一-\u9fff㐀-\u4dbf豈-\ufaff\u3040-ゟ゠-ヿ\uff65-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "ក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_END}"
)
_YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f\ufe30-\ufe4f]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


class Rule(NamedTuple):
    """Steps that a text goes through before its merges."""

    cuts: tuple[str, ...]  # regular expressions: each cuts the pieces of the one before
    nfc: bool = False  # whether the published tokenizer.json normalizes to NFC
    whole: bool = False  # whether a piece that is a token is not merged
    bos: bool = False  # whether BOS opens every text, if the file does not say


# The first name of a rule is the one that exports write.
_RULES: dict[str, Rule] = {
    "qwen2 deepseek-r1-qwen megrez kormo f2llmv2": Rule((_QWEN2,), nfc=True),
    "qwen35": Rule((_QWEN35,)),
    "stablelm2 hunyuan solar-open grok-2": Rule((_QWEN2,)),
    "laguna": Rule((r"[^\n]+|[\n]+", _QWEN2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": (
        Rule((_LLAMA3,), whole=True, bos=True)
    ),
    "glm4 glm5": Rule((_LLAMA3,), whole=True),
    "dbrx smaug-bpe chatglm-bpe": Rule((_LLAMA3,)),
    "minicpm5": Rule((_THREE_DIGITS, _MINICPM5), whole=True),
    "gpt-2 default phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe "
    "gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion granite-docling": Rule((_GPT2,)),
    "mpt olmo": Rule((_GPT2,), nfc=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": Rule((_DIGIT, _GPT2)),
    "command-r": Rule((_DIGIT, _GPT2), nfc=True),
    "falcon": Rule((_FALCON_MARKS, _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": Rule(
        (
            r"[\r\n]",
            rf"\s?[{_LATIN}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Rule((_THREE_DIGITS, _KANA, _DEEPSEEK3)),
    "afmoe": Rule((_THREE_FROM_THE_END, _ASIAN, _DEEPSEEK3)),
    "youtu": Rule((_YOUTU, _words_by_case(f"{_SHORT}?", _DIGIT)), whole=True),
    "tekken": Rule((_TEKKEN,), whole=True, bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Rule((_GPT4O,)),
    "granite-embed-multi-97m": Rule((_GPT4O,), whole=True),
    "tiny_aya cohere2moe": Rule((_THREE_FROM_THE_END, _GPT4O)),
    "poro-chat bloom gpt3-finnish": Rule((_BLOOM,)),
    "viking": Rule((_BLOOM, _DIGIT)),
    "seed-coder": Rule((_SEED,)),
    "bailingmoe bailingmoe2 llada-moe": Rule((_BAILING,)),
    "exaone-moe": Rule((_EXAONE_MOE,)),
}
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names.split()}


def _cuts(part: Mapping[str, Any]) -> tuple[str, ...]:
    """The expressions by which one step of a tokenizer.json cuts."""
    match part:
        case {"type": "Sequence", "pretokenizers": steps}:
            return tuple(cut for step in steps for cut in _cuts(step))
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            return (pattern,)
        case {"type": "Split", "pattern": {"String": text}}:
            return (re.escape(text),)
        case {"type": "Digits", "individual_digits": individual}:
            return (_DIGIT,) if individual else (r"\p{N}+",)
        case {"type": "ByteLevel", "use_regex": True}:
            return (_GPT2,)  # built in
        case {"type": "ByteLevel"}:
            return ()
    return (json.dumps(part),)  # of a kind that no name stands for


def name_of(encoder: Mapping[str, Any]) -> str | None:
    """The name of a tokenizer.json's rule; None if no rule fits."""
    cuts, whole = _cuts(encoder["pre_tokenizer"] or {}), bool(encoder["model"].get("ignore_merges"))
    nfc = '"NFC"' in json.dumps(encoder["normalizer"])
    fitting = [name for name, r in PRE_TOKENIZERS.items() if (r.cuts, r.whole) == (cuts, whole)]
    # If only the normalizer differs, llama.cpp's ids are equal.
    return next((n for n in fitting if PRE_TOKENIZERS[n].nfc == nfc), next(iter(fitting), None))
