"""The self-check: an export is read back before it takes its place.

kdjax's readers read it; the safetensors library reads a folder too.
"""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import safetensors

from kdjax.errors import CheckError, UserError
from kdjax.export.vocabulary import compare_tokenizers
from kdjax.export.weights import Tensor
from kdjax.formats import TensorTable, open_table
from kdjax.formats.apr.table import verify_footer
from kdjax.formats.blocks import decode, encode
from kdjax.formats.table import TensorInfo
from kdjax.models.arch import ArchSpec, Layer
from kdjax.models.families import FAMILIES
from kdjax.models.loading import is_gguf, split_fused, tensor_names
from kdjax.models.ropes import Rope, rope_frequencies
from kdjax.models.schema import spec_from_table
from kdjax.models.tokenizer import Tokenizer, load_tokenizer
from kdjax.progress import counted

# Root mean square of the errors in a block of 256, relative to its largest element: the bound of
# any valid rounding. For types with one scale, half the worst step, since they are off by a full
# step at the end that their range lacks; for types with searched scales, about twice the worst one
# seen.
LIMITS = {
    "Q8_0": 1 / 230,
    "Q6_K": 0.03,
    "Q5_0": 1 / 15,
    "Q4_0": 1 / 7,
    "Q4_K": 0.13,
    "Q5_K": 0.07,
    "IQ4_NL": 0.13,
    "IQ4_XS": 0.13,
    "IQ3_S": 0.2,
    "IQ3_XXS": 0.3,
    "IQ2_S": 0.4,
    "Q3_K": 0.2,
    "Q2_K": 0.4,
}
_TINY = 64 * 2.0**-24  # float16's subnormals, times the largest integer
_ELEMENTS = 1 << 22


class SelfCheckError(CheckError):
    """A written file did not read back as intended; it has been removed."""


@dataclasses.dataclass(frozen=True)
class ExportSummary:
    """Summary of the tensors read back, and their distance from the given parameters."""

    tensors: int
    nbytes: int
    types: dict[str, int]  # tensors of each type
    error: float  # root mean square error over all numbers that are not F32, relative to these

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.types.items()))
        rounded = ", ".join(sorted(kind for kind in self.types if kind != "F32"))
        lossy = f"rounded to {rounded}, relative error {self.error:.2%}"
        verdict = lossy if self.error else "equal bit for bit"
        return f"{self.tensors} tensors ({kinds}), {self.nbytes / 1e6:,.1f} MB; {verdict}"


def check_export(
    path: Path, tensors: Sequence[Tensor], spec: ArchSpec, tokenizer: Tokenizer
) -> ExportSummary:
    """Reads a written file or folder and compares all of it with the given model.

    Unquantized tensors must be rounded exactly, quantized ones lie within their type's error;
    architecture and tokenizer must be equal. Raises `SelfCheckError`.
    """
    try:
        if path.suffix == ".apr":
            verify_footer(path)
        table = open_table(path)
        written_spec = spec_from_table(table)
        table = split_fused(table, written_spec)
        tensor_names(table, written_spec)
        written = load_tokenizer(path)
    except (UserError, OSError, ValueError) as error:
        raise SelfCheckError(f"the file just written cannot be read: {error}") from error
    problems = _compare_specs(spec, written_spec, is_gguf(table))
    problems += compare_tokenizers(tokenizer, written)
    if path.is_dir():
        problems += _check_folder(path)
    infos, kept, lost, total = [], [], 0.0, 0.0
    for tensor in counted(tensors, "tensors read back"):
        infos.append(table.info(tensor.name))
        if (blocks := tensor.find_kept(infos[-1].dtype)) is not None:
            if not np.array_equal(table.raw(tensor.name), tensor.kept_bytes(blocks)):
                problems.append(f"{tensor.name}: not the blocks that were given")
            kept.append(tensor)
            continue
        problem, squared_error, squared = _compare(table, infos[-1], tensor.read())
        problems += [problem] if problem else []
        lost, total = lost + squared_error, total + squared
    if problems:
        shown = "\n  ".join(problems[:12]) + ("\n  ..." if len(problems) > 12 else "")
        raise SelfCheckError(f"the file just written is not what was meant:\n  {shown}")
    if lost:  # a share of all numbers: blocks written as they are lose nothing
        total += sum(float(np.vdot(numbers, numbers)) for numbers in (x.read() for x in kept))
    return ExportSummary(
        tensors=len(infos),
        nbytes=sum(info.nbytes for info in infos),
        types=dict(Counter(info.dtype for info in infos)),
        error=(lost / total) ** 0.5 if total else 0.0,
    )


