"""Plans memory by part before anything is allocated, and bounds the speed from above.

Resident bytes are exact. Temporaries follow the step's phases: what XLA keeps alive in each, as its
memory reports on an H200 showed (jax 0.11.2). docs/records/2026-11-21-packed-and-dense.md compares
plan and measurement. On a CPU the same formula, of float32 numbers, only chooses:
`training.compiled` asks XLA what the chosen step takes.

Letters: N positions computed at a time on one device, C of them in a chunk of the loss, V
vocabulary rows, D hidden width, F MLP width.
"""

import copy
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from kdjax.config import (
    OWN,
    Config,
    EvalConfig,
    LossConfig,
    OptimConfig,
    RolloutConfig,
    TrainConfig,
    count_prompt_positions,
    flatten,
    set_fields,
    settle_dtype,
)
from kdjax.device import sharding
from kdjax.device.runtime import Devices
from kdjax.device.sharding import count_bytes
from kdjax.errors import UserError
from kdjax.losses.divergences import Divergence, JensenShannon, Mixture, parse_divergence
from kdjax.models.arch import ArchSpec
from kdjax.models.decoder import Compute, Params, functional
from kdjax.models.loading import count_parameters
from kdjax.training import optim
from kdjax.training.forms import Form, form_of
from kdjax.training.memory import (
    GPU_OVERHEAD,
    Plan,
    count_forward,
    count_heads_backward,
    count_kept_heads,
    count_layer,
    count_scores,
    count_writing,
    share_memory,
)
from kdjax.training.pair import Pair
from kdjax.training.teachers import RUNNING, Dense, Float8, NoTeacher, Packed, Size, TeacherKind
from kdjax.training.trainable import find_frozen, leave_out, train_only

_log = logging.getLogger("kdjax")

# Positions in a chunk of the loss, by default the most that fit. More at a time pass over the
# head's gradient less often: of a cached step on an H200 4,096 gain 4%, and 16,384 another 2%.
_CHUNKS = (16384, 4096, 1024)
REMATS = ("none", "dots", "full")  # the fastest first
# Phases of a step; others evaluate or write.
TEACHER, LOSS, BACKWARD, MUON = STEP_PHASES = (
    "the teacher runs forward",
    "the loss is computed",
    "the student runs backward",
    "Muon orthogonalizes",
)


def make_plan(config: Config, pair: Pair, mesh: Mesh, devices: Devices, kind: TeacherKind) -> Plan:
    """The plan of one kind of teacher and of a `student.remat` by name; allocates nothing."""
    config, form = settle_dtype(config, devices.platform), form_of(config.student)
    shapes = form.shapes(pair.student)
    masters = sharding.tree_bytes(shapes, mesh)
    tx, frozen = _prepare_optimizer(config.optim, pair.student.spec, shapes)
    computed = config.train.compute_dtype
    formed = leave_out(form.shape_gradients(pair.student, computed), frozen)
    gradients = sharding.tree_bytes(formed, mesh)
    one_sum = config.student.remat == "full" or config.train.reduce_dtype != "float32"
    if not (form.freezes or one_sum) and sharding.splits_state(mesh):
        masters /= mesh.size  # all but norms and biases, which are few
        # To add up microbatches' takes about what whole ones take (two H200s, from a cache: 37.06
        # GB of 38.02 planned).
        gradients /= 1 if config.train.microbatches > 1 else mesh.size
    trained, moments = count_bytes(shapes), count_bytes(jax.eval_shape(tx.init, shapes))
    share, saved = masters / trained, trained + moments
    resident: dict[str, Size] = {}
    if pair.teacher is not None:
        dtype = config.teacher.param_dtype
        resident[f"teacher, {kind.resident or dtype}"] = kind.resident_bytes(
            pair.teacher, pair.vocabulary.teacher_width, dtype, mesh
        )
    if form.weights and not shares_base(config, pair, kind):
        weights = RUNNING[form.weights]
        dtype, rows = form.base_dtype(computed), pair.student.spec.vocab_size
        resident[f"student, {weights.resident or dtype}"] = weights.resident_bytes(
            pair.student.base, rows, dtype, mesh
        )
    resident |= {
        form.title: masters,
        f"optimizer moments, {config.optim.moment_dtype}": moments * share,
    }
    if seen := form.shape_seen(pair.student, computed):
        scales = form.count_kept(pair.student)
        saved += scales
        dtype = max(jax.tree.leaves(seen), key=lambda x: x.size).dtype
        resident[f"student, rounded, {dtype}"] = sharding.tree_bytes(seen, mesh)
        resident["its scales"] = scales * share
    limit = share_memory(devices)
    flops = count_step_flops(config, pair, kind, kind.flop_rate)
    plan = Plan(
        kind=kind,
        remat=config.student.remat,
        chunk_tokens=config.loss.chunk_tokens,
        resident=resident,
        gradients=gradients,
        phases={},
        limit=limit,
        tokens_per_s=devices.peak_flops / flops if devices.peak_flops else None,
        platform=devices.platform,
        saved=saved,
        traffic=_describe_traffic(formed, mesh, config.train.reduce_dtype),
    )
    temporaries = _Temporaries(config, pair, mesh, devices.platform, kind, gradients, plan.free)
    return dataclasses.replace(plan, phases=temporaries.plan_phases())


