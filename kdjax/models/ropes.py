"""Rotary embeddings: frequencies, and their scaling in config.json and GGUF headers.

Sources: Transformers' modeling_rope_utils.py; llama.cpp's gguf-py/gguf/constants.py.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kdjax.errors import AS_FOLDER, UserError
from kdjax.formats import TensorTable
from kdjax.formats.blocks import decode

DIVISORS = "rope_freqs.weight"  # GGUF's tensor with a divisor for each frequency
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # longrope's two tensors


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled beyond the trained context.

    `kind` is "linear", "llama3", "yarn", "divisors" (one divisor a frequency, as llama.cpp stores
    Llama 3.1's in `rope_freqs.weight`) or "longrope" (Ding et al. 2024, arXiv:2402.13753: texts
    beyond `original_positions` have other divisors, from their first position on).
    """

    kind: str
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # on cos and sin
    truncate: bool = True  # yarn's ramp begins and ends at integer dimensions
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotation of queries and keys by their positions."""

    theta: float
    scaling: RopeScaling | None = None
    columns: int = 0  # the first columns of a head, which rotate; 0: all

    @property
    def original_positions(self) -> int:
        """Positions beyond which longrope uses its long divisors; 0 for other kinds."""
        longrope = self.scaling is not None and self.scaling.kind == "longrope"
        return self.scaling.original_positions if self.scaling is not None and longrope else 0


def rope_frequencies(
    rope: Rope | None, head_dim: int, *, long: bool = False
) -> tuple[np.ndarray, float]:
    """Inverse frequencies `[columns / 2]` (float32, radians a position), factor on cos and sin.

    Zeros if nothing rotates; with `long` longrope's for long texts. Follows Transformers'
    modeling_rope_utils.py.
    """
    if rope is None:
        return np.zeros(head_dim // 2, np.float32), 1.0
    columns = rope.columns or head_dim
    exponent = np.arange(0, columns, 2, dtype=np.float32) / np.float32(columns)
    inverse = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    scaling = rope.scaling
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "linear":
        return inverse / np.float32(scaling.factor), 1.0
    if scaling.kind == "divisors":
        return inverse / _shaped(scaling.divisors, inverse), 1.0
    if scaling.kind == "longrope":
        divisors = scaling.long_divisors if long else scaling.divisors
        return inverse / _shaped(divisors, inverse), scaling.attention_factor
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    return _yarn(inverse, rope.theta, scaling)


def _shaped(divisors: tuple[float, ...], inverse: np.ndarray) -> np.ndarray:
    return np.asarray(divisors, np.float32).reshape(inverse.shape)  # one for all is an error


def _llama3(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelength = 2 * np.pi / inverse
    low = scaling.original_positions / scaling.low_freq_factor
    high = scaling.original_positions / scaling.high_freq_factor
    stretched = np.where(wavelength > low, inverse / scaling.factor, inverse)
    smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    medium = (wavelength >= high) & (wavelength <= low)
    return np.where(medium, between, stretched).astype(np.float32)


def _yarn(inverse: np.ndarray, theta: float, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    head_dim = 2 * len(inverse)

    def boundary(rotations: float) -> float:
        turns = math.log(scaling.original_positions / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(theta))

    low, high = boundary(scaling.beta_fast), boundary(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 1e-3
    keep = 1 - np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0, 1)
    frequencies = inverse / scaling.factor * (1 - keep) + inverse * keep
    return frequencies.astype(np.float32), scaling.attention_factor


def longrope_attention_factor(factor: float, original: int) -> float:
    """Factor of cos and sin under longrope, when contexts grow `factor` times."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Factor of cos and sin under yarn, when contexts grow `factor` times."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_number(entries: Mapping[str, Any], name: str, path: Path, default: Any = None) -> float:
    """A number above 0 of config.json; raises `UserError` for anything else, or without entry."""
    value: Any = entries.get(name)
    value = default if value is None else value
    if type(value) in (int, float) and 0 < value < 1e300:
        return float(value)
    found = "no" if value is None else f"{str(value)[:60]!r} as"
    raise UserError(f"{path}: found {found} {name!r}; expected a number above 0.")


