"""What will live where, before anything is allocated: memory by part, and the speed's upper bound.

Resident bytes are exact. Temporaries follow the step's phases: what XLA keeps alive in each, as its
memory reports on an H200 showed (jax 0.11.2; docs/performance.md compares plan and measurement).

Letters: N positions computed at a time on one device, C of them in a chunk of the loss, V
vocabulary rows, D hidden width, F MLP width.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kdjax.config import FP8_COMPUTES, Config, flatten
from kdjax.device import sharding
from kdjax.device.runtime import Devices
from kdjax.errors import UserError
from kdjax.formats.blocks import BLOCKS
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, functional
from kdjax.models.loading import tensor_names
from kdjax.training import optim
from kdjax.training.pair import Sources

Size = int | float  # bytes, or bytes a position

# Positions in a chunk of the loss, by default the most that fit. More at a time pass over the
# head's gradient less often: of a cached step on an H200 4,096 gain 4%, and 16,384 another 2%.
_CHUNKS = (16384, 4096, 1024)

NO_TEACHER = "none"  # the backend of a run that trains on the text alone
# Teachers that do not run: their hidden states, or their likeliest ids, come with the batch.
CACHED = ("hidden", "topk")
# Plans of 20 measured steps were between 0.1% below the peak and 4.7% above it.
_MARGIN = 1.03
# Library workspaces (cuBLAS takes 32 MiB a product in flight), code, and gaps between buffers.
_GPU_OVERHEAD = 0.35e9
# XLA's CPU backend fuses less. 1.5B to 0.5B at 2 x 64 positions: 3.95 GB where a GPU takes 2.4.
_CPU_FACTOR = 1.6


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device, by part; `phases` are alternatives, of which one is the peak."""

    backend: str
    remat: str
    chunk_tokens: int
    platform: str
    resident: dict[str, Size]
    phases: dict[str, dict[str, Size]]
    limit: Size | None  # what one device offers; None if unknown
    tokens_per_s: float | None  # bound by arithmetic at the data sheet's rate, all devices
    choice: str = ""  # the backend and why

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> Size:
        """Bytes of everything resident and of the largest phase."""
        return sum(self.resident.values()) + sum(self.phases[self.peak_phase].values())

    @property
    def missing(self) -> Size:
        """Bytes that the device lacks for the peak and a margin; 0 if nothing is known."""
        return max(0.0, _MARGIN * self.peak - self.limit) if self.limit else 0.0

    def lines(self) -> Iterator[str]:
        """The plan as text, in GB of 10^9 bytes."""
        yield "on each device, GB:"
        for name, size in self.resident.items():
            yield f"  {name:<44} {size / 1e9:8.2f}"
        for phase, parts in self.phases.items():
            peak = "  <- the peak" if phase == self.peak_phase else ""
            yield f"  while {phase + ':':<38} {sum(parts.values()) / 1e9:8.2f}{peak}"
            for name, size in parts.items():
                yield f"    {name:<51} {size / 1e9:8.2f}"
        limit = f"of {self.limit / 1e9:.2f}" if self.limit else "of an unknown amount"
        verdict = f"{self.missing / 1e9:.2f} too much" if self.missing else "fits"
        yield f"  {'peak':<44} {self.peak / 1e9:8.2f} {limit}: {verdict}"
        if self.tokens_per_s:
            yield f"at most {self.tokens_per_s:,.0f} tokens/s: arithmetic at the chip's peak rate"
        yield self.choice


def make_plan(config: Config, sources: Sources, mesh: Mesh, devices: Devices, backend: str) -> Plan:
    """The plan of one teacher backend and of a `student.remat` by name; allocates nothing."""
    shapes = functional(sources.student_spec, Compute())[1]
    student = _tree_bytes(shapes, mesh)
    tx = optim.optimizer(optim.OptimSpec(total_steps=2, **dataclasses.asdict(config.optim)))
    moments = _total(jax.eval_shape(tx.init, shapes)) * student / _total(shapes)
    kinds = {"dequant": config.teacher.param_dtype, "q4k": "packed blocks",
             "hidden": "its head", "topk": "cached"}  # fmt: skip
    kind = kinds.get(backend, "float8 and scales")
    resident: dict[str, Size] = {}
    if backend != NO_TEACHER:
        resident[f"teacher, {kind}"] = _teacher_bytes(config, sources, mesh, backend)
    resident |= {
        "student, float32 masters": student,
        f"optimizer moments, {config.optim.moment_dtype}": moments,
    }
    limit = devices.memory_bytes
    if limit and devices.platform == "cpu":
        limit = limit / devices.count  # emulated devices share the machine's memory
    bound = _bound(config, sources, devices, backend)
    how = config.student.remat, config.loss.chunk_tokens
    plan = Plan(backend, *how, devices.platform, resident, {}, limit, bound)
    return _with_phases(plan, config, sources, mesh)


