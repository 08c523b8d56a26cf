"""Valid GGUF files of random weights, for tests, benchmarks and machines without a network.

A file has the shapes, block types, key-values and tokenizer of a Qwen2, Qwen3, Qwen3.5 or Gemma 3
as llama.cpp quantizes it, and random blocks, so that everything but what it says is like the real
thing.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kdjax.errors import UserError
from kdjax.formats import LazyTensor, TensorInfo, TensorTable, open_table
from kdjax.formats.blocks import BLOCKS, encode, row_bytes
from kdjax.formats.gguf import write_gguf
from kdjax.formats.recipes import RECIPES, Recipe, fitting, gets_more_bits
from kdjax.models.checkpoint import Checkpoint
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import Tokenizer
from kdjax.training.pair import Pair
from kdjax.training.vocabulary import Vocabulary

# Bytes of blocks drawn at a time: bounds memory, and is part of what a seed means.
_CHUNK_BYTES = 1 << 24
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # token types, `enum llama_token_type` in llama.h
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# In order of rank, left and right joined by "+"; each is a byte or an earlier result. "Ġ" is the
# space and "Ċ" the line feed of GPT-2's alphabet.
_PAIRS = """
    Ġ+Ġ ĠĠ+ĠĠ i+n r+e e+r s+e l+f se+lf o+r f+or d+e de+f u+r t+ur re+tur retur+n i+m p+or im+por
    impor+t a+n an+d in+t n+e n+o no+t o+n l+e le+n a+r i+f i+s T+r u+e Tr+ue F+a a+l Fa+l Fal+se
    e+l el+se Ċ+ĠĠĠĠ Ġ+= Ġ+self =+= (+)