def _describe_traffic(gradients: Params, mesh: Mesh, dtype: str) -> str:
    """Says what processes send each other to add up a step's gradients, the least that a sum needs.

    Each of H processes sends (H - 1) / H of its numbers for others to add, then its share of sums
    to all others: the same number again.
    """
    processes = [device.process_index for device in mesh.devices.flat]
    if not (others := len(set(processes)) - 1):
        return ""
    size = count_bytes(gradients) / 4 * jnp.dtype(dtype).itemsize * 2 * others / (others + 1)
    said = f"each of {others + 1} processes sends at least {size / 1e9:.2f} GB of gradients a step"
    if mesh.shape["fsdp"] * mesh.shape["tensor"] > processes.count(processes[0]):
        said += "; layers that fsdp gathers from other processes are not counted"
    return said


def shares_base(config: Config, pair: Pair, kind: TeacherKind) -> bool:
    """Whether a frozen student and its teacher share their arrays on the devices."""
    teacher, base, form = pair.teacher, pair.student.base, form_of(config.student)
    if not form.weights:  # a block that drafts trains next to its teacher's own layers
        return form.beside
    if teacher is None or teacher.adapters is not None or not kind.runs:
        return False
    files = [[path.resolve() for path in x.table.paths] for x in (teacher, base)]
    same = files[0] == files[1] and teacher.spec == base.spec
    same &= kind.name == form.weights
    same &= config.teacher.param_dtype == form.base_dtype(config.train.compute_dtype)
    return same and pair.vocabulary.width == base.spec.vocab_size


def count_step_flops(
    config: Config, pair: Pair, kind: TeacherKind, teacher_rate: float = 1.0
) -> float:
    """FLOP a token: teacher forward, or its part without a cache, and student both ways.

    The teacher's are divided by `teacher_rate`, how many of them take as long as one of bf16's.
    Frozen parameters have no gradient; those of activations count in all layers.
    """
    spec = pair.student.spec
    trained = _count_trained(config.optim, spec)
    flops = form_of(config.student).count_flops(spec, config.data.seq_len, trained)
    if pair.teacher is None or config.loss.alpha == 1:  # then it runs in evaluations only
        return flops
    teacher = kind.flops(pair.teacher, pair.vocabulary.teacher_width, config.data.seq_len)
    return teacher / teacher_rate + flops


def _prepare_optimizer(
    asked: OptimConfig, spec: ArchSpec, shapes: Params
) -> tuple[optax.GradientTransformation, frozenset[str]]:
    """Makes an optimizer of a run's state, and names the parameters that it never moves."""
    tx = optim.optimizer(asked, asked.warmup_steps + 1)  # the state is that of any schedule
    if not asked.trainable:
        return tx, frozenset()
    tx, _ = train_only(tx, shapes, spec, asked.trainable)
    return tx, find_frozen(tx, shapes)


def _count_trained(asked: OptimConfig, spec: ArchSpec) -> float:
    """Counts the share of a student's bytes that have a gradient."""
    if not asked.trainable:
        return 1.0
    shapes = functional(spec, Compute())[1]
    trained = leave_out(shapes, _prepare_optimizer(asked, spec, shapes)[1])
    return count_bytes(trained) / count_bytes(shapes)


