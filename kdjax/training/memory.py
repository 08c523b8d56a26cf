"""Counts the bytes of a forward pass and of generation on one device; a plan of such parts.

Resident bytes are exact. Temporaries are what XLA keeps alive in each phase, as its memory reports
on an H200 showed (jax 0.11.2).
"""

import dataclasses
from collections.abc import Iterator

from kdjax.device.runtime import Devices
from kdjax.models import decoding
from kdjax.models.arch import ArchSpec
from kdjax.models.attention import QUERY_BLOCK
from kdjax.models.decode_weights import count_layers
from kdjax.models.delta import CHUNK
from kdjax.models.loading import count_parameters
from kdjax.training.teachers import Size, TeacherKind

# Plans of 20 measured steps were between 0.1% below the peak and 4.7% above it.
_MARGIN = 1.03
CPU_ERROR = 1.15  # what XLA takes on a CPU, at most, in units of the formula
# Library workspaces (cuBLAS takes 32 MiB a product in flight), code, and gaps between buffers.
GPU_OVERHEAD = 0.35e9
# A delta layer's rule forward on one position, bytes: of a value head N float32 pairs of positions
# in a chunk, of a column of keys, of a column of values, of a number of the state before a chunk.
# Kernels keep a chunk's parts to themselves: XLA counts three quarters of what it does without.
_RULE = 2.25, 9.75, 1.275, 4.125


@dataclasses.dataclass(frozen=True)
class Least:
    """The smallest device that a run can go to by settings that change none of its results."""

    memory: Size  # bytes of each device, of which JAX takes a part
    flags: str  # as `--config.train.microbatches=8`; empty: as the run is
    in_ram: bool = False  # whether these are the RAM of a machine, all of it

    def __str__(self) -> str:
        how = f" with\n    {self.flags}" if self.flags else ""
        what, of = ("machine", " of RAM") if self.in_ram else ("device", "")
        return f"the smallest {what} that it can go to has {self.memory / 1e9:.2f}{of}{how}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device, by part; `phases` are alternatives, of which one is the peak."""

    kind: TeacherKind
    remat: str
    chunk_tokens: int
    resident: dict[str, Size]
    gradients: Size  # float32 bytes: the masters' own, or whole masters' with microbatches
    phases: dict[str, dict[str, Size]]
    limit: Size | None  # what one device offers; None if unknown
    tokens_per_s: float | None  # bound by arithmetic at the data sheet's rate, all devices
    saved: Size = 0  # bytes of a checkpoint on the disk, of all devices; 0: nothing is saved
    choice: str = ""  # the kind of teacher and why
    traffic: str = ""  # what processes send each other; empty: there is one
    platform: str = ""  # of the devices, by JAX's name
    least: "Least | None" = None  # None: not asked

    @property
    def free(self) -> Size | None:
        """Free bytes of the device beyond resident ones; None if unknown."""
        return self.limit - sum(self.resident.values()) if self.limit else None

    @property
    def peak_phase(self) -> str:
        """The phase that needs the most bytes."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> Size:
        """Bytes of everything resident and of the largest phase."""
        return sum(self.resident.values()) + sum(self.phases[self.peak_phase].values())

    @property
    def needed(self) -> Size:
        """Bytes that the device must offer: the peak and a margin."""
        return _MARGIN * self.peak

    @property
    def missing(self) -> Size:
        """Bytes that the device lacks of those needed; 0 if its memory is unknown."""
        return max(0.0, self.needed - self.limit) if self.limit else 0.0

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
        margin = f"{self.needed / 1e9:.2f} with a margin of {_MARGIN - 1:.0%}"
        verdict = f"{margin}, {self.missing / 1e9:.2f} too much" if self.missing else "fits"
        least = f"; {self.least}" if self.least else ""
        yield f"  {'peak':<44} {self.peak / 1e9:8.2f} {limit}: {verdict}{least}"
        if self.saved:
            yield f"a checkpoint on the disk: {self.saved / 1e9:.2f} GB"
        if self.tokens_per_s:
            yield f"at most {self.tokens_per_s:,.0f} tokens/s: arithmetic at the chip's peak rate"
        if self.traffic:
            yield self.traffic
        if self.choice:
            yield self.choice


def share_memory(devices: Devices) -> Size | None:
    """Bytes that one device offers: emulated ones share the machine's memory."""
    limit = devices.memory_bytes
    return limit / devices.count if limit and devices.platform == "cpu" else limit


def count_layer(spec: ArchSpec) -> Size:
    """Parameters of a layer, on average."""
    ends = (2 - spec.tied) * spec.vocab_size * spec.hidden_size
    return (count_parameters(spec) - ends) / spec.num_layers


def count_rule(spec: ArchSpec) -> Size:
    """Counts the bytes of a delta layer's convolution and rule forward on one position."""
    pairs, keys, values, states = _RULE
    heads, width = spec.delta_value_heads, spec.delta_value_dim
    columns = keys * spec.delta_key_heads * spec.delta_key_dim
    passed = states * spec.delta_key_dim * width / CHUNK
    return columns + heads * (4 * pairs * CHUNK + values * width + passed)


def count_kept_heads(spec: ArchSpec) -> Size:
    """Numbers that a delta layer on a GPU keeps of one position, in addition to its products.

    Values, their news, outputs, normed and gated ones; queries and keys; the state before a chunk;
    what solves it; and a few float32 numbers a head.
    """
    heads, keys = spec.delta_value_heads, spec.delta_key_heads * spec.delta_key_dim
    return 5 * heads * spec.delta_value_dim + 2 * keys + _count_states(spec) + heads * (CHUNK + 10)


def count_heads_backward(spec: ArchSpec) -> Size:
    """Additional numbers that a delta layer's backward pass holds of one position.

    The gradients of states before and after a chunk, and five of a column of values.
    """
    values = spec.delta_value_heads * spec.delta_value_dim
    return 2 * _count_states(spec) + 5 * values


def _count_states(spec: ArchSpec) -> Size:
    """Numbers of a state before each chunk, a position."""
    return spec.delta_value_heads * spec.delta_key_dim * spec.delta_value_dim / CHUNK


def count_forward(spec: ArchSpec, kind: TeacherKind, size: int, tensor: int) -> Size:
    """Counts the bytes a position of a pass forward, attention's scores apart."""
    mlp, rule = spec.mlp_width / tensor, count_rule(spec)
    # Gate and up; the residual stream, its norm, and three of queries, keys, values, output.
    return size * (2 * mlp + 5 * spec.hidden_size) + kind.extra_bytes * mlp + rule / tensor


def count_scores(spec: ArchSpec, rows: int, length: int) -> Size:
    """Bytes of a block of queries' scores on the XLA path, float32, before and after the exp."""
    return 8 * rows * spec.num_heads * min(length, QUERY_BLOCK) * length


def count_writing(
    spec: ArchSpec,
    size: int,
    ready: tuple[Size, Size],
    sizes: tuple[int, int, int],
    shards: int,
    free: Size | None,
    *,
    kernel: bool,
) -> dict[str, Size]:
    """Counts a generating model's bytes besides its parameters; `sizes` as for `count_slots`.

    `ready` has the bytes of a number of layers and of the head, in the form that products take.
    """
    layers, head = ready
    parts: dict[str, Size] = {"its head": spec.vocab_size * spec.hidden_size * head}
    parts |= decoding.count_slots(spec, size, *sizes, kernel=kernel)
    free = None if free is None else free - sum(parts.values())
    return parts | {"its layers apart": count_layers(spec, layers, shards, free)}