"""
_MERGES = tuple(pair.replace("+", " ") for pair in _PAIRS.split())
_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


LayerOrder = Literal["published", "numeric"]


class ModelShape(NamedTuple):
    """Sizes of a Qwen2, Qwen3, Qwen3.5 or Gemma 3; `rows` of the embedding, padding included."""

    label: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    rows: int
    tied: bool  # no output.weight; the published 0.5B and 1.5B files are untied, with a copy
    head: int = 0  # width of one, of a Qwen3, whose queries and keys are normalised; 0: a Qwen2
    experts: int = 0  # in a layer; `expert_ffn` is the width of one
    experts_used: int = 0
    expert_ffn: int = 0
    window: int = 0  # of a Gemma 3: positions that local layers see
    delta_keys: int = 0  # of a Qwen3.5: heads of keys and of values in its delta layers,
    delta_values: int = 0
    delta_width: int = 0  # and the width of each
    shared_ffn: int = 0  # of one with experts: width of the shared one
    drafts: int = 0  # 1: behind the layers is the block that drafts

    @property
    def family(self) -> str:
        """Name in GGUF headers."""
        if self.window:
            return "gemma3"
        if self.delta_keys:
            return "qwen35moe" if self.experts else "qwen35"
        return "qwen3moe" if self.experts else "qwen3" if self.head else "qwen2"

    @property
    def head_width(self) -> int:
        """Width of a head of queries, keys and values alike."""
        return self.head or self.hidden // self.heads


# https://huggingface.co/Qwen/Qwen2.5-Coder-7B-Instruct/blob/main/config.json and its sisters.
QWEN25_SHAPES: dict[str, ModelShape] = {
    "0.5b": ModelShape("0.5B", 24, 896, 14, 2, 4864, 151936, tied=True),
    "1.5b": ModelShape("1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True),
    "7b": ModelShape("7B", 28, 3584, 28, 4, 18944, 152064, tied=False),
    "14b": ModelShape("14B", 48, 5120, 40, 8, 13824, 152064, tied=False),
    "32b": ModelShape("32B", 64, 5120, 40, 8, 27648, 152064, tied=False),
    # Two toys whose vocabularies share their tokens and differ in padding, as 7B and 0.5B do;
    # the student's width of 128 is no whole K-block, so the recipe falls back to Q5_0 and Q8_0.
    "tiny-teacher": ModelShape("tiny-teacher", 3, 256, 4, 2, 512, 384, tied=False),
    "tiny-student": ModelShape("tiny-student", 2, 128, 4, 2, 256, 320, tied=True),
}
# https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json and Qwen3-0.6B's.
QWEN3_SHAPES: dict[str, ModelShape] = {
    "qwen3-0.6b": ModelShape("0.6B", 28, 1024, 16, 8, 3072, 151936, tied=True, head=128),
    "qwen3-30b-a3b": ModelShape(
        "30B-A3B",
        48,
        2048,
        32,
        4,
        6144,
        151936,
        False,
        128,
        experts=128,
        experts_used=8,
        expert_ffn=768,
    ),
    # The widths of Qwen3.5's 0.8B, 9B and 27B with plain attention in every layer.
    "plain-0.8b": ModelShape("plain-0.8b", 24, 1024, 8, 2, 3584, 248320, True, head=256),
    "plain-9b": ModelShape("plain-9b", 32, 4096, 16, 4, 12288, 248320, False, head=256),
    "plain-27b": ModelShape("plain-27b", 64, 5120, 24, 4, 17408, 248320, False, head=256),
    "tiny-experts": ModelShape(
        "tiny-experts",
        3,
        256,
        4,
        2,
        512,
        384,
        False,
        32,
        experts=8,
        experts_used=2,
        expert_ffn=256,
    ),
}
# Those of gemma-3-270m and gemma-3-1b-it; the toy's layers are of both kinds.
GEMMA3_SHAPES: dict[str, ModelShape] = {
    "gemma3-270m": ModelShape("270M", 18, 640, 4, 1, 2048, 262144, True, 256, window=512),
    "gemma3-1b": ModelShape("1B", 26, 1152, 4, 1, 6912, 262144, True, 256, window=512),
    "tiny-gemma": ModelShape("tiny-gemma", 7, 128, 4, 1, 256, 384, True, 32, window=16),
}


# https://huggingface.co/Qwen/Qwen3.5-9B/blob/main/config.json and its sisters (2B's sizes were not
# compared with a published header). Every fourth layer attends, by a quarter of a head's columns.
# The toys' value heads are equal to key heads and three times as many.
QWEN35_SHAPES: dict[str, ModelShape] = {
    label: ModelShape(label, *sizes, delta_keys=keys, delta_values=values, delta_width=width)
    for label, sizes, keys, values, width in (
        ("qwen3.5-0.8b", (24, 1024, 8, 2, 3584, 248320, True, 256), 16, 16, 128),
        ("qwen3.5-2b", (24, 2048, 8, 2, 6144, 248320, True, 256), 16, 16, 128),
        ("qwen3.5-4b", (32, 2560, 16, 4, 9216, 248320, True, 256), 16, 32, 128),
        ("qwen3.5-9b", (32, 4096, 16, 4, 12288, 248320, False, 256), 16, 32, 128),
        ("qwen3.5-27b", (64, 5120, 24, 4, 17408, 248320, False, 256), 16, 48, 128),
        ("tiny-delta", (4, 128, 4, 2, 256, 384, True, 32), 2, 2, 32),
        ("tiny-delta-teacher", (8, 256, 4, 2, 512, 384, False, 32), 2, 6, 64),
        # With experts in place of one MLP, and a shared one; no header tells of another width.
        ("qwen3.5-35b-a3b", (40, 2048, 16, 2, 0, 248320, False, 256), 16, 32, 128),
        ("tiny-delta-experts", (4, 256, 4, 2, 0, 384, False, 32), 2, 6, 64),
    )
}
for _label, _counts in {
    "qwen3.5-35b-a3b": dict(experts=256, experts_used=8, expert_ffn=512, shared_ffn=512),
    "tiny-delta-experts": dict(experts=8, experts_used=2, expert_ffn=256, shared_ffn=256),
}.items():
    QWEN35_SHAPES[_label] = QWEN35_SHAPES[_label]._replace(**_counts)
SHAPES = QWEN25_SHAPES | QWEN3_SHAPES | GEMMA3_SHAPES | QWEN35_SHAPES


def tensor_plan(
    shape: ModelShape, recipe: Recipe, layer_order: LayerOrder = "published"
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, block type, row-major shape) of every tensor, as `llama-quantize` chooses them.

    With "published", exactly as in the published Qwen2.5-Coder files (if untied, as they are).
    """
    hidden, kv_width = shape.hidden, shape.head_width * shape.kv_heads
    q_width = shape.head_width * shape.heads
    plan: list[tuple[str, str, tuple[int, ...]]] = []

    def matrix(name: str, dtype: str, *sizes: int) -> None:
        plan.append((f"{name}.weight", fitting(dtype, sizes[-1]), sizes))

    def projection(part: str, dtype: str, rows: int) -> None:
        if shape.head and part != "v":
            plan.append((f"{block}.attn_{part}_norm.weight", "F32", (shape.head,)))
        elif not shape.head:
            plan.append((f"{block}.attn_{part}.bias", "F32", (rows,)))
        matrix(f"{block}.attn_{part}", dtype, rows, hidden)

    def delta_net() -> None:
        values = shape.delta_values * shape.delta_width
        columns = 2 * shape.delta_keys * shape.delta_width + values
        matrix(f"{block}.attn_gate", recipe.base, values, hidden)
        matrix(f"{block}.attn_qkv", more, columns, hidden)
        plan.append((f"{block}.ssm_a", "F32", (shape.delta_values,)))
        matrix(f"{block}.ssm_alpha", recipe.base, shape.delta_values, hidden)
        matrix(f"{block}.ssm_beta", recipe.base, shape.delta_values, hidden)
        plan.append((f"{block}.ssm_conv1d.weight", "F32", (columns, 4)))
        plan.append((f"{block}.ssm_dt.bias", "F32", (shape.delta_values,)))
        plan.append((f"{block}.ssm_norm.weight", "F32", (shape.delta_width,)))
        matrix(f"{block}.ssm_out", recipe.base, hidden, values)

    # A tied embedding is the output too, and gets the output's bits.
    if not shape.tied:
        matrix("output", recipe.output, shape.rows, hidden)
    matrix("token_embd", recipe.output if shape.tied else recipe.base, shape.rows, hidden)
    # The rule for more bits counts layers in the order in which they stand in the file. Converters
    # of 2024 wrote them sorted as text (0, 1, 10, 11, ..., 2, 20, ...), so that in the published
    # files the richer layers look scattered: 0, 1, 5-10, 13, 16, ... of 28.
    blocks = shape.layers + shape.drafts
    order = sorted(range(blocks), key=str if layer_order == "published" else int)
    for place, layer in enumerate(order):
        block = f"blk.{layer}"
        more = recipe.more if gets_more_bits(place, blocks) else recipe.base
        plan.append((f"{block}.attn_norm.weight", "F32", (hidden,)))
        if shape.experts:
            stack = shape.experts, shape.expert_ffn
            matrix(f"{block}.ffn_down_exps", more, shape.experts, hidden, shape.expert_ffn)
            matrix(f"{block}.ffn_gate_exps", recipe.base, *stack, hidden)
            plan.append((f"{block}.ffn_gate_inp.weight", "F32", (shape.experts, hidden)))
            matrix(f"{block}.ffn_up_exps", recipe.base, *stack, hidden)
        ffn, kind = (shape.shared_ffn, "_shexp") if shape.experts else (shape.ffn, "")
        if ffn:
            matrix(f"{block}.ffn_down{kind}", more, hidden, ffn)
            matrix(f"{block}.ffn_gate{kind}", recipe.base, ffn, hidden)
            matrix(f"{block}.ffn_up{kind}", recipe.base, ffn, hidden)
        if shape.shared_ffn:
            plan.append((f"{block}.ffn_gate_inp_shexp.weight", "F32", (hidden,)))
        second = "post_attention_norm" if shape.delta_keys else "ffn_norm"
        plan.append((f"{block}.{second}.weight", "F32", (hidden,)))
        if layer >= shape.layers:
            matrix(f"{block}.nextn.eh_proj", recipe.base, hidden, 2 * hidden)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                plan.append((f"{block}.nextn.{name}.weight", "F32", (hidden,)))
        elif shape.delta_keys and (layer + 1) % 4:
            delta_net()
            continue
        if shape.window:
            for name in ("post_attention_norm", "post_ffw_norm"):
                plan.append((f"{block}.{name}.weight", "F32", (hidden,)))
        projection("k", recipe.base, kv_width)
        matrix(f"{block}.attn_output", recipe.base, hidden, q_width)
        projection("q", recipe.base, (2 if shape.delta_keys else 1) * q_width)
        projection("v", more, kv_width)
    plan.append(("output_norm.weight", "F32", (hidden,)))
    return plan