@dataclasses.dataclass(frozen=True)
class _Temporaries:
    """Bytes that each phase of a step holds in addition to resident ones, on one device.

    The coefficients count buffers that XLA's memory reports showed alive together.
    """

    config: Config
    pair: Pair
    mesh: Mesh
    platform: str
    kind: TeacherKind
    gradients: Size
    free: Size | None  # bytes of the device beyond resident ones; None if unknown

    @property
    def _on_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def _stored(self) -> int:
        """Bytes of a number in the compute dtype."""
        return jnp.dtype(self.config.train.compute_dtype).itemsize

    @property
    def _size(self) -> int:
        """Bytes of a number as computed with: XLA's CPU backend makes float32 of bf16."""
        return 4 if self._on_cpu else self._stored

    @property
    def _gathered(self) -> Size:
        """Bytes of a teacher's number in arrays that `fsdp` gathers; 0 without it."""
        stored = 0.57 if self.kind.decodes else jnp.dtype(self.config.teacher.param_dtype).itemsize
        return stored if self._gathered_masters else 0.0

    @property
    def _gathered_masters(self) -> int:
        return 4 if self.mesh.shape["fsdp"] > 1 else 0

    @property
    def _decoded(self) -> int:
        """Bytes of a teacher's number as made for products; 0 where it is stored so."""
        if self._on_cpu:
            return self._size
        return jnp.dtype(self.config.teacher.param_dtype).itemsize if self.kind.decodes else 0

    @property
    def _form(self) -> Form:
        return form_of(self.config.student)

    @property
    def _made_head(self) -> int:
        """Bytes of a number of the student's head as made for products; 0 where it is kept so."""
        if not self._form.low_rank:
            return self._size
        base, tied = RUNNING[self._form.weights], self.pair.student.spec.tied
        # The embedding of float8 weights is numbers.
        kept = isinstance(base, Dense) or (isinstance(base, Float8) and tied)
        return 0 if kept else self._size

    @property
    def _trained(self) -> ArchSpec:
        """Architecture of the layers with a backward pass: the student's, or the block's."""
        return self._form.list_backward(self.pair.student.spec)

    @property
    def _tensor(self) -> int:
        return self.mesh.shape["tensor"]

    def plan_phases(self) -> dict[str, dict[str, Size]]:
        """Parts of each phase by name, in the order of a step and an evaluation."""
        overhead = {} if self._on_cpu else {"workspace": GPU_OVERHEAD}
        phases = {
            name: {part: size for part, size in parts.items() if size} | overhead
            for name, parts in self._phases()
        }
        rollout = self.config.rollout
        if rollout.prompts:
            writing = self._writing()
            phases["answers are written"] = {k: v for k, v in writing.items() if v} | overhead
        return phases

    def _writing(self) -> dict[str, Size]:
        """Between steps: the student in the compute dtype, and the engine of its answers."""
        rollout, spec, size = self.config.rollout, self.pair.student.spec, self._stored
        copied = count_parameters(spec) * size if size < 4 else 0.0
        if rollout.writer == "teacher" and self.pair.teacher is not None:
            spec = self.pair.teacher.spec  # the student writes a few as well
        ready = size if self.platform == "gpu" else 4  # of weights ready for products
        shards = self.mesh.shape["fsdp"]
        prompt = count_prompt_positions(self.config)
        slots = sharding.split_rows(rollout.batch_size, self.mesh)
        sizes = slots, prompt, rollout.max_tokens
        parts = {"the student as it writes": copied / shards}
        free = None if self.free is None else self.free - parts["the student as it writes"]
        kernel = self.platform == "gpu"
        return parts | count_writing(spec, size, (ready, ready), sizes, shards, free, kernel=kernel)

    def _phases(self) -> Iterator[tuple[str, dict[str, Size]]]:
        yield from self._train()
        rows = self.config.eval.batch_size // sharding.row_shards(self.mesh)
        length = self.config.data.seq_len
        if self.kind.runs:
            yield "evaluating: the teacher runs forward", self._teacher_forward(rows, length)
        width = self.pair.vocabulary.width
        compared = self._heads(rows * length, 8, gradient=0, width=width)
        yield "evaluating: logits are compared", compared

    def _train(self) -> Iterator[tuple[str, dict[str, Size]]]:
        """Phases of a step."""
        train, length = self.config.train, self.config.data.seq_len
        parts, rows = train.microbatches, _count_rows(self.config, self.mesh)
        positions = rows * length
        accumulated = {"gradients, accumulated": self.gradients if parts > 1 else 0.0}
        kept = self._keep(positions)
        held = {"student's kept activations": kept} | accumulated
        if self.kind.runs:
            running = self._teacher_forward(rows, length)
            if parts > 1 and self.kind.decodes:
                # Each layer's of the whole batch, before and after it.
                assert self.pair.teacher is not None
                states = parts * positions * self._size * self.pair.teacher.spec.hidden_size
                running["hidden states of all microbatches"] = 2 * states
                held["teacher's hidden states"] = states
            else:
                running |= accumulated
            yield TEACHER, running
        yield LOSS, self._loss(positions) | held
        yield BACKWARD, self._backward(positions, kept) | held
        if self.config.optim.name == "muon":
            student = self.pair.student.spec
            width = student.experts * student.expert_size or student.mlp_width
            stack = self._trained.num_layers * width * student.hidden_size
            matrices = 16 * stack / self._tensor
            work = {"gradients": self.gradients, "the largest stack, 4 times": matrices}
            yield MUON, work

    def _keep(self, positions: Size) -> Size:
        """Counts what the backward pass keeps of the forward pass."""
        student, remat = self.pair.student.spec, self.config.student.remat
        form, sizes = self._form, (self._form.choose_remat(remat), self._size, self._tensor)
        if form.low_rank:
            adapted = form.shapes(self.pair.student), RUNNING[form.weights]
            kept = positions * _keep_beside_adapters(student, *sizes, *adapted)
        else:
            rule = self._kept_rule(self._trained)
            kept = positions * _keep_a_position(self._trained, *sizes, rule)
            kept += positions * self._size * form.keep_more(student)
        if remat == "none" and form.casts:
            # And weights as cast for the products; that of the head is counted where it is used.
            kept += self._size * student.num_layers * count_layer(student) / self._tensor
        return kept

    def _loss(self, positions: Size) -> dict[str, Size]:
        """Counts what the loss of that many positions makes."""
        # float32 logits of student and teacher, and what the divergence makes of them; without the
        # kernels of one GPU an intermediate more.
        alone = self.platform == "gpu" and self._tensor == 1
        made = _count_divergence(self.config.loss.divergence, self._size)
        logits = 4 + self.kind.logit_bytes + made + (0 if alone else 4)
        student, form = self.pair.student.spec, self._form
        width = form.count_ids(self.pair.vocabulary.width)
        logits += form.logit_bytes
        if self.config.loss.chunk_tokens >= positions:
            # XLA makes no loop of one chunk, and the logits of all losses lie in memory together.
            logits *= 1 + len(form.later)
        parts = self._heads(positions, logits, gradient=4, width=width)
        scores = form.count_scores(student, self.config.data.seq_len, on_cpu=self._on_cpu)
        parts["scores of its attention"] = positions * scores / self._tensor
        if self._on_cpu:  # XLA holds them on a GPU too, where the other parts make up for it
            layers = 4 * student.num_layers * count_layer(student)
            parts["gradients of layers, zeros as yet"] = min(self.gradients, layers)
        return parts

    def _backward(self, positions: Size, kept: Size) -> dict[str, Size]:
        """Counts what the student's backward pass makes next to what the forward pass kept."""
        student = self.pair.student.spec
        whole = student.vocab_size * student.hidden_size  # its gradient, before it is scattered
        form = self._form
        return {
            "gradients": max(0.0, self.gradients - form.reuses * kept),
            "student's layer": self._layer(positions),
            "embedding, gathered": whole * (0 if form.freezes else self._gathered_masters),
            "a frozen layer": form.low_rank * count_layer(student) * self._size,
        }

    def _teacher_forward(self, rows: int, length: int) -> dict[str, Size]:
        assert self.pair.teacher is not None
        teacher, positions = self.pair.teacher.spec, rows * length
        position = count_forward(teacher, self.kind, self._size, self._tensor)
        layer = count_layer(teacher) / self._tensor
        gathered = layer + teacher.vocab_size * teacher.hidden_size / self._tensor
        scores = count_scores(teacher, rows, length) / self._tensor
        return {
            "teacher's activations": positions * position,
            "scores of its attention": scores if self._on_cpu else 0,
            "its layers' states": positions * self._size * self._form.count_taps(teacher),
            "a teacher layer": layer * self._decoded,
            "a layer and the embedding, gathered": gathered * self._gathered,
        }

    def _heads(
        self, positions: Size, logits: Size, *, gradient: int, width: int
    ) -> dict[str, Size]:
        """`logits` and `gradient` in bytes: of an id at a position, of a number of the head.

        `width` is the number of ids that are compared.
        """
        teacher = self.pair.teacher
        columns, trained = self._form.count_columns(self.pair.student.spec)
        chunk = min(self.config.loss.chunk_tokens, positions)
        every, few = self.pair.vocabulary.width / self._tensor, width / self._tensor
        theirs = teacher.spec.hidden_size if teacher and self.kind.logit_bytes else 0
        # The student's hidden states, their gradient, both chunked; the teacher's, chunked, and, of
        # a batch that came with them, as they came.
        states = 3 * columns + (1 if self.kind.runs else 2) * theirs
        return {
            "logits of a chunk": chunk * few * logits,
            "student's head": few * (columns * self._made_head + trained * gradient),
            "teacher's head": every * theirs * (self._decoded or self._gathered),
            "student's head, gathered": few * columns * self._gathered_masters,
            "hidden states": positions * self._size * states,
            "heads in one order": self.pair.vocabulary.count_copies(
                4 * columns, self._size * theirs
            ),
        }

    def _kept_rule(self, spec: ArchSpec) -> Size:
        """Bytes a position that a delta layer keeps in addition to its products; 0 without any."""
        return self._size * count_kept_heads(spec)

    def _layer(self, positions: Size) -> Size:
        """The student's layer whose backward pass runs."""
        spec, segments = self._trained, self.config.data.max_segments
        # cuDNN's packed backward pass keeps float32 sums for each segment of a row as if it were a
        # row: queries' gradient and output, 4 bytes each.
        slots = segments + 1 if segments > 1 else 1
        attention = 8 * slots * spec.num_heads * spec.head_dim
        if self._on_cpu:
            attention = count_scores(spec, 1, self.config.data.seq_len) / self.config.data.seq_len
        attention = self._form.count_attention(spec, self.config.data.seq_len, attention)
        mlp = 6 * self._size * spec.mlp_width  # gate, up, their product, and the gradient of each
        again, remat = spec.period().count(True), self.config.student.remat
        if again and remat == "full":
            return positions * self._period(attention) + 2 * self._size * count_layer(spec)
        rule = self._size * (count_heads_backward(spec) + spec.delta_columns)
        rule += again * self._kept_rule(spec) if remat == "dots" else 0
        widest = max(attention, mlp, rule) / self._tensor
        return positions * (widest + 10 * self._size * spec.hidden_size)

    def _period(self, attention: Size) -> Size:
        """Bytes a position of a step of the scan over periods of layers, on a GPU.

        XLA sums the gradients of a period's weights when it is through, so that all its layers but
        the last have been computed again, and their MLPs' and mixers' gradients wait.
        """
        spec, size = self._trained, self._size
        layers = spec.layers[1 : len(spec.period())]
        again = dataclasses.replace(spec, layers=layers)
        held = _keep_a_position(again, "none", size, self._tensor, self._kept_rule(spec))
        waiting = len(layers) * spec.mlp_width + sum(_count_products(spec))
        waiting += count_heads_backward(spec)
        return max(attention / self._tensor, held + size * waiting / self._tensor)