def scaling_from_config(
    config: Mapping[str, Any], rope: Mapping[str, Any], path: Path, kinds: tuple[str, ...]
) -> RopeScaling | None:
    """Reads `rope`, the rotary parameters of a config.json; raises `UserError` if unknown.

    `kinds` are the kinds of scaling that the family computes.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in kinds:
        known = ", ".join(("default", *kinds))
        raise UserError(f"{path}: rope_type {kind!r} is not one of {known}.")

    def number(name: str, default: Any = None) -> float:
        return read_number(rope, name, path, default)

    if kind == "linear":
        return RopeScaling(kind, factor=number("factor"))
    context = read_number(config, "max_position_embeddings", path)
    original = number("original_max_position_embeddings", context)
    # The model's entry wins over the rope's, as in Transformers' `standardize_rope_params`.
    original = read_number(config, "original_max_position_embeddings", path, original)
    if kind == "llama3":
        return RopeScaling(
            kind,
            factor=number("factor"),
            original_positions=int(original),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    factor = number("factor", context / original)
    if kind not in ("longrope", "su"):
        return _read_yarn(kind, rope, path, factor, int(original))
    divisors = [_read_divisors(rope, name, path) for name in ("short_factor", "long_factor")]
    attention = longrope_attention_factor(factor, int(original))
    return RopeScaling(
        "longrope",
        original_positions=int(original),
        attention_factor=number("attention_factor", attention),
        divisors=divisors[0],
        long_divisors=divisors[1],
    )


def _read_yarn(
    kind: str, rope: Mapping[str, Any], path: Path, factor: float, original: int
) -> RopeScaling:
    def number(name: str, default: Any = None) -> float:
        return read_number(rope, name, path, default)

    attention = yarn_attention_factor(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = yarn_attention_factor(factor, number("mscale"))
        attention /= yarn_attention_factor(factor, number("mscale_all_dim"))
    return RopeScaling(
        kind,
        factor=factor,
        original_positions=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=number("attention_factor", attention),
        truncate=bool(rope.get("truncate", True)),
    )


def _read_divisors(rope: Mapping[str, Any], name: str, path: Path) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list):
        raise UserError(f"{path}: found {str(values)[:60]!r} as {name!r}; expected a list.")
    return tuple(read_number({name: value}, name, path) for value in values)


def scaling_to_config(rope: Rope | None, head_dim: int, context: int) -> dict[str, Any] | None:
    """`rope_scaling` of config.json for a model of `context` positions.

    Raises `UserError` for divisors that config.json cannot name.
    """
    if rope is None or rope.scaling is None:
        return None
    scaling = rope.scaling
    if scaling.kind == "divisors":
        scaling = _published_llama3(rope, head_dim)
    if scaling.kind == "longrope":
        # Three entries, all that Transformers 4 accepts, if the factor is the usual one.
        both = {"short_factor": scaling.divisors, "long_factor": scaling.long_divisors}
        config = {"type": "longrope"} | {k: [short(x) for x in v] for k, v in both.items()}
        original = scaling.original_positions
        usual = longrope_attention_factor(context / original, original)
        if math.isclose(scaling.attention_factor, usual, rel_tol=1e-6):
            return config
        return config | {"attention_factor": short(scaling.attention_factor)}
    config: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        config["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        config["low_freq_factor"] = scaling.low_freq_factor
        config["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        config |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        config |= {"attention_factor": scaling.attention_factor, "truncate": scaling.truncate}
    return config


def _published_llama3(rope: Rope, head_dim: int) -> RopeScaling:
    """The named scaling with these divisors; raises `UserError` unless it is one of Llama 3's."""
    assert rope.scaling is not None
    named = RopeScaling("llama3", factor=max(rope.scaling.divisors), original_positions=8192)
    same = rope_frequencies(dataclasses.replace(rope, scaling=named), head_dim)[0]
    if not np.allclose(same, rope_frequencies(rope, head_dim)[0], rtol=1e-4):
        raise UserError(
            "found a model with custom rope divisors (rope_freqs.weight); expected Llama 3.1's or "
            "3.2's, the only ones that config.json can name. Export GGUF."
        )
    return named


