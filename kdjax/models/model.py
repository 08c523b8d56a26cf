"""The frozen teacher: where its weights live, and how its hidden states and head reach the loss.

A provider is pure functions, the arrays they take, and what it says of itself. Its kinds:
`dequantized`, `packed`, `scaled`, `cached`, `fixture`, and `truncated`, a narrower view of any.
"""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kdjax.device import sharding
from kdjax.device.placement import Placement, capability
from kdjax.errors import UserError
from kdjax.formats import TensorTable
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, ModelFunctions, Params, functional
from kdjax.models.loading import load_params
from kdjax.models.tokenizer import Tokenizer
from kdjax.models.weights import Scaled, decode_weight, to_bits, unembed

_log = logging.getLogger("kdjax")

# Tensor cores multiply float8 from Ada (8.9) and Hopper (9.0) on.
_FP8_CAPABILITY = 8.9


@dataclasses.dataclass(frozen=True)
class TeacherInfo:
    """What a provider says of itself."""

    kind: str
    vocab_size: int  # rows of the head
    resident_bytes: int  # on all devices together
    source: str

    def __str__(self) -> str:
        return (
            f"{self.kind} teacher {self.source}: {self.resident_bytes / 1e9:.2f} GB resident, "
            f"{self.vocab_size:,} head rows"
        )