def _count_divergence(text: str, size: int) -> int:
    """Bytes of an id at a position of the logits' gradient, `size`, or of what is before it.

    Float32 logarithms of mixtures, and what a skewed divergence's gradient starts from; what a
    user's function makes is not known, and said to be as much.
    """
    if text.startswith(OWN):
        return max(Divergence.gradient_bytes, size)
    divergence = parse_divergence(text)
    mixed = isinstance(divergence, Mixture)
    parts = [part for _, part in divergence.parts] if mixed else [divergence]
    widest = max(part.gradient_bytes for part in parts)
    # A sum of gradients is begun before the logarithm of a Jensen-Shannon mixture goes.
    waits = mixed and any(isinstance(part, JensenShannon) for part in parts)
    return max(widest + size * waits, size)


def _count_products(spec: ArchSpec) -> tuple[int, int]:
    """Numbers a position of products of an attention's and of a delta net's rows."""
    queries = (1 + spec.gated) * spec.num_heads
    heads = (queries + 2 * spec.num_kv_heads) * spec.head_dim
    return heads, spec.delta_columns + spec.delta_value_heads * spec.delta_value_dim


def _keep_a_position(spec: ArchSpec, remat: str, size: int, tensor: int, rule: Size) -> Size:
    """Bytes that the backward pass keeps of the forward pass, all layers, a position.

    `rule` is what a delta layer's rule holds.
    """
    d, f = spec.hidden_size, spec.mlp_width / tensor
    heads, columns = (n / tensor for n in _count_products(spec))
    # Norms keep what they divided in float32; a layer that may be local, its keys and values.
    own = 2 * spec.qk_norm * (spec.num_heads + spec.num_kv_heads) * spec.head_dim / tensor
    own += spec.gated * spec.num_heads * spec.head_dim / tensor
    own += 2 * d * spec.post_norms
    own += 2 * (len(set(spec.windows())) > 1) * spec.num_kv_heads * spec.head_dim / tensor

    def count(products: Size, between: Size) -> Size:
        """Numbers of a layer; `products` and `between` are those of its attention or rule."""
        return {
            "full": d,  # each layer's input
            "dots": 2 * f + 3 * d + products,  # and every product
            "none": 3 * f + 5 * d + products + between,  # and everything between
        }[remat]

    deltas = len(spec.places(delta=True))
    elements = (spec.num_layers - deltas) * count(heads, own)
    elements += deltas * count(columns, rule / size / tensor)
    return elements * size