def _with_phases(plan: Plan, config: Config, sources: Sources, mesh: Mesh) -> Plan:
    on_cpu = plan.platform == "cpu"
    factor, overhead = (_CPU_FACTOR, 0.0) if on_cpu else (1.0, _GPU_OVERHEAD)
    gradients = plan.resident["student, float32 masters"]
    phases = {
        name: {part: size * factor for part, size in parts.items() if size}
        | ({"workspace": overhead} if overhead else {})
        for name, parts in _phases(config, sources, mesh, plan.backend, plan.platform, gradients)
    }
    return dataclasses.replace(plan, phases=phases)


def _total(abstract: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))


def step_flops(config: Config, sources: Sources, cached: str | None = None) -> float:
    """FLOP a token: teacher forward, or what its cache leaves of it, and student both ways."""
    student = 3 * sources.student_spec.forward_flops(config.data.seq_len)
    return _teacher_flops(config, sources, cached) + student


def _teacher_flops(config: Config, sources: Sources, cached: str | None) -> float:
    teacher = sources.teacher_spec
    if teacher is None or config.loss.alpha == 1:  # then it runs in evaluations only
        return 0.0
    left = {"topk": 0.0, "hidden": 2.0 * sources.vocabulary.width * teacher.hidden_size}
    return left[cached] if cached else teacher.forward_flops(config.data.seq_len)


def _bound(config: Config, sources: Sources, devices: Devices, backend: str) -> float | None:
    flops = _teacher_flops(config, sources, backend if backend in CACHED else None)
    if backend in FP8_COMPUTES:
        flops /= 2  # data sheets give float8 twice the rate of bf16
    flops += 3 * sources.student_spec.forward_flops(config.data.seq_len)
    return devices.peak_flops / flops if devices.peak_flops else None