@dataclasses.dataclass(frozen=True)
class TeacherLogitsProvider:
    """A provider of teacher hidden states and head: pure functions and the arrays they take.

    Logits exist only inside a chunk of the loss, so hidden states and head stay apart here; the
    arrays are an argument of the step, never closed over.
    """

    apply: ModelFunctions
    params: Params
    info: TeacherInfo

    def logits(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T V"]:
        """float32 logits of every position at once: for tests and small inputs."""
        hidden = self.apply.hidden(self.params, tokens, segment_ids, positions)
        head = self.apply.head(self.params).astype(hidden.dtype)
        return unembed(hidden, head)

    def hidden_states(
        self, batches: Iterable[Mapping[str, Any]], mesh: Mesh
    ) -> Iterator[Float[Array, "B T D"]]:
        """Of each batch of host arrays, its rows over the mesh; made as they are asked for."""
        place, options = sharding.batch_sharding(mesh), sharding.compiler_options(mesh)
        hidden = jax.jit(self.apply.hidden, compiler_options=options)
        for batch in batches:
            columns = [batch[name] for name in ("tokens", "segment_ids", "positions")]
            yield hidden(self.params, *jax.device_put(columns, place))


def _resident(params: Params) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _as_sliced(params: Params, mesh: Mesh) -> Params:
    """As a scan slices them without copies: bits on a CPU."""
    if Placement(mesh).platform != "cpu":
        return params
    return jax.tree.map(jax.jit(to_bits, donate_argnums=0), params)


def dequantized(
    table: TensorTable, spec: ArchSpec, compute: Compute, mesh: Mesh
) -> TeacherLogitsProvider:
    """Every tensor as numbers of `compute.param_dtype`, made on the device at load."""
    apply, abstract = functional(spec, compute)
    params = _as_sliced(load_params(table, spec, abstract, mesh), mesh)
    kind = f"dequant ({jnp.dtype(compute.param_dtype).name})"
    info = TeacherInfo(kind, spec.vocab_size, _resident(params), table.paths[0].name)
    return TeacherLogitsProvider(apply, params, info)


def packed(
    table: TensorTable, spec: ArchSpec, compute: Compute, mesh: Mesh
) -> TeacherLogitsProvider:
    """Matrices in the file's own blocks, whatever their type, decoded a layer at a time.

    The numbers are those of `dequantized`, bit for bit: decoded in float32 and rounded to
    `compute.param_dtype`.
    """
    apply, abstract = functional(spec, compute)
    params = load_params(table, spec, abstract, mesh, matrices="packed")
    info = TeacherInfo("q4k (packed)", spec.vocab_size, _resident(params), table.paths[0].name)
    return TeacherLogitsProvider(apply, params, info)


def check_fp8() -> None:
    """Raises `UserError` for a GPU without float8 products; a CPU emulates them."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return
    if capability(device) < _FP8_CAPABILITY:
        found = getattr(device, "compute_capability", "unknown")
        raise UserError(
            f"found a {device.device_kind} of compute capability {found}; expected an NVIDIA GPU "
            f"of {_FP8_CAPABILITY} or more (Ada, Hopper and later) for fp8 products. "
            "Set teacher.compute=train."
        )


def scaled(table: TensorTable, spec: ArchSpec, compute: Compute, mesh: Mesh, *,
           precise: bool = False) -> TeacherLogitsProvider:  # fmt: skip
    """Matrices as float8_e4m3fn with a float32 scale a row, multiplied as such.

    Embedding (with a tied head), norms and biases are numbers of `compute.param_dtype`; what is no
    product runs in `compute.dtype`. `precise` sums products in float32. Raises `UserError` on a GPU
    without float8 products.
    """
    check_fp8()
    placement = Placement.on(mesh)
    if placement.platform == "cpu":
        _log.warning("fp8 products are emulated on the CPU: the same numbers, slowly")
    apply, abstract = functional(spec, compute)
    params = _as_sliced(load_params(table, spec, abstract, mesh, matrices="fp8"), mesh)
    flags = dict(precise=precise, kernels=placement.kernels)
    params = jax.tree.map(
        lambda w: dataclasses.replace(w, **flags) if isinstance(w, Scaled) else w,
        params,
        is_leaf=lambda w: isinstance(w, Scaled),
    )
    kind = f"fp8 (e4m3, {'float32' if precise else 'fast'} sums)"
    info = TeacherInfo(kind, spec.vocab_size, _resident(params), table.paths[0].name)
    return TeacherLogitsProvider(apply, params, info)


PROVIDERS = {
    "dequant": dequantized,
    "q4k": packed,
    "fp8": scaled,
    "fp8_precise": functools.partial(scaled, precise=True),
}


@dataclasses.dataclass(frozen=True)
class _Cached:
    """The functions of a teacher whose outputs are columns of the batch."""

    def hidden(self, params: Params, tokens: Array, segment_ids: Array, positions: Array) -> Array:
        raise TypeError("a cached teacher does not run: its hidden states come with the batch")

    def head(self, params: Params) -> Array:
        return decode_weight(next(iter(params.values())))

    stored_head = head


def cached(
    table: TensorTable, spec: ArchSpec, compute: Compute, mesh: Mesh, *, kind: str
) -> TeacherLogitsProvider:
    """A teacher whose outputs come with the batch: its head alone, for hidden states, or nothing.

    `kind` is that of the cache: "hidden" or "topk".
    """
    params: Params = {}
    if kind == "hidden":
        name = "embed" if spec.tied else "head"
        abstract = {name: functional(spec, compute)[1][name]}
        params = _as_sliced(load_params(table, spec, abstract, mesh), mesh)
    info = TeacherInfo(f"cached ({kind})", spec.vocab_size, _resident(params), table.paths[0].name)
    return TeacherLogitsProvider(_Cached(), params, info)


def truncated(teacher: TeacherLogitsProvider, vocab_size: int) -> TeacherLogitsProvider:
    """The same teacher over the first `vocab_size` ids: rows of the head are cut off, once.

    Cutting before the softmax renormalises the probabilities over the ids that are left. Raises
    `UserError` for a size of 0 and for more rows than there are.
    """
    rows = teacher.info.vocab_size
    if not 0 < vocab_size <= rows:
        raise UserError(
            f"{teacher.info.source}: found a teacher of {rows:,} rows to cut to {vocab_size:,}; "
            f"expected 1 to {rows:,}. Choose a teacher of at least the student's vocabulary."
        )
    if vocab_size == rows or not teacher.params:  # without a head there is nothing to cut
        return teacher
    # A tied head is the embedding; ids beyond the cut are no token's, so nothing looks them up.
    name = "head" if "head" in teacher.params else "embed"
    # Packed rows as well: blocks never cross from one row to the next.
    cut = jax.tree.map(jax.jit(lambda x: x[:vocab_size]), teacher.params[name])
    params = teacher.params | {name: jax.block_until_ready(cut)}
    info = dataclasses.replace(
        teacher.info, vocab_size=vocab_size, resident_bytes=_resident(params)
    )
    return TeacherLogitsProvider(teacher.apply, params, info)


@dataclasses.dataclass(frozen=True)
class _Fixture:
    vocab_size: int
    logit: float

    def hidden(self, params: Params, tokens: Array, segment_ids: Array, positions: Array) -> Array:
        return self.logit * jax.nn.one_hot(tokens, self.vocab_size, dtype=jnp.float32)

    def head(self, params: Params) -> Array:
        return params["head"]

    stored_head = head


def fixture(vocab_size: int, logit: float = 10.0) -> TeacherLogitsProvider:
    """A teacher for tests: after id i it gives `logit` to id i + 1 (the last wraps), 0 to others.

    It looks at nothing but the last token, so each of its figures can be computed by hand.
    """
    head = jnp.roll(jnp.eye(vocab_size, dtype=jnp.float32), 1, axis=0)
    info = TeacherInfo("fixture", vocab_size, head.nbytes, "(none)")
    return TeacherLogitsProvider(_Fixture(vocab_size, logit), {"head": head}, info)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The ids that student and teacher share; the loss slices both heads to `width`."""

    width: int  # rows of the narrower head
    real: int  # ids that a token of the tokenizer reaches


def align(student: ArchSpec, teacher: ArchSpec, student_tokenizer: Tokenizer,
          teacher_tokenizer: Tokenizer) -> Vocabulary:  # fmt: skip
    """Decides the shared vocabulary after comparing every token, merge and special id.

    Heads of one tokenizer are padded to different widths (Qwen2.5 7B: 152,064 rows, 0.5B:
    151,936), so sizes prove nothing. Raises `UserError` naming the first id that differs.
    """
    real = student_tokenizer.vocab_size
    if teacher.vocab_size < student.vocab_size or teacher_tokenizer.vocab_size < real:
        raise UserError(
            f"the teacher's vocabulary ({teacher_tokenizer.vocab_size:,} tokens, "
            f"{teacher.vocab_size:,} rows) is smaller than the student's "
            f"({student_tokenizer.vocab_size:,} tokens, {student.vocab_size:,} rows). "
            "The teacher must know every token the student can predict: choose a teacher of the "
            "same tokenizer family."
        )
    ours, theirs = student_tokenizer.tokens, teacher_tokenizer.tokens
    for i in range(real):
        if ours[i] != theirs[i]:
            raise UserError(
                f"tokenizers differ at id {i}: the student has {ours[i]!r}, the teacher "
                f"{theirs[i]!r}. "
                "Logits of different tokens cannot be compared: choose models of one tokenizer."
            )
    _check_rest(student_tokenizer, teacher_tokenizer)
    beside = f" (the teacher's {teacher.vocab_size:,} rows)"
    return own_vocabulary(student, student_tokenizer, beside)


def own_vocabulary(student: ArchSpec, tokenizer: Tokenizer, beside: str = "") -> Vocabulary:
    """The student's own vocabulary; raises `UserError` if its head has too few rows for it.

    The message says `beside` after the student's rows.
    """
    real = tokenizer.vocab_size
    if not 0 < real <= student.vocab_size:
        raise UserError(
            f"the tokenizer has {real:,} tokens, but the student's head has {student.vocab_size:,} "
            f"rows{beside}: the checkpoint is not the one its tokenizer belongs to."
        )
    return Vocabulary(student.vocab_size, real)


def _check_rest(student: Tokenizer, teacher: Tokenizer) -> None:
    for i, (ours, theirs) in enumerate(zip(student.merges, teacher.merges, strict=False)):
        if ours != theirs:
            raise UserError(
                f"tokenizers differ at merge {i}: the student has {ours!r}, the teacher "
                f"{theirs!r}. "
                "The same text would be cut differently: choose models of one tokenizer."
            )
    specials: list[tuple[str, Any, Any]] = [
        ("special ids", sorted(student.special_ids), sorted(teacher.special_ids)),
        ("number of merges", len(student.merges), len(teacher.merges)),
    ]
    for what, ours, theirs in specials:
        if ours != theirs:
            raise UserError(
                f"tokenizers differ in their {what}: the student has {ours}, the teacher {theirs}. "
                "Choose models of one tokenizer."
            )