def _keep_beside_adapters(
    spec: ArchSpec, remat: str, size: int, tensor: int, adapters: Params, base: TeacherKind
) -> Size:
    """Bytes that a frozen student keeps: only the gradients of A read the inputs of its matrices.

    Dense layers stand one after the other. Others run in a loop, which hands out every number that
    the backward pass reads, those too that XLA would rather compute again.
    """
    d, f = spec.hidden_size, spec.mlp_width / tensor
    q, kv = (n * spec.head_dim / tensor for n in (spec.num_heads, spec.num_kv_heads))
    flat: dict[tuple[str, ...], Any] = flatten_dict(adapters)
    narrow = {path[-3]: x.shape[-2] for path, x in flat.items() if path[-1] == "a"}
    names, loops = set(narrow), not isinstance(base, Dense)
    low = sum(narrow.values())  # x A^T
    if remat == "full":
        numbers = d
    elif remat == "dots":
        # What a matrix gives and what its B adds are two products; those of the layer's last matrix
        # nobody reads, and float8 ones have a derivative of their own. Of some shapes XLA copies
        # dense weights as well: 0.7 of 28.7 GB.
        widths = {"q": q, "k": kv, "v": kv, "o": d, "gate": f, "up": f, "down": 0}
        frozen = 0 if isinstance(base, Float8) else sum(widths.values())
        numbers = d + frozen + sum(widths[name] for name in names) + low
    else:
        mlp = 2 + (spec.activation != "silu") + 3 * loops  # gate, up; what the activation keeps
        # What norms divided, in a loop as float32.
        norms = (1 + loops) * (spec.qk_norm * (q + kv) + 2 * d * spec.post_norms)
        normed = bool(names & {"q", "k", "v"}) + bool(names & {"gate", "up"})
        inputs = normed * d + f * ("down" in names) + loops * q * ("o" in names)
        numbers = mlp * f + 2 * (d + q + kv) + norms + inputs + low
    return spec.num_layers * numbers * size