# Root mean square of a weight for d = 1, when all integers of a block are drawn uniformly:
# of q alone, by type or the begin of its name, and for types of 256 times that of the scales.
_RMS_Q = {
    "Q4": 4.61,
    "Q5": 9.23,
    "Q6": 18.5,
    "Q8": 73.9,
    "Q2": 1.12,
    "Q1_0": 1.0,
    "Q2_0": 1.22,
    "Q3": 2.35,
    "IQ4": 67.4,
    "TQ1": 0.816,
    "TQ2": 1.22,
    "IQ3": 1.0,  # of a grid's entries it stands with the scales
    "IQ2": 1.0,
    "IQ1": 1.0,
}
_RMS_SCALE = {
    "Q4_K": 36.5,
    "Q5_K": 36.5,
    "Q6_K": 73.9,
    "Q2_K": 8.80,
    "Q3_K": 18.5,
    "IQ4_XS": 18.5,
    "IQ3_S": 7.59 * 18.5,
    "IQ3_XXS": 30.8 * 18.5 / 4,
    "IQ2_S": 56.5,
    "IQ2_XS": 55.9,
    "IQ2_XXS": 53.4,
    "IQ1_M": 7.20,
    "IQ1_S": 7.20,
}
_RMS_MXFP4 = 5.85
# What is taken off each q of a type whose blocks hold minimums.
_MIDDLE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5}


