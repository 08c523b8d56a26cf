"""Plans what models that are measured or that write hold, by phase, before they are loaded."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from kdjax.device.runtime import Devices
from kdjax.device.sharding import count_bytes
from kdjax.losses.positions import COMPARED_CHUNK
from kdjax.models import decoding
from kdjax.models.arch import STACKS
from kdjax.models.checkpoint import Checkpoint, drop_block
from kdjax.models.decoder import shape_block
from kdjax.models.ready import count_whole
from kdjax.training.counts import (
    APART,
    GPU_OVERHEAD,
    GPU_RULE,
    Plan,
    count_forward,
    count_forward_on_cpu,
    count_layer,
    count_rule,
    count_scores,
    count_writing,
    share_memory,
)
from kdjax.training.teachers import RUNNING, Size, TeacherKind

# Bytes of a number of packed layers as one row on a CPU is multiplied with them, if all types have
# minimums: XLA's products then widen numbers themselves.
_FUSED = 1.5
# Figures of every position (`evaluation.heldout`): bytes of an id of a position in a chunk, for one
# model and for two that are compared. These, and what a block holds that drafts along texts, are as
# compiled for a CPU; a GPU, not measured, is said to hold as much.
_FIGURES = 12.3, 40.6
# The block that drafts along texts, 8 a place, as compiled for a CPU: float32 numbers at a position
# of a column of keys, of the width, of queries, of a pair of positions, and in all of a number of
# the block, by bytes of a number. Within 12% of 18 programs each.
_RUNS = {2: (25.7, 1.0, 4.7, 2.9, 1.65), 4: (23.7, 2.5, 2.8, 2.7, 0.8)}


class Loaded(NamedTuple):
    """A model as a command loads it, not to train: what it takes is counted, nothing is loaded."""

    checkpoint: Checkpoint
    weights: str  # of `config.WEIGHTS`
    dtype: str

    @property
    def kind(self) -> TeacherKind:
        """How its weights are kept."""
        return RUNNING[self.weights]

    @property
    def form(self) -> str:
        """The same in a plan's words."""
        return self.kind.resident or self.dtype

    @property
    def _size(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def count(self, mesh: Mesh) -> Size:
        """Bytes of its weights on a device."""
        width = self.checkpoint.spec.vocab_size
        return self.kind.resident_bytes(self.checkpoint, width, self.dtype, mesh)

    def count_block(self, mesh: Mesh) -> Size:
        """Bytes more with the block that drafts in float32, as `take_block` puts it in its place.

        Of a model whose file has one.
        """
        bare = self._replace(checkpoint=drop_block(self.checkpoint))
        return count_bytes(shape_block(self.checkpoint.spec)) + bare.count(mesh) - self.count(mesh)

    def count_head(self) -> Size:
        """Bytes of the numbers of its head."""
        spec = self.checkpoint.spec
        return spec.vocab_size * spec.hidden_size * self._size

    def count_writing(
        self,
        sizes: tuple[int, int, int],
        devices: Devices,
        free: Size | None,
        *,
        drafts: int = 0,
        wide: bool = False,
    ) -> dict[str, Size]:
        """Counts what writing takes where so many bytes are `free`; see `plan_text`."""
        on_gpu, spec = devices.platform == "gpu", self.checkpoint.spec
        # On a CPU weights lie wide for products, but for one row that reads an id at a time.
        narrow = sizes[0] == 1 and not drafts and not wide
        ready = (self._size, self._size) if on_gpu else (4, 4)
        if narrow and not on_gpu:
            ready = self._count_narrow()
        settings = self._size, ready, sizes, 1, free
        parts = count_writing(spec, *settings, kernel=on_gpu, drafts=drafts)
        if on_gpu:
            return {name: part for name, part in parts.items() if part}
        if not narrow and self._size < 4:  # a call widens them before its steps
            parts["keys and values, for products"] = 2 * parts["keys and values"]
        if not wide:  # else nothing is read before
            parts["a call's own"] = max(
                parts["a call's own"],
                self._count_prompts(sizes, ready[0], bool(parts[APART]), drafts),
            )
        return {name: part for name, part in parts.items() if part}

    def _count_prompts(
        self, sizes: tuple[int, int, int], ready: Size, apart: bool, drafts: int
    ) -> Size:
        """Bytes that the reading of prompts holds on a CPU, by layers apart or as they are stored.

        `ready` are those of a number of layers apart.
        """
        spec, rows = self.checkpoint.spec, decoding.prompts_at_once(sizes[0])
        length = decoding.pad_length(sizes[1], sum(sizes[1:]) + drafts)
        reading = count_forward_on_cpu(spec, rows, length, self._size)
        if apart and not spec.delta_value_heads:  # which are read as they are stored
            narrow = ready not in (4, _FUSED)
            matrix = 4 * 2 * spec.hidden_size * spec.mlp_width  # gates and ups, made wide
            reading["weights of layers, for products"] = narrow * matrix
        pair = 2 * len(spec.places(delta=False)) * spec.num_kv_heads * spec.head_dim
        return sum(reading.values()) + pair * rows * length * self._size

    def _count_narrow(self) -> tuple[Size, Size]:
        """Bytes of a number of layers and head as one row on a CPU is multiplied with them."""
        if not self.kind.decodes or self.dtype != "float32":
            return self._size, self._size
        table, layers, count = self.checkpoint.table, 0.0, 0
        sizes: dict[str, float] = {}
        for path, names in self.checkpoint.names.items():
            tensors = [table.info(name) for name in names]
            if len(tensors[0].shape) < 2:
                continue
            size = count_whole({tensor.dtype for tensor in tensors})
            if path[0] in STACKS:
                numbers = sum(math.prod(tensor.shape) for tensor in tensors)
                layers, count = layers + size * numbers, count + numbers
            sizes[path[0]] = size
        return layers / count, sizes.get("head", sizes["embed"])

    def count_reading(
        self, sizes: tuple[int, int], devices: Devices, *, block: bool = False
    ) -> dict[str, Size]:
        """Counts what a pass over so many rows of so many positions holds within its layers.

        With `block` that of the block that drafts comes behind it in the same program.
        """
        spec = self.checkpoint.spec
        if devices.platform == "cpu":
            parts = count_forward_on_cpu(spec, *sizes, self._size)
            if block and self._size < 4:  # of which float32 numbers are multiplied
                parts["its block, for products"] = count_bytes(shape_block(spec))
            return parts
        positions = sizes[0] * sizes[1]
        rule = GPU_RULE * count_rule(spec, "forward")
        activations = positions * count_forward(spec, self.kind, self._size, rule, 1)
        if self.dtype == "float32":  # for which cuDNN has no attention
            activations += count_scores(spec, *sizes)
        layer = count_layer(spec) * self._size * self.kind.decodes
        return {"activations": activations, "a layer": layer, "workspace": GPU_OVERHEAD}

    def count_runs(self, sizes: tuple[int, int], devices: Devices) -> dict[str, Size]:
        """Counts what its block holds that drafts at each of so many positions, by `draft_runs`."""
        (rows, length), spec = sizes, self.checkpoint.spec
        keys, width, queries, pairs, block = _RUNS[self._size]
        numbers = keys * spec.num_kv_heads * spec.head_dim + width * spec.hidden_size
        numbers += spec.num_heads * (queries * spec.head_dim + pairs * length)
        more = {} if devices.platform == "cpu" else {"workspace": GPU_OVERHEAD}
        return {
            "activations": 4 * rows * length * numbers,
            "its block, for products": block * count_bytes(shape_block(spec)),
        } | more

    def count_states(self, sizes: tuple[int, int]) -> Size:
        """Bytes of the hidden states of so many rows of so many positions."""
        return sizes[0] * sizes[1] * self.checkpoint.spec.hidden_size * self._size


def plan_text(
    model: Checkpoint,
    weights: str,
    dtype: str,
    sizes: tuple[int, int, int],
    mesh: Mesh,
    devices: Devices,
    *,
    drafts: int = 0,
) -> Plan:
    """The plan of texts that a model writes on one device, with `drafts` a round of its own block.

    `sizes` are rows at once, ids of the longest prompt and of an answer. Allocates nothing.
    """
    loaded = Loaded(model, weights, dtype)
    resident: dict[str, Size] = {f"model, {loaded.form}": loaded.count(mesh)}
    if drafts:
        resident["its block, float32"] = count_bytes(shape_block(model.spec))
    limit = devices.memory_bytes
    free = limit - sum(resident.values()) if limit else None
    phases = {"text is written": loaded.count_writing(sizes, devices, free, drafts=drafts)}
    return Plan(loaded.kind, "", 0, resident, 0, phases, limit, None)


def plan_evaluation(
    target: Loaded,
    teacher: Loaded | None,
    mesh: Mesh,
    devices: Devices,
    *,
    written: Mapping[str, tuple[int, int, int]],
    continued: tuple[int, int, int] | None = None,
    read: tuple[int, int] | None = None,
    drafts: int = 0,
    timed: bool = False,
) -> Plan:
    """The plan of an evaluation, of which each phase loads the models that it needs.

    `written` are the sizes, as of `plan_text`, of what the target writes, by phase; `continued`
    those of prompts that the teacher continues, or the target where its own block drafts. Both
    models then read texts, `read` rows of so many positions at once on a device, and are compared;
    with `drafts` the target's block reads them as it drafts so many. Allocates nothing.
    """
    limit, alone = share_memory(devices), teacher is None
    models = {"teacher": teacher, "target": target} if teacher else {"model": target}
    held = {name: {f"{name}, {x.form}": x.count(mesh)} for name, x in models.items()}
    resident = held["model"] if alone else {}
    phases: dict[str, dict[str, Size]] = {}

    def add(phase: str, name: str, parts: dict[str, Size]) -> None:
        whole = ({} if alone else held[name]) | parts
        phases[phase] = {part: size for part, size in whole.items() if size}

    def write(phase: str, name: str, sizes: tuple[int, int, int], **more: Any) -> None:
        model, extra = models[name], more.pop("block", {})
        free = limit - sum(held[name].values()) - sum(extra.values()) if limit else None
        add(phase, name, extra | model.count_writing(sizes, devices, free, **more))

    last = [*models][-1]
    for phase, sizes in written.items():
        write(phase, last, sizes)
    if continued:
        write("prompts are continued", next(iter(models)), continued)
    if read is None:
        return Plan(target.kind, "", 0, resident, 0, phases, limit, None)
    block: dict[str, Size] = {}
    if drafts:
        block = {"its block, float32, for its own": target.count_block(mesh)}
    other: dict[str, Size] = {}
    for name, model in models.items():
        # Those of the batch before are held while the next is read; a block's once more, by place.
        states = model.count_states(read) * (3 * (1 + drafts) if drafts else 2)
        around = other | block | {f"{name}'s head": model.count_head(), "hidden states": states}
        phase = "text is read" if alone else f"the {name} reads text"
        add(phase, name, around | model.count_reading(read, devices, block=bool(drafts)))
        if drafts:
            add("its block drafts along it", name, around | model.count_runs(read, devices))
        other |= {f"{name}'s head": model.count_head()} if name != last else {}
    add(
        "logits are compared",
        last,
        block | _count_figures([*models.values()], read, drafts, devices),
    )
    if timed:
        least = decoding.pad_length(1)  # behind so many ids, as `drafting.time_pass`
        sizes = (1, least, least - 1)
        write("a pass is timed", last, sizes, block=block, drafts=min(drafts, 1), wide=True)
    return Plan(target.kind, "", 0, resident, 0, phases, limit, None)


def _count_figures(
    models: Sequence[Loaded], read: tuple[int, int], drafts: int, devices: Devices
) -> dict[str, Size]:
    """Counts what `heldout.position_values` holds of so many rows and positions, inputs included.

    With `drafts` a model is compared with its own block, whose head is the same.
    """
    heads = [model.count_head() for model in models]
    widest = min(model.checkpoint.spec.vocab_size for model in models)
    pair = len(models) > 1 or drafts > 0
    chunk = min(COMPARED_CHUNK, read[0] * read[1])
    # A CPU multiplies float32 numbers.
    narrow = (size for model, size in zip(models, heads, strict=True) if model.dtype != "float32")
    wide = sum(narrow) * (1 + (drafts > 0)) * (devices.platform == "cpu")
    # Each model's, and once more in chunks; of a block all of a pass, and once more by place.
    states = sum(model.count_states(read) for model in models) * (2 + 2 * drafts + 2 * bool(drafts))
    return {
        "heads": sum(heads),
        "heads, for products": wide,
        "logits of a chunk": chunk * widest * _FIGURES[pair],
        "hidden states": states,
    }