def scaling_from_gguf(table: TensorTable, arch: str) -> RopeScaling | None:
    """Reads a GGUF header and `rope_freqs.weight`; raises `UserError` if the kind is unknown."""
    meta = table.metadata
    if DIVISORS in table:
        return RopeScaling("divisors", divisors=_stored_divisors(table, DIVISORS))
    if SHORT in table and LONG in table:
        context = meta[f"{arch}.context_length"]
        return RopeScaling(
            "longrope",
            original_positions=int(
                meta.get(f"{arch}.rope.scaling.original_context_length", context)
            ),
            attention_factor=float(meta.get(f"{arch}.rope.scaling.attn_factor", 1.0)),
            divisors=_stored_divisors(table, SHORT),
            long_divisors=_stored_divisors(table, LONG),
        )

    def number(name: str, default: float) -> float:
        return float(meta.get(f"{arch}.rope.scaling.{name}", default))

    factor = number("factor", 1.0) or 1.0  # llama.cpp reads 0, or a missing type, like this
    kind = meta.get(f"{arch}.rope.scaling.type", "linear" if factor != 1 else "none")
    # Converters also write yarn's factor, which llama.cpp computes itself.
    if kind != "yarn" and number("yarn_attn_factor", 1.0) != 1:
        raise UserError(
            f"{table.paths[0]}: found rope.scaling.yarn_attn_factor = "
            f"{number('yarn_attn_factor', 1.0):g} without yarn; expected 1. Use a file without it."
        )
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{table.paths[0]}: rope scaling {kind!r} is not one of none, linear, yarn."
        )

    original = int(number("original_context_length", 0.0))
    if kind == "linear":
        return RopeScaling(kind, factor=factor, original_positions=original)
    attention = yarn_attention_factor(factor)
    if logs := number("yarn_log_multiplier", 0.0):  # `mscale_all_dim`, with an mscale of 1
        attention /= yarn_attention_factor(factor, logs)
    return RopeScaling(
        kind,
        factor=factor,
        original_positions=original or int(meta[f"{arch}.context_length"]),
        beta_fast=number("yarn_beta_fast", 32.0),
        beta_slow=number("yarn_beta_slow", 1.0),
        attention_factor=number("attn_factor", 1.0) * attention,
    )


def _stored_divisors(table: TensorTable, name: str) -> tuple[float, ...]:
    info = table.info(name)
    divisors = np.ones(info.shape)  # a header without tensors, by which nothing is rotated
    if table.holds(name):
        divisors = np.asarray(decode(table.raw(name), info.dtype))
    return tuple(float(x) for x in divisors)


def short(value: float) -> float:
    """The shortest decimal of a float32: 1e-6 for 9.99999997e-07."""
    return float(str(np.float32(value)))


def scaling_to_gguf(rope: Rope | None, *, logs: bool = False) -> dict[str, Any]:
    """Key-values of a GGUF header, without the architecture's name.

    With `logs` the family's headers have a multiplier of yarn's logarithm, so that its factor may
    be 1. Raises `UserError` for a yarn that llama.cpp does not compute. `rope_tensors` stores other
    kinds.
    """
    scaling = None if rope is None else rope.scaling
    if scaling is not None and scaling.kind == "longrope":
        return {
            "rope.scaling.type": scaling.kind,  # for MiniCPM's divisors
            "rope.scaling.original_context_length": scaling.original_positions,
            "rope.scaling.attn_factor": float(scaling.attention_factor),
        }
    if scaling is None or scaling.kind not in ("linear", "yarn"):
        return {}
    if not scaling.truncate:
        raise UserError(
            f"found yarn with truncate=false; expected true, which llama.cpp computes. {AS_FOLDER}."
        )
    values = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "linear":
        return values
    # llama.cpp multiplies yarn's factor by `attn_factor`, and divides by the multiplier's.
    theirs = yarn_attention_factor(scaling.factor)
    if logs:
        multiplier = float(scaling.attention_factor == 1)
        theirs /= yarn_attention_factor(scaling.factor, multiplier)
        values["rope.scaling.yarn_log_multiplier"] = multiplier
    return values | {
        "rope.scaling.original_context_length": scaling.original_positions,
        "rope.scaling.attn_factor": float(scaling.attention_factor / theirs),
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
    }


SCALING_KEYS = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_attn_factor",
)


def rope_tensors(rope: Rope | None, head_dim: int) -> dict[str, np.ndarray]:
    """GGUF's tensors with a float32 divisor for each frequency; {} if the header is enough.

    llama.cpp stores Llama 3's and longrope's scaling in them.
    """
    if rope is None or rope.scaling is None:
        return {}
    if rope.scaling.kind == "longrope":
        both = {LONG: rope.scaling.long_divisors, SHORT: rope.scaling.divisors}
        return {name: np.asarray(divisors, np.float32) for name, divisors in both.items()}
    if rope.scaling.kind not in ("divisors", "llama3"):
        return {}
    unscaled = rope_frequencies(dataclasses.replace(rope, scaling=None), head_dim)[0]
    return {DIVISORS: (unscaled / rope_frequencies(rope, head_dim)[0]).astype(np.float32)}