def _compare_specs(spec: ArchSpec, written: ArchSpec, gguf: bool) -> list[str]:
    problems = []
    for name, a in vars(spec).items():
        b = getattr(written, name)
        if name == "layers":
            problems += _compare_layers(spec, a, b)
            continue
        if name == "family" and gguf:  # several families share a name in GGUF
            a, b = FAMILIES[a].gguf, FAMILIES[b].gguf
        # GGUF stores reals as float32.
        same = np.isclose(a, b, rtol=1e-6, atol=0) if isinstance(a, float) else a == b
        if not same:
            problems.append(f"{name} = {b}, expected {a}")
    return problems


def _compare_layers(
    spec: ArchSpec, layers: tuple[Layer, ...], written: tuple[Layer, ...]
) -> list[str]:
    if len(layers) != len(written):
        return [f"num_layers = {len(written)}, expected {len(layers)}"]
    problems = []
    for a, b in dict.fromkeys(zip(layers, written, strict=True)):
        if a.delta != b.delta:
            problems.append("layers of delta nets and of attention in another order")
        if a.window != b.window:
            problems.append(f"window = {b.window}, expected {a.window}")
        ours, theirs = (layer.rope.theta if layer.rope else 0.0 for layer in (a, b))
        if not np.isclose(ours, theirs, rtol=1e-6, atol=0):
            problems.append(f"rope_theta = {theirs}, expected {ours}")
        elif not _same_rotation(a.rope, b.rope, spec.head_dim):
            problems.append("other rotary frequencies")
    return problems


def _same_rotation(a: Rope | None, b: Rope | None, head_dim: int) -> bool:
    if len({(x.columns, x.original_positions) if x else None for x in (a, b)}) > 1:
        return False
    for long in (False, True):
        (ours, scale), (theirs, other) = (rope_frequencies(x, head_dim, long=long) for x in (a, b))
        if not (np.allclose(ours, theirs, rtol=1e-5, atol=0) and abs(scale - other) <= 1e-5):
            return False
    return True


def _check_folder(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    names = "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"
    problems = [f"no {name}" for name in names if not (folder / name).is_file()]
    table = open_table(folder)
    if config.get("tie_word_embeddings") and "lm_head.weight" in table:
        problems.append("a head in addition to a tied embedding")
    other = [name for path in table.paths for name in _compare_readers(table, path)]
    return problems + [f"{name}: safetensors reads other numbers" for name in other]


def _compare_readers(table: TensorTable, path: Path) -> Iterator[str]:
    """Names of a file's tensors that the safetensors library and kdjax read differently."""
    with safetensors.safe_open(path, framework="numpy") as file:
        names = file.keys()
        for name in names:
            other = file.get_tensor(name)
            bits = np.ravel(other).view(np.uint8)
            same = name in table and table.info(name).shape == other.shape
            if not same or not np.array_equal(np.ravel(table.raw(name)), bits):
                yield name


@functools.cache
def _decoder(dtype: str) -> Callable[[np.ndarray], jax.Array]:
    return jax.jit(functools.partial(decode, dtype_name=dtype))


def _compare(table: TensorTable, info: TensorInfo, tensor: np.ndarray) -> tuple[str, float, float]:
    """Compares one tensor: its fault, and the sums of squared errors and numbers unless F32."""
    name, raw = info.name, table.raw(info.name)
    if info.shape != tensor.shape:
        return f"{name}: shape {info.shape}, expected {tensor.shape}", 0.0, 0.0
    rows, raw = tensor.reshape(-1, tensor.shape[-1]), raw.reshape(-1, raw.shape[-1])
    lost = total = worst = 0.0
    step = max(1, _ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), step):
        part, bits = rows[start : start + step], raw[start : start + step]
        if info.dtype not in LIMITS and not np.array_equal(bits, encode(part, info.dtype)):
            return f"{name}: not the bytes that {info.dtype} rounds to", 0.0, 0.0
        if info.dtype == "F32":
            continue
        error = part - np.asarray(_decoder(info.dtype)(bits))
        lost += float(np.vdot(error, error))
        total += float(np.vdot(part, part))
        if info.dtype in LIMITS:
            worst = max(worst, _worst_error(error, part, LIMITS[info.dtype]))
    if not worst <= 1:
        return f"{name}: off by {worst:.2f} times what {info.dtype} may be", 0.0, 0.0
    return "", lost, total


def _worst_error(error: np.ndarray, part: np.ndarray, limit: float) -> float:
    """The largest error of a block, in units of the allowed error."""
    block = 256 if error.shape[1] % 256 == 0 else 32
    error, part = error.reshape(-1, block), part.reshape(-1, block)
    rms = np.sqrt(np.mean(np.square(error, dtype=np.float64), axis=1))
    return float(np.max(rms / (np.abs(part).max(axis=1) * limit + _TINY)))