def _powers_of_two(rng: np.random.Generator, blocks: int, rms: float) -> np.ndarray:
    """Exponents of MXFP4, uint8 `[blocks]`, drawn from two neighbours so as to give `rms`."""
    low = math.floor(math.log2(rms / _RMS_MXFP4))
    share = ((rms / _RMS_MXFP4) ** 2 / 4.0**low - 1) / 3  # of the higher one
    return (low + 128 + (rng.random(blocks) < share)).astype(np.uint8)


def _halved_e4m3(rng: np.random.Generator, blocks: int, rms: float) -> np.ndarray:
    """Scales of NVFP4, uint8 `[blocks, 4]`, drawn from two neighbours so as to give `rms`."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    factors = np.where(exponent, 8 + mantissa, mantissa) * 2.0 ** (np.maximum(exponent, 1) - 11)
    low = int(np.clip(np.searchsorted(factors, rms / _RMS_MXFP4, "right") - 1, 0, 125))
    small, large = factors[low : low + 2] ** 2
    share = ((rms / _RMS_MXFP4) ** 2 - small) / (large - small)  # of the higher one
    return (low + (rng.random((blocks, 4)) < share)).astype(np.uint8)


def random_blocks(rng: np.random.Generator, dtype: str, blocks: int, std: float) -> np.ndarray:
    """Valid blocks, uint8 `[blocks, nbytes]`, that decode to mean 0 and about `std`."""
    block = BLOCKS[dtype]
    if block.elements == 1:
        return encode(rng.standard_normal((blocks, 1), np.float32) * np.float32(std), dtype)
    words = rng.integers(0, 1 << 64, -(-blocks * block.nbytes // 8), np.uint64)
    data = words.view(np.uint8)[: blocks * block.nbytes].reshape(blocks, block.nbytes)
    if dtype == "MXFP4":
        data[:, 0] = _powers_of_two(rng, blocks, std)
        return data
    if dtype == "NVFP4":
        data[:, :4] = _halved_e4m3(rng, blocks, std)
        return data
    # Scales differ from block to block, by up to a quarter; types whose q range is lopsided
    # (-8 to 7) get either sign, else every row would share a mean of -d/2.
    d = rng.random((blocks, 1), np.float32) * np.float32(0.5) + np.float32(0.75)
    of_q = _RMS_Q.get(dtype) or _RMS_Q[dtype.split("_")[0]]
    d *= std / (of_q * _RMS_SCALE.get(dtype, 1.0))
    middle = _MIDDLE.get(dtype)
    if middle is None:
        d *= np.float32(1) - 2 * (data[:, -3:-2] & 1).astype(np.float32)
    d = d.astype("<f2")
    if dtype == "IQ1_M":  # a nibble of d in each of four words
        nibbles = d.view("<u2") >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        data[:, 49::2] = data[:, 49::2] & 15 | nibbles.astype(np.uint8) << 4
        return data
    at = sum(block.fields[: block.fields.index(2)])  # d is the first word; a minimum follows it
    data[:, at : at + 2] = d.view(np.uint8)
    if middle is not None:
        offset = (d.astype(np.float32) * np.float32(middle)).astype("<f2")
        data[:, at + 2 : at + 4] = offset.view(np.uint8)
    if dtype in ("Q4_K", "Q5_K"):
        # The minimum of each group equals its scale, so that with dmin = d * middle its weights
        # are d * scale * (q - middle), centred: bytes 4-7 and 8-11 hold the two's low bits, and
        # 12-15 the rest in a nibble each.
        data[:, 8:12] = data[:, 4:8]
        data[:, 12:16] = (data[:, 12:16] & 15) * 17
    if dtype == "Q2_K":  # likewise; scale and minimum of a group share a byte
        data[:, :16] = (data[:, :16] & 15) * 17
    return data


def _tensor_data(
    name: str, dtype: str, shape: tuple[int, ...], seed: tuple[int, int]
) -> Iterator[np.ndarray]:
    """The tensor's bytes in chunks; of experts one chunk again and again, 17 GB in seconds."""
    rng = np.random.Generator(np.random.SFC64(seed))
    if name.endswith("norm.weight"):
        yield encode(np.ones(shape, np.float32), dtype)
    elif name.endswith(".ssm_a"):  # a state fades by 1/e in 1/16 to 100 positions
        yield encode(-rng.uniform(0.01, 16, shape).astype(np.float32), dtype)
    elif name.endswith(".bias"):
        yield encode(rng.standard_normal(shape, np.float32) * np.float32(0.02), dtype)
    else:
        block = BLOCKS[dtype]
        *_, width = shape
        left = math.prod(shape) // width * row_bytes(dtype, width) // block.nbytes
        chunk = np.empty((0, block.nbytes), np.uint8)
        while left:
            count = min(left, _CHUNK_BYTES // block.nbytes)
            if len(shape) < 3 or not len(chunk):
                chunk = random_blocks(rng, dtype, count, 1 / math.sqrt(width))
            yield chunk[:count]
            left -= count


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's byte-level BPE, in order of token id.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py `bytes_to_unicode`: printable
    Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + n) for n in range(68)]