def _shards(path: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> int:
    axes = [axis for axis in sharding.parameter_spec(path, shape, mesh) if axis]
    return functools.reduce(lambda n, axis: n * mesh.shape[axis], axes, 1)


def _tree_bytes(abstract: Any, mesh: Mesh) -> Size:
    leaves = jax.tree_util.tree_flatten_with_path(abstract)[0]
    return sum(
        leaf.size * leaf.dtype.itemsize / _shards(tuple(k.key for k in keys), leaf.shape, mesh)
        for keys, leaf in leaves
    )


def _teacher_bytes(config: Config, sources: Sources, mesh: Mesh, backend: str) -> Size:
    spec, table = sources.teacher_spec, sources.teacher
    assert spec is not None and table is not None
    kept = sources.vocabulary.width / spec.vocab_size  # rows of the head that are not cut off
    dtype = jnp.dtype(config.teacher.param_dtype)
    abstract = functional(spec, Compute(param_dtype=dtype))[1]
    if backend in CACHED:
        head = sources.vocabulary.width * spec.hidden_size * dtype.itemsize
        return head / mesh.shape["tensor"] if backend == "hidden" else 0
    if backend != "q4k":
        cut = dataclasses.replace(spec, vocab_size=sources.vocabulary.width)
        narrow = functional(cut, Compute(param_dtype=dtype))[1]
        head = "embed" if spec.tied else "head"
        numbers = abstract | {head: narrow[head]}
        return (_fp8_bytes if backend in FP8_COMPUTES else _tree_bytes)(numbers, mesh)
    total = 0.0
    for path, names in tensor_names(table, spec).items():
        infos = [table.info(name) for name in names]
        share = kept if path in (("head",), ("embed",) if spec.tied else ()) else 1.0
        for info in infos:
            if len(info.shape) == 2:
                blocks = info.shape[0], info.shape[1] // BLOCKS[info.dtype].elements
                total += share * info.nbytes / _shards(path, blocks, mesh)
            else:
                total += dtype.itemsize * info.shape[0]
    return total


def _fp8_bytes(abstract: Any, mesh: Mesh) -> Size:
    """Of a dense teacher's shapes, its matrices in float8 with a float32 scale a row."""
    leaves = jax.tree_util.tree_flatten_with_path(abstract)[0]
    total: Size = 0
    for path, leaf in ((tuple(key.key for key in keys), leaf) for keys, leaf in leaves):
        width = leaf.dtype.itemsize
        if len(leaf.shape) == 3 or path == ("head",):
            width = 1
            scales = (*leaf.shape[:-1], 1)
            total += 4 * math.prod(scales) / _shards(path, scales, mesh)
        total += width * leaf.size / _shards(path, leaf.shape, mesh)
    return total


def _phases(config: Config, sources: Sources, mesh: Mesh, backend: str, platform: str,
            gradients: Size) -> Iterator[tuple[str, dict[str, Size]]]:  # fmt: skip
    size = jnp.dtype(config.train.compute_dtype).itemsize
    teacher, student = sources.teacher_spec, sources.student_spec
    width = sources.vocabulary.width / mesh.shape["tensor"]
    shards = sharding.row_shards(mesh)
    parts, length = config.train.microbatches, config.data.seq_len
    positions = config.train.batch_size // parts // shards * length
    kept = positions * _kept_a_position(student, config.student.remat, size)
    if config.student.remat == "none":
        kept += size * student.parameters()  # weights as cast for the products
    accumulator = {"gradients, accumulated": gradients if parts > 1 else 0.0}
    packed = backend == "q4k"
    decoded = jnp.dtype(config.teacher.param_dtype).itemsize if packed else 0
    theirs = teacher.hidden_size if teacher else 0

    def forward(tokens: Size) -> dict[str, Size]:
        if teacher is None:
            return {}
        wide = teacher.mlp_size / mesh.shape["tensor"]
        row = size * (2 * wide + 5 * teacher.hidden_size)
        row += wide if backend in FP8_COMPUTES else 0  # what `down` multiplies, in float8
        layer = (teacher.parameters() - 2 * teacher.vocab_size * teacher.hidden_size) / (
            teacher.num_layers * mesh.shape["tensor"]
        )
        return {"teacher's activations": tokens * row, "a teacher layer": layer * decoded}

    def heads(tokens: Size, logits: Size, moved: int) -> dict[str, Size]:
        chunk = min(config.loss.chunk_tokens / shards, tokens)
        both = 3 * student.hidden_size + (0 if backend == "topk" else 2 * theirs)
        return {
            "logits of a chunk": chunk * width * logits,
            "student's head": width * student.hidden_size * (size + moved),
            "teacher's head": width * theirs * decoded,
            "hidden states": tokens * size * both,
        }

    # cuDNN's packed backward pass keeps float32 sums for each slot of a row as if it were a row.
    slots = config.data.max_segments + 1 if config.data.max_segments > 1 else 1
    attention = 8 * slots * student.num_heads * student.head_dim if platform != "cpu" else 0
    widest = max(attention, 6 * size * student.mlp_size) / mesh.shape["tensor"]
    layer_bytes = positions * (widest + 10 * size * student.hidden_size)
    kept_on = {"student's kept activations": kept} | accumulator
    runs = backend not in CACHED
    if runs:
        yield "the teacher runs forward", forward(positions) | accumulator
    # float32 logits of those that run, and their gradient in the compute dtype; without the kernels
    # that sum them, which know the forward KL alone, one intermediate.
    logits = (4 if backend in ("topk", NO_TEACHER) else 8) + size
    summed = platform == "gpu" and mesh.size == 1 and config.loss.divergence == "forward_kl"
    logits += 0 if summed else 4
    yield "the loss is computed", heads(positions, logits, 4) | kept_on
    backward = {"gradients": gradients, "student's layer": layer_bytes}
    yield "the student runs backward", backward | kept_on
    tokens = config.eval.batch_size // shards * length
    if runs:
        yield "evaluating: the teacher runs forward", forward(tokens)
    yield "evaluating: logits are compared", heads(tokens, 8, 0)


def _kept_a_position(spec: ArchSpec, remat: str, size: int) -> Size:
    """Bytes that the backward pass keeps of the forward pass, all layers, a position."""
    d, f = spec.hidden_size, spec.mlp_size
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    elements = {
        "full": d,  # each layer's input
        "dots": 2 * f + 3 * d + heads,  # and every product
        "none": 3 * f + 5 * d + heads,  # and everything between
    }[remat]
    return spec.num_layers * elements * size


def choose(config: Config, sources: Sources, mesh: Mesh, devices: Devices, backend: str) -> Plan:
    """The plan that will be run: as asked for, and where "auto" is, of the fastest that fits.

    "auto" is of `backend`, `student.remat` and, as 0, `loss.chunk_tokens`. Raises `UserError` when
    a backend of "auto" finds none, naming what is missing and settings that fit. A backend that was
    asked for by name is not refused: the plan may be wrong by a few percent.
    """
    backends = ("dequant", "q4k") if backend == "auto" else (backend,)
    if sources.teacher is None:
        backends = (NO_TEACHER,)
    # On a CPU "none" is hardly faster, and the memory is other programs' too.
    roomy = devices.platform != "cpu" and bool(devices.memory_bytes)
    remats = (config.student.remat,)
    if remats == ("auto",):
        remats = ("none", "dots", "full") if roomy else ("full",)
    chunk = config.loss.chunk_tokens or _CHUNKS[-1]

    def planned(remat: str, name: str, chunk: int) -> Plan:
        return make_plan(settled(config, remat, chunk), sources, mesh, devices, name)

    tried: list[Plan] = []
    for remat, name in itertools.product(remats, backends):
        tried.append(planned(remat, name, chunk))
        if not tried[-1].missing:
            break
    plan = tried[-1]
    if roomy and not config.loss.chunk_tokens:
        wider = (planned(plan.remat, plan.backend, tokens) for tokens in _CHUNKS[:-1])
        plan = next((wide for wide in wider if not wide.missing), plan)
    sizes = (f"{p.backend} needs {p.peak / 1e9:.2f} GB" for p in tried if p.remat == plan.remat)
    offered = f"offers {plan.limit / 1e9:.2f}" if plan.limit else "does not tell its memory"
    said = f"{', '.join(sizes)}; the device {offered}"
    if backend == "auto" and plan.missing and plan.backend != NO_TEACHER:
        raise UserError(
            f"this run does not fit: {said}, {plan.missing / 1e9:.2f} too little. "
            f"{_remedy(settled(config, config.student.remat, chunk), sources, mesh, plan)}"
        )
    choice = f"teacher backend {plan.backend}" + (
        f", by auto: {said}" if backend == "auto" else ": asked for"
    )
    if plan.backend == NO_TEACHER:
        choice = "no teacher: trains on the text alone"
    if config.student.remat == "auto":
        choice += f"; student.remat {plan.remat}, by auto"
    if not config.loss.chunk_tokens:
        choice += f"; loss.chunk_tokens {plan.chunk_tokens}, by auto"
    return dataclasses.replace(plan, choice=choice)


def settled(config: Config, remat: str, chunk_tokens: int) -> Config:
    """The config with that `student.remat` and `loss.chunk_tokens`, another object."""
    return dataclasses.replace(
        config,
        student=dataclasses.replace(config.student, remat=remat),
        loss=dataclasses.replace(config.loss, chunk_tokens=chunk_tokens),
    )


def _remedy(config: Config, sources: Sources, mesh: Mesh, plan: Plan) -> str:
    """The mildest settings under which `plan`, of the packed teacher, would fit."""
    shards = sharding.row_shards(mesh)
    rows = config.train.batch_size // shards
    asked = config.train.microbatches, config.loss.chunk_tokens, config.eval.batch_size
    parts = [n for n in range(asked[0], rows + 1) if rows % n == 0]
    chunks = [c for c in (asked[1], 512, 256, 128) if c <= asked[1]]
    evals = sorted({asked[2], shards}, reverse=True)
    for part, chunk, held_out in itertools.product(parts, chunks, evals):
        trial = dataclasses.replace(
            settled(config, "full", chunk),
            train=dataclasses.replace(config.train, microbatches=part),
            eval=dataclasses.replace(config.eval, batch_size=held_out),
        )
        least = _with_phases(plan, trial, sources, mesh)
        before, after = flatten(config), flatten(trial)
        flags = " ".join(f"--config.{k}={v}" for k, v in after.items() if before[k] != v)
        if not least.missing:
            return f"It would fit with {flags} ({least.peak / 1e9:.2f} GB)."
    return (
        f"Even with {flags} it needs {least.peak / 1e9:.2f} GB: take shorter rows "
        "(data.seq_len), a smaller model, or a larger device."
    )