def _divides(config: Config, mesh: Mesh, chunk: int) -> bool:
    """Whether chunks of this size are a loop, where a step sums several losses of logits.

    Of one chunk that holds all positions XLA makes no loop and holds the logits of all losses at
    once: by its account on a CPU 1.62 GB for 0.87 planned, of EAGLE-3's three drafts.
    """
    positions = _count_rows(config, mesh) * config.data.seq_len
    return not form_of(config.student).sums_more or chunk < positions


def _count_rows(config: Config, mesh: Mesh) -> int:
    """Rows of a microbatch that a device computes at a time."""
    train = config.train
    return train.batch_size // train.microbatches // sharding.row_shards(mesh)


def choose_plan(
    config: Config,
    pair: Pair,
    mesh: Mesh,
    devices: Devices,
    kinds: Sequence[TeacherKind],
) -> Plan:
    """Chooses the plan to run: the fastest of `kinds`, `student.remat` and chunks that fits.

    `student.remat` of "auto" and `loss.chunk_tokens` of 0 are chosen. Raises `UserError` if none
    of several kinds fits, naming what is missing and settings that fit. A single kind was set by
    name and is not refused: the plan may be wrong by a few percent.
    """
    config = settle_dtype(config, devices.platform)
    # On a CPU "none" is hardly faster, and the memory is other programs' too.
    roomy = devices.platform != "cpu" and bool(devices.memory_bytes)
    remats = (config.student.remat,)
    if remats == ("auto",):
        remats = REMATS if roomy else ("full",)
    chunk = config.loss.chunk_tokens or _CHUNKS[-1]

    def plan(remat: str, kind: TeacherKind, chunk: int) -> Plan:
        return make_plan(replace_settings(config, remat, chunk), pair, mesh, devices, kind)

    tried: list[Plan] = []
    for remat, kind in itertools.product(remats, kinds):
        tried.append(plan(remat, kind, chunk))
        if not tried[-1].missing:
            break
    best = tried[-1]
    if roomy and not config.loss.chunk_tokens:
        wider = (plan(best.remat, best.kind, n) for n in _CHUNKS[:-1] if _divides(config, mesh, n))
        best = next((wide for wide in wider if not wide.missing), best)
    sizes = (f"{p.kind.name} needs {p.peak / 1e9:.2f} GB" for p in tried if p.remat == best.remat)
    offered = f"offers {best.limit / 1e9:.2f}" if best.limit else "does not report its memory"
    reason = f"{', '.join(sizes)}; the device {offered}"
    if len(kinds) > 1 and best.missing:
        remedy = _find_remedy(config, pair, mesh, devices, best.kind)
        raise UserError(
            f"this run does not fit: {reason}, {best.missing / 1e9:.2f} too little. {remedy}"
        )
    choice = _describe_kind(best.kind, reason if len(kinds) > 1 else "")
    if config.student.remat == "auto":
        choice += f"; student.remat {best.remat}, by auto"
    if not config.loss.chunk_tokens:
        choice += f"; loss.chunk_tokens {best.chunk_tokens}, by auto"
    return dataclasses.replace(best, choice=choice)