def _small_tokenizer() -> dict[str, Any]:
    tokens = byte_alphabet() + [merge.replace(" ", "") for merge in _MERGES]
    types = [_NORMAL] * len(tokens) + [_CONTROL] * len(_SPECIAL)
    tokens += _SPECIAL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }


def _tokenizer(rows: int, source: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The built-in tokenizer or that of `source`, its padding cut or grown to `rows` tokens."""
    if source is None:
        values = _small_tokenizer()
    else:
        metadata = open_table(source).metadata
        values = {key: metadata[key] for key in metadata if key.startswith("tokenizer.")}
        if "tokenizer.ggml.tokens" not in values or "tokenizer.ggml.token_type" not in values:
            raise UserError(
                f"{source}: found no tokenizer.ggml.tokens and token_type; expected a model with "
                "its tokenizer. Pass a complete GGUF file, not a later shard."
            )
    tokens = list(values["tokenizer.ggml.tokens"])
    types = [int(kind) for kind in values["tokenizer.ggml.token_type"]]
    while types and types[-1] == _UNUSED:
        tokens.pop()
        types.pop()
    if len(tokens) > rows:
        raise UserError(
            f"found a tokenizer of {len(tokens)} tokens ({source or 'built in'}); expected at most "
            f"{rows}, the rows of the embedding. Choose a shape with more rows."
        )
    tokens += [f"[PAD{index}]" for index in range(len(tokens), rows)]
    types += [_UNUSED] * (rows - len(types))
    return values | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def _metadata(shape: ModelShape, recipe: Recipe) -> dict[str, Any]:
    family = shape.family.capitalize()
    values: dict[str, Any] = {
        "block_count": shape.layers + shape.drafts,
        "context_length": 32768,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if shape.head:
        values |= {"attention.key_length": shape.head, "attention.value_length": shape.head}
    if shape.window:
        values["attention.sliding_window"] = shape.window
    if shape.delta_keys:
        values |= {
            "rope.dimension_count": shape.head // 4,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": shape.delta_width,
            "ssm.group_count": shape.delta_keys,
            "ssm.time_step_rank": shape.delta_values,
            "ssm.inner_size": shape.delta_values * shape.delta_width,
            "full_attention_interval": 4,
            **({"nextn_predict_layers": shape.drafts} if shape.drafts else {}),
        }
    if shape.experts:
        values |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.expert_ffn,
        }
    if shape.shared_ffn:
        values["expert_shared_feed_forward_length"] = shape.shared_ffn
    if not shape.ffn:
        del values["feed_forward_length"]
    return {
        "general.architecture": shape.family,
        "general.type": "model",
        "general.name": f"Random {family} {shape.label}",
        "general.finetune": "random",
        "general.basename": f"Random-{family}",
        "general.size_label": shape.label,
        **{f"{shape.family}.{key}": value for key, value in values.items()},
        "general.file_type": recipe.file_type,
        "general.quantization_version": 2,
    }


def _stream(*args: Any) -> Callable[[], Iterator[np.ndarray]]:
    return lambda: _tensor_data(*args)


def _make_header(shape: ModelShape) -> TensorTable:
    """The header of the file that a shape would have in `q4_k_m`: for plans, which read no tensor.

    To read one raises `UserError`.
    """
    recipe, path, tensors = RECIPES["q4_k_m"], Path(f"{shape.label}.gguf"), {}

    def refuse() -> np.ndarray:
        raise UserError(f"found no tensor: {path} is the header of a file nobody wrote.")

    for name, dtype, dims in tensor_plan(shape, recipe):
        nbytes = int(np.prod(dims[:-1])) * row_bytes(dtype, dims[-1])
        tensors[name] = LazyTensor(TensorInfo(name, dims, dtype, nbytes), refuse, held=False)
    return TensorTable((path,), _metadata(shape, recipe), tensors)


def open_header(shape: ModelShape) -> Checkpoint:
    """The model of a header, with no weights."""
    table = _make_header(shape)
    return Checkpoint(table, spec_from_table(table))


def pair_headers(
    teacher: ModelShape, student: ModelShape, tokenizer: Tokenizer | None = None
) -> Pair:
    """Two headers for a plan; 271 rows of the smaller embedding have no token, as in Qwen2.5's.

    A student of its teacher's shape is another file.
    """
    models = open_header(teacher), open_header(student._replace(label=f"{student.label}-1"))
    width = min(one.spec.vocab_size for one in models)
    unread: Any = tokenizer
    return Pair(*models, unread, Vocabulary(width, width - 271))


def write_random_gguf(
    path: str | os.PathLike[str],
    shape: ModelShape,
    *,
    seed: int = 0,
    recipe: str = "q4_k_m",
    layer_order: LayerOrder = "published",
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a model of random weights, matrices of standard deviation 1/sqrt(inputs).

    Streams, so memory stays near 0.25 GB at any size. The same arguments give the same bytes.
    `tokenizer_from` is a GGUF file to copy the tokenizer from; by default a byte-level BPE of a few
    dozen merges. Raises `UserError` for an unknown recipe, a negative seed, and a tokenizer of more
    tokens than `shape.rows`.
    """
    if recipe not in RECIPES:
        raise UserError(f"found recipe {recipe!r}; expected one of {', '.join(RECIPES)}. Pick one.")
    if seed < 0:
        raise UserError(f"found seed {seed}; expected 0 or more. Pick another.")
    chosen = RECIPES[recipe]
    metadata = _metadata(shape, chosen) | _tokenizer(shape.rows, tokenizer_from)
    plan = tensor_plan(shape, chosen, layer_order)
    write_gguf(
        path,
        metadata,
        [(*row, _stream(*row, (seed, index))) for index, row in enumerate(plan)],
    )


def write_tiny_pair(folder: Path) -> None:
    """Writes the two toys into the folder, as teacher.gguf and student.gguf."""
    for seed, name in enumerate(("teacher", "student")):
        write_random_gguf(folder / f"{name}.gguf", QWEN25_SHAPES[f"tiny-{name}"], seed=seed)


def write_tiny_text(folder: Path, sizes: Sequence[int]) -> None:
    """Makes the folder, and in it a Python file of so many functions for each of the sizes."""
    folder.mkdir(parents=True)
    for i, size in enumerate(sizes):
        lines = (f"def f{i}_{j}(self):\n    return {i * j} + self.x" for j in range(size))
        (folder / f"{i:02}.py").write_text("\n".join(lines))
