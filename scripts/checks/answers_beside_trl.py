"""Compares what trains here with the tokens that TRL's `assistant_only_loss` trains.

    pip download --no-deps trl==1.16.0 && unzip -d TRL trl-*.whl
    python -m scripts.checks.answers_beside_trl TRL/trl/chat_templates --json=FILE

kdjax reads the published templates (`tests/goldens/templates`). TRL puts a template with
`{% generation %}` marks in their place, `NAME_training.jinja`, and takes the mask of Transformers'
`apply_chat_template(return_assistant_tokens_mask=True)`, as its `SFTTrainer` does here.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from kdjax.data import rows, text
from kdjax.data.conversations import read_conversation, render_answers
from kdjax.errors import UserError
from kdjax.formats import open_table
from kdjax.models.tokenizer import Tokenizer, from_gguf

_TEMPLATES = Path("tests/goldens/templates")
_STUDENT = Path("kdjax/demo/student.gguf")
_FAMILIES = {  # the token that ends a turn or a text, and further special tokens
    "qwen2_5": ("<|im_end|>", "<|im_start|>"),
    "qwen3": ("<|im_end|>", "<|im_start|>"),
    "qwen3_instruct_2507": ("<|im_end|>", "<|im_start|>"),
    "qwen3_5_think": ("<|im_end|>", "<|im_start|>"),
    "qwen3_6": ("<|im_end|>", "<|im_start|>"),
    "llama3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    "gemma3": ("<end_of_turn>", "<start_of_turn>", "<bos>"),
    "phi3": ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "phi3_5": ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
}


def _say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


_ONE = [_say("user", "first?"), _say("assistant", "Alpha.")]
CONVERSATIONS = {
    "one turn": _ONE,
    "several": [*_ONE, _say("user", "b?"), _say("assistant", "Beta.\nMore.")],
    "system": [_say("system", "Be kind."), *_ONE],
    "thinking": [
        _say("user", "a?"),
        _say("assistant", "<think>\nhmm one\n</think>\n\nAlpha."),
        _say("user", "b?"),
        _say("assistant", "<think>\nhmm two\n</think>\n\nBeta."),
    ],
}


def make_tokenizer(name: str) -> Tokenizer:
    """The demo's tokenizer with the template and the special tokens of a family."""
    metadata = dict(open_table(_STUDENT).metadata)
    tokens = [t for t in metadata["tokenizer.ggml.tokens"] if not t.startswith("[PAD")]
    types = [int(t) for t in metadata["tokenizer.ggml.token_type"]][: len(tokens)]
    added = [mark for mark in _FAMILIES[name] if mark not in tokens]
    metadata["tokenizer.ggml.tokens"] = [*tokens, *added]
    metadata["tokenizer.ggml.token_type"] = [*types, *[3] * len(added)]
    made = from_gguf(metadata, name)
    template = (_TEMPLATES / f"{name}.jinja").read_text()
    end = made.tokens.index(_FAMILIES[name][0])
    return dataclasses.replace(made, chat_template=template, eos_id=end)


def train_here(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """Text of the tokens that kdjax trains."""
    rendered, spans = render_answers(read_conversation({"messages": messages}), tokenizer)
    document = text.Document(rendered, "conversation", spans, open=False)
    ((_, ids, mask),) = rows.tokenize_documents([document], tokenizer, tokenizer.eos_id)
    return tokenizer.decode(ids[mask.astype(bool)].tolist())


def train_there(tokenizer: Tokenizer, messages: list[dict[str, str]], template: str) -> str:
    """Text of the tokens that TRL trains, by its template."""
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.encoder, eos_token=tokenizer.tokens[tokenizer.eos_id]
    )
    said = fast.apply_chat_template(
        messages,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = np.array(said["input_ids"]), np.array(said["assistant_masks"], bool)
    return tokenizer.decode(ids[mask].tolist())


def main(argv: list[str] | None = None) -> int:
    """Prints each difference; writes all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="trl/chat_templates of TRL's wheel")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found, equal, lines = [], 0, 0
    for name in _FAMILIES:
        tokenizer = make_tokenizer(name)
        template = (args.folder / f"{name}_training.jinja").read_text()
        for kind, messages in CONVERSATIONS.items():
            try:
                here = train_here(tokenizer, messages)
            except UserError as error:
                here = f"refused: {error}"
            there = train_there(tokenizer, messages, template)
            found.append({"template": name, "conversation": kind, "here": here, "trl": there})
            equal += here == there
            end = "<|end|>" if name.startswith("phi") else _FAMILIES[name][0]
            lines += here != there == here.replace(end, f"{end}\n")
            if there not in (here, here.replace(end, f"{end}\n")):
                print(f"{name}, {kind}:\n  here {here!r}\n  TRL  {there!r}")
    print(f"{equal} of {len(found)} alike, {lines} but for a newline after the end of a turn")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