def choose_mesh(
    meshes: Sequence[Mesh], plan: Callable[[Mesh], Plan], *, asked: bool
) -> tuple[Mesh, Plan]:
    """The first mesh whose plan fits, or the last; says why if there was a choice.

    `plan` raises `UserError` where nothing fits; `asked` says that the sizes were set by name.
    """
    needs: list[str] = []
    for mesh in meshes:
        last = mesh is meshes[-1]
        try:
            made = plan(mesh)
        except UserError:
            if last:
                raise
            made = None
        if last or (made and not made.missing):
            break
        needs.append(f"fsdp={mesh.shape['fsdp']} does not fit")
    assert made is not None
    if mesh.size > 1:
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        why = ", ".join(needs) or ("asked for" if asked else "each device holds all")
        _log.info("mesh: %s: %s", sizes, why)
    return mesh, made


def _describe_kind(kind: TeacherKind, reason: str) -> str:
    """Says which kind is taken, and why where `auto` chose it."""
    if isinstance(kind, NoTeacher):
        return "no teacher: trains on the text alone"
    choice = f"{'teacher.weights' if kind.runs else 'teacher cached:'} {kind.name}"
    return choice + (f", by auto: {reason}" if reason else ": asked for")


def replace_settings(config: Config, remat: str, chunk_tokens: int) -> Config:
    """Copies the config with the plan's `student.remat` and `loss.chunk_tokens`."""
    return dataclasses.replace(
        config,
        student=dataclasses.replace(config.student, remat=remat),
        loss=dataclasses.replace(config.loss, chunk_tokens=chunk_tokens),
    )


def _find_remedy(
    config: Config, pair: Pair, mesh: Mesh, devices: Devices, kind: TeacherKind
) -> str:
    """Suggests the smallest changes with which a run fits."""
    plan, changes = take_fitting(list_plans(config, pair, mesh, devices, kind))
    flags = write_flags(changes, flatten(config))
    if not plan.missing:
        return f"It would fit with {flags} ({plan.peak / 1e9:.2f} GB)."
    other = "shorter rows (data.seq_len), a smaller model, or a larger device."
    even = f"Even with {flags} it needs {plan.peak / 1e9:.2f} GB: take" if flags else "Take"
    return f"{even} {other}"


Changed = tuple[Plan, dict[str, Any]]  # a plan, and the changes of fields that lead to it


def take_fitting(plans: Iterable[Changed]) -> Changed:
    """Takes the first plan that fits, else what `take_least` does."""
    tried: list[Changed] = []
    for changed in plans:
        if not changed[0].missing:
            return changed
        tried.append(changed)
    return take_least(tried)


def take_least(plans: Iterable[Changed]) -> Changed:
    """Takes the plan that needs the least memory; of those within 1% of it the first."""
    plans = list(plans)
    smallest = min(plan.peak for plan, _ in plans)
    return next(changed for changed in plans if changed[0].peak <= 1.01 * smallest)


def list_plans(
    config: Config,
    pair: Pair,
    mesh: Mesh,
    devices: Devices,
    kind: TeacherKind,
    only: Container[str] | None = None,
) -> Iterator[Changed]:
    """Plans that need less memory, the mildest first, and the changes of fields that lead there.

    Only fields that decide no result change, and of these `only` those.
    """
    config, least = settle_dtype(config, devices.platform), dict[str, Any]()
    if isinstance(kind, Dense) and config.teacher.weights == kind.name:
        least["teacher.weights"] = Packed.name
    kind = Packed() if isinstance(kind, Dense) else kind
    asked = replace_settings(config, "full", config.loss.chunk_tokens or _CHUNKS[-1])
    sections = asked.loss, asked.train, asked.rollout, asked.eval
    bases: dict[bool, Plan] = {}  # whether gradients of microbatches are added up: what stays
    as_asked, flat = flatten(asked), flatten(config)
    for changes in _list_milder(*sections, sharding.row_shards(mesh)):
        if only is not None and any(as_asked[k] != v for k, v in changes.items() if k not in only):
            continue
        trial = copy.deepcopy(asked)
        set_fields(trial, changes)
        adds = trial.train.microbatches > 1
        if adds not in bases:
            bases[adds] = make_plan(trial, pair, mesh, devices, kind)
        base = dataclasses.replace(bases[adds], chunk_tokens=trial.loss.chunk_tokens)
        left = _Temporaries(trial, pair, mesh, devices.platform, kind, base.gradients, free=0.0)
        by_auto = {"student.remat": "auto", "loss.chunk_tokens": 0}  # which takes these by itself
        if base.chunk_tokens != _CHUNKS[-1]:
            del by_auto["loss.chunk_tokens"]
        yield (
            dataclasses.replace(base, phases=left.plan_phases()),
            least
            | {
                name: value
                for name, value in changes.items()
                if flat[name] not in (value, by_auto.get(name, value))
            },
        )


def _list_milder(
    loss: LossConfig,
    train: TrainConfig,
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    shards: int,
) -> Iterator[dict[str, Any]]:
    """Settings that need less memory, the mildest first, by the names of their fields."""
    rows = train.batch_size // shards
    small = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    parts = sorted(n for n in {*small, *(rows // n for n in small)} if n >= train.microbatches)
    chunks = [n for n in (loss.chunk_tokens, 512, 256, 128) if n <= loss.chunk_tokens]
    evals = sorted({evaluation.batch_size, shards}, reverse=True)
    slots = {max(rollout.batch_size // n, shards) for n in (1, 4, 16)}
    answers = sorted(slots, reverse=True) if rollout.prompts else [rollout.batch_size]
    for part, chunk, held_out, written in itertools.product(parts, chunks, evals, answers):
        yield {
            "student.remat": "full",
            "loss.chunk_tokens": chunk,
            "train.microbatches": part,
            "rollout.batch_size": written,
            "eval.batch_size": held_out,
        }


def write_flags(
    changes: Mapping[str, Any], before: Mapping[str, Any], flags: Mapping[str, str] | None = None
) -> str:
    """Writes the fields that changed as a command's flags, by default `--config.FIELD`."""
    named = {k: f"--config.{k}" if flags is None else flags[k] for k in changes}
    return " ".join(f"{named[k]}={v}" for k, v in changes.items() if before[k] != v)
